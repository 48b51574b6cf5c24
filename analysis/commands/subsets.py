"""`python -m analysis subsets [FILE]`: the GPU subsets of a machine, in classes of equal links."""

import argparse
import json

from rich.table import Table

from analysis.console import console
from analysis.topology.link_classes import describe_counts
from analysis.topology.packing import EXACT_GPUS
from analysis.topology.source import load_topology
from analysis.topology.subsets import SubsetClass, classes
from analysis.topology.wires import MachineWires, SetBandwidth


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file",
        nargs="?",
        help="text of `nvidia-smi topo -m` or NCCL's topology XML; - is stdin; without a file: this machine",
    )
    parser.add_argument(
        "--size", type=int, metavar="K", help="only subsets of K GPUs (default: of two and more)"
    )
    parser.add_argument(
        "--affinity",
        action="store_true",
        help="distinguish pairs on one NUMA node from pairs on two",
    )
    parser.add_argument(
        "--nics", action="store_true", help="distinguish GPUs that have other links to the NICs"
    )
    parser.add_argument(
        "--second-member", action="store_true", help="show another member of each class"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the classes, by size and best links first, with what the rings of each carry together."""
    topology = load_topology(arguments.file)
    found = classes(topology, arguments.size, affinity=arguments.affinity, nics=arguments.nics)
    total, wires = sum(one.members for one in found), MachineWires.of(topology)

    def bandwidth(one: SubsetClass) -> SetBandwidth:
        places = [topology.gpus.index(gpu) for gpu in one.representative]
        return wires.bandwidth(
            places, quick=len(topology.gpus) > EXACT_GPUS
        )  # of 16 GPUs there may be 2,000 classes

    if arguments.json:
        print(
            json.dumps(
                {
                    "subsets": total,
                    "classes": [
                        one.to_json(arguments.second_member) | bandwidth(one).to_json()
                        for one in found
                    ],
                }
            )
        )
        return 0
    table = Table(title=f"{total} subsets in {len(found)} classes", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("links")
    table.add_column("all rings", justify="right")
    table.add_column("members", justify="right")
    table.add_column("representative")
    if arguments.second_member:
        table.add_column("second member")
    for one in found:
        row = [
            str(one.size),
            describe_counts(one.links),
            bandwidth(one).describe() if one.size > 1 else "",
        ]
        row += [str(one.members), ",".join(map(str, one.representative))]
        if arguments.second_member:
            row.append(",".join(map(str, one.second_member or ())) or "none")
        table.add_row(*row)
    console().print(table)
    return 0
