"""A check of a record: its code, its severity, its sentence, and the function that judges."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.record import Record
from conf.schema import ValidityLimits

NOT_REPORTED = "the ranks did not report it"


@dataclass(frozen=True)
class CheckResult:
    """A check that failed (`detail` goes into its sentence), or that was not made (`detail` says why)."""

    detail: str
    checked: bool = True
    applies: bool = True  # whether such a cell should have been checked
    severity: str = ""  # where it is another than the check's


@dataclass(frozen=True)
class ValueLimit:
    """A judge of one value of a record, which passes up to a limit; NaN does not pass."""

    value: Callable[[Record], float | None]
    most: Callable[[Record, ValidityLimits], float]
    missing: Callable[[Record], CheckResult]  # what a record without the value gets
    detail: Callable[[Record, float, float], str] = lambda record, value, most: (
        f"{100 * value:.1f} %, allowed {100 * most:.1f} %"
    )

    def __call__(self, record: Record, limits: ValidityLimits) -> CheckResult | None:
        """Judge the value of a record."""
        value, most = self.value(record), self.most(record, limits)
        if value is None:
            return self.missing(record)
        if value <= most:
            return None
        return CheckResult(self.detail(record, value, most))


@dataclass(frozen=True)
class Check:
    """One way in which a number can be wrong. `judge` returns None for a record that passes."""

    code: str
    severity: str  # invalid, suspect, or finding (numbers stay valid)
    sentence: str  # with {} for the detail
    judge: Callable[[Record, ValidityLimits], CheckResult | None]
    meaning: str  # for benchmarks/REFERENCE.md


def unchecked(why: str) -> CheckResult:
    """Return the result of a check that should have run and could not."""
    return CheckResult(why, checked=False)


def not_applicable(why: str) -> CheckResult:
    """Return the result of a check that has nothing to look at in such a cell."""
    return CheckResult(why, checked=False, applies=False)


def unless_training(record: Record, why: str = NOT_REPORTED) -> CheckResult:
    """Return that a check of training steps could not run; other benchmarks than `throughput` have nothing to check."""
    if record.cell.benchmark["name"] == "throughput":
        return unchecked(why)
    return not_applicable("only benchmark=throughput has it")


def unless_cpu(record: Record, why: str) -> CheckResult:
    """Return that a check of GPUs could not run; a CPU worker has none."""
    if record.cell.device == "cuda":
        return unchecked(why)
    return not_applicable("CPU workers have no GPU")
