"""docs/then_now.md is what the lessons' cells give; a row that says too little fails."""

import shutil
from pathlib import Path

import pytest

from tools import checks, then_now
from tools.sources import SourceError

ROOT = Path(__file__).resolve().parent.parent
LESSON = (Path(__file__).parent / "fixtures" / "00_lesson.py").read_text("utf-8")
KEYS = """then="Trainer(gpus=2)" now="f(a | b['<c>'])" since="Lightning 2.0\""""
CELL = 'print("`old` | new")'
ADDED = f"# %% {KEYS}\n# NBVAL_CHECK_OUTPUT\n{CELL}\n"


def course(folder: Path, **lessons: str) -> Path:
    """A folder with these lessons, `_03_it="…"`, and with the course's constraints."""
    (folder / "source/lessons").mkdir(parents=True)
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "constraints.txt", folder)
    for name, text in lessons.items():
        (folder / f"source/lessons/{name[1:]}.py").write_text(text)
    return folder


def test_the_page_is_in_step():
    assert then_now.check() == []


def test_a_cell_gives_a_row_in_the_order_of_the_lessons(tmp_path):
    other = LESSON + ADDED.replace("gpus=2", "first").replace(CELL, "1 + 1")
    page = then_now.page(course(tmp_path, _07_b=LESSON + ADDED, _03_a=other, _05_c=LESSON))
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        "| 1 | <code>Trainer(first)</code> | <code>f(a &#124; b['&lt;c&gt;'])</code> "
        "| Lightning 2.0 | [03](../notebooks/03_a.ipynb) |",
        "| 2 | <code>Trainer(gpus=2)</code> | <code>f(a &#124; b['&lt;c&gt;'])</code> "
        "| Lightning 2.0 | [07](../notebooks/07_b.ipynb) |",
    ]
    assert page.count("<details>") == page.count("</details>") == 2
    assert f"````python\n{CELL}\n````" in page and "A lesson for the tests)" in page
    pin = next(p for p in (ROOT / "constraints.txt").read_text().split() if p[:7] == "torch==")
    assert pin.replace("==", " ") in page


def test_tensorflow_and_keras_have_a_table_of_their_own(tmp_path):
    lesson = LESSON
    for since in ("Keras 3.0", "Lightning 2.0", "TensorFlow 2.16", "PyTorch 2.6"):
        lesson += ADDED.replace("gpus=2", since, 1).replace("Lightning 2.0", since)
    page = then_now.page(course(tmp_path, _03_it=lesson))
    torch, tensorflow = page.split("## TensorFlow and Keras\n")
    assert [part.count("| [03]") for part in (torch, tensorflow)] == [2, 2]
    assert "(Lightning 2.0)" in torch and "(PyTorch 2.6)" in torch
    first, second = (line for line in tensorflow.splitlines() if "| [03]" in line)
    assert first.startswith("| 3 | <code>Trainer(Keras 3.0)") and second.startswith("| 4 |")
    pin = next(p for p in (ROOT / "constraints.txt").read_text().split() if p[:7] == "keras==")
    assert pin.replace("==", " ") in tensorflow.split("|")[0]


def test_without_a_cell_the_page_says_so(tmp_path):
    page = then_now.page(course(tmp_path, _00_it=LESSON))
    assert page.count("No lesson has one yet.") == 2 and "## The cells" not in page


def test_a_stale_page_fails_and_is_written_again(tmp_path):
    folder = course(tmp_path, _03_it=LESSON + ADDED)
    stale = ["docs/then_now.md is out of step with the lessons: "
             "python tools/checks.py --write"]  # fmt: skip
    assert then_now.check(folder) == stale
    assert then_now.check(folder, write=True) == [] and then_now.check(folder) == []
    lesson = folder / "source/lessons/03_it.py"
    for old, new in (("Lightning 2.0", "Lightning 2.1"), (CELL, "print()"), ("gpus=2", "gpus=3")):
        before = lesson.read_text()
        lesson.write_text(before.replace(old, new))
        assert then_now.check(folder) == stale, f"{old} became {new}"
        lesson.write_text(before)
    assert then_now.check(folder) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (" now=\"f(a | b['<c>'])\"", "", "now is missing"),
        (' since="Lightning 2.0"', "", "since is missing"),
        ('then="Trainer(gpus=2)" ', "", "then is missing"),
        ('"Lightning 2.0"', '" "', "since must be text in double quotes"),
        ('"Lightning 2.0"', "2.0", "since must be text in double quotes"),
        ('"Lightning 2.0"', '"Lightning', "its quotes are wrong"),
        ("# %% then", "# %% [markdown] then", "belong to a code cell"),
        (CELL, "# NBVAL_SKIP\n1", "must be run by the tests"),
        ("# %% ", '# %% tags=["nbval-skip"] ', "must be run by the tests"),
    ],
)
def test_a_row_that_says_too_little_names_file_and_line(tmp_path, old, new, message):
    assert old in ADDED
    folder = course(tmp_path, _03_it=LESSON + ADDED.replace(old, new))
    with pytest.raises(SourceError) as raised:
        then_now.page(folder)
    line = LESSON.count("\n") + 1
    assert f"03_it.py:{line}: " in str(raised.value) and message in str(raised.value)


@pytest.mark.slow
def test_the_checks_of_the_course_look_at_the_page(monkeypatch):
    monkeypatch.setattr(then_now, "PAGE", "docs/none.md")
    assert any("docs/none.md is out of step" in problem for problem in checks.course_problems())
