"""Two H200s of one machine that NCCL took for two hosts (tests/data/h200_net): what benchmarks/RESULTS.md says of NET."""

from pathlib import Path

import pytest

from analysis.findings.examine import findings_of
from analysis.study.study import Study
from analysis.validity.checks import judge
from benchmarks.record import read_study
from conf.schema import ValidityLimits

DATA = Path(__file__).parent / "data" / "h200_net"


def records(study):
    found, unreadable = read_study(DATA / study)
    assert found and not unreadable
    return found


@pytest.mark.parametrize(
    ("study", "transport", "rate", "ratio"),
    [
        ("allreduce", "NET/Socket + NET/Socket/Shared", 7875, 0.94),
        ("servers", "NET/Socket/Shared", 4206, 0.807),
    ],
)
def test_a_cell_of_two_hosts_names_the_wire_and_its_share(study, transport, rate, ratio):
    (two,) = (one for one in records(study) if len(one.cell.hosts) == 2)
    assert (two.state, two.validity.verdict) == ("finished", "valid")
    assert (two.effective["transport"], two.effective["link_class"]) == (transport, "NET")
    assert round(two.metrics["throughput/images_per_second"]) == rate
    assert two.metrics["comm/ideal_ratio"] == pytest.approx(ratio, abs=0.001)
    assert two.checks["reference"] == "net_link"
    assert [one["node"] for one in two.ranks][:2] == ["a", "b"] and two.cell.members == (
        "a:0",
        "b:0",
    )


def test_what_made_the_hosts_is_told_and_nothing_else():
    """NCCL_HOSTID was in the environment, which made two hosts of one.

    The waterfall was measured with a net_link that was too low for an all-reduce, so its exchange looks too fast.
    """
    told = [
        (study, record.cell.where, list(validity.codes))
        for study in ("allreduce", "servers", "waterfall")
        for record in records(study)
        if (validity := judge(record, ValidityLimits())).codes
    ]
    assert sorted(told) == [
        ("allreduce", "a · gpus 0", ["setting_not_asked"]),
        ("waterfall", "a · gpus 0", ["setting_not_asked"]),
        ("waterfall", "a+b · 2 × gpus 0", ["faster_than_reference"]),
        ("waterfall", "b · gpus 0", ["setting_not_asked"]),
    ]


def test_the_efficiency_is_against_the_slowest_member_on_its_own_host():
    (curve,) = findings_of(Study.of(records("allreduce"))).scaling.curves
    (two,) = (point for point in curve.points if point.world_size == 2)
    assert two.efficiency.value == pytest.approx(0.839, abs=0.001) and two.without_baseline == (
        "b:0",
    )


def test_what_hosts_call_themselves_parts_no_cells():
    """Each host has an NCCL_HOSTID of its own: both members alone are baselines of the two together."""
    curves = findings_of(Study.of(records("waterfall"))).scaling.curves
    of_two = [point for curve in curves for point in curve.points if point.world_size == 2]
    assert len(curves) == len(of_two) == 3 and all(point.without_baseline == () for point in of_two)
