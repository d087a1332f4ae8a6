"""What the ranks of a DistributedDataParallel model do together in a `SafeStep`.

DDP averages gradients while backward still runs. If one rank runs out of memory there, the
others wait for it for ever. So the micro-batches run on the module inside DDP, which talks to
nobody. Then the ranks vote: one small all-gather on gloo. Only when all of them have their
gradients is there an all-reduce. What both need is allocated before the vote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_utils._safety import Attempt

if TYPE_CHECKING:
    import torch


class Ranks:
    """The votes and the all-reduce. Every rank has to make one, and call it equally often."""

    def __init__(self, ddp: Any, parameters: list[torch.nn.Parameter]) -> None:
        import torch
        import torch.distributed as dist

        self.group = ddp.process_group  # of the all-reduce: NCCL on GPUs
        self.rank = dist.get_rank(self.group)
        self._first = dist.get_global_rank(self.group, 0)
        self._ballot = self.group  # on gloo, so that a vote needs no GPU memory
        if dist.get_backend(self.group) != "gloo":
            members = dist.get_process_group_ranks(self.group)
            self._ballot = dist.new_group(members, backend="gloo")
        self._ddp = ddp
        self._parameters = parameters
        width, world = 5 + len(parameters), dist.get_world_size(self.group)
        self._mine = torch.zeros(width, dtype=torch.float64, device="cpu")
        self._all = torch.zeros(world, width, dtype=torch.float64, device="cpu")
        self._flats: list[torch.Tensor] = []  # gradients, one for each dtype and device
        self._places: dict[int, torch.Tensor] = {}  # parameter -> its slice of a flat
        self._has = [False] * len(parameters)

    def begin(self) -> None:
        """Allocate, and touch what exists, where running out is still harmless."""
        import torch

        self._mine.zero_()
        self._all.zero_()
        self._has = [False] * len(self._parameters)
        trainable = [i for i, p in enumerate(self._parameters) if p.requires_grad]
        if set(trainable) == set(self._places):
            return
        self._flats, self._places = [], {}
        kinds: dict[tuple, list[int]] = {}
        for i in trainable:
            p = self._parameters[i]
            kinds.setdefault((p.dtype, p.device), []).append(i)
        flats, places = [], {}
        for (dtype, device), members in kinds.items():
            sizes = [self._parameters[i].numel() for i in members]
            flats.append(torch.zeros(sum(sizes), dtype=dtype, device=device))
            for i, part in zip(members, flats[-1].split(sizes), strict=True):
                places[i] = part.view_as(self._parameters[i])
        self._flats, self._places = flats, places

    def collect(self) -> None:
        """Move each gradient to its place; there it stays until the next step."""
        for i, place in self._places.items():
            p = self._parameters[i]
            self._has[i] = p.grad is not None
            if p.grad is None:
                place.zero_()
            else:
                place.copy_(p.grad)
                p.grad = place

    def gather(self, *numbers: float) -> list[list[float]]:
        """The numbers of every rank, in rank order. Every rank has to call it."""
        import torch.distributed as dist

        self._mine.numpy()[: len(numbers)] = numbers  # through numpy: allocates no tensor
        dist.all_gather(list(self._all.unbind()), self._mine, group=self._ballot)
        return self._all.tolist()

    def vote(self, mine: Attempt) -> Attempt:
        """What all ranks found, together: out of memory if one of them was."""
        out, bad = mine.oom is not None, mine.failed is not None
        rows = self.gather(out, bad, mine.size, mine.count, mine.loss, *self._has)
        failed = [rank for rank, row in enumerate(rows) if row[1]]
        if failed:
            text = f"rank {failed[0]} failed in this step, and its own error says why"
            return Attempt(failed=f"{text}. Rank {self.rank} stops with it: it would wait for ever")
        short = [rank for rank, row in enumerate(rows) if row[0]]
        if short:
            text = mine.oom or f"rank {short[0]} ran out of memory, rank {self.rank} did not"
            return Attempt(size=int(max(rows[rank][2] for rank in short)), oom=text)
        total = sum(row[3] for row in rows)
        self._share = mine.count / total if total else 0.0
        self._used = [any(column) for column in zip(*(row[5:] for row in rows), strict=True)]
        loss = sum(row[3] * row[4] for row in rows) / total if total else 0.0
        return Attempt(size=mine.size, count=total, loss=loss)

    def average(self) -> None:
        """Every gradient becomes the mean over all that counts on all ranks. Allocates nothing.

        Where no rank has a gradient it stays None, so the optimizer leaves the weight alone.
        """
        import torch.distributed as dist

        for flat in self._flats:
            dist.all_reduce(flat.mul_(self._share), group=self.group)
        for i, place in self._places.items():
            self._parameters[i].grad = place if self._used[i] else None
        if self._ddp.broadcast_buffers:
            for buffer in self._ddp.module.buffers():
                dist.broadcast(buffer, src=self._first, group=self.group)

    def check_lengths(self, batches: int) -> None:
        """Raises ValueError unless all ranks have as many batches: one would wait for ever."""
        lengths = [int(row[0]) for row in self.gather(batches)]
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks have {lengths} batches: give each the same number "
                "(torch.utils.data.DistributedSampler does)"
            )
