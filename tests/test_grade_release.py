"""Students get the exercises as they were built, and nothing that anybody added."""

import json
import shutil
from pathlib import Path

import pytest

from course_utils.grading.release import ReleaseError, release

ROOT = Path(__file__).resolve().parent.parent
NAME = "13_parameter_server.ipynb"


def added(cells):
    cell = {"cell_type": "code", "id": "1f2e3d4c", "metadata": {}, "outputs": []}
    cells.append({**cell, "execution_count": None, "source": "def staleness(events): ..."})


def add_a_copy(cells):
    """As an editor copies a cell: its metadata stays, and its id is new."""
    cells.insert(2, {**cells[1], "id": "5b6a7988", "source": "the_answer = 42"})


def edit_the_text(cells):
    cells[0]["source"] = [*cells[0]["source"], "\n\nThe answer is 42."]


def edit_a_plain_cell(cells):
    cells[3]["source"] = "the_answer = 42"


def edit_an_answer(cells):
    cells[4]["source"] = "def staleness(events): return []"


def edit_a_test(cells):
    cells[5]["source"] = "print(42)"


def keep_an_output(cells):
    cells[3]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "42"}]


def keep_a_count(cells):
    cells[1]["execution_count"] = 7


@pytest.mark.parametrize(
    ("change", "which"),
    [
        (added, "cell 16 was edited or added"),
        (add_a_copy, "cell 3 was edited or added"),
        (edit_the_text, "cell 1 was edited or added"),
        (edit_a_plain_cell, "cell 4 was edited or added"),
        (edit_an_answer, "cell 13-staleness was edited:"),
        (edit_a_test, "cell 13-staleness-test was edited:"),
        (keep_an_output, "cell 4 was run"),
        (keep_a_count, "cell 2 was run"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_an_exercise_in_which_somebody_worked_is_refused(tmp_path, change, which):
    course = tmp_path / "course"
    shutil.copytree(ROOT / "exercises", course / "exercises")
    path = course / "exercises" / NAME
    notebook = json.loads(path.read_text())
    change(notebook["cells"])
    path.write_text(json.dumps(notebook))
    with pytest.raises(ReleaseError, match=which) as refused:
        release(tmp_path / "out", ["13"], True, course)
    assert "make build ARGS=13" in str(refused.value)
    assert not (tmp_path / "out.zip").exists()
    release(tmp_path / "out", ["02"], True, course)


def test_every_exercise_of_the_course_is_as_it_was_built(tmp_path):
    release(tmp_path / "all", [], False, ROOT)
    assert len(list((tmp_path / "all").glob("*.ipynb"))) == 17


def test_students_read_that_cells_of_their_own_are_not_graded(tmp_path):
    page = release(tmp_path / "out", ["13"], False, ROOT) / "README.md"
    words = " ".join(page.read_text().split())
    assert "Cells that you add are not graded: a helper function or an import" in words
