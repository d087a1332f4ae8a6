"""`launch` with TensorFlow: clusters of real processes over gRPC."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import time

import pytest

from course_utils import launch as launch_module
from course_utils.launch import LaunchTimeout, RankError, launch

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CORES < 2, reason="two tasks need two cores"),
    pytest.mark.skipif(not importlib.util.find_spec("tensorflow"), reason="needs TensorFlow"),
]
SOON = 30.0  # seconds; the deadline of each launch here is well above


def tf_launch(*args, **options):
    return launch(*args, framework="tensorflow", **{"timeout": 60, **options})


def config():
    return json.loads(os.environ["TF_CONFIG"])


def serve():
    """This task's gRPC server, as a script would start it."""
    import tensorflow as tf

    task = config()["task"]
    spec = tf.train.ClusterSpec(config()["cluster"])
    return tf.distribute.Server(spec, job_name=task["type"], task_index=task["index"])


def test_default_is_n_workers_with_one_core_and_thread_each():
    def report():
        import tensorflow as tf

        pinned = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        return config(), pinned, threads, tf.config.list_physical_devices("GPU")

    first, second = tf_launch(report, 2)
    assert first[0]["cluster"] == second[0]["cluster"]
    assert list(first[0]["cluster"]) == ["worker"] and len(set(first[0]["cluster"]["worker"])) == 2
    assert [each[0]["task"] for each in (first, second)] == [
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
    ]
    assert first[1] is None or (len(first[1]), first[1] == second[1]) == (1, False)
    assert (first[2], first[3]) == (1, [])


def test_multi_worker_mirrored_strategy_sums_over_workers(capsys):
    def work():
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        rank = float(config()["task"]["index"] + 1)

        @tf.function
        def step():
            def replica():
                return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(rank))

            return strategy.run(replica)

        return float(step())

    assert tf_launch(work, 2) == [3.0, 3.0]
    assert "cuInit" not in capsys.readouterr().out  # GPUs are hidden on purpose: no error


def test_a_parameter_server_cluster_as_in_the_documentation(capsys):
    """Workers and ps call server.join(), which in a script never returns."""

    def task():
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        print("at work")
        if resolver.task_type in ("worker", "ps"):
            serve().join()
            return f"{resolver.task_type} {resolver.task_id}"
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            total = tf.Variable(0.0)

        @tf.function
        def add():
            total.assign_add(1.0)
            return total.device

        where = {coordinator.schedule(add).fetch() for _ in range(4)}
        return total.numpy(), where

    roles = {"worker": 2, "ps": 1, "chief": 1}
    *others, (total, where) = tf_launch(task, roles=roles, oversubscribe=True)
    assert others == ["worker 0", "worker 1", "ps 0"]  # the order of `roles`
    assert total == 4.0 and b"/job:ps/" in where.pop()
    out = capsys.readouterr().out
    assert "[ps 0] at work" in out and "[worker 1] at work" in out


def test_a_worker_that_returns_early_keeps_serving():
    def work():
        import tensorflow as tf

        server = serve()
        if config()["task"]["index"] == 1:
            return "early"
        time.sleep(1)  # worker 1 has long returned
        with tf.compat.v1.Session(server.target, graph=tf.Graph()) as session:
            with session.graph.as_default(), tf.device("/job:worker/task:1"):
                return float(session.run(tf.constant(2.0) * 3.0))

    assert tf_launch(work, 2) == [6.0, "early"]


def test_a_taken_port_leads_to_another_try(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        real, calls = launch_module.reserved_ports, []

        @contextlib.contextmanager
        def first_clashes(count):
            with real(count) as ports:
                calls.append(ports)
                clash = [taken.getsockname()[1], *ports[1:]]
                yield clash if len(calls) == 1 else ports

        monkeypatch.setattr(launch_module, "reserved_ports", first_clashes)

        def work():
            serve()
            return config()["cluster"]["worker"][0]

        values = tf_launch(work, 2)
        assert len(calls) == 2
        assert values == [f"127.0.0.1:{calls[1][0]}"] * 2
    assert "other ports" in capsys.readouterr().out


def test_reserved_ports_are_free_for_ranks_and_taken_for_others():
    with launch_module.reserved_ports(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError):
                other.bind(("127.0.0.1", port))
            with socket.create_server(("", port)):  # SO_REUSEADDR, as gRPC does
                pass


def test_a_worker_fails_while_the_other_waits_for_it():
    def work():
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if config()["task"]["index"] == 1:
            time.sleep(1)
            raise ValueError("bad shard")
        replica = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0))
        return strategy.run(replica)

    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        tf_launch(work, 2)
    assert time.monotonic() - start < SOON
    assert (caught.value.rank, caught.value.type_name) == (1, "ValueError")
    assert "rank 0 waits in" in caught.value.others[0]


def test_a_killed_worker_is_named_not_the_peer_that_noticed():
    def work():
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        if config()["task"]["index"] == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        replica = tf.function(lambda: tf.distribute.get_replica_context().all_reduce("sum", 1.0))
        return strategy.run(replica)

    with pytest.raises(RankError) as caught:
        tf_launch(work, 2)
    assert (caught.value.rank, caught.value.type_name) == (1, "SIGKILL")


def test_a_cluster_that_hangs_says_where():
    def work():
        import tensorflow as tf

        if config()["task"]["index"] == 0:
            tf.distribute.MultiWorkerMirroredStrategy()  # waits for worker 1
        time.sleep(60)

    with pytest.raises(LaunchTimeout) as caught:
        tf_launch(work, 2, timeout=4)
    assert re.search(r"rank 0 waits in \w+, line \d+ of test_launch_tf.py", str(caught.value))


def test_roles_must_agree_with_n():
    with pytest.raises(ValueError, match="2 ranks"):
        tf_launch(os.getpid, 3, roles={"worker": 1, "ps": 1})
