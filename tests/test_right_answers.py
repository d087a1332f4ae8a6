"""Right answers in other styles than the solution's get all their points."""

import pytest
from test_tasks import findings_of

from course_utils.grading import get_task
from course_utils.grading.tasks import lesson_15

RIGHT = {
    "15-evaluate": (
        "adds up in a float32 tensor",
        """
import torch
def evaluate(model, batches, loss_fn):
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    total, samples = torch.tensor(0.0), 0
    try:
        with torch.no_grad():
            for b in batches:
                total += loss_fn(model, b) * len(b)
                samples += len(b)
    finally:
        for m, mode in modes:
            m.training = mode
    return (total / samples).item()
""",
    ),
    "15-leaks": (
        "adds up in a float32 tensor, without the graph",
        """
import torch
def total_loss(loss_of, batches):
    return torch.tensor([loss_of(each).item() for each in batches]).sum().item()
"""
        + "".join(source for name, source in lesson_15._MENDED.items() if name != "total_loss"),
    ),
    "16-accumulate": (
        "one pass for the mean, one for the gradient",
        """
import torch
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    parts = [(x[i:i + micro], y[i:i + micro]) for i in range(0, len(x), micro)]
    parts = [(part, count(part) / count(batch)) for part in parts if count(part)]
    with torch.no_grad():
        mean = sum(loss_fn(model, part).item() * share for part, share in parts)
    for part, share in parts:
        (loss_fn(model, part) * share).backward()
    return mean
""",
    ),
    "09-shards": (
        "asks a shape for its numel()",
        """
import torch
def shard(parameters, rank, n):
    flats = []
    for p in parameters:
        height = -(-p.shape[0] // n)
        whole = torch.cat([p, p.new_zeros(height * n - p.shape[0], *p.shape[1:])])
        flats.append(whole[rank * height:(rank + 1) * height].flatten())
    return torch.cat(flats)
def unshard(flats, shapes):
    n, start, wholes = len(flats), 0, []
    for shape in shapes:
        length = -(-shape[0] // n) * (shape.numel() // shape[0])
        together = torch.cat([flat[start:start + length] for flat in flats])
        wholes.append(together[:shape.numel()].view(shape))
        start += length
    return wholes
""",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_in_another_style_gets_everything(name):
    task, (style, source) = get_task(name), RIGHT[name]
    for seed in (1, 2026):
        found = findings_of(task, source, seed)
        assert [finding.why for finding in found if finding.why] == [], style
