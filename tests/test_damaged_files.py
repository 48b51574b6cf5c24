"""Damaged files end no reader in a traceback, take neither minutes nor memory, give no other value.

`DAMAGE_EXAMPLES=100000 pytest tests/test_damaged_files.py --seed 2` reads many more, and others.
"""

import os
import random
import resource
import signal
import tempfile
import time
import warnings
from pathlib import Path

import damage
import pytest
from damage import differences
from damaged_readers import READERS, Refusal, Seed
from hypothesis import example, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("DAMAGE_EXAMPLES", "12"))
CASE_SECONDS = 5.0  # of the processor
STARVED_SECONDS = 40.0  # where other programs have it
CASE_KIB = 1 << 20


class Hang(BaseException):
    """A case took too long. No reader may catch it."""


@pytest.fixture
def limit():
    """Return a function that calls a reader and raises Hang after CASE_SECONDS of the processor."""

    def late(*_):
        spent = time.process_time() - started[0]
        if spent < CASE_SECONDS and time.monotonic() - started[1] < STARVED_SECONDS:
            signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS - spent)
            return
        signal.setitimer(
            signal.ITIMER_REAL, 0.2
        )  # again: Python drops what is raised in cleaning up
        raise Hang

    def call(read, seed, folder):
        started[:] = time.process_time(), time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
        try:
            return read(seed, folder)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < CASE_KIB, f"{grown >> 10} MiB"

    started = [0.0, 0.0]
    previous = signal.signal(signal.SIGALRM, late)
    yield call
    signal.signal(signal.SIGALRM, previous)


def damaged(reader, seeds, source):
    """Return (whole seed, damaged seed, whether the file only lost something)."""
    whole = source.choice(seeds)
    siblings = [seed.data for seed in seeds if seed.name == whole.name]
    mutations = source.choices((*reader.damages, *reader.losses), k=source.choice((1, 1, 1, 2, 3)))
    if reader.losses and source.random() < 0.25:
        mutations = [source.choice(reader.losses)]
    data = whole.data
    for mutation in mutations:
        data = mutation(source, data, siblings)
    lost = len(mutations) == 1 and mutations[0] in reader.losses
    return whole, Seed(data, whole.name), lost


@pytest.mark.parametrize("name", READERS)
def test_damage_breaks_no_reader(name, limit, tmp_path, request):
    reader = READERS[name]
    seeds = reader.seeds()
    draw = request.config.getoption("seed")
    results = {}

    def result_of_whole(whole):
        if whole not in results:
            with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
                results[whole] = reader.read(whole, Path(folder))
        return results[whole]

    def read_damaged(source):
        whole, part, lost = damaged(reader, seeds, source)
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            try:
                result = limit(reader.read, part, Path(folder))
            except Refusal:
                return
        if lost and result is not None:
            assert not list(differences(result, result_of_whole(whole), reader.follows))

    result_of_whole(seeds[0])  # imports count for no case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are none
        for number in range(max(2, round(EXAMPLES * reader.share))):
            case = f"{name}/{draw}/{number}"
            try:
                read_damaged(random.Random(case))
            except (Exception, Hang) as error:
                raise AssertionError(f"case {case}") from error


@pytest.mark.parametrize(
    ("part", "count"),
    [
        ({"rows": [{"a": 1}, {"a": 3}]}, 0),
        ({"rows": [{"a": 1}, {"a": None}], "notes": ["cut"]}, 0),
        ({"rows": []}, 0),
        ({"rows": [{"a": 4}]}, 1),
        ({"rows": [{"a": 3}, {"a": 1}]}, 1),
        ({"rows": [], "mean": 1.5}, 1),
        ({"new": 1}, 1),
    ],
)
def test_less_is_no_other_value(part, count):
    whole = {"rows": [{"a": 1}, {"a": 2}, {"a": 3}], "mean": 2.0}
    assert len(list(differences(part, whole))) == count


def loop(seed, folder):
    while True:
        pass


def fill_memory(seed, folder):
    return [b"x" * (1 << 29) for _ in range(3)]


def test_a_reader_that_hangs_is_found(limit, tmp_path, monkeypatch):
    monkeypatch.setattr("test_damaged_files.CASE_SECONDS", 0.2)
    with pytest.raises(Hang):
        limit(loop, Seed(b"a"), tmp_path)


def test_a_reader_that_takes_the_memory_is_found(limit, tmp_path):
    with pytest.raises(AssertionError, match="MiB"):
        limit(fill_memory, Seed(b"a"), tmp_path)


@given(number=st.integers(0, 2**32 - 1))
@example(number=0)
@settings(max_examples=5, deadline=None)
def test_mutations_change_what_they_say(number):
    data = b'{"a": [1, 2, {"b": "x"}], "c": null}\n'
    for mutation in (*damage.TEXT, *damage.JSON):
        source = random.Random(number)
        assert any(mutation(source, data, [data]) != data for _ in range(20)), mutation.__name__
