"""Equal cells of a study gathered as runs, what was asked of each, and on which machine and software it ran.

Runs of one cell differ in their repeat, seed, labels and profiler alone. Everything that a finding compares goes through
here, so that each of them refuses the same: unusable records, other machines, other software.
"""

import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from analysis.findings.baselines import RATE, flat
from analysis.findings.estimates import Sample, sample
from analysis.findings.provenance import SURROUNDINGS, Machines, surroundings
from analysis.findings.rates import Headline, headline
from benchmarks.record import Record
from conf.cell import Cell

# What says nothing of a cell without a model.
OF_TRAINING = ("model.name", "strategy.name", "batch_size", "precision", "optimize", "channels_last")


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of one cell. `asked` is what was asked of it but the GPUs, by dotted name, as text."""

    records: tuple[Record, ...]
    gpus: tuple[int, ...]
    asked: Mapping[str, str]
    around: Mapping[str, str]  # SURROUNDINGS

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.gpus)

    @property
    def cell(self) -> Cell:
        """Return what was asked of the first run."""
        return self.records[0].cell

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return str(self.cell.strategy["name"])

    @property
    def trains(self) -> bool:
        """Whether it has a model and a strategy; else it measures links alone."""
        return self.cell.trains

    @property
    def batch_size(self) -> int:
        """Return the images per rank and step."""
        return self.cell.batch_size

    @property
    def strong(self) -> bool:
        """Whether the images per step were asked for (strong scaling), not those per rank."""
        return "global_batch_size" in self.asked

    @property
    def suspect(self) -> bool:
        """Whether a check cast doubt on one of the runs."""
        return any(record.validity.verdict == "suspect" for record in self.records)

    def values(self, metric: str) -> list[float]:
        """A metric of every run that has it."""
        found = (record.metrics.get(metric) for record in self.records)
        return [value for value in found if value is not None and math.isfinite(value)]

    def logarithms(self, metric: str) -> list[float]:
        """Of a metric that is positive."""
        return [math.log(value) for value in self.values(metric) if value > 0]

    @functools.cached_property
    def rate(self) -> Sample | None:
        """Logarithm of images per second; None where the benchmark counts no images."""
        rates = self.logarithms(RATE)
        if not rates:
            return None
        low, high = self._ends(RATE, "throughput/ci_")
        known = low > 0 and high > 0
        low, high = (math.log(low), math.log(high)) if known else (math.nan, math.nan)
        return sample(rates, low, high, self.records[0].record_id)

    @functools.cached_property
    def headline(self) -> Headline:
        """What its benchmark is compared in."""
        return headline(self.cell)

    @functools.cached_property
    def rates(self) -> list[float]:
        """Logarithm of the headline's rate in every run that has it."""
        found = self.logarithms(self.headline.metric)
        return [-value for value in found] if self.headline.is_time else found

    def metric(self, name: str) -> Sample | None:
        """A metric itself, with its own interval (`NAME_ci_low`) where there is one run."""
        values = self.values(name)
        if not values:
            return None
        return sample(values, *self._ends(name, f"{name}_ci_"), f"{name} {self.records[0].record_id}")

    def _ends(self, metric: str, prefix: str) -> tuple[float, float]:
        """The interval of a metric within the first run that has it; NaN where it has none."""
        of = next(record for record in self.records if metric in record.metrics)
        low, high = (of.metrics.get(f"{prefix}{end}", math.nan) for end in ("low", "high"))
        return low, high


@dataclass(frozen=True)
class Gathered:
    """A study's usable runs in order of their start, the drift runs, and what takes no part with the reason."""

    runs: tuple[Runs, ...]
    drift: tuple[tuple[Record, Runs], ...]  # the first cell once more at the end, and the runs that it belongs to
    excluded: tuple[tuple[Record, str], ...]
    varied: tuple[str, ...]  # names of what was asked differently within the study

    @functools.cached_property
    def timed(self) -> tuple[Runs, ...]:
        """Those with images per second."""
        return tuple(runs for runs in self.runs if runs.rate is not None)

    @functools.cached_property
    def rated(self) -> tuple[Runs, ...]:
        """Those with a rate to compare, of whatever benchmark."""
        return tuple(runs for runs in self.runs if runs.rates)

    def label(self, runs: Runs, without: Sequence[str] = ()) -> str:
        """What tells runs from the others of the study, for people; where nothing does, model and strategy or the benchmark."""
        told = [
            shown(name, runs.asked[name])
            for name in self.telling
            if name in runs.asked
            and name not in without
            and not (name in self._options and plain(runs, name))
            and (runs.trains or name not in OF_TRAINING)
        ]
        told += [f"{name} {runs.around[name] or 'not known'}" for name in self.around]
        if not told and not runs.trains:
            return str(runs.cell.benchmark["name"])
        return " · ".join(told) or f"{runs.cell.model.name} · {runs.strategy}"

    @functools.cached_property
    def telling(self) -> tuple[str, ...]:
        """The varied names without those that follow from the model, or from there being one, or from the benchmark."""
        names = [*self.varied]
        for group in ("model", "benchmark"):
            named: dict[str | None, Runs] = {}
            following = {name for name in self.varied if name.startswith(f"{group}.") and name != f"{group}.name"}
            following |= {"batch_size"} & set(self.varied) if group == "model" else set()
            for runs in self.runs:
                like = named.setdefault(runs.asked.get(f"{group}.name"), runs)
                following -= {name for name in following if runs.asked.get(name) != like.asked.get(name)}
            names = [name for name in names if name not in following]
        trained = [runs for runs in self.runs if runs.trains]
        alike = {name for name in OF_TRAINING if len({runs.asked.get(name) for runs in trained}) == 1}
        names = [name for name in names if name not in alike]
        return tuple(sorted(names, key=lambda name: not name.startswith(("model.name", "strategy.name"))))

    @functools.cached_property
    def _options(self) -> frozenset[str]:
        """Options of strategies, where strategies differ."""
        return frozenset(
            name for name in self.varied if name.startswith("strategy.") and "strategy.name" in self.varied
        )

    @functools.cached_property
    def around(self) -> tuple[str, ...]:
        """Which of the surroundings differ within the study."""
        return tuple(name for name in SURROUNDINGS if len({runs.around.get(name) for runs in self.runs}) > 1)

    def condition(self, runs: Runs, without: Iterable[str] = ()) -> tuple[str | None, ...]:
        """A key that is equal for runs that may be compared: all that varies but the GPUs and the names left out."""
        left_out = set(without)
        asked = (runs.asked.get(name) for name in self.varied if name not in left_out)
        around = (runs.around.get(name) for name in self.around if name not in left_out)
        return (*asked, *around)


def gather(records: Iterable[Record]) -> Gathered:
    """Sort records into runs of equal cells. Of several attempts at one cell the last finished one counts."""
    machines = Machines()
    excluded: list[tuple[Record, str]] = []
    last: dict[tuple[Any, ...], tuple[Record, dict[str, str]]] = {}
    for record in sorted(records, key=lambda record: (record.started_at, record.record_id)):
        around = surroundings(record, machines)
        if not record.usable:
            excluded.append((record, _why(record)))
            continue
        attempt = (record.cell_key, record.drift, *around.values())
        if attempt in last:
            excluded.append((last.pop(attempt)[0], "superseded by a later attempt at the same cell"))
        last[attempt] = record, around
    alike: dict[tuple[Any, ...], list[Runs]] = {}
    for record, around in last.values():
        one = Runs((record,), record.cell.gpus, flat(record.cell), around)
        alike.setdefault((one.gpus, tuple(sorted(one.asked.items())), *around.values()), []).append(one)
    runs, drift = [], []
    for members in alike.values():
        repeats = [one for one in members if not one.records[0].drift]
        made = merged(repeats or members)
        runs.append(made)
        drift += [(one.records[0], made) for one in members if repeats and one.records[0].drift]
    names = dict.fromkeys(name for one in runs for name in one.asked)
    varied = tuple(name for name in names if len({one.asked.get(name) for one in runs}) > 1)
    return Gathered(tuple(runs), tuple(drift), tuple(excluded), varied)


def merged(runs: Sequence[Runs]) -> Runs:
    """Runs of cells whose differences do not matter, as runs of one."""
    records = tuple(record for one in runs for record in one.records)
    return replace(runs[0], records=records) if len(runs) > 1 else runs[0]


def between_runs(members: Iterable[Runs], metric: str) -> tuple[float, int]:
    """Standard deviation of a metric's logarithm between runs of equal cells, over several cells, and its degrees of freedom.

    (NaN, 0) where no cell ran twice.
    """
    groups = [values for runs in members if len(values := runs.logarithms(metric)) > 1]
    freedom = sum(len(values) - 1 for values in groups)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in groups)
    return (math.sqrt(squares / freedom) if freedom else math.nan), freedom


def _why(record: Record) -> str:
    """Why a record is not usable."""
    if record.state != "finished":
        return f"{record.state}: {record.failure.message}" if record.failure else record.state
    return "invalid: " + ("; ".join(record.validity.codes.values()) or "no reason was recorded")


def chosen(runs: Runs) -> frozenset[str]:
    """The strategy's options that were asked beside their defaults, as labels name them: 'comm_hook=bf16'."""
    options = runs.cell.strategy
    return frozenset(label for label in runs.cell.labels if label.partition("=")[0] in options and "=" in label)


def plain(runs: Runs, name: str) -> bool:
    """Whether `strategy.OPTION` has its default: then no label names it."""
    option = name.removeprefix("strategy.")
    return option != "name" and not any(label.startswith(f"{option}=") for label in chosen(runs))


def shown(name: str, value: str) -> str:
    """One asked thing for people: `compile`, `batch 256`, `P2P_LEVEL=LOC`, `comm_hook=bf16`."""
    words = {"batch_size": "batch", "global_batch_size": "global batch", "server_gpus": "servers on GPUs"}
    if name in words:
        return f"{words[name]} {value.strip('[]')}"
    if name in ("model.name", "strategy.name", "precision", "optimize", "benchmark.name", "device"):
        return value
    return f"{name.rpartition('.')[2].removeprefix('NCCL_')}={value}"


def gpu_ids(gpus: Sequence[int]) -> str:
    """`0,3`, in rank order."""
    return ",".join(map(str, gpus))


def gpu_list(gpus: Sequence[int]) -> str:
    """`gpus 0,3`."""
    return f"gpus {gpu_ids(gpus)}"


def several(names: Sequence[str]) -> str:
    """The first of several, and how many more there are."""
    rest = len(names) - 1
    return names[0] + (f" and {rest} more {'cell' if rest == 1 else 'cells'}" if rest else "")
