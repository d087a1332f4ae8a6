"""Tasks of lesson 17: loss scaling by hand, segments to recompute, a precision for a device."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

from ..task import Finding, Task, Wrong, close, describe, is_list, item

# --- 17-loss-scaling --------------------------------------------------------------------

# Each case is one step. `grads` are the true gradients of the loss; `poison` is what one of
# them becomes whatever the scale ("nan"), or "" for none.


def _scaling_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def some(low: float, high: float) -> list:
        return [round(rng.choice((-1, 1)) * rng.uniform(low, high), 12) for _ in range(4)]

    def case(about, grads, scale, good, interval, poison=""):
        about = {"about": about, "grads": grads, "poison": poison}
        return about | {"scale": float(2**scale), "good_steps": good, "interval": interval}

    interval = rng.randint(5, 9)
    high, low = rng.choice((16, 17)), rng.choice((8, 9, 10))
    return [
        case("units", some(0.01, 0.5), low, 1, interval),
        case("small", some(1e-9, 2e-8), high, 2, interval),
        case("skip", [*some(0.01, 0.4), rng.uniform(2, 9)], high, 3, interval),
        case("skip", [*some(0.01, 0.4), -rng.uniform(2, 9)], high, interval - 1, interval),
        case("skip", some(0.01, 0.5), low, 2, interval, "nan"),
        case("grow", some(0.01, 0.5), low, interval - 1, interval),
        case("grow", some(0.01, 0.5), low, interval - 2, interval),
        case("grow", some(0.01, 0.5), low, 0, 1),
    ]


def _scaling_run(student, inputs: list) -> list:
    """One step of a made-up network that computes its gradients in float16."""
    import struct

    def half(value):
        """`value` as float16 holds it: too small becomes 0, too large infinity."""
        try:
            return struct.unpack("e", struct.pack("e", value))[0]
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")

    answers = []
    for case in inputs:
        calls = []

        def backward(factor, case=case, calls=calls):
            calls.append(factor)
            if len(calls) > 100:
                raise RuntimeError("backward was called more than 100 times in one step")
            grads = [half(grad * factor) for grad in case["grads"]]
            return [*grads[:-1], float("nan")] if case["poison"] else grads

        state = case["scale"], case["good_steps"], case["interval"]
        answers.append({"step": student.scaled_step(backward, *state), "factors": calls})
    return answers


def _scaling_expected(inputs: list) -> list:
    """The true gradients, rounded to float16's eleven bits, and GradScaler's rule."""
    answers = []
    for case in inputs:
        largest = max(abs(grad) for grad in case["grads"]) * case["scale"]
        # 65504 is the largest float16; from 65520 on rounding ends at infinity.
        if case["poison"] or largest >= 65520:
            answers.append({"grads": None, "scale": case["scale"] * 0.5, "good_steps": 0})
            continue
        full = case["good_steps"] + 1 == case["interval"]
        answers.append(
            {
                "grads": list(case["grads"]),
                "scale": case["scale"] * (2 if full else 1),
                "good_steps": 0 if full else case["good_steps"] + 1,
            }
        )
    return answers


_SCALING_POINTS = {
    "shape": "",  # no finding of its own: it is told in whatever comes first
    "factor": "",  # neither
    "units": "gradients come back in their own units, also small ones",
    "skip": "a step with infinity or NaN is skipped, and no other",
    "back": "after a skipped step the scale is halved, and the good steps start anew",
    "grow": "the scale doubles after `interval` good steps in a row, and not before",
}


def _gradients_problem(grads: Any, want: list) -> str:
    """What is wrong with the gradients of a good step; tolerance: float16's rounding."""
    if not is_list(grads, len(want)):
        return f"{len(want)} gradients were expected, not {describe(grads)}"
    if all(close(got, goal, 2**-9) for got, goal in zip(grads, want, strict=True)):
        return ""
    if any(got == 0 for got in grads):
        return "a gradient that is not 0 came back as 0: was the loss scaled before `backward`?"
    return "they are not those of the unscaled loss: by which scale must you divide?"


def _scaling_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_SCALING_POINTS, "")

    def note(key: str, problem: str) -> None:
        why[key] = why[key] or problem

    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        step = item(item(got, number), "step")
        if not is_list(step, 3):
            note("shape", f"(gradients, scale, good_steps) was expected, not {describe(step)}")
            continue
        grads, scale, good = step
        kind = "a NaN" if case["poison"] else "an infinity"
        factors = item(item(got, number), "factors")
        if not is_list(factors, 1):
            note("units", "`backward` was not called exactly once in each step")
        elif not close(factors[0], case["scale"]):
            note("factor", "the loss was not multiplied by the scale; the rest depends on this")
        if want["grads"] is None:
            if grads is not None:
                note("skip", f"among the gradients is {kind}, and yet they came back")
            if not close(scale, want["scale"]):
                note("back", f"after {kind} the scale is not half of what it was")
            elif good != 0 or type(good) is not int:
                note("back", f"after {kind} the number of good steps is not 0")
            continue
        if grads is None:
            note("skip", "a step whose gradients are all finite was skipped")
            note("units", "a step whose gradients are all finite gave none")
        else:
            note("units", _gradients_problem(grads, want["grads"]))
        full = want["good_steps"] == 0
        when = f"good step number {case['good_steps'] + 1} of an interval of {case['interval']}"
        if not close(scale, want["scale"]):
            note("grow", f"at {when} the scale is not {'doubled' if full else 'as before'}")
        elif type(good) is not int or good != want["good_steps"]:
            note("grow", f"after {when} the number of good steps is wrong")
    points = {"units": 2, "skip": 1, "back": 1, "grow": 1}
    if why["factor"] and not why["shape"]:  # one mistake, one line: not what follows from it
        why["units"] = why["factor"]
        points["units"] += sum(points.pop(key) for key in ("skip", "back", "grow") if why[key])
    return [
        Finding(_SCALING_POINTS[key], value, why["shape"] or why[key])
        for key, value in points.items()
    ]


LOSS_SCALING = Task(
    id="17-loss-scaling",
    title="loss scaling by hand",
    points=5,
    functions=("scaled_step",),
    inputs=_scaling_inputs,
    run=_scaling_run,
    expected=_scaling_expected,
    judge=_scaling_judge,
    hints=(
        "`backward(factor)` gives gradients that are `factor` times too large. Look at them "
        "before you use them: which numbers can no division repair?",
        "Call `backward(scale)` once. If one gradient is not finite (`math.isfinite`), return "
        "None, half the scale and 0. Otherwise divide by the scale that you multiplied by, "
        "then think about the scale of the next step.",
        "`gradients = [g / scale for g in scaled]`, then `good_steps += 1`; if that is "
        "`interval`, return `(gradients, 2 * scale, 0)`, else `(gradients, scale, good_steps)`.",
    ),
    wrong=(
        Wrong(
            "never unscales",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(scale)
    if not all(math.isfinite(g) for g in grads):
        return None, scale / 2, 0
    if good_steps + 1 == interval:
        return grads, scale * 2, 0
    return grads, scale, good_steps + 1
""",
            3,
        ),
        Wrong(
            "unscales by the scale of the next step",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(scale)
    if not all(math.isfinite(g) for g in grads):
        return None, scale / 2, 0
    good_steps += 1
    if good_steps == interval:
        scale, good_steps = scale * 2, 0
    return [g / scale for g in grads], scale, good_steps
""",
            3,
        ),
        Wrong(
            "does not scale the loss",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(1.0)
    if not all(math.isfinite(g) for g in grads):
        return None, scale / 2, 0
    if good_steps + 1 == interval:
        return grads, scale * 2, 0
    return grads, scale, good_steps + 1
""",
            1,
        ),
        Wrong(
            "looks for infinity, not for NaN",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(scale)
    if any(math.isinf(g) for g in grads):
        return None, scale / 2, 0
    grads = [g / scale for g in grads]
    if good_steps + 1 == interval:
        return grads, scale * 2, 0
    return grads, scale, good_steps + 1
""",
            3,
        ),
        Wrong(
            "good steps need not be in a row",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(scale)
    if not all(math.isfinite(g) for g in grads):
        return None, scale / 2, good_steps
    grads = [g / scale for g in grads]
    if good_steps + 1 == interval:
        return grads, scale * 2, 0
    return grads, scale, good_steps + 1
""",
            4,
        ),
        Wrong(
            "grows after every good step",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = backward(scale)
    if not all(math.isfinite(g) for g in grads):
        return None, scale / 2, 0
    return [g / scale for g in grads], scale * 2, good_steps + 1
""",
            4,
        ),
        Wrong(
            "sets what is not finite to 0 instead of skipping",
            """
import math
def scaled_step(backward, scale, good_steps, interval):
    grads = [g / scale if math.isfinite(g) else 0.0 for g in backward(scale)]
    if good_steps + 1 == interval:
        return grads, scale * 2, 0
    return grads, scale, good_steps + 1
""",
            3,
        ),
    ),
)

# --- 17-segments ------------------------------------------------------------------------


def _segments_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    size = rng.randint(2, 9)
    uneven = []
    while len(uneven) < 4:
        sizes = [rng.choice((1, 2, 3, 5, 8, 13, 21, 40)) for _ in range(rng.randint(8, 11))]
        # Only lists that segments of equal length do not solve.
        equal = [list(range(0, len(sizes), step)) for step in range(1, len(sizes) + 1)]
        if min(_peak(sizes, starts) for starts in equal) > _smallest_peak(sizes):
            uneven.append(sizes)
    asked = []
    for sizes in [[size] * 6, *uneven]:
        inner = sorted(rng.sample(range(1, len(sizes)), rng.randint(1, 4)))
        asked.append({"sizes": sizes, "starts": [0, *inner]})
    asked.append({"sizes": uneven[0], "starts": [0]})
    return {"asked": asked, "even": [[size] * 4, [size] * 9], "uneven": [*uneven, [size]]}


def _segments_run(student, inputs: dict) -> dict:
    asked = [(case["sizes"], case["starts"]) for case in inputs["asked"]]
    return {
        "peaks": [student.peak_memory(list(sizes), list(starts)) for sizes, starts in asked],
        "even": [student.choose_segments(list(sizes)) for sizes in inputs["even"]],
        "uneven": [student.choose_segments(list(sizes)) for sizes in inputs["uneven"]],
    }


def _peak(sizes: list, starts: list) -> int:
    """MiB at the worst moment, replayed: the backward pass holds one segment at a time."""
    kept = sum(sizes[start] for start in starts)
    held = [0] * len(starts)
    for layer, size in enumerate(sizes):
        if layer not in starts:
            held[sum(start <= layer for start in starts) - 1] += size
    return kept + max(held)


def _smallest_peak(sizes: list) -> int:
    """Every choice is tried: with n layers there are 2 to the power n - 1."""
    inner = range(1, len(sizes))
    return min(
        _peak(sizes, [0, *some]) for k in range(len(sizes)) for some in combinations(inner, k)
    )


def _segments_expected(inputs: dict) -> dict:
    return {
        "peaks": [_peak(case["sizes"], case["starts"]) for case in inputs["asked"]],
        "even": [_smallest_peak(sizes) for sizes in inputs["even"]],
        "uneven": [_smallest_peak(sizes) for sizes in inputs["uneven"]],
    }


def _starts_problem(starts: Any, sizes: list, best: int) -> str:
    n = len(sizes)
    if not is_list(starts) or not starts:
        return f"with {n} layers, a list of first layers was expected, not {describe(starts)}"
    if any(type(start) is not int or not 0 <= start < n for start in starts):
        return f"with {n} layers, a segment starts at something that is no layer's number"
    if starts[0] != 0 or starts != sorted(set(starts)):
        return "the starts must begin with layer 0 and rise, each layer at most once"
    if _peak(sizes, starts) > best:
        mine = _peak(sizes, starts)
        return f"for the sizes {sizes} your starts need {mine} MiB, the best ones {best} MiB"
    return ""


def _segments_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    peak = ""
    for number, (case, want) in enumerate(zip(inputs["asked"], expected["peaks"], strict=True)):
        value = item(item(got, "peaks"), number)
        words = f"for the sizes {case['sizes']} and the starts {case['starts']} the peak"
        if type(value) not in (int, float):
            peak = peak or f"{words} must be a number, not {describe(value)}"
        elif not close(value, want):
            peak = peak or f"{words} is too {'large' if value > want else 'small'}"
    why = {}
    for key in ("even", "uneven"):
        choices = zip(inputs[key], expected[key], strict=True)
        problems = [
            _starts_problem(item(item(got, key), number), sizes, best)
            for number, (sizes, best) in enumerate(choices)
        ]
        why[key] = next(filter(None, problems), "")
    return [
        Finding("the peak of given segments is right", 2, peak),
        Finding("with equal layers your segments have the lowest peak", 1, why["even"]),
        Finding("with unequal layers your segments have the lowest peak", 2, why["uneven"]),
    ]


SEGMENTS = Task(
    id="17-segments",
    title="choose the segments to recompute",
    points=5,
    functions=("peak_memory", "choose_segments"),
    inputs=_segments_inputs,
    run=_segments_run,
    expected=_segments_expected,
    judge=_segments_judge,
    hints=(
        "Two sums make the peak: what stays for the whole step, and what the most expensive "
        "segment adds while it is recomputed. Moving a start makes one smaller and the other "
        "larger.",
        "Segment k covers the layers from starts[k] up to the next start; its first layer is "
        "kept anyway, the others count for the segment. For the choice: there are few enough "
        "layers to try every set of starts that contains 0.",
        "`ends = starts[1:] + [len(sizes)]`, and the peak is the sum of `sizes[s]` over the "
        "starts plus the largest `sum(sizes[s + 1 : e])`. `itertools.combinations(range(1, n), "
        "k)` for every k from 0 to n - 1 gives all starts but the first, 0; keep those with "
        "the smallest peak.",
    ),
    wrong=(
        Wrong(
            "segments of equal length, √n of them",
            """
import math
def peak_memory(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return sum(sizes[s] for s in starts) + max(
        sum(sizes[s + 1 : e]) for s, e in zip(starts, ends))
def choose_segments(sizes):
    return list(range(0, len(sizes), round(math.sqrt(len(sizes)))))
""",
            3,
        ),
        Wrong(
            "counts the first layer of a segment twice",
            """
from itertools import combinations
def peak_memory(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return sum(sizes[s] for s in starts) + max(sum(sizes[s:e]) for s, e in zip(starts, ends))
def right(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return sum(sizes[s] for s in starts) + max(
        sum(sizes[s + 1 : e]) for s, e in zip(starts, ends))
def choose_segments(sizes):
    inner = range(1, len(sizes))
    every = [[0, *some] for k in range(len(sizes)) for some in combinations(inner, k)]
    return min(every, key=lambda starts: right(sizes, starts))
""",
            3,
        ),
        Wrong(
            "forgets what stays: only the largest segment",
            """
def peak_memory(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return max(sum(sizes[s:e]) for s, e in zip(starts, ends))
def choose_segments(sizes):
    return list(range(len(sizes)))
""",
            0,
        ),
        Wrong(
            "one segment: nothing but the input is kept",
            """
def peak_memory(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return sum(sizes[s] for s in starts) + max(
        sum(sizes[s + 1 : e]) for s, e in zip(starts, ends))
def choose_segments(sizes):
    return [0]
""",
            2,
        ),
        Wrong(
            "says where segments end, not where they start",
            """
import math
def peak_memory(sizes, starts):
    ends = starts[1:] + [len(sizes)]
    return sum(sizes[s] for s in starts) + max(
        sum(sizes[s + 1 : e]) for s, e in zip(starts, ends))
def choose_segments(sizes):
    step = round(math.sqrt(len(sizes)))
    return list(range(step, len(sizes) + 1, step))
""",
            2,
        ),
    ),
)

# --- 17-pick-precision ------------------------------------------------------------------

_TYPES = ("float32", "bfloat16", "float16")


def _pick_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def record(about, name, capability, native, speeds, peaks=(900, 600, 600), limit=1000):
        speed = rng.uniform(50, 900)
        peaks = [round(peak * rng.uniform(0.97, 1)) for peak in peaks]
        return {
            "about": about,
            "name": name,
            "capability": capability,
            # What the call says without an argument: True on every card with a new CUDA.
            "bf16_supported": capability is not None or native,
            "bf16_native": native,
            "samples_per_s": {
                kind: None if times is None else round(speed * times, 1)
                for kind, times in zip(_TYPES, speeds, strict=True)
            },
            "peak_mib": dict(zip(_TYPES, peaks, strict=True)),
            "limit_mib": limit or peaks[1],  # None: bfloat16 just fits
        }

    def much():
        return rng.uniform(2.5, 5)

    slow, big = rng.uniform(0.02, 0.3), (1400, 800, 800)
    same = rng.uniform(1.01, 1.06)
    return [
        record("speed", "a GPU of 2020", [8, 0], True, (1, much(), 1.6)),
        record("speed", "a laptop's CPU", None, False, (1, slow, slow / 2)),
        record("speed", "a server's CPU", None, True, (1, much(), 0.25)),
        record("native", "a T4", [7, 5], False, (1, 3.4, much() * 0.6)),
        record("native", "a T4, small model", [7, 5], False, (1, 1.7, 0.8)),
        record("fits", "a server's CPU, big model", None, True, (1, 0.7, 0.2), big),
        record("fits", "a GPU of 2020, big model", [8, 6], True, (3, 1, 0.4), big),
        record("fits", "many weights, few samples", [8, 0], True, (1, 2, 2), (900, 1200, 1200)),
        record("fits", "a GPU, full", [8, 0], True, (1, 2, 0.5), (900, 600, 500), None),
        record("care", "a GPU of 2021", [8, 6], True, (0.5, 0.905, 1)),
        record("care", "a GPU of 2022", [9, 0], True, (0.5, 1, same)),
        record("care", "a GPU of 2022, tiny model", [9, 0], True, (1, same, same * 1.02)),
        record("speed", "not all measured", [8, 9], True, (1, None, much())),
        record("none", "a GPU of 2020, huge model", [8, 0], True, (1, 2, 2), (9000, 5000, 5000)),
        record("none", "a T4, huge model", [7, 5], False, (1, 2, None), (1500, 900, 900)),
    ]


def _pick_run(student, inputs: list) -> list:
    answers = []
    for case in inputs:
        device = {key: value for key, value in case.items() if key != "about"}
        try:
            answers.append({"answer": student.pick_precision(device)})
        except ValueError as error:
            answers.append({"error": "memory" if "memory" in str(error) else "other"})
    return answers


def _pick_expected(inputs: list) -> list:
    """By elimination: strike out what is ruled out, then what is clearly slower.

    The answer is the number of the type in _TYPES, or None.
    """
    answers = []
    for case in inputs:
        left = dict(case["samples_per_s"])
        for kind in _TYPES:
            emulated = kind == "bfloat16" and not case["bf16_native"]
            large = case["peak_mib"][kind] > case["limit_mib"]
            if emulated or large or left[kind] is None:
                del left[kind]
        top = max(left.values(), default=None)
        near = [kind for kind in _TYPES if kind in left and left[kind] >= top / 1.1]
        answers.append(_TYPES.index(near[0]) if near else None)
    return answers


_PICK_TEXTS = {
    "speed": "the measured speed decides, not the name of the type",
    "native": "bfloat16 is not picked where it is emulated",
    "fits": "what does not fit in memory is not picked, however fast",
    "care": "of nearly equal speeds, the type that needs the least care is picked",
    "none": "where nothing is left, a ValueError says that the memory is too small",
}


def _pick_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_PICK_TEXTS, "")
    scaler = ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        about, name = case["about"], case["name"]
        answer, error = (item(item(got, number), key) for key in ("answer", "error"))
        kind, scaled = answer if is_list(answer, 2) else (None, None)
        problem = ""
        if want is None:
            if error == "other":
                problem = f"{name}: the ValueError does not mention the memory"
            elif error != "memory":
                problem = f"{name}: no type is left, and yet no ValueError was raised"
        elif error in ("memory", "other"):
            problem = f"{name}: a ValueError was raised, though a type is left"
        elif not is_list(answer, 2):
            problem = f"(name of the type, scaler) was expected, not {describe(answer)}"
        elif not (type(kind) is str and kind in _TYPES):
            problem = f"{name}: the name of one of the three types was expected"
        elif kind != _TYPES[want]:
            problem = f"{name}: another type follows from the rules"
        why[about] = why[about] or problem
        if want is None:
            continue
        if not is_list(answer, 2):
            scaler = scaler or problem
        elif type(scaled) is not bool or scaled != (kind == "float16"):
            scaler = scaler or f"{name}: a scaler goes with one of the types, and with no other"
    return [
        *(Finding(text, 1, why[about]) for about, text in _PICK_TEXTS.items()),
        Finding("a gradient scaler is asked for exactly where it is needed", 1, scaler),
    ]


PICK = Task(
    id="17-pick-precision",
    title="pick a precision from a device record",
    points=6,
    functions=("pick_precision",),
    inputs=_pick_inputs,
    run=_pick_run,
    expected=_pick_expected,
    judge=_pick_judge,
    hints=(
        "Strike out first, then choose: which types may not be used on this device at all? "
        "`bf16_supported` says less than it seems to.",
        "Keep the types that were measured, fit under the limit, and are not emulated. None "
        "left: raise. Otherwise take the fastest speed, divide it by 1.1, and go through the "
        "types in the order of care: the first that is at least that fast.",
        "With `speed = device['samples_per_s']`, go through float32, bfloat16, float16 and put "
        "t in `left` if `speed[t] is not None and device['peak_mib'][t] <= device['limit_mib'] "
        "and (t != 'bfloat16' or device['bf16_native'])`. Then `enough = max(speed[t] for t in "
        "left) / 1.1`; for the first t of `left` with `speed[t] >= enough` return "
        "`(t, t == 'float16')`.",
    ),
    wrong=(
        Wrong(
            "believes bf16_supported",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] <= device["limit_mib"]
            and (t != "bfloat16" or device["bf16_supported"])]
    if not left:
        raise ValueError("not enough memory")
    enough = max(speed[t] for t in left) / 1.1
    best = next(t for t in left if speed[t] >= enough)
    return best, best == "float16"
""",
            4,
        ),
        Wrong(
            "always bfloat16 where it is native, else float16 on a GPU",
            """
def pick_precision(device):
    if device["bf16_native"]:
        return "bfloat16", False
    return ("float32", False) if device["capability"] is None else ("float16", True)
""",
            1,
        ),
        Wrong(
            "the fastest, by however little",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] <= device["limit_mib"]
            and (t != "bfloat16" or device["bf16_native"])]
    if not left:
        raise ValueError("not enough memory")
    best = max(left, key=lambda t: speed[t])
    return best, best == "float16"
""",
            5,
        ),
        Wrong(
            "forgets the memory",
            """
def pick_precision(device):
    speed = device["samples_per_s"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and (t != "bfloat16" or device["bf16_native"])]
    enough = max(speed[t] for t in left) / 1.1
    best = next(t for t in left if speed[t] >= enough)
    return best, best == "float16"
""",
            4,
        ),
        Wrong(
            "a scaler with every 16-bit type",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] <= device["limit_mib"]
            and (t != "bfloat16" or device["bf16_native"])]
    if not left:
        raise ValueError("not enough memory")
    enough = max(speed[t] for t in left) / 1.1
    best = next(t for t in left if speed[t] >= enough)
    return best, best != "float32"
""",
            5,
        ),
        Wrong(
            "a peak equal to the limit is out",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] < device["limit_mib"]
            and (t != "bfloat16" or device["bf16_native"])]
    if not left:
        raise ValueError("not enough memory")
    enough = max(speed[t] for t in left) / 1.1
    best = next(t for t in left if speed[t] >= enough)
    return best, best == "float16"
""",
            5,
        ),
        Wrong(
            "a tenth less than the fastest is enough",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] <= device["limit_mib"]
            and (t != "bfloat16" or device["bf16_native"])]
    if not left:
        raise ValueError("not enough memory")
    enough = 0.9 * max(speed[t] for t in left)
    best = next(t for t in left if speed[t] >= enough)
    return best, best == "float16"
""",
            5,
        ),
        Wrong(
            "returns only the name",
            """
def pick_precision(device):
    speed, peak = device["samples_per_s"], device["peak_mib"]
    left = [t for t in ("float32", "bfloat16", "float16")
            if speed[t] is not None and peak[t] <= device["limit_mib"]
            and (t != "bfloat16" or device["bf16_native"])]
    if not left:
        raise ValueError("not enough memory")
    enough = max(speed[t] for t in left) / 1.1
    best = next(t for t in left if speed[t] >= enough)
    return best
""",
            1,
        ),
        Wrong(
            "returns nothing",
            """
def pick_precision(device):
    print(device["name"])
""",
            0,
        ),
    ),
)

TASKS = (LOSS_SCALING, SEGMENTS, PICK)
