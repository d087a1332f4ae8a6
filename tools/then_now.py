"""docs/then_now.md, from the lessons' cells that show an old way and what replaced it.

    # %% then="Trainer(gpus=2)" now="Trainer(devices=2)" since="Lightning 2.0"

Such a cell of source/lessons/ gives one row of the page: under TensorFlow and Keras where
`since` begins with one of these names, under PyTorch otherwise. `python tools/checks.py --write`
writes it; the checks fail while it is not what the cells give.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import jupytext

from tools.sources import ROOT, Source

KEYS = ("then", "now", "since")
PAGE = "docs/then_now.md"
TENSORFLOW = ("TensorFlow", "Keras")
PACKAGES = {
    "PyTorch": ("torch", "pytorch-lightning", "onnx", "onnxscript", "torchsummary", "torchinfo"),
    "TensorFlow and Keras": ("tensorflow", "keras", "tf-keras"),
}
HEAD = """# Then → now: what older tutorials say

Written by `python tools/checks.py --write` from the lessons' cells: do not edit.

What tutorials still say, what to write today, and since when. Each row has a cell that shows it.
It stands in a lesson and below, folded, and the tests run it, so that a row cannot go stale unseen.
They run it with the versions of `constraints.txt`.
"""


def rows(folder: Path = ROOT) -> list[dict[str, str]]:
    """One row a cell, in the lessons' order. Raises SourceError with file:line."""
    found = []
    for path in sorted((folder / "source/lessons").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        starts = [n for n, line in enumerate(lines, 1) if re.match(r"# %%( |$)", line)]
        source = Source(path, jupytext.reads(text, fmt="py:percent"), starts)
        title = next((line[4:] for line in lines if line.startswith("# # ")), path.stem)
        # Text outside a cell makes a cell without a start; the build refuses it with its line.
        for line, cell in zip(starts, source.notebook.cells, strict=False):
            # A value that jupytext cannot read turns the whole line into a title.
            if re.search(r"\b(then|now|since) *=", lines[line - 1]):
                row = _row(source, line, cell)
                code = re.sub(r"^# *NBVAL_\w+\n", "", cell.source, flags=re.MULTILINE)
                found.append({**row, "lesson": path.stem, "title": title, "code": code})
    return found


def _row(source: Source, line: int, cell) -> dict[str, str]:
    if cell.cell_type != "code":
        raise source.fail(line, "then, now and since belong to a code cell, which shows it")
    for key in KEYS:
        if key not in cell.metadata:
            raise source.fail(line, f'{key} is missing, or its quotes are wrong: {key}="…"')
        value = cell.metadata[key]
        if not isinstance(value, str) or not value.strip():
            raise source.fail(line, f'{key} must be text in double quotes: {key}="…"')
    skipped = re.search(r"^#\s*NBVAL_SKIP", cell.source, re.MULTILINE)
    if skipped or {"nbval-skip", "skip-execution"} & set(cell.metadata.get("tags", [])):
        raise source.fail(line, "a then → now cell must be run by the tests, and this one is not")
    return {key: cell.metadata[key].strip() for key in KEYS}


def page(folder: Path = ROOT) -> str:
    """The whole page. Raises SourceError with file:line."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (folder / "constraints.txt").read_text(), re.M))
    tables, cells, number = [], [], 0
    found = rows(folder)
    for name, packages in PACKAGES.items():
        versions = ", ".join(f"{package} {pins[package]}" for package in packages)
        tables += [f"## {name}", "", f"Run with {versions}.", ""]
        part = [r for r in found if (r["since"].startswith(TENSORFLOW)) == (name != "PyTorch")]
        if not part:
            tables += ["No lesson has one yet.", ""]
            continue
        tables += ["| | then | now | since | lesson |", "|---|---|---|---|---|"]
        for row in part:
            number += 1
            # HTML, because a Markdown table splits at a | even inside backticks.
            then, now, since = (html.escape(row[k], False).replace("|", "&#124;") for k in KEYS)
            lesson = f"[{row['lesson'][:2]}](../notebooks/{row['lesson']}.ipynb)"
            tables.append(
                f"| {number} | <code>{then}</code> | <code>{now}</code> | {since} | {lesson} |"
            )
            head = f"{number}. <code>{then}</code> → <code>{now}</code> (lesson {row['lesson'][:2]}"
            cells += ["<details>", f"<summary>{head}, {html.escape(row['title'])})</summary>", ""]
            cells += ["````python", row["code"], "````", "", "</details>", ""]
        tables.append("")
    body = [*tables, "## The cells", "", *cells] if cells else tables
    return "\n".join([HEAD, *body]).rstrip() + "\n"


def check(folder: Path = ROOT, write: bool = False) -> list[str]:
    """The page is what the cells give; with `write`, it becomes so. Raises SourceError."""
    return compare(folder / PAGE, page(folder), write, f"{PAGE} is out of step with the lessons")


def compare(path: Path, wanted: str, write: bool, problem: str) -> list[str]:
    """The problem and what to do, if the file is not `wanted`; with `write`, it becomes so."""
    if write:
        path.write_text(wanted, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
        return [f"{problem}: python tools/checks.py --write"]
    return []
