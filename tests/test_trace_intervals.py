"""Interval arithmetic against a model that looks at every nanosecond by itself."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.trace.events import NOTHING, covers, intersect, subtract, total, union

BUDGET = settings(derandomize=True, max_examples=150, deadline=None)
HORIZON = 40
INTERVALS = st.lists(st.tuples(st.integers(0, HORIZON), st.integers(0, HORIZON)), max_size=8)


def spans(pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def moments(some):
    return {at for start, end in some.tolist() for at in range(start, end)}


def is_set(some):
    flat = some.ravel()
    return some.shape[1] == 2 and bool(
        (np.diff(flat) > 0).all()
    )  # sorted, none empty, none touching the next


@BUDGET
@given(INTERVALS, INTERVALS)
def test_sets_are_those_of_a_brute_force_model(first, second):
    a, b = union(spans(first)), union(spans(second))
    assert is_set(a)
    assert moments(a) == moments(spans(first))
    for made, model in (
        (union(spans(first), spans(second)), moments(a) | moments(b)),
        (intersect(a, b), moments(a) & moments(b)),
        (subtract(a, b), moments(a) - moments(b)),
    ):
        assert is_set(made)
        assert moments(made) == model
        assert total(made) == len(model)
    inside = covers(a, np.arange(HORIZON + 2))
    assert {int(at) for at in np.flatnonzero(inside)} == moments(a)


def test_nothing_is_a_set():
    assert total(union()) == total(intersect(NOTHING, NOTHING)) == 0
    one = spans([(3, 5)])
    assert subtract(one, NOTHING).tolist() == [[3, 5]]
    assert subtract(NOTHING, one).tolist() == []


def test_times_since_the_epoch_stay_exact():
    base = 1_795_221_206_639_642_644
    assert total(intersect(spans([(base, base + 7)]), spans([(base + 3, base + 100)]))) == 4
