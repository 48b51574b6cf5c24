"""Records of two real H200s (tests/data/h200_x2) beside the native tools' own output: the claims of benchmarks/RESULTS.md."""

from pathlib import Path
from statistics import median

import pytest

from analysis.findings.examine import findings_of
from analysis.native.nccl_tests import parse_nccl_tests
from analysis.native.p2p import read_p2p
from analysis.report.build import examine
from analysis.study.study import Study
from analysis.trace.source import read_trace
from analysis.trace.steps import within_steps
from analysis.trace.summary import summarize, trace_metrics
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data"


def records(study):
    found, _ = read_study(DATA / "h200_x2" / study)
    assert found
    return found


def of(study, **asked):
    (record,) = [
        one for one in records(study)
        if all(({"strategy": one.cell.strategy["name"]} | one.cell.strategy | one.cell.benchmark).get(name) == value
               for name, value in asked.items())
    ]  # fmt: skip
    return record


def test_every_cell_that_ended_is_valid():
    for study in (
        "links",
        "exchange",
        "scaling",
        "strategies",
        "bootcamp_resnet50",
        "hook",
        "traces",
    ):
        for record in records(study):
            assert record.validity.verdict == "valid" or record.state == "interrupted", record.name


def test_the_waterfall_closes_on_the_measured_rate():
    found = findings_of(Study.of(records("scaling")))
    (waterfall,) = found.waterfalls
    lost = sum(
        part.lost.value
        for part in waterfall.parts
        if part.lost is not None and not part.above_ideal
    )
    assert waterfall.ideal.value - lost - waterfall.residual == pytest.approx(
        waterfall.measured.value
    )
    assert abs(waterfall.residual) < 0.002 * waterfall.ideal.value
    assert (
        waterfall.residual_low is None
    )  # three runs of one cell are too few for an interval of the cost
    largest = max(
        (part for part in waterfall.parts if part.lost is not None),
        key=lambda part: part.lost.value,
    )
    assert largest.name == "strategy overhead on one GPU" and largest.lost.low > 0
    (point,) = [
        point for curve in found.scaling.curves for point in curve.points
        if point.world_size == 2 and curve.label == "nccl_allreduce"
    ]  # fmt: skip
    assert point.runs == 3 and point.efficiency.value == pytest.approx(0.995, abs=0.001)


def verdicts(study, asked, part=-1):
    """(first, second): verdict; each named by one part of its label."""
    return {
        (one.first.split(" · ")[part], one.second.split(" · ")[part]): one.verdict
        for one in findings_of(Study.of(records(study))).comparisons if one.asked == asked and one.rate == "images/s"
    }  # fmt: skip


def test_pix_changes_nothing_and_loc_costs():
    found = verdicts("bootcamp_resnet50", "NCCL_P2P_LEVEL")
    assert found[("P2P_LEVEL untouched", "P2P_LEVEL=PIX")] == "no difference seen"
    assert found[("P2P_LEVEL untouched", "P2P_LEVEL=LOC")] == "slower"
    for record in records("bootcamp_resnet50"):
        assert ("setting_no_effect" in record.validity.codes) == (
            record.cell.nccl.get("NCCL_P2P_LEVEL") == "PIX"
        )
    told, _ = examine(DATA / "h200_x2" / "bootcamp_resnet50")
    (section,) = [section for section in told.sections if section.anchor == "strategies"]
    (line,) = section.lines
    assert line.startswith(
        "NCCL_P2P_LEVEL=PIX: level 1 (PIX) did not force PCIe: same transports as without it"
    )
    assert line.endswith(" (3 cells).")


def test_the_bootcamps_network_waits_for_the_cpu_and_answers_nothing():
    assert all("cpu_bound" in record.validity.codes for record in records("bootcamp_pairs"))
    assert set(verdicts("bootcamp_pairs", "NCCL_P2P_LEVEL").values()) == {"no difference seen"}


def test_strategies_differ_where_the_results_say():
    found = verdicts("strategies", "strategy", 1)
    assert (
        len(found) == 28
        and sum(verdict != "no difference seen" for verdict in found.values()) == 26
    )
    assert {pair for pair, verdict in found.items() if verdict == "no difference seen"} == {
        ("kvstore_device", "nccl_allreduce"), ("kvstore_dist_sync", "cpu_staged"),
    }  # fmt: skip
    assert [verdict for (first, _), verdict in found.items() if first == "none"] == ["slower"] * 7


@pytest.mark.parametrize("placement", ["out_of_place", "in_place"])
def test_large_messages_are_as_fast_as_nccl_tests_has_them(placement):
    native = {
        run.collective: run
        for run in parse_nccl_tests((DATA / "nccl_tests_h200_x2.txt").read_text())
    }
    compared = 0
    for record in records("links"):
        for run in record.tables.get("nccl-tests", {}).get("runs", ()):
            rows = {row["bytes"]: row[placement] for row in native[run["collective"]].rows}
            for row in run["rows"]:
                ours, theirs = row[placement], rows.get(row["bytes"])
                if ours and theirs and theirs["busbw"] and row["bytes"] >= 64 << 20:
                    assert ours["busbw"] >= 0.98 * theirs["busbw"], (
                        run["collective"],
                        row["bytes"],
                    )
                    assert ours["wrong"] == 0
                    compared += 1
    assert compared >= 20


def test_a_graph_of_small_messages_takes_as_long_as_nccl_tests_has_it():
    (native,) = parse_nccl_tests((DATA / "nccl_tests_h200_x2_graph.txt").read_text())
    theirs = {row["bytes"]: row for row in native.rows}
    for row in of("links", cuda_graph=True).tables["nccl-tests"]["runs"][0]["rows"]:
        for placement in ("out_of_place", "in_place"):
            assert row[placement]["time_us"] <= 1.05 * theirs[row["bytes"]][placement]["time_us"]


def test_copies_between_gpus_are_as_fast_as_the_tool_has_them():
    tool = read_p2p(DATA / "p2p_h200_x2.txt")
    paths = DATA.glob("h200_x2/links*/p2p-*9781131b4b/record.json")  # the same cell twice
    ours = [sample for path in paths for sample in read_p2p(path).repeats]
    assert len(ours) == 10 and len(tool.runs) == 3
    for name, entries in ours[0].entries.items():
        for pair in entries:
            mine, theirs = (
                median(one.entries[name][pair] for one in samples) for samples in (ours, tool.runs)
            )
            if name.startswith(("unidirectional", "bidirectional")):
                assert mine == pytest.approx(theirs, rel=0.02), (name, pair)
            else:
                assert mine == pytest.approx(
                    theirs, rel=0.1 if name.startswith("latency_gpu") else 0.2
                ), (name, pair)


def test_the_stencil_is_bound_by_memory_and_two_gpus_share_it():
    for exchange in ("peer", "host"):
        metrics = of("links", exchange=exchange).metrics
        assert metrics["jacobi/copy_share"] > 0.97
        assert metrics["jacobi/efficiency"] > 0.97


def test_exchanges_are_what_the_results_say():
    plain = of("exchange", strategy="kvstore_device", comm_hook="none").metrics
    halved = of("exchange", strategy="kvstore_device", comm_hook="fp16").metrics
    assert halved["comm/bytes_moved"] * 2 == plain["comm/bytes_moved"]
    gloo = of("exchange", strategy="cpu_staged", transport="gloo").metrics
    staged = of("exchange", strategy="cpu_staged", transport="shared", staging="full").metrics
    assert gloo["comm/exchange_ms"] > 10 * staged["comm/exchange_ms"]
    assert staged["stage/all_at_once_ms"] > 0.8 * staged["comm/exchange_ms"]


def test_two_profilers_agree_on_what_moves_bytes():
    for level in (None, "LOC"):
        transfers = {
            record.cell.profiler: record.tables["trace"]["collectives"][0]["transfer_avg_us"]
            for record in records("traces") if record.cell.nccl.get("NCCL_P2P_LEVEL") == level
        }  # fmt: skip
        assert set(transfers) == {"nsys", "torch"}
        assert transfers["torch"] == pytest.approx(transfers["nsys"], rel=0.02)


def test_with_ddps_hook_every_kernel_starts_later():
    """nsys saw both: two steps without a hook, and the record of ten with one (its trace is 1.4 MB)."""
    plain = trace_metrics(summarize(within_steps(read_trace(str(DATA / "nsys_h200_x2.sqlite.gz")))))
    (hook,) = [record.metrics for record in records("hook") if record.cell.profiler == "nsys"]
    assert hook["trace/gap_us"] > 1.8 * plain["trace/gap_us"]
    assert hook["trace/gpu_idle_share"] > 1.5 * plain["trace/gpu_idle_share"]
    assert hook["strategy/cost_ms"] > 2 > 10 * hook["trace/exposed_ms_per_step"]


def test_two_profilers_agree_on_what_is_exposed_beyond_gaps():
    """Two steps of each of two traces of equal cells: torch.profiler's gaps are wider."""
    found = {}
    for profiler, source in (("nsys", "nsys_h200_x2.sqlite.gz"), ("torch", "kineto_h200_x2")):
        found[profiler] = trace_metrics(summarize(within_steps(read_trace(str(DATA / source)))))
    gaps = {
        profiler: metrics["trace/exposed_in_gaps_ms_per_step"]
        for profiler, metrics in found.items()
    }
    beyond = {
        profiler: metrics["trace/exposed_ms_per_step"] - gaps[profiler]
        for profiler, metrics in found.items()
    }
    assert gaps["torch"] > 1.3 * gaps["nsys"]
    assert beyond["torch"] == pytest.approx(beyond["nsys"], rel=0.05)
