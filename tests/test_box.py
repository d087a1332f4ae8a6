"""What the sandbox's runner reads of the machine, on made-up folders."""

import pytest

from course_utils.grading import _box

# As a container sees them: Linux's two ways to limit memory.
CGROUPS = {
    "cgroup 2": ("memory.events", "low 0\nhigh 0\nmax 91\noom 4\noom_kill 3\noom_group_kill 0\n"),
    "cgroup 1": ("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
}


@pytest.mark.parametrize("kind", CGROUPS)
def test_processes_that_the_kernel_ended_for_memory_are_counted(tmp_path, kind):
    name, text = CGROUPS[kind]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    assert _box._oom_kills(str(tmp_path)) == 3


def test_without_a_container_there_are_none(tmp_path):
    assert _box._oom_kills(str(tmp_path)) == 0


def test_a_process_that_was_ended_for_memory_is_told_from_a_crash(monkeypatch):
    """The kernel's count goes up while the child is ended by SIGKILL: that was the memory."""
    settings, private = {"limits": {}}, (open("/dev/null"), open("/dev/null"))
    monkeypatch.setattr(_box, "_kill_the_rest", lambda child: None)  # this process has others
    monkeypatch.setattr(_box, "_answer", lambda *_: _box.os.kill(_box.os.getpid(), 9))
    for counts, answer in (([3, 4], {"memory": True}), ([3, 3], {"signal": 9})):
        counts = iter(counts)
        monkeypatch.setattr(_box, "_oom_kills", lambda counts=counts: next(counts))
        monkeypatch.setattr(
            _box, "_listen", lambda pipe, child, _: (b"", _box.os.waitpid(child, 0)[1])
        )
        assert _box._run_in_child({}, settings, private) == answer
    for stream in private:
        stream.close()
