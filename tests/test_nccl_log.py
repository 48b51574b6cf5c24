"""The parser of NCCL's log: one file or one for each rank, torn lines, communicators, damage.

What each capture says, and one made log in each dialect of 2.4 to 2.30 (tests/data/nccl_dialects,
with and without prefixes), is in tests/golden/nccl_log.txt.
"""

import random
import re

import pytest
from build import DATA
from damage import differences

from analysis.input_files import UnreadableInput
from analysis.nccl.log import parse_nccl_log

DIALECTS = sorted((DATA / "nccl_dialects").glob("*.log"))
# What follows from how much of a log is there.
FOLLOWS = ("/processes", "/announced_by/.*", "/channels_from", "/nics/.*")
FOLLOWS += (r"/algorithms/\*/calls", "/network")


def capture(name):
    return (DATA / f"nccl_{name}.log").read_text()


@pytest.mark.parametrize(
    "path",
    [DATA / "nccl_h200_x8_default.log", *(one for one in DIALECTS if "plain" not in one.name)],
    ids=lambda path: path.stem,
)
def test_a_file_for_each_rank_reads_as_one_interleaved_file(path):
    whole, by_rank = path.read_text(), {}
    for row in whole.splitlines():
        rank = re.search(r":(\d+):\d+ \[", row)
        if rank:
            by_rank[rank[1]] = by_rank.get(rank[1], "") + f"{row}\r\n"
    assert len(by_rank) > 1
    assert parse_nccl_log(*by_rank.values()).to_json() == parse_nccl_log(whole).to_json()


def torn(rows, chance):
    """Rows of which some were written by three at once, and how often that happened.

    The heads of the first and second, the third whole, then the tails.
    """
    rows, out, tears = list(rows), [], 0
    while rows:
        if len(rows) > 2 and chance.random() < 0.1:
            cuts = [chance.randrange(len("NCCL INFO "), len(row)) for row in rows[:2]]
            heads = [row[:cut] for row, cut in zip(rows, cuts, strict=False)]
            if all("NCCL INFO " in head for head in heads):
                tails = [row[cut:] for row, cut in zip(rows, cuts, strict=False)]
                out += [heads[0] + rows[2], heads[1] + tails[0], tails[1]]
                del rows[:3]
                tears += 1
                continue
        out.append(rows.pop(0))
    return "".join(f"{row}\n" for row in out), tears


@pytest.mark.parametrize("path", DIALECTS, ids=lambda path: path.stem)
def test_lines_torn_between_ranks_are_counted_and_never_half_read(path):
    whole = parse_nccl_log(path.read_text()).to_json()
    for seed in range(5):
        text, tears = torn(path.read_text().splitlines(), random.Random(seed))
        log = parse_nccl_log(text)
        assert list(differences(log.to_json(), whole, FOLLOWS)) == [] and log.conflicts == {}
        assert not tears or any("torn between ranks" in note for note in log.notes)


HEAD = "vm:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"


def info(*bodies, pid=1, host="vm"):
    return "".join(f"{host}:{pid}:{pid} [0] NCCL INFO {body}\n" for body in bodies)


def initialised(comm, rank, size, gpu, pid):
    """The lines of one member of a communicator."""
    line = f"ncclCommInitRank comm 0x{comm}{rank} rank {rank} nranks {size} cudaDev {gpu}"
    line += f" nvmlDev {gpu} busId {gpu}0 commId 0x{comm} - Init"
    return info(f"{line} START", f"{line} COMPLETE", pid=pid)


def has_note(log, words):
    return any(words in note for note in log.notes)


def test_two_communicators_the_largest_is_taken_and_the_other_listed():
    text = HEAD
    for gpu in range(4):
        text += initialised("a", gpu, 4, gpu, gpu)
    counts = "{0} coll channels, {0} collnet channels, 0 nvls channels, {1} p2p channels, "
    counts += "{1} p2p channels per peer"
    text += info(counts.format(24, 32))
    for gpu in (2, 3):
        text += initialised("b", gpu - 2, 2, gpu, gpu) + info(counts.format(2, 2), pid=gpu)
    # both connect at their first collective, mixed; ranks and NVML indices tell them apart
    text += info("Channel 00 : 0[2] -> 1[3] via SHM/direct/direct", pid=2)
    text += info("Channel 00/0 : 2[2] -> 3[3] via P2P/CUMEM", pid=2)
    text += info("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", pid=0)
    log = parse_nccl_log(text)
    assert log.nranks == 4
    assert log.transports == {"0->1": ("P2P/CUMEM",), "2->3": ("P2P/CUMEM",)}
    assert [(comm.name, comm.nranks) for comm in log.communicators] == [("0xa", 4), ("0xb", 2)]
    assert has_note(log, "2 communicators; shown is the largest")
    assert log.channels["collective"] in (None, 24)


def test_a_connection_that_fits_two_communicators_differently_is_not_used():
    text = HEAD
    for comm, size in (("a", 3), ("b", 2)):
        for rank in range(size):
            text += initialised(comm, rank, size, rank, rank + 1)
    text += info("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", pid=1)
    log = parse_nccl_log(text)
    assert log.transports == {"0->1": ("P2P/CUMEM",)}
    assert has_note(log, "fit several communicators and agree on the transport")
    log = parse_nccl_log(text + info("Channel 01 : 0[0] -> 1[1] via SHM/direct/direct", pid=1))
    assert log.transports == {}
    assert has_note(log, "differ in the transport: not used")


def test_split_communicators_without_commid():
    text = HEAD + "".join(initialised("a", rank, 4, rank, rank + 1) for rank in range(4))
    for rank in range(4):
        line = f"ncclCommSplit comm 0xb{rank} rank {rank % 2} nranks 2 cudaDev {rank}"
        line += f" nvmlDev {rank} busId {rank}0 parent 0xa{rank}"
        line += f" splitCount 1 color {rank // 2} key {rank}"
        text += info(f"{line}- Init START", f"{line} - Init COMPLETE", pid=rank + 1)
    log = parse_nccl_log(text)
    members = [[device.nvml for device in comm.devices.values()] for comm in log.communicators]
    assert members == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert [comm.nranks for comm in log.communicators] == [4, 2, 2]


NEW = HEAD.replace("2.28.9", "2.41.0")
QUANTUM = "Channel 00/0 : 0[0] -> 1[1] via P2P/QUANTUM"
MIXED = (
    "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    "Channel 00 : 0[2] -> 1[3] via SHM/direct/direct",
)
WARNING = (
    "\n[2026-01-02 03:04:05] vm:1:9 [0] misc/socket.cc:12 (ncclSocket) "
    "NCCL WARN Call to recv failed\n"
)
NO_MULTICAST = "NVLS multicast support is not available on dev 0 (NVLS_NCHANNELS 0)"
NO_PEERS = (
    "P2P is disabled between connected GPUs 1 and 0. You can repress this message with "
    "NCCL_IGNORE_DISABLED_P2P=1."
)
BUFFERS = "NCCL_BUFFSIZE set by environment to"
NULS = ("NCCL_ALGO set by environment to Ri\0\0", "NCCL_PROTO set by environment to LL")
NINES = "9" * 5000
LONG = f"AllReduce: {NINES[:400]} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}"
NUMBERS = (
    f"Channel {NINES}/0 : 0[0] -> 1[1] via P2P/IPC",
    f"{NINES} coll channels, 1 p2p channels, 1 x",
    f"AllReduce: {NINES} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}",
    f"NCCL version {NINES}.1",
    f"AllReduce: 8 Bytes -> Algo {NINES} proto LL channel{{Lo..Hi}}={{0..0}}",
    "AllReduce: 8 Bytes -> Algo ² proto LL channel{Lo..Hi}={0..0}",
)


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (HEAD + info(*MIXED), {"transports": {}}, "no line says which belong together"),
        (NEW + info(QUANTUM), {"version": "2.41.0", "transports": {"0->1": ("P2P/QUANTUM",)}},
         "newer than the newest release known"),
        (NEW + info(QUANTUM), {}, "P2P/QUANTUM"),
        (HEAD + info(QUANTUM), {"transports": {}}, "P2P/QUANTUM"),
        (HEAD + WARNING, {"warnings": ("Call to recv failed",), "errors": ()}, ""),
        (HEAD + info("transport/net.cc:77 -> 6"), {"errors": ("transport/net.cc:77 -> 6",)}, ""),
        (HEAD + info(NO_MULTICAST), {"multicast": False}, ""),
        (HEAD + info(NO_PEERS, NO_PEERS), {"no_peer_access": (NO_PEERS.split(". ")[0],)}, ""),
        (HEAD + info(f"{BUFFERS} 1.", pid=1) + info(f"{BUFFERS} 2.", pid=2),
         {"settings": {}, "conflicts": {"NCCL_BUFFSIZE": ("1", "2")}}, ""),
        (HEAD + info(*NULS), {"settings": {"NCCL_PROTO": "LL"}, "lost": 1}, "NUL"),
        (info("a", host="m") + info("b", "c"), {"processes": 1}, ""),  # the first lost its front
        (HEAD + info(*NUMBERS), {"transports": {}, "version": "2.28.9"}, ""),
        (NEW + info(f"Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/{NINES}"), {}, ""),
        (HEAD + info(LONG), {"algorithms": ()}, "in an unknown form"),
        (HEAD + info(f"{BUFFERS} 4194304.")[:-5], {"truncated": True, "settings": {}}, ""),
    ],
    ids=["mixed", "newer", "newer word", "unknown word", "warning", "error", "multicast",
         "no peer access", "conflict", "NUL", "cut writer", "numbers", "device", "400 digits", "unfinished"],
)  # fmt: skip
def test_single_lines(text, expected, note):
    log = parse_nccl_log(text)
    assert {name: getattr(log, name) for name in expected} == expected
    assert not note or has_note(log, note)


def test_a_cut_ring_is_not_a_small_one():
    cut = "Channel 00/04 : " + " ".join(map(str, range(38))) + " 3..."
    log = parse_nccl_log(HEAD + info(cut))
    assert log.nranks is None
    assert log.rings == {}
    assert log.channels["collective"] == 4
    twenty = "Channel 00/02 : " + " ".join(f"{rank:3d}" for rank in range(20))
    assert parse_nccl_log(HEAD.replace("2.28.9", "2.12.12") + info(twenty)).nranks is None


def test_a_log_cut_inside_a_line_says_so_at_every_offset():
    text = capture("dgx1_gpus_0_3_p2p_level_1")
    for cut in range(text.index("\n") + 1, len(text), 3):
        inside = text[cut - 1] != "\n" and text[:cut].rpartition("\n")[2].strip() != ""
        assert parse_nccl_log(text[:cut]).truncated == inside, cut


@pytest.mark.parametrize(
    "text", ["", "\0" * 1000, "Epoch 1/3\n", "GPU0\tGPU1\n X \tNV18\n", "NCCL INFO cut"]
)
def test_foreign_text_is_refused_with_what_was_expected(text):
    with pytest.raises(UnreadableInput, match="NCCL_DEBUG=INFO"):
        parse_nccl_log(text)
    with pytest.raises(UnreadableInput):
        parse_nccl_log()


LONG = "\0" * 2**20 + "\n" + "x" * 2**20 + "\n" + "[" * 2**20 + "NCCL INFO \n"
LONG += "a:1:" * 2**18 + " NCCL INFO z\n"
KNOWN = ("Channel 00/04 :" + " 1" * 400_000, " " * 2**20 + "-> 3")


@pytest.mark.parametrize(
    "text", [HEAD + LONG, HEAD + info(*KNOWN)], ids=["long lines", "long known lines"]
)
@pytest.mark.timeout(60)  # a pattern that backtracks would take hours
def test_long_logs_do_not_hang_the_reader(text):
    assert parse_nccl_log(text).version == "2.28.9"
