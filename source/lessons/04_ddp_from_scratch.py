# ---
# jupyter:
#   course:
#     rows: [P4]
#     minutes: {read: 40, do: 30}
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
# # DDP from scratch: one process a device, and nobody in charge
#
# After this lesson you can turn a training script for one device into one for many, first by hand and then with DistributedDataParallel, and prove that it still computes the same gradients.
#
# | | |
# |---|---|
# | **Time** | 40 minutes to read, 30 to do; the exercise comes on top |
# | **You should know** | ranks, `launch`, all-reduce ([lesson 00](00_start_here.ipynb)); `send`, `recv` and barriers ([lesson 02](02_two_devices_one_sum.ipynb)); a training step in PyTorch |
# | **You will** | use four collectives · build an all-reduce from messages and count its bytes · average gradients by hand · let DDP do it, and prove when it does it · read a trace of one backward pass · run the same program under `torchrun` |
# | **Runs on** | no GPU, or one: two pinned cores over gloo · two GPUs or more: the GPUs over NCCL (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import contextlib
import difflib
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_utils import plots
from course_utils.datasets import mnist
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, launch
from course_utils.timing import Comparison, Timing

plots.use_style()
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"


def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# %% [markdown]
# ## How processes find each other
#
# In **data parallel** training every device has a copy of the model, a **replica**, and computes on its share of the **global batch**: all samples of one step, over all ranks. Here each replica lives in a process of its own, a rank. No rank is in charge.
#
# First they must find each other. That is the **rendezvous**: each rank gets four settings in its environment, goes to the same address, and waits there until all have come. Then they are a **process group**. So far `launch` did that for you. With `init=False` your function does it.


# %%
# NBVAL_CHECK_OUTPUT
def meet():
    settings = {name: name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT")}
    settings |= {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    before = dist.is_initialized()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # waits for all
    met = f"in a group {before} -> {dist.is_initialized()}: {dist.get_rank()} of {dist.get_world_size()}"
    dist.barrier()  # who leaves at once takes away the address where the others still look
    dist.destroy_process_group()
    return settings, met


for settings, met in launch(meet, 2, init=False):
    print(met, settings)

# %% [markdown]
# `MASTER_ADDR` and `MASTER_PORT` are where to meet. The name is old: whoever listens there introduces the ranks to each other and trains like everybody else. gloo (for cores) or NCCL (for NVIDIA GPUs) then carries the messages.
#
# ## Four collectives, on four numbers
#
# - **Broadcast**: one rank's tensor goes to all.
# - **All-reduce**: all end with the sum.
# - **All-gather**: all end with everybody's tensor.
# - **Reduce-scatter**: the sum again, but each rank keeps only its part of it: rank $r$ part $r$.
#
# **Predict.** Rank 0 brings `[1, 2, 3, 4]`, rank 1 brings `[10, 20, 30, 40]`. What does rank 1 hold after each of the four? In which, if any, do the ranks end with different things?


# %%
# NBVAL_CHECK_OUTPUT
def four_collectives():
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([1.0, 2.0, 3.0, 4.0], device=my_device()) * 10**rank
    copy, total = mine.clone(), mine.clone()
    everybody, part = [torch.empty_like(mine) for _ in range(world)], mine.new_empty(4 // world)
    dist.broadcast(copy, src=0)  # in place, as the next one
    dist.all_reduce(total)
    dist.all_gather(everybody, mine)
    dist.reduce_scatter(part, list(mine.tensor_split(world)))
    results = {"broadcast": copy, "all-reduce": total}
    results |= {"all-gather": torch.stack(everybody), "reduce-scatter": part}
    return {name: held.int().tolist() for name, held in results.items()}


for name, *held in zip(
    ["broadcast", "all-reduce", "all-gather", "reduce-scatter"],
    *(report.values() for report in launch(four_collectives, 2)),
    strict=True,
):
    print(f"{name:14}  rank 0: {held[0]}\n{'':14}  rank 1: {held[1]}")

# %% [markdown]
# Only reduce-scatter leaves different things. Put an all-gather of the parts behind it, and you have an all-reduce. Remember that: it is how the next cell works.
#
# ## An all-reduce from messages
#
# The obvious way: everybody sends to rank 0, the **root**; it adds, and sends the sum back. A **ring** has no root. Each rank cuts its tensor into as many chunks as there are ranks, and talks to its neighbours only: in each step it sends one chunk to the next rank and receives one from the rank before.
#
# - In the first $p - 1$ steps (with $p$ ranks) what arrives is *added* to the own chunk, and next passed on. Then each rank has one complete chunk: a reduce-scatter (with the parts one rank on: rank $r$ has chunk $r + 1$).
# - In the next $p - 1$ steps what arrives *replaces* the own chunk: an all-gather.
#
# With three ranks and the chunks 0, 1, 2, this is what each rank sends to the next one (rank 2 to rank 0):
#
# | step | rank 0 sends | rank 1 sends | rank 2 sends | what arrives |
# |---|---|---|---|---|
# | 0 | chunk 0 | chunk 1 | chunk 2 | is added |
# | 1 | chunk 2 | chunk 0 | chunk 1 | is added |
# | 2 | chunk 1 | chunk 2 | chunk 0 | replaces |
# | 3 | chunk 0 | chunk 1 | chunk 2 | replaces |
#
# Follow chunk 0: rank 0 sends its own to rank 1, which adds its own and sends the sum to rank 2. There it is complete, and travels on to ranks 0 and 1. It starts with the chunk of its own number; after that, each rank sends what it received in the step before. So the number of the chunk is rank − step, counted around the circle (`% p`).
#
# `isend` and `irecv` return at once with a request, and `wait` waits for it. That matters here: if every rank sent first and waited until it was received, nobody would come to receive. `batch_isend_irecv` starts both together.
#
# **Predict.** A float32 number has 4 bytes, so the four numbers have 16. How many bytes does each rank send with 2 ranks, by the ring and by the root? How many with 4 ranks? (Four ranks here are **oversubscribed**: they may share two cores. That spoils times, not counts.)


# %%
def start_both(give, to, take, source):
    """Send one tensor and receive another at the same time; returns when both are done."""
    pair = [dist.P2POp(dist.isend, give, to), dist.P2POp(dist.irecv, take, source)]
    for request in dist.batch_isend_irecv(pair):
        request.wait()


def ring_all_reduce(numbers):
    """Sum `numbers` over the ranks, in place. Returns the bytes that this rank has sent."""
    rank, p, sent = dist.get_rank(), dist.get_world_size(), 0
    chunks = numbers.tensor_split(p)  # views: what changes in them changes in `numbers`
    for step in range(2 * (p - 1)):
        give, take = chunks[(rank - step) % p], chunks[(rank - step - 1) % p]
        arrived = torch.empty_like(take)
        start_both(give, (rank + 1) % p, arrived, (rank - 1) % p)
        sent += give.nbytes
        take.copy_(take + arrived if step < p - 1 else arrived)
    return sent


def root_all_reduce(numbers):
    """The same by way of rank 0."""
    rank, p, sent = dist.get_rank(), dist.get_world_size(), 0
    if rank > 0:
        dist.send(numbers, dst=0)
        dist.recv(numbers, src=0)
        return numbers.nbytes
    for other in range(1, p):
        arrived = torch.empty_like(numbers)
        dist.recv(arrived, src=other)
        numbers += arrived
    for other in range(1, p):
        dist.send(numbers, dst=other)
        sent += numbers.nbytes
    return sent


# %%
# NBVAL_CHECK_OUTPUT
def count_bytes(n):
    rank, sent = dist.get_rank(), {}
    for way in (ring_all_reduce, root_all_reduce):
        numbers = 10.0**rank * torch.arange(1, n + 1, device=my_device())
        right = numbers.clone()
        dist.all_reduce(right)
        sent[way.__name__] = way(numbers)
        assert torch.allclose(numbers, right, rtol=1e-6), f"{way.__name__} is wrong on rank {rank}"
    return sent, numbers.int().tolist()


for p in (2, 4):
    reports = launch(count_bytes, p, 4, oversubscribe=p > 2)
    print(f"{p} ranks, all hold {reports[0][1]}")
    for way in ("ring_all_reduce", "root_all_reduce"):
        print(f"    {way}: bytes sent by rank 0, 1, …: {[sent[way] for sent, _ in reports]}")
    assert all(sent["ring_all_reduce"] == 2 * (p - 1) / p * 16 for sent, _ in reports)

# %% [markdown]
# With 2 ranks the two ways cost the same, with 4 they do not. Let the tensor have $n$ bytes. In the ring each rank sends $2(p-1)$ chunks of $n/p$ bytes: $2\frac{p-1}{p}n$, which never reaches $2n$. The root sends $(p-1)n$ (and receives as much): each new rank makes its work longer, while all others wait for it. Now with more ranks, and 840 numbers, which all of these $p$ divide.

# %%
RANKS = [2, 3, 4, 6, 8]
busiest = {"ring_all_reduce": [], "root_all_reduce": []}
for p in RANKS:
    reports = launch(count_bytes, p, 840, oversubscribe=p > 2)
    for way, counts in busiest.items():
        counts.append(max(sent[way] for sent, _ in reports) / (840 * 4))

fig, ax = plt.subplots()
for label, counts in zip(["ring", "by way of the root"], busiest.values(), strict=True):
    ax.plot(RANKS, counts, label=f"{label}: counted", linestyle="")
smooth = np.linspace(2, 8, 50)
ax.plot(smooth, 2 * (smooth - 1) / smooth, label="2(p−1)/p", marker="", color=plots.COLOURS[0])
ax.plot(smooth, smooth - 1, label="p−1", marker="", color=plots.COLOURS[1], linestyle="--")
ax.set(xlabel="ranks p", ylabel="bytes sent by the busiest rank\n(times the tensor's bytes)")
ax.set_xticks(RANKS)
ax.set_title("A ring's busiest rank sends less than twice the tensor")
ax.legend()
plots.show(
    fig,
    name="bytes-of-an-all-reduce",
    alt="Bytes sent by the busiest rank against the number of ranks, in units of the tensor. "
    "The ring stays below 2; the root grows in a straight line, to 7 with 8 ranks.",
)
print("ranks             ", *(f"{p:5}" for p in RANKS))
for way, counts in busiest.items():
    print(f"{way:18}", *(f"{c:5.2f}" for c in counts))

# %% [markdown]
# The markers were counted, the lines are the formulas. But a ring takes $2(p-1)$ steps, one after the other, and for tiny tensors a message's start costs more than its bytes. There a tree needs fewer: pairs of ranks add, then pairs of pairs, and the sum goes back the same way. With 8 ranks these are 6 steps, not 14. NCCL has [both, and more, and chooses](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-algo).
#
# ## A script for one device
#
# Here is a training script as you know it. It learns digits, ten steps of 64 images each. It returns the loss and the gradients of each step and the weights at the end, so that we can compare.


# %%
def make_model():
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(dtype):
    images, labels = (torch.from_numpy(each[:640]) for each in mnist()[0])
    return images.flatten(1).to(my_device(), dtype) / 255, labels.long().to(my_device())


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu().numpy()


def train_alone(dtype=torch.float32, steps=10, batch=64):
    torch.manual_seed(0)
    model = make_model().to(my_device(), dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits(dtype)
    losses, seen = [], []
    for step in range(steps):
        share = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        seen.append(flat(p.grad for p in model.parameters()))
        optimizer.step()
        losses.append(loss.item())
    return losses, seen, flat(model.parameters())


# Each rank does all of it alone here; one of them is enough.
(alone, gradients_alone, weights_alone), _ = launch(train_alone, 2)
print("losses on one device:", np.round(alone, 4).tolist())

# %% [markdown]
# ## Diff 1: average the gradients by hand
#
# What must change, so that two ranks do this together? Three things. All replicas must **start equal**; each rank takes **its share** of the batch; and the gradients are **averaged** before the optimizer steps. (A fourth difference is for the log only: each rank computes the loss of its share, so the logged one is averaged too.)
#
# Why the average? The loss is a mean over the batch, so its gradient is a mean over samples. The mean over 64 samples is the average of the means over two *equal* shares of 32.
#
# **Predict.** After the first step, each optimizer steps on its own, with no word to the other rank. Must the weights be sent again after each step to stay equal?


# %%
def average(tensor):
    """The average of a tensor over all ranks."""
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train_by_hand(dtype=torch.float32, steps=10, batch=64):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # as when nobody sets a seed: every rank draws other weights
    model = make_model().to(my_device(), dtype)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits(dtype)
    losses, seen = [], []
    for step in range(steps):
        share = slice(step * batch + rank, (step + 1) * batch, world)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = average(parameter.grad)
        seen.append(flat(p.grad for p in model.parameters()))
        optimizer.step()
        losses.append(average(loss).item())
    return losses, seen, flat(model.parameters())


def show_diff(old, new):
    before, after = (inspect.getsource(fn).splitlines() for fn in (old, new))
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(line)


show_diff(train_alone, train_by_hand)
(by_hand, _, weights), (_, _, weights_1) = launch(train_by_hand, 2)
print("\nlosses by hand:", np.round(by_hand, 4).tolist())
print(
    "largest difference of the weights after ten steps, rank 0 to rank 1:",
    abs(weights - weights_1).max(),
)
assert np.array_equal(weights, weights_1)

# %% [markdown]
# The weights need not be sent again: equal weights, and equal gradients through the same optimizer, stay equal, to the last bit.
#
# ## Diff 2: DDP
#
# **DistributedDataParallel**, DDP for short, is a wrapper around the model that does two of the three. What follows is the whole difference to the version by hand.


# %%
def train_ddp(dtype=torch.float32, steps=10, batch=64):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # as when nobody sets a seed: every rank draws other weights
    model = DistributedDataParallel(make_model().to(my_device(), dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits(dtype)
    losses, seen = [], []
    for step in range(steps):
        share = slice(step * batch + rank, (step + 1) * batch, world)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[share]), labels[share])
        loss.backward()
        seen.append(flat(p.grad for p in model.parameters()))
        optimizer.step()
        losses.append(average(loss).item())
    return losses, seen, flat(model.parameters())


show_diff(train_by_hand, train_ddp)
(ddp, _, weights_ddp), _ = launch(train_ddp, 2)
print("\nlosses with DDP:", np.round(ddp, 4).tolist())

# %% [markdown]
# Broadcast and averaging have moved into the wrapper. The shares have not: **DDP never looks at your data**.
#
# **Predict.** You forget to split the batch: every rank takes all 64 images. Is there an error? How does the averaged gradient compare with that of one device?


# %%
# NBVAL_CHECK_OUTPUT
def forgot_to_split():
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model().to(my_device()))
    images, labels = digits(torch.float32)
    F.cross_entropy(model(images[:64]), labels[:64]).backward()
    return len(images[:64]), flat(p.grad for p in model.parameters())


reports = launch(forgot_to_split, 2)
print("no error; images that the ranks computed on:", sum(count for count, _ in reports))
same = all(abs(found - gradients_alone[0]).max() < 1e-6 for _, found in reports)
print("the gradient is that of one device with 64 images:", same)
assert same

# %% [markdown]
# Twice the work for the same gradient, and only the clock could tell you. Lesson 05 has the tool that splits, `DistributedSampler`.
#
# ## Equals one device, but not to the last bit
#
# A computer rounds after every addition, so the order of the additions matters, and two ranks add in another order than one. Four numbers, chosen so that you can do it in your head: near 100 million, float32 has only every eighth whole number; float64 has them all.
#
# **Predict.** One device adds 100 million, 1, −100 million, 1, in this order. Of two ranks one adds the first and the third number, the other the second and the fourth; then the two sums are added. What does each get in float32? In float64?

# %%
# NBVAL_CHECK_OUTPUT
for dtype in (torch.float32, torch.float64):
    a, b, c, d = torch.tensor([1e8, 1, -1e8, 1], dtype=dtype)
    print(f"{dtype}: one device {((a + b) + c) + d:g}, two ranks {(a + c) + (b + d):g}")

# %% [markdown]
# So a comparison needs a tolerance, and float64 is where to make it: rounding is about half a billion times smaller there, a wrong factor is as large as ever. Now the gradients of the first step, of all three versions: the cell asserts that they agree to 1e-12 in float64 and to 1e-6 in float32, and that the largest gradient is over a thousand times either tolerance.


# %%
def first_gradients(dtype):
    return [train(dtype, steps=1)[1][0] for train in (train_alone, train_by_hand, train_ddp)]


for dtype, tolerance in {torch.float64: 1e-12, torch.float32: 1e-6}.items():
    one, *others = launch(first_gradients, 2, dtype)[0]
    by_hand_off, ddp_off = (abs(one - other).max() for other in others)
    print(f"{dtype}, largest difference: by hand {by_hand_off:.1e}, DDP {ddp_off:.1e}")
    assert max(by_hand_off, ddp_off) < tolerance < abs(one).max() / 1000
print(f"weights after ten steps, float32, DDP: {abs(weights_alone - weights_ddp).max():.1e}")

# %% [markdown]
# ## What DDP does at the start
#
# DDP broadcasts the parameters of rank 0 when it is made. Does it watch over them later?
#
# **Predict.** After wrapping, rank 1 adds 1 to a weight of its own. Then both train one step. Are the ranks equal again?


# %%
# NBVAL_CHECK_OUTPUT
def weights_over_time():
    torch.manual_seed(dist.get_rank())
    layer, held = nn.Linear(2, 1, bias=False).to(my_device()), {}
    held["before DDP"] = layer.weight.tolist()
    model = DistributedDataParallel(layer)
    held["after DDP"] = layer.weight.tolist()
    if dist.get_rank() == 1:
        layer.weight.data += 1
    model(torch.ones(1, 2, device=my_device())).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    held["rank 1 changed it, then a step"] = layer.weight.tolist()
    return held


one, two = launch(weights_over_time, 2)
for moment in one:
    print(f"{moment:31} ranks equal: {one[moment] == two[moment]}")

# %% [markdown]
# DDP sends weights once. After that it keeps equal what is equal, and no more. So whatever changes weights (loading a checkpoint, another initialisation) belongs *before* the wrapper, or must happen alike on all ranks. (Buffers, such as BatchNorm's running averages, are another matter: rank 0's are sent again before a forward pass, see `broadcast_buffers` in [DDP's documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html).)
#
# ## When the ranks talk: in `backward()`, not in `optimizer.step()`
#
# The model below is $w \cdot x$ with $w = (0, 0)$, so its gradient is $x$. Rank 0 has $x = (1, 2)$, rank 1 has $(10, 20)$. The learning rate is 1. We look at gradient and weights around both calls, on both ranks; then again under `no_sync()`, which tells DDP to keep quiet. And to see whether the optimizer talks, rank 1 leaves `optimizer.step()` out.
#
# **Predict.** Fill in the gradient of rank 0 after `backward()`, with and without `no_sync`. Does rank 0 hang in `optimizer.step()`, which rank 1 never calls?


# %%
# NBVAL_CHECK_OUTPUT
def around_the_calls(quiet):
    rank, held = dist.get_rank(), {}
    layer = nn.Linear(2, 1, bias=False).to(my_device())
    nn.init.zeros_(layer.weight)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.tensor([[1.0, 2.0]], device=my_device()) * 10**rank
    with model.no_sync() if quiet else contextlib.nullcontext():
        loss = model(x).sum()
        held["gradient before backward()"] = layer.weight.grad
        loss.backward()
    held["gradient after backward()"] = layer.weight.grad[0].tolist()
    if rank == 0:
        optimizer.step()
    held["weights after rank 0's step()"] = (layer.weight[0] + 0.0).tolist()
    return held


for quiet in (False, True):
    print("with no_sync():" if quiet else "DDP as it is:")
    one, two = launch(around_the_calls, 2, quiet)
    for moment in one:
        print(f"    {moment:30} rank 0: {one[moment]!s:15} rank 1: {two[moment]}")

# %% [markdown]
# The average is there after `backward()`, before any optimizer is asked. (On GPUs it may still be under way when `backward()` returns, but in the GPU's queue ahead of whatever uses it; see the [notes on DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html).) `optimizer.step()` is local: rank 0 took it alone and nobody waited; now the ranks differ, and DDP will not mend that. Under `no_sync()` each rank keeps its own gradient. That is useful when several backward passes make one step (lesson 05): only the last one has to talk. The *forward* pass belongs inside `no_sync()` too, as [its documentation](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync) says, otherwise DDP still talks.
#
# ## Buckets
#
# One message for each tensor would be many small ones. DDP collects gradients in **buckets**. A bucket is closed when it has *reached* `bucket_cap_mb` MiB, and sent as soon as all its gradients are there. Backward goes from the last layer to the first, so the buckets do too; of a layer, here, the bias comes before the weight.
#
# A **communication hook** is a function of yours that DDP calls for each full bucket, in place of its own all-reduce. This one writes the size down and then does what DDP would have done. It returns a **future**, a promise of the averaged tensor: DDP waits for the tensor at the end of backward.
#
# **Predict.** The model has 8 layers of a little over 1 MiB each (512 × 512 float32 weights and 512 biases). How many buckets with a cap of 100 MiB, of 2, of 0.5?


# %%
# NBVAL_CHECK_OUTPUT
def make_deep():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(my_device())


def bucket_sizes(cap):
    model, sizes = DistributedDataParallel(make_deep(), bucket_cap_mb=cap), []

    def note_and_average(_, bucket):
        sizes.append(round(bucket.buffer().nbytes / 2**20, 3))
        bucket.buffer().div_(dist.get_world_size())
        request = dist.all_reduce(bucket.buffer(), async_op=True)  # returns at once
        return request.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, note_and_average)
    for _ in range(2):  # after the first pass DDP sorts its buckets by when gradients came
        sizes.clear()
        model(torch.ones(1, 512, device=my_device())).sum().backward()
    return sizes


buckets = {}
for cap in (100, 2, 0.5, None):
    sizes, _ = launch(bucket_sizes, 2, cap)
    buckets[cap] = len(sizes)
    print(f"cap {cap!s:>4} MiB: {len(sizes)} buckets, in MiB: {sizes}")

# %% [markdown]
# A tensor is never cut, so a layer of 1 MiB is a bucket even under a cap of 0.5. The last line is the default: 25 MiB, but 1 MiB for the first bucket, so that something leaves early.
#
# ## Overlap, seen in a trace
#
# Why not wait for one big bucket? While the first bucket travels, backward can already compute the next gradients. The profiler writes down what a rank does, and when: here one backward pass with 4 buckets.
#
# **Predict.** Of four all-reduces, how many does DDP ask for before the last gradient is there?


# %%
# NBVAL_CHECK_OUTPUT
def trace(cap):
    """What rank 0 did in one backward pass: (name, start, stop), in ms since it began."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler need not announce itself
    model = DistributedDataParallel(make_deep(), bucket_cap_mb=cap)
    x = torch.ones(256, 512, device=my_device())
    for _ in range(2):
        model(x).sum().backward()
    dist.barrier()
    with torch.profiler.profile() as profiler:
        loss = model(x).sum()
        with torch.profiler.record_function("backward()"):
            loss.backward()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    begin = next(start for name, start, _ in events if name == "backward()")
    return [(name, (a - begin) / 1000, (b - begin) / 1000) for name, a, b in events]


events, _ = launch(trace, 2, 2)  # a cap of 2 MiB: four buckets
rows = {
    "all of backward()": ["backward()"],
    "gradient of a layer": ["AddmmBackward0"],
    "all-reduce asked for": ["c10d::allreduce_"],
    "all-reduce runs": ["gloo:all_reduce", "nccl:all_reduce"],
}
spans = {
    row: sorted((a, b) for name, a, b in events if name in wanted) for row, wanted in rows.items()
}
last_gradient = max(stop for _, stop in spans["gradient of a layer"])
asked = [start for start, _ in spans["all-reduce asked for"]]
early = sum(start < last_gradient for start in asked)
print("all-reduces in this backward pass:", len(asked))
print("of them asked for before the last gradient was there:", early)
assert early == len(asked) - 1

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
for line, bars in enumerate(spans.values()):
    lanes = len(bars) if line == len(spans) - 1 else 1  # all-reduces overlap: a lane for each
    height = 0.7 / lanes
    for number, (start, stop) in enumerate(bars):
        y = line - 0.35 + (number % lanes + 0.5) * height
        ax.barh(y, stop - start, left=start, height=height, color=plots.COLOURS[line], alpha=0.6)
        ax.plot(
            [start] * 2, [y - height / 2, y + height / 2], color="black", marker="", ls="-", lw=1.5
        )
ax.axvline(last_gradient, color="black", linestyle=":", marker="")
ax.set_yticks(range(len(spans)), list(spans))
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="time since backward() was called (ms)", ylabel="rank 0")
ax.set_title(f"{early} of {len(asked)} all-reduces are asked for before the last gradient is there")
plots.show(
    fig,
    name="overlap-in-a-trace",
    alt="Timeline of one backward pass on rank 0: the gradients of 8 layers one after another, "
    f"and {len(asked)} all-reduces, of which {early} are asked for before the last gradient.",
)
for row, bars in spans.items():
    print(f"{row:21}", "  ".join(f"{a:.1f}–{b:.1f}" for a, b in bars))

# %% [markdown]
# A black mark is where a bar starts; the dotted line is where the last gradient is done. What is right of it was not hidden: the last bucket is always asked for when there is nothing left to compute. In *all-reduce runs* each bucket has a lane, the first on top; its bar includes waiting, since rank 1 has to come with the same bucket. On cores the gradients may pause, and asking may take long, while all-reduces run: gloo's thread needs the same core.
#
# ## Is overlap worth it?
#
# One bucket sends everything at the end; many send early, but each message costs something to start. So time it, the ways taking turns. *No messages* is a pass under `no_sync()`.
#
# On cores there is a catch: gloo's copying and adding runs on the core that computes. What it takes, backward loses. So there is a second table, with a **made-up link** that needs no core: before each real all-reduce, a helper thread sleeps, 8 ms a message and 6 ms a MiB, one message after the other. (On GPUs the link is real already, and the second table is left out.)
#
# **Predict.** Let backward compute for 80 ms and take only the made-up link's sleep. One bucket of 8 MiB: 80 ms, then 8 + 48. With 4 buckets, of 2 MiB each, the first can leave after 20 ms; with 8 buckets after 10. When is the last one through?
#
# (A ratio is taken within each round, and the middle one is shown; so it can differ from the ratio of two medians.)


# %%
def made_up_link():
    """A communication hook: a network that takes time but no core, one bucket after the other."""
    lane = ThreadPoolExecutor(1)  # one helper thread, so one message at a time

    def carry(buffer, arrived):
        try:
            time.sleep(0.008 + 0.006 * buffer.nbytes / 2**20)
            dist.all_reduce(buffer)
            arrived.set_result(buffer.div_(dist.get_world_size()))  # keeps the promise
        except Exception as error:
            arrived.set_exception(error)

    def hook(_, bucket):
        arrived = torch.futures.Future()
        lane.submit(carry, bucket.buffer(), arrived)
        return arrived

    return hook


def race(caps, with_link, rounds):
    models = {n: DistributedDataParallel(make_deep(), bucket_cap_mb=c) for n, c in caps.items()}
    for model in models.values() if with_link else ():
        model.register_comm_hook(None, made_up_link())
    x = torch.ones(768, 512, device=my_device())
    models = {"no messages": models["1 bucket"], **models}
    seconds = {name: [] for name in models}
    busy = {name: [] for name in models}  # time of this rank's core, waiting left out
    for number in range(-1, rounds):  # the first does not count
        for name in list(models)[:: 1 if number % 2 else -1]:
            model = models[name]
            with model.no_sync() if name == "no messages" else contextlib.nullcontext():
                loss = model(x).sum()
                dist.barrier()
                start, core = time.perf_counter(), time.process_time()
                loss.backward()
                loss.item()  # wait for a GPU
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    busy[name].append(time.process_time() - core)
    return seconds, busy


CAPS = {f"{n} bucket{'s' * (n > 1)}": cap for cap, n in buckets.items() if cap}
links = {"gloo on two cores": False, "made-up link": True}
if slots(2)[0].kind == "gpu":
    links = {"NCCL": False}
taken = {}
for link, with_link in links.items():
    clocks, _ = launch(race, 2, CAPS, with_link, 5)
    taken[link], busy = (
        Comparison({name: Timing(tuple(runs)) for name, runs in clock.items()}) for clock in clocks
    )
    print(f"{link}\n{taken[link]}")
    print("rank 0's core worked:", ", ".join(f"{busy[n].short()} with {n}" for n in busy), "\n")

# %%
fig, ax = plt.subplots()
found = []
for shift, (link, result) in zip((-0.06, 0.06), taken.items(), strict=False):
    ratios = [result.ratio(name, "no messages") for name in CAPS]
    middle = [ratio.median for ratio in ratios]
    spread = [[r.median - r.low for r in ratios], [r.high - r.median for r in ratios]]
    ax.errorbar(
        np.arange(len(CAPS)) + shift, middle, yerr=spread, label=link, capsize=3, linestyle=""
    )
    best = min(CAPS, key=lambda name: result.ratio(name, "no messages").median)
    gain = result.ratio("1 bucket", best)
    if min(middle) < 1:  # faster than computing alone: something else was on the cores
        verdict = "machine busy, not judged"
    elif gain.low > 1:
        verdict = f"best with {best}, {min(middle):.2f}× against {middle[0]:.2f}× with 1"
    else:
        verdict = "no clear gain over 1 bucket"
    found.append(f"{link}: {verdict}")
ax.axhline(1, color="black", linestyle=":", marker="")
ax.set_xticks(range(len(CAPS)), list(CAPS))
ax.set(xlabel="how the gradients are sent", ylabel="time ÷ time without messages")
ax.set_title("\n".join(found))
ax.legend()
plots.show(
    fig,
    name="what-overlap-gains",
    alt="Time of a backward pass over the time without messages, against the number of buckets. "
    + "; ".join(found) + ".",
)  # fmt: skip

# %% [markdown]
# The dotted line is the pass without messages: no way can beat it, and where one seems to, other programs were on your cores. The thin bars are the middle half of the rounds. The answers to the prediction: 136 ms with one bucket, 20 + 4·20 = 100 with four, 10 + 8·14 = 122 with eight. So overlap pays, until starting messages costs more than it hides. Where the turn comes depends on the link and on the time that backward computes: on your machine that is another one, and the real all-reduce comes on top.
#
# Over gloo alone two things mix. What buckets hide there is *waiting*: for the other rank, and for bytes on their way. What they cannot hide is *work*: compare the last line of each table with and without messages. That is the rule to keep: **overlap hides time on the link, not work on the device**.
#
# ## Break it: one rank skips `backward()`
#
# A rank meets a bad batch, and its author wrote `if loss is not bad: loss.backward()`. You have seen that a skipped `optimizer.step()` hangs nobody. This one?


# %%
# NBVAL_CHECK_OUTPUT
def one_rank_skips():
    model = DistributedDataParallel(nn.Linear(2, 1).to(my_device()))
    loss = model(torch.ones(1, 2, device=my_device())).sum()
    if dist.get_rank() == 0:  # rank 1 found its batch bad
        loss.backward()  # a GPU only queues its part, and waits in the next line
        loss.item()


try:
    launch(one_rank_skips, 2, timeout=3)
except LaunchTimeout as error:
    report = str(error)
    print("ended by the deadline: True")
    print("rank 0 waits:", "rank 0 waits in" in report)
    print("rank 1 has returned:", "rank 1 has returned" in report)
else:
    raise AssertionError("a skipped backward pass went unnoticed")

# %% [markdown]
# Rank 0 waits for a bucket that rank 1 never sends. The cure: decide together. Every rank calls `backward()` in every step; a rank with a bad batch brings zeros (`(0 * loss).backward()` does if the loss is finite), or all ranks agree first, by an all-reduce of a flag, to skip. With zeros DDP still divides by *all* ranks, so the step is smaller than the average over the good samples; lesson 05 weights by counts. Lesson 06 has a dozen such programs.
#
# ## The same program under `torchrun`
#
# `launch` is for notebooks. From a shell, and for more than one machine, PyTorch's [`torchrun`](https://docs.pytorch.org/docs/stable/elastic/run.html) starts the ranks, sets the same environment, and ends all when one fails. Here the functions of this page go into a file, `train.py`. Only its last lines are new, and printed below: the rendezvous that you did by hand above.

# %%
# NBVAL_CHECK_OUTPUT
END = """
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # a GPU for each rank of this machine
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
losses, *_ = train_ddp()
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""
imports = """
import json, os, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from course_utils.datasets import mnist

"""
parts = (my_device, make_model, digits, flat, average, train_ddp)
PROGRAM = imports + "\n".join(inspect.getsource(part) for part in parts) + END


def torchrun(program, ranks, timeout=120):
    """What the ranks print when `program` runs under torchrun; it is ended after `timeout` s."""
    env = os.environ | {"PYTHONPATH": str(Path(plots.__file__).parents[1])}  # for course_utils
    env["OMP_NUM_THREADS"] = "1"  # one core is one device here too
    if slots(ranks)[0].kind != "gpu":
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program)
        how = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} train.py".split()
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        run = subprocess.Popen([sys.executable, *how], cwd=folder, env=env, **pipe)
        try:
            out, err = run.communicate(timeout=timeout)
        finally:
            if run.poll() is None:
                run.terminate()  # torchrun then ends its ranks
                run.wait(timeout=60)
    assert run.returncode == 0, err[-2000:]
    return out


print(END)
from_torchrun = json.loads(torchrun(PROGRAM, 2).splitlines()[-1])
difference = max(abs(a - b) for a, b in zip(from_torchrun, ddp, strict=True))
print("torchrun and launch, largest difference of the losses below 1e-6:", difference < 1e-6)
assert difference < 1e-6

# %% [markdown]
# In a shell the line is `torchrun --standalone --nproc-per-node 2 train.py`. (`python -m torch.distributed.run`, as in the cell, is the same program; it makes sure that it belongs to this Python.) `--standalone` finds a free port on this machine. With two machines you [name a meeting point](https://docs.pytorch.org/docs/stable/elastic/run.html) that both can reach, by `--rdzv-endpoint`; there `RANK` (number among all) differs from `LOCAL_RANK` (number on this machine, which picks the GPU).
#
# ## Then → now
#
# Older tutorials start the ranks with `torch.distributed.launch`. It is deprecated, as its own warning says below; a script for it reads `--local-rank` from its arguments, one for `torchrun` [reads `LOCAL_RANK`](https://docs.pytorch.org/docs/stable/elastic/run.html) from the environment. Others call `torch.multiprocessing.spawn`. Its fresh processes import your function from your program's file, and a notebook has none; the second cell does what a notebook does, it runs code that is in no file.

# %% then="python -m torch.distributed.launch" now="torchrun" since="PyTorch 1.9"
# NBVAL_CHECK_OUTPUT
from torch.distributed import launch as old_launcher

with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
    warnings.simplefilter("always")
    with contextlib.suppress(SystemExit):  # --help ends the program
        old_launcher.main(["--help"])
old = [str(w.message) for w in caught if issubclass(w.category, FutureWarning)]
print("then:", old[0].splitlines()[0])
assert "deprecated" in old[0] and "torchrun" in " ".join(old)
print("now: torchrun ran this lesson's program:", len(from_torchrun) == 10)

# %% then="mp.spawn(work, nprocs=2)" now="launch(work, 2)" since="PyTorch 1.0 (it never ran a cell's function)"
# NBVAL_CHECK_OUTPUT
CELL = """
import torch.multiprocessing as mp
def work(rank):
    return rank
mp.spawn(work, nprocs=1)
"""
done = subprocess.run([sys.executable, "-c", CELL], capture_output=True, text=True, timeout=120)
errors = [line for line in done.stderr.splitlines() if "Can't get attribute 'work'" in line]
print("then: mp.spawn could not find the function:", done.returncode != 0 and len(errors) > 0)
assert done.returncode != 0 and errors, done.stderr[-2000:]


def work():
    return dist.get_rank()


print("now: launch runs it by value:", launch(work, 2))

# %% [markdown]
# ## What this machine cannot show
#
# Messages between cores go through memory that both can reach. Between GPUs they go over NVLink, PCIe or a network, and how large a bucket should be depends on that link. How far backward hides them there: **not measured** yet.
#
# ## Exercise
#
# [Exercise 04](../exercises/04_ddp_from_scratch.ipynb): build the ring, average gradients, and make all ranks start equal; each is checked on real ranks. About 40 minutes.
#
# ## Recap
#
# DDP is a process a device, equal weights at the start, and an average of gradients inside `backward()`. A ring spreads the traffic, so that no rank sends twice the tensor however many there are. It equals one device up to the order of additions, if you split the batch into equal shares.
#
# 1. Eight ranks all-reduce 100 MiB by a ring. How much does each send?
# 2. Why does `optimizer.step()` on one rank hang nobody, when `backward()` on one rank does?
# 3. Your colleague sees different weights on two ranks after an hour. Name two causes.
#
# <details><summary>Answers</summary>
#
# 1. $2 \cdot 7/8 \cdot 100 = 175$ MiB.
# 2. Of the two, only `backward()` sends messages: DDP all-reduces each bucket there, and an all-reduce waits for all ranks. The optimizer reads the rank's own gradients.
# 3. One rank changed weights on its own after DDP was made (a checkpoint, an initialisation); one rank stepped when the other did not, or with gradients from under `no_sync()`.
#
# </details>
#
# Go on with [exercise 04](../exercises/04_ddp_from_scratch.ipynb).
