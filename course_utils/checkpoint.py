"""Save a training run so that it can be killed at any moment and go on as if it had not been.

    checkpoint = Checkpoint("runs/first", model=model, optimizer=optimizer, scheduler=scheduler)
    first, done = checkpoint.restore() or (0, 0)            # (0, 0): nothing there yet
    for epoch in range(first, EPOCHS):
        for rows in batches(len(x), 32, seed=1, epoch=epoch, start=done):
            ...                                             # one step with x[rows], y[rows]
            done += 1
            checkpoint.save(epoch, done)                    # `done` batches of `epoch` are done
        done = 0

One save is one file, `save-000012.pt`: a line of text with a checksum, then what `torch.save`
writes. It takes its name only when it is complete and on the disk, so a run that is killed
while it saves leaves the file before it, whole. :func:`read` gives you what is in one.

With several ranks rank 0 writes that one file, for all of them. What differs from rank to rank
(the random numbers; also a model, where each rank holds another part) travels to rank 0 first;
what is the same everywhere is stored once. So no rank can resume from another step than the
others. To resume, every rank must be able to read the folder.

Going on is bitwise the same where the step itself is (on a GPU: deterministic algorithms). Save
between steps: gradients are not kept. The numbers kept are those of torch on the CPU and on
CUDA, numpy's global generator, and Python's `random`.
"""

import operator
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from course_utils import _agree, _saved
from course_utils._agree import gather, rank, world_size
from course_utils._saved import CheckpointError, read

__all__ = ["Checkpoint", "CheckpointError", "Position", "batches", "read"]

_NAME = re.compile(r"save-(\d{6,})\.pt")
agree = partial(_agree.agree, elsewhere=CheckpointError)  # all ranks raise, or none


class Position(NamedTuple):
    """How far a run has come: `batch` batches of epoch `epoch` are done, both from 0."""

    epoch: int
    batch: int


def batches(n: int, size: int, *, seed: int, epoch: int, start: int = 0) -> Iterator[list[int]]:
    """Rows of each batch of one epoch, from batch `start` on: lists of up to `size` of n rows.

    The order follows from `seed` and `epoch` alone, so it needs no saving. With a DataLoader:
    ``DataLoader(data, batch_sampler=list(batches(…)), generator=torch.Generator())``. A generator
    of its own, because a DataLoader draws one number when its epoch starts: from torch's global
    ones it would be drawn once more on resuming, and every dropout after it would differ.
    """
    import torch

    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows = torch.randperm(n, generator=generator).tolist()
    for first in range(start * size, n, size):
        yield rows[first : first + size]


class Checkpoint:
    """The saves of one run in one folder; the newest `keep` of them stay.

    Args:
        folder: one run's own; made if it is not there. While it saves, the disk needs room for
            `keep` + 1 files.
        keep: 2 lets the newest file be damaged by something else without losing the run.
        things: whatever has `state_dict` and `load_state_dict`: model, optimizer, scheduler,
            scaler, and any class of yours.

    Raises:
        TypeError: a thing lacks one of the two methods.
        ValueError: no things, or `keep` below 1.
        CheckpointError: the folder cannot be made.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2, **things: Any) -> None:
        if not things or keep < 1:
            raise ValueError("Checkpoint(folder, model=model, …): at least one thing, keep >= 1")
        for name, thing in things.items():
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TypeError(f"{name}: {type(thing)} has no state_dict/load_state_dict")
        self.folder, self.keep = Path(folder), keep
        # The numbers last: loading the others may draw some.
        self.things = {**things, "random numbers": _saved.RandomNumbers()}
        self._last = 0  # highest number in the folder that this run knows of
        self._good: list[int] = []  # numbers of saves known to be whole, oldest first
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot hold checkpoints: {error}") from error

    def save(self, epoch: int, batch: int) -> None:
        """Write everything, when `batch` batches of `epoch` are done. All ranks call it.

        It draws no random numbers: a run with saves is bitwise the run without.

        Raises:
            CheckpointError: the disk is full or not writable; another run has written to the
                folder; ranks stand at different positions; a state holds something that could
                not be read back. The saves before it are as they were.
        """
        at = Position(operator.index(epoch), operator.index(batch))
        if min(at) < 0:
            raise ValueError(f"epoch and batch count from 0, not {tuple(at)}")
        mine = agree(self._entries)
        # Ranks compare checksums first, so that a replica's equal weights need not travel.
        alone = world_size() == 1
        sums = {} if alone else {k: _saved.checksum(v) for k, v in mine.items()}
        everyone = gather((at, sums))
        if any(other != at for other, _ in everyone):
            raise CheckpointError(f"ranks are at different positions: {[p for p, _ in everyone]}")
        same = everyone[0][1].items() & sums.items()  # as on rank 0
        own = {k: None if (k, sums[k]) in same else mine[k] for k in mine} if rank() else {}
        ranks = [mine, *gather(own)[1:]]
        content = {"epoch": at.epoch, "batch": at.batch, "ranks": ranks}
        agree(lambda: self._write(content) if rank() == 0 else None)

    def _entries(self) -> dict[str, dict]:
        """Of each thing: its kind, the shapes by which it is recognised, and its state."""
        return {
            name: {**_saved.described(thing), "state": _saved.plain(thing.state_dict(), name)}
            for name, thing in self.things.items()
        }

    def _write(self, content: dict) -> None:
        newest = max((number for number, _ in self._saves()), default=0)
        if newest > self._last:
            raise CheckpointError(
                f"{self.folder} holds save-{newest:06d}.pt, which this run neither wrote nor "
                "resumed from. restore() first to go on from it, or take another folder."
            )
        self._last += 1  # before the file exists: Ctrl-C in between must not shut us out
        number, data, temporary = self._last, _saved.packed(content), self.folder / "save.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # the bytes are on the disk before they get the name
            os.replace(temporary, self.folder / f"save-{number:06d}.pt")
            _saved.sync(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder}: nothing was saved ({error}); earlier saves are as they were. "
                f"A save takes {len(data) / 2**20:.1f} MiB, and {self.keep + 1} of them must fit: "
                "make room, choose a smaller keep or another folder, then save again."
            ) from error
        finally:
            temporary.unlink(missing_ok=True)  # also on Ctrl-C; a killed run's is overwritten
        self._good = [*self._good, number][-self.keep :]
        self._prune()

    def _prune(self) -> None:
        """Delete what is older than the `keep` newest whole saves; never a file not ours."""
        if len(self._good) < self.keep:
            return
        for number, path in self._saves():
            try:
                if number < self._good[0] and _saved.is_ours(path):
                    path.unlink()
            except OSError as error:  # the run is safe without this: say it, and go on
                print(f"[checkpoint] {path.name} is no longer needed, but stays: {error}")

    def _saves(self) -> list[tuple[int, Path]]:
        """Number and path of all that is named like a save, oldest first."""
        try:
            names = os.listdir(self.folder)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror}") from error
        found = [(_NAME.fullmatch(name), name) for name in names]
        return sorted((int(match[1]), self.folder / name) for match, name in found if match)

    def restore(self) -> Position | None:
        """Load the newest whole save; None if there is none yet. All ranks call it.

        A file that is damaged, not a checkpoint, of a newer format or not readable is refused:
        its name and the reason are printed, and the one before it is used.

        Raises:
            CheckpointError: there are files and each is refused (listed); or the file does not
                fit what was given to `Checkpoint`, or the number of ranks. Nothing is loaded
                then: all things are as they were.
        """
        name = gather(agree(lambda: self._newest() if rank() == 0 else None))[0]
        if name is None:
            return None
        path = self.folder / name  # chosen by rank 0, for all
        content = agree(lambda: read(path))
        entries = agree(lambda: self._fitting(content, path))
        before = agree(lambda: _saved.packed(self._entries()))
        try:
            agree(lambda: self._load(entries))
        except BaseException:  # Ctrl-C too: never half of one model and half of another
            self._load(_saved.unpacked(before))
            raise
        # Only now may save() write here: a run that did not fit must not delete this one's saves.
        self._last, self._good = self._saves()[-1][0], [int(_NAME.fullmatch(name)[1])]
        return Position(content["epoch"], content["batch"])

    def _newest(self) -> str | None:
        """Name of the newest whole save, None if there is no file; prints what it refuses."""
        refused: list[str] = []
        for _, path in reversed(self._saves()):
            try:
                read(path)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            for line in refused:
                print(f"[checkpoint] refused {line}. Resuming from {path.name}.")
            return path.name
        if refused:
            listed = "\n  ".join(refused)
            raise CheckpointError(
                f"no save in {self.folder} can be used:\n  {listed}\n"
                "Put a whole one there, or take another folder to start from the beginning."
            )
        return None

    def _fitting(self, content: dict, path: Path) -> dict[str, dict]:
        """This rank's part of a save, after checking that it fits what is here."""
        ranks, wrong = content["ranks"], []
        if len(ranks) != world_size():
            raise CheckpointError(
                f"{path.name} was saved by {len(ranks)} ranks and this run has {world_size()}. Use "
                'as many; or take the weights alone: read(path)["ranks"][0]["model"]["state"].'
            )
        entries = {k: ranks[0][k] if v is None else v for k, v in ranks[rank()].items()}
        for name in sorted(entries.keys() | self.things.keys()):
            if name not in self.things or name not in entries:
                wrong.append(f"{name}: only {'in the file' if name in entries else 'here'}")
            else:
                here = _saved.described(self.things[name])
                wrong += _saved.differences(name, entries[name], here)
        if wrong:
            more = [f"… and {len(wrong) - 9} more"] if len(wrong) > 9 else []
            listed = "\n  ".join(wrong[:9] + more)
            raise CheckpointError(
                f"{path.name} does not fit this run, nothing was loaded:\n  {listed}\n"
                "Build everything as it was when it was saved, or take another folder."
            )
        return entries

    def _load(self, entries: dict[str, dict]) -> None:
        for name, thing in self.things.items():
            thing.load_state_dict(entries[name]["state"])
