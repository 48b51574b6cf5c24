"""What is said of cells on several hosts: baselines, efficiencies, the waterfall, wires."""

import csv
import io
import json

import pytest
from build import facts_of, on_hosts, record, study

from analysis.findings.between_studies import cell_id
from analysis.findings.examine import findings_of
from analysis.findings.host_wires import host_wires
from analysis.findings.record_values import SeveralRecords, rests_on, with_values
from analysis.findings.study_inputs import StudyPath, open_inputs
from analysis.report.build import examine
from analysis.study.names import gpu_ids, gpu_list
from analysis.study.study import open_study
from analysis.topology.readers import parse_topology
from analysis.validity.checks import judge
from analysis.validity.effective import class_between, gloo_between_hosts
from benchmarks.record import Record, read
from conf.cell import Cell, compress_hosts
from conf.schema import ValidityLimits

BOTH = ("a", "b")
COST, EXCHANGE, LINK = "strategy/cost_ms", "comm/exchange_ms", "reference/net_link_ms"
EACH = [((host,), [gpu]) for host in BOTH for gpu in (0, 1)]


def cells():
    """Hosts a and b with two GPUs each: every control cell of waterfall=true, three times, and the cell itself."""
    rows = [(hosts, gpus, "none", 2500 - 10 * (hosts == ("b",)), {}) for hosts, gpus in EACH]
    rows += [(hosts, gpus, "nccl_allreduce", 2480, {COST: 2.0}) for hosts, gpus in EACH]
    inside = {COST: 4.0, EXCHANGE: 5.0}
    rows += [(("a",), [0, 1], "nccl_allreduce", 4900, inside)]
    rows += [(("b",), [0, 1], "nccl_allreduce", 4850, inside)]
    rows += [(BOTH, [0, 1], "none", 9900, {})]
    between = {COST: 24.0, EXCHANGE: 30.0, LINK: 27.0, "comm/ideal_ratio": 0.9}
    rows += [(BOTH, [0, 1], "nccl_allreduce", 8000, between)]
    nics = {"nics": {"a": ["eth0"], "b": ["eth1"]}}
    used = {"transport": "NET/Socket", "link_class": "NV18+NET", "nccl": nics}
    for repeat in range(3):
        for number, (hosts, gpus, strategy, rate, metrics) in enumerate(rows):
            noise = 1 + 0.0005 * repeat
            effective = {"effective": used} if len(hosts) > 1 else {}
            noisy = {name: value * noise for name, value in metrics.items()}
            yield on_hosts(
                100 * repeat + number, hosts, gpus, rate * noise, strategy=strategy,
                cell={"repeat": repeat}, metrics=noisy, **effective,
            )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return study(tmp_path_factory.mktemp("hosts") / "study", cells())


@pytest.fixture(scope="module")
def found(folder):
    opened = open_study(folder)
    return opened, findings_of(opened)


def of_both(opened):
    """The record of the cell on both hosts that exchanges."""
    for run in opened.records:
        if run.cell.hosts == BOTH and run.cell.strategy["name"] != "none":
            return run
    raise AssertionError("no such record")


def test_a_host_alone_is_the_baseline_of_several(found):
    opened, _ = found
    whole, several = of_both(opened), SeveralRecords(opened)
    assert {runs.provenance["machine"] for runs in opened.runs} == {"a+b"}
    assert opened.varied_provenance == ()
    values = several.values(whole)
    assert values["scaling/efficiency"] == pytest.approx(8000 / (4 * 2480), rel=1e-3)
    assert values["scaling/node_efficiency"] == pytest.approx(8000 / (2 * 4850), rel=1e-3)
    facts = several.facts(whole)
    assert list(facts["baselines"]) == ["a:0", "a:1", "b:0", "b:1"]
    assert list(facts["host_baselines"]) == ["a", "b"]
    # What a record states can be computed again from the records that it names.
    stated = with_values(whole, [run for run in opened.records if run is not whole])
    assert stated.metrics["scaling/node_efficiency"] == values["scaling/node_efficiency"]
    named = {record_id for ids in facts["host_baselines"].values() for record_id in ids}
    assert named <= rests_on(stated)
    alone = [run for run in opened.records if run.cell.hosts == ("a",)]
    values = several.values(next(run for run in alone if len(run.cell.gpus) == 2))
    assert "scaling/node_efficiency" not in values and "scaling/efficiency" in values


def test_a_host_that_was_not_measured_alone_gives_no_node_efficiency(tmp_path):
    rows = []
    for cell in cells():
        if cell["cell"]["hosts"] != ["b"] or len(cell["cell"]["gpus"]) != 2:
            rows.append(cell)
    opened = open_study(study(tmp_path / "study", rows))
    values = SeveralRecords(opened).values(of_both(opened))
    assert "scaling/node_efficiency" not in values and "scaling/efficiency" in values
    waterfall = next(fall for fall in findings_of(opened).waterfalls if fall.hosts)
    part = next(part for part in waterfall.parts if part.name == "exposed communication")
    assert "told apart" in part.why


def observed(cell):
    """The cell with the moments of its steps: the last gradient comes at 40 ms, an exchange ends 3 ms later."""
    ranks = len(cell["cell"]["gpus"]) * len(cell["cell"]["hosts"])
    spread = {"ready_spread_ms": [0.1], "exchange_spread_ms": 0.1, "update_spread_ms": 0.1}
    rows = [
        {"rank": rank, "exchange": exchange, "steps": 5, "ready_ms": [40.0], "exchange_ms": 40.0 + 3.0 * exchange,
         "update_ms": 41.0 + 3.0 * exchange, **spread}
        for rank in range(ranks) for exchange in (False, True)
    ]  # fmt: skip
    return cell | {"tables": {"timeline": {"rows": rows}}}


def test_what_is_exposed_between_hosts_is_no_part_of_a_step_that_was_observed(tmp_path, found):
    """What observed steps split is the exchange of one host; on several the control cells tell inside and between."""
    (waterfall,) = [one for one in found[1].waterfalls if one.hosts]
    opened = open_study(study(tmp_path / "study", map(observed, cells())))
    (with_moments,) = [one for one in findings_of(opened).waterfalls if one.hosts]
    assert {part.name: part.lost for part in with_moments.parts} == {
        part.name: part.lost for part in waterfall.parts
    }


def test_hosts_that_changed_are_other_machines(tmp_path):
    """Another GPU under the same name is another machine; a driver that changed on both hosts is another provenance."""
    swapped = facts_of("a")
    swapped["gpu"]["gpus"][0]["uuid"] = "GPU-new"
    alone = on_hosts(1, ("a",), [0], 2480.0)
    alone["environment"] |= {
        "hosts": [swapped],
        "planned_uuids": ["GPU-new"],
        "gpu": swapped["gpu"],
    }
    opened = open_study(study(tmp_path / "gpu", [alone, on_hosts(2, BOTH, [0], 4000.0)]))
    assert len({one.provenance["machine"] for one in opened.runs}) == 2
    older = on_hosts(1, BOTH, [0], 4000.0)
    for facts in older["environment"]["hosts"]:
        facts["gpu"] = facts["gpu"] | {"driver": "1.0"}
    newer = [
        on_hosts(2, ("a",), [0], 2480.0),
        on_hosts(3, ("b",), [0], 2480.0),
        on_hosts(4, BOTH, [0], 4000.0),
    ]
    rows = [older, *(one | {"sweep_id": "f" * 32} for one in newer)]
    opened = open_study(study(tmp_path / "driver", rows))
    assert opened.varied_provenance == ("driver",)
    several = SeveralRecords(opened)
    told = [several.values(one).get("scaling/efficiency") for one in opened.records]
    assert [one is None for one in told] == [True, True, True, False]
    assert not told[-1].of, "both hosts alone count"


def test_hosts_with_different_drivers_are_named_and_keep_their_baselines(tmp_path):
    rows = [
        on_hosts(1, ("a",), [0], 2480.0),
        on_hosts(2, ("b",), [0], 2480.0),
        on_hosts(3, BOTH, [0], 4000.0),
    ]
    for one in rows:
        for facts in one["environment"]["hosts"]:
            facts["gpu"] = facts["gpu"] | {"driver": "1.0" if facts["name"] == "a" else "2.0"}
    opened = open_study(study(tmp_path / "study", rows))
    assert {one.provenance["driver"] for one in opened.runs} == {"1.0 (a), 2.0 (b)"}
    assert "scaling/efficiency" in SeveralRecords(opened).values(opened.records[2])


def test_the_waterfall_tells_what_is_lost_inside_hosts_from_what_is_lost_between_them(found):
    waterfall = found[1].waterfalls[0]
    assert waterfall.hosts == BOTH and waterfall.gpus == ("a:0", "a:1", "b:0", "b:1")
    parts = {one.name: one.lost for one in waterfall.parts}
    assert list(parts)[-3:-1] == ["communication inside hosts", "communication between hosts"]
    inside, between = (
        parts[f"communication {where} hosts"].value for where in ("inside", "between")
    )
    assert (
        5 < between / inside < 12
    )  # 20 ms of 22 are between hosts; each ms costs less of a longer step
    known = sum(
        lost.value
        for name, lost in parts.items()
        if lost is not None and name != "spread between GPUs"
    )
    assert waterfall.ideal.value - known - waterfall.residual == pytest.approx(
        waterfall.measured.value
    )


def test_the_control_cells_of_strong_scaling_have_as_many_images_per_rank(tmp_path):
    rows = list(cells())
    for one in rows:
        if one["cell"]["hosts"] == [*BOTH] and one["cell"]["strategy"]["name"] != "none":
            one["cell"]["global_batch_size"] = 4 * one["cell"]["batch_size"]
    waterfall = findings_of(open_study(study(tmp_path / "study", rows))).waterfalls[0]
    assert {"communication inside hosts", "communication between hosts"} < {
        one.name for one in waterfall.parts
    }


def test_the_wire_between_hosts_is_named_with_what_it_carries(found):
    runs = next(
        one
        for one in found[0].runs
        if one.gpus == ("a:0", "a:1", "b:0", "b:1") and one.strategy != "none"
    )
    wires = host_wires(runs)
    assert wires.worded == "a's eth0 ↔ b's eth1" and wires.share == pytest.approx(0.9)
    assert (
        wires.nominal_gb_per_s == 0.125 and wires.gb_per_s is None
    )  # of several ranks on a host not known
    (links,) = (one for one in found[1].wires if one.key == runs.key and one.gpus == runs.gpus)
    assert (links.link_class, links.transport) == ("NET", "NET/Socket")


def test_the_rate_of_a_wire_is_told_where_all_that_a_rank_sends_crosses_it(tmp_path):
    def rate(number, gpus, moved, **cell):
        metrics = {EXCHANGE: 30.0, "comm/bytes_moved": moved, "comm/busbw_gb_per_s": moved / 30e6}
        made = on_hosts(number, BOTH, gpus, 100.0, metrics=metrics, cell=cell) | {
            "model": {"gradient_bytes": 3e6}
        }
        (runs,) = open_study(study(tmp_path / str(number), [made])).runs
        return host_wires(runs).gb_per_s

    assert rate(1, [0], 3e6) == pytest.approx(0.1)
    assert rate(2, [0, 1], 4.5e6) is None  # of a ring of four ranks
    assert rate(3, [0], 6e6) is None  # to the host's memory too
    assert (
        rate(4, [0], 3e6, strategy={"name": "kvstore_dist_sync", "servers": 1}, server_hosts=["a"])
        is None
    )


def test_the_report_says_which_wire_limits_and_shows_the_hosts(folder):
    content, _ = examine(folder)
    assert len(content.finding) <= 5
    (said,) = (one for one in content.finding if "network" in one)
    assert said.startswith("2 hosts train 1.65 × the slowest of them alone: an exchange takes 30")
    assert "a's eth0 ↔ b's eth1" in said and "this network limits it" in said
    assert "(a+b)" in content.finding[0] and "a+b · 2 × 0,1" in content.finding[1]
    tables = {one.name: list(csv.DictReader(io.StringIO(one.to_csv()))) for one in content.tables}
    interfaces = [(one["host"], one["interface"], one["gbit_per_s"]) for one in tables["hosts"]]
    assert interfaces == [("a", "eth0", "1.0"), ("b", "eth1", "1.0")]
    points = [one for one in tables["points"] if one["gpus"] == "a+b · 2 × 0,1"]
    assert [bool(one["node_efficiency"]) for one in points] == [False, True]


def test_a_study_without_hosts_has_nothing_of_them(tmp_path):
    rows = [record(1, [0], 2480.0), record(2, [1], 2480.0), record(3, [0, 1], 4900.0)]
    content, _ = examine(study(tmp_path / "study", rows))
    tables = {one.name: one.to_csv() for one in content.tables}
    assert "hosts" not in tables and "hosts" not in tables["environment"]


def test_studies_on_other_hosts_are_compared_by_the_places_of_their_hosts(tmp_path):
    rows = [on_hosts(1, ("a",), [0], 2480.0), on_hosts(2, ("a", "b"), [0], 4000.0)]
    others = json.loads(json.dumps(rows).replace('"a"', '"n1"').replace('"b"', '"n2"'))
    folders = [
        study(tmp_path / name, made)
        for name, made in (("one", rows), ("two", others), ("three", rows))
    ]
    (one,), (two,) = (open_inputs([StudyPath.of(str(folder))])[0] for folder in folders[:2])
    assert cell_id(one.study.records[1].cell, one.hosts) != cell_id(
        two.study.records[1].cell, two.hosts
    )
    (one,), (two,) = open_inputs([StudyPath.of(str(folder)) for folder in folders[:2]])
    assert [cell_id(left.cell, one.hosts) for left in one.study.records] == [
        cell_id(right.cell, two.hosts) for right in two.study.records
    ]
    assert cell_id(one.study.records[1].cell, one.hosts)[0] == ("host1:0", "host2:0")
    (one,), _ = open_inputs([StudyPath.of(str(folders[0])), StudyPath.of(str(folders[2]))])
    assert not one.hosts and cell_id(one.study.records[1].cell, {})[0] == ("a:0", "b:0")


@pytest.mark.parametrize(
    ("members", "ids", "words"),
    [
        ((0, 3), "0,3", "gpus 0,3"),
        (("a:0", "a:3"), "a · 0,3", "a · gpus 0,3"),
        (("a:0", "a:3", "b:0", "b:3"), "a+b · 2 × 0,3", "a+b · 2 × gpus 0,3"),
        (("a:0", "b:3"), "a:0,b:3", "gpus a:0,b:3"),
        ((), "", "gpus "),
    ],
)
def test_devices_are_written_short_and_clearly(members, ids, words):
    assert (gpu_ids(members), gpu_list(members)) == (ids, words)


@pytest.mark.parametrize(
    ("hosts", "short"),
    [
        (["a", "b"], "a+b"),
        (["n1", "n2"], "n1+n2"),
        (["n1", "n2", "n3", "x"], "n[1-3]+x"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n9", "n10", "n11", "n12"], "n9+n[10-12]"),
        (["n3", "n2", "n1"], "n3+n2+n1"),
        ([], ""),
    ],
)
def test_many_hosts_are_written_as_slurm_writes_them(hosts, short):
    assert compress_hosts(hosts) == short


def test_a_rail_is_the_nearest_nic_of_a_gpu():
    text = """\
\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tPIX\tNODE\t0-31\t0
GPU1\tNV18\t X \tNODE\tPXB\t0-31\t0
NIC0\tPIX\tNODE\t X \tNODE
NIC1\tNODE\tPXB\tNODE\t X 

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
    assert parse_topology(text).rails() == {0: ("mlx5_0",), 1: ("mlx5_1",)}


def test_cpu_workers_on_several_hosts_name_the_wire_too(tmp_path):
    made = on_hosts(1, BOTH, [0, 1], 100.0, cell={"device": "cpu"})
    folder = study(tmp_path / "study", [made])
    one = read(folder / made["record_id"] / "record.json")
    assert gloo_between_hosts(one) == {"link_class": "NV18+NET", "transport": "TCP/eth0↔eth1"}
    assert class_between(read_again(tmp_path, made)) == "NV18+NET"
    assert (
        gloo_between_hosts(
            read_again(tmp_path, on_hosts(2, ("a",), [0], 1.0, cell={"device": "cpu"}))
        )
        == {}
    )


def read_again(tmp_path, made) -> Record:
    folder = study(tmp_path / made["record_id"], [made])
    return read(folder / made["record_id"] / "record.json")


def test_ranks_of_several_hosts_that_did_not_tell_whom_they_met_are_unchecked(tmp_path):
    judged = judge(read_again(tmp_path, on_hosts(1, BOTH, [0], 100.0)), ValidityLimits())
    assert "wrong_peers" in judged.unchecked
    judged = judge(read_again(tmp_path, on_hosts(2, ("a",), [0, 1], 100.0)), ValidityLimits())
    assert "wrong_peers" in judged.not_applicable


def test_a_cell_of_one_host_is_named_without_a_number():
    cell = Cell.from_dict(on_hosts(1, ("a",), [0], 1.0)["cell"])
    assert cell.where == "a · gpus 0"
