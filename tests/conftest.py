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
