# ---
# jupyter:
#   course:
#     rows: [P4]
#     minutes: {read: 10, do: 30}
#     devices: 2
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
# # Exercise 04: a ring, an average, an equal start
#
# You write the three things that DistributedDataParallel is made of. Each is checked on real ranks.
#
# | | |
# |---|---|
# | **Time** | 10 minutes to read, 30 to do: about 15, 7 and 8 for the three tasks |
# | **You should know** | [lesson 04, DDP from scratch](../notebooks/04_ddp_from_scratch.ipynb) |
# | **Runs on** | every machine: the checks launch two ranks on two devices, and three or four that share them (oversubscribed) |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("04-ring")` is a nudge, `hint("04-ring", level=2)` the way, `level=3` nearly the code. If ranks wait for each other, the check ends them, after half a minute at most, and says where a rank waits.

# %%
import torch
import torch.distributed as dist

from course_utils.grading import check, hint
from course_utils.launch import launch

# %% [markdown]
# A function of yours runs on every rank at once. To try one yourself, launch it: this is what that looks like, and it prints what each rank returned.


# %%
# NBVAL_CHECK_OUTPUT
def try_it():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mine = torch.ones(3, device=device) * dist.get_rank()
    dist.all_reduce(mine)
    return mine.tolist()


print(launch(try_it, 2))

# %% [markdown]
# ## Task 1: a ring all-reduce (5 points)
#
# Write `ring_all_reduce(numbers, rank, ranks, send, receive)`. Every rank calls it with its own `numbers`, a tensor with one dimension and as many entries as on the other ranks. It returns a tensor with the sum over all ranks, on every rank. Work by messages only:
#
# - `send(tensor, to)` sends a copy to rank `to` and returns at once, so you may change the tensor afterwards;
# - `receive(source)` waits for the next message from rank `source` and returns it, a tensor with one dimension. Messages from one rank arrive in the order in which they were sent.
#
# In a ring, rank r sends to rank r + 1 only, and the last one to rank 0 (or all the other way round). You may overwrite `numbers`. What goes through `send` is counted, on each rank: a ring sends 2(p−1) chunks a rank, all to one neighbour. A right sum by another way, such as rank 0, earns 4 of the 5 points.
#
# The number of entries need not be a multiple of the number of ranks: some chunks then have one entry more, and may even be empty. `tensor.tensor_split(ranks)` cuts so. You may also pad with zeros to equal chunks.


# %% task="04-ring"
def ring_all_reduce(numbers, rank, ranks, send, receive):
    """Return the sum of `numbers` over all ranks, on every rank.

    numbers: a tensor with one dimension. rank: this rank. ranks: how many there are, >= 2.
    send(tensor, to) and receive(source): the only way to the other ranks.
    """
    ### BEGIN SOLUTION
    total = numbers.clone()
    chunks = total.tensor_split(ranks)  # views: what changes in them changes in `total`
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(2 * (ranks - 1)):
        send(chunks[(rank - step) % ranks], following)
        arrived, place = receive(previous), chunks[(rank - step - 1) % ranks]
        place.copy_(place + arrived if step < ranks - 1 else arrived)
    return total
    ### END SOLUTION


# %% [markdown]
# Do all ranks hold the sum, and does none send more than its share?

# %% test="04-ring"
check("04-ring")

# %% [markdown]
# ## Task 2: average the gradients (4 points)
#
# `backward()` has run on every rank, on that rank's share of the batch. Write `average_gradients(model)`, which every rank calls: afterwards the gradient of each parameter is the average over all ranks, whatever their number. The weights stay as they are.
#
# A parameter may have no gradient (`parameter.grad is None`): it is frozen, or took no part. That is so on all ranks or on none. It must have none afterwards either.
#
# The process group is there. Use `torch.distributed`, here `dist`, as you like.


# %% task="04-average"
def average_gradients(model):
    """Replace each gradient of the model by its average over all ranks."""
    import torch.distributed as dist

    ### BEGIN SOLUTION
    world = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(world)
    ### END SOLUTION


# %% [markdown]
# Do two ranks have the average, and three, and a model with frozen parts?

# %% test="04-average"
check("04-average")

# %% [markdown]
# ## Task 3: make all ranks start equal (4 points)
#
# Each rank has made the same kind of model and an optimizer for it, but has other numbers in it. Write `start_equal(model)`, which every rank calls: afterwards every rank has what rank 0 had.
#
# A model holds more than what is trained. Frozen parameters count, and so does every buffer: what BatchNorm keeps, and what other modules keep, saved in a checkpoint or not. The optimizer exists already and refers to the parameters, so they must stay the same objects.


# %% task="04-start"
def start_equal(model):
    """Give every rank what rank 0's model holds."""
    import torch.distributed as dist

    ### BEGIN SOLUTION
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    ### END SOLUTION


# %% [markdown]
# Are the ranks equal, to rank 0, and do their optimizers still work?

# %% test="04-start"
check("04-start")

# %% [markdown]
# ## Done?
#
# Tasks 3 and 2 are DDP without its buckets: an equal start, then an average after each backward pass. Task 1 is what the average is made of. One way to solve each task is in the [solution of exercise 04](../solutions/04_ddp_from_scratch.ipynb). Compare it with yours after you have tried.
