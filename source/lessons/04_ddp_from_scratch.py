# ---
# jupyter:
#   course:
#     rows: [P4]
#     minutes: {read: 30, do: 30}
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
# | **Time** | 30 minutes to read, 30 to do; the exercise comes on top |
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
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import mnist
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, launch
from course_utils.timing import Comparison, Timing

plots.use_style()

# %%
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
# - **Reduce-scatter**: the sum again, but each rank keeps only its part of it.
#
# **Predict.** Rank 0 brings `[1, 2, 3, 4]`, rank 1 brings `[10, 20, 30, 40]`. What does rank 1 hold after each of the four? In which two do the ranks end with different things, if in any?


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
# - In the first $p - 1$ steps (with $p$ ranks) what arrives is *added* to the own chunk, and next passed on. Then each rank has one complete chunk: a reduce-scatter.
# - In the next $p - 1$ steps what arrives *replaces* the own chunk: an all-gather.
#
# `isend` and `irecv` return at once with a request, and `wait` waits for it. That matters here: if every rank sent first and waited until it was received, nobody would come to receive. `batch_isend_irecv` starts both together.


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


# %% [markdown]
# **Predict.** A float32 number has 4 bytes, so the four numbers have 16. How many bytes does each rank send with 2 ranks, by the ring and by the root? How many with 4 ranks? (Four ranks here are **oversubscribed**: they may share two cores. That spoils times, not counts.)


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
# With 2 ranks the two ways cost the same. With 4 they do not. Let the tensor have $n$ bytes. In the ring each rank sends $2(p-1)$ chunks of $n/p$ bytes: $2\frac{p-1}{p}n$, which never reaches $2n$. The root sends $(p-1)n$ (and receives as much): each new rank makes its work longer, while all others wait for it. Now with more ranks, and 840 numbers, which all of these $p$ divide.

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
# The markers were counted, the lines are the formulas. But a ring takes $2(p-1)$ steps, one after the other: for tiny tensors, where a message's start costs more than its bytes, other ways win. NCCL knows several and chooses.
#
# ## A script for one device
#
# Here is a training script as you know it. It learns digits, ten steps of 64 images each. It logs the loss and the gradients of each step, so that we can compare.


# %%
def make_model():
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def digits(dtype):
    (images, labels), _ = mnist()
    pixels = torch.from_numpy(images).flatten(1).to(my_device(), dtype) / 255
    return pixels, torch.from_numpy(labels).long().to(my_device())


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu().numpy()


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
        seen.append(gradients(model))
        optimizer.step()
        losses.append(loss.item())
    return losses, seen


# Each rank does all of it alone here; one of them is enough.
(alone, gradients_alone), _ = launch(train_alone, 2)
print("losses on one device:", np.round(alone, 4).tolist())

# %% [markdown]
# ## Diff 1: average the gradients by hand
#
# What must change, so that two ranks do this together? Three things. All replicas must **start equal**; each rank takes **its share** of the batch; and the gradients are **averaged** before the optimizer steps.
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
        seen.append(gradients(model))
        optimizer.step()
        losses.append(average(loss).item())
    return losses, seen


def show_diff(old, new):
    before, after = (inspect.getsource(fn).splitlines() for fn in (old, new))
    for line in difflib.unified_diff(before, after, lineterm="", n=0):
        if not line.startswith(("---", "+++", "@@")):
            print(line)


show_diff(train_alone, train_by_hand)
(by_hand, gradients_by_hand), other_rank = launch(train_by_hand, 2)
print("\nlosses by hand:", np.round(by_hand, 4).tolist())
assert np.array_equal(gradients_by_hand, other_rank[1]), "both ranks must have the same average"

# %% [markdown]
# The weights need not be sent again: equal weights, and equal gradients through the same optimizer, stay equal. The cell asserts that both ranks had the same gradients in all ten steps.
#
# The loss that each rank computes is that of its share only. It is averaged for the log, and for nothing else.
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
        seen.append(gradients(model))
        optimizer.step()
        losses.append(average(loss).item())
    return losses, seen


show_diff(train_by_hand, train_ddp)
(ddp, gradients_ddp), _ = launch(train_ddp, 2)
print("\nlosses with DDP:", np.round(ddp, 4).tolist())

# %% [markdown]
# Broadcast and averaging have moved into the wrapper. The shares have not: **DDP never looks at your data**. Forget to split it, and every rank trains on the same samples, without an error. (Lesson 05 has the tool for it, `DistributedSampler`.)
#
# ## Equals one device
#
# **Predict.** How far are the gradients of the three versions apart in the first step, in float32? In float64? Exactly 0?


# %%
# NBVAL_CHECK_OUTPUT
def first_gradients(dtype):
    return [train(dtype, steps=1)[1][0] for train in (train_alone, train_by_hand, train_ddp)]


apart = {}
for dtype, tolerance in {torch.float64: 1e-12, torch.float32: 1e-6}.items():
    one, *others = launch(first_gradients, 2, dtype)[0]
    apart[dtype] = [float(abs(one - other).max()) for other in others]
    for name, difference in zip(("by hand", "DDP"), apart[dtype], strict=True):
        print(f"{dtype}, {name}: largest difference below {tolerance}: {difference < tolerance}")
        assert difference < tolerance
    print("    the gradients themselves are larger:", bool(abs(one).max() > 1000 * tolerance))

# %%
for dtype, differences in apart.items():
    print(f"{dtype}: by hand {differences[0]:.1e}, DDP {differences[1]:.1e}")
last = [abs(one - two).max() for one, two in zip(gradients_alone, gradients_ddp, strict=True)]
print(f"float32, DDP, step by step: {last[0]:.1e} at the first, {last[-1]:.1e} at the last")

# %% [markdown]
# Not 0, and nobody made a mistake. A computer rounds after every addition, so the order of the additions matters, and two ranks add in another order than one. Here are four numbers, chosen so that you can do it in your head: near 100 million, float32 has only every eighth whole number.

# %%
# NBVAL_CHECK_OUTPUT
for dtype in (torch.float32, torch.float64):
    a, b, c, d = torch.tensor([1e8, 1, -1e8, 1], dtype=dtype)
    print(f"{dtype}: one device {((a + b) + c) + d:g}, two ranks {(a + c) + (b + d):g}")

# %% [markdown]
# So a comparison needs a tolerance, and float64 is where to make it: rounding is about half a billion times smaller there, a wrong factor is as large as ever.
#
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
# The average is there when `backward()` returns, before any optimizer is asked. `optimizer.step()` is local: rank 0 took it alone and nobody waited; now the ranks differ, and DDP will not mend that. Under `no_sync()` each rank keeps its own gradient. That is useful when several backward passes make one step (lesson 05): only the last one has to talk. The *forward* pass belongs inside `no_sync()` too.
#
# ## Buckets
#
# One message for each tensor would be many small ones. DDP collects gradients in **buckets** of up to `bucket_cap_mb` MiB and sends a bucket as soon as all its gradients are there. Backward goes from the last layer to the first, so the buckets do too.
#
# A **communication hook** is a function of yours that DDP calls for each full bucket, in place of its own all-reduce. This one writes the size down and then does what DDP would have done.
#
# **Predict.** The model has 16 layers of 1 MiB each (512 × 512 float32; the biases are small). How many buckets with a cap of 100 MiB, of 4, of 0.5?


# %%
# NBVAL_CHECK_OUTPUT
def make_deep():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)]).to(my_device())


def bucket_sizes(cap):
    model, sizes = DistributedDataParallel(make_deep(), bucket_cap_mb=cap), []

    def note_and_average(_, bucket):
        sizes.append(round(bucket.buffer().nbytes / 2**20, 1))
        bucket.buffer().div_(dist.get_world_size())
        request = dist.all_reduce(bucket.buffer(), async_op=True)
        return request.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, note_and_average)
    for _ in range(2):  # after the first pass DDP sorts its buckets by when gradients came
        sizes.clear()
        model(torch.ones(1, 512, device=my_device())).sum().backward()
    return sizes


CAPS = {100: "1 bucket", 8: "2 buckets", 4: "4 buckets", 0.5: "16 buckets"}
for cap in CAPS:
    sizes, _ = launch(bucket_sizes, 2, cap)
    print(f"cap {cap:5} MiB: {len(sizes):2} buckets, of {min(sizes)} to {max(sizes)} MiB")
    assert CAPS[cap].startswith(f"{len(sizes)} "), "later cells rely on these numbers"

# %% [markdown]
# The cap is soft: a tensor is never cut, so a layer of 1 MiB is a bucket even under a cap of 0.5. The default is 25 MiB.
#
# ## Overlap, seen in a trace
#
# Why not wait for one big bucket? While the first bucket travels, backward can already compute the next gradients. The profiler writes down what a rank does, and when: here one backward pass with 4 buckets. Nothing in the figure is drawn by hand.
#
# **Predict.** Of four all-reduces, how many start before the last gradient is there?


# %%
# NBVAL_CHECK_OUTPUT
@contextlib.contextmanager
def without_stderr():
    """The profiler announces itself there, by a line that means nothing to us."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def trace(cap):
    """What rank 0 did in one backward pass: (name, start, stop), in ms since it began."""
    model = DistributedDataParallel(make_deep(), bucket_cap_mb=cap)
    x = torch.ones(256, 512, device=my_device())
    for _ in range(2):
        model(x).sum().backward()
    dist.barrier()
    profiler = torch.profiler.profile()
    with without_stderr():
        profiler.start()
    loss = model(x).sum()
    with torch.profiler.record_function("backward()"):
        loss.backward()
    with without_stderr():
        profiler.stop()
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profiler.events()]
    begin = next(start for name, start, _ in events if name == "backward()")
    return [(name, (a - begin) / 1000, (b - begin) / 1000) for name, a, b in events]


events, _ = launch(trace, 2, 4)  # four buckets
rows = {"all of backward()": "backward()", "gradient of a layer": "AddmmBackward0"}
rows |= {"all-reduce asked for": "c10d::allreduce_", "all-reduce travels": "gloo:all_reduce"}
if not any(name == "gloo:all_reduce" for name, _, _ in events):
    rows["all-reduce travels"] = "nccl:all_reduce"
spans = {
    row: sorted((a, b) for name, a, b in events if name == wanted) for row, wanted in rows.items()
}
last_gradient = max(stop for _, stop in spans["gradient of a layer"])
asked = [start for start, _ in spans["all-reduce asked for"]]
early = sum(start < last_gradient for start in asked)
print("all-reduces in this backward pass:", len(asked))
print("of them asked for before the last gradient was there:", early)
print(
    "backward() returned after the last one was asked for:",
    spans["all of backward()"][0][1] > max(asked),
)
assert len(asked) == 4 and early == 3

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
least = spans["all of backward()"][0][1] / 150  # so that the shortest can be seen
for line, (bars, hatch) in enumerate(zip(spans.values(), ["", "", "", "//"], strict=True)):
    for start, stop in bars:
        ax.barh(
            line, max(stop - start, least), left=start, height=0.6, color=plots.COLOURS[line],
            hatch=hatch, edgecolor="white",
        )  # fmt: skip
ax.axvline(last_gradient, color="black", linestyle=":", marker="")
ax.set_yticks(range(len(spans)), list(spans))
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="time since backward() was called (ms)", ylabel="rank 0")
ax.set_title(f"{early} of {len(asked)} all-reduces start before backward has computed all")
plots.show(
    fig,
    name="overlap-in-a-trace",
    alt="Timeline of one backward pass on rank 0: the gradients of 16 layers one after another, "
    f"and {len(asked)} all-reduces, of which {early} start before the last gradient is done.",
)
for row, bars in spans.items():
    print(f"{row:21}", "  ".join(f"{a:.1f}–{b:.1f}" for a, b in bars[:4]), "…" * (len(bars) > 4))

# %% [markdown]
# The dotted line is where the last gradient is done. What is right of it was not hidden: the last bucket always travels alone, since there is nothing left to compute. `backward()` returns when every bucket has come back.
#
# ## Is overlap worth it?
#
# One bucket sends everything at the end; 16 buckets send early but pay for 16 messages. So time it, the ways taking turns. *No messages* is a pass under `no_sync()`: no way can be faster than that for long.
#
# On cores there is a catch: gloo's copying and adding runs on the core that computes. What it takes, backward loses. (The last line of each table counts the core's own work, waiting left out: compare it with and without messages.) A GPU drives its link with a small part of itself. To see what a link of that kind gives, the second table uses a **made-up link**: before each real all-reduce, a helper thread waits 1 ms a message, and 1 s for 400 MiB. Waiting costs no core. (On GPUs the link is real already, and the second table is left out.)
#
# **Predict.** Where does overlap gain more, over gloo alone or over the made-up link? Is 16 better than 4?


# %%
def made_up_link():
    """A communication hook: a network that takes time but no core, one bucket after the other."""
    lane = ThreadPoolExecutor(1)

    def carry(buffer, arrived):
        time.sleep(0.001 + buffer.nbytes / (400 * 2**20))
        dist.all_reduce(buffer)
        arrived.set_result(buffer.div_(dist.get_world_size()))

    def hook(_, bucket):
        arrived = torch.futures.Future()
        task = lane.submit(carry, bucket.buffer(), arrived)
        task.add_done_callback(lambda t: t.exception() and arrived.set_exception(t.exception()))
        return arrived

    return hook


def race(with_link, rounds):
    models = {}
    for cap, name in CAPS.items():
        models[name] = DistributedDataParallel(make_deep(), bucket_cap_mb=cap)
        if with_link:
            models[name].register_comm_hook(None, made_up_link())
    x = torch.ones(256, 512, device=my_device())
    seconds = {"no messages": [], **{name: [] for name in models}}
    busy = {name: [] for name in seconds}  # time of this rank's core, whoever else may use it
    for number in range(-2, rounds):  # the first two do not count
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            model = models.get(name, models["1 bucket"])
            with model.no_sync() if name == "no messages" else contextlib.nullcontext():
                loss = model(x).sum()
                dist.barrier()
                start, core = time.perf_counter(), time.process_time()
                loss.backward()
                loss.item()  # wait for a GPU
                if number >= 0:
                    seconds[name].append(time.perf_counter() - start)
                    busy[name].append(time.process_time() - core)
    return [
        Comparison({name: Timing(tuple(runs)) for name, runs in clock.items()})
        for clock in (seconds, busy)
    ]


links = {"gloo on two cores": False, "made-up link": True}
if slots(2)[0].kind == "gpu":
    links = {"NCCL": False}
taken, tables = {}, []
for link, with_link in tqdm(links.items(), file=sys.stdout):
    (taken[link], busy), _ = launch(race, 2, with_link, 7)
    work = "  ".join(f"{name} {busy[name].short()}," for name in busy).rstrip(",")
    tables.append(f"\n{link}\n{taken[link]}\nwork of rank 0's core: {work}")
print(*tables, sep="\n")

# %%
fig, ax = plt.subplots()
found = []
for link, result in taken.items():
    ratios = [result.ratio(name, "no messages") for name in CAPS.values()]
    middle = [ratio.median for ratio in ratios]
    spread = [[m - r.low for m, r in zip(middle, ratios, strict=True)]]
    spread += [[r.high - m for m, r in zip(middle, ratios, strict=True)]]
    ax.errorbar(range(len(CAPS)), middle, yerr=spread, label=link, capsize=3)
    best = result.ratio("1 bucket", min(CAPS.values(), key=lambda name: result[name].median))
    gained = best.low > 1
    found.append(
        f"{link}: {f'best is {best.median:.2f}× as fast as 1 bucket' if gained else 'no clear gain'}"
    )
ax.axhline(1, color="black", linestyle=":", marker="")
ax.set_xticks(range(len(CAPS)), list(CAPS.values()))
ax.set(xlabel="all-reduces in a backward pass", ylabel="time ÷ time without messages")
ax.set_title("\n".join(found))
ax.legend()
plots.show(
    fig,
    name="what-overlap-gains",
    alt="Time of a backward pass over the time without messages, against the number of buckets. "
    + "; ".join(found) + ".",
)  # fmt: skip

# %% [markdown]
# The line at 1 is the floor. The title says what your machine found; where the bars of two points overlap widely, believe neither. A point below the line means that other programs are on your cores: a rank that often waits gets its turn sooner. (Their work is not in the line *work of rank 0's core*: there, messages always cost.) Over the made-up link one bucket has to pay for the whole transfer after backward, and buckets hide it behind computing; too many pay 1 ms each. Over gloo alone the gain may be small or none, because hiding needs somebody else to do the work. That is the rule to keep: **overlap hides time on the link, not work on the device**.
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
        loss.backward()
        loss.item()


try:
    launch(one_rank_skips, 2, timeout=3)
except LaunchTimeout as error:
    report = str(error)
    print("ended by the deadline: True")
    print("rank 0 waits in backward:", "rank 0 waits in backward" in report)
    print("rank 1 has returned:", "rank 1 has returned" in report)
else:
    raise AssertionError("a skipped backward pass went unnoticed")

# %% [markdown]
# Rank 0 waits for a bucket that rank 1 never sends. The cure: decide together. Every rank calls `backward()` in every step; a rank with a bad batch brings zeros (`(0 * loss).backward()` does if the loss is finite), or all ranks agree first, by an all-reduce of a flag, to skip. Lesson 06 has a dozen such programs.
#
# ## The same program under `torchrun`
#
# `launch` is for notebooks. From a shell, and for more than one machine, PyTorch's `torchrun` starts the ranks, sets the same environment, and ends all when one fails. Here the functions of this page go into a file. Only the last lines are new: the rendezvous that you did by hand above.

# %%
# NBVAL_CHECK_OUTPUT
parts = (my_device, make_model, digits, gradients, average, train_ddp)
PROGRAM = f"""
import json, os, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from course_utils.datasets import mnist

{"".join(inspect.getsource(part) + chr(10) for part in parts)}
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # a GPU for each rank of this machine
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
losses, _ = train_ddp()
if dist.get_rank() == 0:
    print(json.dumps(losses))
dist.destroy_process_group()
"""


def torchrun(program, ranks, timeout=120):
    """What the ranks print when `program` runs under torchrun; it is ended after `timeout` s."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # one core is one device here too
    env["PYTHONPATH"] = str(Path(plots.__file__).parents[1])  # where course_utils lies
    if slots(ranks)[0].kind != "gpu":
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(program)
        how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        run = subprocess.Popen(
            [sys.executable, *how, str(script)], env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            out, err = run.communicate(timeout=timeout)
        except BaseException:
            run.terminate()  # torchrun then ends its ranks
            run.wait(timeout=60)
            raise
    assert run.returncode == 0, err[-2000:]
    return out


from_torchrun = json.loads(torchrun(PROGRAM, 2).splitlines()[-1])
difference = max(abs(a - b) for a, b in zip(from_torchrun, ddp, strict=True))
print("torchrun and launch, largest difference of the losses below 1e-6:", difference < 1e-6)
assert difference < 1e-6

# %% [markdown]
# In a shell the line is `torchrun --standalone --nproc-per-node 2 train.py`. (`python -m torch.distributed.run`, as in the cell, is the same program; it makes sure that it belongs to this Python.) `--standalone` finds a free port on this machine. With two machines you would name a meeting point that both can reach, by `--rdzv-endpoint`, and `RANK` (number among all) would differ from `LOCAL_RANK` (number on this machine, which picks the GPU).
#
# ## Then → now
#
# Older tutorials start the ranks with `torch.distributed.launch`. It still runs, warns, and passes `--local-rank` as an argument that `torchrun` does not. Others call `torch.multiprocessing.spawn`. Its fresh processes import your function from your program's file, and a notebook has none; the second cell does what a notebook does, it runs code that is in no file.

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
# [Exercise 04](../exercises/04_ddp_from_scratch.ipynb): build the ring, average gradients, and make all ranks start equal; each is checked on real ranks. About 45 minutes.
#
# ## Recap
#
# DDP is a process a device, equal weights at the start, and an average of gradients inside `backward()`. A ring spreads the traffic, so that no rank sends twice the tensor however many there are. It equals one device up to the order of additions, if you split the batch into equal shares.
#
# 1. Eight ranks all-reduce 100 MiB by a ring. How much does each send?
# 2. You forgot to split the batch: every rank takes all 64 images. What does DDP train on two ranks, and how do the gradients compare with one device's?
# 3. Your colleague sees different weights on two ranks after an hour. Name two causes.
#
# <details><summary>Answers</summary>
#
# 1. $2 \cdot 7/8 \cdot 100 = 175$ MiB.
# 2. The average of two equal gradients: the same as one device with 64 images, at twice the cost. No error says so.
# 3. One rank changed weights on its own after DDP was made (a checkpoint, an initialisation); one rank stepped when the other did not, or with gradients from under `no_sync()`.
#
# </details>
#
# Go on with [exercise 04](../exercises/04_ddp_from_scratch.ipynb).
