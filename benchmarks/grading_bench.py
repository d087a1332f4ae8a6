"""A class of 30 submissions graded in the sandbox: how long an instructor waits.

Made-up submissions of a PyTorch exercise: the solution, blanks, and wrong answers that people
really give, each notebook with three tasks. Two sandboxes work at a time, as on two cores.
"""

import itertools
import json
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.common import quietest, row, target, write
from course_utils.grading.marking import Handed, Mark, Rules, mark_class
from course_utils.grading.sandbox import find_sandbox
from course_utils.grading.submission import read_exercise
from course_utils.timing import Timing

COURSE = Path(__file__).resolve().parent.parent
EXERCISE, STUDENTS, JOBS, LIMIT = "04", 30, 2, 180


def hand_in(folder: Path) -> list[Handed]:
    """The class: every third has the solution, every sixth a blank, the others wrong answers."""
    exercise = read_exercise(EXERCISE, COURSE)
    (solution,), (blank,) = (
        [json.loads(path.read_text()) for path in (COURSE / place).glob(f"{EXERCISE}_*.ipynb")]
        for place in ("solutions", "exercises")
    )
    wrong = {task.id: itertools.cycle(task.wrong) for task in exercise.tasks}
    handed = []
    for number in range(STUDENTS):
        notebook = blank if number % 6 == 1 else json.loads(json.dumps(solution))
        for cell in notebook["cells"]:
            name = cell["metadata"].get("nbgrader", {}).get("grade_id")
            if number % 3 and number % 6 != 1 and name in wrong:
                cell["source"] = next(wrong[name]).source
        path = folder / f"student-{number:02}.ipynb"
        path.write_text(json.dumps(notebook))
        handed.append(Handed(path.stem, path))
    return handed


def grade() -> tuple[float, list[Mark], str]:
    """Wall-clock seconds, the marks, and the sandbox's name."""
    with tempfile.TemporaryDirectory() as folder, find_sandbox() as sandbox:
        handed, rules = hand_in(Path(folder)), Rules("benchmark")
        out, start = Path(folder, "out"), time.perf_counter()
        marks = mark_class(handed, out, sandbox, rules, COURSE, jobs=JOBS)
        return time.perf_counter() - start, marks, sandbox.name


def main() -> dict:
    (seconds, marks, name), others = quietest(grade, attempts=2)
    statuses = Counter(task.status for mark in marks for task in mark.tasks)
    if len(marks) != STUDENTS or not {"ok", "wrong", "not_attempted"} <= set(statuses):
        raise RuntimeError(f"the class was not graded: {statuses}")
    each = Timing(tuple(mark.seconds for mark in marks))
    print(f"{STUDENTS} submissions in {seconds:.0f} s; one: {each}; {dict(statuses)}")
    what = f"{STUDENTS} submissions, three tasks on two ranks each, {JOBS} sandboxes at a time"
    rows = [row("one submission, from the start of its sandbox", each)]
    targets = [target(what, f"at most {LIMIT} s", f"{seconds:.0f} s", seconds <= LIMIT)]
    title = f"A class of {STUDENTS} graded: exercise {EXERCISE}, sandbox {name}"
    note = "Tasks: " + ", ".join(f"{n} {status}" for status, n in sorted(statuses.items())) + "."
    return write("grading", title, others, rows, targets, note=note)


if __name__ == "__main__":
    main()
