"""Lesson 11: a report that the student's own process forges gets no points for work not done."""

import pytest
from test_tasks import findings_of

from course_utils.grading import get_task

pytestmark = pytest.mark.slow


def passed(task_id, source, seed=5):
    """The properties that hold of an answer, by the words in which they are said."""
    findings = findings_of(get_task(task_id), source, seed)
    return {finding.text for finding in findings if finding.passed}


# --- 11-newest --------------------------------------------------------------------------

STOP = "Ctrl-C during a load comes through"
NONE = "None is returned where nothing loads"


def test_newest_the_inputs_do_not_list_the_whole_files():
    cheat = """
import sys
def newest(folder, load):
    best = max(sys._getframe(1).f_locals["case"]["good"], default=None)
    return best and (best, load(f"{folder}/ckpt-{best}.keras"))
"""
    assert passed("11-newest", cheat) == set()


def test_newest_an_interrupt_of_ones_own_proves_no_load():
    cheat = """
def newest(folder, load):
    raise KeyboardInterrupt
"""
    with pytest.raises(KeyboardInterrupt):  # where `load` does not raise it, it is a person's
        passed("11-newest", cheat)
    only_there = """
import sys
def newest(folder, load):
    if load.__defaults__[-1] or load.__name__ == "interrupted":
        raise KeyboardInterrupt
"""
    assert passed("11-newest", only_there) == {NONE}


def test_newest_the_number_alone_is_no_proof_of_a_load():
    """The right epoch, with a model in whose weights the number stands, as once in the files."""
    cheat = """
import sys
import keras, numpy as np
def newest(folder, load):
    case = sys._getframe(1).f_locals["case"]
    whole = [f["name"] for f in case["files"] if f["cut"] >= 1 and f["name"].endswith(".keras")]
    epochs = [int(name[5:-6]) for name in whole if name.startswith("ckpt-")]
    if not epochs:
        return None
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.full([1, 1], float(max(epochs)))])
    return max(epochs), model
"""
    assert passed("11-newest", cheat) == {NONE}


def test_newest_what_did_not_come_from_load_is_not_called_frugal():
    source = """
import keras, os, re
def newest(folder, load):
    found = [re.fullmatch(r"ckpt-(\\d+)\\.keras", name) for name in os.listdir(folder)]
    for epoch in sorted((int(m[1]) for m in found if m), reverse=True):
        try:
            return epoch, keras.models.load_model(os.path.join(folder, f"ckpt-{epoch}.keras"))
        except Exception as error:
            print(epoch, error)
"""
    assert not {STOP, "no file is loaded that need not be"} & passed("11-newest", source)


@pytest.mark.parametrize("end", ["raise", "raise KeyboardInterrupt", "raise KeyboardInterrupt()"])
def test_newest_an_interrupt_that_is_passed_on_is_heard(end):
    source = f"""
import os
def newest(folder, load):
    try:
        return 1, load(os.path.join(folder, "ckpt-1.keras"))
    except KeyboardInterrupt:
        {end}
"""
    assert passed("11-newest", source) == {STOP}


# --- 11-resume --------------------------------------------------------------------------

PLAYED = """
import os
def train(make_model, x, y, epochs, folder, callbacks):
    note = os.path.join(folder, "done")
    open(note, "a").close()
    MODEL
    for epoch in range(os.path.getsize(note), epochs):
        callbacks[0].on_epoch_begin(epoch)
        callbacks[0].on_train_batch_end(1)
        open(note, "a").write("x")
    model = make_model()
    model.fit(x, y, epochs=epochs, shuffle=False, verbose=0)
    return model
"""
TRAINED = "model = make_model(); model.fit(x, y, epochs=epochs, shuffle=False, verbose=0)"


@pytest.mark.parametrize(
    "model",
    ["pass", "callbacks[0].set_model(make_model())", TRAINED + "; callbacks[0].set_model(model)"],
    ids=["no model", "an untrained model", "a trained model"],
)
def test_resume_callbacks_that_are_played_prove_no_model(model):
    assert passed("11-resume", PLAYED.replace("MODEL", model)) == set()


def test_resume_the_epoch_is_not_to_be_had_from_the_process_that_was_killed():
    """Another training comes in between, and the folder has another name: a table finds neither."""
    source = """
import os, keras
DONE = {}
def train(make_model, x, y, epochs, folder, callbacks):
    path = os.path.join(folder, "model.keras")
    model = keras.models.load_model(path) if os.path.exists(path) else make_model()
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: DONE.update({folder: epoch + 1}))
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=epochs, initial_epoch=DONE.get(folder, 0), shuffle=False, verbose=0,
              callbacks=[*callbacks, count, save])
    return model
"""
    assert passed("11-resume", source) == {
        "until the kill, each epoch is trained once",
        "when all epochs are done, nothing is trained",
    }


# --- 11-pipeline ------------------------------------------------------------------------

MADE_UP = """
import random
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    calls = []
    def rows():
        for p in random.sample(range(number), number):
            calls.append(p)
            yield {"picture": p, "decoded": p, "grey": p, "augmented": STAMP}
    kinds = {k: tf.TensorSpec([], tf.int64) for k in ("picture", "decoded", "grey", "augmented")}
    data = tf.data.Dataset.from_generator(rows, output_signature=kinds).batch(local * replicas)
    return type(files)(data, ["map parallel", "prefetch"])
"""


def test_pipeline_made_up_rows_prove_nothing():
    assert passed("11-pipeline", MADE_UP.replace("STAMP", "len(calls)")) == set()


def test_pipeline_without_the_files_greys_the_series_of_stamps_proves_nothing():
    first, step = get_task("11-pipeline").inputs(5)["stamps"]
    source = MADE_UP.replace("STAMP", f"{first} + {step} * len(calls)")
    assert passed("11-pipeline", source) == set()


def test_pipeline_what_was_decoded_but_not_augmented_proves_nothing():
    source = """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto, calls = tf.data.AUTOTUNE, iter(range(10**6))
    def stamp(sample):
        call = tf.numpy_function(lambda _: next(calls), [sample["picture"]], tf.int64)
        return {**sample, "augmented": tf.ensure_shape(call, [])}
    data = files.map(decode, num_parallel_calls=auto).cache().shuffle(number)
    return data.map(stamp, num_parallel_calls=auto).batch(local * replicas).prefetch(auto)
"""
    assert passed("11-pipeline", source) == set()


def test_pipeline_decoded_once_is_seen_in_the_values():
    """Whatever the data sets' methods: this one decodes outside of them, in each epoch anew."""
    source = """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    names = list(files)
    def rows():
        for name in names:
            yield augment(decode(name))
    kinds = {k: tf.TensorSpec([], tf.int64) for k in ("picture", "grey", "augmented")}
    kinds["image"] = tf.TensorSpec([8, 8, 3], tf.uint8)
    data = tf.data.Dataset.from_generator(rows, output_signature=kinds)
    return data.shuffle(number).batch(local * replicas)
"""
    found = passed("11-pipeline", source)
    assert "each picture is augmented anew in every epoch" in found
    assert "each file is decoded once, however many epochs there are" not in found
