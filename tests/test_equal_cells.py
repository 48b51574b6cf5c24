"""Equal cells are equal: what was inherited, used and installed keeps runs, comparisons and baselines apart, with its name."""

import copy
import dataclasses
from pathlib import Path

import pytest
from build import environment, make_cell
from simulate import Simulator

from analysis.findings.baselines import Baselines
from analysis.findings.scaling import curves
from analysis.study.provenance import INHERITED, inherited
from analysis.study.study import Study
from benchmarks import record as records
from benchmarks.record import Record
from launch.engines.environment import inherited_names
from launch.machine import facts
from launch.machine.devices import Device, Machine

DATA = Path(__file__).parent / "data" / "h200_x2"
PAIRS = [
    record
    for record in records.read_study(DATA / "bootcamp_resnet50")[0]
    if not record.cell.nccl and record.usable
]  # three runs of one cell


def planted(record: Record, **changes) -> Record:
    """A deep copy with other facts: `variables`, `settings` are added to; the others replace parts of `effective`."""
    made = copy.deepcopy(record)
    made.environment["variables"] |= changes.pop("variables", {})
    made.effective["nccl"]["settings"] |= changes.pop("settings", {})
    made.effective.update(changes)
    return made


def share_of(made):
    """The efficiency of the last record against the others."""
    return Baselines(Study.of(made)).efficiency(made[-1])


def runs_of(made):
    return sorted(len(one.records) for one in Study.of(made).runs)


def test_clean_repeats_are_runs_of_one_cell():
    assert len(PAIRS) == 3 and runs_of(PAIRS) == [3]
    for study in {*DATA.glob("*")} - {DATA / "scripts"}:  # a script has versions of its own
        found = Study.of(records.read_study(study)[0])
        assert not {"connections", "threads", "CPU", "cuDNN", "Python"} & set(
            found.varied_provenance
        ), study


def test_a_setting_of_the_shell_is_no_repeat():
    """The audit's fault: LOC from the shell made 9,077 images/s a repeat of 9,297 and 9,301."""
    loc = {"NCCL_P2P_LEVEL": "LOC"}
    how = {"transport": "SHM/direct/direct, NV18 unused", "channels": 4}
    slow = planted(PAIRS[0], variables=loc, settings=loc, **how)
    study = Study.of([slow, *PAIRS[1:]])
    assert runs_of([slow, *PAIRS[1:]]) == [1, 2]
    (sentence,) = [one for one in curves(study).refusals if "equal requests" in one]
    assert "NCCL_P2P_LEVEL (LOC and unset)" in sentence


@pytest.mark.parametrize(
    "changes", [{"transport": "NET/Socket"}, {"channels": 4}, {"settings": {"NCCL_ALGO": "Tree"}}]
)
def test_ranks_that_were_connected_in_another_way_are_no_repeat(changes):
    made = [planted(PAIRS[0], **changes), *PAIRS[1:]]
    assert runs_of(made) == [1, 2]
    assert any("different connections" in one for one in curves(Study.of(made)).refusals)


def test_a_run_whose_log_is_lost_stays_with_the_others():
    lost = dataclasses.replace(PAIRS[0], effective={"link_class": "NV18"})
    assert runs_of([lost, *PAIRS[1:]]) == [3]
    assert runs_of([lost, planted(PAIRS[1], channels=4), PAIRS[2]]) == [1, 1, 1], (
        "which of the two it equals is not known"
    )


VERSIONS = {
    "torch": "2.11.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "cudnn": "91900", "python": "3.12.3",
}  # fmt: skip
CPU = {"model": "Intel(R) Xeon(R) Processor", "cores": 64}
PLAIN = {"versions": VERSIONS, "cpu": CPU, "variables": {}}
SURROUNDINGS = [
    ({"versions": VERSIONS | {"cudnn": "92000"}}, "cuDNN (92000, not 91900)"),
    ({"versions": VERSIONS | {"python": "3.13.0"}}, "Python (3.13, not 3.12)"),
    ({"versions": VERSIONS | {"torch": "2.12.0"}}, "torch (2.12.0, not 2.11.0+cu130)"),
    ({"versions": VERSIONS | {"nccl": "2.30.1"}}, "NCCL (2.30.1, not 2.28.9)"),
    ({"versions": VERSIONS | {"cuda": "12.8"}}, "CUDA (12.8, not 13.0)"),
    ({"gpu": {"driver": "590"}}, "driver (590, not 580)"),
    ({"host": "other"}, "machine (other, not vm)"),
    ({"planned_uuids": ["GPU-of-another-machine"]}, "(GPUs on vm · GPU-of-anoth, not GPUs on vm"),
    (
        {"cpu": CPU | {"model": "AMD EPYC"}},
        "CPU (AMD EPYC, 64 cores, not Intel(R) Xeon(R) Processor, 64 cores)",
    ),
    ({"cpu": CPU | {"cores": 8}}, "8 cores, not"),
    ({"git": {"commit": "f" * 40}}, "Ringside (commit ffffffffffff, not commit 0754217c94b9)"),
    ({"code": "abcdef012345"}, "Ringside (code abcdef012345, not commit 0754217c94b9)"),
    ({"variables": {"NVIDIA_TF32_OVERRIDE": "1"}}, "NVIDIA_TF32_OVERRIDE (1, not unset)"),
    ({"variables": {"NCCL_P2P_LEVEL": "LOC"}}, "NCCL_P2P_LEVEL (LOC, not unset)"),
    (
        {"variables": {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}},
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE (1, not unset)",
    ),
]


@pytest.mark.parametrize(("changes", "named"), SURROUNDINGS)
def test_a_baseline_of_other_surroundings_does_not_fit(changes, named):
    simulator = Simulator()
    alone = simulator.record((0,), environment=PLAIN | changes)
    made = [alone, simulator.record((0, 1), environment=PLAIN)]
    refusals = curves(Study.of(made)).refusals
    assert share_of(made) is None and any(named in refusal for refusal in refusals), refusals
    assert share_of([alone, simulator.record((0, 1), environment=PLAIN | changes)]) is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": VERSIONS | {"python": "3.12.9"}},
        {"variables": {"NCCL_VERSION": "2.28", "TORCH_CUDA_ARCH_LIST": "9.0"}},
        {"variables": {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7"}},
        {
            "variables": {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"},
            INHERITED: ["NCCL_SOCKET_IFNAME"],
        },
    ],
)
def test_what_changes_no_result_keeps_nothing_apart(changes):
    simulator = Simulator()
    alone = simulator.record((0,), environment=PLAIN | changes)
    assert share_of([alone, simulator.record((0, 1), environment=PLAIN)]) is not None


def with_threads(simulator, gpus, threads, asked, cores=64, **environment):
    around = {"cpu": {"cores": cores}, "variables": {"OMP_NUM_THREADS": asked}, **environment}
    ranks = [{"rank": rank, "threads": threads} for rank in range(len(gpus))]
    return dataclasses.replace(simulator.record(gpus, environment=around), ranks=ranks)


def test_threads_are_compared_where_somebody_else_set_them():
    simulator = Simulator()
    alone = with_threads(simulator, (0,), 32, "32")
    assert Baselines(Study.of([alone])).of_members(Study.of([alone]).runs[0])
    for pair, fits in (
        (with_threads(simulator, (0, 1), 16, "16"), True),  # Ringside's own share of 64 cores
        (with_threads(simulator, (0, 1), 1, "1"), False),
        (with_threads(simulator, (0, 1), 16, "16", **{INHERITED: ["OMP_NUM_THREADS"]}), False),
        (with_threads(simulator, (0, 1), 1, "16"), False),  # torch did not do as it was told
    ):
        assert (share_of([alone, pair]) is not None) == fits, pair.ranks
    both = [
        with_threads(simulator, gpus, 8, "8", **{INHERITED: ["OMP_NUM_THREADS"]})
        for gpus in ((0,), (0, 1))
    ]
    assert share_of(both) is not None


# What the launcher notes.


def test_the_launcher_notes_what_ranks_inherit_and_no_secret(tmp_path):
    around = {
        "NCCL_P2P_LEVEL": "LOC", "NCCL_ALGO": "Tree", "NVIDIA_TF32_OVERRIDE": "1", "OMP_NUM_THREADS": "3", "HOME": "/root",
        "CUDA_LAUNCH_BLOCKING": "1", "CUDA_HOME": "/usr", "NCCL_SECRET_WORD": "hunter2", "TORCH_URL": "https://me:hunter2@x",
        "LD_PRELOAD": "libjemalloc.so",
    }  # fmt: skip
    machine = Machine("cuda", (Device(0, "GPU-0"), Device(1, "GPU-1")), (0, 1), 64)
    cell = make_cell(device="cuda", nccl={"NCCL_ALGO": "Ring"})
    of_ranks = environment(cell, machine, records.CellFolder(tmp_path), "0" * 32, around)
    names = inherited_names(of_ranks, cell, around)
    assert set(names) == {
        "NCCL_P2P_LEVEL", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "LD_PRELOAD"
    }  # fmt: skip
    kept = facts.recorded_variables(of_ranks)
    assert "hunter2" not in repr(kept) and kept["NCCL_ALGO"] == "Ring" and "CUDA_HOME" not in kept
    record = dataclasses.replace(
        PAIRS[0], cell=cell, environment={"variables": kept, INHERITED: names}
    )
    assert inherited(record) == {name: around[name] for name in names if name != "OMP_NUM_THREADS"}


def test_the_hash_of_the_measuring_code_follows_its_text_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "ROOT", tmp_path)
    (tmp_path / "trainers").mkdir()
    (tmp_path / "benchmarks").mkdir()
    step = tmp_path / "trainers" / "step.py"
    step.write_text("one")
    first = facts.measuring_code()
    (tmp_path / "benchmarks" / "METHOD.md").write_text("words")
    assert facts.measuring_code() == first
    step.write_text("two")
    assert facts.measuring_code() != first
