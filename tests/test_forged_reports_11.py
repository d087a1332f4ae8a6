"""Lesson 11: a report that the student's own process forges gets no points for work not done."""

from types import SimpleNamespace

import pytest

from course_utils.grading import get_task
from course_utils.grading.task import copy_json
from course_utils.grading.wire import plain

pytestmark = pytest.mark.slow


def passed(task_id, source, seed=5):
    """The properties that hold of an answer, by the words in which they are said."""
    task, names = get_task(task_id), {}
    exec(source, names)
    student = SimpleNamespace(**{name: names[name] for name in task.functions})
    inputs = task.inputs(seed)
    findings = task.mark(inputs, plain(task.run(student, copy_json(inputs))))
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
    ("model", "holds"),
    [
        ("pass", set()),
        ("callbacks[0].set_model(make_model())", set()),
        # It has trained until the kill; nothing of it was saved.
        (
            TRAINED + "; callbacks[0].set_model(model)",
            {"until the kill, each epoch is trained once"},
        ),
    ],
    ids=["no model", "an untrained model", "a trained model"],
)
def test_resume_callbacks_that_are_played_prove_no_model(model, holds):
    assert passed("11-resume", PLAYED.replace("MODEL", model)) == holds
