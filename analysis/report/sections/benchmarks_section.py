"""Links measured alone: host_link, collectives, p2p, jacobi, exchange; collectives of scripts.

A benchmark's YAML names its function here. Each fills a part of one section, and gives the
sentences for the first screen of a study that trains nothing. A record whose table is damaged ends
its section (analysis.report.build).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from analysis.findings.examine import Findings
from analysis.report.charts import (
    MARKERS,
    Axis,
    DrawnCurve,
    DrawnPoint,
    curves_figure,
    truncation_note,
)
from analysis.report.figure import COLOURS, MUTED, Figure, for_width
from analysis.report.numbers import number
from analysis.report.section import Section, bounded, median_and_interval
from analysis.report.table import Column, Table, metric_column
from analysis.study.intervals import Estimate
from analysis.study.names import BETWEEN, gpu_ids, run_name, short_names, spoken, unit_of
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import join_words, single_line
from benchmarks.record import Record, finite

ORDER = ("host_link", "collectives", "p2p", "jacobi", "exchange")  # of the parts on the page
MOST_NAMED = 4  # cells of one sentence
DEFAULTS = "the default"  # name of a cell in which no setting differs from the defaults
OPERATIONS = {
    "to_device": "host to device",
    "to_host": "device to host",
    "both": "both at once, each way",
    "copy": "copy in the host's memory",
    "add": "sum in the host's memory",
}
DIRECTIONS = {
    "to_device": "to {}",
    "to_host": "from {}",
    "both": "each way with both directions at once",
}
MOST_CURVES, SIZE_TICKS = 6, 4  # of the figure of collectives
BYTE_UNITS = ("B", "KiB", "MiB", "GiB")  # each 2^10 of the one before
PATTERNS = {
    "matching": "each GPU in one pair",
    "one_to_all": "one to all",
    "all_to_one": "all to one",
}


def _section(
    sentences: Iterable[str], table: Table | None = None, figures: Iterable[Figure] = ()
) -> Section:
    tables: tuple[Table, ...] = ()
    if table is not None and table.rows:
        tables = (table,)
    return Section(
        "measured", "Links measured alone", (), tuple(figures), tables, finding=tuple(sentences)
    )


def largest_cells(study: Study, benchmark: str) -> tuple[list[Runs], str]:
    """Return a benchmark's cells on most devices, and these devices: `4 GPUs`."""
    by_size: dict[int, list[Runs]] = defaultdict(list)
    for runs in study.runs:
        if named(runs.records[0], "benchmark") == benchmark:
            by_size[runs.cell.world_size].append(runs)
    most = max(by_size, default=0)
    unit = unit_of(study)
    devices = f"one {unit.removesuffix('s')}"
    if most > 1:
        devices = f"{most} {unit}"
    return by_size[most], devices


def _rows_of(
    study: Study, benchmark: str, table: str, rows: str = "rows"
) -> Iterator[tuple[Record, dict[str, Any]]]:
    for record in study.usable:
        if named(record, "benchmark") == benchmark:
            for row in record.tables.get(table, {}).get(rows, []):
                yield record, row


def _ranking(what: str, text_of: Mapping[Runs, str], option: str = "") -> Iterator[str]:
    """Yield `what: A; then B and C`; a cell in which nothing differs has its value of `option`."""
    names = short_names(runs.records[0].name for runs in text_of)
    texts = []
    for runs, text in text_of.items():
        name = runs.records[0].name
        if len(text_of) > 1:
            own = spoken(names[name]).removeprefix(f"{option}=")
            if names[name] == name:
                own = str(runs.cell.benchmark.get(option, DEFAULTS))
            text = f"{single_line(own, 80)} {text}"
        texts.append(text)
    if texts:
        yield f"{what}: {_then(texts)}."


def _then(texts: Sequence[str], then: str = "then ") -> str:
    if len(texts) == 1:
        return texts[0]
    return f"{texts[0]}; {then}{join_words([*texts[1:]], MOST_NAMED)}"


def host_link(study: Study, findings: Findings) -> Section:
    """Return what copies to and from the host reach."""
    rows = []
    for record, copies in _rows_of(study, "host_link", "host_link"):
        rates = [rate for rate in map(finite, copies["gb_per_s"]) if rate is not None]
        operation = str(copies.get("operation"))
        if rates:
            shown = {"gpus": gpu_ids(record.cell.members), "fastest": max(rates)}
            shown |= {"operation": OPERATIONS.get(operation, operation), "slowest": min(rates)}
            rows.append(copies | shown)
    table = Table.of(
        "host_links",
        "Copies between the host and the devices, and in the host's memory, GB/s.",
        (
            Column("gpus", "GPUs"),
            Column("operation", "operation"),
            Column("memory", "memory", lambda row: single_line(row.get("memory"))),
            Column("at_once", "at once", lambda row: finite(row.get("at_once")), "count"),
            Column("slowest_gb_per_s", "slowest", lambda row: row["slowest"], "number"),
            Column("fastest_gb_per_s", "fastest", lambda row: row["fastest"], "number"),
            Column("sum_gb_per_s", "sum", lambda row: finite(row.get("sum_gb_per_s")), "number"),
        ),
        rows,
    )
    cells, devices = largest_cells(study, "host_link")
    parts = []
    together = ("one", "One GPU at a time", "it"), ("all", "All GPUs at once, in total", "them")
    for prefix, words, whom in together:
        texts = []
        for name, direction in DIRECTIONS.items():
            rate = ""
            if cells:
                rate = median_and_interval(cells[0], f"host_link/{prefix}_{name}_gb_per_s")
            if rate:
                texts.append(f"{rate} {direction.format(whom)}")
        if texts:
            parts.append(f"{words}: {', '.join(texts)}.")
    if not parts:
        return _section((), table)
    line = f"Copies between the host and {devices}, in GB/s. {' '.join(parts)}"
    return _section((line,), table)


def collectives(study: Study, findings: Findings) -> Section:
    """Return bandwidth and latency of each collective."""
    runs: list[dict[str, Any]] = []  # of nccl-tests' tables
    for record, run in _rows_of(study, "collectives", "nccl-tests", "runs"):
        rows = []
        for row in run["rows"]:
            # Out of place if that was measured.
            numbers = row.get("out_of_place") or row.get("in_place") or {}
            size, time_us = finite(row.get("bytes")), finite(numbers.get("time_us"))
            busbw = finite(numbers.get("busbw"))
            rows.append({"bytes": size, "time_us": time_us, "busbw": busbw})
        if rows:
            facts = {
                "record": record,
                "cell": run_name(record),
                "collective": single_line(run.get("collective")),
                "gpus": gpu_ids(record.cell.members),
                "smallest_bytes": rows[0]["bytes"],
                "smallest_us": rows[0]["time_us"],
                "largest_bytes": rows[-1]["bytes"],
                "largest_busbw": rows[-1]["busbw"],
                "avg_busbw": finite(run.get("avg_busbw")),
            }
            runs.append({**facts, "rows": rows})

    def metric(key: str, name: str, heading: str) -> Column:
        full = f"collectives/{name}"
        return metric_column(
            key, full, lambda run: run["record"].metrics.get(full), heading=heading
        )

    table = Table.of(
        "collectives",
        "Collectives: the smallest and the largest message, and the fitted line time = α + bytes "
        "÷ β.",
        (
            Column("cell", "run"),
            Column("collective", "collective"),
            Column("gpus", "GPUs", shown=False),
            Column("smallest_bytes", "smallest, bytes", kind="count"),
            Column("smallest_us", "µs", kind="number"),
            Column("largest_bytes", "largest, bytes", kind="count"),
            Column("largest_busbw", "busbw GB/s", kind="number"),
            Column("avg_busbw", "average busbw", kind="number"),
            metric("alpha_us", "alpha_us", "α µs"),
            metric("beta_gb_per_s", "beta_gb_per_s", "β GB/s"),
            metric("fit_error", "fit_rms_error", "error"),
        ),
        runs,
    )
    return _section(_collectives_sentences(study), table, _collectives_figure(runs))


def _collectives_sentences(study: Study) -> Iterator[str]:
    cells, devices = largest_cells(study, "collectives")
    kinds = set()
    text_of: dict[Runs, str] = {}
    for runs in sorted(cells, key=lambda runs: -(runs.median("collectives/busbw_gb_per_s") or 0.0)):
        kinds.add(single_line(runs.cell.benchmark.get("collective", ""), 80))
        busbw = median_and_interval(runs, "collectives/busbw_gb_per_s")
        small = median_and_interval(runs, "collectives/latency_us")
        if busbw:
            text = f"{busbw} GB/s"
            if small and len(cells) == 1:
                text += f", and {small} µs for the smallest message"
            text_of[runs] = text
    kind, option = "", "collective"
    if len(kinds) == 1 and any(kinds):
        kind, option = f"{kinds.pop()} ", ""
    yield from _ranking(f"Busbw of the largest {kind}message on {devices}", text_of, option)


def _collectives_figure(runs: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    curves, sizes = [], set()
    palette = [light for light, _ in COLOURS.values()]
    names = []
    for run in runs:
        _, *parts = run["cell"].split(BETWEEN)
        words = [run["collective"]]
        for part in parts:
            if not part.startswith("collective="):
                words.append(part)
        names.append(single_line(BETWEEN.join(words)))
    short = short_names(names[:MOST_CURVES])
    for run, name, colour, marker in zip(runs, names[:MOST_CURVES], palette, MARKERS, strict=False):
        points = []
        for row in run["rows"]:
            size, rate = row["bytes"], row["busbw"]
            if size and rate and size > 0 and rate > 0:
                points.append(DrawnPoint(size, Estimate(rate)))
                sizes.add(size)
        if len(points) > 1:
            label = short[name]
            if label == name:
                label = DEFAULTS
            curves.append(DrawnCurve(label, points, colour, marker, end=" "))
    if not curves:
        return
    fastest = _fastest_by_size(runs)
    if fastest:
        curves.append(DrawnCurve("the fastest setting", fastest, MUTED, "", end=" "))
    low, high = math.ceil(math.log2(min(sizes))), math.floor(math.log2(max(sizes)))
    apart = max(1, math.ceil((high - low) / for_width(SIZE_TICKS)))
    ticks = {}
    for power in range(low, high + 1, apart):
        step = min(max(power, 0) // 10, 3)
        ticks[2.0**power] = f"{2.0 ** (power - 10 * step):g} {BYTE_UNITS[step]}"
    more = truncation_note(runs, MOST_CURVES, "more run", "collectives.csv")
    yield curves_figure(
        "collectives",
        f"Bus bandwidth by message size, as nccl-tests defines it.{more}",
        curves,
        Axis("bytes", "bytes", ticks=ticks, base=2),
        Axis("busbw, GB/s", "busbw_gb_per_s", base=10),
    )


def _fastest_by_size(runs: Sequence[Mapping[str, Any]]) -> list[DrawnPoint]:
    settings = {tuple(sorted(run["record"].cell.nccl.items())) for run in runs}
    if len(settings) < 3 or len({(run["collective"], run["gpus"]) for run in runs}) > 1:
        return []
    fastest: dict[float, float] = {}
    for run in runs:
        for row in run["rows"]:
            if row["bytes"] and row["busbw"]:
                fastest[row["bytes"]] = max(row["busbw"], fastest.get(row["bytes"], 0.0))
    return [DrawnPoint(size, Estimate(fastest[size])) for size in sorted(fastest)]


def script(study: Study, findings: Findings) -> Section:
    """Return which collectives a step of each script holds."""
    rows = []
    for record, row in _rows_of(study, "script", "exchanges"):
        rows.append(row | {"cell": run_name(record), "choice": choice_of(row, record)})
    columns = [Column("cell", "run"), Column("kind", "collective")]
    columns += [Column(name, name, kind="number") for name in ("calls", "bytes", "ms")]
    columns.append(Column("busbw_gb_per_s", "busbw, GB/s", kind="number"))
    if any(row["choice"] for row in rows):  # NCCL's log of a traced pass has them
        columns.append(Column("choice", "algorithm, protocol"))
    caption = "Collectives of a step, by torch's flight recorder; the bytes of one rank."
    tables = (Table.of("exchanges", caption, columns, rows),) if rows else ()
    return Section("exchanges", "Collectives of a step", tables=tables)


def choice_of(exchange: Mapping[str, Any], record: Record) -> str:
    """Return what NCCL chose for a collective of a step, `Ring Simple`; several with ` + `."""
    size = exchange["bytes"]
    if exchange["kind"] == "reduce_scatter":  # NCCL counts what a rank receives, of all ranks
        size /= record.cell.world_size
    choices: dict[str, None] = {}
    for choice in record.effective.get("choices", ()):
        function = (choice["function"] or "").lower()
        if (function, choice["bytes"]) == (exchange["kind"].replace("_", ""), size):
            choices[f"{choice['algorithm']} {choice['protocol']}"] = None
    return " + ".join(choices)


def p2p(study: Study, findings: Findings) -> Section:
    """Return what pairs reach, and what copies at the same time cost each other."""
    rows = []
    for record, concurrent in _rows_of(study, "p2p", "p2p_concurrent"):
        shares = []
        for copy in concurrent["copies"]:
            together, alone = finite(copy.get("gb_per_s")), finite(copy.get("alone_gb_per_s"))
            if together and alone:
                shares.append(together / alone)
        pattern = str(concurrent.get("pattern"))
        if shares:
            shown = {"gpus": gpu_ids(record.cell.members), "copies": len(shares)}
            shown |= {"pattern": PATTERNS.get(pattern, pattern), "kept": min(shares)}
            rows.append(concurrent | shown)
    table = Table.of(
        "contention",
        "Simultaneous copies: total GB/s, and the slowest copy in % of its rate alone.",
        (
            Column("gpus", "GPUs"),
            Column("pattern", "pattern"),
            Column("number", "round or GPU", lambda row: finite(row.get("number")), "count"),
            Column("copies", "copies", kind="count"),
            Column("total_gb_per_s", "GB/s", lambda row: finite(row["total_gb_per_s"]), "number"),
            Column("kept", "kept", kind="share"),
        ),
        rows,
    )
    return _section(_p2p_sentences(study), table)


def _p2p_sentences(study: Study) -> Iterator[str]:
    cells, devices = largest_cells(study, "p2p")
    if not cells:
        return
    runs = cells[0]
    words = runs.records[0].tables.get("p2p", {}).get("words", {})
    parts = []
    for state in ("enabled", "disabled"):
        texts = []
        for way, name in (("one way", "unidirectional"), ("both ways", "bidirectional")):
            rate = median_and_interval(runs, f"p2p/{name}_{state}_gb_per_s")
            if rate:
                texts.append(f"{rate} GB/s {way}")
        small = ""
        for clock in ("gpu", "cpu"):
            small = small or median_and_interval(runs, f"p2p/latency_{clock}_{state}_us")
        if texts and small:
            texts.append(f"{small} µs for a small copy")
        if texts:
            meaning = single_line(words.get(state, f"P2P {state}"), 80)
            parts.append(f"{meaning}: {', '.join(texts)}")
    if parts:
        yield f"Copies between {devices} (median of the pairs): {'; '.join(parts)}."
    patterns = []
    for pattern, what in PATTERNS.items():
        total = median_and_interval(runs, f"p2p/{pattern}_gb_per_s")
        share = median_and_interval(runs, f"p2p/{pattern}_share")
        if total and share:
            patterns.append(f"{what} {total} GB/s ({share})")
    if patterns:
        rates = "total rate (slowest copy, in % of its rate alone)"
        yield f"Simultaneous copies, {rates}: {', '.join(patterns)}."


def jacobi(study: Study, findings: Findings) -> Section:
    """Return the times of the solver, and its speed-up over one device."""

    def metric(name: str, heading: str = "") -> Column:
        full = f"jacobi/{name}"
        return metric_column(name, full, lambda record: record.metrics.get(full), heading=heading)

    def efficiency(record: Record) -> Estimate | None:
        return bounded(study, record, "jacobi/efficiency")

    table = Table.of(
        "jacobi",
        "Halo exchange, strong scaling; memory bandwidth of the stencil on one device, and as a "
        "share of that of a copy.",
        (
            Column("cell", "run", run_name),
            Column("gpus", "GPUs", lambda record: gpu_ids(record.cell.members), shown=False),
            metric("one_gpu_seconds", "one, s"),
            metric("seconds", "all, s"),
            metric("speedup"),
            metric_column("efficiency", "jacobi/efficiency", efficiency),
            metric("stencil_gb_per_s", "stencil GB/s"),
            metric("copy_share", "of a copy"),
        ),
        [record for record in study.usable if named(record, "benchmark") == "jacobi"],
    )
    cells, devices = largest_cells(study, "jacobi")
    text_of: dict[Runs, str] = {}
    for runs in sorted(cells, key=lambda runs: runs.median("jacobi/seconds") or 0.0):
        seconds = median_and_interval(runs, "jacobi/seconds")
        speedup = median_and_interval(runs, "jacobi/speedup")
        share = median_and_interval(runs, "jacobi/efficiency")
        copy = median_and_interval(runs, "jacobi/copy_share")
        text = f"{seconds} s"
        if speedup and share:
            text += f", {speedup} times as fast as one, efficiency {share}"
        elif copy:
            text += f", the stencil at {copy} of a copy's rate"
        if seconds:
            text_of[runs] = text
    return _section(_ranking(f"Jacobi on {devices}", text_of), table)


def exchange(study: Study, findings: Findings) -> Section:
    """Return the time of each strategy's exchange; its table is that of the strategies."""
    cells, devices = largest_cells(study, "exchange")
    by_model: Mapping[str, list[tuple[float, Runs]]] = defaultdict(list)
    for runs in cells:
        ms = runs.median("comm/exchange_ms")
        if ms is not None:
            by_model[runs.cell.model.name].append((ms, runs))
    sentences = []
    for model, timed in sorted(by_model.items()):
        names = short_names(runs.records[0].name for _, runs in timed)
        texts: list[str] = []
        for ms, runs in sorted(timed, key=lambda pair: pair[0]):
            name = runs.strategy
            if len(timed) > 1:
                name = names[runs.records[0].name]
            texts.append(f"{single_line(spoken(name), 80)} {number(ms)} ms")
        about = f"Time to exchange the gradients of {single_line(model, 80)} on {devices}"
        sentences.append(f"{about}: {_then(texts, '')}.")
    return _section(sentences)
