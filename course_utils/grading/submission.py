"""Reading notebooks as data: what a student handed in, and the exercise that it belongs to.

Of a submission only the code of the solution cells is taken, found by `grade_id`. Points, tests
and everything else come from the exercise in this repository.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .task import Task
from .tasks import all_tasks
from .wire import one_line

MAX_BYTES = 20 * 2**20  # a notebook with pictures has a few MiB
MAX_CELL = 200_000  # characters of one solution cell
MAX_CELLS = 2_000
MAX_NOTES = 50


class BadNotebook(ValueError):
    """A file that cannot be graded; the message says why, for the student."""


@dataclass(frozen=True)
class Exercise:
    """An exercise of this course: its tasks in order, and what its own cells define.

    trusted: for each task id, the source that the notebook would have run before it
    locked: for each grade_id, (cell type, points, source) of the cells that students may not edit
    """

    number: str
    tasks: tuple[Task, ...]
    trusted: dict[str, str]
    locked: dict[str, tuple[str, float, str]]


@dataclass
class Submission:
    """What is graded of one notebook.

    cells: source by grade_id; problems: (status, why) by grade_id; notes: for the instructor
    """

    cells: dict[str, str] = field(default_factory=dict)
    problems: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load(path: Path) -> list[dict]:
    """The cells of a notebook file. Raises BadNotebook for anything that is not one."""
    if path.stat().st_size > MAX_BYTES:
        raise BadNotebook(f"the file is larger than {MAX_BYTES // 2**20} MiB: clear its outputs")
    return cells_of(path.read_bytes())


def cells_of(data: bytes) -> list[dict]:
    """The cells of a notebook of format 4, as {"type", "source", "grading", "points"} each."""
    if len(data) > MAX_BYTES:
        raise BadNotebook(f"the file is larger than {MAX_BYTES // 2**20} MiB: clear its outputs")
    try:
        notebook = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        raise BadNotebook("the file is not a notebook: it is not JSON in UTF-8") from None
    if type(notebook) is not dict:
        raise BadNotebook("the file is not a notebook: it has no cells")
    if "worksheets" in notebook:
        raise BadNotebook("the format is nbformat 3: open it in JupyterLab, save it, hand it in")
    if type(notebook.get("cells")) is not list:
        raise BadNotebook("the file is not a notebook: it has no cells")
    if len(notebook["cells"]) > MAX_CELLS:
        raise BadNotebook(f"the notebook has more than {MAX_CELLS:,} cells")
    return [_cell(cell) for cell in notebook["cells"] if type(cell) is dict]


def _cell(cell: dict) -> dict:
    source = cell.get("source", "")
    if type(source) is list:
        source = "".join(line for line in source if type(line) is str)
    if type(source) is not str:
        source = ""
    metadata = cell.get("metadata")
    grading = metadata.get("nbgrader") if type(metadata) is dict else None
    return {
        "type": kind if type(kind := cell.get("cell_type")) is str else "nameless",
        # A lone surrogate can be written in JSON, and in no file.
        "source": source.encode("utf-8", "replace").decode(),
        "grading": grading if type(grading) is dict else {},
    }


def exercise_files(course: Path) -> dict[str, Path]:
    """The blank notebooks of the course whose repository is at `course`, by number."""
    found = sorted((course / "exercises").glob("[0-9][0-9]_*.ipynb"))
    return {path.name[:2]: path for path in found}


def read_exercise(number: str, course: Path) -> Exercise:
    """The exercise NN of the course whose repository is at `course`.

    Raises FileNotFoundError when there is none.
    """
    found = exercise_files(course)
    if number not in found:
        raise FileNotFoundError(f"there is no exercise {number} in {course / 'exercises'}")
    tasks, trusted, locked, before = all_tasks(), {}, {}, []
    for cell in load(found[number]):
        name = cell["grading"].get("grade_id")
        if cell["grading"].get("solution") and name in tasks:
            trusted[name] = "\n\n".join(before)
        elif cell["grading"].get("grade"):
            locked[name] = (cell["type"], cell["grading"].get("points"), cell["source"])
        elif cell["type"] == "code":
            before.append(_definitions(cell["source"]))
    return Exercise(number, tuple(tasks[name] for name in trusted), trusted, locked)


def _definitions(source: str) -> str:
    """Imports, functions, classes and constants of a cell: what a solution may build on.

    Its demonstrations stay out; they take time, and some start ranks.
    """
    kept = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or node.names[0].name
            if module != "course_utils.grading":  # `check` is not there when it counts
                kept.append(node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) or _is_constant(node):
            kept.append(node)
    return "\n".join(ast.unparse(node) for node in kept)


def _is_constant(node: ast.stmt) -> bool:
    """True for `NAME = literal`."""
    if not isinstance(node, ast.Assign):
        return False
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return True


def exercise_number(cells: list[dict]) -> str:
    """Which exercise a notebook belongs to: the number that most of its grade_ids begin with."""
    names = [name for cell in cells if type(name := cell["grading"].get("grade_id")) is str]
    numbers = [match[0] for name in names if (match := re.match(r"[0-9]{2}(?=-)", name))]
    if not numbers:
        raise BadNotebook(
            "no cell has a grade_id: it is not one of the course's exercises, or the program that "
            "saved it has removed the metadata of its cells"
        )
    return Counter(numbers).most_common(1)[0][0]


def take(cells: list[dict], exercise: Exercise) -> Submission:
    """The solution cells of a notebook. Raises nothing: what is wrong is said for each task."""
    found = Submission()
    wanted = {task.id for task in exercise.tasks}
    for cell in cells:
        name = cell["grading"].get("grade_id")
        if type(name) is not str:
            continue
        if name in exercise.locked:
            _note_changes(name, cell, exercise, found.notes)
        if name not in wanted:
            continue
        if name in found.cells or name in found.problems:
            why = f"more than one cell has the grade_id {name}: keep the one that counts"
            found.problems[name] = "duplicate_id", why
            found.cells.pop(name, None)
        elif cell["type"] != "code":
            found.problems[name] = "missing_cell", f"the cell {name} is no code cell any more"
        elif len(cell["source"]) > MAX_CELL:
            why = f"the solution cell is longer than {MAX_CELL:,} characters"
            found.problems[name] = "bad_notebook", why
        else:
            found.cells[name] = cell["source"]
    for name in wanted - set(found.cells) - set(found.problems):
        why = f"there is no cell with the grade_id {name}: was it deleted?"
        found.problems[name] = "missing_cell", why
    ids = [cell["grading"].get("grade_id") for cell in cells]
    present = {name for name in ids if type(name) is str}
    found.notes += [
        f"tampered: {name} is missing" for name in exercise.locked if name not in present
    ]
    found.notes = list(dict.fromkeys(found.notes))[:MAX_NOTES]
    return found


def _note_changes(name: str, cell: dict, exercise: Exercise, notes: list[str]) -> None:
    kind, points, source = exercise.locked[name]
    if cell["type"] != kind:
        notes.append(f"tampered: {name} is a {one_line(cell['type'], 20)} cell now")
    if cell["grading"].get("points") != points:
        notes.append(f"tampered: the points of {name} were changed")
    if cell["source"].strip() != source.strip():
        notes.append(f"tampered: the test cell {name} was edited")
