"""What the parent run of a sweep says of its cells together: figures, parameters, tags, and a table in Markdown."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import EXPOSED
from analysis.report import cell_numbers
from analysis.report.cell_numbers import COLUMNS, MARGIN, ONE_RUN, RESULT, TRANSPORT, first_metric
from analysis.report.numbers import ABSENT, THIN
from analysis.study.names import UNTOUCHED, shared_name, short_names, unit_of_cells
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.text import single_line
from benchmarks.record import Record
from benchmarks.record.metrics import metric, place
from benchmarks.record.record import STATES, VERDICTS
from conf.cell import counted
from launch.tracking.mlflow_run import (
    PARAM_LENGTH,
    escape_markdown,
    machine_tags,
    project,
    run_name,
)

Values = Mapping[str, Mapping[str, float]]  # {record_id: {metric: value}} that need several records
# What a run without a parameter says beside runs that have it; `n/a` for other parameters.
DEFAULTS = {
    "global_batch_size": UNTOUCHED,
    "profiler": "none",
    "nodes": "1",
    "hosts": "this machine",
}
BEST_FIGURES = (IMAGES_PER_SECOND, EFFICIENCY, EXPOSED, "comm/exchange_ms")
LINK_CLASS, VALIDITY = "link class", "validity"
TEXT_COLUMNS = (RESULT, TRANSPORT, LINK_CLASS, VALIDITY)
TABLE_CELL_LENGTH = 200  # characters


def default_params(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return {record_id: {parameter: value}}: parameters that a run lacks and others of its benchmark have.

    MLflow's pages show `unknown` for a parameter that is absent. The size of a model that was
    never built is unknown, and stays absent.
    """
    own_params = {record.record_id: project(record).params for record in records}
    names: dict[str, set[str]] = defaultdict(set)
    for params in own_params.values():
        names[params["benchmark"]].update(name for name in params if not name.startswith("model."))
    return {
        record_id: {
            name: _default(name) for name in sorted(names[params["benchmark"]] - set(params))
        }
        for record_id, params in own_params.items()
    }


def _default(name: str) -> str:
    return UNTOUCHED if name.startswith("nccl.") else DEFAULTS.get(name, "n/a")


def best_record(records: Iterable[Record]) -> Record | None:
    """Return the usable record with the best rate: images/s, else what its benchmark is compared in.

    Cells without an exchange do not train together; they count only where there is no other.
    """
    usable = [record for record in records if record.usable]
    rated = [record for record in usable if IMAGES_PER_SECOND in record.metrics]
    if rated:
        together = [record for record in rated if record.cell.strategy["name"] != "none"]
        return max(together or rated, key=lambda record: record.metrics[IMAGES_PER_SECOND])
    names = [name for record in usable if (name := first_metric(record))]
    if not names:
        return None
    name = min(names, key=place)
    rated = [record for record in usable if name in record.metrics]
    pick = min if metric(name).less_is_better else max
    return pick(rated, key=lambda record: record.metrics[name])


def parent_metrics(records: Sequence[Record], values: Values) -> dict[str, float]:
    """Return how many cells have which verdict, and the figures of the best cell and its baseline."""
    metrics: dict[str, float] = {}
    verdicts = [record.validity.verdict for record in records if record.state == "finished"]
    for verdict in VERDICTS:
        metrics[f"cells/{verdict}"] = float(verdicts.count(verdict))
    for state in STATES:
        if state != "finished":
            metrics[f"cells/{state}"] = float(sum(record.state == state for record in records))
    best = best_record(records)
    if best is None:
        return metrics
    figures = best.metrics | dict(values.get(best.record_id, {}))
    names = [name for name in BEST_FIGURES if name in figures]
    if not names:
        names = [name for name in (first_metric(best),) if name]
    for name in names:
        metrics[f"best/{name.partition('/')[2]}"] = float(figures[name])
    if EFFICIENCY in figures:  # efficiency = rate ÷ (N × rate of the slowest member alone)
        ideal_rate = figures[IMAGES_PER_SECOND] / figures[EFFICIENCY]
        metrics["baseline/images_per_second"] = ideal_rate / best.cell.world_size
    return metrics


def parent_params(records: Sequence[Record]) -> dict[str, str]:
    """Return the parameters of the cells, `25 | 50` where they differ."""
    defaults = default_params(records)
    joined = _join(project(record).params | defaults[record.record_id] for record in records)
    return {name: single_line(value, PARAM_LENGTH) for name, value in joined.items()}


def parent_tags(records: Sequence[Record]) -> dict[str, str]:
    """Return the machines and the software of the cells, and which cell was the best."""
    tags = _join(machine_tags(record) for record in records)
    best = best_record(records)
    if best is not None:
        tags["best.cell"] = run_name(best)
    return tags


def _join(mappings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return {name: values}, each value once."""
    values: dict[str, dict[str, None]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            values.setdefault(name, {})[value] = None
    return {name: " | ".join(several) for name, several in values.items()}


def summary_markdown(records: Sequence[Record], values: Values) -> str:
    """Return a table with a row for each record, in the order given; what a record lacks is '–', never 0.

    What all names share stands once above the table, and a column is there if a row fills it.
    """
    names = [run_name(record) for record in records]
    shared, short = shared_name(names), short_names(names)
    rows = [_row(record, values.get(record.record_id, {})) for record in records]
    numbers = [name for name in COLUMNS if name not in TEXT_COLUMNS]
    columns = [RESULT, *numbers, TRANSPORT, LINK_CLASS, VALIDITY]
    columns = [name for name in columns if any(name in row for row in rows)]
    things = counted(record.cell for record in records)
    unit = unit_of_cells(record.cell for record in records)
    lines = [
        ["cell", *(cell_numbers.heading(name, things, unit) for name in columns)],
        ["---", *("---" if name in TEXT_COLUMNS else "---:" for name in columns)],
    ]
    for name, row in zip(names, rows, strict=True):
        texts = [row.get(column, ABSENT) for column in columns]
        lines.append([escape_markdown(short[name], TABLE_CELL_LENGTH), *texts])
    text = ""
    if shared:
        text = f"Every cell: {escape_markdown(shared, TABLE_CELL_LENGTH)}\n\n"
    for line in lines:
        text += f"| {' | '.join(line)} |\n"
    margins = cell_numbers.about_margins(values.get(record.record_id, {}) for record in records)
    for sentence in filter(None, (margins, cell_numbers.about_reference(columns))):
        text += f"\n{sentence}\n"
    return text


def _row(record: Record, values: Mapping[str, float]) -> dict[str, str]:
    """Return {column: text} of a record's row."""
    row: dict[str, str] = {}
    if record.state == "finished":
        row = cell_numbers.cell_numbers(record, values)
    if MARGIN in row and row[MARGIN] != ONE_RUN:
        row[MARGIN] = f"±{THIN}{row[MARGIN]}"
    link_class = record.effective.get("link_class")
    if link_class:
        row[LINK_CLASS] = ",".join(link_class) if isinstance(link_class, list) else str(link_class)
    for name in (RESULT, TRANSPORT, LINK_CLASS):
        if name in row:
            row[name] = escape_markdown(row[name], TABLE_CELL_LENGTH)
    row[VALIDITY] = _validity(record)
    return row


def _validity(record: Record) -> str:
    """Return the verdict with its codes; of a cell that did not finish, its state and the cause."""
    if record.state == "finished":
        codes = escape_markdown(", ".join(record.validity.codes), TABLE_CELL_LENGTH)
        return f"**{record.validity.said}**: {codes}" if codes else record.validity.said
    if record.failure is None:
        return f"**{record.state}**"
    cause = escape_markdown(record.failure.cause, TABLE_CELL_LENGTH)
    if record.failure.rank is not None:
        cause += f" of rank {record.failure.rank}"
    message = escape_markdown(record.failure.message, TABLE_CELL_LENGTH)
    return f"**{record.state}**: {cause}, {message}"


def cut_note(markdown: str, length: int) -> str:
    """Return a note of at most `length` characters; where it is cut, its last line says so."""
    if len(markdown) <= length:
        return markdown
    last = "\n… the rest is in the artifact summary.md\n"
    whole, _, _ = markdown[: length - len(last)].rpartition("\n")
    return f"{whole}\n{last}"
