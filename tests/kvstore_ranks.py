"""Runs cases of strategies in forked ranks and servers: `python tests/kvstore_ranks.py FOLDER`, for test_kvstore.

torch is imported once; each case forks its processes from here, which takes a fraction of a second. Reads `cases.json`
(name: {workers, steps, strategy}) and writes `<name>-<rank>.json`: what each rank found.
"""

import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn

from conf.resolve import RULES
from trainers.kvstore import process
from trainers.strategies import load

ROOT = Path(__file__).parent.parent


class Network(nn.Module):
    """Uneven arrays, a parameter without gradient, and one that two layers share."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.again = nn.Linear(13, 13, bias=False)
        self.tied = nn.Linear(13, 13, bias=False)
        self.tied.weight = self.again.weight
        self.unused = nn.Linear(5, 3)
        self.last = nn.Linear(13, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.tied(torch.tanh(self.again(torch.tanh(self.first(x)))))))


def strategy_of(asked):
    """A strategy with its YAML's defaults."""
    declared = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "strategy" / f"{asked['name']}.yaml"))
    return {name: value for name, value in declared.items() if name not in RULES} | asked


def train(rank, case):
    """Steps on data that differ by rank; returns what the test looks at."""
    torch.manual_seed(0)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.get("learning_rate", 0.1), momentum=0.9, weight_decay=1e-3)
    strategy = load(strategy_of(case["strategy"]))
    prepared = strategy.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(16, 7, generator=generator)
    y = torch.randint(3, (16,), generator=generator)
    losses = []
    for _ in range(case["steps"]):
        if rank == case.get("slow_rank"):
            time.sleep(0.005)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(prepared(x), y)
        loss.backward()
        strategy.exchange()
        strategy.update(optimizer)
        losses.append(loss.item())
    found = {"losses": losses, "facts": strategy.facts()}
    found["weights"] = [weight.flatten().tolist() for weight in model.state_dict().values()]
    if case.get("more"):
        found |= more(rank, strategy, model, optimizer, prepared, x, y)
    strategy.close()
    return found


def more(rank, strategy, model, optimizer, prepared, x, y):
    """Gradients only, without exchange, the exchange alone, and what limits it."""

    def gradients():
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(prepared(x), y).backward()
        strategy.exchange()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    with strategy.without_exchange():
        local = gradients()
    mean = local.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    with strategy.gradients_only():
        exchanged = gradients()
        alone = strategy.exchange_alone([p for p in model.parameters()])
        known = [torch.full_like(p, rank + 1.0) for p in model.parameters()]
        alone.fill(known)
        alone()
        returned = alone.result()
        for _ in range(3):
            alone()
        probes = []
        for probe in strategy.probes():
            probe.run()
            probes.append([probe.name, probe.share, probe.limit])
    with strategy.without_exchange():
        before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        gradients()
        strategy.update(optimizer)
        drifted = torch.cat([p.detach().flatten() for p in model.parameters()])
    gradients()
    strategy.update(optimizer)
    return {
        "error": ((exchanged - mean).norm() / mean.norm()).item(),
        "spread": ((local - mean).norm() / mean.norm()).item(),
        "returned": [[tensor.min().item(), tensor.max().item()] for tensor in returned],
        "probes": probes,
        "drift": (drifted - before).norm().item(),
        "after": [weight.flatten().tolist() for weight in model.state_dict().values()],
    }


def rank_main(folder, name, case, rank):
    """One process of a case; never returns."""
    try:
        torch.set_num_threads(1)
        workers = case["workers"]
        if rank < workers:
            dist.init_process_group("gloo", rank=rank, world_size=workers)
            found = train(rank, case)
            (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
            dist.destroy_process_group()
        else:
            process.serve(rank - workers, torch.device("cpu"), "cpu", "auto", lambda phase: None, lambda served: None)
        os._exit(0)
    except BaseException:
        (folder / f"{name}-{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def main(folder):
    """Every case, one after the other; a case that fails or takes too long is ended."""
    # What the first step imports, once for all.
    model = Network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name in ("nccl_allreduce", "cpu_staged", "kvstore_device", "kvstore_dist_async"):
        load(strategy_of({"name": name}))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        opened = time.monotonic()
        children = set()
        for rank in range(case["workers"] + case["strategy"].get("servers", 0)):
            if (child := os.fork()) == 0:
                rank_main(folder, name, case, rank)
            children.add(child)
        bad = False
        while children:
            child, status = os.waitpid(-1, os.WNOHANG)
            children.discard(child)
            bad = bad or status != 0 or time.monotonic() - opened > 20
            if bad:
                for other in children:
                    os.kill(other, 9)
            time.sleep(0.002)
        print(name, round(time.monotonic() - opened, 2), "failed" if bad else "", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
