"""Bytes of tensors, counted at every operation.

PyTorch asks a *dispatch mode* before each operation. Ours lets the operation run, looks at the
storages of what came out, and writes down those that are new; a weak reference to each storage
says when it is freed. Source of the idea: PyTorch's own tests of its memory tracker
(torch/distributed/_tools/mem_tracker.py), which counts the same way.
"""

import threading
import weakref
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from course_utils._bytes import size, storages

if TYPE_CHECKING:
    import torch

PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
ACTIVATIONS, OTHER = "activations", "other"
KINDS = (PARAMETERS, GRADIENTS, STATE, ACTIVATIONS, OTHER)


class Ledger:
    """The storages alive on one type of device, by kind: each that :meth:`count` was shown.

    Raises (from :meth:`count`):
        torch.OutOfMemoryError: the limit would be passed; then nothing was written down.
    """

    def __init__(self, device_type: str, limit: int | None, record: bool) -> None:
        self.device_type, self.limit = device_type, limit
        self.live = self.peak = 0
        self.now = dict.fromkeys(KINDS, 0)
        self.at_peak = dict(self.now)
        self.changes: list[tuple[int, ...]] | None = [] if record else None
        self.stepping = False  # whether an optimizer steps: what it allocates is its state
        self.resizes = False  # whether anybody resizes storages behind the operations
        self._lock = threading.RLock()  # storages are freed by any thread, even while we count
        self._storages: dict[int, tuple[weakref.ref, list]] = {}  # -> [bytes, kind]

    def reset(self) -> None:
        """From now on the peak is the most since this moment."""
        self.reread()
        self.peak, self.at_peak = self.live, dict(self.now)

    def count(self, tensors: Iterable["torch.Tensor"], kind: str, again: bool = False) -> None:
        """Write down the storages not yet known as `kind`; with `again`, also rename known ones."""
        new: dict[int, tuple[torch.UntypedStorage, int]] = {}
        with self._lock:
            for tensor in tensors:
                if tensor.device.type != self.device_type:
                    continue
                for storage in storages(tensor):
                    key, nbytes = storage._cdata, storage.nbytes()
                    if key not in self._storages:
                        new[key] = storage, nbytes
                        continue
                    entry = self._storages[key][1]
                    self.resizes = self.resizes or nbytes != entry[0]
                    if nbytes != entry[0] or (again and kind != entry[1]):
                        self._change(entry, nbytes, kind if again else entry[1])
            asked = sum(nbytes for _, nbytes in new.values())
            if asked and self.limit is not None and self.live + asked > self.limit:
                self.reread()
                if self.live + asked > self.limit:
                    raise self._out_of_memory(asked)
            for key, (storage, nbytes) in new.items():
                entry = [0, kind]
                gone = weakref.ref(storage, lambda _, key=key: self._forget(key))
                self._storages[key] = gone, entry
                self._change(entry, nbytes, kind)

    def _change(self, entry: list, nbytes: int, kind: str) -> None:
        self.now[entry[1]] -= entry[0]
        self.now[kind] += nbytes
        self.live += nbytes - entry[0]
        entry[:] = nbytes, kind
        if self.live > self.peak and self.resizes:
            self.reread()
        if self.live > self.peak:
            self.peak, self.at_peak = self.live, dict(self.now)
        if self.changes is not None:
            self.changes.append(tuple(self.now.values()))

    def _forget(self, key: int) -> None:
        with self._lock:
            _, entry = self._storages.pop(key)
            self._change(entry, 0, entry[1])

    def reread(self) -> None:
        """Look at all sizes again: sharded training resizes storages behind every operation."""
        with self._lock:
            for gone, entry in list(self._storages.values()):
                storage = gone()
                if storage is not None and storage.nbytes() != entry[0]:
                    nbytes = storage.nbytes()
                    self.now[entry[1]] += nbytes - entry[0]
                    self.live += nbytes - entry[0]
                    entry[0] = nbytes
                    self.resizes = True

    def _out_of_memory(self, asked: int) -> Exception:
        import torch

        where = ", ".join(f"{kind} {size(n)}" for kind, n in self.now.items() if n)
        # The end is what accelerate, Lightning and toma look for in an error on the CPU.
        return torch.OutOfMemoryError(
            f"Budget out of memory. Tried to allocate {size(asked)}; {size(self.live)} of "
            f"{size(self.limit or 0)} are in use ({where or 'nothing'}). The budget stands in "
            "for the allocator's own: DefaultCPUAllocator: can't allocate memory"
        )


@cache
def accounting() -> type:
    """The dispatch mode's class; made on first use, because it needs torch."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Accounting(TorchDispatchMode):
        def __init__(self, ledger: Ledger) -> None:
            super().__init__()
            self.ledger = ledger

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            # A wrapper (a DTensor, say) comes back here as operations on what it holds.
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            kwargs, found, results = kwargs or {}, None, None
            inputs = _tensors(torch, (*args, *kwargs.values()))
            kind = STATE if self.ledger.stepping else OTHER
            if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
                kind = ACTIVATIONS
            try:
                self.ledger.count(inputs, OTHER)
                inputs.clear()
                results = func(*args, **kwargs)
                found = _tensors(torch, (results,))
                self.ledger.count(found, kind)
            except torch.OutOfMemoryError as error:
                self.ledger.stepping = False  # an optimizer that fails here never tells its end
                # The frames of a traceback keep what they hold, so they must not hold tensors.
                inputs.clear()
                found = results = args = kwargs = None
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
