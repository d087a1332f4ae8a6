"""Tasks of the exercises, and the check that a learner runs on an answer."""

from .check import check, hint
from .task import Finding, Score, Task, Wrong
from .tasks import UnknownTask, all_tasks, get_task

__all__ = [
    "Finding",
    "Score",
    "Task",
    "UnknownTask",
    "Wrong",
    "all_tasks",
    "check",
    "get_task",
    "hint",
]
