"""The benchmarks' frame: what they record of the machine, and the page made from the results."""

import getpass
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks import common, scaling_bench
from benchmarks.__main__ import NAMES, PAGE, describe, page, section
from course_utils.timing import Timing

ROOT = Path(__file__).resolve().parent.parent
RESULTS = sorted(common.RESULTS.glob("*.json"))


def private_names():
    names = {socket.gethostname(), str(ROOT), str(Path.home()), f"/home/{getpass.getuser()}"}
    return {name for name in names if len(name) > 3 and name != "localhost"}


def test_the_machine_is_described_without_private_names():
    found = common.machine()
    assert found["cores"] >= 1 and found["ram_gib"] > 0 and found["cpu"] and found["os"]
    assert found["packages"]["numpy"]
    text = json.dumps(found)
    assert not [name for name in private_names() if name in text]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_name_no_place(path):
    text = path.read_text("utf-8")
    for name in ("/work", "/root", "/home", "/tmp", *private_names()):
        assert name not in text, name


def test_the_page_is_written_from_the_committed_results():
    assert PAGE.read_text("utf-8") == page(), "run: python -m benchmarks --tables"


def test_rows_and_targets_come_out_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    rows = [common.row("two ranks, warm", Timing((0.05, 0.06, 0.07)), size=2)]
    targets = [common.target("a launch", "at most 0.15 s", "0.06 s", met=True)]
    results = common.write("launch", "Launch of two ranks", 31.0, rows, targets)
    assert json.loads((tmp_path / "launch.json").read_text("utf-8")) == results
    text = section("launch", results)
    assert "| two ranks, warm | 60 ms (55–65) |" in text
    assert "| a launch | at most 0.15 s | 0.06 s | yes |" in text
    assert "**Other programs used 31 % of the cores meanwhile.**" in text


def test_a_result_without_timings_is_an_error_not_an_empty_table():
    with pytest.raises(ValueError, match="census.json holds no timing"):
        section("census", {"machine": {}, "rows": []})


def test_a_table_of_its_own_comes_out_as_it_is():
    table = {"head": ["method", "trials"], "rows": [["ours", "3"], ["theirs", "40"]]}
    machine = {"cpu": "x", "cores": 2, "gpus": []}
    found = {"title": "T", "table": table, "machine": machine, "date": "d", "note": "Mind this."}
    lines = section("batch_size", found).splitlines()
    assert lines[:6] == ["## T", "", "| method | trials |", "| --- | --- |", "| ours | 3 |",
                         "| theirs | 40 |"]  # fmt: skip
    assert "Mind this." in lines


def test_describe_takes_machines_with_fewer_facts():
    machine = {"cpu": "x", "cores": 2, "gpus": ["H"], "system": "Linux"}
    text = describe({"machine": machine, "date": "2026-01-02", "versions": {"python": "3.12"}})
    assert text == "Measured 2026-01-02 on x, 2 cores, H, Linux, python 3.12."


def test_work_of_our_own_processes_is_not_called_other_work():
    spin = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    before = common._own_seconds()
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert common._own_seconds() - before >= 0.35  # of a child that has ended
    child = subprocess.Popen([sys.executable, "-c", spin + "\ninput()"], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while common._own_seconds() - before < 0.75 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert common._own_seconds() - before >= 0.75  # of a child that lives
    child.communicate(b"\n")


def test_the_quietest_attempt_is_kept_whatever_it_measured(monkeypatch):
    shares = iter([40.0, 10.0, 30.0])

    class Others:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.percent = next(shares)

    monkeypatch.setattr(common, "OtherWork", Others)
    measured = iter("abc")
    assert common.quietest(lambda: next(measured)) == ("b", 10.0)


@pytest.mark.slow
def test_scaling_in_a_small_way(monkeypatch):
    """Real ranks by every method, to the same loss (else it raises), and none is left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(scaling_bench, "STARTS", 1)
    groups = [("launch", 1), ("launch", 2), ("torchrun", 2), ("Lightning", 2)]
    before = set(psutil.Process().children(recursive=True))
    runs, steps, starts, _ = scaling_bench.measure(groups, (2,), rounds=1, seconds=0.0)
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(runs) == [(*group, 2) for group in groups] and steps == {2: 3}
    found = scaling_bench.results(runs, steps, starts, devices=2, gpus=False)
    assert all(len(times) == 1 for times in runs.values())
    assert [len(line) for line in found["table"]["rows"]] == 2 * [len(found["table"]["head"])]
    assert "Lightning" in found["note"] and len(found["rows"]) == 4


@pytest.mark.slow
def test_scaling_pools_the_rounds_of_every_start(monkeypatch):
    """One process can be slower than the next as long as it lives, so one start is not enough."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(scaling_bench, "STARTS", 2)
    pids = []
    end = scaling_bench.Group.end
    monkeypatch.setattr(
        scaling_bench.Group, "end", lambda self: (pids.append(self.process.pid), end(self))
    )
    runs, *_ = scaling_bench.measure([("launch", 1)], (2,), rounds=2, seconds=0.0)
    assert [len(seconds) for seconds in runs.values()] == [2 * 2]
    assert len(set(pids)) == 2


def test_scaling_says_what_it_kept_and_what_is_oversubscribed():
    assert scaling_bench.plan(2, gpus=False)[-2:] == [("Lightning", 2), ("launch", 4)]
    assert [n for _, n in scaling_bench.plan(2, gpus=True)] == [1, 1, 1, 2, 2, 2]
    runs = {}
    for batch, ours in ((8, 1.0), (32, 1.3), (128, 1.2)):
        runs[("launch", 1, batch)] = [1.0, 1.0]
        runs[("launch", 2, batch)] = [ours, ours]
        runs[("torchrun", 2, batch)] = [1.2, 1.2]
    runs[("launch", 4, 8)] = [2.0, 2.0]
    steps, starts = {8: 9, 32: 6, 128: 3}, {("launch", 2): 1.0, ("torchrun", 2): 2.0}
    found = scaling_bench.results(runs, steps, starts, devices=2, gpus=False)
    assert [(t["what"], t["met"]) for t in found["targets"]] == [
        ("a step by launch ÷ by torchrun, 2 ranks, 8 images a rank", True),
        ("a step by launch ÷ by torchrun, 2 ranks, 32 images a rank", False),
        ("2 ranks against one, 32 images a rank", False),  # 2 / 1.3
        ("a step by launch ÷ by torchrun, 2 ranks, 128 images a rank", True),
        ("2 ranks against one, 128 images a rank", True),  # 2 / 1.2
    ]
    assert [row[1] for row in found["table"]["rows"][:3]] == [
        "1 rank", "2 ranks", "4 ranks, oversubscribed"
    ]  # fmt: skip
    assert found["table"]["rows"][1][2] == "144 (144–144)"  # 2 ranks x 8 images x 9 steps in 1 s


def test_scaling_names_what_a_rank_died_of(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    command = [sys.executable, "-c", "raise ValueError('no such thing')"]
    monkeypatch.setattr(scaling_bench.Group, "_command", lambda self: command)
    with pytest.raises(RuntimeError, match="(?s)launch on 1 ranks did not start.*no such thing"):
        scaling_bench.Group("launch", 1)


def test_an_unknown_name_is_refused():
    command = [sys.executable, "-m", "benchmarks", "sun"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2
    assert f"there are {', '.join(NAMES)}" in found.stderr
