# ---
# jupyter:
#   course:
#     rows: [O6]
#     minutes: {read: 5, do: 40}
#     devices: 1
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
# # Exercise 16: the largest batch, the same gradient, a step that survives
#
# You write the three tools of lesson 16: a search for the largest batch that needs few trials, accumulation whose gradient is that of the big batch, and a training step that survives running out of memory without losing a sample.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 40 to do: about 15, 10 and 15 for the three tasks |
# | **You should know** | [lesson 16, The largest batch that fits](../notebooks/16_batch_size.ipynb) |
# | **Runs on** | every machine: the first task's device and the third one's memory are made up |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold, and why another one does not. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("16-search")` is a nudge, `hint("16-search", level=2)` the way, `level=3` nearly the code. A check that never ends is a loop in your code: stop it with the notebook's stop button.

# %%
import torch

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: the largest batch in at most 6 trials (5 points)
#
# A trial costs a training step, so you want few of them. Write `largest_batch(trial, limit)` for a device that you can only ask:
#
# - `trial(batch)` runs a step with so many samples. It returns two peaks in MiB, exact floats without noise: the peak of forward and backward, and the peak of the optimizer's step. When one of them is above the limit, it raises `torch.OutOfMemoryError`, and you learn no peak.
# - `limit` is the device's memory, in MiB.
#
# On these devices the peak of the optimizer's step does not depend on the batch at all.
#
# Return the largest batch that you found, as a whole number. The rules:
#
# 1. Return only a size whose own trial has run.
# 2. Ask at most 6 times; a trial that fails counts.
# 3. Reach 98 % of the largest size that fits, where forward and backward lie on a straight line. On some devices the optimizer's step has the higher peak for most sizes; one device takes a single sample and no more.
# 4. Some devices have a **kink**: from some size on each sample costs up to half more. There 90 % are enough. Such a device may have a high peak of the step too.
# 5. When not even a batch of 1 fits, let the error of `trial(1)` come through.
# 6. What you try next follows from `limit` and the answers so far: no random numbers.
#
# Here is a device with a kink, to look at: 100 MiB before the first sample, 2 MiB for each of the first 100 samples, 3 MiB for each one after them. With a limit of 1000 MiB its largest batch is 333.


# %%
# NBVAL_CHECK_OUTPUT
def example(batch):
    compute = 100 + 2 * batch + max(0, batch - 100)
    if max(compute, 300) > 1000:
        raise torch.OutOfMemoryError(f"out of memory: a batch of {batch} does not fit")
    return compute, 300


for batch in [1, 2, 100, 200, 333, 334]:
    try:
        print(f"batch {batch:3}: forward and backward {example(batch)[0]} MiB, step 300 MiB")
    except torch.OutOfMemoryError as error:
        print(error)


# %% task="16-search"
import torch


def largest_batch(trial, limit):
    """Return the largest batch found that fits, after at most 6 trials.

    trial: batch (int) -> (peak of forward and backward, peak of the step), in MiB;
    raises torch.OutOfMemoryError. limit: in MiB.
    """
    ### BEGIN SOLUTION
    ran, failed, size = {1: trial(1)[0]}, None, 2
    for number in range(5):
        try:
            ran[size] = trial(size)[0]
        except torch.OutOfMemoryError:
            failed = size
            if size == 2:
                return 1
        a, b = sorted(ran)[-2:]
        guess = b + (limit - ran[b]) * (b - a) / (ran[b] - ran[a])
        if number == 0:
            guess = b + (guess - b) / 2  # two tiny batches tell little about a large one
        if failed is not None:
            guess = min(guess, (b + failed) / 2)
        size = int(guess)
        if size <= b:
            break
    return max(ran)
    ### END SOLUTION


# %% [markdown]
# Does it find the largest batch in six trials, and has that batch run?

# %% test="16-search"
check("16-search")

# %% [markdown]
# ## Task 2: small batches with the gradient of a big one (6 points)
#
# Write `accumulate(model, loss_fn, batch, micro, count)`. It leaves in `.grad` what one backward of the whole batch would leave there, though `loss_fn` never gets more than `micro` samples at once. It returns the mean loss of the whole batch, as a float.
#
# - `batch` is a tuple of two tensors, `(x, y)`; the first dimension of both is the samples. Each sample is a sequence of four tokens; some of them are padding that no loss counts.
# - `loss_fn(model, part)` returns the *mean* loss over the tokens that count in `part`, a tuple like `batch`. How much each token costs, only `loss_fn` knows; it refuses more than `micro` samples.
# - `count(part)` says how many tokens that are, as an int.
#
# The gradients are empty when your function is called. The last micro-batch may be smaller than the others, and one may consist of padding alone: its mean is 0 / 0. The check works in float64 and allows a relative difference of 1e-8. It also looks whether the graph of each micro-batch is gone before the next forward: otherwise you save no memory. So keep numbers, such as `loss.item()`, and no tensor of the graph.
#
# Why the mean of the means will not do, on five numbers in parts of two:

# %%
# NBVAL_CHECK_OUTPUT
numbers = torch.tensor([1.0, 1, 1, 1, 6])
means = [part.mean() for part in numbers.split(2)]
print("the mean:             ", numbers.mean().item())
print("the mean of the means:", sum(means).item() / len(means))


# %% task="16-accumulate"
def accumulate(model, loss_fn, batch, micro, count):
    """Leave the gradient of the whole batch in .grad; return its mean loss, a float.

    loss_fn: (model, part) -> mean loss over the count(part) tokens that count.
    batch: (x, y). micro: the most samples of a part.
    """
    ### BEGIN SOLUTION
    x, y = batch
    total, mean = count(batch), 0.0
    for start in range(0, len(x), micro):
        part = x[start : start + micro], y[start : start + micro]
        if count(part) == 0:
            continue
        loss = loss_fn(model, part) * (count(part) / total)
        loss.backward()
        mean += loss.item()
    return mean
    ### END SOLUTION


# %% [markdown]
# Is the gradient that of the big batch, for every way to split it?

# %% test="16-accumulate"
check("16-accumulate")

# %% [markdown]
# ## Task 3: a step that survives (6 points)
#
# Write `safe_step(model, optimizer, loss_fn, batch, micro)`: one training step with the whole batch. It starts with micro-batches of `micro` samples. When memory runs out, it halves `micro` (rounding down) and repeats the same batch. It returns the last `micro`, the size that worked. (`micro` may be larger than the batch: it is halved as it is.)
#
# - `batch` is `(x, y)`, and `loss_fn(model, part)` the mean over the samples of `part`. `batch` has no padding: each sample counts. The model has neither dropout nor buffers.
# - However often memory ran out, the weights afterwards are those after one ordinary step with the whole batch (in float64, to a relative 1e-8).
# - When a micro-batch of 1 does not fit, the `torch.OutOfMemoryError` comes through, and the weights are unchanged. Every other error comes through at once.
# - Gradients may be left over from an earlier step.
#
# The memory is made up, but it behaves like the real one: what a failed try had taken stays taken as long as its exception lives. It may run out in the forward or in the backward, at the first part or at the last.


# %% task="16-safe-step"
import torch


def safe_step(model, optimizer, loss_fn, batch, micro):
    """One step with the whole batch; return the size of the micro-batches that worked.

    loss_fn: (model, part) -> mean loss; may raise torch.OutOfMemoryError, as backward may.
    batch: (x, y). micro: the size to start with.
    """
    ### BEGIN SOLUTION
    x, y = batch
    while True:
        failed = False
        optimizer.zero_grad()
        try:
            for start in range(0, len(x), micro):
                part = x[start : start + micro], y[start : start + micro]
                share = len(part[0]) / len(x)
                (loss_fn(model, part) * share).backward()
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
            failed = True
        # Here the exception is gone, and with it all that the failed try held.
        if not failed:
            optimizer.step()
            return micro
        micro //= 2
    ### END SOLUTION


# %% [markdown]
# Does every sample reach the weights, once, whatever the memory does?

# %% test="16-safe-step"
check("16-safe-step")

# %% [markdown]
# ## Done?
#
# You have now written the core of `course_utils.batch_size` and of `course_utils.training`. The first also puts everything back that a trial changed, and agrees between ranks; the second also restores random numbers and buffers before it tries again. One way to solve each task is in the [solution of exercise 16](../solutions/16_batch_size.ipynb). Compare it with yours after you have tried.
