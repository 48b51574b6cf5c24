"""Requested against effective: every code where it is planted, and nowhere else."""

import pytest
from build import DATA, make_cell, make_record
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.nccl.log import describe_transport, pair_class, parse_nccl_log
from analysis.validity.effective import hosts_seen
from analysis.validity.nccl_settings import (
    Evidence,
    SettingResult,
    announcement,
    check_setting,
    same_value,
)
from conf.nccl import ALGORITHMS, allowed, level_word

NV = {f"{a}-{b}": "NV18" for a in range(8) for b in range(a + 1, 8)}


def check_settings(requested, log, same_cell_without, link_classes, *, gpus=None):
    """What each setting comes to by a cell's log; `same_cell_without` is that without them all."""
    evidence = None if log is None else Evidence(requested, log, link_classes, gpus)
    results = []
    for name, value in requested.items():
        results += check_setting(name, value, evidence, same_cell_without)
    return results


def capture(name):
    return parse_nccl_log((DATA / f"nccl_{name}.log").read_text())


def made(*bodies, transport="P2P/CUMEM", version="2.28.9", channels=24, nvls=0, ranks=(0, 1)):
    """A log of two ranks in NCCL's form; `bodies` are announced by the ranks of `ranks`."""
    slash = "/0" if transport.startswith("P2P") else ""
    count = f"{channels} coll channels, {channels} collnet channels, {nvls} nvls channels"
    text = ""
    for rank in (0, 1):
        member = f"ncclCommInitRankConfig comm 0x{rank}a rank {rank} nranks 2 cudaDev {rank}"
        member += f" nvmlDev {rank} busId {rank}0 commId 0x1 - Init"
        lines = ["Bootstrap: Using eth0", f"NCCL version {version}+cuda13.0"]
        lines += ["Comm config Blocking set to 1", f"{member} START"]
        lines += bodies if rank in ranks else ()
        lines += [f"{count}, 32 p2p channels, 2 p2p channels per peer", f"{member} COMPLETE"]
        ends = f"{rank}[{rank}] -> {1 - rank}[{1 - rank}]"
        lines.append(f"Channel 00{slash} : {ends} via {transport}")
        text += "".join(f"vm:{rank + 1}:1 [0] NCCL INFO {line}\n" for line in lines)
    return parse_nccl_log(text)


def says(name, value):
    return f"{name} set by environment to {value}"


def codes(findings):
    return {(one.code, one.severity) for one in findings}


IGNORED, TRANSPORT, ALGORITHM = "setting_ignored", "transport_unexpected", "algorithm_unexpected"
CHANNELS, NO_EFFECT = "channels_unexpected", "setting_no_effect"
LEVEL, ALGO, PROTO, NET = "NCCL_P2P_LEVEL", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET"
BUFFER, P2P_OFF, SHM_OFF = "NCCL_BUFFSIZE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"
IB_OFF, CUMEM, NVLS = "NCCL_IB_DISABLE", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"
MIN, MAX = "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"
SHM = "SHM/direct/direct"


def choice(function, algorithm, protocol, size=1024):
    head = f"{function}: {size} Bytes -> Algo {algorithm} proto {protocol}"
    return f"{head} channel{{Lo..Hi}}={{0..3}}"


RING, TREE = choice("AllReduce", "RING", "LL"), choice("AllReduce", "TREE", "LL")
OF_GATHER, OF_BROADCAST = choice("AllGather", "RING", "LL"), choice("Broadcast", "RING", "LL")
OLD_CHOICE = "1024 Bytes -> Algo 1 proto 0 time 12.500000"


def announced(name, value, *bodies, **log):
    """The log of a cell in which NCCL announced a value."""
    return made(says(name, value), *bodies, **log)


@pytest.mark.parametrize(
    ("name", "value", "log", "expected"),
    [
        # as asked
        (LEVEL, "LOC", "h200_x2_p2p_level_LOC", ""),
        (LEVEL, "NVL", "h200_x2_p2p_level_NVL", ""),
        (LEVEL, "LOC", "h200_gpus_0_3_p2p_level_LOC", ""),
        (NVLS, "0", "h200_x2_p2p_level_LOC", ""),
        (LEVEL, "LOC", "dgx1_gpus_0_3_p2p_level_0", ""),
        (LEVEL, "0", "dgx1_gpus_0_3_p2p_level_0", ""),
        # measured on hardware: a lower-case level leaves no line and P2P/CUMEM
        (LEVEL, "loc", "h200_x8_default", f"{IGNORED} invalid"),
        (LEVEL, "LOC", "h200_x8_default", f"{IGNORED} invalid, {TRANSPORT} invalid"),
        # numbers as C reads them: a word is 0, which is not what was asked
        (BUFFER, "4194304", made(), f"{IGNORED} invalid"),
        (BUFFER, "4194304", announced(BUFFER, "4194304."), ""),
        (BUFFER, "0x400000", announced(BUFFER, "4194304."), ""),
        (BUFFER, "4M", announced(BUFFER, "4."), f"{IGNORED} invalid"),
        # announced only where used
        (SHM_OFF, "1", made(), f"{IGNORED} unchecked"),
        (P2P_OFF, "0", made(), f"{IGNORED} unchecked"),
        # a level up to 2.22
        (P2P_OFF, "1", announced(LEVEL, "LOC", version="2.20.5", transport=SHM), ""),
        (P2P_OFF, "1", announced(P2P_OFF, "1", transport=SHM), ""),
        (LEVEL, "NVL", announced(LEVEL, "NVL", ranks=(0,)), f"{IGNORED} suspect"),
        (NET, "IB", "h200_x8_default", f"{IGNORED} invalid"),
        (NET, "Socket", "h200_x8_default", ""),
        (LEVEL, "LOC", None, f"{IGNORED} unchecked"),
        # a transport that the setting rules out
        (LEVEL, "LOC", announced(LEVEL, "LOC"), f"{TRANSPORT} invalid"),
        (LEVEL, "0", announced(LEVEL, "LOC", transport="P2P/IPC"), f"{TRANSPORT} invalid"),
        (P2P_OFF, "1", announced(P2P_OFF, "1"), f"{TRANSPORT} invalid"),
        (SHM_OFF, "1", announced(SHM_OFF, "1.", transport=SHM), f"{TRANSPORT} invalid"),
        (IB_OFF, "1", announced(IB_OFF, "1.", transport="NET/IB/0/GDRDMA"), f"{TRANSPORT} invalid"),
        (CUMEM, "0", announced(CUMEM, "0.", transport="P2P/CUMEM/read"), f"{TRANSPORT} invalid"),
        (NVLS, "0", announced(NVLS, "0.", nvls=16), f"{TRANSPORT} invalid"),
        # algorithms and protocols against TUNING lines
        (ALGO, "Ring", announced(ALGO, "Ring", RING), ""),
        (ALGO, "Tree", announced(ALGO, "Tree", RING), f"{ALGORITHM} invalid"),
        (ALGO, "^ring", announced(ALGO, "^ring", RING), f"{ALGORITHM} invalid"),
        (ALGO, "allreduce:tree", announced(ALGO, "allreduce:tree", OF_GATHER), ""),
        # Broadcast has no tree: nothing else was possible
        (ALGO, "Tree", announced(ALGO, "Tree", OF_BROADCAST), ""),
        (PROTO, "Simple", announced(PROTO, "Simple", RING), f"{ALGORITHM} invalid"),
        (PROTO, "LL,LL128", announced(PROTO, "LL,LL128", RING), ""),
        (ALGO, "Ring", announced(ALGO, "Ring"), f"{ALGORITHM} unchecked"),
        (ALGO, "Rnig", announced(ALGO, "Rnig", RING), f"{ALGORITHM} unchecked"),
        (ALGO, "Tree", announced(ALGO, "Tree", OLD_CHOICE), f"{ALGORITHM} invalid"),
        # channels against their limits
        (MIN, "8", announced(MIN, "8.", channels=4), f"{CHANNELS} invalid"),
        (MIN, "8", announced(MIN, "8.", channels=24), ""),
        (MIN, "100", announced(MIN, "100.", channels=32), ""),
        (MAX, "8", announced(MAX, "8.", channels=24), f"{CHANNELS} invalid"),
        ("NCCL_MAX_CTAS", "24", announced("NCCL_MAX_CTAS", "24.", channels=24), ""),
    ],
)
def test_a_setting_against_the_log(name, value, log, expected):
    log = capture(log) if isinstance(log, str) else log
    findings = check_settings({name: value}, log, None, NV)
    assert ", ".join(f"{one.code} {one.severity}" for one in findings) == expected
    assert all(one.setting == name and f"{name}={value}" in one.sentence for one in findings)


@pytest.mark.parametrize(
    ("level", "link", "transport", "severity"),
    [
        ("NVL", "NV2", "P2P/IPC", None),
        ("NVL", "SYS", "P2P/IPC", "invalid"),
        ("NVL", None, "P2P/IPC", "unchecked"),
        ("NVL", "unknown", "P2P/IPC", "unchecked"),
        ("PIX", "NV2", "P2P/IPC", None),
        ("PIX", "NODE", "P2P/IPC", "suspect"),
        ("PHB", "NODE", "P2P/IPC", None),
        ("SYS", "SYS", "P2P/IPC", None),
        ("NVL", "NV2", SHM, "suspect"),  # P2P allowed, something else used
        ("PIX", "SYS", SHM, None),
        ("NVL", "SYS", "P2P/indirect/2[2]", "invalid"),  # by a third GPU: NVB, beyond NVL
        ("PIX", "SYS", "P2P/indirect/2[2]", None),
    ],
)
def test_levels_against_link_classes(level, link, transport, severity):
    log = announced(LEVEL, level, transport=transport)
    findings = check_settings({LEVEL: level}, log, None, {"0-1": link} if link else None)
    assert codes(findings) == ({(TRANSPORT, severity)} if severity else set())


def test_values_that_contradict_each_other():
    (finding,) = check_settings({LEVEL: "NVL"}, announced(LEVEL, "PIX"), None, NV)
    sentence = "NCCL_P2P_LEVEL=NVL was not used: NCCL says PIX"
    assert finding == SettingResult(IGNORED, sentence, "invalid", LEVEL)
    log = announced(P2P_OFF, "1", transport=SHM)
    (finding,) = check_settings({P2P_OFF: "1", LEVEL: "NVL"}, log, None, NV)
    assert finding.setting == LEVEL and "overrides it" in finding.sentence
    text = "vm:1:1 [0] NCCL INFO x\n"
    for pid, level in ((1, "NVL"), (2, "LOC")):
        text += f"vm:{pid}:1 [0] NCCL INFO {says(LEVEL, level)}\n"
    findings = check_settings({LEVEL: "NVL"}, parse_nccl_log(text), None, NV)
    assert (IGNORED, "invalid") in codes(findings)


def test_a_variable_that_no_rule_knows_is_never_passed():
    name, unchecked = "NCCL_WIN_ENABLE", ("effect_not_checked", "unchecked")
    (one,) = check_settings({name: "1"}, announced(name, "1."), made(), NV)
    assert (one.code, one.severity) == unchecked and "that it was read" in one.sentence
    findings = check_settings({name: "1"}, made(), made(), NV)
    assert codes(findings) == {unchecked, (IGNORED, "unchecked")}


def test_a_log_that_ends_before_the_connections_proves_nothing():
    text = "vm:1:1 [0] NCCL INFO a\nvm:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"
    findings = check_settings({LEVEL: "LOC"}, parse_nccl_log(text), None, NV)
    assert codes(findings) == {(IGNORED, "unchecked"), (TRANSPORT, "unchecked")}


# --- setting_no_effect


def test_the_seeds_level_1_did_not_force_pcie():
    default = capture("dgx1_gpus_0_3_default")
    log = capture("dgx1_gpus_0_3_p2p_level_1")
    *_, finding = check_settings({LEVEL: "PIX"}, log, default, {}, gpus=[0, 3])
    assert (finding.code, finding.severity) == (NO_EFFECT, "finding")
    same = "NCCL used the same transports as without it (P2P/IPC, 4 channels)"
    assert f"NCCL_P2P_LEVEL=PIX changed nothing: {same}" in finding.sentence
    log = capture("dgx1_gpus_0_3_p2p_level_0")
    assert check_settings({LEVEL: "LOC"}, log, default, {}, gpus=[0, 3]) == []


@pytest.mark.parametrize(
    ("name", "value", "log", "without", "expected"),
    [
        (ALGO, "tree", announced(ALGO, "tree", TREE), made(RING), set()),
        (ALGO, "ring", announced(ALGO, "ring", RING), made(RING), {(NO_EFFECT, "finding")}),
        (ALGO, "ring", announced(ALGO, "ring", RING), made(), {(NO_EFFECT, "unchecked")}),
        (MAX, "4", announced(MAX, "4.", channels=4), made(), set()),
        (LEVEL, "PIX", announced(LEVEL, "PIX"), made(), {(NO_EFFECT, "finding")}),
        # an ignored setting is ignored, not without effect
        (LEVEL, "pix", made(), made(), {(IGNORED, "invalid")}),
        # one that shows nowhere is not judged by an equal log
        (BUFFER, "1", announced(BUFFER, "1."), made(), set()),
    ],
)
def test_effect_is_seen_in_transport_channels_or_algorithm(name, value, log, without, expected):
    assert codes(check_settings({name: value}, log, without, NV)) == expected


# --- transport and link


def test_transport_joined_with_link_class():
    assert describe_transport(capture("h200_x8_default"), NV) == "P2P/CUMEM over NV18"
    log = capture("h200_gpus_0_3_p2p_level_LOC")
    assert describe_transport(log, NV) == "SHM/direct/direct, NV18 unused"
    assert pair_class("0->1", log, {"0-3": "NV18", "0-1": "PIX"}) == "NV18"
    assert describe_transport(log, None) == "SHM/direct/direct"
    seed = capture("dgx1_gpus_1_7_default")
    assert describe_transport(seed, {"1-7": "SYS"}, gpus=[1, 7]) == "SHM/direct over SYS"
    assert describe_transport(seed, {"1-7": "SYS"}) == "SHM/direct"
    assert describe_transport(made(transport="NET/IB/3/GDRDMA"), NV) == "NET/IB/GDRDMA"
    bare = parse_nccl_log("NCCL INFO a\n")
    assert describe_transport(bare, NV) == "unknown"


def test_mixed_transports_are_joined_by_plus():
    text = "x\nNCCL INFO NCCL version 2.28.9+cuda13.0\n"
    text += "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC\n"
    text += "NCCL INFO Channel 00/0 : 1[1] -> 2[2] via P2P/IPC\n"
    text += "NCCL INFO Channel 00 : 2[2] -> 0[0] via SHM/direct/direct\n"
    log = parse_nccl_log(text)
    classes = {"0-1": "NV1", "1-2": "NV2", "0-2": "SYS"}
    assert describe_transport(log, classes) == "P2P/IPC over NV1+NV2 + SHM/direct/direct over SYS"


def test_link_classes_do_not_reach_across_hosts():
    text = "x\n"
    for rank in (0, 1):
        member = f"comm 0x{rank} rank {rank} nranks 2 cudaDev 0 nvmlDev {rank} busId {rank}0"
        member += " commId 0x1 - Init COMPLETE"
        text += f"node{rank}:1:1 [0] NCCL INFO {member}\n"
    text += "node0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/0\n"
    log = parse_nccl_log(text)
    assert pair_class("0->1", log, NV) is None


# --- NCCL's own rules


def test_values_as_nccl_reads_them():
    assert [level_word(value) for value in ("0", "1", "2", "3", "4", "9", "NVL")] == [
        *("LOC", "PIX", "PXB", "PHB", "SYS", "SYS", "NVL")
    ]
    assert same_value("NCCL_BUFFSIZE", "010", "8")
    assert same_value("NCCL_BUFFSIZE", "-1", str(2**64 - 1))
    assert not same_value("NCCL_ALGO", "ring", "Ring")
    assert same_value("NCCL_LAUNCH_MODE", "group", "GROUP")
    assert announcement("NCCL_BUFFSIZE", "1", (2, 8, 3)) == "always"
    assert announcement("NCCL_BUFFSIZE", "1", (2, 28, 9)) == "env"
    assert announcement("NCCL_MIN_CTAS", "1", (2, 12, 12)) == "used"


def test_lists_of_algorithms_as_nccl_parses_them():
    both = allowed("ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring", ALGORITHMS)
    assert both["AllReduce"] == {"Tree", "CollNetDirect"}
    assert both["Broadcast"] == {"Ring"}
    assert both["AllGather"] == {"Ring", "CollNetDirect"}
    assert allowed("^ring", ALGORITHMS)["AllReduce"] == set(ALGORITHMS) - {"Ring"}
    with pytest.raises(ValueError, match="is not one of Tree"):
        allowed("rnig", ALGORITHMS)
    with pytest.raises(ValueError, match="is not a collective"):
        allowed("allredcue:ring", ALGORITHMS)


NAMES = (LEVEL, ALGO, BUFFER, MAX, NET, "NCCL_Q")
VALUES = ("²", "9" * 5000, "0" * 5000, ":", ";", "^", "٣")
VALUE = st.text(max_size=8) | st.sampled_from(VALUES)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), VALUE), st.booleans())
def test_judge_never_raises(asked, other):
    logs = [capture("dgx1_gpus_0_3_p2p_level_1"), made(), None]
    for log in logs:
        for finding in check_settings(asked, log, logs[1] if other else None, NV):
            assert finding.severity in ("invalid", "suspect", "finding", "unchecked")
            assert finding.sentence


# Several hosts


HOSTS = ("a", "b")
ACROSS = tuple(f"{host}:{gpu}" for host in HOSTS for gpu in (0, 1))
INSIDE = {f"{host}:0-1": "NV18" for host in HOSTS}


def of_hosts(using, via, nodes=2):
    """The log of two ranks on each of two hosts, all of one host name and the same process ids."""
    texts = []
    for rank in range(4):
        peer, here = (rank + 1) % 4, rank // 2
        member = f"ncclCommInitRankConfig comm 0x{rank}a rank {rank} nranks 4 cudaDev {rank % 2}"
        member += f" nvmlDev {rank % 2} busId {rank % 2}0 commId 0x1 - Init"
        word = "P2P/CUMEM" if peer // 2 == here else via
        end = "" if peer // 2 == here else "[send] "
        bodies = ["Bootstrap: Using eth0", using[here], "Using network IB", f"{member} START"]
        bodies += [
            f"comm 0x{rank}a rank {rank} nRanks 4 nNodes {nodes} localRanks 2"
            f" localRank {rank % 2} MNNVL 0",
            f"{member} COMPLETE",
            f"Channel 00/0 : {rank}[{rank % 2}] -> {peer}[{peer % 2}] {end}via {word}",
        ]
        if rank % 2 == 0:  # the first of a host receives from the last of the other
            bodies.append(f"Channel 00/0 : {(rank + 3) % 4}[1] -> {rank}[0] [receive] via {via}")
        texts.append("".join(f"vm:{rank % 2 + 1}:1 [0] NCCL INFO {body}\n" for body in bodies))
    return parse_nccl_log(*texts, hosts=[HOSTS[rank // 2] for rank in range(4)])


EVERY = range(4)
TWO_CARDS = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
ETH, IB = "[0]eth0:10.0.0.1<0>", "[0]ib0:10.0.0.2<0> [1]lo:127.0.0.1<0>"
BY_HOST = {0: ("eth0",), 1: ("eth0",), 2: ("ib0",), 3: ("ib0",)}
ROCE = "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [2]mlx5_2:1/RoCE ; OOB eth0"
VIRTUAL = "NET/IB : Made virtual device [4] name=mlx5_0+mlx5_1 speed=800000 ndevs=2"
NO_PLUGIN = "NET/Plugin: Could not find: libnccl-net.so"
AWS = "NET/AWS Libfabric"
# Lines of the two hosts, a transport, the devices of each rank, what is said of it.
DEVICES = [
    ([TWO_CARDS] * 2, "NET/IB/1/GDRDMA", dict.fromkeys(EVERY, ("mlx5_1",)), "NET/IB/GDRDMA"),
    ([f"NET/Socket : Using {one}" for one in (ETH, IB)], "NET/Socket/0", BY_HOST, "NET/Socket"),
    ([ROCE] * 2, "NET/IB/0", dict.fromkeys(EVERY, ("mlx5_0+mlx5_1",)), "NET/IB"),
    ([VIRTUAL] * 2, "NET/IB/4(5)/GDRDMA(PCI)", dict.fromkeys(EVERY, ("mlx5_0+mlx5_1",)),
     "NET/IB/GDRDMA(PCI)"),
    ([NO_PLUGIN] * 2, f"{AWS}/3", dict.fromkeys(EVERY, (f"{AWS}/3",)), AWS),
]  # fmt: skip
KINDS = ["IB", "Socket", "RoCE", "virtual", "plugin"]


@pytest.mark.parametrize(("using", "via", "named", "said"), DEVICES, ids=KINDS)
def test_net_lines_name_the_network_devices_of_every_rank(using, via, named, said):
    log = of_hosts(using, via)
    assert (log.nranks, log.nodes, log.lost) == (4, 2, 0), log.notes
    assert log.nics == named
    assert describe_transport(log, INSIDE, ACROSS) == f"{said} + P2P/CUMEM over NV18"
    assert pair_class("1->2", log, INSIDE, ACROSS) == "NET"
    assert pair_class("2->3", log, INSIDE, ACROSS) == "NV18"
    assert [device.host for device in log.communicators[0].devices.values()] == ["a", "a", "b", "b"]
    # What a level allows says nothing of hosts.
    found = check_settings({"NCCL_P2P_LEVEL": "NVL"}, log, None, INSIDE, gpus=ACROSS)
    assert not [one for one in found if one.code == "transport_unexpected"]


def test_nccl_that_sees_another_number_of_hosts_is_told():
    cell = make_cell((0, 1), device="cuda", hosts=HOSTS)
    record = make_record(cell=cell)
    using = ["NET/Socket : Using [0]eth0:10.0.0.1<0>"] * 2
    (found,) = hosts_seen(of_hosts(using, "NET/Socket/0", nodes=1), record)
    assert (found.code, found.severity) == ("hosts_unexpected", "suspect")
    assert "on 1 host, and the run has 2" in found.sentence
    assert not hosts_seen(of_hosts([""] * 2, "NET/Socket/0"), record)
    assert not hosts_seen(of_hosts([""] * 2, "NET/Socket/0"), make_record())


GDR, HCA = "NCCL_NET_GDR_LEVEL", "NCCL_IB_HCA"


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        (NET, "IB", False),
        (NET, "Socket", True),
        (GDR, "LOC", True),
        (GDR, "SYS", False),
        (HCA, "mlx5_1", False),
        (HCA, "mlx5", False),
        (HCA, "=mlx5", True),
        (HCA, "=mlx5_0:1,mlx5_1:1", False),
        (HCA, "^mlx5_1", True),
        (HCA, "^=mlx5_0", False),
        ("NCCL_SOCKET_IFNAME", "eth9", False),  # of another network than the one in use
        (IB_OFF, "1", True),
    ],
)
def test_a_network_that_was_ruled_out_is_seen_in_the_log(name, value, wrong):
    line = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:10.0.0.1<0>"
    log = of_hosts([line] * 2, "NET/IB/1/GDRDMA")
    found = check_settings({name: value}, log, None, INSIDE, gpus=ACROSS)
    assert bool([one for one in found if one.code == "transport_unexpected"]) == wrong, found
