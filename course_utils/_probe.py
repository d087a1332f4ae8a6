"""One trial of a batch size, and the promise that it leaves no trace.

A trial makes a batch and takes two whole training steps with it: the first one allocates what
the optimizer keeps (Adam's averages do not exist before), the second one meets it. Each phase
of a step is measured apart, because the peak of `optimizer.step` does not depend on the batch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from course_utils import memory
from course_utils._bytes import tensors_in
from course_utils._snapshot import Snapshot

if TYPE_CHECKING:
    import torch

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class Trial:
    """One batch size that was tried, and what two steps of it took. Figures are bytes."""

    batch_size: int
    limit: int
    predicted: int | None  # before the trial; None where nothing was known yet
    peaks: tuple[int, ...]  # of forward, backward, step, forward, backward, step; fewer if OOM
    error: str | None = None  # what the allocator said when memory ran out
    kinds: Mapping[str, int] = field(default_factory=dict)  # bytes by kind, then
    needed: int | None = None  # bytes in use and asked for, then; None if the error does not say
    # Bytes alive after each allocation, in order (the operations are the same at every batch
    # size), and how much of them were parameters, gradients and optimizer state.
    moments: tuple[int, ...] = field(default=(), repr=False)
    fixed: tuple[int, ...] = field(default=(), repr=False)

    @property
    def fits(self) -> bool:
        return self.error is None

    @property
    def measured(self) -> int | None:
        """The peak of both steps; None when memory ran out."""
        return max(self.peaks) if self.fits else None

    @property
    def phases(self) -> dict[str, int]:
        """The larger peak of each phase that was completed."""
        return {p: max(self.peaks[i::3]) for i, p in enumerate(PHASES) if self.peaks[i::3]}

    @property
    def highest(self) -> str:
        """The phase that had the largest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def failed_in(self) -> str:
        """The phase in which memory ran out: "backward of step 1"; empty if it did not."""
        done = len(self.peaks)
        return "" if self.fits else f"{PHASES[done % 3]} of step {done // 3 + 1}"


@dataclass(frozen=True)
class Job:
    """What is tried: a model, its optimizer, batches, a loss, and the limit in bytes."""

    model: "torch.nn.Module"
    optimizer: "torch.optim.Optimizer"
    make_batch: Callable[[int], Any]
    loss_fn: Callable[["torch.nn.Module", Any], "torch.Tensor"]
    before: Snapshot
    limit: int
    device: "torch.device"
    ballast: int = 0  # bytes that training will need beside what a trial allocates

    def run(self, batch_size: int, predicted: int | None = None) -> Trial:
        """Try one size. Afterwards everything is as before; an error that is no OOM comes through.

        The trial's batch_size is smaller than what was asked for where `make_batch` gave less:
        then the data has no more.
        """
        where = {"limit": self.limit, "device": self.device}
        trial = _Notes(batch_size, memory.meter(self.model, self.optimizer, record=True, **where))
        try:
            with trial.meter:
                self._two_steps(trial)
        except Exception as error:
            if not memory.is_oom(error):
                raise
            trial.error = str(error)  # never the error itself: its traceback holds the tensors
            trial.kinds = trial.meter.peak_by_kind()
            trial.needed = _asked(trial.error) and trial.meter.live + _asked(trial.error)
        finally:
            self.before.restore()
        if trial.error is not None or self.device.type == "cuda":
            memory.release()
        return trial.closed(self.limit, predicted)

    def _two_steps(self, trial: "_Notes") -> None:
        import torch

        ballast = torch.empty(self.ballast, dtype=torch.uint8, device=self.device)
        if not self.model.training:
            self.model.train()
        trial.meter.reset()
        batch = self.make_batch(trial.samples)
        trial.samples = _samples(batch, trial.samples)
        for _ in range(2):
            self.before.without_gradients()
            loss = self.loss_fn(self.model, batch)
            _check_loss(loss)
            trial.phase_ends()
            loss.backward()
            trial.phase_ends()
            self.optimizer.step()
            trial.phase_ends()
        del ballast


class _Notes:
    """What a trial writes down while it runs, so that it is still there when memory ran out."""

    def __init__(self, samples: int, meter: Any) -> None:
        self.samples = samples
        self.meter = meter
        self.peaks: list[int] = []
        self.error: str | None = None
        self.kinds: Mapping[str, int] = {}
        self.needed: int | None = None

    def phase_ends(self) -> None:
        self.peaks.append(self.meter.peak)
        self.meter.reset()

    def closed(self, limit: int, predicted: int | None) -> Trial:
        # Parameters, gradients and state come first among the kinds of a change.
        counted = [(sum(change), sum(change[:3])) for change in self.meter.changes]
        before = [(0, 0), *counted]
        ups = [now for last, now in zip(before, counted, strict=False) if now[0] > last[0]]
        # What an allocator holds beyond the tensors (rounding, workspaces); 0 in a budget.
        beyond = max([*self.peaks, self.meter.peak]) - max((all_ for all_, _ in ups), default=0)
        return Trial(
            self.samples,
            limit,
            predicted,
            tuple(self.peaks),
            self.error,
            self.kinds,
            self.needed,
            moments=tuple(all_ + beyond for all_, _ in ups),
            fixed=tuple(fixed + beyond for _, fixed in ups),
        )


def _asked(message: str) -> int | None:
    """Bytes, from "Tried to allocate 1.50 GiB"; None where the message does not say."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)", message)
    powers = {"bytes": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
    return int(float(found[1]) * 1024 ** powers[found[2]]) if found else None


def _samples(batch: Any, asked: int) -> int:
    first = next((t for t in tensors_in(batch) if t.dim()), None)
    given = asked if first is None else len(first)
    if given > asked or given == 0:
        raise ValueError(
            f"make_batch({asked}) gave {given} samples (the first dimension of its first "
            f"tensor, shape {tuple(first.shape)}). It must give as many as asked for, or fewer "
            "where the data has no more"
        )
    return given


def _check_loss(loss: Any) -> None:
    import torch

    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
        raise TypeError(f"loss_fn(model, batch) must return the mean loss, one number; not {shape}")
