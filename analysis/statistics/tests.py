"""Runs of several cells that were measured in turns: value = cell + turn + error, by least squares.

A turn measures every cell once, in a shuffled order. What changes from turn to turn is a number of
its own for each turn (randomised complete blocks: Fisher 1935; with missing runs: Yates 1933). With
enough degrees of freedom a straight line within the turns is fitted too. The variance is pooled
over all cells; a pair whose own scatter is larger is judged by its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import fdtri

NO_TURN = -1
MOST_TURNS = 1000  # the time grows with their cube
# A line within the turns costs a degree of freedom; fewer than this many left are worth more than
# the line.
FREEDOM_WITH_LINE = 8
SHUFFLED = 0.3  # of the squared distances from the middle of the turn; the rest is the cells' own
SINGULAR = 1e-9  # an eigenvalue below this share of the largest is 0
GROSS = 0.99  # of the F distribution: a scatter beyond it is the pair's own

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Contrasts:
    """Differences between cells, an entry each; NaN where turns do not connect the two cells."""

    difference: Floats  # second − first
    error: Floats  # its standard error
    freedom: Floats  # degrees of freedom of the error


@dataclass(frozen=True)
class TurnModel:
    """The fit of one family of cells: c cells, k columns (turns, and the line within them)."""

    counts: Integers  # (c,), runs of a cell that are in a turn
    means: Floats  # (c,), of the values of a cell
    columns: Floats  # (c, k), of the columns over the runs of a cell
    inverse: Floats  # (k, k), pseudo-inverse of the columns' normal matrix without the cells
    projector: Floats  # (k, k), on what the data can tell of the columns
    effects: Floats  # (k,)
    freedom: int  # residual degrees of freedom
    variance: float  # pooled; NaN without a degree of freedom
    squares: Floats  # (c,), sum of the squared residuals of a cell
    own_freedom: Floats  # (c,), runs − leverages: a cell's share of the degrees of freedom

    def contrasts(self, first: Integers, second: Integers) -> Contrasts:
        """Return the differences between pairs of cells, given by their numbers (p,)."""
        apart = self.columns[second] - self.columns[first]
        connected = (self.counts[first] > 0) & (self.counts[second] > 0) & (self.freedom > 0)
        connected &= np.abs(apart - apart @ self.projector).max(axis=1, initial=0.0) < 1e-6
        difference = self.means[second] - self.means[first] - apart @ self.effects
        share = np.einsum("pk,kl,pl->p", apart, self.inverse, apart, optimize=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            share += 1 / self.counts[first] + 1 / self.counts[second]
            own_freedom = self.own_freedom[first] + self.own_freedom[second]
            own = (self.squares[first] + self.squares[second]) / own_freedom
            gross = own > self.variance * fdtri(own_freedom, max(self.freedom, 1), GROSS)
        variance = np.fmax(self.variance, own)
        freedom = np.where(gross, own_freedom, self.freedom)
        unknown = np.where(connected, 0.0, np.nan)
        return Contrasts(
            difference + unknown, np.sqrt(variance * share) + unknown, freedom + unknown
        )


def fitted(
    values: Sequence[float], cells: Sequence[int], turns: Sequence[int], times: Sequence[float]
) -> TurnModel:
    """Return the fit of runs: their values, their cells and turns (or NO_TURN), when they started.

    A turn with one run says nothing of differences: its run is left out.
    """
    count = max(cells, default=-1) + 1
    cell, turn = np.asarray(cells, dtype=int), np.asarray(turns, dtype=int)
    y, clock = np.asarray(values, dtype=float), np.asarray(times, dtype=float)
    runs_of_turn = np.bincount(turn[turn != NO_TURN], minlength=1)
    used = (turn != NO_TURN) & (runs_of_turn[turn] > 1)
    if len(np.unique(turn[used])) > MOST_TURNS:
        used &= False
    cell, y, clock = cell[used], y[used], clock[used]
    names, turn = np.unique(turn[used], return_inverse=True)
    counts, indicators = np.bincount(cell, minlength=count), np.eye(len(names))[turn]
    model = _solved(y, cell, counts, indicators)
    if model.freedom > FREEDOM_WITH_LINE:
        line = clock - (np.bincount(turn, clock) / np.bincount(turn))[turn]
        middle = np.bincount(cell, line) / np.maximum(counts, 1)[: cell.max() + 1]
        # The order changes so much from turn to turn that a line is told from the cells.
        if ((line - middle[cell]) ** 2).sum() > SHUFFLED * (line**2).sum() > 0:
            columns = np.column_stack([indicators, line / np.std(line)])
            model = _solved(y, cell, counts, columns)
    return model


def _solved(y: Floats, cell: Integers, counts: Integers, columns: Floats) -> TurnModel:
    """Return the least-squares fit of `columns` (n, k) beside a mean for each cell."""
    count, runs = len(counts), np.maximum(counts, 1)
    means = np.bincount(cell, y, count).astype(np.float64) / runs
    centre = np.zeros((count, columns.shape[1]))
    np.add.at(centre, cell, columns)
    centre /= runs[:, None]
    inner, rest = columns - centre[cell], y - means[cell]
    eigenvalues, vectors = np.linalg.eigh(inner.T @ inner)
    regular = eigenvalues > SINGULAR * max(eigenvalues.max(initial=0.0), 1.0)
    vectors = vectors[:, regular]
    inverse, projector = vectors / eigenvalues[regular] @ vectors.T, vectors @ vectors.T
    effects = inverse @ (inner.T @ rest)
    residuals = rest - inner @ effects
    freedom = len(y) - int((counts > 0).sum()) - int(regular.sum())
    squares = np.bincount(cell, residuals**2, count).astype(np.float64)
    leverages = np.bincount(cell, ((inner @ inverse) * inner).sum(axis=1), count) + (counts > 0)
    return TurnModel(
        counts=counts,
        means=means,
        columns=centre,
        inverse=inverse,
        projector=projector,
        effects=effects,
        freedom=freedom,
        variance=float(squares.sum()) / freedom if freedom > 0 else np.nan,
        squares=squares,
        own_freedom=np.maximum(counts - leverages, 0.0),
    )


def significant(chances: Floats, level: float) -> Flags:
    """Return which of m tests show a difference, so that a wrong one has at most this chance.

    By Holm's method (1979): the smallest of `chances` (p of each test) must be below level ÷ m, the
    next below level ÷ (m − 1), until one is not.
    """
    seen = np.zeros(len(chances), dtype=bool)
    for rank, index in enumerate(np.argsort(chances, kind="stable")):
        if chances[index] > level / (len(chances) - rank):
            break
        seen[index] = True
    return seen
