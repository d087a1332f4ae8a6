# ---
# jupyter:
#   course:
#     rows: [M6, D6]
#     minutes: {read: 45, do: 25}
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
# | **Time** | 45 minutes to read, 25 to do; the exercise comes on top |
# | **You should know** | a training step in TensorFlow; replicas and `compute_average_loss` ([lesson 10](10_mirrored_strategy.ipynb)) help |
# | **You will** | write TF_CONFIG · train with two workers · share out the data · measure what the second worker brings · save from all, keep one · lose a worker and resume · start it by Slurm or by ssh · translate between TensorFlow and PyTorch |
# | **Runs on** | no GPU, or one: two processes on two pinned cores · two GPUs or more: the GPUs, in TensorFlow's GPU environment (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1, tf-keras 2.21.0, PyTorch 2.13.0 |
#
# A reminder: a **replica** is one copy of the model, on one device. In **synchronous** training each replica computes gradients on its share of the **global batch**; an **all-reduce** adds them up, every replica gets the sum, and all take the same step. In lesson 10 the replicas lived in one process. Here each lives in a process of its own, a **worker**, which may be on another machine.

# %%
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

# TensorFlow's notices of its own housekeeping would hide what the lesson prints. (No setting
# turns off the four lines below this cell: github.com/tensorflow/tensorflow/issues/100442.)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf

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
# `MultiWorkerMirroredStrategy` reads TF_CONFIG, starts a server at its own address, and waits until all others are there. The servers talk **gRPC**, a protocol for calls over a network.
#
# **Predict.** Worker 0 brings `[1, 2, 3, 4]`, worker 1 brings `[10, 20, 30, 40]`. What does each hold after the all-reduce? And a guess: each worker draws random weights for two layers, with no seed, one layer inside the strategy's scope and one outside. Which weights are equal?


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

    outside = keras.layers.Dense(2)
    outside.build([None, 3])
    with strategy.scope():
        layer = keras.layers.Dense(2)
        layer.build([None, 3])
        index = tf.Variable(float(me))  # each worker brings its own
    variable = layer.kernel.value
    copies = strategy.experimental_local_results(variable)
    where = [copy.device.split("/device")[0] for copy in copies]
    return {
        "sum": add_up().numpy().astype(int).tolist(),
        "replicas in all": strategy.num_replicas_in_sync,
        "variable": f"{type(variable).__name__}, here on {where}",
        f"a variable made from {me}": float(index.numpy()),
    }, (layer.kernel.numpy(), outside.kernel.numpy())


reports, weights = zip(*launch(first_message, 2, framework="tensorflow"), strict=True)
for index, report in enumerate(reports):
    print(f"worker {index}:", *(f"{key}: {value}" for key, value in report.items()), sep="\n    ")
inside, outside = (np.array_equal(*kernels) for kernels in zip(*weights, strict=True))
print("equal random weights, layer inside the scope:", inside)
print("equal random weights, layer outside the scope:", outside)
assert inside and not outside

# %% [markdown]
# Two processes, one sum. A **mirrored variable** has one copy on each replica, and each process holds only its own. Each worker draws numbers of its own, as the layer outside shows. A mirrored variable, when it is made, takes the first worker's value, as the one made from 0 and 1 shows: that is sent to all, it is **broadcast**.
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
# *Mend:* make the strategy right after the imports, before any variable, data set or random number of TensorFlow.
#
# ## A training loop
#
# With Keras 3 you write the loop; why not `fit`, you will see below. Here is a classifier of handwritten digits, in float64 so that two runs can be compared closely. Two lines make it right for any number of workers: `compute_average_loss` divides the sum of this worker's losses by the *global* batch, and `optimizer.apply` adds the gradients up over the workers before it steps. A sum of parts, each divided by the whole: the mean.
#
# **Predict.** Ten steps with a global batch of 64 on two workers. How many samples does each worker see? Will the two workers' weights be equal to the last bit, and will they equal those of one device to the last bit?


# %%
BATCH, STEPS = 64, 10  # the batch is the global one
IMAGES, LABELS = (part[: BATCH * STEPS] for part in mnist()[0])
LABELS = LABELS.astype("int64")


def digits():
    """A data set of ten global batches."""
    images = IMAGES.reshape(len(IMAGES), -1) / 255
    by_data = tf.data.Options()
    by_data.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    dataset = tf.data.Dataset.from_tensor_slices((images, LABELS))
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
    strategy = join_cluster()
    together = train(strategy)
    if strategy.cluster_resolver.task_id == 0:
        return together, train(tf.distribute.get_strategy())  # the default one: a single replica
    return together, None


(first, alone), (second, _) = launch(together_and_alone, 2, framework="tensorflow")
print("workers and one device equal to the last bit:", np.array_equal(first[2], alone[2]))

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
# The two workers are equal to the last bit: both add the same two numbers to the same weights. One device adds 64 terms in another order than twice 32, so there they may differ by rounding (the first cell says whether they do here), in float64 by less than the tolerance.
#
# ## Who reads what
#
# `experimental_distribute_dataset` takes a data set that yields *global* batches, and gives each worker its share. The **auto-shard policy** says how:
#
# - **OFF**: not at all. Each worker reads everything, in steps as large as a piece below.
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


def shares(strategy, policy, files):
    """The samples that this worker gets, step by step."""
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


def under(policies, files):
    strategy = join_cluster()
    return [shares(strategy, policy, files) for policy in policies]


POLICY = tf.data.experimental.AutoShardPolicy
policies = [POLICY.OFF, POLICY.DATA, POLICY.FILE]
files = write_files(range(4), range(4, 8), range(8, 10))
workers = launch(under, 2, policies, files, framework="tensorflow")
for number, policy in enumerate(policies):
    for index, worker in enumerate(workers):
        print(f"{policy.name:4}  worker {index}: {worker[number]}")
    seen = [sample for worker in workers for step in worker[number] for sample in step]
    print(f"      each sample once: {sorted(seen) == list(range(10))}")
    assert (sorted(seen) == list(range(10))) == (policy is not POLICY.OFF)

# %% [markdown]
# Under OFF a step uses each sample twice: twice the work for the same gradient, and an epoch takes more steps. Under DATA and FILE each sample comes once. The price of DATA is that every worker reads, and decodes, everything. FILE reads each file once in all, but the shares are as even as the files are: here worker 1 runs out first, and brings an empty batch to the last step, so that nobody waits for ever.
#
# When you shard by yourself, in `strategy.distribute_datasets_from_function(lambda context: …)`, the policy [is not applied](https://www.tensorflow.org/tutorials/distribute/input#tfdistributestrategydistribute_datasets_from_function): use `context.num_input_pipelines` and `context.input_pipeline_id`, and batch by `context.get_per_replica_batch_size(global_batch)`.
#
# ### Broken 2: fewer files than workers
#
# A small data set often comes as one file. The default policy finds a file, so it shards by files.
#
# **Predict.** One file, two workers, the default policy. What happens?


# %%
try:
    launch(under, 2, [POLICY.AUTO], write_files(range(8)), framework="tensorflow", timeout=60)
except RankError as error:
    print(
        f"worker {error.rank}, {error.type_name}:", re.search("Could not.*?workers", str(error))[0]
    )
    print("meanwhile", next(iter(error.others.values())).split(",")[0])
else:
    raise AssertionError("one file was shared by two workers")

# %% [markdown]
# Each worker looks for files of its own. Worker 0 takes the only file, sees that none is left for the other, and says so. The other waits for it in the call for its first batch. Under `launch` the first error ends both. Started by hand (our trial, in no cell), worker 1 waited as long as the process of worker 0 was there, and its log stayed empty. When that process ended, worker 1 failed too, but its error spoke of a closed connection, not of files. So read the logs of *all* workers.
#
# *Mend:* DATA, which deals out samples and does not look at files, or more files.
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
# **Predict.** Which model gains more from the second worker? At which end of the batch sizes would you expect it to gain least?

# %%
BATCHES, ROUNDS = [8, 32, 128], 4


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


def race(both, kind):
    """Seconds of each step, and the bytes of the gradients."""
    default = tf.distribute.get_strategy()
    chief = both.cluster_resolver.task_id == 0
    images, labels = tf.constant(IMAGES[..., None] / 255, "float32"), tf.constant(LABELS)
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


def races():
    strategy = join_cluster()
    return {kind: race(strategy, kind) for kind in ("wide", "convolutional")}


raced = launch(races, 2, framework="tensorflow")[0]

# %%
gains = {}
for kind, (seconds, size) in raced.items():
    print(f"{kind}: gradients of {size / 2**20:.2f} MiB are sent in every step")
    for batch in BATCHES:
        one, two = seconds["one", batch], seconds["two", batch]
        gain = gains[kind, batch] = Ratio(tuple(a / b for a, b in zip(one, two, strict=True)))
        verdict = "gain" if gain.low > 1 else "loss" if gain.high < 1 else "not decided"
        speed = batch / Timing(tuple(one)).median
        print(f"    batch {batch:3}: alone {speed:6.0f} samples/s; two workers {gain}, {verdict}")

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
ax.set(xlabel="global batch (samples)", ylabel="samples/s, two workers ÷ one")
ax.set_ylim(0, max(2.8, 1.3 * max(gain.high for gain in gains.values())))
ranges = {}
for kind in raced:
    medians = [gains[kind, batch].median for batch in BATCHES]
    ranges[kind] = f"{min(medians):.2f} to {max(medians):.2f}"
ax.set_title(
    f"Two workers are {ranges['wide']} times as fast as one with the wide model,\n"
    f"{ranges['convolutional']} times with the convolutional one"
)
ax.legend(loc="upper left", ncols=2)
plots.show(
    fig,
    name="what-the-second-worker-brings",
    alt="Samples a second of two workers over those of one, against the global batch of "
    + ", ".join(map(str, BATCHES))
    + ". "
    + " ".join(
        f"{kind}: " + ", ".join(f"{gains[kind, batch].median:.2f}" for batch in BATCHES) + "."
        for kind in raced
    ),
)
best = max(gains, key=lambda pair: gains[pair].median)
decided = all(gains[best].low > gain.high for pair, gain in gains.items() if pair != best)
where = "{} model, batch {}".format(*best) if decided else "not decided, the bars overlap"
print("the largest gain here:", where)

# %% [markdown]
# "One" is one worker on one pinned core, without a strategy. Each round gives one ratio; markers are the medians of these ratios, bars their middle half, drawn a little beside the batch so that both can be seen. Where a bar crosses 1 your machine has not decided.
#
# The wide model sends many bytes for little computing, so it should gain less, and where its line lies below 1 one worker is the better choice. The convolutional model computes much for each byte sent. Both should gain least at the smallest batch. That the *largest* batch gains most does not follow: once sending is a small part, what counts is how fast a core works at a whole and at half a batch. (So more than 2 can be real.)
#
# ## How the gradients travel
#
# `CommunicationOptions` has three settings. `implementation` is [AUTO, RING or NCCL](https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationImplementation): a ring over gRPC, or NVIDIA's library for GPUs. (Hierarchical copy, of lesson 10, works among the GPUs of one process.) `bytes_per_pack` joins gradients into packs, each of which is one all-reduce. A pack takes gradients until it is *larger* than this limit; then the next one begins. 0 puts all into one. `timeout_seconds` limits the wait for the others.
#
# **Predict.** Eight gradients of 256 KiB each. How many all-reduces are there with 0, with 1 byte, and with 512 KiB a pack? And a guess: which is fastest here, where all gradients are ready at once?

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

timings = {size: Timing(tuple(seconds[size])) for size in PACKS}
for size, timing in timings.items():
    print(f"bytes_per_pack {size:6}: {timing}")
fastest = min(PACKS, key=lambda size: timings[size].median)
others = [timings[size] for size in PACKS if size != fastest]
decided = all(timings[fastest].high < other.low for other in others)
print(f"quickest: {fastest}" if decided else "quickest: not decided, the spreads overlap")

# %%
# NBVAL_CHECK_OUTPUT
for size in PACKS:
    print(f"bytes_per_pack {size:6}: {counts[size]} all-reduces a step")
assert list(counts.values()) == [1, 8, 3]

# %% [markdown]
# Two gradients of 256 KiB are 512 KiB, which is not larger than the limit, so a third joins them: 3, 3 and 2. Many small messages pay for many starts. Few large ones start late: a pack can leave only when its last gradient is computed. Here nothing is computed meanwhile, so this cell shows the first half of that bargain only.
#
# Older code chooses the ring by another name, in a strategy that was still experimental:


# %% then="tf.distribute.experimental.MultiWorkerMirroredStrategy(communication=RING)" now="tf.distribute.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(implementation=RING))" since="TensorFlow 2.4"
# NBVAL_CHECK_OUTPUT
RING = tf.distribute.experimental.CommunicationImplementation.RING


def said_by(make, **options):
    said = []
    tf.get_logger().addFilter(lambda record: said.append(record.getMessage()))
    make(**options)
    return re.findall("is deprecated.*version", " ".join(said)) or "nothing about deprecation"


def old_way():
    return said_by(tf.distribute.experimental.MultiWorkerMirroredStrategy, communication=RING)


def new_way():
    options = tf.distribute.experimental.CommunicationOptions(implementation=RING)
    return said_by(tf.distribute.MultiWorkerMirroredStrategy, communication_options=options)


then, now = (launch(way, 1, framework="tensorflow")[0] for way in (old_way, new_way))
print(f"then: {then}\nnow: {now}")
assert then[0].startswith("is deprecated") and now.startswith("nothing")

# %% [markdown]
# ## All call save, one file stays
#
# The replicas are equal, so one file is enough, and two workers that write the same path destroy each other's. So only the chief saves? Some variables are not equal: a **sync-on-read** variable has a different value on each replica, and whoever reads it gets the sum (or mean) over all. A metric of Keras is made of such, as the last line below shows. Reading it is an all-reduce, and saving reads.
#
# **Predict.** Each worker has counted 3 samples. Only the chief calls `checkpoint.write`. Worker 1 meanwhile goes on to its next all-reduces, to which it brings 100. What does the chief save, and what does worker 1 get?


# %%
# NBVAL_CHECK_OUTPUT
def saves():
    strategy = join_cluster()
    me = strategy.cluster_resolver.task_id
    own = scratch if me == 0 else tempfile.mkdtemp(dir=scratch)  # to be thrown away
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])  # mirrored
        on_read, add = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
        seen = tf.Variable(0.0, synchronization=on_read, aggregation=add)
        total = keras.metrics.Mean().variables[0].value
    strategy.run(lambda: seen.assign_add(3.0))

    def save(variable):
        path = tf.train.Checkpoint(value=variable).write(f"{own}/saved")
        saved = tf.train.load_checkpoint(path)
        return f"saved {saved.get_tensor('value/.ATTRIBUTES/VARIABLE_VALUE')}"

    def go_on():
        context, hundred = tf.distribute.get_replica_context, tf.constant(100.0)
        sums = [strategy.run(lambda: context().all_reduce("sum", hundred)) for _ in range(3)]
        return f"gets {[float(each) for each in sums]}"

    return [
        save(weight) if me == 0 else "does nothing",
        save(seen),
        save(seen) if me == 0 else go_on(),
        type(total).__name__,
    ]


chief, other = launch(saves, 2, framework="tensorflow")
cases = ["mirrored, by the chief", "on-read, by all", "on-read, by the chief"]
for case, ours, theirs in zip(cases, chief, other, strict=False):
    print(f"{case:22}  chief: {ours}; worker 1: {theirs}")
print("a variable of keras.metrics.Mean:", chief[3])
assert chief[1:] == ["saved 6.0", "saved 103.0", "SyncOnReadVariable"]

# %% [markdown]
# No error, and both are wrong. All-reduces are matched by their order, not by what they are for: the chief's read met the other's next sum, and 3 + 100 went to both, into the checkpoint and into the training. (One `write` reads three times, hence the three.) Had worker 1 joined nothing, the chief would wait; `timeout_seconds` turns such a wait [into an error](https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/CommunicationOptions), and is not set unless you do. With mirrored variables alone the chief may save alone, until the day somebody adds a metric.
#
# So **all call save, each with a path of its own, and only the chief's is kept**. On real machines the chief's folder is on a disk that all can read, because all restore from it.
#
# ## A worker dies
#
# Here is a whole program as you would put it on two machines: it saves every five steps and at the end, and goes on from the newest checkpoint if there is one. The data of a step follow from its number, so the position in the data needs no saving. For this lesson it has one thing more: worker 1 can be told to kill itself.

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
        if step % 5 == 0 or step == last:
            manager.save(checkpoint_number=step)
        if me == 1 and step == dies_after:
            print(json.dumps({"dies": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
except tf.errors.OpError as error:
    seen = {"error": type(error).__name__, "message": error.message, "at": time.time()}
    print(json.dumps(seen), flush=True)
    os._exit(1)  # the next start goes on from the checkpoint

print(f"went on after step {start}, now at step {step}")
result = {"start": start, "done": step, "weights": [w.tolist() for w in model.get_weights()]}
"""
(scratch / "train.py").write_text(SCRIPT)
compile(SCRIPT, "train.py", "exec")
print(len(SCRIPT.splitlines()), "lines")

# %% [markdown]
# `launch` ends all ranks when one of them dies. So here each rank starts the program in a **child**, a process of its own, and watches. From a shell on each machine it would be `TF_CONFIG=… python train.py checkpoints 20 12`.


# %%
def run_program(*arguments):
    """train.py in this rank, with the TF_CONFIG that `launch` wrote."""
    tf.get_logger().setLevel("ERROR")
    sys.argv = ["train.py", *map(str, arguments)]
    return runpy.run_path(str(scratch / "train.py"))["result"]


def in_a_child(*arguments):
    """train.py in a copy of this process: what it printed, and its exit code."""
    log = tempfile.TemporaryFile("w+")
    child = os.fork()
    if child == 0:
        try:
            with redirect_stdout(log):
                run_program(*arguments)
        finally:
            os._exit(70)  # only the program itself ends with 1
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    log.seek(0)
    return log.read(), code


folder = scratch / "checkpoints"
outputs, codes = zip(*launch(in_a_child, 2, folder, 20, 12, framework="tensorflow"), strict=True)
assert codes == (1, -signal.SIGKILL), (codes, outputs)
seen, death = (json.loads(output) for output in outputs)
print("worker 1 ended by signal", -codes[1])
print(f"worker 0 saw it after {seen['at'] - death['dies']:.2f} s: {seen['error']}")
print("   ", seen["message"].splitlines()[0].split("}} ")[-1])

# %% [markdown]
# The system closed the dead worker's connections, so the other saw an error in its next all-reduce. It cannot go on: its sum would lack a part. What it can do is end, so that somebody starts all of them again.
#
# **Predict.** Saved every 5 steps, killed after step 12. With which step does the second start begin? How many steps are done twice?


# %%
# NBVAL_CHECK_OUTPUT
def quietly(*arguments):
    with redirect_stdout(None):
        return run_program(*arguments)


kept = sorted((path.stem for path in folder.glob("*.index")), key=lambda name: int(name[5:]))
resumed, _ = launch(quietly, 2, folder, 20, -1, framework="tensorflow")
whole, _ = launch(quietly, 2, scratch / "never killed", 20, -1, framework="tensorflow")
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
# A frozen process or a pulled cable closes no connection. But the workers also send **heartbeats**, and one that sends none for some time [counts as disconnected](https://github.com/tensorflow/tensorflow/blob/10e7c9d930263b66ad98d7c3389f9a4b9ffc7ac0/third_party/xla/xla/tsl/protobuf/coordination_config.proto): with SIGSTOP in place of SIGKILL, which freezes worker 1, worker 0 got an `UnavailableError`, "stopped sending heartbeats", 11 seconds later (one try of ours, in no cell).
#
# ## `fit` with many workers
#
# Why was the loop written by hand? Keras 3's `fit` [does not work](https://github.com/keras-team/keras/issues/20585) with this strategy, although TensorFlow's [tutorial](https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras) still shows it. `fit` of **tf-keras**, the Keras 2 that lives on, does. Which of the two `tf.keras` is, the variable `TF_USE_LEGACY_KERAS` decides when a process first uses `tf.keras`. So set it for the whole program: `TF_USE_LEGACY_KERAS=1 TF_CONFIG=… python fit.py`.


# %%
def fit():
    strategy = join_cluster()
    x = np.random.default_rng(0).normal(size=[64, 8]).astype("float32")
    with strategy.scope():
        tf.keras.utils.set_random_seed(0)
        model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
    # 32 is the global batch. No shuffling: each worker would shuffle in its own way.
    history = model.fit(x, x.sum(axis=1), batch_size=32, epochs=2, shuffle=False, verbose=0)
    return type(model).__module__.split(".")[0], history.history["loss"]


def fit_of_keras_3():
    try:
        return fit()
    except ValueError as error:
        return f"ValueError: {str(error).split(' (')[0]}"


def fit_of_tf_keras():
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    return fit()


# %% then="model.fit(…) under MultiWorkerMirroredStrategy" now="the loop by hand; or TF_USE_LEGACY_KERAS=1 and tf-keras" since="Keras 3, TensorFlow 2.16"
# NBVAL_CHECK_OUTPUT
then = launch(fit_of_keras_3, 2, framework="tensorflow")[0]
print("Keras 3:", then)
(package, first), (_, second) = launch(fit_of_tf_keras, 2, framework="tensorflow")
print(f"{package}: epochs: {len(first)}, the loss falls: {first[1] < first[0]}")
print("both workers return the same loss:", first == second)
assert "ValueError" in then and package == "tf_keras" and first == second

# %% [markdown]
# ## On real machines
#
# What changes when the workers are machines:
#
# - **Addresses.** Each machine must be reached by all others under the name in TF_CONFIG. `localhost` means another machine on each.
# - **Firewalls.** The port of each worker must be open to the others. Until it is, all wait in the strategy's first line.
# - **One worker a machine** is usual: it takes all GPUs of its machine, each is a replica. With several workers on one machine, each needs a port and `CUDA_VISIBLE_DEVICES` of its own.
# - **NCCL** carries messages between GPUs; of [its variables](https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html) `NCCL_DEBUG=INFO` shows what it chose, and `NCCL_SOCKET_IFNAME` chooses the network.
# - **Data and checkpoints** lie where all can read them. The code and its versions are the same everywhere.
# - **Restarts.** One dead worker ends all, so whatever started them must start all again. The Slurm job below does so, up to three times; after an error of the ssh script you do. (When the job's time is over, Slurm ends the script too: submit it again. It goes on from the checkpoint.)
#
# Three files do it; take what you need and skip the rest. The first writes TF_CONFIG on each machine, and then becomes the program. The second is a job for **Slurm**, which shares out the machines of many clusters: it asks for the machines, starts the first file on each, and puts itself into the queue again if that fails. The third needs nothing but ssh: it starts the first file on each host, and waits for all. (Over ssh `python` is the one that the login finds: give the path of your environment's.)

# %%
WITH_TF_CONFIG = """\
# HOSTS="node1 node2" PORT=2222 INDEX=1 python with_tf_config.py python train.py
import json, os, sys

env = os.environ
addresses = [f"{host}:{env['PORT']}" for host in env["HOSTS"].split()]
task = {"type": "worker", "index": int(env.get("INDEX") or env["SLURM_PROCID"])}
env["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
os.execvp(sys.argv[1], sys.argv[1:])
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
export HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 python with_tf_config.py "$@" && exit
[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ] && scontrol requeue "$SLURM_JOB_ID"  # from the checkpoint
"""
SSH = r"""#!/bin/bash
# HOSTS="node1 node2" bash start.sh python train.py /shared/checkpoints 10000 -1
# in a folder that has the same path on every machine
set -euo pipefail
PORT=${PORT:-2222} index=0 workers=()
command=$(printf '%q ' python with_tf_config.py "$@")
for host in $HOSTS; do
    there="cd '$PWD' && HOSTS='$HOSTS' PORT=$PORT INDEX=$index $command"
    ssh -tt "$host" "$there" </dev/null >"worker$index.log" 2>&1 &
    workers+=($!)
    index=$((index + 1))
done
trap 'kill "${workers[@]}" 2>/dev/null' INT TERM
failed=0
for worker in "${workers[@]}"; do wait "$worker" || failed=1; done
exit $failed
"""
scripts = {"with_tf_config.py": WITH_TF_CONFIG, "job.slurm": SLURM, "start.sh": SSH}
for name, text in scripts.items():
    (scratch / name).write_text(text)

# %% [markdown]
# This machine has neither Slurm nor a second machine. So the next cell runs the scripts with stand-ins: a `python` that is the one of this notebook, an `ssh` that runs its command here, an `srun` that runs it twice, a `scontrol` that says what it was asked. In place of training, the program prints its TF_CONFIG; then it fails.

# %%
# NBVAL_CHECK_OUTPUT
STAND_INS = {
    "python": f'exec {shlex.quote(sys.executable)} "$@"',
    "ssh": 'exec bash -c "$3"',  # without -tt and the host
    "srun": 'shift; for i in 0 1; do SLURM_PROCID=$i "$@" || exit; done',
    "scontrol": r"""[ $1 = show ] && printf 'node1\nnode2\n' || echo "scontrol $@" """,
}
for name, line in STAND_INS.items():
    (scratch / name).write_text(f"#!/bin/bash\n{line}\n")
    (scratch / name).chmod(0o755)
env = {**os.environ, "PATH": f"{scratch}{os.pathsep}{os.environ['PATH']}", "HOSTS": "node1 node2"}
env |= {"SLURM_JOB_ID": "22222", "SLURM_JOB_NODELIST": "node[1-2]"}
for name in ("PORT", "INDEX"):
    env.pop(name, None)


def bash(*arguments, **more):
    """What it printed, line by line, and its exit code."""
    done = subprocess.run(
        ["bash", *arguments], cwd=scratch, env=env | more, capture_output=True, text=True
    )
    return done.stdout.splitlines(), done.returncode


tell = ["python", "-c", "import os; print(os.environ['TF_CONFIG'])"]
by_slurm, by_slurm_code = bash("job.slurm", *tell)
_, by_ssh_code = bash("start.sh", *tell)
by_ssh = [(scratch / f"worker{index}.log").read_text().strip() for index in range(2)]
print(*by_slurm, *by_ssh, sep="\n")
assert by_slurm == [tf_config(["node1:22222", "node2:22222"], index) for index in range(2)]
assert by_ssh == [tf_config(["node1:2222", "node2:2222"], index) for index in range(2)]
assert by_slurm_code == by_ssh_code == 0
for restarts in ("0", "3"):
    asked, code = bash("job.slurm", "false", SLURM_RESTART_COUNT=restarts)
    print(f"Slurm, the program fails after {restarts} restarts: {asked}, exit code {code}")
print("ssh, the program fails: exit code", bash("start.sh", "false")[1])

# %% [markdown]
# **What this machine cannot show:** a network between machines, NCCL, and GPUs as replicas. Results on real GPUs: **not measured** yet. Messages inside one machine cost other times than messages between two, so measure there before you decide on a batch size or on `bytes_per_pack`.

# %% [markdown]
# ## A dictionary: TensorFlow and PyTorch
#
# For readers who know one of the two, from here or from [lesson 04](04_ddp_from_scratch.ipynb) and [lesson 05](05_ddp_in_practice.ipynb). **DDP** is PyTorch's `DistributedDataParallel`; gloo and NCCL carry its messages. One model, both libraries, two processes each: the same initial weights, the same batches, the same gradients. The cell below the table proves it. A dash means that there is nothing alike.
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
# | `bytes_per_pack` | `bucket_cap_mb` | default: one pack; [25 MiB](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html) |
# | `timeout_seconds` | `init_process_group(timeout=…)` | by default none; [10 minutes for NCCL, 30 otherwise](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group) |
# | data set batched by the *global* batch, `experimental_distribute_dataset` | `DataLoader` batched by a *rank's* batch | |
# | `AutoShardPolicy.DATA` | `DistributedSampler` | an uneven end: empty or smaller shares; [padded with repeats](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler) |
# | `AutoShardPolicy.FILE` | – | by hand: `files[rank::world_size]` |
# | `compute_average_loss(losses, global_batch_size=…)` | `losses.sum() / global_batch * world_size`; with equal shares `losses.mean()` | TensorFlow sums gradients, DDP averages them |
# | `optimizer.apply(gradients, variables)` sends | `loss.backward()` sends | DDP [sends while it still computes](https://docs.pytorch.org/docs/stable/notes/ddp.html) |
# | `ParameterServerStrategy` | by hand, on `torch.distributed.rpc` | |
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
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

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
# The tolerance is not 0, because the two libraries add in different orders, in float32. (Worker 0 takes the first half of a global batch, rank 0 every second sample of it. The mean over the batch does not care.)
#
# ## Exercise
#
# [Exercise 12](../exercises/12_multi_worker.ipynb): write TF_CONFIG for any cluster, decide who saves what where, and choose a shard policy. About 40 minutes.
#
# ## Recap
#
# Workers are equal processes that know each other's addresses from TF_CONFIG, and add up their gradients in every step. All must do the same things in the same order: make the strategy first, take a share of every batch, call save. When one dies all end, and go on together from the newest checkpoint.
#
# 1. Worker 1 hangs, and its log is empty. Or it ends, and its log says "connection closed". Where do you look?
# 2. Three workers, a global batch of 96, a loss of shape [32] on each. By what does `compute_average_loss` divide, and why not by 32?
# 3. Your data are 10 files of equal size, you have 4 workers. What speaks against FILE?
#
# <details><summary>Answers</summary>
#
# 1. In the logs of the others: one may have failed or ended, wait in another all-reduce, or be unreachable behind a firewall.
# 2. By 96: the gradients of the three are *added*. Divided by 32 each, the sum would be three times the mean.
# 3. The shares are 3, 3, 2 and 2 files. In the last third of the epoch two workers have nothing left, and only half of the machines train.
#
# </details>
#
# Go on with [exercise 12](../exercises/12_multi_worker.ipynb).
