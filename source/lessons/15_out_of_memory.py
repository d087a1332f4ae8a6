# ---
# jupyter:
#   course:
#     rows: [O1, O2, O3, O4, O5, O7]
#     minutes: {read: 25, do: 20}
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
# # Out of memory: find what is kept, not what fell over
#
# You will read an out-of-memory error, find what keeps the memory, mend it, and go on, on one device and on two.
#
# | | |
# |---|---|
# | **Time** | 25 minutes to read, 20 to predict and run; the exercise takes 30 more |
# | **You should know** | what forward, backward and an optimizer's step do; ranks and `launch` ([lesson 00](00_start_here.ipynb)); generators (`yield`); parameters, gradients, optimizer state, activations ([lesson 14](14_where_memory_goes.ipynb), in one line below) |
# | **You will** | show that the line an error names is innocent · measure seven causes, and cures · test `del` and `gc.collect` · see what one rank's error does to the other |
# | **Runs on** | no GPU: a budget counts your tensors · a GPU: the same budget counts those on the GPU, and one cell shows CUDA's own figures · two ranks: pinned cores, or two GPUs |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import gc
import io
import linecache
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from course_utils import memory
from course_utils.devices import census, slots
from course_utils.launch import RankError, launch
from course_utils.memory import Budget, MiB

torch.set_num_threads(1)  # small sizes: more threads would only wait for each other

# %%
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# In one line, all that you need of lesson 14: a training step holds **parameters**, their **gradients**, the **optimizer state**, and **activations**, the results of the forward pass that the backward pass will need. Everything else, batches and temporary results, is called *other* here. An output that has a graph is counted as an activation as long as anybody keeps it. All sizes are in MiB, which is $2^{20}$ bytes.
#
# ## A real one, at a limit that you choose
#
# `memory.Budget(…, limit=…)` gives this device a limit. It counts the bytes of every tensor, and raises PyTorch's own `torch.OutOfMemoryError` when the next one would not fit.


# %%
ROWS, WIDTH = 4096, 64  # 4096 × 64 numbers of 4 bytes: 1 MiB


def make_model(place=device):
    torch.manual_seed(0)
    first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last).to(place)


def make_batch(rows=ROWS):
    return torch.randn(rows, WIDTH, device=device)


def train(keep, limit=None, steps=20):
    """Train for some steps; returns the peak of each in MiB."""
    model, peaks = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []  # somebody wants to plot the outputs later
    with Budget(model, optimizer, limit=limit) as meter:
        for step in range(1, steps + 1):
            meter.reset()  # the peak is this step's from here on
            batch = make_batch()
            output = model(batch)
            loss = (output - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep:
                seen.append((step, output))
            peaks.append(meter.peak / MiB)
    return peaks


# %% [markdown]
# For `backward` a step keeps three things of 1 MiB each: the batch, the output of the ReLU, and the difference `output - batch`. Remember these **3 MiB**.
#
# **Predict.** One line of `train` makes it need more in every step. Which line will the error name?


# %%
def blame(error, function):
    """The step in which `function` was when the error was raised, and the line it was at."""
    walk = traceback.walk_tb(error.__traceback__)
    frame, number = [at for at in walk if at[0].f_code is function.__code__][-1]
    line = linecache.getline(frame.f_code.co_filename, number).strip()
    return frame.f_locals.get("step"), line


try:
    train(keep=True, limit=int(11.5 * MiB))
except torch.OutOfMemoryError as error:
    print("step {}, at the line:  {}\n".format(*blame(error, train)))
    print(f"{type(error).__name__}: {error}")
else:
    raise AssertionError("11.5 MiB were enough")

# %% [markdown]
# ## The line that is blamed is innocent
#
# A traceback names the line that asked last. Try other limits, and look at what was alive. Then look at the peak of each step, without a limit, with the line `seen.append(…)` and without it.

# %%
# NBVAL_CHECK_OUTPUT
for limit in (4, 9, 12, 16, 20):
    try:
        train(keep=True, limit=limit * MiB)
    except torch.OutOfMemoryError as error:
        print("{:2} MiB: step {}, at {}".format(limit, *blame(error, train)))
        print("        alive:", str(error).split("(")[1].split(")")[0])

for keep in (True, False):
    print(f"peak of each step, keep={keep!s:5}:", *(f"{mib:.0f}" for mib in train(keep, steps=8)))

# %% [markdown]
# `seen.append((step, output))` allocates nothing, so it can never be the line that fails. It only keeps: 1 MiB more in each step. What fails is the line where a step is largest, here `backward`, or in step 1 the first line that does not fit at all. **A traceback shows the last straw. To find the cause, ask what has grown.** The breakdown in the error's text says of which kind it is: from 9 MiB on only the activations grow.
#
# ## One harness for all causes
#
# Every program below is a loop with a `yield` where a step ends. The harness runs eight steps and notes what is alive after each, and the highest moment. A healthy program stays flat.


# %%
def compare(**programs):
    """Print the MiB of tensors alive after each of eight steps of each program, and the peak."""
    print(f"{'MiB after step':19}", *(f"{step:5}" for step in range(1, 9)), "  peak")
    for name, program in programs.items():
        readings, running = [], program()
        with Budget(device=device) as meter:
            for _ in range(8):
                next(running)
                readings.append(meter.live / MiB)
        print(f"{name:19}", *(f"{mib:5.1f}" for mib in readings), f"{meter.peak / MiB:6.1f}")


# %% [markdown]
# ## Cause 1: a running total
#
# The best known leak of PyTorch: `total_loss += loss`. The loss is a tensor with a **graph**, the record of what it was computed from. The sum of two losses has a graph that holds both of theirs.
#
# **Predict.** Which keeps more: a program that only watches the loss, as in a validation loop, or one that calls `backward`?

# %%
# NBVAL_CHECK_OUTPUT
model = make_model()


def loss_of(batch):
    return (model(batch) - batch).square().mean()


def total_after_backward():
    total_loss = 0.0
    while True:
        loss = loss_of(make_batch())
        loss.backward()
        total_loss += loss
        yield


def total(what):
    """A program that adds `what(loss)` of every loss, and never calls backward."""

    def program():
        total_loss = 0.0
        while True:
            total_loss += what(loss_of(make_batch()))
            yield

    return program


compare(
    alone=total(lambda loss: loss),
    after_backward=total_after_backward,
    detach=total(torch.Tensor.detach),
    item=total(torch.Tensor.item),
)

# %% [markdown]
# Without `backward` every step stays whole: 3 MiB. `backward` frees the saved activations as it goes: the 0.1 are parameters and gradients. What stays even then is the chain of graph nodes, small objects of the process that no meter of tensors sees.
#
# Common advice (from bootcamp notes of 2021) is `float(loss)` or `loss.item()`. Both mend it; do both run without a warning?

# %% then="float(loss)" now="loss.item()" since="PyTorch 2.8: the old way warns"
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    loss_of(make_batch()).item()
    print("warnings of .item():", len(heard))
    float(loss_of(make_batch()))
print("float:", *(str(warning.message).splitlines()[0] for warning in heard))

# %% [markdown]
# On a GPU `.item()` waits until that number is computed. If that slows a long loop, add `loss.detach()` instead, as in the table, and call `.item()` on the total.
#
# ## Cause 2: a kept exception
#
# Some batches fail, and a careful program collects the errors. An exception holds its traceback, the traceback holds the **frames** of all functions that were running, and a frame holds the function's variables.


# %%
def failing_step():
    activations = model(make_batch())
    raise ValueError(f"a loss of {len(activations)} rows is not finite")


def keeping_errors(what):
    """A program that keeps `what(error)` of every error."""

    def program():
        failed = []
        while True:
            try:
                failing_step()
            except ValueError as error:
                failed.append(what(error))
            yield

    return program


compare(exceptions=keeping_errors(lambda e: e), their_texts=keeping_errors(str))

# %% [markdown]
# The exception keeps the output of the failing function, and its graph. [This is expected](https://github.com/pytorch/pytorch/issues/27600), say PyTorch's maintainers: neither `gc.collect` nor `empty_cache` can help while a frame is held. It also decides *where* to try again after an error:

# %%
# NBVAL_CHECK_OUTPUT
with Budget(model) as meter:
    before = meter.live
    try:
        failing_step()
    except ValueError:
        gc.collect()
        inside = meter.live - before
    outside = meter.live - before
print("inside except, after gc.collect():", memory.size(inside))
print("one line below, outside:          ", memory.size(outside))

# %% [markdown]
# Inside `except` the exception is still alive. So note *that* it failed, leave the block, and try again below it. Lesson 16 builds on this.
#
# ## Cause 3: a list of results
#
# **Predict.** How many MiB does a list keep in a step if it takes the output, the detached output, one row of that, or a clone of the row?


# %%
# NBVAL_CHECK_OUTPUT
def keeping(what):
    """A program that keeps `what(output)` of every output."""

    def program():
        outputs = []
        while True:
            outputs.append(what(model(make_batch())))
            yield

    return program


compare(
    output=keeping(lambda output: output),
    detached=keeping(lambda output: output.detach()),
    detached_row=keeping(lambda output: output.detach()[0]),
    cloned_row=keeping(lambda output: output.detach()[0].clone()),
)

# %% [markdown]
# The output keeps its graph: batch, ReLU's output and itself. One row of a detached output costs as much as all rows: a slice holds the whole **storage** that it was cut from. `.clone()` gives the row a storage of its own.
#
# ## Cause 4: an evaluation with graphs
#
# Does `model.eval()` switch graphs off?


# %%
def evaluation(switch, what):
    def program():
        losses = []
        model.eval()
        while True:
            with switch():
                losses.append(what(loss_of(make_batch())))
            yield

    return program


compare(
    eval_kept=evaluation(nullcontext, lambda loss: loss),
    eval_item=evaluation(nullcontext, torch.Tensor.item),
    inference_mode_kept=evaluation(torch.inference_mode, lambda loss: loss),
)

# %% [markdown]
# It does not. Graphs pile up only because the list keeps them; but even with `.item()` the peak is higher. `eval`, `no_grad` and `inference_mode` are three switches, not one.
#
# **Predict.** For each row of the table: is there a graph? Does dropout still drop? Does BatchNorm still move? May the output be saved for a `backward` later?

# %%
# NBVAL_CHECK_OUTPUT


def inference(mode, switch):
    """What a forward pass does in this mode of the model, under this switch: four facts."""
    torch.manual_seed(0)
    norm, drop = torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), norm, drop).to(device)
    model.train(mode == "train")
    batch, mean = make_batch(), norm.running_mean.clone()
    with switch():
        output = model(batch)
        drops = not torch.equal(output, model(batch))
    try:
        (output * torch.ones(1, device=device, requires_grad=True)).sum().backward()
        later = True
    except RuntimeError:
        later = False
    return output.requires_grad, drops, not torch.equal(mean, norm.running_mean), later


titles = ["graph", "dropout drops", "BatchNorm moves", "may be saved for a backward later"]
print(f"{'':22}" + "  ".join(titles))
for switch in (nullcontext, torch.no_grad, torch.inference_mode):
    for mode in ("train", "eval"):
        name = "no switch" if switch is nullcontext else switch.__name__
        facts = zip(inference(mode, switch), titles, strict=True)
        cells = "  ".join(f"{'yes' if fact else '-':{len(title)}}" for fact, title in facts)
        print(f"{name + ', ' + mode:22}{cells}".rstrip())

# %% [markdown]
# `eval` switches layers: dropout and BatchNorm. `no_grad` and `inference_mode` switch the graph off; `inference_mode` also forbids that a later graph saves its results for `backward`. An evaluation needs `eval` *and* one of the other two.
#
# ## Cause 5: a loop's variables outlive the loop
#
# In Python a loop has no scope of its own. `batch`, `output` and `loss` of the last round live until the function returns, or until you delete or reassign them. Here the loop ends after four steps.


# %%
def rounds():
    for _ in range(4):
        batch = make_batch()
        output = model(batch)
        loss = (output - batch).square().mean()
        yield loss


def after_the_loop(mended):
    def program():
        for _ in range(4):
            batch = make_batch()
            output = model(batch)
            loss = (output - batch).square().mean()
            yield
        if mended:
            del batch, output, loss
        while True:  # saving, validation, the next experiment
            yield

    return program


def in_a_function():
    yield from rounds()
    while True:
        yield


compare(kept=after_the_loop(False), deleted=after_the_loop(True), in_a_function=in_a_function)

# %% [markdown]
# Kept are the 3 MiB for `backward`, and the output itself. Put the loop into a function, and its variables go when it returns.
#
# ## Cause 6: the notebook itself
#
# A notebook keeps what its cells showed: `Out[3]` and `_3` are the result of cell 3, `_` the last result shown. And the last error is kept for the debugger. To see it without spoiling your own notebook, this cell starts an IPython shell (the one inside every notebook) on a rank of its own and types into it.


# %%
def type_into_a_notebook(cells):
    """MiB alive after each cell, typed into a fresh IPython shell."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    InteractiveShell.clear_instance()
    no_history = Config({"HistoryManager": {"enabled": False}})  # on disk; Out stays
    shell = InteractiveShell.instance(config=no_history)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    shell.push({"torch": torch, "gc": gc, "device": place})
    readings = []
    with Budget(device=place) as meter, redirect_stdout(io.StringIO()):
        for cell in cells:
            shell.run_cell(cell, store_history=True)
            readings.append(meter.live / MiB)
    return readings


def notebooks(*sessions):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["IPYTHONDIR"] = folder  # your own profile and history stay as they are
        return [type_into_a_notebook(cells) for cells in sessions]


MAKE = "x = torch.ones(8, 2**18, device=device)"
FAIL = f"def step():\n    {MAKE}\n    raise ValueError('bad batch')"
sessions = {
    "a result is shown": [MAKE, "x", "del x", "gc.collect()", "%reset -f out"],
    "with a semicolon": [MAKE, "x;", "del x"],
    "%xdel": [MAKE, "x", "%xdel x"],
    "an error": [FAIL, "step()", "1 / 0", "gc.collect()"],
}
(typed,) = launch(notebooks, 1, *sessions.values())
for (name, cells), readings in zip(sessions.items(), typed, strict=True):
    print(f"\n{name}")
    for cell, mib in zip(cells, readings, strict=True):
        print(f"{mib:6.1f} MiB after   {' '.join(cell.split())}")

shown, hidden, xdel, failed = typed
assert shown[3] > 0 and hidden[2] == xdel[2] == 0, "what is said below is no longer true"
assert failed[1] > 0 and failed[-1] == 0, "what is said below is no longer true"

# %% [markdown]
# So in a notebook: show `x.shape`, not `x`, or end the line with `;`. `%xdel x` deletes a name with all that IPython keeps for it. After an out-of-memory error the failed step is still in memory, so your second try starts with less than the first. To empty `Out` right away freed nothing, as above. After an error raise a small new one and collect; if that fails too, restart the kernel.
#
# ## Cause 7: forward and backward fit, the optimizer's step does not
#
# Adam keeps two numbers for each parameter, but only from its first `step()` on. Here the parameters weigh 8 MiB and the limit is 28 MiB.
#
# **Predict.** At which line does it end, with 64 rows and with one? How much would it need? And SGD, which keeps nothing?


# %%
def first_step(optimizer_class, rows, limit=None):
    """Forward, backward and step, once; returns how much that took."""
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.001)
    with Budget(model, optimizer, limit=limit) as meter:
        loss = model(torch.randn(rows, 1024, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        return f"peak {meter.peak / MiB:.1f} MiB, after it {meter.live / MiB:.1f} MiB"


for optimizer_class, rows in [(torch.optim.Adam, 64), (torch.optim.Adam, 1), (torch.optim.SGD, 64)]:
    name = f"{optimizer_class.__name__}, {rows:2} rows"
    try:
        first_step(optimizer_class, rows, limit=28 * MiB)
        print(f"{name}: fits")
    except torch.OutOfMemoryError as error:
        print(f"{name}: out of memory at {blame(error, first_step)[1]}")
    print("    without a limit:", first_step(optimizer_class, rows))

# %% [markdown]
# Not even one row helps. After the step there are parameters, gradients and twice the parameters of state, four times 8 MiB; during the step come temporary results. What helps is an optimizer with less state, fewer parameters to train, or more devices that share the state. And a trial run must take the optimizer's step too.
#
# ## The quick cure: smaller batch, clean up, run again
#
# Common advice again. Take the running total, within 16 MiB, and count until it dies.


# %%
# NBVAL_CHECK_OUTPUT
def total_of(rows, clean=False):  # yields how many rows it has seen
    total_loss = seen = 0
    while True:
        total_loss += loss_of(make_batch(rows))
        if clean:
            memory.release()  # gc.collect(), and empty_cache() where there is CUDA
        seen += rows
        yield seen


programs = {
    "4096 rows": total_of(4096),
    "2048 rows": total_of(2048),
    "1024 rows": total_of(1024),
    "4096 rows, cleaned in each step": total_of(4096, clean=True),
}
print(f"{'within 16 MiB':32} steps  rows seen")
for name, running in programs.items():
    steps = seen = 0
    try:
        with Budget(model, limit=16 * MiB):
            for _ in range(50):
                seen = next(running)
                steps += 1
    except torch.OutOfMemoryError:
        print(f"{name:32} {steps:5} {seen:10,}")
    else:
        raise AssertionError(f"{name}: no leak")

# %% [markdown]
# A smaller batch makes more steps, but gets through hardly more data; cleaning buys nothing while the total refers to everything. So **first look whether it grows.** If memory climbs from step to step, find the reference. If it is flat and too high, a smaller batch is right, where activations are the larger part (not in cause 7). Before you *run again* in the same notebook, remember cause 6.
#
# ## What `del`, `gc.collect` and `empty_cache` do
#
# The experiments stop at a `yield` before the line in question, and after it.
#
# **Predict.** Five experiments with 8 MiB each: which lines free something?


# %%
def eight_mib(**options):
    return torch.ones(8, 2**18, device=device, **options)


def del_of_the_only_name():
    x = eight_mib()
    yield
    del x
    yield


def del_of_one_name_of_two():
    x = y = eight_mib()
    yield
    del x
    yield y


def del_of_a_result_in_a_graph():
    weight = eight_mib(requires_grad=True)
    hidden = weight.exp()
    loss = hidden.sum()
    yield
    del hidden
    yield
    loss.backward()  # and this still works


def circle():
    node = SimpleNamespace(data=eight_mib())
    node.itself = node
    return node


def del_of_an_object_in_a_circle():
    node = circle()
    yield
    del node
    yield


def del_and_gc_collect():
    node = circle()
    yield
    del node
    gc.collect()
    yield


# %%
# NBVAL_CHECK_OUTPUT
def freed_by(experiment):
    """MiB that the lines between the first and the second yield of an experiment give back."""
    gc.collect()
    gc.disable()  # so that no collection comes by chance
    try:
        with Budget(device=device) as meter:
            running = experiment()
            next(running)
            before = meter.live
            next(running)
            freed = (before - meter.live) / MiB
            next(running, None)  # to its end: an error in backward would show here
            return freed
    finally:
        gc.enable()


for experiment in (
    del_of_the_only_name,
    del_of_one_name_of_two,
    del_of_a_result_in_a_graph,
    del_of_an_object_in_a_circle,
    del_and_gc_collect,
):
    print(f"{freed_by(experiment):3.0f} MiB freed by {experiment.__name__.replace('_', ' ')}")

# %% [markdown]
# - **`del`** takes away a *name*. The tensor goes when its last reference goes, and at once. It cuts no relation to any graph: the graph still held `hidden`, and `backward` worked.
# - **`gc.collect`** finds objects that refer to each other in a circle: a model that holds callbacks that hold the model, or a traceback that nobody else holds.
# - **`empty_cache`** is about memory that is already free. PyTorch keeps freed blocks of a GPU **reserved** for its next tensor; `empty_cache` returns them to the driver, so that *another* process can have them. [It does not increase the memory available for PyTorch](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html), though it may help against fragmentation. It is mainly for other processes. On a GPU this cell shows it:

# %%
if torch.cuda.is_available():
    big = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
    del big
    for line in ["del big", "empty_cache()"]:
        if line == "empty_cache()":
            torch.cuda.empty_cache()
        sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(f"{line:14} allocated {memory.size(sizes[0])}, reserved {memory.size(sizes[1])}")
else:
    print("no GPU: on a CPU PyTorch keeps no cache that could be emptied")

# %% [markdown]
# ## Looking from outside: GPUtil and NVML
#
# `GPUtil.showUtilization()` runs the program `nvidia-smi` and reads its text. What does it show here, and what where `nvidia-smi` answers in words (a script plays it)?

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of GPUtil's old import of distutils
    import GPUtil
GPUtil.showUtilization()
if os.name == "posix":
    path = os.environ.get("PATH", "")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "nvidia-smi")
        script.write_text('#!/bin/sh\necho "No devices were found"; exit 6\n')
        script.chmod(0o755)
        try:
            os.environ["PATH"] = os.pathsep.join([folder, path])
            GPUtil.showUtilization()
        except ValueError as error:
            print("ValueError:", error)
        finally:
            os.environ["PATH"] = path

# %% [markdown]
# Without a GPU it shows the head of an empty table: no error, no word why. Words it takes for a number. **NVML** is the library that `nvidia-smi` itself asks; `census` asks it too. It answers in numbers, or with an error that has a name:

# %%
import pynvml

try:
    pynvml.nvmlInit()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used
        print(f"GPU {index}: {memory.size(used)} used by all processes together")
    pynvml.nvmlShutdown()
except pynvml.NVMLError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# All of them see *that* a device is full, never what fills it.
#
# ## Two devices: one is full, what does the other do?
#
# After each step all ranks add their gradients in an **all-reduce**, a collective that returns when *all* have called it. In step 2 rank 1 gets a batch that does not fit. Three programs:
#
# 1. it catches the error and **skips** the batch;
# 2. it lets the error go up;
# 3. its process is killed, as Linux does when the machine's own memory runs out.
#
# The gradient here is one number: 1, 2, 3, 4 in rank 0's four steps, 10, 20, 30, 40 in rank 1's. The right sums are 11, 22, 33, 44.
#
# **Predict.** What are the sums when rank 1 skips step 2?


# %%
def my_device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"


def four_steps(when_full):
    """The sums that this rank got, one for each step that it did not skip."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))  # in earnest it is minutes
    rank, sums = dist.get_rank(), []
    for step in (1, 2, 3, 4):
        try:
            with Budget(device=my_device(), limit=4 * MiB):
                rows = 8 if (rank, step) == (1, 2) else 1
                torch.ones(rows, 2**18, device=my_device())  # its activations: 1 MiB a row
        except torch.OutOfMemoryError:
            if when_full == "raise":
                raise
            if when_full == "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            continue  # skip this batch, go on with the next
        gradient = torch.tensor([step * 10**rank])
        start = time.monotonic()
        try:
            dist.all_reduce(gradient)
        except RuntimeError:
            return [*sums, f"error after {time.monotonic() - start:.1f} s"]
        sums.append(gradient.item())
    return sums


# %%
skipped = launch(four_steps, 2, "skip", init=False)
for rank, sums in enumerate(skipped):
    print(f"skip: the sums that rank {rank} got:", *sums)
assert skipped[0][1] == 2 + 30 and skipped[0][2] == 3 + 40

# %% [markdown]
# **Wrong from step 2 on, and no error until the end.** 32 is rank 0's step 2 plus rank 1's step 3; 43 is 3 and 40. An all-reduce does not know of steps: it pairs the next call of each rank with the next call of the other. Both ranks got the same wrong sums, so even their parameters stay equal. Only the last call of rank 0 finds no partner, and waits for a deadline, set to 3 s here; it is 10 minutes by default in NCCL. In a long epoch that comes long after the harm. And the two others?

# %%
for when_full in ["raise", "be killed"]:
    try:
        launch(four_steps, 2, when_full, init=False)
    except RankError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("rank ")]
        print(f"{when_full}:", *lines, sep="\n    ")
    else:
        raise AssertionError(f"{when_full}: no error came")

# %% [markdown]
# These two end, and `launch` names the rank that was full, because it watches all of them. Of a killed process it knows only the signal: "probably out of memory" is a guess. Rank 0 knows nothing of the cause. **If a collective fails, read what the *other* ranks said before.**
#
# ## The remedy: vote before the collective
#
# No rank may enter a collective on its own judgement. So the ranks **vote** first: an all-reduce of one number, the minimum over "it fitted here". If one says no, all of them take the same smaller **micro-batch** and compute their shards again. No sample is lost.


# %%
LIMITS = [64 * MiB, 5 * MiB]  # rank 1 is short of memory


def gradients(model, batch, parts=1):
    """Gradients of the mean loss of a batch, computed in so many parts."""
    for part in batch.chunk(parts):
        loss = (model(part) - part).square().mean() * (len(part) / len(batch))
        loss.backward()


def vote(fits):
    """True if it fitted on all ranks: everybody gets the same answer."""
    flag = torch.tensor([int(fits)], device=my_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def step_with_vote():
    torch.manual_seed(1)  # the same on every rank
    shard = torch.randn(2 * ROWS, WIDTH).chunk(2)[dist.get_rank()].to(my_device())
    model, parts = make_model(my_device()), 1
    while parts <= len(shard):  # the same on every rank, so they give up together
        try:
            with Budget(model, shard, limit=LIMITS[dist.get_rank()]):
                gradients(model, shard, parts)
            fits = True
        except torch.OutOfMemoryError:
            fits = False  # outside `except` we go on: here the error still holds the failed step
        if vote(fits):
            break
        parts *= 2
        model.zero_grad()
    else:
        raise RuntimeError("one row alone does not fit on some rank")
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return parts, [parameter.grad.cpu() for parameter in model.parameters()]


(parts_0, on_two), (parts_1, _) = launch(step_with_vote, 2)

# %%
# NBVAL_CHECK_OUTPUT
alone = make_model("cpu")
torch.manual_seed(1)
gradients(alone, torch.randn(2 * ROWS, WIDTH))
largest = max(
    ((p.grad - other).abs().max() / p.grad.abs().max()).item()
    for p, other in zip(alone.parameters(), on_two, strict=True)
)
print(f"parts of each shard: {parts_0} on rank 0, {parts_1} on rank 1")
print("relative difference to one device with the whole batch below 1e-5:", largest < 1e-5)
assert parts_0 == parts_1 > 1 and largest < 1e-5

# %%
print(f"largest relative difference: {largest:.1e}")

# %% [markdown]
# Where it is not zero, it is because the same numbers are added in another order. Lesson 16 makes a training step of this.
#
# ## What a real GPU does differently
#
# - **The type.** CUDA's allocator raises `torch.OutOfMemoryError` like the budget, PyTorch's own on a CPU a plain `RuntimeError`, other libraries have others; and *an illegal memory access* only sounds like it. That is why there is `memory.is_oom`. You write one in the exercise.
# - **The message** has this form; look at the last two figures: *CUDA out of memory. Tried to allocate … GPU 0 has a total capacity of … of which … is free. … Of the allocated memory … is allocated by PyTorch, and … is reserved by PyTorch but unallocated.*
# - **Fragmentation.** If *reserved but unallocated* is large, there is room, but in pieces that are each too small. Set `PYTORCH_ALLOC_CONF=expandable_segments:True` (older versions call it `PYTORCH_CUDA_ALLOC_CONF`) before the program starts. A budget has no pieces.
# - **The context.** CUDA itself takes some hundred MiB for each process, which no meter of tensors counts and no `del` returns.
#
# ## Exercise
#
# [Exercise 15](../exercises/15_out_of_memory.ipynb): mend four programs that leak, tell out of memory from everything else, and evaluate a model without leaving a trace. About 30 minutes.
#
# ## Recap
#
# | common advice (2021) | what you have seen |
# |---|---|
# | the traceback points elsewhere | true: look at the breakdown by kind, and for growth from step to step |
# | smaller batch, clean up, run again | right where memory is flat and activations are most of it |
# | `empty_cache` secures free memory | mainly for *other* processes; not seen on a CPU |
# | `del` cuts the relation to the graph, and replaces a reset | no: the graph held the tensor; and a notebook may hold it, too |
# | `float(loss)` or `loss.item()` | true; `float(loss)` warns today |
# | `torch.no_grad()` for inference | right for memory; dropout and BatchNorm need `eval()` |
#
# Memory goes when the last reference goes. Before a collective, ask all ranks.
#
# 1. Memory climbs by the same amount in every step, and the error names `loss.backward()`. Where do you look?
# 2. You catch the error, call `gc.collect()` and `empty_cache()` inside `except`, and try again: out of memory at once. Why?
# 3. On two ranks, one catches the error and skips its batch. The run goes on. What is wrong?
#
# <details><summary>Answers</summary>
#
# 1. At what the program keeps from one step to the next: totals, lists, exceptions. `backward` is only where each step is largest.
# 2. Inside `except` the exception is alive; it holds the traceback, the frames and their tensors. Leave the block, then try again.
# 3. From then on each all-reduce adds gradients of different steps. Vote first.
#
# </details>
#
# Go on with [exercise 15](../exercises/15_out_of_memory.ipynb).
