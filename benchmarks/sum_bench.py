"""A¹⁰ + B¹⁰ on one device and on two, in torch and in TensorFlow, the two taking turns.

The matrices lie on their devices before the clock starts. The two-device time includes what
one device does not need: sending one result to the other device, and waiting for it.
"""

import json
import os

from benchmarks.common import quietest, row, target, write
from course_utils.devices import slots
from course_utils.launch import launch
from course_utils.timing import Comparison, compare

POWER = 10
SIZES = (256, 1024)
TARGET = 1.6
ONE, TWO = "1 device", "2 devices"


def power(matmul, matrix):
    """matrix to the power of POWER by POWER - 1 products, one after the other."""
    result = matrix
    for _ in range(POWER - 1):
        result = matmul(result, matrix)
    return result


def torch_rank(size: int, repeat: int) -> Comparison:
    """Both ranks run the same rounds; in a one-device round rank 1 waits at the barrier."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(size, size, generator=generator) * 2 / size for _ in range(2))
    a, b = a.to(device), b.to(device)

    def one():
        return power(torch.matmul, a) + power(torch.matmul, b) if rank == 0 else None

    def two():
        part = power(torch.matmul, a if rank == 0 else b)
        dist.reduce(part, dst=0)  # adds rank 1's part to rank 0's
        return part

    def sync():
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    together = two()
    if rank == 0:
        torch.testing.assert_close(together, one())  # otherwise the times mean nothing
    return compare({ONE: one, TWO: two}, repeat=repeat, warmup=2, sync=sync)


def tensorflow_rank(size: int, repeat: int) -> Comparison | None:
    """Each rank is a tf.distribute.Server; rank 0 is the client as well."""
    import numpy as np
    import tensorflow as tf

    config = json.loads(os.environ["TF_CONFIG"])
    cluster, index = tf.train.ClusterSpec(config["cluster"]), config["task"]["index"]
    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=4
    )
    tf.distribute.Server(cluster, "worker", index, config=threads)
    if index > 0:
        return None  # its server works on until rank 0 has returned
    tf.config.experimental_connect_to_cluster(cluster, job_name="client")
    first, second = "/job:worker/task:0", "/job:worker/task:1"

    def matrix(device, seed):
        with tf.device(device):
            return tf.random.stateless_uniform([size, size], [size, seed]) * 2 / size

    def powers(device_of_b):
        a, b = matrix(first, 1), matrix(device_of_b, 2)

        @tf.function
        def run():
            with tf.device(first):
                part = power(tf.matmul, a)
            with tf.device(device_of_b):
                other = power(tf.matmul, b)
            with tf.device(first):
                return part + other

        return run

    one, two = powers(first), powers(second)
    np.testing.assert_allclose(one().numpy(), two().numpy(), rtol=1e-5)

    def wait_for(run):
        return lambda: run()[0, 0].numpy()  # one number: the sum itself stays on its device

    return compare({ONE: wait_for(one), TWO: wait_for(two)}, repeat=repeat, warmup=2)


def main(repeat: int = 11) -> dict:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rows, targets, others = [], [], []
    for framework, rank in (("torch", torch_rank), ("tensorflow", tensorflow_rank)):
        launch(int, 2, framework=framework)  # starts the fork server: no part of a measurement
        for size in SIZES:
            found, percent = quietest(
                lambda rank=rank, size=size, framework=framework: launch(
                    rank, 2, size, repeat, framework=framework
                )[0]
            )
            gain = found.ratio(ONE, TWO)
            print(f"{framework}, {size}×{size}: speed-up {gain}\n{found}\n", flush=True)
            facts = {"framework": framework, "size": size, "other_work_percent": percent}
            for name in found:
                rows.append(row(f"{framework}, {size}×{size}, {name}", found[name], **facts))
            others.append(percent)
            if size == max(SIZES):
                what = f"{framework}: speed-up of two devices, {size}×{size}"
                wanted = f"at least {TARGET}×, on two idle cores"
                targets.append(target(what, wanted, gain, gain.median >= TARGET))
    devices = [slot.name for slot in slots(2)]
    title = f"A^{POWER} + B^{POWER}, float32, on one device and on two"
    return write("sum", title, max(others), rows, targets, devices=devices)


if __name__ == "__main__":
    main()
