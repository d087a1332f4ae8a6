# ---
# jupyter:
#   course:
#     rows: [M6]
#     minutes: {read: 10, do: 30}
#     devices: 2
#     path: more
#     extra: tensorflow
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Exercise 12: who is where, who saves, who reads
#
# You write three decisions that every program with many workers needs: the addresses, the place of the checkpoint, and the shares of the data.
#
# | | |
# |---|---|
# | **Time** | 10 minutes to read, 30 to do: about 10 for each of the three tasks |
# | **You should know** | [lesson 12, Many workers](../notebooks/12_multi_worker.ipynb) |
# | **Runs on** | every machine: the checks need no cluster; two small cells of this page launch two workers |
#
# Each task has a cell for your code, and below it a cell with `check(...)`. Replace the line `raise NotImplementedError()` by your answer, run the cell, then run the check. It says which properties hold and which one to look at first. Helpers and imports of your own go into the answer's cell: a grader takes your answers and the imports and functions of the exercise's own cells, but no cell that you add.
#
# **Stuck?** After five minutes without progress take a hint: `hint("12-save")` is a nudge, `hint("12-save", level=2)` the way, `level=3` nearly the code.

# %%
import json
import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # most of TensorFlow's notices off

from course_utils.grading import check, hint
from course_utils.launch import launch

# %% [markdown]
# ## Task 1: TF_CONFIG of any cluster (5 points)
#
# A scheduler tells you the names of the hosts, and gives each process a rank. `launch` does so too. Here is the TF_CONFIG that it wrote for a chief and a worker.


# %%
# NBVAL_CHECK_OUTPUT
def mine():
    config = json.loads(os.environ["TF_CONFIG"])
    return {job: len(addresses) for job, addresses in config["cluster"].items()}, config["task"]


for rank, (jobs, task) in enumerate(
    launch(mine, framework="tensorflow", roles={"chief": 1, "worker": 1})
):
    print(f"rank {rank}: jobs {jobs}, task {task}")

# %% [markdown]
# Write `tf_config(hosts, per_host, jobs, port, rank)`. It returns the TF_CONFIG of one rank, a JSON *text*.
#
# - `jobs` says how many tasks each job has, such as `{"chief": 1, "worker": 3}`. Ranks are given out in this order: rank 0 is the chief, rank 1 is worker 0, and so on.
# - The first `per_host` ranks run on the first host, the next ones on the second. The last host need not be full.
# - On each host the first rank has the port `port`, the next `port + 1`, and so on.
#
# For `tf_config(["a", "b"], 2, {"chief": 1, "worker": 2}, 5000, 2)` the cluster is `{"chief": ["a:5000"], "worker": ["a:5001", "b:5000"]}`, and the task is worker 1.
#
# A job may have any name: for `tf_config(["a"], 2, {"worker": 1, "ps": 1}, 5000, 1)`, with one parameter server (lesson 13), the cluster is `{"worker": ["a:5000"], "ps": ["a:5001"]}`, and the task is ps 0.


# %% task="12-tf-config"
def tf_config(hosts, per_host, jobs, port, rank):
    """Return the TF_CONFIG of this rank as JSON text.

    hosts: names. per_host: ranks on a host. jobs: {job: number of tasks}, in order of rank.
    port: of the first rank on each host. rank: which process this is, from 0.
    """
    import json

    ### BEGIN SOLUTION
    tasks = [(job, index) for job, count in jobs.items() for index in range(count)]
    cluster = {job: [] for job in jobs}
    for number, (job, _) in enumerate(tasks):
        host, place = divmod(number, per_host)
        cluster[job].append(f"{hosts[host]}:{port + place}")
    job, index = tasks[rank]
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
    ### END SOLUTION


# %% [markdown]
# Would every process of the cluster find all others, and know itself?

# %% test="12-tf-config"
check("12-tf-config")

# %% [markdown]
# ## Task 2: all save, the chief's is kept (6 points)
#
# Write `save(checkpoint, folder, config, step)`. Every task calls it at the same step, all at the same time.
#
# - `checkpoint.write(path)` writes files whose names begin with `path`. It waits until all tasks have called it, so each must call it once.
# - The chief's checkpoint is `ckpt-<step>` in `folder`, which exists. Nothing else in `folder` is new afterwards, and what lay there before still does.
# - No two tasks may write to the same path, and of the others nothing is left in any folder when `save` returns.
# - `config` is TF_CONFIG, parsed: a dict with `cluster` and `task`. The chief is the task of the job `chief`, if the cluster has such a job; otherwise worker 0.


# %% task="12-save"
def save(checkpoint, folder, config, step):
    """Save on every task, keep the chief's.

    checkpoint: has a method write(path). folder: a path, as text.
    config: {"cluster": {job: addresses}, "task": {"type": job, "index": number}}.
    """
    import tempfile

    ### BEGIN SOLUTION
    chief_job = "chief" if "chief" in config["cluster"] else "worker"
    if config["task"] == {"type": chief_job, "index": 0}:
        checkpoint.write(f"{folder}/ckpt-{step}")
    else:
        with tempfile.TemporaryDirectory() as spare:
            checkpoint.write(f"{spare}/ckpt-{step}")
    ### END SOLUTION


# %% [markdown]
# Does nobody wait for ever, and is the chief's the only new checkpoint?

# %% test="12-save"
check("12-save")

# %% [markdown]
# ## Task 3: a shard policy for given files and workers (5 points)
#
# An epoch ends when the *last* worker has read its share, so uneven shares cost steps. Here are two workers, a global batch of 4, and three files of four samples each, under the three policies: the samples that each worker gets in each step.


# %%
# NBVAL_CHECK_OUTPUT
def shares(policies, files):
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    seen = {}
    for name in policies:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[
            name
        ]
        lines = tf.data.TextLineDataset(files).batch(4).with_options(options)
        seen[name] = [
            "".join(line.decode() for line in strategy.experimental_local_results(step)[0].numpy())
            for step in strategy.experimental_distribute_dataset(lines)
        ]
    return seen


policies = ("OFF", "DATA", "FILE")
with tempfile.TemporaryDirectory() as folder:
    files = [f"{folder}/{name}" for name in "abc"]
    for file in files:
        with open(file, "w") as lines:
            lines.write(f"{file[-1]}\n" * 4)
    workers = launch(shares, 2, policies, files, framework="tensorflow")
for policy in policies:
    for index, worker in enumerate(workers):
        print(f"{policy:4}  worker {index}: {len(worker[policy])} steps: {worker[policy]}")

# %% [markdown]
# Write `plan(files, workers, batch)`. `files` are the numbers of samples in each file, in order; `batch` is the global batch, a multiple of `workers`. Return a dict with four entries:
#
# - `"OFF"`, `"DATA"`, `"FILE"`: how many steps an epoch takes under this policy, as an int. A last step that is not full counts. Under OFF each worker gets every sample, in steps of `batch // workers` samples. Under DATA each sample goes to one worker, and all workers together take a whole batch in each step. Under FILE, worker w reads the files w, w + workers, w + 2·workers, …, in steps of `batch // workers` samples. It reads them as one row: a step may begin in one file and end in the next. Where a worker would get no file at all, `"FILE"` is `None`.
# - `"choice"`: FILE reads each file only once, so choose `"FILE"` if it is possible and takes no more steps than DATA; otherwise `"DATA"`.
#
# For the three files above that is `{"OFF": 6, "DATA": 3, "FILE": 4, "choice": "DATA"}`.


# %% task="12-shard"
def plan(files, workers, batch):
    """Return the steps of an epoch under OFF, DATA and FILE, and the choice.

    files: samples in each file. workers: how many. batch: the global batch.
    """
    import math

    ### BEGIN SOLUTION
    share = batch // workers
    steps = {"OFF": math.ceil(sum(files) / share), "DATA": math.ceil(sum(files) / batch)}
    steps["FILE"] = None
    if len(files) >= workers:
        largest = max(sum(files[worker::workers]) for worker in range(workers))
        steps["FILE"] = math.ceil(largest / share)
    by_file = steps["FILE"] is not None and steps["FILE"] <= steps["DATA"]
    return steps | {"choice": "FILE" if by_file else "DATA"}
    ### END SOLUTION


# %% [markdown]
# Are the steps right, and the choice?

# %% test="12-shard"
check("12-shard")

# %% [markdown]
# ## Done?
#
# These three functions, a training loop and a scheduler that starts all processes again: that is a program for many workers. One way to solve each task is in the [solution of exercise 12](../solutions/12_multi_worker.ipynb). Compare it with yours after you have tried.
