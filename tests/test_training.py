"""The safe step: what it promises, broken on purpose in every place where memory can run out."""

import collections
import gc
import math
import os
import random
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from course_utils import memory  # noqa: E402
from course_utils._safety import reserve, samples, split  # noqa: E402
from course_utils.launch import RankError, launch  # noqa: E402
from course_utils.memory import KiB, MiB  # noqa: E402
from course_utils.training import Epoch, SafeStep, StepResult, evaluate, train_epoch  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
two_ranks = pytest.mark.skipif(CORES < 2, reason="two ranks need two cores")


# ------------------------------------------------------------------ models, batches, traps


@pytest.fixture(autouse=True)
def one_thread():
    """On a busy machine threads that wait for each other cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(dtype=torch.float64, dropout=0.0, norm=False, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(16))
    return nn.Sequential(*layers).to(dtype)


def make_batch(n, dtype=torch.float64, seed=1):
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=numbers, dtype=dtype)
    return x, torch.randint(0, 3, (n,), generator=numbers)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class _Fails(torch.autograd.Function):
    """Passes forward; in backward it is out of memory."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. Advice.")


class Trap:
    """A loss that runs out wherever more than `fits` samples are run at once, `times` times.

    It does so on the second micro-batch if there is one: the first has left gradients by then.
    """

    def __init__(self, fits, where="forward", loss=loss_fn, times=10**9):
        self.fits, self.where, self.loss, self.times, self.failed = fits, where, loss, times, 0

    def __call__(self, model, batch):
        loss = self.loss(model, batch)
        if len(batch[0]) > self.fits and self.failed < self.times:
            self.failed += 1
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB. Advice.")
            return _Fails.apply(loss)
        return loss


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    """Bit by bit."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a, b, atol=1e-10):
    return all((x - y).abs().max() <= atol for x, y in zip(a, b, strict=True))


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


# ------------------------------------------------------------------ the whole batch's gradient


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 7, 10, 99])
def test_split_gradients_equal_the_whole_batch(micro_batch):
    model, batch = make(), make_batch(10)
    loss = loss_fn(model, batch)
    loss.backward()
    wanted = gradients(model)
    result = SafeStep(model, sgd(model), loss_fn, micro_batch=micro_batch)(batch)
    assert close(gradients(model), wanted)
    assert result.loss == pytest.approx(loss.item(), abs=1e-12)
    assert (result.count, result.micro_batch, result.retries) == (10, min(micro_batch, 10), 0)


def tokens_that_count(batch):
    return (batch[1] != -100).sum()


def token_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def test_ignored_tokens_do_not_count_and_a_micro_batch_without_any_is_left_out():
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, 6, generator=numbers, dtype=torch.float64)
    y = torch.randint(0, 3, (5, 4), generator=numbers)
    y[0, 1:] = y[1, 3] = -100
    y[4] = -100  # the last micro-batch: the mean over no token is nan
    model = make()
    token_loss(model, (x, y)).backward()
    wanted = gradients(model)
    result = SafeStep(model, sgd(model), token_loss, count=tokens_that_count, micro_batch=1)((x, y))
    assert close(gradients(model), wanted) and result.count == 12

    before = weights(model)
    nothing = SafeStep(model, sgd(model), token_loss, count=tokens_that_count)((x, y * 0 - 100))
    assert nothing.skipped and math.isnan(nothing.loss) and same(weights(model), before)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_no_sample_is_lost_or_doubled(where):
    """The ids whose gradients the optimizer got, read from the gradients themselves.

    Sample i adds i-th power of 2 to the gradient's own place: a sum tells which, and how often.
    """
    model = nn.Linear(1, 16, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trap = Trap(3, where, loss=lambda m, b: (b[0] @ m.weight).sum() / len(b[0]))
    step = SafeStep(model, optimizer, trap)
    for begin in range(0, 37, 16):
        ids = torch.arange(begin, min(begin + 16, 37))
        rows = nn.functional.one_hot(ids - begin, 16).to(torch.float64)
        result = step((rows,))
        ledger = (model.weight.grad.flatten() * len(ids)).round(decimals=9)
        assert ledger.tolist() == [1.0] * len(ids) + [0.0] * (16 - len(ids))
        assert result.count == len(ids)
    assert trap.failed == 3 and step.micro_batch == 2  # 16, 8, 4, and never again


def test_gradients_that_were_there_are_not_added():
    model, batch = make(), make_batch(8)
    loss_fn(model, batch).backward()
    wanted = gradients(model)
    for p in model.parameters():
        p.grad.fill_(7.0)
    SafeStep(model, sgd(model), loss_fn)(batch)
    assert same(gradients(model), wanted)


# ------------------------------------------------------------------ nothing else changes

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_oom_it_is_the_hand_written_loop_bit_by_bit(name):
    """Also in its first step, before which the state's memory was reserved."""
    ends = []
    for safe in (False, True):
        model = make(torch.float32, dropout=0.3)
        with torch.no_grad():
            model[0].weight[0] = -0.0  # a weight that lr = 0 would turn into 0.0
        optimizer = OPTIMIZERS[name](model.parameters())
        step = SafeStep(model, optimizer, loss_fn)
        for seed in range(4):
            batch = make_batch(8, torch.float32, seed)
            if safe:
                step(batch)
            else:
                optimizer.zero_grad()
                loss_fn(model, batch).backward()
                optimizer.step()
        state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        ends.append([t.view(torch.int32) for t in weights(model)] + state)
    assert same(*ends)


def test_reserving_takes_the_bytes_of_the_state_and_touches_nothing():
    model = make(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    told = []
    optimizer.register_step_post_hook(lambda *_: told.append("step"))
    before, numbers = weights(model), torch.get_rng_state()
    reserved = reserve(optimizer)
    assert same(weights(model), before) and torch.equal(torch.get_rng_state(), numbers)
    assert not optimizer.state and not told and gradients(model) == [None] * 4
    assert optimizer.param_groups[0]["lr"] == 0.5
    loss_fn(model, make_batch(4, torch.bfloat16)).backward()
    optimizer.step()
    scheduler.step()
    sizes = [
        sorted(t.nbytes for s in state.values() for t in s.values())
        for state in (reserved, optimizer.state)
    ]
    assert sizes[0] == sizes[1]
    assert reserve(optimizer) is None  # there is state now


def test_the_first_step_does_not_run_out_inside_the_optimizer():
    """Without the reserve the whole batch fits beside the gradients, and then Adam does not."""

    def run(batch, limit=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 2))
        optimizer = torch.optim.Adam(model.parameters())
        with memory.meter(model, optimizer, batch, limit=limit) as meter:
            step = SafeStep(model, optimizer, loss_fn)
            results = [step(batch) for _ in range(3)]
        return results, meter

    batch = torch.randn(400, 200), torch.randint(0, 2, (400,))
    first = run(batch)[1].peak
    results, meter = run(batch, first - 100)
    assert meter.peak <= first - 100
    assert [r.retries for r in results] == [1, 0, 0]  # in the first step, not later


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_oom_then_split_equals_split_from_that_step_on(where):
    """Dropout, numpy's and python's random numbers, BatchNorm's statistics: bit by bit."""

    def noisy(model, batch):
        scale = 1 + 0.1 * np.random.rand() + 0.1 * random.random()
        return loss_fn(model, (batch[0] * scale, batch[1]))

    def run(loss, halve_at=None):
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        model = make(torch.float32, dropout=0.5, norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step = SafeStep(model, optimizer, loss, allow_batchnorm=True)
        losses = []
        for i in range(5):
            if i == halve_at:
                step.micro_batch = 6
            if i == 2 and isinstance(loss, Trap):
                loss.fits = 6
            losses.append(step(make_batch(12, torch.float32, i)).loss)
        ends = [*weights(model), *model.buffers(), torch.get_rng_state()]
        ends += [torch.tensor([np.random.rand(), random.random()])]
        return losses, [t.clone() for t in ends]

    broken = Trap(99, where, loss=noisy)
    out, configured = run(broken), run(noisy, halve_at=2)
    assert broken.failed == 1
    assert out[0] == configured[0] and same(out[1], configured[1])
    assert not same(out[1], run(noisy)[1])  # the unsplit run draws other masks


def test_100_ooms_leave_no_byte():
    model = make(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trap = Trap(16)
    step = SafeStep(model, optimizer, trap, micro_batch=16)
    batch = make_batch(32, torch.float32)
    with memory.meter(model, optimizer, batch) as meter:
        step(batch)
        live = []
        gc.freeze()  # so that 100 collections do not look at all of torch 100 times
        try:
            for _ in range(100):
                step.micro_batch = 32
                assert step(batch).retries == 1
                live.append(meter.live)
        finally:
            gc.unfreeze()
    assert trap.failed == 100
    assert set(live) == {live[0]}


def test_a_failed_attempt_is_gone_before_the_next_begins():
    """Without the collector: only a kept exception or frame could hold the activations."""
    held = []

    def loss(model, batch):
        if held:
            assert held[0]() is None, "the activations of the failed attempt are still alive"
        activations = model(batch[0])
        held.insert(0, weakref.ref(activations))
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return activations.square().mean()

    model = make()
    gc.disable()
    try:
        result = SafeStep(model, sgd(model), loss)(make_batch(16))
    finally:
        gc.enable()
    assert (result.micro_batch, result.retries) == (4, 2)


def test_a_budget_is_kept_and_the_run_goes_on(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data = [(torch.randn(256, 64), torch.randint(0, 10, (256,))) for _ in range(3)]
    step = SafeStep(model, optimizer, loss_fn)
    with memory.meter(model, optimizer, data, limit=int(1.5 * MiB)) as meter:
        epoch = train_epoch(step, data, progress=False)
        assert meter.peak <= meter.limit
    assert epoch.count == 768 and 0 < epoch.micro_batch < 256 and epoch.retries >= 1
    said = capsys.readouterr().out
    assert f"the same batch again with {epoch.micro_batch}" in said and "Budget" in said


# ------------------------------------------------------------------ when it cannot go on


def test_one_sample_that_does_not_fit():
    model = make(torch.float32, dropout=0.5, norm=True)
    optimizer = torch.optim.Adam(model.parameters())
    step = SafeStep(model, optimizer, Trap(4), allow_batchnorm=True)
    step(make_batch(4, torch.float32))
    # BatchNorm wants two rows.
    step.loss_fn = Trap(0, loss=lambda m, b: loss_fn(m, [torch.cat([t, t]) for t in b]))
    before = weights(model), [b.clone() for b in model.buffers()], torch.get_rng_state()
    with pytest.raises(torch.OutOfMemoryError, match="a single sample does not fit") as caught:
        step(make_batch(4, torch.float32))
    text = str(caught.value)
    for each in ("parameters 916 bytes", "optimizer state", "gradients", "What helps", "1 GiB"):
        assert each in text, text
    assert caught.value.__context__ is None and memory.is_oom(caught.value)
    after = weights(model), list(model.buffers()), torch.get_rng_state()
    assert same(before[0], after[0]) and same(before[1], after[1])
    assert torch.equal(before[2], after[2]) and gradients(model) == [None] * 6


def test_state_that_does_not_fit_is_said_before_the_first_sample():
    model = nn.Linear(500, 500)
    optimizer = torch.optim.Adam(model.parameters())
    before = weights(model)
    batch = torch.randn(64, 500), torch.randint(0, 500, (64,))
    with memory.meter(model, optimizer, batch, limit=3 * MiB):
        with pytest.raises(torch.OutOfMemoryError, match="before the first sample.*plain SGD"):
            SafeStep(model, optimizer, loss_fn)(batch)
    assert same(weights(model), before) and not optimizer.state


def test_running_out_in_the_optimizers_step_is_fatal():
    class Greedy(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["lr"]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried 1 GiB.")

    model = make(torch.float32)
    optimizer = Greedy(model.parameters(), lr=0.0)
    trap = Trap(99)
    step = SafeStep(model, optimizer, trap)
    step(make_batch(8, torch.float32))
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(torch.OutOfMemoryError, match="last checkpoint.*gradients 652 bytes"):
        step(make_batch(8, torch.float32))
    assert step.micro_batch is None


@pytest.mark.parametrize("error", [ValueError("a bad batch"), KeyboardInterrupt()])
def test_another_error_comes_through_and_leaves_everything_as_it_was(error):
    def bad(model, batch):
        loss = loss_fn(model, batch)
        if len(batch[0]) < 4:  # the second micro-batch
            raise error
        return loss

    model = make(dropout=0.5, norm=True)
    step = SafeStep(model, sgd(model), bad, micro_batch=4, allow_batchnorm=True)
    before = [*weights(model), *[b.clone() for b in model.buffers()], torch.get_rng_state()]
    with pytest.raises(type(error)):
        step(make_batch(6))
    assert same([*weights(model), *model.buffers(), torch.get_rng_state()], before)
    assert step(make_batch(4)).count == 4  # and it works on


def test_arguments_that_make_no_sense_say_so():
    model = make()
    with pytest.raises(ValueError, match="micro_batch"):
        SafeStep(model, sgd(model), loss_fn, micro_batch=0)
    with pytest.raises(TypeError, match="LBFGS"):
        SafeStep(model, torch.optim.LBFGS(model.parameters()), loss_fn)
    with pytest.raises(ValueError, match="how many samples"):
        SafeStep(model, sgd(model), loss_fn, count=lambda batch: -1)(make_batch(4))


# ------------------------------------------------------------------ BatchNorm, precision, clipping


def test_batchnorm_is_refused_unless_frozen_or_accepted():
    model = make(norm=True)
    with pytest.raises(ValueError, match=r"BatchNorm \(1\).*GroupNorm.*allow_batchnorm=True"):
        SafeStep(model, sgd(model), loss_fn)
    SafeStep(model, sgd(model), loss_fn, allow_batchnorm=True)(make_batch(8))
    model[1].eval()
    step = SafeStep(model, sgd(model), loss_fn, micro_batch=2)
    step(make_batch(8))  # frozen: splitting changes nothing
    model.train()
    with pytest.raises(ValueError, match="BatchNorm"):
        step(make_batch(8))
    without_statistics = nn.BatchNorm1d(6, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="BatchNorm"):  # it uses the batch's in eval mode too
        SafeStep(nn.Sequential(without_statistics, make()), sgd(model), loss_fn)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        sync = nn.SyncBatchNorm.convert_sync_batchnorm(make(norm=True))
        SafeStep(sync, sgd(sync), loss_fn, allow_batchnorm=True)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_scaler_and_clip_equal_the_hand_written_loop(clip):
    ends = []
    for how in ("by hand", "whole", "after running out"):
        model = make(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        trap = Trap(99)
        step = SafeStep(model, optimizer, trap, scaler=scaler, clip=clip)
        for i in range(5):
            batch = make_batch(8, torch.float32, i)
            if how == "by hand":
                optimizer.zero_grad()
                scaler.scale(loss_fn(model, batch)).backward()
                scaler.unscale_(optimizer)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                continue
            if i == 2 and how == "after running out":
                trap.fits = 3
            assert not step(batch).skipped
        ends.append((weights(model), scaler.state_dict()))
    by_hand, whole, after = ends
    assert same(by_hand[0], whole[0]) and by_hand[1] == whole[1] == after[1]
    assert by_hand[1]["scale"] == 32.0
    assert close(by_hand[0], after[0], atol=1e-5) and trap.failed == 2


def test_an_overflow_is_reported_and_the_next_step_works():
    model = make(torch.float32)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**80)
    step = SafeStep(model, optimizer, lambda m, b: 1e18 * loss_fn(m, b), scaler=scaler)
    before, batch = weights(model), make_batch(8, torch.float32)
    result = step(batch)
    assert result.skipped and same(weights(model), before) and not optimizer.state
    assert step._reserved is None
    for _ in range(40):
        result = step(batch)
        if not result.skipped:
            break
        step._prepare()
        assert step._reserved, "a skipped first step made no state: its memory is still needed"
    assert not same(weights(model), before) and step._reserved is None


def test_autocast_runs_the_forward_pass_in_that_dtype():
    seen = []

    def loss(model, batch):
        out = model(batch[0])
        seen.append(out.dtype)
        return nn.functional.cross_entropy(out.float(), batch[1])

    model = make(torch.float32)
    SafeStep(model, sgd(model), Trap(4, loss=loss), autocast=torch.bfloat16)(
        make_batch(8, torch.float32)
    )
    assert set(seen) == {torch.bfloat16}
    assert model[0].weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------------------ batches, epochs, evaluation

Pair = collections.namedtuple("Pair", "x y")


def test_batches_of_every_shape_are_split_in_order():
    x, y = torch.arange(10), torch.arange(20).view(10, 2)
    for batch in (x, (x, y), [x, {"y": y}], {"x": x, "more": (y, x)}, Pair(x, y)):
        parts = list(split(batch, 4))
        assert [samples(part) for part in parts] == [4, 4, 2]
        assert {type(part) for part in parts} == {type(batch)}
    assert [part.x.tolist() for part in split(Pair(x, y), 5)] == [x[:5].tolist(), x[5:].tolist()]
    assert next(split(x, 10)) is x
    with pytest.raises(ValueError, match=r"\[10, 3\]"):
        samples((x, x[:3]))
    with pytest.raises(ValueError, match="-1: it has none"):
        samples((x, torch.tensor(1.0)))
    with pytest.raises(TypeError, match="a str, which cannot be split"):
        samples((x, ["a", "b"]))


def test_an_epoch_counts_samples_not_batches(capsys):
    model = make()
    model.eval()
    model[2].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = [make_batch(8, seed=1), make_batch(3, seed=2)]
    wanted = sum(loss_fn(model, b).item() * len(b[0]) for b in loader) / 11
    seen = []
    epoch = train_epoch(
        SafeStep(model, optimizer, loss_fn), loader, after_step=lambda i, r: seen.append((i, r))
    )
    assert epoch == Epoch(pytest.approx(wanted), 11, 2, 0, 0, None)
    assert model.training and [i for i, _ in seen] == [0, 1]
    assert isinstance(seen[0][1], StepResult)
    out, err = capsys.readouterr()
    assert "2/2" in out and "loss=" in out and err == ""
    train_epoch(SafeStep(model, optimizer, loss_fn), loader, progress=False)
    assert capsys.readouterr().out == ""
    model[0].eval()
    train_epoch(SafeStep(model, optimizer, loss_fn), loader, progress=False)
    assert not model[0].training, "a layer that was frozen must stay so"


def accuracy(model, batch):
    assert torch.is_inference_mode_enabled() and not model.training
    return (model(batch[0]).argmax(1) == batch[1]).double().mean()


def test_evaluation_is_exact_over_ragged_batches_and_restores_the_modes():
    model = make(dropout=0.5)
    model[0].eval()
    loader = [make_batch(8, seed=1), make_batch(3, seed=2), make_batch(8, seed=3)]
    model[2].eval()
    whole = torch.cat([b[0] for b in loader]), torch.cat([b[1] for b in loader])
    right = (model(whole[0]).argmax(1) == whole[1]).double().mean().item()
    model[2].train()
    modes = [m.training for m in model.modules()]
    for size in (None, 1, 3, 8):
        assert evaluate(model, loader, accuracy, batch_size=size) == pytest.approx(right)
    both = evaluate(model, loader, lambda m, b: {"acc": accuracy(m, b), "one": 1.0})
    assert both == {"acc": pytest.approx(right), "one": 1.0}
    assert [m.training for m in model.modules()] == modes
    assert evaluate(model, loader, lambda m, b: 2.0, count=lambda b: int(len(b[0]) > 4)) == 2.0
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(model, [], accuracy)


def test_evaluation_has_a_size_of_its_own():
    model = make()
    step = SafeStep(model, sgd(model), loss_fn, micro_batch=8)
    trap = Trap(2, loss=accuracy)
    loader = [make_batch(8, seed=1), make_batch(5, seed=2)]
    wanted = evaluate(model, loader, accuracy)
    assert evaluate(model, loader, trap) == pytest.approx(wanted)
    assert trap.failed == 2 and step.micro_batch == 8 and model.training
    with pytest.raises(torch.OutOfMemoryError, match="a single sample does not fit"):
        evaluate(model, loader, Trap(0, loss=accuracy))
    assert model.training
    with pytest.raises(ZeroDivisionError):
        evaluate(model, loader, lambda m, b: 1 / 0)
    assert model.training


def test_data_kept_by_a_data_set_can_be_trained_on_after_evaluation():
    """Made under inference mode, autograd would refuse them."""
    kept = []

    def loader():
        kept.append(make_batch(4))
        yield kept[-1]

    model = make()
    evaluate(model, loader(), accuracy)
    SafeStep(model, sgd(model), loss_fn)(kept[0])


def test_the_size_found_travels_with_a_checkpoint():
    model = make()
    step = SafeStep(model, sgd(model), Trap(3))
    step(make_batch(12))
    other = SafeStep(model, sgd(model), loss_fn)
    other.load_state_dict(step.state_dict())
    assert other(make_batch(12)).micro_batch == 3


# ------------------------------------------------------------------ several ranks


class Branches(nn.Module):
    """`extra` is used only by batches with a positive mark, `never` by none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = make(norm=False)
        self.extra = nn.Linear(6, 3, dtype=torch.float64)
        self.never = nn.Linear(6, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        marked = (x[:, :1] > 100).any()
        return self.net(x) + self.extra(x / 100) if marked else self.net(x)


def shards(seed):
    """Of one batch of 10: 7 samples for rank 0, 3 for rank 1, one of them marked."""
    x, y = make_batch(10, seed=seed)
    x[8, 0] = 101.0
    return (x[:7], y[:7]), (x[7:], y[7:])


def branch_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def train_rank(cases):
    """Each case: the rank that runs out, where, and the micro-batches' size to begin with."""
    rank, ends = dist.get_rank(), []
    for short, where, micro_batch in cases:
        torch.manual_seed(0)
        model = DistributedDataParallel(Branches())
        trap = Trap(2 if rank == short else 99, where)
        optimizer = branch_optimizer(model)
        step = SafeStep(model, optimizer, trap, micro_batch=micro_batch, clip=1.0)
        results = [step(shards(seed)[rank]) for seed in range(3)]
        assert model.module.never.weight.grad is None and trap.failed == int(rank == short)
        ends.append((weights(model.module), model.module.calls.item(), results))
    return ends


@two_ranks
def test_one_rank_runs_out_and_all_split_alike():
    """Unequal shards, a layer that one rank alone uses, one that nobody uses, clipping."""
    model = Branches()
    optimizer = branch_optimizer(model)
    losses = []
    for seed in range(3):  # what one device would compute, shard by shard
        optimizer.zero_grad()
        parts = [loss_fn(model, shard) * len(shard[0]) / 10 for shard in shards(seed)]
        sum(parts).backward()
        losses.append(sum(part.item() for part in parts))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    cases = [(None, "", None), (1, "forward", None), (1, "backward", None), (None, "", 2)]
    zero, one = launch(train_rank, 2, cases)
    for (w0, calls0, r0), (w1, calls1, r1) in zip(zero, one, strict=True):
        assert same(w0, w1), "the ranks' weights differ"
        assert calls0 == calls1, "rank 0's buffers go to all"
        assert [(r.loss, r.count, r.retries) for r in r0] == [
            (r.loss, r.count, r.retries) for r in r1
        ]
    whole, forward, backward, split_so = zero
    assert [r.loss for r in whole[2]] == pytest.approx(losses, abs=1e-12)
    assert {r.count for r in whole[2]} == {10} and close(whole[0], weights(model))
    for each, other in ((forward, one[1]), (backward, one[2])):
        assert [r.retries for r in each[2]] == [1, 0, 0]
        assert {r.micro_batch for r in each[2] + other[2]} == {2}
        assert same(each[0], split_so[0]), "not as if split so from the start"
        assert each[1] == split_so[1], "rank 0 did not run out, but has to go back too"


def plain_rank():
    rank, ends = dist.get_rank(), []
    for where in ("forward", "backward"):
        model = DistributedDataParallel(make())
        optimizer = torch.optim.Adam(model.parameters())
        step = SafeStep(model, optimizer, Trap(2 if rank == 1 else 99, where))
        for seed in range(3):
            x, y = make_batch(10, seed=seed)
            step((x[:7], y[:7]) if rank == 0 else (x[7:], y[7:]))
        ends.append((weights(model.module), gradients(model.module)))
    return ends


@two_ranks
def test_two_ranks_equal_one_device_on_the_union_of_their_shards():
    model = make()
    step = SafeStep(model, torch.optim.Adam(model.parameters()), loss_fn)
    for seed in range(3):
        step(make_batch(10, seed=seed))
    zero, one = launch(plain_rank, 2)
    for (w0, g0), (w1, g1) in zip(zero, one, strict=True):
        assert same(w0, w1) and same(g0, g1)
        assert close(w0, weights(model)) and close(g0, gradients(model))


def half_the_memory():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    batch = torch.randn(256, 64), torch.randint(0, 2, (256,))
    with memory.meter(model, optimizer, batch, limit=(2 * MiB, 768 * KiB)[rank]) as meter:
        step = SafeStep(model, optimizer, loss_fn)
        results = [step(batch) for _ in range(2)]
        assert meter.peak <= meter.limit
    return results, model.module[0].weight.sum().item()


@two_ranks
def test_the_rank_with_half_the_memory_is_honoured():
    (r0, w0), (r1, w1) = launch(half_the_memory, 2)
    assert w0 == w1 and r0[0].retries == r1[0].retries > 0
    assert r0[0].micro_batch == r1[0].micro_batch < 256


def nothing_left_at_the_vote():
    """The loss leaves the rank with less free memory than a vote would take, if it took any."""
    rank, hog = dist.get_rank(), []
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    batch = torch.randn(8, 64), torch.randint(0, 2, (8,))
    step = SafeStep(model, optimizer, loss_fn)
    collect = step.ranks.collect

    def fill():
        collect()
        if rank == 1:
            hog.append(torch.empty(meter.limit - meter.live, dtype=torch.uint8))

    step.ranks.collect = fill
    with memory.meter(model, optimizer, batch, limit=MiB) as meter:
        step(batch)
    return meter.peak == meter.limit


@two_ranks
def test_vote_and_average_allocate_nothing():
    assert launch(nothing_left_at_the_vote, 2) == [False, True]


def cannot_go_on():
    rank, ends = dist.get_rank(), []

    def foreign(model, batch):
        if rank == 1:
            raise KeyError("rank 1's own")
        return loss_fn(model, batch)

    for loss, batches in ((foreign, 1), (Trap(0 if rank == 1 else 99), 1), (loss_fn, rank + 1)):
        model = DistributedDataParallel(make())
        step = SafeStep(model, sgd(model), loss)
        before = weights(model)
        try:
            train_epoch(step, [make_batch(4)] * batches, progress=False)
        except Exception as error:
            assert same(weights(model), before)
            ends.append((type(error).__name__, str(error)))
    return ends


@two_ranks
def test_when_one_rank_cannot_go_on_no_rank_waits():
    (foreign0, one0, lengths0), (foreign1, one1, lengths1) = launch(cannot_go_on, 2, timeout=60)
    assert foreign0[0] == "RuntimeError" and "rank 1 failed in this step" in foreign0[1]
    assert foreign1 == ("KeyError", '"rank 1\'s own"')
    assert one0[0] == one1[0] == "OutOfMemoryError"
    assert "rank 1 ran out of memory, rank 0 did not" in one0[1] and "single sample" in one1[1]
    for name, text in (lengths0, lengths1):
        assert name == "ValueError" and "[1, 2] batches" in text


def fails_uncaught():
    def loss(model, batch):
        raise KeyError("rank 1's own") if dist.get_rank() else torch.OutOfMemoryError("here too")

    model = DistributedDataParallel(make())
    SafeStep(model, sgd(model), loss)(make_batch(4))


@two_ranks
def test_the_error_in_the_cell_is_that_of_the_rank_that_failed():
    with pytest.raises(RankError, match="rank 1"):
        launch(fails_uncaught, 2, timeout=60)


def evaluate_rank():
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    model = DistributedDataParallel(make())
    x, y = make_batch(10)
    mine = [(x[:7], y[:7])] if rank == 0 else [(x[7:9], y[7:9]), (x[9:], y[9:])]
    nobody = [] if rank == 0 else mine
    means = lambda m, b: {"acc": accuracy(m, b)}  # noqa: E731
    sharded = fully_shard(make())
    with pytest.raises(ValueError, match="sharded"):
        SafeStep(sharded, sgd(sharded), loss_fn)
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        evaluate(model, mine, lambda m, b: 1 / (1 - rank))
    assert model.training and ("on rank 1: ZeroDivision" in str(caught.value)) == (rank == 0)
    return [evaluate(model, shard, means)["acc"] for shard in (mine, nobody)]


@two_ranks
def test_evaluation_over_shards_is_the_mean_over_all_and_sharded_models_are_refused():
    model, (x, y) = make(), make_batch(10)
    right = (model(x).argmax(1) == y).double()
    wanted = [right.mean().item(), right[7:].mean().item()]
    for rank in launch(evaluate_rank, 2):
        assert rank == pytest.approx(wanted)


# ------------------------------------------------------------------ a genuine allocator failure


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is Linux's")
def test_it_recovers_from_a_genuine_allocator_failure():
    """A child whose address space is limited: DefaultCPUAllocator itself says no."""
    code = """
        import resource, torch
        from torch import nn
        from course_utils.training import SafeStep
        torch.set_num_threads(1)  # a new thread could not start either, once memory is used up
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
        optimizer = torch.optim.Adam(model.parameters())
        loss_fn = lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1])
        step = SafeStep(model, optimizer, loss_fn)
        small = torch.randn(64, 64), torch.randint(0, 8, (64,))
        step(small)  # warm-up
        batch = torch.randn(32768, 64), torch.randint(0, 8, (32768,))
        used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + 96 * 2**20,) * 2)
        first = step(batch)
        second = step(batch)
        print(first.retries, first.count, first.micro_batch, second.retries, second.loss)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=REPO, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    assert "DefaultCPUAllocator: can't allocate memory" in out.stdout
    retries, count, micro_batch, again, loss = out.stdout.splitlines()[-1].split()
    assert int(retries) >= 1 and int(count) == 32768 and int(micro_batch) < 32768
    assert int(again) <= 1 and math.isfinite(float(loss))
