"""Which batch size to try next, and how several ranks agree on one.

Training takes the same operations whatever the batch size, and each of them adds a number of
bytes that is linear in it. So the memory after each allocation lies on a line of its own, and
the peak is the highest of these lines: flat where parameters and optimizer decide, with a kink
where the activations take over. Two small trials give all lines.
"""

import math
from collections.abc import Sequence

from course_utils import memory
from course_utils._agree import agree, gather, world_size
from course_utils._probe import Job, Trial

MOST_TRIALS = 6
# When to stop: this share of the predicted maximum is near enough; or, once a trial has failed,
# this share of the smallest size that did not fit.
NEAR, CLOSED = 0.98, 0.93
# An allocator of a GPU keeps blocks that it cannot use for what is asked: aim a little lower.
AIM_CUDA = 0.97
# The second trial: an eighth of a guess that is itself too small, because it costs time; but 16
# samples where they are at most half of the guess, because rounded sizes make short lines wrong.
CAREFUL, APART = 8, 16
FARTHEST = 1000  # how many times its base a line is trusted
# How far to go from what fitted to what did not, at least and at most, after 1, 2, ... failures.
# Nearer, where the error said what was asked for.
TOLD = 0.97
RETREAT = ((0.3, 0.92), (0.2, 0.7), (0.05, 0.4), (0.02, 0.2), (0.0, 0.1))

Line = tuple[int, int, int, int]  # through (batch size, bytes) and (batch size, bytes)


class DoesNotFit(RuntimeError):
    """Not even the smallest batch can be trained within the limit; says where the bytes are."""


def lines(trials: Sequence[Trial]) -> list[Line]:
    """For each moment of training the line through the two largest sizes that fitted.

    With one trial only, all but parameters, gradients and state is taken as proportional to the
    batch: the line is too steep, so a size chosen by it is too small, hardly ever too large.
    Where the number of allocations changes with the batch, the moments are the six phases.
    """
    last = sorted((t for t in trials if t.fits), key=lambda t: t.batch_size)[-2:]
    if len(last) == 1:
        (one,) = last
        return [(0, low, one.batch_size, p) for low, p in zip(one.fixed, one.moments, strict=True)]
    one, two = last
    same = len(one.moments) == len(two.moments)
    pairs = zip(*(t.moments if same else t.peaks for t in last), strict=True)
    return [(one.batch_size, p1, two.batch_size, p2) for p1, p2 in pairs]


def predict(through: Sequence[Line], size: int) -> int:
    """Bytes at the peak: the highest line."""
    return max(p2 - (p2 - p1) * (b2 - size) // (b2 - b1) for b1, p1, b2, p2 in through)


def room(through: Sequence[Line], limit: int) -> int | float:
    """The largest size at which no line is above the limit; infinite when none rises."""
    return min(
        (b2 + (limit - p2) * (b2 - b1) // (p2 - p1) for b1, p1, b2, p2 in through if p2 > p1),
        default=math.inf,
    )


def trusted(through: Sequence[Line], failed: Trial, fixed: Sequence[int]) -> float:
    """The largest size that may fit, judged by where a trial ran out of memory.

    If it then needed more than the limit, a power of the size is laid through what fitted and
    what was needed. If it did not, the allocator cannot use all it has (fragments): then the
    lines count up to what they say of that moment.
    """
    detailed = len(through) == len(fixed)
    moment = min(len(failed.moments if detailed else failed.peaks), len(through) - 1)
    _, _, best, measured = through[moment]
    size, needed, low = failed.batch_size, failed.needed or 0, fixed[moment] if detailed else 0
    if needed <= failed.limit or not low < measured < failed.limit:
        return room(through, min(failed.limit, predict(through[: moment + 1], size)) - 1)
    power = math.log((needed - low) / (measured - low)) / math.log(size / best)
    return size * ((failed.limit - low) / (needed - low)) ** (1 / power)


def next_size(trials: Sequence[Trial], most: int | float, limit: int) -> tuple[int, str]:
    """The size to try next so that the peak meets `limit`; or 0, and why the search is over."""
    good = [t.batch_size for t in trials if t.fits]
    bad = [t.batch_size for t in trials if not t.fits]
    if not good:
        return min(bad) - 1, "not even one fits"  # two, then one
    best = max(good)
    ceiling = min([most, *(size - 1 for size in bad)])
    if best >= ceiling:
        return 0, (f"{best + 1} does not fit" if best + 1 in bad else "there is no more to try")
    through = lines(trials)
    failed = [t for t in trials if not t.fits]
    want = min(room(through, limit), ceiling, FARTHEST * best)
    if len(good) == 1 and want < ceiling:
        want = max(best + 1, want // CAREFUL, min(APART, want // 2))
    elif failed:
        fixed = next(t.fixed for t in trials if t.fits)
        told = min(trusted(through, t, fixed) for t in failed)
        low, high = (best + share * (ceiling - best) for share in RETREAT[len(failed) - 1])
        if len(failed) == 1 and (failed[0].needed or 0) > limit:
            high = best + TOLD * (ceiling - best)
        want = max(low, min(want, TOLD * told, high))
    if len(good) > 1 and best >= (CLOSED if failed else NEAR) * want:
        if want > best:
            return 0, f"{best} is near enough to the most that can fit, {int(want)} at best"
        return 0, f"by the lines {best + 1} would pass {memory.size(limit)}"
    return max(best + 1, int(want)), ""


def search(job: Job, most: int | float, trials_left: int = MOST_TRIALS) -> tuple[list[Trial], str]:
    """Trials until nothing larger can fit; the largest one that fits is the answer.

    Raises:
        DoesNotFit: not even the smallest size.
    """
    trials: list[Trial] = []
    aim = int(job.limit * (AIM_CUDA if job.device.type == "cuda" else 1))
    size, why = int(min(2, most)), ""
    while size and len(trials) < trials_left:
        predicted = predict(lines(trials), size) if any(t.fits for t in trials) else None
        try:
            trial = job.run(size, predicted)
        except ValueError as error:  # two did not fit, and BatchNorm cannot take one alone
            if size > 1 or not trials or "more than 1 value per channel" not in str(error):
                raise
            break
        trials.append(trial)
        if trial.batch_size < size:
            most = trial.batch_size  # the data has no more
        size, why = next_size(trials, most, aim)
    if not any(t.fits for t in trials):
        raise DoesNotFit(_breakdown(trials[-1]))
    return trials, why or f"{trials_left} trials are the most"


def search_on_all_ranks(job: Job, most: int | float) -> tuple[tuple[int, ...], list[Trial], str]:
    """What each rank found alone (empty without ranks), this rank's trials, why they stopped.

    While a rank probes it takes part in nothing: a rank that ran out of memory inside an
    all-reduce would leave the others waiting. They meet twice, on the CPU: to tell each other
    what they found, and what came of the trial of the smallest answer on all at once.
    """
    import torch.distributed as dist

    if world_size() == 1:
        return ((), *search(job, most))
    group = dist.new_group(backend="gloo")
    try:
        trials, stopped = agree(lambda: search(job, most, MOST_TRIALS - 1), group)
        found = gather(max(t.batch_size for t in trials if t.fits), group)
        least = min(found)
        trials.append(agree(lambda: _joint(job, least, predict(lines(trials), least)), group))
        return tuple(found), trials, stopped
    finally:
        dist.destroy_process_group(group)


def _joint(job: Job, size: int, predicted: int) -> Trial:
    trial = job.run(size, predicted)
    if not trial.fits:
        raise DoesNotFit(
            f"batch size {size} fitted alone, and not while all ranks ran it: they share memory. "
            f"Pass each rank its own limit=..., or some headroom. {_breakdown(trial)}"
        )
    return trial


def _breakdown(trial: Trial) -> str:
    kinds = ", ".join(f"{kind} {memory.size(n)}" for kind, n in trial.kinds.items() if n)
    return (
        f"a batch of {trial.batch_size} does not fit into {memory.size(trial.limit)}: out of "
        f"memory in {trial.failed_in}, with {kinds or 'nothing yet'}. Raise the limit, or make "
        f"the model or each sample smaller. The allocator said: {trial.error}"
    )
