"""The practice task of lesson 00, in which learners meet `check` and `hint`."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, is_list, is_number, item


def _inputs(seed: int) -> list[list[int]]:
    """Pairs of (global batch, world size): one that divides, and others that do not."""
    draw = random.Random(seed)
    world = draw.randint(3, 6)
    return [[8, 2], [10, 4], [world * 7 + draw.randint(1, world - 1), world]]


def _run(student: Any, inputs: list[list[int]]) -> list[Any]:
    return [student.local_batches(batch, world) for batch, world in inputs]


def _expected(inputs: list[list[int]]) -> list[dict[str, int]]:
    return [{"ranks": world, "samples": batch} for batch, world in inputs]


def _judge(inputs: Any, expected: list[dict[str, int]], got: Any) -> list[Finding]:
    shapes = sums = fair = ""
    for number, ((batch, world), case) in enumerate(zip(inputs, expected, strict=True)):
        sizes, call = item(got, number), f"for {batch} samples on {world} ranks"
        if not is_list(sizes, case["ranks"]) or not all(is_number(size) for size in sizes):
            problem = f"{call} this is not a list with one number for each rank"
            shapes, sums, fair = shapes or problem, sums or problem, fair or problem
            continue
        if any(size != int(size) for size in sizes):
            shapes = shapes or f"{call} a sample is split: one of the numbers is not whole"
        if abs(sum(sizes) - case["samples"]) > 1e-6:  # 22 / 5, five times, is not quite 22
            sums = sums or f"{call} the numbers add up to {sum(sizes):g}"
        if max(sizes) - min(sizes) > 1:
            fair = fair or f"{call} two ranks differ by more than one sample"
    return [
        Finding("one whole number for each rank", 1, shapes),
        Finding("no sample is lost or invented", 2, sums),
        Finding("batches differ by at most one sample", 1, fair),
    ]


TASKS = (
    Task(
        id="00-practice",
        title="samples for each rank",
        points=4,
        functions=("local_batches",),
        inputs=_inputs,
        run=_run,
        expected=_expected,
        judge=_judge,
        hints=(
            "Try 10 samples on 4 ranks with a pencil. How many samples go to no rank?",
            "The remainder of the division, `global_batch % world_size`, is smaller than the "
            "number of ranks. So that many ranks can take one sample more.",
            "For each rank: the whole part, plus 1 if `rank < global_batch % world_size`.",
        ),
        wrong=(
            Wrong(
                "the remainder is lost",
                "def local_batches(global_batch, world_size):\n"
                "    return [global_batch // world_size] * world_size\n",
                2,
            ),
            Wrong(
                "the last rank takes the whole remainder",
                "def local_batches(global_batch, world_size):\n"
                "    sizes = [global_batch // world_size] * world_size\n"
                "    sizes[-1] += global_batch % world_size\n"
                "    return sizes\n",
                3,
            ),
            Wrong(
                "samples are split",
                "def local_batches(global_batch, world_size):\n"
                "    return [global_batch / world_size] * world_size\n",
                3,
            ),
            Wrong(
                "rounded up everywhere",
                "def local_batches(global_batch, world_size):\n"
                "    return [-(-global_batch // world_size)] * world_size\n",
                2,
            ),
        ),
    ),
)
