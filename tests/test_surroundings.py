"""What was around a cell: faults planted into samples and record of a real one; clean twins."""

import copy
import dataclasses
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from build import DATA
from simulate import Simulator, Truth

from analysis.findings.baselines import AT_EQUAL_CLOCKS, EFFICIENCY
from analysis.findings.communication import with_values
from analysis.findings.examine import findings_of
from analysis.report.sections.conditions_section import environment as environment_section
from analysis.report.sections.scaling_section import scaling
from analysis.study.noise_floor import CLOCK
from analysis.study.provenance import INHERITED
from analysis.study.study import open_study
from analysis.validity.checks import judge
from analysis.validity.gpu_samples import summary
from analysis.validity.surroundings import foreign_load_timed
from benchmarks import record as records
from benchmarks.agent.sampler import CpuLoad, SampledGpus
from benchmarks.record import CellFolder, Lines, read_lines
from conf.schema import ValidityLimits

RAW = DATA / "raw_lines" / "h200_x2" / "resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
CODES = {"throttled", "foreign_load", "foreign_cpu", "setting_not_asked", "clocks_differ"}
LIMITS = ValidityLimits()
GIB = 2**30
OWN_GIB = 40  # what the ranks hold from the first step on
THERMAL, POWER_CAP, IDLE = 0x40, 0x04, 0x01


def phases(cell=RAW):
    """{phase: (begin, end)} of rank 0 in a real cell, s."""
    every = read_lines(cell / "ranks" / "0.jsonl")
    lines = [line for line in every if line["kind"] in ("phase", "result")]
    return {one["phase"]: (one["time"], two["time"]) for one, two in pairwise(lines)}


PHASES = phases()
UNMEASURED = ("build", "first step", "warm-up", "check", "compare")
MEASURED = [name for name in PHASES if name not in UNMEASURED]


def during(*names):
    """Whether a moment is in one of these phases, or in the half second until the next sample."""
    spans = [(PHASES[name][0], max(PHASES[name][1], PHASES[name][0] + 0.5)) for name in names]
    return lambda moment: any(begin <= moment <= end for begin, end in spans)


def sampled(tmp_path, gpu=lambda moment, rank: {}, others=0.0, where="timed", cores=32):
    """The record of the real cell with samples of its machine, twice a second.

    `gpu` replaces what a sample says; `others` the share of the cores in one phase.
    """
    shutil.copytree(RAW, tmp_path / "cell")
    folder = CellFolder(tmp_path / "cell")
    began, ended = PHASES["build"][0] - 2, PHASES["exposed"][1] + 2
    idle = {"sm_mhz": 1980, "reasons": IDLE, "memory_bytes": 0, "busy_percent": 0}
    idle["foreign_pids"] = []
    steps = {**idle, "reasons": 0, "memory_bytes": OWN_GIB * GIB}
    first, last = PHASES[where]
    gpus, cpu = Lines(folder.gpu_samples), Lines(folder.cpu_samples)
    gpus.write("before", began, gpus=[idle, idle])
    for number in range(int((ended - began) * 2) + 1):
        moment = began + number / 2
        plain = steps if PHASES["first step"][0] <= moment <= PHASES["exposed"][1] else idle
        gpus.write("sample", moment, gpus=[{**plain, **gpu(moment, rank)} for rank in (0, 1)])
        own, inside = moment - began, min(max(moment - first, 0), last - first)
        cpu.write("sample", moment, cores=cores, busy_s=own + others * cores * inside, own_s=own)
    metrics, checks = summary(folder)
    made = records.read(folder.record)
    return dataclasses.replace(made, metrics=made.metrics | metrics, checks=made.checks | checks)


def found(record, limits=LIMITS):
    """The codes of this file's checks and what they say, and the verdict."""
    judged = judge(record, limits)
    return {code: said for code, said in judged.codes.items() if code in CODES}, judged.verdict


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
    return lambda moment, of_rank: values if inside(moment) and rank in (None, of_rank) else {}


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


# Programs that begin while steps are timed, in a real cell with its own samples


REAL_PAIR = DATA / "h200_x2" / "eager_a" / "resnet50-kvstore_device-gpus0-1-c991230e60"
MIB = 2**20


def begun(tmp_path, slower=1.0, half_width=0.0, without=(), windows=True, launch=0.5, **more):
    """The judgement of the cell if samples in the windows say `more`, and steps take longer, of
    which the host needs the share `launch` to launch them."""
    shutil.copytree(REAL_PAIR, tmp_path / "cell")
    folder = CellFolder(tmp_path / "cell")
    first, last = phases(folder.path)["timed"]
    samples = list(read_lines(folder.gpu_samples))
    folder.gpu_samples.with_name("gpus.jsonl.gz").unlink()
    written = Lines(folder.gpu_samples)
    for line in samples:
        inside = first <= line["time"] <= last
        for gpu in line["gpus"]:
            gpu["processes"] = 1
            if inside:
                gpu |= {name: value for name, value in more.items() if name != "memory_bytes"}
                gpu["memory_bytes"] += more.get("memory_bytes", 0)
            for name in without:
                gpu.pop(name, None)
        if windows or not inside:
            written.write(line["kind"], line["time"], gpus=line["gpus"])
    record = records.read(folder.record)
    metrics, checks = summary(folder)
    metrics = record.metrics | metrics
    metrics["step/ms_median"] *= slower
    metrics["step/launch_ms"] = launch * metrics["step/ms_median"]
    checks = record.checks | checks | {"half_width": half_width}
    changed = dataclasses.replace(record, metrics=metrics, checks=checks)
    judgement = foreign_load_timed.judge(changed, LIMITS)
    if isinstance(judgement, str):
        return "invalid", judgement
    return judgement or ("valid", "")


OWN = ("own_bytes",)
NAMELESS = ("own_bytes", "processes", "foreign_pids")


@pytest.mark.parametrize(
    ("plant", "verdict", "words"),
    [
        ({}, "valid", ""),
        ({"slower": 1.04}, "valid", ""),
        ({"without": NAMELESS}, "valid", ""),
        ({"memory_bytes": 200 * MIB}, "valid", ""),
        ({"memory_bytes": 500 * MIB, "slower": 1.1}, "invalid", "not the run's grew by 0.5 GiB"),
        ({"memory_bytes": 500 * MIB, "slower": 1.2}, "invalid", "not the run's grew by 0.5 GiB"),
        ({"processes": 2, "without": OWN}, "invalid", "1 more in the driver's list of processes"),
        ({"memory_bytes": 500 * MIB, "without": NAMELESS}, "suspect", "0.5 GiB, whose is not known"),
        ({"memory_bytes": 500 * MIB, "without": OWN}, "unchecked", "lists no process more"),
        ({"slower": 1.1}, "suspect", "busy 100 % of the timed windows, .* need 91 %"),
        ({"slower": 1.1, "busy_percent": 91}, "valid", ""),
        ({"slower": 1.1, "launch": 1.0}, "valid", ""),  # ranks wait for each other's CPUs
        ({"slower": 1.1, "launch": 1.0, "without": NAMELESS}, "suspect", "busy 100 %"),
        ({"slower": 1.35, "half_width": 0.128, "busy_percent": 81.5}, "valid", ""),  # clean, on an H100
        ({"slower": 1.106, "half_width": 0.031, "busy_percent": 95.5}, "valid", ""),  # clean, on an H200
        ({"slower": 1.53, "half_width": 0.131, "busy_percent": 86.7}, "suspect", "87 %"),  # beside a load
        ({"without": (*NAMELESS, "busy_percent")}, "unchecked", "nor how busy"),
        ({"windows": False}, "unchecked", "not sampled before and in the timed windows"),
    ],
)  # fmt: skip
def test_a_program_that_begins_while_steps_are_timed_is_seen(tmp_path, plant, verdict, words):
    judged, text = begun(tmp_path, **plant)
    assert judged == verdict and re.search(words, text), text


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
        (from_the_middle(0.2), "", ""),
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


OTHERS = [(0.5, 2, True), (0.12, 32, True), (0.08, 32, False), (0.03, 2, False)]


@pytest.mark.parametrize(("share", "cores", "code"), OTHERS)
@pytest.mark.parametrize("where", ["timed", "exposed"])
def test_others_on_the_cores_are_seen(tmp_path, share, cores, code, where):
    codes, verdict = found(sampled(tmp_path, others=share, cores=cores, where=where))
    assert (set(codes), verdict) == (({"foreign_cpu"}, "suspect") if code else (set(), "valid"))
    assert not code or f"of {cores} cores in the {where}" in codes["foreign_cpu"]


def test_a_cell_without_samples_of_the_cpu_is_unchecked(tmp_path):
    record = sampled(tmp_path)
    (tmp_path / "cell" / "cpu.jsonl").unlink()
    record.checks.pop("cpu_samples")
    assert "not sampled" in judge(record, LIMITS).unchecked["foreign_cpu"]
    assert "cpu_samples" not in summary(CellFolder(tmp_path / "cell"))[1]


def test_clocks_that_differ_from_the_baselines_are_a_finding_with_the_efficiency_without_them():
    """Study comp of the audit: one GPU at 1,902 MHz, two at 1,794; 97.3 % are 103 % per MHz."""
    truth = Truth(noise=0.0, alone_ms=(54.0, 54.0), exposed_ms=0.0, contention_ms=0.0)
    simulator = Simulator(truth)

    def clocked(gpus, mhz, factor=1.0):
        made = simulator.record(gpus, factor=factor)
        return dataclasses.replace(made, metrics=made.metrics | {CLOCK: mhz})

    alone = [clocked((gpu,), 1902.0) for gpu in (0, 1)]
    pair = with_values(clocked((0, 1), 1794.0, 0.973), alone)
    assert pair.metrics[EFFICIENCY] == pytest.approx(0.973)
    assert pair.metrics[AT_EQUAL_CLOCKS] == pytest.approx(0.973 * 1902 / 1794)
    judged = judge(pair, LIMITS)
    said = "this run had 1,794 MHz, its baseline 1,902 MHz; at equal clocks the efficiency is"
    assert f"{said} 103.2 %" in judged.codes["clocks_differ"]
    for mhz, code in ((1882.0, True), (1884.0, False), (1902.0, False), (1922.0, True)):
        plain = judge(with_values(clocked((0, 1), mhz), alone), LIMITS)
        assert ("clocks_differ" in plain.codes) == code, mhz
        assert plain.verdict == judged.verdict  # the finding leaves it as it is


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
# One that does not say which variables it inherited.
PLAIN = next(
    record
    for record in REAL
    if record.effective.get("transport")
    and not record.cell.nccl
    and INHERITED not in record.environment
)


def with_setting(name, value, variables=None, inherited=None):
    made = copy.deepcopy(PLAIN)
    made.effective["nccl"]["settings"][name] = value
    made.environment["variables"] |= {name: value} if variables is None else variables
    if inherited is not None:
        made.environment[INHERITED] = inherited
    return made


LEVEL = "NCCL_P2P_LEVEL"
AROUND, BY_FILE = "from the environment", "from a configuration file of NCCL"
INHERITED_LEVEL = with_setting(LEVEL, "LOC", inherited=[LEVEL])
SETTINGS = [
    (with_setting(LEVEL, "LOC"), f"{LEVEL}=LOC {AROUND}"),
    (INHERITED_LEVEL, f"{LEVEL}=LOC {AROUND}"),
    (with_setting("NCCL_ALGO", "Tree", variables={}), f"NCCL_ALGO=Tree {BY_FILE}"),
    (with_setting("NCCL_SOCKET_IFNAME", "eth0"), f"NCCL_SOCKET_IFNAME=eth0 {AROUND}"),
    (with_setting("NCCL_NVLS_ENABLE", "1"), f"NCCL_NVLS_ENABLE=1 {AROUND}"),
]


@pytest.mark.parametrize(("record", "said"), SETTINGS)
def test_a_setting_that_nobody_asked_for_is_suspect_and_named(record, said):
    said = f"NCCL used a setting that was not asked for: {said}"
    assert found(record) == ({"setting_not_asked": said}, "suspect")


def test_settings_that_were_asked_or_are_ringsides_or_keep_safe_are_not():
    for name in ("NCCL_NVLS_ENABLE", "NCCL_RAS_ENABLE"):
        assert found(with_setting(name, "0"))[0] == {}
    asked = with_setting(LEVEL, "LOC")
    cell = dataclasses.replace(asked.cell, nccl={LEVEL: "LOC"})
    assert found(dataclasses.replace(asked, cell=cell))[0] == {}


def test_without_nccls_log_an_inherited_setting_is_unchecked():
    lost, plain = (dataclasses.replace(one, effective={}) for one in (SETTINGS[0][0], PLAIN))
    assert LEVEL in judge(lost, LIMITS).unchecked["setting_not_asked"]
    assert "setting_not_asked" not in judge(plain, LIMITS).unchecked


# Sampling.


def burn(seconds):
    return f"import time\nwhile time.process_time() < {seconds}: pass"


def test_the_load_of_our_processes_is_told_from_that_of_others():
    load = CpuLoad()
    first = load.read()
    # Ended and waited for, as ranks are.
    subprocess.run([sys.executable, "-c", burn(0.4)], check=True)
    waits = f"{burn(0.4)}\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", waits], stdin=-1, stdout=-1)
    child.stdout.readline()
    second = load.read()
    child.communicate(b"\n")
    assert second["own_s"] - first["own_s"] >= 0.75
    # A stranger: its parent has ended, and it belongs to init.
    stranger = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{burn(0.4)}\nprint(flush=True)"
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
    """torch compiles in processes that end after the rank: their 35 s were taken for others'."""
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


def test_memory_of_the_cells_own_processes_is_told_where_the_driver_says_it(monkeypatch):
    monkeypatch.setenv("RINGSIDE_TOKEN", "t" * 32)
    waits = "print(flush=True)\ninput()"
    own = subprocess.Popen([sys.executable, "-c", waits], stdin=-1, stdout=-1)
    monkeypatch.delenv("RINGSIDE_TOKEN")
    own.stdout.readline()
    gpus, gone = SampledGpus(None, [], "t" * 32), 2**22 + 1
    stranger = os.getppid()
    rows = [
        ({own.pid: 5, gone: 7}, {"processes": 2, "foreign_pids": [], "own_bytes": 5}),
        ({own.pid: None}, {"processes": 1, "foreign_pids": []}),
        (
            {gone: 7},
            {"processes": 1, "foreign_pids": []},
        ),  # its own are not among them: nothing is known
        ({stranger: 7}, {"processes": 1, "foreign_pids": [stranger]}),
    ]
    try:
        for listed, expected in rows:
            processes = [SimpleNamespace(pid=pid, usedGpuMemory=listed[pid]) for pid in listed]
            assert gpus._processes(processes) == expected
    finally:
        own.communicate(b"\n")


def test_the_first_sample_waits_for_what_is_left_of_the_cell_before(monkeypatch):
    """As on two H200s after a script with 15 workers of its loader, at 2026-11-29."""
    ending = {"busy_percent": 0, "memory_bytes": 14 << 30, "processes": 1, "foreign_pids": []}
    free = ending | {"memory_bytes": 0, "processes": 0}
    stranger = ending | {"foreign_pids": [7]}
    gpus = SampledGpus(None, [], "t" * 32)
    for samples, expected in (
        ([ending, free | {"busy_percent": 3}, free], free),
        ([stranger, free], stranger),
        ([ending | {"memory_bytes": 5 << 20}, free], ending | {"memory_bytes": 5 << 20}),
    ):
        each = iter(samples)
        monkeypatch.setattr(gpus, "sample", lambda each=each: [next(each)])
        assert gpus.settled() == [expected]


# What the report says.


def test_the_report_tells_the_efficiency_at_equal_clocks_and_what_was_inherited():
    """The compiled cells of four H200s: a power cap takes what a pair loses, 3 % of its clock."""
    study = open_study(DATA / "h200_x4" / "scaling")
    findings = findings_of(study)
    section = scaling(study, findings)
    rows = section.tables[0].to_json()
    (row,) = [
        each for each in rows if each["curve"] == "resnet50 · compile" and each["gpus"] == "0,1"
    ]
    shares = [row[name] for name in ("efficiency", "efficiency_at_equal_clocks")]
    assert shares == pytest.approx([0.976, 1.008], abs=5e-4)
    assert "SM clock" in section.tables[0].caption
    (line,) = environment_section(study, findings).lines
    assert "NCCL_NVLS_ENABLE=0" in line and "NCCL_RAS_ENABLE" not in line
