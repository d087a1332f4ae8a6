"""What runs inside a grader's sandbox: it executes one task at a time and answers with values.

The grader copies this file, `wire.py` and those parts of `course_utils` that hold no answers
into the sandbox. Requests come as lines of JSON on the standard input, replies go as lines of
JSON to the standard output. The grader trusts nothing of it: a reply is data, whoever wrote it,
and no reply can say how many points it is worth.

Each request runs in a child, forked after the frameworks have been imported and before any of
the student's code is read. When the child has ended, every process of the sandbox but this one
is killed, so that nothing of one task is left for the next.
"""

import contextlib
import ctypes
import errno
import importlib
import json
import linecache
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path

MAX_REPLY = 4 * 2**20  # bytes of one child's answer
STUDENT = "your solution cell"
PLACES = ("/tmp", "/dev/shm")  # where a task may write
_PR_SET_DUMPABLE = 4


def main() -> None:
    settings = json.loads(sys.argv[1])
    requests, replies = _take_streams()
    # A student's process, which has the same user, must not look into this one and its pipes,
    # nor end it: other signals do not reach the first process, Python's own handler would hear.
    _dumpable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if settings["filter"]:
            _refuse_system_calls()
        for name in settings["preload"]:
            importlib.import_module(name)
    except BaseException as error:  # the grader has to hear why there is no sandbox
        _send(replies, {"failed": f"{type(error).__name__}: {error}"[:1000]})
        raise SystemExit(1) from error
    _let_ranks_be_forked()
    before = _contents()
    _send(replies, {"ready": True})
    for line in requests:
        reply = _run_in_child(json.loads(line), settings, (requests, replies))
        clean = _clear(before)
        _send(replies, {**reply, "last": not clean})
        if not clean:
            return


class _Forked:
    """A forked process, with what `course_utils.launch` asks of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the server of the ranks", timeout)
            time.sleep(0.01)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _let_ranks_be_forked() -> None:
    """Have `launch` fork its server from a task's process, which has imported the framework.

    Elsewhere the server is a fresh interpreter, because a notebook's kernel has threads; here
    nothing has started any, and the import would cost each task seconds.
    """
    from course_utils import _crew, _ranks

    fresh = _crew._interpreter

    def interpreter(mode: str, *arguments: str, **options):
        if mode != "server" or arguments[0] not in sys.modules:
            return fresh(mode, *arguments, **options)
        pid = os.fork()
        if pid:
            return _Forked(pid)
        try:
            link, log = int(arguments[1]), options["stdout"].fileno()
            os.setsid()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.closerange(3, link)
            os.closerange(link + 1, 4096)
            _ranks.main(mode, *arguments)
        finally:
            os._exit(0)

    _crew._interpreter = interpreter


def _take_streams():
    """The pipes to the grader, under other numbers than those that print and input use."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    return requests, replies


def _send(replies, value: dict) -> None:
    replies.write(json.dumps(value).encode() + b"\n")
    replies.flush()


def _dumpable(yes: bool) -> None:
    """Whether other processes of the same user may read this one's memory and descriptors."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(yes), 0, 0, 0)


# By machine: the architecture's number in a filter, the calls that are refused, clone, prlimit64.
# memfd_create, memfd_secret, shmget, msgget: memory that the watch over processes does not see;
# unshare, clone3: new namespaces, and with them file systems in memory; add_key, request_key,
# keyctl: keys of whoever started the grader, which outlive a sandbox; io_uring_setup: calls that
# no filter sees.
_CALLS = {
    "x86_64": (0xC000003E, (319, 447, 29, 68, 272, 435, 248, 249, 250, 425), 56, 302),
    "aarch64": (0xC00000B7, (279, 447, 194, 186, 97, 435, 217, 218, 219, 425), 220, 261),
}


def _refuse_system_calls() -> None:
    """Let the kernel answer some system calls with "no such call", here and in all children."""
    machine = os.uname().machine
    if machine not in _CALLS:
        raise RuntimeError(f"the filter of system calls is not known for {machine} processors")
    architecture, never, clone, prlimit = _CALLS[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF
    new_user, refuse, allow = 0x10000000, (give, 0, 0, 0x50000 + errno.ENOSYS), 0x7FFF0000
    # (operation, instructions to skip when true, when false, operand); `load` of 4 is the
    # architecture, of 0 the number of the call, of 16 its first argument.
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), refuse]
    code += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), refuse]
    for number in never:
        code += [(equal, 0, 1, number), refuse]
    # The limits of another process than itself; a new user namespace.
    code += [(equal, 0, 3, prlimit), (load, 0, 0, 16), (equal, 1, 0, 0), refuse, (load, 0, 0, 0)]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, new_user), refuse]
    code += [(give, 0, 0, allow)]
    words = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(words))
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, set_seccomp, filtered = 38, 22, 2
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    if libc.prctl(set_no_new_privileges, one, none, none, none) or libc.prctl(
        set_seccomp, ctypes.c_ulong(filtered), program, none, none
    ):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def _contents() -> set[str]:
    """All paths where a task may write, but for what is mounted there.

    That is nothing at the start, or the way to the libraries, of a course that lives in /tmp.
    """
    found = set()
    for place in PLACES:
        device = os.stat(place).st_dev
        for folder, folders, files in os.walk(place):
            found.update(os.path.join(folder, name) for name in folders + files)
            here = [n for n in folders if os.lstat(f"{folder}/{n}").st_dev == device]
            folders[:] = here if folder.count("/") < 50 else []  # deep enough to see a difference
    return found


def _clear(before: set[str]) -> bool:
    """Delete what a task has left in files; False when some of it resists."""
    if os.getpid() != 1:  # without a sandbox these are the folders of the whole machine
        return True
    if _contents() != before:
        open_up = ["-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
        with contextlib.suppress(OSError):  # an image without these tools
            for action in (open_up, ["-mindepth", "1", "-delete"]):
                find = ["find", *PLACES, "-xdev", *action]
                subprocess.run(find, stderr=subprocess.DEVNULL, check=False)
    return _contents() == before


def _run_in_child(request: dict, settings: dict, private: tuple) -> dict:
    """Fork, let the child answer, then kill whatever it has left behind."""
    read_end, write_end = os.pipe()
    killed = _oom_kills()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            for descriptor in (read_end, *(stream.fileno() for stream in private)):
                os.close(descriptor)
            _dumpable(True)  # as any program is; some libraries read their own /proc files
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for limit, value in settings["limits"].items():
                resource.setrlimit(getattr(resource, limit), (value, value))
            if request.get("room") is not None:
                _leave_room(request["room"])
            _answer(request, write_end)
        finally:
            os._exit(0)  # not through the interpreter's end, where a student's hooks wait
    os.close(write_end)
    answer, state = _listen(read_end, child, private[0])
    os.close(read_end)
    _kill_the_rest(child)
    if state is None:
        return {"bad_reply": "the answer is longer than 4 MiB"}
    if os.WIFSIGNALED(state) and _oom_kills() > killed:
        return {"memory": True}
    if os.WIFSIGNALED(state):
        return {"signal": os.WTERMSIG(state)}
    return {"reply": answer.decode("utf-8", "replace")}


def _oom_kills(cgroup: str = "/sys/fs/cgroup") -> int:
    """How many processes the kernel has ended because this container's memory was full.

    0 where there is no container: bubblewrap's memory is watched from outside.
    """
    for place in ("memory.events", "memory/memory.oom_control"):  # cgroup 2, cgroup 1
        with contextlib.suppress(OSError):
            words = Path(cgroup, place).read_text().split()
            return int(words[words.index("oom_kill") + 1])
    return 0


def _leave_room(room: int) -> None:
    """Let this process take `room` more bytes of memory, once and for all.

    Linux counts what is asked for (RLIMIT_DATA), touched or not. Nothing that the student's code
    says or patches can raise it again.
    """
    if sys.platform != "linux":  # there is no sandbox there either
        return
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _listen(pipe: int, child: int, requests) -> tuple[bytes, int | None]:
    """What the child wrote until its end, and how it ended; None when it wrote too much.

    Raises SystemExit when the grader is gone: nobody else would end an endless loop then.
    """
    answer, state = bytearray(), None
    while len(answer) <= MAX_REPLY:
        # The child's end counts, not the pipe's: a process that it left behind may hold that open.
        wait = 0 if state is not None else 0.02
        ready, _, _ = select.select([pipe, requests], [], [], wait)
        if requests in ready:  # it asks nothing before it has its answer: this is the pipe's end
            raise SystemExit("the grader has ended")
        chunk = os.read(pipe, 1 << 16) if ready else b""
        answer += chunk
        if state is not None and not chunk:
            return bytes(answer), state
        if state is None and not chunk:
            ended, code = os.waitpid(child, os.WNOHANG)
            state = code if ended else None
            if ready and state is None:  # the child has closed its end, and lives on
                time.sleep(0.02)
    return bytes(answer), None


def _kill_the_rest(child: int) -> None:
    """As the first process of a PID namespace: everybody else. Without one: the child's group."""
    first = os.getpid() == 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL) if first else os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if first else os.WNOHANG) != (0, 0):
            pass


def _answer(request: dict, descriptor: int) -> None:
    """Run the student's cells and the task, and write one line of JSON."""
    from wire import plain

    try:
        reply = {"value": plain(_run(request))}
    except NotImplementedError:
        reply = {"not_attempted": True}
    except MemoryError:
        reply = {"memory": True}
    except BaseException as error:  # the student's, whatever it is
        reply = {"error": _excerpt(error)}
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _run(request: dict):
    """The task's `run` with the student's functions; raises whatever their code raises."""
    # As in the notebook: what is defined in `__main__` is sent to ranks by value.
    sys.modules["__main__"] = types.ModuleType("__main__")
    names = vars(sys.modules["__main__"])
    _execute(request["trusted"], "the exercise's own cells", names)
    *earlier, own = request["cells"]
    for number, source in enumerate(earlier, 1):
        # A helper of an earlier task may be used in this one; its faults are not this one's.
        with contextlib.suppress(BaseException):  # also an exit()
            _execute(source, f"solution cell {number}", names)
    _execute(own, STUDENT, names)
    missing = [name for name in request["functions"] if not callable(names.get(name))]
    if missing:
        raise NameError(f"the solution cell defines no function {missing[0]}")
    student = types.SimpleNamespace(**{name: names[name] for name in request["functions"]})
    task = {"__name__": "task"}
    _execute("from __future__ import annotations\n" + request["run"], "the task", task)
    return task[request["run_name"]](student, request["inputs"])


def _execute(source: str, name: str, names: dict) -> None:
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec"), names)


def _excerpt(error: BaseException) -> str:
    """The student's line and what it raised, in one line."""
    kind = type.__dict__["__name__"].__get__(type(error))
    try:
        message = f"{kind}: {error}"[:500]
    except BaseException:  # an exception whose __str__ fails; its type is all there is to say
        message = kind
    if isinstance(error, SyntaxError):
        line = str(error.text or "").strip()[:80]
        value = line.partition("=")[2].strip()
        if line[:1] in ("%", "!", "?") or line[-1:] == "?" or value.startswith(("%", "!")):
            message = f"{line!r} is a command of notebooks; in a graded cell there is only Python"
        return f"line {error.lineno}: {message}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == STUDENT]
    if not frames:
        return f"raised outside your code: {message}"
    if isinstance(error, (NameError, ImportError)):
        message += " (only solution cells are graded: helpers and imports belong into them)"
    return f"line {frames[-1].lineno} in {frames[-1].name}: {message}"


if __name__ == "__main__":
    main()
