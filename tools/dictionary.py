"""docs/tensorflow_and_pytorch.md: the dictionary that closes lesson 12, as a page of its own.

The lesson's Markdown cell under TITLE holds the table, the code cell after it is the proof.
`python tools/checks.py --write` writes the page; the checks fail while it is not what they give.
"""

from __future__ import annotations

import re
from pathlib import Path

import jupytext

from tools.sources import ROOT
from tools.then_now import compare

LESSON = "12_multi_worker"
TITLE = "## A dictionary: TensorFlow and PyTorch"
PAGE = "docs/tensorflow_and_pytorch.md"
HEAD = f"""# TensorFlow and PyTorch: a dictionary

Written by `python tools/checks.py --write` from the close of
[lesson 12](../notebooks/{LESSON}.ipynb): do not edit.
"""
PROOF = """## The proof

The tests run this cell with the lesson's others, which define what it uses.
"""


def page(folder: Path = ROOT) -> str:
    """The whole page. Raises ValueError where the lesson has no dictionary, or no proof of it."""
    path = folder / f"source/lessons/{LESSON}.py"
    cells = jupytext.read(path, fmt="py:percent").cells
    at = [n for n, c in enumerate(cells) if c.source.startswith(TITLE + "\n")]
    if len(at) != 1:
        raise ValueError(f"{path.name}: {len(at)} Markdown cells begin with {TITLE!r}, not one")
    table = cells[at[0]].source.removeprefix(TITLE).strip()
    if "\n|" not in table:
        raise ValueError(f"{path.name}: the cell under {TITLE!r} holds no table")
    proof = cells[at[0] + 1] if at[0] + 1 < len(cells) else None
    if proof is None or proof.cell_type != "code" or "assert" not in proof.source:
        raise ValueError(f"{path.name}: after the dictionary comes the code cell that asserts it")
    # The lesson's links start from notebooks/, the page's from docs/.
    table = re.sub(r"\]\((?![a-z]+:|#|\.\./)", "](../notebooks/", table)
    code = re.sub(r"^# *NBVAL_\w+\n", "", proof.source, flags=re.MULTILINE)
    return "\n".join([HEAD, table, "", PROOF, "````python", code, "````"]) + "\n"


def check(folder: Path = ROOT, write: bool = False) -> list[str]:
    """The page is what the lesson gives; with `write`, it becomes so. Raises ValueError."""
    return compare(folder / PAGE, page(folder), write, f"{PAGE} is out of step with lesson 12")
