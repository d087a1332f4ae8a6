# ---
# jupyter:
#   course:
#     rows: [P4]
#     minutes: {read: 5, do: 30}
#     devices: 2
#     path: core
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
# # Exercise 05: shares, an exact accuracy, a weighted accumulation
#
# You write what DDP leaves to you: who gets which sample, a metric that does not depend on the number of ranks, and a gradient in which every sample weighs the same.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 30 to do: about 10 for each task |
# | **You should know** | [lesson 05, DDP in practice](../notebooks/05_ddp_in_practice.ipynb) |
# | **Runs on** | every machine: the checks start two real ranks |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("05-shards")` is a nudge, `hint("05-shards", level=2)` the way, `level=3` nearly the code.

# %%
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from course_utils.devices import slots
from course_utils.grading import check, hint
from course_utils.launch import launch

assert len(slots(2)) == 2, "this exercise runs on two devices"

# %% [markdown]
# ## Task 1: a sampler for many ranks (5 points)
#
# `share(order, rank, ranks, ending)` returns the list of samples of one rank. `order` is the list of all samples in the order of this epoch; a rank takes every `ranks`-th of them, beginning with its own number. Leave the caller's `order` as it is. What happens at the end, if the number of samples cannot be divided:
#
# - `"pad"`: all ranks get the same number; the order goes on from its front, as often as needed.
# - `"drop"`: all ranks get the same number; the last samples of the order go to nobody.
# - `"all"`: every sample once; some ranks get one more than others, or one gets none.
#
# For `"pad"` and `"drop"` this is what PyTorch does, so you can compare:

# %%
# NBVAL_CHECK_OUTPUT
samples = torch.arange(10, 17).tolist()
for drop_last in (False, True):
    for rank in range(3):
        sampler = DistributedSampler(samples, 3, rank, shuffle=False, drop_last=drop_last)
        print("drop" if drop_last else "pad ", f"rank {rank}:", [samples[row] for row in sampler])

# %% [markdown]
# `epoch_order(n, seed, epoch)` returns the numbers 0 to n − 1 in the random order of an epoch, as a list. Every rank calls it by itself, in a process of its own, and must get the same list; another epoch (up to 10,000) has another order, and so has another seed. (PyTorch's sampler adds the two numbers, so epoch 1 of seed 0 has the order of epoch 0 of seed 1. In yours, no two of these should be alike.) The ranks' own random numbers differ, as after `torch.manual_seed(rank)`, and must stay as they are: dropout draws from them.


# %% task="05-shards"
import math

import torch


def share(order, rank, ranks, ending):
    """The samples of one rank. ending is "pad", "drop" or "all"."""
    ### BEGIN SOLUTION
    if ending == "pad":
        size = math.ceil(len(order) / ranks) * ranks
        order = (order * math.ceil(size / len(order)))[:size]
    elif ending == "drop":
        order = order[: len(order) // ranks * ranks]
    return order[rank::ranks]
    ### END SOLUTION


def epoch_order(n, seed, epoch):
    """The numbers 0 to n - 1 in this epoch's order, the same on every rank."""
    ### BEGIN SOLUTION
    generator = torch.Generator().manual_seed(1_000_000 * seed + epoch)
    return torch.randperm(n, generator=generator).tolist()
    ### END SOLUTION


# %% test="05-shards"
check("05-shards")

# %% [markdown]
# ## Task 2: an exact accuracy on two ranks (5 points)
#
# `accuracy(model, x, y)` is called on every rank of a process group, with the same `x` (one row a sample) and `y` (their classes). `model(x)` returns one score for each class; the largest is the answer. Return the share of right answers among all samples, as a float, on *every* rank. Each sample goes through the model of one rank, once, and no rank does more than its share.
#
# The check tries an even and an odd number of samples on two ranks, and a single sample: then one rank has none. Tensors that ranks exchange must be on the device of `x`. What a model makes of no sample at all is an empty tensor, and that can be counted:

# %%
# NBVAL_CHECK_OUTPUT
nobody = torch.zeros(0, 3).argmax(1) == torch.zeros(0)
print("right:", nobody.sum().item(), "of", len(nobody), " mean:", nobody.float().mean().item())


# %% task="05-accuracy"
import torch
import torch.distributed as dist


def accuracy(model, x, y):
    """The accuracy over all samples, the same float on every rank."""
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, labels = x[rank::ranks], y[rank::ranks]
    right = (model(mine).argmax(1) == labels).sum().item()
    counts = torch.tensor([right, len(mine)], device=x.device)
    dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()
    ### END SOLUTION


# %% test="05-accuracy"
check("05-accuracy")

# %% [markdown]
# ## Task 3: accumulation weighted by count (5 points)
#
# `accumulate(ddp, pieces, loss_fn)` is called on every rank. `ddp` is a model wrapped in DDP. `pieces` is the list of this rank's micro-batches, pairs `(x, y)`; their sizes and their number differ, and so do the ranks' totals. No list is empty, and no gradient is there yet. `loss_fn(output, y)` returns the *mean* over one micro-batch.
#
# Run forward, then backward, for each micro-batch by itself, so that afterwards the gradients of every rank are those of the mean over *all samples of all ranks*, and DDP has sent its gradients once. (An all-reduce of your own for a count is not counted.) You return nothing and take no step. It must work for any number of ranks.
#
# This cell shows the gradient that you are after, for one weight: the mean of the eight samples, and what the mean of the means would be.

# %%
# NBVAL_CHECK_OUTPUT
PIECES = [[[1.0, 1.0], [4.0]], [[2.0, 2.0, 2.0], [6.0, 6.0]]]  # of each rank


def naive():
    """Every micro-batch and every rank weighs the same."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ddp = DDP(torch.nn.Linear(1, 1, bias=False, device=device))
    for piece in PIECES[torch.distributed.get_rank()]:
        (ddp(torch.tensor(piece, device=device)[:, None]).mean() / 2).backward()
    return ddp.module.weight.grad.item()


everything = torch.tensor(sum(PIECES[0] + PIECES[1], []))
print("wanted:", everything.mean().item())
print("naive: ", launch(naive, 2)[0])


# %% task="05-accumulate"
from contextlib import nullcontext

import torch
from torch.distributed import all_reduce, get_world_size


def accumulate(ddp, pieces, loss_fn):
    """Leave in .grad the gradient of the mean over all samples of all ranks."""
    ### BEGIN SOLUTION
    count = torch.tensor(sum(len(x) for x, _ in pieces), device=pieces[0][0].device)
    all_reduce(count)
    for number, (x, y) in enumerate(pieces, start=1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            loss = loss_fn(ddp(x), y) * len(x) * get_world_size() / count
            loss.backward()
    ### END SOLUTION


# %% test="05-accumulate"
check("05-accumulate")

# %% [markdown]
# ## When you are done
#
# Three questions to carry on with: What does your `accumulate` do if one rank has no micro-batch at all? Which line of a program that you know divides by a number of batches, where it should divide by a number of samples? Does the metric in its log depend on the number of ranks?
#
# [Back to lesson 05](../notebooks/05_ddp_in_practice.ipynb)
