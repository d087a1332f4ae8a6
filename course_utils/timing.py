"""Honest timing: warm up, synchronise, repeat, and say how far the runs spread.

    >>> from course_utils.timing import compare, measure
    >>> print(measure(lambda: sorted(range(100_000))))          # doctest: +SKIP
    1.21 ms (1.20–1.24, 7 runs)
    >>> print(compare({"small": f, "large": g}))                # doctest: +SKIP

What the numbers contain: the garbage collector stays as it is (your program pays for it, so
the measurement does too), and the time to free what `fn` returned is left out.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True, repr=False)
class _Sample:
    """Numbers in the order in which they were measured, and where their middle lies."""

    runs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no runs: at least one is needed for a median")

    @property
    def median(self) -> float:
        return self._quartiles()[1]

    @property
    def low(self) -> float:
        """Lower quartile: a quarter of the runs are at or below it."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """Upper quartile: a quarter of the runs are at or above it."""
        return self._quartiles()[2]

    def _quartiles(self) -> list[float]:
        import statistics  # here, because it would double the time to import this module

        if len(self.runs) == 1:
            return [self.runs[0]] * 3
        return statistics.quantiles(self.runs, n=4, method="inclusive")

    def _spread(self, scale: float, decimals: int, what: str) -> str:
        n = len(self.runs)
        if n == 1:
            return f"(1 {what})"  # one run has no spread; a range would pretend that it has
        low, high = self.low / scale, self.high / scale
        return f"({low:.{decimals}f}–{high:.{decimals}f}, {n} {what}s)"

    def __repr__(self) -> str:
        return str(self)


class Timing(_Sample):
    """How long some runs took: `runs`, `median`, `low` and `high` (quartiles), all seconds."""

    def _unit(self) -> tuple[float, str, int]:
        """Seconds in the unit that suits the median, its name, decimals for three digits."""
        scale, unit = next((u for u in _UNITS if self.median >= u[0]), _UNITS[-1])
        value = self.median / scale
        return scale, unit, 2 if value < 10 else 1 if value < 100 else 0

    def __str__(self) -> str:
        scale, unit, decimals = self._unit()
        head = f"{self.median / scale:.{decimals}f} {unit}"
        return f"{head} {self._spread(scale, decimals, 'run')}"

    def short(self) -> str:
        """The median alone, for tables: "12.3 ms"."""
        scale, unit, decimals = self._unit()
        return f"{self.median / scale:.{decimals}f} {unit}"


class Ratio(_Sample):
    """How many times as long one thing took as another, round by round (no unit)."""

    def __str__(self) -> str:
        return f"{self.median:.2f}× {self._spread(1.0, 2, 'round')}"

    def __float__(self) -> float:
        return self.median


@dataclass(frozen=True, repr=False)
class Comparison:
    """Timings of several functions that took turns: `c["name"]`, `c.ratio("a", "b")`."""

    timings: Mapping[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        try:
            return self.timings[name]
        except KeyError:
            raise KeyError(f"{name!r} was not measured; there are {list(self.timings)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.timings)

    def __len__(self) -> int:
        return len(self.timings)

    def ratio(self, a: str, b: str) -> Ratio:
        """Time of `a` over time of `b`. Above 1: `b` is faster.

        The two are divided within each round before the median is taken, so a machine that
        slows down halfway (heat, a neighbour) slows both sides of the same fraction.
        """
        if 0.0 in self[b].runs:
            raise ValueError(f"{b!r} took no measurable time: give each run more work")
        pairs = zip(self[a].runs, self[b].runs, strict=True)
        return Ratio(tuple(x / y for x, y in pairs))

    def table(self) -> str:
        """Text table: one line a function, with its ratio to the first one."""
        first = next(iter(self.timings))
        rows = [("", "median", "middle half of the runs", f"time ÷ {first}")]
        for name, timing in self.timings.items():
            scale, unit, decimals = timing._unit()
            low, high = timing.low / scale, timing.high / scale
            middle = f"{low:.{decimals}f}–{high:.{decimals}f} {unit}"
            rows.append((name, timing.short(), middle, f"{self.ratio(name, first).median:.2f}×"))
        rounds = len(self[first].runs)
        turns = "1 round" if rounds == 1 else f"{rounds} rounds, the functions taking turns"
        return f"{_align(rows)}\n{turns}"

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def measure(
    fn: Callable[[], object],
    *,
    repeat: int = 7,
    warmup: int = 1,
    sync: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time `fn()`: `warmup` runs that do not count, then `repeat` runs that do.

    `sync` is called before the clock starts and before it stops, so that work which a device
    still has queued is neither charged to `fn` nor forgotten. Default: wait for the GPU when
    torch has initialised CUDA, otherwise nothing. `sync=lambda: None` switches it off.
    Raises TypeError when `fn` is not callable, ValueError for repeat < 1 or warmup < 0;
    what `fn` raises comes through.
    """
    return compare({"fn": fn}, repeat=repeat, warmup=warmup, sync=sync, clock=clock)["fn"]


def compare(
    fns: Mapping[str, Callable[[], object]],
    *,
    repeat: int = 7,
    warmup: int = 1,
    sync: Callable[[], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Time several functions in turns: `repeat` rounds, in each of which every one runs once.

    Measuring all of A and then all of B would charge B for whatever the machine did meanwhile.
    Every second round runs backwards, so none always profits from the one before it.
    Arguments and errors as for `measure`.
    """
    fns = dict(fns)
    _check(fns, repeat, warmup)
    sync = sync or _wait_for_gpu
    for _ in range(warmup):
        for fn in fns.values():
            fn()
    runs: dict[str, list[float]] = {name: [] for name in fns}
    for round_number in range(repeat):
        order = list(fns) if round_number % 2 == 0 else list(reversed(fns))
        for name in order:
            runs[name].append(_seconds(fns[name], sync, clock))
    return Comparison({name: Timing(tuple(seconds)) for name, seconds in runs.items()})


def speedup_table(rows: Iterable[tuple[object, Timing, Timing, int]]) -> str:
    """Text table from rows of (label, time on one device, time on n devices, n).

    Both times of a row come from rounds in which they took turns. The speed-up is divided
    within each round, and its median and middle half are shown, as by `Comparison.ratio`.
    Efficiency is the speed-up over n: 100 % means that no device ever waited. Raises
    ValueError without rows, and where the two did not run equally often.
    """
    lines = [("", "1 device", "n devices", "n", "speed-up", "middle half", "efficiency")]
    for label, one, many, n in rows:
        if n < 1:
            raise ValueError(f"row {label!r}: n={n}, but a run has at least one device")
        if many.median == 0:
            raise ValueError(f"row {label!r}: no measurable time; give each run more work")
        if len(one.runs) != len(many.runs):
            raise ValueError(f"row {label!r}: the two must take turns, as in compare()")
        gain = Comparison({"one": one, "many": many}).ratio("one", "many")
        shown = (f"{gain.median:.2f}×", f"{gain.low:.2f}–{gain.high:.2f}")
        efficiency = f"{100 * gain.median / n:.0f} %"
        lines.append((str(label), one.short(), many.short(), str(n), *shown, efficiency))
    if len(lines) == 1:
        raise ValueError("no rows: pass tuples of (label, one, many, n)")
    return _align(lines)


def _seconds(
    fn: Callable[[], object], sync: Callable[[], object], clock: Callable[[], float]
) -> float:
    sync()
    start = clock()
    result = fn()
    sync()
    stop = clock()
    del result  # held until here: freeing a large result is not part of the work
    return stop - start


def _wait_for_gpu() -> None:
    """Asked anew at each reading, because `fn` itself may be what first wakes the GPU."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.synchronize()


def _check(fns: Mapping[str, object], repeat: int, warmup: int) -> None:
    if not fns:
        raise ValueError('nothing to compare: pass {"name": function, ...}')
    for name, fn in fns.items():
        if not callable(fn):
            raise TypeError(
                f"{name!r} is a {type(fn).__name__}, not a function. Pass the function itself, "
                "not its result: measure(step), or measure(lambda: step(x))"
            )
    if repeat < 1:
        raise ValueError(f"repeat={repeat}: at least one run has to be measured")
    if warmup < 0:
        raise ValueError(f"warmup={warmup}: use 0 for no warm-up")


def _align(rows: list[tuple[str, ...]]) -> str:
    """First column to the left, numbers to the right, two spaces between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
