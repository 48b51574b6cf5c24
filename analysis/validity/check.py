"""A check of a record: its code, its severity, its sentence, and the function that judges."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.record import Record
from conf.schema import ValidityLimits


@dataclass(frozen=True)
class CheckResult:
    """A check that failed (`detail` goes into its sentence) or could not run (`checked` is False, `detail` says why)."""

    detail: str
    checked: bool = True


@dataclass(frozen=True)
class Check:
    """One way in which a number can be wrong. `judge` returns None for a record that passes."""

    code: str
    severity: str  # invalid, suspect, or finding (numbers stay valid)
    sentence: str  # with {} for the detail
    judge: Callable[[Record, ValidityLimits], CheckResult | None]


def unchecked(why: str) -> CheckResult:
    """Return the result of a check that could not run."""
    return CheckResult(why, checked=False)
