"""Tasks of lesson 07: iterations of an epoch, efficiency from a table, disjoint data on ranks."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, close, count, describe, is_list, item

# --- 07-iterations ----------------------------------------------------------------------


def _iteration_inputs(seed: int) -> list:
    rng = random.Random(seed)
    cases = []
    for drop_last in (False, True):
        # plain: the last batch is short. padded: the images that the sampler repeats fill it.
        # more: a single batch more than full ones, which only the sampler's rounding up gives.
        for kind in ("plain", "plain", "padded", "padded", "more", "more", "exact", "tiny"):
            devices, batch = rng.randint(2, 6), rng.randint(5, 130)
            full = rng.randint(3, 40)
            n = devices * batch * full
            if kind == "plain":
                n += devices * rng.randint(1, batch - 2)
            elif kind == "padded":
                n -= rng.randint(1, devices - 1)
            elif kind == "more":
                n += rng.randint(1, devices - 1)
            elif kind == "tiny":
                n = devices * rng.randint(2, batch - 1)
            cases.append(
                {"n": n, "devices": devices, "batch": batch, "drop_last": drop_last, "kind": kind}
            )
    cases.append({"n": 6472, "devices": 3, "batch": 128, "drop_last": False, "kind": "plain"})
    cases.append({"n": 1, "devices": 3, "batch": 1, "drop_last": True, "kind": "padded"})
    return cases


def _iteration_run(student, inputs: list) -> list:
    return [
        student.iterations(case["n"], case["devices"], case["batch"], case["drop_last"])
        for case in inputs
    ]


def _iteration_expected(inputs: list) -> list:
    """Dealt out one by one, as a sampler does, then filled into batches one by one."""
    answers = []
    for case in inputs:
        dealt = list(range(case["n"]))
        while len(dealt) % case["devices"]:
            dealt.append(len(dealt) % case["n"])
        mine = dealt[:: case["devices"]]
        batches = [mine[i : i + case["batch"]] for i in range(0, len(mine), case["batch"])]
        if case["drop_last"] and len(batches[-1]) < case["batch"]:
            batches.pop()
        answers.append(len(batches))
    return answers


def _iteration_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    parts = {
        "kept": "the last batch is kept",
        "dropped": "a short last batch is dropped",
        "padded": "with drop_last, images that the sampler repeats count too",
    }
    why = dict.fromkeys(parts, "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, number)
        part = "kept"
        if case["drop_last"]:
            part = "padded" if case["kind"] == "padded" else "dropped"
        where = (
            f"n = {case['n']}, devices = {case['devices']}, batch = {case['batch']}, "
            f"drop_last = {case['drop_last']}"
        )
        if type(answer) is float:
            text = f"for {where}: the type int was expected, not float"
        elif type(answer) is not int:
            text = f"for {where}: a whole number was expected, not {describe(answer)}"
        elif answer != want:
            text = f"for {where}: there are too {'many' if answer > want else 'few'}"
        else:
            continue
        why[part] = why[part] or text
    # An answer that ignores an argument may be right by chance for the others.
    if why["kept"]:
        for part in ("dropped", "padded"):
            why[part] = why[part] or "not judged until the counts with drop_last = False are right"
    return [Finding(text, 2 if part == "kept" else 1, why[part]) for part, text in parts.items()]


ITERATIONS = Task(
    id="07-iterations",
    title="iterations of one epoch on each device",
    points=4,
    functions=("iterations",),
    inputs=_iteration_inputs,
    run=_iteration_run,
    expected=_iteration_expected,
    judge=_iteration_judge,
    hints=(
        "Two things happen one after the other: the images are dealt out to the devices, then "
        "each device fills batches. Round in each of the two steps, not once at the end.",
        "The sampler gives each device the same number of images, and rounds up for it. Then the "
        "loader rounds up again, or down, which drop_last decides.",
        "mine = math.ceil(n / devices); then mine // batch with drop_last, and "
        "math.ceil(mine / batch) without.",
    ),
    wrong=(
        Wrong(
            "one division at the end",
            """
import math
def iterations(n, devices, batch, drop_last):
    whole = n / (devices * batch)
    return math.floor(whole) if drop_last else math.ceil(whole)
""",
            3,
        ),
        Wrong(
            "drop_last is ignored",
            """
def iterations(n, devices, batch, drop_last):
    mine = -(-n // devices)
    return -(-mine // batch)
""",
            3,
        ),
        Wrong(
            "the batch is taken for the global batch",
            """
def iterations(n, devices, batch, drop_last):
    return n // batch if drop_last else -(-n // batch)
""",
            0,
        ),
        Wrong(
            "the share is rounded down, as if the sampler left images out",
            """
import math
def iterations(n, devices, batch, drop_last):
    if drop_last:
        return math.ceil(n / devices) // batch
    return math.ceil((n // devices) / batch)
""",
            0,
        ),
        Wrong(
            "always rounded down",
            """
def iterations(n, devices, batch, drop_last):
    return n // devices // batch
""",
            0,
        ),
        Wrong(
            "not rounded",
            """
def iterations(n, devices, batch, drop_last):
    return n / devices / batch
""",
            0,
        ),
    ),
)

# --- 07-efficiency ----------------------------------------------------------------------


def _efficiency_inputs(seed: int) -> list:
    rng = random.Random(seed)
    tables = []
    for _ in range(3):
        one = {batch: round(rng.uniform(40, 90), 1) for batch in (32, 64, 128)}
        rows = [{"devices": 1, "batch": batch, "seconds": time} for batch, time in one.items()]
        for devices in (2, 3, 4):
            for batch in (*one, 256):
                time = one.get(batch, 50) / devices / rng.uniform(0.5, 0.95)
                rows.append({"devices": devices, "batch": batch, "seconds": round(time, 2)})
        rng.shuffle(rows)
        # A row of several devices comes first: the first row is not the one to compare with.
        rows.sort(key=lambda row: row["devices"] == 1)
        tables.append(rows)
    return tables


def _efficiency_run(student, inputs: list) -> list:
    return [student.efficiencies([dict(row) for row in rows]) for rows in inputs]


def _efficiency_expected(inputs: list) -> list:
    """What one device would have to do, over the device-seconds that were spent."""
    answers = []
    for rows in inputs:
        answer = []
        for row in rows:
            alone = [r for r in rows if (r["devices"], r["batch"]) == (1, row["batch"])]
            spent = row["seconds"] * row["devices"]
            answer.append(alone[0]["seconds"] / spent if alone else None)
        answers.append(answer)
    return answers


def _efficiency_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    right = alone = without = ""
    for table, (rows, want) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, table)
        if not is_list(answer, len(rows)):
            text = f"one entry for each of the {len(rows)} rows was expected, not "
            right = right or text + describe(answer)
            continue
        for row, value, goal in zip(rows, answer, want, strict=True):
            where = f"in the row of {count(row['devices'], 'device')}, batch {row['batch']}"
            if goal is None:
                if value is not None:
                    without = without or f"{where}: there is nothing to compare with"
            elif row["devices"] == 1:
                if not close(value, goal):
                    alone = alone or f"{where}: one device is compared with itself"
            elif not close(value, goal):
                others = [r["seconds"] for r in rows if r["devices"] == 1]
                hint = "neither the right number nor that of another row of one device"
                if close(value, goal * row["devices"]):
                    hint = "that is the speed-up"
                elif any(close(value, s / row["seconds"] / row["devices"]) for s in others):
                    hint = "compared with a row of another batch"
                elif close(value, goal, 0.02):
                    hint = "nearly right: rounded?"
                elif close(value, 1 / goal) or close(value, 1 / goal / row["devices"] ** 2):
                    hint = "a ratio is upside down"
                if value is None or not close(value, value):
                    hint = f"a number was expected, not {describe(value)}"
                right = right or f"{where}: {hint}"
    first = "not judged until the efficiencies of several devices are right"
    return [
        Finding("several devices: compared with one device at the same batch", 2, right),
        Finding("one device", 0.5, first if right else alone),
        Finding("None where no row can be compared with", 1.5, first if right else without),
    ]


EFFICIENCY = Task(
    id="07-efficiency",
    title="scaling efficiency from a table",
    points=4,
    functions=("efficiencies",),
    inputs=_efficiency_inputs,
    run=_efficiency_run,
    expected=_efficiency_expected,
    judge=_efficiency_judge,
    hints=(
        "Efficiency answers: of what the devices could have done, how much was done? Only two "
        "rows that differ in nothing but the number of devices can tell.",
        "First collect the seconds of the rows with one device, by batch. Then go through the "
        "rows: speed-up against the row of one device with the same batch, divided by devices.",
        "one = {row['batch']: row['seconds'] for row in rows if row['devices'] == 1}; for each "
        "row one[batch] / seconds / devices if batch is in one, else None.",
    ),
    wrong=(
        Wrong(
            "the speed-up, not divided by the devices",
            """
def efficiencies(rows):
    alone = {r["batch"]: r["seconds"] for r in rows if r["devices"] == 1}
    return [alone[r["batch"]] / r["seconds"] if r["batch"] in alone else None for r in rows]
""",
            0,
        ),
        Wrong(
            "compared with some row of one device, whatever its batch",
            """
def efficiencies(rows):
    alone = next(r["seconds"] for r in rows if r["devices"] == 1)
    return [alone / r["seconds"] / r["devices"] for r in rows]
""",
            0,
        ),
        Wrong(
            "rounded to two digits",
            """
def efficiencies(rows):
    one = {r["batch"]: r["seconds"] for r in rows if r["devices"] == 1}
    return [
        round(one[r["batch"]] / r["seconds"] / r["devices"], 2) if r["batch"] in one else None
        for r in rows
    ]
""",
            0,
        ),
        Wrong(
            "the ratio upside down",
            """
def efficiencies(rows):
    one = {r["batch"]: r["seconds"] for r in rows if r["devices"] == 1}
    return [
        r["seconds"] / one[r["batch"]] / r["devices"] if r["batch"] in one else None for r in rows
    ]
""",
            0,
        ),
        Wrong(
            "compared with the slowest row",
            """
def efficiencies(rows):
    alone = max(r["seconds"] for r in rows)
    return [alone / r["seconds"] / r["devices"] for r in rows]
""",
            0,
        ),
        Wrong(
            "another batch where there is none of the same",
            """
def efficiencies(rows):
    alone = {r["batch"]: r["seconds"] for r in rows if r["devices"] == 1}
    some = next(iter(alone.values()))
    return [alone.get(r["batch"], some) / r["seconds"] / r["devices"] for r in rows]
""",
            2.5,
        ),
        Wrong(
            "0 where there is nothing to compare with",
            """
def efficiencies(rows):
    alone = {r["batch"]: r["seconds"] for r in rows if r["devices"] == 1}
    return [alone.get(r["batch"], 0) / r["seconds"] / r["devices"] for r in rows]
""",
            2.5,
        ),
    ),
)

# --- 07-disjoint ------------------------------------------------------------------------


def _data_inputs(seed: int) -> list:
    rng = random.Random(seed)
    odd = 2 * rng.randint(60, 90) + 1
    # No batch that divides a rank's images: a loader's drop_last then always leaves some out.
    shares = (odd + 1) // 2, (odd + 5) // 2
    sizes = [size for size in range(7, 13) if all(share % size for share in shares)]
    return [
        {"first": rng.randint(100, 900), "n": odd, "batch": rng.choice(sizes)},
        {"first": rng.randint(1000, 2000), "n": odd + 5, "batch": rng.choice(sizes)},
    ]


def _data_run(student, inputs: list) -> list:
    """Two real ranks say which images they see, in two epochs, as a Trainer would ask them."""
    from course_utils.launch import launch

    kind = student.ShardedData

    def see(cases):
        import torch
        import torch.distributed as dist

        answers = []
        for case in cases:
            # Not the same on both ranks, as in any launch: who shuffles without a seed of his own
            # gives each rank another order.
            torch.manual_seed(case["first"] + dist.get_rank())
            images = torch.arange(case["first"], case["first"] + case["n"])
            data = kind(images, case["batch"])
            try:
                data.setup("fit")
                seen = {"train": []}
                loader = data.train_dataloader()
                for epoch in range(2):
                    if hasattr(loader.sampler, "set_epoch"):  # as Lightning's Trainer does
                        loader.sampler.set_epoch(epoch)
                    seen["train"].append([batch.tolist() for batch in loader])
                seen["validation"] = [batch.tolist() for batch in data.val_dataloader()]
            except NotImplementedError:
                return None
            except Exception as error:  # the student's: his own words reach him, not a rank's
                seen = {"error": f"your class raised {type(error).__name__}: {error}"[:300]}
            answers.append(seen)
        assert dist.get_world_size() == 2
        return answers

    ranks = launch(see, 2, inputs, oversubscribe=True)
    if None in ranks:
        raise NotImplementedError
    return [{"rank 0": first, "rank 1": second} for first, second in zip(*ranks, strict=True)]


def _data_expected(inputs: list) -> list:
    return [
        {"all": list(range(c["first"], c["first"] + c["n"])), "each": c["n"] // 2} for c in inputs
    ]


def _flat(batches: Any, size: int) -> list | None:
    """The images of a list of batches, or None where it is none, or a batch has a wrong size."""
    if not is_list(batches) or not batches:
        return None
    for batch in batches:
        if not is_list(batch) or not 1 <= len(batch) <= size:
            return None
        if len(batch) < size and batch is not batches[-1]:
            return None
        if not all(type(number) is int for number in batch):
            return None
    return [number for batch in batches for number in batch]


def _data_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    disjoint = equal = order = validation = ""
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        where = f"with {case['n']} images on two ranks"
        ranks = [item(item(got, number), f"rank {rank}") for rank in (0, 1)]
        raised = [e for e in (item(rank, "error") for rank in ranks) if isinstance(e, str)]
        if raised:
            disjoint, equal = disjoint or raised[0], equal or raised[0]
            order, validation = order or raised[0], validation or raised[0]
            continue
        epochs = [
            [_flat(item(item(rank, "train"), epoch), case["batch"]) for rank in ranks]
            for epoch in (0, 1)
        ]
        if any(shard is None for epoch in epochs for shard in epoch):
            text = f"{where}: train_dataloader does not give batches of `batch` images"
            disjoint, equal, order = disjoint or text, equal or text, order or text
        else:
            for first, second in epochs:
                both, known = set(first) & set(second), set(want["all"])
                if both:
                    text = f"{where}: both ranks train on {count(len(both), 'same image')}"
                    disjoint = disjoint or text
                elif len(set(first)) < len(first) or len(set(second)) < len(second):
                    disjoint = disjoint or f"{where}: a rank sees an image twice in an epoch"
                elif not set(first) | set(second) <= known:
                    disjoint = disjoint or f"{where}: there are images that were not given"
                if len(first) != len(second):
                    text = "so one rank may wait for the other for ever"
                    equal = equal or f"{where}: the ranks train on unequal numbers, {text}"
                elif len(first) != want["each"]:
                    words = "fewer" if len(first) < want["each"] else "more"
                    text = f"each rank trains on {words} images than its equal share"
                    equal = equal or f"{where}: {text}"
            if epochs[0] == epochs[1]:
                text = "both epochs have the same order, though set_epoch was called if possible"
                order = order or f"{where}: {text}"
            elif any(sorted(shard) == shard for epoch in epochs for shard in epoch):
                order = order or f"{where}: a rank's images are not shuffled"
        checks = [_flat(item(rank, "validation"), case["batch"]) for rank in ranks]
        if None in checks:
            text = f"{where}: val_dataloader does not give batches of `batch` images"
            validation = validation or text
        elif sorted(checks[0] + checks[1]) != want["all"]:
            twice = len(checks[0] + checks[1]) > len(set(checks[0] + checks[1]))
            text = "an image is counted twice" if twice else "some image is missing"
            validation = validation or f"{where}: {text} in validation"
    if disjoint:
        order = order or "not judged until the ranks train on different images"
        equal = equal or "not judged until the ranks train on different images"
    return [
        Finding("no image is trained on twice in an epoch", 2, disjoint),
        Finding("both ranks train on equally many, at most one image is left out", 1, equal),
        Finding("another order in the next epoch", 1, order),
        Finding("validation counts every image exactly once", 1, validation),
    ]


_HEAD = """
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
class ShardedData:
    def __init__(self, images, batch):
        super().__init__()
        self.images, self.batch = images, batch
    def setup(self, stage=None):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
"""

DISJOINT = Task(
    id="07-disjoint",
    title="a DataModule whose ranks see disjoint data",
    points=5,
    functions=("ShardedData",),
    inputs=_data_inputs,
    run=_data_run,
    expected=_data_expected,
    judge=_data_judge,
    hints=(
        "Two loaders, two needs: in training all ranks must have equally many images, even if one "
        "is left out; in validation each image counts once, even if one rank has one more.",
        "DistributedSampler deals out, shuffles, and obeys set_epoch; its own drop_last decides "
        "between repeating an image and leaving one out. For validation it cannot help: give "
        "DataLoader a sampler of your own; any sequence of positions will do.",
        "Training: DataLoader(self.images, self.batch, sampler=DistributedSampler(self.images, "
        "drop_last=True)). Validation: sampler=range(rank, len(self.images), world).",
    ),
    wrong=(
        Wrong(
            "ordinary loaders",
            _HEAD
            + """
    def train_dataloader(self):
        return DataLoader(self.images, self.batch, shuffle=True)
    def val_dataloader(self):
        return DataLoader(self.images, self.batch)
""",
            0,
        ),
        Wrong(
            "DistributedSampler everywhere: it repeats an image",
            _HEAD
            + """
    def train_dataloader(self):
        return DataLoader(self.images, self.batch, sampler=DistributedSampler(self.images))
    def val_dataloader(self):
        sampler = DistributedSampler(self.images, shuffle=False)
        return DataLoader(self.images, self.batch, sampler=sampler)
""",
            0,
        ),
        Wrong(
            "drop_last everywhere: validation loses an image",
            _HEAD
            + """
    def train_dataloader(self):
        sampler = DistributedSampler(self.images, drop_last=True)
        return DataLoader(self.images, self.batch, sampler=sampler)
    def val_dataloader(self):
        sampler = DistributedSampler(self.images, shuffle=False, drop_last=True)
        return DataLoader(self.images, self.batch, sampler=sampler)
""",
            4,
        ),
        Wrong(
            "a slice of its own for each rank, never shuffled, unequal",
            _HEAD
            + """
    def train_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            3,
        ),
        Wrong(
            "the loader's drop_last instead of the sampler's",
            _HEAD
            + """
    def train_dataloader(self):
        sampler = DistributedSampler(self.images)
        return DataLoader(self.images, self.batch, sampler=sampler, drop_last=True)
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            4,
        ),
        Wrong(
            "a shuffle without a seed: each rank draws another order",
            "import torch"
            + _HEAD
            + """
    def train_dataloader(self):
        rank, world, n = self.rank, self.world, len(self.images)
        class Shuffled:
            def __iter__(self):
                return iter(torch.randperm(n)[rank : n - n % world : world].tolist())
            def __len__(self):
                return n // world
        return DataLoader(self.images, self.batch, sampler=Shuffled())
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            1,
        ),
        Wrong(
            "the batch is taken for the global batch: half as large on each rank",
            _HEAD
            + """
    def train_dataloader(self):
        sampler = DistributedSampler(self.images, drop_last=True)
        return DataLoader(self.images, self.batch // 2, sampler=sampler)
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            1,
        ),
        Wrong(
            "a name that was not imported",
            _HEAD
            + """
    def train_dataloader(self):
        return DataLoader(Subset(self.images, range(self.rank, len(self.images), 2)), self.batch)
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            0,
        ),
        Wrong(
            "the same order in every epoch",
            _HEAD
            + """
    def train_dataloader(self):
        sampler = DistributedSampler(self.images, shuffle=False, drop_last=True)
        return DataLoader(self.images, self.batch, sampler=sampler)
    def val_dataloader(self):
        return DataLoader(self.images[self.rank :: self.world], self.batch)
""",
            4,
        ),
    ),
)

TASKS = (ITERATIONS, EFFICIENCY, DISJOINT)
