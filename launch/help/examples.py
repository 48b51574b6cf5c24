"""`python launch.py examples`: five commands for this machine, each with the question that it answers."""

import dataclasses
import os
from itertools import combinations

from analysis.errors import UnreadableInput
from analysis.text import count
from analysis.topology.link_classes import distinct_classes
from analysis.topology.model import Topology
from analysis.topology.source import load_topology
from analysis.topology.subsets import best
from launch.machine.devices import Machine, look

Example = tuple[str, str]  # a question, and the arguments that answer it

_ONE_GPU = [
    ("How fast does ResNet-50 train on this GPU?", "gpus=all"),
    (
        "What do fewer bits and torch.compile bring?",
        "-m precision=fp32,tf32,bf16 optimize=eager,compile",
    ),
    ("Which batch fills the GPU?", "-m batch_size=32,64,128,256"),
    ("How fast are copies between the host and the GPU?", "benchmark=host_link"),
    ("What happens inside a step?", "profiler=auto"),
]


def lines() -> list[str]:
    """Return what this machine is, and its five commands."""
    machine = look("auto", os.environ)
    topology = _topology(machine)
    said = [described(machine, topology), ""]
    for question, arguments in examples(machine, topology):
        said += [question, f"    python launch.py {arguments}"]
    return [
        *said,
        "",
        "With dry_run=true a command prints its cells and how long they take, and starts nothing.",
    ]


def examples(machine: Machine, topology: Topology | None) -> list[Example]:
    """Return five questions and the arguments that answer them; `topology` has the links of GPUs, where they are known."""
    several = len(machine.everyone) > 1
    if machine.kind == "cpu":
        return _on_cpu("all" if several else "0,1")
    return _on_gpus(machine, topology) if several else _ONE_GPU


def _on_cpu(gpus: str) -> list[Example]:
    small = "model=fmnist_cnn"  # seconds a cell
    return [
        (
            "How fast do CPU workers train a small network, and how well does it scale?",
            f"-m gpus=scale {small}",
        ),
        ("Where does the rest of the speed go?", f"gpus={gpus} {small} waterfall=true repeats=3"),
        (
            "Which way to exchange gradients is fastest?",
            f"-m gpus={gpus} {small} strategy=nccl_allreduce,cpu_staged,none repeats=3",
        ),
        (
            "How long does an all-reduce take, from small to large?",
            f"gpus={gpus} benchmark=collectives",
        ),
        ("What happens inside a step?", f"gpus={gpus} {small} profiler=torch"),
    ]


def _on_gpus(machine: Machine, topology: Topology | None) -> list[Example]:
    pair = ",".join(map(str, best(topology, 2) if topology else machine.everyone[:2]))
    links: Example = (
        "How fast are the links between two GPUs, alone and together?",
        f"gpus={pair} benchmark=p2p benchmark.concurrent=true",
    )
    if (
        topology
        and len({topology.link_between(*two) for two in combinations(topology.gpus, 2)}) > 1
    ):
        links = (
            "How fast is each kind of link between two GPUs?",
            "-m gpus=classes:2 benchmark=p2p",
        )
    return [
        ("How fast does ResNet-50 train here, and how well does it scale?", "-m gpus=scale"),
        ("Where does the rest of the speed go?", "gpus=all waterfall=true repeats=5"),
        (
            "What is direct access between two GPUs worth?",
            f"-m gpus={pair} nccl.p2p_level=null,LOC repeats=5",
        ),
        (
            "Which way to exchange gradients is fastest?",
            "-m gpus=all strategy=nccl_allreduce,kvstore_device,cpu_staged,none repeats=3",
        ),
        links,
    ]


def _topology(machine: Machine) -> Topology | None:
    """Return the links between this machine's GPUs; None without GPUs, or where the driver does not tell them."""
    try:
        topology = load_topology(None) if machine.kind == "cuda" else None
    except (UnreadableInput, OSError):
        return None
    if topology is None or not {*machine.everyone} <= {*topology.gpus}:
        return None
    ours = tuple(gpu for gpu in topology.devices if gpu.index in machine.everyone)
    return dataclasses.replace(topology, devices=ours)


def described(machine: Machine, topology: Topology | None) -> str:
    """Return a sentence with the devices and the links of a machine."""
    number = len(machine.everyone)
    if machine.kind == "cpu":
        return (
            f"No GPU is used here: {machine.why}. {count(number, 'CPU worker')} can stand for GPUs."
        )
    names = " and ".join(dict.fromkeys(device.name for device in machine.devices))
    if number == 1:
        return f"This machine has 1 × {names}."
    links = (
        distinct_classes(topology.gpus, topology.to_json()["links"])
        if topology
        else "links that the driver does not tell"
    )
    return f"This machine has {number} × {names}, joined by {links}."
