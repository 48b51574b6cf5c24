"""The exchange alone has the buckets of the step, and our half-precision hook computes what torch's does."""

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conf.groups import choice, options
from trainers import comm_hooks
from trainers.hosts import Hosts
from trainers.strategies.ddp import HookBucket, bucket_members
from trainers.strategy import load


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cap", [25.0, 4.0])
def test_exchange_alone_has_ddps_buckets(one_rank, cap):
    asked = {
        "bucket_cap_mb": cap,
        "gradient_as_bucket_view": True,
        "static_graph": True,
        "broadcast_buffers": False,
    }
    given = {"name": "nccl_allreduce", **asked, "comm_hook": "none", "powersgd_rank": 4}
    strategy = load(
        options("strategy", given),
        choice("strategy", "nccl_allreduce").rules["_target_"],
        Hosts(((0,),)),
    )
    model = torchvision.models.resnet18()
    prepared = strategy.prepare(model, torch.optim.SGD(model.parameters()))
    for _ in range(
        12
    ):  # DDP groups gradients anew once it has seen in which order they come, and logs it later
        prepared(torch.randn(2, 3, 32, 32)).sum().backward()
        model.zero_grad(set_to_none=True)
    by_ddp = prepared._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    parameters = list(model.parameters())
    members = bucket_members(parameters, cap * 2**20)
    ours = [sum(4 * parameters[number].numel() for number in bucket) for bucket in members]
    assert ours == [int(size) for size in by_ddp.split(", ")]
    assert sorted(number for bucket in members for number in bucket) == list(range(len(parameters)))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_half_precision_hook_gives_what_torchs_hook_gives_and_keeps_its_buffers(one_rank, name):
    theirs = getattr(default_hooks, f"{name}_compress_hook")
    ours = comm_hooks.HalfPrecision(name)
    kept = None
    for seed in (1, 2):  # the second step sends other gradients from the same buffers
        flats = [
            torch.randn(300, generator=torch.Generator().manual_seed(seed + number))
            for number in range(3)
        ]
        flats.append(
            flats[0].to(getattr(torch, comm_hooks.SENT[name]))
        )  # weights in half precision
        buckets = [
            HookBucket(flat.clone(), [flat.shape], number, number == 3)
            for number, flat in enumerate(flats)
        ]
        futures = [ours.reduce(None, bucket) for bucket in buckets]
        wanted = [
            theirs(None, HookBucket(flat.clone(), [flat.shape], 0, False)).wait() for flat in flats
        ]
        for future, bucket, want in zip(futures, buckets, wanted, strict=True):
            assert future.wait() is bucket.flat and bucket.flat.equal(want)
        assert not buckets[0].flat.equal(flats[0])
        addresses = [buffer.data_ptr() for buffer in ours._buffers.values()]
        assert len(addresses) == 3 and addresses == (kept or addresses)
        kept = addresses


def test_ddp_takes_the_means_of_the_half_precision_hook(one_rank):
    asked = {
        "bucket_cap_mb": 0.01,
        "gradient_as_bucket_view": False,
        "static_graph": True,
        "broadcast_buffers": False,
    }
    given = {"name": "nccl_allreduce", **asked, "comm_hook": "bf16", "powersgd_rank": 4}
    strategy = load(
        options("strategy", given),
        choice("strategy", "nccl_allreduce").rules["_target_"],
        Hosts(((0,),)),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    prepared = strategy.prepare(model, torch.optim.SGD(model.parameters()))
    for _ in range(3):  # DDP makes other buckets after the first
        inputs = torch.randn(5, 64)
        alone = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
        model.zero_grad(set_to_none=True)
        prepared(inputs).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), alone, strict=True):
            assert parameter.grad is not None and parameter.grad.equal(gradient.bfloat16().float())
            assert not parameter.grad.equal(gradient)
