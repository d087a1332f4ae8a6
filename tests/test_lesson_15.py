"""Lesson 15's tasks: a leak shows from outside the process too; is_oom is the course's."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from course_utils import memory
from course_utils.grading.task import copy_json
from course_utils.grading.tasks import lesson_15

# The parent sets no limit inside the device, and asks the system for the child's peak.
CHILD = """
import json, sys
from types import SimpleNamespace
import torch
from course_utils.grading.tasks.lesson_15 import LEAKS

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

source, program = json.load(sys.stdin)
names = {}
exec(source, names)
student = SimpleNamespace(**{name: names[name] for name in LEAKS.functions})
inputs = LEAKS.inputs(1) | {"limit": 10_000}
before = peak()
def only(name):
    return getattr(student, name) if name == program else lambda *_: None
LEAKS.run(SimpleNamespace(**{name: only(name) for name in LEAKS.functions}), inputs)
print(peak() - before)
"""


def growth(sources, program):
    """MiB by which a process that runs one program grows at its peak."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps(["".join(sources.values()), program]),
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("program", ["total_loss", "failures", "first_scores"])
def test_a_leak_shows_from_outside_the_process(program):
    leaky, mended = growth(lesson_15._LEAKY, program), growth(lesson_15._MENDED, program)
    assert leaky > 150 and mended < 50, f"{program}: leaky {leaky} MiB, mended {mended} MiB"


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
