# ---
# jupyter:
#   course:
#     rows: [P3]
#     minutes: {read: 5, do: 25}
#     devices: 1
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
# # Exercise 03: shards with remainders, losses by count, the memory of device 0
#
# You write the scatter and gather of a DataParallel that wastes no device, combine losses of unequal shards, and predict how many bytes each device needs.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 8, 6 and 11 for the three tasks |
# | **You should know** | [lesson 03, DataParallel](../notebooks/03_data_parallel.ipynb) |
# | **Runs on** | every machine: small tensors and arithmetic |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("03-scatter")` is a nudge, `hint("03-scatter", level=2)` the way, `level=3` nearly the code.

# %%
import torch

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: scatter and gather with remainders (5 points)
#
# `nn.DataParallel` cuts with `torch.chunk`. Look at what that does to small batches.

# %%
# NBVAL_CHECK_OUTPUT
for size in (10, 9, 5):
    print(f"{size:2} samples on 4 devices:", [len(part) for part in torch.arange(size).chunk(4)])

# %% [markdown]
# Do better. `scatter(batch, devices)` returns a list of tensors: the samples in their order, cut along the first dimension, so that
#
# 1. every sample is in exactly one shard, and joined again the shards are the batch,
# 2. the sizes differ by at most one, and the larger shards come first,
# 3. no shard is empty: with fewer samples than devices there are fewer shards.
#
# `gather(outputs)` joins a list of tensors along the first dimension. If they are numbers without a dimension, such as losses, it returns a vector of them. A list of one number becomes a vector of one.
#
# Both keep the graph: `backward()` on the result reaches the batch that was cut, or what was gathered.


# %% task="03-scatter"
import torch


def scatter(batch, devices):
    """Cut a tensor [samples, ...] into a list of at most `devices` tensors."""
    ### BEGIN SOLUTION
    whole, rest = divmod(len(batch), devices)
    sizes = [whole + (device < rest) for device in range(devices)]
    return list(batch.split([n for n in sizes if n > 0]))
    ### END SOLUTION


def gather(outputs):
    """Join tensors along the first dimension; of numbers without one make a vector."""
    ### BEGIN SOLUTION
    if outputs[0].dim() == 0:
        return torch.stack(list(outputs))
    return torch.cat(list(outputs))
    ### END SOLUTION


# %% [markdown]
# Is nothing lost, and does every device that can have a sample have one?

# %% test="03-scatter"
check("03-scatter")

# %% [markdown]
# ## Task 2: combine losses by count (5 points)
#
# Each replica returns the mean loss over *its* samples. `combine(losses, counts)` returns the mean over *all* samples. `losses` is a list of tensors of one number, with their graphs; `counts` a list of whole numbers.
#
# 1. A shard counts as much as it has samples.
# 2. A shard may have no sample that counts (in language models, if every token of it is padding). Its mean is then not a number, and must not spoil the others. A loss that is not a number, or infinite, although its shard *has* samples is a fault, and must show in the result:

# %%
# NBVAL_CHECK_OUTPUT
print(torch.tensor([]).mean(), 0 * torch.tensor([]).mean())

# %% [markdown]
# 3. If no shard has one, raise a `ValueError`.
# 4. The result is a tensor of one number, and `backward()` on it reaches every loss that counts.


# %% task="03-combine"
def combine(losses, counts):
    """Return the mean loss over all samples, as a tensor with its graph."""
    ### BEGIN SOLUTION
    total = sum(counts)
    if total == 0:
        raise ValueError("no shard has a sample: there is no mean")
    return sum(loss * n for loss, n in zip(losses, counts, strict=True) if n > 0) / total
    ### END SOLUTION


# %% [markdown]
# Is it the mean over all samples, and can it be trained on?

# %% test="03-combine"
check("03-combine")

# %% [markdown]
# ## Task 3: predict the memory of device 0 (6 points)
#
# Here is DataParallel in arithmetic. All tensors are float32, so a number takes 4 bytes. At the moment that counts, right after the backward pass, these are alive:
#
# | what | how many numbers | where |
# |---|---|---|
# | weights, or a replica's copy of them | `weights` | device 0, and each device with samples |
# | gradients of them | `weights` | device 0, and each device with samples |
# | optimizer's numbers | `state` for each weight | device 0 |
# | input | `sample` for each sample | device 0: the whole batch (its own shard is a view of it); others: their shard |
# | activations | `activations` for each sample | the device that computed them: its shard |
# | gathered output | `output` for each sample | device 0: the whole batch |
#
# (It is a model: a real backward pass has freed most activations by then, and holds others instead. What matters is who holds what.)
#
# 1. `device_bytes(shards, weights, sample, activations, output, state)` returns a list with the bytes of each device. `shards` has the number of samples of each device, device 0 first. Device 0 has its weights in any case. Another device without samples has no replica and holds nothing.
# 2. `largest_batch(limit, devices, weights, sample, activations, output, state)` returns the largest number of samples for which no device needs more than `limit` bytes. The batch is cut as in task 1. If not even one sample fits, it is 0.


# %% task="03-memory"
def device_bytes(shards, weights, sample, activations, output, state):
    """Return the bytes of each device, as a list as long as `shards`."""
    ### BEGIN SOLUTION
    numbers = []
    for device, n in enumerate(shards):
        if device == 0:
            inputs_and_outputs = sum(shards) * (sample + output)
            numbers.append((2 + state) * weights + inputs_and_outputs + n * activations)
        else:
            numbers.append((2 * weights + n * (sample + activations)) if n else 0)
    return [4 * number for number in numbers]
    ### END SOLUTION


def largest_batch(limit, devices, weights, sample, activations, output, state):
    """Return the largest batch for which every device stays within `limit` bytes."""
    ### BEGIN SOLUTION
    size = 0
    while True:
        each, left = divmod(size + 1, devices)
        cut = [each + (device < left) for device in range(devices)]
        if max(device_bytes(cut, weights, sample, activations, output, state)) > limit:
            return size
        size += 1
    ### END SOLUTION


# %% [markdown]
# Who needs how much, and how many samples fit?

# %% test="03-memory"
check("03-memory")

# %% [markdown]
# ## Done?
#
# Put your `scatter` into the DataParallel of the lesson: with 5 samples on 4 devices, how many devices work now? In `largest_batch`, would it be enough to look at device 0? Why? One way to solve each task is in the [solution of exercise 03](../solutions/03_data_parallel.ipynb). Compare it with yours after you have tried.
