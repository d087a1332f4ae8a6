"""Read the py:percent sources in `source/` and refuse what must not be built.

The format is described in docs/authoring.md. Every refusal is a `SourceError`
that names the file and the line.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
# nbgrader acts on these too; we use none of them, so one that appears is a mistake.
FOREIGN = re.compile(r"(BEGIN|END) (HIDDEN TESTS|MARK SCHEME)|(HASHED )?AUTOTEST")
THEN_NOW = {"then", "now", "since"}  # rows of docs/then_now.md, see tools/then_now.py
CELL_KEYS = {"tags", "task", "test", "slideshow"} | THEN_NOW
EXTRAS = {"torch", "tensorflow", "peers", "experiment"}


class SourceError(Exception):
    """A source that cannot be built; the message starts with file:line."""


@dataclass
class Source:
    """One py:percent file: its notebook, and the line on which each cell starts."""

    path: Path
    notebook: NotebookNode
    starts: list[int]  # 1-based line of each cell's "# %%"
    generated: list[tuple[int, int]] = field(default_factory=list)  # line ranges the build made

    def fail(self, line: int, message: str) -> SourceError:
        shown = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return SourceError(f"{shown}:{line}: {message}")

    def line_of(self, cell_index: int, text: str) -> int:
        """Line of the file on which `text` stands inside a cell (the cell's start if nowhere)."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        ends = self.starts[cell_index + 1 :] or [len(lines) + 1]
        for number in range(self.starts[cell_index], ends[0]):
            if text.strip() in lines[number - 1]:
                return number
        return self.starts[cell_index]


def read(path: Path) -> Source:
    """Read one source file. Raises SourceError for a bad header, cell key or duplicate id."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    notebook = jupytext.reads(text, fmt="py:percent")
    starts = [n for n, line in enumerate(lines, 1) if re.match(r"# %%( |$)", line)]
    source = Source(path, notebook, starts)
    if len(starts) != len(notebook.cells):
        stray = next((n for n, line in enumerate(lines, 1) if _loose(n, line, lines)), 1)
        raise source.fail(
            stray,
            "text outside a cell: after the header every cell starts with '# %%'. The course's "
            "keys stand in the header under 'jupyter:' (docs/authoring.md)",
        )
    # Under `make edit` the cells that the build stamps come back into the source: leave them out.
    made = [bool(cell.metadata.get("generated")) for cell in notebook.cells]
    bounds = [*starts, len(lines) + 1]
    source.generated = [(bounds[i], bounds[i + 1]) for i, m in enumerate(made) if m]
    source.starts = [s for s, m in zip(starts, made, strict=True) if not m]
    notebook.cells = [c for c, m in zip(notebook.cells, made, strict=True) if not m]
    for i, cell in enumerate(notebook.cells):
        cell.metadata.pop("lines_to_next_cell", None)  # jupytext's note on blank lines
        if unknown := set(cell.metadata) - CELL_KEYS:
            raise source.fail(source.starts[i], f"unknown cell key {sorted(unknown)[0]!r}")
    return source


def _loose(number: int, line: str, lines: list[str]) -> bool:
    """Whether this line is the first text that belongs to no cell."""
    header_ends = [i for i, text in enumerate(lines[1:], 2) if text.startswith("# ---")]
    return bool(line.strip()) and number > (header_ends[0] if header_ends else 0)


def header(source: Source) -> dict[str, Any]:
    """The `course:` block of a lesson's header, checked. Raises SourceError."""
    course = source.notebook.metadata.get("course")
    if not isinstance(course, dict):
        raise source.fail(1, "no course block in the header; it reads '# jupyter:', '#   course:'")
    rows, minutes = course.get("rows"), course.get("minutes")
    values = minutes.values() if isinstance(minutes, dict) else [minutes]
    for wrong, what in (
        (not isinstance(rows, list), "rows must be a list such as [D1, D2], or []"),
        (not values or not all(isinstance(v, int) for v in values), "minutes must be numbers"),
        (not isinstance(course.get("devices"), int), "devices must be a number"),
        (course.get("path") not in ("core", "more"), "path must be core or more"),
        (not set(extras(course)) <= EXTRAS, f"extra must be among {sorted(EXTRAS)}"),
        (unknown := set(course) - {"rows", "minutes", "devices", "path", "extra"}, "unknown key"),
    ):
        if wrong:
            raise source.fail(1, f"course header: {what} {sorted(unknown) if unknown else ''}")
    return dict(course)


def extras(course: dict[str, Any]) -> list[str]:
    """Extras of the package that the notebook needs, from `course.extra`."""
    extra = course.get("extra", [])
    return re.split(r"[,\s]+", extra) if isinstance(extra, str) else list(extra)


def refuse_markers(source: Source) -> None:
    """A lesson holds no solution markers: the build would leave them in."""
    for number, line in enumerate(source.path.read_text(encoding="utf-8").splitlines(), 1):
        if _looks_like_marker(line) or FOREIGN.search(line):
            raise source.fail(number, f"a solution marker in a lesson: {line.strip()!r}")


def _looks_like_marker(line: str) -> bool:
    """Whether a line is a solution marker, or was meant to be one."""
    if "BEGIN SOLUTION" in line or "END SOLUTION" in line:
        return True  # nbgrader acts on the words wherever they stand
    if not line.lstrip().startswith("#") or len(line.strip()) > 28:
        return False
    words = re.sub(r"[^A-Z]+", " ", line.upper()).strip()
    return any(
        difflib.SequenceMatcher(None, words, marker[4:]).ratio() > 0.8 for marker in (BEGIN, END)
    )


def check_markers(source: Source) -> dict[int, list[list[str]]]:
    """Solution regions of each cell: {cell index: [lines of a region, ...]}. Raises SourceError."""
    regions: dict[int, list[list[str]]] = {}
    inside: tuple[int, int] | None = None  # (cell, line) of the open region
    lines = source.path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        cell = sum(start <= number for start in source.starts) - 1
        if inside and (cell != inside[0] or text == BEGIN):
            raise source.fail(inside[1], f"this region has no {END!r} before the next one begins")
        if FOREIGN.search(line):
            raise source.fail(number, f"nbgrader would act on {text!r}; the course does not use it")
        if text == BEGIN:
            if source.notebook.cells[cell].metadata.get("task") is None:
                raise source.fail(number, 'a solution region in a cell without task="NN-name"')
            inside = (cell, number)
            regions.setdefault(cell, []).append([])
        elif text == END:
            if not inside:
                raise source.fail(number, f"{END!r} without {BEGIN!r}")
            if not any(t.strip() and not t.strip().startswith("#") for t in regions[cell][-1]):
                raise source.fail(inside[1], "an empty solution region")
            inside = None
        elif _looks_like_marker(line):
            raise source.fail(number, f"misspelt marker {text!r}; write {BEGIN!r} or {END!r}")
        elif inside:
            regions[cell][-1].append(line)
    if inside:
        raise source.fail(inside[1], f"this region is never closed by {END!r}")
    return regions


def check_exercise(source: Source, get_task: Callable[[str], Any]) -> dict[int, list[list[str]]]:
    """Everything an exercise must have before it is built. Returns its solution regions."""
    regions = check_markers(source)
    tasks: dict[str, int] = {}
    tests: dict[str, int] = {}
    for i, cell in enumerate(source.notebook.cells):
        line, task, test = source.starts[i], cell.metadata.get("task"), cell.metadata.get("test")
        for key, seen in ((task, tasks), (test, tests)):
            if key is None:
                continue
            if cell.cell_type != "code":
                raise source.fail(line, "task and test cells are code cells")
            if key in seen:
                raise source.fail(
                    line, f"duplicate id {key!r}, first at {source.starts[seen[key]]}"
                )
            if not re.fullmatch(rf"{source.path.name[:2]}-[a-z0-9-]+", key):
                raise source.fail(line, f"id {key!r} must be {source.path.name[:2]}-some-name")
            seen[key] = i
        if task is not None and i not in regions:
            raise source.fail(line, f"task {task!r} has no {BEGIN!r}")
        if test is not None and test not in tasks:
            raise source.fail(line, f"test cell for {test!r}, but no task cell of that id above it")
        if test is not None and cell.source.strip() != f'check("{test}")':
            raise source.fail(line, f'a test cell holds exactly check("{test}")')
    for task, i in tasks.items():
        if task not in tests:
            raise source.fail(source.starts[i], f"task {task!r} has no test cell")
        _check_definition(source, source.starts[i], task, get_task)
    if not tasks:
        raise source.fail(1, 'an exercise without a task: no cell has task="NN-name"')
    return regions


def _check_definition(source: Source, line: int, task: str, get_task: Callable) -> None:
    """The task's definition in course_utils.grading: check, three hints, two wrong answers."""
    try:
        definition = get_task(task)
    except Exception as error:
        raise source.fail(line, f"no definition of task {task!r}: {error}") from error
    hints = [str(hint).strip() for hint in definition.hints]
    wrong = {answer.name for answer in definition.wrong}
    for missing, what in (
        (not callable(getattr(definition, "judge", None)), "a check (judge)"),
        (not definition.points > 0, "points"),
        (len(hints) != 3 or not all(hints), "three hints"),
        (len(wrong) < 2, "two named wrong answers"),
    ):
        if missing:
            raise source.fail(line, f"the definition of task {task!r} lacks {what}")


def check_blank(source: Source, blank: NotebookNode, regions: dict[int, list[list[str]]]) -> None:
    """The blank shows no line of a solution, and runs from top to bottom. Raises SourceError."""
    for i, cell in enumerate(blank.cells):
        shown = {line.strip() for line in cell.source.splitlines()}
        for owner, lists in regions.items():
            # A short line ("return total") may well stand in another cell, a long one hardly.
            shortest = 8 if owner == i else 20
            for line in (text.strip() for region in lists for text in region):
                if len(line) >= shortest and not line.startswith("#") and line in shown:
                    where = source.line_of(i, line)
                    raise source.fail(where, f"a line of a solution is left in the blank: {line!r}")
        if i in regions:
            _check_stubs(source, i, cell.source)


def _check_stubs(source: Source, index: int, code: str) -> None:
    """Each stub lies in a function, so that the blank cell itself runs."""
    line = source.line_of(index, BEGIN)
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise source.fail(line, f"without its solution the cell is no Python: {error}") from error
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    safe = {n.lineno for f in functions for n in ast.walk(f) if isinstance(n, ast.Raise)}
    for number, text in enumerate(code.splitlines(), 1):
        if text.strip() == "raise NotImplementedError()" and number not in safe:
            raise source.fail(line, "a solution region lies inside a function or a method")
