"""Run a notebook in a fresh kernel and leave outputs that mean the same on every machine."""

from __future__ import annotations

import os
import re
import socket
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbclient.util import run_sync
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 120  # seconds, as nbval's in pyproject.toml
COMPARED = "NBVAL_CHECK_OUTPUT"


class ExecutionFailed(Exception):
    """A notebook that did not run, or whose outputs must not be stored."""


class ThisInterpreter(KernelSpecManager):
    """Whatever kernels are installed: `python3` is the interpreter that runs the build."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        argv.append("--log-level=40")  # errors: how the kernel is connected is not news
        return KernelSpec(argv=argv, display_name="Python 3 (ipykernel)", language="python")


def execute(notebook: NotebookNode, path: Path) -> None:
    """Run `notebook` in place, in the folder of `path`. Raises ExecutionFailed, naming the cell."""
    path.parent.mkdir(exist_ok=True)
    started: list[int] = []  # numbers of the cells, from 1
    with tempfile.TemporaryDirectory() as empty:
        # An author's IPython profile and start-up files must not colour the outputs.
        env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": empty, "COLUMNS": "100"}
        kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_TIMEOUT,
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,  # or the number of chunks would differ from run to run
            on_cell_start=lambda cell, cell_index: started.append(cell_index + 1),
            resources={"metadata": {"path": str(path.parent)}},
        )
        try:
            with open(Path(empty) / "stderr", "w+", errors="replace") as stderr:
                client.execute(env=env, stderr=stderr)
        except (CellExecutionError, CellTimeoutError, RuntimeError) as error:  # or no kernel
            last_words = (Path(empty) / "stderr").read_text(errors="replace")[-2000:]
            text = f"{path.name}, cell {started[-1] if started else 1} failed: {error}"
            raise ExecutionFailed(f"{text}\n{last_words}".rstrip()) from error
        finally:  # nbclient ends only kernels whose manager it made itself
            client.km = kernel  # nbclient forgets a kernel that failed to start, then stumbles
            if kernel.has_kernel:
                run_sync(kernel.shutdown_kernel)(now=True)
    for number, cell in enumerate(notebook.cells, 1):
        for output in cell.get("outputs", []):
            tidy(output, f"{path.name}, cell {number}", compared=COMPARED in cell.source)


def places() -> list[tuple[str, str]]:
    """What this machine writes into outputs, and what is stored instead; longest first."""
    site = Path(nbformat.__file__).parent.parent
    stdlib = Path(os.__file__).parent
    fixed = [(str(site), "…/site-packages"), (str(stdlib), f"…/{stdlib.name}"), (str(ROOT), "…")]
    home = str(Path.home())
    if home not in ("/", ""):
        fixed.append((home, "~"))
    pairs = [(re.escape(text) + r"(?![\w-])", name) for text, name in fixed]
    # A function defined in a cell: kernel's process number and a hash of the cell.
    return [(rf"{re.escape(tempfile.gettempdir())}/ipykernel_\d+/\d+\.py", "<cell>"), *pairs]


def tidy(output: NotebookNode, where: str, compared: bool) -> None:
    """Replace this machine's paths in one output. Raises ExecutionFailed where that cannot be."""
    data = output.get("data", {})
    if "application/vnd.jupyter.widget-view+json" in data:
        raise ExecutionFailed(f"{where}: a widget is not stored; use `from tqdm import tqdm`")
    texts = [(output, "text")] if "text" in output else [(data, k) for k in data if "text/" in k]
    for holder, key in texts:
        before = holder[key]
        for pattern, name in places():
            holder[key] = re.sub(pattern, name, holder[key])
        if compared and holder[key] != before:
            raise ExecutionFailed(f"{where}: {COMPARED}, but the output shows a path:\n{before}")
        if left := machine_specific(holder[key]):
            raise ExecutionFailed(f"{where}: the output shows {left!r}, which is this machine's")


def machine_specific(text: str) -> str | None:
    """What in a stored text betrays the machine it was made on, if anything does."""
    host = socket.gethostname()
    patterns = [pattern for pattern, _ in places()] + [r"/ipykernel_\d+/", r"/home/\w+/"]
    if len(host) > 5 and host != "localhost":
        patterns.append(rf"(?<![\w.-]){re.escape(host)}(?![\w-])")
    for pattern in patterns:
        if found := re.search(pattern, re.sub(r'src="data:[^"]+"', "", text)):
            return found.group()
    return None
