"""Build notebooks from their sources.

    source/lessons/NN_name.py    ->  notebooks/NN_name.ipynb   executed
    source/exercises/NN_name.py  ->  solutions/NN_name.ipynb   executed
                                     exercises/NN_name.ipynb   blank

Only what changed is built again. `--check` builds nothing: it fails when a built
notebook differs from its source, and names the first difference.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import hashlib
import json
import logging
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as `python tools/build.py`
    sys.path.insert(0, str(ROOT))

import nbformat  # noqa: E402
from nbformat import NotebookNode, v4  # noqa: E402

from tools import sources, stamp  # noqa: E402
from tools.sources import SourceError  # noqa: E402

KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"}


@dataclass
class Target:
    """One notebook to be written: its path, and its cells without outputs."""

    path: Path
    notebook: NotebookNode
    executed: bool
    source: sources.Source


@dataclass
class Course:
    """A folder with sources, and what its notebooks are built with."""

    root: Path
    get_task: Callable[[str], Any]
    repository: str = ""
    branch: str = "main"

    @classmethod
    def here(cls, root: Path = ROOT) -> Course:
        """The course in `root`: its repository from pyproject.toml, its tasks from the package."""

        def get_task(task_id: str) -> Any:
            from course_utils.grading import get_task

            return get_task(task_id)

        settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
        table = settings["tool"]["course"]
        return cls(root, get_task, table["repository"], table["branch"])


def targets(course: Course, numbers: list[str] | None = None) -> Iterator[Target]:
    """Every notebook that the sources ask for, composed but not executed."""
    for path in sorted((course.root / "source/lessons").glob("*.py")):
        if not numbers or path.name[:2] in numbers:
            yield lesson(course, path)
    for path in sorted((course.root / "source/exercises").glob("*.py")):
        if not numbers or path.name[:2] in numbers:
            yield from exercise(course, path)


def lesson(course: Course, path: Path) -> Target:
    """Compose a lesson. Raises SourceError."""
    source = sources.read(path)
    sources.refuse_markers(source)
    header = sources.header(source)
    notebook = _compose(course, source, "notebooks", header)
    return Target(course.root / "notebooks" / f"{path.stem}.ipynb", notebook, True, source)


def exercise(course: Course, path: Path) -> tuple[Target, Target]:
    """Compose an exercise's solution and its blank. Raises SourceError."""
    source = sources.read(path)
    regions = sources.check_exercise(source, course.get_task)
    for cell in source.notebook.cells:
        _grading_metadata(cell, course.get_task)
    header = sources.header(source)
    blank = release(_compose(course, source, "exercises", header))
    # The stamped cells stand in the blank only where they stand in the source's own count.
    own = NotebookNode(cells=[c for c in blank.cells if not c.metadata.get("generated")])
    sources.check_blank(source, own, regions)
    solved = _compose(course, source, "solutions", header)
    name = f"{path.stem}.ipynb"
    return (
        Target(course.root / "solutions" / name, solved, True, source),
        Target(course.root / "exercises" / name, blank, False, source),
    )


def _grading_metadata(cell: NotebookNode, get_task: Callable[[str], Any]) -> None:
    """Turn task="id" and test="id" into nbgrader's schema v3; our own key goes beside it."""
    task, test = cell.metadata.pop("task", None), cell.metadata.pop("test", None)
    if task is None and test is None:
        return
    graded = {
        "grade": bool(test),
        "grade_id": f"{test}-test" if test else task,
        "locked": bool(test),
        "schema_version": 3,
        "solution": bool(task),
        "task": False,
    }
    if test:
        graded["points"] = get_task(test).points
        # nbval compares the score of the solution: the cell holds check() and no comment.
        cell.metadata["tags"] = [*cell.metadata.get("tags", []), "nbval-check-output"]
    cell.metadata.update(nbgrader=graded, course={"task": task or test})


def _compose(
    course: Course, source: sources.Source, folder: str, header: dict[str, Any]
) -> NotebookNode:
    """The notebook of a source: its cells, stable ids, our metadata and no other."""
    cells = copy.deepcopy(source.notebook.cells)
    if course.repository:
        name = f"{folder}/{source.path.stem}.ipynb"
        extras = sources.extras(header)
        cells = stamp.stamped(cells, course.repository, course.branch, name, extras)
    seen: dict[str, int] = {}
    for cell in cells:
        for key in sources.THEN_NOW:  # they make a page; a notebook is the same with or without
            cell.metadata.pop(key, None)
        # From the cell alone, never its position: an edit leaves all other ids as they are.
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        name = cell.metadata.get("nbgrader", {}).get("grade_id") or f"{cell.cell_type}-{digest}"
        seen[name] = seen.get(name, 0) + 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    metadata: dict[str, Any] = {"kernelspec": dict(KERNEL), "language_info": dict(LANGUAGE)}
    metadata["course"] = header
    notebook = v4.new_notebook(cells=cells, metadata=metadata)
    digest = hashlib.sha256(json.dumps(_skeleton(notebook), sort_keys=True).encode()).hexdigest()
    # A key of its own: under `make edit` the course key travels back into the source's header.
    notebook.metadata["course_build"] = {"source_hash": digest[:16]}
    return nbformat.from_dict(notebook)


def release(notebook: NotebookNode) -> NotebookNode:
    """What nbgrader would hand out: its own preprocessors, in its own order, without a database."""
    from nbgrader import preprocessors as steps

    logging.getLogger("traitlets").setLevel(logging.CRITICAL)  # our messages name file and line
    resources: dict[str, Any] = {}
    for step in (
        steps.LockCells,
        steps.ClearSolutions,
        steps.ClearOutput,
        steps.CheckCellMetadata,
        steps.ComputeChecksums,
        steps.ClearHiddenTests,
        steps.ClearMarkScheme,
        steps.ComputeChecksums,
        steps.CheckCellMetadata,
    ):
        notebook, resources = step().preprocess(notebook, resources)
    return notebook


def _skeleton(notebook: NotebookNode) -> dict[str, Any]:
    """All of a notebook that its source determines: everything but outputs and counts."""
    kept = [
        {k: v for k, v in cell.items() if k not in ("outputs", "execution_count")}
        for cell in notebook.cells
    ]
    return {"cells": kept, "metadata": notebook.metadata}


def difference(target: Target) -> str | None:
    """How the notebook on disk differs from its source: None, or the first difference in words."""
    shown = f"{target.path.parent.name}/{target.path.name}"
    if not target.path.exists():
        return f"{shown} is missing"
    stored = nbformat.read(target.path, as_version=4)
    expected, found = target.notebook.cells, stored.cells
    for number in range(1, max(len(expected), len(found)) + 1):
        if number > len(found) or number > len(expected):
            return f"{shown}: {len(found)} cells, but {len(expected)} in its source"
        want, have = expected[number - 1], found[number - 1]
        if want.source != have.source:
            sides = ("source", "notebook")
            lines = (want.source.splitlines(), have.source.splitlines())
            diff = "\n".join(difflib.unified_diff(*lines, *sides, lineterm=""))
            return f"{shown}, cell {number} differs from its source:\n{diff}"
        for key in ("cell_type", "id", "metadata"):
            if want[key] != have[key]:
                return f"{shown}, cell {number}: {key} is {have[key]}, not {want[key]}"
    if stored.metadata != target.notebook.metadata:
        return f"{shown}: its metadata is not what its source gives, or it was not built since"
    unrun = [c for c in found if c.cell_type == "code" and c.source and not c.execution_count]
    if target.executed and unrun:
        return f"{shown} was not executed"
    if not target.executed and len(unrun) < sum(c.cell_type == "code" for c in found):
        return f"{shown} holds outputs, and must be blank"
    return None


def strays(course: Course) -> list[str]:
    """Built notebooks whose source is gone."""
    found = []
    for folder, origin in (
        ("notebooks", "lessons"),
        ("exercises",) * 2,
        ("solutions", "exercises"),
    ):
        for path in sorted((course.root / folder).glob("*.ipynb")):
            if not (course.root / "source" / origin / f"{path.stem}.py").exists():
                found.append(f"{folder}/{path.name} has no source source/{origin}/{path.stem}.py")
    return found


def build(course: Course, numbers: list[str] | None = None, force: bool = False) -> int:
    """Write every notebook that differs from its source; returns how many were written."""
    from tools.execute import execute

    written = 0
    # Compose all first: a source that cannot be built stops the build before anything runs.
    for target in list(targets(course, numbers)):
        shown = f"{target.path.parent.name}/{target.path.name}"
        if not force and difference(target) is None:
            print(f"{shown:<44} up to date", flush=True)
            continue
        start = time.monotonic()
        print(f"{shown:<44} ", end="", flush=True)
        if target.executed:
            execute(target.notebook, target.path)
        target.notebook.metadata["language_info"] = dict(LANGUAGE)  # without this Python's version
        target.path.parent.mkdir(exist_ok=True)
        nbformat.write(target.notebook, target.path)
        print(f"built in {time.monotonic() - start:.1f} s", flush=True)
        written += 1
        _drop_generated(target.source)
    return written


def _drop_generated(source: sources.Source) -> None:
    """Remove stamped cells that an edited notebook brought back into its source."""
    if source.generated and source.path.exists():
        lines = source.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for first, end in reversed(source.generated):
            del lines[first - 1 : end - 1]
        source.path.write_text("".join(lines), encoding="utf-8")
        source.generated = []


def check(course: Course, numbers: list[str] | None = None) -> list[str]:
    """Every built notebook that is not what its source gives, in words."""
    found = [text for target in targets(course, numbers) if (text := difference(target))]
    return found + ([] if numbers else strays(course))


def main(arguments: list[str] | None = None) -> int:
    """Command line. 0: all in step; 1: out of step, or not buildable; 2: wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", nargs="*", metavar="NN", help="only these, like 02")
    parser.add_argument("--check", action="store_true", help="build nothing; fail on a difference")
    parser.add_argument("--force", action="store_true", help="build what is up to date as well")
    options = parser.parse_args(arguments)
    if wrong := [n for n in options.numbers if not re.fullmatch(r"\d\d", n)]:
        parser.error(f"a number has two digits, like 02: {wrong[0]}")
    course = Course.here()
    from tools.execute import ExecutionFailed

    try:
        if options.check:
            problems = check(course, options.numbers)
            print("\n".join(problems) or "every notebook is what its source gives")
            if problems:
                print(f"\n{len(problems)} out of step: run `make build`", file=sys.stderr)
            return bool(problems)
        build(course, options.numbers, options.force)
        for stray in [] if options.numbers else strays(course):
            print(f"{stray}: remove it", file=sys.stderr)
            return 1
    except (SourceError, ExecutionFailed) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
