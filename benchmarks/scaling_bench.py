"""The auto-encoder of lesson 07 on more and more ranks: `launch`, torchrun and Lightning.

The same function trains under `launch` and under torchrun, with DDP from two ranks on; Lightning's
Trainer, started by torchrun, trains the same model. All ranks have the cores, the one thread and
the network interface that `launch` gives them. Every group of ranks starts three times and then
waits; the groups take turns, slice by slice: some steps to warm up, a barrier, then the steps that
count.
So the times are of steady steps alone. Start-up is stated apart: from the command to the end of
the first steps, in a fresh process. Each slice begins with the same weights, and all methods must
come to the same loss. The batch is per rank (weak scaling), and lies on the device from the start.

On a machine with two or more GPUs the ranks are GPUs and talk over NCCL (never run by the
authors); with one GPU or none they are cores, over gloo.
"""

import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import quietest, row, target, write
from course_utils.devices import Slot, census, slots
from course_utils.timing import Comparison, Ratio, Timing

LAUNCH, TORCHRUN, LIGHTNING = "launch", "torchrun", "Lightning"
BATCHES = (8, 32, 128)
RANKS = (1, 2, 4)
WARMUP = 2  # steps: after its first one DDP sorts its buckets anew
STARTS = 3  # of every group
SLICE_SECONDS = 0.6  # at least; a slice has at least three steps
SLOWER, SPEEDUP, FROM_BATCH = 1.05, 1.6, 32
ROOT = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- in a rank


def work(method: str) -> None:
    """What every rank does: connect, then train a slice whenever it is told to."""
    import torch

    run = lightning_slice if method == LIGHTNING else plain_slice
    if method == LIGHTNING:
        import pytorch_lightning  # noqa: F401
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = load(rank, device)
    with socket.create_connection(("127.0.0.1", int(os.environ["SCALING_PORT"]))) as line:
        stream = line.makefile("rw", encoding="utf-8")
        pinned = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        _say(stream, rank=rank, threads=torch.get_num_threads(), cpus=pinned)
        for text in stream:
            order = json.loads(text)
            if not order:
                return
            seconds, loss = run(images, order["batch"], order["steps"], world, device)
            _say(stream, seconds=seconds, loss=loss)


def load(rank: int, device: str):
    """256 pieces of photographs, float32 [256, 3, 80, 80]; each rank begins at another place."""
    import torch

    from course_utils.datasets import photo_patches

    pictures = torch.from_numpy(photo_patches(size=80, limit=256)[0]).permute(0, 3, 1, 2) / 255
    return pictures.roll(-64 * rank, 0).contiguous().to(device)


def batch_of(images, size: int, step: int):
    """Batches of `size` one after the other, from the start again at the end."""
    start = step * size % (len(images) - size + 1)
    return images[start : start + size]


def plain_slice(images, size: int, steps: int, world: int, device: str) -> tuple[float, float]:
    """Seconds of `steps` steps after the warm-up, and the last loss."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    from benchmarks.models import autoencoder

    torch.manual_seed(0)
    model = autoencoder().to(device)
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start = 0.0
    for step in range(WARMUP + steps):
        if step == WARMUP:
            dist.barrier()
            start = _now(device)
        batch = batch_of(images, size, step)
        optimizer.zero_grad()
        loss = mse_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
    return _now(device) - start, loss.item()


def lightning_slice(images, size: int, steps: int, world: int, device: str) -> tuple[float, float]:
    """The same by Lightning's Trainer, without logger, checkpoints and progress bar."""
    import pytorch_lightning as pl
    import torch
    from torch.nn.functional import mse_loss

    from benchmarks.models import autoencoder

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.model = autoencoder()

        def training_step(self, batch, index):
            return mse_loss(self.model(batch), batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class Clock(pl.Callback):
        start = stop = loss = 0.0

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            if index + 1 == WARMUP:
                trainer.strategy.barrier()
                self.start = _now(device)
            elif index + 1 == WARMUP + steps:
                self.stop, self.loss = _now(device), outputs["loss"].item()

    class Batches:  # Lightning takes any iterable; a list would be several loaders
        def __len__(self):
            return WARMUP + steps

        def __iter__(self):
            return (batch_of(images, size, step) for step in range(len(self)))

    clock = Clock()
    trainer = pl.Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Model(), Batches())
    return clock.stop - clock.start, clock.loss


def _now(device: str) -> float:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
    return time.perf_counter()


def _say(stream, **message: object) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


def torchrun_rank(method: str) -> None:
    """The body of the torchrun script: what `launch` does for its ranks, by hand."""
    import torch
    import torch.distributed as dist

    me = json.loads(os.environ["SCALING_SLOTS"])[int(os.environ["LOCAL_RANK"])]
    if me["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, me["cpus"])
    torch.set_num_threads(me["threads"])
    if me["gpu"]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if method != LIGHTNING:  # Lightning makes its own group
        dist.init_process_group("nccl" if me["gpu"] else "gloo")
    work(method)
    if dist.is_initialized():
        dist.destroy_process_group()


def kernel(ranks: int) -> None:
    """A process of its own that launches, as a notebook's does."""
    from benchmarks.scaling_bench import work  # by name, not by value from __main__
    from course_utils.launch import launch

    launch(work, ranks, LAUNCH, oversubscribe=True, timeout=3600)


# ---------------------------------------------------------------- in the benchmark


class Group:
    """Ranks of one method, started once. `start_up`: seconds to the end of their first steps."""

    def __init__(self, method: str, ranks: int, timeout: float = 180.0) -> None:
        self.method, self.ranks, self.timeout = method, ranks, timeout
        self.places = slots(ranks, oversubscribe=True)
        self.log = tempfile.TemporaryFile()
        self.streams: dict[int, object] = {}
        start = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.process = subprocess.Popen(
                self._command(),
                cwd=ROOT,
                env=self._environment(server.getsockname()[1]),
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                self._meet(server)
                self.slice(batch=1, steps=1)
            except BaseException:
                self.end()
                raise
        self.start_up = time.monotonic() - start

    def _command(self) -> list[str]:
        here = ["-m", "benchmarks.scaling_bench"]
        if self.method == LAUNCH:
            return [sys.executable, *here, "--kernel", str(self.ranks)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, *torchrun, *here, "--rank", self.method]

    def _environment(self, port: int) -> dict[str, str]:
        env = {**os.environ, "SCALING_PORT": str(port)}
        if self.method == LAUNCH:
            return env
        gpu = self.places[0].kind == "gpu"
        keys = [{"cpus": p.cpus, "threads": p.threads, "gpu": gpu} for p in self.places]
        env |= {"SCALING_SLOTS": json.dumps(keys), "OMP_NUM_THREADS": str(self.places[0].threads)}
        if gpu:
            visible = ",".join(str(place.visible) for place in self.places)
            return env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}
        env["CUDA_VISIBLE_DEVICES"] = "-1"
        env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        return env

    def _meet(self, server: socket.socket) -> None:
        """Wait for every rank, and see that it runs where its slot says."""
        deadline = time.monotonic() + self.timeout
        server.settimeout(0.5)
        while len(self.streams) < self.ranks:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self._failed("did not start")
            try:
                line, _ = server.accept()
            except TimeoutError:
                continue
            line.settimeout(self.timeout)
            stream = line.makefile("rw", encoding="utf-8")
            line.close()  # the stream keeps the connection
            found = self._hear(stream)
            place: Slot = self.places[found["rank"]]
            if found["threads"] != place.threads or place.cpus not in ((), tuple(found["cpus"])):
                raise self._failed(f"runs elsewhere than {place.name}: {found}")
            self.streams[found["rank"]] = stream

    def slice(self, batch: int, steps: int) -> tuple[float, float]:
        """Seconds of the slowest rank for so many steps, and rank 0's last loss."""
        for stream in self.streams.values():
            _say(stream, batch=batch, steps=steps)
        found = {rank: self._hear(stream) for rank, stream in self.streams.items()}
        return max(each["seconds"] for each in found.values()), found[0]["loss"]

    def _hear(self, stream) -> dict:
        try:
            text = stream.readline()
        except (TimeoutError, ConnectionError):
            text = ""
        if not text:
            raise self._failed("no longer answers")
        return json.loads(text)

    def _failed(self, what: str) -> RuntimeError:
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").splitlines()[-20:]
        return RuntimeError("\n".join([f"{self.method} on {self.ranks} ranks {what}:", *lines]))

    def end(self) -> None:
        """Let the ranks go; after ten seconds end them."""
        for stream in self.streams.values():
            try:
                _say(stream)
                stream.close()
            except OSError:
                continue  # this rank is gone already
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def plan(devices: int, gpus: bool) -> list[tuple[str, int]]:
    """(method, ranks): all methods where there are devices, ours once above the cores."""
    here = [n for n in RANKS if n <= devices]
    groups = [(method, n) for n in here for method in (LAUNCH, TORCHRUN, LIGHTNING)]
    above = [n for n in RANKS if n > devices]
    return groups + ([(LAUNCH, above[0])] if above and not gpus else [])


Key = tuple[str, int, int]  # method, ranks, images a rank


def measure(
    plan: list[tuple[str, int]], batches: tuple[int, ...], rounds: int, seconds: float
) -> tuple[dict[Key, list[float]], dict[int, int], dict[tuple[str, int], float], float]:
    """All groups taking turns, `rounds` rounds with each of STARTS starts of every group.

    Two processes of the same method differ by up to a tenth, for as long as they live, so one
    start of each would compare two processes and not two methods.

    Returns the seconds of every slice, the steps of a slice by batch, the start-up of every group
    in seconds (median), and the largest percentage of the cores that other programs used.
    """
    runs: dict[Key, list[float]] = {}
    start_ups: dict[tuple[str, int], list[float]] = {}
    steps: dict[int, int] = {}
    most = 0.0
    for _ in range(STARTS):
        groups: list[Group] = []
        try:
            for method, ranks in plan:
                groups.append(Group(method, ranks))
                start_up = groups[-1].start_up
                start_ups.setdefault((method, ranks), []).append(start_up)
                print(f"{method}, {ranks} ranks: started in {start_up:.1f} s", flush=True)
            for batch in batches:
                if batch not in steps:
                    one, _ = groups[0].slice(batch, 3)
                    steps[batch] = max(3, math.ceil(3 * seconds / one))
            found, percent = quietest(lambda g=groups: take_turns(g, steps, rounds), attempts=2)
        finally:
            for group in groups:
                group.end()
        most = max(most, percent)
        for key, times in found.items():
            runs.setdefault(key, []).extend(times)
    return runs, steps, {key: statistics.median(s) for key, s in start_ups.items()}, most


def take_turns(groups: list[Group], steps: dict[int, int], rounds: int) -> dict[Key, list[float]]:
    runs: dict[Key, list[float]] = {}
    losses: dict[tuple[int, int], float] = {}
    for number in range(rounds):
        order = groups if number % 2 == 0 else groups[::-1]
        for batch, count in steps.items():
            for group in order:
                seconds, loss = group.slice(batch, count)
                runs.setdefault((group.method, group.ranks, batch), []).append(seconds)
                # Otherwise the times mean nothing: from the same start to the same loss.
                first = losses.setdefault((group.ranks, batch), loss)
                if not math.isclose(loss, first, rel_tol=1e-3):
                    raise RuntimeError(f"{group.method}: loss {loss}, another method had {first}")
    return runs


def results(runs, steps, start_ups, devices: int, gpus: bool) -> dict:
    """Rows, table, targets and note from the seconds of every slice."""
    times = Comparison({key: Timing(tuple(seconds)) for key, seconds in runs.items()})
    rows, lines, targets = [], [], []
    counts = sorted({(batch, ranks) for _, ranks, batch in runs})
    for batch, ranks in counts:
        images, shared = ranks * batch * steps[batch], ranks > devices
        label = f"{ranks} ranks" if ranks > 1 else "1 rank"
        label += ", oversubscribed" if shared else ""
        cells = [str(batch), label]
        for method in (LAUNCH, TORCHRUN, LIGHTNING):
            key = (method, ranks, batch)
            if key not in runs:
                cells.append("–")
                continue
            rate = Ratio(tuple(images / second for second in runs[key]))  # for its quartiles
            cells.append(f"{rate.median:.0f} ({rate.low:.0f}–{rate.high:.0f})")
            rows.append(
                row(f"{method}, {label}, {batch} images a rank", times[key], steps=steps[batch],
                    images_per_s=float(f"{rate.median:.4g}"), oversubscribed=shared)
            )  # fmt: skip
        own, one = (LAUNCH, ranks, batch), (LAUNCH, 1, batch)
        gain = Ratio(tuple(ranks * x for x in times.ratio(one, own).runs)) if one in runs else None
        cells.append(f"{gain.median:.2f}× ({gain.low:.2f}–{gain.high:.2f})" if gain else "–")
        if (TORCHRUN, ranks, batch) in runs:
            share = times.ratio(own, (TORCHRUN, ranks, batch))
            cells.append(f"{share.median:.3f} ({share.low:.3f}–{share.high:.3f})")
            what = f"a step by launch ÷ by torchrun, {label}, {batch} images a rank"
            wanted = f"at most {SLOWER}"
            targets.append(target(what, wanted, cells[-1], share.median <= SLOWER))
        else:
            cells.append("–")
        if gain and ranks == 2 and not shared and not gpus and batch >= FROM_BATCH:
            what = f"2 ranks against one, {batch} images a rank"
            wanted = f"at least {SPEEDUP}×, on two idle cores"
            targets.append(target(what, wanted, str(gain), gain.median >= SPEEDUP))
        lines.append(cells)
    head = ["images a rank", "ranks", *(f"{m}, images/s" for m in (LAUNCH, TORCHRUN, LIGHTNING))]
    head += ["launch: speed-up over 1 rank", "launch ÷ torchrun, time"]
    return {"rows": rows, "targets": targets, "table": {"head": head, "rows": lines},
            "note": note(start_ups, steps)}  # fmt: skip


def note(start_ups: dict[tuple[str, int], float], steps: dict[int, int]) -> str:
    rounds = ", ".join(f"{count} steps at {batch} images" for batch, count in steps.items())
    most = max(ranks for method, ranks in start_ups if method == TORCHRUN)
    starts = ", ".join(
        f"{method} {seconds:.1f} s"
        for (method, ranks), seconds in start_ups.items()
        if ranks == most
    )
    text = (
        f"Steady steps alone, all groups taking turns; a slice is {rounds}. Every group was "
        f"started {STARTS} times: two processes of one method can differ as well. Start-up of "
        f"{most} ranks, from the command to the end of {WARMUP + 1} steps, median of {STARTS}: "
        f"{starts}. That is a first launch with the start of Python itself; every later one in the "
        "same notebook takes what the table of `launch` above says. Lightning is started by "
        "torchrun."
    )
    if any(method == LAUNCH and ranks > most for method, ranks in start_ups):
        text += " Oversubscribed: ranks share cores, so the times say nothing about more devices."
    return text


def main(rounds: int = 3) -> dict:
    gpus = len(census().usable_gpus) > 1
    if not gpus:  # `launch` would put one rank on a single GPU and two ranks on cores
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        print("fewer than two GPUs: all ranks are cores", flush=True)
    devices = len(census().usable_gpus) if gpus else census().cpu.promised
    found = measure(plan(devices, gpus), BATCHES, rounds, SLICE_SECONDS)
    runs, steps, start_ups, percent = found
    made = results(runs, steps, start_ups, devices, gpus)
    for line in (made["table"]["head"], *made["table"]["rows"]):
        print(" | ".join(line))
    for each in made["targets"]:
        print(f"{each['what']}: {each['measured']}, {'kept' if each['met'] else 'NOT kept'}")
    start = {f"{method}, {ranks} ranks": round(s, 2) for (method, ranks), s in start_ups.items()}
    title = "The auto-encoder on more ranks: launch, torchrun, Lightning"
    return write(
        "scaling", title, percent, made["rows"], made["targets"], table=made["table"],
        note=made["note"], start_up_s=start, backend="nccl" if gpus else "gloo",
    )  # fmt: skip


if __name__ == "__main__":
    if "--rank" in sys.argv:
        torchrun_rank(sys.argv[-1])
    elif "--kernel" in sys.argv:
        kernel(int(sys.argv[-1]))
    else:
        main()
