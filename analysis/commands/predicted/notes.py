"""Notes below a table, and errors and shares as the tables of forecasts have them."""

from collections.abc import Sequence

from rich.markup import escape

from analysis.console import console
from analysis.report.numbers import number

_MOST = 12


def print_notes(notes: Sequence[str]) -> None:
    """Print each note once."""
    out, several = console(), list(dict.fromkeys(notes))
    for note in several[:_MOST]:
        out.print(f"[bold]note[/bold] {escape(note)}", soft_wrap=True)
    if len(several) > _MOST:
        out.print(f"… {len(several) - _MOST} more (--json has all)")


def error(said: float, measured: float) -> str:
    """Return how far a forecast is from what was measured: +1.2 %."""
    return number(said / measured - 1, "change")


def share(value: float | None) -> str:
    """Return a share: 12.3 %."""
    return number(value, "share")
