"""The faults that an audit planted (2026-11), at the smallest sizes that checks claim to see.

They are planted in cells of two real H200s. `FAULTS` names each, what plants it, and the codes that
must find it. Two of the audit's faults nothing tells: an exchange beside compute that is 3 times too
slow (its share of the reference, 26 %, is shown; clean exchanges have 21 to 119 %), and a thread
that multiplies matrices beside the exchange (samples do not tell it from its process).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planted import (
    ALONE,
    edit_json,
    edit_lines,
    gpu_cell,
    log_nccl,
    made,
    repeat_windows,
    sample_cpu,
    sample_gpus,
)

from benchmarks.record import read_lines

LOC = {"nccl": {"NCCL_P2P_LEVEL": "LOC"}}
LOWER_CASE = {"nccl": {"NCCL_P2P_LEVEL": "loc"}}
ANNOUNCED = {"NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
HEAT, POWER_CAP = 0x40, 0x04
GIB = 1 << 30


@dataclass(frozen=True)
class Fault:
    """`plant(folder)` changes raw files before the record is made."""

    name: str
    codes: tuple[str, ...]
    plant: Callable[[Any], None]
    cell: dict[str, Any]
    verdict: str


# Ranks, GPUs, settings


def exchange_uuids(folder):
    first, second = (next(read_lines(folder.rank_lines(rank)))["uuid"] for rank in (0, 1))
    edit_lines(folder, 0, lambda line: line.update(uuid=second), kind="start")
    edit_lines(folder, 1, lambda line: line.update(uuid=first), kind="start")


def exchange_files(folder):
    first, second = map(folder.rank_lines, (0, 1))
    texts = first.read_bytes(), second.read_bytes()
    first.write_bytes(texts[1])
    second.write_bytes(texts[0])


def die(folder):
    edit_lines(folder, 1, lambda line: [], kind="done")


def logged(announced, transport="P2P/CUMEM", channels=24, ranks=None):
    said = ANNOUNCED | announced
    return lambda folder: log_nccl(folder, (0, 1), said, transport, channels, ranks)


def by_rank_one(folder):
    """Only rank 0 announces LOC; rank 1 connects by P2P."""
    logged({"NCCL_P2P_LEVEL": "LOC"}, "SHM/direct/direct", ranks=[0])(folder)
    path = folder.nccl_logs()[1]
    text = path.read_text().replace("Channel 00 :", "Channel 00/0 :")
    path.write_text(text.replace("SHM/direct/direct", "P2P/CUMEM"))


# Around the cell


def sampled(change):
    """Plant samples of the GPUs: `change(phase, gpu)` for the samples of a phase."""
    return lambda folder: sample_gpus(folder, 2, change)


def during(*phases, **sample):
    return sampled(lambda phase, gpu: sample if phase in phases else {})


def before(**sample):
    return sampled(lambda phase, gpu: sample if phase is None else {})


def one_heat_sample(folder):
    """A single sample of one GPU in the timed window."""
    left = [{"reasons": HEAT}]

    def change(phase, gpu):
        return left.pop() if phase == "timed" and gpu == 1 and left else {}

    sample_gpus(folder, 2, change)


def arrive(folder):
    """20 GiB more on one GPU from the second sample of the timed window on."""
    seen = []

    def change(phase, gpu):
        seen.extend(["timed"] * (phase == "timed" and gpu == 1))
        return {"memory_bytes": 60 * GIB} if gpu == 1 and len(seen) > 1 else {}

    sample_gpus(folder, 2, change)


def hidden(share):
    """A program in another container, begun with the windows: its memory shows, its pid does not."""

    def plant(folder):
        during("timed", "exposed", memory_bytes=(40 * GIB) + (GIB >> 1))(folder)
        windows(lambda ms, number: ms * (1 + share))(folder)

    return plant


def loaded(share):
    return lambda folder: sample_cpu(folder, lambda phase: share if phase == "timed" else 0.0)


def loaded_reference(folder):
    """Let references (`limits` in lines of then) take a second, as long as a CPU is judged by."""
    for rank in (0, 1):
        begun = [line for line in read_lines(folder.rank_lines(rank)) if "phase" in line]
        (opened,) = [line["time"] for line in begun if line["phase"] == "limits"]

        def later(line, opened=opened):
            line["time"] += line["time"] > opened

        edit_lines(folder, rank, later)
    sample_gpus(folder, 2)
    sample_cpu(folder, lambda phase: 0.5 if phase == "limits" else 0.0)


def remove(*names):
    def plant(folder):
        for name in names:
            for path in folder.path.glob(name):
                path.unlink()

    return plant


# Times


def windows(change, purpose="timed", ranks=(0, 1)):
    """Change windows: `change(ms, number)` of an iteration; both clocks of the window follow."""

    def plant(folder):
        for rank in ranks:
            done = [0]

            def stretch(line, done=done):
                ms = [change(one, done[0] + number) for number, one in enumerate(line["ms"])]
                longer = math.fsum(ms) - math.fsum(line["ms"])
                done[0] += len(ms)
                line["ms"] = ms
                line["device_ms"] += longer
                line["host_ms"] += longer

            edit_lines(folder, rank, stretch, kind="block", purpose=purpose)

    return plant


def baseline(slower, days=0):
    """Measure one GPU alone, slower by a share and days before. Return its records."""

    def plant(folder):
        alone = gpu_cell(folder.path.parent, ALONE, name="alone")
        windows(lambda ms, number: ms * (1 + slower), ranks=(0,))(alone)
        edit_json(
            alone.attempt, lambda begun: begun.update(started_at=begun["started_at"] - 86400 * days)
        )
        return [made(alone)]

    return plant


def multiply(name, factor, ranks=(0, 1), **wanted):
    """Multiply a value of the lines of some ranks."""

    def change(line):
        line[name] *= factor

    def plant(folder):
        for rank in ranks:
            edit_lines(folder, rank, change, **wanted)

    return plant


def clocks(share):
    return multiply("host_ms", 1 + share, kind="block", purpose="timed")


def clip(folder):
    """Samples above their 60th percentile are cut; the window lasts as long as before."""
    for rank in (0, 1):

        def cut(line):
            most = sorted(line["ms"])[int(0.3 * len(line["ms"]))] * 0.99
            line["ms"] = [min(one, most) for one in line["ms"]]

        edit_lines(folder, rank, cut, kind="block", purpose="timed")


def images(factor, ranks):
    return multiply("images", factor, ranks, kind="block", purpose="timed")


def slow_rank(share):
    """Rank 1 computes longer; in steps with an exchange rank 0 waits for it."""

    def slower(ms, number):
        return ms * (1 + share)

    def plant(folder):
        windows(slower, "without exchange", ranks=(1,))(folder)
        for purpose in ("timed", "with exchange"):
            windows(slower, purpose)(folder)

    return plant


def exchange(factor):
    return windows(lambda ms, number: ms * factor, "exchange")


def warm_up(excess, tau_s):
    """A step time that falls towards its end value, in a warm-up of 40 s.

    Ranks go on for 90 s at most until it is flat.
    """

    def falling(ms, number):
        return ms * (1 + excess * math.exp(-number * ms / 1e3 / tau_s))

    def plant(folder):
        for rank in (0, 1):
            repeat_windows(folder, rank, 11, kind="block", purpose="warm-up")
        windows(falling, "warm-up")(folder)

    return plant


def each_window(change):
    """Change timed windows in the same way: `change(ms, share of the window that has passed)`."""

    def plant(folder):
        for rank in (0, 1):

            def stretch(line):
                count = len(line["ms"]) - 1
                ms = [change(one, place / count) for place, one in enumerate(line["ms"])]
                longer = math.fsum(ms) - math.fsum(line["ms"])
                line.update(ms=ms, device_ms=line["device_ms"] + longer)
                line["host_ms"] += longer

            edit_lines(folder, rank, stretch, kind="block", purpose="timed")

    return plant


def lose_window(folder):
    """The second timed window is missing on both ranks."""
    for rank in (0, 1):
        every = read_lines(folder.rank_lines(rank))
        second = [line["time"] for line in every if line.get("purpose") == "timed"][1]
        edit_lines(folder, rank, lambda line: [], time=second, purpose="timed")


def twice(times=2, heartbeats=False, ranks=(0, 1)):
    """Timed windows are written more than once."""

    def plant(folder):
        for rank in ranks:
            if heartbeats:
                repeat_windows(folder, rank, times, purpose="timed")
            else:
                edit_lines(folder, rank, lambda line: [line] * times, purpose="timed")

    return plant


def lose_slowest(folder):
    """The slowest tenth of the samples is missing with its time, and with its images."""
    for rank in (0, 1):

        def cut(line):
            ms = line["ms"]
            limit_ms = sorted(ms)[int(0.9 * len(ms))]
            kept = [one for one in ms if one < limit_ms]
            lost = math.fsum(ms) - math.fsum(kept)
            line.update(ms=kept, images=line["images"] * len(kept) // len(ms))
            line.update(device_ms=line["device_ms"] - lost, host_ms=line["host_ms"] - lost)

        edit_lines(folder, rank, cut, kind="block", purpose="timed")


def lose_sample(folder):
    edit_lines(folder, 0, lambda line: line.update(ms=line["ms"][1:]), purpose="timed")
    edit_lines(folder, 1, lambda line: line.update(ms=line["ms"][1:]), purpose="timed")


def count_lead_in(folder):
    for rank in (0, 1):

        def change(line):
            line["ms"].insert(0, line["lead_in_ms"])

        edit_lines(folder, rank, change, kind="block", purpose="timed")


def other_versions(**versions):
    def plant(folder):
        edit_lines(folder, 1, lambda line: line["versions"].update(versions), kind="start")

    return plant


def other_threads(folder):
    edit_lines(folder, 1, lambda line: line.update(threads=1), kind="start")


def same_gpu(folder):
    uuid = next(read_lines(folder.rank_lines(0)))["uuid"]
    edit_lines(folder, 1, lambda line: line.update(uuid=uuid), kind="start")


def drift(share):
    return windows(lambda ms, number: ms * (1 + share * number / 72))


def longer_without_exchange(added_ms):
    return windows(lambda ms, number: ms + added_ms, "without exchange")


# What a rank found, in its `result` line


def fact(**facts):
    def plant(folder):
        edit_lines(folder, 0, lambda line: line["checks"].update(facts), kind="result")

    return plant


def arithmetic(**facts):
    right = {"autocast": "bfloat16", "layers": {"bfloat16": 54}, "tf32": False}
    return fact(arithmetic=right | facts)


def still(arrays, share):
    return fact(weights_still=arrays, weights_still_share=share, weights_still_first="fc.bias")


def stated_bytes(factor):
    """The bytes that the strategy says it moves."""
    return multiply("bytes_moved", factor, kind="exchange")


def capped(phase, gpu):
    return {"sm_mhz": 1794, "reasons": POWER_CAP} if phase and gpu == 1 else {}


def paused(ms, number):
    return ms + 250 * (number % 25 == 24)


def stepped(share):
    return windows(lambda ms, number: ms * (1 + share * (number >= 36)))


def halved_links(folder):
    """Every transfer between the GPUs takes twice as long."""
    for purpose in ("exchange", "ring", "ring gather", "ring all-reduce"):
        windows(lambda ms, number: 2 * ms, purpose)(folder)


def slow_reference(folder):
    for purpose in ("ring", "ring gather", "ring all-reduce"):
        windows(lambda ms, number: 1.5 * ms, purpose)(folder)


LOST = fact(gradient_worst={"array": "fc.bias", "tolerance": 1e-7, "error": 1.0})
INHERITED = logged({"NCCL_P2P_LEVEL": "LOC"}, "SHM/direct/direct")
INVALID = {
    # 1a: raw folders and records of H200s
    "wrong_gpu": {
        "wrong GPU order (UUIDs exchanged)": exchange_uuids,
        "both ranks on one GPU": same_gpu,
        "rank files exchanged": exchange_files,
    },
    "windows_repeated": {
        "every timed window written twice": twice(heartbeats=True),
        "windows written twice without their heartbeats": twice(),
    },
    "iterations_miscounted": {"a timed window of both ranks is missing": lose_window},
    "missing_rank": {"a rank died before it was done": die},
    "": {"a window written twice on one rank": twice(ranks=(0,))},  # the cell fails
    "setting_ignored transport_unexpected": {
        "LOC asked, NCCL ran without it": logged({}),
        "LOC ignored by rank 1 only": by_rank_one,
    },
    "setting_ignored": {"loc in lower case asked, NCCL ran without it": logged({})},
    "throttled": {
        "thermal slowdown in one sample of the timed window": one_heat_sample,
        "thermal slowdown while the exchange is timed": during("exchange", reasons=HEAT),
        "thermal slowdown in A B B A only": during("exposed", reasons=HEAT),
    },
    "foreign_load": {
        "a foreign process that the driver names": during("timed", foreign_pids=[4711]),
        "3 GiB in use before the start": before(memory_bytes=3 * GIB),
        "20 % busy before the start": before(busy_percent=20),
        "an invisible process, +20 GiB in the timed window": arrive,
    },
    "foreign_load_timed": {
        "a hidden program of 500 MiB, 10 % of a GPU from the first window on": hidden(0.1),
        "a hidden program of 500 MiB, 20 % of a GPU from the first window on": hidden(0.2),
        "a second process on a GPU, from the first window on": during("timed", processes=2),
    },
    "clocks_disagree": {
        "device clock 1.1 % off": clocks(0.011),
        "device clock 0.9 % off": clocks(0.009),
    },
    # 1b: what ranks find; asked of real ranks too, see ELSEWHERE
    "replicas_differ": {
        "no exchange, or weights of one rank drift by 1e-4": fact(replicas_equal=False)
    },
    "gradient_not_mean": {
        "sum instead of the mean": fact(gradient_error=1.0),
        "a bucket dropped": fact(gradient_error=0.7),
        "one array summed, bf16": LOST,
        "one array lost, bf16": LOST,
        "0.1 % of all elements lost, bf16": fact(gradient_error=3.1e-2),
        "unasked fp16 hook, fp32": fact(gradient_error=3.1e-4),
        "unasked bf16 hook, bf16": fact(gradient_error=1.7e-3),
    },
    "images_miscounted": {
        "images counted twice": images(2, (0, 1)),
        "half a batch on rank 1": images(0.5, (1,)),
        "255 of 256 images on both ranks": images(255 / 256, (0, 1)),
        "255 of 256 images on one rank": images(255 / 256, (1,)),
    },
    "loss_not_finite": {"a loss that is NaN on one rank": fact(losses=[6.3, "nan"])},
    "batches_not_distinct": {
        "the same batch on all ranks": fact(batches_differ=False),
        "one batch instead of two": fact(batches_in_turn=1),
    },
    "precision_not_used": {
        "autocast off where bf16 was asked": arithmetic(autocast=None, layers={"float32": 54}),
        "half of the layers in float32": arithmetic(layers={"bfloat16": 28, "float32": 26}),
        "a fifth of the layers in float32": arithmetic(layers={"bfloat16": 43, "float32": 11}),
    },
    "not_compiled": {"torch.compile does nothing": fact(graphs=0, graph_breaks=0)},
    "weights_still": {
        "the optimizer never steps": still(161, 1.0),
        "half of the parameters frozen": still(80, 0.5),
    },
    "bytes_miscounted": {
        "bytes counted twice": stated_bytes(2),
        "bytes in GiB for GB": stated_bytes(1e9 / GIB),
        "1 % of the bytes left out": stated_bytes(0.99),
    },
    "samples_do_not_fill_window": {
        "samples above the 60th percentile clipped": clip,
        "the first sample of each window dropped": lose_sample,
        "the lead-in counted as a step": count_lead_in,
    },
}
STEPS = (0.05, 0.1, 0.2, 0.3, 1.0)
WARM_UPS = ((0.02, 10), (0.05, 30), (0.2, 10), (0.2, 30), (0.5, 30), (2.0, 8))
SUSPECT = {
    "setting_not_asked": {
        "P2P_LEVEL=LOC inherited from the shell": INHERITED,
        "ALGO=Tree from a configuration file": logged({"NCCL_ALGO": "Tree"}),
    },
    "windows_not_stationary": {
        "each window begins fast and ends 2 % slower": each_window(
            lambda ms, passed: ms * (0.98 + 0.02 * passed)
        ),
        "each window is 2 % slower in its second half": each_window(
            lambda ms, passed: ms * (1.02 if passed > 0.5 else 1.0)
        ),
    },
    "windows_too_short": {
        "the slowest tenth dropped with its time and images": lose_slowest,
        "both clocks 2 % fast": windows(lambda ms, number: ms / 1.02),
    },
    "slower_than_warmup": {
        f"a stranger takes {load:.0%} of a GPU from the first timed step on": windows(
            lambda ms, number, load=load: ms / (1 - 0.9 * load)
        )
        for load in (0.1, 0.2)
    },
    "samples_rounded": {
        "whole milliseconds": windows(lambda ms, number: round(ms)),
        "tenths of a millisecond": windows(lambda ms, number: round(ms, 1)),
    },
    "versions_differ": {
        "rank 1 runs another torch": other_versions(torch="2.8.0"),
        "rank 1 runs another NCCL": other_versions(nccl="2.27.3"),
        "rank 1 runs on one thread": other_threads,
    },
    "cost_negative": {"steps without exchange 1 ms too long": longer_without_exchange(1.0)},
    "transport_below_wires": {
        "SHM where NV18 is, nothing asked": logged({}, "SHM/direct/direct"),
        "a network where NV18 is, nothing asked": logged({}, "NET/Socket/0"),
        "half of the channels over NV18": logged({}, channels=12),
        "links at half of their speed": halved_links,
    },
    "clocks_differ": {
        "SM clock 1980 to 1200 without a reason": during("timed", sm_mhz=1200),
        "power cap on one rank only": sampled(capped),
    },
    "foreign_cpu": {
        **{f"other programs load {share:.0%} of the cores": loaded(share) for share in (0.12, 0.2)},
        "the reference is timed beside other programs": loaded_reference,
    },
    "faster_than_reference": {
        "the exchange was not awaited, 10 times too fast": exchange(0.1),
        "the exchange is 2 times too fast": exchange(0.5),
    },
    "pauses": {"a pause of 0.25 s in every 25th step": windows(paused)},
    "slow_rank": {"rank 1 slower by 5 %": slow_rank(0.05), "rank 1 slower by 50 %": slow_rank(0.5)},
    "not_stationary": {
        "drift of 2 %": drift(0.02),
        **{f"step +{share:.0%} from the middle of the window": stepped(share) for share in STEPS},
    },
    "warmup_not_flat": {
        f"warm-up excess {more:.0%}, tau {tau} s": warm_up(more, tau) for more, tau in WARM_UPS
    },
}
FINDINGS = {"reference_exceeded": {"the reference is 1.5 times too slow": slow_reference}}
CELLS = {
    "LOC asked, NCCL ran without it": LOC,
    "LOC ignored by rank 1 only": LOC,
    "loc in lower case asked, NCCL ran without it": LOWER_CASE,
    "torch.compile does nothing": {"optimize": "compile"},
}
FAULTS = []
for verdict, table in (("invalid", INVALID), ("suspect", SUSPECT), ("valid", FINDINGS)):
    for codes, planted in table.items():
        for name, plant in planted.items():
            cell = CELLS.get(name, {})
            FAULTS.append(Fault(name, tuple(codes.split()), plant, cell, verdict))
# Faults that are smaller than a limit: (the limit, its default, what plants it). No code tells.
BELOW = {
    "rank 1 slower by 1 %": ("slow_rank_limit", 0.03, slow_rank(0.01)),
    "rank 1 slower by 2 %": ("slow_rank_limit", 0.03, slow_rank(0.02)),
    "a stranger slows timed steps by 2 %":
        ("MOST_SLOWER", 0.03, windows(lambda ms, number: 1.02 * ms)),
    "drift of 0.9 %": ("change_limit", 0.01, drift(0.009)),
    "each window ends 0.8 % slower":
        ("change_limit", 0.01, each_window(lambda ms, passed: ms * (1 + 0.008 * passed))),
    "device clock 0.4 % off": ("clock_limit", 0.005, clocks(0.004)),
    "other programs load 5 % of the cores": ("foreign_cpu_limit", 0.1, loaded(0.05)),
    "other programs load 9 % of the cores": ("foreign_cpu_limit", 0.1, loaded(0.09)),
    "1.9 GiB in use before the start":
        ("foreign_memory_gib", 2.0, before(memory_bytes=int(1.9 * GIB))),
    "9 % busy before the start": ("foreign_busy_percent", 10.0, before(busy_percent=9)),
    "clock of one GPU 4 % lower": ("clock_spread_limit", 0.05, during("timed", sm_mhz=1901)),
    "2 of 54 layers in float32":
        ("FEWEST_RIGHT", 0.95, arithmetic(layers={"bfloat16": 52, "float32": 2})),
    "samples in whole microseconds":
        ("MOST_OF_GRID", 1e-4, windows(lambda ms, number: round(ms, 3))),
    "a baseline 1 % too slow": ("MOST_EFFICIENCY", 1.02, baseline(0.01)),
    "a stale baseline 1 % too fast": ("MOST_SLOWER_TOGETHER", 0.01, baseline(-0.01, days=365)),
}  # fmt: skip
