"""Tasks of lesson 06: four broken programs on two real ranks, and the guilty rank of a dump."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, close, describe, is_list, is_number, item

# --- 06-mend ----------------------------------------------------------------------------


def _mend_inputs(seed: int) -> dict:
    rng = random.Random(seed)
    small, large = sorted(rng.sample(range(10, 90), k=2))
    shorter = rng.randint(1, 3)
    return {
        # of each rank its batches' losses: as many samples as batches on neither rank
        "losses": [
            [[round(rng.uniform(0.1, 3) + far, 2) for _ in range(n)] for n in sizes]
            for far, sizes in ((0, (4, 4, rng.randint(1, 3))), (5, (4,)))
        ],
        # [name, value] of each rank: neither values nor insertion give both the same order
        "totals": [
            [["hits", small], ["loss", large]],
            [["loss", small + rng.randint(1, 5)], ["hits", large + rng.randint(6, 9)]],
        ],
        "pieces": [
            [[round(rng.uniform(-9, 9), 2) for _ in range(n)] for n in lengths]
            for lengths in ((shorter + rng.randint(1, 3), shorter), (0, shorter))
        ]
        + [[[0, 2**24 + 1 + 2 * small], [2**24 + 1 + 2 * large, 5, 0]]],  # whole numbers
        "steps": [rng.randint(100, 199), rng.randint(200, 299)],  # in the state of each rank
    }


def _mend_run(student, inputs: dict) -> dict:
    """Each program on two real ranks, under a deadline: its values, or how it ended."""
    import os
    import tempfile

    from course_utils.launch import RankError, launch

    def in_group(program, given, notes):
        import threading

        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, ended = dist.get_rank(), threading.Event()

        def watch():
            """Leave if the other rank returned 2 seconds ago: nobody will answer this one."""
            while not os.path.exists(os.path.join(notes, f"{1 - rank} returned")):
                if ended.wait(0.05):
                    return
            if not ended.wait(2):
                open(os.path.join(notes, f"{rank} waits alone"), "x").close()
                os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
        value = program(rank, given)
        ended.set()
        open(os.path.join(notes, f"{rank} returned"), "x").close()
        return value

    def mean_loss(rank, losses):
        import torch

        return function([torch.tensor(batch, dtype=torch.float64) for batch in losses[rank]])

    def sum_totals(rank, totals):
        import torch

        # Names of one length, whose order in a set is that of insertion, as under hash seeds
        # of their own.
        order = lambda *names: list(set(names))  # noqa: E731
        pairs = ((f"loss {i}", f"hits {j}") for i in range(10, 50) for j in range(10, 50))
        loss, hits = next((a, b) for a, b in pairs if order(a, b) != order(b, a))
        real = {"loss": loss, "hits": hits}
        sums = function({real[name]: torch.tensor([float(value)]) for name, value in totals[rank]})
        short = {name: key for key, name in real.items()}
        return {short.get(name, str(name)): float(total) for name, total in sums.items()}

    def gather_all(rank, cases):
        import torch

        kinds = (torch.float64, torch.float64, torch.int64)
        pairs = zip(cases, kinds, strict=True)
        return [function(torch.tensor(case[rank], dtype=kind)).tolist() for case, kind in pairs]

    def save(rank, given):
        folder, steps = given
        return [save_once(rank, late, os.path.join(folder, f"{late}.pt"), steps) for late in (0, 1)]

    def save_once(rank, late, path, steps):
        import sys
        import time

        import torch

        seen = {"half": False, "gone": False, "wrote": []}  # and which other files beside it

        def contents():
            if not os.path.exists(path):
                return None
            with open(path, "rb") as file:
                return file.read()

        class Reading:  # while it is pickled, somebody reads the path
            def __reduce__(self):
                now = contents()
                seen["half"] |= now not in (None, old)
                seen["gone"] |= now is None
                time.sleep(0.05)
                return float, (0.0,)

        def note(file):
            if watching and isinstance(file, (str, bytes, os.PathLike)):
                file = os.path.abspath(os.fsdecode(file))
                if file != path and os.path.dirname(file) == os.path.dirname(path):
                    seen["wrote"].append(os.path.basename(file))

        def noted_save(state, file, *args, **kwargs):  # it opens its file in compiled code
            note(file)
            return plain_save(state, file, *args, **kwargs)

        def audit(event, arguments):
            if event == "open" and any(letter in (arguments[1] or "") for letter in "wa+"):
                note(arguments[0])
            if event not in ("os.remove", "os.rename", "open") or not watching:
                return
            if not isinstance(arguments[0], (str, bytes, os.PathLike)):
                return
            if os.path.abspath(os.fsdecode(arguments[0])) != path:
                return
            if event == "open":
                mode = arguments[1] or ""
                seen["half"] |= any(letter in mode for letter in "wa+")
            else:
                seen["gone"] = True

        old, watching = contents(), [True]
        sys.addaudithook(audit)
        torch.distributed.barrier()  # so late is late
        if rank == late:
            time.sleep(0.2)
        plain_save, torch.save = torch.save, noted_save
        names = function.__globals__  # `from torch import save as write` took it before
        for name in [name for name, value in names.items() if value is plain_save]:
            names[name] = noted_save
        try:
            function({"step": steps[rank], "slow": Reading()}, path)
        finally:
            torch.save = plain_save
            watching.clear()
        try:
            step = torch.load(path, weights_only=False)["step"]
        except Exception as error:
            step = f"cannot be read: {type(error).__name__}"
        folder, name = os.path.split(path)
        files = [file for file in os.listdir(folder) if file.startswith(name)]
        return {"step": step, **seen, "files": len(files)}

    answers = {}
    for program in (mean_loss, sum_totals, gather_all, save):
        name = program.__name__
        function = getattr(student, name)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as notes:
            folder = os.path.realpath(folder)
            given = inputs.get({"mean_loss": "losses", "sum_totals": "totals"}.get(name, "pieces"))
            if name == "save":
                import torch

                for name_of in ("0.pt", "1.pt"):  # of an earlier save
                    torch.save({"step": 1}, os.path.join(folder, name_of))
                given = [folder, inputs["steps"]]
            try:
                values = launch(
                    in_group, 2, program, given, notes, init=False, timeout=20, oversubscribe=True
                )
                if name == "save":  # did both ranks write the same file beside the path?
                    for pair in zip(*values, strict=True):
                        first, second = (set(saved.pop("wrote")) for saved in pair)
                        for saved in pair:
                            saved["twice"] = not first.isdisjoint(second)
                answers[name] = {"values": values}
            except RankError as error:  # LaunchTimeout is one too
                first = next(iter(error.message.splitlines()), "")
                answers[name] = {"ended": error.type_name, "rank": error.rank, "says": first[:160]}
            for note in os.listdir(notes):
                if note.endswith("alone"):
                    answers[name] = {"ended": "waits alone", "rank": int(note[0])}
    if all(answer.get("ended") == "NotImplementedError" for answer in answers.values()):
        raise NotImplementedError
    return answers


def _mend_expected(inputs: dict) -> dict:
    """What the two ranks must return, without any message between them."""
    first, second = (dict(pairs) for pairs in inputs["totals"])
    sums = {name: first[name] + second[name] for name in ("hits", "loss")}
    flat = [[x for batch in rank for x in batch] for rank in inputs["losses"]]
    samples = flat[0] + flat[1]
    joined = [[x for piece in case for x in piece] for case in inputs["pieces"]]
    return {
        "mean_loss": [sum(samples) / len(samples)] * 2,
        "sum_totals": [sums, sums],
        "gather_all": [joined, joined],
        "save": [[inputs["steps"][0]] * 2] * 2,  # for each rank: twice, and each is late once
    }


def _same(got: Any, want: Any) -> bool:
    if is_number(want):
        return close(got, want, relative=1e-6)
    if type(want) is dict:
        return (
            type(got) is dict
            and set(got) == set(want)
            and all(_same(got[key], want[key]) for key in want)
        )
    if type(want) is list:
        return is_list(got, len(want)) and all(map(_same, got, want))
    return type(got) is type(want) and got == want


def _ended(answer: Any) -> str:
    """Why there are no values, in words; empty when there are two of them."""
    kind = item(answer, "ended")
    if kind == "LaunchTimeout":
        return "the two ranks had not ended after 20 seconds: does each make every collective?"
    if kind == "waits alone" and item(answer, "rank") in (0, 1):
        return f"rank {item(answer, 'rank')} went on waiting after the other rank had returned"
    if kind == "NotImplementedError":
        return "not attempted yet"
    if type(kind) is str:
        which = item(answer, "rank")
        rank = f"rank {which}" if which in (0, 1) and type(which) is int else "a rank"
        says = item(answer, "says")
        return f"{rank} ended with {kind[:40]}" + (f": {says[:160]}" if type(says) is str else "")
    if not is_list(item(answer, "values"), 2):
        return f"two ranks' values were expected, not {describe(answer)}"
    return ""


def _mean_why(got: list, want: list) -> str:
    for rank in (0, 1):
        if not is_number(got[rank]):
            return f"rank {rank} must return the mean as a number, not {describe(got[rank])}"
        if not _same(got[rank], want[rank]):
            return f"on rank {rank} the mean is wrong: does each sample weigh the same?"
    return ""


def _totals_why(got: list, want: list) -> str:
    for rank in (0, 1):
        if _same(got[rank], want[rank]):
            continue
        if type(got[rank]) is not dict or set(got[rank]) != set(want[rank]):
            return f"rank {rank} must return a dict with the same names as it was given"
        halves = {name: total / 2 for name, total in want[rank].items()}
        if _same(got[rank], halves):
            return f"rank {rank} returns means over the ranks; sums were asked for"
        return f"on rank {rank} a sum is wrong: does each hold the totals of its own name only?"
    return ""


def _gather_why(got: list, want: list) -> str:
    for rank in (0, 1):
        for number, words in enumerate(("of two lengths", "with none on rank 0", "of int64")):
            mine, whole = item(got[rank], number), want[rank][number]
            if is_list(mine, len(whole)) and mine == whole:  # copied: exact
                continue
            if is_list(mine) and len(mine) != len(whole):
                size = "few" if len(mine) < len(whole) else "many"
                return f"pieces {words}: rank {rank} has too {size} values"
            return f"pieces {words}: rank {rank} does not have all values in order of rank"
    return ""


def _save_why(got: list, want: list) -> str:
    for rank in (0, 1):
        for late in (0, 1):
            saved, words = item(got[rank], late), f"when rank {late} comes late, "
            step = item(saved, "step")
            if not _same(step, want[rank][late]):
                if type(step) is str:
                    return f"{words}rank {rank} cannot read the file after `save` has returned"
                if step == 1:
                    return f"{words}rank {rank} has returned while the file is still the old one"
                return f"{words}rank {rank} does not read the state of rank 0"
            if not _same(item(saved, "files"), 1):
                return f"{words}there is more than one file whose name begins with that of `path`"
    return ""


def _mend_judge(inputs: dict, expected: dict, got: Any) -> list[Finding]:
    words = {
        "mean_loss": "mean_loss: both ranks return the mean over all samples",
        "sum_totals": "sum_totals: each name has its own sum, on both ranks",
        "gather_all": "gather_all: both ranks have all values, in order of rank",
        "save": "save: when it returns, each rank reads the state of rank 0, whole",
    }
    whys = (_mean_why, _totals_why, _gather_why, _save_why)
    findings, ended = [], ""
    for (name, text), why_of in zip(words.items(), whys, strict=True):
        answer, points = item(got, name), 1 if name == "save" else 2
        ended = _ended(answer)
        why = ended or why_of(item(answer, "values"), expected[name])
        findings.append(Finding(text, points, why))
    torn = ended or ("not judged until the line above holds" if findings[-1].why else "")
    saved = item(item(got, "save"), "values")
    pairs = [item(item(saved, rank), late) for rank in (0, 1) for late in (0, 1)]
    if not torn and any(item(pair, "half") is not False for pair in pairs):
        torn = "the path was written in place: who reads it meanwhile finds half a file"
    if not torn and any(item(pair, "gone") is not False for pair in pairs):
        torn = "for a moment there was no file at the path, neither the old one nor the new one"
    if not torn and any(item(pair, "twice") is not False for pair in pairs):
        torn = "both ranks write a file of one name: one may rename what is half written"
    text = "save: who reads the path meanwhile finds the old state or the new one"
    return [*findings, Finding(text, 1, torn)]


_BROKEN = {
    "mean_loss": """
import torch
import torch.distributed as dist
def mean_loss(batches):
    total = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        both = torch.tensor([batch.sum(), len(batch)], dtype=torch.float64)
        dist.all_reduce(both)
        total += both
    return float(total[0] / total[1])
""",
    "sum_totals": """
import torch.distributed as dist
def sum_totals(totals):
    for name in sorted(totals, key=lambda name: totals[name].item()):
        dist.all_reduce(totals[name])
    return totals
""",
    "gather_all": """
import torch
import torch.distributed as dist
def gather_all(mine):
    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, mine)
    return torch.cat(pieces)
""",
    "save": """
import torch
def save(state, path):
    torch.save(state, path)
""",
}
_WHOLE = {
    "mean_loss": """
import torch, torch.distributed as dist
def mean_loss(batches):
    mine = [None, None]
    dist.all_gather_object(mine, [x for batch in batches for x in batch.tolist()])
    return sum(mine[0] + mine[1]) / len(mine[0] + mine[1])
""",
    "sum_totals": """
import torch, torch.distributed as dist
def sum_totals(totals):
    names = sorted(totals)
    one = torch.cat([totals[n] for n in names])
    dist.all_reduce(one)
    return dict(zip(names, one))
""",
    "gather_all": """
import torch, torch.distributed as dist
def gather_all(mine):
    lists = [None, None]
    dist.all_gather_object(lists, mine.tolist())
    return torch.tensor(lists[0] + lists[1], dtype=mine.dtype)
""",
    "save": """
import os, torch, torch.distributed as dist
def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()
""",
}

MEND = Task(
    id="06-mend",
    title="mend four broken programs",
    points=8,
    functions=("mean_loss", "sum_totals", "gather_all", "save"),
    inputs=_mend_inputs,
    run=_mend_run,
    expected=_mend_expected,
    judge=_mend_judge,
    hints=(
        "Ask of each program: does every rank make the same collectives, in the same order, "
        "with the same shapes? And of the last one: who writes, who reads, and when?",
        "mean_loss: how many collectives does a rank with three batches make? sum_totals: which "
        "order is the same on every rank? gather_all: what must each rank know before it can make "
        "room? save: one writer, another name until it is whole, and nobody goes on before.",
        "mean_loss: one all_reduce of [sum, count], after the loop. sum_totals: `sorted(totals)`. "
        "gather_all: gather the lengths, pad to `max(lengths)`, gather, cut each piece to its "
        "length. save: `os.replace(path + '.new', path)` on rank 0, then `dist.barrier()` on both.",
    ),
    wrong=(
        Wrong("as they were", "".join(_BROKEN.values()), 0),
        Wrong(
            "sums in the order of insertion, nobody waits for the save",
            _WHOLE["mean_loss"]
            + """
import torch.distributed as dist
def sum_totals(totals):
    for name in totals:
        dist.all_reduce(totals[name])
    return totals
"""
            + _WHOLE["gather_all"]
            + """
import os, torch, torch.distributed as dist
def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)
""",
            4,
        ),
        Wrong(
            "the mean of the ranks' means, pieces cut to the shorter one, saved in place",
            """
import torch, torch.distributed as dist
def mean_loss(batches):
    mean = torch.cat(batches).mean()
    dist.all_reduce(mean)
    return mean.item() / 2
"""
            + _WHOLE["sum_totals"]
            + """
import torch, torch.distributed as dist
def gather_all(mine):
    length = torch.tensor([len(mine)])
    dist.all_reduce(length, op=dist.ReduceOp.MIN)
    mine = mine[: int(length)]
    pieces = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(pieces, mine)
    return torch.cat(pieces)
"""
            + """
import torch, torch.distributed as dist
def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
""",
            3,
        ),
        Wrong(
            "pads, and forgets to cut; each rank saves and renames",
            _WHOLE["mean_loss"]
            + _WHOLE["sum_totals"]
            + """
import torch, torch.distributed as dist
def gather_all(mine):
    longest = torch.tensor([len(mine)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = torch.nn.functional.pad(mine, (0, int(longest) - len(mine)))
    pieces = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(pieces, mine)
    return torch.cat(pieces)
import os
def save(state, path):
    torch.save(state, f"{path}.{dist.get_rank()}")
    os.replace(f"{path}.{dist.get_rank()}", path)
    dist.barrier()
""",
            4,
        ),
        Wrong(
            "a set's order, zeros taken for padding, the old file removed first",
            _WHOLE["mean_loss"]
            + """
import torch.distributed as dist
def sum_totals(totals):
    for name in set(totals):
        dist.all_reduce(totals[name])
    return totals
"""
            + """
import torch, torch.distributed as dist
def gather_all(mine):
    longest = torch.tensor([len(mine)])
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    mine = torch.nn.functional.pad(mine, (0, int(longest) - len(mine)))
    pieces = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(pieces, mine)
    return torch.cat([piece[piece != 0] for piece in pieces])
import os
def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, path + ".new")
        os.remove(path)
        os.rename(path + ".new", path)
    dist.barrier()
""",
            3,
        ),
        Wrong(
            "in order of the names' lengths; both ranks write one temporary file",
            _WHOLE["mean_loss"]
            + """
import torch.distributed as dist
def sum_totals(totals):
    for name in sorted(totals, key=len):
        dist.all_reduce(totals[name])
    return totals
"""
            + _WHOLE["gather_all"]
            + """
import os, time, torch.distributed as dist
from torch import save as write
def save(state, path):
    box = [state]
    dist.broadcast_object_list(box)
    time.sleep(0.5 * dist.get_rank())  # hopes that the other has done by then
    write(box[0], path + ".new")
    os.replace(path + ".new", path)
    dist.barrier()
""",
            5,
        ),
    ),
)

# --- 06-guilty --------------------------------------------------------------------------

# What four real ranks of a program train.py said at the deadline (torch 2.13.0, gloo), or
# when they raised; the label "rank r" in front is taken off. First that of the guilty rank,
# then those of the three others. Each draw puts them into another order.


def _waits(call: str, line: int, own: list[str], end: int) -> str:
    """The stack of a rank in a collective, as `launch` prints it."""
    frames = "".join(f"  {text}\n" for text in own)
    return (
        f"waits in {call}, line {line} of train.py\n{frames}"
        '  File "torch/distributed/c10d_logger.py", line 83, in wrapper\n'
        "    return func(*args, **kwargs)\n"
        f'  File "torch/distributed/distributed_c10d.py", line {end}, in {call}\n'
        "    work.wait()"
    )


def _in_average(line: int, caller: str) -> str:
    own = [
        f'File "train.py", line {line}, in {caller}',
        "  average(read_batch(dist.get_rank()))",
        'File "train.py", line 14, in average',
        "  dist.all_reduce(gradient)",
    ]
    return _waits("all_reduce", 14, own, 3252)


_RETURNED = "has returned and waits for the others"
_LOST = (
    "raised RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:{}: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the "
    "application. Check the logs of the remote worker before reporting an error.",
    "raised RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:{}. This is typically caused by a remote worker crashing. Check the logs of "
    "the remote worker before reporting an error.",
)
_LATE = (
    "raised RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms "
    "for recv operation to complete",
    "raised RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 2000ms "
    "for send operation to complete",
)
_DUMPS = {
    "has left the loop": [_RETURNED, *[_in_average(22, "train")] * 3],
    "has one batch more": [_in_average(22, "train"), *[_RETURNED] * 3],
    "is in another collective": [
        _waits(
            "broadcast",
            28,
            ['File "train.py", line 28, in validate', "  dist.broadcast(gradient, src=0)"],
            3151,
        ),
        *[_in_average(29, "train")] * 3,
    ],
    "raised first": [
        "raised KeyError: 'image_17'",
        _LOST[0].format(46762),
        _LOST[0].format(22740),
        _LOST[1].format(1161),
    ],
    "is stuck in its data": [
        "is in read_batch, line 9 of train.py\n"
        '  File "train.py", line 54, in train\n'
        "    average(read_batch(dist.get_rank()))\n"
        '  File "train.py", line 9, in read_batch\n'
        "    time.sleep(0.1)",
        _LATE[0],
        _LATE[0],
        _LATE[1],
    ],
}


# The guilty rank's own error may have the type of the victims' errors.
_OWN_ERROR = (
    "raised RuntimeError: The size of tensor a (3) must match the size of tensor b (2) at "
    "non-singleton dimension 0"
)


def _guilty_inputs(seed: int) -> list:
    rng = random.Random(seed)
    cases = []
    for kind, (guilty, *others) in _DUMPS.items():
        places = rng.sample(range(4), k=3)  # so no fixed answer is right for a kind
        for number, place in enumerate(places):
            dumps = rng.sample(others, k=3)
            own = number and kind == "raised first"
            dumps.insert(place, _OWN_ERROR if own else guilty)
            cases.append({"kind": kind, "dumps": dumps})
    rng.shuffle(cases)
    return cases


def _guilty_run(student, inputs: list) -> list:
    return [student.guilty_rank(list(case["dumps"])) for case in inputs]


def _guilty_expected(inputs: list) -> list:
    ranks = []
    for case in inputs:
        others = _DUMPS[case["kind"]][1:]
        ranks.append(next(r for r, dump in enumerate(case["dumps"]) if dump not in others))
    return ranks


def _guilty_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_DUMPS, "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer = item(got, number)
        if type(answer) is int and answer == want:
            continue
        if type(answer) is not int or not 0 <= answer < 4:
            problem = f"a rank from 0 to 3 was expected, not {describe(answer)}"
        else:
            head = case["dumps"][answer].partition("\n")[0].partition(":")[0]
            problem = f"you named one whose dump begins with '{head}'"
        why[case["kind"]] = why[case["kind"]] or problem
    return [Finding(f"the rank that {kind} is named", 1, why[kind]) for kind in _DUMPS]


GUILTY = Task(
    id="06-guilty",
    title="name the guilty rank from its dumps",
    points=5,
    functions=("guilty_rank",),
    inputs=_guilty_inputs,
    run=_guilty_run,
    expected=_guilty_expected,
    judge=_guilty_judge,
    hints=(
        "Three of the four ranks suffer from the same thing. In which words do they say that "
        "they wait for somebody, or have lost or missed somebody?",
        "Call an error that speaks of a peer ('Connection', 'Timed out') the error of a victim. "
        "If some ranks are victims by that rule, the guilty one is the rank that is not. If "
        "nobody raised, compare the first lines: three are equal.",
        "`victims = ['Connection' in d or 'Timed out' in d for d in dumps]`; if any, return "
        "`victims.index(False)`. Otherwise take `heads = [d.splitlines()[0] for d in dumps]` and "
        "return the index of the head that is there once.",
    ),
    wrong=(
        Wrong(
            "the one whose first line is there once",
            """
def guilty_rank(dumps):
    heads = [dump.splitlines()[0] for dump in dumps]
    return next(r for r, head in enumerate(heads) if heads.count(head) == 1)
""",
            3,
        ),
        Wrong(
            "the first that raised",
            """
def guilty_rank(dumps):
    return next((r for r, dump in enumerate(dumps) if dump.startswith("raised")), 0)
""",
            0,
        ),
        Wrong(
            "the one that does not wait",
            """
def guilty_rank(dumps):
    for rank, dump in enumerate(dumps):
        if "waits in" not in dump and "Connection" not in dump and "Timed out" not in dump:
            return rank
    return 0
""",
            3,
        ),
        Wrong(
            "the one whose first twenty letters are there once",
            """
def guilty_rank(dumps):
    heads = [dump[:20] for dump in dumps]
    return next((r for r, head in enumerate(heads) if heads.count(head) == 1), 0)
""",
            4,
        ),
        Wrong("always rank 0", "\ndef guilty_rank(dumps):\n    return 0\n", 0),
    ),
)

TASKS = (MEND, GUILTY)
