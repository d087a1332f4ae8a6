"""What every benchmark needs: the machine it ran on, how quiet it was, and one file format."""

import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from course_utils.timing import Ratio, Timing

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "tensorflow", "accelerate", "pytorch-lightning", "toma", "GPUtil")
PACKAGES += ("nvidia-ml-py", "numpy", "psutil")
# Percent of all cores that other programs use: below QUIET is fine, above BUSY is said aloud.
QUIET, BUSY = 5.0, 20.0

T = TypeVar("T")


def machine() -> dict:
    """The machine as a reader needs it to judge a number; no host name, no path, no user."""
    import psutil

    from course_utils.devices import census

    found = census()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": len(found.cpu.cores or ()),
        "ram_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [gpu.name for gpu in found.gpus],
        "tier": found.tier,
        "os": os_name(),
        "python": platform.python_version(),
        "packages": versions(),
    }


def cpu_model() -> str:
    """Linux says it in /proc/cpuinfo; elsewhere the platform module knows."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.splitlines())
    names = {key.strip(): value.strip() for key, _, value in lines}
    return names.get("model name") or platform.machine()


def os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return f"{platform.system()} {platform.release()}"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not every benchmark needs every package
    return found


class OtherWork:
    """Share of all cores that other programs used while the block ran: `percent`.

    It is the CPU time of the whole machine less that of this process and all it started.
    """

    percent = 0.0

    def __enter__(self) -> "OtherWork":
        self._start = (time.monotonic(), _machine_seconds(), _own_seconds())
        return self

    def __exit__(self, *_: object) -> None:
        import psutil

        now = (time.monotonic(), _machine_seconds(), _own_seconds())
        wall, everything, own = (b - a for a, b in zip(self._start, now, strict=True))
        cores = psutil.cpu_count() or 1
        # Clocks tick differently, so an idle machine can come out slightly below zero.
        self.percent = max(0.0, round(100 * (everything - own) / (wall * cores), 1))


def _machine_seconds() -> float:
    import psutil

    times = psutil.cpu_times()
    waiting = times.idle + getattr(times, "iowait", 0.0)
    twice = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # in user and nice
    return sum(times) - waiting - twice


def _own_seconds() -> float:
    """CPU seconds of this process and of its descendants, the ended ones included."""
    import psutil

    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and those of reaped children
        except psutil.NoSuchProcess:
            continue  # it has just ended; its parent has its time now
    return total


def quietest(measure: Callable[[], T], attempts: int = 3) -> tuple[T, float]:
    """Measure until other programs used less than QUIET percent; else keep the quietest attempt.

    Returns it with that share. The choice looks at the others' work only, not at the result.
    """
    found = []
    for _ in range(attempts):
        with OtherWork() as others:
            result = measure()
        found.append((others.percent, result))
        if others.percent < QUIET:
            break
        print(f"Other programs used {others.percent} % of the cores.", flush=True)
    percent, result = min(found, key=lambda pair: pair[0])
    return result, percent


def row(what: str, timing: Timing, **more: object) -> dict:
    """One line of a result: what was timed, median and quartiles in seconds, and `more`."""
    facts = {"median_s": timing.median, "low_s": timing.low, "high_s": timing.high}
    return {"what": what, **{k: float(f"{v:.4g}") for k, v in facts.items()},
            "runs": len(timing.runs), **more}  # fmt: skip


def target(what: str, wanted: str, measured: str | Ratio, met: bool) -> dict:
    """A number that the course promises, and whether this run kept the promise."""
    return {"what": what, "wanted": wanted, "measured": str(measured), "met": bool(met)}


def write(name: str, title: str, others: float, rows: list, targets: list, **more) -> dict:
    """Write results/<name>.json and return what is in it; others: `OtherWork.percent`."""
    results = {
        "benchmark": name,
        "title": title,
        "machine": {**machine(), "other_work_percent": others},
        "rows": rows,
        "targets": targets,
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
    return results
