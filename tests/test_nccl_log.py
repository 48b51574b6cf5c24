"""The parser of NCCL's log: the dialects of 2.4 to 2.30 rendered from a model, and damage.

What each capture says is in tests/golden/nccl_log.txt."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.input_files import UnreadableInput
from analysis.nccl.log import parse_nccl_log

DATA = Path(__file__).parent / "data"
BUDGET = settings(derandomize=True, max_examples=60, deadline=None)


def capture(name):
    return (DATA / f"nccl_{name}.log").read_text()


def test_a_file_per_rank_reads_as_one_interleaved_file():
    whole = capture("h200_x8_default")
    rows = whole.splitlines(keepends=True)
    texts = ["".join(row for row in rows if f"vm:{pid}:" in row) for pid in range(8655, 8663)]
    assert parse_nccl_log(*texts).to_json() == parse_nccl_log(whole).to_json()


@dataclass(frozen=True)
class Model:
    version: str
    nvml: tuple[int, ...]
    ring: tuple[int, ...]
    channels: int
    words: tuple[str, ...]  # of the connection that leaves ring[i]
    values: tuple[tuple[str, str], ...]
    choices: tuple[tuple[str, int, int, int], ...]  # function, bytes, algorithm, protocol
    prefix: str

    @property
    def v(self):
        return numbers(self.version)


VERSIONS = [
    "2.4.8",
    "2.7.8",
    "2.8.4",
    "2.12.12",
    "2.14.3",
    "2.18.3",
    "2.22.3",
    "2.23.4",
    "2.28.9",
    "2.30.7",
]
ALGORITHMS = [("Tree", "TREE"), ("Ring", "RING"), ("CollNetDirect", "COLLNET_DIRECT")]
PROTOCOLS = [("LL", "LL"), ("LL128", "LL128"), ("Simple", "SIMPLE")]
INTEGERS = ["NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_NTHREADS"]


def numbers(version):
    return tuple(map(int, version.split(".")))


def words_of(version):
    v = numbers(version)
    words = ["P2P/IPC", "P2P/direct pointer", "NET/IB/0/GDRDMA", "NET/Socket/1"]
    words += ["P2P/CUMEM", "P2P/CUMEM/read"] if v >= (2, 18) else []
    words += ["P2P/IPC/read", "P2P/indirect"] if v >= (2, 8) else []
    words += ["NET/IB/0(1)/GDRDMA(PCI)/Shared"] if v >= (2, 26) else []
    return [*words, "SHM/direct" if v < (2, 13) or v >= (2, 30) else "SHM/direct/direct"]


def settings_of_one_process():
    integer = st.tuples(st.sampled_from(INTEGERS), st.integers(-2, 2**22).map(str))
    level = st.tuples(st.just("NCCL_P2P_LEVEL"), st.sampled_from(["LOC", "NVL", "SYS"]))
    selections = st.sampled_from(["Ring", "allreduce:tree;broadcast:ring"])
    every = st.one_of(integer, level, st.tuples(st.just("NCCL_ALGO"), selections))
    return st.lists(every, max_size=3, unique_by=lambda item: item[0]).map(tuple)


@st.composite
def models(draw):
    version = draw(st.sampled_from(VERSIONS))
    size = draw(st.integers(2, 6))
    function = st.sampled_from(["AllReduce", "Broadcast", "AllGather"])
    choice = st.tuples(function, st.integers(1, 10**9), st.integers(0, 2), st.integers(0, 2))
    words = st.lists(st.sampled_from(words_of(version)), min_size=size, max_size=size)
    return Model(
        version=version,
        nvml=tuple(draw(st.permutations(range(8)))[:size]),
        ring=(0, *draw(st.permutations(range(1, size)))),
        channels=draw(st.integers(1, 12)),
        words=tuple(draw(words)),
        values=draw(settings_of_one_process()),
        choices=tuple(draw(st.lists(choice, max_size=3, unique=True))),
        prefix=draw(st.sampled_from(["pid", "time", "none"])),
    )


def bus(index):
    return f"{(index + 6) * 0x1000 + 0xA000:x}"


def connection(model, channel, at):
    """The lines of ranks for one connection: [(rank, line)]."""
    source, target, word = model.ring[at], model.ring[(at + 1) % len(model.ring)], model.words[at]
    if word == "SHM/direct" and model.v < (2, 13):
        word = "direct shared memory"
    if word == "P2P/indirect":
        word += "/0[1]" if model.v >= (2, 18) else "/0[b000]"
    net = word.startswith("NET")
    slash = (net and model.v >= (2, 12)) or (word.startswith("P2P") and model.v >= (2, 14))
    head = f"{'Ring' if model.v < (2, 7) else 'Channel'} {channel:02d}{'/0' if slash else ''} :"

    def end(rank):
        if model.v < (2, 5):
            return f"{rank}" if net else f"{rank}[{model.nvml[rank]}]"
        return f"{rank}[{model.nvml[rank] if model.v >= (2, 18) else bus(model.nvml[rank])}]"

    body = f"{head} {end(source)} -> {end(target)}"
    if net:
        receive = word.split("(1)")[0] + "/GDRDMA(PCI)/Shared" if "(1)" in word else word
        return [(source, f"{body} [send] via {word}"), (target, f"{body} [receive] via {receive}")]
    return [(source, f"{body} via {word}")]


def member(model, rank, with_nvml):
    """The beginning of a line on a rank's communicator."""
    index = model.nvml[rank]
    where = f"cudaDev {rank} nvmlDev {index}"
    if model.v >= (2, 5):
        where = f"cudaDev {rank}{f' nvmlDev {index}' if with_nvml else ''} busId {bus(index)}"
    name = "ncclCommInitRank " if model.v >= (2, 21) else ""
    ident = " commId 0xabc" if model.v >= (2, 16) else ""
    size = len(model.ring)
    return f"{name}comm 0x{rank + 16:x} rank {rank} nranks {size} {where}{ident} - Init "


def choice_line(model, function, size, algorithm, protocol):
    if model.v >= (2, 24):
        names = f"Algo {ALGORITHMS[algorithm][1]} proto {PROTOCOLS[protocol][1]}"
        return f"{function}: {size} Bytes -> {names} channel{{Lo..Hi}}={{0..{model.channels - 1}}}"
    head = f"{function}: " if model.v >= (2, 23) else ""
    return f"{head}{size} Bytes -> Algo {algorithm} proto {protocol} time 12.500000"


def render(model):
    """The lines of each rank, in order, without prefix."""
    size, channels = len(model.ring), range(model.channels)
    lines = {rank: [] for rank in range(size)}
    for rank in range(size):
        add = lines[rank].append
        add("Bootstrap : Using eth0:192.0.2.2<0>")
        add(f"NCCL version {model.version}+cuda12.4")
        add("Using network IB")
        if model.v >= (2, 18):
            add(member(model, rank, True) + "START")
        for name, value in model.values:
            stop = "." if name in INTEGERS else ""
            shown = str(int(value) % 2**64) if stop and model.v < (2, 12) else value
            add(f"{name} set by environment to {shown}{stop}")
        for channel in channels if rank == 0 else ():
            count = f"/{model.channels:02d}" if model.v >= (2, 5) else ""
            ranks = "".join(f" {r}" if model.v >= (2, 23) else f" {r:3d}" for r in model.ring)
            add(f"Channel {channel:02d}{count} :{ranks}")
        if model.v >= (2, 7):
            counts = [f"{model.channels} coll channels"]
            counts += [f"{model.channels} collnet channels"] if model.v >= (2, 20) else []
            counts += ["0 nvls channels"] if model.v >= (2, 17) else []
            add(", ".join([*counts, f"{model.channels} p2p channels, 2 p2p channels per peer"]))
        if model.v >= (2, 22):
            add(member(model, rank, True) + "COMPLETE")
    for channel in channels:
        for at in range(size):
            for rank, line in connection(model, channel, at):
                lines[rank].append(line)
    for rank in range(size):
        lines[rank].append("Connected all rings")
        if model.v < (2, 22):
            lines[rank].append(member(model, rank, model.v >= (2, 18)) + "COMPLETE")
    if model.v >= (2, 20):
        lines[0] += [choice_line(model, *choice) for choice in model.choices]
    return lines


def prefixed(model, lines):
    def prefix(rank):
        if model.prefix == "none":
            return "NCCL INFO "
        stamp = "[2026-01-02 03:04:05] " if model.prefix == "time" else ""
        return f"{stamp}node-1:{100 + rank}:{200 + rank} [{rank}] NCCL INFO "

    return {rank: [prefix(rank) + line for line in own] for rank, own in lines.items()}


def interleaved(lines, seed):
    """[(rank, line)] in a random order that keeps each rank's own."""
    chance = random.Random(seed)
    left = {rank: list(own) for rank, own in lines.items()}
    order = []
    while any(left.values()):
        rank = chance.choice([rank for rank, own in left.items() if own])
        order.append((rank, left[rank].pop(0)))
    return order


def expected_transports(model):
    result = {}
    for at, source in enumerate(model.ring):
        target = model.ring[(at + 1) % len(model.ring)]
        words = {model.words[at]}
        if "(1)" in model.words[at]:
            words.add("NET/IB/0/GDRDMA(PCI)/Shared")
        result[f"{source}->{target}"] = tuple(sorted(words))
    return result


def expected_settings(model):
    return {
        name: str(int(value) % 2**64) if model.v < (2, 12) and name in INTEGERS else value
        for name, value in model.values
    }


def expected_choices(model):
    if model.v < (2, 20):
        return {}
    counted = {}
    for function, size, algorithm, protocol in model.choices:
        channels = model.channels if model.v >= (2, 24) else None
        names = (ALGORITHMS[algorithm][0], PROTOCOLS[protocol][0])
        key = (function if model.v >= (2, 23) else None, size, *names, channels)
        counted[key] = counted.get(key, 0) + 1
    return counted


def chosen(log):
    return {
        (c.function, c.size, c.algorithm, c.protocol, c.channels): c.calls for c in log.algorithms
    }


def check_whole(model, log):
    assert log.version == model.version
    assert log.nranks == len(model.ring)
    assert log.transports == expected_transports(model)
    collective, source = (
        model.channels if model.v >= (2, 5) else None,
        "summary" if model.v >= (2, 7) else None,
    )
    assert log.channels["collective"] == collective
    assert source is None or log.channels_from == source
    assert log.channels["nvls"] == (0 if model.v >= (2, 17) else None)
    assert log.rings == {channel: model.ring for channel in range(model.channels)}
    assert log.settings == expected_settings(model)
    assert chosen(log) == expected_choices(model)
    (communicator,) = log.communicators
    for rank, index in enumerate(model.nvml):
        device = communicator.devices[rank]
        if model.v >= (2, 18) or model.v < (2, 5):
            assert device.nvml == index
        if model.v >= (2, 5):
            assert device.bus_id == bus(index)
    assert len(communicator.devices) == len(model.nvml)
    assert (log.notes, log.lost, log.truncated) == ((), 0, False)


@BUDGET
@given(models(), st.integers(0, 999))
def test_parse_of_render_is_the_model(model, seed):
    lines = prefixed(model, render(model))
    check_whole(model, parse_nccl_log("".join(f"{line}\n" for _, line in interleaved(lines, seed))))
    by_rank = ["".join(f"{line}\r\n" for line in own) for own in lines.values()]
    check_whole(model, parse_nccl_log(*by_rank))


def check_part(model, text):
    """Nothing in the log of a damaged text may differ from the model; anything may be missing.

    test_damaged_files cuts captures and loses lines of them.
    """
    try:
        log = parse_nccl_log(text)
    except UnreadableInput:
        return
    truth = expected_transports(model)
    for pair, words in log.transports.items():
        assert set(words) <= set(truth[pair])
    assert log.nranks in (None, len(model.ring))
    assert log.version in (None, model.version)
    assert log.channels["collective"] in (None, model.channels)
    assert log.channels["p2p"] in (None, model.channels)
    assert log.channels["nvls"] in (None, 0)
    assert log.channels["p2p_per_peer"] in (None, 2)
    assert all(ring == model.ring for ring in log.rings.values())
    assert log.settings.items() <= expected_settings(model).items()
    assert log.conflicts == {}
    counted = expected_choices(model)
    assert all(calls <= counted[key] for key, calls in chosen(log).items())
    for rank, device in log.communicators[0].devices.items():
        assert device.nvml in (None, model.nvml[rank])
        assert device.bus_id in (None, bus(model.nvml[rank]))


@BUDGET
@given(models(), st.integers(0, 999), st.integers(0, 9999))
def test_lines_torn_between_ranks_are_counted_and_never_half_read(model, seed, chance_seed):
    chance = random.Random(chance_seed)
    rows = [line for _, line in interleaved(prefixed(model, render(model)), seed)]
    out, tears = [], 0
    while rows:
        if len(rows) > 2 and chance.random() < 0.1:
            # three writers: heads of the first and second, the third whole, then the tails
            cuts = [chance.randrange(len("NCCL INFO "), len(row)) for row in rows[:2]]
            heads = [row[:cut] for row, cut in zip(rows, cuts, strict=False)]
            if all("NCCL INFO " in head for head in heads):
                tails = [row[cut:] for row, cut in zip(rows, cuts, strict=False)]
                out += [heads[0] + rows[2], heads[1] + tails[0], tails[1]]
                del rows[:3]
                tears += 1
                continue
        out.append(rows.pop(0))
    text = "".join(f"{row}\n" for row in out)
    check_part(model, text)
    if tears:
        assert any("torn between ranks" in note for note in parse_nccl_log(text).notes)


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
    assert has_note(log, "2 communicators; this is the largest")
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
NUMBERS = (
    f"Channel {NINES}/0 : 0[0] -> 1[1] via P2P/IPC",
    f"{NINES} coll channels, 1 p2p channels, 1 x",
    f"AllReduce: {NINES} Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}",
    f"NCCL version {NINES}.1",
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
        (HEAD + info(f"{BUFFERS} 4194304.")[:-5], {"truncated": True, "settings": {}}, ""),
    ],
    ids=["mixed", "newer", "newer word", "unknown word", "warning", "error", "multicast",
         "no peer access", "conflict", "NUL", "cut writer", "numbers", "unfinished"],
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
