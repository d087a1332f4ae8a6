# ---
# jupyter:
#   course:
#     rows: [O6]
#     minutes: {read: 20, do: 25}
#     devices: 2
#     path: core
#     extra: torch,peers
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
# # The largest batch that fits
#
# After this lesson you can find the largest batch that fits into your memory in at most six trials, say why other tools may need many trials or leave memory unused, and train on when memory runs out in the middle of an epoch, without losing a sample.
#
# | | |
# |---|---|
# | **Time** | 20 minutes to read, 25 to do |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); what a meter counts, by kind ([lesson 14](14_where_memory_goes.ipynb)); why a kept exception keeps tensors ([lesson 15](15_out_of_memory.ipynb)) |
# | **You will** | mend a common cure that leaks · see why one forward is not a probe · predict the largest batch from two small ones · run four tools under the same limit · build a big batch from small ones, exactly · write a step that survives |
# | **Runs on** | no GPU: a budget of 32 MiB on a core · a GPU: 1 GiB of it · the part on two devices: two pinned cores, or two GPUs |
# | **Last verified** | Python 3.11, PyTorch 2.13.0, accelerate 1.15.0, Lightning 2.6.6, toma 1.1.0 |

# %%
import importlib
import json
import logging
import sys
import tempfile
import time
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from course_utils import memory, plots
from course_utils.batch_size import find_batch_size, throughput
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.memory import GiB, MiB
from course_utils.training import SafeStep, train_epoch

plots.use_style()

# %%
print(census())
devices = slots(2)
assert len(devices) == 2, "the end of this lesson runs on two devices"

# %% [markdown]
# ## A model, a limit, a step
#
# The model is a small network for images, trained with Adam. On a GPU the limit is a part of its memory; on a core it is a budget that `memory.meter` keeps, as in lessons 14 and 15.


# %%
def my_device():
    """The GPU, if this process sees one: of this rank, if it is a rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    width = 16384 if torch.cuda.is_available() else 512
    layers += [nn.Flatten(), nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*layers).to(my_device())


def make_batch(n):
    images = torch.randn(n, 3, 32, 32, device=my_device())
    return images, torch.randint(10, (n,), device=my_device())


def loss_fn(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def fresh():
    model = make_model()
    return model, torch.optim.Adam(model.parameters())


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()


def two_steps(model, optimizer, n):
    """A trial of batch size n. Why one step is not enough, you will see below."""
    batch = make_batch(n)
    for _ in range(2):
        train_step(model, optimizer, batch)


LIMIT = GiB if torch.cuda.is_available() else 32 * MiB
torch.set_num_threads(1)  # here one core is one device
TOO_LARGE, START = (500, 2048) if LIMIT < GiB else (12288, 16384)  # samples
print("limit:", memory.size(LIMIT))
print("parameters:", memory.size(memory.kinds(make_model())["parameters"]))

# %% [markdown]
# ## A cure from 2021, and why it leaks
#
# Notes of a bootcamp that this course grew from have a cure for running out of memory: try the whole batch; when it fails, train on each sample alone. Its shape in our words (the printed code has a syntax error):
#
# ```python
# try:
#     train_step(batch)
# except RuntimeError:          # out of memory?
#     for sample in batch:
#         train_step(sample)    # still inside the handler
# ```
#
# Three things are wrong with it. `RuntimeError` is also what a wrong shape raises; a GPU that runs out raises `torch.OutOfMemoryError`, and so does the budget. (A core that really runs out raises a plain `RuntimeError`; `memory.is_oom` knows both.) A batch of 100 becomes 100 steps instead of one, so another model is trained. And the retry runs *inside* the handler.
#
# **Predict.** A batch that is too large has just failed. How much of the limit is in use before the step, inside `except`, after it, and after `zero_grad()`?


# %%
# NBVAL_CHECK_OUTPUT
def where_it_is(n):
    """Bytes in use before the step, inside the handler, after it, after zero_grad; the message."""
    model, optimizer = fresh()
    with memory.meter(model, optimizer, limit=LIMIT) as meter:
        batch = make_batch(n)
        before = meter.live
        try:
            train_step(model, optimizer, batch)
        except torch.OutOfMemoryError as error:
            memory.release()  # gc.collect() and empty_cache(): do they help in here?
            inside, message = meter.live, str(error)
        else:
            raise AssertionError("the batch was to be too large")
        after = meter.live
        optimizer.zero_grad()
        return before, inside, after, meter.live, message


before, inside, after, cleared, message = where_it_is(TOO_LARGE)
print("inside the handler more than half of the limit is still in use:", inside > LIMIT / 2)
print("after zero_grad() everything that the step made is free:", cleared == before)

# %%
names = "before the step", "inside except", "after except", "after zero_grad"
for name, live in zip(names, (before, inside, after, cleared), strict=True):
    print(f"{name:16} {memory.size(live):>9}  ({live / LIMIT:.0%} of the limit)")
print(message)

# %% [markdown]
# An exception carries its **traceback**: the frames of all functions that it came through, with their variables. While the handler runs, the frames hold the activations. Neither `gc.collect()` nor `empty_cache()` frees what is still in use: the cell called both before it measured. When the `except` block ends, Python drops the exception, and the activations are free; gradients that a failed backward left go with `zero_grad()`.
#
# So note inside the handler *that* it failed, and try again after it. Two functions that halve until it fits, inside the handler and outside:


# %%
def retry_inside(model, optimizer, n):
    try:
        two_steps(model, optimizer, n)
        return n
    except torch.OutOfMemoryError:
        # Every failed try is still held here, by the handlers around this one.
        return retry_inside(model, optimizer, n // 2) if n > 1 else 0


def retry_outside(model, optimizer, n):
    while True:
        try:
            two_steps(model, optimizer, n)
            return n
        except torch.OutOfMemoryError:
            pass
        n //= 2  # here the exception is gone


reached = {}
for retry in (retry_inside, retry_outside):
    model, optimizer = fresh()
    with memory.meter(model, optimizer, limit=LIMIT):
        reached[retry.__name__] = retry(model, optimizer, START)
    print(f"{retry.__name__:13} ends at", reached[retry.__name__] or "0: not even one sample fits")
assert reached["retry_inside"] < reached["retry_outside"]

# %% [markdown]
# Inside the handlers nothing of a failed try is free, so each try has less to work with than the last. PyTorch's developers [call this expected](https://github.com/pytorch/pytorch/issues/27600): the exception holds on to the frame.
#
# ## Halving: how many tries, and how much is left unused
#
# How good is that? The largest batch that fits you get by **bisection**: try the middle between one that fits and one that does not. It takes a dozen tries and is exact.


# %%
def fits(n):
    """Whether a fresh model can be trained with n samples."""
    model, optimizer = fresh()
    try:
        with memory.meter(model, optimizer, limit=LIMIT):
            two_steps(model, optimizer, n)
    except torch.OutOfMemoryError:
        return False
    return True


def bisect(low, high):
    """The largest n that fits; low is known to fit, high not to."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


truth = bisect(1, START)
print("the largest batch that fits:", truth)
print(f"halving from {START} ends at {reached['retry_outside']}:", end=" ")
print(f"{reached['retry_outside'] / truth:.0%} of it")

# %% [markdown]
# Where between 50 % and 100 % halving ends is luck. Smaller steps leave less unused, and take longer.
#
# **Predict.** From 4096 down to 8, halving takes 10 tries. How many does shrinking by a tenth take?


# %%
# NBVAL_CHECK_OUTPUT
def shrink(factor, start, largest):
    """How many tries until a size fits."""
    size, tries = start, 1
    while size > largest:
        size, tries = int(size * factor), tries + 1
    return tries


halves, tenths = shrink(0.5, 4096, 8), shrink(0.9, 4096, 8)
print(f"from 4096 down to 8: by halves {halves} tries, by tenths {tenths}")

# %% [markdown]
# ## One forward is not a probe
#
# A quick way to test a size is one forward, or one forward and backward. Here are the peaks of two training steps, phase by phase: `meter.reset()` sets the peak to what is in use now.
#
# **Predict.** A batch of 8 images: which phase has the highest peak? Is the second step like the first?


# %%
def peaks_of_two_steps(n, limit=None):
    """Peaks of forward, backward and optimizer step, twice, in bytes."""
    model, optimizer = fresh()
    peaks = []
    with memory.meter(model, optimizer, limit=limit) as meter:
        batch = make_batch(n)
        for _ in range(2):
            optimizer.zero_grad()
            meter.reset()
            loss = loss_fn(model, batch)
            peaks.append(meter.peak)
            meter.reset()
            loss.backward()
            peaks.append(meter.peak)
            meter.reset()
            optimizer.step()
            peaks.append(meter.peak)
            del loss
    return peaks


peaks = peaks_of_two_steps(8)
for number, (forward, backward, step) in enumerate([peaks[:3], peaks[3:]], start=1):
    print(f"step {number}: forward {memory.size(forward):>8},", end=" ")
    print(f"backward {memory.size(backward):>8}, optimizer {memory.size(step):>8}")

# %% [markdown]
# The forward of the first step needs the parameters and little else. Gradients come with the backward. Adam keeps two numbers for each parameter, and makes them in its *first* step: they are in use during the forward of the second. And the optimizer's step itself has the highest peak of all, because Adam's formula needs temporary results as large as the parameters.
#
# So there is a limit at which forward and backward fit, and training dies:


# %%
# NBVAL_CHECK_OUTPUT
def how_far(optimizer_class, limit, **options):
    model = make_model()
    optimizer = optimizer_class(model.parameters(), **options)
    batch, survived = make_batch(8), []
    try:
        with memory.meter(model, optimizer, batch, limit=limit):
            loss = loss_fn(model, batch)
            survived.append("forward")
            loss.backward()
            survived.append("backward")
            optimizer.step()
            survived.append("step")
    except torch.OutOfMemoryError:
        return survived
    return survived


little = 3.5 * memory.kinds(make_model())["parameters"]
print("limit 3.5 times the parameters, batch 8")
print("  SGD               survives", how_far(torch.optim.SGD, little, lr=0.1))
print("  Adam              survives", how_far(torch.optim.Adam, little))

# %% [markdown]
# Then run the whole step? It moves the weights. A pull request to a detector called rf-detr ([#1342](https://github.com/roboflow/rf-detr/pull/1342), 2026) tells the story: its probe left `optimizer.step()` out; calling it naively moved a weight from 1.0 to 0.9899 before training had begun. The same in five lines:

# %%
# NBVAL_CHECK_OUTPUT
weight = nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.01)
weight.grad = torch.ones(1)
optimizer.step()
print("weight after the probe:", round(weight.item(), 4))

optimizer.param_groups[0]["lr"] = 0.0  # a step with a learning rate of 0 moves no weight …
kept = weight.item()
optimizer.step()
print("moved with lr = 0:", weight.item() != kept)
print("but the optimizer has counted its steps:", int(optimizer.state[weight]["step"]))

# %% [markdown]
# A learning rate of 0 is not enough either: Adam's averages and its count of steps have changed, and so may BatchNorm's statistics, the random numbers, and the gradients. A probe must leave all of that as it was, also when it ends in an error. The probes by hand on this page make a fresh model each time instead.
#
# ## The line through two peaks
#
# Now measure phases apart, for growing batches.
#
# **Predict.** Two peaks: that of forward and backward, and that of the optimizer's step. Which grows with the batch? Draw the two lines before you run the cell.

# %%
SIZES = [1, 16, 32, 64, 128, 256, 384]
if LIMIT >= GiB:
    SIZES = [2 * n for n in SIZES]
phases = {n: [peak / MiB for peak in peaks_of_two_steps(n)[3:]] for n in SIZES}

print("batch   forward  backward  optimizer's step   (MiB, second step)")
for n, (forward, backward, step) in phases.items():
    print(f"{n:5}  {forward:8.1f}  {backward:8.1f}  {step:16.1f}")


# %%
def line_through(a, b, peaks):
    """Intercept and slope of the line through the peaks of batches a and b."""
    slope = (peaks[b] - peaks[a]) / (b - a)
    return peaks[a] - slope * a, slope


compute = {n: max(forward, backward) for n, (forward, backward, _) in phases.items()}
stepping = {n: step for n, (_, _, step) in phases.items()}
two = SIZES[1], SIZES[2]
intercept, slope = line_through(*two, compute)
flat, rise = line_through(*two, stepping)
predicted = int((LIMIT / MiB - intercept) / slope)
farthest = max(compute[n] / (intercept + slope * n) - 1 for n in SIZES)
bend = (flat - intercept) / (slope - rise)  # where the two lines cross

fig, ax = plt.subplots()
ax.plot(SIZES, list(compute.values()), "C0o", label="forward and backward")
ax.plot(SIZES, list(stepping.values()), "C1s", label="optimizer's step")
ends = [0, predicted]
ax.plot(
    ends, [intercept + slope * n for n in ends], "C0-", marker="", label="line through two points"
)
corners = [0, bend, predicted]
highest = [max(intercept + slope * n, flat + rise * n) for n in corners]
ax.plot(corners, highest, "k-", marker="", lw=1, label="highest peak of a step")
ring = {"ms": 13, "mfc": "none", "mec": "black", "marker": "o", "ls": "none"}
ax.plot(two, [compute[n] for n in two], **ring, label="these two")
ax.axhline(LIMIT / MiB, color="black", linestyle="--", marker="")
ax.text(0, LIMIT / MiB * 1.02, "limit")
ax.axvline(predicted, color="black", linestyle=":", marker="")
ax.text(predicted * 0.985, LIMIT / MiB * 0.03, f"{predicted} samples", ha="right")
place = (bend, intercept + slope * bend)
ax.annotate("its bend", place, (1.2 * bend, place[1] / 2), arrowprops={"arrowstyle": "->"})
ax.set(xlabel="batch size (samples)", ylabel="peak (MiB)", ylim=(0, LIMIT / MiB * 1.15))
ax.set_title("Two batches predict the largest: the line meets the limit")
ax.legend(loc="upper left", bbox_to_anchor=(0.02, 0.86))
plots.show(
    fig,
    name="the-line-through-two-peaks",
    alt="Peak memory against batch size. Forward and backward lie on a straight line that rises "
    f"and meets the limit at {predicted} samples; the peak of the optimizer's step rises "
    f"slowly. The higher of the two bends at {bend:.0f} samples.",
)
print(f"predicted from {two[0]} and {two[1]} samples: {predicted}; by bisection: {truth}")
print(f"largest deviation of a point from the line: {farthest:.1%}")
print(f"per sample: forward and backward {slope:.4f} MiB, optimizer's step {rise:.4f} MiB")

# %% [markdown]
# The peak of forward and backward lies on a line: parameters, gradients and optimizer state, plus the same bytes for each sample. The optimizer's step is almost flat: all that it sees of the batch is that its images are in memory too. Whoever measures only the highest peak of a step sees an almost flat line until the bend, and learns nothing from small batches. Measured apart, two are enough. (Other models have bends of their own: a library may change to an algorithm that needs more memory from some size on. So a prediction has to be verified.)
#
# ## Build the prober: predict, then verify
#
# Two small trials, a line for each phase, and a trial of the smallest size that they promise. If that fails, step back a little.


# %%
def by_hand(limit, a=32, b=64):
    """The batch size, and all sizes that were tried."""
    peaks = {n: peaks_of_two_steps(n, limit)[3:] for n in (a, b)}  # raises if b does not fit
    tried = [(a, True), (b, True)]
    lines = [line_through(a, b, {n: peaks[n][phase] for n in peaks}) for phase in range(3)]
    size = int(min((limit - start) / rise for start, rise in lines if rise > 0))
    while size > b:
        try:
            peaks_of_two_steps(size, limit)
            tried.append((size, True))
            return size, tried  # this size has run
        except torch.OutOfMemoryError:
            tried.append((size, False))
        size = int(0.95 * size)
    return b, tried  # nothing larger has run


size, tried = by_hand(LIMIT)
print(f"found {size} in {len(tried)} trials, {size / truth:.1%} of the largest: {tried}")

# %% [markdown]
# `find_batch_size` does this with a line for each allocation. It usually takes three trials; when the verification fails or falls short, it lays new lines through the two largest sizes that ran. After six trials it stops (`by_hand` has no such bound). It puts back everything that a trial changes, and lets several ranks agree.

# %%
model, optimizer = fresh()
found = find_batch_size(model, optimizer, make_batch, loss_fn, limit=LIMIT)
print(found)

# %% [markdown]
# Trial 2's prediction is too high on purpose: from one trial there is no slope yet. `found.plot()` draws trials and lines.

# %%
# NBVAL_CHECK_OUTPUT
same = all(
    torch.equal(a, b) for a, b in zip(model.parameters(), make_model().parameters(), strict=True)
)
print("at most 6 trials:", len(found.trials) <= 6)
print("at least 95 % of the largest that fits:", found.batch_size >= 0.95 * truth)
print("the size that it returns runs:", fits(found.batch_size))
print("parameters as before, bit for bit:", same)
print("optimizer state as before:", len(optimizer.state) == 0)

# %% [markdown]
# ## The tools side by side
#
# Four tools, five methods, the same model, the same limit, in your notebook. accelerate shrinks by a tenth and toma halves, both from a size that you must guess (here the same for both). Lightning doubles from 2 (`power`), and may bisect after that (`binsearch`); each of its trials is three steps. A trial of the others is two steps. They know running out by words in the error's text; that is why the budget's message, printed in full above, ends as it does.
#
# **Predict.** Which method tries most often, and which may return a size that it never tried?


# %%
def trial(n):
    """Two steps with a fresh model under the limit. `tried` notes the size and whether it fits."""
    tried.append([n, False])
    model, optimizer = fresh()
    with memory.meter(model, optimizer, limit=LIMIT):
        two_steps(model, optimizer, n)
    tried[-1][1] = True
    return n


def with_accelerate(accelerate):
    # It wants a function whose first argument is the batch size.
    return accelerate.utils.find_executable_batch_size(
        lambda batch_size: trial(batch_size), START
    )()


def with_toma(toma):
    return toma.simple.batch(trial, START)


def ours(_):
    found = find_batch_size(*fresh(), make_batch, loss_fn, limit=LIMIT)
    tried.extend([each.batch_size, each.fits] for each in found.trials)
    return found.batch_size


def with_lightning(pl, mode):
    # It wants a model of its own kind, with a batch_size and a loader that depends on it.
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batch_size = make_model(), 2

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

        def train_dataloader(self):
            rows = range(START)
            return DataLoader(rows, self.batch_size, collate_fn=lambda rows: make_batch(len(rows)))

        def on_train_start(self):
            tried.append([self.batch_size, False])

        def training_step(self, batch, _):
            return loss_fn(self.model, batch)

        def on_train_end(self):
            tried[-1][1] = True  # a trial that runs out of memory does not get here

    module = Module()
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    with tempfile.TemporaryDirectory() as folder, memory.meter(module, limit=LIMIT):
        place = {"accelerator": my_device().type, "devices": 1, "default_root_dir": folder}
        trainer = pl.Trainer(**place, **dict.fromkeys(quiet, False))
        return pl.tuner.Tuner(trainer).scale_batch_size(module, mode=mode)


# %%
METHODS = {  # name: the package that it needs, and the search
    "accelerate": ("accelerate", with_accelerate),
    "toma": ("toma", with_toma),
    "Lightning, power": ("pytorch_lightning", lambda pl: with_lightning(pl, "power")),
    "Lightning, binsearch": ("pytorch_lightning", lambda pl: with_lightning(pl, "binsearch")),
    "find_batch_size": ("course_utils", ours),
}
warnings.filterwarnings("ignore", module="pytorch_lightning|lightning_fabric")
logging.disable(logging.INFO)  # Lightning reports each trial

results = {}
for name, (package, search) in tqdm(METHODS.items(), desc="searches", file=sys.stdout):
    try:
        tool = importlib.import_module(package)  # not timed
    except ModuleNotFoundError:
        continue
    tried, start = [], time.perf_counter()
    size = search(tool)
    results[name] = size, tried, time.perf_counter() - start
    memory.release()

print(f"accelerate and toma start from {START}")
print(f"{'':20}  returned  of the largest  trials  out of memory  tried it  runs  seconds")
for name, (package, _) in METHODS.items():
    if name not in results:
        print(f"{name:20}  not installed; for this row: pip install {package}")
        continue
    size, tried, seconds = results[name]
    failed = sum(not fitted for _, fitted in tried)
    known, runs = ("yes" if good else "no" for good in ([size, True] in tried, fits(size)))
    print(
        f"{name:20}  {size:8}  {size / truth:14.1%}  {len(tried):6}  {failed:13}"
        f"  {known:>8}  {runs:>4}  {seconds:7.2f}"
    )
fewer = START // 4
by_tenths, by_halves = (shrink(factor, fewer, truth) for factor in (0.9, 0.5))
print(f"trials with a guess of {fewer} instead: accelerate {by_tenths}, toma {by_halves}")

# %%
fig, panels = plt.subplots(
    1, len(results), sharex=True, sharey=True, figsize=(9, 3.6), squeeze=False
)
for ax, (name, (returned, tried, _)) in zip(panels[0], results.items(), strict=True):
    ax.plot(range(1, len(tried) + 1), [n for n, _ in tried], color="0.7", marker="", lw=1)
    for fitted, mark, label in ((True, "C0o", "fits"), (False, "C1x", "out of memory")):
        at = [trial for trial, each in enumerate(tried, 1) if each[1] == fitted]
        ax.plot(at, [tried[trial - 1][0] for trial in at], mark, ls="none", label=label)
    ran = [trial for trial, each in enumerate(tried, 1) if each == [returned, True]]
    ax.plot([*ran, len(tried) + 1][0], returned, **ring, label="returned")
    ax.axhline(truth, color="black", linestyle=":", marker="", label=f"largest that fits: {truth}")
    ax.set_title(name.replace(", ", "\n") + f"\n{len(tried)} trials", fontsize=10)
    ax.set_xlabel("trial")
    ax.set_xticks(range(0, max(len(tried) for _, tried, _ in results.values()) + 1, 5))
    ax.set_xlim(0, max(len(tried) for _, tried, _ in results.values()) + 2.5)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:.0f}")
panels[0][0].set_ylabel("batch size tried (samples)")
fewest = min(results, key=lambda name: len(results[name][1]))
fig.suptitle(f"Fewest trials: {fewest}, where accelerate and toma begin at {START}", fontsize=12)
fig.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
plots.show(
    fig,
    name="trials-of-five-methods",
    alt="Batch size tried against the number of the trial, for "
    + ", ".join(
        f"{name} ({len(tried)} trials, returns {n})" for name, (n, tried, _) in results.items()
    )
    + f". The largest that fits is {truth}. A ring marks the size that is returned.",
)

# %% [markdown]
# accelerate comes close, in many trials, all but the last of them out of memory; a better guess spares it most of them. Lightning's bisection finds the answer, and then takes 5 % off as a [margin](https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.BatchSizeFinder.html): so it may return a size that it never tried. accelerate and toma call a function and know of no model: whatever a trial changes in yours, you put back.
#
# This is one model. The course's benchmark has eight, at three limits, with two optimizers:

# %%
# Beside the package, wherever this notebook lies; a package installed alone comes without it.
path = Path(plots.__file__).parents[1] / "benchmarks" / "results" / "batch_size.json"
if path.exists():
    result = json.loads(path.read_text(encoding="utf-8"))
    machine, cases = result["machine"], result["summaries"][0]["cases"]
    kind = ", ".join(machine["gpus"]) or f"no GPU: {machine['cores']} cores of {machine['cpu']}"
    print(f"measured on {kind}; {machine['date']}; medians over {cases} cases")
    print(f"{'':24}  trials  worst  of the largest  seconds  returned, but does not run")
    for tool in result["summaries"]:
        trials, share, seconds = (tool[key][0] for key in ("trials", "share", "seconds"))
        print(
            f"{tool['method']:24}  {trials:6g}  {tool['worst_trials']:5}  {share:14.1%}"
            f"  {seconds:7.2f}  {tool['do_not_run']} of {tool['came_back']}"
        )
    print("on a GPU:", "this table" if machine["gpus"] else "not measured")
else:
    print("not here: see docs/benchmarks.md of the course")

# %% [markdown]
# ## How much speed does a larger batch buy?
#
# `throughput` times whole steps of several sizes, which take turns.
#
# **Predict.** From 1 sample to 64 the speed grows. Does it grow as much from 64 to the largest that fits?

# %%
model, optimizer = fresh()
curve = throughput(model, optimizer, make_batch, loss_fn, largest=found.batch_size)
print(curve)
plots.show(
    curve.plot(),
    name="samples-per-second",
    alt="Samples per second against batch size, with the spread of the runs. "
    f"{curve.smallest} samples are the smallest batch within 5 percent of the best rate.",
)

# %% [markdown]
# A small batch pays for what does not depend on it: calling the operations, and the optimizer's step. A large one spreads these costs over many samples, until the rest is all there is. Where the bands of neighbouring sizes overlap, your curve is flat: there more samples buy no speed that you could measure, and the one "smallest" size moves from run to run. Where it still rises at its end, a larger limit would pay. Where it falls, suspect two things: other work on your machine (run the cell again), and activations that no longer fit into a core's cache. Whether a larger batch also *learns* as well is another question, and needs its own experiment.
#
# ## A big batch from small ones
#
# For a batch that does not fit, **accumulation** adds up the gradients of several **micro-batches** and steps once. The gradient of a mean over 64 samples is the mean of the gradients of four means over 16, exactly, up to rounding. So each micro-batch's loss has to be divided by 4: without that, four micro-batches give four times the gradient.
#
# **Predict.** 64 samples in micro-batches of 24: is the mean of the three means still the mean?


# %%
# NBVAL_CHECK_OUTPUT
def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def accumulated(model, parts, weights, loss_fn=loss_fn):
    """The gradient of the weighted sum of the parts' losses, one backward for each part."""
    model.zero_grad()
    for part, weight in zip(parts, weights, strict=True):
        (loss_fn(model, part) * weight).backward()
    return gradient(model)


def split(batch, size):
    return list(zip(*(tensor.split(size) for tensor in batch), strict=True))


def error(got, want):
    return ((got - want).norm() / want.norm()).item()


model, (images, labels) = make_model().double(), make_batch(64)
batch = images.double(), labels
whole = accumulated(model, [batch], [1.0])

fours = split(batch, 16)
quarters = error(accumulated(model, fours, [1 / 4] * 4), whole)
undivided = accumulated(model, fours, [1.0] * 4)
print("4 × 16, each a quarter, below 1e-10:", quarters < 1e-10)
print(f"4 × 16, undivided: {undivided.norm() / whole.norm():.0f} times as long")

ragged = split(batch, 24)
counts = [len(labels) for _, labels in ragged]
by_count = error(accumulated(model, ragged, [n / 64 for n in counts]), whole)
thirds = error(accumulated(model, ragged, [1 / 3] * 3), whole)
print(f"{counts}, by count, below 1e-10:", by_count < 1e-10)
print(f"{counts}, a third each, below 1e-10:", thirds < 1e-10)

# %% [markdown]
# The samples of the small micro-batch weighed too much. With text it gets worse, because a loss is a mean over *tokens*, and sequences differ in length. Four sequences of different lengths, one in each micro-batch:

# %%
lengths = [64, 32, 16, 8]
torch.manual_seed(0)
language_model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50)).double()
tokens, targets = torch.randint(50, (2, 4, 64))
for row, length in enumerate(lengths):
    targets[row, length:] = -100  # PyTorch's mark for padding, which no loss counts
text = tokens, targets


def token_loss(model, batch):
    """The mean over all tokens that count."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)


whole_text = accumulated(language_model, [text], [1.0], token_loss)
shares = [n / sum(lengths) for n in lengths]
means, by_count = (
    error(accumulated(language_model, split(text, 1), weights, token_loss), whole_text)
    for weights in ([1 / 4] * 4, shares)
)
print(f"images, 24 + 24 + 16, a third each: relative error {thirds:.2f}")
print(f"text, a quarter each:               relative error {means:.2f}")
print(f"text, weighed by count:             relative error {by_count:.1e}")
assert means > 0.5 and by_count < 1e-10

# %% [markdown]
# A widely used trainer had [this mistake until October 2024](https://huggingface.co/blog/gradient_accumulation). So weigh a micro-batch by what its mean counts.
#
# There is one layer for which no weight helps. **BatchNorm** normalises by the mean and variance of the samples that it sees together, so it sees micro-batches:


# %%
# NBVAL_CHECK_OUTPUT
def with_norm(norm):
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 10)]
    return nn.Sequential(*layers).double().to(my_device())


for norm in (nn.GroupNorm(2, 8), nn.BatchNorm2d(8)):
    model = with_norm(norm)
    whole = accumulated(model, [batch], [1.0])
    parts = accumulated(model, split(batch, 16), [1 / 4] * 4)
    print(f"{type(norm).__name__:11}  4 × 16 equals 64, below 1e-10: {error(parts, whole) < 1e-10}")

try:
    SafeStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn)
except ValueError as refused:
    print("SafeStep refuses BatchNorm:", "BatchNorm" in str(refused))
else:
    raise AssertionError("BatchNorm was not refused")

# %%
for size in (16, 4, 1):
    parts = accumulated(model, split(batch, size), [size / 64] * (64 // size))
    print(f"BatchNorm, micro-batches of {size:2}: relative difference {error(parts, whole):.3f}")

# %% [markdown]
# BatchNorm makes it another model, the more so the smaller the micro-batch. It may train as well, but should surprise nobody: `SafeStep`, which you meet next, refuses BatchNorm unless you say `allow_batchnorm=True`.
#
# ## A step that survives
#
# When memory runs out, the *batch* stays and the micro-batch halves. The attempt is a function of its own, so nothing of a failed one is left when it returns.


# %%
def attempt(model, optimizer, batch, micro):
    """Gradients of the whole batch, from micro-batches; False when memory ran out."""
    optimizer.zero_grad()  # a failed attempt may have left some
    try:
        for part in split(batch, micro):
            share = len(part[0]) / len(batch[0])
            (loss_fn(model, part) * share).backward()
    except torch.OutOfMemoryError:
        return False  # nothing is tried again in here
    return True


def careful_step(model, optimizer, batch, micro):
    while not attempt(model, optimizer, batch, micro):
        if micro == 1:
            raise torch.OutOfMemoryError("out of memory: not even one sample fits")
        micro //= 2
    optimizer.step()
    return micro


model, optimizer = fresh()
with memory.meter(model, optimizer, limit=LIMIT) as meter:
    batch = make_batch(truth + truth // 2)
    micro = len(batch[0])
    for _ in range(2):
        micro = careful_step(model, optimizer, batch, micro)
print(f"{len(batch[0])} samples, of which {truth} fit at once: done with micro-batches of {micro}")

# %% [markdown]
# `attempt` covers forward and backward only. When memory runs out in `optimizer.step()`, some weights may have moved already: that cannot be repeated. So before its first sample `SafeStep` lets a twin of the optimizer step with zero gradients: its state stays reserved, and there was room for the step's temporary results. Where there is none, it refuses before any weight has moved:

# %%
# NBVAL_CHECK_OUTPUT
model, optimizer = fresh()
try:
    with memory.meter(model, optimizer, limit=int(4.5 * memory.kinds(model)["parameters"])):
        SafeStep(model, optimizer, loss_fn)(make_batch(8))
except torch.OutOfMemoryError as refused:
    print("refused before the first sample:", "before the first sample" in str(refused))
moved = zip(model.parameters(), make_model().parameters(), strict=True)
print("weights as before:", all(torch.equal(a, b) for a, b in moved))

# %% [markdown]
# Before it tries again it puts random numbers and buffers back (the course's tests check that). With dropout a step in parts is still not that of the undivided batch: each micro-batch draws its own masks.
#
# It weighs micro-batches by samples, unless you tell it what your loss is a mean of. Forgetting that raises no error:

# %%
# NBVAL_CHECK_OUTPUT
for what, count in {"samples": None, "tokens": lambda batch: (batch[1] != -100).sum()}.items():
    still = torch.optim.SGD(language_model.parameters(), lr=0.0)  # only the gradient matters here
    step = SafeStep(language_model, still, token_loss, count=count, micro_batch=1)
    step(text)
    close = error(gradient(language_model), whole_text) < 1e-10
    print(f"weighed by {what}: the gradient of the whole text, below 1e-10: {close}")

# %% [markdown]
# **Predict.** An epoch of eight batches. After the third, another program takes a quarter of the memory (a tensor of this process plays its part). How many samples are lost, how many batches are tried again?


# %%
def one_epoch(limit=None, neighbour=0):
    torch.manual_seed(1)
    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, others, again = SafeStep(model, optimizer, loss_fn), [], []

    def after_step(number, result):
        again.append(result.retries > 0)
        if number == 2:
            others.append(torch.empty(neighbour, dtype=torch.uint8, device=my_device()))

    with memory.meter(model, optimizer, limit=limit):
        size = LIMIT // MiB * 4
        batches = (make_batch(size) for _ in range(8))
        loader = ((images.double(), labels) for images, labels in batches)
        result = train_epoch(step, loader, progress=False, after_step=after_step)
    return result, sum(again), torch.cat([p.detach().flatten() for p in model.parameters()])


undisturbed, _, want = one_epoch()
disturbed, again, got = one_epoch(limit=LIMIT, neighbour=LIMIT // 4)
print(f"batches tried again: {again}, failed attempts: {disturbed.retries}")

# %%
# NBVAL_CHECK_OUTPUT
for name, epoch in {"undisturbed": undisturbed, "disturbed": disturbed}.items():
    share = epoch.count / undisturbed.count
    print(f"{name:11}  {epoch.steps} steps, {share:.0%} of the samples")
print("the same weights, below 1e-10:", ((got - want).abs().max() < 1e-10).item())

# %% [markdown]
# The messages are from one batch, tried again in smaller parts until they fit; all later batches were split like that from the start. The weights are those of the run that nobody disturbed.
#
# ## Two devices, two limits
#
# With several ranks the weakest decides: all need the same number of steps, and a rank that runs out of memory leaves the others waiting in an all-reduce. So each rank searches alone, without talking; then they take the minimum, and try that size together. The ranks of this cell have different limits. Then they train with DDP, each on its half of a **global batch**.
#
# **Predict.** One rank has half the memory of the other. Is its batch half as large?


# %%
def search_together(limits):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = fresh()
    replica = nn.parallel.DistributedDataParallel(model)
    found = find_batch_size(replica, optimizer, make_batch, loss_fn, limit=limits[rank])
    n = found.batch_size

    torch.manual_seed(7)  # all ranks make the same global batch and take their part of it
    batch = make_batch(world * n)
    mine = [part.clone() for part in split(batch, n)[rank]]  # a slice keeps the whole batch
    with memory.meter(model, optimizer, limit=limits[rank]):
        loss_fn(replica, mine).backward()
        optimizer.step()
    want = accumulated(make_model(), [batch], [1.0])  # one device, the whole global batch
    return n, found.ranks, (gradient(model) - want).abs().max().item()


limits = [LIMIT, LIMIT // 2]
answers = launch(search_together, 2, limits)
(n, own, _), (same, _, _) = answers
for rank in range(2):
    print(f"rank {rank}: limit {memory.size(limits[rank])}, its own search found {own[rank]}")
print(f"together: {n} a rank, a global batch of {2 * n}")

# %%
# NBVAL_CHECK_OUTPUT
print("both ranks got the same size:", n == same)
print("it is the smaller of what their searches found:", n == min(own))
print("half the memory, less than half the batch:", own[1] < own[0] / 2)
print("gradients equal one device's, below 1e-6:", max(d for *_, d in answers) < 1e-6)

# %% [markdown]
# Parameters, gradients and optimizer state take the same on both ranks; only what is left is for samples. (And rank 0 finds fewer than you found without ranks, because DDP keeps a second copy of the gradients.) When you change the number of ranks, the global batch changes with it, and so may the best learning rate.
#
# ## What a real GPU does differently
#
# CUDA's allocator counts the same tensors as the budget, but hands out blocks: it rounds sizes up, keeps freed blocks for later, and may be unable to join them, so memory can run out although the sum would fit. Libraries take workspaces that no tensor shows. Each process also needs a context before its first tensor. So on a GPU leave a margin: `find_batch_size(..., headroom=0.05)`. The benchmark's table says which machine it was measured on, and whether on a GPU.
#
# ## Then → now
#
# | then (2021) | now | why |
# |---|---|---|
# | `except RuntimeError` | `except torch.OutOfMemoryError`, or `memory.is_oom` | a wrong shape is no lack of memory |
# | retry inside `except` | note the failure, retry after it | the exception holds the tensors |
# | train on each sample alone | halve the micro-batch, weigh by count, step once | the same gradient as the whole batch |
# | guess a size, halve | two small trials, lines, verify | few trials, no guess, little left unused |
#
# ## Exercise
#
# [Exercise 16](../exercises/16_batch_size.ipynb): the largest batch of a hidden device in at most six trials, accumulation with a ragged last part, and a step that survives. About 45 minutes.
#
# ## Recap
#
# The peak of forward and backward is a line in the batch size, that of the optimizer's step is nearly flat: measure them apart, predict from two small batches, verify. A failed step's activations are free only after the `except` block, its gradients after `zero_grad()`. A batch that does not fit is the sum of micro-batches, each weighed by what its mean counts.
#
# 1. Batches of 10 and 20 peak at 300 and 400 MiB in backward. What is the largest that fits into 1000 MiB, and what else do you have to know?
# 2. Your probe runs forward and backward at 512; training dies in its first `optimizer.step()`. Which optimizer do you suspect, and why?
# 3. Three micro-batches have 100, 100 and 20 tokens. Which weights give the gradient of all 220?
#
# <details><summary>Answers</summary>
#
# 1. 80: the line is 200 + 10 a sample. The peak of the optimizer's step must be below 1000 MiB too, and 80 has to be tried.
# 2. Adam, or another one with state for each parameter: it makes it in its first step.
# 3. 100/220, 100/220 and 20/220. A third each would let the last one weigh almost four times too much.
#
# </details>
#
# Go on with [exercise 16](../exercises/16_batch_size.ipynb).
