"""Trains tiny DDP jobs with a planted fault, watched by the instruments of a script.

`python tests/planted_slowness.py FOLDER SEED FAULTS CLEAN [KINDS]` runs so many jobs of 2 to 4 gloo
ranks in turn, and prints of each what was planted and what was named. Ranks are forked.
"""

import atexit
import ctypes
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # which the first optimizer would import in every rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from analysis.findings.slow_rank import diagnosis
from benchmarks.record.lines import Lines, read_lines
from benchmarks.script.exchanges import attach

LAYERS, WIDTH, BATCH = 12, 256, 32
DELAY_S = 0.02
SECONDS, LEAST_STEPS = 3, 70
HOGS = 3  # that share the core of a rank with it
EVERY_KIND = "layer,loader,sleep,link,hog,loop"
NAMED = {"layer": "compute", "hog": "foreign load", "loop": "clock"}
FORK = multiprocessing.get_context("fork")


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Batches(Dataset):
    def __init__(self, delay_s):
        self.delay_s = delay_s

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        if self.delay_s:
            time.sleep(self.delay_s / BATCH)
        return torch.full((WIDTH,), index % 7 / 7)


class Layer(nn.Linear):
    times = 1  # more as on a slower core

    def forward(self, x):
        results = [super(Layer, self).forward(x) for _ in range(self.times)]
        return torch.relu(torch.stack(results).mean(0))


def train(folder, rank, plan, port):
    os.setsid()
    torch.set_num_threads(1)
    kind = plan["kind"] if rank == plan["rank"] else ""
    if plan["kind"] == "hog":
        os.sched_setaffinity(0, {rank % 2})
    address = "127.0.0.1"
    if plan["hosts"]:
        host = rank * 2 // plan["world"]
        namespace = os.open(f"/proc/{plan['hosts'][host]}/ns/net", os.O_RDONLY)
        assert ctypes.CDLL(None).setns(namespace, 0) == 0
        address, os.environ["GLOO_SOCKET_IFNAME"] = "10.9.0.1", f"host{host}"
    lines = Lines(folder / f"{rank}.jsonl")
    attach(lambda kind, **content: lines.write(kind, time.time(), **content), {})
    store = f"tcp://{address}:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=plan["world"])
    torch.manual_seed(0)
    layers = [Layer(WIDTH, WIDTH) for _ in range(LAYERS)]
    if kind == "loop":
        for layer in layers:
            layer.times = 2
    if kind == "layer" and plan["forward"]:
        layers[plan["layer"]].register_forward_pre_hook(lambda *_: spin(DELAY_S))
    elif kind == "layer":
        layers[plan["layer"]].register_full_backward_hook(lambda *_: spin(DELAY_S))
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    end, stop = time.monotonic() + SECONDS, torch.zeros(1)
    batches = DataLoader(Batches(DELAY_S if kind == "loader" else 0), BATCH)
    for steps, batch in enumerate(batches, start=1):
        if kind == "sleep":
            time.sleep(DELAY_S)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        late = time.monotonic() - end
        stop[0] = late > 3 * SECONDS or (late > 0 and steps >= LEAST_STEPS)
        dist.all_reduce(stop)
        if stop[0]:
            break
    atexit._run_exitfuncs()
    os._exit(0)


def two_hosts(shaped):
    holders = [subprocess.Popen(["unshare", "-n", "sleep", "600"]) for _ in range(2)]
    time.sleep(0.2)
    pids = [holder.pid for holder in holders]
    pair = "type veth peer name right"
    subprocess.run(f"ip link add left {pair}".split(), check=True)
    for host, (pid, end) in enumerate(zip(pids, ("left", "right"), strict=True)):
        subprocess.run(f"ip link set {end} netns {pid} name host{host}".split(), check=True)
        inside = f"nsenter -t {pid} -n ip"
        address = f"addr add 10.9.0.{host + 1}/24 dev host{host}"
        for what in (address, "link set lo up", f"link set host{host} up"):
            subprocess.run(f"{inside} {what}".split(), check=True)
    if shaped:
        shape = "qdisc add dev host1 root tbf rate 100mbit burst 64k latency 100ms"
        subprocess.run(f"nsenter -t {pids[1]} -n tc {shape}".split(), check=True)
    return holders


def hog(core):
    os.setsid()
    os.sched_setaffinity(0, {core})
    spin(600)


def run(folder, plan):
    folder.mkdir()
    holders = two_hosts(plan["kind"] == "link") if plan["hosts"] else []
    plan = {**plan, "hosts": [holder.pid for holder in holders]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks, hogs = range(plan["world"]), []
    processes = [FORK.Process(target=train, args=(folder, rank, plan, port)) for rank in ranks]
    if plan["kind"] == "hog":
        hogs = [FORK.Process(target=hog, args=(plan["rank"] % 2,)) for _ in range(HOGS)]
    for process in (*hogs, *processes):
        process.start()
        time.sleep(len(hogs) / 6)  # hogs work before the ranks do
    for process in processes:
        process.join(60 + 5 * SECONDS)
    for process in (*processes, *hogs, *holders):
        process.kill()
    lines = {rank: list(read_lines(folder / f"{rank}.jsonl")) for rank in ranks}
    return dataclasses.asdict(diagnosis(lines))


def plans(seed, faults, clean, kinds):
    draw = random.Random(seed)
    jobs = []
    for index in range(faults + clean):
        kind = kinds[index % len(kinds)] if index < faults else "none"
        world = draw.choice((2, 2, 3, 4))
        hosts = kind == "link" or (kind == "none" and index % 3 == 0)
        if hosts or kind == "hog":  # a hog has one of two cores
            world = draw.choice((2, 4)) if hosts else 2
        plan = {"kind": kind, "world": world, "hosts": hosts, "rank": draw.randrange(world)}
        plan |= {"layer": draw.choice((0, LAYERS // 2, LAYERS - 1)), "forward": draw.random() < 0.5}
        jobs.append(plan)
    draw.shuffle(jobs)
    return jobs


def judged(plan, seen):
    delay = seen["delays"][0] if seen["delays"] else {}
    if plan["kind"] == "none":
        return {"false_name": bool(delay)}
    kind = delay.get("kind") == NAMED.get(plan["kind"], plan["kind"])
    if plan["kind"] == "link":  # a link has two ends, and its hosts have several ranks
        half = plan["world"] // 2
        ends = [delay.get("rank"), delay.get("peer")]
        return {"rank": None not in ends and min(ends) < half <= max(ends), "kind": kind}
    outcome = {"rank": delay.get("rank") == plan["rank"], "kind": kind}
    if plan["kind"] == "layer":
        bucket, name = delay.get("bucket"), str(plan["layer"])
        [planted] = [number for number, names in enumerate(seen["layers"]) if name in names]
        outcome["bucket"] = bucket is not None and abs(bucket - planted) <= 1
    return outcome


def main(folder, seed, faults, clean, kinds=EVERY_KIND):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    DistributedDataParallel(nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)
    dist.destroy_process_group()
    for index, plan in enumerate(plans(int(seed), int(faults), int(clean), kinds.split(","))):
        path = Path(folder) / f"{index}-{plan['kind']}"
        seen = run(path, plan)
        outcome = judged(plan, seen)
        if all(outcome.values()) or outcome == {"false_name": False}:
            shutil.rmtree(path)
        load = os.getloadavg()[0]
        line = {"plan": plan, "outcome": outcome, "load": load, "seen": seen}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
