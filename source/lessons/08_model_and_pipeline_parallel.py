# ---
# jupyter:
#   course:
#     rows: [P2]
#     minutes: {read: 45, do: 30}
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
# # Model, pipeline and tensor parallelism: one model on two devices
#
# After this lesson you can cut a model in two, keep both halves at work, and say from counted bytes when that is better than giving each device a copy of the model.
#
# | | |
# |---|---|
# | **Time** | 45 minutes to read, 30 to do; the exercise comes on top |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); a training step in PyTorch; for the last part what an all-reduce costs, and DDP ([lesson 04](04_ddp_from_scratch.ipynb)) |
# | **You will** | cut a model between its layers · see each half wait for the other · fill the gap with micro-batches, and measure what is left · compare GPipe and 1F1B in memory · cut *inside* a layer · count the bytes that each method sends |
# | **Runs on** | no GPU, or one: two pinned cores · two GPUs or more: the GPUs (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# Two reminders, so that you can start here. A **rank** is a process with a device of its own; `dist.send` and `dist.recv` carry a tensor from one to another. In **data parallelism** each rank has the whole model and a part of the batch; after the backward pass an **all-reduce** gives every rank the sum of all gradients.

# %%
import itertools
import sys
import time
from contextlib import contextmanager

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from course_utils import memory, plots
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, launch
from course_utils.memory import KiB, MiB

plots.use_style()

# %%
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## When the model is what does not fit
#
# Data parallelism needs a device that holds the whole model. In 2012 one GPU could not: the network of [Krizhevsky, Sutskever and Hinton](https://papers.nips.cc/paper/4824-imagenet-classification-with-deep-convolutional-neural-networks), now called AlexNet, lay on two GPUs of 3 GB, each with half of it. This is **model parallelism**: each device holds a part of the model. There are two ways to cut. *Between* the layers: each device holds a **stage**, some whole layers. *Inside* the layers: each device holds a slice of every layer.
#
# The model of this lesson is a chain of four equal blocks. Each is the kind that a transformer has between its attentions: one linear layer that widens, a curve (GELU), one linear layer back, and the input added.


# %%
# NBVAL_CHECK_OUTPUT
class Block(nn.Module):
    def __init__(self, width, factor=4):
        super().__init__()
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


DEPTH = 4


def make_model(width, factors=(4,) * DEPTH):
    torch.manual_seed(0)  # every rank makes the same weights
    return nn.Sequential(*(Block(width, factor) for factor in factors))


def make_batch(size, width):
    x, y = torch.randn(2, size, width, generator=torch.Generator().manual_seed(1))
    return x, y


def numbers(model):
    return sum(p.numel() for p in model.parameters())


model = make_model(256)
print(
    f"all: {numbers(model):,}   stage 0: {numbers(model[:2]):,}   stage 1: {numbers(model[2:]):,}"
)

# %% [markdown]
# ## Cut in two by hand
#
# Rank 0 holds the first two blocks, rank 1 the others and the loss. Forward, rank 0 sends its output; backward, rank 1 sends the gradient of what it received. That is all: `h.backward(gradient)` goes on where the other rank stopped.
#
# This lesson holds every method against one device with the same weights and the same batch, in float64. The result is the largest difference between two gradients.


# %%
# NBVAL_CHECK_OUTPUT
def my_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def step_in_two(stage, x, y):
    if dist.get_rank() == 0:
        h = stage(x)
        dist.send(h.detach(), dst=1)
        gradient = torch.empty_like(h)
        dist.recv(gradient, src=1)
        h.backward(gradient)
    else:
        h = torch.empty_like(x)
        dist.recv(h, src=0)
        h.requires_grad_()
        F.mse_loss(stage(h), y).backward()
        dist.send(h.grad, dst=0)


def difference(mine, one, x, y):
    """Largest difference between gradients here and those of the same layers on one device."""
    F.mse_loss(nn.Sequential(*one)(x), y).backward()
    layers = one[:2] if dist.get_rank() == 0 else one[2:]
    pairs = zip(mine.parameters(), layers.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def by_hand():
    x, y = (t.double().to(my_device()) for t in make_batch(32, 64))
    model, one = (make_model(64).double().to(my_device()) for _ in range(2))
    stage = model[:2] if dist.get_rank() == 0 else model[2:]
    step_in_two(stage, x, y)
    return difference(stage, one, x, y)


differences = launch(by_hand, 2)
print("both stages equal one device within 1e-12:", max(differences) < 1e-12)
assert max(differences) < 1e-12

# %% [markdown]
# The tolerance is not 0 because nobody promises that a library adds up the terms of a product in the same order every time. Each rank would now step an optimizer of its own, for its own weights: no rank ever needs the other's.
#
# ## Each waits for the other
#
# To see what the ranks do, each writes down when it computes. `time.monotonic()` is one clock for all processes of a machine, so the notes of two ranks can be laid side by side.
#
# The next cell does the same step in a more general form: a list says in which **order** a rank runs its forward (`F`) and backward passes (`B`). It also cuts the batch into several **micro-batches**, numbered from 0. The mean loss of each is divided by their number: so the gradients, which add up, are those of the whole batch. With one micro-batch and the order F0, B0 it is `step_in_two`. Sending is now `isend`, which does not wait; you will see why.
#
# A second function measures: a few steps after a warm-up, of which the shortest counts, because other programs can only make a step longer. The **idle share** is the part of both ranks' time, from the first start to the last end, in which they did not compute.
#
# **Predict.** One micro-batch, two equal stages. Draw the two ranks as two lines: what is the idle share? Does it depend on how much longer a backward pass takes than a forward pass?


# %%
@contextmanager
def clocked(events, kind, micro):
    start = time.monotonic()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a GPU answers before it is done
    events.append((kind, micro, start, time.monotonic()))


def run_order(order, stage, inputs, targets, links, events):
    """One step of this rank's stage.

    links: one group of ranks for each direction, so that on GPUs none queues behind the other.
    """
    rank, last, (forth, back) = dist.get_rank(), dist.get_world_size() - 1, links
    kept, sent_back = {}, None
    for kind, i in order:
        if kind == "F":
            x = inputs[i]
            if rank > 0:
                x = torch.empty_like(x)
                dist.recv(x, rank - 1, group=forth)
                x.requires_grad_()
            with clocked(events, kind, i):
                out = stage(x)
                if rank == last:
                    out = F.mse_loss(out, targets[i]) / len(inputs)
            sent = dist.isend(out.detach(), rank + 1, group=forth) if rank < last else None
            kept[i] = x, out, sent  # what the backward pass needs
        else:
            x, out, sent = kept.pop(i)
            gradient = None
            if rank < last:
                gradient = torch.empty_like(out)
                dist.recv(gradient, rank + 1, group=back)
                sent.wait()  # taken long ago, as its gradient is here: now the message is freed
            with clocked(events, kind, i):
                out.backward(gradient)
            if rank > 0:
                if sent_back:
                    sent_back.wait()
                sent_back = dist.isend(x.grad, rank - 1, group=back)
            del x, out, sent, gradient
    if sent_back:
        sent_back.wait()


# %%
def record(orders, model_of, width, batch, steps):
    """For each step the events of this rank: (kind, micro-batch, start, end)."""
    rank, m = dist.get_rank(), len(orders[0]) // 2
    stage = model_of(width)[rank].to(my_device())
    inputs, targets = (t.to(my_device()).chunk(m) for t in make_batch(batch, width))
    links, log = (dist.new_group(), dist.new_group()), []
    for _ in range(steps + 1):
        stage.zero_grad()
        dist.barrier()
        log.append([])
        run_order(orders[rank], stage, inputs, targets, links, log[-1])
    return log[1:]


def two_halves(width):
    model = make_model(width)
    return model[:2], model[2:]


def span(ranks):
    events = list(itertools.chain(*ranks))
    return max(end for *_, end in events) - min(start for _, _, start, _ in events)


def idle_share(ranks):
    busy = sum(end - start for events in ranks for _, _, start, end in events)
    return 1 - busy / (len(ranks) * span(ranks))


def shortest(log):
    """Of the steps of both ranks the shortest: other programs can only make a step longer."""
    return min(zip(*log, strict=True), key=span)


WIDTH, BATCH, STEPS = 128, 2048, 4
naive = [[("F", 0), ("B", 0)]] * 2
timelines = {"one micro-batch": shortest(launch(record, 2, naive, two_halves, WIDTH, BATCH, STEPS))}
for rank, events in enumerate(timelines["one micro-batch"]):
    zero = min(start for _, _, start, _ in timelines["one micro-batch"][0])
    for kind, i, start, end in events:
        print(
            f"rank {rank}  {kind}{i}  {1000 * (start - zero):7.1f} to {1000 * (end - zero):7.1f} ms"
        )
print(f"idle share: {idle_share(timelines['one micro-batch']):.0%}")

# %%
LOOK = {"F": (plots.COLOURS[0], ""), "B": (plots.COLOURS[1], "//")}


def draw(ax, ranks, label):
    zero = min(start for events in ranks for _, _, start, _ in events)
    for rank, events in enumerate(ranks):
        for kind, i, start, end in events:
            colour, hatch = LOOK[kind]
            left, width = 1000 * (start - zero), 1000 * (end - start)
            ax.barh(rank, width, left=left, color=colour, hatch=hatch, edgecolor="white")
            if width > 20 * span(ranks):
                ax.text(left + width / 2, rank, f"{kind}{i}", ha="center", va="center",
                        color="white", fontsize=8, fontweight="bold",
                        bbox={"facecolor": colour, "linewidth": 0, "pad": 1})  # fmt: skip
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_title(label, fontsize=11, weight="normal")


share = idle_share(timelines["one micro-batch"])
fig, ax = plt.subplots(figsize=(7, 2.2))
draw(ax, timelines["one micro-batch"], "measured; plain: forward (F), hatched: backward (B)")
ax.set(xlabel="time since the start of the step (ms)", ylabel="device")
fig.suptitle(f"Cut in two, one batch: the devices are idle {share:.0%} of the time")
plots.show(
    fig,
    name="each-waits",
    alt="Timeline of two ranks. Rank 0 computes forward, then rank 1 forward and backward, then "
    f"rank 0 backward; they never compute together. Idle share {share:.0%}.",
)

# %% [markdown]
# At no time do both compute: each is idle while the other works, so half of all time is idle, whatever a backward pass takes. The messages come on top. Cutting a model gives it *room*, not speed.
#
# ## Micro-batches fill the gap
#
# While rank 1 works on micro-batch 0, rank 0 can work on micro-batch 1. **GPipe** ([2018](https://arxiv.org/abs/1811.06965)) is the plain schedule: all forward passes, then all backward passes.
#
# How much idle time is left? Call a slot the time of one micro-batch in one stage. With $p$ stages and $m$ micro-batches the last stage starts $p - 1$ slots late, and works for $m$ slots; so the forward phase takes $m + p - 1$ slots, of which each stage uses $m$. The backward phase is the same the other way round. The idle share, called the **bubble**, is
#
# $$\frac{p - 1}{m + p - 1}$$
#
# **Predict.** What is it for 2 stages and 1, 2, 4, 8 micro-batches? If nothing else cost time, how many times as fast as with one would a step be?


# %%
def gpipe(stage, stages, m):
    return [("F", i) for i in range(m)] + [("B", i) for i in range(m)]


COUNTS = [1, 2, 4, 8]
logs = {}
for m in tqdm(COUNTS, desc="micro-batches", file=sys.stdout):
    orders = [gpipe(stage, 2, m) for stage in range(2)]
    logs[m] = launch(record, 2, orders, two_halves, WIDTH, BATCH, STEPS)
bubble = {m: 1 / (m + 1) for m in COUNTS}  # p = 2
measured = {m: idle_share(shortest(log)) for m, log in logs.items()}
length = {m: span(shortest(log)) for m, log in logs.items()}
timelines["GPipe, 4 micro-batches"] = shortest(logs[4])


def computing(log):
    """Milliseconds that each rank computes in a step: its best step."""
    sums = ([sum(end - start for *_, start, end in events) for events in steps] for steps in log)
    return " and ".join(f"{1000 * min(each):.0f}" for each in sums)


print(
    f"{'m':>2}{'bubble':>8}{'idle':>7}{'step':>10}{'gain':>8}{'ideal':>8}   each rank computes, ms"
)
for m in COUNTS:
    gains = f"{length[1] / length[m]:7.2f}×{2 * m / (m + 1):7.2f}×"  # ideal: only the bubble
    idle = f"{bubble[m]:8.0%}{measured[m]:7.0%}"
    print(f"{m:>2}{idle}{1000 * length[m]:7.1f} ms{gains}   {computing(logs[m])}")

fig, ax = plt.subplots()
ax.plot(COUNTS, [100 * bubble[m] for m in COUNTS], label="bubble, (p − 1) / (m + p − 1)")
ax.plot(COUNTS, [100 * measured[m] for m in COUNTS], label="idle, measured (shortest step)")
ax.set_xscale("log", base=2)
ax.set_xticks(COUNTS, COUNTS)
ax.set(xlabel="micro-batches m", ylabel="idle share of two devices (%)", ylim=(0, None))
ax.set_title(
    f"From 1 to 8 micro-batches: bubble {bubble[1]:.0%} to {bubble[8]:.0%},\n"
    f"idle here {measured[1]:.0%} to {measured[8]:.0%}"
)
ax.legend()
plots.show(
    fig,
    name="bubble-measured",
    alt="Idle share against the number of micro-batches: the formula falls from 50 percent at 1 to "
    f"11 percent at 8; measured {measured[1]:.0%} and {measured[8]:.0%}.",
)

# %% [markdown]
# The formula counts equal slots and free messages. Yours are neither: a share above the formula is waiting in the middle, for a message or for a slower pass on the other side; a share a little below it can come from slots of unequal length. So a gain below the ideal has two possible reasons, and the table shows both. Either the ranks *wait* more than the bubble (idle against bubble), or they *compute* longer (last column): a small micro-batch uses a device less well, and every backward pass adds to the gradient of every weight once more. Both grow with $m$. So raise $m$ until the step no longer gets shorter, not until the bubble is gone.
#
# ## 1F1B: the same bubble in less memory
#
# GPipe has a price. Each micro-batch whose forward pass is done keeps its **activations**, the results that the backward pass needs, and all $m$ of them wait. (The paper computes them again in the backward pass, see [lesson 17](17_precision_and_recompute.ipynb); here they are kept.) The schedule **1F1B** (one forward, one backward) runs a backward pass as soon as one is possible. It comes from [PipeDream](https://arxiv.org/abs/1806.03377), which never waits for the end of a step and keeps old weights instead; the form used here, with an end to each step, is [PipeDream-Flush](https://arxiv.org/abs/2006.09503). Stage $s$ first does as many forward passes as there are stages behind it, $p - 1 - s$. Then it alternates.
#
# **Predict.** 4 stages, 8 micro-batches: how many micro-batches does each stage keep at most?


# %%
# NBVAL_CHECK_OUTPUT
def one_f_one_b(stage, stages, m):
    ahead = min(stages - 1 - stage, m)
    order = [("F", i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            order.append(("F", ahead + i))
        order.append(("B", i))
    return order


def most_kept(order):
    return max(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in order))


for schedule in (gpipe, one_f_one_b):
    print(schedule.__name__)
    for stage in range(4):
        order = schedule(stage, 4, 8)
        text = " ".join(f"{kind}{i}" for kind, i in order)
        print(f"  stage {stage} keeps {most_kept(order)}:  {text}")

# %%
orders = [one_f_one_b(stage, 2, 4) for stage in range(2)]
timelines["1F1B, 4 micro-batches"] = shortest(
    launch(record, 2, orders, two_halves, WIDTH, BATCH, STEPS)
)
lines = [f"{name}: idle {idle_share(ranks):.0%}, step {1000 * span(ranks):.1f} ms"
         for name, ranks in timelines.items()]  # fmt: skip
print(*lines, sep="\n")

fig, axes = plt.subplots(3, 1, figsize=(7.5, 5), sharex=True)
for ax, line, ranks in zip(axes, lines, timelines.values(), strict=True):
    draw(ax, ranks, line)
    ax.set_ylabel("device")
axes[-1].set_xlabel("time since the start of the step (ms)")
shares = [idle_share(ranks) for ranks in timelines.values()]
fig.suptitle("The order of the passes: all forward first (GPipe), or in turns (1F1B)")
plots.show(
    fig,
    name="three-timelines",
    alt="Timelines of two ranks for one micro-batch, GPipe with four and 1F1B with four. "
    "GPipe does all forward passes first; 1F1B alternates after the first. Idle shares: "
    + ", ".join(f"{s:.0%}" for s in shares),
)

# %% [markdown]
# The order differs, the bubble of the formula is the same: each stage is idle for $2(p - 1)$ slots in all, the last one at both ends, rank 0 in the middle. The step times are of three launches, and launches differ: one micro-batch is timed twice above, so compare those two before you call a schedule faster. What 1F1B saves is memory. `memory.meter` counts the bytes of all tensors on a rank; what the peak adds to what was there before the step is activations, and a few gradients on their way. Each micro-batch has 64 samples, so more micro-batches mean a larger batch.
#
# **Predict.** From 2 to 16 micro-batches: by how much does the peak of stage 0 grow under GPipe, and under 1F1B?


# %%
def peak_of(schedule, m, width=128, size=64):
    """Bytes that one step adds on this rank."""
    rank = dist.get_rank()
    stage = two_halves(width)[rank].to(my_device())
    inputs, targets = (t.to(my_device()).chunk(m) for t in make_batch(size * m, width))
    links = dist.new_group(), dist.new_group()
    for _ in range(2):  # the first step makes the gradients, which then stay
        dist.barrier()
        with memory.meter(stage, *inputs[:1], *targets[:1]) as meter:
            before = meter.live
            run_order(schedule(rank, 2, m), stage, inputs, targets, links, [])
    return meter.peak - before


MANY = [2, 8, 16]
peaks = {}
for schedule in (gpipe, one_f_one_b):
    for m in MANY:
        peaks[schedule.__name__, m] = launch(peak_of, 2, schedule, m)
print(f"peak above the start, MiB  {'':8}" + "".join(f"m = {m:<6}" for m in MANY))
for name, stage in itertools.product(("gpipe", "one_f_one_b"), range(2)):
    values = "".join(f"{peaks[name, m][stage] / MiB:<10.2f}" for m in MANY)
    print(f"{name:14} stage {stage}{'':13}{values}")

# %%
growth = {key: peaks[key, 16][0] / peaks[key, 2][0] for key in ("gpipe", "one_f_one_b")}
assert growth["gpipe"] > 4 and growth["one_f_one_b"] < 1.5
grown = growth["one_f_one_b"]
flat = "does not grow" if round(grown, 1) == 1 else f"{grown:.1f}×"

fig, ax = plt.subplots()
for name, stage in itertools.product(("gpipe", "one_f_one_b"), range(2)):
    label = f"{'GPipe' if name == 'gpipe' else '1F1B'}, stage {stage}"
    ax.plot(MANY, [peaks[name, m][stage] / MiB for m in MANY], label=label)
ax.set_xticks(MANY)
ax.set(xlabel="micro-batches of 64 samples", ylabel="peak above the start (MiB)", ylim=(0, None))
ax.set_title(
    f"From 2 to 16 micro-batches stage 0 grows {growth['gpipe']:.1f}× in GPipe,\n{flat} in 1F1B"
)
ax.legend()
plots.show(
    fig,
    name="memory-of-schedules",
    alt="Peak memory of a step against micro-batches for both schedules and stages. GPipe rises in "
    f"a straight line, {growth['gpipe']:.1f} times from 2 to 16; 1F1B: {flat}.",
)

# %% [markdown]
# Under 1F1B the activations follow the number of *stages*, not of micro-batches: memory no longer limits $m$. Under GPipe every micro-batch adds the same. Eight times the micro-batches are not quite eight times the peak, because a part is there only once: what the one pass at work needs for itself.
#
# ## Then → now: `torch.distributed.pipelining`
#
# PyTorch once had a pipeline for GPUs of one process, `torch.distributed.pipeline.sync.Pipe`. It is gone. What replaced it runs one process a stage, as you did.
#
# A `PipelineStage` knows its layers and its place in the chain; a schedule cuts the batch, sends, receives, and divides the gradients by the number of micro-batches. The first stage passes the input to `step`, the last one the target. The same file runs from a shell as `torchrun --standalone --nproc-per-node=2 pipeline.py`.

# %% then="torch.distributed.pipeline.sync.Pipe(model, chunks=8)" now="torch.distributed.pipelining: PipelineStage and a schedule" since="PyTorch 2.4"
# NBVAL_CHECK_OUTPUT
try:
    from torch.distributed.pipeline.sync import Pipe  # noqa: F401
except ModuleNotFoundError as error:
    print("then:", error)
else:
    raise AssertionError("the old Pipe is back")
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

print("now:", PipelineStage.__name__, ScheduleGPipe.__name__, Schedule1F1B.__name__)


# %%
def with_pipelining(schedule_of, m):
    """Largest difference from one device, and the peak that a step adds."""
    rank = dist.get_rank()
    x, y = (t.double().to(my_device()) for t in make_batch(64 * m, 128))
    model, one = (make_model(128).double().to(my_device()) for _ in range(2))
    layers = model[:2] if rank == 0 else model[2:]
    stage = PipelineStage(layers, rank, 2, torch.device(my_device()))
    schedule = schedule_of(stage, n_microbatches=m, loss_fn=F.mse_loss)
    for _ in range(2):
        layers.zero_grad(set_to_none=False)
        with memory.meter(layers, x, y) as meter:
            before = meter.live
            schedule.step(x) if rank == 0 else schedule.step(target=y)
    return difference(layers, one, x, y), meter.peak - before


print(f"{'float64':16}{'m':>4}{'stage 0':>14}{'stage 1':>14}   difference from one device")
theirs = {}
for schedule_of, m in itertools.product((ScheduleGPipe, Schedule1F1B), (2, 8)):
    ranks = theirs[schedule_of.__name__, m] = launch(with_pipelining, 2, schedule_of, m)
    sizes = "".join(f"{peak / MiB:10.2f} MiB" for _, peak in ranks)
    print(f"{schedule_of.__name__:16}{m:>4}{sizes}   {max(d for d, _ in ranks):.1e}")

worst = max(d for ranks in theirs.values() for d, _ in ranks)
print("both schedules equal one device within 1e-12:", worst < 1e-12)
less = theirs["Schedule1F1B", 8][0][1] < theirs["ScheduleGPipe", 8][0][1]
print("with 8 micro-batches, stage 0 of 1F1B needs less than that of GPipe:", less)
assert worst < 1e-12 and less

# %% [markdown]
# The difference is not 0: one device adds up all samples in one go, the schedule adds `m` sums of 64, and additions in another order round differently.
#
# The library's 1F1B does grow a little with `m`. For every micro-batch it makes buffers to receive into, and its last stage keeps the output ([source](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/pipelining/stage.py): `args_recv_info`, `output_chunks`): a few messages of 64 KiB each, not the activations.
#
# ## Break it: two ranks that both send
#
# `run_order` uses `isend`, and the library too sends without waiting. Here is 1F1B with plain `send` between CPUs (gloo), which returns when the other side has taken the message. (On NCCL `send` only puts the message in the GPU's queue; there the queues block each other.) Rank 0 does F0, sends, does F1, sends. Rank 1 does F0, B0, and sends its gradient.
#
# **Predict.** Who waits for whom?


# %%
# NBVAL_CHECK_OUTPUT
def plain_sends():
    message, link = torch.ones(1 << 16), torch.empty(1 << 16)
    pair = dist.new_group(backend="gloo")  # on GPUs, too, this cell sends between CPUs
    if dist.get_rank() == 0:
        dist.send(message, dst=1, group=pair)  # F0
        dist.send(message, dst=1, group=pair)  # F1: rank 1 will take it after B0
        dist.recv(link, src=1, group=pair)  # for B0
    else:
        dist.recv(link, src=0, group=pair)  # for F0
        dist.send(message, dst=0, group=pair)  # B0: rank 0 will take it after F1
        dist.recv(link, src=0, group=pair)  # for F1


try:
    launch(plain_sends, 2, timeout=3)
except LaunchTimeout as error:
    report = str(error)
    for rank in range(2):
        print(f"rank {rank} waits in send: {f'rank {rank} waits in send' in report}")
else:
    raise AssertionError("two blocked ranks went unnoticed")

# %% [markdown]
# Each waits until the other receives. No error, no progress: a **deadlock**. The order on each rank is right, only waiting in `send` is wrong. Look for it whenever messages go both ways: `isend`, or `dist.batch_isend_irecv`, which hands over sends and receives together. ([NCCL](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html) asks for the same: calls that must progress together belong in one group call.)
#
# ## Where to cut
#
# So far the stages were equal. Blocks of real models are not, and a pipeline is as fast as its slowest stage: if the passes were all that costs time, a step of GPipe with two stages would take $m$ times the *largest* stage, plus once the other one. So the best cut makes the largest stage as small as possible, and not the number of layers equal. The cost of a block is counted here in operations.
#
# **Predict.** The blocks cost 8, 8, 4, 4, 2, 2, 2, 2. Where do you cut for two stages?

# %%
FACTORS = (8, 8, 4, 4, 2, 2, 2, 2)
costs = []
for block in make_model(128, FACTORS):
    with FlopCounterMode(display=False) as counter:
        block(torch.ones(1, 128))
    costs.append(counter.get_total_flops())
print("operations for one sample:", costs)
for cut in range(1, len(costs)):
    stages = sum(costs[:cut]), sum(costs[cut:])
    print(f"cut after {cut}: {stages[0]:>8} and {stages[1]:>8}, largest {max(stages)}")
best = min(range(1, len(costs)), key=lambda cut: max(sum(costs[:cut]), sum(costs[cut:])))
print("best: after block", best)

cuts = {}
for cut in (4, best):

    def unequal(width, cut=cut):
        model = make_model(width, FACTORS)
        return model[:cut], model[cut:]

    orders = [gpipe(stage, 2, 8) for stage in range(2)]
    log = launch(record, 2, orders, unequal, 128, BATCH // 2, STEPS)
    step = shortest(log)
    cuts[cut] = span(step)
    print(f"cut after {cut}: one step {1000 * span(step):.0f} ms, the stages compute", end=" ")
    print(f"for {computing(log)} ms")
slots = {cut: 7 * max(pair := (sum(costs[:cut]), sum(costs[cut:]))) + sum(pair) for cut in cuts}
print(f"equal number of blocks takes {cuts[4] / cuts[best]:.2f}× the time of equal costs", end="")
print(f" ({slots[4] / slots[best]:.2f}× by operations)")

# %% [markdown]
# By operations, eight micro-batches of GPipe take eight times the largest stage and once the other one: that is the ratio in brackets. Your measured ratio shows how far to trust the count. Operations are not time: additions, GELU, gradients and messages cost, too, and weigh more in small blocks; and other programs disturb one stage more than the other. To cut a real model, time its blocks on the device.
#
# ## Cut inside a layer: tensor parallelism
#
# A pipeline gives each device whole layers, one after the other. **Tensor parallelism** gives each device a slice of every layer, so that all work on the same sample at the same time. A block multiplies by two matrices, $h = \mathrm{gelu}(x A)$ and $y = h B$. Cut $A$ into *columns* and $B$ into *rows*:
#
# $$A = (A_0 \; A_1), \quad B = \binom{B_0}{B_1}: \qquad y = \mathrm{gelu}(x A_0)\,B_0 + \mathrm{gelu}(x A_1)\,B_1$$
#
# GELU works number by number, so each device needs only its own columns of $h$. Nothing is sent in the middle: one sum at the end is enough. Here it is on four numbers each, with relu for GELU, so that the numbers stay whole.

# %%
# NBVAL_CHECK_OUTPUT
x = torch.tensor([[1.0, 2.0]])
A, B = torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [3.0, 1.0]])
parts = [torch.relu(x @ A[:, i : i + 1]) @ B[i : i + 1, :] for i in range(2)]
print("device 0:", parts[0].tolist(), " device 1:", parts[1].tolist())
print("sum:     ", (parts[0] + parts[1]).tolist(), " whole:   ", (torch.relu(x @ A) @ B).tolist())

# %% [markdown]
# The sum is an all-reduce, in the forward pass, at the *end* of the block. What about the backward pass? Both devices used the same $x$, so its gradient is a sum too: each device knows the part that came through its own columns. That is another all-reduce, in the backward pass, at the *beginning* of the block. So there are two functions, each the mirror of the other:
#
# - `Enter`, at the beginning of the block ($f$ in [Megatron-LM](https://arxiv.org/abs/1909.08053)): forward nothing, backward the sum.
# - `Leave`, at its end ($g$ there): forward the sum, backward nothing.
#
# The next cell defines both, and `SlicedBlock`, which is `Block` with this rank's slices between them. The bias of `down` comes after the sum: before it, both devices would add it.
#
# **Predict.** Somebody forgets `Enter`. Is the loss wrong? Which gradients are wrong: of the last block, of the first?


# %%
class Enter(torch.autograd.Function):
    """Forward: nothing. Backward: the sum over the devices."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """Forward: the sum over the devices. Backward: nothing."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class SlicedBlock(nn.Module):
    """This rank's columns of `up` and rows of `down`."""

    def __init__(self, block, enter=Enter.apply):
        super().__init__()
        rank, ranks, self.enter = dist.get_rank(), dist.get_world_size(), enter
        # nn.Linear stores its matrix transposed: columns of A are rows of `weight`.
        self.A = nn.Parameter(block.up.weight.detach().chunk(ranks, 0)[rank].clone())
        self.a = nn.Parameter(block.up.bias.detach().chunk(ranks)[rank].clone())
        self.B = nn.Parameter(block.down.weight.detach().chunk(ranks, 1)[rank].clone())
        self.b = nn.Parameter(block.down.bias.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(self.enter(x), self.A, self.a))
        return x + Leave.apply(F.linear(h, self.B)) + self.b  # the bias after the sum, once


# %%
# NBVAL_CHECK_OUTPUT
def sliced(enter):
    """Differences from one device (the loss, each block's `up`), and each block's bias gradient."""
    x, y = (t.double().to(my_device()) for t in make_batch(32, 64))
    one = make_model(64).double().to(my_device())
    mine = nn.Sequential(*(SlicedBlock(block, enter) for block in one))
    losses = F.mse_loss(mine(x), y), F.mse_loss(one(x), y)
    for loss in losses:
        loss.backward()
    apart = [abs(losses[0] - losses[1]).item()]
    for a, b in zip(mine, one, strict=True):
        wanted = b.up.weight.grad.chunk(2)[dist.get_rank()]
        apart.append((a.A.grad - wanted).abs().max().item())
    return apart, [block.b.grad.tolist() for block in mine]


for name, enter in {"with Enter": Enter.apply, "without Enter": lambda x: x}.items():
    (apart0, bias0), (apart1, bias1) = launch(sliced, 2, enter)
    same = [max(pair) < 1e-12 for pair in zip(apart0, apart1, strict=True)]
    agree = [np.allclose(*pair, rtol=0, atol=1e-12) for pair in zip(bias0, bias1, strict=True)]
    print(f"{name}: loss equals one device's: {same[0]}")
    print(f"    gradients of blocks 0 to 3 equal one device's: {same[1:]}")
    print(f"    both ranks have the same gradient of the bias: {agree}")

# %% [markdown]
# Without `Enter` the loss is right, and the last block's gradients are right. In all blocks before it they are wrong. The ranks do not even agree on the bias, which both hold whole: after a step they would no longer have the same model. Nothing raises, and the first loss tells you nothing. This is why every method here is compared with one device *by its gradients*.
#
# ## The same from the library: `parallelize_module`
#
# PyTorch does this to an existing model. A **device mesh** names the ranks; a plan says how each linear layer is cut.


# %%
# NBVAL_CHECK_OUTPUT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def tensor_parallel(model):
    mesh = init_device_mesh(my_device(), (dist.get_world_size(),))
    plan = {f"{i}.up": ColwiseParallel() for i in range(len(model))}
    plan |= {f"{i}.down": RowwiseParallel() for i in range(len(model))}
    return parallelize_module(model, mesh, plan)


def from_the_library():
    x, y = (t.double().to(my_device()) for t in make_batch(32, 64))
    model, one = (make_model(64).double().to(my_device()) for _ in range(2))
    model = tensor_parallel(model)
    for each in (model, one):
        F.mse_loss(each(x), y).backward()
    pairs = zip(model.parameters(), one.parameters(), strict=True)
    apart = max((a.grad.full_tensor() - b.grad).abs().max().item() for a, b in pairs)
    return apart, tuple(model[0].up.weight.to_local().shape), tuple(one[0].up.weight.shape)


(apart, mine, whole), (other, _, _) = launch(from_the_library, 2)
print("equals one device within 1e-12:", max(apart, other) < 1e-12)
print(f"weight of `up`: whole {whole}, on each rank {mine}")
assert max(apart, other) < 1e-12

# %% [markdown]
# ## Count what is sent
#
# Which method sends least? PyTorch passes every operation through a dispatcher, those of `torch.distributed` too, so a small class can count them all: yours, those of `PipelineStage`, DDP and `parallelize_module`. An all-reduce of $n$ bytes among $p$ ranks costs each rank at least $2(p-1)/p \cdot n$ sent bytes, which a ring reaches ([lesson 04](04_ddp_from_scratch.ipynb)): for two ranks, $n$.
#
# **Predict.** The batch becomes 16 times as large: which of the three methods send more? The width doubles: by how much does each grow?


# %%
class Sent(TorchDispatchMode):
    """Bytes that this rank sends, by kind."""

    def __init__(self):
        super().__init__()
        self.bytes, self.messages = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name.startswith(("c10d.send", "c10d.allreduce", "_c10d_functional.all_reduce")):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            factor, p = 1, dist.get_world_size()
            if "send" not in name:
                factor = 2 * (p - 1) / p
            self.bytes += int(factor * sum(t.nbytes for t in tensors))
            self.messages += 1
        return func(*args, **(kwargs or {}))


def make_step(method, width, batch, m=4):
    """A function that does forward and backward in this way, and the weights on this rank."""
    rank, device = dist.get_rank(), my_device()
    x, y = (t.to(device) for t in make_batch(batch, width))
    model = make_model(width).to(device)
    if method == "pipeline":
        stage = model[:2] if rank == 0 else model[2:]
        inputs, targets = x.chunk(m), y.chunk(m)
        links, order = (dist.new_group(), dist.new_group()), one_f_one_b(rank, 2, m)
        return lambda: run_order(order, stage, inputs, targets, links, []), stage
    if method == "data":
        model = nn.parallel.DistributedDataParallel(model)
        x, y = x.chunk(2)[rank], y.chunk(2)[rank]
    if method == "tensor":
        model = tensor_parallel(model)
    return lambda: F.mse_loss(model(x), y).backward(), model


def local_bytes(model):
    parameters = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    return sum(p.nbytes for p in parameters)


def count_sent(method, cases):
    counts = {}
    for width, batch in cases:
        step, model = make_step(method, width, batch)
        for _ in range(2):
            step()  # DDP sets up its buckets in the first two steps
        with Sent() as sent:
            step()
        counts[width, batch] = sent.bytes, sent.messages, local_bytes(model)
    return counts


METHODS = ["data", "pipeline", "tensor"]
CASES = list(itertools.product((32, 64, 128), (64, 1024)))
sent = {method: launch(count_sent, 2, method, CASES)[0] for method in METHODS}


# %%
# NBVAL_CHECK_OUTPUT
def formula(method, width, batch):
    """Bytes that a rank sends in one step: two ranks, float32."""
    return (
        4
        * {
            "data": DEPTH * (8 * width**2 + 5 * width),  # a gradient for each weight
            "pipeline": batch * width,  # the activations at the cut, or their gradient
            "tensor": (2 * DEPTH - 1) * batch * width,  # twice a block; the first input needs none
        }[method]
    )


print("KiB sent by rank 0 in one step, and messages")
print(f"{'width':>6}{'batch':>7}" + "".join(f"{method:>18}" for method in METHODS))
for case in CASES:
    cells = (f"{sent[m][case][0] / KiB:12.0f} in {sent[m][case][1]:<3}" for m in METHODS)
    print(f"{case[0]:>6}{case[1]:>7}" + "".join(cells))
equal = all(sent[m][case][0] == formula(m, *case) for m in METHODS for case in CASES)
print("each count equals the formula:", equal)
weights = {m: sent[m][128, 64][2] / sent["data"][128, 64][2] for m in METHODS}
print("weights on rank 0, of all:", {m: f"{part:.0%}" for m, part in weights.items()})
assert equal

# %% [markdown]
# With 16 times the batch, pipeline and tensor parallelism send 16 times as much, data parallelism the same. With twice the width, data parallelism sends nearly 4 times as much (its weights), the others twice. The formulas hold to the byte, so they can fill in what was not measured. (An all-reduce counts as one message. DDP sends one for each of its buckets: at width 128 the gradients fill two, see [lesson 04](04_ddp_from_scratch.ipynb). The batch is the global one. Tensor parallelism gives each rank all of it, data parallelism half.)
#
# ## When is which better?

# %%
width, batches = 64, np.array([2**k for k in range(4, 14)])
fig, ax = plt.subplots()
for k, (method, look) in enumerate(zip(METHODS, ("o", "s", "^"), strict=True)):
    style = {"color": plots.COLOURS[k], "linestyle": plots.DASHES[k]}
    line = [formula(method, width, int(batch)) / KiB for batch in batches]
    ax.plot(batches, line, marker="", **style)
    points = {batch: sent[method][w, batch][0] / KiB for w, batch in CASES if w == width}
    ax.plot(points.keys(), points.values(), look, color=plots.COLOURS[k])
    ax.plot([], [], marker=look, label=f"{method} (line: formula, marker: counted)", **style)
flat = DEPTH * (8 * width + 5)
cross = {"pipeline": flat, "tensor": flat / (2 * DEPTH - 1)}
for batch in cross.values():
    ax.axvline(batch, color="gray", linewidth=1, linestyle=":")
ax.set_xscale("log", base=2)
ax.set_yscale("log")
ax.set(xlabel="global batch (samples)", ylabel="sent by a rank in one step (KiB)")
ax.set_title(
    f"Width {width}: data parallel sends less than tensor from a batch\n"
    f"of about {cross['tensor']:.0f} on, less than the pipeline from about {cross['pipeline']:.0f} on"
)
ax.legend()
plots.show(
    fig,
    name="bytes-by-method",
    alt="Bytes sent in a step against the batch, both axes logarithmic. Data parallel is flat; "
    "pipeline and tensor parallel rise in proportion, tensor seven times as high. They cross the "
    f"flat line at about {cross['pipeline']:.0f} and {cross['tensor']:.0f} samples.",
)

# %% [markdown]
# Data parallelism sends the *weights'* gradients, whatever the batch; the other two send *activations*, whatever the weights inside. So with a large batch of small layers data parallelism sends less, with a small batch of large layers the others do. But bytes are not time. Here is a case in which the pipeline sends a thousandth of what data parallelism sends: width 512, batch 16. The pipeline runs twice, with 4 micro-batches of 4 samples and with all 16 at once: the same bytes.
#
# **Predict.** A pass of 4 samples reads as many weights as one of 16. Which of the two pipelines is faster? Can the one with all 16 at once be faster than one device?


# %%
def time_of(method, width, batch, m=4, rounds=4):
    if method == "one device":
        x, y = (t.to(my_device()) for t in make_batch(batch, width))
        model = make_model(width).to(my_device())

        def step():
            if dist.get_rank() == 0:
                F.mse_loss(model(x), y).backward()
    else:
        step, _ = make_step(method, width, batch, m)
    seconds = []
    for _ in range(rounds + 2):
        dist.barrier()
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return min(seconds[2:])  # other programs can only make a step longer


CASE = 512, 16
small = launch(time_of, 2, "one device", 512, 4)[0]
one = launch(time_of, 2, "one device", *CASE)[0]
print(f"one device: 16 samples {1000 * one:.1f} ms, 4 samples {1000 * small:.1f} ms")
took = {}
for method, m in (("data", 1), ("tensor", 1), ("pipeline", 4), ("pipeline", 1)):
    name = f"pipeline, m = {m}" if method == "pipeline" else method
    took[name] = launch(time_of, 2, method, *CASE, m)[0]
    text = f"{formula(method, *CASE) / KiB:8.0f} KiB sent   {one / took[name]:.2f}× as fast as one"
    print(f"{name:16}{1000 * took[name]:8.1f} ms {text}")
gain = [name for name in took if took[name] < one]
print("faster than one device here:", ", ".join(gain) or "none")

# %% [markdown]
# The two pipelines send the same, so what lies between their times is not bytes. Look at the first line: if 4 samples take much more than a quarter of the time of 16, four micro-batches do most of the work several times over. Each reads all weights, and each backward pass adds to all gradients. Then filling the bubble costs more than it brings. With one micro-batch the ranks never compute together, so there is nothing to win. Data parallelism pays for its bytes, a gradient of every weight after a step this short. Tensor parallelism halves the products on each rank, but stops seven times in a step for a sum, which both must reach. A step this short is better left on one device as long as the model fits on it. (We timed the opposite case, a large batch of small layers, too. Its order changed from run to run on two shared cores, so it is not here.)
#
# The ratio to look at is always the same: operations against bytes sent, and then what nobody does while waiting.
#
# | | data parallel | pipeline | tensor parallel |
# |---|---|---|---|
# | each device holds | all weights | its stage | a slice of each layer |
# | sends | gradients of all weights | activations at the cut | activations, twice a block |
# | bytes grow with | the weights | batch × width | batch × width × blocks |
# | waits for | the slowest rank, once a step | the bubble; the slowest stage | every sum, in every block |
# | take it when | the model fits on a device | it does not, and the link is slow | it does not, and the link is fast |
#
# [Large runs](https://arxiv.org/abs/2104.04473) combine them: tensor parallelism inside a machine, where links are fast, a pipeline between machines, data parallelism around both. There is a fourth way that keeps the simplicity of data parallelism without a whole model on each device: share out the *storage* of weights, gradients and optimizer state ([lesson 09](09_sharded_training.ipynb)).
#
# ## What this machine cannot show
#
# Cores of one machine exchange messages through memory. Between GPUs the link decides (NVLink, PCIe, network), and a GPU hides a message behind computing, which a core with one thread cannot. What follows from the schedule alone holds there too: the bytes, the order of the passes, the bubble's formula. The times do not. Results on real GPUs: **not measured**.
#
# ## Exercise
#
# [Exercise 08](../exercises/08_model_and_pipeline_parallel.ipynb): the schedule of GPipe slot by slot, a block cut into columns and rows on two real ranks, and the cut that balances the stages. About 35 minutes.
#
# ## Recap
#
# A model cut between its layers fits on two devices, but only micro-batches let both work: the bubble is (p − 1) / (m + p − 1), and 1F1B keeps no more than p micro-batches where GPipe keeps all. A model cut inside its layers has no bubble, and pays with a sum of activations at the end of each block forward and at its beginning backward. Data parallelism sends what grows with the weights, the other two what grows with the batch.
#
# 1. Four stages, bubble at most 10 %: how many micro-batches?
# 2. A colleague's tensor-parallel loss equals one device's in step 1, then drifts. What do you suspect?
# 3. Your pipeline gets no faster with more micro-batches, and rank 0 waits most of the time. What do you change?
#
# <details><summary>Answers</summary>
#
# 1. 3 / (m + 3) ≤ 0.1: 27.
# 2. A missing sum in the backward pass: compare gradients, block by block.
# 3. The cut: stage 1 costs more. Move layers to stage 0.
#
# </details>
#
# Go on with [exercise 08](../exercises/08_model_and_pipeline_parallel.ipynb).
