"""One definition of a task: it serves `check()` in the notebook and the instructor's grader.

A task is split so that a grader can trust the verdict: `run` is the only part that meets
the student's code, and it returns values, never a verdict. `expected` and `judge` see only
inputs and plain JSON values (see `wire.plain`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

_ID = re.compile(r"\d\d-[a-z0-9]+(-[a-z0-9]+)*")
_NOTHING = object()


@dataclass(frozen=True)
class Finding:
    """One property of an answer: what was looked at, its points, and why it failed.

    `why` is empty when the property holds. It speaks of properties (a shape, a sum, which
    rank), never of the answer.
    """

    text: str
    points: float
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why


@dataclass(frozen=True)
class Wrong:
    """A wrong answer that people really give: full function definitions, and their score."""

    name: str
    source: str
    score: float


@dataclass(frozen=True)
class Part:
    """A part of a task that a grader runs in a process of its own, with little memory.

    inputs  what `run` gets instead of the task's inputs
    room    bytes: all that the process may take beside what it has when the student's code begins
    """

    inputs: Any
    room: int
    BLOCK: ClassVar[int] = 128  # MiB; from 32 on, glibc gives a freed block back at once
    REST: ClassVar[int] = 96  # MiB, for everything that is no block

    @classmethod
    def of_blocks(cls, inputs: Any, blocks: int) -> Part:
        """A part whose memory is so many blocks of BLOCK MiB, and a little for all else.

        The blocks are so large that the rest of the process weighs nothing beside them, and need
        not be touched: the kernel counts what is asked for.
        """
        return cls(inputs, (blocks * cls.BLOCK + cls.REST) * 2**20)


@dataclass(frozen=True)
class Task:
    """A task of an exercise.

    id            "NN-name"; also the grade_id of the notebook cell with the solution
    title         one line, for people
    points        points of a complete answer
    functions     names that the student defines
    inputs        seed -> JSON; the notebook uses one public seed, a grader a secret one
    run           (student, inputs) -> values. `student` has the functions as attributes.
                  The only part that enters a sandbox, so it is self-contained: it uses no
                  global name of its module and imports what it needs inside.
    expected      inputs -> JSON; an oracle that is not derived from the solution
    judge         (inputs, expected, got) -> findings whose points add up to `points`; must
                  cope with any JSON in `got`
    hints         three levels: a nudge, the way, nearly the code
    wrong         at least two named wrong answers, each with the score it must get
    parts         inputs -> {name: Part}, where memory decides: `run` then returns {name: values}.
                  In a notebook it runs once, with the inputs themselves; a grader runs each
                  part alone, within a limit that the kernel keeps, and joins what they return
    self_reported points that rest on what the student's own process says about itself (a
                  device name, bytes sent): at most a fifth of `points`
    """

    id: str
    title: str
    points: float
    functions: tuple[str, ...]
    inputs: Callable[[int], Any]
    run: Callable[..., Any]
    expected: Callable[[Any], Any]
    judge: Callable[[Any, Any, Any], list[Finding]]
    hints: tuple[str, str, str]
    wrong: tuple[Wrong, ...]
    parts: Callable[[Any], dict[str, Part]] | None = None
    self_reported: float = 0

    def __post_init__(self) -> None:
        problems = {
            "the id is not of the form NN-name": not _ID.fullmatch(self.id),
            "points must be positive": not self.points > 0,
            "no function is named": not self.functions,
            "it needs three hints": len(self.hints) != 3 or not all(self.hints),
            "it needs two named wrong answers": len({w.name for w in self.wrong}) < 2,
            "a wrong answer gets full marks": any(
                not 0 <= w.score < self.points for w in self.wrong
            ),
            "over a fifth of the points is self-reported": self.self_reported * 5 > self.points,
        }
        for problem, found in problems.items():
            if found:
                raise ValueError(f"task {self.id!r}: {problem}")

    def mark(self, inputs: Any, got: Any) -> list[Finding]:
        """Judge the values that `run` returned; raises ValueError if the points don't add up."""
        findings = self.judge(inputs, self.expected(inputs), got)
        total = sum(finding.points for finding in findings)
        if not math.isclose(total, self.points):
            raise ValueError(f"task {self.id}: findings add up to {total}, not {self.points}")
        return findings


class Score(float):
    """Points reached. Its repr is the number, which nbgrader reads as partial credit.

    `points` is the maximum, `status` one of ok, wrong, not_attempted, not_defined, error;
    `findings` says which properties held.
    """

    task_id: str
    points: float
    status: str
    findings: tuple[Finding, ...]

    def __new__(
        cls, task: Task, status: str, findings: Sequence[Finding] = (), why: str = ""
    ) -> Score:
        score = super().__new__(cls, sum(f.points for f in findings if f.passed))
        score.task_id, score.points, score.status = task.id, task.points, status
        score.findings = tuple(findings)
        score._why = why or next((f"{f.text}: {f.why}" for f in findings if not f.passed), "")
        return score

    def __repr__(self) -> str:
        return float.__repr__(self)

    def _repr_html_(self) -> str:
        """One sentence for people; the details are in the printed text above it."""
        import html

        words = {"ok": "complete", "not_attempted": "not attempted", "not_defined": "not defined"}
        head = f"{self.task_id}: {self:g} of {self.points:g} points"
        state = words.get(self.status, "not yet complete")
        why = f" First: {html.escape(self._why)}." if state != "not attempted" and self._why else ""
        return f"<p><strong>{html.escape(head)}</strong> ({state}).{why}</p>"


def copy_json(value: Any) -> Any:
    """A deep copy, and proof that the value is JSON: what a student gets may be changed."""
    return json.loads(json.dumps(value, allow_nan=False))


# --- for judges: all of these cope with any JSON value ------------------------------------


def is_number(value: Any) -> bool:
    """True for an int or float of a sane size; a bool is no number here."""
    return type(value) in (int, float) and abs(value) < 1e300


def close(got: Any, want: float, relative: float = 1e-6) -> bool:
    """True when `got` is a number within the relative tolerance of `want`."""
    return is_number(got) and math.isclose(got, want, rel_tol=relative, abs_tol=1e-12)


def same_matrix(got: Any, want: list[list[float]], relative: float = 1e-6) -> bool:
    """True when `got` is a list of rows of numbers like `want`."""
    return is_list(got, len(want)) and all(
        is_list(row, len(goal))
        and all(close(a, b, relative) for a, b in zip(row, goal, strict=True))
        for row, goal in zip(got, want, strict=True)
    )


def is_list(value: Any, length: int | None = None) -> bool:
    return type(value) is list and (length is None or len(value) == length)


def item(value: Any, key: Any) -> Any:
    """`value[key]` of a list or dict, or an object that equals nothing when there is none."""
    if type(value) is list and type(key) is int and 0 <= key < len(value):
        return value[key]
    if type(value) is dict and key in value:
        return value[key]
    return _NOTHING


def count(number: int, noun: str, plural: str = "") -> str:
    """The number with its noun: "1 time", "4 times", "2 entries"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def describe(value: Any) -> str:
    """What kind of value this is, in words; never its content."""
    if type(value) is dict and set(value) == {"$"}:
        return str(value["$"])
    if type(value) in (list, dict):
        kind = "list or tuple" if type(value) is list else "dict"
        return (
            f"a {kind} of {count(len(value), 'entry', 'entries')}" if value else f"an empty {kind}"
        )
    return {
        "NoneType": "nothing (None)",
        "bool": "True or False",
        "int": "a whole number",
        "float": "a number",
        "str": "text",
    }.get(type(value).__name__, "nothing")
