"""The server's rules, without processes: a bound on staleness holds in any order of pushes, and every push is served."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from trainers.kvstore.buckets import Array
from trainers.kvstore.server import Arithmetic, Server
from trainers.kvstore.shared_memory import REDUCE, UPDATE, Control, KvstoreConfig

BUCKETS, PUSHES = 3, 16


class Counting(Arithmetic):
    """Answers at once; counts for itself how stale every push was."""

    def __init__(self, control, workers):
        self.control, self.served = control, []
        self.version = [0] * BUCKETS
        self.given = [[0] * BUCKETS for _ in range(workers)]
        self.staleness = []

    def serve(self, bucket, workers, number):
        self.served += [(worker, bucket, number) for worker in workers]
        for worker in workers:
            self.staleness.append(self.version[bucket] - self.given[worker][bucket])
        self.version[bucket] += 1
        for worker in workers:
            self.given[worker][bucket] = self.version[bucket]
            self.control.done[worker, bucket] = number


def finished(control, number, pushes):
    """Whether nobody can push: all have pushed everything, or wait for an answer."""
    return all(n == pushes or (control.done[worker] < n).any() for worker, n in enumerate(number))


def drive(workers, synchronous, bound, seed, pushes=PUSHES, ask=UPDATE):
    """Workers that push all buckets, each in its own order, and go on once all are answered, in a random schedule."""
    chance = random.Random(seed)
    arrays = (Array(1, "float32", "float32"),) * BUCKETS
    config = KvstoreConfig(arrays, tuple(range(BUCKETS)), 0, workers, 1, 10, synchronous, bound)
    control = Control(np.zeros(Control.bytes(config, BUCKETS), np.uint8), config, BUCKETS)
    control.settings[:, 0] = ask
    arithmetic = Counting(control, workers)
    server = Server(config, control, 0, list(range(BUCKETS)), arithmetic)
    number = [0] * workers  # the exchange in hand
    left = [[] for _ in range(workers)]  # buckets that it has still to push
    speed = [
        chance.choice([1, 1, 4, 16]) for _ in range(workers)
    ]  # some are much slower than others
    idle = 0
    for _ in range(20_000):
        (worker,) = chance.choices(range(workers), speed)
        if (
            not left[worker]
            and number[worker] < pushes
            and (control.done[worker] == number[worker]).all()
        ):
            number[worker] += 1
            left[worker] = chance.sample(range(BUCKETS), BUCKETS)
        if left[worker]:
            control.pushed[worker, left[worker].pop()] = number[worker]
        if not left[worker] or chance.random() < 0.3:  # a worker that waits lets the server look
            idle = (
                0
                if server.turn() or any(left) or not finished(control, number, pushes)
                else idle + 1
            )
        if idle == 3:
            return control, arithmetic
    raise AssertionError("workers or server never come to an end")


@settings(deadline=None, max_examples=80)
@given(some.data(), some.integers(2, 5), some.integers(0, 2**32))
def test_no_update_is_staler_than_the_bound_and_every_push_is_served(data, workers, seed):
    bound = data.draw(some.integers(workers - 1, 3 * workers))
    control, arithmetic = drive(workers, synchronous=False, bound=bound, seed=seed)
    everyone = [
        (w, bucket, number)
        for w in range(workers)
        for bucket in range(BUCKETS)
        for number in range(1, PUSHES + 1)
    ]
    assert sorted(arithmetic.served) == everyone
    assert max(arithmetic.staleness) <= bound
    assert control.staleness_max[0] == max(arithmetic.staleness)
    assert (
        control.staleness_counts[0].tolist()
        == np.bincount(arithmetic.staleness, minlength=64).tolist()
    )


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_without_a_bound_some_schedule_breaks_those_above(workers):
    worst = [
        drive(workers, synchronous=False, bound=None, seed=seed)[0].staleness_max[0]
        for seed in range(40)
    ]
    assert max(worst) > 3 * workers


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_tightest_bound_makes_workers_take_turns(workers):
    _, arithmetic = drive(workers, synchronous=False, bound=workers - 1, seed=3)
    for bucket in range(BUCKETS):
        turns = [worker for worker, served, _ in arithmetic.served if served == bucket]
        assert turns == list(range(workers)) * PUSHES


@settings(deadline=None, max_examples=40)
@given(some.integers(1, 5), some.integers(0, 2**32))
def test_synchronous_exchanges_wait_for_every_worker(workers, seed):
    control, arithmetic = drive(workers, synchronous=True, bound=None, seed=seed)
    served = arithmetic.served
    assert [worker for worker, _, _ in served] == list(range(workers)) * (PUSHES * BUCKETS)
    assert sorted(served) == [
        (w, b, n) for w in range(workers) for b in range(BUCKETS) for n in range(1, PUSHES + 1)
    ]
    assert control.staleness_counts.sum() == 0


def test_what_hands_gradients_back_makes_nothing_stale():
    control, arithmetic = drive(3, synchronous=False, bound=2, seed=1, ask=REDUCE)
    assert len(arithmetic.served) == 3 * PUSHES * BUCKETS
    assert control.staleness_max[0] == control.staleness_counts.sum() == 0
