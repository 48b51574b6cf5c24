"""Advice: chances against closed forms, and what the command says of records."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from build import make_record
from scipy.stats import norm

from analysis.__main__ import main
from analysis.prediction.advise import (
    ForecastRequest,
    advise,
    candidates,
    chances,
    farthest_class,
    machine_gpus,
    topology_of,
)
from analysis.prediction.calibration import calibrate
from analysis.prediction.forecast import HeldOutScores, forecast
from analysis.prediction.query import Subset
from analysis.study.study import Study, open_study
from analysis.topology.readers import read_topology
from benchmarks.record import write
from benchmarks.record.folder import CellFolder

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
WATERFALL, SETTINGS = DATA / "h200_x4" / "waterfall", DATA / "h200_x4" / "settings_again"
H200, DGX1 = str(DATA / "topo_h200_x4.txt"), str(DATA / "topo_dgx1_v100.txt")
LOC = {"NCCL_P2P_LEVEL": "LOC"}


def independent(means, deviations):
    """Rates, as draws."""
    normal = np.random.default_rng(5).standard_normal((len(means), 40_000))
    rates = []
    for mean, deviation, drawn in zip(means, deviations, normal, strict=True):
        rates.append(np.concatenate([[mean], mean + deviation * drawn]))
    return rates


def test_two_independent_cells_against_closed_forms():
    """Rates 10 ± 1 and 9 ± 1: the larger of two (Clark 1961)."""
    p_fastest, p_as_fast = chances(independent([10.0, 9.0], [1.0, 1.0]))
    sigma = np.sqrt(2)
    assert p_fastest == pytest.approx([norm.cdf(1 / sigma), norm.sf(1 / sigma)], abs=0.02)
    assert list(p_as_fast) == pytest.approx([1.0, norm.sf(1 / sigma)], abs=0.02)


def test_equal_cells_share_their_chance_and_rates_may_lie_below_0():
    rate = np.array([10.0, 9.0, 11.0])
    p_fastest, p_as_fast = chances([rate, rate])
    assert list(p_fastest) == [0.5, 0.5] and list(p_as_fast) == [1.0, 1.0]
    p_fastest, p_as_fast = chances(independent([10.0, 9.0], [100.0, 100.0]))
    assert sum(p_fastest) == pytest.approx(1.0) and p_as_fast[0] == 1.0


def test_the_farthest_link_of_several_gpus():
    topology = read_topology(DGX1)
    assert {farthest_class(topology, (0, other)) for other in (1, 3, 5)} == {"NV1", "NV2", "SYS"}
    assert farthest_class(topology, (0, 99)) is None and farthest_class(None, (0, 1)) is None


def advice_on(study, pairs, settings=({},), **asked):
    calibration = calibrate(study)
    chosen = [Subset(len(members), members=members) for members in pairs]
    request = ForecastRequest(chosen, settings, gpus_of_host=4, every_option=True, **asked)
    several = next(iter(candidates(calibration, request).values()))
    ranked, _ = advise(calibration, several, HeldOutScores(calibration))
    return ranked


def test_a_measured_cell_counts_by_its_runs():
    advice = advice_on(open_study(SETTINGS), [(0, 3), (0, 1)], [{}, LOC])
    cells = {}
    for cell in advice:
        cells[cell.candidate.query.members, bool(cell.candidate.nccl)] = cell
    assert len(cells) == 4
    assert cells[(0, 3), False].runs == 3
    assert cells[(0, 3), False].rate == pytest.approx(9311, abs=1)
    assert cells[(0, 1), False].runs == 0 and cells[(0, 1), False].as_fast
    assert (
        not cells[(0, 3), True].as_fast and not cells[(0, 1), True].as_fast
    )  # LOC is 2.2 % slower


def test_no_upper_end_is_above_the_rate_of_compute_alone(monkeypatch):
    """Two H200s alone: 54.25 to 54.33 ms. An exchange of which nothing is known gives no more."""
    asked = {"strategies": ["nccl_allreduce"]}
    sure = advice_on(open_study(WATERFALL), [(1, 3)], **asked)[0]
    assert not sure.bounded
    monkeypatch.setattr(HeldOutScores, "of", lambda self, query: [1e3] * 12)
    unsure = advice_on(open_study(WATERFALL), [(1, 3)], **asked)[0]
    assert unsure.bounded and unsure.low < 0.5 * unsure.rate < unsure.high
    assert unsure.high == pytest.approx(2 * 256e3 / 54.286, rel=0.006)


def test_a_choice_between_cells_that_are_hardly_known_stays_below_twice_their_rate():
    """A few noisy steps: the interval of each run reaches to 22,026 times its step."""
    inside = {"step/ms_median": {"low": 27.0 / np.exp(10), "high": 27.0 * np.exp(10)}}
    records = [replace(one, within_run=inside) for one in open_study(SETTINGS).records]
    advice = advice_on(Study.of(records), [(0, 3)], [{}, LOC])
    for cell in advice:
        assert cell.bounded and cell.rate < cell.high <= 2.001 * cell.rate


def test_a_measured_rate_is_that_of_the_report_and_a_forecast_has_its_long_steps():
    """images ÷ median step was 5.7 % too fast where servers or staging answer late."""
    study = open_study(DATA / "h200_x4" / "strategies")
    advice = advice_on(study, [(0, 1, 2, 3)])
    rates = [np.exp(runs.median_log_rate) for runs in study.timed if runs.world_size == 4]
    shown = [cell.rate for cell in advice if cell.runs]
    assert len(shown) > 5
    for rate in shown:
        assert any(np.isclose(rate, measured, rtol=1e-9) for measured in rates)
    calibration = calibrate(study)
    (staged, *_) = (cell for cell in calibration.cells if cell.query.strategy == "cpu_staged")
    made = forecast(calibration, replace(staged.query, batch_size=128))
    assert made.images_per_second < 0.99 * 4 * 128 * 1e3 / made.step_ms


def of_two_machines():
    """Cells on a machine of four GPUs, and fewer, newer ones on another with other links."""
    here = open_study(WATERFALL).records
    facts = {"host": "other", "topology": Path(DGX1).read_text()}
    later = max(record.started_at for record in here) + 1
    there = []
    for record in here:
        if record.cell.world_size == 4:
            environment = record.environment | facts
            there.append(replace(record, started_at=later, environment=environment))
    return Study.of([*here, *there])


def test_an_advice_is_for_the_machine_of_most_cells():
    """Its topology was that of the newest record, whatever machine that was of."""
    study = of_two_machines()
    calibration = calibrate(study)
    topology = topology_of(study, "vm")
    assert calibration.machine == "vm" and topology.gpus == (0, 1, 2, 3)
    assert topology_of(study, "other").gpus == tuple(range(8))
    assert topology_of(study, "nowhere") is None
    assert machine_gpus(study, "vm") == (0, 1, 2, 3)


def placed(study, folder):
    for record in study.records:
        cell_folder = folder / f"{record.record_id}-{record.environment['host']}"
        cell_folder.mkdir(parents=True)
        write(CellFolder(cell_folder), record)
    return str(folder)


def test_the_machines_of_a_study_are_said(tmp_path, capsys):
    folder = placed(of_two_machines(), tmp_path / "several")
    assert main(["advise", folder, "--gpus", "0+1+2+3"]) == 0
    words = "the study has cells of 2 machines: this is for vm, where most of them ran"
    assert words in capsys.readouterr().out


def alone_on_the_cpu(folder, strategy="nccl_allreduce"):
    """A folder of cells of one CPU worker, one for each of two batch sizes, each twice."""
    options = {"name": strategy}
    if strategy != "none":
        options |= {"bucket_cap_mb": 25.0, "comm_hook": "none"}
    for number, (batch, step) in enumerate([(8, 10.0), (16, 16.0), (8, 10.2), (16, 16.4)]):
        started_at, record_id = 1000.0 + number, f"{number:032x}"
        record = make_record(
            record_id=record_id, started_at=started_at, failure=None, environment={}
        )
        cell = replace(record.cell, gpus=(0,), nccl={}, device="cpu", strategy=options)
        cell = replace(cell, batch_size=batch, repeat=number // 2)
        rate = batch * 1e3 / step
        metrics = {
            "step/ms_median": step,
            "step/ms_p95": step,
            "throughput/images_per_second": rate,
        }
        if strategy != "none":
            metrics["strategy/cost_ms"] = 0.2
        cell_folder = folder / cell.folder
        cell_folder.mkdir(parents=True)
        record = replace(record, cell=cell, cell_key=cell.key, metrics=metrics, tables={})
        write(CellFolder(cell_folder), record)
    return str(folder)


def test_a_study_of_one_worker_is_advised_and_forecast_without_words_on_wires(tmp_path, capsys):
    """Nothing there waits for others or has a wire, and no cell can be held out."""
    study = alone_on_the_cpu(tmp_path / "alone")
    assert main(["advise", study, "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    first = "First is nccl_allreduce on CPU worker 0 with batch 16: 988 images/s, measured."
    assert first in printed and "held out" not in printed and "asynchronous" not in printed
    assert main(["predict", study, "--gpus", "0", "--batch", "32"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "gpus 0 " in printed
    for word in ("direct", "γ", "links"):
        assert word not in printed
    assert "no error is claimed: cells of one CPU worker, or without an exchange, are" in printed
    assert main(["predict", study, "--gpus", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["forecasts"]
    made = row["forecast"]
    assert made["null_step_ms"] == made["step_ms"], "nothing changes"


def test_what_a_study_of_one_worker_cannot_answer_is_one_sentence(tmp_path, capsys):
    study = alone_on_the_cpu(tmp_path / "alone")
    for arguments, sentence in (
        (["predict", study, "--holdout", "batch"], "has no valid training cell of several CPU"),
        (["predict", study], "no forecast of 2 CPU workers: no all_reduce directly between ranks"),
        (["advise", study, "--gpus", "0+1"], "was measured; add a training cell of several ranks"),
        (["advise", study, "--gpus", "9"], "has no CPU worker 9; accepted are 0, 1, 2"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert sentence in error and error.count("\n") == 1


def test_without_any_strategy_one_worker_is_forecast_and_advised_alone(tmp_path, capsys):
    study = alone_on_the_cpu(tmp_path / "alone", "none")
    assert main(["predict", study, "--gpus", "0"]) == 0
    assert "none" in capsys.readouterr().out
    assert main(["advise", study, "--gpus", "0"]) == 0
    printed = capsys.readouterr().out
    assert "First is none on CPU worker 0 with batch 16" in printed
    assert "asynchronous" not in printed
    assert main(["advise", study, "--gpus", "0+1"]) == 2
    assert "the study has no strategy to advise on" in capsys.readouterr().err


def test_the_command_says_which_cells_are_as_fast(capsys):
    asked = ["--gpus", "0+3,0+1", "--nccl", "default", "--nccl", "P2P_LEVEL=LOC"]
    assert main(["advise", str(SETTINGS), *asked, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"][0]
    assert {cell["runs"] for cell in advice["cells"]} == {0, 1, 3} and advice["model"] == "resnet50"
    assert advice["cells"][0].keys() == {
        "gpus", "strategy", "options", "batch_size", "nccl", "links", "images_per_second", "low",
        "high", "runs", "high_is_bounded", "chance_to_be_fastest", "as_fast_as_the_first",
    }  # fmt: skip
    assert main(["advise", str(SETTINGS), *asked]) == 0
    assert "cannot be told from it" in capsys.readouterr().out


def test_an_advice_on_one_cell_compares_it_with_nothing(capsys):
    study = str(DATA / "h200_x2" / "eager_a")
    asked = ["--gpus", "0+1", "--nccl", "default", "--strategy", "none"]
    assert main(["advise", study, *asked]) == 0
    printed = capsys.readouterr().out
    assert "Every other cell" not in printed and "chance that" not in printed


WRONG = {
    "no such GPU": (["--gpus", "0+9"], "has no GPU 9; accepted are 0, 1, 2, 3"),
    "sizes": (["--gpus", "0+1,0+1+2"], "subsets of one size"),
    "a strategy": (["--gpus", "0+1", "--strategy", "magic"], "accepted are none, nccl_allreduce"),
    "a word of NCCL's": (["--gpus", "0+1", "--nccl", "P2P_LEVEL=loc"], "LOC"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_sentence(name, capsys):
    arguments, sentence = WRONG[name]
    assert main(["advise", str(WATERFALL), *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
