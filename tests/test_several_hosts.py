"""What is said of cells on several hosts: baselines, efficiencies, the waterfall, wires."""

import csv
import io
import json

import pytest
from build import facts_of, on_hosts, record, study

from analysis.findings.between_studies import cell_id
from analysis.findings.communication import SeveralRecords, rests_on, with_values
from analysis.findings.examine import findings_of
from analysis.findings.links import host_wires
from analysis.report.build import examine
from analysis.study.names import gpu_ids, gpu_list, named_gpus
from analysis.study.study import open_study
from analysis.study.study_inputs import StudyPath, open_inputs
from analysis.topology.readers import parse_topology
from analysis.validity.checks import judge
from analysis.validity.effective import class_between, gloo_between_hosts
from conf.cell import Cell, compress_hosts
from conf.schema import ValidityLimits

BOTH = ("a", "b")
COST, EXCHANGE, LINK = "strategy/cost_ms", "comm/exchange_ms", "reference/net_link_ms"
EACH = [((host,), [gpu]) for host in BOTH for gpu in (0, 1)]


def cells():
    """Hosts a and b with two GPUs each: the cell and every control cell of it, three times."""
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
    """A record of the cell on both hosts that exchanges."""
    both = (run for run in opened.records if run.cell.hosts == BOTH)
    return next(run for run in both if run.cell.strategy["name"] != "none")


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


def opened_of(folder, rows):
    return open_study(study(folder / "study", rows))


def parts_of(opened):
    """The parts of the waterfall on both hosts, by name."""
    (waterfall,) = [one for one in findings_of(opened).waterfalls if one.hosts]
    return {part.name: part for part in waterfall.parts}


def test_a_host_that_was_not_measured_alone_gives_no_node_efficiency(tmp_path):
    places = [(cell["cell"]["hosts"], cell["cell"]["gpus"]) for cell in cells()]
    rows = [cell for cell, on in zip(cells(), places, strict=True) if on != (["b"], [0, 1])]
    opened = opened_of(tmp_path, rows)
    values = SeveralRecords(opened).values(of_both(opened))
    assert "scaling/node_efficiency" not in values and "scaling/efficiency" in values
    assert "told apart" in parts_of(opened)["exposed communication"].why


def observed(cell):
    """The cell with moments of its steps: the last gradient at 40 ms, an exchange 3 ms later."""
    rows = []
    for rank in range(len(cell["cell"]["gpus"]) * len(cell["cell"]["hosts"])):
        for exchange in (False, True):
            moment = 40.0 + 3.0 * exchange
            row = {"rank": rank, "exchange": exchange, "steps": 5, "ready_ms": [40.0]}
            row |= {"exchange_ms": moment, "update_ms": moment + 1.0, "update_spread_ms": 0.1}
            rows.append(row | {"ready_spread_ms": [0.1], "exchange_spread_ms": 0.1})
    return cell | {"tables": {"timeline": {"rows": rows}}}


def test_what_is_exposed_between_hosts_is_no_part_of_a_step_that_was_observed(tmp_path, found):
    """Observed steps split the exchange of one host; on several the control cells tell."""
    with_moments = parts_of(opened_of(tmp_path, map(observed, cells())))
    plain = parts_of(found[0])
    assert [part.lost for part in with_moments.values()] == [part.lost for part in plain.values()]


def alone_and_both(first=1):
    """One GPU of each host, and of both."""
    places = [(("a",), 2480.0), (("b",), 2480.0), (BOTH, 4000.0)]
    return [
        on_hosts(number, hosts, [0], rate) for number, (hosts, rate) in enumerate(places, first)
    ]


def test_hosts_that_changed_are_other_machines(tmp_path):
    """Another GPU of the same name is another machine, a driver of both another provenance."""
    swapped = facts_of("a")
    swapped["gpu"]["gpus"][0]["uuid"] = "GPU-new"
    alone = on_hosts(1, ("a",), [0], 2480.0)
    alone["environment"] |= {"hosts": [swapped], "planned_uuids": ["GPU-new"]}
    alone["environment"] |= {"gpu": swapped["gpu"]}
    opened = opened_of(tmp_path / "gpu", [alone, on_hosts(2, BOTH, [0], 4000.0)])
    assert len({one.provenance["machine"] for one in opened.runs}) == 2
    older = on_hosts(1, BOTH, [0], 4000.0)
    for facts in older["environment"]["hosts"]:
        facts["gpu"] = facts["gpu"] | {"driver": "1.0"}
    rows = [older, *(one | {"sweep_id": "f" * 32} for one in alone_and_both(2))]
    opened = opened_of(tmp_path / "driver", rows)
    assert opened.varied_provenance == ("driver",)
    several = SeveralRecords(opened)
    told = [several.values(one).get("scaling/efficiency") for one in opened.records]
    assert [one is None for one in told] == [True, True, True, False]
    assert not told[-1].of, "both hosts alone count"


def test_hosts_with_different_drivers_are_named_and_keep_their_baselines(tmp_path):
    rows, drivers = alone_and_both(), {"a": "1.0", "b": "2.0"}
    for one in rows:
        for facts in one["environment"]["hosts"]:
            facts["gpu"] = facts["gpu"] | {"driver": drivers[facts["name"]]}
    opened = opened_of(tmp_path, rows)
    assert {one.provenance["driver"] for one in opened.runs} == {"1.0 (a), 2.0 (b)"}
    assert "scaling/efficiency" in SeveralRecords(opened).values(opened.records[2])


def test_the_waterfall_tells_what_is_lost_inside_hosts_from_what_is_lost_between_them(found):
    waterfall = found[1].waterfalls[0]
    assert waterfall.hosts == BOTH and waterfall.gpus == ("a:0", "a:1", "b:0", "b:1")
    parts = {one.name: one.lost for one in waterfall.parts}
    assert list(parts)[-3:-1] == ["communication inside hosts", "communication between hosts"]
    inside, between = (parts[f"communication {where} hosts"] for where in ("inside", "between"))
    # 20 ms of 22 are between hosts; each ms costs less of a longer step.
    assert 5 < between.value / inside.value < 12
    del parts["spread between GPUs"]
    lost = sum(part.value for part in parts.values() if part is not None)
    left = waterfall.ideal.value - lost - waterfall.residual
    assert left == pytest.approx(waterfall.measured.value)


def test_the_control_cells_of_strong_scaling_have_as_many_images_per_rank(tmp_path):
    rows = list(cells())
    for one in rows:
        if one["cell"]["hosts"] == [*BOTH] and one["cell"]["strategy"]["name"] != "none":
            one["cell"]["global_batch_size"] = 4 * one["cell"]["batch_size"]
    names = parts_of(opened_of(tmp_path, rows)).keys()
    assert names > {"communication inside hosts", "communication between hosts"}


def test_the_wire_between_hosts_is_named_with_what_it_carries(found):
    both = (one for one in found[0].runs if one.gpus == ("a:0", "a:1", "b:0", "b:1"))
    runs = next(one for one in both if one.strategy != "none")
    wires = host_wires(runs)
    assert wires.worded == "a's eth0 ↔ b's eth1" and wires.share == pytest.approx(0.9)
    # Of several ranks on a host the rate is not known.
    assert wires.nominal_gb_per_s == 0.125 and wires.gb_per_s is None
    (links,) = (one for one in found[1].wires if one.key == runs.key and one.gpus == runs.gpus)
    assert (links.link_class, links.transport) == ("NET", "NET/Socket")


def test_the_rate_of_a_wire_is_told_where_all_that_a_rank_sends_crosses_it(tmp_path):
    def rate(number, gpus, moved, **cell):
        metrics = {EXCHANGE: 30.0, "comm/bytes_moved": moved, "comm/busbw_gb_per_s": moved / 30e6}
        made = on_hosts(number, BOTH, gpus, 100.0, metrics=metrics, cell=cell)
        made |= {"model": {"gradient_bytes": 3e6}}
        (runs,) = opened_of(tmp_path / str(number), [made]).runs
        return host_wires(runs).gb_per_s

    assert rate(1, [0], 3e6) == pytest.approx(0.1)
    assert rate(2, [0, 1], 4.5e6) is None  # of a ring of four ranks
    assert rate(3, [0], 6e6) is None  # to the host's memory too
    of_server = {"name": "kvstore_dist_sync", "servers": 1}
    assert rate(4, [0], 3e6, strategy=of_server, server_hosts=["a"]) is None


def test_the_report_says_which_wire_limits_and_shows_the_hosts(folder):
    content, _ = examine(folder)
    assert len(content.finding) <= 5
    (said,) = (one for one in content.finding if "network" in one)
    assert said.startswith(
        "2 hosts train 1.65 times as fast as the slowest one alone. An exchange takes 30"
    )
    assert "a's eth0 ↔ b's eth1" in said and "this network, which limits the exchange" in said
    assert "GPUs 0,1 of each host, a and b" in content.finding[0]
    assert any("(a+b)" in line for line in content.finding)
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
    made = ("one", rows), ("two", others), ("three", rows)
    paths = [StudyPath.of(str(study(tmp_path / name, cells))) for name, cells in made]

    def ids(opened):
        return [cell_id(record.cell, opened.hosts) for record in opened.study.records]

    (one,), (two,) = (open_inputs([path])[0] for path in paths[:2])
    assert ids(one)[1] != ids(two)[1]
    (one,), (two,) = open_inputs(paths[:2])
    assert ids(one) == ids(two) and ids(one)[1][0] == ("host1:0", "host2:0")
    (one,), _ = open_inputs([paths[0], paths[2]])
    assert not one.hosts and ids(one)[1][0] == ("a:0", "b:0")


def test_devices_and_hosts_are_written_short_and_clearly():
    """Hosts as Slurm writes them."""
    devices = [
        ((0, 3), "0,3", "gpus 0,3"),
        (("a:0", "a:3"), "a · 0,3", "a · gpus 0,3"),
        (("a:0", "a:3", "b:0", "b:3"), "a+b · 2 × 0,3", "a+b · 2 × gpus 0,3"),
        (("a:0", "b:3"), "a:0,b:3", "gpus a:0,b:3"),
        ((), "", "gpus "),
    ]
    for members, ids, words in devices:
        assert (gpu_ids(members), gpu_list(members)) == (ids, words)
    assert named_gpus(("a:0", "b:0")) == "GPU 0 of each host, a and b"
    assert named_gpus(("a:0", "a:3", "b:0", "b:3")) == "GPUs 0,3 of each host, a and b"
    assert named_gpus(("a:0", "a:3")) == "GPUs 0,3 of host a"
    assert named_gpus(("a:0",)) == "GPU 0 of host a"
    assert named_gpus((0, 3)) == "GPUs 0,3"
    assert named_gpus((3,)) == "GPU 3"
    assert named_gpus(("a:0", "b:3")) == "GPUs a:0,b:3"
    hosts = ["a b", "n1 n2", "n1 n2 n3 x", "n08 n09 n10", "n9 n10 n11 n12", "n3 n2 n1", ""]
    short = ["a+b", "n1+n2", "n[1-3]+x", "n[08-10]", "n9+n[10-12]", "n3+n2+n1", ""]
    assert [compress_hosts(names.split()) for names in hosts] == short


def test_a_legend_names_the_nics_of_a_table():
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
    topology = parse_topology(text)
    assert [topology.link_between(0, "mlx5_0"), topology.link_between(1, "mlx5_1")] == [
        "PIX",
        "PXB",
    ]


def test_cpu_workers_on_several_hosts_name_the_wire_too(tmp_path):
    on_cpu = {"device": "cpu"}
    rows = [on_hosts(1, BOTH, [0, 1], 100.0, cell=on_cpu)]
    rows += [on_hosts(2, ("a",), [0], 1.0, cell=on_cpu)]
    both, alone = opened_of(tmp_path, rows).records
    assert gloo_between_hosts(both) == {"link_class": "NV18+NET", "transport": "TCP/eth0↔eth1"}
    assert class_between(both) == "NV18+NET" and gloo_between_hosts(alone) == {}


def test_ranks_of_several_hosts_that_did_not_tell_whom_they_met_are_unchecked(tmp_path):
    rows = [on_hosts(1, BOTH, [0], 100.0), on_hosts(2, ("a",), [0, 1], 100.0)]
    both, alone = (judge(one, ValidityLimits()) for one in opened_of(tmp_path, rows).records)
    assert "wrong_peers" in both.unchecked and "wrong_peers" in alone.not_applicable


def test_a_cell_of_one_host_is_named_without_a_number():
    cell = Cell.from_dict(on_hosts(1, ("a",), [0], 1.0)["cell"])
    assert cell.where == "a · gpus 0"
