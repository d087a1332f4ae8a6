"""Training speed by batch size: the largest batch that fits is seldom needed for full speed."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from course_utils._snapshot import Snapshot
from course_utils.timing import Timing, measure

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

NEAR = 0.95  # a smaller batch is worth it when it gives this share of the best samples/s


@dataclass(frozen=True)
class Throughput:
    """Training speed by batch size. `timings`: batch size to the time of one step (seconds)."""

    timings: Mapping[int, Timing]
    largest: int  # the largest that fits, or the largest tried

    def rate(self, batch_size: int) -> float:
        """Samples a second, by the median step."""
        return batch_size / self.timings[batch_size].median

    @property
    def best(self) -> int:
        """The batch size with the most samples a second."""
        return max(self.timings, key=self.rate)

    @property
    def smallest(self) -> int:
        """The smallest batch size within 5 % of the best rate."""
        return min(n for n in self.timings if self.rate(n) >= NEAR * self.rate(self.best))

    def __str__(self) -> str:
        lines = [f"{'batch':>8}{'one step':>12}{'samples/s':>12}{'of best':>10}"]
        for n, timing in sorted(self.timings.items()):
            share = self.rate(n) / self.rate(self.best)
            lines.append(f"{n:>8}{timing.short():>12}{self.rate(n):>12,.0f}{share:>10.0%}")
        share = self.rate(self.smallest) / self.rate(self.best)
        return "\n".join(
            [
                *lines,
                f"smallest within {1 - NEAR:.0%} of the best: {self.smallest} ({share:.0%})"
                f"; the largest that fits: {self.largest}",
            ]
        )

    __repr__ = __str__

    def plot(self) -> "Figure":
        """Samples a second against the batch size, with the middle half of the runs."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        sizes = sorted(self.timings)
        slow = [n / self.timings[n].high for n in sizes]
        fast = [n / self.timings[n].low for n in sizes]
        axes.plot(sizes, [self.rate(n) for n in sizes], "o-", label="median")
        axes.fill_between(sizes, slow, fast, alpha=0.25, label="middle half of the runs")
        chosen = self.smallest
        near = f"smallest within {1 - NEAR:.0%} of the best"
        axes.plot([chosen], [self.rate(chosen)], "D", ls="none", ms=10, label=near)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="batch size (samples)", ylabel="samples a second", ylim=(0, None))
        end = "are the fastest" if chosen == self.best else f"are nearly as fast as {self.best}"
        axes.set_title(f"{chosen} samples {end}")
        axes.legend()
        return figure


def throughput(
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    make_batch: Callable[[int], Any],
    loss_fn: "Callable[[torch.nn.Module, Any], torch.Tensor]",
    *,
    sizes: Iterable[int] | None = None,
    largest: int | None = None,
    rounds: int = 5,
) -> Throughput:
    """Time training steps of several batch sizes, which take turns; making batches is left out.

    `sizes`: by default 1, 2, 4, ... up to `largest`, and `largest` itself. `rounds`: how often
    each size is timed, after one step to warm up. Everything is restored as after
    `find_batch_size`; a size that does not fit raises its out-of-memory error. A replica under
    DDP takes part in all-reduces: all ranks must call it with the same sizes.

    Raises:
        ValueError: neither sizes nor largest; a size below 1.
    """
    from tqdm import tqdm

    sizes = _sizes(sizes, largest)
    before = Snapshot(model, optimizer)
    runs: dict[int, tuple[float, ...]] = dict.fromkeys(sizes, ())
    turns = [n for i in range(rounds + 1) for n in (sizes if i % 2 == 0 else reversed(sizes))]

    def step(batch: Any) -> None:
        loss_fn(model, batch).backward()
        optimizer.step()

    try:
        model.train()
        for turn, n in enumerate(tqdm(turns, desc="steps", file=sys.stdout)):
            before.without_gradients()
            took = measure(partial(step, make_batch(n)), repeat=1, warmup=0)
            if turn >= len(sizes):  # the first round warms up
                runs[n] += took.runs
    finally:
        before.restore()
    return Throughput({n: Timing(each) for n, each in runs.items()}, largest or max(sizes))


def _sizes(sizes: Iterable[int] | None, largest: int | None) -> list[int]:
    if sizes is None:
        if largest is None:
            raise ValueError("which sizes? Pass sizes=[...], or largest=found.batch_size")
        sizes = {2**i for i in range(largest.bit_length())} | {largest}
    chosen = sorted(set(sizes))
    if not chosen or chosen[0] < 1:
        raise ValueError(f"sizes are numbers of samples, at least one of them, not {chosen}")
    return chosen
