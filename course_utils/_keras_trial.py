"""One trial of :func:`course_utils.batch_size.find_keras_batch_size`: two steps of one batch.

On a CPU it is a process of its own that limits itself: RLIMIT_DATA (setrlimit(2)) bounds its
private writable memory, VmData in proc(5). The peak of VmData is not on record; VmPeak, the
peak of all mappings, is, and what else is mapped (libraries) hardly changes meanwhile.
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_utils.memory import is_oom

DEATHS = ("SIGABRT", "SIGKILL", "SIGSEGV", "SIGBUS")
NO_MEMORY = ("std::bad_alloc", "Cannot allocate memory", "Resource temporarily unavailable")
TRACED_WITH = 1009  # a batch size that no other dimension is a multiple of


def check_cpu(limit: int | None) -> None:
    if limit is None:
        raise ValueError(
            "everything on this machine shares the CPU's memory: say how much of it the "
            "training may use, such as limit=512 * MiB"
        )
    if sys.platform != "linux":
        raise RuntimeError(
            "without a GPU this search needs Linux, where a process can limit its own memory: "
            "run it there (WSL or Colab will do), or on a GPU"
        )


def try_in_child(job: tuple, timeout: float, batch: int, limit: int | None) -> dict[str, Any]:
    """One trial in a process of its own; whatever is not about memory is raised here.

    A limit can end TensorFlow in many ways. Where the end does not itself say "memory", the
    same batch runs once more without the limit: if that works, the limit was the cause.
    """
    from course_utils.launch import RankError, launch

    log = Path(job[0]).with_name("log")
    unclear: list[str] = []

    def child(limit: int | None) -> dict[str, Any]:
        try:
            call = (try_on_cpu, 1, *job, batch, limit, str(log))
            return launch(*call, framework="tensorflow", timeout=timeout)[0]
        except RankError as error:
            said = log.read_text(errors="replace") if log.exists() else ""
            if error.type_name in DEATHS and any(each in said for each in NO_MEMORY):
                return ended(f"{error.type_name}, no memory")
            if limit is None:
                error.add_note(
                    f"Batch {batch} fails without a limit too. Last words:\n{said[-2000:]}"
                )
                raise
            unclear.append(error.type_name)
            return ended(error.type_name)

    found = child(limit)
    if unclear:
        child(None)
    return found


def try_on_cpu(
    path: str,
    objects: dict[str, Any],
    make_batch: Callable[[int], Any],
    batch: int,
    limit: int | None,
    log: str,
) -> dict[str, Any]:
    """Train the model saved at `path` two steps within `limit` bytes; runs in a rank.

    Without a limit, 80 % of the machine's free memory is one: a trial may fail, not take
    the machine with it. `log` receives all that is printed. Returns ``peak`` (bytes beyond
    an idle TensorFlow), ``second`` (resident bytes at the peak of the second step), ``error``
    (None, or how memory ran out), and of batch 1 ``per_sample`` (of the layers' outputs).
    """
    import ctypes
    import resource

    _print_into(log)
    libc = ctypes.CDLL(None)
    # Else glibc keeps freed blocks, more or fewer from run to run: mallopt(3)'s
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, and one arena for all threads (M_ARENA_MAX).
    for option, value in ((-3, 64 * 1024), (-1, 0), (-8, 1)):
        libc.mallopt(option, value)
    import psutil
    import tensorflow as tf

    # One operation at a time: how many meet would vary, and with it the peak.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.set_visible_devices([], "GPU")
    tf.function(lambda x: x @ x)(tf.ones((8, 8)))  # starts TensorFlow's threads
    idle, resident = _status("VmData"), _status("VmRSS")
    model = load(path, objects)
    gc.collect()
    libc.malloc_trim(0)
    limit = int(0.8 * psutil.virtual_memory().available) if limit is None else limit
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (idle + limit, before[1]))
    try:
        _assert_limited(idle + limit)
        data = checked(make_batch(batch), batch)
        model.train_on_batch(*data)  # traces the graph, and makes the optimizer's state
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # VmHWM, the peak of resident memory, starts anew: see proc(5)
        model.train_on_batch(*data)
        second = _status("VmHWM") - resident
    except Exception as error:
        if not is_oom(error):
            raise
        return ended(type(error).__name__.lstrip("_"))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    libraries = _status("VmSize") - _status("VmData")
    return fits(batch, _status("VmPeak") - libraries - idle, second, model, data)


# ---------------------------------------------------------------- what both need


def checked(data: Any, batch: int) -> tuple[Any, ...]:
    """What `make_batch` gave as arguments of ``train_on_batch``; ValueError: wrong length."""
    import keras

    data = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    for part in keras.tree.flatten(data):
        if part is not None and (not getattr(part, "shape", ()) or part.shape[0] != batch):
            shape = tuple(getattr(part, "shape", ()))
            raise ValueError(
                f"make_batch({batch}) gave a {type(part).__name__} of shape {shape}: every "
                f"array's first dimension must be {batch}"
            )
    return data


def ended(how: str) -> dict[str, Any]:
    return {"peak": None, "second": None, "error": how}


def fits(batch: int, peak: int, second: int, model: Any, data: tuple[Any, ...]) -> dict[str, Any]:
    found = {"peak": peak, "second": second, "error": None}
    return found | ({"per_sample": _bytes_per_sample(model, data)} if batch == 1 else {})


def custom_objects_of(model: Any) -> dict[str, Any]:
    """The model's own classes and functions that are not Keras', by the names it saves."""
    import keras

    parts = [model, *model._flatten_layers(), model.optimizer, *model.metrics]
    parts += keras.tree.flatten([model.loss])
    found = dict(keras.saving.get_custom_objects())
    for part in parts:
        thing = part if callable(part) and hasattr(part, "__name__") else type(part)
        if thing.__module__.split(".")[0] not in ("keras", "builtins"):
            found[keras.saving.get_registered_name(thing)] = thing
    return found


def load(path: str, objects: dict[str, Any]) -> Any:
    import keras

    try:
        return keras.saving.load_model(path, custom_objects=objects, safe_mode=False)
    except Exception as error:
        raise TypeError(
            f"Keras cannot rebuild this model from what model.save writes ({error}). Give your "
            "own classes a get_config, use only arguments of the function in a Lambda layer, "
            'and pass what Keras cannot find as custom_objects={"name": thing}.'
        ) from error


def _bytes_per_sample(model: Any, data: tuple[Any, ...]) -> int:
    """Bytes of all tensors of a forward pass that grow with the batch: traced, never run."""
    import keras
    import tensorflow as tf

    def spec(part: Any) -> tf.TensorSpec:
        part = tf.convert_to_tensor(part)
        return tf.TensorSpec((TRACED_WITH, *part.shape[1:]), part.dtype)

    forward = tf.function(lambda x: model(x, training=True))
    traced = forward.get_concrete_function(keras.tree.map_structure(spec, data[0]))
    outputs = [t for op in traced.graph.get_operations() for t in op.outputs]
    sizes = [(t.shape.num_elements() or 0, t.dtype.size or 0) for t in outputs]
    return sum(n * size for n, size in sizes if n % TRACED_WITH == 0) // TRACED_WITH


def _status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name} here: {_ELSEWHERE}")


_ELSEWHERE = "a trial on a CPU needs Linux. Try sizes by hand, or use a GPU"


def _assert_limited(taken: int) -> None:
    """A system that takes the limit but does not enforce it would let everything fit."""
    import mmap

    try:
        mmap.mmap(-1, taken, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return
    raise RuntimeError(f"this system does not enforce RLIMIT_DATA: {_ELSEWHERE}")


def _print_into(log: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
