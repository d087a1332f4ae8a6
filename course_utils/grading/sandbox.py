"""Where students' code runs: in a sandbox without network, answers, or a way out.

Two kinds, tried in this order: a container (podman or docker), and bubblewrap on Linux. Where
there is none, `find_sandbox` refuses. In each a small program (`_box.py`) runs one task after the
other; a `Box` is one such sandbox, and the watch over its time and memory is kept outside of it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .wire import one_line

MiB = 2**20
PACKAGE = Path(__file__).resolve().parent.parent
# All that enters a sandbox of the grader itself. The rest has the task definitions, where the
# expected values are computed.
ENTERS = ("ranks.py", "wire.py")
_START = 120  # seconds for a sandbox to import a framework on a busy machine
_MAX_LINE = 8 * MiB
RESERVE = 256 * MiB  # of the machine's memory; with less, a sandbox is ended
NO_MEMORY_LEFT = "the machine had no memory left while this ran: run it again, with -j 1"


class SandboxError(RuntimeError):
    """There is no usable sandbox, or it did not start. The message says what to do."""


@dataclass(frozen=True)
class Limits:
    """What one task may use.

    seconds     wall-clock time of one task
    memory      bytes: resident memory of all processes of the sandbox together, and data of each
    processes   processes and threads at the same time (the ranks of a TensorFlow task need most)
    files       open files of a process
    disk        bytes in each of /tmp and /dev/shm
    forks       processes at the same time; a sandbox with more is ended, before nobody can act
    """

    seconds: float = 90.0
    memory: int = 4096 * MiB
    processes: int = 1024
    files: int = 1024
    disk: int = 256 * MiB
    forks: int = 64

    def of_a_process(self) -> dict[str, int]:
        """The limits that the kernel enforces for each process, by their names in `resource`."""
        return {
            "RLIMIT_DATA": self.memory,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": self.files,
            "RLIMIT_FSIZE": self.disk,
            "RLIMIT_CORE": 1,  # byte; 0 would still start the machine's collector of cores
        }


@dataclass
class Answer:
    """What came back for one task: a status, and a value (data!) or the reason in words.

    status: replied, not_attempted, error, timeout, memory, crash or bad_reply.
    """

    status: str
    value: Any = None
    why: str = ""


def stage() -> tempfile.TemporaryDirectory:
    """A folder with what may enter a sandbox: the package without answers, and the runner."""
    for old in Path(tempfile.gettempdir()).glob("course-box-*-*"):
        owner = old.name.split("-")[2]  # one that was killed could not clean up
        if owner.isdigit() and not _lives(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.TemporaryDirectory(prefix=f"course-box-{os.getpid()}-")
    root = Path(folder.name)
    ignore = shutil.ignore_patterns("__pycache__", "grading")
    shutil.copytree(PACKAGE, root / "course_utils", ignore=ignore)
    grading = root / "course_utils" / "grading"
    grading.mkdir()
    (grading / "__init__.py").touch()
    for name in ENTERS:
        shutil.copy(PACKAGE / "grading" / name, grading / name)
    for name in ("_box.py", "wire.py"):
        shutil.copy(PACKAGE / "grading" / name, root / name)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def _lives(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid)


def find_sandbox(kind: str = "auto") -> Sandbox:
    """The first usable sandbox, or the one named: podman, docker, bubblewrap, unsafe-local.

    Raises SandboxError, with what to do, where there is none; `auto` never takes unsafe-local.
    """
    kinds = {one.name: one for one in (Podman, Docker, Bubblewrap, UnsafeLocal)}
    if kind != "auto":
        if kind not in kinds:
            raise SandboxError(f"there is no sandbox {kind!r}; there are {', '.join(kinds)}")
        problem = kinds[kind].problem()
        if problem:
            raise SandboxError(f"{kind}: {problem}")
        return kinds[kind]()
    problems = []
    for one in (Podman, Docker, Bubblewrap):
        problem = one.problem()
        if not problem:
            return one()
        problems.append(f"  {one.name}: {problem}")
    raise SandboxError(
        "students' code runs only in a sandbox, and this machine has none:\n"
        + "\n".join(problems)
        + "\nOn Debian or Ubuntu: sudo apt-get install bubblewrap. To run the submissions with "
        "your own rights all the same (they may read and delete your files): --unsafe-local"
    )


class Sandbox:
    """A way to start a process that cannot reach anything. Subclasses say how."""

    name = ""
    stopped = False  # True: every box ends at its next look, and no mark comes of that
    filters = True  # whether the runner refuses system calls

    def __init__(self) -> None:
        self._stage = stage()
        self.root = Path(self._stage.name)

    @classmethod
    def problem(cls) -> str:
        """Why it cannot be used here, and what to do; empty when it can."""
        raise NotImplementedError

    def command(self, limits: Limits, program: list[str], name: str) -> list[str]:
        """The command line that runs `program` (arguments of Python) in a sandbox of that name."""
        raise NotImplementedError

    def kill(self, name: str) -> None:
        """End a sandbox that does not live among the descendants of its command."""

    def box(self, preload: tuple[str, ...] = (), limits: Limits | None = None) -> Box:
        """Start one sandbox whose runner has imported `preload`."""
        return Box(self, preload, limits or Limits())

    def close(self) -> None:
        self._stage.cleanup()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ENVIRONMENT = {
    "HOME": "/tmp",
    "USER": "student",
    "LANG": "C.UTF-8",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_VISIBLE_DEVICES": "",  # never a GPU for untrusted code
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Read when a framework is imported. A pool of threads would not survive a fork.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Bubblewrap(Sandbox):
    """bubblewrap: namespaces of its own for processes, network and files; read-only libraries."""

    name = "bubblewrap"

    @classmethod
    def problem(cls) -> str:
        if sys.platform != "linux":
            return "it exists on Linux only"
        if not shutil.which("bwrap"):
            return "not installed (Debian, Ubuntu: sudo apt-get install bubblewrap)"
        if os.getuid() == 0 and not shutil.which("setpriv"):
            return "it needs setpriv (of util-linux) when it is started by root"
        test = ["bwrap", *_NAMESPACES, *_user(), "--ro-bind", "/", "/", "--proc", "/proc"]
        test += ["--perms", "1777", "--size", "4096", "--tmpfs", "/tmp", "--clearenv", "true"]
        try:
            done = subprocess.run(test, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return "it does not start within 20 s: is the machine busy?"
        if done.returncode == 0:
            return ""
        said = (done.stderr.strip().splitlines() or ["(no word)"])[-1]
        if "nknown option" in done.stderr:
            return f"it is too old ({said}): version 0.8 or later is needed"
        return (
            f"it cannot make its namespaces here ({said}). Inside a container the container must "
            "allow them; on Ubuntu 24.04 and later an AppArmor profile must: "
            "sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )

    def command(self, limits: Limits, program: list[str], name: str) -> list[str]:
        command = ["bwrap", *_NAMESPACES, *_user()]
        command += ["--new-session", "--die-with-parent", "--as-pid-1", "--hostname", "box"]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for place in ("/tmp", "/dev/shm"):
            command += ["--perms", "1777", "--size", str(limits.disk), "--tmpfs", place]
        for path in _libraries():
            command += [*_parents(path), "--ro-bind", str(path), str(path)]
        for link in ("/bin", "/sbin", "/lib", "/lib64"):
            path = Path(link)
            if path.is_symlink():
                command += ["--symlink", os.readlink(path), link]
            elif path.is_dir():
                command += ["--ro-bind", link, link]
        for empty in _masked():  # an installed copy of this package would bring the answers
            command += ["--size", "4096", "--tmpfs", str(empty)]
        # gloo looks for network cards here, and takes an empty folder for an answer.
        pci = Path("/sys/bus/pci/devices")
        command += [*_parents(pci), "--perms", "0755", "--dir", str(pci)]
        command += [
            "--ro-bind",
            str(self.root),
            "/box",
            "--remount-ro",
            "/",
            "--remount-ro",
            "/dev",
        ]
        command += ["--chdir", "/tmp", "--clearenv"]
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        for name, value in {**_ENVIRONMENT, "PATH": path, "PYTHONPATH": "/box"}.items():
            command += ["--setenv", name, value]
        drop = []
        if os.getuid() == 0:
            # Another user, or the limit on processes would not bind; another one for each box,
            # because the kernel counts the processes of a user, not those of a sandbox.
            user = str(random.SystemRandom().randrange(2_000_000, 2_000_000_000))
            drop = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups"]
            drop += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
        return [*command, "--", *drop, sys.executable, *program]


_NAMESPACES = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
_NAMESPACES += ["--unshare-cgroup-try"]


def _user() -> list[str]:
    """Root gives its rights up inside, which needs these; others get a user namespace."""
    if os.getuid():
        return ["--unshare-user"]
    return [
        word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")
    ]


def _libraries() -> list[Path]:
    """Folders that Python and its packages are read from."""
    import site

    found = [Path("/usr"), Path("/etc/ld.so.cache"), Path("/sys/devices/system/cpu")]
    found += [Path(sys.base_prefix), Path(sys.prefix), *map(Path, site.getsitepackages())]
    kept: list[Path] = []
    for path in found:
        if path.exists() and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
    return kept


def _masked() -> list[Path]:
    """Folders with answers that lie within the libraries."""
    own = [PACKAGE.parent / name for name in ("solutions", "source", "tests", ".git", "build")]
    installed = "python*/*-packages/course_utils/grading"
    copies = [
        copy
        for library in _libraries()
        for lib in ("lib", "lib64", "local/lib", ".")
        for copy in library.glob(f"{lib}/{installed}" if lib != "." else installed)
    ]
    found = {place.resolve() for place in (*own, *copies, PACKAGE / "grading")}
    return sorted(place for place in found if _visible(place))


def _visible(path: Path) -> bool:
    return path.is_dir() and any(path.is_relative_to(library) for library in _libraries())


def _parents(path: Path) -> list[str]:
    """Folders above `path` that everybody may pass through; bubblewrap's own are closed."""
    above = [str(folder) for folder in reversed(path.parents) if str(folder) != "/"]
    return [word for folder in above for word in ("--perms", "0755", "--dir", folder)]


class _Container(Sandbox):
    """podman or docker, with an image that holds the course's packages: docs/instructors.md."""

    image = "course-grade"

    @classmethod
    def problem(cls) -> str:
        if not shutil.which(cls.name):
            return "not installed"
        try:
            done = subprocess.run(
                [cls.name, "image", "inspect", cls.image],
                capture_output=True,
                text=True,
                timeout=30,
            )
        except subprocess.TimeoutExpired:
            return "it does not answer within 30 s"
        if done.returncode == 0:
            return ""
        said = (done.stderr.strip().splitlines() or ["(no word)"])[-1]
        return f"no image {cls.image!r} ({said}); docs/instructors.md says how to build it"

    def command(self, limits: Limits, program: list[str], name: str) -> list[str]:
        # Another user for each: the kernel counts the processes of a user, not of a container.
        user = random.SystemRandom().randrange(10_000, 60_000)
        command = [
            self.name,
            "run",
            "--name",
            name,
            "--rm",
            "--interactive",
            "--network",
            "none",
            "--read-only",
        ]
        command += ["--user", f"{user}:{user}", "--cap-drop", "ALL"]
        command += ["--security-opt", "no-new-privileges", "--pids-limit", str(limits.processes)]
        command += [f"--memory={limits.memory}", f"--memory-swap={limits.memory}", "--cpus", "2"]
        command += ["--shm-size", str(limits.disk), "--tmpfs", f"/tmp:mode=1777,size={limits.disk}"]
        command += [
            "--volume",
            f"{self.root}:/box:ro",
            "--workdir",
            "/tmp",
            "--entrypoint",
            "python",
        ]
        for name, value in {**_ENVIRONMENT, "PYTHONPATH": "/box"}.items():
            command += ["--env", f"{name}={value}"]
        return [*command, self.image, *program]

    def kill(self, name: str) -> None:
        # It fails where the container has ended by itself, as it should.
        subprocess.run([self.name, "kill", name], capture_output=True, check=False, timeout=60)


class Podman(_Container):
    name = "podman"


class Docker(_Container):
    name = "docker"


class UnsafeLocal(Sandbox):
    """No sandbox: the submission runs with the rights of whoever grades. Never for strangers."""

    name = "unsafe-local"
    filters = False

    @classmethod
    def problem(cls) -> str:
        return ""

    def command(self, limits: Limits, program: list[str], name: str) -> list[str]:
        settings = {**_ENVIRONMENT, "HOME": tempfile.gettempdir(), "PYTHONPATH": str(self.root)}
        settings["PATH"] = os.environ.get("PATH", "")
        words = [f"{name}={value}" for name, value in settings.items()]
        program = [word.replace("/box/", f"{self.root}/") for word in program]
        return ["env", "-i", *words, sys.executable, *program]


@dataclass
class Box:
    """One sandbox, warm: its runner has imported the frameworks and waits for tasks.

    After a timeout, or when it used too much memory, it is gone, and the next `ask` starts another.
    """

    sandbox: Sandbox
    preload: tuple[str, ...]
    limits: Limits
    _process: subprocess.Popen | None = field(default=None, repr=False)
    _rest: bytes = b""
    _first: list = field(default_factory=list, repr=False)
    _name: str = ""

    def ask(self, request: dict) -> Answer:
        """Run one task. Never raises for what the student's code does.

        request: trusted (source of the exercise's own cells), cells (the student's solution
        cells up to this task's), functions, run (source of the task's `run`), run_name, inputs;
        and room, the bytes that this task may take beside what it starts with.
        """
        if self._process is None:
            self._start_patiently()
        problem = self._send(json.dumps(request).encode() + b"\n")
        line, problem = (b"", problem) if problem else self._line(self.limits.seconds)
        if problem:
            self.close()
            if self.sandbox.stopped:
                raise SandboxError("stopped")
            return problem
        said = json.loads(line)
        if said["last"]:  # something of this task could not be cleared away
            self.close()
        return _understood(said)

    def _start_patiently(self) -> None:
        """Start; when that fails, twice more: another submission may have taken the machine."""
        for pause in (2, 10):
            try:
                return self._start()
            except SandboxError:
                if self.sandbox.stopped:
                    raise
                time.sleep(pause)
        self._start()

    def _start(self) -> None:
        import psutil

        settings = {"preload": self.preload, "limits": self.limits.of_a_process()}
        settings["filter"] = self.sandbox.filters
        program = ["-P", "/box/_box.py", json.dumps(settings)]
        self._name = f"course-box-{os.getpid()}-{secrets.token_hex(4)}"
        command = self.sandbox.command(self.limits, program, self._name)
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            cwd=self.sandbox.root,  # a container's monitor leaves a file where it was started
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            bufsize=0,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._rest, self._first = b"", []
        line, problem = self._line(_START)
        said = json.loads(line) if line.startswith(b"{") else {}
        if problem or not said.get("ready"):
            self._errors.seek(0)
            words = said.get("failed") or self._errors.read(4000).decode("utf-8", "replace").strip()
            self.close()
            raise SandboxError(
                f"{self.sandbox.name} did not start: {words or (problem and problem.why)}"
            )
        self._first = psutil.Process(self._process.pid).children()

    def _send(self, data: bytes) -> Answer | None:
        """Give the runner a request; what stopped it, when it does not take all of it."""
        pipe, deadline = self._process.stdin.fileno(), time.monotonic() + self.limits.seconds
        while data:
            left = deadline - time.monotonic()
            if left <= 0 or self.sandbox.stopped:
                return Answer("crash", why="the sandbox did not take the task")
            if not select.select([], [pipe], [], min(left, 0.1))[1]:
                continue
            try:
                data = data[os.write(pipe, data) :]
            except BrokenPipeError:
                return Answer("crash", why="the sandbox had ended before the task began")
        return None

    def _line(self, seconds: float) -> tuple[bytes, Answer | None]:
        """One line from the runner, or what stopped it. Watches time and memory meanwhile."""
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        data, self._rest = bytearray(self._rest), b""
        while b"\n" not in data:
            left = deadline - time.monotonic()
            if left <= 0 or self.sandbox.stopped:
                return b"", Answer("timeout", why=f"no answer within {seconds:g} s")
            if len(data) > _MAX_LINE:
                return b"", Answer("bad_reply", why="the sandbox sent too much")
            problem = self._too_much()
            if problem:
                return b"", problem
            ready, _, _ = select.select([pipe], [], [], min(left, 0.1))
            if ready:
                chunk = os.read(pipe, 1 << 16)
                if not chunk:
                    return b"", Answer("crash", why="the sandbox has ended")
                data += chunk
        line, _, rest = bytes(data).partition(b"\n")
        self._rest = rest
        return line, None

    def _too_much(self) -> Answer | None:
        """Which limit of all processes together is passed, if any."""
        import psutil

        try:
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return None
        if len(family) > self.limits.forks:
            return Answer("crash", why=f"more than {self.limits.forks} processes were running")
        if self._memory(family) > self.limits.memory:
            words = f"more than {self.limits.memory / MiB:,.0f} MiB of memory were in use"
            return Answer("memory", why=words)
        # Some memory belongs to no process, as what waits in a socket. The machine must survive.
        if psutil.virtual_memory().available < RESERVE:
            return Answer("memory", why=NO_MEMORY_LEFT)
        return None

    def _memory(self, family: list) -> int:
        """Bytes in the memory of these processes together, without their libraries' files.

        What each has had from the warm runner counts once. (The kernel's own count of shared
        pages waits for a process that forks without end.)
        """
        import psutil

        def of(process) -> int:
            try:
                return _resident(process)
            except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                return 0

        warm = sum(map(of, self._first))
        return warm + sum(max(0, of(process) - warm) for process in family)

    def close(self) -> None:
        """End every process of the sandbox."""
        import psutil

        if self._process is None:
            return
        process, self._process = self._process, None
        # The first process of a PID namespace takes all others with it, however many they are.
        for one in self._first:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        try:
            family = psutil.Process(process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        process.stdin.close()
        self.sandbox.kill(self._name)
        for one in family:
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            process.wait(1)  # it collects its child first
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _resident(process) -> int:
    """Bytes of a psutil.Process, without those of files: a GiB with some builds of torch."""
    if sys.platform != "linux":
        return process.memory_info().rss
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    own = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
    return 1024 * sum(map(int, own))


def _understood(said: dict) -> Answer:
    """What the runner sent for one task. Nothing of the reply in it is trusted."""
    try:
        if "signal" in said:
            name = signal.Signals(said["signal"]).name
            return Answer("crash", why=f"the process was ended by {name}")
        if "memory" in said:
            return Answer("memory", why="more memory than the limit was in use")
        if "bad_reply" in said:
            return Answer("bad_reply", why=str(said["bad_reply"])[:200])
        text = said["reply"]
        if not text:
            return Answer("crash", why="the process ended without an answer (an exit in the code?)")
        if text.count("\n") != 1 or not text.endswith("\n"):
            return Answer("bad_reply", why="there is not exactly one answer")
        reply = json.loads(text)
        (kind,) = reply if type(reply) is dict else ()
    except (ValueError, KeyError, TypeError, RecursionError):
        return Answer("bad_reply", why="the answer is not what the runner sends")
    if kind == "value":
        return Answer("replied", value=reply["value"])
    if kind == "not_attempted":
        return Answer("not_attempted", why="not attempted")
    if kind == "memory":
        return Answer("memory", why="the code asked for more memory than the limit")
    if kind == "error" and type(reply["error"]) is str:
        return Answer("error", why=one_line(reply["error"]))
    return Answer("bad_reply", why="the answer is not what the runner sends")
