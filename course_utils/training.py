"""Training that survives out-of-memory: the batch stays, the micro-batch halves.

    step = SafeStep(model, optimizer, loss_fn)              # loss_fn(model, batch) -> mean loss
    for epoch in range(3):
        print(train_epoch(step, loader))
        print(evaluate(model, test_loader, accuracy))       # accuracy(model, batch) -> mean

A batch that does not fit is run again in micro-batches of half the size, whose gradients add
up to those of the whole batch. No sample is lost, none counts twice. Random numbers and buffers
go back to where they were, so a step that ran out equals, bit by bit on a CPU, a step that was
split so from the start. It does not equal the unsplit step in that sense: sums round
differently, dropout draws other masks. A loss that compares samples with each other cannot be
split at all.

Source of the idea: ``device_train_microbatch_size="auto"`` of MosaicML's Composer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_utils import memory
from course_utils._epochs import Epoch, evaluate, train_epoch
from course_utils._safety import (
    Attempt,
    Batch,
    Before,
    check_layers,
    does_not_fit,
    each_tensor,
    find_batchnorms,
    first_line,
    halved,
    in_use,
    number,
    reserve,
    samples,
    split,
)
from course_utils._together import Ranks

if TYPE_CHECKING:
    import torch

__all__ = ["Epoch", "SafeStep", "StepResult", "evaluate", "train_epoch"]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. Under DDP loss and count are those of all ranks together."""

    loss: float  # mean over what counts
    count: float  # samples, or tokens
    micro_batch: int  # samples that were on the device at once
    retries: int  # attempts that ran out of memory
    skipped: bool = False  # the weights did not move: gradients overflowed, or nothing counted


class SafeStep:
    """One training step, ``result = step(batch)``, in which the optimizer steps once.

    Args:
        model: a module, or a DistributedDataParallel around one. Then every rank makes a
            SafeStep and calls it equally often; shards may differ in size, and all ranks split
            alike. It averages gradients after backward, not during it (why: ``_together.py``):
            no overlap, no communication hooks, one more copy of the gradients in memory, and
            with `broadcast_buffers` rank 0's buffers go to all after the step.
        optimizer: SafeStep clears the gradients first and leaves them in place after its step.
        loss_fn: ``loss_fn(model, batch) -> mean loss`` (0-dim) over what counts in the batch. It
            should draw from the global random numbers only: a generator of your own (torch's or
            numpy's ``Generator``) is not put back before a retry.
        count: ``count(batch) -> number`` that the mean is over, such as tokens that are not
            padding. Default: samples. Micro-batches in which nothing counts are left out.
        micro_batch: samples at once to begin with; None begins with the whole batch. It only
            shrinks, and stays in ``step.micro_batch``.
        clip: the largest norm of all gradients together, after unscaling.
        scaler: a ``torch.amp.GradScaler``.
        autocast: a dtype such as ``torch.bfloat16``; loss_fn runs under ``torch.autocast``.
        allow_batchnorm: accept that BatchNorm sees micro-batches. Its running statistics are
            put back before a retry.

    Raises (when called; weights are as before, except where an optimizer's step ran out):
        torch.OutOfMemoryError: a single sample does not fit, or ``optimizer.step()`` ran out.
        RuntimeError: under DDP, another rank failed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[torch.nn.Module, Batch], torch.Tensor],
        *,
        count: Callable[[Batch], Any] | None = None,
        micro_batch: int | None = None,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        autocast: torch.dtype | None = None,
        allow_batchnorm: bool = False,
    ) -> None:
        import torch

        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch is a number of samples from 1 on, not {micro_batch}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS runs the model inside its step, where no retry is possible")
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self.count, self.micro_batch, self.clip = count or samples, micro_batch, clip
        self.scaler, self.autocast, self.allow_batchnorm = scaler, autocast, allow_batchnorm
        ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self.module = model.module if ddp else model
        moved = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = list(dict.fromkeys([*self.module.parameters(), *moved]))
        self.ranks = Ranks(model, self.parameters) if ddp else None
        self._norms = find_batchnorms(self.module)
        check_layers(self._norms, allow_batchnorm)
        self._before = Before(self.module)
        self._prepared, self._reserved = False, None

    def __call__(self, batch: Batch) -> StepResult:
        retries = 0
        self._before.forget()
        while True:
            found = self._attempt(batch)
            if self.ranks:
                found = self.ranks.vote(found)
            if not (found.oom or found.failed):
                break
            # Asked while the gradients are still there.
            where = in_use(self.module, self.optimizer, self._reserved)
            self._undo()
            if found.failed:
                raise RuntimeError(found.failed)
            memory.release()  # here, outside `except`: in there the error holds all tensors
            if found.size <= 1:
                raise does_not_fit(found, where)
            self.micro_batch = halved(found, quiet=self.ranks and self.ranks.rank > 0)
            retries += 1
        skipped = self._step(found)
        self._before.forget()
        loss = found.loss if found.count else math.nan
        return StepResult(loss, found.count, found.size, retries, skipped)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that the next step is split as this one was."""
        return {"micro_batch": self.micro_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.micro_batch = state["micro_batch"]

    # ------------------------------------------------------------ an attempt, which may be undone

    def _attempt(self, batch: Batch) -> Attempt:
        found = Attempt()
        try:
            check_layers(self._norms, self.allow_batchnorm)  # .train() may have come since
            self._before.keep()
            self._gradients(batch, found)
        except BaseException as error:
            if memory.is_oom(error):
                found.oom = first_line(error)
                return found
            self._undo()
            if self.ranks and isinstance(error, Exception):
                found.failed = first_line(error)
                self.ranks.vote(found)  # the others must not wait for this rank
            raise
        return found

    def _gradients(self, batch: Batch, found: Attempt) -> None:
        """The whole batch's gradients, one micro-batch after the other, on this rank alone."""
        for p in self.parameters:
            p.grad = None
        if self.ranks:
            self.ranks.begin()
        self._prepare()
        total = samples(batch)
        found.size = min(self.micro_batch or total, total)
        parts = [batch] if found.size == total else list(split(batch, found.size))
        counts = [number(self.count(part)) for part in parts]
        found.count = sum(counts)
        losses = []
        for part, count in zip(parts, counts, strict=True):
            if count:  # weights are count / total, not 1 / parts: parts differ
                losses.append((count / found.count, self._backward(part, count / found.count)))
        # Read only now: each reading makes the processor wait for the GPU.
        found.loss = sum(weight * loss.item() for weight, loss in losses)
        if self.ranks:
            self.ranks.collect()

    def _prepare(self) -> None:
        """Before the very first sample: what every step will need beside activations."""
        import torch

        if self._prepared:
            return
        if self.scaler:  # makes its tensors
            self.scaler.scale(torch.zeros((), device=self.parameters[0].device))
        self._reserved = reserve(self.optimizer)
        self._prepared = True

    def _backward(self, part: Batch, weight: float) -> torch.Tensor:
        import torch

        device = self.parameters[0].device
        part = each_tensor(part, lambda tensor: tensor.to(device))
        with torch.autocast(device.type, self.autocast) if self.autocast else nullcontext():
            loss = self.loss_fn(self.module, part)
        weighted = loss if weight == 1 else loss * weight
        (self.scaler.scale(weighted) if self.scaler else weighted).backward()
        return loss.detach()

    def _undo(self) -> None:
        for p in self.parameters:
            p.grad = None
        self._before.restore()

    # ------------------------------------------------------------ the step, which may not

    def _step(self, found: Attempt) -> bool:
        """Average over the ranks, unscale, clip, step. Returns whether the step was skipped."""
        import torch

        if not found.count:
            return True
        try:
            if self.ranks:
                self.ranks.average()
            if self.scaler and self.clip is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self._reserved = None  # the optimizer takes its place
            if self.scaler is None:
                self.optimizer.step()
                return False
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale
            self._prepared = not skipped  # a first step that was skipped made no state
            return skipped
        except Exception as error:
            if not memory.is_oom(error):
                raise
            text = first_line(error)
        raise torch.OutOfMemoryError(
            "Out of memory in optimizer.step(), which cannot be repeated: some weights may have "
            f"moved. Go back to the last checkpoint. {in_use(self.module, self.optimizer)} ({text})"
        )
