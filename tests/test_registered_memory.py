"""Buffers that NCCL has registered (memory=registered): who has them, how torch is asked, and what NCCL did."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from build import ROOT, composed_cell, strategy_of, target_of

from analysis.nccl.log import parse_nccl_log
from analysis.study.conditions import request_of
from analysis.validity.fast_paths import NO, UNKNOWN, YES, answers, asked_of_nccl
from benchmarks.record import read_study
from trainers import collectives
from trainers.strategy import Hosts, load

ASKED = {
    "ddp": ["strategy=nccl_allreduce", "strategy.memory=registered"],
    "kvstore": ["strategy=kvstore_device", "strategy.memory=registered"],
    "collectives": ["benchmark=collectives", "benchmark.memory=registered"],
}
GPU = torch.device("cuda", 0)
LACKING = "torch allocates memory by NCCL only on GPUs that could use NVLink multicast"


@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_plain_memory_leaves_a_cell_as_it_was_and_registered_is_another_cell(hydra, options):
    group = options[-1].partition(".")[0]
    usual = composed_cell(options[0])
    plain = composed_cell(options[0], f"{group}.memory=plain")
    registered = composed_cell(*options)
    assert plain == usual and "memory" not in getattr(usual, group) and not asked_of_nccl(usual)
    assert getattr(registered, group)["memory"] == "registered" and registered.key != usual.key
    assert request_of(registered).items() - request_of(usual).items() == {
        (f"{group}.memory", "registered")
    }
    assert asked_of_nccl(registered) == {f"{group}.memory": "registered"}
    assert not asked_of_nccl(composed_cell(*options, gpus=(0,))), "one rank exchanges nothing"


class Backend:
    """What `allocating` needs of torch's backend of NCCL; it notes what it is asked."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self, able=True):
        self.able, self.asked = able, []

    def supports_tensor_alloc(self, device):
        return self.able

    def register_mem_pool(self, *given, **named):
        self.asked.append((given, named))


@pytest.fixture
def nccl(monkeypatch):
    """Torch as if NCCL were there: its backend, and the pools that were used."""

    def made(backend):
        used = []
        world = SimpleNamespace(_get_backend=lambda device: backend)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
        monkeypatch.setattr(dist, "all_reduce", backend.asked.append)
        monkeypatch.setattr(torch, "zeros", lambda *given, **named: "communicator")
        monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
        using = lambda pool, device: used.append(pool) or nullcontext()  # noqa: E731
        monkeypatch.setattr(torch.cuda, "use_mem_pool", using)
        return used

    return made


def test_a_pool_is_registered_once_and_not_as_symmetric_memory(nccl):
    backend = Backend()
    used = nccl(backend)
    for memory in ("registered", "plain", "registered"):
        with collectives.allocating(memory, GPU):
            pass
    pool = "pool of ncclMemAlloc"
    assert backend.asked == ["communicator", ((pool,), {})] and used == [pool, pool]


def test_a_gpu_without_such_memory_is_told(nccl):
    nccl(Backend(able=False))
    with pytest.raises(RuntimeError, match="possible here: plain"):
        collectives.allocating("registered", GPU)


def test_ddp_allocates_plain_memory_whatever_surrounds_it(alone, monkeypatch):
    monkeypatch.setenv("DDP_DISABLE_COMM_MEM", "0")
    strategy = load(
        strategy_of({"name": "nccl_allreduce"}),
        target_of("strategy", "nccl_allreduce"),
        Hosts(((0,),)),
    )
    model = torch.nn.Linear(2, 2)
    strategy.prepare(model, torch.optim.SGD(model.parameters()))
    assert os.environ["DDP_DISABLE_COMM_MEM"] == "1"


def ran(folder, *options):
    """The record of one cell, with the least that is timed."""
    command = [sys.executable, "launch.py", *options, f"output_dir={folder}"]
    command += ["tracking=none", "report=false", "noise_pairs=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    if LACKING in done.stdout:
        pytest.skip(LACKING)
    assert done.returncode == 0, done.stdout + done.stderr
    (study,) = folder.glob("default*")
    ((record,), _) = read_study(study)
    assert record.validity.verdict != "invalid", record.validity.codes
    return record


def short(options):
    if "benchmark=collectives" in options:
        return [*options, "benchmark.max_bytes=64M", "benchmark.factor=16"]
    return [
        *options, "model=resnet18", "batch_size=16", "benchmark.max_seconds=0.5",
        "benchmark.exposed_rounds=1", "benchmark.warmup_min_seconds=0.3",
    ]  # fmt: skip


@pytest.mark.gpu
def test_a_rank_alone_sums_what_lies_in_registered_memory(tmp_path):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        total = own.submit(summed_alone, str(tmp_path / "log")).result()
    if LACKING in str(total):
        pytest.skip(LACKING)
    assert total == 1 << 20
    assert "register comm" in parse_nccl_log((tmp_path / "log").read_text()).paths


def summed_alone(log):
    """The sum of ones that NCCL has reduced in a process with this log."""
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,REG", "NCCL_DEBUG_FILE": log}
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        allocating = collectives.allocating("registered", GPU)
    except RuntimeError as error:
        return str(error)
    with allocating:
        ones = torch.ones(1 << 20, device=GPU)
    dist.all_reduce(ones)
    return ones.sum().item()


@pytest.mark.gpu
@pytest.mark.timeout(220)
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_a_rank_alone_computes_the_same_in_registered_memory(tmp_path, options):
    record = ran(tmp_path, "gpus=0", *short(options))
    assert "registered buffers" not in {row.path for row in answers(record)}


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.timeout(220)
@pytest.mark.parametrize("options", ASKED.values(), ids=ASKED)
def test_two_gpus_exchange_registered_memory_and_nccls_log_says_whether(tmp_path, sharing, options):
    record = ran(tmp_path, "gpus=0,1", *sharing, *short(options))
    rows = {row.path: row for row in answers(record)}
    said = rows["registered buffers"]
    assert said.asked.endswith("memory=registered"), said
    # A rehearsal has no tuning pass, in which NCCL says it.
    assert (said.answer == UNKNOWN) == bool(sharing), said
    # NCCL registers no ring and no tree in place; NVLS, which would, stays as it is set.
    if not sharing and os.environ.get("NCCL_NVLS_ENABLE") == "0":
        assert said.answer == (NO if "strategy=nccl_allreduce" in options else YES), said
