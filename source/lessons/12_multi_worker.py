# ---
# jupyter:
#   course:
#     rows: [M6, D6]
#     minutes: {read: 40, do: 20}
#     devices: 2
#     path: more
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
# # Many workers: one TensorFlow program on several machines
#
# After this lesson you can train one model with several TensorFlow processes, prove that they compute what one device computes, save and resume, and start them on machines of your own.
#
# | | |
# |---|---|
# | **Time** | 40 minutes to read, 20 to do; the exercise comes on top |
# | **You should know** | a training step in TensorFlow; replicas and `compute_average_loss` ([lesson 10](10_mirrored_strategy.ipynb)) help |
# | **You will** | write TF_CONFIG · train with two workers · share out the data · measure what the second worker brings · save from all, keep one · lose a worker and resume · write a job for Slurm and for ssh · translate between TensorFlow and PyTorch |
# | **Runs on** | no GPU, or one: two processes on two pinned cores · two GPUs or more: the GPUs, in TensorFlow's GPU environment (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1, tf-keras 2.21.0, PyTorch 2.13.0 |
#
# A reminder: a **replica** is one copy of the model, on one device. In **synchronous** training each replica computes gradients on its share of the **global batch**; an **all-reduce** adds them up, every replica gets the sum, and all take the same step. In lesson 10 the replicas lived in one process. Here each lives in a process of its own, a **worker**, which may be on another machine.

# %%
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

# Most of TensorFlow's notices off: they would hide the lines that this lesson looks for.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_utils import plots
from course_utils.datasets import mnist
from course_utils.devices import census, slots
from course_utils.launch import RankError, launch
from course_utils.timing import Ratio, Timing

plots.use_style()
print(census())
assert len(slots(2, framework="tensorflow")) == 2, "this lesson runs on two devices"

# %% [markdown]
# ## TF_CONFIG, by hand
#
# Workers find each other through one environment variable. **TF_CONFIG** is a JSON text with two parts: `cluster`, the addresses of all, by job; and `task`, which of them this process is. A **job** is a group of processes with the same duty. The first worker is the **chief**: it works like the others, and also saves. (A cluster may instead have a job named `chief`, of one task. Then that one is it.)
#
# **Predict.** Two machines, one worker each. In what do their two TF_CONFIGs differ?


# %%
# NBVAL_CHECK_OUTPUT
def tf_config(addresses, index):
    cluster = {"worker": addresses}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


for index in range(2):
    print(tf_config(["10.0.0.1:2222", "10.0.0.2:2222"], index))

# %% [markdown]
# In the index alone. The order of the addresses must be the same everywhere, because the index points into it. Each process must be able to reach each address, and own the one at its index.
#
# From a shell, one line on each machine: `TF_CONFIG='{"cluster": …, "task": {"type": "worker", "index": 1}}' python train.py`. The program is the same everywhere. In this lesson `launch` writes TF_CONFIG, as yours did just now, and starts one process on each device.
#
# ## The first message
#
# `MultiWorkerMirroredStrategy` reads TF_CONFIG, starts a server at its own address, and waits until all others are there. The servers talk **gRPC**, a protocol for calls over a network. (The book of 2016, whose programs lesson 01 and 02 brought up to date, said of it: distributed TensorFlow exists, out of our scope. Here it is.)
#
# **Predict.** Worker 0 brings `[1, 2, 3, 4]`, worker 1 brings `[10, 20, 30, 40]`. What does each hold after the all-reduce? And a guess: each worker draws random weights for a layer, with no seed. Are they equal?


# %%
# NBVAL_CHECK_OUTPUT
def join_cluster(**options):
    """The strategy, made before anything else in this process."""
    tf.get_logger().setLevel("ERROR")  # TensorFlow's own notes would come once per worker
    return tf.distribute.MultiWorkerMirroredStrategy(**options)


def first_message():
    strategy = join_cluster()
    me = strategy.cluster_resolver.task_id
    mine = tf.constant([1.0, 2.0, 3.0, 4.0]) * 10.0**me

    @tf.function
    def add_up():
        context = tf.distribute.get_replica_context
        return strategy.run(lambda: context().all_reduce("sum", mine))

    with strategy.scope():
        layer = keras.layers.Dense(2)
        layer.build([None, 3])
    variable = layer.kernel.value
    copies = strategy.experimental_local_results(variable)
    where = [copy.device.split("/device")[0] for copy in copies]
    return {
        "sum": add_up().numpy().astype(int).tolist(),
        "replicas in all": strategy.num_replicas_in_sync,
        "variable": f"{type(variable).__name__}, here on {where}",
    }, layer.kernel.numpy()


reports, weights = zip(*launch(first_message, 2, framework="tensorflow"), strict=True)
for index, report in enumerate(reports):
    print(f"worker {index}:", *(f"{key}: {value}" for key, value in report.items()), sep="\n    ")
print("equal random weights:", np.array_equal(*weights))
assert np.array_equal(*weights)

# %% [markdown]
# Two processes, one sum. A **mirrored variable** has one copy on each replica, and each process holds only its own. The random weights agree because a mirrored variable, when it is made, takes the value that the first worker drew: it is broadcast, as DDP does with its parameters.
#
# ## Broken 1: too late
#
# The strategy must come first. In a notebook or a long script something has usually run before.


# %%
# NBVAL_CHECK_OUTPUT
def too_late():
    tf.constant(1.0)  # any operation starts the devices
    try:
        join_cluster()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("the strategy came too late, and nobody said so")


print(launch(too_late, 2, framework="tensorflow")[1])

# %% [markdown]
# *Mend:* make the strategy right after the imports, before data, before a seed is used, before `tf.config.list_logical_devices`.
#
# ## A training loop
#
# With Keras 3 you write the loop; why not `fit`, you will see below. Here is a classifier of handwritten digits, in float64 so that two runs can be compared closely. Two lines make it right for any number of workers: `compute_average_loss` divides the sum of this worker's losses by the *global* batch, and `optimizer.apply` adds the gradients up over the workers before it steps. A sum of parts, each divided by the whole: the mean.
#
# **Predict.** Ten steps with a global batch of 64 on two workers. How many samples does each worker see? Will the two workers' weights be equal to the last bit, and will they equal those of one device to the last bit?


# %%
BATCH, STEPS = 64, 10  # the batch is the global one


def digits():
    """A data set of ten global batches."""
    images, labels = (part[: BATCH * STEPS] for part in mnist()[0])
    images = images.reshape(len(images), -1) / 255
    by_data = tf.data.Options()
    by_data.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype("int64")))
    return dataset.batch(BATCH).with_options(by_data)


def train(strategy):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        keras.config.set_floatx("float64")
        model = keras.Sequential(
            [keras.Input([784]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.SGD(0.1)

    def on_replica(images, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images), from_logits=True
            )
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # sums over the workers first
        return loss, tf.shape(labels)[0]

    @tf.function
    def step(images, labels):
        loss, count = strategy.run(on_replica, [images, labels])
        return strategy.reduce("sum", loss, axis=None), count

    losses, samples = [], 0
    for images, labels in strategy.experimental_distribute_dataset(digits()):
        loss, count = step(images, labels)
        losses.append(float(loss))
        samples += int(count)
    return losses, samples, np.concatenate([w.ravel() for w in model.get_weights()])


def together_and_alone():
    together = train(join_cluster())
    return together, train(tf.distribute.get_strategy())  # the default one: a single replica


(first, alone), (second, _) = launch(together_and_alone, 2, framework="tensorflow")

# %%
# NBVAL_CHECK_OUTPUT
for name, (losses, samples, weights) in {"worker 0": first, "worker 1": second}.items():
    print(
        f"{name}: {len(losses)} steps, {samples} samples, {weights.dtype}, {len(weights)} weights"
    )
print(f"one device: {len(alone[0])} steps, {alone[1]} samples")
print("the two workers, bit by bit equal:", np.array_equal(first[2], second[2]))
difference = np.abs(first[2] - alone[2]).max()
print("workers and one device, largest difference of a weight below 1e-12:", difference < 1e-12)
assert np.array_equal(first[2], second[2])
assert difference < 1e-12 and np.allclose(first[0], alone[0], rtol=1e-12, atol=0)

# %% [markdown]
# The two workers are equal to the last bit: both add the same two numbers to the same weights. One device adds 64 terms in another order than twice 32, so there the difference is rounding: it need not be zero, and in float64 it stays below the tolerance.
#
# ## Who reads what
#
# `experimental_distribute_dataset` takes a data set that yields *global* batches, and gives each worker its share. The **auto-shard policy** says how:
#
# - **OFF**: not at all. Each worker reads everything.
# - **DATA**: each global batch is cut into even pieces, and worker 0 takes the first. For that each worker reads everything, and drops what belongs to the others.
# - **FILE**: each worker opens only some of the files, worker 0 of 2 the files 0, 2, 4, … and in each step it takes as many samples as a piece has.
# - **AUTO**, the default: FILE if the data set begins with files, otherwise DATA.
#
# **Predict.** Ten samples lie in three files: 0 to 3, 4 to 7, and 8 to 9. Two workers, a global batch of 4. Which samples does worker 1 see under each policy?


# %%
# NBVAL_CHECK_OUTPUT
workspace = tempfile.TemporaryDirectory(prefix="lesson12-")  # gone when the kernel ends
scratch = Path(workspace.name)


def write_files(*contents):
    for number, lines in enumerate(contents):
        (scratch / f"part{number}.txt").write_text("".join(f"{n}\n" for n in lines))
    return [str(scratch / f"part{number}.txt") for number in range(len(contents))]


def shares(policy, files):
    strategy = join_cluster()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    lines = tf.data.TextLineDataset(files).map(lambda line: tf.strings.to_number(line, "int32"))
    dataset = lines.batch(4).with_options(options)
    return [
        [
            sample
            for part in strategy.experimental_local_results(step)
            for sample in part.numpy().tolist()
        ]
        for step in strategy.experimental_distribute_dataset(dataset)
    ]


POLICY, files = (
    tf.data.experimental.AutoShardPolicy,
    write_files(range(4), range(4, 8), range(8, 10)),
)
for policy in (POLICY.OFF, POLICY.DATA, POLICY.FILE):
    workers = launch(shares, 2, policy, files, framework="tensorflow")
    for index, steps in enumerate(workers):
        print(f"{policy.name:4}  worker {index}: {steps}")
    once = sorted(sum(sum(workers, []), [])) == list(range(10))
    print(f"      each sample once: {once}")
    assert once == (policy is not POLICY.OFF)

# %% [markdown]
# Under OFF a step uses each sample twice: twice the work for the same gradient, and an epoch twice as long. Under DATA and FILE each sample comes once. The price of DATA is that every worker reads, and decodes, everything. FILE reads each file once in all, but the shares are as even as the files are: here worker 1 runs out first, and brings an empty batch to the last step, so that nobody waits for ever.
#
# When you shard by yourself, in `strategy.distribute_datasets_from_function(lambda context: …)`, the policy is not applied: use `context.num_input_pipelines` and `context.input_pipeline_id`, and batch by `context.get_per_replica_batch_size(global_batch)`.
#
# ### Broken 2: fewer files than workers
#
# A small data set often comes as one file. The default policy finds a file, so it shards by files.
#
# **Predict.** One file, two workers, the default policy. What happens?


# %%
try:
    launch(shares, 2, POLICY.AUTO, write_files(range(8)), framework="tensorflow", timeout=60)
except RankError as error:
    print(
        f"worker {error.rank}, {error.type_name}:", re.search("Could not.*?workers", str(error))[0]
    )
    print("meanwhile", next(iter(error.others.values())).split(",")[0])
else:
    raise AssertionError("one file was shared by two workers")
workers = launch(shares, 2, POLICY.DATA, write_files(range(8)), framework="tensorflow")
print("DATA instead:", workers)

# %% [markdown]
# Each worker looks for files of its own. The one that gets an error says so; the other waits in an all-reduce, in which the workers ask each other after every step whether anybody has data left. Under `launch` the first error ends both. Without it, worker 1 would wait, and its log would hold nothing. So when a worker hangs, read the logs of *all* workers.
#
# ## What the second worker brings
#
# Now the time. The same global batch goes once through worker 0 alone, with no strategy, and once through both, half each. They take turns, so that both meet the same machine. Two models:
#
# - **wide**: two dense layers. Many weights, little computing with each.
# - **convolutional**: four convolutions. Few weights, each used at every place of the picture.
#
# What is computed grows with the batch. What is sent, the gradients, does not.
#
# **Predict.** For which model, and at which end of the batch sizes, will two workers gain most?

# %%
BATCHES, ROUNDS = [16, 64, 256], 5


def make_model(kind):
    conv = keras.layers.Conv2D
    if kind == "wide":
        layers = [keras.layers.Flatten(), keras.layers.Dense(1024, "relu")]
    else:
        layers = [conv(32, 3, strides=2, activation="relu")]
        layers += [conv(64, 3, activation="relu") for _ in range(3)]
        layers += [keras.layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input([28, 28, 1]), *layers, keras.layers.Dense(10)])


def make_step(kind, strategy):
    """One training step on a share of a global batch, compiled for any batch size."""
    with strategy.scope():
        model, optimizer = make_model(kind), keras.optimizers.SGD(0.01)

    def on_replica(images, labels):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(
                labels, model(images), from_logits=True
            )
            whole = tf.shape(labels)[0] * strategy.num_replicas_in_sync
            loss = tf.nn.compute_average_loss(losses, global_batch_size=whole)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    kinds = [tf.TensorSpec([None, 28, 28, 1]), tf.TensorSpec([None], tf.int64)]
    step = tf.function(lambda *data: strategy.run(on_replica, data), input_signature=kinds)
    return step, model.count_params() * 4


def race(kind):
    both, default = join_cluster(), tf.distribute.get_strategy()
    chief = both.cluster_resolver.task_id == 0
    images, labels = (part[: BATCHES[-1]] for part in mnist()[0])
    images, labels = tf.constant(images[..., None] / 255, "float32"), tf.constant(labels, "int64")
    (one, size), (two, _) = make_step(kind, default), make_step(kind, both)
    all_here = tf.function(
        lambda: both.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0))
    )
    seconds = {(who, batch): [] for batch in BATCHES for who in ("one", "two")}
    for number in range(ROUNDS + 1):  # the first round warms up
        for who, batch in list(seconds)[:: 1 if number % 2 else -1]:
            share = batch if who == "one" else batch // 2
            all_here().numpy()
            start = time.perf_counter()
            if who == "two" or chief:
                (one if who == "one" else two)(images[:share], labels[:share]).numpy()
            if number:
                seconds[who, batch].append(time.perf_counter() - start)
    return seconds, size


raced = {
    kind: launch(race, 2, kind, framework="tensorflow")[0] for kind in ("wide", "convolutional")
}

# %%
gains = {}
for kind, (seconds, size) in raced.items():
    print(f"{kind}: gradients of {size / 2**20:.2f} MiB are sent in every step")
    for batch in BATCHES:
        one, two = (Timing(tuple(seconds[who, batch])) for who in ("one", "two"))
        gain = gains[kind, batch] = Ratio(
            tuple(a / b for a, b in zip(one.runs, two.runs, strict=True))
        )
        speeds = [f"{batch / timing.median:7.0f}" for timing in (one, two)]
        print(
            f"    batch {batch:3}: one worker {speeds[0]}, two {speeds[1]} samples/s, gain {gain}"
        )

fig, ax = plt.subplots()
for number, kind in enumerate(raced):
    row = [gains[kind, batch] for batch in BATCHES]
    middle = np.array([gain.median for gain in row])
    reach = [middle - [gain.low for gain in row], [gain.high for gain in row] - middle]
    places = [batch * (0.97, 1.03)[number] for batch in BATCHES]
    ax.errorbar(
        places, middle, yerr=reach, capsize=3, label=kind,
        color=plots.COLOURS[number], marker=plots.MARKERS[number], linestyle=plots.DASHES[number],
    )  # fmt: skip
for level, text in ((1, "no gain"), (2, "perfect")):
    ax.axhline(level, color="black", linestyle=":", marker="")
    ax.text(1.01, level, text, fontsize=9, va="center", transform=ax.get_yaxis_transform())
ax.set_xscale("log", base=2)
ax.set_xticks(BATCHES, BATCHES)
ax.minorticks_off()
ax.set(xlabel="global batch (samples)", ylabel="samples/s, two workers ÷ one (×)")
ax.set_ylim(0, max(2.3, 1.05 * max(gain.high for gain in gains.values())))
large = {kind: gains[kind, BATCHES[-1]].median for kind in raced}
ax.set_title(
    f"Two workers at a batch of {BATCHES[-1]}: {large['wide']:.2f}× for the wide model,\n"
    f"{large['convolutional']:.2f}× for the convolutional one"
)
ax.legend()
small = {kind: gains[kind, BATCHES[0]].median for kind in raced}
plots.show(
    fig,
    name="what-the-second-worker-brings",
    alt="Samples a second of two workers over those of one, against the global batch. Wide model: "
    f"{small['wide']:.2f} at {BATCHES[0]}, {large['wide']:.2f} at {BATCHES[-1]}. Convolutional: "
    f"{small['convolutional']:.2f} at {BATCHES[0]}, {large['convolutional']:.2f} at {BATCHES[-1]}.",
)

# %% [markdown]
# Markers are medians of the ratios of each round, bars their middle half. Where a bar crosses 1 your machine has not decided. The wide model has many gradients to send and little to compute, so look where its line lies below 1: there one worker is the better choice. That is the question of lesson 02 again: how much is computed for each byte that is sent? (More than 2× can be real: half a batch may fit into a core's fast memory when the whole does not.)
#
# ## How the gradients travel
#
# `CommunicationOptions` has three settings. `implementation` is AUTO, RING or NCCL: a ring over gRPC, or NVIDIA's library for GPUs. (Hierarchical copy, of lesson 10, works among the GPUs of one process.) `bytes_per_pack` joins gradients into packs of about this size, each of which is one all-reduce; 0 puts all into one. `timeout_seconds` limits the wait for the others.
#
# **Predict.** Eight gradients of 256 KiB each. How many all-reduces are there with 0, with 1 byte, and with 512 KiB a pack? Which is fastest here, where all gradients are ready at once?

# %%
PACKS, KiB = [0, 1, 512 * 1024], 1024


def packs(rounds):
    strategy = join_cluster()
    gradients = [tf.random.normal([256 * KiB // 4]) for _ in range(8)]
    steps, counts, seconds = {}, {}, {size: [] for size in PACKS}
    for size in PACKS:
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=size, implementation="RING"
        )

        def all_reduce(options=options):
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", gradients, options)

        steps[size] = tf.function(lambda run=all_reduce: strategy.run(run))
        operations = steps[size].get_concrete_function().graph.get_operations()
        counts[size] = sum(operation.type == "CollectiveReduceV2" for operation in operations)
    for number in range(rounds + 2):  # two rounds to warm up
        for size in PACKS[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            steps[size]()[0].numpy()
            if number >= 2:
                seconds[size].append(time.perf_counter() - start)
    return counts, seconds


counts, seconds = launch(packs, 2, 15, framework="tensorflow")[0]

for size in PACKS:
    print(f"bytes_per_pack {size:6}: {Timing(tuple(seconds[size]))}")

# %%
# NBVAL_CHECK_OUTPUT
for size in PACKS:
    print(f"bytes_per_pack {size:6}: {counts[size]} all-reduces a step")
try:
    tf.distribute.experimental.CommunicationOptions(implementation="HIERARCHICAL")
except ValueError as error:
    print("ValueError:", error)
else:
    raise AssertionError("an implementation that MultiWorkerMirroredStrategy does not have")


# %% [markdown]
# A pack is closed when it has *passed* the limit, hence the counts. Many small messages pay for many starts. Few large ones start late: a pack can leave only when its last gradient is computed. Here nothing is computed meanwhile, so this cell shows the first half of that bargain only.


# %% then="tf.distribute.experimental.MultiWorkerMirroredStrategy(communication=RING)" now="tf.distribute.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(implementation=RING))" since="TensorFlow 2.4"
# NBVAL_CHECK_OUTPUT
RING = tf.distribute.experimental.CommunicationImplementation.RING


def old_way():
    said = []
    tf.get_logger().addFilter(lambda record: said.append(record.getMessage()))
    tf.distribute.experimental.MultiWorkerMirroredStrategy(communication=RING)
    return re.search("is deprecated.*version", " ".join(said))[0]


def new_way():
    options = tf.distribute.experimental.CommunicationOptions(implementation=RING)
    return f"{join_cluster(communication_options=options).num_replicas_in_sync} replicas"


print("then:", launch(old_way, 2, framework="tensorflow")[0])
print("now:", launch(new_way, 2, framework="tensorflow")[0])

# %% [markdown]
# ## All call save, one file stays
#
# The replicas are equal, so one file is enough, and two workers that write the same path destroy each other's. So only the chief saves? Some variables are not equal: a **sync-on-read** variable has a different value on each replica, and whoever reads it gets the sum (or mean) over all. Metrics are such. Reading it is an all-reduce, and saving reads.
#
# **Predict.** Each worker has counted 3 samples. Only the chief calls `checkpoint.write`. What does it write, and when? (Two seconds are the limit for each all-reduce here.)


# %%
# NBVAL_CHECK_OUTPUT
def save(who, what):
    patient = tf.distribute.experimental.CommunicationOptions(timeout_seconds=2)
    strategy = join_cluster(communication_options=patient)
    me = strategy.cluster_resolver.task_id
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])  # mirrored
        seen = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    strategy.run(lambda: seen.assign_add(3.0))
    checkpoint = tf.train.Checkpoint(value={"weight": weight, "seen": seen}[what])
    if who == "all" or me == 0:
        own = scratch if me == 0 else tempfile.mkdtemp(dir=scratch)  # to be thrown away
        try:
            checkpoint.write(f"{own}/{what}")
        except tf.errors.DeadlineExceededError as error:
            return type(error).__name__
        saved = tf.train.load_checkpoint(f"{own}/{what}")
        return f"saved {saved.get_tensor('value/.ATTRIBUTES/VARIABLE_VALUE')}"
    return "does not write"


for who, what in [("the chief", "weight"), ("the chief", "seen"), ("all", "seen")]:
    chief, other = launch(save, 2, who, what, framework="tensorflow")
    print(f"{what:6}  written by {who:9}  chief: {chief}; worker 1: {other}")
    assert chief.startswith("Deadline") == ((who, what) == ("the chief", "seen"))

# %% [markdown]
# The chief waits for an all-reduce that nobody else joins. Here `timeout_seconds` ended the wait; without it there is no error, ever. With mirrored variables alone it comes through, until the day somebody adds a metric. So **all call save, each with a path of its own, and only the chief's is kept**. On real machines the chief's folder is on a disk that all can read, because all restore from it.
#
# ## A worker dies
#
# Here is a whole program as you would put it on two machines: it saves every five steps, and goes on from the newest checkpoint if there is one. The data of a step follow from its number, so the position in the data needs no saving. For this lesson it has one thing more: worker 1 can be told to kill itself.

# %%
SCRIPT = """\
import json, os, signal, sys, tempfile, time
import keras
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # waits until all workers are there
me = strategy.cluster_resolver.task_id
folder, last, dies_after = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

with strategy.scope():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
    optimizer.build(model.trainable_variables)
    done = tf.Variable(0, dtype=tf.int64)  # steps so far

checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, done=done)
spare = tempfile.TemporaryDirectory()  # all call save; what is not the chief's is thrown away
own = folder if me == 0 else spare.name
manager = tf.train.CheckpointManager(checkpoint, own, max_to_keep=2)
newest = tf.train.latest_checkpoint(folder)  # the chief's, for all
if newest:
    checkpoint.restore(newest).assert_existing_objects_matched()
start = step = int(done.numpy())

def on_replica(step):
    x = tf.random.stateless_normal([8, 8], seed=[step, me])
    with tf.GradientTape() as tape:
        losses = (model(x)[:, 0] - tf.reduce_sum(x, axis=1)) ** 2
        whole = 8 * strategy.num_replicas_in_sync
        loss = tf.nn.compute_average_loss(losses, global_batch_size=whole)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

train_step = tf.function(lambda step: strategy.run(on_replica, [step]))

try:
    while step < last:
        train_step(tf.constant(step))
        step += 1
        done.assign(step)
        if step % 5 == 0:
            manager.save(checkpoint_number=step)
        if me == 1 and step == dies_after:
            print(json.dumps({"dies": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
except tf.errors.OpError as error:
    seen = {"error": type(error).__name__, "message": error.message, "at": time.time()}
    print(json.dumps(seen), flush=True)
    os._exit(1)  # the next start goes on from the checkpoint

result = {"start": start, "done": step, "weights": [w.tolist() for w in model.get_weights()]}
"""
(scratch / "train.py").write_text(SCRIPT)
compile(SCRIPT, "train.py", "exec")
print(len(SCRIPT.splitlines()), "lines")

# %% [markdown]
# Started by hand this time: two processes, each with its own TF_CONFIG. In the same way two machines would do it.


# %%
def free_ports(n):
    """Ports that nobody uses at the moment."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def start_by_hand(*command, n=2, **environment):
    """What each process printed, and its exit code."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(n)]
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes, outputs = [], []
    deadline = threading.Timer(90, lambda: [process.kill() for process in processes])
    deadline.start()
    try:
        for index in range(n):
            own = {"TF_CONFIG": tf_config(addresses, index), "CUDA_VISIBLE_DEVICES": "-1"}
            env = {**os.environ, **own, **environment}
            processes.append(
                subprocess.Popen([sys.executable, *command], env=env, text=True, **quiet)
            )
        for process in processes:
            outputs.append(process.stdout.readline())
            assert outputs[-1], process.stderr.read()[-1000:]  # it ended without a word
        for process in processes:  # none leaves before all have spoken
            process.communicate()
    finally:
        deadline.cancel()
        for process in processes:
            process.kill()
    return outputs, [process.returncode for process in processes]


folder = scratch / "checkpoints"
outputs, codes = start_by_hand(str(scratch / "train.py"), str(folder), "20", "12")
seen, death = (json.loads(output) for output in outputs)
print("worker 1 ended by signal", -codes[1])
print(f"worker 0 saw it after {seen['at'] - death['dies']:.2f} s: {seen['error']}")
print("   ", seen["message"].splitlines()[0].split("}} ")[-1])
assert codes == [1, -signal.SIGKILL]

# %% [markdown]
# The system closed the dead worker's connections, so the other saw an error in its next all-reduce. It cannot go on: its sum would lack a part. What it can do is end, so that somebody starts all of them again.
#
# **Predict.** Saved every 5 steps, killed after step 12. With which step does the second start begin? How many steps are done twice?


# %%
# NBVAL_CHECK_OUTPUT
def run_script(folder, last):
    """The program above on this rank; `launch` wrote TF_CONFIG."""
    tf.get_logger().setLevel("ERROR")
    sys.argv = ["train.py", folder, last, "-1"]
    return runpy.run_path(str(scratch / "train.py"))["result"]


kept = sorted((path.stem for path in folder.glob("*.index")), key=lambda name: int(name[5:]))
resumed, _ = launch(run_script, 2, str(folder), "20", framework="tensorflow")
whole, _ = launch(run_script, 2, str(scratch / "never killed"), "20", framework="tensorflow")
print("kept by the chief:", kept)
print(f"killed after step 12, goes on after step {resumed['start']}, done: {resumed['done']}")
gap = max(
    np.abs(np.subtract(a, b)).max()
    for a, b in zip(resumed["weights"], whole["weights"], strict=True)
)
print("as if nothing had happened, largest difference of a weight below 1e-6:", gap < 1e-6)
assert (resumed["start"], whole["start"]) == (10, 0) and gap < 1e-6

# %% [markdown]
# Two steps were done twice, and nothing else was lost: weights, momentum and position all came from the checkpoint.
#
# A worker that does *not* close its connections is worse: a frozen process, a pulled cable. Nobody is told, as when the chief saved alone. Then `timeout_seconds` helps too. (TensorFlow [advises it for debugging](https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions), because it costs a thread for each collective.)

# %% [markdown]
# ## `fit` with many workers
#
# Why was the loop written by hand? Keras 3's `fit` [does not work](https://github.com/keras-team/keras/issues/20585) with this strategy, although TensorFlow's guide still lists it. `fit` of **tf-keras**, the Keras 2 that lives on, does. Which one `tf.keras` is, is decided when TensorFlow is imported: the variable `TF_USE_LEGACY_KERAS=1` must be there before. So it needs processes of its own.


# %%
FIT = """\
import json, sys
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=[64, 8]).astype("float32")
y = x.sum(axis=1)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
history = model.fit(x, y, batch_size=32, epochs=2, verbose=0)  # 32 is the global batch
package = type(model).__module__.split(".")[0]
print(json.dumps([package, history.history["loss"]]), flush=True)
sys.stdin.read()  # stay until the others are done too
"""
(scratch / "fit.py").write_text(FIT)


def fit_of_this_keras():
    tf.get_logger().setLevel("ERROR")
    try:
        runpy.run_path(str(scratch / "fit.py"))
    except ValueError as error:
        return f"Keras {keras.__version__[0]}: ValueError: {str(error).split(':')[0]}"
    raise AssertionError("Keras 3's fit worked: this section is out of date")


# %% then="model.fit(…) under MultiWorkerMirroredStrategy" now="the loop by hand; or TF_USE_LEGACY_KERAS=1 and tf-keras" since="Keras 3, TensorFlow 2.16"
# NBVAL_CHECK_OUTPUT
print("then:", launch(fit_of_this_keras, 2, framework="tensorflow")[0])
outputs, codes = start_by_hand(str(scratch / "fit.py"), TF_USE_LEGACY_KERAS="1")
(package, first), (_, second) = (json.loads(output) for output in outputs)
print(f"now: {package}, epochs: {len(first)}, the loss falls: {first[1] < first[0]}")
print("both workers print the same loss:", first == second)
assert codes == [0, 0] and first == second

# %% [markdown]
# ## On real machines
#
# What changes when the workers are machines:
#
# - **Addresses.** Each machine must be reached by all others under the name in TF_CONFIG. `localhost` means another machine on each.
# - **Firewalls.** The port of each worker must be open to the others. Where it is not, nobody gets an error: all wait in the strategy's first line.
# - **One worker a machine** is usual: it takes all GPUs of its machine, each is a replica. With several workers on one machine, each needs a port and `CUDA_VISIBLE_DEVICES` of its own.
# - **NCCL** carries messages between GPUs; `NCCL_DEBUG=INFO` shows which network it took, `NCCL_SOCKET_IFNAME` chooses one. gRPC still introduces the workers.
# - **Data and checkpoints** lie where all can read them. The code and its versions are the same everywhere.
# - **Restarts.** One dead worker ends all, so whatever started them must start all again. The Slurm job below does so three times; after an error of the ssh script you do.
#
# Three files do it. The first writes TF_CONFIG on each machine; the second is a job for **Slurm**, which shares out most university clusters; the third needs nothing but ssh.

# %%
WITH_TF_CONFIG = """\
#!/bin/bash
# HOSTS="node1 node2" PORT=2222 INDEX=1 bash with_tf_config.sh python train.py
set -euo pipefail
index=${INDEX:-$SLURM_PROCID}
addresses=""
for host in $HOSTS; do addresses+="${addresses:+, }\\"$host:$PORT\\""; done
task="{\\"type\\": \\"worker\\", \\"index\\": $index}"
export TF_CONFIG="{\\"cluster\\": {\\"worker\\": [$addresses]}, \\"task\\": $task}"
exec "$@"
"""
SLURM = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00
#SBATCH --open-mode=append
# sbatch job.slurm python train.py /shared/checkpoints 10000 -1
set -euo pipefail
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\\n' ' ')
export HOSTS PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 bash with_tf_config.sh "$@" && exit
[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"  # from the checkpoint
"""
SSH = """\
#!/bin/bash
# HOSTS="node1 node2" bash start.sh python train.py /shared/checkpoints 10000 -1
# in a folder that has the same path on every machine
set -euo pipefail
PORT=${PORT:-2222} index=0 workers=()
for host in $HOSTS; do
    ssh -tt "$host" "cd '$PWD' && HOSTS='$HOSTS' PORT=$PORT INDEX=$index bash with_tf_config.sh $(printf '%q ' "$@")" \\
        </dev/null >"worker$index.log" 2>&1 &
    workers+=($!)
    index=$((index + 1))
done
trap 'kill "${workers[@]}" 2>/dev/null' INT TERM
failed=0
for worker in "${workers[@]}"; do wait "$worker" || failed=1; done
exit $failed
"""
scripts = {"with_tf_config.sh": WITH_TF_CONFIG, "job.slurm": SLURM, "start.sh": SSH}
for name, text in scripts.items():
    (scratch / name).write_text(text)
    print(f"---- {name}\n{text}")

# %% [markdown]
# This machine has neither Slurm nor a second machine. So the next cell checks the scripts' syntax, and runs them with stand-ins: an `ssh` that runs its command here, an `srun` that runs it twice. In place of training, the program prints its TF_CONFIG.

# %%
# NBVAL_CHECK_OUTPUT
STAND_INS = {
    "ssh": 'exec bash -c "$3"',  # without -tt and the host
    "srun": 'shift; for SLURM_PROCID in 0 1; do export SLURM_PROCID; "$@"; done',
    "scontrol": "printf 'node1\\nnode2\\n'",
}
for name, line in STAND_INS.items():
    (scratch / name).write_text(f"#!/bin/bash\n{line}\n")
    (scratch / name).chmod(0o755)
env = {**os.environ, "PATH": f"{scratch}{os.pathsep}{os.environ['PATH']}", "HOSTS": "node1 node2"}
env |= {"SLURM_JOB_ID": "22222", "SLURM_JOB_NODELIST": "node[1-2]"}


def bash(*arguments):
    done = subprocess.run(
        ["bash", *arguments], cwd=scratch, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


for name in scripts:
    bash("-n", name)
    print(f"bash -n {name}: no error")
tell = [sys.executable, "-c", "import os; print(os.environ['TF_CONFIG'])"]
by_slurm = bash("job.slurm", *tell)
bash("start.sh", *tell)
by_ssh = [(scratch / f"worker{index}.log").read_text().strip() for index in range(2)]
assert by_slurm == [tf_config(["node1:22222", "node2:22222"], index) for index in range(2)]
assert by_ssh == [tf_config(["node1:2222", "node2:2222"], index) for index in range(2)]
print(*by_slurm, *by_ssh, sep="\n")

# %% [markdown]
# **What this machine cannot show:** a network between machines, NCCL, and GPUs as replicas. Results on real GPUs: **not measured** yet. Messages inside one machine cost other times than messages between two, so measure there before you decide on a batch size or on `bytes_per_pack`.

# %% [markdown]
# ## A dictionary: TensorFlow and PyTorch
#
# One model, both libraries, two processes each: the same initial weights, the same batches, the same gradients. The cell below the table proves it. A dash means that there is nothing alike.
#
# | TensorFlow | PyTorch | and the difference |
# |---|---|---|
# | replica; worker (a process with one or more replicas) | rank (a process with one device) | `num_replicas_in_sync` counts replicas, as `get_world_size()` counts ranks |
# | `TF_CONFIG`: all addresses, and who I am | `env://`: `MASTER_ADDR`, `MASTER_PORT`, `RANK`, `WORLD_SIZE` | TensorFlow's workers know all addresses, PyTorch's ranks meet at one |
# | `MultiWorkerMirroredStrategy()` | `init_process_group()`, then `DistributedDataParallel(model)` | the strategy comes before the model, DDP after it |
# | `cluster_resolver.task_id` | `dist.get_rank()` | |
# | the chief: worker 0, or the job `chief` | rank 0 | |
# | mirrored variable | parameter, broadcast from rank 0 by DDP | both start with the first one's values |
# | sync-on-read variable: summed when read | buffer: DDP takes rank 0's | so PyTorch's rank 0 may save alone |
# | `replica_context.all_reduce("sum", t)` | `dist.all_reduce(t)` | a new tensor; in place |
# | `strategy.reduce("sum", t, axis=None)` | `dist.all_reduce(t)` | outside `run` |
# | `strategy.gather(t, axis=0)` | `dist.all_gather(…, t)` | |
# | implementation `RING`, `NCCL` | backend `gloo`, `nccl` | |
# | `bytes_per_pack` | `bucket_cap_mb` | default: one pack; 25 MiB |
# | `timeout_seconds`, by default none | `init_process_group(timeout=…)`, by default 10 or 30 minutes | |
# | data set batched by the *global* batch, `experimental_distribute_dataset` | `DataLoader` batched by a *rank's* batch | |
# | `AutoShardPolicy.DATA` | `DistributedSampler` | an uneven end: empty or smaller shares; padded with repeats |
# | `AutoShardPolicy.FILE` | – | by hand: `files[rank::world_size]` |
# | `compute_average_loss(losses, global_batch_size=…)` | `losses.sum() / global_batch * world_size`; with equal shares `losses.mean()` | TensorFlow sums gradients, DDP averages them |
# | `optimizer.apply(gradients, variables)` sends | `loss.backward()` sends | DDP sends while it still computes |
# | `ParameterServerStrategy` | – | |
# | `tf.train.Checkpoint`: all call `save`, the chief's is kept | `torch.save` on rank 0 | |
# | `tf.config.threading.set_intra_op_parallelism_threads(1)` | `torch.set_num_threads(1)` | threads inside one operation |
# | `tf.config.threading.set_inter_op_parallelism_threads(1)` | `torch.set_num_interop_threads(1)` | operations at the same time |

# %%
# NBVAL_CHECK_OUTPUT
draw = np.random.default_rng(0).normal
START = [draw(0, 0.3, shape).astype("float32") for shape in ([20, 16], [16], [16, 5], [5])]
X, Y = draw(size=[160, 20]).astype("float32"), np.arange(160) % 5  # five global batches of 32


def in_tensorflow():
    strategy, seen = join_cluster(), []
    dense = keras.layers.Dense
    with strategy.scope():
        model = keras.Sequential([keras.Input([20]), dense(16, "relu"), dense(5)])
        model.set_weights(START)
        optimizer = keras.optimizers.SGD(0.1)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=32)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # sends, and steps
        return tf.distribute.get_replica_context().all_reduce("sum", gradients)  # to compare

    step = tf.function(lambda *share: strategy.run(on_replica, share))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICY.DATA
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(32).with_options(options)
    for share in strategy.experimental_distribute_dataset(dataset):
        seen.append([gradient.numpy() for gradient in step(*share)])
    return seen


def in_pytorch():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    with torch.no_grad():
        for parameter, start in zip(model.parameters(), START, strict=True):
            parameter.copy_(torch.from_numpy(start.T))  # PyTorch keeps a layer's matrix turned
    model, seen = torch.nn.parallel.DistributedDataParallel(model.to(device)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    for x, y in torch.utils.data.DataLoader(data, 32 // dist.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()  # sends
        optimizer.step()
        seen.append([parameter.grad.cpu().numpy().T for parameter in model.parameters()])
    return seen


ours, theirs = launch(in_tensorflow, 2, framework="tensorflow")[0], launch(in_pytorch, 2)[0]
for number, (a, b) in enumerate(zip(ours, theirs, strict=True), start=1):
    a, b = (np.concatenate([gradient.ravel() for gradient in gradients]) for gradients in (a, b))
    difference = np.linalg.norm(a - b) / np.linalg.norm(a)
    print(f"step {number}: {len(a)} gradients, relative difference below 1e-5: {difference < 1e-5}")
    assert difference < 1e-5

# %% [markdown]
# Not 0: the two libraries add in different orders, in float32. (Worker 0 takes the first half of a global batch, rank 0 every second sample of it. The mean over the batch does not care.)
#
# ## Exercise
#
# [Exercise 12](../exercises/12_multi_worker.ipynb): write TF_CONFIG for any cluster, decide who saves what where, and choose a shard policy. About 30 minutes.
#
# ## Recap
#
# Workers are equal processes that know each other's addresses from TF_CONFIG, and add up their gradients in every step. All must do the same things in the same order: make the strategy first, take a share of every batch, call save. When one dies all end, and go on together from the newest checkpoint.
#
# 1. Worker 1 hangs in its first step, and its log is empty. Where do you look?
# 2. Three workers, a global batch of 96, a loss of shape [32] on each. By what does `compute_average_loss` divide, and why not by 32?
# 3. Your data are 10 files of equal size, you have 4 workers. What speaks against FILE?
#
# <details><summary>Answers</summary>
#
# 1. In the logs of the others: one may have failed, or read no data, or be unreachable behind a firewall.
# 2. By 96: the gradients of the three are *added*. Divided by 32 each, the sum would be three times the mean.
# 3. The shares are 3, 3, 2 and 2 files. In the last third of the epoch two workers have nothing left, and only half of the machines train.
#
# </details>
#
# Go on with [exercise 12](../exercises/12_multi_worker.ipynb).
