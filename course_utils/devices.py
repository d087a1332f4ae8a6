"""What this machine has, and which devices the ranks of a lesson get.

::

    from course_utils.devices import census, slots
    print(census())          # in a notebook, a last line `census()` shows a table
    slots(2)                 # two devices, or an error that says what to do
    with watch() as w: ...   # then print(w.table()), plots.show(w.figure(), alt=w.finding())

Three tiers: ``cpu`` (no GPU: a device is a process pinned to one core), ``gpu1`` (one
GPU; lessons that need two ranks use pinned cores) and ``gpuN`` (each GPU is a device).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from course_utils import _cpu, _gpus
from course_utils._watch import Sample, Watch, watch

__all__ = [
    "Census",
    "Device",
    "NotEnoughDevices",
    "Sample",
    "Slot",
    "Watch",
    "census",
    "slots",
    "watch",
]

GIB = 1024**3
NOT_RUN = "the multi-GPU path was not run by the authors"


class NotEnoughDevices(RuntimeError):
    """More ranks were asked for than there are devices; the message says what to do."""


@dataclass(frozen=True)
class Device:
    """One device as it was found. What is not known is None, never a guess.

    Memory is in bytes, utilisation in percent. ``sources`` says where each known field
    came from: "nvml", "nvidia-smi", "psutil", "cgroup", "affinity"...
    """

    kind: str  # "gpu" or "cpu"
    index: int  # a GPU's index is its place on the PCI bus, as in nvidia-smi
    name: str | None
    uuid: str | None = None
    total_memory: int | None = None
    used_memory: int | None = None
    free_memory: int | None = None
    utilisation: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    # Of the CPU only: the CPUs this process may use, one of each physical core first;
    # how many physical cores these are; and a container's limit in CPUs' worth of time.
    cores: tuple[int, ...] = ()
    physical: int | None = None
    quota: float | None = None

    @property
    def promised(self) -> int:
        """How many cores ranks can have to themselves: a container's limit counts too."""
        whole = len(self.cores) if self.quota is None else math.floor(self.quota + 1e-9)
        return max(1, min(len(self.cores), whole))


@dataclass(frozen=True)
class Census:
    """All GPUs and the CPU of this machine, and in words what could not be read."""

    gpus: tuple[Device, ...]
    cpu: Device
    can_pin: bool = True
    errors: tuple[str, ...] = ()

    @property
    def usable_gpus(self) -> tuple[Device, ...]:
        """The GPUs that CUDA_VISIBLE_DEVICES and COURSE_TIER leave to this process."""
        return () if os.environ.get("COURSE_TIER") == "cpu" else _visible(self.gpus)

    @property
    def tier(self) -> str:
        """ "cpu", "gpu1" or "gpuN"."""
        return ("cpu", "gpu1", "gpuN")[min(2, len(self.usable_gpus))]

    @property
    def notes(self) -> tuple[str, ...]:
        """What changes the meaning of a measurement on this machine, in words."""
        return tuple(_notes(self))

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells: heading first, then one row per device."""
        out = [("device", "name", "memory free", "of total", "utilisation", "read from")]
        for d in (*self.gpus, self.cpu):
            label = f"GPU {d.index}" if d.kind == "gpu" else f"CPU ×{len(d.cores)}"
            load = "unknown" if d.utilisation is None else f"{d.utilisation:.0f} %"
            if d.kind == "cpu" and d.utilisation is None:
                load = "see watch()"
            read = ", ".join(dict.fromkeys(d.sources.values()))
            memory = (_gib(d.free_memory), _gib(d.total_memory))
            out.append((label, d.name or "unknown", *memory, load, read))
        return out

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*(line.rstrip() for line in lines), *self._remarks()])

    def _repr_html_(self) -> str:
        import html

        def cells(row, tag):
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

        head, *body = self.rows()
        table = cells(head, "th") + "".join(cells(r, "td") for r in body)
        remarks = "".join(f"<div>{html.escape(line)}</div>" for line in self._remarks())
        return f"<table>{table}</table>{remarks}"

    def _remarks(self) -> list[str]:
        out = [f"tier {self.tier}: {_tier_in_words(self)}"]
        out += [f"note: {n}" for n in self.notes]
        return out + [f"not read: {e}" for e in self.errors]


def census() -> Census:
    """Look at the machine. Never raises; imports neither torch nor TensorFlow.

    NVML is asked first, then nvidia-smi (given up after 5 s), then the CPU is described.
    """
    gpus, errors = _gpus.read_gpus()
    cpu, can_pin, cpu_errors = _cpu.read_cpu()
    return Census(
        gpus=tuple(Device("gpu", **g) for g in gpus),
        cpu=Device("cpu", **cpu),
        can_pin=can_pin,
        errors=(*errors, *cpu_errors),
    )


@dataclass(frozen=True)
class Slot:
    """The device that one rank gets."""

    rank: int
    kind: str  # "core" or "gpu"
    index: int  # the CPU's number, or the GPU's as in the census
    name: str
    cpus: tuple[int, ...]  # CPUs the rank is pinned to; empty: not pinned
    threads: int  # compute threads
    shared: bool = False  # another rank has the same device: timings mean little
    visible: str | None = None  # of a GPU: the rank's CUDA_VISIBLE_DEVICES (uuid, else index)


def slots(
    n: int,
    *,
    oversubscribe: bool = False,
    framework: str = "torch",
    found: Census | None = None,
) -> tuple[Slot, ...]:
    """The n devices that ranks 0..n-1 get, all of one kind.

    GPUs where there are enough of them (tier gpuN, or one rank on tier gpu1), otherwise
    pinned cores. TensorFlow gets cores unless COURSE_TF_GPU=1: the default environment
    has its CPU build. found: a census to choose from instead of this machine's.

    Raises NotEnoughDevices when n is more than there are, unless oversubscribe=True;
    then ranks share cores (NCCL refuses two ranks on one GPU).
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"slots needs a whole number of devices, 1 or more, not {n!r}")
    if framework not in ("torch", "tensorflow"):
        raise ValueError(f'framework is "torch" or "tensorflow", not {framework!r}')
    found = census() if found is None else found
    gpus = found.usable_gpus
    if framework == "tensorflow" and os.environ.get("COURSE_TF_GPU") != "1":
        gpus = ()
    if n <= len(gpus):
        return _gpu_slots(n, gpus, found.cpu)
    have = len(gpus) if len(gpus) > 1 else found.cpu.promised
    if n > have and not oversubscribe:
        raise NotEnoughDevices(_too_many(n, have, "GPU" if len(gpus) > 1 else "core", found))
    return _core_slots(n, found)


def _gpu_slots(n: int, gpus: tuple[Device, ...], cpu: Device) -> tuple[Slot, ...]:
    threads = max(1, cpu.promised // n)
    return tuple(
        Slot(
            r,
            "gpu",
            g.index,
            g.name or f"GPU {g.index}",
            (),
            threads,
            False,
            g.uuid or str(g.index),
        )
        for r, g in enumerate(gpus[:n])
    )


def _core_slots(n: int, found: Census) -> tuple[Slot, ...]:
    cores = found.cpu.cores[: found.cpu.promised]
    out = []
    for r in range(n):
        core = cores[r % len(cores)]
        name = f"core {core}" if found.can_pin else f"core {core} (unpinned)"
        pinned = (core,) if found.can_pin else ()
        out.append(Slot(r, "core", core, name, pinned, 1, shared=n > len(cores)))
    return tuple(out)


def _too_many(n: int, have: int, what: str, found: Census) -> str:
    cpu, why, instead = found.cpu, "", "ranks then share cores, and timings will not mean much"
    if what == "GPU":
        hidden = len(found.gpus) - have
        why = f" to use (CUDA_VISIBLE_DEVICES hides {hidden} more)" if hidden else ""
        if n <= cpu.promised:  # NCCL refuses two ranks on one GPU
            instead = "ranks then run on cores instead of GPUs"
    elif cpu.promised < len(cpu.cores):
        why = f" to use (its container is limited to {cpu.quota:g} CPUs' worth of time)"
    elif "cores" in cpu.sources and (exist := os.cpu_count() or 1) > len(cpu.cores):
        why = f" to use ({exist} exist, but this process is held to fewer, by taskset or a cpuset)"
    return (
        f"You asked for {n} devices and this machine has {have} {what}{'s' * (have != 1)}{why}. "
        f"Ask for {have}, or pass oversubscribe=True: {instead}."
    )


def _visible(gpus: tuple[Device, ...]) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order; all when it is not set.

    As CUDA does, reading stops at the first entry that names no GPU
    (CUDA C++ Programming Guide, "Environment Variables").
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    out: list[Device] = []
    for entry in (e.strip() for e in wanted.split(",")):
        by_uuid = entry.startswith("GPU-")
        match = (
            [g for g in gpus if (g.uuid or "").startswith(entry)]
            if by_uuid
            else [g for g in gpus if str(g.index) == entry]
        )
        if len(match) != 1 or match[0] in out:
            break
        out.append(match[0])
    return tuple(out)


def _tier_in_words(c: Census) -> str:
    gpus, cpu = c.usable_gpus, c.cpu
    core = "a process pinned to one core" if c.can_pin else "an unpinned process with one thread"
    count = f"{cpu.promised} of them" if cpu.promised != 1 else "there is 1"
    if not gpus:
        return f"a device is {core} ({count}); ranks talk over gloo (torch) or gRPC (TensorFlow)"
    if len(gpus) == 1:
        return f"one GPU for one device; with two or more ranks a device is {core} ({count})"
    return f"a device is a GPU ({len(gpus)} of them); ranks talk over NCCL; {NOT_RUN}"


def _notes(c: Census):
    cpu, tier = c.cpu, os.environ.get("COURSE_TIER")
    if tier == "cpu" and c.gpus:
        yield "COURSE_TIER=cpu: the GPUs are left unused"
    elif tier == "cpu":
        yield "COURSE_TIER=cpu is set"
    elif tier:
        yield f"COURSE_TIER={tier!r} is not understood and has no effect: only cpu is"
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and c.gpus and tier != "cpu":
        names = ", ".join(f"GPU {g.index}" for g in c.usable_gpus) or "none of the GPUs"
        yield f"CUDA_VISIBLE_DEVICES={wanted!r}: this process may use {names}"
        by_number = any(e.strip().isdigit() for e in wanted.split(","))
        pci = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if by_number and not pci and len({g.name for g in c.gpus}) > 1:
            yield (
                "CUDA counts GPUs of different kinds fastest first, this table as nvidia-smi "
                "does: name them by uuid, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
            )
        if "MIG-" in wanted:
            yield "a MIG instance cannot be told from its GPU here, so ranks get cores"
    if not c.can_pin:
        yield "unpinned: this system does not let a process be tied to a core, so timings vary more"
    if cpu.promised < len(cpu.cores):
        yield (
            f"this container may use {cpu.quota:g} CPUs' worth of time, so {cpu.promised} "
            f"of its {len(cpu.cores)} cores count as devices"
        )
    elif cpu.quota is not None and cpu.quota < 1:
        yield f"this container may use {cpu.quota:g} of one CPU's time: timings will be throttled"
    if cpu.physical is not None and cpu.physical < cpu.promised:
        yield (
            f"{cpu.promised} CPUs are hyper-threads of {cpu.physical} physical "
            f"core{'s' * (cpu.physical != 1)}: expect less than {cpu.promised}× from all of them"
        )


def _gib(n: int | None) -> str:
    return "unknown" if n is None else f"{n / GIB:.1f} GiB"
