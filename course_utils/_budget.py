"""A memory limit for a device that has none: bytes of tensors, counted at every operation.

PyTorch asks a *dispatch mode* before each operation. Ours lets the operation run, looks at the
storages of what came out, and counts those that are new; a weak reference to each storage says
when it is freed. Source of the idea: PyTorch's own tests of its memory tracker
(torch/distributed/_tools/mem_tracker.py), which counts the same way.
"""

import threading
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from course_utils._bytes import flat, size, storages, tensors_in

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "activations", "other"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, OTHER)


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
        self._limit = None if limit is None else int(limit)
        self._lock = threading.RLock()  # storages are freed by any thread, even while we count
        self._storages: dict[int, tuple[weakref.ref, list]] = {}  # -> [bytes, kind]
        self._live = self._peak = 0
        self._now = dict.fromkeys(KINDS, 0)
        self._at_peak = dict(self._now)
        self._changes: list[tuple[int, ...]] | None = [] if record else None
        self._marks: list[tuple[int, str]] = []
        # Weak references throughout: a meter that keeps a model alive would measure itself.
        self._tracked: list[weakref.ref] = []
        self._parameters: list[weakref.ref] = []
        self._hooks: list[Any] = []
        self._stepping = False
        self._resizes = False  # whether anybody resizes storages behind the operations
        self._inside: list[tuple[int, ExitStack]] = []  # of which thread
        self.track(*tracked)

    # ------------------------------------------------------------ the meter's protocol

    @property
    def live(self) -> int:
        """Bytes of all tensors alive now."""
        self._reread()
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes alive at once since the last :meth:`reset`."""
        return self._peak

    @property
    def limit(self) -> int | None:
        """Bytes; None when there is no limit."""
        return self._limit

    def reset(self) -> None:
        """Forget the peak: from now on it is the most since this moment."""
        self._reread()
        self._peak, self._at_peak = self._live, dict(self._now)

    # ------------------------------------------------------------ what it knows beside

    def by_kind(self) -> dict[str, int]:
        """Bytes alive now: parameters (with buffers), gradients, optimizer state, activations
        (results of the forward pass that backward may need), other (batches, temporaries)."""
        self._name_gradients()
        self._reread()
        return dict(self._now)

    def peak_by_kind(self) -> dict[str, int]:
        """The same at the moment of the peak. While an optimizer steps, what it allocates
        counts as its state."""
        return dict(self._at_peak)

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
        if self._changes is not None:
            self._marks.append((len(self._changes), label))

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
        stack.enter_context(_mode_class()(self))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            thread = threading.get_ident()
            last = max(i for i, (owner, _) in enumerate(self._inside) if owner == thread)
            _, stack = self._inside.pop(last)
            if not self._inside:
                while self._hooks:
                    self._hooks.pop().remove()
        stack.close()

    # ------------------------------------------------------------ counting

    def _follow(self, every: list[Any]) -> None:
        """Count what exists, and let modules and optimizers tell us what is whose."""
        import torch

        modules = [each for each in every if isinstance(each, torch.nn.Module)]
        optimizers = [each for each in every if isinstance(each, torch.optim.Optimizer)]
        parameters = [t for each in modules for t in (*each.parameters(), *each.buffers())]
        groups = [group for each in optimizers for group in each.param_groups]
        parameters += [parameter for group in groups for parameter in group["params"]]
        self._resizes |= any("FSDP" in type(m).__name__ for each in modules for m in each.modules())
        self._count(parameters, PARAMETERS, again=True)
        self._parameters += [weakref.ref(parameter) for parameter in parameters]
        self._name_gradients()
        for each in optimizers:
            self._count(tensors_in(each), STATE, again=True)
            self._hooks.append(each.register_step_pre_hook(self._step_begins))
            self._hooks.append(each.register_step_post_hook(self._step_ends))
        for parameter in {id(p): p for p in parameters if p.requires_grad}.values():
            hook = parameter.register_post_accumulate_grad_hook(self._gradient_made)
            self._hooks.append(hook)
        self._count(tensors_in(every), OTHER)

    def _gradient_made(self, parameter: "torch.Tensor") -> None:
        if parameter.grad is not None:
            self._count([parameter.grad], GRADIENTS, again=True)

    def _name_gradients(self) -> None:
        """DDP may put its own storage under a gradient, after the hook."""
        alive = [p for ref in self._parameters if (p := ref()) is not None]
        self._count([p.grad for p in alive if p.grad is not None], GRADIENTS, again=True)

    def _step_begins(self, optimizer: Any, *_: object) -> None:
        self._name_gradients()
        self._stepping = True

    def _step_ends(self, optimizer: Any, *_: object) -> None:
        self._stepping = False
        self._count(tensors_in(optimizer), STATE, again=True)

    def _count(self, tensors: Iterable["torch.Tensor"], kind: str, again: bool = False) -> None:
        """Count the storages not yet known as `kind`; with `again`, also rename known ones."""
        new: dict[int, tuple[torch.UntypedStorage, int]] = {}
        with self._lock:
            for tensor in tensors:
                if tensor.device.type != self.device.type:
                    continue
                for storage in storages(tensor):
                    key, nbytes = storage._cdata, storage.nbytes()
                    if key not in self._storages:
                        new[key] = storage, nbytes
                        continue
                    entry = self._storages[key][1]
                    self._resizes = self._resizes or nbytes != entry[0]
                    if nbytes != entry[0] or (again and kind != entry[1]):
                        self._change(entry, nbytes, kind if again else entry[1])
            asked = sum(nbytes for _, nbytes in new.values())
            if asked and self._limit is not None and self._live + asked > self._limit:
                self._reread()
                if self._live + asked > self._limit:
                    self._stepping = False  # an optimizer that fails here never tells its end
                    raise self._out_of_memory(asked)
            for key, (storage, nbytes) in new.items():
                entry = [0, kind]
                gone = weakref.ref(storage, lambda _, key=key: self._forget(key))
                self._storages[key] = gone, entry
                self._change(entry, nbytes, kind)

    def _change(self, entry: list, nbytes: int, kind: str) -> None:
        self._now[entry[1]] -= entry[0]
        self._now[kind] += nbytes
        self._live += nbytes - entry[0]
        entry[:] = nbytes, kind
        if self._live > self._peak and self._resizes:
            self._reread()
        if self._live > self._peak:
            self._peak, self._at_peak = self._live, dict(self._now)
        if self._changes is not None:
            self._changes.append(tuple(self._now.values()))

    def _forget(self, key: int) -> None:
        with self._lock:
            _, entry = self._storages.pop(key)
            self._change(entry, 0, entry[1])

    def _reread(self) -> None:
        """Look at all sizes again: sharded training resizes storages behind every operation."""
        with self._lock:
            for gone, entry in list(self._storages.values()):
                storage = gone()
                if storage is not None and storage.nbytes() != entry[0]:
                    nbytes = storage.nbytes()
                    self._now[entry[1]] += nbytes - entry[0]
                    self._live += nbytes - entry[0]
                    entry[0] = nbytes
                    self._resizes = True

    def _out_of_memory(self, asked: int) -> Exception:
        import torch

        where = ", ".join(f"{kind} {size(n)}" for kind, n in self._now.items() if n)
        # The end is what accelerate, Lightning and toma look for in an error on the CPU.
        return torch.OutOfMemoryError(
            f"Budget out of memory. Tried to allocate {size(asked)}; {size(self._live)} of "
            f"{size(self._limit or 0)} are in use ({where or 'nothing'}). The budget stands in "
            "for the allocator's own: DefaultCPUAllocator: can't allocate memory"
        )

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

        if not self._changes:
            raise ValueError("nothing recorded: make the meter with record=True, use it in `with`")
        return timeline(KINDS, self._changes, self._marks, self.limit)


@cache
def _mode_class() -> type:
    """The dispatch mode's class; made on first use, because it needs torch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Accounting(TorchDispatchMode):
        def __init__(self, budget: Budget) -> None:
            super().__init__()
            self.budget = budget

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # A wrapper (a DTensor, say) comes back here as operations on what it holds.
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            kwargs = kwargs or {}
            inputs = _tensors(torch, (*args, *kwargs.values()))
            self.budget._count(inputs, OTHER)
            kind = OTHER
            if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
                kind = ACTIVATIONS
            elif self.budget._stepping:
                kind = STATE
            del inputs
            results = func(*args, **kwargs)
            found = _tensors(torch, (results,))
            try:
                self.budget._count(found, kind)
            except torch.OutOfMemoryError as error:
                # The frames of a traceback keep what they hold, so they must not hold the result.
                del found, results, args, kwargs
                raise error.with_traceback(None) from None
            return results

    return Accounting


def _tensors(torch: Any, values: Iterable[Any]) -> "list[torch.Tensor]":
    """Tensors among an operation's arguments or results: they nest in lists, one deep."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [each for each in value if isinstance(each, torch.Tensor)]
    return found
