# ---
# jupyter:
#   course:
#     rows: [P4]
#     minutes: {read: 30, do: 25}
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
# # DDP in practice: data, batches, learning rate, checkpoints
#
# After this lesson you can turn a training program for one device into one for many that sees the right samples, computes the right mean, and saves what others can load; and you know five ways in which it goes wrong without an error, or hangs.
#
# | | |
# |---|---|
# | **Time** | 30 minutes to read, 25 to do; the exercise comes on top |
# | **You should know** | ranks, all-reduce and DDP ([lesson 04](04_ddp_from_scratch.ipynb)); speed-up and efficiency ([lesson 02](02_two_devices_one_sum.ipynb)) |
# | **You will** | share out data · count every test sample once · hold two ranks against one device · measure rules for the learning rate · accumulate gradients · see what BatchNorm does · seed, save and load · measure strong and weak scaling |
# | **Runs on** | no GPU, or one: two pinned cores · two GPUs or more: the GPUs (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# A reminder from lesson 04: DistributedDataParallel (**DDP**) makes the **replicas**, one model a rank, equal at the start. During `backward()` it replaces each gradient by the *mean over the ranks*. It never touches your data, your loss or your optimizer. That is what this lesson is about.

# %%
import io
import pickle
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import MNIST_NOTE, mnist
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, launch
from course_utils.timing import Ratio, Timing

plots.use_style()
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"

# %% [markdown]
# The data are handwritten digits, shrunk to 14 × 14 pixels. The model is small, so that every cell takes seconds.


# %%
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10)).to(my_device())


def flat(tensors):
    """All numbers of some tensors in one, on the CPU."""
    return torch.cat([t.detach().flatten().cpu() for t in tensors])


def shrink(pictures):
    return F.avg_pool2d(torch.from_numpy(pictures)[:, None].float() / 255, 2).flatten(1)


(x_train, y_train), (x_test, y_test) = mnist()
train = TensorDataset(shrink(x_train), torch.from_numpy(y_train).long())
test = TensorDataset(shrink(x_test), torch.from_numpy(y_test).long())
print(MNIST_NOTE)

# %% [markdown]
# ## Who gets which sample
#
# `DistributedSampler` gives each rank its share of the data. Asked with `num_replicas` and `rank` it needs no process group, so you can watch it here.
#
# **Predict.** Ten samples, three ranks. How many does each rank get? Which samples come twice?

# %%
# NBVAL_CHECK_OUTPUT
for drop_last in (False, True):
    print(f"drop_last={drop_last}")
    for rank in range(3):
        sampler = DistributedSampler(
            range(10), num_replicas=3, rank=rank, shuffle=False, drop_last=drop_last
        )
        print(f"    rank {rank}: {list(sampler)}")

sampler = DistributedSampler(train, num_replicas=2, rank=0)
print("5,000 samples, 2 ranks, batches of 32:", len(DataLoader(train, 32, sampler=sampler)), "each")

# %% [markdown]
# Each rank takes every third sample, and all get the same number, because a rank with a batch more would wait for the others (*Broken 5*). To make it even the sampler **pads**: it starts again from the front. With `drop_last=True` it leaves the rest out. The last line is 2,500 samples a rank in 78 full batches and one of 4.
#
# ### Broken 1: the order that never changes
#
# The program below trains three epochs. It shuffles: that is the sampler's default. So why does rank 0 draw only from half of the data?


# %%
# NBVAL_CHECK_OUTPUT
def three_epochs(call_set_epoch):
    sampler = DistributedSampler(range(10))  # asks the process group who it is
    loader = DataLoader(range(10), batch_size=5, sampler=sampler)
    epochs = []
    for epoch in range(3):
        if call_set_epoch:
            sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
    return epochs


for call in (False, True):
    for rank, epochs in enumerate(launch(three_epochs, 2, call)):
        seen = {number for epoch in epochs for batch in epoch for number in batch}
        print(f"set_epoch {call!s:5}  rank {rank}: all epochs alike: ", end="")
        print(epochs[0] == epochs[1] == epochs[2], f" different samples: {len(seen)} of 10")

# %% [markdown]
# All ranks must shuffle alike, or their shares would overlap. So the order follows from a seed and the number of the epoch, and the epoch stays 0 until you say otherwise. No error, no warning: only the same batches again and again. The *model* still learns from all samples, through the averaged gradients. What is lost is the shuffling: the same samples always come together. (That rank 1 misses one sample in three epochs of mixing is chance.) **Mend:** `sampler.set_epoch(epoch)` at the start of each epoch.
#
# ## Evaluate: every sample once
#
# ### Broken 2: accuracy with padding
#
# What helps training, harms measuring. Five test samples, of which the model gets only the first right: 20 %.


# %%
# NBVAL_CHECK_OUTPUT
RIGHT = [1, 0, 0, 0, 0]  # what the model got right, by sample


def padded(right):
    return list(DistributedSampler(right, shuffle=False))


def every_sample_once(right):
    return list(range(dist.get_rank(), len(right), dist.get_world_size()))


def accuracy_of(right, my_share):
    mine = [right[i] for i in my_share(right)]
    both = torch.tensor([sum(mine), len(mine)], device=my_device())
    dist.all_reduce(both)  # sums the counts of all ranks
    return both.tolist()


for my_share in (padded, every_sample_once):
    right, count = launch(accuracy_of, 2, RIGHT, my_share)[0]
    print(f"{my_share.__name__:18} {right} of {count} right: {right / count:.1%}")

# %% [markdown]
# Sample 0 came twice. With $p$ ranks up to $p - 1$ samples do, so the metric depends on the number of ranks. **Mend:** share out without padding, `range(rank, n, ranks)`. Ranks may then have different numbers of batches, which is no harm as long as only one all-reduce follows at the end. And call the plain model there, not the wrapper, which may send messages in a forward pass too (*BatchNorm*, below).
#
# ### Broken 3: the mean of means
#
# DDP divides by the number of ranks. It does not know how many samples each rank had. Let the loss be the mean of $w x$, so that the gradient is the mean of $x$. Rank 0 has two samples, 1 and 3; rank 1 has three, each 3.
#
# **Predict.** What is the mean of the five, and which gradient does DDP give?


# %%
# NBVAL_CHECK_OUTPUT
def gradient_of_mean(by_count):
    x = torch.tensor([[1.0, 3.0], [3.0, 3.0, 3.0]][dist.get_rank()], device=my_device())
    model = DDP(nn.Linear(1, 1, bias=False).to(my_device()))
    output = model(x[:, None])
    if by_count:
        count = torch.tensor(len(x), device=my_device())
        dist.all_reduce(count)  # how many samples all ranks have
        loss = output.sum() * dist.get_world_size() / count  # DDP divides by the world size
    else:
        loss = output.mean()
    loss.backward()
    return model.module.weight.grad.item()


for by_count in (False, True):
    print(f"by count: {by_count!s:5}  gradient {launch(gradient_of_mean, 2, by_count)[0]:.2f}")

# %% [markdown]
# The mean of 2 and 3 is 2.5, the mean of all five samples is 2.6. The same happens when you average the ranks' accuracies or losses for your log. **Mend:** add up sums and counts, divide once. For gradients multiply the local *sum* by the number of ranks, which DDP will divide by, and divide by the global count. Where all ranks have the same count, `mean()` is right as it is.
#
# ## Batch size and learning rate
#
# ### First keep the global batch
#
# The **global batch** is what all ranks together use for one step. You come from one device with batch 64: give each of two ranks 32. Then nothing else has to change. Here is the proof, over one epoch; the sampler for "one rank of one" gives the whole data in the order that the two share.


# %%
# NBVAL_CHECK_OUTPUT
def fit(model, sampler, batch, dtype):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler.set_epoch(0)
    for x, y in DataLoader(train, batch, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(my_device(), dtype)), y.to(my_device())).backward()
        optimizer.step()


def one_and_two(dtype):
    one, two = classifier().to(dtype), DDP(classifier().to(dtype))
    fit(one, DistributedSampler(train, num_replicas=1, rank=0), 64, dtype)  # no DDP: one device
    fit(two, DistributedSampler(train), 64 // dist.get_world_size(), dtype)
    return flat(one.parameters()), flat(two.parameters())


for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
    one, two = launch(one_and_two, 2, dtype)[0]
    difference = (one - two).abs().max().item()
    print(f"{dtype}: largest difference of a weight below {tolerance:g}: {difference < tolerance}")
    assert difference < tolerance

# %% [markdown]
# Not 0, because a mean of two means adds in another order than one mean, and rounding differs; 79 steps carry it on. In float64 the same program agrees to 12 decimal places, so it is rounding and nothing else.
#
# ### Then a larger global batch
#
# The smaller a rank's share, the less it computes for each message. So people let the global batch grow with the ranks. An epoch then has fewer steps, and each step should do more. Three rules are in use when the batch is $k$ times as large:
#
# - **unchanged**: leave the learning rate,
# - **square root**: multiply it by $\sqrt{k}$,
# - **linear**: multiply it by $k$.
#
# **Warm-up** lets the rate rise from near 0 to its value; here during the first fifth of the steps. To be fair to all, the rate of batch 64 is the best of three first. Then each rule runs over the same data, four epochs, six seeds. As you have just seen, one device with batch $B$ computes what two compute with $B/2$; so each rank trains whole runs here, half of the seeds each.
#
# **Guess**, then see: at 16 times the batch, which rule comes nearest to batch 64?

# %%
RATES, BASE, BATCHES, SEEDS = (0.1, 0.2, 0.4), 64, [256, 1024], range(6)
RULES = {  # what the learning rate is multiplied by, and the share of warm-up
    "unchanged": (lambda k: 1, 0),
    "square root": (lambda k: k**0.5, 0),
    "linear": (lambda k: k, 0),
    "square root, warm-up": (lambda k: k**0.5, 0.2),
    "linear, warm-up": (lambda k: k, 0.2),
}


def accuracy_after(seed, batch, rate, warm_up, epochs):
    model, (x, y) = classifier(seed), (t.to(my_device()) for t in train.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    steps = epochs * (len(x) // batch)
    rise = lambda step: min(1.0, (step + 1) / max(1, warm_up * steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rise)
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // batch * batch].view(-1, batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.inference_mode():
        x, y = (t.to(my_device()) for t in test.tensors)
        return 100 * (model(x).argmax(1) == y).float().mean().item()


def my_seeds(*options):
    return [accuracy_after(seed, *options) for seed in SEEDS[dist.get_rank() :: 2]]


def six_seeds(batch, rate, warm_up=0, epochs=4):
    return np.array(sum(launch(my_seeds, 2, batch, rate, warm_up, epochs), []))


plan = [(batch, rule) for batch in BATCHES for rule in RULES]
bar = tqdm(total=len(RATES) + len(plan) + 1, desc="six runs each", file=sys.stdout)
tuning, accuracy = {}, {}
for rate in RATES:
    tuning[rate] = six_seeds(BASE, rate)
    bar.update()
tuned = max(RATES, key=lambda rate: np.median(tuning[rate]))
for batch, rule in plan:
    factor, warm_up = RULES[rule]
    accuracy[batch, rule] = six_seeds(batch, tuned * factor(batch / BASE), warm_up)
    bar.update()
best = {b: max(RULES, key=lambda rule: np.median(accuracy[b, rule])) for b in BATCHES}
factor, warm_up = RULES[best[BATCHES[-1]]]
longer = six_seeds(BATCHES[-1], tuned * factor(BATCHES[-1] / BASE), warm_up, epochs=16)
bar.update()
bar.close()

# %%
middle = {key: np.median(runs) for key, runs in accuracy.items()}
reference = np.median(tuning[tuned])
print("test accuracy in %, median of six seeds")
for rate, runs in tuning.items():
    chosen = "<- the rate from here on" if rate == tuned else ""
    steps = 4 * (len(train) // BASE)
    print(f"batch {BASE:5}, {steps:3} steps, rate {rate:.1f}  {np.median(runs):26.1f}  {chosen}")
for batch, rule in plan:
    behind = int((accuracy[batch, best[batch]] > accuracy[batch, rule]).sum())
    note = "best median" if rule == best[batch] else f"behind the best with {behind} of 6 seeds"
    steps = 4 * (len(train) // batch)
    rate = tuned * RULES[rule][0](batch / BASE)
    print(f"batch {batch:5}, {steps:3} steps, rate {rate:.1f}, ", end="")
    print(f"{rule:21}{middle[batch, rule]:5.1f}  {note}")
steps, rule = 16 * (len(train) // BATCHES[-1]), best[BATCHES[-1]]
print(f"batch {BATCHES[-1]:5}, {steps:3} steps (16 epochs), {rule}: {np.median(longer):.1f}")

fig, ax = plt.subplots()
for number, rule in enumerate(RULES):
    runs = np.array([accuracy[b, rule] for b in BATCHES])
    places = [b * 1.06 ** (number - 2) for b in BATCHES]
    line = ax.plot(places, np.median(runs, axis=1), label=rule)[0]
    ax.plot(places, runs, linestyle="", marker=".", color=line.get_color(), alpha=0.5)
ax.axhline(reference, color="black", linestyle=":", marker="")
ax.text(360, reference + 1, f"batch {BASE}", fontsize=9)
ax.set_xscale("log", base=2)
ax.set_xticks(BATCHES, BATCHES)
ax.minorticks_off()
ax.set(xlabel="global batch (samples; the rules stand side by side)", ylabel="test accuracy (%)")
last = {rule: middle[BATCHES[-1], rule] for rule in RULES}
change = {rule: f"{value - reference:+.0f}" for rule, value in last.items()}
ax.set_title(
    f"From batch {BASE} to {BATCHES[-1]} the accuracy changes by {change['unchanged']} points\n"
    f"(unchanged rate), {change['square root']} (square root), {change['linear']} (linear)"
)
ax.legend(loc="lower left")
plots.show(
    fig,
    name="learning-rate-rules",
    alt="Test accuracy against the global batch for five rules of the learning rate. At batch "
    + f"{BATCHES[-1]}: "
    + ", ".join(f"{rule} {value:.0f} percent" for rule, value in last.items())
    + f". Batch {BASE} reaches {reference:.0f} percent.",
)

# %% [markdown]
# Large marks are medians, dots are the six seeds. Read it batch by batch. The best was picked on these same seeds, so a small difference says nothing, whatever the seeds; six of six by a clear distance is behind, the rest is undecided.
#
# At 1,024 all rules have the same 16 steps, and batch 64 had 312. What the unchanged rate loses, it loses with the missing steps. Where a rule ends below the unchanged rate, its own rate is too large for this model: linear multiplies by 16, and the momentum adds to that. The last line gives the large batch four times the epochs, and so four times the computation of batch 64, for a fifth of its steps. So: keep the global batch while you can. If it must grow, take a rule as the *start of a search* on your own model, and plan for more epochs.
#
# A schedule that asks a metric needs the same one on every rank. Here the loss stands still on rank 0 and falls on rank 1. (The schedule has also lost an argument, `verbose`.)


# %% then="ReduceLROnPlateau(optimizer, verbose=True)" now="scheduler.get_last_lr()" since="PyTorch 2.7"
# NBVAL_CHECK_OUTPUT
def rate_after(one_metric):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for loss in ([1.0, 1.0, 1.0], [1.0, 0.8, 0.6])[dist.get_rank()]:
        loss = torch.tensor(loss, device=my_device())
        if one_metric:
            dist.all_reduce(loss)
        schedule.step(loss.item())
    return round(schedule.get_last_lr()[0], 6)  # now: ask for the rate


try:
    torch.optim.lr_scheduler.ReduceLROnPlateau(None, verbose=True)  # then: let it print
except TypeError as error:
    print(error)
for one_metric in (False, True):
    print(f"same metric: {one_metric!s:5}  rate of each rank: {launch(rate_after, 2, one_metric)}")

# %% [markdown]
# ## Accumulation: a large batch in small pieces
#
# If a rank's share does not fit into memory, split it into **micro-batches**: several `backward()`, whose gradients add up, then one `step()`. DDP would all-reduce in each `backward()`. `ddp.no_sync()` holds it back, for all but the last. A **communication hook**, a function that DDP calls for each message of gradients, can count them.
#
# **Predict.** Each rank has four micro-batches of 8, and divides each loss by 4; the gradients of this model fit into one message. How many all-reduces are there without `no_sync`, with it around forward and backward, and around backward only? And how long is the gradient if nobody divides?


# %%
# NBVAL_CHECK_OUTPUT
def accumulate(quiet_forward, quiet_backward, weight, samples=64):
    ddp, messages = DDP(classifier()), []

    def count(state, bucket):
        messages.append(bucket.index())
        return allreduce_hook(None, bucket)

    ddp.register_comm_hook(None, count)
    x, y = (t[:samples].to(my_device()) for t in train.tensors)
    pieces = list(zip(*(t[dist.get_rank() :: 2].split(8) for t in (x, y)), strict=True))
    for number, (x_piece, y_piece) in enumerate(pieces, start=1):
        hold = number < len(pieces)
        with ddp.no_sync() if hold and quiet_forward else nullcontext():
            loss = F.cross_entropy(ddp(x_piece), y_piece)
        with ddp.no_sync() if hold and quiet_backward else nullcontext():
            (loss * weight(len(pieces), len(x_piece), samples)).backward()
    one = classifier()
    F.cross_entropy(one(x), y).backward()  # one device, all samples at once
    alone, ours = (flat(p.grad for p in model.parameters()) for model in (one, ddp))
    return len(messages), (ours.norm() / alone.norm()).item(), (ours - alone).abs().max().item()


by_pieces = lambda pieces, mine, samples: 1 / pieces  # noqa: E731
by_count = lambda pieces, mine, samples: mine * 2 / samples  # noqa: E731  (2 ranks)
WAYS = {
    "no no_sync": (False, False, by_pieces),
    "no_sync, both": (True, True, by_pieces),
    "no_sync, backward only": (False, True, by_pieces),
    "no_sync, not divided": (True, True, lambda *counts: 1),
    "43 samples, by pieces": (True, True, by_pieces, 43),
    "43 samples, by count": (True, True, by_count, 43),
}
for way, options in WAYS.items():
    messages, ratio, difference = launch(accumulate, 2, *options)[0]
    print(f"{way:23} all-reduces: {messages}  gradient ÷ one device's: {ratio:.2f}  ", end="")
    print(f"equal within 1e-6: {difference < 1e-6}")

# %% [markdown]
# With `no_sync` around forward *and* backward: one message, and the gradient of one device with the whole batch. Forgotten around the forward pass, it holds nothing back: DDP decides there. Forgotten to divide: the gradient is four times too long.
#
# The last two lines: 43 samples are micro-batches of 8, 8, 6 on rank 0 and 8, 8, 5 on rank 1. Dividing by their number is a mean of means again, and only near the truth. The weight that is right is *samples of this piece × ranks ÷ samples of all ranks*. Where the loss is a mean over tokens, count tokens, not texts.
#
# ## Broken 4: the wrapper is passed by
#
# A wrapped model hides its attributes, so people write `ddp.module.something`. Then `ddp.module(x)`, and then this:


# %%
# NBVAL_CHECK_OUTPUT
def replicas_agree(model):
    """True on every rank if all ranks hold the same parameters, bit by bit."""
    mine = flat(model.parameters()).to(my_device())
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def five_steps(through_module):
    ddp = DDP(classifier())
    model = ddp.module if through_module else ddp  # Broken 4
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for x, y in list(DataLoader(train, 32, sampler=DistributedSampler(train)))[:5]:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(my_device())), y.to(my_device())).backward()
        optimizer.step()
    return replicas_agree(ddp)


print("ddp(x):        same weights on both ranks:", launch(five_steps, 2, False)[0])
print("ddp.module(x): same weights on both ranks:", launch(five_steps, 2, True)[0])

# %% [markdown]
# Nothing complains, and each rank trains a model of its own on its own half of the data. **Mend:** in training call the wrapper, `ddp(x)`. And compare the replicas: `replicas_agree` finds any cause that makes weights differ. Call it once an epoch while you develop.
#
# ## BatchNorm: what is not averaged
#
# BatchNorm keeps **buffers**: running means of its inputs, which are not parameters and have no gradient. DDP treats them in its own way: at the start of each forward pass of the wrapper, also in `eval()`, it sends rank 0's to all ranks.
#
# Here rank 0 sees only zeros, rank 1 only eights, and each step moves the running mean half-way to the mean of the batch. One device with the whole batch would see a mean of 4, and hold 2, 3, 3.5.
#
# **Predict.** What does each rank hold after each of three steps?


# %%
# NBVAL_CHECK_OUTPUT
def running_means():
    norm = nn.BatchNorm1d(1, momentum=0.5).to(my_device())
    ddp = DDP(norm)
    x = torch.full((4, 1), 8.0 * dist.get_rank(), device=my_device())
    means = []
    for _ in range(3):
        ddp(x).sum().backward()
        means.append(norm.running_mean.item())
    return means


for rank, means in enumerate(launch(running_means, 2)):
    print(f"rank {rank}: {means}")

# %% [markdown]
# Rank 1 begins each step at rank 0's 0 and gets no further than 4. What you evaluate and save on rank 0 are the statistics of its share: nobody averages.
#
# In training BatchNorm does not use the buffers, but the mean and variance of its own batch: 32 samples a rank are not 64 on one device. GroupNorm, which normalises each sample by itself, is the comparison. And `SyncBatchNorm` is meant to mend it: it computes mean and variance over all ranks, which then talk in the forward pass too.


# %%
# NBVAL_CHECK_OUTPUT
def error_of_gradient(make_norm, convert=lambda model: model):
    def model():
        torch.manual_seed(0)
        layers = nn.Linear(196, 64), make_norm(), nn.ReLU(), nn.Linear(64, 10)
        return nn.Sequential(*layers).to(my_device(), torch.float64)

    x, y = (t[:64].to(my_device()) for t in train.tensors)
    x, mine = x.double(), slice(dist.get_rank(), None, dist.get_world_size())
    one, two = model(), DDP(convert(model()))
    F.cross_entropy(one(x), y).backward()
    F.cross_entropy(two(x[mine]), y[mine]).backward()
    alone, ours = (flat(p.grad for p in m.parameters()) for m in (one, two))
    return ((ours - alone).norm() / alone.norm()).item()


NORMS = {"BatchNorm": lambda: nn.BatchNorm1d(64), "GroupNorm": lambda: nn.GroupNorm(8, 64)}
errors = {name: launch(error_of_gradient, 2, norm)[0] for name, norm in NORMS.items()}
print("GroupNorm equals one device within 1e-12:", errors["GroupNorm"] < 1e-12)
print(f"BatchNorm is off by {errors['BatchNorm']:.0%} of the gradient's length")


# %%
def sync_batch_norm():
    convert = nn.SyncBatchNorm.convert_sync_batchnorm
    if my_device().type == "cuda":
        error = error_of_gradient(NORMS["BatchNorm"], convert)
        assert error < 1e-6, "over all ranks it must equal one device"
        return f"on GPUs it equals one device: error of the gradient {error:.0e}"
    try:
        error_of_gradient(NORMS["BatchNorm"], convert)
    except ValueError as error:
        return f"on cores: {type(error).__name__}: {error}"
    raise AssertionError("SyncBatchNorm works on cores now")


print("SyncBatchNorm", launch(sync_batch_norm, 2)[0])
x = torch.randn(4, 64)
same = torch.equal(nn.SyncBatchNorm(64)(x), nn.BatchNorm1d(64)(x))
print("SyncBatchNorm without a group equals BatchNorm:", same)

# %% [markdown]
# BatchNorm's gradient is not wrong, it is another model's: each rank normalises with its own half. SyncBatchNorm's limit: GPUs only. On cores DDP refuses it; and without a process group it is silently a plain BatchNorm, so a test on one CPU does not warn you.
#
# ## A seed for each rank
#
# "Set the seed at the top" is good advice on one device. On many, the same seed gives the same random numbers: every rank drops the same units, and adds the same noise to its pictures.


# %%
# NBVAL_CHECK_OUTPUT
def dropped(seed_of_rank):
    seed = seed_of_rank(dist.get_rank())
    model = classifier(seed)  # sets the seed, then draws the weights
    before = replicas_agree(model)
    return F.dropout(torch.ones(1000)).tolist(), before, replicas_agree(DDP(model))


for name, rule in {"0": lambda rank: 0, "1000 + rank": lambda rank: 1000 + rank}.items():
    (one, before, after), (two, _, _) = launch(dropped, 2, rule)
    print(f"seed {name:12} same dropout: {one == two!s:5}  same weights: {before}, in DDP: {after}")

# %% [markdown]
# **Mend:** a number made from both, such as `1000 * seed + rank`. (With `seed + rank`, rank 1 of seed 0 is rank 0 of seed 1.) The weights are equal in any case once DDP has the model: it sends rank 0's. What else must be equal, such as a random split of the data, needs a generator with one seed for all. The sampler has its own `seed`, which must be the same on all ranks.
#
# ## Save and load
#
# **Predict.** You save `ddp.state_dict()` and load it into the plain model. What happens?


# %%
# NBVAL_CHECK_OUTPUT
def names():
    ddp, plain = DDP(classifier()), classifier(seed=1)
    try:
        plain.load_state_dict(ddp.state_dict())
    except RuntimeError as error:
        refused = "Missing key(s)" in str(error)
    else:
        raise AssertionError("the prefix no longer matters")
    plain.load_state_dict(ddp.module.state_dict())
    return list(ddp.state_dict())[0], list(ddp.module.state_dict())[0], refused


print("{} | {} | the first is refused: {}".format(*launch(names, 2)[0]))

# %% [markdown]
# The wrapper holds your model under the name `module`, so every key begins with it. **Save `ddp.module.state_dict()`**: it fits the plain model, and so any number of ranks. (For a file that has the prefix already: `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present`.)
#
# Replicas are equal, so one rank saves. Then a barrier, because the others must not read a file that is not complete. Then all load, each to its own device (`map_location`), because a file remembers the device that it was saved from. Momentum is the optimizer's, so that is saved too.


# %%
# NBVAL_CHECK_OUTPUT
def train_on(ddp, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(ddp(x.to(my_device())), y.to(my_device())).backward()
        optimizer.step()


def make(seed):
    ddp = DDP(classifier(seed))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def stop_and_go_on(file):
    batches = list(DataLoader(train, 32, sampler=DistributedSampler(train)))[:10]
    straight, optimizer = make(seed=0)
    train_on(straight, optimizer, batches)  # ten steps without a stop

    ddp, optimizer = make(seed=0)
    train_on(ddp, optimizer, batches[:5])
    if dist.get_rank() == 0:
        state = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, file)
    dist.barrier()  # the file is complete
    ddp, optimizer = make(seed=1)  # as after a restart: other weights, no momentum
    state = torch.load(file, map_location=my_device())
    ddp.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train_on(ddp, optimizer, batches[5:])
    same = (flat(ddp.parameters()) - flat(straight.parameters())).abs().max().item()
    return same, replicas_agree(ddp)


with tempfile.TemporaryDirectory() as folder:
    difference, agree = launch(stop_and_go_on, 2, str(Path(folder) / "run.pt"))[0]
print("as without a stop, within 1e-6:", difference < 1e-6, " ranks agree:", agree)

# %% [markdown]
# A real run also wants its position in the epoch and its random numbers back, and a file that survives a kill in the middle of writing: that is `Checkpoint` in `course_utils.checkpoint`. And save plain numbers: [since PyTorch 2.6](https://docs.pytorch.org/docs/stable/notes/serialization.html) `torch.load` refuses most other objects, because unpickling runs code that the file brings along.

# %% then="torch.load unpickles anything" now="weights_only=True is the default: save tensors and plain numbers" since="PyTorch 2.6"
# NBVAL_CHECK_OUTPUT
for loss in (np.float64(0.5), float(np.float64(0.5))):  # then: np.mean(losses); now: a float
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    try:
        print(type(loss).__name__, "loaded:", torch.load(file))
    except pickle.UnpicklingError as error:
        print(type(loss).__name__, "refused:", str(error).split(".")[0])

# %% [markdown]
# ## Broken 5: one rank has a batch more
#
# Text, video, files of different length: not all data can be shared out evenly. Here rank 0 has three batches and rank 1 has two. The gradient of each batch is 1, the learning rate 1.
#
# **Predict.** What does rank 0 do in its third step?


# %%
def uneven(use_join):
    model = nn.Linear(1, 1, bias=False).to(my_device())
    nn.init.zeros_(model.weight)
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    steps = 0
    with ddp.join() if use_join else nullcontext():
        for _ in range(3 - dist.get_rank()):
            optimizer.zero_grad()
            ddp(torch.ones(4, 1, device=my_device())).mean().backward()
            optimizer.step()
            steps += 1
    return steps, model.weight.item()


try:
    launch(uneven, 2, False, timeout=6)
except LaunchTimeout as error:
    print(error)
else:
    raise AssertionError("uneven batches went unnoticed")

print("\nwith ddp.join():")
for rank, (steps, weight) in enumerate(launch(uneven, 2, True)):
    print(f"rank {rank}: {steps} steps, weight {weight:g}")

# %% [markdown]
# Rank 0 waits in its third `backward()` for a message of rank 1, which has left the loop. The rank that waits is not the one that is wrong. Three ways to mend it: make the counts equal (the sampler does, by padding or `drop_last`); agree on the smallest count before the epoch; or let DDP cope, as in the last two lines. Within `ddp.join()` a rank that is done answers the others' messages with zeros, and in the end gets the last one's weights. The mean is still divided by two ranks, so the third step moves the weight by a half, not by 1. ([`join`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.join) can divide by the ranks that are left instead, and it answers DDP's messages only: do not put an all-reduce of your own into such a loop.)
#
# ## What the second rank is worth
#
# Two questions that are often mixed up:
#
# - **Strong scaling:** the global batch stays. Each of two ranks gets half of it. How much sooner is a step done?
# - **Weak scaling:** the batch of each rank stays. Two ranks do twice as much. How many more samples a second is that?
#
# So measure a step of rank 0 alone, and a step of both with DDP, at five batch sizes a rank, taking turns. The same numbers answer both. Two ranks with 32 samples each are one run; strong scaling holds it against *one step of 64* on one device, weak scaling against *two steps of 32*.
#
# **Predict.** What would have to be true of one device for both to give the same number?

# %%
SIZES, ROUNDS = [8, 16, 32, 64, 128], 11


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 14, 14)), nn.Conv2d(1, 64, 3, stride=2), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    ).to(my_device())  # fmt: skip


def one_step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    y.sum().item()  # the clock stops when the device is done, also on a GPU


def scaling():
    x, y = (t[: SIZES[-1]].to(my_device()) for t in train.tensors)
    alone, both = convolutional(), DDP(convolutional())
    optimizers = {m: torch.optim.SGD(m.parameters(), lr=0.01) for m in (alone, both)}
    seconds = {(size, m): [] for size in SIZES for m in (alone, both)}
    for number in range(ROUNDS + 2):  # two rounds to warm up
        for size, model in list(seconds)[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            if model is both or dist.get_rank() == 0:
                one_step(model, optimizers[model], x[:size], y[:size])
            if number >= 2:
                seconds[size, model].append(time.perf_counter() - start)
    return [[seconds[size, m] for size in SIZES] for m in (alone, both)]


one, two = (
    {size: Timing(tuple(runs)) for size, runs in zip(SIZES, rows, strict=True)}
    for rows in launch(scaling, 2)[0]
)


# %%
def ratio(above, below, factor=1.0):
    pairs = zip(above.runs, below.runs, strict=True)  # of the same round
    return Ratio(tuple(factor * a / b for a, b in pairs))


weak = {size: ratio(one[size], two[size], 2) for size in SIZES}
strong = {size: ratio(one[2 * size], two[size]) for size in SIZES[:-1]}
apart = {size: ratio(one[size], one[2 * size], 2) for size in SIZES[:-1]}
print("a rank's batch   one rank   two ranks   strong   weak   two steps ÷ one of twice the size")
for size in SIZES:
    print(f"{size:14}{one[size].short():>11}{two[size].short():>12}", end="")
    print(f"{strong[size].median:9.2f}" if size in strong else "        –", end="")
    print(f"{weak[size].median:7.2f}", f"{apart[size].median:8.2f}" if size in apart else "")
message = sum(p.numel() * p.element_size() for p in convolutional().parameters())
print(f"gradients to be sent in every step: {message / 1024:.0f} KiB")

fig, ax = plt.subplots()
for number, (name, gains) in enumerate({"strong": strong, "weak": weak}.items()):
    middle = np.array([gain.median for gain in gains.values()])
    reach = [
        [g.median - g.low for g in gains.values()],
        [g.high - g.median for g in gains.values()],
    ]
    places = [size * (0.97, 1.03)[number] for size in gains]
    ax.errorbar(
        places, middle, yerr=reach, capsize=3, label=name,
        color=plots.COLOURS[number], marker=plots.MARKERS[number],
    )  # fmt: skip
for level, text in ((1, "no gain"), (2, "perfect")):
    ax.axhline(level, color="black", linestyle=":", marker="")
    ax.text(1.02, level, text, fontsize=9, va="center", transform=ax.get_yaxis_transform())
ax.set_xscale("log", base=2)
ax.set_xticks(SIZES, SIZES)
ax.minorticks_off()
ax.set(xlabel="samples a rank", ylabel="samples a second, two ranks ÷ one (×)", ylim=(0, 2.4))
gain = {
    name: ", ".join(str(size) for size, r in ratios.items() if r.median > 1) or "none"
    for name, ratios in {"strong": strong, "weak": weak}.items()
}
ax.set_title(
    "Samples a rank at which two ranks were faster than one\n"
    f"(median): strong scaling {gain['strong']}; weak {gain['weak']}"
)
ax.legend(loc="lower right")
plots.show(
    fig,
    name="strong-and-weak-scaling",
    alt="Samples a second of two ranks over those of one, against the samples a rank. Strong scaling from "
    f"{strong[SIZES[0]].median:.2f} at {SIZES[0]} to {strong[SIZES[-2]].median:.2f} at "
    f"{SIZES[-2]}, weak scaling from {weak[SIZES[0]].median:.2f} at {SIZES[0]} to "
    f"{weak[SIZES[-1]].median:.2f} at {SIZES[-1]}. 2 would be perfect.",
)

# %% [markdown]
# Strong, weak and the last column are medians of the ratios of each round, so they need not be the ratio of the two columns of medians; bars hold the middle half of the rounds. Weak ÷ strong is the last column, *two steps of a size ÷ one step of twice the size* on one device, but for rounding, and for noise of the size of the bars. At 1 both scalings agree. Above 1, a device likes the large step better, and weak looks better than strong; below 1 it is the other way round. So say which one you mean.
#
# The message has the size of the model, whatever the batch is. If that were all, both lines would only rise with the share of a rank; where yours fall, look at the bars first. Where they overlap, it may be noise; where they do not, something else costs more there, such as memory or other programs on your machine.
#
# ## From a shell, and on real GPUs
#
# Everything above is what a script does between `dist.init_process_group()` and `dist.destroy_process_group()`. Two ranks on one machine: `torchrun --standalone --nproc-per-node=2 train.py`.
#
# What pinned cores cannot show: NCCL's messages between GPUs, which have other costs, so the curves lie elsewhere there. Results on real GPUs: **not measured** yet.
#
# ## Exercise
#
# [Exercise 05](../exercises/05_ddp_in_practice.ipynb): write the sampler, an exact accuracy on two ranks, and an accumulation that weighs by count. About 35 minutes.
#
# ## Recap
#
# DDP averages gradients over ranks and nothing else: shares of the data, means of unequal counts, seeds, buffers and files are yours. Keep the global batch first, then nothing changes; what a larger one does to the learning rate is a measurement. A rank that calls `backward()` once more than the others waits for a message that does not come; a wrong share, mean or seed trains on, and only a comparison shows it.
#
# 1. 1,001 test pictures on 4 ranks with `DistributedSampler`: how many are counted?
# 2. You accumulate 4 micro-batches of equal size on 2 ranks with `no_sync`. By what do you divide each loss, and how many all-reduces are there in a step?
# 3. Your loss falls on every rank, but the saved model is worse than the log says. Name two causes from this lesson.
#
# <details><summary>Answers</summary>
#
# 1. 1,004: three are counted twice.
# 2. By 4; DDP divides by the 2. For a small model, whose gradients fit into one message: one all-reduce, and four without `no_sync`.
# 3. For example: `ddp.module(x)` was called, so you saved one of two different models; the metric in the log was padded, or a mean of means; BatchNorm's buffers are those of rank 0's share.
#
# </details>
#
# Go on with [exercise 05](../exercises/05_ddp_in_practice.ipynb).
