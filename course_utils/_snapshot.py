"""All that a training step changes, kept on the CPU and put back bit by bit."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from course_utils import _random

if TYPE_CHECKING:
    import torch


class Snapshot:
    """All that a training step changes, copied to the CPU; `restore` puts back every bit.

    That is: parameters, buffers, gradients (those that are None stay None), `requires_grad` and
    train flags, the optimizer's state and groups, and the random numbers of torch, CUDA, NumPy
    and Python. The tensors stay the same objects. Other attributes of a module, and generators
    of your own, are not known here.
    """

    def __init__(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
        grouped = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = list({id(p): p for p in (*model.parameters(), *grouped)}.values())
        self._values = [(p, _copied(p), p.requires_grad) for p in parameters]
        self._grads = [(p, p.grad, _copied(p.grad)) for p in parameters]
        self._modules = [
            (m, m.training, {name: (b, _copied(b)) for name, b in m._buffers.items()})
            for m in model.modules()
        ]
        self._optimizer = optimizer
        self._state = [
            (key, kept, {name: (value, _copied(value)) for name, value in kept.items()})
            for key, kept in optimizer.state.items()
        ]
        self._groups = [
            (group, {name: (v, v if name == "params" else _copied(v)) for name, v in group.items()})
            for group in optimizer.param_groups
        ]
        # A scheduler notes here whether the optimizer has stepped yet.
        self._notes = {name: v for name, v in vars(optimizer).items() if _is_plain(v)}
        self._random = _random.state()

    def without_gradients(self) -> None:
        """What `zero_grad()` does, but for gradients that existed: those stay and count."""
        for parameter, grad, _ in self._grads:
            if grad is None:
                parameter.grad = None

    def restore(self) -> None:
        """Put everything back. It may be called again, also after it was interrupted."""
        import torch

        with torch.no_grad():
            for parameter, saved, requires_grad in self._values:
                parameter.requires_grad_(requires_grad)
                _put_back(parameter, saved)
            for parameter, grad, saved in self._grads:
                parameter.grad = _put_back(grad, saved)
            for module, training, buffers in self._modules:
                module.training = training
                _refill(module._buffers, buffers)
            self._optimizer.state.clear()
            for key, kept, entries in self._state:
                _refill(kept, entries)
                self._optimizer.state[key] = kept
            for group, entries in self._groups:
                _refill(group, entries)
        for name in [n for n, v in vars(self._optimizer).items() if _is_plain(v)]:
            del vars(self._optimizer)[name]
        vars(self._optimizer).update(self._notes)
        _random.restore(self._random)


def _copied(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _put_back(value: Any, saved: Any) -> Any:
    """`value` with the bits that it had; what is no tensor is replaced by a copy of `saved`."""
    import torch

    if isinstance(value, torch.Tensor):
        value.detach().copy_(saved)
        return value
    return copy.deepcopy(saved)


def _refill(kept: dict, entries: Mapping[Any, tuple[Any, Any]]) -> None:
    """The same dict with the same keys in the same order, each value as it was."""
    kept.clear()
    for name, (value, saved) in entries.items():
        kept[name] = value if value is saved else _put_back(value, saved)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
