"""What cells lose, against how long their exchange takes alone: a line for every mechanism.

METHOD.md, "Links and lost time". A mechanism is everything asked but the GPUs and NCCL's settings:
only within one does the same share of the exchange hide behind compute.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from analysis.findings.baselines import WITHOUT
from analysis.findings.communication import COST, EXCHANGE, EXPOSED, Communication
from analysis.study import names as labels
from analysis.study.conditions import OF_LINKS, irrelevant_to_curves, is_among
from analysis.study.intervals import LEVEL, Estimate, quantile
from analysis.study.runs import Key, Runs, grouped
from analysis.study.study import Study
from conf.cell import Member

BUSBW = "comm/busbw_gb_per_s"
FEWEST = 4  # cells of a line
SPREAD = 1.2  # the slowest exchange of a line must take this many times as long as the fastest
SIMILAR = 1.1  # below this ratio two times are one
SETTINGS = (*OF_LINKS, "NCCL_")  # they change the wires or their use, not the mechanism
ROUNDING = 1e-6  # of the largest value: residuals below it are rounding


@dataclass(frozen=True)
class WirePoint:
    """One cell beside the line of its mechanism."""

    gpus: tuple[Member, ...]
    key: Key
    label: str  # its GPUs, and NCCL's settings where they vary
    gb_per_s: float  # busbw of the exchange alone
    wire_ms: float  # of the exchange alone
    lost_ms: float  # per step
    # By the line through the others; all cells of a study lie inside in 19 of 20 studies.
    expected_ms: Estimate
    residual_ms: float  # lost − expected


@dataclass(frozen=True)
class WireLine:
    """What the cells of one mechanism lose per step: fixed + share · ms of the exchange alone.

    `fixed_ms` has no interval where it is the difference to one GPU, whose error all cells share.
    """

    label: str
    strategy: str
    key: Key  # of the first cell
    quantity: str  # the metric that says what is lost: comm/exposed_ms or strategy/cost_ms
    fixed_ms: Estimate  # lost whatever the wires
    share: Estimate  # of the time on the wires that compute does not hide
    r_squared: float
    deviation_ms: float  # of the residuals
    points: tuple[WirePoint, ...]  # fastest wires first
    speeds: int  # different times on the wires among the cells


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

    def expected(self, x: float, level: float = LEVEL, further: float = 1) -> Estimate:
        """Return the line's value at x with the interval of a further point, or its own with 0."""
        leverage = 1 / self.count + (x - self.middle) ** 2 / self.spread
        return self._estimate(self.fixed + self.slope * x, math.sqrt(further + leverage), level)

    def slope_estimate(self) -> Estimate:
        """Return the slope with its interval."""
        return self._estimate(self.slope, 1 / math.sqrt(self.spread), LEVEL)

    def _estimate(self, value: float, errors: float, level: float) -> Estimate:
        half = quantile(self.count - 2, level) * self.deviation * errors
        return Estimate(value, value - half, value + half)


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Return the line through (x, y); None for fewer than three points or equal x."""
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    x_apart, y_apart = x - x.mean(), y - y.mean()
    spread, total = float(x_apart @ x_apart), float(y_apart @ y_apart)
    if spread <= (ROUNDING * x.mean()) ** 2:
        return None
    slope = float(x_apart @ y_apart) / spread
    fixed = float(y.mean() - slope * x.mean())
    residuals = float(((y - fixed - slope * x) ** 2).sum())
    least = ROUNDING * float(abs(y).max())
    deviation = max(math.sqrt(residuals / (len(points) - 2)), least)
    r_squared = 1 - residuals / total if total > least**2 else 0.0
    return Fit(fixed, slope, len(points), float(x.mean()), spread, deviation, r_squared)


def wire_lines(
    study: Study, communication: Sequence[Communication]
) -> tuple[tuple[WireLine, ...], dict[str, str]]:
    """Return the lines of a study; without any, {what is missing: the option that adds it}."""
    exposed_ms = {cell.record_ids: cell.exposed_ms for cell in communication}
    exchanging = []
    for runs in study.timed:
        if runs.cell.world_size > 1 and runs.strategy != WITHOUT:
            exchanging.append(runs)
    mechanisms = grouped(
        exchanging,
        lambda runs: study.condition(runs, (*SETTINGS, *irrelevant_to_curves(runs.strong))),
    )
    chosen = []
    for mechanism in mechanisms.values():
        cells, times = [], []
        for runs in mechanism:
            if _wire_ms(runs) and runs.median(COST) is not None:
                cells.append(runs)
                times.append(_wire_ms(runs))
        if len(cells) >= FEWEST and max(times) >= SPREAD * min(times):
            chosen.append(cells)
    if mechanisms and not chosen:
        return (), _missing(list(mechanisms.values()))
    # All cells of all lines are one family.
    level = 1 - (1 - LEVEL) / max(1, sum(map(len, chosen)))
    return tuple(_line(study, cells, exposed_ms, level) for cells in chosen), {}


def _wire_ms(runs: Runs) -> float:
    """Return the time of the exchange alone; 0: not measured."""
    if not runs.median(BUSBW):
        return 0.0
    return runs.median(EXCHANGE) or 0.0


def _line(
    study: Study,
    cells: Sequence[Runs],
    exposed_ms: Mapping[tuple[str, ...], float | None],
    level: float,
) -> WireLine:
    quantity, of_cells = EXPOSED, [exposed_ms.get(runs.record_ids) for runs in cells]
    if None in of_cells:
        quantity, of_cells = COST, [runs.median(COST) for runs in cells]
    pairs = [(_wire_ms(runs), ms or 0.0) for runs, ms in zip(cells, of_cells, strict=True)]
    line = fit(pairs)
    assert line is not None  # their times differ
    fixed_ms = line.expected(0, further=0)
    if quantity == EXPOSED:
        fixed_ms = Estimate(line.fixed)  # that of all cells shares an error of one GPU
    varied = [name for name in study.varied if is_among(name, SETTINGS)]
    points = []
    for index, runs in enumerate(cells):
        # Each is judged by the line through all others.
        through = fit([*pairs[:index], *pairs[index + 1 :]]) or line
        wire_ms, lost_ms = pairs[index]
        expected = through.expected(wire_ms, level)
        words = [labels.gpu_ids(runs.gpus)]
        for name in varied:
            if name in runs.request:
                words.append(labels.format_option(name, runs.request[name]))
        point = WirePoint(
            gpus=runs.gpus,
            key=runs.key,
            label=labels.BETWEEN.join(words),
            gb_per_s=runs.median(BUSBW) or 0.0,
            wire_ms=wire_ms,
            lost_ms=lost_ms,
            expected_ms=expected,
            residual_ms=lost_ms - expected.value,
        )
        points.append(point)
    speeds, fastest = 0, 0.0
    for time, _ in sorted(pairs):
        if not speeds or time > SIMILAR * fastest:
            speeds, fastest = speeds + 1, time
    first = cells[0]
    return WireLine(
        label=labels.label(study, first, ["benchmark.name", *varied]),
        strategy=first.strategy,
        key=first.key,
        quantity=quantity,
        fixed_ms=fixed_ms,
        share=line.slope_estimate(),
        r_squared=line.r_squared,
        deviation_ms=line.deviation,
        points=tuple(sorted(points, key=lambda point: (point.wire_ms, point.gpus, point.label))),
        speeds=speeds,
    )


def _missing(mechanisms: Sequence[Sequence[Runs]]) -> dict[str, str]:
    """Return {what the mechanism with most measured cells lacks: the option that adds it}."""
    measured: list[Runs] = []
    runs = mechanisms[0][0]
    for cells in mechanisms:
        with_exchange = list(filter(_wire_ms, cells))
        if len(with_exchange) > len(measured):
            measured, runs = with_exchange, cells[0]
    if runs.cell.device != "cuda":
        return {}
    option = "nccl.max_nchannels=1,2,4,8"
    needed = f"needs {FEWEST} configurations with different GB/s"
    links = runs.records[0].environment.get("links", {})
    if len({*links.values()}) > 1:
        option = "gpus=classes"
    if not measured:
        why, option = "no run measured its exchange", ""
    elif all(cell.median(COST) is None for cell in measured):
        why, option = f"no run measured the overhead of {runs.strategy}", ""
    elif len(measured) < FEWEST:
        why = f"{needed}; {runs.strategy} has {len(measured)}"
    else:
        speeds = [cell.median(BUSBW) or 0.0 for cell in measured]
        ends = f"{min(speeds):.0f} to {max(speeds):.0f} GB/s"
        why = f"{needed}; all exchanges of {runs.strategy} are equally fast ({ends})"
    return {f"Does link speed explain the loss? {why[0].upper()}{why[1:]}": option}
