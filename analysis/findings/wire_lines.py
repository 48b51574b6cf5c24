"""What cells lose, against how long their exchange takes alone: a line for every mechanism.

METHOD.md, "Links and lost time". A mechanism is everything asked but the GPUs and NCCL's settings:
only within one does the same share of the exchange hide behind compute.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.baselines import WITHOUT
from analysis.findings.communication import COST, EXCHANGE, EXPOSED, Communication
from analysis.study import names as labels
from analysis.study.conditions import OF_LINKS, irrelevant_to_curves, is_among
from analysis.study.intervals import LEVEL, Estimate, quantile
from analysis.study.runs import Key, Runs
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
    """Return the line through (x, y); None for fewer than three points or equal x."""
    if len(points) < 3:
        return None
    xs, ys = zip(*points, strict=True)
    middle, mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    of_x, of_y, of_both = [], [], []
    for x, y in points:
        of_x.append((x - middle) ** 2)
        of_y.append((y - mean) ** 2)
        of_both.append((x - middle) * (y - mean))
    spread, total = math.fsum(of_x), math.fsum(of_y)
    if spread <= (ROUNDING * middle) ** 2:
        return None
    slope = math.fsum(of_both) / spread
    fixed = mean - slope * middle
    residuals = math.fsum((y - fixed - slope * x) ** 2 for x, y in points)
    least = ROUNDING * max(map(abs, ys))
    deviation = max(math.sqrt(residuals / (len(points) - 2)), least)
    r_squared = 1 - residuals / total if total > least**2 else 0.0
    return Fit(fixed, slope, len(points), middle, spread, deviation, r_squared)


@dataclass(frozen=True)
class _Cell:
    runs: Runs
    wire_ms: float | None  # of its exchange alone
    cost_ms: float | None  # of the strategy in a step
    exposed_ms: float | None


def wire_lines(
    study: Study, communication: Sequence[Communication]
) -> tuple[tuple[WireLine, ...], dict[str, str]]:
    """Return the lines of a study; without any, {what is missing: the option that adds it}."""
    exposed_of = {each.record_ids[0]: each.exposed_ms for each in communication}
    mechanisms: dict[Any, list[_Cell]] = defaultdict(list)
    for runs in study.timed:
        if runs.cell.world_size > 1 and runs.strategy != WITHOUT:
            wire_ms = runs.median(EXCHANGE) if runs.median(BUSBW) else None
            exposed_ms = exposed_of.get(runs.records[0].record_id)
            condition = study.condition(runs, (*SETTINGS, *irrelevant_to_curves(runs.strong)))
            mechanisms[condition].append(_Cell(runs, wire_ms, runs.median(COST), exposed_ms))
    chosen = []
    for mechanism in mechanisms.values():
        cells, times = [], []
        for cell in mechanism:
            if cell.wire_ms and cell.cost_ms is not None:
                cells.append(cell)
                times.append(cell.wire_ms)
        if len(cells) >= FEWEST and max(times) >= SPREAD * min(times):
            chosen.append(cells)
    if mechanisms and not chosen:
        return (), _missing(list(mechanisms.values()))
    # All cells of all lines are one family.
    level = 1 - (1 - LEVEL) / max(1, sum(map(len, chosen)))
    return tuple(_line(study, cells, level) for cells in chosen), {}


def _line(study: Study, cells: Sequence[_Cell], level: float) -> WireLine:
    costs, exposed = [], []
    for cell in cells:
        costs.append((cell.wire_ms or 0.0, cell.cost_ms or 0.0))
        if cell.exposed_ms is not None:
            exposed.append((cell.wire_ms or 0.0, cell.exposed_ms))
    pairs, quantity = costs, COST
    if len(exposed) == len(cells):
        pairs, quantity = exposed, EXPOSED
    line = fit(pairs)
    assert line is not None  # their times differ
    fixed_ms = line.fixed_estimate()
    if quantity == EXPOSED:
        fixed_ms = Estimate(line.fixed)  # that of all cells shares an error of one GPU
    varied = [name for name in study.varied if is_among(name, SETTINGS)]
    points = []
    for index, cell in enumerate(cells):
        # Each is judged by the line through all others.
        through = fit([*pairs[:index], *pairs[index + 1 :]]) or line
        wire_ms, lost_ms = pairs[index]
        expected = through.expected(wire_ms, level)
        words = [labels.gpu_ids(cell.runs.gpus)]
        for name in varied:
            if name in cell.runs.request:
                words.append(labels.format_option(name, cell.runs.request[name]))
        point = WirePoint(
            gpus=cell.runs.gpus,
            key=cell.runs.key,
            label=labels.BETWEEN.join(words),
            gb_per_s=cell.runs.median(BUSBW) or 0.0,
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
    first = cells[0].runs
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


def _missing(mechanisms: Sequence[Sequence[_Cell]]) -> dict[str, str]:
    """Return {what the mechanism with most measured cells lacks: the option that adds it}."""
    measured: list[_Cell] = []
    runs = mechanisms[0][0].runs
    for cells in mechanisms:
        with_exchange = [cell for cell in cells if cell.wire_ms is not None]
        if len(with_exchange) > len(measured):
            measured, runs = with_exchange, cells[0].runs
    if runs.cell.device != "cuda":
        return {}
    option, needed = (
        "nccl.max_nchannels=1,2,4,8",
        f"needs {FEWEST} configurations with different GB/s",
    )
    links = runs.records[0].environment.get("links", {})
    if len({*links.values()}) > 1:
        option = "gpus=classes"
    if not measured:
        why, option = "no run measured its exchange", ""
    elif all(cell.cost_ms is None for cell in measured):
        why, option = f"no run measured the overhead of {runs.strategy}", ""
    elif len(measured) < FEWEST:
        why = f"{needed}; {runs.strategy} has {len(measured)}"
    else:
        speeds = [cell.runs.median(BUSBW) or 0.0 for cell in measured]
        ends = f"{min(speeds):.0f} to {max(speeds):.0f} GB/s"
        why = f"{needed}; all exchanges of {runs.strategy} are equally fast ({ends})"
    return {f"Does link speed explain the loss? {why[0].upper()}{why[1:]}": option}
