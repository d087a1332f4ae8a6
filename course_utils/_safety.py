"""What :class:`course_utils.training.SafeStep` stands on, on one device.

- :class:`Before`: random numbers and buffers as they were when a step began.
- :func:`reserve`: the memory of an optimizer's state, taken before its first step.
- :func:`check_layers`: refuses those that a split batch would change.
- :func:`samples`, :func:`split`, :func:`each_tensor`: batches.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_utils import _random, memory
from course_utils._bytes import tensors_in

if TYPE_CHECKING:
    import torch

Batch = Any  # a tensor, or tuples, lists and dicts of tensors whose first dimension is samples


@dataclass
class Attempt:
    """What one attempt at a batch came to; after the vote: what those of all ranks did."""

    size: int = 0  # of the micro-batches; 0: it failed before there were any
    count: float = 0  # samples (or tokens) that counted
    loss: float = 0.0  # their mean
    oom: str | None = None  # the error's text, never the error: it would keep every tensor alive
    failed: str | None = None  # an error of another kind, on this rank or another


class Before:
    """Random numbers (torch, CUDA, numpy, python) and buffers of `module`, to go back to."""

    def __init__(self, module: torch.nn.Module) -> None:
        found = [(owner, name) for owner in module.modules() for name in owner._buffers]
        self._places = [(owner, name) for owner, name in found if owner._buffers[name] is not None]
        self.forget()

    def forget(self) -> None:
        self._random: dict | None = None
        self._buffers: list[tuple] = []

    def keep(self) -> None:
        """Keep them as they are now, unless some are kept already."""
        if self._random is None:
            now = [(owner, name, owner._buffers[name]) for owner, name in self._places]
            self._buffers = [(*place, place[-1].clone()) for place in now]
            self._random = _random.state()

    def restore(self) -> None:
        import torch

        if self._random is not None:
            _random.restore(self._random)
        with torch.no_grad():
            for owner, name, buffer, value in self._buffers:
                buffer.copy_(value)
                owner._buffers[name] = buffer  # forward may have put another tensor there


def reserve(optimizer: torch.optim.Optimizer) -> dict | None:
    """Memory as large as the state that `optimizer` will allocate in its first step.

    Adam and others allocate their state inside the first ``step()``, where running out is too
    late: half of the weights may have moved. So a twin of the optimizer steps now, with zero
    gradients, and the caller keeps the twin's state until the real first step is due. The
    optimizer itself is not touched: its own first step begins as if nothing had been. The
    parameters are put back bit by bit from a copy in main memory, which no meter counts. None
    when there is state already, from an earlier step or a checkpoint.

    Source of the idea to step with zero gradients: PyTorch's _init_optim_state in
    torch/distributed/checkpoint/state_dict.py.
    """
    import torch

    if optimizer.state:
        return None
    twin = object.__new__(type(optimizer))
    twin.__dict__ = {**optimizer.__dict__, "state": defaultdict(dict)}
    twin.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    twin._optimizer_step_pre_hooks = OrderedDict()  # they are not told of a step that is none
    twin._optimizer_step_post_hooks = OrderedDict()
    parameters = [p for group in twin.param_groups for p in group["params"] if p.requires_grad]
    values = [_bits(p).cpu().numpy().copy() for p in parameters]
    numbers = _random.state()
    try:
        for p in parameters:
            p.grad = torch.zeros_like(p)
        type(optimizer).step(twin)
    finally:
        for p in parameters:
            p.grad = None
        for p, value in zip(parameters, values, strict=True):
            _bits(p).copy_(torch.from_numpy(value))
        _random.restore(numbers)
    return twin.state


def _bits(p: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: numpy knows no bfloat16, and nothing may be rounded."""
    import torch

    if p.is_complex():
        p = torch.view_as_real(p.detach())
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return p.detach().view(sizes[p.element_size()])


def find_batchnorms(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Names and layers. Raises ValueError for a sharded model (FSDP), which cannot be guarded."""
    import torch

    sharded = any("FullyShardedDataParallel" in type(each).__name__ for each in module.modules())
    if sharded or any(hasattr(p, "device_mesh") for p in module.parameters()):
        raise ValueError(
            "this model's parameters are sharded: its ranks talk in forward and backward, so one "
            "that runs out of memory leaves the others waiting. SafeStep takes a plain module or "
            "DistributedDataParallel."
        )
    norm = torch.nn.modules.batchnorm._BatchNorm
    return [(name, each) for name, each in module.named_modules() if isinstance(each, norm)]


def check_layers(norms: list[tuple[str, Any]], allow: bool) -> None:
    """Raises ValueError for layers that take statistics from the batch (not frozen by .eval())."""
    import torch

    active = [(name, each) for name, each in norms if each.training or each.running_mean is None]
    sync = [name for name, each in active if isinstance(each, torch.nn.SyncBatchNorm)]
    if sync:
        raise ValueError(
            f"SyncBatchNorm ({', '.join(sync)}) talks to the other ranks in forward: if one rank "
            "runs out of memory there, the others wait for ever. Use GroupNorm or BatchNorm."
        )
    if active and not allow:
        raise ValueError(
            f"BatchNorm ({', '.join(name for name, _ in active)}) normalises each micro-batch by "
            "its own mean, so a batch that had to be split would train another model. Use "
            "GroupNorm, freeze these layers with .eval(), or accept it: allow_batchnorm=True."
        )


# ---------------------------------------------------------------- batches


def samples(batch: Any) -> int:
    """How many samples are in `batch`: the first dimension of its tensors."""
    found: list[int] = []
    each_tensor(batch, lambda tensor: found.append(tensor.shape[0] if tensor.dim() else -1))
    if not found or len(set(found)) > 1 or found[0] < 0:
        raise ValueError(
            f"the first dimensions of this batch's tensors are {found} (-1: it has none). Each "
            "must be the number of samples, so that the batch can be split."
        )
    return found[0]


def split(batch: Any, size: int) -> Iterator[Any]:
    """Micro-batches of `size` samples, in order; the last may be smaller. They are views."""
    total = samples(batch)
    if total <= size:
        yield batch
        return
    for begin in range(0, total, size):
        yield each_tensor(batch, lambda tensor, begin=begin: tensor[begin : begin + size])


def each_tensor(batch: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """`fn` of every tensor, in the same tuples, lists and dicts."""
    import torch

    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if isinstance(batch, Mapping):
        return {name: each_tensor(part, fn) for name, part in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [each_tensor(part, fn) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise TypeError(
        "a batch is a tensor, or tuples, lists and dicts of tensors; this one holds a "
        f"{type(batch).__name__}, which cannot be split"
    )


# ---------------------------------------------------------------- what is said


def in_use(module: Any, optimizer: Any = None, reserved: dict | None = None) -> str:
    kinds = memory.kinds(module, optimizer)
    if reserved:
        kinds["reserved for optimizer state"] = sum(t.nbytes for t in tensors_in(reserved))
    return f"In use: {', '.join(f'{kind} {memory.size(n)}' for kind, n in kinds.items())}."


def does_not_fit(found: Attempt, where: str) -> Exception:
    import torch

    what = "with a micro-batch of 1: a single sample does not fit"
    if not found.size:
        what = "before the first sample: parameters, gradients and optimizer state do not fit"
    return torch.OutOfMemoryError(
        f"Out of memory {what}. {where} What helps: a smaller model or shorter samples, lower "
        "precision, activation checkpointing, an optimizer with less state (plain SGD has none). "
        f"({found.oom})"
    )


def halved(found: Attempt, quiet: Any = False) -> int:
    from tqdm import tqdm

    half = (found.size + 1) // 2
    if not quiet:  # aloud, and without tearing a progress bar apart
        text = f"Out of memory with {found.size} samples at once: the same batch again with {half}."
        tqdm.write(f"{text} ({found.oom})", file=sys.stdout)
    return half


def number(count: Any) -> float:
    count = count.item() if hasattr(count, "item") else count
    if not 0 <= count < math.inf:
        raise ValueError(f"count(batch) is how many samples or tokens count, not {count}")
    return count


def first_line(error: BaseException) -> str:
    """Its type and first two sentences: the rest of CUDA's message is advice."""
    text = f"{type(error).__name__}: {error}".split("\n")[0]
    return ". ".join(text.split(". ")[:2])
