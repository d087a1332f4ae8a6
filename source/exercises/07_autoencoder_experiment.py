# ---
# jupyter:
#   course:
#     rows: [A3, A6]
#     minutes: {read: 8, do: 32}
#     devices: 2
#     path: more
#     extra: torch,experiment
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
# # Exercise 07: count, compare, and deal out
#
# You count the iterations of any epoch, get scaling efficiency out of a table, and write a DataModule whose ranks see different images.
#
# | | |
# |---|---|
# | **Time** | 8 minutes to read, 32 to do: about 8, 10 and 14 for the three tasks |
# | **You should know** | [lesson 07, An experiment report, done again](../notebooks/07_autoencoder_experiment.ipynb) |
# | **Runs on** | every machine; the third check starts two ranks |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("07-iterations")` is a nudge, `hint("07-iterations", level=2)` the way, `level=3` nearly the code.

# %%
import torch
import torch.utils.data

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: iterations of an epoch (4 points)
#
# Write `iterations(n, devices, batch, drop_last)`: how many training steps each device does in one epoch of n images. The images go two ways in turn:
#
# 1. `DistributedSampler` with its own defaults gives each device the same number of images. Where they cannot be shared out evenly, it *repeats* some.
# 2. On each device `DataLoader(batch_size=batch, drop_last=drop_last)` makes batches. With `drop_last` a last batch that is not full is left out.
#
# This cell shows the sampler's part: 7 images for 3 devices.

# %%
# NBVAL_CHECK_OUTPUT
for rank in range(3):
    sampler = torch.utils.data.DistributedSampler(range(7), 3, rank, shuffle=False)
    print(f"rank {rank} of 3 gets the images", *sampler)


# %% task="07-iterations"
import math


def iterations(n, devices, batch, drop_last):
    """Training steps of one epoch on each device: a whole number.

    n: images, devices: their number, batch: images per device and step,
    drop_last: whether a last batch that is not full is left out.
    """
    ### BEGIN SOLUTION
    share = math.ceil(n / devices)
    return share // batch if drop_last else math.ceil(share / batch)
    ### END SOLUTION


# %% [markdown]
# Does it count right in all cases, also where the sampler's repeated images fill the last batch?

# %% test="07-iterations"
check("07-iterations")

# %% [markdown]
# ## Task 2: efficiency from a table (4 points)
#
# A report has rows like this one: `{"devices": 2, "batch": 64, "seconds": 31.0}`. `batch` is per device; `seconds` are for the same number of epochs over the same images in all rows. Write `efficiencies(rows)`: a list with one entry for each row, in the rows' order.
#
# - **Efficiency** is the speed-up divided by the number of devices; the speed-up is the time of one device over the time of this row. Do not round.
# - Compare only rows that differ in nothing but the number of devices: the row of *one* device with the *same batch*.
# - Where the table has no such row, the entry is `None`: nothing can be said.
#
# The rows come in any order, and each pair of devices and batch only once.


# %% task="07-efficiency"
def efficiencies(rows):
    """Scaling efficiency of each row, or None where there is no row to compare with.

    rows: list of dicts with the keys devices, batch (per device), seconds.
    """
    ### BEGIN SOLUTION
    one = {row["batch"]: row["seconds"] for row in rows if row["devices"] == 1}
    return [
        one[row["batch"]] / row["seconds"] / row["devices"] if row["batch"] in one else None
        for row in rows
    ]
    ### END SOLUTION


# %% [markdown]
# Does it compare what may be compared, and nothing else?

# %% test="07-efficiency"
check("07-efficiency")

# %% [markdown]
# ## Task 3: a DataModule whose ranks see disjoint data (5 points)
#
# Write the two loaders of `ShardedData`. They give batches of `self.batch` images (only the last may be smaller), and the check asks them on **two real ranks**, with an odd and an even number of images. The process group exists, so `dist.get_rank()` and `dist.get_world_size()` work.
#
# - **Training**: no image is seen twice in an epoch, by whatever rank. The ranks' random generators are *not* seeded alike, so a shuffle needs a seed that all ranks share. Both ranks get the same number of images, or DDP would hang; so with an odd number one image is left out of an epoch. Each epoch has another order: as Lightning does, the check calls `loader.sampler.set_epoch(epoch)` if there is such a method.
# - **Validation**: every image counts exactly once. Here the ranks may have unequal numbers.


# %% task="07-disjoint"
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


class ShardedData:
    """The part of a DataModule that deals out images to ranks."""

    def __init__(self, images, batch):
        super().__init__()
        self.images, self.batch = images, batch

    def setup(self, stage=None):
        """Called on every rank before the loaders are asked for."""

    def train_dataloader(self):
        ### BEGIN SOLUTION
        sampler = DistributedSampler(self.images, shuffle=True, drop_last=True)
        return DataLoader(self.images, batch_size=self.batch, sampler=sampler)
        ### END SOLUTION

    def val_dataloader(self):
        ### BEGIN SOLUTION
        mine = range(dist.get_rank(), len(self.images), dist.get_world_size())
        return DataLoader(self.images, batch_size=self.batch, sampler=mine)
        ### END SOLUTION


# %% [markdown]
# Do two ranks see different images?

# %% test="07-disjoint"
check("07-disjoint")

# %% [markdown]
# The check did not need Lightning. With this line your class is a real DataModule, which a `Trainer` takes with `use_distributed_sampler=False`.


# %%
# NBVAL_CHECK_OUTPUT
import pytorch_lightning as pl


class Photos(ShardedData, pl.LightningDataModule):
    """Your loaders, under the name that a Trainer asks for."""


print(isinstance(Photos(torch.arange(7), batch=2), pl.LightningDataModule))

# %% [markdown]
# ## Done?
#
# You can now check the counts of any report, say which of its rows may be compared, and be sure that its ranks did not do the same work twice. One way to solve each task is in the [solution of exercise 07](../solutions/07_autoencoder_experiment.ipynb). Compare it with yours after you have tried.
