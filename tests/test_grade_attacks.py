"""What a grader must survive: homework that cheats, breaks, hangs or floods, in the real sandbox.

Every submission here is made up, and runs only inside the sandbox that it tests. Each `ask` of
a box is watched (`WatchedBox`): the limit of time holds within 3 s, 1 s later no process is left,
and the secret is nowhere in the answer. After each attack an honest answer gets all its points
in the same sandbox.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import inspect
import io
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from course_utils.grading import Finding, Task, Wrong, all_tasks, get_task
from course_utils.grading import sandbox as sandbox_module
from course_utils.grading import tasks as tasks_module
from course_utils.grading.marking import Handed, Rules, mark_class, mark_file, mark_submission
from course_utils.grading.sandbox import Box, Bubblewrap, Limits, MiB
from course_utils.grading.selftest import solution_of
from course_utils.grading.submission import Exercise, Submission, read_exercise
from course_utils.grading.wire import one_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="bubblewrap exists on Linux only"),
]
ROOT = Path(__file__).resolve().parent.parent
TASKS = Path(tasks_module.__file__).parent
CANARY = "canary" + secrets.token_hex(16)
LIMITS = Limits(seconds=3, memory=300 * MiB, processes=64, files=256, disk=16 * MiB)
RULES = Rules(CANARY, LIMITS)
# What /tmp of a sandbox holds at the start: the way to the libraries of a course that lives there.
CLEAR = [path.parts[2] for path in sandbox_module._libraries() if path.parts[1] == "tmp"]
SOLVED = ROOT / "solutions" / "13_parameter_server.ipynb"
BLANK = ROOT / "exercises" / "13_parameter_server.ipynb"
TASK = get_task("13-staleness")
WRONG = TASK.wrong[0].source  # 0 points
RIGHT = solution_of(read_exercise("13", ROOT), ROOT).cells[TASK.id]


# --- the watched sandbox ----------------------------------------------------------------------


def members(namespace: str) -> set[int]:
    """Every process of this machine that lives in a namespace, and is more than a dead entry."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/ns/pid") == namespace:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                found |= {pid} - ({pid} if state in "ZX" else set())
    return found


def within(seconds: float, condition) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class WatchedBox(Box):
    """A box that checks what must hold after whatever a student sent."""

    def ask(self, request):
        if self._process is None:
            self._start()
            (self.runner,) = self._first
            self.namespace = os.readlink(f"/proc/{self.runner.pid}/ns/pid")
            assert self.namespace != os.readlink("/proc/self/ns/pid")
        start = time.monotonic()
        answer = super().ask(request)
        seconds = time.monotonic() - start
        assert seconds < self.limits.seconds + 3, f"the limit was passed: {seconds:.1f} s"
        alive = {self.runner.pid} if self._process else set()
        assert within(1, lambda: members(self.namespace) <= alive), "processes are left"
        if self._process:
            assert os.fstat(self._errors.fileno()).st_size == 0, "output reached the host"
        assert CANARY not in repr(answer)
        return answer


class WatchedSandbox(Bubblewrap):
    def box(self, preload=(), limits=None):
        return WatchedBox(self, preload, limits or Limits())


@pytest.fixture(scope="module")
def sandbox(bubblewrap):
    # It must not travel into the sandbox with the environment.
    os.environ["COURSE_CANARY"] = CANARY
    with WatchedSandbox() as sandbox:
        yield sandbox
    del os.environ["COURSE_CANARY"]


@pytest.fixture(scope="module")
def box(sandbox):
    with sandbox.box((), LIMITS) as box:
        yield box


@pytest.fixture
def small(sandbox):
    """A box for what ends at the limit of time."""
    with sandbox.box((), Limits(1, 200 * MiB, 48, 128, 8 * MiB)) as box:
        yield box


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The course with exercise 13 alone: nobody edits it while the tests run."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "exercises").mkdir()
    shutil.copy(BLANK, folder / "exercises")
    return folder


def mark(box, source):
    """The mark of task 13-staleness for one solution cell."""
    given = read_exercise("13", ROOT)
    exercise = Exercise("13", (TASK,), given.trusted, given.locked)
    [found] = mark_submission(Submission({TASK.id: source}), exercise, RULES, box)
    assert CANARY not in repr(found)
    assert all(text.isprintable() for text in (found.why, *(f["why"] for f in found.findings)))
    return found


def attack(box, source, *statuses, score=0):
    """Mark an attack; then an honest answer in the same box, which must get all points."""
    found = mark(box, source)
    assert found.status in statuses, (found.status, found.why)
    assert found.score == score, found
    after = mark(box, RIGHT)
    assert (after.status, after.score) == ("ok", TASK.points), f"the next task suffered: {after}"
    return found


PROBE = """
def run(student, inputs):
    return student.probe(inputs)
"""


def probe(box, source, inputs=None):
    """What the function `probe(inputs)` of a cell returns from inside the sandbox."""
    request = {"trusted": "", "cells": [source], "functions": ["probe"], "run": PROBE}
    answer = box.ask({**request, "run_name": "run", "inputs": inputs})
    assert answer.status == "replied", (answer.status, answer.why)
    return answer.value


def notebook(path=SOLVED, **sources):
    """A notebook as JSON; the solution cells named (`staleness=`) have another source."""
    data = json.loads(path.read_text())
    for cell in data["cells"]:
        name = str(cell["metadata"].get("nbgrader", {}).get("grade_id"))
        if name[3:] in sources:
            cell["source"] = sources[name[3:]]
    return data


def graded(data, grade_id):
    """The cell of a notebook with this grade_id."""
    cells = data["cells"]
    return next(c for c in cells if c["metadata"].get("nbgrader", {}).get("grade_id") == grade_id)


def hand_in(data, tmp_path, sandbox, course, exercise=None):
    """The mark of a whole notebook, given as JSON or bytes."""
    path = tmp_path / "handed.ipynb"
    path.write_bytes(data if type(data) is bytes else json.dumps(data).encode())
    return mark_file(Handed("a student", path), sandbox, RULES, course, exercise)


def tree():
    """What the course's files contain: a digest by path."""
    folders = ("course_utils", "exercises", "solutions", "source", "tests")
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    paths = [path for path in paths if "__pycache__" not in path.parts]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


# --- rows 1 to 5: honest work, and values that pretend ------------------------------------------


def test_a_killed_grader_leaves_no_folder_for_ever(monkeypatch, tmp_path):
    """Its folder goes when the next one starts; that of a grader at work stays."""
    monkeypatch.setattr(sandbox_module.tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    old, mine = (tmp_path / f"course-box-{pid}-x" for pid in (ended.pid, os.getpid()))
    old.mkdir()
    mine.mkdir()
    with sandbox_module.stage():
        assert not old.exists() and mine.exists()


@pytest.mark.parametrize("kind", [sandbox_module.Podman, sandbox_module.Docker])
def test_container_command(kind):
    """No container engine runs here; what it would be told is looked at, word by word."""
    with kind() as one:
        command = one.command(LIMITS, ["-P", "/box/_box.py", "{}"], "box-1")
        volumes = [command[at + 1] for at, word in enumerate(command) if word == "--volume"]
        assert volumes == [f"{one.root}:/box:ro"], "nothing of the course is mounted"
    assert command[:4] == [kind.name, "run", "--name", "box-1"]
    user = int(command[command.index("--user") + 1].split(":")[0])
    assert 1000 <= user < 65536, "no administrator, and one that a user's own engine has"
    assert command[-4:] == [kind.image, "-P", "/box/_box.py", "{}"]
    words = " ".join(command)
    for wanted in (
        "--rm", "--network none", "--read-only", f"--user {user}:{user}", "--cap-drop ALL",
        "--security-opt no-new-privileges", f"--pids-limit {LIMITS.processes}",
        f"--memory={LIMITS.memory}", f"--memory-swap={LIMITS.memory}",
        f"--shm-size {LIMITS.disk}", "CUDA_VISIBLE_DEVICES=",
    ):  # fmt: skip
        assert f" {wanted} " in f"{words} ", wanted
    assert "--privileged" not in words and "--gpus" not in words


def test_reference(sandbox, course, tmp_path):
    """1: exactly all points, three times the same."""
    marks = [hand_in(SOLVED.read_bytes(), tmp_path, sandbox, course) for _ in range(3)]
    assert [found.score for found in marks] == [16, 16, 16] and marks[0].points == 16
    assert marks[0].tasks == marks[1].tasks == marks[2].tasks
    assert {task.status for task in marks[0].tasks} == {"ok"} and marks[0].notes == []


def test_blank(sandbox, course, tmp_path):
    """2: exactly 0, and not attempted."""
    found = hand_in(BLANK.read_bytes(), tmp_path, sandbox, course)
    assert found.score == 0 and {task.status for task in found.tasks} == {"not_attempted"}


def test_wrong_answers(box):
    """3: each named wrong answer gets what its task declares, less than all."""
    given = read_exercise("13", ROOT)
    for task in given.tasks:
        exercise = Exercise("13", (task,), given.trusted, {})
        for wrong in task.wrong:
            [found] = mark_submission(Submission({task.id: wrong.source}), exercise, RULES, box)
            assert (found.status, found.score) == ("wrong", wrong.score), wrong.name
            assert found.why and found.score < task.points


@pytest.mark.parametrize(
    "noise",
    [
        "import warnings; warnings.warn('old')",
        "import os; os.write(2, b'[W NNPACK.cpp] C-level noise'); os.write(1, b'x')",
        "import sys; print('{\"value\": 4}'); print('x' * 10**7); sys.stderr.write('no')",
        "import os; os.system('echo from a shell; echo there >&2')",
        "import os; os.closerange(0, 3)",
    ],
)
def test_correct_and_noisy(box, noise):
    """4: all points, whatever is printed."""
    source = RIGHT.replace("    version,", f"    {noise}\n    version,")
    attack(box, source, "ok", score=TASK.points)


PRETENDERS = {
    "equal to everything": """
class Same:
    def __eq__(self, other): return True
    def __hash__(self): return 0
    def __len__(self): return 5
    def __getitem__(self, key): return self
    def __float__(self): return 0.0
    __index__ = __int__ = __float__
value = [Same()] * 5
""",
    "a list that is equal to everything": """
class Same(list):
    def __eq__(self, other): return True
    __ne__ = __lt__ = lambda self, other: False
value = Same()
""",
    "a number that is equal to everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
value = [Same()] * 5
""",
    "NaN": "value = [float('nan')] * 5",
    "a bool for a number": "value = [False] * 5",
    "a subclass of str": "value = type('Text', (str,), {'__eq__': lambda *a: True})('[0, 0]')",
    "__reduce__": """
class Bomb:
    def __reduce__(self): return __import__('os').system, ('touch /tmp/reduced',)
    __reduce_ex__ = lambda self, version: self.__reduce__()
value = Bomb()
""",
    "__array__": """
class Array:
    def __array__(self, *a, **k): raise SystemExit
    __array_interface__ = property(lambda self: 1 / 0)
    __iter__ = __len__ = tolist = __array__
value = [Array(), Array()]
""",
    "__torch_function__": """
class Tensor:
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None): return 0
    tolist = item = detach = numpy = lambda self: [0] * 5
value = Tensor()
""",
    "a type that lies about its name": """
class Meta(type):
    __name__ = property(lambda cls: 1 / 0)
    def __eq__(cls, other): return True
    __hash__ = type.__hash__
class Liar(metaclass=Meta):
    __class__ = property(lambda self: int)
value = Liar()
""",
    "a list inside itself": "value = []; value.append(value)",
    "an enormous integer": "value = [1 << 10**6] * 5",
    "text without end": "value = ['x' * 10**8]",
    "a lone surrogate": "value = ['\\ud800' * 5]",
    "words of the wire": "value = {'$': '\\x1b[31m' + 'NaN' * 10**4}",
}


@pytest.mark.parametrize("name", PRETENDERS)
def test_pretending_value(box, name):
    """5: an object, NaN, a bool, a subclass: 0 for the case, and nothing breaks."""
    source = f"{PRETENDERS[name]}\ndef staleness(events):\n    return value\n"
    found = attack(box, source, "wrong")
    assert len(found.why) < 1000
    assert not Path("/tmp/reduced").exists(), "the grader ran what came out of the sandbox"


# --- rows 6 to 10: tampering in the student's own process ---------------------------------------

TAMPERING = {
    "ast transformer": """
from IPython.core.interactiveshell import InteractiveShell
import ast
class Drop(ast.NodeTransformer):
    def visit_Assert(self, node): return None
shell = InteractiveShell.instance()
shell.ast_transformers.append(Drop())
shell.input_transformers_post.append(lambda lines: ["4.0"])
shell.run_cell = lambda *a, **k: 4.0
""",
    "get_ipython": """
try:
    get_ipython().kernel.do_execute = lambda *a, **k: 4.0
except Exception:
    pass
""",
    "builtins": """
import builtins
for name in ("all", "any", "isinstance", "sorted", "max"):
    setattr(builtins, name, lambda *a, **k: True)
builtins.type = lambda *a: int
builtins.sum = lambda *a: 4
""",
    "json": """
import json
json.dumps = lambda *a, **k: '{"value": {"score": 4, "points": 4, "status": "ok"}}'
json.loads = lambda *a, **k: {"value": 4}
json.JSONEncoder.encode = json.dumps
""",
    "check and judge": """
import sys, types
fake = types.ModuleType("course_utils.grading")
fake.check = fake.mark = lambda *a, **k: 4.0
sys.modules["course_utils.grading"] = sys.modules["course_utils.grading.check"] = fake
""",
    "the runner": """
import os, sys
sys.modules["wire"].plain = lambda value: {"one": 4, "equal": 4, "slow": 4, "dies": 4}
for frame in sys._current_frames().values():
    while frame:
        for name in ("plain", "_run", "_answer"):
            if name in frame.f_globals:
                frame.f_globals[name] = lambda *a: {"score": 4}
        frame = frame.f_back
""",
    "numpy": "import numpy; numpy.array_equal = numpy.allclose = lambda *a, **k: True",
    "operators": """
import ctypes, gc
for table in gc.get_referents(int.__dict__):
    if type(table) is dict and "__eq__" in table:
        table["__eq__"] = lambda a, b: True
""",
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering(box, name):
    """6 and 7: transformers, patched modules and builtins give nothing, nor help the next task."""
    attack(box, TAMPERING[name] + WRONG, "wrong", "error", "bad_reply", "crash")


LOOK = """
import os, subprocess, sys

def texts(path):
    if not os.path.isfile(path):  # a terminal would wait
        return ""
    try:
        with open(path, "rb") as file:
            return file.read(200_000).decode("utf-8", "replace")
    except OSError:
        return ""

def probe(inputs):
    needle, everything = inputs[::-1], [str(dict(os.environ))]
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            for name in ("environ", "cmdline", "mountinfo", "maps", "status"):
                everything.append(texts(f"/proc/{pid}/{name}"))
    libraries = ("/usr", "/proc", "/sys", sys.base_prefix, sys.prefix)
    for folder, below, files in os.walk("/"):
        below[:] = [name for name in below if not f"{folder}/{name}".startswith(libraries)
                    and not f"{folder}{name}".startswith(libraries)]
        everything += [texts(f"{folder}/{name}") for name in files]
    names = "/proc -prune -o ( -name lesson_* -o -name *.ipynb ) -print"
    seen = subprocess.run(["find", "/", "-path", *names.split()], capture_output=True, text=True)
    names = "/proc -prune -o -path *course_utils/grading/* -print"
    own = subprocess.run(["find", "/", "-path", *names.split()], capture_output=True, text=True)
    found = [text[:80] for text in everything if needle in text]
    return {"hits": found, "texts": len(everything), "env": sorted(os.environ),
            "names": seen.stdout.splitlines(), "own": own.stdout.splitlines()}
"""


def test_answers_are_not_there(sandbox):
    """8: no solution, task definition, gradebook, environment or secret can be found."""
    with sandbox.box((), Limits(seconds=60, memory=500 * MiB)) as box:
        seen = probe(box, LOOK, CANARY[::-1])
    assert seen["texts"] > 20 and seen["hits"] == []
    ours = {path.name for path in ROOT.glob("*/*.ipynb")}
    names = {Path(name).name for name in seen["names"]}
    assert not names & ours
    assert not {name for name in names if name.endswith(".py")} & set(os.listdir(TASKS))
    own = {Path(name).name for name in seen["own"]}
    assert own == {"__init__.py", "ranks.py", "wire.py"}, "of the grader only this is needed"
    assert "COURSE_CANARY" not in seen["env"] and len(seen["env"]) < 16


def test_installed_copies_are_masked(tmp_path, monkeypatch):
    """8: a copy of the course among the libraries brings its answers into no sandbox."""
    copy = tmp_path / "lib" / "python3.11" / "site-packages" / "course_utils" / "grading"
    copy.mkdir(parents=True)
    (copy / "tasks.py").write_text("ANSWERS = 42")
    tmp_path.chmod(0o755)
    libraries = sandbox_module._libraries()
    monkeypatch.setattr(sandbox_module, "_libraries", lambda: [*libraries, tmp_path])
    source = "import os\ndef probe(place): return os.listdir(place)"
    with WatchedSandbox() as sandbox, sandbox.box((), LIMITS) as box:
        assert probe(box, source, str(copy.parent)) == ["grading"]
        assert probe(box, source, str(copy)) == []


def test_task_definitions_cannot_be_imported(box):
    """8, and answers stolen by an import: no module of the tasks, the checker or the grader."""
    source = """
import importlib
def probe(inputs):
    found = []
    for name in inputs:
        try:
            importlib.import_module("course_utils.grading" + name)
            found.append(name)
        except ImportError:
            pass
    return found
"""
    names = [".tasks", ".tasks.lesson_13", ".task", ".check", ".marking", ".sandbox", ".collect"]
    assert probe(box, source, names) == []
    assert probe(box, source, [".wire"]) == [".wire"], "the probe itself works"


def test_expected_values_are_not_in_memory(box):
    """9: the student's process and its frames hold inputs, never what is expected."""
    source = """
import gc, linecache, sys

def memory():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as mem:
        for line in maps:
            words = line.split()
            low, high = (int(word, 16) for word in words[0].split("-"))
            if words[1].startswith("rw") and high - low < 2**26:
                try:
                    mem.seek(low)
                    yield mem.read(high - low)
                except OSError:
                    continue

def probe(inputs):
    counts = {}
    for back in inputs["back"]:
        counts[back[::-1]] = 0
    needles = {name: bytes(name, "utf-8") for name in counts}
    for piece in memory():
        for name in counts:
            counts[name] += piece.count(needles[name])
    wanted, frame, same = inputs["wanted"][::-1], sys._getframe(), 0
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            same += type(value) is list and value == wanted and value is not wanted
        frame = frame.f_back
    same += sum(type(o) is list and o == wanted and o is not wanted for o in gc.get_objects())
    return {"counts": list(counts.values()), "same": same}
"""
    inputs = TASK.inputs(RULES.seed(TASK))
    wanted = TASK.expected(inputs)["slow"]
    names = ["_stale_judge", "_stale_expected", CANARY, "never-anywhere-" + secrets.token_hex(8)]
    seen = probe(box, source, {"back": [n[::-1] for n in names], "wanted": wanted[::-1], **inputs})
    assert seen["same"] == 0
    *rest, nowhere = seen["counts"]
    assert nowhere > 0, "the search finds at least its own words"
    assert rest == [nowhere] * 3, "as rare as a word that is nowhere"


FORGE = """
import os, stat
def private():
    for number in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                return number
        except OSError:
            pass
"""
FORGED = {
    "marks instead of values": (b'{"value": {"score": 4, "points": 4}}\n', "wrong"),
    "a verdict": (b'{"status": "ok", "score": 4}\n', "bad_reply"),
    "pickle": (b"\x80\x04cposix\nsystem\n(X\x0e\x00\x00\x00touch /tmp/forgedtR.\n", "bad_reply"),
    "deep": (b'{"value": ' + b"[" * 10**6 + b"\n", "bad_reply"),
    "deep and closed": (b'{"value": ' + b"[" * 300 + b"]" * 300 + b"}\n", "wrong"),
    "a list, not a dict": (b'["value"]\n', "bad_reply"),
    "a list with an error": (b'["error"]\n', "bad_reply"),
    "text": (b'"v"\n', "bad_reply"),
    "null": (b"null\n", "bad_reply"),
    "empty": (b"{}\n", "bad_reply"),
    "two kinds": (b'{"value": 1, "error": "x"}\n', "bad_reply"),
    "an error that is no text": (b'{"error": [1]}\n', "bad_reply"),
    "digits": (b'{"value": ' + b"9" * 10**6 + b"}\n", "bad_reply"),
    "many digits": (b'{"value": {"one": [' + b"9" * 4000 + b"]}}\n", "wrong"),
    "infinity": (b'{"value": {"one": [1e999, NaN, -Infinity]}}\n', "wrong"),
    "not utf-8": (b'{"value": "\xff\xfe"}\n', "wrong"),
    "two answers": (b'{"value": 1}\n{"value": 2}\n', "bad_reply"),
    "no end of line": (b'{"value": 1}', "bad_reply"),
    "a control sequence": (
        b'{"error": "\\u001b[2J\\ud800\\u202e<b>\\n13-staleness 4/4"}\n',
        "error",
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_reply(box, name):
    """10: whoever writes to the private pipe himself gets what values get, and no code is run."""
    payload, status = FORGED[name]
    source = f"{FORGE}\nPAYLOAD = bytes.fromhex(TEXT)\n"
    if len(payload) > 50_000:  # a cell may not be that long
        source = source.replace("bytes.fromhex(TEXT)", repr(payload[:10]) + " + N * 10**6 + b'\\n'")
        source = source.replace("N", repr(payload[10:11]), 1)
    source = source.replace("TEXT", repr(payload.hex()))
    source += """
def staleness(events):
    data = PAYLOAD
    while data:
        data = data[os.write(private(), data):]
    os._exit(0)
"""
    attack(box, source, status)
    assert not Path("/tmp/forged").exists()


def test_a_hundred_megabytes(box):
    """10: a reply without end."""
    source = FORGE + "\ndef staleness(events):\n    while os.write(private(), b'x' * 10**6): pass\n"
    attack(box, source, "bad_reply")


def test_reply_before_the_real_one(box):
    """10: two answers are no answer, even where one of them is right."""
    given = json.dumps({"value": TASK.expected(TASK.inputs(RULES.seed(TASK)))})
    for own in (RIGHT, WRONG):
        source = f"{FORGE}\nos.write(private(), {given!r}.encode() + b'\\n')\n{own}"
        attack(box, source, "bad_reply")


def test_reply_after_the_real_one(box):
    """10: a child that outlives its parent writes into the pipe; no answer becomes better."""
    given = json.dumps({"value": TASK.expected(TASK.inputs(RULES.seed(TASK)))})
    source = f"""{FORGE}
import time
first = os.getpid()
if os.fork() == 0:
    os.setsid()
    end = private()
    while os.getppid() == first:
        time.sleep(0.0005)
    while True:
        os.write(end, {given!r}.encode() + b"\\n")
{WRONG}"""
    attack(box, source, "wrong", "bad_reply")


def test_the_runner_is_out_of_reach(box):
    """Its memory, descriptors, limits and signals: the first process belongs to the grader."""
    source = """
import ctypes, os, resource, signal

def refused(action):
    try:
        action()
    except OSError as error:
        return error.strerror
    return ""

def call(*arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def attach():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(16, 1, None, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def probe(inputs):
    for number in range(1, 65):  # none of them reaches it
        refused(lambda: os.kill(1, number))
    found = {name: refused(lambda: open(f"/proc/1/{name}", "r+b").read(1))
             for name in ("mem", "maps", "environ", "fd/0", "fd/1", "fd/3", "cwd/x", "root/x")}
    found["fd"] = refused(lambda: os.listdir("/proc/1/fd"))
    found["ptrace"] = refused(attach)
    found["limits"] = refused(lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
    return found
"""
    seen = probe(box, source)
    assert all(seen.values()), seen
    process = box._process
    assert mark(box, RIGHT).score == TASK.points and box._process is process, "it lives on"


def test_inherited_descriptors(box):
    """A student's process has its own answer's pipe and /dev/null, nothing of the grader's."""
    source = """
import os
def probe(inputs):
    kept = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            kept[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass
    return kept
"""
    kept = probe(box, source)
    assert sorted(kept)[:3] == ["0", "1", "2"]
    assert sorted(where.split(":")[0] for where in kept.values()) == ["/dev/null"] * 4 + ["pipe"]


# --- rows 11 to 16: ends, hangs, floods ---------------------------------------------------------

ENDS = {
    "sys.exit(0)": ("import sys; sys.exit(0)", "error"),
    "os._exit(0)": ("import os; os._exit(0)", "crash"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "crash"),
    "abort": ("import os; os.abort()", "crash"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "error"),
    "kills everything": (
        "import os, subprocess; subprocess.Popen('sleep 9'.split()); os.kill(-1, 9); os.abort()",
        "crash",
    ),
    "interrupts everything": ("import os, signal; os.kill(1, 2); signal.raise_signal(2)", "error"),
    "recursion": ("return staleness(events)", "error"),
    "an exception without words": (
        "raise type('E', (BaseException,), {'__str__': lambda self: 1 / 0})()",
        "error",
    ),
    "an exception with controls": (
        "raise ValueError('\\x1b[2K\\r13-staleness  4 of 4\\n\\ud800' + '\\u202e' * 10**6)",
        "error",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(box, name):
    """11: an exit or a crash is 0, and the next one is graded."""
    line, status = ENDS[name]
    found = attack(box, f"def staleness(events):\n    {line}\n", status)
    assert len(found.why) < 1000 and found.why


def test_exit_in_an_earlier_cell(sandbox, course, tmp_path):
    """11: what an earlier task's cell does at its top costs the later tasks nothing."""
    data = notebook(staleness="import sys\nsys.exit(0)\n" + RIGHT)
    found = hand_in(data, tmp_path, sandbox, course)
    assert [task.score for task in found.tasks] == [0, 6, 6]


HANGS = {
    "a loop": "while True: pass",
    "signals ignored": """
    import signal
    for number in set(range(1, 65)) - {9, 19, 32, 33}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except OSError:
            pass
    while True:
        pass""",
    "a long C loop": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "another clock": """
    import time
    try:
        time.clock_settime(time.CLOCK_REALTIME, 0)
    except PermissionError:
        pass
    time.monotonic = time.time = lambda: 0
    time.sleep(1000)""",
    "waits for itself": "import threading; threading.Event().wait()",
    "stops itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "closes its pipe and lives on": """
    import os, time
    os.closerange(0, 100)
    time.sleep(1000)""",
    "endless output": """
    import os
    while True:
        print("x" * 10**6)
        os.write(1, b"y" * 10**6)
        os.write(2, b"z" * 10**6)""",
    "fork bomb": """
    import os
    while True:
        try:
            os.fork()
        except OSError:
            pass""",
    "thread bomb": """
    import threading
    while True:
        try:
            threading.Thread(target=threading.Event().wait).start()
        except RuntimeError:
            pass""",
}


@pytest.mark.parametrize("name", HANGS)
def test_hangs(small, name):
    """12, 13 and 15: a hang, a bomb of processes, endless output end at the limit of time."""
    # The threads' stacks meet the limit of memory first.
    statuses = ("timeout", "memory") if name == "thread bomb" else ("timeout",)
    attack(small, f"def staleness(events):\n    {HANGS[name]}\n", *statuses)


MEMORY = {
    "a list": "kept = []\n    while True: kept.append(bytearray(10**7))",
    "one object": "return bytearray(10**12)",
    "shared memory": """
    import mmap
    kept = []
    while True:
        kept.append(mmap.mmap(-1, 10**7))
        kept[-1].write(b"x" * 10**7)""",
    "many processes": """
    import os, time
    for _ in range(8):
        if os.fork() == 0:
            kept = bytearray(b"x") * (100 * 2**20)
            time.sleep(100)
    time.sleep(100)""",
    "an endless exception": "raise ValueError('x' * 10**11)",
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory(box, name):
    """14: memory ends at the limit; the grader's own does not grow."""
    before = psutil.Process().memory_info().rss
    attack(box, f"def staleness(events):\n    {MEMORY[name]}\n", "memory")
    assert psutil.Process().memory_info().rss < before + 100 * MiB


def test_fork_bomb_of_a_large_process(sandbox):
    """13: many more processes than the watch can count in time: it ends them at the first look."""
    line = "    kept = b'x' * (100 * 2**20)" + HANGS["fork bomb"]
    with sandbox.box((), Limits(seconds=4, memory=1024 * MiB, processes=1024)) as box:
        attack(box, f"def staleness(events):\n{line}\n", "crash", "memory")


def test_many_processes(box):
    """13: more processes than any task needs end the sandbox."""
    source = """
import os, time
def probe(inputs):
    for _ in range(inputs):
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
    time.sleep(1)
    return 1
"""
    few = replace(LIMITS, forks=20)
    with box.sandbox.box((), few) as watched:
        assert probe(watched, source, 15) == 1
        with pytest.raises(AssertionError, match="more than 20 processes"):
            probe(watched, source, 40)


def test_forks_share_their_memory(box):
    """14: what a process has had from the warm runner counts once, not in each of its forks."""
    source = """
import os, time
def probe(inputs):
    children = []
    for _ in range(40):
        child = os.fork()
        if child == 0:
            time.sleep(1)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]
"""
    # As much as two thirds of the forks would have, were all of it their own.
    warm = sandbox_module._resident(mark(box, RIGHT) and box._first[0])
    with box.sandbox.box((), replace(LIMITS, memory=27 * warm)) as tight:
        assert probe(tight, source) == [0] * 40


def test_disk(box):
    """14: the folders that can be written are small, apart from the host's, and cleared."""
    name = "bomb" + secrets.token_hex(8)
    source = f"""
def probe(inputs):
    sizes = {{}}
    for folder in ("/tmp", "/dev/shm"):
        sizes[folder] = 0
        try:
            for number in range(1000):
                with open(f"{{folder}}/{name}-{{inputs}}-{{number}}", "wb") as file:
                    for _ in range(16):
                        sizes[folder] += file.write(b"x" * 2**20)
        except OSError as error:
            sizes[folder + " why"] = error.strerror
    return sizes
"""
    for turn in range(2):  # the second time, too, there is all the room
        sizes = probe(box, source, turn)
        for folder in ("/tmp", "/dev/shm"):
            assert "No space" in sizes[folder + " why"]
            assert 12 * MiB < sizes[folder] <= LIMITS.disk
    assert not list(Path("/tmp").glob(f"{name}*")) + list(Path("/dev/shm").glob(f"{name}*"))


def test_memory_that_no_process_has(box):
    """14: memfd, System V shared memory, a tmpfs in a namespace of one's own, keys: refused."""
    source = """
import ctypes, os, subprocess
def probe(inputs):
    libc = ctypes.CDLL(None, use_errno=True)
    found = {}
    for name, call in {
        "memfd": lambda: libc.memfd_create(b"x", 0),
        "shm": lambda: libc.shmget(0, 2**30, 0o1600),
        "queue": lambda: libc.msgget(0, 0o1600),
        "namespaces": lambda: libc.unshare(0x10020000),
        "keys": lambda: libc.syscall(inputs[os.uname().machine], 0, -3, 0),
    }.items():
        found[name] = call()
    found["mount"] = subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "x", "/tmp"],
                                    stderr=subprocess.DEVNULL).returncode
    return found
"""
    seen = probe(box, source, {"x86_64": 250, "aarch64": 219})
    assert seen.pop("mount") != 0
    assert set(seen.values()) == {-1}, seen


def test_daemon(box):
    """16: a process that left its parent and session ends with the task (see WatchedBox)."""
    daemon = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        for number in range(100):
            os.closerange(0, 64)
            time.sleep(1)
            open("/tmp/alive", "w").close()
    os._exit(0)
"""
    attack(box, daemon + RIGHT, "ok", score=TASK.points)


def test_open_files(box):
    """10**5 open files: the limit of a process holds."""
    source = """
def staleness(events):
    kept = [open("/dev/null") for _ in range(10**5)]
"""
    found = attack(box, source, "error")
    assert "Too many open files" in found.why


# --- rows 17 and 18: ways out -------------------------------------------------------------------


def test_network(box):
    """17: a listener of this test on the host's loopback is not reached; nor its Unix socket."""
    name = "course-" + secrets.token_hex(8)
    with socket.socket() as listener, socket.socket(socket.AF_UNIX) as abstract:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        abstract.bind("\0" + name)
        abstract.listen()
        for one in (listener, abstract):
            one.setblocking(False)
        with socket.create_connection(listener.getsockname(), 5):
            listener.accept()[0].close()  # the host itself reaches it
        source = """
import socket
def probe(inputs):
    said = []
    for family, address in ((2, ("127.0.0.1", inputs[0])), (1, "\\0" + inputs[1])):
        with socket.socket(family) as client:
            client.settimeout(1)
            try:
                client.connect(address)
                said.append("connected")
            except OSError as error:
                said.append(type(error).__name__)
    return said, [name for _, name in socket.if_nameindex()]
"""
        said, cards = probe(box, source, [listener.getsockname()[1], name])
        assert said == ["ConnectionRefusedError"] * 2 and cards == ["lo"]
        for one in (listener, abstract):
            with pytest.raises(BlockingIOError):
                one.accept()


def test_writes_outside(box):
    """18: no file of the host can be written or linked; the course's files stay as they are."""
    before = tree()
    source = """
import os
def probe(inputs):
    done = []
    for place in inputs:
        for action in (
            lambda: open(place + "/x-attack", "w").write("x"),
            lambda: os.symlink("/tmp", place + "/x-link"),
            lambda: os.link("/box/_box.py", place + "/x-hard"),
            lambda: os.mkdir(place + "/x-folder"),
            lambda: os.chmod(place, 0o777),
            lambda: os.rename(place, "/tmp/x-moved"),
            lambda: os.makedirs(place + "/../../x-up"),
        ):
            try:
                action()
                done.append(place)
            except OSError:
                pass
    os.symlink("/box", "/tmp/out")
    try:
        os.link("/box/_box.py", "/tmp/hard")
        done.append("a hard link")
    except OSError:
        pass
    try:
        open("/tmp/out/wire.py", "a").write("x")
        done.append("through a link")
    except OSError:
        pass
    return done
"""
    places = ["/", "/box", "/usr", "/etc", "/proc/1/root", "/proc/sys/kernel", "/dev", "/home"]
    places += [str(ROOT), *map(str, ROOT.parents), str(ROOT / "solutions"), str(Path.home())]
    places += [sys.prefix, sys.base_prefix, "/proc/self/root", "/proc/1/cwd/..", "/sys", "/run"]
    # What lies below /tmp may be made inside: that is the sandbox's own /tmp.
    places = [place for place in places if not place.startswith("/tmp")]
    assert probe(box, source, places) == []
    assert tree() == before


# --- what one task leaves for the next ----------------------------------------------------------

MODULES = ("sitecustomize", "usercustomize", "conftest", "wire", "json", "course_utils", "_box")


def test_files_of_the_interpreter(box):
    """sitecustomize, .pth, conftest, a file named like our modules: gone, and never read."""
    source = f"""
import os, sys
for folder in ("/tmp", "/dev/shm", "/tmp/.local/lib/python3/site-packages", "/tmp/course_utils"):
    os.makedirs(folder, exist_ok=True)
    for name in {MODULES!r}:
        with open(f"{{folder}}/{{name}}.py", "w") as file:
            file.write("raise SystemExit('attack')")
    open(f"{{folder}}/evil.pth", "w").write("import os; os._exit(1)")
for name in ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "LD_PRELOAD", "PATH", "BASH_ENV"):
    os.environ[name] = "/tmp"
    os.putenv(name, "/tmp")
sys.path.insert(0, "/tmp")
os.umask(0o777)
"""
    attack(box, source + RIGHT, "ok", score=TASK.points)
    look = """
import os, sys
def probe(inputs):
    return os.listdir("/tmp") + os.listdir("/dev/shm"), sys.path, os.environ.get("LD_PRELOAD")
"""
    files, path, preload = probe(box, look)
    assert files == CLEAR and path[0] == "/box" and "/tmp" not in path and preload is None


def test_a_course_that_lives_in_tmp(bubblewrap, monkeypatch):
    """Its libraries are mounted where tasks write: what these leave goes, the libraries stay."""
    with tempfile.TemporaryDirectory(prefix="course-", dir="/tmp") as folder:
        library = Path(folder, "a", "lib")
        library.mkdir(parents=True)
        (library / "module.py").write_text("x = 1")
        usual = sandbox_module._libraries()
        monkeypatch.setattr(sandbox_module, "_libraries", lambda: [*usual, library])
        leave = f"""
import os
def probe(inputs):
    for place in ("/tmp", "/dev/shm", "{folder}", "{library}"):
        try:
            open(place + "/left", "w").close()
        except OSError:
            pass
    return sorted(os.listdir("/tmp"))
"""
        with WatchedSandbox() as one, one.box((), LIMITS) as box:
            first = probe(box, leave)
            process = box._process
            assert first == sorted(["left", Path(folder).name, *CLEAR])
            assert probe(box, leave) == first, "what was left is gone, and made anew"
            look = f"def probe(i): return open('{library}/module.py').read()"
            assert probe(box, look) == "x = 1"
            if os.getuid() == 0:  # others own the way to it, and may leave something there
                assert process and box._process is process, "no sandbox was started in vain"
        assert sorted(os.listdir(library)) == ["module.py"]


def test_files_that_resist(box):
    """Folders that nobody may read, and 2,000 deep: cleared all the same."""
    source = """
import os
def probe(inputs):
    os.mkdir("/tmp/closed")
    open("/tmp/closed/file", "w").close()
    os.chmod("/tmp/closed", 0)
    os.chdir("/dev/shm")
    for _ in range(2000):
        os.mkdir("d")
        os.chdir("d")
    os.symlink("/box", "out")
    os.mkfifo("/tmp/pipe")
    return 1
"""
    probe(box, source)
    process = box._process
    assert probe(box, "import os\ndef probe(i): return os.listdir('/tmp')") == CLEAR
    assert box._process is process and (Path(box.sandbox.root) / "wire.py").stat().st_size > 1000


# --- the grader's own side ----------------------------------------------------------------------


def test_runner_that_does_not_read(small):
    """A large request to a sandbox that stands still ends at the limit, too."""
    assert mark(small, RIGHT).score == TASK.points
    small.runner.suspend()
    found = mark(small, RIGHT + "#" * 190_000)
    assert (found.status, found.score) == ("crash", 0)
    assert mark(small, RIGHT).score == TASK.points


def test_machine_without_memory(small, monkeypatch):
    """14: whatever holds the memory, the sandbox ends before the machine does."""
    assert sandbox_module.RESERVE < psutil.virtual_memory().total / 4
    assert mark(small, RIGHT).score == TASK.points
    monkeypatch.setattr(sandbox_module, "RESERVE", 2**60)
    found = mark(small, RIGHT)
    assert found.status == "memory" and "the machine" in found.why
    assert small._process is None


def test_sandbox_that_ends_between_tasks(small):
    """The next one starts by itself; only the task that met it is lost."""
    assert mark(small, RIGHT).score == TASK.points
    small.runner.kill()
    assert mark(small, RIGHT).status == "crash"
    assert mark(small, RIGHT).score == TASK.points


def bombs(keys):
    """JSON that a forged reply may carry after `plain`, at the places that a judge looks at."""
    values = [[0] * 200_000, ["x" * 100_000], "9" * 100_000, [[1.5] * 1000] * 200, 2**1023, -0.0]
    values += [{"$": "9" * 100_000}]
    for value in values:
        yield value
        yield dict.fromkeys(keys, value)
        yield [value] * 8
        yield dict.fromkeys(keys, [value] * 8)


@pytest.mark.parametrize("task", all_tasks().values(), ids=lambda task: task.id)
def test_judges_are_given_bombs(task):
    """Time in the parent: no judge takes long over anything that a reply may carry."""
    inputs = task.inputs(1)
    expected = task.expected(inputs)
    text = inspect.getsource(sys.modules[task.judge.__module__])
    keys = [*re.findall(r'"(\w+)"', text), *"0123"]
    for bomb in bombs(keys):
        start, found = time.monotonic(), []
        with contextlib.suppress(Exception):  # then the answer proves nothing
            found = task.judge(inputs, expected, bomb)
        assert sum(f.points for f in found if f.passed) < task.points
        assert time.monotonic() - start < 5, "the judge is slow"


def test_why_is_one_short_line():
    """Text of a student is data for people: no control, no end, no end of line."""
    text = one_line("\x1b[2J\r\n13-staleness\u202e 4/4\ud800" + "x" * 10**6)
    assert text.isprintable() and len(text) == 700 and "\n" not in text
    text.encode()


def test_grader_that_fails_on_one(sandbox, course, tmp_path):
    """An error of our own is a mark with a note, in a file, and the next run tries again."""
    broken = tmp_path / "course"
    shutil.copytree(course, broken)
    data = notebook(BLANK)
    data["cells"].append({"cell_type": "code", "metadata": {}, "source": "def (:"})
    path = broken / "exercises" / BLANK.name
    path.write_text(json.dumps(data))
    handed, out = [Handed("a", SOLVED), Handed("b", SOLVED)], tmp_path / "out"
    for found in mark_class(handed, out, sandbox, RULES, broken):
        assert (found.status, found.score) == ("bad_notebook", 0)
        assert "the grader failed" in found.notes[0] and "SyntaxError" in found.notes[0]
    assert len(list(out.glob("*.json"))) == 2
    shutil.copy(BLANK, path)
    assert [m.score for m in mark_class(handed, out, sandbox, RULES, broken)] == [16, 16]


def test_each_of_two_jobs_has_cores_of_its_own(sandbox, course, tmp_path):
    """A submission that spins must not make the ranks of another one late."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("two jobs on one core share it")
    tells = "import os, time\ntime.sleep(1)\nraise ValueError(os.sched_getaffinity(0))"
    path = tmp_path / SOLVED.name
    path.write_text(json.dumps(notebook(staleness=tells)))
    handed, out = [Handed("a", path), Handed("b", path)], tmp_path / "out"
    marks = mark_class(handed, out, sandbox, RULES, course, jobs=2)
    seen = [set(map(int, re.findall(r"\{(.+)\}", m.tasks[0].why)[0].split(","))) for m in marks]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(cores)
    assert sorted(os.sched_getaffinity(0)) == cores, "the grader itself keeps them all"


def test_a_property_holds_for_all_inputs(box):
    """An answer that is right for one of several inputs alone gets nothing for it."""
    given = read_exercise("13", ROOT)
    exercise = Exercise("13", (TASK,), given.trusted, {})
    known = TASK.inputs(1)
    others = (TASK.inputs(seed) for seed in range(2, 1000))
    other = next(o for o in others if all(o[name] != known[name] for name in known))
    rules = replace(RULES, extra={TASK.id: [other, known]})
    source = (
        RIGHT
        + f"""
right, known = staleness, {list(known.values())}
def staleness(events):
    return right(events) if [list(event) for event in events] in known else []
"""
    )
    for cell, points in ((RIGHT, 4), (source, 0)):
        [found] = mark_submission(Submission({TASK.id: cell}), exercise, rules, box)
        assert found.score == points, found


# --- rows 19 to 23: notebooks -------------------------------------------------------------------


def test_edited_metadata(sandbox, course, tmp_path):
    """19: points, checksum, cell type and tests come from the course; the mark has a note."""
    data = notebook(staleness=WRONG)
    cell = graded(data, "13-staleness-test")
    cell["metadata"]["nbgrader"].update(points=400, checksum="0" * 32, locked=False)
    cell["source"] = "4.0"
    graded(data, "13-staleness")["metadata"]["nbgrader"].update(points=400, grade=True)
    cell = graded(data, "13-diverge-test")
    cell["cell_type"] = "\ud800\x1b[2Jraw" * 100
    found = hand_in(data, tmp_path, sandbox, course)
    assert (found.points, [task.score for task in found.tasks]) == (16, [0, 6, 6])
    notes = "\n".join(found.notes)
    for words in ("points of 13-staleness-test", "13-staleness-test was edited", "13-diverge-test"):
        assert words in notes
    assert all(note.startswith("tampered: ") and note.isprintable() for note in found.notes)
    assert max(map(len, found.notes)) < 200


def test_renamed_ids(sandbox, course, tmp_path):
    """19: a right answer under another task's id is no answer to it."""
    data = notebook()
    graded(data, "13-staleness")["metadata"]["nbgrader"]["grade_id"] = "13-nothing"
    graded(data, "13-diverge")["metadata"]["nbgrader"]["grade_id"] = "13-staleness"
    found = hand_in(data, tmp_path, sandbox, course)
    assert [task.status for task in found.tasks] == ["error", "ok", "missing_cell"]
    assert found.score == 6


def test_many_copies_of_a_test_cell(sandbox, course, tmp_path):
    """19: as many notes as somebody reads, not as many as a student can cause."""
    data = notebook()
    for number in range(1500):
        copy = json.loads(json.dumps(graded(data, "13-diverge-test")))
        copy["cell_type"] = f"kind {number}"
        data["cells"].append(copy)
    found = hand_in(data, tmp_path, sandbox, course)
    assert found.score == 16 and len(found.notes) == 50


def test_deleted_cells(sandbox, course, tmp_path):
    """20: a deleted test is run all the same; a deleted solution cell is 0."""
    data = notebook()
    data["cells"].remove(graded(data, "13-staleness-test"))
    data["cells"].remove(graded(data, "13-partition"))
    found = hand_in(data, tmp_path, sandbox, course)
    assert [(task.status, task.score) for task in found.tasks] == [
        ("ok", 4),
        ("missing_cell", 0),
        ("ok", 6),
    ]
    assert found.notes == ["tampered: 13-staleness-test is missing"]


def test_duplicated_cell(sandbox, course, tmp_path):
    """21: the task with two cells is 0, the others are graded."""
    data = notebook()
    data["cells"] += [graded(data, "13-partition")] * 2
    found = hand_in(data, tmp_path, sandbox, course)
    assert [(task.status, task.score) for task in found.tasks] == [
        ("ok", 4),
        ("duplicate_id", 0),
        ("ok", 6),
    ]


def metadata_of(value):
    """A notebook with one cell whose metadata is this."""
    return json.dumps({"cells": [{"cell_type": "code", "metadata": value, "source": ""}]}).encode()


def many_numbers():
    """Exercise numbers in the digits of all scripts."""
    digits = [letter for letter in map(chr, range(128, sys.maxunicode)) if letter.isdecimal()]
    cells = [{"metadata": {"nbgrader": {"grade_id": f"{one}3-staleness"}}} for one in digits]
    return json.dumps({"cells": cells}, ensure_ascii=False).encode()


UNREADABLE = {
    "nothing": lambda: b"",
    "no JSON": lambda: b"\x00\xff" * 1000,
    "nbformat 3": lambda: b'{"nbformat": 3, "worksheets": [{"cells": []}]}',
    "a list": lambda: b"[]",
    "deep": lambda: b"[" * 10**6,
    "deep cells": lambda: b'{"cells": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a long number": lambda: b'{"cells": [' + b"9" * 10**6 + b"]}",
    "50 MB": lambda: b'{"cells": ["' + b"x" * (50 * 10**6) + b'"]}',
    "cells that are none": lambda: b'{"cells": [1, null, "x", [], {}]}',
    "metadata of other types": lambda: metadata_of([{"nbgrader": 1}]),
    "an id of another type": lambda: metadata_of({"nbgrader": {"grade_id": {"13-a": [1]}}}),
    "an exercise that is not there": lambda: metadata_of({"nbgrader": {"grade_id": "99-x"}}),
    "a path": lambda: metadata_of({"nbgrader": {"grade_id": "../../13-staleness"}}),
    "digits of other scripts": many_numbers,
    "two million cells": lambda: b'{"cells": [' + b"{}," * 2 * 10**6 + b"{}]}",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_notebook(sandbox, course, tmp_path, name):
    """22: what is no notebook is a mark of 0 with a reason, and costs no time."""
    data, start = UNREADABLE[name](), time.monotonic()
    found = hand_in(data, tmp_path, sandbox, course)
    assert time.monotonic() - start < 5
    assert (found.status, found.score) == ("bad_notebook", 0) and found.notes[0]
    found = hand_in(data, tmp_path, sandbox, course, exercise="13")
    assert (found.score, found.points) == (0, 16), "with the exercise named its points are known"
    assert {task.status for task in found.tasks} <= {"bad_notebook", "missing_cell"}


def test_odd_but_readable_notebook(sandbox, course, tmp_path):
    """22: a BOM, no cell ids, sources as lists, lone surrogates elsewhere: graded."""
    data = notebook()
    data["nbformat_minor"] = 0
    for cell in data["cells"]:
        cell.pop("id", None)
        cell["source"] = "".join(cell["source"]).splitlines(True)
    deep = json.loads("[" * 300 + "]" * 300)
    data["cells"].append({"cell_type": deep, "metadata": {"nbgrader": {"grade_id": deep}}})
    data["cells"].append({"cell_type": "markdown", "source": ["\ud800", 7]})
    found = hand_in(b"\xef\xbb\xbf" + json.dumps(data).encode(), tmp_path, sandbox, course)
    assert found.score == 16


MAGICS = ("!touch /tmp/magic", "%run /box/_box.py", "%%bash\ntouch /tmp/magic", "get?", "x = !ls")


@pytest.mark.parametrize("magic", MAGICS)
def test_magics(box, magic):
    """23: a command of notebooks is not run, and the message says so."""
    found = attack(box, f"{magic}\n{RIGHT}", "error")
    assert "command of notebooks" in found.why


# --- row 24: ranks ------------------------------------------------------------------------------


def _ranks_run(student, inputs):
    from course_utils.grading.ranks import on_ranks

    def on_rank(function, given):
        import torch.distributed as dist

        return function(dist.get_rank(), given[dist.get_rank()])

    return on_ranks(on_rank, 2, student.total, inputs, "a rank waits{where}")


def _ranks_judge(inputs, expected, got):
    return [Finding("the sum on each rank", 2, "" if got == expected else "another value")]


RANKS = Task(
    id="99-ranks",
    title="a sum over two ranks",
    points=2,
    functions=("total",),
    inputs=lambda seed: [seed % 1000, 7],
    run=_ranks_run,
    expected=lambda inputs: [float(sum(inputs))] * 2,
    judge=_ranks_judge,
    hints=("a", "b", "c"),
    wrong=(Wrong("a", "", 0), Wrong("b", "", 0)),
)
SUM = """
import os, time, torch
import torch.distributed as dist

def total(rank, number):
    sum = torch.tensor(float(number))
    {attack}
    dist.all_reduce(sum)
    return sum.item()
"""
RANK_ATTACKS = {
    "honest": ("pass", ("ok",)),
    "one hangs": ("while rank == 1: time.sleep(1)", ("timeout",)),
    "exit code 1": ("if rank == 1: os._exit(1)", ("wrong", "timeout")),
    "returns early": ("if rank == 1: return 0.0", ("wrong", "timeout")),
    "killed": ("if rank == 0: os.kill(os.getpid(), 9)", ("wrong", "timeout")),
    "kills the other": ("os.kill(-1, 9)", ("crash", "wrong", "error")),
    "a port already taken": (
        "import socket; s = socket.create_server(('127.0.0.1', int(os.environ['MASTER_PORT'])))",
        ("wrong", "timeout"),
    ),
    "an object": (
        "return type('T', (torch.Tensor,), {'__eq__': lambda *a: True})()",
        ("wrong", "error", "timeout"),
    ),
    "__torch_function__": (
        "return type('T', (), {'__torch_function__': lambda *a, **k: 0})()",
        ("wrong", "error", "timeout"),
    ),
    "__reduce__": (
        "return type('T', (), {'__reduce__': lambda s: (os._exit, (0,))})()",
        ("wrong", "crash", "error", "timeout"),
    ),
    "patched torch": ("torch.equal = torch.allclose = lambda *a: True; return 0.0", ("wrong",)),
    "honest again": ("time.sleep(0.1 * rank)", ("ok",)),
}


def test_ranks(sandbox):
    """24: a rank that hangs, exits, returns early: 0 within the limit, and all ranks are gone."""
    exercise = Exercise("99", (RANKS,), {RANKS.id: ""}, {})
    limits = Limits(seconds=5)  # forked from the warm sandbox they start in 0.3 s
    with sandbox.box(("torch", "torch._dynamo", "numpy.random", "cloudpickle"), limits) as box:
        for name, (line, statuses) in RANK_ATTACKS.items():
            found = Submission({RANKS.id: SUM.format(attack=line)})
            [got] = mark_submission(found, exercise, RULES, box)
            assert got.status in statuses, (name, got.status, got.why)
            assert got.score == (2 if got.status == "ok" else 0), name


# --- row 25: what people and programs read ------------------------------------------------------

MARKUP = "<script>alert(1)</script>\x1b[2J\r\n=cmd|' /C calc'!A0,[red]4 of 4[/red]\u202e"


def test_escaped(sandbox, course, tmp_path):
    """25: markup, control characters and formulas of students are text wherever they are shown."""
    from course_utils.grading import export, report

    data = notebook(staleness=f"def staleness(events):\n    raise ValueError({MARKUP!r})\n")
    cell = graded(data, "13-diverge-test")
    cell["cell_type"] = MARKUP
    found = hand_in(data, tmp_path, sandbox, course)
    found.student = "=HYPERLINK(1)" + MARKUP
    pages = report.feedback(found) + report.html([found])
    assert "<script>alert" not in pages and "&lt;script&gt;alert" in pages
    table = export.nbgrader_csv([found], "13")
    row = list(csv.reader(io.StringIO(table)))[1]
    assert row[3].startswith("'=") and not any(cell.startswith("=") for cell in row)
    for text in (pages, table, json.dumps(export.gradescope(found), ensure_ascii=False)):
        assert not {"\x1b", "\r", "\u202e"} & set(text) and CANARY not in text
        text.encode()


# --- row 26: a class ----------------------------------------------------------------------------

# What one of a class hands in, and what its three tasks then have.
FULL = ("ok", "ok", "ok")
CLASS = {
    "honest": (lambda: notebook(), FULL),
    "blank": (lambda: notebook(BLANK), ("not_attempted",) * 3),
    "wrong": (lambda: notebook(staleness=WRONG), ("wrong", "ok", "ok")),
    "noisy": (lambda: notebook(staleness="print('x' * 10**6)\n" + RIGHT), FULL),
    "object": (lambda: bad(PRETENDERS["equal to everything"], "return value"), "wrong"),
    # His earlier cells run before each task: the helpers in them are used, and so is the harm.
    "patched": (lambda: bad(TAMPERING["json"], "return [4]"), ("wrong",) * 3),
    "forged": (
        lambda: bad(FORGE, "os.write(private(), b'[\"value\"]\\n'); os._exit(0)"),
        "bad_reply",
    ),
    "exit": (lambda: bad("", "import os; os._exit(0)"), "crash"),
    "segfault": (lambda: bad("", "import ctypes; ctypes.string_at(0)"), "crash"),
    "memory": (lambda: bad("", "return bytearray(10**12)"), "memory"),
    "hang": (lambda: bad("", "while True: pass"), "timeout"),
    "daemon": (
        lambda: bad("import os, time\nif not os.fork(): time.sleep(99)\n" + RIGHT, ""),
        "ok",
    ),
    "no JSON": (lambda: b"\xff", ()),
    "duplicate": (
        lambda: (n := notebook(), n["cells"].append(graded(n, "13-staleness")))[0],
        ("duplicate_id", "ok", "ok"),
    ),
    "deleted": (
        lambda: (n := notebook(), n["cells"].remove(graded(n, "13-diverge")))[0],
        ("ok", "ok", "missing_cell"),
    ),
}


def bad(before, line):
    """A notebook whose first task is an attack; the others are solved."""
    body = f"def staleness(events):\n    {line}\n" if line else ""
    return notebook(staleness=f"{before}\n{body}")


GRADE = """
import sys
from pathlib import Path
from course_utils.grading.marking import Handed, Rules, mark_class
from course_utils.grading.sandbox import Limits, MiB, find_sandbox

folder, out, course, secret = sys.argv[1:]
handed = [Handed(path.stem, path) for path in sorted(Path(folder).glob("*.ipynb"))]
rules = Rules(secret, Limits(1.5, 300 * MiB, 64, 256, 16 * MiB))
with find_sandbox("bubblewrap") as sandbox:
    marks = mark_class(handed, Path(out), sandbox, rules, Path(course), exercise="13",
                       done=lambda mark: print(mark.student, flush=True))
print(len(marks), "marks")
"""


def test_class(sandbox, course, tmp_path):
    """26: thirty of all kinds; killed in an endless loop, resumed; every one has its mark."""
    before, folder, out = tree(), tmp_path / "handed", tmp_path / "results"
    folder.mkdir()
    kinds = [*CLASS, *CLASS]
    for number, kind in enumerate(kinds):
        data = CLASS[kind][0]()
        data = data if type(data) is bytes else json.dumps(data).encode()
        (folder / f"{number:02d} {kind}.ipynb").write_bytes(data)
    command = [sys.executable, "-c", GRADE, str(folder), str(out), str(course), CANARY]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    said = [first.stdout.readline().strip() for _ in range(10)]
    assert said[-1] == "09 memory"
    assert within(20, lambda: len(psutil.Process(first.pid).children(recursive=True)) >= 3)
    family = [process.pid for process in psutil.Process(first.pid).children(recursive=True)]
    namespaces = {os.readlink(f"/proc/{pid}/ns/pid") for pid in family}
    namespaces.discard(os.readlink("/proc/self/ns/pid"))
    assert len(namespaces) == 1, "the endless loop of the next one runs now"
    first.kill()
    first.wait()
    (namespace,) = namespaces
    assert within(1, lambda: not members(namespace)), "the sandbox outlived its grader"
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*.json")}
    assert len(kept) in (10, 11) and not list(out.glob("*.part"))
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1] == "30 marks" and CANARY not in again.stdout
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items()), "marked again"
    marks = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    assert len(marks) == 30
    for found in marks:
        wanted = CLASS[found["student"][3:]][1]
        wanted = (wanted, "ok", "ok") if type(wanted) is str else wanted or ("bad_notebook",) * 3
        assert tuple(task["status"] for task in found["tasks"]) == wanted, found["student"]
        points = sum(t["points"] for t in found["tasks"] if t["status"] == "ok")
        assert found["score"] == points, found["student"]
    assert CANARY not in "".join(path.read_text() for path in out.iterdir())
    assert tree() == before
