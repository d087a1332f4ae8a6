"""check(), hint(), Score and what leaves a student's program."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from course_utils.grading import Finding, Score, Task, UnknownTask, Wrong, check, get_task, hint
from course_utils.grading.task import close, copy_json, describe, item, same_matrix
from course_utils.grading.wire import pack, plain, unpack

ROOT = Path(__file__).resolve().parent.parent
GOOD = """
def speedup_table(seconds):
    return [(n, seconds[0] / t, seconds[0] / t / n) for n, t in enumerate(seconds, 1)]
"""


def run_check(source, task_id="02-speedup"):
    """Score, stdout and stderr of `check(...)` where `source` has run."""
    names = {"check": check}
    exec(source, names)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(f"score = check({task_id!r})", names)
    return names["score"], out.getvalue(), err.getvalue()


# --- check ------------------------------------------------------------------------------


def test_full_marks_are_printed_in_words():
    score, out, err = run_check(GOOD)
    assert score == 3 and score.points == 3 and err == ""
    assert out.count("passed:") == 3 and "FAILED" not in out and "hint(" not in out
    assert "Practice" in out, "it says that the local check is formative"


def test_first_failing_property_stands_first_then_the_hint():
    score, out, _ = run_check(get_task("02-speedup").wrong[1].source)
    lines = out.splitlines()
    assert "2 of 3 points" in lines[0]
    assert lines[1].strip().startswith("FAILED: the efficiencies")
    assert [line.split(":")[0].strip() for line in lines[2:4]] == ["passed", "passed"]
    assert 'hint("02-speedup")' in lines[4]
    assert score == 2 and score.status == "wrong"


def test_missing_function():
    for source in ("", "speedup_table = 3"):
        score, out, _ = run_check(source)
        assert (score, score.status) == (0, "not_defined") and "speedup_table" in out


def test_not_attempted():
    score, out, _ = run_check("def speedup_table(seconds):\n    raise NotImplementedError()")
    assert (score, score.status) == (0, "not_attempted") and "not attempted" in out


def test_a_students_exception_is_shown_with_its_own_line(tmp_path):
    file = tmp_path / "mine.py"
    text = (
        "def helper(x):\n    return x['no']\n\ndef speedup_table(seconds):\n    return helper({})\n"
    )
    file.write_text(text)
    score, out, err = run_check(f"exec(compile({text!r}, {str(file)!r}, 'exec'))")
    assert (score, score.status) == (0, "error") and err == ""
    assert "line 2 in helper: return x['no']" in out and "KeyError: 'no'" in out
    assert "check.py" not in out


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(0)",
        "import sys; sys.exit()",
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "return speedup_table(seconds)",
        "assert False",
    ],
)
def test_whatever_is_raised_is_a_score(body):
    score, out, _ = run_check(f"def speedup_table(seconds):\n    {body}")
    assert (score, score.status) == (0, "error") and "your code raised" in out


@pytest.mark.parametrize(
    "value",
    [
        "type('Yes', (), {'__eq__': lambda s, o: True, '__hash__': lambda s: 1})()",
        "type('F', (float,), {'__eq__': lambda s, o: True})(1)",
        "type('L', (list,), {'__eq__': lambda s, o: True, '__len__': lambda s: len(seconds)})()",
        "float('nan')",
        "[(n, float('nan'), float('inf')) for n, t in enumerate(seconds, 1)]",
        "[(True, True, True) for t in seconds]",
        "None",
        "(lambda x: x.append(x) or x)([])",
        "[10 ** 5000]",
        "{(1, 2): 3}",
        "'\\ud800'",
        "open",
        "(x for x in seconds)",
        "type('M', (type,), {'__name__': property(lambda c: 1 / 0)})('X', (), {})()",
        "type('C', (), {'__class__': property(lambda s: 1 / 0), '__module__': 'numpy'})()",
        "__import__('numpy').full((3, 3), float('nan'))",
        "__import__('numpy').array([object()])",
    ],
)
def test_a_bad_value_is_a_score(value):
    score, _, err = run_check(f"def speedup_table(seconds):\n    return {value}")
    assert score < 3 and score.status == "wrong" and err == ""
    assert all(type(finding.why) is str for finding in score.findings)


def test_numpy_values_are_values():
    source = (
        "import numpy\n"
        + GOOD
        + """
def speedup_table(seconds, plain=speedup_table):
    return [(n, numpy.float64(a), numpy.float32(b) * 0 + b) for n, a, b in plain(seconds)]
"""
    )
    assert run_check(source)[0] == 3


def test_warnings_and_prints_cost_nothing():
    """nbgrader gives 0 to a test cell that wrote to stderr, also for a right answer."""
    noise = "warnings.warn('careful'); print('hm', file=sys.stderr); print('ho')\n    return"
    program = "import sys, warnings\n" + GOOD.replace("return", noise)
    program += "from course_utils.grading import check\nprint(repr(check('02-speedup')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.endswith("\n3.0\n")
    assert "careful" in done.stdout and "hm" in done.stdout


def test_a_student_cannot_change_the_inputs_that_are_judged():
    """Powers of the unit matrix are easily right."""
    source = get_task("02-matpow").wrong[1].source
    greedy = source.replace("    result = m", "    m[:] = [[1, 0], [0, 1]]\n    result = m")
    assert run_check(source, "02-matpow")[0] == 2
    assert run_check(greedy, "02-matpow")[0] == 0


def test_every_run_gives_the_same():
    assert len({run_check(GOOD)[1] for _ in range(3)}) == 1


def test_unknown_task_lists_the_known_ones():
    for call in (check, hint):
        with pytest.raises(UnknownTask, match="Did you mean '02-speedup'.*01-round-robin"):
            call("02-speed")
    with pytest.raises(LookupError, match="01-round-robin"):
        check(7)


def test_an_endless_loop_can_be_interrupted():
    program = """
from course_utils.grading import check
def speedup_table(seconds):
    print("inside", flush=True)
    while True:
        try:
            len(seconds)
        except Exception:
            pass
try:
    check("02-speedup")
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "inside\n"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert out == "interrupted\n" and process.returncode == 0
    finally:
        process.kill()


# --- hint -------------------------------------------------------------------------------


def test_hints_have_three_levels(capsys):
    texts = []
    for level in (1, 2, 3):
        assert hint("02-speedup", level=level) is None
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 3 and "level=2" in texts[0] and "level=" not in texts[2]
    for level in (0, 4, "1", None):
        with pytest.raises(ValueError, match="levels 1, 2 and 3"):
            hint("02-speedup", level=level)


# --- Score ------------------------------------------------------------------------------


def test_score_is_a_number_for_nbgrader_and_html_for_people():
    from IPython.core.formatters import DisplayFormatter

    score = run_check(get_task("02-speedup").wrong[1].source)[0]
    data, _ = DisplayFormatter().format(score)
    assert float(data["text/plain"]) == 2 == score + 0
    assert "<strong>02-speedup: 2 of 3 points</strong>" in data["text/html"]
    assert "efficienc" in data["text/html"], "words, not a colour, say what failed"


@pytest.mark.slow  # importing nbgrader takes seconds
def test_nbgrader_reads_partial_credit():
    from nbformat.v4 import new_code_cell, new_output
    from nbgrader.utils import determine_grade

    for source, points in ((GOOD, 3), (get_task("02-speedup").wrong[0].source, 1), ("", 0)):
        score, out, _ = run_check(source)
        cell = new_code_cell('check("02-speedup")')
        cell.metadata["nbgrader"] = {"grade": True, "points": 3, "grade_id": "02-speedup-test"}
        cell.outputs = [
            new_output("stream", name="stdout", text=out),
            new_output("execute_result", {"text/plain": repr(score)}),
        ]
        assert determine_grade(cell) == (points, 3)


def test_html_of_a_score_is_escaped():
    task = get_task("02-speedup")
    score = Score(task, "error", why="<script>alert(1)</script>")
    assert "<script>" not in score._repr_html_() and "&lt;script&gt;" in score._repr_html_()


# --- tasks ------------------------------------------------------------------------------


def make(**changes):
    wrong = (Wrong("a", "def f(): return 1", 0), Wrong("b", "def f(): return 2", 1))
    fields = dict(
        id="99-toy",
        title="toy",
        points=2,
        functions=("f",),
        inputs=lambda seed: [seed],
        run=lambda student, inputs: student.f(),
        expected=lambda inputs: 3,
        judge=lambda inputs, expected, got: [Finding("equal", 2, "" if got == expected else "no")],
        hints=("one", "two", "three"),
        wrong=wrong,
    )
    return Task(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "toy"}, "NN-name"),
        ({"id": "99-Toy"}, "NN-name"),
        ({"points": 0}, "points"),
        ({"functions": ()}, "no function"),
        ({"hints": ("one", "two")}, "three hints"),
        ({"hints": ("one", "two", "")}, "three hints"),
        ({"wrong": (Wrong("a", "", 0),)}, "two named wrong"),
        ({"wrong": (Wrong("a", "", 0), Wrong("a", "", 1))}, "two named wrong"),
        ({"wrong": (Wrong("a", "", 0), Wrong("b", "", 2))}, "full marks"),
        ({"self_reported": 0.5}, "self-reported"),
    ],
)
def test_an_incomplete_task_is_refused(changes, message):
    make()
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_findings_must_add_up():
    assert [f.passed for f in make().mark([1], 3)] == [True]
    task = make(judge=lambda inputs, expected, got: [Finding("equal", 1)])
    with pytest.raises(ValueError, match="add up to 1, not 2"):
        task.mark([1], 3)


# --- wire and the judges' helpers ---------------------------------------------------------


def test_plain_gives_exact_json_types():
    value = plain({"a": (1, 2.5, True, None), "b": numpy.arange(3), "c": numpy.float32(0.5)})
    assert value == {"a": [1, 2.5, True, None], "b": [0, 1, 2], "c": 0.5}
    assert type(value["c"]) is float and type(value["b"][0]) is int
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_plain_is_bounded():
    deep = []
    for _ in range(5000):
        deep = [deep]
    start = time.monotonic()
    wide = plain([[0] * 10_000] * 10_000)
    assert time.monotonic() - start < 20, "10^8 values were walked through"
    assert len(json.dumps(plain(deep))) < 1000 and len(json.dumps(wide)) < 5e6 * 4
    assert len(plain("x" * 10**7)) <= 100_000


def test_arrays_travel_without_pickle():
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    back = unpack(json.loads(json.dumps(pack(array))))
    assert back.dtype == array.dtype and (back == array).all()
    with pytest.raises(ValueError):
        pack(numpy.array([object()]))
    for text in ("", "no base64!", "AAAA"):
        with pytest.raises((ValueError, EOFError)):
            unpack(text)


def test_helpers_cope_with_anything():
    for junk in (None, True, "1", [], {}, 10**400, -(10**400), {"$": "NaN"}, [[1], 2]):
        assert not close(junk, 1.0) and not same_matrix(junk, [[1, 2], [3, 4]])
        assert describe(junk) and item(junk, 7) is item(junk, "no")
    assert describe([]) == "an empty list or tuple" and describe({"a": 1}) == "a dict of 1 entry"
    assert describe([1, 2]) == "a list or tuple of 2 entries"
    assert close(1.0 + 1e-9, 1) and not close(1.001, 1) and not close(True, 1)
    assert same_matrix([[1, 2], [3, 4.0]], [[1, 2], [3, 4]])
    with pytest.raises(ValueError):
        copy_json(float("nan"))


def test_import_is_light():
    program = (
        "import sys, course_utils.grading as g; g.all_tasks();"
        "print([m for m in ('torch', 'tensorflow', 'numpy', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
