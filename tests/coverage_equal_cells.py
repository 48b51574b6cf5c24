"""How often equal cells of the committed H200 studies are held and told apart: `python -m tests.coverage_equal_cells` prints it.

An interval of the next run is held against a run that it has not seen: of the same cell in another study on the same GPUs, and
of the cell itself, each run left out in turn. Verdicts are those of `compare` between repeats that are cut in half at random.
"""

import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from analysis.findings.between_studies import cell_id, differences
from analysis.findings.comparisons import comparisons
from analysis.study.intervals import LEVEL, of_median, quantile
from analysis.study.measured_numbers import FASTER, SLOWER, UNKNOWN
from analysis.study.names import BETWEEN
from analysis.study.noise_floor import FEWEST
from analysis.study.provenance import gpus_of
from analysis.study.study import Study, open_study
from analysis.study.study_inputs import StudyInput
from benchmarks.record import metrics

STUDIES = 40  # random cuts of each study with repeats
RATE = "throughput/images_per_second"
METRICS = (RATE, "comm/exchange_ms", "strategy/cost_ms")
DATA = Path(__file__).parent / "data"
ASKED = "nccl.NCCL_PROTO"  # what names the second half of the runs of a cell, inside one study
HALF = {"NCCL_PROTO": "Simple"}
LEAST_HELD, MOST_VERDICTS = 0.9, 0.05


@cache
def studies():
    return [open_study(path) for path in sorted(DATA.glob("h200_*/*")) if path.is_dir()]


@cache
def equal_cells():
    """Return the runs of each cell, one entry a study, by what was asked and the GPUs of the machine."""
    cells = defaultdict(list)
    for study in studies():
        for runs in study.runs:
            uuids = tuple(sorted(gpu["uuid"] for gpu in gpus_of(runs.records[0].environment)))
            cells[cell_id(runs.cell, {}), uuids].append(runs)
    return dict(cells)


@cache
def unseen():
    """Return (study, runs of a cell, a further run of it) of all committed pairs, and of all repeats with each left out in turn."""
    rows = []
    folders = {id(runs): study.folder for study in studies() for runs in study.runs}
    for equal in equal_cells().values():
        for runs in equal:
            for other in equal:
                if other is not runs:
                    rows += [(folders[id(runs)], runs, out) for out in other.records]
    for study in studies():
        for cell in study.runs:
            for out in cell.records[: len(cell.records) if len(cell.records) > 1 else 0]:
                left = Study.of(record for record in study.records if record is not out)
                (first, *_) = (record for record in cell.records if record is not out)
                runs = next(runs for runs in left.runs if first in runs.records)
                rows.append((study.folder, runs, out))
    return rows


@cache
def held():
    """Return {(metric, strategy): [runs held, of so many, held by the interval inside the first run]}."""
    counts = defaultdict(lambda: [0, 0, 0])
    for _, runs, out in unseen():
        for metric in METRICS:
            shown = runs.next_run(metric)
            if runs.floor(metric) is None or shown is None or metric not in out.metrics:
                continue
            low, high = runs.records[0].ends_within_run(metric) or (0, 0)
            row = counts[metric, runs.strategy]
            row[0] += shown.low <= out.metrics[metric] <= shown.high
            row[1] += 1
            row[2] += low <= out.metrics[metric] <= high
    return dict(counts)


def lent():
    """Return {study: [how far a further run lies, in standard errors]} of all intervals with a lent floor."""
    distances = defaultdict(list)
    for folder, runs, out in unseen():
        for metric in METRICS:
            floor, values = runs.floor(metric), runs.values(metric)
            if floor is None or not floor.lenders or not values or metric not in out.metrics:
                continue
            value, further = statistics.median(values), out.metrics[metric]
            if not metrics.entry_of(metric).signed:
                value, further = math.log(value), math.log(further)
            error = floor.deviation * math.sqrt(1 + of_median(len(values)))
            distances[folder].append(abs(further - value) / error)
    return dict(distances)


def held_out_of_sample():
    """Return {study: (degrees of freedom, runs held, of so many)}: the most degrees with which 95 % of the lent intervals of
    all other studies hold, applied to those of this one. The product has FEWEST for all.
    """
    distances, rows = lent(), {}
    for folder, of_study in distances.items():
        rest = [one for other, of_other in distances.items() if other != folder for one in of_other]
        enough = [FEWEST]
        for freedom in (2, 3, 4, 6, 10, 30):
            if np.mean(np.array(rest) <= quantile(freedom)) >= LEVEL:
                enough.append(freedom)
        shown = sum(one <= quantile(max(enough)) for one in of_study)
        rows[folder.name] = max(enough), shown, len(of_study)
    return rows


def halves(cuts, in_sweeps=False):
    """Yield the records of each machine, all runs of a cell cut in half at random, or those of each sweep, as turns are."""
    for cut in range(cuts):
        draw, sides = random.Random(cut), ([], [])
        for equal in equal_cells().values():
            # Records of several studies, each a cell of its own: none replaces another.
            records = [
                replace(one, cell_key=one.record_id) for runs in equal for one in runs.records
            ]
            draw.shuffle(records)
            if in_sweeps:
                records.sort(key=lambda record: record.sweep_id)
            for side, half in zip(sides, (records[::2], records[1::2]), strict=True):
                side.extend(half)
        first, second = map(by_machine, sides)
        for machine in first.keys() & second.keys():
            yield first[machine], second[machine]


def verdicts(cuts=STUDIES):
    """Return {strategy: [verdicts, of so many that can be told]} between equal runs: of `compare`, and inside one study.

    There of six runs and more: four can be cut in three ways only.
    """
    between, inside = defaultdict(lambda: [0, 0]), defaultdict(lambda: [0, 0])
    for first, second in halves(cuts):
        inputs = [[StudyInput("", Path(), Study.of(records))] for records in (first, second)]
        for cell in differences(*inputs).cells:
            row = between[cell.name.split(BETWEEN)[1]]
            row[0] += cell.verdict in (FASTER, SLOWER)
            row[1] += cell.verdict != UNKNOWN
    for first, second in halves(cuts, in_sweeps=True):
        named = [replace(one, cell=replace(one.cell, nccl=one.cell.nccl | HALF)) for one in second]
        for pair in comparisons(Study.of([*first, *named])):
            if pair.asked == "NCCL_PROTO" and pair.first_key.keys() ^ pair.second_key.keys() == {
                ASKED
            }:
                row = inside[pair.first_key["strategy.name"]]
                row[0] += pair.verdict in (FASTER, SLOWER) and min(pair.runs) > 2
                row[1] += bool(pair.verdict) and min(pair.runs) > 2
    told = []
    for counts in (between, inside):
        told.append({strategy: row for strategy, row in counts.items() if row[1]})
    return told


def by_machine(records):
    """Return {UUIDs of its GPUs: records of a machine}."""
    machines = defaultdict(list)
    for record in records:
        machines[tuple(sorted(gpu["uuid"] for gpu in gpus_of(record.environment)))].append(record)
    return machines


def tables(studies=STUDIES):
    yield "Equal cells of the committed studies: a further run lies in the interval of the next run (inside one run)"
    strategies = sorted({strategy for _, strategy in held()})
    yield f"{'strategy':>26}" + "".join(f"{metric:>32}" for metric in METRICS)
    for strategy in strategies:
        line = f"{strategy:>26}"
        for metric in METRICS:
            shown, of, inside = held().get((metric, strategy), (0, 0, 0))
            line += f"{f'{shown} of {of} ({inside})' if of else '–':>32}"
        yield line
    yield ""
    yield "Of these intervals those with a lent floor, its degrees of freedom chosen by all other studies"
    for study, (freedom, shown, of) in held_out_of_sample().items():
        yield f"{study:>26}{f'{shown} of {of} ({freedom} degrees)':>32}"
    for where, rows in zip(("`compare`", "one study"), verdicts(studies), strict=True):
        yield ""
        yield f"Their runs cut in half, {studies} times: verdicts of {where} between the halves"
        for strategy, (wrong, told) in sorted(rows.items()):
            yield f"{strategy:>26}{f'{wrong} of {told} ({wrong / told:.1%})':>32}"


if __name__ == "__main__":
    print(*tables(), sep="\n")
