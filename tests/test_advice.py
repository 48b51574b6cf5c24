"""Advice: what a measurement is worth against closed forms, and what the command and gpus=advise:K say of committed records."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from records import make_record
from scipy.stats import norm

from analysis.__main__ import main
from analysis.commands.predicted.advice import print_advice
from analysis.prediction.advice.advice import advise
from analysis.prediction.advice.beliefs import Beliefs
from analysis.prediction.advice.options import (
    advised_machine,
    farthest,
    machine_gpus,
    options,
    subsets,
    topology_of,
)
from analysis.prediction.calibration import calibrate
from analysis.prediction.forecast import forecast
from analysis.prediction.holdout import KnownScores
from analysis.prediction.scatter import STEP, RunScatter
from analysis.study.study import Study, open_study
from analysis.topology.readers import read_topology
from benchmarks.record import write
from benchmarks.record.cell_folder import CellFolder
from conf import schema
from conf.command_line import normalise
from launch.plan.plan import Request, plan

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
WATERFALL, SETTINGS = DATA / "h200_x4" / "waterfall", DATA / "h200_x4" / "settings_again"
H200, DGX1 = str(DATA / "topo_h200_x4.txt"), str(DATA / "topo_dgx1_v100.txt")


def believed(mean, covariance, of_a_run):
    return Beliefs(np.array(mean, float), np.array(covariance, float), np.array(of_a_run, float))


def test_two_independent_cells_against_closed_forms():
    """Rates 10 ± 1 and 9 ± 1, a run scatters by 1: the larger of two (Clark 1961), the knowledge gradient (Frazier 2009)."""
    beliefs = believed([10, 9], np.eye(2), [1, 1])
    sigma = np.sqrt(2)
    assert beliefs.chances() == pytest.approx([norm.cdf(1 / sigma), norm.sf(1 / sigma)], abs=0.02)
    assert list(beliefs.as_fast_as(0)) == pytest.approx([1.0, norm.sf(1 / sigma)], abs=0.02)
    now = sigma * norm.pdf(1 / sigma) - norm.sf(1 / sigma)
    assert beliefs.loss() == pytest.approx(now, rel=0.05)
    told = 1 / np.sqrt(2)  # what a run moves the expectation by: 1 ÷ √(1 + 1)
    gain = told * norm.pdf(1 / told) - norm.sf(1 / told)
    assert beliefs.loss() - beliefs.loss([1]) == pytest.approx(gain, rel=0.25)
    assert beliefs.loss([0, 1]) < beliefs.loss([0]) < beliefs.loss()


def test_the_next_cell_is_the_one_that_tells_most():
    """Cell 2 is far behind, cell 1 is as good as the first and uncertain; a measurement of cell 3 tells of cell 1 too."""
    found = believed([10, 10, 5], np.diag([0.01, 1.0, 1.0]), [0.01] * 3).next_cells()
    assert found[0][0] == 1 and len(found) == 1  # cell 0 is known: one measurement is enough
    together = np.array([[0.01, 0, 0], [0, 1.0, 0.99], [0, 0.99, 1.0]])
    noisy = believed([10, 10, 8], together, [0.01, 9.0, 0.01])
    assert noisy.next_cells()[0][0] == 2
    assert believed([10, 5], np.eye(2) * 1e-4, [1, 1]).next_cells() == []  # nothing to decide


def test_chances_where_runs_scatter_so_much_that_rates_may_lie_below_0():
    beliefs = believed([10, 9], np.eye(2) * 1e4, [1, 1])
    assert sum(beliefs.chances()) == pytest.approx(1.0) and beliefs.as_fast_as(0)[0] == 1.0


def test_equal_cells_share_their_chance():
    beliefs = believed([10, 10], [[1, 1], [1, 1]], [1, 1])
    assert list(beliefs.chances()) == pytest.approx([0.5, 0.5]) and list(beliefs.as_fast_as(0)) == [
        1.0,
        1.0,
    ]
    assert beliefs.loss() == pytest.approx(0.0, abs=1e-9) and beliefs.next_cells() == []


def test_subsets_that_forecasts_tell_apart():
    calibration = calibrate(open_study(WATERFALL))
    assert len(subsets(calibration, read_topology(H200), 2)) == 6  # all four ran alone
    dgx1 = subsets(calibrate(open_study(SETTINGS)), read_topology(DGX1), 2)
    assert dgx1[0] == (
        0,
        3,
    )  # the best links first; no GPU ran alone, so one pair of each kind of link
    assert {farthest(read_topology(DGX1), one) for one in dgx1} == {"NV2", "NV1", "SYS"}
    with pytest.raises(ValueError, match="has 4 GPUs; accepted are 1 to 4"):
        subsets(calibration, read_topology(H200), 5)


def test_a_measured_cell_counts_by_its_runs():
    calibration, topology = calibrate(open_study(SETTINGS)), read_topology(H200)
    made = options(
        calibration,
        [((0, 3), "NV18"), ((0, 1), "NV18")],
        [{}, {"NCCL_P2P_LEVEL": "LOC"}],
        None,
        None,
        4,
    )
    found = advise(calibration, next(iter(made.values())), KnownScores(calibration))
    assert len(topology.gpus) == 4 and len(found.ranked) == 4
    runs = {(one.option.question.members, bool(one.option.nccl)): one for one in found.ranked}
    assert runs[(0, 3), False].runs == 3 and runs[(0, 3), False].rate == pytest.approx(9311, abs=1)
    assert runs[(0, 1), False].runs == 0 and runs[(0, 1), False].as_fast
    assert not runs[(0, 3), True].as_fast and not runs[(0, 1), True].as_fast  # LOC is 2.2 % slower
    assert found.next_cells[0].cell is runs[(0, 1), False] and found.next_cells[0].loss < found.loss


def test_a_choice_between_cells_that_are_hardly_known_loses_no_more_than_they_give():
    """A few noisy steps: the interval of each run reaches from 1/22,026 of its step to 22,026 times it."""
    inside = {"step/ms_median": {"low": 27.0 / np.exp(10), "high": 27.0 * np.exp(10)}}
    study = Study.of(replace(one, within_run=inside) for one in open_study(SETTINGS).records)
    shares = [RunScatter(study.runs).share(runs, STEP) for runs in study.runs]
    assert shares == pytest.approx([10 / 1.96] * len(shares)), "its ends lie at equal ratios"
    calibration = calibrate(study)
    made = options(calibration, [((0, 3), "NV18")], [{}, {"NCCL_P2P_LEVEL": "LOC"}], None, None, 4)
    found = advise(calibration, next(iter(made.values())), KnownScores(calibration))
    assert 0 < found.loss < found.first.rate and found.next_cells
    assert all(one.bounded and one.rate < one.high <= 2.001 * one.rate for one in found.ranked), (
        "it was 20 times the rate"
    )


class FarOff(KnownScores):
    """Held-out cells whose forecasts were off by a thousand deviations."""

    def of(self, question):
        return [1e3] * 12


def test_no_upper_end_is_above_the_rate_of_compute_alone(capsys):
    """Two H200s alone: 54.25 to 54.33 ms. An exchange of which nothing is known cannot make them faster."""
    study = open_study(WATERFALL)
    calibration = calibrate(study)
    made = options(calibration, [((1, 3), "NV18")], [{}], ["nccl_allreduce"], None, 4)
    known = FarOff(calibration)
    advice = advise(calibration, next(iter(made.values())), known)
    assert advice.first.bounded and advice.first.low < 0.5 * advice.first.rate
    assert (
        advice.first.high == pytest.approx(2 * 256e3 / 54.286, rel=0.006)
        and advice.first.high > advice.first.rate
    )
    print_advice(study, advice, known)
    assert (
        "no upper end is above that of the same GPUs without any exchange"
        in capsys.readouterr().out
    )
    sure = advise(calibration, next(iter(made.values())), KnownScores(calibration))
    assert not sure.first.bounded


def test_a_measured_rate_is_that_of_the_report_and_a_forecast_has_its_long_steps():
    """images ÷ median step was 5.7 % too fast where servers or staging answer late: rates count the long steps too."""
    study = open_study(DATA / "h200_x4" / "strategies")
    calibration = calibrate(study)
    made = options(calibration, [((0, 1, 2, 3), "NV18")], [{}], None, None, 4)
    found = advise(calibration, next(iter(made.values())), KnownScores(calibration))
    rates = sorted(np.exp(one.median_log_rate) for one in study.timed if one.world_size == 4)
    shown = sorted(one.rate for one in found.ranked if one.runs)
    assert len(shown) > 5 and all(
        any(np.isclose(one, rate, rtol=1e-9) for rate in rates) for one in shown
    )
    staged = next(
        one.question for one in calibration.cells if one.question.strategy == "cpu_staged"
    )
    asked = replace(staged, batch_size=128)
    step_rate = 4 * 128 * 1e3 / forecast(calibration, asked).step_ms
    assert forecast(calibration, asked).images_per_second < 0.99 * step_rate


def test_subsets_that_are_alike_to_a_forecast_stand_for_each_other():
    """All four ran alone in eager mode; compiled only GPU 0 did, so that all but the measured pair are alike."""
    calibration = calibrate(open_study(DATA / "h200_x4" / "scaling"))
    placed = [(one, "NV18") for one in subsets(calibration, read_topology(H200), 2)]
    found = options(calibration, placed, [{}], None, None, 4)
    members = {
        str(workload): [one.question.members for one in several]
        for workload, several in found.items()
    }
    assert len(members["resnet50"]) == 6 and members["resnet50 compile"] == [(0, 1), (0, 2)]


def of_two_machines():
    """Cells on a machine of four GPUs, and fewer and newer ones on another host whose eight GPUs have other links."""
    here = open_study(WATERFALL).records
    text = (DATA / "topo_dgx1_v100.txt").read_text()
    later = max(one.started_at for one in here) + 1
    there = [
        replace(
            one, started_at=later, environment=one.environment | {"host": "other", "topology": text}
        )
        for one in here
        if one.cell.world_size == 4
    ]
    return Study.of([*here, *there])


def test_an_advice_is_for_the_machine_of_most_cells(capsys):
    """Its topology was that of the newest record, whatever machine that was of."""
    study = of_two_machines()
    calibration = calibrate(study)
    machine = advised_machine(calibration)
    topology = topology_of(study, machine)
    assert machine == "vm" and topology.gpus == (0, 1, 2, 3)
    assert (
        topology_of(study, "other").gpus == (0, 1, 2, 3, 4, 5, 6, 7)
        and topology_of(study, "nowhere") is None
    )
    assert machine_gpus(calibration, None, machine) == (0, 1, 2, 3)
    with pytest.raises(
        ValueError,
        match="--gpus 5: vm, where most cells of the study ran, has 4 GPUs; accepted are 1 to",
    ):
        subsets(calibration, topology, 5, machine)
    assert len(subsets(calibration, topology, 2, machine)) == 6, "all four ran alone here"
    assert len(subsets(calibration, read_topology(H200), 2, "other")) == 1, "and none there"
    made = options(calibration, [((0, 1, 2, 3), "NV18")], [{}], None, None, 4, machine)
    advice = advise(calibration, next(iter(made.values())), KnownScores(calibration))
    print_advice(study, advice, KnownScores(calibration))
    assert (
        "the study has cells of 2 machines: this is for vm, where most of them ran"
        in capsys.readouterr().out
    )


def test_gpus_that_no_record_names_are_refused():
    study = open_study(DATA / "h200_net" / "waterfall")
    with pytest.raises(
        ValueError, match=r"--gpus 1: no record of .+ names its GPUs; accepted are subsets, as 0\+1"
    ):
        subsets(calibrate(study), None, 1)


def alone_on_the_cpu(folder, strategy="nccl_allreduce"):
    """A folder of cells of one CPU worker, one for each of two batch sizes, each twice."""
    options = {"name": strategy} | (
        {"bucket_cap_mb": 25.0, "comm_hook": "none"} if strategy != "none" else {}
    )
    for number, (batch, step) in enumerate([(8, 10.0), (16, 16.0), (8, 10.2), (16, 16.4)]):
        made = make_record(
            record_id=f"{number:032x}", started_at=1000.0 + number, failure=None, environment={}
        )
        cell = replace(
            made.cell,
            gpus=(0,),
            nccl={},
            device="cpu",
            strategy=options,
            batch_size=batch,
            repeat=number // 2,
        )
        metrics = {
            "step/ms_median": step,
            "step/ms_p95": step,
            "throughput/images_per_second": batch * 1e3 / step,
        }
        if strategy != "none":
            metrics["strategy/cost_ms"] = 0.2
        place = folder / cell.folder
        place.mkdir(parents=True)
        write(
            CellFolder(place),
            replace(made, cell=cell, cell_key=cell.key, metrics=metrics, tables={}),
        )
    return folder


def test_a_study_of_one_worker_is_advised_and_forecast_without_words_on_wires(tmp_path, capsys):
    """Nothing there waits for others or has a wire, and no cell can be held out."""
    study = alone_on_the_cpu(tmp_path / "alone")
    assert main(["advise", str(study), "--gpus", "1"]) == 0
    said = capsys.readouterr().out
    assert "First is nccl_allreduce on CPU worker 0 with batch 16: 988 images/s, measured." in said
    assert "held out" not in said and "asynchronous" not in said
    assert main(["predict", str(study), "--gpus", "0", "--batch", "32"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "gpus 0 " in said and "direct" not in said and "γ" not in said and "links" not in said
    assert (
        "no error is claimed: cells of one CPU worker, or without an exchange, are not held out"
        in said
    )
    assert main(["predict", str(study), "--gpus", "0", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["forecasts"]
    assert found["forecast"]["null_step_ms"] == found["forecast"]["step_ms"], "nothing changes"


def test_what_a_study_of_one_worker_cannot_answer_is_one_sentence(tmp_path, capsys):
    study = str(alone_on_the_cpu(tmp_path / "alone"))
    for arguments, sentence in (
        (
            ["predict", study, "--holdout", "batch"],
            "--holdout batch: the study has no valid training cell of several CPU",
        ),
        (
            ["predict", study],
            "no forecast of 2 CPU workers: no all_reduce directly between ranks was measured; add a training cell of",
        ),
        (["advise", study, "--gpus", "2"], "was measured; add a training cell of several ranks"),
        (["advise", study, "--gpus", "9"], "has 8 CPU workers; accepted are 1 to 8"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1


def test_without_any_strategy_one_worker_is_forecast_and_advised_alone(tmp_path, capsys):
    study = str(alone_on_the_cpu(tmp_path / "alone", "none"))
    assert main(["predict", study, "--gpus", "0"]) == 0 and "none" in capsys.readouterr().out
    assert main(["advise", study, "--gpus", "1"]) == 0
    said = capsys.readouterr().out
    assert "First is none on CPU worker 0 with batch 16" in said and "asynchronous" not in said
    assert main(["advise", study, "--gpus", "2"]) == 2
    assert "the study has no strategy to advise on" in capsys.readouterr().err


def planned(*typed: str):
    schema.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(
            compose("config", normalise([*typed, f"topology={H200}", "dry_run=true"]))
        )
    return plan([Request(config, list(typed))], {})


def test_the_command_says_what_to_measure_and_how(capsys):
    asked = ["--gpus", "2", "--nccl", "default", "--nccl", "P2P_LEVEL=LOC"]
    assert main(["advise", str(SETTINGS), *asked, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"][0]
    assert {one["runs"] for one in advice["cells"]} == {0, 1, 3} and advice["worth_measuring"]
    next_cell = advice["worth_measuring"][0]
    python, launch, *typed = shlex.split(next_cell["command"])
    assert (python, launch) == ("python", "launch.py") and f"output_dir={DATA / 'h200_x4'}" in typed
    first = planned(*typed).cells[0].cell
    assert (
        list(first.gpus) == next_cell["gpus"]
        and first.nccl == next_cell["nccl"]
        and first.batch_size == 256
    )
    assert main(["advise", str(SETTINGS), *asked]) == 0
    said = capsys.readouterr().out
    assert (
        "cannot be told from it" in said
        and "Worth measuring first" in said
        and "python launch.py gpus=" in said
    )


def test_an_advice_on_one_cell_compares_it_with_nothing(capsys):
    assert (
        main(
            [
                "advise",
                str(DATA / "h200_x2" / "eager_a"),
                "--gpus",
                "0+1",
                "--nccl",
                "default",
                "--strategy",
                "none",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "There is nothing else to choose from." in said
    assert not any(
        words in said
        for words in ("Every other cell", "chance that", "to choose it now", "No further cell")
    )


WRONG = {
    "too many GPUs": (["--gpus", "9"], "has 4 GPUs; accepted are 1 to 4"),
    "no such GPU": (["--gpus", "0+9"], "has no GPU 9; accepted are 0, 1, 2, 3"),
    "sizes": (["--gpus", "0+1,0+1+2"], "subsets of one size"),
    "a strategy": (["--gpus", "2", "--strategy", "magic"], "accepted are none, nccl_allreduce"),
    "a word of NCCL's": (["--gpus", "2", "--nccl", "P2P_LEVEL=loc"], "LOC"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_one_sentence(name, capsys):
    arguments, sentence = WRONG[name]
    assert main(["advise", str(WATERFALL), *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_gpus_by_forecast():
    """GPU 0 is the slowest of the four, and all links are alike: forecasts leave it out, links would take it."""
    sweep = planned(
        "gpus=advise:3", "study=waterfall", f"output_dir={DATA / 'h200_x4'}", "device=cuda"
    )
    assert sweep.cells[0].cell.gpus == (1, 2, 3)
    assert any("gpus=advise:3 is 1,2,3: forecast to give" in one for one in sweep.notices)


def test_gpus_without_a_forecast_are_those_of_the_best_links(tmp_path):
    sweep = planned("gpus=advise:2", "study=new", f"output_dir={tmp_path}", "device=cuda")
    assert sweep.cells[0].cell.gpus == (0, 1)
    assert any(
        "no forecast is possible (study new has no cell yet); taken as best:2" in one
        for one in sweep.notices
    )


def test_placement_on_one_machine_is_not_advised_by_a_study_of_another(capsys):
    assert main(["place", "--gpus", "2", "--topology", DGX1, "--study", str(WATERFALL)]) == 2
    assert "other GPUs or links than this topology has" in capsys.readouterr().err


def test_placement_is_by_the_machine_of_a_study_that_has_this_topology(tmp_path, capsys):
    for record in of_two_machines().records:
        name = f"{record.record_id}-{record.environment['host']}"
        (tmp_path / "several" / name).mkdir(parents=True)
        write(CellFolder(tmp_path / "several" / name), record)
    for topology, machine in ((H200, "GPUs 2,3 are"), (DGX1, "GPUs 0,3 are")):
        assert (
            main(
                [
                    "place",
                    "--gpus",
                    "2",
                    "--topology",
                    topology,
                    "--study",
                    str(tmp_path / "several"),
                ]
            )
            == 0
        )
        assert f"By forecasts of resnet50: {machine}" in capsys.readouterr().out


def test_placement_says_what_forecasts_put_first(capsys):
    assert main(["place", "--gpus", "2", "--topology", H200, "--study", str(WATERFALL)]) == 0
    assert "By forecasts of resnet50: GPUs 2,3 are forecast to give 9,3" in capsys.readouterr().out
