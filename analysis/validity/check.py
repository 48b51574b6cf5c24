"""What a check is: its code, its severity, its sentence, and the function that judges a record."""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.record import Record
from benchmarks.record.record import OLDEST_SCHEMA
from conf import groups
from conf.schema import ValidityLimits

REMEDIES = {
    "invalid": "Do not use the numbers. Run again. If it happens again, read the log of the rank "
    "that the check names. If the run used code of your own, look there first.",
    "suspect": "Run again on an idle machine with resume=false; repeats=3 shows whether it happens "
    "each time.",
    "finding": "Nothing to do.",
}
NOT_REPORTED = "the ranks did not report it"
OF_SCRIPT = "it needs Ringside's own training loop, and this is a script's"
RINGS = ("ring", "two_rings")  # what strategies that exchange through NCCL declare to send
AFTER = "after"  # the facts that ranks found again after the timed windows
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
    sentence: str  # with {} for what the judge says; without {} it is not shown
    meaning: str
    remedy: str  # what a user does
    judge: Judge
    since: int = OLDEST_SCHEMA  # the schema version from which records have what it needs


def _limit(name: str, value: float) -> str:
    """Return a limit as a meaning states it: "5 % (`validity.noise_limit`)"."""
    amount = f"{100 * value:g} %"
    if name.endswith("_gib"):
        amount = f"{value:g} GiB"
    elif name.endswith("_percent"):
        amount = f"{value:g} %"
    return f"{amount} (`validity.{name}`)"


DEFAULT_LIMITS = {name: _limit(name, value) for name, value in vars(ValidityLimits()).items()}


def check(
    severity: str, sentence: str, needs: str = "", since: int = OLDEST_SCHEMA, twice: bool = False
) -> Callable[[Judge], Check]:
    """Make a check of a judge: the code is its name, the meaning its docstring.

    A second paragraph of it says what a user does, in place of the one of REMEDIES.

    `{noise_limit}` in the docstring is that limit. `needs` is a fact of training steps that it
    judges. `twice`: what the ranks found again after the timed windows is judged too.
    """

    def made_of(judge: Judge) -> Check:
        text = (inspect.getdoc(judge) or "").format_map(DEFAULT_LIMITS)
        meaning, _, remedy = text.partition("\n\n")
        meaning, remedy = meaning.replace("\n", " "), remedy or REMEDIES[severity]

        def judge_fact(record: Record, limits: ValidityLimits) -> Judgement:
            if needs and needs not in record.checks:
                return unchecked_if_training(record)
            outcome = judge(record, limits)
            if not twice or AFTER not in record.checks:
                return outcome
            if isinstance(outcome, str) and outcome:
                return f"{outcome}, before the timed windows"
            checks = record.checks | record.checks[AFTER]
            again = judge(dataclasses.replace(record, checks=checks), limits)
            if isinstance(again, str) and again:
                return f"{again}, after the timed windows"
            return outcome or again

        return Check(judge.__name__, severity, sentence, meaning, remedy, judge_fact, since)

    return made_of


def beyond(share: float, allowed: float, what: str = "%") -> str | None:
    """Return by how many % a share exceeds what is allowed; None within it. NaN exceeds it."""
    if share <= allowed:
        return None
    return f"{percent_above(share, allowed)} {what}, allowed {100 * allowed:.1f} %"


def percent_above(share: float, allowed: float) -> str:
    """Return a share in % with one decimal, or with as many as show that it is above its limit."""
    for decimals in (1, 2, 3):
        text = f"{100 * share:.{decimals}f}"
        if text != f"{100 * allowed:.{decimals}f}":
            break
    return text


def unchecked(why: str) -> CheckOutcome:
    """Return the outcome of a check that should have run and could not."""
    return CheckOutcome("unchecked", why)


def not_applicable(why: str) -> CheckOutcome:
    """Return the outcome of a check that has nothing to look at in such a cell."""
    return CheckOutcome("not applicable", why)


def unchecked_if_training(record: Record, why: str = NOT_REPORTED) -> CheckOutcome:
    """Return that a check of training steps could not run; not applicable where none were timed."""
    if record.cell.benchmark["name"] == "throughput":
        return unchecked(why)
    if record.cell.runs_script:
        return unchecked(OF_SCRIPT)
    return not_applicable("only benchmark=throughput has it")


def unchecked_on_gpus(record: Record, why: str) -> CheckOutcome:
    """Return that a check of GPUs could not run; not applicable to CPU workers, which have none."""
    if record.cell.device == "cuda":
        return unchecked(why)
    return not_applicable("CPU workers have no GPU")


def unchecked_without_connections(record: Record) -> CheckOutcome | None:
    """Return that no log of NCCL shows the connections of an exchange that went through it.

    None where one does, where the strategy exchanges by another way, and before schema 7.
    """
    cell = record.cell
    has_exchanged = cell.device == "cuda" and "comm/exchange_ms" in record.metrics
    if not has_exchanged or record.schema_version < 7:
        return None
    if groups.sends(cell) not in RINGS or cell.strategy.get("transport") == "gloo":
        return None
    nccl = record.effective.get("nccl")
    if nccl is None:
        return unchecked("there is no log of NCCL")
    if not nccl.get("transports"):
        return unchecked("NCCL's log shows no connection")
    return None
