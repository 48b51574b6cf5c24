"""How often the interval of the next run holds the next run: a table of `python -m tests.coverage`.

The truth is known: single runs scatter by DEVIATION. The floor is drawn with its degrees of freedom, runs at hand and the
next run are drawn, and the product's own functions make the interval.
"""

import itertools
import math

import numpy as np

from analysis.findings.estimates import Sample, next_run
from analysis.findings.estimates import freedom as freedom_of
from analysis.findings.estimates import slowest as slowest_of
from analysis.findings.next_run.floors import Floor

STUDIES = 2000
RUNS, FREEDOM = (1, 2, 3), (3, 6, 12)
GPUS = (2, 4)
DEVIATION = 0.0013  # of H200s
LEAST, MOST = 0.93, 0.97


def floor(draw, freedom, name):
    """Return a noise floor as so many degrees of freedom give it."""
    return Floor(DEVIATION * math.sqrt(draw.chisquare(freedom) / freedom), freedom, 2 * freedom, name)


def cell(draw, runs, of, name, noise=1.0):
    """Return the sample of equal runs whose true value is 0, and the next run; both `noise` times as noisy as the floor."""
    *values, following = draw.normal(0, noise * DEVIATION, runs + 1)
    return Sample(float(np.median(values)), of, runs, name), float(following)


def rate(draw, runs, freedom, study, noise=1.0):
    """Return whether the interval of one cell's rate holds the next run."""
    sample, following = cell(draw, runs, floor(draw, freedom, f"floor {study}"), f"cell {study}", noise)
    shown = sample.next_run()
    return shown.low <= following <= shown.high


def efficiency(draw, runs, freedom, study, gpus):
    """Return whether the interval of an efficiency holds that of a sweep which measures cell and baselines once more."""
    together, next_together = cell(draw, runs, floor(draw, freedom, f"together {study}"), f"cell {study}")
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


def rows(studies=STUDIES):
    """Yield (what, runs of the cell, degrees of freedom of the floor, share held)."""
    for runs, freedom in itertools.product(RUNS, FREEDOM):
        yield "images/s", runs, freedom, held(rate, runs, freedom, studies)
        for gpus in GPUS:
            yield f"efficiency on {gpus}", runs, freedom, held(efficiency, runs, freedom, studies, gpus=gpus)
