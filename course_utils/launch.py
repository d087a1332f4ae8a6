"""Run a notebook's function on several ranks, each a process with a device of its own.

    def hello(name):
        rank = dist.get_rank()
        print(f"{name} from rank {rank}")
        return rank

    launch(hello, 2, "greetings")    # -> [0, 1]

The function may stand in a cell and use the cell's globals. What ranks print streams into
the cell, with the rank before each line. The first rank to fail ends all of them and its own
error is raised here, as :class:`RankError`. No rank outlives the kernel.

How it works: a *fork server* (one per framework, see :mod:`course_utils._ranks`) imports the
framework once; each launch forks its ranks from it. The notebook's process stays in one
loop that reads what ranks print, hears who returned or failed, and keeps the deadline.

From a shell the same is ``torchrun --standalone --nproc-per-node=2 script.py``.
"""

import atexit
import collections
import contextlib
import io
import json
import linecache
import os
import pickle
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from course_utils import _ranks
from course_utils._ranks import FAILED, RETURNED, WAITING

__all__ = ["LaunchTimeout", "NestedLaunch", "RankError", "launch"]

GRACE = 0.3  # seconds in which a second failure may turn out to be the cause of the first
PORT_TRIES = 3
PATIENCE = 5.0  # seconds until what should end by itself is ended
IMPORT_TIMEOUT = 180.0  # seconds for a framework on a slow disk
# Read when a framework is imported: another value needs another fork server.
READ_AT_IMPORT = ("TF_", "KERAS_", "TORCH", "PYTORCH_", "PYTHON", "MALLOC_", "GLIBC_", "LD_")


class RankError(RuntimeError):
    """A rank failed; all ranks have been ended.

    Attributes:
        rank: the rank that failed first.
        type_name: its exception's type, or the signal's name, or ``"os._exit"``.
        message: its exception's own message.
        traceback: its own traceback, as text, with the lines of the notebook's cells.
        others: rank -> what that rank was doing, and the last lines it printed.
    """

    def __init__(
        self, headline: str, rank: int, type_name: str, message: str, traceback: str, others: dict
    ) -> None:
        self.rank, self.type_name, self.message = rank, type_name, message
        self.traceback, self.others = traceback, others
        parts = [headline, traceback.rstrip(), *others.values()]
        super().__init__("\n\n".join(part for part in parts if part))

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the ranks' tracebacks. That of this process says nothing more."""
        return [f"{type(self).__name__}: {self}"]


class LaunchTimeout(RankError, TimeoutError):
    """Not every rank returned before the deadline; `traceback` holds every rank's stack."""


class NestedLaunch(RuntimeError):
    """`launch` was called inside a rank."""


def launch(
    fn: Callable[..., Any],
    n: int | None = None,
    *args: Any,
    framework: str = "torch",
    init: bool = True,
    roles: Mapping[str, int] | None = None,
    oversubscribe: bool = False,
    timeout: float = 120.0,
) -> list[Any]:
    """Call ``fn(*args)`` on `n` ranks and return what each of them returned, in rank order.

    Every rank has RANK, LOCAL_RANK and WORLD_SIZE in its environment, one device (see
    :func:`course_utils.devices.slots`) and that device's number of threads. A rank whose
    device is a core sees no GPU. No rank leaves before all have returned or one has failed.

    Args:
        fn: any function, also one from a cell. It and `args` are sent by value: what a rank
            changes in them is not seen here. Each rank draws random numbers of its own.
        n: the number of ranks; may be left out when `roles` says it.
        framework: ``"torch"`` or ``"tensorflow"``.
        init: torch: the process group exists when `fn` starts (gloo on cores, NCCL on GPUs)
            and is destroyed after. With False `fn` makes its own; MASTER_ADDR and
            MASTER_PORT are set, so ``init_process_group("gloo")`` is enough.
        roles: TensorFlow: tasks of each job, such as ``{"worker": 2, "ps": 1}``; default is
            n workers. Ranks are numbered in this order, and TF_CONFIG tells each its task.
            `tf.distribute.Server.join()` returns when all other tasks have returned.
        oversubscribe: allow more ranks than devices. Timings then mean little.
        timeout: seconds until a launch that hangs is ended.

    Raises:
        RankError: a rank raised, left, or was killed.
        LaunchTimeout: a rank had not returned after `timeout` seconds.
        NotEnoughDevices: `n` is more than this machine has.
        NestedLaunch: called inside a rank.
        TypeError: `fn` or one of `args` cannot be sent to another process.
    """
    if "COURSE_RANK" in os.environ:
        raise NestedLaunch(
            f"launch() was called inside rank {os.environ['COURSE_RANK']}. A rank cannot start "
            "ranks: call launch() from the notebook, outside the function that it runs."
        )
    from course_utils.devices import slots

    names = _task_names(n, roles, framework)
    places = slots(len(names), oversubscribe=oversubscribe, framework=framework)
    call = _pickle_call(fn, args)
    for attempt in range(1, PORT_TRIES + 1):
        run = _Launch(call, names, places, framework, init, roles is not None, timeout)
        try:
            return run.run()
        except RankError as error:
            if attempt == PORT_TRIES or not _is_port_clash(error):
                raise
            print(f"[launch] a port was taken ({error.message}); once more with other ports")
    raise AssertionError("unreachable")


# ---------------------------------------------------------------- what is launched


def _task_names(
    n: int | None, roles: Mapping[str, int] | None, framework: str
) -> list[tuple[str, int]]:
    """Job and index of each rank: ``[("worker", 0), ("worker", 1), ("ps", 0)]``."""
    if framework not in ("torch", "tensorflow"):
        raise ValueError(f'framework is "torch" or "tensorflow", not {framework!r}')
    if roles is not None and framework == "torch":
        raise ValueError('roles are for framework="tensorflow"; torch ranks have no jobs')
    if roles is None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"launch(fn, n, ...): n is the number of ranks, not {n!r}")
        roles = {"worker": n}
    names = [(job, index) for job, count in roles.items() for index in range(count)]
    if n is not None and n != len(names):
        raise ValueError(f"n is {n}, but the roles {dict(roles)} make {len(names)} ranks")
    return names


def _pickle_call(fn: Callable[..., Any], args: tuple) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps((fn, args), protocol=5)
    except Exception as error:
        culprit = _find_unpicklable(fn, args) or getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{culprit} cannot be sent to the ranks ({error}). "
            "Create it inside the function, or pass what it is made from."
        ) from None


def _find_unpicklable(fn: Callable[..., Any], args: tuple) -> str | None:
    """Name the global, closure variable or argument that cannot be pickled."""
    import cloudpickle

    def fails(value: Any) -> bool:
        try:
            cloudpickle.dumps(value, protocol=5)
        except Exception:
            return True
        return False

    def search(function: Any, seen: set[int]) -> str | None:
        code = getattr(function, "__code__", None)
        if code is None or id(function) in seen:
            return None
        seen.add(id(function))
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        found = {name: cell.cell_contents for name, cell in cells}
        used, codes = set(), [code]
        while codes:  # functions defined inside use globals too
            inner = codes.pop()
            used.update(inner.co_names)
            codes += [const for const in inner.co_consts if isinstance(const, type(code))]
        found.update({k: v for k, v in function.__globals__.items() if k in used})
        for name, value in found.items():
            if fails(value):
                where = f"the variable {name!r} that {function.__name__}() uses"
                return search(value, seen) or f"{where}, a {type(value).__qualname__},"
        return None

    for position, value in enumerate(args):
        if fails(value):
            return f"argument {position} of the function, a {type(value).__qualname__},"
    return search(fn, set())


def _cell_sources() -> dict[str, tuple]:
    """Source lines that exist only in this process: the notebook's cells."""
    cells = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name):
            cells[name] = (entry[0], None, entry[2], entry[3])  # None: not to be checked on disk
    return cells


@contextlib.contextmanager
def _reserved_ports(count: int) -> Iterator[list[int]]:
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


def _is_port_clash(error: RankError) -> bool:
    clash = r"Could not start gRPC server|[Aa]ddress already in use|EADDRINUSE"
    return re.search(clash, error.message) is not None


# ---------------------------------------------------------------- one launch

# TensorFlow calls it an error that it finds no GPU, where we have hidden them on purpose.
_NO_GPU = b"failed call to cuInit"


class _Rank:
    """What this process knows of one rank."""

    def __init__(self, label: str, on_core: bool) -> None:
        self.label, self.on_core = label, on_core
        self.state = b""  # RETURNED, FAILED or WAITING once the rank has said so
        self.status: int | None = None  # exit code once it has ended; negative: by a signal
        self.rest: list[bytes] = []  # pieces of an unfinished line
        self.tail: collections.deque[str] = collections.deque(maxlen=5)

    @property
    def failed(self) -> bool:
        """It raised, or ended without having returned."""
        return self.state == FAILED or (self.status is not None and self.state != RETURNED)

    @property
    def runs(self) -> bool:
        return self.status is None and self.state in (b"", WAITING)

    def show(self, data: bytes) -> None:
        """Print whole lines under this rank's name; keep the rest for later."""
        # "\r" ends a line too: progress bars use nothing else
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not end:
            self.rest.append(data)
            return
        lines = b"".join([*self.rest, data[:end]]).splitlines(keepends=True)
        self.rest = [data[end:]] if data[end:] else []
        lines = [line for line in lines if line != b"\r" and not (self.on_core and _NO_GPU in line)]
        texts = [line.decode("utf-8", "replace") for line in lines]
        self.tail.extend(text.rstrip() for text in texts if text.strip())
        sys.stdout.write("".join(f"[{self.label}] {text}" for text in texts))
        sys.stdout.flush()


class _Launch:
    """One call of :func:`launch`, from the request to the last rank's end."""

    def __init__(self, call, names, places, framework, init, labelled, timeout) -> None:
        self.call, self.names, self.places = call, names, places
        self.framework, self.init, self.timeout = framework, init, timeout
        labels = [f"{job} {i}" if labelled else f"rank {r}" for r, (job, i) in enumerate(names)]
        on_core = [place.kind == "core" for place in places]
        self.ranks = [_Rank(*each) for each in zip(labels, on_core, strict=True)]
        self.pids: list[int] = []
        self.controls: list[socket.socket] = []
        self.outputs: list[io.RawIOBase] = []

    def run(self) -> list[Any]:
        """Start the ranks, attend to them, and return the values that they returned."""
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise RuntimeError("another launch() is running in this kernel: wait for it to end")
        ok = False
        try:
            with (
                _CtrlC() as self.ctrl_c,
                _reserved_ports(len(self.names)) as ports,
                tempfile.TemporaryDirectory(
                    prefix=f"launch-{os.getpid()}-", ignore_cleanup_errors=True
                ) as path,
            ):
                self.folder = Path(path)
                for rank in range(len(self.ranks)):
                    (self.folder / f"{rank}.stack").touch()
                (self.folder / "call").write_bytes(self.call)
                (self.folder / "request").write_bytes(pickle.dumps(self._request(ports)))
                self._run_ranks()
                values = [(self.folder / f"{r}.value").read_bytes() for r in range(len(self.ranks))]
            ok = True
        finally:
            _ONE_AT_A_TIME.release()
            self._write_ledger(ok)
        return [pickle.loads(value) for value in values]

    def _request(self, ports: list[int]) -> dict[str, Any]:
        ranks = []
        for rank, place in enumerate(self.places):
            own = _environment_of(rank, self.names, self.places, ports, self.framework)
            gpu = rank if place.kind == "gpu" else None
            env = {**os.environ, **own}
            ranks.append({"env": env, "cpus": place.cpus, "threads": place.threads, "gpu": gpu})
        return {
            "framework": self.framework,
            "init": self.init,
            "timeout": self.timeout,
            "ranks": ranks,
            "cwd": os.getcwd(),
            "path": sys.path,
            "argv": sys.argv,
            "sources": _cell_sources(),
        }

    def _run_ranks(self) -> None:
        """Whatever happens in here, no rank is left at the end."""
        self.crew = _crew(self.framework, self.ctrl_c)
        self.selector = selectors.DefaultSelector()
        try:
            self.pids, self.controls, self.outputs = self.crew.start(
                self.folder, len(self.ranks), self.ctrl_c
            )
            self.selector.register(self.ctrl_c, selectors.EVENT_READ)
            if self.crew.link:
                self.selector.register(self.crew.link, selectors.EVENT_READ)
            for rank, control, output in zip(self.ranks, self.controls, self.outputs, strict=True):
                self.selector.register(control, selectors.EVENT_READ, (self._hear, rank))
                self.selector.register(output, selectors.EVENT_READ, (self._read, rank))
            self._attend()
        except BaseException:
            self.crew.kill()
            raise
        finally:
            self._wait_for_ends()
            self.selector.close()

    def _attend(self) -> None:
        """Until all ranks have returned, one has failed, time is up, or Ctrl-C."""
        deadline = time.monotonic() + self.timeout
        judged_at = None  # when to name the rank that failed first
        while not all(rank.state == RETURNED for rank in self.ranks):
            now = time.monotonic()
            self._step(max(0.0, min(1.0, (judged_at or deadline) - now)))
            if self.ctrl_c.pressed:
                print(*self._ask_where().values(), sep="\n\n", file=sys.stderr)
                raise KeyboardInterrupt
            if any(rank.failed for rank in self.ranks):
                judged_at = judged_at or now + GRACE
                if time.monotonic() >= judged_at:
                    raise self._rank_error()
            elif all(rank.state for rank in self.ranks):
                self._release(WAITING)
            elif time.monotonic() >= deadline:
                raise self._timeout_error()
        self._release(RETURNED)

    def _step(self, wait: float) -> None:
        """Handle what ranks have printed and said, and which of them have ended."""
        for key, _ in self.selector.select(wait):
            if key.data:
                handle, rank = key.data
                handle(rank, key.fileobj)
        for rank, status in self.crew.ended():
            self.ranks[rank].status = status

    def _hear(self, rank: _Rank, control: socket.socket) -> None:
        try:
            said = control.recv(1)
        except ConnectionError:
            said = b""
        if said:
            rank.state = said
        else:
            self.selector.unregister(control)

    def _read(self, rank: _Rank, output: io.RawIOBase) -> None:
        data = _read_some(output)
        if data:
            rank.show(data)
        elif data is not None:
            self.selector.unregister(output)

    def _release(self, state: bytes) -> None:
        """Let those ranks go on that wait in `state`; all others are as far, or further."""
        for rank, control in zip(self.ranks, self.controls, strict=True):
            if rank.state == state:
                rank.state = b"" if state == WAITING else state
                with contextlib.suppress(ConnectionError):  # ended: heard of elsewhere
                    control.send(b"g")

    def _wait_for_ends(self) -> None:
        """Wait until every rank has ended, by force if need be, and show its last words."""
        for force in (self.crew.kill, self.crew.close):
            until = time.monotonic() + PATIENCE
            while not self._all_ended() and time.monotonic() < until:
                self._step(0.05)
            if self._all_ended():
                break
            force()
        for rank, control, output in zip(self.ranks, self.controls, self.outputs, strict=True):
            while data := _read_some(output):
                rank.show(data)
            if rank.rest:
                rank.show(b"\n")
            control.close()
            output.close()

    def _all_ended(self) -> bool:
        ended = all(rank.status is not None for rank in self.ranks)
        return ended or self.crew.gone or not self.pids

    # ------------------------------------------------------------ what went wrong

    def _rank_error(self) -> RankError:
        """The error of the rank that failed first; a rank that died outranks one that raised.

        When a rank is killed, its peers' sockets close, and they may tell of that first.
        """
        errors = {}
        for r, rank in enumerate(self.ranks):
            if rank.state == FAILED:
                errors[r] = json.loads((self.folder / f"{r}.error").read_text())
            elif rank.failed:
                errors[r] = self._death(r)
        first = min(errors, key=lambda r: errors[r]["time"])
        error = errors[first]
        others = self._ask_where()
        for r, other in errors.items():
            others[r] = self._about(r, f"failed too: {other['type']}: {other['message']}")
        del others[first]
        label = self.ranks[first].label
        headline = f"{label} of {len(self.ranks)} {error.get('verb', 'raised')} {error['type']}"
        headline += f": {error['message']}" if error["message"] else ""
        trace = _with_cell_names(error["traceback"])
        return RankError(headline, first, error["type"], error["message"], trace, others)

    def _death(self, r: int) -> dict[str, Any]:
        status, stack = self.ranks[r].status, (self.folder / f"{r}.stack").read_text()
        if status >= 0:
            message = f"exit code {status}, before the function had returned"
            return _error("os._exit", message, "left by")
        name = signal.Signals(-status).name
        message = _SIGNALS.get(name, "")
        return _error(name, message, "was killed by", _show_stack(stack)[1] if stack else "")

    def _timeout_error(self) -> LaunchTimeout:
        stacks = self._ask_where()
        first = next(r for r, rank in enumerate(self.ranks) if rank.state != RETURNED)
        headlines = [text.partition("\n")[0] for text in stacks.values()]
        message = f"no end after {self.timeout:g} s: " + "; ".join(headlines)
        return LaunchTimeout(
            f"the launch had not ended after its timeout of {self.timeout:g} s.",
            first,
            "LaunchTimeout",
            message,
            "",
            stacks,
        )

    def _ask_where(self) -> dict[int, str]:
        """Where each rank is, in words: its stack, and the last lines that it printed."""
        files = [self.folder / f"{r}.stack" for r in range(len(self.ranks))]
        asked = [r for r, rank in enumerate(self.ranks) if rank.runs]
        before, until = [], time.monotonic() + 1.0
        self.crew.ask_for_stacks()
        while time.monotonic() < until:  # until each has answered and nobody is still writing
            self._step(0.03)
            sizes = [files[r].stat().st_size for r in asked]
            if sizes == before and all(sizes):
                break
            before = sizes
        return {r: self._about(r, *_show_stack(files[r].read_text())) for r in range(len(files))}

    def _about(self, r: int, headline: str, details: str = "") -> str:
        rank = self.ranks[r]
        if rank.state == RETURNED:
            headline, details = "has returned and waits for the others", ""
        tail = [f"  {line}" for line in rank.tail]
        tail = ["  last lines that it printed:", *tail] if tail else []
        return "\n".join([f"{rank.label} {headline}", *filter(None, [details]), *tail])

    def _write_ledger(self, ok: bool) -> None:
        """One JSON line per launch, for tests that ask whether two devices were at work."""
        path = os.environ.get("COURSE_LAUNCH_LEDGER")
        if not path:
            return
        from course_utils.devices import census

        entry = {
            "pid": os.getpid(),
            "ranks": self.pids,
            "tier": census().tier,
            "n": len(self.ranks),
            "framework": self.framework,
            "slots": [place.name for place in self.places],
            "ok": ok,
        }
        with open(path, "a") as ledger:
            ledger.write(json.dumps(entry) + "\n")


_ONE_AT_A_TIME = threading.Lock()
_SIGNALS = {
    "SIGKILL": "probably out of memory, where the system ends whoever uses most of it",
    "SIGSEGV": "segmentation fault: compiled code touched memory that is not its own",
    "SIGABRT": "compiled code gave up; what it printed says why",
    "SIGBUS": "bus error: often a full /dev/shm",
    "SIGTERM": "somebody asked it to end",
}


def _error(kind: str, message: str, verb: str, traceback: str = "") -> dict[str, Any]:
    return {"type": kind, "message": message, "verb": verb, "traceback": traceback, "time": 0.0}


def _environment_of(rank, names, places, ports, framework) -> dict[str, str]:
    """What rank `rank` finds in its environment, beside what the notebook has in its own."""
    place, (job, index) = places[rank], names[rank]
    threads = str(place.threads)
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "COURSE_RANK": str(rank),
        "WORLD_SIZE": str(len(names)),
        "LOCAL_WORLD_SIZE": str(len(names)),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MPLBACKEND": "agg",  # the notebook's own backend needs a notebook
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "-1",  # a rank on a core sees no GPU
    }
    if place.kind == "gpu" and framework == "torch":  # as under torchrun: LOCAL_RANK picks one
        env["CUDA_VISIBLE_DEVICES"] = ",".join(p.visible for p in places)
    elif place.kind == "gpu":
        env["CUDA_VISIBLE_DEVICES"] = place.visible
    if framework == "torch":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    else:
        cluster: dict[str, list[str]] = {}
        for (each, _), port in zip(names, ports, strict=True):
            cluster.setdefault(each, []).append(f"127.0.0.1:{port}")
        task = {"type": job, "index": index}
        env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return env


class _CtrlC:
    """While it is entered, Ctrl-C is noted and wakes `select`, but cuts no step in half."""

    def __enter__(self) -> "_CtrlC":
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
        if self.pressed and kind is None:
            raise KeyboardInterrupt


def _read_some(output: io.RawIOBase) -> bytes | None:
    """What has been printed; None: nothing new; empty: the rank has closed its end."""
    try:
        return output.read(1 << 18)
    except ConnectionError:
        return b""


# ---------------------------------------------------------------- stacks, made readable

_FRAME = re.compile(r'^ *File "(.*)", line (\d+) in (.*)$', re.M)
_ROOTS = [sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")]
_ROOTS.append(str(Path(__file__).parents[1]))
_LIBRARIES = ("<frozen", str(Path(__file__).parent) + os.sep, *(r + os.sep for r in _ROOTS[:4]))
_WRAPPERS = {"wrapper", "inner", "decorate_context", "_fn", "error_handler", "<lambda>"}


def _show_stack(dump: str) -> tuple[str, str]:
    """From faulthandler's dump: one line that says where the rank is, and its stack.

    "waits in all_reduce, line 12 of Cell In[5]", and the main thread's frames, most recent
    call last as Python shows them.
    """
    main_thread = dump.rpartition("(most recent call first):")[2]
    frames = [f for f in _FRAME.findall(main_thread) if f[0] != _ranks.__file__]
    while frames and frames[-1][0].startswith("<frozen"):
        frames.pop()
    own = [i for i, (file, _, _) in enumerate(frames) if not file.startswith(_LIBRARIES)]
    if not frames:
        return "was not yet, or no longer, in the function", ""
    text = []
    for file, line, function in reversed(frames):
        text.append(f"  {_file_name(file)}, line {line}, in {function}")
        text.append(f"    {linecache.getline(file, int(line)).strip()}")
    if not own:
        return "is starting or ending", "\n".join(text)
    file, line, function = frames[own[0]]
    called = [f for _, _, f in frames[: own[0]] if f not in _WRAPPERS]
    doing = f"waits in {called[-1]}" if called else f"is in {function}"
    where = _file_name(file)
    where = where if where.startswith("Cell") else Path(file).name
    return f"{doing}, line {line} of {where}", "\n".join(text)


def _file_name(path: str) -> str:
    """``Cell In[5]`` for a notebook's cell; a short path for files of libraries and ours."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(path)
    if number is not None:
        return f"Cell In[{number}]"
    for root in (*_ROOTS, os.getcwd()):
        path = path.removeprefix(root + os.sep)
    return f'File "{path}"'


def _with_cell_names(trace: str) -> str:
    return re.sub(r'File "([^"\n]+)"', lambda match: _file_name(match[1]), trace)


# ---------------------------------------------------------------- who starts the ranks

_CREWS: dict[str, "_ForkServer"] = {}


def _crew(framework: str, ctrl_c: _CtrlC) -> "_ForkServer | _FreshInterpreters":
    """The running fork server of `framework`, or a new one."""
    if not hasattr(os, "fork") or os.environ.get("COURSE_LAUNCH_FRESH"):
        return _FreshInterpreters(framework)
    crew = _CREWS.get(framework)
    if crew is None or not crew.serves_us():
        if crew:
            crew.close()
        crew = _CREWS[framework] = _ForkServer(framework)
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


class _ForkServer:
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

    def wait_until_ready(self, ctrl_c: _CtrlC) -> None:
        """Wait until the framework is imported: seconds, once per kernel."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.link, selectors.EVENT_READ)
            selector.register(ctrl_c, selectors.EVENT_READ)
            selector.select(IMPORT_TIMEOUT)
        if ctrl_c.pressed:
            raise KeyboardInterrupt
        answer = self._next_message()
        if "error" in answer:
            raise RuntimeError(
                f"The process that ranks are forked from could not import {self.framework}. "
                f"Is it installed for {sys.executable}?\n{answer['error']}"
            )

    def start(self, folder: Path, n: int, ctrl_c: _CtrlC) -> tuple[list, list, list]:
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
        return self._next_message()["pids"], controls, outputs

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
        with contextlib.suppress(ConnectionError):  # gone, and its ranks with it
            self.link.sendall(json.dumps(order).encode() + b"\n")

    def _next_message(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while not self.messages and time.monotonic() < until:
            self._receive(1.0)
        if not self.messages:
            self.close()
            raise RuntimeError("the process that ranks are forked from does not answer")
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


class _FreshInterpreters:
    """Where there is no fork (Windows): each rank is an interpreter that starts from nothing.

    Slower by the framework's import; everything else is as with the fork server.
    """

    link = None  # nothing to select on: ends are seen by polling
    gone = False

    def __init__(self, framework: str) -> None:
        self.processes: list[subprocess.Popen] = []

    def start(self, folder: Path, n: int, ctrl_c: _CtrlC) -> tuple[list, list, list]:
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

    def _check_start(self, folder: Path, ctrl_c: _CtrlC) -> None:
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
