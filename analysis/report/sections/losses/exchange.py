"""What the strategy costs a step, part by part, as measured and as modelled: table and figure.

Measured parts come from observed steps, modelled ones from the cell's forecast. Neither is made to add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.findings.communication import COST
from analysis.findings.control_cells import WITHOUT, ControlRuns
from analysis.findings.step_differences import Step, mean_step, step_of
from analysis.findings.waterfall import SLOWED, TAIL, beyond, observed
from analysis.report.figures import REST, bare, more_in, text_right_of
from analysis.report.numbers import NumberFormat, number
from analysis.report.section import Section
from analysis.report.sections.forecasts.known import CellForecast, known, of_own_parts
from analysis.report.style import (
    COLOURS,
    HATCH,
    INK,
    MUTED,
    Picture,
    drawn,
    figure_width,
    for_width,
    new_figure,
    rendered,
)
from analysis.report.tables import Column, Table, Value
from analysis.study import names as labels
from analysis.study.draws import next_run
from analysis.study.estimates import Estimate, Findings
from analysis.study.names import gpu_ids, short_names, unit_of
from analysis.study.names import names_of_unit as of_unit
from analysis.study.study import Runs, Study
from analysis.text import single_line

OWN, BOTH, WAITING = (
    "own work on one GPU",
    "backward slowed, and own work",
    "waiting for slower ranks",
)
UNEXPLAINED, WHOLE = "not explained", "all that it costs"
OWN_TABLES = "by its own buckets, collectives and γ"
FIGURE_CELLS = 5
KEY_IN = 0.75  # height of the key in one column
MS = NumberFormat(decimals=2)
LOOKS = {  # colour and hatch, told apart in grey too
    OWN: (COLOURS["sky"][0], ""), BOTH: (COLOURS["orange"][0], "\\\\\\\\"), SLOWED: (COLOURS["orange"][0], ""),
    TAIL: (COLOURS["blue"][0], "////"), WAITING: (COLOURS["purple"][0], ""), UNEXPLAINED: (REST, ""),
}  # fmt: skip


@dataclass(frozen=True)
class CostParts:
    """One cell: {part: ms} as measured and as modelled; a part that is not known is absent."""

    name: str
    gpus: str
    measured: Mapping[str, Estimate]
    modelled: Mapping[str, float]
    made: str  # how the model came to them


def cost_parts(study: Study, findings: Findings) -> Section | None:
    """Return the costs of each cell on several GPUs in parts; None where no cell's are known, measured or modelled."""
    controls, forecasts = ControlRuns(study), known(study)
    cells = [
        runs
        for runs in study.timed
        if runs.world_size > 1 and runs.strategy != WITHOUT and runs.difference(COST)
    ]
    names = short_names(dict.fromkeys(labels.label(study, runs) for runs in cells))
    found = []
    for runs in cells:
        measured = _measured(
            runs, [one for gpu, one in controls.alone(runs).items() if gpu in runs.gpus]
        )
        ids = [record.record_id for record in runs.records]
        own_parts = of_own_parts(forecasts, ids)
        modelled = own_parts or forecasts.of(ids)
        if len(measured) > 1 or modelled:
            parts = _modelled(modelled, BOTH in measured) if modelled else {}
            made = OWN_TABLES if own_parts else modelled.made if modelled else ""
            found.append(
                CostParts(
                    names[labels.label(study, runs)], gpu_ids(runs.gpus), measured, parts, made
                )
            )
    if not any(TAIL in one.measured or TAIL in one.modelled for one in found):
        return None  # the waterfall says as much
    ways = [*{one.made for one in found if one.modelled}]
    several = "Modelled: from its own buckets, else from its forecast. " if ways else ""
    how = f"Every cell is modelled {ways[0]}. " if len(ways) == 1 else several
    table = Table(
        "cost_parts",
        "What the strategy adds to a step, in ms. Measured parts are from steps that were observed with the exchange and without "
        "it; what one GPU takes too is own work. “All that it costs” is from steps with and without the strategy in turn. "
        f"{how}Parts need not add up: the rest is unexplained.",
        (
            Column("cell", "cell"), Column("gpus", unit_of(study)), Column("part", "part"),
            Column("measured_ms", "measured ms", MS, True), Column("modelled_ms", "modelled ms", MS),
            Column("modelled_from", "modelled how", shown=len(ways) > 1),
        ),
        tuple(_rows(found)),
    )  # fmt: skip
    return Section(
        "waterfall",
        "Where the rate goes",
        (),
        (_figure(found, unit_of(study)),),
        (table,),
        place=22,
    )


def _measured(runs: Runs, alone: Sequence[Runs]) -> dict[str, Estimate]:
    """Return the measured parts; own work apart where the steps of one GPU were observed too."""
    whole, seen = step_of(runs, COST), observed(runs)
    assert whole is not None  # only such cells are asked
    own = mean_step([step for one in alone if (step := step_of(one, COST)) is not None])
    of_one = [found for one in alone if (found := observed(one)) is not None]
    parts: dict[str, Step] = {}
    if seen and of_one and own:
        slowed = beyond(seen.slowed, [one.slowed for one in of_one])
        parts = {OWN: own, SLOWED: slowed, TAIL: beyond(seen.tail, [one.tail for one in of_one])}
    elif seen:
        parts = {BOTH: seen.slowed + seen.after, TAIL: seen.tail}
    elif own:
        parts = {OWN: own}
    rest = whole
    for step in parts.values():
        rest = rest - step
    every = {**parts, **({UNEXPLAINED: rest} if parts else {}), WHOLE: whole}
    return {name: next_run(step.ms, step.draws, float("inf")) for name, step in every.items()}


def _modelled(found: CellForecast, both: bool) -> dict[str, float]:
    """Return the modelled parts; `both`: slower backward and own work are not told apart."""
    own, slowed = found.own_work_ms, found.contention_ms
    together = None if own is None or slowed is None else own + slowed
    parts = {TAIL: found.tail_ms, WAITING: found.waiting_ms, WHOLE: found.cost_ms}
    parts |= {BOTH: together} if both else {OWN: own, SLOWED: slowed}
    return {name: ms for name, ms in parts.items() if ms is not None}


def _rows(found: Iterable[CostParts]) -> Iterable[tuple[Value, ...]]:
    for one in found:
        for name in (OWN, BOTH, SLOWED, TAIL, WAITING, UNEXPLAINED, WHOLE):
            if name in one.measured or name in one.modelled:
                made = one.made if name in one.modelled else ""
                yield (
                    one.name,
                    one.gpus,
                    name,
                    one.measured.get(name),
                    one.modelled.get(name),
                    made,
                )


def _figure(found: Sequence[CostParts], unit: str) -> Picture:
    """Return the figure of the first cells: a bar of measured parts, and below it one of modelled parts."""
    shown = sorted(found, key=lambda one: TAIL not in one.measured)[:FIGURE_CELLS]
    figure, axes = new_figure(
        figure_width(), KEY_IN / max(1, for_width(2)) + 0.45 + 0.62 * len(shown)
    )
    ticks = []
    for place, one in enumerate(shown):
        y = 3.0 * place
        axes.text(
            0.0, y - 0.85, single_line(f"{one.name}, {unit} {one.gpus}", for_width(54)),
            transform=axes.get_yaxis_transform(), va="center", fontsize=8,
        )  # fmt: skip
        measured = {name: part.value for name, part in one.measured.items()}
        _bar(axes, y, measured, one.measured.get(WHOLE))
        ticks.append((y, "measured"))
        if one.modelled:
            whole = one.modelled.get(WHOLE)
            _bar(axes, y + 0.95, one.modelled, None if whole is None else Estimate(whole))
            ticks.append((y + 0.95, "modelled"))
    axes.set_ylim(3.0 * len(shown) - 1.4, -1.4)
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axes.set_xlabel("ms of a step")
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    bare(axes)
    _key(
        axes,
        [
            name
            for name in LOOKS
            if any(name in one.measured or name in one.modelled for one in shown)
        ],
        unit,
    )
    keys = ("cell", "gpus", "part", "measured_ms", "modelled_ms")
    rows = [row[:5] for row in _rows(shown)]
    return rendered(
        figure, "cost-parts",
        "What the strategy adds to a step, in parts. Diamonds: all that it costs, from steps with and without it in turn. What "
        "lies between the end of a bar and its diamond is not explained."
        f"{more_in(found, len(shown), 'more cell', 'cost_parts.csv')}",
        drawn(keys, rows),
    )  # fmt: skip


def _bar(axes: Any, y: float, parts: Mapping[str, float], whole: Estimate | None) -> None:
    """Draw the parts one after the other, from 0; what is left out or below 0 takes no room."""
    at = 0.0
    for name, (colour, hatch) in LOOKS.items():
        ms = parts.get(name, 0.0)
        if ms > 0 and name != UNEXPLAINED:
            axes.barh(
                y,
                ms,
                left=at,
                height=0.72,
                color=colour,
                hatch=hatch,
                edgecolor=HATCH,
                lw=0,
                zorder=2,
            )
            at += ms
    if whole is not None:
        if whole.low is not None and whole.high is not None:
            axes.plot([whole.low, whole.high], [y, y], color=INK, lw=1.0, zorder=3)
        axes.plot(whole.value, y, "D", color=INK, markersize=4.5, zorder=4)
    end = max(at, (whole.high or whole.value) if whole else 0.0)
    text_right_of(axes, end, y, number(whole.value if whole else at, MS))


def _key(axes: Any, names: Sequence[str], unit: str) -> None:
    """Write what the colours are, above the bars."""
    from matplotlib.patches import Patch

    patches = [
        Patch(
            facecolor=LOOKS[name][0],
            hatch=LOOKS[name][1],
            edgecolor=HATCH,
            lw=0,
            label=of_unit(name, unit),
        )
        for name in names
        if name != UNEXPLAINED
    ]
    axes.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(-0.2, 1.0), ncols=max(1, for_width(2)), frameon=False, fontsize=8,
        handlelength=1.2, columnspacing=1.4, labelcolor=MUTED, borderaxespad=0.2,
    )  # fmt: skip


SECTIONS = (cost_parts,)
