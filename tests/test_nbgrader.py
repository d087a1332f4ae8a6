"""nbgrader takes the course's notebooks, and gives the scores that `check` gives.

Its own programs run here, in a temporary course folder: `generate_assignment` on `solutions/` as
they are, for every exercise, and `autograde` of exercise 13, which is plain Python.

Two things nbgrader does not do. It runs a submission in the grader's own account, without a
sandbox; these submissions are our own. And a duplicated cell ends `nbgrader autograde` for the
students that come after it, which is why `course-grade` exists; that is not tried here.
"""

import contextlib
import copy
import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course_utils.grading import all_tasks, check, export, get_task

ROOT = Path(__file__).resolve().parent.parent
EXERCISES = sorted((ROOT / "exercises").glob("*.ipynb"))
NAME = "13_parameter_server.ipynb"
TASKS = [name for name in all_tasks() if name.startswith("13-")]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def nbgrader(folder, *arguments):
    """Run nbgrader in a course folder; no settings of this machine, no network."""
    # It calls alembic, which lies beside this environment's Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    home = {"HOME": str(folder), "IPYTHONDIR": str(folder), "JUPYTER_CONFIG_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=folder,
        env={**os.environ, **home, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course folder of nbgrader's, with every solution as source and what it releases."""
    folder = tmp_path_factory.mktemp("nbgrader")
    for solution in sorted((ROOT / "solutions").glob("*.ipynb")):
        source = folder / "source" / ("ps13" if solution.name == NAME else "ps")
        source.mkdir(parents=True, exist_ok=True)
        shutil.copy(solution, source)
    for assignment in ("ps13", "ps"):
        nbgrader(folder, "generate_assignment", assignment, "--create")
    return folder


def own(cells):
    """Source and grading metadata of each cell; a link stamped by the build is no cell of ours."""
    kept = []
    for cell in cells:
        if not cell.metadata.get("generated"):
            grading = dict(cell.metadata.get("nbgrader", {}))
            grading.pop("checksum", None)
            kept.append((cell.cell_type, cell.source, grading))
    return kept


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda path: path.stem)
def test_a_solution_is_released_as_our_exercise(course, exercise):
    assignment = "ps13" if exercise.name == NAME else "ps"
    released = nbformat.read(course / "release" / assignment / exercise.name, as_version=4)
    ours = nbformat.read(exercise, as_version=4)
    assert own(released.cells) == own(ours.cells)
    graded = [grading for _, _, grading in own(ours.cells) if grading.get("grade")]
    assert graded, "an exercise without a test cell proves nothing"


# --- autograde ----------------------------------------------------------------------------


def solution_cells(folder="solutions"):
    solved = nbformat.read(ROOT / folder / NAME, as_version=4)
    return {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in solved.cells
        if cell.metadata.get("nbgrader", {}).get("solution")
    }


def partial_answers():
    """For each task the named wrong answer with the most points."""
    best = {name: max(get_task(name).wrong, key=lambda wrong: wrong.score) for name in TASKS}
    return {name: wrong.source.strip() for name, wrong in best.items()}


def answered(answers, edit=lambda notebook: None):
    """The exercise with these sources in its solution cells."""
    notebook = copy.deepcopy(nbformat.read(ROOT / "exercises" / NAME, as_version=4))
    for cell in notebook.cells:
        if (name := cell.metadata.get("nbgrader", {}).get("grade_id")) in answers:
            cell.source = answers[name]
    edit(notebook)
    return notebook


def claim_all_points(notebook):
    """Edit the locked cells: other points, another test. nbgrader puts its own back."""
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade"):
            cell.metadata.nbgrader.points = 100
            cell.source = "100.0"


def checked(source, name):
    """The score of `check` for one task whose cell has this source."""
    names = {"check": check}
    exec(source, names)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(f"score = check({name!r})", names)
    return float(names["score"])


SUBMISSIONS = {
    "solution": lambda: answered(solution_cells()),
    "blank": lambda: answered({}),
    "partial": lambda: answered(partial_answers()),
    "edited": lambda: answered(partial_answers(), claim_all_points),
}


@pytest.fixture(scope="module")
def graded(course):
    """Every submission autograded: scores by student and grade_id; and nbgrader's own CSV."""
    from nbgrader.api import Gradebook

    for student, made in SUBMISSIONS.items():
        folder = course / "submitted" / student / "ps13"
        folder.mkdir(parents=True)
        nbformat.write(made(), folder / NAME)
    nbgrader(course, "autograde", "ps13", "--create")
    nbgrader(course, "export", "--to", "grades.csv", "--assignment=['ps13']")
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        scores = {
            student: {
                grade.name: (grade.score, grade.max_score, bool(grade.needs_manual_grade))
                for notebook in book.find_submission("ps13", student).notebooks
                for grade in notebook.grades
            }
            for student in SUBMISSIONS
        }
    return scores, (course / "grades.csv").read_text()


@pytest.mark.parametrize("student", SUBMISSIONS)
def test_autograde_gives_the_scores_of_check(graded, student):
    answers = {
        "solution": solution_cells,
        "blank": lambda: solution_cells("exercises"),
        "partial": partial_answers,
        "edited": partial_answers,
    }[student]()
    wanted = {
        f"{name}-test": (checked(answers[name], name), float(get_task(name).points), False)
        for name in TASKS
    }
    assert graded[0][student] == wanted


def test_the_submissions_have_three_different_scores(graded):
    """Otherwise the test above could be passed by always giving the same."""
    total = {
        student: sum(score for score, _, _ in tasks.values())
        for student, tasks in graded[0].items()
    }
    most = sum(get_task(name).points for name in TASKS)
    assert total["solution"] == most and total["blank"] == 0
    assert 0 < total["partial"] == total["edited"] < most


def test_our_csv_has_the_columns_of_nbgraders_export(graded):
    rows = list(csv.reader(io.StringIO(graded[1])))
    assert tuple(rows[0]) == export.COLUMNS
    assert export.nbgrader_csv([], "ps13").splitlines()[0] == graded[1].splitlines()[0]
    theirs = {row[3]: row for row in rows[1:]}
    assert set(theirs) == set(SUBMISSIONS)
    assert theirs["solution"][-1] == theirs["solution"][-2] == "16.0"
