"""Tasks of lesson 11: a pipeline in order, the epoch after a kill, a checkpoint that loads."""

from __future__ import annotations

import random as chance  # np.random in `run` is another
import re
from typing import Any

from ..task import Finding, Task, Wrong, close, describe, is_list, is_number, item
from ..task import count as counted  # itertools.count in `run` is another

# --- 11-pipeline ------------------------------------------------------------------------

# Real files, real decoding. Each picture is of one grey, drawn from the seed, and after the first
# epoch all files are written anew with another: what comes out of the pipeline tells when it was
# decoded. It also carries a stamp from the call that augmented it. A row without the right grey
# and a stamp of the series proves nothing. Only the last finding rests on a list of the methods
# that were called.


def _pipeline_inputs(seed: int) -> dict:
    rng = chance.Random(seed)
    local, replicas = rng.choice([2, 3, 4]), rng.choice([2, 3])
    whole = 12 * local * replicas // 2
    number = whole + rng.randint(1, local)
    greys = [rng.randint(0, 255) for _ in range(number)]
    stamps = [
        rng.randint(1000, 9999),
        rng.randint(10, 99),
    ]  # the first one, and from one to the next
    return {"greys": greys, "stamps": stamps, "local": local, "replicas": replicas}


def _pipeline_run(student, inputs: dict) -> dict:
    """Go through the student's pipeline six times; write down what each batch holds."""
    import itertools
    import os
    import tempfile

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np
    import tensorflow as tf

    number, stamps = len(inputs["greys"]), itertools.count(*inputs["stamps"])

    def stamp(after):
        call = tf.numpy_function(lambda _: np.int64(next(stamps)), [after], tf.int64)
        return tf.ensure_shape(call, [])

    def write(paths, shift):
        for path, grey in zip(paths, inputs["greys"], strict=True):
            pixels = np.full([8, 8, 3], (grey + shift) % 256, dtype=np.uint8)
            tf.io.write_file(path, tf.io.encode_jpeg(pixels))

    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        name = tf.strings.split(path, os.sep)[-1]
        picture = tf.strings.to_number(tf.strings.substr(name, 0, 4), tf.int64)
        return {"image": image, "picture": picture, "grey": tf.cast(image[0, 0, 0], tf.int64)}

    def augment(sample):
        image = tf.image.random_flip_left_right(sample["image"])
        return {**sample, "image": image, "augmented": stamp(sample["picture"])}

    class Recorded:
        """The data set, with a list of the methods by which it was made."""

        def __init__(self, dataset, calls):
            self._dataset, self._calls = dataset, calls

        def __getattr__(self, name):
            found = getattr(self._dataset, name)
            if not callable(found):
                return found

            def call(*args, **kwargs):
                result = found(*args, **kwargs)
                if not isinstance(result, tf.data.Dataset):
                    return result
                given = dict(enumerate(args)) | kwargs
                step = name
                if name == "map":
                    at_a_time = given.get("num_parallel_calls", given.get(1))
                    step += " parallel" if at_a_time not in (None, 1) else ""
                none = name == "prefetch" and given.get("buffer_size", given.get(0)) == 0
                steps = [] if none or name == "with_options" else [step]
                return Recorded(result, self._calls + steps)

            return call

        def apply(self, function):
            return function(self)

        def __iter__(self):
            return iter(self._dataset)

    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{i:04d}.jpg") for i in range(number)]
        write(paths, shift=0)
        files = Recorded(tf.data.Dataset.from_tensor_slices(paths), [])
        pipeline = student.pipeline(
            files, decode, augment, number, inputs["local"], inputs["replicas"]
        )
        if not isinstance(pipeline, (Recorded, tf.data.Dataset)):
            return {"returned": pipeline}
        epochs = []
        for _ in range(6):
            epoch = []
            for batch in pipeline:
                if not isinstance(batch, dict) or not {"grey", "augmented"} <= set(batch):
                    return {"problem": "what comes out was not decoded and augmented"}
                if batch["picture"].shape.rank != 1:
                    return {"problem": "what comes out is not one batch after the other"}
                columns = [batch[key].numpy() for key in ("picture", "grey", "augmented")]
                epoch.append([[int(value) for value in row] for row in zip(*columns, strict=True)])
                if len(epoch) > 10 * number:
                    return {"problem": "one pass over the pipeline does not end"}
            epochs.append(epoch)
            write(paths, shift=128)  # a cache still has what it read before
        return {"epochs": epochs, "calls": list(getattr(pipeline, "_calls", []))}


def _pipeline_expected(inputs: dict) -> dict:
    size, number = inputs["local"] * inputs["replicas"], len(inputs["greys"])
    sizes = [size] * (number // size)
    rest = number - sum(sizes)
    return {"sizes": sizes + [rest] * (rest > 0), "pictures": list(range(number))}


_PIPELINE = {
    "once": ("every epoch has every picture once", 1),
    "size": ("a batch has the global size", 1),
    "decoded": ("each file is decoded once, however many epochs there are", 1),
    "augmented": ("each picture is augmented anew in every epoch", 1),
    "order": ("each epoch has an order of its own, and no picture is tied to its neighbours", 2),
    "ahead": ("the input works ahead of the training, on several pictures at a time", 1),
}


def _stamped(epochs: Any) -> list[list[list[list[int]]]] | None:
    """The epochs as they are, if they consist of batches of rows of three whole numbers."""

    def row(value):
        return is_list(value, 3) and all(type(number) is int for number in value)

    def batch(value):
        return is_list(value) and value and all(map(row, value))

    good = is_list(epochs, 6) and all(is_list(e) and e and all(map(batch, e)) for e in epochs)
    return epochs if good else None


def _pipeline_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    why = dict.fromkeys(_PIPELINE, "")
    epochs = _stamped(item(got, "epochs"))
    problem = ""
    if epochs is None:
        problem = item(got, "problem")
        if type(problem) is not str:
            problem = f"a data set was expected, not {describe(item(got, 'returned'))}"
    elif any(_made_up(row, inputs) for epoch in epochs for batch in epoch for row in batch):
        problem = "what comes out was not decoded and augmented"
    if problem:
        whys = [problem, *["not judged: see the first property"] * (len(_PIPELINE) - 1)]
        return [
            Finding(text, points, why)
            for (text, points), why in zip(_PIPELINE.values(), whys, strict=True)
        ]

    flat = [[row for batch in epoch for row in batch] for epoch in epochs]
    for epoch in flat:
        seen = [row[0] for row in epoch]
        if sorted(seen) != expected["pictures"] and not why["once"]:
            few = len(set(seen)) < len(expected["pictures"])
            why["once"] = "some pictures are missing" if few else "some pictures come twice"
    sizes = sorted((len(batch) for batch in epochs[0]), reverse=True)
    # A batch that was left out is a picture that is missing, and said there.
    if sizes != expected["sizes"][: len(sizes)] or not sizes:
        wanted = {"local": inputs["local"], "replicas": inputs["replicas"]}
        why["size"] = (
            f"with {wanted['local']} for each of {wanted['replicas']} replicas, "
            f"your first batch has {counted(len(epochs[0][0]), 'picture')}"
        )
    # The files hold another grey since the end of the first epoch.
    if any(abs(grey - inputs["greys"][p]) > 4 for epoch in flat for p, grey, _ in epoch):
        why["decoded"] = "after the first epoch the files are decoded again"
    augmented = [row[2] for epoch in flat for row in epoch]
    if len(set(augmented)) < len(augmented):
        why["augmented"] = "a later epoch brings back the same augmented picture"
    why["order"] = _order_why(epochs, flat, inputs)
    calls = item(got, "calls")
    calls = calls if is_list(calls) else []
    if "map" in calls or "map parallel" not in calls:
        why["ahead"] = "a `map` works on one picture at a time"
    elif calls[-1] != "prefetch":
        why["ahead"] = (
            "`prefetch` is not the last step: what comes after it is not done ahead"
            if "prefetch" in calls
            else "nothing is prefetched: the next batch is begun when it is asked for"
        )
    return [Finding(text, points, why[key]) for key, (text, points) in _PIPELINE.items()]


def _order_why(epochs: list, flat: list, inputs: dict) -> str:
    orders = [[row[0] for row in epoch] for epoch in flat]
    if any(order == orders[0] for order in orders[1:]):
        return "two epochs have the same order"
    mates = [frozenset(frozenset(row[0] for row in batch) for batch in e) for e in epochs]
    if len(set(mates)) == 1:
        return "the same pictures share a batch in every epoch"
    # With room for b of n pictures, none comes b places earlier than its file. If there is room
    # for all, six epochs without a picture 0.6 n places early are rarer than one in ten million.
    early = max(picture - place for order in orders for place, picture in enumerate(order))
    if early < 0.6 * len(inputs["greys"]):
        return "in six epochs no late picture came early: is there room for all to be shuffled?"
    return ""


def _made_up(row: list[int], inputs: dict) -> bool:
    """True for a row whose grey no file has had, or whose stamp no call has set."""
    picture, grey, stamp = row
    if picture not in range(len(inputs["greys"])):
        return True
    off = (grey - inputs["greys"][picture]) % 128  # the second grey is 128 from the first
    first, step = inputs["stamps"]
    return not 0 <= grey <= 255 or 4 < off < 124 or stamp not in range(first, 10**6, step)


PIPELINE = Task(
    id="11-pipeline",
    title="an input pipeline in the right order",
    points=7,
    functions=("pipeline",),
    inputs=_pipeline_inputs,
    run=_pipeline_run,
    expected=_pipeline_expected,
    judge=_pipeline_judge,
    self_reported=1,
    hints=(
        "Two of the steps must be done once for all epochs, the others in each epoch anew. "
        "Which ones? `cache` is the line between them.",
        "Decode before the cache. Shuffle single pictures, not batches, with room for all of "
        "them, and after the cache. What changes a picture at random comes after the cache "
        "too. Batch by local times replicas. The last step prepares what is asked for next.",
        "`files.map(decode, num_parallel_calls=tf.data.AUTOTUNE).cache().shuffle(number)`, then "
        "`.map(augment, num_parallel_calls=tf.data.AUTOTUNE)`, `.batch(...)`, `.prefetch(...)`.",
    ),
    wrong=(
        Wrong(
            "no cache: everything is decoded in every epoch",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.shuffle(number).map(decode, num_parallel_calls=auto)
    return data.map(augment, num_parallel_calls=auto).batch(local * replicas).prefetch(auto)
""",
            6,
        ),
        Wrong(
            "cache after the augmentation",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).map(augment, num_parallel_calls=auto)
    return data.cache().shuffle(number).batch(local * replicas).prefetch(auto)
""",
            6,
        ),
        Wrong(
            "cache at the end: every epoch is the first one again",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.shuffle(number).map(decode, num_parallel_calls=auto)
    data = data.map(augment, num_parallel_calls=auto).batch(local * replicas)
    return data.cache().prefetch(auto)
""",
            4,
        ),
        Wrong(
            "shuffles the batches",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).cache()
    data = data.map(augment, num_parallel_calls=auto)
    return data.batch(local * replicas).shuffle(number).prefetch(auto)
""",
            5,
        ),
        Wrong(
            "shuffles within the room of one batch",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).cache().shuffle(local * replicas)
    data = data.map(augment, num_parallel_calls=auto)
    return data.batch(local * replicas).prefetch(auto)
""",
            5,
        ),
        Wrong(
            "batches by the local size",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).cache().shuffle(number)
    data = data.map(augment, num_parallel_calls=auto)
    return data.batch(local).prefetch(auto)
""",
            6,
        ),
        Wrong(
            "prefetches the names of the files",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.prefetch(auto).map(decode, num_parallel_calls=auto).cache().shuffle(number)
    return data.map(augment, num_parallel_calls=auto).batch(local * replicas)
""",
            6,
        ),
        Wrong(
            "has room for half of the pictures",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).cache().shuffle(number // 2)
    return data.map(augment, num_parallel_calls=auto).batch(local * replicas).prefetch(auto)
""",
            5,
        ),
        Wrong(
            "parallel and ahead by name alone",
            """
def pipeline(files, decode, augment, number, local, replicas):
    data = files.map(decode, num_parallel_calls=1).cache().shuffle(number)
    return data.map(augment, num_parallel_calls=1).batch(local * replicas).prefetch(0)
""",
            6,
        ),
        Wrong(
            "drops the rest",
            """
import tensorflow as tf
def pipeline(files, decode, augment, number, local, replicas):
    auto = tf.data.AUTOTUNE
    data = files.map(decode, num_parallel_calls=auto).cache().shuffle(number)
    data = data.map(augment, num_parallel_calls=auto)
    return data.batch(local * replicas, drop_remainder=True).prefetch(auto)
""",
            6,
        ),
    ),
)

# --- 11-resume --------------------------------------------------------------------------

# Real training of a very small model: ended in the middle of an epoch by an error that stands
# for the kill (the files on the disk are the same), then called again, and once more when all
# epochs are done. Each time the new models begin with other weights: so the weights at the kill,
# after it and at the end show which epochs were trained, and that they were saved and loaded. A
# kill leaves nothing but the folder: so another training comes in between, in a folder of its
# own, and the first folder has another name when it is gone on with.


def _resume_inputs(seed: int) -> dict:
    rng = chance.Random(seed)
    # The kill comes after more than ten saved epochs, so that names and numbers sort otherwise;
    # after eleven, so that who saves every second or tenth has not saved the last one.
    data = [round(rng.uniform(-1, 1), 3) for _ in range(rng.randint(34, 60))]
    starts = [
        round(w + rng.uniform(-0.1, 0.1), 3) for w in rng.sample([0.2, 0.5, 0.8, 1.1, 1.4], 4)
    ]
    return {"epochs": 13, "killed_in": 11, "data": data, "starts": starts}


def _resume_run(student, inputs: dict) -> dict:
    """Train, be killed, train again; write down which epochs ran and where the weights were."""
    import os
    import tempfile

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np

    x = np.array(inputs["data"], dtype="float32")[:, None]
    y = 2 * x - 0.7

    class Killed(Exception):
        pass

    def weights(model):
        if isinstance(model, keras.Model):
            return [float(value) for array in model.get_weights() for value in np.ravel(array)]

    class Watch(keras.callbacks.Callback):
        def __init__(self, killed_in=None):
            super().__init__()
            self.killed_in, self.epochs, self.steps = killed_in, [], 0
            self.begin = self.end = None

        def on_epoch_begin(self, epoch, logs=None):
            self.begin = self.begin if self.epochs else weights(self.model)
            self.epochs.append(epoch)

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps > 500:
                raise RuntimeError("more than 500 batches were trained")
            if self.epochs[-1] == self.killed_in and batch == 1:
                self.end = weights(self.model)
                raise Killed

    def train(folder, start, killed_in=None):
        def make_model():
            first = keras.initializers.Constant(start)
            layers = [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer=first)]
            model = keras.Sequential(layers)
            adam = keras.optimizers.Adam(0.05)
            model.compile(optimizer=adam, loss="mse", jit_compile=False)
            return model

        watch = Watch(killed_in)
        try:
            model = student.train(make_model, x, y, inputs["epochs"], folder, [watch])
        except Killed:
            return {"epochs": watch.epochs, "killed": True, "weights": watch.end}
        if not isinstance(model, keras.Model):
            return {"epochs": watch.epochs, "begin": watch.begin, "returned": model}
        updates = int(model.optimizer.iterations.numpy())
        found = {"epochs": watch.epochs, "weights": weights(model), "updates": updates}
        return {**found, "begin": watch.begin} if watch.epochs else found

    with tempfile.TemporaryDirectory() as place:
        starts = iter(inputs["starts"])
        before, other, after = (os.path.join(place, name) for name in ("one", "other", "moved"))
        os.mkdir(before)
        os.mkdir(other)
        killed = train(before, next(starts), inputs["killed_in"])
        apart = train(other, next(starts), killed_in=1)
        os.rename(before, after)
        again, done = train(after, next(starts)), train(after, next(starts))
        return {"killed": killed, "apart": apart, "again": again, "done": done}


def _adam(batches: list, start: float, epochs: int) -> list[list[float]]:
    """Adam on a line, in plain Python: the weights after each update."""
    w, b, state, step = start, 0.0, [[0.0, 0.0], [0.0, 0.0]], 0
    after = []
    for _ in range(epochs):
        for batch in batches:
            step += 1
            errors = [w * v + b - (2 * v - 0.7) for v in batch]
            n = len(batch)
            slopes = [2 * sum(e * v for e, v in zip(errors, batch, strict=True)) / n]
            slopes.append(2 * sum(errors) / n)
            moves = []
            for slope, pair in zip(slopes, state, strict=True):
                pair[0] += (slope - pair[0]) * 0.1
                pair[1] += (slope * slope - pair[1]) * 0.001
                rate = 0.05 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
                moves.append(rate * pair[0] / (pair[1] ** 0.5 + 1e-7))
            w, b = w - moves[0], b - moves[1]
            after.append([w, b])
    return after


def _resume_expected(inputs: dict) -> dict:
    """Where the weights are, from the start of the first call and of the one in between."""
    x = inputs["data"]
    batches = [x[i : i + 32] for i in range(0, len(x), 32)]
    after, apart = (_adam(batches, start, inputs["epochs"]) for start in inputs["starts"][:2])
    saved = inputs["killed_in"] * len(batches)  # updates before the epoch of the kill
    return {
        "begin": after[saved - 1],
        "killed": after[saved + 1],  # in that epoch, after its second batch
        "weights": after[-1],
        "apart": apart[len(batches) + 1],  # in the second epoch, after its second batch
        "updates": len(after),
    }


def _same_weights(got: Any, want: list[float]) -> bool:
    return is_list(got, 2) and all(close(a, b, 1e-3) for a, b in zip(got, want, strict=True))


def _pair(got: Any, expected: dict) -> list[float]:
    """The weights that the run before returned; what they should be if it returned none."""
    return got if is_list(got, 2) and all(map(is_number, got)) else expected["weights"]


def _resume_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    every = list(range(inputs["epochs"]))
    killed, again, done = item(got, "killed"), item(got, "again"), item(got, "done")
    apart = item(got, "apart")
    unseen = all(item(start, "epochs") == [] for start in (killed, again, done))
    first = ""
    if item(killed, "epochs") != every[: inputs["killed_in"] + 1]:
        first = "with an empty folder, some epochs were not trained, or trained twice"
    elif item(killed, "killed") is not True:
        first = "it was killed by a callback, and did not end: is the error caught?"
    elif not _same_weights(item(killed, "weights"), expected["killed"]):
        first = "when it was killed, its weights were not those of that many trained batches"
    elif (item(apart, "epochs"), item(apart, "killed")) != (every[:2], True) or not _same_weights(
        item(apart, "weights"), expected["apart"]
    ):
        first = "another training, in another empty folder, did not begin anew"
    epochs = item(again, "epochs")
    want = every[inputs["killed_in"] :]
    resumed = ""
    if not is_list(epochs) or not epochs or any(type(number) is not int for number in epochs):
        resumed = "nothing was trained after the kill"
    elif epochs != want:
        resumed = {
            epochs[0] == 0: "`fit` began to count with its first epoch again: see `initial_epoch`",
            0 < epochs[0] < want[0]: "it repeated an epoch that had been completed",
            epochs[0] > want[0]: "it left out the epoch in which it was killed",
        }.get(True, "it did not stop after the last epoch")
    elif not _same_weights(item(again, "begin"), expected["begin"]):
        resumed = "it did not begin with the weights from the end of the last completed epoch"
    state = ""
    if not _same_weights(item(again, "weights"), expected["weights"]):
        state = "its weights are not those of a run without a break"
    elif item(again, "updates") != expected["updates"]:
        state = "its optimizer has not counted as many updates as in a run without a break"
    finished = ""
    if item(done, "epochs") != []:
        finished = "all epochs were done, and yet it trained"
    elif not is_list(item(done, "weights")):
        finished = f"the trained model was expected, not {describe(item(done, 'returned'))}"
    elif not _same_weights(item(done, "weights"), _pair(item(again, "weights"), expected)):
        finished = "the model that it returned is not the trained one"
    elif not state and item(done, "updates") != expected["updates"]:
        finished = "the model that it returned has lost its optimizer's count of updates"
    if unseen:  # nothing is known of what was trained
        first = "no epoch was seen: `fit` ran without the given callbacks, or did not run"
        resumed = state = finished = "not judged: see the first property"
    return [
        Finding("until the kill, each epoch is trained once", 1, first),
        Finding("after the kill it goes on with the epoch that was interrupted", 2, resumed),
        Finding("weights and optimizer end as in a run without a break", 2, state),
        Finding("when all epochs are done, nothing is trained", 1, finished),
    ]


RESUME = Task(
    id="11-resume",
    title="go on at the right epoch",
    points=6,
    functions=("train",),
    inputs=_resume_inputs,
    run=_resume_run,
    expected=_resume_expected,
    judge=_resume_judge,
    hints=(
        "Three things must come back: the weights, the state of the optimizer, and the number "
        "of the epoch. A `.keras` file has two of them. Where can you keep the third?",
        "Keep it in the name, as `ckpt-{epoch}.keras`. Read the numbers of all names that are "
        "there, as numbers and not as text, take the largest, load that file, and tell `fit` how "
        "many epochs are behind it.",
        "With `done = max(numbers, default=0)`, the model is `make_model()` if done is 0, else "
        "`keras.models.load_model(...)`; then `model.fit(..., epochs=epochs, "
        "initial_epoch=done, shuffle=False, callbacks=[*callbacks, ModelCheckpoint(...)])`.",
    ),
    wrong=(
        Wrong(
            "newest by time, epochs from the start",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    paths = [os.path.join(folder, name) for name in os.listdir(folder)]
    model = keras.models.load_model(max(paths, key=os.path.getctime)) if paths else make_model()
    save = keras.callbacks.ModelCheckpoint(os.path.join(folder, "ckpt-{epoch}.keras"))
    model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, save])
    return model
""",
            1,
        ),
        Wrong(
            "one epoch too early",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    path = os.path.join(folder, "ckpt-{epoch}.keras")
    model = keras.models.load_model(path.format(epoch=done)) if done else make_model()
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=epochs, initial_epoch=max(0, done - 1), shuffle=False, verbose=0,
              callbacks=[*callbacks, save])
    return model
""",
            1,
        ),
        Wrong(
            "the weights alone, with a new optimizer",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    path = os.path.join(folder, "ckpt-{epoch}.keras")
    model = make_model()
    if done:
        model.set_weights(keras.models.load_model(path.format(epoch=done)).get_weights())
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=epochs, initial_epoch=done, shuffle=False, verbose=0,
              callbacks=[*callbacks, save])
    return model
""",
            4,
        ),
        Wrong(
            "the last name in the order of the alphabet",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    names, model, done = sorted(os.listdir(folder)), make_model(), 0
    if names:
        model, done = keras.models.load_model(os.path.join(folder, names[-1])), int(names[-1][5:-6])
    save = keras.callbacks.ModelCheckpoint(os.path.join(folder, "ckpt-{epoch}.keras"))
    model.fit(x, y, epochs=epochs, initial_epoch=done, shuffle=False, verbose=0,
              callbacks=[*callbacks, save])
    return model
""",
            3,
        ),
        Wrong(
            "the given callbacks forgotten",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    path = os.path.join(folder, "ckpt-{epoch}.keras")
    model = keras.models.load_model(path.format(epoch=done)) if done else make_model()
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=epochs, initial_epoch=done, shuffle=False, verbose=0, callbacks=[save])
    return model
""",
            0,
        ),
        Wrong(
            "as many epochs as are left, counted from 0",
            """
import os
import keras
class Save(keras.callbacks.Callback):
    def __init__(self, folder, done):
        super().__init__()
        self.folder, self.done = folder, done
    def on_epoch_end(self, epoch, logs=None):
        self.model.save(os.path.join(self.folder, f"ckpt-{self.done + epoch + 1}.keras"))
def train(make_model, x, y, epochs, folder, callbacks):
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    path = os.path.join(folder, f"ckpt-{done}.keras")
    model = keras.models.load_model(path) if done else make_model()
    model.fit(x, y, epochs=epochs - done, shuffle=False, verbose=0,
              callbacks=[*callbacks, Save(folder, done)])
    return model
""",
            4,
        ),
        Wrong(
            "saves after every second epoch, and after the last",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    class Save(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch % 2 or epoch + 1 == epochs:
                self.model.save(os.path.join(folder, f"ckpt-{epoch + 1}.keras"))
    done = max((int(name[5:-6]) for name in os.listdir(folder)), default=0)
    path = os.path.join(folder, f"ckpt-{done}.keras")
    model = keras.models.load_model(path) if done else make_model()
    model.fit(x, y, epochs=epochs, initial_epoch=done, shuffle=False, verbose=0,
              callbacks=[*callbacks, Save()])
    return model
""",
            4,
        ),
        Wrong(
            "the number of the epoch in a global name, which a kill takes along",
            """
import os
import keras
DONE = 0
class Count(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        global DONE
        DONE = epoch + 1
def train(make_model, x, y, epochs, folder, callbacks):
    path = os.path.join(folder, "model.keras")
    model = keras.models.load_model(path) if os.path.exists(path) else make_model()
    save = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=epochs, initial_epoch=DONE, shuffle=False, verbose=0,
              callbacks=[*callbacks, Count(), save])
    return model
""",
            1,
        ),
        Wrong(
            "BackupAndRestore, which forgets a run that is done",
            """
import os
import keras
def train(make_model, x, y, epochs, folder, callbacks):
    model = make_model()
    save = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
    model.fit(x, y, epochs=epochs, shuffle=False, verbose=0, callbacks=[*callbacks, save])
    return model
""",
            5,
        ),
    ),
)

# --- 11-newest --------------------------------------------------------------------------

# Real `.keras` files, each with a weight of its own, drawn from the seed: so the model that was
# loaded says which file it came from. No list says which files are whole: each has a place where
# it is cut off, in lengths of the file. Only which files were tried is a list of `load` itself.


def _newest_inputs(seed: int) -> list:
    rng = chance.Random(seed)
    top = rng.randint(10, 13)
    mixed = [2, 9, rng.randint(3, 8)]
    rng.shuffle(mixed)
    mixed.insert(0, top)  # written first, so that it is not the newest by time
    weights = iter(rng.sample(range(1000, 10_000), 40))

    def case(about, whole, torn=(), others=(), **more):
        names = [f"ckpt-{epoch}.keras" for epoch in whole] + list(others)
        cuts = [(name, round(rng.uniform(1, 2), 2)) for name in names]
        for epoch in torn:  # every second torn file is empty
            cuts.append((f"ckpt-{epoch}.keras", round(rng.uniform(0.2, 0.8), 2) * (epoch % 2)))
        files = [{"name": name, "cut": cut, "weight": next(weights)} for name, cut in cuts]
        return {"about": about, "files": files, **more}

    return [
        case("number", mixed),
        case("torn", [2, 9, top], [top + 1, top + 2]),
        case("torn", [3, top], [top + 2], inside=True),
        case("time", [4, top, top + 1], touched="ckpt-4.keras"),
        # whole files of another name, as other programs leave
        case(
            "others",
            [5, top],
            others=["ckpt-99.keras.part", "best-ckpt-98.keras", "ckpt-old-97.keras"],
        ),
        case("none", [], [1, 2]),
        case("none", []),
        case("stop", [top], interrupt=rng.randint(1000, 9999)),
    ]


def _newest_run(student, inputs: list) -> dict:
    """Let the student choose in folders of real checkpoints; say what was loaded, and how often."""
    import os
    import tempfile
    import zipfile

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])

    def tear_inside(path):
        """The end is whole, the list of what is in the file is not: a BadZipFile, no ValueError."""
        with zipfile.ZipFile(path) as archive:
            begin = archive.start_dir
        with open(path, "r+b") as file:
            file.seek(begin)
            file.write(bytes(40))

    def write(folder, file, inside):
        model.set_weights([np.full([1, 1], float(file["weight"]))])
        path = os.path.join(folder, "new.keras")  # Keras asks for this ending
        model.save(path)
        if not inside:
            size = os.path.getsize(path)
            os.truncate(path, min(size, int(size * file["cut"])))
        elif file["cut"] < 1:
            tear_inside(path)
        os.rename(path, os.path.join(folder, file["name"]))

    answers = []
    with tempfile.TemporaryDirectory() as place:
        for number, case in enumerate(inputs):
            folder = os.path.join(place, str(number))
            os.mkdir(folder)
            for file in case["files"]:
                write(folder, file, case.get("inside", False))
            with open(os.path.join(folder, "notes.txt"), "w") as notes:
                notes.write("learning rate 0.001")
            if "touched" in case:
                os.utime(os.path.join(folder, case["touched"]))
            loads, interrupt = [], case.get("interrupt")

            def load(path, loads=loads, interrupt=interrupt):
                loads.append(os.path.basename(str(path)))
                if interrupt:
                    raise KeyboardInterrupt(interrupt)
                return keras.models.load_model(path)

            answer = {}
            try:
                found = student.newest(folder, load)
            except NotImplementedError:
                raise
            except KeyboardInterrupt as error:
                if not interrupt:  # it is a person's
                    raise
                # A new one, raised where that of `load` was caught, has that one as its context.
                answer["heard"] = error.args or getattr(error.__context__, "args", ())
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}".replace(folder, "…")[:120]
            else:
                if isinstance(found, (tuple, list)) and len(found) == 2:
                    epoch, loaded = found
                    answer["epoch"] = epoch
                    if isinstance(loaded, keras.Model):
                        answer["weight"] = float(np.ravel(loaded.get_weights()[0])[0])
                else:
                    answer["returned"] = found
            answers.append({**answer, "loads": loads})
    return {"answers": answers}


def _checkpoints(case: dict) -> tuple[dict, dict]:
    """The files with the name of a checkpoint, by epoch: the whole ones, and the torn ones."""
    whole, torn = {}, {}
    for file in case["files"]:
        if name := re.fullmatch(r"ckpt-(\d+)\.keras", file["name"]):
            (whole if file["cut"] >= 1 else torn)[int(name[1])] = file
    return whole, torn


def _newest_expected(inputs: list) -> list:
    """The largest number among the whole files, and which files have to be tried for it."""
    wanted = []
    for case in inputs:
        whole, torn = _checkpoints(case)
        best = max(whole, default=None)
        tried = [epoch for epoch in torn if best is None or epoch > best]
        tried += [] if best is None else [best]
        weight = None if best is None else whole[best]["weight"]
        loads = sorted(f"ckpt-{epoch}.keras" for epoch in tried)
        wanted.append({"epoch": best, "weight": weight, "loads": loads})
    return wanted


_NEWEST = {
    "number": ("the newest epoch is found, among ten and more", 1),
    "torn": ("torn files are passed over, wherever they are torn", 1),
    "others": ("files of another name are left alone", 1),
    "time": ("the time of a file does not decide", 1),
    "none": ("None is returned where nothing loads", 1),
    "frugal": ("no file is loaded that need not be", 1),
    "stop": ("Ctrl-C during a load comes through", 1),
}


def _newest_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_NEWEST, "")
    right = True
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(item(got, "answers"), number)
        if case["about"] == "stop":
            if type(item(answer, "error")) is str:
                why["stop"] = f"it failed with {item(answer, 'error')}"
            elif item(answer, "heard") != [case["interrupt"]]:
                why["stop"] = "the person at the keyboard was not heard: which errors do you catch?"
        else:
            problem = _newest_why(case, want, answer)
            why[case["about"]] = why[case["about"]] or problem
            right = right and not problem
        loads = item(answer, "loads")  # fewer where torn files are found out in another way
        names = is_list(loads) and all(type(name) is str for name in loads)
        if not names or len(set(loads)) < len(loads) or not set(loads) <= set(want["loads"]):
            why["frugal"] = "a file was loaded twice, or one that cannot be the newest that loads"
        elif want["epoch"] is not None and f"ckpt-{want['epoch']}.keras" not in loads:
            why["frugal"] = "what was returned did not come from `load`"
    if not right:
        why["frugal"] = "not judged until the right files are found"
    return [Finding(text, points, why[key]) for key, (text, points) in _NEWEST.items()]


def _newest_why(case: dict, want: dict, answer: Any) -> str:
    whole, torn = _checkpoints(case)
    words = f"with {counted(len(whole), 'whole file')} and {len(torn)} torn"
    error = item(answer, "error")
    if type(error) is str:
        return f"{words}, it failed with {error}"
    if want["epoch"] is None:
        nothing = type(answer) is dict and answer.get("returned", 0) is None
        return "" if nothing else f"{words}, something else was returned"
    epoch, weight = item(answer, "epoch"), item(answer, "weight")
    if type(epoch) is not int:
        got = answer["returned"] if type(answer) is dict and "returned" in answer else epoch
        return f"{words}, (epoch, model) was expected, not {describe(got)}"
    if epoch != want["epoch"]:
        return f"{words}, another epoch is the newest that loads"
    if not close(weight, want["weight"]):
        return f"{words}, the model is not that of the epoch"
    return ""


_BY_NUMBER = """
import os, re
def newest(folder, load):
    found = [re.fullmatch(r"ckpt-(\\d+)\\.keras", name) for name in os.listdir(folder)]
    for epoch in sorted((int(m[1]) for m in found if m), reverse=True):
        try:
            return epoch, load(os.path.join(folder, f"ckpt-{epoch}.keras"))
        except Exception as error:
            print(epoch, error)
"""
NEWEST = Task(
    id="11-newest",
    title="the newest checkpoint that loads",
    points=7,
    functions=("newest",),
    inputs=_newest_inputs,
    run=_newest_run,
    expected=_newest_expected,
    judge=_newest_judge,
    self_reported=1,
    hints=(
        "The name says which epoch a file is of; whether it is whole, only loading can say. "
        "In which order do you try the files?",
        "Collect the numbers of the names that are of the form ckpt-NUMBER.keras, sort them "
        "as numbers, the largest first. Try to load one after the other; return the first that "
        "works. Catch the errors of a broken file, not everything.",
        "`re.fullmatch(r'ckpt-(\\d+)\\.keras', name)` finds the number. In the loop: "
        "`try: return epoch, load(path)`, then `except Exception as error:` print the name and "
        "the error and go on. `return None` after the loop.",
    ),
    wrong=(
        Wrong(
            "newest by time, as in the guide",
            """
import os
def newest(folder, load):
    names = [name for name in os.listdir(folder) if name.endswith(".keras")]
    if not names:
        return None
    name = max(names, key=lambda name: os.path.getctime(os.path.join(folder, name)))
    return int(name[5:-6]), load(os.path.join(folder, name))
""",
            1,
        ),
        Wrong(
            "sorts the names as text",
            """
import os
def newest(folder, load):
    for name in sorted(os.listdir(folder), reverse=True):
        if name.endswith(".keras"):
            try:
                return int(name[5:-6]), load(os.path.join(folder, name))
            except Exception as error:
                print(name, error)
""",
            2,
        ),
        Wrong(
            "catches everything, also Ctrl-C",
            _BY_NUMBER.replace("Exception as error", "BaseException as error"),
            6,
        ),
        Wrong(
            "loads them all and keeps the last",
            """
import os, re
def newest(folder, load):
    names, found = [re.fullmatch(r"ckpt-(\\d+)\\.keras", name) for name in os.listdir(folder)], None
    for epoch in sorted(int(name[1]) for name in names if name):
        try:
            found = epoch, load(os.path.join(folder, f"ckpt-{epoch}.keras"))
        except Exception as error:
            print(epoch, error)
    return found
""",
            6,
        ),
        Wrong(
            "takes the last number in any name that begins and ends like a checkpoint's",
            """
import glob, os, re
def newest(folder, load):
    paths = glob.glob(os.path.join(folder, "ckpt-*.keras"))
    number = lambda path: int(re.findall(r"\\d+", os.path.basename(path))[-1])
    for path in sorted(paths, key=number, reverse=True):
        try:
            return number(path), load(path)
        except Exception as error:
            print(path, error)
""",
            5,
        ),
        Wrong(
            "takes names that only begin like a checkpoint's",
            _BY_NUMBER.replace("fullmatch", "match"),
            6,
        ),
        Wrong(
            "takes names that contain a checkpoint's",
            _BY_NUMBER.replace("fullmatch", "search").replace('keras", name', 'keras$", name'),
            6,
        ),
        Wrong(
            "catches three kinds of error",
            _BY_NUMBER.replace("Exception", "(OSError, ValueError, KeyError)"),
            5,
        ),
        Wrong(
            "the newest number, torn or not",
            """
import os
def newest(folder, load):
    names = [name for name in os.listdir(folder) if name.endswith(".keras")]
    if not names:
        return None
    epoch = max(int(name[5:-6]) for name in names)
    return epoch, load(os.path.join(folder, f"ckpt-{epoch}.keras"))
""",
            3,
        ),
    ),
)

TASKS = (PIPELINE, RESUME, NEWEST)
