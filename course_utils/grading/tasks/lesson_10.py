"""Tasks of lesson 10: a replica's share of the loss, a first batch that divides, an audit."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, close, count, describe, is_list, item

# --- 10-share ---------------------------------------------------------------------------


def _share_inputs(seed: int) -> list:
    """Batches of a linear model on two replicas: equal shares, unequal ones, an empty one."""
    rng = random.Random(seed)

    def batch(about: str, size: int) -> dict:
        x = [[rng.randint(-5, 5) for _ in range(3)] for _ in range(size)]
        weight = [rng.randint(1, 4) for _ in range(3)]
        return {"about": about, "x": x, "y": [rng.randint(6, 9) for _ in x], "weight": weight}

    even = 2 * rng.randint(3, 6)
    odd = 2 * rng.randint(3, 6) + 1
    return [batch("equal", even), batch("equal", 2), batch("unequal", odd), batch("unequal", 1)]


def _share_run(student, inputs: list) -> Any:
    """The gradient that two replicas of a real MirroredStrategy make of the student's loss."""
    from course_utils.grading.ranks import on_replicas

    def on_devices(strategy, replica_loss, cases):
        import numpy as np
        import tensorflow as tf

        answers = []
        for case in cases:
            size = len(case["y"])
            with strategy.scope():
                weight = tf.Variable(case["weight"], dtype=tf.float64)
            numbers = tf.constant(case["x"], tf.float64), tf.constant(case["y"], tf.float64)

            def share(context, numbers=numbers, most=-(-size // 2)):
                """As a distributed data set deals a batch out, which takes five times as long."""
                start = most * context.replica_id_in_sync_group
                return tuple(tensor[start : start + most] for tensor in numbers)

            parts = strategy.experimental_distribute_values_from_function(share)

            def on_replica(x, y, weight=weight, size=size):
                with tf.GradientTape() as tape:
                    each = (tf.linalg.matvec(x, weight) - y) ** 2
                    loss = tf.convert_to_tensor(replica_loss(each, size))
                gradient = tape.gradient(loss, weight)
                if gradient is None:
                    raise ValueError(
                        "no gradient comes back: use TensorFlow operations on `each`, not NumPy's"
                    )
                context = tf.distribute.get_replica_context()
                total = context.all_reduce("sum", tf.reduce_sum(tf.cast(loss, tf.float64)))
                return context.all_reduce("sum", gradient), tf.constant(loss.shape.rank), total

            gradient, rank, total = strategy.run(on_replica, args=parts)
            first = strategy.experimental_local_results(gradient)[0]
            ranks = [int(r.numpy()) for r in strategy.experimental_local_results(rank)]
            summed = float(strategy.experimental_local_results(total)[0].numpy())
            summed = summed if np.isfinite(summed) else str(summed)
            answers.append({"gradient": first.numpy().tolist(), "rank": max(ranks), "loss": summed})
        return answers

    return on_replicas(on_devices, 2, student.replica_loss, inputs)


def _share_expected(inputs: list) -> list:
    """The mean loss of the whole batch and its gradient, on one device, in whole numbers."""
    answers = []
    for case in inputs:
        total, loss = [0, 0, 0], 0
        for x, y in zip(case["x"], case["y"], strict=True):
            error = sum(a * b for a, b in zip(x, case["weight"], strict=True)) - y
            total = [t + 2 * error * a for t, a in zip(total, x, strict=True)]
            loss += error**2
        size = len(case["y"])
        answers.append({"gradient": [t / size for t in total], "loss": loss / size})
    return answers


def _share_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = {"number": "", "equal": "", "unequal": ""}
    failed = item(got, "error")
    if type(failed) is str:
        failed = failed or "it failed without a word"
        return [
            Finding("a replica's loss is one number", 1, failed),
            Finding("the gradient is that of one device, with equal shares", 2, failed),
            Finding("... and with shares that are not equal", 2, failed),
        ]
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, size = item(got, number), len(case["y"])
        gradient = item(answer, "gradient")
        where = f"{count(size, 'sample')} on two replicas"
        if item(answer, "rank") != 0 and not why["number"]:
            why["number"] = "you returned several numbers: a replica's loss is their sum"
        loss, want = item(answer, "loss"), want["gradient"]
        if is_list(gradient, 3) and all(map(close, gradient, want, [1e-9] * 3)):
            mean = expected[number]["loss"]
            if not close(loss, mean, 1e-9 * max(1, mean)) and not why[case["about"]]:
                why[case["about"]] = (
                    f"with {where} the gradient is right, but the replicas' losses add up to "
                    f"{loss if type(loss) is str else describe(loss)}, not to the mean"
                )
            continue
        problem = f"with {where} the summed gradient is not that of one device"
        if not is_list(gradient, 3):
            problem = f"with {where}: a gradient was expected, not {describe(gradient)}"
        elif all(map(close, gradient, [2 * w for w in want], [1e-9] * 3)):
            problem += ", but as many times as large as there are replicas"
        elif all(map(close, gradient, [size * w for w in want], [1e-9] * 3)):
            problem += ", but as many times as large as there are samples"
        elif case["about"] == "unequal":
            problem += ": does each sample count alike, on whichever replica it is?"
        why[case["about"]] = why[case["about"]] or problem
    return [
        Finding("a replica's loss is one number", 1, why["number"]),
        Finding("the gradient is that of one device, with equal shares", 2, why["equal"]),
        Finding("... and with shares that are not equal", 2, why["unequal"]),
    ]


SHARE = Task(
    id="10-share",
    title="a replica's share of the loss",
    points=5,
    functions=("replica_loss",),
    inputs=_share_inputs,
    run=_share_run,
    expected=_share_expected,
    judge=_share_judge,
    hints=(
        "The strategy adds the replicas' gradients up. What must every replica divide by, so "
        "that the sum of their losses is the mean over the whole batch?",
        "Add up the losses of this replica's samples, and divide by the size of the global "
        "batch: the same number on every replica, however many samples each has.",
        "`return tf.reduce_sum(each) / global_batch`, with `global_batch` cast to the type of "
        "`each`; or tf.nn.compute_average_loss with its global_batch_size.",
    ),
    wrong=(
        Wrong(
            "each replica's own mean",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    return tf.reduce_mean(each)
""",
            1,
        ),
        Wrong(
            "the mean of the means",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.reduce_mean(each) / replicas
""",
            3,
        ),
        Wrong(
            "compute_average_loss without the size",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    return tf.nn.compute_average_loss(each)
""",
            3,
        ),
        Wrong(
            "the sum, not divided",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    return tf.reduce_sum(each)
""",
            1,
        ),
        Wrong(
            "one loss a sample",
            """
def replica_loss(each, global_batch):
    return each / global_batch
""",
            4,
        ),
        Wrong(
            "a mean, weighted: not a number where a replica has no sample",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    return tf.reduce_mean(each) * len(each) / global_batch
""",
            3,
        ),
        Wrong(
            "NumPy's sum, through which no gradient comes",
            """
import numpy as np
def replica_loss(each, global_batch):
    return np.sum(each) / global_batch
""",
            0,
        ),
        Wrong(
            "divided by the replicas, too",
            """
import tensorflow as tf
def replica_loss(each, global_batch):
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    return tf.nn.compute_average_loss(each, global_batch_size=global_batch) / replicas
""",
            1,
        ),
    ),
)

# --- 10-batches -------------------------------------------------------------------------


def _batches_inputs(seed: int) -> list:
    rng = random.Random(seed)
    short = 2 * rng.randint(5, 7) + 1
    return [
        {"samples": 64, "size": 16, "replicas": 2},
        {"samples": short, "size": 16, "replicas": 2},  # this one is also given to Keras
        {"samples": rng.randint(45, 55), "size": 15, "replicas": 4},
        {"samples": 3 * rng.randint(6, 8) + 1, "size": 9, "replicas": 3},
        {"samples": rng.randint(5, 7), "size": 32, "replicas": 4},
        {"samples": rng.randint(1, 3), "size": 8, "replicas": 4},  # too few
    ]


def _batches_run(student, inputs: list) -> Any:
    """The batches that come out of each data set; Keras' fit on two replicas for the second."""
    from course_utils.grading.ranks import on_replicas

    def on_devices(strategy, batched, cases):
        import keras
        import tensorflow as tf

        answers, trained = [], "not tried"  # of each data set its batches, or text
        for number, case in enumerate(cases):
            try:
                data = tf.data.Dataset.range(case["samples"])
                made = batched(data, case["size"], case["replicas"])
                if not isinstance(made, tf.data.Dataset):
                    answers.append(f"it returned a {type(made).__name__}, not a Dataset")
                    continue
                if made.element_spec.shape.rank != 1:
                    answers.append("its elements are no batches of samples")
                    continue
                answers.append([batch.numpy().tolist() for batch in made.take(1000)])
            except (ValueError, tf.errors.OpError) as error:
                said = str(error).strip().splitlines() or ["(no word)"]
                answers.append(f"{type(error).__name__}: {said[-1][:100]}")
                continue
            if number == 1 and answers[-1]:
                pairs = made.map(lambda x: 2 * (tf.cast(x, tf.float32)[:, None],))
                with strategy.scope():
                    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
                    model.compile("sgd", "mse")
                try:
                    model.fit(pairs, verbose=0, shuffle=False)
                    trained = "yes"
                except (ValueError, tf.errors.InvalidArgumentError) as error:
                    trained = type(error).__name__
        return {"answers": answers, "trained": trained}

    return on_replicas(on_devices, 2, student.batched, inputs)


def _batches_expected(inputs: list) -> list:
    """Of each case: is there a first batch that divides, and how many batches are enough."""
    answers = []
    for case in inputs:
        whole = case["size"] // case["replicas"] * case["replicas"]
        possible = case["samples"] >= case["replicas"]
        answers.append({"possible": possible, "most": -(-case["samples"] // whole) + 1})
    return answers


def _batches_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    texts = {
        "samples": ("every sample once, in order", 1),
        "few": ("no batch is too large, and there are few batches", 1),
        "first": ("the first batch divides by the replicas; fit takes it", 2),
        "refuse": ("a data set with fewer samples than replicas: ValueError", 1),
    }
    why = dict.fromkeys(texts, "")

    def note(key: str, problem: str) -> None:
        why[key] = why[key] or problem

    failed = item(got, "error")
    if type(failed) is str:
        failed = failed or "it failed without a word"
        return [Finding(text, points, failed) for text, points in texts.values()]
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        batches, n = item(item(got, "answers"), number), case["samples"]
        size, replicas = case["size"], case["replicas"]
        where = f"{count(n, 'sample')}, size {size}, {replicas} replicas"
        if not want["possible"]:
            if type(batches) is not str:
                note("refuse", f"{where}: no first batch can divide, but nothing was raised")
            elif batches == "ValueError: (no word)":
                note("refuse", f"{where}: the ValueError does not say why")
            elif not batches.startswith("ValueError:"):
                note("refuse", f"{where}: not your ValueError, but {batches}")
            continue
        if not is_list(batches) or not all(is_list(batch) for batch in batches):
            said = batches if type(batches) is str else f"it gave {describe(batches)}"
            for key in ("samples", "few", "first"):
                note(key, f"{where}: {said}")
            continue
        together = [sample for batch in batches for sample in batch]
        if together != list(range(n)):
            kind = (
                "in another order"
                if sorted(map(str, together)) == sorted(map(str, range(n)))
                else f"{len(together)} came out"
            )
            note("samples", f"{where}: {kind}")
        if any(len(batch) > size for batch in batches):
            note("few", f"{where}: a batch is larger than the size")
        if len(batches) > want["most"]:
            note("few", f"{where}: {len(batches)} batches, {want['most']} are enough")
        if not batches or not batches[0]:
            note("first", f"{where}: there is no first batch")
        elif len(batches[0]) % replicas:
            note("first", f"{where}: the first batch has {count(len(batches[0]), 'sample')}")
        elif number == 1 and item(got, "trained") != "yes":
            note("first", f"{where}: Keras' fit failed on it")
    return [Finding(text, points, why[key]) for key, (text, points) in texts.items()]


BATCHES = Task(
    id="10-batches",
    title="a data set whose first batch always divides",
    points=5,
    functions=("batched",),
    inputs=_batches_inputs,
    run=_batches_run,
    expected=_batches_expected,
    judge=_batches_judge,
    hints=(
        "Only the first batch has to divide. How large may it be at most, when there are many "
        "samples, and when there are few? What is left then?",
        "`len(dataset)` tells the samples. The first batch is the largest multiple of `replicas` "
        "that is within both `size` and the samples. Then come the others, in batches of a size "
        "that divides.",
        "With `whole = size - size % replicas` and `first` found likewise from the samples: "
        "`dataset.take(first).batch(first)`, then `.concatenate(...)` of `dataset.skip(first)` "
        "in batches of `whole`. When `first` is 0, raise ValueError.",
    ),
    wrong=(
        Wrong(
            "plain batches",
            """
def batched(dataset, size, replicas):
    return dataset.batch(size)
""",
            2,
        ),
        Wrong(
            "a size that divides, but short data sets are forgotten",
            """
def batched(dataset, size, replicas):
    return dataset.batch(size - size % replicas)
""",
            2,
        ),
        Wrong(
            "the remainder is dropped",
            """
def batched(dataset, size, replicas):
    return dataset.batch(size - size % replicas, drop_remainder=True)
""",
            1,
        ),
        Wrong(
            "one sample for each replica",
            """
def batched(dataset, size, replicas):
    return dataset.batch(replicas)
""",
            3,
        ),
        Wrong(
            "filled up with samples from the front",
            """
def batched(dataset, size, replicas):
    missing = -len(dataset) % replicas
    return dataset.concatenate(dataset.take(missing)).batch(size - size % replicas)
""",
            3,
        ),
        Wrong(
            "does not look whether there are enough",
            """
def batched(dataset, size, replicas):
    whole, n = size - size % replicas, len(dataset)
    first = min(whole, n - n % replicas)
    return dataset.take(first).batch(first).concatenate(dataset.skip(first).batch(whole))
""",
            4,
        ),
        Wrong(
            "refuses without a word",
            """
def batched(dataset, size, replicas):
    whole, n = size - size % replicas, len(dataset)
    first = min(whole, n - n % replicas)
    if first == 0:
        raise ValueError()
    return dataset.take(first).batch(first).concatenate(dataset.skip(first).batch(whole))
""",
            4,
        ),
        Wrong(
            "what is too few is trained all the same",
            """
def batched(dataset, size, replicas):
    whole, n = size - size % replicas, len(dataset)
    first = max(1, min(whole, n - n % replicas))
    return dataset.take(first).batch(first).concatenate(dataset.skip(first).batch(whole))
""",
            4,
        ),
    ),
)

# --- 10-audit ---------------------------------------------------------------------------

_KINDS = ("one copy", "mirrored", "drifted", "on read")


def _audit_inputs(seed: int) -> list:
    """How each variable is made, and the values of its three copies; `expected` has its kind."""
    rng = random.Random(seed)

    def numbers() -> list:
        return [rng.randint(1, 99) + 0.5 for _ in range(4)]

    out = []
    for kind in _KINDS:
        for trainable in (True, False):
            first = numbers()
            second = list(first)
            if kind == "drifted" and trainable:
                second[-1] += 1  # all but the last number are equal
            elif kind == "drifted":
                second[1], second[2] = first[2] + 1, first[1] - 1  # the sums are equal
            elif kind == "on read" and trainable:
                second = numbers()
            third = list(first) if kind != "on read" else numbers() if trainable else first
            made = {"mirrored": kind != "one copy", "on_read": kind == "on read"}
            out.append({**made, "trainable": trainable, "values": [first, second, third]})
    for where, off in ((2, 1.0), (1, 1e-7)):  # only the last copy; by very little
        values = [numbers()] * 3
        values[where] = [*values[0][:-1], values[0][-1] + off]
        made = {"mirrored": True, "on_read": False}
        out.append({**made, "trainable": True, "values": values})
    rng.shuffle(out)
    return [{"name": f"v{number}", **spec} for number, spec in enumerate(out)]


def _audit_run(student, inputs: list) -> Any:
    """What the student says of real variables of a MirroredStrategy."""
    from course_utils.grading.ranks import on_replicas

    def on_devices(strategy, audit, specs):
        import tensorflow as tf

        default = tf.distribute.get_strategy()
        answers = {}
        for spec in specs:
            options = {"trainable": spec["trainable"], "dtype": tf.float64}
            if spec["on_read"]:
                options["synchronization"] = tf.VariableSynchronization.ON_READ
                options["aggregation"] = tf.VariableAggregation.SUM
            with (strategy if spec["mirrored"] else default).scope():
                variable = tf.Variable(spec["values"][0], **options)
            if spec["mirrored"]:
                values = [tf.constant(value, tf.float64) for value in spec["values"]]

                def write(variable=variable, values=values):
                    context = tf.distribute.get_replica_context()
                    variable.assign(values[context.replica_id_in_sync_group])

                strategy.run(write)
            answers[spec["name"]] = audit(variable, strategy)
        return answers

    return on_replicas(on_devices, 3, student.audit, inputs)


def _audit_expected(inputs: list) -> dict:
    """Each variable's kind, by how it was made and what was written to its copies."""
    kinds = {}
    for spec in inputs:
        first, *others = spec["values"]
        kind = "mirrored" if others == [first, first] else "drifted"
        kind = "on read" if spec["on_read"] else kind
        kinds[spec["name"]] = kind if spec["mirrored"] else "one copy"
    return kinds


def _audit_judge(inputs: list, expected: dict, got: Any) -> list[Finding]:
    texts = {kind: f'"{kind}" is said of all that are so, and of no other' for kind in _KINDS}
    failed = item(got, "error")
    if type(failed) is str:
        failed = failed or "it failed without a word"
        return [Finding(text, 1, failed) for text in texts.values()]
    said = {name: item(got, name) for name in expected}
    odd = next((a for a in said.values() if type(a) is not str or a not in _KINDS), None)
    findings = []
    for kind, text in texts.items():
        missed = sum(want == kind and said[name] != kind for name, want in expected.items())
        extra = [
            f'{count(number, "variable")} that {"is" if number == 1 else "are"} "{other}"'
            for other in _KINDS
            if (number := sum(said[n] == kind for n, want in expected.items() if want == other))
            and other != kind
        ]
        total = sum(want == kind for want in expected.values())
        why = f"{missed} of {total} not recognised" if missed else ""
        if extra:
            why += ("; " if why else "") + "also said of " + " and ".join(extra)
        if missed and odd is not None:
            why += f"; you returned {describe(odd)} that is none of the four words"
        findings.append(Finding(text, 1, why))
    return findings


AUDIT = Task(
    id="10-audit",
    title="which variables are mirrored, and are they still equal",
    points=4,
    functions=("audit",),
    inputs=_audit_inputs,
    run=_audit_run,
    expected=_audit_expected,
    judge=_audit_judge,
    hints=(
        "`strategy.experimental_local_results(variable)` gives the copies. What do their number "
        "and their values tell you, and what can neither of them tell?",
        "One copy: done. Otherwise look at `variable.synchronization` first, because the copies "
        "of a sync-on-read variable may differ, and may be equal by chance. Only then compare "
        "all the numbers of the copies.",
        "`variable.synchronization.name == 'ON_READ'` is the second question; "
        "the third compares `copy.numpy()` of each copy with the first one's, by "
        "`np.array_equal`.",
    ),
    wrong=(
        Wrong(
            "believes the word mirrored",
            """
import tensorflow as tf
def audit(variable, strategy):
    if len(strategy.experimental_local_results(variable)) == 1:
        return "one copy"
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        return "on read"
    return "mirrored"
""",
            2,
        ),
        Wrong(
            "does not know of variables that are added up on reading",
            """
import numpy as np
def audit(variable, strategy):
    copies = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(copies) == 1:
        return "one copy"
    return "mirrored" if all(map(np.array_equal, copies, copies[:1] * 3)) else "drifted"
""",
            1,
        ),
        Wrong(
            "compares the first number only",
            """
import tensorflow as tf
def audit(variable, strategy):
    copies = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(copies) == 1:
        return "one copy"
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        return "on read"
    return "mirrored" if len({copy[0] for copy in copies}) == 1 else "drifted"
""",
            2,
        ),
        Wrong(
            "compares the sums",
            """
import tensorflow as tf
def audit(variable, strategy):
    copies = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(copies) == 1:
        return "one copy"
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        return "on read"
    return "mirrored" if len({copy.sum() for copy in copies}) == 1 else "drifted"
""",
            2,
        ),
        Wrong(
            "compares the first two copies only",
            """
import numpy as np
import tensorflow as tf
def audit(variable, strategy):
    copies = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(copies) == 1:
        return "one copy"
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        return "on read"
    return "mirrored" if np.array_equal(copies[0], copies[1]) else "drifted"
""",
            2,
        ),
        Wrong(
            "takes nearly equal for equal",
            """
import numpy as np
import tensorflow as tf
def audit(variable, strategy):
    copies = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
    if len(copies) == 1:
        return "one copy"
    if variable.synchronization == tf.VariableSynchronization.ON_READ:
        return "on read"
    return "mirrored" if all(np.allclose(copies[0], copy) for copy in copies) else "drifted"
""",
            2,
        ),
        Wrong(
            "takes what is trained for mirrored",
            """
def audit(variable, strategy):
    return "mirrored" if variable.trainable else "one copy"
""",
            0,
        ),
    ),
)

TASKS = (SHARE, BATCHES, AUDIT)
