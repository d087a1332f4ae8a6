"""Where the bytes are: meters, the breakdown by kind, and what counts as out of memory.

    with memory.meter(model, optimizer, limit=64 * MiB) as meter:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    print(meter)

A meter's figures are bytes. `meter` takes CUDA's allocator on a GPU and a budget on a CPU; code
that knows only the :class:`Meter` protocol runs on both. KiB, MiB and GiB are powers of two.
"""

import errno
import gc
import re
import sys
from contextlib import ExitStack
from functools import cache
from typing import Any, Protocol

from course_utils._budget import Budget
from course_utils._bytes import size, storages, tensors_in
from course_utils._ledger import GRADIENTS, PARAMETERS, STATE

__all__ = ["Budget", "Cuda", "Fake", "GiB", "KiB", "Meter", "MiB"]
__all__ += ["is_oom", "kinds", "meter", "release", "size"]

KiB, MiB, GiB = 2**10, 2**20, 2**30


class Meter(Protocol):
    """What every meter has; all figures are bytes."""

    @property
    def live(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    def reset(self) -> None: ...


class Cuda(Budget):
    """The same on a GPU: live, peak and limit are those of CUDA's allocator, by its own count.

    The breakdown by kind is counted as on the CPU. The limit is set by
    ``torch.cuda.set_per_process_memory_fraction`` and lifted after the ``with``; beyond it the
    allocator itself is out of memory. The CUDA context and other libraries' memory lie outside.
    """

    def __init__(
        self, *tracked: Any, limit: int | None = None, device: Any = None, record: bool = False
    ) -> None:
        import torch

        first = next((t for t in tensors_in(tracked) if t.device.type == "cuda"), None)
        default = torch.cuda.current_device() if first is None else first.device
        super().__init__(*tracked, device=default if device is None else device, record=record)
        index = self.device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._allocator_limit = limit

    @property
    def live(self) -> int:
        import torch

        return torch.cuda.memory_allocated(self._index)

    @property
    def peak(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self._index)

    @property
    def limit(self) -> int | None:
        return self._allocator_limit

    def reset(self) -> None:
        import torch

        super().reset()
        torch.cuda.reset_peak_memory_stats(self._index)

    def _enter(self, stack: ExitStack) -> None:
        import torch

        super()._enter(stack)
        if self._allocator_limit is not None:
            total = torch.cuda.get_device_properties(self._index).total_memory
            fraction = min(1.0, self._allocator_limit / total)
            torch.cuda.set_per_process_memory_fraction(fraction, self._index)
            stack.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self._index)


class Fake(Budget):
    """A prediction: tensors inside have shapes and no numbers, so they cost no memory.

    Make the model and its batches inside the ``with``; the same steps as for real give the peak
    that they would have. Operations whose result depends on numbers (``if x.sum() > 0``) fail,
    and so does ``model.to(...)``: make the model there, under ``torch.device`` for instance.
    What a library reserves for itself it does not know: oneDNN's LSTM on a CPU, for example.
    Source: torch.\\_subclasses.FakeTensorMode.
    """

    def _enter(self, stack: ExitStack) -> None:
        stack.enter_context(_fake_mode())
        super()._enter(stack)  # on top, so that it is asked first

    @property
    def _name(self) -> str:
        return f"Prediction for {self.device.type}"


@cache
def _fake_mode() -> Any:
    """One for all: tensors of two of these modes cannot meet in one operation."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def __deepcopy__(self, memo: dict) -> "Mode":
            return self  # a copied layer's tensors (TransformerEncoder copies) refer to the mode

    return Mode()


def meter(
    *tracked: Any, limit: int | None = None, device: Any = None, record: bool = False
) -> Budget:
    """The meter for where `tracked` lives: :class:`Cuda` on a GPU, :class:`Budget` on a CPU.

    Without tracked tensors and without `device`: the GPU if PyTorch sees one.
    """
    import torch

    first = next(tensors_in(tracked), None)
    if device is None and first is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(first.device if device is None else device)
    kind = Cuda if place.type == "cuda" else Budget
    return kind(*tracked, limit=limit, device=place, record=record)


def kinds(model: Any, optimizer: Any = None) -> dict[str, int]:
    """Bytes that outlive a step, now: parameters (with buffers), gradients, optimizer state.

    A storage that two tensors share counts once, and a slice counts its whole storage.
    """
    parameters = [*model.parameters(), *model.buffers()]
    groups = {
        PARAMETERS: parameters,
        GRADIENTS: [p.grad for p in parameters if p.grad is not None],
        STATE: [] if optimizer is None else list(tensors_in(optimizer)),
    }
    return {
        kind: sum({s._cdata: s.nbytes() for t in group for s in storages(t)}.values())
        for kind, group in groups.items()
    }


def release() -> None:
    """Collect reference cycles, then give CUDA's unused cached blocks back to the driver.

    It frees nothing that a name, a kept exception or a graph still refers to.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- what counts as out of memory

# Messages of a RuntimeError, and who writes them. "an illegal memory access" stands nowhere here:
# it is a wrong index in a kernel, and the process's CUDA context is lost. Nor does
# CUDNN_STATUS_NOT_SUPPORTED, which some tools take for it: it also means an unsupported layout.
MESSAGES = {
    "PyTorch's caching allocator": r"\b(CUDA|HIP|XPU|NPU) out of memory",
    "the budget of this module": r"^Budget out of memory",
    "the CUDA or HIP runtime": r"\b(CUDA|HIP) (driver )?error: out of memory",
    "the CUDA driver": r"\b(CUDA|HIP)_ERROR_OUT_OF_MEMORY|\b(cuda|hip)ErrorMemoryAllocation",
    "cuBLAS, cuDNN, cuSOLVER, cuSPARSE": r"\b(CU|HIP|ROC)[A-Z]+_STATUS_(\w+_)?ALLOC(ATION)?_FAILED",
    "cuFFT": r"\bCUFFT_ALLOC_FAILED",
    "NCCL": r"Cuda failure (\d+ )?'out of memory'",
    "the CPU allocator: Linux, macOS; Windows": r"CPUAllocator: (can't allocate|not enough) memory",
    "Apple's MPS": r"\bMPS backend out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory",
    "Intel's XPU": r"\bUR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)|\bPI_ERROR_OUT_OF_\w+",
    "Intel's Gaudi": r"MODULE:PT_DEVMEM Allocation failed",
    "C++": r"\bstd::bad_alloc\b",
    "shared memory, memory maps": r"unable to (mmap|allocate shared) .*Cannot allocate memory",
}
_RUNTIME = re.compile("|".join(f"(?:{pattern})" for pattern in MESSAGES.values()))
# gRPC too calls a message that is too long "resource exhausted".
_TENSORFLOW = re.compile(r"OOM when|[Oo]ut of memory|(failed|unable) to allocate", re.IGNORECASE)


def is_oom(error: BaseException) -> bool:
    """Whether this error says that memory ran out: of a GPU, of a budget, or of the machine.

    True for ``torch.OutOfMemoryError``, ``MemoryError``, an ``OSError`` of ENOMEM, TensorFlow's
    ``ResourceExhaustedError`` about memory, and a ``RuntimeError`` with one of `MESSAGES`. An
    illegal memory access is not one: after it the process is lost.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    if "ResourceExhaustedError" in names:
        return _TENSORFLOW.search(text) is not None
    return isinstance(error, RuntimeError) and _RUNTIME.search(text) is not None
