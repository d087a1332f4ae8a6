"""The course itself: what was built, what it says about itself, and the checks that look."""

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tools import build, checks, scripts

ROOT = Path(__file__).resolve().parent.parent
BUILT = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("notebooks", "exercises", "solutions")
    for path in (ROOT / folder).glob("*.ipynb")
)


# --- the course ------------------------------------------------------------------------


def test_there_is_a_course():
    """An empty folder would pass every test below."""
    assert {"notebooks/00_start_here.ipynb", "notebooks/02_two_devices_one_sum.ipynb"} <= set(BUILT)
    assert any(name.startswith("exercises/") for name in BUILT)


def test_built_is_source():
    assert build.check(build.Course.here()) == []


@pytest.mark.parametrize("name", BUILT)
def test_notebook(name):
    assert checks.notebook_problems(ROOT / name) == []


def test_rows_of_the_lessons_and_of_the_table_agree():
    headers = {n: notebook.metadata.course for n, (_, notebook) in checks.lessons().items()}
    rows = checks.seed_rows()
    assert checks.check_rows(headers, rows) == []
    counts = {"D": 6, "M": 8, "A": 7, "P": 4, "H": 2, "O": 10, "K": 5}
    assert list(rows) == [f"{k}{i}" for k, n in counts.items() for i in range(1, n + 1)]


def test_readme_lists_the_lessons():
    assert checks.check_readme() == []


def test_a_lesson_says_how_long_its_exercise_takes():
    for number, (_, lesson) in checks.lessons().items():
        for path in (ROOT / "exercises").glob(f"{number}_*.ipynb"):
            minutes = nbformat.read(path, as_version=4).metadata.course.minutes
            said = f"About {sum(minutes.values())} minutes"
            assert any(said in cell.source for cell in lesson.cells), (number, said)


def test_address_stands_in_one_place():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the course is not known")
    repository = build.Course.here().repository
    assert checks.check_addresses(ROOT, repository) == []


@pytest.mark.slow
def test_lesson_00_runs_as_a_plain_script():
    """Unguarded, as `python source/lessons/00_start_here.py`; the others run by `make scripts`."""
    script = next((ROOT / "source/lessons").glob("00_*.py"))
    done = scripts.run(script)
    assert done.problems == [], done.output[-3000:]
    assert done.figures
    wanted = checks.lessons()["00"][1].metadata.course.devices
    assert checks.check_devices(done.ledger, wanted) == []


# --- the checks, on small broken notebooks ---------------------------------------------


def notebook(*cells, **course) -> nbformat.NotebookNode:
    """Strings are Markdown, others are cells."""
    made = [v4.new_markdown_cell(c) if isinstance(c, str) else c for c in cells]
    return v4.new_notebook(cells=made, metadata={"course": course} if course else {})


def code(source="1", *outputs, count=1, **metadata):
    return v4.new_code_cell(source, outputs=list(outputs), execution_count=count, metadata=metadata)


def text(value, name="stdout"):
    return v4.new_output("stream", name=name, text=value)


def result(value, **data):
    return v4.new_output("execute_result", data={"text/plain": value, **data}, execution_count=1)


def html(value):
    return v4.new_output("display_data", data={"text/html": value})


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (["# One\n\n## Two\n\n### Three\n\n## Two more"], None),
        (["## None"], "0 H1 headings"),
        (["# One", "# Two"], "2 H1 headings"),
        (["## First", "# Second"], "the first heading is no H1: 'First'"),
        (["# One", "### Three"], "heading 'Three' skips from level 1 to 3"),
        (["# One\n\n```\n# a comment\n### code\n```"], None),
    ],
)
def test_headings(cells, problem):
    expect(checks.check_headings(notebook(*cells)), problem)


def expect(problems, wanted):
    """No problem where none is wanted; else one that begins so."""
    assert bool(problems) == bool(wanted), problems
    assert not wanted or any(wanted in problem for problem in problems), problems


def test_stored_as_executed():
    error = v4.new_output("error", ename="ValueError", evalue="x", traceback=[])
    expect(checks.check_executed(notebook(code(count=1), "text", code(count=2))), None)
    expect(checks.check_executed(notebook(code(count=2), code(count=1))), "counts are not 1, 2")
    expect(checks.check_executed(notebook(code(count=1), code(count=3))), "counts are not 1, 2")
    expect(checks.check_executed(notebook(code(count=None))), "counts are not 1, 2")
    expect(checks.check_executed(notebook(code("1", error))), "cell 1 holds an error output: Value")


def test_compared_cells():
    def marked(number):
        return [code("# NBVAL_CHECK_OUTPUT\n1", result("1")) for _ in range(number)]

    expect(checks.check_compared(notebook(*marked(3)), 3), None)
    expect(checks.check_compared(notebook(*marked(2)), 3), "2 compared cells, at least 3")
    expect(checks.check_compared(notebook(code("1", result("1"))), 1), "0 compared")
    expect(checks.check_compared(notebook(code("# NBVAL_CHECK_OUTPUT")), 1), "0 compared")
    # nbval compares neither a picture nor a cell without a count.
    picture = v4.new_output("display_data", data={"image/png": "AAAA"})
    expect(checks.check_compared(notebook(code("# NBVAL_CHECK_OUTPUT", picture)), 1), "0 compared")
    unrun = code("# NBVAL_CHECK_OUTPUT", result("1"), count=None)
    expect(checks.check_compared(notebook(unrun), 1), "0 compared")
    tagged = code("1", result("1"), tags=["nbval-check-output"])
    expect(checks.check_compared(notebook(tagged), 1), None)


def test_images(tmp_path):
    path = tmp_path / "x.ipynb"
    data = "data:image/png;base64," + base64.b64encode(bytes(101 * 1024)).decode()
    (tmp_path / "large.png").write_bytes(bytes(101 * 1024))
    png = v4.new_output("display_data", data={"image/png": "AAAA", "text/plain": "figure"})
    for cell, problem in (
        ("![a speed-up](x.png)", None),
        ("![](x.png)", "cell 1: an image without alt text"),
        ('<img src="x.png">', "cell 1: an image without alt text"),
        ('<img src="x.png" alt=" ">', "an image without alt text"),
        ('<img src="x.png" alt="two bars">', None),
        ("`![](x.png)`", None),
        ("![large](large.png)", "an image of 101 KiB"),
        (code("1", html('<img src="data:image/png;base64,AAAA">')), "an image without alt text"),
        (code("1", html(f'<img alt="one" src="{data}">')), "an image of 101 KiB"),
        (code("1", html('<img alt="one" src="data:image/png;base64,AAAA">')), None),
        (code("1", png), "use plots.show"),
    ):
        expect(checks.check_images(notebook(cell), path), problem)


def test_links(tmp_path):
    path = tmp_path / "notebooks/x.ipynb"
    path.parent.mkdir()
    other = notebook("# Other\n\n## Where it runs", '<a id="here"></a>')
    nbformat.write(other, path.parent / "other.ipynb")
    (tmp_path / "README.md").write_text("# Read me\n\n## For learners\n")
    for cell, problem in (
        ("[other](other.ipynb)", None),
        ("[other](other.ipynb#Where-it-runs)", None),
        ("[other](other.ipynb#here)", None),
        ("[own](#Start)", None),
        ("[readme](../README.md#for-learners)", None),
        ("[web](https://example.org/nothing)", None),
        ("`[code](nowhere.ipynb)`", None),
        ("[gone](gone.ipynb)", "cell 1: the link 'gone.ipynb' leads to no file"),
        ("[gone](../exercises/other.ipynb)", "leads to no file"),
        ("[gone](other.ipynb#nowhere)", "leads to no heading"),
        ("[gone](#nowhere)", "leads to no heading"),
        ("[gone][1]\n\n[1]: gone.ipynb", "leads to no file"),
        ('<a href="gone.ipynb">gone</a>', "leads to no file"),
        ("![gone](gone.png)", "leads to no file"),
    ):
        expect(checks.check_links(notebook(cell, "# Start"), path), problem)


def test_machine():
    expect(checks.check_machine(notebook(code("1", text("fine: …/site-packages/x.py")))), None)
    expect(checks.check_machine(notebook(code("1", text(f"in {ROOT}/x.py")))), "cell 1 shows")
    expect(checks.check_machine(notebook(code("1", html("/tmp/ipykernel_1/2.py")))), "ipykernel")


def test_scores():
    def solution(*outputs):
        graded = {"grade": True, "grade_id": "01-x-test", "points": 4}
        return notebook(code("check()", *outputs, nbgrader=graded))

    expect(checks.check_scores(solution(text("fine"), result("4.0"))), None)
    expect(checks.check_scores(solution(result("3.5"))), "01-x-test scored 3.5, not 4")
    expect(checks.check_scores(solution(text("oh", "stderr"), result("4.0"))), "stderr")
    expect(checks.check_scores(solution()), "scored nothing")


def launch(*slots, ok=True, pids=None):
    return json.dumps({"ok": ok, "slots": slots, "ranks": pids or list(range(len(slots)))})


def test_devices_are_read_from_the_ledger():
    both = launch("core 0", "core 1")
    for ledger, wanted, problem in (
        (both, 2, None),
        (both, 3, "none with 3 devices"),
        (launch("core 0") + "\n" + both, 2, None),
        ("", 2, "0 launches, none with 2 devices"),
        ("", 1, None),
        (launch("core 0"), 2, "1 launches, none with 2"),
        (launch("core 0", "core 0"), 2, "none with 2"),  # oversubscribed
        (launch("core 0", "core 1", ok=False), 2, "none with 2"),
        (launch("core 0", "core 1", pids=[7, 7]), 2, "none with 2"),
    ):
        expect(checks.check_devices(ledger, wanted), problem)


def test_rows():
    def rows(**entries):
        return {row: {"title": "x", **entry} for row, entry in entries.items()}

    for headers, table, problem in (
        ({"01": ["D1"]}, rows(D1={"lessons": ["01"]}), None),
        ({"01": ["D1"]}, rows(D1={"lessons": []}), "seed_rows.toml does not agree"),
        ({"01": ["X9"]}, rows(D1={"lessons": [], "planned": ["02"]}), "lesson 01 names row X9"),
        ({"01": []}, rows(D1={"lessons": ["01"]}), "its header lacks it"),
        ({"01": []}, rows(D1={"lessons": [], "planned": ["01"]}), "lesson 01, which exists"),
        ({"01": []}, rows(D1={"lessons": ["02"]}), "lesson 02, which does not exist"),
        ({"01": []}, rows(D1={"lessons": []}), "no lesson carries D1"),
        ({"01": []}, rows(D1={"lessons": [], "planned": ["02"]}), None),
    ):
        named = {number: {"rows": listed} for number, listed in headers.items()}
        expect(checks.check_rows(named, table), problem)


def test_readme_table(tmp_path):
    (tmp_path / "notebooks").mkdir()
    header = {"minutes": {"read": 5, "do": 10}, "devices": 2, "path": "core"}
    nbformat.write(notebook("# The start", **header), tmp_path / "notebooks/00_start.ipynb")
    readme = tmp_path / "README.md"
    readme.write_text("# Course\n")
    expect(checks.check_readme(tmp_path), "stands between")
    readme.write_text("# Course\n\n<!-- lessons -->\nold\n<!-- /lessons -->\n\nmore\n")
    expect(checks.check_readme(tmp_path), "out of step")
    checks.check_readme(tmp_path, write=True)
    expect(checks.check_readme(tmp_path), None)
    row = "| 00 | [The start](notebooks/00_start.ipynb) | 15 | 2 | core |"
    assert row in readme.read_text() and readme.read_text().endswith("\n\nmore\n")


def test_stray_addresses(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "README.md").write_text("fine\nsee github.com/someone/some-course\n")
    (tmp_path / "LESSON.md").write_text("https://colab.research.google.com/github/a/b/x.ipynb")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/x.ipynb").write_text("https://github.com/someone/some-course")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    found = checks.check_addresses(tmp_path, "someone/some-course")
    assert [problem.split(": ")[0] for problem in found] == ["LESSON.md:1", "README.md:2"]
    assert [p.split(": ")[0] for p in checks.check_addresses(tmp_path, "")] == ["LESSON.md:1"]


# --- conftest.py, which looks on while nbval runs --------------------------------------

IMPORT = "from course_utils.grading import check\n"
ANSWER = (
    "def local_batches(n, ranks):\n"
    "    whole, rest = divmod(n, ranks)\n"
    "    return [whole + (rank < rest) for rank in range(ranks)]"
)
STUB = "def local_batches(n, ranks):\n    raise NotImplementedError()"
GRADED = {"grade": True, "grade_id": "00-practice-test", "points": 4}
LAUNCH = "from course_utils.launch import launch\nlaunch(lambda: 1, {n}, init=False)"


WATCHED = {
    "notebooks/00_idle": (["1 + 1"], "0 launches, none with 2 devices at work"),
    "notebooks/00_one": ([LAUNCH.format(n=1)], "1 launches, none with 2 devices at work"),
    "notebooks/00_two": (["1 + 1", LAUNCH.format(n=2)], None),
    "exercises/00_blank": ([IMPORT, STUB, 'check("00-practice")'], None),
    "exercises/00_solved": ([IMPORT, ANSWER, 'check("00-practice")'], "must score 0"),
    "solutions/00_solved": ([IMPORT, ANSWER, 'check("00-practice")'], None),
    "solutions/00_blank": ([IMPORT, STUB, 'check("00-practice")'], "must score 4"),
    "solutions/00_forged": ([IMPORT, ANSWER, '"4 points"'], "could not convert string"),
}


@pytest.mark.slow
def test_nbval_run_is_watched(tmp_path):
    """A lesson that did no distributed work fails, and so does a blank that scores."""
    for name, (cells, _) in WATCHED.items():
        made = [code(source, count=None) for source in cells]
        if not name.startswith("notebooks"):
            made[-1].metadata["nbgrader"] = GRADED
        (tmp_path / name).parent.mkdir(exist_ok=True)
        nbformat.write(notebook(*made, devices=2), tmp_path / f"{name}.ipynb")
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "-rA"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    for name, (_, problem) in WATCHED.items():
        about = [line for line in told if f"{name}.ipynb::" in line]
        assert len(about) == (problem is not None), done.stdout
        assert not problem or problem in about[0], about
