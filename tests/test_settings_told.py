"""Each NCCL setting is told against the same cell with the setting untouched: transport, exchange, rate and verdict."""

from pathlib import Path

import pytest
from simulate import Simulator, Truth

from analysis.findings.examine import findings_of
from analysis.report.summary import main_point, sentences, settings_sentences
from analysis.study.study import Study, open_study

DATA = Path(__file__).parent / "data"


def told(study):
    found = findings_of(study)
    return [
        line.replace("\u00a0", " ") for line in settings_sentences(found, main_point(study, found))
    ]


def test_repeats_give_every_setting_a_verdict():
    study = open_study(DATA / "h200_x2" / "bootcamp_resnet50")
    assert told(study) == [
        "P2P_LEVEL=LOC is 2.2 % (1.9 to 2.6) slower than untouched: NCCL used SHM instead of P2P/CUMEM, and an exchange took "
        "7.87 times as long.",
        "P2P_LEVEL=PIX shows no difference to untouched: NCCL used the same transport, and an exchange took as long.",
    ]
    level = {one.setting: one for one in findings_of(study).settings}
    assert level["P2P_LEVEL=LOC"].other_transport and not level["P2P_LEVEL=PIX"].other_transport


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("settings", "P2P_LEVEL=NVL, P2P_LEVEL=PIX and ALGO=Ring differ"),
        ("settings_again", "P2P_LEVEL=NVL and P2P_LEVEL=PIX"),
    ],
)
def test_single_runs_crown_no_winner(name, alike):
    """The fastest cell of `settings` has ALGO=Ring with P2P_LEVEL=PIX, by chance; LOC is what changed something."""
    study = open_study(DATA / "h200_x4" / name)
    first, second = told(study)
    assert (
        first.startswith("P2P_LEVEL=LOC was 2.")
        and "slower than untouched in single runs: NCCL used SHM" in first
    )
    assert second.startswith(alike) and second.endswith(
        "NCCL used the same transport, and an exchange took as long."
    )
    said = sentences(study, findings_of(study), {})
    assert first.replace(" %", "\u00a0%") in said and len(said) <= 5


def test_only_cells_with_nothing_else_set_are_the_untouched_ones():
    """ALGO=Ring with LOC against ALGO=Ring alone is in the table, and not on the first screen."""
    study = open_study(DATA / "h200_x4" / "settings")
    found = findings_of(study)
    assert len(found.settings) == 3 + 3 + 4 and len(told(study)) == 2
    assert all(
        one.compared.first_key.keys() < one.compared.second_key.keys() for one in found.settings
    )


def test_cpu_workers_have_no_settings_of_nccl():
    simulator = Simulator(Truth(noise=0.001))
    made = [
        simulator.record((0, 1), "nccl_allreduce", repeat, device="cpu", nccl=nccl)
        for repeat in range(3)
        for nccl in ({}, {"NCCL_P2P_LEVEL": "LOC"})
    ]
    study = Study.of(made)
    found = findings_of(study)
    assert len(study.runs) == 1 and found.comparisons == () and found.settings == ()
    assert found.unsaid.count("what NCCL settings change: CPU workers do not use NCCL") == 1
    assert not any("P2P_LEVEL" in line for line in sentences(study, found, {}))
