"""The first screen of a report of several studies: the rates, the efficiencies, what the runs show, what differs."""

from collections import Counter
from collections.abc import Mapping, Sequence

from analysis.findings.between_studies import (
    EQUAL,
    FASTER,
    SLOWER,
    UNKNOWN,
    CellDifference,
    CellOnSide,
    SharedCell,
    Side,
    differing,
    in_turn,
)
from analysis.report.numbers import estimate, number
from analysis.report.several.cells import with_unit
from analysis.report.several.scaling import SharedCurve
from analysis.study.names import legend_names, unit_of
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.text import count, join_words, single_line

FACTS = 5  # that differ, named in the sentence
NAMED = 3  # sides, each with its number
NAME_LENGTH = 60  # characters
INSIDE = "the intervals hold what differs between runs inside each study"
NOT_IN_TURN = f"They were not measured in turn, so what changes on a machine between sweeps would look the same; {INSIDE}."
IN_TURN = f"They were measured in turn; {INSIDE}."


def sentences(
    sides: Sequence[Side], shared: Sequence[SharedCell], curves: Sequence[SharedCurve]
) -> list[str]:
    """Return at most five sentences."""
    names = legend_names([side.name for side in sides], NAME_LENGTH)  # the title has them whole
    said = [
        _rates(shared, names)
        if shared
        else "No cell was measured by two of them, so no rates are compared."
    ]
    said += [_efficiency(curves, names)] if curves else []
    return [
        single_line(one, 700) for one in [*said, *_verdicts(sides, shared, names), _differs(sides)]
    ]


def _rates(shared: Sequence[SharedCell], names: Mapping[str, str]) -> str:
    """Return the rates of the largest shared cell that exchanges."""

    def merit(cell: SharedCell) -> tuple[bool, bool, int, int]:
        strategy = cell.places[0].runs.strategy
        return (
            cell.metric == IMAGES_PER_SECOND,
            strategy != "none",
            len(cell.places),
            len(cell.gpus),
        )

    cell = max(shared, key=merit)
    each = [
        (names[one.side.name], with_unit(cell, value))
        for one in cell.places
        if (value := _value(one, cell.metric))
    ]
    more = (
        f" {count(len(shared) - 1, 'more cell')} stand{'s' * (len(shared) == 2)} below."
        if len(shared) > 1
        else ""
    )
    return f"{cell.name}: {_on_each(each)}.{more}"


def _on_each(values: Sequence[tuple[str, str]]) -> str:
    """Return `4,697 images/s on A and 4,679 images/s on B`."""
    each = [f"{value} on {name}" for name, value in values[:NAMED]]
    return join_words(each) + (f" and {len(values) - NAMED} more" if len(values) > NAMED else "")


def _value(one: CellOnSide, metric: str) -> float | None:
    return one.numbers[metric].plain if metric in one.numbers else None


def _efficiency(curves: Sequence[SharedCurve], names: Mapping[str, str]) -> str:
    """Return the efficiency of each side on its most GPUs, of the curve that most sides have."""
    curve = max(curves, key=lambda one: ("none" not in one.name.split(" · "), len(one.places)))
    each = []
    for side, one in curve.places:
        point = max((p for p in one.points if p.efficiency), key=lambda p: p.world_size)
        value = (
            f"{estimate(point.efficiency, 'share')} with {point.world_size} {unit_of(side.study)}"
        )
        each.append((names[side.name], value))
    return f"Efficiency of {curve.name}: {_on_each(each)}."


def _verdicts(
    sides: Sequence[Side], shared: Sequence[SharedCell], names: Mapping[str, str]
) -> list[str]:
    """Return what the runs show, and what that may claim."""
    judged = [one.against for cell in shared for one in cell.places if one.against is not None]
    counts = Counter(one.verdict for one in judged)
    if not judged:
        return []
    if counts[UNKNOWN] == len(judged):
        return [
            "Whether these differences are more than chance cannot be told: too few runs (add repeats=3)."
        ]
    first = {names[cell.places[0].side.name] for cell in shared}
    against = f"Against {first.pop()}" if len(first) == 1 else "Against the first that has the cell"
    words = [
        f"{word} in {counts[word]:,}{_range([one for one in judged if one.verdict == word])}"
        for word in (FASTER, SLOWER, EQUAL, UNKNOWN) if counts[word]
    ]  # fmt: skip
    return [
        f"{against}, {count(len(judged), 'cell')}: {', '.join(words)}.",
        IN_TURN if in_turn(sides[:1], sides[1:]) else NOT_IN_TURN,
    ]


def _range(alike: Sequence[CellDifference]) -> str:
    """Return ` (−0.84 % to −0.27 %)`, the changes of cells that are faster or slower; empty for other verdicts."""
    changes = sorted(
        one.change.value for one in alike if one.change and one.verdict in (FASTER, SLOWER)
    )
    ends = (
        [number(one, "change") for one in dict.fromkeys((changes[0], changes[-1]))]
        if changes
        else []
    )
    return f" ({' to '.join(ends)})" if ends else ""


def _differs(sides: Sequence[Side]) -> str:
    apart, _ = differing(sides)
    facts = [
        f"{name} ({join_words([*dict.fromkeys(values)], NAMED)})" for name, values in apart.items()
    ]
    return (
        f"What differs: {'; '.join(facts[:FACTS])}."
        if facts
        else "The records tell of no difference between the machines."
    )
