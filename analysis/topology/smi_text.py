"""The text of `nvidia-smi topo -m`, of every driver generation, read as a `Topology`."""

import re
from collections.abc import Mapping
from itertools import combinations

from analysis.errors import UnreadableInput
from analysis.foreign import refuse_too_many
from analysis.topology.link_classes import UNKNOWN, current_word, nvlink_gb_per_s
from analysis.topology.model import Device, Gpu, Pair, Topology, infer_nvswitch

_SGR = re.compile(
    r"\x1b\[[0-9;]*[A-Za-z]"
)  # nvidia-smi underlines the header even when it writes to a pipe
_AFFINITY_COLUMN = re.compile(r"CPU Affinity|NUMA Affinity|GPU NUMA ID")
_GPU = re.compile(r"GPU(\d+)")
_DEVICE = re.compile(r"GPU\d+|NIC\d+|mlx\d\S*")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_#/+-]*")
_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")  # of CPUs or NUMA nodes
_P2P_STATUS = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}


def parse_topology_text(text: str, *, gpu_names: Mapping[int, str] | None = None) -> Topology:
    """Read what `nvidia-smi topo -m` prints, of every driver generation.

    It accepts tabs or spaces, ANSI codes, NIC columns named mlx5_0 or NIC0 with a "NIC Legend", affinity columns that
    are missing, empty, N/A or set off by doubled tabs, and other text around the table. The text names no GPU model:
    give `gpu_names` for theoretical bandwidths. Both rows of a pair must agree. Affinities appear once, so only their
    form is checked. An unknown link word is kept.

    Raises:
        UnreadableInput: names the line of a missing, short or repeated row, an asymmetric pair, or a second table.
    """
    lines = [_SGR.sub("", line).rstrip("\r") for line in text.split("\n")]
    number, labels, columns = _header(lines)
    refuse_too_many(len(labels))
    rows: dict[str, tuple[int, list[str]]] = {}
    affinity: dict[str, dict[str, str]] = {}
    for at, line in enumerate(lines[number:], start=number + 1):
        cells = _cells(line)
        label = cells[0] if cells else ""
        if label not in labels:
            if _DEVICE.fullmatch(label):
                raise UnreadableInput(
                    f"line {at}: a row for {label}, which has no column in the header, line {number}"
                )
            continue
        if label in rows:
            raise UnreadableInput(
                f"line {at}: a second row for {label}; the first is line {rows[label][0]}"
            )
        rows[label] = (at, _links(cells[1:], label, labels, at))
        unfinished = at == len(lines)  # no newline after it: the last cell may be cut
        affinity[label] = _affinity(cells[1 + len(labels) :], columns, at, unfinished)
    for label in labels:
        if label not in rows:
            raise UnreadableInput(
                f"no row for {label}, which the header in line {number} names: the table is cut"
            )
    ids = _devices(labels, _legend(lines[number:]))
    links = _pairs(labels, ids, rows)
    names = gpu_names or {}
    gpus = tuple(
        Gpu(
            index=index,
            cpu_affinity=affinity[label].get("CPU Affinity"),
            numa_affinity=affinity[label].get("NUMA Affinity"),
            name=names.get(index),
            nvlink_gb_per_s=nvlink_gb_per_s(names.get(index)),
        )
        for label, index in ids.items()
        if isinstance(index, int)
    )
    between_gpus = [links[frozenset(pair)] for pair in combinations((gpu.index for gpu in gpus), 2)]
    if between_gpus and all(word in _P2P_STATUS for word in between_gpus):
        raise UnreadableInput(
            f"line {number}: a table of peer access (`nvidia-smi topo -p2p`); accepted are link classes (`topo -m`)"
        )
    nics = tuple(name for name in ids.values() if isinstance(name, str))
    return Topology(
        gpus, nics, links, infer_nvswitch((gpu.index for gpu in gpus), links), "nvidia-smi topo -m"
    )


def _header(lines: list[str]) -> tuple[int, list[str], list[str]]:
    """Return line number (from 1), device labels and affinity columns of the only header."""
    found: list[tuple[int, list[str], list[str]]] = []
    for number, line in enumerate(lines, start=1):
        columns = _AFFINITY_COLUMN.findall(line)
        labels = (_AFFINITY_COLUMN.split(line)[0] if columns else line).split()
        # A row starts with a device as well, but its second cell is a link or X.
        if labels and _GPU.fullmatch(labels[0]) and all(map(_DEVICE.fullmatch, labels[:2])):
            if len(labels) == 1 and not columns and line.lstrip() == line:
                continue  # a bare "GPU0" at the margin is a row whose cells were cut
            found.append((number, labels, columns))
    if not found:
        raise UnreadableInput(
            "no header line with GPU0, GPU1, …; accepted is the text of `nvidia-smi topo -m`"
        )
    if len(found) > 1:
        raise UnreadableInput(
            f"line {found[1][0]}: a second table begins here, the first in line {found[0][0]}; accepted is one table"
        )
    number, labels, columns = found[0]
    if len(set(labels)) != len(labels):
        raise UnreadableInput(f"line {number}: the header names a device twice: {' '.join(labels)}")
    return number, labels, columns


def _cells(line: str) -> list[str]:
    """Split a row at tabs if it has any (a cell may be empty), else at spaces."""
    return [cell.strip() for cell in line.strip(" ").split("\t")] if "\t" in line else line.split()


def _links(cells: list[str], label: str, labels: list[str], at: int) -> list[str]:
    words = [current_word(cell) for cell in cells[: len(labels)]]
    if len(words) < len(labels):
        raise UnreadableInput(
            f"line {at}: {len(words)} links in the row of {label}; accepted are {len(labels)}"
        )
    for other, word in zip(labels, words, strict=True):
        if (word == "X") != (other == label):
            raise UnreadableInput(
                f"line {at}: {label} to {other} reads {word!r}; accepted is X for a device and itself only"
            )
        if word and not _WORD.fullmatch(word):
            raise UnreadableInput(
                f"line {at}: {label} to {other} reads {word!r}; accepted is a link class such as NV4 or SYS"
            )
    return [word or UNKNOWN for word in words]


def _affinity(cells: list[str], columns: list[str], at: int, unfinished: bool) -> dict[str, str]:
    """Read the affinity columns of one row. Doubled tabs leave empty cells, so only a full row is read by position."""
    filled = [cell for cell in cells if cell]
    if len(filled) > len(columns):
        raise UnreadableInput(
            f"line {at}: {len(filled) - len(columns)} more cells than the header has columns"
        )
    values: dict[str, str] = {}
    if len(filled) == len(columns):
        values = dict(zip(columns, filled, strict=True))
        if unfinished and columns:
            del values[columns[-1]]
    elif cells and not cells[0].isdigit() and not unfinished:
        values = {
            columns[0]: cells[0]
        }  # next to the links; a single number could be a later column, moved up
    return {
        column: value for column, value in values.items() if _LIST.fullmatch(value)
    }  # else N/A, or damaged


def _legend(lines: list[str]) -> dict[str, str]:
    """Read `NIC0: mlx5_0` lines under "NIC Legend:"."""
    matches = (re.fullmatch(r"\s*(NIC\d+):\s*(\S+)\s*", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def _devices(labels: list[str], legend: Mapping[str, str]) -> dict[str, Device]:
    """Return the device of each column label: a GPU id, or the NIC's RDMA name if a legend gives one."""
    named = {label: legend.get(label, label) for label in labels}
    if len(set(named.values())) != len(named):  # a damaged legend: keep the column labels
        named = {label: label for label in labels}
    return {
        label: int(match[1]) if (match := _GPU.fullmatch(label)) else named[label]
        for label in labels
    }


def _pairs(
    labels: list[str], ids: Mapping[str, Device], rows: Mapping[str, tuple[int, list[str]]]
) -> dict[Pair, str]:
    """Return the link of each unordered pair; both rows that state it must agree."""
    links: dict[Pair, str] = {}
    for (i, a), (j, b) in combinations(enumerate(labels), 2):
        (line_a, row_a), (line_b, row_b) = rows[a], rows[b]
        if row_a[j] != row_b[i]:
            raise UnreadableInput(
                f"line {line_b}: {b} to {a} is {row_b[i]}, but {a} to {b} is {row_a[j]} (line {line_a}); "
                "accepted is a symmetric table"
            )
        links[frozenset((ids[a], ids[b]))] = row_a[j]
    return links
