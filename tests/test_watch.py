"""watch(): real work on real cores, and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types

import pytest

from course_utils import _cpu, _gpus, _watch
from course_utils.devices import Sample, Watch, watch

BURN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.perf_counter() + float(sys.argv[2])
while time.perf_counter() < end:
    pass
"""
GIB = 1024**3


def seen(loads: dict[str, list[float | None]], marks=()) -> Watch:
    """A watch that has seen these loads, one sample a second."""
    w = Watch()
    for i, values in enumerate(zip(*loads.values(), strict=True)):
        memory = {_watch.RAM: 2 * GIB}
        w.samples.append(Sample(i + 1.0, dict(zip(loads, values, strict=True)), memory))
    w.marks += marks
    return w


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin")
def test_another_process_pinned_to_a_core_is_seen_there():
    """What launch() does: the work is in other processes. The busy core must be told."""
    core = max(os.sched_getaffinity(0))
    with watch() as w:
        time.sleep(0.3)
        w.mark("at work")
        subprocess.run([sys.executable, "-c", BURN, str(core), "1.2"], check=True)
    (_, before), (name, during) = w.phases()
    assert name == "at work" and len(during) >= 3
    label = f"core {core}"
    assert max(s.utilisation[label] for s in during) > 60  # it spins; tests beside it only add
    assert set(w.devices()) == {f"core {c}" for c in os.sched_getaffinity(0)}
    assert w.finding().startswith("at work: ")
    assert label in w.table() and "main memory" in w.table()
    assert [s.seconds for s in w.samples] == sorted(s.seconds for s in w.samples)
    assert before and not w.errors


def test_a_block_shorter_than_the_interval_has_a_sample():
    with watch(interval=30) as w:
        time.sleep(0.1)
    assert len(w.samples) == 1
    assert w.samples[0].memory[_watch.RAM] > 0


def test_the_thread_ends_with_the_block_and_the_blocks_error_comes_through():
    with pytest.raises(KeyError, match="mine"), watch() as w:
        raise KeyError("mine")
    assert not w._thread.is_alive()


def test_sampling_that_fails_is_said_and_does_not_end_the_block(monkeypatch):
    def broken():
        raise OSError("no /proc here")

    monkeypatch.setattr(_watch, "_reader", broken)
    done = False
    with pytest.warns(UserWarning, match="sampling stopped: OSError: no /proc here"):
        with watch() as w:
            done = True
    assert done and "nothing was measured" in w.table()
    assert "nothing was measured" in w.figure().get_suptitle()


def test_gpus_are_watched_beside_cores(monkeypatch):
    gpus = [
        {"index": 0, "utilisation": 97.0, "used_memory": 5 * GIB},
        {"index": 1, "utilisation": None, "used_memory": None},
    ]
    monkeypatch.setattr(_gpus, "read_gpus", lambda: (gpus, ["GPU 1: utilisation not known"]))
    with pytest.warns(UserWarning, match="GPU 1: utilisation not known") as warned:
        with watch(interval=0.05) as w:
            time.sleep(0.3)
    assert len(warned) == 1  # said once, not once a sample
    assert {"GPU 0", "GPU 1"} <= set(w.devices())
    assert "GPU 0 at 97 %" in w.finding() or len(w.devices()) > 4
    row = next(line for line in w.table().splitlines() if line.startswith("GPU 0"))
    assert row.split() == ["GPU", "0", "97", "%", "97", "%", "5.0", "GiB"]
    labels = [ax.get_ylabel() for ax in w.figure().axes]
    assert "GPU 0\n(%)" in labels and "GPU 1\n(%)" in labels


def test_without_gpus_the_driver_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(_gpus, "read_gpus", lambda: (asked.append(1), ([], []))[1])
    with watch(interval=0.02):
        time.sleep(0.3)
    assert len(asked) == 1


def test_finding_names_the_busy_and_the_idle():
    w = seen({"core 0": [96.0, 98.0], "core 1": [1.0, 3.0]})
    assert w.finding() == "core 0 at 97 %, core 1 idle"
    assert w.figure().get_suptitle() == "core 0 at 97 %, core 1 idle"


def test_finding_has_a_line_for_each_marked_phase():
    loads = {"core 0": [50.0, 100.0, 100.0], "core 1": [50.0, 0.0, 90.0]}
    w = seen(loads, marks=[(1.5, "one rank"), (2.5, "two ranks")])
    one, two = w.finding().splitlines()
    assert one == "one rank: core 0 at 100 %, core 1 idle"
    assert two == "two ranks: core 0 at 100 %, core 1 at 90 %"


def test_finding_leaves_out_what_was_before_the_mark():
    loads = {"core 0": [0.0, 100.0], "core 1": [0.0, None]}
    w = seen(loads, marks=[(1.5, "training")])
    assert w.finding() == "training: core 0 at 100 %, core 1 not known"
    table = w.table().splitlines()
    assert [line.split()[0] for line in table[1:7]] == ["before"] * 3 + ["training"] * 3


def test_finding_on_many_devices_counts_them():
    loads = {f"core {i}": [90.0 if i in (1, 5) else 0.0] for i in range(16)}
    w = seen(loads)
    assert w.finding() == "2 of 16 devices at work: core 1 at 90 %, core 5 at 90 %"
    figure = w.figure()
    labels = [ax.get_ylabel().split("\n")[0] for ax in figure.axes]
    assert len(labels) == _watch.SHOWN + 1 and {"core 1", "core 5"} <= set(labels)
    assert "8 less busy ones not drawn" in figure.get_suptitle()


def test_the_figure_can_be_shown(tmp_path, monkeypatch, capsys):
    from course_utils import plots

    monkeypatch.setenv("COURSE_FIGURES", str(tmp_path))
    w = seen({"core 0": [50.0, 99.0], "core 1": [0.0, 5.0]}, marks=[(1.5, "training")])
    plots.show(w.figure(), alt=w.finding(), name="watch")
    assert (tmp_path / "watch.png").stat().st_size > 5000


def test_numbers_of_offline_cpus_do_not_break_it(monkeypatch):
    import psutil

    few = types.SimpleNamespace(**{"cpu_percent": lambda percpu: [50.0]})
    monkeypatch.setattr(psutil, "cpu_percent", few.cpu_percent)
    monkeypatch.setattr(_cpu, "read_cpu", lambda: ({"cores": (0, 7)}, True, []))
    utilisation, _, _ = _watch._reader()()
    assert utilisation["core 0"] == 50.0 and utilisation["core 7"] is None


@pytest.mark.parametrize("interval", [0, -1, float("nan")])
def test_interval_must_be_positive(interval):
    with pytest.raises(ValueError, match="above 0"):
        watch(interval)
