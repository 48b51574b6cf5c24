"""Each NCCL setting is told against the same cell with the setting untouched (words and numbers: tests/golden)."""

from build import DATA
from simulate import Simulator, Truth

from analysis.findings.examine import findings_of
from analysis.report.main_point import main_point
from analysis.report.summary import sentences, settings_sentences
from analysis.study.study import Study, open_study


def test_only_cells_with_nothing_else_set_are_the_untouched_ones():
    """ALGO=Ring with LOC against ALGO=Ring alone is in the table, and not on the first screen.

    The fastest cell of `settings` has ALGO=Ring with P2P_LEVEL=PIX, by chance; LOC is what changed something.
    """
    study = open_study(DATA / "h200_x4" / "settings")
    findings = findings_of(study)
    lines = settings_sentences(findings, main_point(study, findings))
    assert len(findings.settings) == 3 + 3 + 4 and len(lines) == 2
    assert lines[0].startswith("P2P_LEVEL=LOC was 2.")
    for effect in findings.settings:
        assert effect.compared.first_key.keys() < effect.compared.second_key.keys()


def test_hardware_queues_are_compared_with_the_same_cell_without_the_option():
    simulator = Simulator(Truth(noise=0.001))
    made = []
    for repeat in range(3):
        for queues, factor in ((None, 1.0), (1, 1.04)):
            asked = {"factor": factor, "cuda_device_max_connections": queues}
            made.append(simulator.record((0, 1), "nccl_allreduce", repeat, **asked))
    (compared,) = findings_of(Study.of(made)).comparisons
    name = "cuda_device_max_connections"
    assert (compared.asked, compared.differing) == (name, (name,))
    assert compared.verdict and 0.03 < compared.difference.value < 0.05
    assert (compared.first_key.get(name), compared.second_key[name]) == (None, "1")


def test_cpu_workers_have_no_settings_of_nccl():
    simulator = Simulator(Truth(noise=0.001))
    made = []
    for repeat in range(3):
        for nccl in ({}, {"NCCL_P2P_LEVEL": "LOC"}):
            record = simulator.record((0, 1), "nccl_allreduce", repeat, device="cpu", nccl=nccl)
            made.append(record)
    study = Study.of(made)
    findings = findings_of(study)
    assert len(study.runs) == 1 and findings.comparisons == () and findings.settings == ()
    assert "Effect of NCCL settings: CPU workers do not use NCCL" in findings.unsaid
    assert not any("P2P_LEVEL" in line for line in sentences(study, findings, {}))
