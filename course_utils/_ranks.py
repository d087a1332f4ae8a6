"""The processes behind :mod:`course_utils.launch`: a fork server, and the ranks it forks.

Importing torch takes a second or two, TensorFlow more. So a small server process imports
the framework once and does nothing else: it runs no code of the notebook and never touches
a GPU. A rank is a fork of it, hence ready in milliseconds, and safe even when the notebook
itself has used CUDA, which a fork of the notebook would not be.

What passes between the processes (`folder` is the launch's own temporary folder):

* kernel -> server, a socket: JSON lines ``{"launch": folder, "n": 2}`` (with the ranks'
  file descriptors) and ``{"signal": 9}``. End of file means that the kernel is gone.
* server -> kernel: ``{"ready": true}``, ``{"pids": [...]}``, ``{"exit": rank, "status": code}``.
* rank -> kernel, one byte each on the rank's own socket: RETURNED, FAILED, or WAITING.
  The kernel answers with one byte when every rank is that far.
* files: ``request`` and ``call`` (what to run), ``<rank>.value`` or ``<rank>.error`` (how it
  ended), ``<rank>.stack`` (where the rank was when it was asked).
"""

import faulthandler
import functools
import gc
import importlib
import io
import json
import linecache
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from datetime import timedelta
from pathlib import Path
from typing import Any

RETURNED, FAILED, WAITING = b"R", b"F", b"W"
EVERY_RANK_NEEDS = ("numpy.random", "cloudpickle", "ctypes")
# What a framework imports only when a rank makes its first optimizer: 1.5 s, in every launch.
LATER = {"torch": ("torch._dynamo",), "tensorflow": ()}


# ---------------------------------------------------------------- the fork server


def serve(framework: str, kernel: socket.socket) -> None:
    """Fork ranks on request until the kernel is gone, then end every one of them.

    Args:
        framework: ``"torch"`` or ``"tensorflow"``, imported once, here.
        kernel: the socket to the notebook's kernel.
    """
    try:
        for module in (framework, *LATER[framework], *EVERY_RANK_NEEDS):
            importlib.import_module(module)
    except BaseException:
        _send(kernel, error=traceback.format_exc())
        return
    gc.collect()
    gc.freeze()  # ranks share these pages with us as long as nobody writes to them
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a rank can show its stack
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    own = (kernel.fileno(), wake, woken)
    live: dict[int, int] = {}  # pid -> rank
    folder, pending, fds, parent = None, b"", [], os.getppid()
    try:
        _send(kernel, ready=True)
        while os.getppid() == parent:
            readable = select.select([kernel, wake], [], [], 1.0)[0]
            if wake in readable:
                os.read(wake, 4096)
            _report_ended(kernel, live)
            if kernel not in readable:
                continue
            data, new_fds, _, _ = socket.recv_fds(kernel, 65536, 250)
            fds += new_fds
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for order in map(json.loads, lines):
                if "signal" in order:
                    _kill(live, order["signal"])
                else:
                    folder = order["launch"]
                    live = _fork_ranks(folder, order["n"], fds, own)
                    fds = []
                    _send(kernel, pids=list(live))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the kernel is gone, which is what `finally` is for
    finally:
        _kill(live, signal.SIGKILL)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _fork_ranks(folder: str, n: int, fds: list[int], own: tuple[int, ...]) -> dict[int, int]:
    """Fork `n` ranks; rank r gets ``fds[2r]`` (control) and ``fds[2r + 1]`` (its output)."""
    live = {}
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)  # a group of its own: whatever the rank starts ends with it
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _die_with_server()
                control, output = fds[2 * rank], fds[2 * rank + 1]
                for fd in (*own, *fds):
                    if fd not in (control, output):
                        os.close(fd)
                run_rank(Path(folder), rank, socket.socket(fileno=control), output)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)  # never back into the server's loop
        try:
            os.setpgid(pid, pid)  # here too: whoever comes first, before anybody can kill it
        except (PermissionError, ProcessLookupError):
            pass  # the rank was faster and has ended already
        live[pid] = rank
    for fd in fds:
        os.close(fd)
    return live


def _report_ended(kernel: socket.socket, live: dict[int, int]) -> None:
    """Reap the ranks that have ended, end what they have left behind, tell the kernel."""
    for pid in list(live):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            _kill({pid: 0}, signal.SIGKILL)
            _send(kernel, exit=live.pop(pid), status=os.waitstatus_to_exitcode(status))


def _kill(live: dict[int, int], signum: int) -> None:
    """Signal ranks; SIGKILL goes to each one's whole process group."""
    for pid in live:
        try:
            os.killpg(pid, signum) if signum == signal.SIGKILL else os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            pass  # ended in the meantime (macOS: PermissionError for a zombie's group)


def _die_with_server() -> None:
    """Linux: have the kernel of the system end this rank if the fork server is killed."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _send(kernel: socket.socket, **message: Any) -> None:
    kernel.sendall(json.dumps(message).encode() + b"\n")


# ---------------------------------------------------------------- one rank


def run_rank(folder: Path, rank: int, control: socket.socket, output: int) -> None:
    """Become rank `rank`, call the function, report how it ended; does not return.

    The rank stays until the kernel answers, even when it has failed: were it to leave
    early, its peers would meet a closed socket and report that instead of the cause.
    """
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nobody can type into a rank
    sys.stdin = open(0, closefd=False)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = open(fd, "wb", 0, closefd=False)
        text = io.TextIOWrapper(raw, "utf-8", "replace", line_buffering=True, write_through=True)
        setattr(sys, name, text)
    stacks = open(folder / f"{rank}.stack", "w")
    faulthandler.enable(stacks)  # a segmentation fault leaves its stack there
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    try:
        request = pickle.loads((folder / "request").read_bytes())
        _become(request, rank)
        START[request["framework"]](request, rank, folder, control)
        function, args = pickle.loads((folder / "call").read_bytes())
        _adopt_globals(function)
        value = function(*args)
        _write_value(folder / f"{rank}.value", value)
        status = RETURNED
    except BaseException as error:  # SystemExit too: the notebook must hear of it
        _write_error(folder / f"{rank}.error", error)
        status = FAILED
    _flush()
    wait_for_others(control, status)
    if status == RETURNED and request["init"] and request["framework"] == "torch":
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    _flush()
    os._exit(0)


def wait_for_others(control: socket.socket, status: bytes) -> None:
    """Tell the kernel how far this rank is; return when every rank is that far."""
    control.sendall(status)
    if not control.recv(1):  # end of file: the kernel has given up
        os._exit(1)


def _become(request: dict[str, Any], rank: int) -> None:
    """Take on the environment, folder, import path, cores and seeds of this rank."""
    me = request["ranks"][rank]
    os.environ.clear()  # the server's environment is as old as the server
    os.environ.update(me["env"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    sys.argv[:] = request["argv"]
    linecache.cache.update(request["sources"])  # tracebacks can then quote notebook cells
    if me["cpus"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, me["cpus"])
    if "numpy" in sys.modules:  # forks share their parent's state; fresh processes would not
        sys.modules["numpy"].random.seed()


def _start_torch(request: dict, rank: int, folder: Path, control: socket.socket) -> None:
    """Threads, GPU and process group of one torch rank."""
    import torch

    me, world = request["ranks"][rank], len(request["ranks"])
    torch.set_num_threads(me["threads"])
    torch.seed()
    if me["gpu"] is not None:
        torch.cuda.set_device(me["gpu"])
    if request["init"]:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo" if me["gpu"] is None else "nccl",
            store=dist.FileStore(str(folder / "store"), world),
            rank=rank,
            world_size=world,
            # later than launch's own deadline, which shows where each rank hangs
            timeout=timedelta(seconds=request["timeout"] + 60),
        )


def _start_tensorflow(request: dict, rank: int, folder: Path, control: socket.socket) -> None:
    """Threads of one TensorFlow task, and a `Server.join` that ends with the launch."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(request["ranks"][rank]["threads"])
    # By itself join() never returns, even when all other tasks are done.
    tf.distribute.Server.join = lambda server: wait_for_others(control, WAITING)


START = {"torch": _start_torch, "tensorflow": _start_tensorflow}


def _adopt_globals(function: Any) -> None:
    """Let ``__main__`` hold the notebook's names, so that pickle finds its classes here."""
    main = types.ModuleType("__main__")
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(function, "__globals__", {})
    if names.get("__name__") == "__main__":
        main.__dict__.update(names)
    sys.modules["__main__"] = main


def _write_value(path: Path, value: Any) -> None:
    import cloudpickle

    try:
        with open(path, "wb") as file:
            cloudpickle.dump(value, file, protocol=5)
    except Exception as error:
        error.add_note(
            f"The rank's return value ({type(value).__qualname__}) cannot be sent to the "
            "notebook: return numbers, arrays, tensors or containers of them."
        )
        raise


def _write_error(path: Path, error: BaseException) -> None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next  # the first lines are ours and would only distract
    lines = traceback.format_exception(type(error), error, trace)
    facts = {"type": type(error).__qualname__, "message": str(error), "time": time.monotonic()}
    path.write_text(json.dumps({**facts, "traceback": "".join(lines)}))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # closed by the learner's function, or the kernel no longer reads


# ---------------------------------------------------------------- without fork


def connect_rank(folder: Path, rank: int, port: int) -> None:
    """A fresh interpreter (Windows has no fork): reach the kernel over TCP, then run."""
    links = []
    for purpose in "control", "output", "lifeline":
        link = socket.create_connection(("127.0.0.1", port))
        link.sendall(json.dumps([folder.name, rank, purpose]).encode() + b"\n")
        links.append(link)
    control, output, lifeline = links
    reader, writer = os.pipe()  # on Windows a socket cannot stand in for standard output
    threading.Thread(target=_forward, args=(reader, output), daemon=True).start()
    threading.Thread(target=_obey, args=(lifeline, folder / f"{rank}.stack"), daemon=True).start()
    run_rank(folder, rank, control, writer)


def _forward(reader: int, output: socket.socket) -> None:
    while data := os.read(reader, 65536):
        output.sendall(data)


def _obey(lifeline: socket.socket, stack: Path) -> None:
    """Show this rank's stack when asked; end with the kernel, however it ended."""
    try:
        while lifeline.recv(1):
            with open(stack, "a") as file:
                faulthandler.dump_traceback(file, all_threads=True)
    finally:
        os._exit(1)


def main(mode: str, *rest: str) -> None:
    """``server FRAMEWORK FD`` or ``rank FOLDER RANK PORT``; started by `launch` only."""
    if mode == "server":
        serve(rest[0], socket.socket(fileno=int(rest[1])))
    else:
        connect_rank(Path(rest[0]), int(rest[1]), int(rest[2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
