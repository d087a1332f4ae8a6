"""Tasks of lesson 09: bytes of a rank at every stage, and shards with padding, there and back."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

from ..task import Finding, Task, Wrong, describe, is_list, is_number, item

# --- 09-memory --------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer state")
COSTS = (
    {"parameters": 4, "gradients": 4, "optimizer state": 8},  # Adam in float32
    {"parameters": 2, "gradients": 2, "optimizer state": 12},  # Adam, mixed precision
    {"parameters": 4, "gradients": 4, "optimizer state": 4},  # SGD with momentum
)


def _memory_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    bytes_, stages = [], []
    for number, costs in enumerate(COSTS):
        # The keys in another order each time: who goes by their order is wrong somewhere.
        costs = dict(sorted(costs.items(), key=lambda kind: (KINDS.index(kind[0]) + number) % 3))
        n = rng.choice([2, 4, 8])
        even = rng.randint(1_000, 9_000) * n
        for stage in range(4):
            bytes_.append({"numbers": even, "n": n, "stage": stage, "costs": costs})
        # A prime never divides without a rest, and more than half of the rest is missing.
        uneven, rest = rng.choice([(10_007, 3), (10_007, 6), (10_009, 4), (20_011, 7), (20_011, 5)])
        for stage in (1, 3):
            bytes_.append({"numbers": uneven, "n": rest, "stage": stage, "costs": costs})
        # Limits in the middle between two stages, so that rounding decides nothing.
        n, numbers = rng.choice([4, 8]), rng.randint(100, 900) * 1_000
        need = [sum(_bytes_of(numbers, n, stage, costs)) for stage in range(4)]
        for high, low in zip([2 * need[0], *need], [*need, 0], strict=True):
            case = {"numbers": numbers, "n": n, "costs": costs, "limit": (high + low) // 2}
            stages.append(case)
        stages.append({"numbers": numbers, "n": n, "costs": costs, "limit": need[1]})  # just fits
        # Here it fits only for those who forget the padding: one byte is missing.
        limit = sum(_bytes_of(uneven, rest, 1, costs)) - 1
        stages.append({"numbers": uneven, "n": rest, "costs": costs, "limit": limit})
    return {"bytes": bytes_, "stages": stages}


def _bytes_of(numbers: int, n: int, stage: int, costs: dict) -> tuple[int, int, int]:
    """Stage by stage as the paper tells it, in whole numbers."""
    share = -(-numbers // n)
    parameters = share if stage == 3 else numbers
    gradients = share if stage >= 2 else numbers
    state = share if stage >= 1 else numbers
    return (
        parameters * costs["parameters"],
        gradients * costs["gradients"],
        state * costs["optimizer state"],
    )


def _memory_run(student, inputs: dict) -> dict:
    return {
        "bytes": [
            student.rank_bytes(case["numbers"], case["n"], case["stage"], dict(case["costs"]))
            for case in inputs["bytes"]
        ],
        "stages": [
            student.lowest_stage(case["numbers"], case["n"], dict(case["costs"]), case["limit"])
            for case in inputs["stages"]
        ],
    }


def _memory_expected(inputs: dict) -> dict:
    stages = []
    for case in inputs["stages"]:
        numbers, n, costs = case["numbers"], case["n"], case["costs"]
        fits = [s for s in range(4) if sum(_bytes_of(numbers, n, s, costs)) <= case["limit"]]
        stages.append(min(fits, default=None))
    keys = ("numbers", "n", "stage", "costs")
    return {
        "bytes": [
            dict(zip(KINDS, _bytes_of(*(case[key] for key in keys)), strict=True))
            for case in inputs["bytes"]
        ],
        "stages": stages,
    }


def _memory_why(case: dict, want: dict, answer: Any) -> str:
    words = f"stage {case['stage']}, {case['numbers']} numbers, {case['n']} ranks: "
    if type(answer) is not dict or set(answer) != set(KINDS):
        keys = ", ".join(repr(kind) for kind in KINDS)
        return f"{words}a dict with the keys {keys} was expected, not {describe(answer)}"
    for kind in KINDS:
        got = answer[kind]
        if not is_number(got):
            return f"{words}{kind}: a number of bytes was expected, not {describe(got)}"
        if got != want[kind]:
            how = "more" if got > want[kind] else "fewer"
            return f"{words}you count {how} bytes for the {kind} than a rank has to keep"
    return ""


def _memory_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    why = dict.fromkeys(("whole", "sharded", "padded"), "")
    for number, (case, want) in enumerate(zip(inputs["bytes"], expected["bytes"], strict=True)):
        about = "padded" if case["numbers"] % case["n"] else "sharded" if case["stage"] else "whole"
        why[about] = why[about] or _memory_why(case, want, item(item(got, "bytes"), number))
    stages = ""
    for number, (case, want) in enumerate(zip(inputs["stages"], expected["stages"], strict=True)):
        answer = item(item(got, "stages"), number)
        if stages or (answer is None and want is None):
            continue
        words = f"{case['numbers']} numbers on {case['n']} ranks, limit {case['limit']} bytes: "
        if type(answer) is not int:
            if answer is None:
                stages = f"{words}you say that nothing fits, but a stage does"
            else:
                stages = f"{words}a stage or None was expected, not {describe(answer)}"
        elif want is None:
            stages = f"{words}no stage fits, and None says so"
        elif answer != want:
            stages = words + ("a lower stage fits" if answer > want else "your stage does not fit")
    return [
        Finding("stage 0 keeps everything whole", 1, why["whole"]),
        Finding("stages 1, 2 and 3 shard one kind more each", 2, why["sharded"]),
        Finding("a shard has its share of the padding", 1, why["padded"]),
        Finding("the lowest stage that fits", 1, stages),
    ]


_STAGE = """
def lowest_stage(numbers, n, costs, limit):
    for stage in range(4):
        if sum(rank_bytes(numbers, n, stage, costs).values()) <= limit:
            return stage
    return None
"""

MEMORY = Task(
    id="09-memory",
    title="bytes of a rank at every stage",
    points=5,
    functions=("rank_bytes", "lowest_stage"),
    inputs=_memory_inputs,
    run=_memory_run,
    expected=_memory_expected,
    judge=_memory_judge,
    hints=(
        "Which of the three kinds is sharded first, which next, which last? And how long is a "
        "shard when the number of ranks does not divide the numbers?",
        "A kind is sharded from a certain stage on: optimizer state from 1, gradients from 2, "
        "parameters from 3. A shard has ⌈numbers / n⌉ entries, because all shards are equally "
        "long. For the lowest stage try 0, 1, 2, 3 in turn.",
        "`first = {'optimizer state': 1, 'gradients': 2, 'parameters': 3}`; "
        "`length = -(-numbers // n)`; for each kind the entries are `length` if "
        "`stage >= first[kind]`, otherwise `numbers`, times `costs[kind]`.",
    ),
    wrong=(
        Wrong(
            "parameters are sharded first",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["parameters", "gradients", "optimizer state"]
    length = -(-numbers // n)
    return {
        kind: cost * (length if kind in order[:stage] else numbers) for kind, cost in costs.items()
    }
"""
            + _STAGE,
            1,
        ),
        Wrong(
            "everything is sharded from stage 1 on",
            """
def rank_bytes(numbers, n, stage, costs):
    length = -(-numbers // n) if stage else numbers
    return {kind: cost * length for kind, cost in costs.items()}
"""
            + _STAGE,
            1,
        ),
        Wrong(
            "no padding: bytes divided by the ranks",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["optimizer state", "gradients", "parameters"]
    return {
        kind: cost * numbers / (n if kind in order[:stage] else 1) for kind, cost in costs.items()
    }
"""
            + _STAGE,
            3,
        ),
        Wrong(
            "the rest is dropped",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["optimizer state", "gradients", "parameters"]
    return {
        kind: cost * (numbers // n if kind in order[:stage] else numbers)
        for kind, cost in costs.items()
    }
"""
            + _STAGE,
            3,
        ),
        Wrong(
            "the kinds by the order of the keys",
            """
def rank_bytes(numbers, n, stage, costs):
    sharded, length = list(costs)[::-1][:stage], -(-numbers // n)
    return {kind: cost * (length if kind in sharded else numbers) for kind, cost in costs.items()}
"""
            + _STAGE,
            1,
        ),
        Wrong(
            "the lowest stage without padding",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["optimizer state", "gradients", "parameters"]
    length = -(-numbers // n)
    return {
        kind: cost * (length if kind in order[:stage] else numbers) for kind, cost in costs.items()
    }


def lowest_stage(numbers, n, costs, limit):
    order = ["optimizer state", "gradients", "parameters"]
    for stage in range(4):
        need = (numbers * c / (n if kind in order[:stage] else 1) for kind, c in costs.items())
        if sum(need) <= limit:
            return stage
    return None
""",
            4,
        ),
        Wrong(
            "always stage 3",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["optimizer state", "gradients", "parameters"]
    length = -(-numbers // n)
    return {
        kind: cost * (length if kind in order[:stage] else numbers) for kind, cost in costs.items()
    }


def lowest_stage(numbers, n, costs, limit):
    return 3
""",
            4,
        ),
        Wrong(
            "a limit that is just met does not count",
            """
def rank_bytes(numbers, n, stage, costs):
    order = ["optimizer state", "gradients", "parameters"]
    length = -(-numbers // n)
    return {
        kind: cost * (length if kind in order[:stage] else numbers) for kind, cost in costs.items()
    }


def lowest_stage(numbers, n, costs, limit):
    for stage in range(4):
        if sum(rank_bytes(numbers, n, stage, costs).values()) < limit:
            return stage
    return None
""",
            4,
        ),
    ),
)

# --- 09-shards --------------------------------------------------------------------------

# Shapes of the parameters: (rows,), (rows, columns) or (rows, columns, 2). With so many ranks the
# first group has no rest; the others have one, or fewer rows than ranks.


def _shards_inputs(seed: int) -> dict:
    rng = random.Random(seed)

    def tensors(rows: list[int]) -> list:
        """Whole numbers from 1 on: none is 0, so padding can be told from them."""
        made = []
        for count in rows:
            width = rng.randint(2, 4)
            matrix = [[float(rng.randint(1, 99)) for _ in range(width)] for _ in range(count)]
            made.append(matrix if rng.random() < 0.6 else [row[0] for row in matrix])
        # The last one has three dimensions.
        made[-1] = [[[a, a + 100] for a in row] for row in matrix]
        return made

    rows = [("even", 2, [4, 2, 6]), ("even", 3, [3, 6])]
    rows += [("uneven", 2, [5, 1, 3]), ("uneven", 3, [7, 4, 1])]
    rows += [("uneven", 4, [5, 9, 2])]  # 5 rows: the last rank has none
    cases = []
    for about, n, counts in rows:
        # Other numbers to shard than to put together: neither is the other's answer.
        other = tensors(counts)
        back = {"flats": _flats(other, n), "shapes": [_shape(tensor) for tensor in other]}
        cases.append({"about": about, "n": n, "tensors": tensors(counts), **back})

    def like(value: Any) -> Any:
        return [*map(like, value)] if type(value) is list else float(rng.randint(1, 99))

    # Two ranks with numbers of their own: neither has what comes back.
    first = tensors([7, 4, 1, 3])
    return {"cases": cases, "together": [first, like(first)]}


def _flat(value: Any) -> list:
    return sum(map(_flat, value), []) if type(value) is list else [value]


def _flats(tensors: list, n: int) -> list:
    """What each rank must have, row by row: row r belongs to rank r // height."""
    flats: list[list[float]] = [[] for _ in range(n)]
    for tensor in tensors:
        height = math.ceil(len(tensor) / n)
        rows = [_flat(row) for row in tensor]
        rows += [[0.0] * len(rows[0])] * (n * height - len(rows))
        for place, row in enumerate(rows):
            flats[place // height] += row
    return flats


def _joined(flats: list, shapes: list) -> list:
    """The parameters whose shards these are, by the owner of each row."""
    tensors, start = [], 0
    for shape in shapes:
        height, width = math.ceil(shape[0] / len(flats)), math.prod(shape[1:])
        numbers = []
        for row in range(shape[0]):
            place = start + row % height * width
            numbers += flats[row // height][place : place + width]
        tensors.append(_shaped(numbers, shape))
        start += height * width
    return tensors


def _shaped(numbers: list, shape: list) -> Any:
    if not shape:
        return numbers[0]
    size = len(numbers) // shape[0]
    return [_shaped(numbers[i * size : (i + 1) * size], shape[1:]) for i in range(shape[0])]


def _shards_run(student, inputs: dict) -> dict:
    """Each function by itself, in this process; then both on two real ranks."""
    import torch

    def listed(value):
        return value.tolist() if isinstance(value, torch.Tensor) else value

    def made(tensors, dtype=torch.float32):
        return [torch.tensor(tensor, dtype=dtype) for tensor in tensors]

    def attempt(function, *args):
        """The answer, or the error as a text: the judge names the case that raised it."""
        try:
            return function(*args)
        except NotImplementedError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]

    cases = []
    for number, case in enumerate(inputs["cases"]):
        n = case["n"]
        dtype = torch.bfloat16 if number == 4 else torch.float32  # up to 199 it is exact
        shapes = [torch.Size(shape) for shape in case["shapes"]]
        flats = [attempt(student.shard, made(case["tensors"], dtype), rank, n) for rank in range(n)]
        kept = [getattr(flat, "dtype", dtype) == dtype for flat in flats]
        given = [torch.tensor(flat, dtype=dtype) for flat in case["flats"]]
        back = attempt(student.unshard, given, shapes)
        back = [listed(b) for b in back] if isinstance(back, (list, tuple)) else back
        cases.append({"flats": [listed(flat) for flat in flats], "kept": kept, "back": back})

    shard, unshard, together = student.shard, student.unshard, inputs["together"]
    pair = [attempt(shard, made(together[rank]), rank, 2) for rank in range(2)]
    flat = all(isinstance(p, torch.Tensor) and p.dim() == 1 and len(p) for p in pair)
    if not flat or len(pair[0]) != len(pair[1]):
        # Messages of different lengths would leave the ranks waiting for each other.
        return {"cases": cases, "together": "not run"}
    sizes = [tensor.shape for tensor in made(together[0])]
    if isinstance(attempt(unshard, pair, sizes), str):
        return {"cases": cases, "together": "not run"}

    def there_and_back(together):
        import torch
        import torch.distributed as dist

        device = "cuda" if torch.cuda.is_available() else "cpu"
        rank = dist.get_rank()
        tensors = [torch.tensor(tensor, device=device) for tensor in together[rank]]
        shapes = [tensor.shape for tensor in tensors]
        mine = shard(tensors, rank, 2).contiguous()
        flats = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(flats, mine)
        back = unshard(flats, shapes)
        back = list(back) if isinstance(back, (list, tuple)) else [back]
        back = [b.tolist() if isinstance(b, torch.Tensor) else None for b in back]
        return {"shard": mine.tolist(), "back": back}

    from course_utils.launch import launch

    return {"cases": cases, "together": launch(there_and_back, 2, together, oversubscribe=True)}


def _shards_expected(inputs: dict) -> list:
    """Of each case all ranks' shards, and the parameters whose shards `unshard` was given."""
    return [
        {
            "flats": _flats(case["tensors"], case["n"]),
            "back": _joined(case["flats"], case["shapes"]),
        }
        for case in inputs["cases"]
    ]


def _same(got: Any, want: Any) -> bool:
    if type(want) is list:
        return is_list(got, len(want)) and all(map(_same, got, want))
    return is_number(got) and got == want


def _flat_why(words: str, rank: int, flat: Any, want: list) -> str:
    words = f"{words}, rank {rank}"
    if type(flat) is str:
        return f"{words}: shard raises {flat}"
    if not is_list(flat) or not all(is_number(value) for value in flat):
        return f"{words}: a tensor of one dimension was expected, not {describe(flat)}"
    if _same(flat, want):
        return ""
    rows, goal = ([value for value in values if value] for values in (flat, want))
    if sorted(rows) == sorted(goal):
        if len(flat) != len(want):
            how = "many" if len(flat) > len(want) else "few"
            return f"{words}: the right rows, with too {how} zeros"
        return f"{words}: the right numbers, in another order"
    if len(flat) == len(want) and len(rows) > len(goal) and not Counter(goal) - Counter(rows):
        return f"{words}: the right rows, but other numbers than zeros where rows are missing"
    return f"{words}: its rows are not those that torch.chunk gives this rank"


def _either(got: Any, one: Any, other: Any) -> bool:
    """True when each number is that of the one or of the other, at the same place."""
    if type(one) is list:
        return is_list(got, len(one)) and all(map(_either, got, one, other))
    return is_number(got) and got in (one, other)


def _together_why(together: list, got: Any) -> str:
    """By the ranks' own shards, in whatever order: are they what came back, on both ranks?"""
    if got == "not run":
        return "not run: mend what fails above on 2 ranks first"
    gathered: list[float] = []
    for rank, own in enumerate(together):
        shard, numbers = item(item(got, rank), "shard"), {0, *_flat(own)}
        if not is_list(shard) or not all(is_number(n) and n in numbers for n in shard):
            return f"rank {rank}'s shard has numbers that its parameters do not have"
        gathered += shard
    first, second = (item(item(got, rank), "back") for rank in range(2))
    if not _either(first, *together) or not _same(second, first):
        return "a rank did not get back what went in"
    if Counter(_flat(first)) - Counter(gathered):
        return "what came back is not what the ranks' shards have"
    return ""


def _shards_judge(inputs: dict, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(("even", "uneven", "length", "back"), "")
    for number, (case, want) in enumerate(zip(inputs["cases"], expected, strict=True)):
        answer, n = item(item(got, "cases"), number), case["n"]
        rows = [len(tensor) for tensor in case["tensors"]]
        words = f"{n} ranks, parameters of {', '.join(map(str, rows))} rows"
        flats = [item(item(answer, "flats"), rank) for rank in range(n)]
        for rank, (flat, goal) in enumerate(zip(flats, want["flats"], strict=True)):
            about = case["about"]
            why[about] = why[about] or _flat_why(words, rank, flat, goal)
            if item(item(answer, "kept"), rank) is not True:
                other = f"{words}, rank {rank}: the shard has another type than the parameters"
                why[about] = why[about] or other
        lengths = {len(flat) if is_list(flat) else -1 for flat in flats}
        if len(lengths) > 1 or lengths & {-1, 0}:
            why["length"] = why["length"] or f"{words}: the ranks' shards differ in length"
        back = item(answer, "back")
        if not why["back"] and not _same(back, want["back"]):
            if type(back) is str:
                why["back"] = f"{words}: unshard raises {back}"
            elif not is_list(back, len(rows)):
                number_of = f"{len(rows)} tensors were expected"
                why["back"] = f"{words}: {number_of}, not {describe(back)}"
            else:
                bad = next(i for i, t in enumerate(want["back"]) if not _same(back[i], t))
                shaped = _shape(back[bad]) == _shape(want["back"][bad])
                what = "other numbers" if shaped else "another shape"
                why["back"] = f"{words}: parameter {bad} comes back with {what}"
    together = _together_why(inputs["together"], item(got, "together"))
    return [
        Finding("all ranks' shards have the same length", 1, why["length"]),
        Finding(
            "where n divides the rows: each rank has its rows, one parameter after the other",
            1,
            why["even"],
        ),
        Finding(
            "where it does not: the rows of torch.chunk, and zeros for the missing ones",
            1,
            why["uneven"],
        ),
        Finding("unshard gives back every parameter", 1, why["back"]),
        Finding("there and back on two ranks", 1, together),
    ]


def _shape(value: Any) -> list[int]:
    if type(value) is not list:
        return []
    return [len(value), *(_shape(value[0]) if value else [])]


_UNSHARD = """
def unshard(flats, shapes):
    n, start, whole = len(flats), 0, []
    for shape in shapes:
        height = -(-shape[0] // n)
        length = height * math.prod(shape[1:])
        parts = [flat[start : start + length].view(height, *shape[1:]) for flat in flats]
        whole.append(torch.cat(parts)[: shape[0]])
        start += length
    return whole
"""
_IMPORTS = """
import math

import torch
"""

SHARDS = Task(
    id="09-shards",
    title="shard and unshard, with padding",
    points=5,
    functions=("shard", "unshard"),
    inputs=_shards_inputs,
    run=_shards_run,
    expected=_shards_expected,
    judge=_shards_judge,
    hints=(
        "Take one parameter of 5 rows and 4 ranks. How high is a full part, which rows does "
        "rank 2 have, which rank 3, and how many rows of zeros does each need?",
        "The height of a part is ⌈rows / n⌉; rank r has the rows from r·height up to "
        "(r+1)·height, as many of them as exist; the rest of the height are rows of zeros. "
        "To come back, cut height·columns numbers from each rank's flat tensor, join the parts, "
        "and keep only the first `shape[0]` rows.",
        "`part = p[r * height : (r + 1) * height]`; `missing = height - len(part)`; "
        "`torch.cat([part, part.new_zeros(missing, *p.shape[1:])]).flatten()`, for each p, and "
        "`torch.cat` of these. In `unshard` keep a position `start` that grows by "
        "`height * math.prod(shape[1:])` for each shape.",
    ),
    wrong=(
        Wrong(
            "no padding",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        chunks = p.chunk(n)
        parts.append(chunks[rank].flatten() if rank < len(chunks) else p.new_empty(0))
    return torch.cat(parts)


def unshard(flats, shapes):
    places, whole = [0] * len(flats), []
    for shape in shapes:
        height, parts = -(-shape[0] // len(flats)), []
        for rank, flat in enumerate(flats):
            rows = max(0, min(height, shape[0] - rank * height))
            length = rows * math.prod(shape[1:])
            parts.append(flat[places[rank] : places[rank] + length].view(rows, *shape[1:]))
            places[rank] += length
        whole.append(torch.cat(parts))
    return whole
""",
            1,
        ),
        Wrong(
            "all in one flat tensor, padded once (ZeRO's layout)",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    flat = torch.cat([p.flatten() for p in parameters])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % n))
    return flat.chunk(n)[rank]


def unshard(flats, shapes):
    flat = torch.cat(list(flats))
    sizes = [math.prod(shape) for shape in shapes]
    return [p.view(shape) for p, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
""",
            2,
        ),
        Wrong(
            "rows dealt like cards",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        rows = p[rank::n]
        missing = -(-len(p) // n) - len(rows)
        parts.append(torch.cat([rows, p.new_zeros(missing, *p.shape[1:])]).flatten())
    return torch.cat(parts)


def unshard(flats, shapes):
    n, start, whole = len(flats), 0, []
    for shape in shapes:
        height = -(-shape[0] // n)
        length = height * math.prod(shape[1:])
        parts = [flat[start : start + length].view(height, *shape[1:]) for flat in flats]
        whole.append(torch.stack(parts, dim=1).flatten(0, 1)[: shape[0]])
        start += length
    return whole
""",
            2,
        ),
        Wrong(
            "rows spread evenly, as tensor_split does",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        rows = p.tensor_split(n)[rank]
        missing = -(-len(p) // n) - len(rows)
        parts.append(torch.cat([rows, p.new_zeros(missing, *p.shape[1:])]).flatten())
    return torch.cat(parts)


def unshard(flats, shapes):
    n, start, whole = len(flats), 0, []
    for shape in shapes:
        height = -(-shape[0] // n)
        length = height * math.prod(shape[1:])
        parts = []
        for rank, flat in enumerate(flats):
            rows = shape[0] // n + (rank < shape[0] % n)
            parts.append(flat[start : start + length].view(height, *shape[1:])[:rows])
        whole.append(torch.cat(parts))
        start += length
    return whole
""",
            3,
        ),
        Wrong(
            "the padding is not taken off again",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        height = -(-len(p) // n)
        rows = p[rank * height : (rank + 1) * height]
        parts.append(torch.cat([rows, p.new_zeros(height - len(rows), *p.shape[1:])]).flatten())
    return torch.cat(parts)
"""
            + _UNSHARD.replace("[: shape[0]]", ""),
            3,
        ),
        Wrong(
            "columns only, no further dimension",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        height = -(-len(p) // n)
        rows = p[rank * height : (rank + 1) * height]
        parts.append(torch.cat([rows, p.new_zeros(height - len(rows), *p.shape[1:])]).flatten())
    return torch.cat(parts)
"""
            + _UNSHARD.replace("math.prod(shape[1:])", "(shape[1] if len(shape) > 1 else 1)"),
            3,
        ),
        Wrong(
            "padded with the first row",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        height = -(-len(p) // n)
        rows = p[rank * height : (rank + 1) * height]
        parts.append(torch.cat([rows, *[p[:1]] * (height - len(rows))]).flatten())
    return torch.cat(parts)
"""
            + _UNSHARD,
            4,
        ),
        Wrong(
            "zeros of torch's default type",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        height = -(-len(p) // n)
        rows = p[rank * height : (rank + 1) * height]
        parts.append(torch.cat([rows, torch.zeros(height - len(rows), *p.shape[1:])]).flatten())
    return torch.cat(parts)
"""
            + _UNSHARD,
            4,
        ),
        Wrong(
            "as many chunks as ranks are taken for granted",
            _IMPORTS
            + """
def shard(parameters, rank, n):
    parts = []
    for p in parameters:
        rows = p.chunk(n)[rank]
        missing = -(-len(p) // n) - len(rows)
        parts.append(torch.cat([rows, p.new_zeros(missing, *p.shape[1:])]).flatten())
    return torch.cat(parts)
"""
            + _UNSHARD,
            2,
        ),
    ),
)

TASKS = (MEMORY, SHARDS)
