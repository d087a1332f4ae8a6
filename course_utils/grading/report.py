"""Marks for people: a table in the terminal, a page for the instructor, one for each student.

Names, error messages and file names come from students. They are shown as text and as nothing
else: `shown` takes the control characters out, `_text` what HTML would read as markup.
"""

from __future__ import annotations

import html as markup
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import Any

from .marking import Mark, TaskMark
from .task import count
from .tasks import UnknownTask, get_task

# What each status is called, and what a student does about it.
WORDS = {
    "ok": "complete",
    "wrong": "not right yet",
    "not_attempted": "not attempted",
    "error": "raised an error",
    "timeout": "took too long",
    "memory": "used too much memory",
    "crash": "program ended",
    "bad_reply": "no usable answer",
    "bad_notebook": "file not readable",
    "duplicate_id": "cell is there twice",
    "missing_cell": "cell is missing",
}
ADVICE = {
    "wrong": "Mend what is named here first: the rest often fails for the same reason.",
    "not_attempted": "The cell still raises NotImplementedError.",
    "error": "Run the cell and its check in your notebook, after Restart Kernel. Solution cells "
    "run here in a Python of their own: what they need must stand in them, or in the cells that "
    "the exercise came with.",
    "timeout": "Look for a loop without an end, or for a rank that waits for another.",
    "memory": "Look for a list or tensor that grows with every step.",
    "crash": "Return the answer from the function; call neither sys.exit nor os._exit.",
    "bad_reply": "Return what the task asks for, print nothing that imitates an answer, and keep "
    "it small.",
    "bad_notebook": "Open the notebook in JupyterLab, save it, and hand in that .ipynb file.",
    "duplicate_id": "Keep the cell that counts and delete its copy.",
    "missing_cell": "Copy your answer into a fresh copy of the exercise: the grader finds cells "
    "by metadata that some programs remove.",
}
_JOINERS = "\u200c\u200d"  # invisible, and part of how some languages are written
_COMMONEST = 12


def shown(text: Any, limit: int = 300) -> str:
    """One line of plain text: what a terminal or browser would obey is spelt out, like \\x1b.

    Control characters, marks that turn the direction of writing, and halves of characters
    become escapes; line ends become spaces; longer text is cut to `limit` characters.
    """
    text = str(text)
    line = "".join(_visible(letter) for letter in text[:limit])
    return line + ("…" if len(text) > limit else "")


def _visible(letter: str) -> str:
    if letter.isprintable() or letter in _JOINERS:
        return letter
    if letter in "\t\n\r" or unicodedata.category(letter).startswith("Z"):
        return " "
    return letter.encode("unicode_escape").decode()


def state(task: TaskMark) -> str:
    """The status in words."""
    if task.status == "wrong" and task.score > 0:
        return "partly right"
    return WORDS.get(task.status, task.status)


def first_failure(task: TaskMark) -> str:
    """What failed first, the same words for all students who failed in the same way."""
    for finding in task.findings:
        if finding["why"]:
            return shown(finding["text"])
    # Where it happened differs from student to student, what happened does not.
    return shown(re.sub(r"^line \d+( in [^:]*)?: ", "", task.why), 120)


def commonest(marks: Iterable[Mark]) -> list[tuple[str, str, str, list[str], list[str]]]:
    """Wrong answers as (task, status in words, first failure, reasons, students).

    Those of most students come first, and of the reasons the commonest.
    """
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for mark in marks:
        for task in mark.tasks:
            if task.status not in ("ok", "not_attempted"):
                key = task.task, WORDS.get(task.status, task.status), first_failure(task)
                found.setdefault(key, []).append((_reason(task), mark.student))
    ordered = []
    for key, those in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        reasons = Counter(reason for reason, _ in those if reason)
        ordered.append((*key, [r for r, _ in reasons.most_common()], [who for _, who in those]))
    return ordered


def _reason(task: TaskMark) -> str:
    """Why the first property failed, which differs from student to student; "" without one."""
    return next((shown(f["why"]) for f in task.findings if f["why"]), "")


def by_exercise(marks: Iterable[Mark]) -> dict[str, list[Mark]]:
    """Marks by the exercise's number, in order; "" for files that could not be read at all."""
    groups: dict[str, list[Mark]] = {}
    for mark in marks:
        groups.setdefault(mark.exercise, []).append(mark)
    return dict(sorted(groups.items(), key=lambda item: (item[0] == "", item[0])))


def columns(marks: Sequence[Mark]) -> dict[str, tuple[str, float]]:
    """The tasks of these marks by id, each with its title and its points."""
    return {task.task: (task.title, task.points) for mark in marks for task in mark.tasks}


# --- the terminal ---------------------------------------------------------------------------


def table(marks: Sequence[Mark]) -> Any:
    """The marks as a table of rich's, one for each exercise; raises ModuleNotFoundError."""
    try:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError as error:
        message = "tables in the terminal need the package rich: pip install rich"
        raise ModuleNotFoundError(message) from error

    if not marks:
        return Text("There are no marks: nothing was graded.")
    tables = []
    for exercise, group in by_exercise(marks).items():
        tasks = columns(group)
        made = Table(title=Text(_heading(exercise)), title_justify="left", show_footer=bool(tasks))
        made.add_column("student", "mean", overflow="fold", ratio=2)
        for name, (_, points) in tasks.items():
            mean = fmean(task.score for mark in group for task in mark.tasks if task.task == name)
            head = f"{shown(name)}\nof {points:g}"
            made.add_column(Text(head), f"{mean:.1f}", justify="right", overflow="fold", ratio=2)
        mean = fmean(mark.score for mark in group)
        made.add_column("all", f"{mean:.1f}", justify="right", ratio=1)
        made.add_column("to look at", overflow="fold", ratio=3)
        for mark in group:
            own = {task.task: task for task in mark.tasks}
            cells = [_terminal_cell(own[name]) if name in own else "" for name in tasks]
            row = [shown(mark.student, 60), *cells, f"{mark.score:g}"]
            row.append("; ".join(shown(note, 120) for note in mark.notes[:4]))
            # Text, not str: rich would read [red] in a name as a command.
            made.add_row(*(Text(cell) for cell in row))
        tables.append(made)
    return Group(*tables)


def _terminal_cell(task: TaskMark) -> str:
    return f"{task.score:g}" if task.status == "ok" else f"{task.score:g} {state(task)}"


def _heading(exercise: str) -> str:
    return f"Exercise {shown(exercise, 40)}" if exercise else "Files that could not be read"


# --- the instructor's page --------------------------------------------------------------------


def html(marks: Sequence[Mark]) -> str:
    """One page for the instructor: each task's distribution, what went wrong, every student.

    It needs no network and no JavaScript.
    """
    if not marks:
        return _page("Marks", "<h1>Marks</h1><p>There are no marks: nothing was graded.</p>")
    parts = ["<h1>Marks</h1>"]
    for exercise, group in by_exercise(marks).items():
        parts.append(f"<h2>{_text(_heading(exercise))}</h2>")
        parts.append(_summary(group))
        if tasks := columns(group):
            parts += [_distribution(tasks, group), _went_wrong(group)]
        parts.append(_students(tasks, group))
    return _page("Marks", "\n".join(parts))


def _summary(marks: Sequence[Mark]) -> str:
    scores = [mark.score for mark in marks]
    points = max(mark.points for mark in marks)
    words = f"{len(marks)} submission{'s' if len(marks) > 1 else ''}"
    if points:
        words += f", {points:g} points to reach: mean {fmean(scores):.1f}, median "
        words += f"{median(scores):g}, lowest {min(scores):g}, highest {max(scores):g}"
    return f"<p>{words}.</p>"


_KINDS = ("full", "part", "none", "blank")


def _kind(task: TaskMark) -> str:
    if task.status == "not_attempted":
        return "blank"
    return "full" if task.status == "ok" else "part" if task.score else "none"


def _distribution(tasks: dict[str, tuple[str, float]], marks: Sequence[Mark]) -> str:
    heads = ["task", "points", "mean", "complete", "partly right", "no points", "not attempted"]
    rows = []
    for name, (title, points) in tasks.items():
        own = [task for mark in marks for task in mark.tasks if task.task == name]
        kinds = Counter(_kind(task) for task in own)
        scores = sorted(Counter(task.score for task in own).items(), reverse=True)
        counts = ", ".join(f"{score:g}\u202f×\u202f{number}" for score, number in scores)
        cells = [f"{points:g}", f"{fmean(task.score for task in own):.1f}"]
        cells += [f"{kinds[kind]}" for kind in _KINDS]
        rows.append(
            f'<tr><th scope="row">{_text(name)}<br><small>{_text(title)}</small></th>'
            + "".join(f'<td class="number">{cell}</td>' for cell in cells)
            + f"<td>{_bar(kinds)}<small>{counts}</small></td></tr>"
        )
    keys = [""] * 3 + [f'<span class="key {kind}"></span><br>' for kind in _KINDS]
    named = [key + head for key, head in zip(keys, heads, strict=True)]
    return _table("How each task went", [*named, "score × students"], rows)


def _bar(kinds: Counter[str]) -> str:
    """A picture of the counts that stand beside it; no screen reader need read it."""
    total, left, parts = sum(kinds.values()), 0.0, []
    for kind in _KINDS:
        width = 200 * kinds[kind] / total
        if width:
            size = f'x="{left:.1f}" width="{max(width - 1, 1):.1f}" height="14"'
            parts.append(f'<rect class="{kind}" {size}></rect>')
        left += width
    return f'<svg aria-hidden="true" viewBox="0 0 200 14">{"".join(parts)}</svg>'


def _went_wrong(marks: Sequence[Mark]) -> str:
    found = commonest(marks)
    if not found:
        return "<p>No wrong answers.</p>"
    rows = []
    for task, status, why, reasons, students in found[:_COMMONEST]:
        what = f"<bdi>{_text(why)}</bdi>"
        if reasons:
            more = f" (and {count(len(reasons) - 1, 'other reason')})" if reasons[1:] else ""
            what += f"<br><small><bdi>{_text(reasons[0])}</bdi>{more}</small>"
        who = ", ".join(_name(student, 40) for student in students[:4])
        who += f" and {len(students) - 4} more" if len(students) > 4 else ""
        rows.append(
            f'<tr><td class="number">{len(students)}</td><th scope="row">{_text(task)}<br>'
            f'<small>{_text(status)}</small></th><td class="words">{what}</td>'
            f'<td class="words">{who}</td></tr>'
        )
    made = _table(
        "The commonest wrong answers", ["students", "task", "what failed first", "who"], rows
    )
    rest = len(found) - _COMMONEST
    return made + (f"<p>And {rest} rarer ones.</p>" if rest > 0 else "")


def _students(tasks: dict[str, tuple[str, float]], marks: Sequence[Mark]) -> str:
    heads = ["student"]
    for name, (_, points) in tasks.items():
        heads.append(f'<span class="id">{_text(name)}</span><br><small>of {points:g}</small>')
    rows = []
    for mark in marks:
        own = {task.task: task for task in mark.tasks}
        cells = "".join(_cell(own.get(name)) for name in tasks)
        notes = "".join(f"<li><bdi>{_text(note)}</bdi></li>" for note in mark.notes[:6])
        if len(mark.notes) > 6:
            notes += f"<li>and {len(mark.notes) - 6} more</li>"
        rows.append(
            f'<tr><th scope="row">{_name(mark.student)}<br>'
            f"<small>{_name(mark.file, 80)}</small></th>{cells}"
            f'<td class="number"><strong>{mark.score:g}</strong></td>'
            + (f'<td class="words"><ul>{notes}</ul></td></tr>' if notes else "<td></td></tr>")
        )
    return _table("Every student", [*heads, "all", "to look at"], rows)


def _cell(task: TaskMark | None) -> str:
    if task is None:
        return "<td></td>"
    words = "" if task.status == "ok" else f"<br><small>{_text(state(task))}</small>"
    return f'<td class="number {_kind(task)}-edge">{task.score:g}{words}</td>'


# --- a student's page -------------------------------------------------------------------------


def feedback(mark: Mark) -> str:
    """One student's page: scores, what failed first, and the hints, folded.

    The notes to the instructor are not in it.
    """
    title = f"Feedback: {_heading(mark.exercise).lower()}" if mark.exercise else "Feedback"
    file = f", {_name(mark.file, 120)}" if mark.file else ""
    parts = [f"<h1>{_text(title)}</h1><p>{_name(mark.student)}{file}</p>"]
    if mark.status == "bad_notebook":
        why = "; ".join(mark.notes)
        parts.append(
            f"<p><strong>Your file could not be graded:</strong> <bdi>{_text(why)}</bdi>.</p>"
            f"<p>{_text(ADVICE['bad_notebook'])}</p>"
        )
        return _page(title, "\n".join(parts))
    parts.append(f'<p class="total"><strong>{mark.score:g}</strong> of {mark.points:g} points</p>')
    rows = [
        f'<tr><th scope="row">{_text(task.task)}<br><small>{_text(task.title)}</small></th>'
        f'<td class="number {_kind(task)}-edge">{task.score:g} of {task.points:g}</td>'
        f"<td>{_text(state(task))}</td></tr>"
        for task in mark.tasks
    ]
    parts.append(_table("Your tasks", ["task", "score", "status"], rows))
    parts += [_task(task) for task in mark.tasks if task.status != "ok"]
    parts.append(
        "<p><small>Your answers ran on other inputs than those of <code>check</code> in your "
        "notebook.</small></p>"
    )
    return _page(title, "\n".join(parts))


def _task(task: TaskMark) -> str:
    parts = [f"<h2>{_text(task.task)}: {_text(state(task))}</h2>"]
    failed = [finding for finding in task.findings if finding["why"]]
    if task.why and task.status != "not_attempted":
        label = "Fails first" if failed else "What happened"
        parts.append(
            f'<p class="why"><strong>{label}:</strong> <bdi>{_text(task.why, 800)}</bdi></p>'
        )
    advice = ADVICE.get(task.status, "")
    if task.status == "wrong" and failed:
        more = len(failed) - 1
        fail = "property fails" if more == 1 else "properties fail"
        advice = f"{more} more {fail}. {advice}" if more else ""
    parts.append(f"<p>{_text(advice)}</p>" if advice else "")
    if held := [finding for finding in task.findings if not finding["why"]]:
        items = (f"<li>{_text(f['text'])} ({f['points']:g})</li>" for f in held)
        parts.append(f"<p>These hold:</p><ul>{''.join(items)}</ul>")
    for level, hint in enumerate(_hints(task.task), 1):
        kind = ("a nudge", "the way", "nearly the code")[level - 1]
        parts.append(
            f"<details><summary>Hint {level} of 3: {kind}</summary><p>{_code(hint)}</p></details>"
        )
    return "\n".join(parts)


def _hints(task_id: str) -> tuple[str, ...]:
    try:
        return get_task(task_id).hints
    except UnknownTask:  # a result of an older version of the course
        return ()


# --- HTML -------------------------------------------------------------------------------------


def _text(text: Any, limit: int = 300) -> str:
    """Text for HTML, inside an element or a quoted attribute."""
    return markup.escape(shown(text, limit))


def _name(text: str, limit: int = 60) -> str:
    """A name or file name, kept apart from its surroundings in which direction it is written."""
    return f"<bdi>{_text(text, limit)}</bdi>"


def _code(text: str) -> str:
    """A hint of the course, whose `code` stands between backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(text, 2000))


def _table(caption: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table; heads and rows are HTML."""
    head = "".join(f'<th scope="col">{words}</th>' for words in heads)
    return (
        f'<div class="wide"><table><caption>{caption}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# A second lock: should a piece of markup ever get through, the browser runs and loads nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"
_STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #fff; --line: #b8b8b8; --soft: #f1f3f5;
  --quiet: #555; --full: #0072b2; --part: #56b4e9; --none: #d55e00; --blank: #b5b5b5 }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --back: #16181b; --line: #555;
  --soft: #24282d; --quiet: #b0b0b0; --full: #3fa3e0; --part: #9ad4f5; --none: #ff8a3d;
  --blank: #7d7d7d } }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--text); background: var(--back); overflow-wrap: anywhere }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem }
.wide { overflow-x: auto; margin: 1.5rem 0 }
table { border-collapse: collapse; width: 100% }
caption { text-align: left; font-weight: 600; font-size: 1.1rem; padding-bottom: .4rem }
th, td { padding: .4rem .7rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); overflow: hidden; overflow-wrap: break-word }
bdi { overflow-wrap: anywhere }
thead th { background: var(--soft); vertical-align: bottom }
tbody th { min-width: 9rem; font-weight: 600 }
th small { font-weight: 400 } small { color: var(--quiet); font-size: .85rem }
.number { font-variant-numeric: tabular-nums } .words { min-width: 12rem }
td ul { margin: 0; padding-left: 1.1rem }
p, li { max-width: 45rem } .id { white-space: nowrap }
svg { display: block; width: 100%; min-width: 8rem; max-width: 16rem; height: .9rem }
.key { display: inline-block; width: .8rem; height: .8rem }
.full { fill: var(--full); background: var(--full) } .part { fill: var(--part); background: var(--part) }
.none { fill: var(--none); background: var(--none) } .blank { fill: var(--blank); background: var(--blank) }
.full-edge { border-left: .3rem solid var(--full) } .part-edge { border-left: .3rem solid var(--part) }
.none-edge { border-left: .3rem solid var(--none) } .blank-edge { border-left: .3rem solid var(--blank) }
.total { font-size: 1.3rem }
.why { background: var(--soft); border-left: .3rem solid var(--none); padding: .6rem .9rem }
details { border: 1px solid var(--line); border-radius: .3rem; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer } code { background: var(--soft); padding: .1rem .3rem }
"""  # noqa: E501


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>{body}</main></body></html>\n"
    )
