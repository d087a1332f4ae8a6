# ---
# jupyter:
#   course:
#     rows: [O8]
#     minutes: {read: 25, do: 15}
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
# After this lesson you can say before training how much memory a model will take and for what, weigh it while it trains, and tell apart the numbers that are called "memory".
#
# *This lesson can be read alone. It uses `launch(function, 2)`, which runs a function in two processes with a device each ([lesson 00](00_start_here.ipynb)), and DDP, which gives every process a copy of the model.*
#
# | | |
# |---|---|
# | **Time** | 25 minutes to read, 15 to predict and run |
# | **You should know** | a PyTorch training step: forward, backward, optimizer; ranks and `launch` ([lesson 00](00_start_here.ipynb)) |
# | **You will** | weigh parameters, gradients, optimizer state and activations · find a shape error before training, and see where summaries are wrong · predict a model that does not fit · weigh two ranks |
# | **Runs on** | no GPU: a meter counts tensors · a GPU: totals and peaks come from CUDA's allocator |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import contextlib
import io
import tempfile
import weakref
from pathlib import Path

import torch
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
# A tensor is a view of a **storage**. The storage has the bytes, and lives as long as any tensor looks at it.
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
# Two storages, not four. A view costs nothing, as long as its storage is needed anyway.
#
# **Predict.** You delete `a` and `b`. Only `c` still looks at the large storage, at 1 % of it. How many bytes are freed?

# %%
# NBVAL_CHECK_OUTPUT
large = weakref.ref(a.untyped_storage())  # looks without keeping alive
del a, b
print("after del a, b: freed is", large() is None)
c = c.clone()  # a storage of its own
print("after c.clone(): freed is", large() is None)

# %% [markdown]
# The slice held everything until it had its own.
#
# ## Open the meter
#
# PyTorch asks a **dispatch mode** at every operation. This one adds the storages that are new, and a weak reference to each calls back when it goes. That is most of what the course's meter, `memory.Budget`, does.


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
        key, size = storage._cdata, storage.nbytes()  # _cdata: its identity, even without data
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
        adam.zero_grad()
        net(torch.ones(64, 100)).square().mean().backward()
        adam.step()

print("live, ours and the course's:", ours.live, budget.live)
print("peak, ours and the course's:", ours.peak, budget.peak)
assert (ours.live, ours.peak) == (budget.live, budget.peak)

# %% [markdown]
# The same to the byte. `memory.Budget` also knows tensors that existed before, sorts storages by **kind**, and can have a limit. `memory.meter(...)` takes it on a CPU, and on a GPU a meter that asks CUDA's allocator.
#
# ## Round 1: what a model holds
#
# Here is a small classifier. It has $784 · 512 + 512 + 512 · 10 + 10$ parameters, of 4 bytes each (float32).
#
# **Predict**, by pencil: how many bytes do the parameters take? Their gradients? And Adam's state, which for each parameter has a running mean of the gradient and one of its square?


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
# Right, except for the last number: for each of the four parameter tensors Adam also counts its steps, in 4 bytes. So a model in training with Adam holds four times its parameters, whatever the batch.
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

# %% [markdown]
# The state is **lazy**: a program that has survived forward and backward once may still have its largest moment before it.
#
# ## Round 2: what a batch adds
#
# **Activations** are results of the forward pass that are kept for the backward pass. The meter cannot know what backward will need. It counts as activations what an operation returns on something that needs gradients, and as *other* what it cannot name, such as the batch.
#
# Here is an image classifier of a tutorial that this course grew from.
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
    adam.zero_grad()
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

assert all(between[1][kind] == between[8][kind] for kind in kinds[:3])
assert between[8]["activations"] == 0  # left after the step

# %% [markdown]
# Only activations, weighed after forward, grow with the batch. The rest, weighed after the step, is a fixed price; by then no activation is left.
#
# ### Who keeps what?
#
# Autograd calls a hook for every tensor that it keeps.
#
# **Predict.** Convolution, ReLU and pooling each return a new tensor. Which of these does autograd keep?

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
    return tensor  # autograd keeps what the hook returns


y = x
with saved_tensors_hooks(show, lambda tensor: tensor):
    for name, layer in zip(["convolution", "ReLU", "pooling"], cnn[:3], strict=True):
        print(name, "keeps")
        y = layer(y)

# %% [markdown]
# The convolution needs its input and its weight. ReLU needs its own result. The pooling needs its input, which is ReLU's result once more, and the places of the winners, in whole numbers of 8 bytes. The convolution's result is needed by nobody, and gone: what layers return is not what training keeps. Does the meter, by its own rules, come to the same sum?

# %%
# NBVAL_CHECK_OUTPUT
kept = {}
anyway = {t.untyped_storage().data_ptr() for t in [x, *cnn.parameters()]}


def note(tensor):
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in anyway:
        kept[storage.data_ptr()] = storage.nbytes()
    return tensor


del y  # it keeps the graph of the cell above
with memory.meter(cnn, x) as meter, saved_tensors_hooks(note, lambda tensor: tensor):
    loss = cnn(x).square().mean()
    activations = meter.by_kind()["activations"]
print(
    "the meter's activations, less what autograd keeps:", activations - sum(kept.values()), "bytes"
)
del loss

# %% [markdown]
# They agree, but for the loss itself. (What is computed from the batch alone, such as a normalised input, the meter files under *other*.)
#
# ### Two steps, moment by moment
#
# **Predict.** Draw the curve of the first two steps: where does it rise, where does it fall, and is the second step as high as the first?

# %%
cnn = make_cnn()
adam = torch.optim.Adam(cnn.parameters(), lr=1e-4)
peaks = {}
with memory.meter(cnn, adam, x, record=True) as meter:

    def phase(name, work):
        meter.mark(name)
        meter.reset()
        result = work()
        peaks[name] = meter.peak
        return result

    for step in (1, 2):
        loss = phase(f"forward {step}", lambda: cnn(x).square().mean())
        phase(f"backward {step}", loss.backward)
        phase(f"step {step}", adam.step)
        adam.zero_grad()
        del loss

plots.show(
    meter.figure(),
    name="two-steps-of-adam",
    alt="Memory during two training steps, change by change, stacked by kind. Activations climb in "
    "forward and fall in backward while gradients rise; the optimizer state appears in the first "
    f"step. Peaks: {', '.join(f'{name} {memory.size(peak)}' for name, peak in peaks.items())}.",
)
for name, peak in peaks.items():
    print(f"{name:12}{memory.size(peak):>10} at the peak")
assert peaks["backward 2"] > peaks["backward 1"]

# %% [markdown]
# In forward, activations climb. In backward they fall, while gradients rise; the gradients of activations come and go (*other*, on top of the batch). In its step Adam makes its state, and temporary tensors. The second step climbs on top of that state: a program may run out of memory only there. (The meter files the temporaries under optimizer state; a fresh weight gradient is *other* until it is stored.)
#
# So every step has **two peaks**: one in backward, which grows with the batch, and one in the optimizer, which does not. With a small batch and many parameters the second is higher: four times the parameters, and Adam's temporaries. On a CPU these are twice the largest parameter tensor: here half as much again.
#
# ## Round 3: summaries, and shape errors before training
#
# Notes of a bootcamp that this course grew from recommend `torchsummary` against shape errors. It lets two random samples run and prints a line for each layer. Here it looks at an **auto-encoder**, which squeezes an image and draws it again. ("MB" is MiB.)


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

# %% [markdown]
# The last shape is that of the image, as it must be. The total size counts every layer's output twice ("for gradients"), but has no gradients of parameters and no optimizer state: read shapes from this table, not memory.
#
# Now the CNN, with the classic mistake where the first `Linear` begins. Somebody counted as if every 3 × 3 convolution kept the size, and wrote 9 · 9 · 128.
#
# **Predict.** What is the right number, and who will tell you: an error message, or the summary of a part?


# %%
# NBVAL_CHECK_OUTPUT
def printed(model, shape):
    """The lines that torchsummary prints; it returns nothing."""
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        torchsummary.summary(model, shape, device=device)
    return screen.getvalue().splitlines()


broken = make_cnn()
broken[14] = nn.Linear(9 * 9 * 128, 512).to(device)
try:
    printed(broken, (3, 150, 150))
except RuntimeError as error:
    print("torchsummary:", error)
else:
    raise AssertionError("the shape error was not found")
try:
    torchinfo.summary(broken, input_size=(2, 3, 150, 150), verbose=0, device=device)
except RuntimeError as error:
    print("torchinfo:", str(error).replace(": [", ":\n  ["))
else:
    raise AssertionError("the shape error was not found")

print("the part before the broken layer:")
print("\n".join(printed(broken[:14], (3, 150, 150))[14:17]))

# %% [markdown]
# Both, and before any training: 6272 stands in the message; the summary shows that it is 7 · 7 · 128. `torchsummary` passes PyTorch's message on, which names no layer. `torchinfo`, the tool of today, names the layers that ran.
#
# ### Where the summary is wrong
#
# `torchsummary` is of 2018. It adds up `weight` and `bias` of every layer, each time the layer runs.
#
# **Predict.** What will it print for a layer that is used twice, a parameter that belongs to no layer, and an LSTM?


# %% then="torchsummary.summary(model, size)" now="torchinfo.summary(model, input_size=...)" since="torchsummary 1.5.1 (2018) was the last"
# NBVAL_CHECK_OUTPUT
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


cases = {
    "a layer used twice": (UsedTwice(), (8,)),
    "a bare parameter": (BareParameter(), (4,)),
    "an LSTM": (nn.Sequential(nn.LSTM(8, 8)), (5, 8)),
}
print(f"{'':20}{'true':>6}{'torchinfo':>11}   torchsummary")
for name, (model, shape) in cases.items():
    true = sum(p.numel() for p in model.to(device).parameters())
    info = torchinfo.summary(model, input_size=(2, *shape), verbose=0, device=device)
    try:
        (old,) = [line for line in printed(model, shape) if line.startswith("Total params")]
    except AttributeError as error:
        old = f"AttributeError: {error}"
    print(f"{name:20}{true:6}{info.total_params:11}   {old}")

# %% [markdown]
# A shared layer counts twice, a bare parameter not at all, and a nested tuple, as an LSTM returns it, ends in an error that does not speak of your model. `torchinfo` counts right, and so does `sum(p.numel() for p in model.parameters())`.
#
# ## Round 4: tensors are not the process
#
# Your system monitor shows another number: the **resident set size** (RSS), the memory that the system has really given to the process. Here a fresh process reads both.
#
# **Predict.** `torch.empty` makes a tensor of 256 MiB and writes nothing into it. What do the meter and the system say? And after 20 000 small tensors were made and deleted?


# %%
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
        loss = model(x).square().mean()
        weigh("CNN: after forward")
        loss.backward()
        del model, x, loss
        weigh("CNN: all deleted")
        large = torch.empty(64 * 2**20)
        weigh("empty, 256 MiB")
        large.fill_(1)
        weigh("filled")
        del large
        weigh("deleted")
        small = [torch.ones(1024) for _ in range(20_000)]
        weigh("20 000 tensors of 4 KiB")
        del small
        weigh("deleted again")
    return start, rows


((start, rows),) = launch(two_scales, 1)
print(f"{'':26}{'tensors (meter)':>16}{'process (RSS)':>18}")
print(f"{'Python and its libraries':26}{'0 bytes':>16}{memory.size(start):>18}")
for moment, tensors, grown in rows:
    print(f"{moment:26}{memory.size(tensors):>16}{'+' + memory.size(grown):>18}")
counted = {moment: tensors for moment, tensors, _ in rows}
assert counted["empty, 256 MiB"] == 256 * MiB and counted["deleted again"] == 0

# %% [markdown]
# Four reasons for two numbers:
#
# 1. **Code.** Python, PyTorch and their libraries are in the process, and are no tensors.
# 2. **Promises.** The system gives memory when it is first written, not when it is asked for.
# 3. **Retention.** A very large block usually goes back to the system as soon as it is deleted. Smaller ones the C library may keep for the next request: part of the small tensors lie where the CNN's were. How much depends on the system.
# 4. **Workspaces.** Kernels take memory for themselves, such as a reordered copy of a weight. No tensor looks at it, and no row of the table shows it alone.
#
# So a limit on tensors is not a limit on the process. On a CPU the course's meter counts tensors.
#
# ### On a GPU: allocated, reserved, driver
#
# There are three. **Allocated**: tensors, and workspaces that libraries take through PyTorch, in blocks of 512 bytes. **Reserved**: what PyTorch's caching allocator has taken from the driver and keeps for the next request; never less than allocated. **Driver**: what `nvidia-smi` shows, which adds the CUDA context, libraries, and other processes. "My GPU is full although I deleted everything" is usually a look at the third number, or the second. `memory.release()` gives blocks that are reserved and unused back to the driver.
#
# PyTorch's **memory snapshot** also records who asked for every block. Drop the file on [PyTorch's memory viewer](https://pytorch.org/memory_viz), which uploads nothing and draws a timeline.

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
# `memory.Fake` runs the same steps on tensors that have a shape and no numbers. That costs no memory, and is a **prediction**. Can you trust it?


# %%
def two_steps(make, shape, meter):
    """What the second step of Adam holds and reaches, in bytes."""
    with meter:
        model = make()
        adam = torch.optim.Adam(model.parameters())
        meter.track(model, adam)
        x = torch.rand(shape)
        for _ in range(2):
            adam.zero_grad()
            meter.reset()
            loss = model(x).square().mean()
            activations = meter.by_kind()["activations"]
            loss.backward()
            peak = meter.peak
            del loss
            meter.reset()
            adam.step()
    held = meter.by_kind() | {"activations": activations}
    return held | {"peak before the optimizer": peak, "peak in the optimizer": meter.peak}


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 64, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0]


for name, make, shape in [
    ("CNN", lambda: make_cnn("cpu"), (4, 3, 150, 150)),
    ("LSTM", Sequences, (32, 24, 16)),
]:
    fake = two_steps(make, shape, memory.Fake(device="cpu"))["peak before the optimizer"]
    real = two_steps(make, shape, memory.Budget(device="cpu"))["peak before the optimizer"]
    print(f"{name:5} peak predicted {memory.size(fake):>9}, measured {memory.size(real):>9}")
    assert name != "CNN" or abs(fake / real - 1) < 0.01

# %% [markdown]
# If the LSTM's two numbers differ: PyTorch's LSTM kernel for some CPUs returns a workspace that backward needs, and its fake twin says that it has 0 bytes. A prediction is as good as what operations say of themselves.
#
# Now a transformer with about 6.4 billion parameters: 32 blocks, 4096 wide. One sample of 2048 tokens, Adam, float32.
#
# **Predict.** How many GiB does training need? Does this machine have them?


# %%
# NBVAL_CHECK_OUTPUT
def make_giant():
    block = {"d_model": 4096, "nhead": 32, "dim_feedforward": 16384}
    how = {"batch_first": True, "norm_first": True, "dropout": 0, "activation": "gelu"}
    return nn.Sequential(*[nn.TransformerEncoderLayer(**block, **how) for _ in range(32)])


giant = two_steps(make_giant, (1, 2048, 4096), memory.Fake(device="cpu"))
for kind in [*kinds, "peak before the optimizer", "peak in the optimizer"]:
    print(f"{kind:26}{giant[kind] / GiB:8.1f} GiB")

# %%
need = max(giant["peak before the optimizer"], giant["peak in the optimizer"])
for has in (machine.cpu, *machine.gpus):
    if has.total_memory:  # None where it is not known
        print(f"memory of {has.name}: {memory.size(has.total_memory)}, ", end="")
        print(f"and the model needs {need / has.total_memory:.1f} times that")

# %% [markdown]
# The four kinds are not all there at once: in backward, activations make room while gradients come. So each peak is just above four times the parameters. With `Adam(..., foreach=True)`, the default on a GPU, the last number is about a quarter larger: its temporaries are as large as all parameters (try it). Lesson 17 makes such a model smaller.
#
# Under `memory.Fake`, make tensors where they belong: `.to(...)` of a whole model ends in `_apply(): Couldn't swap Linear.weight`.
#
# ## Round 6: two devices, twice the price
#
# Data parallel training gives each rank a copy of the model, and a share of the **global batch**, which is all samples of one step over all ranks.
#
# **Predict.** Two ranks train with DDP on a global batch of 512. Compare one device that does it alone with both ranks together: which kinds double, which stay?


# %%
# NBVAL_CHECK_OUTPUT
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
            adam.zero_grad()
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
        "one device": weigh_rank(512, lambda model: model),
        "DDP": weigh_rank(256, ddp),  # half of the global batch
        "DDP, bucket views": weigh_rank(256, lambda m: ddp(m, gradient_as_bucket_view=True)),
    }


reports = launch(three_ways, 2)
alone, ranks = reports[0]["one device"], [report["DDP"] for report in reports]
print(f"{'':18}{'one device':>12}{'rank 0':>12}{'rank 1':>12}   both / one device")
for kind in alone:
    sizes = [alone[kind], *(rank[kind] for rank in ranks)]
    ratio = f"{sum(sizes[1:]) / sizes[0]:.2f}" if sizes[0] else "only in DDP"
    print(f"{kind:18}" + "".join(f"{size / MiB:8.2f} MiB" for size in sizes) + f"   {ratio}")

# %% [markdown]
# Activations are divided, everything else is there twice: data parallel training does not help a model that does not fit. (Lesson 09 divides the model too.)
#
# What each rank has under *other* are DDP's **buckets**, in which gradients are averaged. `gradient_as_bucket_view=True` makes the gradients views of the buckets. You know from the first section what a view costs.

# %%
# NBVAL_CHECK_OUTPUT
for name in ("DDP", "DDP, bucket views"):
    run = reports[0][name]
    print(f"{name:18} other, in units of the gradients: {run['other'] / run['gradients']:.2f}")

# %% [markdown]
# Buckets cost the gradients once more. With views that price is gone, but `zero_grad` no longer frees the gradients: the buckets stay.
#
# ## Break it on purpose: two small lists
#
# **Predict.** One program keeps one number of each output, another keeps each output. What does a step leave behind in each?


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
# One number kept a whole output alive: a slice keeps its storage, and `.clone()` gives it one of its own. An output kept its graph, with all activations. `.detach()` leaves the output itself, which this list is for. (The meter still files it under activations.) Between two steps, nothing may grow that you do not keep on purpose. Lesson 15 has more such programs.
#
# ## What a real GPU does differently
#
# It has a caching allocator, a context, and memory of its own. It picks other kernels, with other temporaries, and gives Adam temporaries of once all parameters, instead of twice the largest tensor.
#
# ## Then → now
#
# | then | now | why |
# |---|---|---|
# | `torchsummary.summary(model, size)` (2018) | `torchinfo.summary(model, input_size=…)` | counts shared and bare parameters right, knows LSTMs, returns an object, names the layers that ran |
# | its "estimated total size" | `memory.meter`, or `memory.Fake` before the model exists | counts gradients, optimizer state, and what autograd really keeps |
# | `nvidia-smi` | `torch.cuda.memory_allocated`, `memory_reserved`, the snapshot | says whose memory it is |
#
# ## Exercise
#
# [Exercise 14](../exercises/14_where_memory_goes.ipynb): the bytes by kind from a description alone, and the layer that keeps the most. About 30 minutes.
#
# ## Recap
#
# Parameters, gradients and optimizer state are a fixed price: with Adam four times the parameters, plus its temporaries (on a CPU twice the largest parameter tensor: much for the CNN, almost nothing in Round 5). Activations grow with the batch, and are what autograd keeps, not what layers return. A summary finds shape errors; what training takes you weigh, or predict with a fake run.
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
