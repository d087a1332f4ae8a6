"""Tasks of lesson 05: shares of a sampler, an exact accuracy, accumulation weighted by count."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, close, count, describe, is_list, is_number, item

# --- 05-shards --------------------------------------------------------------------------


def _shard_inputs(seed: int) -> dict:
    rng = random.Random(seed)

    def case(about, n, ranks, ending):
        return {"about": about, "order": rng.sample(range(100), n), "ranks": ranks, "end": ending}

    return {
        "shares": [
            case("pad", 10, 4, "pad"),
            case("pad", 9, 3, "pad"),
            case("pad", rng.choice([13, 16]), 5, "pad"),
            case("few", 2, 5, "pad"),
            case("few", 3, 8, "pad"),
            case("drop", 11, 4, "drop"),
            case("drop", 8, 2, "drop"),
            case("all", rng.choice([7, 10]), 4, "all"),
            case("all", 2, 3, "all"),
        ],
        "n": rng.randint(20, 25),
        "seed": rng.randint(1, 1000),
    }


def _shard_run(student, inputs: dict) -> dict:
    """Every rank's share of each case; the orders as two real ranks see them."""
    from course_utils.launch import RankError, launch

    epoch_order, n, seed = student.epoch_order, inputs["n"], inputs["seed"]

    def orders():
        import builtins
        import random

        import numpy
        import torch
        import torch.distributed as dist

        rank, plain_hash = dist.get_rank(), builtins.hash

        def has_text(value):
            parts = value if isinstance(value, tuple | frozenset) else ()
            return isinstance(value, str | bytes) or any(has_text(part) for part in parts)

        def own_hash(value):  # of a text: another number in every process that torchrun starts
            return plain_hash(value) ^ (rank + 1 if has_text(value) else 0)

        def states():
            return [
                torch.get_rng_state().tolist(),
                random.getstate(),
                numpy.random.get_state()[1].tolist(),
            ]

        torch.manual_seed(rank)  # ranks need not have the same random numbers
        random.seed(rank)
        numpy.random.seed(rank)
        before, found = states(), []
        builtins.hash = own_hash
        try:
            for pair in (
                [(seed, 0), (seed, 1), (seed + 1, 0), (seed + 1, 1), (seed, 0)]
                + [(seed, late) for late in (10, 100, 1000, 10_000)]
                + [(0, 0), (0, 1), (1, 0), (1, 1)]
            ):
                order = epoch_order(n, *pair)
                good = isinstance(order, list)
                found.append([int(row) for row in order] if good else type(order).__name__)
        finally:
            builtins.hash = plain_hash
        return {"orders": found, "untouched": states() == before}

    missing, answer = 0, {"shares": None, "orders": None, "kept": []}
    try:
        shares = []
        for c in inputs["shares"]:
            orders_given = [list(c["order"]) for _ in range(c["ranks"])]
            shares.append(
                [student.share(o, r, c["ranks"], c["end"]) for r, o in enumerate(orders_given)]
            )
            answer["kept"].append(all(o == c["order"] for o in orders_given))
        answer["shares"] = shares
    except NotImplementedError:
        missing += 1
    try:
        answer["orders"] = launch(orders, 2, timeout=60)
    except RankError as error:
        if error.type_name != "NotImplementedError":
            raise
        missing += 1
    if missing == 2:
        raise NotImplementedError
    return answer


def _shard_expected(inputs: dict) -> list:
    """Place k of a rank is one place of the order, counted round and round."""
    answers = []
    for case in inputs["shares"]:
        order, ranks = case["order"], case["ranks"]
        n = len(order)
        rows = []
        for rank in range(ranks):
            length = {"pad": -(-n // ranks), "drop": n // ranks, "all": -(-(n - rank) // ranks)}
            places = [rank + k * ranks for k in range(length[case["end"]])]
            rows.append([order[place % n] for place in places])
        answers.append(rows)
    return answers


def _same_rows(got: Any, want: list) -> bool:
    return is_list(got, len(want)) and all(
        type(a) is int and a == b for a, b in zip(got, want, strict=True)
    )


def _share_why(case: dict, rows: Any, want: list, kept: Any) -> str:
    words = f'{len(case["order"])} samples on {case["ranks"]} ranks, "{case["end"]}": '
    for rank, goal in enumerate(want):
        row = item(rows, rank)
        if _same_rows(row, goal):
            continue
        if not is_list(row):
            return f"{words}rank {rank} got {describe(row)}, where a list was expected"
        if len(row) != len(goal):
            much = "few" if len(row) < len(goal) else "many"
            return f"{words}rank {rank} got too {much} samples"
        if sorted(map(str, row)) == sorted(map(str, goal)):
            return f"{words}rank {rank} got the right samples in another order"
        return f"{words}rank {rank} got samples that are not its own"
    if not is_list(rows, len(want)):
        return f"{words}there is no list for each rank"
    return "" if kept is True else f"{words}the caller's list `order` has changed"


def _orders_why(inputs: dict, orders: Any) -> str:
    n = inputs["n"]
    untouched = [item(item(orders, rank), "untouched") for rank in range(2)]
    orders = [item(item(orders, rank), "orders") for rank in range(2)]
    if not all(is_list(of_rank, 13) for of_rank in orders):
        return "not attempted yet"
    for of_rank in orders:
        for order in of_rank:
            if type(order) is str:
                return f"an order is of type {order}, where a list was expected"
        for order in of_rank:
            whole = is_list(order, n) and all(type(row) is int for row in order)
            if not whole or sorted(order) != list(range(n)):
                return "an order is not the numbers from 0 to n - 1, each once"
            steps = [(b - a) % n for a, b in zip(order, order[1:], strict=False)]
            if max(map(steps.count, steps)) > n // 2:
                return "an order is hardly mixed: most neighbours keep the same distance"
    if orders[0] != orders[1]:
        return "two ranks with the same seed and epoch have different orders"
    first, second, other, other_second, again, *late = orders[0][:9]
    if first != again:
        return "the same seed and epoch gave two different orders"
    if first == second or other == other_second:
        return "two epochs have the same order"
    if first == other or second == other_second:
        return "two seeds have the same order"
    if second == other:
        return "epoch 1 of one seed is epoch 0 of the next: mix them in another way"
    if other in late or len(set(map(tuple, [first, second, *late]))) < 6:
        return "a later epoch has the order of an early one, of this seed or of the next"
    if len(set(map(tuple, orders[0][9:]))) < 4:
        return "seeds 0 and 1, epochs 0 and 1: two of the four orders are alike"
    if untouched != [True, True]:
        return "it changes the rank's own random numbers, from which dropout draws"
    return ""


_SHARD_TEXTS = {
    "pad": '"pad": every rank gets the same number, from the front again',
    "few": '"pad" with fewer samples than ranks',
    "drop": '"drop": every rank gets the same number, none twice',
    "all": '"all": every sample once',
}


def _shard_judge(inputs: dict, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_SHARD_TEXTS, "")
    shares = item(got, "shares")
    for number, (case, want) in enumerate(zip(inputs["shares"], expected, strict=True)):
        about = case["about"]
        why[about] = why[about] or (
            _share_why(case, item(shares, number), want, item(item(got, "kept"), number))
            if is_list(shares)
            else "not attempted yet, or no list"
        )
    if is_list(shares) and len(shares) != len(expected):
        why = {about: text or "there are more shares than ranks" for about, text in why.items()}
    order = _orders_why(inputs, item(got, "orders"))
    return [
        *(Finding(text, 1, why[about]) for about, text in _SHARD_TEXTS.items()),
        Finding("the order: alike on all ranks, another one each epoch and seed", 1, order),
    ]


_GOOD_ORDER = """
def epoch_order(n, seed, epoch):
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(n, generator=generator).tolist()
"""
_GOOD_SHARE = """
def share(order, rank, ranks, ending):
    if ending == "pad":
        while len(order) % ranks:
            order = order + order[:ranks - len(order) % ranks]
    if ending == "drop":
        order = order[:len(order) // ranks * ranks]
    return order[rank::ranks]
"""

SHARDS = Task(
    id="05-shards",
    title="a sampler for many ranks",
    points=5,
    functions=("share", "epoch_order"),
    inputs=_shard_inputs,
    run=_shard_run,
    expected=_shard_expected,
    judge=_shard_judge,
    hints=(
        "First make the order as long as the ending asks, then give every rank its part. Only "
        "the first of the two depends on the ending. For the order: on what may it depend, so "
        "that all ranks find the same one without talking?",
        "`order[rank::ranks]` is a rank's part of any order. To pad, append samples from the "
        "front until the length can be divided; with fewer samples than ranks the front is not "
        "long enough in one go. A `torch.Generator` of your own, seeded by seed and epoch, "
        "draws the same permutation everywhere.",
        "Pad by repeating the order often enough and cutting it: the length is "
        "`math.ceil(len(order) / ranks) * ranks`. Drop by cutting at `len(order) // ranks * "
        "ranks`. For the order, `torch.randperm(n, generator=g)` with a g that was seeded by "
        "a number made from both, such as a million times the seed plus the epoch.",
    ),
    wrong=(
        Wrong(
            "blocks, not every ranks-th sample",
            """
import torch
def share(order, rank, ranks, ending):
    size = -(-len(order) // ranks) if ending != "drop" else len(order) // ranks
    if ending == "pad":
        order = order * ranks
    return order[rank * size:(rank + 1) * size]
"""
            + _GOOD_ORDER,
            2,
        ),
        Wrong(
            "pads once, which is too short for few samples",
            """
import torch
def share(order, rank, ranks, ending):
    if ending == "pad" and len(order) % ranks:
        order = order + order[:ranks - len(order) % ranks]
    if ending == "drop":
        order = order[:len(order) // ranks * ranks]
    return order[rank::ranks]
"""
            + _GOOD_ORDER,
            4,
        ),
        Wrong(
            "pads with the last sample",
            """
import torch
def share(order, rank, ranks, ending):
    if ending == "pad":
        while len(order) % ranks:
            order = order + order[-1:]
    if ending == "drop":
        order = order[:len(order) // ranks * ranks]
    return order[rank::ranks]
"""
            + _GOOD_ORDER,
            3,
        ),
        Wrong(
            "pads where every sample should come once",
            """
import torch
def share(order, rank, ranks, ending):
    if ending == "drop":
        order = order[:len(order) // ranks * ranks]
    while len(order) % ranks:
        order = order + order[:ranks - len(order) % ranks]
    return order[rank::ranks]
"""
            + _GOOD_ORDER,
            4,
        ),
        Wrong(
            "set_epoch forgotten: the order does not know the epoch",
            """
import torch
def epoch_order(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "each rank shuffles by itself",
            """
import torch
def epoch_order(n, seed, epoch):
    return torch.randperm(n).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "seed plus epoch, as DistributedSampler does",
            """
import torch
def epoch_order(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "seed and epoch multiplied",
            """
import torch
def epoch_order(n, seed, epoch):
    g = torch.Generator().manual_seed((seed + 1) * (epoch + 1))
    return torch.randperm(n, generator=g).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "seed and epoch by exclusive or",
            """
import torch
def epoch_order(n, seed, epoch):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed ^ epoch)).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "pads the caller's list",
            """
import torch
def share(order, rank, ranks, ending):
    if ending == "pad":
        while len(order) % ranks:
            order += order[:ranks - len(order) % ranks]
    if ending == "drop":
        order = order[:len(order) // ranks * ranks]
    return order[rank::ranks]
"""
            + _GOOD_ORDER,
            3,
        ),
        Wrong(
            "ten times the seed plus the epoch",
            """
import random
import torch
def epoch_order(n, seed, epoch):
    g = torch.Generator().manual_seed(10 * seed + epoch)
    return torch.randperm(n, generator=g).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "seeded by the hash of a text",
            """
import random
import torch
def epoch_order(n, seed, epoch):
    g = torch.Generator().manual_seed(hash(f"{seed},{epoch}") % 2**40)
    return torch.randperm(n, generator=g).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "a tensor, not a list",
            """
import random
import torch
def epoch_order(n, seed, epoch):
    g = torch.Generator().manual_seed(1_000_000 * seed + epoch)
    return torch.randperm(n, generator=g)
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "turned, not mixed",
            """
import random
import torch
def epoch_order(n, seed, epoch):
    first = random.Random(1_000_000 * seed + epoch).randrange(n)
    return [(first + k) % n for k in range(n)]
"""
            + _GOOD_SHARE,
            4,
        ),
        Wrong(
            "seeds the rank's own random numbers",
            """
import random
import torch
def epoch_order(n, seed, epoch):
    torch.manual_seed(1_000_000 * seed + epoch)
    return torch.randperm(n).tolist()
"""
            + _GOOD_SHARE,
            4,
        ),
    ),
)

# --- 05-accuracy ------------------------------------------------------------------------


def _accuracy_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about, n, right):
        scores, labels = [], []
        for hit in right:
            best, label = rng.sample(range(3), 2)
            row = [round(rng.uniform(0, 1), 3) for _ in range(3)]
            row[best] = round(rng.uniform(2, 3), 3)
            scores.append(row)
            labels.append(best if hit else label)
        return {"about": about, "scores": scores, "labels": labels}

    def hits(n):
        """Rank 0's samples (the even ones) are mostly right, rank 1's wrong."""
        right = [number % 2 == 0 for number in range(n)]
        right[rng.randrange(1, n // 2, 2)] = True
        return right

    even, odd = 2 * rng.randint(5, 8), 2 * rng.randint(5, 8) + 1
    return [
        case("even", even, hits(even)),
        case("odd", odd, hits(odd)),
        case("odd", odd + 2, hits(odd + 2)),
        case("one", 1, [True]),
    ]


def _accuracy_run(student, inputs: list) -> list:
    """Two real ranks evaluate each case; write down values, and rows that each model saw."""
    from course_utils.launch import LaunchTimeout, RankError, launch

    accuracy = student.accuracy

    def evaluate(case):
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"

        class Model(torch.nn.Module):
            rows = 0

            def forward(self, x):
                self.rows += len(x)
                return x

        model = Model()
        x = torch.tensor(case["scores"], device=device)
        y = torch.tensor(case["labels"], device=device)
        return {"value": accuracy(model, x, y), "rows": model.rows}

    answers = []
    for case in inputs:
        try:
            answers.append(launch(evaluate, 2, case, timeout=40))
        except LaunchTimeout:
            answers.append("the ranks waited for each other until the deadline")
        except RankError as error:
            if error.type_name == "NotImplementedError":
                raise NotImplementedError from None
            answers.append(f"rank {error.rank} raised {error.type_name}: {error.message}"[:200])
    return answers


def _accuracy_expected(inputs: list) -> list:
    """The share of rows whose largest score stands at the label, in plain numbers."""
    answers = []
    for case in inputs:
        pairs = zip(case["scores"], case["labels"], strict=True)
        answers.append(sum(max(row) == row[label] for row, label in pairs) / len(case["labels"]))
    return answers


_ACCURACY_TEXTS = {
    "even": "the accuracy, on every rank",
    "odd": "also where the samples cannot be shared out evenly",
    "one": "also where one rank has no sample",
}


def _accuracy_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why, rows_why = dict.fromkeys(_ACCURACY_TEXTS, ""), ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, about, n = item(got, number), case["about"], len(case["labels"])
        rows, many = [item(item(answer, rank), "rows") for rank in range(2)], count(n, "sample")
        for rank in range(2):
            value, problem = item(item(answer, rank), "value"), ""
            if type(answer) is str:
                problem = f"with {many}, {answer}"
            elif not is_number(value):
                problem = f"with {many} rank {rank} returned {describe(value)}, not a float"
            elif not close(value, want):
                much = "large" if value > want else "small"
                problem = f"with {many} the value on rank {rank} is too {much}"
            why[about] = why[about] or problem
        if not all(type(seen) is int for seen in rows) or not is_list(answer, 2):
            rows_why = rows_why or "the two ranks did not both return"
        elif sum(rows) != n:
            much = "few" if sum(rows) < n else "many"
            rows_why = rows_why or f"of {n} samples, too {much} went through the two models"
        elif max(rows) > -(-n // 2):
            rows_why = rows_why or f"of {n} samples, one rank had more than its share"
    if why["even"]:
        rows_why = "not judged until the accuracy is right"
    points = {"even": 1, "odd": 2, "one": 1}
    return [
        *(Finding(text, points[about], why[about]) for about, text in _ACCURACY_TEXTS.items()),
        Finding("each sample goes through one rank's model, once", 1, rows_why),
    ]


ACCURACY = Task(
    id="05-accuracy",
    title="an exact accuracy on two ranks",
    points=5,
    functions=("accuracy",),
    inputs=_accuracy_inputs,
    run=_accuracy_run,
    expected=_accuracy_expected,
    judge=_accuracy_judge,
    hints=(
        "Accuracies cannot be averaged, but two other numbers can be added up. Which?",
        "Each rank takes its own rows, without padding, and counts how many it gets right and "
        "how many it has. One all-reduce adds both counts; then every rank divides. A rank "
        "without a row calls the all-reduce too.",
        "Rows: `x[rank::ranks]`, and the same of y. Put the two counts into one tensor on "
        "`x.device`, `dist.all_reduce` it, and return the quotient of its two entries as a "
        "float, with `.item()` of each.",
    ),
    wrong=(
        Wrong(
            "padded by DistributedSampler",
            """
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler
def accuracy(model, x, y):
    rows = list(DistributedSampler(range(len(x)), shuffle=False))
    right = (model(x[rows]).argmax(1) == y[rows]).sum().item()
    both = torch.tensor([right, len(rows)], device=x.device)
    dist.all_reduce(both)
    return both[0].item() / both[1].item()
""",
            2,
        ),
        Wrong(
            "the mean of the ranks' accuracies",
            """
import torch
import torch.distributed as dist
def accuracy(model, x, y):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = (model(x[rank::ranks]).argmax(1) == y[rank::ranks]).float().mean()
    dist.all_reduce(mine)
    return mine.item() / ranks
""",
            2,
        ),
        Wrong(
            "every rank evaluates everything",
            """
def accuracy(model, x, y):
    return (model(x).argmax(1) == y).float().mean().item()
""",
            4,
        ),
        Wrong(
            "its own share only",
            """
import torch.distributed as dist
def accuracy(model, x, y):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return (model(x[rank::ranks]).argmax(1) == y[rank::ranks]).float().mean().item()
""",
            0,
        ),
        Wrong(
            "the rest is dropped",
            """
import torch
import torch.distributed as dist
def accuracy(model, x, y):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    n = len(x) // ranks * ranks
    right = (model(x[rank:n:ranks]).argmax(1) == y[rank:n:ranks]).sum()
    dist.all_reduce(right)
    return right.item() / n
""",
            1,
        ),
        Wrong(
            "divided by the number of this rank's samples times the ranks",
            """
import torch.distributed as dist
def accuracy(model, x, y):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    right = (model(x[rank::ranks]).argmax(1) == y[rank::ranks]).sum()
    dist.all_reduce(right)
    return right.item() / (len(x[rank::ranks]) * ranks)
""",
            1,
        ),
    ),
    self_reported=1,
)

# --- 05-accumulate ----------------------------------------------------------------------


def _accumulate_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about, *sizes):
        """sizes: of each rank, the number of samples of each of its micro-batches."""

        def sample():
            return [round(rng.uniform(0.5, 2), 3) for _ in range(3)]  # two inputs, one target

        pieces = [[[sample() for _ in range(size)] for size in of_rank] for of_rank in sizes]
        weight = [round(rng.uniform(2, 3), 3) for _ in range(2)]
        return {"about": about, "weight": weight, "pieces": pieces}

    more = rng.randint(4, 6)
    return [
        case("equal", [3, 3, 3], [3, 3, 3]),
        case("pieces", [5, 1, 2], [2, 2, 4]),
        case("ranks", [2, more, 1], [4, more, more]),
        case("ranks", [more, more], [1, 2]),
        case("ranks", [2, 3, 1], [more]),
        case("alone", [3, 1, 2]),
    ]


def _accumulate_run(student, inputs: list) -> list:
    """Real ranks accumulate; write down each one's gradient, passes and DDP's messages."""
    import time

    from course_utils.launch import LaunchTimeout, RankError, launch

    accumulate = student.accumulate

    def gradients(case):
        from datetime import timedelta

        import torch
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64, device=device)
        model.weight.data.copy_(torch.tensor([case["weight"]], dtype=torch.float64))
        ddp, messages = torch.nn.parallel.DistributedDataParallel(model), []

        def hook(state, bucket):
            messages.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        ddp.register_comm_hook(None, hook)
        events, pieces = [], []
        model.register_forward_pre_hook(lambda module, inputs: events.append(len(inputs[0])))
        model.weight.register_hook(lambda grad: events.append(0))  # a backward pass
        for rows in case["pieces"][dist.get_rank()]:
            numbers = torch.tensor(rows, dtype=torch.float64, device=device)
            pieces.append((numbers[:, :2], numbers[:, 2:]))
        accumulate(ddp, pieces, torch.nn.functional.mse_loss)
        # A rank that is done cannot answer any more, so what the others still wait for is lost.
        store = dist.distributed_c10d._get_default_store()
        store.set(f"accumulated {dist.get_rank()}", "yes")
        everyone = [f"accumulated {rank}" for rank in range(dist.get_world_size())]
        try:
            store.wait(everyone, timedelta(seconds=2.5))
        except RuntimeError:  # what a FileStore raises when the time is up
            raise RuntimeError("accumulated alone") from None
        grad = model.weight.grad
        return {
            "grad": None if grad is None else grad.flatten().tolist(),
            "messages": len(messages),
            "events": events,
        }

    answers, talkative, stuck, deadline = [], False, "", 15
    for case in inputs:
        if stuck:
            answers.append(stuck)
            continue
        try:
            sizes = [len(of_rank) for of_rank in case["pieces"]]
            if len(set(sizes)) > 1 and talkative:  # it would only wait for the deadline
                answers.append(
                    "a message a micro-batch: ranks with fewer would keep others waiting"
                )
                continue
            begun = time.monotonic()
            answers.append(launch(gradients, len(sizes), case, timeout=deadline))
            # Thirty times what the last case took: a slow machine, or a GPU, gets all 15 s.
            deadline = min(15, max(6, 30 * (time.monotonic() - begun)))
            talkative = talkative or any(of_rank["messages"] > 1 for of_rank in answers[-1])
        except LaunchTimeout:
            stuck = "the ranks waited for each other until the deadline"
            answers.append(stuck)
        except RankError as error:
            if error.type_name == "NotImplementedError":
                raise NotImplementedError from None
            if error.message == "accumulated alone":
                stuck = "one rank was done, and another still waited for a message"
                answers.append(stuck)
                continue
            answers.append(f"rank {error.rank} raised {error.type_name}: {error.message}"[:200])
    return answers


def _accumulate_expected(inputs: list) -> list:
    """The gradient of the mean squared error over all samples of all ranks, by hand."""
    answers = []
    for case in inputs:
        samples = [row for of_rank in case["pieces"] for piece in of_rank for row in piece]
        (v, w), grad = case["weight"], [0.0, 0.0]
        for a, b, target in samples:
            error = v * a + w * b - target
            grad[0] += 2 * error * a / len(samples)
            grad[1] += 2 * error * b / len(samples)
        answers.append(grad)
    return answers


_ACCUMULATE_TEXTS = {
    "equal": "the gradient of one device, all micro-batches of one size",
    "pieces": "also with micro-batches of different sizes",
    "ranks": "also where the ranks have different numbers of samples, and on one rank alone",
}


def _gradient_why(answer: Any, want: list, ranks: int) -> str:
    on = "on two ranks" if ranks == 2 else "on one rank alone"
    if type(answer) is str:
        return f"{on}: {answer}" if answer else "the ranks did not all return"
    for rank in range(ranks):
        grad = item(item(answer, rank), "grad")
        if grad is None:
            return f"{on}: rank {rank} has no gradient"
        if not is_list(grad, 2) or not all(is_number(number) for number in grad):
            return f"{on}: the gradient of rank {rank} is not made of two numbers"
        if not all(close(a, b, relative=1e-6) for a, b in zip(grad, want, strict=True)):
            if item(item(answer, rank), "messages") == 0:
                return f"{on}: DDP sent no message, so each rank has a gradient of its own"
            ratios = [a / b for a, b in zip(grad, want, strict=True)]
            if abs(ratios[0] - ratios[1]) < 1e-6 * abs(ratios[0]):
                return f"{on}: the gradient has the right direction and a wrong length"
            return f"{on}: the gradient points elsewhere: how much does each sample weigh?"
    return "" if is_list(answer, ranks) else "the ranks did not all return"


def _passes_why(answer: Any, of_rank: list, rank: int) -> str:
    messages, events = (item(item(answer, rank), key) for key in ("messages", "events"))
    whole = type(messages) is int and type(events) is list
    if not whole or not all(type(event) is int for event in events):
        return "the ranks did not all return"
    sizes = [len(piece) for piece in of_rank]
    if sorted(size for size in events if size) != sorted(sizes):
        return "the model did not get the micro-batches one by one, each once"
    if events[1::2] != [0] * len(sizes):
        return "not every forward pass is followed by its backward pass"
    if messages != 1:
        times = "no message" if messages < 1 else "more than one message"
        return f"{times} of DDP for {count(len(sizes), 'micro-batch', 'micro-batches')}"
    return ""


def _accumulate_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why, passes_why = dict.fromkeys(_ACCUMULATE_TEXTS, ""), ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, ranks = item(got, number), len(case["pieces"])
        about = "ranks" if case["about"] == "alone" else case["about"]
        why[about] = why[about] or _gradient_why(answer, want, ranks)
        for rank, of_rank in enumerate(case["pieces"]):
            passes_why = passes_why or _passes_why(answer, of_rank, rank)
    if why["equal"]:
        passes_why = "not judged until the gradient is right"
    points = {"equal": 1, "pieces": 1, "ranks": 2}
    return [
        *(Finding(text, points[about], why[about]) for about, text in _ACCUMULATE_TEXTS.items()),
        Finding("micro-batches go one by one, and DDP sends one message", 1, passes_why),
    ]


ACCUMULATE = Task(
    id="05-accumulate",
    title="accumulation weighted by count",
    points=5,
    functions=("accumulate",),
    inputs=_accumulate_inputs,
    run=_accumulate_run,
    expected=_accumulate_expected,
    judge=_accumulate_judge,
    hints=(
        "Every sample of every rank should weigh the same. What does `loss_fn` divide by, what "
        "does DDP divide by, and what should the sum of all samples be divided by?",
        "First all-reduce the number of samples. Then multiply each micro-batch's mean by its "
        "own count and by the number of ranks, and divide by the count of all. Forward and "
        "backward stand within `ddp.no_sync()`, but for the last micro-batch.",
        "`count = torch.tensor(sum(len(x) for x, y in pieces), device=...)`, all-reduced. For "
        "each piece: `with ddp.no_sync() if it is not the last else nullcontext():`, then "
        "`loss_fn(ddp(x), y)` times `len(x) * get_world_size() / count`, and backward.",
    ),
    wrong=(
        Wrong(
            "divided by the number of micro-batches",
            """
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    for number, (x, y) in enumerate(pieces, 1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            (loss_fn(ddp(x), y) / len(pieces)).backward()
""",
            2,
        ),
        Wrong(
            "weighted by this rank's count only",
            """
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = sum(len(x) for x, y in pieces)
    for number, (x, y) in enumerate(pieces, 1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            (loss_fn(ddp(x), y) * len(x) / count).backward()
""",
            3,
        ),
        Wrong(
            "not divided at all",
            """
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    for number, (x, y) in enumerate(pieces, 1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            loss_fn(ddp(x), y).backward()
""",
            0,
        ),
        Wrong(
            "forgets that DDP divides by the ranks",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    for number, (x, y) in enumerate(pieces, 1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            (loss_fn(ddp(x), y) * len(x) / count).backward()
""",
            0,
        ),
        Wrong(
            "a message for each micro-batch",
            """
import torch
import torch.distributed as dist
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    for x, y in pieces:
        (loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / count).backward()
""",
            2,
        ),
        Wrong(
            "no_sync around backward only",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    for number, (x, y) in enumerate(pieces, 1):
        loss = loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / count
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            loss.backward()
""",
            2,
        ),
        Wrong(
            "no_sync for all of them",
            """
import torch
import torch.distributed as dist
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    with ddp.no_sync():
        for x, y in pieces:
            (loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / count).backward()
""",
            0,
        ),
        Wrong(
            "all micro-batches in one",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    x, y = (torch.cat(tensors) for tensors in zip(*pieces))
    (loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / count).backward()
""",
            4,
        ),
        Wrong(
            "the losses added up, one backward",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    losses = [loss_fn(ddp(x), y) * len(x) for x, y in pieces]
    (sum(losses) * dist.get_world_size() / count).backward()
""",
            4,
        ),
        Wrong(
            "written for two ranks",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    dist.all_reduce(count)
    for number, (x, y) in enumerate(pieces, 1):
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            (loss_fn(ddp(x), y) * len(x) * 2 / count).backward()
""",
            3,
        ),
        Wrong(
            "counts again for each micro-batch",
            """
import torch
import torch.distributed as dist
from contextlib import nullcontext
def accumulate(ddp, pieces, loss_fn):
    count = torch.tensor(sum(len(x) for x, y in pieces), device=pieces[0][0].device)
    for number, (x, y) in enumerate(pieces, 1):
        total = count.clone()
        dist.all_reduce(total)
        with ddp.no_sync() if number < len(pieces) else nullcontext():
            (loss_fn(ddp(x), y) * len(x) * dist.get_world_size() / total).backward()
""",
            2,
        ),
    ),
    self_reported=1,
)

TASKS = (SHARDS, ACCURACY, ACCUMULATE)
