"""Tasks of lesson 08: the slots of GPipe, a block in columns and rows, stages of equal cost."""

from __future__ import annotations

import itertools
import random
from typing import Any

from ..task import Finding, Task, Wrong, close, count, describe, is_list, item

# --- 08-gpipe ---------------------------------------------------------------------------


def _gpipe_inputs(seed: int) -> list:
    rng = random.Random(seed)
    cases = [(1, 3), (2, 1), (2, 4), (3, 2), (rng.randint(3, 5), rng.randint(6, 40))]
    return [{"stages": p, "micro_batches": m} for p, m in cases]


def _gpipe_run(student, inputs: list) -> list:
    return [student.gpipe_slots(case["stages"], case["micro_batches"]) for case in inputs]


def _gpipe_expected(inputs: list) -> list:
    """How many slots are enough: the last stage starts late twice, and works without a gap."""
    return [2 * (case["stages"] - 1) + 2 * case["micro_batches"] for case in inputs]


def _places(case: dict, table: Any) -> tuple[dict, str]:
    """Where each pass stands, as {(kind, micro-batch, stage): slot}, or what is wrong."""
    p, m = case["stages"], case["micro_batches"]
    if not is_list(table, p):
        return {}, f"a list of {count(p, 'row')} was expected, not {describe(table)}"
    names = {f"{kind}{i}": (kind, i) for kind in "FB" for i in range(m)}
    places = {}
    for stage, row in enumerate(table):
        if not is_list(row):
            return {}, f"the row of stage {stage} is no list, but {describe(row)}"
        for slot, entry in enumerate(row):
            if entry is None:
                continue
            if type(entry) is not str or entry not in names:
                shown = repr(entry[:10]) if type(entry) is str else describe(entry)
                return {}, f"stage {stage}: {shown} is neither None nor a pass of a micro-batch"
            if (*names[entry], stage) in places:
                return {}, f"stage {stage} does {entry} twice"
            places[(*names[entry], stage)] = slot
        missing = next((n for n, key in names.items() if (*key, stage) not in places), None)
        if missing:
            return {}, f"stage {stage} never does {missing}"
    return places, ""


def _too_early(case: dict, places: dict) -> str:
    """The first pass that does not have what it needs."""
    last = case["stages"] - 1
    for (kind, i, stage), slot in sorted(places.items(), key=lambda entry: entry[1]):
        if kind == "B" and places["F", i, stage] >= slot:
            return f"stage {stage} does B{i} before F{i}"
        step = 1 if kind == "B" else -1
        if 0 <= stage + step <= last and places[kind, i, stage + step] >= slot:
            return f"stage {stage} does {kind}{i} before stage {stage + step} has sent for it"
    return ""


def _phases(case: dict, places: dict) -> str:
    for stage in range(case["stages"]):
        latest = max(slot for (kind, _, s), slot in places.items() if (kind, s) == ("F", stage))
        first = min(slot for (kind, _, s), slot in places.items() if (kind, s) == ("B", stage))
        if first < latest:
            return f"stage {stage} starts with backward passes before its last forward pass"
    return ""


def _gpipe_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    once = needs = phases = short = ""
    for number, (case, slots) in enumerate(zip(inputs, expected, strict=True)):
        where = f"{count(case['stages'], 'stage')}, {count(case['micro_batches'], 'micro-batch')}: "
        where = where.replace("micro-batchs", "micro-batches")
        table = item(got, number)
        places, problem = _places(case, table)
        if problem:
            once = once or where + problem
            continue
        if problem := _too_early(case, places):
            needs = needs or where + problem
        if problem := _phases(case, places):
            phases = phases or where + problem
        lengths = {len(row) for row in table}
        if len(lengths) > 1:
            short = short or f"{where}the rows have different lengths; fill up with None"
        elif lengths != {slots}:
            which = "more" if max(lengths) > slots else "fewer"
            short = short or f"{where}{which} slots than GPipe needs"
    if once:
        needs = phases = short = "not judged until every stage does every pass once"
    elif needs or phases:
        short = "not judged until the order is right"
    return [
        Finding("every stage does every forward and every backward pass once", 2, once),
        Finding("no pass comes before what it needs", 1, needs),
        Finding("on every stage all forward passes come before the backward passes", 1, phases),
        Finding("no slot more than necessary", 2, short),
    ]


GPIPE = Task(
    id="08-gpipe",
    title="the schedule of GPipe, slot by slot",
    points=6,
    functions=("gpipe_slots",),
    inputs=_gpipe_inputs,
    run=_gpipe_run,
    expected=_gpipe_expected,
    judge=_gpipe_judge,
    hints=(
        "Draw it for 2 stages and 2 micro-batches, slot by slot. When can stage 1 do F0 at the "
        "earliest? And stage 0 its B0?",
        "Start with rows of None, all as long as the whole step. Micro-batch i comes to stage s "
        "in slot s + i. In the backward phase the *last* stage begins, and each stage before it "
        "is one slot later; the phase begins when the last stage has done its last forward pass.",
        "A phase has `phase = m + p - 1` slots, so a row is `[None] * (2 * phase)`. Then for "
        'every stage s and micro-batch i: `row[s + i] = f"F{i}"` and '
        '`row[phase + (p - 1 - s) + i] = f"B{i}"`.',
    ),
    wrong=(
        Wrong(
            "one micro-batch after the other through all stages",
            """
def gpipe_slots(stages, micro_batches):
    length = 2 * stages * micro_batches
    rows = [[None] * length for _ in range(stages)]
    for i in range(micro_batches):
        for s in range(stages):
            rows[s][i * stages + s] = f"F{i}"
            rows[s][length // 2 + i * stages + stages - 1 - s] = f"B{i}"
    return rows
""",
            4,
        ),
        Wrong(
            "every stage starts at once",
            """
def gpipe_slots(stages, micro_batches):
    row = [f"{kind}{i}" for kind in "FB" for i in range(micro_batches)]
    return [list(row) for _ in range(stages)]
""",
            3,
        ),
        Wrong(
            "the backward phase begins at stage 0 too",
            """
def gpipe_slots(stages, micro_batches):
    phase = micro_batches + stages - 1
    rows = [[None] * (2 * phase) for _ in range(stages)]
    for s in range(stages):
        for i in range(micro_batches):
            rows[s][s + i] = f"F{i}"
            rows[s][phase + s + i] = f"B{i}"
    return rows
""",
            3,
        ),
        Wrong(
            "1F1B",
            """
def gpipe_slots(stages, micro_batches):
    orders = []
    for s in range(stages):
        ahead = min(stages - 1 - s, micro_batches)
        order = [("F", i) for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                order.append(("F", ahead + i))
            order.append(("B", i))
        orders.append(order)
    rows, done, slot = [[] for _ in orders], {}, 0
    while any(orders):
        for s, order in enumerate(orders):
            entry = None
            if order:
                kind, i = order[0]
                other = s - 1 if kind == "F" else s + 1
                if not 0 <= other < stages or done.get((kind, i, other), slot) < slot:
                    done[kind, i, s] = slot
                    entry = f"{kind}{i}"
                    order.pop(0)
            rows[s].append(entry)
        slot += 1
    return rows
""",
            3,
        ),
        Wrong(
            "without the idle slots at the end",
            """
def gpipe_slots(stages, micro_batches):
    phase = micro_batches + stages - 1
    rows = []
    for s in range(stages):
        row = [None] * (phase + stages - 1 - s + micro_batches)
        for i in range(micro_batches):
            row[s + i] = f"F{i}"
            row[phase + stages - 1 - s + i] = f"B{i}"
        rows.append(row)
    return rows
""",
            4,
        ),
        Wrong(
            "the forward phase alone",
            """
def gpipe_slots(stages, micro_batches):
    idle = stages - 1
    forward = [f"F{i}" for i in range(micro_batches)]
    return [[None] * s + forward + [None] * (idle - s) for s in range(stages)]
""",
            0,
        ),
    ),
)

# --- 08-tensor --------------------------------------------------------------------------

# Small whole numbers: then no order of the additions changes a result.
_RANKS = 2


def _tensor_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def matrix(rows, columns):
        return [[rng.choice([-3, -2, -1, 1, 2, 3]) for _ in range(columns)] for _ in range(rows)]

    cases = []
    for samples, width, hidden in ((3, 2, 4), (rng.randint(2, 4), 3, 2 * rng.randint(3, 5))):
        first, second = matrix(width, hidden), matrix(hidden, width)
        half = hidden // _RANKS
        parts = [slice(rank * half, (rank + 1) * half) for rank in range(_RANKS)]
        case = {"A": first, "B": second, "x": matrix(samples, width)}
        case["gradient"] = matrix(samples, width)
        case["slices"] = [[[row[part] for row in first], second[part]] for part in parts]
        case["counts"] = [_RANKS, hidden]
        cases.append(case)
    return cases


def _tensor_run(student, inputs: list) -> Any:
    """Slices for any number of ranks here; forward and backward, each on two ranks, alone."""
    import re

    import torch

    from course_utils.launch import RankError, launch

    names = ("slice_weights", "block_forward", "block_backward")
    later = "not attempted yet"

    def tensor(rows, device="cpu"):
        return torch.tensor(rows, dtype=torch.float64, device=device)

    def plainly(value):
        if isinstance(value, torch.Tensor):
            return value.tolist()
        return {"no tensor": "None" if value is None else type(value).__name__}

    def several(values, wanted):
        if not isinstance(values, (tuple, list)) or len(values) != wanted:
            return {"no tensor": f"something else than {wanted} tensors"}
        return [plainly(value) for value in values]

    def call(function, *tensors_and_more):
        """The result, and whether an argument has been changed."""
        tensors = [t for t in tensors_and_more if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in tensors]
        result = function(*tensors_and_more)
        return result, not all(map(torch.equal, tensors, before))

    def on_rank(name, function, cases):
        import torch.distributed as dist

        device = "cuda" if torch.cuda.is_available() else "cpu"
        answers = []
        for case in cases:
            sums = []

            def all_reduce(t, sums=sums):
                if not isinstance(t, torch.Tensor):
                    raise TypeError(f"all_reduce(t) takes a tensor, not {type(t).__name__}")
                sums.append(t.numel())
                dist.all_reduce(t)

            parts = case["slices"][dist.get_rank()]
            arguments = [tensor(rows, device) for rows in (case["x"], *parts)]
            if name == "block_backward":
                arguments.insert(0, tensor(case["gradient"], device))
            result, changed = call(function, *arguments, all_reduce)
            result = several(result, 3) if name == "block_backward" else plainly(result)
            answers.append({"result": result, "changed": changed, "sums": sums})
        return answers

    answers, where = {}, ""
    try:
        cut = []
        answers["slice_weights"] = {"cases": cut}
        for case in inputs:
            parts = []
            cut.append(parts)  # now: an error later on leaves what was right or wrong before it
            for ranks in case["counts"]:
                for rank in range(ranks):
                    where = f"rank {rank} of {ranks}"
                    A, B = tensor(case["A"]), tensor(case["B"])
                    parts.append(several(student.slice_weights(A, B, rank, ranks), 2))
    except NotImplementedError:
        answers["slice_weights"] = {"error": later}
    except Exception as error:  # the other two functions are judged nevertheless
        text = f"{where}: {type(error).__name__}: {str(error)[:150]}"
        answers["slice_weights"]["error"] = text
    for name in names[1:]:
        try:
            answers[name] = launch(on_rank, 2, name, getattr(student, name), inputs, timeout=60)
        except RankError as error:
            line = re.findall(rf"in (?:{'|'.join(names)})\n\s+(.+)", error.traceback)
            where = f" at `{line[-1].strip()}`" if line else ""
            text = f"rank {error.rank}: {error.type_name}{where}: {error.message[:150]}"
            if error.type_name == "NotImplementedError":
                text = later
            elif isinstance(error, TimeoutError):
                text = f"a rank waits{where}, and the other one does not come"
            answers[name] = {"error": text}
    if all(answers[name] == {"error": later} for name in names):
        raise NotImplementedError
    return answers


def _tensor_expected(inputs: list) -> list:
    """The whole block on one device, in plain whole numbers; then what each rank should have."""

    def product(a, b):
        columns = list(zip(*b, strict=True))
        return [[sum(u * v for u, v in zip(row, c, strict=True)) for c in columns] for row in a]

    def turned(a):
        return [list(column) for column in zip(*a, strict=True)]

    answers = []
    for case in inputs:
        before = product(case["x"], case["A"])
        hidden = [[max(value, 0) for value in row] for row in before]
        into = product(case["gradient"], turned(case["B"]))
        rows = zip(into, before, strict=True)
        into = [[g * (v > 0) for g, v in zip(r, b, strict=True)] for r, b in rows]
        first, second = product(turned(case["x"]), into), product(turned(hidden), case["gradient"])
        half = len(second) // _RANKS
        size = len(case["x"]) * len(case["x"][0])
        cuts = []
        for count_of_ranks in case["counts"]:
            wide = len(second) // count_of_ranks
            for start in range(0, len(second), wide):
                part = slice(start, start + wide)
                cuts.append([[row[part] for row in case["A"]], case["B"][part]])
        ranks = []
        for rank in range(_RANKS):
            part = slice(rank * half, (rank + 1) * half)
            gradients = [product(into, turned(case["A"])), [row[part] for row in first]]
            y, gradients = product(hidden, case["B"]), [*gradients, second[part]]
            ranks.append({"y": y, "gradients": gradients, "sums": [size]})
        answers.append({"slices": cuts, "ranks": ranks})
    return answers


def _same(got: Any, want: Any) -> bool:
    if type(want) is list:
        return is_list(got, len(want)) and all(map(_same, got, want))
    return close(got, want, relative=1e-9)


_SLICES = ("A", "B")
_TENSOR = {
    "slices": "each rank gets an equal part: columns of A, rows of B",
    "y": "the output on both ranks is that of one device",
    "x": "the gradient of x on both ranks is that of one device",
    "weights": "each rank has the gradients of its own slices",
    "sums": "one all_reduce in the forward pass and one in the backward pass, none larger than x",
}


def _tensor_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_TENSOR, "")

    def note(key, problem):
        why[key] = why[key] or problem

    def error_of(name):
        error = item(item(got, name), "error")
        return f"{name}: {error[:400]}" if type(error) is str else ""

    error = error_of("slice_weights")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        pairs = [(rank, ranks) for ranks in case["counts"] for rank in range(ranks)]
        for index, (rank, ranks) in enumerate(pairs):
            pair = item(item(item(item(got, "slice_weights"), "cases"), number), index)
            for k, name in enumerate(_SLICES):
                where, goal = f"rank {rank} of {ranks}, {name}", want["slices"][index][k]
                if not is_list(pair, 2):
                    note("slices", error or f"rank {rank} of {ranks}: two tensors were expected")
                elif not _same(pair[k], goal):
                    note("slices", _slice_why(where, pair[k], goal))
    for name, keys in (("block_forward", ("y",)), ("block_backward", ("x", "weights"))):
        error, which = error_of(name), name.removeprefix("block_")
        for rank, number in itertools.product(range(_RANKS), range(len(expected))):
            want = expected[number]["ranks"][rank]
            answer = item(item(item(got, name), rank), number)
            result, sums = item(answer, "result"), item(answer, "sums")
            instead = item(result, "no tensor")
            if type(instead) is str:
                instead = f"rank {rank}: {name} returns {instead[:60]}"
            elif item(answer, "changed") is not False:
                instead = f"rank {rank}: {name} changes its arguments"
            else:
                instead = ""
            if error or instead:
                for key in keys:
                    note(key, error or instead)
            elif name == "block_forward" and not _same(result, want["y"]):
                note("y", f"rank {rank} has another output")
            elif name == "block_backward":
                if not is_list(result, 3) or not _same(result[0], want["gradients"][0]):
                    note("x", f"rank {rank} has another gradient")
                for k, part in enumerate(_SLICES, 1):
                    if not is_list(result, 3) or not _same(result[k], want["gradients"][k]):
                        note("weights", f"rank {rank}: the gradient of its slice of {part} differs")
            if not _same(sums, want["sums"]):
                times = count(len(sums), "call") if is_list(sums) else "no count of the calls"
                size = ", with a tensor of another size" if is_list(sums, 1) else ""
                text = f"{times} of the `all_reduce` that was handed in{size}"
                note("sums", error or f"{text}, in the {which} pass")
    return [Finding(text, 2, why[key]) for key, text in _TENSOR.items()]


def _slice_why(where: str, got: Any, want: list) -> str:
    shaped = is_list(got, len(want)) and all(is_list(row, len(want[0])) for row in got)
    return f"{where}: " + (
        "right shape, other numbers" if shaped else "not a slice of the right shape"
    )


TENSOR = Task(
    id="08-tensor",
    title="a block in columns and rows, on two real ranks",
    points=10,
    functions=("slice_weights", "block_forward", "block_backward"),
    inputs=_tensor_inputs,
    run=_tensor_run,
    expected=_tensor_expected,
    judge=_tensor_judge,
    hints=(
        "On which side of x A is the hidden width, that of h? It is the one that is cut, in A "
        "and in B. And where does each rank have only a part of a sum: forward, backward?",
        "Cut A in columns and B in rows. In the forward pass y is a sum over the ranks. In the "
        "backward pass the gradient of x is a sum over the ranks, because each rank knows only "
        "what came through its own columns. The gradients of A and B belong to one rank alone.",
        "`A.chunk(ranks, dim=1)[rank]`, `B.chunk(ranks, dim=0)[rank]`. Forward: `y = h @ B`, "
        "`all_reduce(y)`. Backward: `into = (gradient @ B.T) * (x @ A > 0)`; then A's gradient "
        "is `x.T @ into`, B's is `h.T @ gradient`, and that of x `into @ A.T`, summed.",
    ),
    wrong=(
        Wrong(
            "no sum in the backward pass",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    return into @ A.T, x.T @ into, h.T @ gradient
""",
            6,
        ),
        Wrong(
            "sums the gradients of the weights, as in data parallelism",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    parts = into @ A.T, x.T @ into, h.T @ gradient
    for part in parts:
        all_reduce(part)
    return parts
""",
            6,
        ),
        Wrong(
            "both matrices cut in columns",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 1)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "the mean of the parts, not their sum",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y / 2
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx / 2, x.T @ into, h.T @ gradient
""",
            6,
        ),
        Wrong(
            "relu forgotten on the way back",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = gradient @ B.T
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            6,
        ),
        Wrong(
            "an error on one rank",
            """
import torch
import torch.distributed as dist
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    if dist.get_rank() == 0:
        raise ValueError("an error on one rank")
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    return x, A, B
""",
            2,
        ),
        Wrong(
            "the slices alone",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    raise NotImplementedError()
def block_backward(gradient, x, A, B, all_reduce):
    raise NotImplementedError()
""",
            2,
        ),
        Wrong(
            "the forward pass alone",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    raise NotImplementedError()
""",
            4,
        ),
        Wrong(
            "both matrices cut along the wrong dimension",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 0)[rank], B.chunk(ranks, 1)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "slices for two ranks only",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(2, 1)[rank], B.chunk(2, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "x is overwritten",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    x.zero_()
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "returns what all_reduce returns",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    return all_reduce(y)
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "an all-reduce of its own",
            """
import torch
import torch.distributed as dist
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    dist.all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    dist.all_reduce(dx)
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
        Wrong(
            "the hidden layer summed, too",
            """
import torch
def slice_weights(A, B, rank, ranks):
    return A.chunk(ranks, 1)[rank], B.chunk(ranks, 0)[rank]
def block_forward(x, A, B, all_reduce):
    y = torch.relu(x @ A) @ B
    all_reduce(y)
    return y
def block_backward(gradient, x, A, B, all_reduce):
    h = torch.relu(x @ A)
    into = (gradient @ B.T) * (h > 0)
    dx = into @ A.T
    all_reduce(dx)
    all_reduce(h.clone())
    return dx, x.T @ into, h.T @ gradient
""",
            8,
        ),
    ),
    self_reported=2,
)

# --- 08-cut -----------------------------------------------------------------------------


def _even_largest(costs: list, stages: int) -> int:
    """The largest stage when each stage has equally many layers (the first ones one more)."""
    whole, rest = divmod(len(costs), stages)
    sizes = [whole + (stage < rest) for stage in range(stages)]
    return max(_sums(costs, sizes))


def _greedy_largest(costs: list, stages: int) -> int:
    """The largest stage when a stage is closed once it has reached its share of the total."""
    sizes, size, total = [], 0, 0
    for index, cost in enumerate(costs):
        size, total = size + 1, total + cost
        left, open_stages = len(costs) - index - 1, stages - len(sizes) - 1
        if open_stages and (total >= sum(costs) / stages or left == open_stages):
            sizes, size, total = [*sizes, size], 0, 0
    return max(_sums(costs, [*sizes, size]))


def _halved(costs: list, stages: int) -> list:
    """Sizes by the best cut in two, and the best cut of each part; for 2 or 4 stages."""
    if stages == 1:
        return [len(costs)]
    room = stages // 2
    cuts = range(room, len(costs) - room + 1)
    cut = min(cuts, key=lambda c: max(sum(costs[:c]), sum(costs[c:])))
    return [*_halved(costs[:cut], room), *_halved(costs[cut:], room)]


def _sums(costs: list, sizes: list) -> list:
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return [sum(costs[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _least(costs: list, stages: int) -> int:
    """The smallest possible largest stage, by trying limits: how many stages does each need?"""
    candidates = {sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}
    for limit in sorted(candidates):
        if limit < max(costs):
            continue
        needed, total = 1, 0
        for cost in costs:
            if total + cost > limit:
                needed, total = needed + 1, 0
            total += cost
        if needed <= stages:
            return limit
    raise AssertionError("the sum of all is a candidate")


def _cut_inputs(seed: int) -> list:
    """Drawn again until the usual short cuts all miss the best."""
    rng = random.Random(seed)
    cases = []
    for stages, layers in ((2, 6), (2, 9), (3, 8), (4, 11), (4, 13), (5, 12)):
        while True:
            costs = [rng.choice([1, 2, 3, 5, 8, 13, 21]) * rng.randint(2, 9) for _ in range(layers)]
            best = _least(costs, stages)
            if _even_largest(costs, stages) == best or _greedy_largest(costs, stages) == best:
                continue
            if stages == 4 and max(_sums(costs, _halved(costs, 4))) == best:
                continue
            cases.append({"costs": costs, "stages": stages})
            break
    # One layer costs more than all others: fewer stages, or empty ones, would be as good.
    for stages, layers, heavy in ((3, 3, 0), (4, 4, 1), (4, 6, 2)):
        costs = [rng.randint(1, 3) for _ in range(layers)]
        costs[heavy] = rng.randint(20, 30)
        cases.append({"costs": costs, "stages": stages})
    return cases


def _cut_run(student, inputs: list) -> list:
    return [student.balanced_cut(list(case["costs"]), case["stages"]) for case in inputs]


def _cut_expected(inputs: list) -> list:
    return [_least(case["costs"], case["stages"]) for case in inputs]


def _cut_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    valid = two = more = ""
    for number, (case, best) in enumerate(zip(inputs, expected, strict=True)):
        costs, stages, sizes = case["costs"], case["stages"], item(got, number)
        where = f"{len(costs)} layers in {stages} stages: "
        if not is_list(sizes, stages) or not all(type(size) is int for size in sizes):
            kind = "other values" if is_list(sizes, stages) else describe(sizes)
            valid = valid or f"{where}one whole number for each stage was expected, not {kind}"
        elif min(sizes) < 1:
            valid = valid or f"{where}a stage has no layer"
        elif sum(sizes) != len(costs):
            valid = valid or f"{where}the stages do not have all the layers together"
        elif max(_sums(costs, sizes)) != best:
            stage = _sums(costs, sizes).index(max(_sums(costs, sizes)))
            problem = f"{where}stage {stage} is the largest, and could be smaller"
            if stages == 2:
                two = two or problem
            else:
                more = more or problem
    if valid:
        two = more = "not judged until every answer is a cut into stages"
    return [
        Finding("every layer is in a stage, and every stage has a layer", 1, valid),
        Finding("two stages: the largest is as small as possible", 2, two),
        Finding("more stages: the largest is as small as possible", 2, more),
    ]


CUT = Task(
    id="08-cut",
    title="the cut that balances the stages",
    points=5,
    functions=("balanced_cut",),
    inputs=_cut_inputs,
    run=_cut_run,
    expected=_cut_expected,
    judge=_cut_judge,
    hints=(
        "What decides how fast a pipeline is? Compute that for any given cut, and let the "
        "computer look at all cuts.",
        "With n layers there are n - 1 places between two layers, and you choose stages - 1 of "
        "them: `itertools.combinations(range(1, n), stages - 1)`. Take the choice whose largest "
        "stage is the smallest.",
        "For each choice `edges = (0, *places, n)`; the stages are `costs[a:b]` for the pairs "
        "`itertools.pairwise(edges)`. Use `min(choices, key=...)` with the maximum of the sums, "
        "and return `b - a` of the winner's pairs.",
    ),
    wrong=(
        Wrong(
            "equally many layers",
            """
def balanced_cut(costs, stages):
    whole, rest = divmod(len(costs), stages)
    return [whole + (stage < rest) for stage in range(stages)]
""",
            1,
        ),
        Wrong(
            "close a stage once it has its share of the total",
            """
def balanced_cut(costs, stages):
    sizes, size, total = [], 0, 0
    for index, cost in enumerate(costs):
        size, total = size + 1, total + cost
        left, open_stages = len(costs) - index - 1, stages - len(sizes) - 1
        if open_stages and (total >= sum(costs) / stages or left == open_stages):
            sizes, size, total = sizes + [size], 0, 0
    return sizes + [size]
""",
            1,
        ),
        Wrong(
            "best in two, each half again in two",
            """
def balanced_cut(costs, stages):
    if stages == 1:
        return [len(costs)]
    left = stages // 2
    cuts = range(left, len(costs) - (stages - left) + 1)
    cut = min(cuts, key=lambda c: max(sum(costs[:c]), sum(costs[c:])))
    return balanced_cut(costs[:cut], left) + balanced_cut(costs[cut:], stages - left)
""",
            3,
        ),
        Wrong(
            "the places of the cuts, not the sizes of the stages",
            """
import itertools
def balanced_cut(costs, stages):
    def largest(places):
        edges = (0, *places, len(costs))
        return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:]))
    return list(min(itertools.combinations(range(1, len(costs)), stages - 1), key=largest))
""",
            0,
        ),
        Wrong(
            "as few stages as the best limit allows",
            """
def balanced_cut(costs, stages):
    def filled(limit):
        sizes, total = [0], 0
        for cost in costs:
            if total + cost > limit:
                sizes, total = sizes + [0], 0
            sizes[-1] += 1
            total += cost
        return sizes
    limit = max(costs)
    while len(filled(limit)) > stages:
        limit += 1
    return filled(limit)
""",
            0,
        ),
        Wrong(
            "the same place may be cut twice",
            """
import itertools
def balanced_cut(costs, stages):
    def largest(edges):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))
    places = itertools.combinations_with_replacement(range(1, len(costs)), stages - 1)
    best = min(((0, *chosen, len(costs)) for chosen in places), key=largest)
    return [b - a for a, b in itertools.pairwise(best)]
""",
            0,
        ),
        Wrong(
            "all in one stage, the others empty",
            """
def balanced_cut(costs, stages):
    return [len(costs)] + [0] * (stages - 1)
""",
            0,
        ),
    ),
)

TASKS = (GPIPE, TENSOR, CUT)
