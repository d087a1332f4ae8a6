"""The census on machines that exist, and on drivers in every state they are met in."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from course_utils import _cpu, _gpus, devices
from course_utils.devices import Census, Device, NotEnoughDevices, census, slots

GIB = 1024**3
MIB = 1024**2
REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No memory of earlier failures, no settings of the shell that runs the tests."""
    monkeypatch.setattr(_gpus, "_failed", {})
    monkeypatch.setattr(_gpus, "_nvml_pid", None)
    for name in ("COURSE_TIER", "CUDA_VISIBLE_DEVICES", "COURSE_TF_GPU", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


# --- drivers made up: a module in NVML's place, a program in nvidia-smi's ------------------


class NVMLError(Exception):
    pass


def raising(text):
    def call(*_args):
        raise NVMLError(text)

    return call


def fake_pynvml(monkeypatch, **calls):
    """A pynvml with one healthy GPU, some of whose functions are replaced."""
    memory = types.SimpleNamespace(total=80 * GIB, used=2 * GIB, free=78 * GIB)
    healthy = dict(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetName=lambda h: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetUUID=lambda h: f"GPU-0000000{h}",
        nvmlDeviceGetMemoryInfo=lambda h: memory,
        nvmlDeviceGetUtilizationRates=lambda h: types.SimpleNamespace(gpu=37, memory=5),
        nvmlDeviceGetMigMode=raising("Not Supported"),
        nvmlSystemGetDriverVersion=lambda: "580.65.06",
    )
    module = types.ModuleType("pynvml")
    module.__dict__.update(healthy | calls)
    monkeypatch.setitem(sys.modules, "pynvml", module)


def no_nvml(monkeypatch):
    fake_pynvml(monkeypatch, nvmlInit=raising("Driver Not Loaded"))


def fake_smi(monkeypatch, folder: Path, script: str):
    """A real program called nvidia-smi, first on PATH."""
    no_nvml(monkeypatch)
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def says(line: str) -> str:
    return f"cat <<'END'\n{line}\nEND"


def errors_of(found: Census) -> str:
    return "\n".join(found.errors)


def test_the_made_up_nvml_has_only_functions_that_the_real_one_has(monkeypatch):
    real = pytest.importorskip("pynvml")
    fake_pynvml(monkeypatch)
    names = [n for n in vars(sys.modules["pynvml"]) if n.startswith("nvml")]
    assert names and all(hasattr(real, n) for n in names)


def test_nvml_gives_every_field_and_says_where_it_came_from(monkeypatch):
    fake_pynvml(monkeypatch)
    (gpu,) = census().gpus
    assert (gpu.kind, gpu.index, gpu.name) == ("gpu", 0, "NVIDIA H100 80GB HBM3")
    assert (gpu.total_memory, gpu.used_memory, gpu.free_memory) == (80 * GIB, 2 * GIB, 78 * GIB)
    assert gpu.utilisation == 37.0 and gpu.uuid == "GPU-00000000"
    known = ["total_memory", "used_memory", "free_memory", "utilisation", "name", "uuid"]
    assert {gpu.sources[k] for k in known} == {"nvml"}


def test_nvml_names_given_as_bytes_are_text(monkeypatch):
    fake_pynvml(monkeypatch, nvmlDeviceGetName=lambda h: b"Tesla T4")
    assert census().gpus[0].name == "Tesla T4"


def test_stub_driver_whose_calls_all_fail(monkeypatch, tmp_path):
    fake_smi(
        monkeypatch,
        tmp_path,
        "echo 'NVIDIA-SMI has failed because it could not reach the driver.'; exit 9",
    )
    found = census()
    assert found.gpus == () and found.tier == "cpu"
    assert "NVML: NVMLError: Driver Not Loaded" in found.errors
    assert "nvidia-smi: exit code 9: NVIDIA-SMI has failed" in errors_of(found)


@pytest.mark.skipif(sys.platform != "linux", reason="the library has another name elsewhere")
@pytest.mark.parametrize("kind", ["empty file", "no functions"])
def test_stub_library_on_the_loaders_path(tmp_path, kind):
    """The real loader and the real pynvml meet a libnvidia-ml that is none."""
    library = tmp_path / "libnvidia-ml.so.1"
    if kind == "empty file":
        library.touch()
    elif (cc := shutil.which("cc")) is None:
        pytest.skip("no C compiler to make a stub library with")
    else:
        source = tmp_path / "stub.c"
        source.write_text("int nothing_here(void) { return 0; }\n")
        subprocess.run([cc, "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from course_utils.devices import census; c = census(); print(len(c.gpus), c.errors[0])"
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(REPO)}
    env["PATH"] = str(tmp_path)  # and no nvidia-smi
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("0 NVML: ")
    assert "cannot be loaded" in out.stdout if kind == "empty file" else "NVMLError" in out.stdout


@pytest.mark.parametrize("code", [0, 6])
def test_no_devices_were_found(monkeypatch, tmp_path, code):
    fake_smi(monkeypatch, tmp_path, f"echo 'No devices were found'; exit {code}")
    found = census()
    assert found.gpus == ()
    assert "No devices were found" in errors_of(found)


def test_smi_healthy_two_gpus(monkeypatch, tmp_path):
    lines = (
        "0, GPU-aa, 81559, 1024, 80535, 12, NVIDIA H100\n1, GPU-bb, 81559, 0, 81559, 0, NVIDIA H100"
    )
    fake_smi(monkeypatch, tmp_path, says(lines))
    found = census()
    assert found.tier == "gpuN" and [g.index for g in found.gpus] == [0, 1]
    assert found.gpus[0].total_memory == 81559 * MIB
    assert found.gpus[0].utilisation == 12.0
    assert found.gpus[0].sources["free_memory"] == "nvidia-smi"


def test_smi_not_available_is_unknown_and_the_rest_is_kept(monkeypatch, tmp_path):
    fake_smi(monkeypatch, tmp_path, says("0, GPU-aa, 40960, 10, 40950, [N/A], NVIDIA A100"))
    (gpu,) = census().gpus
    assert gpu.utilisation is None and "utilisation" not in gpu.sources
    assert gpu.used_memory == 10 * MIB
    assert "utilization.gpu not known ([N/A])" in errors_of(census())


def test_smi_insufficient_permissions_is_unknown(monkeypatch, tmp_path):
    no = "[Insufficient Permissions]"
    fake_smi(monkeypatch, tmp_path, says(f"0, GPU-aa, {no}, {no}, {no}, 5, NVIDIA A100"))
    found = census()
    (gpu,) = found.gpus
    assert (gpu.total_memory, gpu.used_memory, gpu.free_memory) == (None, None, None)
    assert gpu.utilisation == 5.0
    assert errors_of(found).count("Insufficient Permissions") == 3
    assert "unknown" in str(found)


@pytest.mark.parametrize("by", ["nvml", "nvidia-smi"])
def test_a_total_of_zero_is_unknown(monkeypatch, tmp_path, by):
    if by == "nvml":
        zero = types.SimpleNamespace(total=0, used=0, free=0)
        fake_pynvml(monkeypatch, nvmlDeviceGetMemoryInfo=lambda h: zero)
    else:
        fake_smi(monkeypatch, tmp_path, says("0, GPU-aa, 0, 0, 0, 5, Orin"))
    found = census()
    (gpu,) = found.gpus
    assert (gpu.total_memory, gpu.used_memory, gpu.free_memory) == (None, None, None)
    assert "0 bytes of memory in total" in errors_of(found)


def test_smi_that_hangs_is_given_up_killed_and_not_asked_again(monkeypatch, tmp_path):
    monkeypatch.setattr(_gpus, "SMI_SECONDS", 2.0)
    pid = tmp_path / "pid"
    # A shell with a child, which keeps the pipe open when only the shell is killed.
    fake_smi(monkeypatch, tmp_path, f"sleep 120 & echo $! > {pid}; wait")
    begin = time.monotonic()
    found = census()
    assert time.monotonic() - begin < 20  # the sleep takes 120
    assert "nvidia-smi: no answer within 2 s" in errors_of(found)
    deadline = time.monotonic() + 10
    while _runs(int(pid.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(pid.read_text())), "nvidia-smi's child was left running"
    pid.unlink()
    assert "no answer" in errors_of(census())
    assert not pid.exists(), "a driver that hung was asked a second time"


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    "script",
    [
        "head -c 3000 /dev/urandom",
        "echo '<html>proxy error</html>'",
        "echo '0, GPU-aa, 12'",
        "echo 'x, GPU-aa, 1, 1, 1, 1, name'",
        "true",
        "kill -SEGV $$",
    ],
)
def test_garbage_is_no_gpu(monkeypatch, tmp_path, script):
    fake_smi(monkeypatch, tmp_path, script)
    found = census()
    assert found.gpus == ()
    assert any(e.startswith("nvidia-smi: ") for e in found.errors)


def test_garbage_in_a_field_is_unknown_and_the_other_gpu_is_kept(monkeypatch, tmp_path):
    lines = [
        "0, GPU-aa, nan, -3, inf, 4294967295, A100",
        "warning: xyz",
        "1, ?, 100 MiB, 0, 100, 0 %, T4, 16GB",
    ]
    fake_smi(monkeypatch, tmp_path, says("\n".join(lines)))
    found = census()
    bad, good = found.gpus
    assert (bad.total_memory, bad.used_memory, bad.free_memory, bad.utilisation) == (None,) * 4
    assert (good.index, good.uuid, good.name) == (1, None, "T4, 16GB")
    assert (good.total_memory, good.utilisation) == (100 * MIB, 0.0)
    assert "a line that is no GPU: 'warning: xyz'" in errors_of(found)


def test_mig_is_said_and_its_utilisation_unknown(monkeypatch):
    fake_pynvml(
        monkeypatch,
        nvmlDeviceGetMigMode=lambda h: [1, 1],
        nvmlDeviceGetUtilizationRates=raising("Not Supported"),
        nvmlDeviceGetMemoryInfo=raising("Insufficient Permissions"),
    )
    found = census()
    (gpu,) = found.gpus
    assert gpu.utilisation is None and gpu.total_memory is None
    assert gpu.name == "NVIDIA H100 80GB HBM3"
    assert "GPU 0 is split by MIG" in errors_of(found)
    assert "Insufficient Permissions" in errors_of(found)


def test_a_gpu_without_handle_is_named_and_the_others_are_kept(monkeypatch):
    def handle(i):
        if i == 0:
            raise NVMLError("GPU is lost")
        return i

    fake_pynvml(monkeypatch, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=handle)
    found = census()
    assert [g.index for g in found.gpus] == [1]
    assert "GPU 0: handle not known (GPU is lost)" in errors_of(found)


def test_missing_binary(monkeypatch, tmp_path):
    no_nvml(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = census()
    assert found.gpus == ()
    assert "nvidia-smi: not found on PATH" in found.errors


def test_binary_that_cannot_be_run(monkeypatch, tmp_path):
    no_nvml(monkeypatch)
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF broken")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi: OSError" in errors_of(census())


def test_pynvml_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it now fails
    assert "install nvidia-ml-py" in errors_of(census())


def test_nvml_is_preferred_and_smi_not_run(monkeypatch, tmp_path):
    ran = tmp_path / "ran"
    fake_smi(monkeypatch, tmp_path, f"touch {ran}")
    fake_pynvml(monkeypatch)
    assert census().gpus and not ran.exists()


# --- the CPU ------------------------------------------------------------------------------


def machine(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def test_this_machines_cpu():
    cpu = census().cpu
    if hasattr(os, "sched_getaffinity"):
        assert set(cpu.cores) == os.sched_getaffinity(0)
        assert cpu.sources["cores"] == "affinity"
    assert cpu.total_memory > 0 and cpu.sources["total_memory"] in ("psutil", "cgroup")
    assert 0 < cpu.free_memory <= cpu.total_memory


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin")
def test_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setenv("COURSE_TIER", "cpu")
    before = os.sched_getaffinity(0)
    one = max(before)
    try:
        os.sched_setaffinity(0, {one})
        found = census()
        assert found.cpu.cores == (one,)
        with pytest.raises(NotEnoughDevices):
            slots(2)
    finally:
        os.sched_setaffinity(0, before)


def test_physical_cores_come_before_their_siblings(tmp_path):
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    pairs = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    root = machine(tmp_path, {topology.format(c): p + "\n" for c, p in pairs.items()})
    assert _cpu.order_cores((0, 1, 2, 3), root) == ((0, 2, 1, 3), 2)
    assert _cpu.order_cores((1, 3), root) == ((1, 3), 2)
    assert _cpu.order_cores((0, 1, 9), root) == ((0, 1, 9), None)  # 9 is not described


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        (  # the limit of a group above counts too
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        (  # version 1, with the host's path, which does not exist inside the container
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/1234\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_cpu_limit_of_the_cgroup(tmp_path, files, quota):
    cpu, _, errors = _cpu.read_cpu(machine(tmp_path, files))
    assert cpu["quota"] == quota and errors == []
    assert cpu["sources"].get("quota") == (None if quota is None else "cgroup")


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{300 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
        },
        {
            "proc/self/cgroup": "4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{300 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {100 * MIB}\n",
        },
    ],
)
def test_memory_limit_of_the_cgroup(tmp_path, files):
    memory, source = _cpu.cpu_memory(machine(tmp_path, files))
    assert source == "cgroup"
    assert (memory["total_memory"], memory["used_memory"]) == (GIB, 200 * MIB)
    assert memory["free_memory"] == GIB - 200 * MIB


def test_a_limit_above_the_ram_is_none(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{10**18}\n"}
    assert _cpu.cpu_memory(machine(tmp_path, files))[1] == "psutil"


def test_system_that_forbids_pinning(monkeypatch):
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system cannot pin at all")

    def forbidden(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    found = census()
    assert not found.can_pin and "unpinned" in str(found)
    assert "pinning to a core is not allowed here" in errors_of(found)
    assert slots(1)[0].cpus == ()


def test_system_that_knows_no_pinning(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)  # as on macOS
    found = census()
    assert not found.can_pin and found.cpu.cores
    assert "an unpinned process" in str(found)


def test_psutil_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    found = census()
    assert found.cpu.total_memory is None and "main memory not known" in errors_of(found)


# --- tiers and slots on made-up machines --------------------------------------------------


def gpu(i: int, name: str = "NVIDIA H100") -> Device:
    return Device("gpu", i, name, uuid=f"GPU-{i:02x}ab", total_memory=80 * GIB)


def made_up(gpus=0, cores=(0, 1), **more) -> Census:
    can_pin = more.pop("can_pin", True)
    return Census(
        tuple(gpu(i) for i in range(gpus)), Device("cpu", 0, "CPU", cores=cores, **more), can_pin
    )


@pytest.mark.parametrize(("gpus", "tier"), [(0, "cpu"), (1, "gpu1"), (2, "gpuN"), (8, "gpuN")])
def test_tiers(gpus, tier):
    found = made_up(gpus)
    assert found.tier == tier
    assert f"tier {tier}: " in str(found)
    not_run = "the multi-GPU path was not run by the authors"
    assert (not_run in str(found)) == (tier == "gpuN")
    assert (not_run in found._repr_html_()) == (tier == "gpuN")


def test_course_tier_forces_cpu_and_says_so(monkeypatch):
    monkeypatch.setenv("COURSE_TIER", "cpu")
    found = made_up(gpus=2)
    assert found.tier == "cpu" and "COURSE_TIER=cpu: the GPUs are left unused" in str(found)
    assert {s.kind for s in slots(2, found=found)} == {"core"}


def test_course_tier_that_is_not_understood_is_said(monkeypatch):
    monkeypatch.setenv("COURSE_TIER", "gpu4")
    assert "'gpu4' is not understood" in str(made_up(1)) and made_up(1).tier == "gpu1"


def test_slots_on_cores():
    got = slots(2, found=made_up(cores=(4, 6)))
    assert [(s.rank, s.kind, s.index, s.cpus, s.threads, s.shared) for s in got] == [
        (0, "core", 4, (4,), 1, False),
        (1, "core", 6, (6,), 1, False),
    ]


def test_slots_on_one_gpu():
    found = made_up(gpus=1)
    (one,) = slots(1, found=found)
    assert (one.kind, one.visible, one.threads) == ("gpu", "GPU-00ab", 2)
    assert [s.kind for s in slots(2, found=found)] == ["core", "core"]


def test_slots_on_many_gpus():
    got = slots(2, found=made_up(gpus=4, cores=tuple(range(16))))
    assert [(s.kind, s.index, s.visible, s.threads, s.cpus) for s in got] == [
        ("gpu", 0, "GPU-00ab", 8, ()),
        ("gpu", 1, "GPU-01ab", 8, ()),
    ]


def test_tensorflow_gets_cores_unless_its_gpu_build_is_there(monkeypatch):
    found = made_up(gpus=2)
    assert {s.kind for s in slots(2, framework="tensorflow", found=found)} == {"core"}
    monkeypatch.setenv("COURSE_TF_GPU", "1")
    assert {s.kind for s in slots(2, framework="tensorflow", found=found)} == {"gpu"}


def test_too_many_cores_is_an_error_that_says_what_to_do():
    with pytest.raises(NotEnoughDevices) as e:
        slots(4, found=made_up())
    text = str(e.value)
    assert text.startswith("You asked for 4 devices and this machine has 2 cores. Ask for 2")
    assert "oversubscribe=True" in text and "timings will not mean much" in text


def test_too_many_gpus_is_an_error_and_never_a_silent_change_to_cores():
    found = made_up(gpus=2, cores=tuple(range(16)))
    with pytest.raises(NotEnoughDevices, match="this machine has 2 GPUs"):
        slots(4, found=found)
    got = slots(4, oversubscribe=True, found=found)
    assert {s.kind for s in got} == {"core"} and not any(s.shared for s in got)


def test_oversubscribed_slots_are_marked():
    got = slots(4, oversubscribe=True, found=made_up())
    assert [s.index for s in got] == [0, 1, 0, 1] and all(s.shared for s in got)


def test_a_containers_cpu_limit_is_honoured_and_said():
    found = made_up(cores=tuple(range(8)), quota=2.0)
    assert [s.index for s in slots(2, found=found)] == [0, 1]
    with pytest.raises(NotEnoughDevices, match="2 cores to use .*limited to 2 CPUs"):
        slots(3, found=found)
    assert "2 CPUs' worth of time, so 2 of its 8 cores count as devices" in str(found)


def test_a_limit_below_one_cpu_still_gives_one_device_and_warns():
    found = made_up(cores=(0,), quota=0.5)
    assert len(slots(1, found=found)) == 1
    assert "throttled" in str(found)


def test_hyper_threads_are_said():
    assert "hyper-threads of 1 physical core:" in str(made_up(physical=1))
    assert "hyper-threads" not in str(made_up(physical=2))


def test_unpinned_slots():
    found = made_up(can_pin=False)
    assert all(s.cpus == () and "unpinned" in s.name for s in slots(2, found=found))


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "2"])
def test_slots_refuses_what_is_no_count(n):
    with pytest.raises(ValueError, match="whole number"):
        slots(n, found=made_up())


def test_slots_refuses_an_unknown_framework():
    with pytest.raises(ValueError, match='"torch" or "tensorflow"'):
        slots(1, framework="jax", found=made_up())


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-02", [2]),
        ("GPU-01ab,0", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,9,1", [0]),  # CUDA stops reading at the first that does not exist
        ("0,0", [0]),
        ("GPU-0", []),  # names more than one
        ("MIG-1234", []),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices(monkeypatch, value, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    found = made_up(gpus=3)
    assert len(found.gpus) == 3  # the census lists all
    assert [g.index for g in found.usable_gpus] == indices
    assert f"CUDA_VISIBLE_DEVICES={value!r}" in str(found)
    if len(indices) > 1:
        assert [s.index for s in slots(len(indices), found=found)] == indices


def test_gpus_hidden_by_the_environment_are_named_in_the_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(NotEnoughDevices, match="CUDA_VISIBLE_DEVICES hides 1 more"):
        slots(3, found=made_up(gpus=3))


def test_order_of_unlike_gpus_is_a_note(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = Census((gpu(0, "T4"), gpu(1, "H100")), Device("cpu", 0, "CPU", cores=(0,)))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(found)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert "CUDA_DEVICE_ORDER" not in str(found)


def test_records_are_frozen_and_html_is_escaped():
    found = Census((gpu(0, "<b>GPU</b>"),), Device("cpu", 0, "CPU", cores=(0,)))
    with pytest.raises(AttributeError):
        found.gpus = ()
    assert "<b>" not in found._repr_html_() and "<table>" in found._repr_html_()


def test_table_is_aligned():
    lines = str(made_up(gpus=2)).splitlines()
    column = lines[0].index("name")
    assert [line[column:].split()[0] for line in lines[1:4]] == ["NVIDIA", "NVIDIA", "CPU"]


# --- cost ---------------------------------------------------------------------------------


def test_census_is_quick_without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    no_nvml(monkeypatch)
    census()
    seconds = []
    for _ in range(50):
        begin = time.perf_counter()
        census()
        seconds.append(time.perf_counter() - begin)
    assert statistics.median(seconds) < 0.05  # measured: about 1 ms


def test_census_imports_no_framework_and_no_nvml_where_there_is_no_driver():
    code = (
        "import sys, json\n"
        "from course_utils.devices import census\n"
        "early = [m for m in ('psutil', 'pynvml', 'numpy', 'matplotlib') if m in sys.modules]\n"
        "found = census()\n"
        "heavy = ('torch', 'tensorflow', 'numpy', 'matplotlib', 'pynvml')\n"
        "print(json.dumps([early, [m for m in heavy if m in sys.modules], len(found.gpus)]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    early, late, gpus = json.loads(out.stdout)
    assert early == []
    assert late == [] or (gpus and late == ["pynvml"])


def test_names_that_lessons_import():
    for name in ("census", "slots", "watch", "Device", "Census", "Slot", "NotEnoughDevices"):
        assert hasattr(devices, name)
    assert issubclass(NotEnoughDevices, RuntimeError)
