"""`python -m analysis subsets [FILE]`: the GPU subsets of a machine, in classes of equal links."""

import argparse
import json

from rich.table import Table

from analysis.commands.console import console
from analysis.topology.link_classes import describe_counts
from analysis.topology.source import load_topology
from analysis.topology.subsets import classes


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "file",
        nargs="?",
        help="text of `nvidia-smi topo -m` or NCCL's topology XML; - is stdin; without a file: this machine",
    )
    parser.add_argument("--size", type=int, metavar="K", help="only subsets of K GPUs (default: of two and more)")
    parser.add_argument("--affinity", action="store_true", help="distinguish pairs on one NUMA node from pairs on two")
    parser.add_argument("--nics", action="store_true", help="distinguish GPUs that have other links to the NICs")
    parser.add_argument("--second-member", action="store_true", help="show another member of each class")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the classes, by size and best links first."""
    topology = load_topology(arguments.file)
    found = classes(topology, arguments.size, affinity=arguments.affinity, nics=arguments.nics)
    total = sum(one.members for one in found)
    if arguments.json:
        print(json.dumps({"subsets": total, "classes": [one.to_json(arguments.second_member) for one in found]}))
        return 0
    table = Table(title=f"{total} subsets in {len(found)} classes", title_justify="left")
    table.add_column("GPUs", justify="right")
    table.add_column("links")
    table.add_column("members", justify="right")
    table.add_column("representative")
    if arguments.second_member:
        table.add_column("second member")
    for one in found:
        row = [str(one.size), describe_counts(one.links), str(one.members), ",".join(map(str, one.representative))]
        if arguments.second_member:
            row.append(",".join(map(str, one.second_member or ())) or "none")
        table.add_row(*row)
    console().print(table)
    return 0
