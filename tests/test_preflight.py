"""Hosts describe themselves, are compared, and choose where they meet."""

import dataclasses
import json
import os
import re
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from build import GPUS, ROOT, WITH_GPUS, described, environment, fleet, host, interface, make_cell

from benchmarks.agent import network as probe
from benchmarks.agent.network import ProbeListeners, interfaces, try_connect
from benchmarks.agent.processes import CELL_FOLDER, Variables, merged, with_absolute_path
from benchmarks.record import CellFolder
from benchmarks.record.lines import CLOCK_VARIABLE, beginning
from conf.host import usable_cores
from conf.options import Refused
from launch.engines.environment import (
    NCCL_SUBSYSTEMS,
    HostEnvironment,
    cell_variables,
    inherited_names,
)
from launch.engines.rendezvous import candidates, choose
from launch.machine import facts as describe
from launch.machine.fleet import Host, compare, refuse_two_names

# The description.


def test_a_host_describes_itself_in_one_line_without_torch_and_without_secrets():
    around = {**os.environ, "NCCL_TOKEN_X": "hush", "NCCL_ALGO": "Ring"}
    command = [sys.executable, "-X", "importtime", "-m", "launch.machine.facts", "cpu"]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1 and "hush" not in done.stdout
    assert "| torch" not in done.stderr
    here = Host.described("a", done.stdout)
    assert here.machine.kind == "cpu" and here.machine.cores == usable_cores()
    assert here.variables["NCCL_ALGO"] == "Ring" and "NCCL_TOKEN_X" in here.left_out
    assert here.versions["python"].startswith("3.") and here.versions["torch"]
    assert here.facts["code"] and here.kernel == os.uname().release
    assert here.shared_memory_bytes > 0
    loopbacks = [face for face in here.interfaces if face.loopback]
    assert any("127.0.0.1/8" in face.addresses for face in loopbacks)


def test_a_host_that_cannot_do_what_is_asked_says_why():
    done = describe.description("cuda", {"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(Refused, match=r"^host b: device=cuda: .*possible here: auto and cpu$"):
        Host.described("b", done)


def test_the_ports_of_infiniband_are_told(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    told = [{"device": "mlx5_0", "port": "1", "rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE"}]
    assert describe.infiniband(tmp_path) == told and describe.infiniband(tmp_path / "none") == []


def damaged(path, value):
    """The description with a wrong value; None takes the field away."""
    plain = described(**WITH_GPUS)
    *inside, last = path.split(".")
    part = plain
    for name in inside:
        part = part[int(name)] if name.isdigit() else part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return plain


@pytest.mark.parametrize(
    "said",
    [
        b"", b"bash: python: command not found\n", b"[]", b"{}", b"{" * 100_000, b"\xff\xfe", 7,
        None,
        *(damaged(*one) for one in [
            ("form", 2), ("machine", None), ("machine", []), ("machine.devices", 7),
            ("machine.devices.0.id", "0"), ("machine.all_gpus", [9]), ("machine.kind", "tpu"),
            ("machine.cores", None), ("facts", []), ("variables", {"A": 1}), ("versions", None),
            ("kernel", 6), ("interfaces", [{}]), ("more", 1), ("infiniband", {}),
            ("interfaces", [interface("eth0", "10.0.0.300/24")]), ("shared_memory_bytes", "1"),
            ("shared_memory_bytes", 10**400), ("free_memory_bytes", 10**400),
            ("interfaces", [interface("eth0", mbit_per_s=10**400)]),
            ("interfaces", [interface("eth0", "there")]), ("too_small", "none"),
        ]),
    ],
    ids=lambda said: str(said)[:20],
)  # fmt: skip
def test_what_is_no_description_is_one_sentence(said):
    words = r"^host b: what it says of itself is not a description by this Ringside \("
    with pytest.raises(Refused, match=words) as refused:
        Host.described("b", said)
    assert len(str(refused.value)) < 500 and "\n" not in str(refused.value)


def test_the_description_of_another_commit_names_both():
    plain = described(**WITH_GPUS, **{"facts.git": {"commit": 40 * "f"}}) | {"new": 1}
    said = r"\(it is of commit ffffffffffff, and this is [0-9a-f]{12}\)\. What to do: use the"
    with pytest.raises(Refused, match=said):
        Host.described("b", plain)


# The comparison.

ETH = interface("eth0", "10.0.0.1/24", "fd01::1/64")
IB = interface("ib0", "10.1.0.1/24", mbit_per_s=200_000)
PUBLIC = interface("wan0", "8.8.4.4/24", mbit_per_s=400_000)
DOCKER = interface("docker0", "172.17.0.1/16", inner=True, mbit_per_s=999_999)
LO = interface("lo", "127.0.0.1/8", "::1/128", loopback=True)
B200 = [{**gpu, "name": "NVIDIA B200"} for gpu in GPUS]
SPARSE = {"machine.devices": [GPUS[0], {**GPUS[1], "id": 3}], "machine.all_gpus": [0, 3]}
CLOCKED = {"driver": "580.65.06", "gpus": [{"max_sm_mhz": 1755}]}
FASTER = [interface("eth0", "10.0.0.2/24", mbit_per_s=25000)]
INFINIBAND = [{"device": "m", "port": "1", "rate": "400 Gb/sec", "state": ""}]
CPU_ONLY = {"machine": described()["machine"]}
REFUSED = [
    ({"facts.code": "0123456789ab"}, r"code is \w+ here and 0123456789ab on b. What to do: bring"),
    ({"versions.python": "3.1.4"}, "in Python: a has 3.*; b has 3.1. What to do: use the same"),
    ({"versions.torch": "2.8.0"}, "in torch: a has 2.*; b has 2.8.0. What to do: install the same"),
    ({"versions.nccl": "2.18.1"}, "differ in NCCL: a has .*; b has 2.18.1"),
    (CPU_ONLY, r"^a has GPUs and b has none \(device=cpu\). What to do:"),
    ({"machine.devices": B200}, r"b has 2 × NVIDIA B200 \(0,1\)"),
    (SPARSE, r"b has 2 × NVIDIA H200 \(0,3\)"),
    ({"facts.gpu": {"driver": "570.1"}}, "driver's branch: a has 580; b has 570. What to do: le"),
    ({"too_small": ["ulimit -n is 64 here"]}, "^host b: ulimit -n is 64 here"),
]
NOTED = [
    ({"facts.git": {"commit": "f" * 40}}, "the commit of Ringside: a has .*; b has ffffffffffff"),
    ({"facts.gpu": {"driver": "580.99"}}, "the NVIDIA driver: a has 580.65.06; b has 580.99"),
    ({"kernel": "5.4"}, "the kernel: a has .*; b has 5.4"),
    ({"facts.gpu": CLOCKED}, "SM clock: a has 1980 MHz; b has 1755 MHz"),
    ({"facts.cpu.model": "Other"}, "the CPU: a has .*; b has Other"),
    ({"machine.cores": 3}, "the cores: a has 8; b has 3"),
    ({"facts.cpu.memory_bytes": 1 << 30}, "the memory: a has .* GiB; b has 1 GiB"),
    ({"interfaces": FASTER}, "interfaces: a has 1 Gbit/s; b has 25 Gbit/s"),
    ({"variables": {"NCCL_ALGO": "Ring", "TORCH_HOME": "x"}}, "NCCL_ALGO: a has unset; b has Ring"),
    ({"infiniband": INFINIBAND}, "b has 1 Gbit/s, InfiniBand 400"),
]
PLAIN = {**WITH_GPUS, "interfaces": [interface("eth0", "10.0.0.1/24")]}


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_must_be_equal_is_refused_by_name(changes, said):
    with pytest.raises(Refused, match=said):
        compare(fleet(a=PLAIN, b=PLAIN | changes))


@pytest.mark.parametrize(("changes", "said"), NOTED)
def test_what_may_differ_is_noted_by_name(changes, said):
    (note,) = compare(fleet(a=PLAIN, b=PLAIN | changes))
    assert re.search(said, note), note


def test_equal_hosts_are_not_named_and_a_host_of_many_is():
    assert compare(fleet(a=PLAIN, b=PLAIN)) == []
    kernels = {f"n{number}": {"kernel": "5.4" if number == 7 else "6.1"} for number in range(12)}
    said = "hosts differ in the kernel: n0, n1, n2, n3 and 7 more have 6.1; n7 has 5.4"
    assert compare(fleet(**kernels)) == [said]


ONE_KERNEL = {"boot_id": "k", "interfaces": [LO, DOCKER, ETH]}
OTHER_KERNEL, OTHER_ADDRESS = {"boot_id": "l"}, {"interfaces": [LO, DOCKER, IB]}


def test_two_names_of_one_machine_are_refused():
    words = r"^nodes=a\+b: these are two names of one machine \(both have "
    with pytest.raises(Refused, match=f"{words}10.0.0.1/24"):
        refuse_two_names(fleet(a=ONE_KERNEL, b=ONE_KERNEL))
    with pytest.raises(Refused, match=f"{words}GPU-0"):
        refuse_two_names(fleet(a=WITH_GPUS | ONE_KERNEL, b=WITH_GPUS | OTHER_KERNEL))
    for other in (OTHER_KERNEL, OTHER_ADDRESS, {"boot_id": ""}):  # as containers on one machine
        refuse_two_names(fleet(a=ONE_KERNEL, b=ONE_KERNEL | other))


def test_a_host_that_forbids_multicast_forbids_it_for_all():
    some = fleet(a={}, b={"variables": {"NCCL_NVLS_ENABLE": "0"}})
    said = r"the environment of host b forbids NVLink multicast \(NCCL_NVLS_ENABLE=0\)"
    with pytest.raises(Refused, match=said):
        some.refuse_multicast({"NCCL_NVLS_ENABLE": "1"})
    some.refuse_multicast({"NCCL_NVLS_ENABLE": "0"})
    forbidden = {"NCCL_NVLS_ENABLE": "0"}
    assert some.forbidding_multicast({}) == forbidden
    more = {"NVSHMEM_DISABLE_NVLS": "1"}
    assert some.forbidding_multicast(more) == {**more, **forbidden}
    assert fleet(a={}).forbidding_multicast({}) == {}


# The environment of a cell's processes.


OURS = {"PATH": "/bin", "HOME": "/h", "PYTHONPATH": "here"}
AROUND = {**OURS, "RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}
OF_USER = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN"}
OF_USER |= {"NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
OF_USER |= {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("said", [{}, OF_USER])
def test_the_environment_of_one_machine_is_what_a_cell_asks_for(tmp_path, device, said):
    nccl, alone = {"NCCL_ALGO": "Ring"}, {"name": "none", "servers": 1}
    cell = make_cell((1, 0), alone, device=device, nccl=nccl, server_gpus=(1,))
    machine = host("a", **(WITH_GPUS if device == "cuda" else {})).machine
    folder = CellFolder(tmp_path)
    expected = with_absolute_path(OURS) | said | {CLOCK_VARIABLE: repr(beginning())}
    expected |= {"RINGSIDE_TOKEN": "t", "GLOO_SOCKET_IFNAME": "lo"}
    expected |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if device == "cpu":
        threads = max(1, machine.cores // len(machine.all_gpus))
        expected |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    else:
        threads = str(max(1, machine.cores // 4))
        expected = {"NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": threads} | expected
        expected |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0"}
        expected |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": NCCL_SUBSYSTEMS}
        expected |= {"NCCL_DEBUG_FILE": folder.nccl_log_pattern, "NCCL_RAS_ENABLE": "0"}
        expected |= {"NCCL_CONF_FILE": str(folder.nccl_conf), **nccl}
    assert environment(cell, machine, folder, "t", AROUND | said) == expected
    plain = json.loads(json.dumps(cell_variables(cell, machine, folder, "t").to_dict()))
    assert merged(Variables.from_dict(plain), AROUND | said) == expected


@pytest.mark.parametrize(
    ("asked", "around", "rank", "inherited"),
    [
        (None, {}, None, []),
        (None, {"CUDA_DEVICE_MAX_CONNECTIONS": "2"}, "2", ["CUDA_DEVICE_MAX_CONNECTIONS"]),
        (1, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1", []),
        (32, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "32", []),
    ],
)
def test_hardware_queues_are_set_as_asked_or_left_as_they_are(asked, around, rank, inherited):
    machine = fleet(a=WITH_GPUS)["a"].machine
    cell = make_cell((1,), device="cuda", cuda_device_max_connections=asked)
    variables = environment(cell, machine, CellFolder(Path("x")), "t", around)
    assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == rank
    assert inherited_names(variables, cell, around) == inherited
    plain = dataclasses.replace(cell, cuda_device_max_connections=None)
    assert (cell.key == plain.key) == (asked is None)


def test_each_host_gets_the_interface_the_gpus_and_the_threads_of_its_own():
    gpus = [{**gpu, "uuid": f"GPU-b{gpu['id']}"} for gpu in GPUS]
    some = fleet(a=WITH_GPUS, b={**WITH_GPUS, "machine.cores": 4, "machine.devices": gpus})
    served = {"hosts": ("a", "b"), "server_gpus": (0, 1), "server_hosts": ("b", "b")}
    cell = make_cell((1,), {"name": "none", "servers": 2}, device="cuda", **served)

    def on(name, around, typed=False, folder=CELL_FOLDER):
        where = HostEnvironment(name, f"eth-{name}", typed, {"NCCL_NVLS_ENABLE": "0"})
        inside = CellFolder(Path(CELL_FOLDER))
        return merged(cell_variables(cell, some[name].machine, inside, "t", where), around, folder)

    names = [
        "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
        "NCCL_NVLS_ENABLE",
    ]  # fmt: skip
    first, second = on("a", {}), on("b", {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NVLS_ENABLE": "1"})
    assert [first[name] for name in names] == ["eth-a", "=eth-a", "GPU-1", "4", "0"]
    assert [second[name] for name in names] == ["eth-b", "ib0", "GPU-b1,GPU-b0", "2", "0"]
    typed = on("b", {"NCCL_SOCKET_IFNAME": "ib0"}, typed=True)
    assert typed["NCCL_SOCKET_IFNAME"] == "=eth-b"
    empty = on("a", {"OMP_NUM_THREADS": "", "NCCL_SOCKET_IFNAME": ""})
    assert (empty["OMP_NUM_THREADS"], empty["NCCL_SOCKET_IFNAME"]) == ("4", "=eth-a")
    assert on("a", {}, folder="/scratch")["NCCL_DEBUG_FILE"] == "/scratch/nccl/%h.%p.log"


# Where hosts meet.


SECOND = ("10.0.0.2/24", "10.1.0.2/24", "fd01::2/64")


def wanted(*first, others=(SECOND,), name=None, trusted=False):
    beside = [host("b", interfaces=[interface("x", *addresses)]) for addresses in others]
    return candidates(host("a", interfaces=list(first)), beside, name, trusted)


def test_addresses_of_a_shared_network_come_first_the_faster_before_and_ipv4():
    assert wanted(LO, ETH, IB, DOCKER) == ["10.1.0.1", "10.0.0.1", "fd01::1"]
    slow = [("10.0.0.2/24",), ("10.0.0.3/24",)]
    assert wanted(LO, ETH, IB, others=slow) == ["10.0.0.1", "10.1.0.1", "fd01::1"]
    assert wanted(LO, ETH, IB, name="eth0") == ["10.0.0.1", "fd01::1"]
    assert wanted(LO, DOCKER) == ["172.17.0.1"]


def test_an_address_that_the_internet_reaches_is_refused_unless_the_network_is_trusted():
    assert wanted(LO, PUBLIC, ETH) == ["10.0.0.1", "fd01::1"]
    assert wanted(LO, PUBLIC, trusted=True) == ["8.8.4.4"]
    of_no_name = "^engine.interface=ib7: host a has none of this name that is up; it has"
    for first, name, said in (
        ((LO, PUBLIC), None, "has no address but 8.8.4.4, which is routed to the whole internet"),
        ((LO, ETH), "ib7", of_no_name),
        ((LO,), None, "host a has no interface"),
    ):
        with pytest.raises(Refused, match=said):
            wanted(*first, name=name)


def test_the_first_address_that_all_reach_is_chosen_and_the_interfaces_are_named():
    first, addresses = host("a", interfaces=[ETH, IB]), ["10.1.0.1", "10.0.0.1"]
    slow = {"10.1.0.1": {"why": "no answer within 3 s"}, "10.0.0.1": {"interface": "eno1"}}
    both = {"10.1.0.1": {"interface": "ib1"}, "10.0.0.1": {"interface": "eno2"}}
    found = choose(first, addresses, {}, {"b": slow, "c": both})
    expected = {"a": "eth0", "b": "eno1", "c": "eno2"}
    assert (found.address, found.interfaces) == ("10.0.0.1", expected)
    assert choose(first, addresses, {}, {"c": both}).interfaces == {"a": "ib0", "c": "ib1"}
    said = r"b does not reach a at 10.1.0.1: no answer within 3 s\. What.*engine.interface="
    with pytest.raises(Refused, match=said):
        choose(first, addresses[:1], {}, {"b": slow, "c": both})
    with pytest.raises(Refused, match=r"a cannot listen at 10.1.0.1: no; b does not reach"):
        choose(first, addresses[:1], {"10.1.0.1": "no"}, {"b": slow})


def test_who_listens_answers_with_the_word_and_nobody_else_does():
    listening = ProbeListeners(["127.0.0.1", "::1", "203.0.113.7"], "word")
    assert set(listening.ports) == {"127.0.0.1", "::1"}
    assert "assign" in listening.refused["203.0.113.7"]
    program = str(ROOT / "tests" / "meeting_hosts.py")
    command = [sys.executable, program, "reach", json.dumps(listening.ports)]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    other = subprocess.Popen(command, cwd=ROOT, env=around, stdout=subprocess.PIPE)
    while other.poll() is None:
        select.select(listening.sockets, [], [], 0.05)
        listening.answer()
    by_lo = {"interface": "lo"}
    assert json.loads(other.stdout.read()) == {"127.0.0.1": by_lo, "::1": by_lo}
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        silent = try_connect({"127.0.0.1": stranger.getsockname()[1]}, "word", 0.2)
    ports = listening.ports
    listening.close()
    assert silent == {"127.0.0.1": {"why": "no answer within 0.2 s"}} and listening.sockets == []
    assert try_connect(ports, "word", 0.2) == {one: {"why": "Connection refused"} for one in ports}


def test_a_listener_that_nobody_closes_closes_itself(monkeypatch):
    monkeypatch.setattr(probe, "OPEN_SECONDS", -1.0)
    listening = ProbeListeners(["127.0.0.1"], "word")
    listening.answer()
    assert listening.sockets == []


def test_only_lo_is_a_loopback():
    assert {one.name for one in interfaces() if one.loopback} == {"lo"}


@pytest.mark.needs("namespaces")
def test_two_hosts_find_the_interface_that_joins_them():
    """Host a has two networks, and b reaches one of them."""
    command = ["unshare", "-Urnm", sys.executable, str(ROOT / "tests" / "meeting_hosts.py")]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    wanted, reached, address, names, listening = json.loads(done.stdout)
    assert wanted == ["10.9.0.1", "10.8.0.1"], "the network that they share comes first"
    assert reached["10.9.0.1"] == {"interface": "vb"} and "why" in reached["10.8.0.1"]
    assert address == "10.9.0.1" and names == {"a": "va", "b": "vb"}
    assert sorted(listening) == ["10.8.0.1", "10.9.0.1"], "no wildcard"
