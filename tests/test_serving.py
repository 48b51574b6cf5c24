"""The server's rules, without processes: the bound on staleness, and that every push is served."""

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

    def __init__(self, config, control):
        self.config, self.control, self.own_buckets = config, control, list(range(BUCKETS))
        self.served, self.staleness = [], []
        self.version = np.zeros(BUCKETS, int)
        self.seen = np.zeros((config.workers, BUCKETS), int)  # the version that a worker has

    def serve(self, bucket, workers, number):
        for worker in workers:
            self.served.append((worker, bucket, number))
            self.staleness.append(self.version[bucket] - self.seen[worker, bucket])
        self.version[bucket] += 1
        self.seen[workers, bucket] = self.version[bucket]
        self.control.done[workers, bucket] = number


def drive(workers, synchronous, bound, seed, mode=UPDATE):
    """Workers that push all buckets, each in its own order, and go on once all are answered.

    They take turns at random, some much slower than others. Returns (control, arithmetic).
    """
    chance = random.Random(seed)
    arrays = (Array(1, "float32", "float32"),) * BUCKETS
    config = KvstoreConfig(arrays, tuple(range(BUCKETS)), 0, workers, 1, 10, synchronous, bound)
    control = Control(np.zeros(1 << 16, np.uint8), config, BUCKETS)
    control.settings[:, 0] = mode
    arithmetic = Counting(config, control)
    server = Server(arithmetic, 0)
    number = [0] * workers  # the exchange in hand
    left = [[] for _ in range(workers)]  # buckets that it has still to push
    speed = [chance.choice([1, 1, 4, 16]) for _ in range(workers)]
    idle = 0  # turns in which nobody can push and nothing is served
    for _ in range(20_000):
        (worker,) = chance.choices(range(workers), speed)
        answered = (control.done[worker] == number[worker]).all()
        if not left[worker] and number[worker] < PUSHES and answered:
            number[worker] += 1
            left[worker] = chance.sample(range(BUCKETS), BUCKETS)
        if left[worker]:
            control.pushed[worker, left[worker].pop()] = number[worker]
        if left[worker] and chance.random() >= 0.3:
            continue  # a worker that waits lets the server look
        waiting = (control.done < np.array(number)[:, None]).any(axis=1)
        stuck = all(n == PUSHES or waits for n, waits in zip(number, waiting, strict=True))
        idle = 0 if server.turn() or any(left) or not stuck else idle + 1
        if idle == 3:
            return control, arithmetic
    raise AssertionError("workers or server never come to an end")


def every_push(workers):
    pushes = range(1, PUSHES + 1)
    return [(w, b, number) for w in range(workers) for b in range(BUCKETS) for number in pushes]


@settings(deadline=None, max_examples=80)
@given(some.data(), some.integers(2, 5), some.integers(0, 2**32))
def test_no_update_is_staler_than_the_bound_and_every_push_is_served(data, workers, seed):
    bound = data.draw(some.integers(workers - 1, 3 * workers))
    control, arithmetic = drive(workers, synchronous=False, bound=bound, seed=seed)
    assert sorted(arithmetic.served) == every_push(workers)
    assert control.staleness_max[0] == max(arithmetic.staleness) <= bound
    assert control.updates[0] == len(arithmetic.staleness)
    assert control.staleness_sum[0] == sum(arithmetic.staleness)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_without_a_bound_some_schedule_breaks_those_above(workers):
    controls = [drive(workers, synchronous=False, bound=None, seed=seed)[0] for seed in range(40)]
    assert max(control.staleness_max[0] for control in controls) > 3 * workers


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
    turns = [worker for worker, _, _ in arithmetic.served]
    assert turns == list(range(workers)) * (PUSHES * BUCKETS)
    assert sorted(arithmetic.served) == every_push(workers)
    assert control.updates[0] == 0


def test_what_hands_gradients_back_makes_nothing_stale():
    control, arithmetic = drive(3, synchronous=False, bound=2, seed=1, mode=REDUCE)
    assert len(arithmetic.served) == 3 * PUSHES * BUCKETS
    assert control.staleness_max[0] == control.updates[0] == 0
