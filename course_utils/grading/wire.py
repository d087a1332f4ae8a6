"""What may leave a student's program: plain JSON values, and nothing else.

A task's `run` returns whatever the student's functions returned; `plain` turns that into
values of exact JSON types, so that a judge never meets a student's own class (one whose
`__eq__` always says yes, for instance). This module holds no answers: a grader may copy it
into a sandbox together with the source of a task's `run`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

MAX_DEPTH = 16
MAX_NODES = 200_000
MAX_TEXT = 100_000
ODD = "$"  # a value that JSON cannot carry becomes {"$": "what it was, in words"}


def plain(value: Any) -> Any:
    """Return `value` as None, bool, int, float, str, list or dict, of exactly these types.

    Tuples become lists, NumPy arrays and scalars their Python values. Anything else (an
    object, NaN, a list inside itself) becomes `{"$": words}`; no method of an unknown
    object is called.
    """
    return _plain(value, MAX_DEPTH, [MAX_NODES])


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    kind = type(value)
    left[0] -= 1
    if depth < 0 or left[0] < 0:
        return {ODD: "something nested too deep or too long"}
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if value.bit_length() <= 1024 else {ODD: "an enormous integer"}
    if kind is float:
        return value if math.isfinite(value) else {ODD: "NaN" if value != value else "infinity"}
    if kind is str:
        # A lone surrogate could neither be printed nor sent.
        return value[:MAX_TEXT].encode("utf-8", "replace").decode()
    if kind is list or kind is tuple:  # `in` would ask a student's metaclass
        return [_plain(item, depth - 1, left) for item in value[: MAX_NODES + 1]]
    if kind is dict:
        if not all(type(key) is str for key in value):
            return {ODD: "a dict whose keys are not all text"}
        return {_plain(k, 0, left): _plain(v, depth - 1, left) for k, v in value.items()}
    if _is_numpy(kind):
        if value.size > MAX_NODES:
            return {ODD: "a very large array"}
        return _plain(value.tolist(), depth - 1, left)
    # Not `kind.__name__`: a metaclass may define that as it likes.
    name = type.__dict__["__name__"].__get__(kind)
    return {ODD: f"an object of type {name[:40]}"}


def _is_numpy(kind: type) -> bool:
    """True for NumPy's own array and scalar types, not for classes derived from them."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return any(kind is own for own in (numpy.ndarray, *numpy.sctypeDict.values()))


def one_line(text: str, length: int = 700) -> str:
    """A student's text for people: no line breaks, control or invisible characters, not long."""
    line = "".join(" " if letter.isspace() else letter for letter in text[:length])
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in line)


def pack(array: Any) -> str:
    """Return a numeric array as base64 text of the .npy format, without pickle.

    Raises ValueError when the array holds Python objects.
    """
    import base64
    import io

    import numpy

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(array), allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def unpack(text: str) -> Any:
    """Return the array that `pack` wrote; ValueError when the text is anything else."""
    import base64
    import io

    import numpy

    return numpy.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
