"""Run a notebook's function on several ranks, each a process with a device of its own.

    def hello(name):
        rank = dist.get_rank()
        print(f"{name} from rank {rank}")
        return rank

    launch(hello, 2, "greetings")    # -> [0, 1]

The function may stand in a cell and use the cell's globals. What ranks print streams into
the cell, with the rank before each line. The first rank to fail ends all of them and its own
error is raised here, as :class:`RankError`. No rank outlives the kernel.

How it works: a *fork server* (one per framework, see :mod:`course_utils._ranks`) imports the
framework once; each launch forks its ranks from it. The notebook's process stays in one
loop that reads what ranks print, hears who returned or failed, and keeps the deadline.

From a shell the same is ``torchrun --standalone --nproc-per-node=2 script.py``.
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from course_utils._attend import Launch, LaunchTimeout, RankError
from course_utils._crew import reserved_ports
from course_utils._words import cell_sources, find_unpicklable

__all__ = ["LaunchTimeout", "NestedLaunch", "RankError", "launch"]

PORT_TRIES = 3


class NestedLaunch(RuntimeError):
    """`launch` was called inside a rank."""


def launch(
    fn: Callable[..., Any],
    n: int | None = None,
    *args: Any,
    framework: str = "torch",
    init: bool = True,
    roles: Mapping[str, int] | None = None,
    oversubscribe: bool = False,
    timeout: float = 120.0,
) -> list[Any]:
    """Call ``fn(*args)`` on `n` ranks and return what each of them returned, in rank order.

    Every rank has RANK, LOCAL_RANK and WORLD_SIZE in its environment, one device (see
    :func:`course_utils.devices.slots`) and that device's number of threads. A rank whose
    device is a core sees no GPU. No rank leaves before all have returned or one has failed.
    What ranks print comes as it is printed, so the order between ranks differs from run to run.

    Args:
        fn: any function, also one from a cell. It and `args` are sent by value: what a rank
            changes in them is not seen here. Each rank draws random numbers of its own.
        n: the number of ranks; may be left out when `roles` says it.
        framework: ``"torch"`` or ``"tensorflow"``.
        init: torch: the process group exists when `fn` starts (gloo on cores, NCCL on GPUs)
            and is destroyed after. With False `fn` makes its own; MASTER_ADDR and
            MASTER_PORT are set, so ``init_process_group("gloo")`` is enough. Rank 0 holds the
            addresses: a barrier before ``destroy_process_group`` lets all get in.
        roles: TensorFlow: tasks of each job, such as ``{"worker": 2, "ps": 1}``; default is
            n workers. Ranks are numbered in this order, and TF_CONFIG tells each its task.
            `tf.distribute.Server.join()` returns when all other tasks have returned.
        oversubscribe: allow more ranks than devices. Timings then mean little.
        timeout: seconds until a launch that hangs is ended.

    Raises:
        RankError: a rank raised, left, or was killed.
        LaunchTimeout: a rank had not returned after `timeout` seconds.
        NotEnoughDevices: `n` is more than this machine has.
        NestedLaunch: called inside a rank.
        TypeError: `fn` or one of `args` cannot be sent to another process.
    """
    if "COURSE_RANK" in os.environ:
        raise NestedLaunch(
            f"launch() was called inside rank {os.environ['COURSE_RANK']}. A rank cannot start "
            "ranks: call launch() from the notebook, outside the function that it runs."
        )
    from course_utils.devices import slots

    names = _task_names(n, roles, framework)
    places = slots(len(names), oversubscribe=oversubscribe, framework=framework)
    labels = [f"{job} {i}" if roles else f"rank {r}" for r, (job, i) in enumerate(names)]
    call = _pickle_call(fn, args)
    for attempt in range(1, PORT_TRIES + 1):
        with _one_at_a_time(), reserved_ports(len(names)) as ports:
            request = _request(names, places, ports, framework, init, timeout)
            run, ok = Launch(call, request, labels), False
            try:
                values = run.run()
                ok = True
                return values
            except RankError as error:
                if attempt == PORT_TRIES or not _is_port_clash(error):
                    raise
                print(f"[launch] a port was taken ({error.message}); once more with other ports")
            finally:
                _write_ledger(run.pids, places, framework, ok)
    raise AssertionError("unreachable")


# ---------------------------------------------------------------- what is launched


def _task_names(
    n: int | None, roles: Mapping[str, int] | None, framework: str
) -> list[tuple[str, int]]:
    """Job and index of each rank: ``[("worker", 0), ("worker", 1), ("ps", 0)]``."""
    if framework not in ("torch", "tensorflow"):
        raise ValueError(f'framework is "torch" or "tensorflow", not {framework!r}')
    if roles is not None and framework == "torch":
        raise ValueError('roles are for framework="tensorflow"; torch ranks have no jobs')
    if roles is None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"launch(fn, n, ...): n is the number of ranks, not {n!r}")
        roles = {"worker": n}
    names = [(job, index) for job, count in roles.items() for index in range(count)]
    if n is not None and n != len(names):
        raise ValueError(f"n is {n}, but the roles {dict(roles)} make {len(names)} ranks")
    return names


def _pickle_call(fn: Callable[..., Any], args: tuple) -> bytes:
    import cloudpickle

    try:
        return cloudpickle.dumps((fn, args), protocol=5)
    except Exception as error:
        culprit = find_unpicklable(fn, args) or getattr(fn, "__name__", repr(fn))
        raise TypeError(
            f"{culprit} cannot be sent to the ranks ({error}). "
            "Create it inside the function, or pass what it is made from."
        ) from None


def _is_port_clash(error: RankError) -> bool:
    clash = r"Could not start gRPC server|[Aa]ddress already in use|EADDRINUSE"
    return re.search(clash, error.message) is not None


_LAUNCHING = threading.Lock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    if not _LAUNCHING.acquire(blocking=False):
        raise RuntimeError("another launch() is running in this kernel: wait for it to end")
    try:
        yield
    finally:
        _LAUNCHING.release()


# ---------------------------------------------------------------- what the ranks are told


def _request(names, places, ports, framework, init, timeout) -> dict[str, Any]:
    """What the ranks need to know of this process as it is now, and of themselves."""
    ranks = []
    for rank, place in enumerate(places):
        env = {**os.environ, **_environment_of(rank, names, places, ports, framework)}
        gpu = rank if place.kind == "gpu" else None
        ranks.append({"env": env, "cpus": place.cpus, "threads": place.threads, "gpu": gpu})
    return {
        "framework": framework,
        "init": init,
        "timeout": timeout,
        "ranks": ranks,
        "cwd": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "sources": cell_sources(),
    }


def _environment_of(rank, names, places, ports, framework) -> dict[str, str]:
    """What rank `rank` finds in its environment, beside what the notebook has in its own."""
    place, (job, index) = places[rank], names[rank]
    threads = str(place.threads)
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "COURSE_RANK": str(rank),
        "WORLD_SIZE": str(len(names)),
        "LOCAL_WORLD_SIZE": str(len(names)),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MPLBACKEND": "agg",  # the notebook's own backend needs a notebook
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "-1",  # a rank on a core sees no GPU
    }
    if place.kind == "gpu" and framework == "torch":  # as under torchrun: LOCAL_RANK picks one
        env["CUDA_VISIBLE_DEVICES"] = ",".join(p.visible for p in places)
    elif place.kind == "gpu":
        env["CUDA_VISIBLE_DEVICES"] = place.visible
    if framework == "torch":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        env |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    else:
        cluster: dict[str, list[str]] = {}
        for (each, _), port in zip(names, ports, strict=True):
            cluster.setdefault(each, []).append(f"127.0.0.1:{port}")
        task = {"type": job, "index": index}
        env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    return env


def _write_ledger(pids: list[int], places, framework: str, ok: bool) -> None:
    """One JSON line per launch, for tests that ask whether two devices were at work."""
    path = os.environ.get("COURSE_LAUNCH_LEDGER")
    if not path:
        return
    from course_utils.devices import census

    entry = {
        "pid": os.getpid(),
        "ranks": pids,
        "tier": census().tier,
        "n": len(places),
        "framework": framework,
        "slots": [place.name for place in places],
        "ok": ok,
    }
    with open(path, "a") as ledger:
        ledger.write(json.dumps(entry) + "\n")
