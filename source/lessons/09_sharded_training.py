# ---
# jupyter:
#   course:
#     rows: []
#     minutes: {read: 35, do: 20}
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
# # Sharded training: each rank keeps a part of the model
#
# After this lesson you can say how many bytes a parameter costs on each rank under every stage of sharding, build and train a model that no rank ever holds whole, and save it so that another number of ranks can go on.
#
# | | |
# |---|---|
# | **Time** | 35 minutes to read, 20 to do; the exercise comes on top |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); all-reduce, reduce-scatter, all-gather, `DistributedDataParallel` ([lesson 04](04_ddp_from_scratch.ipynb)); parameters, gradients, optimizer state, peak ([lesson 14](14_where_memory_goes.ipynb)). For one optional part: row and column parallel layers ([lesson 08](08_model_and_pipeline_parallel.ipynb)) |
# | **You will** | work out the three stages of sharding · write one by hand · measure memory and traffic of PyTorch's own against DDP · prove that the weights are the same · gather in 16 bits · save on two ranks and load on one and four · add tensor parallelism · make three classic mistakes |
# | **Runs on** | no GPU, or one: two pinned cores · two GPUs or more: the GPUs (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# If you come here directly, two reminders. With **DistributedDataParallel** (DDP) each rank has a whole **replica** of the model, works on its own part of the global batch, and an **all-reduce** gives every rank the mean of all gradients.
# An all-reduce is two collectives in a row: **reduce-scatter** (each rank gets the sum of one part) and **all-gather** (each rank gets all the parts).

# %%
import math
import os
import tempfile
import warnings
from collections import Counter

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_utils import memory, plots
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, launch
from course_utils.memory import MiB

plots.use_style()
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## Three stages, in arithmetic
#
# Under DDP every rank keeps the same parameters, the same mean gradients and the same optimizer state. Only the samples differ. **ZeRO** ("zero redundancy", [Rajbhandari and others, 2019](https://arxiv.org/abs/1910.02054)) cuts what is the same into n **shards**, one for each of n ranks. It does so in three stages:
#
# | stage | each rank keeps one shard of | and the whole of |
# |---|---|---|
# | 0 (DDP) | nothing | parameters, gradients, optimizer state |
# | 1 | optimizer state | parameters, gradients |
# | 2 | optimizer state, gradients | parameters |
# | 3 | optimizer state, gradients, parameters | nothing |
#
# Adam keeps two numbers for each parameter. In float32 a parameter takes 4 bytes, its gradient 4, Adam's numbers 8. In **mixed precision** as the paper has it, parameter and gradient take 2 bytes each. The optimizer then keeps a float32 copy of the parameter beside its two numbers: 12 bytes. Either way it is 16 bytes in all.
#
# **Predict.** Eight ranks, float32. To how many bytes a parameter do stages 1, 2 and 3 come? Is stage 1 better or worse in mixed precision?


# %%
# NBVAL_CHECK_OUTPUT
FLOAT32 = {"parameters": 4, "gradients": 4, "optimizer state": 8}
MIXED = {"parameters": 2, "gradients": 2, "optimizer state": 12}
SHARDED = ["optimizer state", "gradients", "parameters"]  # stage k shards the first k of these


def bytes_per_parameter(stage, n, costs):
    return sum(cost / n if kind in SHARDED[:stage] else cost for kind, cost in costs.items())


for name, costs in {"float32": FLOAT32, "mixed precision": MIXED}.items():
    print(f"{name:18}", *(f"stage {stage}" for stage in range(4)), sep="   ")
    for n in (1, 2, 8, 64):
        row = [bytes_per_parameter(stage, n, costs) for stage in range(4)]
        print(
            f"{n:>5} rank{'s' * (n > 1):1}       ", *(f"{value:7.2f}" for value in row), sep="   "
        )

# The paper's example: 7.5 billion parameters on 64 ranks, in GB (powers of ten).
paper = [round(7.5 * bytes_per_parameter(stage, 64, MIXED), 1) for stage in range(4)]
print("7.5 billion parameters, mixed, 64 ranks:", paper, "GB a rank")
assert paper == [120.0, 31.4, 16.6, 1.9], "figure 1 of the paper"

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.5, 3.8), sharey=True)
ranks = [2**k for k in range(9)]
for ax, (name, costs) in zip(
    axes, {"float32": FLOAT32, "mixed precision": MIXED}.items(), strict=True
):
    for stage in range(4):
        values = [bytes_per_parameter(stage, n, costs) for n in ranks]
        ax.plot(ranks, values, label=f"stage {stage}")
    ax.set_xscale("log", base=2)
    ax.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
    ax.set(title=name, xlabel="ranks", ylabel="bytes a parameter, on each rank", ylim=(0, 17))
    ax.set_yticks(range(0, 17, 4))
axes[1].set_ylabel("")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
fig.suptitle("Stages 1 and 2 end at a floor; only stage 3 goes to zero")
plots.show(
    fig,
    name="bytes-per-parameter",
    alt="Bytes a parameter costs on each rank, against the number of ranks, for four stages and two "
    "precisions. Stage 0 stays at 16. In float32 stage 1 falls to 8 and stage 2 to 4; in mixed "
    "precision they fall to 4 and 2. Stage 3 is 16 divided by the number of ranks.",
)

# %% [markdown]
# The floor is what a stage does not shard: with many ranks stage 1 ends at 8 bytes in float32 and at 4 in mixed precision. Activations are missing here. They depend on the samples of each rank, and no stage touches them.
#
# ## By hand: flatten, pad, shard
#
# All parameters laid end to end make one flat tensor. Its length must be a multiple of n, so zeros are put behind it: **padding**. Then each rank's shard has the same length.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(0)
tiny = nn.Linear(2, 3)  # 6 weights and 3 biases


def flatten(tensors, n):
    """All numbers in one tensor, with zeros behind them to a multiple of n."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return F.pad(flat, (0, -len(flat) % n))


def unflatten(flat, like):
    sizes = [tensor.numel() for tensor in like]
    pieces = flat[: sum(sizes)].split(sizes)  # the padding stays behind
    return [piece.view_as(tensor) for piece, tensor in zip(pieces, like, strict=True)]


parameters = list(tiny.parameters())
for n in (1, 2, 4):
    shards = flatten(parameters, n).chunk(n)
    back = unflatten(torch.cat(shards), parameters)
    same = all(torch.equal(a, b) for a, b in zip(back, parameters, strict=True))
    padding = sum(map(len, shards)) - 9
    print(f"n = {n}: shards of {[len(s) for s in shards]}, padding {padding}, back again: {same}")

# %% [markdown]
# A training step of stage 2 is then: forward and backward as ever; **reduce-scatter** the flat gradients, so that each rank gets the sum of *its* shard only; step an ordinary Adam on that shard; **all-gather** the shards into whole parameters. Adam looks at each number alone, so it does not notice that it sees only some of them.
#
# **Predict.** Two ranks do this with half of the global batch each. Another model takes the same steps on one device, with the whole batch. Do the weights agree? What part of the optimizer state does a rank have?


# %%
# NBVAL_CHECK_OUTPUT
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def small_model(device=None):
    torch.manual_seed(0)  # all ranks start equal
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)
    return nn.Sequential(*layers).double().to(device or my_device())


def batches(steps, rank=0, n=1):
    """The same global batches everywhere; of each, the part of this rank."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = (torch.randn(16, width, generator=draw).double() for width in (6, 3))
        yield x.chunk(n)[rank].to(my_device()), y.chunk(n)[rank].to(my_device())


def on_one_device(steps, lr=0.01):
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# Their names before PyTorch 2.13 were reduce_scatter_tensor and all_gather_into_tensor.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def stage_2_by_hand(steps):
    rank, n = dist.get_rank(), dist.get_world_size()
    model = small_model()
    parameters = list(model.parameters())
    mine = flatten(parameters, n).chunk(n)[rank].clone()  # a slice would keep the whole
    optimizer = torch.optim.Adam([mine], lr=0.01)
    for x, y in batches(steps, rank, n):
        F.mse_loss(model(x), y).backward()
        gradients = flatten([p.grad for p in parameters], n)
        mine.grad = torch.empty_like(mine)
        reduce_scatter(mine.grad, gradients)
        mine.grad /= n  # the mean of the ranks' means
        model.zero_grad()
        optimizer.step()
        whole = torch.empty_like(gradients)
        all_gather(whole, mine)
        with torch.no_grad():
            for parameter, value in zip(parameters, unflatten(whole, parameters), strict=True):
                parameter.copy_(value)
    error = max(
        (a - b).abs().max().item() for a, b in zip(parameters, on_one_device(steps), strict=True)
    )
    state = optimizer.state[mine]
    return error, sum(p.numel() for p in parameters), state["exp_avg"].numel()


by_hand = launch(stage_2_by_hand, 2, 20)
for rank, (_, count, state) in enumerate(by_hand):
    print(f"rank {rank}: {count} parameters, Adam's first number for {state} of them, with padding")
print("weights equal one device's, below 1e-12:", max(error for error, *_ in by_hand) < 1e-12)
assert max(error for error, *_ in by_hand) < 1e-12

# %% [markdown]
# They agree to rounding. The difference need not be 0: one device sums over 16 samples, the ranks over 8 each and then add the two sums. In float64 that leaves an error near 1e-16 in each gradient. (Why float64? Adam divides a gradient by its own size, so where a gradient is nearly 0, its rounding error counts like a gradient. In float64 these errors are small enough for so strict a test.)
#
# Written like this, it saves little but Adam's state: the parameters are there whole *and* as a shard, and for a moment the gradients twice, in `p.grad` and in the flat copy. Stage 3 works layer by layer: gather a layer's parameters, use them, forget them.
#
# In code that you read, the two collectives may have their older names. This cell calls one under both:


# %% then="dist.reduce_scatter_tensor, dist.all_gather_into_tensor" now="dist.reduce_scatter_single, dist.all_gather_single" since="PyTorch 2.13"
def old_and_new():
    whole, old = torch.arange(4.0, device=my_device()), torch.empty(2, device=my_device())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        dist.reduce_scatter_tensor(old, whole)
    new = torch.empty_like(old)
    reduce_scatter(new, whole)
    return [str(w.message) for w in seen if w.category is FutureWarning], torch.equal(old, new)


said, same = launch(old_and_new, 2)[0]
print(*said, f"old and new give the same: {same}", sep="\n")
assert same and (said or not hasattr(dist, "reduce_scatter_single"))

# %% [markdown]
# ## PyTorch's own: one change each
#
# | stage | API | what happens |
# |---|---|---|
# | 1 | DDP with `ZeroRedundancyOptimizer` | DDP as it was; each rank steps a part of the parameters, then broadcasts what is new to the others |
# | like 2 | `fully_shard(module, reshard_after_forward=False)` | instead of DDP; between steps all three kinds are shards; parameters gathered in forward stay until backward |
# | 3 | `fully_shard(module)` | the same, but parameters go after each layer's forward, and are gathered once more in backward |
#
# The module on which you call it last, from the inside to the outside, is the **root**: the whole model. If you do not say otherwise, what the *root* gathers for itself stays until backward, even in the last row.
#
# `fully_shard` is also called **FSDP2** (fully sharded data parallel). It does not cut one long flat tensor: it cuts *each parameter* into rows. The ranks come as a **mesh**, a grid of ranks; here it is a line of n. Look at what one rank then has.


# %%
# NBVAL_CHECK_OUTPUT
def mesh_of(*shape, names=None):
    return init_device_mesh(my_device().type, shape, mesh_dim_names=names)


def look_inside():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)).to(my_device())
    fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return [
        (name, type(p).__name__, type(p.data).__name__, tuple(p.shape), tuple(p.to_local().shape))
        for name, p in model.named_parameters()
    ]


views = launch(look_inside, 2)
print(f"{'':10}{'type':>10}{'says':>10}{'rank 0 has':>14}{'rank 1 has':>14}")
for (name, _, kind, says, zero), (*_, one) in zip(*views, strict=True):
    print(f"{name:10}{kind:>10}{says!s:>10}{zero!s:>14}{one!s:>14}")


# %% then="FullyShardedDataParallel(model)" now="fully_shard(model)" since="PyTorch 2.6"
def then_and_now():
    then = "it runs"
    try:
        FullyShardedDataParallel(small_model())
    except RuntimeError as refused:
        then = str(refused)
    now = fully_shard(small_model(), mesh=mesh_of(dist.get_world_size()))
    return my_device().type, then, type(now).__name__


where, then, now = launch(then_and_now, 2)[0]
print(f"then, on {where}: {then}\nnow,  on {where}: {now}")
assert where == "cuda" or "accelerator" in then

# %% [markdown]
# The parameters have become **DTensors** (distributed tensors): they speak of the whole shape and hold one shard, `to_local()`. Five rows on two ranks are 3 and 2. One row is 1 and *0*: a rank may have nothing of a parameter.
#
# Older programs use `FullyShardedDataParallel` (FSDP1), which came from [FairScale](https://github.com/facebookresearch/fairscale); [PyTorch's tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html) calls it deprecated. Where there is no GPU it does not even start, as the cell above shows if you have none. `fully_shard` returns the model that you gave it, with a new class: `nn.Sequential` became `FSDPSequential`.
#
# ## Memory of a rank, with and without resharding
#
# A model with more parameters than activations: eight layers of 512 × 512 and one of 512 × 10, and 16 samples on each rank. Each call of `fully_shard` makes a **group**, which is gathered at once. So it is called for each layer, and then for the model. "One group" is somebody who called `fully_shard(model)` only.

# %%
WIDTH, DEPTH, SAMPLES = 512, 8, 16
METHODS = ["DDP", "stage 1", "like 2", "stage 3", "one group"]


def make_model(device=None):
    torch.manual_seed(0)
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device or my_device())


def shard_model(model, groups=True, **options):
    """Each layer with parameters is a group of its own, and the model is their root."""
    mesh = mesh_of(dist.get_world_size())
    for layer in model:
        if groups and isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def build(method, model):
    if method in ("DDP", "stage 1"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        options = {"reshard_after_forward": False} if method == "like 2" else {}
        shard_model(model, groups=method != "one group", **options)
    if method == "stage 1":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer


def make_batch():
    torch.manual_seed(100 + dist.get_rank())  # each rank has samples of its own
    x, y = torch.randn(SAMPLES, WIDTH), torch.randint(0, 10, (SAMPLES,))
    return x.to(my_device()), y.to(my_device())


def train(model, optimizer, x, y, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


# %% [markdown]
# (`gradient_as_bucket_view=True` saves DDP a second copy of the gradients, so that the comparison is fair. The buckets themselves stay after `zero_grad()`, so the meter is told of them.) The meter starts after two steps, when Adam has its state, and after `zero_grad()`.
#
# **Predict.** Two ranks, float32. DDP has 16 bytes a parameter. What do the others keep between steps? How many bytes a parameter does "like 2" hold right after the forward pass, when it has no gradients yet? And whose *peak* is lowest?


# %%
def weigh(method):
    memory.release()  # what the method before has left
    model, optimizer = build(method, make_model())
    x, y = make_batch()
    train(model, optimizer, x, y, steps=2)
    # DDP's gradients lie in its buckets, which stay: kept here, they are counted.
    ddp = isinstance(model, DistributedDataParallel)
    buckets = [p.grad for p in model.parameters()] if ddp else []
    optimizer.zero_grad()
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds its Adam inside
    with memory.meter(model, inner, x, y, buckets, record=True) as meter:
        start = len(meter.changes)  # the meter has counted what was there
        loss = F.cross_entropy(model(x), y)
        forward, backward = meter.live, len(meter.changes) - start
        loss.backward()
        step = len(meter.changes) - start
        optimizer.step()
        after, changes = meter.by_kind(), meter.changes[start:]
    return {"after": after, "forward": forward, "peak": meter.peak,
            "changes": changes, "begins": {"backward": backward, "step": step}}  # fmt: skip


by_rank = launch(lambda: {method: weigh(method) for method in METHODS}, 2)
weights = {method: [answers[method] for answers in by_rank] for method in METHODS}
COUNT = sum(p.numel() for p in make_model().parameters())
N = 4 * COUNT  # bytes of all parameters
KEPT = ["parameters", "gradients", "optimizer state"]
print(f"{COUNT:,} parameters, N = {memory.size(N)}; MiB on rank 0")
print(f"{'':10}", *(f"{kind:>16}" for kind in [*KEPT, "after forward", "peak"]))
for method, (first, _) in weights.items():
    row = [*(first["after"][kind] for kind in KEPT), first["forward"], first["peak"]]
    print(f"{method:10}", *(f"{value / MiB:16.1f}" for value in row))

# %%
# NBVAL_CHECK_OUTPUT
measured = {}
for method, answers in weights.items():
    # ZeroRedundancyOptimizer gives whole parameters to the ranks, so take the ranks' mean.
    kept = sum(answer["after"][kind] for answer in answers for kind in KEPT) / 2
    measured[method] = kept / COUNT
    print(f"{method:10} keeps {measured[method]:.1f} bytes a parameter on each rank")
for method, stage in zip(METHODS, (0, 1, 3, 3, 3), strict=True):
    assert abs(measured[method] - bytes_per_parameter(stage, 2, FLOAT32)) < 0.01, method
peaks = {method: answers[0]["peak"] for method, answers in weights.items()}
print("lowest peak:", min(peaks, key=peaks.get))
print("one group peaks above stage 3 by more than N:", peaks["one group"] - peaks["stage 3"] > N)

# %%
NAMES = [*KEPT, "activations (thin)", "other: gathered layers, buckets, buffers"]
HATCHES = ["", "//", "..", "xx", "--"]
fig, axes = plt.subplots(1, 3, figsize=(9.5, 4.0), sharey=True)
for ax, method in zip(axes, ("DDP", "like 2", "stage 3"), strict=True):
    run = weights[method][0]
    lines = [[value / MiB for value in kind] for kind in zip(*run["changes"], strict=True)]
    layers = ax.stackplot(range(len(lines[0])), lines, colors=plots.COLOURS[:5], labels=NAMES)
    for layer, hatch in zip(layers, HATCHES, strict=True):
        layer.set(hatch=hatch, edgecolor="white", linewidth=0)
    for name, place in run["begins"].items():
        ax.axvline(place, color="black", linestyle=":", linewidth=1.2, marker="")
        ax.text(place, 1.02, name, fontsize=9, ha="center", transform=ax.get_xaxis_transform())
    ax.set(title=f"{method}\n", xlabel="one change after the other", ylabel="MiB on rank 0")
    ax.margins(x=0)
for ax in axes[1:]:
    ax.set_ylabel("")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
low = weights["stage 3"][0]["peak"] / weights["DDP"][0]["peak"]
fig.suptitle(f"One step: on two ranks, stage 3 peaks at {low:.2f} of DDP's peak")
plots.show(
    fig,
    name="memory-of-a-step",
    alt="Memory of rank 0 during one step, stacked by kind, for DDP, for fully_shard without "
    "resharding and for stage 3. The kept parts of the sharded ones are half of DDP's. Without "
    "resharding, gathered parameters pile up in the forward pass and go in the backward pass; in "
    f"stage 3 only a few layers are gathered at a time. Its peak is {low:.2f} of DDP's.",
)

# %% [markdown]
# The x axis is no time: each allocation or release is one place, and the panels have different numbers of them. "Other" is where the gathered layers are. In "like 2" they pile up during the forward pass: after it, 4 bytes of gathered parameters, a shard of 2, and 4 of Adam's state make 10 bytes a parameter. In stage 3 a layer is gathered, used, and forgotten; it comes again for the backward pass. The peak is above what is kept, because a gathered layer, the next one and their whole gradients need room. "One group" gathers everything at once and has all whole gradients at once, and being the root it does not even let go after the forward pass (see "after forward" in the table): call `fully_shard` for the layers too.
#
# Three details of the figure. DDP makes its gradients inside its buckets, which are there all the time, and count as "other" until backward fills them. The teeth during `step` are Adam's intermediate results. And a peak may differ a little from run to run, because the thread that sends a buffer may let go of it late; so does what is left of "other" in the sharded `step`.
#
# Between steps "like 2" keeps as little as stage 3, less than the paper's stage 2: what it keeps whole it keeps only between forward and backward.
#
# ## What it costs: bytes sent
#
# To see the traffic, listen to PyTorch's dispatcher: every operation passes it, collectives too, under the name `c10d`. The counter notes the bytes of the *whole* tensor, the larger side of a collective. From it follows what a rank has to send. In a ring of p ranks, a reduce-scatter, an all-gather or a broadcast of N bytes makes each rank send (p−1)/p · N on average, and an all-reduce twice that (lesson 04 counts that of the all-reduce).
#
# **Predict.** N is the bytes of all parameters. With two ranks DDP's all-reduce makes a rank send N bytes a step. How much does each of the others make it send? Remember the layers that are gathered twice, and the root.


# %%
# NBVAL_CHECK_OUTPUT
class Wire(TorchDispatchMode):
    """Bytes of the whole tensor, and number of calls, of each kind of collective."""

    WORDS = {"allreduce": "all-reduce", "allgather": "all-gather",
             "reduce_scatter": "reduce-scatter", "broadcast": "broadcast"}  # fmt: skip

    def __init__(self):
        super().__init__()
        self.whole, self.calls = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            name = operation.overloadpacket.__name__.strip("_")
            kind = next((word for key, word in self.WORDS.items() if name.startswith(key)), name)
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            self.whole[kind] += max((t.nbytes for t in tensors), default=0)
            self.calls[kind] += 1
        return operation(*args, **(kwargs or {}))

    def sent(self, ranks):
        """Bytes that each rank sends in a ring, on average."""
        return sum(n * (1 + (kind == "all-reduce")) for kind, n in self.whole.items()) * (
            (ranks - 1) / ranks
        )


def listen(method):
    model, optimizer = build(method, make_model())
    x, y = make_batch()
    train(model, optimizer, x, y, steps=2)
    with Wire() as wire:
        train(model, optimizer, x, y)
    return dict(wire.whole), dict(wire.calls), wire.sent(dist.get_world_size())


def five_rows():
    layer = nn.Linear(4, 5, bias=False).to(my_device())
    fully_shard(layer, mesh=mesh_of(dist.get_world_size()))
    with Wire() as wire:
        layer(torch.zeros(1, 4, device=my_device()))
    return wire.whole["all-gather"]


traffic, _ = launch(lambda: {method: listen(method) for method in METHODS}, 2)
for method, (whole, calls, sent) in traffic.items():
    texts = [f"{kind} {whole[kind] / N:.0f} N in {calls[kind]}" for kind in sorted(whole)]
    print(f"{method:10}{', '.join(texts):48} a rank sends {sent / N:.1f} N")
print("a weight of 5 × 4 is", 5 * 4 * 4, "bytes, its all-gather", launch(five_rows, 2)[0])

# %% [markdown]
# Gathering once costs nothing extra: reduce-scatter and all-gather are the two halves of an all-reduce. Gathering again for the backward pass costs half as much again. That is the price of stage 3. "One group" does not pay it, because it is the root; its price is the peak. Stage 1 pays as much as stage 3, without need: DDP has already all-reduced all gradients when the optimizer broadcasts the new parameters. Groups decide the number of messages (the last number of each entry); with the same resharding the bytes are the same.
#
# The last line shows that FSDP2 **pads**: 5 rows on two ranks are 3 and 2, and a row of zeros makes the two messages equally long. All this counts bytes, not time. How much of the time hides behind computing depends on the link.
#
# ## The same weights as DDP
#
# Less memory, other messages: is it still the same training? Twenty steps of each method on the small float64 model, then the whole weights are put together again: `full_tensor()`, an all-gather on all ranks.


# %%
# NBVAL_CHECK_OUTPUT
def final_weights(method, steps):
    model, optimizer = build(method, small_model())
    for x, y in batches(steps, dist.get_rank(), dist.get_world_size()):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def differences(steps):
    """Of each method: the largest difference to DDP's weights, and to one device's."""
    ends = {method: final_weights(method, steps) for method in METHODS}
    others = ends["DDP"], torch.cat([p.flatten() for p in on_one_device(steps, lr=1e-3)])
    return {
        method: [(end - other).abs().max().item() for other in others]
        for method, end in ends.items()
    }


different, _ = launch(differences, 2, 20)
for method, (to_ddp, to_one) in different.items():
    print(f"{method:10}as DDP, below 1e-12: {to_ddp < 1e-12}", end="; ")
    print(f"as one device, below 1e-12: {to_one < 1e-12}")
    assert to_ddp < 1e-12 and to_one < 1e-12

# %% [markdown]
# The same to rounding, as before. Neither difference need be 0: one device adds the samples in another order, and with many ranks the methods add the ranks' sums in different orders too.
#
# ## Mixed precision: gather in 16 bits
#
# `MixedPrecisionPolicy` decides in which type parameters are gathered and gradients reduced. The shards, and so the optimizer, stay in float32. This machine may have no instructions for bfloat16 ([lesson 17](17_precision_and_recompute.ipynb) measures that), so look at bytes and results, not at speed.
#
# **Predict.** N is still the size in float32. The model is sharded as in stage 3. How many bytes does a rank send with bfloat16 parameters, and gradients reduced in float32? With both in bfloat16?


# %%
# NBVAL_CHECK_OUTPUT
half, full = torch.bfloat16, torch.float32
POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "gather 16 bits": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=full, output_dtype=full),
    "both 16 bits": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, output_dtype=full),
}


def with_policy(policy):
    model = shard_model(make_model(), mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = make_batch()
    losses = [train(model, optimizer, x, y) for _ in range(2)]
    with Wire() as wire:
        losses.append(train(model, optimizer, x, y))
    kinds = {p.dtype for p in model.parameters()}, {p.grad.dtype for p in model.parameters()}
    return losses, wire.sent(2), kinds


policies, _ = launch(lambda: {name: with_policy(p) for name, p in POLICIES.items()}, 2)
print(f"{'':16}{'sent':>8}{'shards':>16}{'their gradients':>18}")
for name, (_, sent, kinds) in policies.items():
    kept, gradients = (", ".join(str(kind) for kind in each) for each in kinds)
    print(f"{name:16}{sent / N:6.2f} N{kept:>16}{gradients:>18}")

# %%
for name, (losses, *_) in policies.items():
    off = abs(losses[-1] - policies["float32"][0][-1]) / policies["float32"][0][-1]
    line = " ".join(f"{loss:.5f}" for loss in losses)
    print(f"{name:16}loss of rank 0: {line}  ({off:.4%} from float32)")
    assert losses[-1] < losses[0] and off < 0.05, "16 bits round, but they learn the same"
print(
    "the first loss, if it were rounded to bfloat16:",
    torch.tensor(policies["float32"][0][0]).to(half).item(),
)

# %% [markdown]
# The gathered parameters are half as large on the wire. The computing inside is in 16 bits, so the losses differ from float32, a little. Without `output_dtype=torch.float32` the output would be in 16 bits, and the loss with it: the last line shows how coarse that is. What Adam works on is float32, as in mixed precision of the first table, but without its extra copy: the float32 shard *is* the copy. Reducing in bfloat16 rounds each sum to 8 bits. With two ranks that is one addition; with hundreds it is worth a thought, so `reduce_dtype=torch.float32` is the careful choice.
#
# ## Save sharded, load on another number of ranks
#
# So far every rank *built* the whole model and cut it then. A model that does not fit would fail there. On the **meta device** tensors have shapes and no memory: build there, shard, and only then ask for memory. The numbers in it are undefined, until you load them.


# %%
def building(meta):
    device = torch.device("meta") if meta else my_device()
    with memory.meter(device=my_device()) as meter:
        with device:
            model = shard_model(make_model(device))
        if meta:
            model.to_empty(device=my_device())  # room for the shards, without numbers
    return meter.peak


for where, meta in {"the device": False, "meta": True}.items():
    print(f"built on {where:10}: peak {launch(building, 2, meta)[0] / N:.1f} N")

# %% [markdown]
# On the device the peak is above N: while a layer is cut, the whole and its shards are there side by side. From the meta device it is what the shards take.
#
# `torch.distributed.checkpoint` (here `dcp`) lets each rank write its own shards, and a small file that says what lies where. When it loads, each rank reads what *it* needs, however many ranks there are now.


# %%
def sharded(device):
    """A model and its Adam; whole when there is one rank. From "meta": without numbers."""
    with torch.device(device):
        model = small_model(device=device)
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    if device == "meta":
        model.to_empty(device=my_device())
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def all_state(model, optimizer):
    """Every parameter and Adam's two numbers for it, put together on all ranks."""
    tensors = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            tensors.append(full.cpu())
    return tensors


def save(folder):
    rank, n = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(my_device())
    for x, y in batches(3, rank, n):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)  # all ranks
    return all_state(model, optimizer)


def load(folder):
    model, optimizer = sharded("meta")
    of_model, of_optimizer = get_state_dict(model, optimizer)  # makes Adam's state if there is none
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=folder)  # in place: each rank reads its part
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    rows = [len(p.to_local() if hasattr(p, "to_local") else p) for p in model.parameters()]
    return all_state(model, optimizer), rows, list(of_model)


# %%
# NBVAL_CHECK_OUTPUT
with tempfile.TemporaryDirectory() as folder:
    saved, _ = launch(save, 2, folder)
    print("files:", sorted(os.listdir(folder)))
    for n in (1, 4):
        # Four ranks share the devices of two, where there are not more: nothing is timed here.
        answers = launch(load, n, folder, oversubscribe=n > 2)
        equal = all(
            torch.equal(a, b) for loaded, *_ in answers for a, b in zip(loaded, saved, strict=True)
        )
        print(f"n = {n}: first weight's rows {[rows[0] for _, rows, _ in answers]}, equal: {equal}")
        assert equal
    print("names of the parameters:", answers[0][2])

# %% [markdown]
# Equal to the last bit, and Adam's state too, on one rank and on four. Nine rows on four ranks are 3, 3, 3 and none. The names are those of the model before `fully_shard`, so the file also fits the model without FSDP: the load on one rank shows it.
#
# ## Optional: together with tensor parallelism
#
# This part rests on [lesson 08](08_model_and_pipeline_parallel.ipynb). Without it go on to the first mistake.
#
# Four ranks make a 2-D **mesh**: two rows, two columns. Along one dimension a layer is split: the first weight by its output (`ColwiseParallel`), the second by its input (`RowwiseParallel`). Along the other, `fully_shard` shards what is left over the replicas. The two ranks of a tensor-parallel pair see the *same* samples.
#
# Where you have fewer than four devices, four ranks share them. Timings would mean nothing; results do.
#
# **Predict.** A weight in PyTorch has a row for each output and a column for each input. The first has 8 rows and 6 columns, the second 4 and 8. `fully_shard` cuts rows. What shapes does each of four ranks have?


# %%
# NBVAL_CHECK_OUTPUT
def two_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3))
    return model.double().to(my_device())


def two_layers_alone(steps):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(steps):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [model[i].weight.detach().cpu() for i in (0, 2, 4)]


def two_dimensions(steps):
    mesh = mesh_of(2, 2, names=("data", "tensor"))
    model = two_layers()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])  # tensor parallelism first, then the shards
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = mesh["data"].get_local_rank()
    for x, y in batches(steps, replica, 2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    alone = two_layers_alone(steps) if dist.get_rank() == 0 else None
    return [model[i].weight.to_local().detach().cpu() for i in (0, 2, 4)], alone


answers = launch(two_dimensions, 4, 10, oversubscribe=True)
parts, want = [weights for weights, _ in answers], answers[0][1]
for rank, (first, second, _) in enumerate(parts):
    shapes = tuple(first.shape), tuple(second.shape)
    print(f"rank {rank} (replica {rank // 2}, half {rank % 2}): first and second weight {shapes}")

# Put together by hand: rank 2·d + t has replica d's rows of the half t.
halves = [[torch.cat([parts[t][i], parts[2 + t][i]]) for t in (0, 1)] for i in (0, 1)]
first, second = torch.cat(halves[0], dim=0), torch.cat(halves[1], dim=1)
third = torch.cat([parts[0][2], parts[2][2]])
error = max((a - b).abs().max() for a, b in zip((first, second, third), want, strict=True))
print("weights equal one device's, below 1e-12:", bool(error < 1e-12))
assert error < 1e-12

# %% [markdown]
# Each rank has a quarter of each split weight. On a cluster the tensor dimension goes inside a machine, where links are fast, because each layer waits for what it sends: activations cannot be fetched ahead, as parameters can. The data dimension goes across machines ([PyTorch's tutorial](https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html) does so).
#
# ## Break it: the optimizer came first
#
# `fully_shard` *replaces* the parameters of the model. An optimizer that was made before has the old ones.
#
# **Predict.** Is there an error?


# %%
# NBVAL_CHECK_OUTPUT
def four_losses(optimizer_first):
    model = make_model()
    if optimizer_first:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shard_model(model)
    if not optimizer_first:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = make_batch()
    losses = [train(model, optimizer, x, y) for _ in range(4)]
    mine = {id(p) for p in model.parameters()}
    shared = sum(id(p) in mine for group in optimizer.param_groups for p in group["params"])
    return losses, shared


orders = {"optimizer first": True, "shard first": False}
answers, _ = launch(lambda: [four_losses(first) for first in orders.values()], 2)
for name, (losses, shared) in zip(orders, answers, strict=True):
    still, learns = losses[-1] == losses[0], losses[-1] < losses[0]
    print(f"{name:16} loss stands still: {still}, falls: {learns}; parameters in common: {shared}")

# %% [markdown]
# No error, no warning, and the loss stands still. The last number is how to find it: model and optimizer have no parameter in common. Shard first, then make the optimizer.
#
# ## Break it: a norm of my shards
#
# Gradients are often **clipped**: when the norm of all gradients together is above a limit, all are scaled down. A rank that computes the norm of what it has gets the norm of its shards.


# %%
# NBVAL_CHECK_OUTPUT
def norms():
    model = shard_model(make_model())
    x, y = make_batch()
    F.cross_entropy(model(x), y).backward()
    mine = torch.cat([p.grad.to_local().flatten() for p in model.parameters()]).norm()
    squares = mine.square()
    total = squares.clone()
    dist.all_reduce(total)
    torchs = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e9)  # clips nothing: the norm
    ddp = DistributedDataParallel(make_model())
    F.cross_entropy(ddp(x), y).backward()
    want = torch.cat([p.grad.flatten() for p in ddp.parameters()]).norm()
    # Each rank clips to 1 by its own norm: the cosine between that step of SGD and the right one.
    products = torch.stack([squares / mine, squares / mine**2, squares])
    dist.all_reduce(products)
    cosine = products[0] / (products[1] * products[2]).sqrt()
    norms = [n.item() / want.item() for n in (mine, total.sqrt(), torchs.full_tensor())]
    return norms, math.degrees(math.acos(cosine.item()))


answers = launch(norms, 2)
for number, name in enumerate(["of my shards", "squares all-reduced", "clip_grad_norm_"]):
    of_ddp = [f"{ratios[number]:.2f}" for ratios, _ in answers]
    print(f"{name:20} in parts of DDP's norm, rank 0 and rank 1: {of_ddp}")
print(f"clipped by the norms of the shards, SGD steps {answers[0][1]:.0f} degrees off")
assert abs(answers[0][0][1] - 1) < 1e-5 and abs(answers[0][0][2] - 1) < 1e-5
assert answers[0][1] > 1, "another direction"

# %% [markdown]
# With a norm of its own each rank scales its shards by another factor, and so the step points in another direction: the last line prints the angle. There is no error, since each number is a true norm, but of one rank's shards. `torch.nn.utils.clip_grad_norm_` knows DTensors; what you compute from `to_local()` yourself needs an all-reduce of the squares.
#
# ## Break it: rank 0 saves
#
# With DDP only rank 0 saves, because all ranks have the same. With shards, asking for the whole is a collective. The launch gets a deadline of a few seconds.


# %%
# NBVAL_CHECK_OUTPUT
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on rank 0, in its main memory


def rank_0_saves():
    model = shard_model(small_model())
    if dist.get_rank() == 0:
        get_model_state_dict(model, options=WHOLE)


def all_ranks_call():
    return len(get_model_state_dict(shard_model(small_model()), options=WHOLE))


print("all ranks call it, entries on rank 0 and rank 1:", launch(all_ranks_call, 2))
try:
    launch(rank_0_saves, 2, timeout=6)
except LaunchTimeout as deadline:
    hung = str(deadline)
else:
    raise AssertionError("rank 0 alone must hang")
print("only rank 0 calls it: rank 1 has returned:", "rank 1 has returned" in hung, end="; ")
print("rank 0 has returned:", "rank 0 has returned" in hung)

# %%
print(*(line for line in hung.splitlines() if line and not line.startswith(" ")), sep="\n")

# %% [markdown]
# The symptom is a hang. The launch says where each rank is: rank 0 waits inside a call that needs everybody, and rank 1 has passed it by. The cure: all ranks call it. With `cpu_offload=True` rank 0 gets the whole dictionary, and the others an empty one. For anything that is large, save sharded instead.
#
# ## Which stage, then?
#
# When DDP fits, take DDP. When it does not, take "like 2": in the tables above it keeps as little as stage 3 between steps and sends no more than DDP. When the gathered parameters do not fit either, take stage 3. Stage 1 keeps more than "like 2" here, peaks higher and sends more; it is for programs whose DDP must stay. All this was about bytes. Whether the all-gather of the next layer hides behind this layer's computing depends on the GPU and the links, so measure it on the machine that you will use.
#
# As a script the training functions start with `dist.init_process_group()`, and this starts them: `torchrun --standalone --nproc-per-node=2 train.py`.
#
# ## Exercise
#
# [Exercise 09](../exercises/09_sharded_training.ipynb): the memory of a rank at each stage, and FSDP2's shards with padding, there and back. About 30 minutes.
#
# ## Recap
#
# DDP keeps n copies of what is the same everywhere; stages 1, 2 and 3 shard the optimizer's state, then the gradients, then the parameters. Reduce-scatter and all-gather are the halves of an all-reduce, so stage 2 sends what DDP sends, and stage 3 half as much again. Shards are for all ranks: norms, checkpoints and whole tensors are collectives, and the optimizer is made from the shards.
#
# 1. 1 billion parameters, float32, Adam, 4 ranks: how many GiB a rank for parameters, gradients and state under DDP, and under stage 3?
# 2. Your job was saved on 8 ranks and has 6 now. What do you have to convert?
# 3. After a move to `fully_shard` the loss is the same number at every step. Where do you look first?
#
# <details><summary>Answers</summary>
#
# 1. 16 bytes each are 16·10⁹ bytes, 14.9 GiB; a quarter, 3.7 GiB, plus room for gathered layers; activations come on top of both.
# 2. No file, if it was saved with `torch.distributed.checkpoint`: each rank reads what it needs. But 6 ranks with the same samples each make a smaller global batch.
# 3. Whether the optimizer was made before `fully_shard`: compare its parameters with the model's.
#
# </details>
#
# Go on with [exercise 09](../exercises/09_sharded_training.ipynb).
