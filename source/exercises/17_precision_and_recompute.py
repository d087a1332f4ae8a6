# ---
# jupyter:
#   course:
#     rows: [O10]
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
# # Exercise 17: scale a loss, cut a network, pick a precision
#
# You write the gradient scaler that float16 needs, choose what to recompute in a network whose layers differ, and turn the record of a device into a decision.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 8, 10 and 7 for the three tasks |
# | **You should know** | [lesson 17, Precision and recomputation](../notebooks/17_precision_and_recompute.ipynb) |
# | **Runs on** | every machine, in plain Python: the checks bring a made-up network and made-up devices |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("17-loss-scaling")` is a nudge, `hint("17-loss-scaling", level=2)` the way, `level=3` nearly the code. A check that never ends is a loop in your code: stop it with the notebook's stop button.

# %%
import struct

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: loss scaling by hand (5 points)
#
# A float16 gradient of 2⁻²⁵ (3·10⁻⁸) or less becomes 0, one of 65 520 or more becomes infinity. Python can show the zero without a framework (for infinity `struct` raises an `OverflowError` instead):


# %%
# NBVAL_CHECK_OUTPUT
def half(value):
    """`value` as float16 holds it."""
    return struct.unpack("e", struct.pack("e", value))[0]


small, scale = 1e-8, 2.0**16
print("without scaling:", half(small))
print("scaled, then divided again:", f"{half(small * scale) / scale:.3g}")

# %% [markdown]
# Write one step, `scaled_step(backward, scale, good_steps, interval)`:
#
# 1. `backward(factor)` multiplies the loss by `factor`, runs the backward pass in float16 and returns the gradients as a list of numbers: `factor` times too large, each rounded to float16. Call it once, with the right factor.
# 2. If one of the gradients is infinite or NaN, the step is skipped: no gradients come back (`None`), the scale is halved, and the good steps start again from 0.
# 3. Otherwise the gradients come back in their own units, as if the loss had not been scaled. The step was good. After `interval` good steps in a row the scale doubles, and they start again from 0.
#
# Return `(gradients or None, scale, good_steps)`: the last two are for the *next* step. This is the rule of `torch.amp.GradScaler`.


# %% task="17-loss-scaling"
import math


def scaled_step(backward, scale, good_steps, interval):
    """One step of loss scaling. Returns (gradients or None, scale, good_steps).

    backward: a function (factor) -> list of gradients of factor · loss, in float16.
    scale: a power of two. good_steps: good steps in a row before this one.
    interval: the scale doubles after so many good steps in a row.
    """
    ### BEGIN SOLUTION
    scaled = backward(scale)
    if not all(math.isfinite(g) for g in scaled):
        return None, scale / 2, 0
    gradients = [g / scale for g in scaled]
    if good_steps + 1 == interval:
        return gradients, scale * 2, 0
    return gradients, scale, good_steps + 1
    ### END SOLUTION


# %% [markdown]
# Do small gradients survive, and do infinite ones do no harm?

# %% test="17-loss-scaling"
check("17-loss-scaling")

# %% [markdown]
# ## Task 2: what to keep, what to compute again (5 points)
#
# A network has n layers, one after the other. For the backward pass layer i needs its input, which takes `sizes[i]` MiB. Activation checkpointing cuts the layers into segments and keeps the input of each segment's *first* layer only. All others are computed again, one segment at a time, when the backward pass comes to that segment.
#
# Count the memory by this rule. Two parts make the peak:
#
# - the inputs of the first layers of all segments, which stay for the whole step;
# - the inputs of the other layers of *one* segment, the most expensive one.
#
# `starts` is a list with the number of each segment's first layer, counted from 0: it begins with 0 and rises. Four layers of 10 MiB with `starts = [0, 2]` keep 20 MiB and recompute 10 MiB more at a time: a peak of 30 MiB, where 40 would be needed without segments. (For n equal layers in k equal segments this rule gives k + n/k − 1; the lesson's k + n/k also counts the output of the segment's last layer.)
#
# 1. `peak_memory(sizes, starts)` returns the peak in MiB.
# 2. `choose_segments(sizes)` returns the starts with the lowest peak; where several are lowest, any of them. There are 1 to 11 layers.


# %% task="17-segments"
from itertools import combinations


def peak_memory(sizes, starts):
    """Return the peak in MiB.

    sizes: MiB of each layer's input. starts: first layer of each segment, from 0, rising.
    """
    ### BEGIN SOLUTION
    ends = [*starts[1:], len(sizes)]
    kept = sum(sizes[start] for start in starts)
    recomputed = [sum(sizes[start + 1 : end]) for start, end in zip(starts, ends, strict=True)]
    return kept + max(recomputed)
    ### END SOLUTION


def choose_segments(sizes):
    """Return the starts with the lowest peak.

    sizes: MiB of each layer's input, 1 to 11 layers.
    """
    ### BEGIN SOLUTION
    choices = [
        [0, *further]
        for count in range(len(sizes))
        for further in combinations(range(1, len(sizes)), count)
    ]
    return min(choices, key=lambda starts: peak_memory(sizes, starts))
    ### END SOLUTION


# %% [markdown]
# Is the peak counted right, and can nobody find a lower one?

# %% test="17-segments"
check("17-segments")

# %% [markdown]
# ## Task 3: pick a precision (6 points)
#
# Somebody measured a training step on a device in each of the three types, as you did in the lesson, and wrote down a record:

# %%
# NBVAL_CHECK_OUTPUT
record = {
    "name": "a GPU of somebody else",
    "capability": [7, 5],  # None for a CPU
    "bf16_supported": True,  # what torch.cuda.is_bf16_supported() says
    "bf16_native": False,  # the same with including_emulation=False
    "samples_per_s": {"float32": 210.0, "bfloat16": 240.0, "float16": 650.0},
    "peak_mib": {"float32": 900, "bfloat16": 600, "float16": 600},
    "limit_mib": 1000,
}
print(", ".join(record))

# %% [markdown]
# Write `pick_precision(device)`, which returns `(name of the type, whether a gradient scaler is needed)`, here `("float16", True)`. The rules:
#
# 1. A type is out if it was not measured (its speed is `None`), if its peak is above the limit, or if it is bfloat16 and the device only emulates it.
# 2. Of the others the fastest counts. But a type that needs less care is worth a little: take the first of float32, bfloat16, float16 that is left and reaches at least 1/1.1 of the fastest speed that is left.
# 3. If no type is left, raise a `ValueError` that says that there is too little memory (the check looks for the word "memory").


# %% task="17-pick-precision"
def pick_precision(device):
    """Return (name of the type, True if it needs a gradient scaler).

    device: a record as above. Raises ValueError when no type is left.
    """
    ### BEGIN SOLUTION
    speed, peak = device["samples_per_s"], device["peak_mib"]
    usable = []
    for dtype in ("float32", "bfloat16", "float16"):
        emulated = dtype == "bfloat16" and not device["bf16_native"]
        if speed[dtype] is not None and peak[dtype] <= device["limit_mib"] and not emulated:
            usable.append(dtype)
    if not usable:
        raise ValueError(f"{device['name']}: too little memory for every type that it can use")
    enough = max(speed[dtype] for dtype in usable) / 1.1
    chosen = next(dtype for dtype in usable if speed[dtype] >= enough)
    return chosen, chosen == "float16"
    ### END SOLUTION


# %% [markdown]
# Does the record decide, and not the reputation of a type?

# %% test="17-pick-precision"
check("17-pick-precision")

# %% [markdown]
# ## Done?
#
# Task 1 is the heart of `torch.amp.GradScaler`; the original does it for whole tensors, and asks about infinity on the device. In task 2 the rule was a little careful: the backward pass frees the kept input of each segment that it is done with, so the earlier segments may be somewhat larger than the later ones. One way to solve each task is in the [solution of exercise 17](../solutions/17_precision_and_recompute.ipynb). Compare it with yours after you have tried.
