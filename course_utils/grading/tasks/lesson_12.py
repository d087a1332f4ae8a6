"""Tasks of lesson 12: TF_CONFIG of any cluster, who saves what where, a shard policy."""

from __future__ import annotations

import json
import random
from typing import Any

from ..task import Finding, Task, Wrong, count, describe, is_list, item

# --- 12-tf-config -----------------------------------------------------------------------


def _config_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about, hosts, per_host, jobs):
        names = [f"{rng.choice('abcdef')}{number}" for number in rng.sample(range(10, 99), hosts)]
        port = rng.randrange(2000, 9000, 100)
        return {"about": about, "hosts": names, "per_host": per_host, "jobs": jobs, "port": port}

    return [
        case("one worker a host", 2, 1, {"worker": 2}),
        case("one worker a host", 4, 1, {"worker": 4}),
        case("several tasks on a host", 2, 2, {"worker": 4}),
        case("several jobs", 5, 1, {"chief": 1, "worker": 3, "ps": 1}),
        case("several jobs", 2, 3, {"chief": 1, "worker": 3, "ps": 2}),
        case("hosts that are not full", 2, 3, {"worker": 4}),
    ]


def _config_run(student, inputs: list) -> list:
    answers = []
    for case in inputs:
        arguments = (case["hosts"], case["per_host"], case["jobs"], case["port"])
        ranks = sum(case["jobs"].values())
        answers.append([student.tf_config(*arguments, rank) for rank in range(ranks)])
    return answers


def _config_expected(inputs: list) -> list:
    answers = []
    for case in inputs:
        tasks = [(job, index) for job, n in case["jobs"].items() for index in range(n)]
        cluster: dict[str, list[str]] = {}
        for rank, (job, _) in enumerate(tasks):
            host, place = divmod(rank, case["per_host"])
            cluster.setdefault(job, []).append(f"{case['hosts'][host]}:{case['port'] + place}")
        answers.append({"cluster": cluster, "tasks": tasks})
    return answers


def _parsed(text: Any) -> tuple[Any, str]:
    """What the text says, and what is wrong with it as TF_CONFIG."""
    if type(text) is not str:
        return None, f"text was expected, not {describe(text)}"
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return None, "the text is not JSON"
    if type(config) is not dict or set(config) != {"cluster", "task"}:
        return None, "it needs the two parts cluster and task, and no other"
    if type(config["cluster"]) is not dict or type(config["task"]) is not dict:
        return None, "cluster and task must be JSON objects"
    return config, ""


def _config_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    texts = {
        "json": ("each answer is a JSON text with the parts cluster and task", 1),
        "jobs": ("the cluster has every job, with an address for each of its tasks", 1),
        "address": ("each address is the host and port of its task, and no two are alike", 2),
        "task": ("task names the job, and the index within this job", 1),
    }
    why = dict.fromkeys(texts, "")

    def note(key, problem):
        why[key] = why[key] or problem

    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        for rank, (job, index) in enumerate(want["tasks"]):
            where = f"{case['about']}, rank {rank}"
            config, problem = _parsed(item(item(got, number), rank))
            if problem:
                note("json", f"{where}: {problem}")
                continue
            cluster, task = config["cluster"], config["task"]
            lengths = {name: len(each) if is_list(each) else None for name, each in cluster.items()}
            for name in [*case["jobs"], *lengths]:
                if name not in lengths:
                    note("jobs", f"{where}: the job {name} is missing")
                elif name not in case["jobs"]:
                    note("jobs", f"{where}: there is no job {name} in this cluster")
                elif lengths[name] != case["jobs"][name]:
                    note("jobs", f"{where}: the job {name} has another number of tasks")
            addresses = [a for each in cluster.values() if is_list(each) for a in each]
            if any(type(address) is not str for address in addresses):
                note("address", f"{where}: an address is text, host:port")
            elif len(set(addresses)) < len(addresses):
                note("address", f"{where}: two tasks have the same address")
            for name, right in want["cluster"].items():
                for place, address in enumerate(right):
                    if item(cluster.get(name), place) != address:
                        note("address", f"{where}: task {place} of {name} is at another address")
            if task.get("type") != job:
                note("task", f"{where}: it is a task of another job")
            elif type(task.get("index")) is not int or task["index"] != index:
                note("task", f"{where}: its index within the job {job} is another")
    if why["json"]:
        for key in ("jobs", "address", "task"):
            why[key] = "not judged until every answer is such a text"
    return [Finding(text, points, why[key]) for key, (text, points) in texts.items()]


_TF_CONFIG = """
import json
def tf_config(hosts, per_host, jobs, port, rank):
    tasks = [(job, i) for job, n in jobs.items() for i in range(n)]
    cluster = {job: [] for job in jobs}
    for r, (job, _) in enumerate(tasks):
        cluster[job].append(f"{hosts[r // per_host]}:{port + r % per_host}")
    job, index = tasks[rank]
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
"""
TF_CONFIG = Task(
    id="12-tf-config",
    title="TF_CONFIG of any cluster",
    points=5,
    functions=("tf_config",),
    inputs=_config_inputs,
    run=_config_run,
    expected=_config_expected,
    judge=_config_judge,
    hints=(
        "The cluster part is the same on every rank. Only the task part asks who this rank is. "
        "So build the first for all ranks, then look the second up.",
        "Make a list of (job, index) for all ranks, job by job. Then go through it with "
        "enumerate: the number of a rank says how many full hosts come before it, and how many "
        "ranks come before it on its own host.",
        "`tasks = [(job, i) for job, n in jobs.items() for i in range(n)]`; for each rank r "
        "append `f'{hosts[r // per_host]}:{port + r % per_host}'` to `cluster[tasks[r][0]]` "
        "(start with `{job: [] for job in jobs}`); return `json.dumps` of both parts, with "
        "`tasks[rank]` as type and index.",
    ),
    wrong=(
        Wrong(
            "the rank as index, whatever the job",
            _TF_CONFIG.replace('"index": index', '"index": rank'),
            4,
        ),
        Wrong(
            "a job chief in every cluster",
            _TF_CONFIG.replace("{job: []", '{"chief": []} | {job: []'),
            4,
        ),
        Wrong("the rank in the port", _TF_CONFIG.replace("port + r % per_host", "port + r"), 3),
        Wrong("one port for all", _TF_CONFIG.replace("port + r % per_host", "port"), 3),
        Wrong(
            "hosts in turn",
            _TF_CONFIG.replace("r // per_host", "r % len(hosts)").replace(
                "r % per_host", "r // len(hosts)"
            ),
            3,
        ),
        Wrong("a dict, not a text", _TF_CONFIG.replace("json.dumps", ""), 0),
        Wrong(
            "workers only",
            """
import json
def tf_config(hosts, per_host, jobs, port, rank):
    n = sum(jobs.values())
    addresses = [f"{hosts[r // per_host]}:{port + r % per_host}" for r in range(n)]
    task = {"type": "worker", "index": rank}
    return json.dumps({"cluster": {"worker": addresses}, "task": task})
""",
            1,
        ),
    ),
)

# --- 12-save ----------------------------------------------------------------------------

# A task's file holds three lines: the token of the task; those of all tasks that had called
# write when the waiting ended; and those whose path was nobody else's.


def _save_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def case(about, jobs):
        cluster = {job: [f"{job}{i}:2222" for i in range(n)] for job, n in jobs.items()}
        tasks = [[job, i] for job, n in jobs.items() for i in range(n)]
        rng.shuffle(tasks)
        tokens = [f"{number:08x}" for number in rng.sample(range(16**8), len(tasks))]
        step = rng.randint(10, 999)
        return {
            **{"about": about, "cluster": cluster, "tasks": tasks},
            **{"tokens": tokens, "step": step},
        }

    return [
        case("workers only", {"worker": 2}),
        case("workers only", {"worker": 4}),
        case("a chief and workers", {"chief": 1, "worker": 3}),
        case("a chief and workers", {"worker": 2, "chief": 1}),
        case("one worker", {"worker": 1}),
    ]


def _save_run(student, inputs: list) -> list:
    """All tasks save at the same time, each in a thread; return what lies on the disk then."""
    import ctypes
    import tempfile
    import threading
    from pathlib import Path

    class Tasks:
        """The tasks of one cluster: who writes waits until each has come, or is done without."""

        def __init__(self, case, folder):
            self.case, self.folder = case, folder
            self.changed = threading.Condition()
            self.paths, self.writes, self.done, self.errors = {}, {}, set(), []

        def write(self, token, path):
            """As tf.train.Checkpoint.write: two files, whose names begin with the path."""
            path = Path(path).absolute()
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.changed:
                self.writes[token] = self.writes.get(token, 0) + 1
                self.paths.setdefault(token, path)
                self.changed.notify_all()
                self.changed.wait_for(self.complete, timeout=10)
                paths = dict(self.paths)
            alone = [t for t in paths if list(paths.values()).count(paths[t]) == 1]
            lines = [token, " ".join(sorted(paths)), " ".join(sorted(alone))]
            for end in (".index", ".data-00000-of-00001"):
                with open(f"{path}{end}", "a") as file:  # a second writer does not replace it
                    file.write("\n".join(lines) + "\n")
            return str(path)

        def complete(self):
            return len(self.paths.keys() | self.done) == len(self.case["tasks"])

        def save(self, token, job, index):
            config = {"cluster": self.case["cluster"], "task": {"type": job, "index": index}}
            try:
                checkpoint = Checkpoint(self, token)
                student.save(checkpoint, str(self.folder), config, self.case["step"])
            except BaseException as error:  # raised again when all tasks have ended
                self.errors.append(error)
            with self.changed:
                self.done.add(token)
                self.changed.notify_all()

    class Checkpoint:
        def __init__(self, tasks, token):
            self.write = lambda path: tasks.write(token, path)

    answers = []
    for case in inputs:
        with tempfile.TemporaryDirectory() as top:
            folder = Path(top) / "checkpoints"
            folder.mkdir()
            older = folder / "ckpt-1.index"
            older.write_text("older")
            tasks = Tasks(case, folder)
            threads = [
                threading.Thread(target=tasks.save, args=(token, *task), daemon=True)
                for token, task in zip(case["tokens"], case["tasks"], strict=True)
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except KeyboardInterrupt:  # only this thread hears it; a loop in another would go on
                for thread in filter(threading.Thread.is_alive, threads):
                    ident, error = ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
                raise
            if tasks.errors:
                raise tasks.errors[0]
            inside = {file for file in folder.rglob("*") if file.is_file()} - {older}
            others = {Path(f"{path}.index") for path in tasks.paths.values()} - inside
            answers.append(
                {
                    "writes": [tasks.writes.get(token, 0) for token in case["tokens"]],
                    "kept": {
                        str(file.relative_to(folder)): file.read_text(errors="replace")
                        for file in inside
                    },
                    "left": [file.read_text(errors="replace") for file in others if file.exists()],
                    "older": older.read_text(errors="replace") if older.exists() else "",
                }
            )
    return answers


def _save_expected(inputs: list) -> list:
    answers = []
    for case in inputs:
        first = ["chief" if "chief" in case["cluster"] else "worker", 0]
        answers.append(
            {
                "kept": [f"ckpt-{case['step']}{end}" for end in (".data-00000-of-00001", ".index")],
                "by": case["tokens"][case["tasks"].index(first)],
                "all": " ".join(sorted(case["tokens"])),
            }
        )
    return answers


def _records(text: str) -> list[list[str]]:
    """What a file holds: [token, all who wrote, those of them at a path of their own] a write."""
    lines = text.split("\n")
    return [(lines[i : i + 3] + ["", ""])[:3] for i in range(0, len(lines) - 1, 3)]


def _save_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    texts = {
        "all": ("every task writes once, so that none waits for the others", 2),
        "chief": ("the checkpoint in the folder is the chief's", 2),
        "paths": ("no two tasks write to the same path", 1),
        "rest": ("of the others nothing is left, and nothing older is lost", 1),
    }
    why = dict.fromkeys(texts, "")

    def note(key, problem):
        why[key] = why[key] or problem

    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, about, tasks = item(got, number), case["about"], len(case["tasks"])
        writes, kept, left = item(answer, "writes"), item(answer, "kept"), item(answer, "left")
        whole = is_list(writes, tasks) and type(kept) is dict and is_list(left)
        if not whole or any(type(text) is not str for text in [*kept.values(), *left]):
            for key in why:
                note(key, "save was not called for every task")
            continue
        written = [record for text in [*kept.values(), *left] for record in _records(text)]
        owners = [{token for token, _, _ in _records(text)} for text in kept.values()]
        if any(type(n) is not int or n != 1 for n in writes):
            missing = sum(n == 0 for n in writes)
            problem = f"{count(missing, 'task')} did not call checkpoint.write"
            note("all", f"{about}: {problem if missing else 'a task wrote more than once'}")
        elif not written:
            note("all", f"{about}: there is no file from checkpoint.write")
        elif any(all != want["all"] for _, all, _ in written):
            note("all", f"{about}: a task waited in checkpoint.write, and not all others came")
        if not kept:
            note("chief", f"{about}: there is no new file in the folder")
        elif not set(want["kept"]) <= set(kept):
            note("chief", f"{about}: there is no checkpoint of the name that was asked for")
        elif any(owner != {want["by"]} for owner in owners):
            chief = any(want["by"] in owner for owner in owners)
            whose = "not the chief's alone" if chief else "another task's"
            note("chief", f"{about}: what is in the folder is {whose}")
        if any(alone != all for _, all, alone in written):
            note("paths", f"{about}: two tasks used one path")
        if len(kept) > len(want["kept"]):
            note("rest", f"{about}: {len(kept)} new files lie in the folder, 2 belong there")
        elif left:
            note("rest", f"{about}: a task left its files in another folder")
        elif item(answer, "older") != "older":
            note("rest", f"{about}: an older checkpoint is gone, or changed")
    if why["all"] and not why["paths"]:
        why["paths"] = "not judged until all write"
    if why["all"] and not why["rest"]:
        why["rest"] = "not judged until all write"
    return [Finding(text, points, why[key]) for key, (text, points) in texts.items()]


SAVE = Task(
    id="12-save",
    title="all save, the chief's is kept",
    points=6,
    functions=("save",),
    inputs=_save_inputs,
    run=_save_run,
    expected=_save_expected,
    judge=_save_judge,
    self_reported=1,  # "rest": where the others wrote is known to the student's process alone
    hints=(
        "Two questions: is this task the chief? And where does somebody write who is not? "
        "Nobody may skip the writing.",
        "The chief is the task of the job `chief` where the cluster has one, otherwise worker "
        "0. The others write into a temporary folder of their own: `tempfile` has a context "
        "manager that makes one and removes it.",
        "`own = config['task']`; `first = 'chief' if 'chief' in config['cluster'] else "
        "'worker'`; if type is first and index is 0: `checkpoint.write(f'{folder}/ckpt-{step}')`; "
        "else `with tempfile.TemporaryDirectory() as spare:` write there.",
    ),
    wrong=(
        Wrong(
            "only the chief saves",
            """
def save(checkpoint, folder, config, step):
    task = config["task"]
    first = "chief" if "chief" in config["cluster"] else "worker"
    if (task["type"], task["index"]) == (first, 0):
        checkpoint.write(f"{folder}/ckpt-{step}")
""",
            2,
        ),
        Wrong(
            "all write the same path",
            """
def save(checkpoint, folder, config, step):
    checkpoint.write(f"{folder}/ckpt-{step}")
""",
            3,
        ),
        Wrong(
            "worker 0, though there is a chief",
            """
import tempfile
def save(checkpoint, folder, config, step):
    if config["task"] == {"type": "worker", "index": 0}:
        checkpoint.write(f"{folder}/ckpt-{step}")
    else:
        with tempfile.TemporaryDirectory() as spare:
            checkpoint.write(f"{spare}/ckpt-{step}")
""",
            4,
        ),
        Wrong(
            "index 0 of any job",
            """
import tempfile
def save(checkpoint, folder, config, step):
    if config["task"]["index"] == 0:
        checkpoint.write(f"{folder}/ckpt-{step}")
    else:
        with tempfile.TemporaryDirectory() as spare:
            checkpoint.write(f"{spare}/ckpt-{step}")
""",
            3,
        ),
        Wrong(
            "the others' files stay beside the chief's",
            """
def save(checkpoint, folder, config, step):
    task = config["task"]
    first = "chief" if "chief" in config["cluster"] else "worker"
    if (task["type"], task["index"]) == (first, 0):
        checkpoint.write(f"{folder}/ckpt-{step}")
    else:
        checkpoint.write(f"{folder}/{task['type']}-{task['index']}/ckpt-{step}")
""",
            3,
        ),
        Wrong(
            "clears the folder first",
            """
import os
import tempfile
def save(checkpoint, folder, config, step):
    first = "chief" if "chief" in config["cluster"] else "worker"
    if config["task"] == {"type": first, "index": 0}:
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))
        checkpoint.write(f"{folder}/ckpt-{step}")
    else:
        with tempfile.TemporaryDirectory() as spare:
            checkpoint.write(f"{spare}/ckpt-{step}")
""",
            5,
        ),
    ),
)

# --- 12-shard ---------------------------------------------------------------------------


def _shard_inputs(seed: int) -> list:
    rng = random.Random(seed)
    size = rng.randint(5, 9) * 4

    def case(about, files, workers, per_worker):
        return {"about": about, "files": files, "workers": workers, "batch": workers * per_worker}

    small = [rng.randint(3, 9) for _ in range(7)]
    return [
        case("equal files, as many as workers", [size] * 4, 4, 4),
        case("equal files, more than workers", [size] * 6, 3, 4),
        case("files that do not divide", [size] * 5, 2, 2),
        case("one large file", [size, size, 5 * size], 3, 4),
        case("a large file on every second place", [size, 3, size, 4, size, 5], 2, 2),
        case("fewer files than workers", [size, size], 3, 4),
        case("one file", [rng.randint(50, 90)], 2, 4),
        case("small files of all sizes", small, 2, 2),
        case("one worker", [size, 7], 1, 8),
    ]


def _shard_run(student, inputs: list) -> list:
    return [student.plan(case["files"], case["workers"], case["batch"]) for case in inputs]


def _shard_expected(inputs: list) -> list:
    """Dealt out sample by sample, as workers would read them."""
    answers = []
    for case in inputs:
        workers, own = case["workers"], case["batch"] // case["workers"]

        def steps(samples, size):
            return len(range(0, samples, size))

        read = [0] * workers
        for number, samples in enumerate(case["files"]):
            read[number % workers] += samples
        total = sum(case["files"])
        by_file = max(steps(n, own) for n in read) if len(case["files"]) >= workers else None
        by_data = steps(total, case["batch"])
        choice = "FILE" if by_file is not None and by_file <= by_data else "DATA"
        answers.append(
            {"OFF": steps(total, own), "DATA": by_data, "FILE": by_file, "choice": choice}
        )
    return answers


def _shard_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    texts = {
        "OFF": ("steps of an epoch under OFF", 1),
        "DATA": ("steps of an epoch under DATA", 1),
        "FILE": ("steps of an epoch under FILE, and None where it cannot be", 2),
        "choice": ("the choice", 1),
    }
    why = dict.fromkeys(texts, "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, number)
        for key in texts:
            value, about = item(answer, key), case["about"]
            if type(answer) is not dict:
                problem = f"a dict was expected, not {describe(answer)}"
            elif key not in answer:
                problem = f"the answer has no entry {key}"
            elif type(value) is type(want[key]) and value == want[key]:
                continue
            elif key == "choice":
                problem = f"{about}: FILE and DATA were weighed another way"
            elif type(value) is float:
                problem = f"{about}: an int was expected, not a float"
            elif want[key] is None:
                problem = f"{about}: a worker would have nothing to read"
            elif type(value) is not int:
                problem = f"{about}: a number was expected, not {describe(value)}"
            else:
                problem = f"{about}: too {'many' if value > want[key] else 'few'} steps"
            why[key] = why[key] or problem
    if why["FILE"] or why["DATA"]:
        why["choice"] = "not judged until the steps of FILE and DATA are right"
    return [Finding(text, points, why[key]) for key, (text, points) in texts.items()]


_SHARD_HEAD = """
import math
def plan(files, workers, batch):
    own, total = batch // workers, sum(files)
    off, data = math.ceil(total / own), math.ceil(total / batch)
"""
_SHARD_TAIL = """
    choice = "FILE" if file is not None and file <= data else "DATA"
    return {"OFF": off, "DATA": data, "FILE": file, "choice": choice}
"""
SHARD = Task(
    id="12-shard",
    title="a shard policy for given files and workers",
    points=5,
    functions=("plan",),
    inputs=_shard_inputs,
    run=_shard_run,
    expected=_shard_expected,
    judge=_shard_judge,
    hints=(
        "How many samples does each worker read in an epoch, and how many of them in a step? "
        "An epoch lasts as long as the worker with the most.",
        "A worker's share of a step is `batch // workers`. Under OFF a worker reads all samples in "
        "such shares; under DATA all workers together read them, a global batch a step. Under "
        "FILE add up each worker's files first, then ask who needs most steps. Round up.",
        "`own = batch // workers`; OFF `math.ceil(sum(files) / own)`; DATA "
        "`math.ceil(sum(files) / batch)`; FILE the max over w of "
        "`math.ceil(sum(files[w::workers]) / own)`, or None if `len(files) < workers`; FILE is "
        "the choice if there is such a number and it is at most DATA's.",
    ),
    wrong=(
        Wrong(
            "files in blocks",
            _SHARD_HEAD
            + """
    size = math.ceil(len(files) / workers)
    shares = [sum(files[w * size:(w + 1) * size]) for w in range(workers)]
    file = max(math.ceil(n / own) for n in shares) if len(files) >= workers else None
"""
            + _SHARD_TAIL,
            2,
        ),
        Wrong(
            "FILE as if the files were even",
            _SHARD_HEAD
            + """
    file = data if len(files) >= workers else None
"""
            + _SHARD_TAIL,
            2,
        ),
        Wrong(
            "FILE with fewer files than workers",
            _SHARD_HEAD
            + """
    file = max(math.ceil(sum(files[w::workers]) / own) for w in range(workers))
"""
            + _SHARD_TAIL,
            2,
        ),
        Wrong(
            "FILE whenever there are enough files",
            _SHARD_HEAD
            + """
    file = None
    if len(files) >= workers:
        file = max(math.ceil(sum(files[w::workers]) / own) for w in range(workers))
    choice = "FILE" if file is not None else "DATA"
    return {"OFF": off, "DATA": data, "FILE": file, "choice": choice}
""",
            4,
        ),
        Wrong(
            "without the last step that is not full",
            """
def plan(files, workers, batch):
    own, total = batch // workers, sum(files)
    file = None
    if len(files) >= workers:
        file = max(sum(files[w::workers]) // own for w in range(workers))
    choice = "FILE" if file is not None and file <= total // batch else "DATA"
    return {"OFF": total // own, "DATA": total // batch, "FILE": file, "choice": choice}
""",
            0,
        ),
        Wrong(
            "global batches under OFF",
            _SHARD_HEAD
            + """
    off, file = data, None
    if len(files) >= workers:
        file = max(math.ceil(sum(files[w::workers]) / own) for w in range(workers))
"""
            + _SHARD_TAIL,
            4,
        ),
    ),
)

TASKS = (TF_CONFIG, SAVE, SHARD)
