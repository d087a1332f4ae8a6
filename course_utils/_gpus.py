"""Read the GPUs: through NVML, else through nvidia-smi.

`read_gpus` does not raise. What could not be read is ``None``, and why is said in words in
the list of errors. :mod:`course_utils.devices` turns the readings into records.
Names and units of fields are those of :class:`course_utils.devices.Device` (bytes, percent).
"""

from __future__ import annotations

import functools
import os
import sys

SMI_SECONDS = 5.0
SMI_FIELDS = "index,uuid,memory.total,memory.used,memory.free,utilization.gpu,name"
MIB = 1024**2
Reading = dict  # field -> value, and "sources": field -> where it came from

# A broken driver can take seconds to say so. What failed once is not asked again in
# this process: source -> what went wrong, in words.
_failed: dict[str, str] = {}
_nvml_pid: int | None = None


def read_gpus() -> tuple[list[Reading], list[str]]:
    """All GPUs of the machine and what went wrong, from the first source that answers."""
    import shutil

    errors: list[str] = []
    for source, read in (("NVML", _read_nvml), ("nvidia-smi", _read_smi)):
        key = source if source == "NVML" else f"{source} at {shutil.which('nvidia-smi')}"
        if key in _failed:
            errors.append(_failed[key])
            continue
        try:
            gpus, remarks = read()
        except Exception as e:  # a census never raises: every failure becomes a sentence
            _failed[key] = f"{source}: {_in_words(e)}"
            errors.append(_failed[key])
            continue
        return gpus, errors + remarks
    return [], errors


class Unreadable(Exception):
    """A source that cannot be used, and why."""


def _in_words(e: BaseException) -> str:
    return str(e) if isinstance(e, Unreadable) else f"{type(e).__name__}: {e}"


def _read_nvml() -> tuple[list[Reading], list[str]]:
    pynvml = _nvml()
    errors: list[str] = []

    def ask(gpu: str, what: str, call):
        """The answer, or None and a sentence: one unknown field must not hide the rest."""
        try:
            return call()
        except Exception as e:
            errors.append(f"NVML: {gpu}: {what} not known ({e})")
            return None

    gpus = []
    for i in range(pynvml.nvmlDeviceGetCount()):
        label = f"GPU {i}"
        handle = ask(label, "handle", functools.partial(pynvml.nvmlDeviceGetHandleByIndex, i))
        if handle is None:
            continue
        get = functools.partial  # binds this round's handle
        memory = ask(label, "memory", get(pynvml.nvmlDeviceGetMemoryInfo, handle))
        rates = ask(label, "utilisation", get(pynvml.nvmlDeviceGetUtilizationRates, handle))
        if _mig(pynvml, handle):
            errors.append(f"{label} is split by MIG: a process sees one instance, not all of it")
        gpus.append(
            _reading(
                "nvml",
                label,
                errors,
                index=i,
                name=_text(ask(label, "name", get(pynvml.nvmlDeviceGetName, handle))),
                uuid=_text(ask(label, "uuid", get(pynvml.nvmlDeviceGetUUID, handle))),
                total_memory=memory and memory.total,
                used_memory=memory and memory.used,
                free_memory=memory and memory.free,
                utilisation=rates and float(rates.gpu),
            )
        )
    if not gpus:
        raise Unreadable(errors[0] if errors else "the driver answers, and reports no GPU")
    return gpus, errors


def _nvml():
    """The pynvml module with NVML initialised in this process."""
    global _nvml_pid
    if sys.platform == "linux" and "pynvml" not in sys.modules:
        import ctypes

        if "microsoft" in os.uname().release.lower():
            raise Unreadable("not asked: under WSL it can crash the kernel (WSL#11277)")
        try:  # pynvml takes 50 ms to import: first see whether there is anything to ask
            ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as e:
            if "No such file" in str(e):
                raise Unreadable("no NVIDIA driver library on this machine") from None
            raise Unreadable(f"the driver's library cannot be loaded ({e})") from None
    try:
        import pynvml
    except ImportError as e:
        raise Unreadable(f"{e}; install nvidia-ml-py") from None
    if _nvml_pid != os.getpid():  # kept open: closing it makes the next call slow again
        pynvml.nvmlInit()
        _nvml_pid = os.getpid()
    return pynvml


def driver_version(root: str = "/") -> str | None:
    """The NVIDIA driver's version, like "580.65.06"; None without one."""
    try:
        return _text(_nvml().nvmlSystemGetDriverVersion())
    except Exception:  # why is in the census; the kernel module can be asked too
        pass
    try:
        with open(os.path.join(root, "proc/driver/nvidia/version")) as f:
            return next((w for w in f.readline().split() if w[0].isdigit() and "." in w), None)
    except OSError:
        return None


def _mig(pynvml, handle) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except Exception:  # most GPUs have no MIG, and say so by an error
        return False


def _text(value):
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _reading(source: str, label: str, errors: list[str], **fields) -> Reading:
    """Fields with their source; impossible figures become unknown, and are named."""
    if fields["total_memory"] == 0:  # unified memory: the GPU has none of its own
        errors.append(f"{source}: {label}: reports 0 bytes of memory in total, taken as unknown")
        fields.update(total_memory=None, used_memory=None, free_memory=None)
    if (fields["utilisation"] or 0) > 100:
        errors.append(f"{source}: {label}: a utilisation of {fields['utilisation']:g} %, no figure")
        fields["utilisation"] = None
    fields["sources"] = {k: source for k, v in fields.items() if v is not None}
    return fields


def _read_smi() -> tuple[list[Reading], list[str]]:
    text = _run_smi()
    errors: list[str] = []
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [c.strip() for c in line.split(",", SMI_FIELDS.count(","))]
        if len(cells) <= SMI_FIELDS.count(",") or not cells[0].isdigit():
            errors.append(f"nvidia-smi: a line that is no GPU: {line[:80]!r}")
            continue
        label = f"GPU {cells[0]}"
        numbers = []
        for what, cell in zip(SMI_FIELDS.split(",")[2:6], cells[2:6], strict=True):
            numbers.append(_number(cell))
            if numbers[-1] is None:  # [N/A], [Insufficient Permissions], [Unknown Error]
                errors.append(f"nvidia-smi: {label}: {what} not known ({cell or 'empty'})")
        total, used, free = (n if n is None else int(n * MIB) for n in numbers[:3])
        gpus.append(
            _reading(
                "nvidia-smi",
                label,
                errors,
                index=int(cells[0]),
                name=cells[6] or None,
                uuid=cells[1] if cells[1].startswith(("GPU-", "MIG-")) else None,
                total_memory=total,
                used_memory=used,
                free_memory=free,
                utilisation=numbers[3],
            )
        )
    if not gpus:
        raise Unreadable(errors[0].partition(": ")[2] if errors else "it printed nothing")
    return gpus, errors


def _number(cell: str) -> float | None:
    """A figure that can be meant: "12 MiB" is 12, "nan" and "[N/A]" are unknown."""
    try:
        value = float(cell.split()[0])
    except (ValueError, IndexError):
        return None
    return value if 0 <= value < float("inf") else None


def _run_smi() -> str:
    """What nvidia-smi prints; Unreadable when it is missing, fails or hangs."""
    import shutil
    import subprocess

    smi = shutil.which("nvidia-smi")
    if smi is None:
        raise Unreadable("not found on PATH")
    process = subprocess.Popen(
        [smi, f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C in the cell is ours, and its children die with it
    )
    try:
        out, _ = process.communicate(timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unreadable(f"no answer within {SMI_SECONDS:g} s, given up") from None
    finally:
        if process.returncode is None:
            _kill(process)
    text = out.decode(errors="replace")
    if process.returncode:
        said = " ".join(text.split())[:200] or "nothing printed"
        raise Unreadable(f"exit code {process.returncode}: {said}")
    return text


def _kill(process) -> None:
    import subprocess

    # Not waited for without end: on a hung driver the process cannot die (state D).
    try:
        os.killpg(process.pid, 9) if hasattr(os, "killpg") else process.kill()
        process.wait(timeout=1)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    if process.stdout:
        process.stdout.close()
