"""Records of four H200s (tests/data/h200_x4) beside the native tools' own output: what benchmarks/RESULTS.md says."""

from pathlib import Path
from statistics import median

import pytest

from analysis.findings.examine import findings_of
from analysis.native.nccl_tests import parse_nccl_tests
from analysis.native.p2p import read_p2p
from analysis.study.study import Study
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data"


def records(study):
    found, unreadable = read_study(DATA / "h200_x4" / study)
    assert found and not unreadable
    return found


def test_every_cell_is_valid_and_only_nvl_and_pix_have_no_effect():
    for study in ("waterfall", "links", "settings_again"):
        for record in records(study):
            assert (record.state, record.validity.verdict) == ("finished", "valid"), record.name
            idle = record.cell.nccl.get("NCCL_P2P_LEVEL") in ("NVL", "PIX")
            assert ("setting_no_effect" in record.validity.codes) == idle


def test_the_waterfall_of_four_gpus_is_that_of_the_results():
    (waterfall,) = findings_of(Study.of(records("waterfall"))).waterfalls
    lost = {
        part.name: part.lost.value
        for part in waterfall.parts
        if part.lost is not None and not part.above_ideal
    }
    assert waterfall.ideal.value - sum(lost.values()) - waterfall.residual == pytest.approx(
        waterfall.measured.value
    )
    assert {name: round(value) for name, value in lost.items()} == {
        "strategy overhead on one GPU": 167, "other clocks than alone": 0, "contention": 2, "exposed communication": 69,
    }  # fmt: skip
    assert (
        round(waterfall.measured.value) == 18579
        and abs(waterfall.residual) < 0.002 * waterfall.ideal.value
    )


def test_large_messages_are_as_fast_as_nccl_tests_has_them():
    native = {
        (run.collective, run.ranks): {row["bytes"]: row for row in run.rows}
        for run in parse_nccl_tests((DATA / "nccl_tests_h200_x4.txt").read_text())
    }
    ratios = []
    for record in records("links"):
        for run in record.tables.get("nccl-tests", {}).get("runs", ()):
            theirs = native[run["collective"], len(record.cell.gpus)]
            for row in run["rows"]:
                for placement in ("out_of_place", "in_place"):
                    ours, tool = row[placement], theirs[row["bytes"]][placement]
                    if ours and tool and tool["busbw"] and row["bytes"] >= 64 << 20:
                        assert ours["wrong"] == 0
                        ratios.append(ours["busbw"] / tool["busbw"])
    assert len(ratios) > 40 and min(ratios) > 0.975 and median(ratios) > 0.99


def test_all_twelve_pairs_copy_as_fast_as_the_tool_has_them():
    tool = read_p2p(DATA / "p2p_h200_x4.txt")
    (path,) = (DATA / "h200_x4" / "links").glob("p2p-*/record.json")
    ours = read_p2p(path)
    for name, entries in tool.runs[0].entries.items():
        if not name.startswith("latency"):
            between = [pair for pair in entries if pair[0] != pair[1]]
            assert len(between) == 12
            for pair in between:
                mine = median(sample.entries[name][pair] for sample in ours.repeats)
                assert mine == pytest.approx(entries[pair], rel=0.02), (name, pair)
