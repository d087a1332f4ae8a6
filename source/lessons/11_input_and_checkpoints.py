# ---
# jupyter:
#   course:
#     rows: [K4, K5]
#     minutes: {read: 30, do: 20}
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
# # Input and checkpoints: keep the devices fed, and lose nothing
#
# After this lesson you can put the steps of an input pipeline in an order that is right and fast, share the data out so that each sample counts once, and go on after a `kill -9` at the epoch where it struck.
#
# | | |
# |---|---|
# | **Time** | 30 minutes to read, 20 to do; the exercise comes on top |
# | **You should know** | `launch` ([lesson 00](00_start_here.ipynb)); `fit` and `compile` in Keras |
# | **You will** | measure seven orders of the same pipeline · see which step is busy when · find the cache that freezes the augmentation · count samples under four sharding policies · kill a training and go on in three ways · pass over a torn checkpoint |
# | **Runs on** | no GPU, or one: this process, and two pinned cores · two GPUs or more: the same; TensorFlow sees them in its GPU environment (`make lab-tf-gpu`), and the multi-GPU path was not run by the authors |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1 |
#
# If you have not done [lesson 10](10_mirrored_strategy.ipynb), two reminders: a **replica** is a copy of the model on one device, and each step feeds every replica its part of the **global batch**; a **mirrored variable** has one copy on each device, and all copies stay equal.

# %%
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

# TensorFlow's notices of its own housekeeping would hide what the lesson prints.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import MNIST_NOTE, mnist, photo_patches
from course_utils.devices import census, slots
from course_utils.launch import RankError, launch
from course_utils.timing import compare

plots.use_style()

# %%
print(census())
assert len(slots(2, framework="tensorflow")) == 2, "this lesson runs on two devices"

for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
cpu = tf.config.list_physical_devices("CPU")[0]
if not tf.config.get_logical_device_configuration(cpu):
    two = [tf.config.LogicalDeviceConfiguration(), tf.config.LogicalDeviceConfiguration()]
    tf.config.set_logical_device_configuration(cpu, two)
# One thread for the arithmetic of an operation: the training takes one core, and leaves the
# others to the input. On a GPU the training would take none.
tf.config.threading.set_intra_op_parallelism_threads(1)

# %% [markdown]
# Two logical CPU devices, as in lesson 10: they stand for two devices where only the counting matters. Where processes matter, `launch` starts real ones.
#
# # Part 1: the input pipeline
#
# An **input pipeline** makes batches of files: it reads, decodes, changes at random (**augmentation**), shuffles, batches. In `tf.data` each step is a method that takes a data set and returns a new one. Nothing is computed until somebody iterates.
#
# ## From scratch: eight numbers, four orders
#
# `shuffle(n)` keeps a buffer of n elements and draws from it. `batch(4)` makes one element of four. `cache()` keeps what came through in the first pass over the data, and hands out the same in every later one. Each is harmless alone.
#
# **Predict.** Two epochs of each: in which orders do 0 and 1 always share a batch? In which are both epochs the same?


# %%
# NBVAL_CHECK_OUTPUT
def two_epochs(data):
    return [[batch.tolist() for batch in data.as_numpy_iterator()] for _ in range(2)]


eight = tf.data.Dataset.range(8)
orders = {
    "shuffle(8), batch(4)": eight.shuffle(8, seed=5).batch(4),
    "batch(4), shuffle(2)": eight.batch(4).shuffle(2, seed=5),
    "shuffle(8), cache, batch(4)": eight.shuffle(8, seed=5).cache().batch(4),
    "cache, shuffle(8), batch(4)": eight.cache().shuffle(8, seed=5).batch(4),
}
for name, data in orders.items():
    first, second = two_epochs(data)
    tied = all({0, 1, 2, 3} in map(set, epoch) for epoch in (first, second))
    print(f"{name:28} first epoch {first}")
    print(f"{'':28} neighbours tied: {tied}, second epoch the same: {first == second}")

# %% [markdown]
# Shuffled batches are always the same batches. And a cache *after* the shuffle has frozen its order: you believe that you shuffle in every epoch, and you train on one order for ever. No error tells you. Shuffle single elements, and after the cache.
#
# The size of the buffer is the third trap: an element can come out only when it has come in. With a buffer of n the first batch of b holds nothing but the first n + b − 1 elements. Files often lie sorted, so a small buffer gives batches of a single class.
#
# ## Real work: JPEG files
#
# Now real photographs: patches of 300 × 300 pixels, written as JPEG files, in the order of the patches. The task is the one of lesson 10: was this picture turned upside down? The pipeline turns half of them itself and so knows the label.

# %%
# NBVAL_CHECK_OUTPUT
FILES, BATCH = 64, 16
temporary = tempfile.TemporaryDirectory(prefix="lesson11-")  # goes when the program ends
work = Path(temporary.name)
patches, _ = photo_patches(size=300, stride=40, limit=FILES)
(work / "jpeg").mkdir()
for number, patch in enumerate(patches):
    tf.io.write_file(str(work / "jpeg" / f"{number:03d}.jpg"), tf.io.encode_jpeg(patch, quality=95))

on_disk = sum(path.stat().st_size for path in (work / "jpeg").iterdir())
print(f"{FILES} files, decoded {patches.nbytes / 2**20:.1f} MiB")
print("decoded they take more than three times as much:", patches.nbytes > 3 * on_disk)

# %% [markdown]
# Two functions do the work, and each of them notes when it began and when it ended: `tf.timestamp()` reads the clock inside the pipeline, and the two times travel on with the picture. TensorFlow runs steps in any order that their inputs allow, so `control_dependencies` has to say: read the clock *after* this. (A Python function, called by [`tf.py_function`](https://www.tensorflow.org/api_docs/python/tf/py_function), could record as well. But Python runs one thread at a time, so parallel steps would wait for each other to write down when they began.)


# %%
RECORD = True


def clock(after):
    if not RECORD:  # decided when the pipeline is built
        return tf.constant(0.0, tf.float64)
    with tf.control_dependencies([after]):
        return tf.timestamp()


def decode(path):
    start = clock(after=path)
    with tf.control_dependencies([start]):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
    return {"image": image, "decode": tf.stack([start, clock(after=image)])}


def augment(sample):
    start = clock(after=sample["image"])
    with tf.control_dependencies([start]):
        image = tf.image.random_crop(sample["image"], [256, 256, 3])
    image = tf.image.random_flip_left_right(tf.cast(image, tf.float32) / 255)
    image = tf.image.random_brightness(image, 0.2)
    image = tf.image.random_contrast(image, 0.8, 1.2)
    image = tf.image.resize(image, [96, 96])
    turned = tf.random.uniform([]) < 0.5
    image = tf.where(turned, image[::-1, ::-1], image)
    return {
        **sample,
        "image": image,
        "turned": tf.cast(turned, tf.float32)[None],
        "augment": tf.stack([start, clock(after=image)]),
    }


# %%
def small_cnn():
    layers = keras.layers
    stack = [keras.Input((96, 96, 3)), layers.Conv2D(16, 5, strides=3, activation="relu")]
    stack += [layers.Conv2D(32, 3, strides=2, activation="relu"), layers.Flatten()]
    return keras.Sequential([*stack, layers.Dense(1)])


model, adam = small_cnn(), keras.optimizers.Adam(1e-3)
adam.build(model.trainable_variables)


@tf.function
def train_step(image, turned):
    with tf.GradientTape() as tape:
        logits = model(image, training=True)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(turned, logits))
    gradients = tape.gradient(loss, model.trainable_variables)
    adam.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def epoch(data):
    """Train a small network on every batch; return when each picture and each step was at work."""
    spans = {"decode": [], "augment": [], "train": []}
    for batch in data:
        start = time.time()
        train_step(batch["image"], batch["turned"]).numpy()  # a number: waits also for a GPU
        spans["train"].append([start, time.time()])
        for stage in ("decode", "augment"):
            spans[stage].extend(batch[stage].numpy())
    return {stage: np.array(times) for stage, times in spans.items()}


files = tf.data.Dataset.list_files(str(work / "jpeg" / "*.jpg"), shuffle=False)
batches = files.map(decode).map(augment).batch(BATCH)
epoch(batches)  # the first pass compiles, and does not count
alone = {stage: np.diff(times).sum() for stage, times in epoch(batches).items()}
for stage, seconds in alone.items():
    print(f"{stage:8} {1000 * seconds / FILES:6.2f} ms for a picture")

# %% [markdown]
# ## Seven orders, measured
#
# The serial pipeline does one thing after the other: decode, augment, train. Three tools change that.
#
# - `map(..., num_parallel_calls=AUTOTUNE)` works on several pictures at a time.
# - `prefetch(AUTOTUNE)` prepares the next batches while you train on this one.
# - `cache()` keeps what has been computed. It is in memory, or in a file if you name one.
#
# **Predict.** From the three numbers above: how long does a picture take in the serial order? And at best, when the input works beside the training? Which of the caches below is the fastest, and which one is wrong?

# %%
AUTO = tf.data.AUTOTUNE


def ahead(function):
    return {"map_func": function, "num_parallel_calls": AUTO}


def as_written(data):
    """Without what `tf.data` rewrites on its own, such as a prefetch that it adds."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return data.with_options(options)


mixed = files.shuffle(FILES)
serial = mixed.map(decode).map(augment).batch(BATCH)
parallel = mixed.map(**ahead(decode)).map(**ahead(augment))
once, once_in_file = (files.map(**ahead(decode)).cache(name) for name in ("", str(work / "cache")))
pipelines = {
    "serial": as_written(serial),
    "prefetch too early": as_written(mixed.prefetch(AUTO).map(decode).map(augment).batch(BATCH)),
    "prefetch last": as_written(serial.prefetch(AUTO)),
    "and parallel maps": parallel.batch(BATCH).prefetch(AUTO),
    "and cache after decode": once.shuffle(FILES).map(**ahead(augment)).batch(BATCH).prefetch(AUTO),
    "cache in a file": once_in_file.shuffle(FILES).map(**ahead(augment)).batch(BATCH).prefetch(AUTO),
    "cache after augment": files.map(**ahead(decode)).map(**ahead(augment)).cache().shuffle(FILES)
    .batch(BATCH).prefetch(AUTO),
    "serial, unasked prefetch": serial,
}  # fmt: skip
RECORD = False
pipelines["serial, no clocks"] = as_written(mixed.map(decode).map(augment).batch(BATCH))
RECORD = True
result = compare({name: lambda d=data: epoch(d) for name, data in pipelines.items()}, repeat=3)
print(f"{'':24}{'pictures/s':>11}  {'middle half':>11}  {'time ÷ serial':>14}")
for name in pipelines:
    speeds = sorted(FILES / seconds for seconds in result[name].runs)
    share = result.ratio(name, "serial").median
    low, high = FILES / result[name].high, FILES / result[name].low
    print(f"{name:24}{np.median(speeds):11.0f}  {f'{low:.0f}–{high:.0f}':>11}  {share:13.2f}×")

cached = {"in memory, after decode": FILES * 300 * 300 * 3}  # one byte a value
cached["in a file, after decode"] = sum(path.stat().st_size for path in work.glob("cache*"))
cached["in memory, after augment"] = FILES * 96 * 96 * 3 * 4  # float32
sizes = [f"{where} {size / 2**20:.1f} MiB" for where, size in cached.items()]
print(f"The JPEG files have {on_disk / 2**20:.1f} MiB. Cached:", ", ".join(sizes))

# %% [markdown]
# The orders took turns, each went through the data once before it counted (so the caches are full), and the table shows medians. Read it in three steps.
#
# - **Prefetch** belongs last. Then input and training can overlap, and the longer one decides instead of the sum. In front of the maps it prepares names of files, which is no work.
# - **Parallel maps** help as far as there are free cores. On two cores the training already takes one. On a machine with many, look here for the largest gain.
# - **A cache** saves the decoding from the second epoch on. Whether it shows in the time depends on which side decides: where the training is the longer one, a faster input changes nothing.
#
# All of this needs a free core. If the census above says one core, or other programs are at work, the lines lie close together, and the middle halves overlap: then the table has not decided, and the next figure says more.
#
# *Cache after augment* is fast because it does least, and it is wrong: you will see why below. *Unasked prefetch* is the serial order again, as TensorFlow runs it when you set no option: [it rewrites your pipeline](https://www.tensorflow.org/api_docs/python/tf/data/experimental/OptimizationOptions), and among other things adds a prefetch at the end where you forgot it. To show the orders as they are written, the three lines at the top run without this help. The last line is the serial order without the two clocks, so that you know what the recording costs. Where that line is not clearly faster, the clocks cost less than the noise of your machine.
#
# ## Which step is busy when
#
# A timeline says more than a number. Each bar is one picture in decoding or augmentation, or one training step.


# %%
def timeline(ax, data):
    """Draw one epoch; return the share of its time in which the training was at work."""
    begin = time.time()
    spans = epoch(data)
    length = time.time() - begin
    for row, times in enumerate(spans.values()):
        fresh = times[times[:, 0] >= begin]  # a cached picture carries the times of its epoch
        bars = [(1000 * (a - begin), 1000 * (b - a)) for a, b in fresh]
        ax.broken_barh(bars, (row - 0.4, 0.8), color=plots.COLOURS[row], alpha=0.6)
    ax.set(yticks=range(3), yticklabels=spans, ylim=(2.6, -0.6))
    ax.grid(axis="y", visible=False)
    return np.diff(spans["train"]).sum() / length, 1000 * length


shown = [name for name in list(pipelines)[:7] if name != "cache in a file"]
fig, axes = plt.subplots(3, 2, figsize=(9.5, 6.5), sharex=True, sharey=True)
busy = {}
for ax, name in zip(axes.flat, shown, strict=True):
    busy[name], length = timeline(ax, pipelines[name])
    ax.set_title(f"{name}: trains {100 * busy[name]:.0f} % of {length:.0f} ms", fontsize=11)
for ax in axes[-1]:
    ax.set_xlabel("time since the epoch began (ms)")
    ax.set_xlim(left=0)
for ax in axes[:, 0]:
    ax.set_ylabel("stage")
fig.suptitle(
    f"The device trains {100 * busy['serial']:.0f} % of the time in the serial order,\n"
    f"{100 * busy['and cache after decode']:.0f} % with prefetch, parallel maps and a cache"
)
shares = " ".join(f"{name}: {100 * share:.0f} percent." for name, share in busy.items())
plots.show(
    fig,
    name="pipeline-timeline",
    alt="Timelines of one epoch in six orders, with rows for decode, augment and train. "
    f"Share of the time in which the device trains: {shares}",
)
for name, share in busy.items():
    print(f"{name:24} the device trains {100 * share:3.0f} % of the epoch")

# %% [markdown]
# In the serial order the rows take turns: while the device trains nobody decodes, and while pictures are made the device idles. With prefetch last, pictures are made *while* it trains. Overlapping bars of one row are parallel calls. Behind a cache a row is empty. (The gap at the start of each epoch is `tf.data` setting up a new pass; in an epoch of hours it is nothing.) If your own training is slow, look for gaps in the row `train` first. No second device helps where the first one waits for its input.
#
# ## Cache before or after the augmentation
#
# **Predict.** One picture, three epochs. How many different versions of it does the training see in each order?


# %%
# NBVAL_CHECK_OUTPUT
def versions(data, epochs=3):
    return len({next(iter(data))["image"].numpy().tobytes() for _ in range(epochs)})


picture = files.take(1)
print("cache, then augment:", versions(picture.map(decode).cache().map(augment)))
print("augment, then cache:", versions(picture.map(decode).map(augment).cache()))

tf.random.set_seed(0)  # as everybody does for repeatable results
print("cache, then augment, with a seed:", versions(picture.map(decode).cache().map(augment)))


def brighter(sample, seed):
    return {"image": tf.image.stateless_random_brightness(sample["image"], 0.2, seed)}


seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(2)
data = tf.data.Dataset.zip(picture.map(decode).cache(), seeds).map(brighter)
print("cache, then augment, with seeds that come as data:", versions(data))

# %% [markdown]
# The third line is a trap of its own: with a global seed, the random operations inside a `map` begin anew in every epoch, with the same numbers. Each picture is then turned and cut in the same way for ever, cache or no cache. The cure is the fourth line: seeds that come as data, new ones in each epoch, and operations with `stateless` in their name, which take them.
#
# The line between *once* and *in each epoch* is the place of the cache. Before it: what is expensive and always the same. After it: everything random. A cache in memory holds decoded pictures, several times the size of the files; if that does not fit, name a file. Reading decoded values from a file saves the decoding but reads more bytes, so it pays only where decoding is slower than reading: your table has both lines. (A file cache outlives the program. Delete it when the step before it changes, or you train on yesterday's pictures.)
#
# ## Batch by the global size
#
# Under a strategy `batch` takes the **global batch**: the strategy splits each batch over the replicas.
#
# **Predict.** You want 16 pictures on each of two replicas and write `batch(16)`. How many does each get, and how many steps has an epoch of 64?

# %%
# NBVAL_CHECK_OUTPUT
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
for size in (16, 16 * strategy.num_replicas_in_sync):
    steps = list(strategy.experimental_distribute_dataset(tf.data.Dataset.range(FILES).batch(size)))
    local = [len(part) for part in strategy.experimental_local_results(steps[0])]
    print(f"batch({size}): {len(steps)} steps, each replica gets {local} pictures")

# %% [markdown]
# ## Sharding: each sample once
#
# With several processes each worker has an input pipeline of its own, made by the same code. Who reads what? The **auto-shard policy** of the data set decides. To see it you need two real workers, and records that can be counted: three files with eight records each, and every record is its own number. Each worker counts what it *decodes* and lists what it *trains on*.


# %%
def write_records(count_of_files):
    folder = work / f"records-{count_of_files}"
    folder.mkdir(exist_ok=True)
    for file in range(count_of_files):
        with tf.io.TFRecordWriter(str(folder / f"{file}.tfrecord")) as writer:
            for record in range(8):
                writer.write(str(8 * file + record).encode())
    return sorted(map(str, folder.glob("*.tfrecord")))


def one_epoch(strategy, records, policy, shuffled=False):
    """On each worker: how many records it decoded, and which ones it trained on."""
    decoded = []

    def count(record):
        decoded.append(record)
        return np.int64(record)

    def decode_record(record):
        return tf.ensure_shape(tf.numpy_function(count, [record], tf.int64), [])

    data = records.map(decode_record)
    data = data.shuffle(64) if shuffled else data
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    trained = []
    for batch in strategy.experimental_distribute_dataset(data.batch(8).with_options(options)):
        trained += [int(v) for v in strategy.experimental_local_results(batch)[0]]
    return len(decoded), trained


Policy = tf.data.experimental.AutoShardPolicy
three_files, one_file = write_records(3), write_records(1)


def shard_report():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    records = tf.data.TFRecordDataset(three_files)
    policies = (Policy.FILE, Policy.DATA, Policy.OFF)
    report = {policy.name: one_epoch(strategy, records, policy) for policy in policies}
    report["DATA, shuffled"] = one_epoch(strategy, records, Policy.DATA, shuffled=True)
    listed = tf.data.Dataset.from_tensor_slices([str(number) for number in range(24)])
    report["AUTO, a list"] = one_epoch(strategy, listed, Policy.AUTO)
    return report


def two_workers(fn, *args):
    return launch(fn, 2, *args, framework="tensorflow", roles={"worker": 2}, timeout=90)


# %% [markdown]
# The whole program is the same on both workers; `TF_CONFIG` tells each who it is. From a shell that is `TF_CONFIG='{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}' python train.py`, with index 1 on the other machine.
#
# **Predict.** Twenty-four records in three files, two workers. Under FILE, DATA and OFF: how many does each worker decode, and how many does each train on?

# %%
# NBVAL_CHECK_OUTPUT
reports = two_workers(shard_report)
for policy in reports[0]:
    decoded, trained = zip(*(report[policy] for report in reports), strict=True)
    once = sorted(trained[0] + trained[1]) == list(range(24))
    sizes = [len(numbers) for numbers in trained]
    print(f"{policy:15} decoded {decoded}, trained on {sizes}, each record once: {once}")

# %% [markdown]
# - **FILE** gives out whole files. Each is decoded once, but three files over two workers are two and one: unequal work, and the worker with less waits. With fewer files than workers it is an error, as the next cell shows.
# - **DATA** lets every worker decode everything and throw away what is the other's: each sample once, the decoding twice.
# - **OFF** leaves everything to everybody: each sample counts twice in an epoch.
# - **DATA, shuffled** is the trap. Each worker shuffles in an order of its own and then takes every second element of *its* order. Some records come twice, others never. The [documentation](https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy) says that the order must be the same on all workers: give `shuffle` a seed, or shard before you shuffle.
#
# AUTO, the default, takes FILE where the data set reads record files, and DATA for anything else, such as a list. It does **not** go back to DATA when there are too few files:


# %%
# NBVAL_CHECK_OUTPUT
def share_one_file(policy):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return one_epoch(strategy, tf.data.TFRecordDataset(one_file), policy)


for policy in (Policy.FILE, Policy.AUTO):
    try:
        two_workers(share_one_file, policy)
    except RankError as error:
        print(f"{policy.name}: {error.type_name},", error.message.split("}} ")[1].split(". ")[0])
    else:
        raise AssertionError("one file was shared out between two workers")

# %% [markdown]
# With few large files, or with pictures named in a list, write it yourself: `shard` first, then shuffle and decode only your own.


# %%
# NBVAL_CHECK_OUTPUT
def shard_by_hand():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    decoded = []

    def count(number):
        decoded.append(number)
        return number

    def decode_mine(number):
        return tf.numpy_function(count, [number], tf.int64)

    def my_input(context):
        data = tf.data.Dataset.range(24)
        data = data.shard(context.num_input_pipelines, context.input_pipeline_id)  # first
        data = data.shuffle(24).map(decode_mine)
        return data.batch(context.get_per_replica_batch_size(8))

    batches = strategy.distribute_datasets_from_function(my_input)
    trained = [strategy.experimental_local_results(batch)[0].numpy() for batch in batches]
    return len(decoded), np.concatenate(trained).tolist()


(first, mine), (second, yours) = two_workers(shard_by_hand)
print("decoded", (first, second), "| each once:", sorted(mine + yours) == list(range(24)))
assert sorted(mine + yours) == list(range(24))

# %% [markdown]
# # Part 2: go on after a kill
#
# Long trainings are killed: memory runs out, a machine is needed elsewhere, a power plug is pulled. A **checkpoint** is a file from which training can go on. The [Keras guide](https://keras.io/guides/distributed_training_with_tensorflow/) saves one in every epoch with `ModelCheckpoint`, and at the start loads the newest one in the folder. It says that calling the same function again resumes where it left off. Test it.
#
# The training runs in a process of its own on a pinned core, and it really is killed, in the middle of the third epoch: signal 9 cannot be caught, nothing is tidied up. `way` says how it goes on when it is started again. Both callbacks save in the same run, so that all ways start from the same crash. *Noisy* means: with shuffling and dropout. A run without a break is there to compare with.

# %%
EPOCHS, STEPS = 5, 20  # 1,000 digits in batches of 50


def digits_model(noisy=False):
    keras.utils.set_random_seed(0)  # every start begins with the same weights
    stack = [keras.Input((784,)), keras.layers.Dense(64, activation="relu")]
    stack += [keras.layers.Dropout(0.3)] if noisy else []
    model = keras.Sequential([*stack, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model


class KillMyself(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 9):  # counted from 0: in the middle of the third epoch
            os.kill(os.getpid(), 9)


def train(folder, way=None, noisy=False, killed=False):
    (x, y), _ = mnist()
    x, y = x[: 50 * STEPS].reshape(-1, 784) / np.float32(255), y[: 50 * STEPS]
    model, first = digits_model(noisy), 0
    checkpoints = Path(folder) / "ckpt"
    if way == "guide":
        model = keras.models.load_model(max(checkpoints.iterdir(), key=os.path.getctime))
    if way == "initial_epoch":  # ckpt-2.keras: two epochs are done
        first = max(int(path.stem.split("-")[1]) for path in checkpoints.iterdir())
        model = keras.models.load_model(checkpoints / f"ckpt-{first}.keras")
    callbacks = [keras.callbacks.ModelCheckpoint(checkpoints / "ckpt-{epoch}.keras")]
    if way in (None, "backup"):
        callbacks.append(keras.callbacks.BackupAndRestore(Path(folder) / "backup"))
    callbacks += [KillMyself()] if killed else []
    data = tf.data.Dataset.from_tensor_slices((x, y))
    data = (data.shuffle(len(x)) if noisy else data).batch(50)
    history = model.fit(
        data, epochs=EPOCHS, initial_epoch=first, callbacks=callbacks, shuffle=False, verbose=0
    )  # fit's own shuffle is for arrays
    return {
        "epochs": [epoch + 1 for epoch in history.epoch],
        "losses": history.history["loss"],
        "updates": int(model.optimizer.iterations),
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
    }


def run(*jobs):
    """Train each job on a core of its own, at the same time."""

    def mine():
        return train(**jobs[int(os.environ["RANK"])])

    return launch(mine, len(jobs), framework="tensorflow", timeout=90)


# %%
# NBVAL_CHECK_OUTPUT
whole, whole_noisy = run(
    {"folder": work / "whole"}, {"folder": work / "whole-noisy", "noisy": True}
)
for noisy in (False, True):
    folder = work / f"killed-{noisy}"
    try:
        run({"folder": folder, "noisy": noisy, "killed": True})
    except RankError as error:
        print("ended by", error.type_name, "| on the disk:", end=" ")
        backup = json.loads((folder / "backup" / "training_metadata.json").read_text())
        print(sorted(p.name for p in (folder / "ckpt").iterdir()), "and a backup:", backup)
    else:
        raise AssertionError("the training survived signal 9")
assert len(whole["epochs"]) == EPOCHS and whole["updates"] == EPOCHS * STEPS

# %% [markdown]
# Two checkpoints by `ModelCheckpoint`, of epochs 1 and 2; and the backup, which holds the weights, the optimizer and the number of complete epochs. The half epoch is lost in any case.
#
# ## The guide's way, and `initial_epoch`
#
# **Predict.** `fit(epochs=5)` is called again. Which epochs does it train in the guide's way, and how many updates have the weights seen in the end? (A run without a break makes 5 × 20.)

# %%
# NBVAL_CHECK_OUTPUT
for way in ("initial_epoch", "backup"):
    shutil.copytree(work / "killed-False", work / way)
guide, counted = run(
    {"folder": work / "killed-False", "way": "guide"},
    {"folder": work / "initial_epoch", "way": "initial_epoch"},
)
for name, one_run in {"no break": whole, "guide": guide, "initial_epoch": counted}.items():
    print(f"{name:14} trained epochs {one_run['epochs']}, updates in all: {one_run['updates']}")
same = np.isclose(guide["losses"][0], whole["losses"][2])
print("what the guide's way calls epoch 1 has the loss of epoch 3 without a break:", same)

# %% [markdown]
# The weights went on: what it calls epoch 1 is the third epoch of the weights. But **the epochs restarted**: seven in all, the checkpoints of epochs 1 and 2 overwritten, and every schedule that counts epochs began anew. The claim is half true. `initial_epoch`, read from the file's name, mends it. (And `epochs` is the number of the last epoch, not how many more to train.)
#
# ## BackupAndRestore
#
# `BackupAndRestore` does this by itself: one backup, overwritten in every epoch, deleted when `fit` is done. The model must be built before `fit`, which an `Input` layer does.
#
# **Predict.** Both runs go on in the third epoch. Whose losses equal those of the run without a break: plain, noisy, or both?

# %%
# NBVAL_CHECK_OUTPUT
back, back_noisy = run(
    {"folder": work / "backup", "way": "backup"},
    {"folder": work / "killed-True", "way": "backup", "noisy": True},
)
for name, resumed, unbroken in [
    ("initial_epoch, plain", counted, whole),
    ("BackupAndRestore, plain", back, whole),
    ("BackupAndRestore, noisy", back_noisy, whole_noisy),
]:
    difference = np.abs(resumed["weights"] - unbroken["weights"]).max()
    print(f"{name:24} epochs {resumed['epochs']}, updates {resumed['updates']}, ", end="")
    print(f"weights as without a break (within 1e-6): {difference < 1e-6}")
assert np.abs(back["weights"] - whole["weights"]).max() < 1e-6

# %%
panels = [("plain", whole, back), ("noisy", whole_noisy, back_noisy)]
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
left.plot(whole["epochs"], whole["losses"], label="without a break")
left.plot(back["epochs"], back["losses"], label="BackupAndRestore")
left.plot([2 + e for e in guide["epochs"]], guide["losses"], label="the guide's way")
left.axvline(2.5, color="black", linestyle=":", marker="")
left.text(2.6, whole["losses"][0], "killed", va="top")
left.set(xlabel="epochs that the weights have seen", ylabel="training loss", xticks=range(1, 8))
left.set_title("plain: all losses", fontsize=11)
gaps = {}
for name, unbroken, resumed in panels:
    gaps[name] = np.array(resumed["losses"]) - np.array(unbroken["losses"][2:])
    right.plot(resumed["epochs"], gaps[name], label=name)
right.set(xlabel="epoch", ylabel="loss minus loss without a break", xticks=back["epochs"])
right.set_title("BackupAndRestore: what it missed by", fontsize=11)
left.legend(), right.legend()
largest = {name: np.abs(gap).max() for name, gap in gaps.items()}
fig.suptitle(
    f"Resumed, the plain run misses the unbroken one by {largest['plain']:.1g} at most,\n"
    f"the run with shuffling and dropout by {largest['noisy']:.1g}"
)
plots.show(
    fig,
    name="resumed-runs",
    alt="Left: training loss without a break, resumed by BackupAndRestore, and the guide's way, "
    "which goes on to epoch 7. Right: how far the resumed runs are from the unbroken ones, "
    f"at most {largest['plain']:.1g} plain and {largest['noisy']:.1g} with shuffling and dropout.",
)
for title, unbroken, resumed in panels:
    for name, one_run in {"without a break": unbroken, "resumed": resumed}.items():
        losses = zip(one_run["epochs"], one_run["losses"], strict=True)
        print(f"{title}, {name}:", "  ".join(f"epoch {e} {loss:.4f}" for e, loss in losses))
print(MNIST_NOTE)

# %% [markdown]
# Plain: bit for bit the same on a core, because the same arithmetic is done in the same order; the tolerance is for a GPU, which may add up in another order. Noisy: as good a training, but another one. The backup holds weights, optimizer and epoch, not the state of the random numbers. The next cell looks at the order alone, on eight numbers.
#
# **Predict.** A program sets a seed, trains two epochs, is killed, and starts again with the same seed. Is its third order new? And what if the shuffling is `fit`'s own?


# %%
# NBVAL_CHECK_OUTPUT
class OrderOnly(keras.Model):
    """A model that learns nothing and writes down in which order its data comes."""

    def train_step(self, data):
        self.orders.append(data[0].numpy().ravel().tolist())
        return {"loss": tf.zeros([])}


def orders_of(make_data, epochs):
    keras.utils.set_random_seed(0)
    spy, data = OrderOnly(), make_data()
    spy.orders = []
    spy.compile(run_eagerly=True)
    own_shuffle = isinstance(data, np.ndarray)  # of fit, which has one for arrays
    spy.fit(data, epochs=epochs, shuffle=own_shuffle, verbose=0)
    return spy.orders


def pipeline():
    return tf.data.Dataset.range(8).shuffle(8).batch(8)


before, after = orders_of(pipeline, epochs=3), orders_of(pipeline, epochs=1)
print("tf.data: different orders in three epochs:", len(set(map(str, before))))
print("tf.data: the restart begins with the order of epoch 1:", after[0] == before[0])
of_fit = orders_of(lambda: np.arange(8.0)[:, None], epochs=3)
print("fit(shuffle=True): different orders in three epochs:", len(set(map(str, of_fit))))

# %% [markdown]
# The restarted run shuffles its epoch 3 as the first run shuffled epoch 1. For an exact repetition everything random must follow from the number of the epoch, or be saved as well ([lesson 05](05_ddp_in_practice.ipynb) does both in PyTorch).
#
# The last line was a surprise to us, too: where a seed is set, `fit` on arrays draws one order and keeps it for all epochs (Keras 3.15.1 on TensorFlow). That makes resumed runs equal, but it is no shuffling. Use a `tf.data` pipeline.
#
# ## Every 100 batches
#
# Where an epoch takes hours, save within it: `save_freq=100`. Here an epoch has 157 batches, and an error in the second epoch stands for the kill (the files on the disk are the same).
#
# **Predict.** The run is stopped at batch 130 of epoch 2. At which batches of which epochs were the saves? And with which batch does `BackupAndRestore` go on?

# %%
# NBVAL_CHECK_OUTPUT
(x, y), _ = mnist()
x = x.reshape(-1, 784) / np.float32(255)


class StopAt(keras.callbacks.Callback):
    """Stops after so many updates in all; notes with which epoch `fit` began, and after how many."""

    def __init__(self, updates):
        super().__init__()
        self.updates, self.began = updates, None

    def on_epoch_begin(self, epoch, logs=None):
        self.began = self.began or (epoch + 1, int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.updates:
            raise InterruptedError


def start(updates, *callbacks):
    model, stop = digits_model(), StopAt(updates)
    backup = keras.callbacks.BackupAndRestore(work / "often-backup", save_freq=100)
    options = {"batch_size": 32, "epochs": 2, "shuffle": False, "verbose": 0}
    try:
        model.fit(x, y, callbacks=[backup, stop, *callbacks], **options)
    except InterruptedError:
        state = json.loads((work / "often-backup" / "training_metadata.json").read_text())
        first, done = stop.began
        return f"began epoch {first} with {done} updates, stopped at {updates}; backup: {state}"
    raise AssertionError("it was not stopped")


often = keras.callbacks.ModelCheckpoint(work / "often/ckpt-{epoch}-{batch}.keras", save_freq=100)
print("start 1:", start(157 + 130, often))
print("ModelCheckpoint saved", sorted(p.name for p in (work / "often").iterdir()))
print("start 2:", start(200 + 130))
print("start 3:", start(300 + 10))

# %% [markdown]
# The batches are counted across epochs: the second save is batch 43 of epoch 2. (The backup counts from 0.) Start 2 restored the weights *of* that batch, 157 + 43 updates, and then began the epoch from its *start*: 43 batches are trained twice. And whoever is stopped twice in the same epoch meets a mistake of Keras 3.15.1: the callback does not restore its own count of epochs, so its next backup says epoch 0, and start 3 is back in epoch 1. With `save_freq="epoch"` neither happens. `fit` has no place for a position inside an epoch; the last checkpoint form below has.
#
# ## Break it: a torn checkpoint
#
# `model.save` writes straight into the file with the final name. Whoever is killed meanwhile leaves a **torn** file, and it is the newest one. Here a thread watches the file and kills the process as soon as its first bytes are there.


# %%
# NBVAL_CHECK_OUTPUT
def killed_while_saving(path):
    import threading

    def watch():
        while not (path.exists() and path.stat().st_size > 0):
            pass
        os.kill(os.getpid(), 9)

    large = keras.Sequential([keras.Input((2000,)), keras.layers.Dense(2000)])  # 15 MiB
    threading.Thread(target=watch, daemon=True).start()
    large.save(path)


folder = work / "killed-False" / "ckpt"
try:
    launch(killed_while_saving, 1, folder / "ckpt-6.keras", framework="tensorflow")
except RankError as error:
    print("ended by", error.type_name)
newest = max(folder.iterdir(), key=os.path.getctime)
print("the newest file by time:", newest.name)
try:
    keras.models.load_model(newest)
except ValueError as error:
    print("ValueError:", str(error).splitlines()[0].replace(str(folder), "…"))
else:
    raise AssertionError("a torn file was loaded")

# %% [markdown]
# "File not found", says Keras of a file that is there: it is not a whole zip archive. Make-or-restore by time would now fail at every start, until somebody deletes the file by hand. And the time misleads in another way: it is the time of the last *change*, and changing a file's rights, or copying the folder, is a change.

# %%
# NBVAL_CHECK_OUTPUT
(folder / "ckpt-1.keras").chmod(0o600)
print("newest by time now:", max(folder.iterdir(), key=os.path.getctime).name)


def newest_that_loads(paths):
    """The first of `paths` that loads; says which ones it passed over, and why."""
    for path in paths:
        try:
            return path, keras.models.load_model(path)
        except (OSError, ValueError, KeyError) as error:
            print(f"passed over {path.name}: {type(error).__name__}")
    raise FileNotFoundError("no checkpoint loads: delete the folder to begin anew")


by_number = sorted(folder.iterdir(), key=lambda path: int(path.stem.split("-")[1]))
path, restored = newest_that_loads(reversed(by_number))
print("newest that loads:", path.name, "| updates:", int(restored.optimizer.iterations))

# %% [markdown]
# Three rules: the number in the name decides, not the time; sort it as a number (as text `ckpt-10` comes before `ckpt-9`); and try the next one when the newest does not load. `BackupAndRestore` has one file only; with `double_checkpoint=True` it keeps the one before as well.
#
# ## Keep the best and the last two
#
# Better than recovering from torn files is not to make them: write to another name, and rename when it is complete. A rename is **atomic**: at every moment the final name is a whole file, or not there. And the disk is finite: keep the last two, to go on from, and the best by validation loss, to use.


# %%
class BestAndLast(keras.callbacks.Callback):
    def __init__(self, folder, last=2):
        super().__init__()
        self.folder, self.last, self.losses = Path(folder), last, {}
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_epoch_end(self, epoch, logs=None):
        path = self.folder / f"ckpt-{epoch + 1}.keras"
        part = self.folder / "unfinished.keras"
        self.model.save(part)
        os.replace(part, path)  # whole, or not there
        self.losses[path] = logs["val_loss"]
        best = min(self.losses, key=self.losses.get)
        for old in list(self.losses)[: -self.last]:
            if old != best:
                old.unlink(missing_ok=True)


keep = BestAndLast(work / "kept")
model = digits_model()
model.optimizer.learning_rate = 0.01
_, (x_val, y_val) = mnist()
wrong = np.where(np.arange(500) % 3 == 0, (y[:500] + 1) % 10, y[:500])  # so that it overfits
model.fit(
    x[:500], wrong, epochs=6, batch_size=20, verbose=0, callbacks=[keep],
    validation_data=(x_val.reshape(-1, 784) / np.float32(255), y_val), validation_batch_size=1000,
)  # fmt: skip
left = {path.name for path in keep.folder.iterdir()}
best = min(keep.losses, key=keep.losses.get)
for path, loss in keep.losses.items():
    print(f"{path.name}  validation loss {loss:.3f}", "kept" if path.name in left else "")
assert left == {best.name, "ckpt-5.keras", "ckpt-6.keras"}

# %% [markdown]
# `ModelCheckpoint(save_best_only=True)` knows the best loss only within one run: after a restart it takes the first epoch for the best and [overwrites a better file](https://github.com/keras-team/keras/issues/17012). So does this callback; keep the losses on the disk too if you resume. (Against a power cut, also `fsync` the file before the rename. `course_utils.checkpoint` does, for PyTorch.)
#
# ## Three forms of checkpoint
#
# | form | written by | holds |
# |---|---|---|
# | `.keras` | `model.save` | the architecture, weights, optimizer |
# | `.weights.h5` | `model.save_weights` | weights, and the optimizer of a compiled model; you bring the code |
# | `tf.train.Checkpoint` | `checkpoint.write` | whatever you name: model, optimizer, counters, the position in a data set |

# %%
# NBVAL_CHECK_OUTPUT
forms = work / "forms"
forms.mkdir()
where = tf.Variable(6, dtype=tf.int64)
model.save(forms / "a.keras")
model.save_weights(forms / "b.weights.h5")
tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=where).write(str(forms / "c"))

from_keras = keras.models.load_model(forms / "a.keras")  # no code of the model needed
from_weights = digits_model()
from_weights.optimizer.build(from_weights.trainable_variables)
from_weights.load_weights(forms / "b.weights.h5")
from_tf, epoch_again = digits_model(), tf.Variable(0, dtype=tf.int64)
from_tf.optimizer.build(from_tf.trainable_variables)
everything = tf.train.Checkpoint(model=from_tf, optimizer=from_tf.optimizer, epoch=epoch_again)
everything.read(str(forms / "c")).assert_consumed()
not_built = digits_model()
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    not_built.load_weights(forms / "b.weights.h5")


def equal(ours, theirs):
    """Whether two lists of variables are equal, to the last bit."""
    return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


for name, got in {
    ".keras": from_keras,
    ".weights.h5": from_weights,
    "Checkpoint": from_tf,
    "not built": not_built,
}.items():
    weights = equal(got.get_weights(), model.get_weights())
    state = equal(got.optimizer.variables, model.optimizer.variables)
    print(f"{name:12} weights equal: {weights}, optimizer equal: {state}")
print("the epoch, by tf.train.Checkpoint:", int(epoch_again))
print("a warning when the optimizer was not built:", "Skipping variable" in str(heard[0].message))

# %% [markdown]
# All three bring back weights and optimizer, bit for bit. Prefer `.keras` to hand a model on. Mind the last line: an optimizer that is not built yet has no place for its state, `load_weights` leaves it out, and only a warning tells. With `tf.train.Checkpoint`, `assert_consumed` is what fails then.
#
# And the position inside an epoch: an *iterator* over a data set can be saved too, with the buffer of its shuffle.
#
# **Predict.** Ten batches, three are used, then a checkpoint. A new iterator is restored from it. Which batch comes next?

# %%
# NBVAL_CHECK_OUTPUT
data = tf.data.Dataset.range(40).shuffle(40).batch(4)  # every iterator has another order
position = iter(data)
for _ in range(3):
    next(position)
saved = tf.train.Checkpoint(position=position).write(str(forms / "position"))
rest = [batch.numpy().tolist() for batch in position]

again = iter(data)
tf.train.Checkpoint(position=again).restore(saved)
resumed = [batch.numpy().tolist() for batch in again]
print(f"batches left: {len(resumed)}, the same as without a break: {resumed == rest}")
assert resumed == rest

# %% [markdown]
# ## Two replicas saved, one loads
#
# A checkpoint of a strategy is no different: of a mirrored variable one copy is saved, since all are equal. Two replicas train and save; one device loads.

# %%
# NBVAL_CHECK_OUTPUT
with strategy.scope():
    mirrored = digits_model()
mirrored.fit(x[:640], y[:640], batch_size=64, verbose=0)
mirrored.save(forms / "mirrored.keras")
alone = keras.models.load_model(forms / "mirrored.keras")
print("copies of the first variable while training:", len(mirrored.variables[0].value.values))
print("updates:", int(alone.optimizer.iterations), "| weights equal to the last bit:", end=" ")
print(equal(alone.get_weights(), mirrored.get_weights()))

# %% [markdown]
# ## Then → now
#
# Tutorials from before Keras 3 save into directories, and use names that are gone.

# %% then="ModelCheckpoint('ckpt-{epoch}'), ModelCheckpoint(path, period=5)" now="ModelCheckpoint('ckpt-{epoch}.keras'), ModelCheckpoint(path, save_freq=5 * steps_per_epoch)" since="Keras 3.0"
# NBVAL_CHECK_OUTPUT
old = {"ckpt-{epoch}": {}, "ckpt-loss={loss:.2f}": {}, "ckpt.keras": {"period": 5}}
for name, options in old.items():
    try:
        keras.callbacks.ModelCheckpoint(name, **options)
    except (TypeError, ValueError) as error:
        print(
            name, options, type(error).__name__, str(error).split(" Received")[0].split("() ")[-1]
        )
    else:
        raise AssertionError(f"{name} {options} is accepted again")
keras.callbacks.ModelCheckpoint("ckpt-{epoch}.keras", save_freq=5 * 157)
keras.callbacks.ModelCheckpoint("ckpt-{epoch}.weights.h5", save_weights_only=True)

# %% then="model.save('folder'), callbacks.experimental.BackupAndRestore" now="model.save('model.keras') or model.export('folder'), callbacks.BackupAndRestore" since="Keras 3.0"
# NBVAL_CHECK_OUTPUT
old = {
    "model.save(folder)": lambda: model.save(forms),
    "load_model(folder)": lambda: keras.models.load_model(forms),
    "experimental": lambda: tf.keras.callbacks.experimental.BackupAndRestore(work / "b"),
}
for name, act in old.items():
    try:
        act()
    except (AttributeError, ValueError) as error:
        print(
            f"{name:18} {type(error).__name__}:", str(error).split(". ")[0].split(": filepath")[0]
        )
    else:
        raise AssertionError(f"{name} works again")
keras.callbacks.BackupAndRestore(work / "b")
model.export(work / "for-serving", verbose=False)

# %% [markdown]
# ## What this machine cannot show
#
# Here the files come from a local disk and its cache in memory. From a network disk, reading is what waits, and there a local file cache pays. Many processes that read the same few large files, and pictures decoded on a GPU, were not measured. Results on real GPUs: **not measured** yet.
#
# ## Exercise
#
# [Exercise 11](../exercises/11_input_and_checkpoints.ipynb): order a pipeline, resume at the right epoch, and pick the newest checkpoint that loads. About 40 minutes.
#
# ## Recap
#
# What is expensive and constant belongs before the cache; what is random belongs after it; prefetch comes last; and a batch has the global size. With several workers, count that each sample comes once. A checkpoint brings back weights and optimizer; the number of the epoch, and everything random, only if you see to it, and the newest file is not always one that loads.
#
# 1. Your pipeline is `files.map(decode).map(augment).shuffle(10_000).cache().batch(64).prefetch(2)`. What is wrong, and what will you notice?
# 2. Eight workers, four files, policy FILE. What happens? And with DATA, what does it cost?
# 3. A run of ten epochs is killed in epoch 7 and started again with `load_model(newest)` and `fit(epochs=10)`. How many epochs have the weights seen in the end?
#
# <details><summary>Answers</summary>
#
# 1. The cache lies behind augmentation and shuffle: every epoch brings the same pictures in the same order. The training loss falls nicely and the validation loss does not. Also, the maps are serial.
# 2. FILE is an error: fewer files than workers. With DATA each of the eight decodes everything: eight times the decoding.
# 3. Sixteen: six complete ones before, ten after. With `initial_epoch=6` it would be ten.
#
# </details>
#
# Go on with [lesson 12, Several workers](12_multi_worker.ipynb).
