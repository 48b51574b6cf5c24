"""The exchange alone has the buckets of the step."""

import pytest
import torch
import torch.distributed as dist
import torchvision

from conf.groups import choice, options
from trainers.hosts import Hosts
from trainers.strategies.nccl_allreduce import bucket_members
from trainers.strategy import load


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("cap", [25.0, 4.0])
def test_exchange_alone_has_ddps_buckets(one_rank, cap):
    asked = {"bucket_cap_mb": cap, "gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}
    given = {"name": "nccl_allreduce", **asked, "comm_hook": "none", "powersgd_rank": 4}
    strategy = load(options("strategy", given), choice("strategy", "nccl_allreduce").rules["_target_"], Hosts(((0,),)))
    model = torchvision.models.resnet18()
    prepared = strategy.prepare(model, torch.optim.SGD(model.parameters()))
    for _ in range(12):  # DDP groups gradients anew once it has seen in which order they come, and logs it later
        prepared(torch.randn(2, 3, 32, 32)).sum().backward()
        model.zero_grad(set_to_none=True)
    by_ddp = prepared._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    parameters = list(model.parameters())
    members = bucket_members(parameters, cap * 2**20)
    ours = [sum(4 * parameters[number].numel() for number in bucket) for bucket in members]
    assert ours == [int(size) for size in by_ddp.split(", ")]
    assert sorted(number for bucket in members for number in bucket) == list(range(len(parameters)))
