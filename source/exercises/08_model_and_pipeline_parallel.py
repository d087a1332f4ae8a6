# ---
# jupyter:
#   course:
#     rows: [P2]
#     minutes: {read: 5, do: 30}
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
# # Exercise 08: a schedule, a sliced block, a balanced cut
#
# You write what lesson 08 built on: the schedule of GPipe slot by slot, a block cut into columns and rows that runs on two real ranks, and the cut that makes the stages of a pipeline equal.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 30 to do: about 8, 15 and 7 for the three tasks |
# | **You should know** | [lesson 08, Model, pipeline and tensor parallelism](../notebooks/08_model_and_pipeline_parallel.ipynb) |
# | **Runs on** | every machine: tasks 1 and 3 are plain Python, task 2 runs on two ranks, which the check starts for you |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("08-gpipe")` is a nudge, `hint("08-gpipe", level=2)` the way, `level=3` nearly the code.

# %%
from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: the schedule of GPipe (6 points)
#
# A **slot** is the time of one forward or backward pass of one micro-batch on one stage; take both as equally long. A stage does one pass in a slot, or is idle. What a stage sends can be used from the next slot on.
#
# Write `gpipe_slots(stages, micro_batches)`. It returns a list with a row for each stage, and each row is a list with an entry for each slot of the step: `"F0"` for the forward pass of micro-batch 0, `"B0"` for its backward pass, and so on, or `None` where the stage is idle. All rows are equally long, and no longer than necessary. In GPipe every stage does all its forward passes before its first backward pass. For one stage and two micro-batches it is:

# %%
# NBVAL_CHECK_OUTPUT
one_stage = [["F0", "F1", "B0", "B1"]]
print(len(one_stage[0]), "slots, of which idle:", one_stage[0].count(None))


# %% task="08-gpipe"
def gpipe_slots(stages, micro_batches):
    """Return one row a stage: "F0", "B0", ... or None for each slot of the step.

    stages, micro_batches: whole numbers >= 1.
    """
    ### BEGIN SOLUTION
    phase = micro_batches + stages - 1
    rows = [[None] * (2 * phase) for _ in range(stages)]
    for stage, row in enumerate(rows):
        for i in range(micro_batches):
            row[stage + i] = f"F{i}"
            row[phase + (stages - 1 - stage) + i] = f"B{i}"
    return rows
    ### END SOLUTION


# %% [markdown]
# Does every pass have what it needs, with no idle slot too many?

# %% test="08-gpipe"
check("08-gpipe")

# %% [markdown]
# ## Task 2: columns and rows, on two ranks (10 points)
#
# A block computes $h = \mathrm{relu}(x A)$ and $y = h B$. Here `x` has a sample in each row, and `A` and `B` are plain matrices as in the formula (not transposed as in `nn.Linear`), without bias. Write three functions, which each rank calls:
#
# 1. `slice_weights(A, B, rank, ranks)` returns this rank's slices of both matrices: of equal size, the first slice for rank 0. The width of `h` can be divided by `ranks`, which need not be 2.
# 2. `block_forward(x, A, B, all_reduce)` gets the whole `x` and this rank's *slices*, and returns the whole `y`.
# 3. `block_backward(gradient, x, A, B, all_reduce)` gets the whole gradient of `y`, the whole `x` and the slices. It returns the whole gradient of `x`, and the gradients of the two slices.
#
# `all_reduce(t)` replaces the tensor `t`, in place and on every rank, by the sum over the ranks; it returns nothing. Use it once in each direction, on nothing larger than `x`: two of the points are for that. Leave the arguments as they are. You need no autograd: with `into`, the gradient at the entrance of relu, that of $A$ is $x^T \cdot$ `into`, that of $x$ is `into` $\cdot A^T$, and that of $B$ is $h^T \cdot$ `gradient`. Where relu's result is 0, its gradient is 0 too.

# %% task="08-tensor"
import torch


def slice_weights(A, B, rank, ranks):
    """Return this rank's slices of A and B."""
    ### BEGIN SOLUTION
    return A.chunk(ranks, dim=1)[rank], B.chunk(ranks, dim=0)[rank]
    ### END SOLUTION


def block_forward(x, A, B, all_reduce):
    """Return the whole output y. A and B are this rank's slices."""
    ### BEGIN SOLUTION
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
    ### END SOLUTION


def block_backward(gradient, x, A, B, all_reduce):
    """Return the gradients of x (whole), of A and of B (this rank's slices)."""
    ### BEGIN SOLUTION
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    of_x = into @ A.T
    all_reduce(of_x)
    return of_x, x.T @ into, h.T @ gradient
    ### END SOLUTION


# %% [markdown]
# Is it one device's result on both ranks, with one sum in each direction?

# %% test="08-tensor"
check("08-tensor")

# %% [markdown]
# ## Task 3: the cut that balances the stages (5 points)
#
# A pipeline is as fast as its slowest stage. Write `balanced_cut(costs, stages)`: `costs` has a whole number for each layer, in the order of the model. It returns how many layers each stage gets, as a list, so that the costliest stage is as cheap as possible. A stage is a run of neighbouring layers, and has at least one. Where several cuts are equally good, any of them counts. The checks have at most 13 layers and 5 stages, so you may try all cuts.

# %% task="08-cut"
import itertools


def balanced_cut(costs, stages):
    """Return the number of layers of each stage, so that the largest stage is smallest.

    costs: the cost of each layer, in order; stages: at most as many as layers.
    """

    ### BEGIN SOLUTION
    def largest(edges):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    places = itertools.combinations(range(1, len(costs)), stages - 1)
    best = min(((0, *chosen, len(costs)) for chosen in places), key=largest)
    return [b - a for a, b in itertools.pairwise(best)]
    ### END SOLUTION


# %% [markdown]
# Could another cut make the largest stage smaller?

# %% test="08-cut"
check("08-cut")
