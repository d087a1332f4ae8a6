# ---
# jupyter:
#   course:
#     rows: [A2, A3, A4, A5, A6]
#     minutes: {read: 32, do: 38}
#     devices: 2
#     path: more
#     extra: torch,experiment
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
# # An experiment report, done again
#
# After this lesson you can run a training experiment on several devices so that others can believe it: the data apart from the model, counts that are checked, times with their spread, validation on images that the model has not seen, a log, and a model file that runs without PyTorch.
#
# | | |
# |---|---|
# | **Time** | 32 minutes to read, 38 to predict and run; the exercise takes 40 more |
# | **You should know** | a training loop in PyTorch; ranks and `launch` ([lesson 00](00_start_here.ipynb)); gradient averaging by DDP ([lesson 04](04_ddp_from_scratch.ipynb)) |
# | **You will** | write a DataModule whose ranks see different images · get the same weights from Lightning and from a loop by hand · log without an account · redo a table of devices × batch × iterations × time · see what is hidden by a validation set that is the training set · export to ONNX |
# | **Runs on** | no GPU, or one: pinned cores · two GPUs or more: the same cells on GPUs (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0, Lightning 2.6.6, W&B 0.31, TensorBoard 2.21, ONNX Runtime 1.31 |
#
# **In two lines, what you need.** A **rank** is one of several processes that train together; their number is the **world size**. **DDP** (DistributedDataParallel) gives each rank a copy of the model and its own part of the images, and averages the gradients in each step, so that all copies stay equal.

# %%
import logging
import math
import os
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")

import matplotlib.pyplot as plt
import numpy as np
import psutil
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import photo_patches, photographs
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.timing import Timing

plots.use_style()
torch.set_num_threads(1)  # one core is one device


def be_quiet():
    """Lightning's tips and notices go, its errors stay. TensorBoard must not load TensorFlow."""
    for name in ["pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"]:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # PyTorch's own, about itself
    sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")  # TensorBoard's switch


be_quiet()

# %%
print(census())
devices = slots(2)
assert len(devices) == 2, "this lesson runs on two devices"
if devices[0].kind == "core":  # with one GPU, one rank would get it and two would get cores:
    os.environ["COURSE_TIER"] = "cpu"  # then compare cores with cores

# %% [markdown]
# ## The report
#
# About 2022 somebody trained a small **auto-encoder** (a network that squeezes an image into a few numbers and draws it again from them) with DDP on up to three GPUs. The report shows this table. *Iterations* are the steps of an epoch, training and validation together, on each GPU.
#
# | GPUs | batch per GPU | iterations | time |
# |---|---|---|---|
# | 3 | 128 | 34 | 33 s |
# | 1 | 128 | 102 | 55 s |
# | 3 | 64 | 68 | 31 s |
#
# The report is a hand-out without an address on the web, so you cannot look it up: one more reason to trust only what can be counted. It concludes: the batch size makes no clear difference to the time, the number of GPUs does. It trains on 6,472 images, and validates on 6,472 images: *the same ones*. **How many epochs the seconds are for is not stated.** So this lesson compares no time with the report's; only the counts can be checked. Everything else we measure anew.
#
# ## The images
#
# The report's images are not published. Ours are cut from five photographs that ship with the course, 6,472 of the pieces that this gives, as many as the report has. A piece has 20 × 20 pixels: the network needs sides that are divisible by 20, the counts do not depend on the size, and small pieces are quick.
#
# The pieces start 6 pixels apart, so **neighbours overlap**. Split at random, a piece for training and one for validation would share pixels: validation would ask about what was seen. So two whole other photographs are held out.

# %%
# NBVAL_CHECK_OUTPUT
N, SIZE = 6472, 20


def to_tensor(pieces):
    """uint8 [n, height, width, 3] as images are stored -> [n, 3, height, width] as torch wants."""
    return torch.from_numpy(pieces).permute(0, 3, 1, 2).contiguous()


images, held_out = map(to_tensor, photo_patches(SIZE, limit=N))
print("training:", tuple(images.shape), images.dtype)
print("held out:", tuple(held_out.shape), "from", " and ".join(photographs("validation")))
assert len(images) == N

# %% [markdown]
# ## The model, layer by layer
#
# Two convolutions with pooling make the image smaller, two **transposed convolutions** make it larger again.
#
# **Predict.** Pool 4, then pool 5, on 20 × 20 pixels with 16 channels: how many numbers are left of the 1,200 in the middle?
#
# The last layer is a ReLU: it turns every negative number into 0, and passes no gradient back from there. The second cell measures how much of the picture that hits before training.


# %%
# NBVAL_CHECK_OUTPUT
def autoencoder():
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(5),
        nn.ConvTranspose2d(16, 8, 5, stride=5), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 5, stride=4, padding=1, output_padding=1), nn.ReLU(),
    )  # fmt: skip


x = images[:1] / 255
for layer in autoencoder():
    x = layer(x)
    print(f"{type(layer).__name__:16}", *x.shape[1:], sep="  ")
print("parameters:", sum(p.numel() for p in autoencoder().parameters()))


# %%
# NBVAL_CHECK_OUTPUT
def new_model(bias=0.4):
    """The report's layers. Only the start differs: the last bias begins at a medium grey."""
    torch.manual_seed(1)
    model = autoencoder()
    if bias is not None:
        nn.init.constant_(model[-2].bias, bias)
    return model


for bias in (None, 0.4):
    zero = (new_model(bias)(images[:500] / 255) == 0).float().mean().item()
    print(f"last bias {bias}: {zero:.0%} of the output is 0")

# %% [markdown]
# What is 0 gets no gradient. A grey start costs nothing and changes no layer. Whether the report met this we cannot know.
#
# ## The data, out of the model
#
# The report's author wrote: *I never got the data loader out of the model.* Here it is. First the part that matters on several ranks: which images are mine?


# %%
def shard_loader(images, batch, train):
    """This rank's part of the images, in batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if train:  # shuffled anew in each epoch, all ranks with the same number of images
        sampler = DistributedSampler(images, world, rank, shuffle=True, seed=0)
    else:  # every world-th image, none twice
        sampler = range(rank, len(images), world)
    return DataLoader(images, batch_size=batch, sampler=sampler)


class Photos(pl.LightningDataModule):
    """Cuts once per machine, loads once per rank, deals out per rank."""

    def __init__(self, folder, batch):
        super().__init__()
        self.file, self.batch = Path(folder, "images.npy"), batch

    def prepare_data(self):  # one rank of each machine: download, cut, write
        np.save(self.file, photo_patches(SIZE, limit=N)[0])

    def setup(self, stage=None):  # every rank: read
        self.images = to_tensor(np.load(self.file))

    def train_dataloader(self):
        return shard_loader(self.images, self.batch, train=True)

    def val_dataloader(self):  # the training images, as in the report: more on this below
        return shard_loader(self.images, self.batch, train=False)


# %% [markdown]
# A **DataModule** is four methods under names that Lightning's `Trainer` knows; nothing of the model is in it. You can ask it without any `Trainer`. Instead of images, let each rank say *which* it would see, once with the loader above, and once with an ordinary `DataLoader(shuffle=True)`.
#
# **Predict.** Two ranks, two ordinary shuffled loaders, both seeded alike: how many images does only one of them see? And how do their batches differ?


# %%
# NBVAL_CHECK_OUTPUT
def numbers_seen(kind):
    torch.manual_seed(0)
    numbers = torch.arange(N)
    if kind == "ordinary":
        loader = DataLoader(numbers, batch_size=64, shuffle=True)
    else:
        loader = shard_loader(numbers, 64, train=kind == "train")
    return torch.cat(list(loader)).tolist()


for kind in ["ordinary", "train", "validation"]:
    ranks = launch(numbers_seen, 2, kind)
    first, second = map(set, ranks)
    print(f"{kind:10}  rank 0: {len(first)}  rank 1: {len(second)}", end="  ")
    print(f"seen by both: {len(first & second)}  by nobody: {N - len(first | second)}", end="  ")
    print("same order:", ranks[0] == ranks[1])
    assert kind == "ordinary" or (not first & second and len(first | second) == N)

# %% [markdown]
# With ordinary loaders both ranks do all the work: no error, no warning, and no gain; seeded alike, even the batches are the same. Lightning knows this trap: by default its `Trainer` [puts a `DistributedSampler` in](https://lightning.ai/docs/pytorch/stable/common/trainer.html#use-distributed-sampler). We deal out ourselves, so we tell it not to (`use_distributed_sampler=False`), and look below whether it obeyed, by the validation loader's sampler.
#
# ## Count before you run
#
# 6,472 images do not come out even on 3 GPUs: the sampler *repeats* two, so that each has 2,158. A last batch that is not full is a step too.
#
# **Predict.** 6,472 images on 3 GPUs, batch 128 each. How many training steps does each GPU do in an epoch?

# %%
# NBVAL_CHECK_OUTPUT
REPORT = {(3, 128): 34, (1, 128): 102, (3, 64): 68}  # GPUs, batch: iterations


def steps(n, world, batch):
    """Steps of one pass over n images, on each rank."""
    return math.ceil(math.ceil(n / world) / batch)


for (world, batch), reported in REPORT.items():
    each = steps(N, world, batch)
    print(f"GPUs: {world}, batch {batch:3}: {each} training + {each} validation = {2 * each}")
    assert 2 * each == reported

fits = [
    n
    for n in range(1, 2 * N)
    if all(steps(N, w, b) + steps(n, w, b) == total for (w, b), total in REPORT.items())
]
print("validation sets that fit all three rows:", fits[0], "to", fits[-1], "images")

# %% [markdown]
# So the arithmetic fits the report, and only with a validation set of about the size of the training set. An epoch that really runs will be held against it below.
#
# ## The same training twice: by hand, and by Lightning
#
# By hand: DDP around the model, two epochs, and an evaluation that adds errors and counts over all ranks.
#
# For **Lightning** (second cell) the same goes into a `LightningModule`: what a step is, and which optimizer. The loop, the moving of data, DDP and the calls of `set_epoch` are the Trainer's.


# %%
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    cuda = torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def loss_of(model, batch):
    x = batch.to(my_device()).float() / 255
    return F.mse_loss(model(x), x)


def train_step(model, optimizer, batch):
    loss = loss_of(model, batch)
    optimizer.zero_grad()
    loss.backward()  # DDP averages the gradients here
    optimizer.step()
    return loss.item()  # reading it also waits for a GPU


def evaluate(model, loader):
    """Mean squared error over the images of all ranks, and the batches of this one."""
    sums = torch.zeros(3, dtype=torch.float64, device=my_device())
    with torch.no_grad():
        for batch in loader:
            error = loss_of(model, batch).item() * len(batch)
            sums += sums.new_tensor([error, len(batch), 1])
    batches = int(sums[2])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item(), batches


def train_by_hand(data, epochs):
    model = DistributedDataParallel(new_model().to(my_device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader, losses, checks = data.train_dataloader(), [], []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)  # another order in each epoch
        losses += [train_step(model, optimizer, batch) for batch in loader]
        # .module: the model inside the wrapper. Ranks evaluate without talking.
        checks.append(evaluate(model.module, data.val_dataloader())[0])
    return losses, checks, model.module.cpu().state_dict()


# %%
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses, self.checks = new_model(), [], []

    def training_step(self, batch, index):
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss = loss_of(self.net, batch)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch))

    def on_validation_epoch_end(self):
        self.checks.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=4e-3)


# %% [markdown]
# ### Loggers that need no account
#
# We hand the `Trainer` two loggers: **TensorBoard** files, and **Weights & Biases** (W&B), a web service. With `WANDB_MODE=offline` (in the first cell) W&B only writes a folder, which you may upload later with `wandb sync`, or never. Both belong to rank 0 alone: Lightning sees to it, but *we* start the W&B run, so we ask for the rank.
#
# Ranks of `launch` already exist when Lightning comes. `TorchElasticEnvironment` tells it to start none, and to read `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and the `MASTER_…` address as `torchrun` sets them too. From a shell: `torchrun --standalone --nproc-per-node=2 train.py`. And `init=False`, because Lightning makes the process group; the loop by hand then uses the same one.
#
# **Predict.** The same seed, the same images in the same order: do the two trainings end with the same weights?


# %%
def make_loggers(folder):
    from pytorch_lightning.loggers import TensorBoardLogger, WandbLogger

    if os.environ["RANK"] != "0":
        return [TensorBoardLogger(folder, name="tensorboard", version="0")]  # silent here
    import wandb

    run = wandb.init(project="autoencoder", dir=folder, config={"batch": 64, "ranks": 2})
    return [TensorBoardLogger(folder, name="tensorboard", version="0"), WandbLogger(experiment=run)]


def end_wandb():
    """W&B runs a service process beside yours: end it. Returns how many there were and are."""
    import wandb

    before = len(psutil.Process().children(recursive=True))
    wandb.finish()
    wandb.teardown()
    return before, len(psutil.Process().children(recursive=True))


def train_both_ways(folder, epochs=2):
    be_quiet()
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    torch.use_deterministic_algorithms(True, warn_only=True)  # for GPUs: two runs, one result
    data, lit, loggers = Photos(folder, batch=64), Lit(), make_loggers(folder)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_epochs=epochs,
        plugins=[TorchElasticEnvironment()], logger=loggers, log_every_n_steps=1,
        use_distributed_sampler=False, num_sanity_val_steps=0, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lit, data)
    by_lightning = lit.losses, lit.checks, lit.net.cpu().state_dict()
    kept = type(trainer.val_dataloaders.sampler).__name__  # ours is a range
    services = end_wandb() if os.environ["RANK"] == "0" else (0, 0)
    return by_lightning, train_by_hand(data, epochs), services, kept


folder = tempfile.TemporaryDirectory()  # gone with the kernel
both = launch(train_both_ways, 2, folder.name, init=False, timeout=300)

# %%
# NBVAL_CHECK_OUTPUT
for rank, (lightning, hand, *_) in enumerate(both):
    loss_gap = max(abs(a - b) for a, b in zip(lightning[0], hand[0], strict=True))
    check_gap = max(abs(a - b) for a, b in zip(lightning[1], hand[1], strict=True))
    gap = max((lightning[2][name] - hand[2][name]).abs().max().item() for name in hand[2])
    print(
        f"rank {rank}: {len(lightning[0])} steps; losses within 1e-6: {loss_gap < 1e-6};", end=" "
    )
    print(f"validation within 1e-6: {check_gap < 1e-6}; weights within 1e-5: {gap < 1e-5}")
    assert loss_gap < 1e-6 and check_gap < 1e-6 and gap < 1e-5
same = all(torch.equal(both[0][1][2][name], both[1][1][2][name]) for name in both[0][1][2])
print("both ranks end with the same weights, bit by bit:", same)
print("Lightning kept our way of dealing out, a", both[0][3])
assert same and both[0][3] == "range"

# %% [markdown]
# So yes: the same weights, within a tolerance. It is not zero, because a library may order its additions otherwise from run to run; the next but one cell prints the differences on your machine. For the validation loss our loop adds the batches in 64 bits, Lightning in 32. And [`sync_dist=True`](https://lightning.ai/docs/pytorch/stable/extensions/logging.html) takes the mean of the ranks' means, which is the mean over all images only because both ranks have 3,236 of them. Lightning adds no magic: it runs this loop, and spares you writing it.
#
# ### What the loggers wrote
#
# TensorBoard's own program shows the curves (`tensorboard --logdir …`). Here its reader gets them back from the file, and W&B's folder is listed.

# %%
# NBVAL_CHECK_OUTPUT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(str(Path(folder.name, "tensorboard", "0"))).Reload()
logged = {tag: events.Scalars(tag) for tag in ["train_loss", "val_loss"]}
print("points in TensorBoard's file:", {tag: len(points) for tag, points in logged.items()})
offline = list(Path(folder.name, "wandb").glob("offline-run-*/*.wandb"))
print(
    "W&B runs on the disk, not sent:", len(offline), "with data:", offline[0].stat().st_size > 1000
)
running, left = both[0][2]
print(f"W&B's service ran beside rank 0: {running > 0}; left after the end: {left}")
assert left == 0
print("TensorFlow was loaded:", "tensorflow" in sys.modules)

# %%
print(f"by hand against Lightning, rank 1: weights {gap:.1e}, validation {check_gap:.1e} apart")
fig, ax = plt.subplots()
for tag, points in logged.items():
    style = "-" if tag == "train_loss" else "s"
    label = f"{tag} ({'rank 0' if style == '-' else 'both ranks'})"
    ax.plot([p.step + 1 for p in points], [p.value for p in points], style, label=label)
first, last = (logged["val_loss"][i].value for i in (0, -1))
ax.set(xlabel="training step", ylabel="mean squared error", yscale="log")
ax.set_yticks([0.01, 0.02, 0.05, 0.1], [0.01, 0.02, 0.05, 0.1])
ax.yaxis.minorticks_off()
ax.set_title(f"From TensorBoard's file: val_loss {first:.3f}, then {last:.3f}")
ax.legend()
print("epoch  val_loss")
for epoch, point in enumerate(logged["val_loss"]):
    print(f"{epoch:5}  {point.value:.4f}")
plots.show(
    fig,
    name="logged-curves",
    alt="Training loss of rank 0 over 102 steps, and validation loss after each of two epochs, "
    f"read from TensorBoard's file. The validation loss is {first:.3f}, then {last:.3f}.",
)

# %% [markdown]
# `train_loss` is rank 0's own, of its own images logged without `sync_dist`; `val_loss` is the mean over both ranks.
#
# Then → now: two arguments of older tutorials are errors today.

# %% then="Trainer(gpus=2), Trainer(strategy='dp')" now="Trainer(accelerator='gpu', devices=2, strategy='ddp')" since="Lightning 2.0"
# NBVAL_CHECK_OUTPUT
for old in ({"gpus": 2}, {"accelerator": "cpu", "strategy": "dp"}):
    try:
        pl.Trainer(**old)
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}:", str(error).split(". ")[0])
    else:
        raise AssertionError(f"Trainer({old}) works again")
print("now:", pl.Trainer(accelerator="cpu", devices=2, logger=False).num_devices, "devices")

# %% [markdown]
# ## The table, done again
#
# For each row one full epoch runs, training and validation on the report's images, and its iterations are *counted*, not computed. The times are of training, loading included: after one step of warm-up, three slices of 20 steps. The table shows the median slice and the range of all three. Three ranks on two cores are **oversubscribed**: right in their counts, meaningless in their times, so we do not time them. The batch is per device, as in the report.
#
# **Predict.** From batch 64 to batch 256 on one device: does an epoch take longer, shorter, or as long? And with two devices instead of one, at the same batch *per device*, so that the global batch doubles?


# %%
def run_row(batch, timed):
    """Counts of an epoch, loss on held-out images after it, seconds a step in three slices."""
    model = DistributedDataParallel(new_model().to(my_device()))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    train, check = (shard_loader(images, batch, train=kind) for kind in (True, False))
    seconds, epoch = [], 0
    while epoch == 0 or (timed and len(seconds) < 61):
        train.sampler.set_epoch(epoch)
        clock = time.perf_counter()
        for each in train:
            train_step(model, optimizer, each)
            clock, before = time.perf_counter(), clock
            seconds.append(clock - before)
            if epoch and len(seconds) == 61:  # only where an epoch has fewer steps
                break
        if epoch == 0:
            trained = len(seconds)
            _, validated = evaluate(model.module, check)
            loss, _ = evaluate(model.module, shard_loader(held_out, 256, train=False))
        epoch += 1
    slices = [sum(seconds[i : i + 20]) / 20 for i in (1, 21, 41)] if timed else None
    return trained, validated, loss, slices


three = slots(3, oversubscribe=True)  # timed only where they are three of the same kind
timed = {1: True, 2: True, 3: three[0].kind == devices[0].kind and not three[0].shared}
ROWS = [(1, 64), (1, 128), (1, 256), (2, 64), (2, 128), (3, 64), (3, 128)]
results = {}
for world, batch in tqdm(ROWS, desc="rows", file=sys.stdout):
    row = launch(run_row, world, batch, timed[world], oversubscribe=world > 2, timeout=300)
    results[world, batch] = row[0]

# %%
# NBVAL_CHECK_OUTPUT
print("devices  batch  training + validation = iterations  report")
for (world, batch), (trained, validated, _, _) in sorted(results.items()):
    total, reported = trained + validated, REPORT.get((world, batch), "")
    print(f"{world:7}  {batch:5}  {trained:8} + {validated:10} = {total:10}  {reported:>6}")
    assert trained == validated == steps(N, world, batch)
    assert reported in ("", total)
for one, two in [((1, 128), (2, 64)), ((1, 256), (2, 128))]:
    same = abs(results[one][2] - results[two][2]) < 1e-3
    names = [f"{world} × {batch}" for world, batch in (one, two)]
    print(f"{names[0]} against {names[1]}: held-out loss within 1e-3: {same}")
    assert same

# %%
epoch_time = {}  # seconds of one epoch of training, from each slice
print("devices  batch  ms a step (range)      s an epoch  held-out loss after it")
for (world, batch), (trained, _, loss, slices) in sorted(results.items()):
    text = "not timed: oversubscribed" if three[0].shared else "not timed: on cores"
    if slices:
        epoch_time[world, batch] = [trained * s for s in slices]
        low, middle, high = (1000 * s for s in sorted(slices))
        text = f"{middle:6.1f} ({low:5.1f}–{high:5.1f})  {trained * middle / 1000:10.2f}"
    print(f"{world:7}  {batch:5}  {text:33}  {loss:.4f}")

# %%
fig, ax = plt.subplots()
for world in sorted({world for world, _ in epoch_time}):
    sizes = [batch for w, batch in epoch_time if w == world]
    low, middle, high = np.sort([epoch_time[world, b] for b in sizes]).T
    ax.errorbar(
        np.array(sizes) * 1.04 ** (world - 1),  # beside each other, not on top
        middle, yerr=[middle - low, high - middle], fmt=("-o", "-s", "-^")[world - 1], capsize=3,
        label=f"{world} device{'s' * (world > 1)}",
    )  # fmt: skip
ax.set_xscale("log", base=2)
ax.set_xticks([64, 128, 256], [64, 128, 256])
ax.set(xlabel="batch per device (images)", ylabel="one epoch of training (s)")
ax.set_ylim(bottom=0)


def ratio(a, b):
    """Time of row a over time of row b: from the medians, and from the slices farthest apart."""
    a, b = epoch_time[a], epoch_time[b]
    return np.median(a) / np.median(b), min(a) / max(b), max(a) / min(b)


small, pair = ratio((1, 64), (1, 256))[0], ratio((1, 128), (2, 128))[0]
finding = (
    f"One device: batch 64 takes {small:.1f}× the time of 256; "
    f"batch 128: one device takes {pair:.1f}× the time of two"
)
ax.set_title(finding.replace("; ", ";\n"))
ax.legend()
plots.show(
    fig,
    name="epoch-time",
    alt=f"Time of a training epoch against batch, a line for each number of devices. {finding}.",
)
print("time of one row over another       median  range      verdict")
for what, a, b in [
    ("batch 64 over 256, one device", (1, 64), (1, 256)),
    ("batch 64 over 128, one device", (1, 64), (1, 128)),
    ("batch 128 over 256, one device", (1, 128), (1, 256)),
    ("batch 64 over 128, two devices", (2, 64), (2, 128)),
    ("one device over two, batch 64", (1, 64), (2, 64)),
    ("one device over two, batch 128", (1, 128), (2, 128)),
]:
    middle, low, high = ratio(a, b)
    verdict = "clear" if low > 1 or high < 1 else "within the spread"
    print(f"{what:34} {middle:5.2f}×  {low:.2f}–{high:.2f}×  {verdict}")

# %% [markdown]
# Markers are medians, bars the range of the three slices. The **rule** for your prediction: 1.0× is no difference; if the whole range lies on one side of 1.0, the difference is clear, otherwise it is within the spread. So test the report's two conclusions:
#
# - *Batch size makes no clear difference*: the first four lines. A small batch makes more steps, and each step has a price of its own (Python, the optimizer, on two devices also the all-reduce). The table shows it: compare the milliseconds of a step at batch 256 with four times those at 64. The report compared 64 and 128 only, with one run each and no spread. Ours is a spread between slices of *one* launch; between launches it may be larger, so "clear" speaks of this run alone.
# - *The number of GPUs does*: the last two lines. Sharing the work explains up to 2× on two devices; if you see more, something disturbed one of the runs, and the range is the place to look. The report's own rows give 55 / 33 = 1.67× for three GPUs, if both times are for as many epochs, which it does not say.
#
# The last column of the table was not in the report at all. It depends on the **global batch** alone, devices times batch: two devices with 64 images each end where one device with 128 does, because the sampler deals out the same shuffled order and DDP averages. (Not to the last digit: sums in another order, over many steps.) With the same learning rate, an epoch of one device is 102, 51 or 26 updates at batch 64, 128 or 256: compare the losses. Too few updates cost; but twice as many are not always worth more (64 against 128). So the time of an epoch tells how well the devices are used, not how soon a model is good. (Learning rate and batch size: [lesson 05](05_ddp_in_practice.ipynb).)
#
# ## What a validation set hides that is the training set
#
# The model that DDP trained by hand above has seen pieces of five photographs. Now a second one trains by the same loop, for as many steps, on as many pieces of *one* photograph, a rocket at night. Each is validated as in the report, on its own training images, and then on the held-out photographs.
#
# **Predict.** Which of the two has the better loss on its own images, which one on the held-out ones?


# %%
# NBVAL_CHECK_OUTPUT
def rocket_pieces():
    picture = photographs("train")["rocket"]
    tops, lefts = (range(0, side - SIZE + 1, 5) for side in picture.shape[:2])
    pieces = np.stack([picture[t : t + SIZE, l : l + SIZE] for t in tops for l in lefts])  # noqa: E741
    return to_tensor(pieces[np.random.default_rng(0).permutation(len(pieces))[:N]])


def train_on_rocket(folder):
    data = Photos(folder, batch=64)
    data.images = rocket_pieces()
    return train_by_hand(data, epochs=2)[2]


def model_with(weights):
    model = new_model().eval()
    model.load_state_dict(weights)
    return model


def mean_loss(model, images):
    with torch.no_grad():
        return F.mse_loss(model(images / 255), images / 255).item()


models = {
    "five photographs": model_with(both[0][1][2]),
    "rocket only": model_with(launch(train_on_rocket, 2, folder.name, timeout=300)[0]),
}
loss = {
    name: (mean_loss(models[name], own), mean_loss(models[name], held_out))
    for name, own in zip(models, [images, rocket_pieces()], strict=True)
}
for place, which in enumerate(["its own training images", "held-out photographs"]):
    print(f"better on {which}:", min(loss, key=lambda name: loss[name][place]))
assert loss["rocket only"][0] < loss["five photographs"][0]
assert loss["rocket only"][1] > loss["five photographs"][1]

# %%
print("trained on                 own images   held out   held out / own")
early = {"five photographs, 1 epoch": (both[0][1][1][0], results[2, 64][2])}  # known from above
for name, (own, held) in (early | loss).items():
    print(f"{name:26} {own:10.4f} {held:10.4f} {held / own:14.1f}×")

# %% [markdown]
# By the report's way of validating, the model that saw least has the best number of this lesson. How much worse it is on others does not show. Held out is not always worse, and the last column may turn round within an epoch (first two lines: the same training after one epoch and after two): the loss on the own images alone does not tell you which case is yours. Two models can only be compared on the **same** images, and what they will meet later only on **unseen** ones.
#
# A loss is a number; look what it means. Parts of two photographs, 200 × 200 pixels: cut into 100 pieces as in training, drawn, and put together again: a piece of china, which is one of the five photographs (the rocket's model never saw it), and one of coffee, which is held out. Compare within a row: one picture may be harder to draw than the other.

# %%
whole = {
    "china (of the five)": photographs("train")["china"][60:260, 100:300],
    "coffee (held out)": photographs("validation")["coffee"][100:300, 200:400],
}


def redraw(model, picture, k=200 // SIZE):
    """Cut into k × k pieces, through the model, and back."""
    pieces = picture.reshape(k, SIZE, k, SIZE, 3).swapaxes(1, 2).reshape(-1, SIZE, SIZE, 3)
    with torch.no_grad():
        drawn = model(to_tensor(pieces) / 255).permute(0, 2, 3, 1).numpy()
    return drawn.reshape(k, k, SIZE, SIZE, 3).swapaxes(1, 2).reshape(picture.shape).clip(0, 1)


fig, axes = plt.subplots(2, 3, figsize=(6.6, 5))
print("mean squared error   five photographs   rocket only")
for row, (what, picture) in zip(axes, whole.items(), strict=True):
    shown = {what: picture}
    shown |= {f"by: {name}": redraw(model, picture) for name, model in models.items()}
    errors = [((image - picture / 255) ** 2).mean() for image in list(shown.values())[1:]]
    print(f"{what:20} {errors[0]:14.4f} {errors[1]:14.4f}")
    for ax, (name, image) in zip(row, shown.items(), strict=True):
        ax.imshow(image)
        ax.axis("off")
        ax.set_title(name, fontsize=9)
times = errors[1] / errors[0]
fig.suptitle(
    f"1,200 numbers through 16. Held-out coffee:\nthe rocket's model errs {times:.1f}× as much"
)
plots.show(
    fig,
    name="reconstructions",
    alt="Parts of two photographs, one of the five and one held out, each with the original and two "
    "reconstructions in coarse blocks, by the model of five photographs and by the model of the "
    f"rocket only. On the held-out one the rocket's model errs {times:.1f} times as much.",
)

# %% [markdown]
# Regular dots are no fault of the training: the last layer draws 5 × 5 pixels every 4, so its strokes overlap in a grid.
#
# ## ONNX: a file that runs without PyTorch
#
# **ONNX** is a file format for networks; ONNX Runtime runs it on many systems. The weights are those that DDP trained by hand on two ranks. `dynamic_shapes` leaves the batch open; otherwise the export is made for the batch of the example, as the last line shows. `external_data=False` puts the weights into the same file; by default they go into [a second one](https://docs.pytorch.org/docs/stable/onnx_export.html), which is easily left behind. The tolerance against PyTorch is not zero, because another library orders the additions of a convolution in its own way. The second cell asks a fresh Python that never imports torch: does the file stand alone?

# %%
# NBVAL_CHECK_OUTPUT
import onnxruntime

logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # notices about torchvision
trained = models["five photographs"]
file = Path(folder.name, "autoencoder.onnx")
options = dict(input_names=["images"], output_names=["drawn"], external_data=False, verbose=False)
example = torch.rand(2, 3, SIZE, SIZE)
torch.onnx.export(trained, (example,), file, dynamic_shapes=({0: "batch"},), **options)

session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
print("input of the file:", session.get_inputs()[0].shape)
for batch in (1, 2, 7, 128):
    x = held_out[:batch] / 255
    (drawn,) = session.run(None, {"images": x.numpy()})
    difference = np.abs(drawn - trained(x).detach().numpy()).max()
    print(f"batch {batch:3}: max difference to PyTorch within 1e-5: {difference <= 1e-5}")
    assert difference <= 1e-5
fixed = torch.export.export(trained, (example,)).module()  # no dynamic_shapes, 2 images
try:
    fixed(held_out[:7] / 255)
except (AssertionError, RuntimeError) as error:
    print("made for 2 images, given 7:", type(error).__name__)
else:
    raise AssertionError("the batch is open: change the text")

# %%
# NBVAL_CHECK_OUTPUT
import subprocess

program = f"""
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession({str(file)!r}, providers=["CPUExecutionProvider"])
(drawn,) = session.run(None, {{"images": numpy.zeros((5, 3, 20, 20), numpy.float32)}})
print(drawn.shape, "torch loaded:", "torch" in sys.modules)
"""
print(
    subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
)

# %% [markdown]
# ### Export the module, not the wrapper
#
# After training you hold `DistributedDataParallel(model)`. Its parameters have other names, and its `forward`, made for training, carries a mark (`torch.compiler.disable`: do not trace this) that stops the exporter. A group of one rank is enough to see it. The second cell is then → now: what tutorials of the report's time do, and what is done today.

# %%
# NBVAL_CHECK_OUTPUT
store = dist.FileStore(str(Path(folder.name, "store")), 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
try:
    wrapped = DistributedDataParallel(trained).eval()
    print(next(iter(wrapped.state_dict())), "instead of", next(iter(wrapped.module.state_dict())))
    try:
        torch.export.export(wrapped, (example,))  # what torch.onnx.export does first
    except Exception as error:
        assert "compiler.disable" in str(error)
        print("the wrapper is not exported: the error names its mark, torch.compiler.disable")
    else:
        raise AssertionError("the wrapper can be exported: change the text")
    print("wrapped.module is the model that was exported above:", wrapped.module is trained)
finally:
    dist.destroy_process_group()

# %% then="torch.onnx.export(dynamic_axes=, dynamo=False), torch.jit.trace" now="torch.onnx.export(dynamic_shapes=), torch.export" since="PyTorch 2.9, 2.11"
# NBVAL_CHECK_OUTPUT
tiny, old_file = nn.ReLU(), Path(folder.name, "old.onnx")
then = {
    "dynamic_axes": dict(input_names=["x"], dynamic_axes={"x": {0: "batch"}}, verbose=False),
    "dynamo=False": dict(dynamo=False),
    "torch.jit.trace": None,
}
for name, old in then.items():
    word = name if old is None or "dynamic_axes" in old else "legacy TorchScript"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if old is None:
            torch.jit.trace(tiny, example)
        else:
            torch.onnx.export(tiny, (example,), old_file, **old)
    about = [w for w in caught if word in str(w.message)]
    print(f"then: {name}:", *sorted({w.category.__name__ for w in about}))
    assert about, [str(w.message) for w in caught]
print("now:", type(torch.export.export(trained, (example,))).__name__, "and dynamic_shapes")

# %% [markdown]
# ## What this machine cannot show
#
# On GPUs the computing of so small a network is short, so expect the price of each step and of feeding the images to weigh more, and the curves of the table to have other shapes. NCCL and the copy of images to a GPU are not in the measurement of cores. Results of this table on real GPUs: **not measured** yet; the multi-GPU path was not run by the authors.
#
# ## Exercise
#
# [Exercise 07](../exercises/07_autoencoder_experiment.ipynb): count iterations for any number of images, devices and batch; get scaling efficiency out of a table that mixes what must not be mixed; write a DataModule whose ranks see disjoint images. About 40 minutes.
#
# ## Recap
#
# Counts can be checked by anybody, so state them, and assert them. A time without the number of epochs, warm-up and spread cannot be compared with anything. A validation set must hold what the model has not seen, or the model that saw least may look best.
#
# 1. 6,472 images, 2 devices, batch 100 each, `drop_last=False`: how many training steps has an epoch?
# 2. Two ranks each use `DataLoader(shuffle=True)` with the same seed, and no sampler is put in. What happens?
# 3. Your file accepts only batches of 2. What was forgotten?
#
# <details><summary>Answers</summary>
#
# 1. Each device gets 3,236 images: 33 steps, the last with 36 images.
# 2. Both train on the same batches: twice the work, the result of one device.
# 3. `dynamic_shapes` in the export; the example's batch was taken for a constant.
#
# </details>
#
# Go on with [exercise 07](../exercises/07_autoencoder_experiment.ipynb).
