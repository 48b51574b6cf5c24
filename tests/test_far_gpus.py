"""Workers on GPUs and a server that is told to be on another host than one of them: NCCL or gloo replaces shared memory.

`python tests/test_far_gpus.py DEVICE CASE NUMBER FOLDER` is one process of a case. Worker 0 has GPU 0; worker 1 and the server
have GPU 1, and are on the other host.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from build import strategy_of, target_of
from torch import nn

from trainers.hosts import Hosts
from trainers.kvstore import server_process
from trainers.strategy import load

ONE, TWO = Hosts(((0, 1),)), Hosts(((0,), (1,)), (1,))
SYNC, ASYNC = "kvstore_dist_sync_device", "kvstore_dist_async_device"
STAGED = "kvstore_dist_sync"  # the server keeps weights in host memory
CASES = {
    "one": (ONE, SYNC),
    "two": (TWO, SYNC),
    "async": (TWO, ASYNC),
    "staged_one": (ONE, STAGED),
    "staged_two": (TWO, STAGED),
}
WITHOUT_SERVERS = {  # the same on one host and on two
    "hierarchical": {"name": "hierarchical"},
    "staged": {"name": "cpu_staged"},
    "sharded": {"name": "cpu_staged", "staging": "sharded"},
    "on_gpu": {"name": "cpu_staged", "optimizer_on": "gpu"},
    "device": {"name": "kvstore_device"},
    "allreduce": {"name": "nccl_allreduce"},
}
CASES |= {
    f"{name}_on_{number}": (hosts, given)
    for number, hosts in ((1, ONE), (2, Hosts(((0,), (1,)))))
    for name, given in WITHOUT_SERVERS.items()
}
STEPS, RANKS = 20, 2


def process(on, case, number, folder):
    hosts, given = CASES[case]
    given = {"name": given, "servers": 1} if isinstance(given, str) else given
    device = torch.device("cuda", min(number, 1)) if on == "cuda" else torch.device("cpu")
    if on == "cuda":
        torch.cuda.set_device(device)
    if number == RANKS:
        server_process.serve(0, device, on, 1, lambda phase: None, lambda served: None)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on == "cuda" else "gloo", rank=number, world_size=RANKS
    )
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(500, 700), nn.Tanh(), nn.Linear(700, 500), nn.Tanh(), nn.Linear(500, 3)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    strategy = load(
        strategy_of({**given, "bucket_cap_mb": 0.5}), target_of("strategy", given["name"]), hosts
    )
    prepared = strategy.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(64, 500, generator=generator).to(device), torch.arange(64, device=device) % 3
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(prepared(x), y)
        loss.backward()
        strategy.exchange()
        strategy.update(optimizer)
        losses.append(loss.item())
    with strategy.gradients_only():
        alone = strategy.exchange_alone(list(model.parameters()))
        alone.fill([torch.full_like(p, number + 1.0) for p in model.parameters()])
        alone()
        returned = sorted(
            {
                value
                for array in alone.result()
                for value in (array.min().item(), array.max().item())
            }
        )
        if pipelined := alone.pipelined():
            for _ in range(5):
                pipelined()
        probes = [probe for probe in strategy.probes() if probe.share]
        for probe in probes:
            probe.run()
    weights = [round(weight.double().sum().item(), 9) for weight in model.state_dict().values()]
    found = {"losses": losses, "weights": weights, "returned": returned, "facts": strategy.facts()}
    (folder / f"{case}-{number}.json").write_text(
        json.dumps(found | {"probes": [probe.name for probe in probes]})
    )
    strategy.close()
    dist.destroy_process_group()


def ran(folder, *cases, on="cuda"):
    """What both workers of each case found, by case. The cases run at the same time: most of each is to begin."""
    cases = list(dict.fromkeys(cases))
    started = [
        one
        for case, port in zip(cases, free_ports(len(cases)), strict=True)
        for one in begun(folder, case, port, on)
    ]
    try:
        assert [one.wait(timeout=200) for one in started] == [0] * len(started)
    finally:
        for one in started:
            one.kill()
    return {
        case: [
            json.loads((folder / f"{case}-{number}.json").read_text()) for number in range(RANKS)
        ]
        for case in cases
    }


def begun(folder, case, port, on):
    """The processes of a case."""
    known = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }
    here = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    path = os.pathsep.join([*here, *filter(None, [os.environ.get("PYTHONPATH")])])
    # As launch.engines.environment sets them.
    known |= {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, on, case, str(number), str(folder)],
            env=os.environ | known | {"PYTHONPATH": path},
        )
        for number in range(RANKS + isinstance(CASES[case][1], str))
    ]


def free_ports(count):
    """Ports that differ, as all are held until the last is known."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("kind", "link"), [("", "server_link"), ("staged_", "host_link")])
def test_a_server_far_away_gives_a_gpu_what_one_here_gives(tmp_path, kind, link):
    found = ran(tmp_path, f"{kind}one", f"{kind}two")
    for near, far in zip(*found.values(), strict=True):
        assert far["losses"] == near["losses"] and far["weights"] == near["weights"]
        assert far["returned"] == near["returned"] == [1.5]
        assert {"net_link", link} <= set(far["probes"])


@pytest.mark.multi_gpu
def test_an_asynchronous_server_on_a_gpu_far_away_serves_each_worker(tmp_path):
    for number, rank in enumerate(ran(tmp_path, "async")["async"]):
        assert rank["losses"][-1] < rank["losses"][0] and rank["returned"] == [number + 1.0]
        assert rank["facts"]["staleness/updates"] % STEPS == 0


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", WITHOUT_SERVERS)
def test_gpus_of_two_hosts_train_as_those_of_one(tmp_path, name):
    found = ran(tmp_path, "allreduce_on_1", f"{name}_on_1", f"{name}_on_2")
    (reference, _), one, two = (
        found[case] for case in ("allreduce_on_1", f"{name}_on_1", f"{name}_on_2")
    )
    for near, far in zip(one, two, strict=True):
        assert near["weights"] == one[0]["weights"] and far["weights"] == two[0]["weights"]
        assert near["weights"] == pytest.approx(reference["weights"], rel=1e-3, abs=1e-3)
        assert far["weights"] == pytest.approx(reference["weights"], rel=1e-3, abs=1e-3)
        assert far["returned"] == near["returned"] == [1.5]
        assert "net_link" in far["probes"] and "net_link" not in near["probes"]


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
