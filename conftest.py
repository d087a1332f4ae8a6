"""What nbval cannot see: whether a lesson really used its devices, and what an exercise scored.

Each notebook's kernel writes the ledger of its launches (COURSE_LAUNCH_LEDGER). After its last
cell the ledger must show the devices that the notebook's header promises. In an exercise every
test cell must score 0, in a solution all its points.

And what a shell may have switched off: `make test &` in a script starts with Ctrl-C ignored.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

LEDGER = "COURSE_LAUNCH_LEDGER"
_ledgers: dict[str, Path] = {}  # notebook -> its ledger
_ran: dict[str, int] = {}  # notebook -> how many of its cells have run


def pytest_configure() -> None:
    """The tests that press Ctrl-C must be heard, also before `launch` listens by itself."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_cell(item: pytest.Item) -> bool:
    return type(item).__name__ == "IPyNbCell"  # nbval's; without nbval there is none


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first cell starts the kernel, which inherits the environment."""
    if not _is_cell(item):
        return
    if item.parent.nodeid not in _ledgers:
        handle, name = tempfile.mkstemp(prefix="ledger-", suffix=".jsonl")
        os.close(handle)
        _ledgers[item.parent.nodeid] = Path(name)
        os.environ[LEDGER] = name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """After a test cell: the score that nbgrader would read."""
    result = yield
    graded = _is_cell(item) and item.cell.metadata.get("nbgrader", {})
    if graded and graded.get("grade"):
        from tools.checks import score

        blank = Path(item.fspath).parent.name == "exercises"
        wanted = 0 if blank else graded["points"]
        got = score(item.test_outputs)
        assert got == wanted, f"{graded['grade_id']} scores {got}, and must score {wanted}"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    """After the last cell, and once the kernel has ended: were the devices at work?"""
    result = yield
    if not _is_cell(item):
        return result
    notebook = item.parent
    _ran[notebook.nodeid] = _ran.get(notebook.nodeid, 0) + 1
    cells = sum(cell.cell_type == "code" for cell in notebook.nb.cells)
    if _ran[notebook.nodeid] == cells:  # with -k only some cells run: nothing can be said
        os.environ.pop(LEDGER, None)
        ledger = _ledgers[notebook.nodeid]
        text = ledger.read_text()
        ledger.unlink()
        if Path(item.fspath).parent.name == "notebooks":
            from tools.checks import check_devices

            wanted = notebook.nb.metadata.get("course", {}).get("devices", 1)
            problems = check_devices(text, wanted)
            assert not problems, f"{Path(item.fspath).name}: {problems[0]}"
    return result
