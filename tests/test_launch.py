"""`launch` with torch: real processes, each test a way in which a launch can go or fail."""

import contextlib
import ctypes
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from course_utils import _attend, _crew
from course_utils.devices import NotEnoughDevices, census, slots
from course_utils.launch import LaunchTimeout, NestedLaunch, RankError, launch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
pytestmark = [
    pytest.mark.skipif(CORES < 2, reason="two ranks need two cores"),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch"),
]

SOON = 20.0  # seconds: far above what a launch takes, far below gloo's and our own patience


def gone(pids, within=5.0):
    """Whether all processes have ended, zombies included, within some seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def rank_processes():
    """Living ranks: the children of this process's fork servers."""
    servers = [crew.process.pid for crew in _crew.CREWS.values() if not crew.gone]
    return [child.pid for pid in servers for child in psutil.Process(pid).children(recursive=True)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert gone(rank_processes())
    assert not list(Path(tempfile.gettempdir()).glob(f"launch-{os.getpid()}-*"))


# ------------------------------------------------------------------ what works


def test_ranks_talk_and_return_values_in_rank_order():
    def total(start):
        import torch
        import torch.distributed as dist

        x = torch.tensor([start + dist.get_rank()])
        dist.all_reduce(x)
        return dist.get_rank(), x

    values = launch(total, 2, 10)
    assert [rank for rank, _ in values] == [0, 1]
    assert [x.tolist() for _, x in values] == [[21], [21]]


def test_each_rank_has_its_own_core_thread_count_and_environment():
    def report():
        import torch

        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "COURSE_RANK", "OMP_NUM_THREADS")
        affinity = (
            tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        )
        return [os.environ[name] for name in names], affinity, torch.get_num_threads()

    wanted = slots(2)
    for rank, (env, pinned, threads) in enumerate(launch(report, 2, init=False)):
        assert env == [str(rank), str(rank), "2", str(rank), "1"]
        assert pinned == wanted[rank].cpus
        assert threads == 1


def test_ranks_see_the_notebook_as_it_is_now(monkeypatch, tmp_path):
    """Environment, folder and modules are those of this call, not of the server's start."""
    launch(os.getpid, 1)  # the server runs before anything changes
    (tmp_path / "beside_the_notebook.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # Lightning's import sets it

    def look():
        import beside_the_notebook

        return (
            beside_the_notebook.ANSWER,
            os.environ["COLOUR"],
            os.getcwd(),
            "pytest" in sys.modules,
        )

    assert launch(look, 1) == [(42, "blue", str(tmp_path), False)]
    # a variable of the server's own
    assert launch(lambda: os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"), 1) == [None]


def test_a_variable_that_torch_reads_at_import_asks_for_a_new_server(monkeypatch):
    launch(os.getppid, 1)
    crew = _crew.CREWS["torch"]
    monkeypatch.setenv("UNRELATED", "1")
    assert crew.serves_us()
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", "1")
    assert not crew.serves_us()


def test_a_server_that_does_not_answer_is_named_and_replaced(monkeypatch):
    """As on a machine with hundreds of other processes, where its answer came too late."""
    launch(os.getppid, 1)
    server = psutil.Process(_crew.CREWS["torch"].process.pid)
    monkeypatch.setattr(_crew, "ANSWER_TIMEOUT", 1.0)
    server.suspend()
    with pytest.raises(RuntimeError, match="has not answered for 1 s .* run the cell again"):
        launch(os.getppid, 2)
    assert not server.is_running()
    monkeypatch.undo()
    assert launch(lambda: os.environ["RANK"], 2) == ["0", "1"]


def test_ctrl_c_is_heard_while_a_server_does_not_answer(monkeypatch):
    launch(os.getppid, 1)
    server = psutil.Process(_crew.CREWS["torch"].process.pid)
    monkeypatch.setattr(_crew, "PATIENCE", 0.5)
    server.suspend()
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.2):
        launch(os.getppid, 2, timeout=30)
    assert not server.is_running()


def test_output_has_the_rank_before_each_line(capsys):
    def talk():
        rank = int(os.environ["RANK"])
        print("number", rank, {"a": 1})
        print(rank + 7)
        print(None, b"bytes", sep="\n")
        os.write(2, f"from compiled code {rank}\n".encode())
        print("no newline", end="")

    launch(talk, 2)
    lines = capsys.readouterr().out.splitlines()
    for rank in (0, 1):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [line.partition("] ")[2] for line in mine] == [
            f"number {rank} {{'a': 1}}",
            str(rank + 7),
            "None",
            "b'bytes'",
            f"from compiled code {rank}",
            "no newline",
        ]


def test_progress_bars_show_and_large_output_does_not_block(capsys):
    def talk():
        for step in range(3):
            print(f"\r{step + 1}/3", end="", flush=True)
        print()
        for _ in range(200):
            print("x" * 50_000)  # 10 MB, far more than a pipe holds

    launch(talk, 2, timeout=60)
    out = capsys.readouterr().out
    assert "[rank 0] 3/3" in out.replace("\r", "\n")
    assert out.count("x" * 50_000) == 400


def test_large_values_arrive():
    def make():
        import numpy as np

        return np.full(100 * 2**20, int(os.environ["RANK"]), dtype=np.uint8)

    values = launch(make, 2, init=False)
    assert [(v.nbytes, int(v[0]), int(v[-1])) for v in values] == [
        (100 * 2**20, 0, 0),
        (100 * 2**20, 1, 1),
    ]


def test_stdin_is_closed_and_random_numbers_differ():
    def draw():
        import numpy as np
        import torch

        return sys.stdin.read(), random.random(), np.random.rand(), torch.rand(1).item()

    first, second = launch(draw, 2)
    assert first[0] == second[0] == ""
    again = launch(draw, 1)[0]
    for one, other, third in zip(first[1:], second[1:], again[1:], strict=True):
        assert len({one, other, third}) == 3


def test_without_init_the_function_makes_its_own_group():
    def own():
        import torch.distributed as dist

        assert not dist.is_initialized()
        dist.init_process_group("gloo")  # as in a script under torchrun
        world = dist.get_world_size()
        dist.barrier()  # rank 0 is where the others look up addresses until they are in
        dist.destroy_process_group()
        return world

    assert launch(own, 2, init=False) == [2, 2]


def test_no_rank_leaves_before_all_have_returned(tmp_path):
    mark = tmp_path / "pid"

    def first_or_last():
        if os.environ["RANK"] == "0":
            mark.write_text(str(os.getpid()))
            return True
        while not mark.exists() or not mark.read_text():
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(int(mark.read_text()), 0)  # raises when rank 0 has left
        return Path(f"/proc/{mark.read_text()}/stat").read_text().split()[2] != "Z"

    assert launch(first_or_last, 2, init=False) == [True, True]


def test_data_loader_workers_run_inside_a_rank():
    def load():
        import torch
        from torch.utils.data import DataLoader

        loader = DataLoader(torch.arange(8), 4, num_workers=1, persistent_workers=True)
        return [batch.tolist() for batch in loader]

    assert launch(load, 1) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_ledger(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LAUNCH_LEDGER", str(tmp_path / "ledger"))
    pids = launch(os.getpid, 2)
    with pytest.raises(RankError):
        launch(lambda: 1 / 0, 1)
    good, bad = map(json.loads, (tmp_path / "ledger").read_text().splitlines())
    assert (good["pid"], good["ranks"], good["n"]) == (os.getpid(), pids, 2)
    assert (good["framework"], good["ok"], len(good["slots"])) == ("torch", True, 2)
    assert good["tier"] in ("cpu", "gpu1", "gpuN")
    assert (bad["n"], bad["ok"]) == (1, False)


def test_fresh_interpreters_where_there_is_no_fork(monkeypatch, capsys):
    monkeypatch.setenv("COURSE_LAUNCH_FRESH", "1")

    def work(fail):
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        print("at work", rank)
        if fail and rank == 1:
            time.sleep(1)  # rank 0 is in the all-reduce by then
            raise ValueError("bad batch")
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    assert launch(work, 2, False) == [2.0, 2.0]
    assert "[rank 1] at work 1" in capsys.readouterr().out
    with pytest.raises(RankError, match="bad batch") as caught:
        launch(work, 2, True)
    assert "rank 0 waits in all_reduce" in caught.value.others[0]


@pytest.mark.skipif(not census().usable_gpus, reason="needs a GPU")
def test_after_the_notebook_has_used_cuda():
    """Where launchers that fork the notebook fail; the ranks of cores see no GPU."""
    code = """
import os, torch, torch.distributed as dist
from course_utils.launch import launch
def work():
    x = torch.ones(2, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(x)
    return dist.get_backend(), x.device.type, x.tolist()
if torch.cuda.is_available():
    torch.ones(1, device="cuda")
    print(launch(work, 1))
    os.environ["COURSE_TIER"] = "cpu"
    print(launch(work, 2))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    if not done.stdout:
        pytest.skip("this torch has no CUDA")
    assert done.stdout.splitlines() == [
        "[('nccl', 'cuda', [1.0, 1.0])]",
        "[('gloo', 'cpu', [2.0, 2.0]), ('gloo', 'cpu', [2.0, 2.0])]",
    ]


# ------------------------------------------------------------------ what fails


def test_the_rank_that_raised_is_the_one_reported():
    def train():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            print("about to fail")
            time.sleep(1)  # rank 0 is in the all-reduce by then
            raise KeyError("label")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(train, 2)
    error = caught.value
    assert time.monotonic() - start < SOON
    assert (error.rank, error.type_name, error.message) == (1, "KeyError", "'label'")
    assert 'raise KeyError("label")' in error.traceback
    assert "_ranks.py" not in error.traceback
    assert re.search(r"rank 0 waits in all_reduce, line \d+ of test_launch.py", error.others[0])
    assert "dist.all_reduce(torch.ones(1))" in error.others[0]
    assert error.traceback.strip() in str(error)


def die_by_exit():
    os._exit(3)


def die_by_sys_exit():
    sys.exit("stop")


def die_by_kill():
    os.kill(os.getpid(), signal.SIGKILL)


def die_by_segfault():
    ctypes.string_at(0)


def test_who_only_lost_a_peer_is_not_blamed():
    """The peer's own end may be heard of later: here by a second, on a busy machine by chance."""

    def train():
        import torch.distributed as dist

        if dist.get_rank() == 0:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]")
        time.sleep(1)
        os._exit(3)

    with pytest.raises(RankError) as caught:
        launch(train, 2)
    assert (caught.value.rank, caught.value.type_name) == (1, "os._exit")


@pytest.mark.parametrize(
    ("die", "kind", "text"),
    [
        (die_by_exit, "os._exit", "exit code 3"),
        (die_by_sys_exit, "SystemExit", "stop"),
        (die_by_kill, "SIGKILL", "out of memory"),
        (die_by_segfault, "SIGSEGV", "segmentation fault"),
    ],
)
def test_deaths_have_names(die, kind, text):
    def train():
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            die()
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(train, 2)
    assert time.monotonic() - start < SOON
    assert (caught.value.rank, caught.value.type_name) == (1, kind)
    assert text in caught.value.message
    if kind == "SIGSEGV":
        assert "ctypes.string_at(0)" in caught.value.traceback


def test_a_hang_ends_at_the_deadline_with_every_stack():
    def hang():
        import torch
        import torch.distributed as dist

        print("before")
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))  # rank 0 never comes
        while True:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(LaunchTimeout) as caught:
        launch(hang, 2, timeout=2)
    assert time.monotonic() - start < SOON
    line = hang.__code__.co_firstlineno + 6
    assert f"rank 1 waits in all_reduce, line {line} of test_launch.py" in str(caught.value)
    assert f"rank 0 is in hang, line {line + 2} of test_launch.py" in str(caught.value)
    assert "before" in caught.value.others[0]
    assert f"line {line}" in caught.value.traceback
    assert isinstance(caught.value, RankError) and isinstance(caught.value, TimeoutError)


@contextlib.contextmanager
def ctrl_c_after(seconds):
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_ctrl_c_shows_where_the_ranks_were(capsys):
    def wait():
        time.sleep(60)

    launch(os.getpid, 1)  # the framework is imported: 0.7 s are enough to start
    with pytest.raises(KeyboardInterrupt), ctrl_c_after(0.7):
        launch(wait, 2)
    assert "rank 1 is in wait" in capsys.readouterr().err
    assert launch(os.getppid, 1)  # the next launch works


def test_ctrl_c_is_not_lost_where_a_taken_port_asks_for_another_attempt(monkeypatch):
    def clash():
        raise OSError("Address already in use")

    real, attempts = _attend.Launch._wait_for_ends, []

    def pressed_late(self):
        attempts.append(self)
        signal.raise_signal(signal.SIGINT)
        real(self)

    monkeypatch.setattr(_attend.Launch, "_wait_for_ends", pressed_late)
    with pytest.raises(KeyboardInterrupt) as raised:
        launch(clash, 1)
    assert len(attempts) == 1
    assert "Address already in use" in str(raised.value.__context__)  # nothing is hidden


def test_ctrl_c_is_heard_also_when_the_tests_run_in_the_background():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # see conftest.py


@pytest.mark.slow
def test_fifty_interrupted_launches_leave_nothing():
    seconds = f"600.{os.getpid()}"  # to know our own again

    def wait():
        subprocess.Popen(["sleep", seconds])  # what a rank has started ends with it
        time.sleep(600)

    launch(os.getpid, 1)
    before = set(psutil.Process().children())  # other tests of this worker may have their own
    interrupted = 0
    for attempt in range(50):
        try:  # at all stages: before the fork, during start-up, in the function
            with ctrl_c_after(0.002 * attempt):
                launch(wait, 2, timeout=30)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted == 50
    assert gone(rank_processes())
    servers = [crew.process.pid for crew in _crew.CREWS.values()]
    after = set(psutil.Process().children())
    assert not [child for child in after - before if child.pid not in servers]
    assert not [p for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or ())]


def test_ctrl_c_while_the_framework_is_being_imported():
    """And: nothing is left when the interpreter has ended."""
    code = """
import os, signal, threading
from course_utils.launch import launch
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    launch(os.getpid, 1)
except KeyboardInterrupt:
    print("interrupted", *launch(os.getppid, 1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    word, server = done.stdout.split()
    assert word == "interrupted", done.stderr
    assert gone([int(server)], within=2)


def test_the_fork_server_itself_is_killed():
    def shoot():
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    pids = []
    with pytest.raises(RuntimeError, match="process that ranks are forked from has ended"):
        launch(shoot, 1)
    assert gone(pids)
    assert launch(os.getpid, 1)


LOCK = threading.Lock()


def test_what_cannot_be_sent_is_named():
    lock = threading.Lock()

    def by_closure():
        return lock

    def by_global():
        return (lambda: LOCK)()

    by_global.__module__ = "__main__"  # as in a notebook: sent by value
    with pytest.raises(TypeError, match=r"variable 'lock' that by_closure\(\) uses, a lock"):
        launch(by_closure, 1)
    with pytest.raises(TypeError, match=r"variable 'LOCK' that by_global\(\) uses, a lock"):
        launch(by_global, 1)
    with pytest.raises(TypeError, match=r"argument 1 of the function, a generator"):
        launch(print, 1, 0, (i for i in range(3)))


def test_a_value_that_cannot_be_sent_back_is_an_error_of_that_rank():
    with pytest.raises(RankError) as caught:
        launch(lambda: threading.Lock(), 1)
    assert "return value (lock) cannot be sent" in caught.value.traceback


def test_nested_launch_is_refused():
    with pytest.raises(RankError) as caught:
        launch(lambda: launch(os.getpid, 1), 1)
    assert caught.value.type_name == "NestedLaunch" == NestedLaunch.__name__
    assert "called inside rank 0" in caught.value.message


def test_wrong_calls():
    with pytest.raises(NotEnoughDevices, match="oversubscribe=True"):
        launch(os.getpid, 1000)
    with pytest.raises(ValueError, match="number of ranks"):
        launch(os.getpid)
    with pytest.raises(ValueError, match="jax"):
        launch(os.getpid, 1, framework="jax")
    with pytest.raises(ValueError, match="roles"):
        launch(os.getpid, roles={"worker": 2})
    assert len(launch(os.getpid, 3, oversubscribe=True)) == 3
