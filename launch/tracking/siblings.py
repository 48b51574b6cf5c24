"""What the runs of a study say beside each other: short names, a value for each setting that some left alone, and the parent's.

All of it follows from records, so that `python -m launch sync` writes what the sweep itself wrote.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from analysis.findings.baselines import EFFICIENCY
from analysis.findings.communication import EXPOSED
from analysis.report.cell_numbers import first_metric
from analysis.study.names import BETWEEN, UNTOUCHED, differing, worded
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.text import single_line
from benchmarks.record import Record
from benchmarks.record.metrics import metric, place
from benchmarks.record.record import STATES, VERDICTS
from launch.tracking.projection import (
    DAMAGED,
    NAME_LENGTH,
    PARAM_LENGTH,
    machine_tags,
    project,
    run_name,
)

LEFT_ALONE = (
    UNTOUCHED,
    "null",
)  # values of an option that a cell leaves alone and another one changes
FIRST = "first run"  # of a cell that is measured again
WITHOUT = {
    "profiler": "none",
    "nodes": "1",
    "hosts": "this machine",
}  # of a parameter that a run does not have
NOT_THERE = "n/a"  # of an option that its strategy or benchmark does not have
SEVERAL = " | "  # between the values that the cells of a sweep have
OF_BEST = (
    IMAGES_PER_SECOND,
    EFFICIENCY,
    EXPOSED,
    "comm/exchange_ms",
)  # what a parent says of its best cell
BEST_CELL = "best.cell"  # a tag of a parent: the name of that cell


def sound(records: Iterable[Record]) -> list[Record]:
    """Return the records that can be projected: one that is damaged has no run, and stands in no other's way."""
    found = []
    for record in records:
        with contextlib.suppress(*DAMAGED):
            project(record)
            found.append(record)
    return found


def names(records: Sequence[Record]) -> dict[str, str]:
    """Return {record_id: name} of a study: what differs within it; a single run keeps its whole name.

    A cell that left all alone is `default`. Where all are one cell, the repeats are told. How training is measured is told
    only if runs would have one name without it.
    """
    if len(records) == 1:
        return {record.record_id: run_name(record) for record in records}
    told = differing([record.cell for record in records])
    brief = [
        {
            name: value
            for name, value in one.items()
            if not (record.cell.trains and _of_benchmark(name))
        }
        for record, one in zip(records, told, strict=True)
    ]
    for options in (brief, told):
        found = {one.record_id: _name(one, own) for one, own in zip(records, options, strict=True)}
        if len(set(found.values())) == len(records):
            break
    return found


def _of_benchmark(name: str) -> bool:
    return name.startswith("benchmark.") and name != "benchmark.name"


def _name(record: Record, options: Mapping[str, str]) -> str:
    words = [worded(name, value) for name, value in options.items() if value not in LEFT_ALONE]
    words = words or ([UNTOUCHED] if options else [])
    return single_line(BETWEEN.join([*words, *record.run_suffixes]) or FIRST, NAME_LENGTH)


def left_alone(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Return {record_id: {parameter: value}} of a study: the parameters that a run lacks and others of its benchmark have.

    What nobody knows stays absent: the size of a model that was never built.
    """
    own = {record.record_id: project(record).params for record in records}
    every: dict[str, dict[str, None]] = defaultdict(dict)
    for params in own.values():
        every[params["benchmark"]] |= dict.fromkeys(
            name for name in params if not name.startswith("model.")
        )
    return {
        one: {name: _without(name) for name in every[params["benchmark"]] if name not in params}
        for one, params in own.items()
    }


def _without(name: str) -> str:
    """Return what a run says of a parameter that it does not have."""
    if name in WITHOUT:
        return WITHOUT[name]
    return UNTOUCHED if name.startswith("nccl.") or name == "global_batch_size" else NOT_THERE


def best(records: Iterable[Record]) -> Record | None:
    """Return the usable record with the best rate: images/s, else what its benchmark is compared in. None without any.

    Cells without an exchange do not train together, so they count only where there is no other.
    """
    usable = [record for record in records if record.usable]
    rated = [record for record in usable if IMAGES_PER_SECOND in record.metrics]
    if not rated:
        name = min(
            (name for record in usable if (name := first_metric(record))), key=place, default=""
        )
        sign = 1 if name and metric(name).less_is_better else -1
        rated = [record for record in usable if name in record.metrics]
        return min(rated, key=lambda one: sign * one.metrics[name], default=None)
    together = [record for record in rated if record.cell.strategy["name"] != "none"]
    return max(together or rated, key=lambda one: one.metrics[IMAGES_PER_SECOND])


def parent_metrics(
    records: Sequence[Record], values: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of a parent run: how many cells have which verdict, and the figures of the best cell and its baseline.

    `values` are those that need several records, by record id, as the study is now.
    """
    finished = [record for record in records if record.state == "finished"]
    found = {
        f"cells/{word}": sum(one.validity.verdict == word for one in finished) for word in VERDICTS
    }
    found |= {
        f"cells/{word}": sum(one.state == word for one in records)
        for word in STATES
        if word != "finished"
    }
    counts = {name: float(count) for name, count in found.items()}
    if (chosen := best(records)) is None:
        return counts
    known = chosen.metrics | dict(values.get(chosen.record_id, {}))
    shown = [name for name in OF_BEST if name in known] or [
        name for name in [first_metric(chosen)] if name
    ]
    figures = {f"best/{name.partition('/')[2]}": float(known[name]) for name in shown}
    if EFFICIENCY in known:  # efficiency = rate ÷ (N × rate of the slowest member alone)
        alone = known[IMAGES_PER_SECOND] / known[EFFICIENCY] / chosen.cell.world_size
        figures["baseline/images_per_second"] = alone
    return counts | figures


def parent_params(records: Sequence[Record]) -> dict[str, str]:
    """Return the parameters of a parent run: those of its cells, `25 | 50` where they differ."""
    more = left_alone(records)
    found = _together(project(record).params | more[record.record_id] for record in records)
    return {name: single_line(value, PARAM_LENGTH) for name, value in found.items()}


def parent_tags(records: Sequence[Record]) -> dict[str, str]:
    """Return the tags of a parent run: the machines and the software of its cells, and which one was the best."""
    tags, chosen = _together(map(machine_tags, records)), best(records)
    return tags if chosen is None else tags | {BEST_CELL: run_name(chosen)}


def _together(of_runs: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return {name: values} of several runs, each value once."""
    values: dict[str, dict[str, None]] = {}
    for of_run in of_runs:
        for name, value in of_run.items():
            values.setdefault(name, {})[value] = None
    return {name: SEVERAL.join(several) for name, several in values.items()}
