"""Tasks of lesson 04: a ring all-reduce, averaged gradients, equal starts; all on real ranks."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, close, describe, is_list, item

# Each `run` launches ranks, with the student's function on each. Where a rank fails, its own
# error is the answer of that launch, so that the other launches still count.


def _same(got: Any, want: Any) -> bool:
    """True for the same nested lists of numbers, up to rounding; None equals None."""
    if want is None:
        return got is None
    if type(want) is list:
        return is_list(got, len(want)) and all(map(_same, got, want))
    return close(got, want, relative=1e-9)


def _failed(answer: Any) -> str:
    """What ended a launch, or "" when each of its ranks returned."""
    error = item(answer, "error")
    if type(error) is str:
        return error[:400]
    return "" if is_list(answer) else f"there is no result of each rank, but {describe(answer)}"


# --- 04-ring ----------------------------------------------------------------------------

# Whole numbers, so that the sum does not depend on the order of the additions.


def _ring_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(ranks, size):
        return [[rng.randint(-999, 999) for _ in range(size)] for _ in range(ranks)]

    k = rng.randint(2, 5)
    return [
        {"about": "two", "cases": [case(2, 2 * k), case(2, 2 * k + 6)]},
        {"about": "four", "cases": [case(4, 4 * k), case(4, 4)]},
        {"about": "rest", "cases": [case(2, 2 * k + 1), case(2, 3)]},
        {"about": "rest", "cases": [case(4, 4 * k + rng.randint(1, 3)), case(4, 3)]},
    ]


def _ring_run(student, inputs: list) -> list:
    """All-reduce the numbers of each case on real ranks; count what `send` is given."""
    import re

    from course_utils.grading.ranks import on_ranks

    def on_rank(function, cases):
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        rank, ranks = dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore("ring", dist.distributed_c10d._get_default_store())
        # Messages between cores, also beside GPUs, in a group that torch's collectives do not
        # find, whatever the name under which the function has imported them.
        group = dist.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=90))
        dist.barrier()  # rank 0 has the store, and may be the first to end
        dist.destroy_process_group()

        own = [torch.tensor(rows[rank], dtype=torch.float64) for rows in cases]
        cases.clear()  # what the other ranks have comes by `receive` alone
        answers, requests = [], []
        for tag, mine in enumerate(own):
            count = {"sent": 0, "to": set()}

            def send(numbers, to, tag=tag, count=count):
                if not 0 <= to < ranks or to == rank:
                    raise ValueError(f"rank {rank} cannot send to rank {to} of {ranks}")
                parcel = numbers.detach().clone().flatten().to(torch.float64)
                for part in (torch.tensor([parcel.numel()]), parcel):
                    if part.numel():
                        request = group.send([part], to, tag)
                        requests.append((request, part))  # a parcel must live until it is there
                count["sent"] += parcel.nbytes
                count["to"].add(int(to))

            def receive(source, tag=tag):
                if not 0 <= source < ranks or source == rank:
                    raise ValueError(f"rank {rank} cannot receive from rank {source} of {ranks}")
                size = torch.zeros(1, dtype=torch.int64)
                wait = timedelta(seconds=10)
                group.recv([size], source, tag).wait(wait)
                parcel = torch.zeros(int(size), dtype=torch.float64)
                if parcel.numel():
                    group.recv([parcel], source, tag).wait(wait)
                return parcel

            try:
                total = function(mine, rank, ranks, send, receive)
            except ValueError as error:
                if "process group" not in str(error):
                    raise
                use = "a collective of torch is no answer here: use send and receive"
                raise RuntimeError(use) from error
            value = total.tolist() if isinstance(total, torch.Tensor) else total
            answers.append({"sum": value, "sent": count["sent"], "to": sorted(count["to"])})
            group.barrier().wait()  # nobody leaves before every parcel was taken
        return answers

    answers = []
    for each in inputs:
        if answers and re.search("never comes|wait for each other", str(answers[-1])):
            answers.append(answers[-1])  # another wait would tell nothing new
        else:
            function, cases = student.ring_all_reduce, each["cases"]
            hangs = "the ranks wait for each other{where}: who has to send there?"
            waits = "rank {rank} waits{where} for a message that never comes"
            answers.append(on_ranks(on_rank, len(cases[0]), function, cases, hangs, waits))
    return answers


def _ring_expected(inputs: list) -> list:
    """The column sums of each case, in whole numbers."""

    def sums(rows):
        return [sum(column) for column in zip(*rows, strict=True)]

    return [[sums(rows) for rows in each["cases"]] for each in inputs]


def _ring_why(each: dict, want: list, answer: Any) -> str:
    if _failed(answer):
        return _failed(answer)
    for rows, goal, case in zip(each["cases"], want, range(len(want)), strict=True):
        what = f"with {len(goal)} numbers on {len(rows)} ranks"
        wrong = []
        for rank in range(len(rows)):
            got = item(item(item(answer, rank), case), "sum")
            if not is_list(got, len(goal)):
                return f"{what}, rank {rank} returned {describe(got)}"
            if not _same(got, goal):
                wrong.append(rank)
        if wrong:
            got = item(item(item(answer, wrong[0]), case), "sum")
            right = sum(map(_same, got, goal))
            return (
                f"{what}, rank {wrong[0]} has the sum over all ranks in {right} of its "
                f"{len(goal)} entries" + (", and others are wrong too" if len(wrong) > 1 else "")
            )
    return "" if len(answer) == len(each["cases"][0]) else "there is not one result for each rank"


def _bytes_why(each: dict, answer: Any) -> str:
    for number, rows in enumerate(each["cases"]):
        ranks, size = len(rows), 8 * len(rows[0])
        sent = [item(item(item(answer, rank), number), "sent") for rank in range(ranks)]
        if not all(type(count) is int and count >= 0 for count in sent):
            return "the bytes were not counted"
        # Over all ranks a ring sends the tensor once in each of its 2(p-1) steps, and in each
        # no rank sends more than the largest chunk.
        largest = 8 * -(-len(rows[0]) // ranks)
        what = f"with {len(rows[0])} numbers on {ranks} ranks"
        if sum(sent) < 2 * (ranks - 1) * size:
            return f"{what}, too little went through `send` for a sum on all ranks"
        if max(sent) > 2 * (ranks - 1) * largest:
            many = [rank for rank, count in enumerate(sent) if count > 2 * (ranks - 1) * largest]
            who = "every rank" if len(many) == ranks else f"rank {many[0]}"
            return f"{what}, {who} sends more bytes than a rank of a ring does"
        to = [item(item(item(answer, rank), number), "to") for rank in range(ranks)]
        for rank, whom in enumerate(to):
            if not is_list(whom, 1) or type(whom[0]) is not int:
                return f"{what}, rank {rank} does not send to exactly one rank, as in a ring"
        circles = [[[(rank + way) % ranks] for rank in range(ranks)] for way in (1, -1)]
        if to not in circles:
            return f"{what}, not every rank sends to its neighbour in the circle"
    return ""


def _ring_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(("two", "four", "rest", "bytes"), "")
    for number, (each, want) in enumerate(zip(inputs, expected, strict=True)):
        problem = _ring_why(each, want, item(got, number))
        why[each["about"]] = why[each["about"]] or problem
        why["bytes"] = why["bytes"] or ("" if problem else _bytes_why(each, item(got, number)))
    if why["two"] or why["four"] or why["rest"]:
        why["bytes"] = "not judged until all sums are right"
    return [
        Finding("two ranks hold the sum", 1, why["two"]),
        Finding("four ranks hold the sum", 2, why["four"]),
        Finding("also when the chunks cannot be equal", 1, why["rest"]),
        Finding("by a ring: to one neighbour, at most 2(p-1) chunks a rank", 1, why["bytes"]),
    ]


RING = Task(
    id="04-ring",
    title="a ring all-reduce",
    points=5,
    functions=("ring_all_reduce",),
    inputs=_ring_inputs,
    run=_ring_run,
    expected=_ring_expected,
    judge=_ring_judge,
    hints=(
        "Draw three ranks in a circle, each with three chunks. Follow the chunk that rank 0 sends "
        "first: after two steps it has met all three ranks. Where is it then, and which chunk is "
        "complete on rank 0?",
        "2(p-1) steps. In step s send chunk (rank - s) mod p to the next rank; what arrives is "
        "chunk (rank - s - 1) mod p of the rank before. In the first p-1 steps add it to your "
        "own, in the others put it in its place.",
        "`chunks = list(numbers.clone().tensor_split(ranks))`; in each step "
        "`send(chunks[(rank - s) % ranks], (rank + 1) % ranks)`, then "
        "`arrived = receive((rank - 1) % ranks)`, then add or replace chunk "
        "`(rank - s - 1) % ranks`. Return `torch.cat(chunks)`.",
    ),
    wrong=(
        Wrong(
            "gather to the root, and send back",
            """
def ring_all_reduce(numbers, rank, ranks, send, receive):
    if rank > 0:
        send(numbers, 0)
        return receive(0)
    total = numbers.clone()
    for other in range(1, ranks):
        total += receive(other)
    for other in range(1, ranks):
        send(total, other)
    return total
""",
            4,
        ),
        Wrong(
            "everybody sends everything to everybody",
            """
def ring_all_reduce(numbers, rank, ranks, send, receive):
    others = [r for r in range(ranks) if r != rank]
    for other in others:
        send(numbers, other)
    return numbers + sum(receive(other) for other in others)
""",
            4,
        ),
        Wrong(
            "each chunk straight to its owner, and back: no ring",
            """
import torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    chunks = list(numbers.clone().tensor_split(ranks))
    others = [r for r in range(ranks) if r != rank]
    for other in others:
        send(chunks[other], other)
    for other in others:
        chunks[rank] += receive(other)
    for other in others:
        send(chunks[rank], other)
    for other in others:
        chunks[other] = receive(other)
    return torch.cat(chunks)
""",
            4,
        ),
        Wrong(
            "a ring without chunks",
            """
def ring_all_reduce(numbers, rank, ranks, send, receive):
    total, passing = numbers.clone(), numbers
    for _ in range(ranks - 1):
        send(passing, (rank + 1) % ranks)
        passing = receive((rank - 1) % ranks)
        total = total + passing
    return total
""",
            4,
        ),
        Wrong(
            "the remainder is dropped",
            """
import torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    size = len(numbers) // ranks
    chunks = [numbers[i * size:(i + 1) * size].clone() for i in range(ranks)]
    for s in range(2 * (ranks - 1)):
        send(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        arrived, i = receive((rank - 1) % ranks), (rank - s - 1) % ranks
        chunks[i] = chunks[i] + arrived if s < ranks - 1 else arrived
    return torch.cat(chunks)
""",
            3,
        ),
        Wrong(
            "stops after the reduce-scatter",
            """
import torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    chunks = list(numbers.clone().tensor_split(ranks))
    for s in range(ranks - 1):
        send(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        chunks[(rank - s - 1) % ranks] += receive((rank - 1) % ranks)
    return torch.cat(chunks)
""",
            0,
        ),
        Wrong(
            "adds in the second half too",
            """
import torch
def ring_all_reduce(numbers, rank, ranks, send, receive):
    chunks = list(numbers.clone().tensor_split(ranks))
    for s in range(2 * (ranks - 1)):
        send(chunks[(rank - s) % ranks], (rank + 1) % ranks)
        chunks[(rank - s - 1) % ranks] += receive((rank - 1) % ranks)
    return torch.cat(chunks)
""",
            0,
        ),
        Wrong(
            "knows two ranks only",
            """
def ring_all_reduce(numbers, rank, ranks, send, receive):
    send(numbers, 1 - rank)
    return numbers + receive(1 - rank)
""",
            1,
        ),
        Wrong(
            "torch's own all-reduce",
            """
import torch.distributed as dist
def ring_all_reduce(numbers, rank, ranks, send, receive):
    dist.all_reduce(numbers)
    return numbers
""",
            0,
        ),
    ),
    self_reported=1,
)

# --- 04-average -------------------------------------------------------------------------


def _average_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def row(size):
        return [round(rng.uniform(-4, 4), 2) for _ in range(size)]

    def case(about, ranks, without):
        shapes = [rng.randint(1, 4) for _ in range(4)]
        return {
            "about": about,
            "weights": [row(size) for size in shapes],
            # of each rank, of each parameter; None: it took no part, on any rank
            "gradients": [
                [None if i in without else row(size) for i, size in enumerate(shapes)]
                for _ in range(ranks)
            ],
        }

    return [
        case("two", 2, ()),
        case("three", 3, ()),
        case("none", 2, (rng.randint(0, 1), rng.randint(2, 3))),
    ]


def _average_run(student, inputs: list) -> list:
    """Give each rank a model with gradients of its own, and return what it has afterwards."""
    from course_utils.grading.ranks import on_ranks

    def on_rank(function, case):
        import torch
        import torch.distributed as dist

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Module()
        rows = zip(case["weights"], case["gradients"][dist.get_rank()], strict=True)
        for number, (values, gradient) in enumerate(rows):
            weight = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64, device=device))
            if gradient is not None:
                weight.grad = torch.tensor(gradient, dtype=torch.float64, device=device)
            elif number > 1:
                weight.requires_grad_(False)  # frozen; the other one is only unused
            model.register_parameter(f"weight{number}", weight)
        function(model)  # no barrier after it: it would pair with a collective of the student's
        parameters = list(model.parameters())
        return {
            "gradients": [None if p.grad is None else p.grad.tolist() for p in parameters],
            "weights": [p.tolist() for p in parameters],
        }

    function = student.average_gradients
    hangs = "a rank waits{where}, and the others do not come: who calls it?"
    answers = []
    for case in inputs:
        if answers and "do not come" in str(answers[-1]):
            answers.append(answers[-1])  # another wait would tell nothing new
        else:
            answers.append(on_ranks(on_rank, len(case["gradients"]), function, case, hangs))
    return answers


def _average_expected(inputs: list) -> list:
    """For each parameter the mean over the ranks, by exact fractions."""
    from fractions import Fraction

    answers = []
    for case in inputs:
        means = []
        for of_ranks in zip(*case["gradients"], strict=True):
            if of_ranks[0] is None:
                means.append(None)
                continue
            columns = zip(*of_ranks, strict=True)
            means.append([float(sum(map(Fraction, c)) / len(of_ranks)) for c in columns])
        answers.append(means)
    return answers


def _average_why(case: dict, want: list, answer: Any) -> str:
    if _failed(answer):
        return _failed(answer)
    ranks = len(case["gradients"])
    for rank in range(ranks):
        held = item(answer, rank)
        if not _same(item(held, "weights"), case["weights"]):
            return f"on rank {rank} the weights were changed; only gradients are to be"
        gradients = item(held, "gradients")
        for number, goal in enumerate(want):
            got, own = item(gradients, number), case["gradients"][rank][number]
            if _same(got, goal):
                continue
            if goal is None:
                return f"rank {rank} has a gradient where it had none (its `grad` was None)"
            if _same(got, own):
                return f"the gradient of a parameter is still rank {rank}'s own"
            if _same(got, [ranks * value for value in goal]):
                return f"rank {rank} has {ranks} times the average"
            return f"with {ranks} ranks, rank {rank} does not have the average"
        if not is_list(gradients, len(want)):
            return f"on rank {rank} there are not as many gradients as parameters"
    return "" if len(answer) == ranks else "there is not one result for each rank"


def _average_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = {
        case["about"]: _average_why(case, want, item(got, number))
        for number, (case, want) in enumerate(zip(inputs, expected, strict=True))
    }
    return [
        Finding("two ranks have the average, and their weights as before", 2, why["two"]),
        Finding("so have three ranks", 1, why["three"]),
        Finding("also when some parameters have no gradient", 1, why["none"]),
    ]


AVERAGE = Task(
    id="04-average",
    title="average the gradients",
    points=4,
    functions=("average_gradients",),
    inputs=_average_inputs,
    run=_average_run,
    expected=_average_expected,
    judge=_average_judge,
    hints=(
        "An all-reduce gives the sum. What is missing to the average, and which rank knows it?",
        "For each parameter: all-reduce `parameter.grad` in place, then divide it by the world "
        "size. A frozen or unused parameter has `grad` None: there is nothing to send. With "
        "`async_op=True`, `wait()` before you use the tensor again.",
        "`for p in model.parameters():` if `p.grad is not None`: `dist.all_reduce(p.grad)`, then "
        "`p.grad /= dist.get_world_size()`.",
    ),
    wrong=(
        Wrong(
            "the sum",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
""",
            0,
        ),
        Wrong(
            "always divides by two",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2
""",
            3,
        ),
        Wrong(
            "forgets parameters without a gradient",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
""",
            3,
        ),
        Wrong(
            "gives zeros to parameters without a gradient",
            """
import torch
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
""",
            3,
        ),
        Wrong(
            "averages the weights",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data += 1
        p.data /= dist.get_world_size()
""",
            0,
        ),
        Wrong(
            "averages a copy",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            gradient = p.grad.clone()
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
""",
            0,
        ),
        Wrong(
            "only rank 0 gets it",
            """
import torch.distributed as dist
def average_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            own = p.grad.clone()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
            if dist.get_rank() > 0:
                p.grad = own
""",
            0,
        ),
    ),
)

# --- 04-start ---------------------------------------------------------------------------


def _start_inputs(seed: int) -> dict:
    rng = random.Random(seed)

    def values(size):
        return [round(rng.uniform(1, 9), 2) for _ in range(size)]

    def start():
        return {
            "parameters": [values(6), values(2), values(2), values(2), values(3)],
            "buffers": [values(2), values(2), values(2), rng.randint(10, 99)],
        }

    return {"ranks": [start(), start()]}


def _start_run(student, inputs: dict) -> Any:
    """Each rank starts elsewhere; return what it has after the call, and after one step."""
    from course_utils.grading.ranks import on_ranks

    def on_rank(function, starts):
        import torch
        import torch.distributed as dist

        torch.manual_seed(dist.get_rank())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        model.register_parameter("scale", torch.nn.Parameter(torch.zeros(3), requires_grad=False))
        model.register_buffer("offset", torch.zeros(2), persistent=False)
        model.to(device, torch.float64)
        start = starts[dist.get_rank()]

        def tensors():
            own = [model.scale, *model[0].parameters(), *model[1].parameters()]
            return {"parameters": own, "buffers": list(model.buffers())}

        for kind, held in tensors().items():
            given = start[kind] if kind == "buffers" else [start[kind][i] for i in (4, 0, 1, 2, 3)]
            for tensor, numbers in zip(held, given, strict=True):
                filled = torch.tensor(numbers, dtype=tensor.dtype, device=device)
                tensor.data.copy_(filled.reshape(tensor.shape))

        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        function(model)  # no barrier after it: it would pair with a collective of the student's

        def report(kind):
            return [tensor.flatten().tolist() for tensor in tensors()[kind]]

        held = {kind: report(kind) for kind in ("parameters", "buffers")}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return held | {"stepped": report("parameters")}

    starts = inputs["ranks"]
    hangs = "a rank waits{where}, and the other does not come: who calls it?"
    return on_ranks(on_rank, len(starts), student.start_equal, starts, hangs)


def _start_expected(inputs: dict) -> dict:
    """Rank 0's own numbers; after a step with gradients of 1 and rate 0.5, half of 1 less."""
    weight, bias, scale, shift, frozen = inputs["ranks"][0]["parameters"]
    own, mean, variance, batches = inputs["ranks"][0]["buffers"]
    trained = [[value - 0.5 for value in each] for each in (weight, bias, scale, shift)]
    return {
        "parameters": [frozen, weight, bias, scale, shift],
        "buffers": [own, mean, variance, [batches]],
        "stepped": [frozen, *trained],
    }


def _start_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    ranks = len(inputs["ranks"])
    held = [item(got, rank) for rank in range(ranks)]
    failed = _failed(got) or ("" if is_list(got, ranks) else "there is not one result a rank")
    parameters = [item(each, "parameters") for each in held]
    equal = failed or next(
        ("the ranks' parameters differ" for p in parameters if not _same_shape(p, expected)), ""
    )
    names = ("the frozen `scale`", "`0.weight`", "`0.bias`", "`1.weight`", "`1.bias`")
    if not equal:
        unlike = [
            name
            for number, name in enumerate(names)
            if not all(_same(p[number], parameters[0][number]) for p in parameters[1:])
        ]
        equal = unlike and f"the ranks differ in {', '.join(unlike)}"
    of_zero = equal and "not judged until the ranks are equal"
    if not of_zero and not _same(parameters[0], expected["parameters"]):
        of_zero = "they are equal, but not what rank 0 had: its weights are lost"
    buffers = failed and "not judged until every rank returns"
    for rank, each in enumerate(held):
        names = ("running_mean", "running_var", "num_batches_tracked")
        names = ("the model's own `offset`", *(f"BatchNorm's `{name}`" for name in names))
        for number, name in enumerate(names):
            want = expected["buffers"][number]
            if not buffers and not _same(item(item(each, "buffers"), number), want):
                buffers = f"rank {rank} does not have what rank 0 had in {name}"
    trains = of_zero and "not judged until the parameters are right"
    for rank, each in enumerate(held):
        if not trains and not _same(item(each, "stepped"), expected["stepped"]):
            trains = (
                f"on rank {rank}, `optimizer.step()` does not move the model as it should: "
                "change what is in the parameters, do not replace them, and leave "
                "`requires_grad` as it is"
            )
    return [
        Finding("both ranks have the same parameters", 1, equal),
        Finding("they are rank 0's", 1, of_zero),
        Finding("both ranks have rank 0's buffers", 1, buffers),
        Finding("an optimizer made before still trains them", 1, trains),
    ]


def _same_shape(parameters: Any, expected: dict) -> bool:
    """True when these are lists of numbers, as many as the model has."""
    sizes = [len(each) for each in expected["parameters"]]
    return is_list(parameters, len(sizes)) and all(
        is_list(each, size) and all(close(value, value) for value in each)
        for each, size in zip(parameters, sizes, strict=True)
    )


START = Task(
    id="04-start",
    title="make all ranks start equal",
    points=4,
    functions=("start_equal",),
    inputs=_start_inputs,
    run=_start_run,
    expected=_start_expected,
    judge=_start_judge,
    hints=(
        "One collective brings one rank's tensor to all. What does a model hold besides its "
        "parameters, that BatchNorm needs in evaluation?",
        "Broadcast each of `model.parameters()` and each of `model.buffers()` from rank 0, into "
        "the tensor that is there: the optimizer refers to it.",
        "For every tensor of the two lists: `dist.broadcast(tensor.data, src=0)`.",
    ),
    wrong=(
        Wrong(
            "parameters, but no buffers",
            """
import torch.distributed as dist
def start_equal(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
""",
            3,
        ),
        Wrong(
            "only what is floating point",
            """
import torch.distributed as dist
def start_equal(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            dist.broadcast(tensor.data, src=0)
""",
            3,
        ),
        Wrong(
            "no buffers but BatchNorm's",
            """
import torch
import torch.distributed as dist
def start_equal(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm1d):
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked):
                dist.broadcast(buffer, src=0)
""",
            3,
        ),
        Wrong(
            "only what state_dict() has",
            """
import torch.distributed as dist
def start_equal(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
""",
            3,
        ),
        Wrong(
            "the average of all ranks",
            """
import torch.distributed as dist
def start_equal(model):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
""",
            1,
        ),
        Wrong(
            "the same seed, drawn anew",
            """
import torch
def start_equal(model):
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.uniform_()
""",
            1,
        ),
        Wrong(
            "new parameters, which the optimizer does not know",
            """
import torch
import torch.distributed as dist
def start_equal(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            value = p.data.clone()
            dist.broadcast(value, src=0)
            setattr(module, name, torch.nn.Parameter(value, requires_grad=p.requires_grad))
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
""",
            3,
        ),
        Wrong(
            "only what is trained",
            """
import torch.distributed as dist
def start_equal(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.broadcast(p.data, src=0)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
""",
            1,
        ),
        Wrong(
            "rank 1's, not rank 0's",
            """
import torch.distributed as dist
def start_equal(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.data, src=1)
""",
            1,
        ),
        Wrong(
            "sums buffers and parameters",
            """
import torch.distributed as dist
def start_equal(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.all_reduce(tensor.data)
""",
            1,
        ),
    ),
)

TASKS = (RING, AVERAGE, START)
