"""What ranks do together around a save, which may fail on one of them; also without ranks."""

from collections.abc import Callable
from typing import TypeVar

from course_utils._saved import CheckpointError

T = TypeVar("T")


def rank() -> int:
    """This process's rank; 0 without ranks."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 without."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(value: T) -> list[T]:
    """What each rank has, in rank order; without ranks a list of one. All ranks call it."""
    import torch.distributed as dist

    values = [value] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def agree(work: Callable[[], T]) -> T:
    """`work()`, unless it failed on any rank: then all ranks raise, and none waits for ever.

    Raises:
        Exception: what `work` raised here; else CheckpointError with what it raised elsewhere.
    """
    problem: Exception | None = None
    try:
        value = work()
    except Exception as error:
        problem = error
    texts = gather(f"{type(problem).__name__}: {problem}" if problem else "")
    if problem:
        raise problem
    for where, text in enumerate(texts):
        if text:
            raise CheckpointError(f"on rank {where}: {text}")
    return value
