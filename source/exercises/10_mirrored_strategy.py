# ---
# jupyter:
#   course:
#     rows: [K2]
#     minutes: {read: 5, do: 25}
#     devices: 1
#     path: core
#     extra: tensorflow
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
# # Exercise 10: a share of the loss, a first batch, an audit
#
# You write three small functions that a program with `MirroredStrategy` needs: what a replica contributes to the loss, batches that `fit` takes on any number of replicas, and an audit that finds variables whose copies have drifted apart.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 5, 10 and 10 for the three tasks |
# | **You should know** | [lesson 10, MirroredStrategy](../notebooks/10_mirrored_strategy.ipynb) |
# | **Runs on** | every machine: the checks use two or three logical CPU devices in a process of their own |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. The first check takes some seconds, because it starts TensorFlow. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("10-share")` is a nudge, `hint("10-share", level=2)` the way, `level=3` nearly the code.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: a replica's share of the loss (5 points)
#
# The strategy *sums* the gradients of the replicas. Here is what the sum must be: the gradient of the mean over the global batch, as on one device. Seven losses on two replicas:

# %%
# NBVAL_CHECK_OUTPUT
on_replica_0, on_replica_1 = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]
print("mean over the global batch:", np.mean(on_replica_0 + on_replica_1))
print("sum of the replicas' means:", np.mean(on_replica_0) + np.mean(on_replica_1))

# %% [markdown]
# Write `replica_loss(each, global_batch)`. It runs on every replica. `each` is a vector with the loss of each sample of *this* replica, and `global_batch` the number of samples of *all* replicas. Return one number, such that the sum over the replicas is the mean over the global batch. Shares need not be equal, and a replica may have no sample at all.


# %% task="10-share"
import tensorflow as tf


def replica_loss(each, global_batch):
    """Return this replica's share of the mean loss: one number.

    each: the losses of this replica's samples, a vector (may be empty).
    global_batch: the number of samples of all replicas together.
    """
    ### BEGIN SOLUTION
    return tf.reduce_sum(each) / tf.cast(global_batch, each.dtype)
    ### END SOLUTION


# %% [markdown]
# Do two replicas get the gradient of one device?

# %% test="10-share"
check("10-share")

# %% [markdown]
# ## Task 2: a first batch that always divides (5 points)
#
# `fit` and `evaluate` of Keras 3 fail when the shares of the *first* batch are not equal, and take any later batch. When you evaluate, you don't want to drop samples. So make the first batch divide, and keep all.
#
# Write `batched(dataset, size, replicas)`. `dataset` gives single samples and has a length, `len(dataset)`; `size` is the global batch that you would like, at least `replicas`. Return a data set of batches:
#
# - every sample once, in the same order;
# - no batch larger than `size`, and not many: at most ⌈N / m⌉ + 1, where N is the number of samples, m the largest multiple of `replicas` within `size`, and ⌈ ⌉ rounds up. With 11 samples, size 16 and 2 replicas that is 2: batches of 10 and 1 will do;
# - the number of samples in the first batch is a multiple of `replicas`;
# - where the data set has fewer samples than there are replicas, no first batch can divide: raise `ValueError`, and say why.
#
# `take`, `skip`, `batch` and `concatenate` of `tf.data.Dataset` are all you need.


# %% task="10-batches"
def batched(dataset, size, replicas):
    """Return the data set in batches of which the first divides by `replicas`.

    dataset: a tf.data.Dataset of single samples, with a length.
    size: the largest batch allowed. replicas: how many share each batch.
    """
    ### BEGIN SOLUTION
    largest = size // replicas * replicas
    start = min(largest, len(dataset) // replicas * replicas)
    if start == 0:
        raise ValueError(f"{len(dataset)} samples cannot be shared by {replicas} replicas")
    rest = dataset.skip(start).batch(largest)
    return dataset.take(start).batch(start).concatenate(rest)
    ### END SOLUTION


# %% [markdown]
# Are all samples there, and does `fit` take the batches?

# %% test="10-batches"
check("10-batches")

# %% [markdown]
# ## Task 3: which variables are mirrored, and are they still equal? (4 points)
#
# Write `audit(variable, strategy)`. It returns one of four words for a `tf.Variable`:
#
# - `"one copy"`: it was made outside the scope;
# - `"on read"`: a sync-on-read variable, such as a metric's; its copies may differ, and they may also be equal by chance;
# - `"mirrored"`: a copy on every device (there may be more than two), and all of them are exactly equal, number by number;
# - `"drifted"`: mirrored, but the copies are not equal, as with BatchNorm's moving mean.
#
# A variable says in `variable.synchronization` when its copies are brought together. For a sync-on-read variable `variable.synchronization.name` is `"ON_READ"`.


# %% task="10-audit"
import numpy as np


def audit(variable, strategy):
    """Return "one copy", "on read", "mirrored" or "drifted".

    variable: a tf.Variable with one or more numbers, made inside the strategy's scope or not.
    strategy: a tf.distribute.MirroredStrategy.
    """
    ### BEGIN SOLUTION
    values = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(values) == 1:
        return "one copy"
    if variable.synchronization.name == "ON_READ":
        return "on read"
    equal = all(np.array_equal(values[0], other) for other in values[1:])
    return "mirrored" if equal else "drifted"
    ### END SOLUTION


# %% [markdown]
# Does it find those that have drifted apart?

# %% test="10-audit"
check("10-audit")

# %% [markdown]
# ## Done?
#
# Run `audit` on `model.variables` of a model of yours that trains under a strategy (pass `variable.value` of Keras' variables). One way to solve each task is in the [solution of exercise 10](../solutions/10_mirrored_strategy.ipynb). Compare it with yours after you have tried.
