"""The campaign: every kind of fault in every phase where it makes one. Takes minutes: `pytest -m campaign --seed N`.

Two launchers run at once, on a machine with many cores one for every four. `--faults N` takes N faults of one host in
all, `--host-faults N` of two (test_hosts.py): `pytest -m campaign --faults 500 --host-faults 300 -k faults`.
"""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import faults_table
import pytest
from faults_launchers import WITH_PASS, WITH_SERVER, killed, launchers_of, many, sweep_of
from faults_seen import record_outcomes

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(7200)]
AT_ONCE = max(2, len(os.sched_getaffinity(0)) // 4)  # launchers


@pytest.fixture
def seed(request):
    return request.config.getoption("seed")


@pytest.fixture
def faults(request, seed):
    """The faults of each table, or as many as were asked for."""
    # Else launchers of a campaign in the background would ignore them while they compose.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return faults_table.drawn(faults_table.TABLES, seed, request.config.getoption("faults"))


def at_once(jobs):
    """What the functions return, in a list, AT_ONCE of them at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [outcome for outcomes in pool.map(lambda job: job(), jobs) for outcome in outcomes]


def test_faults_of_ranks_servers_and_agents(tmp_path, faults, record_property):
    sweeps = {
        **{f"two {number}": (faults["two"][number::AT_ONCE],) for number in range(AT_ONCE)},
        "three": (faults["three"], "gpus=0+1+2"),
        "server": (faults["server"], *WITH_SERVER),
        "agent": (faults["agent"],),
        "pass": (faults["pass"], *WITH_PASS),
    }
    jobs = [partial(sweep_of, tmp_path / name, *asked) for name, asked in sweeps.items()]
    record_outcomes(record_property, at_once(jobs))


def test_faults_that_are_signals_to_the_launcher(tmp_path, faults, store_template, record_property):
    jobs = []
    for number in range(AT_ONCE):
        share = faults["launcher"][number::AT_ONCE]
        jobs.append(partial(launchers_of, tmp_path / str(number), share, store_template))
    record_outcomes(record_property, at_once(jobs))


def test_launchers_that_are_killed_at_random(
    tmp_path, request, seed, store_template, record_property
):
    kills = request.config.getoption("kills")
    jobs = []
    for number in range(AT_ONCE):
        share = kills * (number + 1) // AT_ONCE - kills * number // AT_ONCE
        draw, folder = random.Random(f"{seed} {number}"), tmp_path / str(number)
        jobs.append(partial(killed, folder, draw, store_template, share))
    record_outcomes(record_property, at_once(jobs))


@pytest.mark.parametrize(("studies", "launchers", "cells"), [(1, 5, 2), (3, 1, 1)])
def test_launchers_that_share_a_study_or_a_store(
    tmp_path, request, seed, store_template, record_property, studies, launchers, cells
):
    rounds = request.config.getoption("launchers")
    draw = random.Random(seed)
    asked = studies, launchers, cells
    outcomes = [
        many(tmp_path / str(number), draw, store_template, *asked) for number in range(rounds)
    ]
    record_outcomes(record_property, outcomes)
