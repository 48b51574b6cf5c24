"""GPU workers, and a server that is told to be on another host than one of them.

`python tests/test_far_gpus.py DEVICE CASE NUMBER FOLDER` is one process of a case. Worker 0 has GPU
0; worker 1 and the server have GPU 1, and are on the other host: NCCL or gloo replaces shared
memory.
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

from trainers.kvstore import server_process
from trainers.strategy import Hosts, load

ONE, TWO = Hosts(((0, 1),)), Hosts(((0,), (1,)))
SERVED = Hosts(((0,), (1,)), (1,))
# With a server, on its GPU or (staged) in host memory.
CASES = {
    "one": (ONE, "kvstore_dist_sync_device"),
    "two": (SERVED, "kvstore_dist_sync_device"),
    "async": (SERVED, "kvstore_dist_async_device"),
    "staged_one": (ONE, "kvstore_dist_sync"),
    "staged_two": (SERVED, "kvstore_dist_sync"),
}
WITHOUT_SERVERS = {  # the same on one host and on two
    "hierarchical": {"name": "hierarchical"},
    "staged": {"name": "cpu_staged"},
    "sharded": {"name": "cpu_staged", "staging": "sharded"},
    "on_gpu": {"name": "cpu_staged", "optimizer_on": "gpu"},
    "device": {"name": "kvstore_device"},
    "allreduce": {"name": "nccl_allreduce"},
}
for name, strategy in WITHOUT_SERVERS.items():
    CASES |= {f"{name}_on_1": (ONE, strategy), f"{name}_on_2": (TWO, strategy)}
STEPS, RANKS = 20, 2


def process(kind, case, number, folder):
    """One process of a case: a rank, or the server behind the ranks."""
    hosts, given = CASES[case]
    given = {"name": given, "servers": 1} if isinstance(given, str) else given
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", min(number, torch.cuda.device_count() - 1))
        torch.cuda.set_device(device)
    if number == RANKS:
        server_process.serve(0, device, kind, 1, lambda phase: None, lambda served: None)
        return
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=number, world_size=RANKS)
    torch.manual_seed(0)
    layers = [nn.Linear(500, 700), nn.Tanh(), nn.Linear(700, 500), nn.Tanh(), nn.Linear(500, 3)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = strategy_of({**given, "bucket_cap_mb": 0.5})
    strategy = load(options, target_of("strategy", given["name"]), hosts)
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
        returned = sorted({value for array in alone.result() for value in array.unique().tolist()})
        pipelined = alone.pipelined()
        for _ in range(5 if pipelined else 0):
            pipelined()
        if kind == "cuda":
            torch.cuda.synchronize()  # an answer is under way until here: a probe's would overtake it
        probes = [probe for probe in strategy.probes() if probe.share]
        for probe in probes:
            probe.run()
    facts = {
        "losses": losses,
        "weights": [round(w.double().sum().item(), 9) for w in model.state_dict().values()],
        "returned": returned,
        "facts": strategy.facts(),
        "probes": [probe.name for probe in probes],
    }
    (folder / f"{case}-{number}.json").write_text(json.dumps(facts))
    strategy.close()
    dist.destroy_process_group()


def ran(folder, *cases, kind="cuda"):
    """What both workers of each case found, by case; all run at the same time."""
    cases = list(dict.fromkeys(cases))
    paths = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    # The last two as launch.engines.environment sets them.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
        "CUDA_MODULE_LOADING": "EAGER",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # of --shared-gpu
    }
    started = []
    with contextlib.ExitStack() as stack:
        for case, port in zip(cases, free_ports(len(cases)), strict=True):
            for number in range(RANKS + isinstance(CASES[case][1], str)):
                command = [sys.executable, __file__, kind, case, str(number), str(folder)]
                own = {**environment, "MASTER_PORT": port}
                started.append(subprocess.Popen(command, env=own))
                stack.callback(started[-1].kill)
        assert [process.wait(timeout=200) for process in started] == [0] * len(started)
    results = {}
    for case in cases:
        files = [folder / f"{case}-{number}.json" for number in range(RANKS)]
        results[case] = [json.loads(file.read_text()) for file in files]
    return results


def free_ports(count):
    """Ports that differ, as all are held until the last is known."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [str(free.getsockname()[1]) for free in sockets]


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.parametrize(("kind", "link"), [("", "server_link"), ("staged_", "host_link")])
def test_a_server_far_away_gives_a_gpu_what_one_here_gives(tmp_path, kind, link):
    results = ran(tmp_path, f"{kind}one", f"{kind}two")
    for near, far in zip(*results.values(), strict=True):
        assert far["losses"] == near["losses"] and far["weights"] == near["weights"]
        assert far["returned"] == near["returned"] == [1.5]
        assert {"net_link", link} <= set(far["probes"])


@pytest.mark.multi_gpu(shared=True)
def test_an_asynchronous_server_on_a_gpu_far_away_serves_each_worker(tmp_path):
    for number, rank in enumerate(ran(tmp_path, "async")["async"]):
        assert rank["losses"][-1] < rank["losses"][0] and rank["returned"] == [number + 1.0]
        assert rank["facts"]["staleness/updates"] % STEPS == 0


@pytest.mark.multi_gpu(shared=True)
@pytest.mark.parametrize("name", WITHOUT_SERVERS)
def test_gpus_of_two_hosts_train_as_those_of_one(tmp_path, name):
    results = ran(tmp_path, "allreduce_on_1", f"{name}_on_1", f"{name}_on_2")
    reference = pytest.approx(results["allreduce_on_1"][0]["weights"], rel=1e-3, abs=1e-3)
    for hosts in (1, 2):
        ranks = results[f"{name}_on_{hosts}"]
        for rank in ranks:
            assert rank["weights"] == ranks[0]["weights"] == reference
            assert rank["returned"] == [1.5]
            assert ("net_link" in rank["probes"]) == (hosts == 2)


if __name__ == "__main__":
    process(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
