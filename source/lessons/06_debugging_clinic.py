# ---
# jupyter:
#   course:
#     rows: []
#     minutes: {read: 45, do: 30}
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
# # Debugging clinic: thirteen programs that fail on two ranks
#
# After this lesson you can take a distributed program that hangs, dies, lies or crawls, and go from its symptom to its cause.
#
# | | |
# |---|---|
# | **Time** | 45 minutes to read, 30 to predict and run; the exercise takes 45 more. It can be done ward by ward |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); collectives and DistributedDataParallel, which [lesson 04](04_ddp_from_scratch.ipynb) builds |
# | **You will** | end every hang by a deadline · read the stack of each rank · let PyTorch compare the ranks' collectives · write a recorder that does it in twelve lines · name the rank that is guilty, not the one that complains · mend thirteen programs and verify each cure |
# | **Runs on** | every machine: two ranks that talk over gloo, on pinned cores (with two GPUs each rank also owns one, and the last case runs over NCCL) |
# | **Last verified** | Python 3.11, PyTorch 2.13.0 |
#
# If you have not done lessons 04 and 05, two reminders: a **collective** (all-reduce, all-gather, broadcast, barrier) is a call that every rank must make, in the same order, with tensors of the same shape. **DDP** (`DistributedDataParallel`) keeps a model on each rank equal to the others: it sends rank 0's weights at the start and averages the gradients inside `backward()`.

# %%
import contextlib
import io
import json
import linecache
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

from course_utils import plots
from course_utils.devices import census, slots
from course_utils.launch import LaunchTimeout, RankError, launch

plots.use_style()
print(census())
places = slots(2)
assert len(places) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## The examination room
#
# Each patient is a small program that two real ranks run. The order is always the same: run it **under a deadline**, read the **symptom**, use one **tool**, name the **cause**, apply the **cure**, and **verify**. Never start with the cure.
#
# `examine` runs a patient and returns its values, or the error as an object that you can read. All patients use the gloo backend with tensors on the CPU, on every machine, so that you see the same symptoms as everybody else. `level` switches on PyTorch's own debug mode, which you would set from a shell: `TORCH_DISTRIBUTED_DEBUG=INFO torchrun --standalone --nproc-per-node=2 train.py`. `hang` is for patients that stand still: it ends them by a short deadline, and gives a second, longer one where a busy machine had not brought both ranks into the program.

# %%
SEEN = {}  # patient -> how it ended


def in_group(program, args, level):
    if level:
        os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
        dist.set_debug_level_from_env()  # it is read only once, at import
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    return program(*args)


def examine(program, *args, level=None, deadline=60):
    try:
        outcome = launch(in_group, 2, program, args, level, init=False, timeout=deadline)
    except RankError as error:  # LaunchTimeout is one too
        outcome = error
    SEEN.setdefault(program.__name__, type(outcome).__name__)
    return outcome


def where(outcome):
    """What each rank was doing when the deadline came: the first words on it."""
    assert isinstance(outcome, LaunchTimeout), outcome
    return [re.split(r"[,\n]", text)[0] for text in outcome.others.values()]


def hang(program, *args, sign):
    """The outcome of a program that hangs; `sign` is in a stack where it has come that far."""
    for deadline in (2.5, 10, 40):
        outcome = examine(program, *args, deadline=deadline)
        texts = outcome.others.values() if isinstance(outcome, LaunchTimeout) else ()
        if texts and all(sign in text or "has returned" in text for text in texts):
            break
    return outcome


# %% [markdown]
# ## Ward 1: nobody moves
#
# A hang has no error message. So give it a deadline, and ask each rank where it stands.
#
# ### Patient 1: a collective on rank 0 only
#
# "We print the mean loss on rank 0 only, to keep the log short. It stands still at the first print."
#
# **Predict.** Which rank waits, and in which call? What does the other one do meanwhile?


# %%
# NBVAL_CHECK_OUTPUT
def log_on_rank_0():
    loss = torch.tensor([1.0 + dist.get_rank()])
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()


outcome = hang(log_on_rank_0, sign="all_reduce")
print(*where(outcome), sep="\n")

# %% [markdown]
# **Tool: the stack of each rank.** `launch` makes each rank dump its stack at the deadline. On a cluster, `py-spy dump --pid …` shows the same for a running process. Read the report from the bottom: which collective, and which line of *your* program called it?

# %%
print(outcome)

# %% [markdown]
# **Cause:** rank 0 waits for a partner that never comes: the `if` keeps rank 1 away from the line. **Cure:** every rank makes the call; only the printing is for rank 0.


# %%
# NBVAL_CHECK_OUTPUT
def log_mended():
    loss = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(loss)  # outside the if
    if dist.get_rank() == 0:
        return loss.item() / dist.get_world_size()


values = examine(log_mended)
print("mean loss on rank 0, nothing on rank 1:", values)
assert values == [1.5, None]

# %% [markdown]
# ### Patient 2: collectives in different order
#
# "Both ranks call all-reduce twice. Both are in `all_reduce`. And nothing happens." (More happens than they see: we come back to this patient.)


# %%
# NBVAL_CHECK_OUTPUT
def two_totals():
    totals = {"loss": torch.tensor([2.0, 1.0]), "hits per class": torch.tensor([3.0, 0.0, 1.0])}
    if dist.get_rank() == 1:
        totals["loss"] += 9  # this rank had a bad batch
    return totals


def smallest_first(totals=None):
    totals = totals or two_totals()
    for name in sorted(totals, key=lambda name: totals[name].sum()):
        dist.all_reduce(totals[name])
    return {name: total.tolist() for name, total in totals.items()}


print(*where(hang(smallest_first, sign="all_reduce")), sep="\n")

# %% [markdown]
# Stacks do not help: both ranks are in the same call, on the same line. **Tool: `TORCH_DISTRIBUTED_DEBUG=DETAIL`.** Before each collective PyTorch then compares what the ranks are about to do, and raises on all of them if it differs. That is one more exchange for each collective, so [its page](https://docs.pytorch.org/docs/stable/distributed.html#torch-distributed-debug) keeps it for debugging.


# %%
# NBVAL_CHECK_OUTPUT
def compared(error):
    """What the error of DETAIL says that each rank was running."""
    assert "Detected mismatch between collectives" in error.message
    pattern = r"Rank (\d) is running collective: .*?OpType=(\w+), TensorShape=(\[[\d, ]*\])"
    return [
        f"rank {r}: {op} {shape}" for r, op, shape in sorted(re.findall(pattern, error.message))
    ]


print(*compared(examine(smallest_first, level="DETAIL")), sep="\n")

# %% [markdown]
# **Cause:** the order is decided by values, and each rank has its own. (A directory listing or an `if` on a local value do the same, and a `set` of names where each process hashes strings with [a seed of its own](https://docs.python.org/3/using/cmdline.html#envvar-PYTHONHASHSEED), as under `torchrun`.) **Cure:** an order that no rank can decide for itself.


# %%
# NBVAL_CHECK_OUTPUT
def by_name():
    totals = two_totals()
    for name in sorted(totals):  # the names are the same everywhere
        dist.all_reduce(totals[name])
    return {name: total.tolist() for name, total in totals.items()}


values = examine(by_name)
print(values[0])
assert values[0] == values[1] == {"loss": [13.0, 11.0], "hits per class": [6.0, 0.0, 2.0]}

# %% [markdown]
# ### Patient 3: a data loader that forks after the group exists
#
# "With `num_workers=0` it works. With a worker it stands still at the first batch." The dataset prepares itself when the first item is asked for, and a barrier makes the ranks wait for each other meanwhile. A worker of a `DataLoader` on Linux is a **fork**: a copy of the process's memory, but of none of its threads except the one that forked.
#
# **Predict.** A barrier needs threads of gloo, which carry messages. Which does the worker have?


# %%
# NBVAL_CHECK_OUTPUT
def thread_names():
    """The threads of this process by name, where the system tells (Linux)."""
    return sorted({p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")})


class Lazy(Dataset):
    def __init__(self, barrier):
        self.barrier = barrier

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.barrier:
            dist.barrier()  # "until the other rank has its files too"
        return {"item": index, "threads": thread_names()}


def load(barrier, workers=1):
    dist.all_reduce(torch.ones(1))  # the group is at work before the worker starts
    context = "fork" if workers else None
    loader = DataLoader(
        Lazy(barrier), None, num_workers=workers, multiprocessing_context=context,
        worker_init_fn=lambda _: signal.alarm(60),  # a deadline for the worker too
    )  # fmt: skip
    batches = list(loader)
    return [batch["item"] for batch in batches], batches[0]["threads"], thread_names()


print(*where(hang(load, True, sign="__next__")), sep="\n")
print("without a worker:", [items for items, *_ in examine(load, True, 0)])

# %% [markdown]
# Both ranks wait in `__next__` of the loader: for their own workers. A stack of the rank does not show what those do. **Tool: look at the child.** A worker that stands still cannot answer, so here the worker of a loader *without* the barrier tells which threads it has, and the rank which it has (on Linux).


# %%
def load_mended():
    dist.barrier()  # in the rank, before any worker exists
    return load(False)


values = examine(load_mended)
print("items on each rank:   ", [items for items, _, _ in values])
print("threads in the rank:  ", values[0][2])
print("threads in its worker:", values[0][1])
assert [items for items, *_ in values] == [[0, 1, 2, 3]] * 2

# %% [markdown]
# **Cause:** gloo's threads stayed in the parent; a barrier in the worker is handed to a thread that the worker does not have. A fork also copies locks that another thread held, and CUDA cannot be used in it at all ([PyTorch's notes](https://docs.pytorch.org/docs/stable/notes/multiprocessing.html)). **Cure:** collectives belong to the rank, workers load: the loader above is the mended one.
#
# ### Patient 4: the port is in use
#
# "Yesterday it ran. Today `init_process_group` never ends on some ranks." With `init_method="tcp://…"` or `MASTER_PORT`, rank 0 opens a port, the meeting point of all ranks. Here somebody else has it, as a job that was not ended would.

# %%
# NBVAL_CHECK_OUTPUT
somebody = socket.create_server(("127.0.0.1", 0))  # a real port on this machine, taken
taken = somebody.getsockname()[1]


def meet(port):
    try:
        address = f"tcp://127.0.0.1:{port}"
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    except dist.DistNetworkError as error:
        print("EADDRINUSE" if "EADDRINUSE" in str(error) else error)
        return "could not listen"


for deadline in (2.5, 10, 40):  # longer where a busy machine has not brought both ranks in
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            launch(meet, 2, taken, init=False, timeout=deadline)
    except LaunchTimeout as error:
        SEEN["meet"] = "LaunchTimeout"
        first, second = error.others.values()
        if "has returned" in first and "init_process_group" in second:
            print(printed.getvalue().strip(), *where(error), sep="\n")
            break

# %% [markdown]
# **Tool: read both ranks.** Rank 0 knows the cause: `EADDRINUSE`, *address already in use*. Rank 1 is the one that hangs: it has found somebody at that port, but not rank 0. In a log of eight ranks, seven wait and one line tells. From a shell, `ss -ltnp | grep PORT` names the process that holds the port.
#
# **Cure:** do not choose a port, ask for a free one: port 0. `torchrun --standalone` does that ([its page](https://docs.pytorch.org/docs/stable/elastic/run.html) lets it pick a free port), and so does this cell: the store is opened first, and its port is told to the ranks.


# %%
# NBVAL_CHECK_OUTPUT
def meet_at(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print("sum of two ones:", launch(meet_at, 2, store.port, init=False))
print("another port than the taken one:", store.port != taken)
somebody.close()

# %% [markdown]
# ## Ward 2: an error, but whose?
#
# ### Patient 5: one rank raises, the other gets blamed
#
# "Rank 0 crashes with a network error. We have asked the administrators to check the cable." Each rank writes a log of its own here, and leaves as soon as it fails, as a program without `launch` does.
#
# **Predict.** Both ranks will leave with an error. Which one knows why?


# %%
# NBVAL_CHECK_OUTPUT
def step_with_logs(folder):
    rank = dist.get_rank()
    labels = {"image_1": 0, "image_2": 1}
    try:
        target = torch.tensor([float(labels[f"image_{rank + 2}"])])
        dist.all_reduce(target)
    except Exception as error:
        line = {"time": time.time(), "rank": rank, "error": f"{type(error).__name__}: {error}"}
        Path(folder, f"rank{rank}.json").write_text(json.dumps(line))
        os._exit(1)  # the process is gone, and its sockets with it


with tempfile.TemporaryDirectory() as folder:
    print("named first:", str(examine(step_with_logs, folder)).splitlines()[0])
    logs = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
for log in sorted(logs, key=lambda log: log["time"]):
    lost = re.search(r"Connection (reset|closed)", log["error"])
    print(f"rank {log['rank']}:", "connection to a peer lost" if lost else log["error"])

# %% [markdown]
# The rank that is named first is the one whose end was *noticed* first, even by `launch`: it may be the victim. **Tool: every rank's log, in order of time.** The first error is the cause; a lost connection, or a time-out of the group, is what the others see of it. `torchrun --log-dir logs --redirects 3 …` keeps a log for each rank; its summary names the *root cause (first observed failure)*.
#
# **Cause:** rank 1 has an image without a label. **Cure:** mend the data, here: skip what has no label. But a rank that skips must still make the collective, or patient 1 comes back.


# %%
# NBVAL_CHECK_OUTPUT
def step_mended():
    labels = {"image_1": 0, "image_2": 1}
    label = labels.get(f"image_{dist.get_rank() + 2}")
    both = torch.tensor([0.0, 0.0] if label is None else [label, 1.0])  # sum, and how many
    dist.all_reduce(both)
    return both.tolist()


values = examine(step_mended)
print("sum of labels, number of labels:", values)
assert values == [[1.0, 1.0]] * 2

# %% [markdown]
# ### Patient 6: a tensor of another shape on one rank
#
# "It trains well and dies in the evaluation." Five predictions on two ranks: three here, two there.
#
# **Predict.** gloo does not compare shapes before it sends. You cannot know what follows, so bet: does the rank that expects two numbers and gets three hang, end with an error, or return garbage?


# %%
def gather_predictions():
    mine = torch.arange(3.0) if dist.get_rank() == 0 else torch.arange(3.0, 5.0)
    pieces = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(pieces, mine)
    return torch.cat(pieces).tolist()


outcome = examine(gather_predictions)
assert isinstance(outcome, RankError)
print("\nsymptom:", str(outcome).splitlines()[0])
print(*compared(examine(gather_predictions, level="DETAIL")), sep="\n")

# %% [markdown]
# One process aborts in compiled code, and no Python error can be caught. gloo counts bytes, and in the version above it sends each tensor in two halves: of 12 bytes (three numbers) and of 8. The other rank has returned, or has lost its connection. **Tool: DETAIL again.** It turns the abort into a sentence: the last two lines.
#
# **Cause:** the shares are not equal. **Cure:** send the lengths first, pad to the longest, cut afterwards.


# %%
# NBVAL_CHECK_OUTPUT
def gather_mended():
    mine = torch.arange(3.0) if dist.get_rank() == 0 else torch.arange(3.0, 5.0)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(lengths, torch.tensor([len(mine)]))
    longest = max(int(n) for n in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    pieces = [torch.empty(longest) for _ in range(2)]
    dist.all_gather(pieces, padded)
    return torch.cat([p[: int(n)] for p, n in zip(pieces, lengths, strict=True)]).tolist()


values = examine(gather_mended)
print(values)
assert values == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2

# %% [markdown]
# ### Patient 7: unused parameters, at step 2
#
# "The first step is fine, so the model must be. The second step raises." This model has a second head that the loss does not use. DDP sends gradients in *buckets*: groups of parameters, each sent when all gradients of its group are there.
#
# **Predict.** The mistake is in the forward pass of step 1. Why does nobody complain before step 2?


# %%
# NBVAL_CHECK_OUTPUT
class TwoHeads(torch.nn.Module):
    def __init__(self, heads=("price", "age")):
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(3, 1) for name in heads})

    def forward(self, x):
        return self.heads["price"](x)


def train(heads=("price", "age"), **options):
    model = DDP(TwoHeads(heads), **options)
    for step in (1, 2, 3):
        try:
            now = "forward"
            loss = model(torch.ones(2, 3)).mean()
            now = "backward"
            loss.backward()
        except RuntimeError as error:
            raise RuntimeError(f"{now} of step {step}: {error}") from None
    return f"{step} steps"


outcome = examine(train)
print(re.search(r"\w+ of step \d: Expected to have finished reduction", outcome.message)[0])

# %% [markdown]
# A parameter that takes no part leaves its bucket open; DDP notices in the next forward pass. **Tool: `TORCH_DISTRIBUTED_DEBUG=INFO`** adds the names. Not `DETAIL`: the last two lines try it, on this model and on one without the unused head. With the version above and gloo, DETAIL kills the healthy one too, so it says nothing about this patient.

# %%
message = examine(train, level="INFO").message
print(re.search(r"Parameters which did not receive grad for rank \d: (.*)", message)[1])
for name, heads in {"this model": ("price", "age"), "a healthy one": ("price",)}.items():
    outcome = examine(train, heads, level="DETAIL")
    print(f"DETAIL on {name}:", str(outcome).splitlines()[0][:60])

# %% [markdown]
# **Cause:** `heads.age` is in the model and not in the loss. **First cure:** mend the graph: leave it out, or let its output count. **Second cure:** `find_unused_parameters=True`, when the part that is used changes from step to step. It [walks the graph in every step](https://docs.pytorch.org/docs/stable/notes/ddp.html), which is extra work.

# %%
# NBVAL_CHECK_OUTPUT
print("without the head:      ", examine(train, ("price",)))
print("find_unused_parameters:", examine(lambda: train(find_unused_parameters=True)))

# %% [markdown]
# ### Patient 8: `rank` where `local_rank` belongs
#
# "On one machine with two devices it works. On two machines it dies on the second." `RANK` counts over all machines, `LOCAL_RANK` within one. These are two real ranks in one group; what `torchrun --nnodes=2 --nproc-per-node=1` would set on two machines with one device each is set by hand. The cell prints whether each rank got its own device.
#
# **Predict.** Which rank fails on two machines, and at which index?


# %%
# NBVAL_CHECK_OUTPUT
def choose_device(machines, variable, names):
    rank = dist.get_rank()
    if machines == 2:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        names = names[rank : rank + 1]  # the one device that this machine has
    device = names[int(os.environ[variable])]
    dist.barrier()
    return device


names = [place.name for place in places]
print("one machine, by RANK:       ", examine(choose_device, 1, "RANK", names) == names)
outcome = examine(choose_device, 2, "RANK", names)
print(f"two machines, by RANK:       rank {outcome.rank}: {outcome.type_name}")
SEEN["choose_device"] = type(outcome).__name__  # this is how the patient ended
print("two machines, by LOCAL_RANK:", examine(choose_device, 2, "LOCAL_RANK", names) == names)

# %% [markdown]
# **Tool: print `RANK`, `LOCAL_RANK` and the number of devices on each rank.** With CUDA the same mistake reads *invalid device ordinal*. Whoever tests on one machine cannot see it: there both numbers are equal. **Cure:** devices by `LOCAL_RANK`; `RANK` is for shards of data, and for who prints and saves.
#
# ### Patient 9: a checkpoint that all ranks write at once
#
# "Once in a while a checkpoint cannot be read." All ranks run `torch.save(state, path)` with the same path. Most of the time they finish in an order that does no harm. Here barriers force a moment that does: rank 0 has saved and wants to read; rank 1 is a little slower, and halfway through its own.


# %%
# NBVAL_CHECK_OUTPUT
STATE = {"step": 100, "weights": torch.zeros(1000)}


def everybody_saves(path):
    if dist.get_rank() == 0:
        torch.save(STATE, path)
    dist.barrier()
    if dist.get_rank() == 1:
        written = io.BytesIO()
        torch.save(STATE, written)
        Path(path).write_bytes(written.getvalue()[:2000])  # so far
    dist.barrier()
    return torch.load(path)["step"] if dist.get_rank() == 0 else None


def one_saves(path):
    if dist.get_rank() == 0:
        torch.save(STATE, path + ".new")
        os.replace(path + ".new", path)
    dist.barrier()  # outside the if: patient 1
    return torch.load(path)["step"]


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    outcome = examine(everybody_saves, path)
    print(f"rank {outcome.rank}:", re.search(r"failed reading zip archive", outcome.message)[0])
    print("mended, step read by each rank:", examine(one_saves, path))

# %% [markdown]
# **Tool: ask who opens that path.** Log rank and path at every `open` for writing; two ranks with one path is the finding. **Cause:** opening a file for writing empties it, under the eyes of everybody who reads. **Cure** (`one_saves`): one rank writes, under another name, and renames when it is done: a reader sees the old file or the new one, never half of it. A barrier lets nobody read too early.
#
# ## Ward 3: no error, and wrong
#
# The worst ward. Nothing stops, and the numbers look like numbers.
#
# ### Patient 10: different order, equal shapes
#
# Patient 2 again, but now both tensors hold one number. Two ranks measured a loss and a number of hits; the sums are wanted.
#
# **Predict.** Will it hang? Will DETAIL complain? What will the sums be?


# %%
# NBVAL_CHECK_OUTPUT
def equal_shapes(names=None):
    losses, hits = [2.0, 40.0], [30.0, 20.0]  # of rank 0, and of rank 1
    rank = dist.get_rank()
    totals = {"loss": torch.tensor([losses[rank]]), "hits": torch.tensor([hits[rank]])}
    for name in names or sorted(totals, key=lambda name: totals[name].item()):
        dist.all_reduce(totals[name])
    return {name: total.item() for name, total in totals.items()}


print("wanted:", {"loss": 42.0, "hits": 50.0})
for rank, totals in enumerate(examine(equal_shapes, level="DETAIL")):
    print(f"rank {rank}:", totals)

# %% [markdown]
# No hang, no complaint: all-reduce of one number meets all-reduce of one number. A backend adds whatever arrives next. **Tool: a recorder** that writes down, on each rank, every collective with its shape, the line that called it, and the texts that this line's function had in its variables (here `name`). It wraps the functions of `torch.distributed`.


# %%
# NBVAL_CHECK_OUTPUT
def record(log):
    """From here on, write each collective of this rank into the list `log`."""

    def wrap(name, collective):
        def recorded(*args, **kwargs):
            caller = sys._getframe(1)
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
            shapes = [list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)]
            texts = {k: v for k, v in caller.f_locals.items() if isinstance(v, str)}
            log.append(f"{name} {shapes} {texts} at {line}")
            return collective(*args, **kwargs)

        return recorded

    for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
        setattr(dist, name, wrap(name, getattr(dist, name)))


def first_difference(logs):
    for number, calls in enumerate(zip_longest(*logs, fillvalue="no call"), start=1):
        if len(set(calls)) > 1:
            return number, calls


def recorded(program, *args):
    log = []
    record(log)
    return log, program(*args)


logs, _ = zip(*examine(recorded, equal_shapes), strict=True)
number, calls = first_difference(logs)
print(f"collective {number} differs:")
for rank, call in enumerate(calls):
    print(f"  rank {rank}: {call}")

logs, sums = zip(*examine(recorded, equal_shapes, ["hits", "loss"]), strict=True)
print("mended:", sums[0], "first difference:", first_difference(logs))
assert list(sums) == [{"loss": 42.0, "hits": 50.0}] * 2

# %% [markdown]
# **Cause** as in patient 2, and found only because the recorder knows *which* tensor each rank meant. **Cure:** a fixed order, given as an argument. "None" proves little by itself: this recorder does not see the collectives that DDP makes in compiled code, and a text that must differ (`f"cuda:{rank}"`) is a false alarm.
#
# PyTorch has a recorder too, the [flight recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html): it keeps the last collectives of each rank, to be read after a hang. It is on by default here, also over gloo. A rank that hangs cannot read its own, so a thread does it. Back to patient 2, after a second:


# %%
def black_box(program, folder):
    totals = two_totals()

    def dump():
        flight = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        flight["loss"] = totals["loss"].tolist()  # as it is in the hang
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(flight))

    threading.Timer(1.0, dump).start()
    return program(totals)


with tempfile.TemporaryDirectory() as folder:
    hang(black_box, smallest_first, folder, sign="all_reduce")
    flights = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("*"))]
for rank, flight in enumerate(flights):
    for e in flight["entries"]:
        print(f"rank {rank}: {e['collective_seq_id']} {e['profiling_name']} {e['input_sizes']}")
print("loss on rank 0, in the hang:", flights[0]["loss"], "wanted: [13.0, 11.0]")

# %% [markdown]
# Rank 0 has two entries, rank 1 one: rank 0's *first* call has ended. gloo gave it the numbers of rank 1's other tensor (2 + 3 and 1 + 0), so its loss is wrong already, and it hangs in the second call. DETAIL stops before that. Like DETAIL, the flight recorder keeps shapes, not meanings: patient 10 would pass it. The function has an underscore, so it may change. With NCCL the *watchdog*, a thread that ends hanging collectives, writes the buffer to a file if `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, and `torchfrtrace` compares the files (not run here). Older pages set the buffer's size by another variable:

# %% then="TORCH_NCCL_TRACE_BUFFER_SIZE" now="TORCH_FR_BUFFER_SIZE" since="deprecated in 2.13.0, perhaps earlier"
# NBVAL_CHECK_OUTPUT
for variable in ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"):
    os.environ.pop("TORCH_FR_BUFFER_SIZE", None)
    os.environ[variable] = "100"
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # what the ranks print
        examine(log_mended)
    print(f"{variable}: deprecated: {'deprecated' in printed.getvalue()}")
    del os.environ[variable]

# %% [markdown]
# ### Patient 11: different seeds at the start
#
# "Each rank has a seed of its own, for the shuffling. The gradients are averaged. And still a checkpoint of rank 1 is another model than one of rank 0." No DDP here: the gradients are averaged by hand.


# %%
# NBVAL_CHECK_OUTPUT
def fingerprint(model):
    """The largest distance of this rank's weights from rank 0's."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, src=0)
    return (mine - theirs).abs().max().item()


def three_steps(together):
    torch.manual_seed(dist.get_rank())  # another order of the data on each rank
    model = torch.nn.Linear(4, 1)
    for parameter in model.parameters():
        if together:
            dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distances = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        distances.append(fingerprint(model))
    return distances


for words, together in {"as it was:": False, "mended:   ": True}.items():
    distances = examine(three_steps, together)[1]
    print(words, "distance after each step:", *(f"{distance:.3f}" for distance in distances))
assert distances == [0, 0, 0]  # not nearly: equal gradients on equal weights

# %% [markdown]
# **Tool: a fingerprint of the weights**, compared over the ranks after the first step and once in a while. **Cause:** the seed was set before the model was made, so each rank made another one. Equal gradients move both by equal steps, so the distance between them stays. **Cure:** broadcast the weights of rank 0 (`together`), as DDP does when it wraps a model.
#
# ### Patient 12: the scheduler is stepped n times
#
# "On two devices the second half of the training does nothing." An epoch has 16 steps on one device, and 8 on two, because each rank sees half of the data. The script's schedule is written for those 8: the learning rate falls to zero in eight calls. Its wrapper expects a schedule written for 16, so it steps the scheduler once for each rank, twice a step ([accelerate](https://github.com/huggingface/accelerate/issues/2142) does so by default).
#
# **Predict.** The eight learning rates.


# %%
# NBVAL_CHECK_OUTPUT
def learning_rates(per_step=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=8)
    rates = []
    for _ in range(8):
        rates.append(round(optimizer.param_groups[0]["lr"], 3))
        optimizer.step()
        for _ in range(per_step or dist.get_world_size()):
            schedule.step()
    return rates


print("as it was:", examine(learning_rates)[0])
values = examine(learning_rates, 1)
print("mended:   ", values[0])
assert values == [[1 - step / 8 for step in range(8)]] * 2

# %% [markdown]
# **Tool: log the learning rate beside the loss, always.** **Cause:** both the script and the wrapper accounted for the two ranks. **Cure:** one of them: one scheduler step for each optimizer step.
#
# ## Ward 4: everything right, and slow
#
# ### Patient 13: threads that crowd the cores
#
# "Two processes on the same machine need far more than twice the time of one." PyTorch gives a process about as many threads as the machine has cores. Two ranks that do not know of each other start twice as many threads as there are cores. `torchrun` [sets `OMP_NUM_THREADS=1`](https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/run.py), and `launch` gives each rank its share; processes that you start yourself need [the same care](https://docs.pytorch.org/docs/stable/notes/multiprocessing.html). So this patient undoes what `launch` did: the same two cores for every rank.
#
# **Tool: count**: `torch.get_num_threads()` on each rank, summed, against the number of devices. `top` shows the load. Then measure with the right number: compare the last two lines, the same ranks and the same sums. The first line is one process alone.


# %%
CORES = {core for place in places for core in place.cpus}


def many_sums(threads, repeat=60):
    if CORES and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, CORES)
    torch.set_num_threads(threads)
    numbers = torch.rand(400_000)
    (numbers * numbers).sum()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        (numbers * numbers).sum()
    return torch.get_num_threads(), time.perf_counter() - start


runs = {
    "one process, two threads": launch(in_group, 1, many_sums, (2,), None, init=False),
    "two ranks, crowded": examine(many_sums, 2),
    "two ranks, one thread": examine(many_sums, 1),
}
for name, ranks in runs.items():
    threads, seconds = zip(*ranks, strict=True)
    print(f"{name:24} {sum(threads)} threads, the slowest took {1000 * max(seconds):.0f} ms")

# %% [markdown]
# **Cause:** each sum ends when its slowest thread ends. A thread that is ready first [waits actively](https://gcc.gnu.org/onlinedocs/libgomp/OMP_005fWAIT_005fPOLICY.html) for a while, on a core that the late one needs; so twice the threads may cost much more than twice the time. **Cure:** `torch.set_num_threads(cores // ranks)`, or `OMP_NUM_THREADS` before Python starts. Eight ranks on 64 cores would start 512 threads. The cost depends on who else is at work: compare on your own machine.
#
# ## From symptom to cause
#
# All thirteen, sorted by what you see first. Whether a patient hung, raised or returned is taken from the runs above; that what it returned is wrong, or came late, its cell showed.

# %%
CHART = [  # (program, its cause, the tool that shows it)
    ("log_on_rank_0", "1 collective on rank 0 only", "stacks"),
    ("smallest_first", "2 collectives in another order", "debug level DETAIL"),
    ("load", "3 worker forked from a rank uses the group", "look at the child"),
    ("meet", "4 port in use", "read every rank"),
    ("step_with_logs", "5 one rank raised, others lost it", "logs by time"),
    ("gather_predictions", "6 another shape on one rank", "debug level DETAIL"),
    ("train", "7 unused parameters (at step 2)", "debug level INFO"),
    ("choose_device", "8 rank instead of local_rank", "RANK, LOCAL_RANK"),
    ("everybody_saves", "9 all ranks write one file", "log every open"),
    ("equal_shapes", "10 another order, equal shapes", "recorder"),
    ("three_steps", "11 different weights at the start", "fingerprint"),
    ("learning_rates", "12 scheduler stepped n times", "log the rate"),
    ("many_sums", "13 more threads than cores", "count threads"),
]
KINDS = {
    "LaunchTimeout": "hangs",
    "RankError": "ends with\nan error",
    "list": "runs, and\nis wrong",
}
chart = []
for program, cause, tool in CHART:
    symptom = "is slow" if program == "many_sums" else KINDS[SEEN[program]]
    chart.append((symptom, cause, tool))
    print(f"{symptom.replace(chr(10), ' '):19}  {tool:18}  {cause}")

symptoms = list(dict.fromkeys(symptom for symptom, _, _ in chart))
fig, ax = plt.subplots(figsize=(8.5, 5.6))
for number, symptom in enumerate(symptoms):
    rows = [row for row, (kind, _, _) in enumerate(chart) if kind == symptom]
    middle, colour = sum(rows) / len(rows), plots.COLOURS[number]
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": colour, "linewidth": 2}
    ax.text(0.0, middle, symptom, ha="center", va="center", fontweight="bold", bbox=box)
    for row in rows:
        style = {"color": colour, "linestyle": plots.DASHES[number], "marker": "", "linewidth": 1.5}
        ax.plot([0.45, 0.95, 1.0], [middle, row, row], **style)
        ax.text(1.05, row, chart[row][2], va="center", style="italic")
        ax.plot([2.1, 2.3], [row, row], **style)
        ax.text(2.35, row, chart[row][1], va="center")
for x, head in ((0.0, "what you see"), (1.05, "the tool"), (2.35, "the cause")):
    ax.text(x, -1.1, head, ha="left" if x else "center", fontsize=12, color="dimgrey")
ax.set(xlim=(-0.5, 5.1), ylim=(len(chart) - 0.4, -1.6))
ax.axis("off")
ax.set_title(f"{len(chart)} causes behind {len(symptoms)} symptoms, and where to look")
counts = [sum(kind == symptom for kind, _, _ in chart) for symptom in symptoms]
words = [f"{s}: {n}".replace("\n", " ") for n, s in zip(counts, symptoms, strict=True)]
plots.show(
    fig,
    name="symptom-to-cause",
    alt="A map from the symptom on the left over the tool to the cause on the right, for "
    f"{len(chart)} patients ({'; '.join(words)}). The table above it holds the same.",
)

# %% [markdown]
# A symptom has several causes, so do not guess: the tool between them is the step that people leave out. Start at the left, use the tools of that ward, cheapest first: a stack can be had from a run that hangs, logs if they were switched on before, DETAIL needs another run. Patient 2 stands twice, in truth: it hangs *and* holds a wrong sum. And patient 9 ends with an error only because barriers forced the moment: most of the time it runs.
#
# ## What this machine cannot show
#
# NCCL fails in other words. A collective on a GPU is only *enqueued*, so the line that hangs is a later one that needs the result (`.item()`, a copy), and a stack points there. NCCL's **watchdog** ends the process after the group's time-out ([ten minutes](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group) if nobody sets it). With two GPUs this cell runs patient 1 over NCCL; the multi-GPU path was not run by the authors.


# %%
def log_on_rank_0_on_gpu():
    loss = torch.ones(1, device="cuda")
    if dist.get_rank() == 0:
        dist.all_reduce(loss)
    return loss.item()


if places[0].kind == "gpu":
    try:
        print("returned:", launch(log_on_rank_0_on_gpu, 2, timeout=10))
    except RankError as error:
        print(error)
else:
    print("two ranks over NCCL: not measured, they need two GPUs")

# %% [markdown]
# ## Exercise
#
# [Exercise 06](../exercises/06_debugging_clinic.ipynb): mend four broken programs, one of them new to you, and write a function that names the guilty rank from the ranks' dumps. About 45 minutes.
#
# ## Recap
#
# A hang is a question that no rank answers by itself: set a deadline and ask all of them. The rank that complains is seldom the one that is guilty: look for the first error, and for the rank that is *not* where the others wait. What neither hangs nor raises is found only by comparing the ranks: their collectives, their weights, their learning rates.
#
# 1. Seven of eight ranks wait in `all_reduce`; rank 5 waits in `__next__` of its data loader. Which rank do you look at, and why?
# 2. A rank logs "Connection reset by peer". Where do you read on?
# 3. When do DETAIL and the flight recorder both stay silent although the ranks do different things?
#
# <details><summary>Answers</summary>
#
# 1. Rank 5: the others wait for it. Its loader has not delivered, so look at its workers and its data.
# 2. In the logs of the other ranks: one of them ended before, and its error is the cause.
# 3. When the collectives have the same kind and the same shapes, but mean different tensors.
#
# </details>
#
# Go on with [exercise 06](../exercises/06_debugging_clinic.ipynb).
