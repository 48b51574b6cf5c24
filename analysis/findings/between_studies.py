"""The same cells in two studies: by how much they differ, and whether their runs show it.

METHOD.md, "Several studies". Where one study was measured after the other, a change of the machine
between them looks like one of the software.
"""

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analysis.findings.baselines import EFFICIENCY, Baselines, efficiency
from analysis.findings.communication import EXCHANGE
from analysis.findings.scaling import log_speedup
from analysis.study.conditions import chosen_options, differing_names, request_of
from analysis.study.draws import MEASURED
from analysis.study.intervals import LEVEL, Estimate, of_median
from analysis.study.measured_numbers import (
    FASTER,
    SLOWER,
    UNKNOWN,
    MeasuredNumber,
    is_known,
    judge,
    measured,
    significant,
)
from analysis.study.names import BETWEEN, format_option, gpu_list
from analysis.study.runs import Runs
from analysis.study.study import OF_TRAINING
from analysis.study.study_inputs import StudyInput, records_facts, same_machine
from analysis.text import join_words
from benchmarks.record.metrics import entry_of, position_of
from conf.cell import Cell, Member
from conf.options import to_text

# The GPUs in rank order, and what was asked in words that are the same for every version.
CellId = tuple[tuple[Member, ...], frozenset[tuple[str, str]]]
ALWAYS = ("model.name", "strategy.name", "benchmark.name")
PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"  # of a comparison with a limit
NO_SCATTER = "too few repeats in {} to know the run-to-run variation (use repeats=3)"
FEWEST_REPEATS = 3  # that alone give a cell a noise floor of its own
MOST_REPEATS = 100  # that anybody would measure
STUDIES = ("A", "B")
SEVERAL = (
    "has it on several machines or with several versions, of which the last is shown: measure each "
    "in a study of its own (study=NAME)"
)


@dataclass(frozen=True)
class CellDifference:
    """One cell in two studies; the second against the first."""

    name: str  # for people
    gpus: tuple[Member, ...]
    metric: str  # by which it is judged
    first: Mapping[str, MeasuredNumber]  # {metric: number}
    second: Mapping[str, MeasuredNumber]
    steps: Mapping[str, MeasuredNumber]  # differences of the numbers that both have
    verdict: str = UNKNOWN  # of the second
    smallest: float | None = None  # the smallest slowdown that these runs could have shown
    why: str = ""  # why there is no verdict, or what qualifies it
    against: Mapping[str, Sequence[str]] = field(default_factory=dict)  # {study: codes of checks}
    all_suspect: tuple[str, ...] = ()  # the studies in which every run of it is suspect
    tests: int = 1  # of its family

    def doubts(self, names: Sequence[str] = STUDIES) -> str:
        """Return what checks said of its runs in studies of these names: `suspect in A: noisy`."""
        parts = []
        for study, name in zip(STUDIES, names, strict=True):
            if study in self.against:
                some = "" if study in self.all_suspect else "some runs "
                parts.append(f"{some}suspect in {name}: {', '.join(self.against[study])}")
        return "; ".join(parts)

    @property
    def change(self) -> Estimate | None:
        """The change of the rate as a share: more is faster, also where the metric is a time."""
        step = self.steps.get(self.metric)
        if step is None:
            return None
        if entry_of(self.metric).less_is_better:
            step = replace(step, value=-step.value)
        return step.estimate()

    def is_regression(self, limit: float) -> bool:
        """Return whether the second is slower, by a verdict and by `limit` or more, a share."""
        return self.verdict == SLOWER and self.change is not None and -self.change.value >= limit

    def outcome(self, limit: float) -> str:
        """Return PASS, FAIL or INCONCLUSIVE for a slowdown of `limit`, a share; 0: of any size.

        With a limit it passes only where so large a slowdown could have been seen, or is excluded:
        the second is faster.
        """
        if self.verdict == UNKNOWN or (limit and self.all_suspect):
            return INCONCLUSIVE
        if self.is_regression(limit):
            return FAIL
        is_blind = self.smallest is not None and self.smallest > limit
        if limit and is_blind and self.verdict != FASTER:
            return INCONCLUSIVE
        return PASS

    def repeats_for(self, limit: float) -> int | None:
        """Return the runs on each side that could show a slowdown of `limit`; None: not known,
        or more than MOST_REPEATS.
        """
        step = self.steps.get(self.metric)
        if step is not None and step.error is not None:
            of_single = step.error / math.sqrt(of_median(step.runs))
            for runs in range(FEWEST_REPEATS, MOST_REPEATS + 1):
                error, freedom = of_single * math.sqrt(of_median(runs)), 2 * (runs - 1)
                needed = replace(step, error=error, freedom=freedom)
                if _slowdown(needed, self.tests) <= limit:
                    return runs
        return None


@dataclass(frozen=True)
class Differences:
    """Every cell that two studies have both, and what only one of them has."""

    cells: tuple[CellDifference, ...]
    # {name of a cell: why the other study's is not usable, empty where it has none}
    only_first: Mapping[str, str]
    only_second: Mapping[str, str]
    # {name: (value in the first, value in the second)} of what the records of a common cell say.
    facts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    in_turn: bool = False  # a machine that drifts changed every cell alike in both
    # The earlier study and how many repeats of it would make them so; empty of two machines.
    again: tuple[str, int] = ("", 0)

    def outcome(self, limit: float) -> str:
        """Return FAIL if a cell fails, INCONCLUSIVE if one is or, without a limit, all are."""
        outcomes = [cell.outcome(limit) for cell in self.cells]
        unusable = any({*self.only_first.values(), *self.only_second.values()})
        if FAIL in outcomes:
            return FAIL
        if PASS not in outcomes or (limit and (unusable or INCONCLUSIVE in outcomes)):
            return INCONCLUSIVE
        return PASS


def differences(first: Sequence[StudyInput], second: Sequence[StudyInput]) -> Differences:
    """Return how the cells of two studies differ; each may be of several machines."""
    before, after = _cells_of(first), _cells_of(second)
    every_cell = dict.fromkeys((*before, *after))
    names = _names(every_cell)
    baselines = {id(each.study): Baselines(each.study) for each in (*first, *second)}
    common = []
    only_first, only_second = dict[str, str](), dict[str, str]()
    facts: dict[str, tuple[str, str]] = {}
    in_turn = is_one_machine = same_machine([*first, *second])
    again = ("", 0)
    for cell in every_cell:
        if cell not in after:
            only_first[names[cell]] = _unusable(cell, second)
        elif cell not in before:
            only_second[names[cell]] = _unusable(cell, first)
        else:
            common.append(_difference(names[cell], before[cell], after[cell], baselines))
            runs = (before[cell][-1][1], after[cell][-1][1])
            facts = _facts_apart(*runs) | facts
            if not _in_turn(*runs):
                in_turn = False
                again = max(again, _again(*runs), key=lambda study: study[1])
    if not is_one_machine:
        again = ("", 0)
    return Differences(_judged(common), only_first, only_second, facts, in_turn, again)


def _in_turn(before: Runs, after: Runs) -> bool:
    """Return whether the runs of both are on average equally late, as in A B A B or A B B A."""
    starts = []
    for study, runs in enumerate((before, after)):
        starts += [(record.started_at, study) for record in runs.records]
    places: tuple[list[int], list[int]] = ([], [])
    for place, (_, study) in enumerate(sorted(starts)):
        places[study].append(place)
    if min(map(len, places)) < 2:
        return False
    return abs(statistics.fmean(places[0]) - statistics.fmean(places[1])) <= 1


def _again(before: Runs, after: Runs) -> tuple[str, int]:
    """Return the study whose runs are earlier, and the repeats with which they no longer are."""
    starts = []
    for runs in (before, after):
        starts.append([record.started_at for record in runs.records])
    earlier = int(statistics.fmean(starts[0]) > statistics.fmean(starts[1]))
    since = sum(start > max(starts[earlier]) for start in starts[1 - earlier])
    return STUDIES[earlier], len(starts[earlier]) + max(1, since)


def _cells_of(inputs: Sequence[StudyInput]) -> dict[CellId, list[tuple[StudyInput, Runs]]]:
    cells: dict[CellId, list[tuple[StudyInput, Runs]]] = defaultdict(list)
    for each in inputs:
        for runs in each.study.runs:
            cells[cell_id(runs.cell, each.hosts)].append((each, runs))
    return dict(cells)


def _facts_apart(before: Runs, after: Runs) -> dict[str, tuple[str, str]]:
    first, second = records_facts(before.records), records_facts(after.records)
    apart = {}
    for name in sorted(first.keys() & second.keys()):  # what is not said differs from nothing
        if first[name] != second[name]:
            apart[name] = (" or ".join(sorted(first[name])), " or ".join(sorted(second[name])))
    return apart


def cell_id(cell: Cell, hosts: Mapping[str, str]) -> CellId:
    """Return what makes cells of several studies the same; `hosts` gives hosts other names."""
    chosen = {"strategy.name", "benchmark.name"}
    for group in ("strategy", "benchmark"):
        for option, _ in chosen_options(cell, group):
            chosen.add(f"{group}.{option}")
    request = {}
    for name, value in request_of(cell).items():
        is_default = name.startswith(("strategy.", "benchmark.")) and name not in chosen
        # How the output is printed is not part of it.
        if not is_default and not name.endswith(".sha256") and name != "benchmark.format":
            request[name] = value
    if "server_hosts" in request:
        request["server_hosts"] = to_text([hosts.get(host, host) for host in cell.server_hosts])
    placed = dataclasses.replace(cell, hosts=tuple(hosts.get(host, host) for host in cell.hosts))
    return placed.members, frozenset(request.items())


def options_apart(
    first: Sequence[StudyInput], second: Sequence[StudyInput]
) -> dict[str, tuple[str, str]]:
    """Return {option: (its values in the first, in the second)} of those that share no value."""
    sides: list[list[dict[str, str]]] = []
    for inputs in (first, second):
        requests = []
        for (members, request), of_cell in _cells_of(inputs).items():
            requests += [dict(sorted(request)) | {"gpus": gpu_list(members)}] * len(of_cell)
        sides.append(requests)
    apart: dict[str, tuple[str, str]] = {}
    for name in dict.fromkeys(itertools.chain(*sides[0], *sides[1])):
        values = []
        for side in sides:
            values.append(dict.fromkeys(request.get(name, "not set") for request in side))
        before, after = values
        if before and after and not before.keys() & after.keys():
            apart[name] = (" or ".join(before), " or ".join(after))
    for group in ("strategy", "model", "benchmark"):  # options follow from the name
        if f"{group}.name" in apart:
            chosen = {group: apart[f"{group}.name"]}
            for name, ends in apart.items():
                if not name.startswith(f"{group}."):
                    chosen[name] = ends
            apart = chosen
    return apart


def why_apart(first: Sequence[StudyInput], second: Sequence[StudyInput]) -> str:
    """Return in what studies without a common cell differ: `they differ in optimize (…)`."""
    parts = []
    for option, (before, after) in options_apart(first, second).items():
        parts.append(f"{option} ({before} against {after})")
    if not parts:
        return "every one differs in an option"
    return f"they differ in {join_words(parts, 3)}"


def _names(cells: Iterable[CellId]) -> dict[CellId, str]:
    benchmarks: dict[str, dict[CellId, dict[str, str]]] = defaultdict(dict)
    for cell in cells:
        request = dict(cell[1])
        benchmarks[request["benchmark.name"]][cell] = request
    names = {}
    for benchmark, requests in benchmarks.items():
        varied = differing_names(list(requests.values()))
        for cell, request in requests.items():
            words, trains = [], request["model.builder"] != "none"
            if benchmark != "throughput":
                words.append(benchmark)
            if trains:
                words += [request["model.name"], request["strategy.name"]]
            elif request["model.name"] != "none":  # a script's
                words[0] = request["model.name"]
            for name in sorted(varied):
                follows = name.startswith("model.") and "model.name" in varied
                is_shown = name in request and name not in ALWAYS and not follows
                if is_shown and (trains or name not in OF_TRAINING):
                    words.append(format_option(name, request[name]))
            names[cell] = BETWEEN.join([*words, gpu_list(cell[0])])
    return names


def _difference(
    name: str,
    before: Sequence[tuple[StudyInput, Runs]],
    after: Sequence[tuple[StudyInput, Runs]],
    baselines: Mapping[int, Baselines],
) -> CellDifference:
    """Return a difference without a verdict; `why` says why it can get none."""
    numbers, repeated, all_suspect = [], [], []
    against: dict[str, Sequence[str]] = {}
    for study, inputs in zip(STUDIES, (before, after), strict=True):
        each, runs = inputs[-1]
        numbers.append(_numbers(runs, baselines[id(each.study)]))
        if runs.suspect:
            against[study] = runs.doubts
        if runs.all_suspect:
            all_suspect.append(study)
        if len(inputs) > 1:
            repeated.append(study)
    first, second = numbers
    metric, steps, why = "", {}, ""
    for main in (_main_metric(after[-1][1]), _main_metric(before[-1][1])):
        if main in first and main in second:
            metric = main
    for quantity, number in first.items():
        # Efficiencies may be against some of the members alone.
        if quantity in second and _against(number) == _against(second[quantity]):
            steps[quantity] = second[quantity].minus(number)
    if not metric:
        why = "no rate that both measured"
    elif repeated:
        why = f"{repeated[0]} {SEVERAL}"
    unknown = []
    for study, side in zip(STUDIES, numbers, strict=True):
        if metric and side[metric].error is None:
            unknown.append(study)
    if unknown and not why:
        why = NO_SCATTER.format(" and ".join(unknown))
    return CellDifference(
        name=name,
        gpus=before[-1][1].gpus,
        metric=metric,
        first=first,
        second=second,
        steps=steps,
        why=why,
        against=against,
        all_suspect=tuple(all_suspect),
    )


def _against(number: MeasuredNumber) -> object:
    return getattr(number.value, "of", ())


def _numbers(runs: Runs, baselines: Baselines) -> dict[str, MeasuredNumber]:
    numbers = {}
    for name in (_main_metric(runs), EXCHANGE):
        number = measured(runs, name)
        if number is not None:
            numbers[name] = number
    speedup = log_speedup(runs, baselines)
    if speedup is not None:
        share = efficiency(speedup.rate.value, speedup.slowest, runs.cell, speedup.alone)
        efficient = MeasuredNumber(share, speedup.rate.runs, None, speedup.freedom, logarithm=False)
        samples = [speedup.rate, *speedup.alone.values()]
        if all(map(is_known, samples)):
            efficient = replace(efficient, error=float(np.std(speedup.draws[MEASURED])) * share)
        numbers[EFFICIENCY] = efficient
    return numbers


def _main_metric(runs: Runs) -> str:
    """Return the metric that is compared: the rate, else the first marked one; else empty."""
    if runs.log_rates:
        return runs.rate.metric
    names: dict[str, float] = {}
    for record in runs.records:
        names |= record.metrics
    marked = []
    for name in names:
        entry = entry_of(name)
        if entry.first and not entry.signed and runs.logarithms(name):
            marked.append(name)
    return min(marked, key=position_of, default="")


def _judged(cells: Sequence[CellDifference]) -> tuple[CellDifference, ...]:
    tested = [cell for cell in cells if not cell.why]
    chances = [cell.steps[cell.metric].chance for cell in tested]
    is_seen = iter(significant(chances, 1 - LEVEL))
    judged = []
    for cell in cells:
        cell = replace(cell, tests=len(cells))
        if cell.why:
            judged.append(cell)
            continue
        step, change = cell.steps[cell.metric], cell.change
        assert change is not None
        verdict, why = judge(change, next(is_seen))
        smallest = _slowdown(step, len(tested))
        judged.append(replace(cell, verdict=verdict, smallest=smallest, why=why))
    return tuple(judged)


def _slowdown(step: MeasuredNumber, tests: int) -> float:
    """Return the smallest slowdown that the runs could have shown: steps that take 173 % longer
    are one of 63 %.
    """
    longer = step.smallest_change(tests)
    return longer / (1 + longer)


def _unusable(cell: CellId, inputs: Sequence[StudyInput]) -> str:
    """Return why the cell of some inputs cannot be used; empty where they have none."""
    for each in inputs:
        for record, why in each.study.left_out:
            if not record.usable and cell_id(record.cell, each.hosts) == cell:
                return why
    return ""
