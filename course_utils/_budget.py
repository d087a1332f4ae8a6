"""A memory limit for a device that has none: bytes of tensors, counted at every operation.

How it counts is told in :mod:`course_utils._ledger`; here is what it is told of modules and
optimizers, so that it knows what is whose.
"""

import threading
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from course_utils._bytes import flat, size, tensors_in
from course_utils._ledger import (
    GRADIENTS,
    KINDS,
    OTHER,
    PARAMETERS,
    STATE,
    Ledger,
    accounting,
)

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure


class Budget:
    """Counts the bytes of tensors on one device, by kind; beyond `limit` it is out of memory.

    It counts storages, as CUDA's allocator does, so its figures are the same on every machine
    and in every run. It does not see what a kernel allocates for its own use, and it is not the
    memory of the process. An operation whose result would pass the limit has run, and its
    result is thrown away: the count never passes the limit.

    Enter it in every thread that computes: dispatch modes belong to a thread.

    Args:
        tracked: modules, optimizers, tensors (or lists and dicts of them) that exist already.
            What is not tracked counts from the first operation that touches it.
        limit: bytes; None counts without a limit.
        device: the type of device to count on; that of the tracked tensors, else the CPU.
        record: keep every change, for :meth:`figure`.

    Raises (inside the ``with``):
        torch.OutOfMemoryError: the limit would be passed. Its text says by what, and by kind
            where the bytes are.
    """

    def __init__(
        self,
        *tracked: Any,
        limit: int | None = None,
        device: "str | torch.device | None" = None,
        record: bool = False,
    ) -> None:
        import torch

        if limit is not None and limit <= 0:
            raise ValueError(f"limit is a number of bytes above 0, such as 64 * MiB; not {limit}")
        first = next(tensors_in(tracked), None)
        default = "cpu" if first is None else first.device
        self.device = torch.device(default if device is None else device)
        self._ledger = Ledger(self.device.type, None if limit is None else int(limit), record)
        self._marks: list[tuple[int, str]] = []
        # Weak references throughout: a meter that keeps a model alive would measure itself.
        self._tracked: list[weakref.ref] = []
        self._parameters: list[weakref.ref] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()
        self._inside: list[tuple[int, ExitStack]] = []  # of which thread
        self.track(*tracked)

    # ------------------------------------------------------------ the meter's protocol

    @property
    def live(self) -> int:
        """Bytes of all tensors alive now."""
        self._ledger.reread()
        return self._ledger.live

    @property
    def peak(self) -> int:
        """The most bytes alive at once since the last :meth:`reset`."""
        return self._ledger.peak

    @property
    def limit(self) -> int | None:
        """Bytes; None when there is no limit."""
        return self._ledger.limit

    def reset(self) -> None:
        """Forget the peak: from now on it is the most since this moment."""
        self._ledger.reset()

    # ------------------------------------------------------------ what it knows beside

    def by_kind(self) -> dict[str, int]:
        """Bytes alive now: parameters (with buffers), gradients, optimizer state, activations
        (results of the forward pass that backward may need), other (batches, temporaries)."""
        self._name_gradients()
        self._ledger.reread()
        return dict(self._ledger.now)

    def peak_by_kind(self) -> dict[str, int]:
        """The same at the moment of the peak. While an optimizer steps, what it allocates
        counts as its state."""
        return dict(self._ledger.at_peak)

    @property
    def changes(self) -> list[tuple[int, ...]]:
        """The bytes of each kind after every change, with ``record=True``; else empty."""
        return self._ledger.changes or []

    def track(self, *things: Any) -> None:
        """Count modules, optimizers and tensors that were made outside, and know their kind.

        Raises:
            TypeError: something is none of these.
        """
        import torch

        things = list(flat(list(things)))
        for thing in things:
            if not isinstance(thing, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)):
                raise TypeError(
                    "a meter tracks modules, optimizers and tensors (also in lists and dicts), "
                    f"not {type(thing).__name__}"
                )
        self._tracked += [weakref.ref(thing) for thing in things]
        if self._inside:
            self._follow(things)

    def mark(self, label: str) -> None:
        """Write `label` at this moment into the figure."""
        self._marks.append((len(self.changes), label))

    def __enter__(self):
        stack = ExitStack()
        with self._lock:
            if not self._inside:
                self._follow([thing for ref in self._tracked if (thing := ref()) is not None])
            self._inside.append((threading.get_ident(), stack))
        try:
            self._enter(stack)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(accounting()(self._ledger))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            thread = threading.get_ident()
            last = max(i for i, (owner, _) in enumerate(self._inside) if owner == thread)
            _, stack = self._inside.pop(last)
            if not self._inside:
                while self._hooks:
                    self._hooks.pop().remove()
        stack.close()

    # ------------------------------------------------------------ what is whose

    def _follow(self, every: list[Any]) -> None:
        """Count what exists, and let modules and optimizers tell us what is whose."""
        import torch

        modules = [each for each in every if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in every if isinstance(each, torch.optim.Optimizer)]
        parameters = [t for each in modules for t in (*each.parameters(), *each.buffers())]
        groups = [group for each in optimizers for group in each.param_groups]
        parameters += [parameter for group in groups for parameter in group["params"]]
        names = [type(inner).__name__ for each in modules for inner in each.modules()]
        self._ledger.resizes |= any("FSDP" in name for name in names)
        self._ledger.count(parameters, PARAMETERS, again=True)
        self._parameters += [weakref.ref(parameter) for parameter in parameters]
        self._name_gradients()
        for each in optimizers:
            self._ledger.count(tensors_in(each), STATE, again=True)
            self._hooks.append(each.register_step_pre_hook(self._step_begins))
            self._hooks.append(each.register_step_post_hook(self._step_ends))
        for parameter in {id(p): p for p in parameters if p.requires_grad}.values():
            hook = parameter.register_post_accumulate_grad_hook(self._gradient_made)
            self._hooks.append(hook)
        self._ledger.count(tensors_in(every), OTHER)

    def _gradient_made(self, parameter: "torch.Tensor") -> None:
        if parameter.grad is not None:
            self._ledger.count([parameter.grad], GRADIENTS, again=True)

    def _name_gradients(self) -> None:
        """DDP may put its own storage under a gradient, after the hook."""
        alive = [p for ref in self._parameters if (p := ref()) is not None]
        self._ledger.count([p.grad for p in alive if p.grad is not None], GRADIENTS, again=True)

    def _step_begins(self, optimizer: Any, *_: object) -> None:
        self._name_gradients()
        self._ledger.stepping = True

    def _step_ends(self, optimizer: Any, *_: object) -> None:
        self._ledger.stepping = False
        self._ledger.count(tensors_in(optimizer), STATE, again=True)

    # ------------------------------------------------------------ what people see

    @property
    def _name(self) -> str:
        return f"{type(self).__name__} on {self.device.type}"

    def __str__(self) -> str:
        limit = "no limit" if self.limit is None else f"limit {size(self.limit)}"
        now, peak = self.by_kind(), self.peak_by_kind()
        lines = [f"{self._name}, {limit}", f"{'':16}{'now':>12}{'at the peak':>14}"]
        for kind in KINDS:
            lines.append(f"{kind:16}{size(now[kind]):>12}{size(peak[kind]):>14}")
        lines.append(f"{'all':16}{size(self.live):>12}{size(self.peak):>14}")
        return "\n".join(lines)

    __repr__ = __str__

    def figure(self) -> "Figure":
        """The recorded changes, stacked by kind. Needs ``record=True``.

        Raises:
            ValueError: nothing was recorded.
        """
        from course_utils._timeline import timeline

        if not self.changes:
            raise ValueError("nothing recorded: make the meter with record=True, use it in `with`")
        return timeline(KINDS, self.changes, self._marks, self.limit)
