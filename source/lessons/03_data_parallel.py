# ---
# jupyter:
#   course:
#     rows: [P1, P3, A1]
#     minutes: {read: 35, do: 25}
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
# # DataParallel: one process, many devices
#
# After this lesson you can place every kind of parallel training on one map, build `nn.DataParallel` by hand, and say from your own measurements what its threads and its device 0 cost.
#
# | | |
# |---|---|
# | **Time** | 35 minutes to read, 25 to do; the exercise comes on top |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); a training step in PyTorch |
# | **You will** | draw the map · scatter, replicate, apply, gather, and get the result of one device · test whether it is the GIL · count the bytes of device 0 against the others · meet the three classic bugs |
# | **Runs on** | no GPU: two threads, then two pinned cores · one GPU: both replicas on it, and cores where two devices are needed · two GPUs or more: the GPUs (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# If you come here first, two reminders: a **rank** is a process with a device of its own, and `launch(fn, 2)` runs a function on two of them ([lesson 00](00_start_here.ipynb)). A **speed-up** is the time on one device over the time on two, measured in turns ([lesson 02](02_two_devices_one_sum.ipynb)).

# %%
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.patches import Rectangle
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel._functions import Gather
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from course_utils import memory, plots
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.memory import MiB
from course_utils.timing import Ratio

plots.use_style()

# %%
machine = census()
print(machine)
devices = slots(2)
assert len(devices) == 2, "this lesson runs on two devices"
GPUS = torch.cuda.device_count()
# Where the two replicas of this process live: two GPUs, one GPU twice, or the CPU twice.
places = [
    torch.device("cuda", i if GPUS > 1 else 0) if GPUS else torch.device("cpu") for i in (0, 1)
]
torch.set_num_threads(1)  # one core is one device, also in this process

# %% [markdown]
# ## The map
#
# There are five ways to share. A **replica** is a copy of the whole model. In **data parallelism** each device has a replica and takes a part of the batch. In **model parallelism** each device has some of the layers. **Pipeline parallelism** is model parallelism in which the batch is cut into **micro-batches**, so that the devices work at the same time. In **tensor parallelism** each device has a slice of every layer. In **sharded** training the devices share the batch like replicas, but each *stores* only a slice of the weights and borrows the rest. A **node** is one machine; what you share does not depend on how many there are, what it costs to send does.


# %%
def block(ax, x, y, width, height, colour, hatch="", text=""):
    style = {"facecolor": colour, "edgecolor": "black", "hatch": hatch, "linewidth": 0.8}
    ax.add_patch(Rectangle((x, y), width, height, **style))
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8)


HAVE = {  # (layer, slice) that device 0 and device 1 have, of three layers with two slices
    "data": lambda device, layer, part: True,
    "model": lambda device, layer, part: (layer > 0) == (device > 0),
    "pipeline": lambda device, layer, part: (layer > 0) == (device > 0),
    "tensor": lambda device, layer, part: part == device,
    "sharded": lambda device, layer, part: part == device,
}
SENDS = {  # what travels between the devices in each step
    "data": "gradients",
    "model": "activations",
    "pipeline": "activations",
    "tensor": "activations",
    "sharded": "weights, gradients",
}
CASES = {  # nodes, GPUs in each, over what they talk
    "single node, single GPU": (1, 1, "nothing to send"),
    "single node, many GPUs": (1, 2, "inside the machine"),
    "many nodes, single GPU": (2, 1, "over the network"),
    "many nodes, many GPUs": (2, 2, "both: fast inside, slow between"),
}
BATCH = {"data": 1, "model": 2, "pipeline": 2, "tensor": 2, "sharded": 1}  # halves a device sees
fig = plt.figure(figsize=(10, 5.4))
grid = fig.add_gridspec(2, 20, height_ratios=[1.8, 1], bottom=0.1)
for number, (name, has) in enumerate(HAVE.items()):
    ax = fig.add_subplot(grid[0, 4 * number : 4 * number + 4])
    for device in (0, 1):
        left = 0.08 + 0.48 * device
        block(ax, left - 0.04, 0.02, 0.44, 0.95, "white")
        ax.text(left + 0.18, 0.9, f"device {device}", ha="center", fontsize=8)
        for layer in range(3):
            for part in (0, 1):
                mine = has(device, layer, part)
                colour = plots.COLOURS[5] if mine else "white"
                borrowed = "//" if name == "sharded" and not mine else ""
                block(ax, left + 0.18 * part, 0.3 + 0.19 * layer, 0.18, 0.17, colour, borrowed)
        pieces = 4 if name == "pipeline" else BATCH[name]
        for piece in range(pieces):
            width = 0.18 * BATCH[name] / pieces
            start = left + width * piece + (0.18 * device if BATCH[name] == 1 else 0)
            block(ax, start, 0.08, width, 0.12, plots.COLOURS[4])
    ax.text(0.5, -0.08, f"sends {SENDS[name]}", ha="center", fontsize=8)
    ax.set_title(name, fontsize=11)
    ax.set(xlim=(0, 1), ylim=(-0.1, 1))
    ax.axis("off")
for number, (name, (nodes, gpus, link)) in enumerate(CASES.items()):
    ax = fig.add_subplot(grid[1, 5 * number : 5 * number + 5])
    for node in range(nodes):
        left = 0.05 + 0.5 * node + (0.25 if nodes == 1 else 0)
        block(ax, left, 0.25, 0.4, 0.5, "white")
        for gpu in range(gpus):
            place = left + 0.04 + 0.17 * gpu + (0.08 if gpus == 1 else 0)
            block(ax, place, 0.35, 0.15, 0.3, plots.COLOURS[2], text="GPU")
    ax.text(0.5, 0.1, link, ha="center", fontsize=8)
    ax.text(0.5, 0.82, name, ha="center", fontsize=9, fontweight="bold")
    ax.set(xlim=(0, 1), ylim=(-0.2, 0.95))
    ax.axis("off")
legend = {"stored": (plots.COLOURS[5], ""), "borrowed for a moment": ("white", "//")}
legend["samples whose inputs or activations it sees"] = (plots.COLOURS[4], "")
patches = [
    Rectangle((0, 0), 1, 1, facecolor=colour, hatch=hatch, edgecolor="black", label=label)
    for label, (colour, hatch) in legend.items()
]
fig.legend(handles=patches, loc="lower center", ncols=3, fontsize=9)
fig.suptitle("Five ways to share the work, four kinds of machine to do it on")
plots.show(
    fig,
    name="map",
    alt="Above, five panels with two devices each: data parallelism repeats all layers and halves "
    "the batch; model and pipeline parallelism divide the layers, pipeline also cuts the batch "
    "into pieces; tensor parallelism divides each layer; sharded training stores half of each "
    "layer, borrows the other half, and halves the batch. Below, four panels: one node with one "
    "GPU, one with two, two nodes with one GPU each, two nodes with two each.",
)

# %% [markdown]
# The three layers stand on the batch: the first is at the bottom, and half the width is half of a layer or of the batch. "Sends" names what the way of sharing needs; DataParallel also sends inputs, weights and outputs, because all of them start or end on device 0. This lesson is the first panel on the second machine. [Lesson 04](04_ddp_from_scratch.ipynb) does it with processes, which can sit on any of the four, [lesson 08](08_model_and_pipeline_parallel.ipynb) the next three, [lesson 09](09_sharded_training.ipynb) the last.
#
# ## On five numbers
#
# You may compute the gradient of a large batch in pieces, one after the other, and put the pieces together. Data parallelism does the pieces at once. The loss of a sample is $(wx)^2$, so its gradient is $2wx^2$. The weight is 1, the five samples are 1 to 5, and the pieces are the first three and the last two.
#
# **Predict.** The gradient of the mean over all five is 22. The first piece alone gives 28/3, the second 41. What is their mean? What weights make it 22?


# %%
# NBVAL_CHECK_OUTPUT
def gradient(samples):
    w = torch.ones((), requires_grad=True)
    ((w * samples) ** 2).mean().backward()
    return w.grad.item()


samples = torch.arange(1.0, 6)
pieces = samples.split([3, 2])
each = [gradient(piece) for piece in pieces]
by_count = sum(g * len(piece) for g, piece in zip(each, pieces, strict=True)) / len(samples)
print(f"whole batch {gradient(samples):.2f}; pieces {each[0]:.2f} and {each[1]:.2f}")
print(f"mean of the means {sum(each) / 2:.2f}; weighted by count {by_count:.2f}")
assert abs(by_count - gradient(samples)) < 1e-5

# %% [markdown]
# The mean of the means counts a sample of the short piece more than one of the long piece. It is right only when all pieces are equally long. Keep this in mind: it comes back when a model returns its loss.
#
# ## DataParallel by hand
#
# It is four functions. **Scatter** cuts the batch along its first dimension, one **shard** for each device. **Replicate** makes a replica on each device. **Parallel apply** runs all replicas at once, each in a thread. **Gather** brings the outputs together on device 0, the coordinator.
#
# **Predict.** `torch.chunk` makes pieces of ⌈batch ÷ devices⌉ samples until none are left. How many samples does each device get of 10 on 4 devices? Of 5 on 4?


# %%
# NBVAL_CHECK_OUTPUT
def scatter(batch, places):
    """The rule of nn.DataParallel: pieces of equal size, the last one takes what is left."""
    shards = batch.chunk(len(places))  # perhaps fewer than there are places
    return [shard.to(place) for shard, place in zip(shards, places, strict=False)]


def gather(outputs, place):
    return torch.cat([output.to(place) for output in outputs])


for size, count in [(8, 2), (10, 4), (5, 4), (2, 4)]:
    shards = scatter(torch.arange(size), ["cpu"] * count)
    assert torch.equal(gather(shards, "cpu"), torch.arange(size))
    print(f"{size:2} samples on {count} devices: {[len(shard) for shard in shards]}")

# %% [markdown]
# With a batch too small some devices get nothing: no error, no warning.
#
# A replica is the same module with other tensors. Its weights are *copies with a graph*: autograd knows from which weight each copy was made. So the gradients of all replicas find their way back to device 0, and are added up there, without a line of ours. Replica 0 uses the weights of device 0 themselves. The second cell asks whether the result is that of one device; its batch has 9 samples, so the shards are unequal.


# %%
def replicate(module, place, copy):
    """A module with the same code and structure, whose weights are copies on another device."""
    replica = type(module).__new__(type(module))
    replica.__dict__ = {**module.__dict__}
    replica._modules = {n: replicate(m, place, copy) for n, m in module._modules.items()}
    replica._buffers = {n: b.to(place, copy=copy) for n, b in module._buffers.items()}
    replica._parameters = {n: None for n, p in module._parameters.items() if p is None}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            replica.__dict__[name] = parameter.to(place, copy=copy)  # a tensor with a graph
    return replica


def parallel_apply(replicas, shards):
    """Each replica on its shard, in a thread of its own; an error in a thread is raised here."""
    outputs = [None] * len(shards)

    def work(i):
        try:
            outputs[i] = replicas[i](shards[i])
        except Exception as error:  # it would end the thread, and nobody would hear of it
            outputs[i] = error

    threads = [threading.Thread(target=work, args=[i]) for i in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for output in outputs:
        if isinstance(output, Exception):
            raise output
    return outputs


def data_parallel(module, batch, places=places):
    shards = scatter(batch, places)
    replicas = [replicate(module, place, copy=i > 0) for i, place in enumerate(places)]
    outputs = parallel_apply(replicas[: len(shards)], shards)
    return gather(outputs, places[0])


# %%
# NBVAL_CHECK_OUTPUT
def network(*sizes):
    torch.manual_seed(0)
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers[:-1]).to(places[0])


model = network(32, 64, 10)
x, y = torch.randn(9, 32).to(places[0]), (torch.arange(9) % 10).to(places[0])


def loss_and_gradients(forward):
    model.zero_grad()
    loss = F.cross_entropy(forward(x), y)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


one = loss_and_gradients(model)
two = loss_and_gradients(lambda batch: data_parallel(model, batch))
largest = max((a - b).abs().max().item() for a, b in zip(one, two, strict=True))
print(f"loss and {len(one) - 1} gradients; largest difference below 1e-6: {largest < 1e-6}")
assert largest < 1e-6

# %% [markdown]
# Shards of 5 and 4 samples, and no weighting by count: the *outputs* are gathered, and the loss is taken over all nine on device 0. The difference is not always 0, because a gradient is a sum over samples, and two halves added up round differently from one long sum.
#
# ## nn.DataParallel, on this machine
#
# The framework's API is one line: `nn.DataParallel(model)`. It is not deprecated: PyTorch [recommends DDP](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html) instead. What does it do where there is no GPU?
#
# **Predict.** Eight samples, two cores. How often is `forward` called, and with how many samples? Is there a warning?

# %%
seen = []


class Notes(nn.Linear):
    """Writes down how many samples each call of forward gets."""

    def forward(self, batch):
        seen.append(len(batch))
        return super().forward(batch)


def sizes_under_ddp():
    place = "cuda" if torch.cuda.is_available() else "cpu"
    wrapped = DistributedDataParallel(Notes(4, 2).to(place))
    shard = torch.ones(8, 4, device=place).chunk(2)[dist.get_rank()]  # you cut the batch
    wrapped(shard).sum().backward()
    return seen


# %% then="nn.DataParallel(model)" now="DistributedDataParallel(model)" since="PyTorch 2.13: not deprecated, silent on a CPU; its page recommends DDP"
with warnings.catch_warnings(record=True) as noted:
    warnings.simplefilter("always")
    wrapped = nn.DataParallel(Notes(4, 2).to(places[0]))
    wrapped(torch.ones(8, 4, device=places[0]))
print(f"DataParallel, {GPUS} GPUs: forward saw {seen}, warnings: {len(noted)}")
assert GPUS > 1 or (seen == [8] and not noted)
seen.clear()
print("DDP, ranks 0 and 1: forward saw", sum(launch(sizes_under_ddp, 2), []))

# %% [markdown]
# Without GPUs it is a **silent pass-through**: one call with the whole batch, on one device. A script that "uses DataParallel" runs on your laptop and proves nothing about two devices. DDP (`DistributedDataParallel`) runs on cores as well, with a process for each.
#
# ## Is it the GIL?
#
# Tutorials say: DDP is faster than DataParallel because of the **GIL**, the lock of Python that lets one thread at a time run Python code. PyTorch releases it while an operation computes. So the lock should cost much where Python calls many tiny operations, and little where it calls a few big ones. That is a hypothesis, and it can be tested:
#
# | work | who calls the operations | what the hypothesis predicts for threads |
# |---|---|---|
# | `only Python` | there are none: Python adds numbers | no gain at all |
# | `tiny, from Python` | Python: a recurrent network, step by step | much worse than processes |
# | `tiny, from C++` | C++, in one call: `nn.RNN`, the same steps | close to processes |
# | `few big` | Python: three large products | close to processes |
#
# The second and third rows are the same computation: only the caller differs. If tiny operations were bad for threads for another reason than the lock, both would suffer alike.


# %%
def only_python():
    total = 0
    for number in range(150_000):
        total += number


torch.manual_seed(0)
rnn = nn.RNN(16, 16)
sequence, matrix = torch.randn(400, 4, 16), torch.randn(512, 512)


def tiny_from_python():
    w_in, w_hidden, b_in, b_hidden = rnn.parameters()
    hidden = torch.zeros(4, 16)
    for step in sequence:
        hidden = torch.tanh(F.linear(step, w_in, b_in) + F.linear(hidden, w_hidden, b_hidden))
    return hidden


def tiny_from_cpp():
    return rnn(sequence)[1][0]


def few_big():
    return matrix @ (matrix @ (matrix @ matrix))


WORK = {
    "only Python": only_python,
    "tiny, from Python": tiny_from_python,
    "tiny, from C++": tiny_from_cpp,
    "few big": few_big,
}
same = torch.allclose(tiny_from_python(), tiny_from_cpp(), atol=1e-6)
print("both tiny ones compute the same:", same)
assert same

# %% [markdown]
# A piece of work is done several times, forward only. First one worker does all of it, then two workers do half each. With threads, both are threads of this process, each pinned to a core of its own, with one compute thread. With processes they are two ranks on the same cores. Threads and processes take turns, round by round.
#
# **Predict.** Order the four kinds of work by how much *more* processes gain than threads. Can two threads be *slower* than one?


# %%
def repeat(work, times):
    with torch.no_grad():
        for _ in range(times):
            work()


def with_threads(work, numbers, times):
    """Seconds until all is done by threads that share `times`: one on each core in `numbers`."""
    ready = threading.Barrier(len(numbers) + 1)

    def worker(number):
        torch.set_num_threads(1)  # OpenMP keeps this number for each thread that calls it
        if machine.can_pin:
            os.sched_setaffinity(0, {machine.cpu.cores[number]})  # of this thread alone
        ready.wait()
        repeat(work, times // len(numbers))

    threads = [threading.Thread(target=worker, args=[number]) for number in numbers]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start


def with_processes(work, alone, times):
    """The time of rank `alone` doing everything, over that of two ranks doing half each."""
    torch.set_num_threads(1)
    seconds = []
    repeat(work, 1)  # wakes the rank up
    for both in (False, True):
        dist.barrier()
        start = time.perf_counter()
        if both or dist.get_rank() == alone:
            repeat(work, times // (1 + both))
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds[0] / seconds[1]


# %%
# The work is on CPU tensors, on every machine.
ROUNDS, TIMES = 7, {"only Python": 8, "tiny, from Python": 8, "tiny, from C++": 16, "few big": 8}
gains = {name: {"threads": [], "processes": []} for name in WORK}
for number in tqdm(range(ROUNDS + 1), desc="rounds", file=sys.stdout):
    for name, work in WORK.items():
        core = number % 2  # each core is the single device in every second round
        alone = with_threads(work, [core], TIMES[name])
        together = with_threads(work, [0, 1], TIMES[name])
        processes, _ = launch(with_processes, 2, work, core, TIMES[name])
        if number > 0:  # the first round wakes everything up
            gains[name]["threads"].append(alone / together)
            gains[name]["processes"].append(processes)

gap = {}  # how many times as much processes gain, round by round
print(f"{'speed-up with two':20}{'threads':>28}{'processes':>28}{'processes ÷ threads':>28}")
for name, gain in gains.items():
    pairs = zip(gain["processes"], gain["threads"], strict=True)
    gap[name] = Ratio(tuple(a / b for a, b in pairs))
    columns = [*(str(Ratio(tuple(gain[kind]))) for kind in gain), str(gap[name])]
    print(f"{name:20}" + "".join(f"{column:>28}" for column in columns))


def compare(a, low, high):
    """Where the middle half of the rounds of `a` lies against a range."""
    return "above" if a.low > high else "below" if a.high < low else "overlaps with"


print("\nprocesses ÷ threads, middle half of the rounds (1 is no difference):")
for name in gap:
    print(f"  {name:20}{compare(gap[name], 1, 1)} 1")
tiny = gap["tiny, from Python"]
for name in ("tiny, from C++", "few big"):
    print(f"  tiny, from Python: {compare(tiny, gap[name].low, gap[name].high)} {name}")

# %%
fig, ax = plt.subplots(figsize=(8, 4))
for number, (kind, hatch) in enumerate({"threads": "//", "processes": ""}.items()):
    ratios = [Ratio(tuple(gain[kind])) for gain in gains.values()]
    middle = np.array([ratio.median for ratio in ratios])
    spread = [middle - [r.low for r in ratios], [r.high for r in ratios] - middle]
    ax.bar(
        np.arange(4) + 0.38 * (number - 0.5), middle, 0.34, yerr=spread, capsize=3, label=kind,
        hatch=hatch, edgecolor="white", color=plots.COLOURS[1 - number],
    )  # fmt: skip
ax.axhline(1, color="black", linestyle=":", marker="")
ax.axhline(2, color="black", linestyle=":", marker="")
ax.set_xticks(range(4), gains)
ax.set(xlabel="work", ylabel="speed-up with two workers (×)", ylim=(0, None))
ax.grid(axis="x", visible=False)
ax.legend(loc="upper left", ncols=2)
ax.set_ylim(0, 1.25 * max(2, ax.get_ylim()[1]))  # the legend stands above the bars
each = "; ".join(f"{name}: {ratio.median:.2f}" for name, ratio in gap.items())
ax.set_title(f"Speed-up of processes over that of threads:\n{each}", fontsize=11)
plots.show(
    fig,
    name="threads-against-processes",
    alt="Bars of the speed-up with two threads and with two processes for four kinds of work. "
    + " ".join(f"{name}: processes gain {gap[name].median:.2f} times as much." for name in gap),
)

# %% [markdown]
# Dotted: no gain, and perfect. The bars are medians of the rounds, the thin lines hold the middle half. The numbers in the title are medians too, of the ratios taken round by round: dividing two bars gives another number. `only Python` is the control: nobody ever releases the lock, and two threads may even be slower than one, because they hand it back and forth. A middle half above 2 is no real gain: the single worker shared its core with another program. Then, or where ranges overlap, run the two cells again on a quiet machine.
#
# So is DDP faster "because of the GIL"? The decisive line is `tiny, from Python` against `tiny, from C++`: same computation, another caller. "above" supports the lock as *a* cause; "overlaps with" leaves it undecided; "below" speaks against it. Whether it is the *only* cause, `few big` says: where it lies above 1, threads lose something else as well (they share one memory allocator and one process; we did not take these apart). And DataParallel pays for something else as well: it copies the weights to every device in each forward pass, and everything that is gathered goes through one device. Count that next.
#
# ## The memory of device 0
#
# On cores both replicas live in one memory, so we need devices that count. This is a meter in one cell: while you are inside `with device:`, each new **storage** (the bytes behind a tensor) that an operation makes belongs to that device, until it is freed. PyTorch calls `__torch_dispatch__` for every operation; a `weakref` with a callback tells us when a storage dies. You need not follow its lines to use it.


# %%
class Device(TorchDispatchMode):
    """A device that counts the bytes of the tensors made on it."""

    owned = {}  # by any device: these storages count already
    live = peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in Device.owned:  # a view or an in-place result makes no new storage
                Device.owned[key] = weakref.ref(storage, partial(self.free, key, size))
                self.live += size
                self.peak = max(self.peak, self.live)
        return result

    def free(self, key, size, _):
        del Device.owned[key]
        self.live -= size


# %% [markdown]
# Now one step of DataParallel on two such devices, written out so that every copy between them is visible. The network has 512 inputs and chooses among 4,096 classes, so its output is eight times as large as its input; 1,024 samples; Adam, which keeps two numbers for each weight. Read the steps by the names in `note(...)`; the `with` lines, `note` and `del` serve the meter, the rest is DataParallel. (`get_gradient_edge` remembers where the backward pass enters a replica without keeping its output: DataParallel does not keep the replicas' outputs either.) The first step makes the optimizer's state, so the second is the one to look at.
#
# **Predict.** Which of these does device 1 hold at some moment: the weights, its gradients, the optimizer's two numbers, its half of the output, the whole output?


# %%
def copied(tensor):
    """A copy that crosses from one device to another."""
    moved["bytes"] += tensor.nbytes
    return tensor.detach().clone()


SIZES, moved = (512, 512, 4096), Counter()


def data_parallel_step(model, optimizer, x, y, devices, note):
    zero, one = devices
    shards = list(x.chunk(2))
    replica = network(*SIZES).to("cpu").requires_grad_(False)  # only its structure: not counted
    with one:
        shards[1] = copied(shards[1])
        for mine, original in zip(replica.parameters(), model.parameters(), strict=True):
            mine.data = copied(original)
            mine.requires_grad_(True)
    note("scatter, replicate")

    edges, outputs = [], []
    for device, module, shard in zip(devices, [model, replica], shards, strict=True):
        with device:
            outputs.append(module(shard))
            edges.append(torch.autograd.graph.get_gradient_edge(outputs[-1]))  # the way back
    note("forward")
    with zero:
        moved["bytes"] += outputs[1].nbytes
        logits = torch.cat([output.detach() for output in outputs]).requires_grad_()
        del outputs
        note("gather")
        loss = F.cross_entropy(logits, y)
        (gradient,) = torch.autograd.grad(loss, logits)
        note("loss")
        loss = loss.item()  # a number: the graph is done with
    for device, edge, part in zip(devices, edges, gradient.chunk(2), strict=True):
        with device:
            torch.autograd.backward(edge, part if device is zero else copied(part))
    del logits, gradient, part, edges, edge
    note("backward")
    with zero:
        for original, mine in zip(model.parameters(), replica.parameters(), strict=True):
            original.grad += copied(mine.grad)
        note("add gradients")
        optimizer.step()
        optimizer.zero_grad()
    del replica, mine, module, shard, shards  # the replicas are thrown away after every step
    note("optimizer step")
    return loss


# %%
# NBVAL_CHECK_OUTPUT
def two_steps(batch_size, step, *more):
    """Two training steps on a new Device: it, the losses, and MiB alive and at the peak by stage."""
    zero = Device()
    devices, stages, losses = (zero, *more), {}, []

    def note(stage):
        stages[stage] = [(device.live / MiB, device.peak / MiB) for device in devices]
        for device in devices:
            device.peak = device.live

    with zero:
        model = network(*SIZES).to("cpu")
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(batch_size, SIZES[0])
        y = torch.randint(0, SIZES[-1], (batch_size,))
    for _ in range(2):
        stages.clear(), moved.clear()
        for device in devices:
            device.peak = device.live
        losses.append(step(model, optimizer, x, y, devices, note))
    return losses, stages


def plain_step(model, optimizer, x, y, devices, note):
    with devices[0]:
        logits = model(x)  # kept until the backward pass is over, as above
        loss = F.cross_entropy(logits, y)
        loss.backward()
        del logits
        optimizer.step()
        optimizer.zero_grad()
    note("step")
    return loss.item()


losses, stages = two_steps(1024, data_parallel_step, Device())
sent = moved["bytes"]
alone, on_one = two_steps(1024, plain_step)
print(f"{'MiB alive after':20}{'device 0':>10}{'device 1':>10}")
for stage, counts in stages.items():
    print(f"{stage:20}" + "".join(f"{live:10.1f}" for live, _ in counts))
print("losses equal one device's within 1e-5:", np.allclose(losses, alone, rtol=0, atol=1e-5))
assert np.allclose(losses, alone, rtol=0, atol=1e-5)

# %% [markdown]
# Read the table against your prediction. The whole batch and output, the optimizer's numbers, the sum of the gradients and the loss are on device 0 alone. Device 1 has a copy of the weights, its activations and its gradients; it has its half of the output too, from the forward pass until "gather"; after the step it has nothing at all. The losses agree with those of one device, so nothing was left out. (The tolerance is for sums in another order, in both steps and in the weights between them.)
#
# How does that look beside DDP, where each rank has everything, and half the batch? Its ranks are real processes, and each opens the course's meter, `memory.Budget`. The cell first asks both meters about the same step. The batches are large on purpose: in a small one the peak of a rank lies in Adam's step, which does not depend on the batch. The last two rows split the peak: what one more sample costs, and what is left for no sample.


# %%
def ddp_peak(batch_size):
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    layers = nn.Linear(SIZES[0], SIZES[1]), nn.GELU(), nn.Linear(SIZES[1], SIZES[2])
    wrapped = DistributedDataParallel(
        nn.Sequential(*layers).to(place), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.Adam(wrapped.parameters())
    x = torch.randn(batch_size // 2, SIZES[0], device=place)
    y = torch.randint(0, SIZES[-1], (batch_size // 2,), device=place)
    with memory.Budget(wrapped, optimizer, x, y) as meter:
        for _ in range(2):
            meter.reset()
            plain_step(wrapped, optimizer, x, y, [nullcontext()], lambda stage: None)
        return meter.peak / MiB


def budget_peak(batch_size):
    """The step of one device again, under the other meter."""
    model = network(*SIZES).to("cpu")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(batch_size, SIZES[0])
    y = torch.randint(0, SIZES[-1], (batch_size,))
    with memory.Budget(model, optimizer, x, y) as meter:
        for _ in range(2):
            meter.reset()
            plain_step(model, optimizer, x, y, [nullcontext()], lambda stage: None)
        return meter.peak / MiB


def most(stages):
    """The peak of each device over all stages."""
    return np.array([[peak for _, peak in counts] for counts in stages.values()]).max(axis=0)


ours, theirs = most(on_one)[0], budget_peak(1024)
print(f"one device, 1024 samples: our meter {ours:.1f} MiB, memory.Budget {theirs:.1f} MiB")
assert abs(ours - theirs) < 0.01 * ours
BATCHES = (1024, 1536, 2048)
peaks = {}
for size in BATCHES:
    _, stages_of_size = two_steps(size, data_parallel_step, Device())
    peaks[size] = [*most(stages_of_size), *launch(ddp_peak, 2, size)]
columns = ["DP device 0", "DP device 1", "DDP rank 0", "DDP rank 1"]
print(f"{'peak, MiB':12}" + "".join(f"{column:>14}" for column in columns))
for size, values in peaks.items():
    print(f"batch {size:<6}" + "".join(f"{value:14.1f}" for value in values))
grown = [(b - a) * 1024 / 1024 for a, b in zip(peaks[1024], peaks[2048], strict=True)]  # KiB
print(f"{'KiB a sample':12}" + "".join(f"{value:14.1f}" for value in grown))
fixed = [peak - slope for peak, slope in zip(peaks[1024], grown, strict=True)]  # 1,024 KiB: 1 MiB
print(f"{'MiB for none':12}" + "".join(f"{value:14.1f}" for value in fixed))

# %%
heavy = peaks[1024][0] / peaks[1024][1]
fig, (ax, side) = plt.subplots(1, 2, figsize=(9.5, 3.8), width_ratios=[1.5, 1])
for device in (0, 1):
    values = [counts[device][1] for counts in stages.values()]
    ax.plot(list(stages), values, label=f"DataParallel, device {device}")
ax.tick_params(axis="x", rotation=30)
ax.set(
    xlabel="stage of a step, 1,024 samples", ylabel="peak within the stage (MiB)", ylim=(0, None)
)
for number, column in enumerate(columns[:3]):
    style = {"linestyle": plots.DASHES[number], "marker": plots.MARKERS[number]}
    side.plot(BATCHES, [peaks[size][number] for size in BATCHES], label=column, **style)
side.set_xticks(BATCHES)
side.set(xlabel="batch (samples)", ylabel="peak (MiB)", ylim=(0, None))
for axes in (ax, side):
    axes.legend(fontsize=9)
ax.set_title(
    f"At 1,024 samples device 0 needs\n{heavy:.1f} times the memory of device 1", fontsize=11
)
side.set_title("What a larger batch costs", fontsize=11)
plots.show(
    fig,
    name="memory-of-device-0",
    alt="Left: peak memory of both devices through the stages of a DataParallel step; device 0 lies "
    f"above device 1 in every stage, and its peak is {heavy:.1f} times as high. Right: peak against "
    "the batch for device 0, device 1 and a rank of DDP.",
)

# %% [markdown]
# Both devices are of the same size in reality, so device 0 decides how large the batch may be, and device 1 has room that nobody can use. And the room won is small: at 1,024 samples its peak is hardly below that of one device alone (the line above the table), since the whole output and the loss are in both. The row `KiB a sample` counts samples of the whole batch. On device 0 of DataParallel it costs about twice what it costs on a rank of DDP, because the whole output and the loss are there. (In both, the step holds the output until the backward pass is over.) In `MiB for none` a rank of DDP is dearer than device 0. Both have the weights and Adam's two numbers for each, three times the weights. A rank has the gradients as well: they live in DDP's buckets from step to step, while device 0 has none at its peak, which lies in the loss, before the backward pass. [Lesson 09](09_sharded_training.ipynb) shares what every rank has whole.
#
# The way through device 0 is also a way for bytes. `copied` has counted them.

# %%
# NBVAL_CHECK_OUTPUT
weights = sum(a * b + b for a, b in pairwise(SIZES)) * 4 / MiB
inputs, outputs = 512 * SIZES[0] * 4 / MiB, 512 * SIZES[-1] * 4 / MiB  # of device 1's shard
out, back = inputs + weights + outputs, outputs + weights
print(
    f"device 0 sends    input {inputs:.2f}, weights {weights:.2f}, gradient of output {outputs:.2f}"
)
print(f"device 0 receives output {outputs:.2f}, gradients of weights {weights:.2f}")
print(f"together {out + back:.2f} MiB a step; counted {sent / MiB:.2f}")
assert abs(out + back - sent / MiB) < 1e-6
share = 2 * (2 - 1) / 2 * weights  # 2 (p - 1) / p of the weights, for p = 2
print(f"{'MiB a step':26}{'sends':>8}{'receives':>10}")
print(f"{'DataParallel, device 0':26}{out:8.2f}{back:10.2f}")
print(f"{'DDP, each of two ranks':26}{share:8.2f}{share:10.2f}")

# %% [markdown]
# The line of DDP is a formula, 2 (p − 1) ÷ p of the weights for p ranks; [lesson 04](04_ddp_from_scratch.ipynb) counts it. With p devices the weights leave device 0 p − 1 times in every step, copied like this, and as many gradients come back. The share of a DDP rank stays below twice the weights, whatever p is.
#
# ## Three classic bugs
#
# ### State changed in forward is lost
#
# A module counts its calls, and its BatchNorm keeps a running mean. Both happen in `forward`, that is, on the replicas.
#
# **Predict.** Two steps with two shards, in which all numbers are 1 in the first shard and 3 in the second. With our `data_parallel`, what is `calls` on device 0 afterwards, and `running_mean`, which starts at 0 and moves a tenth of the way to the mean of the batch each time? (The cell shows one device and DDP beside it.)


# %%
# NBVAL_CHECK_OUTPUT
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(1), 0

    def forward(self, batch):
        self.calls += 1
        return self.norm(batch)


def counting_under_ddp():
    place = "cuda" if torch.cuda.is_available() else "cpu"
    wrapped = DistributedDataParallel(Counting().to(place))
    shard = torch.full((3, 1), 1.0 + 2 * dist.get_rank(), device=place)
    for _ in range(2):
        wrapped(shard).sum().backward()
    return wrapped.module.calls, wrapped.module.norm.running_mean.item()


batch = torch.tensor([1.0, 1, 1, 3, 3, 3])[:, None]
for name, forward in {
    "one device": lambda module: module(batch),
    "by hand, two devices": lambda module: data_parallel(module, batch, ["cpu", "cpu"]),
}.items():
    module = Counting()
    forward(module), forward(module)
    print(f"{name:22}calls {module.calls}, running mean {module.norm.running_mean.item():.2f}")
for rank, (calls, mean) in enumerate(launch(counting_under_ddp, 2)):
    print(f"{f'DDP, rank {rank}':22}calls {calls}, running mean {mean:.2f}")

# %% [markdown]
# By hand, `calls` is 0: each replica counted its own, and was thrown away. The running mean has seen the *first shard only* (0.19, not 0.38): replica 0 uses the very buffers of device 0, and an operation in place reaches them; the other replica's are gone. PyTorch's own replicas behave so too, and [its page](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html) warns of both. Cure: change state outside `forward`, or return what you want to keep.
#
# DDP keeps the counter, since a rank is never thrown away. It does *not* cure BatchNorm: before each forward pass rank 0's buffers are sent to all, so rank 1 ends at 0.9 × 0.1 + 0.1 × 3 = 0.39, and its first step is lost. In both, each shard is normalised by its own statistics. SyncBatchNorm shares them ([lesson 05](05_ddp_in_practice.ipynb)).
#
# ### The model returns its loss
#
# If `forward` returns a loss, each replica returns a number without a dimension, and there is no first dimension to gather along. PyTorch makes a vector of them and warns. Here is the warning, from the function that gathers. It refuses CPU tensors, so we hand it two **meta** tensors, which have a shape and no content, as from another device; what it does after the warning needs GPUs.

# %%
# NBVAL_CHECK_OUTPUT
with warnings.catch_warnings(record=True) as noted:
    warnings.simplefilter("always")
    try:
        Gather.apply("cpu", 0, *(torch.ones((), device="meta") for _ in range(2)))
    except (AttributeError, RuntimeError):
        pass  # no GPU, nothing to gather
assert len(noted) == 1
print(noted[0].message)

# %% [markdown]
# The vector meets `backward()`, which wants one number. The common cure is `.mean()`.
#
# **Predict.** Five samples on two devices, a mean loss on each. Is the mean of the vector the mean over the samples?


# %%
# NBVAL_CHECK_OUTPUT
class WithLoss(nn.Linear):
    def forward(self, batch):
        return (super().forward(batch) ** 2).mean().unsqueeze(0)  # as the framework does


torch.manual_seed(0)
module, batch = WithLoss(1, 1), torch.arange(1.0, 6)[:, None]
vector = data_parallel(module, batch, ["cpu", "cpu"])
counts = torch.tensor([len(shard) for shard in scatter(batch, ["cpu", "cpu"])])
try:
    vector.backward()
except RuntimeError as error:
    print("backward of a vector:", error)
else:
    raise AssertionError("a vector was taken for a loss")
truth = module(batch)[0]
by_count = (vector * counts).sum() / counts.sum()
print("mean of the vector is the mean over samples:", torch.allclose(vector.mean(), truth))
print("weighted by count it is:", torch.allclose(by_count, truth))
assert torch.allclose(by_count, truth) and not torch.allclose(vector.mean(), truth)

# %% [markdown]
# ### `module.` in the checkpoint
#
# The wrapper is a module with the model inside, under the name `module`. So is DDP's.

# %%
# NBVAL_CHECK_OUTPUT
model = nn.Sequential(nn.Linear(4, 2))
saved = nn.DataParallel(model).state_dict()
print("saved:", list(saved))
try:
    nn.Sequential(nn.Linear(4, 2)).load_state_dict(saved)
except RuntimeError as error:
    print(*str(error).splitlines()[1:], sep="\n")
else:
    raise AssertionError("the prefix went unnoticed")
consume_prefix_in_state_dict_if_present(saved, "module.")  # for a file that you already have
print(nn.Sequential(nn.Linear(4, 2)).load_state_dict(saved))
print("better:", list(nn.DataParallel(model).module.state_dict()))  # when you save

fresh = nn.Sequential(nn.Linear(4, 2))
missing = fresh.load_state_dict(nn.DataParallel(model).state_dict(), strict=False).missing_keys
print(
    "strict=False loads the weights:", torch.equal(fresh[0].weight, model[0].weight.cpu()), missing
)

# %% [markdown]
# Save the model, not its wrapper: `wrapped.module.state_dict()`. For a file from somebody else `consume_prefix_in_state_dict_if_present` takes the prefix off, in place. Do not reach for `strict=False`: as the last line shows, it loads nothing, and says so only in a value that few people read.
#
# ## When DataParallel is fine
#
# | question | DataParallel is fine | take DDP |
# |---|---|---|
# | what does Python call? | a few big operations, if `few big` lay near 1 in your test | many tiny ones, if they lay above |
# | how large is the output? | a few numbers a sample | much larger than the input |
# | does device 0 set the batch? | there is room to spare | memory is short |
# | one node, one process? | a notebook, an old script, inference | several nodes, or a long training |
# | does `forward` change state? | no | counters, caches (BatchNorm needs more than DDP) |
#
# For training, DDP is the answer to nearly all of these, and costs a few lines more: [lesson 04](04_ddp_from_scratch.ipynb). From a shell its two ranks are `torchrun --standalone --nproc-per-node=2 train.py`; DataParallel is plain `python train.py`, because it is one process.
#
# ## What this machine cannot show
#
# On GPUs weights and outputs cross a real link, and copies may hide behind computing. The kernels start from the threads without waiting, so the lock delays the *launch* of kernels, not the kernels: the smaller the kernels, the more it matters. How nn.DataParallel compares with DDP on two real GPUs: **not measured**. Where there are two, the cell below compares the result with one device and counts with CUDA's own allocator; the multi-GPU path was not run by the authors.

# %%
if GPUS > 1:
    model = network(*SIZES).to("cuda:0")
    wrapped = nn.DataParallel(model, device_ids=[0, 1])
    x = torch.randn(9, 512, device="cuda:0")
    print("equals one device:", torch.allclose(wrapped(x), model(x), atol=1e-5))
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.randn(512, 512, device="cuda:0"), torch.randint(0, 4096, (512,), device="cuda:0")
    for _ in range(2):
        for gpu in (0, 1):
            torch.cuda.reset_peak_memory_stats(gpu)
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for gpu in (0, 1):
        print(f"GPU {gpu}: peak {memory.size(torch.cuda.max_memory_allocated(gpu))}")
else:
    print(f"{GPUS} GPUs here: not measured")

# %% [markdown]
# ## Exercise
#
# [Exercise 03](../exercises/03_data_parallel.ipynb): scatter and gather with remainders, combine the losses of unequal shards, and predict the memory of device 0. About 30 minutes.
#
# ## Recap
#
# DataParallel is one process that copies the model to every device in each step, runs the replicas in threads, and brings outputs and gradients back to device 0. Whether its threads lose most where Python calls tiny operations, your own measurement says; its device 0 needs the most memory and sees all the bytes. What `forward` changes on a replica is lost, and a mean of means is right only for equal shards.
#
# 1. Your script with DataParallel runs on a laptop without an error. What does that say about two GPUs?
# 2. You have a batch of 9 on 8 devices. How many work?
# 3. Three replicas return mean losses over 4, 4 and 1 samples. How do you combine them?
#
# <details><summary>Answers</summary>
#
# 1. Nothing: on a CPU it is a silent pass-through.
# 2. Five: pieces of ⌈9 ÷ 8⌉ = 2, so 2, 2, 2, 2 and 1.
# 3. Weighted by count: (4 a + 4 b + c) / 9.
#
# </details>
#
# Go on with [exercise 03](../exercises/03_data_parallel.ipynb).
