"""What the wires explain: the planted line is found, a planted bad subset is told, clean studies accuse nobody."""

import dataclasses
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from build import changed_cell
from scipy.stats import linregress
from simulate import (
    DGX1,
    SUBSETS,
    WiredTruth,
    changed,
    lines_by_quantity,
    wire_ms,
    wire_verdicts,
    wired_study,
)

from analysis.findings.examine import findings_of
from analysis.findings.links.line_fit import fit, outliers
from analysis.report.figure import style
from analysis.report.sections.links import wire_lines
from analysis.study.study import Study, open_study
from analysis.topology.subsets import classes

DATA = Path(__file__).parent / "data"
COST, EFFICIENCY = "strategy/cost_ms", "scaling/efficiency"
PAIRS = tuple(combinations(range(8), 2))


def test_a_line_is_that_of_scipy():
    points = [(1.0, 0.9), (2.0, 1.6), (4.0, 2.1), (8.0, 4.4), (9.0, 4.2)]
    line, expected = fit(points), linregress(*zip(*points, strict=True))
    assert (line.fixed, line.slope) == pytest.approx((expected.intercept, expected.slope))
    assert line.r_squared == pytest.approx(expected.rvalue**2)
    half = 3.182446 * expected.stderr  # Student's t, 3 degrees of freedom
    assert line.slope_estimate().low == pytest.approx(expected.slope - half, rel=1e-5)
    assert line.fixed_estimate().high == pytest.approx(
        expected.intercept + 3.182446 * expected.intercept_stderr, rel=1e-5
    )


def test_a_further_point_is_expected_as_often_as_the_interval_says():
    chance, inside = np.random.default_rng(0), 0
    for _ in range(400):
        xs = chance.uniform(1, 10, 6)
        ys = 1 + 0.3 * xs + 0.1 * chance.standard_normal(6)
        further = fit(list(zip(xs[:5], ys[:5], strict=True))).expected(xs[5])
        inside += further.low <= ys[5] <= further.high
    assert 0.92 <= inside / 400 <= 0.98


@pytest.mark.parametrize(("count", "bad"), [(5, 0), (8, 0), (30, 0), (30, 2)])
def test_points_off_the_line_are_found_and_others_are_not(count, bad):
    chance, accused, found = np.random.default_rng(count), 0, 0
    for _ in range(60):
        xs = chance.uniform(1, 10, count)
        ys = 1 + 0.3 * xs + 0.1 * chance.standard_normal(count)
        ys[:bad] += 0.7
        outside = outliers(list(zip(xs, ys, strict=True)), 1 - 0.05 / count, 4)
        accused += any(place >= bad for place in outside)
        found += {*range(bad)} <= {*outside}
    assert (
        accused <= 8 and found >= 57
    )  # 3 are expected; 9 or more of 60 come by chance in 1 of 300 tests


def test_the_planted_line_is_found():
    lines, _ = lines_by_quantity(wired_study(3, WiredTruth(fixed_ms=0.8, share=0.25)))
    cost, efficiency = lines[COST], lines[EFFICIENCY]
    assert (
        cost.fixed_ms.low <= 0.8 <= cost.fixed_ms.high
        and cost.fixed_ms.high - cost.fixed_ms.low < 0.2
    )
    for line in (cost, efficiency):
        assert line.share.low <= 0.25 <= line.share.high and line.share.high - line.share.low < 0.03
        assert line.r_squared > 0.98 and line.source == "p2p" and len(line.points) == len(SUBSETS)
        assert max(abs(point.residual_ms) for point in line.points) < 4 * 54 * 0.002
    assert efficiency.points[0].efficiency == pytest.approx(
        54 / (54 + 0.8 + 0.25 * efficiency.points[0].wire_ms), abs=0.01
    )
    assert cost.points[0].gpus == tuple(range(8)) and cost.points[0].gb_per_s == pytest.approx(
        150, rel=0.03
    )


def test_peer_copies_of_another_study_of_the_same_machine_count(tmp_path):
    study = wired_study(3, folder=tmp_path / "training")
    found = findings_of(study)
    assert found.links_from == ("links",)
    assert {line.source for line in found.wire_lines} == {"p2p"}
    elsewhere = [
        changed(record, environment=record.environment | {"host": "another"})
        for record in study.records
    ]
    found = findings_of(Study.of(elsewhere, folder=tmp_path / "training"))
    assert (found.links_from, {line.source for line in found.wire_lines}) == ((), {"exchange"})


def test_all_reduces_alone_count_where_subset_and_settings_are_the_same():
    study = wired_study(3, subsets=PAIRS[:9], peers=False)
    cells = [record for record in study.records if record.cell.world_size == 2]
    alone = [
        changed(
            record,
            cell_key=f"{record.cell_key} alone",
            cell=changed_cell(
                record.cell, benchmark={"name": "collectives", "collective": "all_reduce"}
            ),
            metrics={"collectives/busbw_gb_per_s": 2 * record.metrics["comm/busbw_gb_per_s"]},
        )
        for record in cells
    ]
    lines, _ = lines_by_quantity(Study.of([*study.records, *alone]))
    by_exchange, _ = lines_by_quantity(study)
    assert (lines[COST].source, by_exchange[COST].source) == ("collectives", "exchange")
    assert lines[COST].share.value == pytest.approx(2 * by_exchange[COST].share.value)


def test_where_the_cost_on_one_gpu_is_known_the_line_is_one_of_exposed_communication():
    lines, _ = lines_by_quantity(wired_study(4, WiredTruth(alone_ms=0.3)))
    assert set(lines) == {"comm/exposed_ms", EFFICIENCY}
    line = lines["comm/exposed_ms"]
    assert line.share.low <= 0.4 <= line.share.high
    assert line.fixed_ms.value == pytest.approx(0.2, abs=0.1)
    assert line.fixed_ms.low is None, "all cells share the error of the cells on one GPU"


def test_a_subset_that_loses_more_than_its_wires_explain_is_told():
    """0.6 ms of a step of 54 ms, with runs that scatter by 0.1 ms."""
    assert wire_verdicts(wired_study(5, lost={(0, 1, 2, 3): 0.6})) == {(0, 1, 2, 3): "more"}
    study = wired_study(5, lost={(0, 3): 0.6})
    found = findings_of(study)
    assert {point.gpus for line in found.wire_lines for point in line.points if point.verdict} == {
        (0, 3)
    }
    few = dataclasses.replace(found, wire_lines=found.wire_lines[:1])
    with style():
        section = wire_lines(study, few)
    assert any(
        line.startswith("GPUs 0,3: this subset loses more time than its link speed explains")
        for line in section.lines
    )
    assert ">0,3<" in section.figures[0].svg and "Hollow" in section.figures[0].caption


def test_cells_that_bend_together_accuse_nobody():
    """From 8 ms on the wires nothing more hides: the line is wrong, no subset is."""
    beyond = {gpus: 0.6 * max(0.0, wire_ms(gpus) - 8) for gpus in SUBSETS}
    lines, _ = lines_by_quantity(wired_study(1, lost=beyond))
    assert lines[COST].bends and lines[EFFICIENCY].bends
    assert not any(point.verdict for line in lines.values() for point in line.points)
    assert not lines_by_quantity(wired_study(1))[0][COST].bends


def test_clean_studies_accuse_nobody():
    assert sum(bool(wire_verdicts(wired_study(seed))) for seed in range(6)) <= 1


def test_settings_of_nccl_are_cells_of_one_line():
    """The H200s: the strategy costs 0.42 ms and 0.40 of the exchange, over eight settings of NCCL."""
    study = open_study(DATA / "h200_x4" / "settings")
    found = findings_of(study)
    (line,) = found.wire_lines
    assert (line.quantity, line.source, len(line.points), line.speeds) == (COST, "exchange", 8, 2)
    assert line.fixed_ms.value == pytest.approx(0.416, abs=0.002)
    assert line.share.value == pytest.approx(0.395, abs=0.002)
    assert line.r_squared > 0.999
    assert not any(point.verdict for point in line.points)
    said = json.loads(json.dumps(dataclasses.asdict(found)))["wire_lines"][
        0
    ]  # as `python -m analysis report --json`
    assert (
        said["share"]["low"] < said["share"]["value"] < said["share"]["high"]
        and said["points"][0]["gb_per_s"] > 200
    )
    with style():
        section = wire_lines(study, found)
    assert any("only two speeds here" in text for text in section.lines)
    assert [picture.name for picture in section.figures] == ["wire-line-1"]
    assert (
        ">0,3 · P2P_LEVEL=LOC<" in section.figures[0].svg
        and ">measured GB/s<" in section.figures[0].svg
    )


@pytest.mark.parametrize(
    ("study", "why"),
    [
        (
            "bootcamp_resnet50",
            "nccl_allreduce has 3 cells with measured links, and 4 with different GB/s are needed",
        ),
        ("strategies", "1 cell with measured links"),  # across strategies there is no line
    ],
)
def test_without_enough_cells_the_report_says_what_to_plan(study, why):
    found = findings_of(open_study(DATA / "h200_x2" / study))
    assert found.wire_lines == () and why in found.no_wire_line
    assert "nccl.max_nchannels=1,2,4,8 adds them" in found.no_wire_line, "all its links are alike"


def test_four_cells_are_enough_and_three_are_not():
    chosen = [one.representative for one in classes(DGX1, 2)] + [(0, 2)]
    assert lines_by_quantity(wired_study(1, subsets=chosen))[0][COST].speeds == 3
    lines, missing = lines_by_quantity(wired_study(1, subsets=chosen[:3]))
    assert not lines and "has 3 cells" in missing and "gpus=classes adds them" in missing


def test_alike_wires_make_no_line():
    alike = [pair for pair in PAIRS if DGX1.link_between(*pair) == "NV2"]
    lines, missing = lines_by_quantity(wired_study(1, subsets=alike))
    assert not lines and "are equally fast" in missing


def test_measured_gb_per_s_of_one_source_and_never_nominal_ones():
    """Without peer copies the cells' own exchange counts: 85 % of the wires, so its share is smaller."""
    (line, _) = lines_by_quantity(wired_study(2, peers=False))[0].values()
    assert line.source == "exchange" and line.share.value == pytest.approx(0.4 * 0.85, rel=0.05)
    of_host = [
        changed(record, metrics=record.metrics | {"reference/host_link_ms": 1.0})
        if record.cell.world_size > 1
        else record
        for record in wired_study(2).records
    ]
    assert lines_by_quantity(Study.of(of_host))[0][COST].source == "exchange", (
        "an exchange through the host does not wait for peer copies"
    )
    study = wired_study(2, peers=False)
    partly = [
        changed(
            record,
            metrics=record.metrics | {"comm/ideal_ms": 0.5 * record.metrics["comm/exchange_ms"]},
        )
        if place % 3 and "comm/exchange_ms" in record.metrics
        else record
        for place, record in enumerate(study.records)
    ]
    assert lines_by_quantity(Study.of(partly))[0][COST].source == "exchange", (
        "the source that knows most cells, for all of them"
    )
