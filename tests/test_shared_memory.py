"""A cell that needs too much shared memory is refused before it starts; a file in /dev/shm is whole, or is not there."""

import dataclasses
import errno
import shutil
import sys
from pathlib import Path

import pytest
from build import make_cell, strategy_of

from conf.cell import Network
from conf.options import Refused
from conf.process_env import SHARED_MEMORY_FOLDER as FOLDER
from launch.plan.refusals import PLENTY_BYTES, refuse_too_little
from trainers import memory
from trainers.needed_memory import shared_bytes

LITTLE = make_cell(strategy=strategy_of({"name": "cpu_staged"}))
MUCH = make_cell((0, 1, 2, 3), strategy=strategy_of({"name": "kvstore_dist_sync"}))


def test_every_worker_adds_its_gradients():
    bytes_of = {
        workers: shared_bytes(make_cell(tuple(range(workers)), strategy=LITTLE.strategy))
        for workers in (1, 2, 4)
    }
    gradient_bytes = 4 * 1_199_882
    for (
        workers,
        found,
    ) in bytes_of.items():  # and an answer for each, beside the weights; on GPUs one answer for all
        assert found == pytest.approx((2 * workers + 1) * gradient_bytes, rel=0.01)


def test_a_strategy_that_takes_none_needs_none():
    for name in ("nccl_allreduce", "none", "kvstore_device"):
        assert shared_bytes(make_cell(strategy=strategy_of({"name": name}))) == 0
        refuse_too_little([make_cell(strategy=strategy_of({"name": name}))], free_bytes=0)
    assert (
        shared_bytes(make_cell(strategy=strategy_of({"name": "cpu_staged", "transport": "gloo"})))
        == 0
    )


def test_what_does_not_fit_is_refused_with_how_much_is_needed_and_where():
    little, much = shared_bytes(LITTLE), shared_bytes(MUCH)
    assert little < much
    with pytest.raises(Refused) as refused:
        refuse_too_little([LITTLE, MUCH], free_bytes=much - 1)  # the smaller one fits
    sentence = str(refused.value)
    assert sentence.startswith(
        f"strategy=kvstore_dist_sync: {MUCH.name} needs {much / 2**20:.1f} MiB of shared memory in "
    )
    assert (
        f"in {FOLDER}, where {(much - 1) / 2**20:.1f} MiB are free" in sentence
        and "\n" not in sentence
    )


def test_what_a_model_of_the_users_own_prints_is_not_the_answer(tmp_path, monkeypatch):
    (tmp_path / "talks.py").write_text(
        "from torch import nn\n\n\ndef build(**sizes):\n    print(sizes)\n    return nn.Linear(9, 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cell = dataclasses.replace(
        LITTLE, model=Network("mine", "python", "talks:build", 1, 10, 28, 0.0, {})
    )
    refuse_too_little([cell], free_bytes=100_000)
    with pytest.raises(Refused, match=r"needs 0.0 MiB of shared memory"):
        refuse_too_little([cell], free_bytes=100)


def test_a_machine_without_shared_memory_measures_what_takes_none(monkeypatch):
    monkeypatch.setattr("conf.host_limits.SHARED_MEMORY_FOLDER", Path("/nowhere"))
    refuse_too_little([make_cell(strategy=strategy_of({"name": "nccl_allreduce"}))])
    with pytest.raises(Refused, match=r"where 0.0 MiB are free"):
        refuse_too_little([LITTLE])


def test_where_there_is_plenty_no_process_is_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere")
    refuse_too_little([LITTLE, MUCH], free_bytes=PLENTY_BYTES * 10)
    with pytest.raises(FileNotFoundError):
        refuse_too_little([LITTLE, MUCH], free_bytes=PLENTY_BYTES * 10 - 1)


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
    with pytest.raises(
        OSError,
        match=f"{size / 2**20:.0f} MiB of shared memory in {FOLDER}: there is not that much",
    ) as error:
        memory.create(path, size)
    assert error.value.errno == errno.ENOSPC
    assert not path.exists()
