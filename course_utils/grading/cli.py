"""`course-grade`: exercises out, notebooks in, marks and feedback out.

Exit codes: 0 done (whatever the marks are), 1 the self-test failed, nothing was found to grade, or
a fault of the grader itself, 2 wrong usage, 3 no sandbox or too small a one, 130 stopped by Ctrl-C
or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .collect import CollectError, find
from .marking import (
    Handed,
    Joined,
    Mark,
    Rules,
    code_digest,
    join,
    mark_class,
    read_mark,
    write_whole,
)
from .release import ReleaseError, release
from .report import shown
from .sandbox import Limits, MiB, Sandbox, SandboxError, find_sandbox
from .submission import exercise_files
from .task import count
from .tasks import all_tasks

COURSE = Path(__file__).resolve().parents[2]
DONE, NOTHING, USAGE, NO_SANDBOX, STOPPED = 0, 1, 2, 3, 130
_CODES = (
    "exit codes: 0 done, also when students failed; 1 the self-test failed, or nothing was found "
    "to grade;\n2 wrong usage; 3 no sandbox, or too small a one; 130 stopped by Ctrl-C (the same "
    "command goes on)"
)
_TRACEBACK = "COURSE_GRADE_TRACEBACK"
_SANDBOXES = ("podman", "docker", "bubblewrap")


class UsageError(ValueError):
    """Something that was typed cannot be used; the message says what to type instead."""


class Nothing(ValueError):
    """There is nothing to grade, or no mark to report."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors are printed in words."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a name that this terminal cannot write
    arguments = _parser().parse_args(words)
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        return _fail(STOPPED, "stopped; the same command goes on where it was")
    except SandboxError as error:
        return _fail(NO_SANDBOX, str(error))
    except Nothing as error:
        return _fail(NOTHING, str(error))
    except (UsageError, CollectError, ReleaseError) as error:
        return _fail(USAGE, str(error))
    except ImportError as error:
        return _fail(
            USAGE, f"{error}; what is missing comes with: pip install 'course-utils[grade]'"
        )
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(USAGE, f"{where}{error.strerror or error}")
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            raise
        why = f"{type(error).__name__}: {error}"
        return _fail(NOTHING, f"a fault of the grader: {why} ({_TRACEBACK}=1 shows where)")


def _fail(code: int, message: str) -> int:
    for line in f"course-grade: {message}".splitlines():
        print(shown(line, 800), file=sys.stderr)
    return code


def _say(text: str = "") -> None:
    """Print one line; what came from a student cannot command the terminal."""
    print(shown(text, 800), flush=True)


# --- what can be typed ------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="course-grade",
        description="Give exercises out, and grade what comes back, in a sandbox.",
        epilog=f"{_CODES}\n\nexample, a class from the first day to the last:\n"
        "  course-grade selftest\n"
        "  course-grade release --exercise 13 --out for-students --zip\n"
        "  course-grade run moodle-export.zip --exercise 13 --out graded-13\n"
        "  course-grade report graded-13\n"
        "  course-grade export graded-13",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Any, text: str, *examples: str) -> argparse.ArgumentParser:
        lines = "\n".join(f"  course-grade {name} {example}".rstrip() for example in examples)
        word = "example" if len(examples) == 1 else "examples"
        made = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"{word}:\n{lines}\n\n{_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(command=command)
        return made

    give = add(
        "release",
        _release,
        "what students get: blank exercises and how to hand them in",
        "--out for-students --zip",
        "--exercise 02 --exercise 13 --out week-3",
    )
    give.add_argument(
        "--exercise", action="append", default=[], metavar="NN", help="only this one; repeatable"
    )
    give.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="is made")
    give.add_argument("--zip", action="store_true", help="FOLDER.zip instead of a folder")

    take = add(
        "collect",
        _collect,
        "one notebook for each student, out of what a learning platform exports",
        "moodle-export.zip --out class-13",
        "canvas.zip late.zip --exercise 13 --out class-13",
    )
    _paths(take)
    _exercise(take)
    take.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new or empty")

    run = add(
        "run",
        _run,
        "grade a notebook or a class; started again, it goes on where it was stopped",
        "jane.ipynb",
        "moodle-export.zip --exercise 13 --out graded-13 -j 2",
        "class-13 --exercise 13 --out graded-13 --seed-file ~/secret-13 --private cases.json",
    )
    _paths(run)
    _exercise(run)
    run.add_argument(
        "--out", type=Path, default=Path("graded"), metavar="FOLDER", help="results (graded)"
    )
    run.add_argument(
        "-j", "--jobs", type=_at_least_one, default=1, metavar="N", help="sandboxes at a time (1)"
    )
    where = run.add_mutually_exclusive_group()
    _sandbox(where)
    where.add_argument(
        "--unsafe-local",
        action="store_const",
        dest="sandbox",
        const="unsafe-local",
        help="no sandbox: submissions may read and delete your files",
    )
    run.add_argument(
        "--seed-file",
        type=Path,
        metavar="FILE",
        help="secret text that inputs are drawn from (default: made once, in the folder --out)",
    )
    run.add_argument(
        "--private",
        type=Path,
        metavar="FILE",
        help='more inputs, as JSON: {"13-staleness": [inputs, …]}',
    )
    run.add_argument(
        "--limit", type=_positive, metavar="SECONDS", help=f"for one task ({Limits.seconds:g})"
    )
    run.add_argument(
        "--memory",
        type=_positive,
        metavar="MiB",
        help=f"for one submission ({Limits.memory // MiB})",
    )

    look = add(
        "report",
        _report,
        "the marks as a table, as a page for you, and as a page for each student",
        "graded-13",
    )
    look.add_argument("out", type=Path, metavar="FOLDER", help="the --out of a run")

    give = add(
        "export",
        _export,
        "the marks as nbgrader's CSV table, and as Gradescope's results.json files",
        "graded-13",
        "graded-13 --assignment week-3",
    )
    give.add_argument("out", type=Path, metavar="FOLDER", help="the --out of a run")
    give.add_argument("--assignment", metavar="NAME", help="in the table (exercise-NN)")

    prove = add(
        "selftest",
        selftest,
        "prove that sandbox and tasks work on this machine",
        "",
        "--exercise 04 --exercise 13",
        "--sandbox bubblewrap --all",
    )
    prove.add_argument(
        "--exercise",
        action="append",
        default=[],
        metavar="NN",
        help="try its tasks (04 and 13); repeatable",
    )
    prove.add_argument("--all", action="store_true", help="try every exercise: many minutes")
    _sandbox(prove)
    return parser


def _paths(parser: argparse.ArgumentParser) -> None:
    text = "a notebook, a zip, or a folder with a file, folder or zip for each student"
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=text)


def _exercise(parser: argparse.ArgumentParser) -> None:
    text = "the exercise that counts (default: what each notebook says)"
    parser.add_argument("--exercise", metavar="NN", help=text)


def _sandbox(parser: argparse._ActionsContainer) -> None:
    text = f"{', '.join(_SANDBOXES)} (default: the first that works)"
    parser.add_argument("--sandbox", choices=_SANDBOXES, default="auto", metavar="NAME", help=text)


def _at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 on")
    return int(word)


def _positive(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = 0
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{word!r} is no number above 0")
    return number


# --- the commands -----------------------------------------------------------------------------


def _release(arguments: argparse.Namespace) -> int:
    numbers = [_number(word) for word in arguments.exercise]
    target = release(arguments.out, numbers, arguments.zip, COURSE)
    _say(f"For students: {target}")
    return DONE


def _collect(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} is not empty: choose another --out")
    _must_be_free(out, arguments.paths)
    handed = _handed(arguments, out)
    if other := _of_another(handed, arguments.exercise):
        _say(f"note: {other}")
    there = [one for one in handed if one.path]
    _say(f"{count(len(there), 'notebook')} in {out}, named after the students.")
    if len(there) < len(handed):
        without = count(len(handed) - len(there), "student")
        _say(f"{without} without a notebook: give run the export itself, and there is a mark of 0.")
    return DONE


def _run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    rules = _rules(arguments)
    _must_be_free(out, arguments.paths)
    console = _console()
    results = out / "results"
    with (
        find_sandbox(arguments.sandbox) as sandbox,
        tempfile.TemporaryDirectory(prefix="course-grade-") as into,
    ):
        _say(f"sandbox: {sandbox.name}")
        found = _handed(arguments, Path(into))
        if other := _of_another(found, arguments.exercise):
            _refuse_most(found, arguments.exercise, other)
            _say(f"note: {other}")
        exercise = arguments.exercise or _common(found)
        _must_be_the_same(out, exercise)
        rules = _with_secret(rules, arguments.seed_file, out)
        joined, notes = join(found, results)
        for note in notes:
            _say(f"note: {note}")
        for one in joined:
            if one.older:
                _say(f"{_who(one.before)}: kept: {_why_kept(one)} was not graded again")
        handed = [_into(out / "submissions", one.handed) for one in joined if not one.older]
        files = [results / f"{one.result_name}.json" for one in handed]
        before = {path: path.stat().st_mtime_ns for path in files if path.exists()}
        _note_run(out, exercise, sandbox.name, rules, handed, arguments)
        try:
            with _progress(len(handed), exercise) as advance, _stopping(sandbox):
                mark_class(
                    handed, results, sandbox, rules, COURSE,
                    exercise=exercise, jobs=arguments.jobs, done=advance,
                )  # fmt: skip
        finally:
            _say_replaced(joined, results)
    marks, _ = _marks(out)
    _show([marks[one.handed.result_name] for one in joined], console)
    kept = sum(path.stat().st_mtime_ns == time for path, time in before.items())
    if kept:
        _say(f"{kept} of {len(handed)} had been graded before, and were not run again.")
    _say(f"Results: {results}. Next: course-grade report {out}, course-grade export {out}")
    return DONE


def _report(arguments: argparse.Namespace) -> int:
    from . import report

    found, missing = _marks(arguments.out)
    marks = list(found.values())
    _show(marks, _console())
    write_whole(arguments.out / "report.html", report.html(marks))
    pages = arguments.out / "feedback"
    pages.mkdir(exist_ok=True)
    for name, mark in found.items():
        write_whole(pages / f"{name}.html", report.feedback(mark))
    _say_missing(missing)
    _say(f"For you: {arguments.out / 'report.html'}. For each student: {pages}")
    return DONE


def _export(arguments: argparse.Namespace) -> int:
    from . import export

    found, missing = _marks(arguments.out)
    marks = list(found.values())
    _say_missing(missing)
    numbers = sorted({mark.exercise for mark in marks if mark.exercise})
    assignment = arguments.assignment or "-".join(("exercise", *numbers))
    write_whole(arguments.out / "grades.csv", export.nbgrader_csv(marks, assignment))
    for name, mark in found.items():
        folder = arguments.out / "gradescope" / name
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "results.json", json.dumps(export.gradescope(mark), indent=1))
    _say(f"nbgrader's columns: {arguments.out / 'grades.csv'}")
    _say(f"Gradescope, a folder for each student: {arguments.out / 'gradescope'}")
    return DONE


def selftest(arguments: argparse.Namespace) -> int:
    """Prove on this machine that sandbox and tasks work; returns the exit code."""
    from course_utils.grading.selftest import selftest as prove

    arguments.exercise = [_number(word) for word in arguments.exercise]
    return prove(arguments)


# --- what a run needs -------------------------------------------------------------------------


def _number(word: str) -> str:
    """ "2" and "02" are exercise 02; raises UsageError when the course has no such exercise."""
    there = exercise_files(COURSE)
    if not there:
        raise UsageError("the exercises are not here: run it in a checkout of the course")
    if word.zfill(2) not in there:
        raise UsageError(f"there is no exercise {word}; there are {', '.join(there)}")
    return word.zfill(2)


def _handed(arguments: argparse.Namespace, into: Path) -> list[Handed]:
    """What students handed in, copied into `into`; notes are printed. Raises Nothing."""
    if arguments.exercise:
        arguments.exercise = _number(arguments.exercise)
    handed, notes = find(arguments.paths, arguments.exercise, into)
    for note in notes[:200]:
        _say(f"note: {note}")
    if len(notes) > 200:
        _say(f"note: and {len(notes) - 200} more")
    if not handed:
        raise Nothing("there is no notebook in what was given: it must hold .ipynb files or zips")
    return handed


def _common(handed: list[Handed]) -> str | None:
    """The exercise of the class when all readable notebooks agree; unreadable ones count as it."""
    found = Counter(one.exercise for one in handed if one.exercise)
    if len(found) == 1 and set(found) <= set(exercise_files(COURSE)):
        return next(iter(found))
    if found:
        words = ", ".join(f"{number} ({times})" for number, times in sorted(found.items()))
        _say(f"note: there are notebooks of the exercises {words}; --exercise NN says which counts")
    return None


def _of_another(handed: list[Handed], exercise: str | None) -> str:
    """Who handed in another exercise than the one that was named, in words."""
    others = [one for one in handed if exercise and one.exercise not in ("", exercise)]
    if not others:
        return ""
    there = count(sum(one.path is not None for one in handed), "notebook")
    numbers = ", ".join(sorted({one.exercise for one in others}))
    people = ", ".join(shown(one.student, 60) for one in others)
    names = "" if len(others) > 5 else f" ({people})"
    verb = "is" if len(others) == 1 else "are"
    return f"{len(others)} of {there} {verb} of exercise {numbers}, not {exercise}{names}"


def _refuse_most(handed: list[Handed], exercise: str, words: str) -> None:
    """Raise UsageError when most notebooks are of another exercise than the one named."""
    others = Counter(one.exercise for one in handed if one.exercise not in ("", exercise))
    if others.total() * 2 > sum(one.path is not None for one in handed):
        raise UsageError(f"{words}: type --exercise {others.most_common(1)[0][0]}")


def _who(mark: Mark) -> str:
    return f"{mark.student} ({mark.id})" if mark.id else mark.student


def _why_kept(one: Joined) -> str:
    """What was handed in now and does not count, in words."""
    if one.handed.order[0] == one.before.order[0]:
        return "the earlier notebook"
    return "what is no notebook of this exercise"


def _say_replaced(joined: list[Joined], results: Path) -> None:
    """One line for each mark that another notebook has changed."""
    for one in joined:
        now = read_mark(results / f"{one.handed.result_name}.json")
        if one.before and now and one.before.digest not in ("", now.digest):
            later = now.order[0] == one.before.order[0]
            by = "the later notebook" if later else "a notebook of this exercise"
            _say(f"{_who(now)}: {one.before.score:g} → {now.score:g}, replaced by {by}")


def _into(folder: Path, one: Handed) -> Handed:
    """With the notebook moved to where the graded ones stay."""
    if one.path is None:
        return one
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{one.result_name}.ipynb"
    shutil.move(one.path, path)
    return replace(one, path=path)


def _must_be_free(out: Path, paths: list[Path]) -> None:
    """Raise UsageError when what is written would be taken for submissions the next time."""
    for path in paths:
        if out.resolve().is_relative_to(path.resolve()):
            raise UsageError(
                f"--out {out} lies in {path}, with the submissions: choose another folder"
            )
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: choose a folder")


def _must_be_the_same(out: Path, exercise: str | None) -> None:
    """Raise UsageError when the marks of another exercise would be overwritten."""
    if (out / "run.json").exists():
        before = json.loads((out / "run.json").read_text())["exercise"]
        if before != exercise:
            words = f"marks of exercise {before}" if before else "marks of several exercises"
            raise UsageError(f"{out} holds {words}: choose another --out")


def _rules(arguments: argparse.Namespace) -> Rules:
    """The limits and private cases; the secret comes later, when there is something to grade."""
    memory = Limits.memory if arguments.memory is None else int(arguments.memory * MiB)
    limits = Limits(seconds=arguments.limit or Limits.seconds, memory=memory)
    secret = ""
    if arguments.seed_file:
        secret = arguments.seed_file.read_text(errors="replace").strip()
        if len(secret) < 8:
            raise UsageError(f"{arguments.seed_file} must hold a secret of 8 characters or more")
    return Rules(secret, limits, _private(arguments.private) if arguments.private else {})


def _private(path: Path) -> dict[str, list]:
    """Inputs by task id, each of which the task's own oracle and judge can use."""
    try:
        cases = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if type(cases) is not dict:
        raise UsageError(f'{path} must hold {{"task id": [inputs, …]}}')
    for name, inputs in cases.items():
        task = all_tasks().get(name)
        if task is None:
            raise UsageError(f"{path}: there is no task {name}; `check` in an exercise names them")
        if type(inputs) is not list or not inputs:
            raise UsageError(f"{path}: {name} must have a list of inputs, even of one")
        like = task.inputs(0)
        for number, case in enumerate(inputs, 1):
            where = f"{path}: case {number} of {name}"
            if type(case) is not type(like) or type(like) is dict and set(case) != set(like):
                form = f"an object with {', '.join(like)}" if type(like) is dict else type(like)
                raise UsageError(f"{where} must be like the task's own inputs: {form}")
            try:
                task.mark(case, None)
            except Exception as error:  # the task's own code, with inputs that it does not expect
                why = f"{type(error).__name__}: {error}"
                raise UsageError(f"{where} cannot be used by the task ({why})") from None
    return cases


def _with_secret(rules: Rules, seed_file: Path | None, out: Path) -> Rules:
    """The rules with a secret; without a file of the instructor's, one is made once, in `out`.

    Raises UsageError when it is not the one that `out` was graded with: a class has one.
    """
    path = out / "secret"
    before = ""
    if (out / "run.json").exists():
        before = json.loads((out / "run.json").read_text()).get("secret's digest", "")
    if seed_file:
        if before not in ("", _digest(rules.secret)):
            cure = f"leave out --seed-file, for {path} counts" if path.exists() else "give that one"
            raise UsageError(
                f"{out} was graded with another secret than that in {seed_file}: {cure}, or "
                "choose another --out"
            )
        return rules
    if before and not path.exists():
        raise UsageError(
            f"{out} was graded with a secret that is not in it: give it with --seed-file FILE, or "
            "choose another --out"
        )
    out.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        half = out / f"secret.{os.getpid()}.part"
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        half.replace(path)
    secret = path.read_text().strip()
    if before not in ("", _digest(secret)):
        raise UsageError(
            f"{path} is not the secret that {out} was graded with: put that one back, or choose "
            "another --out"
        )
    if not secret:
        raise UsageError(f"{path} is empty: remove it, and a new one is made")
    return Rules(secret, rules.limits, rules.extra)


def _digest(secret: str) -> str:
    return hashlib.sha256(f"course-grade {secret}".encode()).hexdigest()[:16]


def _note_run(
    out: Path,
    exercise: str | None,
    sandbox: str,
    rules: Rules,
    handed: list[Handed],
    arguments: argparse.Namespace,
) -> None:
    """Write OUT/run.json: what is graded, with what; never the secret."""
    names = [one.result_name for one in handed]
    if (out / "run.json").exists():  # late submissions join the others
        before = json.loads((out / "run.json").read_text())["results"]
        names += [name for name in before if name not in names]
    said = {
        "exercise": exercise,
        "results": names,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "course": _course_version(),
        "sandbox": sandbox,
        "limits": {"seconds": rules.limits.seconds, "MiB": rules.limits.memory / MiB},
        "jobs": arguments.jobs,
        "seed": "from a file" if arguments.seed_file else "made for this folder",
        "secret's digest": _digest(rules.secret),
        "private cases": {name: len(cases) for name, cases in rules.extra.items()},
    }
    write_whole(out / "run.json", json.dumps(said, indent=1))


def _course_version() -> dict[str, str | None]:
    """The package's version, the commit where there is one, and a digest of code and exercises."""
    try:
        version = metadata.version("course-utils")
    except metadata.PackageNotFoundError:
        version = None
    try:
        git = ["git", "-C", str(COURSE), "rev-parse", "HEAD"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
        commit = done.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {"version": version, "commit": commit, "tasks": code_digest(COURSE)[:16]}


# --- marks ------------------------------------------------------------------------------------


def _marks(out: Path) -> tuple[dict[str, Mark], int]:
    """The marks of all runs into `out` by their result's name, and how many are still missing."""
    if not (out / "run.json").is_file():
        raise UsageError(f"{out} is no folder of results: first course-grade run … --out {out}")
    marks, missing = {}, 0
    for name in json.loads((out / "run.json").read_text())["results"]:
        if mark := read_mark(out / "results" / f"{name}.json"):
            marks[name] = mark
        else:
            missing += 1
    if not marks:
        raise Nothing(f"nothing is graded yet in {out}: the same course-grade run goes on")
    times = Counter(mark.student for mark in marks.values())
    for mark in marks.values():
        if times[mark.student] > 1:
            mark.student = _who(mark)
    return marks, missing


def _say_missing(missing: int) -> None:
    if missing:
        _say(f"note: {count(missing, 'submission')} not graded: the same course-grade run goes on")


def _show(marks: list[Mark], console: Any) -> None:
    from . import report

    console.print(report.table(marks))
    for mark in marks:
        for note in mark.notes:
            if note.startswith("tampered"):
                _say(f"note: {mark.student}: {note}")


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False)


@contextlib.contextmanager
def _progress(total: int, exercise: str | None) -> Iterator[Any]:
    """A bar on the standard error; gives a function that advances it by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), MofNCompleteColumn(), Elapsed())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"exercise {exercise}" if exercise else "exercises", total=total)
        yield lambda mark: bar.advance(task)


@contextlib.contextmanager
def _stopping(sandbox: Sandbox) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM end the boxes, then raise KeyboardInterrupt.

    `mark_class` waits for its threads, and these for their boxes. (A plain flag: the lock of an
    Event could be held by the very code that a second Ctrl-C interrupts.)
    """

    def interrupt(*_: object) -> None:
        sandbox.stopped = True
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
