"""The batch-size search: few trials, the true maximum, and a model that nobody has touched.

All models are small, all limits a budget's: the same figures on every machine. The true maximum
is found by trying, with a loop of its own.
"""

import copy
import math
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_utils import memory, plots
from course_utils.batch_size import DoesNotFit, find_batch_size, throughput
from course_utils.launch import launch
from course_utils.memory import KiB, MiB


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def mlp(width=32, features=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 4))


def convolutional(batchnorm=False):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8) if batchnorm else nn.Identity()
    layers = [nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(4)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 4 * 4, 4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.out = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def batches(*shape):
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 4, (n,)))


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def runs(model, optimizer, make_batch, loss_fn, n, limit):
    """Whether n samples really train twice within the limit; in other words than the helper's."""
    model, state = copy.deepcopy(model), None
    optimizer = type(optimizer)(model.parameters(), lr=0.01)
    try:
        with memory.meter(model, optimizer, limit=limit):
            state = make_batch(n)
            for _ in range(2):
                optimizer.zero_grad()
                loss_fn(model, state).backward()
                optimizer.step()
    except torch.OutOfMemoryError:
        return False
    return True


def bits(model, optimizer):
    """Everything that must be as before, in a form that `==` compares bit by bit."""

    def raw(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.shape, value.detach().numpy().tobytes(), id(value)
        return value

    return (
        [(n, raw(p), raw(p.grad), p.requires_grad) for n, p in model.named_parameters()],
        [(n, raw(b)) for n, b in model.named_buffers()],
        [(n, m.training) for n, m in model.named_modules()],
        [{k: raw(v) for k, v in state.items()} for state in optimizer.state.values()],
        [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        [[id(p) for p in g["params"]] for g in optimizer.param_groups],
        torch.get_rng_state().tolist(),
        [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
        random.getstate(),
    )


MODELS = {
    "MLP, parameters decide": (lambda: mlp(400), (16,), 2),
    "MLP": (mlp, (16,), 40),
    "CNN": (convolutional, (3, 16, 16), 12),
    "CNN with BatchNorm": (lambda: convolutional(True), (3, 16, 16), 12),
    "LSTM": (Recurrent, (10, 8), 8),
}


@pytest.mark.parametrize("make_optimizer", [adam, sgd])
@pytest.mark.parametrize("name", MODELS)
def test_finds_the_true_maximum_in_few_trials(name, make_optimizer):
    make_model, shape, times = MODELS[name]
    model = make_model()
    optimizer, make_batch = make_optimizer(model), batches(*shape)
    limit = times * find_batch_size(model, optimizer, make_batch, cross_entropy, max_batch=1).peak
    found = find_batch_size(model, optimizer, make_batch, cross_entropy, limit=limit)
    assert len(found.trials) <= 4
    assert found.peak <= limit
    setting = (model, optimizer, make_batch, cross_entropy)
    assert runs(*setting, found.batch_size, limit)
    assert not runs(*setting, int(found.batch_size / 0.95) + 1, limit), "less than 95 %"


def test_the_answer_ran_twice_with_forward_backward_and_step():
    model, ran = mlp(), []
    optimizer = adam(model)

    def loss_fn(model, batch):
        ran.append(["forward", len(batch[0])])
        loss = cross_entropy(model, batch)
        loss.register_hook(lambda grad: ran[-1].append("backward"))
        return loss

    optimizer.register_step_post_hook(lambda *_: ran[-1].append("step"))
    for max_batch in (None, 77):
        ran.clear()
        found = find_batch_size(
            model, optimizer, batches(16), loss_fn, limit=MiB, max_batch=max_batch
        )
        assert ran.count(["forward", found.batch_size, "backward", "step"]) == 2


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 4, 9])
def test_the_smallest_sizes(largest):
    model = convolutional()
    setting = (model, sgd(model), batches(3, 16, 16), cross_entropy)
    peak = [find_batch_size(*setting, max_batch=n).peak for n in (1, largest or 1)][1]
    if largest:
        assert find_batch_size(*setting, limit=peak).batch_size == largest
    else:
        with pytest.raises(DoesNotFit, match=r"a batch of 1 does not.*parameters [\d.]+ KiB"):
            find_batch_size(*setting, limit=peak - 1)


def test_a_model_above_the_limit_is_told_so():
    model = mlp(400)
    with pytest.raises(DoesNotFit, match="Raise the limit"):
        find_batch_size(model, adam(model), batches(16), cross_entropy, limit=KiB)


def test_batchnorm_that_needs_two_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 512), nn.BatchNorm1d(512), nn.Linear(512, 4))
    setting = (model, sgd(model), batches(16), cross_entropy)
    peak = find_batch_size(*setting, max_batch=2).peak
    assert find_batch_size(*setting, limit=peak).batch_size == 2
    before = bits(model, setting[1])
    with pytest.raises(DoesNotFit, match="a batch of 2 does not fit"):
        find_batch_size(*setting, limit=peak - 1)
    assert bits(model, setting[1]) == before


def test_adams_state_is_counted_though_it_does_not_exist_yet():
    model = mlp(400)
    found = find_batch_size(model, adam(model), batches(16), cross_entropy, max_batch=8)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.peak >= 4 * weights  # parameters, gradients, two averages
    with_sgd = find_batch_size(model, sgd(model), batches(16), cross_entropy, max_batch=8)
    assert found.peak >= with_sgd.peak + 2 * weights


def test_memory_that_grows_with_the_square_of_the_batch():
    model = mlp()
    optimizer = sgd(model)

    def contrastive(model, batch):
        out = F.normalize(model(batch[0]))
        return (out @ out.T).exp().mean()

    setting = (model, optimizer, batches(16), contrastive)
    found = find_batch_size(*setting, limit=4 * MiB)
    assert len(found.trials) <= 6
    assert runs(*setting, found.batch_size, 4 * MiB)
    assert not runs(*setting, 2 * found.batch_size, 4 * MiB)


def test_other_operations_at_another_size():
    model = mlp()

    def loss_fn(model, batch):
        parts = [model(part) for part in batch[0].split(10)]  # more operations for more samples
        return F.cross_entropy(torch.cat(parts), batch[1])

    setting = (model, adam(model), batches(16), loss_fn)
    found = find_batch_size(*setting, limit=MiB)
    assert len(found.trials) <= 6
    assert runs(*setting, found.batch_size, MiB)
    assert not runs(*setting, int(1.2 * found.batch_size), MiB)


def test_headroom_max_batch_and_data_that_ends():
    model = mlp()
    setting = (model, adam(model), batches(16), cross_entropy)
    full = find_batch_size(*setting, limit=MiB)
    half = find_batch_size(*setting, limit=MiB, headroom=0.5)
    assert half.peak <= 0.5 * MiB < full.peak
    assert half.batch_size < full.batch_size
    assert find_batch_size(*setting, limit=MiB, max_batch=100).batch_size == 100

    data = batches(16)(150)
    found = find_batch_size(
        model, setting[1], lambda n: (data[0][:n], data[1][:n]), cross_entropy, limit=MiB
    )
    assert found.batch_size == 150
    assert found.trials[-1].batch_size == 150 and "no more" in found.stopped


# ---------------------------------------------------------------- as before


class Foreign(Exception):
    pass


def used(stage):
    """A model with everything that a step changes; `stage` says how much it has lived."""
    model = convolutional(batchnorm=True)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1
    )
    if stage == "trained":
        for _ in range(2):
            cross_entropy(model, batches(3, 16, 16)(5)).backward()
            optimizer.step()
        model[1].weight.grad = None  # some have a gradient, some have none
        model[3].eval()
    else:
        model.eval()
    return model, optimizer


@pytest.mark.parametrize("stage", ["new", "trained"])
@pytest.mark.parametrize("end", ["success", "oom", "interrupt", "foreign"])
def test_all_is_bitwise_as_before(end, stage):
    model, optimizer = used(stage)
    before = bits(model, optimizer)
    calls = []

    def make_batch(n):
        random.random(), numpy.random.rand()
        return batches(3, 16, 16)(n)

    def loss_fn(model, batch):
        calls.append(0)
        loss = cross_entropy(model, batch)
        if len(calls) == 4 and end in ("interrupt", "foreign"):
            optimizer.param_groups[0]["lr"] = 5.0
            model[0].weight.requires_grad_(False)
            raise KeyboardInterrupt if end == "interrupt" else Foreign
        return loss

    error = {"oom": DoesNotFit, "interrupt": KeyboardInterrupt, "foreign": Foreign}.get(end)
    limit = 32 * KiB if end == "oom" else MiB
    arguments = (model, optimizer, make_batch, loss_fn)
    if error is None:
        assert find_batch_size(*arguments, limit=limit).batch_size > 1
    else:
        with pytest.raises(error):
            find_batch_size(*arguments, limit=limit)
    assert calls
    assert bits(model, optimizer) == before


def test_a_scheduler_does_not_learn_of_the_trials():
    model = mlp()
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int))}
    find_batch_size(model, optimizer, batches(16), cross_entropy, max_batch=4)
    assert {k: v for k, v in vars(optimizer).items() if isinstance(v, (bool, int))} == before


def test_gradients_that_exist_count():
    model = mlp(400)
    setting = (model, sgd(model), batches(16), cross_entropy)
    without = find_batch_size(*setting, limit=MiB).batch_size
    cross_entropy(model, batches(16)(4)).backward()
    assert find_batch_size(*setting, limit=MiB).batch_size < without


# ---------------------------------------------------------------- what it says


def test_the_answer_reads_as_a_table_and_plots():
    model = convolutional()
    limit = find_batch_size(model, sgd(model), batches(3, 16, 16), cross_entropy, max_batch=2).peak
    found = find_batch_size(model, sgd(model), batches(3, 16, 16), cross_entropy, limit=limit)
    text = repr(found)
    assert "predicted" in text and "out of memory in" in text and "stopped: 3 does not" in text
    assert "the limit you gave" in text
    figure = found.plot()
    labels = [line.get_label() for line in figure.axes[0].lines]
    phases = ["measured: forward, backward", "measured: optimizer's step"]
    assert labels == ["prediction of the highest peak", *phases, "out of memory", "limit"]
    plots._checked_title(figure), plots._check_axes(figure)
    assert found.predict(found.batch_size) == found.peak


def test_the_prediction_of_the_last_trial_is_what_is_measured():
    model = mlp()
    found = find_batch_size(model, adam(model), batches(16), cross_entropy, limit=2 * MiB)
    last = found.trials[-1]
    assert last.predicted == last.measured
    assert set(last.phases) == {"forward", "backward", "step"}


def test_without_a_limit_it_says_where_the_limit_is_from():
    model = mlp()
    found = find_batch_size(model, sgd(model), batches(16), cross_entropy, max_batch=8)
    assert found.batch_size == 8 and "free" in found.limit_from and found.limit_from in repr(found)


def test_throughput_restores_and_finds_the_smallest_good_size():
    model, optimizer = used("trained")
    before = bits(model, optimizer)
    curve = throughput(model, optimizer, batches(3, 16, 16), cross_entropy, largest=12, rounds=3)
    assert bits(model, optimizer) == before
    assert sorted(curve.timings) == [1, 2, 4, 8, 12] and curve.largest == 12
    assert all(len(timing.runs) == 3 for timing in curve.timings.values())
    assert curve.rate(curve.smallest) >= 0.95 * curve.rate(curve.best)
    smaller = [n for n in curve.timings if n < curve.smallest]
    assert all(curve.rate(n) < 0.95 * curve.rate(curve.best) for n in smaller)
    assert "samples/s" in repr(curve)
    plots._check_axes(curve.plot())


# ---------------------------------------------------------------- arguments that make no sense


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"headroom": 1.0}, ValueError, "headroom"),
        ({"max_batch": 0}, ValueError, "max_batch"),
        ({"limit": 0}, ValueError, "limit"),
        ({"loss_fn": lambda model, batch: model(batch[0])}, TypeError, "mean loss"),
        ({"make_batch": lambda n: batches(16)(7)}, ValueError, r"make_batch\(2\) gave 7"),
    ],
)
def test_bad_arguments(change, error, text):
    model = mlp()
    given = {"make_batch": batches(16), "loss_fn": cross_entropy, "limit": MiB} | change
    make_batch, loss_fn = given.pop("make_batch"), given.pop("loss_fn")
    with pytest.raises(error, match=text):
        find_batch_size(model, sgd(model), make_batch, loss_fn, **given)


def test_an_optimizer_that_needs_a_closure():
    model = mlp()
    with pytest.raises(TypeError, match="closure"):
        find_batch_size(
            model, torch.optim.LBFGS(model.parameters()), batches(16), cross_entropy, limit=MiB
        )


# ---------------------------------------------------------------- ranks


def _on_a_rank(limits, **ddp):
    import torch.distributed as dist

    model = mlp()
    if ddp:
        model = nn.parallel.DistributedDataParallel(model, **ddp)
    optimizer = adam(model)
    before = bits(model, optimizer)
    limit = limits[dist.get_rank()]
    found = find_batch_size(model, optimizer, batches(16), cross_entropy, limit=limit)
    assert bits(model, optimizer) == before
    if ddp:  # it still trains as it should
        cross_entropy(model, batches(16)(found.batch_size)).backward()
        optimizer.step()
        dist.barrier()
    return found.batch_size, found.ranks, len(found.trials), str(found)


def _three_ways():
    return (
        _on_a_rank([2 * MiB, MiB]),
        _on_a_rank([MiB, MiB], gradient_as_bucket_view=False),
        _on_a_rank([MiB, MiB], gradient_as_bucket_view=True),
    )


def test_the_rank_with_half_the_memory_decides_and_ddps_buckets_count():
    model = mlp()
    alone = find_batch_size(model, adam(model), batches(16), cross_entropy, limit=MiB).batch_size
    rank0, rank1 = launch(_three_ways, 2, timeout=60)
    for (n, ranks, trials, text), (other, *_) in zip(rank0, rank1, strict=True):
        assert n == other == min(ranks) and trials <= 6 and "rank 1" in text
    (halved, ranks, *_), (beside_buckets, *_), (gradients_are_buckets, *_) = rank0
    assert halved == alone < ranks[0]
    assert beside_buckets < gradients_are_buckets == alone


def _fails_on_rank_1():
    """What each rank is told: of a foreign error, of no fit, of a joint trial that runs out."""
    import torch.distributed as dist

    rank, said, calls, fatal = dist.get_rank(), [], [], [math.inf]

    def broken(model, batch):
        raise Foreign("its own")

    def counted(model, batch):
        calls.append(len(batch[0]))
        if rank and len(calls) >= fatal[0]:
            raise torch.OutOfMemoryError("the other rank is here too")
        return cross_entropy(model, batch)

    model = mlp()
    optimizer = adam(model)
    find_batch_size(model, optimizer, batches(16), counted, limit=MiB)
    assert calls[-1] == calls[-2], "the last trial is that of all ranks: two steps"
    fatal[0], calls[:] = len(calls) - 1, []
    before = bits(model, optimizer)
    cases = [
        (broken if rank else cross_entropy, MiB),
        (cross_entropy, KiB if rank else MiB),
        (counted, MiB),
    ]
    for loss_fn, limit in cases:
        with pytest.raises(Exception) as caught:
            find_batch_size(model, optimizer, batches(16), loss_fn, limit=limit)
        said.append((type(caught.value).__name__, str(caught.value)))
        assert bits(model, optimizer) == before
    return said


def test_a_rank_that_fails_ends_all_of_them_and_keeps_its_own_error():
    rank0, rank1 = launch(_fails_on_rank_1, 2, timeout=60)
    assert [kind for kind, _ in rank1] == ["Foreign", "DoesNotFit", "DoesNotFit"]
    assert "fitted alone, and not while all ranks ran it" in rank1[2][1]
    for (kind, text), (other, own) in zip(rank0, rank1, strict=True):
        assert (kind, text) == ("RuntimeError", f"on rank 1: {other}: {own}")
