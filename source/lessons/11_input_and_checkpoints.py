# ---
# jupyter:
#   course:
#     rows: [K4, K5]
#     minutes: {read: 45, do: 20}
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
# | **Time** | 45 minutes to read, 20 to do; the exercise comes on top |
# | **You should know** | `launch` ([lesson 00](00_start_here.ipynb)); `fit` and `compile` in Keras |
# | **You will** | measure six orders of the same pipeline · see which step is busy when · find the cache that freezes the augmentation · count which worker gets which sample · kill a training and go on in three ways · pass over a torn checkpoint |
# | **Runs on** | no GPU, or one: this process, and two pinned cores · two GPUs or more: the same; TensorFlow sees them in its GPU environment (`make lab-tf-gpu`), and the multi-GPU path was not run by the authors |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1 |
#
# If you have not done [lesson 10](10_mirrored_strategy.ipynb), two reminders: a **replica** is a copy of the model on one device, and each step feeds every replica its part of the **global batch**; a **mirrored variable** has one copy on each device; the copies of the weights stay equal.

# %%
import json
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import warnings
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
from course_utils.datasets import MNIST_NOTE, mnist, photo_patches
from course_utils.devices import census, slots
from course_utils.launch import RankError, launch

plots.use_style()
tf.get_logger().setLevel("ERROR")
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
# ## Part 1: the input pipeline
#
# An **input pipeline** makes batches of files: it reads, decodes, changes at random (**augmentation**), shuffles, batches. In `tf.data` each step is a method that takes a data set and returns a new one. Nothing is computed until somebody iterates.
#
# ## From scratch: eight numbers, four orders
#
# `shuffle(n)` keeps a buffer of n elements and draws from it. `batch(4)` makes one element of four. `cache()` keeps what came through in the first pass over the data, and hands out the same in every later one. Each is harmless alone.
#
# **Predict.** Two epochs of each: in which orders do 0 and 1 always share a batch? In which two orders without ties can the second epoch differ from the first, and in which one can it not?


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
    print(f"{name:28} {first}, then {second}", "neighbours tied" if tied else "")

# %% [markdown]
# Shuffled batches are always the same batches; two of them have only two orders, so here it is chance whether an epoch repeats. And a cache *after* the shuffle has frozen its order: you believe that you shuffle in every epoch, and you train on one order for ever. No error tells you. Shuffle single elements, and after the cache.
#
# The size of the buffer is the third trap: an element can come out only when it has come in. With a buffer of n the first batch of b holds nothing but the first n + b − 1 elements. Files often lie sorted, so a small buffer gives batches of a single class.
#
# ## Real work: JPEG files
#
# Now real photographs: patches of 300 × 300 pixels, written as JPEG files, in the order of the patches. The task is much like that of lesson 10: was this picture turned upside down? The pipeline turns half of them itself and so knows the label.

# %%
# NBVAL_CHECK_OUTPUT
FILES, BATCH = 64, 8
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
def clock(after):
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


def as_written(data):
    """Without what `tf.data` rewrites on its own, such as a prefetch that it adds."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return data.with_options(options)


def train_on(data):
    """Train on every batch; return when each picture and each step was at work, from 0 on."""
    spans = {"decode": [], "augment": [], "train": []}
    begin = time.time()
    for batch in data:
        start = time.time()
        train_step(batch["image"], batch["turned"]).numpy()  # a number: waits also for a GPU
        spans["train"].append([start, time.time()])
        for stage in ("decode", "augment"):
            spans[stage].extend(batch[stage].numpy())
    return {stage: np.array(times) - begin for stage, times in spans.items()}


files = tf.data.Dataset.list_files(str(work / "jpeg" / "*.jpg"), shuffle=False)
one_by_one = as_written(files.map(decode).map(augment).batch(BATCH))
train_on(one_by_one)  # the first pass compiles, and does not count
alone = {stage: np.diff(times).sum() / FILES for stage, times in train_on(one_by_one).items()}
for stage, seconds in alone.items():
    print(f"{stage:8} {1000 * seconds:6.2f} ms for a picture")

# %% [markdown]
# ## Six orders, measured
#
# The serial pipeline does one thing after the other: decode, augment, train. Three tools change that.
#
# - `map(..., num_parallel_calls=AUTOTUNE)` works on several pictures at a time.
# - `prefetch(AUTOTUNE)` prepares the next batches while you train on this one.
# - `cache()` keeps what has been computed, in memory, or in a file if you name one.
#
# **Predict.** From the three numbers above: how many pictures a second in the serial order? And at best, when the input works beside the training? Which of the two caches below is the faster one, and which one is wrong?

# %%
AUTO = tf.data.AUTOTUNE
ROUNDS = 4


def ahead(data, function):
    return data.map(function, num_parallel_calls=AUTO)


mixed = files.shuffle(FILES)
serial = mixed.map(decode).map(augment).batch(BATCH)
cached = ahead(files, decode).cache().shuffle(FILES)
pipelines = {
    "serial": serial,
    "prefetch too early": mixed.prefetch(AUTO).map(decode).map(augment).batch(BATCH),
    "prefetch last": serial.prefetch(AUTO),
    "+ parallel maps": ahead(ahead(mixed, decode), augment).batch(BATCH).prefetch(AUTO),
    "+ cache after decode": ahead(cached, augment).batch(BATCH).prefetch(AUTO),
    "cache after augment": ahead(ahead(files, decode), augment).cache().shuffle(FILES)
    .batch(BATCH).prefetch(AUTO),
}  # fmt: skip
pipelines = {name: as_written(data) for name, data in pipelines.items()}
for name in pipelines:
    if "cache" in name:
        train_on(pipelines[name])  # not counted: it fills the cache
runs = {name: [] for name in pipelines}
for turn in tqdm(range(ROUNDS), file=sys.stdout):
    for name in list(pipelines)[:: 1 if turn % 2 == 0 else -1]:  # they take turns
        runs[name].append(train_on(pipelines[name]))

seconds = {name: np.array([run["train"].max() for run in runs[name]]) for name in runs}
worked_out = {"sum of the three": sum(alone.values())}
worked_out["longer side alone"] = max(alone["decode"] + alone["augment"], alone["train"])
print(f"{'':22}{'pictures/s':>10}  {'all rounds':>10}  {'time ÷ serial':>13}  {'a step':>8}")
for name, times in seconds.items():
    speeds, share = FILES / times, np.median(times / seconds["serial"])
    step = np.median([np.diff(run["train"]) for run in runs[name]])
    between = f"{speeds.min():.0f}–{speeds.max():.0f}"
    print(f"{name:22}{np.median(speeds):10.0f}  {between:>10}  ", end="")
    print(f"{share:12.2f}×  {1000 * step:5.1f} ms")
for name, time_each in worked_out.items():
    print(f"{name:22}{1 / time_each:10.0f}  (worked out)")
longer = "the input" if alone["decode"] + alone["augment"] > alone["train"] else "the training"
print("The longer side, one thing at a time:", longer)

# %% [markdown]
# Each measurement is one pass over the files, from the first request to the end of the last training step. The orders took turns; the table has medians, and *time ÷ serial* is the median of the ratios within a round. Read it in three steps.
#
# - **Prefetch** belongs last. Then input and training can overlap, and at best the longer side decides instead of the sum. In front of the maps it prepares names of files, which is no work.
# - **Parallel maps** help as far as there are free cores. Here training takes one of them. Where input and training share cores, a training step takes longer than alone: compare the last column. That is **contention**; on a GPU the training would leave the cores to the input.
# - **A cache** saves the decoding from the second pass on. Where the training is the longer side, a faster input changes little. *Cache after augment* has the least to do, and is wrong: you will see why below.
#
# All of this needs a free core. Where the rounds of two lines overlap, the table has not decided between them. (The orders run as they are written: without `as_written`, TensorFlow [rewrites a pipeline](https://www.tensorflow.org/api_docs/python/tf/data/experimental/OptimizationOptions), and among other things may add a prefetch at the end.)
#
# ## Which step is busy when
#
# A timeline says more than a number. Here is the quickest round of each order. Each bar is one picture in decoding or augmentation, or one training step.

# %%
best_runs = {name: min(runs[name], key=lambda run: run["train"].max()) for name in runs}
best_ms = {name: 1000 * run["train"].max() for name, run in best_runs.items()}
fig, axes = plt.subplots(len(best_runs), 1, figsize=(9, 9.5), sharex=True)
for ax, (name, spans) in zip(axes, best_runs.items(), strict=True):
    for row, times in enumerate(spans.values()):
        spells = [(1000 * a, 1000 * (b - a)) for a, b in times if a > 0]  # < 0: cached before
        ax.broken_barh(spells, (row - 0.35, 0.7), color=f"C{row}", edgecolor="white", linewidth=0.3)
    ax.axvline(best_ms[name], color="black", linestyle=":", marker="")
    ax.set(yticks=range(3), yticklabels=spans, ylim=(2.6, -0.6), ylabel="stage")
    ax.set_title(f"{name}: {best_ms[name]:.0f} ms", fontsize=10, loc="left")
    ax.grid(axis="y", visible=False)
axes[-1].set_xlabel("time since the first batch was asked for (ms)   +: added to the order above")
right = {name: times for name, times in seconds.items() if name != "cache after augment"}
best = min(right, key=lambda name: np.median(right[name]))
close = [repr(name) for name in right if right[name].min() <= right[best].max()]
title = f"{FILES} pictures. The quickest right order: "
title += close[0] if len(close) == 1 else "not decided between " + " and ".join(close)
fig.suptitle(textwrap.fill(title, 70))
times_text = ", ".join(f"{name} {ms:.0f} ms" for name, ms in best_ms.items())
plots.show(
    fig,
    name="pipeline-timeline",
    alt=f"{title}. Timelines of six orders, with rows for decode, augment and train. "
    f"Until the last training step: {times_text}",
)
for name, ms in best_ms.items():
    trains = 100 * 1000 * np.diff(best_runs[name]["train"]).sum() / ms
    print(f"{name:22}{ms:6.0f} ms, a training step is at work in {trains:3.0f} % of it")

# %% [markdown]
# In the serial order the rows take turns: while the device trains nothing is decoded, and while pictures are made the device waits. With prefetch last, pictures are made *while* it trains. Overlapping bars of one row are parallel calls; behind a cache a row is empty. A wider green bar is contention or noise, not more training, so judge an order by its time and not by how green it is. (The gap at the start is `tf.data` setting up the pipeline.) If your own training is slow, look for gaps in the row `train` first. No second device helps where the first one waits for its input.
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
draws = tf.data.Dataset.range(8).shuffle(8).map(lambda _: tf.random.uniform([]))
first, second = (list(draws.as_numpy_iterator()) for _ in range(2))
print("eight elements draw the same numbers in both epochs:", first == second)


def brighter(sample, seed):
    return {"image": tf.image.stateless_random_brightness(sample["image"], 0.2, seed)}


seeds = tf.data.Dataset.random(seed=0, rerandomize_each_iteration=True).batch(2)
data = tf.data.Dataset.zip(picture.map(decode).cache(), seeds).map(brighter)
print("cache, then augment, with seeds that come as data:", versions(data))

# %% [markdown]
# The third line is a trap of its own: with a global seed, the random operations inside a `map` begin anew in every epoch, with the same numbers: the n-th picture of every epoch is turned and cut in the same way. The cure is the last line: seeds that come as data, new ones in each epoch, and operations with `stateless` in their name, which take them.
#
# The line between *once* and *in each epoch* is the place of the cache. Before it: what is expensive and always the same. After it: everything random. A cache in memory holds decoded pictures, several times the size of the files; if that does not fit, name a file: `cache("/path/name")`. That saves the decoding but reads more bytes, so measure whether it pays. (A file cache outlives the program. Delete it when the step before it changes, or you train on yesterday's pictures.)
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
# With several processes each worker has an input pipeline of its own, made by the same code. Who reads what? The **auto-shard policy** of the data set decides: FILE gives out whole files, with DATA every worker reads all elements and drops those of the others, OFF gives everything to everybody, and AUTO, the default, chooses between FILE and DATA. To see them you need two real workers, and records that can be counted: three files with eight records each, and every record is its own number. Each worker counts what it *decodes* and lists what it *trains on*.
#
# The program is the same on both workers, `MultiWorkerMirroredStrategy` joins them ([lesson 12](12_multi_worker.ipynb)), and `TF_CONFIG` tells each who it is. `launch` sets it. From a shell that is `TF_CONFIG='{"cluster": {"worker": ["host1:12345", "host2:12345"]}, "task": {"type": "worker", "index": 0}}' python train.py`, with index 1 on the other machine.
#
# **Predict.** Twenty-four records in three files, two workers. Under FILE, DATA and OFF: how many does each worker decode, and how many does each train on? And what does FILE do with one file?


# %%
Policy = tf.data.experimental.AutoShardPolicy
records_of = {}
for files_made in (3, 1):
    paths = [str(work / f"{files_made}-{file}.tfrecord") for file in range(files_made)]
    for file, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for record in range(8):
                writer.write(str(8 * file + record).encode())
    records_of[files_made] = paths


def one_epoch(strategy, records, policy):
    """How many records this worker decoded, and which ones it trained on."""
    decoded = []

    def count(record):
        decoded.append(record)
        return np.int64(record)

    def decode_record(record):
        return tf.ensure_shape(tf.numpy_function(count, [record], tf.int64), [])

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    data = records.map(decode_record).batch(8).with_options(options)
    trained = []
    for batch in strategy.experimental_distribute_dataset(data):
        trained += [int(v) for v in strategy.experimental_local_results(batch)[0]]
    return len(decoded), trained


def shard_report():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    me = strategy.cluster_resolver.task_id
    three = tf.data.TFRecordDataset(records_of[3])
    listed = tf.data.Dataset.from_tensor_slices([str(number) for number in range(24)])
    cases = {
        "FILE": (three, Policy.FILE),
        "DATA": (three, Policy.DATA),
        "OFF": (three, Policy.OFF),
        "AUTO": (three, Policy.AUTO),
        "AUTO, a list": (listed, Policy.AUTO),
        "DATA, shuffled": (three.shuffle(24), Policy.DATA),
        "DATA, shuffled by a seed": (three.shuffle(24, seed=1), Policy.DATA),
        "OFF, sharded by hand": (three.shard(2, me).shuffle(24), Policy.OFF),
    }
    return {name: one_epoch(strategy, *case) for name, case in cases.items()}


def auto_on_one_file():
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    return one_epoch(strategy, tf.data.TFRecordDataset(records_of[1]), Policy.AUTO)


workers = {"framework": "tensorflow", "roles": {"worker": 2}, "timeout": 90}


# %%
# NBVAL_CHECK_OUTPUT
reports = launch(shard_report, 2, **workers)
for name in reports[0]:
    decoded, trained = zip(*(report[name] for report in reports), strict=True)
    once = sorted(trained[0] + trained[1]) == list(range(24))
    sizes = [len(numbers) for numbers in trained]
    print(f"{name:24} decoded {decoded}, trained on {sizes}, each record once: {once}")
try:
    launch(auto_on_one_file, 2, **workers)
except RankError as error:
    print("AUTO, one file:", error.type_name, error.message.split("}} ")[1].split(". ")[0])
else:
    raise AssertionError("one file was shared out between two workers")

# %% [markdown]
# - **FILE** decodes each record once, but three files over two workers are two and one: unequal work. With fewer files than workers it is an error.
# - **DATA** lets every worker decode everything and throw away what is the other's: each sample once, the decoding twice.
# - **OFF**: each sample counts twice in an epoch, unless you shard by hand. `shard` first, then shuffle and decode only your own: each sample once, the decoding once.
# - **DATA, shuffled** is the trap. Each worker shuffles in an order of its own and then takes every second element of *its* order. Some records come twice, others never. The [documentation](https://www.tensorflow.org/api_docs/python/tf/data/experimental/AutoShardPolicy) says that the order must be the same on all workers: give `shuffle` a seed, or shard before you shuffle.
# - **AUTO** takes FILE where the data set reads record files, and DATA for anything else, such as a list. The page says that it falls back to DATA; with too few files it did not, as you saw.
#
# ## Part 2: go on after a kill
#
# Long trainings are killed: memory runs out, a machine is needed elsewhere, a power plug is pulled. A **checkpoint** is a file from which training can go on. The [Keras guide](https://keras.io/guides/distributed_training_with_tensorflow/) saves one in every epoch with `ModelCheckpoint`, and at the start loads the newest one in the folder. It says that calling the same function again resumes where it left off. Test it.
#
# The training runs in a process of its own on a pinned core, and it really is killed, in the middle of the third epoch: signal 9 cannot be caught, nothing is tidied up (`launch` reports it as a `RankError`). `way` says how it goes on when it is started again. Both callbacks save in the same run, so that all ways start from the same crash. *Noisy* means: with shuffling and dropout.

# %%
EPOCHS, STEPS = 5, 20  # 1,000 digits in batches of 50


def digits_model(noisy=False, built=True):
    keras.utils.set_random_seed(0)  # every start begins with the same weights
    stack = [keras.Input((784,)), keras.layers.Dense(64, activation="relu")]
    stack += [keras.layers.Dropout(0.3)] if noisy else []
    model = keras.Sequential([*stack, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss, jit_compile=False)
    if built:  # fit would do it, and compile its step twice
        model.optimizer.build(model.trainable_variables)
    return model


class KillMyself(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == (2, 9):  # counted from 0: in the middle of the third epoch
            (work / f"here-{os.environ['RANK']}").touch()
            while len(list(work.glob("here-*"))) < 2:  # both processes get as far as this
                time.sleep(0.01)
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
        "dropouts": [int(state[1]) for state in model.non_trainable_variables],
        "weights": np.concatenate([w.ravel() for w in model.get_weights()]),
    }


def run(*jobs):
    """Train the jobs in two processes, each on a core of its own: every second job in each."""

    def mine():
        return [train(**job) for job in jobs[int(os.environ["RANK"]) :: 2]]

    results = launch(mine, 2, framework="tensorflow", timeout=90)
    return [results[number % 2][number // 2] for number in range(len(jobs))]


# %%
# NBVAL_CHECK_OUTPUT
plain, noisy = work / "plain", work / "noisy"
try:
    run({"folder": plain, "killed": True}, {"folder": noisy, "noisy": True, "killed": True})
except RankError as error:
    print("ended by", error.type_name)
else:
    raise AssertionError("the training survived signal 9")
for folder in (plain, noisy):
    backup = json.loads((folder / "backup" / "training_metadata.json").read_text())
    names = sorted(path.name for path in (folder / "ckpt").iterdir())
    print(f"on the disk of {folder.name}: {names} and a backup: {backup}")

# %% [markdown]
# Two checkpoints by `ModelCheckpoint`, of epochs 1 and 2; and the backup, which holds the weights, the optimizer and the number of complete epochs. The half epoch is lost in any case.
#
# ## The guide's way, and `initial_epoch`
#
# The next cell runs everything that follows at once: all ways to go on, and two runs without a break to compare with.
#
# **Predict.** `fit(epochs=5)` is called again. Which epochs does it train in the guide's way, and how many updates have the weights seen in the end? (A run without a break makes 5 × 20.)

# %%
# NBVAL_CHECK_OUTPUT
for way in ("initial_epoch", "backup"):
    shutil.copytree(plain, work / way)
whole, whole_noisy, guide, counted, back, back_noisy = run(
    {"folder": work / "whole"},
    {"folder": work / "whole-noisy", "noisy": True},
    {"folder": plain, "way": "guide"},
    {"folder": work / "initial_epoch", "way": "initial_epoch"},
    {"folder": work / "backup", "way": "backup"},
    {"folder": noisy, "noisy": True, "way": "backup"},
)
assert len(whole["epochs"]) == EPOCHS and whole["updates"] == EPOCHS * STEPS
for name, one_run in {"no break": whole, "guide": guide, "initial_epoch": counted}.items():
    print(f"{name:14} trained epochs {one_run['epochs']}, updates in all: {one_run['updates']}")
same = np.isclose(guide["losses"][0], whole["losses"][2])
print("what the guide's way calls epoch 1 has the loss of epoch 3 without a break:", same)
print("the guide's files:", *sorted(p.name for p in (plain / "ckpt").iterdir()))

# %% [markdown]
# The weights went on: what it calls epoch 1 is the third epoch of the weights. But **the epochs restarted**: seven in all, and only five files, since those of epochs 1 and 2 were overwritten. The claim is half true. `initial_epoch`, read from the file's name, mends it. (And `epochs` is the number of the last epoch, not how many more to train.)
#
# ## BackupAndRestore
#
# `BackupAndRestore` does this by itself: one backup, overwritten in every epoch, deleted when `fit` is done. The model must be built before `fit`, which an `Input` layer does.
#
# The cell above has tried it, on copies of the same files.
#
# **Predict.** Both runs go on in the third epoch. Whose losses equal those of the run without a break: plain, noisy, or both?

# %%
# NBVAL_CHECK_OUTPUT
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
left.plot(whole["epochs"], whole["losses"], linewidth=6, alpha=0.4, label="without a break")
left.plot(back["epochs"], back["losses"], linewidth=3, label="BackupAndRestore")
left.plot([2 + e for e in guide["epochs"]], guide["losses"], "--", label="the guide's way")
left.axvline(2.5, color="black", linestyle=":", marker="")
left.text(2.6, 1.0, "killed", va="top")
left.set(xlabel="epochs that the weights have seen", ylabel="training loss", xticks=range(1, 8))
left.set_title("plain: all losses", fontsize=11)
gaps = {}
for name, unbroken, resumed in panels:
    gaps[name] = np.array(resumed["losses"]) - np.array(unbroken["losses"][2:])
    right.plot(resumed["epochs"], gaps[name], label=name)
right.set(
    xlabel="epoch",
    ylabel="loss minus loss without a break\n(below 0: the resumed run is lower)",
    xticks=back["epochs"],
)
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
# Plain: where the title says 0, the losses are equal to the last bit, because the same arithmetic was done in the same order. The tolerance is for a GPU, which may add up in another order. Noisy: another training. The backup holds weights, optimizer and epoch, not the state of the random numbers. The first lines of the next cell show it: dropout counts its draws from 0 again, and a program that starts again with the same seed shuffles its third epoch as it had shuffled its first. For an exact repetition everything random must follow from the number of the epoch, or be saved as well ([lesson 05](05_ddp_in_practice.ipynb) does both in PyTorch).
#
# ## Every 100 batches
#
# Where an epoch takes hours, save within it: `save_freq=100`. Here an epoch has 157 batches, and an error in the second epoch stands for the kill.
#
# **Predict.** The run is stopped at batch 60 of epoch 2. At which batches of which epochs were the saves? And with which batch does `BackupAndRestore` go on?


# %%
# NBVAL_CHECK_OUTPUT
def orders(epochs):
    tf.random.set_seed(0)  # as every start of the program does
    data = tf.data.Dataset.range(8).shuffle(8).batch(8)
    return [next(data.as_numpy_iterator()).tolist() for _ in range(epochs)]


for name, noisy_run in {"no break": whole_noisy, "resumed": back_noisy}.items():
    print(f"{name}: updates {noisy_run['updates']}, dropouts drawn {noisy_run['dropouts']}")
print("a restart begins with the order of epoch 1:", orders(epochs=1)[0] == orders(epochs=3)[0])
(x, y), (x_val, y_val) = mnist()
x, x_val = (pixels.reshape(-1, 784) / np.float32(255) for pixels in (x, x_val))


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
print("start 1:", start(157 + 60, often))
print("ModelCheckpoint saved", sorted(p.name for p in (work / "often").iterdir()))
print("start 2:", start(200 + 10))

# %% [markdown]
# The batches are counted across epochs: the second save is batch 43 of epoch 2. (The backup counts from 0.) Start 2 restored the weights *of* that batch, 157 + 43 updates, and then began the epoch from its *start*: 43 batches are trained twice. With `save_freq="epoch"`, the default, no update counts twice. `fit` has no place for a position inside an epoch; the last checkpoint form below has.
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


folder = plain / "ckpt"
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
# "File not found", says Keras of a file that is there: it is not a whole zip archive. (Files torn in other places raise other errors.) Make-or-restore by time would now fail at every start, until somebody deletes the file by hand. And the time misleads in another way: it is the time of the last *change*, and changing a file's rights, or copying the folder, is a change. The folder is that of the guide's run, with its 140 updates.

# %%
# NBVAL_CHECK_OUTPUT
(folder / "ckpt-1.keras").chmod(0o600)
print("newest by time now:", max(folder.iterdir(), key=os.path.getctime).name)


def newest_that_loads(paths):
    """The first of `paths` that loads; says which ones it passed over, and why."""
    for path in paths:
        try:
            return path, keras.models.load_model(path)
        except Exception as error:  # whatever a torn file raises, but not Ctrl-C
            print(f"passed over {path.name}: {type(error).__name__}")
    raise FileNotFoundError("no checkpoint loads: delete the folder to begin anew")


numbers = [re.fullmatch(r"ckpt-(\d+)\.keras", path.name) for path in folder.iterdir()]
newest_first = sorted((int(found[1]) for found in numbers if found), reverse=True)
path, restored = newest_that_loads(folder / f"ckpt-{number}.keras" for number in newest_first)
print("newest that loads:", path.name, "| updates:", int(restored.optimizer.iterations))

# %% [markdown]
# Three rules: the number in the name decides, not the time (`fullmatch` leaves other files alone); sort it as a number (as text `ckpt-10` comes before `ckpt-9`); and try the next one when the newest does not load. `BackupAndRestore` has one file only; with `double_checkpoint=True` it keeps the one before as well.
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
wrong = np.where(np.arange(500) % 3 == 0, (y[:500] + 1) % 10, y[:500])  # so that it overfits
model.fit(
    x[:500], wrong, epochs=6, batch_size=20, verbose=0, callbacks=[keep],
    validation_data=(x_val, y_val), validation_batch_size=1000,
)  # fmt: skip
left = {path.name for path in keep.folder.iterdir()}
best = min(keep.losses, key=keep.losses.get)
for path, loss in keep.losses.items():
    print(f"{path.name}  validation loss {loss:.3f}", "kept" if path.name in left else "")
assert left == {best.name, "ckpt-5.keras", "ckpt-6.keras"}

# %% [markdown]
# `ModelCheckpoint(save_best_only=True)` knows the best loss only within one run: after a restart it takes the first epoch for the best and [overwrites a better file](https://github.com/keras-team/keras/issues/17012), unless you pass it the best loss so far as [`initial_value_threshold`](https://keras.io/api/callbacks/model_checkpoint/). This callback forgets the best one too; keep the losses on the disk if you resume. (Against a power cut, also `fsync` the file before the rename. `course_utils.checkpoint` does, for PyTorch.)
#
# ## Three forms of checkpoint
#
# | form | written by | holds |
# |---|---|---|
# | `.keras` | `model.save` | the architecture, weights, optimizer |
# | `.weights.h5` | `model.save_weights` | weights, and the optimizer of a compiled model; you bring the code |
# | `tf.train.Checkpoint` | `checkpoint.write` | whatever you name: model, optimizer, counters, the position in a data set |
#
# A checkpoint of a strategy is no different: of a mirrored variable one copy is saved, the first replica's. Here a model of two replicas is saved in all three forms, and one device loads.

# %%
# NBVAL_CHECK_OUTPUT
forms = work / "forms"
forms.mkdir()
with strategy.scope():
    model = digits_model()
model.fit(x[:640], y[:640], batch_size=64, verbose=0)
print("copies of the first variable while training:", len(model.variables[0].value.values))
where = tf.Variable(6, dtype=tf.int64)
model.save(forms / "a.keras")
model.save_weights(forms / "b.weights.h5")
tf.train.Checkpoint(model=model, optimizer=model.optimizer, epoch=where).write(str(forms / "c"))

from_keras = keras.models.load_model(forms / "a.keras")  # no code of the model needed
from_weights = digits_model()
from_weights.load_weights(forms / "b.weights.h5")
from_tf, epoch_again = digits_model(), tf.Variable(0, dtype=tf.int64)
everything = tf.train.Checkpoint(model=from_tf, optimizer=from_tf.optimizer, epoch=epoch_again)
everything.read(str(forms / "c")).assert_consumed()
not_built = digits_model(built=False)
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
bare = digits_model(built=False)
again = tf.train.Checkpoint(model=bare, optimizer=bare.optimizer).read(str(forms / "c"))
try:
    again.assert_consumed()
except AssertionError:
    print("and of tf.train.Checkpoint: AssertionError")
else:
    raise AssertionError("a checkpoint with parts left over was accepted")

# %% [markdown]
# All three bring back weights and optimizer, bit for bit. Prefer `.keras` to hand a model on. Mind the line *not built*: an optimizer that is not built yet has no place for its state, `load_weights` leaves it out, and only a warning tells. With `tf.train.Checkpoint`, `assert_consumed` fails then.
#
# And the position inside an epoch: an *iterator* over a data set can be saved too, with the buffer of its shuffle.
#
# **Predict.** Ten batches, three are used, then a checkpoint. In another process a new iterator is restored from it. Which batch comes next?


# %%
# NBVAL_CHECK_OUTPUT
def numbers():
    return tf.data.Dataset.range(40).shuffle(40).batch(4)  # every iterator has another order


def first_three():
    position = iter(numbers())
    for _ in range(3):
        next(position)
    tf.train.Checkpoint(position=position).write(str(forms / "position"))
    return [batch.numpy().tolist() for batch in position]


(rest,) = launch(first_three, 1, framework="tensorflow")
again = iter(numbers())
tf.train.Checkpoint(position=again).read(str(forms / "position")).assert_consumed()
resumed = [batch.numpy().tolist() for batch in again]
print(f"batches left: {len(resumed)}, the same as without a break: {resumed == rest}")
other = [batch.numpy().tolist() for batch in numbers()][3:]
print("from an iterator that was not restored:", other == rest)
assert resumed == rest != other

# %% [markdown]
# ## Then → now
#
# Tutorials from before Keras 3 save into directories, and use names that are gone.
#
# | then | now |
# |---|---|
# | `ModelCheckpoint("ckpt-{epoch}")` | `ModelCheckpoint("ckpt-{epoch}.keras")`, or `.weights.h5` with `save_weights_only=True` |
# | `ModelCheckpoint(path, period=5)` | `ModelCheckpoint(path, save_freq=5 * steps_per_epoch)` |
# | `model.save("folder")`, `load_model("folder")` | `model.save("model.keras")`; for serving, `model.export("folder")` |
# | `callbacks.experimental.BackupAndRestore` | `callbacks.BackupAndRestore` |

# %% then="ModelCheckpoint('ckpt-{epoch}'), ModelCheckpoint(path, period=5)" now="ModelCheckpoint('ckpt-{epoch}.keras'), ModelCheckpoint(path, save_freq=5 * steps_per_epoch)" since="Keras 3.0"
# NBVAL_CHECK_OUTPUT
gone = {"ckpt-{epoch}": {}, "ckpt-loss={loss:.2f}": {}, "ckpt.keras": {"period": 5}}
for name, options in gone.items():
    try:
        keras.callbacks.ModelCheckpoint(name, **options)
    except (TypeError, ValueError) as error:
        text = str(error).split(" Received")[0].split("() ")[-1]
        print(f"{name} {options or ''} {type(error).__name__}: {text}")
    else:
        raise AssertionError(f"{name} {options} is accepted again")
keras.callbacks.ModelCheckpoint("ckpt-{epoch}.keras", save_freq=5 * 157)
keras.callbacks.ModelCheckpoint("ckpt-{epoch}.weights.h5", save_weights_only=True)
print("the new ways: no error")

# %% then="model.save('folder'), callbacks.experimental.BackupAndRestore" now="model.save('model.keras') or model.export('folder'), callbacks.BackupAndRestore" since="Keras 3.0"
# NBVAL_CHECK_OUTPUT
gone = {
    "model.save(folder)": lambda: model.save(forms),
    "load_model(folder)": lambda: keras.models.load_model(forms),
    "experimental": lambda: tf.keras.callbacks.experimental.BackupAndRestore(work / "b"),
}
for name, act in gone.items():
    try:
        act()
    except (AttributeError, ValueError) as error:
        text = str(error).split(". ")[0].split(": filepath")[0]
        print(f"{name:18} {type(error).__name__}: {text}")
    else:
        raise AssertionError(f"{name} works again")
keras.callbacks.BackupAndRestore(work / "b")
from_keras.export(work / "for-serving", verbose=False)
print("the new ways: no error")

# %% [markdown]
# ## What this machine cannot show
#
# Here the files come from a local disk and its cache in memory. From a network disk, reading is what waits, and there a local file cache pays. Many processes that read the same few large files, and pictures decoded on a GPU, were not measured. Results on real GPUs: **not measured** yet.
#
# ## Exercise
#
# [Exercise 11](../exercises/11_input_and_checkpoints.ipynb): order a pipeline, resume at the right epoch, and pick the newest checkpoint that loads. About 45 minutes.
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
# 1. The cache lies behind augmentation and shuffle: every epoch brings the same pictures in the same order. No error tells you. Also, the maps are serial.
# 2. FILE is an error: fewer files than workers. With DATA each of the eight decodes everything: eight times the decoding.
# 3. Sixteen: six complete ones before, ten after. With `initial_epoch=6` it would be ten.
#
# </details>
#
# Go on with [lesson 12, Several workers](12_multi_worker.ipynb).
