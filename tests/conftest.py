"""Fixtures that several test modules share."""

import os

import pytest


def missing(problem):
    """A test's sandbox is missing: say so and leave the test out; in CI that is a failure."""
    if os.environ.get("CI"):
        pytest.fail(f"in CI the grader's tests need a sandbox: {problem}")
    pytest.skip(f"no sandbox for the grader: {problem}")


@pytest.fixture(scope="session")
def bubblewrap():
    """For tests that need just this sandbox."""
    from course_utils.grading.sandbox import Bubblewrap

    if problem := Bubblewrap.problem():
        missing(problem)


@pytest.fixture(scope="module")
def sandbox():
    """The sandbox in which students' code runs. In CI there must be one."""
    from course_utils.grading.sandbox import SandboxError, find_sandbox

    try:
        found = find_sandbox()
    except SandboxError as error:
        missing(error)
    with found:
        yield found


@pytest.fixture(scope="module")
def graded(sandbox):
    """(task, source) -> the mark of that task alone, by a grader."""
    from dataclasses import replace
    from pathlib import Path

    from course_utils.grading.marking import Rules, mark_submission, preload_of
    from course_utils.grading.submission import Submission, read_exercise

    rules, boxes = Rules(secret="a seed that no notebook uses"), {}

    def mark(task, source):
        exercise = read_exercise(task.id[:2], Path(__file__).resolve().parent.parent)
        if exercise.number not in boxes:
            boxes[exercise.number] = sandbox.box(preload_of(exercise), rules.limits)
        alone = replace(exercise, tasks=(task,))
        found = Submission({task.id: source})
        return mark_submission(found, alone, rules, boxes[exercise.number])[0]

    yield mark
    for box in boxes.values():
        box.close()
