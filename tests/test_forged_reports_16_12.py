"""Lessons 12 and 16: a report that a student's program forges gets less than the work itself."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest
from test_tasks import findings_of, points

from course_utils.grading.tasks import lesson_12, lesson_16

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
    assert points(findings_of(lesson_16.ACCUMULATE, source)) <= lesson_16.ACCUMULATE.self_reported


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
    found = findings_of(lesson_12.SAVE, CHIEF_OF + claims)
    assert [finding.passed for finding in found] == [False, True, False, False]
    assert "a task waited in checkpoint.write, and not all others came" in found[0].why


def test_a_chief_whose_others_never_write_does_not_wait_for_ever():
    found = findings_of(lesson_12.SAVE, CHIEF_OF)
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


def test_the_stop_button_ends_a_loop_in_every_task():
    def save(checkpoint, folder, config, step):
        while True:
            time.sleep(0.001)

    before, heard = set(threading.enumerate()), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop = signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    threading.Timer(0.5, *stop).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lesson_12.SAVE.run(SimpleNamespace(save=save), lesson_12.SAVE.inputs(1)[:1])
    finally:
        signal.signal(signal.SIGINT, heard)
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_an_error_of_one_task_is_the_error_of_all():
    save = CHIEF_OF + "    else:\n        raise KeyError(folder)\n"
    with pytest.raises(KeyError):
        findings_of(lesson_12.SAVE, save)


# Ask for one sample more each time; then write down that the answer was found in few trials.
FORGED_TRIALS = """
import torch
def largest_batch(trial, limit):
    trial(1)
    size, log = 1, trial.__defaults__[1]
    try:
        while True:
            trial(size + 1)
            size += 1
            log[:] = [size]
    except torch.OutOfMemoryError:
        log[:] = TRIALS
        return size
"""


@pytest.mark.parametrize("trials", ["[size]", "sorted({1, size})", "sorted({1, 2, size})"])
def test_a_list_of_trials_made_up_from_the_answer_is_not_believed(trials):
    found = findings_of(lesson_16.SEARCH, FORGED_TRIALS.replace("TRIALS", trials))
    assert points(found) <= 1
    assert all("two devices gave the same answers" in finding.why for finding in found[:4])


def test_a_search_that_follows_from_the_answers_is_believed_on_any_devices():
    doubles = next(w for w in lesson_16.SEARCH.wrong if w.name == "doubling, then bisection")
    for seed in range(50):
        found = findings_of(lesson_16.SEARCH, doubles.source, seed)
        told = "".join(finding.why for finding in found)
        assert "same answers" not in told


MEMORY = {
    "made larger": """
def safe_step(model, optimizer, loss_fn, batch, micro):
    case = loss_fn.__defaults__[0]
    case["memory"] = 10**9 if max(case["lengths"]) <= case["memory"] else 0
    x, y = batch
    optimizer.zero_grad()
    for i in range(0, len(x), micro):
        part = x[i:i + micro], y[i:i + micro]
        (loss_fn(model, part) * len(part[0]) / len(x)).backward()
    optimizer.step()
    return micro
""",
    "said to be empty, within except": """
import torch
def safe_step(model, optimizer, loss_fn, batch, micro):
    x, y = batch
    optimizer.zero_grad()
    try:
        for i in range(0, len(x), micro):
            part = x[i:i + micro], y[i:i + micro]
            (loss_fn(model, part) * len(part[0]) / len(x)).backward()
    except torch.OutOfMemoryError:
        if micro == 1:
            raise
        loss_fn.__defaults__[2].__defaults__[1].clear()
        return safe_step(model, optimizer, loss_fn, batch, micro // 2)
    optimizer.step()
    return micro
""",
}


def test_in_a_notebook_the_memory_can_be_said_to_be_empty():
    """Otherwise the next test would show nothing."""
    source = MEMORY["said to be empty, within except"]
    assert points(findings_of(lesson_16.SAFE_STEP, source)) == 6


@pytest.mark.slow
def test_the_memory_that_a_grader_s_kernel_keeps_cannot(graded):
    for source in MEMORY.values():
        mark = graded(lesson_16.SAFE_STEP, source)
        assert mark.score == 3 and "is the memory of the failed try free" in mark.why


# The whole batch at once, but loss_fn is told that so many are allowed, and then what it counts.
ALLOWED = """
def accumulate(model, loss_fn, batch, micro, count):
    loss_fn.__defaults__[0]["micro"] = 99
    loss = loss_fn(model, batch)
    loss.backward()
    for numbers, value in zip(loss_fn.__defaults__[1:3], (1, 0)):
        numbers[:] = [value] * len(batch[0])
    return loss.item()
"""


def test_in_a_notebook_loss_fn_can_be_talked_out_of_its_limit():
    """Otherwise the next test would show nothing."""
    assert points(findings_of(lesson_16.ACCUMULATE, ALLOWED)) >= 5


@pytest.mark.slow
def test_but_not_where_the_kernel_keeps_it(graded):
    mark = graded(lesson_16.ACCUMULATE, ALLOWED)
    assert mark.score <= lesson_16.ACCUMULATE.self_reported, mark.findings
