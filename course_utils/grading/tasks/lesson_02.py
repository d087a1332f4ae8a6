"""Tasks of lesson 02: a power with few products, a timer that tells the truth, a table."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from statistics import median
from typing import Any

from ..task import (
    Finding,
    Task,
    Wrong,
    close,
    count,
    describe,
    is_list,
    is_number,
    item,
    same_matrix,
)

# --- 02-matpow --------------------------------------------------------------------------


def _power_inputs(seed: int) -> list:
    rng = random.Random(seed)
    exponents = [1, 2, 3, 8, rng.randint(20, 30), rng.randint(33, 62), 63]
    return [{"m": [[rng.randint(-2, 2) for _ in "ab"] for _ in "ab"], "n": n} for n in exponents]


def _power_run(student, inputs: list) -> list:
    """Let the student multiply; write down which products were formed of which.

    The steps are a claim that the judge can check by itself: they are replayed, not counted
    on trust. 0 is m, k is the k-th product, -1 is something that no product gave.
    """
    answers = []
    for case in inputs:
        known = [case["m"]]
        steps = []

        def number(matrix, known=known):
            return next((i for i, old in enumerate(known) if old is matrix), -1)

        def product(a, b, known=known, steps=steps, number=number):
            for factor in (a, b):
                if not hasattr(factor, "__len__"):
                    kind = type(factor).__name__
                    raise TypeError(f"product(a, b) takes matrices; got {kind}")
            if len(steps) >= 10_000:
                raise RuntimeError("more than 10 000 products for one power")
            steps.append([number(a), number(b)])
            columns = list(zip(*b, strict=True))
            known.append(
                [[sum(x * y for x, y in zip(row, c, strict=True)) for c in columns] for row in a]
            )
            return known[-1]

        answer = student.matpow(case["m"], case["n"], product)
        answers.append({"value": answer, "result": number(answer), "steps": steps})
    return answers


def _power_expected(inputs: list) -> list:
    """One factor after the other, in whole numbers."""
    answers = []
    for case in inputs:
        value = case["m"]
        for _ in range(case["n"] - 1):
            (a, b), (c, d) = value
            (e, f), (g, h) = case["m"]
            value = [[a * e + b * g, a * f + b * h], [c * e + d * g, c * f + d * h]]
        answers.append(value)
    return answers


def _replay(answer: Any) -> tuple[int | None, int]:
    """The power of m that the steps really give (or None), and how often one was formed."""
    powers, steps = [1], item(answer, "steps")
    for step in steps if is_list(steps) else [None]:
        left, right = item(step, 0), item(step, 1)
        if not all(type(i) is int and 0 <= i < len(powers) for i in (left, right)):
            return None, 0
        powers.append(powers[left] + powers[right])
    result = item(answer, "result")
    power = powers[result] if type(result) is int and 0 <= result < len(powers) else None
    return power, max(Counter(powers[1:]).values(), default=0)


def _power_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    power = few = ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, n = item(got, number), case["n"]
        formed, times = _replay(answer)
        value = item(answer, "value")
        if not is_list(value):
            power = power or f"for n = {n}: a matrix was expected, not {describe(value)}"
        elif formed is None:
            power = power or f"for n = {n}: it was not formed by `product` from m alone"
        elif formed != n:
            which = "more" if formed > n else "fewer"
            power = power or f"for n = {n}: the result has {which} than n factors"
        elif not same_matrix(value, want):
            power = power or f"for n = {n}: the result was changed after the last product"
        # Binary powers need at most 2·log2(n); one last superfluous square is forgiven.
        elif len(answer["steps"]) > 2 * n.bit_length():
            again = f": the same product was computed {times} times, keep it and use it again"
            too_many = f"{len(answer['steps'])} products for n = {n} are too many"
            few = few or too_many + (again if times > 1 else "")
    return [
        Finding("the result has n factors m", 2, power),
        Finding(
            "the number of products grows like log n",
            2,
            "not judged until the power is right" if power else few,
        ),
    ]


MATPOW = Task(
    id="02-matpow",
    title="a matrix power with few products",
    points=4,
    functions=("matpow",),
    inputs=_power_inputs,
    run=_power_run,
    expected=_power_expected,
    judge=_power_judge,
    hints=(
        "m² · m² is m⁴: two products give four factors. Which powers do you get by squaring "
        "alone, and which of them do you need for n = 6?",
        "Write n in binary. Square m again and again; multiply those squares together whose "
        "bit in n is 1. Without an identity matrix, let the result start as None.",
        "While n is not 0: if n is odd, the result is the square, or `product(result, square)` "
        "when there is a result already; halve n (`n //= 2`); if n is not yet 0, "
        "`square = product(square, square)`.",
    ),
    wrong=(
        Wrong(
            "one factor too many",
            """
def matpow(m, n, product):
    result = m
    for _ in range(n):
        result = product(result, m)
    return result
""",
            0,
        ),
        Wrong(
            "n - 1 products",
            """
def matpow(m, n, product):
    result = m
    for _ in range(n - 1):
        result = product(result, m)
    return result
""",
            2,
        ),
        Wrong(
            "halves, but computes each half twice",
            """
def matpow(m, n, product):
    if n == 1:
        return m
    return product(matpow(m, n // 2, product), matpow(m, n - n // 2, product))
""",
            2,
        ),
        Wrong(
            "squares only: right for powers of two",
            """
def matpow(m, n, product):
    while n > 1:
        m = product(m, m)
        n = n // 2
    return m
""",
            0,
        ),
    ),
)

# --- 02-timer ---------------------------------------------------------------------------

# Each case makes one mistake visible and hides the others. Times are in seconds of a
# made-up clock; `host` is what a call costs before it returns (in turn, over and over),
# `device` what it leaves running behind it, `first` the extra cost of the very first call.
# `late` is the text of what went wrong when the student's number is too large.


def _timer_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def time(low: float, high: float) -> float:
        return round(rng.uniform(low, high), 4)

    host = time(0.001, 0.002)
    odd = [time(0.01, 0.02) for _ in range(4)] + [time(0.5, 0.9)]
    even = [time(0.01, 0.02) for _ in range(3)] + [time(0.5, 0.9)]
    rng.shuffle(odd)
    rng.shuffle(even)
    return [
        {"about": "warm", "repeat": 1, "host": [time(0.01, 0.02)], "device": 0, "first": 1.0},
        {"about": "stop", "repeat": 3, "host": [host], "device": time(0.1, 0.2), "first": 0},
        {"about": "start", "repeat": 1, "host": [host], "device": time(0.1, 0.2), "first": 0},
        {"about": "median", "repeat": 5, "host": odd, "device": 0, "first": 0},
        {"about": "median", "repeat": 4, "host": even, "device": 0, "first": 0},
    ]


def _timer_run(student, inputs: list) -> list:
    """Time a made-up device on a made-up clock; write down which function was called when.

    As with the products, these calls are a claim that the judge replays.
    """
    answers = []
    for case in inputs:
        # Somebody's work is still running on the device when the measurement begins.
        world = {"now": 100.0, "busy_until": 100.0 + case["device"]}
        calls = []

        def note(name, calls=calls):
            if len(calls) >= 10_000:
                raise RuntimeError("more than 10 000 calls of fn, sync and clock for one number")
            calls.append(name)

        def fn(case=case, world=world, calls=calls, note=note):
            before = calls.count("fn")
            note("fn")
            world["now"] += case["host"][before % len(case["host"])]
            world["now"] += 0 if before else case["first"]
            world["busy_until"] = max(world["now"], world["busy_until"]) + case["device"]

        def sync(world=world, note=note):
            note("sync")
            world["now"] = max(world["now"], world["busy_until"])

        def clock(world=world, note=note):
            note("clock")
            return world["now"]

        seconds = student.measure(fn, sync, case["repeat"], clock)
        answers.append({"seconds": seconds, "calls": calls})
    return answers


def _timer_expected(inputs: list) -> list:
    """One run costs its host time plus its device time; half of the runs cost no more."""
    answers = []
    for case in inputs:
        costs = sorted(case["host"])
        low, high = costs[(len(costs) - 1) // 2], costs[len(costs) // 2]
        answers.append((low + high) / 2 + case["device"])
    return answers


def _timed(case: dict, calls: Any) -> float | None:
    """The median that these calls measure, on the device of the case; None if they measure none.

    A run takes from the last reading of the clock before its `fn` to the last before the next.
    """
    now, busy, before, reading, readings = 0.0, case["device"], 0, None, []
    for call in calls if is_list(calls) else [None]:
        if call == "fn":
            now += case["host"][before % len(case["host"])] + (0 if before else case["first"])
            busy = max(now, busy) + case["device"]
            before += 1
            readings.append(reading)
        elif call == "sync":
            now = max(now, busy)
        elif call == "clock":
            reading = now
        else:
            return None
    readings = [*readings, reading][-case["repeat"] - 1 :]
    if len(readings) <= case["repeat"] or None in readings:
        return None
    return median(stop - start for start, stop in pairwise(readings))


_TIMER_TEXTS = {
    "warm": "the first call is not counted",
    "stop": "the clock stops only when the device is done",
    "start": "the clock starts only when the device is idle",
    "median": "the number is the median of the runs",
}


def _timer_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_TIMER_TEXTS, "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, calls = item(item(got, number), "seconds"), item(item(got, number), "calls")
        right = close(answer, want, relative=1e-6)
        if right and close(_timed(case, calls), want, relative=1e-6):
            continue
        problem = f"seconds were expected, not {describe(answer)}"
        if not is_list(calls) or "clock" not in calls:
            problem = "`clock` was never called; take all times from it, not from the time module"
        elif right:
            problem = (
                f"with repeat = {case['repeat']} the number is right, but it is not what the "
                "calls of fn, sync and clock have measured"
            )
        elif type(answer) in (int, float):
            size = "large" if answer > want else "small"
            problem = f"with repeat = {case['repeat']} your number is too {size}"
        why[case["about"]] = why[case["about"]] or problem
    return [Finding(text, 1, why[about]) for about, text in _TIMER_TEXTS.items()]


TIMER = Task(
    id="02-timer",
    title="a timer that tells the truth",
    points=4,
    functions=("measure",),
    inputs=_timer_inputs,
    run=_timer_run,
    expected=_timer_expected,
    judge=_timer_judge,
    hints=(
        "`fn` may return before the device has finished. At which two moments must the device "
        "be idle, so that the difference of two clock readings is one run and no more?",
        "Call fn once and forget it. Then, `repeat` times: wait, read the clock, call, wait, "
        "read the clock, and keep the difference. One number comes out of the list.",
        "Each round is `sync(); start = clock(); fn(); sync(); runs.append(clock() - start)`, "
        "after one `fn()` that is not timed; return `statistics.median(runs)`.",
    ),
    wrong=(
        Wrong(
            "the first call is counted",
            """
import statistics
def measure(fn, sync, repeat, clock):
    runs = []
    for _ in range(repeat):
        sync()
        start = clock()
        fn()
        sync()
        runs.append(clock() - start)
    return statistics.median(runs)
""",
            3,
        ),
        Wrong(
            "never waits for the device",
            """
import statistics
def measure(fn, sync, repeat, clock):
    fn()
    runs = []
    for _ in range(repeat):
        start = clock()
        fn()
        runs.append(clock() - start)
    return statistics.median(runs)
""",
            2,
        ),
        Wrong(
            "waits at the stop, not at the start",
            """
import statistics
def measure(fn, sync, repeat, clock):
    fn()
    runs = []
    for _ in range(repeat):
        start = clock()
        fn()
        sync()
        runs.append(clock() - start)
    return statistics.median(runs)
""",
            3,
        ),
        Wrong(
            "the mean, not the median",
            """
def measure(fn, sync, repeat, clock):
    fn()
    runs = []
    for _ in range(repeat):
        sync()
        start = clock()
        fn()
        sync()
        runs.append(clock() - start)
    return sum(runs) / len(runs)
""",
            3,
        ),
        Wrong(
            "the time module, not the given clock",
            """
import statistics, time
def measure(fn, sync, repeat, clock):
    fn()
    runs = []
    for _ in range(repeat):
        sync()
        start = time.perf_counter()
        fn()
        sync()
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)
""",
            0,
        ),
        Wrong(
            "all of it at once: one block, divided by the number of runs",
            """
def measure(fn, sync, repeat, clock):
    start = clock()
    for _ in range(repeat):
        fn()
    return (clock() - start) / repeat
""",
            0,
        ),
    ),
)

# --- 02-speedup -------------------------------------------------------------------------


def _table_inputs(seed: int) -> list:
    rng = random.Random(seed)
    tables = []
    for devices in (1, 2, 4, 6):
        one = rng.uniform(2, 9)
        # Not a smooth curve: with more devices it may well get slower.
        times = [one] + [one / n * rng.uniform(1.05, 2.5) for n in range(2, devices + 1)]
        tables.append([round(time, 4) for time in times])
    return tables


def _table_run(student, inputs: list) -> list:
    return [student.speedup_table(list(seconds)) for seconds in inputs]


def _table_expected(inputs: list) -> list:
    """Efficiency first: useful work (one device's time) over the time bought on n devices."""
    answers = []
    for seconds in inputs:
        rows = []
        for n, time in enumerate(seconds, start=1):
            efficiency = Fraction(seconds[0]) / (n * Fraction(time))
            rows.append([n, float(efficiency * n), float(efficiency)])
        answers.append(rows)
    return answers


def _off(value: Any, want: float) -> str:
    """How a value that is not close misses."""
    rounded = is_number(value) and any(value == round(want, digits) for digits in range(9))
    return "not exact: did you round?" if rounded else "not what the times say"


def _table_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    shape = speedup = efficiency = ""
    for number, want in enumerate(expected):
        words, table = f"with {count(len(want), 'time')}, ", item(got, number)
        if not is_list(table):
            shape = shape or f"{words}a list of rows was expected, not {describe(table)}"
            continue
        if len(table) != len(want):
            rows = count(len(want), "row")
            shape = shape or f"{words}{rows} were expected, not {describe(table)}"
            continue
        for row, (n, gain, share) in zip(table, want, strict=True):
            if not is_list(row, 3):
                shape = shape or f"{words}row {n} must have three entries, not be {describe(row)}"
                continue
            if type(row[0]) is not int or row[0] != n:
                shape = shape or (
                    f"{words}the first entry of row {n} is not its number of devices, "
                    "which is counted from 1"
                )
                continue
            if not close(row[1], gain):
                size = "upside down" if close(row[1], 1 / gain) else _off(row[1], gain)
                speedup = speedup or f"{words}the speed-up in row {n} is {size}"
            if not close(row[2], share):
                size = "in percent" if close(row[2], 100 * share) else _off(row[2], share)
                efficiency = efficiency or f"{words}the efficiency in row {n} is {size}"
    skipped = "not judged until the rows are right" if shape else ""
    return [
        Finding("there is one row for each number of devices", 1, shape),
        Finding("the speed-ups are right", 1, skipped or speedup),
        Finding("the efficiencies are right", 1, skipped or efficiency),
    ]


SPEEDUP = Task(
    id="02-speedup",
    title="speed-up and efficiency",
    points=3,
    functions=("speedup_table",),
    inputs=_table_inputs,
    run=_table_run,
    expected=_table_expected,
    judge=_table_judge,
    hints=(
        "Speed-up says how many times as fast; on one device it is 1. Efficiency says which "
        "part of the n devices did useful work; for a perfect program it is 1 everywhere.",
        "Every row compares its time with the same one, that on one device. The faster program "
        "has the smaller time and the larger speed-up: which of the two times stands on top of "
        "the fraction? Efficiency follows from the speed-up and the number of devices.",
        "`for n, time in enumerate(seconds, start=1)`: append "
        "`(n, seconds[0] / time, seconds[0] / time / n)`.",
    ),
    wrong=(
        Wrong(
            "the ratio upside down",
            """
def speedup_table(seconds):
    return [(n, t / seconds[0], t / seconds[0] / n) for n, t in enumerate(seconds, 1)]
""",
            1,
        ),
        Wrong(
            "efficiency in percent",
            """
def speedup_table(seconds):
    return [(n, seconds[0] / t, 100 * seconds[0] / t / n) for n, t in enumerate(seconds, 1)]
""",
            2,
        ),
        Wrong(
            "rounded to two digits",
            """
def speedup_table(seconds):
    return [(n, round(seconds[0] / t, 2), round(seconds[0] / t / n, 2))
            for n, t in enumerate(seconds, 1)]
""",
            1,
        ),
        Wrong(
            "against the row before, not against one device",
            """
def speedup_table(seconds):
    rows = []
    for n, t in enumerate(seconds, 1):
        gain = seconds[max(n - 2, 0)] / t
        rows.append((n, gain, gain / n))
    return rows
""",
            1,
        ),
        Wrong(
            "devices counted from 0",
            """
def speedup_table(seconds):
    return [(n, seconds[0] / t, seconds[0] / t / (n + 1)) for n, t in enumerate(seconds)]
""",
            0,
        ),
    ),
)

TASKS = (MATPOW, TIMER, SPEEDUP)
