"""Bytes in words, and the storages behind tensors."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def size(number: float) -> str:
    """A number of bytes in words, in powers of two: ``size(1.5 * 2**20)`` is ``"1.50 MiB"``."""
    value, unit = float(number), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    if unit == "bytes":
        return f"{value:.0f} bytes"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def storages(tensor: "torch.Tensor") -> Iterator["torch.UntypedStorage"]:
    """The storages behind a tensor: one, or those inside a wrapper such as a DTensor."""
    import torch

    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a DTensor lists its mesh too
                yield from storages(part)
    else:
        try:
            yield tensor.untyped_storage()
        except NotImplementedError:
            return  # sparse and other tensors without one storage: their parts are not seen


def tensors_in(thing: Any) -> Iterator["torch.Tensor"]:
    """Every tensor in a module (parameters, buffers, gradients), optimizer, list, tuple or dict."""
    import torch

    if isinstance(thing, torch.Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, torch.nn.Module):
        for tensor in (*thing.parameters(), *thing.buffers()):
            yield from tensors_in(tensor)
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors_in(list(thing.state.values()))
    elif isinstance(thing, dict):
        yield from tensors_in(list(thing.values()))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors_in(part)


def flat(things: Any) -> Iterator[Any]:
    if isinstance(things, dict):
        things = list(things.values())
    if isinstance(things, (list, tuple)):
        for thing in things:
            yield from flat(thing)
    else:
        yield things
