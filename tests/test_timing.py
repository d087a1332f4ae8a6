"""The timer: what it counts, leaves out and prints. No test asserts how long real work takes."""

import subprocess
import sys
import time
import types

import pytest

from course_utils.timing import Ratio, Timing, compare, measure, speedup_table


class FakeClock:
    """Time passes only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def job(self, *seconds: float):
        """A function that takes these seconds at its calls, the last one ever after."""
        left = list(seconds)

        def fn() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return fn


def test_warm_up_runs_do_not_count():
    clock = FakeClock()
    timing = measure(clock.job(9.0, 8.0, 1.0, 2.0, 3.0), warmup=2, repeat=3, clock=clock)
    assert timing.runs == (1.0, 2.0, 3.0)
    assert (timing.median, timing.low, timing.high) == (2.0, 1.5, 2.5)


def test_work_still_queued_on_the_device_is_waited_for_and_charged_to_the_right_run():
    clock = FakeClock()
    queue = []

    def launch_kernel():  # returns at once, as a CUDA kernel launch does
        queue.append(2.0)

    def sync():
        while queue:
            clock.now += queue.pop()

    queue.append(100.0)  # somebody's earlier work: it must not be charged to the first run
    assert measure(launch_kernel, warmup=0, repeat=2, sync=sync, clock=clock).runs == (2.0, 2.0)
    unsynchronised = measure(launch_kernel, repeat=2, sync=lambda: None, clock=clock)
    assert unsynchronised.runs == (0.0, 0.0)


def test_without_sync_it_waits_for_cuda_only_once_torch_has_woken_it(monkeypatch):
    calls = []
    awake = False
    cuda = types.SimpleNamespace(
        is_initialized=lambda: awake, synchronize=lambda: calls.append("sync")
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    measure(lambda: None, warmup=0, repeat=1)
    assert calls == []

    def wakes_cuda():
        nonlocal awake
        awake = True

    measure(wakes_cuda, warmup=0, repeat=1)
    assert calls == ["sync"]  # after the call, though not before it


def test_the_result_is_freed_after_the_clock_has_stopped():
    clock = FakeClock()

    class Result:
        def __del__(self):
            clock.now += 5.0

    assert measure(Result, repeat=3, clock=clock).runs == (0.0, 0.0, 0.0)


def test_functions_take_turns_and_every_second_round_runs_backwards():
    calls = []
    fns = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    compare(fns, repeat=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc"


def test_ratio_is_taken_within_each_round():
    clock = FakeClock()
    # In the last round the machine is ten times slower, for both.
    result = compare(
        {"one": clock.job(4.0, 6.0, 40.0), "two": clock.job(2.0, 2.0, 20.0)},
        repeat=3,
        warmup=0,
        clock=clock,
    )
    assert result["one"].runs == (4.0, 6.0, 40.0)
    ratio = result.ratio("one", "two")
    assert ratio.runs == (2.0, 3.0, 2.0)
    assert ratio.median == float(ratio) == 2.0
    assert str(ratio) == "2.00× (2.00–2.50, 3 rounds)"
    assert list(result) == ["one", "two"] and len(result) == 2


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ((0.0119, 0.0123, 0.013), "12.3 ms (12.1–12.7, 3 runs)"),
        ((1.5,), "1.50 s (1 run)"),
        ((0.000155, 0.000155), "155 µs (155–155, 2 runs)"),
        ((2e-9, 2e-9), "2.00 ns (2.00–2.00, 2 runs)"),
        ((0.0, 0.0), "0.00 ns (0.00–0.00, 2 runs)"),
        ((75.0, 75.0), "75.0 s (75.0–75.0, 2 runs)"),
    ],
)
def test_timing_prints_itself_with_spread(runs, text):
    assert str(Timing(runs)) == repr(Timing(runs)) == text


def test_comparison_prints_an_aligned_table():
    clock = FakeClock()
    table = str(compare({"a": clock.job(0.1), "bbb": clock.job(0.25)}, clock=clock))
    header, first, second, footer = table.splitlines()
    assert first.split() == ["a", "100", "ms", "100–100", "ms", "1.00×"]
    assert second.split() == ["bbb", "250", "ms", "250–250", "ms", "2.50×"]
    assert header.endswith("time ÷ a") and len(header) == len(first) == len(second)
    assert footer.startswith("7 rounds")


def test_speedup_table():
    one, two = Timing((0.155, 0.31, 0.155)), Timing((0.084, 0.155, 0.1))
    header, row = speedup_table([(1024, one, two, 2)]).splitlines()
    assert header.split()[-4:] == ["speed-up", "middle", "half", "efficiency"]
    # divided round by round: 1.85, 2.00 and 1.55, not one median over the other
    assert row.split() == ["1024", "155", "ms", "100", "ms", "2", "1.85×", "1.70–1.92", "92", "%"]
    with pytest.raises(ValueError, match="take turns"):
        speedup_table([("x", one, Timing((1.0,)), 2)])
    with pytest.raises(ValueError, match="no rows"):
        speedup_table([])
    with pytest.raises(ValueError, match="at least one device"):
        speedup_table([("x", one, two, 0)])
    with pytest.raises(ValueError, match="more work"):
        speedup_table([("x", one, Timing((0.0, 0.0, 0.0)), 2)])


def test_timings_travel_between_processes():
    import pickle

    timing = Timing((1.0, 2.0))
    assert pickle.loads(pickle.dumps(timing)) == timing


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="repeat=0"):
        measure(lambda: None, repeat=0)
    with pytest.raises(ValueError, match="warmup=-1"):
        measure(lambda: None, warmup=-1)
    with pytest.raises(TypeError, match="not its result"):
        measure(sum([1, 2]))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare({})
    with pytest.raises(KeyError, match="was not measured"):
        compare({"a": lambda: None}, repeat=1)["b"]
    with pytest.raises(ValueError, match="no measurable time"):
        compare({"a": lambda: None}, repeat=1, clock=FakeClock()).ratio("a", "a")
    with pytest.raises(ValueError, match="no runs"):
        Ratio(())


def test_what_the_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0)


def test_real_clock():
    timing = measure(lambda: time.sleep(0.02), repeat=3)
    assert 0.02 <= timing.low and timing.median < 2.0


def test_import_loads_no_framework():
    code = (
        "import sys, course_utils.timing, course_utils.plots, course_utils.datasets;"
        "print([m for m in ('torch', 'tensorflow', 'numpy', 'matplotlib', 'PIL') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
