"""The package imports, and looks at the machine, under every Python that the course supports.

Interpreters are looked for on PATH and among pyenv's. Nothing is installed for them: of the
package's dependencies the commands need psutil and nvidia-ml-py only, whose files fit every
Python 3, and must also work without either.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
HEAVY = ("torch", "tensorflow", "keras", "numpy", "matplotlib", "psutil", "pynvml", "IPython")

EVERY_MODULE = f"""
import importlib, json, pkgutil, sys
import course_utils
names = [m.name for m in pkgutil.walk_packages(course_utils.__path__, "course_utils.")]
names = [n for n in names if not n.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print(json.dumps([names, [m for m in {HEAVY!r} if m in sys.modules]]))
"""


@functools.cache
def interpreter(version: str) -> str | None:
    """A Python of this version that runs; pyenv's shims for versions not chosen do not."""
    if version == "{}.{}".format(*sys.version_info[:2]):
        return sys.executable
    candidates = [shutil.which(f"python{version}")]
    pyenv = os.environ.get("PYENV_ROOT") or _output("pyenv", "root") or Path.home() / ".pyenv"
    candidates += sorted(Path(pyenv).glob(f"versions/{version}.*/bin/python"), reverse=True)
    for python in filter(None, candidates):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if _output(str(python), "-c", code) == version:
            return str(python)
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@pytest.fixture(params=VERSIONS)
def python(request) -> str:
    found = interpreter(request.param)
    if found is None:
        pytest.skip(
            f"no Python {request.param} on PATH or in pyenv: `pyenv install {request.param}`"
        )
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory) -> Path:
    """A folder with psutil and nvidia-ml-py, linked from here, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    for name in ("psutil", "pynvml"):
        spec = importlib.util.find_spec(name)
        if spec is None:
            pytest.skip(f"{name} is not installed here")
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (folder / source.name).symlink_to(source)
    return folder


def run(python: str, *words: str, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COURSE_"))}
    # -S: without the packages of the interpreter itself, whatever they are.
    env |= {"PYTHONPATH": os.pathsep.join(map(str, (REPO, *path))), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python, "-S", *words], cwd="/", env=env, capture_output=True, text=True, timeout=60
    )


def test_every_module_imports_without_any_dependency(python):
    out = run(python, "-c", EVERY_MODULE)
    assert out.returncode == 0, out.stderr
    names, heavy = json.loads(out.stdout.splitlines()[-1])
    assert "course_utils.devices" in names and "course_utils.doctor" in names
    assert heavy == []


def test_census_with_the_light_dependencies(python, light):
    out = run(python, "-m", "course_utils", "census", "--json", path=(light,))
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found["cpu"]["total_memory"] > 0 and found["tier"] in ("cpu", "gpu1", "gpuN")
    assert found["cpu"]["sources"]["total_memory"] in ("psutil", "cgroup")


def test_census_without_them_says_what_it_does_not_know(python):
    out = run(python, "-m", "course_utils", "census")
    assert out.returncode == 0, out.stderr
    assert "tier " in out.stdout and "main memory not known" in out.stdout


def test_doctor_runs(python, light):
    for path in ((light,), ()):
        out = run(python, "-m", "course_utils", "doctor", "--json", path=path)
        assert out.returncode in (0, 1), out.stderr
        findings = json.loads(out.stdout)
        assert out.returncode == (1 if findings else 0)
        assert not any("could not be checked" in f["problem"] for f in findings)


def test_in_this_environment_nothing_heavy_is_imported_either():
    """Here torch and TensorFlow are installed, so that an import of them would succeed."""
    out = subprocess.run(
        [sys.executable, "-c", EVERY_MODULE], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout.splitlines()[-1])[1] == []


def test_import_takes_no_time_worth_noticing():
    """Milliseconds in fact (printed by benchmarks/census_bench.py); seconds with a framework."""
    code = (
        "import time; begin = time.perf_counter()\n"
        "import course_utils, course_utils.devices\n"
        "print(time.perf_counter() - begin)"
    )
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", code], cwd=REPO, capture_output=True, check=True
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.5
