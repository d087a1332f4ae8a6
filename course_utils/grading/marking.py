"""Marks: from a student's notebook to points for each task, and to those of a whole class.

The parent of the sandbox decides: it draws the inputs from a secret seed, computes the expected
values after the student's process has ended, and compares. What is not proved gets no points.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import queue
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from .._cpu import read_cpu
from .sandbox import NO_MEMORY_LEFT, PACKAGE, Answer, Box, Limits, MiB, Sandbox, SandboxError
from .submission import (
    BadNotebook,
    Exercise,
    Submission,
    exercise_number,
    load,
    read_exercise,
    take,
)
from .task import Finding, Task, copy_json, item
from .wire import one_line, plain

STATUSES = (
    "ok", "wrong", "not_attempted", "error", "timeout", "memory", "crash", "bad_reply",
    "bad_notebook", "duplicate_id", "missing_cell",
)  # fmt: skip
# Imported before any student's code, where a task uses them; with them what their first optimizer
# imports, and what each rank needs.
_PRELOAD = {"torch": ("torch._dynamo",), "tensorflow": (), "numpy": ()}
_RANKS = ("numpy.random", "cloudpickle")


@dataclass
class TaskMark:
    """One task of one submission. `why`: the first property that failed, or what went wrong."""

    task: str
    title: str
    status: str
    score: float
    points: float
    why: str = ""
    findings: list[dict] = field(default_factory=list)


@dataclass
class Mark:
    """One submission. `status`: ok, or bad_notebook when nothing of it could be read.

    id, order  as in Handed
    digest     of the notebook that was marked; `replaced`: of those that it came after
    """

    student: str
    file: str
    exercise: str
    status: str
    tasks: list[TaskMark]
    notes: list[str]
    seconds: float
    key: str = ""
    id: str = ""
    order: tuple[int, float, float] = (0, 0.0, 0.0)
    digest: str = ""
    replaced: list[str] = field(default_factory=list)

    @property
    def score(self) -> float:
        return sum(task.score for task in self.tasks)

    @property
    def points(self) -> float:
        return sum(task.points for task in self.tasks)

    def as_json(self) -> dict:
        return {**asdict(self), "score": self.score, "points": self.points}

    @classmethod
    def from_json(cls, data: dict) -> Mark:
        tasks = [TaskMark(**task) for task in data["tasks"]]
        names = [name for name in cls.__dataclass_fields__ if name != "tasks" and name in data]
        own = {name: data[name] for name in names}
        return cls(tasks=tasks, **own)


@dataclass(frozen=True)
class Handed:
    """What a student handed in.

    path      the notebook; None when there is none, and `problem` says so
    id        the platform's own number of the student
    file      its name, as the student chose it
    exercise  the number that it says of itself; "" when it says none
    order     (1 when it is of the right exercise, attempt, time): the greatest counts. 0: not known
    result    the name of the result's file, where earlier runs have one for this student
    replaced  digests of the notebooks that it comes after
    """

    student: str
    path: Path | None
    id: str = ""
    file: str = ""
    exercise: str = ""
    order: tuple[int, float, float] = (0, 0.0, 0.0)
    problem: str = ""
    result: str = ""
    replaced: tuple[str, ...] = ()

    @property
    def result_name(self) -> str:
        return self.result or result_name(self.student, self.id)

    def digest(self) -> str:
        """Of the notebook; of why there is none, where it cannot be read."""
        try:
            with open(self.path or "", "rb") as file:  # of any size
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            why = self.problem or error.strerror or str(error)
            return hashlib.sha256(why.encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True)
class Rules:
    """What a class is graded with.

    secret: text from which all inputs are drawn; extra: further inputs by task id, from outside
    the repository; a property of an answer holds only if it holds for all of them
    """

    secret: str
    limits: Limits = Limits()
    extra: dict[str, list] = field(default_factory=dict)

    def seed(self, task: Task) -> int:
        digest = hashlib.sha256(f"{self.secret}\0{task.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    def inputs(self, task: Task) -> list:
        """All inputs of a task, each in the form that its `inputs` returns."""
        return [task.inputs(self.seed(task)), *self.extra.get(task.id, [])]


def mark_submission(
    found: Submission, exercise: Exercise, rules: Rules, box: Box
) -> list[TaskMark]:
    """Every task of the exercise, marked one after the other in one sandbox."""
    marks, cells = [], []
    for task in exercise.tasks:
        if task.id in found.problems:
            status, why = found.problems[task.id]
            marks.append(_nothing(task, status, why))
            continue
        cells.append(found.cells[task.id])  # after those of the earlier tasks
        marks.append(_mark_task(task, cells, exercise.trusted[task.id], rules, box))
    return marks


def _nothing(task: Task, status: str, why: str) -> TaskMark:
    return TaskMark(task.id, task.title, status, 0, task.points, why)


def _mark_task(task: Task, cells: list[str], trusted: str, rules: Rules, box: Box) -> TaskMark:
    together: list[Finding] = []
    for inputs in rules.inputs(task):
        answer = _ask(task, cells, trusted, inputs, box)
        if answer.status != "replied":
            return _nothing(task, answer.status, answer.why)
        together = _both(together, _judge(task, inputs, answer))
    score = sum(finding.points for finding in together if finding.passed)
    failed = [finding for finding in together if not finding.passed]
    why = f"{failed[0].text}: {failed[0].why}" if failed else ""
    status = "wrong" if failed else "ok"
    return TaskMark(
        task.id, task.title, status, score, task.points, why, [asdict(f) for f in together]
    )


def _ask(task: Task, cells: list[str], trusted: str, inputs: Any, box: Box) -> Answer:
    """What the student's code returned; where the task has parts, those of all of them, joined.

    A part that was not attempted is left out. Any other that returned nothing ends the task.
    """
    if task.parts is None:
        return box.ask(_request(task, cells, trusted, inputs, None))
    values, parts = {}, task.parts(inputs)
    needed = max(part.room for part in parts.values()) // MiB + 1024  # Python and the framework
    if needed * MiB > box.limits.memory:
        raise SandboxError(f"{task.id} needs more memory: run it again with --memory {needed}")
    for name, part in parts.items():
        answer = box.ask(_request(task, cells, trusted, part.inputs, part.room))
        if answer.status == "replied":
            values[name] = item(plain(answer.value), name)
        elif answer.status != "not_attempted":
            return answer
    return Answer("replied", values) if values else answer


def _request(task: Task, cells: list[str], trusted: str, inputs: Any, room: int | None) -> dict:
    return {
        "trusted": trusted,
        "cells": cells,
        "functions": task.functions,
        "run": inspect.getsource(task.run),
        "run_name": task.run.__name__,
        "inputs": copy_json(inputs),
        "room": room,
    }


def _judge(task: Task, inputs: Any, answer: Answer) -> list[Finding]:
    """The findings; a value that the judge cannot cope with proves nothing."""
    try:
        findings = task.mark(inputs, plain(answer.value))
        return [replace(finding, why=one_line(finding.why)) for finding in findings]
    except Exception as error:
        why = f"the answer could not be judged ({type(error).__name__})"
        return [Finding("the answer can be judged", task.points, why)]


def _both(before: list[Finding], now: list[Finding]) -> list[Finding]:
    """The findings of several inputs as one list: a property holds if it holds each time."""
    if not before:
        return now
    if len(before) != len(now):  # the one that is worth less, whole
        return min(before, now, key=lambda all: sum(f.points for f in all if f.passed))
    return [old if not old.passed else new for old, new in zip(before, now, strict=True)]


def preload_of(exercise: Exercise) -> tuple[str, ...]:
    """Modules that the sandbox may import before it gets any code: they cost seconds."""
    sources = [
        *exercise.trusted.values(),
        *(inspect.getsource(task.run) for task in exercise.tasks),
    ]
    text, found = "\n".join(sources), []
    for name, more in _PRELOAD.items():
        if f"import {name}" in text or f"from {name}" in text or f'framework="{name}"' in text:
            found += [name, *more]
    return (*found, *_RANKS) if found else ()


# --- a class ----------------------------------------------------------------------------------


def mark_class(
    handed: Iterable[Handed],
    out: Path,
    sandbox: Sandbox,
    rules: Rules,
    course: Path,
    *,
    exercise: str | None = None,
    jobs: int = 1,
    done: Callable[[Mark], None] = lambda mark: None,
) -> list[Mark]:
    """Mark every notebook; the result of each is a file in `out`, written when it is finished.

    A second call goes on where the first was stopped: what is marked already, with the same
    notebook, rules and course, is read from its file. `done` is called with each mark.
    Raises SandboxError when the sandbox does not start, or may not take the memory that a task
    needs; a bad notebook is a mark.
    """
    out.mkdir(parents=True, exist_ok=True)
    code = code_digest(course)
    with ThreadPoolExecutor(jobs, initializer=_keep_to, initargs=(_shares(jobs),)) as pool:
        waiting = [
            pool.submit(_mark_or_read, one, out, sandbox, rules, course, exercise, code)
            for one in handed
        ]
        try:
            for future in as_completed(waiting):
                done(future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in waiting]


def _shares(jobs: int) -> queue.SimpleQueue:
    """For each job the cores of its own; all of them, where there are fewer cores than jobs."""
    shares: queue.SimpleQueue = queue.SimpleQueue()
    cpu, can_pin, _ = read_cpu()
    if can_pin:  # not on macOS
        cores = cpu["cores"]
        for job in range(jobs):
            shares.put(cores[job::jobs] if jobs <= len(cores) else cores)
    return shares


def _keep_to(shares: queue.SimpleQueue) -> None:
    """Keep this thread, and with it each sandbox that it starts, to one of the shares.

    A program that spins would else take the cores of its neighbours' ranks, which are timed.
    """
    if not shares.empty():
        os.sched_setaffinity(0, shares.get())


def _mark_or_read(one: Handed, out, sandbox, rules, course, exercise, code) -> Mark:
    key, path = _key(one, rules, exercise, code), out / f"{one.result_name}.json"
    before = read_mark(path)
    if before and before.key == key:
        return before
    try:
        mark = mark_file(one, sandbox, rules, course, exercise)
        if any(task.why == NO_MEMORY_LEFT for task in mark.tasks):
            key = ""  # perhaps another's fault
    except SandboxError:
        raise
    except Exception as error:  # one notebook must not stop a class; the next run tries it again
        notes = [f"the grader failed on this notebook, please report it: {one_line(repr(error))}"]
        mark = Mark(one.student, _file(one), exercise or "", "bad_notebook", [], notes, 0.0)
        key = ""
    mark.key, mark.id = key, one.id
    mark.order, mark.digest, mark.replaced = one.order, one.digest(), list(one.replaced)
    write_whole(path, json.dumps(mark.as_json(), indent=1))
    return mark


def mark_file(
    one: Handed, sandbox: Sandbox, rules: Rules, course: Path, exercise: str | None = None
) -> Mark:
    """Mark one notebook in a sandbox of its own."""
    start = time.monotonic()
    try:
        if one.path is None:
            raise BadNotebook(one.problem)
        cells = load(one.path)
        given = read_exercise(exercise or exercise_number(cells), course)
    except (BadNotebook, OSError) as error:
        tasks = []
        if exercise:
            given = read_exercise(exercise, course)
            tasks = [_nothing(task, "bad_notebook", str(error)) for task in given.tasks]
        notes = [str(error)]
        return Mark(one.student, _file(one), exercise or "", "bad_notebook", tasks, notes, 0.0)
    found = take(cells, given)
    with sandbox.box(preload_of(given), rules.limits) as box:
        tasks = mark_submission(found, given, rules, box)
    seconds = round(time.monotonic() - start, 2)
    return Mark(one.student, _file(one), given.number, "ok", tasks, found.notes, seconds)


def _file(one: Handed) -> str:
    return one.file or (one.path.name if one.path else "")


def result_name(student: str, number: str = "") -> str:
    """A file name for the result of this student, whatever characters the name has.

    Two people of one name have numbers of their platform to tell them apart.
    """
    safe = "".join(letter if letter.isalnum() else "-" for letter in _bare(student, number))[:60]
    who = (number or student).encode("utf-8", "replace")
    return f"{safe}-{hashlib.sha256(who).hexdigest()[:8]}"


def _bare(student: str, number: str) -> str:
    """The name alone: without the number that tells two people of one name apart."""
    return student.removesuffix(f" ({number})") if number else student


def read_mark(path: Path) -> Mark | None:
    """The mark in a result file; a damaged file holds none."""
    try:
        return Mark.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


# --- several runs into one folder ---------------------------------------------------------------


class Joined(NamedTuple):
    """What a student handed in, the mark that is there already, and whether that one counts."""

    handed: Handed
    before: Mark | None
    older: bool


def join(handed: Iterable[Handed], out: Path) -> tuple[list[Joined], list[str]]:
    """What was handed in, under the names and numbers of the results in `out`; and notes.

    A student is known by the platform's number; by the name where one of the two has no number,
    as a notebook that came by mail.
    """
    known = {path.stem: mark for path in sorted(out.glob("*.json")) if (mark := read_mark(path))}
    joined, notes = [], []
    for one in handed:
        same = _rows(one, known)
        if len(same) > 1:
            notes.append(
                f"{one.student}: {len(same)} students have this name, so the notebook has a row "
                f"of its own. If it is one of them, put the number into the file's name: "
                f"{one.student} ({known[same[0]].id}).ipynb"
            )
        mark = known.pop(same[0]) if len(same) == 1 else None
        number = one.id or (mark.id if mark else "")
        older = mark is not None and _is_older(one, mark)
        name = mark.student if mark else _bare(one.student, number)
        one = replace(one, student=name, id=number)
        joined.append(Joined(_after(one, same[0], mark) if mark else one, mark, older))
    return joined, notes


def _rows(one: Handed, known: dict[str, Mark]) -> list[str]:
    """Names of the results that may be this student's: several when the name says too little."""
    names = _names(one.student, one.id)
    for fits in (
        lambda mark: one.id and mark.id == one.id,
        lambda mark: not one.id and not mark.id and mark.student == one.student,
        lambda mark: not (one.id and mark.id) and names & _names(mark.student, mark.id),
    ):
        if same := [stem for stem, mark in known.items() if fits(mark)]:
            return same
    return []


def _names(student: str, number: str) -> set[str]:
    return {student, f"{student} ({number})"} if number else {student}


def _is_older(one: Handed, mark: Mark) -> bool:
    """Whether the notebook came before the one that was marked, as far as that is known.

    One of the right exercise counts before any other; then the attempt that the platform names,
    where both have one; then the time. Without times it is the one that was given first.
    """
    right, attempt, written = one.order
    digest = one.digest()
    if digest == mark.digest:
        return False
    if right != mark.order[0]:
        return right < mark.order[0]
    if attempt and mark.order[1] and attempt != mark.order[1]:
        return attempt < mark.order[1]
    if digest in mark.replaced and (attempt or written <= mark.order[2]):
        return True  # the same export again, whose files may have the time of the download
    return 0 < written < mark.order[2]


def _after(one: Handed, result: str, mark: Mark) -> Handed:
    """With the mark's place: what is not known of its order is taken from the mark."""
    right, attempt, written = one.order
    order = (right, attempt or mark.order[1], written or mark.order[2])
    if one.digest() == mark.digest:
        order, replaced = max(order, tuple(mark.order)), mark.replaced
    else:
        replaced = [*mark.replaced, mark.digest]
    return replace(one, result=result, order=order, replaced=tuple(replaced))


def code_digest(course: Path) -> str:
    """Of what marks depend on beside notebook and rules: this code and the exercises."""
    digest = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *(course / "exercises").glob("*.ipynb")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(one: Handed, rules: Rules, exercise: str | None, code: str) -> str:
    """Changes whenever a mark might: with the notebook, the rules, the exercises, or this code."""
    digest = hashlib.sha256(code.encode())
    digest.update(one.digest().encode())
    digest.update(
        json.dumps([rules.secret, asdict(rules.limits), rules.extra, exercise, one.id]).encode()
    )
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all: a run that is killed in here leaves no half of a result."""
    half = path.with_suffix(f".{os.getpid()}-{random.randrange(10**9)}.part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
