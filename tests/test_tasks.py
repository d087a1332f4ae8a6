"""Every task: the blank gets nothing, the solution everything, a wrong answer what it declares."""

import contextlib
import copy
import inspect
import io
import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import jupytext
import pytest

from course_utils.grading import Score, all_tasks, check
from course_utils.grading.check import PUBLIC_SEED
from course_utils.grading.sandbox import Bubblewrap
from course_utils.grading.task import copy_json
from course_utils.grading.wire import plain

ROOT = Path(__file__).resolve().parent.parent
# `check` itself runs the public seed; these stand for a grader's secret ones. None is run twice.
SECRET_SEEDS = (1, 77)
assert PUBLIC_SEED not in SECRET_SEEDS
REGION = re.compile(r"^( *)### BEGIN SOLUTION\n.*?### END SOLUTION$", re.DOTALL | re.MULTILINE)
# Lesson 00 has no exercise: its practice task is solved by the reader, in the lesson.
SOLUTIONS = {
    "00-practice": """
def local_batches(global_batch, world_size):
    ### BEGIN SOLUTION
    whole, rest = divmod(global_batch, world_size)
    return [whole + (rank < rest) for rank in range(world_size)]
    ### END SOLUTION
"""
}
for source in sorted((ROOT / "source" / "exercises").glob("*.py")):
    for cell in jupytext.read(source).cells:
        if "task" in cell.metadata:
            SOLUTIONS[cell.metadata["task"]] = cell.source
TASKS = list(all_tasks().values())
HAS_SANDBOX = not Bubblewrap.problem()
# What a `run` has in it that trains or starts ranks: seconds, where others take milliseconds.
SLOW = re.compile(r"import (tensorflow|keras)|\b(launch|on_ranks|on_replicas)\(")


def is_slow(task):
    return bool(SLOW.search(inspect.getsource(task.run)))


def marked(*values, task, id):
    return pytest.param(*values, id=id, marks=[pytest.mark.slow] if is_slow(task) else [])


EACH = [marked(task, task=task, id=task.id) for task in TASKS]
# Where there is a sandbox, test_grade_tasks tries the slow ones in it, on the same inputs.
WRONG = [
    marked(task, wrong, task=task, id=f"{task.id}: {wrong.name}")
    for task in TASKS
    for wrong in task.wrong
    if not (is_slow(task) and HAS_SANDBOX)
]
JUNK = (None, True, -1, 10**400, 0.5, "x", "", [], {}, [[]], {"$": "NaN"}, [1, 2], {"value": 1})


@pytest.fixture(params=EACH)
def task(request):
    return request.param


def define(source):
    names = {}
    exec(source, names)
    return names


def answer(task, source, inputs):
    if re.search("import (keras|tensorflow)", inspect.getsource(task.run)):
        two_cpus()
    names = define(source)
    student = SimpleNamespace(**{name: names[name] for name in task.functions})
    return plain(task.run(student, copy_json(inputs)))


def two_cpus():
    """Lesson 01 needs two logical devices, whichever task starts TensorFlow in this process."""
    import tensorflow as tf

    cpu, two = (
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    with contextlib.suppress(RuntimeError):  # started by another module: only lesson 01 minds
        tf.config.set_logical_device_configuration(cpu, two)


def findings_of(task, source, seed=1):
    """The findings on an answer, on the inputs of a seed."""
    inputs = task.inputs(seed)
    return task.mark(inputs, answer(task, source, inputs))


def points(findings):
    return sum(finding.points for finding in findings if finding.passed)


def checked(task, source):
    """Score and printed text of the line `check(...)`, run where the answer is defined."""
    names = define(source)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(f"score = check({task.id!r})", names | {"check": check}, names)
    return names["score"], printed.getvalue()


def test_every_task_has_a_solution_and_every_solution_a_task():
    assert set(SOLUTIONS) == set(all_tasks())


def test_blank_is_not_attempted(task):
    blank = REGION.sub(r"\1raise NotImplementedError()", SOLUTIONS[task.id])
    assert blank != SOLUTIONS[task.id]
    score, printed = checked(task, blank)
    assert (score, score.status) == (0, "not_attempted")
    assert "not attempted" in printed


def test_solution_gets_full_marks(task):
    score, printed = checked(task, SOLUTIONS[task.id])
    assert isinstance(score, Score) and (score, score.status) == (task.points, "ok"), printed
    for seed in SECRET_SEEDS:
        inputs = task.inputs(seed)
        assert points(task.mark(inputs, answer(task, SOLUTIONS[task.id], inputs))) == task.points


@pytest.mark.parametrize(("task", "wrong"), WRONG)
def test_wrong_answer_gets_what_it_declares(task, wrong):
    score, printed = checked(task, wrong.source)
    assert score == wrong.score < task.points, printed
    assert "FAILED" in printed and f'hint("{task.id}")' in printed
    for seed in () if is_slow(task) else SECRET_SEEDS:
        inputs = task.inputs(seed)
        assert points(task.mark(inputs, answer(task, wrong.source, inputs))) == wrong.score


SAYS = [
    ("01-round-robin", "an error that does not say what is missing", "mentions no device"),
    ("01-sum-of-products", "multiplies element by element", "it is the element-wise product"),
    ("01-placement-log", "takes eager execution for placement", "name, such as 'MatMul'"),
    ("01-placement-log", "keyed by the operation's type", "FAILED: each operation .*not judged"),
    ("00-practice", "samples are split", "a sample is split: one of the numbers is not whole"),
    ("02-matpow", "halves, but computes each half twice", r"computed \d+ times, keep it"),
    ("02-timer", "the time module, not the given clock", "`clock` was never called"),
    ("02-speedup", "rounded to two digits", "did you round"),
    ("02-speedup", "devices counted from 0", "first entry of row 1 .* counted from 1"),
]


@pytest.mark.parametrize(("task_id", "name", "words"), SAYS, ids=[name for _, name, _ in SAYS])
def test_the_message_names_the_mistake(task_id, name, words):
    task = all_tasks()[task_id]
    wrong = next(wrong for wrong in task.wrong if wrong.name == name)
    assert re.search(words, checked(task, wrong.source)[1])


def test_a_product_is_said_to_be_computed_again_only_when_it_is():
    task = all_tasks()["02-matpow"]
    chain = next(wrong for wrong in task.wrong if wrong.name == "n - 1 products")
    printed = checked(task, chain.source)[1]
    assert "too many" in printed and "computed" not in printed


def test_a_number_is_no_matrix():
    start = "def matpow(m, n, product):\n    return product(1, m)\n"
    score, printed = checked(all_tasks()["02-matpow"], start)
    assert score == 0 and "product(a, b) takes matrices; got int" in printed


def test_one_wrong_key_is_quoted_shortened_and_escaped():
    source = SOLUTIONS["01-placement-log"].replace("def read_placement", "def right")
    source += """
def read_placement(log):
    return right(log) | {"\\x1b[31m" + "x" * 60: "/job:none"}
"""
    score, printed = checked(all_tasks()["01-placement-log"], source)
    assert score == 2 and "1 of your 7 keys is no operation's name" in printed
    assert "such as '\\x1b[31m" + "x" * 35 + "'…" in printed and "\x1b" not in printed


def test_no_operation_of_a_log_has_two_devices():
    """The exercise promises it."""
    for seed in (PUBLIC_SEED, *SECRET_SEEDS):
        for log in all_tasks()["01-placement-log"].inputs(seed):
            pairs = set(re.findall(r"(\S+): \(\w+\): (/job:\S+)$", log, re.MULTILINE))
            assert len(pairs) == len(dict(pairs))


def test_inputs_are_json_and_depend_on_the_seed_alone(task):
    drawn = [task.inputs(seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] == copy_json(drawn[0])
    assert drawn[0] != drawn[2], "a secret seed must give other inputs"
    copy_json(task.expected(drawn[0]))


def test_run_stands_alone(task):
    """A grader ships the source of `run` into a sandbox, where no oracle may be."""
    used = inspect.getclosurevars(task.run)
    names = set(used.globals) - {"__name__"}  # an attribute, as in type(error).__name__
    assert not names and not used.nonlocals, f"{names} {used.nonlocals}"
    names = define("from __future__ import annotations\n" + inspect.getsource(task.run))
    inputs, functions = task.inputs(5), define(SOLUTIONS[task.id])
    student = SimpleNamespace(**{name: functions[name] for name in task.functions})
    got = plain(names[task.run.__name__](student, copy_json(inputs)))
    assert points(task.mark(inputs, got)) == task.points


def test_expected_does_not_come_from_the_solution(task):
    """No line of the reference solution is a line of the oracle."""
    region = REGION.search(SOLUTIONS[task.id]).group(0)
    oracle = {line.strip() for line in inspect.getsource(task.expected).splitlines()}
    lines = {line.strip() for line in region.splitlines()}
    shared = {line for line in lines & oracle if len(line) > 12}
    assert not shared - {"for case in inputs:", "for seconds in inputs:"}


def paths(value, here=()):
    yield here
    if not isinstance(value, (dict, list)):
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from paths(part, (*here, key))


def put(value, path, part):
    if not path:
        return part
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = part
    return value


def leaves(value):
    if isinstance(value, (dict, list)):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from leaves(part)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value)


def test_judge_copes_with_any_json_and_tells_no_answer(task):
    inputs = task.inputs(3)
    expected, right = task.expected(inputs), answer(task, SOLUTIONS[task.id], inputs)
    before = json.dumps([inputs, expected])
    # Values, and keys that are data (job-17), not keys that structure the reply ("total").
    secrets = {leaf for leaf in leaves(expected) if len(leaf) > 3 and re.search(r"[\d/]", leaf)}
    free = {"11-newest": "loads"}.get(task.id)  # which torn files are loaded, is not asked
    spots = [spot for spot in paths(right) if free not in spot]
    random.Random(0).shuffle(spots)
    broken = [put(right, spot, junk) for spot in [(), *spots[:60]] for junk in JUNK]
    for got in [right, *(g for g in broken if g != right)]:
        findings = task.judge(inputs, expected, got)
        assert sum(finding.points for finding in findings) == task.points
        assert points(findings) < task.points or got == right, got
        for finding in findings:
            told = [s for s in secrets if s in f"{finding.text} {finding.why}"]
            assert not told, f"{finding.why} tells {told}"
    assert json.dumps([inputs, expected]) == before, "a judge changes nothing"


@pytest.mark.parametrize("value", JUNK, ids=repr)
def test_an_answer_that_is_always_the_same_gets_little(task, value):
    """No property holds of an answer that has nothing in it."""
    inputs = task.inputs(3)
    assert points(task.mark(inputs, plain(value))) == 0
    assert points(task.mark(inputs, [plain(value)] * len(inputs))) == 0


def test_real_log_is_read():
    """The tasks' made-up logs have the form that TensorFlow prints today."""
    pytest.importorskip("tensorflow")
    import subprocess
    import sys

    program = """
import tensorflow as tf
tf.debugging.set_log_device_placement(True)
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
@tf.function
def f(a):
    with tf.device("/cpu:1"):
        return tf.matmul(a, a, name="layer/product")
f(tf.ones([2, 2]))
"""
    # Exercises switch TensorFlow's notices off, for children too: this one is to speak.
    env = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    for log in (done.stdout, done.stderr, done.stdout + done.stderr):
        placed = define(SOLUTIONS["01-placement-log"])["read_placement"](log)
        assert placed["layer/product"] == "/job:localhost/replica:0/task:0/device:CPU:1"
        assert [placed] == all_tasks()["01-placement-log"].expected([log])
