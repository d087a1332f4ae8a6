"""`course-grade selftest`: does this machine's sandbox hold, and do the tasks work in it?

The probes are programs that try what a cheat would try, in a real sandbox. The tasks are run with
the reference solution, the blank, and every named wrong answer.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .marking import Rules, mark_submission, preload_of
from .sandbox import Answer, Box, Limits, MiB, Sandbox, find_sandbox
from .submission import Exercise, Submission, exercise_files, load, read_exercise, take

COURSE = Path(__file__).resolve().parents[2]
_RUN = "def run(student, inputs):\n    return student.probe(inputs)\n"
_SHORT = Limits(seconds=5, memory=1024 * MiB, processes=48)


@dataclass(frozen=True)
class Probe:
    """A program for the sandbox, and what must come of it.

    holds: (answer, inputs) -> True when the sandbox kept it from what it tried
    """

    what: str
    source: str
    holds: Callable[[Answer, dict], bool]


def _value(wanted: Any) -> Callable[[Answer, dict], bool]:
    return lambda answer, inputs: answer.status == "replied" and answer.value == wanted


def _status(*wanted: str) -> Callable[[Answer, dict], bool]:
    return lambda answer, inputs: answer.status in wanted


def _not_told(answer: Answer, inputs: dict) -> bool:
    return answer.status == "replied" and inputs["canary"] not in json.dumps(answer.value)


PROBES = (
    Probe(
        "a correct answer arrives", "def probe(inputs): return [1, 2.5, 'x']", _value([1, 2.5, "x"])
    ),
    Probe(
        "no network: this machine's own ports are not reached",
        """
import socket
def probe(inputs):
    try:
        socket.create_connection(("127.0.0.1", inputs["port"]), timeout=2)
    except OSError:
        return "refused"
""",
        _value("refused"),
    ),
    Probe(
        "no files of this machine beside the libraries",
        """
import os
def probe(inputs):
    return [os.path.exists(inputs["file"]), os.path.exists(inputs["course"])]
""",
        _value([False, False]),
    ),
    Probe(
        "no secrets in the environment",
        "import os\ndef probe(inputs): return dict(os.environ)",
        _not_told,
    ),
    Probe(
        "no task definitions: the expected values are not there",
        """
def probe(inputs):
    try:
        import course_utils.grading.tasks
    except ImportError:
        return "not there"
""",
        _value("not there"),
    ),
    Probe(
        "nothing can be written but in /tmp and /dev/shm",
        """
import sys
def probe(inputs):
    done = []
    for place in ("/", "/usr", "/box", "/etc", sys.prefix):
        try:
            open(place + "/written", "w").close()
            done.append(place)
        except OSError:
            pass
    return done
""",
        _value([]),
    ),
    Probe(
        "no rights of the administrator",
        """
import os
def probe(inputs):
    try:
        os.setuid(0)
        os.sethostname(b"mine")
        return "allowed"
    except OSError:
        return "refused"
""",
        _value("refused"),
    ),
    Probe(
        "an endless loop is ended", "def probe(inputs):\n    while True: pass", _status("timeout")
    ),
    Probe(
        "too much memory is noticed",
        "def probe(inputs): return len([bytearray(2**20) for _ in range(2000)])",
        _status("memory"),
    ),
    Probe(
        "a fork bomb stops at the limit",
        """
import os, time
def probe(inputs):
    started = 0
    try:
        for _ in range(1000):
            if os.fork() == 0:
                time.sleep(60)
            started += 1
    except OSError:
        return started < 100
    return False
""",
        _value(True),
    ),
    Probe(
        "a process left behind is gone for the next task",
        """
import os
def probe(inputs): return len([name for name in os.listdir("/proc") if name.isdigit()]) < 4
""",
        _value(True),
    ),
)


def probe_all(sandbox: Sandbox) -> Iterator[tuple[str, str]]:
    """(what was tried, "" or what came of it instead) for each probe."""
    canary = f"canary-{os.urandom(8).hex()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        tempfile.NamedTemporaryFile("w", prefix="canary-") as file,
        sandbox.box(limits=_SHORT) as box,
    ):
        file.write(canary)
        file.flush()
        os.environ["COURSE_CANARY"] = canary
        inputs = {"port": listener.getsockname()[1], "file": file.name, "canary": canary}
        inputs["course"] = str(COURSE / "README.md")
        try:
            for probe in PROBES:
                request = {"trusted": "", "cells": [probe.source], "functions": ["probe"]}
                given = {**inputs, "canary": ""}
                answer = box.ask({**request, "run": _RUN, "run_name": "run", "inputs": given})
                came = f"{answer.status}: {str(answer.value)[:80]} {answer.why}".strip()
                yield probe.what, "" if probe.holds(answer, inputs) else came
        finally:
            del os.environ["COURSE_CANARY"]


def solution_of(exercise: Exercise, course: Path) -> Submission:
    """The reference solution, as if a student had handed it in."""
    return take(load(next((course / "solutions").glob(f"{exercise.number}_*.ipynb"))), exercise)


def blank_of(exercise: Exercise, course: Path) -> Submission:
    """The exercise as it is released."""
    return take(load(exercise_files(course)[exercise.number]), exercise)


def try_exercise(exercise: Exercise, course: Path, rules: Rules, box: Box) -> Iterator[tuple]:
    """(what was tried, "" or what came of it instead): solution, blank, each wrong answer."""
    for mark in mark_submission(solution_of(exercise, course), exercise, rules, box):
        right = (mark.status, mark.score) == ("ok", mark.points)
        yield (
            f"{mark.task}: the solution",
            "" if right else f"{mark.status} {mark.score:g} {mark.why}",
        )
    for mark in mark_submission(blank_of(exercise, course), exercise, rules, box):
        right = (mark.status, mark.score) == ("not_attempted", 0)
        yield f"{mark.task}: the blank", "" if right else f"{mark.status} {mark.score:g} {mark.why}"
    for task in exercise.tasks:
        alone = replace(exercise, tasks=(task,))
        for wrong in task.wrong:
            (mark,) = mark_submission(Submission({task.id: wrong.source}), alone, rules, box)
            came = f"{mark.score:g} instead of {wrong.score:g} ({mark.status}: {mark.why})"
            yield f"{task.id}: {wrong.name}", "" if mark.score == wrong.score else came


def selftest(arguments: Any) -> int:
    """Print what holds; 0 when all does, 1 otherwise.

    arguments: `sandbox` (a name or "auto"), `exercise` (numbers; the default is 04,
    with PyTorch and ranks, and 13, which needs no framework), `all` (every exercise: many minutes).
    """
    from rich.console import Console
    from rich.markup import escape

    console, failed, start = Console(highlight=False), 0, time.monotonic()
    numbers = list(exercise_files(COURSE)) if arguments.all else arguments.exercise
    numbers = numbers or ["04", "13"]
    with find_sandbox(arguments.sandbox) as sandbox:
        console.print(f"sandbox: {sandbox.name}")

        def show(results: Iterator[tuple[str, str]]) -> None:
            nonlocal failed
            for what, came in results:
                failed += bool(came)
                word = (
                    f"[red]FAILED[/red] {escape(what)}: {escape(came)}"
                    if came
                    else f"holds  {escape(what)}"
                )
                console.print(f"  {word}")

        show(probe_all(sandbox))
        for number in numbers:
            exercise = read_exercise(number, COURSE)
            console.print(f"exercise {number}")
            rules = Rules(secret=os.urandom(16).hex())
            with sandbox.box(preload_of(exercise), rules.limits) as box:
                show(try_exercise(exercise, COURSE, rules, box))
    seconds = time.monotonic() - start
    console.print(f"{'all holds' if not failed else f'{failed} FAILED'}, {seconds:.0f} s")
    return int(bool(failed))
