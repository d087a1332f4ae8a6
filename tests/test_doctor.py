"""The doctor on installations made up from folders, and the commands on this one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_utils import _gpus, doctor
from course_utils.devices import Census, Device
from course_utils.doctor import MIB, Finding, Installation, diagnose, report

REPO = Path(__file__).resolve().parent.parent
TWO_CORES = Census((), Device("cpu", 0, "CPU", cores=(0, 1)))
H100 = Device("gpu", 0, "NVIDIA H100", uuid="GPU-aa")
WITH_GPU = Census((H100,), Device("cpu", 0, "CPU", cores=(0, 1)))


class Computer:
    """A checkout with a .venv, packages and system folders, all sound until made otherwise."""

    def __init__(self, folder: Path):
        self.course = folder / "course"
        self.venv = self.course / ".venv"
        self.site = self.venv / "lib/site-packages"
        self.root = folder / "root"
        self.site.mkdir(parents=True)
        (self.root / "dev/shm").mkdir(parents=True)
        (self.course / "pyproject.toml").write_text("[project]\n")
        (self.course / "constraints.txt").write_text("torch==2.13.0\n")
        self.stamp()
        self.kernel("python")
        self.package("torch", "2.13.0")
        self.torch_version("'13.0'")
        self.package("GPUtil", "1.4.0")
        self.package("setuptools", "84.2.1")

    def stamp(self):
        text = b"".join(
            (self.course / f).read_bytes() for f in ("pyproject.toml", "constraints.txt")
        )
        (self.venv / ".course-stamp").write_text(hashlib.sha256(text).hexdigest())

    def kernel(self, program: str):
        spec = self.venv / "share/jupyter/kernels/python3/kernel.json"
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_text(json.dumps({"argv": [program, "-m", "ipykernel_launcher"]}))

    def package(self, name: str, version: str, files: tuple[str, ...] = ()):
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{f},,\n" for f in files))

    def remove(self, name: str):
        for info in self.site.glob(f"{name}-*.dist-info"):
            for f in info.iterdir():
                f.unlink()
            info.rmdir()

    def torch_version(self, cuda: str):
        (self.site / "torch").mkdir(exist_ok=True)
        text = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
        (self.site / "torch/version.py").write_text(text)

    def look(self, **different) -> list[Finding]:
        usual = dict(
            python=(3, 12),
            prefix=self.venv,
            path=[str(self.site)],
            course=self.course,
            root=self.root,
            linux=True,
            devices=TWO_CORES,
            driver=None,
            shm_size=lambda path: 2048 * MIB,
        )
        return diagnose(Installation(**(usual | different)))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("COURSE_TIER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def computer(tmp_path):
    return Computer(tmp_path)


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, report(findings)
    (finding,) = findings
    assert finding.problem and finding.evidence and finding.cure
    return finding


def test_nothing_is_found_on_a_sound_installation(computer):
    assert computer.look() == []
    assert report([]) == "nothing found"


def test_nothing_is_found_on_a_sound_installation_with_a_gpu(computer):
    assert computer.look(devices=WITH_GPU, driver="580.65.06") == []


CUDNN = "nvidia/cudnn/lib/libcudnn.so.9"


def test_cudnn_clash(computer):
    computer.package("nvidia-cudnn-cu12", "9.28.0.1", (CUDNN, "nvidia/cudnn/include/cudnn.h"))
    assert computer.look() == []  # one of them is as it should be
    computer.package("nvidia-cudnn-cu13", "9.28.0.2", (CUDNN,))
    found = only(computer.look())
    assert "overwritten each other's cuDNN" in found.problem
    for part in ("nvidia-cudnn-cu12 9.28.0.1", "nvidia-cudnn-cu13 9.28.0.2", CUDNN):
        assert part in found.evidence
    assert "make lab-tf-gpu" in found.cure
    # What torch was built for stays; both are uninstalled, because either removes the file.
    assert "uninstall -y nvidia-cudnn-cu12 nvidia-cudnn-cu13" in found.cure
    assert "--force-reinstall --no-deps nvidia-cudnn-cu13==9.28.0.2" in found.cure


def test_cudnn_packages_that_share_no_file_are_fine(computer):
    computer.package("nvidia-cudnn-cu11", "8.9", ("nvidia/cudnn/lib/libcudnn.so.8",))
    computer.package("nvidia-cudnn-cu13", "9.28", (CUDNN,))
    assert computer.look() == []


def test_gputil_without_distutils(computer):
    computer.remove("setuptools")
    found = only(computer.look())
    assert "needs distutils" in found.problem and "Python 3.12" in found.evidence
    assert found.cure.startswith("`pip install setuptools`")
    assert computer.look(python=(3, 11)) == []  # it still has distutils


def test_gputil_that_was_mended(computer):
    computer.remove("setuptools")
    (computer.site / "GPUtil").mkdir()
    source = computer.site / "GPUtil/GPUtil.py"
    source.write_text("from distutils import spawn\n")
    assert "distutils" in only(computer.look()).problem
    source.write_text("import shutil\n")
    assert computer.look() == []


def test_small_shared_memory(computer):
    found = only(computer.look(shm_size=lambda path: 64 * MIB))  # Docker's default
    assert "Shared memory is too small" in found.problem and "has 64 MiB" in found.evidence
    assert "--shm-size" in found.cure and "num_workers=0" in found.cure
    assert computer.look(shm_size=lambda path: 64 * MIB, linux=False) == []


def test_no_shared_memory(computer):
    (computer.root / "dev/shm").rmdir()
    assert "does not exist" in only(computer.look()).evidence


def test_shared_memory_is_really_measured(computer, monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_SHM", 2**62)
    size = shutil.disk_usage(computer.root).total / MIB
    assert f"has {size:.0f} MiB" in only(computer.look(shm_size=None)).evidence


def test_one_core(computer):
    one = Census((), Device("cpu", 0, "CPU", cores=(3,)))
    found = only(computer.look(devices=one))
    assert "only one device" in found.problem and "number 3" in found.evidence
    assert "taskset" in found.cure and "oversubscribe=True" in found.cure


def test_many_cores_and_a_container_that_may_use_one(computer):
    held = Census((), Device("cpu", 0, "CPU", cores=tuple(range(8)), quota=1.5))
    found = only(computer.look(devices=held))
    assert "8 cores" in found.evidence and "1.5 CPUs" in found.evidence
    assert "--cpus=2" in found.cure


def test_one_core_and_many_gpus_is_fine(computer):
    second = Device("gpu", 1, "NVIDIA H100", uuid="GPU-bb")
    many = Census((H100, second), Device("cpu", 0, "CPU", cores=(0,)))
    assert computer.look(devices=many, driver="580.1") == []


def test_wrong_kernel(computer, tmp_path):
    found = only(computer.look(prefix=tmp_path / "anaconda3"))
    assert "not the course's Python" in found.problem
    assert str(tmp_path / "anaconda3") in found.evidence and str(computer.venv) in found.evidence
    assert "Change Kernel" in found.cure


def test_the_second_environment_of_the_course_is_no_wrong_kernel(computer):
    second = computer.course / ".venv-tf-gpu"
    second.mkdir()
    (second / ".course-stamp").write_text((computer.venv / ".course-stamp").read_text())
    assert computer.look(prefix=second) == []


def test_without_a_venv_there_is_no_wrong_kernel(computer, tmp_path):
    assert computer.look(course=None, prefix=tmp_path) == []  # Colab
    other = Computer(tmp_path / "conda")
    other.venv.rename(tmp_path / "elsewhere")
    assert other.look(prefix=tmp_path / "elsewhere", path=[]) == []


def test_kernelspec_that_starts_another_python(computer):
    computer.kernel("/opt/conda/bin/python")
    found = only(computer.look())
    assert "kernel starts another Python" in found.problem
    assert "/opt/conda/bin/python" in found.evidence and "ipykernel install" in found.cure
    computer.kernel(str(computer.venv / "bin/python"))
    assert computer.look() == []


def test_stale_venv(computer):
    (computer.course / "constraints.txt").write_text("torch==2.14.0\n")
    found = only(computer.look())
    assert ".venv is stale" in found.problem and "has changed" in found.evidence
    assert "make lab" in found.cure
    computer.stamp()
    assert computer.look() == []


def test_unfinished_venv(computer):
    (computer.venv / ".course-stamp").unlink()
    assert "did not finish" in only(computer.look()).evidence


@pytest.mark.parametrize(
    ("cuda", "driver", "old"),
    [
        ("'13.0'", "575.51.03", True),
        ("'13.0'", "580.65.06", False),
        ("'12.8'", "520.61.05", True),
        ("'12.8'", "525.60.13", False),
        ("'11.8'", "440.33", True),
        ("'13.0'", None, False),  # not known is no finding
    ],
)
def test_old_driver(computer, cuda, driver, old):
    computer.torch_version(cuda)
    findings = computer.look(devices=WITH_GPU, driver=driver)
    if not old:
        assert findings == []
        return
    found = only(findings)
    assert "driver is too old" in found.problem and f"driver {driver}" in found.evidence
    assert "Update the driver to" in found.cure


def test_old_driver_for_tensorflow(computer):
    computer.remove("torch")
    (computer.site / "torch/version.py").unlink()
    computer.package("tensorflow", "2.21.0")
    computer.package("nvidia-cuda-runtime-cu12", "12.9")
    assert "too old" in only(computer.look(devices=WITH_GPU, driver="470.1")).problem


def test_driver_that_answers_nobody(computer):
    version = computer.root / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    broken = Census((), TWO_CORES.cpu, errors=("NVML: Driver/library version mismatch",))
    found = only(computer.look(devices=broken))
    assert "version mismatch" in found.evidence and "restart" in found.cure


def test_driver_version_without_nvml(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert _gpus.driver_version(str(tmp_path)) is None
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Rel\nG")
    assert _gpus.driver_version(str(tmp_path)) == "570.86.10"


def test_cpu_build_on_a_gpu_machine(computer):
    computer.torch_version("None")
    found = only(computer.look(devices=WITH_GPU))
    assert "CPU build" in found.problem and "NVIDIA H100" in found.evidence
    assert "make lab TORCH=default" in found.cure
    assert computer.look() == []  # without a GPU it is the right build


def test_several_problems_are_numbered(computer):
    computer.remove("setuptools")
    (computer.venv / ".course-stamp").unlink()
    text = report(computer.look())
    assert "1. GPUtil" in text and "2. The environment" in text and text.count("cure: ") == 2


def test_a_check_that_fails_is_not_called_fine(computer):
    (computer.venv / "share/jupyter/kernels/python3/kernel.json").write_text("{not json")
    found = only(computer.look())
    assert "kernel could not be checked" in found.problem and "JSON" in found.evidence


def test_a_folder_of_an_interrupted_installation_is_passed_over(computer):
    (computer.site / "~orch-2.13.0.dist-info").mkdir()
    assert computer.look() == []


# --- the commands -------------------------------------------------------------------------


def course(*words: str, **env: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course_utils", *words]
    return subprocess.run(
        command, cwd=REPO, env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def test_census_command():
    out = course("census", COURSE_TIER="cpu")
    assert out.returncode == 0 and "tier cpu: " in out.stdout and out.stderr == ""


def test_census_command_for_programs():
    out = course("census", "--json", COURSE_TIER="cpu")
    found = json.loads(out.stdout)
    assert out.returncode == 0 and found["tier"] == "cpu"
    assert found["cpu"]["cores"] and found["cpu"]["sources"]["cores"]


def test_doctor_command_is_1_exactly_when_something_is_found():
    out = course("doctor", "--json")
    findings = json.loads(out.stdout)
    assert out.returncode == (1 if findings else 0), out.stderr
    text = course("doctor")
    assert text.returncode == out.returncode
    assert ("nothing found" in text.stdout) == (not findings)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin")
def test_doctor_command_finds_a_real_lack_of_cores():
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from course_utils.__main__ import main; raise SystemExit(main(['doctor']))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    gpus = len(Installation().devices.usable_gpus)
    assert gpus > 1 or (out.returncode == 1 and "only one device" in out.stdout), out.stderr


def test_help_and_wrong_usage():
    assert course("--help").returncode == 0
    assert "exit code" in course("doctor", "--help").stdout
    wrong = course("cencus")
    assert wrong.returncode == 2 and "invalid choice" in wrong.stderr
