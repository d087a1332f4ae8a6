"""Read the CPU: the cores that this process may use, memory, and a container's limits.

`read_cpu` does not raise. What could not be read is ``None``, and why is said in words in
the list of errors. Names and units of fields are those of
:class:`course_utils.devices.Device` (bytes, CPUs' worth of time).
"""

from __future__ import annotations

import functools
import os

Reading = dict  # field -> value, and "sources": field -> where it came from


def read_cpu(root: str = "/") -> tuple[Reading, bool, list[str]]:
    """The CPU's fields, whether ranks can be pinned, and what went wrong.

    root: where /proc and /sys are found (a made-up folder in tests).
    """
    errors: list[str] = []
    can_pin = hasattr(os, "sched_setaffinity")  # not on macOS
    cpus, source = list(range(os.cpu_count() or 1)), "os.cpu_count"
    if can_pin:
        try:
            cpus, source = sorted(os.sched_getaffinity(0)), "affinity"
            os.sched_setaffinity(0, cpus)  # changes nothing; sandboxes that forbid it say so
        except OSError as e:
            can_pin = False
            errors.append(f"pinning to a core is not allowed here ({e})")
    cores, physical = order_cores(tuple(cpus), root)
    fields: Reading = dict(index=0, name=_cpu_name(root), uuid=None, utilisation=None)
    fields |= dict(cores=cores, physical=physical, quota=_quota(root))
    sources = {"cores": source}
    sources |= {
        "name": "/proc/cpuinfo"
        if os.path.exists(os.path.join(root, "proc/cpuinfo"))
        else "platform"
    }
    if physical is not None:
        sources["physical"] = "sysfs"
    if fields["quota"] is not None:
        sources["quota"] = "cgroup"
    try:
        memory, where = cpu_memory(root)
    except Exception as e:
        memory, where = dict.fromkeys(("total_memory", "used_memory", "free_memory")), None
        errors.append(f"main memory not known ({type(e).__name__}: {e})")
    if where:
        sources |= dict.fromkeys(memory, where)
    return fields | memory | {"sources": sources}, can_pin, errors


def cpu_memory(root: str = "/") -> tuple[Reading, str]:
    """Main memory in bytes, or the cgroup's share of it where that is less; and the source."""
    import psutil

    ram = psutil.virtual_memory()
    limit, used = _memory_limit(root)
    if limit is None or limit >= ram.total:
        return dict(
            total_memory=ram.total, used_memory=ram.used, free_memory=ram.available
        ), "psutil"
    free = None if used is None else max(0, min(limit - used, ram.available))
    return dict(total_memory=limit, used_memory=used, free_memory=free), "cgroup"


def order_cores(cpus: tuple[int, ...], root: str = "/") -> tuple[tuple[int, ...], int | None]:
    """The CPUs, one of each physical core first, then their hyper-thread siblings.

    Also how many physical cores they belong to; None where the system does not say.
    """
    first: list[int] = []
    siblings: list[int] = []
    seen: set[str] = set()
    for cpu in cpus:
        group = _read(root, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        if group is None:
            return cpus, None
        (siblings if group in seen else first).append(cpu)
        seen.add(group)
    return tuple(first + siblings), len(first)


@functools.lru_cache
def _cpu_name(root: str) -> str:
    try:
        with open(os.path.join(root, "proc/cpuinfo")) as f:
            for line in f:  # stops at the first: the file is long on large machines
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine() or "CPU"


def _read(*path: str) -> str | None:
    try:
        with open(os.path.join(*path)) as f:
            return f.read().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _cgroup_files(root: str, controller: str, v1: str, v2: str):
    """Texts of this process's limit files, in its own group and every group above it."""
    for line in (_read(root, "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            bases, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], v2
        elif controller in controllers.split(","):
            bases, name = [f"sys/fs/cgroup/{controller}"], v1
        else:
            continue
        # In a container the path is often the host's and does not exist: its root remains.
        parts = [p for p in path.split("/") if p not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                folder = os.path.join(root, base, *parts[:depth])
                text = _read(folder, name)
                if text is not None:
                    yield folder, text


def _quota(root: str) -> float | None:
    """CPUs' worth of time that the cgroup allows; None without a limit."""
    limits = []
    for folder, text in _cgroup_files(root, "cpu", "cpu.cfs_quota_us", "cpu.max"):
        period = _read(folder, "cpu.cfs_period_us") or "100000"
        quota, _, rest = text.partition(" ")
        try:
            if quota != "max" and float(quota) > 0:
                limits.append(float(quota) / float(rest or period))
        except (ValueError, ZeroDivisionError):
            continue
    return min(limits, default=None)


def _memory_limit(root: str) -> tuple[int | None, int | None]:
    """The least limit of the cgroup and its parents, and the use counted against it, bytes."""
    found = []
    for folder, text in _cgroup_files(root, "memory", "memory.limit_in_bytes", "memory.max"):
        if text.isdigit():
            found.append((int(text), folder))
    if not found:
        return None, None
    limit, folder = min(found)
    used = _read(folder, "memory.current") or _read(folder, "memory.usage_in_bytes")
    if used is None or not used.isdigit():
        return limit, None
    # Cached files count as use, but are given up when memory is wanted.
    stat = dict(
        s.split(None, 1) for s in (_read(folder, "memory.stat") or "").splitlines() if " " in s
    )
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    return limit, max(0, int(used) - cached)
