"""Tasks of lesson 16: the largest batch in few trials, accumulation, a step that survives."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

from ..task import Finding, Part, Task, Wrong, close, count, describe, is_list, is_number, item

OUT_OF_MEMORY = "OutOfMemoryError"
MOST_TRIALS = 6


def _apart(inputs: list, blocks: str) -> dict[str, Part]:
    """Each case in a process of its own, with as many blocks of memory as its entry `blocks` says.

    In a notebook memory is made up, and a program can talk it out of its limit; a grader's kernel
    keeps it.
    """
    real = {"block": Part.BLOCK}
    return {case["name"]: Part.of_blocks([case | real], case[blocks]) for case in inputs}


def _named(cases: list[dict]) -> list[dict]:
    """Cases that can be asked for one by one."""
    return [
        case | {"name": f"{case['about']} {number}", "block": 0}  # MiB of real memory
        for number, case in enumerate(cases)
    ]


# --- 16-search --------------------------------------------------------------------------

# The hidden device: parameters, gradients and optimizer state take `static` MiB, forward and
# backward `slope` MiB more for each sample and `bend` MiB more for each one beyond `kink`;
# the optimizer's step has a peak of its own, `step`. All in MiB. Each device with a kink has a
# twin, alike up to the earlier of their two kinks: as long as both give the same answers, a
# search asks both the same. A list of trials made up from the largest size does not.


def _search_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def device(about: str, straight: int, kink: float = 0, high: bool = False) -> dict:
        """`straight`: the samples that would fit if there were no kink; `kink`: which share of
        them costs no more than the first. `high`: the step's peak hides how forward and
        backward grow.

        The steepest kink comes so early that the line through 1 and 2 needs more than three
        cuts of 10 % until what it promises fits: 0.9 ** 3 is 0.729, and less than 0.72 fits.
        """
        static, slope = rng.randint(50, 400), rng.randint(200, 4000) / 1000
        bend = round(slope * rng.uniform(0.47 if kink < 0.1 else 0.3, 0.5), 3)
        limit = static + slope * (straight + rng.uniform(0.2, 0.8))
        step = round(static * rng.uniform(0.5, 1.0), 2)
        if high:
            step = round(limit * rng.uniform(0.8, 0.95), 2)
        elif about == "none":  # forward and backward would fit, the optimizer's step does not
            step = round(limit * 1.2, 2)
        return {
            **{"about": about, "static": static, "slope": slope, "bend": bend, "step": step},
            **{"kink": round(kink * straight) if kink else 10**6, "limit": round(limit, 2)},
        }

    def twins(straight: int, early: tuple, late: tuple, high: bool = False) -> list[dict]:
        one = device("kink", straight, rng.uniform(*early), high)
        return [one, {**one, "kink": round(rng.uniform(*late) * straight)}]

    return [
        device("straight", rng.randint(300, 900)),
        device("straight", rng.randint(2000, 5000)),
        device("straight", rng.randint(5, 12)),
        device("straight", 1),
        device("step", rng.randint(300, 500), high=True),
        *twins(rng.randint(450, 560), (0.1, 0.2), (0.3, 0.4)),
        *twins(rng.randint(1000, 4000), (0.05, 0.06), (0.07, 0.08)),
        *twins(rng.randint(1000, 4000), (0.1, 0.2), (0.3, 0.4), high=True),
        device("none", rng.randint(300, 900)),
    ]


def _search_run(student, inputs: list) -> list:
    """Answer the student's trials; write down which were asked for.

    The judge works out by itself which of them ran, and what the answers were.
    """
    import torch

    answers = []
    for case in inputs:
        log = []

        def trial(batch, case=case, log=log):
            if type(batch) is not int or batch < 1:
                raise ValueError(f"trial(batch) takes a whole number from 1 on, not {batch!r}")
            if len(log) >= 100:
                raise RuntimeError("more than 100 trials in one search")
            log.append(batch)
            compute = case["static"] + case["slope"] * batch
            compute += case["bend"] * max(0, batch - case["kink"])
            if max(compute, case["step"]) > case["limit"]:
                raise torch.OutOfMemoryError(
                    f"out of memory: a batch of {batch} does not fit into {case['limit']} MiB"
                )
            return compute, case["step"]

        answer = {"size": None, "raised": "", "trials": log}
        try:
            answer["size"] = student.largest_batch(trial, case["limit"])
        except (torch.OutOfMemoryError, ZeroDivisionError) as error:
            answer["raised"] = type(error).__name__
        answers.append(answer)
    return answers


def _search_expected(inputs: list) -> list:
    """The largest batch that fits, solved for in fractions; 0 where not even one does."""
    answers = []
    for case in inputs:
        static, slope, bend, step, limit = (
            Fraction(str(case[key])) for key in ("static", "slope", "bend", "step", "limit")
        )
        largest = int((limit - static) / slope)
        if largest > case["kink"]:
            largest = int((limit - static + bend * case["kink"]) / (slope + bend))
        answers.append(largest if step <= limit else 0)
    return answers


_SEARCH_TEXTS = {
    "ran": "a size is returned only when its own trial has run",
    "straight": "a straight line: at least 98 % of the largest size, in at most 6 trials",
    "step": "a high peak of the optimizer's step: the same",
    "kink": "a line with a kink: at least 90 % of the largest size, in at most 6 trials",
    "none": "when not even a batch of 1 fits, the error of trial(1) comes through",
}


def _trials(answer: Any) -> list[int] | None:
    """The sizes that were tried, or None when that is no list of sizes."""
    trials = item(answer, "trials")
    sizes = is_list(trials) and all(type(b) is int and is_number(b) and b > 0 for b in trials)
    return trials if sizes and trials else None


def _on(case: dict) -> str:
    """The device, in words: something to try the function on."""
    kink, more = case["kink"], round(case["slope"] + case["bend"], 3)
    bends = f" ({more} from sample {kink + 1} on)" if kink < 10**6 else ""
    return (
        f" (on: {case['static']} MiB + {case['slope']} MiB a sample{bends}, step {case['step']} "
        f"MiB, limit {case['limit']} MiB)"
    )


def _search_why(case: dict, largest: int, answer: Any) -> tuple[str, str]:
    """Why the size was not one that ran; why it was not large enough or took too many trials."""
    size, trials = item(answer, "size"), _trials(answer)
    if item(answer, "raised") == OUT_OF_MEMORY:
        return ("the error came through, though a batch of 1 fits",) * 2
    if item(answer, "raised") == "ZeroDivisionError":
        return "", "division by zero: two trials had the same peak. Which peak grows?"
    if trials is None or item(answer, "raised") != "":
        return ("nothing was tried",) * 2
    if type(size) is not int:
        found = f"the float {size}" if type(size) is float else describe(size)
        return (f"a whole number was expected, not {found}",) * 2
    if size not in trials:
        return ("the size that you return was never tried",) * 2
    if size > largest:
        return ("the size that you return was tried, and did not fit",) * 2
    if len(trials) > MOST_TRIALS:
        return "", f"it took {count(len(trials), 'trial')}"
    enough = 0.90 if case["about"] == "kink" else 0.98
    if size < enough * largest:
        return "", f"after {count(len(trials), 'trial')} the size is still too small"
    return "", ""


def _answers(case: dict, trials: list[int]) -> list[tuple]:
    """Each trial with the device's answer to it; two devices answer alike below their kinks."""
    peaks = [case["static"] + case["slope"] * batch for batch in trials]
    more = [case["bend"] * max(0, batch - case["kink"]) for batch in trials]
    runs = case["step"] <= case["limit"]
    return [
        (batch, peak + extra if runs and peak + extra <= case["limit"] else None)
        for batch, peak, extra in zip(trials, peaks, more, strict=True)
    ]


def _guessed(inputs: list, got: Any) -> bool:
    """Whether two searches went apart before the answers of their two devices did."""
    searches: dict[tuple, list] = {}
    for number, case in enumerate(inputs):
        if trials := _trials(item(got, number)):
            same = tuple(case[key] for key in ("static", "slope", "bend", "step", "limit"))
            searches.setdefault(same, []).append([*_answers(case, trials), (0, None)])
    for first, *others in searches.values():
        for other in others:
            apart = [(a, b) for a, b in zip(first, other, strict=False) if a != b]
            if apart and apart[0][0][0] != apart[0][1][0]:  # other sizes, not other answers
                return True
    return False


def _search_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_SEARCH_TEXTS, "")
    crashed = returned = False
    for number, (case, largest) in enumerate(zip(inputs, expected, strict=True)):
        answer, about = item(got, number), case["about"]
        if about == "none":
            trials = _trials(answer)
            if item(answer, "raised") != OUT_OF_MEMORY or item(answer, "size") is not None:
                why[about] = "your function did not raise it"
            elif trials is None or trials[-1] != 1:
                why[about] = "the last trial was another one"
            if why[about]:
                why[about] += _on(case)
            continue
        texts = _search_why(case, largest, answer)
        ran, enough = (text and text + _on(case) for text in texts)
        if item(answer, "raised") == "ZeroDivisionError" and enough:
            # A crash is told once, with its device; it says nothing of the sizes returned.
            enough, crashed = "the same division by zero" if crashed else enough, True
        else:
            returned = True
        why["ran"] = why["ran"] or ran
        why[about] = why[about] or enough
    if not returned:
        why["ran"] = "nothing was returned"
    if _guessed(inputs, got):
        told = "two devices gave the same answers, and what came next was not the same"
        why = {about: text or (told if about != "none" else "") for about, text in why.items()}
    return [Finding(text, 1, why[about]) for about, text in _SEARCH_TEXTS.items()]


SEARCH = Task(
    id="16-search",
    title="the largest batch in at most 6 trials",
    points=5,
    functions=("largest_batch",),
    inputs=_search_inputs,
    run=_search_run,
    expected=_search_expected,
    judge=_search_judge,
    hints=(
        "Only one of the two peaks grows with the batch here. Two points of it give a line; where "
        "does that line meet the limit? And what does a kink between your two points and the "
        "limit do to the answer?",
        "Try 1 and 2, then half of what their line promises: that point lies where the kink "
        "may already have shown. From then on use the line through the two largest sizes that "
        "ran. After a failure stay below it: go no further than halfway from the largest that "
        "ran to the smallest that failed. Stop after 6 trials and return the largest that ran.",
        "Keep `ran = {1: trial(1)[0]}` (outside any try) and `failed = None`. In a loop of 5: "
        "`try: ran[size] = trial(size)[0]`, `except torch.OutOfMemoryError: failed = size` (and "
        "return 1 where 2 does not fit); then `a, b = sorted(ran)[-2:]`, "
        "`size = b + (limit - ran[b]) * (b - a) / (ran[b] - ran[a])`, "
        "halve it the first time, and with a failure take at most `(b + failed) / 2`. Leave when "
        "`int(size) <= b`.",
    ),
    wrong=(
        Wrong(
            "halving from a large size",
            """
import torch
def largest_batch(trial, limit):
    size = 8192
    while True:
        try:
            trial(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise
        size //= 2
""",
            2,
        ),
        Wrong(
            "doubling, then bisection",
            """
import torch
def largest_batch(trial, limit):
    trial(1)
    low, high = 1, None
    while high is None or high - low > 1:
        size = 2 * low if high is None else (low + high) // 2
        try:
            trial(size)
            low = size
        except torch.OutOfMemoryError:
            high = size
    return low
""",
            2,
        ),
        Wrong(
            "believes the line and never tries its answer",
            """
def largest_batch(trial, limit):
    one, two = trial(1)[0], trial(2)[0]
    return int(1 + (limit - one) / (two - one))
""",
            1,
        ),
        Wrong(
            "draws the line through the larger of the two peaks",
            """
import torch
def largest_batch(trial, limit):
    ran, failed, size = {1: max(trial(1))}, None, 2
    for number in range(5):
        try:
            ran[size] = max(trial(size))
        except torch.OutOfMemoryError:
            failed = size
            if size == 2:
                return 1
        a, b = sorted(ran)[-2:]
        guess = b + (limit - ran[b]) * (b - a) / (ran[b] - ran[a])
        if number == 0:
            guess = b + (guess - b) / 2
        if failed is not None:
            guess = min(guess, (b + failed) / 2)
        size = int(guess)
        if size <= b:
            break
    return max(ran)
""",
            3,
        ),
        Wrong(
            "halves what the line promised until it fits",
            """
import torch
def largest_batch(trial, limit):
    one = trial(1)[0]
    try:
        two = trial(2)[0]
    except torch.OutOfMemoryError:
        return 1
    size = int(1 + (limit - one) / (two - one) + 1e-9)
    while True:
        try:
            trial(size)
            return size
        except torch.OutOfMemoryError:
            size //= 2
""",
            4,
        ),
        Wrong(
            "cuts what the line promised by a tenth until it fits",
            """
import torch
def largest_batch(trial, limit):
    one = trial(1)[0]
    try:
        two = trial(2)[0]
    except torch.OutOfMemoryError:
        return 1
    size = int(1 + (limit - one) / (two - one) + 1e-9)
    while size > 2:
        try:
            trial(size)
            return size
        except torch.OutOfMemoryError:
            size = int(0.9 * size)
    return 2
""",
            4,
        ),
        Wrong(
            "the same, with the line through the larger of the two peaks",
            """
import torch
def largest_batch(trial, limit):
    one = max(trial(1))
    try:
        two = max(trial(2))
    except torch.OutOfMemoryError:
        return 1
    size = int(1 + (limit - one) / (two - one) + 1e-9)
    while size > 2:
        try:
            trial(size)
            return size
        except torch.OutOfMemoryError:
            size = int(0.9 * size)
    return 2
""",
            3,
        ),
        Wrong(
            "answers 0 where it should raise",
            """
import torch
def largest_batch(trial, limit):
    try:
        ran = {1: trial(1)[0]}
    except torch.OutOfMemoryError:
        return 0
    failed, size = None, 2
    for number in range(5):
        try:
            ran[size] = trial(size)[0]
        except torch.OutOfMemoryError:
            failed = size
            if size == 2:
                return 1
        a, b = sorted(ran)[-2:]
        guess = b + (limit - ran[b]) * (b - a) / (ran[b] - ran[a])
        if number == 0:
            guess = b + (guess - b) / 2
        if failed is not None:
            guess = min(guess, (b + failed) / 2)
        size = int(guess)
        if size <= b:
            break
    return max(ran)
""",
            4,
        ),
    ),
)

# --- 16-accumulate ----------------------------------------------------------------------

IGNORED = -100  # PyTorch's mark for a token that no loss counts
FEATURES, CLASSES, TOKENS = 2, 3, 4


def _accumulate_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about: str, micro: int, lengths: list[int]) -> dict:
        """`lengths`: for each sample how many of its tokens count."""
        numbers = [
            [[round(rng.gauss(0, 2), 4) for _ in range(FEATURES)] for _ in range(TOKENS)]
            for _ in lengths
        ]
        targets = [
            [rng.randrange(CLASSES) if t < length else IGNORED for t in range(TOKENS)]
            for length in lengths
        ]
        weights = [[round(rng.gauss(0, 1), 4) for _ in range(FEATURES)] for _ in range(CLASSES)]
        # How much a token of each class counts: only with loss_fn is the gradient right.
        prices = [round(rng.uniform(low, low + 0.5), 4) for low in rng.sample([0.5, 1.5, 2.5], 3)]
        return {
            **{"about": about, "micro": micro, "x": numbers, "y": targets},
            **{"weights": weights, "prices": prices},
        }

    full = TOKENS
    cases = [
        case("even", 4, [full] * 12),
        case("ragged", 4, [full] * 9),
        case("ragged", 3, [full] * 8),
        case("tokens", 2, [full, full, full, 1, 1, 1, 1, 2]),
        case("nothing", 2, [full, 3, 0, 0, 1, full]),
    ]
    return _named(cases)


def _accumulate_run(student, inputs: list) -> dict:
    """Real gradients in float64, of a loss that takes no more than `micro` samples.

    How many samples each call had is written down for the messages, and how many tensors the
    graphs of the calls before it still keep for backward.
    """
    import weakref

    import numpy as np
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    class TooMany(Exception):
        pass

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    answers = {}
    for case in inputs:
        model = torch.nn.Linear(2, 3, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(torch.tensor(case["weights"], dtype=torch.float64))
        batch = torch.tensor(case["x"], dtype=torch.float64), torch.tensor(case["y"])
        sizes, kept, alive = [], [], weakref.WeakSet()

        def save(tensor, alive=alive):
            saved = Saved(tensor)
            alive.add(saved)
            return saved

        def loss_fn(model, part, case=case, sizes=sizes, kept=kept, alive=alive, save=save):
            x, y = part
            if len(sizes) >= 1000:
                raise RuntimeError("loss_fn was called more than 1000 times for one batch")
            sizes.append(len(x))
            kept.append(len(alive))
            if len(x) > case["micro"]:
                raise TooMany(f"{len(x)} samples at once, where micro is {case['micro']}")
            _activations = np.zeros(len(x) * case["block"] * 2**17)  # held until it returns
            prices = torch.tensor(case["prices"], dtype=torch.float64)
            with saved_tensors_hooks(save, lambda saved: saved.tensor):
                scores = model(x).flatten(0, 1)
                total = torch.nn.functional.cross_entropy(
                    scores, y.flatten(), prices, ignore_index=-100, reduction="sum"
                )
                return total / (y != -100).sum()

        def counted(part):
            return int((part[1] != -100).sum())

        answer = {"loss": None, "gradient": None, "sizes": sizes, "kept": kept}
        try:
            answer["loss"] = student.accumulate(model, loss_fn, batch, case["micro"], counted)
            if model.weight.grad is not None:
                answer["gradient"] = model.weight.grad.tolist()
        except (TooMany, MemoryError):
            pass  # without loss and gradient nothing holds
        answers[case["name"]] = answer
    return answers


def _accumulate_expected(inputs: list) -> list:
    """Softmax and weighted cross-entropy over all counted tokens at once, by hand."""
    import math

    answers = []
    for case in inputs:
        tokens = [
            (x, y)
            for xs, ys in zip(case["x"], case["y"], strict=True)
            for x, y in zip(xs, ys, strict=True)
            if y != IGNORED
        ]
        loss, gradient = 0.0, [[0.0] * FEATURES for _ in range(CLASSES)]
        for x, y in tokens:
            scores = [sum(w * v for w, v in zip(row, x, strict=True)) for row in case["weights"]]
            total = sum(math.exp(score) for score in scores)
            price = case["prices"][y]
            loss += price * (math.log(total) - scores[y]) / len(tokens)
            for k, score in enumerate(scores):
                off = price * (math.exp(score) / total - (k == y))
                for j in range(FEATURES):
                    gradient[k][j] += off * x[j] / len(tokens)
        answers.append({"loss": loss, "gradient": gradient})
    return answers


_ACCUMULATE_TEXTS = {
    "even": "equal micro-batches: the gradient is that of the whole batch",
    "ragged": "a smaller last micro-batch: the same",
    "tokens": "micro-batches in which different numbers of tokens count: the same",
    "nothing": "a micro-batch in which nothing counts: the same",
    "loss": "the loss that is returned is the mean over the whole batch, a float",
    "kept": "each graph is gone before the next forward",
}


def _sizes_why(case: dict, answer: Any) -> str:
    sizes = item(answer, "sizes")
    if not is_list(sizes) or not all(type(n) is int and 0 < n < 10**6 for n in sizes):
        return "loss_fn got something that holds no samples"
    if any(n > case["micro"] for n in sizes):
        return "loss_fn got more than `micro` samples at once"
    return ""


def _missing_why(case: dict, answer: Any) -> str:
    """Why the parts do not make up the batch.

    Those without anything to count may be left out; the gradient shows who took one twice.
    """
    sizes, micro = item(answer, "sizes"), case["micro"]
    parts = [case["y"][i : i + micro] for i in range(0, len(case["y"]), micro)]
    counted = [len(part) for part in parts if any(y != IGNORED for ys in part for y in ys)]
    if len(sizes) and sum(counted) <= sum(sizes):
        return ""
    return "loss_fn did not get each sample"


def _matrix_why(got: Any, want: list) -> str:
    """Why a gradient is not the one that it should be; empty when it is."""
    rows = got if is_list(got, len(want)) and all(is_list(r, len(want[0])) for r in got) else None
    if rows is None:
        return "there is no gradient" if got is None else "the gradient has another shape"
    if not all(is_number(value) for row in rows for value in row):
        return "the gradient holds NaN or infinity"
    pairs = list(zip(sum(rows, []), sum(want, []), strict=True))
    if all(close(g, w, 1e-8) for g, w in pairs):
        return ""
    ratio = pairs[0][0] / pairs[0][1]
    if all(close(g, ratio * w, 1e-6) for g, w in pairs):
        return "the gradient points the right way, but is too " + ("long" if ratio > 1 else "short")
    return "the gradient is another one"


def _accumulate_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_ACCUMULATE_TEXTS, "")
    for case, want in zip(inputs, expected, strict=True):
        answer, about = item(got, case["name"]), case["about"]
        too_large, gradient = _sizes_why(case, answer), item(answer, "gradient")
        missing = too_large or _missing_why(case, answer)
        wrong = missing or _matrix_why(gradient, want["gradient"])
        if about == "nothing" and "NaN" in wrong:
            wrong += ": is a part of padding alone left out?"
        why[about] = why[about] or wrong
        loss, kept, sizes = (item(answer, key) for key in ("loss", "kept", "sizes"))
        if not close(loss, want["loss"], 1e-8):
            problem = f"it is {describe(loss)}" if not is_number(loss) else "it is another number"
            why["loss"] = why["loss"] or too_large or problem
        why["loss"] = why["loss"] or too_large
        if too_large or not is_list(sizes) or not is_list(kept, len(sizes)) or len(sizes) < 2:
            why["kept"] = why["kept"] or too_large or "the batch was not split"
        elif any(type(n) is not int or n != 0 for n in kept):
            why["kept"] = "tensors that an earlier graph keeps for backward are still there"
    return [Finding(text, 1, why[about]) for about, text in _ACCUMULATE_TEXTS.items()]


ACCUMULATE = Task(
    id="16-accumulate",
    title="small batches with the gradient of a big one",
    points=6,
    functions=("accumulate",),
    inputs=_accumulate_inputs,
    run=_accumulate_run,
    expected=_accumulate_expected,
    judge=_accumulate_judge,
    parts=lambda inputs: _apart(inputs, "micro"),  # the forward of so many samples, no more
    self_reported=1,  # "kept": live tensors, counted in the student's process
    hints=(
        "The mean over the batch is a sum over all counted tokens, divided by their number. "
        "Each micro-batch gives you its own mean. What do you have to multiply that mean by, so "
        "that the results add up to the mean of the whole?",
        "The weight of a micro-batch is `count(part) / count(batch)`: tokens, not samples, and "
        "not 1 over the number of parts. Scale the loss before `backward()`, and call it for "
        "each part, so that its graph is freed. A part that counts 0 tokens has the mean "
        "0 / 0: leave it out.",
        "For `start in range(0, len(x), micro)`: cut `part` out of both tensors; if "
        "`count(part)` is 0, continue; `loss = loss_fn(model, part) * count(part) / total`; "
        "`loss.backward()`; add `loss.item()` to the mean.",
    ),
    wrong=(
        Wrong(
            "the mean of the means",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    starts, mean = range(0, len(x), micro), 0.0
    for start in starts:
        loss = loss_fn(model, (x[start:start + micro], y[start:start + micro])) / len(starts)
        loss.backward()
        mean += loss.item()
    return mean
""",
            2,
        ),
        Wrong(
            "adds the gradients up and divides by nothing",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    starts, mean = range(0, len(x), micro), 0.0
    for start in starts:
        loss = loss_fn(model, (x[start:start + micro], y[start:start + micro]))
        loss.backward()
        mean += loss.item() / len(starts)
    return mean
""",
            1,
        ),
        Wrong(
            "weighs by samples, not by what counts",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    mean = 0.0
    for start in range(0, len(x), micro):
        part = x[start:start + micro], y[start:start + micro]
        loss = loss_fn(model, part) * len(part[0]) / len(x)
        loss.backward()
        mean += loss.item()
    return mean
""",
            3,
        ),
        Wrong(
            "0 times NaN: the loss of a part where nothing counts",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    mean = 0.0
    for start in range(0, len(x), micro):
        part = x[start:start + micro], y[start:start + micro]
        loss = loss_fn(model, part) * count(part) / count(batch)
        loss.backward()
        mean += loss.item()
    return mean
""",
            5,
        ),
        Wrong(
            "leaves the smaller last part out",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    mean = 0.0
    for start in range(0, len(x) - micro + 1, micro):
        part = x[start:start + micro], y[start:start + micro]
        if count(part):
            loss = loss_fn(model, part) * count(part) / count(batch)
            loss.backward()
            mean += loss.item()
    return mean
""",
            4,
        ),
        Wrong(
            "one backward at the end: all graphs at once",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    parts = [(x[i:i + micro], y[i:i + micro]) for i in range(0, len(x), micro)]
    losses = [loss_fn(model, p) * count(p) / count(batch) for p in parts if count(p)]
    loss = sum(losses)
    loss.backward()
    return loss.item()
""",
            5,
        ),
        Wrong(
            "returns a tensor",
            """
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    mean = 0
    for start in range(0, len(x), micro):
        part = x[start:start + micro], y[start:start + micro]
        if count(part):
            loss = loss_fn(model, part) * count(part) / count(batch)
            loss.backward()
            mean = mean + loss
    return mean
""",
            5,
        ),
        Wrong(
            "the whole batch at once",
            """
def accumulate(model, loss_fn, batch, micro, count):
    loss = loss_fn(model, batch)
    loss.backward()
    return loss.item()
""",
            0,
        ),
    ),
)

# --- 16-safe-step -----------------------------------------------------------------------

LR = 0.01


def _step_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about: str, micro: int, lengths: list[int], memory: int, fails: str = "") -> dict:
        """`lengths`: the memory that each sample needs; `fails`: where it runs out."""
        return {
            "about": about,
            "micro": micro,
            "lengths": lengths,
            "memory": memory,
            "fails": fails or "forward",
            "x": [[round(rng.gauss(0, 1), 4) for _ in "ab"] for _ in lengths],
            "y": [round(rng.gauss(0, 1), 4) for _ in lengths],
            "first": [[round(rng.gauss(0, 1), 4) for _ in "ab"] for _ in "ab"],
            "second": [[round(rng.gauss(0, 1), 4) for _ in "ab"]],
        }

    long = rng.randint(4, 5)
    cases = [
        case("fits", 8, [1] * 8, memory=8),
        case("halves", 7, [1] * 10, memory=5),  # 3 is the half of 7, rounded down
        case("halves", 16, [1] * 13, memory=4),
        case("halves", 4, [1, 1, 1, 1, long, long, 1, 1, 1, 1], memory=2 * long),
        case("halves", 8, [1] * 8 + [long] * 8, memory=4 * long, fails="backward"),
        case("never", 4, [1, 1, 1, 1, 1, 99, 1], memory=10),
        case("foreign", 4, [1] * 8, memory=10, fails="foreign"),
    ]
    return _named(cases)


def _step_run(student, inputs: list) -> dict:
    """A real model and optimizer; the memory is made up, but a failed try really holds it.

    What a call needs is a local variable of it, so it is free when the call is over. When the
    call fails, the exception's traceback keeps the variable alive: as long as somebody keeps
    the exception, as it is with tensors.
    """
    import weakref

    import numpy as np
    import torch

    class Unit:
        def __init__(self, block):
            self.memory = np.zeros(block * 2**17)

    answers = {}
    for case in inputs:
        first = torch.nn.Linear(2, 2, bias=False)
        second = torch.nn.Linear(2, 1, bias=False)
        model = torch.nn.Sequential(first, second).double()
        with torch.no_grad():
            for layer, values in ((first, case["first"]), (second, case["second"])):
                layer.weight.copy_(torch.tensor(values, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)  # left over from somebody's last step
        lengths = torch.tensor(case["lengths"])[:, None].double()
        x = torch.cat([torch.tensor(case["x"], dtype=torch.float64), lengths], dim=1)
        batch = x, torch.tensor(case["y"], dtype=torch.float64)
        units, calls = weakref.WeakSet(), []

        def take(need, case=case, units=units):
            taken = []
            for _ in range(need):
                try:
                    if len(units) >= case["memory"]:
                        raise MemoryError
                    taken.append(Unit(case["block"]))
                except MemoryError:
                    raise torch.OutOfMemoryError(
                        f"out of memory: {need} units were asked for; {len(units)} of "
                        f"{case['memory']} were in use when it failed"
                    ) from None
                units.add(taken[-1])
            return taken

        def loss_fn(model, part, case=case, calls=calls, take=take):
            x, y = part
            calls.append(len(x))
            if len(calls) > 1000:
                raise RuntimeError("loss_fn was called more than 1000 times for one step")
            need = int(x[:, 2].sum())
            if case["fails"] == "foreign":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            taken = take(need if case["fails"] == "forward" else 0)
            hidden = model[0](x[:, :2])
            if case["fails"] == "backward":

                def backward(gradient, need=need):
                    return None if take(need) else None

                hidden.register_hook(backward)
            loss = (model[1](hidden)[:, 0] - y).square().mean()
            del taken
            return loss

        answer = {"micro": None, "raised": ""}
        try:
            answer["micro"] = student.safe_step(model, optimizer, loss_fn, batch, case["micro"])
        except NotImplementedError:
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "was called more than" in str(error):
                raise
            answer["raised"] = type(error).__name__
        answer["weights"] = [layer.weight.tolist() for layer in (first, second)]
        if case["fails"] == "foreign":
            answer["calls"] = calls
        answers[case["name"]] = answer
    return answers


def _step_expected(inputs: list) -> list:
    """One step with the whole batch, in plain numbers; and the first half that fits."""
    answers = []
    for case in inputs:
        (a, b), (c, d) = case["first"]
        ((u, v),) = case["second"]
        grads = [0.0] * 6
        for (p, q), y in zip(case["x"], case["y"], strict=True):
            h, k = a * p + b * q, c * p + d * q
            off = 2 * (u * h + v * k - y) / len(case["y"])
            parts = (off * u * p, off * u * q, off * v * p, off * v * q, off * h, off * k)
            grads = [g + part for g, part in zip(grads, parts, strict=True)]
        if case["about"] in ("never", "foreign"):
            grads = [0.0] * 6
        a, b, c, d, u, v = (w - LR * g for w, g in zip((a, b, c, d, u, v), grads, strict=True))
        micro = case["micro"]
        needs = case["lengths"]
        while micro and any(
            sum(needs[i : i + micro]) > case["memory"] for i in range(0, len(needs), micro)
        ):
            micro //= 2
        answers.append({"micro": micro, "weights": [[[a, b], [c, d]], [[u, v]]]})
    return answers


_STEP_TEXTS = {
    "fits": ("a batch that fits: one ordinary step", 1),
    "samples": ("after running out of memory: the step of the whole batch, each sample once", 2),
    "micro": ("the micro-batch that is returned is the first of the halves that fits", 1),
    "never": ("when a micro-batch of 1 does not fit, the error comes through, nothing changed", 1),
    "foreign": ("any other error comes through at once, nothing changed", 1),
}


def _weights_right(got: Any, want: list) -> bool:
    return is_list(got, len(want)) and all(
        _matrix_why(layer, goal) == "" for layer, goal in zip(got, want, strict=True)
    )


def _step_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_STEP_TEXTS, "")
    for case, want in zip(inputs, expected, strict=True):
        answer, about = item(got, case["name"]), case["about"]
        right = _weights_right(item(answer, "weights"), want["weights"])
        raised, micro = item(answer, "raised"), item(answer, "micro")
        if about in ("never", "foreign"):
            name = OUT_OF_MEMORY if about == "never" else "RuntimeError"
            if raised != name or micro is not None:
                why[about] = f"your function did not raise {name}"
            elif not right:
                why[about] = "the weights were changed"
            elif about == "foreign" and item(answer, "calls") != [case["micro"]]:
                why[about] = "the batch was tried again after it"
            continue
        size = ""
        if raised != "":
            ended = OUT_OF_MEMORY if raised == OUT_OF_MEMORY else "an error"
            size = f"your function raised {ended}, though there is a size that fits"
            if raised == OUT_OF_MEMORY:
                size += ": is the memory of the failed try free when you try again?"
        elif type(micro) is not int:
            size = f"a whole number was expected, not {describe(micro)}"
        elif micro != want["micro"]:
            size = "it is smaller" if micro < want["micro"] else "it is larger"
            if case["memory"] and micro < want["micro"]:
                size += ": is the memory of the failed try free when you try again?"
        samples = "" if right else "the weights are not those after one step with the whole batch"
        samples = size if raised != "" else samples
        if about == "fits":
            why["fits"] = why["fits"] or samples or size
        else:
            why["samples"] = why["samples"] or samples
            why["micro"] = why["micro"] or size
    return [Finding(text, points, why[about]) for about, (text, points) in _STEP_TEXTS.items()]


_CLEAR = "        optimizer.zero_grad()\n"
_HALVES = """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    while True:
        failed = False
        optimizer.zero_grad()
        try:
            for i in range(0, len(x), micro):
                part = x[i:i + micro], y[i:i + micro]
                (loss_fn(model, part) * len(part[0]) / len(x)).backward()
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
            failed = True
        if not failed:
            optimizer.step()
            return micro
        micro //= 2
"""
SAFE_STEP = Task(
    id="16-safe-step",
    title="a step that survives running out of memory",
    points=6,
    functions=("safe_step",),
    inputs=_step_inputs,
    run=_step_run,
    expected=_step_expected,
    judge=_step_judge,
    parts=lambda inputs: _apart(inputs, "memory"),
    self_reported=1,  # "foreign": how often loss_fn was called
    hints=(
        "Three things must be as new when you try again: the gradients (the failed try may have "
        "left some), the batch (from its first sample), and the memory. What still holds the "
        "memory of a failed try while you are inside `except`?",
        "In `except` do nothing but note that it failed; the exception is gone when the block "
        "ends. After it, halve and go round the loop again: zero the gradients, go through the "
        "whole batch with the smaller micro-batch, each part weighted by its share of the "
        "samples. Step only after the last part. A micro-batch of 1 that fails is raised again.",
        "`while True:` `failed = False`, `optimizer.zero_grad()`, `try:` for each part "
        "`(loss_fn(model, part) * len(part[0]) / len(x)).backward()`, "
        "`except torch.OutOfMemoryError:` raise if micro is 1, else `failed = True`. After the "
        "`except` block: if not failed, step and return micro; `micro //= 2`.",
    ),
    wrong=(
        Wrong(
            "retries inside except, sample by sample",
            """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    def attempt(micro):
        optimizer.zero_grad()
        for i in range(0, len(x), micro):
            part = x[i:i + micro], y[i:i + micro]
            (loss_fn(model, part) * len(part[0]) / len(x)).backward()
    try:
        attempt(micro)
    except torch.OutOfMemoryError:
        micro = 1
        attempt(micro)
    optimizer.step()
    return micro
""",
            3,
        ),
        Wrong(
            "rounds the half up",
            _HALVES.replace("micro //= 2", "micro = (micro + 1) // 2"),
            5,
        ),
        Wrong(
            "keeps the exception",
            """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    problems = []
    while True:
        optimizer.zero_grad()
        problem = None
        try:
            for i in range(0, len(x), micro):
                part = x[i:i + micro], y[i:i + micro]
                (loss_fn(model, part) * len(part[0]) / len(x)).backward()
        except torch.OutOfMemoryError as error:
            problem = error
            problems.append(error)
        if problem is None:
            optimizer.step()
            return micro
        if micro == 1:
            raise problem
        micro //= 2
""",
            3,
        ),
        Wrong(
            "does not clear the gradients of the failed try",
            _HALVES.replace(_CLEAR, "").replace("    while", _CLEAR[4:] + "    while"),
            4,
        ),
        Wrong(
            "goes on where it failed",
            """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    optimizer.zero_grad()
    i = 0
    while i < len(x):
        failed = False
        try:
            part = x[i:i + micro], y[i:i + micro]
            (loss_fn(model, part) * len(part[0]) / len(x)).backward()
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
            failed = True
        if failed:
            micro //= 2
        else:
            i += micro
    optimizer.step()
    return micro
""",
            4,
        ),
        Wrong(
            "skips the batch that does not fit",
            """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    optimizer.zero_grad()
    try:
        for i in range(0, len(x), micro):
            part = x[i:i + micro], y[i:i + micro]
            (loss_fn(model, part) * len(part[0]) / len(x)).backward()
        optimizer.step()
    except torch.OutOfMemoryError:
        pass
    return micro
""",
            2,
        ),
        Wrong(
            "the mean of the means",
            _HALVES.replace("* len(part[0]) / len(x)", "/ -(-len(x) // micro)"),
            4,
        ),
        Wrong(
            "takes every RuntimeError for a lack of memory",
            _HALVES.replace("torch.OutOfMemoryError", "RuntimeError"),
            5,
        ),
        Wrong(
            "steps after every micro-batch",
            """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    while True:
        failed = False
        try:
            for i in range(0, len(x), micro):
                optimizer.zero_grad()
                part = x[i:i + micro], y[i:i + micro]
                (loss_fn(model, part) * len(part[0]) / len(x)).backward()
                optimizer.step()
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
            failed = True
        if not failed:
            return micro
        micro //= 2
""",
            3,
        ),
    ),
)

TASKS = (SEARCH, ACCUMULATE, SAFE_STEP)
