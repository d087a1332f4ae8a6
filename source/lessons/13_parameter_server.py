# ---
# jupyter:
#   course:
#     rows: [M5, M8]
#     minutes: {read: 35, do: 15}
#     devices: 2
#     path: more
#     extra: tensorflow
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
# # Parameter servers: what does it cost not to wait?
#
# After this lesson you can train with parameter servers in TensorFlow, count how old each gradient is when it arrives, and judge from your own measurement what asynchronous training gains beside a slow worker, and what it costs.
#
# | | |
# |---|---|
# | **Time** | 35 minutes to read, 15 to do; the exercise comes on top |
# | **You should know** | ranks and `launch` ([lesson 00](00_start_here.ipynb)); clusters and `TF_CONFIG` ([lesson 01](01_device_placement.ipynb)); MultiWorkerMirroredStrategy ([lesson 12](12_multi_worker.ipynb)) |
# | **You will** | build a server on four numbers · see where variables live, whole and in pieces · count staleness · find the learning rate that it allows · measure asynchronous against synchronous, with a slow worker too · kill a worker, then a server |
# | **Runs on** | every machine, with or without a GPU: four or five processes on pinned cores. On two cores they are **oversubscribed**, more processes than cores, and every measurement here says so |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1 |
#
# A reminder, so that you can read this alone: *synchronous* training computes one gradient on each worker, averages them by an all-reduce, and all workers take the same step (lessons 04 and 12). A cluster is a set of processes that know each other's addresses from `TF_CONFIG`, and each has a **task**: a job name and a number (lesson 01).

# %%
import contextlib
import io
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

# TensorFlow's notices of its own housekeeping would hide what the lesson prints. (The lines below
# this cell come before any setting: https://github.com/tensorflow/tensorflow/issues/100442)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import MNIST_NOTE, mnist
from course_utils.devices import census, slots
from course_utils.launch import launch

plots.use_style()
print(census())
assert len(slots(2)) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## A server on four numbers
#
# A **parameter server** keeps the weights. A **worker** pulls them, computes a gradient on its own batch, and pushes the change. Nobody waits for anybody: this is **asynchronous** training.
#
# While a worker computes, others may push. Its gradient then belongs to weights that no longer exist. The **staleness** of a push is the number of pushes by others between the pull and the push. To count it, the server keeps a **version**: the number of pushes so far.
#
# Here are four weights, and the gradient points from the target to the weights. With a learning rate of 1, one push of one worker lands exactly on the target.
#
# **Predict.** The weights start at 0, the target is `[1, 2, 3, 4]`. Two workers pull, then both push. What are the weights in the end?


# %%
# NBVAL_CHECK_OUTPUT
class Server:
    def __init__(self, weights):
        self.weights, self.version = np.array(weights), 0

    def push(self, change):
        self.weights, self.version = self.weights - change, self.version + 1


TARGET = np.array([1.0, 2.0, 3.0, 4.0])


def play(schedule, rate):
    """Run pulls and pushes in this order. Returns the weights after each push, and its staleness."""
    server, held, seen, stale = Server(np.zeros(4)), {}, [], []
    for kind, worker in schedule:
        if kind == "pull":
            held[worker] = server.weights, server.version
        else:
            weights, version = held[worker]
            stale.append(server.version - version)
            server.push(rate * (weights - TARGET))
            seen.append(server.weights)
    return seen, stale


in_turn = [("pull", 0), ("push", 0), ("pull", 1), ("push", 1)]
at_once = [("pull", 0), ("pull", 1), ("push", 0), ("push", 1)]
for name, schedule in {"in turn": in_turn, "at once": at_once}.items():
    seen, stale = play(schedule, rate=1.0)
    print(f"{name}: staleness {stale}, weights {seen[-1]}")

# %% [markdown]
# Both workers saw the same distance and both walked all of it: one step too far. Nothing is wrong with either gradient. The second one came late.
#
# ## How large a learning rate does staleness allow?
#
# Now let several equal workers run for long. Each pulls at once after its push, so with $k$ workers every push but the first few is $k - 1$ versions old.
#
# **Predict.** One worker reaches the target with every rate below 2. Where is the limit for two workers: near 2, near 1, or near a half?


# %%
# NBVAL_CHECK_OUTPUT
def workers_taking_turns(workers, pushes):
    events = [("pull", worker) for worker in range(workers)]
    for number in range(pushes):
        events += [("push", number % workers), ("pull", number % workers)]
    return events


RATES = 0.025 + 0.05 * np.arange(41)
simulated = {}  # staleness -> the largest rate of the grid that converges
for workers in range(1, 6):
    # One column: all rates in the same run. The swing of the last 50 pushes decides, not one push.
    seen, stale = play(workers_taking_turns(workers, 1000), RATES[:, None])
    swing = abs(np.array(seen[-50:]) - TARGET).max(axis=(0, 2))
    simulated[stale[-1]] = RATES[swing < TARGET.max()].max()
    print(f"workers: {workers}, staleness {stale[-1]}, converges up to {simulated[stale[-1]]:.3f}")

# %% [markdown]
# The rates tried lie 0.05 apart; a rate converges when the weights are nearer to the target after 1,000 pushes than at the start. With two workers the limit is about half of what one worker may use, and it keeps falling. So *whoever is done updates* has a price: old gradients want a smaller learning rate. Real processes come next.
#
# ## A cluster of real processes
#
# `tf.distribute.ParameterServerStrategy` needs three kinds of tasks: workers, parameter servers (`ps`), and one **chief**, which coordinates. Workers and servers only serve: they call `tf.distribute.Server(...).join()` and do what the chief asks. All of *your* program runs in the chief. There a **ClusterCoordinator** keeps a queue: `schedule(step)` puts a step into it and returns at once, a worker that is free takes it, and `join()` waits until every step is done.
#
# From a shell you would start the same script once for every task:
#
# ```sh
# TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["c:2222"], "chief": ["d:2222"]},
#             "task": {"type": "worker", "index": 0}}' python train.py
# ```
#
# `launch` starts these processes here, and while there are no more workers than cores, each gets a core of its own. Server and chief share all cores with them. They are idle most of the time, but not always: with four processes on two cores, times mean less than on a real cluster.

# %%
CORES = sorted(set().union(*(place.cpus for place in slots(2))))


def start_server(resolver):
    # One thread computes. The others wait for messages: without them the first step hangs.
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=8
    )
    job, index = resolver.task_type, resolver.task_id
    return tf.distribute.Server(resolver.cluster_spec(), job, index, config=threads)


def in_cluster(coordinate, *args):
    """Every process of the cluster runs this: the chief coordinates, the others serve."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.config.threading.set_inter_op_parallelism_threads(8)
    tf.get_logger().setLevel("ERROR")
    if resolver.task_type != "worker" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, CORES)  # server and chief run where there is room
    if resolver.task_type == "chief":
        return coordinate(resolver, *args)
    start_server(resolver).join()


def cluster(coordinate, *args, workers=2, servers=1, task=in_cluster):
    """Start a cluster; returns what its chief returned."""
    roles = {"worker": workers, "ps": servers, "chief": 1}
    options = {"framework": "tensorflow", "roles": roles, "oversubscribe": True, "timeout": 90}
    return launch(task, None, coordinate, *args, **options)[-1]


# %% [markdown]
# ## Where do the variables live?
#
# A Keras model made inside `strategy.scope()`, with two parameter servers.
#
# **Predict.** Four variables: two large kernels and two small biases, made in the order kernel, bias, kernel, bias. The strategy deals them out one by one. Which server gets what?


# %%
# NBVAL_CHECK_OUTPUT
def digits_model():
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((784,)), *layers])


def data():
    return tf.data.Dataset.from_tensors((np.zeros((32, 784)), np.zeros((32, 10)))).repeat()


def per_worker(coordinator):
    return coordinator.create_per_worker_dataset(data)


def where_variables_live(resolver):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = digits_model()
        model.compile("sgd", "mse")
    live = [(v.name, tuple(v.shape), v.value.device) for v in model.variables]
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    said = {}  # for later in this lesson: does Keras' own loop work here?
    for given, make in {"data set": data, "as advised": lambda: per_worker(coordinator)}.items():
        try:
            model.fit(make(), steps_per_epoch=2, verbose=0, shuffle=False)
        except ValueError as error:
            said[given] = str(error)
    return live, said


def task_of(device):
    """ "/job:ps/replica:0/task:1/device:CPU:0" -> "ps 1" """
    _, job, _, task, _ = device.split("/")
    return f"{job.split(':')[1]} {task.split(':')[1]}"


live, fit_said = cluster(where_variables_live, servers=2)
load = Counter()
for name, shape, device in live:
    load[task_of(device)] += 4 * int(np.prod(shape))
    print(f"{name:7}{shape!s:11}{4 * int(np.prod(shape)):8,} bytes on {task_of(device)}")
for task, size in sorted(load.items()):
    print(f"{task} holds {size:,} bytes")

# %% [markdown]
# One server has all the kernels, the other the biases: variables are dealt out **round-robin**, by number and not by size. Every worker pulls the kernels in every step, so one server does nearly all the work. Two cures: place by size, or cut large variables into pieces.
#
# ## Variables in pieces
#
# A **partitioner** cuts each variable along its rows into **shards**, one a server, unless the shards became smaller than a minimum. Here is a table of 100,001 rows of 16 numbers: an **embedding**, where each row stands for one word, product or user. A batch needs only its own rows.
#
# **Predict.** A batch looks up the rows 0, 5, 70,000 and 100,000. The shards are contiguous: the first half of the rows, then the second. How many rows of each shard does the step change, and how large is each shard's gradient?


# %%
# NBVAL_CHECK_OUTPUT
def embedding_in_pieces(resolver):
    shards = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=256 * 1024, max_shards=2
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=shards)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        table, scale = tf.Variable(tf.ones([100_001, 16])), tf.Variable(tf.ones([16]))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * scale)
        gradients = tape.gradient(loss, table.variables)  # one for each shard: only some rows
        for shard, some in zip(table.variables, gradients, strict=True):
            shard.scatter_sub(tf.IndexedSlices(0.5 * some.values, some.indices))
        return [tf.shape(some.values) for some in gradients]

    sent = coordinator.schedule(step, args=(tf.constant([0, 5, 70_000, 100_000]),)).fetch()
    pieces = [(shard.shape, shard.device) for shard in [*table.variables, scale]]
    changed = [int((shard.numpy() != 1).any(axis=1).sum()) for shard in table.variables]
    return pieces, [shape.tolist() for shape in sent], changed


pieces, sent, changed = cluster(embedding_in_pieces, servers=2)
for shape, device in pieces:
    print(f"{tuple(shape)!s:12} on {task_of(device)}")
print("shape of each shard's gradient:", sent, " rows changed:", changed)
table, rows = 100_001 * 16 * 4, sum(changed) * 16 * 4
print(f"the table: {table / 1024**2:.1f} MiB, the gradients: {rows} bytes")

# %% [markdown]
# The gradient of a shard has two rows, not 50,000, and the step works in these rows only. `embedding_lookup` fetches rows in the same way: it [gathers them where the shard is](https://www.tensorflow.org/api_docs/python/tf/nn/embedding_lookup). This is where parameter servers come from, and where the idea still lives: tables too large for one device, of which each batch touches a few rows. (The variable of 16 numbers was too small to cut.)
#
# ## One update at a time equals one device
#
# Now training: two convolutions and a dense layer on the digits, without biases, written with bare variables so that you see each pull and push. A convolution uses its few weights at many places of an image: much to compute, little to send. With little to send, a slow worker can be told from slow messages later on.
#
# The version is one more variable on the server. A step reads it together with the weights, and again when it has pushed; the difference, without its own push, is the staleness. (`tf.control_dependencies` makes the push wait for the gradients. Counter and weights are separate messages, so the count can be off by one when two workers meet.)

# %%
(x_train, y_train), (x_test, y_test) = mnist()
IMAGES, LABELS, BATCH = x_train, y_train.astype("int32"), 400
print(MNIST_NOTE)


def first_weights():
    rng, shapes = np.random.default_rng(0), [(3, 3, 1, 16), (3, 3, 16, 16), (784, 10)]
    drawn = (rng.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape) for shape in shapes)
    return [weights.astype("float32") for weights in drawn]


def mean_loss(weights, images, labels):
    first, second, last = weights
    hidden = tf.cast(images[..., None], tf.float32) / 255
    for kernel in (first, second):  # each halves the side: 28, 14, 7
        hidden = tf.nn.relu(tf.nn.conv2d(hidden, kernel, 2, "SAME"))
    scores = tf.reshape(hidden, [-1, 784]) @ last
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def gradients_of(weights, images, labels):
    with tf.GradientTape() as tape:
        pulled = [tf.convert_to_tensor(w) for w in weights]
        tape.watch(pulled)
        loss = mean_loss(pulled, images, labels)
    return tape.gradient(loss, pulled)


def pull_and_push(weights, version, rate, images, labels):
    """One asynchronous update. Returns its staleness: pushes by others since its pull."""
    pulled = version.read_value()
    gradients = gradients_of(weights, images, labels)
    with tf.control_dependencies(gradients):
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(rate * g)
        version.assign_add(1)
    return version.read_value() - 1 - pulled


# %% [markdown]
# If the chief waits after every `schedule`, at most one update is under way, staleness is 0, and the result must be that of one device.


# %%
# NBVAL_CHECK_OUTPUT
def on_server(make):
    """Variables with the first weights, made by `make`, and the version."""
    return [make(w) for w in first_weights()], make(0)


def batch(number):
    rows = slice(number % 12 * BATCH, (number % 12 + 1) * BATCH)
    return tf.constant(IMAGES[rows]), tf.constant(LABELS[rows])


def one_at_a_time(resolver, updates):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights, version = on_server(tf.Variable)

    @tf.function
    def step(images, labels):
        return pull_and_push(weights, version, 0.1, images, labels)

    stale = []
    for number in range(updates):
        stale.append(int(coordinator.schedule(step, args=batch(number)).fetch()))  # waits
    return [w.numpy() for w in weights], stale


served, stale = cluster(one_at_a_time, 10)
with tf.device("/CPU:0"):
    alone, version = on_server(tf.Variable)
    step = tf.function(lambda x, y: pull_and_push(alone, version, 0.1, x, y))
    for number in range(10):
        step(*batch(number))
difference = max(abs(a - b.numpy()).max() for a, b in zip(served, alone, strict=True))
moved = max(abs(a - b).max() for a, b in zip(served, first_weights(), strict=True))
print("staleness of all 10 updates is 0:", stale == [0] * 10)
print("the weights moved:", moved > 1e-3)
print("largest difference of a weight below 1e-5:", difference < 1e-5)
assert difference < 1e-5 < moved

# %% [markdown]
# The difference need not be exactly 0: how the additions inside a product are ordered depends on the number of threads, and the notebook may have more than a worker.
#
# ## Staleness on the cluster, and the rate it allows
#
# Back to the question of the four numbers, now with real messages. One number $w$ lives on the server, the gradient is $w$ itself, and before each push the worker computes for a while, as in training. With $k$ threads of the chief, each waiting for its own update before it schedules the next one, exactly $k$ updates are under way. Here $k$ is 2 and 3; for 1 the cell above has shown it: staleness 0. Three workers, one server, one chief: five processes on two cores, **oversubscribed**.

# %%
CLUSTER_RATES, UPDATES = [0.6, 0.9, 1.5], 18


def some_work(products):
    work = tf.random.normal((512, 512))
    for _ in range(products):
        work = work @ work / 500
    return work[0, 0]  # a step has to return it: work that nobody asks for is left out


def rates_on_cluster(resolver):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        w, version = tf.Variable(1.0), tf.Variable(0)

    @tf.function
    def step(rate):
        pulled, gradient = version.read_value(), w.read_value()
        with tf.control_dependencies([pulled, gradient]):
            work = some_work(2)
        with tf.control_dependencies([work]):
            w.assign_sub(rate * gradient)
            version.assign_add(1)
        return version.read_value() - 1 - pulled, work

    def keep_one_under_way(rate, times, into):
        for _ in range(times):
            into.append(coordinator.schedule(step, args=(rate,)).fetch())

    def run(under_way, rate):
        w.assign(1.0)
        found, times = [], UPDATES // under_way
        threads = [
            threading.Thread(target=keep_one_under_way, args=(rate, times, found))
            for _ in range(under_way)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return float(np.mean([stale for stale, _ in found])), abs(float(w.numpy()))

    run(3, tf.constant(0.0))  # every worker compiles the step
    pairs = [(1, CLUSTER_RATES[-1]), *itertools.product((2, 3), CLUSTER_RATES)]
    return [(n, rate, *run(n, tf.constant(rate))) for n, rate in pairs]


on_cluster = cluster(rates_on_cluster, workers=3)
print(f"oversubscribed: 5 processes on {len(CORES)} cores; start |w| = 1, {UPDATES} updates")
print("under way   rate   mean staleness      |w| at the end")
for under_way, rate, stale, end in on_cluster:
    print(f"{under_way:9}{rate:7.1f}{stale:17.2f}{end:20.2g}   {'grows' if end > 1 else 'shrinks'}")

# %%
fig, ax = plt.subplots()
ax.plot(
    list(simulated), list(simulated.values()), label="simulated: the largest rate that converges"
)
for shrinks, marker, text in ((True, "o", "cluster: shrinks"), (False, "X", "cluster: grows")):
    points = [(stale, rate) for _, rate, stale, end in on_cluster if (end <= 1) == shrinks]
    ax.plot(*zip(*points, strict=True) if points else ([], []), linestyle="", marker=marker,
            markersize=9, color=plots.COLOURS[2 if shrinks else 1], label=text)  # fmt: skip
agree = sum(
    (end <= 1) == (rate <= np.interp(stale, list(simulated), list(simulated.values())))
    for _, rate, stale, end in on_cluster
)
ax.set(xlabel="staleness (mean pushes of others between pull and push)", ylabel="learning rate")
ax.set(xlim=(-0.1, 2.1), ylim=(0, 2.2))
ax.set_title(
    f"The staler the gradients, the smaller the rate:\n"
    f"{agree} of {len(on_cluster)} runs on the cluster agree with the simulation"
)
ax.legend(loc="upper right", frameon=True)
plots.show(
    fig,
    name="rate-against-staleness",
    alt="Learning rate against staleness. A falling line, simulated, ends convergence: from "
    f"{simulated[0]:.2f} at staleness 0 to {simulated[2]:.2f} at 2. {agree} of "
    f"{len(on_cluster)} runs on the real cluster lie on the side that the line foretells.",
)

# %% [markdown]
# With $k$ updates under way, each can be overtaken by $k - 1$ others: that is what the mean staleness comes to if nearly all of an update's time lies between its pull and its push. Your table shows less where a good part passes in the queue and on the way.
#
# The line comes from the schedule in which everybody takes turns, the points from real processes with messages that come when they come. A run near the line may fall on either side: one fresh update more or less decides. Run the cell again, and the numbers differ.
#
# ## The old posts' claims
#
# What older tutorials say of parameter servers, in our words: they converge more slowly, because updates are asynchronous; but they are better for very heavy models, because nobody waits for the slowest worker. To judge it, four cases:
#
# - **asynchronous:** 2 workers, 1 server, 1 chief; **synchronous:** MultiWorkerMirroredStrategy with the same 2 workers, an all-reduce in each step;
# - **equal workers**, and **a straggler**: a slow worker. A busy process runs beside worker 1, on the same core, so that a worker that computes all the time gets about half of it. (A sleep would not do: it takes no computing time from anybody.) The busy process is stopped and woken by signals, so each cluster trains with and without it in turn, several times.
#
# Every worker's step is the same in all runs: 400 images. A synchronous step is the mean of two such batches, so to move the weights as far for each image it gets twice the rate. Both ways train on the same number of images from the same first weights. While the runs go on, the weights are only copied; the loss on 400 test images is computed when all is over.


# %%
@contextlib.contextmanager
def busy_process():
    """A busy process on the core of this one, which it inherits; asleep until it is woken."""
    busy = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    busy.send_signal(signal.SIGSTOP)
    try:
        yield busy.pid
    finally:
        busy.kill()
        busy.wait()


def turns(train, busy):
    """Train with equal workers and with a straggler, in turn. Returns what each run returned."""
    found = {machine: [] for machine in MACHINES}
    for turn in range(TURNS):
        for machine in MACHINES if turn % 2 else reversed(MACHINES):
            if machine == "a straggler" and busy:
                os.kill(busy, signal.SIGCONT)
            found[machine].append(train())
            if busy:
                os.kill(busy, signal.SIGSTOP)
    return found


def workers_data():
    """Shuffled anew by each worker. Nothing tells workers apart, so each draws a name."""
    name = tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32)
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).shuffle(len(IMAGES)).repeat()
    return data.batch(BATCH, drop_remainder=True).map(lambda images, labels: (images, labels, name))


def with_busy_process(coordinate, folder, *args):
    """As in_cluster, with a busy process beside worker 1; its number goes into a file."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if (resolver.task_type, resolver.task_id) == ("worker", 1):
        with busy_process() as busy:
            Path(folder, "busy").write_text(str(busy))
            return in_cluster(coordinate)
    return in_cluster(coordinate, folder, *args)


def asynchronous(resolver, folder, rate, updates):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights, version = on_server(tf.Variable)
    batches = iter(coordinator.create_per_worker_dataset(workers_data))

    @tf.function
    def step(batches):
        images, labels, name = next(batches)
        return pull_and_push(weights, version, rate, images, labels), name

    for _ in range(6):  # every worker compiles the step and gets its data
        coordinator.schedule(step, args=(batches,))
    coordinator.join()

    def train():
        for variable, first in zip([*weights, version], [*first_weights(), 0], strict=True):
            variable.assign(first)
        start, copies = time.perf_counter(), []
        done = [coordinator.schedule(step, args=(batches,)) for _ in range(updates)]
        while True:
            last = coordinator.done()  # asked before the copy: the last copy has all updates
            number, copy = int(version.numpy()), [w.numpy() for w in weights]
            copies.append((time.perf_counter() - start, number, copy))
            if last:
                break
            time.sleep(0.1)
        stale = {}
        for result in done:
            staleness, name = (int(n) for n in result.fetch())
            stale.setdefault(name, []).append(staleness)
        return copies, sorted(stale.values(), key=len, reverse=True)  # the busiest worker first

    return turns(train, int(Path(folder, "busy").read_text()))


# %%
def synchronous(rate, steps):
    """Run by both workers: the same step at the same time."""
    if os.environ["RANK"] == "0":
        return train_together(rate, steps, None)
    with busy_process() as busy:
        return train_together(rate, steps, busy)


def train_together(rate, steps, busy):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [tf.Variable(w) for w in first_weights()]
    batches = iter(workers_data())

    def replica(images, labels):
        gradients = gradients_of(weights, images, labels)
        gradients = tf.distribute.get_replica_context().all_reduce("mean", gradients)
        for w, g in zip(weights, gradients, strict=True):
            w.assign_sub(rate * g)

    @tf.function
    def step(images, labels, name):
        strategy.run(replica, args=(images, labels))

    def train():
        step(*next(batches))  # compiles at first, and then lets the workers meet
        for w, first in zip(weights, first_weights(), strict=True):
            w.assign(first)
        start, copies, every = time.perf_counter(), [], max(1, steps // 12)
        for number in range(steps):
            if number % every == 0:
                now = time.perf_counter() - start
                copies.append((now, number, [w.numpy() for w in weights]))
            step(*next(batches))
        copy = [w.numpy() for w in weights]  # waits for the last step
        copies.append((time.perf_counter() - start, steps, copy))
        return copies, []

    return turns(train, busy)


# %% [markdown]
# **Predict.** Suppose that messages cost nothing, and that the straggler works at half speed. Which share of its throughput with equal workers does the synchronous run keep, and which the asynchronous one?

# %%
RATE, IMAGES_TOTAL, TURNS = 0.08, 24 * BATCH, 3
MACHINES = ["equal workers", "a straggler"]


def run_asynchronous():
    with tempfile.TemporaryDirectory() as folder:
        updates = IMAGES_TOTAL // BATCH
        return cluster(asynchronous, folder, RATE, updates, task=with_busy_process)


def run_synchronous():
    steps = IMAGES_TOTAL // (2 * BATCH)  # of two batches each
    return launch(synchronous, 2, 2 * RATE, steps, framework="tensorflow")[0]


WAYS = {"asynchronous": run_asynchronous, "synchronous": run_synchronous}
runs = {}
for way in tqdm(WAYS, desc=f"two clusters, {2 * TURNS} runs each", file=sys.stdout):
    for machine, several in WAYS[way]().items():
        runs[machine, way] = several


# %%
@tf.function
def loss_on_test_images(weights):
    return mean_loss(weights, x_test[:400], y_test[:400].astype("int32"))


def test_loss(weights):
    return float(loss_on_test_images([tf.constant(w) for w in weights]))


def spread(values, digits=2):
    low, middle, high = np.quantile(values, [0, 0.5, 1])
    return f"{middle:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


curves, speed = {}, {}  # of each run: (seconds, images, test loss) at each copy; images a second
for key, several in runs.items():
    images = BATCH * (2 if key[1] == "synchronous" else 1)  # of one update
    curves[key] = [[(s, n * images, test_loss(w)) for s, n, w in copies] for copies, _ in several]
    speed[key] = np.array([IMAGES_TOTAL / copies[-1][0] for copies, _ in several])
goal = 1.05 * max(curve[-1][2] for each in curves.values() for curve in each)  # all reach it
first_at = {  # seconds and images of the first copy of each run at the goal
    key: np.array([next(c[:2] for c in curve if c[2] <= goal) for curve in each])
    for key, each in curves.items()
}
kept = {way: speed["a straggler", way] / speed["equal workers", way] for way in WAYS}

print(f"asynchronous: 4 processes on {len(CORES)} cores, oversubscribed; synchronous: 2")
print(f"median of {TURNS} runs (lowest to highest)")
print(f"{'':35}images/s    seconds to loss {goal:.2f}   images to it")
for (machine, way), each in first_at.items():
    print(f"{machine:14} {way:13}{spread(speed[machine, way], 0):>24}", end="")
    print(f"{spread(each[:, 0]):>21}{np.median(each[:, 1]):13,.0f}")
for way in WAYS:
    print(f"{way}: beside the straggler it keeps {spread(100 * kept[way], 0)} % of its images/s")
for machine in MACHINES:
    stale = [stale for _, stale in runs[machine, "asynchronous"]]
    print(f"{machine}: updates by worker {[[len(w) for w in s] for s in stale]},", end=" ")
    print(f"mean staleness {np.mean([n for s in stale for w in s for n in w]):.2f}")

# %%
fig, axes = plt.subplots(2, 3, figsize=(10.5, 6.4), sharex="col")
for row, machine in zip(axes, MACHINES, strict=True):
    for number, way in enumerate(WAYS):
        colour, values = plots.COLOURS[number], speed[machine, way]
        reach = [[np.median(values) - values.min()], [values.max() - np.median(values)]]
        hatch = ["", "//"][number]
        row[0].bar(way, np.median(values), yerr=reach, capsize=4, color=colour, hatch=hatch)
        style = {"color": colour, "linestyle": plots.DASHES[number], "lw": 1.2, "alpha": 0.8}
        for turn, curve in enumerate(curves[machine, way]):
            seconds, images, losses = zip(*curve, strict=True)
            style |= {"marker": plots.MARKERS[number], "markersize": 3}
            row[1].plot(seconds, losses, label=way if turn == 0 else None, **style)
            row[2].plot(images, losses, **style)
    row[0].set(ylabel=f"{machine}\nimages a second", ylim=(0, 1.1 * max(map(max, speed.values()))))
    row[1].set(ylabel="test loss")
    row[2].set(ylabel="test loss")
axes[1][0].set_xlabel("way of training")
axes[1][1].set_xlabel("seconds")
axes[1][2].set_xlabel("images trained on")
axes[0][1].legend()


def larger(values):
    """The way whose runs are all above the other's; else nothing is decided."""
    low, high = sorted(WAYS, key=lambda way: np.median(values[way]))
    return high if values[high].min() > values[low].max() else "not decided"


fig.suptitle(
    "With the straggler synchronous training keeps "
    f"{spread(100 * kept['synchronous'], 0)} % of its throughput,\n"
    f"asynchronous {spread(100 * kept['asynchronous'], 0)} %; more: {larger(kept)}"
)
more = {m: larger({way: speed[m, way] for way in WAYS}) for m in MACHINES}
sooner = {m: larger({way: -first_at[m, way][:, 0] for way in WAYS}) for m in MACHINES}
plots.show(
    fig,
    name="asynchronous-against-synchronous",
    alt="Six panels. Throughput, test loss against time and test loss against images, with equal "
    f"workers above and with a straggler below, {TURNS} runs each. More images a second: "
    f"with equal workers {more['equal workers']}, with a straggler {more['a straggler']}. "
    f"First at the common loss: {sooner['equal workers']}, then {sooner['a straggler']}.",
)
for machine in MACHINES:
    print(f"{machine}: more images a second: {more[machine]};", end=" ")
    print(f"first at loss {goal:.2f}: {sooner[machine]}")

# %% [markdown]
# How to read the verdict on your machine:
#
# - *"Nobody waits for the slowest"* is the lower left panel, and the percentages of the title. A synchronous step lasts as long as the slowest worker's: at half speed, and without messages, 50 % is left. Asynchronously the other worker goes on at full speed: 75 %. You may see more. A worker that waits for messages leaves its core to the busy process and loses less than half by it; and where server and chief share the workers' cores, equal workers are slowed already.
# - *"Converges more slowly"* is the right column: loss against images. If staleness costs something at this learning rate, the asynchronous curve lies above the other by more than it wobbles. What you wait for is the middle column, loss against time.
# - *"Better for very heavy models"* does not follow, and was not measured here. But you can count: for each update the server sends all weights and receives all gradients; with $k$ workers it carries $k$ times what one worker does, while in an all-reduce every worker sends less than twice the gradients, however many there are ([lesson 04](04_ddp_from_scratch.ipynb)). A heavy model makes the server the busiest place. What helps is a model of which a batch needs few rows.
#
# A verdict is "not decided" where the runs of the two ways overlap.
#
# ## Broken 1: a worker dies and comes back
#
# In synchronous training a dead worker stops all (lesson 12). Here the chief notices that a step failed, puts it back into the queue, and the others go on. When the worker is back *at the same address*, it gets its data made anew, and takes steps again.
#
# In this cluster worker 1 and the server run in a child process of their own, which can be killed with `SIGKILL` while the task stays in place. After the child's death the task serves again, on the same address: a new process that knows nothing.
#
# A step here pushes first and computes afterwards, so that it is mostly caught *between its push and its reply* to the chief.
#
# **Predict.** The chief puts steps into the queue, 24 a round, until worker 1 has come back. In an early round it kills worker 1 while it works on a step. How many does the server count in the end: fewer than were scheduled, as many, or more?


# %%
def first_life(resolver, folder):
    server = start_server(resolver)
    Path(folder, f"{resolver.task_type} {resolver.task_id}").write_text(str(os.getpid()))
    threading.Event().wait(120)  # the server works in threads of its own
    del server


def mortal_cluster(coordinate, folder):
    """As in_cluster, but worker 1 and server 0 live in a child process until it is killed."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if (resolver.task_type, resolver.task_id) in (("worker", 1), ("ps", 0)):
        fork = multiprocessing.get_context("fork")  # nothing of TensorFlow has started here yet
        child = fork.Process(target=first_life, args=(resolver, folder), daemon=True)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL, f"the child ended with {child.exitcode}"
    return in_cluster(coordinate, folder)


def kill(folder, task):
    os.kill(int(Path(folder, task).read_text()), signal.SIGKILL)


def lives_and_deaths(resolver, folder):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        updates = tf.Variable(0)
    batches = iter(coordinator.create_per_worker_dataset(workers_data))

    @tf.function
    def step(batches):
        _, _, name = next(batches)
        with tf.control_dependencies([updates.assign_add(1)]):
            work = some_work(4)
        with tf.control_dependencies([work]):
            return name, tf.timestamp(), work

    trace, names, lives, scheduled, killed = [], Counter(), {}, 0, None
    start = time.time()
    while len(names) < 3 and time.time() - start < 60:  # the third name: its second life
        results = [coordinator.schedule(step, args=(batches,)) for _ in range(24)]
        scheduled += len(results)
        if len(names) == 2 and killed is None:
            time.sleep(0.05)  # the steps are under way
            kill(folder, "worker 1")
            killed = time.time() - start
        while not coordinator.done():
            trace.append((time.time() - start, int(updates.numpy())))
            time.sleep(0.02)
        for name, when, _ in (result.fetch() for result in results):
            names[int(name)] += 1
            lives.setdefault(int(name), float(when) - start)  # its first step, roughly
    back = max(lives.values())
    seen = trace, (killed, back), list(names.values()), scheduled, int(updates.numpy())

    saved = tf.train.Checkpoint(updates=updates).write(f"{folder}/checkpoint")
    for _ in range(24):
        coordinator.schedule(step, args=(batches,))
    time.sleep(0.05)
    kill(folder, "ps 0")
    start = time.perf_counter()
    try:
        coordinator.join()
    except tf.errors.OpError as error:
        return *seen, saved, type(error).__name__, time.perf_counter() - start
    raise AssertionError("the death of the server went unnoticed")


folder = tempfile.TemporaryDirectory()
roles = {"worker": 2, "ps": 1, "chief": 1}
with contextlib.redirect_stdout(io.StringIO()):  # TensorFlow's long reports
    *_, report = launch(
        mortal_cluster, None, lives_and_deaths, folder.name,
        framework="tensorflow", roles=roles, oversubscribe=True, timeout=90,
    )  # fmt: skip
trace, (killed, back), by_name, scheduled, counted, saved, error, seconds = report

# %%
# NBVAL_CHECK_OUTPUT
print("lives that did steps (two workers, one of them twice):", len(by_name))
print("every scheduled step was done:", sum(by_name) == scheduled)
print("the server counted at least as many:", counted >= scheduled)
assert len(by_name) == 3 and sum(by_name) == scheduled <= counted

# %%
print(f"scheduled {scheduled}, counted on the server {counted}: {counted - scheduled} done twice")
print(f"steps by name {by_name}")
when, number = (np.array(column) for column in zip(*trace, strict=True))
fig, ax = plt.subplots()
ax.plot(when, number, marker="", label="updates on the server")
ax.axvline(killed, color=plots.COLOURS[1], linestyle="--", label="worker 1 is killed")
ax.axvline(back, color=plots.COLOURS[2], linestyle=":", label="its first step after that")
ax.set(xlabel="seconds since the first step was scheduled", ylabel="updates")
after = int(number[-1] - np.interp(killed, when, number))
ax.set_title(f"Worker 1 is killed, and about {after} updates follow")
ax.legend()
plots.show(
    fig,
    name="a-worker-dies",
    alt="Updates on the server against time, with marks where worker 1 was killed and where it "
    f"was back. The line goes on rising in between; after the kill by about {after} updates.",
)

# %% [markdown]
# At least as many, and most likely one more: the cell above says how many. A worker that is killed *after* it has pushed and *before* the chief has heard of it leaves an update behind, and its step is done once more. So a step under `schedule` may run twice; write steps that can stand it. What must happen exactly once does not belong into a step.
#
# ## Broken 2: a server dies
#
# Right after that, the program of Broken 1 killed the server, and started it again on the same address.

# %%
print(f"the chief's join() raised {error}, {seconds:.1f} s after the server was killed")

# %% [markdown]
# The weights died with the server, and the new process has none. There is no second copy of them anywhere: synchronous workers all have one, asynchronous workers only borrow. So the chief saves now and then, and a new job begins from the file. On several machines the *servers* write the pieces, so the folder must be one that all of them see.


# %%
# NBVAL_CHECK_OUTPUT
def go_on(resolver, saved):
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        updates = tf.Variable(0)
    tf.train.Checkpoint(updates=updates).read(saved).assert_consumed()
    return int(updates.numpy()), updates.device


restored, device = cluster(go_on, saved)
folder.cleanup()
print("the new job goes on where the file was saved:", restored == counted, "on", task_of(device))
assert restored == counted

# %% [markdown]
# ## Then → now
#
# Old tutorials make the strategy without a word about the cluster. That was possible with `tf.estimator`, TensorFlow's training loop before Keras; `DatasetCreator` was the form in which Keras 2's `fit` wanted its data here.

# %% then="ParameterServerStrategy(), tf.estimator, DatasetCreator" now="ParameterServerStrategy(TFConfigClusterResolver())" since="TensorFlow 2.4; tf.estimator gone since 2.16, DatasetCreator with Keras 3"
# NBVAL_CHECK_OUTPUT
slips = {
    "ParameterServerStrategy()": lambda: tf.distribute.ParameterServerStrategy(),
    "tf.estimator": lambda: tf.estimator,
    "DatasetCreator": lambda: tf.keras.utils.experimental.DatasetCreator,
}
for line, attempt in slips.items():
    try:
        attempt()
    except (TypeError, AttributeError) as failure:
        print(f"{line:26}{type(failure).__name__}")
    else:
        raise AssertionError(f"{line} works again")
same = tf.distribute.experimental.ParameterServerStrategy is tf.distribute.ParameterServerStrategy
print("the experimental name is only another name:", same)
print("now, with a resolver: trained above:", len(runs) == 4)

# %% [markdown]
# Keras 3's `fit` does not work with this strategy either. The first cluster of this lesson tried it, then tried what the error message advises:

# %%
for given, said in fit_said.items():
    print(f"{given}: {said.splitlines()[0][:100]}")
assert len(fit_said) == 2, "fit works again: mend this section"

# %% [markdown]
# The way out is the custom loop that you have seen, or perhaps the old Keras, with `TF_USE_LEGACY_KERAS=1`: [lesson 12](12_multi_worker.ipynb) shows `fit` of tf-keras with another strategy; with this one we have not tried it.
#
# ## Where parameter servers live today
#
# The author of Keras wrote in 2024: "[PSS is basically never the right idea, even if you have multiple machines](https://github.com/keras-team/keras/issues/20585)" (PSS is this strategy), and called it a niche feature, used mostly for legacy reasons. For dense models on equal devices, where nobody is much slower than the others, there is little waiting to save; that is the upper row of your figure (on cores, not GPUs), and synchronous gradients are fresh.
#
# The *placement* lives on: the embedding tables of recommender systems [can exceed a GPU's memory](https://docs.pytorch.org/tutorials/intermediate/torchrec_tutorial.html), and libraries such as TorchRec cut them over many devices, row-wise as you did above or table-wise.
#
# ## What this machine cannot show
#
# A server with a network card that is full; dozens of workers, whose staleness is in the dozens; machines that slow down for reasons of their own; GPUs, on which a step is short and the way through the server long. Results on real GPUs: **not measured** yet.
#
# ## Exercise
#
# [Exercise 13](../exercises/13_parameter_server.ipynb): compute the staleness of any schedule, place variables on servers by size, and simulate asynchronous descent to find where it diverges. About 40 minutes.
#
# ## Recap
#
# A parameter server lets every worker go at its own pace; the price is staleness, which can be counted, and which lowers the largest learning rate that converges. Beside a straggler a synchronous step takes the straggler's time, while asynchronous workers lose the straggler's share, besides what server and chief take. A dead worker costs a few steps, a dead server the job.
#
# 1. Four equal workers, asynchronous. How stale is a typical push, and what does that do to the learning rate?
# 2. A variable of 3 GiB and nine of 1 KiB on two servers, dealt out round-robin. What is wrong, and which two cures do you know?
# 3. The server's counter says 1,003 after 1,000 scheduled steps. What happened, most likely?
#
# <details><summary>Answers</summary>
#
# 1. At most three pushes old on average, and less where queue and messages take a good part of the time; with three, the rates that converge end far below those of one worker (in the simulation above at a quarter, or less).
# 2. One server has nearly all bytes and all traffic. Place by size (no help for one giant), or cut the giant into shards.
# 3. Steps ran twice: workers died, or seemed to, after their push and before the chief heard of it.
#
# </details>
#
# Go on with [exercise 13](../exercises/13_parameter_server.ipynb).
