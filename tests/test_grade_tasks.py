"""Every task as the grader sees it: in the sandbox, with inputs that no notebook has shown.

The solution gets everything, the blank nothing, each named wrong answer what it declares. Where
a run takes seconds, a wrong answer gets the notebook's inputs here, and test_tasks does not try
it once more.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from test_tasks import is_slow

from course_utils.grading import all_tasks
from course_utils.grading.check import PUBLIC_SEED
from course_utils.grading.marking import Rules, mark_submission, preload_of
from course_utils.grading.selftest import blank_of, probe_all, solution_of
from course_utils.grading.submission import Submission, read_exercise

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = sorted(path.name[:2] for path in (ROOT / "exercises").glob("*.ipynb"))
RULES = Rules(secret="a seed that no notebook uses")


class Public(Rules):
    def inputs(self, task):
        return [task.inputs(PUBLIC_SEED)]


WRONG = {number: [] for number in NUMBERS}
for task in all_tasks().values():
    WRONG.get(task.id[:2], []).extend(task.wrong)  # 00 is practice, in the lesson itself
# In the order of the exercises, so that each needs only one warm sandbox.
CASES = [
    pytest.param(number, wrong, id=f"{number} {wrong.name if wrong else 'solution and blank'}")
    for number in NUMBERS
    for wrong in [None, *WRONG[number]]
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def warm(sandbox):
    """exercise number -> (exercise, its warm sandbox); one at a time, the last one stays."""
    boxes = {}

    def get(number):
        if number not in boxes:
            for _, old in boxes.values():
                old.close()
            boxes.clear()
            exercise = read_exercise(number, ROOT)
            boxes[number] = exercise, sandbox.box(preload_of(exercise), RULES.limits)
        return boxes[number]

    yield get
    for _, box in boxes.values():
        box.close()


def test_the_sandbox_holds(sandbox):
    assert {what: came for what, came in probe_all(sandbox) if came} == {}


@pytest.mark.parametrize(("number", "wrong"), CASES)
def test_graded_as_declared(warm, number, wrong):
    exercise, box = warm(number)
    if wrong:
        task = next(task for task in exercise.tasks if wrong in task.wrong)
        alone = replace(exercise, tasks=(task,))
        rules = Public(secret="") if is_slow(task) else RULES
        (mark,) = mark_submission(Submission({task.id: wrong.source}), alone, rules, box)
        assert mark.score == wrong.score, f"{mark.status}: {mark.why}"
        assert mark.status != "ok" and mark.why
        return
    solved = mark_submission(solution_of(exercise, ROOT), exercise, RULES, box)
    assert [(m.task, m.score, m.status, m.why) for m in solved] == [
        (task.id, task.points, "ok", "") for task in exercise.tasks
    ]
    blank = mark_submission(blank_of(exercise, ROOT), exercise, RULES, box)
    assert {(m.score, m.status) for m in blank} == {(0, "not_attempted")}
