"""How often the interval of the next run holds the next run: a table of `python -m tests.coverage`.

The truth is known: single runs scatter by DEVIATION. The floor is drawn with its degrees of freedom, runs at hand and the
next run are drawn, and the product's own functions make the interval.
"""

import itertools
import math
from pathlib import Path

import numpy as np

from analysis.study.draws import Sample, next_run
from analysis.study.draws import freedom as freedom_of
from analysis.study.draws import slowest as slowest_of
from analysis.study.noise_floor import Floor
from analysis.study.study import Study, open_study
from benchmarks.record import metrics

STUDIES = 2000
RUNS, FREEDOM = (1, 2, 3), (3, 6, 12)
GPUS = (2, 4)
RATE = "throughput/images_per_second"
H200_X2 = Path(__file__).parent / "data" / "h200_x2"
REAL = ("bootcamp_pairs", "bootcamp_resnet50", "scaling", "strategies")  # studies with repeats
DEVIATION = 0.0013  # of H200s
LEAST, MOST = 0.93, 0.97


def floor(draw, freedom, name):
    """Return a noise floor as so many degrees of freedom give it."""
    return Floor(
        DEVIATION * math.sqrt(draw.chisquare(freedom) / freedom), freedom, 2 * freedom, name
    )


def cell(draw, runs, of, name, noise=1.0):
    """Return the sample of equal runs whose true value is 0, and the next run; both `noise` times as noisy as the floor."""
    *values, following = draw.normal(0, noise * DEVIATION, runs + 1)
    return Sample(float(np.median(values)), of, runs, name), float(following)


def rate(draw, runs, freedom, study, noise=1.0):
    """Return whether the interval of one cell's rate holds the next run."""
    sample, following = cell(
        draw, runs, floor(draw, freedom, f"floor {study}"), f"cell {study}", noise
    )
    shown = sample.next_run()
    return shown.low <= following <= shown.high


def efficiency(draw, runs, freedom, study, gpus):
    """Return whether the interval of an efficiency holds that of a sweep which measures cell and baselines once more."""
    together, next_together = cell(
        draw, runs, floor(draw, freedom, f"together {study}"), f"cell {study}"
    )
    of_alone = floor(draw, freedom, f"alone {study}")
    alone = [cell(draw, runs, of_alone, f"{gpu} {study}") for gpu in range(gpus)]
    value, draws = slowest_of([sample for sample, _ in alone])
    every = freedom_of([together, *(sample for sample, _ in alone)])
    shown = next_run(together.value - value, together.draws - draws, every)
    return shown.low <= next_together - min(following for _, following in alone) <= shown.high


def held(what, runs, freedom, studies=STUDIES, **more):
    """Return the share of studies in which an interval holds the next run."""
    draw = np.random.default_rng([runs, freedom])
    return float(np.mean([what(draw, runs, freedom, study, **more) for study in range(studies)]))


def left_out():
    """Leave each run of the real studies out in turn: whether an interval of the cell's other runs holds it.

    Returns (of the interval of the next run, of that within the first of the other runs), an entry for each run.
    """
    shown, inside = [], []
    for name in REAL:
        study = open_study(H200_X2 / name)
        for cell in (runs for runs in study.timed if len(runs.records) > 1):
            for out in cell.records:
                left = Study.of(one for one in study.records if one is not out)
                first = next(one for one in cell.records if one is not out)
                rest = next(runs for runs in left.timed if runs.records[0] is first)
                interval = rest.next_run(RATE)
                if interval.low is not None:
                    low, high = metrics.interval(RATE, first.within_run)
                    value = out.metrics[RATE]
                    shown.append(interval.low <= value <= interval.high)
                    inside.append(low <= value <= high)
    return shown, inside


def tables(studies=STUDIES):
    """Yield the table of simulated floors, and that of the real runs."""
    yield (
        f"\nThe interval of the next run: {studies} studies of each row; the share of intervals that hold one more run of the\n"
        "cell, or the efficiency of one more run of the cell and of every baseline.\n"
    )
    of_gpus = [f"{gpus} GPUs" for gpus in GPUS]
    yield f"{'runs':>5} {'degrees of freedom':>19} {'images/s':>9} " + " ".join(
        f"{f'efficiency, {one}':>18}" for one in of_gpus
    )
    for runs, freedom in itertools.product(RUNS, FREEDOM):
        shares = [held(efficiency, runs, freedom, studies, gpus=gpus) for gpus in GPUS]
        yield (
            f"{runs:5} {freedom:19} {held(rate, runs, freedom, studies):9.1%} "
            + " ".join(f"{one:18.1%}" for one in shares)
        )
    shown, inside = left_out()
    yield (
        f"\n{len(shown)} runs of two H200s, each left out in turn: {np.mean(shown):.1%} lie in the interval of the next run, "
        f"{np.mean(inside):.1%} in the\ninterval within a run."
    )
