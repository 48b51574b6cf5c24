"""Samples of the hosts of a cell: taken beside each agent, read host after host, and judged with the host's name."""

import dataclasses
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from build import DATA, ROOT

from analysis.validity.check import unchecked
from analysis.validity.checks import judge
from analysis.validity.gpu_samples import summary
from analysis.validity.surroundings import foreign_load_timed
from analysis.verification.complete import device_use
from analysis.verification.rebuild import rebuilt
from benchmarks import record as records
from benchmarks.agent.protocol import wait_readable
from benchmarks.agent.sampler import SamplingProcess
from benchmarks.record import CellFolder, read_lines
from benchmarks.record.lines import CLOCK_VARIABLE, beginning, now
from conf.schema import ValidityLimits

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
RAW = DATA / "raw_lines" / "h200_x2" / "resnet50-nccl_allreduce-gpus0-1-1320f9f3be"
H200_X1 = RAW.parent.parent / "h200_x1"
STRANGER = RAW.parent.parent / "h200_x1_stranger"
PHASES = [
    line for line in read_lines(RAW / "ranks" / "0.jsonl") if line["kind"] in ("phase", "result")
]
GIB = 2**30
QUIET = {"grown_bytes": 0, "foreign_bytes": 0, "processes": 0, "busy_percent": 100.0}
UNKNOWN = unchecked("no sample tells whose memory it is, nor how busy the GPUs were")
IDLE = {"sm_mhz": 1980, "reasons": 1, "memory_bytes": 0, "busy_percent": 0, "foreign_pids": []}


def sampled(tmp_path, *hosts):
    """The record of a real cell of two GPUs as if its ranks had been on two hosts, each with samples of its GPU and its CPU.

    A host is (what a sample of its GPU says while steps run, the share of its cores that others use).
    """
    folder = CellFolder(Path(shutil.copytree(RAW, tmp_path / "cell")))
    began, ended = PHASES[0]["time"] - 2, PHASES[-1]["time"] + 2
    steps = next(line["time"] for line in PHASES if line.get("phase") == "first step")
    for number, (said, others) in enumerate(hosts):
        gpus, load = [{"kind": "before", "time": began, "gpus": [IDLE]}], []
        for moment in (began + part / 2 for part in range(int(2 * (ended - began)) + 1)):
            busy = {**IDLE, "reasons": 0, "memory_bytes": 40 * GIB, **said}
            gpu = busy if moment >= steps else IDLE
            gpus.append({"kind": "sample", "time": moment + number / 10, "gpus": [gpu]})
            busy_s = 4 * others * (moment - began) + 1
            used = {"cores": 4, "busy_s": busy_s, "own_s": 1.0}
            load.append({"kind": "sample", "time": moment, **used})
        for kind, lines in (("gpus", gpus), ("cpu", load)):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            folder.samples_of(kind, number).write_text(text)
    metrics, checks = summary(folder)
    record = records.read(folder.record)
    cell = dataclasses.replace(record.cell, hosts=("a", "b"), gpus=(0,))
    metrics, checks = record.metrics | metrics, record.checks | checks
    return dataclasses.replace(record, cell=cell, metrics=metrics, checks=checks), folder


def test_images_per_joule_rest_on_the_counter_of_energy(tmp_path):
    _, folder = sampled(tmp_path, ({"power_w": 500}, 0.0))
    lines = list(read_lines(folder.gpu_samples))
    for line in lines:
        line["gpus"][0]["energy_j"] = 700 * (line["time"] - lines[0]["time"])
    del lines[len(lines) // 2]["gpus"][0]["energy_j"]
    for counted, power_w in ((len(lines), pytest.approx(700)), (3, None)):  # three: too short
        for line in lines[counted:]:
            line["gpus"][0].pop("energy_j", None)
        folder.gpu_samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics, checks = summary(folder)
        assert checks["gpu_samples"].get("counted_power_w") == power_w
        assert metrics["gpu/power_w"] == 500
    record = records.read(folder.record)
    used = device_use(record, 700.0)["energy/images_per_joule"]
    assert used == record.metrics["throughput/images_per_second"] / 700
    assert "energy/images_per_joule" not in device_use(record, None)


def codes(record):
    """What the checks of samples say, and what they could not check."""
    judged = judge(record, ValidityLimits())
    names = ("throttled", "foreign_load", "foreign_cpu", "clocks_differ")
    return [
        {name: text for name, text in part.items() if name in names}
        for part in (judged.codes, judged.unchecked)
    ]


def test_the_gpus_of_all_hosts_are_in_the_order_of_the_ranks(tmp_path):
    record, _ = sampled(
        tmp_path, ({"sm_mhz": 1980, "power_w": 600}, 0.01), ({"sm_mhz": 1960, "power_w": 500}, 0.05)
    )
    assert codes(record) == [{}, {}]
    timed = record.checks["gpu_samples"]["phases"]["timed"]
    assert timed["sm_mhz"] == [1980, 1960] and timed["power_w"] == [600, 500]
    assert record.metrics["gpu/power_w"] == pytest.approx(550, abs=1)
    assert record.checks["cpu_samples"]["others_share"]["timed"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("said", "others", "code", "words"),
    [
        ({"reasons": 0x40}, 0.0, "throttled", "0x40 on host b in the timed phase"),
        ({"foreign_pids": [77]}, 0.0, "foreign_load", "processes 77 on host b"),
        (
            {"sm_mhz": 1200, "reasons": 4},
            0.0,
            "clocks_differ",
            "GPU b:0 1,200 MHz, GPU a:0 1,980 MHz",
        ),
        ({}, 0.5, "foreign_cpu", "50.0 % of 4 cores on host b"),
    ],
)
def test_what_happens_on_one_host_is_told_with_its_name(tmp_path, said, others, code, words):
    found, unknown = codes(sampled(tmp_path, ({}, 0.0), (said, others))[0])
    assert set(found) == {code} and words in found[code] and unknown == {}


def test_a_host_without_samples_is_unchecked_and_the_other_keeps_its_place(tmp_path):
    record, folder = sampled(tmp_path, ({}, 0.0), ({"sm_mhz": 1960}, 0.0))
    folder.samples_of("gpus", 0).unlink()
    folder.samples_of("cpu", 1).unlink()
    checks = summary(folder)[1]
    assert checks["gpu_samples"]["phases"]["timed"]["sm_mhz"] == [None, 1960]
    found, unknown = codes(dataclasses.replace(record, checks=record.checks | checks))
    assert found == {} and "on host a were not read" in unknown["throttled"]
    assert "of the CPU on host b was not sampled" in unknown["foreign_cpu"]


def test_files_of_further_hosts_are_hashed_packed_set_aside_and_verified(tmp_path):
    record, folder = sampled(tmp_path, ({}, 0.0), ({"power_w": 500}, 0.0))
    names = {"gpus.jsonl", "gpus-1.jsonl", "cpu.jsonl", "cpu-1.jsonl"}
    record = dataclasses.replace(record, raw_sha256=folder.raw_sha256())
    assert names <= record.raw_sha256.keys()
    folder.pack()
    assert folder.raw_sha256() == record.raw_sha256
    assert {path.name for path in folder.published()} >= names
    cell = dataclasses.replace(record.cell, hosts=(), gpus=(0, 1))
    alone = dataclasses.replace(record, cell=cell)

    def again():
        return rebuilt(alone, folder, [], lambda one: folder)

    assert again().record.metrics["gpu/power_w"] == record.metrics["gpu/power_w"]
    assert again().unknown == {"effective"}
    (folder.path / "gpus-1.jsonl.gz").unlink()
    assert {"metrics gpu/power_w", "checks gpu_samples"} <= again().unknown, "of both hosts"
    folder.set_aside()
    assert {path.name for path in folder.path.iterdir()} == {"attempt-1"}


BURN = "import time\nwhile time.process_time() < 0.3: pass"
AGENT = """
import os
from benchmarks.agent.sampler import SamplingProcess
from benchmarks.agent.scratch import Scratch
from benchmarks.record import CellFolder
scratch = Scratch.make("0" * 32, {"cell.json": "{}"})
sampling = SamplingProcess(CellFolder(scratch.folder), "token", [], os.environ)
sampling.start(lambda: None)
print(sampling._process.pid, flush=True)
input()
"""


def test_another_process_samples_and_the_tree_of_its_parent_is_the_cells_own(tmp_path):
    folder = CellFolder(tmp_path)
    around = {**os.environ, CLOCK_VARIABLE: repr(beginning() - 1000)}
    sampling = SamplingProcess(folder, "token", [], around)
    sampling.start(lambda: None)
    first = list(read_lines(folder.cpu_samples))
    assert first, "there is a sample before any rank starts"
    # a rank: a child of what started the sampling
    subprocess.run([sys.executable, "-c", BURN], check=True)
    sampling.end()
    lines = list(read_lines(folder.cpu_samples))
    assert lines[-1]["own_s"] - first[0]["own_s"] > 0.25
    assert -1010 < lines[-1]["time"] - now() < -990, "by the clock of the sweep"
    assert not folder.gpu_samples.exists(), "there is no GPU to sample"
    sampling.end()  # once more does nothing


def test_sampling_ends_with_its_agent_however_that_ends_and_removes_what_the_agent_made(tmp_path):
    command, around = [sys.executable, "-c", AGENT], {**os.environ, "TMPDIR": str(tmp_path)}
    agent = subprocess.Popen(command, cwd=ROOT, env=around, **PIPES)
    sampler = psutil.Process(int(agent.stdout.readline()))
    (folder,) = tmp_path.iterdir()
    assert (folder / "cpu.jsonl").exists()
    agent.kill()
    agent.wait()
    sampler.wait(timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_a_fork_holds_no_pipe_to_what_samples(tmp_path):
    sampling = SamplingProcess(CellFolder(tmp_path), "token", [], os.environ)
    sampling.start(lambda: None)
    pipes = [pipe.fileno() for pipe in (sampling._process.stdin, sampling._process.stdout)]
    if (child := os.fork()) == 0:
        sampling.let_go()
        held = [number for number in pipes if os.path.lexists(f"/proc/self/fd/{number}")]
        os._exit(len(held))
    sampling.end()
    assert os.waitpid(child, 0)[1] == 0


def test_descriptors_from_1024_on_are_waited_for():
    (soft, hard), (read, write) = resource.getrlimit(resource.RLIMIT_NOFILE), os.pipe()
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD, 1500)
        assert wait_readable([high], 0.0) == wait_readable([high], 0.0, writing=[write]) == []
        os.write(write, b"x")
        assert wait_readable([read, high], 0.0) == [read, high]
        os.close(write)
        os.read(high, 1)
        assert wait_readable([high], 0.0) == [high], "the end can be read"
    finally:
        os.close(high)
        os.close(read)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_is_gone_costs_no_cell(tmp_path):
    sampling = SamplingProcess(CellFolder(tmp_path / "gone"), "token", [], os.environ)
    sampling.start(lambda: None)
    sampling.end()


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ([QUIET, QUIET, {}], None),  # the third host has servers alone
        ([QUIET, QUIET | {"foreign_bytes": GIB}, {}], "memory that is not the run's grew by 1.0 GiB on host b"),
        ([QUIET | {"processes": 2}, QUIET, {}], "2 more in the driver's list of processes on host a"),
        ([QUIET, {}, {}], UNKNOWN),
    ],
)  # fmt: skip
def test_a_program_that_begins_on_one_host_is_told_with_its_name(windows, said):
    record = records.read(RAW / "record.json")
    cell = dataclasses.replace(record.cell, hosts=("a", "b"), gpus=(0,))
    changed = dataclasses.replace(record, cell=cell, checks={"gpu_windows": windows})
    assert foreign_load_timed.judge(changed, ValidityLimits()) == said


def test_a_stranger_of_another_container_on_an_h200_is_told():
    """It began in the windows, loaded the GPU by a tenth, and had a pid that the ranks cannot see."""
    cell = "resnet50-none-gpus0-3aed586ddd/record.json"
    alone, beside = records.read(H200_X1 / cell), records.read(STRANGER / cell)
    assert judge(alone, ValidityLimits()).verdict == "valid"
    grown = "memory that is not the run's grew by 0.9 GiB"
    assert grown in judge(beside, ValidityLimits()).codes["foreign_load_timed"]
    rates = [record.metrics["throughput/images_per_second"] for record in (alone, beside)]
    assert rates[1] < 0.95 * rates[0]


def test_a_stranger_on_one_of_two_h200s_is_told_with_every_strategy(tmp_path):
    """`.ci/gpu/study.sh strangers`: a tenth of GPU 0, from the first timed step on."""
    shutil.unpack_archive(ROOT / "tests" / "data" / "strangers.tar.xz", tmp_path)
    told, rates = {}, {}
    for study in ("alone", "beside"):
        for record in records.read_study(tmp_path / "strangers" / study)[0]:
            codes = judge(record, ValidityLimits()).codes
            run = study, record.cell.strategy["name"]
            told[run] = {code for code in codes if code.startswith("foreign")}
            rates[run] = record.metrics["throughput/images_per_second"]
    assert told.pop(("beside", "fsdp")) == {"foreign_load", "foreign_load_timed"}
    names = {name for _, name in told}
    assert len(names) == 11 and len(told) == 22
    for name in names:
        assert told["alone", name] == set(), name
        assert told["beside", name] == {"foreign_load", "foreign_load_timed"}, name
    lost = [1 - rates["beside", name] / rates["alone", name] for name in names]
    assert [round(min(lost), 2), round(max(lost), 2)] == [-0.0, 0.12]


def test_a_share_of_the_peak_is_three_forward_passes_by_the_data_sheet():
    record = records.read(H200_X1 / "resnet50-none-gpus0-3aed586ddd" / "record.json")
    rate = record.metrics["throughput/images_per_second"]
    used = device_use(record, None)
    assert used["compute/tflops"] == pytest.approx(3 * 8.178e-3 * rate, rel=1e-3)
    assert used["compute/mfu"] == pytest.approx(used["compute/tflops"] / 989.4)
    unknown = dataclasses.replace(record, ranks=[{"name": "NVIDIA X"}])
    assert device_use(unknown, None) == {"compute/tflops": used["compute/tflops"]}


@pytest.mark.parametrize("missing", ["own_bytes", "memory_bytes", "processes", "busy_percent"])
def test_what_a_driver_does_not_say_is_none_in_the_windows(tmp_path, missing):
    said = {"own_bytes": 40 * GIB, "processes": 1}
    folder = sampled(tmp_path, (said, 0.0))[1]
    (plain,) = summary(folder)[1]["gpu_windows"]
    lines = [json.loads(line) for line in folder.gpu_samples.read_text().splitlines()]
    for line in lines[::2]:
        line["gpus"][0].pop(missing, None)
    folder.gpu_samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (some,) = summary(folder)[1]["gpu_windows"]
    assert (plain["foreign_bytes"], plain["processes"]) == (0, 0)
    assert some["foreign_bytes"] in (0, None) and some["processes"] in (0, None)
