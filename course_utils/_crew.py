"""The kernel's end of the processes that start ranks: the other end is :mod:`._ranks`.

Also what a launch holds while it lasts: Ctrl-C, and the ports that its ranks will use.
"""

import atexit
import collections
import contextlib
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE = 5.0  # seconds until what should end by itself is ended
IMPORT_TIMEOUT = 180.0  # seconds for a framework on a slow disk
ANSWER_TIMEOUT = 60.0  # seconds for a fork server that lives; with hundreds of others it is late
# Read when a framework is imported: another value needs another fork server.
READ_AT_IMPORT = ("TF_", "KERAS_", "TORCH", "PYTORCH_", "PYTHON", "MALLOC_", "GLIBC_", "LD_")


class CtrlC:
    """While it is entered, Ctrl-C is noted and wakes `select`, but cuts no step in half."""

    def __enter__(self) -> "CtrlC":
        self.pressed = False
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.mine = threading.current_thread() is threading.main_thread()
        if self.mine:  # elsewhere Python forbids it, and no Ctrl-C arrives
            self.before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *_: Any) -> None:
        self.pressed = True
        with contextlib.suppress(BlockingIOError):
            self.writer.send(b"!")

    def fileno(self) -> int:
        return self.reader.fileno()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.mine:
            signal.signal(signal.SIGINT, self.before or signal.default_int_handler)
        self.reader.close()
        self.writer.close()
        # Also where a rank failed at the same moment: `launch` tries again after some errors.
        if self.pressed and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt


def read_some(output: io.RawIOBase) -> bytes | None:
    """What has been printed; None: nothing new; empty: the rank has closed its end."""
    try:
        return output.read(1 << 18)
    except ConnectionError:
        return b""


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports on this machine, held so that the system hands them to nobody else.

    The sockets that hold them do not listen, so a rank may (SO_REUSEADDR). A program that
    asks for just this port can still take it: hence the retry in `launch`.
    """
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket())
            if os.name != "nt":  # there it would let anybody share the port
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            ports.append(holder.getsockname()[1])
        if os.name == "nt":
            stack.close()
        yield ports


CREWS: dict[str, "ForkServer"] = {}


def find_crew(framework: str, ctrl_c: CtrlC) -> "ForkServer | FreshInterpreters":
    """The running fork server of `framework`, or a new one."""
    if not hasattr(os, "fork") or os.environ.get("COURSE_LAUNCH_FRESH"):
        return FreshInterpreters(framework)
    crew = CREWS.get(framework)
    if crew is None or not crew.serves_us():
        if crew:
            crew.close()
        crew = CREWS[framework] = ForkServer(framework)
        try:
            crew.wait_until_ready(ctrl_c)
        except BaseException:
            crew.close()
            raise
    return crew


def _interpreter(*arguments: str, **options: Any) -> subprocess.Popen:
    """A Python that runs :mod:`course_utils._ranks`, in a session that Ctrl-C does not reach."""
    root = str(Path(__file__).parents[1])
    env = {
        "TF_CPP_MIN_LOG_LEVEL": "1",  # the frameworks' good news would drown the learner's
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # never start CUDA in a process that forks
        "OMP_NUM_THREADS": "1",  # read at import, by torch's and numpy's thread pools
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-m", "course_utils._ranks", *arguments]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, start_new_session=True, **options
    )


def _read_at_import() -> dict[str, str]:
    skip = ("TF_CONFIG",)
    return {k: v for k, v in os.environ.items() if k.startswith(READ_AT_IMPORT) and k not in skip}


class ForkServer:
    """The kernel's end of one fork server."""

    def __init__(self, framework: str) -> None:
        self.framework, self.owner, self.imported_under = framework, os.getpid(), _read_at_import()
        self.link, theirs = socket.socketpair()
        self.log = tempfile.TemporaryFile()
        self.rest, self.gone = b"", False
        self.messages: collections.deque[dict[str, Any]] = collections.deque()
        with theirs:
            fd = theirs.fileno()
            self.process = _interpreter(
                "server", framework, str(fd), pass_fds=[fd], stdout=self.log,
                stderr=self.log, cwd=os.sep,
            )  # fmt: skip
        atexit.register(self.close)

    def serves_us(self) -> bool:
        """Whether it still runs, is ours (not a fork's copy), and imported under this env."""
        same = self.owner == os.getpid() and self.imported_under == _read_at_import()
        return same and not self.gone and self.process.poll() is None

    def wait_until_ready(self, ctrl_c: CtrlC) -> None:
        """Wait until the framework is imported: seconds, once per kernel."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            selector.register(ctrl_c, selectors.EVENT_READ)
            selector.select(IMPORT_TIMEOUT)
        if ctrl_c.pressed:
            raise KeyboardInterrupt
        answer = self._next_message(ctrl_c)
        if "error" in answer:
            raise RuntimeError(
                f"The process that ranks are forked from could not import {self.framework}. "
                f"Is it installed for {sys.executable}?\n{answer['error']}"
            )

    def start(self, folder: Path, n: int, ctrl_c: CtrlC) -> tuple[list, list, list]:
        """Fork n ranks: their pids, control sockets, and the read ends of their output."""
        controls, outputs, theirs = [], [], []
        for _ in range(n):
            control, far_control = socket.socketpair()
            output, far_output = os.pipe()
            os.set_blocking(output, False)
            controls.append(control)
            outputs.append(open(output, "rb", buffering=0))
            theirs += [far_control.detach(), far_output]
        order = json.dumps({"launch": str(folder), "n": n}).encode() + b"\n"
        try:
            socket.send_fds(self.link, [order], theirs)
        finally:
            for fd in theirs:
                os.close(fd)
        return self._next_message(ctrl_c)["pids"], controls, outputs

    def ended(self) -> Iterator[tuple[int, int]]:
        """(rank, exit code) of the ranks that have ended since the last call."""
        self._receive(0.0)
        while self.messages:
            message = self.messages.popleft()
            yield message["exit"], message["status"]

    def ask_for_stacks(self) -> None:
        self._order(signal=signal.SIGUSR1)

    def kill(self) -> None:
        self._order(signal=signal.SIGKILL)

    def close(self) -> None:
        """Hang up: the server then ends its ranks and itself."""
        atexit.unregister(self.close)
        self.gone = True
        self.link.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()

    def _order(self, **order: Any) -> None:
        if self.gone:
            return
        with contextlib.suppress(ConnectionError):  # gone, and its ranks with it
            self.link.sendall(json.dumps(order).encode() + b"\n")

    def _next_message(self, ctrl_c: CtrlC) -> dict[str, Any]:
        start = time.monotonic()
        while not self.messages and time.monotonic() < start + ANSWER_TIMEOUT:
            self._receive(1.0)
            # Mostly the answer comes at once, and whoever asked ends the ranks that it names.
            if ctrl_c.pressed and time.monotonic() > start + PATIENCE:
                self.close()
                raise KeyboardInterrupt
        if not self.messages:
            self.close()
            raise RuntimeError(
                f"The process that ranks are forked from has not answered for {ANSWER_TIMEOUT:g} s "
                "and is ended. When the machine has less to do, run the cell again."
            )
        return self.messages.popleft()

    def _receive(self, wait: float) -> None:
        """Take in messages, waiting up to `wait` seconds for the first."""
        if self.gone or not select.select([self.link], [], [], wait)[0]:
            return
        data = self.link.recv(65536)
        if not data:
            self.gone = True
            self.log.seek(0)
            log = self.log.read()[-2000:].decode("utf-8", "replace")
            raise RuntimeError(f"The process that ranks are forked from has ended.\n{log}")
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.messages.extend(map(json.loads, lines))


class FreshInterpreters:
    """Where there is no fork (Windows): each rank is an interpreter that starts from nothing.

    Slower by the framework's import; everything else is as with the fork server.
    """

    link = None  # nothing to select on: ends are seen by polling
    gone = False

    def __init__(self, framework: str) -> None:
        self.processes: list[subprocess.Popen] = []

    def start(self, folder: Path, n: int, ctrl_c: CtrlC) -> tuple[list, list, list]:
        """Start n interpreters, which connect to us: three connections each."""
        links: dict[tuple[int, str], socket.socket] = {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = str(listener.getsockname()[1])
            for rank in range(n):
                with open(folder / f"{rank}.log", "wb") as log:
                    self.processes.append(
                        _interpreter("rank", str(folder), str(rank), port, stdout=log, stderr=log)
                    )
            listener.settimeout(0.2)
            while len(links) < 3 * n:
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    self._check_start(folder, ctrl_c)
                    continue
                link.settimeout(PATIENCE)
                name, rank, purpose = json.loads(link.makefile("rb").readline())
                if name == folder.name:  # else not one of ours
                    links[rank, purpose] = link
                    link.settimeout(None)
        controls = [links[r, "control"] for r in range(n)]
        outputs = []
        for r in range(n):
            links[r, "output"].setblocking(False)
            outputs.append(links[r, "output"].makefile("rb", buffering=0))
        self.lifelines = [links[r, "lifeline"] for r in range(n)]
        return [process.pid for process in self.processes], controls, outputs

    def _check_start(self, folder: Path, ctrl_c: CtrlC) -> None:
        if ctrl_c.pressed:
            raise KeyboardInterrupt
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                log = (folder / f"{rank}.log").read_text(errors="replace")
                raise RuntimeError(f"rank {rank} ended before it had started:\n{log[-2000:]}")

    def ended(self) -> Iterator[tuple[int, int]]:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                yield rank, process.returncode

    def ask_for_stacks(self) -> None:
        for lifeline in self.lifelines:
            with contextlib.suppress(ConnectionError):
                lifeline.send(b"s")

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        self.kill()
