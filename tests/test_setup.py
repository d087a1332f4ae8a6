"""`make` and what stands behind it: the environment, the learner's copies, the sentences.

The environment is made for real, of two tiny packages built here, without a network.
"""

import ast
import glob
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

# A build backend in the tree itself: pip then needs no network to install the toy course.
BACKEND = """
import os, time, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    while os.path.exists("wait"):
        open("waiting", "w").close()
        time.sleep(0.05)
    name = "course_utils-0-py3-none-any.whl"
    info = "course_utils-0.dist-info/"
    extras = "".join(f"Provides-Extra: {e}\\n" for e in ("torch", "tensorflow", "lab", "dev"))
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        wheel.writestr("course_utils.pth", os.getcwd())
        wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: course-utils\\n"
                       "Version: 0\\n" + extras)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
                       "Tag: py3-none-any\\n")
        wheel.writestr(info + "RECORD", "")
    return name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "course-utils"
version = "0"
optional-dependencies = {torch = [], tensorflow = [], lab = [], dev = []}
"""


def write_wheel(folder: Path, name: str, version: str) -> None:
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n")
        wheel.writestr(
            info + "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(info + "RECORD", "")


class Toy:
    """A course of two notebooks, with the real Makefile and set-up scripts."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels = root, root / "wheels"
        for folder in ("notebooks", "exercises", "solutions", "tools"):
            (root / folder).mkdir(parents=True)
        shutil.copy(ROOT / "Makefile", root)
        for tool in ("env.py", "learner.py"):
            shutil.copy(ROOT / "tools" / tool, root / "tools")
        (root / "backend.py").write_text(BACKEND)
        (root / "pyproject.toml").write_text(PYPROJECT)
        (root / "constraints.txt").write_text("torch==2.0\ntensorflow==2.0\nipykernel==6.0\n")
        write_wheel(self.wheels, "torch", "2.0")
        for name in (
            "notebooks/00_start.ipynb",
            "notebooks/02_sum.ipynb",
            "exercises/02_sum.ipynb",
        ):
            (root / name).write_text(f"the original of {name}")
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "MAKE", "COURSE_"))
        }
        self.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "wheels"}
        self.environment |= {"PIP_CONFIG_FILE": os.devnull, "COURSE_WORK": str(root / "work")}

    def run(self, *command, **extra) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(part) for part in command],
            cwd=self.root,
            env=self.environment | extra,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )

    def env(self, *options) -> subprocess.CompletedProcess:
        return self.run(sys.executable, "tools/env.py", *options)

    def learner(self, *words) -> subprocess.CompletedProcess:
        return self.run(sys.executable, "tools/learner.py", *words)

    def sync(self) -> list[str]:
        """What `make lab` does before JupyterLab starts."""
        Copies = runpy.run_path(str(self.root / "tools/learner.py"))["Copies"]
        return Copies(self.root / "work").sync()

    @property
    def stamp(self) -> Path:
        return self.root / ".venv/.course-stamp"

    @property
    def fingerprint(self) -> str:
        files = (self.root / "pyproject.toml", self.root / "constraints.txt")
        return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()

    def pretend(self, *, stamp: bool = True, **setup) -> None:
        """A .venv as env.py finds it, without the minutes of making one."""
        (self.root / ".venv/bin").mkdir(parents=True, exist_ok=True)
        (self.root / ".venv/bin/python").touch()
        options = {"root": str(self.root), "torch": "default"} | setup
        (self.root / ".venv/.course-setup.json").write_text(json.dumps(options))
        if stamp:
            self.stamp.write_text(self.fingerprint)


@pytest.fixture
def toy(tmp_path) -> Toy:
    return Toy(tmp_path / "a course")  # the space is on purpose


# -- the environment ---------------------------------------------------------------------------


@pytest.mark.slow
@needs_make
def test_make_setup_installs_once_then_does_nothing_until_a_pin_changes(toy):
    done = toy.run("make", "setup", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stdout
    assert toy.stamp.read_text() == toy.fingerprint
    there = "import torch, backend; print(torch.version)"  # backend: the tree is importable
    assert toy.run(".venv/bin/python", "-c", there).stdout.strip() == "2.0"

    began = time.monotonic()
    again = toy.run("make", "setup", f"PYTHON={sys.executable}")
    assert (again.returncode, again.stdout) == (0, "")
    assert time.monotonic() - began < 10  # half a second; an installation takes far longer

    write_wheel(toy.wheels, "torch", "2.1")
    (toy.root / "constraints.txt").write_text("torch==2.1\n")
    changed = toy.run("make", "setup", f"PYTHON={sys.executable}")
    assert "has changed" in changed.stdout
    assert toy.run(".venv/bin/python", "-c", there).stdout.strip() == "2.1"
    assert toy.stamp.read_text() == toy.fingerprint


@pytest.mark.slow
def test_a_killed_or_failed_installation_is_started_again_from_nothing(toy):
    (toy.root / "wait").touch()
    process = subprocess.Popen(
        [sys.executable, "tools/env.py"],
        cwd=toy.root,
        env=toy.environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not (toy.root / "waiting").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (toy.root / ".venv/bin/python").exists() and not toy.stamp.exists()
    (toy.root / ".venv/leftover").touch()
    (toy.root / "wait").unlink()

    (toy.wheels / "torch-2.0-py3-none-any.whl").unlink()
    done = toy.env()
    assert "did not finish" in done.stdout and not (toy.root / ".venv/leftover").exists()
    assert done.returncode != 0  # as without a network
    assert "run the same command again" in done.stdout.splitlines()[-1]
    assert not toy.stamp.exists()


def test_when_the_environment_is_made_anew_and_when_updated(toy):
    def plan(*options):
        done = toy.env("--dry-run", *options)
        assert done.returncode == 0, done.stdout
        return ["create" if " -m venv " in done.stdout else "update", ""][done.stdout == ""]

    assert plan() == "create"
    toy.pretend()
    assert plan() == "" and plan("--torch", "default") == ""
    assert plan("--torch", "cpu") == "create"  # pip would keep the build that is there
    toy.pretend(torch="cpu")
    assert plan() == "" and plan("--torch", "cpu") == ""
    toy.pretend(root="/somewhere/else")
    assert plan() == "create"
    toy.pretend()
    toy.stamp.unlink()
    assert plan() == "create"
    (toy.root / ".venv/.course-setup.json").unlink()  # someone else's .venv: taken over
    assert plan() == "update"
    (toy.root / ".venv/bin/python").unlink()
    assert plan() == "create"


def test_torch_comes_by_exact_pin_and_cpu_builds_only_when_asked_for(toy):
    plain = toy.env("--dry-run").stdout
    assert " torch==2.0 " in plain and "-c constraints.txt" in plain and "-index-url" not in plain
    assert "download.pytorch.org/whl/cpu" in toy.env("--dry-run", "--torch", "cpu").stdout
    wrong = toy.env("--dry-run", "--torch", "cu130")
    assert wrong.returncode != 0 and "TORCH is cpu or default" in wrong.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="TensorFlow uses GPUs on Linux only")
def test_tensorflow_with_cuda_gets_an_environment_without_torch(toy):
    done = toy.run("make", "lab-tf-gpu", "DRY_RUN=1", f"PYTHON={sys.executable}")
    install = next(line for line in done.stdout.splitlines() if "and-cuda" in line)
    assert ".venv-tf-gpu" in install and "tensorflow[and-cuda]==2.0" in install
    assert "torch" not in install
    kernel = done.stdout.splitlines()[-1]
    assert "--display-name TensorFlow (GPU)" in kernel and "--env COURSE_TF_GPU 1" in kernel


# -- one sentence on what is missing -----------------------------------------------------------


def test_set_up_is_readable_by_old_pythons():
    ast.parse((ROOT / "tools/env.py").read_text(), feature_version=(3, 6))


@needs_make
def test_an_old_python_is_named_in_one_sentence(toy):
    old = sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.[6-9].*/bin/python")))
    old += [path for path in map(shutil.which, ("python3.8", "python3.9", "python3.10")) if path]
    old = [path for path in old if toy.run(path, "-c", "1").returncode == 0]
    if not old:
        pytest.skip("there is no older Python on this machine")
    done = toy.run("make", "lab", f"PYTHON={old[0]}")
    sentence = done.stdout.splitlines()[0]
    assert done.returncode != 0 and not (toy.root / ".venv").exists()
    assert re.match(r"make: the course needs Python 3\.11.*only found Python 3\.\d+: ", sentence)


@needs_make
def test_no_python_at_all_is_one_sentence(toy):
    done = toy.run("make", "test", "PYTHON=no-such-python")
    assert done.returncode != 0
    assert done.stdout.startswith("make: there is no Python 3 here: install Python 3.11")


@pytest.mark.parametrize(
    ("what", "fake", "sentence"),
    [
        ("disk", "import shutil; shutil.disk_usage = lambda p: shutil._ntuple_diskusage(9, 9, 9)",
         r"make: installing needs \d+ GiB of free disk space and there are 0\.0 GiB"),
        ("venv", "import sys; sys.modules['ensurepip'] = None",
         r"make: this Python \S+ comes without its venv module: install it"),
        ("new", "import sys; sys.version_info = (3, 14, 0)",
         r"make: Python 3\.14 is newer than the course's tested set"),
        ("mac", "import sys, platform as p; sys.platform = 'darwin'; p.machine = lambda: 'x86_64'",
         r"make: PyTorch and TensorFlow no longer make builds for Macs with Intel"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_in_one_sentence(toy, what, fake, sentence):
    start = f"{fake}\nimport runpy; runpy.run_path('tools/env.py', run_name='__main__')"
    done = toy.run(sys.executable, "-c", start)
    assert done.returncode == 1, done.stdout
    assert re.match(sentence, done.stdout) and done.stdout.count("\n") == 1
    assert not (toy.root / ".venv").exists()


@needs_make
def test_help_comes_first_and_lists_every_target(toy):
    plain = toy.run("make").stdout
    assert plain == toy.run("make", "help").stdout
    phony = re.search(r"^\.PHONY: (.*?) \$", (ROOT / "Makefile").read_text(), re.M).group(1)
    assert set(phony.split()) == set(re.findall(r"^  make (\S+)", plain, re.M))


# -- the learner's own copies ------------------------------------------------------------------


def test_copies_are_made_where_missing_and_never_overwritten(toy):
    assert toy.sync() == []
    mine = toy.root / "work/notebooks/02_sum.ipynb"
    assert mine.read_text() == "the original of notebooks/02_sum.ipynb"
    mine.write_text("what I wrote")
    assert toy.sync() == []  # mine differs from the original, but the original is not newer
    (toy.root / "notebooks/02_sum.ipynb").write_text("a better original")
    assert toy.sync() == ["notebooks/02_sum.ipynb"] == toy.sync()
    assert mine.read_text() == "what I wrote"
    mine.unlink()
    assert toy.sync() == []
    assert mine.read_text() == "a better original"


def test_reset_restores_one_lesson_and_keeps_every_earlier_copy(toy):
    toy.sync()
    mine = toy.root / "work/exercises/02_sum.ipynb"
    for count, text in enumerate(("first try", "second try"), start=1):
        mine.write_text(text)
        done = toy.learner("reset", "02")
        assert done.returncode == 0 and "yours is kept as 02_sum.bak" in done.stdout
        assert mine.read_text() == "the original of exercises/02_sum.ipynb"
        assert mine.with_name(f"02_sum.bak{count if count > 1 else ''}.ipynb").read_text() == text
    assert not list((toy.root / "work/notebooks").glob("*.bak*"))  # nothing there was changed
    (toy.root / "work/notebooks/02_sum.ipynb").write_text("my notes")
    mine.write_text("third try")
    toy.learner("reset", "exercises/02")
    assert (toy.root / "work/notebooks/02_sum.ipynb").read_text() == "my notes"


def test_reset_of_an_unknown_lesson_changes_nothing_and_lists_the_known(toy):
    toy.sync()
    (toy.root / "work/notebooks/02_sum.ipynb").write_text("my notes")
    for words in (["reset", "7"], ["reset", "0"], ["reset", ""], ["reset"]):
        done = toy.learner(*words)
        assert done.returncode != 0 and "make reset" in done.stdout, words
    assert "there are 00, 02" in toy.learner("reset", "7").stdout
    assert (toy.root / "work/notebooks/02_sum.ipynb").read_text() == "my notes"


@needs_make
def test_make_reset_takes_the_number_as_a_word(toy):
    for goals in (["reset", "02"], ["reset", "NN=02"]):
        plan = toy.run("make", "-n", *goals)
        assert plan.returncode == 0 and "tools/learner.py reset 02\n" in plan.stdout, goals


def test_tests_take_the_originals_whatever_a_learner_wrote(toy):
    """pytest, with the course's own settings, collects nothing from work/ and changes nothing."""
    toy.sync()
    (toy.root / "work/notebooks/02_sum.ipynb").write_text("not even JSON")
    (toy.root / "work/exercises/test_mine.py").write_text("def test(): assert False")
    (toy.root / "tests").mkdir()
    (toy.root / "tests/test_ours.py").write_text("def test(): pass")
    for name in ("notebooks/00_start", "notebooks/02_sum", "exercises/02_sum"):
        cell = '{"cell_type": "code", "execution_count": null, "id": "a", "metadata": {},'
        cell += ' "outputs": [], "source": "1 + 1"}'
        text = f'{{"cells": [{cell}], "metadata": {{}}, "nbformat": 4, "nbformat_minor": 5}}'
        (toy.root / f"{name}.ipynb").write_text(text)
    shutil.copy(ROOT / "pyproject.toml", toy.root)
    before = {p: p.read_bytes() for p in (toy.root / "work").rglob("*") if p.is_file()}
    done = toy.run(sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0")
    assert done.returncode == 0, done.stdout
    items = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(items) == 4 and not [item for item in items if item.startswith("work")]
    after = {p: p.read_bytes() for p in (toy.root / "work").rglob("*") if p.is_file()}
    assert before == after
