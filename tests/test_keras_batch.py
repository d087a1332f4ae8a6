"""The batch size that is found for a Keras model: it fits, and nothing else has changed."""

import importlib.util
import os
import random
import signal
import statistics
import sys
import threading
import time

import numpy as np
import pytest

from course_utils import memory, plots
from course_utils._keras_batch import find_keras_batch_size, search
from course_utils._keras_trial import try_in_child
from course_utils._search import DoesNotFit
from course_utils.launch import RankError
from course_utils.memory import MiB

needs_tensorflow = pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow") or sys.platform != "linux",
    reason="needs TensorFlow and Linux",
)


def real(test):
    return pytest.mark.slow(needs_tensorflow(test))


# ---------------------------------------------------------------- the search, on known functions


def curves():
    """Memory of a batch size, and what the layers' outputs make of a sample; measured shapes."""
    for static in (5, 40, 70):
        for sample in (0.02, 0.4, 5.0):
            for guess in (0.4, 1.0, 2.5):
                yield lambda n, a=static, s=sample: a + s * n, guess * sample
                # another moment has the peak at first, as with many parameters
                yield lambda n, a=static, s=sample: max(1.2 * a, a + s * n), guess * sample
                # the kink of a convolution's workspace, and a jump after batch 1
                yield (
                    lambda n, a=static, s=sample: (
                        a + s * n + max(0, 0.6 * (s * n - 0.5 * (95 - a)))
                    ),
                    guess * sample,
                )
                yield lambda n, a=static, s=sample: a + s * n + 5 * (n > 1), guess * sample


def on_function(curve, guess, limit, cap=None):
    ran = []

    def attempt(batch, limit):
        ran.append(batch)
        peak = int(curve(batch) * MiB)
        if limit is not None and peak > limit:
            return {"peak": None, "second": None, "error": "no memory"}
        return {"peak": peak, "second": peak, "error": None, "per_sample": int(guess * MiB)}

    return *search(attempt, int(limit * MiB), cap), ran


def test_search_needs_six_trials_at_most_and_finds_nearly_the_largest():
    shares, counts = [], []
    for curve, guess in curves():
        for limit in (100, 400, 4000):
            trials, _, ran = on_function(curve, guess, limit)
            best = max(t.batch_size for t in trials if t.fits)
            true = next(n for n in range(best, 10**7) if curve(n + 1) > limit)
            assert len(ran) == len(trials) <= 6 and len(set(ran)) == len(ran)
            assert curve(best) <= limit
            shares.append(best / true)
            counts.append(len(ran))
    assert statistics.median(counts) <= 4
    assert statistics.median(shares) >= 0.95 and statistics.mean(shares) >= 0.9


def test_search_stops_at_the_cap_and_says_so():
    trials, stopped, ran = on_function(lambda n: 10 + n, 1.0, 1000, cap=100)
    assert ran[-1] == 100 == max(ran) and "max_batch is 100" in stopped
    assert on_function(lambda n: 10 + n, 1.0, 1000, cap=1)[2] == [1]


def test_search_stops_at_two_neighbours():
    trials, stopped, _ = on_function(lambda n: 10 + 30 * n, 30.0, 80)
    assert [t.batch_size for t in trials if t.fits][-1] == 2 and "3 is too large" in stopped


# ---------------------------------------------------------------- with TensorFlow


def make_mlp(width=128):
    import keras

    model = keras.Sequential(
        [
            keras.Input((2048,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def vectors(n):
    return np.zeros((n, 2048), "float32"), np.zeros((n,), "int32")


def make_conv():
    import keras

    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(10),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def images(n):
    return np.zeros((n, 32, 32, 3), "float32"), np.zeros((n,), "int32")


def everything(model):
    """All that a training step would change, as bytes."""
    import keras
    import tensorflow as tf

    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return (
        [(v.path, v.numpy().tobytes()) for v in variables],
        [layer.trainable for layer in model.layers],
        model.optimizer.built,
        random.getstate(),
        [np.asarray(part).tobytes() for part in np.random.get_state()[1:]],
        tf.random.get_global_generator().state.numpy().tobytes(),
        keras.src.random.seed_generator.global_seed_generator().state.numpy().tobytes(),
    )


@real
@pytest.mark.parametrize(("make", "batch"), [(make_mlp, vectors), (make_conv, images)])
def test_what_is_found_fits_is_nearly_the_largest_and_leaves_the_model_alone(
    make, batch, tmp_path, capfd
):
    model = make()
    model.train_on_batch(*batch(4))  # the optimizer then has a state to lose
    everything(model)  # makes Keras' global generator, which draws its seed
    before = everything(model)
    capfd.readouterr()
    found = find_keras_batch_size(model, batch, limit=96 * MiB)
    assert everything(model) == before
    assert len(found.trials) <= 6 and found.batch_size > 50
    assert 0.85 * 96 * MiB < found.peak <= 97 * MiB
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # no noise of the trials
    model.save(tmp_path / "model.keras")
    job = (str(tmp_path / "model.keras"), {}, batch)
    assert try_in_child(job, 120, int(1.3 * found.batch_size), 96 * MiB)["error"]
    assert f"batch size {found.batch_size}:" in str(found) and "stopped: " in str(found)
    plots._checked_title(figure := found.plot())
    plots._check_axes(figure)


@real
def test_max_batch_and_headroom():
    model = make_mlp()
    found = find_keras_batch_size(model, vectors, limit=400 * MiB, max_batch=8, headroom=0.25)
    assert (found.batch_size, found.limit, found.headroom) == (8, 400 * MiB, 0.25)
    assert found.stopped == "max_batch is 8"


@real
def test_batch_1_does_not_fit():
    with pytest.raises(DoesNotFit, match=r"batch of 1 does not fit into 16.* take \d.* MiB"):
        find_keras_batch_size(make_mlp(width=4_000), vectors, limit=16 * MiB)


@real
def test_an_abort_for_want_of_memory_is_no_fit(tmp_path):
    """TensorFlow's C++ may abort without a word; here a batch does, when it gets no memory."""

    def batch(n):
        import mmap

        try:
            mmap.mmap(-1, n * MiB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            os.abort()
        return vectors(n)

    make_mlp().save(tmp_path / "model.keras")
    job = (str(tmp_path / "model.keras"), {}, batch)
    assert try_in_child(job, 120, 8, 64 * MiB)["error"] is None
    assert try_in_child(job, 120, 80, 64 * MiB)["error"] == "SIGABRT"


@real
def test_an_abort_for_another_reason_is_an_error():
    def batch(n):
        if n > 1:
            os.write(2, b"a bug of mine\n")
            os.abort()
        return vectors(n)

    with pytest.raises(RankError) as caught:
        find_keras_batch_size(make_mlp(), batch, limit=64 * MiB)
    assert caught.value.type_name == "SIGABRT"
    assert "a bug of mine" in "".join(caught.value.__notes__)


@real
@pytest.mark.parametrize(
    ("batch", "kind", "words"),
    [
        (lambda n: {}["no such file"], "KeyError", "no such file"),
        (lambda n: vectors(4), "ValueError", "first dimension must be 1"),
        (lambda n: (np.zeros((n, 7), "float32"), np.zeros(n)), "ValueError", "2048"),
    ],
)
def test_an_error_that_is_not_about_memory_comes_here(batch, kind, words):
    with pytest.raises(RankError) as caught:
        find_keras_batch_size(make_mlp(), batch, limit=64 * MiB)
    assert caught.value.type_name == kind and words in str(caught.value)
    assert "Traceback" in caught.value.traceback


@real
def test_own_layers_and_losses_travel_with_the_model():
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def my_loss(y, p):
        return keras.ops.mean(keras.ops.square(y - p))

    model = keras.Sequential(
        [keras.Input((8,)), Twice(), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(1)]
    )
    model.compile("sgd", my_loss)
    data = np.zeros((4, 8), "float32"), np.zeros((4, 1), "float32")
    found = find_keras_batch_size(
        model, lambda n: tuple(d[:n] for d in data), limit=64 * MiB, max_batch=4
    )
    assert found.batch_size == 4


@real
def test_a_model_that_keras_cannot_rebuild_says_what_to_do():
    import keras

    class Closed(keras.layers.Layer):
        def __init__(self, thing):
            super().__init__()
            self.thing = thing

        def call(self, x):
            return x

        def get_config(self):
            return super().get_config()  # forgets `thing`

    model = keras.Sequential([keras.Input((2048,)), Closed(3), keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    with pytest.raises(RankError, match="Give your own classes a get_config") as caught:
        find_keras_batch_size(model, vectors, limit=64 * MiB)
    assert caught.value.type_name == "TypeError"


@real
def test_ctrl_c_ends_the_trial(tmp_path):
    note = tmp_path / "pid"

    def batch(n):
        note.with_suffix(".new").write_text(str(os.getpid()))
        note.with_suffix(".new").rename(note)
        time.sleep(60)

    def press():
        while not note.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    model = make_mlp()
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        find_keras_batch_size(model, batch, limit=64 * MiB)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@real
def test_bad_input_is_refused_before_any_trial():
    import keras

    model = make_mlp()
    for options, words in (
        ({}, "limit=512"),
        ({"limit": 0}, "bytes"),
        ({"limit": MiB, "max_batch": 0}, "at least 1"),
        ({"limit": MiB, "headroom": 1.0}, "below 1"),
    ):
        with pytest.raises(ValueError, match=words):
            find_keras_batch_size(model, vectors, **options)
    bare = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="not compiled"):
        find_keras_batch_size(bare, vectors, limit=MiB)
    bare.compile("sgd", "mse")
    with pytest.raises(ValueError, match="not built"):
        find_keras_batch_size(bare, vectors, limit=MiB)


@pytest.mark.slow
def test_tensorflows_own_error_is_out_of_memory():
    import tensorflow as tf

    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        tf.ones([1 << 22, 1 << 18])  # 4 TiB
    assert memory.is_oom(caught.value)
