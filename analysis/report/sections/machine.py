"""The machine: its hosts, a drawing of its links, and heat maps of the bandwidth and latency between pairs."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from analysis.errors import UnreadableInput
from analysis.findings.links import HostWire, wires_of
from analysis.p2p.heat_map import scale_of, squares
from analysis.report.section import Section
from analysis.report.style import MUTED, Picture, drawn, figure_width, new_figure, rendered
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings, Member
from analysis.study.names import run_name, unit_of
from analysis.study.provenance import facts_of_hosts, gpu_names, gpus_of, mapping
from analysis.study.study import Study
from analysis.text import single_line
from analysis.topology.fabric import rails
from benchmarks.record import Record, finite

LARGEST_MAP = 16
MAPS = 8  # heat maps on the page
MATRICES = {
    "unidirectional": "Bandwidth one way",
    "bidirectional": "Bandwidth both ways",
    "latency_gpu": "Latency by the GPU's clock",
    "latency_cpu": "Latency by the host's clock",
}
STATES = {
    "enabled": "P2P enabled",
    "disabled": "P2P disabled",
}  # where a record has no words of its own


def heat_map(
    ids: Sequence[Member],
    cells: Sequence[Sequence[float | None]],
    name: str,
    caption: str,
    unit: str,
    scale: tuple[float, float],
) -> Picture:
    """Return a matrix of numbers between devices as a figure: rows send to columns, and dark is better, by a common scale."""
    ids = ids[:LARGEST_MAP]
    figure, axes = new_figure(*(min(figure_width(), room + 0.5 * len(ids)) for room in (1.2, 1.0)))
    squares(axes, ids, _pairs(ids, cells), unit, scale=scale)
    axes.tick_params(labelcolor=MUTED)  # which the page changes with its own colours
    axes.xaxis.label.set_color(MUTED)
    axes.grid(visible=False)
    rows = [(a, b, value) for (a, b), value in _pairs(ids, cells).items()]
    key = {"µs": "us", "GB/s": "gb_per_s"}[unit]
    return rendered(figure, name, caption, drawn(("from_gpu", "to_gpu", key), rows))


def machine(study: Study, findings: Findings) -> Section:
    """Return the drawing of the machine, and the matrices between its GPUs."""
    lines: list[str] = []
    pictures, hosts = [*_drawings(study, lines), *_maps(study, findings)], hosts_table(study)
    if not pictures and not hosts.rows and unit_of(study) == "GPUs":
        lines.append(
            "No record has the machine's links, and no matrix of pairs was measured (add benchmark=p2p)."
        )
    tables = (hosts,) if hosts.rows else ()
    return Section(
        "links", "The machine and its links", tuple(lines), tuple(pictures), tables, place=40
    )


def hosts_table(study: Study) -> Table:
    """Return what the newest record of each host says of it; no rows where cells have no hosts."""
    newest: dict[str, tuple[Mapping[str, Any], HostWire]] = {}
    for record in study.records:
        wires = wires_of(record)
        newest |= {
            host: (facts, wires[host]) for host, facts in facts_of_hosts(record).items() if host
        }
    rows = []
    for host, (facts, wire) in sorted(newest.items()):
        cpu, driver = mapping(facts.get("cpu")), mapping(facts.get("gpu")).get("driver")
        rows.append((
            host, str(facts.get("host") or ""), gpu_names(facts), str(cpu.get("model") or ""), finite(cpu.get("cores")),
            str(driver or ""), "+".join(wire.names), wire.gbit_per_s, _rails(facts),
        ))  # fmt: skip
    return Table(
        "hosts", "The hosts, and the interface of each through which ranks exchange with other hosts. Gbit/s: by its driver.",
        (
            Column("host", "host"), Column("own_name", "its own name"), Column("gpus", "GPUs"), Column("cpu", "CPU"),
            Column("cores", "cores", "count"), Column("driver", "driver"), Column("interface", "interface"),
            Column("gbit_per_s", "Gbit/s", "number"), Column("rails", "rails"),
        ),
        tuple(rows),
    )  # fmt: skip


def _rails(facts: Mapping[str, Any]) -> str:
    """Return the network devices that are nearest to each GPU: `0: mlx5_0, 1: mlx5_1`; empty where that is not known."""
    from analysis.topology.source import parse_topology

    try:
        found = rails(parse_topology(str(facts.get("topology") or "")))
    except UnreadableInput:
        return ""
    return ", ".join(f"{gpu}: {'+'.join(nics)}" for gpu, nics in found.items() if nics)


def _drawings(study: Study, lines: list[str]) -> Iterator[Picture]:
    texts: dict[str, tuple[Record, Mapping[str, Any]]] = {}
    for record in study.records:
        for facts in facts_of_hosts(record).values():
            text = facts.get("topology")
            if isinstance(text, str) and text and record.cell.device == "cuda":
                texts.setdefault(text, (record, facts))
    if not texts:
        return
    from analysis.topology.drawing import saved, topology_figure
    from analysis.topology.source import parse_topology

    for place, (text, (record, facts)) in enumerate(list(texts.items())[:2], 1):
        gpus = gpus_of(facts)
        name = gpus[0].get("name") if gpus else None
        try:
            topology = parse_topology(text, name if isinstance(name, str) else None)
        except UnreadableInput as error:
            lines.append(
                f"The topology of {single_line(run_name(record))} cannot be drawn: {single_line(error)}."
            )
            continue
        figure = topology_figure(topology)
        links = [(a, b, topology.link_between(a, b)) for a, b in combinations(topology.gpus, 2)]
        svg, pdf = saved(figure, "svg").decode(), saved(figure, "pdf")
        more = (
            f", in {single_line(run_name(record))} ({len(texts)} descriptions differ)"
            if len(texts) > 1
            else ""
        )
        what = "A host" if record.cell.hosts else "The machine"
        yield Picture(
            f"topology-{place}", f"{what}, from {single_line(topology.source)}{more}.", svg, pdf, card=True,
            figure=figure,
            data=drawn(("gpu", "other_gpu", "link"), links),
        )  # fmt: skip


def _maps(study: Study, findings: Findings) -> Iterator[Picture]:
    """Yield the newest matrix of each kind of benchmark=p2p, then the exchange of every pair if pairs were swept."""
    matrices: dict[tuple[str, bool], tuple[list[Member], list[list[float | None]], str]] = {}
    for record in study.usable:
        tables = mapping(record.tables)
        p2p = mapping(tables.get("p2p"))
        for name, rows in mapping(p2p.get("matrices")).items():
            if (cells := _square(rows)) is not None:
                known = record.cell.world_size == len(cells)
                ids: list[Member] = list(record.cell.members if known else range(len(cells)))
                matrices[str(name), p2p.get("copy") == "sm"] = (
                    ids,
                    cells,
                    _matrix(str(name), mapping(p2p.get("words"))),
                )
    pairs: dict[frozenset[tuple[str, str]], dict[tuple[Member, ...], float]] = defaultdict(dict)
    names: dict[frozenset[tuple[str, str]], str] = {}
    for links in findings.wires:
        if len(links.gpus) == 2 and links.exchange_gb_per_s is not None:
            cell = frozenset(links.key.items())
            pairs[cell][links.gpus] = links.exchange_gb_per_s
            names[cell] = links.label
    maps: list[tuple[list[Member], list[list[float | None]], str, str]] = []
    # Matrices of the host's clock come last, and before them those of copies by a kernel.
    for (name, kernel), (ids, cells, what) in sorted(
        matrices.items(), key=lambda item: ("latency_cpu" in item[0][0], item[0][1])
    ):
        unit = "µs" if "latency" in name else "GB/s"
        copied = ", copied by a kernel" if kernel else ""
        words = f"{what}{copied}, {unit}, from row to column; dark is better, with one scale for each unit (benchmark=p2p)."
        maps.append((ids, cells, words, unit))
    for cell, rates in pairs.items():
        if len(rates) > 2:
            ids = sorted({gpu for pair in rates for gpu in pair})
            cells = [[rates.get((a, b), rates.get((b, a))) for b in ids] for a in ids]
            maps.append(
                (
                    ids,
                    cells,
                    f"Exchange of every pair, busbw GB/s of all buckets: {single_line(names[cell])}.",
                    "GB/s",
                )
            )
    maps = maps[:MAPS]
    scales = {
        unit: scale_of(_pairs(ids[:LARGEST_MAP], cells) for ids, cells, _, of in maps if of == unit)
        for unit in ("GB/s", "µs")
    }
    for place, (ids, cells, caption, unit) in enumerate(maps, 1):
        yield heat_map(ids, cells, f"pairs-{place}", caption, unit, scales[unit])


def _pairs(
    ids: Sequence[Member], cells: Sequence[Sequence[float | None]]
) -> dict[tuple[Member, Member], float]:
    """Return {(row, column): value} of a square; a missing value is absent."""
    return {
        (a, b): value
        for a, row in zip(ids, cells, strict=False)
        for b, value in zip(ids, row, strict=False)
        if value is not None
    }


def _matrix(name: str, states: Mapping[str, Any]) -> str:
    """Return `Bandwidth one way, peer access` for `unidirectional_enabled`, with the record's words for a state."""
    for start, words in MATRICES.items():
        state, _, reads = name.removeprefix(f"{start}_").partition("_")
        if name.startswith(start) and state in STATES and reads in ("", "reads"):
            return single_line(
                f"{words}, {states.get(state, STATES[state])}" + (", reads" if reads else "")
            )
    return single_line(name.replace("_", " "))


def _square(rows: object) -> list[list[float | None]] | None:
    """Return a square matrix of numbers; None for anything else."""
    if (
        not isinstance(rows, list)
        or not rows
        or not all(isinstance(r, list) and len(r) == len(rows) for r in rows)
    ):
        return None
    return [[finite(value) for value in row] for row in rows]


SECTIONS = (machine,)
