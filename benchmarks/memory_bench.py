"""What the meters say of the same two training steps: the budget, its prediction, a GPU's own.

    python benchmarks/memory_bench.py        # writes results/memory.json

Each model makes two steps with 32 samples, so the optimizer's state is there in the second. The
peak of the two steps is counted by the budget on the CPU, predicted without computing (fake
tensors), and, where there is a GPU, measured there as torch.cuda.max_memory_allocated. The aim
is 5 % between the CPU's figures and the GPU's.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.models import MODELS, OPTIMIZERS  # noqa: E402
from course_utils import memory  # noqa: E402

BATCH = 32


def peak(meter: Any, name: str, optimizer: str, device: str) -> int:
    """Bytes at the peak of two training steps, by this meter."""
    case = MODELS[name]
    with meter:
        torch.manual_seed(0)
        with torch.device(device):
            model = case.build()
        steps = OPTIMIZERS[optimizer](model.parameters())
        meter.reset()
        for _ in range(2):
            steps.zero_grad()
            case.loss_fn(model, case.make_batch(BATCH, device)).backward()
            steps.step()
        found = meter.peak
    return found


def target(what: str, rows: list[dict], one: str, other: str) -> dict:
    """How far the two figures lie apart, at worst and in how many cases within 5 %."""
    apart = {row["model"]: abs(row[one] / row[other] - 1) for row in rows}
    near = sum(abs(row[one] / row[other] - 1) <= 0.05 for row in rows)
    worst = max(apart, key=lambda model: apart[model])
    measured = f"{near} of {len(rows)} cases; at worst {apart[worst]:.0%} ({worst})"
    return common.target(what, "within 5 %", measured, near == len(rows))


def main() -> None:
    gpu = torch.cuda.is_available()
    rows = []
    for name in MODELS:
        for optimizer in OPTIMIZERS:
            row = {"model": name, "optimizer": optimizer}
            row["budget"] = peak(memory.Budget(), name, optimizer, "cpu")
            row["predicted"] = peak(memory.Fake(), name, optimizer, "cpu")
            if gpu:
                row["cuda"] = peak(memory.Cuda(), name, optimizer, "cuda")
            rows.append(row)
            print(row, flush=True)
    head = ["model", "optimizer", "budget", "predicted", "difference"]
    table = [
        [row["model"], row["optimizer"], memory.size(row["budget"]), memory.size(row["predicted"]),
         f"{row['predicted'] / row['budget'] - 1:+.2%}"]
        + ([memory.size(row["cuda"]), f"{row['budget'] / row['cuda'] - 1:+.2%}"] if gpu else [])
        for row in rows
    ]  # fmt: skip
    targets = [target("prediction against the budget", rows, "predicted", "budget")]
    if gpu:
        head += ["on the GPU", "budget against it"]
        targets.append(target("budget against the GPU", rows, "budget", "cuda"))
    note = (
        "Peaks are bytes of tensors, not of the process. The prediction knows PyTorch's own "
        "kernels; what oneDNN reserves on this CPU (for an LSTM, for transposed convolutions) it "
        "does not see. "
    )
    note += "" if gpu else "Against a GPU's own allocator: not measured, there was none."
    common.write(
        "memory", "Peak of two training steps, by meter", 0.0, rows, targets,
        table={"head": head, "rows": table}, note=note,
    )  # fmt: skip


if __name__ == "__main__":
    main()
