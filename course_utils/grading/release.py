"""What students get: the blank exercises, and how to hand them in. No answers, no definitions."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

from .submission import MAX_BYTES, exercise_files, read_exercise

README = """\
# Exercises

{list}

## Before you start

Install the course as its README says; the exercises import `course_utils`. Check it with
`python -m course_utils doctor`.

## While you work

* Write your answers into the cells that say `YOUR CODE HERE`. Keep the names of the functions.
* `check("...")` below each of them says what holds and what does not yet. Its score is for
  practice: other inputs are used when you are graded. `hint("...")` helps, in three levels.
* Only the cells with your answers are graded, each in a Python of its own, with the exercise's
  own cells before it. Cells that you add are not graded: a helper function or an import in a cell
  of its own is missing then. Put them into the answer's cell that uses them.
* In these cells there is only Python: no `!command`, no `%magic`.
* Do not delete, copy or split cells, and leave the `check` cells as they are.
* Printing is fine, and so are warnings. An answer that takes minutes is stopped, and nobody is
  there to type an `input()`.

## How to hand in

1. Restart the kernel and run all cells. The checks should say what you expect.
2. Save. Then hand in the file `NN_name.ipynb` itself: no zip, no PDF, no HTML, no link. On Colab
   it is *File, Download, Download .ipynb*.
3. The file may have {limit} MiB at most: if it is larger, clear its outputs.
4. A task that you leave blank costs only its own points. You may hand in again; the latest counts.
"""


class ReleaseError(ValueError):
    """The exercises cannot be given out; the message says what to do."""


def release(out: Path, exercises: list[str], as_zip: bool, course: Path) -> Path:
    """Write the blank exercises (["02", "13"]; all of them when the list is empty) and a README.

    Returns the folder `out`, or the zip `out`.zip with that folder in it. `course` is the folder
    of the course's repository. Raises ReleaseError when there is no such exercise, when it is not
    blank, or when something is at `out` already.
    """
    out = out.with_suffix("") if as_zip and out.suffix == ".zip" else out
    target = out.with_name(f"{out.name}.zip") if as_zip else out
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ReleaseError(f"{target} exists already: choose another --out, or remove it")
    files = {path.name: path.read_bytes() for path in _notebooks(exercises, course)}
    titles = []
    for name, data in files.items():
        _must_be_blank(name, data)
        tasks = read_exercise(name[:2], course).tasks
        points = sum(task.points for task in tasks)
        titles.append(f"* `{name}`: {len(tasks)} tasks, {points:g} points")
    files["README.md"] = README.format(list="\n".join(titles), limit=MAX_BYTES // 2**20).encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    if as_zip:
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files.items():
                member = zipfile.ZipInfo(f"{out.name}/{name}")  # of 1980: the same zip each time
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(member, data)
        return target
    out.mkdir(exist_ok=True)
    for name, data in files.items():
        (out / name).write_bytes(data)
    return target


def _notebooks(exercises: list[str], course: Path) -> list[Path]:
    there = exercise_files(course)
    if not there:
        raise ReleaseError(f"there are no exercises in {course / 'exercises'}: is it the course?")
    missing = [number for number in exercises if number not in there]
    if missing:
        raise ReleaseError(f"there is no exercise {missing[0]}; there are {', '.join(there)}")
    return [there[number] for number in sorted(set(exercises)) or there]


def _must_be_blank(name: str, data: bytes) -> None:
    """Raise ReleaseError when a cell was run, edited or added since the notebook was built.

    The build names a cell after its text, and the cells of a task carry nbgrader's checksum. That a
    cell was deleted or moved cannot be seen here.
    """
    for number, cell in enumerate(json.loads(data)["cells"], 1):
        grading = cell["metadata"].get("nbgrader", {})
        if cell.get("outputs") or cell.get("execution_count"):
            what = "was run"
        elif grading and _checksum(cell, grading) != grading.get("checksum"):
            what = "was edited"
        elif not grading and not cell.get("id", "").startswith(_built_id(cell)):
            what = "was edited or added"
        else:
            continue
        which = grading.get("grade_id") or number
        raise ReleaseError(
            f"exercises/{name} is not as it was built, its cell {which} {what}: copy your work "
            f"elsewhere, then `make build ARGS={name[:2]}` makes it new"
        )


def _built_id(cell: dict) -> str:
    """The id that the build gives to a cell without a task; equal cells get a number behind it."""
    text = f"{cell['cell_type']}\n{''.join(cell['source'])}"
    return f"{cell['cell_type']}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _checksum(cell: dict, grading: dict) -> str:
    """nbgrader's checksum of a cell (nbgrader.utils.compute_checksum)."""
    flags = [str(bool(grading.get(flag))) for flag in ("grade", "solution", "locked")]
    words = ["".join(cell["source"]), cell["cell_type"], *flags, grading["grade_id"]]
    if grading.get("grade"):
        words.append(str(float(grading["points"])))
    return hashlib.md5("".join(words).encode(), usedforsecurity=False).hexdigest()
