"""The file of hosts=, the cells planned on hosts, and what is refused."""

import dataclasses
import json
import os

import pytest
from build import DATA, configuration, make_cell, tracked_record

from analysis.findings.baselines import control_cells
from benchmarks.record import RecordError, read
from conf import subsets
from conf.cell import Cell
from conf.options import Refused
from conf.resolve import server_gpus
from conf.subsets import host_sets, listed_hosts
from launch.display.columns import request_columns
from launch.machine.devices import Device, Machine
from launch.machine.fleet import Fleet, Host
from launch.plan.expand import wanted_hosts
from launch.plan.order import PlannedCell
from launch.plan.plan import Request, plan
from launch.tracking import mlflow_run
from launch.tracking.mlflow_run import project


def refuses(says, call, *arguments, **named):
    with pytest.raises(Refused, match=says):
        call(*arguments, **named)


def test_numbers_and_words_count_the_hosts_that_are_known():
    known = ("c", "a", "b")
    assert host_sets(["2"], known) == [("c", "a")]
    assert host_sets(["scale"], known) == [("c",), ("c", "a"), known]
    assert host_sets(["pairs"], known) == [("c", "a"), ("c", "b"), ("a", "b")]
    assert host_sets(["b", "c"], known) == [("b", "c")]
    refuses("nodes=4: wants 4 hosts, and 3 are known: c, a, b", host_sets, ["4"], known)
    refuses("host x is not known", host_sets, ["a", "x"], known)


def test_a_file_of_hosts_is_read_as_mxnet_and_open_mpi_have_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\n a slots=2 # the first\r\n10.0.0.7\r\nb")
    assert [(one.name, one.slots, one.line) for one in listed_hosts(str(file))] == [
        ("a", 2, 3), ("10.0.0.7", None, 4), ("b", None, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "names no host"),
        (b"# a\n \n", "names no host"),
        (b"a\nb\na\n", "line 3: host a is already in line 1"),
        (b"a\n-oProxyCommand=x\n", "line 2: '-oProxyCommand=x' is not a name of a host"),
        (b"a:2222\n", "line 1: 'a:2222' is not a name of a host"),
        (b"user@a\n", "belong in the configuration of ssh"),
        (b"17\n", "line 1: '17' is not a name of a host"),
        (b"all\n", "line 1: 'all' is not a name of a host"),
        (b"a slots=0\n", "line 1: 'slots=0' behind host a"),
        (b"a slots=2 max_slots=4\n", "line 1: 'slots=2 max_slots=4' behind host a"),
        (b"a\n\xff\n", "line 2: is not text in UTF-8"),
        (b"a\nb\0\n", "line 2: 'b\\\\x00' is not a name of a host"),
        (b"a" * 300, "line 1: 'a"),
        (b"\n" * (subsets.LARGEST_BYTES + 1), "larger than 1 MiB"),
        (b"".join(b"n%d\n" % n for n in range(4097)), "line 4097: more than 4,096 hosts"),
    ],
)
def test_a_wrong_file_of_hosts_is_refused_by_its_line(tmp_path, text, says):
    file = tmp_path / "hosts"
    file.write_bytes(text)
    with pytest.raises(Refused, match=says) as refused:
        listed_hosts(str(file))
    assert str(refused.value).startswith(f"hosts={file}: ") and len(str(refused.value)) < 700


def test_what_is_no_file_of_hosts_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    says = "there is no such file; expected a file with one host per line"
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "absent", "/dev/zero", "a\0b"):
        refuses(says, listed_hosts, str(path))


@pytest.fixture
def planned(hydra):
    """Plan a sweep of command lines, on a fleet or on hosts like this machine."""

    def run(*lines, fleet=None, engine="ssh"):
        requests = []
        for line in lines:
            typed = ["device=cpu", "model=fmnist_cnn", f"engine={engine}", *line.split()]
            requests.append(Request(configuration(*typed), typed))
        return plan(requests, {}, fleet)

    return run


def machine(gpus, kind="cuda"):
    devices = tuple(Device(one, f"GPU-{one}", memory_bytes=1 << 36) for one in gpus)
    return Machine(kind, devices, tuple(gpus), 8)


def fleet_of(**machines):
    """Hosts with these machines, of which nothing else is known."""
    nothing = {
        "facts": {}, "variables": {}, "left_out": [], "versions": {}, "kernel": "", "boot_id": "",
        "interfaces": (), "infiniband": [], "free_memory_bytes": None,
        "shared_memory_bytes": 1 << 40, "too_small": [],
    }  # fmt: skip
    return Fleet(tuple(Host(name, one, **nothing) for name, one in machines.items()))


def test_sets_of_hosts_times_subsets_are_cells(planned, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("b slots=2\na\nc\n")
    sizes = ("1 gpus=0", "1 gpus=0,1", "2 gpus=0", "2 gpus=0,1")
    sweep = planned(*(f"hosts={hosts} nodes={size}" for size in sizes))
    places = [(one.cell.hosts, one.cell.gpus) for one in sweep.cells]
    assert places == [(on, gpus) for on in (("b",), ("b", "a")) for gpus in ((0,), (0, 1))]
    last = sweep.cells[-1].cell
    assert last.world_size == 4 and last.members == ("b:0", "b:1", "a:0", "a:1")
    assert any(
        "b, a are assumed to have the GPUs and links of this machine" in notice
        for notice in sweep.notices
    )
    says = "gpus=0,1,2: is 3 ranks on each host, and b has slots=2 in line 1 of hosts="
    refuses(says, planned, f"nodes=2 hosts={hosts} gpus=0,1,2")


def test_every_host_of_a_cell_has_its_subset(planned):
    fleet = fleet_of(a=machine((0, 1, 2, 3)), b=machine((0, 1)))
    (cell,) = planned("device=auto nodes=a,b gpus=1,0", fleet=fleet).cells
    assert (cell.cell.hosts, cell.cell.gpus) == (("a", "b"), (1, 0))
    for typed, says in (
        ("nodes=a,b gpus=all", "gpus=all: means 0,1,2,3 on host a and 0,1 on host b; expected"),
        ("nodes=a,b gpus=3", "host b: gpus=3: this machine has no GPU 3"),
        ("nodes=a gpus=best:2", "host a: gpus=best:2: needs the machine's topology"),
    ):
        refuses(says, planned, f"device=auto {typed}", fleet=fleet)


def test_the_memory_of_the_hosts_counts_and_not_that_of_the_launcher(planned, monkeypatch):
    monkeypatch.setattr("launch.plan.refusals.free_memory", lambda: 1 << 20)
    here = machine((0, 1), "cpu")
    free = {"a": 64 << 30, "b": 5 << 30, "c": None}
    hosts = fleet_of(a=here, b=here, c=here)
    fleet = Fleet(tuple(dataclasses.replace(h, free_memory_bytes=free[h.name]) for h in hosts))
    asked = "gpus=0,1 benchmark=collectives benchmark.max_bytes=3G"
    planned(f"{asked} nodes=a+c", fleet=fleet)
    planned(f"{asked} nodes=a+b")  # nobody was asked how much there is
    says = "each rank needs .* a share of the host's free memory among 2 is 2.5 GiB"
    refuses(says, planned, f"{asked} nodes=a+b", fleet=fleet)


def test_servers_are_on_the_hosts_of_the_ranks_in_turn_or_where_they_are_asked_to_be(planned):
    dist = "nodes=a,b gpus=0 strategy=kvstore_dist_sync strategy.servers=3"
    auto, named = (one.cell for one in planned(dist, f"{dist} strategy.server_nodes=c+b").cells)
    assert auto.server_hosts == ("a", "b", "a") and named.server_hosts == ("c", "b", "c")
    assert [place.host for place in named.places] == ["a", "b", "c", "b", "c"]
    assert named.every_host == ("a", "b", "c")
    assert "server_nodes" not in auto.strategy and auto.key != named.key and auto.name != named.name
    for asked, says in (
        ("a+b+c+d", r"=a\+b\+c\+d: names 4 hosts; strategy.servers=3 uses at most 3"),
        ("'-x'", "=-x: expected auto, or names of hosts"),
    ):
        refuses(f"strategy.server_nodes{says}", planned, f"{dist} strategy.server_nodes={asked}")


ALL_GPUS = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "c": (0, 1)}


@pytest.mark.parametrize(
    ("on", "asked_gpus", "expected"),
    [
        (("a", "b"), "free", (2, 2)),
        (("a", "a"), "free", (2, 3)),
        (("a", "a", "a"), "free", (0, 1, 0)),  # too few are free there
        (("c", "c"), "free", (0, 1)),  # a host without ranks
        (("a", "c"), "3+1", (3, 1)),
        (("c", "c", "c"), "free", "servers=3: expected at most 2, the GPUs of host c"),
        (
            ("c",),
            "2",
            "server_gpus=2: expected auto, or one GPU per server .strategy.servers=1. out of 0, 1, such as 0",
        ),
    ],
)
def test_servers_take_gpus_of_their_own_host(on, asked_gpus, expected):
    options = {"servers": len(on), "server_gpus": asked_gpus}
    arguments = (options, (0, 1), "cuda", ALL_GPUS, ("a", "b"), on)
    if isinstance(expected, str):
        refuses(f"strategy.{expected}", server_gpus, *arguments)
    else:
        assert server_gpus(*arguments) == expected


def test_the_images_per_step_are_shared_by_the_ranks_of_all_hosts(planned):
    four = fleet_of(a=machine(range(4)), b=machine(range(4)))
    strong = "device=auto model=resnet50 global_batch_size=auto gpus=all"
    cells = planned(f"{strong} nodes=a", f"{strong} nodes=a,b", fleet=four).cells
    sizes = [(c.cell.world_size, c.cell.batch_size, c.cell.global_batch_size) for c in cells]
    assert sizes == [(4, 64, 256), (8, 32, 256)]
    says = r"global_batch_size=6: expected a multiple of 4 \(4 ranks\)"
    refuses(says, planned, "global_batch_size=6 nodes=a,b gpus=0,1")


def test_control_cells_are_each_member_each_host_and_all_without_exchange():
    cell = dataclasses.replace(
        make_cell((0, 1)), hosts=("a", "b"), nccl={"NCCL_ALGO": "Ring"},
        server_hosts=("a", "b", "c"), strategy={"name": "kvstore_dist_sync", "servers": 3},
    )  # fmt: skip
    cells = control_cells(cell)
    alone = [((host,), (gpu,)) for host in "ab" for gpu in (0, 1)]
    # What is on a host without ranks stays there.
    own = {"a": ("a", "a", "c"), "b": ("b", "b", "c")}
    assert [(c.strategy["name"], c.hosts, c.gpus, c.server_hosts, bool(c.nccl)) for c in cells] == [
        *(("none", hosts, gpus, (), False) for hosts, gpus in alone),
        *(("kvstore_dist_sync", hosts, gpus, own[hosts[0]], False) for hosts, gpus in alone),
        *(("kvstore_dist_sync", (host,), (0, 1), own[host], True) for host in "ab"),
        ("none", ("a", "b"), (0, 1), (), False),
    ]
    assert all(Cell.from_dict(json.loads(json.dumps(one.to_dict()))) == one for one in cells)
    one_host = control_cells(make_cell((0, 1), hosts=("a",)))
    assert {one.hosts for one in one_host} == {("a",)}
    assert [one.gpus for one in one_host] == [(0,), (1,), (0,), (1,), (0, 1)]


def test_cells_of_one_rank_and_of_one_host_come_first(planned):
    sweep = planned("nodes=b,a gpus=0,1 waterfall=true noise_pairs=0")
    sizes = [(one.cell.world_size, len(one.cell.hosts)) for one in sweep.cells]
    assert sizes == sorted(sizes) and sizes[-1] == (4, 2)
    assert len({one.name for one in sweep.cells}) == len(sweep.cells)


def test_hosts_that_a_sweep_wants_are_those_of_its_cells(hydra, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(f"n{number}" for number in range(9)))

    def wanted(typed):
        return wanted_hosts([configuration(*typed.split())], {})

    assert wanted("gpus=0") == ()
    dist = f"nodes=2 hosts={hosts} strategy=kvstore_dist_async strategy.servers=2"
    assert wanted(f"{dist} strategy.server_nodes=n7+n0") == ("n0", "n1", "n7")
    refuses("host x is not in hosts=", wanted, f"{dist} strategy.server_nodes=x")


def test_slurm_outside_of_its_job_is_refused(launch):
    """tests/golden/refusals.txt has what else does not fit."""
    code, out, err = launch("nodes=2", "engine=slurm", "model=fmnist_cnn")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("launch.py: engine=slurm: this is not inside a Slurm job")


SERVED = dataclasses.replace(
    make_cell((0, 1)),
    hosts=("a", "b"),
    server_hosts=("b",),
    strategy={"name": "kvstore_dist_sync", "servers": 1},
)


@pytest.mark.parametrize(
    "damage",
    [
        {"hosts": "ab"}, {"hosts": ["a", 7]}, {"hosts": ["a", "a"]}, {"hosts": ["a", "-b"]},
        {"hosts": ["a:0"]}, {"hosts": ["a", ""]}, {"hosts": {"a": 1}},
        {"hosts": [f"n{number}" for number in range(40_000)]}, {"hosts": []}, {"server_hosts": []},
        {"server_hosts": ["b", "b"]}, {"server_hosts": [None]}, {"server_hosts": 1},
        {"server_gpus": [1, 2]},
    ],
)  # fmt: skip
def test_damaged_hosts_are_no_cell(tmp_path, damage):
    plain = json.loads(json.dumps(SERVED.to_dict()))
    assert Cell.from_dict(plain) == SERVED
    with pytest.raises(ValueError):
        Cell.from_dict(plain | damage)
    content = json.loads(next((DATA / "h200_x4" / "settings").rglob("record.json")).read_text())
    (tmp_path / "record.json").write_text(json.dumps(content | {"cell": plain | damage}))
    with pytest.raises(RecordError):
        read(tmp_path / "record.json")


def test_a_cell_with_hosts_has_its_places_and_one_without_them_none():
    ranks = [["rank", host, gpu] for host in "ab" for gpu in (0, 1)]
    assert SERVED.to_dict()["places"] == [*ranks, ["server", "b", None]]
    assert not {"hosts", "server_hosts", "places"} & make_cell().to_dict().keys()
    cells = (make_cell(), make_cell(hosts=("a",)), SERVED)
    assert len({one.key for one in cells}) == 3


def test_the_table_has_a_column_of_hosts_only_if_a_cell_has_some():
    local = PlannedCell(make_cell())
    remote = PlannedCell(make_cell(hosts=("a", "b")))
    assert "nodes" in request_columns([local, remote])[1]
    assert "nodes" not in request_columns([local, local])[1]
    assert request_columns([remote, remote])[0]["nodes"] == "a+b"
    assert "nodes" not in request_columns([local])[0]


def test_mlflow_has_hosts_of_cells_with_hosts():
    local = tracked_record(1)
    on_two = dataclasses.replace(local.cell, hosts=("a", "b"))
    remote = project(tracked_record(2, cell=on_two))
    params = [remote.params[name] for name in ("nodes", "hosts", "world_size")]
    assert params == ["2", "a,b", "4"] and remote.tags["host"] == "a, b"
    assert not {"nodes", "hosts", "server_hosts"} & project(local).params.keys()
    defaults = mlflow_run.default_params([local, tracked_record(2, cell=on_two)])
    assert defaults[local.record_id] == {"nodes": "1", "hosts": "this machine"}
