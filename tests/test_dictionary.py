"""docs/tensorflow_and_pytorch.md is the dictionary of lesson 12, with its proof."""

from pathlib import Path

import pytest

from tools import checks, dictionary

LESSON = (Path(__file__).parent / "fixtures" / "00_lesson.py").read_text("utf-8")
TABLE = f"""# %% [markdown]
# {dictionary.TITLE}
#
# | TensorFlow | PyTorch |
# |---|---|
# | replica | rank, [lesson 04](04_ddp.ipynb), [docs](https://x.org) |
"""
PROOF = "\n# %%\n# NBVAL_CHECK_OUTPUT\nassert difference < 1e-5\n"


def course(folder: Path, text: str) -> Path:
    (folder / "source/lessons").mkdir(parents=True)
    (folder / "docs").mkdir()
    (folder / f"source/lessons/{dictionary.LESSON}.py").write_text(LESSON + text)
    return folder


def test_the_page_is_in_step():
    assert dictionary.check() == []


def test_the_page_holds_the_table_and_its_proof_with_links_that_lead_from_docs(tmp_path):
    page = dictionary.page(course(tmp_path, TABLE + PROOF))
    assert (
        "| replica | rank, [lesson 04](../notebooks/04_ddp.ipynb), [docs](https://x.org) |" in page
    )
    assert "````python\nassert difference < 1e-5\n````" in page and dictionary.TITLE not in page


def test_a_stale_page_fails_and_is_written_again(tmp_path):
    folder = course(tmp_path, TABLE + PROOF)
    stale = [f"{dictionary.PAGE} is out of step with lesson 12: python tools/checks.py --write"]
    assert dictionary.check(folder) == stale
    assert dictionary.check(folder, write=True) == [] == dictionary.check(folder)
    lesson = folder / f"source/lessons/{dictionary.LESSON}.py"
    lesson.write_text(lesson.read_text().replace("1e-5", "1e-4"))
    assert dictionary.check(folder) == stale


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 Markdown cells begin with"),
        (TABLE + PROOF + TABLE + PROOF, "2 Markdown cells begin with"),
        (TABLE.replace("|", "") + PROOF, "holds no table"),
        (TABLE, "comes the code cell that asserts it"),
        (TABLE + PROOF.replace("assert", "print"), "comes the code cell that asserts it"),
    ],
)
def test_a_lesson_without_dictionary_or_proof_is_told_so(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        dictionary.page(course(tmp_path, text))


@pytest.mark.slow
def test_the_checks_of_the_course_look_at_the_page(monkeypatch):
    monkeypatch.setattr(dictionary, "PAGE", "docs/none.md")
    assert any("docs/none.md is out of step" in problem for problem in checks.course_problems())
