# ---
# jupyter:
#   course:
#     rows: [O9, O10]
#     minutes: {read: 25, do: 20}
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
# # Precision and recomputation: the same network in less memory
#
# After this lesson you can decide by measurement whether 16-bit numbers pay on your device, train in float16 without losing small gradients, and trade time for memory by computing activations twice or training only a head.
#
# | | |
# |---|---|
# | **Time** | 25 minutes to read, 20 to do; the exercise comes on top |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); a training step in PyTorch |
# | **You will** | see what 16 bits can hold · measure speed and memory of three types · lose gradients to underflow, and save them by loss scaling · tell native from emulated bfloat16 · recompute activations in segments · train a head on a backbone that you have pretrained · send gradients between two devices in half the bytes |
# | **Runs on** | no GPU, or one: this process, and two pinned cores for the last part · two GPUs or more: the last part on the GPUs |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# If you have not done lesson 14, two reminders: an **activation** is a result of the forward pass that is kept for the backward pass; the **peak** is the largest number of bytes that all tensors took at one moment, and `memory.meter` reads it ([lesson 14](14_where_memory_goes.ipynb)).

# %%
import copy
import sys
import time
import warnings
from contextlib import nullcontext
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from course_utils import memory, plots
from course_utils.datasets import MNIST_NOTE, mnist
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.memory import MiB
from course_utils.timing import compare, measure

plots.use_style()

# %%
print(census())
assert len(slots(2)) == 2, "the last part of this lesson runs on two devices"
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # one core is one device, also in this process

# %% [markdown]
# ## Two ways to spend 16 bits
#
# A floating-point number has a sign, an **exponent** (how large it can be) and a **mantissa** (how many digits it has). **float32** has 8 and 23 bits for them. **bfloat16** keeps the 8 bits of exponent and is left with 7 for the digits. **float16** has 5 and 10. (The digit before the point is always 1 and is not stored, so each type has one more than that.)

# %%
# NBVAL_CHECK_OUTPUT
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COLOUR = {"float32": plots.COLOURS[2], "bfloat16": plots.COLOURS[0], "float16": plots.COLOURS[1]}

print(f"{'':10}{'bytes':>6}{'largest':>12}{'smallest':>12}{'step at 1':>12}")
for name, dtype in TYPES.items():
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps  # above 0, with one digit left
    print(f"{name:10}{dtype.itemsize:>6}{info.max:12.3g}{smallest:12.3g}{info.eps:12.3g}")

# %% [markdown]
# "Step at 1" is the distance from 1 to the next number: what is smaller is rounded. The step doubles with each power of two.
#
# **Predict.** What do the two 16-bit types make of 70 000, of 0.00000001, of 1.001, of 257? Write down which of the eight are infinite, zero, or rounded to something that you would notice.

# %%
# NBVAL_CHECK_OUTPUT
print(f"{'':>10}", *(f"{name:>12}" for name in TYPES))
for number in (70_000, 1e-8, 1.001, 257):
    held = [torch.tensor(number, dtype=dtype).item() for dtype in TYPES.values()]
    print(f"{number:>10g}", *(f"{value:12.6g}" for value in held))

# %% [markdown]
# float16 loses the large and the small, bfloat16 loses digits. Losing digits has a price of its own. Here is a weight of 1 that gets a thousand updates of 0.001.

# %%
# NBVAL_CHECK_OUTPUT
for name, dtype in TYPES.items():
    weight = torch.ones((), dtype=dtype)
    for _ in range(1000):
        weight += 0.001
    print(f"{name:10}{weight.item():.3f}")

# %% [markdown]
# In bfloat16 the weight never moves: each update is smaller than half a step, and is rounded away. (In float16 each becomes 0.000977, one step.) That is why **mixed precision** keeps the weights in float32, and uses 16 bits only for what is computed from them.
#
# ## Are 16 bits faster? Ask the device
#
# The bootcamp notes of 2021 that this course grew out of say: *16-bit floats are rarely used except for big models*. Take it as a claim with two parts, time and memory, and test each on the device in front of you.
#
# A device is fast in a type for which it has instructions. Where it has none, software converts or computes digit by digit. The last column below, "by hand", does the first: it stores bfloat16, multiplies in float32, and rounds the result.
#
# **Predict.** For a product of two matrices: which type is fastest on your device, and by how much? Does the size matter?


# %%
def products(size):
    a, b = torch.randn(2, size, size, device=device)
    ways = {name: partial(torch.matmul, a.to(dtype), b.to(dtype)) for name, dtype in TYPES.items()}
    a16, b16 = a.bfloat16(), b.bfloat16()
    return ways | {"by hand": lambda: (a16.float() @ b16.float()).bfloat16()}


results = {}
size = 64 if device == "cpu" else 512
while True:
    results[size] = compare(products(size), repeat=9)
    longest = sum(timing.median for timing in results[size].timings.values())
    if 8 * longest > 0.3 or size >= 8192:  # the next size takes 8 times as long a round
        break
    size *= 2

WAYS = [*TYPES, "by hand"]
print(f"{'rows':>6}", *(f"{way:>12}" for way in WAYS))
for size, result in results.items():
    print(f"{size:>6}", *(f"{result[way].short():>12}" for way in WAYS))

print("Time divided by that of float32:")
for size, result in results.items():
    ratios = [result[way].median / result["float32"].median for way in WAYS]
    print(f"{size:>6}", *(f"{ratio:>12.3g}" for ratio in ratios))

# %% [markdown]
# Above 1 a type is slower than float32, below 1 it is faster. This is the hardware's decision. A server CPU with instructions for bfloat16 can be several times faster in it and several times slower in float16. A CPU without either can be very much slower in both, because nobody tuned what nobody should use; "by hand" then shows what good emulation costs. On a GPU with tensor cores both 16-bit types are usually far below 1. The size changes how much, the instructions decide which way; "by hand" approaches float32 as the product grows.
#
# ## A whole training step: autocast
#
# `torch.autocast` is the framework's mixed precision. Within it each operation picks its type: products run in 16 bits, and what loses too much by it stays in float32. You change neither the model nor the data.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(0)
layer, x = nn.Linear(16, 16).to(device), torch.randn(8, 16, device=device)
with torch.autocast(device, dtype=torch.bfloat16):
    h = layer(x)
    loss = F.mse_loss(h, x)
loss.backward()
for name, tensor in {
    "weight": layer.weight, "input": x, "output of the layer": h, "loss": loss,
    "gradient of the weight": layer.weight.grad,
}.items():  # fmt: skip
    print(f"{name:24}{tensor.dtype}")

# %% [markdown]
# So the weights and their gradients are float32, and the optimizer notices nothing. Which type other operations pick depends on the device: [PyTorch's documentation](https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference) has the lists.
#
# Now time and memory of a training step, for two networks of the same form. One has small layers and many samples: activations dominate. The other has large layers and few samples: weights dominate.
#
# **Predict.** 16 bits are half of 32. Which of the two networks comes near half the peak?


# %%
def network(width):
    torch.manual_seed(0)
    layers = [module for _ in range(4) for module in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(device)


def autocast(dtype):
    return torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)


def training_step(model, optimizer, x, y, dtype):
    optimizer.zero_grad()
    with autocast(dtype):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


CASES = {"many samples": (64, 1024), "large layers": (512, 16)}  # width, batch
if device == "cuda":
    CASES = {"many samples": (512, 65536), "large layers": (8192, 32)}
times, peaks = {}, {}
for case, (width, batch) in CASES.items():
    steps = {}
    for name, dtype in TYPES.items():
        model = network(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(batch, width, device=device)
        y = torch.randint(0, 10, (batch,), device=device)
        steps[name] = partial(training_step, model, optimizer, x, y, dtype)
        steps[name]()  # the meter reads a step in the middle of training
        with memory.meter(model, optimizer, x, y) as meter:
            steps[name]()
        peaks[case, name] = meter.peak
    times[case] = compare(steps, repeat=3)
    print(f"{case}: width {width}, batch {batch}")
    for name in TYPES:
        line = f"{times[case][name].short():>10} a step, peak {memory.size(peaks[case, name])}"
        print(f"    {name:10}{line}")

# %%
ratio_of_time = {c: {n: float(times[c].ratio(n, "float32")) for n in TYPES} for c in CASES}
ratio_of_peak = {c: {n: peaks[c, n] / peaks[c, "float32"] for n in TYPES} for c in CASES}

fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.6))
for ax, ratios, label in zip(
    axes, (ratio_of_time, ratio_of_peak), ("time of a step", "peak of memory"), strict=True
):
    for number, (name, hatch) in enumerate({"bfloat16": "//", "float16": ".."}.items()):
        values = [ratios[case][name] for case in CASES]
        places = np.arange(2) + 0.36 * (number - 0.5)
        bars = ax.bar(
            places, values, 0.32, label=name, hatch=hatch, edgecolor="white", color=COLOUR[name]
        )
        ax.bar_label(bars, [f"{value:.2f}×" for value in values], fontsize=9)
    ax.axhline(1, color=COLOUR["float32"], marker="", label="float32 = 1")
    ax.set_xticks(range(2), CASES)
    ax.set(xlabel="network", ylabel=f"{label} ÷ float32", xlim=(-0.5, 1.5))
    ax.margins(y=0.15)
    ax.grid(axis="x", visible=False)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
low = {case: ratio_of_peak[case]["bfloat16"] for case in CASES}
fig.suptitle(
    f"Autocast to 16 bits: {low['many samples']:.2f}× the peak with many samples, "
    f"{low['large layers']:.2f}× with large layers"
)
plots.show(
    fig,
    name="training-step-of-types",
    alt="Bars of time and peak memory of a training step in two 16-bit types, divided by float32, "
    f"for two networks. In bfloat16 the peak is {low['many samples']:.2f} of float32 where "
    f"activations dominate and {low['large layers']:.2f} where weights dominate.",
)

print("The claim: 16 bits pay only for big models. On this device:")
for case in CASES:
    for name in ("bfloat16", "float16"):
        faster = "faster" if ratio_of_time[case][name] < 1 else "slower"
        less = "less" if peaks[case, name] < peaks[case, "float32"] else "no less"
        print(f"    {case:14}{name:10}{faster}, and {less} memory, than float32")

# %% [markdown]
# The left panel need not agree with the products before: a step is more than products. Measure the step that you will run.
#
# Now the right panel. Neither network has half the peak. Where activations dominate, autocast saves a good part of it: the activations take half, but the input and the weights stay in float32. Where weights dominate it saves nothing, or takes a little *more*: weights and gradients stay in float32, and 16-bit tensors come on top. (Only a little: at the peak only one layer's 16-bit tensors are still there.) So the size of the model decides neither part of the claim. In time it is the instructions of the device; in memory it is the share of the activations, which grows with the batch.
#
# ## float16 needs a scale
#
# A network is trained to draw a digit again from 64 numbers. Say that its loss is one of several in a sum, with a weight: the smaller the weight, the smaller the gradients. float16's smallest number is 2⁻²⁴; half of it or less rounds to 0.
#
# **Predict.** The weight goes from 1 to 1/1000. Which share of the gradients becomes 0 in float16?

# %%
(x_train, y_train), (x_test, y_test) = mnist()
print(MNIST_NOTE)
pictures = torch.from_numpy(x_train)[:, None].float() / 255
small = F.avg_pool2d(pictures, 2).flatten(1).to(device)  # 14 × 14 pixels


def coder():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 196), nn.Sigmoid()
    ).to(device)  # fmt: skip


def coder_gradients(dtype, weight, scale=1.0):
    """All gradients of the first step in one tensor, and those of the network's output."""
    model, output = coder(), []
    model[2].register_full_backward_hook(lambda layer, into, out_of: output.append(out_of[0]))
    with autocast(dtype):
        loss = weight * F.mse_loss(model(small[:64]), small[:64])
    (loss * scale).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), output[0].float()


def zeros(gradients):
    """The share that is exactly 0."""
    return (gradients == 0).float().mean().item()


SCALE = 2.0**16
print(f"{'':24}{'0 among the gradients':>34}{'largest gradient of':>26}")
print(f"{'weight of the loss':24}{'float32':>10}{'float16':>24}{'the output (in float32)':>26}")
share = {}
for weight, scale in ((1, 1), (0.1, 1), (0.01, 1), (0.001, 1), (0.001, SCALE)):
    full, at_output = coder_gradients(torch.float32, weight, scale)
    half, _ = coder_gradients(torch.float16, weight, scale)
    share[weight, scale] = zeros(half)
    about = f"{weight:g}" + (", times 2^16" if scale > 1 else "")
    largest = at_output.abs().max().log2().item()
    print(f"{about:24}{zeros(full):10.1%}{share[weight, scale]:24.1%}{f'2^{largest:.1f}':>26}")

# %%
fig, ax = plt.subplots()
for scale, label, colour in ((1, "weight 1/1000", 4), (SCALE, "the same, times 2^16", 5)):
    _, gradients = coder_gradients(torch.float32, 0.001, scale)
    powers = gradients[gradients != 0].abs().log2().cpu().numpy()
    ax.hist(powers, np.arange(-44, 18), color=plots.COLOURS[colour], label=label, alpha=0.8)
ax.axvspan(-44, -25, color=COLOUR["float16"], alpha=0.2, hatch="//", linewidth=0)
ax.axvspan(16, 18, color=COLOUR["float16"], alpha=0.2, hatch="xx", linewidth=0)
top = ax.get_ylim()[1]
ax.set(xlabel="size of the gradient (power of 2)", ylabel="gradients of the output", xlim=(-44, 18))
ax.set_ylim(0, 1.35 * top)
ax.text(-43, 1.05 * top, "0 in float16", fontsize=9)
ax.text(15.5, 1.05 * top, "infinite", fontsize=9, ha="right")
fig.legend(loc="outside lower center", ncols=2)
ax.set_title("One multiplication moves the gradients into float16's range")
plots.show(
    fig,
    name="underflow",
    alt="Histograms of the gradients of the output on a scale of powers of two, with the region "
    "that float16 rounds to zero. All of them lie in it; multiplied by two to the sixteenth, "
    "practically none does.",
)

# %% [markdown]
# Some gradients are 0 in float32 too, because ink is rare: compare with that column. Down to a weight of 1/100 float16 loses a small part. At 1/1000 it loses nearly everything at once. The backward pass begins at the output, in float16 too, and there the largest gradient (in float32) has just fallen below 2⁻²⁵. What has become 0 stays 0 (a few survive because the step before rounded them up).
#
# float16 has room to the right that nobody uses. **Loss scaling** moves the gradients there: multiply the loss, and by the chain rule every gradient is multiplied. Divide before the optimizer sees them. The one danger is the other end: if a gradient becomes infinite, skip the step.


# %%
def scaled_step(model, optimizer, loss, scale):
    """One step with a fixed scale. Returns False if it had to be skipped."""
    optimizer.zero_grad()
    (loss * scale).backward()
    gradients = [p.grad for p in model.parameters()]  # float32 again: no more danger of underflow
    for gradient in gradients:
        gradient /= scale
    finite = all(gradient.isfinite().all() for gradient in gradients)
    if finite:
        optimizer.step()
    return finite


def train(step, dtype, weight=0.001):
    """Mean squared error of each step, and the numbers of the steps that were skipped."""
    model, losses, skipped = coder(), [], []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = small[torch.randint(0, len(small), (64,), generator=draw)]
        with autocast(dtype):
            error = F.mse_loss(model(batch), batch)
        if not step(model, optimizer, weight * error):
            skipped.append(number)
        losses.append(error.item())
    return losses, skipped


STEPS = 100

# %% [markdown]
# ## Break it: no scale, and too much of it
#
# The framework's tool is `torch.amp.GradScaler`. It finds the scale by itself: it starts high, halves the scale after a skipped step, and doubles it after many good ones. Here are seven runs, from the same start and with the same batches; where nothing else is said, the loss has the weight 1/1000.
#
# **Predict.** What does the loss do in float16 without a scale? What in bfloat16? What with a fixed scale of 2⁴⁰? What if GradScaler *starts* at 2⁴⁰?


# %%
scaler = torch.amp.GradScaler(device, init_scale=2.0**40, growth_interval=50)
scales = []


def with_grad_scaler(model, optimizer, loss):
    before = scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)  # divides, and skips the step if something is not finite
    scaler.update()
    scales.append(before)
    return scaler.get_scale() >= before


half = torch.float16
fixed = {scale: partial(scaled_step, scale=scale) for scale in (1, SCALE, 2.0**40)}
RUNS = {
    "float32": (fixed[1], torch.float32),
    "bfloat16": (fixed[1], torch.bfloat16),
    "float16": (fixed[1], half),
    "float16, weight 1/100": (fixed[1], half, 0.01),
    "float16, scale 2^16": (fixed[SCALE], half),
    "float16, scale 2^40": (fixed[2.0**40], half),
    "float16, GradScaler": (with_grad_scaler, half),
}
curves, skips = {}, {}
for name in tqdm(RUNS, desc="training", file=sys.stdout):
    curves[name], skips[name] = train(*RUNS[name])
for name, losses in curves.items():
    line = f"error {losses[0]:.3f} → {losses[-1]:.3f}, {len(skips[name]):3} steps skipped"
    print(f"{name:24}{line}")
print("GradScaler skipped the steps", *skips["float16, GradScaler"], end=";")
doubled = int((np.diff(scales) > 0).sum())
print(f" its scale went from 2^{np.log2(scales[0]):.0f} to 2^{np.log2(scales[-1]):.0f}", end=" ")
print(f"(doubled after 50 good steps: {doubled})")

# %%
# NBVAL_CHECK_OUTPUT
learned = {name: losses[-1] < losses[0] / 3 for name, losses in curves.items()}
for name, yes in learned.items():
    print(f"{name:24}learns: {yes}")
assert learned["float16, GradScaler"] and not learned["float16"]
assert len(skips["float16, scale 2^40"]) == STEPS, "too large a scale: every step is infinite"

# %%
fig, ax = plt.subplots()
for number, (name, losses) in enumerate(curves.items()):
    colour = COLOUR.get(name, plots.COLOURS[number])
    if name != "float16, weight 1/100":
        ax.plot(losses, label=name, markevery=(3 * number, 21), color=colour)
ax.set(xlabel="step", ylabel="mean squared error per pixel", ylim=(0, None))
ax.set_title("Loss of weight 1/1000: float16 learns only with a scale that fits")
ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plots.show(
    fig,
    name="loss-scaling",
    alt="Error against steps for six runs. float16 without a scale and with a scale of two to "
    "the fortieth stay where they were; the four others fall together, GradScaler's a few "
    "steps later.",
)

# %% [markdown]
# Without a scale nothing fails: no error, no NaN, a loss that stays where it is. That is how you meet it in practice, and the learning rate gets the blame. The test is one look: count the gradients that are exactly 0, and compare with float32, as in the table above. With a fixed scale that is too large every step is skipped; GradScaler loses the first few and then learns like float32. bfloat16 has float32's exponent and needs none of this, and float16 does not always: with a weight of 1/100 it learns without a scale. But gradients shrink during training, so use the scaler.
#
# ## Native or emulated: the case of the T4
#
# So take bfloat16 wherever there is some? Colab's free GPU, the T4, was built before bfloat16 came to NVIDIA's GPUs (its compute capability is 7.5; it came with 8.0). [`torch.cuda.is_bf16_supported()`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py) has an argument, `including_emulation=True`. For an older GPU its source asks only whether a tensor of that type can be made. It can, and one can compute with it: by **emulation**, which converts to float32 and back, as your "by hand" did. So ask with `including_emulation=False`; on a GPU where the answer is no, try float16 with a scaler. Better still, write down what the device said *and* what you measured, and decide by that: on a CPU without instructions for either, float16 is no better. This is the record of your device.


# %%
def bf16_native():
    """True, False, or None where this PyTorch cannot tell."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if not hasattr(torch.cpu, "get_capabilities"):
        return None  # an older PyTorch
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


case = "many samples"
record = {"bf16_native": bf16_native()}
if device == "cuda":
    record["capability"] = torch.cuda.get_device_capability()
    record["bf16_supported"] = torch.cuda.is_bf16_supported()
record["samples_per_s"] = {n: round(CASES[case][1] / times[case][n].median) for n in TYPES}
record["peak_mib"] = {n: round(peaks[case, n] / MiB, 1) for n in TYPES}
for key, value in record.items():
    print(f"{key:16}{value}")
fastest = max(TYPES, key=record["samples_per_s"].get)
least = min(record["peak_mib"].values())
smallest = [name for name in TYPES if record["peak_mib"][name] == least]
print(f"fastest here: {fastest}; least memory: {' and '.join(smallest)}")

# %% [markdown]
# If the two answers differ, memory has a price in time on your device. The next ways to save memory have one too, and leave every number in float32.
#
# ## Compute twice, keep less
#
# **Activation checkpointing** cuts the network into **segments** and keeps only the input of each. In the backward pass it runs one segment forward again, to have the activations when they are needed.
#
# Here is a chain of 16 layers with activations of the same size. With k segments, k inputs stay, and the activations of one segment, 16/k of them, come on top.
#
# **Predict.** For which k is k + 16/k smallest? How much longer does a step take if everything is computed forward twice? (The backward pass has about twice the multiplications of the forward pass.)

# %%
LAYERS, WIDTH, BATCH = 16, 128, 2048
if device == "cuda":
    WIDTH, BATCH = 1024, 16384
ONE = 4 * WIDTH * BATCH  # bytes of one activation
torch.manual_seed(0)
blocks = nn.Sequential(
    *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
).to(device)
x = torch.randn(BATCH, WIDTH, device=device)


def forward(blocks, x, segments):
    """The chain in so many segments; 0: without checkpointing."""
    if segments == 0:
        return blocks(x)
    length = LAYERS // segments
    for start in range(0, LAYERS, length):
        x = checkpoint(blocks[start : start + length], x, use_reentrant=False)
    return x


def backward(segments):
    blocks.zero_grad()
    forward(blocks, x, segments).mean().backward()


def gradients_of(fn):
    blocks.zero_grad()
    fn()
    return torch.cat([p.grad.flatten() for p in blocks.parameters()])


# %% [markdown]
# First the result: is it the same gradient? And how often does each layer really run forward?

# %%
# NBVAL_CHECK_OUTPUT
runs = 0


def count(*_):
    global runs
    runs += 1


handles = [block.register_forward_pre_hook(count) for block in blocks]
plain = gradients_of(partial(backward, 0))
print(f"without checkpointing: {runs} layers run forward")
for segments in (1, 4, 16):
    runs = 0
    difference = (gradients_of(partial(backward, segments)) - plain).abs().max().item()
    same = difference == 0 if device == "cpu" else difference < 1e-6
    print(f"{segments:2} segments: {runs} layers run forward, gradients the same: {same}")
    assert same
for handle in handles:
    handle.remove()

# %% [markdown]
# On a CPU the gradients are equal to the last bit: the same operations run in the same order, only some of them twice. (A GPU may sum in another order; there the cell allows 10⁻⁶.)

# %%
SEGMENTS = [1, 2, 4, 8, 16]
peak_of = {}
for segments in (0, *SEGMENTS):
    blocks.zero_grad()
    with memory.meter(blocks, x) as meter:
        backward(segments)
    peak_of[segments] = meter.peak / ONE
ways = {str(k): partial(backward, k) for k in (0, *SEGMENTS)}
timings = compare(ways | {"forward": lambda: forward(blocks, x, 0)}, repeat=7)
slower = {k: float(timings.ratio(str(k), "0")) for k in SEGMENTS}

print(f"one activation: {memory.size(ONE)}; peaks in activations")
print(f"{'segments':>10}{'k + 16/k':>10}{'peak':>8}{'time':>8}")
print(f"{'none':>10}{'':>10}{peak_of[0]:8.1f}{'1.00×':>8}")
for k in SEGMENTS:
    print(f"{k:>10}{k + LAYERS / k:10g}{peak_of[k]:8.1f}{slower[k]:7.2f}×")
best = min(SEGMENTS, key=peak_of.get)
assert best == LAYERS**0.5
part = float(timings.ratio("forward", "0"))
print(f"the forward pass alone takes {part:.2f} of a step, so twice would make {1 + part:.2f}×")

# %%
shift = peak_of[best] - (best + LAYERS / best)  # explained below the figure
fine = np.linspace(1, 16, 100)
fig, ax = plt.subplots(figsize=(7, 3.5))
ax.plot(SEGMENTS, [peak_of[k] for k in SEGMENTS], label="measured", color=plots.COLOURS[3])
curve = f"k + 16/k + {shift:.1f}"
ax.plot(fine, fine + LAYERS / fine + shift, marker="", label=curve, color="black")
ax.axhline(peak_of[0], color="black", linestyle=":", marker="")
ax.text(1, peak_of[0] * 1.02, "without checkpointing", fontsize=9)
ax.set_xscale("log", base=2)
ax.set_xticks(SEGMENTS, SEGMENTS)
ax.set(xlabel="segments", ylabel="peak (activations of one layer)", ylim=(0, 1.15 * peak_of[0]))
ax.legend(loc="lower right")
ax.set_title(f"{best} segments need {peak_of[best] / peak_of[0]:.2f} of the memory")
plots.show(
    fig,
    name="segments",
    alt="Peak memory against the number of segments. It has its minimum, "
    f"{peak_of[best]:.1f} activations where {peak_of[0]:.1f} are needed without checkpointing, at "
    f"{best} segments, and follows k + 16/k plus a constant.",
)

# %% [markdown]
# The sum k + n/k is smallest at k = √n. So a chain of n equal layers needs memory like √n instead of n, for one more forward pass ([Chen and others, 2016](https://arxiv.org/abs/1604.06174)). What comes on top is the same for every k: the weights, which happen to take as much as one activation here, and probably two gradients on their way through a layer. At the two ends nothing is saved: one segment drops everything and then needs everything at once, and 16 segments keep every input.
#
# By multiplications alone a step would take 4/3 of the time; the line below the table makes the estimate from a measured forward pass instead. What the table shows beyond that is what checkpointing itself costs on your device. The recomputation is the same for every k, as you counted, but each segment adds some overhead. Real layers differ in size: exercise 17 asks you to cut such a network.
#
# ### Dropout, twice
#
# A segment with dropout draws random numbers. If it draws others the second time, the gradient belongs to another network. [`checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html) saves the state of the random generator and sets it back, unless you forbid it.

# %%
# NBVAL_CHECK_OUTPUT
noisy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.ReLU()).to(device)


def noisy_gradient(run):
    torch.manual_seed(1)  # the same dropout in all of them
    noisy.zero_grad()
    run().square().mean().backward()
    return noisy[0].weight.grad.clone()


want = noisy_gradient(lambda: noisy(x))
for keep in (True, False):
    options = {"use_reentrant": False, "preserve_rng_state": keep}
    got = noisy_gradient(lambda options=options: checkpoint(noisy, x, **options))
    error = ((got - want).norm() / want.norm()).item()
    print(f"preserve_rng_state={keep}: gradient right: {error < 1e-6}")
    assert (error < 1e-6) == keep

# %% [markdown]
# `preserve_rng_state=False` is right only where nothing is drawn. It raises no error: the gradient is wrong, and you will not be told.
#
# ## Train only the head
#
# The notes of 2021 advise: *on Colab nothing too large, prefer pretrained models*. A pretrained model is one that somebody trained on much data. You keep its body, the **backbone**, **freeze** it (its weights get no gradient), and train a small **head** for your own few samples. Without a gradient there is nothing to keep: no activations of the backbone, no gradients, no optimizer state.
#
# There is no network here to download one, and random weights are not pretrained. So you pretrain a backbone yourself, on eight of the ten digits. The new job is to tell the other two apart, 8 from 9, with five pictures of each. And once more with 4, 7 and 9 as the new digits. Four ways:
#
# | way | backbone | what is trained |
# |---|---|---|
# | head only | pretrained, frozen | the head |
# | all, from pretrained | pretrained | everything |
# | all, from scratch | random | everything |
# | head on random | random, frozen | the head: the control |
#
# **Predict.** Order the four by accuracy, then by memory.


# %%
images = pictures.to(device)
labels = torch.from_numpy(y_train).long().to(device)
test_images = (torch.from_numpy(x_test)[:, None].float() / 255).to(device)
test_labels = torch.from_numpy(y_test).long().to(device)


def make_backbone():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(),
    ).to(device)  # fmt: skip


def fit(model, parameters, x, y, steps, lr, batch=64):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (min(batch, len(x)),), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()


def accuracy(model, x, y):
    with torch.inference_mode():
        return (model(x).argmax(1) == y).float().mean().item()


def pretrain(new):
    """A backbone that has seen all digits but the new ones."""
    torch.manual_seed(0)
    seen = torch.tensor([digit not in new for digit in range(10)], device=device)
    backbone = make_backbone()
    model = nn.Sequential(backbone, nn.Linear(128, 10).to(device))
    fit(model, model.parameters(), images[seen[labels]], labels[seen[labels]], 200, 1e-3)
    return backbone


# %%
FOUR = {  # pretrained?, frozen?
    "head only": (True, True),
    "all, from pretrained": (True, False),
    "all, from scratch": (False, False),
    "head on random": (False, True),
}


def new_job(backbone, new, way, seed):
    """Accuracy, peak in MiB and seconds for one way to learn the new digits from five each."""
    pretrained, frozen = FOUR[way]
    torch.manual_seed(seed)
    digits = torch.tensor(new, device=device)
    order = torch.randperm(len(labels)).to(device)
    few = torch.cat([order[labels[order] == digit][:5] for digit in new])
    body = copy.deepcopy(backbone) if pretrained else make_backbone()
    body.requires_grad_(not frozen)
    model = nn.Sequential(body, nn.Linear(128, len(new)).to(device))
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = 1e-2 if frozen else 1e-3  # a head alone can take longer strides
    target = torch.searchsorted(digits, labels[few])  # 8 and 9 become 0 and 1
    job = partial(fit, model, trained, images[few], target, lr=lr)
    timing = measure(partial(job, steps=30), repeat=1, warmup=0)
    is_new = torch.isin(test_labels, digits)
    target = torch.searchsorted(digits, test_labels[is_new])
    right = accuracy(model, test_images[is_new], target)
    model.zero_grad()
    with memory.meter(model) as meter:
        job(steps=1)
    return right, meter.peak / MiB, timing.median


JOBS, DRAWS = [(8, 9), (4, 7, 9)], 9
PAIRS = [
    ("head only", "all, from pretrained"),
    ("head only", "head on random"),
    ("all, from pretrained", "all, from scratch"),
]
outcome = {}
for new in tqdm(JOBS, desc="new jobs", file=sys.stdout):
    backbone = pretrain(new)
    for way in FOUR:
        outcome[new, way] = np.array([new_job(backbone, new, way, s) for s in range(DRAWS)])
spread = {key: np.quantile(runs[:, 0], [0.25, 0.5, 0.75]) for key, runs in outcome.items()}
cost = {key: np.median(runs[:, 1:], axis=0) for key, runs in outcome.items()}
print(f"medians of {DRAWS} draws, and the middle half of the accuracies")
for new in JOBS:
    print(f"new digits {new}, 5 pictures of each; guessing is right in {1 / len(new):.0%}")
    for way in FOUR:
        (low, middle, high), (peak, seconds) = spread[new, way], cost[new, way]
        line = f"accuracy {middle:.0%} ({low:.0%} to {high:.0%}), peak {peak:.2f} MiB"
        print(f"    {way:22}{line}, {seconds:.2f} s")
    for one, other in PAIRS:
        better = (outcome[new, one][:, 0] > outcome[new, other][:, 0]).sum()
        print(f"    {one} better than {other} in {better} of {DRAWS} draws")
    assert cost[new, "head only"][0] < cost[new, "all, from pretrained"][0] / 2

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 2.8), sharex=True, sharey=True)
gains = []
for ax, new in zip(axes, JOBS, strict=True):
    for row, (way, marker) in enumerate(zip(FOUR, "os^D", strict=True)):
        low, middle, high = 100 * spread[new, way]
        error, colour = [[middle - low], [high - middle]], plots.COLOURS[3 + row]
        ax.errorbar(middle, row, xerr=error, fmt=marker, capsize=4, color=colour)
    ax.set_title("new digits " + ", ".join(map(str, new)), fontsize=11, weight="normal")
    ax.set(xlabel="accuracy (%): median, middle half", ylim=(3.5, -0.5))
    percent = {way: round(100 * spread[new, way][1]) for way in FOUR}
    gains.append(percent.pop("head only") - max(percent.values()))
axes[0].set_yticks(range(4), [f"{way}\n{cost[JOBS[0], way][0]:.1f} MiB" for way in FOUR])
axes[0].set_ylabel("way, and its peak")
head, everything = (cost[JOBS[0], way][0] for way in ("head only", "all, from pretrained"))
fig.suptitle(
    f"The head alone: {head / everything:.2f} of the memory; accuracy {gains[0]:+} and "
    f"{gains[1]:+} points against the best of the others"
)
plots.show(
    fig,
    name="frozen-backbone",
    alt="Median and middle half of the accuracy of four ways to learn new digits, in two panels. "
    f"Training the head alone takes {head:.1f} MiB where training all takes {everything:.1f}. Its "
    f"median is {gains[0]:+} points from the best of the other ways for 8 and 9, and "
    f"{gains[1]:+} points for 4, 7 and 9.",
)

# %% [markdown]
# Certain is the gain in memory, and in time: both follow from what need not be kept and computed. The accuracy depends on the job. Each draw gives the four ways the same pictures, so compare draw by draw: 9 or 0 of 9 is clear, 6 or 7 may be chance. In the run stored here the head alone keeps up with training everything for 8 and 9, and loses every draw for 4, 7 and 9. Whether pretraining helps a network of which everything is trained, so few draws do not show. Why one job goes well and the other does not, these cells cannot tell: the digits differ, their number too, and so do the learning rates. So try the head first, because it costs least, and believe it only after a comparison with training everything, on your job, over several draws.
#
# ## Offload: keep activations elsewhere
#
# The last way keeps every activation, but not on the device: `torch.autograd.graph.save_on_cpu()` carries each one to the computer's memory and back. It is built on a pair of **hooks**: `pack` is called when the forward pass keeps a tensor, `unpack` when the backward pass wants it. A pack that only counts shows what would travel.

# %%
# NBVAL_CHECK_OUTPUT
weights = {p.untyped_storage().data_ptr() for p in blocks.parameters()}
kept = {}


def pack(tensor):
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in weights:  # weights are there anyway
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor


with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
    output = blocks(x)
print(f"{len(kept)} tensors, {sum(kept.values()) / ONE:g} activations: the input, and one a layer")
del output

# %% [markdown]
# And this moves them. On a GPU the peak falls, and the time rises by what the link between GPU and computer takes. On a CPU there is nowhere to go.

# %%
moving = torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")
for name, hooks in {"on the device": nullcontext(), "in main memory": moving}.items():
    blocks.zero_grad()
    with memory.meter(blocks, x) as meter, hooks:
        backward(0)
    print(f"{name:15} peak {meter.peak / ONE:.3g} activations")
print("x.cpu() is x itself, nothing moves:", x.cpu() is x)

# %% [markdown]
# ## Two devices: gradients in half the bytes
#
# 16 bits also halve a message. In data-parallel training each rank has its own part of the batch, and an **all-reduce** sums the gradients of all ranks. Here each gradient is rounded to the type of the *wire* before it travels, and everything else stays float32.
#
# **Predict.** bfloat16 has 8 significant bits (7 and the one that is not stored), float16 has 11. How large is the error of the averaged gradient, relative to its length? Does training notice?


# %%
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def classifier():
    torch.manual_seed(0)
    layers = nn.Linear(196, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers).to(my_device())


def loss_of_step(model, x, y, step, rank, ranks):
    """The loss on this rank's share of a global batch of 64."""
    chosen = torch.randint(0, len(x), (64,), generator=torch.Generator().manual_seed(step))
    mine = chosen[rank::ranks]
    return F.cross_entropy(model(x[mine].to(my_device())), y[mine].to(my_device()))


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).cpu()


def data_parallel(x, y, wire, steps):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, losses, sent, seconds = classifier(), [], 0, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_step(model, x, y, step, rank, ranks)
        loss.backward()
        dist.barrier()  # the clock measures the message, not the wait for the other rank
        start = time.perf_counter()
        for p in model.parameters():
            message = (p.grad / ranks).to(wire)
            dist.all_reduce(message)
            p.grad.copy_(message)
            sent += message.nbytes
        p.grad.sum().item()  # now it is done, also on a GPU
        seconds.append(time.perf_counter() - start)
        if step == 0:
            first = flat_gradient(model)
        optimizer.step()
        losses.append(loss.item())
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    return {"losses": losses, "bytes": sent // steps, "seconds": np.median(seconds),
            "gradient": first.numpy(), "checksum": checksum}  # fmt: skip


digits, classes = small.cpu(), torch.from_numpy(y_train).long()
wires = {
    name: launch(data_parallel, 2, digits, classes, dtype, 40) for name, dtype in TYPES.items()
}

model = classifier()  # one device, the whole batch: what the two must agree with
loss_of_step(model, digits, classes, step=0, rank=0, ranks=1).backward()
alone = flat_gradient(model).numpy()
errors = {
    name: float(np.linalg.norm(ranks[0]["gradient"] - alone) / np.linalg.norm(alone))
    for name, ranks in wires.items()
}
print(f"{'on the wire':12}{'bytes a step':>14}{'all-reduce':>13}{'error':>10}{'loss after 40':>15}")
for name, (one, two) in wires.items():
    ms, loss = 1000 * one["seconds"], (one["losses"][-1] + two["losses"][-1]) / 2
    print(f"{name:12}{one['bytes']:14,}{ms:10.2f} ms{errors[name]:10.1e}{loss:15.3f}")
seconds = {name: one["seconds"] for name, (one, two) in wires.items()}
for name in ("bfloat16", "float16"):
    part = seconds[name] / seconds["float32"]
    print(f"{name}: half the bytes in {part:.2f} of the time of float32")

# %%
# NBVAL_CHECK_OUTPUT
for name, (one, two) in wires.items():
    part = one["bytes"] / wires["float32"][0]["bytes"]
    print(f"{name:10}{part:4g} of the bytes; ", end="")
    print(f"same weights on both ranks: {one['checksum'] == two['checksum']}")
print("float32 equals one device within 1e-5:", errors["float32"] < 1e-5)
print(
    "bfloat16 within one step of its digits:", errors["bfloat16"] < torch.finfo(torch.bfloat16).eps
)

# %% [markdown]
# In float32 the two devices agree with one up to the order of additions, which a GPU may choose differently from a core: hence 10⁻⁵ and not 0. In bfloat16: half the bytes, an error below one step of bfloat16's digits, and a loss that hardly knows the difference. Whether the *time* falls too is again the device's decision: the last two lines say whether it did on yours.
#
# float16 has the smaller error: it has more digits, and these gradients lie in its range. Where they do not, it makes zeros or infinities, as above; bfloat16 only loses digits.
#
# In DistributedDataParallel (DDP) you need no such loop. `model.register_comm_hook(None, hook)` replaces the all-reduce by a function of yours, a **communication hook**, and [`bf16_compress_hook`](https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html) is one ready made. It asks for NVIDIA's library for messages between GPUs (NCCL) and raises a `TypeError` on cores; `fp16_compress_hook` runs there too.

# %% [markdown]
# ## What a real GPU does differently
#
# - **Speed.** Tensor cores multiply float16 and, from compute capability 8.0 on, bfloat16. From there on float32 can use them too, with shorter digits: `torch.set_float32_matmul_precision("high")` allows **TF32**. A comparison must say which float32 it means.
# - **Size.** A GPU is fast only if it is full: small products gain nothing from any type.
# - **Memory.** The allocator rounds and keeps what was freed; the peak of the tensors is what this lesson compares.
# - **Offload** moves real bytes over a real link; `pin_memory=True` lets it overlap with computing.
#
# ## Then → now
#
# Older tutorials do not say `torch.autocast` and `use_reentrant=False`. Here is what becomes of their lines.

# %% then="torch.cuda.amp.autocast(), torch.cuda.amp.GradScaler()" now="torch.autocast(device), torch.amp.GradScaler(device)" since="PyTorch 2.4"
# NBVAL_CHECK_OUTPUT
amp = {
    "then": (torch.cuda.amp.autocast, torch.cuda.amp.GradScaler),
    "now": (partial(torch.autocast, device), partial(torch.amp.GradScaler, device)),
}
for when, makers in amp.items():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for make in makers:
            make(enabled=False)
    said = [str(w.message).split(". ")[0] for w in heard] or ["no warning"]
    print(f"{when}:", *said, sep="\n  ")

# %% then="checkpoint(function, x)" now="checkpoint(function, x, use_reentrant=False)" since="PyTorch 2.1: the old way warns"
# NBVAL_CHECK_OUTPUT
layer, pixels = nn.Linear(4, 4), torch.ones(1, 4)  # an input needs no gradient, the weights do
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    then = checkpoint(layer, pixels)
now = checkpoint(layer, pixels, use_reentrant=False)
print(f"then: {len(heard)} warnings; the weights get a gradient: {then.requires_grad}")
print(f"now:  the weights get a gradient: {now.requires_grad}")
assert heard and not then.requires_grad and now.requires_grad

# %% [markdown]
# The old `checkpoint` on the first layer of a network trains without that layer, and only a warning says so. Two more: `model.half()`, or NVIDIA's Apex, made the weights 16-bit; `torch.autocast` leaves them in float32. And torchvision's `resnet18(pretrained=True)` did not say which weights; `resnet18(weights="DEFAULT")` does.
#
# ## Exercise
#
# [Exercise 17](../exercises/17_precision_and_recompute.ipynb): scale a loss by hand, cut a network of unequal layers into segments, and pick a precision from the record of a device. About 30 minutes.
#
# ## Recap
#
# Whether 16 bits are faster is decided by the device, and whether they save memory by the share of the activations: measure both. Small gradients need a scale in float16 and none in bfloat16. Recomputing about √n segments buys memory with one more forward pass. A frozen backbone buys it with accuracy on some jobs, and with nothing on others: compare.
#
# 1. Your float16 run neither diverges nor learns. What do you look at first?
# 2. A chain has 100 equal layers. How many segments, and how much of the activations' memory is left at the peak?
# 3. You switch on autocast, and the peak rises. How can that be?
#
# <details><summary>Answers</summary>
#
# 1. How many gradients are exactly 0: they underflow if the loss is not scaled. Then whether steps are skipped, because the scale is too large.
# 2. 10 segments; 10 inputs and 10 activations of one segment, so about a fifth.
# 3. Weights dominate, not activations: they and their gradients stay in float32, and the 16-bit tensors of one layer come on top.
#
# </details>
#
# Go on with [exercise 17](../exercises/17_precision_and_recompute.ipynb).
