"""What cells lose, against how long their exchange takes alone: a line for every mechanism.

    lost ms per step = fixed + share · ms that the exchange takes alone in the same cell

A mechanism is everything asked but the GPUs and NCCL's settings: a model, a strategy with its
options, a batch. Only within one does the same share of the exchange hide behind compute.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from analysis.findings.baselines import EFFICIENCY, WITHOUT
from analysis.findings.communication import COST, EXCHANGE, EXPOSED
from analysis.study import names as labels
from analysis.study.conditions import OF_LINKS, irrelevant_to_curves, is_among
from analysis.study.estimates import Communication, Estimate, Scaling, WireLine, WirePoint
from analysis.study.intervals import LEVEL, quantile
from analysis.study.runs import Runs
from analysis.study.study import Study

FEWEST = 4  # cells of a line
SPREAD = 1.2  # the slowest exchange of a line must take this many times as long as the fastest
SIMILAR = 1.1  # below this ratio two times are one
SETTINGS = (*OF_LINKS, "NCCL_")  # they change the wires or their use, not the mechanism
ROUNDING = 1e-6  # of the largest value: residuals below it are rounding
BENT = 0.99  # level at which a parabola's further term differs from 0


@dataclass(frozen=True)
class Fit:
    """The line of least squares y = fixed + slope · x through `count` points."""

    fixed: float
    slope: float
    count: int
    middle: float  # mean of x
    spread: float  # sum of squares of x about it
    deviation: float  # of the residuals, with count − 2 degrees of freedom
    r_squared: float

    def expected(self, x: float, level: float = LEVEL) -> Estimate:
        """Return the line's value with the interval that holds a further point at x."""
        return self._estimate(self.fixed + self.slope * x, math.sqrt(1 + self._leverage(x)), level)

    def fixed_estimate(self) -> Estimate:
        """Return the line's value at 0 with its interval."""
        return self._estimate(self.fixed, math.sqrt(self._leverage(0)), LEVEL)

    def slope_estimate(self) -> Estimate:
        """Return the slope with its interval."""
        return self._estimate(self.slope, 1 / math.sqrt(self.spread), LEVEL)

    def _leverage(self, x: float) -> float:
        return 1 / self.count + (x - self.middle) ** 2 / self.spread

    def _estimate(self, value: float, errors: float, level: float) -> Estimate:
        half = quantile(self.count - 2, level) * self.deviation * errors
        return Estimate(value, value - half, value + half)


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the line through (x, y); None for fewer than three points, or where all x are equal."""
    count = len(points)
    if count < 3:
        return None
    middle, mean = (math.fsum(values) / count for values in zip(*points, strict=True))
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if spread <= (ROUNDING * middle) ** 2:
        return None
    slope = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    fixed = mean - slope * middle
    residuals = math.fsum((y - fixed - slope * x) ** 2 for x, y in points)
    total = math.fsum((y - mean) ** 2 for _, y in points)
    least = ROUNDING * max(abs(y) for _, y in points)
    deviation = max(math.sqrt(residuals / (count - 2)), least)
    r_squared = 1 - residuals / total if total > least**2 else 0.0
    return Fit(fixed, slope, count, middle, spread, deviation, r_squared)


def bends(points: Sequence[tuple[float, float]]) -> bool:
    """Return whether the points follow a parabola: its further term differs from 0."""
    x, y = np.array(points, dtype=float).T
    freedom = len(x) - 3
    if freedom < 1:
        return False
    scaled = (x - x.mean()) / (np.ptp(x) or 1.0)
    basis, _ = np.linalg.qr(np.vander(scaled, 3, increasing=True))  # orthonormal polynomials
    terms = basis.T @ y
    squares = max(float(((y - basis @ terms) ** 2).sum()), 0.0)
    deviation = max(math.sqrt(squares / freedom), ROUNDING * float(np.abs(y).max()))
    return bool(abs(terms[2]) > quantile(freedom, BENT) * deviation)


@dataclass(frozen=True)
class _Cell:
    """A cell of a mechanism."""

    runs: Runs
    wire_ms: float | None  # of its exchange alone; None: not measured
    lost_ms: dict[str, float]  # by COST, EXPOSED and EFFICIENCY, where known
    alone_ms: float | None  # a step of the slowest member alone


def wire_lines(
    study: Study, scaling: Scaling, communication: Sequence[Communication]
) -> tuple[tuple[WireLine, ...], str]:
    """Return the lines of a study; without any, a sentence on what is missing and how to plan it."""
    mechanisms = _mechanisms(study, scaling, communication)
    chosen = []
    for mechanism in mechanisms:
        timed = [cell for cell in mechanism if cell.wire_ms is not None]
        for quantity in (COST, EFFICIENCY):
            cells = [cell for cell in timed if quantity in cell.lost_ms]
            times = [cell.wire_ms for cell in cells if cell.wire_ms is not None]
            if len(cells) < FEWEST or max(times) < SPREAD * min(times):
                continue
            if quantity == COST and all(EXPOSED in cell.lost_ms for cell in cells):
                quantity = EXPOSED
            chosen.append((quantity, cells))
    # All cells of all lines are one family.
    level = 1 - (1 - LEVEL) / max(1, sum(len(cells) for _, cells in chosen))
    lines = []
    for quantity, cells in chosen:
        line = _line(study, quantity, cells, level)
        if line is not None:
            lines.append(line)
    if lines or not mechanisms:
        return tuple(lines), ""
    return (), _missing(study, mechanisms)


def _mechanisms(
    study: Study, scaling: Scaling, communication: Sequence[Communication]
) -> list[list[_Cell]]:
    points = {point.record_ids[0]: point for curve in scaling.curves for point in curve.points}
    exposed = {each.record_ids[0]: each.exposed_ms for each in communication}
    mechanisms: dict[Any, list[_Cell]] = defaultdict(list)
    for runs in study.timed:
        if runs.world_size == 1 or runs.strategy == WITHOUT:
            continue
        record_id = runs.records[0].record_id
        cost, exposed_ms, point = runs.median(COST), exposed.get(record_id), points.get(record_id)
        lost, alone_ms = {}, None
        if cost is not None:
            lost[COST] = cost
        if exposed_ms is not None:
            lost[EXPOSED] = exposed_ms
        if point is not None and point.baseline is not None:
            alone_ms = 1e3 * point.batch_size / point.baseline.value
            step_ms = 1e3 * point.batch_size * point.world_size / point.rate.value
            lost[EFFICIENCY] = step_ms - alone_ms
        measured = runs.median(EXCHANGE) and runs.median("comm/busbw_gb_per_s")
        wire_ms = runs.median(EXCHANGE) if measured else None
        condition = study.condition(runs, (*SETTINGS, *irrelevant_to_curves(runs.strong)))
        mechanisms[condition].append(_Cell(runs, wire_ms, lost, alone_ms))
    return list(mechanisms.values())


def _line(study: Study, quantity: str, cells: Sequence[_Cell], level: float) -> WireLine | None:
    pairs = [(cell.wire_ms or 0.0, cell.lost_ms[quantity]) for cell in cells]
    line = fit(pairs)
    if line is None:
        return None
    points = []
    for index, cell in enumerate(cells):
        # Each is judged by the line through all others.
        through = fit([*pairs[:index], *pairs[index + 1 :]]) or line
        points.append(_point(study, quantity, cell, through.expected(pairs[index][0], level)))
    speeds, fastest = 0, 0.0
    for time, _ in sorted(pairs):
        if not speeds or time > SIMILAR * fastest:
            speeds, fastest = speeds + 1, time
    alone = [cell.alone_ms for cell in cells if cell.alone_ms is not None]
    varied = [name for name in study.varied if is_among(name, SETTINGS)]
    first = cells[0].runs
    return WireLine(
        label=labels.label(study, first, ["benchmark.name", *varied]),
        strategy=first.strategy,
        key=first.key,
        quantity=quantity,
        # Cells of other lines share an error of one GPU.
        fixed_ms=line.fixed_estimate() if quantity == COST else Estimate(line.fixed),
        share=line.slope_estimate(),
        r_squared=line.r_squared,
        deviation_ms=line.deviation,
        points=tuple(sorted(points, key=lambda point: (point.wire_ms, point.gpus, point.label))),
        speeds=speeds,
        bends=bends(pairs),
        alone_ms=median(alone) if alone and quantity == EFFICIENCY else None,
    )


def _point(study: Study, quantity: str, cell: _Cell, expected: Estimate) -> WirePoint:
    runs, lost = cell.runs, cell.lost_ms[quantity]
    words = [labels.gpu_ids(runs.gpus)]
    for name in study.varied:
        if is_among(name, SETTINGS) and name in runs.request:
            words.append(labels.format_option(name, runs.request[name]))
    efficiency, expected_efficiency = None, None
    if quantity == EFFICIENCY and cell.alone_ms is not None:
        efficiency = cell.alone_ms / (cell.alone_ms + lost)
        expected_efficiency = efficiency_of(cell.alone_ms, expected)
    return WirePoint(
        gpus=runs.gpus,
        key=runs.key,
        label=labels.BETWEEN.join(words),
        gb_per_s=runs.median("comm/busbw_gb_per_s") or 0.0,
        wire_ms=cell.wire_ms or 0.0,
        lost_ms=lost,
        expected_ms=expected,
        residual_ms=lost - expected.value,
        efficiency=efficiency,
        expected_efficiency=expected_efficiency,
    )


def efficiency_of(alone_ms: float, lost_ms: Estimate) -> Estimate:
    """Return the efficiency of a step that takes `lost_ms` more than alone; its ends change places."""
    ends = (lost_ms.value, lost_ms.high, lost_ms.low)
    shares = [None if ms is None else alone_ms / max(alone_ms + ms, 1e-9) for ms in ends]
    return Estimate(shares[0] or 0.0, shares[1], shares[2])


def _missing(study: Study, mechanisms: Sequence[Sequence[_Cell]]) -> str:
    """Return a sentence on what the mechanism with most measured cells lacks, and how to plan it."""
    cells = max(mechanisms, key=lambda cells: sum(cell.wire_ms is not None for cell in cells))
    measured = [cell for cell in cells if cell.wire_ms is not None]
    runs, plan = cells[0].runs, ""
    if runs.cell.device == "cuda":
        plan = " (nccl.max_nchannels=1,2,4,8 adds them)"
        if _has_different_links(runs.records[0].environment.get("links")):
            plan = " (gpus=classes adds them)"
    if not measured:
        why = "no cell measured its exchange"
    elif not any(cell.lost_ms for cell in measured):
        why = (
            f"no cell of {runs.strategy} measured what the strategy costs, and none ran on one GPU "
            "(gpus=each adds that)"
        )
    elif len(measured) < FEWEST:
        noun = "cell" if len(measured) == 1 else "cells"
        why = (
            f"{runs.strategy} has {len(measured)} {noun} with a measured exchange, and {FEWEST} "
            f"with different GB/s are needed{plan}"
        )
    else:
        speeds = [cell.runs.median("comm/busbw_gb_per_s") or 0.0 for cell in measured]
        why = (
            f"all exchanges of {runs.strategy} are equally fast ({min(speeds):.0f} to "
            f"{max(speeds):.0f} GB/s), and {FEWEST} cells with different GB/s are needed{plan}"
        )
    return f"whether the speed of the links explains what cells lose is not known: {why}"


def _has_different_links(links: object) -> bool:
    return isinstance(links, Mapping) and len({*map(str, links.values())}) > 1
