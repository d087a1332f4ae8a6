"""Start two ranks, let them add one number, end them: `launch` against its peers, in turns.

Every peer does the same: two processes on this machine, gloo, one all-reduce, a clean end.
The clock runs in the process that asks, as for somebody who waits for a cell. Each is used
as its documentation shows: `torchrun` on a script, `torch.multiprocessing.spawn` and
accelerate's `debug_launcher` on a function of an importable module. Cold: the first launch
in a kernel, which imports the framework in a new fork server. Warm: every later one.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import quietest, row, target, write
from course_utils import _crew
from course_utils.launch import launch
from course_utils.timing import Comparison, compare

WARM, COLD = "launch, warm", "launch, cold"
TORCHRUN, SPAWN, ACCELERATE = "torchrun", "torch.multiprocessing.spawn", "accelerate debug_launcher"
WARM_TARGET, TORCHRUN_SHARE = 0.15, 0.1


def add_one() -> float:
    """What every rank does once its process group exists."""
    import torch
    import torch.distributed as dist

    x = torch.ones(1)
    dist.all_reduce(x)
    if x.item() != 2:  # otherwise the times mean nothing
        raise RuntimeError(f"the sum over two ranks is {x.item()}")
    return x.item()


def script() -> None:
    """The body of a torchrun script."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    add_one()
    dist.destroy_process_group()


def spawned(rank: int, store: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    add_one()
    dist.destroy_process_group()


def accelerated() -> None:
    from accelerate import PartialState

    state = PartialState(cpu=True)
    add_one()
    state.destroy_process_group()


def by_torchrun() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    here = ["-m", "benchmarks.launch_bench", "--rank"]
    subprocess.run([sys.executable, *command, *here], check=True, stderr=subprocess.DEVNULL)


def by_spawn() -> None:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (str(Path(folder) / "store"),), nprocs=2)


def by_accelerate() -> None:
    from accelerate import debug_launcher

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        debug_launcher(accelerated, num_processes=2)


def by_launch() -> None:
    launch(add_one, 2)


def by_cold_launch() -> None:
    """As in a kernel that has not launched anything yet."""
    before = _crew.CREWS.pop("torch", None)
    launch(add_one, 2)
    _crew.CREWS.pop("torch").close()
    if before:
        _crew.CREWS["torch"] = before


def tensorflow_sum() -> float:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    one = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.ones([])))
    return float(strategy.run(one))


def compare_all(repeat: int) -> Comparison:
    calls = {
        WARM: by_launch,
        COLD: by_cold_launch,
        TORCHRUN: by_torchrun,
        SPAWN: by_spawn,
        ACCELERATE: by_accelerate,
        "launch of two TensorFlow workers, warm": lambda: launch(
            tensorflow_sum, 2, framework="tensorflow"
        ),
    }
    return compare(calls, repeat=repeat, warmup=1)


def main(repeat: int = 7) -> dict:
    os.environ["OMP_NUM_THREADS"] = "1"  # for the peers: `launch` and torchrun do it themselves
    found, others = quietest(lambda: compare_all(repeat))
    print(found)
    share = found.ratio(WARM, TORCHRUN)
    warm = found[WARM]
    targets = [
        target("launch of two ranks, warm", f"at most {WARM_TARGET} s", str(warm),
               warm.median <= WARM_TARGET),
        target("its share of torchrun's time", f"at most {TORCHRUN_SHARE}", share,
               share.median <= TORCHRUN_SHARE),
    ]  # fmt: skip
    rows = [row(name, found[name]) for name in found]
    title = "Two ranks: start, one all-reduce, end"
    return write("launch", title, others, rows, targets)


if __name__ == "__main__":
    script() if "--rank" in sys.argv else main()
