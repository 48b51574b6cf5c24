"""Runs of one cell: what was asked of it, where it ran, and the metrics of its records.

The launching process imports this module, so numpy and scipy are imported where a sample with an interval is made.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from analysis.findings.model import Estimate, Member
from analysis.findings.next_run.floors import CLOCK, Floor, FloorGroup, NoiseFloors, group_of
from analysis.findings.next_run.interval import interval
from analysis.findings.rates import IMAGES_PER_SECOND, Rate, primary_rate
from benchmarks.record import Record
from benchmarks.record.metrics import metric as entry_of
from conf.cell import Cell
from conf.options import canonical

if TYPE_CHECKING:
    from analysis.findings.estimates import Sample

# Two runs of one cell may differ in these. A profiler has a pass of its own; the timed pass is the same with it.
INCIDENTAL = ("repeat", "seed", "labels", "profiler", "profiler_options")
_FIELDS = tuple(one.name for one in dataclasses.fields(Cell) if one.name not in (*INCIDENTAL, "hosts", "gpus"))


def request_of(cell: Cell) -> dict[str, str]:
    """Flatten a cell's request to {"strategy.comm_hook": "bf16"}, without its hosts, its GPUs and INCIDENTAL fields.

    CPU workers do not use NCCL, so its settings are no part of what was asked of them.
    How long throughput is measured does not change what it is, so only the name of that benchmark is kept. Of what the
    YAML files declare, only the hash of the user's own code is kept: another hash makes another cell.
    """
    request: dict[str, str] = {}
    for name in _FIELDS:
        value = getattr(cell, name)
        if value is None or value == () or (name == "nccl" and cell.device == "cpu"):
            continue
        if name == "declared":
            hashes = {group: rules["sha256"] for group, rules in value.items() if "sha256" in rules}
            request |= {f"{group}.sha256": canonical(one) for group, one in hashes.items()}
        elif name == "benchmark" and value["name"] == "throughput":
            request["benchmark.name"] = "throughput"
        elif name == "data":  # one thing: its loader and what the loader is given
            request |= {"data": canonical(value)} if value else {}
        elif isinstance(value, dict) or dataclasses.is_dataclass(value):
            inside = value if isinstance(value, dict) else vars(value)
            request |= {f"{name}.{inner}": canonical(one) for inner, one in inside.items() if one is not None}
        else:
            request[name] = canonical(value)
    return request


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one cell."""

    records: tuple[Record, ...]
    gpus: tuple[Member, ...]  # conf.cell.Cell.members
    request: Mapping[str, str]  # of request_of
    provenance: Mapping[str, str]  # of analysis.findings.provenance
    floors: NoiseFloors  # of their study

    @functools.cached_property
    def key(self) -> Mapping[str, str]:
        """What was asked, and where it ran, without the GPUs: equal for equal cells of one machine and software."""
        return {**self.request, **self.provenance}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.gpus)

    @property
    def cell(self) -> Cell:
        """The cell of the first run."""
        return self.records[0].cell

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return str(self.cell.strategy["name"])

    @property
    def trains(self) -> bool:
        """Whether the cell has a model and a strategy; otherwise it measures links."""
        return self.cell.trains

    @property
    def batch_size(self) -> int:
        """The images per rank and step."""
        return self.cell.batch_size

    @property
    def strong(self) -> bool:
        """Whether the images per step were asked for (strong scaling), and not those per rank."""
        return "global_batch_size" in self.request

    @property
    def suspect(self) -> bool:
        """Whether a check cast doubt on one of the runs."""
        return any(record.validity.verdict == "suspect" for record in self.records)

    def values(self, metric: str) -> list[float]:
        """Return a metric of every run that has it."""
        found = (record.metrics.get(metric) for record in self.records)
        return [value for value in found if value is not None and math.isfinite(value)]

    def logarithms(self, metric: str) -> list[float]:
        """Return the logarithm of a metric of every run in which it is positive."""
        return [math.log(value) for value in self.values(metric) if value > 0]

    @functools.cached_property
    def median_log_rate(self) -> float | None:
        """The median over the runs of the logarithm of images per second; None where the benchmark counts no images."""
        rates = self.logarithms(IMAGES_PER_SECOND)
        return statistics.median(rates) if rates else None

    @functools.cached_property
    def log_rate(self) -> "Sample | None":
        """The same median as a sample, with the noise floor."""
        from analysis.findings.estimates import Sample

        if self.median_log_rate is None:
            return None
        runs = len(self.logarithms(IMAGES_PER_SECOND))
        return Sample(self.median_log_rate, self.floor(IMAGES_PER_SECOND), runs, self.records[0].record_id)

    @functools.cached_property
    def clock_mhz(self) -> float | None:
        """The median over the runs of the GPUs' SM clock; None where it was not sampled."""
        return middle(self.records, CLOCK)

    @functools.cached_property
    def rate(self) -> Rate:
        """The primary rate of the benchmark."""
        return primary_rate(self.cell)

    @functools.cached_property
    def log_rates(self) -> list[float]:
        """The logarithm of the primary rate in each of `rated_records`."""
        found = self.logarithms(self.rate.metric)
        return [-value for value in found] if self.rate.is_time else found

    @functools.cached_property
    def rated_records(self) -> tuple[Record, ...]:
        """The records that have the primary rate."""
        rates = ((record, record.metrics.get(self.rate.metric)) for record in self.records)
        return tuple(record for record, rate in rates if rate is not None and 0 < rate < math.inf)

    @functools.cached_property
    def group(self) -> FloorGroup:
        """The cells with which these runs share a noise floor."""
        return group_of(self.records[0])

    def floor(self, metric: str) -> Floor | None:
        """Return the noise floor of a metric; None where too few runs of equal cells are known."""
        return self.floors.of(self.group, metric)

    def next_run(self, metric: str) -> Estimate | None:
        """Return the median of a metric with the interval of the next run, where it is known; None without the metric."""
        values = self.values(metric)
        return interval(values, metric, self.floor(metric)) if values else None

    def difference(self, metric: str) -> "Sample | None":
        """Return the median of a metric that may be 0 or less as a sample, with the noise floor."""
        from analysis.findings.estimates import Sample

        assert entry_of(metric).signed, metric
        values = self.values(metric)
        if not values:
            return None
        name = f"{metric} {self.records[0].record_id}"
        return Sample(statistics.median(values), self.floor(metric), len(values), name)


def merged(runs: Sequence[Runs]) -> Runs:
    """Return runs of cells whose differences do not matter as runs of one cell, the first."""
    records = tuple(record for one in runs for record in one.records)
    return replace(runs[0], records=records) if len(runs) > 1 else runs[0]


def between_runs(members: Iterable[Runs], metric: str) -> tuple[float, int]:
    """Return the standard deviation of a metric's logarithm between runs of equal cells, and its degrees of freedom.

    It is pooled over the cells. Returns (NaN, 0) where no cell ran twice.
    """
    return pooled(runs.logarithms(metric) for runs in members)


def pooled(samples: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation inside samples, over all of them, and its degrees of freedom; (NaN, 0) without two values."""
    groups = [values for values in samples if len(values) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def named(record: Record, group: str) -> str:
    """Return the name of a cell's model, strategy or benchmark."""
    return record.cell.model.name if group == "model" else str(getattr(record.cell, group)["name"])


def middle(records: Iterable[Record], metric: str) -> float | None:
    """Return the median of a metric over the records in which it is finite; None where there is none."""
    found = (record.metrics.get(metric) for record in records)
    values = [value for value in found if value is not None and math.isfinite(value)]
    return statistics.median(values) if values else None
