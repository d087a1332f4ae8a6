"""find_batch_size against its peers: the same models, the same limits, in one run.

    python benchmarks/batch_size_bench.py               # 48 cases, about 10 minutes on two cores
    python benchmarks/batch_size_bench.py --cases 6     # some of them, nothing is written

The limit is the budget of course_utils.memory, which every peer takes for a device that is out
of memory. Each core runs its share of the cases, on one thread; the methods of one case run on
the same core, one after the other. Each method gets a fresh model and a data set of 8192
samples, and its time includes everything but the imports. accelerate and toma start at 8192, as
their users do who want the largest; Lightning starts at 2, its own default.

- true maximum: the largest batch with which a fresh model makes two training steps below the
  limit (the second one is the larger: optimizers make their state in the first), by bisection,
  with the next larger batch seen to fail.
- trials: how many batch sizes a method tried, whatever it did with each.
- runs: whether two training steps with the returned size fit on a fresh model. The share of a
  size that does not run counts as 0, and so does that of a method that does not come back.
- changed: whether a bit of parameters, buffers, optimizer or random numbers differs afterwards.
"""

import argparse
import atexit
import gc
import itertools
import logging
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks import common  # noqa: E402
from benchmarks.models import MODELS, OPTIMIZERS, Case  # noqa: E402
from course_utils import memory  # noqa: E402
from course_utils.batch_size import find_batch_size  # noqa: E402
from course_utils.devices import census  # noqa: E402
from course_utils.launch import launch  # noqa: E402
from course_utils.memory import MiB  # noqa: E402

LIMITS = (32 * MiB, 64 * MiB, 128 * MiB)
SAMPLES = 8192
DEADLINE = 60  # seconds for one method on one case
OURS = "find_batch_size (ours)"


class Attempt:
    """A fresh model with its optimizer, and the batch sizes that were asked of it."""

    def __init__(self, case: Case, optimizer: str, limit: int) -> None:
        torch.manual_seed(0)
        self.case, self.limit = case, limit
        self.model = case.build()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.asked: list[int] = []

    def make_batch(self, n: int):
        if not self.asked or self.asked[-1] != n:
            self.asked.append(n)
        return self.case.make_batch(n)

    def step(self, n: int) -> None:
        self.optimizer.zero_grad()
        self.case.loss_fn(self.model, self.make_batch(n)).backward()
        self.optimizer.step()

    def meter(self) -> memory.Budget:
        return memory.meter(self.model, self.optimizer, limit=self.limit)

    def bits(self) -> list[bytes]:
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        state = self.optimizer.state_dict()["state"]
        tensors += [t for each in state.values() for t in each.values() if torch.is_tensor(t)]
        return [t.detach().numpy().tobytes() for t in tensors]


def fits(make: Callable[[], Attempt], n: int) -> bool:
    """Whether a fresh model makes two training steps with n samples below the limit."""
    attempt = make()
    failed = False
    with attempt.meter():
        try:
            attempt.step(n)
            attempt.step(n)
        except torch.OutOfMemoryError:
            failed = True
    return not failed


def true_maximum(make: Callable[[], Attempt]) -> int:
    low, high = 0, 1
    while high <= SAMPLES and fits(make, high):
        low, high = high, 2 * high
    high = min(high, SAMPLES + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(make, middle) else (low, middle)
    return low


# ---------------------------------------------------------------- the methods


def ours(attempt: Attempt) -> int:
    found = find_batch_size(
        attempt.model, attempt.optimizer, attempt.make_batch, attempt.case.loss_fn,
        limit=attempt.limit, max_batch=SAMPLES,
    )  # fmt: skip
    return found.batch_size


def accelerate(attempt: Attempt) -> int:
    from accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=SAMPLES)
    def train(batch_size: int) -> int:
        attempt.step(batch_size)
        return batch_size

    with attempt.meter():
        return train()


def toma_halving(attempt: Attempt) -> int:
    from toma import toma

    found = []

    @toma.batch(initial_batchsize=SAMPLES)
    def train(batchsize: int) -> None:
        attempt.step(batchsize)
        found.append(batchsize)

    with attempt.meter():
        train()
    return found[-1]


def lightning(mode: str) -> Callable[[Attempt], int]:
    def run(attempt: Attempt) -> int:
        import pytorch_lightning as pl
        from pytorch_lightning.tuner import Tuner

        class Samples(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return SAMPLES

            def __getitems__(self, indices: list[int]):  # a whole batch at once: no slow collating
                return attempt.make_batch(len(indices))

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.batch_size = 2
                self.model = attempt.model

            def training_step(self, batch, _):
                return attempt.case.loss_fn(self.model, batch)

            def configure_optimizers(self):
                return attempt.optimizer

            def train_dataloader(self):
                return torch.utils.data.DataLoader(
                    Samples(), batch_size=self.batch_size, collate_fn=lambda batch: batch
                )

        folder = tempfile.mkdtemp()  # where it keeps the model while it tries
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        )  # fmt: skip
        with attempt.meter():
            return Tuner(trainer).scale_batch_size(Module(), mode=mode, max_trials=25)

    return run


METHODS = {
    OURS: ours,
    "accelerate, from 8192": accelerate,
    "toma, from 8192": toma_halving,
    "Lightning, power": lightning("power"),
    "Lightning, binsearch": lightning("binsearch"),
}


# ---------------------------------------------------------------- one case, all cases


class TooLong(Exception):
    pass


def _too_long(*_: object) -> None:
    raise TooLong


def measure(make: Callable[[], Attempt], method: Callable[[Attempt], int], largest: int) -> dict:
    attempt = make()
    before = attempt.bits()
    gc.collect()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(DEADLINE)
    start = time.perf_counter()
    found, error = 0, ""
    try:
        found = int(method(attempt))
    except TooLong:
        error = f"did not come back within {DEADLINE} s"
    except Exception as reason:  # that a peer fails is a result, not a fault of the benchmark
        error = f"{type(reason).__name__}: {str(reason).splitlines()[0][:120]}"
    finally:
        signal.alarm(0)
    seconds = time.perf_counter() - start
    runs = bool(found) and (found <= largest or fits(make, found))
    return {
        "found": found,
        "share": round(found / largest, 4) if runs else 0.0,
        "trials": len(attempt.asked),
        "seconds": float(f"{seconds:.4g}"),
        "runs": runs,
        "changed": attempt.bits() != before,
        **({"error": error} if error else {}),
    }


def summary(rows: list[dict], method: str) -> dict:
    """What one method did over all cases. Quartiles in brackets in the table."""
    of = [row for row in rows if row["method"] == method]
    back = [row for row in of if row["found"]]
    return {
        "method": method,
        "cases": len(of),
        "came_back": len(back),
        "trials": _middle([row["trials"] for row in of]),
        "worst_trials": max(row["trials"] for row in of),
        "share": _middle([row["share"] for row in of]),
        "mean_share": round(statistics.mean(row["share"] for row in of), 4),
        "lowest_share": min(row["share"] for row in of),
        "seconds": _middle([row["seconds"] for row in of]),
        "do_not_run": sum(not row["runs"] for row in back),
        "changed": sum(row["changed"] for row in of),
    }


def _middle(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [float(f"{value:.4g}") for value in (middle, low, high)]


def table(summaries: list[dict]) -> dict:
    head = [
        "method",
        "trials (quartiles)",
        "worst",
        "of the true maximum",
        "mean",
        "lowest",
        "time",
    ]
    head += ["came back", "returned a size that does not run", "changed the model"]
    rows = []
    for s in summaries:
        t, p, d = s["trials"], s["share"], s["seconds"]
        rows.append([
            s["method"], f"{t[0]:g} ({t[1]:g}–{t[2]:g})", str(s["worst_trials"]),
            f"{p[0]:.1%} ({p[1]:.0%}–{p[2]:.0%})", f"{s['mean_share']:.1%}",
            f"{s['lowest_share']:.1%}", f"{d[0]:.2f} s ({d[1]:.2f}–{d[2]:.2f})",
            f"{s['came_back']} of {s['cases']}", str(s["do_not_run"]), str(s["changed"]),
        ])  # fmt: skip
    return {"head": head, "rows": rows}


def targets(summaries: list[dict]) -> list[dict]:
    mine, *peers = summaries
    fastest = min(peers, key=lambda s: s["seconds"][0])
    promises = [
        ("trials, median", "at most 4", f"{mine['trials'][0]:g}", mine["trials"][0] <= 4),
        ("trials, worst", "at most 6", str(mine["worst_trials"]), mine["worst_trials"] <= 6),
        ("share of the true maximum, median", "at least 95 %", f"{mine['share'][0]:.1%}",
         mine["share"][0] >= 0.95),
        ("share of the true maximum, mean", "at least 90 %", f"{mine['mean_share']:.1%}",
         mine["mean_share"] >= 0.9),
        ("returned sizes that do not run", "0", str(mine["do_not_run"]), mine["do_not_run"] == 0),
        ("models changed", "0", str(mine["changed"]), mine["changed"] == 0),
        ("time, median", f"below every peer's ({fastest['method']}: {fastest['seconds'][0]:.2f} s)",
         f"{mine['seconds'][0]:.2f} s", mine["seconds"][0] < fastest["seconds"][0]),
    ]  # fmt: skip
    return [common.target(*promise) for promise in promises]


def run_cases(cases: list[tuple[str, str, int]], verbose: bool) -> list[dict]:
    """This rank's share of the cases. Runs on a core of its own, with one thread."""
    import accelerate as _accelerate  # noqa: F401  imports are not timed
    import pytorch_lightning as _lightning  # noqa: F401
    import toma as _toma  # noqa: F401

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)  # Lightning reports each trial
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]  # the methods are not to take this for one training on two ranks
    rows = []
    for number, (name, optimizer, limit) in list(enumerate(cases))[rank::ranks]:
        make = partial(Attempt, MODELS[name], optimizer, limit)
        largest = true_maximum(make)
        assert 0 < largest, f"{name}: not one sample fits {memory.size(limit)}"
        # Another one begins in each case, so that no method always runs first.
        order = list(METHODS)[number % 5 :] + list(METHODS)[: number % 5]
        case = {"model": name, "optimizer": optimizer, "limit_mib": limit // MiB,
                "true_maximum": largest}  # fmt: skip
        start = time.monotonic()
        for method in order:
            rows.append({**case, "method": method, **measure(make, METHODS[method], largest)})
            if verbose:
                print(rows[-1], flush=True)
        seconds = time.monotonic() - start
        print(f"{name}, {optimizer}, {limit // MiB} MiB: {seconds:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, help="only so many cases; nothing is written")
    args = parser.parse_args()
    cases = list(itertools.product(MODELS, OPTIMIZERS, LIMITS))
    if args.cases:
        cases = cases[:: max(1, len(cases) // args.cases)][: args.cases]
    cores = min(2, len(census().cpu.cores or (0,)))
    with common.OtherWork() as others:
        parts = launch(run_cases, cores, cases, bool(args.cases), init=False, timeout=7200)
    rows = [row for part in parts for row in part]
    summaries = [summary(rows, method) for method in METHODS]
    if args.cases:
        for line in table(summaries)["rows"]:
            print(line)
        return
    common.write(
        "batch_size", "The largest batch that fits, against the peers", others.percent,
        rows, targets(summaries), summaries=summaries, table=table(summaries),
        note="48 cases: eight models, Adam and SGD, limits of 32, 64 and 128 MiB; true maxima "
        f"from {min(r['true_maximum'] for r in rows)} to {max(r['true_maximum'] for r in rows)} "
        "samples. Medians over the cases, quartiles in brackets. What each column means stands "
        "in benchmarks/batch_size_bench.py.",
    )  # fmt: skip


if __name__ == "__main__":
    main()
