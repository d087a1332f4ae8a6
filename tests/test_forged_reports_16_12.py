"""Lessons 12 and 16: a report that a student's program forges gets less than the work itself."""

from types import SimpleNamespace

import pytest

from course_utils.grading.task import copy_json
from course_utils.grading.tasks import lesson_12, lesson_16
from course_utils.grading.wire import plain


def findings(task, source, seed=1):
    names = {}
    exec(source, names)
    student = SimpleNamespace(**{name: names[name] for name in task.functions})
    inputs = task.inputs(seed)
    return task.mark(inputs, plain(task.run(student, copy_json(inputs))))


def points(found):
    return sum(finding.points for finding in found if finding.passed)


WHOLE_BATCH = {
    "the noted sizes are overwritten": """
def accumulate(model, loss_fn, batch, micro, count):
    loss = loss_fn(model, batch)
    loss.backward()
    for numbers in loss_fn.__defaults__:
        if type(numbers) is list:
            numbers[:] = [1] * len(batch[0])
    return loss.item()
""",
    "a public loss instead of loss_fn": """
import torch
def accumulate(model, loss_fn, batch, micro, count):
    x, y = batch
    with torch.no_grad():
        for i in range(len(x)):
            loss_fn(model, (x[i:i + 1], y[i:i + 1]))
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    return loss.item()
""",
}


@pytest.mark.parametrize("source", WHOLE_BATCH.values(), ids=WHOLE_BATCH)
def test_the_gradient_of_the_whole_batch_at_once_is_not_to_be_had(source):
    assert points(findings(lesson_16.ACCUMULATE, source)) <= lesson_16.ACCUMULATE.self_reported


CHIEF_OF = """
def save(checkpoint, folder, config, step):
    first = "chief" if "chief" in config["cluster"] else "worker"
    if config["task"] == {"type": first, "index": 0}:
        checkpoint.write(f"{folder}/ckpt-{step}")
"""


def test_a_write_that_is_claimed_is_missing_in_the_chief_s_file():
    """The counters of the tasks' own process say that all have written; the disk does not."""
    claims = """
    else:
        tasks = checkpoint.write.__closure__[0].cell_contents
        tasks.writes = type("Ones", (dict,), {"get": lambda *_: 1})()
"""
    found = findings(lesson_12.SAVE, CHIEF_OF + claims)
    assert [finding.passed for finding in found] == [False, True, False, False]
    assert "no file shows that all tasks have called checkpoint.write" in found[0].why


def test_a_chief_whose_others_never_write_does_not_wait_for_ever():
    found = findings(lesson_12.SAVE, CHIEF_OF)
    assert [finding.passed for finding in found] == [False, True, False, False]
    assert "1 task did not call checkpoint.write" in found[0].why


def test_all_tasks_save_at_the_same_time():
    """Each writes only when every other has called write, as in a cluster."""
    inputs = lesson_12.SAVE.inputs(1)
    waiting, most = [], []

    def save(checkpoint, folder, config, step):
        waiting.append(1)
        checkpoint.write(f"{folder}/{config['task']['type']}-{config['task']['index']}")
        most.append(len(waiting))

    lesson_12.SAVE.run(SimpleNamespace(save=save), inputs[1:2])
    assert most == [4, 4, 4, 4]


def test_an_error_of_one_task_is_the_error_of_all():
    save = CHIEF_OF + "    else:\n        raise KeyError(folder)\n"
    with pytest.raises(KeyError):
        findings(lesson_12.SAVE, save)
