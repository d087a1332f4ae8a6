# ---
# jupyter:
#   course:
#     rows: [O1, O4, O5, O7]
#     minutes: {read: 5, do: 25}
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
# # Exercise 15: four leaks, one kind of error, an evaluation that leaves no trace
#
# You mend four programs that run out of memory, write the test that tells this error from all others, and evaluate a model without a graph.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 12, 6 and 7 for the three tasks |
# | **You should know** | [lesson 15, Out of memory](../notebooks/15_out_of_memory.ipynb) |
# | **Runs on** | every machine: the first check uses a made-up device of 8 MiB, the others a few numbers |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("15-leaks")` is a nudge, `hint("15-leaks", level=2)` the way, `level=3` nearly the code.

# %%
import torch

from course_utils import memory
from course_utils.grading import check, hint
from course_utils.memory import MiB

# %% [markdown]
# ## Task 1: mend four programs that leak (5 points)
#
# Here they are, each right in what it returns and wrong in what it keeps. Read them before you run anything, and write down for each: which line keeps the memory, and through which object?


# %%
def leaky_total_loss(loss_of, batches):
    """The sum of the losses, as a float. loss_of(batch) returns a loss with its graph."""
    total = 0.0
    for batch in batches:
        total += loss_of(batch)
    return total.item()


def leaky_failures(step, batches):
    """The texts of the errors, in order. step(batch) raises a ValueError for some batches."""
    failed = []
    for batch in batches:
        try:
            step(batch)
        except ValueError as error:
            failed.append(error)
    return [str(error) for error in failed]


def leaky_first_scores(model, batches):
    """The first number of each output, as floats. model(batch) returns 1 MiB of numbers."""
    scores = []
    for batch in batches:
        scores.append(model(batch)[0])
    return [float(score) for score in scores]


def leaky_check_after(model, batches, check):
    """The sum of all first numbers, and what check() returns. check needs the whole device."""
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    return total, check()


# %% [markdown]
# This cell runs two of them for 40 batches within 8 MiB.

# %%
# NBVAL_CHECK_OUTPUT
weight = torch.ones(1, requires_grad=True)
BLOCK = MiB // 4  # float32 numbers in a MiB
calls = 0


def loss_of(batch):
    global calls
    calls += 1
    return (weight * torch.full((BLOCK,), float(batch))).mean()


def step(batch):
    global calls
    calls += 1
    activations = torch.ones(BLOCK)
    raise ValueError(f"batch {batch}: {len(activations)} numbers are not finite")


for program, function in [(leaky_total_loss, loss_of), (leaky_failures, step)]:
    calls = 0
    try:
        with memory.Budget(weight, limit=8 * MiB):
            program(function, range(40))
    except torch.OutOfMemoryError:
        print(f"{program.__name__}: out of memory within the first 10 batches: {calls <= 10}")
    else:
        raise AssertionError(f"{program.__name__} no longer leaks")

# %% [markdown]
# Write the four again, without the leak. They return the same: `total_loss` a float, `failures` a list of texts, `first_scores` a list of floats, `check_after` a float and the value of `check()`. Each batch goes through `loss_of`, `step` or `model` once, in its turn, and `check` is called after the last.
#
# The check runs each of yours for more than 200 batches on a device of 8 MiB. `loss_of` and `step` get a number and take 1 MiB; `first_scores` and `check_after` get batches that are tensors on the device themselves, 1 MiB each beside the output's 1 MiB. A program that leaks does not reach its `return` there. The last point is for leaving nothing behind: after the return, nothing of yours may still refer to the device's memory.


# %% task="15-leaks"
def total_loss(loss_of, batches):
    """Return the sum of loss_of(batch) over all batches, as a float."""
    ### BEGIN SOLUTION
    summed = 0.0
    for each in batches:
        summed += loss_of(each).item()  # a number has no graph
    return summed
    ### END SOLUTION


def failures(step, batches):
    """Return the texts of the ValueErrors that step(batch) raised, in order."""
    ### BEGIN SOLUTION
    texts = []
    for each in batches:
        try:
            step(each)
        except ValueError as problem:
            texts.append(str(problem))  # the exception itself would hold step's frame
    return texts
    ### END SOLUTION


def first_scores(model, batches):
    """Return the first number of model(batch) for each batch, as a list of floats."""
    ### BEGIN SOLUTION
    return [model(each)[0].item() for each in batches]  # a slice would hold its whole storage
    ### END SOLUTION


def check_after(model, batches, check):
    """Return the sum of the first numbers of all outputs, and then what check() returns."""
    ### BEGIN SOLUTION
    summed = 0.0
    for x in batches:
        y = model(x)
        summed += y[0].item()
    x = y = None  # a loop's variables outlive the loop; `del` would fail without batches
    return summed, check()
    ### END SOLUTION


# %% [markdown]
# Do they run within 8 MiB, and are they still right?

# %% test="15-leaks"
check("15-leaks")

# %% [markdown]
# ## Task 2: is it out of memory? (4 points)
#
# A program that goes on after an error must be sure which error it was: after *out of memory* you take a smaller batch, after anything else you must not. There is no single type for it. Write `is_oom(error)`, which returns `True` or `False` for these:
#
# | who says it | type | text |
# |---|---|---|
# | PyTorch's allocator on a GPU | `torch.OutOfMemoryError`, in old versions `RuntimeError` | `CUDA out of memory. Tried to allocate …` |
# | the CUDA driver | `RuntimeError` | `CUDA error: out of memory …` |
# | Apple's GPUs | `RuntimeError` | `MPS backend out of memory (…` |
# | cuBLAS, cuDNN | `RuntimeError` | `… CUBLAS_STATUS_ALLOC_FAILED …`, `… CUDNN_STATUS_ALLOC_FAILED` |
# | PyTorch's allocator on a CPU | `RuntimeError` | Linux: `… DefaultCPUAllocator: can't allocate memory …`; Windows: `… DefaultCPUAllocator: not enough memory …` |
# | Python, NumPy | `MemoryError` | often none |
# | TensorFlow | `ResourceExhaustedError` | `OOM when allocating tensor …` |
#
# It must refuse what only sounds like it: a GPU's *illegal memory access* (that process is lost), a library's other failures, a full disk, and a `ValueError` or `KeyError` whose text happens to quote the phrase. TensorFlow need not be installed where your function runs, so do not import it: `type(error).__name__` is the name of a type.


# %% task="15-is-oom"
import torch


def is_oom(error):
    """Return True if this exception says that memory ran out, otherwise False."""
    ### BEGIN SOLUTION
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if type(error).__name__ == "ResourceExhaustedError":
        return True
    phrases = (
        "CUDA out of memory",
        "CUDA error: out of memory",
        "MPS backend out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "DefaultCPUAllocator: can't allocate memory",
        "DefaultCPUAllocator: not enough memory",
    )
    text = str(error)
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)
    ### END SOLUTION


# %% [markdown]
# Does it say yes to all of them, and no to the others?

# %% test="15-is-oom"
check("15-is-oom")

# %% [markdown]
# ## Task 3: evaluate, and leave no trace (5 points)
#
# Write `evaluate(model, batches, loss_fn)`. `loss_fn(model, batch)` returns the mean loss over the samples of a batch; the samples are the first dimension, so `len(batch)` counts them.
#
# 1. Return the mean over **all samples**, as a float. The last batch is often smaller, and its samples count no more than others.
# 2. While it runs, dropout is off, BatchNorm stands still, and no graph is kept.
# 3. Afterwards each layer is in the mode in which it was, `train` or `eval`. Somebody may have put one layer in eval mode on purpose; and `loss_fn` may raise an error, which you pass on.


# %% task="15-evaluate"
import torch


def evaluate(model, batches, loss_fn):
    """Return the mean loss over all samples of all batches, as a float; change nothing.

    model: a torch.nn.Module. batches: list of tensors [samples, features].
    loss_fn: function (model, batch) -> the mean loss over the batch, a tensor of one number.
    """
    ### BEGIN SOLUTION
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    total = samples = 0
    try:
        with torch.inference_mode():
            for rows in batches:
                total += loss_fn(model, rows).item() * len(rows)
                samples += len(rows)
    finally:
        for module, mode in modes:
            module.training = mode
    return total / samples
    ### END SOLUTION


# %% [markdown]
# Is it exact, and is the model as it was?

# %% test="15-evaluate"
check("15-evaluate")

# %% [markdown]
# ## Done?
#
# `course_utils.memory.is_oom` knows more messages than yours: an `OSError` with the code `ENOMEM`, too, and it asks whether TensorFlow's error is about memory at all. One way to solve each task is in the [solution of exercise 15](../solutions/15_out_of_memory.ipynb). Compare it with yours after you have tried.
