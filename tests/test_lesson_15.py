"""Lesson 15's tasks: the kernel keeps the device's limit; is_oom is the course's."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_tasks import findings_of

from course_utils import memory
from course_utils.grading.marking import Rules, mark_submission
from course_utils.grading.sandbox import Limits, MiB, SandboxError
from course_utils.grading.submission import Submission, read_exercise
from course_utils.grading.task import copy_json
from course_utils.grading.tasks import lesson_15

ROOT = Path(__file__).resolve().parent.parent
# Leaky as ever, but the made-up device is told each time that nothing of it is in use.
LOOP = "    for batch in batches:\n"
TALKED_OUT = ""
for name, called in zip(lesson_15._LEAKY, ("loss_of", "step", "model", "model"), strict=True):
    tell = f"{called}.__self__.live = 0\n"
    source = lesson_15._LEAKY[name].replace(LOOP, f"{LOOP}        {tell}")
    TALKED_OUT += source.replace("    return total, check", f"    {tell}    return total, check")
assert TALKED_OUT.count("live = 0") == 5


def test_in_a_notebook_the_device_can_be_talked_out_of_its_limit():
    """Otherwise the next test would show nothing."""
    findings = findings_of(lesson_15.LEAKS, TALKED_OUT)
    assert [finding.passed for finding in findings] == [True, True, True, True, False]


@pytest.mark.slow
def test_the_grader_s_kernel_cannot(graded):
    mark = graded(lesson_15.LEAKS, TALKED_OUT)
    assert mark.score == 0
    assert ["out of memory at" in finding["why"] for finding in mark.findings[:3]] == [True] * 3
    assert "still alive when `check` is called" in mark.findings[3]["why"]
    assert graded(lesson_15.LEAKS, "".join(lesson_15._MENDED.values())).score == 5


@pytest.mark.slow
def test_a_library_s_threads_do_not_take_the_memory_of_the_device(graded):
    source = """
import matplotlib.pyplot, threading
for _ in range(8):  # 8 MiB each
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    source += "".join(lesson_15._MENDED.values())
    assert graded(lesson_15.LEAKS, source).score == lesson_15.LEAKS.points


def test_a_sandbox_that_is_too_small_for_the_device_is_said(sandbox):
    exercise = replace(read_exercise("15", ROOT), tasks=(lesson_15.LEAKS,))
    rules = Rules(secret="a seed that no notebook uses", limits=Limits(memory=2000 * MiB))
    found = Submission({lesson_15.LEAKS.id: TALKED_OUT})
    needed = pytest.raises(SandboxError, match="15-leaks needs more memory: .* --memory 2144")
    with sandbox.box((), rules.limits) as box, needed:
        mark_submission(found, exercise, rules, box)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lifts", ["setrlimit(RLIMIT_DATA, (-1, -1))", "prlimit(0, RLIMIT_DATA, (-1, -1))"]
)
def test_a_student_cannot_lift_the_limit(graded, lifts):
    source = f"import resource\nresource.{lifts.replace('RLIMIT', 'resource.RLIMIT')}\n"
    mark = graded(lesson_15.LEAKS, source + "".join(lesson_15._MENDED.values()))
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
