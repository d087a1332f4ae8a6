"""The course's tasks, one module a lesson; each has a tuple TASKS."""

from __future__ import annotations

from functools import cache

from ..task import Task


class UnknownTask(LookupError):
    """No task has this id; the message lists those that exist."""


@cache
def all_tasks() -> dict[str, Task]:
    """Every task by its id, in order; raises ValueError when two have the same id."""
    import importlib
    import pkgutil

    tasks: dict[str, Task] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda found: found.name):
        for task in importlib.import_module(f"{__name__}.{module.name}").TASKS:
            if task.id in tasks:
                raise ValueError(f"two tasks have the id {task.id}")
            tasks[task.id] = task
    return tasks


def get_task(task_id: str) -> Task:
    """The task with this id; raises UnknownTask, which lists those that exist."""
    tasks = all_tasks()
    if isinstance(task_id, str) and task_id in tasks:
        return tasks[task_id]
    import difflib

    near = difflib.get_close_matches(str(task_id), tasks, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    raise UnknownTask(f"no task {task_id!r}. {meant}The tasks are: {', '.join(tasks)}")
