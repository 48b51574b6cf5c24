"""How often verdicts between runs are wrong, and how often they see what is there: tables of `python -m tests.coverage`.

Studies are simulated as Ringside measures them: cells in shuffled turns. Every study goes through the product's own model and
Holm's method.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from analysis.findings.comparisons import Tests, chances
from analysis.statistics.tests import fitted, significant

STUDIES = 200
REPEATS = (2, 3, 5, 10)
NOISES = (0.0013, 0.005, 0.01)  # standard deviation between runs, as a share
COMPARED = 4  # cells that are compared with each other: six tests
BESIDE = 2  # cells of the same turns that are in no comparison, as the baselines on one GPU
DRIFT = 0.01  # from the first run of a sweep to the last
PLANTED = ((0.0013, 0.005), (0.0013, 0.01), (0.005, 0.01), (0.005, 0.02), (0.01, 0.03))
SURROUNDINGS = ("no drift", "drift", "heavy tails", "bimodal", "unequal")


@dataclass(frozen=True)
class Sweep:
    """One simulated sweep: the logarithm of every run's rate, its cell, its turn and when it started."""

    values: np.ndarray
    cells: np.ndarray
    turns: np.ndarray
    times: np.ndarray


def sweep(draw, repeats, noise, surroundings="no drift", cells=COMPARED + BESIDE, planted=0.0):
    """Return a sweep in which `planted` is added to the first cell."""
    cell = np.concatenate([draw.permutation(cells) for _ in range(repeats)])
    turn, time = np.repeat(np.arange(repeats), cells), np.arange(cells * repeats)
    error = draw.normal(0, noise, len(cell))
    if surroundings == "heavy tails":
        error = noise * student.rvs(2.2, size=len(cell), random_state=draw)
    elif surroundings == "bimodal":  # three starts in ten are slow by three deviations
        error = error / 2 - 3 * noise * (draw.random(len(cell)) < 0.3)
    elif surroundings == "unequal":  # the noisiest cell scatters four times as much as the quietest
        error *= np.geomspace(0.5, 2, cells)[::-1][cell]
    elif surroundings == "drift":
        error = error + DRIFT * time / (len(time) - 1)
    return Sweep(error + planted * (cell == 0), cell, turn, time.astype(float))


def seen(one):
    """Return which pairs of the compared cells the product tells apart, and the pairs."""
    first, second = np.triu_indices(COMPARED, 1)
    made = fitted(one.values, one.cells, one.turns, one.times).contrasts(first, second)
    tests = Tests(made.difference, made.error, made.freedom, np.isfinite(made.error))
    return significant(chances(tests), 0.05), first


def wrong(seed, repeats, noise, surroundings, studies=STUDIES):
    """Return the share of studies of equal cells with at least one verdict."""
    draw = np.random.default_rng(seed)
    return float(
        np.mean([seen(sweep(draw, repeats, noise, surroundings))[0].any() for _ in range(studies)])
    )


def power(seed, repeats, noise, surroundings, planted, studies=STUDIES):
    """Return the share of the pairs with the planted cell that are told apart."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(studies):
        told, first = seen(sweep(draw, repeats, noise, surroundings, planted=planted))
        found.append(told[first == 0].mean())
    return float(np.mean(found))


def tables(studies: int = STUDIES) -> Iterator[str]:
    """Yield the tables, line by line."""
    yield f"Studies of equal cells with a wrong verdict, {studies} of each"
    yield f"{'repeats':>8}{'noise':>8}" + "".join(f"{name:>14}" for name in SURROUNDINGS)
    for repeats, noise in itertools.product(REPEATS, NOISES):
        shares = [wrong(1, repeats, noise, name, studies) for name in SURROUNDINGS]
        yield f"{repeats:>8}{noise:>8.2%}" + "".join(f"{share:>14.1%}" for share in shares)
    yield ""
    yield f"Planted differences that are seen, of {studies} studies with six tests"
    columns = list(itertools.product((3, 5), ("no drift", "drift")))
    heads = "".join(f"{f'{repeats} repeats, {name}':>22}" for repeats, name in columns)
    yield f"{'noise':>8}{'planted':>9}{heads}"
    for noise, planted in PLANTED:
        shares = [power(2, repeats, noise, name, planted, studies) for repeats, name in columns]
        yield f"{noise:>8.2%}{planted:>9.1%}" + "".join(f"{share:>22.1%}" for share in shares)
