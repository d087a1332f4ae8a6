"""Marks for other programs: nbgrader's CSV columns, and Gradescope's results.json."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from .marking import Mark, TaskMark
from .report import ADVICE, shown, state

COLUMNS = (
    "assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email",
    "raw_score", "late_submission_penalty", "score", "max_score",
)  # fmt: skip
# What a spreadsheet takes for a formula: at the beginning of a cell, which may also be behind a
# separator, because some spreadsheets split at semicolons and tabs too. The last four are the
# wide forms of the first, which some of them read in the same way.
_FORMULA = re.compile(r'(^|[;,|"])(\s*)([=+\-@\uff1d\uff0b\uff0d\uff20])')


def nbgrader_csv(marks: Sequence[Mark], assignment: str) -> str:
    """The marks as a table with the columns of `nbgrader export`, one line for each student.

    student_id is the platform's own number where it is in the files' names, and last_name then
    the whole name; elsewhere student_id is the name. Dates and penalties are not known here and
    stay empty, or 0. A file that could not be read has score 0 of what the others could reach.
    """
    most = max((mark.points for mark in marks), default=0)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for mark in marks:
        writer.writerow(
            {
                "assignment": _cell(assignment),
                "student_id": _cell(mark.id or mark.student),
                "last_name": _cell(mark.student) if mark.id else "",
                "raw_score": float(mark.score),
                "late_submission_penalty": 0.0,
                "score": float(mark.score),
                "max_score": float(mark.points or most),
            }
        )
    return text.getvalue()


def _cell(text: str) -> str:
    """One line of text that no spreadsheet computes."""
    cell = _FORMULA.sub(r"\1\2'\3", shown(text).strip())
    return f"'{cell}" if text[:1] in ("\t", "\r") and cell[:1] != "'" else cell


def gradescope(mark: Mark) -> dict[str, Any]:
    """The results.json of one submission: a test for each task, everything as plain text."""
    if mark.tasks:
        words = f"{mark.score:g} of {mark.points:g} points."
    else:
        why = "; ".join(shown(note) for note in mark.notes)
        words = f"The file could not be graded: {why}. {ADVICE['bad_notebook']}"
    return {
        "score": float(mark.score),
        "execution_time": mark.seconds,
        "output": words,
        "output_format": "text",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": [_test(number, task) for number, task in enumerate(mark.tasks, 1)],
    }


def _test(number: int, task: TaskMark) -> dict[str, Any]:
    why = "" if task.status in ("ok", "not_attempted") else shown(task.why, 800)
    lines = [f"{task.task}: {state(task)}.", why, ADVICE.get(task.status, "")]
    return {
        "score": float(task.score),
        "max_score": float(task.points),
        "status": "passed" if task.status == "ok" else "failed",
        "name": task.title,
        "number": str(number),
        "output": "\n".join(line for line in lines if line),
        "output_format": "text",
        "visibility": "visible",
    }
