# ---
# jupyter:
#   course:
#     rows: [D2, D3, D4]
#     minutes: {read: 5, do: 20}
#     devices: 2
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
# # Exercise 01: place the work, then prove where it ran
#
# You share out jobs, multiply on two devices, and read the log that says which device did what.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 20 to do: about 5, 8 and 7 for the three tasks |
# | **You should know** | [lesson 01, Device placement](../notebooks/01_device_placement.ipynb) |
# | **Runs on** | every machine: the two devices are logical CPU devices in this process |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Try as often as you like. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("01-round-robin")` is a nudge, `hint("01-round-robin", level=2)` the way, `level=3` nearly the code. A check that never ends is a loop in your code: stop it with the notebook's stop button.

# %% [markdown]
# First the imports. On a machine without an NVIDIA GPU, TensorFlow says here that it could not find cuda drivers. That is expected: this exercise needs no GPU.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # fewer of TensorFlow's start-up notices

import tensorflow as tf

from course_utils.grading import check, hint

# %% [markdown]
# Two logical CPU devices, made before TensorFlow starts to compute. If this cell is an error, something has computed already: restart the kernel and run from the top.

# %%
# NBVAL_CHECK_OUTPUT
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
for device in tf.config.list_logical_devices("CPU"):
    print(device.name)

# %% [markdown]
# ## Task 1: take turns (4 points)
#
# You have a list of jobs and a list of devices. Give the first job to the first device, the second job to the second device and so on. After the last device the first one has its turn again. So no device ever has two jobs more than another.
#
# `round_robin(["a", "b", "c"], ["/cpu:0", "/cpu:1"])` returns `{"a": "/cpu:0", "b": "/cpu:1", "c": "/cpu:0"}`.
#
# There may be fewer jobs than devices, or no job at all. Where there is no *device*, no plan is right: raise a `ValueError` whose message says so (the check looks for the word "device" in it).


# %% task="01-round-robin"
def round_robin(jobs, devices):
    """Return a dict: the device of each job.

    jobs: list of names, each once. devices: list of device names.
    Raises ValueError when there is no device.
    """
    ### BEGIN SOLUTION
    if not devices:
        raise ValueError("there is no device to place a job on")
    return {job: devices[number % len(devices)] for number, job in enumerate(jobs)}
    ### END SOLUTION


# %% [markdown]
# Do the devices take turns?

# %% test="01-round-robin"
check("01-round-robin")

# %% [markdown]
# ## Task 2: multiply on two devices, add on the first (5 points)
#
# You get pairs of matrices, and one device name for each pair. Compute the product A·B of pair 0 on device 0 of the list, that of pair 1 on device 1, and so on. A name may appear more than once. Then add all products on `/cpu:0`.
#
# Return both: the list of products, and their sum. The check looks at the values and at each tensor's `.device`. It calls your function inside `with tf.device("/cpu:1"):`, so nothing is on `/cpu:0` just because that is the default.
#
# A warning from the lesson: with soft placement on, a device that does not exist is no error. The operation runs somewhere else, and only `.device` tells.

# %% task="01-sum-of-products"
import tensorflow as tf


def sum_of_products(pairs, devices):
    """Return (products, total).

    pairs: list of (A, B), float32 tensors of shape [3, 3].
    devices: list of device names such as "/cpu:1", one for each pair.
    products: list of A·B, each computed on its device. total: their sum, computed on /cpu:0.
    """
    ### BEGIN SOLUTION
    products = []
    for (a, b), device in zip(pairs, devices, strict=True):
        with tf.device(device):
            products.append(tf.matmul(a, b))
    with tf.device("/cpu:0"):
        return products, tf.add_n(products)
    ### END SOLUTION


# %% [markdown]
# Are the values right, and was each computed where it should be?

# %% test="01-sum-of-products"
check("01-sum-of-products")

# %% [markdown]
# ## Task 3: read a placement log (3 points)
#
# This is what TensorFlow 2.21 printed for a small graph, shortened on the right:
#
# ```text
# layer/product: (MatMul): /job:localhost/replica:0/task:0/device:CPU:1
# I0000 00:00:1795230922.304764    6756 placer.cc:162] layer/product: (MatMul): /job:localhost/…
# I0000 00:00:1795230922.304788    6756 placer.cc:162] sum: (AddV2): /job:localhost/…
# I0000 00:00:1795230922.359840    6756 execute.cc:1775] Executing op MatMul in device /job:localhost/…
# I0000 00:00:1795230922.301654    6756 direct_session.cc:382] Device mapping: no known devices.
# ```
#
# A placement is written `name: (Type): device`. TensorFlow writes it to stdout as it is, and to stderr with a time stamp before it. A log that caught both has some lines twice, one that caught one of them has them once, in either form. The other lines are no placements. Operations of the types `_Arg` and `_Retval`, a function's inputs and results, are placed like any other: they count. In the logs of the check no name has two different devices.
#
# Turn such a log into a dict. The key is the operation's *name* (`layer/product`, not `MatMul`: two operations may have the same type). The value is the *full* name of its device, `/job:localhost/replica:0/task:0/device:CPU:1`: in a cluster, `CPU:1` alone could be on any machine.

# %% task="01-placement-log"
import re


def read_placement(log):
    """Return a dict: the full device name of each operation.

    log: text of many lines, as TensorFlow wrote it.
    """
    ### BEGIN SOLUTION
    placed = re.compile(r"(\S+): \(\w+\): (/job:\S+)$", re.MULTILINE)
    return dict(placed.findall(log))
    ### END SOLUTION


# %% [markdown]
# Is every operation found, and nothing else?

# %% test="01-placement-log"
check("01-placement-log")

# %% [markdown]
# ## Done?
#
# Three times full marks: go on with [lesson 02, Two devices, one sum](../notebooks/02_two_devices_one_sum.ipynb). One way to solve each task is in the [solution of exercise 01](../solutions/01_device_placement.ipynb). Compare it with yours after you have tried.
