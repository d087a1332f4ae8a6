# ---
# jupyter:
#   course:
#     rows: [O8]
#     minutes: {read: 20, do: 20}
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
# # Where memory goes: predict the bill, then weigh it
#
# After this lesson you can say before training how much memory a model will take and for what, weigh it while it trains, and tell which of the many numbers called "memory" you are looking at.
#
# *This lesson can be read alone. It uses `launch(function, 2)`, which runs a function in two processes with a device each ([lesson 00](00_start_here.ipynb)), and DDP, which gives every process a copy of the model.*
#
# | | |
# |---|---|
# | **Time** | 20 minutes to read, 20 to do |
# | **You should know** | a PyTorch training step: forward, backward, optimizer; ranks and `launch` ([lesson 00](00_start_here.ipynb)) |
# | **You will** | count bytes by hand · weigh parameters, gradients, optimizer state and activations · find a shape error before training, and see where summaries are wrong · predict a model that does not fit · weigh data parallel training, rank by rank |
# | **Runs on** | no GPU: tensors are counted, by a meter that gives the same numbers everywhere · a GPU: the same cells ask CUDA's allocator, and one cell more has something to show |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import contextlib
import io
import json
import re
import sys
import tempfile
import weakref
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torchinfo
import torchsummary
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils import memory, plots
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.memory import GiB, MiB

plots.use_style()
device = "cuda" if torch.cuda.is_available() else "cpu"

# %%
machine = census()
print(machine)
assert len(slots(2)) == 2, "one part of this lesson runs on two devices"

# %% [markdown]
# ## From scratch: four tensors
#
# A tensor is a view: a shape and a type, laid over a **storage**. The storage has the bytes, and it lives as long as any tensor looks at it.
#
# **Predict.** `a` has 1000 × 1000 numbers of 4 bytes. How many bytes do the four tensors take together?

# %%
# NBVAL_CHECK_OUTPUT
a = torch.zeros(1000, 1000)
b = a.T  # the same numbers, read by columns
c = a[:10]  # ten rows of them
d = a[:10].clone()  # a copy of ten rows

for name, tensor in {"a": a, "b": b, "c": c, "d": d}.items():
    storage = tensor.untyped_storage()
    same = storage.data_ptr() == a.untyped_storage().data_ptr()
    print(
        f"{name}: shows {tensor.nbytes:7} bytes of a storage of {storage.nbytes():7}, a's: {same}"
    )

storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (a, b, c, d)}
print("together:", sum(storages.values()), "bytes, in", len(storages), "storages")

# %% [markdown]
# Two storages, not four. A view costs nothing, as long as its storage is needed anyway. Now the other side of it.
#
# **Predict.** You delete `a` and `b`. Only `c` is left to look at the large storage: ten rows, 1 % of it. How many bytes are freed?

# %%
# NBVAL_CHECK_OUTPUT
large = weakref.ref(a.untyped_storage())  # looks without keeping alive
del a, b, storage, tensor
print("after del a, b: freed is", large() is None)
c = c.clone()  # a storage of its own
print("after c.clone(): freed is", large() is None)

# %% [markdown]
# Nothing was freed until the slice had a storage of its own. You will meet this again at the end, where it hurts.
#
# ## Open the meter
#
# PyTorch can ask a **dispatch mode** at every operation. This one looks at the storages of each result, adds the new ones, and has a weak reference to each of them call back when the storage goes. That is a meter, and it is most of what `memory.Budget` does.


# %%
class StorageCounter(TorchDispatchMode):
    """Counts the bytes of the storages that operations returned and that are still alive."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.live += size
            self.peak = max(self.peak, self.live)

    def forget(self, key, size):
        del self.known[key]
        self.live -= size


# %%
# NBVAL_CHECK_OUTPUT
with StorageCounter() as ours, memory.Budget(device="cpu") as budget:
    net = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 10))
    adam = torch.optim.Adam(net.parameters())
    for _ in range(2):
        net(torch.ones(64, 100)).square().mean().backward()
        adam.step()

print("live, ours and the course's:", ours.live, budget.live)
print("peak, ours and the course's:", ours.peak, budget.peak)
assert (ours.live, ours.peak) == (budget.live, budget.peak)

# %% [markdown]
# The same to the byte. `memory.Budget` does three things more: it can be told about tensors that existed before, it knows which **kind** a storage is of, and it can have a limit. `memory.meter(...)` takes it on a CPU. On a GPU it takes a meter that asks CUDA's own allocator. Lessons 15 to 17 work with these.
#
# ## Round 1: what a model holds
#
# Here is a small classifier. It has $784 · 512 + 512 + 512 · 10 + 10$ parameters, of 4 bytes each (float32).
#
# **Predict**, by pencil: how many bytes do the parameters take? Their gradients? And Adam keeps, for each parameter, a running mean of the gradient and one of its square: how many bytes is that?


# %%
# NBVAL_CHECK_OUTPUT
def make_classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)


numbers = 784 * 512 + 512 + 512 * 10 + 10
predicted = {
    "parameters": 4 * numbers,
    "gradients": 4 * numbers,
    "optimizer state": 2 * 4 * numbers,
}

classifier = make_classifier()
adam = torch.optim.Adam(classifier.parameters())
classifier(torch.ones(32, 784, device=device)).square().mean().backward()
adam.step()
weighed = memory.kinds(classifier, adam)
for kind, size in weighed.items():
    print(
        f"{kind:16} predicted {predicted[kind]:8}, weighed {size:8}, more: {size - predicted[kind]}"
    )

# %% [markdown]
# Right to the byte, up to the last number: for each of the four parameter tensors Adam also counts its steps, in 4 bytes. So a model in training with Adam holds four times its parameters, whatever the batch. Other optimizers keep other things. And none of this is there from the start.
#
# **Predict.** After which line does the optimizer's state appear: when the optimizer is made, at the first backward, at the first step?

# %%
# NBVAL_CHECK_OUTPUT
classifier = make_classifier()
adam = torch.optim.Adam(classifier.parameters())
unit = memory.kinds(classifier)["parameters"]


def weigh(moment, optimizer):
    sizes = [round(size / unit, 2) for size in memory.kinds(classifier, optimizer).values()]
    print(f"{moment:30}{sizes[0]:10}{sizes[1]:11}{sizes[2]:17}")


print(f"{'in units of the parameters':30}parameters  gradients  optimizer state")
weigh("made", adam)
loss = classifier(torch.ones(32, 784, device=device)).square().mean()
weigh("after the forward pass", adam)
loss.backward()
weigh("after backward", adam)
adam.step()
weigh("after the first step", adam)
adam.zero_grad()  # sets gradients to None
weigh("after zero_grad", adam)

optimizers = {
    "SGD": torch.optim.SGD(classifier.parameters()),
    "SGD with momentum": torch.optim.SGD(classifier.parameters(), momentum=0.9),
    "AdamW with amsgrad": torch.optim.AdamW(classifier.parameters(), amsgrad=True),
}
for name, optimizer in optimizers.items():
    classifier(torch.ones(32, 784, device=device)).square().mean().backward()
    optimizer.step()
    weigh(f"one step of {name}", optimizer)
del loss

# %% [markdown]
# The state is **lazy**: it appears at the first step. A program that has survived forward and backward once may have its largest moment before it. Keep that in mind for lesson 16, where a batch size is to be found: one forward pass proves nothing.
#
# ## Round 2: what a batch adds
#
# **Activations** are the results of the forward pass that the backward pass will need. One of the tutorials that this course grew from trains a small image classifier, for 150 × 150 pixels in three colours. Here it is in PyTorch.
#
# **Predict.** From a batch of 1 to a batch of 8: what happens to parameters, gradients, optimizer state, activations?


# %%
def make_cnn(device=device):
    """A small image classifier: 150 × 150 pixels in three colours, two classes."""
    torch.manual_seed(0)
    layers, channels = [], 3
    with torch.device(device):  # where new tensors are made
        for width in (32, 64, 128, 128):
            layers += [nn.Conv2d(channels, width, 3), nn.ReLU(), nn.MaxPool2d(2)]
            channels = width
        layers += [nn.Flatten(), nn.Dropout(0.5)]
        layers += [nn.Linear(7 * 7 * 128, 512), nn.ReLU(), nn.Linear(512, 1)]
    return nn.Sequential(*layers)


def images(count, side=150):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1)).to(device)


cnn = make_cnn()
adam = torch.optim.Adam(cnn.parameters(), lr=1e-4)
in_forward, between = {}, {}
for batch in (1, 2, 4, 8):
    x = images(batch)
    with memory.meter(cnn, adam, x) as meter:
        loss = cnn(x).square().mean()
        in_forward[batch] = meter.by_kind()
        loss.backward()
        adam.step()
        del loss
        between[batch] = meter.by_kind()

kinds = ["parameters", "gradients", "optimizer state", "activations"]
print(f"{'batch':6}" + "".join(f"{kind:>18}" for kind in kinds) + "   activations per image")
for batch, sizes in between.items():
    sizes = sizes | {"activations": in_forward[batch]["activations"]}
    per_image = sizes["activations"] / batch / MiB
    cells = "".join(f"{sizes[kind] / MiB:14.2f} MiB" for kind in kinds)
    print(f"{batch:6}{cells}{per_image:18.2f} MiB")

# %%
# NBVAL_CHECK_OUTPUT
for kind in kinds[:3]:
    print(f"{kind}: the same for every batch: {between[1][kind] == between[8][kind]}")
growth = in_forward[8]["activations"] / in_forward[1]["activations"]
print(f"activations grow {growth:.2f} times from a batch of 1 to a batch of 8")
print("activations left after the step:", between[8]["activations"])

# %% [markdown]
# Only activations grow with the batch, and only they go away within the step. The rest is a fixed price. So two questions decide what fits: how large is the fixed price, and how much does one more sample cost?
#
# ### Who keeps what?
#
# Autograd calls a hook for every tensor that it keeps for backward. Look at the first three layers.
#
# **Predict.** Convolution, ReLU and pooling each return a new tensor. Which of these three does autograd keep?

# %%
# NBVAL_CHECK_OUTPUT
x = images(8)
known = {x.untyped_storage().data_ptr(): "the input"}
known |= {p.untyped_storage().data_ptr(): "a parameter" for p in cnn.parameters()}


def show(tensor):
    what = known.setdefault(tensor.untyped_storage().data_ptr(), "new")
    if what == "new":
        known[tensor.untyped_storage().data_ptr()] = "kept already"
    kind = str(tensor.dtype).removeprefix("torch.")
    size = tensor.untyped_storage().nbytes() / MiB
    print(f"    {list(tensor.shape)!s:19} {kind:8} {size:6.2f} MiB  {what}")
    return tensor


y = x
with saved_tensors_hooks(show, lambda tensor: tensor):
    for name, layer in zip(["convolution", "ReLU", "pooling"], cnn[:3], strict=True):
        print(name, "keeps")
        y = layer(y)

# %% [markdown]
# The convolution needs its input and its weight. ReLU needs its own result: where that is 0, no gradient passes. The pooling needs its input, which is ReLU's result once more, and the places of the winners, in whole numbers of 8 bytes. The convolution's result is needed by nobody, and it is gone. So the sum of all layers' outputs, which summaries print, is not what training keeps. Is the list complete?

# %%
# NBVAL_CHECK_OUTPUT
kept = {}
anyway = {t.untyped_storage().data_ptr() for t in [x, *cnn.parameters()]}


def note(tensor):
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in anyway:
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor


del y
with memory.meter(cnn, x) as meter, saved_tensors_hooks(note, lambda tensor: tensor):
    loss = cnn(x).square().mean()
    activations = meter.by_kind()["activations"]
share = sum(kept.values()) / activations
print(f"kept by autograd, as a share of the meter's activations: {share:.3f}")
del loss

# %% [markdown]
# That is all of them. Exercise 14 makes a tool of these hooks: it finds the layer that keeps the most.
#
# ### Two steps, moment by moment
#
# With `record=True` a meter writes down every change. The first two steps of a fresh model show all kinds at once.
#
# **Predict.** Draw the curve: where does it rise, where does it fall, and is the second step as high as the first?

# %%
cnn = make_cnn()
adam = torch.optim.Adam(cnn.parameters(), lr=1e-4)
peaks = []
with memory.meter(cnn, adam, x, record=True) as meter:
    for step in (1, 2):
        meter.reset()
        meter.mark(f"forward {step}")
        loss = cnn(x).square().mean()
        meter.mark(f"backward {step}")
        loss.backward()
        meter.mark(f"step {step}")
        adam.step()
        adam.zero_grad()
        del loss
        peaks.append(meter.peak)

plots.show(
    meter.figure(),
    name="two-steps-of-adam",
    alt="Memory of two training steps over time, stacked by kind. Activations climb in forward and "
    "fall in backward while gradients rise; the optimizer state appears in the first "
    f"step. Peaks: {memory.size(peaks[0])} and {memory.size(peaks[1])}.",
)
print("peak of step 1:", memory.size(peaks[0]))
print("peak of step 2:", memory.size(peaks[1]))
print(meter)

# %%
# NBVAL_CHECK_OUTPUT
print("the second step is higher:", peaks[1] > peaks[0])

# %% [markdown]
# In forward, activations climb. In backward they fall layer by layer, while gradients rise; in between, the gradients of activations come and go (*other*). The highest point lies early in backward: nearly all activations are still there, and the large gradients of the last layers have come. In the optimizer's step Adam makes its state, and some temporary tensors. The second step climbs on top of that state, and is higher: a program may run out of memory in its second step only. So every step has two peaks, one in backward and one in the optimizer. Only the first grows with the batch.
#
# ## Round 3: summaries, and shape errors before training
#
# Notes of a bootcamp that this course grew from recommend a summary against shape errors. `torchsummary` prints a model as a table: one line for each layer that ran, in a forward pass with two random samples. (Its "MB" are MiB.)

# %%
# NBVAL_CHECK_OUTPUT
torchsummary.summary(make_cnn(), (3, 150, 150), device=device)

# %% [markdown]
# The classic use: the number of features where convolutions end and the first `Linear` begins. Somebody counted as if every 3 × 3 convolution kept the size, and wrote 9 · 9 · 128.
#
# **Predict.** What is the right number, and who will tell you: an error message, or the summary of a part?

# %%
# NBVAL_CHECK_OUTPUT
broken = make_cnn()
broken[14] = nn.Linear(9 * 9 * 128, 512).to(device)
silent = io.StringIO()
try:
    with contextlib.redirect_stdout(silent):
        torchsummary.summary(broken, (3, 150, 150), device=device)
except RuntimeError as error:
    print("RuntimeError:", error)
else:
    raise AssertionError("the shape error was not found")
print("lines of the table printed before the error:", len(silent.getvalue().splitlines()))

# %% [markdown]
# It found the error before any training, with two random samples. But it prints its table at the end, so there is none: no line says *which* layer. The message has it, if you can read it: 2 samples came with one number of features, the weight expects another. The part before the broken layer runs. Summarise that:

# %%
# NBVAL_CHECK_OUTPUT
silent = io.StringIO()
with contextlib.redirect_stdout(silent):
    torchsummary.summary(broken[:14], (3, 150, 150), device=device)
for line in silent.getvalue().splitlines():
    if line.strip().startswith(("MaxPool2d-12", "Flatten-13", "Dropout-14")):
        print(line)

broken[14] = nn.Linear(7 * 7 * 128, 512).to(device)
print("the mended model gives", list(broken(images(2)).shape))

# %% [markdown]
# 7 · 7 · 128 features. `torchinfo` does the same job today; when a model fails, its error at least names the layers that ran:

# %%
# NBVAL_CHECK_OUTPUT
broken[14] = nn.Linear(9 * 9 * 128, 512).to(device)
try:
    torchinfo.summary(broken, input_size=(2, 3, 150, 150), verbose=0, device=device)
except RuntimeError as error:
    ran = re.findall(r"(\w+): \d", str(error))
    print("ran:", ", ".join(ran))
else:
    raise AssertionError("the shape error was not found")

# %% [markdown]
# Another of these tutorials trains an **auto-encoder**: it squeezes an image and draws it again. Here a wrong shape would not even raise before the loss: it would give an image of another size. The summary shows that the last shape is the first one again.


# %%
# NBVAL_CHECK_OUTPUT
def make_autoencoder():
    """A small auto-encoder, for images whose sides are multiples of 20."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(5),
        nn.ConvTranspose2d(16, 8, 5, stride=5), nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 5, stride=4, padding=1, output_padding=1), nn.ReLU(),
    ).to(device)  # fmt: skip


torchsummary.summary(make_autoencoder(), (3, 80, 80), device=device)
for side in (80, 150):
    print(f"{side} pixels in, {make_autoencoder()(images(1, side)).shape[-1]} pixels out")

# %% [markdown]
# ### Where the summaries are wrong
#
# `torchsummary` was last released in 2018. It adds up `weight` and `bias` of every layer, each time the layer runs.
#
# **Predict.** A layer that is used twice; a parameter that belongs to no layer; an LSTM. What will it print for each?


# %%
class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(self.layer(x))


class BareParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)  # 4 · 8 + 8 = 40
        self.scale = nn.Parameter(torch.ones(8, 10))  # 80

    def forward(self, x):
        return self.layer(x) @ self.scale


def count_by_torchsummary(model, shape):
    """It returns nothing, so its number must be read from what it prints."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            torchsummary.summary(model, shape, device="cpu")
    except (AttributeError, TypeError) as error:
        return type(error).__name__
    return int(re.search(r"Total params: ([\d,]+)", printed.getvalue())[1].replace(",", ""))


# %%
# NBVAL_CHECK_OUTPUT
cases = {
    "a layer used twice": (UsedTwice(), (8,)),
    "a bare parameter": (BareParameter(), (4,)),
    "an LSTM": (nn.Sequential(nn.LSTM(8, 8)), (5, 8)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 8)),
}
print(f"{'':20}{'true':>6}{'torchsummary':>16}{'torchinfo':>11}")
for name, (model, shape) in cases.items():
    true = sum(p.numel() for p in model.parameters())
    info = torchinfo.summary(model, input_size=(2, *shape), verbose=0, device="cpu")
    old = count_by_torchsummary(model, shape)
    print(f"{name:20}{true:6}{old!s:>16}{info.total_params:11}")

lstm = cases["an LSTM"][0][0]
print("hooks that its crash left in the LSTM:", len(lstm._forward_hooks))

# %% [markdown]
# Shared layers count twice, bare parameters not at all, and a layer that returns more than one tensor ends in an error that speaks of a tuple, not of your model. After such a crash its hooks stay in the model. So read shapes from it, and take the number of parameters from `sum(p.numel() for p in model.parameters())`, which counts shared ones once.
#
# ### Their estimate of memory
#
# Both print an "estimated total size": input, parameters, and the outputs of the layers times two. Hold that against the meter, for one step of Adam after the first.
#
# **Predict.** Parameters count once in the estimate. Training with Adam holds four times as much. Which model will be underestimated most?

# %%
mlp = nn.Sequential(
    nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
)
attention = nn.Sequential(nn.TransformerEncoderLayer(64, 8, 256, batch_first=True, dropout=0))
cases = {
    "CNN, batch 1": (make_cnn(), (1, 3, 150, 150)),
    "CNN, batch 4": (make_cnn(), (4, 3, 150, 150)),
    "auto-encoder, batch 16": (make_autoencoder(), (16, 3, 80, 80)),
    "MLP, batch 32": (mlp, (32, 512)),
    "attention, batch 4": (attention, (4, 256, 64)),
}


def estimates(model, shape):
    """What the two print as total size, in bytes; None where torchsummary crashes."""
    printed = io.StringIO()
    info = torchinfo.summary(model, input_size=shape, verbose=0, device=device, mode="train")
    new = info.total_input + info.total_output_bytes + info.total_param_bytes
    try:
        with contextlib.redirect_stdout(printed):
            torchsummary.summary(model, shape[1:], batch_size=shape[0], device=device)
    except AttributeError:
        return None, new
    return float(re.search(r"Total Size \(MB\): ([\d.]+)", printed.getvalue())[1]) * MiB, new


def second_step(model, shape):
    """The peak of the second step of Adam, in bytes."""
    x, adam = torch.rand(shape, device=device), torch.optim.Adam(model.parameters())
    with memory.meter(model, adam, x) as meter:
        for _ in range(2):
            meter.reset()
            model(x).square().mean().backward()
            adam.step()
            adam.zero_grad()
    return meter.peak


ratios = {}
print(f"{'':24}{'torchsummary':>14}{'torchinfo':>12}{'measured':>12}   measured / estimated")
for name, (model, shape) in cases.items():
    peak = second_step(model.to(device), shape)
    guesses = estimates(model, shape)
    ratios[name] = [peak / guess if guess else None for guess in guesses]
    old, new = (memory.size(guess) if guess else "crash" for guess in guesses)
    words = " and ".join(f"{ratio:.2f}" if ratio else "none" for ratio in ratios[name])
    print(f"{name:24}{old:>14}{new:>12}{memory.size(peak):>12}   {words}")

# %%
fig, ax = plt.subplots(figsize=(7, 3.4))
for side, label in enumerate(["torchsummary", "torchinfo"]):
    found = {n: pair[side] for n, pair in enumerate(ratios.values()) if pair[side]}
    ax.barh(
        [n + 0.4 * side - 0.2 for n in found], [ratio - 1 for ratio in found.values()], left=1,
        height=0.36, label=label, color=plots.COLOURS[side], hatch=["", "//"][side], edgecolor="white",
    )  # fmt: skip
ax.axvline(1, color="black", linestyle=":", marker="")
ax.set_xscale("log", base=2)
ax.set_xlim(0.4, 8)
ax.set_xticks([0.5, 1, 2, 4, 8], ["½", "1", "2", "4", "8"])
ax.set_yticks(range(len(ratios)), ratios)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(
    xlabel="measured peak / estimate (×)\n← estimate too large | estimate too small →",
    ylabel="model",
)
every = [ratio for pair in ratios.values() for ratio in pair if ratio]
ax.set_title(f"Training takes {min(every):.2f} to {max(every):.1f} times the estimate")
ax.legend(loc="lower right")
plots.show(
    fig,
    name="estimates-against-the-meter",
    alt="Bars of the measured peak over the estimates of torchsummary and torchinfo, for five "
    f"models. The ratio goes from {min(every):.2f} to {max(every):.1f}.",
)

# %%
# NBVAL_CHECK_OUTPUT
print("some estimate is less than half of the truth:", max(every) > 2)
print("some estimate is above the truth:", min(every) < 1)

# %% [markdown]
# Wrong in both directions, so it is no bound. Where parameters weigh most, the estimate is far too small: it has no gradients and no optimizer state. Where activations weigh most, `torchsummary` is too large: it counts outputs that nobody keeps. `torchinfo` counts only the outputs of layers that have parameters, and neither sees what happens inside a layer, such as the steps of attention. Use them for shapes. For memory, weigh.
#
# ## Round 4: tensors are not the process
#
# Your system monitor shows another number: the **resident set size** (RSS), the memory that the system has really given to the process. Here a fresh process trains the CNN for two steps with 4 images and measures both, at the same moments. Then it makes some tensors of its own.
#
# **Predict.** Which is larger at the peak of training, what the meter counts or what the process has grown by? `torch.empty` makes a tensor of 256 MiB and writes nothing into it: what do the meter and the system say? And after 20 000 small tensors were made, and all but every 50th deleted?


# %%
def largest_rss(process):
    """Bytes. Windows and Unix keep this figure in different places, macOS in another unit."""
    if hasattr(process.memory_info(), "peak_wset"):
        return process.memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def two_scales():
    """The RSS before, then rows: a moment, bytes by the meter, bytes by which the RSS grew."""
    import psutil

    process, rows = psutil.Process(), []
    with memory.meter(device="cpu") as meter:
        torch.ones(1)  # the first operation loads code of the meter's own
        start = process.memory_info().rss

        def weigh(moment):
            rows.append((moment, meter.live, process.memory_info().rss - start))

        model, x = make_cnn("cpu"), torch.rand(4, 3, 150, 150)
        adam = torch.optim.Adam(model.parameters())
        for _ in range(2):
            loss = model(x).square().mean()
            loss.backward()
            adam.step()
            adam.zero_grad()
        rows.append(("CNN: peak of two steps", meter.peak, largest_rss(process) - start))
        del model, adam, x, loss
        weigh("CNN: all deleted")
        large = torch.empty(64 * 2**20)
        weigh("empty, 256 MiB")
        large.fill_(1)
        weigh("filled")
        del large
        weigh("deleted")
        small = [torch.ones(1024) for _ in range(20_000)]
        weigh("20 000 tensors of 4 KiB")
        small = small[::50]
        weigh("every 50th of them kept")
    return start, rows


((start, rows),) = launch(two_scales, 1)
print(f"{'':26}{'tensors (meter)':>16}{'process (RSS)':>18}")
print(f"{'Python and its libraries':26}{'0 bytes':>16}{memory.size(start):>18}")
for moment, tensors, grown in rows:
    print(f"{moment:26}{memory.size(tensors):>16}{'+' + memory.size(grown):>18}")

# %%
# NBVAL_CHECK_OUTPUT
seen = {moment: (tensors / MiB, grown / MiB) for moment, tensors, grown in rows}
empty, filled = seen["empty, 256 MiB"], seen["filled"]
few = seen["every 50th of them kept"]
print("empty counts at once for the meter:", empty[0] >= 256)
print("for the system only when it is filled:", filled[1] - empty[1] > 200)
print("for the meter most small tensors are gone:", few[0] < 5)
print("for the system they are not:", few[1] - seen["deleted"][1] > 40)

# %% [markdown]
# Four reasons for two numbers:
#
# 1. **Code.** Python, PyTorch and their libraries are in the process, and are no tensors.
# 2. **Promises.** The system hands out memory when it is first written, not when it is asked for.
# 3. **Retention.** Only a very large block goes back to the system as soon as it is deleted. Smaller ones the allocator of the C library keeps for the next request; look at the CNN after *all deleted*. A few survivors, spread over many pages, can hold all of these: that is **fragmentation**.
# 4. **Workspaces.** Kernels take memory for themselves, such as a reordered copy of a weight. No tensor looks at it.
#
# The peak of the CNN's training shows their sum.
#
# So a limit on tensors and a limit on the process are not the same number, and neither follows from the other. The meters of this course count tensors, because that is what your program decides, and what CUDA's allocator counts too.
#
# ### On a GPU: allocated, reserved, driver
#
# There are three numbers on a GPU, for the same reasons. **Allocated**: tensors, in blocks of 512 bytes. **Reserved**: what PyTorch's caching allocator has taken from the driver and keeps for the next request; never less than allocated. **Driver**: what `nvidia-smi` shows, which adds the CUDA context, libraries, and other processes. "My GPU is full although I deleted everything" is usually a look at the third number, or the second.
#
# PyTorch can also record who asked for every block, with a stack: the **memory snapshot**. Drop the file on [PyTorch's memory viewer](https://pytorch.org/memory_viz), which uploads nothing, and it draws the timeline of above, with the line of your program behind every block.

# %%
if device == "cuda":
    torch.cuda.memory._record_memory_history(max_entries=100_000)

    def three_numbers(moment):
        free, total = torch.cuda.mem_get_info()
        numbers = torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
        print(f"{moment:22}" + "".join(f"{memory.size(number):>14}" for number in numbers))

    print(f"{'':22}{'allocated':>14}{'reserved':>14}{'driver':>14}")
    three_numbers("before")
    loss = cnn(images(32)).square().mean()
    three_numbers("after forward")
    del loss
    three_numbers("after del")
    memory.release()
    three_numbers("after memory.release()")
    snapshot = Path(tempfile.mkdtemp()) / "snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(snapshot))
    torch.cuda.memory._record_memory_history(enabled=None)
    print("snapshot:", snapshot.name, memory.size(snapshot.stat().st_size))
else:
    print("No GPU here, so this cell measured nothing. On a GPU it prints the three numbers")
    print("before and after a forward pass, after `del` and after `memory.release()`,")
    print("and writes a memory snapshot.")

# %% [markdown]
# ## Round 5: a model that does not fit
#
# `memory.Fake` runs the same steps on tensors that have a shape and no numbers. It costs no memory and little time, and is a **prediction**. First: can you trust it? Here is the CNN, for real and predicted.


# %%
# NBVAL_CHECK_OUTPUT
def two_steps(make, shape, meter):
    """Bytes by kind after the forward pass and after the step, and the peak, of step 2."""
    with meter:
        model = make()
        adam = torch.optim.Adam(model.parameters())
        meter.track(model, adam)
        x = torch.rand(shape)
        for _ in range(2):
            meter.reset()
            loss = model(x).square().mean()
            in_forward = meter.by_kind()
            loss.backward()
            adam.step()
            del loss
    return in_forward, meter.by_kind(), meter.peak


def cnn_on_cpu():
    return make_cnn("cpu")


real = two_steps(cnn_on_cpu, (4, 3, 150, 150), memory.Budget(device="cpu"))
fake = two_steps(cnn_on_cpu, (4, 3, 150, 150), memory.Fake(device="cpu"))
print("by kind in forward, predicted = measured:", fake[0] == real[0])
print("by kind after step, predicted = measured:", fake[1] == real[1])
print(f"peak, predicted / measured: {fake[2] / real[2]:.3f}")
assert abs(fake[2] / real[2] - 1) < 0.01

# %% [markdown]
# Now a transformer of the size of today's "small" language models: 32 blocks, 4096 wide. One sample of 2048 tokens, Adam, float32.
#
# **Predict.** It has about 6.4 billion parameters. How many GiB does training need, and does this machine have them?


# %%
# NBVAL_CHECK_OUTPUT
def make_giant():
    block = {"d_model": 4096, "nhead": 32, "dim_feedforward": 16384}
    how = {"batch_first": True, "norm_first": True, "dropout": 0, "activation": "gelu"}
    return nn.Sequential(*[nn.TransformerEncoderLayer(**block, **how) for _ in range(32)])


in_forward, after, giant_peak = two_steps(make_giant, (1, 2048, 4096), memory.Fake(device="cpu"))
for kind in kinds[:3]:
    print(f"{kind:16}{after[kind] / GiB:8.1f} GiB")
print(
    f"{'activations':16}{in_forward['activations'] / GiB:8.1f} GiB, for one sample of 2048 tokens"
)
print(f"{'peak':16}{giant_peak / GiB:8.1f} GiB")

# %%
ram = machine.cpu.total_memory
print("this machine has", "an unknown amount" if ram is None else memory.size(ram), "of RAM")
for gpu in machine.gpus:
    if gpu.total_memory:
        print(f"{gpu.name} has {memory.size(gpu.total_memory)}")
if ram:
    print(f"the model needs {giant_peak / ram:.1f} times the RAM; nothing was allocated to know it")

# %% [markdown]
# The model was "trained" for two steps here, in seconds. The parameters alone may fit on one large GPU, and three more times as much comes with them. Half of all that goes with 16-bit numbers (lesson 17). What is left must be divided among devices (lesson 09).
#
# A prediction has limits. Tensors must be made where they belong, because `.to(...)` of a whole model fails under it. So does an operation whose result has a size that depends on numbers. Kernels' workspaces are not in it, nor fragmentation, and it predicts the CPU's kernels, where a GPU may use others. And it trusts what PyTorch says of each operation. Here is one that does not say everything:


# %%
class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


real = two_steps(Sequences, (32, 24, 16), memory.Budget(device="cpu"))
fake = two_steps(Sequences, (32, 24, 16), memory.Fake(device="cpu"))
print(f"LSTM: predicted {memory.size(fake[2])}, measured {memory.size(real[2])}")

# %% [markdown]
# If the two differ on your machine, it is for this: the CPU's LSTM kernel returns a workspace that backward needs, and its fake twin says that this has 0 bytes. The prediction is as good as the descriptions of the operations are. So weigh one small step for real before you trust it.
#
# ## Round 6: two devices, twice the price
#
# Data parallel training gives each rank a copy of the model, and a share of the **global batch**, which is all samples of one step over all ranks.
#
# **Predict.** Two ranks train with DDP on a global batch of 64. Compare one device that does it alone with both ranks together: which kinds double, which stay?


# %%
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def weigh_rank(batch, wrap, steps=2):
    """Bytes by kind that this rank holds in training; wrap makes the model distributed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU())
    model = model.to(my_device())
    adam = torch.optim.Adam(model.parameters())
    x = torch.rand(batch, 256, device=my_device())
    with memory.meter(model, adam, x) as meter:
        net = wrap(model)
        for _ in range(steps):
            loss = net(x).square().mean()
            activations = meter.by_kind()["activations"]
            loss.backward()
            adam.step()
            del loss
        held = meter.by_kind() | {"activations": activations}
        held["other"] -= x.nbytes  # what is left: DDP's own
    return held


def three_ways():
    ddp = DistributedDataParallel
    return {
        "one device": weigh_rank(64, lambda model: model),
        "DDP": weigh_rank(32, ddp),  # half of the global batch
        "DDP, bucket views": weigh_rank(32, lambda m: ddp(m, gradient_as_bucket_view=True)),
    }


reports = launch(three_ways, 2)
alone, ranks = reports[0]["one device"], [report["DDP"] for report in reports]
print(f"{'':18}{'one device':>12}{'rank 0':>12}{'rank 1':>12}{'both':>12}")
for kind in alone:
    sizes = [alone[kind], *(rank[kind] for rank in ranks), sum(rank[kind] for rank in ranks)]
    print(f"{kind:18}" + "".join(f"{size / MiB:8.2f} MiB" for size in sizes))

# %%
# NBVAL_CHECK_OUTPUT
print("both ranks hold the same:", ranks[0] == ranks[1])
for kind in ["parameters", "gradients", "optimizer state", "activations"]:
    print(
        f"{kind}: both ranks hold {sum(r[kind] for r in ranks) / alone[kind]:.2f} times one device"
    )

# %% [markdown]
# Activations are divided, and everything else is there twice: data parallel training makes a step faster, and it does not help a model that does not fit. (The whole model goes to every rank. Lesson 09 divides it.)
#
# And each rank has something under *other* that one device has not. These are DDP's **buckets**: gradients are copied into them, averaged over the ranks, and copied back. `gradient_as_bucket_view=True` makes the gradients views of the buckets. You know from the first section what a view costs.

# %%
runs = reports[0]
fig, ax = plt.subplots()
bottom = [0.0] * len(runs)
for number, kind in enumerate(alone):
    heights = [run[kind] / MiB for run in runs.values()]
    ax.bar(
        list(runs), heights, bottom=bottom, width=0.5, label=kind,
        color=plots.COLOURS[number], hatch=["", "//", "..", "\\\\", "xx"][number], edgecolor="white",
    )  # fmt: skip
    bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
extra = ranks[0]["other"] / ranks[0]["gradients"]
ax.set(xlabel="what rank 0 runs", ylabel="memory on rank 0 (MiB)", ylim=(0, 1.35 * max(bottom)))
ax.set_title(f"DDP adds {extra:.1f} × the gradients, unless they are views")
ax.legend(loc="upper center", ncols=3)
plots.show(
    fig,
    name="ddp-buckets",
    alt="Stacked bars of the memory on rank 0 by kind, for one device, DDP, and DDP with gradients "
    f"as views of its buckets. DDP adds {extra:.1f} times the gradients; with views it adds none.",
)
for name, run in runs.items():
    print(f"{name:18} all: {memory.size(sum(run.values())):>9}, other: {memory.size(run['other'])}")

# %%
# NBVAL_CHECK_OUTPUT
print(f"buckets, in units of the gradients: {extra:.2f}")
viewed = runs["DDP, bucket views"]
print(f"with gradient_as_bucket_view=True:  {viewed['other'] / viewed['gradients']:.2f}")

# %% [markdown]
# Buckets cost the gradients once more. With views that price is gone; it is worth setting, unless a part of your program needs gradients with storages of their own.
#
# ## Break it on purpose: two small lists
#
# Two programs collect something small at each step. Both lists look harmless.
#
# **Predict.** The first keeps one number of each batch of features, the second keeps each output. What does a step leave behind in each?


# %%
# NBVAL_CHECK_OUTPUT
def left_behind(collect, steps=4):
    """By kind, in MiB: what each step leaves behind."""
    model, kept = make_autoencoder(), []
    x = images(16, 80)
    with memory.meter(model, x) as meter:
        before = meter.by_kind()
        for _ in range(steps):
            kept.append(collect(model, x))
        after = meter.by_kind()
    return {k: round((after[k] - before[k]) / steps / MiB, 2) for k in ("activations", "other")}


def a_corner(model, x):
    with torch.no_grad():
        return model(x)[0, 0, 0, :1]  # one number


def an_output(model, x):
    return model(x)


def a_corner_mended(model, x):
    with torch.no_grad():
        return model(x)[0, 0, 0, :1].clone()  # a storage of its own


def an_output_mended(model, x):
    return model(x).detach()  # no graph behind it


for collect in (a_corner, a_corner_mended, an_output, an_output_mended):
    print(f"{collect.__name__:18} leaves per step, in MiB: {left_behind(collect)}")

# %% [markdown]
# One number kept a whole output alive: a slice keeps its storage. `.clone()` gives it one of its own. And an output kept its graph, with all activations of its forward pass; `.detach()` cuts the graph, and what is left per step is the output itself, which this list is for. The way to find such a thing is the table by kind: between two steps, nothing may grow that you do not keep on purpose. Lesson 15 has more such programs, and mends them.
#
# ## What this machine cannot show
#
# Without a GPU there is no caching allocator, no context, no memory of its own that can be full while the machine has plenty. The meter counts what CUDA's allocator would be asked for by the same tensors; a GPU also picks other kernels, with other temporaries, rounds each block up to 512 bytes, and lets Adam work on all parameters at once, which takes larger temporaries. How far meter and allocator lie apart was measured where we had a GPU:

# %%
places = [Path("benchmarks/results/memory.json"), Path("../benchmarks/results/memory.json")]
file = next((place for place in places if place.exists()), None)
results = json.loads(file.read_text()) if file else {"rows": []}
rows = [row for row in results["rows"] if "cuda" in row]
for row in rows:
    apart = row["budget"] / row["cuda"] - 1
    print(
        f"{row['model']:18} {row['optimizer']:6} {memory.size(row['cuda']):>9}, counted {apart:+.1%}"
    )
if rows:
    print("measured", results["machine"]["date"], "on", results["machine"]["gpus"])
else:
    print("the meter against torch.cuda.max_memory_allocated: not measured")

# %% [markdown]
# ## Then → now
#
# | then | now | why |
# |---|---|---|
# | `torchsummary.summary(model, size)` (2018) | `torchinfo.summary(model, input_size=…)` | counts shared and bare parameters right, knows LSTMs, returns an object |
# | its "estimated total size" | `memory.meter`, or `memory.Fake` before the model exists | gradients, optimizer state, and what autograd really keeps |
# | `nvidia-smi` | `torch.cuda.memory_allocated`, `memory_reserved`, the snapshot | says whose memory it is |
#
# ## Exercise
#
# [Exercise 14](../exercises/14_where_memory_goes.ipynb): the bytes by kind from a description alone, and the layer that keeps the most. About 30 minutes.
#
# ## Recap
#
# Parameters, gradients and optimizer state are a fixed price, of four times the parameters with Adam, and the last of them appears at the first step. Activations grow with the batch, and are what autograd keeps, not what layers return. A summary finds shape errors; what training takes you weigh, or predict with a fake run.
#
# 1. The parameters of a model take 400 MiB in float32, a quarter of them is frozen. How much do gradients and Adam's state take?
# 2. Two ranks train it with DDP, without bucket views. How much has each of them, activations apart?
# 3. `nvidia-smi` shows 9 GiB, `torch.cuda.memory_allocated()` 2 GiB. Name two things that the rest can be.
#
# <details><summary>Answers</summary>
#
# 1. 300 MiB and 600 MiB (and a few bytes for step counters): what is frozen has neither gradient nor state. With the parameters that is 1300 MiB.
# 2. 1600 MiB: the same 1300 MiB, because each rank has everything, and 300 MiB of buckets.
# 3. Blocks that PyTorch's allocator has reserved and keeps for later; the CUDA context and libraries; or another process.
#
# </details>
#
# Go on with [exercise 14](../exercises/14_where_memory_goes.ipynb).
