"""How sides look: a colour and a marker of their own in every figure, and a short name."""

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.findings.between_studies import Side
from analysis.report.style import COLOURS, MARKERS
from analysis.study.names import legend_names

_ORDER = ("blue", "vermillion", "green", "purple", "orange", "sky", "brown", "grey")
LEGEND_LENGTH = 24  # characters


@dataclass(frozen=True)
class Look:
    """How one side is drawn."""

    name: str  # without what all sides share
    colour: str
    marker: str


def looks(sides: Sequence[Side]) -> dict[str, Look]:
    """Return {name of a side: how it looks}."""
    short = legend_names([side.name for side in sides], LEGEND_LENGTH)
    return {
        side.name: Look(
            short[side.name], COLOURS[_ORDER[place % len(_ORDER)]][0], MARKERS[place % len(MARKERS)]
        )
        for place, side in enumerate(sides)
    }
