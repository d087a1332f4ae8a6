# ---
# jupyter:
#   course:
#     rows: [O8]
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
# # Exercise 14: a bill by kind, and the layer that keeps the most
#
# You write two tools that tell where memory goes: one adds up what a model and its optimizer hold, from a description alone; the other finds the layer for which autograd keeps the most.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 25 to do: about 10 and 15 for the two tasks |
# | **You should know** | [lesson 14, Where memory goes](../notebooks/14_where_memory_goes.ipynb) |
# | **Runs on** | every machine: nothing here is larger than a few hundred KiB |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("14-bytes-by-kind")` is a nudge, `hint("14-bytes-by-kind", level=2)` the way, `level=3` nearly the code.

# %%
import torch
from torch import nn

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: the bill before you buy (5 points)
#
# You are offered a model to train. You have not got it, only a list of its tensors. Each entry is a dict:
#
# | key | what it says |
# |---|---|
# | `name` | such as `"head.weight"` |
# | `shape` | a list of lengths; `[]` is one single number |
# | `dtype` | `"float64"`, `"float32"`, `"float16"`, `"bfloat16"` or `"int64"` |
# | `trainable` | False for frozen parameters, and for buffers such as BatchNorm's running mean |
# | `id` | two entries with the same id are one tensor that has two names |
#
# For a model at hand such a list takes one line:

# %%
# NBVAL_CHECK_OUTPUT
norm = nn.BatchNorm1d(3)
for name, tensor in norm.state_dict(keep_vars=True).items():
    kind = str(tensor.dtype).removeprefix("torch.")
    print(f"{name:20} {list(tensor.shape)!s:5} {kind:8} trainable: {tensor.requires_grad}")

# %% [markdown]
# Write `bytes_by_kind(tensors, optimizer)`. It returns what they hold between two training steps, in bytes: a dict with the keys `"parameters"` (buffers included), `"gradients"` and `"optimizer state"`. At least one step has been taken, and the gradients have not been set to None.
#
# The state has the shape and type of the parameter it belongs to:
#
# | `optimizer` | keeps for each tensor that it trains |
# |---|---|
# | `"sgd"` | nothing |
# | `"sgd momentum"` | one more tensor: the momentum |
# | `"adam"` | two more: the means of gradient and squared gradient; and a step counter of 4 bytes |
# | `"adamw amsgrad"` | three more: also the largest mean so far; and a step counter of 4 bytes |
#
# The check does not look up a table: it makes such tensors, takes a step with PyTorch's optimizer, and weighs what is there.


# %% task="14-bytes-by-kind"
import math


def bytes_by_kind(tensors, optimizer):
    """Return {"parameters": …, "gradients": …, "optimizer state": …}, in bytes.

    tensors: list of dicts with name, shape, dtype, trainable, id.
    optimizer: "sgd", "sgd momentum", "adam" or "adamw amsgrad".
    """
    ### BEGIN SOLUTION
    width = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
    copies = {"sgd": 0, "sgd momentum": 1, "adam": 2, "adamw amsgrad": 3}[optimizer]
    counter = 4 if optimizer.startswith("adam") else 0
    parameters = gradients = state = 0
    met = set()
    for entry in tensors:
        if entry["id"] in met:
            continue
        met.add(entry["id"])
        size = math.prod(entry["shape"]) * width[entry["dtype"]]
        parameters += size
        if entry["trainable"]:
            gradients += size
            state += copies * size + counter
    return {"parameters": parameters, "gradients": gradients, "optimizer state": state}
    ### END SOLUTION


# %% [markdown]
# Does it hold for each optimizer, each type, frozen tensors, and tensors with two names?

# %% test="14-bytes-by-kind"
check("14-bytes-by-kind")

# %% [markdown]
# ## Task 2: which layer keeps the most? (5 points)
#
# Out of memory in the forward pass: activations. Whose? The layer with the most parameters is seldom the one, and neither is the layer with the largest output, because an output is kept only if the backward pass needs it. Here the convolution's output is as large as sigmoid's, and nobody keeps it.

# %%
# NBVAL_CHECK_OUTPUT
small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.AvgPool2d(2))
image = torch.ones(1, 3, 10, 10)


def look(tensor):
    print("kept:", list(tensor.shape))
    return tensor  # what a hook returns is what autograd keeps


with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
    small(image)

# %% [markdown]
# The first two lines are the convolution's input and its weight. Then come the output of sigmoid, and the same storage once more as the pooling's input.
#
# Write `dominant_layer(model, x)`. `model` is an `nn.Sequential`, `x` its input. Return a pair: the name of the layer (one of `model.named_children()`) for which autograd keeps the most bytes in a forward pass, and these bytes. The rules of the bill:
#
# 1. What counts is the whole **storage** of a kept tensor, `tensor.untyped_storage().nbytes()`: a view keeps all of it.
# 2. A storage that several layers keep counts once, for the first of them.
# 3. The storages of x, of parameters and of buffers do not count: they exist anyway. You know a storage by its address, `tensor.untyped_storage().data_ptr()`.
# 4. You only look: a backward pass must still work after your hooks. Autograd keeps what the first hook returns. If that is None, the tensor is freed, and another tensor may get its address.


# %% task="14-dominant-layer"
from torch.autograd.graph import saved_tensors_hooks


def dominant_layer(model, x):
    """Return (name, bytes) of the layer for which autograd keeps the most.

    model: an nn.Sequential. x: its input, a tensor.
    """
    ### BEGIN SOLUTION
    exists_anyway = [x, *model.parameters(), *model.buffers()]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in exists_anyway}
    heaviest = ("", 0)
    for name, layer in model.named_children():
        found = []

        def look(tensor, found=found):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in addresses:
                addresses.add(storage.data_ptr())
                found.append(storage.nbytes())
            return tensor

        with saved_tensors_hooks(look, lambda tensor: tensor):
            x = layer(x)
        heaviest = max(heaviest, (name, sum(found)), key=lambda pair: pair[1])
    return heaviest
    ### END SOLUTION


# %% [markdown]
# Does it find the layer where storages are shared, where buffers are kept too, where a view keeps a whole sequence, where numbers have 8 bytes?

# %% test="14-dominant-layer"
check("14-dominant-layer")

# %% [markdown]
# ## Done?
#
# Your second tool works on any `nn.Sequential`: try it on a model of your own, with a batch as large as you use. The layer that it names is the first one to look at when activations are the trouble; lesson 17 shows what to do about it. One way to solve each task is in the [solution of exercise 14](../solutions/14_where_memory_goes.ipynb). Compare it with yours after you have tried.
