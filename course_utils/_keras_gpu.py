"""A trial of :func:`course_utils.batch_size.find_keras_batch_size` on this process's GPU.

Written from TensorFlow's documentation of `get_memory_info` and `reset_memory_stats`; the
authors had no GPU with TensorFlow to run it on.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

from course_utils._keras_trial import checked, ended, fits, load
from course_utils.memory import is_oom


def try_on_gpu(
    path: str,
    objects: dict[str, Any],
    make_batch: Callable[[int], Any],
    batch: int,
    limit: int | None,
) -> dict[str, Any]:
    """Train a copy of the model two steps; figures as of a trial on a CPU, in bytes.

    They are TensorFlow's allocator's, beyond what this process holds on its first GPU already.
    """
    from tensorflow.config.experimental import get_memory_info, reset_memory_stats

    found = ended("")
    model = data = None
    gc.collect()
    held = get_memory_info("GPU:0")["current"]
    with _random_state_kept():
        try:
            reset_memory_stats("GPU:0")
            model = load(path, objects)
            data = checked(make_batch(batch), batch)
            peaks = []
            for _ in range(2):
                model.train_on_batch(*data)
                peaks.append(get_memory_info("GPU:0")["peak"] - held)
                reset_memory_stats("GPU:0")
            found = fits(batch, max(peaks), peaks[1], model, data)
        except Exception as error:
            if not is_oom(error):
                raise
            found = ended(type(error).__name__)
    del model, data
    gc.collect()
    if limit is not None and found["error"] is None and found["peak"] > limit:
        return ended("more than the limit")
    return found


def free_on_gpu() -> int:
    """Bytes of the first GPU that TensorFlow's tensors do not hold."""
    from tensorflow.config.experimental import get_memory_info

    from course_utils.devices import census

    gpus = census().usable_gpus
    if not gpus or gpus[0].total_memory is None:
        raise ValueError("how much memory the GPU has cannot be read: pass limit= in bytes")
    return gpus[0].total_memory - get_memory_info("GPU:0")["current"]


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """The random state of Python, NumPy, TensorFlow and Keras is afterwards as it was."""
    import random

    import keras
    import numpy as np
    import tensorflow as tf

    python, numpy = random.getstate(), np.random.get_state()
    tensorflow = tf.random.get_global_generator().state
    keras_s = keras.src.random.seed_generator.global_seed_generator().state
    values = [(state, state.numpy()) for state in (tensorflow, keras_s)]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for state, value in values:
            state.assign(value)
