# ---
# jupyter:
#   course:
#     rows: [M2, M3, K1, K2, K3]
#     minutes: {read: 25, do: 25}
#     devices: 2
#     path: core
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
# # MirroredStrategy: one Keras model on several devices
#
# After this lesson you can train a Keras model on all devices of one machine, prove that it computes what one device computes, and recognise the ways in which it goes wrong, most of them silent.
#
# | | |
# |---|---|
# | **Time** | 25 minutes to read, 25 to do; the exercise comes on top |
# | **You should know** | logical devices ([lesson 01](01_device_placement.ipynb)); speed-up ([lesson 02](02_two_devices_one_sum.ipynb)); not needed, but related: the all-reduce ([lesson 04](04_ddp_from_scratch.ipynb)) |
# | **You will** | look inside a mirrored variable · share out a global batch · choose a strategy for any machine · train a CNN and the Keras guide's MNIST model · scale a loss · hold two replicas against one device · understand a crash of `fit` · time two replicas, and two processes, against one |
# | **Runs on** | no GPU, or one: logical CPU devices, and two processes on pinned cores · two GPUs or more: the GPUs, in TensorFlow's GPU environment (the multi-GPU path was not run by the authors) |
# | **Last verified** | Python 3.11, TensorFlow 2.21.0, Keras 3.15.1 |

# %%
import os
import re
import sys
import time
import warnings

# TensorFlow's notices would hide what the lesson prints. Four lines remain all the same: they
# are logged before this setting is read (tensorflow/tensorflow issue 100442).
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib.pyplot as plt
import numpy as np
import tensorflow as tf
from keras import layers
from tqdm import tqdm

from course_utils import plots
from course_utils.datasets import MNIST_NOTE, DataError, mnist, photo_patches
from course_utils.devices import census, slots
from course_utils.launch import launch
from course_utils.timing import Timing, compare, speedup_table

# Each strategy would say that CPUs have no NCCL, NVIDIA's library for messages between GPUs.
tf.get_logger().setLevel("ERROR")
plots.use_style()

# %% [markdown]
# TensorFlow sees one physical CPU, whatever the number of its cores. The next cell splits it into eight logical devices, as in lesson 01. Two are enough for this lesson; eight are for the first question below.

# %%
print(census())
assert len(slots(2, framework="tensorflow")) == 2, "this lesson runs on two devices"

gpus = tf.config.list_physical_devices("GPU")
if len(gpus) == 1:  # the two replicas are CPUs then, and must be held against a CPU: hide the GPU
    tf.config.set_visible_devices([], "GPU")
else:
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)

EIGHT = [f"/CPU:{number}" for number in range(8)]
DEVICES = ["/GPU:0", "/GPU:1"] if len(gpus) >= 2 else EIGHT[:2]
print("\nreplicas of this lesson:", DEVICES)

# %% [markdown]
# ## The words
#
# There are two ways to use several devices for one model. **Model parallelism** gives each device a part of the model. It suits models with branches that can run at once; [lesson 08](08_model_and_pipeline_parallel.ipynb) is about it. **Data parallelism** gives each device the whole model and a part of the data. Each copy of the model is a **replica**. In every step the replicas add up their gradients by an **all-reduce** (each gives its numbers, all get the sum) and make the same update, so they stay equal. Nobody runs ahead: training is **synchronous**.
#
# In TensorFlow a **strategy** says how this is done. `MirroredStrategy` is synchronous data parallelism on the devices of one machine, in *one* process. There is no rank and nothing to launch; from a shell it is `python train.py`.
#
# What all replicas together use for one step is the **global batch**. A replica's share is its **local batch**. In TensorFlow you batch by the *global* size, and the strategy cuts.
#
# **Predict.** A global batch of 512 goes to 8 replicas. How many samples does each get? And of 20? The strategy's rule: the batch over the replicas, rounded up, to one replica after the other, until nothing is left.


# %%
# NBVAL_CHECK_OUTPUT
def shares(strategy, size):
    """Samples of each replica, from one global batch of this size."""
    data = tf.data.Dataset.range(size).batch(size)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    return [len(share) for share in strategy.experimental_local_results(batch)]


eight = tf.distribute.MirroredStrategy(EIGHT)
for size in [512, 20]:
    print(f"global batch {size:3} on {eight.num_replicas_in_sync} replicas: {shares(eight, size)}")

# %% [markdown]
# 512 over 8 is 64 each. A batch of 32, as a program for one device often has, would be 4 each. Multiply the batch by `strategy.num_replicas_in_sync` when you want to keep the *local* size; what the learning rate should then do is measured in [lesson 05](05_ddp_in_practice.ipynb). In the last line the shares are not equal, and one replica gets nothing. Remember them: a wrong loss and a crash of `fit`, below, begin there.
#
# ## A mirrored variable, seen from inside
#
# A variable that is made inside `strategy.scope()` is a **mirrored variable**: one name, and one copy on each device.
#
# **Predict.** `w` is made inside the scope, `outside` is not. How many copies has each?

# %%
# NBVAL_CHECK_OUTPUT
strategy = tf.distribute.MirroredStrategy(DEVICES)
with strategy.scope():
    w = tf.Variable(3.0)
outside = tf.Variable(3.0)


def copies(variable):
    return strategy.experimental_local_results(variable)


for name, variable in {"w": w, "outside": outside}.items():
    print(f"{name}, a {type(variable).__name__}:")
    for copy in copies(variable):
        print(f"    value {copy.numpy()} on device number {copy.device[-1]}")

# %% [markdown]
# `strategy.run(function)` calls a function once for each replica, and there `w` means the replica's own copy. Inside, `all_reduce` brings the replicas together.
#
# Here is one training step by hand, on four numbers. The model is $w x$, and the loss is the mean of $w x$, so the gradient is the mean of $x$. Replica 0 has 1 and 2, replica 1 has 3 and 4. The learning rate is 1, and $w$ starts at 3.
#
# **Predict.** What is $w$ after the step on one device that has all four numbers? And what do the two copies hold when each replica makes its update without asking the other?

# %%
# NBVAL_CHECK_OUTPUT
parts = [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])]
mine = strategy.experimental_distribute_values_from_function(
    lambda context: parts[context.replica_id_in_sync_group]
)


@tf.function
def step_alone(x):
    strategy.run(lambda x: w.assign_sub(tf.reduce_mean(x)), args=(x,))


@tf.function
def step_together(x):
    def on_replica(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("sum", tf.reduce_mean(x))
        w.assign_sub(total / context.num_replicas_in_sync)

    strategy.run(on_replica, args=(x,))


for step in [step_together, step_alone]:
    w.assign(3.0)  # outside of run: all copies
    step(mine)
    print(
        f"{step.__name__:13}  copies {[float(copy.numpy()) for copy in copies(w)]}  w reads",
        w.numpy(),
    )

# %% [markdown]
# One device computes $3 - 2.5 = 0.5$, and so do both replicas *together*. *Alone* they become two models, and nothing complains: reading `w` shows you the copy of the first device. So the word *mirrored* promises copies, not equal copies. Whoever writes to a variable inside `run` must write the same on all replicas. A Keras optimizer does: it sums the gradients over the replicas first.
#
# ### Which variables of a real model are equal?
#
# Here is a small model with BatchNorm and Adam, after a few steps of `fit`. BatchNorm keeps a moving mean of its inputs. Keras follows the loss in a metric, which adds up the losses of the samples that a replica saw.
#
# **Predict.** Six variables: the kernel of the dense layer, Adam's momentum of it, Adam's step counter, BatchNorm's gamma (a weight), its moving mean, and the metric's sum. Whose copies are equal?


# %%
# NBVAL_CHECK_OUTPUT
def audit(variable):
    values = [copy.numpy() for copy in copies(variable)]
    equal = all(np.array_equal(values[0], value) for value in values)
    return f"{type(variable).__name__:18} copies {len(values)}, equal: {equal}"


keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).normal(size=[64, 4]).astype("float32")
model.fit(x, x[:, :1], batch_size=16, verbose=0)

seen = {
    "kernel of Dense": model.layers[1].kernel,
    "Adam's momentum of it": model.optimizer._momentums[-2],
    "Adam's step counter": model.optimizer.iterations,
    "BatchNorm's gamma": model.layers[0].gamma,
    "BatchNorm's moving mean": model.layers[0].moving_mean,
    "the metric's sum": model.metrics[0].total,
}
for name, variable in seen.items():
    print(f"{name:24} {audit(variable.value)}")

moving_mean = model.layers[0].moving_mean
first, second = (copy.numpy() for copy in copies(moving_mean.value))
total = model.metrics[0].total.value
added = sum(copy.numpy() for copy in copies(total))
print("reading the moving mean gives replica 0's:", np.array_equal(moving_mean.numpy(), first))
print("reading the metric's sum gives both added:", np.isclose(total.numpy(), added))
assert not np.array_equal(first, second)

# %% [markdown]
# Weights and optimizer are mirrored, and equal. The sum in the metric is a **sync-on-read** variable: each replica adds for itself, and only reading puts the copies together.
#
# BatchNorm's moving mean is a mirrored variable whose copies differ. Each replica normalises and averages its own share, and no message is sent. So replica 1 evaluates with other statistics than replica 0, and you read, and so save, those of replica 0. With BatchNorm, then, two replicas do not compute what one device computes; a test below shows it. [`BatchNormalization(synchronized=True)`](https://keras.io/api/layers/normalization_layers/batch_normalization/) shares the statistics in every step.
#
# ## Choose the strategy by what the machine has
#
# With two GPUs you want `MirroredStrategy`, otherwise the **default strategy**, which is no strategy: one replica, on the device that TensorFlow prefers. A blog post of about 2022 on TensorFlow's strategies does so too, but its branch for "otherwise" uses `gpus[0]`. The cell tries both versions on made-up lists of *names*; on a GPU machine they are `[gpu.name for gpu in tf.config.list_logical_devices("GPU")]`. Why a list at all? `MirroredStrategy()` takes all GPUs that it sees, but without any it takes all *logical CPUs*: in this notebook eight.


# %% then="strategy = OneDeviceStrategy(gpus[0])  # when there are fewer than two" now="strategy = tf.distribute.get_strategy()" since="never right: an IndexError on a machine without a GPU"
# NBVAL_CHECK_OUTPUT
def as_posted(gpus):
    if len(gpus) >= 2:
        return tf.distribute.MirroredStrategy(gpus)
    return tf.distribute.OneDeviceStrategy(gpus[0])


def choose_strategy(gpus):
    return as_posted(gpus) if len(gpus) >= 2 else tf.distribute.get_strategy()


for found in [[], DEVICES[:1], DEVICES]:
    for choose in [as_posted, choose_strategy]:
        try:
            said = f"{choose(found).num_replicas_in_sync} in sync"
        except IndexError as error:
            said = f"IndexError: {error}"
        print(f"{len(found)} found, {choose.__name__:15} {said}")
    assert choose_strategy(found).num_replicas_in_sync == max(1, len(found))
# without a list: all GPUs, or all logical CPUs
assert len(gpus) > 1 or tf.distribute.MirroredStrategy().num_replicas_in_sync == len(EIGHT)

# %% [markdown]
# Print `num_replicas_in_sync` at the top of your programs. It is the number that says whether the second device is used at all.
#
# ## A CNN for photographs
#
# The post trains a CNN on pictures of 150 × 150 pixels with two classes. Here the pictures are patches of photographs, with a question whose answer is known for certain: is the patch **upright**, or **turned** by 90 or 180 degrees? Half of the patches are turned by us. No photograph is in both training and validation.


# %%
# NBVAL_CHECK_OUTPUT
def turn_half(patches, seed):
    """Turn half of the patches by 90 or 180 degrees; label 1: turned."""
    rng = np.random.default_rng(seed)
    turned = rng.permutation(len(patches)) < len(patches) // 2
    quarters = np.where(turned, rng.integers(1, 3, len(patches)), 0)
    pictures = [np.rot90(patch, quarter) for patch, quarter in zip(patches, quarters, strict=True)]
    return np.stack(pictures), turned.astype("float32")[:, None]


photos = photo_patches(size=150)
train, validation = (turn_half(part, seed) for seed, part in enumerate(photos))
for name, (pictures, labels) in {"train": train, "validation": validation}.items():
    print(f"{name}: {len(pictures)} patches, {labels.mean():.2f} of them turned")

# %%
fig, axes = plt.subplots(1, 6, figsize=(9, 2))
for ax, picture, label in zip(axes, train[0], train[1][:, 0], strict=False):
    ax.imshow(picture[::2, ::2])
    ax.set_title("turned" if label else "upright", fontsize=10)
    ax.axis("off")
plots.show(
    fig,
    name="upright-or-turned",
    alt="Six patches of photographs in a row, each with its label, upright or turned.",
)

# %% [markdown]
# The label is true of every patch, but you cannot see it on each: a piece of sky looks the same from all sides. So no model can reach 100 %.
#
# The model is the post's, layer by layer. **Predict.** Read `cnn()` below, and stop before the output. In which layer are most of its parameters? And do the convolutions or the dense layers multiply more?


# %%
# NBVAL_CHECK_OUTPUT
def cnn():
    blocks = [keras.Input([150, 150, 3])]
    for filters in [32, 64, 128, 128]:
        blocks += [layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D(2)]
    head = [layers.Flatten(), layers.Dropout(0.5), layers.Dense(512, activation="relu")]
    return keras.Sequential([*blocks, *head, layers.Dense(1, activation="sigmoid")])


keras.utils.set_random_seed(0)
with strategy.scope():
    model = cnn()
    model.compile(keras.optimizers.Adam(1e-4), "binary_crossentropy", metrics=["accuracy"])

parameters, products = {}, {}
for layer in model.layers:
    if layer.count_params():  # a convolution uses its kernel once for each pixel that it gives
        pixels = np.prod(layer.output.shape[1:3]) if isinstance(layer, layers.Conv2D) else 1
        parameters[layer] = layer.count_params()
        products[layer] = int(pixels * np.prod(layer.kernel.shape))
        print(
            f"{type(layer).__name__:7} {parameters[layer]:9,} parameters {products[layer]:11,} products"
        )
dense = model.layers[-2]
print(f"the first dense layer has {parameters[dense] / model.count_params():.0%} of the parameters")
print(
    f"and makes {products[dense] / sum(products.values()):.0%} of the multiplications of a picture"
)

# %% [markdown]
# So one layer makes the all-reduce long, and others the computing.
#
# The post trains 100 epochs of 100 steps, and validates each on 50. The next cell makes the same call with smaller numbers. `steps_per_epoch` needs a data set that never ends: `repeat()`.


# %%
EPOCHS, STEPS, VALIDATION_STEPS, BATCH = 3, 2, 2, 2  # the batch is global


def pipeline(pictures, labels):
    data = tf.data.Dataset.from_tensor_slices((pictures, labels)).shuffle(400, seed=0).repeat()
    return data.batch(BATCH).map(lambda x, y: (tf.cast(x, tf.float32) / 255, y))


print("each replica's share of a step:", shares(strategy, BATCH))
with tqdm(total=EPOCHS, desc="epochs", file=sys.stdout) as bar:
    history = model.fit(
        pipeline(*train),
        validation_data=pipeline(*validation),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        validation_steps=VALIDATION_STEPS,
        shuffle=False,  # the pipeline shuffles; without this Keras warns
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: bar.update())],
    ).history

print("epoch  " + "  ".join(f"{name:>12}" for name in history))
for epoch, row in enumerate(zip(*history.values(), strict=True), 1):
    print(f"{epoch:5}  " + "  ".join(f"{value:12.3f}" for value in row))

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 2.6))
epochs = range(1, EPOCHS + 1)
for ax, what, guessing in zip(axes, ["loss", "accuracy"], [np.log(2), 0.5], strict=True):
    ax.plot(epochs, history[what], label=f"training, {STEPS * BATCH} patches an epoch")
    checked = VALIDATION_STEPS * BATCH
    ax.plot(epochs, history[f"val_{what}"], label=f"validation, {checked} patches")
    ax.axhline(guessing, color="black", linestyle=":", marker="", label="guessing")
    ax.set(xlabel=f"epoch ({STEPS} steps each)", ylabel=what, xticks=epochs)
axes[1].set_ylim(0, 1)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
last = f"validation accuracy {history['val_accuracy'][-1]:.2f}"
fig.suptitle(f"{EPOCHS * STEPS} steps run on both replicas, and are too few to judge the model")
plots.show(
    fig,
    name="training-curves",
    alt=f"Training curves of the CNN over {EPOCHS} epochs, loss on the left and accuracy on the "
    f"right, for training and validation, with a dotted line for guessing. At the end: {last}.",
)

# %% [markdown]
# What do these curves show? That the program runs from end to end, on both replicas, and no more. Six steps see 12 patches, and in a validation of 4 patches one changed answer moves the accuracy by 25 percentage points.
#
# ### "The model must be compiled inside the block"
#
# The post calls this most important. The Keras guide says: create the variables inside the scope, and better call `fit` there too. The test: a small model and its `compile`, each inside or outside (four cases); a fifth where all is inside but the optimizer, which was made before. An optimizer makes its first variables (the count of steps, the learning rate) when it is made, the others in the first step. `fit` always stands outside.
#
# **Predict.** Keras does not mix variables that belong to different strategies. Which of the five fail? Which of the others use both devices?


# %%
# NBVAL_CHECK_OUTPUT
def small():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input([4]), layers.Dense(1)])


def attempt(model_scope, compile_scope, optimizer=None):
    with model_scope.scope():
        model = small()
    doing = "compile"
    try:
        with compile_scope.scope():
            model.compile(optimizer or keras.optimizers.Adam(), "mse")
        doing = "fit"
        model.fit(x, x[:, :1], batch_size=64, verbose=0)
    except RuntimeError as error:
        return f"{doing} fails: {str(error).split(':')[0].split(' for <')[0]}"
    return f"trained, copies of each weight: {len(copies(model.layers[0].kernel.value))}"


default = tf.distribute.get_strategy()  # its scope changes nothing
print("both inside             ", attempt(strategy, strategy))
print("only the model inside   ", attempt(strategy, default))
print("only compile inside     ", attempt(default, strategy))
print("both outside            ", attempt(default, default))
print("only the optimizer not  ", attempt(strategy, strategy, keras.optimizers.Adam()))

# %% [markdown]
# The post is right: model, optimizer and `compile` belong inside. `fit` remembers the strategy and may stand outside. Half a scope ends with an error that says so. The dangerous case is no scope at all: it trains, on *one* device, and nothing tells you. Count the copies.
#
# ## The Keras guide, from end to end
#
# The [guide of Keras](https://keras.io/guides/distributed_training_with_tensorflow/) trains two dense layers of 256 on MNIST with Adam, a batch of 32 and two epochs. Its page stores the output of a run on *one* device (`Number of devices: 1`): validation accuracy 0.957 and 0.972, test accuracy 0.967. Here it runs on two replicas.


# %%
def guide(data, training, held_back):
    """The guide's model and metrics; training and held_back: numbers of images."""
    (x, y), (x_test, y_test) = data
    x, x_test = (part.reshape(-1, 784).astype("float32") / 255 for part in (x, x_test))

    def batches(x, y):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(32)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        dense = [layers.Dense(256, activation="relu"), layers.Dense(256, activation="relu")]
        model = keras.Sequential([keras.Input([784]), *dense, layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=[keras.metrics.SparseCategoricalAccuracy("accuracy")])
        train = batches(x[:training], y[:training])
        validation = batches(x[-held_back:], y[-held_back:])
        seen = model.fit(train, epochs=2, validation_data=validation, verbose=0, shuffle=False)
        test = model.evaluate(batches(x_test, y_test), verbose=0, return_dict=True)
    print(f"{training:,} images to train, {held_back:,} to validate, {len(y_test):,} to test")
    for epoch in range(2):
        values = [f"{name} {values[epoch]:.3f}" for name, values in seen.history.items()]
        print(f"  epoch {epoch + 1}: " + ", ".join(values))
    print("  test:    " + ", ".join(f"{name} {value:.3f}" for name, value in test.items()))


print(f"Number of devices: {strategy.num_replicas_in_sync}")
print(MNIST_NOTE)
guide(mnist(), training=640, held_back=192)

# %% [markdown]
# This shows that the guide's program runs on two replicas. It must not be held against the guide's numbers: 640 images and 40 steps here, 50,000 images and 3,126 steps there. The next cell runs all of MNIST if Keras has it in its cache on your machine: expect some minutes.

# %%
try:
    full = mnist(full=True)
except DataError:
    print(
        "full MNIST: not measured, it is not in Keras' cache on this machine. To download it once:"
    )
    print('    python -c "import keras; keras.datasets.mnist.load_data()"')
else:
    print("full MNIST, on two replicas:")
    guide(full, training=50_000, held_back=10_000)

# %% [markdown]
# ## A loop of your own: what does a replica divide by?
#
# In `fit` Keras scales the loss for you. In a loop of your own you do it. The rule: the replicas' gradients are *summed*. So each replica must give its share of the global mean: the sum over its own samples, divided by the size of the **global** batch. `tf.nn.compute_average_loss` does that, if you tell it the size.
#
# **Predict.** The losses of four samples are 1 and 2 on replica 0, 3 and 4 on replica 1. Their mean is 2.5. What is the sum over the replicas when each takes the mean of its own? And with three samples, 1 and 2 here, 3 there?


# %%
# NBVAL_CHECK_OUTPUT
def own_mean(each, size):
    return tf.reduce_mean(each)


def size_guessed(each, size):
    return tf.nn.compute_average_loss(each)  # takes the local size times the replicas


def size_given(each, size):
    return tf.nn.compute_average_loss(each, global_batch_size=size)


WAYS = [own_mean, size_guessed, size_given]
for losses in [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0]]:
    print(f"losses {losses}, mean {np.mean(losses)}")
    size = len(losses)
    data = tf.data.Dataset.from_tensor_slices(losses).batch(size)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    for way in WAYS:
        run = tf.function(
            lambda each, way=way, n=size: strategy.run(way, (each, n)), autograph=False
        )
        print(f"    {way.__name__:12} {strategy.reduce('SUM', run(batch), axis=None).numpy():.2f}")

for kind in [keras.optimizers.SGD, keras.optimizers.Adam]:
    moves = []
    for gradient in [0.5, 1.0]:  # as it should be, and twice that
        weight = keras.Variable(1.0)
        kind(learning_rate=0.1).apply([tf.constant(gradient)], [weight])
        moves.append(1 - weight.numpy())
    print(f"first step of {kind.__name__}: {moves[0]:.2f}, with twice the gradient {moves[1]:.2f}")

# %% [markdown]
# With equal shares the replica's own mean makes the loss, and every gradient, as many times too large as there are replicas. For SGD that is a learning rate that grows with the machine. Adam divides a gradient by its usual size, so there the factor cancels, and the mistake hides. Without a size, `compute_average_loss` assumes that all shares are equal; where they are not it gives a mean of means. Only the size of the global batch is right in both cases.
#
# ## Two replicas equal one device
#
# That synchronous training converges as one device does is a claim. Here is a test: ten steps with a loop of your own on digits, on one device and on two replicas. The global batch is 63, so the shares are not equal. In float64 rounding is small, so a mistake cannot hide behind it.
#
# The all-reduce itself can be done in several ways, which may differ in speed but not in the result: `MirroredStrategy(cross_device_ops=...)` takes `NcclAllReduce` (NVIDIA GPUs only), `ReductionToOneDevice` (all send to one, which sends back) or [`HierarchicalCopyAllReduce`](https://www.tensorflow.org/api_docs/python/tf/distribute/HierarchicalCopyAllReduce) (in stages, made for the wiring of NVIDIA's DGX-1). The test uses TensorFlow's choice for your devices, and then the last.
#
# **Predict.** Which of the four comparisons say True? BatchNorm: think of the audit.


# %%
# NBVAL_CHECK_OUTPUT
(digits, answers), _ = mnist()
digits, answers = digits[:630].reshape(-1, 784) / 255, answers[:630].astype("int32")


def ten_steps(strategy, scale=size_given, between=(), batch=63):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        norm = [layer(dtype="float64") for layer in between]
        dense = [layers.Dense(32, "relu", dtype="float64"), layers.Dense(10, dtype="float64")]
        model = keras.Sequential([keras.Input([784], dtype="float64"), dense[0], *norm, dense[1]])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = scale(each, batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # autograph=False: no `if` or `for` in the step has to be translated
    step = tf.function(lambda x, y: strategy.run(on_replica, args=(x, y)), autograph=False)
    data = tf.data.Dataset.from_tensor_slices((digits, answers)).batch(batch)
    for x, y in strategy.experimental_distribute_dataset(data):
        step(x, y)
    return [weight.numpy() for weight in model.trainable_variables]


stages = tf.distribute.HierarchicalCopyAllReduce()
in_stages = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=stages)
norm = [layers.BatchNormalization]
one, one_norm = ten_steps(default), ten_steps(default, between=norm)
runs = {
    "the right scale": (one, ten_steps(strategy)),
    "... and HierarchicalCopy": (one, ten_steps(in_stages)),
    "each replica's own mean": (one, ten_steps(strategy, own_mean)),
    "the right scale, with BatchNorm": (one_norm, ten_steps(strategy, between=norm)),
}
difference = {
    name: max(np.abs(a - b).max() for a, b in zip(*pair, strict=True))
    for name, pair in runs.items()
}
for name, largest in difference.items():
    print(f"{name:31} equals one device to 1e-12: {largest < 1e-12}")
assert [d < 1e-12 for d in difference.values()] == [True, True, False, False]

# %%
for name, largest in difference.items():
    print(f"{name:31} largest difference of a weight: {largest:.1e}")

# %% [markdown]
# With the right scale the weights agree to 12 decimal places. They need not be equal to the last bit: two partial sums are added in another order than one long sum, and rounding differs. The replica's own mean, and BatchNorm, are off by far more than rounding. So the claim holds for a model whose layers treat each sample by itself. BatchNorm does not, and Dropout, which the CNN has, draws its random numbers on each replica.
#
# ## Break it: the first batch
#
# Now shares that are not equal, with Keras' own loops: a batch of 63 as the first of `fit` and of `evaluate`; and after a first batch of 64 that crashes nothing, one of 63, or one of a single sample, which leaves replica 1 with an *empty* share.
#
# **Predict.** Which of them work? And which of those make the update of one device?


# %%
# NBVAL_CHECK_OUTPUT
def fit_small(strategy, *sizes):
    """Train on batches of these sizes; return the model, and the weights each of them makes."""
    with strategy.scope():
        model = small()
        model.compile("sgd", "mse")
    start, after = model.get_weights(), []

    def keep(batch, logs):
        after.append(model.get_weights())
        model.set_weights(start)  # so that each batch is judged by itself

    rows = np.concatenate([10 * x[:1], x[1:]])  # one sample that weighs
    rows = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1]))
    batches = rows.take(sizes[0]).batch(sizes[0])
    for size in sizes[1:]:
        batches = batches.concatenate(rows.take(size).batch(size))
    model.fit(
        batches,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=keep)],
    )
    return model, after


def average_by_hand():
    data = tf.data.Dataset.from_tensor_slices(x[:63]).batch(63)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    strategy.reduce("MEAN", batch, axis=None)


SIZES = [64, 63, 1]
(trained, two), (_, one) = fit_small(strategy, *SIZES), fit_small(default, *SIZES)
apart = [
    max(np.abs(a - b).max() for a, b in zip(*step, strict=True))
    for step in zip(two, one, strict=True)
]
for size, largest in zip(SIZES, apart, strict=True):
    given = shares(strategy, size)
    print(f"fit, batch of {size:2}, shares {given}: equals one device to 1e-5: {largest < 1e-5}")
assert [largest < 1e-5 for largest in apart] == [True, False, False]

calls = {
    "fit, first batch 63": lambda: fit_small(strategy, 63),
    "evaluate, first batch 63": lambda: trained.evaluate(x[:63], x[:63, :1], 63, verbose=0),
    "averaging 63 by hand": average_by_hand,
}
for name, call in calls.items():
    try:
        call()
    except tf.errors.InvalidArgumentError as error:
        print(f"{name:24} fails:", re.search(r"Input 0.*?\] != .*?\]", str(error))[0])
    else:
        raise AssertionError(f"{name} works: mend this lesson")

# %%
for size, largest in zip(SIZES, apart, strict=True):
    print(f"largest difference after a batch of {size:2}: {largest:.0e}")
start = small().get_weights()[0]
ratio = (two[-1][0] - start) / (one[-1][0] - start)
print(f"from a batch of 1 two replicas make {np.median(ratio):.2f} of the step of one device")

# %% [markdown]
# Here is the cause of the crash. `fit` and `evaluate` first look at one batch to learn its shape. Under a strategy it has two shares, and Keras 3 makes one of them by *averaging the shares number by number* (`_maybe_symbolic_build` in Keras' TensorFlow trainer). The last call does the same by hand. Shares of 32 and 31 cannot be added. Later batches are not looked at, so an odd *last* batch trains. But not as on one device: `fit` divides each replica's own mean by the number of replicas (`scale_loss_for_distribution` in Keras), which is a mean of means; the single sample's gradient is halved, since the empty share adds nothing.
#
# **Mend:** make the first batch divisible. `batch(size, drop_remainder=True)` with a size that divides cures both, and leaves out the last few samples of an epoch; other ones each time, if you shuffle. For `evaluate`, where each sample counts, the exercise has a better way.
#
# ## How fast is it?
#
# So far nothing was timed, and for a reason. Here is one training step of a small CNN on 128 digits, on one replica, and on this lesson's two, which share the batch.
#
# **Predict.** Are two logical CPUs faster than one? Think of what such a device has of its own.


# %%
def make_step(strategy, x, y, size):
    with strategy.scope():
        convolutions = [layers.Conv2D(n, 3, activation="relu") for n in (16, 32)]
        dense = [layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(10)]
        model = keras.Sequential([keras.Input([28, 28, 1]), *convolutions, *dense])
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

    def on_replica(x, y):
        with tf.GradientTape() as tape:
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function(autograph=False)
    def step(x, y):
        return strategy.reduce("SUM", strategy.run(on_replica, args=(x, y)), axis=None)

    return lambda: step(x, y).numpy()


def some_digits(first, last):
    (x, y), _ = mnist()
    x = tf.constant(x[first:last, :, :, None] / 255, tf.float32)
    return x, tf.constant(y[first:last], tf.int32)


SIZE, ROUNDS = 128, 3
data = tf.data.Dataset.from_tensors(some_digits(0, SIZE)).unbatch().batch(SIZE)
shared = next(iter(strategy.experimental_distribute_dataset(data)))
timings = compare(
    {
        "one": make_step(default, *some_digits(0, SIZE), SIZE),
        "two": make_step(strategy, *shared, SIZE),
    },
    repeat=ROUNDS,
)
print(speedup_table([("two replicas", timings["one"], timings["two"], 2)]))

# %% [markdown]
# (A speed-up is formed within each round, and the median of those is shown; it need not be the ratio of the two medians beside it.)
#
# A logical device is a name. It has no core of its own: the operations of both replicas wait for the same thread pool. One replica may already use that pool, so nothing is promised; what the second gains or loses depends on how many threads the first leaves idle. Logical devices are right for learning, and for testing a program before it meets two GPUs.
#
# For a speed-up each replica needs a device of its own. Without a GPU that is a process pinned to a core. `MultiWorkerMirroredStrategy` is the same idea across processes. Here is the same step: by worker 0 alone with the whole batch, then by both with half each.


# %%
def worker():
    """Runs in two processes, each on a device of its own."""
    both, alone = tf.distribute.MultiWorkerMirroredStrategy(), tf.distribute.get_strategy()
    me, half = both.cluster_resolver.task_id, SIZE // 2
    one = make_step(alone, *some_digits(0, SIZE), SIZE)
    two = make_step(both, *some_digits(me * half, (me + 1) * half), SIZE)

    def one_number():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

    @tf.function(autograph=False)
    def meet():
        return both.run(one_number)

    seconds = {"one": [], "two": []}
    for turn in range(ROUNDS + 1):  # the first round warms up
        for way in ["one", "two"] if turn % 2 else ["two", "one"]:
            meet().numpy()  # both start at the same moment
            start = time.perf_counter()
            if way == "two":
                two()
            elif me == 0:  # worker 1 waits at the next meeting
                one()
            seconds[way].append(time.perf_counter() - start)
    return [Timing(tuple(runs[1:])) for runs in seconds.values()]


processes, _ = launch(worker, 2, framework="tensorflow")
rows = [
    ("two replicas, one process", timings["one"], timings["two"], 2),
    ("two processes", *processes, 2),
]
print(speedup_table(rows))

# %% [markdown]
# Each row has its own "one". Without GPUs that is the whole process with all its threads above, and one pinned core below. What the second core brings to how much computing, and where messages eat it up, is measured in [lesson 12](12_multi_worker.ipynb). With two GPUs `MirroredStrategy` drives both from one process.
#
# ## Then → now
#
# `dead` lists calls of older programs. Today: `learning_rate=`, a schedule in place of `decay=`, `keras.optimizers.Adam` in place of `legacy`, and a strategy's scope in place of `multi_gpu_model`.


# %% then="Adam(lr=1e-4), Adam(decay=1e-6), keras.utils.multi_gpu_model, tf.keras.optimizers.legacy.Adam" now="Adam(learning_rate=number or schedule) in MirroredStrategy.scope()" since="Keras 3; multi_gpu_model: TensorFlow 2.4"
# NBVAL_CHECK_OUTPUT
dead = {
    "Adam(lr=1e-4)": lambda: keras.optimizers.Adam(lr=1e-4),
    "multi_gpu_model": lambda: keras.utils.multi_gpu_model(model, gpus=2),
    "legacy.Adam": lambda: tf.keras.optimizers.legacy.Adam(1e-4),
    "Adam(decay=1e-6)": lambda: keras.optimizers.Adam(1e-4, decay=1e-6),
}
for name, call in dead.items():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # decay= only warns, and is then ignored
        try:
            call()
        except (AttributeError, ImportError, UserWarning, ValueError) as error:
            print(f"{name:17} {type(error).__name__}: {str(error)[:59]}")
        else:
            raise AssertionError(f"{name} works again")
rate = keras.optimizers.schedules.InverseTimeDecay(1e-4, decay_steps=1, decay_rate=1e-6)
assert keras.optimizers.Adam(rate).learning_rate < 1e-4 + 1e-9  # today's lr= and decay=

# %% [markdown]
# ## What this machine cannot show
#
# Without two GPUs you saw neither NCCL (NVIDIA's library for messages between GPUs) nor a speed-up of `MirroredStrategy` itself. Results on real GPUs: **not measured** yet; the multi-GPU path was not run by the authors.
#
# ## Exercise
#
# [Exercise 10](../exercises/10_mirrored_strategy.ipynb): a replica's share of the loss, a data set whose first batch always divides, and an audit that finds the mirrored variables which have drifted apart. About 30 minutes.
#
# ## Recap
#
# A strategy's scope gives each variable a copy on every device, and equal updates keep the copies equal. Batch by the global size; in a loop of your own divide by it too. Two replicas then compute what one device computes, if each layer treats each sample by itself; whether they do it faster depends on what a device is.
#
# 1. A loop of your own, with SGD, learns well on one GPU and diverges on eight. What do you look at first?
# 2. `fit` on two GPUs is exactly as fast as on one. Which number do you print?
# 3. 1,001 samples, batches of 1,001, two replicas: what does Keras 3 do, and what with batches of 500?
#
# <details><summary>Answers</summary>
#
# 1. What the loss is divided by. With each replica's own mean the gradients are eight times too large.
# 2. `strategy.num_replicas_in_sync`, and the number of copies of a weight: the model may have been made outside the scope.
# 3. The first batch has shares of 501 and 500: `fit` fails. Batches of 500 divide; the last batch of one sample trains, but not as it would on one device.
#
# </details>
#
# Go on with [exercise 10](../exercises/10_mirrored_strategy.ipynb).
