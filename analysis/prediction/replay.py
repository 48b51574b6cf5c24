"""The buckets of a step, replayed: when each is ready, when its exchange starts and ends, and what of it the step shows.

    s_j  = max(r'_j, e_j−1)            one stream carries the exchanges, in the order of the buckets
    e_j  = s_j + c_j + w               c: the exchange alone; w: the gap between two launches
    r'_j = r_j + γ · (time in which an exchange ran before r'_j)      compute is slower meanwhile
    step = max(r'_end, e_last) + a + update + D       a: what brings weights back; D: the strategy's own work on one GPU

Source: Shi et al., arXiv 1805.03812 (the step as a graph), arXiv 2507.03114 (slower compute during exchanges).
All times are draws in ms (analysis.prediction.draws), counted from the start of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.prediction.draws import Values

MOST_SLOWED = 0.95  # γ below 1: compute always goes on


@dataclass(frozen=True)
class Replayed:
    """One step, and the three parts of what the exchange adds to it, in ms."""

    step_ms: Values
    tail_ms: Values  # the exchange goes on after the backward pass has ended
    contention_ms: Values  # compute was slower while exchanges ran
    own_work_ms: Values  # what the strategy does on a GPU without any peer
    overlap_ms: Values  # time in which an exchange ran before the backward pass had ended

    @property
    def exposed_ms(self) -> Values:
        """All three together."""
        return self.tail_ms + self.contention_ms + self.own_work_ms


def replay(
    ready_ms: Sequence[Values],
    exchange_ms: Sequence[Values],
    backward_end_ms: Values,
    update_ms: Values,
    own_work_ms: Values,
    slowed: Values,
    after_ms: Values | float = 0.0,
    gap_ms: float = 0.0,
) -> Replayed:
    """Replay one step. `ready_ms` and `exchange_ms` have one entry for each bucket, in order; `slowed` is γ.

    The backward pass ends at `backward_end_ms` without any exchange. `after_ms` is what follows it and the last bucket.
    """
    slowed = np.clip(slowed, 0.0, MOST_SLOWED)
    starts: list[Values] = []
    ends: list[Values] = []
    for ready, exchange in zip(ready_ms, exchange_ms, strict=True):
        at = _reached(ready, starts, ends, slowed)
        starts.append(np.maximum(at, ends[-1]) if ends else at)
        ends.append(starts[-1] + exchange + gap_ms)
    end = _reached(backward_end_ms, starts, ends, slowed)
    last = ends[-1] if ends else end
    tail = np.maximum(last - end, 0.0) + after_ms
    contention = end - backward_end_ms
    overlap = sum(
        (np.clip(np.minimum(b, end) - a, 0.0, None) for a, b in zip(starts, ends, strict=True)),
        0.0 * end,
    )
    return Replayed(
        end + tail + update_ms + own_work_ms,
        tail,
        contention,
        own_work_ms + 0.0 * end,
        np.asarray(overlap),
    )


def _reached(
    work_ms: Values, starts: Sequence[Values], ends: Sequence[Values], slowed: Values
) -> Values:
    """Return when compute has done `work_ms` of its work, if it is slowed during the exchanges so far, which do not overlap."""
    work_ms = np.asarray(work_ms, dtype=float)
    if not slowed.any():
        return work_ms
    at = work_ms + 0.0 * slowed
    lost = 0.0 * at
    open_ = np.ones_like(at, dtype=bool)  # not yet reached before this exchange
    for start, end in zip(starts, ends, strict=True):
        open_ &= work_ms + lost > start
        within = (work_ms + lost - slowed * start) / (1 - slowed)
        inside = open_ & (within <= end)
        at = np.where(inside, within, np.where(open_, work_ms + lost + slowed * (end - start), at))
        open_ &= ~inside
        lost = lost + np.where(open_, slowed * (end - start), 0.0)
    return at
