"""The commands on one machine: `topology [FILE]`, `subsets [FILE]` and `place --gpus K`.

`topology` shows the link class between every two GPUs and NICs, as a table, JSON or drawing;
`subsets` the GPU subsets of a machine, in classes of equal links; `place` which K GPUs to take and
in which order, the worst set, and the worst order.
"""

import argparse
import json
from itertools import combinations
from pathlib import Path

from rich.table import Table

from analysis.console import console
from analysis.input_files import read_input
from analysis.native.p2p import parse_bandwidths
from analysis.topology.bandwidth import EXACT_GPUS, MachineWires
from analysis.topology.model import Device, Topology, count_classes, describe_counts, is_known
from analysis.topology.nvml import NoDriver
from analysis.topology.placement import Placement, choose_gpus
from analysis.topology.readers import read_topology
from analysis.topology.subsets import classes

_FILE_HELP = (
    "text of `nvidia-smi topo -m` or NCCL's topology XML; - is stdin; without a file: this machine"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command that the parser is for."""
    if parser.prog.endswith("place"):
        parser.add_argument(
            "--gpus", type=int, required=True, metavar="K", help="how many GPUs to choose"
        )
        parser.add_argument(
            "--topology",
            metavar="FILE",
            help="`nvidia-smi topo -m` or NCCL's topology XML; - is stdin; default: this machine",
        )
        parser.add_argument(
            "--p2p",
            metavar="FILE",
            help="measured bandwidths: JSON of `python -m analysis p2p`, a record or a matrix",
        )
        return
    parser.add_argument("file", nargs="?", help=_FILE_HELP)
    if parser.prog.endswith("topology"):
        parser.add_argument(
            "--svg", metavar="OUT", type=Path, help="draw the machine into this SVG file"
        )
        parser.add_argument(
            "--gpu-name",
            metavar="NAME",
            help="product name of the GPUs, for theoretical bandwidths",
        )
        return
    parser.add_argument(
        "--size", type=int, metavar="K", help="only subsets of K GPUs (default: of two and more)"
    )
    for option, text in (
        ("--affinity", "distinguish pairs on one NUMA node from pairs on two"),
        ("--nics", "distinguish GPUs that have other links to the NICs"),
        ("--second-member", "show another member of each class"),
    ):
        parser.add_argument(option, action="store_true", help=text)


def run(arguments: argparse.Namespace) -> int:
    """Print what the command asks for. Raises OSError, ValueError."""
    if arguments.command == "topology":
        _run_topology(arguments)
    elif arguments.command == "subsets":
        _run_subsets(arguments)
    else:
        _run_place(arguments)
    return 0


def _run_topology(arguments: argparse.Namespace) -> None:
    topology = read_topology(arguments.file, arguments.gpu_name)
    if arguments.svg is not None:
        from analysis.topology.drawing import draw_topology

        draw_topology(topology, arguments.svg)
    if arguments.json:
        print(json.dumps(topology.to_json()))
        return
    _print_topology(topology)
    if arguments.svg is not None:
        print(f"drawn: {arguments.svg}")


def _print_topology(topology: Topology) -> None:
    labels: dict[Device, str] = {gpu: f"GPU{gpu}" for gpu in topology.gpus}
    labels |= {nic: nic for nic in topology.nics}
    table = Table(title=f"topology ({topology.source})", title_justify="left")
    for heading in ("", *labels.values(), "CPU affinity", "NUMA"):
        table.add_column(heading)
    for device, label in labels.items():
        row = [label]
        for peer in labels:
            row.append("X" if peer == device else topology.link_between(device, peer))
        if isinstance(device, int):
            gpu = topology.gpu(device)
            row += [gpu.cpu_affinity or "", gpu.numa_affinity or ""]
        table.add_row(*row)
    out = console()
    out.print(table)
    pairs_of: dict[str, list[tuple[int, int]]] = {}
    for a, b in combinations(topology.gpus, 2):
        pairs_of.setdefault(topology.link_between(a, b), []).append((a, b))
    for word in count_classes(pairs_of):
        pairs = pairs_of[word]
        line = f"{word}: {len(pairs)} {'pair' if len(pairs) == 1 else 'pairs'} of GPUs"
        speeds = {topology.theoretical_gb_per_s(a, b) for a, b in pairs} - {None}
        if speeds:
            texts = [f"{speed:.1f}" for speed in sorted(filter(None, speeds))]
            line += f", {' or '.join(texts)} GB/s in theory, one way"
        if not is_known(word):
            line += ", not a known link class"
        out.print(line)
    nvswitch = {True: "GPUs meet in NVSwitches", False: "no NVSwitch"}
    unknown = "NVSwitch or direct NVLinks: not known"
    out.print(unknown if topology.nvswitch is None else nvswitch[topology.nvswitch])


def _run_subsets(arguments: argparse.Namespace) -> None:
    """Print the classes by size, best links first, with what the rings of each carry together."""
    topology = read_topology(arguments.file)
    subsets = classes(topology, arguments.size, affinity=arguments.affinity, nics=arguments.nics)
    total = sum(subset.members for subset in subsets)
    wires = MachineWires.of(topology)
    quick = len(topology.gpus) > EXACT_GPUS  # of 16 GPUs there may be 2,000 classes
    bandwidths = []
    for subset in subsets:
        positions = [topology.gpus.index(gpu) for gpu in subset.representative]
        bandwidths.append(wires.bandwidth(positions, quick))
    if arguments.json:
        content = []
        for subset, bandwidth in zip(subsets, bandwidths, strict=True):
            content.append(subset.to_json(arguments.second_member) | bandwidth.to_json())
        print(json.dumps({"subsets": total, "classes": content}))
        return
    table = Table(title=f"{total} subsets in {len(subsets)} classes", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("links")
    table.add_column("all rings", justify="right")
    table.add_column("members", justify="right")
    table.add_column("representative")
    if arguments.second_member:
        table.add_column("second member")
    for subset, bandwidth in zip(subsets, bandwidths, strict=True):
        row = [str(subset.size), describe_counts(subset.links)]
        row.append(bandwidth.describe() if subset.size > 1 else "")
        row += [str(subset.members), ",".join(map(str, subset.representative))]
        if arguments.second_member:
            row.append(",".join(map(str, subset.second_member or ())) or "none")
        table.add_row(*row)
    console().print(table)


def _run_place(arguments: argparse.Namespace) -> None:
    """Print the best set, the worst set, the worst order of the best set, and the reason."""
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
        content: dict[str, object] = {}
        for name, ring in placement.rings().items():
            content[name] = ring.to_json()
        print(json.dumps({**content, "reason": placement.reason}))
        return
    _print_placement(placement)


def _print_placement(placement: Placement) -> None:
    is_measured = placement.best.slowest_gb_per_s is not None
    table = Table()
    for heading in ("", "GPUs in ring order", "links of this ring"):
        table.add_column(heading)
    headings = ["all rings"]
    if is_measured:
        headings += ["slowest GB/s", "sum GB/s"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, ring in placement.rings().items():
        row = [name.replace("_", " "), ",".join(map(str, ring.order)), describe_counts(ring.links)]
        row.append(ring.bandwidth.describe() if ring.bandwidth else "")
        if is_measured:
            row += [f"{ring.slowest_gb_per_s:.1f}", f"{ring.sum_gb_per_s:.1f}"]
        table.add_row(*row)
    out = console()
    out.print(table)
    out.print(placement.reason)
