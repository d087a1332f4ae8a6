"""Tasks of lesson 14: the bytes of a model by kind, and the layer that keeps the most."""

from __future__ import annotations

import random
from typing import Any

from ..task import Finding, Task, Wrong, describe, is_number, item

# --- 14-bytes-by-kind -------------------------------------------------------------------

# One mistake for each group of cases: the groups after "state" use SGD with momentum, whose
# state is the simplest that there is, so that a wrong rule for Adam costs nothing there.
_KINDS = ("parameters", "gradients", "optimizer state")
_BYTES_TEXTS = {
    "plain": "parameters and gradients of a plain model are right",
    "state": "the optimizer state follows the optimizer",
    "dtype": "every number has the size of its type",
    "frozen": "what is not trained has neither gradient nor state",
    "shared": "a tensor with two names counts once",
}


def _bytes_inputs(seed: int) -> list:
    rng = random.Random(seed)

    def model(*layers: tuple[str, list[int], str, bool]) -> list[dict]:
        first = rng.randrange(100, 900)
        return [
            {"name": name, "shape": shape, "dtype": dtype, "trainable": trainable, "id": first + i}
            for i, (name, shape, dtype, trainable) in enumerate(layers)
        ]

    def linear(name: str, dtype: str = "float32", trainable: bool = True) -> list[tuple]:
        out, into = rng.randint(20, 600), rng.randint(20, 600)
        weight = (f"{name}.weight", [out, into], dtype, trainable)
        return [weight, (f"{name}.bias", [out], dtype, trainable)]

    plain = model(
        *linear("hidden"), ("conv.weight", [rng.randint(3, 60), 3, 5, 5], "float32", True)
    )
    cases = [{"about": "plain", "optimizer": "sgd", "tensors": plain}]
    for optimizer in ("sgd", "sgd momentum", "adam", "adamw amsgrad"):
        cases.append({"about": "state", "optimizer": optimizer, "tensors": model(*linear("head"))})
    mixed = model(
        *linear("body", "bfloat16"),
        *linear("head", "float64"),
        *linear("gate", "float16"),
        ("scale", [], "bfloat16", True),
        ("norm.running_mean", [rng.randint(20, 90)], "float32", False),
        ("norm.num_batches_tracked", [], "int64", False),
    )
    frozen = model(*linear("backbone", trainable=False), *linear("head"))
    shared = model(*linear("embedding"), *linear("decoder"))
    shared.append({**shared[0], "name": "output.weight"})
    for about, tensors in (("dtype", mixed), ("frozen", frozen), ("shared", shared)):
        cases.append({"about": about, "optimizer": "sgd momentum", "tensors": tensors})
    return cases


def _bytes_run(student, inputs: list) -> list:
    return [student.bytes_by_kind(case["tensors"], case["optimizer"]) for case in inputs]


def _bytes_expected(inputs: list) -> list:
    """Not by a rule: real tensors and a real optimizer step, on the device that stores nothing."""
    import torch

    makers = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "sgd momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "adam": lambda params: torch.optim.Adam(params, lr=0.1),
        "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.1, amsgrad=True),
    }

    def weigh(found: Any) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in found)

    answers = []
    for case in inputs:
        made = {}
        for entry in case["tensors"]:
            tensor = torch.empty(
                entry["shape"], dtype=getattr(torch, entry["dtype"]), device="meta"
            )
            made[entry["id"]] = tensor.requires_grad_(entry["trainable"])
        trained = [tensor for tensor in made.values() if tensor.requires_grad]
        for tensor in trained:
            tensor.grad = torch.empty_like(tensor)
        optimizer = makers[case["optimizer"]](trained)
        optimizer.step()
        state = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        weights = (weigh(made.values()), weigh(t.grad for t in trained), weigh(state))
        answers.append(dict(zip(_KINDS, weights, strict=True)))
    return answers


def _miss(got: Any, want: int) -> str:
    """How a number of bytes misses, or nothing; a whole number that came as float is fine."""
    if not is_number(got):
        return f"a number of bytes was expected, not {describe(got)}"
    if got == want:
        return ""
    problem = f"too {'large' if got > want else 'small'}"
    if not 0 < got < 100 * want:
        return problem
    ratio = f"{got / want:.3f}"
    return f"{problem}, " + (
        "by a few bytes" if ratio == "1.000" else f"{ratio} times the right number"
    )


def _bytes_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_BYTES_TEXTS, "")
    for number, (case, want) in enumerate(zip(inputs, expected, strict=True)):
        answer, about = item(got, number), case["about"]
        for kind in _KINDS:
            if type(answer) is not dict:
                problem = f"a dict was expected, not {describe(answer)}"
            elif kind not in answer:
                problem = f"the dict has no key {kind!r}"
            else:
                problem = _miss(answer[kind], want[kind])
            if problem and not why[about]:
                tensors = {entry["id"]: entry["trainable"] for entry in case["tensors"]}
                where = f"{len(tensors)} tensors, {sum(tensors.values())} of them trainable"
                if kind == "optimizer state":
                    where += f", with {case['optimizer']}"
                why[about] = f"{kind} of {where}: {problem}"
    return [Finding(text, 1, why[about]) for about, text in _BYTES_TEXTS.items()]


_RULE = """
SIZES = {"float64": 8, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
TIMES = {"sgd": 0, "sgd momentum": 1, "adam": 2, "adamw amsgrad": 3}

def numbers(shape):
    n = 1
    for length in shape:
        n *= length
    return n

def bytes_by_kind(tensors, optimizer):
    total = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    for t in {t["id"]: t for t in tensors}.values():
        size = numbers(t["shape"]) * SIZES[t["dtype"]]
        total["parameters"] += size
        if t["trainable"]:
            total["gradients"] += size
            total["optimizer state"] += TIMES[optimizer] * size + COUNTER
    return total
""".replace("COUNTER", '4 * optimizer.startswith("adam")')

BYTES = Task(
    id="14-bytes-by-kind",
    title="the bytes of a model by kind",
    points=5,
    functions=("bytes_by_kind",),
    inputs=_bytes_inputs,
    run=_bytes_run,
    expected=_bytes_expected,
    judge=_bytes_judge,
    hints=(
        "Take one tensor and one optimizer, and do it by pencil. What has a gradient? What does "
        "the optimizer keep for it? Then ask which entries of the list you must not count again.",
        "Go through the entries that have an id you have not met. The size of one is the product "
        "of its shape (1 for an empty shape) times the bytes of its type. It always adds to the "
        "parameters; only if it is trainable, to the two other kinds.",
        "`size = math.prod(entry['shape']) * bytes_of[entry['dtype']]`; the state of a trainable "
        "tensor is `copies[optimizer] * size`, plus 4 for adam and adamw amsgrad; keep a set of "
        "the ids that you have met.",
    ),
    wrong=(
        Wrong(
            "four bytes for every number",
            _RULE.replace('SIZES[t["dtype"]]', "4"),
            4,
        ),
        Wrong(
            "frozen tensors have gradients and state too",
            _RULE.replace('if t["trainable"]:', "if True:"),
            3,  # the buffers among the mixed types have none either
        ),
        Wrong(
            "a shared tensor counts under each of its names",
            _RULE.replace('{t["id"]: t for t in tensors}.values()', "tensors"),
            4,
        ),
        Wrong(
            "no step counters",
            _RULE.replace('4 * optimizer.startswith("adam")', "0"),
            4,
        ),
        Wrong(
            "every optimizer keeps what Adam keeps",
            _RULE.replace("TIMES[optimizer]", "2"),
            0,
        ),
        Wrong(
            "in MiB",
            _RULE.replace("return total", "return {k: v / 2**20 for k, v in total.items()}"),
            0,
        ),
    ),
)

# --- 14-dominant-layer ------------------------------------------------------------------

_LAYER_TEXTS = {
    "plain": "the layer is found, and its bytes are right",
    "shared": "a storage that two layers keep counts for the first of them",
    "parameters": "parameters, buffers and the model's input do not count",
    "views": "a view counts with the whole storage that it keeps alive",
    "types": "other types of numbers have other sizes",
}


def _layer_inputs(seed: int) -> list:
    rng = random.Random(seed)
    batch, side = rng.randint(5, 8), 2 * rng.randint(5, 8)
    few, many = rng.randint(3, 5), rng.randint(9, 14)

    def case(about: str, shape: list[int], *layers: list, dtype: str = "float32") -> dict:
        # Names that tell nothing: the answer must come from the bytes.
        names = rng.sample("abcdefghjkmnpqrstuvwxyz", len(layers))
        named = [[name, *layer] for name, layer in zip(names, layers, strict=True)]
        return {"about": about, "shape": shape, "dtype": dtype, "layers": named}

    image, inner, after = [batch, 3, side, side], (side - 2) ** 2, ((side - 2) // 2) ** 2
    return [
        # The second convolution's output is as large as what tanh keeps, but nobody keeps it.
        case(
            "plain", image,
            ["Conv2d", 3, few, 3], ["Tanh"], ["Conv2d", few, many, 1], ["Tanh"],
            ["Flatten"], ["Linear", many * inner, 4],
        ),
        # The pooling keeps its input, which relu keeps already, and its indices (8 bytes each).
        case(
            "shared", image,
            ["Conv2d", 3, many, 3], ["ReLU", rng.random() < 0.5], ["MaxPool2d", 2],
            ["Flatten"], ["Linear", many * after, 4],
        ),
        case(
            "parameters", [batch, 300],
            ["Linear", 300, 16], ["Sigmoid"], ["Linear", 16, 400], ["Sigmoid"], ["Linear", 400, 90],
        ),
        # In training the normalisation keeps its running mean and variance too: buffers.
        case("parameters", [batch, few], ["Linear", few, 300], ["BatchNorm1d", 300]),
        # The last step of a sequence is a view: the layer after it keeps the whole sequence.
        case(
            "views", [batch, 30, 6],
            ["Linear", 6, 40], ["LastStep"], ["GELU"], ["Linear", 40, 60], ["ReLU", False],
            ["Linear", 60, 3],
        ),
        # gelu keeps its input, the pooling gelu's output and its indices.
        case(
            "types", image,
            ["Conv2d", 3, few, 3], ["GELU"], ["MaxPool2d", 2], ["Conv2d", few, 2, 1],
            ["BatchNorm2d", 2], ["Flatten"], ["Linear", 2 * after, 4], dtype="float64",
        ),
    ]  # fmt: skip


def _layer_run(student, inputs: list) -> list:
    """Build each model and ask for its heaviest layer; then see whether backward still works.

    For each model: the answer, and what the backward pass raised ("" if nothing).
    """
    from collections import OrderedDict

    import torch

    class LastStep(torch.nn.Module):
        def forward(self, x):
            return x[:, -1]

    answers = []
    for case in inputs:
        layers = OrderedDict()
        for name, kind, *arguments in case["layers"]:
            layers[name] = LastStep() if kind == "LastStep" else getattr(torch.nn, kind)(*arguments)
        dtype = getattr(torch, case["dtype"])
        model = torch.nn.Sequential(layers).to(dtype)
        x = torch.ones(case["shape"], dtype=dtype)
        results = []  # of the last layer, as often as the student calls it
        model[-1].register_forward_hook(lambda *call, results=results: results.append(call[-1]))
        answer, problem = student.dominant_layer(model, x), ""
        try:
            for result in results:
                if result.requires_grad:
                    result.sum().backward(retain_graph=True)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        answers.append([list(answer) if isinstance(answer, tuple) else answer, problem])
    return answers


def _layer_expected(inputs: list) -> list:
    """On paper: which values a layer keeps for its backward pass, from its formula.

    The derivative of tanh, sigmoid and relu is known from their output; that of a linear map,
    a convolution and a normalisation needs the input. Max pooling keeps its input and which
    places won, in whole numbers of 8 bytes.
    """
    answers = []
    for case in inputs:
        unit = {"float32": 4, "float64": 8}[case["dtype"]]
        shape, value, made = list(case["shape"]), 0, 0  # value: which storage this is, 0: input
        room = {0: 0}  # bytes of each storage; those of the input are not counted
        met, kept = {0}, {}
        for name, kind, *arguments in case["layers"]:
            before, extra = value, 0
            if kind == "Conv2d":
                shape = [shape[0], arguments[1], *(n - arguments[2] + 1 for n in shape[2:])]
            elif kind == "Linear":
                shape = [*shape[:-1], arguments[1]]
            elif kind == "MaxPool2d":
                shape = [*shape[:2], *(n // 2 for n in shape[2:])]
                extra = 8 * shape[0] * shape[1] * shape[2] * shape[3]
            elif kind in ("BatchNorm1d", "BatchNorm2d"):
                extra = 2 * unit * arguments[0]  # mean and deviation of the batch
            elif kind == "Flatten":
                shape = [shape[0], shape[1] * shape[2] * shape[3]]
            elif kind == "LastStep":
                shape = [shape[0], shape[2]]
            if kind not in ("Flatten", "LastStep") and not (kind == "ReLU" and arguments[0]):
                made += 1
                value, room[made] = made, unit
                for length in shape:
                    room[made] *= length
            uses = {"Flatten": [], "LastStep": [], "Tanh": [value], "Sigmoid": [value]}
            needed = uses.get(kind, [value] if kind == "ReLU" else [before])
            kept[name] = extra + sum(room[v] for v in needed if v not in met)
            met.update(needed)
        name = max(kept, key=lambda layer: kept[layer])
        answers.append([name, kept[name]])
    return answers


def _layer_judge(inputs: list, expected: list, got: Any) -> list[Finding]:
    why = dict.fromkeys(_LAYER_TEXTS, "")
    for number, (case, (name, size)) in enumerate(zip(inputs, expected, strict=True)):
        pair = item(got, number)
        answer, backward = pair if type(pair) is list and len(pair) == 2 else (pair, "")
        kinds = {layer[0]: layer[1] for layer in case["layers"]}
        if backward != "":
            problem = (
                f"after your hooks a backward pass fails; both must return a tensor. {backward}"
            )
        elif type(answer) is not list or len(answer) != 2:
            problem = f"a pair (name, bytes) was expected, not {describe(answer)}"
        elif type(answer[0]) is not str or answer[0] not in kinds:
            problem = "the first of the pair is not the name of one of its layers"
        elif answer[0] != name:
            bytes_too = _miss(answer[1], size) if is_number(answer[1]) else ""
            problem = f"another layer keeps more than {answer[0]} ({kinds[answer[0]]})"
            problem += f", and your bytes are {bytes_too}" if bytes_too else ""
        else:
            problem = _miss(answer[1], size)
            problem = problem and f"{name} ({kinds[name]}) is right, but its bytes are {problem}"
        if problem and not why[case["about"]]:
            layers = ", ".join(kinds.values())
            why[case["about"]] = (
                f"model {number + 1} of {len(inputs)} ({layers}; input {case['shape']}, "
                f"{case['dtype']}): {problem}"
            )
    return [Finding(text, 1, why[about]) for about, text in _LAYER_TEXTS.items()]


_WALK = """
from torch.autograd.graph import saved_tensors_hooks

def dominant_layer(model, x):
    met = {t.untyped_storage().data_ptr() for t in [x, *model.parameters(), *model.buffers()]}
    kept = {}
    for name, layer in model.named_children():
        kept[name] = 0
        def keep(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in met:
                met.add(storage.data_ptr())
                kept[name] += storage.nbytes()
            return tensor
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            x = layer(x)
    best = max(kept, key=kept.get)
    return best, kept[best]
"""

LAYER = Task(
    id="14-dominant-layer",
    title="the layer that keeps the most activations",
    points=5,
    functions=("dominant_layer",),
    inputs=_layer_inputs,
    run=_layer_run,
    expected=_layer_expected,
    judge=_layer_judge,
    hints=(
        "The output of a layer is not what it keeps: a convolution keeps its input, relu its "
        "output. You need not know that by heart. Which function of the lesson is called for "
        "every tensor that autograd keeps?",
        "Go through `model.named_children()` and call one layer at a time, each inside "
        "`saved_tensors_hooks`. In the hook look at the storage of the tensor: have you met its "
        "address? Which addresses must you know before the first layer?",
        "`met` starts with the `untyped_storage().data_ptr()` of x, of every parameter and of "
        "every buffer. In the hook: if the address is new, add it to `met`, add "
        "`untyped_storage().nbytes()` to this layer's bytes, and return the tensor.",
    ),
    wrong=(
        Wrong(
            "the layer with the largest output",
            """
def dominant_layer(model, x):
    sizes = {}
    for name, layer in model.named_children():
        x = layer(x)
        sizes[name] = x.nbytes
    best = max(sizes, key=sizes.get)
    return best, sizes[best]
""",
            0,
        ),
        Wrong(
            "the layer with the most parameters",
            """
def dominant_layer(model, x):
    sizes = {n: sum(p.nbytes for p in layer.parameters()) for n, layer in model.named_children()}
    best = max(sizes, key=sizes.get)
    return best, sizes[best]
""",
            0,
        ),
        Wrong(
            "a storage counts for each layer that keeps it",
            _WALK.replace("met.add(storage.data_ptr())", "pass"),
            4,
        ),
        Wrong(
            "parameters count as well",
            _WALK.replace("[x, *model.parameters(), *model.buffers()]", "[x]"),
            4,
        ),
        Wrong(
            "buffers count",
            _WALK.replace(", *model.buffers()", ""),
            4,
        ),
        Wrong(
            "a hook that returns nothing",  # so autograd keeps nothing, and addresses are reused
            _WALK.replace("            return tensor\n", ""),
            0,
        ),
        Wrong(
            "the bytes of the view, not of its storage",
            _WALK.replace("storage.nbytes()", "tensor.nbytes"),
            4,
        ),
        Wrong(
            "four bytes for every number",
            _WALK.replace("storage.nbytes()", "storage.nbytes() // tensor.element_size() * 4"),
            4,
        ),
        Wrong(
            "the name alone",
            _WALK.replace("return best, kept[best]", "return best"),
            0,
        ),
    ),
)

TASKS = (BYTES, LAYER)
