"""The build: sources in, three folders out, and a refusal with file and line where it must be."""

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from course_utils.grading import get_task
from tools import build, execute, scripts, sources, stamp

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).parent / "fixtures"
LESSON = (FIXTURES / "00_lesson.py").read_text()
EXERCISE = (FIXTURES / "00_exercise.py").read_text()


def course(folder: Path, lesson: str = "", exercise: str = "", **settings) -> build.Course:
    """A course of one lesson and one exercise, in `folder`."""
    for kind, text in (("lessons", lesson), ("exercises", exercise)):
        (folder / "source" / kind).mkdir(parents=True, exist_ok=True)
        if text:
            (folder / "source" / kind / "00_it.py").write_text(text)
    return build.Course(folder, settings.pop("get_task", get_task), **settings)


def read(folder: Path, name: str) -> nbformat.NotebookNode:
    notebook = nbformat.read(folder / name / "00_it.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A course that has been built once. Tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("course")
    assert build.build(course(folder, LESSON, EXERCISE)) == 3
    return folder


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> build.Course:
    shutil.copytree(built, tmp_path / "course")
    return build.Course(tmp_path / "course", get_task)


# --- lessons ---------------------------------------------------------------------------


def test_lesson_is_executed_and_carries_no_trace_of_the_machine(built):
    notebook = read(built, "notebooks")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3]
    assert code[0].outputs[0].text == "one\ntwo\n"  # one stream, though stderr came between
    assert code[1].outputs[0].data["text/plain"] == "42"
    assert code[1].metadata == {"tags": ["keep-me"]}  # no time stamps
    assert set(notebook.metadata) == {"course", "course_build", "kernelspec", "language_info"}
    assert "version" not in notebook.metadata.language_info
    assert notebook.metadata.course["minutes"] == {"read": 1, "do": 2}


def test_second_build_writes_nothing(built):
    before = {p: p.stat().st_mtime_ns for p in built.rglob("*.ipynb")}
    assert build.build(build.Course(built, get_task)) == 0
    assert {p: p.stat().st_mtime_ns for p in built.rglob("*.ipynb")} == before
    assert build.check(build.Course(built, get_task)) == []


def test_ids_are_stable(copied):
    before = [cell.id for cell in read(copied.root, "notebooks").cells]
    assert len(set(before)) == len(before)  # also of two cells that are the same
    text = LESSON.replace('print("one"', 'print("1"').replace("# The end.", "# The end!")
    after = [c.id for c in next(build.targets(course(copied.root, text))).notebook.cells]
    kept = [a == b for a, b in zip(before, after, strict=True)]
    assert kept == [True, True, False, True, True, False]
    # A new cell shifts the others; their ids stay.
    text = LESSON.replace("# %% tags", "# %%\nnew = 1\n\n# %% tags")
    after = [c.id for c in next(build.targets(course(copied.root, text))).notebook.cells]
    assert after[:3] + after[4:] == before


THEN = 'then="old(\'a\')" now="new()" since="1.0"'


def test_then_and_now_change_no_notebook(copied):
    text = LESSON.replace("# %%\n7 * 6", f"# %% {THEN}\n7 * 6")
    assert text != LESSON
    assert build.check(course(copied.root, text)) == []


def change(cell_number: int, **values):
    def edit(notebook):
        notebook.cells[cell_number - 1].update(values)

    return edit


@pytest.mark.parametrize(
    ("folder", "edit", "message"),
    [
        ("notebooks", change(4, source="6 * 7"), "notebooks/00_it.ipynb, cell 4 differs"),
        ("notebooks", change(4, source="6 * 7"), "-7 * 6\n+6 * 7"),
        ("notebooks", change(4, metadata={}), "cell 4: metadata is"),
        ("notebooks", change(4, id="other"), "cell 4: id is other"),
        ("notebooks", change(4, execution_count=None), "was not executed"),
        ("notebooks", lambda n: n.cells.pop(), "5 cells, but 6 in its source"),
        ("notebooks", lambda n: n.metadata.course_build.update(source_hash="0"), "its metadata"),
        ("exercises", change(2, execution_count=1), "must be blank"),
        ("exercises", change(3, source="x"), "exercises/00_it.ipynb, cell 3 differs"),
        ("solutions", change(4, source="4.0"), "solutions/00_it.ipynb, cell 4 differs"),
    ],
)
def test_check_names_the_first_difference(copied, folder, edit, message):
    path = copied.root / folder / "00_it.ipynb"
    notebook = nbformat.read(path, as_version=4)
    edit(notebook)
    nbformat.write(notebook, path)
    assert message in "\n".join(build.check(copied))


def test_check_finds_missing_and_stray_notebooks(copied):
    (copied.root / "solutions/00_it.ipynb").unlink()
    assert build.check(copied) == ["solutions/00_it.ipynb is missing"]
    (copied.root / "source/lessons/00_it.py").unlink()
    assert "notebooks/00_it.ipynb has no source source/lessons/00_it.py" in build.check(copied)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "00_it.ipynb, cell 4 failed: An error occurred while executing"),
        ("import os; os._exit(3)", "cell 4 failed: Kernel died"),
        (
            "# NBVAL_CHECK_OUTPUT\nimport json; print(json.__file__)",
            "cell 4: NBVAL_CHECK_OUTPUT, b",
        ),
        ("print('/home/' + 'somebody/x')", "cell 4: the output shows '/home/somebody/'"),
    ],
)
def test_outputs_that_must_not_be_stored(tmp_path, code, message):
    with pytest.raises(execute.ExecutionFailed) as raised:
        build.build(course(tmp_path, LESSON.replace("7 * 6", code, 1)))
    assert message in str(raised.value)
    assert not list(tmp_path.glob("notebooks/*"))
    kernels = [p for p in psutil.Process().children() if "ipykernel_launcher" in p.cmdline()]
    assert not kernels, "a build leaves no kernel running"


def test_a_kernel_that_does_not_start_is_named(tmp_path, monkeypatch):
    spec = execute.KernelSpec(argv=[sys.executable, "-c", "raise SystemExit('no room')"])
    monkeypatch.setattr(execute.ThisInterpreter, "get_kernel_spec", lambda *_: spec)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])
    with pytest.raises(execute.ExecutionFailed, match="(?s)x.ipynb.*Kernel died.*no room"):
        execute.execute(notebook, tmp_path / "x.ipynb")


def test_paths_of_this_machine_are_replaced(tmp_path):
    code = """
import course_utils, json, os, sys, traceback

print(course_utils.__file__, json.__file__, os.path.expanduser("~/x"))
try:
    exec(compile("1 / 0", "nowhere", "exec"))
except ZeroDivisionError:
    traceback.print_exc(file=sys.stdout)"""
    build.build(course(tmp_path, LESSON.replace("7 * 6", code, 1)))
    text = read(tmp_path, "notebooks").cells[3].outputs[0].text
    assert text.startswith("…/course_utils/__init__.py …/python3") and "~/x" in text
    assert 'File "<cell>", line 5' in text
    assert str(ROOT) not in text and "ipykernel_" not in text


def test_header_and_cell_keys_are_checked(tmp_path):
    for old, new, message in (
        ("#     devices: 1\n", "", "00_it.py:1: course header: devices must be a number"),
        ("path: core", "path: side", "path must be core or more"),
        ("extra: torch", "extra: jax", "extra must be among"),
        ("extra: torch", "extras: torch", "unknown key ['extras']"),
        ("# jupyter:\n#   course:", "# course:\n#  it:", "00_it.py:"),
        ('tags=["keep-me"]', 'tgas=["keep-me"]', "00_it.py:25: unknown cell key 'tgas'"),
        ("7 * 6\n", "### BEGIN SOLUTION\n", "00_it.py:26: a solution marker in a lesson"),
        ("# ---\n\n# %%", "# ---\n\nloose = 1\n\n# %%", "00_it.py:11: text outside a cell"),
    ):
        assert old in LESSON
        with pytest.raises(sources.SourceError) as raised:
            build.check(course(tmp_path, LESSON.replace(old, new, 1)))
        assert message in str(raised.value)


# --- exercises -------------------------------------------------------------------------


def test_blank_and_solution(built):
    blank, solution = read(built, "exercises"), read(built, "solutions")
    assert blank.cells[2].source.endswith("    # YOUR CODE HERE\n    raise NotImplementedError()")
    assert "divmod" not in json.dumps(blank) and "divmod" in solution.cells[2].source
    assert {c.get("execution_count") for c in blank.cells} == {None}
    assert solution.cells[3].outputs[-1].data["text/plain"] == "4.0"
    task, test = (solution.cells[i].metadata for i in (2, 3))
    assert task.nbgrader == {
        "grade": False,
        "grade_id": "00-practice",
        "locked": False,
        "schema_version": 3,
        "solution": True,
        "task": False,
    }
    assert (test.nbgrader.grade_id, test.nbgrader.points) == ("00-practice-test", 4)
    assert (test.nbgrader.grade, test.nbgrader.locked) == (True, True)
    assert task.course == {"task": "00-practice"}
    assert [c.id for c in blank.cells if c.source] != []
    assert [c.id for c in solution.cells[2:4]] == ["00-practice", "00-practice-test"]


@pytest.mark.slow
def test_blank_is_what_nbgrader_releases(built, tmp_path):
    """nbgrader's own generate_assignment, on the solution, in a course of its own."""
    source = tmp_path / "source/ps1"
    source.mkdir(parents=True)
    shutil.copy(built / "solutions/00_it.ipynb", source)
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", "ps1", "--create"]
    # nbgrader calls alembic, which lies beside this environment's Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    released = nbformat.read(tmp_path / "release/ps1/00_it.ipynb", as_version=4)
    assert released == read(built, "exercises")


REGION = EXERCISE[EXERCISE.index("    ### BEGIN") : EXERCISE.index("### END SOLUTION") + 17]
TASK_LINE = 20  # of the task cell in the fixture; its region begins 3 lines below


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (REGION, "    return []\n", 20, "task '00-practice' has no '### BEGIN SOLUTION'"),
        ("    ### END SOLUTION\n", "", 23, "has no '### END SOLUTION'"),
        ("    ### BEGIN SOLUTION\n", "", 25, "'### END SOLUTION' without"),
        ("### BEGIN SOLUTION", "### BEGIN SOLUTON", 23, "misspelt marker"),
        ("### BEGIN SOLUTION", "## BEGIN SOLUTION", 23, "misspelt marker"),
        ("### BEGIN SOLUTION", "### begin solution", 23, "misspelt marker"),
        ("### END SOLUTION", "### END SOLUTIONS", 26, "misspelt marker"),
        ("    ### END", "    ### BEGIN SOLUTION\n    ### END", 23, "before the next one"),
        ("# That is all.", "# ### HIDDEN TESTS\n# ### BEGIN HIDDEN TESTS", 34, "nbgrader would"),
        ('print("ready")', "### BEGIN SOLUTION\nx = 1\n### END SOLUTION", 17, "without task="),
        ("    whole, rest = divmod(n, world_size)\n", "", None, None),  # one line fewer is fine
        (
            'print("ready")',
            'whole, rest = divmod(n, world_size)\nprint("ready")',
            17,
            "a line of a solution is left in the blank",
        ),
        (
            "# That is all.",
            "# return [whole + (rank < rest) for rank in range(world_size)]",
            None,
            "a line of a solution is left in the blank",
        ),
        ("    ### BEGIN SOLUTION\n", "    x = (\n    ### BEGIN SOLUTION\n", 24, "is no Python"),
        (
            EXERCISE[EXERCISE.index("def local") : EXERCISE.index("    ### BEGIN")] + REGION,
            "### BEGIN SOLUTION\nlocal_batches = lambda n, world: []\n### END SOLUTION\n",
            21,
            "inside a function or a method",
        ),
        ('check("00-practice")', 'check("00-practice") == 4', 29, "holds exactly check"),
        ('# %% test="00-practice"\ncheck("00-practice")\n\n', "", 20, "has no test cell"),
        ('test="00-practice"', 'test="00-other"', 29, "no task cell of that id"),
        ("00-practice", "00-unheard-of", 20, "no definition of task '00-unheard-of'"),
        ('task="00-practice"', 'task="01-practice"', 20, "must be 00-some-name"),
        ("# %% [markdown]\n# That", '# %% test="00-practice"\n# That', 32, "duplicate id"),
        ('task="00-practice"', 'tsak="00-practice"', 20, "unknown cell key 'tsak'"),
    ],
)
def test_exercise_fails_closed(tmp_path, old, new, line, message):
    assert old in EXERCISE
    here = course(tmp_path, exercise=EXERCISE.replace(old, new))
    if message is None:
        assert list(build.targets(here))
        return
    with pytest.raises(sources.SourceError) as raised:
        list(build.targets(here))
    assert message in str(raised.value)
    assert f"00_it.py:{line or ''}" in str(raised.value)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ({"judge": None}, "lacks a check"),
        ({"hints": ("a", "b")}, "lacks three hints"),
        ({"hints": ("a", "b", " ")}, "lacks three hints"),
        ({"wrong": (SimpleNamespace(name="x"), SimpleNamespace(name="x"))}, "lacks two named"),
        ({"points": 0}, "lacks points"),
    ],
)
def test_task_needs_its_definition(tmp_path, lacking, message):
    """The Task class refuses these too; the build does not rely on that."""
    task = get_task("00-practice")
    fields = {"judge": task.judge, "hints": task.hints, "wrong": task.wrong, "points": 4}
    here = course(
        tmp_path, exercise=EXERCISE, get_task=lambda _: SimpleNamespace(**fields | lacking)
    )
    with pytest.raises(sources.SourceError, match=f"00_it.py:{TASK_LINE}.*{message}"):
        list(build.targets(here))


# --- the repository's address ----------------------------------------------------------

MADE_UP = {"repository": "someone/some-course", "branch": "spring"}


def test_badges_and_setup_only_with_a_repository(tmp_path):
    plain = [t.notebook for t in build.targets(course(tmp_path, LESSON, EXERCISE))]
    assert not any("generated" in cell.metadata for notebook in plain for cell in notebook.cells)
    found = list(build.targets(course(tmp_path, LESSON, EXERCISE, **MADE_UP)))
    for target, before in zip(found, plain, strict=True):
        cells = target.notebook.cells
        kept = [cell.id for cell in cells if not cell.metadata.get("generated")]
        assert kept == [cell.id for cell in before.cells]
        name = f"{target.path.parent.name}/00_it.ipynb"
        assert f"github/someone/some-course/blob/spring/{name})" in cells[1].source
        assert f"src=https://github.com/someone/some-course/blob/spring/{name})" in cells[1].source
        assert all("![" not in t or "![]" not in t for t in cells[1].source.splitlines())
    cells = found[0].notebook.cells
    assert [c.cell_type for c in cells[:5]] == ["markdown"] * 3 + ["code"] * 2
    assert "course-utils[torch] @ git+https://github.com/someone/some-course@spring" in (
        cells[3].source
    )


def test_stamped_cells_never_stay_in_a_source(tmp_path):
    """As after saving a stamped notebook under `make edit`."""
    extra = '# %% generated=true\nprint("stamped")\n\n'
    here = course(tmp_path, LESSON.replace("# %% tags", extra + "# %% tags"))
    build.build(here)
    assert (tmp_path / "source/lessons/00_it.py").read_text() == LESSON
    assert "stamped" not in json.dumps(read(tmp_path, "notebooks"))


def test_setup_cell_does_nothing_here():
    code = stamp.setup(extras=["torch", "tensorflow"], **MADE_UP)
    assert "course-utils[torch,tensorflow] @ git+https" in code
    code = code.replace("    install_course()", '    raise SystemExit("installing")')
    environment = {k: v for k, v in os.environ.items() if k != "KAGGLE_KERNEL_RUN_TYPE"}
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, env=environment).returncode == 0
    environment["KAGGLE_KERNEL_RUN_TYPE"] = "Interactive"
    assert subprocess.run(run, env=environment, stderr=subprocess.DEVNULL).returncode == 1


BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "course_utils-NUMBER-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("course_utils.py", "")
        wheel.writestr("course_utils-NUMBER.dist-info/METADATA", "Metadata-Version: 2.1\\n"
            "Name: course-utils\\nVersion: NUMBER\\nRequires-Dist: lib WANTED\\n")
        wheel.writestr("course_utils-NUMBER.dist-info/WHEEL",
            "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("course_utils-NUMBER.dist-info/RECORD", "")
    return name
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "course-utils"
dynamic = ["version"]
"""


def write_lib(folder: Path, version: str) -> Path:
    path = folder / f"lib-{version}-py3-none-any.whl"
    info, head = f"lib-{version}.dist-info", "Metadata-Version: 2.1\nName: lib\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("lib.py", "")
        wheel.writestr(f"{info}/METADATA", f"{head}Version: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_setup_cell_installs_and_changes_nothing_preinstalled(tmp_path):
    """With a real pip, a real environment and a course that wants more than is there."""
    python = tmp_path / "env/bin/python"
    venv.create(tmp_path / "env", with_pip=True)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_lib(wheels, "2.0")  # what pip could upgrade to
    # The machine's pip settings must not bring in an index: this test needs no network.
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    env |= {"PIP_CONFIG_FILE": os.devnull, "KAGGLE_KERNEL_RUN_TYPE": "Batch"}
    env.pop("PYTHONPATH", None)  # it may lead to this course's own package
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-q", write_lib(tmp_path, "1.0")], env=env, check=True)
    repository = tmp_path / "course"
    repository.mkdir()
    (repository / "pyproject.toml").write_text(PYPROJECT)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org"]
    code = stamp.setup(extras=[], **MADE_UP).replace(
        "git+https://github.com/someone/some-course@spring",
        f"git+file://localhost{repository}@spring",
    )
    listing = {}
    for wanted, code_of_end in ((">=1", 0), (">=2", 1), ("<2", 0)):
        (repository / "backend.py").write_text(
            BACKEND.replace("WANTED", wanted).replace("NUMBER", str(len(listing)))
        )
        if not (repository / ".git").exists():
            subprocess.run([*git, "init", "-q", "-b", "spring"], cwd=repository, check=True)
        subprocess.run([*git, "add", "."], cwd=repository, check=True)
        subprocess.run([*git, "commit", "-q", "-m", wanted], cwd=repository, check=True)
        run = [python, "-c", code]
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code_of_end, done.stderr
        freeze = subprocess.run([*pip, "list"], env=env, capture_output=True, text=True).stdout
        listing[wanted] = dict(line.split()[:2] for line in freeze.splitlines())
        if code_of_end:
            assert "the course was not installed, nothing was changed" in done.stderr
            assert "lib" in done.stderr.partition("nothing was changed")[2], done.stderr
    assert [packages["lib"] for packages in listing.values()] == ["1.0"] * 3
    # The second did not go in; the third replaced the first, which is no preinstalled package.
    assert [packages["course-utils"] for packages in listing.values()] == ["0", "0", "2"]


# --- pairing, scripts, command line ----------------------------------------------------


def contents(root: Path, config_file: Path | None):
    """Jupyter's contents manager as a server has it: jupytext's, with or without our settings."""
    import jupytext
    from traitlets.config import Config, PyFileConfigLoader

    loaded = PyFileConfigLoader(str(config_file)).load_config() if config_file else Config()
    return jupytext.TextFileContentsManager(root_dir=str(root), config=loaded)


def call(answer):
    return asyncio.run(answer) if inspect.isawaitable(answer) else answer


@pytest.mark.parametrize("editing", [True, False])
def test_lessons_are_paired_under_make_edit_alone(copied, editing, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # an author's own jupytext settings stay out
    manager = contents(copied.root, ROOT / "tools/jupyter_edit.py" if editing else None)
    before = (copied.root / "source/exercises/00_it.py").read_text()
    for path in ("notebooks/00_it.ipynb", "exercises/00_it.ipynb", "solutions/00_it.ipynb"):
        model = call(manager.get(path))
        assert "jupytext" not in model["content"]["metadata"] or editing
        model["content"]["cells"][3]["source"] += "  # edited"
        call(manager.save(model, path))
    text = (copied.root / "source/lessons/00_it.py").read_text()
    assert text.count("# edited") == (1 if editing else 0)
    assert (copied.root / "source/exercises/00_it.py").read_text() == before
    assert not list(copied.root.glob("*/*.py")), "no text twin beside a notebook"
    if editing:
        assert '# %% tags=["keep-me"]' in text and "source_hash" not in text
        target = next(build.targets(copied))
        assert target.notebook.metadata.course == read(copied.root, "notebooks").metadata.course
        assert [c.source for c in target.notebook.cells][3] == "7 * 6  # edited"
        # The source wins, though the notebook is newer, as it is after every build.
        (copied.root / "source/lessons/00_it.py").write_text(text.replace("edited", "again"))
        os.utime(copied.root / "source/lessons/00_it.py", (1e9, 1e9))
        manager = contents(copied.root, ROOT / "tools/jupyter_edit.py")
        model = call(manager.get("notebooks/00_it.ipynb"))
        assert model["content"]["cells"][3]["source"] == "7 * 6  # again"


def test_make_edit_keeps_then_and_now(copied, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = copied.root / "source/lessons/00_it.py"
    source.write_text(LESSON.replace("# %%\n7 * 6", f"# %% {THEN}\n7 * 6"))
    manager = contents(copied.root, ROOT / "tools/jupyter_edit.py")
    model = call(manager.get("notebooks/00_it.ipynb"))
    model["content"]["cells"][4]["source"] += "  # edited"
    call(manager.save(model, "notebooks/00_it.ipynb"))
    assert f"# %% {THEN}\n7 * 6  # edited" in source.read_text()


def test_script_runner(tmp_path):
    script = tmp_path / "00_it.py"
    script.write_text("from course_utils import plots\nprint('ran')\n")
    done = scripts.run(script)
    assert (done.problems, done.output) == ([], "ran\n")
    script.write_text("raise SystemExit(3)")
    assert scripts.run(script).problems == ["ended with exit code 3"]
    script.write_text('def show(**names): ...\nshow(name="speed-up")')
    assert scripts.run(script).problems == ["figure speed-up.png was not written"]


def test_script_runner_ends_everything_at_the_deadline(tmp_path):
    script = tmp_path / "00_it.py"
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    done = scripts.run(script, deadline=3)
    assert done.problems == ["not finished after 3 s"]
    assert _gone(int(done.output))


def _gone(pid: int) -> bool:
    """Whether the process ends; a killed one stays for a moment, until it is collected."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]:
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_command_line():
    tool = [sys.executable, str(ROOT / "tools/build.py")]
    done = subprocess.run([*tool, "--help"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0 and "--check" in done.stdout
    done = subprocess.run([*tool, "2"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and "two digits" in done.stderr
