"""Where the rate goes: the waterfall, and what the strategy costs a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.findings.baselines import WITHOUT, ControlRuns
from analysis.findings.clock_loss import AT_MOST
from analysis.findings.communication import COST
from analysis.findings.communication_parts import SLOWED, TAIL, beyond, observed
from analysis.report.charts import (
    Bar,
    BarGroup,
    WaterfallStep,
    bars_figure,
    truncation_note,
    waterfall_figure,
)
from analysis.report.figure import COLOURS, GREY, HIGHLIGHT, Figure
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import RATE, Section, in_parentheses
from analysis.report.sections.forecasts import CellForecast, study_forecasts
from analysis.report.table import Column, Table, Value, numbers_table
from analysis.study.draws import Step, mean_step, next_run, scaled
from analysis.study.estimates import Estimate, Findings, Waterfall, WaterfallPart
from analysis.study.names import (
    gpu_ids,
    label,
    of_unit,
    ran_alone,
    short_names,
    things_of,
    unit_of,
)
from analysis.study.runs import Runs, median_of
from analysis.study.study import Study
from analysis.text import single_line

TITLE = "Where the rate goes"
MOST_WATERFALLS = 3  # figures
MS = NumberFormat(decimals=2)
GAIN = COLOURS["green"][0]
HATCHES = {GAIN: "////", GREY: "\\\\\\\\"}  # tells them apart in grey

OWN, BOTH = "own work on one GPU", "backward slowed, and own work"
UNEXPLAINED, WHOLE = "not explained", "all that it costs"
MOST_COST_CELLS = 5  # of the figure
PART_LOOKS = {  # colour and hatch, told apart in grey too
    OWN: (COLOURS["sky"][0], ""), BOTH: (COLOURS["orange"][0], "\\\\\\\\"),
    SLOWED: (COLOURS["orange"][0], ""), TAIL: (COLOURS["blue"][0], "////"),
}  # fmt: skip


@dataclass(frozen=True)
class WaterfallRow:
    """A row of a waterfall: a rate between its parts, or a part."""

    fall: Waterfall
    name: str
    rate: Estimate | None = None
    part: WaterfallPart | None = None

    @property
    def change(self) -> Estimate | None:
        """The rate, or what the part adds to it; None: not known."""
        if self.part is None:
            return self.rate
        return scaled(self.part.lost, -1.0) if self.part.lost else None

    @property
    def share(self) -> float | None:
        """The change as a share of the ideal rate."""
        ideal = self.fall.ideal.value
        return self.change.value / ideal if self.change is not None and ideal else None


def waterfall(study: Study, findings: Findings) -> Section | None:
    """Return where the rate goes, part by part, down to the residual.

    One GPU alone loses nothing to others.
    """
    if not study.trains or (study.records and ran_alone(study)):
        return None
    unit, things = unit_of(study), things_of(study)
    names = short_names(dict.fromkeys(fall.label for fall in findings.waterfalls))
    rows = [row for fall in findings.waterfalls for row in waterfall_rows(fall)]
    table = Table.of(
        "waterfall",
        "From the ideal rate to the measured one; parts and residual add up to the "
        f"gap.{in_parentheses(study)}",
        (
            Column("cell", "cell", lambda row: names[row.fall.label]),
            Column("gpus", unit, lambda row: gpu_ids(row.fall.gpus)),
            Column("part", "part", lambda row: of_unit(row.name, unit)),
            Column("images_per_second", f"{things}/s", "change", "rate", True),
            Column("share", "of ideal", "share", "part"),
            Column("ms", "ms of a step", lambda row: row.part and row.part.ms, MS, True),
            Column("why", "note", lambda row: row.part.why if row.part else ""),
        ),
        rows,
    )
    lines = []
    if not rows and (median_of(study.usable, RATE) is not None or not study.usable):
        lines.append("To see where the loss comes from, run with waterfall=true.")
    elif not rows:
        lines.append(f"Not known: no cell that counts measured {things} per second.")
    figures = waterfall_figures(findings.waterfalls, names, unit, things)
    return Section("waterfall", TITLE, tuple(lines), tuple(figures), (table,))


def waterfall_rows(fall: Waterfall) -> list[WaterfallRow]:
    """Return the rows from the top: members alone, the ideal, what is lost, the measured rate."""
    above = [part for part in fall.parts if part.above_ideal]
    spread = [part.lost.value for part in above if part.lost is not None]
    rows = []
    if spread:
        sum_alone = Estimate(fall.ideal.value + sum(spread))
        rows.append(WaterfallRow(fall, "all members alone", sum_alone))
    rows += [WaterfallRow(fall, part.name, part=part) for part in above]
    rows.append(WaterfallRow(fall, f"ideal, {len(fall.gpus)} × slowest", fall.ideal))
    residual = Estimate(fall.residual, fall.residual_low, fall.residual_high)
    below = [part for part in fall.parts if not part.above_ideal]
    below.append(WaterfallPart("residual", residual, "what no part explains"))
    rows += [WaterfallRow(fall, part.name, part=part) for part in below]
    return [*rows, WaterfallRow(fall, "measured", fall.measured)]


def waterfall_figures(
    waterfalls: Sequence[Waterfall], names: Mapping[str, str], unit: str, things: str
) -> Iterator[Figure]:
    """Yield a figure for each waterfall, with a bar for each known part."""
    rate = f"{things.replace(' ', '_')}_per_second"
    for panel, fall in enumerate(waterfalls[:MOST_WATERFALLS], 1):
        slowest = f"{len(fall.gpus)} × the slowest {unit.removesuffix('s')} alone"
        subject = f"{single_line(names[fall.label])}, {unit} {gpu_ids(fall.gpus)}"
        caption = f"{subject}: from {slowest} to the measured rate. The axis does not begin at 0."
        if any(_is_insignificant(part) for part in fall.parts):
            caption += " Pale: not told apart from 0."
        if panel == MOST_WATERFALLS:
            caption += truncation_note(
                waterfalls, MOST_WATERFALLS, "more waterfall", "waterfall.csv"
            )
        rows = waterfall_rows(fall)
        steps = [_step(row, fall.ideal.value, unit) for row in rows]
        data = [(row.name, row.part.lost if row.part else None, row.rate) for row in rows]
        keys = ("part", f"lost_{rate}", rate)
        yield waterfall_figure(
            f"waterfall-{panel}",
            caption,
            steps,
            fall.ideal.value,
            f"{things}/s",
            numbers_table(keys, data),
        )


def _step(row: WaterfallRow, ideal: float, unit: str) -> WaterfallStep:
    name = of_unit(single_line(row.name, 34), unit)
    if row.part is None:
        return WaterfallStep(
            name, level=row.rate, text=number(row.rate.value if row.rate else None, "rate")
        )
    if row.part.lost is None:
        return WaterfallStep(name, text="not known")
    lost = row.part.lost.value
    text = number(abs(lost), "rate")
    if lost:
        text = ("−" if lost > 0 else "+") + text
    if ideal:
        text += f" ({number(abs(lost) / ideal, 'share')})"
    colour = HIGHLIGHT if lost >= 0 else GAIN
    if row.part.name == "residual":
        colour = GREY
    return WaterfallStep(
        name,
        None,
        row.part.lost,
        text,
        colour,
        HATCHES.get(colour, ""),
        _is_insignificant(row.part),
    )


def _is_insignificant(part: WaterfallPart) -> bool:
    """Return whether an interval holds 0, or whether only a bound is known."""
    if part.why == AT_MOST:
        return True
    if part.lost is None or part.lost.low is None or part.lost.high is None:
        return False
    return part.lost.low <= 0 <= part.lost.high


# ---- What the strategy costs a step -------------------------------------------------------------


@dataclass(frozen=True)
class CostParts:
    """One cell: {part: ms} as measured and as modelled; a part that is not known is absent."""

    name: str
    gpus: str
    measured: Mapping[str, Estimate]
    modelled: Mapping[str, float]
    made: str  # how the model came to them


def cost_parts(study: Study, findings: Findings) -> Section | None:
    """Return the costs of each cell on several GPUs in parts; None where none are known.

    Measured parts come from observed steps, modelled ones from the cell's forecast. Neither is made
    to add up.
    """
    controls, forecasts = ControlRuns(study), study_forecasts(study)
    cells = []
    for runs in study.timed:
        if runs.world_size > 1 and runs.strategy != WITHOUT and runs.difference(COST):
            cells.append(runs)
    names = short_names(dict.fromkeys(label(study, runs) for runs in cells))
    costs = []
    for runs in cells:
        measured = _measured_parts(runs, [*controls.alone(runs).values()])
        ids = [record.record_id for record in runs.records]
        modelled = forecasts.of(ids)
        if modelled:
            parts = _modelled_parts(modelled, BOTH in measured)
            costs.append(
                CostParts(
                    names[label(study, runs)], gpu_ids(runs.gpus), measured, parts, modelled.made
                )
            )
        elif len(measured) > 1:
            costs.append(CostParts(names[label(study, runs)], gpu_ids(runs.gpus), measured, {}, ""))
    if not any(TAIL in cost.measured or TAIL in cost.modelled for cost in costs):
        return None  # the waterfall says as much
    ways = list({cost.made for cost in costs if cost.modelled})
    how = "Modelled: from its forecast. " if ways else ""
    if len(ways) == 1:
        how = f"Every cell is modelled {ways[0]}. "
    table = Table.of(
        "cost_parts",
        "What the strategy adds to a step, in ms. Measured parts are from steps that were observed "
        "with the exchange and without "
        "it; what one GPU takes too is own work. “All that it costs” is from steps with and "
        "without the strategy in turn. "
        f"{how}Parts need not add up: the rest is unexplained.",
        (
            Column("cell", "cell"),
            Column("gpus", unit_of(study)),
            Column("part", "part"),
            Column("measured_ms", "measured ms", kind=MS, bounded=True),
            Column("modelled_ms", "modelled ms", kind=MS),
            Column("modelled_from", "modelled how", shown=len(ways) > 1),
        ),
        _part_rows(costs),
    )
    return Section("waterfall", TITLE, (), (cost_figure(costs, unit_of(study)),), (table,))


def _measured_parts(runs: Runs, alone: Sequence[Runs]) -> dict[str, Estimate]:
    """Return the measured parts; own work apart where the steps of one GPU were observed too."""
    whole, seen = runs.step(COST), observed(runs)
    assert whole is not None  # only such cells are asked
    costs_alone = [single.step(COST) for single in alone]
    own = mean_step([step for step in costs_alone if step is not None])
    seen_alone = [single for single in map(observed, alone) if single is not None]
    parts: dict[str, Step] = {}
    if seen and seen_alone and own:
        parts[OWN] = own
        parts[SLOWED] = beyond(seen.slowed, [single.slowed for single in seen_alone])
        parts[TAIL] = beyond(seen.tail, [single.tail for single in seen_alone])
    elif seen:
        parts = {BOTH: seen.slowed + seen.after, TAIL: seen.tail}
    elif own:
        parts = {OWN: own}
    rest = whole
    for step in parts.values():
        rest = rest - step
    if parts:
        parts[UNEXPLAINED] = rest
    parts[WHOLE] = whole
    return {name: next_run(step.ms, step.draws, float("inf")) for name, step in parts.items()}


def _modelled_parts(forecast: CellForecast, both: bool) -> dict[str, float]:
    """Return the modelled parts; `both`: slower backward and own work are one part."""
    own, slowed = forecast.ms("own_work_ms"), forecast.ms("contention_ms")
    parts = {
        TAIL: forecast.ms("tail_ms"),
        WHOLE: forecast.ms("cost_ms"),
    }
    if both:
        parts[BOTH] = None if own is None or slowed is None else own + slowed
    else:
        parts |= {OWN: own, SLOWED: slowed}
    return {name: ms for name, ms in parts.items() if ms is not None}


def _part_rows(costs: Sequence[CostParts]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for cost in costs:
        for part in (*PART_LOOKS, UNEXPLAINED, WHOLE):
            if part in cost.measured or part in cost.modelled:
                row: dict[str, Value] = {"cell": cost.name, "gpus": cost.gpus, "part": part}
                row["measured_ms"] = cost.measured.get(part)
                row["modelled_ms"] = cost.modelled.get(part)
                row["modelled_from"] = cost.made if part in cost.modelled else ""
                rows.append(row)
    return rows


def cost_figure(costs: Sequence[CostParts], unit: str) -> Figure:
    """Return a bar of measured parts for each of the first cells, and one of modelled parts."""
    shown = sorted(costs, key=lambda cost: TAIL not in cost.measured)[:MOST_COST_CELLS]
    groups = []
    for cost in shown:
        whole = cost.measured.get(WHOLE)
        measured = {
            of_unit(part, unit): ms.value
            for part, ms in cost.measured.items()
            if part in PART_LOOKS
        }
        bars = [
            Bar(
                measured,
                "measured",
                whole,
                number(whole.value if whole else sum(measured.values()), MS),
            )
        ]
        if cost.modelled:
            modelled = {
                of_unit(part, unit): ms for part, ms in cost.modelled.items() if part in PART_LOOKS
            }
            modelled_ms = cost.modelled.get(WHOLE)
            end = (
                sum(ms for ms in modelled.values() if ms > 0)
                if modelled_ms is None
                else modelled_ms
            )
            diamond = None if modelled_ms is None else Estimate(modelled_ms)
            bars.append(Bar(modelled, "modelled", diamond, number(end, MS)))
        groups.append(BarGroup(f"{cost.name}, {unit} {cost.gpus}", "", bars))
    keys = ("cell", "gpus", "part", "measured_ms", "modelled_ms")
    rows = [[row[key] for key in keys] for row in _part_rows(shown)]
    return bars_figure(
        "cost-parts",
        "What the strategy adds to a step, in parts. Diamonds: all that it costs, from steps with "
        "and without it in turn. What "
        "lies between the end of a bar and its diamond is not explained."
        f"{truncation_note(costs, len(shown), 'more cell', 'cost_parts.csv')}",
        groups,
        {of_unit(part, unit): look for part, look in PART_LOOKS.items()},
        "ms of a step",
        numbers_table(keys, rows),
    )
