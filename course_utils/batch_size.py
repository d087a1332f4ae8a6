"""The largest batch that fits: predict, then verify.

    found = find_batch_size(model, optimizer, make_batch, loss_fn, limit=64 * MiB)
    print(found)                          # the trials: predicted, measured, why it stopped
    plots.show(found.plot(), alt=...)

How it predicts is told in :mod:`course_utils._search`, what a trial is in
:mod:`course_utils._probe`, and how nothing is left of it in :mod:`course_utils._snapshot`. For
Keras models: `find_keras_batch_size`.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_utils import memory
from course_utils._probe import Job, Trial
from course_utils._search import DoesNotFit, lines, predict, search_on_all_ranks
from course_utils._snapshot import Snapshot
from course_utils._throughput import Throughput, throughput
from course_utils.devices import census

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

__all__ = [
    "BatchSize", "DoesNotFit", "Throughput", "Trial", "find_batch_size", "throughput",
]  # fmt: skip

MakeBatch = Callable[[int], Any]
Loss = Callable[["torch.nn.Module", Any], "torch.Tensor"]


@dataclass(frozen=True)
class BatchSize:
    """What the search found. `batch_size` ran twice with forward, backward and optimizer.step."""

    batch_size: int
    trials: tuple[Trial, ...]  # in the order in which they ran
    limit: int  # bytes
    limit_from: str
    headroom: float
    stopped: str  # why there was no further trial
    ranks: tuple[int, ...] = ()  # what each rank found alone, where there are several

    @property
    def peak(self) -> int:
        """Bytes at the peak of two training steps at `batch_size`, measured."""
        return max(t.measured for t in self.trials if t.fits and t.batch_size == self.batch_size)

    def predict(self, batch_size: int) -> int:
        """Bytes at the peak with another batch size, from all that was measured."""
        return predict(lines(self.trials), batch_size)

    def __str__(self) -> str:
        share = self.peak / self.limit
        rows = [("trial", "batch", "predicted", "measured", "of limit", "")]
        for number, t in enumerate(self.trials, 1):
            said = "-" if t.predicted is None else memory.size(t.predicted)
            if t.fits:
                part = f"{t.measured / self.limit:.1%}"
                end = ("fits", memory.size(t.measured), part, f"highest in {t.highest}")
            else:
                end = ("", "-", "-", f"out of memory in {t.failed_in}")
            rows.append((str(number), str(t.batch_size), said, end[1], end[2], end[3]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join([c.rjust(w) for c, w in zip(row[:5], widths, strict=False)] + [row[5]])
            for row in rows
        ]
        kept = f", {self.headroom:.0%} of it kept free" if self.headroom else ""
        head = f"batch size {self.batch_size}: {memory.size(self.peak)} at the peak, "
        head += f"{share:.1%} of {memory.size(self.limit)} ({self.limit_from}{kept})"
        tail = [f"stopped: {self.stopped}"]
        if self.ranks:
            each = ", ".join(f"rank {r}: {n}" for r, n in enumerate(self.ranks))
            tail.append(f"alone the ranks found {each}; all ran {self.batch_size} together")
        return "\n".join([head, *(line.rstrip() for line in table), *tail])

    __repr__ = __str__

    def plot(self) -> "Figure":
        """Measured peaks, the prediction through them, and the limit, in MiB."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        good = [t for t in self.trials if t.fits]
        bad = [t for t in self.trials if not t.fits]
        last = max(t.batch_size for t in self.trials)
        through = lines(self.trials)
        sizes = sorted({max(1, round(1.05 * last * i / 60)) for i in range(61)} | {last})
        curve = [predict(through, n) / memory.MiB for n in sizes]
        axes.plot(sizes, curve, "k-", marker="", lw=1, label="prediction of the highest peak")
        ran = [t.batch_size for t in good]
        compute = [max(t.phases["forward"], t.phases["backward"]) / memory.MiB for t in good]
        axes.plot(ran, compute, "C0o", linestyle="none", label="measured: forward, backward")
        step = [t.phases["step"] / memory.MiB for t in good]
        axes.plot(ran, step, "C1s", linestyle="none", label="measured: optimizer's step")
        if bad:
            at = [t.batch_size for t in bad]
            limit = self.limit * (1 - self.headroom) / memory.MiB
            axes.plot(at, [limit] * len(at), "C3X", linestyle="none", label="out of memory")
        axes.axhline(self.limit / memory.MiB, color="black", ls="--", marker="", label="limit")
        axes.set(xlabel="batch size (samples)", ylabel="memory at the peak (MiB)", ylim=(0, None))
        axes.set_title(f"{self.batch_size} samples fit, found in {len(self.trials)} trials")
        axes.legend()
        return figure


def find_batch_size(
    model: "torch.nn.Module",
    optimizer: "torch.optim.Optimizer",
    make_batch: MakeBatch,
    loss_fn: Loss,
    *,
    limit: int | None = None,
    max_batch: int | None = None,
    headroom: float = 0.0,
    device: "str | torch.device | None" = None,
) -> BatchSize:
    """The largest batch with which this model can be trained, in at most 6 trials.

    A trial is two whole training steps, so what it returns has run. Parameters, buffers,
    gradients, optimizer, random numbers, train flags and `requires_grad` are afterwards bitwise
    as before, whatever happened; gradients that exist stay where they are and count. A model in
    eval mode is tried in train mode.

    Args:
        make_batch: gives n samples as a tensor, or a tuple, list or dict of tensors whose first
            dimension is the samples, on the model's device. Fewer than n: the data has no more.
        loss_fn: `loss_fn(model, batch)` gives the mean loss, one number.
        limit: bytes. None: on a GPU what is free on it now and what PyTorch holds there; on a
            CPU half of what the machine has free (a process needs more than its tensors; filling
            it with a small model takes minutes: give a limit or max_batch).
        max_batch: the most samples to try, the size of your data set for example.
        headroom: the share of the limit to keep free, from 0 to below 1.

    With several ranks (torch.distributed is initialised) all of them call it: each probes alone,
    the smallest answer is tried by all at once, and all return it. A limit may differ by rank.

    Raises:
        DoesNotFit: not even one sample fits (BatchNorm may need two); says where the bytes are.
        ValueError, TypeError: an argument makes no sense; an optimizer that needs a closure.
        RuntimeError: with several ranks, also what failed on another rank.
    """
    _check(optimizer, limit, max_batch, headroom)
    inner, ballast = _unwrapped(model)
    place = _place(inner, device)
    limit, source = (limit, "the limit you gave") if limit else _free(inner, optimizer, place)
    before = Snapshot(inner, optimizer)
    usable = math.floor(limit * (1 - headroom))
    job = Job(inner, optimizer, make_batch, loss_fn, before, usable, place, ballast)
    try:
        ranks, trials, stopped = search_on_all_ranks(job, max_batch or math.inf)
    finally:
        before.restore()  # each trial has done so; this is for a Ctrl-C in the middle of that
    size = max(t.batch_size for t in trials if t.fits) if not ranks else min(ranks)
    return BatchSize(size, tuple(trials), limit, source, headroom, stopped, ranks)


def _check(
    optimizer: "torch.optim.Optimizer", limit: int | None, max_batch: int | None, headroom: float
) -> None:
    if limit is not None and limit <= 0:
        raise ValueError(f"limit is a number of bytes above 0, such as 64 * MiB; not {limit}")
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"max_batch is a number of samples, at least 1; not {max_batch}")
    if not 0 <= headroom < 1:
        raise ValueError(
            f"headroom is the share of the limit to keep free, 0 to below 1: {headroom}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} needs a closure and may run it many times a step, so "
            "its memory is not that of a step tried here. Probe with SGD or Adam instead"
        )


def _unwrapped(model: "torch.nn.Module") -> tuple["torch.nn.Module", int]:
    """The module without DDP's wrapper, and the bytes of DDP's buckets that no trial sees."""
    from torch.nn.parallel import DistributedDataParallel
    from torch.nn.parameter import is_lazy

    ballast = 0
    if isinstance(model, DistributedDataParallel):
        if getattr(model, "static_graph", False):
            raise ValueError("DDP with static_graph=True counts backward passes: probe before it")
        if not model.gradient_as_bucket_view:
            ballast = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        model = model.module
    if any(hasattr(p, "device_mesh") for p in model.parameters()):
        raise ValueError("a sharded model (FSDP) cannot run on one rank alone: probe before it")
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("lazy layers have no sizes yet: send one batch through the model first")
    return model, ballast


def _place(model: "torch.nn.Module", device: "str | torch.device | None") -> "torch.device":
    import torch

    first = next(model.parameters(), None)
    if device is None and first is None:
        raise ValueError("the model has no parameters: say which device=... it is for")
    return torch.device(first.device if device is None else device)


def _free(model, optimizer, place: "torch.device") -> tuple[int, str]:
    """Bytes that training may use where no limit was given, and in words where that is from."""
    import torch

    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        return free + torch.cuda.memory_reserved(place), f"what is free on {place} now"
    free = census().cpu.free_memory
    if free is None:
        raise ValueError("how much memory this machine has free is not known: pass limit=...")
    held = sum(memory.kinds(model, optimizer).values())
    return free // 2 + held, "half of this machine's free memory"


def __getattr__(name: str) -> Any:
    # Late, because that module is only for Keras and stands on this one.
    if name == "find_keras_batch_size":
        from course_utils._keras_batch import find_keras_batch_size

        return find_keras_batch_size
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
