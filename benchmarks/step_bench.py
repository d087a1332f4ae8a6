"""What a safe step costs when memory suffices, and what it leaves behind when it does not.

The same steps by hand (clear, forward, backward, step, read the loss) and by `SafeStep`, taking
turns; the overhead is the quotient within each round. What the safe step does beside: it keeps
random numbers and buffers, splits, weighs and counts. `numpy.random` is loaded, as it is in most
programs: reading its state is the largest part. The budget's price is stated apart: a GPU's
allocator counts by itself. Then 100 batches that do not fit.
"""

import contextlib
import io
from collections.abc import Callable

from benchmarks.common import quietest, row, target, write
from course_utils import memory
from course_utils.timing import Comparison, compare
from course_utils.training import SafeStep

HAND, SAFE = "by hand", "safe step"
HAND_METER, SAFE_METER = "by hand, under a budget", "safe step, under a budget"
TARGET = 1.01
OOMS = 100
BLOCK_SECONDS = 0.05  # one measurement runs so many steps as this takes


def models() -> dict[str, Callable]:
    """Name -> function that makes (model, batch), from a step of a millisecond upwards."""
    import torch
    from torch import nn

    def mlp(width: int, rows: int):
        model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        return model, (torch.randn(rows, 64), torch.randint(0, 10, (rows,)))

    def cnn(channels: int, rows: int):
        layers: list[nn.Module] = []
        for i in (3, channels, channels):
            layers += [nn.Conv2d(i, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
        model = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
        )
        return model, (torch.randn(rows, 3, 32, 32), torch.randint(0, 10, (rows,)))

    def transformer(width: int, rows: int):
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        model = nn.Sequential(
            nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Flatten(),
            nn.Linear(32 * width, 10),
        )  # fmt: skip
        return model, (torch.randn(rows, 32, width), torch.randint(0, 10, (rows,)))

    return {
        "MLP, 64 wide, batch 32": lambda: mlp(64, 32),
        "MLP, 512 wide, batch 128": lambda: mlp(512, 128),
        "CNN with BatchNorm, 32 channels, batch 32": lambda: cnn(32, 32),
        "transformer, 128 wide, batch 32": lambda: transformer(128, 32),
    }


def loss_fn(model, batch):
    import torch

    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def steps_of(make: Callable, metered: bool) -> dict[str, Callable]:
    """One step by hand and one by SafeStep, each with a model of its own."""
    import torch

    def ready():
        torch.manual_seed(0)
        model, batch = make()
        return model, torch.optim.Adam(model.parameters()), batch

    model, optimizer, batch = ready()

    def by_hand():
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    safe_model, safe_optimizer, safe_batch = ready()
    step = SafeStep(safe_model, safe_optimizer, loss_fn, allow_batchnorm=True)

    def safe():
        return step(safe_batch).loss

    for _ in range(3):  # otherwise the times mean nothing
        torch.testing.assert_close(by_hand(), safe(), rtol=0, atol=0)
    if not metered:
        return {HAND: by_hand, SAFE: safe}
    meters = (
        memory.meter(model, optimizer, batch),
        memory.meter(safe_model, safe_optimizer, safe_batch),
    )

    def under(meter, run):
        def metered_run(steps: int):
            with meter:
                for _ in range(steps):
                    run()

        return metered_run

    return {HAND_METER: under(meters[0], by_hand), SAFE_METER: under(meters[1], safe)}


def measure(make: Callable, repeat: int) -> tuple[Comparison, int]:
    """All four taking turns; each measurement runs the same number of steps, which is returned."""
    plain = steps_of(make, metered=False)
    one = compare({HAND: plain[HAND]}, repeat=3)[HAND].median
    steps = max(1, round(BLOCK_SECONDS / one))

    def block(run):
        def many():
            for _ in range(steps):
                run()

        return many

    calls = {name: block(run) for name, run in plain.items()}
    for name, run in steps_of(make, metered=True).items():
        calls[name] = lambda run=run: run(steps)
    return compare(calls, repeat=repeat, warmup=1), steps


def growth_after_ooms(times: int = OOMS) -> int:
    """Bytes that are alive more after `times` batches that did not fit than before the first."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters())
    step = SafeStep(model, optimizer, loss_fn)
    batch = torch.randn(256, 64), torch.randint(0, 10, (256,))
    with memory.meter(model, optimizer, batch, limit=int(1.4 * memory.MiB)) as meter:
        with contextlib.redirect_stdout(io.StringIO()):
            step(batch)
            before, ooms = meter.live, 0
            while ooms < times:
                step.micro_batch = 256
                ooms += (retries := step(batch).retries)
                if not retries:
                    raise RuntimeError("the batch fitted: the limit is too wide for this benchmark")
        return meter.live - before


def main(repeat: int = 31) -> dict:
    import numpy.random  # noqa: F401
    import torch

    torch.set_num_threads(1)  # one core is one device
    rows, targets, others, extra = [], [], [], []
    for name, make in models().items():
        (found, steps), percent = quietest(lambda make=make: measure(make, repeat))
        others.append(percent)
        ratio, metered = found.ratio(SAFE, HAND), found.ratio(SAFE_METER, HAND_METER)
        price = found.ratio(HAND_METER, HAND)
        print(f"{name}, {steps} steps a run\n{found}", flush=True)
        print(f"safe ÷ by hand: {ratio.median:.4f} ({ratio.low:.4f}–{ratio.high:.4f})")
        print(f"under a budget {metered.median:.4f}; the budget {price.median:.2f}×\n", flush=True)
        for each in found:
            rows.append(row(f"{name}: {each}, {steps} steps", found[each], steps=steps,
                            other_work_percent=percent))  # fmt: skip
        milliseconds = 1000 * found[HAND].median / steps
        extra.append((ratio.median - 1) * milliseconds)
        for what, share in ((SAFE, ratio), (SAFE_METER, metered)):
            targets.append(
                target(
                    f"{what} ÷ by hand, {name} ({milliseconds:.1f} ms a step)",
                    "at most 1.01" if what == SAFE else "stated only: the budget slows both",
                    f"{share.median:.4f} ({share.low:.4f}–{share.high:.4f})",
                    share.median <= TARGET or what == SAFE_METER,
                )
            )
    growth = growth_after_ooms()
    targets.append(
        target(f"live bytes after {OOMS} times out of memory", "0 more", f"{growth}", growth == 0)
    )
    title = "One training step: by hand and safe against out of memory"
    note = (
        f"The price of a safe step is the same for every model, {extra[0]:.2f} ms here (by the "
        f"smallest, where it shows best): 1 % from steps of {100 * extra[0]:.0f} ms on. Half of it "
        "or more is reading NumPy's, Python's and torch's random states before the step."
    )
    return write("step", title, max(others), rows, targets, note=note)


if __name__ == "__main__":
    main()
