# ---
# jupyter:
#   course:
#     rows: []
#     minutes: {read: 5, do: 25}
#     devices: 2
#     path: more
#     extra: torch
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 09: the bytes of a rank, and shards there and back
#
# You work out what a rank keeps at each stage of sharding, and write the layout that lets FSDP2 gather a group of parameters with one message.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 8 and 17 for the two tasks |
# | **You should know** | [lesson 09, Sharded training](../notebooks/09_sharded_training.ipynb) |
# | **Runs on** | every machine: the second check also runs your functions on two real ranks |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("09-memory")` is a nudge, `hint("09-memory", level=2)` the way, `level=3` nearly the code.

# %%
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from course_utils.grading import check, hint
from course_utils.launch import launch

# %% [markdown]
# ## Task 1: the bytes of a rank (5 points)
#
# Write `rank_bytes(numbers, n, stage, costs)`: a model has `numbers` parameters (single numbers) and n ranks; `costs` says how many bytes a parameter takes of each kind, for example `{"parameters": 4, "gradients": 4, "optimizer state": 8}`. Return a dict with the same keys: the bytes that a rank keeps between two steps, at stage 0, 1, 2 or 3 of ZeRO.
#
# What is sharded lies flat, padded so that all n shards have the same length. The padding takes memory too, so count it.
#
# Then write `lowest_stage(numbers, n, costs, limit)`: the lowest stage at which all three kinds together take at most `limit` bytes, or `None` when none does.


# %% task="09-memory"
def rank_bytes(numbers, n, stage, costs):
    """Return {"parameters": bytes, "gradients": bytes, "optimizer state": bytes} of one rank.

    numbers: how many parameters the model has. n: ranks. stage: 0, 1, 2 or 3.
    costs: bytes a parameter, of each kind.
    """
    ### BEGIN SOLUTION
    length = -(-numbers // n)  # rounded up
    sharded_from = {"optimizer state": 1, "gradients": 2, "parameters": 3}
    return {
        kind: cost * (length if stage >= sharded_from[kind] else numbers)
        for kind, cost in costs.items()
    }
    ### END SOLUTION


def lowest_stage(numbers, n, costs, limit):
    """Return the lowest stage whose bytes are at most limit, or None."""
    ### BEGIN SOLUTION
    for candidate in range(4):
        if sum(rank_bytes(numbers, n, candidate, costs).values()) <= limit:
            return candidate
    return None
    ### END SOLUTION


# %% [markdown]
# Does it shard the right kinds, with padding, and pick the right stage?

# %% test="09-memory"
check("09-memory")

# %% [markdown]
# ## Task 2: shard and unshard, with padding (5 points)
#
# FSDP2 does not pad once at the end. It cuts *each parameter* along its rows, as `torch.chunk` does: the first parts have ⌈rows / n⌉ rows, the next one what is left, and the last may have none. This cell shows it on two ranks, with a weight of 5 rows and one of 1 row. Its last line shows what `chunk` makes of 5 rows for 4 ranks: three parts, so the fourth rank gets none.


# %%
# NBVAL_CHECK_OUTPUT
def rows_of_each_parameter():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(2, 5, bias=False), nn.Linear(5, 1, bias=False)).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    return [len(parameter.to_local()) for parameter in model.parameters()]


for rank, rows in enumerate(launch(rows_of_each_parameter, 2)):
    print(f"rank {rank} has {rows} rows")
print("5 rows in 4 chunks:", [len(part) for part in torch.zeros(5, 2).chunk(4)])

# %% [markdown]
# An all-gather needs messages of equal length. So each part is filled up with rows of zeros to ⌈rows / n⌉ rows; then the parts of all parameters are laid end to end, and *one* message carries the group.
#
# 1. `shard(parameters, rank, n)`: a list of tensors, each of shape (rows,) or (rows, columns, …). Return one flat tensor: for each parameter, in order, this rank's rows and the zeros behind them, flattened. The zeros have the type of the parameter, and are where it is: `parameter.new_zeros(...)` makes such.
# 2. `unshard(flats, shapes)`: the flat tensors of all ranks, in rank order, as an all-gather gives them, and the shape of each whole parameter. Return the list of whole parameters, without padding.
#
# For example, `[torch.tensor([1., 2., 3.]), torch.tensor([[4., 5.]])]` on two ranks gives rank 0 `[1, 2, 4, 5]` and rank 1 `[3, 0, 0, 0]`.

# %% task="09-shards"
import math

import torch


def shard(parameters, rank, n):
    """Return the flat shard of this rank, the same length on every rank."""
    ### BEGIN SOLUTION
    flat_parts = []
    for whole in parameters:
        height = -(-len(whole) // n)
        mine = whole[rank * height : (rank + 1) * height]
        zeros = whole.new_zeros(height - len(mine), *whole.shape[1:])
        flat_parts += [mine.flatten(), zeros.flatten()]
    return torch.cat(flat_parts)
    ### END SOLUTION


def unshard(flats, shapes):
    """Return the whole parameters, as a list of tensors of these shapes."""
    ### BEGIN SOLUTION
    wholes, start = [], 0
    for shape in shapes:
        height = -(-shape[0] // len(flats))
        length = height * math.prod(shape[1:])
        rows_of_ranks = [flat[start : start + length].view(height, *shape[1:]) for flat in flats]
        wholes.append(torch.cat(rows_of_ranks)[: shape[0]])
        start += length
    return wholes
    ### END SOLUTION


# %% [markdown]
# Are the shards equally long and right, and does everything come back, also on two ranks?

# %% test="09-shards"
check("09-shards")

# %% [markdown]
# ## Done?
#
# FSDP2's own layout is this one, with the gathered rows copied out into each layer. Its gradients go the same way back: padded, cut, and reduced by one reduce-scatter. One way to solve each task is in the [solution of exercise 09](../solutions/09_sharded_training.ipynb). Compare it with yours after you have tried.
