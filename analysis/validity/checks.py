"""The checks that decide whether a record's numbers can be believed: the list CHECKS, and the verdict of all.

`invalid` numbers never enter a baseline or an unmarked plot. `suspect` numbers are marked as such. A check that could not
run is `unchecked`, with the reason, and never counts as passed. One that has nothing to look at is `not applicable`.
"""

import dataclasses
from typing import Any

from analysis.prediction.recorded_forecast import UNEXPLAINED
from analysis.validity import as_asked, conditions, results, surroundings, timing
from analysis.validity.check import Check
from benchmarks.record import Record, Validity
from conf.schema import ValidityLimits

CHECKS = (
    Check("missing_rank", "invalid", "rank {} wrote no complete samples", results.missing_rank),
    Check("wrong_gpu", "invalid", "ranks ran on other GPUs than requested: {}", results.wrong_gpu),
    Check("wrong_peers", "invalid", "the ranks met others than those of their own hosts: {}", results.wrong_peers),
    Check("replicas_differ", "invalid", "the ranks have different weights after synchronous steps", results.replicas_differ),
    Check("gradient_not_mean", "invalid",
          "the exchanged gradient is not the mean of the local ones: {}", results.gradient_not_mean),
    Check("exchange_wrong", "invalid", "the exchange does not return the mean of known gradients: {}", results.exchange_wrong),
    Check("bytes_miscounted", "invalid", "two counts of the exchanged bytes differ: {}", as_asked.bytes_miscounted),
    Check("batches_not_distinct", "invalid", "the ranks do not have batches of their own: {}", as_asked.batches_not_distinct),
    Check("precision_not_used", "invalid", "the precision is not the one that was asked for: {}", as_asked.precision_not_used),
    Check("not_compiled", "invalid", "torch.compile was asked for and compiled nothing", as_asked.not_compiled),
    Check("graph_differs", "invalid",
          "a replay of the CUDA graph does something else than the step itself: {}", as_asked.graph_differs),
    Check("replays_miscounted", "invalid",
          "the GPUs did not replay the steps that were asked for: {}", as_asked.replays_miscounted),
    Check("weights_still", "invalid", "weights did not change while steps were timed: {}", as_asked.weights_still),
    Check("copy_wrong", "invalid", "copies arrived with wrong data: {}", results.copy_wrong),
    Check("entry_not_positive", "invalid", "a matrix has entries that are not positive numbers: {}", results.entry_not_positive),
    Check("wrong_elements", "invalid", "a collective returned wrong elements: {}", results.wrong_elements),
    Check("solution_differs", "invalid", "the solution differs from that of one device: {}", results.solution_differs),
    Check("loss_not_finite", "invalid", "the loss is not finite on rank {}", results.loss_not_finite),
    Check("clocks_disagree", "invalid", "the times of the GPU and of the host differ: {}", conditions.clocks_disagree),
    Check("images_miscounted", "invalid", "the counted images are not steps × batch × ranks: {}", results.images_miscounted),
    Check("rate_inconsistent", "invalid", "the rate is not images ÷ seconds: {}", timing.rate_inconsistent),
    Check("samples_do_not_fill_window", "invalid",
          "the step times do not add up to the time of their window: {}", timing.samples_do_not_fill_window),
    Check("foreign_load", "invalid", "another program used these GPUs: {}", surroundings.foreign_load),
    Check("throttled", "invalid", "a GPU lowered its clocks because of heat or a power brake: {}", surroundings.throttled),
    Check("faster_than_reference", "suspect",
          "the exchange was too fast to be a whole exchange: {}", as_asked.faster_than_reference),
    Check("time_between_steps", "suspect", "time between the steps is missing in their times: {}", as_asked.time_between_steps),
    Check("compiled_while_timed", "suspect",
          "torch.compile still compiled while steps were timed: {}", as_asked.compiled_while_timed),
    Check("foreign_cpu", "suspect", "other programs used the CPU: {}", surroundings.foreign_cpu),
    Check("setting_not_asked", "suspect", "NCCL used a setting that was not asked for: {}", surroundings.setting_not_asked),
    Check("clocks_differ", "suspect", "the clocks of the GPUs differ: {}", surroundings.clocks_differ),
    Check("noisy", "suspect", "the steps of this run vary a lot: the 95 % interval of their mean is {}", conditions.noisy),
    Check("cpu_bound", "suspect", "the GPU waits for the CPU to launch work: {}", conditions.cpu_bound),
    Check("too_few_iterations", "suspect", "few steps were measured: {}", conditions.too_few_iterations),
    Check("efficiency_above_one", "suspect", "the efficiency is too high to be true: {}", conditions.efficiency_above_one),
    Check("warmup_not_flat", "suspect", "steps still became faster when the warm-up ended", conditions.warmup_not_flat),
    Check("not_stationary", "suspect", "the step time changed during the measurement: {}", timing.not_stationary),
    Check("pauses", "suspect", "some steps were much longer than the others: {}", timing.pauses),
    Check("slow_rank", "suspect", "one rank is slower than the others: {}", timing.slow_rank),
    Check(UNEXPLAINED, "suspect", "the step lies outside the interval of its forecast: {}", timing.unexplained),
    Check("input_bound", "finding", "the data loader limits the rate: {}", timing.input_bound),
    Check("reference_exceeded", "finding",
          "the exchange was faster than its reference: {} (the reference is simpler code and no limit)",
          conditions.reference_exceeded),
)  # fmt: skip
# Codes that bring a sentence of their own: from analysis.validity.settings, which compares requested NCCL settings with
# NCCL's log, from launch.profile.profiled_pass, and from analysis.verification.quick.
OTHER_CODES = (
    "setting_ignored", "transport_unexpected", "algorithm_unexpected", "channels_unexpected", "profiled", "does_not_verify",
    "hosts_unexpected", "effect_not_checked", "setting_no_effect",
)  # fmt: skip


def judge(record: Record, limits: ValidityLimits) -> Validity:
    """Run every check on one record. A cell that is not finished is invalid and has no numbers to judge."""
    asked = {name: float(value) for name, value in vars(limits).items() if name != "strict"}
    if record.state != "finished":
        return Validity(
            "invalid", {}, {check.code: f"the cell is {record.state}" for check in CHECKS}, asked
        )
    codes: dict[str, str] = {}
    skipped: dict[str, str] = {}
    without_object: dict[str, str] = {}
    verdict = "valid"
    for check in CHECKS:
        result = check.judge(record, limits)
        if result is None:
            continue
        if not result.checked:
            (skipped if result.applies else without_object)[check.code] = result.detail
            continue
        codes[check.code] = check.sentence.format(result.detail)
        verdict = _worse(verdict, result.severity or check.severity)
    for finding in record.effective.get("findings", []):
        sentences = {"unchecked": skipped, "not applicable": without_object}.get(
            finding["severity"], codes
        )
        before = sentences.get(finding["code"])
        sentences[finding["code"]] = (
            f"{before}; {finding['sentence']}" if before else finding["sentence"]
        )
        verdict = _worse(verdict, finding["severity"])
    return Validity(verdict, codes, skipped, asked, without_object)


def _worse(verdict: str, severity: str) -> str:
    """Return the worse of both; findings and checks that could not run leave the verdict as it is."""
    return (
        max(verdict, severity, key=("valid", "suspect", "invalid").index)
        if severity in ("suspect", "invalid")
        else verdict
    )


def limits_of(record: Record) -> ValidityLimits:
    """Return the limits that a record was judged by; those that it does not name have their defaults."""
    known = {one.name for one in dataclasses.fields(ValidityLimits)} & record.validity.limits.keys()
    asked: dict[str, Any] = {name: record.validity.limits[name] for name in known}
    return ValidityLimits(**asked)


def judged(record: Record, limits: ValidityLimits) -> Record:
    """Return the record with its validity."""
    return dataclasses.replace(record, validity=judge(record, limits))
