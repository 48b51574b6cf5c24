"""The commands on one machine: `topology [FILE]`, `subsets [FILE]` and `place --gpus K`."""

import argparse
import json
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any

from analysis.commands.terminal_tables import print_table
from analysis.console import console
from analysis.input_files import read_input
from analysis.native.p2p import parse_bandwidths
from analysis.report.numbers import NumberFormat
from analysis.report.table import Column, Table
from analysis.text import count
from analysis.topology.model import (
    Device,
    Topology,
    count_classes,
    describe_counts,
    is_known,
    nvlink_count,
)
from analysis.topology.nvml import NoDriver
from analysis.topology.placement import EXACT_GPUS, MachineWires, choose_gpus
from analysis.topology.readers import read_topology
from analysis.topology.subset_classes import subset_classes

FILE_HELP = (
    "text of `nvidia-smi topo -m` or NCCL's topology XML; - is stdin; without a file: this machine"
)
NVSWITCH = {
    True: "GPUs meet in NVSwitches",
    False: "no NVSwitch",
    None: "NVSwitch or direct NVLinks: not known",
}
GB_PER_S = NumberFormat(decimals=1)
SUBSETS = (
    Column("gpus", "GPUs"),
    Column("links", "links"),
    Column("rings", "all rings"),
    Column("members", "members", kind="count"),
    Column("representative", "representative"),
    Column("second_member", "second member"),
)
RINGS = (
    Column("name", ""),
    Column("order", "GPUs in ring order"),
    Column("links", "links of this ring"),
    Column("rings", "all rings"),
    Column("slowest", "slowest GB/s", kind=GB_PER_S),
    Column("sum", "sum GB/s", kind=GB_PER_S),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that the parser is for."""
    command = parser.get_default("command")
    add = parser.add_argument
    if command == "place":
        add("--gpus", type=int, required=True, metavar="K", help="how many GPUs to choose")
        add("--topology", metavar="FILE", help=FILE_HELP)
        p2p = "measured bandwidths: JSON of `python -m analysis p2p`, a record or a matrix"
        add("--p2p", metavar="FILE", help=p2p)
        return
    add("file", nargs="?", help=FILE_HELP)
    if command == "topology":
        add("--svg", metavar="OUT", type=Path, help="draw the machine into this SVG file")
        name = "product name of the GPUs, for nominal bandwidths"
        add("--gpu-name", metavar="NAME", help=name)
        return
    size = "only subsets of K GPUs (default: of two and more)"
    add("--size", type=int, metavar="K", help=size)
    add("--second-member", action="store_true", help="show another member of each class")


def run(arguments: argparse.Namespace) -> int:
    """Print what the command asks for. Raises OSError, ValueError."""
    commands = {"topology": _run_topology, "subsets": _run_subsets, "place": _run_place}
    commands[arguments.command](arguments)
    return 0


def _run_topology(arguments: argparse.Namespace) -> None:
    topology = read_topology(arguments.file, arguments.gpu_name)
    if arguments.svg is not None:
        from analysis.topology.drawing import draw_topology

        draw_topology(topology, arguments.svg)
    if arguments.json:
        print(json.dumps(topology.to_json()))
        return
    print_table(_link_table(topology))
    out = console()
    gpus_near: dict[str, list[str]] = {}
    for gpu in topology.devices:
        near = []
        if gpu.cpu_affinity:
            near.append(f"CPU affinity {gpu.cpu_affinity}")
        if gpu.numa_affinity:
            near.append(f"NUMA node {gpu.numa_affinity}")
        gpus_near.setdefault(", ".join(near), []).append(f"GPU{gpu.index}")
    for where, gpus in gpus_near.items():
        if where:
            out.print(f"{where}: {', '.join(gpus)}")
    pairs = combinations(topology.gpus, 2)
    for word, number in count_classes(topology.link_between(a, b) for a, b in pairs).items():
        line = f"{word}: {count(number, 'pair')} of GPUs"
        links, speed = nvlink_count(word), topology.devices[0].nvlink_gb_per_s
        if links and speed:
            line += f", {links * speed:.1f} GB/s nominal, one way"
        if not is_known(word):
            line += ", not a known link class"
        out.print(line)
    out.print(NVSWITCH[topology.nvswitch])
    if arguments.svg is not None:
        print(f"drawn: {arguments.svg}")


def _link_table(topology: Topology) -> Table:
    labels: dict[Device, str] = {gpu: f"GPU{gpu}" for gpu in topology.gpus}
    labels |= {nic: nic for nic in topology.nics}
    columns = [Column("device", ""), *[Column(label, label) for label in labels.values()]]
    rows = []
    for device, label in labels.items():
        row: dict[str, Any] = {"device": label, label: "X"}
        for peer, peer_label in labels.items():
            if peer != device:
                row[peer_label] = topology.link_between(device, peer)
        rows.append(row)
    return Table.of("", f"topology ({topology.source})", columns, rows)


def _run_subsets(arguments: argparse.Namespace) -> None:
    topology = read_topology(arguments.file)
    subsets = subset_classes(topology, arguments.size)
    total = sum(subset.members for subset in subsets)
    wires = MachineWires.of(topology)
    quick = len(topology.gpus) > EXACT_GPUS  # of 16 GPUs there may be 2,000 classes
    content = []
    rows = []
    for subset in subsets:
        positions = [topology.gpus.index(gpu) for gpu in subset.representative]
        bandwidth = wires.bandwidth(positions, quick)
        fields = asdict(subset) | bandwidth.to_json()
        row: dict[str, Any] = {
            "gpus": str(subset.size),
            "links": describe_counts(subset.links),
            "members": subset.members,
            "representative": ",".join(map(str, subset.representative)),
        }
        if subset.size > 1:
            row["rings"] = bandwidth.describe()
        if arguments.second_member:
            row["second_member"] = ",".join(map(str, subset.second_member or ())) or "none"
        else:
            del fields["second_member"]
        content.append(fields)
        rows.append(row)
    if arguments.json:
        print(json.dumps({"subsets": total, "classes": content}))
        return
    caption = f"{total} subsets in {count(len(subsets), 'class', 'classes')}"
    print_table(Table.of("", caption, SUBSETS, rows))


def _run_place(arguments: argparse.Namespace) -> None:
    measured = None
    if arguments.p2p is not None:
        measured = read_input(arguments.p2p, parse_bandwidths)
    try:
        topology = read_topology(arguments.topology)
    except NoDriver as error:
        if measured is None:
            raise NoDriver(
                f"{error}; name a capture of `nvidia-smi topo -m` with --topology FILE"
            ) from None
        topology = None
    placement = choose_gpus(topology, arguments.gpus, measured)
    if arguments.json:
        rings = {name: ring.to_json() for name, ring in placement.rings().items()}
        print(json.dumps({**rings, "reason": placement.reason}))
        return
    caption = ""
    rows: list[dict[str, Any]] = []
    for name, ring in placement.rings().items():
        if rows and ring == placement.best:  # then no set or order is worse
            continue
        row = {
            "name": name.replace("_", " "),
            "order": ",".join(map(str, ring.order)),
            "links": describe_counts(ring.links),
            "slowest": ring.slowest_gb_per_s,
            "sum": ring.sum_gb_per_s,
        }
        if ring.bandwidth:
            row["rings"] = ring.bandwidth.describe()
            caption = "all rings: the total bandwidth of NCCL's rings, the same for any GPU order."
        if name == "worst_order":
            caption += " worst order: the GPU order that gives one ring the slowest links."
        rows.append(row)
    print_table(Table.of("", caption, RINGS, rows))
    console().print(placement.reason)
