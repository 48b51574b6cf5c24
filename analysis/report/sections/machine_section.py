"""The machine: its hosts, a drawing of its links, and heat maps of pairs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from analysis.findings.examine import Findings
from analysis.findings.links import wires_of
from analysis.input_files import UnreadableInput
from analysis.report.charts import heat_map_figure, scale_of
from analysis.report.figure import Figure
from analysis.report.section import Section
from analysis.report.table import Table, Value, columns_of, numbers_table
from analysis.study.names import run_name
from analysis.study.provenance import facts_of_hosts, gpu_names, gpus_of, mapping
from analysis.study.study import Study
from analysis.text import single_line
from benchmarks.record import Record, finite
from conf.cell import Member

MOST_DRAWINGS, MOST_MAPS, LARGEST_MAP = 2, 8, 16
MATRICES = {
    "unidirectional": "Bandwidth one way",
    "bidirectional": "Bandwidth both ways",
    "latency_gpu": "Latency by the GPU's clock",
    "latency_cpu": "Latency by the host's clock",
}

HOSTS = (
    *columns_of(host="host", own_name="its own name", gpus="GPUs", cpu="CPU"),
    *columns_of("count", cores="cores"),
    *columns_of(driver="driver", interface="interface"),
    *columns_of("number", gbit_per_s="Gbit/s"),
)


def machine(study: Study, findings: Findings) -> Section:
    """Return the drawing of the machine, and the matrices between its GPUs."""
    lines: list[str] = []
    figures = list(_drawings(study, lines))
    matrices = _copies(study)[:MOST_MAPS]
    for panel, matrix in enumerate(matrices, 1):
        scale = scale_of(alike["entries"] for alike in matrices if alike["unit"] == matrix["unit"])
        figures.append(heat_map_figure(f"pairs-{panel}", scale=scale, **matrix))
    newest: dict[str, dict[str, Value]] = {}  # of each host; none where cells have no hosts
    for record in study.records:
        wires = wires_of(record)
        for host, facts in facts_of_hosts(record).items():
            if host:
                cpu, gpu = mapping(facts.get("cpu")), mapping(facts.get("gpu"))
                newest[host] = {
                    "host": host,
                    "own_name": str(facts.get("host") or ""),
                    "gpus": gpu_names(facts),
                    "cpu": str(cpu.get("model") or ""),
                    "cores": finite(cpu.get("cores")),
                    "driver": str(gpu.get("driver") or ""),
                    "interface": "+".join(wires[host].names),
                    "gbit_per_s": wires[host].gbit_per_s,
                }
    hosts = Table.of(
        "hosts",
        "The hosts, and the interface of each through which ranks exchange with other hosts. "
        "Gbit/s: by its driver.",
        HOSTS,
        [row for _, row in sorted(newest.items())],
    )
    tables = (hosts,) if hosts.rows else ()
    return Section("links", "The machine and its links", tuple(lines), tuple(figures), tables)


def _drawings(study: Study, lines: list[str]) -> Iterator[Figure]:
    """Yield a drawing of each description of the machine; `lines` get what cannot be drawn."""
    texts: dict[str, tuple[Record, Mapping[str, Any]]] = {}
    for record in study.records:
        for facts in facts_of_hosts(record).values():
            text = facts.get("topology")
            if isinstance(text, str) and text and record.cell.device == "cuda":
                texts.setdefault(text, (record, facts))
    if not texts:
        return
    from analysis.topology.drawing import saved, topology_figure
    from analysis.topology.readers import parse_topology

    for panel, (text, (record, facts)) in enumerate(list(texts.items())[:MOST_DRAWINGS], 1):
        name = next((str(gpu["name"]) for gpu in gpus_of(facts) if "name" in gpu), None)
        run = single_line(run_name(record))
        try:
            topology = parse_topology(text, name)
        except UnreadableInput as error:
            lines.append(f"The topology of {run} cannot be drawn: {single_line(error)}.")
            continue
        figure = topology_figure(topology)
        what = "A host" if record.cell.hosts else "The machine"
        caption = f"{what}, from {single_line(topology.source)}"
        if len(texts) > 1:
            caption += f", in {run} ({len(texts)} descriptions differ)"
        links = []
        for a, b in combinations(topology.gpus, 2):
            links.append((a, b, topology.link_between(a, b)))
        files = saved(figure, "svg").decode(), saved(figure, "pdf")
        data = numbers_table(("gpu", "other_gpu", "link"), links)
        yield Figure(
            f"topology-{panel}", f"{caption}.", *files, card=True, figure=figure, data=data
        )


def _copies(study: Study) -> list[dict[str, Any]]:
    """Return the newest matrix of each kind: last those of the host's clock, copies by a kernel.

    Each is caption, ids, entries and unit of its heat map; a missing value has no entry.
    """
    newest: dict[tuple[str, bool], dict[str, Any]] = {}
    for record in study.usable:
        p2p = mapping(record.tables.get("p2p"))
        by_kernel = p2p.get("copy") == "sm"
        for name, rows in mapping(p2p.get("matrices")).items():
            if not isinstance(rows, list) or any(len(row) != len(rows) for row in rows):
                continue  # no square
            ids: Sequence[Member] = range(len(rows))
            if record.cell.world_size == len(rows):
                ids = record.cell.members
            ids = ids[:LARGEST_MAP]
            entries = {}
            for row, measured in zip(ids, rows, strict=False):
                for column, value in zip(ids, map(finite, measured), strict=False):
                    if value is not None:
                        entries[row, column] = value
            start, _, state = name.rpartition("_")
            unit = "µs" if "latency" in name else "GB/s"
            words = [MATRICES.get(start, start.replace("_", " ")), unit]
            words.insert(1, str(mapping(p2p.get("words")).get(state, f"P2P {state}")))
            if by_kernel:
                words.append("copied by a kernel")
            caption = f"{single_line(', '.join(words))}, from row to column; dark is better."
            matrix = {"caption": caption, "ids": ids, "entries": entries, "unit": unit}
            newest[name, by_kernel] = matrix
    order = sorted(newest, key=lambda key: ("latency_cpu" in key[0], key[1]))
    return [newest[key] for key in order]
