"""`checkpoint`: a run that is really killed, at every step and at every second line of a save, goes
on bitwise as if it had not been. Each run is a process of its own (or two), and kill is SIGKILL."""

import contextlib
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

from course_utils import _saved
from course_utils.checkpoint import Checkpoint, CheckpointError, Position, batches, read
from course_utils.launch import RankError, launch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch"),
    pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL"),
]
two_ranks = pytest.mark.skipif(CORES < 2, reason="two ranks need two cores")
STEPS, EPOCHS = 12, 3  # 4 batches an epoch, the last of them ragged


# ------------------------------------------------------------------ a run that draws on everything


class Losses:
    """A thing of the user's own, different on each rank."""

    def __init__(self, rank):
        self.rank, self.values = rank, []

    def state_dict(self):
        return {"rank": self.rank, "values": list(self.values)}

    def load_state_dict(self, state):
        assert state["rank"] == self.rank, "the state of another rank"
        self.values = list(state["values"])


def train(folder, die=None, every=1, epochs=EPOCHS):
    """The run, from where it stands to its end: every bit of what it has then.

    folder: None saves nothing. die: (rank, step, "before" | "after" | n): SIGKILL to that rank
    before or after that step, or at the n-th line of the save that follows it.
    """
    import numpy
    import torch
    import torch.distributed as dist

    ranks = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    x, y = torch.randn(30, 5), torch.randn(30, 1)
    torch.manual_seed(100 + rank), numpy.random.seed(rank), random.seed(rank)
    if ranks:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    losses = Losses(rank)
    things = dict(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    things["losses"] = losses
    keeper = Checkpoint(folder, **things) if folder else None
    first, done = (keeper.restore() if keeper else None) or (0, 0)
    for epoch in range(first, epochs):
        for rows in batches(len(x), 8, seed=3, epoch=epoch, start=done):
            step = epoch * 4 + done
            when = die[2] if die and tuple(die[:2]) == (rank, step) else None
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            mine = rows[rank::world]
            noise = numpy.random.randn() + random.random()
            loss = (model(x[mine] + 0.01 * noise) - y[mine]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses.values.append(loss.item())
            done += 1
            if keeper and (step + 1) % every == 0:
                with KilledAtLine(when):
                    keeper.save(epoch, done)
            if when == "after":
                os.kill(os.getpid(), signal.SIGKILL)
        done = 0
    numbers = _saved.RandomNumbers()
    return repr({name: bits(thing) for name, thing in {**things, "numbers": numbers}.items()})


class KilledAtLine:
    """SIGKILL at the n-th line that the files of a checkpoint run inside the block."""

    def __init__(self, n):
        self.n, self.seen = n, 0

    def __enter__(self):
        if isinstance(self.n, int):
            sys.settrace(self.trace)

    def __exit__(self, *_):
        sys.settrace(None)

    def trace(self, frame, event, _):
        code = frame.f_code
        files = ("checkpoint.py", "_saved.py", "_agree.py", "_random.py")
        if Path(code.co_filename).name not in files:
            return None
        if code.co_name in ("plain", "<genexpr>", "<listcomp>", "<dictcomp>"):
            return None  # thousands of lines, and nothing of them touches the disk
        if event == "line":
            if self.seen == self.n:
                os.kill(os.getpid(), signal.SIGKILL)
            self.seen += 1
        return self.trace


def bits(thing):
    """Every bit of a state, as text."""
    import torch

    if hasattr(thing, "state_dict"):
        thing = thing.state_dict()
    if isinstance(thing, dict):
        return {key: bits(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [bits(value) for value in thing]
    if isinstance(thing, torch.Tensor):
        return str(thing.dtype), list(thing.shape), thing.numpy().tobytes().hex()
    return thing.hex() if isinstance(thing, float) else thing


# ------------------------------------------------------------------ processes to kill


def serve():
    """Forks the ranks of runs from a process that has torch warm: 0.1 s a run and not 4."""
    import torch

    torch.set_num_threads(1)
    train(None, epochs=1)
    for line in sys.stdin:
        n, how = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            pids = [rank_process(folder, rank, n, how) for rank in range(n)]
            ended = attend(pids)
            if all(status == 0 for status in ended):
                ended = [Path(folder, f"result-{rank}").read_text() for rank in range(n)]
        print(json.dumps(ended), flush=True)


def rank_process(folder, rank, n, how):
    """Fork one rank: its pid. The child never returns from here."""
    import torch.distributed as dist

    pid = os.fork()
    if pid:
        return pid
    try:
        if n > 1:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            store = dist.FileStore(f"{folder}/store", n)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=n)
        os.dup2(2, 1)  # what it prints is not an answer of the server
        Path(folder, f"result-{rank}").write_text(train(**how))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def attend(pids):
    """Exit status of each rank. One that dies takes the others along, as `launch` does."""
    ended, until = {}, time.monotonic() + 60
    while len(ended) < len(pids):
        for pid in set(pids) - ended.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended[pid] = os.waitstatus_to_exitcode(status)
            elif any(ended.values()) or time.monotonic() > until:
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.002)
    return [ended[pid] for pid in pids]


@pytest.fixture(scope="module")
def run():
    """`run(folder, n, die=…)`: what each of n ranks ended with; None if one was killed."""
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True) as server:

        def run(folder, n=1, **how):
            how["folder"] = folder and str(folder)
            print(json.dumps((n, how)), file=server.stdin, flush=True)
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


def was_killed(ended):
    """A rank died of SIGKILL (and the others of that), and of nothing else."""
    return signal.SIGKILL in [-status for status in ended if isinstance(status, int)]


@pytest.fixture(scope="module")
def whole(run):
    """What a run that never saved and never died ends with, by the number of ranks."""
    return {n: run(None, n) for n in (1, 2 if CORES > 1 else 1)}


# ------------------------------------------------------------------ kill -9


def test_saves_change_nothing(run, tmp_path, whole):
    assert run(tmp_path) == whole[1]
    assert sorted(os.listdir(tmp_path)) == ["save-000011.pt", "save-000012.pt"]


def killed_at_every_step(run, folder, n, rank, every):
    """Before or after each step in turn, each run going on from what the last one left."""
    for step in range(STEPS):
        when = "before" if step % 2 else "after"
        assert was_killed(run(folder, n, die=(rank, step, when), every=every))
    ended = run(folder, n, every=every)
    # Had a run begun anew, it would have numbered its saves anew, and been refused by the folder.
    assert names(folder)[-1] == f"save-{STEPS // every:06d}.pt"
    return ended


@pytest.mark.parametrize("every", [1, 3])
def test_killed_at_every_step(run, tmp_path, whole, every):
    assert killed_at_every_step(run, tmp_path, 1, 0, every) == whole[1]


def killed_in_saves(run, tmp_path, whole, n, rank, stride):
    """Die at every `stride`-th line of a save, each run resuming what the last one left."""
    line, deaths, step = 0, 0, STEPS
    while True:
        if step == STEPS:  # a new folder; from a run's third save on, each also deletes one
            step, folder = 2, tmp_path / f"{rank}-{deaths}"
        ended = run(folder, n, die=(rank, step, line))
        if not was_killed(ended):  # a save has fewer lines than this
            assert ended == whole[n]
            return deaths
        line, deaths, step = line + stride, deaths + 1, step + 1
        if step == STEPS:
            assert run(folder, n) == whole[n], f"killed at lines up to {line} of its saves"
            assert "save.tmp" not in os.listdir(folder), "a killed save is tidied by the next"


def test_killed_during_saves(run, tmp_path, whole):
    assert killed_in_saves(run, tmp_path, whole, 1, 0, stride=8) > 7


@pytest.mark.slow
def test_killed_at_every_second_line_of_a_save(run, tmp_path, whole):
    assert killed_in_saves(run, tmp_path, whole, 1, 0, stride=2) > 30


@two_ranks
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_killed_at_every_step(run, tmp_path, whole, rank):
    assert killed_at_every_step(run, tmp_path, 2, rank, every=1 + rank) == whole[2]
    assert whole[2][0] != whole[2][1], "random numbers and losses differ from rank to rank"


@pytest.mark.slow
@two_ranks
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_killed_during_saves(run, tmp_path, whole, rank):
    assert killed_in_saves(run, tmp_path, whole, 2, rank, stride=7) > 5


@pytest.mark.slow
@two_ranks
def test_two_ranks_of_launch(tmp_path, whole):
    with pytest.raises(RankError, match="SIGKILL"):
        launch(train, 2, str(tmp_path), (1, 7, "after"))
    assert launch(train, 2, str(tmp_path)) == whole[2]


# ------------------------------------------------------------------ files that are not whole


@pytest.fixture
def keep(tmp_path):
    """`keep(…)`: a `Checkpoint` of a small model and its optimizer, in one folder."""
    import torch

    def make(wide=3, kind=torch.optim.Adam, folder=tmp_path / "run", **more):
        model = torch.nn.Linear(wide, 1)
        optimizer = kind(model.parameters(), lr=0.1)
        model(torch.ones(2, wide)).sum().backward()
        optimizer.step()
        return Checkpoint(folder, **{"model": model, "optimizer": optimizer, **more})

    return make


def names(folder):
    return sorted(os.listdir(folder))


def empty(path):
    path.write_bytes(b"")


def torn(path):
    path.write_bytes(path.read_bytes()[:-1])


def torn_in_the_first_line(path):
    path.write_bytes(path.read_bytes()[:30])


def one_bit_flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def zeros_for_data(path):
    """What a machine that lost its power may leave: the length, and none of the bytes."""
    path.write_bytes(bytes(path.stat().st_size))


def foreign(path):
    import torch

    torch.save({"model": 1}, path)


def newer(path):
    head, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(head.replace(b"checkpoint 1", b"checkpoint 2") + b"\n" + rest)


def a_folder(path):
    path.unlink()
    path.mkdir()


BROKEN = {
    empty: "it is empty",
    torn: "it is torn",
    torn_in_the_first_line: "not a checkpoint",
    one_bit_flipped: "checksum does not match",
    zeros_for_data: "not a checkpoint",
    foreign: "not a checkpoint",
    newer: "format is 2 .* update course_utils",
    a_folder: "cannot be read",
}


@pytest.mark.parametrize("spoil", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_file_is_refused_by_name_and_the_one_before_used(keep, capsys, spoil):
    keeper = keep()
    keeper.save(0, 1)
    before = {name: bits(thing) for name, thing in keeper.things.items()}
    keeper.things["optimizer"].step()
    keeper.save(0, 2)
    spoil(keeper.folder / "save-000002.pt")
    with pytest.raises(CheckpointError, match=f"save-000002.pt: .*{BROKEN[spoil]}"):
        read(keeper.folder / "save-000002.pt")

    again = keep()
    assert again.restore() == Position(0, 1)
    assert {name: bits(thing) for name, thing in again.things.items()} == before
    said = capsys.readouterr().out
    assert re.search(f"refused save-000002.pt: .*{BROKEN[spoil]}", said), said
    assert "Resuming from save-000001.pt" in said

    for batch in (2, 3, 4):  # going on never costs the only good one, nor a file not ours
        again.save(0, batch)
        assert keep().restore() == Position(0, batch)
        assert "save-000001.pt" in names(again.folder) or batch > 2
    ours = spoil in (torn, one_bit_flipped)
    left = [] if ours else ["save-000002.pt"]
    assert names(again.folder) == [*left, "save-000004.pt", "save-000005.pt"]


def test_every_byte_of_the_first_line_and_the_data_counts(keep):
    keeper = keep()
    keeper.save(0, 1)
    path = keeper.folder / "save-000001.pt"
    data = path.read_bytes()
    for at in [*range(0, 120, 3), *range(120, len(data), 499), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(CheckpointError, match="save-000001.pt"):
            read(path)
        path.write_bytes(data[:at])
        with pytest.raises(CheckpointError, match="save-000001.pt"):
            read(path)


def test_nothing_good_is_an_error_that_lists_every_file(keep):
    keeper = keep()
    keeper.save(0, 1), keeper.save(0, 2)
    torn(keeper.folder / "save-000001.pt"), empty(keeper.folder / "save-000002.pt")
    with pytest.raises(CheckpointError, match="(?s)save-000002.pt: it is empty.*01.pt: it is torn"):
        keep().restore()
    assert names(keeper.folder) == ["save-000001.pt", "save-000002.pt"]


def test_no_permission_is_not_nothing_there(keep):
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
    try:
        folder.chmod(0o755)
        keeper = keep(folder=folder)
        keeper.save(0, 1), keeper.save(0, 2)
        (folder / "save-000002.pt").chmod(0)
        with as_nobody():
            assert keep(folder=folder).restore() == Position(0, 1)
        (folder / "save-000001.pt").chmod(0)
        with as_nobody(), pytest.raises(CheckpointError, match="cannot be read .Permission"):
            keep(folder=folder).restore()
        folder.chmod(0)
        with as_nobody(), pytest.raises(CheckpointError, match="cannot be read: Permission"):
            keep(folder=folder).restore()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


@contextlib.contextmanager
def as_nobody():
    """Root may read everything: be someone else for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_code_in_a_file_is_not_run(keep, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    keeper = keep()
    (keeper.folder / "save-000001.pt").write_bytes(_saved.packed({"ranks": [Evil()]}))
    with pytest.raises(CheckpointError, match="save-000001.pt"):
        keeper.restore()
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------ disk full


@pytest.fixture(params=["tmpfs", "RLIMIT_FSIZE"])
def full_disk(request, tmp_path):
    """`(folder, fill)`: after `fill()` a save no longer fits there."""
    if request.param == "tmpfs":
        folder = tmp_path / "tiny"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        yield folder, lambda: fill_up(folder / "other")
        subprocess.run(["umount", str(folder)], check=True)
    else:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        yield tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fill_up(path):
    """All of the disk but 8 KiB: a save begins, and cannot end."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(path, path.stat().st_size - 8192)


def test_a_full_disk_leaves_what_was_there(keep, full_disk):
    folder, fill = full_disk
    keeper = keep(folder=folder)
    keeper.save(0, 1), keeper.save(0, 2)
    before = {name: (folder / name).read_bytes() for name in names(folder)}
    fill()
    for _ in range(2):  # and trying again changes nothing
        with pytest.raises(CheckpointError, match="nothing was saved .*make room"):
            keeper.save(0, 3)
    (folder / "other").unlink(missing_ok=True)
    assert {name: (folder / name).read_bytes() for name in names(folder)} == before
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    keeper.save(0, 3)  # with room again
    assert keep(folder=folder).restore() == Position(0, 3)
    assert len(names(folder)) == 2


# ------------------------------------------------------------------ what does not fit


def refuses(keeper, match):
    """restore() raises, and not one bit of anything has changed."""
    before = {name: bits(thing) for name, thing in keeper.things.items()}
    with pytest.raises(Exception, match=match):
        keeper.restore()
    assert {name: bits(thing) for name, thing in keeper.things.items()} == before
    there = names(keeper.folder)
    with pytest.raises(CheckpointError, match="neither wrote nor resumed from"):
        keeper.save(0, 9)
    assert names(keeper.folder) == there


def test_another_model_or_optimizer_is_refused_and_nothing_loaded(keep):
    import torch

    keep().save(0, 1)
    refuses(keep(wide=4), r"model: weight \[1, 3\] .* in the file, \[1, 4\] .* here")
    refuses(keep(kind=torch.optim.SGD), "optimizer: Adam in the file, SGD here")
    refuses(keep(scheduler=Losses(0)), "scheduler: only here")
    other = torch.nn.Sequential(torch.nn.Linear(3, 1))
    refuses(keep(model=other), "(?s)0.weight .* only here.*weight .* only in the file")
    refuses(keep(model=torch.nn.Linear(3, 1).double()), "float32 in the file, .*float64 here")
    assert keep().restore() == Position(0, 1)


def test_a_thing_that_fails_to_load_undoes_the_others(keep):
    keep(losses=Losses(0)).save(0, 1)
    refuses(keep(losses=Losses(1)), "the state of another rank")


def test_a_folder_of_another_run_is_not_written_to(keep):
    keep().save(0, 1)
    other = keep()
    with pytest.raises(CheckpointError, match="holds save-000001.pt.*restore"):
        other.save(0, 1)
    assert other.restore() == Position(0, 1)
    other.save(0, 2)
    keep().restore()
    assert names(other.folder) == ["save-000001.pt", "save-000002.pt"]


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(keep):
    import numpy

    keeper = keep()
    keeper.things["optimizer"].param_groups[0]["lr"] = numpy.float64(0.1)
    with pytest.raises(CheckpointError, match=r"\['lr'\] is a numpy.float64.*plain number"):
        keeper.save(0, 1)
    assert names(keeper.folder) == []


def test_what_is_wrong_with_the_arguments_is_said_at_once(keep, tmp_path):
    with pytest.raises(ValueError, match="at least one thing"):
        Checkpoint(tmp_path)
    with pytest.raises(TypeError, match=r"losses: <class 'list'> has no state_dict"):
        Checkpoint(tmp_path, losses=[])
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints"):
        keep(folder=tmp_path / "file")
    with pytest.raises(ValueError, match="count from 0"):
        keep().save(0, -1)
    assert keep().restore() is None


@pytest.mark.parametrize("keep_n", [1, 3])
def test_as_many_are_kept_as_asked(keep, keep_n):
    keeper = keep(keep=keep_n)
    (keeper.folder / "notes.txt").write_text("mine")
    for batch in range(5):
        keeper.save(0, batch)
    want = [f"save-{5 - i:06d}.pt" for i in range(keep_n)][::-1]
    assert names(keeper.folder) == ["notes.txt", *want]


def test_ctrl_c_in_a_save_leaves_nothing_behind(keep, monkeypatch):
    keeper = keep()
    keeper.save(0, 1)
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                keeper.save(0, 2)
        assert names(keeper.folder) == ["save-000001.pt"]
    keeper.save(0, 2)
    assert keep().restore() == Position(0, 2)


# ------------------------------------------------------------------ ranks that do not agree


def on_two_ranks(folder, fault):
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    model, losses = torch.nn.Linear(3 + (fault == "stages") * rank, 1), Losses(rank)
    keeper = Checkpoint(folder, model=model, losses=losses)
    try:
        if fault == "position":
            keeper.save(0, rank)
        elif fault == "disk":
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100 if rank == 0 else soft, hard))
            try:
                keeper.save(0, 1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        elif fault == "stages":  # each rank another model: none may be lost
            mine = bits(model)
            keeper.save(0, 1)
            torch.nn.init.zeros_(model.weight)
            keeper.restore()
            return bits(model) == mine
        elif fault == "misfit":
            keeper.save(0, 1)
            losses.rank += rank  # only rank 1 cannot load
            torch.nn.init.zeros_(model.weight)
            with contextlib.suppress(AssertionError, CheckpointError):
                keeper.restore()
                return "loaded"
            return model.weight.abs().sum().item()
    except CheckpointError as error:
        return str(error)


@two_ranks
def test_what_goes_wrong_on_one_rank_all_say(tmp_path):
    def both(fault):
        return launch(on_two_ranks, 2, str(tmp_path / fault), fault)

    assert all("ranks are at different positions" in said for said in both("position"))
    first, second = both("disk")
    assert "nothing was saved" in first and "on rank 0: CheckpointError" in second
    assert both("stages") == [True, True]
    assert both("misfit") == [0.0, 0.0]
    keeper = Checkpoint(tmp_path / "stages", losses=Losses(0))
    with pytest.raises(CheckpointError, match="saved by 2 ranks and this run has 1"):
        keeper.restore()


# ------------------------------------------------------------------ the order


def test_batches_are_a_permutation_that_can_be_entered_anywhere():
    def order(**how):
        return list(batches(10, 4, **{"seed": 1, "epoch": 0, **how}))

    assert [len(rows) for rows in order()] == [4, 4, 2]
    assert sorted(sum(order(), [])) == list(range(10))
    assert [order(start=k) for k in range(4)] == [order()[k:] for k in range(4)]
    assert order() != order(epoch=1) != order(seed=2, epoch=1)


def test_a_data_loader_with_its_own_generator_draws_nothing():
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(10))
    before = torch.get_rng_state()
    order = list(batches(10, 4, seed=1, epoch=0, start=1))
    loader = DataLoader(data, batch_sampler=order, generator=torch.Generator())
    assert [x.tolist() for (x,) in loader] == order
    assert torch.equal(torch.get_rng_state(), before)
    list(DataLoader(data, batch_sampler=order))
    assert not torch.equal(torch.get_rng_state(), before), "the trap that the docstring names"


if __name__ == "__main__":
    serve()
