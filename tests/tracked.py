"""A study for tests of the MLflow store: its records, their folders, its sweep, and what a store holds of them."""

import dataclasses
import sqlite3

from benchmarks import record as records
from benchmarks.record import CellFolder, Kind, Lines, Record
from conf.cell import Cell, Network, Optimizer
from launch.study.identity import ProcessIdentity, Sweep

START = 1_795_000_000.0


def make_record(number=0, **changes):
    """A finished cell; `number` makes its ids and times its own."""
    cell = Cell(
        model=Network("resnet50", "torchvision", "resnet50", 3, 1000, 224, 0.0, {}),
        strategy={"name": "nccl_allreduce", "bucket_cap_mb": 25, "comm_hook": "none"},
        benchmark={"name": "throughput", "windows": 5},
        nccl={"NCCL_P2P_LEVEL": "LOC"},
        optimizer=Optimizer(),
        profiler="none",
        gpus=(0, 3),
        device="cuda",
        batch_size=256,
        global_batch_size=None,
        precision="bf16",
        optimize="eager",
        channels_last=True,
        seed=0,
    )
    made = Record(
        record_id=f"{number:032x}",
        cell_key=f"{number:016x}",
        name="resnet50 · nccl_allreduce · gpus 0,3 · P2P_LEVEL=LOC",
        cell=cell,
        study="scaling",
        sweep_id="a" * 32,
        overrides=["gpus=0,3", "nccl.p2p_level=LOC"],
        state="finished",
        started_at=START + number,
        ended_at=START + number + 60,
        model={"parameters": 25557032.0, "gradient_bytes": 102228128.0},
        metrics={"throughput/images_per_second": 5000.0, "comm/busbw_gb_per_s": 12.5},
        series={"step/ms": [[0, 51.0], [1, 50.0], [2, 50.0]]},
        effective={"transport": "SHM", "link_class": "NV18"},
        environment={
            "host": "launcher",
            "cpu": {"model": "Xeon"},
            "gpu": {
                "driver": "580.159.04",
                "gpus": [{"id": 0, "name": "NVIDIA H200"}, {"id": 3, "name": "NVIDIA H200"}],
            },
            "versions": {"torch": "2.11.0+cu130", "nccl": "2.28.9"},
            "git": {"commit": "c" * 40},
        },
        ranks=[{"rank": 0, "host": "node7"}, {"rank": 1, "host": "node7"}],
    )
    return dataclasses.replace(made, **changes)


def make_folder(study_dir, record):
    """A cell's folder with its record, as the supervisor leaves it."""
    folder = study_dir / f"cell-{record.record_id[-6:]}"
    for name in ("ranks", "logs", "nccl"):
        (folder / name).mkdir(parents=True)
    (folder / "ranks" / "0.jsonl").write_text('{"kind": "start", "time": 1}\n')
    (folder / "logs" / "0.log").write_text("rank 0\n")
    (folder / "nccl" / "0.log").write_text("NCCL INFO\n")
    (folder / "topology.txt").write_text("GPU0\n")
    records.write(CellFolder(folder), record)
    return folder


def make_sweep(cells=2):
    return Sweep("a" * 32, "scaling", ["gpus=0,3"], START, cells, ProcessIdentity.own())


def rows(file):
    """Every row of every table: what 'changes nothing' means."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        tables = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        return {
            name: sorted(map(repr, connection.execute(f'SELECT * FROM "{name}"')))
            for name in tables
        }


def runs(tracker):
    return {run.info.run_name: run for run in tracker._client.search_runs([tracker._experiment])}


def write_samples(folder, seconds, began=START):
    """A sample every half second of two GPUs, every second of the CPU, as the sampler of a cell writes them."""
    gpus, cpu = Lines(CellFolder(folder).gpu_samples), Lines(CellFolder(folder).cpu_samples)
    for number in range(2 * seconds):
        of_gpus = [
            {"sm_mhz": 1980, "power_w": 600.5 + gpu, "memory_bytes": 3 * 10**9, "busy_percent": 99}
            for gpu in (0, 1)
        ]
        gpus.write(Kind.SAMPLE, began + number / 2, gpus=of_gpus)
        if number % 2 == 0:
            cpu.write(
                Kind.SAMPLE, began + number / 2, cores=4, busy_s=number * 1.0, own_s=number * 0.5
            )
    gpus.write(Kind.SAMPLE, began, gpus="damaged")
