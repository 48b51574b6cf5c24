"""A cell that needs too much memory is refused; a file in /dev/shm is whole, or not there."""

import dataclasses
import errno
import shutil
import sys
from pathlib import Path

import pytest
from build import composed_cell, make_cell, strategy_of

from benchmarks.request import Room, refuse
from conf.cell import Network
from conf.host import SHARED_MEMORY_FOLDER as FOLDER
from conf.options import Refused
from launch.plan.refusals import PLENTY_BYTES, refuse_too_little
from trainers import memory, needed_memory


def cell_with(gpus=(0, 1), **strategy):
    return make_cell(gpus, strategy=strategy_of(strategy))


LITTLE = cell_with(name="cpu_staged")
MUCH = cell_with((0, 1, 2, 3), name="kvstore_dist_sync")
NONE = [cell_with(name=name) for name in ("nccl_allreduce", "none", "kvstore_device")]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_worker_adds_its_gradients_and_an_answer(workers):
    cell = make_cell(tuple(range(workers)), strategy=LITTLE.strategy)
    assert needed_memory.needed(cell)[0] == pytest.approx(
        (2 * workers + 1) * 4 * 1_199_882, rel=0.01
    )


def test_a_strategy_that_takes_none_needs_none():
    assert [needed_memory.needed(cell)[0] for cell in NONE] == [0, 0, 0]
    assert needed_memory.needed(cell_with(name="cpu_staged", transport="gloo"))[0] == 0
    refuse_too_little(NONE, free_bytes=0)


def test_what_does_not_fit_is_refused_with_how_much_is_needed_and_where(memory_needed):
    much = needed_memory.needed(MUCH)[0]
    assert needed_memory.needed(LITTLE)[0] < much
    with pytest.raises(Refused) as refused:
        refuse_too_little([LITTLE, MUCH], free_bytes=much - 1)  # the smaller one fits
    sentence = str(refused.value)
    needed, free = f"{much / 2**20:.1f} MiB", f"{(much - 1) / 2**20:.1f} MiB"
    start = f"strategy=kvstore_dist_sync: {MUCH.name} needs {needed} of shared memory in "
    assert sentence.startswith(start) and "\n" not in sentence
    assert f"in {FOLDER}, where {free} are free" in sentence


def test_what_a_model_of_the_users_own_prints_is_not_the_answer(tmp_path, monkeypatch):
    lines = ["from torch import nn", "def build(**sizes):", "    print(sizes)"]
    (tmp_path / "talks.py").write_text("\n".join([*lines, "    return nn.Linear(9, 9)\n"]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    network = Network("mine", "python", "talks:build", 1, 10, 28, 0.0, {})
    cell = dataclasses.replace(LITTLE, model=network)
    with pytest.raises(Refused, match=r"needs 0.0 MiB of shared memory"):
        refuse_too_little([cell], free_bytes=100)


def test_a_machine_without_shared_memory_measures_what_takes_none(monkeypatch, memory_needed):
    monkeypatch.setattr("conf.host.SHARED_MEMORY_FOLDER", Path("/nowhere"))
    refuse_too_little(NONE)
    with pytest.raises(Refused, match=r"where 0.0 MiB are free"):
        refuse_too_little([LITTLE])


def test_where_there_is_plenty_no_process_is_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    refuse_too_little([LITTLE, MUCH], free_bytes=PLENTY_BYTES * 10)
    with pytest.raises(FileNotFoundError):
        refuse_too_little([LITTLE, MUCH], free_bytes=PLENTY_BYTES * 10 - 1)


GIB = 1 << 30
GPU, CPU = {}, {"device": "cpu"}
ONE, ONE_CPU = {"gpus": (0,)}, {"gpus": (0,), "device": "cpu"}
ROWS = "jacobi nx=100000 ny=4"
LARGEST = f"p2p bytes={11 * GIB}"
HALF = f"host_link bytes={(GIB >> 1) + 4}"
# A benchmark with options, where it runs, the memory there, and what is said; "": it fits.
ROOMS = [
    ("collectives max_bytes=40G", GPU, Room(80 * GIB),
     "max_bytes=40G: each rank needs 83.0 GiB, the smallest GPU has 80.0 GiB"),
    ("collectives max_bytes=900000G", CPU, Room(host_bytes=8 * GIB),
     "a share of the host's free memory among 2 is"),
    ("collectives max_bytes=38G", GPU, Room(80 * GIB), ""),
    ("collectives max_bytes=70G placement=in", GPU, Room(80 * GIB), ""),
    ("collectives cuda_graph=true", GPU, Room(80 * GIB), ""),
    ("collectives max_bytes=40G", GPU, Room(), ""),
    ("collectives", ONE_CPU, Room(host_bytes=8 * GIB), ""),
    ("p2p bytes=40000000000", GPU, Room(24 * GIB),
     "bytes=40000000000: the buffers do not fit the smallest GPU's"),
    ("p2p bytes=1000000000000", CPU, Room(None, 8 * GIB),
     "bytes=1000000000000: the buffers do not fit the host's free"),
    ("p2p bytes=4000000", CPU, Room(shared_bytes=0),
     "bytes=4000000: the buffers do not fit /dev/shm; expected at most 0"),
    (LARGEST, GPU, Room(24 * GIB), ""),
    (LARGEST, GPU, Room(), ""),  # the driver did not say
    (HALF, GPU, Room(GIB, 8 * GIB),
     "bytes=536870916: the buffers of 2 ranks do not fit the smallest GPU's memory"),
    (f"host_link bytes={1 << 40}", CPU, Room(None, 8 * GIB),
     "the buffers of 2 ranks do not fit the host's free memory"),
    (f"host_link bytes={(1 << 20) + 2}", CPU, Room(None, 8 * GIB), "expected multiples of 4"),
    ("jacobi nx=100000", GPU, Room(80 * GIB, 8 * GIB, GIB),
     "ny=100000: each rank needs 151.5 GiB, the smallest GPU"),
    ("jacobi nx=1000000", CPU, Room(80 * GIB, 8 * GIB, GIB), "each rank needs"),
    (ROWS, CPU, Room(shared_bytes=1 << 20), "exchange=host benchmark.nx=100000: .* needs 3.1 MiB "
     "of shared memory in /dev/shm, where 1.0 MiB are"),
    (ROWS, CPU, Room(shared_bytes=4096 + 8 * 4 * 100_000), ""),
    ("jacobi ny=4", GPU, Room(80 * GIB), ""),
    ("jacobi", ONE, Room(16 * GIB), ""),
    ("jacobi", CPU, Room(host_bytes=GIB), ""),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "where", "room", "said"), ROOMS)
def test_what_a_benchmark_needs_of_a_machines_memory(hydra, asked, where, room, said):
    """tests/golden/refusals.txt has what else cannot be measured."""
    name, *options = asked.split()
    options = [f"benchmark.{option}" for option in options]
    cell = composed_cell(f"benchmark={name}", *options, **where)
    if not said:
        refuse(cell, room)
        return
    with pytest.raises(Refused, match=f"^benchmark.*{said}"):
        refuse(cell, room)


def test_what_one_process_writes_into_a_mapping_another_reads():
    path = memory.new_path()
    assert path.parent == FOLDER and path != memory.new_path()
    try:
        mine = memory.create(path, 5000)
        assert bytes(mine) == bytes(5000)
        mine[4999] = 7
        assert memory.attach(path, 5000)[4999] == 7
        with pytest.raises(FileExistsError):  # nobody's file is taken over
            memory.create(path, 5000)
    finally:
        path.unlink()


def test_a_file_that_does_not_fit_is_removed_and_says_how_much_it_needed():
    path, size = memory.new_path(), shutil.disk_usage(FOLDER).total + 2**20
    needed = f"{size / 2**20:.0f} MiB of shared memory in {FOLDER}: there is not that much"
    with pytest.raises(OSError, match=needed) as error:
        memory.create(path, size)
    assert error.value.errno == errno.ENOSPC and not path.exists()
