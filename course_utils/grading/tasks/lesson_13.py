"""Tasks of lesson 13: staleness of a schedule, variables over servers, where stale SGD diverges."""

from __future__ import annotations

import math
import random
from typing import Any

from ..task import Finding, Task, Wrong, count, describe, is_list, is_number, item

# --- 13-staleness -----------------------------------------------------------------------

# Three schedules of real shape (each worker: pull, compute, push, again), then one in which a
# worker dies between its pull and its push, and pulls again when it is back.


def _events(step_seconds: list[float], pushes: int, dies: int | None = None) -> list:
    """Each worker pulls, pushes one step later, and pulls again at once."""
    events = [["pull", worker] for worker in range(len(step_seconds))]
    due = {worker: seconds for worker, seconds in enumerate(step_seconds)}
    lost = False
    while sum(kind == "push" for kind, _ in events) < pushes:
        worker = min(due, key=lambda w: (due[w], w))
        if worker == dies and not lost and due[worker] > 2 * step_seconds[worker]:
            lost = True  # its result is lost: no push; it comes back two steps later
            due[worker] += 2 * step_seconds[worker]
            events.append(["pull", worker])
            continue
        events += [["push", worker], ["pull", worker]]
        due[worker] += step_seconds[worker]
    return events


def _stale_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    slow = round(rng.uniform(2.6, 3.4), 2)
    return {
        "one": _events([1.0], rng.randint(5, 8)),
        "equal": _events([1.0, 1.0, 1.0], rng.randint(12, 16)),
        "slow": _events([1.0, slow, round(rng.uniform(1.1, 1.4), 2)], rng.randint(14, 20)),
        "dies": _events([1.0, round(rng.uniform(1.1, 1.4), 2)], rng.randint(16, 20), dies=1),
    }


def _stale_run(student, inputs: dict) -> dict:
    return {
        name: student.staleness([tuple(event) for event in events])
        for name, events in inputs.items()
    }


def _stale_expected(inputs: dict) -> dict:
    """For each push, look back to the same worker's last pull and count the pushes between."""
    answers = {}
    for name, events in inputs.items():
        counts = []
        for place, (kind, worker) in enumerate(events):
            if kind == "push":
                back = max(i for i in range(place) if events[i] == ["pull", worker])
                counts.append(sum(each[0] == "push" for each in events[back:place]))
        answers[name] = counts
    return answers


_STALE_TEXTS = {
    "one": "a worker alone",
    "equal": "three equal workers",
    "slow": "three workers, one of them slow",
    "dies": "a worker that dies before its push, and pulls again",
}


def _stale_why(events: list, want: list[int], got: Any) -> str:
    if not is_list(got):
        return f"a list of numbers was expected, not {describe(got)}"
    if len(got) != len(want):
        pushes = count(len(want), "push", "pushes")
        return f"the schedule has {pushes}, and one number belongs to each, not {describe(got)}"
    for number, (a, b) in enumerate(zip(got, want, strict=True), start=1):
        if not is_number(a) or a != b:
            size = ("large" if a > b else "small") if is_number(a) else "unusual"
            places = [place for place, (kind, _) in enumerate(events) if kind == "push"]
            last = places[number - 1]
            shown = ", ".join(f"{kind} {worker}" for kind, worker in events[: last + 1])
            return f"the number of the last push here is too {size}: {shown}"
    return ""


def _stale_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    return [
        Finding(text, 1, _stale_why(inputs[name], expected[name], item(got, name)))
        for name, text in _STALE_TEXTS.items()
    ]


STALENESS = Task(
    id="13-staleness",
    title="the staleness of a schedule",
    points=4,
    functions=("staleness",),
    inputs=_stale_inputs,
    run=_stale_run,
    expected=_stale_expected,
    judge=_stale_judge,
    hints=(
        "The server's weights have a version: it grows by one at each push. Which version did the "
        "worker see when it pulled, and which one meets its push?",
        "Keep one number for the server (pushes so far) and a dict with the version that each "
        "worker pulled last. A second pull of the same worker overwrites the first.",
        "On a pull: `seen[worker] = version`. On a push: append `version - seen[worker]`, "
        "then `version += 1`. Return the list.",
    ),
    wrong=(
        Wrong(
            "counts its own push too",
            """
def staleness(events):
    version, seen, found = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            seen[worker] = version
        else:
            version += 1
            found.append(version - seen[worker])
    return found
""",
            0,
        ),
        Wrong(
            "counts from its last push, not from its last pull",
            """
def staleness(events):
    version, last, found = 0, {}, []
    for kind, worker in events:
        if kind == "push":
            found.append(version - last.get(worker, 0))
            version += 1
            last[worker] = version
    return found
""",
            3,
        ),
        Wrong(
            "keeps the first pull when a worker pulls twice",
            """
def staleness(events):
    version, seen, found = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            seen.setdefault(worker, version)
        else:
            found.append(version - seen.pop(worker))
            version += 1
    return found
""",
            3,
        ),
        Wrong(
            "workers less one, always",
            """
def staleness(events):
    workers = len({worker for _, worker in events})
    return [workers - 1 for kind, _ in events if kind == "push"]
""",
            1,
        ),
        Wrong(
            "counts the pulls in between",
            """
def staleness(events):
    pulls, seen, found = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulls += 1
            seen[worker] = pulls
        else:
            found.append(pulls - seen[worker])
    return found
""",
            1,
        ),
        Wrong(
            "one number for each worker, not for each push",
            """
def staleness(events):
    version, seen, worst = 0, {}, {}
    for kind, worker in events:
        if kind == "pull":
            seen[worker] = version
        else:
            worst[worker] = max(worst.get(worker, 0), version - seen[worker])
            version += 1
    return list(worst.values())
""",
            0,
        ),
    ),
)

# --- 13-partition -----------------------------------------------------------------------

# `shards` is judged by its rule. `place` is judged by the fullest server against the best
# possible, found by trying every placement; 4/3 of it is what "largest first" guarantees
# (Graham, 1969). The inputs are such that round-robin and "in the given order" miss it.

_LIMIT = 4 / 3


def _fullest(sizes: list[int], servers: int, where: list[int]) -> int:
    loads = [0] * servers
    for size, server in zip(sizes, where, strict=True):
        loads[server] += size
    return max(loads)


def _best(sizes: list[int], servers: int) -> int:
    """The smallest possible fullest server: every placement, equal loads only once."""
    reached = {(0,) * servers}
    for size in sizes:
        reached = {
            tuple(sorted((*loads[:i], loads[i] + size, *loads[i + 1 :])))
            for loads in reached
            for i in range(servers)
        }
    return min(max(loads) for loads in reached)


def _in_order(sizes: list[int], servers: int) -> list[int]:
    loads, where = [0] * servers, []
    for size in sizes:
        where.append(loads.index(min(loads)))
        loads[where[-1]] += size
    return where


def _variables(rng: random.Random, servers: int) -> list[int]:
    """Sizes for which the two easy ways end above the limit: the largest comes late."""
    while True:
        sizes = [rng.randint(60, 90) for _ in range(4 * (servers - 1))]
        sizes += [rng.randint(1, 9) for _ in range(rng.randint(0, 2))]
        rng.shuffle(sizes)
        sizes.append(rng.randint(280, 330))
        limit = _LIMIT * _best(sizes, servers) * 1.02
        turns = [number % servers for number in range(len(sizes))]
        if all(_fullest(sizes, servers, w) > limit for w in (turns, _in_order(sizes, servers))):
            return sizes


def _place_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    row_bytes = 4 * rng.choice([8, 16, 32])
    least = 1024 * rng.choice([64, 128])
    rows = least // row_bytes  # so many rows are just one smallest shard
    return {
        "tables": [
            [rows // 2, row_bytes, 4, least],  # too small for one: stays whole
            [3 * rows, row_bytes, 8, least],  # the smallest shard decides: exactly three
            [3 * rows - 1, row_bytes, 8, least],  # and one row less is only two
            [39 * rows + 2, row_bytes, 3, least],  # the servers decide; rows do not divide
            [7, 4 * least, 16, least],  # rows heavier than a shard: the rows decide
            [10, 4, 8, 10],  # a piece of two rows is too small, one of three is not
        ],
        "sizes": [[_variables(rng, servers), servers] for servers in (2, 3)],
    }


def _place_run(student, inputs: dict) -> dict:
    return {
        "tables": [student.shards(*table) for table in inputs["tables"]],
        "sizes": [student.place(list(sizes), servers) for sizes, servers in inputs["sizes"]],
    }


def _place_expected(inputs: dict) -> dict:
    """How many shards: the largest number that breaks no rule, found by trying all of them."""
    numbers = []
    for rows, row_bytes, servers, least in inputs["tables"]:
        fine = [n for n in range(1, servers + 1) if n <= rows and rows // n * row_bytes >= least]
        numbers.append(max(fine, default=1))
    return {"tables": numbers, "sizes": [_best(sizes, n) for sizes, n in inputs["sizes"]]}


def _whole(values: Any) -> bool:
    return is_list(values) and all(type(value) is int and value >= 0 for value in values)


def _place_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    rows_kept = even = many = exists = full = ""
    answers = item(got, "tables")
    for number, (table, want) in enumerate(zip(inputs["tables"], expected["tables"], strict=True)):
        rows, row_bytes, servers, least = table
        words = f"{rows} rows of {row_bytes} bytes, {servers} servers, at least {least} bytes: "
        answer = item(answers, number)
        if not _whole(answer) or not answer:
            rows_kept = rows_kept or f"{words}a list of whole numbers was expected, not " + (
                describe(answer) if not is_list(answer) else "what you returned"
            )
        elif sum(answer) != rows:
            size = "more" if sum(answer) > rows else "fewer"
            rows_kept = rows_kept or f"{words}your shards have {size} rows than the table"
        else:
            if max(answer) - min(answer) > 1:
                even = even or f"{words}one shard has {max(answer)} rows, another {min(answer)}"
            if len(answer) != want:
                size = "many" if len(answer) > want else "few"
                many = many or f"{words}{count(len(answer), 'shard')} are too {size}"
    answers = item(got, "sizes")
    for number, ((sizes, servers), best) in enumerate(
        zip(inputs["sizes"], expected["sizes"], strict=True)
    ):
        words, where = f"with {servers} servers: ", item(answers, number)
        if not _whole(where) or len(where) != len(sizes):
            exists = exists or (
                f"{words}one server for each of {len(sizes)} variables was expected, "
                f"not {describe(where)}"
            )
        elif max(where) >= servers:
            exists = exists or f"{words}servers are numbered from 0 to {servers - 1}"
        elif _fullest(sizes, servers, where) > _LIMIT * best:
            times = _fullest(sizes, servers, where) / best
            full = full or (
                f"{words}the fullest server has {times:.2f} times what it need have; sizes {sizes}"
            )
    skip_table = "not judged until the rows add up" if rows_kept else ""
    skip_place = "not judged until every variable has a server" if exists else ""
    return [
        Finding("shards: all rows of a table, each once", 1, rows_kept),
        Finding("shards: as even as can be", 1, skip_table or even),
        Finding("shards: as many as the three rules allow", 1, skip_table or many),
        Finding("place: every variable has a server that exists", 1, exists),
        Finding("place: the fullest server is near the best possible", 2, skip_place or full),
    ]


_SHARDS = """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, rows, rows // max(1, -(-least // row_bytes))))
    return [rows // number + (i < rows % number) for i in range(number)]
"""
_PLACE = """
def place(sizes, servers):
    loads, where = [0] * servers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        where[i] = loads.index(min(loads))
        loads[where[i]] += sizes[i]
    return where
"""

PARTITION = Task(
    id="13-partition",
    title="variables over servers, by size",
    points=6,
    functions=("shards", "place"),
    inputs=_place_inputs,
    run=_place_run,
    expected=_place_expected,
    judge=_place_judge,
    hints=(
        "shards: three things limit the number of shards. Write down each as a number; the "
        "smallest of them decides, but it is never below 1. place: which variable is the hardest "
        "to place, a large one or a small one?",
        "shards: how many rows make `least` bytes, rounded up? So many rows each shard needs. "
        "Deal the remainder of the division one row each. place: keep the bytes of each server; "
        "the variables take their turn from the largest to the smallest, each to the server that "
        "has the least.",
        "shards: `-(-a // b)` divides and rounds up; with the rows a piece needs (at least one), "
        "`rows // needed` is a limit beside `servers`; `divmod` gives the rows of each piece and "
        "the rest. place: `sorted(range(len(sizes)), key=…)` gives the order in which the "
        "variables choose, `loads.index(min(loads))` the server that they choose.",
    ),
    wrong=(
        Wrong(
            "round-robin, as TensorFlow does",
            _SHARDS
            + """
def place(sizes, servers):
    return [i % servers for i in range(len(sizes))]
""",
            4,
        ),
        Wrong(
            "the emptiest server, but in the given order",
            _SHARDS
            + """
def place(sizes, servers):
    loads, where = [0] * servers, []
    for size in sizes:
        where.append(loads.index(min(loads)))
        loads[where[-1]] += size
    return where
""",
            4,
        ),
        Wrong(
            "servers in the order of size, not of the variables",
            _SHARDS
            + """
def place(sizes, servers):
    return [servers for servers in range(servers)]
""",
            3,
        ),
        Wrong(
            "always as many shards as servers",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    return [rows // servers + (i < rows % servers) for i in range(servers)]
""",
            5,
        ),
        Wrong(
            "all that is left over goes to the last shard",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, rows, rows // max(1, -(-least // row_bytes))))
    return [rows // number] * (number - 1) + [rows - rows // number * (number - 1)]
""",
            5,
        ),
        Wrong(
            "the remainder is lost",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, rows, rows // max(1, -(-least // row_bytes))))
    return [rows // number] * number
""",
            3,
        ),
        Wrong(
            "the number of bytes divided, not the number of rows",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, -(-rows * row_bytes // least)))
    return [rows // number + (i < rows % number) for i in range(number)]
""",
            5,
        ),
        Wrong(
            "the bytes of the whole table divided by the smallest piece",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, rows, rows * row_bytes // least))
    return [rows // number + (i < rows % number) for i in range(number)]
""",
            5,
        ),
        Wrong(
            "the rows of the smallest piece are rounded down",
            _PLACE
            + """
def shards(rows, row_bytes, servers, least):
    number = max(1, min(servers, rows, rows // max(1, least // row_bytes)))
    return [rows // number + (i < rows % number) for i in range(number)]
""",
            5,
        ),
    ),
)

# --- 13-diverge -------------------------------------------------------------------------

# The oracle of the limit is known: w <- w - r·h·w(delay steps ago) stays bounded exactly for
# r·h <= 2 sin(pi / (2 (2·delay + 1))) (Levin and May, 1976). An answer within 1 % is right.

_NEAR = 0.01


def _diverge_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    rate = round(rng.uniform(0.05, 0.15), 3)
    runs = [[rate, 1.0, 0, 6, 1.0]]
    runs += [[rate, round(rng.uniform(1.2, 3), 2), delay, 12, 2.0] for delay in (1, 3)]
    searches = [[1.0, 0], [1.0, 1], [1.0, rng.randint(2, 3)], [1.0, 8]]
    searches += [[round(rng.uniform(3, 9), 2), 1], [0.1, 2]]
    return {"runs": runs, "searches": searches}


def _diverge_run(student, inputs: dict) -> dict:
    return {
        "runs": [student.simulate(*run) for run in inputs["runs"]],
        "searches": [student.largest_rate(*search) for search in inputs["searches"]],
    }


def _diverge_expected(inputs: dict) -> dict:
    """The weights by the recurrence; the limit by the formula, without a simulation."""
    runs = []
    for rate, curvature, delay, steps, start in inputs["runs"]:
        weights = {t: start for t in range(-delay, 1)}
        for t in range(steps):
            weights[t + 1] = weights[t] - rate * curvature * weights[t - delay]
        runs.append([weights[t] for t in range(steps + 1)])
    limits = [2 * math.sin(math.pi / (2 * (2 * d + 1))) / h for h, d in inputs["searches"]]
    return {"runs": runs, "searches": limits}


def _weights_why(run: list, want: list[float], got: Any) -> str:
    words = f"with delay {run[2]}: "
    if not is_list(got) or not all(is_number(each) for each in got):
        return f"{words}a list of numbers was expected, not {describe(got)}"
    if len(got) != len(want):
        return f"{words}{run[3]} steps make {len(want)} weights with the first, not {len(got)}"
    for t, (a, b) in enumerate(zip(got, want, strict=True)):
        if not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12):
            return f"{words}the weight after {count(t, 'step')} is not right"
    return ""


def _diverge_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    fresh = stale = ""
    for number, (run, want) in enumerate(zip(inputs["runs"], expected["runs"], strict=True)):
        why = _weights_why(run, want, item(item(got, "runs"), number))
        fresh, stale = (fresh, stale or why) if run[2] else (fresh or why, stale)
    none = delayed = curved = ""
    for number, (search, want) in enumerate(
        zip(inputs["searches"], expected["searches"], strict=True)
    ):
        curvature, delay = search
        answer, why = item(item(got, "searches"), number), ""
        words = f"curvature {curvature:g}, delay {delay}: "
        if not is_number(answer):
            why = f"{words}a number was expected, not {describe(answer)}"
        elif not (1 - _NEAR) * want <= answer <= (1 + _NEAR) * want:
            if answer < want:
                why = f"{words}your rate is too small: a larger one does not diverge either"
            else:
                why = f"{words}your rate is too large: with it the weights grow without end"
        if curvature != 1:
            curved = curved or why
        elif delay:
            delayed = delayed or why
        else:
            none = none or why
    return [
        Finding("simulate: without delay it is plain gradient descent", 1, fresh),
        Finding("simulate: with a delay the gradient is an old one", 1, stale),
        Finding("largest_rate: without delay", 1, none),
        Finding("largest_rate: with delays", 2, delayed),
        Finding("largest_rate: another curvature", 1, curved),
    ]


_SIMULATE = """
def simulate(rate, curvature, delay, steps, start):
    weights = [start]
    for t in range(steps):
        weights.append(weights[-1] - rate * curvature * weights[max(0, t - delay)])
    return weights
"""
_SEARCH = """
def largest_rate(curvature, delay):
    low, high = 0.0, 2.5 / curvature
    for _ in range(15):
        middle = (low + high) / 2
        weights = simulate(middle, curvature, delay, 3000, 1.0)
        stays = max(map(abs, weights[-200:])) <= max(map(abs, weights[:200]))
        low, high = (middle, high) if stays else (low, middle)
    return low
"""

DIVERGE = Task(
    id="13-diverge",
    title="asynchronous descent, and where it diverges",
    points=6,
    functions=("simulate", "largest_rate"),
    inputs=_diverge_inputs,
    run=_diverge_run,
    expected=_diverge_expected,
    judge=_diverge_judge,
    hints=(
        "simulate: keep all weights in a list; the one of `delay` steps ago is in it. What is "
        "there before the first step? largest_rate: you need a test that says for one rate "
        "whether the weights stay bounded.",
        "simulate: step t takes the gradient at weight number t - delay, or at the first one "
        "while there is none so old, and moves the newest weight. largest_rate: halve an "
        "interval between a rate that stays bounded and one that does not; near the limit the "
        "growth is slow, so look at thousands of steps.",
        "simulate: the old weight is `weights[max(0, t - delay)]`, the newest `weights[-1]`. "
        "largest_rate: a rate is fine when the largest |w| of the last 200 of 4,000 steps is at "
        "most that of the first 200 (asked in this way, a weight that is no number any more "
        "counts as grown); start between 0 and `4 / curvature`, and halve fifteen times.",
    ),
    wrong=(
        Wrong(
            "the delay is ignored",
            """
def simulate(rate, curvature, delay, steps, start):
    weights = [start]
    for t in range(steps):
        weights.append(weights[-1] * (1 - rate * curvature))
    return weights
"""
            + _SEARCH,
            2,
        ),
        Wrong(
            "one step too old",
            """
def simulate(rate, curvature, delay, steps, start):
    weights = [start]
    for t in range(steps):
        weights.append(weights[-1] - rate * curvature * weights[max(0, t - delay - 1)])
    return weights
"""
            + _SEARCH,
            0,
        ),
        Wrong(
            "the old weight is moved, not the newest",
            """
def simulate(rate, curvature, delay, steps, start):
    weights = [start]
    for t in range(steps):
        weights.append(weights[max(0, t - delay)] * (1 - rate * curvature))
    return weights
"""
            + _SEARCH,
            2,
        ),
        Wrong(
            "a guess: 2 over the number of updates in flight",
            _SIMULATE
            + """
def largest_rate(curvature, delay):
    return 2 / curvature / (delay + 1)
""",
            3,
        ),
        Wrong(
            "the curvature is left out",
            _SIMULATE
            + _SEARCH
            + """
unit = largest_rate
def largest_rate(curvature, delay):
    return unit(1.0, delay)
""",
            5,
        ),
        Wrong(
            "looks at too few steps",
            _SIMULATE
            + """
def largest_rate(curvature, delay):
    rate = 0.0
    while max(map(abs, simulate(rate, curvature, delay, 20, 1.0))) <= 10:
        rate += 0.01 / curvature
    return rate
""",
            2,
        ),
        Wrong(
            "searches below 2.5, whatever the curvature",
            _SIMULATE + _SEARCH.replace("2.5 / curvature", "2.5"),
            5,
        ),
        Wrong(
            "looks at the last weight only",
            _SIMULATE
            + """
def largest_rate(curvature, delay):
    low, high = 0.0, 2.5 / curvature
    for _ in range(15):
        middle = (low + high) / 2
        stays = abs(simulate(middle, curvature, delay, 400, 1.0)[-1]) <= 1
        low, high = (middle, high) if stays else (low, middle)
    return low
""",
            3,
        ),
    ),
)

TASKS = (STALENESS, PARTITION, DIVERGE)
