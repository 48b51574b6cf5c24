"""Runs cases in forked ranks and servers: `python tests/forked_ranks.py FOLDER`, for `forked`.

torch is imported once; processes are forked from here, which takes a fraction of a second. Cases
without a server that train or exchange are run by the same ranks, one after the other. Each line of
the input names cases of rank_cases.CASES; `<name>-<rank>.json` then has what each rank found.
"""

import gc
import importlib.util
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path

import calibrating
import measuring
import planted_live
import planted_paths
import planted_ranks
import synchronising
import torch
import torch.distributed as dist
from build import exchange_cell, links_cell, several_hosts_cells, strategy_of, target_of
from derived_results import run_whole
from rank_cases import CASES
from torch import nn

from benchmarks.jacobi.grid import Slab, Tile, TorchStencil, TritonStencil
from benchmarks.rank.ranks import Ranks
from benchmarks.record import CellFolder
from benchmarks.timing import statistics
from benchmarks.training import exchange
from conf.targets import locate
from trainers import collectives
from trainers.kvstore import server_process
from trainers.kvstore.wires import rendezvous_store
from trainers.strategy import ExchangeAlone, Hosts, load

ROOT = Path(__file__).parent.parent
ONE_HOST = Hosts(((0, 1),))
CPU = torch.device("cpu")
CASE_SECONDS = 40  # for a case to end, on a busy machine
SECONDS = {
    "measuring": 100,
    "calibrating": 80,
    "planted": 80,
    "live": 220,
    "synchronising_2": 120,
    "synchronising_3": 240,
    "synchronising_4": 240,
    "paths": 120,
    "clean_paths": 600,
}  # of whole cells, several of them


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


def hosts_of(case):
    """Where the processes of a case are told to be."""
    ranks = case.get("hosts", [range(case["workers"])])
    return Hosts(tuple(map(tuple, ranks)), tuple(case.get("server_hosts", ())))


class Trained:
    """A network, its optimizer and a strategy of a case, on data that differ by rank."""

    def __init__(self, rank, case):
        torch.manual_seed(0)
        self.model = Network()
        if case.get("optimizer") == "adamw":  # torch's own, not fused
            options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        else:
            options = {"lr": case.get("learning_rate", 0.1), "weight_decay": 1e-3}
            self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9, **options)
        given = case["strategy"]
        target = target_of("strategy", given["name"])
        self.strategy = load(strategy_of(given), target, hosts_of(case))
        self.prepared = self.strategy.prepare(self.model, self.optimizer)
        inputs, targets = [], []
        for member in range(case["of_ranks"]) if "of_ranks" in case else [rank]:
            generator = torch.Generator().manual_seed(100 + member)
            inputs.append(torch.randn(16, 7, generator=generator))
            targets.append(torch.randint(3, (16,), generator=generator))
        self.inputs, self.targets = torch.cat(inputs), torch.cat(targets)

    def exchange(self):
        """Forward, backward and exchange; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.prepared(self.inputs), self.targets)
        loss.backward()
        self.strategy.exchange()
        return loss.item()

    def step(self):
        loss = self.exchange()
        self.strategy.update(self.optimizer)
        return loss

    def gradients(self):
        self.exchange()
        parameters = self.model.parameters()
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    def weights(self):
        return [weight.flatten().tolist() for weight in self.model.state_dict().values()]


def train(rank, case):
    """Steps; returns what the test looks at."""
    trained = Trained(rank, case)
    losses = []
    store = rendezvous_store() if "ahead" in case else None
    for step in range(case["steps"]):
        if rank == case.get("slow_rank") and step % 15 == 5:
            time.sleep(0.1)  # long beside a step, on a busy machine too
        if store:
            wait_until_the_peer_is_ahead(store, rank, step, case["ahead"])
        losses.append(trained.step())
    results = {"losses": losses, "facts": trained.strategy.facts(), "weights": trained.weights()}
    if case.get("more"):
        results |= more(rank, trained)
    trained.strategy.close()
    return results


def wait_until_the_peer_is_ahead(store, rank, step, ahead):
    """Hold rank 1 back in its sixth step until rank 0 has made that many more.

    It takes for ever, if rank 0 waits for rank 1.
    """
    if rank == 0:
        store.add("steps", 1)
    while rank == 1 and step == 5 and store.add("steps", 0) < step + ahead:
        time.sleep(0.01)


def more(rank, trained):
    """Gradients only, without exchange, the exchange alone, and what limits it."""
    strategy, parameters = trained.strategy, list(trained.model.parameters())
    with strategy.without_exchange():
        local = trained.gradients()
    mean = local.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    with strategy.gradients_only():
        exchanged = trained.gradients()
        alone = strategy.exchange_alone(parameters)
        alone.fill([torch.full_like(p, rank + 1.0) for p in parameters])
        alone()
        returned = alone.result()
        for _ in range(3):
            alone()
        # As benchmarks.training.exchange: without a share there is nobody to send to.
        probes = [probe for probe in strategy.probes() if probe.share]
        for probe in probes:
            probe.run()
    with strategy.without_exchange():
        before = torch.cat([p.detach().flatten() for p in parameters]).clone()
        trained.step()
        drifted = torch.cat([p.detach().flatten() for p in parameters])
    trained.step()
    return {
        "error": ((exchanged - mean).norm() / mean.norm()).item(),
        "spread": ((local - mean).norm() / mean.norm()).item(),
        "returned": [[tensor.min().item(), tensor.max().item()] for tensor in returned],
        "probes": [[probe.name, probe.share, probe.reference] for probe in probes],
        "drift": (drifted - before).norm().item(),
        "after": trained.weights(),
    }


class Faulty(ExchangeAlone):
    def __init__(self, real, fault):
        self.real, self.fault = real, fault

    def fill(self, gradients):
        self.local = [gradient.clone() for gradient in gradients]
        self.real.fill(gradients)

    def __call__(self):
        self.real()

    def result(self):
        means = self.real.result()
        if self.fault == "sums":
            return [mean * dist.get_world_size() for mean in means]
        if self.fault == "one bias":  # 32 of 1.2 million elements
            pairs = zip(self.local, means, strict=True)
            return [own if mean.numel() == 32 else mean for own, mean in pairs]
        means[0].view(-1)[0] = float("nan")
        return means


def told_by_ranks(rank):
    """What ranks tell each other; two groups of them, too."""
    group = dist.new_group([0] if rank == 0 else [1, 2], use_local_synchronization=True)
    values = (str(rank), [rank, 1.5], {"from": rank, "bytes": b"\0\xff".hex()})
    return {
        "first": [collectives.broadcast_json(value) for value in values],
        "all": [collectives.all_gather_json(value) for value in ("x" * (1 + rank), {"from": rank})],
        "of_two": collectives.broadcast_json(str(rank), group),
    }


def exchanged(rank, case, folder):
    """What benchmark=exchange finds; a fault is planted where the case names one."""
    loaded = []

    def loading(options, target, hosts):
        strategy, fault = load(options, target, hosts), case.get("fault")
        loaded.append(strategy)
        strategy.exact = strategy.exact and not case.get("lossy", False)
        if fault:
            real = strategy.exchange_alone
            strategy.exchange_alone = lambda parameters: Faulty(real(parameters), fault)
        return strategy

    exchange.load = loading
    ranks = Ranks(rank, case["workers"], CPU)
    results = run_whole(exchange.run, exchange_cell(case), ranks, CellFolder(folder))
    if getattr(loaded[0], "worker", None):
        results["mapped_bytes"] = len(loaded[0].worker.shared.bytes)
    return results


def measured(rank, case, folder):
    """What each benchmark of a case finds; `fault` names a method that does nothing."""
    if "fault" in case:
        module, owner, method = case["fault"]
        setattr(getattr(importlib.import_module(module), owner), method, lambda *_: lambda: None)
    ranks, results = Ranks(rank, case["workers"], CPU), []
    for options in case["benchmarks"]:
        cell = links_cell(case["workers"], options)
        run = locate(cell.target("benchmark"))
        results.append(run_whole(run, cell, ranks, CellFolder(folder)))
    return results


def on_hosts(rank, case, folder):
    """What whole cells find in ranks that are told to be on several hosts."""
    hosts = hosts_of(case)
    ranks, results = Ranks(rank, case["workers"], CPU, several_hosts=True), {}
    for name, cell in several_hosts_cells(len(hosts.ranks), len(hosts.ranks[0])).items():
        own = CellFolder(folder / name)
        own.rank_lines(rank).parent.mkdir(parents=True, exist_ok=True)
        results[name] = run_whole(locate(cell.target("benchmark")), cell, ranks, own)
    return results


def wide_slab(nx, count):
    """A slab with the pitch that GPUs have, of random numbers."""
    base = torch.empty(2 * (count + 2) * 512 * 4, dtype=torch.uint8)
    slab = Slab(512, 100, range(1, count + 1), CPU, base)
    slab.nx = nx
    slab.buffers[0].copy_(torch.rand(count + 2, 512, generator=torch.Generator().manual_seed(0)))
    return slab


def kernel(nx, count):
    """What the kernel makes of a slab, in a process where Triton interprets."""
    from benchmarks.jacobi.kernel import iterate

    slab = wide_slab(nx, count)
    plain = TorchStencil(slab)
    plain.edges(1, norm=True)
    expected, change = slab.inner(1)[:, 1:-1].clone(), plain.change()()
    slab.buffers[1].fill_(-1)
    stencil = object.__new__(TritonStencil)
    stencil._slab, stencil._iterate, stencil.tile = slab, iterate, Tile(8, 256, 2)
    stencil._edge_sums, stencil._rest_sums = torch.zeros(8), torch.zeros(4)
    stencil.edges(1, norm=True)
    edges = slab.inner(1)[:, 1:-1].clone()
    stencil.rest(1, norm=True)
    return {
        "edges_right": torch.equal(edges[0], expected[0]) and torch.equal(edges[-1], expected[-1]),
        "rest_left_for_later": bool((edges[1:-1] == -1).all()),
        "right": torch.equal(slab.inner(1)[:, 1:-1], expected),
        "boundary_stays": torch.equal(slab.inner(1)[:, 0], slab.buffers[0][1:-1, 0]),
        "halo_untouched": bool(
            (slab.buffers[1][0] == -1).all() and (slab.buffers[1][-1] == -1).all()
        ),
        "change": float(stencil._edge_sums.double().sum() + stencil._rest_sums.double().sum())
        / change,
    }


def unheard(argument):
    """Take a phase, or a heartbeat, of a server."""


def rank_main(folder, cases, rank):
    """One process of some cases, one after the other; never returns."""
    name = next(iter(cases))
    try:
        torch.set_num_threads(1)
        workers = cases[name]["workers"]
        if rank >= workers:
            server_process.serve(rank - workers, CPU, "cpu", "share", unheard, unheard)
            os._exit(0)
        dist.init_process_group("gloo", rank=rank, world_size=workers)
        store = dist.distributed_c10d._get_default_store()
        for name in cases:
            if not dist.is_initialized():
                own = dist.PrefixStore(name, store)
                dist.init_process_group("gloo", store=own, rank=rank, world_size=workers)
            (folder / name / "ranks").mkdir(parents=True, exist_ok=True)
            results = of_case(rank, name, cases[name], folder / name)
            (folder / f"{name}-{rank}.json").write_text(json.dumps(results))
            dist.destroy_process_group()
        os._exit(0)
    except BaseException:
        (folder / f"{name}-{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def of_case(rank, name, case, folder):
    whole = {
        "measuring": measuring.measure, "calibrating": calibrating.calibrate,
        "planted": planted_ranks.measure, "live": planted_live.measure, "paths": planted_paths.run,
        "clean_paths": planted_paths.run_clean,
    }  # fmt: skip
    if name in whole:
        return whole[name](rank, folder)
    if name == "calibrating_alone":
        return calibrating.alone(folder)
    if name.startswith("synchronising"):
        return synchronising.measure(rank, case["workers"], folder)
    if name == "told":
        return told_by_ranks(rank)
    if name == "cells_on_hosts":
        return on_hosts(rank, case, folder)
    if "benchmarks" in case:
        return measured(rank, case, folder)
    if "kernels" in case:
        return [kernel(*size) for size in case["kernels"] if importlib.util.find_spec("triton")]
    return exchanged(rank, case, folder) if "exchange" in case else train(rank, case)


def in_turn(cases):
    """Yield {name: case} of what the same ranks run: steps and exchanges without a server.

    Every other case runs alone. A fork of this process, and its end, take longer than most cases.
    """
    together = {}
    for name, case in cases.items():
        if "strategy" in case and "servers" not in case["strategy"]:
            together.setdefault(case["workers"], {})[name] = case
        else:
            yield {name: case}
    yield from together.values()


def serve(folder):
    """Run the cases of each line of the input, a JSON list of names; answer each with a line."""
    answers = os.fdopen(os.dup(1), "w")
    with (folder / "log").open("a") as log:
        os.dup2(log.fileno(), 1)
    import_for_ranks()
    for line in sys.stdin:
        for cases in in_turn({name: CASES[name] for name in json.loads(line)}):
            if run(folder, cases) and len(cases) > 1:
                for name in cases:
                    if not any(folder.glob(f"{name}-*")):
                        run(folder, {name: cases[name]})
        print("done", file=answers, flush=True)


def import_for_ranks():
    """Import what the first step imports, once for all."""
    model = Network()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name in ("nccl_allreduce", "cpu_staged", "kvstore_device", "kvstore_dist_async"):
        load(strategy_of({"name": name}), target_of("strategy", name), ONE_HOST)
    for name in ("collectives", "jacobi"):
        locate(target_of("benchmark", name))
    cell = exchange_cell({"workers": 1, "exchange": {}, "strategy": {"name": "cpu_staged"}})
    exchange.gradients_like(cell, "weights", torch.device("cpu"))
    statistics.median_interval([[1.0, 2.0, 3.0]])
    gc.collect()
    gc.freeze()  # a collection in a forked rank would copy every page of what is imported
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def run(folder, cases):
    """Fork the processes of some cases and wait for them; whether one failed or took too long."""
    case = next(iter(cases.values()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    opened = time.monotonic()
    limit_s = SECONDS.get(next(iter(cases)), CASE_SECONDS) + len(cases)
    children = set()
    for rank in range(case["workers"] + case.get("strategy", {}).get("servers", 0)):
        child = os.fork()
        if child == 0:
            rank_main(folder, cases, rank)
        children.add(child)
    bad = False
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        children.discard(child)
        bad = bad or status != 0 or time.monotonic() - opened > limit_s
        if bad:
            for other in children:
                os.kill(other, 9)
        time.sleep(0.002)
    if bad and len(cases) == 1 and not any(folder.glob(f"{next(iter(cases))}-*.error")):
        why = f"ended by force, or not ended within {limit_s} s"
        (folder / f"{next(iter(cases))}-0.error").write_text(why)
    print(*cases, round(time.monotonic() - opened, 2), "failed" if bad else "", flush=True)
    return bad


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
