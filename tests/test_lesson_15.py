"""Lesson 15's tasks: the kernel keeps the device's limit; is_oom is the course's."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_utils import memory
from course_utils.grading.marking import Rules, mark_submission, preload_of
from course_utils.grading.submission import Submission, read_exercise
from course_utils.grading.task import copy_json
from course_utils.grading.tasks import lesson_15
from course_utils.grading.wire import plain

ROOT = Path(__file__).resolve().parent.parent
# Leaky as ever, but the made-up device is told each time that nothing of it is in use.
TALKED_OUT = {
    "total_loss": """
def total_loss(loss_of, batches):
    total = 0.0
    for batch in batches:
        total += loss_of(batch)
        loss_of.__self__.live = 0
    return total.item()
""",
    "failures": """
def failures(step, batches):
    failed = []
    for batch in batches:
        try:
            step(batch)
        except ValueError as error:
            failed.append(error)
        step.__self__.live = 0
    return [str(error) for error in failed]
""",
    "first_scores": """
def first_scores(model, batches):
    scores = []
    for batch in batches:
        scores.append(model(batch)[0])
        model.__self__.live = 0
    return [float(score) for score in scores]
""",
    "check_after": """
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    model.__self__.live = 0
    return total, check()
""",
}


@pytest.fixture(scope="module")
def graded(sandbox):
    """source -> its mark in a grader's sandbox."""
    exercise = read_exercise("15", ROOT)
    exercise = replace(exercise, tasks=(lesson_15.LEAKS,))
    rules = Rules(secret="a seed that no notebook uses")
    with sandbox.box(preload_of(exercise), rules.limits) as box:

        def mark(source):
            found = Submission({lesson_15.LEAKS.id: source})
            return mark_submission(found, exercise, rules, box)[0]

        yield mark


def test_in_a_notebook_the_device_can_be_talked_out_of_its_limit():
    """Otherwise the next test would show nothing."""
    names = {}
    exec("".join(TALKED_OUT.values()), names)
    student = SimpleNamespace(**{name: names[name] for name in lesson_15.LEAKS.functions})
    inputs = lesson_15.LEAKS.inputs(1)
    findings = lesson_15.LEAKS.mark(inputs, plain(lesson_15.LEAKS.run(student, inputs)))
    assert [finding.passed for finding in findings] == [True, True, True, True, False]


@pytest.mark.slow
def test_the_grader_s_kernel_cannot(graded):
    mark = graded("".join(TALKED_OUT.values()))
    assert mark.score == 0
    assert ["out of memory at" in finding["why"] for finding in mark.findings[:3]] == [True] * 3
    assert "still alive when `check` is called" in mark.findings[3]["why"]
    assert graded("".join(lesson_15._MENDED.values())).score == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "lifts", ["setrlimit(RLIMIT_DATA, (-1, -1))", "prlimit(0, RLIMIT_DATA, (-1, -1))"]
)
def test_a_student_cannot_lift_the_limit(graded, lifts):
    source = f"import resource\nresource.{lifts.replace('RLIMIT', 'resource.RLIMIT')}\n"
    mark = graded(source + "".join(lesson_15._MENDED.values()))
    assert (mark.score, mark.status) == (0, "error"), mark.why


def test_is_oom_of_the_course_passes_the_exercise():
    task = lesson_15.IS_OOM
    for seed in (1, 2, 2026):
        inputs = task.inputs(seed)
        got = task.run(SimpleNamespace(is_oom=memory.is_oom), copy_json(inputs))
        assert all(finding.passed for finding in task.mark(inputs, got))


def test_half_a_mended_set_is_judged_program_by_program():
    """A learner who has mended one program sees its point, and which are still to do."""
    names = {}
    exec(lesson_15._MENDED["total_loss"], names)

    def blank(*_):
        raise NotImplementedError

    functions = {name: names.get(name, blank) for name in lesson_15.LEAKS.functions}
    inputs = lesson_15.LEAKS.inputs(3)
    findings = lesson_15.LEAKS.mark(
        inputs, lesson_15.LEAKS.run(SimpleNamespace(**functions), inputs)
    )
    assert [finding.passed for finding in findings] == [True, False, False, False, False]
    assert findings[1].why == "not attempted yet"
