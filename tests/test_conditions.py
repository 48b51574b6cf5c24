"""What makes cells comparable: every field of a cell separates a subset from its one-GPU baseline, or is in one list."""

import dataclasses

import pytest
from build import make_cell, make_record

from analysis.findings.baselines import Baselines
from analysis.study.conditions import DEVICES, IMAGES_PER_SECOND, INCIDENTAL, OF_SERVERS
from analysis.study.study import Study
from benchmarks.record import Validity
from conf.cell import Cell, Network, Optimizer

# Another value for each field of a cell; of fields with options of their own, for each of them: {field: {case: value}}.
PLAIN = make_cell()
CHANGES = {
    "model": {
        "name": "resnet50",
        "library": "torchvision",
        "builder": "resnet50",
        "channels": 3,
        "classes": 100,
        "image_size": 32,
        "auxiliary_weight": 0.4,
        "options": {"weights": "none"},
        "inputs": "samples",
    },
    "optimizer": {
        "learning_rate": 0.1,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "name": "adamw",
        "beta1": 0.8,
        "beta2": 0.99,
        "epsilon": 1e-7,
    },
    "strategy": {
        "name": "cpu_staged",
        "comm_hook": "bf16",
        "bucket_cap_mb": 50.0,
        "memory": "registered",
    },
    "benchmark": {"name": "correctness"},
    "declared": {"strategy": {"sha256": "1" * 64}},
    "nccl": {"NCCL_PROTO": "LL"},
    "profiler_options": {"steps": 3},
}
VALUES = {
    "profiler": "torch",
    "gpus": (0, 1, 2),
    "hosts": ("a",),
    "device": "cuda",
    "batch_size": 4,
    "global_batch_size": 4,
    "precision": "bf16",
    "optimize": "compile",
    "channels_last": True,
    "seed": 1,
    "cuda_device_max_connections": 1,
    "accumulate": 2,
    "repeat": 1,
    "labels": ("x",),
    "server_gpus": (0,),
    "server_hosts": ("a",),
    "data": {"name": "folder", "loader": "torchvision", "options": {"workers": 2}},
}


def changed(field, option=None):
    """Return the cell with another value of a field, or of one option in it."""
    if option is None:
        return dataclasses.replace(PLAIN, **{field: VALUES[field]})
    value, before = CHANGES[field][option], getattr(PLAIN, field)
    if dataclasses.is_dataclass(before):
        return dataclasses.replace(PLAIN, **{field: dataclasses.replace(before, **{option: value})})
    if field == "declared":
        value = {**before[option], **value}
    return dataclasses.replace(PLAIN, **{field: {**before, option: value}})


def study_of(cells):
    """Return a study with a valid record of each cell."""
    records = []
    for place, cell in enumerate(cells):
        ids = {"record_id": f"{place:032x}", "cell_key": f"{place:016x}"}
        said = {"failure": None, "validity": Validity("valid")}
        rate = {IMAGES_PER_SECOND: 100.0 + place}
        records.append(
            make_record(cell=cell, started_at=1000.0 + place, metrics=rate, **ids, **said)
        )
    return Study.of(records)


def baselines_of(cell, alone):
    """Return the GPUs whose one-GPU cells are baselines of a cell."""
    study = study_of([cell, *alone])
    return [*Baselines(study).of_members(study.single(study.records[0]))]


def alone_of(cell):
    """Return the cell on each of its GPUs alone."""
    return [dataclasses.replace(cell, gpus=(gpu,)) for gpu in PLAIN.gpus]


# The fields that do not separate a subset from its one-GPU baselines. All others do.
IRRELEVANT_TO_BASELINES = (*INCIDENTAL, *DEVICES, *OF_SERVERS, "nccl")
CASES = [(field, None) for field in VALUES]
CASES += [(field, option) for field, options in CHANGES.items() for option in options]


@pytest.mark.parametrize(("field", "option"), CASES)
def test_each_field_of_a_cell_separates_it_from_its_baseline_or_is_irrelevant(field, option):
    alone = alone_of(PLAIN)
    assert baselines_of(PLAIN, alone) == [0, 1]
    subset = changed(field, option)
    if field == "nccl":  # CPU workers do not have them at all
        subset = dataclasses.replace(subset, device="cuda")
        alone = [dataclasses.replace(cell, device="cuda") for cell in alone]
    found = baselines_of(subset, alone)
    if field == "hosts":  # GPUs of a named host are not those of this machine
        assert found == [] and field in IRRELEVANT_TO_BASELINES
    elif field in IRRELEVANT_TO_BASELINES:
        assert found == [0, 1], f"{field} is in the list of irrelevant fields"
    else:
        assert found == [], f"{field}: cells that differ in it are compared"


def test_every_field_of_a_cell_is_among_the_cases():
    fields = {field.name for field in dataclasses.fields(Cell)}
    assert {field for field, _ in CASES} == fields
    assert {field.name for field in dataclasses.fields(Network)} == set(CHANGES["model"])
    assert {field.name for field in dataclasses.fields(Optimizer)} == set(CHANGES["optimizer"])
    assert set(IRRELEVANT_TO_BASELINES) <= fields


def test_in_strong_scaling_the_images_per_step_separate_and_those_per_rank_do_not():
    subset = dataclasses.replace(PLAIN, global_batch_size=8, batch_size=4)
    alone = alone_of(dataclasses.replace(subset, batch_size=8))
    assert baselines_of(subset, alone) == [0, 1]
    assert baselines_of(dataclasses.replace(subset, global_batch_size=16), alone) == []


def test_how_long_throughput_is_measured_does_not_separate():
    subset = dataclasses.replace(PLAIN, benchmark={**PLAIN.benchmark, "max_iterations": 999})
    assert baselines_of(subset, alone_of(PLAIN)) == [0, 1]


@pytest.mark.parametrize("field", INCIDENTAL)
def test_runs_that_differ_in_an_incidental_field_are_runs_of_one_cell(field):
    option = next(iter(CHANGES.get(field, {None: None})))
    (runs,) = study_of([PLAIN, changed(field, option)]).runs
    assert len(runs.records) == 2
