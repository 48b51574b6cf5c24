"""Rehearsals: what is planned, what their ranks get, what is judged, and what no number enters."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from build import composed_cell, make_cell, make_record

from analysis.study.rehearsal import NO_ROOM, conclusion
from analysis.study.study import Study
from analysis.validity.checks import judged
from analysis.verification.verify_study import verify
from benchmarks.rank.worker import gpu_index
from benchmarks.record import CellFolder, Failure, Validity, read_study
from conf.host import SHARED_GPUS
from conf.schema import Config, ValidityLimits
from launch.engines.environment import cell_variables
from launch.machine.devices import Device, Machine
from launch.plan import rehearsal
from launch.tracking.mlflow_run import project

GIB = 1 << 30
PLANNED = {"gpus": 8, "present": 1, "memory_bytes": 140 * GIB, "sweep": "9 runs", "batch_size": 64}


def machine(present, asked, planned=()):
    gpus = tuple(range(present))
    devices = tuple(Device(gpu, f"GPU-{gpu}", memory_bytes=GIB) for gpu in gpus)
    here = Machine("cuda", devices, gpus, 16)
    return rehearsal.machine_of(Config(rehearse=asked), here, planned or gpus)


def test_planned_gpus_are_those_here_in_turn():
    made = machine(2, 5)
    assert made.all_gpus == (0, 1, 2, 3, 4) and made.shares_gpus
    assert made.uuids((3, 0, 2)) == ["GPU-1", "GPU-0", "GPU-0"]
    assert machine(1, True, (0, 1, 2)).all_gpus == (0, 1, 2)
    assert not machine(4, True).shares_gpus


@pytest.mark.parametrize("gpus", [(0, 1), (0, 2), (3, 1, 2), (0, 2, 1), tuple(range(8))])
@pytest.mark.parametrize("present", [1, 2, 3])
def test_a_rank_gets_the_gpu_of_its_planned_one(hydra, monkeypatch, gpus, present):
    cell, made = composed_cell(gpus=gpus), machine(present, 8)
    variables = cell_variables(cell, made, CellFolder(Path()), "").set
    assert variables["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    visible = variables["CUDA_VISIBLE_DEVICES"].split(",")
    monkeypatch.setenv(SHARED_GPUS, variables[SHARED_GPUS])
    used = [visible[gpu_index(cell, rank)] for rank in range(len(gpus))]
    assert used == made.uuids(gpus)


def test_eight_ranks_of_a_gpu_have_few_blocks_unless_asked(hydra):
    eight = composed_cell("nccl.max_ctas=8", gpus=tuple(range(8)))
    for cell, asked in ((replace(eight, nccl={}), None), (eight, "8")):
        variables = cell_variables(cell, machine(1, 8), CellFolder(Path()), "")
        assert variables.defaults["NCCL_MAX_CTAS"] == "4"
        assert variables.set.get("NCCL_MAX_CTAS") == asked
    for made in (machine(2, 8), machine(8, True)):
        assert "NCCL_MAX_CTAS" not in cell_variables(eight, made, CellFolder(Path()), "").defaults


def test_no_time_of_a_rehearsal_is_judged_or_stays():
    measured = make_record(cell=make_cell())
    rehearsed = replace(measured, environment=measured.environment | {"rehearsal": PLANNED})
    checks = rehearsed.checks | {"clocks_ratio": 9.0, "replicas_agree": False}
    record = judged(replace(rehearsed, checks=checks), ValidityLimits())
    assert record.validity.verdict == "rehearsal" and not record.usable
    assert {*record.metrics} <= {"memory/peak_gib", "memory/reserved_gib"}
    assert not record.series and not record.tables and not record.within_run
    assert not Study.of([record]).usable and not Study.of([record]).runs
    names = {row[0] for row in project(record).metrics}
    assert not [name for name in names if "per_second" in name or name.endswith("_ms")]


def ended(name, cause=None, gpus=(0,), strategy="nccl_allreduce", **metrics):
    failure = Failure(cause, 0, f"{name} failed") if cause else None
    record = make_record(
        cell=replace(make_cell(gpus), strategy={"name": strategy}), validity=Validity()
    )
    record = replace(record, name=name, environment={"rehearsal": PLANNED}, failure=failure)
    return replace(record, state="failed" if cause else "finished", metrics=metrics)


def test_the_last_sentence_names_what_would_fail():
    fine = replace(ended("fine"), metrics={"memory/reserved_gib": 17.24})
    assert conclusion([fine]) == (
        "1 of 1 run would work on 8 CPU workers; a rank holds up to 17.2 of 140.0 GiB; the sweep "
        "itself has 9 runs.",
        False,
    )
    together = ended("together", "oom", gpus=(0, 1))
    shards = ended("shards", "oom", strategy="fsdp")
    stopped = replace(ended("stopped", "interrupted"), state="interrupted")
    line, fails = conclusion([fine, together, shards, stopped])
    assert not fails and line.startswith("1 of 4 runs would work on 8 CPU workers; ")
    assert f"interrupted: stopped; not tried {NO_ROOM}: together, shards" in line
    line, fails = conclusion([fine, ended("large", "oom"), ended("stuck", "hang", gpus=(0, 1))])
    assert fails and "would fail: large (oom: large failed), stuck (hang: stuck failed)" in line


def test_the_command_rehearses_without_a_number(launch, tmp_path):
    asked = ["gpus=0,1,2", "model=fmnist_cnn", "batch_size=8", "tracking=none"]
    code, out, err = launch("rehearse=3", "repeats=3", *asked, f"output_dir={tmp_path}")
    assert (code, err) == (0, ""), out + err
    last = "runs would work on 3 CPU workers; the sweep itself has 4 runs (the last "
    cores = len(os.sched_getaffinity(0))
    if cores < 3:
        assert f"2 of 2 {last}" in out
    folder = tmp_path / "default-rehearsal"
    records, _ = read_study(folder)
    assert {record.validity.verdict for record in records} == {"rehearsal"}
    assert not (tmp_path / "default").exists() and "images/s" not in out
    page = (folder / "report" / "index.html").read_text()
    assert last.partition(";")[0] in page and "images/s" not in page
    assert verify(folder).right


def test_every_benchmark_has_a_rehearsal(launch):
    asked = ("benchmark=collectives,exchange,host_link,jacobi,p2p,throughput", "model=fmnist_cnn")
    code, out, err = launch("-m", *asked, "gpus=0,1", "rehearse=8", "dry_run=true")
    assert (code, err) == (0, "") and "nothing was started" in out
