"""What is wrong with this installation, in words, and what to do about it.

::

    python -m course_utils doctor

    from course_utils.doctor import diagnose, report
    print(report(diagnose()))

Nothing is changed, and no framework is imported: packages are read from their metadata.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from course_utils import _gpus
from course_utils.devices import Census, census

MIB = 1024**2
# Docker gives 64 MiB. A DataLoader with four workers, two batches of 32 MiB waiting at each,
# needs 256 MiB; with less its workers die of "Bus error" (pytorch#5040).
LEAST_SHM = 256 * MIB
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
LEAST_DRIVER = {11: 450, 12: 525, 13: 580}


@dataclass(frozen=True)
class Finding:
    """Something wrong: what it is, how it was seen, what to do."""

    problem: str
    evidence: str
    cure: str

    def __str__(self) -> str:
        return f"{self.problem}\n  seen: {self.evidence}\n  cure: {self.cure}"


def _course_folder() -> Path | None:
    """The checkout that this package is used from; None when it was installed elsewhere."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "constraints.txt").exists() else None


@dataclass(frozen=True)
class Installation:
    """Where the doctor looks. The defaults are the real things; tests pass made-up ones."""

    python: tuple[int, int] = sys.version_info[:2]
    prefix: Path = field(default_factory=lambda: Path(sys.prefix))
    path: Sequence[str] = field(default_factory=lambda: list(sys.path))  # of packages
    course: Path | None = field(default_factory=_course_folder)
    root: Path = Path("/")  # of dev/shm and proc
    linux: bool = sys.platform == "linux"
    devices: Census = field(default_factory=census)
    driver: str | None = field(default_factory=_gpus.driver_version)
    shm_size: Callable[[Path], int] | None = None  # bytes of the file system; default: ask it

    @functools.cached_property
    def packages(self) -> dict[str, metadata.Distribution]:
        """Installed distributions by lower-case name; of doubles the one that is imported."""
        found: dict[str, metadata.Distribution] = {}
        for d in metadata.distributions(path=list(self.path)):
            name = d.metadata["Name"]
            if name:  # a folder left behind by an interrupted installation has none
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), d)
        return found

    def file(self, package: str, name: str) -> str | None:
        """Text of a package's file, or None."""
        d = self.packages.get(package)
        path = Path(str(d.locate_file(name))) if d else None
        return path.read_text() if path and path.is_file() else None


def diagnose(where: Installation | None = None) -> list[Finding]:
    """Everything that was found wrong; an empty list when nothing was.

    A check that itself fails is a finding too: what could not be checked is not called fine.
    """
    where = Installation() if where is None else where
    findings: list[Finding] = []
    for check in CHECKS:
        try:
            findings += filter(None, [check(where)])
        except Exception as e:
            what = check.__name__.strip("_").replace("_", " ")
            findings.append(
                Finding(
                    f"Whether there is a problem with the {what} could not be checked.",
                    f"{type(e).__name__}: {e}",
                    "Mend what the error names, or report it as an error of the course.",
                )
            )
    return findings


def report(findings: Sequence[Finding]) -> str:
    """The findings as numbered text, or "nothing found"."""
    if not findings:
        return "nothing found"
    return "\n".join(f"{i}. {finding}" for i, finding in enumerate(findings, 1))


# --- the checks: each returns one Finding or None -----------------------------------------


def _cudnn_clash(at: Installation) -> Finding | None:
    """torch and TensorFlow bring cuDNN in packages of different names with the same file."""
    owners: dict[str, list[str]] = {}
    for name, d in at.packages.items():
        if name.startswith("nvidia-cudnn-cu"):
            for file in d.files or ():
                if re.search(r"cudnn/(lib|bin)/.*cudnn\b.*(so|dll)", str(file)):
                    owners.setdefault(str(file), []).append(name)
    shared = next((f for f, names in owners.items() if len(names) > 1), None)
    if shared is None:
        return None
    names = sorted(owners[shared])
    versions = " and ".join(f"{n} {at.packages[n].version}" for n in names)
    keep = next((n for n in names if n.endswith(_cuda_major_of_torch(at) or "-")), names[-1])
    pin = f"{keep}=={at.packages[keep].version}"
    return Finding(
        "The CUDA packages of torch and TensorFlow have overwritten each other's cuDNN.",
        f"{versions} both install {shared}",
        "Give TensorFlow on GPUs an environment of its own: `make lab-tf-gpu`. Repair this one: "
        f"`pip uninstall -y {' '.join(names)}`, then "
        f"`pip install --force-reinstall --no-deps {pin}`.",
    )


def _gputil(at: Installation) -> Finding | None:
    gputil = at.packages.get("gputil")
    if gputil is None or at.python < (3, 12) or "setuptools" in at.packages:
        return None
    source = at.file("gputil", "GPUtil/GPUtil.py")
    if source is not None and "distutils" not in source:
        return None  # a later release that has been mended
    return Finding(
        "GPUtil cannot be imported: it needs distutils, which this Python no longer has.",
        f"GPUtil {gputil.version}, Python {at.python[0]}.{at.python[1]}, no setuptools",
        "`pip install setuptools` brings a distutils of its own.",
    )


def _shared_memory(at: Installation) -> Finding | None:
    if not at.linux:
        return None
    shm = at.root / "dev/shm"
    if not shm.is_dir():
        size, seen = 0, "/dev/shm does not exist"
    else:
        size = (at.shm_size or _file_system_size)(shm)
        seen = f"/dev/shm has {size / MIB:.0f} MiB; the course wants {LEAST_SHM // MIB} MiB"
    if size >= LEAST_SHM:
        return None
    return Finding(
        "Shared memory is too small: workers of a DataLoader would die of a bus error.",
        seen,
        "In Docker: `docker run --shm-size=1g ...` (or --ipc=host); in Kubernetes: an emptyDir "
        "with medium Memory at /dev/shm; elsewhere: `sudo mount -o remount,size=1G /dev/shm`. "
        "Without that: num_workers=0.",
    )


def _file_system_size(path: Path) -> int:
    import shutil

    return shutil.disk_usage(path).total


def _number_of_cores(at: Installation) -> Finding | None:
    found, cpu = at.devices, at.devices.cpu
    if len(found.usable_gpus) > 1 or cpu.promised > 1:
        return None
    if len(cpu.cores) > 1:
        seen = (
            f"{len(cpu.cores)} cores, but the container may use {cpu.quota:g} CPUs' worth of time"
        )
        cure = "Raise the container's limit (`docker run --cpus=2 ...`)."
    else:
        seen = f"this process may use one core, number {cpu.cores[0]}"
        cure = "Start it without taskset, or give the machine or container a second core."
    return Finding(
        "There is only one device: lessons that need two ranks will stop.",
        seen,
        f"{cure} Or take Colab, which has two. oversubscribe=True runs the ranks on one core: "
        "results are right then, timings mean little.",
    )


def _kernel(at: Installation) -> Finding | None:
    if at.course is None or not (venv := at.course / ".venv").is_dir():
        return None  # not set up by make: Colab, conda
    home = at.course.resolve()
    if home not in [p.resolve() for p in at.prefix.parents]:  # .venv-tf-gpu is the course's too
        return Finding(
            "This is not the course's Python: another kernel, or another environment.",
            f"this one lives in {at.prefix}, the course's in {venv}",
            "In JupyterLab: Kernel → Change Kernel → Python 3 (ipykernel), after starting it by "
            f"`make lab`. In a terminal: `source {venv}/bin/activate`.",
        )
    for spec in sorted(venv.glob("share/jupyter/kernels/python3/kernel.json")):
        program = json.loads(spec.read_text())["argv"][0]
        # A bare "python" is looked up beside the Jupyter that starts it. Links are not
        # followed: a venv's python is a link to the Python that made it.
        if os.path.isabs(program) and home not in Path(os.path.normpath(program)).parents:
            return Finding(
                "The course's kernel starts another Python.",
                f"{spec} starts {program}",
                f"`{venv}/bin/python -m ipykernel install --sys-prefix`",
            )
    return None


def _environment(at: Installation) -> Finding | None:
    if at.course is None or at.prefix.parent.resolve() != at.course.resolve():
        return None
    if not at.prefix.name.startswith(".venv"):
        return None
    # As tools/env.py writes it when an installation has come to its end.
    files = [at.course / "pyproject.toml", at.course / "constraints.txt"]
    wanted = hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()
    stamp = at.prefix / ".course-stamp"
    if stamp.is_file() and stamp.read_text().strip() == wanted:
        return None
    seen = (
        "pyproject.toml or constraints.txt has changed since it was made"
        if stamp.is_file()
        else f"{stamp} is missing: made by hand, or its installation did not finish"
    )
    target = "lab-tf-gpu" if at.prefix.name == ".venv-tf-gpu" else "lab"
    return Finding(
        f"The environment {at.prefix.name} is stale.",
        seen,
        f"`make {target}` brings it up to date.",
    )


def _driver(at: Installation) -> Finding | None:
    loaded = at.root / "proc/driver/nvidia/version"
    if not at.devices.gpus:
        if not loaded.exists():
            return None
        return Finding(
            "The NVIDIA driver is loaded and gives no access to a GPU.",
            "; ".join(at.devices.errors) or "it reports no GPU",
            "After an update of the driver: restart the machine. In a container: start it with "
            "`--gpus all` and the NVIDIA container toolkit.",
        )
    cuda = _cuda_major_of_torch(at) or _cuda_major_of_tensorflow(at)
    least = LEAST_DRIVER.get(int(cuda)) if cuda else None
    if least is None or at.driver is None or int(at.driver.split(".")[0]) >= least:
        return None
    return Finding(
        "The NVIDIA driver is too old for the CUDA that is installed: GPUs will not be used.",
        f"driver {at.driver}; CUDA {cuda} needs {least} or newer",
        f"Update the driver to {least} or newer (on a shared machine: ask its administrator), or "
        "install a build of the framework for an older CUDA. The course also runs without the "
        "GPU: COURSE_TIER=cpu.",
    )


def _build_of_torch(at: Installation) -> Finding | None:
    text = at.file("torch", "torch/version.py")
    if not at.devices.gpus or text is None or re.search(r"^(cuda|hip)\b.*= *'", text, re.M):
        return None
    return Finding(
        "This torch is a CPU build, on a machine with a GPU: it will not use it.",
        f"torch {at.packages['torch'].version} without CUDA; found {at.devices.gpus[0].name}",
        "`make lab TORCH=default` makes the environment anew with the CUDA build. To leave the "
        "GPU aside on purpose, set COURSE_TIER=cpu.",
    )


def _cuda_major_of_torch(at: Installation) -> str | None:
    match = re.search(r"^cuda\b.*= *'(\d+)", at.file("torch", "torch/version.py") or "", re.M)
    return match and match[1]


def _cuda_major_of_tensorflow(at: Installation) -> str | None:
    if "tensorflow" not in at.packages:
        return None
    names = (re.fullmatch(r"nvidia-cuda-runtime-cu(\d+)", n) for n in at.packages)
    return next((m[1] for m in names if m), None)


CHECKS = (
    _cudnn_clash,
    _gputil,
    _shared_memory,
    _number_of_cores,
    _kernel,
    _environment,
    _driver,
    _build_of_torch,
)
