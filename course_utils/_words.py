"""What a launch tells its learner: where ranks are, what killed them, what cannot be sent."""

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_utils import _ranks

SIGNALS = {
    "SIGKILL": "probably out of memory, where the system ends whoever uses most of it",
    "SIGSEGV": "segmentation fault: compiled code touched memory that is not its own",
    "SIGABRT": "compiled code gave up; what it printed says why",
    "SIGBUS": "bus error: often a full /dev/shm",
    "SIGTERM": "somebody asked it to end",
}

_FRAME = re.compile(r'^ *File "(.*)", line (\d+) in (.*)$', re.M)
_ROOTS = [sysconfig.get_paths()[key] for key in ("purelib", "platlib", "stdlib", "platstdlib")]
_ROOTS.append(str(Path(__file__).parents[1]))
_LIBRARIES = ("<frozen", str(Path(__file__).parent) + os.sep, *(r + os.sep for r in _ROOTS[:4]))
_WRAPPERS = {"wrapper", "inner", "decorate_context", "_fn", "error_handler", "<lambda>"}


def show_stack(dump: str) -> tuple[str, str]:
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


def with_cell_names(trace: str) -> str:
    return re.sub(r'File "([^"\n]+)"', lambda match: _file_name(match[1]), trace)


def find_unpicklable(fn: Callable[..., Any], args: tuple) -> str | None:
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


def cell_sources() -> dict[str, tuple]:
    """Source lines that exist only in this process: the notebook's cells."""
    cells = {}
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and not os.path.exists(name):
            cells[name] = (entry[0], None, entry[2], entry[3])  # None: not to be checked on disk
    return cells
