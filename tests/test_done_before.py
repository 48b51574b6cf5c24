"""A cell is done only where it was measured: what differs elsewhere is told."""

import copy
import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from analysis.study.provenance import INHERITED, inherited
from analysis.study.study import Study
from benchmarks import record as records
from benchmarks.record import CellFolder
from launch.display.closing_summary import print_plan
from launch.machine import facts
from launch.machine.devices import Device, Machine
from launch.plan.order import PlannedCell
from launch.study import run_environment
from launch.study.run_environment import RunEnvironment
from launch.study.study_folder import StudyFolder, find_finished

DATA = Path(__file__).parent / "data" / "h200_x2"
MEASURED_HERE = records.read_study(DATA / "eager_a")[0]
REAL = next(record for record in MEASURED_HERE if record.cell.world_size == 2 and record.usable)
MEASURED = {"versions", "variables", "planned_uuids", INHERITED, "left_out"}


@pytest.fixture
def here(monkeypatch):
    """The surroundings of the real record, as a launcher on its machine sees them today."""
    environment = REAL.environment
    listed = environment["gpu"]["gpus"]
    versions = environment["versions"]
    known = {name: value for name, value in environment.items() if name not in MEASURED}
    monkeypatch.setattr(facts, "facts", lambda: known)
    monkeypatch.setattr(run_environment, "torch_version", lambda: versions["torch"])
    monkeypatch.setattr(run_environment.platform, "python_version", lambda: versions["python"])
    monkeypatch.setattr(RunEnvironment, "_versions_on_gpus", versions)
    devices = tuple(Device(gpu["id"], gpu["uuid"], gpu["bus_id"], gpu["name"]) for gpu in listed)
    ids = tuple(gpu["id"] for gpu in listed)
    machine = Machine("cuda", devices, ids, environment["cpu"]["cores"])
    return RunEnvironment(machine, inherited(REAL))


def elsewhere(**changes):
    """The real record as it would be of other surroundings; a mapping is merged."""
    made = copy.deepcopy(REAL)
    for name, value in changes.items():
        merged = made.environment[name] | value if isinstance(value, dict) else value
        made.environment[name] = merged
    return dataclasses.replace(made, record_id="f" * 32)


def planted(tmp_path, *made):
    """A study in which these are the attempts at one cell, the newest last."""
    study = StudyFolder(str(tmp_path), "study")
    folder = CellFolder(study.folder / REAL.cell.folder)
    for number, record in enumerate(made):
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.set_aside()
        started_at = REAL.started_at + 1000 * number
        records.write(folder, dataclasses.replace(record, started_at=started_at))
    return study


def found(study, here):
    """(Ids of the records that count as done, what is said)."""
    said = []
    done = find_finished([REAL.cell], study, here, said.append)
    return [record.record_id for record in done.values()], said


def test_the_same_surroundings_are_done(tmp_path, here):
    assert here.differences(REAL) == []
    assert found(planted(tmp_path, REAL), here)[0] == [REAL.record_id]


def test_runs_of_other_code_of_the_user_are_counted(tmp_path, here):
    of_code = []
    for sha256 in "ab":
        declared = {**REAL.cell.declared, "model": {"sha256": sha256}}
        of_code.append(dataclasses.replace(REAL.cell, declared=declared))
    before = dataclasses.replace(REAL, cell=of_code[0])
    study, said = planted(tmp_path), []
    for cell in of_code:
        find_finished([cell], study, here, said.append, {before.record_id: before})
    assert [line.partition(":")[0] for line in said] == [
        "1 run of this study with other code of yours"
    ]


LEVEL, THREADS = "NCCL_P2P_LEVEL", "OMP_NUM_THREADS"
OTHER_GPU = [{"id": 0, "uuid": "GPU-0", "name": "NVIDIA B200"}]
CHANGES = [
    ({"host": "node2"}, "host node2, now "),
    ({"gpu": {"gpus": OTHER_GPU}}, "1 × B200, now 2 × H200"),
    ({"planned_uuids": ["GPU-8", "GPU-9"]}, "other GPUs of this host, also 2 × H200"),
    ({"gpu": {"driver": "550.1"}}, "driver 550.1, now "),
    ({"versions": {"torch": "2.10.0+cu130"}}, "torch 2.10.0+cu130, now "),
    ({"versions": {"cuda": "12.8"}}, "CUDA 12.8, now "),
    ({"versions": {"nccl": "2.27.5"}}, "NCCL 2.27.5, now "),
    ({"versions": {"python": "3.10.1"}}, "Python 3.10, now "),
    ({"cpu": {"cores": 3}}, "3 cores, now "),
    ({"variables": {LEVEL: "LOC"}, INHERITED: [LEVEL]}, f"{LEVEL} LOC, now unset"),
    ({"variables": {THREADS: "3"}, INHERITED: [THREADS]}, f"{THREADS} 3, now unset"),
    ({"nccl_conf": "NCCL_ALGO=Tree\n"}, "/etc/nccl.conf has changed"),
]


@pytest.mark.parametrize(("changes", "said"), CHANGES)
def test_what_was_measured_elsewhere_is_measured_again_and_the_difference_is_named(
    tmp_path, here, changes, said
):
    done, notes = found(planted(tmp_path, elsewhere(**changes)), here)
    assert done == []
    (note,) = notes
    assert note.startswith("measuring 1 run again: ") and note.endswith("Earlier results are kept")
    assert said in note


MINOR = REAL.environment["versions"]["python"].rpartition(".")[0]
WITHOUT_EFFECT = {
    "versions": {"python": f"{MINOR}.99"},
    "variables": {"SLURM_JOB_ID": "7", "TORCH_HOME": "/there"},
    "platform": "Linux-6.99-after-a-reboot",
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_changes_no_result_leaves_a_cell_done(tmp_path, here, name):
    made = elsewhere(**{name: WITHOUT_EFFECT[name]})
    assert found(planted(tmp_path, made), here)[0] == ["f" * 32]


def test_two_nodes_with_one_home_folder_keep_a_record_each(tmp_path, here):
    other = elsewhere(host="node2")
    study = planted(tmp_path, REAL, other)
    assert found(study, here)[0] == [REAL.record_id]  # set aside, the attempt of this host counts
    assert study.finished(REAL.cell).record_id == other.record_id
    (mine, its) = Study.of(records.read_study(study.folder)[0]).runs
    assert [len(one.records) for one in (mine, its)] == [1, 1], "no repeats of each other"
    assert mine.provenance["machine"] != its.provenance["machine"]


def test_the_newest_attempt_of_these_surroundings_decides(tmp_path, here):
    failed = dataclasses.replace(elsewhere(), state="failed", metrics={})
    assert found(planted(tmp_path, REAL, failed), here) == ([], [])
    study = planted(tmp_path / "2", failed, REAL, elsewhere(host="node2"))
    assert found(study, here)[0] == [REAL.record_id]


def test_other_code_that_measures_is_told_and_decides_nothing(tmp_path, here):
    done, notes = found(planted(tmp_path, elsewhere(code="abcdef012345")), here)
    assert done == ["f" * 32]
    (note,) = notes
    assert note.startswith("1 run of another version of Ringside")


def test_a_process_like_the_ranks_tells_the_versions_and_one_that_fails_tells_nothing(monkeypatch):
    own = RunEnvironment(Machine("cpu", (), (), 1), {})
    monkeypatch.setattr(run_environment.sys, "executable", "/no/such/python")
    assert own._versions_on_gpus == {}


@pytest.mark.parametrize("elsewhere", [{}, {"nodes": ("a", "b")}, {"topology": "file"}])
@pytest.mark.parametrize("cells", [1, 2])
def test_a_dry_run_says_what_is_done_before_and_the_time_of_the_rest(
    tmp_path, here, cells, elsewhere
):
    study = planted(tmp_path, REAL)
    before = sorted(study.folder.rglob("*"))
    options = {"output_dir": str(tmp_path), "study": "study", "resume": True}
    config = SimpleNamespace(**options | {"topology": None, "nodes": ()} | elsewhere)
    plan = [PlannedCell(dataclasses.replace(REAL.cell, repeat=index)) for index in range(cells)]
    console = Console(file=io.StringIO(), width=200)
    print_plan(SimpleNamespace(config=config, cells=plan), here, console)
    lines = console.file.getvalue().splitlines()
    assert [line.endswith(" (done before)") for line in lines[:cells]] == [True, False][:cells]
    provided = ""
    if elsewhere:
        provided = " (if their machine has not changed: a dry run does not ask it)"
    rest = ["nothing was started", "1 run, about "][cells - 1]
    assert lines[-1].startswith(f"1 run done before{provided}; {rest}")
    assert sorted(study.folder.rglob("*")) == before
