"""Advice: in which order cells that could be run stand, and what the command prints of records."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from build import DATA, make_record

from analysis.__main__ import main
from analysis.commands.advise_cells import is_as_fast, rank
from analysis.findings.comparisons import TIED, comparisons, rank_configurations
from analysis.prediction.calibration_data import calibrate
from analysis.prediction.candidates import (
    ForecastRequest,
    candidates,
    farthest_class,
    machine_gpus,
    topology_of,
)
from analysis.prediction.forecast import forecast, held_out_cells, scores_of
from analysis.prediction.query import Subset
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.noise_floor import Scatter, group_of
from analysis.study.study import Study, open_study
from analysis.topology.readers import read_topology
from benchmarks.record import write
from benchmarks.record.folder import CellFolder

WATERFALL, SETTINGS = DATA / "h200_x4" / "waterfall", DATA / "h200_x4" / "settings_again"
DGX1 = str(DATA / "topo_dgx1_v100.txt")
LOC = {"NCCL_P2P_LEVEL": "LOC"}


def test_the_farthest_link_of_several_gpus():
    topology = read_topology(DGX1)
    assert {farthest_class(topology, (0, other)) for other in (1, 3, 5)} == {"NV1", "NV2", "SYS"}
    assert farthest_class(topology, (0, 99)) is None and farthest_class(None, (0, 1)) is None


def advice_on(study, pairs, settings=({},), scores=None, **asked):
    calibration = calibrate(study)
    chosen = [Subset(len(members), members=members) for members in pairs]
    request = ForecastRequest(chosen, settings, gpus_of_host=4, every_option=True, **asked)
    several = next(iter(candidates(calibration, request).values()))
    held = held_out_cells(calibration, [candidate.query for candidate in several])
    by_way = {way: scores or scores_of(results) for way, results in held.items()}
    ranked, _ = rank(calibration, several, by_way)
    return ranked


def with_floor(study, strategy="nccl_allreduce"):
    """The study, where others showed that runs of a strategy's equal cells differ by 0.2 %."""
    group = group_of(study.records[0])._replace(strategy=strategy)
    floor = {(group, IMAGES_PER_SECOND): Scatter(runs=12, freedom=8, squares=8 * 0.002**2)}
    return Study.of(study.records, scatters=floor)


def test_a_measured_cell_has_the_interval_that_reports_show():
    study = with_floor(open_study(SETTINGS))
    ranked = advice_on(study, [(0, 3), (0, 1)], [{}, LOC], [2.0] * 12)
    cells = {}
    for cell in ranked:
        cells[cell.candidate.query.members, bool(cell.candidate.nccl)] = cell
    assert len(cells) == 4
    assert cells[(0, 3), False].runs == 3 and cells[(0, 1), False].runs == 0
    assert cells[(0, 3), False].rate == pytest.approx(9311, abs=1)
    slow = cells[(0, 3), True]
    (runs,) = (runs for runs in study.runs if runs.cell.nccl == LOC)
    reported = runs.next_run(IMAGES_PER_SECOND)
    assert (slow.rate, slow.low, slow.high) == (reported.value, reported.low, reported.high)
    # LOC is 2.2 % slower
    alike = {key: is_as_fast(cell, ranked[0]) for key, cell in cells.items()}
    assert alike[(0, 3), False] and alike[(0, 1), False] and not alike[(0, 3), True]


def test_a_rate_of_nothing_is_none():
    records = []
    for record in open_study(SETTINGS).records:
        metrics = record.metrics | {"throughput/images_per_second": 0.0}
        records.append(replace(record, metrics=metrics))
    for cell in advice_on(Study.of(records), [(0, 3)], [{}, LOC]):
        assert cell.runs == 0 and cell.rate > 9000


def test_an_interval_that_another_strategy_lent_says_no_order():
    ranked = advice_on(with_floor(open_study(SETTINGS), "none"), [(0, 3)], [{}, LOC])
    for cell in ranked:
        assert cell.low < cell.rate < cell.high and is_as_fast(cell, ranked[0]) is None
        assert "its interval in the table uses the variation of none on 2 GPUs" in cell.why


def test_without_a_noise_floor_nothing_is_said_of_which_cell_is_best(capsys):
    """Of single runs it was "99.7 %" sure, by an assumed scatter of 0.3 % that it did not name."""
    for cell in advice_on(open_study(SETTINGS), [(0, 3)], [{}, LOC]):
        assert cell.low is None and cell.high is None and is_as_fast(cell, cell) is None
    assert main(["advise", str(SETTINGS), "--gpus", "0+3", "--nccl", "P2P_LEVEL=LOC"]) == 0
    assert "Best guess: nccl_allreduce" in capsys.readouterr().out, "there is no other"
    assert main(["advise", str(SETTINGS), "--gpus", "0+3"]) == 0
    printed = capsys.readouterr().out
    assert main(["advise", str(SETTINGS)]) == 0  # the only subset that was measured
    assert capsys.readouterr().out == printed
    assert "It is not known which is fastest." in printed and "Best guess" not in printed
    assert "Too few repeats for a ± (repeats=5 gives one)" in printed
    assert " ~ " not in printed and printed.count("repeats=5\n") == 1


def test_no_upper_end_is_above_the_rate_of_compute_alone():
    """Two H200s alone: 54.25 to 54.33 ms. An exchange of which nothing is known gives no more."""
    asked = {"strategies": ["nccl_allreduce"]}
    assert not advice_on(open_study(WATERFALL), [(1, 3)], **asked)[0].bounded
    unsure = advice_on(open_study(WATERFALL), [(1, 3)], scores=[1e3] * 12, **asked)[0]
    assert unsure.bounded and unsure.low < 0.5 * unsure.rate < unsure.high
    assert unsure.high == pytest.approx(2 * 256e3 / 54.286, rel=0.01)


def test_a_measured_rate_is_that_of_the_report_and_a_forecast_has_its_long_steps():
    """images ÷ median step was 5.7 % too fast where servers or staging answer late."""
    study = open_study(DATA / "h200_x4" / "strategies")
    rates = [np.exp(runs.median_log_rate) for runs in study.timed if runs.cell.world_size == 4]
    shown = [cell.rate for cell in advice_on(study, [(0, 1, 2, 3)]) if cell.runs]
    assert len(shown) > 5
    assert all(any(np.isclose(rate, other, rtol=1e-9) for other in rates) for rate in shown)
    calibration = calibrate(study)
    (staged, *_) = (cell for cell in calibration.cells if cell.query.strategy == "cpu_staged")
    made = forecast(calibration, replace(staged.query, batch_size=128))
    assert made.images_per_second < 0.99 * 4 * 128 * 1e3 / made.step_ms


@pytest.fixture
def of_two_machines():
    """Cells on a machine of four GPUs, and fewer, newer ones on another with other links."""
    here = open_study(WATERFALL).records
    facts = {"host": "other", "topology": Path(DGX1).read_text()}
    later = max(record.started_at for record in here) + 1
    there = []
    for record in here:
        if record.cell.world_size == 4:
            record = replace(record, record_id=record.record_id[::-1], started_at=later)
            there.append(replace(record, environment=record.environment | facts))
    return Study.of([*here, *there])


def test_the_machine_that_is_asked_about_is_named_in_the_first_line(
    of_two_machines, tmp_path, capsys
):
    """It was that of most cells, whose topology was that of the newest record, and unnamed."""
    study = of_two_machines
    assert calibrate(study).machine == "vm" and topology_of(study, "vm").gpus == (0, 1, 2, 3)
    assert topology_of(study, "other").gpus == tuple(range(8))
    assert topology_of(study, "nowhere") is None
    assert machine_gpus(study, "vm") == (0, 1, 2, 3)
    for name, host in (("most", "vm"), ("fewer", "other")):
        for record in study.records:
            if record.environment["host"] == host:
                folder = tmp_path / name / record.record_id
                folder.mkdir(parents=True)
                write(CellFolder(folder), record)
    fewer, most = str(tmp_path / "fewer"), str(tmp_path / "most")
    for command, machine in (
        (
            ["predict", fewer, most],
            "other (4 × NVIDIA H200): of the 2 machines in these studies, it has the most runs of ",
        ),
        (
            ["predict", most, fewer],
            "vm (4 × NVIDIA H200): of the 2 machines in these studies, it has the most runs of ",
        ),
        (["advise", str(tmp_path / "fewer"), "--gpus", "0+1+2+3"], "other (4 × NVIDIA H200)."),
    ):
        assert main(command) == 0
        assert capsys.readouterr().out.startswith(f"These forecasts use runs on {machine}")
    assert main(["predict", fewer, most, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == "other"


def alone_on_the_cpu(folder, strategy="nccl_allreduce"):
    """A folder of cells of one CPU worker, one for each of two batch sizes, each twice."""
    options, cost = {"name": strategy}, {}
    if strategy != "none":
        options |= {"bucket_cap_mb": 25.0, "comm_hook": "none"}
        cost = {"strategy/cost_ms": 0.2}
    for number, (batch, step) in enumerate([(8, 10.0), (16, 16.0), (8, 10.2), (16, 16.4)]):
        record = make_record(
            record_id=f"{number:032x}", started_at=1000.0 + number, failure=None, environment={}
        )
        cell = replace(record.cell, gpus=(0,), nccl={}, device="cpu", strategy=options)
        cell = replace(cell, batch_size=batch, repeat=number // 2)
        metrics = {"step/ms_median": step, "throughput/images_per_second": batch * 1e3 / step}
        metrics["step/launch_ms"] = step
        cell_folder = folder / cell.folder
        cell_folder.mkdir(parents=True)
        record = replace(record, cell=cell, cell_key=cell.key, metrics=metrics | cost, tables={})
        write(CellFolder(cell_folder), record)
    return str(folder)


def test_a_study_of_one_worker_is_advised_and_forecast_without_words_on_wires(tmp_path, capsys):
    """Nothing there waits for others or has a wire, and no cell can be held out."""
    study = alone_on_the_cpu(tmp_path / "alone")
    assert main(["advise", study, "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    first = "Highest rate: nccl_allreduce on CPU worker 0 with batch 16 (988 images/s, measured)."
    assert first in printed and "It is not known which is fastest." in printed
    assert "cross-validation" not in printed and "asynchronous" not in printed
    assert main(["predict", study, "--gpus", "0", "--batch", "32"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "CPU worker 0: about 1,130 images/s." in printed
    assert not any(word in printed for word in ("direct", "γ", "links"))
    assert (
        "No error bars: forecasts for one CPU worker, or without an exchange, are not cross"
        in printed
    )
    assert main(["predict", study, "--gpus", "0", "--batch-size", "4", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["forecasts"]
    assert row["forecast"]["step_ms"] < 8, "a worker's steps are no launches"
    assert main(["predict", study, "--gpus", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["forecasts"]
    assert row["forecast"]["null_step_ms"] == row["forecast"]["step_ms"], "nothing changes"


def test_what_a_study_of_one_worker_cannot_answer_is_one_sentence(tmp_path, refusal):
    study = alone_on_the_cpu(tmp_path / "alone")
    for command, sentence in (
        ("predict STUDY --holdout batch", "needs a valid training run of several CPU"),
        (
            "predict STUDY",
            "no forecast of 2 CPU workers: no all_reduce directly between CPU workers",
        ),
        ("advise STUDY --gpus 0+1", "was measured; add a training run on several CPU workers"),
        ("advise STUDY --gpus 9", "has no CPU worker 9; expected 0, 1, 2"),
    ):
        assert sentence in refusal(*command.replace("STUDY", study).split())


def test_without_any_strategy_one_worker_is_advised_alone(tmp_path, capsys, refusal):
    study = alone_on_the_cpu(tmp_path / "alone", "none")
    assert main(["advise", study, "--gpus", "0"]) == 0
    assert "Highest rate: none on CPU worker 0 with batch 16" in capsys.readouterr().out
    assert "the study has no strategy to advise on" in refusal("advise", study, "--gpus", "0+1")


@pytest.mark.parametrize(
    "name", ["h200_x2/strategies", "h200_x2/eager_a", "h200_x4/settings_again"]
)
def test_advise_names_the_fastest_of_the_report(name, capsys):
    """It named another one, sure by 98.9 %, where the report saw no difference."""
    study = open_study(DATA / name)
    (ranking,) = [
        each for each in rank_configurations(study, comparisons(study))
        if each.configurations[0].runs.cell.world_size == 2
    ]  # fmt: skip
    gpus = "+".join(map(str, ranking.configurations[0].runs.cell.gpus))
    assert main(["advise", str(DATA / name), "--gpus", gpus]) == 0
    printed = capsys.readouterr().out
    if ranking.fastest is None:
        assert "It is not known which is fastest." in printed
        return
    assert f"Fastest: {ranking.fastest.runs.strategy} on GPUs" in printed
    for tied in ranking.standing(TIED):
        assert f"tied with {tied.runs.strategy} on" in printed
    assert printed.count(" ~ ") == len(ranking.standing(TIED))
