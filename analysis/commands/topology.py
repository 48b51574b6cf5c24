"""`python -m analysis topology [FILE]`: the link class between every two GPUs and NICs, as a table, JSON or drawing."""

import argparse
import json
from collections import Counter
from itertools import combinations
from pathlib import Path

from rich.table import Table

from analysis.console import console
from analysis.topology.link_classes import best_first, is_known
from analysis.topology.model import Device, Topology
from analysis.topology.source import load_topology


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file",
        nargs="?",
        help="text of `nvidia-smi topo -m` or NCCL's topology XML; - is stdin; without a file: this machine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--svg", metavar="OUT", type=Path, help="draw the machine into this SVG file"
    )
    parser.add_argument(
        "--gpu-name", metavar="NAME", help="product name of the GPUs, for theoretical bandwidths"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the topology, and draw it if asked."""
    topology = load_topology(arguments.file, arguments.gpu_name)
    if arguments.svg is not None:
        from analysis.topology.drawing import draw_topology

        draw_topology(topology, arguments.svg)
    if arguments.json:
        print(json.dumps(topology.to_json()))
        return 0
    _print(topology)
    if arguments.svg is not None:
        print(f"drawn: {arguments.svg}")
    return 0


def _label(device: Device) -> str:
    return f"GPU{device}" if isinstance(device, int) else device


def _print(topology: Topology) -> None:
    everything: tuple[Device, ...] = (*topology.gpus, *topology.nics)
    table = Table(title=f"topology ({topology.source})", title_justify="left")
    for heading in ("", *map(_label, everything), "CPU affinity", "NUMA"):
        table.add_column(heading)
    for device in everything:
        links = [
            "X" if other == device else topology.link_between(device, other) for other in everything
        ]
        gpu = topology.gpu(device) if isinstance(device, int) else None
        affinity = (gpu.cpu_affinity or "", gpu.numa_affinity or "") if gpu else ("", "")
        table.add_row(_label(device), *links, *affinity)
    out = console()
    out.print(table)
    pairs = Counter(topology.link_between(a, b) for a, b in combinations(topology.gpus, 2))
    for word in best_first(pairs):
        speeds = {
            topology.theoretical_gb_per_s(a, b)
            for a, b in combinations(topology.gpus, 2)
            if topology.link_between(a, b) == word
        }
        known = [f"{speed:.1f}" for speed in sorted(one for one in speeds if one is not None)]
        note = f", {' or '.join(known)} GB/s in theory, one way" if known else ""
        note += "" if is_known(word) else ", not a known link class"
        out.print(f"{word}: {pairs[word]} {'pair' if pairs[word] == 1 else 'pairs'} of GPUs{note}")
    out.print(
        {
            True: "GPUs meet in NVSwitches",
            False: "no NVSwitch",
            None: "NVSwitch or direct NVLinks: not known",
        }[topology.nvswitch]
    )
