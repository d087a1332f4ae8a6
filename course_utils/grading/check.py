"""`check("01-round-robin")` and `hint("01-round-robin")`: what a learner types in a notebook."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

from .task import Finding, Score, Task, copy_json
from .tasks import get_task
from .wire import plain

PUBLIC_SEED = 2026
_PRACTICE = "(Practice score. If you are graded, the grader uses other inputs.)"


def check(task_id: str) -> Score:
    """Run the functions that you wrote for a task, print what holds and what doesn't.

    Your functions are looked up where `check` is called (the notebook). Everything is
    printed to stdout, also what your code writes to stderr: nbgrader gives no points to a
    test cell that wrote to stderr. A failing answer is a score, not an exception; Ctrl-C
    (or the notebook's stop button) interrupts an endless loop.

    Raises UnknownTask (a LookupError) when no task has this id.
    """
    task = get_task(task_id)
    score = _score(task, sys._getframe(1).f_globals)
    lines = [f"{task.id}, {task.title}: {score:g} of {task.points:g} points", *_report(score)]
    if score < task.points:
        lines.append(f'Stuck? hint("{task.id}"), then level=2, level=3.')
    print("\n".join([*lines, _PRACTICE]))
    return score


def hint(task_id: str, level: int = 1) -> None:
    """Print a hint: level 1 is a nudge, 2 the way, 3 nearly the code.

    Raises UnknownTask (a LookupError) for an unknown id, ValueError for another level.
    """
    task = get_task(task_id)
    if level not in (1, 2, 3):
        raise ValueError(f"hints have the levels 1, 2 and 3, not {level!r}")
    print(f"Hint {level} of 3 for {task.id}: {task.hints[level - 1]}")
    if level < 3:
        print(f'More: hint("{task.id}", level={level + 1})')


def _score(task: Task, names: dict[str, Any]) -> Score:
    for name in task.functions:
        if not callable(names.get(name)):
            why = f"there is no function {name}: run the cell that defines it, then this one"
            return Score(task, "not_defined", why=why)
    student = SimpleNamespace(**{name: names[name] for name in task.functions})
    inputs = task.inputs(PUBLIC_SEED)
    try:
        with contextlib.redirect_stderr(sys.stdout):
            got = plain(task.run(student, copy_json(inputs)))
    except NotImplementedError:
        return Score(task, "not_attempted", why="not attempted yet")
    except (Exception, SystemExit) as error:  # the student's; Ctrl-C is not among them
        return Score(task, "error", why=_excerpt(error, student))
    findings = task.mark(inputs, got)
    return Score(task, "ok" if all(f.passed for f in findings) else "wrong", findings)


def _report(score: Score) -> list[str]:
    if not score.findings:
        return [f"  {line}" for line in score._why.splitlines()]
    ordered = sorted(score.findings, key=lambda finding: finding.passed)
    return [_line(finding) for finding in ordered]


def _line(finding: Finding) -> str:
    if finding.passed:
        return f"  passed: {finding.text} ({finding.points:g})"
    return f"  FAILED: {finding.text} ({finding.points:g}): {finding.why}"


def _excerpt(error: BaseException, student: SimpleNamespace) -> str:
    """The student's own line and the error, without the check's own frames."""
    import traceback

    try:
        message = f"{type(error).__name__}: {error}"[:500]
    except Exception:  # an exception whose __str__ fails; its type is all there is to say
        message = type(error).__name__
    codes = [getattr(function, "__code__", None) for function in vars(student).values()]
    files = {code.co_filename for code in codes if code}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    if not frames:
        return f"raised outside your code: {message}"
    frame = frames[-1]
    line = f": {frame.line}" if frame.line else ""
    return f"your code raised an error\n  line {frame.lineno} in {frame.name}{line}\n  {message}"
