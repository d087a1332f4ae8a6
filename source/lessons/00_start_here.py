# ---
# jupyter:
#   course:
#     rows: []
#     minutes: {read: 5, do: 5}
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
# # Start here: two devices on your machine
#
# After this lesson you can say which devices the course uses on *your* machine, and you have run a first program on two of them.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 5 to do |
# | **You should know** | Python functions; what a tensor is |
# | **You will** | list your devices · run a function on two of them · read the error of a process that failed · use `check` and `hint` |
# | **Runs on** | no GPU, or one: two pinned CPU cores · two GPUs or more: the GPUs |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import os
import time

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from course_utils import plots
from course_utils.devices import census, slots
from course_utils.grading import check, hint
from course_utils.launch import RankError, launch

plots.use_style()

# %% [markdown]
# ## What is in this machine?
#
# A **device** is a thing that computes on its own, with its own clock and its own work to do. Most courses on this subject mean a GPU, and stop here if you do not have two. This one goes on: a CPU core that one process has to itself is a device too. `census` lists what you have.

# %%
print(census())

# %% [markdown]
# The line that begins with *tier* matters most. It decides what the lessons call a device. Lines that begin with *not read* say what could not be asked here; without an NVIDIA driver that is as it should be.
#
# | tier | found | a device is | devices talk over |
# |---|---|---|---|
# | `cpu` | no GPU | a process pinned to one CPU core, with one compute thread | gloo (PyTorch), gRPC (TensorFlow) |
# | `gpu1` | one GPU | that GPU; two pinned cores where a lesson needs two devices | gloo, gRPC |
# | `gpuN` | two GPUs or more | each GPU | NCCL |
#
# A process is **pinned** when the operating system may run it on that core only. gloo, gRPC and NCCL are the libraries that carry the messages. Nothing falls back silently: a lesson asks for its devices, and stops with an error that says what to do when they are not there. This one asks for two.

# %%
# NBVAL_CHECK_OUTPUT
devices = slots(2)
assert len(devices) == 2
print("devices for this lesson:", len(devices))

# %% [markdown]
# ## Two processes, one sum
#
# Each device gets a process of its own. Its number is its **rank**, counted from 0. How many there are is the **world size**. All of them run the same function, and each asks which rank it is.
#
# A message in which all ranks take part is a **collective**. The one they need most is the **all-reduce**: every rank brings a tensor, and every rank leaves with the sum.
#
# **Predict.** Rank 0 brings `[1, 2, 3, 4]`. Rank 1 brings `[10, 20, 30, 40]`. What does rank 0 hold afterwards? And rank 1? Write both down, then run the cell.


# %%
# NBVAL_CHECK_OUTPUT
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def first_all_reduce():
    rank = dist.get_rank()
    mine = torch.tensor([1.0, 2.0, 3.0, 4.0], device=my_device()) * 10**rank
    dist.all_reduce(mine)  # sums over the ranks, in place
    return mine.tolist()


for rank, held in enumerate(launch(first_all_reduce, 2)):
    print(f"rank {rank} of {len(devices)} holds {held}")

# %% [markdown]
# Both hold the same sum. There is no main process that keeps the result: after an all-reduce every rank has it, which is what training needs.
#
# `launch(function, 2)` started the two processes, ran the function of this cell in each, and returned what each of them returned, in order of rank. On a cluster a launcher such as PyTorch's `torchrun` starts the processes; they run the same kind of function.
#
# ## Two devices, or one in disguise?
#
# Two processes could be sharing one core, each waiting while the other runs. So this needs proof, and a proof needs a control. Each rank does the same six pieces of work and writes down when each was done, three times over: rank 0 *alone* while rank 1 waits; both ranks on *two devices*; and, for comparison, both ranks moved to *one* core on purpose.
#
# **Predict.** One rank alone needs a certain time. How many times as long do two ranks need for twice the work, on two devices, and on one? Write two numbers down.


# %%
def six_pieces(matrix, products=12):
    """Do six equal pieces of work: when each was done, in seconds since the start."""
    start, done = time.perf_counter(), []
    for _ in range(6):
        for _ in range(products):
            product = matrix @ matrix
        product[0, 0].item()  # wait for the result: a GPU may still be working
        done.append(time.perf_counter() - start)
    return done


def three_ways(shared_core, size=768):
    matrix = torch.rand(size, size, device=my_device())
    six_pieces(matrix, products=1)  # the first products are slow: they wake the library up
    done = {}
    dist.barrier()  # nobody goes on before everybody is here
    if dist.get_rank() == 0:
        done["alone"] = six_pieces(matrix)
    dist.barrier()
    done["on two devices"] = six_pieces(matrix)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "any"
    if shared_core:
        os.sched_setaffinity(0, shared_core)  # from here on both ranks have this core only
        dist.barrier()
        done["on one, shared"] = six_pieces(matrix)
    return {"process": os.getpid(), "cores": cores, "done": done}


reports = launch(three_ways, 2, devices[0].cpus)  # what follows the 2 goes to the function
for slot, report in zip(devices, reports, strict=True):
    print(f"rank {slot.rank}: {slot.name}, process {report['process']}, cores {report['cores']}")
assert reports[0]["process"] != reports[1]["process"], "two ranks must be two processes"

# %%
ways = list(reports[0]["done"])
seconds = {way: max(r["done"][way][-1] for r in reports if way in r["done"]) for way in ways}
for way in ways:
    ratio = seconds[way] / seconds["alone"]
    print(f"{way:14}  {seconds[way]:.2f} s, {ratio:.2f} times as long as alone")

# %%
fig, ax = plt.subplots(figsize=(7, 3))
lanes = [(way, rank) for way in ways for rank in (0, 1) if way in reports[rank]["done"]]
for row, (way, rank) in enumerate(lanes):
    start = 0.0
    for number, stop in enumerate(reports[rank]["done"][way]):
        shade = 1.0 if number % 2 == 0 else 0.65
        ax.barh(row, stop - start, left=start, color=plots.COLOURS[rank], alpha=shade)
        start = stop
ax.set_yticks(range(len(lanes)), [f"{way}: rank {rank}" for way, rank in lanes])
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="time since the start (s)", ylabel="who worked")
gain = seconds["on two devices"] / seconds["alone"]
ax.set_title(f"Two devices: twice the work in {gain:.2f} times the time")
plots.show(
    fig,
    name="two-ranks-at-work",
    alt="Bars of six pieces of work over time, for rank 0 alone, for both ranks on two devices, "
    f"and for both on one core. Two devices take {gain:.2f} times as long as one rank alone.",
)

# %% [markdown]
# One row is one rank, and each shade is one piece. On two devices a piece takes about as long as alone: 1.00 would be perfect. On one shared core every piece takes about twice as long, because the ranks take turns. (With GPUs, or where the system cannot pin, the shared rows are missing.)
#
# Is your number for two devices far above 1? Most often another program keeps your cores busy: close it and run the cell again. Cores that are two threads of one physical core, and a shared way to the memory, also cost something. Timings in this course always come from *your* machine, so they share its troubles.
#
# ## When a rank fails
#
# With many processes, one often fails while the others wait for it. Here rank 1 meets a bad sample, while rank 0 is already waiting in an all-reduce that rank 1 will never join.
#
# **Predict.** Does this cell hang, blame rank 0, or name rank 1?


# %%
# NBVAL_CHECK_OUTPUT
def one_rank_fails():
    if dist.get_rank() == 1:
        raise ValueError("sample 17 is empty")
    dist.all_reduce(torch.ones(1, device=my_device()))  # rank 0 waits here


try:
    launch(one_rank_fails, 2)
except RankError as error:
    print(f"rank {error.rank} failed first: {error.type_name}: {error.message}")
else:
    raise AssertionError("the failure of rank 1 was not reported")

# %% [markdown]
# `launch` ended the waiting rank and raised the error of the rank that failed first. Without the `try` you would see that rank's whole traceback. Every launch also has a deadline (`timeout=120` seconds unless you say otherwise), so no cell waits for good; lesson 02 runs into one on purpose.
#
# ## How a lesson works
#
# - **Predict → Run → Explain.** Write your prediction down before you run a cell. A guess that turns out wrong is what you will remember.
# - **A claim is a cell.** What matters, a cell measures or asserts. Do not believe the text: change the cell and see. Cells that begin with `# NBVAL_CHECK_OUTPUT` print the same wherever the course's tests run, and are compared there.
# - **Exercises** lie beside the lessons, in the folder `exercises`. `check("…")` scores your answer and says what it still lacks. `hint("…", level=1)` helps, in three levels. Try that now.
#
# This is a first answer to a question that every lesson meets: the **global batch** is the number of samples in one step, over all ranks. How many does each rank take?


# %%
def local_batches(global_batch, world_size):
    """How many samples each rank takes: a list with one number a rank."""
    return [global_batch // world_size] * world_size


check("00-practice")

# %% [markdown]
# `check` says which property is missing. Ask for a hint.

# %%
hint("00-practice", level=1)

# %% [markdown]
# **Your turn.** Mend `local_batches` in the cell above and run it again until it has all its points. If you are stuck, ask for `level=2`, then `level=3`.
#
# ## What this machine cannot show
#
# Pinned cores compute, wait and send real messages. So this course measures what others draw: what a second device gains, how everybody waits for the slowest, and how a program hangs. What cores do not have is what belongs to GPUs alone: their own fast memory, and direct links from one to the next. Each lesson says what that leaves out, and shows figures from real GPUs where we have measured some. So far there are none: **not measured**.
#
# ## The map
#
# | | lesson | you will |
# |---|---|---|
# | 01 | [Device placement](01_device_placement.ipynb) | say where an operation runs, and prove it |
# | 02 | [Two devices, one sum](02_two_devices_one_sum.ipynb) | measure what a second device is worth, and when it costs |
# | 03 | [DataParallel](03_data_parallel.ipynb) | split a batch over devices in one process, and see why it stays uneven |
# | 04 | [DDP from scratch](04_ddp_from_scratch.ipynb) | turn a script for one device into one for many, and prove that it is the same |
# | 05 | [DDP in practice](05_ddp_in_practice.ipynb) | get the data, the batch, the learning rate and the evaluation right |
# | 06 | [Debugging clinic](06_debugging_clinic.ipynb) | find out why a job hangs, fails or learns the wrong thing |
# | 07 | [An experiment, done again](07_autoencoder_experiment.ipynb) | run, log, time and export an experiment that others can trust |
# | 08 | [Model and pipeline parallelism](08_model_and_pipeline_parallel.ipynb) | cut one model over two devices, between and inside its layers |
# | 09 | [Sharded training](09_sharded_training.ipynb) | keep only a part of the model on each rank |
# | 10 | [MirroredStrategy](10_mirrored_strategy.ipynb) | train one Keras model on two replicas, and prove that they equal one |
# | 11 | [Input and checkpoints](11_input_and_checkpoints.ipynb) | keep the devices fed, and go on after a crash where the run was |
# | 12 | [Many workers](12_multi_worker.ipynb) | run one TensorFlow program in several processes, here or on a cluster |
# | 13 | [Parameter servers](13_parameter_server.ipynb) | measure what it gains not to wait, and what it costs |
# | 14 | [Where memory goes](14_where_memory_goes.ipynb) | predict the bytes of a training step by kind, and weigh them |
# | 15 | [Out of memory](15_out_of_memory.ipynb) | find what holds the memory, and mend it |
# | 16 | [Batch size](16_batch_size.ipynb) | find the largest batch that fits, and lose no sample when it does not |
# | 17 | [Precision and recomputation](17_precision_and_recompute.ipynb) | train in less memory: 16 bits, recomputation, a frozen backbone |
#
# 01 and 02 use both PyTorch and TensorFlow, 03 to 09 PyTorch, 10 to 13 TensorFlow. Lessons appear in this table as they are written. 05 to 09 need 04; 10 needs 01; those on memory (14 to 17) need only 00.
#
# ## Recap
#
# A device is a process with a core or a GPU to itself. Ranks run the same function and meet in collectives such as the all-reduce. When a rank fails, read the error of the one that failed first.
#
# 1. Rank 0 brings `[1, 1]` to an all-reduce over three ranks, rank 1 `[2, 2]`, rank 2 `[3, 3]`. What does rank 2 hold afterwards?
# 2. Your machine has one GPU, and a lesson needs two ranks. What does the course call a device there?
# 3. A cell with two ranks has been silent for a minute. What are two things that could have happened?
#
# <details><summary>Answers</summary>
#
# 1. `[6, 6]`, like every other rank.
# 2. A pinned CPU core: the tier is `gpu1`, and two ranks need two devices.
# 3. A rank waits for a message that nobody will send (a hang), or a rank computes for long. The deadline of `launch` tells them apart: it ends the launch and prints where each rank was.
#
# </details>
#
# Go on with [lesson 01, Device placement](01_device_placement.ipynb).
