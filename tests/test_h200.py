"""Records of real H200s (tests/data/h200_*) beside the native tools' own output: the claims of benchmarks/RESULTS.md.

What findings say of these records is in tests/golden.
"""

from statistics import median

import pytest
from build import DATA

from analysis.native.nccl_tests import parse_nccl_tests
from analysis.native.p2p import read_p2p
from analysis.trace.source import read_trace
from analysis.trace.steps import within_steps
from analysis.trace.trace_summary import summarize, trace_metrics
from benchmarks.record import read as read_record
from benchmarks.record import read_study

PLACEMENTS = ("out_of_place", "in_place")
LARGE = 64 << 20  # bytes of a message that takes its time on the wires


def records(study):
    read, unreadable = read_study(DATA / study)
    assert read and not unreadable
    return read


@pytest.mark.parametrize(("gpus", "least"), [("x2", 0.98), ("x4", 0.975)])
def test_large_messages_are_as_fast_as_nccl_tests_has_them(gpus, least):
    native = {}
    for run in parse_nccl_tests((DATA / f"nccl_tests_h200_{gpus}.txt").read_text()):
        native[run.collective, run.ranks] = {row["bytes"]: row for row in run.rows}
    ratios = []
    for record in records(f"h200_{gpus}/links"):
        for run in record.tables.get("nccl-tests", {}).get("runs", ()):
            theirs = native[run["collective"], len(record.cell.gpus)]
            for row in run["rows"]:
                for placement in PLACEMENTS:
                    ours, tool = row[placement], theirs.get(row["bytes"], {}).get(placement)
                    if ours and tool and tool["busbw"] and row["bytes"] >= LARGE:
                        assert ours["wrong"] == 0
                        ratios.append(ours["busbw"] / tool["busbw"])
    assert len(ratios) >= 20 and min(ratios) >= least and median(ratios) > 0.99


def test_a_graph_of_small_messages_takes_as_long_as_nccl_tests_has_it():
    (native,) = parse_nccl_tests((DATA / "nccl_tests_h200_x2_graph.txt").read_text())
    theirs = {row["bytes"]: row for row in native.rows}
    (record,) = [
        record for record in records("h200_x2/links") if record.cell.benchmark.get("cuda_graph")
    ]
    for row in record.tables["nccl-tests"]["runs"][0]["rows"]:
        for placement in PLACEMENTS:
            limit_us = 1.05 * theirs[row["bytes"]][placement]["time_us"]
            assert row[placement]["time_us"] <= limit_us


def rate_limit(name):
    if not name.startswith("latency"):
        return 0.02
    return 0.1 if name.startswith("latency_gpu") else 0.2


@pytest.mark.parametrize(
    ("tool", "cells"),
    [
        ("p2p_h200_x2.txt", "h200_x2/links*/p2p-*9781131b4b/record.json"),  # the same cell twice
        ("p2p_h200_x4.txt", "h200_x4/links/p2p-*/record.json"),
    ],
)
def test_copies_between_gpus_are_as_fast_as_the_tool_has_them(tool, cells):
    theirs = read_p2p(DATA / tool)
    ours = [read_record(path).tables["p2p"] for path in DATA.glob(cells)]
    of_four = "x4" in tool
    for name, entries in theirs[0].entries.items():
        for pair in entries:
            if of_four and (name.startswith("latency") or pair[0] == pair[1]):
                continue
            row, column = pair
            mine = []
            for table in ours:
                mine += [matrix[row][column] for matrix in table["samples"][name]]
            mine = median(mine)
            native = median(run.entries[name][pair] for run in theirs)
            assert mine == pytest.approx(native, rel=rate_limit(name)), (name, pair)


@pytest.mark.parametrize("level", [None, "LOC"])
def test_two_profilers_agree_on_what_moves_bytes(level):
    transfers = {}
    for record in records("h200_x2/traces"):
        if record.cell.nccl.get("NCCL_P2P_LEVEL") == level:
            collective = record.tables["trace"]["collectives"][0]
            transfers[record.cell.profiler] = collective["transfer_avg_us"]
    assert set(transfers) == {"nsys", "torch"}
    assert transfers["torch"] == pytest.approx(transfers["nsys"], rel=0.02)


def traced(source):
    return trace_metrics(summarize(within_steps(read_trace(str(DATA / source)))))


def test_with_ddps_hook_every_kernel_starts_later():
    """nsys saw both: two steps without a hook, and the record of ten with one (its trace is 1.4 MB)."""
    plain = traced("nsys_h200_x2.sqlite.gz")
    (hook,) = [
        record.metrics for record in records("h200_x2/hook") if record.cell.profiler == "nsys"
    ]
    assert hook["trace/gap_us"] > 1.8 * plain["trace/gap_us"]
    assert hook["trace/gpu_idle_share"] > 1.5 * plain["trace/gpu_idle_share"]
    assert hook["strategy/cost_ms"] > 2 > 10 * hook["trace/exposed_ms_per_step"]


def test_two_profilers_agree_on_what_is_exposed_beyond_gaps():
    """Two steps of each of two traces of equal cells: torch.profiler's gaps are wider."""
    gaps, beyond = [], []
    for source in ("nsys_h200_x2.sqlite.gz", "kineto_h200_x2"):
        metrics = traced(source)
        gaps.append(metrics["trace/exposed_in_gaps_ms_per_step"])
        beyond.append(metrics["trace/exposed_ms_per_step"] - gaps[-1])
    assert gaps[1] > 1.3 * gaps[0]
    assert beyond[1] == pytest.approx(beyond[0], rel=0.05)
