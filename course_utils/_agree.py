"""Work that may fail on one of several ranks, and that all must know of; also without ranks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """How many ranks there are; 1 without."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank; 0 without ranks."""
    import torch.distributed as dist

    return dist.get_rank() if world_size() > 1 else 0


def gather(value: T, group: "dist.ProcessGroup | None" = None) -> list[T]:
    """What each rank has, in rank order; without ranks a list of one. All ranks call it."""
    import torch.distributed as dist

    if world_size() == 1:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree(
    work: Callable[[], T],
    group: "dist.ProcessGroup | None" = None,
    elsewhere: type[Exception] = RuntimeError,
) -> T:
    """`work()`, unless it failed on any rank: then all ranks raise, and none waits for ever.

    Raises:
        Exception: what `work` raised here; else `elsewhere` with what it raised there.
    """
    problem: Exception | None = None
    try:
        value = work()
    except Exception as error:
        problem = error
    texts = gather(f"{type(problem).__name__}: {problem}" if problem else "", group)
    if problem:
        raise problem
    for where, text in enumerate(texts):
        if text:
            raise elsewhere(f"on rank {where}: {text}")
    return value
