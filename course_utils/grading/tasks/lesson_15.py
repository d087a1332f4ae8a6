"""Tasks of lesson 15: four leaks, the error of memory among others, evaluation without a graph."""

from __future__ import annotations

import random
import re
from typing import Any

from ..task import Finding, Part, Task, Wrong, close, count, describe, is_list, is_number, item

# --- 15-leaks ---------------------------------------------------------------------------

# The programs run on a made-up device with a limit: it knows which of its blocks are alive, and
# is out of memory beyond the limit. A program that leaks never returns, and what is judged is
# the value that it returns. That device lives in the student's own process, where it can be
# talked out of its limit. So a grader gives each program a process of its own with as much
# memory as the device has.


def _leak_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    steps = rng.randint(220, 260)
    values = [round(rng.uniform(0.5, 1.5), 3) for _ in range(steps)]
    return {
        "limit": 8,  # blocks
        "block": 1,  # MiB
        "programs": ["total_loss", "failures", "first_scores", "check_after"],
        "weight": round(rng.uniform(1, 2), 2),
        "values": values,
        "failing": sorted(rng.sample(range(steps), k=steps - rng.randint(8, 12))),
        "check": rng.randint(1000, 9999),
    }


def _leak_parts(inputs: dict) -> dict[str, Part]:
    """One program at a time, on a device whose limit the kernel keeps."""
    return {
        name: Part.of_blocks(inputs | {"block": Part.BLOCK, "programs": [name]}, inputs["limit"])
        for name in inputs["programs"]
    }


def _leak_run(student, inputs: dict) -> dict:
    """Run each program on a device of its own; write down its value, or where it ended."""
    import gc
    import weakref

    import numpy as np
    import torch

    values, limit = inputs["values"], inputs["limit"]
    weight = torch.tensor(inputs["weight"], dtype=torch.float64, requires_grad=True)

    class Device:
        live = calls = 0

        def free(self, blocks):
            self.live -= blocks

        def new(self, value, blocks=1):
            """A tensor of so many blocks; the device hears when nothing refers to it any more."""
            if self.live + blocks > limit:
                raise torch.OutOfMemoryError(
                    f"the task's device is out of memory: {self.live} of {limit} MiB are in "
                    f"use, and {blocks} MiB more were asked for"
                )
            array = np.zeros(blocks * inputs["block"] * 2**17)
            array[:4] = value
            self.live += blocks
            weakref.finalize(array, self.free, blocks)
            return torch.from_numpy(array)

        def loss_of(self, value):
            self.calls += 1
            # The graph keeps the whole block, though only a slice of it is computed with.
            return (weight * self.new(value)[:4]).mean()

        def step(self, number):
            self.calls += 1
            activations = self.new(values[number])
            if number in inputs["failing"]:
                raise ValueError(f"batch {number}: the loss is not finite")
            return float(activations[0])

        def model(self, batch):
            self.calls += 1
            return self.new(inputs["weight"] * float(batch[0]))

        def loader(self):
            return (self.new(value) for value in values)

        def check(self):
            self.new(0.0, blocks=limit)  # needs the whole device
            return inputs["check"] + self.calls  # so the value shows when it was called

    numbers = list(range(len(values)))
    programs = {
        "total_loss": lambda d: student.total_loss(d.loss_of, list(values)),
        "failures": lambda d: student.failures(d.step, numbers),
        "first_scores": lambda d: student.first_scores(d.model, d.loader()),
        "check_after": lambda d: student.check_after(d.model, d.loader(), d.check),
    }
    answers = {}
    for name in inputs["programs"]:
        device, answer = Device(), {}
        try:
            answer["value"] = programs[name](device)
        except NotImplementedError:
            answer["ended"] = "not attempted"
        except (torch.OutOfMemoryError, MemoryError):
            answer["ended"] = "out of memory"
        if device.live:
            gc.collect()  # a cycle is garbage, not a leak
        answers[name] = answer | {"calls": device.calls, "left": device.live}
    if all(answer.get("ended") == "not attempted" for answer in answers.values()):
        raise NotImplementedError
    return answers


def _leak_expected(inputs: dict) -> dict:
    """What the four programs return, by arithmetic alone."""
    weight, values = inputs["weight"], inputs["values"]
    scores = [weight * value for value in values]
    return {
        "total_loss": sum(scores),
        "failures": [f"batch {n}: the loss is not finite" for n in inputs["failing"]],
        "first_scores": scores,
        "check_after": [sum(scores), inputs["check"] + len(values)],
    }


def _same(got: Any, want: Any) -> bool:
    if is_number(want):
        return close(got, want, relative=1e-6)
    if type(want) is str:
        return type(got) is str and got == want
    return is_list(got, len(want)) and all(map(_same, got, want))


def _leak_why(inputs: dict, name: str, got: Any, want: Any) -> str:
    calls, ended = item(got, "calls"), item(got, "ended")
    if ended == "out of memory":
        if name == "check_after" and calls == len(inputs["values"]):
            return (
                "the loop is done, but something of it is still alive when `check` is called: "
                "to what do the names of the loop still refer?"
            )
        if calls == 0:
            return "out of memory before the first batch was used: are they all loaded at once?"
        batch = f"batch {calls} of {len(inputs['values'])}" if type(calls) is int else "some batch"
        return f"out of memory at {batch}: what do the earlier ones keep alive?"
    if ended == "not attempted" or type(got) is not dict:
        return "not attempted yet"
    value = item(got, "value")
    if _same(value, want):
        return ""
    if is_list(want) and is_list(value) and len(value) != len(want):
        amount = "few" if len(value) < len(want) else "many"
        return f"it returned {describe(value)}, which are too {amount}"
    if name == "check_after" and _same(item(value, 0), want[0]):
        return "the sum is right; `check` has to be called after the last batch, and its value kept"
    if describe(value) != describe(want):
        return f"it returned {describe(value)}; see the leaky one for what it must return"
    return "it ran within the limit, but did not return what the leaky one would have returned"


def _leak_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    why = {name: _leak_why(inputs, name, item(got, name), want) for name, want in expected.items()}
    left = ""
    for name in expected:
        if item(item(got, name), "left") != 0 or type(item(item(got, name), "left")) is not int:
            left = left or f"after {name} has returned, something still refers to its memory"
    return [
        *(Finding(f"{name} is right, within the limit", 1, why[name]) for name in expected),
        Finding(
            "when they have returned, nothing of theirs is alive",
            1,
            "not judged until all four are right" if any(why.values()) else left,
        ),
    ]


_LEAKY = {
    "total_loss": """
def total_loss(loss_of, batches):
    total = 0.0
    for batch in batches:
        total += loss_of(batch)
    return total.item()
""",
    "failures": """
def failures(step, batches):
    failed = []
    for batch in batches:
        try:
            step(batch)
        except ValueError as error:
            failed.append(error)
    return [str(error) for error in failed]
""",
    "first_scores": """
def first_scores(model, batches):
    scores = []
    for batch in batches:
        scores.append(model(batch)[0])
    return [float(score) for score in scores]
""",
    "check_after": """
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    return total, check()
""",
}
_MENDED = {
    "total_loss": """
def total_loss(loss_of, batches):
    return sum(loss_of(each).item() for each in batches)
""",
    "failures": """
def failures(step, batches):
    failed = []
    for each in batches:
        try:
            step(each)
        except ValueError as error:
            failed.append(str(error))
    return failed
""",
    "first_scores": """
def first_scores(model, batches):
    return [model(each)[0].item() for each in batches]
""",
    "check_after": """
def check_after(model, batches, check):
    total = sum(model(each)[0].item() for each in batches)
    return total, check()
""",
}

LEAKS = Task(
    id="15-leaks",
    title="mend four programs that leak",
    points=5,
    functions=("total_loss", "failures", "first_scores", "check_after"),
    inputs=_leak_inputs,
    run=_leak_run,
    expected=_leak_expected,
    judge=_leak_judge,
    parts=_leak_parts,
    hints=(
        "Ask of each program: when batch 100 runs, which object of batch 99 does a name, a list "
        "or another object still refer to? And what does that object refer to in turn?",
        "Keep what you will return, and nothing that leads back to a tensor: a Python number "
        "instead of a loss or of a slice, a text instead of an exception. A loop's variables "
        "belong to the function: they live until it returns, unless you take them away.",
        "total_loss and first_scores: `.item()` on what you keep. failures: append "
        "`str(error)`. check_after: `batch = output = None` after the loop, before `check()`.",
    ),
    wrong=(
        Wrong("as they were", "".join(_LEAKY.values()), 0),
        Wrong(
            "collects garbage in every step, keeps the references",
            """
import gc
def total_loss(loss_of, batches):
    total = 0.0
    for batch in batches:
        total += loss_of(batch)
        gc.collect(0)
    return float(total)
"""
            + _LEAKY["failures"]
            + _LEAKY["first_scores"]
            + """
import gc
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    gc.collect()
    return total, check()
""",
            0,
        ),
        Wrong(
            "detach for everything",
            """
def total_loss(loss_of, batches):
    total = 0.0
    for batch in batches:
        total += loss_of(batch).detach()
    return float(total)
"""
            + _LEAKY["failures"]
            + """
def first_scores(model, batches):
    scores = []
    for batch in batches:
        scores.append(model(batch)[0].detach())
    return [float(score) for score in scores]
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch).detach()
        total += output[0].item()
    return total, check()
""",
            1,
        ),
        Wrong(
            "deletes the output, forgets the batch",
            _MENDED["total_loss"]
            + _MENDED["failures"]
            + _MENDED["first_scores"]
            + """
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    del output
    return total, check()
""",
            3,
        ),
        Wrong(
            "sets the output to None, forgets the batch",
            _MENDED["total_loss"]
            + _MENDED["failures"]
            + _MENDED["first_scores"]
            + """
def check_after(model, batches, check):
    total = 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    output = None
    return total, check()
""",
            3,
        ),
        Wrong(
            "calls check before the loop, while the device is empty",
            _MENDED["total_loss"]
            + _MENDED["failures"]
            + _MENDED["first_scores"]
            + """
def check_after(model, batches, check):
    checked, total = check(), 0.0
    for batch in batches:
        output = model(batch)
        total += output[0].item()
    return total, checked
""",
            3,
        ),
        Wrong(
            "loads all batches at once",
            _MENDED["total_loss"]
            + _MENDED["failures"]
            + """
def first_scores(model, batches):
    return [model(each)[0].item() for each in list(batches)]
"""
            + _MENDED["check_after"],
            3,
        ),
        Wrong(
            "keeps the last exception in a global, as an interpreter does",
            """
last_error = None
def failures(step, batches):
    global last_error
    failed = []
    for each in batches:
        try:
            step(each)
        except ValueError as error:
            failed.append(str(error))
            last_error = error
    return failed
"""
            + _MENDED["total_loss"]
            + _MENDED["first_scores"]
            + _MENDED["check_after"],
            4,
        ),
    ),
    self_reported=1,
)

# --- 15-is-oom --------------------------------------------------------------------------

# (family, is it one, type, message). Inputs carry type and message only: the verdict stays here.
# "#" becomes a number that the seed draws.
_MESSAGES: tuple[tuple[str, bool, str, str], ...] = (
    (
        "gpu",
        True,
        "torch.OutOfMemoryError",
        "CUDA out of memory. Tried to allocate #.00 MiB. GPU 0 has a total capacity of 14.74 GiB "
        "of which #.06 MiB is free. Process # has 14.#9 GiB memory in use.",
    ),
    (
        "gpu",
        True,
        "RuntimeError",
        "CUDA out of memory. Tried to allocate #.00 MiB (GPU 0; 15.90 GiB total capacity; "
        "14.#1 GiB already allocated)",
    ),
    (
        "gpu",
        True,
        "RuntimeError",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some "
        "other API call, so the stacktrace below might be incorrect.",
    ),
    (
        "gpu",
        True,
        "RuntimeError",
        "MPS backend out of memory (MPS allocated: #.17 GB, other allocations: #.31 MB, max "
        "allowed: 18.13 GB). Tried to allocate #.00 MB on private pool.",
    ),
    (
        "gpu",
        False,
        "RuntimeError",
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
        "asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.",
    ),
    (
        "gpu",
        False,
        "RuntimeError",
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable "
        "device-side assertions.",
    ),
    (
        "gpu",
        False,
        "RuntimeError",
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 "
        "and cpu! (batch #)",
    ),
    (
        "library",
        True,
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    ("library", True, "RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (
        "library",
        False,
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, "
        "m, n, k, &alpha, a, lda, b, ldb, &beta, c, ldc)`",
    ),
    ("library", False, "RuntimeError", "cuDNN error: CUDNN_STATUS_BAD_PARAM"),
    (
        "host",
        True,
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:#] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate #0000 bytes. Error code 12 (Cannot allocate memory)",
    ),
    (
        "host",
        True,
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:#] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate #0000 bytes.",
    ),
    ("host", True, "MemoryError", ""),
    (
        "host",
        True,
        "MemoryError",
        "Unable to allocate #.5 GiB for an array with shape (#, #000) and data type float64",
    ),
    ("host", False, "OSError", "[Errno 28] No space left on device"),
    (
        "host",
        False,
        "RuntimeError",
        "DataLoader worker (pid(s) #) exited unexpectedly",
    ),
    (
        "words",
        True,
        "ResourceExhaustedError",
        "OOM when allocating tensor with shape[#,#00] and type float on "
        "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
    ),
    ("words", False, "KeyError", "CUDA out of memory"),
    (
        "words",
        False,
        "ValueError",
        "the report says 'CUDA out of memory' # times: give a smaller batch size",
    ),
    (
        "words",
        False,
        "RuntimeError",
        "Expected memory of the LSTM to have size #, got #: the memory cell is out of step",
    ),
    ("words", False, "RuntimeError", "unsupported memory format option Contiguous (#)"),
)


def _oom_inputs(seed: int) -> list:
    rng = random.Random(seed)
    cases = []
    for _, _, kind, text in _MESSAGES:
        while "#" in text:
            text = text.replace("#", str(rng.randint(11, 899)), 1)
        cases.append({"type": kind, "message": text})
    rng.shuffle(cases)
    return cases


def _oom_shape(kind: str, text: str) -> tuple[str, str]:
    """Type and message without the numbers: what a row of the table and its case have in common."""
    return kind, re.sub(r"[\d#]+", "#", text)


def _oom_run(student, inputs: list) -> list:
    """Raise each error in turn and ask the student's function what it was."""
    import torch

    class ResourceExhaustedError(Exception):
        """Of this name in tensorflow.errors, which a program without TensorFlow cannot import."""

    types = {
        "torch.OutOfMemoryError": torch.OutOfMemoryError,
        "RuntimeError": RuntimeError,
        "MemoryError": MemoryError,
        "OSError": OSError,
        "KeyError": KeyError,
        "ValueError": ValueError,
        "ResourceExhaustedError": ResourceExhaustedError,
    }
    answers = []
    for case in inputs:
        error = types[case["type"]](case["message"])
        answers.append(student.is_oom(error))
    return answers


def _oom_expected(inputs: list) -> list:
    """Of each case its family, and whether it is one."""
    rows = {_oom_shape(kind, text): [family, is_one] for family, is_one, kind, text in _MESSAGES}
    return [rows[_oom_shape(case["type"], case["message"])] for case in inputs]


_OOM_TEXTS = {
    "gpu": "a GPU that is full, and nothing else that a GPU says",
    "library": "a library of the GPU that found no memory, and no other failure of it",
    "host": "the computer's own memory, and no other shortage",
    "words": "the type decides too: TensorFlow's error, and nobody who only mentions memory",
}


def _oom_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_OOM_TEXTS, "")
    for number, (case, (family, want)) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, number)
        if answer is want:
            continue
        start = case["message"][:40] or "no message"
        if answer is True or answer is False:
            verdict = "counted as" if answer else "not counted as"
            problem = f"a {case['type']} ({start}…) was {verdict} out of memory"
        else:
            problem = f"True or False was expected, not {describe(answer)}"
        why[family] = why[family] or problem
    return [Finding(text, 1, why[family]) for family, text in _OOM_TEXTS.items()]


IS_OOM = Task(
    id="15-is-oom",
    title="tell out of memory from everything else",
    points=4,
    functions=("is_oom",),
    inputs=_oom_inputs,
    run=_oom_run,
    expected=_oom_expected,
    judge=_oom_judge,
    hints=(
        "Two things speak: the type of the error, and its text. For some types the type is "
        "enough; for one it says nothing, and you have to read the text. Which one?",
        "MemoryError and torch.OutOfMemoryError need no text. TensorFlow's type you know by its "
        "name, `type(error).__name__`. Of all others only a RuntimeError can be one, and then "
        "its text must hold one of a few phrases. Choose phrases so long that no other message "
        "has them: 'memory' alone is in all of them.",
        "Return True for `isinstance(error, (MemoryError, torch.OutOfMemoryError))` and for the "
        "name 'ResourceExhaustedError'; False for what is no RuntimeError; else whether any of "
        "'out of memory. Tried', 'CUDA error: out of memory', 'backend out of memory', "
        "'STATUS_ALLOC_FAILED', \"can't allocate memory\", 'not enough memory' is in str(error).",
    ),
    wrong=(
        Wrong(
            "every error whose text has the word memory",
            """
def is_oom(error):
    return "memory" in str(error)
""",
            0,
        ),
        Wrong(
            "by type alone",
            """
import torch
def is_oom(error):
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))
""",
            0,
        ),
        Wrong(
            "every RuntimeError",
            """
def is_oom(error):
    return isinstance(error, (RuntimeError, MemoryError))
""",
            0,
        ),
        Wrong(
            "the phrase 'out of memory' in any error",
            """
def is_oom(error):
    return isinstance(error, MemoryError) or "out of memory" in str(error)
""",
            1,
        ),
        Wrong(
            "as accelerate looks for it",
            """
def is_oom(error):
    phrases = [
        " out of memory.",
        "CUDNN_STATUS_NOT_SUPPORTED.",
        "DefaultCPUAllocator: can't allocate memory",
    ]
    return isinstance(error, RuntimeError) and any(p in str(error) for p in phrases)
""",
            0,
        ),
        Wrong(
            "the answer as text",
            """
def is_oom(error):
    return "yes" if "memory" in str(error) else "no"
""",
            0,
        ),
    ),
)

# --- 15-evaluate ------------------------------------------------------------------------


def _evaluate_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def rows(count):
        return [[round(rng.uniform(-2, 2), 3) for _ in range(3)] for _ in range(count)]

    def case(about, sizes, **more):
        scales = [round(rng.uniform(1, 2), 2) for _ in range(3)]
        batches = [rows(size) for size in sizes]
        base = {"scales": scales, "mean": [0.5, -0.5, 0.25], "train": True, "frozen": False}
        return base | {"about": about, "batches": batches, "fails_at": None, "drops": False} | more

    size = rng.randint(4, 6)
    return [
        case("mean", [size, size, 1], train=False),
        case("mean", [1, size, 2, size], train=False),
        case("eval", [size, size, size], drops=True),
        case("modes", [size, size], frozen=True),
        case("modes", [size, size], train=False),
        case("modes", [size, size, size], fails_at=1),
    ]


def _evaluate_run(student, inputs: list) -> list:
    """Evaluate a small model of each case; write down what it was asked for and left as."""
    import torch

    class Scale(torch.nn.Module):
        def __init__(self, scales):
            super().__init__()
            self.scales = torch.nn.Parameter(torch.tensor(scales, dtype=torch.float64))

        def forward(self, x):
            return x * self.scales

    class LossFailed(Exception):
        pass

    answers = []
    for case in inputs:
        norm = torch.nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
        norm.running_var.fill_(1 - norm.eps)  # so that it divides by 1
        norm.running_mean.copy_(torch.tensor(case["mean"]))
        drop = torch.nn.Dropout(0.9 if case["drops"] else 0.0)
        model = torch.nn.Sequential(Scale(case["scales"]), drop, norm)
        model.train(case["train"])
        if case["frozen"]:
            norm.eval()
        answer = {"graphs": 0, "losses": 0}

        def loss_fn(model, batch, case=case, answer=answer):
            """The mean over the batch: of the squares of what the model makes of it."""
            output = model(batch)
            answer["graphs"] += output.requires_grad
            answer["losses"] += 1
            if case["fails_at"] == answer["losses"] - 1:
                raise LossFailed("the loss of this batch could not be computed")
            return output.square().mean()

        torch.manual_seed(0)
        batches = [torch.tensor(rows, dtype=torch.float64) for rows in case["batches"]]
        try:
            value, passed_on = student.evaluate(model, batches, loss_fn), False
        except LossFailed:
            value, passed_on = None, True
        if case["about"] == "modes":
            answer["passed_on"] = passed_on
            answer["modes"] = [module.training for module in model.modules()]
        else:
            answer["value"] = value
        if case["about"] == "eval":
            answer["mean"] = norm.running_mean.tolist()
        answers.append(answer)
    return answers


def _evaluate_expected(inputs: list) -> list:
    """The mean of all squares in plain numbers, whatever the batches are."""
    answers = []
    for case in inputs:
        squares = [
            (value * scale - mean) ** 2
            for rows in case["batches"]
            for row in rows
            for value, scale, mean in zip(row, case["scales"], case["mean"], strict=True)
        ]
        answers.append(sum(squares) / len(squares))
    return answers


def _evaluate_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(("mean", "eval", "modes", "graph"), "")
    typed = True
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, about = item(got, number), case["about"]
        asked, value = item(answer, "losses"), item(answer, "value")
        batches = len(case["batches"]) if case["fails_at"] is None else case["fails_at"] + 1
        if asked != batches or type(asked) is not int:
            for key in why:
                why[key] = why[key] or "loss_fn was not called once for each batch"
            continue
        if about == "mean" and not close(value, want, relative=1e-6):
            sizes = ", ".join(str(len(rows)) for rows in case["batches"])
            wrong = f"not the mean over all samples, with batches of {sizes}"
            problem = wrong if is_number(value) else f"a float was expected, not {describe(value)}"
            why["mean"] = why["mean"] or problem
        if about == "eval" and not _same(item(answer, "mean"), case["mean"]):
            why["eval"] = "the running mean of a BatchNorm has moved"
        elif about == "eval" and not is_number(value):
            why["eval"], typed = "not judged until the answer is a float", False
        elif about == "eval" and not close(value, want, relative=1e-6):
            why["eval"] = "the model has a dropout, and the value shows it"
        if about == "modes":
            why["modes"] = why["modes"] or _modes_why(case, answer)
        if item(answer, "graphs") != 0 or type(item(answer, "graphs")) is not int:
            graphs = item(answer, "graphs")
            times = count(graphs, "output") if type(graphs) is int else "some outputs"
            why["graph"] = why["graph"] or f"{times} of the model came with a graph"
    if why["eval"] and typed and not why["modes"]:
        why["modes"] = "not judged until the model is in eval mode while it is evaluated"
    return [
        Finding("the mean over all samples, whatever the size of the batches", 2, why["mean"]),
        Finding("dropout is off and BatchNorm stands still", 1, why["eval"]),
        Finding("every layer is left in the mode in which it was", 1, why["modes"]),
        Finding("no graph is kept", 1, why["graph"]),
    ]


def _modes_why(case: dict, answer: Any) -> str:
    """Why the modes are not those in which the model came: all of one, but for a frozen layer."""
    if item(answer, "passed_on") is not (case["fails_at"] is not None):
        return "an error of loss_fn was not passed on"
    modes = item(answer, "modes")  # of the model, and of its three layers; BatchNorm is the last
    came = [case["train"]] * 3 + [case["train"] and not case["frozen"]]
    if is_list(modes, 4) and all(mode is want for mode, want in zip(modes, came, strict=True)):
        return ""
    if case["fails_at"] is not None:
        return "after an error in loss_fn the model is left in another mode"
    if case["frozen"]:
        return "one layer was in eval mode on purpose, inside a model in train mode"
    return "the model came in eval mode and left in another"


EVALUATE = Task(
    id="15-evaluate",
    title="evaluate without a graph, and leave no trace",
    points=5,
    functions=("evaluate",),
    inputs=_evaluate_inputs,
    run=_evaluate_run,
    expected=_evaluate_expected,
    judge=_evaluate_judge,
    hints=(
        "Three switches that do not know of each other: graph, mode, and how much each batch "
        "weighs. And two ways out of the function: by return, and by an error.",
        "Weigh each batch's mean by its number of samples, `len(batch)`. Before you call "
        "`model.eval()`, write down `.training` of every module in `model.modules()`, and put "
        "it back in a `finally`. Compute under `torch.inference_mode()`.",
        "`modes = [(m, m.training) for m in model.modules()]`; then `model.eval()`; in a `try:` "
        "with `torch.inference_mode():`, add `loss_fn(model, b).item() * len(b)` and `len(b)` "
        "of each batch b; in `finally:` set `m.training = mode` for each pair. Return the "
        "quotient of the two sums.",
    ),
    wrong=(
        Wrong(
            "the mean of the batches' means",
            """
import torch
def evaluate(model, batches, loss_fn):
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            losses = [loss_fn(model, b).item() for b in batches]
    finally:
        for m, mode in modes:
            m.training = mode
    return sum(losses) / len(losses)
""",
            3,
        ),
        Wrong(
            "eval(), but with graphs",
            """
def evaluate(model, batches, loss_fn):
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        total = sum(loss_fn(model, b).item() * len(b) for b in batches)
    finally:
        for m, mode in modes:
            m.training = mode
    return total / sum(len(b) for b in batches)
""",
            4,
        ),
        Wrong(
            "no_grad, but the model trains on",
            """
import torch
def evaluate(model, batches, loss_fn):
    with torch.no_grad():
        total = sum(loss_fn(model, b).item() * len(b) for b in batches)
    return total / sum(len(b) for b in batches)
""",
            3,
        ),
        Wrong(
            "model.train() at the end, whatever was before",
            """
import torch
def evaluate(model, batches, loss_fn):
    model.eval()
    with torch.inference_mode():
        total = sum(loss_fn(model, b).item() * len(b) for b in batches)
    model.train()
    return total / sum(len(b) for b in batches)
""",
            4,
        ),
        Wrong(
            "restores the model as one, and not after an error",
            """
import torch
def evaluate(model, batches, loss_fn):
    mode = model.training
    model.eval()
    with torch.inference_mode():
        total = sum(loss_fn(model, b).item() * len(b) for b in batches)
    model.train(mode)
    return total / sum(len(b) for b in batches)
""",
            4,
        ),
        Wrong(
            "a tensor, and nothing else thought of",
            """
def evaluate(model, batches, loss_fn):
    total = 0
    for b in batches:
        total += loss_fn(model, b)
    return total / len(batches)
""",
            0,
        ),
    ),
    self_reported=1,
)

TASKS = (LEAKS, IS_OOM, EVALUATE)
