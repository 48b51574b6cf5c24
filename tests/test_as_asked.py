"""Faults planted in two real ranks at the smallest size that a check claims to see, and twins."""

import pytest
import torch
from build import BUSY, make_cell, make_record
from derived_results import write_record
from measuring import CASES
from planted_ranks import CELLS, GRADIENT_FAULTS, LEFT_EQUAL, PRECISIONS

from analysis.report.sections import conditions_section
from analysis.study.study import Study
from analysis.validity.checks import judge
from benchmarks.record import CellFolder, Validity
from benchmarks.training import correctness, step_facts
from conf.schema import ValidityLimits
from launch.tracking.mlflow_run import project

# What six steps without a launching process cannot show.
SHORT = {"not_stationary", "foreign_cpu"}


@pytest.fixture(scope="module")
def validity(forked):
    """The validity of cells of planted_ranks, and of a clean one of measuring."""
    cells = {name: ("planted", cell) for name, (cell, _) in CELLS.items()}
    cells["ddp"] = ("measuring", CASES["ddp"])
    verdicts = {}
    for number, (name, (case, cell)) in enumerate(cells.items()):
        forked(case)
        folder = CellFolder(forked.folder / case / name / "cells" / cell.key)
        verdicts[name] = judge(write_record(folder, number), ValidityLimits())
    return verdicts


@pytest.mark.parametrize("name", ["clean", "ddp"])
def test_a_clean_cell_of_cpu_workers_has_no_code_and_every_check_ran(validity, name):
    assert not validity[name].codes.keys() - BUSY
    assert not validity[name].unchecked.keys() - SHORT
    for_gpus = {"wrong_gpu", "clocks_disagree", "cpu_bound", "not_compiled"}
    assert for_gpus <= validity[name].not_applicable.keys()


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("first", "precision_not_used", "precision=bf16, and autocast was off"),
        ("first", "batches_not_distinct", "several ranks have the same images"),
        ("first", "weights_still", "8 arrays with 100.0 % of the elements"),
        ("first", "bytes_miscounted", "comm/bytes_moved is 9,599,056 bytes instead of 4,799,528"),
        ("first", "time_between_steps", "ms a step"),
        ("second", "batches_not_distinct", "every step has the same images"),
        ("second", "weights_still", "4 arrays"),
        ("second", "bytes_miscounted", "gradient_bytes"),
        ("second", "exchange_wrong", "relative error"),
        ("second", "faster_than_reference", "times as fast as its reference memory_copy"),
    ],
)
def test_a_cell_that_does_not_run_as_asked_is_found(validity, name, code, words):
    assert validity[name].verdict == "invalid"
    assert words in validity[name].codes[code]


def test_what_was_not_planted_is_not_found(validity):
    faults = {"precision_not_used", "exchange_wrong", "gradient_not_mean", "replicas_differ"}
    faults.add("not_compiled")
    assert faults & validity["first"].codes.keys() == {"precision_not_used"}
    assert faults & validity["second"].codes.keys() == {"exchange_wrong"}
    assert "gradient_not_mean" in validity["first"].unchecked, "equal batches prove no exchange"


def is_found(facts):
    worst = facts["gradient_worst"]
    is_mean = facts["gradient_error"] <= facts["gradient_tolerance"]
    return not (is_mean and worst["error"] <= worst["tolerance"])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_faults_of_the_exchange_are_found_in_every_precision(forked, precision):
    facts = forked("planted")[0][precision]
    assert not is_found(facts["none"]), facts["none"]
    assert [fault for fault in GRADIENT_FAULTS if not is_found(facts[fault])] == []
    assert facts["one array lost"]["gradient_worst"]["array"] == "0.bias"
    # The tolerance follows what backward repeats.
    clean = facts["unrepeatable, none"]
    assert not is_found(clean), clean
    assert 1e-4 < clean["gradient_repeat"] < clean["gradient_tolerance"] < 1e-2
    assert is_found(facts["unrepeatable, one array lost"])


@pytest.mark.parametrize("fault", LEFT_EQUAL)
def test_a_fault_of_every_step_is_found_whether_it_leaves_equal_replicas_or_not(forked, fault):
    facts = forked("planted")[0]["after two steps"][fault]
    assert facts["equal"] is LEFT_EQUAL[fault]
    if fault == "none":
        error, tolerance = facts["gradient_error"], facts["gradient_tolerance"]
        assert error < tolerance < 1e-6 < facts["gradient_spread"]
        return
    assert facts["gradient_error"] > 1e3 * facts["gradient_tolerance"], facts
    assert facts["gradient_worst"]["error"] > 1e3 * facts["gradient_worst"]["tolerance"], facts


class Arrays:
    """The parameters of a training, of these sizes."""

    def __init__(self, *sizes):
        self.parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]


def test_every_array_has_its_share_of_the_compared_elements():
    arrays = Arrays(1, 10, 1024, 30_000, 25_000_000)
    compared = correctness.ComparedElements(arrays)
    assert compared.counts.tolist()[:3] == [1, 10, 1024], "small arrays are compared whole"
    assert compared.counts[3] >= 1024 and 800_000 < compared.counts[4] <= 1_000_000
    assert compared.strides[4] == 29, "a prime: what is lost regularly, every thousandth, is met"
    for parameter in arrays.parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    arrays.parameters[1].grad = None
    by_array = compared.by_array(compared.gradient(arrays))
    assert by_array.tolist() == [2.0 * count for count in (1, 0, *compared.counts.tolist()[2:])]


class Alone:
    world_size = 1

    def gather(self, values):
        return [list(values)]


class Small:
    """A training of which one array has a gradient too small for any of its elements."""

    def __init__(self):
        self.cell = make_cell()
        arrays = {name: torch.ones(5) for name in ("large", "tiny", "unused")}
        self.network = torch.nn.ParameterDict(arrays)
        self.network["large"].grad = torch.full((5,), 1e-3)
        self.network["tiny"].grad = torch.full((5,), 1e-12)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)


@pytest.mark.parametrize(("moves", "still"), [((), 1), (("large",), 0), (("tiny", "unused"), 1)])
def test_weights_whose_gradient_is_too_small_need_not_move(moves, still):
    training = Small()
    weights = step_facts.Weights(training)
    with torch.no_grad():
        for name in moves:
            training.network[name][2] += 1e-6
    facts = weights.unchanged(Alone())
    assert facts["weights_still"] == still
    assert facts.get("weights_still_first") == ("large" if still else None)
    assert facts["weights_still_share"] == pytest.approx(still / 3)


def test_the_report_and_the_store_say_how_many_checks_could_not_run():
    unchecked = {"throttled": "the GPUs were not sampled"}
    late = Validity("valid", {}, unchecked, not_applicable={"wrong_gpu": "no GPU"})
    records = []
    for number, validity in enumerate((late, Validity())):
        key = {"record_id": f"{number:032x}", "cell_key": f"{number:016x}"}
        records.append(make_record(validity=validity, **key))
    section = conditions_section.validity(Study.of(records), None)
    assert "Not every check could be made on 1 run." in section.lines
    (table,) = [table for table in section.tables if table.name == "unchecked"]
    assert table.rows == (("throttled", "the GPUs were not sampled", 1),)
    tags = [project(record).tags["validity"] for record in records]
    assert tags == ["valid, 1 check not run", "valid"]
