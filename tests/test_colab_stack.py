"""The course on Colab's Jupyter stack: IPython 7.34, ipykernel 6.17, jupyter_client 7.4.

An environment of its own, .venv-colab, holds these three and what they need, and finds
everything else in the environment that runs the tests. It is made once and kept.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OVERLAY = ROOT / ".venv-colab"
STACK = ROOT / "tests/colab_stack.txt"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Runs inside the overlay, so that the client is Colab's too, not only the kernel.
RUN = """
import sys, nbformat
from nbclient import NotebookClient
source, target, folder = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
versions = nbformat.v4.new_code_cell(
    "import IPython, ipykernel, jupyter_client\\n"
    "print(IPython.__version__, ipykernel.__version__, jupyter_client.__version__)"
)
notebook.cells.append(versions)
client = NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True,
                        resources={"metadata": {"path": folder}})
client.execute()
nbformat.write(notebook, target)
"""


@pytest.fixture(scope="module")
def colab() -> Path:
    """The Python of the overlay; builds it when it is missing, half-made or outdated."""
    main = sysconfig.get_path("purelib")
    stamp, wanted = OVERLAY / ".course-stamp", f"{main}\n{STACK.read_text()}"
    wanted = hashlib.sha256(wanted.encode()).hexdigest()
    python = OVERLAY / "bin/python"
    if not (stamp.exists() and stamp.read_text() == wanted):
        shutil.rmtree(OVERLAY, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", OVERLAY], check=True)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        # addsitedir, not a plain line: the course itself is in the main environment through
        # a .pth file, and only addsitedir reads those. It appends, so the overlay wins.
        line = f"import site; site.addsitedir({main!r})\n"
        (Path(site) / "zz_course.pth").write_text(line)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, "-r", STACK], capture_output=True, text=True)
        assert done.returncode == 0, f"Colab's stack did not install:\n{done.stderr}"
        stamp.write_text(wanted)
    return python


def execute(python: Path, notebook: Path, tmp_path: Path) -> list[dict]:
    """Run a notebook on the overlay. Returns its code cells; the last prints the versions."""
    target = tmp_path / notebook.name
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JUPYTER_PREFER_ENV_PATH="1")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        environment[name] = str(tmp_path / name.lower())
    done = subprocess.run(
        [python, "-c", RUN, notebook, target, tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [c for c in json.loads(target.read_text())["cells"] if c["cell_type"] == "code"]
    assert shown(cells[-1]).strip() == "7.34.0 6.17.1 7.4.9"
    for cell in cells:
        assert cell["execution_count"], "".join(cell["source"])
        assert not [o for o in cell["outputs"] if o["output_type"] == "error"], shown(cell)
    return cells


def shown(cell: dict) -> str:
    """What the cell printed, and its errors."""
    parts = [o.get("text", o.get("traceback", "")) for o in cell["outputs"]]
    return "".join("".join(part) for part in parts)


def test_lesson_00_runs_on_colabs_stack(colab, tmp_path):
    (lesson,) = (ROOT / "notebooks").glob("00_*.ipynb")
    cells = execute(colab, lesson, tmp_path)
    html = [str(o["data"].get("text/html")) for c in cells for o in c["outputs"] if "data" in o]
    assert any("<img" in page for page in html)


def test_check_renders_on_colabs_stack(colab, tmp_path):
    (exercise,) = (ROOT / "solutions").glob("01_*.ipynb")
    cells = execute(colab, exercise, tmp_path)
    checks = [c for c in cells if "".join(c["source"]).strip().startswith("check(")]
    assert checks
    for cell in checks:
        # A score: a bare number for nbgrader, and a table or line in HTML for people.
        (score,) = [o["data"] for o in cell["outputs"] if o["output_type"] == "execute_result"]
        assert float("".join(score["text/plain"])) > 0
        assert "<" in "".join(score["text/html"])
