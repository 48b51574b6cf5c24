"""Which configuration is fastest: one answer for terminal, report and advise."""

import dataclasses

import pytest
from coverage_equal_cells import DATA, studies
from simulate import STRATEGY, Simulator, Truth

from analysis.findings.comparisons import FASTEST, TIED, comparisons, rank_configurations
from analysis.study.measured_numbers import NO_DIFFERENCE, SLOWER, UNKNOWN
from analysis.study.names import label
from analysis.study.study import Study, open_study

PROTO = [{}, {"nccl": {"NCCL_PROTO": "LL"}}, {"nccl": {"NCCL_PROTO": "Simple"}}]


def ranking(made):
    study = Study.of(made)
    (only,) = rank_configurations(study, comparisons(study))
    return only


def standings(found):
    return [each.standing for each in found.configurations]


def made_of(cells, repeats=5, seed=0, noise=0.001):
    """Runs in turns of cells, each (strategy, factor, what else is asked)."""
    simulator, made = Simulator(Truth(noise=noise), seed), []
    for repeat in range(repeats):
        for strategy, factor, asked in cells:
            made.append(simulator.record((0, 1), strategy, repeat, factor=factor, **asked))
    return made


def test_the_fastest_is_named_with_what_is_tied_with_it_and_how_much_others_are_slower():
    cells = [("kvstore_device", 0.95, {}), (STRATEGY, 1.0, {}), (STRATEGY, 1.0003, PROTO[1])]
    found = ranking(made_of([*cells, ("none", 1.1, {})]))
    assert standings(found) == [FASTEST, TIED, SLOWER], "`none` exchanges nothing"
    assert found.fastest is found.configurations[0] and found.rate.name == "images/s"
    slower = found.configurations[2]
    assert slower.runs.strategy == "kvstore_device"
    assert slower.behind.low < -0.05 < slower.behind.high < -0.04
    rates = [each.rate.value for each in found.configurations]
    assert rates == sorted(rates, reverse=True) and all(
        each.rate.low for each in found.configurations
    )


def test_a_single_run_and_a_lent_floor_cannot_be_told_and_stand_where_their_rates_are():
    made = made_of([(STRATEGY, 1.0, {}), ("kvstore_device", 0.9, {})])
    simulator = Simulator(Truth(noise=0.001), 9)
    made += [simulator.record((0, 1), "cpu_staged", factor=1.2)]
    made += [simulator.record((0, 1), "kvstore_dist_sync", repeat) for repeat in (0, 1)]
    found = ranking(made)
    by_strategy = {each.runs.strategy: each for each in found.configurations}
    assert found.configurations[0].runs.strategy == "cpu_staged"
    assert found.fastest.runs.strategy == STRATEGY
    assert by_strategy["kvstore_device"].standing == SLOWER
    for name, why in (("cpu_staged", "a single run"), ("kvstore_dist_sync", "comes from")):
        assert by_strategy[name].standing == UNKNOWN and why in by_strategy[name].why
        assert by_strategy[name].behind.low is None
    alone = ranking(made_of([(STRATEGY, 1.0, {}), ("kvstore_device", 0.9, {})], repeats=1))
    assert alone.fastest is None and standings(alone) == [UNKNOWN, UNKNOWN]
    assert alone.configurations[1].behind.value == pytest.approx(-0.1, abs=0.01)


def test_what_checks_said_of_its_runs_stands_beside_a_configuration():
    made = made_of([(STRATEGY, 1.0, {}), ("kvstore_device", 0.9, {})])
    doubt = dataclasses.replace(made[1].validity, verdict="suspect", codes={"noisy": "it is"})
    made[1] = dataclasses.replace(made[1], validity=doubt)
    found = ranking(made)
    assert standings(found) == [FASTEST, SLOWER], "by its own runs"
    assert [each.runs.doubts for each in found.configurations] == [(), ("noisy",)]


def test_equal_configurations_are_tied_though_the_first_was_chosen_for_its_rate():
    """Of six that differ in two things, which no comparison covers, the highest is one of 15 pairs."""
    cells = [(name, 1.0, asked) for name in (STRATEGY, "kvstore_device") for asked in PROTO]
    wrong = 0
    for seed in range(60):
        wrong += SLOWER in standings(ranking(made_of(cells, seed=seed)))
    assert wrong <= 6


def test_each_amount_of_work_and_number_of_gpus_has_a_ranking_of_its_own():
    simulator, made = Simulator(Truth(noise=0.001)), []
    for repeat in range(3):
        for gpus in ((0,), (1,), (0, 1), (0, 2)):
            for asked in ({}, {"batch_size": 64}):
                made.append(simulator.record(gpus, repeat=repeat, **asked))
    study = Study.of(made)
    found = rank_configurations(study, comparisons(study))
    sizes = [[each.runs.cell.world_size for each in one.configurations] for one in found]
    assert sizes == [[2] * 4, [1] * 4], "on most GPUs first; which GPUs, and the batch, are choices"


def test_committed_studies_get_the_verdicts_of_their_comparisons():
    study = open_study(DATA / "h200_x2" / "strategies")
    (found,) = rank_configurations(study, comparisons(study))
    tied = [label(study, each.runs) for each in found.configurations if each.standing == TIED]
    assert (label(study, found.fastest.runs), tied) == ("kvstore_device", ["nccl_allreduce"])
    checked = 0
    for study in studies():
        compared = comparisons(study)
        verdict_of = {}
        for pair in compared:
            for key in (pair.first_key, pair.second_key):
                other = pair.second_key if key is pair.first_key else pair.first_key
                names = (frozenset(key.items()), frozenset(other.items()))
                verdict_of[(pair.gpus, *names)] = pair.verdict
        for one in rank_configurations(study, compared):
            for each in one.standing(TIED) + one.standing(SLOWER):
                names = [frozenset(runs.key.items()) for runs in (each.runs, one.fastest.runs)]
                verdict = verdict_of.get((each.runs.gpus, *names))
                if verdict and each.runs.gpus == one.fastest.runs.gpus:
                    assert (verdict == NO_DIFFERENCE) == (each.standing == TIED)
                    checked += 1
    assert checked >= 10
