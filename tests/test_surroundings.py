"""What was around a cell: faults planted into the samples of a real H200 cell, and into its record, each with a clean twin."""

import copy
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from simulate import Simulator, Truth

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.examine import findings_of
from analysis.findings.record_values import with_values
from analysis.report.numbers import THIN
from analysis.report.sections.conditions import environment as environment_section
from analysis.report.sections.scaling import scaling
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import INHERITED
from analysis.study.study import open_study
from analysis.validity.checks import judge
from analysis.validity.gpu_samples import summary
from benchmarks import record as records
from benchmarks.agent.sampler import CpuLoad, SampledGpus
from benchmarks.record import CellFolder, read_lines
from conf.schema import ValidityLimits

DATA = Path(__file__).parent / "data"
RAW = DATA / "raw_lines" / "h200_x2" / "resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
CODES = {"throttled", "foreign_load", "foreign_cpu", "setting_not_asked", "clocks_differ"}
LIMITS = ValidityLimits()
GIB = 2**30
OWN_GIB = 40  # what the ranks hold from the first step on
THERMAL, POWER_CAP, IDLE = 0x40, 0x04, 0x01


def phases():
    """{phase: (begin, end)} of rank 0 in the real cell, s."""
    lines = [
        line
        for line in read_lines(RAW / "ranks" / "0.jsonl")
        if line["kind"] in ("phase", "result")
    ]
    return {one["phase"]: (one["time"], two["time"]) for one, two in pairwise(lines)}


PHASES = phases()
MEASURED = [
    name for name in PHASES if name not in ("build", "first step", "warm-up", "check", "compare")
]


def during(*names):
    """Whether a moment is in one of these phases; of a short one, also in the half second until the next sample."""
    spans = [(PHASES[name][0], max(PHASES[name][1], PHASES[name][0] + 0.5)) for name in names]
    return lambda moment: any(begin <= moment <= end for begin, end in spans)


def sampled(tmp_path, gpu=lambda moment, rank: {}, others=0.0, where="timed", cores=32):
    """The record of the real cell with samples of its machine, twice a second.

    `gpu` replaces what a sample says; `others` is the share of the cores that others use in one phase.
    """
    shutil.copytree(RAW, tmp_path / "cell")
    folder = CellFolder(tmp_path / "cell")
    began, ended = PHASES["build"][0] - 2, PHASES["exposed"][1] + 2
    idle = {
        "sm_mhz": 1980,
        "reasons": IDLE,
        "memory_bytes": 0,
        "busy_percent": 0,
        "foreign_pids": [],
    }
    steps = {**idle, "reasons": 0, "memory_bytes": OWN_GIB * GIB}
    lines, load = [{"kind": "before", "time": began, "gpus": [idle, idle]}], []
    for moment in (began + number / 2 for number in range(int((ended - began) * 2) + 1)):
        plain = steps if PHASES["first step"][0] <= moment <= PHASES["exposed"][1] else idle
        lines.append(
            {
                "kind": "sample",
                "time": moment,
                "gpus": [{**plain, **gpu(moment, rank)} for rank in (0, 1)],
            }
        )
        own, inside = (
            moment - began,
            min(max(moment - PHASES[where][0], 0), PHASES[where][1] - PHASES[where][0]),
        )
        busy = own + others * cores * inside
        load.append(
            {"kind": "sample", "time": moment, "cores": cores, "busy_s": busy, "own_s": own}
        )
    for path, content in ((folder.gpu_samples, lines), (folder.cpu_samples, load)):
        path.write_text("".join(json.dumps(line) + "\n" for line in content))
    metrics, checks = summary(folder)
    record = records.read(folder.record)
    return dataclasses.replace(
        record, metrics=record.metrics | metrics, checks=record.checks | checks
    )


def found(record, limits=LIMITS):
    """The codes of this file's checks and what they say, and the verdict."""
    judged = judge(record, limits)
    return {code: said for code, said in judged.codes.items() if code in CODES}, judged.verdict


# Samples of every phase.


def test_a_clean_cell_has_no_code_and_its_phases_are_told(tmp_path):
    record = sampled(tmp_path)
    assert found(record) == ({}, "valid")
    known = record.checks["gpu_samples"]["phases"]
    assert set(known) == set(MEASURED) and {"timed", "exchange", "exposed"} <= set(MEASURED)
    assert all(phase["samples"] and phase["sm_mhz"] == [1980, 1980] for phase in known.values())
    assert max(record.checks["cpu_samples"]["others_share"].values()) < 1e-6
    assert not set(judge(record, LIMITS).unchecked) & CODES


def at(*names, rank=None, **values):
    """What samples of all GPUs, or of one, say during some phases."""
    inside = during(*names)

    def gpu(moment, of_rank):
        return values if inside(moment) and rank in (None, of_rank) else {}

    return gpu


def held(gib, own_gib=None):
    """So much memory is in use beside what the ranks hold; with whose it is, if the driver says."""
    memory = {"memory_bytes": int((OWN_GIB + gib) * GIB)}
    if own_gib is not None:
        memory["own_bytes"] = int((OWN_GIB + own_gib) * GIB)
    return memory


def from_the_middle(gib):
    """More memory from the middle of the timed window on, as the audit planted it."""
    middle = sum(PHASES["timed"]) / 2
    return lambda moment, rank: held(gib) if rank and moment > middle else {}


def whose(gib, own_gib):
    """What grows in A B B A where the driver tells whose memory it is."""
    late, before = at("exposed", **held(gib, own_gib)), {"own_bytes": OWN_GIB * GIB}
    began = PHASES["first step"][0]
    return lambda moment, rank: late(moment, rank) or (before if moment > began else {})


def capped(*clocks_mhz):
    """Both GPUs at their power cap in the steps, at these clocks."""
    steps = during("timed", "exposed")
    samples = [{"sm_mhz": mhz, "reasons": POWER_CAP} for mhz in clocks_mhz]
    return lambda moment, rank: samples[rank] if steps(moment) else {}


def leaving_a_cap(moment, rank):
    """Some samples of a capped phase show no cap while the clock is still low, and the next one."""
    if during("held")(moment) or (during("timed", "exposed")(moment) and int(2 * moment) % 4 == 0):
        return {"sm_mhz": 1830, "reasons": 0}
    return at("timed", "exposed", sm_mhz=1794, reasons=POWER_CAP)(moment, rank)


def power_cap(mhz):
    return at("timed", "exposed", rank=1, sm_mhz=mhz, reasons=POWER_CAP)


AFTER, NO_REASON = "after the warm-up, in the", "and the driver gives no reason"
GROWN = "the memory of other programs grew by 2.5 GiB"
SLOW = "GPU 1 {} MHz, GPU 0 1,980 MHz in the timed phase"


@pytest.mark.parametrize(
    ("gpu", "code", "words"),
    [
        *(
            (at(where, rank=1, reasons=THERMAL), "throttled", f"0x40 in the {where} phase")
            for where in MEASURED
        ),
        (at("build", "first step", reasons=THERMAL), "", ""),
        # a stranger that the driver does not name
        (from_the_middle(20), "foreign_load", f"grew by 20.0 GiB {AFTER} timed phase"),
        (from_the_middle(2.5), "foreign_load", f"grew by 2.5 GiB {AFTER} timed phase"),
        (from_the_middle(1.5), "", ""),
        (from_the_middle(0), "", ""),
        # where the driver tells whose memory it is, that of others counts in every phase
        (whose(2.5, 0), "foreign_load", f"{GROWN} {AFTER} exposed phase"),
        (whose(1.5, 0), "", ""),
        (whose(2.5, 2.5), "", ""),
        # an exchange alone needs buffers beside the model's
        (at("exchange", **held(2.5)), "", ""),
        # one GPU at a power cap
        (power_cap(1200), "clocks_differ", SLOW.format("1,200")),
        (power_cap(1870), "clocks_differ", SLOW.format("1,870")),
        (power_cap(1910), "", ""),
        # both at their power cap may differ by themselves
        (capped(1850, 1720), "", ""),
        (capped(1850, 1650), "clocks_differ", ""),
        (leaving_a_cap, "", ""),
        # a clock that falls without a reason, for power, or in idleness
        (at("timed", sm_mhz=1200), "clocks_differ", NO_REASON),
        (at("exposed", sm_mhz=1200), "clocks_differ", NO_REASON),
        (at("timed", "exposed", sm_mhz=1700, reasons=POWER_CAP), "", ""),
        (at("timed", "exposed", sm_mhz=1700, reasons=IDLE), "", ""),
    ],
)
def test_what_the_gpus_show_is_seen_and_what_is_natural_is_not(tmp_path, gpu, code, words):
    codes, verdict = found(sampled(tmp_path, gpu))
    assert set(codes) == ({code} if code else set())
    assert words in codes.get(code, "")
    severity = "suspect" if code == "clocks_differ" else "invalid"
    assert verdict == (severity if code else "valid")


@pytest.mark.parametrize(
    ("share", "cores", "code"),
    [(0.5, 2, True), (0.12, 32, True), (0.08, 32, False), (0.03, 2, False)],
)
@pytest.mark.parametrize("where", ["timed", "exposed"])
def test_others_on_the_cores_are_seen(tmp_path, share, cores, code, where):
    codes, verdict = found(sampled(tmp_path, others=share, cores=cores, where=where))
    assert (set(codes), verdict) == (({"foreign_cpu"}, "suspect") if code else (set(), "valid"))
    assert not code or f"of {cores} cores in the {where} phase" in codes["foreign_cpu"]


def test_a_cell_without_samples_of_the_cpu_is_unchecked(tmp_path):
    record = sampled(tmp_path)
    (tmp_path / "cell" / "cpu.jsonl").unlink()
    record.checks.pop("cpu_samples")
    assert "not sampled" in judge(record, LIMITS).unchecked["foreign_cpu"]
    assert "cpu_samples" not in summary(CellFolder(tmp_path / "cell"))[1]


def test_clocks_that_differ_from_the_baselines_are_a_finding_with_the_efficiency_without_them():
    """Study comp of the audit: one GPU at 1,902 MHz, two at 1,794; 97.3 % are 103 % per MHz."""
    simulator = Simulator(
        Truth(noise=0.0, alone_ms=(54.0, 54.0), exposed_ms=0.0, contention_ms=0.0)
    )

    def clocked(gpus, mhz, factor=1.0):
        made = simulator.record(gpus, factor=factor)
        return dataclasses.replace(made, metrics=made.metrics | {CLOCK: mhz})

    alone = [clocked((gpu,), 1902.0) for gpu in (0, 1)]
    pair = with_values(clocked((0, 1), 1794.0, 0.973), alone)
    assert pair.metrics[EFFICIENCY] == pytest.approx(0.973)
    assert pair.metrics[AT_EQUAL_CLOCKS] == pytest.approx(0.973 * 1902 / 1794)
    said = judge(pair, LIMITS).codes["clocks_differ"]
    assert (
        "the cell ran at 1,794 MHz, its baseline 1,902 MHz; at equal clocks the efficiency is 103.2 %"
        in said
    )
    for mhz, code in ((1882.0, True), (1884.0, False), (1902.0, False), (1922.0, True)):
        assert (
            "clocks_differ" in judge(with_values(clocked((0, 1), mhz), alone), LIMITS).codes
        ) == code, mhz
    plain = judge(with_values(clocked((0, 1), 1902.0), alone), LIMITS)
    assert plain.verdict == judge(pair, LIMITS).verdict  # the finding leaves it as it is


def test_clocks_that_were_not_sampled_give_no_efficiency_at_equal_clocks():
    simulator = Simulator(Truth(noise=0.0))
    pair = simulator.record((0, 1))
    pair.metrics.pop(CLOCK)
    pair = with_values(pair, [simulator.record((0,))])
    assert EFFICIENCY in pair.metrics and AT_EQUAL_CLOCKS not in pair.metrics


# Settings that nobody asked for.

REAL = [
    record for study in sorted(DATA.glob("h200_x*/*")) for record in records.read_study(study)[0]
    if record.state == "finished"
]  # fmt: skip
PLAIN = next(
    record for record in REAL if record.effective.get("transport") and not record.cell.nccl
)


def with_setting(name, value, variables=None, inherited=None):
    made = copy.deepcopy(PLAIN)
    made.effective["nccl"]["settings"][name] = value
    made.environment["variables"] |= {name: value} if variables is None else variables
    if inherited is not None:
        made.environment[INHERITED] = inherited
    return made


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (with_setting("NCCL_P2P_LEVEL", "LOC"), "NCCL_P2P_LEVEL=LOC from the environment"),
        (
            with_setting("NCCL_P2P_LEVEL", "LOC", inherited=["NCCL_P2P_LEVEL"]),
            "NCCL_P2P_LEVEL=LOC from the environment",
        ),
        (
            with_setting("NCCL_ALGO", "Tree", variables={}),
            "NCCL_ALGO=Tree from a configuration file of NCCL",
        ),
        (
            with_setting("NCCL_SOCKET_IFNAME", "eth0"),
            "NCCL_SOCKET_IFNAME=eth0 from the environment",
        ),
        (with_setting("NCCL_NVLS_ENABLE", "1"), "NCCL_NVLS_ENABLE=1 from the environment"),
    ],
)
def test_a_setting_that_nobody_asked_for_is_suspect_and_named(record, said):
    codes, verdict = found(record)
    assert codes == {"setting_not_asked": f"NCCL used a setting that was not asked for: {said}"}
    assert verdict == "suspect"


def test_settings_that_were_asked_or_are_ringsides_or_keep_safe_are_not():
    assert (
        found(with_setting("NCCL_NVLS_ENABLE", "0"))[0]
        == found(with_setting("NCCL_RAS_ENABLE", "0"))[0]
        == {}
    )
    asked = with_setting("NCCL_P2P_LEVEL", "LOC")
    asked = dataclasses.replace(
        asked, cell=dataclasses.replace(asked.cell, nccl={"NCCL_P2P_LEVEL": "LOC"})
    )
    assert found(asked)[0] == {}


def test_without_nccls_log_an_inherited_setting_is_unchecked():
    lost = dataclasses.replace(with_setting("NCCL_P2P_LEVEL", "LOC"), effective={})
    assert "NCCL_P2P_LEVEL" in judge(lost, LIMITS).unchecked["setting_not_asked"]
    assert (
        "setting_not_asked" not in judge(dataclasses.replace(PLAIN, effective={}), LIMITS).unchecked
    )


# Sampling.


def burn(seconds):
    return f"import time\nwhile time.process_time() < {seconds}: pass"


def test_the_load_of_our_processes_is_told_from_that_of_others():
    load = CpuLoad()
    first = load.read()
    subprocess.run(
        [sys.executable, "-c", burn(0.4)], check=True
    )  # ended and waited for, as ranks are
    child = subprocess.Popen(
        [sys.executable, "-c", f"{burn(0.4)}\nprint(flush=True)\ninput()"], stdin=-1, stdout=-1
    )
    child.stdout.readline()
    second = load.read()
    child.communicate(b"\n")
    assert second["own_s"] - first["own_s"] >= 0.75
    # A stranger: its parent has ended, and it belongs to init.
    stranger = f"import os\nif os.fork() == 0:\n os.setsid()\n {burn(0.4).replace(chr(10), chr(10) + ' ')}\n print(flush=True)"
    out = subprocess.run([sys.executable, "-c", stranger], stdout=-1, check=True)
    third = load.read()
    assert out.stdout and third["busy_s"] - second["busy_s"] >= 0.3
    assert third["own_s"] - second["own_s"] < 0.35
    assert third["cores"] == len(os.sched_getaffinity(0))


NOBODY_WAITS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if worker := os.fork():
    input()
    os.kill(worker, signal.SIGKILL)
    while os.path.exists(f"/proc/{worker}"):
        pass
    print(flush=True)
    input()
else:
    while time.process_time() < 0.5:
        pass
    print(flush=True)
    signal.pause()
"""


def test_the_time_of_processes_that_nobody_waited_for_is_not_taken_back():
    """torch's processes that compile end after the rank: their 35 s were those of other programs in the last second."""
    load = CpuLoad()
    load.read()
    parent = subprocess.Popen([sys.executable, "-c", NOBODY_WAITS], stdin=-1, stdout=-1)
    own = []
    for _ in range(2):
        parent.stdout.readline()
        own.append(load.read()["own_s"])
        parent.stdin.write(b"\n")
        parent.stdin.flush()
    parent.communicate()
    own.append(load.read()["own_s"])
    assert 0.45 <= own[0] <= own[1] <= own[2] < own[0] + 0.4, "it is counted once"


class Process:
    """As NVML lists one."""

    def __init__(self, pid, held):
        self.pid, self.usedGpuMemory = pid, held


def test_memory_of_the_cells_own_processes_is_told_where_the_driver_says_it(monkeypatch):
    monkeypatch.setenv("RINGSIDE_TOKEN", "t" * 32)
    own = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\ninput()"], stdin=-1, stdout=-1
    )
    monkeypatch.delenv("RINGSIDE_TOKEN")
    own.stdout.readline()
    gpus, gone = SampledGpus(None, [], "t" * 32), 2**22 + 1
    stranger = os.getppid()
    try:
        assert gpus._processes([Process(own.pid, 5), Process(gone, 7)]) == {
            "foreign_pids": [],
            "own_bytes": 5,
        }
        assert gpus._processes([Process(own.pid, None)]) == {"foreign_pids": []}
        assert gpus._processes([Process(gone, 7)]) == {"foreign_pids": []}, (
            "its own are not among them: nothing is known"
        )
        assert gpus._processes([Process(stranger, 7)]) == {"foreign_pids": [stranger]}
    finally:
        own.communicate(b"\n")


# What the report says.


def test_the_report_tells_the_efficiency_at_equal_clocks_and_what_was_inherited():
    """The compiled cells of four H200s: a power cap takes 3 % of the clock of a pair, and all that the pair loses."""
    study = open_study(DATA / "h200_x4" / "scaling")
    findings = findings_of(study)
    (section,) = [section for section in (scaling(study, findings),) if section]
    (sentence,) = [line for line in section.lines if "SM clock" in line]
    assert (
        "would be 100.8 % instead of 97.6 % against GPU 0 (resnet50 · compile on gpus 0,1); "
        in sentence.replace(THIN, " ")
    )
    assert "eager" not in sentence
    (column,) = [
        one for one in section.tables[0].columns if one.key == "efficiency_at_equal_clocks"
    ]
    assert column.shown
    (line,) = environment_section(study, findings).lines
    assert "NCCL_NVLS_ENABLE=0" in line and "NCCL_RAS_ENABLE" not in line
