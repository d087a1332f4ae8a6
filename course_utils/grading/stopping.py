"""Ctrl-C in the middle of a class: every sandbox ends, and nothing half is written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from .sandbox import Answer, Box, Limits, Sandbox, SandboxError


class Stopped(SandboxError):
    """The grader was told to stop while a sandbox was at work. No mark comes of that."""


class Stoppable:
    """A sandbox whose boxes can be ended all at once, from a signal handler.

    `mark_class` waits for its threads, and these for their boxes. So when the boxes end, the
    threads must not take that for a crash of the student's program: they raise Stopped.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self.stopped = sandbox, False
        self._boxes: list[_Box] = []

    def __getattr__(self, name: str) -> Any:  # all else is the sandbox's own
        return getattr(self._sandbox, name)

    def box(self, preload: tuple[str, ...] = (), limits: Limits | None = None) -> Box:
        self._boxes.append(_Box(self, preload, limits or Limits()))
        return self._boxes[-1]

    def stop(self) -> None:
        self.stopped = True  # first: a box that starts now sees it
        for box in self._boxes:
            if box._process is not None:
                _kill(box._process.pid)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, Ctrl-C and SIGTERM end the boxes, then raise KeyboardInterrupt."""

        def interrupt(*_: object) -> None:
            self.stop()
            raise KeyboardInterrupt

        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Box(Box):
    def ask(self, request: dict) -> Answer:
        answer = super().ask(request)
        if self.sandbox.stopped:
            raise Stopped
        return answer

    def _line(self, seconds: float) -> tuple[bytes, Answer | None]:
        if self.sandbox.stopped:  # between the start of its process and this
            raise Stopped
        return super()._line(seconds)


def _kill(pid: int) -> None:
    """End a process and its descendants; `Box.close`, in its own thread, takes care of the rest."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
