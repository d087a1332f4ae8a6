"""Watch the devices while a block runs: the picture that `nvidia-smi` gives, kept.

Re-exported by :mod:`course_utils.devices`::

    with watch() as w:
        time.sleep(1)            # before
        w.mark("training")       # a line in the figure; table and finding tell phases apart
        launch(train, 2)
    print(w.table())
    plots.show(w.figure(), alt=w.finding())
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_utils import _cpu, _gpus

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 1024**3
IDLE = 10.0  # percent: below it a device is called idle (the system itself is never at 0)
SHOWN = 8  # devices in a figure and in a finding
RAM = "main memory"


@dataclass(frozen=True)
class Sample:
    """What the devices did since the sample before. "core 0", "GPU 0" -> figure or None."""

    seconds: float  # since the block began
    utilisation: dict[str, float | None]  # percent
    memory: dict[str, int | None]  # bytes in use; "main memory" is one for all cores


class Watch:
    """Samples utilisation and memory of every device while a ``with`` block runs.

    Cores are watched system-wide, so ranks in other processes are seen, and so is
    whatever else runs on them. A sample costs about a millisecond, taken in a thread.
    """

    def __init__(self, interval: float = 0.1) -> None:
        if not interval > 0:
            raise ValueError(f"interval is in seconds and above 0, not {interval!r}")
        self.interval = interval
        self.samples: list[Sample] = []
        self.marks: list[tuple[float, str]] = []
        self.errors: list[str] = []
        self._stop = threading.Event()

    def __enter__(self) -> Watch:
        self._begin = time.perf_counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        self._ready.wait(10)  # the first reading is the one that later ones are compared to
        return self

    def __exit__(self, *_exc) -> None:
        self._stop.set()
        self._thread.join(10)  # a driver that hangs must not hang the cell
        for error in self.errors:
            warnings.warn(f"watch: {error}", stacklevel=2)

    def mark(self, what: str) -> None:
        """Begin a new phase: tables and the finding tell the phases apart."""
        self.marks.append((time.perf_counter() - self._begin, what))

    def _run(self) -> None:
        try:
            read = _reader()
            read()
            self._begin = time.perf_counter()
            self._ready.set()
            last = self._begin
            while not self._stop.wait(self.interval):
                last = self._sample(read)
            # A short block still gets a sample, unless the clock's ticks are too coarse for it.
            if not self.samples or time.perf_counter() - last > self.interval / 2:
                self._sample(read)
        except Exception as e:
            self.errors.append(f"sampling stopped: {type(e).__name__}: {e}")
        finally:
            self._ready.set()

    def _sample(self, read: Callable) -> float:
        utilisation, memory, errors = read()
        now = time.perf_counter()
        self.samples.append(Sample(now - self._begin, utilisation, memory))
        self.errors += [e for e in errors if e not in self.errors]
        return now

    # --- what was seen ----------------------------------------------------------------

    def phases(self) -> list[tuple[str, list[Sample]]]:
        """(name, samples) of each phase that has samples; one unnamed phase without marks."""
        out: list[tuple[str, list[Sample]]] = []
        edges = [(0.0, "before" if self.marks else ""), *self.marks, (float("inf"), "")]
        for (start, name), (end, _) in zip(edges, edges[1:], strict=False):
            inside = [s for s in self.samples if start < s.seconds <= end]
            if inside:
                out.append((name, inside))
        return out

    def devices(self) -> list[str]:
        """The devices watched, cores first."""
        return list(self.samples[0].utilisation) if self.samples else []

    def finding(self) -> str:
        """Which devices worked and which were idle; after marks, one line per marked phase."""
        phases = self.phases()
        if not phases:
            return "nothing was measured: the block was over before the first sample"
        lines = []
        for name, samples in phases[1:] if phases[0][0] == "before" and phases[1:] else phases:
            text = self._who_worked(samples)
            lines.append(f"{name}: {text}" if name else text)
        return "\n".join(lines)

    def _who_worked(self, samples: list[Sample]) -> str:
        means = {d: _mean([s.utilisation.get(d) for s in samples]) for d in self.devices()}
        if len(means) <= 4:
            return ", ".join(f"{d} {_in_words(m)}" for d, m in means.items())
        busy = {d: m for d, m in means.items() if m is not None and m >= IDLE}
        text = f"{len(busy)} of {len(means)} devices at work"
        if 0 < len(busy) <= 4:
            text += ": " + ", ".join(f"{d} {_in_words(m)}" for d, m in busy.items())
        return text

    def table(self) -> str:
        """Text table: mean and highest utilisation, and most memory in use, per device."""
        if not self.samples:
            return self.finding()
        rows = [("phase", "device", "mean", "highest", "most memory in use")]
        for name, samples in self.phases():
            for device in [*self.devices(), RAM]:
                load = [s.utilisation.get(device) for s in samples]
                used = [m for s in samples if (m := s.memory.get(device)) is not None]
                rows.append(
                    (name, device, _percent(_mean(load)), _percent(_highest(load)), _gib(used))
                )
        if not self.marks:
            rows = [r[1:] for r in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        ]
        count = f"{len(self.samples)} samples, one every {self.interval:g} s or more"
        return "\n".join([*lines, count, *(f"not read: {e}" for e in self.errors)])

    def figure(self) -> Figure:
        """One strip per device over time, memory below; the title says the finding."""
        from matplotlib.figure import Figure

        colours = _colours()
        shown = self._busiest(SHOWN)
        fig = Figure(
            figsize=(7.0, 1.4 + 0.2 * len(self.marks) + 0.8 * (len(shown) + 1)),
            layout="constrained",
        )
        strips = fig.subplots(len(shown) + 1, 1, sharex=True, squeeze=False)[:, 0]
        seconds = [0.0, *(s.seconds for s in self.samples)]
        for strip, device in zip(strips, shown, strict=False):
            colour = colours[0] if device.startswith("GPU") else colours[1]
            load = [_nan(s.utilisation.get(device)) for s in self.samples]
            load = load[:1] + load  # a sample tells of the time before it, the first one too
            strip.fill_between(seconds, load, step="pre", color=colour, alpha=0.35)
            strip.step(seconds, load, where="pre", color=colour)
            strip.set(ylim=(0, 105), yticks=(0, 50, 100), ylabel=f"{device}\n(%)")
        for device, dash in zip(self._memories(), ("-", "--", ":", "-.") * SHOWN, strict=False):
            used = [_nan(s.memory.get(device)) / GIB for s in self.samples]
            strips[-1].plot(seconds[1:], used, dash, color=colours[2], label=device)
        strips[-1].set(ylabel="in use\n(GiB)", xlabel="seconds since the block began")
        strips[-1].set_ylim(0, 1.2 * strips[-1].get_ylim()[1])
        if self.samples:
            strips[-1].legend(loc="lower right", fontsize=8)
        for strip in strips:
            for at, _ in self.marks:
                strip.axvline(at, color="black", linestyle=":")
        for at, what in self.marks:
            strips[0].text(at, 107, f" {what}", fontsize=9)
        hidden = len(self.devices()) - len(shown)
        more = f" ({hidden} less busy ones not drawn)" if hidden else ""
        fig.suptitle(self.finding() + more)
        return fig

    def _busiest(self, n: int) -> list[str]:
        """At most n devices, the busiest, in their own order."""
        mean = {d: _mean([s.utilisation.get(d) for s in self.samples]) or 0 for d in self.devices()}
        chosen = sorted(mean, key=mean.__getitem__, reverse=True)[:n]
        return [d for d in self.devices() if d in chosen]

    def _memories(self) -> list[str]:
        return list(self.samples[0].memory)[: SHOWN + 1] if self.samples else []


def watch(interval: float = 0.1) -> Watch:
    """Context manager that samples every device each `interval` seconds. See `Watch`."""
    return Watch(interval)


def _reader() -> Callable[[], tuple[dict, dict, list[str]]]:
    """A function that reads all devices once: utilisation, memory, errors."""
    import psutil

    cores = sorted(_cpu.read_cpu()[0]["cores"])
    has_gpus = bool(_gpus.read_gpus()[0])  # without GPUs they are not asked for ten times a second

    def read() -> tuple[dict, dict, list[str]]:
        load = psutil.cpu_percent(percpu=True)  # since the call before, in this thread
        utilisation = {f"core {c}": load[c] if c < len(load) else None for c in cores}
        memory: dict[str, int | None] = {RAM: _cpu.cpu_memory()[0]["used_memory"]}
        gpus, errors = _gpus.read_gpus() if has_gpus else ([], [])
        for g in gpus:
            utilisation[f"GPU {g['index']}"] = g["utilisation"]
            memory[f"GPU {g['index']}"] = g["used_memory"]
        return utilisation, memory, errors

    return read


def _colours() -> tuple[str, ...]:
    from course_utils import plots

    return plots.COLOURS


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _highest(values: list[float | None]) -> float | None:
    return max((v for v in values if v is not None), default=None)


def _in_words(mean: float | None) -> str:
    if mean is None:
        return "not known"
    return "idle" if mean < IDLE else f"at {mean:.0f} %"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _gib(used: list[int]) -> str:
    return f"{max(used) / GIB:.1f} GiB" if used else ""


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
