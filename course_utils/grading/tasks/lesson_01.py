"""Tasks of lesson 01: place work, compute where you were told to, read a placement log."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, count, describe, is_list, item, same_matrix

# --- 01-round-robin ---------------------------------------------------------------------


def _deal_inputs(seed: int) -> list:
    rng = random.Random(seed)
    cases = []
    for jobs, devices in [(6, 2), (8, 3), (rng.randint(8, 13), 4), (2, 5), (0, 2), (3, 0)]:
        names = [f"job-{number}" for number in rng.sample(range(100, 1000), jobs)]
        cases.append({"jobs": names, "devices": [f"/gpu:{i}" for i in range(devices)]})
    return cases


def _deal_run(student, inputs: list) -> list:
    answers = []
    for case in inputs:
        try:
            answers.append({"plan": student.round_robin(case["jobs"], case["devices"])})
        except NotImplementedError:
            raise
        except Exception as error:
            if case["devices"]:
                raise
            answers.append({"error": type(error).__name__, "message": str(error)})
    return answers


def _deal_expected(inputs: list) -> list:
    """Deal from the devices' side: device k takes every n-th job, starting with its own."""
    answers: list[Any] = []
    for case in inputs:
        n = len(case["devices"])
        hands = {device: case["jobs"][k::n] for k, device in enumerate(case["devices"])}
        answers.append({job: device for device, hand in hands.items() for job in hand})
        if not n:
            answers[-1] = None  # no plan is right; what an error must be like, the judge knows
    return answers


def _no_device(answer: Any) -> str:
    """What is wrong with the answer to a plan without devices; empty when nothing is."""
    error, message = item(answer, "error"), item(answer, "message")
    if type(error) is not str or type(message) is not str:
        return "it did not raise"
    if error != "ValueError":
        return f"the call raised {error[:40]}"
    return "" if "device" in message.lower() else "the message of your error mentions no device"


def _deal_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    placed = even = order = no_device = ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, devices = item(item(got, number), "plan"), case["devices"]
        words = f"with {len(case['jobs'])} jobs on {len(devices)} devices, "
        if not devices:
            no_device = _no_device(item(got, number))
        elif type(answer) is not dict:
            placed = placed or f"{words}a dict was expected, not {describe(answer)}"
        elif set(answer) != set(case["jobs"]):
            placed = placed or f"{words}the dict has {len(answer)} jobs, or not the same ones"
        elif not all(type(d) is str and d in devices for d in answer.values()):
            placed = placed or f"{words}a job is on something that is not one of the devices"
        else:
            loads = [list(answer.values()).count(device) for device in devices]
            if max(loads) - min(loads) > 1:
                even = even or f"{words}one device has {max(loads) - min(loads)} jobs more"
            if answer != want:
                order = order or f"{words}a job is not on the device whose turn it was"
    skipped = "not judged until every job has its device" if placed else ""
    return [
        Finding("every job is placed, on one of the devices", 1, placed),
        Finding("no device has two jobs more than another", 1, skipped or even),
        Finding("the devices take turns, in their order", 1, skipped or order),
        Finding("without any device it raises a ValueError that says so", 1, no_device),
    ]


ROUND_ROBIN = Task(
    id="01-round-robin",
    title="place jobs on devices in turn",
    points=4,
    functions=("round_robin",),
    inputs=_deal_inputs,
    run=_deal_run,
    expected=_deal_expected,
    judge=_deal_judge,
    hints=(
        "Count the jobs from 0. After the last device it is the first one's turn again: which "
        "operator gives 0, 1, 2, 0, 1, 2, …?",
        "`enumerate(jobs)` gives each job its number; the number modulo the count of devices "
        "is the place of its device in the list. Look at the empty list of devices first.",
        "`if not devices: raise ValueError(...)`, then one dict comprehension over "
        "`enumerate(jobs)` whose value is `devices[number % len(devices)]`.",
    ),
    wrong=(
        Wrong(
            "blocks, and the remainder on the last device",
            """
def round_robin(jobs, devices):
    if not devices:
        raise ValueError("no devices")
    share = max(1, len(jobs) // len(devices))
    return {job: devices[min(i // share, len(devices) - 1)] for i, job in enumerate(jobs)}
""",
            2,
        ),
        Wrong(
            "the remainder is dropped",
            """
def round_robin(jobs, devices):
    if not devices:
        raise ValueError("no devices")
    share = len(jobs) // len(devices)
    return {jobs[r * len(devices) + k]: devices[k] for r in range(share)
            for k in range(len(devices))}
""",
            1,
        ),
        Wrong(
            "no device gives no plan and no error",
            """
from itertools import cycle
def round_robin(jobs, devices):
    return dict(zip(jobs, cycle(devices)))
""",
            3,
        ),
        Wrong(
            "an error that does not say what is missing",
            """
def round_robin(jobs, devices):
    if not devices:
        raise ValueError("bad input")
    return {job: devices[i % len(devices)] for i, job in enumerate(jobs)}
""",
            3,
        ),
        Wrong(
            "starts with the second device, and divides by zero",
            """
def round_robin(jobs, devices):
    return {job: devices[(i + 1) % len(devices)] for i, job in enumerate(jobs)}
""",
            2,
        ),
    ),
)

# --- 01-sum-of-products -----------------------------------------------------------------


def _sum_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def matrix() -> list[list[int]]:
        # Small whole numbers: float32 holds every product and sum exactly.
        return [[rng.randint(-9, 9) for _ in range(3)] for _ in range(3)]

    plans = (["/cpu:0", "/cpu:1"], ["/cpu:1", "/cpu:0"], ["/cpu:1", "/cpu:1", "/cpu:0", "/cpu:1"])
    return [{"pairs": [[matrix(), matrix()] for _ in plan], "devices": plan} for plan in plans]


def _sum_run(student, inputs: list) -> list:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    try:  # the same two logical devices again are no error, also after TensorFlow has started
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
    except RuntimeError:
        if len(tf.config.list_logical_devices("CPU")) < 2:
            raise RuntimeError(
                "TensorFlow has started with one logical CPU device: restart the kernel and "
                "run the first cell of the exercise before any other"
            ) from None

    def describe(value):
        if not isinstance(value, tf.Tensor) or not hasattr(value, "numpy"):
            return value
        return {"device": value.device, "value": value.numpy()}

    answers = []
    for case in inputs:
        pairs = [tuple(tf.constant(m, tf.float32) for m in pair) for pair in case["pairs"]]
        # CPU:0 is the default, so a sum without a block of its own would be there by chance.
        with tf.device("/cpu:1"):
            answer = student.sum_of_products(pairs, case["devices"])
        if type(answer) in (list, tuple) and len(answer) == 2:
            products, total = answer
            if type(products) in (list, tuple):
                products = [describe(product) for product in products]
            answer = [products, describe(total)]
        answers.append(answer)
    return answers


def _sum_expected(inputs: list) -> list:
    """Rows times columns in whole numbers, without TensorFlow."""
    answers = []
    for case in inputs:
        products = [
            [
                [
                    sum(x * y for x, y in zip(row, column, strict=True))
                    for column in zip(*b, strict=True)
                ]
                for row in a
            ]
            for a, b in case["pairs"]
        ]
        total = [
            [sum(cells) for cells in zip(*rows, strict=True)]
            for rows in zip(*products, strict=True)
        ]
        answers.append({"products": products, "total": total})
    return answers


def _ran_on(tensor: Any, device: str) -> bool:
    name = item(tensor, "device")
    return type(name) is str and name.endswith(f"/device:CPU:{device[-1]}")


def _elementwise(product: Any, pair: list) -> str:
    """Says so when the product is the element-wise one."""
    cells = [
        [x * y for x, y in zip(row, other, strict=True)] for row, other in zip(*pair, strict=True)
    ]
    return ": it is the element-wise product" if same_matrix(item(product, "value"), cells) else ""


def _sum_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    product_why = total_why = device_why = ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        words = f"in case {number + 1}, "
        answer = item(got, number)
        if not is_list(answer, 2):
            shape = f"{words}a pair (products, total) was expected, not {describe(answer)}"
            product_why, total_why = product_why or shape, total_why or shape
            continue
        products, total = answer
        if not is_list(products, len(case["pairs"])):
            product_why = product_why or f"{words}there must be one product for each pair"
        for i, goal in enumerate(want["products"]):
            product = item(products, i)
            if not same_matrix(item(product, "value"), goal):
                slip = _elementwise(product, case["pairs"][i])
                product_why = product_why or f"{words}product {i} is not A·B of its pair{slip}"
            if not _ran_on(product, case["devices"][i]):
                device_why = device_why or f"{words}product {i} is not on the device given for it"
        if not same_matrix(item(total, "value"), want["total"]):
            total_why = total_why or f"{words}the total is not the sum of all A·B"
        if not _ran_on(total, "/cpu:0"):
            device_why = device_why or f"{words}the sum was not computed on /cpu:0"
    if product_why:
        device_why = "not judged until the products are right"
    return [
        Finding("each product is A·B of its pair", 2, product_why),
        Finding("the total is the sum of the products", 2, total_why),
        Finding("each product and the sum ran where they should", 1, device_why),
    ]


SUM_OF_PRODUCTS = Task(
    id="01-sum-of-products",
    title="multiply on two devices, add on the first",
    points=5,
    functions=("sum_of_products",),
    inputs=_sum_inputs,
    run=_sum_run,
    expected=_sum_expected,
    judge=_sum_judge,
    hints=(
        "`with tf.device(name):` decides where the operations inside the block run. How many "
        "such blocks do you need: one, or one for each product?",
        "Loop over pairs and devices together, open a `tf.device` block for each product and "
        "append to a list. The sum needs a block of its own.",
        "`for (a, b), device in zip(pairs, devices): with tf.device(device): "
        "products.append(tf.matmul(a, b))`, then `tf.add_n(products)` inside "
        '`with tf.device("/cpu:0")`.',
    ),
    wrong=(
        Wrong(
            "no tf.device at all",
            """
import tensorflow as tf
def sum_of_products(pairs, devices):
    products = [tf.matmul(a, b) for a, b in pairs]
    return products, tf.add_n(products)
""",
            4,
        ),
        Wrong(
            "the sum has no device of its own",
            """
import tensorflow as tf
def sum_of_products(pairs, devices):
    products = []
    for (a, b), device in zip(pairs, devices):
        with tf.device(device):
            products.append(tf.matmul(a, b))
    return products, sum(products)
""",
            4,
        ),
        Wrong(
            "the sum stays on the last product's device",
            """
import tensorflow as tf
def sum_of_products(pairs, devices):
    products, total = [], 0
    for (a, b), device in zip(pairs, devices):
        with tf.device(device):
            products.append(tf.matmul(a, b))
            total = total + products[-1]
    return products, total
""",
            4,
        ),
        Wrong(
            "multiplies element by element",
            """
import tensorflow as tf
def sum_of_products(pairs, devices):
    products = []
    for (a, b), device in zip(pairs, devices):
        with tf.device(device):
            products.append(a * b)
    with tf.device("/cpu:0"):
        return products, tf.add_n(products)
""",
            0,
        ),
        Wrong(
            "adds only the first two products",
            """
import tensorflow as tf
def sum_of_products(pairs, devices):
    products = []
    for (a, b), device in zip(pairs, devices):
        with tf.device(device):
            products.append(tf.matmul(a, b))
    with tf.device("/cpu:0"):
        return products, products[0] + products[1]
""",
            3,
        ),
    ),
    self_reported=1,  # the device names come from the tensors in the student's process
)

# --- 01-placement-log -------------------------------------------------------------------

# What TensorFlow 2.21 prints besides placements, copied from a real run.
_NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:{t}    6756 direct_session.cc:382] Device mapping: no known devices.",
    "I0000 00:00:{t}    6756 mlir_graph_optimization_pass.cc:437] MLIR V1 optimization pass is "
    "not enabled",
    "I0000 00:00:{t}    6756 execute.cc:1775] Executing op MatMul in device "
    "/job:localhost/replica:0/task:0/device:CPU:0",
)
_SCOPES = ("layer", "tower_0", "tower_1", "optimizer/update", "w/Initializer")
_KINDS = ("MatMul", "AddV2", "Mul", "Const", "Placeholder", "AssignVariableOp", "_Arg", "_Retval")
_PLACES = (
    "/job:localhost/replica:0/task:0/device:CPU:0",
    "/job:localhost/replica:0/task:0/device:CPU:1",
    "/job:localhost/replica:0/task:0/device:GPU:0",
    "/job:worker/replica:0/task:1/device:CPU:0",
)


def _log_inputs(seed: int) -> list:
    rng = random.Random(seed)
    logs = []
    for size in (6, 14):
        places = [*_PLACES, *(rng.choice(_PLACES) for _ in range(size - len(_PLACES)))]
        lines = []
        for number, place in enumerate(places):
            # The first two share a type: a dict by type would lose one of them.
            kind = "MatMul" if number < 2 else rng.choice(_KINDS)
            scope = f"{rng.choice(_SCOPES)}/" if number % 3 else ""
            line = f"{scope}{kind.strip('_').lower()}_{number}: ({kind}): {place}"
            stamp = f"{1795230000 + number}.{rng.randrange(10**6):06}"
            logged = f"I0000 00:00:{stamp}    6756 placer.cc:162] {line}"
            # Stdout has the bare line, stderr the one with a prefix; a log may have both.
            lines += [[line], [logged], [line, logged]][number % 3]
            lines.append(_NOISE[number % len(_NOISE)].format(t=stamp))
        logs.append("\n".join(lines) + "\n")
    return logs


def _log_run(student, inputs: list) -> list:
    return [student.read_placement(log) for log in inputs]


def _log_expected(inputs: list) -> list:
    """Cut each line at its separators; lines that don't fall into three parts are noise."""
    answers = []
    for log in inputs:
        placement = {}
        for line in log.splitlines():
            parts = line.split("] ", 1)[-1].split(": ")
            if len(parts) == 3 and parts[2].startswith("/job:"):
                placement[parts[0]] = parts[2]
        answers.append(placement)
    return answers


def _quote(key: str) -> str:
    """A key of the student's own, escaped and shortened."""
    return f"{key[:40]!a}" + ("…" if len(key) > 40 else "")


def _log_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    names = noise = devices = ""
    for number, want in enumerate(expected):
        words, answer = f"in log {number + 1}, ", item(got, number)
        if type(answer) is not dict:
            names = names or f"{words}a dict was expected, not {describe(answer)}"
            continue
        missing, extra = set(want) - set(answer), [key for key in answer if key not in want]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            names = names or (
                f"{words}{len(missing)} of the {len(want)} operations {verb} not among the keys"
            )
        if extra:
            verb = "is" if len(extra) == 1 else "are"
            noise = noise or (
                f"{words}{len(extra)} of your {count(len(answer), 'key')} {verb} no operation's "
                f"name, such as {_quote(extra[0])}"
            )
        odd = sum(type(answer.get(op)) is not str or answer[op] != want[op] for op in want)
        if odd:
            verb = "lacks its" if odd == 1 else "lack their"
            devices = devices or f"{words}{odd} of the operations {verb} device's full name"
    if names:
        devices = "not judged until every operation is found"
        noise = noise or devices
    return [
        Finding("every operation is found", 1, names),
        Finding("nothing else is taken for an operation", 1, noise),
        Finding("each operation has the full name of its device", 1, devices),
    ]


PLACEMENT_LOG = Task(
    id="01-placement-log",
    title="read a placement log",
    points=3,
    functions=("read_placement",),
    inputs=_log_inputs,
    run=_log_run,
    expected=_log_expected,
    judge=_log_judge,
    hints=(
        "What do the bare line and the line with a time stamp have in common, read from the "
        "right-hand end? And what do the other lines lack?",
        "A placement line ends with `name: (Type): /job:…`. One regular expression with two "
        "groups finds it at the end of a line; `re.MULTILINE` lets `$` match at every line end.",
        r"The pattern has three parts with `: ` between them: a name without blanks, `(\S+)`; a "
        r"word in parentheses, which themselves need a backslash; and a second group that begins "
        r"with `/job:` and ends at `$`. `re.findall` gives pairs, and `dict` takes pairs.",
    ),
    wrong=(
        Wrong(
            "keyed by the operation's type",
            r"""
import re
def read_placement(log):
    return {kind: device for kind, device in re.findall(r"\((\w+)\): (/job:\S+)", log)}
""",
            0,
        ),
        Wrong(
            "keeps only the end of the device's name",
            r"""
import re
def read_placement(log):
    return dict(re.findall(r"(\S+): \(\w+\): /job:\S+device:(\S+)", log))
""",
            2,
        ),
        Wrong(
            "misses the lines with a time stamp",
            r"""
import re
def read_placement(log):
    return dict(re.findall(r"^(\S+): \(\w+\): (/job:\S+)$", log, re.MULTILINE))
""",
            0,
        ),
        Wrong(
            "takes the time stamp for a part of the name",
            r"""
import re
def read_placement(log):
    return dict(re.findall(r"^(.+): \(\w+\): (/job:\S+)$", log, re.MULTILINE))
""",
            0,
        ),
        Wrong(
            "takes eager execution for placement",
            r"""
import re
def read_placement(log):
    found = dict(re.findall(r"(\S+): \(\w+\): (/job:\S+)", log))
    found.update(re.findall(r"Executing op (\S+) in device (\S+)", log))
    return found
""",
            2,
        ),
    ),
)

TASKS = (ROUND_ROBIN, SUM_OF_PRODUCTS, PLACEMENT_LOG)
