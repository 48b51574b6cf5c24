"""`+experiment=health` names devices that are slower than the others, why, and ends with status 1."""

import copy
import dataclasses
import re
from pathlib import Path

import pytest
from build import make_record, on_hosts, record
from build import study as written
from slower import slower_study

from analysis.findings.health import health
from analysis.study.study import Study, open_study
from benchmarks.record import Validity, read_study
from conf.subsets import expand, host_sets

WITH_LINES = Path(__file__).parent / "data" / "h200_x4" / "waterfall"  # each cell three times
LIMIT = 0.03  # of validity.slow_rank_limit
RATES = {(0,): 5000, (1,): 5010, (2,): 4995, (3,): 5005, (0, 1): 9900, (2, 3): 9890}


def alone(records):
    return [each for each in records if each.cell.world_size == 1]


def test_one_planted_slow_gpu_is_named_and_none_in_a_clean_study(tmp_path):
    clean = alone(open_study(WITH_LINES).records)
    counted = "4 GPUs alone (a loss of 3 % or more counts)"  # with the strategy, and without
    assert health(Study.of(clean), LIMIT) == ([], f"No slow device: {counted}, {counted}.", True)
    slower_study(WITH_LINES, tmp_path / "slow", 1.05, lambda each: each.cell.gpus == (2,))
    slow, *_ = health(Study.of(alone(read_study(tmp_path / "slow")[0])), LIMIT)
    assert len(slow) == 2 and all(line.startswith("SLOW: gpus 2, 4.") for line in slow)


def eight_runs(changes=None, rates=(), repeats=2):
    """A study of four GPUs alone and two pairs; `changes` are of the runs on one subset."""
    records = []
    for gpus, rate in (RATES | dict(rates)).items():
        for repeat in range(repeats):
            of_subset = copy.deepcopy((changes or {}).get(gpus, {}))
            cell = {"repeat": repeat, "nccl": {}}
            noise = 1 + 0.002 * repeat
            records.append(record(len(records), [*gpus], rate * noise, cell=cell, **of_subset))
    return records


def verdict_of(folder, records):
    return health(open_study(written(folder / "study", records)), LIMIT)


CLOCK = {(3,): {"metrics": {"gpu/sm_mhz": 1400.0}}}
HOT = {"verdict": "suspect", "codes": {"throttled": "the GPU was throttled: 91 °C"}}
HOT |= {"unchecked": {}, "limits": {}, "not_applicable": {}}
SHM = {"effective": {"transport": "SHM over NV18"}}
LINK = "each is as fast as the others alone, so look at the link between them"
USED = "NCCL used SHM over NV18, usual P2P/CUMEM over NV18"
PLANTED = [
    (CLOCK, {(3,): 4000}, ["3, 20.0 %: its clock is 1,400 MHz, usual 1,979"]),
    ({(3,): {"validity": HOT}}, {(3,): 4000}, ["3, 20.0 %: the GPU was throttled: 91 °C"]),
    (None, {(1,): 4500}, ["1, 10.0 %: no check says why"]),
    ({(2, 3): SHM}, {(2, 3): 8910}, [f"2,3, 10.0 %: {USED}"]),
    (None, {(2, 3): 8910}, [f"2,3, 10.0 %: {LINK}"]),
    (None, {(3,): 4000, (2, 3): 8910},
     ["3, 20.0 %: no check says why", "2,3, 10.0 %: 3 is slow alone"]),
    (None, {(3,): 4900}, []),  # 2 %
]  # fmt: skip


@pytest.mark.parametrize(("changes", "rates", "slow"), PLANTED)
def test_the_slowest_comes_first_with_the_fault_that_fits(tmp_path, changes, rates, slow):
    lines, compared, _ = verdict_of(tmp_path, eight_runs(changes, rates))
    short = [
        re.sub(r"^SLOW: gpus | below the median of the others|\.$", "", line) for line in lines
    ]
    assert short == slow
    counts = "(a loss of 3 % or more counts)"
    verdict = "Compared" if slow else "No slow device"
    assert compared == f"{verdict}: 4 GPUs alone {counts}, 2 subsets of 2 {counts}."


def test_what_was_not_compared_is_not_called_healthy(tmp_path):
    single = verdict_of(tmp_path / "once", eight_runs(rates={(3,): 4000}, repeats=1))
    once = "(not judged: each ran once, and repeats=2 is needed)"
    assert single == ([], f"Not judged: 4 GPUs alone {once}, 2 subsets of 2 {once}.", False)
    suspect = {gpus: {"validity": HOT} for gpus in RATES}
    doubted, said, _ = verdict_of(tmp_path / "suspect", eight_runs(suspect))
    assert doubted == ["NOT JUDGED: every run is suspect, so no device can be called healthy."]
    assert said.startswith("Compared: 4 GPUs alone")
    of_one = [each for each in eight_runs() if each["cell"]["gpus"] == [0]]
    said = verdict_of(tmp_path / "one", of_one)
    assert said == ([], "Not judged: 1 GPU alone (no other to compare with).", False)


def test_a_slow_host_is_named(tmp_path):
    records = []
    for host, rate in (("a", 5000), ("b", 4400), ("c", 5010)):
        for repeat in range(2):
            cell = {"repeat": repeat, "nccl": {}}
            records.append(on_hosts(len(records), [host], [0], rate + repeat, cell=cell))
    (slow,), *_ = verdict_of(tmp_path, records)
    assert slow.startswith("SLOW: b · gpus 0, 12.1 % below the median of the others: ")


@pytest.mark.parametrize(
    ("slow_worker", "repeats", "status", "first"),
    [(None, 2, 0, "No slow device"), (1, 2, 1, "SLOW: gpus 1, 10."), (None, 1, 3, "Not judged")],
)
def test_the_status_says_slow_or_not_judged(
    launch, monkeypatch, slow_worker, repeats, status, first
):
    """The planned cells are real, their records are made; a real sweep is README's command."""

    def measure(sweep, index):
        cell = sweep.cells[index].cell
        rate = 1000.0 + index - 100 * (cell.gpus == (slow_worker,))
        metrics = {"throughput/images_per_second": rate}
        made = make_record(cell=cell, record_id=f"{index:032x}", cell_key=cell.key, metrics=metrics)
        made = dataclasses.replace(made, validity=Validity(), failure=None)
        sweep.known.append(made)
        sweep.measured.append(made)

    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr("launch.sweep.LocalEngine.open", lambda engine, cell: None)
    monkeypatch.setattr("launch.sweep.SweepRun._try_cell", measure)
    asked = (f"repeats={repeats}", "report=false", "tracking.enabled=false")
    code, out, err = launch("+experiment=health", *asked)
    assert (code, err) == (status, "") and f"\n{first}" in out


def test_every_device_has_a_neighbour():
    pairs = {count: expand("neighbours", range(count)) for count in range(1, 6)}
    assert pairs == {
        1: [(0,)], 2: [(0, 1)], 3: [(0, 1), (1, 2)], 4: [(0, 1), (2, 3)],
        5: [(0, 1), (2, 3), (3, 4)],
    }  # fmt: skip
    assert host_sets(["neighbours"], ["a", "b"]) == [("a", "b")]
