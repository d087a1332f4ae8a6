"""`launch` from the cells of a real Jupyter kernel."""

import importlib.util
import os
import re
import time
from pathlib import Path

import psutil
import pytest

jupyter_client = pytest.importorskip("jupyter_client")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CORES < 2, reason="two ranks need two cores"),
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch"),
]

ROOT = Path(__file__).parents[1]
IMPORTS = """
import os, time
import torch, torch.distributed as dist
from course_utils.launch import launch, RankError
"""


class Kernel:
    """A kernel of this Python, and what its cells put out."""

    def __init__(self, env=()):
        env = {**os.environ, "PYTHONPATH": str(ROOT), **dict(env)}
        self.manager = jupyter_client.KernelManager()
        self.manager.start_kernel(env=env)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code):
        self.out = self.err = ""
        self.error = None
        self.message = self.client.execute(code)

    def read(self, until="", timeout=60):
        """Read until a match is printed or, without a pattern, until the cell has ended."""
        end = time.monotonic() + timeout
        while not (until and re.search(until, self.out, re.S)):
            message = self.client.get_iopub_msg(timeout=end - time.monotonic())
            if message["parent_header"].get("msg_id") != self.message:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                self.out += content["text"] if content["name"] == "stdout" else ""
                self.err += content["text"] if content["name"] == "stderr" else ""
            elif message["msg_type"] == "error":
                self.error = content
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        return self.out

    def run(self, code, timeout=60):
        self.start(code)
        return self.read(timeout=timeout)

    def traceback(self):
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.error["traceback"]))

    def close(self):
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel()
    kernel.run(IMPORTS)
    assert kernel.error is None
    yield kernel
    servers = psutil.Process(kernel.manager.provisioner.pid).children(recursive=True)
    kernel.close()
    psutil.wait_procs(servers, timeout=5)
    assert not [p for p in servers if p.is_running()]


def gone(pids, within):
    until = time.monotonic() + within
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_a_cells_function_uses_the_cells_globals(kernel):
    kernel.run("""
SCALE = 10
class Result:
    def __init__(self, x): self.x = x
def helper(x): return x * SCALE
def work(plus):
    x = torch.tensor([helper(dist.get_rank()) + plus])
    dist.all_reduce(x)
    everyone = [None, None]
    dist.all_gather_object(everyone, Result(dist.get_rank()))  # pickles a class of this cell
    print("sum", x)
    return Result(x), [each.x for each in everyone]
""")
    out = kernel.run("""
a, b = launch(work, 2, 1)
print(a[0].x, b[0].x, a[1], b[1], isinstance(a[0], Result))""")
    assert kernel.error is None, kernel.traceback()
    assert "[rank 0] sum tensor([12])\n" in out and "[rank 1] sum tensor([12])\n" in out
    assert out.endswith("tensor([12]) tensor([12]) [0, 1] [0, 1] True\n")


def test_output_streams_into_the_cell_while_it_runs(kernel, tmp_path):
    go = tmp_path / "go"
    kernel.start(f"""
def wait():
    print("waiting")
    while not os.path.exists({str(go)!r}): time.sleep(0.01)
    print("went on")
_ = launch(wait, 2, timeout=40)""")
    kernel.read(until=r"rank 1. waiting")
    assert "went on" not in kernel.out
    go.touch()
    assert "[rank 0] went on" in kernel.read()


def test_the_failing_ranks_own_traceback_shows_in_the_cell(kernel):
    start = time.monotonic()
    kernel.run("""
def train():
    if dist.get_rank() == 1:
        time.sleep(0.5)
        batch = {"image": 1}
        batch["label"]  # not there
    dist.all_reduce(torch.ones(1))
launch(train, 2)""")
    assert time.monotonic() - start < 20
    assert kernel.error["ename"] == "RankError"
    shown = kernel.traceback()
    assert "rank 1 of 2 raised KeyError: 'label'" in shown
    assert re.search(r"Cell In\[\d+\], line 5, in train\n +batch\[\"label\"\]  # not there", shown)
    assert re.search(r"rank 0 waits in all_reduce, line 6 of Cell In\[\d+\]", shown)
    assert "launch.py" not in shown  # our own frames are no help to a learner
    assert 'File "torch/distributed/' in shown and str(ROOT) not in shown  # short, and portable


def test_a_hang_names_the_line_of_the_cell(kernel):
    kernel.run("""
def uneven():
    for step in range(2 + dist.get_rank()):
        dist.all_reduce(torch.ones(1))
    dist.barrier() if dist.get_rank() == 5 else time.sleep(600 * (1 - dist.get_rank()))
launch(uneven, 2, timeout=2)""")
    assert kernel.error["ename"] == "LaunchTimeout"
    assert re.search(r"rank 1 waits in all_reduce, line 3 of Cell In\[\d+\]", kernel.traceback())
    assert re.search(r"rank 0 is in uneven, line 4 of Cell In\[\d+\]", kernel.traceback())


def test_the_stop_button(kernel):
    kernel.start("""
def forever():
    print("pid", os.getpid())
    while True: time.sleep(1)
launch(forever, 2)""")
    kernel.read(until=r"pid \d+\n.*pid \d+\n")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", kernel.out)]
    kernel.manager.interrupt_kernel()
    kernel.read()
    assert kernel.error["ename"] == "KeyboardInterrupt"
    assert re.search(r"rank 0 is in forever, line [23] of Cell In\[\d+\]", kernel.err)
    assert gone(pids, within=5)
    assert kernel.run("print(launch(dist.get_rank, 2))") == "[0, 1]\n"


@pytest.mark.parametrize("how", ["kill -9", "restart"])
def test_no_rank_outlives_the_kernel(how):
    kernel = Kernel()
    try:
        kernel.start("""
import os, time
from course_utils.launch import launch
def forever():
    import torch, torch.distributed as dist
    print("pid", os.getpid(), os.getppid())
    dist.all_reduce(torch.ones(1)) if dist.get_rank() else time.sleep(600)
launch(forever, 2)""")
        kernel.read(until=r"pid \d+ \d+\n.*pid \d+ \d+\n")
        pids = [int(pid) for pid in re.findall(r"\d{2,}", kernel.out)]
        assert len(set(pids)) == 3  # two ranks and the fork server
        if how == "restart":
            kernel.manager.restart_kernel(now=True)
        else:
            os.kill(kernel.manager.provisioner.pid, 9)
        assert gone(pids, within=5)
    finally:
        kernel.close()


def test_torch_and_tensorflow_take_turns(kernel):
    if not importlib.util.find_spec("tensorflow"):
        pytest.skip("needs TensorFlow")
    kernel.run(
        """
def task():
    import json, tensorflow as tf
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"], float(tf.reduce_sum([1.0, 2.0]))
for _ in range(2):
    print(launch(dist.get_rank, 2), launch(task, 2, framework="tensorflow"))""",
        timeout=120,
    )
    assert kernel.error is None, kernel.traceback()
    assert kernel.out == "[0, 1] [(0, 3.0), (1, 3.0)]\n" * 2
