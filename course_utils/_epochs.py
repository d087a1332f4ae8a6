"""One pass over the data, training or not; re-exported by :mod:`course_utils.training`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

from course_utils import memory
from course_utils._agree import agree, gather
from course_utils._safety import (
    Attempt,
    Batch,
    does_not_fit,
    each_tensor,
    first_line,
    halved,
    in_use,
    number,
    samples,
    split,
)

if TYPE_CHECKING:
    import torch

    from course_utils.training import SafeStep, StepResult


@dataclass(frozen=True)
class Epoch:
    """What `train_epoch` did. The loss is the mean over all that counted, not over batches."""

    loss: float
    count: float
    steps: int
    retries: int
    skipped: int
    micro_batch: int | None


def train_epoch(
    step: SafeStep,
    loader: Iterable[Batch],
    *,
    progress: bool = True,
    after_step: Callable[[int, StepResult], object] | None = None,
) -> Epoch:
    """One pass over `loader`, with a progress bar (rank 0's).

    A model in eval mode is put into train mode. One that is in train mode is left as it is, so
    that layers frozen by ``.eval()`` stay frozen. `after_step(i, result)` is called after the
    i-th batch: for a scheduler, a checkpoint.

    Raises:
        ValueError: under DDP, the ranks have different numbers of batches.
    """
    from tqdm import tqdm

    if step.ranks and hasattr(loader, "__len__"):
        step.ranks.check_lengths(len(loader))
    if not step.module.training:
        step.module.train()
    results = []
    quiet = not progress or bool(step.ranks and step.ranks.rank)
    with tqdm(loader, disable=quiet, file=sys.stdout) as bar:
        for i, batch in enumerate(bar):
            results.append(result := step(batch))
            bar.set_postfix(loss=f"{result.loss:.4g}", refresh=False)
            if after_step:
                after_step(i, result)
    count = sum(r.count for r in results)
    loss = sum(r.loss * r.count for r in results if r.count) / count if count else math.nan
    retries, skipped = sum(r.retries for r in results), sum(r.skipped for r in results)
    return Epoch(loss, count, len(results), retries, skipped, step.micro_batch)


def evaluate(
    model: torch.nn.Module,
    loader: Iterable[Batch],
    fn: Callable[[torch.nn.Module, Batch], Any],
    *,
    batch_size: int | None = None,
    count: Callable[[Batch], Any] | None = None,
    progress: bool = False,
) -> Any:
    """The mean of `fn` over all that counts in `loader`, exact also if batches are ragged.

    ``fn(model, batch)`` returns the mean over its batch: a number, or a dict of numbers. So does
    `evaluate`. The model runs in eval mode under ``torch.inference_mode()``; then every module
    is put back into the mode in which it was. At most `batch_size` samples run at once; running
    out halves that for the rest of this call, and no training step hears of it. With
    DistributedDataParallel every rank brings its shard and gets the mean over all of them.

    Raises:
        torch.OutOfMemoryError: a single sample does not fit.
        ValueError: nothing in `loader` counts.
        RuntimeError: with DistributedDataParallel, what failed on another rank.
    """
    import torch

    ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    module = model.module if ddp else model
    group = model.process_group if ddp else None
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        work = partial(_shard, module, loader, fn, batch_size, count or samples, progress)
        shards = gather(agree(work, group), group) if ddp else [work()]
    finally:
        for each, mode in modes:
            each.training = mode
    sums = reduce(_added, shards)
    if not (total := sums.pop(None, 0)):
        raise ValueError("nothing to evaluate: the loader is empty, or nothing in it counts")
    means = {name: value / total for name, value in sums.items()}
    return means.get("", means)


def _shard(
    module: Any, loader: Iterable, fn: Callable, size: int | None, count: Callable, progress: bool
) -> dict:
    """`fn` times count, summed over this rank's loader, and under None the count."""
    from tqdm import tqdm

    shard: dict = {}
    for batch in tqdm(loader, disable=not progress, file=sys.stdout):
        at_once = min(size or samples(batch), samples(batch))
        while isinstance(found := _sums(module, batch, fn, count, at_once), str):
            memory.release()
            failed = Attempt(size=at_once, oom=found)
            if at_once <= 1:
                raise does_not_fit(failed, in_use(module))
            at_once = size = halved(failed)
        shard = _added(shard, found)
    return shard


def _sums(module: Any, batch: Batch, fn: Callable, count: Callable, at_once: int) -> dict | str:
    """The same for one batch; or why it ran out of memory."""
    import torch

    sums: dict = {}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        for part in split(batch, at_once) if at_once else ():
            if weight := number(count(part)):
                with torch.inference_mode():  # not around the loader, whose tensors may be kept
                    means = fn(module, each_tensor(part, lambda tensor: tensor.to(device)))
                means = means if isinstance(means, dict) else {"": means}
                found = {name: weight * float(mean) for name, mean in means.items()}
                sums = _added(sums, {None: weight, **found})
    except Exception as error:
        if not memory.is_oom(error):
            raise
        return first_line(error)
    return sums


def _added(a: dict, b: dict) -> dict:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
