"""One launch from the kernel's side: start the ranks, print what they say, say how they ended."""

import collections
import contextlib
import io
import json
import os
import pickle
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from course_utils._crew import PATIENCE, CtrlC, find_crew, read_some
from course_utils._ranks import FAILED, RETURNED, WAITING
from course_utils._words import SIGNALS, show_stack, with_cell_names

# Seconds in which a second failure may turn out to be the cause of the first; more of them
# where the first only says that its peer is gone, for then the cause is still on its way.
GRACE, PEER_LOST_GRACE = 0.3, 3.0
PEER_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Socket closed|Broken pipe")
# TensorFlow calls it an error that it finds no GPU, where we have hidden them on purpose.
_NO_GPU = b"failed call to cuInit"


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


class Launch:
    """One launch, from the request to the last rank's end.

    Args:
        call: the pickled function and its arguments.
        request: see ``_request`` in :mod:`course_utils.launch`.
        labels: how each rank is called in what is printed.
    """

    def __init__(self, call: bytes, request: dict[str, Any], labels: list[str]) -> None:
        self.call, self.request, self.timeout = call, request, request["timeout"]
        on_core = [rank["gpu"] is None for rank in request["ranks"]]
        self.ranks = [_Rank(*each) for each in zip(labels, on_core, strict=True)]
        self.pids: list[int] = []
        self.controls: list[socket.socket] = []
        self.outputs: list[io.RawIOBase] = []

    def run(self) -> list[Any]:
        """Start the ranks, attend to them, and return the values that they returned."""
        prefix = f"launch-{os.getpid()}-"
        with (
            CtrlC() as self.ctrl_c,
            tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as path,
        ):
            self.folder = Path(path)
            for rank in range(len(self.ranks)):
                (self.folder / f"{rank}.stack").touch()
            (self.folder / "call").write_bytes(self.call)
            (self.folder / "request").write_bytes(pickle.dumps(self.request))
            self._run_ranks()
            values = [(self.folder / f"{r}.value").read_bytes() for r in range(len(self.ranks))]
        return [pickle.loads(value) for value in values]

    def _run_ranks(self) -> None:
        """Whatever happens in here, no rank is left at the end."""
        self.crew = find_crew(self.request["framework"], self.ctrl_c)
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
            self._step(min(1.0, max(0.02, (judged_at or deadline) - now)))
            if self.ctrl_c.pressed:
                self.selector.unregister(self.ctrl_c)
                print(*self._ask_where().values(), sep="\n\n", file=sys.stderr)
                raise KeyboardInterrupt
            if any(rank.failed for rank in self.ranks):
                judged_at = judged_at or now + GRACE
                if time.monotonic() >= judged_at + self._more_grace():
                    raise self._rank_error()
            elif all(rank.state for rank in self.ranks):
                self._release(WAITING)
            elif time.monotonic() >= deadline:
                raise self._timeout_error()
        self._release(RETURNED)

    def _more_grace(self) -> float:
        """Seconds to wait on: all who failed have lost a peer, and that peer has not spoken."""
        failed = [r for r, rank in enumerate(self.ranks) if rank.failed]
        texts = [self._raised(r)["message"] for r in failed if self.ranks[r].state == FAILED]
        lost = len(texts) == len(failed) < len(self.ranks) and all(map(PEER_LOST.search, texts))
        return PEER_LOST_GRACE if lost else 0.0

    def _raised(self, r: int) -> dict[str, Any]:
        return json.loads((self.folder / f"{r}.error").read_text())

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
        data = read_some(output)
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
        # Where the ranks did not even start, there is nothing to read.
        for rank, control, output in zip(self.ranks, self.controls, self.outputs, strict=False):
            while data := read_some(output):
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
                errors[r] = self._raised(r)
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
        trace = with_cell_names(error["traceback"])
        return RankError(headline, first, error["type"], error["message"], trace, others)

    def _death(self, r: int) -> dict[str, Any]:
        status, stack = self.ranks[r].status, (self.folder / f"{r}.stack").read_text()
        if status >= 0:
            message = f"exit code {status}, before the function had returned"
            return _error("os._exit", message, "left by")
        known = -status in iter(signal.Signals)
        name = signal.Signals(-status).name if known else f"signal {-status}"
        message = SIGNALS.get(name, "")
        return _error(name, message, "was killed by", show_stack(stack)[1] if stack else "")

    def _timeout_error(self) -> LaunchTimeout:
        stacks = self._ask_where()
        first = next(r for r, rank in enumerate(self.ranks) if rank.state != RETURNED)
        headlines = [text.partition("\n")[0] for text in stacks.values()]
        message = f"no end after {self.timeout:g} s: " + "; ".join(headlines)
        headline = f"the launch had not ended after its timeout of {self.timeout:g} s."
        error = LaunchTimeout(headline, first, "LaunchTimeout", message, "", stacks)
        error.traceback = "\n\n".join(stacks.values())
        return error

    def _ask_where(self) -> dict[int, str]:
        """Where each rank is, in words: its stack, and the last lines that it printed."""
        files = [self.folder / f"{r}.stack" for r in range(len(self.ranks))]
        asked = [r for r, rank in enumerate(self.ranks) if rank.runs]
        before, until = [], time.monotonic() + 4.0  # a busy machine may need them
        self.crew.ask_for_stacks()
        while time.monotonic() < until:  # until each has answered and nobody is still writing
            self._step(0.03)
            sizes = [files[r].stat().st_size for r in asked]
            if sizes == before and all(sizes):
                break
            before = sizes
        return {r: self._about(r, *show_stack(files[r].read_text())) for r in range(len(files))}

    def _about(self, r: int, headline: str, details: str = "") -> str:
        rank = self.ranks[r]
        if rank.state == RETURNED:
            headline, details = "has returned and waits for the others", ""
        tail = [f"  {line}" for line in rank.tail]
        tail = ["  last lines that it printed:", *tail] if tail else []
        return "\n".join([f"{rank.label} {headline}", *filter(None, [details]), *tail])


def _error(kind: str, message: str, verb: str, traceback: str = "") -> dict[str, Any]:
    return {"type": kind, "message": message, "verb": verb, "traceback": traceback, "time": 0.0}
