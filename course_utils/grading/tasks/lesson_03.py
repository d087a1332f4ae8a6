"""Tasks of lesson 03: scatter with remainders, losses by count, the memory of device 0."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from ..task import Finding, Task, Wrong, close, count, describe, is_list, is_number, item


def _trouble(value: Any) -> str:
    """Why there is no value at all, in words; "" where there is one."""
    if value == "not attempted":
        return "not attempted yet"
    raised = item(value, "raised")
    return f"your code raised {raised[:40]}" if type(raised) is str else ""


# --- 03-scatter -------------------------------------------------------------------------


def _scatter_inputs(seed: int) -> list:
    rng = random.Random(seed)
    devices = rng.randint(3, 5)
    sizes = [
        (devices * rng.randint(2, 4), devices),
        (devices * rng.randint(2, 3) + 1, devices),
        (2 * devices - 1, devices),
        (devices + 1, devices),
        (devices - 1, devices),
        (rng.randint(5, 9), 1),
    ]
    width = rng.randint(2, 3)
    return [
        {
            "batch": [[rng.randint(-99, 99) / 4 for _ in range(width)] for _ in range(size)],
            "devices": number,
            "losses": [rng.randint(1, 99) / 4 for _ in range(1 if number == 1 else 3)],
        }
        for size, number in sizes
    ]


def _scatter_run(student, inputs: list) -> list:
    """Scatter a tensor; gather pieces that are not the student's own, and some scalars."""
    import torch

    def attempt(function, *args):
        try:
            return function(*args)
        except NotImplementedError:
            return "not attempted"
        except Exception as error:  # told with the input, and raised if nothing works
            errors.append(error)
            return {"raised": type(error).__name__}

    def plain(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def with_graph(value, sources):
        """The value, and the gradients that backward() on its sum gives to its sources."""
        if not isinstance(value, torch.Tensor):
            return [value, None]
        if value.requires_grad:
            value.sum().backward()
        return [value.tolist(), [None if x.grad is None else x.grad.tolist() for x in sources]]

    errors = []

    answers = []
    for case in inputs:
        batch = torch.tensor(case["batch"], dtype=torch.float64)
        leaf = batch.clone().requires_grad_()
        shards, kept = attempt(student.scatter, leaf, case["devices"]), None
        if isinstance(shards, (list, tuple)):
            if shards and all(isinstance(shard, torch.Tensor) for shard in shards):
                total = sum(shard.sum() for shard in shards)
                kept = with_graph(total, [leaf])[1]
            shards = [plain(shard) for shard in shards]
        first = 1 + len(batch) // 3
        pieces = [piece for piece in (batch[:first], batch[first:]) if len(piece)]
        pieces = [piece.clone().requires_grad_() for piece in pieces]
        losses = [torch.tensor(x, requires_grad=True) for x in case["losses"]]
        gathered = with_graph(attempt(student.gather, list(pieces)), pieces)
        scalars = with_graph(attempt(student.gather, list(losses)), losses)
        answers.append([plain(shards), gathered, scalars, kept])
    flat = [value for shards, *rest, _ in answers for value in (shards, *(x[0] for x in rest))]
    if all(isinstance(value, str) and value == "not attempted" for value in flat):
        raise NotImplementedError
    if len(errors) == len(flat):
        raise errors[0]
    return answers


def _scatter_expected(inputs: list) -> list:
    """Deal the samples out one by one to find the sizes; then cut."""
    answers = []
    for case in inputs:
        sizes = [0] * case["devices"]
        for sample in range(len(case["batch"])):
            sizes[sample % case["devices"]] += 1
        answers.append([size for size in sizes if size])
    return answers


def _shards_why(case: dict, sizes: list, shards: Any) -> dict:
    """What is wrong with the content, the sizes, and the empty shards; "" where nothing is."""
    about = f"{count(len(case['batch']), 'sample')} on {count(case['devices'], 'device')}"
    if trouble := _trouble(shards):
        return dict.fromkeys(("content", "sizes", "empty"), f"{about}: {trouble}")
    if not is_list(shards) or not all(is_list(shard) for shard in shards):
        why = f"{about}: a list of tensors was expected, not {describe(shards)}"
        return dict.fromkeys(("content", "sizes", "empty"), why)
    got = [len(shard) for shard in shards]
    joined = [sample for shard in shards for sample in shard]
    why = {"content": "", "sizes": "", "empty": ""}
    if joined != case["batch"]:
        fewer = "samples are missing" if len(joined) < len(case["batch"]) else "another order"
        many = "more samples than the batch has" if len(joined) > len(case["batch"]) else fewer
        why["content"] = f"{about}: joined again, the shards have {many}"
    full = [size for size in got if size]
    if len(got) > case["devices"]:
        why["sizes"] = f"{about}: {count(len(got), 'shard')} for so few devices"
    elif max(full, default=0) - min(full, default=0) > 1:
        why["sizes"] = f"{about}: the largest and the smallest differ by more than one sample"
    elif full != sorted(full, reverse=True):
        why["sizes"] = f"{about}: the larger shards come first"
    elif len(full) < len(sizes):
        why["sizes"] = f"{about}: a device that could have a sample has none"
    if 0 in got:
        why["empty"] = f"{about}: there is an empty shard"
    return why


def _numbers(value: Any) -> list:
    """All that is not a list in nested lists."""
    return [x for part in value for x in _numbers(part)] if type(value) is list else [value]


def _reached(gradients: Any, given: list) -> bool:
    """Whether each number that was given has a gradient of 1: that of a sum."""
    found = _numbers(gradients)
    return len(found) == len(_numbers(given)) and all(type(x) is float and x == 1 for x in found)


def _scatter_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(("content", "sizes", "empty", "graph", "gather", "scalars"), "")
    for number, (case, sizes) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, number)
        problems = _shards_why(case, sizes, item(answer, 0))
        if not _reached(item(answer, 3), case["batch"]):
            problems["graph"] = "backward() on the shards does not reach the batch"
        for key, place, want, kind in (
            ("gather", 1, case["batch"], "one tensor"),
            ("scalars", 2, case["losses"], "a vector"),
        ):
            value, gradients = item(item(answer, place), 0), item(item(answer, place), 1)
            problems[key] = _trouble(value)
            if problems[key]:
                continue
            if not is_list(value):
                problems[key] = f"{kind} was expected, not {describe(value)}"
            elif value != want and key == "gather":
                problems[key] = "the pieces do not follow each other along the first dimension"
            elif value != want:
                problems[key] = "the vector does not have each number once, in order"
            elif not _reached(gradients, want):
                problems[key] = "backward() on the result does not reach what was gathered"
        for about, problem in problems.items():
            why[about] = why[about] or problem
    if why["content"]:
        why["sizes"] = why["sizes"] or "not judged until every sample is there once, in order"
        why["empty"] = why["empty"] or "not judged until every sample is there once, in order"
    whole = why["content"] or why["graph"]
    return [
        Finding("every sample is in one shard, in order, with its graph", 1, whole),
        Finding("shards differ by one sample at most, the larger first", 1, why["sizes"]),
        Finding("no shard is empty", 1, why["empty"]),
        Finding("gather joins pieces along the first dimension", 1, why["gather"]),
        Finding("gather makes a vector of numbers without a dimension", 1, why["scalars"]),
    ]


_GATHER = """
def gather(outputs):
    if outputs[0].dim() == 0:
        return torch.stack(list(outputs))
    return torch.cat(list(outputs))
"""

SCATTER = Task(
    id="03-scatter",
    title="scatter and gather with remainders",
    points=5,
    functions=("scatter", "gather"),
    inputs=_scatter_inputs,
    run=_scatter_run,
    expected=_scatter_expected,
    judge=_scatter_judge,
    hints=(
        "How many samples does each device get if nothing is left over? How many are left "
        "over, and who takes them? And what if the first number is 0?",
        "`divmod(len(batch), devices)` gives both numbers. The first `rest` shards have one "
        "sample more. Leave out shards of size 0. For gather: `torch.cat` does not take tensors "
        "without a dimension, `torch.stack` makes a new dimension.",
        "`sizes = [whole + (i < rest) for i in range(devices)]`, without the zeros, and "
        "`batch.split(sizes)`. In gather: `torch.stack` if the first output has `dim() == 0`, "
        "otherwise `torch.cat`.",
    ),
    wrong=(
        Wrong(
            "torch.chunk, as nn.DataParallel does",
            """
import torch
def scatter(batch, devices):
    return list(batch.chunk(devices))
"""
            + _GATHER,
            4,
        ),
        Wrong(
            "drops the remainder",
            """
import torch
def scatter(batch, devices):
    whole = len(batch) // devices
    return [batch[i * whole : (i + 1) * whole] for i in range(devices)]
"""
            + _GATHER,
            2,
        ),
        Wrong(
            "deals the samples out like cards",
            """
import torch
def scatter(batch, devices):
    return [batch[i::devices] for i in range(min(devices, len(batch)))]
"""
            + _GATHER,
            2,
        ),
        Wrong(
            "tensor_split: empty shards, and cat for everything",
            """
import torch
def scatter(batch, devices):
    return list(batch.tensor_split(devices))
def gather(outputs):
    if outputs[0].dim() == 0:
        return sum(outputs) / len(outputs)
    return torch.cat(list(outputs))
""",
            3,
        ),
        Wrong(
            "gather copies numbers, so that the graph ends",
            """
import torch
def scatter(batch, devices):
    return [part for part in batch.tensor_split(devices) if len(part)]
def gather(outputs):
    if outputs[0].dim() == 0:
        return torch.tensor([output.item() for output in outputs])
    return torch.cat(list(outputs))
""",
            4,
        ),
        Wrong(
            "gather knows torch.cat only, which refuses numbers",
            """
import torch
def scatter(batch, devices):
    return [part for part in batch.tensor_split(devices) if len(part)]
def gather(outputs):
    return torch.cat(list(outputs))
""",
            4,
        ),
        Wrong(
            "the shards are cut off from the batch's graph",
            """
import torch
def scatter(batch, devices):
    return [part.detach() for part in batch.tensor_split(devices) if len(part)]
"""
            + _GATHER,
            4,
        ),
        Wrong(
            "gather hands a single number back as it is",
            """
import torch
def scatter(batch, devices):
    return [part for part in batch.tensor_split(devices) if len(part)]
def gather(outputs):
    if len(outputs) == 1:
        return outputs[0]
    return torch.stack(outputs) if outputs[0].dim() == 0 else torch.cat(outputs)
""",
            4,
        ),
        Wrong(
            "the last device takes all that is left",
            """
import torch
def scatter(batch, devices):
    whole = max(1, len(batch) // devices)
    devices = min(devices, len(batch))
    last = (devices - 1) * whole
    return [batch[i * whole : (i + 1) * whole] for i in range(devices - 1)] + [batch[last:]]
def gather(outputs):
    return torch.stack(list(outputs))
""".replace("return torch.stack", "if outputs[0].dim() == 0:\n        return torch.stack")
            + "    return torch.cat(list(outputs))\n",
            4,
        ),
    ),
)

# --- 03-combine -------------------------------------------------------------------------


def _combine_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def losses(number: int) -> list:
        return [rng.randint(1, 400) / 64 for _ in range(number)]

    return [
        {"about": "equal", "losses": losses(3), "counts": [rng.randint(3, 9)] * 3},
        {"about": "unequal", "losses": losses(2), "counts": [rng.randint(7, 9), 1]},
        {"about": "unequal", "losses": losses(4), "counts": rng.sample(range(1, 30), 4)},
        {
            "about": "empty",
            "losses": [*losses(2), None],
            "counts": [*rng.sample(range(2, 9), 2), 0],
        },
        {"about": "empty", "losses": [None, *losses(1)], "counts": [0, rng.randint(2, 9)]},
        {"about": "nothing", "losses": [None, None], "counts": [0, 0]},
        {"about": "fault", "losses": [*losses(1), None], "counts": rng.sample(range(2, 9), 2)},
        {"about": "fault", "losses": [*losses(1), "inf"], "counts": rng.sample(range(2, 9), 2)},
    ]


def _combine_run(student, inputs: list) -> list:
    """Combine tensors with a graph; a mean over no sample is not a number, as in PyTorch."""
    import torch

    answers, errors = [], []
    for case in inputs:
        numbers = [float("nan") if loss is None else float(loss) for loss in case["losses"]]
        losses = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in numbers]
        try:
            value = student.combine(list(losses), list(case["counts"]))
        except ValueError:
            answers.append("ValueError")
            continue
        except NotImplementedError:
            raise
        except Exception as error:  # told with the input, and raised if nothing works
            errors.append(error)
            answers.append({"raised": type(error).__name__})
            continue
        answer = {"value": value, "gradients": None}
        if isinstance(value, torch.Tensor):
            answer["value"] = value.tolist()  # of a tensor without a dimension: a number
            if value.dim():
                answer["dimensions"] = value.dim()
            if case["about"] == "fault":
                del answer["gradients"]
            elif value.requires_grad and value.dim() == 0:
                value.backward()
                answer["gradients"] = [0.0 if x.grad is None else float(x.grad) for x in losses]
        else:
            answer["type"] = type(value).__name__
        answers.append(answer)
    if len(errors) == len(inputs):
        raise errors[0]
    return answers


def _combine_expected(inputs: list) -> list:
    """Write every sample down with the mean of its shard, and take the mean of the list."""
    answers = []
    for case in inputs:
        if case["about"] == "fault":  # not a number in, not a number out
            answers.append({"value": None, "gradients": None})
            continue
        samples = [
            Fraction(loss)
            for loss, times in zip(case["losses"], case["counts"], strict=True)
            for _ in range(times)
        ]
        if not samples:
            answers.append(None)
            continue
        shares = [float(Fraction(times, len(samples))) for times in case["counts"]]
        answers.append({"value": float(sum(samples) / len(samples)), "gradients": shares})
    return answers


def _combine_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(("equal", "unequal", "empty", "nothing", "graph"), "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, about = item(got, number), case["about"]
        value, gradients = item(answer, "value"), item(answer, "gradients")
        if about == "fault":
            if value != {"$": "NaN" if None in case["losses"] else "infinity"}:
                why["empty"] = why["empty"] or (
                    f"counts {case['counts']}: a loss that is not a finite number, of a "
                    "shard that has samples, must show in the result"
                )
            continue
        if want is None:
            if answer != "ValueError":
                trouble = _trouble(answer) or "nothing was raised"
                why[about] = f"all counts are 0: {trouble}, a ValueError was expected"
            continue
        if trouble := _trouble(answer):
            why[about] = why[about] or f"counts {case['counts']}: {trouble}"
            continue
        if answer == "ValueError":
            why[about] = why[about] or "a ValueError, though there are samples"
        elif not close(value, want["value"], relative=1e-6):
            if is_list(value) and is_number(item(answer, "dimensions")):
                problem = "the result has a dimension; a tensor without one was expected"
            elif not is_number(value):
                problem = f"a tensor of one number was expected, not {describe(value)}"
                if about == "empty":
                    problem += "; what is 0 times the mean over nothing?"
            else:
                size = "large" if value > want["value"] else "small"
                problem = f"with counts {case['counts']} your loss is too {size}"
            why[about] = why[about] or problem
        elif not is_list(gradients, len(want["gradients"])):
            why["graph"] = why["graph"] or "the result has no graph: backward() does not reach it"
        elif not any(gradients):
            why["graph"] = why["graph"] or "no gradient arrives at any loss"
        elif not all(close(a, b, 1e-9) for a, b in zip(gradients, want["gradients"], strict=True)):
            why["graph"] = why["graph"] or (
                "the gradient of a shard's loss is not that shard's part of the samples"
            )
    if any(why[about] for about in ("equal", "unequal", "empty")):
        why["graph"] = why["graph"] or "not judged until the values are right"
    return [
        Finding("equal counts", 1, why["equal"]),
        Finding("unequal counts", 1, why["unequal"]),
        Finding("a shard without a sample counts nothing, any other counts", 1, why["empty"]),
        Finding("no sample at all is an error", 1, why["nothing"]),
        Finding("the gradient reaches every shard, by its count", 1, why["graph"]),
    ]


COMBINE = Task(
    id="03-combine",
    title="combine losses by count",
    points=5,
    functions=("combine",),
    inputs=_combine_inputs,
    run=_combine_run,
    expected=_combine_expected,
    judge=_combine_judge,
    hints=(
        "A mean times its count is a sum. Sums may be added, means may not. What is the mean "
        "over no sample, and what is 0 times that?",
        "Leave out the shards with count 0 before you compute anything. Then the sum of "
        "loss times count, divided by the sum of the counts. Stay with tensors, so that the "
        "graph stays too.",
        "`total = sum(counts)`; raise ValueError if it is 0; return "
        "`sum(loss * n for loss, n in zip(losses, counts) if n) / total`.",
    ),
    wrong=(
        Wrong(
            "the mean of the means",
            """
import torch
def combine(losses, counts):
    return torch.stack(losses).mean()
""",
            1,
        ),
        Wrong(
            "weighted, but 0 times not-a-number is not a number",
            """
def combine(losses, counts):
    if sum(counts) == 0:
        raise ValueError("no samples")
    return sum(loss * n for loss, n in zip(losses, counts)) / sum(counts)
""",
            3,
        ),
        Wrong(
            "leaves out what is not a number, not what has no sample",
            """
def combine(losses, counts):
    if sum(counts) == 0:
        raise ValueError("no samples")
    pairs = [(loss, n) for loss, n in zip(losses, counts) if not loss.isnan()]
    return sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)
""",
            3,
        ),
        Wrong(
            "leaves out infinite losses",
            """
def combine(losses, counts):
    if sum(counts) == 0:
        raise ValueError("no samples")
    pairs = [(loss, n) for loss, n in zip(losses, counts) if n and not loss.isinf()]
    return sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)
""",
            3,
        ),
        Wrong(
            "divides by zero where there is no sample",
            """
def combine(losses, counts):
    return sum(loss * n for loss, n in zip(losses, counts) if n) / sum(counts)
""",
            4,
        ),
        Wrong(
            "numbers instead of tensors",
            """
def combine(losses, counts):
    if sum(counts) == 0:
        raise ValueError("no samples")
    total = sum(loss.item() * n for loss, n in zip(losses, counts) if n)
    return total / sum(counts)
""",
            4,
        ),
        Wrong(
            "the sum of the losses",
            """
def combine(losses, counts):
    if sum(counts) == 0:
        raise ValueError("no samples")
    return sum(loss for loss, n in zip(losses, counts) if n)
""",
            1,
        ),
        Wrong(
            "the weights without a graph to the first loss",
            """
import torch
def combine(losses, counts):
    pairs = [(loss, n) for loss, n in zip(losses, counts) if n]
    if not pairs:
        return torch.zeros(())
    first = pairs[0][0].detach() * pairs[0][1]
    return (first + sum(loss * n for loss, n in pairs[1:])) / sum(counts)
""",
            3,
        ),
    ),
)

# --- 03-memory --------------------------------------------------------------------------


def _memory_inputs(seed: int) -> dict:
    rng = random.Random(seed)

    def case(shards: list, **changes) -> dict:
        numbers = {
            "weights": rng.randint(1000, 9000),
            "sample": rng.randint(10, 99),
            "activations": rng.randint(100, 900),
            "output": rng.randint(100, 900),
            "state": rng.choice([0, 1, 2]),
        }
        return {"shards": shards, **numbers, **changes}

    def shards(number: int) -> list:
        return [rng.randint(5, 9) for _ in range(number - 1)] + [rng.randint(1, 4)]

    cases = [
        case(shards(2), sample=0, activations=0, output=0, state=0),
        case(shards(3), sample=0, activations=0, output=0, state=2),
        case(shards(2), output=0),
        case(shards(2)),
        case(shards(4)),
        case([rng.randint(3, 6), 0]),
        case([4, 4, 1, 0]),
        case([0, 0]),
    ]
    limits = []
    for devices in (2, 3, 4):
        base = case([0] * devices, state=2)
        fixed = 4 * base["weights"] * 4
        limits.append(base | {"devices": devices, "limit": fixed + rng.randint(40_000, 90_000)})
    tight = case([0, 0], state=1)
    limits.append(tight | {"devices": 2, "limit": 4 * tight["weights"] * 2})
    for devices in (2, 3):  # exactly full, to the byte
        full = case([0] * devices, state=1)
        shards_of = [rng.randint(3, 6)] * devices
        limit = max(_bytes_by_device(full, shards_of))
        limits.append(full | {"devices": devices, "limit": limit})
    for devices in (2, 4):  # room for a fraction of a shard: no sample more
        few = case([0] * devices, sample=1, output=1, activations=4 * rng.randint(25, 90), state=0)
        limit = max(_bytes_by_device(few, [rng.randint(1, 3)] * devices))
        limits.append(few | {"devices": devices, "limit": limit + 3 * few["activations"]})
    return {"cases": cases, "limits": limits}


def _memory_run(student, inputs: dict) -> dict:
    def attempt(function, *args):
        try:
            value = function(*args)
        except NotImplementedError:
            return "not attempted"
        except Exception as error:  # told with the input, and raised if nothing works
            errors.append(error)
            return {"raised": type(error).__name__}
        return list(value) if isinstance(value, tuple) else value

    errors = []
    names = ("weights", "sample", "activations", "output", "state")
    answer = {
        "bytes": [
            attempt(student.device_bytes, list(case["shards"]), *(case[n] for n in names))
            for case in inputs["cases"]
        ],
        "batches": [
            attempt(
                student.largest_batch, case["limit"], case["devices"], *(case[n] for n in names)
            )
            for case in inputs["limits"]
        ],
    }
    if all(value == "not attempted" for values in answer.values() for value in values):
        raise NotImplementedError
    if len(errors) == sum(map(len, answer.values())):
        raise errors[0]
    return answer


def _tensors(case: dict, shards: list) -> list[tuple[int, int]]:
    """(device, numbers) of every tensor that is alive, one by one."""
    alive = []
    for device, samples in enumerate(shards):
        if device == 0 or samples:
            alive += [(device, case["weights"])] * 2
            alive += [(device, case["activations"])] * samples
        if device:
            alive += [(device, case["sample"])] * samples
    alive += [(0, case["weights"])] * case["state"]
    alive += [(0, case["sample"]), (0, case["output"])] * sum(shards)
    return alive


def _bytes_by_device(case: dict, shards: list) -> list[int]:
    totals = [0] * len(shards)
    for device, numbers in _tensors(case, shards):
        totals[device] += 4 * numbers
    return totals


def _memory_expected(inputs: dict) -> dict:
    """Lists every tensor; for the largest batch, tries one size after the other."""
    batches = []
    for case in inputs["limits"]:
        size = 0
        while True:
            whole, rest = divmod(size + 1, case["devices"])
            shards = [whole + (i < rest) for i in range(case["devices"])]
            if max(_bytes_by_device(case, shards)) > case["limit"]:
                break
            size += 1
        batches.append(size)
    return {
        "bytes": [_bytes_by_device(case, case["shards"]) for case in inputs["cases"]],
        "batches": batches,
    }


def _memory_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    why = dict.fromkeys(("zero", "others", "idle", "batch"), "")
    for number, (case, want) in enumerate(zip(inputs["cases"], expected["bytes"], strict=True)):
        answer = item(item(got, "bytes"), number)
        about = f"shards {case['shards']}"
        if trouble := _trouble(answer):
            why |= {k: why[k] or f"{about}: {trouble}" for k in ("zero", "others", "idle")}
            continue
        if not is_list(answer, len(want)) or not all(map(is_number, answer)):
            problem = f"{about}: a list of {len(want)} numbers was expected, not {describe(answer)}"
            why |= {key: why[key] or problem for key in ("zero", "others", "idle")}
            continue
        for device, (mine, right) in enumerate(zip(answer, want, strict=True)):
            if close(mine, right, relative=1e-9):
                continue
            key = "zero" if device == 0 else "others" if case["shards"][device] else "idle"
            size = "much" if mine > right else "little"
            problem = f"{about}, state {case['state']}: too {size} on device {device}"
            if not any(case[name] for name in ("sample", "activations", "output")):
                problem += " (here nothing but what belongs to the weights counts)"
            elif case["output"] == 0:
                problem += " (here the output takes nothing)"
            why[key] = why[key] or problem
    for number, (case, want) in enumerate(zip(inputs["limits"], expected["batches"], strict=True)):
        answer = item(item(got, "batches"), number)
        if type(answer) is int and answer == want:
            continue
        about = f"{case['devices']} devices"
        if trouble := _trouble(answer):
            problem = f"{about}: {trouble}"
        elif type(answer) is not int:
            problem = f"{about}: a whole number was expected, not {describe(answer)}"
        elif answer < 0:
            problem = f"{about}: a number of samples is never negative"
        elif answer > want:
            problem = f"{about}: with this batch some device needs more than the limit"
        else:
            problem = f"{about}: one sample more would still fit everywhere"
        why["batch"] = why["batch"] or problem
    return [
        Finding("bytes of device 0", 2, why["zero"]),
        Finding("bytes of the others", 1, why["others"]),
        Finding("a device without a sample holds nothing", 1, why["idle"]),
        Finding("the largest batch that fits on every device", 2, why["batch"]),
    ]


_SEARCH = (
    "    size = 0\n"
    "    while True:\n"
    "        whole, rest = divmod(size + 1, devices)\n"
    "        shards = [whole + (i < rest) for i in range(devices)]\n"
    "        sizes = (weights, sample, activations, output, state)\n"
    "        if max(device_bytes(shards, *sizes)) > limit:\n"
    "            return size\n"
    "        size += 1\n"
)


def _memory_answer(replica: str, zero: str, idle: str = "0", largest: str = "") -> str:
    largest = largest or _SEARCH
    return f"""
def device_bytes(shards, weights, sample, activations, output, state):
    batch = sum(shards)
    zero = {zero}
    others = [({replica}) if n else ({idle}) for n in shards[1:]]
    return [4 * numbers for numbers in [zero, *others]]
def largest_batch(limit, devices, weights, sample, activations, output, state):
{largest}"""


_REPLICA = "2 * weights + n * (sample + activations)"
_ZERO = "(2 + state) * weights + batch * (sample + output) + shards[0] * activations"

MEMORY = Task(
    id="03-memory",
    title="predict the memory of device 0",
    points=6,
    functions=("device_bytes", "largest_batch"),
    inputs=_memory_inputs,
    run=_memory_run,
    expected=_memory_expected,
    judge=_memory_judge,
    hints=(
        "Go through the table line by line, and ask of each: on which device, and for how many "
        "samples: those of the shard, or all?",
        "Device 0: weights, gradients and state; input and output of the whole batch; "
        "activations of its own shard. Others: weights, gradients, and input and activations of "
        "their shard. For the largest batch, try sizes upwards until one does not fit.",
        "`zero = (2 + state) * weights + sum(shards) * (sample + output) + shards[0] * "
        "activations`; another device with n samples has `2 * weights + n * (sample + "
        "activations)`; times 4 bytes. In largest_batch, cut `size + 1` samples with divmod and "
        "return `size` when `max(device_bytes(...)) > limit`.",
    ),
    wrong=(
        Wrong(
            "the batch is shared equally, and so is everything",
            _memory_answer(
                "(2 + state) * weights + n * (sample + activations + output)",
                "(2 + state) * weights + shards[0] * (sample + activations + output)",
                "(2 + state) * weights",
            ),
            0,
        ),
        Wrong(
            "device 0 has the output of its own shard only",
            _memory_answer(_REPLICA, _ZERO.replace("+ output)", ")") + " + shards[0] * output"),
            2,
        ),
        Wrong(
            "every device has the optimizer's state",
            _memory_answer("(2 + state) * weights + n * (sample + activations)", _ZERO),
            5,
        ),
        Wrong(
            "a replica where there is no sample",
            _memory_answer(_REPLICA, _ZERO, idle="2 * weights"),
            5,
        ),
        Wrong(
            "device 0 empty where the batch is",
            _memory_answer(_REPLICA, f"({_ZERO}) if batch else 0"),
            4,
        ),
        Wrong(
            "gradients forgotten",
            _memory_answer(
                _REPLICA.replace("2 * weights", "weights"), _ZERO.replace("(2 +", "(1 +")
            ),
            1,
        ),
        Wrong(
            "stops one sample before a device is exactly full",
            _memory_answer(_REPLICA, _ZERO, largest=_SEARCH.replace("> limit", ">= limit")),
            4,
        ),
        Wrong(
            "a formula that shares a sample among devices",
            _memory_answer(
                _REPLICA,
                _ZERO,
                largest="    room = limit / 4 - (2 + state) * weights\n"
                "    return max(0, int(room // (sample + output + activations / devices)))\n",
            ),
            4,
        ),
        Wrong(
            "the largest batch is not written yet",
            _memory_answer(_REPLICA, _ZERO, largest="    raise NotImplementedError\n"),
            4,
        ),
        Wrong(
            "the largest batch of one device, times the devices",
            _memory_answer(
                _REPLICA,
                _ZERO,
                largest="    one = 4 * (sample + activations + output)\n"
                "    return max(0, (limit - 4 * (2 + state) * weights) // one) * devices\n",
            ),
            4,
        ),
    ),
)

TASKS = (SCATTER, COMBINE, MEMORY)
