"""What exchanges explain of lost time: the planted line is found; without one the report says what to plan."""

import json
from dataclasses import asdict
from itertools import combinations

import numpy as np
import pytest
from build import DATA
from scipy.stats import linregress
from simulate import DGX1, SUBSETS, WiredTruth, lines_by_quantity, wired_study

from analysis.findings.examine import findings_of
from analysis.findings.wire_lines import fit
from analysis.report.figure import style
from analysis.report.sections.machine_section import wire_lines
from analysis.study.study import open_study
from analysis.topology.subset_classes import subset_classes

COST = "strategy/cost_ms"
PAIRS = tuple(combinations(range(8), 2))


def test_a_line_is_that_of_scipy_and_expects_further_points_as_often_as_it_says():
    points = [(1.0, 0.9), (2.0, 1.6), (4.0, 2.1), (8.0, 4.4), (9.0, 4.2)]
    line, expected = fit(points), linregress(*zip(*points, strict=True))
    assert (line.fixed, line.slope) == pytest.approx((expected.intercept, expected.slope))
    assert line.r_squared == pytest.approx(expected.rvalue**2)
    t = 3.182446  # Student's, 3 degrees of freedom
    low, high = line.slope_estimate().low, line.expected(0, further=0).high
    assert low == pytest.approx(expected.slope - t * expected.stderr, rel=1e-5)
    assert high == pytest.approx(expected.intercept + t * expected.intercept_stderr, rel=1e-5)
    chance, inside = np.random.default_rng(0), 0
    for _ in range(400):
        xs = chance.uniform(1, 10, 6)
        ys = 1 + 0.3 * xs + 0.1 * chance.standard_normal(6)
        further = fit(list(zip(xs[:5], ys[:5], strict=True))).expected(xs[5])
        inside += further.low <= ys[5] <= further.high
    assert 0.92 <= inside / 400 <= 0.98


def test_the_planted_line_is_found():
    lines, _ = lines_by_quantity(wired_study(3, WiredTruth(fixed_ms=0.8, share=0.25)))
    line = lines[COST]
    assert line.fixed_ms.low <= 0.8 <= line.fixed_ms.high
    assert line.fixed_ms.high - line.fixed_ms.low < 0.2
    assert line.share.low <= 0.25 <= line.share.high and line.share.high - line.share.low < 0.03
    assert line.r_squared > 0.98 and len(line.points) == len(SUBSETS)
    assert max(abs(point.residual_ms) for point in line.points) < 4 * 54 * 0.002
    fastest = line.points[0]
    assert fastest.gpus == tuple(range(8))
    assert fastest.gb_per_s == pytest.approx(0.85 * 150, rel=0.03)


def test_where_the_cost_on_one_gpu_is_known_the_line_is_one_of_exposed_communication():
    lines, _ = lines_by_quantity(wired_study(4, WiredTruth(alone_ms=0.3)))
    assert set(lines) == {"comm/exposed_ms"}
    line = lines["comm/exposed_ms"]
    assert line.share.low <= 0.4 <= line.share.high
    assert line.fixed_ms.value == pytest.approx(0.2, abs=0.1)
    assert line.fixed_ms.low is None, "all cells share the error of the cells on one GPU"


def test_settings_of_nccl_are_cells_of_one_line():
    """The H200s: the strategy costs 0.42 ms and 0.40 of the exchange, over eight settings of NCCL."""
    study = open_study(DATA / "h200_x4" / "settings")
    findings = findings_of(study)
    (line,) = findings.wire_lines
    assert (line.quantity, len(line.points), line.speeds) == (COST, 8, 2)
    assert line.fixed_ms.value == pytest.approx(0.416, abs=0.002)
    assert line.share.value == pytest.approx(0.395, abs=0.002) and line.r_squared > 0.999
    content = json.loads(json.dumps(asdict(findings)))["wire_lines"][0]  # as `report --json`
    assert content["share"]["low"] < content["share"]["value"] < content["share"]["high"]
    with style():
        section = wire_lines(study, findings)
    assert any("Only two link speeds" in text for text in section.lines)
    (figure,) = section.figures
    assert figure.name == "wire-line-1"
    assert ">0,3 · P2P_LEVEL=LOC<" in figure.svg


@pytest.mark.parametrize(
    ("study", "why"),
    [
        ("bootcamp_resnet50", "Needs 4 configurations with different GB/s; nccl_allreduce has 3"),
        ("strategies", "kvstore_device has 1"),  # across strategies there is no line
    ],
)  # fmt: skip
def test_without_enough_cells_the_report_says_what_to_plan(study, why):
    findings = findings_of(open_study(DATA / "h200_x2" / study))
    (missing,) = [line for line in findings.unsaid if line.startswith("Does link speed")]
    assert findings.wire_lines == () and why in missing
    assert findings.unsaid[missing] == "nccl.max_nchannels=1,2,4,8", "all its links are alike"


def test_four_cells_of_different_speed_are_enough():
    chosen = [one.representative for one in subset_classes(DGX1, 2)] + [(0, 2)]
    assert lines_by_quantity(wired_study(1, subsets=chosen))[0][COST].speeds == 3
    lines, ((missing, option),) = lines_by_quantity(wired_study(1, subsets=chosen[:3]))
    assert not lines and "has 3" in missing and option == "gpus=classes"
    alike = [pair for pair in PAIRS if DGX1.link_between(*pair) == "NV2"]
    lines, ((missing, _),) = lines_by_quantity(wired_study(1, subsets=alike))
    assert not lines and "are equally fast" in missing
