"""The largest batch a compiled Keras model can train with: predict, then verify.

    found = find_keras_batch_size(model, make_batch, limit=256 * MiB)
    print(found)                          # the trials: predicted, measured, why it stopped
    plots.show(found.plot(), alt=...)

TensorFlow does not count a CPU's memory, and where it gets none it may abort. So there a
trial is a process of its own, which limits itself: see :mod:`course_utils._keras_trial`. On
a GPU TensorFlow's allocator counts: ``tf.config.experimental.get_memory_info``.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_utils import memory
from course_utils._keras_gpu import free_on_gpu, try_on_gpu
from course_utils._keras_trial import check_cpu, custom_objects_of, try_in_child
from course_utils._search import DoesNotFit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TRIALS = 6
FULL = 0.96  # of the limit: nearer is not worth another trial
AIM, CAREFUL = 0.98, 0.8  # of the limit: where a trial aims, and where the third one does
CLOSE = 0.03  # between what fits and what does not, as a share of the batch size


@dataclass(frozen=True)
class KerasTrial:
    """One batch size that was tried; figures are bytes, None where they are not known."""

    batch_size: int
    predicted: int | None
    measured: int | None  # the peak of two steps
    second: int | None = None  # the resident memory's peak in the second step alone
    error: str | None = None  # how it ended where memory ran out

    @property
    def fits(self) -> bool:
        return self.error is None


@dataclass(frozen=True, repr=False)
class KerasBatchSize:
    """What the search found: `batch_size` ran ``train_on_batch`` twice within the limit."""

    batch_size: int
    trials: tuple[KerasTrial, ...]  # in the order in which they ran
    limit: int  # bytes
    headroom: float
    stopped: str  # why there was no further trial
    device: str

    @property
    def peak(self) -> int:
        """Bytes at the peak of two training steps at `batch_size`, measured."""
        return next(t.measured for t in self.trials if t.fits and t.batch_size == self.batch_size)

    def __str__(self) -> str:
        kept = f", {self.headroom:.0%} of it kept free" if self.headroom else ""
        lines = [
            f"batch size {self.batch_size}: {memory.size(self.peak)} at the peak, "
            f"{self.peak / self.limit:.1%} of {memory.size(self.limit)} ({self.device}{kept})",
            "trial    batch   predicted    measured",
        ]
        for number, t in enumerate(self.trials, 1):
            figures = ("-" if n is None else memory.size(n) for n in (t.predicted, t.measured))
            row = f"{number:>5}  {t.batch_size:>7}  " + "  ".join(f"{text:>10}" for text in figures)
            lines.append(row + ("" if t.fits else f"  out of memory: {t.error}"))
        return "\n".join([*lines, f"stopped: {self.stopped}"])

    __repr__ = __str__

    def plot(self) -> "Figure":
        """Measured peaks, what was predicted for them, and the limit, in MiB."""
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        limit = self.limit * (1 - self.headroom) / memory.MiB
        good = sorted((t.batch_size, t.measured / memory.MiB) for t in self.trials if t.fits)
        axes.plot(*zip(*good, strict=True), "o-", label="measured")
        said = [(t.batch_size, t.predicted / memory.MiB) for t in self.trials if t.predicted]
        if said:
            style = {"linestyle": "none", "fillstyle": "none", "markersize": 9}
            axes.plot(*zip(*said, strict=True), "s", label="predicted before", **style)
        bad = [t.batch_size for t in self.trials if not t.fits]
        if bad:
            axes.plot(bad, [limit] * len(bad), "X", linestyle="none", label="out of memory")
        axes.axhline(limit, color="black", ls="--", marker="", label="limit")
        axes.set(xlabel="batch size (samples)", ylabel="memory at the peak (MiB)", ylim=(0, None))
        axes.set_title(f"Keras: {self.batch_size} samples fit, found in {len(self.trials)} trials")
        axes.legend()
        return figure


def find_keras_batch_size(
    model: Any,
    make_batch: Callable[[int], Any],
    *,
    limit: int | None = None,
    max_batch: int | None = None,
    headroom: float = 0.0,
    custom_objects: dict[str, Any] | None = None,
    timeout: float = 120.0,
) -> KerasBatchSize:
    """The largest batch with which this model can be trained, in at most 6 trials.

    `model` itself does not run. Every trial trains a copy, made from what ``model.save``
    writes: weights, optimizer and random numbers are afterwards bitwise as before.

    On a CPU, `limit` is on what a process may map for itself (RLIMIT_DATA) beyond an idle
    TensorFlow: weights, gradients, optimizer, activations, kernels' workspace, the traced
    graph, the batch as NumPy array and as tensor. It runs on one core, with one thread, and
    freed blocks go back to the system at once (as under MALLOC_MMAP_THRESHOLD_=65536
    MALLOC_TRIM_THRESHOLD_=0). A process with glibc's defaults holds more: leave headroom.

    On a GPU (**written from TensorFlow's documentation, never run by the authors**) the peak
    of its allocator is held against `limit`; its real ResourceExhaustedError counts too.

    Args:
        model: compiled and built, on the TensorFlow backend.
        make_batch: ``make_batch(n)`` gives x, ``(x, y)`` or ``(x, y, sample_weight)``, of n
            samples. On a CPU it runs in another process, and what it prints is not shown.
        limit: bytes; needed on a CPU; on a GPU by default what is free of it.
        max_batch: never try more, for example the size of the data set.
        headroom: share of `limit` to leave free, from 0 to below 1.
        custom_objects: name -> your class or function, where Keras cannot find it by itself.
        timeout: seconds for one trial.

    Raises:
        DoesNotFit: not even a batch of 1; says how much that takes without the limit.
        RankError: a trial on a CPU failed for another reason: its own error and traceback.
        ValueError: not compiled, not built, another backend, unusable arguments.
        RuntimeError: this system cannot limit a process's memory.
    """
    _check(model, limit, max_batch, headroom)
    import tensorflow as tf

    on_gpu = bool(tf.config.get_visible_devices("GPU"))
    limit = limit or (free_on_gpu() if on_gpu else None)
    if not on_gpu:
        check_cpu(limit)
    objects = {**custom_objects_of(model), **(custom_objects or {})}
    with tempfile.TemporaryDirectory(prefix="keras-batch-") as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        job = (str(path), objects, make_batch)
        attempt = partial(try_on_gpu, *job) if on_gpu else partial(try_in_child, job, timeout)
        trials, stopped = search(attempt, int(limit * (1 - headroom)), max_batch)
    best = max(t.batch_size for t in trials if t.fits)
    device = "GPU" if on_gpu else "one CPU core"
    return KerasBatchSize(best, tuple(trials), limit, headroom, stopped, device)


# ---------------------------------------------------------------- the search


def search(
    attempt: Callable[[int, int | None], dict[str, Any]], limit: int, cap: int | None
) -> tuple[list[KerasTrial], str]:
    """The trials in the order in which they ran, and why there was no further one.

    ``attempt(batch_size, limit)`` returns {"peak", "second", "error", "per_sample"}: bytes;
    error is None where it fits. Batch 1 shows what does not grow with the batch. The second
    trial goes by the sizes of the layers' outputs, which may be wrong by a factor of two. The
    line through both is often too flat, because at batch 1 another moment has the peak, the
    tracing of the graph for one: so the second step counts too, and the third trial aims low.
    """
    first = attempt(1, limit)
    if first["error"]:
        needs = attempt(1, None)
        takes = memory.size(needs["peak"]) if needs["peak"] else "more than this machine has free"
        raise DoesNotFit(
            f"A batch of 1 does not fit into {memory.size(limit)} ({first['error']}). Two steps "
            f"of it take {takes}, beyond an idle TensorFlow: raise `limit` above that, or make "
            "the model smaller."
        )
    trials = [KerasTrial(1, None, first["peak"], first["second"])]
    while True:
        low = max((t for t in trials if t.fits), key=lambda t: t.batch_size)
        high = min((t.batch_size for t in trials if not t.fits), default=None)
        if low.batch_size == cap:
            return trials, f"max_batch is {cap}"
        if high is not None and high - low.batch_size <= max(1, CLOSE * high):
            return trials, f"{high} is too large"
        if low.measured >= FULL * limit:
            return trials, f"near enough, {low.measured / limit:.1%} of what may be used"
        if len(trials) == MOST_TRIALS:
            return trials, f"{MOST_TRIALS} trials are the most"
        batch, predicted = _next(trials, limit, cap, first["per_sample"])
        found = attempt(batch, limit)
        figures = (predicted, found["peak"], found["second"], found["error"])
        trials.append(KerasTrial(batch, *figures))


def _next(
    trials: list[KerasTrial], limit: int, cap: int | None, per_sample: int
) -> tuple[int, int]:
    """The batch size to try next, and the peak predicted for it (bytes)."""
    *lower, low = sorted((t for t in trials if t.fits), key=lambda t: t.batch_size)
    failed = [t.batch_size for t in trials if not t.fits]
    if lower:
        # Peaks vary by a few MiB from run to run: points too near make a wrong line.
        apart = [t for t in lower[1:] if low.measured - t.measured > 0.04 * limit]
        other = (apart or lower[:1])[-1]
        rise = max(low.measured - other.measured, low.second - other.second)
        slope = max(rise / (low.batch_size - other.batch_size), per_sample / 3, 1.0)
        near = len(lower) > 1 or low.measured > 0.75 * limit
        aim = (AIM if near else CAREFUL) * limit
    else:
        slope, aim = max(per_sample, 1.0), low.measured + 0.4 * (limit - low.measured)
    batch = low.batch_size + int((aim - low.measured) / slope)
    if failed:  # the line was too flat
        share = 0.35 if not lower else 0.75 if trials[-1].fits else 0.6 if len(failed) == 1 else 0.5
        batch = min(batch, low.batch_size + int(share * (min(failed) - low.batch_size)))
    batch = max(low.batch_size + 1, min(batch, cap or batch))
    return batch, int(low.measured + slope * (batch - low.batch_size))


# ---------------------------------------------------------------- before the first trial


def _check(model: Any, limit: int | None, max_batch: int | None, headroom: float) -> None:
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()} here, and this search is for TensorFlow: "
            "set the environment variable KERAS_BACKEND=tensorflow before importing keras"
        )
    if not getattr(model, "compiled", False):
        raise ValueError("the model is not compiled: model.compile(optimizer, loss) first")
    if not model.built:
        raise ValueError(
            "the model is not built, so it has no weights: call it on one batch, or give it a "
            "keras.Input"
        )
    if limit is not None and limit <= 0:
        raise ValueError(f"limit={limit}: bytes, above 0, such as 512 * MiB")
    if max_batch is not None and max_batch < 1:
        raise ValueError(f"max_batch={max_batch}: at least 1")
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom={headroom}: a share of the limit, from 0 to below 1")
