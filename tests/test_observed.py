"""What a cell really used, read from the logs in its folder and judged against what was asked."""

import dataclasses
from pathlib import Path

from build import make_cell

from analysis.validity.checks import judge
from analysis.validity.effective import observe
from benchmarks.record import CellFolder, Record
from conf.schema import ValidityLimits

DATA = Path(__file__).parent / "data"
LINKS = {"0-3": "NV18", "0-1": "NV18"}


def record(gpus=(0, 3), **nccl: str) -> Record:
    """A finished two-GPU record that asked for some NCCL settings."""
    cell = dataclasses.replace(make_cell(tuple(gpus), min_iterations=1), device="cuda", nccl=nccl)
    ranks = [{"rank": rank, "uuid": f"GPU-{gpu}", "done": True} for rank, gpu in enumerate(gpus)]
    return Record(
        record_id="0" * 32, cell_key="k", name="n", cell=cell, study="s", sweep_id="w", overrides=[], state="finished",
        started_at=1.0, ended_at=2.0, environment={"links": LINKS, "planned_uuids": ["GPU-0", f"GPU-{gpus[1]}"]}, ranks=ranks,
        metrics={"gpu/idle_share": 0.0},
        checks={"replicas_equal": True, "gradient_error": 1e-9, "gradient_spread": 1.0, "gradient_tolerance": 1e-3,
                "losses": [1.0, 1.0], "clock_disagreement": 0.0, "half_width": 0.001, "iterations": 9, "warmup_flat": True},
    )  # fmt: skip


def folder(path: Path, capture: str, replaced: str = "", by: str = "") -> CellFolder:
    """A cell's folder with one captured NCCL log in it."""
    (path / "nccl").mkdir(parents=True)
    (path / "nccl" / "vm.1.log").write_text(
        (DATA / capture).read_text(errors="replace").replace(replaced or "\0", by)
    )
    return CellFolder(path)


LOC = "nccl_h200_gpus_0_3_p2p_level_LOC.log"


def test_transport_and_link_class_are_joined(tmp_path):
    asked = record(NCCL_P2P_LEVEL="LOC")
    effective = observe(asked, folder(tmp_path, LOC), [], lambda other: CellFolder(tmp_path))
    assert effective["transport"] == "SHM/direct/direct, NV18 unused"
    assert effective["link_class"] == "NV18"
    assert effective["nccl"]["settings"]["NCCL_P2P_LEVEL"] == "LOC"
    verdict = judge(dataclasses.replace(asked, effective=effective), ValidityLimits())
    assert verdict.verdict == "valid", verdict


def test_a_setting_that_nccl_did_not_take_is_invalid(tmp_path):
    asked = record(NCCL_P2P_LEVEL="LOC")
    effective = observe(
        asked,
        folder(tmp_path, LOC, "NCCL_P2P_LEVEL set by environment to LOC", "nothing"),
        [],
        lambda _: CellFolder(tmp_path),
    )
    verdict = judge(dataclasses.replace(asked, effective=effective), ValidityLimits())
    assert verdict.verdict == "invalid" and "setting_ignored" in verdict.codes


def test_a_setting_that_changed_nothing_is_a_finding(tmp_path):
    asked, plain = record(NCCL_P2P_LEVEL="SYS"), record()
    cell = folder(
        tmp_path / "cell",
        LOC,
        "NCCL_P2P_LEVEL set by environment to LOC",
        "NCCL_P2P_LEVEL set by environment to SYS",
    )
    same = folder(tmp_path / "plain", LOC, "NCCL_P2P_LEVEL set by environment to LOC", "nothing")
    effective = observe(asked, cell, [plain], lambda _: same)
    verdict = judge(dataclasses.replace(asked, effective=effective), ValidityLimits())
    assert "setting_no_effect" in verdict.codes
    assert (
        "setting_no_effect"
        not in judge(
            dataclasses.replace(asked, effective=observe(asked, cell, [], lambda _: same)),
            ValidityLimits(),
        ).codes
    )


def test_cpu_workers_have_no_transport(tmp_path):
    asked = record(NCCL_P2P_LEVEL="LOC")
    asked = dataclasses.replace(asked, cell=dataclasses.replace(asked.cell, device="cpu"))
    effective = observe(asked, CellFolder(tmp_path), [], lambda _: CellFolder(tmp_path))
    verdict = judge(dataclasses.replace(asked, effective=effective), ValidityLimits())
    assert "transport" not in effective and not verdict.codes
    assert "not applicable" in verdict.not_applicable["setting_ignored"]
