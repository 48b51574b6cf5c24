"""Runs of one cell: what was asked of it, where it ran, and the metrics of its records."""

import functools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from analysis.study.conditions import IMAGES_PER_SECOND, Rate, primary_rate
from analysis.study.intervals import Estimate, interval, median
from analysis.study.noise_floor import COST, Floor, FloorGroup, NoiseFloors, group_of, is_suspect
from benchmarks.record import Record
from conf.cell import Cell, Member

if TYPE_CHECKING:
    from analysis.study.draws import Sample, Step

# What was asked of a cell and where it ran, {option: value}: by it a finding names its cell.
Key: TypeAlias = Mapping[str, str]
KeyT = TypeVar("KeyT", bound=Hashable)
MemberT = TypeVar("MemberT", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one cell."""

    records: tuple[Record, ...]
    gpus: tuple[Member, ...]  # conf.cell.Cell.members
    request: Mapping[str, str]  # of analysis.study.conditions.request_of
    provenance: Mapping[str, str]  # of analysis.study.provenance
    floors: NoiseFloors  # of their study

    @functools.cached_property
    def key(self) -> Key:
        """The request and the provenance: equal for equal cells of one machine on any GPUs."""
        return {**self.request, **self.provenance}

    @property
    def cell(self) -> Cell:
        """The cell of the first run."""
        return self.records[0].cell

    @property
    def strategy(self) -> str:
        """The name of the strategy."""
        return str(self.cell.strategy["name"])

    @property
    def machine(self) -> str:
        """The name of the machine."""
        return self.provenance["machine"]

    @property
    def record_ids(self) -> tuple[str, ...]:
        """The ids of the records."""
        return tuple(record.record_id for record in self.records)

    @property
    def strong(self) -> bool:
        """Whether the images per step were asked for (strong scaling), and not those per rank."""
        return "global_batch_size" in self.request

    @property
    def suspect(self) -> bool:
        """Whether a check cast doubt on one of the runs."""
        return any(map(is_suspect, self.records))

    @property
    def all_suspect(self) -> bool:
        """Whether a check cast doubt on every run."""
        return all(map(is_suspect, self.records))

    @property
    def doubts(self) -> tuple[str, ...]:
        """The codes of checks that make one of the runs suspect."""
        codes: dict[str, None] = {}
        for record in filter(is_suspect, self.records):
            codes |= dict.fromkeys(record.validity.against)
        return tuple(codes)

    @functools.cached_property
    def rate(self) -> Rate:
        """The primary rate of the benchmark."""
        return primary_rate(self.cell)

    @functools.cached_property
    def rated_records(self) -> list[Record]:
        """The records that have the primary rate."""
        rated = []
        for record in self.records:
            if 0 < record.metrics.get(self.rate.metric, 0.0) < math.inf:
                rated.append(record)
        return rated

    @functools.cached_property
    def log_rates(self) -> list[float]:
        """The logarithm of the primary rate in each of `rated_records`."""
        logarithms = self.logarithms(self.rate.metric)
        if self.rate.is_time:
            return [-value for value in logarithms]
        return logarithms

    @functools.cached_property
    def median_log_rate(self) -> float:
        """The median of the logarithm of images per second; NaN without images."""
        return statistics.median(self.logarithms(IMAGES_PER_SECOND) or [math.nan])

    @functools.cached_property
    def log_rate(self) -> "Sample":
        """The same median as a sample, with the noise floor; of runs that have images alone."""
        rates = self.logarithms(IMAGES_PER_SECOND)
        sample = self.sample(IMAGES_PER_SECOND, rates, self.records[0].record_id)
        assert sample is not None
        return sample

    @functools.cached_property
    def group(self) -> FloorGroup:
        """The cells with which these runs share a noise floor."""
        return group_of(self.records[0])

    def values(self, metric: str) -> list[float]:
        """Return a metric of every run in which it is finite."""
        return values_of(self.records, metric)

    def logarithms(self, metric: str) -> list[float]:
        """Return the logarithm of a metric of every run in which it is positive."""
        return [math.log(value) for value in self.values(metric) if value > 0]

    def median(self, metric: str) -> float | None:
        """Return the median of a metric over the runs; None where no run has it."""
        return median_of(self.records, metric)

    def floor(self, metric: str) -> Floor | None:
        """Return the noise floor of a metric; None where too few runs of equal cells are known."""
        return self.floors.of(self.records[0], self.group, metric)

    def next_run(self, metric: str) -> Estimate | None:
        """Return the median of a metric with the interval of the next run; None without it.

        A cost without a floor has the interval inside its runs; one that may be 0 says nothing of a
        suspect cell.
        """
        values = self.values(metric)
        if not values:
            return None
        estimate = interval(values, metric, self.floor(metric))
        if metric != COST:
            return estimate
        if estimate.low is None or estimate.high is None:
            below, above = [], []
            for record in self.records:
                ends = record.ends_within_run(metric)
                if ends is not None:
                    below.append(record.metrics[metric] - ends[0])
                    above.append(ends[1] - record.metrics[metric])
            estimate = Estimate(estimate.value)
            if below:
                low, high = estimate.value - max(below), estimate.value + max(above)
                estimate = Estimate(estimate.value, low, high)
        may_be_0 = True
        if estimate.low is not None and estimate.high is not None:
            may_be_0 = estimate.low <= 0 <= estimate.high
        return None if may_be_0 and self.suspect else estimate

    def difference(self, metric: str) -> "Sample | None":
        """Return the median of a metric that may be 0 or less, as a sample with the noise floor."""
        return self.sample(metric, self.values(metric), f"{metric} {self.records[0].record_id}")

    def step(self, metric: str) -> "Step | None":
        """Return the median of a metric that is a part of a step; None where no run has it."""
        from analysis.study.draws import Step

        sample = self.difference(metric)
        if sample is None:
            return None
        return Step(sample.value, sample.draws)

    def sample(self, metric: str, values: Sequence[float], name: str) -> "Sample | None":
        """Return the median of values of a metric, or of their logarithms; None without any."""
        from analysis.study.draws import Sample  # it needs numpy

        if not values:
            return None
        return Sample(statistics.median(values), self.floor(metric), len(values), name)


def merged(runs: Sequence[Runs]) -> Runs:
    """Return runs of cells whose differences do not matter as runs of the first cell."""
    if len(runs) == 1:
        return runs[0]
    records: list[Record] = []
    for each in runs:
        records += each.records
    return replace(runs[0], records=tuple(records))


def grouped(runs: Iterable[Runs], key: Callable[[Runs], KeyT]) -> dict[KeyT, list[Runs]]:
    """Return {key: runs with this key}, in order of their first runs."""
    groups: dict[KeyT, list[Runs]] = defaultdict(list)
    for each in runs:
        groups[key(each)].append(each)
    return dict(groups)


class RunsByMember(Generic[MemberT]):
    """The runs of some members, each alone, by the condition that other runs share with them."""

    def __init__(
        self,
        alone: Iterable[Runs],
        condition: Callable[[Runs], Hashable],
        member: Callable[[Runs], MemberT],
    ) -> None:
        self._condition = condition
        self.groups: dict[Hashable, dict[MemberT, Runs]] = {}
        for key, group in grouped(alone, condition).items():
            by_member = grouped(group, member).items()
            self.groups[key] = {each: merged(same) for each, same in by_member}

    def like(self, runs: Runs) -> dict[MemberT, Runs]:
        """Return {member: its runs alone} of all members whose condition some runs share."""
        return self.groups.get(self._condition(runs), {})

    def of(self, runs: Runs, members: Sequence[Any]) -> dict[Any, Runs]:
        """Return the same of some members as far as these were measured alone, in their order."""
        alone = self.like(runs)
        return {member: alone[member] for member in members if member in alone}


def named(record: Record, group: str) -> str:
    """Return the name of a cell's model, strategy or benchmark."""
    if group == "model":
        return record.cell.model.name
    return str(getattr(record.cell, group)["name"])


def median_of(records: Iterable[Record], metric: str) -> float | None:
    """Return the median of a metric over the records in which it is finite; None without one."""
    values = values_of(records, metric)
    return median(values, metric) if values else None


def values_of(records: Iterable[Record], metric: str) -> list[float]:
    """Return a metric of every record in which it is finite."""
    values = []
    for record in records:
        value = record.metrics.get(metric, math.nan)
        if math.isfinite(value):
            values.append(value)
    return values
