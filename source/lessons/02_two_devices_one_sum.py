# ---
# jupyter:
#   course:
#     rows: [D5, M4, M7]
#     minutes: {read: 20, do: 20}
#     devices: 2
#     path: core
#     extra: tensorflow,torch
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
# # Two devices, one sum: what is the second one worth?
#
# After this lesson you can measure what a second device gains on your machine, find the size below which it costs more than it gives, and say where the missing part went.
#
# | | |
# |---|---|
# | **Time** | 20 minutes to read, 20 to do |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); `.device` and clusters ([lesson 01](01_device_placement.ipynb)) |
# | **You will** | measure a speed-up that can be believed · find the crossover · see both devices at work, and one idle · make four measuring mistakes and see what each does to the number · account for the part that is missing |
# | **Runs on** | no GPU, or one: two pinned cores · two GPUs or more: the GPUs in PyTorch, pinned cores in TensorFlow |
# | **Last verified** | Python 3.11, PyTorch 2.13.0, TensorFlow 2.21.0 |

# %%
import json
import os
import sys
import time

# TensorFlow's notices of its own housekeeping would hide what the lesson prints.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from course_utils import plots
from course_utils.devices import census, slots, watch
from course_utils.launch import LaunchTimeout, launch
from course_utils.timing import Comparison, Timing, compare, speedup_table

plots.use_style()

# %%
print(census())
devices = slots(2)
assert len(devices) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## A question from 2016
#
# Chapter 6 of *First Contact with TensorFlow* (2016) shows how to use two GPUs: compute $A^{10} + B^{10}$ for two large random matrices, first on one GPU, then with $A$ on one and $B$ on the other. The program prints both times, but the page does not show them. A reader asked below it: what is the output of the timing, how much faster does it get? That is the most important part, and it is missing. You will measure it.
#
# ## From scratch, on small matrices
#
# Ten factors take nine products, one after the other. But four are enough, because squares can be squared: $A^2$, $A^4$, $A^8$, and then $A^8 A^2$. This works for the tenth power; the exercise asks you for any.


# %%
# NBVAL_CHECK_OUTPUT
def tenth_power(m):
    """The tenth power of a square matrix in four products, for NumPy, torch and TensorFlow."""
    square = m @ m
    fourth = square @ square
    return (fourth @ fourth) @ square


A = np.array([[1, 1], [1, 0]])
B = np.array([[1, 2], [0, 1]])
print(tenth_power(A) + tenth_power(B))
assert np.array_equal(tenth_power(A), np.linalg.matrix_power(A, 10))

# %% [markdown]
# Two powers that know nothing of each other: one for each device. Only the sum brings them together, so one of them has to travel.
#
# ## One device and two, in PyTorch
#
# Both ways run in the same two processes and take turns, so that what disturbs one disturbs the other too. In the first way rank 0 computes both powers, and rank 1 waits. In the second each rank computes one, and rank 1 sends its own to rank 0 (`dist.send`, `dist.recv`: a message between two ranks), which adds.


# %%
def my_device():
    """The GPU of this rank if it was given one, otherwise the core that it is pinned to."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_matrices(size):
    generator = torch.Generator().manual_seed(size)
    a, b = torch.rand(2, size, size, generator=generator)
    return a.to(my_device()), b.to(my_device())


def on_one(rank, a, b):
    if rank == 0:
        return tenth_power(a) + tenth_power(b)


def on_two(rank, a, b):
    power = tenth_power(a if rank == 0 else b)
    if rank == 1:
        dist.send(power, dst=0)
    else:
        other = torch.empty_like(power)
        dist.recv(other, src=1)
        return power + other


# %% [markdown]
# First the result, then the speed: a fast wrong answer is worth nothing.


# %%
# NBVAL_CHECK_OUTPUT
def difference(size):
    rank, (a, b) = dist.get_rank(), make_matrices(size)
    one, two = on_one(rank, a, b), on_two(rank, a, b)
    return ((one - two).abs().max() / one.abs().max()).item() if rank == 0 else None


largest, _ = launch(difference, 2, 512)
print("largest relative difference below 1e-6:", largest < 1e-6)
assert largest < 1e-6

# %%
print("largest relative difference:", largest)

# %% [markdown]
# A difference of 0 means: the same products, with their additions in the same order, only elsewhere. The tolerance is for devices of different kinds, which may order the additions inside a product differently.
#
# ## Measure so that the number can be believed
#
# A **barrier** is a point where each rank waits until all have come. Both ways start at a barrier, and the clock starts after it, so that nobody pays for the other's lateness. The clock stops when one number of the result has been read: a GPU answers only when it is done. One run before the first round does not count: it wakes up the library on both ranks, and the link between them. The order changes from round to round.
#
# **Predict.** How many times as fast are two devices with matrices of 64 rows, of 256, and of 2048? Is there a size where they are *slower* than one?

# %%
SIZES = [64, 128, 256, 512, 1024, 2048]
ROUNDS = {64: 21, 128: 21, 256: 21, 512: 9, 1024: 5, 2048: 2}


def race(size, rounds):
    rank, (a, b) = dist.get_rank(), make_matrices(size)
    seconds = {on_one: [], on_two: []}
    on_two(rank, a, b)  # wakes up both ranks and the link between them
    for number in range(rounds):
        for way in [on_one, on_two] if number % 2 else [on_two, on_one]:
            dist.barrier()
            start = time.perf_counter()
            total = way(rank, a, b)
            if rank == 0:
                total[0, 0].item()  # now it is done, also on a GPU
            seconds[way].append(time.perf_counter() - start)
    one, two = (Timing(tuple(runs)) for runs in seconds.values())
    return Comparison({"one": one, "two": two})


def table(results):
    return speedup_table(
        (f"{n} × {n}", result["one"], result["two"], 2) for n, result in results.items()
    )


in_torch = {}
for size in tqdm(SIZES, desc="PyTorch", file=sys.stdout):
    in_torch[size], _ = launch(race, 2, size, ROUNDS[size])  # rank 0 has the result
print(table(in_torch))

# %% [markdown]
# **Speed-up** is how many times as fast two devices are: the time on one over the time on two, divided within each round. The table shows the median of the rounds, and the range in which the middle half of them lies. (Each column has a median of its own, so they need not divide exactly.) **Efficiency** is the speed-up divided by the number of devices: what you get of what you pay for. Compare the first and the last line with your prediction. Should a line claim more than 2×, distrust it: the largest size has only two rounds, and another program can spoil one. The smallest sizes take less time than a message, so they scatter most.
#
# ## The same in TensorFlow, over gRPC
#
# The book used TensorFlow, so it gets its answer there too: two servers on pinned cores, as in lesson 01. The matrices are made where they are needed, before the clock starts, and again one number of the result is read. `compare` works like the rounds that you have just seen: turns, then medians. This cell takes the longest of all.


# %%
def race_in_tensorflow(size, rounds):
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    cluster, index = tf.train.ClusterSpec(config["cluster"]), config["task"]["index"]
    # One thread computes; the server needs others to talk to its peer and to the client.
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=4
    )
    tf.distribute.Server(cluster, "worker", index, config=threads)
    if index > 0:
        return None  # its server works on until both have returned
    tf.config.experimental_connect_to_cluster(cluster, job_name="client")
    first, second = "/job:worker/task:0", "/job:worker/task:1"

    def both_powers(device_of_b, size):
        with tf.device(first):
            a = tf.random.stateless_uniform([size, size], seed=[size, 1])
        with tf.device(device_of_b):
            b = tf.random.stateless_uniform([size, size], seed=[size, 2])

        @tf.function
        def run(a, b):
            with tf.device(first):
                power_a = tenth_power(a)
            with tf.device(device_of_b):
                power_b = tenth_power(b)
            with tf.device(first):
                return (power_a + power_b)[0, 0]

        compiled = run.get_concrete_function(a, b)  # before any clock starts
        return lambda: compiled(a, b).numpy()

    small = both_powers(first, 64)(), both_powers(second, 64)()  # wakes everything up
    assert np.isclose(*small, rtol=1e-6), "two devices must give the sum of one"
    ways = {"one": both_powers(first, size), "two": both_powers(second, size)}
    return compare(ways, repeat=rounds, warmup=0)


in_tensorflow = {}
for size in tqdm(SIZES, desc="TensorFlow", file=sys.stdout):
    in_tensorflow[size], _ = launch(
        race_in_tensorflow, 2, size, ROUNDS[size], framework="tensorflow", roles={"worker": 2}
    )
print(table(in_tensorflow))

# %% [markdown]
# ## The answer: the crossover
#
# The **crossover** is the size from which on two devices are faster than one, at every size measured.


# %%
def speedups(results):
    return [results[n].ratio("one", "two") for n in SIZES]


def crossover(results):
    slower = [n for n, gain in zip(SIZES, speedups(results), strict=True) if gain.median <= 1]
    later = [n for n in SIZES if not slower or n > max(slower)]
    return f"from {later[0]} rows" if later else "at no size here"


fig, ax = plt.subplots()
for label, results in {"PyTorch": in_torch, "TensorFlow": in_tensorflow}.items():
    gains = speedups(results)
    middle = [gain.median for gain in gains]
    below = [gain.median - gain.low for gain in gains]
    above = [gain.high - gain.median for gain in gains]
    ax.errorbar(SIZES, middle, yerr=[below, above], label=label, capsize=3)
ax.axhline(1, color="black", linestyle=":", marker="")
ax.axhline(2, color="black", linestyle=":", marker="")
ax.text(SIZES[1], 0.05, "below 1: one device is faster", fontsize=9)
ax.text(SIZES[0], 2.04, "perfect: 2×", fontsize=9)
ax.set_xscale("log", base=2)
ax.set_xticks(SIZES, SIZES)
ax.set(xlabel="rows of the matrices", ylabel="speed-up on two devices (×)", ylim=(0, 2.2))
ax.set_title(
    f"A second device pays {crossover(in_torch)} in PyTorch,\n{crossover(in_tensorflow)} in TensorFlow"
)
ax.legend(loc="lower right")
plots.show(
    fig,
    name="speed-up-against-size",
    alt="Speed-up on two devices against the number of rows, for PyTorch and TensorFlow. "
    f"PyTorch gains {crossover(in_torch)}, TensorFlow {crossover(in_tensorflow)}; "
    f"at 2048 rows they reach {speedups(in_torch)[-1].median:.2f} and "
    f"{speedups(in_tensorflow)[-1].median:.2f} times.",
)

print("To the reader of 2016: how much faster it gets, on this machine, today.")
for label, results in {"PyTorch": in_torch, "TensorFlow": in_tensorflow}.items():
    print(f"{label:10}  pays {crossover(results)};  2048 rows: {speedups(results)[-1]}")

# %% [markdown]
# The markers are medians, the bars hold the middle half of the rounds. Where a bar reaches across 1, your machine has not decided; other programs at work are the usual reason. Left of the crossover the second device costs more than it gives, because some costs do not shrink with the work: waking the other process, and a message. So the old advice, *with too little data use one device*, has a number now. It belongs to your machine.
#
# ## Are both devices at work?
#
# On a GPU machine people run `nvidia-smi` before and during training, to see whether the second GPU does anything. `watch` makes that picture for cores and for GPUs: first nothing, then one device, then both.
#
# **Predict.** While rank 0 computes both powers, rank 1 waits for a message. Is its device busy or idle?


# %%
def work(way, seconds=1.0):
    rank, (a, b) = dist.get_rank(), make_matrices(1024)
    more = torch.ones(1, device=my_device())
    deadline = time.monotonic() + seconds
    while more:
        way(rank, a, b)
        more.fill_(time.monotonic() < deadline)
        dist.broadcast(more, src=0)  # rank 0 decides for both, or one would wait for ever


with watch() as seen:
    time.sleep(0.5)
    seen.mark("one device")
    launch(work, 2, on_one)
    seen.mark("two devices")
    launch(work, 2, on_two)

print(seen.table())
plots.show(
    seen.figure(),
    name="devices-at-work",
    alt="Utilisation of each device over time, in three phases: no work, work on one device, "
    "work on both. " + seen.finding(),
)

# %% [markdown]
# In the phase *one device* only one should be at work, though you have two. Whenever a run on two devices is no faster than on one, this picture is the first thing to look at. Look also at the phase *before*: where it is not near 0 %, other programs use your cores, and every number on this page suffers.
#
# ## Four mistakes in the old measurement
#
# This is the shape of the program of 2016, in our words. Its four mistakes are still made.
#
# ```python
# start = now()
# with Session() as session:      # 2. the clock runs while it starts
#     session.run(                # 3. once
#         power(A, 10) + power(B, 10), feed=matrices)   # 1. 11 factors
# print(now() - start)            # 4. one GPU goes first, then two
# ```
#
# Here is each mistake alone, and what it does to the number.
#
# ### 1. Another power
#
# Its recursion stops one step too late: it multiplies $n + 1$ factors.

# %%
# NBVAL_CHECK_OUTPUT
products = 0


def power_of_2016(m, n):
    """In the manner of the old listing: stops at n = 0, but returns m there, not 1."""
    global products
    if n < 1:
        return m
    products += 1
    return m @ power_of_2016(m, n - 1)


old = power_of_2016(A, 10)
print("equals the 10th power:", np.array_equal(old, np.linalg.matrix_power(A, 10)))
print("equals the 11th power:", np.array_equal(old, np.linalg.matrix_power(A, 11)))
print(f"products: {products}, where 9 would do one by one, and 4 with squares")

# %% [markdown]
# ### 2. The clock runs while the program gets ready
#
# In 2016 a program described its computation as a graph, opened a **session** to run it, and fed the data in with each run. This cell times one device both ways: the clock around all of that, and the clock around the computation only. The smaller the computation, the more the rest weighs.


# %%
def session_and_feeding(size):
    import tensorflow as tf

    v1 = tf.compat.v1
    data = np.random.default_rng(0).random((2, size, size), dtype=np.float32)

    def everything():
        with tf.Graph().as_default(), v1.Session() as session:
            a, b = (v1.placeholder(tf.float32, [size, size]) for _ in range(2))
            total = tf.reduce_sum(tenth_power(a) + tenth_power(b))
            session.run(total, {a: data[0], b: data[1]})

    with tf.Graph().as_default():
        a, b = (v1.Variable(part, use_resource=True) for part in data)
        total = tf.reduce_sum(tenth_power(a) + tenth_power(b))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            return compare(
                {"computation only": lambda: session.run(total), "as in 2016": everything}
            )


(clocks,) = launch(session_and_feeding, 1, 256, framework="tensorflow")
print(clocks)

# %% [markdown]
# ### 3. One run
#
# The first run pays for waking up libraries and memory. Here are seven runs of the sum on one PyTorch device, in a fresh process.


# %%
def seven_times(size):
    a, b = make_matrices(size)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        (tenth_power(a) + tenth_power(b))[0, 0].item()  # .item() waits for a GPU
        seconds.append(time.perf_counter() - start)
    return seconds


(seconds,) = launch(seven_times, 1, 256)
print("run 1 to 7, ms:", [round(1000 * s, 2) for s in seconds])
print(f"the first run takes {seconds[0] / np.median(seconds[1:]):.1f} times as long as the others")

# %% [markdown]
# ### 4. The single device goes first
#
# Devices have to be started once. If the first way starts both of them inside its clock, it pays for the second way too. Here are the two ways, each run once without warm-up, in fresh processes: in the order of 2016, then swapped. (Only the link between the ranks is opened before.)
#
# **Predict.** Which order claims the larger speed-up?


# %%
def once(size, order):
    rank, (a, b) = dist.get_rank(), make_matrices(size)
    link = torch.zeros(1, device=my_device())
    dist.send(link, dst=0) if rank == 1 else dist.recv(link, src=1)  # opens the link
    seconds = {}
    for way in order:
        dist.barrier()
        start = time.perf_counter()
        if way is order[0]:
            tenth_power(a[:8, :8])[0, 0].item()  # the first way starts every device
            dist.barrier()
        total = way(rank, a, b)
        if rank == 0:
            total[0, 0].item()  # wait for a GPU
        seconds[way] = time.perf_counter() - start
    return seconds[on_one] / seconds[on_two]


for name, order in {"one first": [on_one, on_two], "two first": [on_two, on_one]}.items():
    claims = sorted(launch(once, 2, 256, order)[0] for _ in range(5))
    print(
        f"{name}: claims {np.median(claims):.2f}×  (5 fresh starts: {claims[0]:.2f}–{claims[-1]:.2f})"
    )
print(f"honest:    {in_torch[256].ratio('one', 'two')}")

# %% [markdown]
# The same program, the same machine, one swap, and another claim. Warm up, take turns, repeat, and show the spread.
#
# ## Where is the rest of the 2×?
#
# **Amdahl's law** gives the first answer: what cannot be shared bounds what sharing can gain. Here that is the sum. If it takes the share $s$ of the time on one device, two devices can gain at most
#
# $$\frac{1}{s + (1 - s) / 2}$$
#
# The law knows nothing of messages. So take one round on two devices apart: rank 0 computes its power, waits for the other one to arrive, and adds. A round on one device runs in turn with it, so that all times belong together. (They are a new measurement, and differ a little from the table above.)
#
# **Predict.** The sum is an addition of two matrices, the rest are products. At which size is the limit of Amdahl's law lower, at 128 rows or at 1024?


# %%
def parts(size, rounds):
    """Median seconds on this rank: all on one device, one power, waiting and transfer, sum."""
    rank, (a, b) = dist.get_rank(), make_matrices(size)
    laps = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            (tenth_power(a) + tenth_power(b))[0, 0].item()  # reading a number waits for a GPU
        alone = time.perf_counter() - start

        dist.barrier()
        clock = [time.perf_counter()]
        power = tenth_power(a if rank == 0 else b)
        power[0, 0].item()
        clock.append(time.perf_counter())
        if rank == 1:
            dist.send(power, dst=0)
        else:
            other = torch.empty_like(power)
            dist.recv(other, src=1)
            other[0, 0].item()
        clock.append(time.perf_counter())
        if rank == 0:
            (power + other)[0, 0].item()
        clock.append(time.perf_counter())
        laps.append([alone, *np.diff(clock)])
    return 1000 * np.median(laps, axis=0)  # in ms


taken = {n: launch(parts, 2, n, ROUNDS[n])[0] for n in [128, 1024]}
for n, (alone, power, arrival, total) in taken.items():
    two, share = power + arrival + total, total / alone
    limit = 1 / (share + (1 - share) / 2)
    print(f"{n} rows: limit of Amdahl's law {limit:.2f}×, measured {alone / two:.2f}×")
    print(
        f"    one device {alone:.2f} ms, half of that {alone / 2:.2f} ms; two devices {two:.2f} ms"
    )
    slower = power - (alone - total) / 2  # than the same power without a neighbour
    print(f"    above half: slower computing {slower:.2f} ms,", end=" ")
    print(f"waiting and transfer {arrival:.2f} ms, half of the sum {total / 2:.2f} ms")

# %%
labels = ["one power", "waiting and transfer", "sum"]
shares = {n: 100 * ms[1:] / ms[1:].sum() for n, ms in taken.items()}

fig, ax = plt.subplots(figsize=(7, 2.6))
for row, share in enumerate(shares.values()):
    starts = np.cumsum([0, *share])
    for part, (label, hatch) in enumerate(zip(labels, ["", "//", ".."], strict=True)):
        ax.barh(
            row, share[part], left=starts[part], color=plots.COLOURS[part], hatch=hatch,
            edgecolor="white", label=label if row == 0 else None,
        )  # fmt: skip
ax.set_yticks(range(len(taken)), [f"{n} rows" for n in taken])
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
ax.set(xlabel="share of rank 0's time on two devices (%)", ylabel="matrices", xlim=(0, 100))
small, large = shares[128][1], shares[1024][1]
ax.set_title(f"Waiting and transfer: {small:.0f} % at 128 rows, {large:.0f} % at 1024")
ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=3)
plots.show(
    fig,
    name="where-the-rest-goes",
    alt="Two bars with the shares of one power, waiting and transfer, and the sum in the time of "
    f"rank 0. Waiting and transfer take {small:.0f} percent at 128 rows and {large:.0f} percent "
    "at 1024 rows.",
)

# %% [markdown]
# Compare the limit of the law with what was measured, then read the last line of each size: it says where the time above one half went. The sum explains least. Waiting and transfer weigh most for small matrices; for large ones computing itself may be slower when both devices work, or faster by chance (a negative number). That the transfer matters less for large matrices is arithmetic: a product of two matrices with $n$ rows takes $2n^3$ operations, and one matrix has $n^2$ numbers. From 128 to 1024 rows that is 512 times the computing, but 64 times the bytes. Remember the question, training will ask it again: how much is computed for each byte that is sent?
#
# ## Break it: the message that never comes
#
# The classic failure of sending by hand: somebody forgets a `send`, or sends only in some branch. No rank has an error. Rank 0 waits, and a real job would sit there until somebody looks. Here the launch has a deadline of two seconds.


# %%
# NBVAL_CHECK_OUTPUT
def forgot_to_send():
    power = torch.ones(2, 2, device=my_device())
    if dist.get_rank() == 0:
        dist.recv(power, src=1)  # rank 1 never sends: it just returns


try:
    launch(forgot_to_send, 2, timeout=2)
except LaunchTimeout as error:
    report = str(error)
    print("ended by the deadline: True")
    print("the report names recv on rank 0:", "rank 0 waits in recv" in report)
else:
    raise AssertionError("a missing message went unnoticed")

# %% [markdown]
# This is the report. For each rank it has the **stack**: the calls that the rank was in, innermost last. Look for the line of each rank first: where does it wait, in which call, on which line? Rank 1 has nothing left to do; `launch` keeps it until all have returned.

# %%
print(report)

# %% [markdown]
# The cure is always the same: every receive needs a send that runs on every path. Collectives such as all-reduce are easier to get right, because all ranks call the same line.
#
# ## What this machine cannot show
#
# Where the crossover of two GPUs lies depends on how fast they multiply and how fast the link between them is; neither is a core's. The chapter's own case, 10 000 rows on two GPUs, was not repeated here. Results on real GPUs: **not measured** yet.
#
# ## Then → now
#
# | then (2016) | now | what it does |
# |---|---|---|
# | a recursion with $n + 1$ factors | $n - 1$ products, or about $\log_2 n$ | 11 factors instead of 10 |
# | clock around session and feeding | data first, then the clock | adds start-up and transfer of input |
# | one run | warm-up, then the median of several | the first run is the slowest |
# | single device first | take turns | the first pays for the start of both |
# | a time, no spread | median and spread | a reader can judge the difference |
#
# ## Exercise
#
# [Exercise 02](../exercises/02_two_devices_one_sum.ipynb): any power in few products, a timer that can be believed, and a table of speed-up and efficiency. About 30 minutes.
#
# ## Recap
#
# Two devices pay once the work is large against the cost of bringing the results together. A speed-up without warm-up, turns and spread can say anything. Where two devices are not faster, look whether both are at work, then where they wait.
#
# 1. Two devices take 6 ms where one takes 9 ms. What are speed-up and efficiency?
# 2. Your colleague measures "2.4× on two GPUs". What do you ask first?
# 3. Matrices twice as large: by how much do computing and transfer grow?
#
# <details><summary>Answers</summary>
#
# 1. 1.5×, and 75 %.
# 2. Which one ran first, was there a warm-up, and what is the spread? More than twice as fast on two devices should make you suspect the measurement.
# 3. Computing 8 times, transfer 4 times: so there is more to gain.
#
# </details>
#
# Go on with [exercise 02](../exercises/02_two_devices_one_sum.ipynb).
