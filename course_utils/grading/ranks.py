"""A learner's function on real ranks, for `run` of a task; nothing here knows an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# What gloo says when a message that was asked for is never sent.
LOST = "[Tt]imed out|Connection (closed|reset)"


def on_ranks(
    on_rank: Callable, ranks: int, function: Callable, given: Any, hangs: str, waits: str = ""
) -> list | dict[str, str]:
    """`launch(on_rank, ranks, function, given)`, or {"error": why it failed, in words}.

    `hangs` is what to say when the deadline of 30 s ends the ranks, with `{where}` for the line
    of `function` that waited; `waits` likewise, with `{rank}` too, when a rank lost its message.
    Raises NotImplementedError when `function` does: it was not attempted.
    """
    from course_utils.launch import RankError, launch

    try:
        return launch(on_rank, ranks, function, given, oversubscribe=True, timeout=30)
    except RankError as error:
        if error.type_name == "NotImplementedError":
            raise NotImplementedError from None
        line = re.findall(rf"in {function.__name__}\n\s+(.+)", error.traceback)
        where = f" at `{line[-1].strip()}`" if line else ""
        if isinstance(error, TimeoutError):
            return {"error": hangs.format(where=where)}
        if waits and re.search(LOST, error.message):
            return {"error": waits.format(where=where, rank=error.rank)}
        return {"error": f"rank {error.rank}: {error.type_name}{where}: {error.message[:150]}"}


def on_replicas(on_devices: Callable, replicas: int, function: Callable, given: Any) -> Any:
    """`on_devices(strategy, function, given)`, or {"error": why it failed, in words}.

    `strategy` is a MirroredStrategy over so many logical devices of the CPU, in a process of its
    own: the notebook's may have started its devices long ago, and then they cannot be split any
    more. Raises NotImplementedError when `function` does: it was not attempted.
    """
    from course_utils.launch import RankError, launch

    def on_rank(function, given):
        import os

        os.environ.pop("TF_CONFIG", None)  # the launch's own, which speaks of one worker
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * replicas
        tf.config.set_logical_device_configuration(cpu, parts)
        names = [f"/CPU:{number}" for number in range(replicas)]
        return on_devices(tf.distribute.MirroredStrategy(names), function, given)

    try:
        return launch(on_rank, 1, function, given, framework="tensorflow", timeout=60)[0]
    except RankError as error:
        if error.type_name == "NotImplementedError":
            raise NotImplementedError from None
        last = (error.message.splitlines() or ["(no word)"])[-1]
        return {"error": f"{error.type_name}: {last[:150]}"}
