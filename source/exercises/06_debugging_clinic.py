# ---
# jupyter:
#   course:
#     rows: []
#     minutes: {read: 10, do: 35}
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
# # Exercise 06: mend four programs, name the guilty rank
#
# You treat four patients by yourself, on two real ranks, and write the function that reads a heap of dumps and says which rank to look at.
#
# | | |
# |---|---|
# | **Time** | 10 minutes to read, 35 to do: about 25 and 10 for the two tasks |
# | **You should know** | [lesson 06, Debugging clinic](../notebooks/06_debugging_clinic.ipynb) |
# | **Runs on** | every machine: the check starts two ranks on CPU tensors, over gloo, under a deadline; a rank that waits for one that has returned is noticed after two seconds |
#
# Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check below it. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("06-mend")` is a nudge, `hint("06-mend", level=2)` the way, `level=3` nearly the code.

# %% [markdown]
# ## Task 1: mend four broken programs (8 points)
#
# These are the patients. Each is called once by every rank of a group of two.


# %%
import contextlib
import io
import re

import torch
import torch.distributed as dist

from course_utils.grading import check, hint
from course_utils.launch import RankError, launch

torch.set_num_threads(1)
assert dist.is_gloo_available(), "this build of PyTorch lacks gloo, which carries the messages"


def broken_mean_loss(batches):
    """Mean loss over all samples of all ranks, on every rank. batches: a list of float64
    tensors with one loss a sample. Ranks may have other numbers of batches, of other sizes."""
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        both = torch.tensor([batch.sum(), len(batch)], dtype=torch.float64)
        dist.all_reduce(both)
        total += both
    return float(total[0] / total[1])


def broken_sum_totals(totals):
    """totals: name -> tensor of one number. The same names on each rank, in any order."""
    for _, total in sorted(totals.items(), key=lambda pair: pair[1].item()):
        dist.all_reduce(total)
    return totals


def broken_gather_all(mine):
    """All ranks' values as one tensor, in order of rank. `mine`: any dtype and length, also 0."""
    room = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(room, mine)
    return torch.cat(room)


def broken_save(state, path):
    """Save the state of rank 0. There may be an older checkpoint at this path."""
    torch.save(state, path)


# %% [markdown]
# Look at a symptom before you look for a cure. `in_group` gives a program its group; here the third patient gets two values on rank 0 and three on rank 1.


# %%
# NBVAL_CHECK_OUTPUT
def in_group(program):
    dist.init_process_group("gloo")
    return program(torch.arange(2.0 + dist.get_rank()))


with contextlib.redirect_stdout(io.StringIO()) as printed:  # gloo's words have line numbers
    try:
        launch(in_group, 2, broken_gather_all, init=False, timeout=20)
    except RankError as error:
        symptom = error.type_name
print("symptom:", symptom)
print("gloo says:", re.search(r"Received data size doesn't match expected", printed.getvalue())[0])

# %% [markdown]
# Now write them anew, in one cell:
#
# - `mean_loss(batches)`: every rank returns the mean over all samples of all ranks, as a number, however many batches each has (at least one).
# - `sum_totals(totals)`: returns a dict with the same names; each holds the sum of the tensors *of that name* over the ranks.
# - `gather_all(mine)`: every rank returns all values in order of rank, as one tensor of one dimension, whatever the lengths and the dtype.
# - `save(state, path)`: when it returns on any rank, `path` holds the state of rank 0, whole, and no other new file is left. Who reads `path` in the meantime finds the older checkpoint or the new one, never half of one. (The check does look in the meantime, and lets one rank come late.)
#
# The first three give two points each; the last gives one for its result and one for what a reader sees meanwhile.


# %% task="06-mend"
import os

import torch
import torch.distributed as dist


def mean_loss(batches):
    """Return the mean over all samples of all ranks."""
    ### BEGIN SOLUTION
    mine = torch.cat(batches)
    both = torch.tensor([mine.sum(), len(mine)], dtype=torch.float64)
    dist.all_reduce(both)  # once on every rank
    return float(both[0] / both[1])
    ### END SOLUTION


def sum_totals(totals):
    """Return name -> sum over the ranks of the tensors of that name."""
    ### BEGIN SOLUTION
    for name in sorted(totals):  # names are equal on all ranks, values are not
        dist.all_reduce(totals[name])
    return totals
    ### END SOLUTION


def gather_all(mine):
    """Return all ranks' values in order of rank, as one tensor."""
    ### BEGIN SOLUTION
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = int(max(lengths))
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    pieces = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(pieces, padded)
    return torch.cat([piece[: int(n)] for piece, n in zip(pieces, lengths, strict=True)])
    ### END SOLUTION


def save(state, path):
    """Save the state of rank 0 at `path`, so that no reader ever sees half of it."""
    ### BEGIN SOLUTION
    writes = dist.get_rank() == 0
    if writes:
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()
    ### END SOLUTION


# %% [markdown]
# Do they hold on two ranks?

# %% test="06-mend"
check("06-mend")

# %% [markdown]
# ## Task 2: name the guilty rank (5 points)
#
# A job of four ranks failed, and you have one text from each: what it was doing at the deadline (its stack), or the error that it raised. Exactly one rank is guilty: the others wait for it, have lost it, or have run out of time. Write `guilty_rank(dumps)`: it gets the list of the four texts, in order of rank, and returns the number of the guilty rank.
#
# The texts come from real runs of five broken programs. In them the guilty rank
#
# - has left the loop early, and the others wait in `all_reduce`;
# - has one batch more than the others, which have returned;
# - is in another collective than the others;
# - raised an error of its own, of any type, and the others lost their connection;
# - is stuck in its data, raised nothing, and the others ran into the time-out of the group.
#
# Each comes three times, with the guilty one at another place. Here is one of the first kind (shortened), with rank 2 as the answer, and one of the fourth, with rank 0:


# %%
left_early = [
    'waits in all_reduce, line 14 of train.py\n  File "train.py", line 22, in train\n  ...',
    'waits in all_reduce, line 14 of train.py\n  File "train.py", line 22, in train\n  ...',
    "has returned and waits for the others",
    'waits in all_reduce, line 14 of train.py\n  File "train.py", line 22, in train\n  ...',
]
raised_first = [
    "raised KeyError: 'image_17'",
    "raised RuntimeError: [...] Read error [127.0.0.1]:46762: Connection reset by peer. [...]",
    "raised RuntimeError: [...] Connection closed by peer [127.0.0.1]:1161. [...]",
    "raised RuntimeError: [...] Read error [127.0.0.1]:22740: Connection reset by peer. [...]",
]

# %% [markdown]
# An error of the time-out reads `raised RuntimeError: [...] Timed out waiting 2000ms for recv operation to complete`; for some ranks it is a `send operation`. A rank that is stuck in its data has a stack that begins with `is in read_batch, line 9 of train.py`.


# %% task="06-guilty"
def guilty_rank(dumps):
    """Return the number of the guilty rank. dumps: one text for each rank, in order of rank."""
    ### BEGIN SOLUTION
    suffers = ["Connection" in dump or "Timed out" in dump for dump in dumps]
    if any(suffers):
        return suffers.index(False)
    first_lines = [dump.splitlines()[0] for dump in dumps]
    return [first_lines.count(line) for line in first_lines].index(1)
    ### END SOLUTION


# %% [markdown]
# Does it find all five kinds?

# %% test="06-guilty"
check("06-guilty")

# %% [markdown]
# ## Done?
#
# The four cures have one thing in common: no rank decides alone what the others must know. One way to solve each task is in the [solution of exercise 06](../solutions/06_debugging_clinic.ipynb). Compare it with yours after you have tried.
