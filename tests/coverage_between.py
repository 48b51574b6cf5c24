"""How often verdicts between runs are wrong, and how often they see what is there: tables of `python -m tests.coverage`.

Studies are simulated as Ringside measures them: cells in shuffled turns. Every study goes through the product's own model and
Holm's method; "Welch" is the unpaired test of before.
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


def seen_in_turns(one):
    """Return which pairs of the compared cells the product tells apart, and the pairs."""
    first, second = np.triu_indices(COMPARED, 1)
    made = fitted(one.values, one.cells, one.turns, one.times).contrasts(first, second)
    return _seen(made.difference, made.error, made.freedom), first


def seen_unpaired(one):
    """Return the same by Welch's test of every pair."""
    first, second = np.triu_indices(COMPARED, 1)
    runs = [one.values[one.cells == cell] for cell in range(COMPARED)]
    count, mean = len(runs[0]), np.array([values.mean() for values in runs])
    parts = np.array([values.var(ddof=1) / count for values in runs])
    both = parts[first] + parts[second]
    freedom = both**2 / ((parts[first] ** 2 + parts[second] ** 2) / (count - 1))
    return _seen(mean[second] - mean[first], np.sqrt(both), freedom), first


def _seen(difference, error, freedom):
    tests = Tests(difference, error, freedom, np.isfinite(error))
    return significant(chances(tests), 0.05)


def wrong(seed, repeats, noise, surroundings, studies=STUDIES, seen=seen_in_turns):
    """Return the share of studies of equal cells with at least one verdict."""
    draw = np.random.default_rng(seed)
    return float(
        np.mean([seen(sweep(draw, repeats, noise, surroundings))[0].any() for _ in range(studies)])
    )


def power(seed, repeats, noise, surroundings, planted, studies=STUDIES, seen=seen_in_turns):
    """Return the share of the pairs with the planted cell that are told apart."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(studies):
        told, first = seen(sweep(draw, repeats, noise, surroundings, planted=planted))
        found.append(told[first == 0].mean())
    return float(np.mean(found))


def tables(studies: int = STUDIES) -> Iterator[str]:
    """Yield the tables, line by line."""
    yield f"Studies of equal cells with a wrong verdict, {studies} of each: in turns (Welch, unpaired)"
    yield f"{'repeats':>8}{'noise':>8}" + "".join(f"{name:>18}" for name in SURROUNDINGS)
    for repeats, noise in itertools.product(REPEATS, NOISES):
        shares = (
            [
                wrong(1, repeats, noise, name, studies, seen)
                for seen in (seen_in_turns, seen_unpaired)
            ]
            for name in SURROUNDINGS
        )
        yield f"{repeats:>8}{noise:>8.2%}" + "".join(
            f"{ours:>10.1%} ({welch:5.1%})" for ours, welch in shares
        )
    yield ""
    yield f"Planted differences that are seen, of {studies} studies with six tests: in turns (Welch, unpaired)"
    columns = ("no drift", "drift")
    yield f"{'noise':>8}{'planted':>9}" + "".join(
        f"{f'{n} repeats, {name}':>24}" for n in (3, 5) for name in columns
    )
    for noise, planted in (
        (0.0013, 0.005),
        (0.0013, 0.01),
        (0.005, 0.01),
        (0.005, 0.02),
        (0.01, 0.03),
    ):
        shares = (
            [
                power(2, repeats, noise, name, planted, studies, seen)
                for seen in (seen_in_turns, seen_unpaired)
            ]
            for repeats in (3, 5)
            for name in columns
        )
        yield f"{noise:>8.2%}{planted:>9.1%}" + "".join(
            f"{ours:>15.1%} ({welch:6.1%})" for ours, welch in shares
        )
