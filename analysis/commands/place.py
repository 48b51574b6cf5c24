"""`python -m analysis place --gpus K`: which K GPUs to take and in which order, the worst set, and the worst order."""

import argparse
import json
from typing import Any

from rich.table import Table

from analysis.console import console
from analysis.errors import UnreadableInput
from analysis.input_files import read_text
from analysis.topology.model import describe_counts
from analysis.topology.nvml import NoDriver
from analysis.topology.placement import Placement, Ring, choose_gpus
from analysis.topology.readers import read_topology
from benchmarks.record import finite

_MATRIX = "unidirectional_enabled"  # what a ring step does: one direction, with peer access if there is any


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the best set, the worst set, the worst order of the best set, and the reason."""
    measured = (
        None if arguments.p2p is None else read_matrix(read_text(arguments.p2p), arguments.p2p)
    )
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
        print(json.dumps(to_json(placement)))
    else:
        _print(placement)
    return 0


def to_json(placement: Placement) -> dict[str, Any]:
    """Return `{"best": {"gpus": [0, 1], "links": {"NV2": 1}, …}, "worst": {…}, "worst_order": {…}, "reason": "…"}`."""
    rings = {name: ring.to_json() for name, ring in _rings(placement).items()}
    return {**rings, "reason": placement.reason}


def _rings(placement: Placement) -> dict[str, Ring]:
    return {"best": placement.best, "worst": placement.worst, "worst_order": placement.worst_order}


def read_matrix(text: str, where: str) -> list[list[float]]:
    """Read a square matrix of GB/s, from the row's GPU to the column's; the diagonal is not used.

    Accepts `{"matrices": {"unidirectional_enabled": …}}` at any depth (the contract's object, or a record that holds
    it) and a bare matrix. Raises UnreadableInput for anything else and for a pair without a positive number.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UnreadableInput(
            f"{where}: not JSON; accepted is that of `python -m analysis p2p`, or a matrix"
        ) from None
    matrix = document if isinstance(document, list) else _find(document)
    if matrix is None:
        raise UnreadableInput(
            f"{where}: no matrices.{_MATRIX}; accepted is the JSON of `python -m analysis p2p`"
        )
    size = len(matrix)
    if not size or not all(isinstance(row, list) and len(row) == size for row in matrix):
        raise UnreadableInput(
            f"{where}: the matrix is not square; accepted are a row and a column for each GPU"
        )
    for a, row in enumerate(matrix):
        for b, cell in enumerate(row):
            if a != b and not (finite(cell) or 0.0) > 0:
                raise UnreadableInput(
                    f"{where}: GPU {a} to GPU {b} is {cell!r:.100}; accepted are GB/s above 0"
                )
    return [
        [float(cell) if a != b else 0.0 for b, cell in enumerate(row)]
        for a, row in enumerate(matrix)
    ]


def _find(document: Any) -> Any:
    """Find the matrix inside nested objects, outermost first."""
    level = [document]
    while level:
        for one in level:
            matrices = one.get("matrices") if isinstance(one, dict) else None
            if isinstance(matrices, dict) and isinstance(matrices.get(_MATRIX), list):
                return matrices[_MATRIX]
        level = [value for one in level if isinstance(one, dict) for value in one.values()]
    return None


def _print(placement: Placement) -> None:
    table = Table()
    for heading in ("", "GPUs in ring order", "links of this ring"):
        table.add_column(heading)
    table.add_column("all rings", justify="right")
    measured = placement.best.slowest_gb_per_s is not None
    if measured:
        table.add_column("slowest GB/s", justify="right")
        table.add_column("sum GB/s", justify="right")
    for name, ring in _rings(placement).items():
        row = [name.replace("_", " "), ",".join(map(str, ring.order)), describe_counts(ring.links)]
        row.append(ring.bandwidth.describe() if ring.bandwidth else "")
        if measured:
            row += [f"{ring.slowest_gb_per_s:.1f}", f"{ring.sum_gb_per_s:.1f}"]
        table.add_row(*row)
    out = console()
    out.print(table)
    out.print(placement.reason)
