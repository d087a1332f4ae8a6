"""What docs/instructors.md tells an author or an instructor to type works as it stands there."""

import csv
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from course_utils.grading import UnknownTask
from course_utils.grading.task import copy_json
from course_utils.grading.wire import plain
from tools import build, checks

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "instructors.md").read_text(encoding="utf-8")
NEW_TASK = PAGE[PAGE.index("## A new task in 15 minutes") :]
DEFINITION, EXERCISE = re.findall(r"^```python\n(.*?)^```$", NEW_TASK, re.DOTALL | re.MULTILINE)[:2]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The page's task, from a module beside the course's own: inspect needs its source."""
    path = tmp_path_factory.mktemp("tasks") / "lesson_40.py"
    path.write_text(DEFINITION)
    names = {"__name__": "course_utils.grading.tasks.lesson_40", "__file__": str(path)}
    exec(compile(DEFINITION, str(path), "exec"), names)
    (one,) = names["TASKS"]
    return one


def points(task, source, seed):
    names = {}
    exec(source, names)
    student = SimpleNamespace(**{name: names[name] for name in task.functions})
    inputs = task.inputs(seed)
    # As in a sandbox: `run` from its source alone, values that are JSON.
    alone = {}
    exec("from __future__ import annotations\n" + inspect.getsource(task.run), alone)
    got = plain(alone[task.run.__name__](student, copy_json(inputs)))
    return sum(finding.points for finding in task.mark(inputs, got) if finding.passed)


@pytest.mark.parametrize("seed", range(5))
def test_the_new_task_gives_the_points_it_declares(task, seed):
    (solution,) = re.findall(r'# %% task="40-throughput"\n(.*?)\n\n\n', EXERCISE, re.DOTALL)
    assert points(task, solution, seed) == task.points
    for wrong in task.wrong:
        assert points(task, wrong.source, seed) == wrong.score, wrong.name
    assert points(task, "def throughput(*_): return None", seed) == 0
    assert task.inputs(seed) != task.inputs(seed + 1)


def test_the_new_exercise_can_be_built(task, tmp_path):
    """Its blank has no problem; whether the solution runs is what `make build` shows."""

    def get_task(name):
        if name != task.id:
            raise UnknownTask(name)
        return task

    (tmp_path / "source" / "exercises").mkdir(parents=True)
    (tmp_path / "source" / "exercises" / "40_throughput.py").write_text(EXERCISE)
    solution, blank = build.targets(build.Course(tmp_path, get_task))
    (cell,) = [c for c in blank.notebook.cells if c.get("id") == "40-throughput"]
    assert cell.source.endswith("raise NotImplementedError()")
    assert checks.check_headings(blank.notebook) == []
    tests = [c for c in solution.notebook.cells if c.get("id") == "40-throughput-test"]
    assert [c.metadata.nbgrader.points for c in tests] == [3]


def test_every_grading_command_of_the_page_can_be_typed():
    """Its options exist; the commands themselves are tried elsewhere."""
    from course_utils.grading import cli

    typed = re.findall(r"^course-grade (.+)$", PAGE, re.MULTILINE)
    assert {words.split()[0] for words in typed} == {
        "selftest", "release", "collect", "run", "report", "export"
    }  # fmt: skip
    for words in typed:
        cli._parser().parse_args(shlex.split(words))


def test_the_plans_for_a_class_add_up():
    """A lesson takes half as much again as its card says, an exercise what its card says."""

    def minutes(link):
        notebook = json.loads((ROOT / link.removeprefix("../")).read_text(encoding="utf-8"))
        return sum(notebook["metadata"]["course"]["minutes"].values())

    days = re.split(r"(?=\*\*Day|\*\*With)", PAGE[: PAGE.index("## How to teach")])[1:]
    total, plans = {}, 0
    for day in days:
        said = re.search(r"\*\* \((\d) hours? (\d+) min", day)
        added = 0
        for row in re.findall(r"^\|.*\.ipynb\).*$", day, re.MULTILINE):
            lesson, *exercise = re.findall(r"\]\((\S+\.ipynb)\)", row)
            told = [int(n) for n in re.findall(r"(?:\| |, )(\d+) (?=\|)", row)]
            # Up to the next five minutes.
            want = [math.ceil(minutes(lesson) * 1.5 / 5) * 5, *map(minutes, exercise)]
            assert told == want, row
            added += sum(told)
            total[lesson] = minutes(lesson)
        if added:
            assert said and int(said[1]) * 60 + int(said[2]) == added, day[:60]
            plans += 1
    assert plans == 4
    core = [
        path
        for path in (ROOT / "notebooks").glob("*.ipynb")
        if '"path": "core"' in path.read_text()
    ]
    assert {Path(link).name for link in total} == {path.name for path in core}
    hours, more = divmod(sum(total.values()), 60)
    assert f"pace of their cards ({hours} hours {more} minutes)" in PAGE


def test_every_status_stands_in_the_table_with_the_words_of_the_pages():
    from course_utils.grading.marking import STATUSES
    from course_utils.grading.report import WORDS

    (table,) = re.findall(r"^\| status \| on the pages .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE)
    assert [name for name, _ in rows] == list(STATUSES)
    assert all(words.endswith(WORDS[name]) for name, words in rows)


@pytest.mark.parametrize(
    ("student", "score", "rows", "filled"),
    [
        (
            "Identifier", "Grade",
            [["Identifier", "Full name", "Grade"], ["Participant 501", "Ann", ""],
             ["Participant 77", "Bo", "3"]],
            [["Participant 501", "Ann", "6.5"], ["Participant 77", "Bo", "3"]],
        ),
        (
            "ID", "PS (9)",
            [["Student", "ID", "Section", "PS (9)"], ["  Points Possible", "", "", "10"],
             ["Doe, Ann", "501", "A", ""]],
            [["  Points Possible", "", "", "10"], ["Doe, Ann", "501", "A", "6.5"]],
        ),
    ],
    ids=["Moodle", "Canvas"],
)  # fmt: skip
def test_the_program_fills_in_a_platforms_table(
    tmp_path, monkeypatch, capsys, student, score, rows, filled
):
    from course_utils.grading import export
    from course_utils.grading.marking import Mark, TaskMark

    marks = [
        Mark(name, "x.ipynb", "13", "ok", [TaskMark("t", "t", "ok", points, 10.0)], [], 1.0, "", id)
        for name, id, points in (("Ann", "501", 6.5), ("Gone", "600", 2.0))
    ]
    monkeypatch.chdir(tmp_path)
    Path("graded-13").mkdir()
    Path("graded-13/grades.csv").write_text(export.nbgrader_csv(marks, "ps"), encoding="utf-8")
    with open("worksheet.csv", "w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(rows)
    section = PAGE[PAGE.index("### Into your platform's gradebook") :]
    program = re.search(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[1]
    program = program.replace('"Identifier", "Grade"', f'"{student}", "{score}"', 1)
    exec(program, {})
    with open("filled.csv", encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [rows[0], *filled]
    assert capsys.readouterr().out == "not in the table: 600\n"


def test_the_sample_of_private_inputs_is_taken(tmp_path):
    from course_utils.grading import cli

    (program,) = re.findall(r'^\.venv/bin/python -c "(.*)" > cases\.json$', PAGE, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (tmp_path / "cases.json").write_text(done.stdout)
    assert list(cli._private(tmp_path / "cases.json")) == ["13-staleness"]


def test_the_image_gets_the_frameworks_and_nothing_of_the_course():
    text = (ROOT / "docs" / "course-grade.Dockerfile").read_text()
    assert re.findall(r"^(?:COPY|ADD) (.*)$", text, re.MULTILINE) == [
        "pyproject.toml constraints.txt ./"
    ]
    (program,) = re.findall(r'^RUN python -c "(.*?)" > requirements.txt', text, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {re.split(r"[<>=]", line)[0] for line in done.stdout.splitlines()}
    assert {"torch", "tensorflow", "tf-keras", "numpy", "psutil", "cloudpickle"} <= names
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(re.search(rf"(?m)^{re.escape(name)}==", pinned) for name in names)
    from course_utils.grading.sandbox import Docker

    assert f"-t {Docker.image} " in PAGE and "61000" in text
