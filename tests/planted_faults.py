"""The faults that an audit planted (2026-11), each at the smallest size that its check claims to see, in cells of two real H200s.

`FAULTS` names each, what plants it, and the codes that must find it. ELSEWHERE names the tests that plant some in real ranks too.
SILENT are those that nothing tells, with the reason.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planted import edit_json, edit_lines, log_nccl, sample_cpu, sample_gpus

from benchmarks.record import read_lines

LOC = {"nccl": {"NCCL_P2P_LEVEL": "LOC"}}
LOWER_CASE = {"nccl": {"NCCL_P2P_LEVEL": "loc"}}
ANNOUNCED = {"NCCL_NVLS_ENABLE": "0", "NCCL_RAS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}
HEAT, POWER_CAP = 0x40, 0x04
GIB = 1 << 30


@dataclass(frozen=True)
class Fault:
    """One planted fault: `plant(folder)` changes the raw files before the record is made, `edit(folder)` something afterwards."""

    name: str
    codes: tuple[str, ...]
    plant: Callable[[Any], None] = lambda folder: None
    edit: Callable[[Any], None] | None = None
    cell: dict[str, Any] = field(default_factory=dict)
    verdict: str = "invalid"


# Ranks, GPUs, settings


def exchange_uuids(folder):
    uuids = [next(read_lines(folder.rank_lines(rank)))["uuid"] for rank in (0, 1)]
    for rank in (0, 1):
        edit_lines(
            folder, rank, lambda line, rank=rank: line.update(uuid=uuids[1 - rank]), kind="start"
        )


def die(folder):
    edit_lines(folder, 1, lambda line: [], kind="done")


def logged(announced, transport="P2P/CUMEM", ranks=None, asked=(0, 1)):
    def plant(folder):
        cell = type("Asked", (), {"gpus": asked})
        log_nccl(folder, cell, ANNOUNCED | announced, transport, ranks=ranks)

    return plant


def by_rank_one(folder):
    """Only rank 0 announces LOC; rank 1 connects by P2P."""
    logged({"NCCL_P2P_LEVEL": "LOC"}, "SHM/direct/direct", ranks=[0])(folder)
    path = folder.nccl_logs()[1]
    path.write_text(
        path.read_text()
        .replace("Channel 00 :", "Channel 00/0 :")
        .replace("SHM/direct/direct", "P2P/CUMEM")
    )


# Around the cell


def sampled(change):
    """Plant samples of the GPUs: `change(phase, gpu)` for the samples of a phase."""
    return lambda folder: sample_gpus(folder, 2, lambda phase, gpu, number: change(phase, gpu))


def during(*phases, **sample):
    return sampled(lambda phase, gpu: sample if phase in phases else {})


def before(**sample):
    return sampled(lambda phase, gpu: sample if phase is None else {})


def one_heat_sample(folder):
    """A single sample of one GPU in the timed window."""
    left = [{"reasons": HEAT}]
    sample_gpus(
        folder,
        2,
        lambda phase, gpu, number: left.pop() if phase == "timed" and gpu == 1 and left else {},
    )


def arrive(folder):
    """20 GiB more on one GPU from the second sample of the timed window on."""
    seen = []

    def change(phase, gpu, number):
        seen.extend(["timed"] * (phase == "timed" and gpu == 1))
        return {"memory_bytes": 60 * GIB} if gpu == 1 and len(seen) > 1 else {}

    sample_gpus(folder, 2, change)


def loaded(share):
    return lambda folder: sample_cpu(folder, lambda phase: share if phase == "timed" else 0.0)


def remove(*names):
    def plant(folder):
        for name in names:
            for path in folder.path.glob(name):
                path.unlink()

    return plant


# Times


def windows(change, purpose="timed", ranks=(0, 1)):
    """Change the samples of windows: `change(ms, number)` of an iteration; both clocks of the window follow."""

    def plant(folder):
        for rank in ranks:
            done = [0]

            def stretch(line, done=done):
                ms = [change(one, done[0] + number) for number, one in enumerate(line["ms"])]
                longer = math.fsum(ms) - math.fsum(line["ms"])
                done[0] += len(ms)
                line.update(
                    ms=ms, device_ms=line["device_ms"] + longer, host_ms=line["host_ms"] + longer
                )

            edit_lines(folder, rank, stretch, kind="block", purpose=purpose)

    return plant


def clocks(share):
    def plant(folder):
        for rank in (0, 1):
            edit_lines(
                folder,
                rank,
                lambda line: line.update(host_ms=line["host_ms"] * (1 + share)),
                kind="block",
                purpose="timed",
            )

    return plant


def clip(folder):
    """Samples above their 60th percentile are cut; the window lasts as long as before."""
    for rank in (0, 1):

        def cut(line):
            most = sorted(line["ms"])[int(0.3 * len(line["ms"]))] * 0.99
            line["ms"] = [min(one, most) for one in line["ms"]]

        edit_lines(folder, rank, cut, kind="block", purpose="timed")


def images(factor, ranks):
    def plant(folder):
        for rank in ranks:
            edit_lines(
                folder,
                rank,
                lambda line: line.update(images=line["images"] * factor),
                kind="block",
                purpose="timed",
            )

    return plant


def slow_rank(share):
    return windows(lambda ms, number: ms * (1 + share), "without exchange", ranks=(1,))


def exchange(factor):
    return windows(lambda ms, number: ms * factor, "exchange")


def warm_up(excess, tau_s):
    """A step time that falls towards its end value, in a warm-up of 40 s: ranks go on for 90 s at most until it is flat."""

    def plant(folder):
        for rank in (0, 1):
            edit_lines(folder, rank, lambda line: [line] * 11, kind="block", purpose="warm-up")
        windows(
            lambda ms, number: ms * (1 + excess * math.exp(-number * ms / 1e3 / tau_s)), "warm-up"
        )(folder)

    return plant


# What a rank found, in its `result` line


def fact(**facts):
    def plant(folder):
        edit_lines(folder, 0, lambda line: line["checks"].update(facts), kind="result")

    return plant


def arithmetic(**facts):
    return fact(
        arithmetic={"autocast": "bfloat16", "layers": {"bfloat16": 54}, "tf32": False} | facts
    )


def still(arrays, share):
    return fact(weights_still=arrays, weights_still_share=share, weights_still_first="fc.bias")


def stated_bytes(factor):
    """The bytes that the strategy says it moves."""

    def plant(folder):
        for rank in (0, 1):
            edit_lines(
                folder,
                rank,
                lambda line: line.update(bytes_moved=line["bytes_moved"] * factor),
                kind="exchange",
            )

    return plant


# The record, after it was made

RATE = "throughput/images_per_second"


def scale(names, factor):
    def edit(folder):
        edit_json(
            folder.record,
            lambda record: record["metrics"].update(
                {name: record["metrics"][name] * factor for name in names}
            ),
        )

    return edit


def halve(folder):
    edit_lines(
        folder, 0, lambda line: line.update(ms=[one / 2 for one in line["ms"]]), kind="block"
    )


WORST = {"array": "fc.bias", "tolerance": 1e-7}
FAULTS = (
    # 1a: raw folders and records of H200s
    Fault("wrong GPU order (UUIDs exchanged)", ("wrong_gpu",), exchange_uuids),
    Fault("a rank died before it was done", ("missing_rank",), die),
    Fault("LOC asked, NCCL ran without it", ("setting_ignored", "transport_unexpected"), logged({}), cell=LOC),
    Fault("loc in lower case asked, NCCL ran without it", ("setting_ignored",), logged({}), cell=LOWER_CASE),
    Fault("LOC ignored by rank 1 only", ("setting_ignored", "transport_unexpected"), by_rank_one, cell=LOC),
    Fault("thermal slowdown in one sample of the timed window", ("throttled",), one_heat_sample),
    Fault("a foreign process that the driver names", ("foreign_load",), during("timed", foreign_pids=[4711])),
    Fault("3 GiB in use before the start", ("foreign_load",), before(memory_bytes=3 * GIB)),
    Fault("device clock 1.1 % off", ("clocks_disagree",), clocks(0.011)),
    Fault("device clock 0.9 % off", ("clocks_disagree",), clocks(0.009)),
    Fault("thermal slowdown while the exchange is timed", ("throttled",), during("exchange", reasons=HEAT)),
    Fault("thermal slowdown in A B B A only", ("throttled",), during("exposed", reasons=HEAT)),
    Fault("SM clock 1980 to 1200 without a reason", ("clocks_differ",), during("timed", sm_mhz=1200), verdict="suspect"),
    Fault("power cap on one rank only", ("clocks_differ",), verdict="suspect", plant=sampled(
        lambda phase, gpu: {"sm_mhz": 1794, "reasons": POWER_CAP} if phase and gpu == 1 else {})),
    Fault("other programs load 12 % of the cores", ("foreign_cpu",), loaded(0.12), verdict="suspect"),
    Fault("an invisible process, +20 GiB in the timed window", ("foreign_load",), arrive),
    Fault("P2P_LEVEL=LOC inherited from the shell", ("setting_not_asked",), verdict="suspect",
          plant=logged({"NCCL_P2P_LEVEL": "LOC"}, "SHM/direct/direct")),
    Fault("the exchange was not awaited, 10 times too fast", ("faster_than_reference",), exchange(0.1), verdict="suspect"),
    Fault("images/s +10 %, images ÷ seconds unchanged", ("does_not_verify",), edit=scale([RATE], 1.1)),
    Fault("samples of ranks/0.jsonl halved", ("does_not_verify",), edit=halve),
    Fault("record.json times 1.5", ("does_not_verify",), edit=scale([RATE, f"{RATE}_per_gpu", "throughput/images"], 1.5)),
    # 1b: what ranks find; asked of real ranks too, see ELSEWHERE
    Fault("no exchange, or weights of one rank drift by 1e-4", ("replicas_differ",), fact(replicas_equal=False)),
    Fault("sum instead of the mean", ("gradient_not_mean",), fact(gradient_error=1.0)),
    Fault("a bucket dropped", ("gradient_not_mean",), fact(gradient_error=0.7)),
    Fault("one array summed, bf16", ("gradient_not_mean",), fact(gradient_worst={**WORST, "error": 1.0})),
    Fault("one array lost, bf16", ("gradient_not_mean",), fact(gradient_worst={**WORST, "error": 1.0})),
    Fault("0.1 % of all elements lost, bf16", ("gradient_not_mean",), fact(gradient_error=3.1e-2)),
    Fault("unasked fp16 hook, fp32", ("gradient_not_mean",), fact(gradient_error=3.1e-4)),
    Fault("unasked bf16 hook, bf16", ("gradient_not_mean",), fact(gradient_error=1.7e-3)),
    Fault("images counted twice", ("images_miscounted",), images(2, (0, 1))),
    Fault("half a batch on rank 1", ("images_miscounted",), images(0.5, (1,))),
    Fault("a loss that is NaN on one rank", ("loss_not_finite",), fact(losses=[6.3, "nan"])),
    Fault("the same batch on all ranks", ("batches_not_distinct",), fact(batches_differ=False)),
    Fault("one batch instead of two", ("batches_not_distinct",), fact(batches_in_turn=1)),
    Fault("autocast off where bf16 was asked", ("precision_not_used",), arithmetic(autocast=None, layers={"float32": 54})),
    Fault("torch.compile does nothing", ("not_compiled",), fact(graphs=0, graph_breaks=0), cell={"optimize": "compile"}),
    Fault("the optimizer never steps", ("weights_still",), still(161, 1.0)),
    Fault("half of the parameters frozen", ("weights_still",), still(80, 0.5)),
    Fault("bytes counted twice", ("bytes_miscounted",), stated_bytes(2)),
    Fault("bytes in GiB for GB", ("bytes_miscounted",), stated_bytes(1e9 / GIB)),
    Fault("samples above the 60th percentile clipped", ("samples_do_not_fill_window",), clip),
    # Times
    Fault("a pause of 0.25 s in every 25th step", ("pauses",), verdict="suspect",
          plant=windows(lambda ms, number: ms + 250 * (number % 25 == 24))),
    Fault("rank 1 slower by 5 %", ("slow_rank",), slow_rank(0.05), verdict="suspect"),
    Fault("rank 1 slower by 50 %", ("slow_rank",), slow_rank(0.5), verdict="suspect"),
    *(Fault(f"step +{share:.0%} from the middle of the window", ("not_stationary",), verdict="suspect",
            plant=windows(lambda ms, number, share=share: ms * (1 + share * (number >= 36))))
      for share in (0.05, 0.1, 0.2, 0.3, 1.0)),
    *(Fault(f"warm-up excess {excess:.0%}, tau {tau} s", ("warmup_not_flat",), warm_up(excess, tau), verdict="suspect")
      for excess, tau in ((0.02, 10), (0.05, 30), (0.2, 10), (0.2, 30), (0.5, 30), (2.0, 8))),
)  # fmt: skip
# Those of 1b with real ranks (the test plants what the facts above state), and those that no raw file can hold.
ELSEWHERE = {
    "no exchange in a cell of real ranks": ("test_measuring.py", "replicas_equal"),
    "gradient faults of real ranks in fp32 and bf16": (
        "test_as_asked.py",
        "test_faults_of_the_exchange_are_found",
    ),
    "host sleeps between iterations": ("test_as_asked.py", "time_between_steps"),
    "an exchange over gloo that is not awaited": ("test_as_asked.py", "exchange_wrong"),
    "torch.compile that does nothing": (
        "test_compiled_cells.py",
        "a_compiler_that_does_nothing_is_seen",
    ),
    "a baseline 1.5 or 2 % too slow, where runs scatter by 0.13 %": (
        "test_validity.py",
        "test_an_efficiency_above_one_is_judged_by_the_scatter_between_runs",
    ),
    "other programs load the cores": ("test_surroundings.py", "foreign_cpu"),
}
SILENT = {
    "a baseline 1 % too slow": "the efficiency of 100.5 % lies within three standard deviations of the scatter between runs",
    "a baseline 2 or 5 % too fast": "nothing measured of one GPU tells that it ran faster than it should; repeats of it would",
    "the exchange beside compute, 3 times too slow": "a slow exchange is a result: its share of the reference (26 %) is shown",
    "a thread multiplies matrices beside the exchange": "it is of the cell's own process, which samples do not tell apart",
}
