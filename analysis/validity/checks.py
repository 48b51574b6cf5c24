"""The checks that decide whether a record's numbers can be believed, and the verdict of all.

`invalid` numbers never enter a baseline or an unmarked plot. `suspect` numbers are marked as such.
A check that could not run is `unchecked`, with the reason, and never counts as passed. One that has
nothing to look at is `not applicable`.
"""

import dataclasses
from typing import Any

from analysis.validity import fast_paths, limits, results, surroundings
from analysis.validity.check import Check, CheckOutcome
from analysis.validity.nccl_settings import IGNORED
from benchmarks.record import REHEARSAL, VERDICTS, Record, Validity
from conf.schema import ValidityLimits

CHECKS: tuple[Check, ...] = (
    results.missing_rank,
    results.wrong_gpu,
    results.wrong_peers,
    results.versions_differ,
    results.replicas_differ,
    results.gradient_not_mean,
    results.weights_not_average,
    results.exchange_wrong,
    results.bytes_miscounted,
    results.batches_not_distinct,
    results.precision_not_used,
    results.steps_changed,
    results.accumulated_nothing,
    results.not_compiled,
    results.graph_differs,
    results.replays_miscounted,
    results.weights_still,
    results.copy_wrong,
    results.entry_not_positive,
    results.wrong_elements,
    results.solution_differs,
    results.loss_not_finite,
    limits.clocks_disagree,
    results.images_miscounted,
    results.windows_repeated,
    results.iterations_miscounted,
    limits.rate_inconsistent,
    limits.samples_do_not_fill_window,
    limits.windows_too_short,
    results.samples_cut,
    surroundings.foreign_load,
    surroundings.foreign_load_timed,
    surroundings.throttled,
    limits.faster_than_reference,
    limits.time_between_steps,
    results.compiled_while_timed,
    surroundings.foreign_cpu,
    surroundings.setting_not_asked,
    fast_paths.path_not_engaged,
    surroundings.transport_below_wires,
    surroundings.clocks_differ,
    limits.noisy,
    limits.cpu_bound,
    limits.too_few_iterations,
    limits.efficiency_above_one,
    limits.warmup_not_flat,
    limits.slower_than_warmup,
    limits.not_stationary,
    limits.windows_not_stationary,
    limits.samples_rounded,
    limits.pauses,
    limits.slow_rank,
    limits.cost_negative,
    limits.unexplained,
    limits.slower_together,
    limits.input_bound,
    limits.reference_exceeded,
)
LOADED = {"foreign_cpu", "foreign_load", "noisy"}  # that other programs cause
SUSPECT_CODES = {check.code for check in CHECKS if check.severity == "suspect"}
# Checks of time or of others, by which ranks that share a device in a rehearsal are not judged.
OF_TIME = (
    *("clocks_disagree", "rate_inconsistent", "samples_do_not_fill_window"),
    *("foreign_load", "foreign_load_timed", "throttled"),
)
MEMORY = ("memory/peak_gib", "memory/reserved_gib")  # all that a rehearsal keeps of its metrics
# Codes that bring a sentence of their own: from nccl_settings, which compares requested NCCL
# settings with NCCL's log, from launch.profiled_pass, and from analysis.verification.verify_study.
# {code: (verdict, meaning, what to do)}
OTHER_CODES = {
    "setting_ignored": (
        "invalid or suspect",
        "NCCL's log shows that a setting has another value, or was not taken. Suspect "
        "where only some ranks did not take it",
        "Check the spelling. See in nccl/*.log of the run whether this NCCL version knows it.",
    ),
    "transport_unexpected": (
        "invalid or suspect",
        "NCCL connected GPUs in a way that a setting forbids (invalid). With P2P_LEVEL: P2P took a "
        "longer path than allowed (invalid with LOC, NVL and NVB, otherwise suspect), or P2P was "
        "allowed and not used (suspect)",
        "Look at nccl/*.log of the run: another setting or a missing permission may override the "
        "setting.",
    ),
    "algorithm_unexpected": (
        "invalid",
        "NCCL chose an algorithm or protocol that a setting forbids",
        "Name the collective in the setting too, as in nccl.algo=allreduce:tree.",
    ),
    "channels_unexpected": (
        "invalid",
        "NCCL chose a number of channels outside the limits that were set",
        "Set limits that NCCL can meet on these GPUs.",
    ),
    "does_not_verify": (
        "invalid; checked by report and verify",
        "the numbers of the record are not those of its raw samples",
        "Copy the record again from where it was measured: it was changed or damaged.",
    ),
    "hosts_unexpected": (
        "suspect",
        "NCCL counts another number of hosts than the run has",
        "Check NCCL_HOSTID and the host names of containers.",
    ),
    "profiled": (
        "finding",
        "the run has a trace, recorded in a separate pass whose rate is not used",
        "Nothing to do.",
    ),
    "setting_no_effect": (
        "finding",
        "a setting had no effect: NCCL's log shows the same as in the run without it",
        "Leave the setting out, or try a value further from NCCL's default.",
    ),
    "effect_not_checked": (
        "unchecked",
        "a variable of `nccl.other` was set, and Ringside does not know what it should change",
        "Compare with the same run without the variable.",
    ),
}


def judge(record: Record, limits: ValidityLimits) -> Validity:
    """Run every check on one record. A cell that is not finished is invalid and has no numbers."""
    numbers = {name: float(value) for name, value in vars(limits).items() if name != "strict"}
    if record.state != "finished":
        why = f"the run is {record.state}"
        return Validity("invalid", {}, {check.code: why for check in CHECKS}, numbers)
    codes: dict[str, str] = {}
    skipped: dict[str, str] = {}
    without_object: dict[str, str] = {}
    sentences_of = {"unchecked": skipped, "not applicable": without_object}
    severities = []
    is_rehearsal = REHEARSAL in record.environment
    for check in CHECKS:
        if check.since > record.schema_version:
            continue  # the verdict of an older record is that of its time
        if is_rehearsal and (check.severity != "invalid" or check.code in OF_TIME):
            without_object[check.code] = "a rehearsal judges no time"
            continue
        outcome = check.judge(record, limits)
        if not outcome:
            continue
        if not isinstance(outcome, CheckOutcome):
            outcome = CheckOutcome(check.severity, outcome)
        severity, text = outcome
        severities.append(severity)
        if severity in sentences_of:
            sentences_of[severity][check.code] = text
        else:
            codes[check.code] = check.sentence.format(text)
    for finding in record.effective.get("findings", []):
        code, severity, sentence = finding["code"], finding["severity"], finding["sentence"]
        if is_rehearsal and code not in (IGNORED, "profiled"):
            continue  # it rests on the wires, which are not those of the machine planned for
        severities.append(severity)
        sentences = sentences_of.get(severity, codes)
        if code in sentences:
            sentence = f"{sentences[code]}; {sentence}"
        sentences[code] = sentence
    verdicts = ["valid", *(severity for severity in severities if severity in VERDICTS)]
    if is_rehearsal:
        verdicts.append(REHEARSAL)
    return Validity(max(verdicts, key=VERDICTS.index), codes, skipped, numbers, without_object)


def serious(validity: Validity) -> dict[str, str]:
    """Return the codes that made the verdict what it is: of an invalid one none that only doubts.

    Each with its sentence.
    """
    against = validity.against
    if validity.verdict != "invalid":
        return against
    invalidating = {}
    for code, text in against.items():
        if code not in SUSPECT_CODES:
            invalidating[code] = text
    return invalidating or against


def limits_of(record: Record) -> ValidityLimits:
    """Return the limits that a record was judged by; missing ones have their defaults."""
    names = {field.name for field in dataclasses.fields(ValidityLimits)}
    judged_by: dict[str, Any] = dict(record.validity.limits)
    return ValidityLimits(**{name: judged_by[name] for name in names & judged_by.keys()})


def changed_limits(record: Record) -> list[str]:
    """Return the limits that a record was judged by and that are not the defaults, with both."""
    defaults = vars(ValidityLimits())
    changed = []
    for name, value in record.validity.limits.items():
        if name in defaults and value != defaults[name]:
            changed.append(f"validity.{name}={value:g} (default {defaults[name]:g})")
    return changed


def verdict_words(record: Record) -> str:
    """Return the verdict as people read it: `valid, 2 checks not run, noise_limit=0.2`."""
    return ", ".join([record.validity.said, *limit_marks(record)])


def limit_marks(record: Record) -> list[str]:
    """Return the limits that were not the defaults, as they stand beside a verdict."""
    return [limit.split()[0].removeprefix("validity.") for limit in changed_limits(record)]


def judged(record: Record, limits: ValidityLimits) -> Record:
    """Return the record with its validity; of a rehearsal without its rates and times."""
    record = dataclasses.replace(record, validity=judge(record, limits))
    if REHEARSAL not in record.environment:
        return record
    metrics = {name: record.metrics[name] for name in MEMORY if name in record.metrics}
    return dataclasses.replace(record, metrics=metrics, within_run={}, series={}, tables={})
