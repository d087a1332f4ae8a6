# ---
# jupyter:
#   course:
#     rows: [O1, O2, O3, O4, O5, O7]
#     minutes: {read: 30, do: 30}
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
# After this lesson you can meet an out-of-memory error without fear: read it, find what keeps the memory, mend it, and go on, on one device and on two.
#
# | | |
# |---|---|
# | **Time** | 30 minutes to read, 30 to do |
# | **You should know** | what forward, backward and an optimizer's step do; ranks and `launch` ([lesson 00](00_start_here.ipynb)); parameters, gradients, optimizer state, activations ([lesson 14](14_where_memory_goes.ipynb), in one line below) |
# | **You will** | meet a real `OutOfMemoryError` at a limit of your choice · show that the line it names is innocent · measure eight causes and their cures · test what `del`, `gc.collect` and `empty_cache` do · tell three switches for inference apart · see what one rank's error does to the other |
# | **Runs on** | no GPU: a budget counts your tensors · a GPU: the same budget counts those on the GPU, and two cells show CUDA's own figures · two ranks: pinned cores, or two GPUs |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |

# %%
import gc
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import nullcontext, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from tqdm import tqdm

from course_utils import memory, plots
from course_utils.devices import census, slots
from course_utils.launch import RankError, launch
from course_utils.memory import Budget, MiB

plots.use_style()
torch.set_num_threads(1)  # small sizes: more threads would only wait for each other

# %%
print(census())
devices = slots(2)
assert len(devices) == 2, "this lesson runs on two devices"
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# In one line, all that you need of lesson 14: a training step holds **parameters**, their **gradients**, the **optimizer state**, and **activations**, the results of the forward pass that the backward pass will need. All sizes here are in MiB, which is $2^{20}$ bytes.
#
# ## A real one, at a limit that you choose
#
# `memory.Budget(…, limit=…)` gives this device a limit of some MiB. It counts the bytes of every tensor, and raises PyTorch's own `torch.OutOfMemoryError` when the next one would not fit. (It counts on a GPU too. CUDA's own allocator takes memory in pieces of 2 to 20 MiB, too coarse for this lesson.) The sizes are chosen to be seen: one activation of this model is exactly 1 MiB.


# %%
ROWS, WIDTH = 4096, 64  # 4096 × 64 numbers of 4 bytes: 1 MiB


def make_model(place=device):
    torch.manual_seed(0)
    first, last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    return torch.nn.Sequential(first, torch.nn.ReLU(), last).to(place)


def make_batch(rows=ROWS):
    return torch.randn(rows, WIDTH, device=device)


def train(limit, keep, steps=12):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []  # somebody wants to plot the outputs later
    with Budget(model, optimizer, limit=limit) as meter:
        for step in range(1, steps + 1):
            batch = make_batch()
            output = model(batch)
            loss = (output - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keep:
                seen.append((step, output))
    return meter


# %% [markdown]
# **Predict.** There is one line in `train` without which it would run for ever. Which line will the error name?


# %%
def blame(error, function):
    """Where `function` was when the error was raised: its frame, and the text of the line."""
    walk = traceback.walk_tb(error.__traceback__)
    frame, number = [at for at in walk if at[0].f_code is function.__code__][-1]
    return frame, linecache.getline(frame.f_code.co_filename, number).strip()


try:
    train(limit=12 * MiB, keep=True)
except torch.OutOfMemoryError as error:
    frame, line = blame(error, train)
    print(f"step {frame.f_locals['step']}, at the line:  {line}\n")
    print(f"{type(error).__name__}: {error}")
else:
    raise AssertionError("12 MiB were enough")

# %% [markdown]
# ## The line that is blamed is innocent
#
# A traceback names the line that asked last. Try other limits, and then the same program without the line that keeps the outputs.

# %%
# NBVAL_CHECK_OUTPUT
blamed = set()
for limit in (10, 12, 14, 16, 18):
    try:
        train(limit=limit * MiB, keep=True, steps=20)
    except torch.OutOfMemoryError as error:
        blamed.add(blame(error, train)[1])
print("blamed, with five limits from 10 to 18 MiB:", *sorted(blamed))

healthy = train(limit=10 * MiB, keep=False, steps=20)
print("20 steps within 10 MiB without seen.append((step, output)):", healthy.peak <= 10 * MiB)

# %% [markdown]
# `seen.append((step, output))` allocates nothing: it only keeps. So it can never be the line that fails. What fails is the line where each step is largest, here `backward`, and it is as large in step 1 as in the step that died. **A traceback shows the last straw. To find the cause, ask what has grown.** The text of the error tells more than its line:

# %%
try:
    train(limit=12 * MiB, keep=True)
except torch.OutOfMemoryError as error:
    said = str(error).split("(")[1].split(")")[0]
    print("when it died:             ", said)
at_most = {kind: memory.size(n) for kind, n in healthy.peak_by_kind().items() if n}
print("largest of a healthy step:", ", ".join(f"{kind} {n}" for kind, n in at_most.items()))

# %% [markdown]
# Parameters have not grown, activations have: something keeps results of the forward pass. Which of them, the next sections show one by one.
#
# ## One harness for all causes
#
# Every program below is a loop with a `yield` where a step ends. The harness runs a few steps and writes down what is alive after each. A healthy program draws a flat line.


# %%
def live_after_each_step(program, steps=8):
    """MiB of tensors alive after each step of a program."""
    readings, running = [], program()
    with Budget(device=device) as meter:
        for _ in range(steps):
            next(running)
            readings.append(meter.live / MiB)
    return readings


def table(**programs):
    """Print what each program keeps: after its first step, after its last, and in between."""
    for name, program in programs.items():
        readings = live_after_each_step(program)
        growth = (readings[-1] - readings[0]) / (len(readings) - 1)
        print(f"{name:20} first {readings[0]:5.2f}   last {readings[-1]:5.2f} MiB", end="")
        print(f"   each step {growth:+.2f} MiB")


# %% [markdown]
# ## Cause 1: a running total
#
# The best known leak of PyTorch: `total_loss += loss`. The loss is a tensor with a **graph**, the record of what it was computed from. The sum of two losses has a graph that holds both of theirs.
#
# **Predict.** Which of the first two programs keeps more: the one that calls `backward`, or the one that only watches the loss, as in a validation loop?

# %%
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


def total_alone():
    total_loss = 0.0
    while True:
        total_loss += loss_of(make_batch())
        yield


def total_mended():
    total_loss = 0.0
    while True:
        total_loss += loss_of(make_batch()).item()
        yield


table(after_backward=total_after_backward, alone=total_alone, mended=total_mended)

# %% [markdown]
# `backward` frees the saved activations as it goes, so after it the sum keeps no tensor worth mentioning. Without `backward` every step stays whole. Is the first program harmless then? What stays is the chain of graph nodes: small objects in the memory of the process, which no meter of tensors sees, and no GPU. The process grows by it. Each rank is a process of its own, so here two of them train side by side, ten layers each.


# %%
def bytes_of_the_process(steps=1500):
    """Growth of this rank's memory in bytes a step. Rank 0 adds losses, rank 1 numbers."""
    import psutil

    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(10)])
    batch, total_loss, process = torch.randn(4, 8), 0.0, psutil.Process()
    for step in range(steps + 200):
        if step == 200:  # now all libraries are awake
            start = process.memory_info().rss
        loss = layers(batch).sum()
        loss.backward()
        total_loss += loss if dist.get_rank() == 0 else loss.item()
    return (process.memory_info().rss - start) / steps


grown = launch(bytes_of_the_process, 2)
for name, each in zip(["total_loss += loss", "total_loss += loss.item()"], grown, strict=True):
    print(f"{name:26} {each / 1024:6.1f} KiB of the process a step")

# %% [markdown]
# The notes that this course grew from advise `float(loss)` or `loss.item()`. Both mend it. Since then PyTorch has come to complain about one of them:

# %%
loss = loss_of(make_batch())
for name, cure in {
    "float(loss)": float,
    "loss.item()": torch.Tensor.item,
    "loss.detach()": torch.Tensor.detach,
}.items():
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        kept = cure(loss)
    print(f"{name:14} keeps a {type(kept).__name__:6}  warnings: {len(heard)}")

# %% [markdown]
# On a GPU `.item()` waits until the GPU has computed that number; `.detach()` keeps a tensor of 4 bytes and does not wait. So add `loss.detach()` in every step, and call `.item()` once at the end.
#
# ## Cause 2: a kept exception
#
# Some batches fail, and a careful program collects the errors. An exception holds its traceback, the traceback holds the **frames** of all functions that were running, and a frame holds the function's variables.


# %%
def failing_step():
    activations = model(make_batch())
    raise ValueError(f"a loss of {len(activations)} rows is not finite")


def exceptions_kept():
    failed = []
    while True:
        try:
            failing_step()
        except ValueError as error:
            failed.append(error)
        yield


def exceptions_mended():
    failed = []
    while True:
        try:
            failing_step()
        except ValueError as error:
            failed.append(str(error))
        yield


table(exceptions=exceptions_kept, their_texts=exceptions_mended)

# %% [markdown]
# The exception keeps the output of the failing function, and its graph. A maintainer of PyTorch: [this is expected](https://github.com/pytorch/pytorch/issues/27600), because the exception holds on to the frame, and that is why neither `gc.collect` nor `empty_cache` has any effect.
#
# It also decides *where* to try again after an error. Inside `except` the exception is still alive:

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
print("inside except something is still kept, after gc.collect():", inside > 0)
print("one line below, outside, nothing is:", outside == 0)

# %% [markdown]
# Python deletes the name of the exception at the end of the `except` block. So note *that* it failed, leave the block, and try again below it. Lesson 16 builds on this.
#
# ## Cause 3 and 4: a list of outputs, and slices of them
#
# A list of outputs keeps their graphs. With `.detach()` it keeps the outputs. And a slice is no copy: it holds the whole **storage** it was cut from.
#
# **Predict.** Four lists, one entry a step. One output is 1 MiB. How much does each list keep in a step?


# %%
def keeping(what):
    """A program that keeps `what(output)` of every output."""

    def program():
        outputs = []
        while True:
            outputs.append(what(model(make_batch())))
            yield

    return program


first_row = keeping(lambda output: output.detach()[0])
table(
    output=keeping(lambda output: output),
    output_detached=keeping(lambda output: output.detach()),
    first_row_detached=first_row,
    first_row_cloned=keeping(lambda output: output.detach()[0].clone()),
)

# %% [markdown]
# The first keeps a graph in each step, the second only the output. One row of a detached output costs as much as all rows, until `.clone()` gives it a storage of its own.
#
# ## Cause 5: an evaluation with graphs
#
# `model.eval()` does not switch graphs off. A list of validation losses then holds a graph for each.


# %%
def evaluation_with_graphs():
    losses = []
    model.eval()
    while True:
        losses.append(loss_of(make_batch()))
        yield


def evaluation_mended():
    losses = []
    model.eval()
    while True:
        with torch.inference_mode():
            losses.append(loss_of(make_batch()))
        yield


table(with_graphs=evaluation_with_graphs, inference_mode=evaluation_mended)

# %% [markdown]
# ## Cause 6: a loop's variables outlive the loop
#
# In Python a loop has no scope of its own. `batch`, `output` and `loss` of the last round live until the function returns; in a notebook, until you restart it. Here the loop ends after four steps.


# %%
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


table(after_the_loop=after_the_loop(mended=False), after_del=after_the_loop(mended=True))

# %% [markdown]
# The cheapest cure for a loop's variables is a function: put the loop into one, and they go when it returns.
#
# ## Cause 7: the notebook itself
#
# A notebook keeps what its cells showed. `Out[3]`, `_3`, `_` all hold the result of cell 3, and the last error is kept for the debugger. To see it without spoiling your own notebook, this cell starts an IPython shell (the one inside every notebook) on a rank of its own and types into it.


# %%
def type_into_a_notebook(cells):
    """MiB alive after each cell, typed into a fresh IPython shell."""
    from IPython.core.interactiveshell import InteractiveShell

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    shell.push({"torch": torch, "gc": gc, "sys": sys, "device": place})
    readings = []
    with Budget(device=place) as meter, redirect_stdout(io.StringIO()):
        for cell in cells:
            shell.run_cell(cell, store_history=True)
            readings.append((cell, meter.live / MiB))
    return readings


def notebooks(*sessions):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["IPYTHONDIR"] = folder  # your own profile and history stay as they are
        return [type_into_a_notebook(cells) for cells in sessions]


# %%
MAKE = "x = torch.ones(8, 2**18, device=device)"
SHOWN = [MAKE, "x", "del x", "gc.collect()", "%reset -f out"]
HIDDEN = [MAKE, "x;", "del x", "gc.collect()"]
XDEL = [MAKE, "x", "%xdel x"]
FAIL = f"def step():\n    {MAKE}\n    raise ValueError('bad batch')"
FAILED = [FAIL, "step()", "gc.collect()", "sys.last_value = sys.last_traceback = sys.last_exc = None",
          "gc.collect()", "1 / 0", "gc.collect()"]  # fmt: skip
CAUGHT = [FAIL, "try:\n    step()\nexcept ValueError as error:\n    print(error)"]

(typed,) = launch(notebooks, 1, SHOWN, HIDDEN, XDEL, FAILED, CAUGHT)
for session in typed:
    print("\na fresh notebook")
    for cell, mib in session:
        print(f"{mib:6.1f} MiB after   {' '.join(cell.split())}")

# %%
# NBVAL_CHECK_OUTPUT
shown, hidden, xdel, failed, caught = [[mib for _, mib in session] for session in typed]
print("a result that was shown survives del and gc.collect():", shown[3] > 0)
print("with a semicolon it does not:", hidden[2] == 0)
print("%xdel finds the hidden names too:", xdel[2] == 0)
print("the last error keeps its function's tensors:", failed[1] > 0)
print("a newer error, then gc.collect(), lets them go:", failed[-1] == 0)
print("an error that was caught keeps nothing:", caught[1] == 0)

# %% [markdown]
# So in a notebook: show `x.shape`, not `x`; or end the line with `;`. After an out-of-memory error the failed step is still in memory, and your second try starts with less than the first. The usual advice, to empty `Out` or to set `sys.last_value` to nothing, may free nothing, as you can see above (it depends on the version of IPython). Raising a small new error and collecting does. If all this fails, restart the kernel: that always works.
#
# ## Cause 8: forward and backward fit, the optimizer's step does not
#
# Adam keeps two numbers for each parameter, but only from its first `step()` on. Here the parameters weigh 8 MiB and the limit is 28 MiB.
#
# **Predict.** At which line does it end, with 64 rows and with one? And with SGD, which keeps nothing?


# %%
def heavy_model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    return torch.nn.Sequential(*layers).to(device)


def first_step(optimizer_class, rows, limit=28 * MiB):
    """Forward, backward and step, once, within the limit."""
    model = heavy_model()
    optimizer = optimizer_class(model.parameters(), lr=0.001)
    with Budget(model, optimizer, limit=limit) as meter:
        loss = model(torch.randn(rows, 1024, device=device)).square().mean()
        loss.backward()
        optimizer.step()
    return meter


for optimizer_class, rows in [(torch.optim.Adam, 64), (torch.optim.Adam, 1), (torch.optim.SGD, 64)]:
    name = f"{optimizer_class.__name__}, {rows:2} rows"
    try:
        meter = first_step(optimizer_class, rows)
        print(f"{name}: fits, peak {memory.size(meter.peak)}")
    except torch.OutOfMemoryError as error:
        kinds = str(error).split("(")[1].split(")")[0]
        print(f"{name}: out of memory at {blame(error, first_step)[1]}\n    {kinds}")

# %% [markdown]
# A smaller batch does not help, not even one row: the breakdown says that nearly nothing here is an activation. What helps is an optimizer with less state, fewer parameters to train, or more devices that share the state. And a test of memory that stops after `backward` has tested nothing: always take the step.
#
# ## All causes, broken and mended


# %%
def first_steps_of(optimizer_class):
    def program():
        model = heavy_model()
        optimizer = optimizer_class(model.parameters(), lr=0.001)
        while True:
            loss = model(torch.randn(64, 1024, device=device)).square().mean()
            yield
            loss.backward()
            yield
            optimizer.step()
            yield

    return program


CAUSES = {
    "running total": (total_alone, total_mended),
    "kept exception": (exceptions_kept, exceptions_mended),
    "list of outputs": (keeping(lambda o: o), keeping(lambda o: o.mean().item())),
    "slices of outputs": (first_row, keeping(lambda o: o.detach()[0].clone())),
    "evaluation with graphs": (evaluation_with_graphs, evaluation_mended),
    "after the loop (4 steps)": (after_the_loop(False), after_the_loop(True)),
    "first steps of Adam, SGD": (first_steps_of(torch.optim.Adam), first_steps_of(torch.optim.SGD)),
}
measured = {}
for name, pair in tqdm(CAUSES.items(), desc="causes", file=sys.stdout):
    measured[name] = [live_after_each_step(program) for program in pair]
measured["Out[] (cells)"] = [shown, hidden]
for name, (broken, mended) in measured.items():
    print(f"{name:26} broken {broken[-1]:6.2f}   mended {mended[-1]:6.2f} MiB at the end")

# %%
fig, grid = plt.subplots(2, 4, figsize=(11, 5), sharex=True)
for axes, (name, (broken, mended)) in zip(grid.flat, measured.items(), strict=True):
    axes.plot(range(1, len(broken) + 1), broken, label="broken")
    axes.plot(range(1, len(mended) + 1), mended, label="mended")
    axes.set_title(name, fontsize=10)
    axes.set_ylim(0, None)
grid[0, 0].legend()
fig.supxlabel("reading: after a step, a phase or a cell", fontsize=11)
fig.supylabel("alive (MiB)", fontsize=11)
fig.suptitle("What leaks climbs, what is kept stays up; mended, it is flat")
ends = ", ".join(f"{name} {b[-1]:.1f} and {m[-1]:.1f}" for name, (b, m) in measured.items())
plots.show(
    fig,
    name="eight-causes",
    alt="Eight small charts of memory alive over the steps of a program, broken and mended. At the "
    f"end, in MiB, broken and mended: {ends}.",
)

# %% [markdown]
# Five of the broken lines climb without end: these die sooner or later, whatever the size of the device. The others rise once and stay: they decide whether the *next* thing fits.
#
# ## The quick cure: smaller batch, clean up, run again
#
# That is the order in which the old notes advise it. What is right of it? Take the running total, within 16 MiB, and count the steps until it dies.


# %%
def steps_that_fit(program, limit, most=50):
    running, done = program(), 0
    try:
        with Budget(model, limit=limit):
            for _ in range(most):
                next(running)
                done += 1
    except torch.OutOfMemoryError:
        pass
    return done


def total_of(rows, clean=False):
    def program():
        total_loss = 0.0
        while True:
            total_loss += loss_of(make_batch(rows))
            if clean:
                memory.release()  # gc.collect(), and empty_cache() where there is CUDA
            yield

    return program


for name, program in {
    "4096 rows": total_of(4096),
    "2048 rows": total_of(2048),
    "1024 rows": total_of(1024),
    "4096 rows, cleaned in every step": total_of(4096, clean=True),
    "4096 rows, mended": total_mended,
}.items():
    print(f"{name:33} {steps_that_fit(program, limit=16 * MiB):3} of 50 steps")

# %% [markdown]
# A smaller batch buys time in proportion, and no more; cleaning buys nothing while the total refers to everything. So the order is: **first look whether it grows.** If memory climbs from step to step, find the reference; a smaller batch only hides it until the night run. If it is flat and too high, a smaller batch is right, where activations are the larger part (not in cause 8). And *run again* in the same notebook is only fair after cause 7: the last error still holds the failed step.
#
# ## What `del`, `gc.collect` and `empty_cache` do
#
# The old notes make three claims: `empty_cache` *secures free memory*; `del` *cuts the relation to the graph entirely*; and `del` is *a good function instead of a reset*. Measure each. The experiments stop at a `yield` before the line in question, and after it.


# %%
def eight_mib(**options):
    return torch.ones(8, 2**18, device=device, **options)


def freed_by(experiment):
    """MiB that the lines between the first and the second yield of an experiment give back."""
    running = experiment()
    gc.collect()
    gc.disable()  # so that no collection comes by chance
    try:
        with Budget(device=device) as meter:
            next(running)
            before = meter.live
            next(running)
            return (before - meter.live) / MiB
    finally:
        gc.enable()


# %% [markdown]
# **Predict.** Six experiments with 8 MiB each: which lines free something?


# %%
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


# %%
def del_of_an_object_in_a_circle():
    node = SimpleNamespace(data=eight_mib())
    node.itself = node
    yield
    del node
    yield


def del_and_gc_collect():
    node = SimpleNamespace(data=eight_mib())
    node.itself = node
    yield
    del node
    gc.collect()
    yield


def empty_cache_beside_a_living_tensor():
    x = eight_mib()
    yield
    torch.cuda.empty_cache()
    yield x


# %%
# NBVAL_CHECK_OUTPUT
for experiment in (
    del_of_the_only_name,
    del_of_one_name_of_two,
    del_of_a_result_in_a_graph,
    del_of_an_object_in_a_circle,
    del_and_gc_collect,
    empty_cache_beside_a_living_tensor,
):
    print(f"{freed_by(experiment):3.0f} MiB freed by {experiment.__name__.replace('_', ' ')}")

list(del_of_a_result_in_a_graph())  # to its end: an error in backward would show here
print("backward works without the name: True")

# %% [markdown]
# - **`del`** takes away a *name*. The tensor goes when its last reference goes, and at once: no collection is needed. It cuts no relation to any graph: the graph still held `hidden`, or `backward` could not have worked.
# - **`gc.collect`** finds objects that refer to each other in a circle. PyTorch's own objects seldom do; models that hold callbacks that hold the model do, and so do tracebacks.
# - **`empty_cache`** frees no tensor. The maintainers call the hope that it cures out-of-memory a [common misconception](https://github.com/pytorch/pytorch/pull/4879). On a CPU there is no cache that it could empty; this cell shows what it does where there is one.

# %%
if torch.cuda.is_available():
    x = eight_mib()
    big = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
    for line in ["two tensors", "del big", "empty_cache()"]:
        if line == "del big":
            del big
        elif line == "empty_cache()":
            torch.cuda.empty_cache()
        sizes = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        print(f"{line:14} allocated {memory.size(sizes[0])}, reserved {memory.size(sizes[1])}")
else:
    print("not measured: no GPU. Reserved memory exists only in CUDA's caching allocator.")

# %% [markdown]
# On a GPU PyTorch does not give freed blocks back: it keeps them **reserved** for the next tensor. `empty_cache` returns the unused ones to the driver, so that *another* process can have them, and `nvidia-smi` shows less. Your own next tensor would have got them anyway. ([Documentation](https://docs.pytorch.org/docs/stable/generated/torch.cuda.memory.empty_cache.html): it does not increase the memory available for PyTorch; it may reduce fragmentation in some cases.)
#
# So of the three claims: the first is wrong as it stands, the second is wrong, and the third is right when the name was the last reference.
#
# ## `eval`, `no_grad`, `inference_mode`: three switches, not one
#
# **Predict.** For each row of the table: is there a graph? Does dropout still drop? Does BatchNorm still move?

# %%
# NBVAL_CHECK_OUTPUT


def inference(mode, switch):
    """What one forward pass does and keeps, in this mode of the model, under this switch."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(0.5)]
    model = (
        torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, WIDTH))
        .to(device)
        .train(mode == "train")
    )
    batch, mean = make_batch(), model[1].running_mean.clone()
    with Budget(model, batch) as meter:
        before = meter.live
        with switch():
            output = model(batch)
        kept = (meter.live - before) / MiB
    with switch():
        dropout = not torch.equal(model(batch), model(batch))
    moved = not torch.equal(mean, model[1].running_mean)
    try:
        (output * model[0].weight[0, 0]).sum().backward()
        later = True
    except RuntimeError:
        later = False
    return output.requires_grad, dropout, moved, later, round(kept)


titles = ["graph", "dropout", "BatchNorm moves", "usable in training"]
print(f"{'':22}" + "  ".join(titles) + "  MiB kept")
for switch in (nullcontext, torch.no_grad, torch.inference_mode):
    for mode in ("train", "eval"):
        *facts, kept = inference(mode, switch)
        name = "no switch" if switch is nullcontext else switch.__name__
        cells = "  ".join(
            f"{'yes' if fact else '-':{len(title)}}"
            for fact, title in zip(facts, titles, strict=True)
        )
        print(f"{name + ', ' + mode:22}{cells}  {kept}")

# %% [markdown]
# `eval` switches layers: dropout and BatchNorm. `no_grad` and `inference_mode` switch the graph off; `inference_mode` also forbids the result to enter a graph later, and saves some bookkeeping for it. They do not know of each other: an evaluation needs `eval` *and* one of the other two. The old notes have `no_grad` only, and so their dropout stays on unless somebody has called `eval`.
#
# ## Looking from outside: GPUtil, NVML, census
#
# The old notes look with `GPUtil.showUtilization()`. GPUtil asks the program `nvidia-smi` and reads its text. What does it show on a machine without a GPU, and when `nvidia-smi` is there but has no GPU to report? The second case is common: a container, or a broken driver. Here a script of two lines plays it, in a child process that finds it first.


# %%
def child(code, nvidia_smi=None):
    """The last lines that a child process prints; `nvidia_smi` replaces the program of that name."""
    with tempfile.TemporaryDirectory() as folder:
        if nvidia_smi is not None:
            script = Path(folder, "nvidia-smi")
            script.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
            script.chmod(0o755)
        path = os.pathsep.join([folder, os.environ.get("PATH", "")])
        # Python warns about GPUtil's old import of distutils: that is not the point here.
        env = {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip().splitlines()


GPUTIL = "import GPUtil; GPUtil.showUtilization()"
NO_DEVICES = 'echo "No devices were found"; exit 6'
if os.name == "posix":
    print("GPUtil, this machine:     ", *child(GPUTIL)[-3:], sep="\n    ")
    print("GPUtil, nvidia-smi finds no device:", *child(GPUTIL, NO_DEVICES)[-1:], sep="\n    ")

# %%
NVML = """
import pynvml
try:
    pynvml.nvmlInit()
    for i in range(pynvml.nvmlDeviceGetCount()):
        used = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i))
        print(i, used.used, "of", used.total, "bytes")
except pynvml.NVMLError as error:
    print(type(error).__name__ + ":", error)
"""
CENSUS = "from course_utils.devices import census; print(census())"
print("NVML:", *child(NVML)[-3:], sep="\n    ")
if os.name == "posix":
    print("census, nvidia-smi finds no device:", *child(CENSUS, NO_DEVICES), sep="\n    ")

# %% [markdown]
# Without a GPU GPUtil shows a table without rows: no error, and no word why. With an `nvidia-smi` that answers in words it takes the words for a number. NVML is the library below `nvidia-smi`; it raises an error that you can catch. `census` asks NVML first, then `nvidia-smi`, checks what comes back, and says what it could not read. All three look at a device from outside: they see *that* it is full, never what fills it. For that you need the meter.
#
# ## A genuine one: the machine itself says no
#
# The budget stands in for an allocator. What does the real one say? A rank limits its own process (Linux: `RLIMIT_DATA`) and asks for too much.


# %%
def meet_the_allocator():
    """Type and text of what PyTorch's CPU allocator raises, and what is_oom says of it."""
    import resource

    used = next(int(line.split()[1]) for line in open("/proc/self/status") if "VmData" in line)
    limit = used * 1024 + 256 * MiB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # this rank ends with the cell
    kept = []
    try:
        for _ in range(100):
            kept.append(torch.ones(16 * MiB // 4))
    except Exception as error:
        fields = type(error).__name__, str(error), memory.is_oom(error)
    recovered = len(kept)
    kept.clear()
    kept.append(torch.ones(16 * MiB // 4))  # and now there is room again
    return *fields, recovered


if sys.platform == "linux":
    ((kind, text, recognised, blocks),) = launch(meet_the_allocator, 1)
    print(f"after {blocks} blocks of 16 MiB: {kind}: {text}")
    print("is_oom:", recognised)
    assert recognised and kind == "RuntimeError", "the allocator has changed its words"
else:
    print("not measured: this limit is Linux's")

# %% [markdown]
# A plain `RuntimeError`: only its text tells that it is out of memory. CUDA's allocator has a type of its own, other libraries have others, and one famous message sounds like it and is not: `an illegal memory access`. That is why programs need a function such as `memory.is_oom`. You write one in the exercise.
#
# ## Two devices: one is full, what does the other see?
#
# Each rank computes gradients of its shard, then all ranks add theirs in an **all-reduce**, a collective that returns when *all* have called it. Rank 1 has less memory here. What happens when it is full depends on what its program does then. Three programs:
#
# 1. it lets the error go up;
# 2. it catches the error and skips the batch, as some training programs have done;
# 3. its process is killed, as Linux does when the machine's own memory runs out.
#
# **Predict.** What does rank 0 see in each, and after how long?

# %%
LIMITS = [64 * MiB, 5 * MiB]  # rank 1 is short of memory


def my_device():
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"


def my_shard():
    torch.manual_seed(1)  # the same on every rank
    return torch.randn(2 * ROWS, WIDTH).chunk(2)[dist.get_rank()].to(my_device())


def gradients(model, batch, parts=1):
    """Gradients of the mean loss of a batch, computed in so many parts."""
    for part in batch.chunk(parts):
        loss = (model(part) - part).square().mean() * (len(part) / len(batch))
        loss.backward()


def one_step(when_full):
    """One step of this rank; returns what it did, or what it was told."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))  # in earnest it is minutes
    dist.barrier()  # so far all is well
    model, shard = make_model(my_device()), my_shard()
    try:
        with Budget(model, shard, limit=LIMITS[dist.get_rank()]):
            gradients(model, shard)
    except torch.OutOfMemoryError:
        if when_full == "raise":
            raise
        if when_full == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return "skipped its batch"
    start = time.monotonic()
    try:
        dist.all_reduce(torch.cat([p.grad.flatten() for p in model.parameters()]))
    except RuntimeError as error:
        reason = str(error).partition("] ")[2]  # behind gloo's own file and line
        said = f"all_reduce failed after {time.monotonic() - start:.1f} s: {reason[:70]}"
        print(said)
        return said
    return "stepped"


# %%
told = {}
for when_full in ["raise", "skip", "be killed"]:
    start = time.monotonic()
    try:
        told[when_full] = launch(one_step, 2, when_full, init=False)
        lines = [f"rank {rank}: {result}" for rank, result in enumerate(told[when_full])]
    except RankError as error:
        told[when_full] = str(error).splitlines()[0]
        lines = [f"the cell: {told[when_full][:95]}…"]
    print(f"{when_full}, {time.monotonic() - start:.1f} s", *lines, sep="\n    ")

# %%
# NBVAL_CHECK_OUTPUT
print("raise: the cell shows the error of the rank that was full:", "rank 1" in told["raise"])
on_0, on_1 = told["skip"]
print(f"skip: rank 1 {on_1}; on rank 0 all_reduce failed:", "all_reduce failed" in on_0)
print("be killed: the cell knows that it was killed:", "SIGKILL" in told["be killed"])

# %% [markdown]
# Rank 0 is never out of memory, and it never sees the error of rank 1. `launch` ended the first program because it watches all ranks; `torchrun` does the same. The second nobody ends but a deadline: here it was 3 s, NCCL's default is 10 minutes. In the third, rank 0 hears at once that the connection is gone, not why. Both times rank 0 logs an error of the network, though it did nothing wrong. **If a collective fails, read what the *other* ranks said before.**
#
# ## The remedy: vote before the collective
#
# No rank may enter a collective on its own judgement. So the ranks **vote** first: an all-reduce of one number, the minimum over "it fitted here". If one says no, all of them take the same smaller **micro-batch** and compute the shard again. No sample is lost.


# %%
def vote(fits):
    """True if it fitted on all ranks: everybody gets the same answer."""
    flag = torch.tensor([int(fits)], device=my_device())
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def step_with_vote():
    model, shard, parts = make_model(my_device()), my_shard(), 1
    while True:
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
print("both ranks settled on the same number of parts:", parts_0 == parts_1)
print("rank 1 had to split its shard:", parts_1 > 1)
print("largest relative difference to one device with the whole batch below 1e-5:", largest < 1e-5)
assert parts_0 == parts_1 > 1 and largest < 1e-5

# %%
print(f"parts of each shard: {parts_0}; largest relative difference to one device: {largest:.1e}")

# %% [markdown]
# The difference is not zero because the same numbers are added in another order. Lesson 16 makes a training step of this.
#
# ## What a real GPU does differently
#
# - **The message.** PyTorch's documentation of CUDA's allocator, and every bug report, has it in this form; look for the last two figures: *CUDA out of memory. Tried to allocate … GPU 0 has a total capacity of … of which … is free. … Of the allocated memory … is allocated by PyTorch, and … is reserved by PyTorch but unallocated.*
# - **Fragmentation.** If *reserved but unallocated* is large, there is room, but in pieces that are each too small. Set `PYTORCH_ALLOC_CONF=expandable_segments:True` (older versions call it `PYTORCH_CUDA_ALLOC_CONF`) before the program starts. A budget has no pieces.
# - **The context.** CUDA itself takes some hundred MiB for each process, which no meter of tensors counts and no `del` returns.
# - **Late errors.** A GPU works behind your back, so an error of a kernel may be raised lines later. Out of memory is not one of these: it is the allocator's own, raised at once.

# %%
if torch.cuda.is_available():
    try:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print(error)
else:
    print("CUDA's own message: not measured, there is no GPU here")
# %% [markdown]
# How far a budget's count lies from what CUDA's allocator says of the same training steps, where the authors have measured it:

# %%
places = [Path("benchmarks/results/memory.json"), Path("../benchmarks/results/memory.json")]
file = next((place for place in places if place.exists()), None)
results = json.loads(file.read_text()) if file else {"rows": []}
rows = [row for row in results["rows"] if "cuda" in row]
for row in rows:
    share = row["budget"] / row["cuda"] - 1
    print(f"{row['model']:18} {row['optimizer']:6} {memory.size(row['cuda']):>9}, {share:+.1%}")
print("measured on:", *results["machine"]["gpus"]) if rows else print("not measured")

# %% [markdown]
# ## The old notes, tested
#
# | what notes of 2021 say | what you have seen |
# |---|---|
# | hard to say where and why; the traceback points elsewhere | true: it names the last straw. The breakdown by kind, and growth from step to step, name the cause |
# | smaller batch, clean up, run again | right where memory is flat and activations are most of it; against a leak it buys time |
# | `GPUtil.showUtilization()` | a table without rows where there is no GPU, a `ValueError` where `nvidia-smi` answers in words; NVML and `census` say what is wrong |
# | `empty_cache` secures free memory | it frees no tensor; it gives unused blocks of a GPU to *others* |
# | `del` cuts the relation to the graph entirely | no: the graph held the tensor, and `backward` worked |
# | `del` is a good function instead of a reset | if the name was the last reference; in a notebook it often is not |
# | `total_loss += loss` keeps graphs; `float(loss)` or `loss.item()` | true, and worst where nobody calls `backward`; `float(loss)` warns today |
# | loop variables outlive the loop | true |
# | `torch.no_grad()` for inference | right for memory; dropout and BatchNorm need `eval()` |
#
# ## Exercise
#
# [Exercise 15](../exercises/15_out_of_memory.ipynb): mend four programs that leak, tell out of memory from everything else, and evaluate a model without leaving a trace. About 35 minutes.
#
# ## Recap
#
# The line in the traceback asked last; the cause is what has been kept, and it shows as growth from step to step. Memory goes when the last reference goes: a total, an exception, a list, a slice, a loop's variable, and the notebook itself can be that reference. Where several devices work together, ask all of them before anybody enters a collective.
#
# 1. Memory climbs by the same amount in every step, and the error names `loss.backward()`. Where do you look?
# 2. You catch the error, call `gc.collect()` and `empty_cache()` inside `except`, and try again: out of memory at once. Why?
# 3. A colleague evaluates with `model.eval()` and wonders about memory; another uses `torch.no_grad()` and gets a different result each time. What do you tell them?
#
# <details><summary>Answers</summary>
#
# 1. At what the program keeps from one step to the next: totals, lists, exceptions. `backward` is only where each step is largest.
# 2. Inside `except` the exception is alive; it holds the traceback, the frames and their tensors. Leave the block, then try again.
# 3. The first has graphs: `eval` does not switch them off. The second has dropout: `no_grad` does not switch that off. Both need both.
#
# </details>
#
# Go on with [exercise 15](../exercises/15_out_of_memory.ipynb).
