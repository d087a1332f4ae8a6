"""A `run` shares its process with the student's code, which can read its frames and its lists.

Nothing that `run` is given may be the answer, and no value that it reports may be a verdict: a
program that reads or writes there gets what it earns otherwise, plus at most the points that the
task declares as `self_reported`.
"""

import pytest
from test_tasks import PUBLIC_SEED, answer, points

from course_utils.grading import all_tasks

SECRET = 4711  # a seed that no notebook shows
assert SECRET != PUBLIC_SEED
# (task, what it does, source, points it may get)
FORGED = [
    (
        "10-audit",
        "reads the kind that the inputs name",
        """
import sys
def audit(variable, strategy):
    return sys._getframe(1).f_locals["spec"].get("kind", "mirrored")
""",
        0,
    ),
    (
        "15-is-oom",
        "reads the row of the public table",
        """
import sys
def is_oom(error):
    number = sys._getframe(1).f_locals["case"].get("number")
    return number in {0, 1, 2, 3, 7, 8, 11, 12, 13, 14, 17}
""",
        0,
    ),
    (
        "15-evaluate",
        "writes the modes that were before, and the number of graphs",
        """
import sys
def evaluate(model, batches, loss_fn):
    model.eval()
    before = sys._getframe(1).f_locals.get("before", [])
    before[:] = [False] * 4
    try:
        return sum(loss_fn(model, b).item() * len(b) for b in batches) / sum(map(len, batches))
    finally:
        loss_fn.__defaults__[1]["graphs"] = 0
""",
        4,
    ),
    (
        "02-timer",
        "reads the numbers of the made-up device",
        """
import statistics
def measure(fn, sync, repeat, clock):
    case = fn.__defaults__[0]
    clock()
    return statistics.median(case["host"]) + case["device"]
""",
        0,
    ),
    (
        "09-shards",
        "reads the shards, and the tensors to give back",
        """
import sys, torch
def look(name):
    frame = sys._getframe(2)
    while frame and name not in frame.f_locals:
        frame = frame.f_back
    return frame and frame.f_locals[name]
def shard(parameters, rank, n):
    case = look("case")
    return torch.tensor(case["flats"][rank], dtype=parameters[0].dtype) if case else torch.ones(4)
def unshard(flats, shapes):
    return [torch.tensor(t) for t in look("together") or look("case")["tensors"]]
""",
        1,  # shards of one length
    ),
    (
        "09-shards",
        "keeps the tensors that it was given, to give them back",
        """
import torch
def shard(parameters, rank, n):
    global kept
    kept = parameters
    return torch.cat([p.flatten() for p in parameters])
def unshard(flats, shapes):
    return kept
""",
        1,
    ),
    (
        "04-ring",
        "the numbers of all ranks from a name of run's, and messages that nobody needs",
        """
import sys, torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    tag, frame, rows = send.__defaults__[0], sys._getframe(1), None
    while frame and not rows:
        for held in frame.f_locals.values():
            if isinstance(held, list) and len(held) > tag and isinstance(held[tag], list):
                rows = held[tag]
        frame = frame.f_back
    for chunk in numbers.tensor_split(ranks)[:1] * (2 * (ranks - 1)):
        send(chunk, (rank + 1) % ranks)
    return torch.tensor(rows, dtype=torch.float64).sum(0)
""",
        0,
    ),
    (
        "04-ring",
        "torch's own all-reduce under the name of another module, and the count of bytes written",
        """
from torch.distributed.distributed_c10d import all_reduce
def ring_all_reduce(numbers, rank, ranks, send, receive):
    all_reduce(numbers)
    mine = len(numbers) // ranks + (rank < len(numbers) % ranks)
    send.__defaults__[1].update(sent=16 * (ranks - 1) * mine, to={(rank + 1) % ranks})
    return numbers
""",
        0,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task_id", "source", "most"),
    [pytest.param(i, source, most, id=f"{i}: {name}") for i, name, source, most in FORGED],
)
def test_no_answer_lies_about_and_no_verdict_can_be_written(task_id, source, most):
    task = all_tasks()[task_id]
    inputs = task.inputs(SECRET)
    findings = task.mark(inputs, answer(task, source, inputs))
    assert points(findings) <= most, [finding.why for finding in findings]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_object", "barrier", "get_rank"])
def test_a_ring_by_torch_is_told_what_to_use(name):
    task = all_tasks()["04-ring"]
    source = f"""
from torch.distributed.distributed_c10d import {name}
def ring_all_reduce(numbers, rank, ranks, send, receive):
    {name}({"[None] * ranks, numbers" if "gather" in name else "numbers" if "all" in name else ""})
"""
    inputs = task.inputs(SECRET)[:1]
    [failed] = answer(task, source, inputs)
    assert "use send and receive" in failed["error"]


TIMERS = {
    "one reading ends a run and starts the next": """
import statistics
def measure(fn, sync, repeat, clock):
    fn()
    sync()
    times = [clock()]
    for _ in range(repeat):
        fn()
        sync()
        times.append(clock())
    return statistics.median(b - a for a, b in zip(times, times[1:]))
""",
    "also reads when fn returns, and warms up twice": """
import statistics
def measure(fn, sync, repeat, clock):
    fn()
    fn()
    runs = []
    for _ in range(repeat):
        sync()
        start = clock()
        fn()
        returned = clock()
        sync()
        runs.append(clock() - start)
    return statistics.median(runs)
""",
    "times the first run too, and drops it": """
import statistics
def measure(fn, sync, repeat, clock):
    runs = []
    for _ in range(repeat + 1):
        sync()
        start = clock()
        fn()
        sync()
        runs.append(clock() - start)
    return statistics.median(runs[1:])
""",
}


@pytest.mark.parametrize("source", TIMERS.values(), ids=list(TIMERS))
def test_a_timer_may_read_the_clock_in_other_ways(source):
    task = all_tasks()["02-timer"]
    inputs = task.inputs(SECRET)
    assert points(task.mark(inputs, answer(task, source, inputs))) == task.points
