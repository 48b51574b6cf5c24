"""Cells against each other: strategies, settings, real differences, noise floor, studies."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from analysis.findings.between_studies import CellDifference, Differences
from analysis.findings.communication import (
    COST,
    DISAGREEMENT,
    EXPOSED,
    HIDDEN,
    TRACE_EXPOSED,
    Communication,
    disagreement,
)
from analysis.findings.comparisons import Comparison, SettingEffect
from analysis.findings.examine import Findings
from analysis.findings.study_inputs import StudyInput
from analysis.report.charts import MOST_ROWS, ROW_LENGTH, Axis, DotRow, rows_figure, truncation_note
from analysis.report.figure import COLOURS, GREY, HIGHLIGHT, Figure, for_width
from analysis.report.main_point import points_of
from analysis.report.numbers import ABSENT, estimate, number, of_metric
from analysis.report.section import RATE, Section, about_costs, about_intervals, verdict_of
from analysis.report.table import Column, Table, columns_of, metric_column
from analysis.study.draws import scaled
from analysis.study.intervals import half_width
from analysis.study.measured_numbers import FASTER, NO_DIFFERENCE, SLOWER, UNKNOWN, MeasuredNumber
from analysis.study.names import BETWEEN, gpu_ids, gpu_list, label, ran_alone, short_names
from analysis.study.noise_floor import Floor, FloorGroup
from analysis.study.rates import is_of_training
from analysis.study.runs import Runs, named
from analysis.study.study import Study
from analysis.text import count, first_lines, join_words, single_line
from benchmarks.record.metrics import metric as entry_of

EXCHANGE_MS, EXCHANGE_SHARE = "comm/exchange_ms", "comm/ideal_ratio"
TRACE_HIDDEN, TRACE_ALL = "trace/overlapped_ms_per_step", "trace/comm_ms_per_step"
NO_EFFECT = "setting_no_effect"  # a code of analysis.validity.checks
MOST_SOURCES = 4  # cells that show a noise floor; of more the number is given
VERDICT_LOOKS = {"faster": (COLOURS["blue"][0], ">"), "slower": (HIGHLIGHT, "<")}


# ---- Strategies ---------------------------------------------------------------------------------


def strategies(study: Study, findings: Findings) -> Section | None:
    """Return every set of equal cells with its rate, its exchange and what of it is exposed."""
    if not study.trains or (study.records and ran_alone(study)):
        return None
    points: dict[str, dict[str, Any]] = {}
    for curve, point in points_of(findings.scaling.curves):
        shown = {"cell": curve.label, "images_per_second": point.rate}
        points |= dict.fromkeys(point.record_ids, shown)
    communication = {cell.record_ids[0]: cell for cell in findings.communication}
    rows = []
    for runs in study.runs:
        exchanges = runs.median(EXCHANGE_MS) is not None
        if runs.cell.world_size > 1 and (exchanges or runs.median(RATE) is not None):
            record_id = runs.records[0].record_id
            row = _strategy_row(runs, communication.get(record_id))
            rows.append(row | points.get(record_id, {}))
    names = short_names(str(row["cell"]) for row in rows)
    rows.sort(key=lambda row: (-row["world_size"], -(row["median_rate"] or 0.0)))
    on_hosts = False  # their GB/s: section on links
    without_effect: Counter[str] = Counter()
    for record in study.usable:
        on_hosts = on_hosts or bool(record.cell.hosts)
        without_effect[record.validity.codes.get(NO_EFFECT, "")] += 1
    columns = (
        Column("cell", "cell", lambda row: names[row["cell"]]),
        Column("model", "model", shown=False),
        Column("strategy", "strategy", shown=False),
        Column("gpus", "GPUs"),
        Column("runs", "runs", kind="count"),
        metric_column("images_per_second", RATE, bounded=True),
        metric_column("exchange_ms", EXCHANGE_MS, bounded=True),
        Column("gb_per_second_per_gpu", "GB/s per GPU", kind="number", shown=not on_hosts),
        metric_column("of_reference", EXCHANGE_SHARE),
        Column("reference", "reference"),
        metric_column("cost_ms", COST, bounded=True),
        metric_column("exposed_ms", EXPOSED),
        metric_column("hidden_share", HIDDEN),
        Column("hidden_by_trace", "hidden by trace", kind=of_metric(HIDDEN)),
        metric_column("exposed_by_trace_ms", TRACE_EXPOSED),
        metric_column("difference_ms", DISAGREEMENT),
        Column("mark", "verdict"),
    )
    table = Table.of(
        "strategies",
        "Cells on several GPUs; numbers are medians over the runs of a cell. GB/s per GPU: "
        "gradient bytes · 2(n−1)/n ÷ the time of an exchange. Cost: what the strategy adds to a "
        "step. Exposed: what it adds beyond its cost on one GPU. Hidden: the share of the "
        f"exchange that is not exposed.{about_intervals(study)}{about_costs(study)}",
        columns,
        rows,
        marked=lambda row: row["is_suspect"],
    )
    lines = []
    if not rows:
        lines.append("No cell that counts ran on several GPUs.")
    for text, number_of in without_effect.items():
        if text and rows:
            lines.append(f"{single_line(text, 300)} ({count(number_of, 'cell')}).")
    return Section(
        "strategies", "Strategies and settings", tuple(first_lines(lines)), tables=(table,)
    )


def _strategy_row(runs: Runs, communication: Communication | None) -> dict[str, Any]:
    """Return the numbers of equal cells on several GPUs."""
    record, ranks = runs.records[0], runs.cell.world_size
    exchange_ms, size = runs.median(EXCHANGE_MS), record.model.get("gradient_bytes")
    hidden_ms, total_ms = runs.median(TRACE_HIDDEN), runs.median(TRACE_ALL)
    references = {str(each.checks.get("reference") or "") for each in runs.records}
    row: dict[str, Any] = {
        "cell": record.name,
        "model": runs.cell.model.name,
        "strategy": runs.strategy,
        "gpus": gpu_ids(runs.gpus),
        "world_size": ranks,
        "median_rate": runs.median(RATE),
        "runs": len(runs.records),
        "images_per_second": runs.next_run(RATE),
        "exchange_ms": runs.next_run(EXCHANGE_MS),
        "of_reference": runs.median(EXCHANGE_SHARE),
        "reference": ", ".join(sorted(filter(None, references))),
        "cost_ms": runs.next_run(COST),
        "exposed_by_trace_ms": runs.median(TRACE_EXPOSED),
        "is_suspect": runs.suspect,
        "mark": verdict_of(runs.records),
    }
    if communication is not None:
        row["exposed_ms"] = communication.exposed_ms
        row["hidden_share"] = communication.hidden_share
    if size and exchange_ms:
        row["gb_per_second_per_gpu"] = size * 2 * (ranks - 1) / ranks / exchange_ms / 1e6
    if hidden_ms is not None and total_ms:
        row["hidden_by_trace"] = hidden_ms / total_ms
    measured = {}
    for metric, key in ((TRACE_EXPOSED, "exposed_by_trace_ms"), (EXPOSED, "exposed_ms")):
        if row.get(key) is not None:
            measured[metric] = row[key]
    row["difference_ms"] = disagreement(measured).get(DISAGREEMENT)
    return row


# ---- NCCL settings ------------------------------------------------------------------------------


def settings(study: Study, findings: Findings) -> Section | None:
    """Return the transport, the exchange and the rate with each setting and without; else None."""
    if not findings.settings:
        return None

    def untouched(effect: SettingEffect) -> str:
        """Return the untouched cell's label without its GPUs, which have a column."""
        parts = effect.compared.first.split(BETWEEN)[1:]
        return single_line(BETWEEN.join(part for part in parts if not part.endswith(" untouched")))

    columns = (
        Column("setting", "setting", "setting"),
        Column("cell", "untouched cell", untouched),
        Column("gpus", "GPUs", lambda row: gpu_ids(row.compared.gpus)),
        Column("transport_untouched", "transport untouched", lambda row: row.transports[0]),
        Column("transport", "transport with it", lambda row: row.transports[1]),
        Column("exchange_ms_untouched", "exchange ms", lambda row: row.exchange_ms[0], "number"),
        Column("exchange_ms", "with it", lambda row: row.exchange_ms[1], "number"),
        Column("exchange_ratio", "times as long", "exchange_ratio", "ratio"),
        Column("rate", "rate", "compared.rate"),
        Column("difference", "rate changes by", "compared.difference", "change", True),
        Column("verdict", "verdict", lambda row: row.compared.verdict or "no verdict"),
    )
    caption = (
        "Each NCCL setting against the same cell in which it is untouched; the rate with its 95 % "
        "interval."
    )
    table = Table.of("settings", caption, columns, findings.settings)
    lines: tuple[str, ...] = ()
    if not all(effect.compared.verdict for effect in findings.settings):
        lines = ("The verdict needs repeats: a single run does not show how far runs differ.",)
    return Section("settings", "NCCL settings", lines, tables=(table,))


# ---- Which differences are real -----------------------------------------------------------------


def comparisons(study: Study, findings: Findings) -> Section | None:
    """Return the verdicts, and how far the machine drifted; None without either."""
    pairs = findings.comparisons
    lines = []
    if study.trains or pairs:
        lines.append(differences(findings))
    rates = {pair.rate for pair in pairs}
    if not all(map(is_of_training, rates)):
        metrics = []
        for rate in study.rates:
            metric = f"1 ÷ {rate.metric}" if rate.is_time else rate.metric
            if rate.name in rates:
                metrics.append(f"{rate.name} ({metric})")
        lines.append(f"Compared: {join_words(metrics)}; more is faster.")
    for noise in findings.noises:
        if noise.drift is not None:
            in_rate = f" in {noise.rate}" if len(study.rates) > 1 else ""
            lines.append(
                "The first cell ran once more at the end: its rate changed by "
                f"{number(noise.drift, 'change')}{in_rate}."
            )
    if not lines:
        return None
    names = _short_names(pairs)
    caption = (
        "The second cell against the first, with the 95 % interval of the difference. “Visible "
        "from” is the smallest difference that these runs could have shown."
    )
    columns = (
        Column("first", "first cell", lambda pair: names[pair.first]),
        Column("second", "second cell", lambda pair: names[pair.second]),
        Column("asked", "differ in", "asked"),
        Column("rate", "rate", "rate", shown=len(study.rates) > 1),
        Column("first_runs", "runs of 1st", lambda pair: pair.runs[0], "count"),
        Column("second_runs", "runs of 2nd", lambda pair: pair.runs[1], "count"),
        Column("difference", "difference", "difference", "change", True),
        Column("smallest", "visible from", "smallest", "share"),
        Column("verdict", "verdict", lambda pair: pair.verdict or "no verdict"),
        Column("why", "note", "why"),
    )
    table = Table.of("comparisons", caption, columns, pairs)
    figures = tuple(_comparison_figure(pairs, names))
    lines = list(map(single_line, lines))
    return Section("comparisons", "Which differences are real", tuple(lines), figures, (table,))


def _short_names(pairs: Sequence[Comparison]) -> dict[str, str]:
    """Return {name of a cell: a short name} for all cells of the pairs."""
    names = []
    for pair in pairs:
        names += [pair.first, pair.second]
    return short_names(names)


def differences(findings: Findings) -> str:
    """Return the largest difference that is seen, and of how many; or that none is."""
    judged, real, least = [], [], []
    for pair in findings.comparisons:
        if pair.verdict:
            judged.append(pair)
            if pair.smallest is not None:
                least.append(pair.smallest)
        if pair.verdict in VERDICT_LOOKS:
            real.append(pair)
    if not findings.comparisons:
        return "No two cells of this study differ in one thing alone."
    if not judged:
        pairs = count(len(findings.comparisons), "pair of cells differs", "pairs of cells differ")
        return f"{pairs} in one thing alone, but too few runs of them are known for a verdict."
    if not real:
        line = f"No difference is seen in {count(len(judged), 'comparison')}"
        if least:
            line += f"; each could have shown one of {number(max(least), 'share')}"
        return f"{line}."
    largest = max(real, key=lambda pair: abs(pair.difference.value))
    every = _short_names(findings.comparisons)
    _, shared = _own_and_shared(every[largest.first], every[largest.second])
    short = _short_names([largest])
    first, second = single_line(short[largest.first], 80), single_line(short[largest.second], 80)
    where = rest = ""
    if shared:
        where = single_line(f" ({', '.join(shared)})", 120)
    if len(judged) > 1:
        rest = f"; {len(real):,} of {len(judged):,} comparisons show a difference"
    value = largest.difference.value
    size = estimate(scaled(largest.difference, math.copysign(1, value)), "share")
    return f"{second} is {size} {largest.verdict} than {first}{where}{rest}."


def _own_and_shared(first: str, second: str) -> tuple[list[str], list[str]]:
    """Return what only one of two names says, of each; and the parts that both have."""
    sides = first.split(BETWEEN), second.split(BETWEEN)
    shared = [part for part in sides[1] if part in sides[0]]
    own = []
    for parts in sides:
        words = [part for part in parts if part not in shared]
        own.append(BETWEEN.join(words) or "the default")
    return own, shared


def _comparison_figure(pairs: Sequence[Comparison], names: Mapping[str, str]) -> Iterator[Figure]:
    """Yield differences with intervals, largest first, over the noise floor."""
    judged = [pair for pair in pairs if pair.verdict]
    judged.sort(key=lambda pair: (-abs(pair.difference.value), pair.first, pair.second))
    shown = judged[:MOST_ROWS]
    if not shown:
        return
    rates = {pair.rate for pair in shown}
    rows, band = [], ""
    for pair in shown:
        size = number(pair.difference.value, "change")
        if for_width(ROW_LENGTH) >= ROW_LENGTH:
            size += f", {pair.verdict}"
        own, shared = _own_and_shared(names[pair.first], names[pair.second])
        label = BETWEEN.join([f"{own[1]} against {own[0]}", *shared])
        look = VERDICT_LOOKS.get(pair.verdict, (GREY, "o"))
        floor = pair.floor or 0.0
        rows.append(DotRow(label, size, pair.difference, *look, floor))
        if floor:
            band = "; band: the larger noise floor of the two cells"
    in_rate = rates.pop() if len(rates) == 1 else "the rate"
    yield rows_figure(
        "comparisons",
        f"Differences with 95 % intervals{band}. Arrows: faster, slower; dots: no difference seen."
        f"{truncation_note(judged, MOST_ROWS, 'more comparison', 'comparisons.csv')}",
        rows,
        Axis(f"difference in {in_rate}", "difference", "change"),
    )


# ---- The noise floor ----------------------------------------------------------------------------


def noise(study: Study, findings: Findings) -> Section | None:
    """Return the noise floors that the intervals of the study rest on, and the runs behind each."""
    rows: list[dict[str, Any]] = []
    rates = [rate.metric for rate in study.rates]
    for metric in dict.fromkeys([*rates, COST, EXCHANGE_MS]):
        repeated = repeated_cells(study, metric)
        of_metric: dict[tuple[FloorGroup, str], dict[str, Any]] = {}
        for runs in study.runs:
            floor = runs.floor(metric)
            if floor is None or not runs.values(metric):
                continue
            row = floor_row(runs, metric, floor)
            key = runs.group, floor.name
            if key not in of_metric or row["width"] > of_metric[key]["width"]:
                sources = floor.lenders or (runs.group,)
                cells: list[str] = []
                for group in sources:
                    cells += repeated[group]
                if runs.suspect:
                    cells = [f"{label(study, runs)} on {gpu_list(runs.gpus)}, suspect"]
                row["source"] = join_words(cells, MOST_SOURCES) or "other studies"
                of_metric[key] = row
        rows += [row for _, row in sorted(of_metric.items())]
    if not rows:
        return None
    first = [row for row in rows if row["metric"] == rows[0]["metric"]]
    first.sort(key=lambda row: row["width"])
    sizes = []
    for row in (first[0], first[-1]):
        size = number(row["half_share"], "part")
        if row["half_share"] is None:
            size = f"{number(row['half'])} {row['unit']}"
        sizes.append(size)
    runs_of = "the runs of the cells that the last column names"
    if len(first) == 1:
        runs_of = f"{count(first[0]['runs'], 'run')} of {first[0]['source']}"
    line = (
        f"One more run lies within {' to '.join(dict.fromkeys(sizes))} of a single run in "
        f"{first[0]['metric']}, 19 times in 20, by {runs_of}."
    )

    def differing(kind: str, **headings: str) -> Iterator[Column]:
        """Yield columns that are shown where their rows differ."""
        for column in columns_of(kind, **headings):
            yield replace(column, shown=len({row[column.key] for row in rows}) > 1)

    table = Table.of(
        "noise_floor",
        "How far one more run may lie from a single run, 95 times in 100. A floor that is lent by "
        "other groups of cells is never below what a cell's own runs show; of these the widest.",
        (
            *differing("text", strategy="strategy", model="model"),
            *differing("count", batch_size="batch"),
            *differing("text", precision="precision", optimize="optimize"),
            *differing("count", world_size="GPUs"),
            *columns_of(metric="metric"),
            *columns_of("part", half_share="±"),
            *columns_of("number", half="± in its unit"),
            *columns_of(unit="unit"),
            *columns_of("count", runs="runs", freedom="freedom"),
            *columns_of(lent_by="lent by", source="measured on"),
        ),
        rows,
    )
    return Section("noise", "The noise floor", (single_line(line, 600),), tables=(table,))


def repeated_cells(study: Study, metric: str) -> dict[FloorGroup, list[str]]:
    """Return the cells that show how runs of a group scatter: `none on gpus 0 (3)`, with runs."""
    cells: dict[FloorGroup, list[str]] = defaultdict(list)
    drift = Counter(id(runs) for record, runs in study.drift if metric in record.metrics)
    for runs in study.runs:
        repeats = len(runs.values(metric)) + drift[id(runs)]
        if repeats > 1 and not runs.suspect:
            cells[runs.group].append(f"{label(study, runs)} on {gpu_list(runs.gpus)} ({repeats})")
    return cells


def floor_row(runs: Runs, metric: str, floor: Floor) -> dict[str, Any]:
    """Return what the table of noise floors says of one floor."""
    group, entry, width = runs.group, entry_of(metric), half_width(floor, 1)
    return {
        "width": width,
        "strategy": group.strategy,
        "model": named(runs.records[0], "model" if runs.cell.trains else "benchmark"),
        "batch_size": group.batch_size or None,
        "precision": group.precision,
        "optimize": group.optimize,
        "world_size": group.world_size,
        "metric": single_line(entry.title),
        "half_share": None if entry.signed else math.expm1(width),
        "half": width if entry.signed else None,
        "unit": entry.unit if entry.signed else "",
        "runs": floor.runs,
        "freedom": floor.freedom,
        "lent_by": floor.lent_by,
    }


# ---- Cells of several studies --------------------------------------------------------------------


INSIDE = "the intervals hold what differs between runs inside each study"
NOT_IN_TURN = (
    "They were not measured in turn, so what changes on a machine between sweeps would look the "
    f"same; {INSIDE}."
)


def studies(
    differing: Mapping[str, Sequence[str]],
    sides: Sequence[StudyInput],
    compared: Mapping[str, Differences],
) -> Section:
    """Return what differs between studies, and their cells against those of the first, by name."""
    tables = [facts_table(differing, [side.name for side in sides])]
    lines = []
    first = sides[0].name
    for index, (name, differences) in enumerate(compared.items(), 1):
        caption = f"The same cells, {name} against {first}"
        tables.append(differences_table(differences, f"cells-{index}", caption))
        if not differences.cells:
            lines.append(f"{name} and {first} have no cell in common.")
            continue
        cells, words = count(len(differences.cells), "cell"), verdict_words(differences.cells)
        lines.append(single_line(f"{name} against {first}, {cells}: {words}. {NOT_IN_TURN}", 700))
    for side in sides:
        if side.study.unreadable:
            files = count(len(side.study.unreadable), "file")
            lines.append(f"{side.name}: {files} could not be read: {side.study.unreadable[0]}.")
    title = "The studies beside each other"
    return Section("studies", title, tuple(first_lines(lines)), tables=tuple(tables))


def facts_table(differing: Mapping[str, Sequence[str]], names: Sequence[str]) -> Table:
    """Return a row for each fact that differs, with its value in each study."""
    columns = [Column("fact", "")]
    for index, name in enumerate(names, 1):
        columns.append(Column(f"study_{index}", name))
    rows = tuple((fact, *values) for fact, values in differing.items())
    return Table("differs", "What differs", tuple(columns), rows)


def differences_table(differences: Differences, name: str, caption: str) -> Table:
    """Return both rates of every cell that two studies have, their difference and the verdict."""
    cells, unit = differences.cells, ""
    units = {unit_of(cell.metric) for cell in cells if cell.metric}
    if len(units) == 1:
        unit = units.pop()
    names = short_names(cell.name for cell in cells)

    def value(cell: CellDifference, numbers: Mapping[str, MeasuredNumber]) -> str:
        own_unit = "" if unit else unit_of(cell.metric)
        return f"{plain_number(cell.metric, numbers.get(cell.metric))} {own_unit}".strip()

    def runs(cell: CellDifference) -> str:
        numbers_of_runs = []
        for side in (cell.first, cell.second):
            if cell.metric in side:
                numbers_of_runs.append(str(side[cell.metric].runs))
        return ", ".join(numbers_of_runs)

    return Table.of(
        name,
        f"{caption}, with 95 % intervals",
        (
            Column("cell", "configuration", lambda cell: names[cell.name]),
            Column("runs", "runs", runs, "count"),
            Column("a", f"A {unit}".strip(), lambda cell: value(cell, cell.first), "number"),
            Column("b", f"B {unit}".strip(), lambda cell: value(cell, cell.second), "number"),
            Column("difference", "difference", "change", "change", True),
            Column("smallest", "detects", "smallest", "share"),
            Column("verdict", "verdict on B", "verdict"),
        ),
        cells,
    )


def plain_number(metric: str, measured: MeasuredNumber | None) -> str:
    """Return a number as its metric is written."""
    if measured is None:
        return ABSENT
    return number(measured.plain, of_metric(metric))


def unit_of(metric: str) -> str:
    """Return the unit of a metric for people."""
    unit = entry_of(metric).unit
    return "share" if unit == "%" else unit


def verdict_words(cells: Sequence[CellDifference]) -> str:
    """Return `slower in 4, no difference seen in 2`."""
    verdicts = Counter(cell.verdict for cell in cells)
    words = []
    for verdict in (SLOWER, FASTER, NO_DIFFERENCE, UNKNOWN):
        if verdicts[verdict]:
            words.append(f"{verdict} in {verdicts[verdict]:,}")
    return ", ".join(words)
