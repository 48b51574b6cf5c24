"""What a check is: its code, its severity, its sentence, and the function that judges a record."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.record import Record
from benchmarks.record.record import OLDEST_SCHEMA
from conf.schema import ValidityLimits

NOT_REPORTED = "the ranks did not report it"
MOST_NAMED = 4  # things that a sentence names


class CheckOutcome(NamedTuple):
    """Another result than passed or failed: a `finding`, or why nothing was judged."""

    severity: str  # unchecked, not applicable, finding
    text: str


# None or "": the record passes. A text says what is wrong, and goes into the check's sentence.
Judgement = str | CheckOutcome | None
Judge = Callable[[Record, ValidityLimits], Judgement]


@dataclass(frozen=True)
class Check:
    """One way in which a number can be wrong."""

    code: str
    severity: str  # invalid, suspect, or finding (numbers stay valid)
    sentence: str  # with {} for what the judge says
    meaning: str  # for benchmarks/REFERENCE.md
    judge: Judge
    since: int = OLDEST_SCHEMA  # the schema version from which records have what it needs


def check(
    severity: str,
    sentence: str,
    needs: str = "",
    without: str = NOT_REPORTED,
    since: int = OLDEST_SCHEMA,
) -> Callable[[Judge], Check]:
    """Make a check of a judge: the code is its name, the meaning its docstring.

    `needs` is a fact of training steps that it judges; `without` is why a record that lacks it was
    not checked.
    """

    def made_of(judge: Judge) -> Check:
        meaning = (inspect.getdoc(judge) or "").replace("\n", " ")

        def judge_fact(record: Record, limits: ValidityLimits) -> Judgement:
            if needs and needs not in record.checks:
                return unless_training(record, without)
            return judge(record, limits)

        return Check(judge.__name__, severity, sentence, meaning, judge_fact, since)

    return made_of


def limit(
    code: str,
    severity: str,
    sentence: str,
    meaning: str,
    fact: str,
    most: str | float,
    missing: str = "",
    text: str = "{percent:.1f} %, allowed {allowed_percent:.1f} %",
    on_cpu: str = "",
) -> Check:
    """Return the check that a fact of a record is at most a limit; NaN does not pass.

    `most` is a number, a name of ValidityLimits, or another fact. `missing` is why a record without
    the fact was not checked; without it such a record passes. `on_cpu` is why a CPU worker has
    nothing to check.
    """

    def judge(record: Record, limits: ValidityLimits) -> Judgement:
        if on_cpu and record.cell.device != "cuda":
            return not_applicable(on_cpu)
        allowed: Any = most
        if isinstance(most, str):
            allowed = vars(limits).get(most, record.checks.get(most))
        value = record.checks.get(fact)
        if value is None or allowed is None:
            if not missing:
                return None
            return unless_training(record, missing)
        if value <= allowed:
            return None
        percents = {"percent": 100 * value, "allowed_percent": 100 * allowed}
        return text.format(value=value, allowed=allowed, **percents)

    return Check(code, severity, sentence, meaning, judge)


def unchecked(why: str) -> CheckOutcome:
    """Return the outcome of a check that should have run and could not."""
    return CheckOutcome("unchecked", why)


def not_applicable(why: str) -> CheckOutcome:
    """Return the outcome of a check that has nothing to look at in such a cell."""
    return CheckOutcome("not applicable", why)


def unless_training(record: Record, why: str = NOT_REPORTED) -> CheckOutcome:
    """Return that a check of training steps could not run; only `throughput` has such steps."""
    if record.cell.benchmark["name"] == "throughput":
        return unchecked(why)
    return not_applicable("only benchmark=throughput has it")


def unless_cpu(record: Record, why: str) -> CheckOutcome:
    """Return that a check of GPUs could not run; a CPU worker has none."""
    if record.cell.device == "cuda":
        return unchecked(why)
    return not_applicable("CPU workers have no GPU")


def list_some(items: Sequence[str]) -> str:
    """Join the first items with commas; count the rest."""
    text = ", ".join(items[:MOST_NAMED])
    if len(items) > MOST_NAMED:
        text += f" and {len(items) - MOST_NAMED} more"
    return text
