"""DDP: the exchange alone has the buckets of the step; our half-precision hook is torch's."""

import itertools
from inspect import signature

import pytest
import torch
import torchvision
from build import strategy_of, target_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from trainers import comm_hooks
from trainers.strategies.ddp import HookBucket, bucket_members
from trainers.strategy import Hosts, load


def ddp(model, **options):
    given = strategy_of({"name": "nccl_allreduce", **options})
    strategy = load(given, target_of("strategy", "nccl_allreduce"), Hosts(((0,),)))
    return strategy.prepare(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("cap", [25.0, 4.0, [1, 4, 12]])
def test_exchange_alone_has_ddps_buckets(alone, cap):
    if isinstance(cap, list) and "bucket_cap_mb_list" not in signature(DDP).parameters:
        pytest.skip("torch before 2.13: DDP takes one size")
    model = torchvision.models.resnet18()
    prepared = ddp(model, bucket_cap_mb=cap)
    # DDP groups gradients anew once it has seen their order, and logs it later.
    for _ in range(12):
        prepared(torch.randn(2, 3, 32, 32)).sum().backward()
        model.zero_grad(set_to_none=True)
    by_ddp = prepared._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    parameters = list(model.parameters())
    caps = cap if isinstance(cap, list) else [cap]
    members = bucket_members(parameters, [mib * 2**20 for mib in caps])
    ours = [sum(parameters[number].nbytes for number in bucket) for bucket in members]
    assert ours == [int(size) for size in by_ddp.split(", ")]
    assert sorted(itertools.chain(*members)) == list(range(len(parameters)))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_half_precision_hook_gives_what_torchs_hook_gives_and_keeps_its_buffers(alone, name):
    theirs = getattr(default_hooks, f"{name}_compress_hook")
    ours = comm_hooks.HalfPrecision(name)
    addresses = set()
    for _ in range(2):  # the second step sends other gradients from the same buffers
        flats = [torch.randn(300) for _ in range(3)]
        flats.append(flats[0].to(getattr(torch, comm_hooks.SENT[name])))  # half precision already
        buckets, wanted = [], []
        for number, flat in enumerate(flats):
            buckets.append(HookBucket(flat.clone(), [flat.shape], number, number == 3))
            wanted.append(theirs(None, HookBucket(flat.clone(), [flat.shape], 0, False)).wait())
        futures = [ours.reduce(None, bucket) for bucket in buckets]
        for future, bucket, want in zip(futures, buckets, wanted, strict=True):
            assert future.wait() is bucket.flat and bucket.flat.equal(want)
        assert not buckets[0].flat.equal(flats[0])
        addresses |= {buffer.data_ptr() for buffer in ours._buffers.values()}
    assert len(addresses) == 3


def test_ddp_takes_the_means_of_the_half_precision_hook(alone):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    prepared = ddp(model, bucket_cap_mb=0.01, comm_hook="bf16", gradient_as_bucket_view=False)
    for _ in range(3):  # DDP makes other buckets after the first
        inputs = torch.randn(5, 64)
        alone = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
        model.zero_grad(set_to_none=True)
        prepared(inputs).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), alone, strict=True):
            assert parameter.grad.equal(gradient.bfloat16().float())
            assert not parameter.grad.equal(gradient)
