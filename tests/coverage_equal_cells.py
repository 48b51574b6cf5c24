"""How often equal cells of the committed H200 studies are held and told apart: `python -m tests.coverage_equal_cells` prints it.

An interval of the next run is held against a run that it has not seen: of the same cell in another study on the same GPUs, and
of the cell itself, each run left out in turn. Verdicts are those of `compare` between repeats that are cut in half at random.
"""

import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

from analysis.findings.between_studies import cell_id, differences
from analysis.findings.study_inputs import StudyInput
from analysis.study.measured_numbers import FASTER, SLOWER, UNKNOWN
from analysis.study.names import BETWEEN
from analysis.study.provenance import gpus_of
from analysis.study.study import Study, open_study
from benchmarks.record import metrics

STUDIES = 40  # random cuts of each study with repeats
RATE = "throughput/images_per_second"
METRICS = (RATE, "comm/exchange_ms", "strategy/cost_ms")
DATA = Path(__file__).parent / "data"
LEAST_HELD, MOST_VERDICTS = 0.9, 0.05


@cache
def studies():
    """Return every committed study of H200s."""
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


def unseen():
    """Yield (runs of a cell, a further run of it) of all committed pairs, and of all repeats with each left out in turn."""
    for equal in equal_cells().values():
        for runs in equal:
            for other in equal:
                if other is not runs:
                    yield from ((runs, out) for out in other.records)
    for study in studies():
        for cell in study.runs:
            for out in cell.records[: len(cell.records) if len(cell.records) > 1 else 0]:
                left = Study.of(record for record in study.records if record is not out)
                (first, *_) = (record for record in cell.records if record is not out)
                yield next(runs for runs in left.runs if first in runs.records), out


@cache
def held():
    """Return {(metric, strategy): [runs held, of so many, held by the interval inside the first run]}."""
    counts = defaultdict(lambda: [0, 0, 0])
    for runs, out in unseen():
        for metric in METRICS:
            shown = runs.next_run(metric)
            if runs.floor(metric) is None or shown is None or metric not in out.metrics:
                continue
            low, high = metrics.interval(metric, runs.records[0].within_run) or (0, 0)
            row = counts[metric, runs.strategy]
            row[0] += shown.low <= out.metrics[metric] <= shown.high
            row[1] += 1
            row[2] += low <= out.metrics[metric] <= high
    return dict(counts)


def verdicts(cuts=STUDIES):
    """Return {strategy: [verdicts, of so many cells that can be told]} of equal runs of all studies, cut in half at random."""
    counts = defaultdict(lambda: [0, 0])
    for cut in range(cuts):
        draw, sides = random.Random(cut), ([], [])
        for equal in equal_cells().values():
            # Records of several studies, each a cell of its own: none replaces another.
            records = [
                replace(one, cell_key=one.record_id) for runs in equal for one in runs.records
            ]
            draw.shuffle(records)
            for side, half in zip(sides, (records[::2], records[1::2]), strict=True):
                side.extend(half)
        first, second = map(by_machine, sides)
        for machine in first.keys() & second.keys():
            inputs = [
                [StudyInput("", Path(), Study.of(of_side[machine]))] for of_side in (first, second)
            ]
            for cell in differences(*inputs).cells:
                row = counts[cell.name.split(BETWEEN)[1]]
                row[0] += cell.verdict in (FASTER, SLOWER)
                row[1] += cell.verdict != UNKNOWN
    return {strategy: row for strategy, row in counts.items() if row[1]}


def by_machine(records):
    """Return {UUIDs of its GPUs: records of a machine}."""
    machines = defaultdict(list)
    for record in records:
        machines[tuple(sorted(gpu["uuid"] for gpu in gpus_of(record.environment)))].append(record)
    return machines


def tables(studies=STUDIES):
    """Yield the two tables, line by line."""
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
    yield f"Their runs cut in half, {studies} times: verdicts of `compare` between the halves"
    for strategy, (wrong, told) in sorted(verdicts(studies).items()):
        yield f"{strategy:>26}{f'{wrong} of {told} ({wrong / told:.1%})':>32}"


if __name__ == "__main__":
    print(*tables(), sep="\n")
