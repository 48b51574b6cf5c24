"""What a plan knows of a machine, with a driver that refuses some questions."""

import os
import pwd
import shutil
import sys
import types
from pathlib import Path

import pytest
from build import ROOT

import trainers.process
from analysis.validity.gpu_samples import summary
from benchmarks.agent.sampler import Sampler
from benchmarks.record import CellFolder, Lines
from conf import host, nccl
from conf.options import Refused
from launch.machine import devices
from launch.machine.facts import _gpu_facts, nccl_configuration
from launch.study.background import StudyReport
from launch.supervision.watch import Watch


def in_control_groups(folder, monkeypatch, groups, files):
    """This process is in these control groups, as /proc/self/cgroup has them, with these files."""
    for name, text in {**files, "groups": groups}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr("conf.host.GROUPS", folder / "groups")
    monkeypatch.setattr("conf.host.MOUNTED", folder)


QUOTA, PERIOD = "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"


class NVMLError(Exception):
    """As pynvml raises it."""


def refuse(*_):
    raise NVMLError("Insufficient Permissions")


UNANSWERED = [
    "ClockInfo", "ComputeRunningProcesses", "CurrentClocksEventReasons", "MaxClockInfo",
    "MemoryInfo", "NvLinkState", "PowerUsage", "Temperature", "UtilizationRates",
]  # fmt: skip


@pytest.fixture
def driver(monkeypatch):
    """A driver with two GPUs that answers what every driver answers, and refuses the rest."""
    fake = types.ModuleType("pynvml")
    vars(fake).update(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=0, NVML_CLOCK_MEM=0, NVML_TEMPERATURE_GPU=0, nvmlMemory_v2=2,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}000",
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetPciInfo=lambda gpu: types.SimpleNamespace(busId=f"00000000:0{6 + gpu}:00.0"),
    )  # fmt: skip
    for name in UNANSWERED:
        setattr(fake, f"nvmlDeviceGet{name}", refuse)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(devices, "_torch_version_file", lambda: "")
    return fake


def test_devices_are_found_by_number_uuid_and_bus_id(driver):
    here = devices.look("auto", {})
    assert here.kind == "cuda" and here.all_gpus == (0, 1)
    assert {here.device(text, "").id for text in ("1", "GPU-1000", "07:00.0")} == {1}
    assert here.device("0000:06:00.0", "").id == 0
    with pytest.raises(Refused, match="gpus=9: this machine has no GPU 9; it has 0, 1"):
        here.device("9", "9")


def test_the_surroundings_may_hide_gpus(driver):
    for visible, left in (("1", (1,)), ("GPU-0000,GPU-1000", (0, 1)), ("GPU-1", (1,))):
        assert devices.look("cuda", {"CUDA_VISIBLE_DEVICES": visible}).all_gpus == left
    with pytest.raises(Refused, match=r"device=cuda: CUDA_VISIBLE_DEVICES=MIG-1 leaves no GPU"):
        devices.look("cuda", {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert "leaves no GPU" in devices.look("auto", {"CUDA_VISIBLE_DEVICES": ""}).why
    driver.nvmlDeviceGetCount = refuse
    assert devices.look("auto", {}).why.startswith("no NVIDIA driver answers")


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 16),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, 3),
        ("0::/../x\n", {"cpu.max": "20000 100000"}, 1),  # seen from inside a container
        ("3:memory:/m\n2:cpu,cpuacct:/d\n0::/\n", {QUOTA: "200000", PERIOD: "100000"}, 2),
        ("2:cpu:/\n", {QUOTA: "-1", PERIOD: "100000"}, 16),
        ("2:cpu:/\n", {QUOTA: "", PERIOD: "0"}, 16),
    ],
)
def test_a_limit_of_cpu_time_is_as_many_cores(tmp_path, monkeypatch, groups, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    in_control_groups(tmp_path, monkeypatch, groups, files)
    assert devices.look("cpu", {}).cores == cores


def test_ranks_watches_and_the_report_count_the_cores_that_a_plan_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    in_control_groups(tmp_path, monkeypatch, "0::/\n", {"cpu.max": "100000 100000"})
    code = Path(trainers.process.__file__).read_text(encoding="utf-8")
    exec(compile(code, "trainers/process.py", "exec"), ranks := {"__name__": "devices"})
    assert ranks["CORES"] == 1
    watch = Watch(CellFolder(tmp_path), 1)
    watch.ranks[0].pid = 1000
    assert watch.needs_quiet  # two threads, one core
    monkeypatch.setattr("importlib.import_module", pytest.fail)  # it takes time from the ranks
    StudyReport(tmp_path, True, print).prepare(may_go_on=lambda: True)


def test_cores_are_counted_in_one_place():
    asks = set()
    for package in ("conf", "trainers", "benchmarks", "launch", "analysis"):
        for path in (ROOT / package).rglob("*.py"):
            if "sched_getaffinity" in path.read_text(encoding="utf-8"):
                asks.add(str(path.relative_to(ROOT)))
    assert asks == {
        "conf/host.py",
        "trainers/process.py",  # which of them are near a GPU
        "benchmarks/agent/sampler.py",  # whose load is counted
    }


MIB, UNLIMITED = 1 << 20, str((1 << 63) - 4096)
MEMORY = {"meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable:   {32 << 20} kB\n"}
LIMIT, USED = str(900 * MIB), str(500 * MIB)
TOTALS = f"total_inactive_file {40 * MIB}\ntotal_active_file {20 * MIB}\n"
OF_TWO = {
    "a/memory.max": LIMIT, "a/memory.current": USED, "a/b/memory.max": "max",
    "a/memory.stat": f"anon 7\ninactive_file {60 * MIB}\n", "a/b/memory.current": "7",
}  # fmt: skip
OF_ONE = {
    "memory/m/memory.limit_in_bytes": LIMIT, "memory/m/memory.usage_in_bytes": USED,
    "memory/m/memory.stat": f"inactive_file 7\n{TOTALS}",
    "memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": "7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("0::/\n", {}, 32 << 30),
        ("0::/a/b\n", OF_TWO, 460 * MIB),
        # Seen from inside a container.
        ("0::/../x\n", {"memory.max": str(9 * MIB), "memory.current": str(10 * MIB)}, 0),
        ("2:cpu:/m\n1:memory:/m\n0::/\n", OF_ONE, 460 * MIB),
        ("1:memory:/m\n", {name: OF_ONE[name] for name in OF_ONE if "/m/" not in name}, 32 << 30),
    ],
)
def test_a_limit_of_memory_is_as_much_memory(tmp_path, monkeypatch, groups, files, free):
    in_control_groups(tmp_path, monkeypatch, groups, {**files, **MEMORY})
    monkeypatch.setattr("conf.host.MEMORY", tmp_path / "meminfo")
    assert host.free_memory() == free
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=1 << 40))
    assert host.free_shared_memory() == free  # what lies there is memory too
    monkeypatch.setattr("conf.host.MEMORY", tmp_path / "nothing")
    assert host.free_memory() is None and host.free_shared_memory() == 1 << 40


def test_a_gpu_that_the_driver_refuses_is_left_out(driver):
    driver.nvmlDeviceGetUUID = lambda handle: refuse() if handle == 0 else "GPU-1000"
    assert devices.look("auto", {}).all_gpus == (1,)
    driver.nvmlDeviceGetUUID = refuse
    assert "the driver refuses GPU 1 (Insufficient Permissions)" in devices.look("auto", {}).why


def test_facts_hold_what_the_driver_tells(driver):
    facts = _gpu_facts()
    assert facts["driver"] == "580.1"
    assert [gpu["name"] for gpu in facts["gpus"]] == ["NVIDIA H200"] * 2
    assert "memory_bytes" not in facts["gpus"][0] and facts["gpus"][0]["nvlinks"] == 0


def sampled(folder):
    with Sampler(CellFolder(folder).make(), ["GPU-0000"], "token"):
        pass
    return summary(CellFolder(folder))


def test_what_cannot_be_sampled_is_not_known_and_a_lost_gpu_is_not_sampled(driver, tmp_path):
    samples = sampled(tmp_path / "refuses")[1]["gpu_samples"]
    assert samples["before_memory_bytes"] is None and samples["before_busy_percent"] is None
    assert samples["processes_known"] is False and samples["samples"] == 0
    driver.nvmlDeviceGetHandleByUUID = refuse
    metrics, checks = sampled(tmp_path / "lost")
    assert metrics == {} and "gpu_samples" not in checks


THROUGHPUT = "build|first step|warm-up|check|timed|compare|held|exchange|references|exposed"
PHASES = {
    "throughput": (THROUGHPUT, [4]),
    "between timed windows": ("check|timed|exposed|timed|compare|exchange", [1, 3]),
    "stopped": ("build|first step|warm-up", []),
    "p2p": ("build|verify|timed|concurrent", [2, 3]),
    "collectives": ("connect|measure", [1]),
    "exchange": ("build|check|exchange|references", [2, 3]),
    "jacobi": ("one rank|all ranks", [0, 1]),
    "host_link": ("to_device pinned|to_host pinned all at once", [0, 1]),
}


@pytest.mark.parametrize("benchmark", PHASES)
def test_samples_of_the_timed_window_are_those_of_measuring_phases(tmp_path, benchmark):
    """A phase lasts ten seconds, with a sample in its middle whose temperature is its number."""
    words, inside = PHASES[benchmark]
    phases = words.split("|")
    folder = CellFolder(tmp_path).make()
    rank, gpus = Lines(folder.rank_lines(0)), Lines(folder.gpu_samples)
    for number, name in enumerate(phases):
        rank.write("phase", 10 * number, phase=name)
    rank.write("result", 10 * len(phases))
    rank.write("done", 10 * len(phases) + 9)
    for number in range(-1, len(phases) + 1):
        gpu = {"temperature_c": number, "reasons": 0x40}
        gpus.write("sample", 10 * number + 5, gpus=[gpu])
    metrics, checks = summary(folder)
    assert checks["gpu_samples"]["samples"] == len(inside)
    if inside:
        assert metrics["gpu/temperature_c"] == sum(inside) / len(inside)
        assert checks["gpu_samples"]["throttle_reasons"] == ["0x40"]


def test_nccls_own_files_can_forbid_multicast(tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("NCCL_DEBUG=WARN\nNCCL_NVLS_ENABLE=0\n")
    texts = nccl_configuration({"NCCL_CONF_FILE": str(file)})
    merged = nccl.with_configuration_files({"HOME": "h"}, texts)
    assert merged == {"HOME": "h", "NCCL_NVLS_ENABLE": "0"}
    with pytest.raises(Refused, match="forbids NVLink multicast"):
        nccl.refuse_multicast({"NCCL_NVLS_ENABLE": "1"}, merged)
    around = {"NCCL_NVLS_ENABLE": "1"}
    assert nccl.with_configuration_files(around, texts)["NCCL_NVLS_ENABLE"] == "1"


def test_the_users_own_file_is_in_the_home_that_the_system_knows(tmp_path, monkeypatch):
    (tmp_path / ".nccl.conf").write_text("NCCL_NVLS_ENABLE=0\n")
    monkeypatch.setattr(pwd, "getpwuid", lambda number: types.SimpleNamespace(pw_dir=str(tmp_path)))
    for around in ({"HOME": "/nowhere"}, {}, {"NCCL_CONF_FILE": ""}):
        assert nccl_configuration(around)[0] == "NCCL_NVLS_ENABLE=0\n", around

    def unknown(number):
        raise KeyError("getpwuid(): uid not found")  # as containers start a user

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    assert "NCCL_NVLS_ENABLE=0\n" not in nccl_configuration({})
