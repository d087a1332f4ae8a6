"""What one saved file holds and how it is recognised; :mod:`course_utils.checkpoint` uses it.

A file is one line of text (format, number of bytes, SHA-256) and what `torch.save` writes. It
is read with ``weights_only=True``: nothing in a file can run code. So only plain types and
tensors may go in, and that is checked when they do, not on the day they are needed.
"""

import copy
import hashlib
import io
import os
import pickle
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

from course_utils import _random

FORMAT = 1
_HEAD = re.compile(rb"course_utils checkpoint (\d+) bytes=(\d+) sha256=([0-9a-f]{64})\n")


class CheckpointError(RuntimeError):
    """A save that failed, or nothing to resume from. The text says why and what to do."""


# ---------------------------------------------------------------- a file


def _digest(version: int, data: bytes) -> str:
    result = hashlib.sha256(b"%d" % version)  # so that a flipped bit in the version shows too
    result.update(data)
    return result.hexdigest()


def packed(content: Any) -> bytes:
    """The whole file, head line and all."""
    import torch

    body = io.BytesIO()
    torch.save(content, body)
    data = body.getvalue()
    digest = _digest(FORMAT, data)
    return f"course_utils checkpoint {FORMAT} bytes={len(data)} sha256={digest}\n".encode() + data


def unpacked(data: bytes) -> Any:
    """The content, on the CPU. ValueError with the reason where it is not a whole file."""
    import torch

    head = _HEAD.match(data)
    if not data:
        raise ValueError("it is empty")
    if head is None:
        raise ValueError("it is not a checkpoint of this course (or its first line is damaged)")
    if int(head[1]) > FORMAT:
        raise ValueError(
            f"its format is {int(head[1])} and this course_utils reads up to {FORMAT}: "
            "update course_utils"
        )
    body = data[head.end() :]
    if len(body) != int(head[2]):
        raise ValueError(f"it is torn: {len(body)} of {int(head[2])} bytes are there")
    if _digest(int(head[1]), body).encode() != head[3]:
        raise ValueError("it is damaged: its checksum does not match")
    return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """What is in one save, on the CPU: "epoch", "batch", and "ranks", a list.

    ``read(path)["ranks"][0]["model"]["state"]`` is the model's state dict. On other ranks None
    stands for "the same as on rank 0".

    Raises:
        CheckpointError: the file is empty, torn, damaged, of a newer format, not a checkpoint,
            or not readable. The text names it and says which.
    """
    try:
        return unpacked(Path(path).read_bytes())
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        reason = f"it cannot be read ({error.strerror})" if isinstance(error, OSError) else error
        raise CheckpointError(f"{Path(path).name}: {reason}") from error


def sync(folder: Path) -> None:
    """Put the names of a folder's files on the disk. Windows has no such call for a folder."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_ours(path: Path) -> bool:
    """Whether a file begins as a save of this format or an older one, whole or torn."""
    try:
        with open(path, "rb") as file:
            head = _HEAD.match(file.readline(200))
    except OSError:
        return False  # not known to be ours, so it is not ours to delete
    return head is not None and int(head[1]) <= FORMAT


# ---------------------------------------------------------------- a state


def checksum(state: Any) -> str:
    """By which ranks see that their states are the same, without sending them."""
    return hashlib.sha256(packed(state)).hexdigest()


def plain(value: Any, where: str) -> Any:
    """A copy of a state, with its tensors on the CPU. The tensors of the CPU are not copied.

    Raises CheckpointError, with the place, for what ``weights_only=True`` would not read back.
    """
    import torch

    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return value.detach().cpu()
    if kind in (dict, OrderedDict, Counter):
        result = copy.copy(value)  # and not dict(value): a module's state dict has `_metadata`
        for key in value:
            result[plain(key, where)] = plain(value[key], f"{where}[{key!r}]")
        return result
    if kind in (list, tuple, set):
        return kind([plain(each, f"{where}[{i}]") for i, each in enumerate(value)])
    if kind in (bool, int, float, complex, str, bytes, type(None)) + (
        torch.Size,
        torch.dtype,
        torch.device,
    ):
        return value
    hint = "make it a plain number, string, list, dict or torch.Tensor"
    if isinstance(value, torch.Tensor):
        hint = "a sharded or special tensor needs torch.distributed.checkpoint"
    raise CheckpointError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a file that runs no code "
        f"cannot hold: {hint}. Nothing was saved."
    )


def described(thing: Any) -> dict[str, Any]:
    """How a thing is recognised: its kind, and shape and type of each tensor it must have."""
    import torch

    tensors: dict[str, Any] = {}
    if isinstance(thing, torch.nn.Module):
        tensors = {k: t for k, t in thing.state_dict().items() if isinstance(t, torch.Tensor)}
    elif isinstance(thing, torch.optim.Optimizer):
        for g, group in enumerate(thing.param_groups):
            tensors |= {f"parameter {i} of group {g}": p for i, p in enumerate(group["params"])}
    shapes = {key: f"{list(t.shape)} {t.dtype}" for key, t in tensors.items()}
    # A model is known by its tensors: its class may have got another name since.
    kind = "Module" if isinstance(thing, torch.nn.Module) else type(thing).__name__
    return {"kind": kind, "shapes": shapes}


def differences(name: str, saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """One line for each way in which a thing is not what was saved."""
    if saved["kind"] != here["kind"]:
        return [f"{name}: {saved['kind']} in the file, {here['kind']} here"]
    a, b = saved["shapes"], here["shapes"]
    lines = [f"{name}: {key} {a[key]} only in the file" for key in a.keys() - b.keys()]
    lines += [f"{name}: {key} {b[key]} only here" for key in b.keys() - a.keys()]
    both = [key for key in a if key in b and a[key] != b[key]]
    return sorted(lines) + [f"{name}: {k} {a[k]} in the file, {b[k]} here" for k in both]


class RandomNumbers:
    """The global generators, as one more thing to save."""

    def state_dict(self) -> dict[str, Any]:
        return _random.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        import torch

        saved = len(state.get("cuda", []))
        here = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        if saved != here:
            print(
                f"[checkpoint] {saved} GPUs were in use when this was saved, now {here}: "
                "random numbers drawn on GPUs do not go on where they stood."
            )
        _random.restore(state)
