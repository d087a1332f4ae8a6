"""A learner's first minutes, in a real browser: `make lab`, Run All, a figure, a score.

Headless Chromium opens the server that `make lab` starts, on copies in a temporary folder.
Without Chromium these tests are skipped; under CI they must run.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "a-token-of-the-tests"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def first(folder: str, number: str) -> str:
    """The one notebook of that number, as JupyterLab's address names it."""
    (path,) = (ROOT / folder).glob(f"{number}_*.ipynb")
    return f"{folder}/{path.name}"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """(address, work folder) of a server started by `make lab`."""
    if CHROMIUM is None:
        what = "no Chromium: `sudo apt-get install chromium` brings it"
        pytest.fail(what) if os.environ.get("CI") == "true" else pytest.skip(what)
    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip("`make lab` has an environment of its own: run this with `make test`")
    home = tmp_path_factory.mktemp("lab")
    work, port = home / "work", free_port()
    environment = dict(os.environ, COURSE_WORK=str(work))
    environment.pop("COURSE_LAUNCH_LEDGER", None)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environment[name] = str(home / name.lower())
    log = home / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            ["make", "lab", f"ARGS=--no-browser --port {port} --IdentityProvider.token={TOKEN}"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for_server(address, server, log)
        yield address, work
        request = urllib.request.Request(f"{address}/api/shutdown?token={TOKEN}", method="POST")
        urllib.request.urlopen(request, timeout=10).close()
        server.wait(timeout=30)
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for_server(address: str, server: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, f"`make lab` ended:\n{log.read_text()}"
        try:
            urllib.request.urlopen(f"{address}/api/status?token={TOKEN}", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    pytest.fail(f"`make lab` serves nothing after two minutes:\n{log.read_text()}")


@pytest.fixture(scope="module")
def browser(lab, tmp_path_factory):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("chromium")),
            executable_path=CHROMIUM,
            headless=True,
            args=ARGUMENTS,
            viewport={"width": 1280, "height": 1000},
        )
        context.set_default_timeout(60_000)
        yield context
        context.close()


@pytest.fixture
def page(browser, request, tmp_path):
    page = browser.new_page()
    failed = request.session.testsfailed
    yield page
    if request.session.testsfailed > failed:
        picture = tmp_path / f"{request.node.name}.png"
        page.screenshot(path=str(picture))
        print(f"what the browser showed: {picture}")
    page.close()


def menu(page, name: str, entry: str) -> None:
    page.locator(".lm-MenuBar-itemLabel", has_text=name).first.click()
    page.locator(f'.lm-Menu-itemLabel:text-is("{entry}")').click()


def run_all(page, notebook: Path) -> list[dict]:
    """Clear the stored outputs, Run All, save. Returns the code cells as saved: no error in any."""
    # The status bar speaks of the kernel; the notebook's own indicator says idle before there
    # is one, and Run All without a kernel runs nothing.
    idle = page.locator("#jp-main-statusbar").get_by_text("| Idle")
    idle.wait_for()
    menu(page, "Edit", "Clear Outputs of All Cells")
    menu(page, "Run", "Run All Cells")
    deadline = time.monotonic() + 150
    while True:
        page.wait_for_timeout(1000)  # idle for a second: between two cells it is so for less
        idle.wait_for(timeout=120_000)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(1000)
        cells = json.loads(notebook.read_text())["cells"]
        code = [c for c in cells if c["cell_type"] == "code" and "".join(c["source"]).strip()]
        errors = [o["evalue"] for o in outputs(code) if o["output_type"] == "error"]
        assert not errors  # Run All stops at the first
        if all(c["execution_count"] for c in code):
            return code
        assert time.monotonic() < deadline, "Run All did not reach the last cell"


def outputs(cells: list[dict]) -> list[dict]:
    return [output for cell in cells for output in cell["outputs"]]


def text(cells: list[dict]) -> str:
    """Everything that the cells printed or showed, as one string."""
    parts = []
    for output in outputs(cells):
        shown = [output.get("text", "")]
        shown += [v for k, v in output.get("data", {}).items() if k.startswith("text/")]
        parts += ["".join(part) for part in shown]
    return "\n".join(parts)


def test_make_lab_opens_lesson_00_and_it_runs(lab, page):
    address, work = lab
    page.goto(f"{address}/?token={TOKEN}")  # as the browser that `make lab` opens does
    page.wait_for_url("**/lab/tree/notebooks/00_start_here.ipynb*")
    run_all(page, work / "notebooks/00_start_here.ipynb")
    figure = page.locator(".jp-OutputArea img").first
    figure.scroll_into_view_if_needed()
    assert figure.evaluate("image => image.complete && image.naturalWidth") > 100
    assert figure.get_attribute("alt")
    for clutter in ("official Jupyter news", "Create Assignment", "Validate"):
        assert page.get_by_text(clutter).count() == 0, clutter


@pytest.mark.parametrize("folder", ["exercises", "solutions"])
def test_an_exercise_runs_and_shows_its_score(lab, page, folder):
    address, work = lab
    name = first(folder, "01")
    # A workspace of its own, or JupyterLab would open the other tests' notebooks again.
    page.goto(f"{address}/lab/workspaces/{folder}/tree/{name}?token={TOKEN}")
    cells = run_all(page, work / name)
    checks = [c for c in cells if "".join(c["source"]).strip().startswith("check(")]
    assert checks
    if folder == "exercises":
        assert "not attempted" in text(checks).lower()
    scores = [float("".join(o["data"]["text/plain"])) for o in outputs(checks) if "data" in o]
    assert len(scores) == len(checks)
    assert all(s == 0 for s in scores) if folder == "exercises" else all(s > 0 for s in scores)
    shown = page.locator(".jp-OutputArea-executeResult .jp-RenderedHTMLCommon").last
    shown.scroll_into_view_if_needed()
    assert shown.is_visible() and shown.inner_text().strip()
