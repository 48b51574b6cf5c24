"""The exchange of each bucket, and the replay of a step with it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from analysis.prediction.calibration import Calibrated
from analysis.prediction.cells import Question
from analysis.prediction.draws import Values, best, exactly
from analysis.prediction.links.model import MEASURED, SCALED, NoLink
from analysis.prediction.parts.base import base
from analysis.prediction.parts.nearest import alike, nearest_exchange, refuse_unknown_sizes
from analysis.prediction.replay import Replayed, replay
from analysis.prediction.strategies import BucketTimes, as_in_a_step, bucket_times, overlaps

MOST_BUCKETS = 64  # of a replay, whose time grows with their square
FORWARD_SHARE = 1 / 3  # of a step: a backward pass takes twice as long as a forward pass


def exchange(calibration: Calibrated, question: Question) -> BucketTimes:
    """Return the time of each bucket in a step, if nothing else went on. Raises NoLink, ValueError."""
    sizes = buckets(calibration, question)
    if question.ranks < 2 or question.strategy == "none":
        return BucketTimes([exactly(0.0) for _ in sizes], exactly(0.0), {MEASURED})
    refuse_unknown_sizes(calibration, question)
    near_one, in_step = nearest_exchange(calibration, question), as_in_a_step(question)
    known = calibration.known
    try:
        found = bucket_times(in_step, sizes, known)
    except NoLink:
        if near_one is None:
            raise
        known = calibration.known.by_structure()
        found = replace(bucket_times(in_step, sizes, known), sources={SCALED})
    if near_one is None or near_one.exchange_ms is None:
        return found
    there = bucket_times(near_one.question, buckets(calibration, near_one.question), known)
    ratio = near_one.exchange_ms / best(there.whole_ms)
    if (
        near_one.ranks == question.ranks and near_one.question.wire == question.wire
    ):  # the links' own error cancels
        as_measured = near_one.question.options == question.options
        measured = replace(found.best, sources={MEASURED} if as_measured else found.sources)
        return measured.times(ratio)
    return replace(found.times(ratio), sources=found.sources | {SCALED})


def buckets(calibration: Calibrated, question: Question) -> tuple[float, ...]:
    """Return the bytes of each bucket: as a record of cells that fill them alike has them, else all full but the last."""
    known = {id(one): found for one, found in calibration.with_buckets}
    nearest = alike((one for one, _ in calibration.with_buckets), question, options=True)
    if nearest:
        return known[id(nearest[0])]
    for one, found in calibration.with_buckets:
        if one.question.fills_alike(question):
            return tuple(size * question.sent_bytes / sum(found) for size in found)
    return question.assumed_buckets


def play(calibration: Calibrated, question: Question, own_ms: Values, gamma: Values) -> Replayed:
    """Replay one step of a question with this own work and γ. Raises NoLink, ValueError."""
    times = exchange(calibration, question)
    return replay_with(
        calibration, question, base(calibration, question).values, times, own_ms, gamma
    )


def replay_with(
    calibration: Calibrated,
    question: Question,
    bare: Values,
    times: BucketTimes,
    own: Values,
    gamma: Values,
) -> Replayed:
    """Replay one step of a question with these parts."""
    ready, ended = _moments(calibration, question, bare, len(times.during))
    if not overlaps(question):
        ready = [ended] * len(times.during)
    return replay(*_in_groups(ready, times.during), ended, bare - ended, own, gamma, times.after)


def _moments(
    calibration: Calibrated, question: Question, bare: Values, count: int
) -> tuple[list[Values], Values]:
    """Return when each of `count` buckets is ready in a step of `bare` ms, and when its backward pass ends."""
    known = {id(one): found for one, found in calibration.with_moments}
    for one in alike((one for one, _ in calibration.with_moments), question, options=False):
        found = known[id(one)]
        if len(found.ready_ms) == count:
            scale = bare / found.update_ms
            return [scale * at for at in found.ready_ms], scale * found.backward_ms
    sizes = buckets(calibration, question)
    shares = np.cumsum(sizes) / sum(sizes) if sum(sizes) > 0 else np.ones(len(sizes))
    return [bare * (FORWARD_SHARE + (1 - FORWARD_SHARE) * share) for share in shares], bare


def _in_groups(
    ready: Sequence[Values], times: Sequence[Values]
) -> tuple[list[Values], list[Values]]:
    """Return at most MOST_BUCKETS buckets: of more, neighbours together, but for the last ones."""
    count, kept = len(times), MOST_BUCKETS // 2
    if count <= MOST_BUCKETS:
        return list(ready), list(times)
    ends = [
        *(int(one) for one in np.linspace(0, count - kept, MOST_BUCKETS - kept + 1)),
        *range(count - kept + 1, count + 1),
    ]
    spans = list(itertools.pairwise(ends))
    return [ready[stop - 1] for _, stop in spans], [
        sum(times[start:stop], exactly(0.0)) for start, stop in spans
    ]
