# ---
# jupyter:
#   course:
#     rows: [K4, K5]
#     minutes: {read: 5, do: 40}
#     devices: 1
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
# # Exercise 11: a pipeline, a restart, a checkpoint that loads
#
# You write the three pieces that every long training run needs: an input pipeline whose steps stand in the right order, a training function that goes on where it was, and the choice of the checkpoint to go on from.
#
# | | |
# |---|---|
# | **Time** | 5 minutes to read, 40 to do: about 15, 15 and 10 for the three tasks |
# | **You should know** | [lesson 11, Input and checkpoints](../notebooks/11_input_and_checkpoints.ipynb) |
# | **Runs on** | every machine, with TensorFlow on the CPU: the checks use real JPEG files, real training and real `.keras` files, all of them small |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. A check takes some seconds. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("11-pipeline")` is a nudge, `hint("11-pipeline", level=2)` the way, `level=3` nearly the code.

# %%
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notices off

import tensorflow as tf

from course_utils.grading import check, hint

# %% [markdown]
# ## Task 1: order a pipeline (7 points)
#
# Five methods of a data set, once more: `map` (with `num_parallel_calls`), `cache`, `shuffle`, `batch`, `prefetch`. `shuffle` has a number, too: how many elements its buffer holds. What can come out first, of a hundred files, with a buffer of ten?

# %%
# NBVAL_CHECK_OUTPUT
hundred = tf.data.Dataset.range(100)
for buffer in (10, 100):
    tries = [next(hundred.shuffle(buffer).batch(5).as_numpy_iterator()) for _ in range(20)]
    far = max(int(batch.max()) for batch in tries)
    print(f"shuffle({buffer}): in 20 tries a first batch goes beyond number 13: {far > 13}")

# %% [markdown]
# Write `pipeline(files, decode, augment, number, local, replicas)`. It returns a data set of batches.
#
# - `files` is a data set of the names of `number` files, and `decode` makes a picture of a name. Decoding is expensive: each file must be decoded **once**, however many epochs follow. The decoded pictures fit into memory.
# - `augment` changes a picture at random. It must act **anew in every epoch**.
# - One pass over the data set is one epoch, so it needs no `repeat`. Every epoch has every picture once, in an order of its own. Any picture may come first, and may meet any other in a batch.
# - The strategy will split each of your batches over `replicas` devices, which take `local` pictures each. Only the last batch of an epoch may be smaller.
# - Call methods of data sets only, one after the other, beginning with `files`: the check notes which. Decoding and augmenting work on several pictures at a time, and the next batch is made while the model trains on this one.


# %% task="11-pipeline"
import tensorflow as tf


def pipeline(files, decode, augment, number, local, replicas):
    """Return a tf.data.Dataset of batches for synchronous training on `replicas` devices.

    files: data set of file names. decode: name -> sample. augment: sample -> sample.
    number: how many files. local: pictures of a batch for one replica.
    """
    ### BEGIN SOLUTION
    auto = tf.data.AUTOTUNE
    pictures = files.map(decode, num_parallel_calls=auto).cache()  # once for all epochs
    changed = pictures.shuffle(number).map(augment, num_parallel_calls=auto)  # in each epoch
    return changed.batch(local * replicas).prefetch(auto)
    ### END SOLUTION


# %% [markdown]
# Does it decode once, augment in every epoch, and mix all pictures?

# %% test="11-pipeline"
check("11-pipeline")

# %% [markdown]
# ## Task 2: resume at the right epoch (6 points)
#
# Write `train(make_model, x, y, epochs, folder, callbacks)`. It trains until `epochs` epochs are done **in all**, and returns the model.
#
# - After every epoch it saves into `folder`.
# - The process may be killed at any moment but that of a save. Nothing is left then but what lies in `folder`. `train` is called again with the same arguments, and goes on with the epoch that was interrupted, with the weights and the optimizer's state from the end of the one before.
# - When all epochs are done already, it trains nothing and returns the model.
#
# `make_model()` returns a compiled model; after a kill it begins with other random weights, so that only saved ones help. Call `fit` with `shuffle=False`, so that the check can compare, with `verbose=0`, and with the given `callbacks` among yours, in any order: by them the check sees which epochs run, and kills you. The check trains more than ten epochs. Before the second call it moves the folder, so `folder` is another path then, and in between it trains another model in another folder.


# %% task="11-resume"
import os

import keras


def train(make_model, x, y, epochs, folder, callbacks):
    """Train until `epochs` epochs are done in all, going on after a kill; return the model.

    make_model: returns a new compiled Keras model. x, y: NumPy arrays.
    folder: a path, as text; it exists, and is empty at the first call. callbacks: a list, to be passed on to fit.
    """
    ### BEGIN SOLUTION
    pattern = os.path.join(folder, "ckpt-{epoch}.keras")
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    model = keras.models.load_model(pattern.format(epoch=done)) if done else make_model()
    save = keras.callbacks.ModelCheckpoint(pattern)
    options = {"shuffle": False, "verbose": 0, "callbacks": [*callbacks, save]}
    model.fit(x, y, epochs=epochs, initial_epoch=done, **options)
    return model
    ### END SOLUTION


# %% [markdown]
# Does it end where a run without a break ends?

# %% test="11-resume"
check("11-resume")

# %% [markdown]
# ## Task 3: pick the newest checkpoint that loads (7 points)
#
# Write `newest(folder, load)`. It returns `(epoch, model)` of the newest checkpoint that loads, or `None`.
#
# - Checkpoints are named `ckpt-7.keras`, `ckpt-10.keras`; the newest is the one with the largest number. Only whole names count; other files, such as `ckpt-8.keras.part` or `old-ckpt-9.keras`, may lie there too.
# - `load(path)` returns the model, or raises an error when the file is torn. What it raises depends on where the file is torn, and no list of kinds is ever complete.
# - The time of a file says nothing: a copy or a change of rights sets it anew.
# - Loading is expensive: load no file that you need not load.
# - A person who presses Ctrl-C (`KeyboardInterrupt`) during a load must be heard.


# %% task="11-newest"
import os
import re


def newest(folder, load):
    """Return (epoch, model) of the newest checkpoint that loads, or None.

    folder: a path, as text. load: path -> model; raises an error for a torn file.
    """
    ### BEGIN SOLUTION
    matches = [re.fullmatch(r"ckpt-(\d+)\.keras", name) for name in os.listdir(folder)]
    for epoch in sorted((int(found[1]) for found in matches if found), reverse=True):
        try:
            return epoch, load(os.path.join(folder, f"ckpt-{epoch}.keras"))
        except Exception as error:  # Ctrl-C is no Exception, so it comes through
            print(f"ckpt-{epoch}.keras is passed over: {type(error).__name__}")
    return None
    ### END SOLUTION


# %% [markdown]
# Does it pass over what is torn, and nothing else?

# %% test="11-newest"
check("11-newest")

# %% [markdown]
# ## Done?
#
# Put task 3 into task 2, and the training survives a kill during a save as well. One way to solve each task is in the [solution of exercise 11](../solutions/11_input_and_checkpoints.ipynb). Compare it with yours after you have tried.
