"""Notebooks of a class, as learning platforms hand them out: folders, zips, zips in zips.

Nothing is unpacked under a name that somebody else chose: the notebooks that count are copied into
a folder of ours, one file for each student. File names come from students and are not trusted;
whoever prints a note or a name makes it harmless first (`report.shown`).
"""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from .marking import Handed, result_name
from .submission import MAX_BYTES, BadNotebook, cells_of, exercise_number

MAX_STUDENT = 100 * 2**20  # bytes that are read of one student's files, unpacked
MAX_MEMBERS = 50_000  # files in one zip
_FEW = 10  # notes on one student, or on one zip
_TOO_LARGE = bytes(MAX_BYTES + 1)  # what grades it says that it is too large
_NOTEBOOKS = (".ipynb", ".ipynb.txt", ".ipynb.json")  # some browsers add an ending
_WRAPPERS = ("submitted", "submissions", "downloaded", "extracted")
_DATE = r"\d{4}(?:-\d\d){5}"
# How platforms name what a student handed in: a folder, or the beginning of a file's name. The
# first match counts: what follows it is the student's own file name, which may look like another.
_PLATFORMS = {
    "Moodle": re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_[a-z]+(?:_.*)?"),
    "Blackboard": re.compile(rf"(?:.*?_)?(?P<name>[^_]+)_attempt_(?P<when>{_DATE})(?:[_.].*)?"),
    "Brightspace": re.compile(
        r"(?P<id>\d+-\d+) - (?P<name>.+?) - (?P<when>\w+\.? \d+, \d{4} \d{3,4} [AP]M)(?: - .*)?"
    ),
    "Canvas": re.compile(
        r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d{2,})_(?P<number>\d{3,})(?:_.*)?"
    ),
}


class CollectError(ValueError):
    """What was given cannot be read as the work of a class; the message says what to do."""


@dataclass(frozen=True)
class _Named:
    """What the name of a file or folder says: who, which of several people, which attempt."""

    name: str
    number: str = ""
    attempt: float = 0.0
    late: bool = False


@dataclass(frozen=True)
class _Entry:
    """A notebook, or a zip of a student. `parts`: its path below what was given."""

    parts: tuple[str, ...]
    written: float
    path: Path
    archive: zipfile.ZipFile | None = None
    member: zipfile.ZipInfo | None = None


@dataclass(frozen=True)
class _Notebook:
    """`order`: (attempt, time of writing), the latest is the greatest."""

    label: str
    order: tuple[float, float]
    data: bytes
    late: bool = False
    zip: str = ""  # that it lies in


@dataclass
class _Pile:
    entries: list[_Entry] = field(default_factory=list)
    others: list[tuple[str, ...]] = field(default_factory=list)  # paths of other files
    notes: list[str] = field(default_factory=list)


def find(
    paths: Path | Sequence[Path], exercise: str | None, into: Path
) -> tuple[list[Handed], list[str]]:
    """One notebook for each student, copied into the folder `into`, and notes for the instructor.

    A path is a notebook, a zip, or a folder with files, or with a folder or zip for each student.
    Where a student has several notebooks, those of `exercise` ("13") come first, then the latest
    attempt. A damaged or huge file is handed on as one that cannot be graded, with a note.

    Raises CollectError when a path is neither of these, or a zip given by name is damaged, or when
    most students have notebooks of several exercises and none is named.
    """
    given = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else [Path(p) for p in paths]
    with ExitStack() as opened:
        pile = _Pile()
        for path, parts in _below(given):
            _gather(path, parts, pile, opened)
        into.mkdir(parents=True, exist_ok=True)
        handed, mixed, used = [], 0, set()
        for label, number, entries, others in _by_student(pile):
            found = _read(label, entries, pile.notes)
            if not found:
                problem = _instead([entry.parts for entry, _ in entries] + others)
                pile.notes.append(f"{label}: {problem}")
                handed.append(Handed(label, None, number, problem=problem))
                continue
            best, said, several = _choose(label, found, exercise, pile.notes)
            mixed += several
            if best.late:
                pile.notes.append(f"{label}: late, says the file's name")
            order = int(_fits(said, exercise)), *best.order
            path, problem = _keep(label, best, into, used), ""
            if path is None:
                problem = f"handed in {best.label}, which is empty or cannot be read"
            handed.append(Handed(label, path, number, best.label, said, order, problem))
    if mixed * 2 > len(handed):
        raise CollectError(
            "most students have notebooks of several exercises: say which one is meant, as in "
            "--exercise 13"
        )
    return handed, pile.notes


# --- what is there ----------------------------------------------------------------------------


def _below(given: list[Path]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Each path that was given, with its place: below the folder that all of them lie in."""
    given = list(dict.fromkeys(Path(os.path.abspath(path)) for path in given))
    for path in given:
        if not path.exists():
            raise CollectError(f"{path} does not exist")
    if len(given) == 1:
        yield given[0], () if given[0].is_dir() or _is_zip(given[0].name) else (given[0].name,)
        return
    top = os.path.commonpath([path.parent for path in given])
    for path in given:
        *folders, name = path.relative_to(top).parts
        yield path, (*folders, _stem(name) if _is_zip(name) else name)


def _gather(path: Path, parts: tuple[str, ...], pile: _Pile, opened: ExitStack) -> None:
    if path.is_dir():

        def unreadable(error: OSError) -> None:
            pile.notes.append(f"{error.filename}: {error.strerror}; it was left out")

        for folder, folders, files in os.walk(path, onerror=unreadable):
            folders[:] = sorted(name for name in folders if not _hidden(name))
            inside = (*parts, *Path(folder).relative_to(path).parts)
            for name in sorted(files) + folders:
                if Path(folder, name).is_symlink():
                    pile.notes.append(f"{'/'.join((*inside, name))}: a link; it was not followed")
                elif name not in folders and not _hidden(name):
                    _file(Path(folder, name), (*inside, name), pile, opened)
    elif _is_zip(path.name):
        problem = _archive(path, parts, pile, opened)
        if problem:
            raise CollectError(f"{path} cannot be read as a zip: {problem}")
    elif _is_notebook(path.name):
        _file(path, parts, pile, opened)
    else:
        raise CollectError(f"{path} is no notebook, no zip and no folder")


def _file(path: Path, parts: tuple[str, ...], pile: _Pile, opened: ExitStack) -> None:
    if not path.is_file():
        pile.notes.append(f"{'/'.join(parts)}: neither a file nor a folder; it was left out")
    elif _is_zip(path.name):
        problem = _archive(path, (*parts[:-1], _stem(parts[-1])), pile, opened)
        if problem:
            pile.notes.append(f"{'/'.join(parts)}: {problem}")
            pile.others.append(parts)
    elif _is_notebook(path.name):
        pile.entries.append(_Entry(parts, path.stat().st_mtime, path))
    else:
        pile.others.append(parts)


def _archive(path: Path, parts: tuple[str, ...], pile: _Pile, opened: ExitStack) -> str:
    """Note what lies in a zip on the disk; returns why it cannot be read, or nothing."""
    try:
        archive = opened.enter_context(zipfile.ZipFile(path))
    except Exception as error:  # whatever a made-up archive provokes
        return f"it is damaged ({type(error).__name__})"
    notes: list[str] = []
    for member in _members(archive, "/".join(parts) or path.name, notes):
        inside = (*parts, *_parts(member.filename))
        if _is_zip(inside[-1]) or _is_notebook(inside[-1]):
            pile.entries.append(_Entry(inside, _time(member), path, archive, member))
        else:
            pile.others.append(inside)
    pile.notes += _few(notes)
    return ""


def _few(notes: list[str]) -> list[str]:
    """The first of them: nobody hides others' notes behind a thousand of his own."""
    more = [f"and {len(notes) - _FEW} more like the one before"] if len(notes) > _FEW else []
    return notes[:_FEW] + more


def _members(archive: zipfile.ZipFile, where: str, notes: list[str]) -> Iterator[zipfile.ZipInfo]:
    """The files of a zip, without hidden ones, links, and those without a name."""
    members = archive.infolist()
    if len(members) > MAX_MEMBERS:
        notes.append(f"{where}: only the first {MAX_MEMBERS:,} of its files were looked at")
    for member in members[:MAX_MEMBERS]:
        parts = _parts(member.filename)
        if member.is_dir() or not parts or any(_hidden(part) for part in parts):
            continue
        if stat.S_ISLNK(member.external_attr >> 16):
            notes.append(f"{where}: {member.filename} is a link; it was not followed")
            continue
        if member.filename.startswith(("/", "\\")) or ".." in re.split(r"[/\\]", member.filename):
            notes.append(f"{where}: {member.filename} is an odd name; nothing was written there")
        yield member


def _parts(name: str) -> tuple[str, ...]:
    """A member's path without what leads out of its folder."""
    return tuple(part for part in re.split(r"[/\\]", name) if part not in ("", ".", ".."))


def _time(member: zipfile.ZipInfo) -> float:
    try:
        return datetime(*member.date_time).timestamp()
    except (ValueError, OverflowError, OSError):  # a day 0, or none
        return 0.0


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def _is_zip(name: str) -> bool:
    return name.lower().endswith(".zip")


def _is_notebook(name: str) -> bool:
    return name.lower().endswith(_NOTEBOOKS)


def _stem(name: str) -> str:
    """A name without the ending of a notebook or a zip."""
    return re.sub(r"(?i)(\.ipynb(\.txt|\.json)?|\.zip)$", "", name)


# --- whose it is ------------------------------------------------------------------------------


def _depth(paths: list[tuple[str, ...]]) -> int:
    """How many outer folders are not the students': an export's own, or one for each section."""
    least = min(map(len, paths), default=1)
    for deep in range(least):
        canvas = _are_people(paths, deep)
        if all(_platform(path[deep], canvas) for path in paths):
            return deep
    for deep in range(least - 1):
        tops = {path[deep] for path in paths}
        if len(tops) > 1 or _platform(*tops):
            return deep
        if tops <= set(_WRAPPERS):
            return deep + 1
    return least - 1 if len(paths) > 1 else 0


def _are_people(paths: list[tuple[str, ...]], deep: int) -> bool:
    """Whether what looks like Canvas is: hw_2026_1121_jane and hw_2026_1121_joe are two people."""
    found = [_platform(path[deep]) for path in paths if len(path) > deep]
    people = {(named.name, named.number) for named in found if named}
    return len(people) > 1 or len(paths) == 1


def _platform(part: str, canvas: bool = True) -> _Named | None:
    """What a platform's name says, or None when it is no such name."""
    for platform, pattern in _PLATFORMS.items():
        match = pattern.fullmatch(_stem(part))
        if match and (canvas or platform != "Canvas"):
            said = match.groupdict()
            attempt = float(said.get("number") or 0) or _attempt(platform, said.get("when"))
            return _Named(said["name"], said.get("id") or "", attempt, bool(said.get("late")))
    return None


def _attempt(platform: str, when: str | None) -> float:
    """Seconds since 1970 of the time in a name; 0 when there is none that is understood."""
    if not when:
        return 0.0
    form = "%Y-%m-%d-%H-%M-%S"
    if platform == "Brightspace":  # Nov 21, 2026 959 AM
        form, when = "%b %d, %Y %I%M %p", re.sub(r" (\d{3}) ", r" 0\1 ", when)
    try:
        return datetime.strptime(when, form).timestamp()
    except ValueError:  # months in another language
        return 0.0


_Student = tuple[str, str, list[tuple[_Entry, _Named]], list[tuple[str, ...]]]


def _by_student(pile: _Pile) -> list[_Student]:
    """The name to show, the platform's number, and the files of each student, sorted by name.

    Other files than notebooks and zips only for those who handed in nothing else.
    """
    paths = [entry.parts for entry in pile.entries]
    deep = _depth(paths)
    canvas = _are_people(paths, deep)
    folders = any(len(path) > deep + 1 for path in paths)  # one for each student

    def named(parts: tuple[str, ...]) -> _Named:
        part = parts[min(deep, len(parts) - 1)]
        return _platform(part, canvas) or _Named(_stem(part))

    groups: dict[tuple[str, str], list[tuple[_Entry, _Named]]] = {}
    for entry in pile.entries:
        one = named(entry.parts)
        groups.setdefault((one.name, one.number), []).append((entry, one))
    left_out: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for parts in pile.others:
        one = named(parts)
        if (one.name, one.number) not in groups:
            left_out.setdefault((one.name, one.number), []).append(parts)
    for key, others in left_out.items():
        in_folder = folders and any(len(parts) > deep + 1 for parts in others)
        if in_folder or any(_platform(parts[deep], canvas) for parts in others if parts[deep:]):
            groups[key] = []  # handed in, and nothing to grade
        else:
            first, more = _and_more(["/".join(parts) for parts in others])
            pile.notes.append(f"{first}{more}: not a notebook; it was left out")
    labels = {key: _label(key[0]) for key in groups}
    times = Counter(labels.values())
    students, used = [], set()
    for key in sorted(groups):
        label = labels[key]
        if times[label] > 1:  # two people of the same name
            label = f"{label} ({key[1] or len(used) + 1})"
            pile.notes.append(f"{label}: another student has the same name")
        while label in used:
            label += "'"
        used.add(label)
        students.append((label, key[1], groups[key], left_out.get(key, [])))
    return students


def _and_more(names: list[str]) -> tuple[str, str]:
    return names[0], f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _instead(paths: list[tuple[str, ...]]) -> str:
    """What somebody handed in who handed in no notebook."""
    first, more = _and_more([parts[-1] for parts in paths])
    verb = "holds" if _is_zip(first) else "is"
    return f"handed in {first}{more}, which {verb} no notebook"


def _label(name: str) -> str:
    """A name that can be written to a file as UTF-8, and is not longer than a line."""
    return name.encode("utf-8", "replace").decode().strip()[:100] or "(no name)"


# --- which of a student's notebooks counts ----------------------------------------------------


def _read(
    label: str, entries: list[tuple[_Entry, _Named]], all_notes: list[str]
) -> list[_Notebook]:
    """A student's notebooks, the latest first, as far as they fit in MAX_STUDENT bytes."""
    found: list[_Notebook] = []
    notes: list[str] = []
    left = MAX_STUDENT
    latest_first = sorted(entries, key=lambda one: (one[1].attempt, one[0].written), reverse=True)
    for entry, named in latest_first:
        if left <= 0:
            break
        inside = entry.path.name if entry.member else ""
        order = named.attempt, entry.written
        blank = _Notebook(entry.parts[-1], order, b"", named.late, inside)
        if entry.member:
            left = _unpack(label, entry.archive, entry.member, blank, left, found, notes)
            continue
        try:
            with entry.path.open("rb") as file:
                found.append(replace(blank, data=file.read(MAX_BYTES + 1)))
        except OSError as error:
            notes.append(f"{label}: {blank.label} cannot be read: {error.strerror}")
            found.append(blank)
        left -= len(found[-1].data)
    all_notes += _few(notes)
    if left <= 0:
        all_notes.append(
            f"{label}: the files are larger than {MAX_STUDENT // 2**20} MiB when unpacked; those "
            "after that were left out"
        )
    return found


def _unpack(
    label: str,
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    blank: _Notebook,
    left: int,
    found: list[_Notebook],
    notes: list[str],
    level: int = 1,
) -> int:
    """Add the notebook `member` to `found`, or those of a zip; returns how many bytes are left."""
    name = _parts(member.filename)[-1]
    if member.file_size > (MAX_STUDENT if _is_zip(name) else MAX_BYTES):
        notes.append(f"{label}: {name} has {member.file_size:,} bytes; it was not unpacked")
        found.append(replace(blank, data=_TOO_LARGE))
        return left
    if member.file_size > left:
        return 0
    if level > 2 and _is_zip(name):
        notes.append(f"{label}: {name} is a zip in a zip in a zip; it was not opened")
        return left
    try:
        with archive.open(member) as file:
            data = file.read(member.file_size + 1)
        left -= len(data)
        if not _is_zip(name):
            found.append(replace(blank, data=data))
            return left
        if data.count(b"PK\1\2") > MAX_MEMBERS:  # to list them would take the memory of all
            notes.append(f"{label}: {name} has over {MAX_MEMBERS:,} files; it was not opened")
            found.append(blank)
            return left
        with zipfile.ZipFile(io.BytesIO(data)) as inner:
            for one in _members(inner, f"{label}: {name}", notes):
                own = _parts(one.filename)[-1]
                if left > 0 and (_is_zip(own) or _is_notebook(own)):
                    inside = replace(blank, label=own, order=(blank.order[0], _time(one)))
                    left = _unpack(label, inner, one, inside, left, found, notes, level + 1)
    except Exception as error:  # whatever a made-up archive provokes
        notes.append(f"{label}: {name} is damaged in the zip ({type(error).__name__})")
        found.append(blank)
    return left


def _choose(
    label: str, found: list[_Notebook], exercise: str | None, notes: list[str]
) -> tuple[_Notebook, str, bool]:
    """The notebook that counts, its exercise, and whether it is a guess between several."""
    numbers = {one: _number(one.data) for one in found}
    best = max(found, key=lambda one: (_fits(numbers[one], exercise), one.order))
    if len(found) == 1:
        return best, numbers[best], False
    known = sorted({number for number in numbers.values() if number})
    mixed = len(known) > 1 and not exercise
    words = f"{len(found)} notebooks; what counts is the latest"
    if numbers[best]:
        words += f" of exercise {numbers[best]}" if exercise else f", of exercise {numbers[best]}"
    several = len({one.zip for one in found}) > 1
    words += f": {_where(best) if several else best.label}"
    same = [one for one in found if one.order == best.order and one.data != best.data]
    if several and same:
        words += f" (given first; {_where(same[0])} has the same time)"
    if mixed:
        words += f" (there are {', '.join(known)}: --exercise NN says which is meant)"
    notes.append(f"{label}: {words}")
    return best, numbers[best], mixed


def _where(one: _Notebook) -> str:
    return f"{one.label} in {one.zip}" if one.zip else one.label


def _fits(number: str, exercise: str | None) -> bool:
    return bool(number) and exercise in (None, number)


def _number(data: bytes) -> str:
    """The exercise that a notebook belongs to; nothing when it belongs to none."""
    try:
        return exercise_number(cells_of(data))
    except BadNotebook:
        return ""


def _keep(label: str, best: _Notebook, into: Path, used: set[str]) -> Path | None:
    """Write the notebook under a name of ours, the student's where that is harmless.

    With its own time, which says later which of two is newer. None when there is nothing in it.
    """
    if not best.data:
        return None
    name = label
    plain = re.fullmatch(r"\w[\w .,'()@+-]*", label) and label[-1] not in ". "
    if not plain or _platform(label) or _is_notebook(label) or label.casefold() in used:
        name = f"student-{result_name(label)}"
    used.add(label.casefold())
    path = into / f"{name}.ipynb"
    path.write_bytes(best.data)
    if best.order[1] > 0:
        os.utime(path, (best.order[1], best.order[1]))
    return path
