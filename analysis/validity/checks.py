"""The checks that decide whether a record's numbers can be believed: the list CHECKS, and the verdict of all.

`invalid` numbers never enter a baseline or an unmarked plot. `suspect` numbers are marked as such.
A check that could not run is `unchecked`, with the reason, and never counts as passed. One that has
nothing to look at is `not applicable`.
"""

import dataclasses
from typing import Any

from analysis.prediction.recorded_forecast import UNEXPLAINED
from analysis.validity import limits, results, surroundings
from analysis.validity.check import Check
from benchmarks.record import VERDICTS, Record, Validity
from conf.schema import ValidityLimits

CHECKS: tuple[Check, ...] = (
    Check(
        "missing_rank",
        "invalid",
        "rank {} wrote no complete samples",
        results.missing_rank,
        "a rank wrote no complete samples",
    ),
    Check(
        "wrong_gpu",
        "invalid",
        "ranks ran on other GPUs than requested: {}",
        results.wrong_gpu,
        "a rank reports another UUID than planned",
    ),
    Check(
        "wrong_peers",
        "invalid",
        "the ranks met others than those of their own hosts: {}",
        results.wrong_peers,
        (
            "several hosts: what the ranks told each other (host, process, UUID) is not what each"
            " wrote, or not what was planned"
        ),
    ),
    Check(
        "replicas_differ",
        "invalid",
        "the ranks have different weights after synchronous steps",
        results.replicas_differ,
        "weights differ where the strategy makes them equal",
    ),
    Check(
        "gradient_not_mean",
        "invalid",
        "the exchanged gradient is not the mean of the local ones: {}",
        results.gradient_not_mean,
        "the exchanged gradient is not the mean of the ranks' own gradients",
    ),
    Check(
        "exchange_wrong",
        "invalid",
        "the exchange does not return the mean of known gradients: {}",
        results.exchange_wrong,
        (
            "the exchange alone did not return the mean of known gradients, in its worst array: "
            "in `benchmark=exchange` by more than 10⁻⁴, in `throughput` by more than n units in "
            "the last place or the rounding of what is sent"
        ),
    ),
    Check(
        "bytes_miscounted",
        "invalid",
        "two counts of the exchanged bytes differ: {}",
        results.bytes_miscounted,
        (
            "counts of the bytes of gradient, exchange and rates differ, or differ from what the "
            "strategy's YAML declares"
        ),
    ),
    Check(
        "batches_not_distinct",
        "invalid",
        "the ranks do not have batches of their own: {}",
        results.batches_not_distinct,
        "ranks or steps have the same batch",
    ),
    Check(
        "precision_not_used",
        "invalid",
        "the precision is not the one that was asked for: {}",
        results.precision_not_used,
        "autocast, TF32 or most layers computed in another precision than asked",
    ),
    Check(
        "not_compiled",
        "invalid",
        "torch.compile was asked for and compiled nothing",
        results.not_compiled,
        "nothing that torch.compile made took part in the steps",
    ),
    Check(
        "graph_differs",
        "invalid",
        "a replay of the CUDA graph does something else than the step itself: {}",
        results.graph_differs,
        "a replayed step gives other gradients or weights than the step without a CUDA graph",
    ),
    Check(
        "replays_miscounted",
        "invalid",
        "the GPUs did not replay the steps that were asked for: {}",
        results.replays_miscounted,
        "a GPU replayed a graph more or less often than asked",
    ),
    Check(
        "weights_still",
        "invalid",
        "weights did not change while steps were timed: {}",
        results.weights_still,
        "weights that should move did not change in the timed steps",
    ),
    Check(
        "copy_wrong",
        "invalid",
        "copies arrived with wrong data: {}",
        results.copy_wrong,
        "`benchmark=p2p`: a copy did not bring the pattern that was sent",
    ),
    Check(
        "entry_not_positive",
        "invalid",
        "a matrix has entries that are not positive numbers: {}",
        results.entry_not_positive,
        "`benchmark=p2p`: an entry of a matrix is no positive number",
    ),
    Check(
        "wrong_elements",
        "invalid",
        "a collective returned wrong elements: {}",
        results.wrong_elements,
        "a collective returned wrong elements for known inputs",
    ),
    Check(
        "solution_differs",
        "invalid",
        "the solution differs from that of one device: {}",
        results.solution_differs,
        "the split grid has another solution than one GPU",
    ),
    Check(
        "loss_not_finite",
        "invalid",
        "the loss is not finite on rank {}",
        results.loss_not_finite,
        "the loss is NaN or infinite",
    ),
    Check(
        "clocks_disagree",
        "invalid",
        "the times of the GPU and of the host differ: {}",
        limits.clocks_disagree,
        "GPUs: device clock and host clock differ by more than 0.5 % (`validity.clock_limit`)",
    ),
    Check(
        "images_miscounted",
        "invalid",
        "the counted images are not steps × batch × ranks: {}",
        results.images_miscounted,
        "images counted are not steps × batch × ranks",
    ),
    Check(
        "rate_inconsistent",
        "invalid",
        "the rate is not images ÷ seconds: {}",
        limits.rate_inconsistent,
        "images/s is not images ÷ seconds, or not n times the rate per GPU",
    ),
    Check(
        "samples_do_not_fill_window",
        "invalid",
        "the step times do not add up to the time of their window: {}",
        limits.samples_do_not_fill_window,
        "the samples of a window differ from its time by more than 0.1 %",
    ),
    Check(
        "foreign_load",
        "invalid",
        "another program used these GPUs: {}",
        surroundings.foreign_load,
        (
            "other programs used the GPUs: a process at any time; before the cell more than 2 GiB"
            " (`validity.foreign_memory_gib`) or 10 % busy (`validity.foreign_busy_percent`); "
            "memory that grew in a measured phase"
        ),
    ),
    Check(
        "throttled",
        "invalid",
        "a GPU lowered its clocks because of heat or a power brake: {}",
        surroundings.throttled,
        (
            "a GPU lowered its clocks for heat or a power brake in a measured phase; the ordinary"
            " power cap is only recorded"
        ),
    ),
    Check(
        "faster_than_reference",
        "suspect",
        "the exchange was too fast to be a whole exchange: {}",
        limits.faster_than_reference,
        "the exchange took less than 1 ÷ 1.2 of its reference: it was hardly awaited",
    ),
    Check(
        "time_between_steps",
        "suspect",
        "time between the steps is missing in their times: {}",
        limits.time_between_steps,
        (
            "CPU workers: more than 2 % of the time, and 0.1 ms a step, lies between the steps, "
            "in no sample"
        ),
    ),
    Check(
        "compiled_while_timed",
        "suspect",
        "torch.compile still compiled while steps were timed: {}",
        results.compiled_while_timed,
        "torch.compile made graphs in the timed windows",
    ),
    Check(
        "foreign_cpu",
        "suspect",
        "other programs used the CPU: {}",
        surroundings.foreign_cpu,
        (
            "other programs used more than 10 % of the cell's cores in a measured phase "
            "(`validity.foreign_cpu_limit`)"
        ),
    ),
    Check(
        "setting_not_asked",
        "suspect",
        "NCCL used a setting that was not asked for: {}",
        surroundings.setting_not_asked,
        (
            "NCCL announced a setting that neither the request nor Ringside made; those that "
            "forbid NVLink multicast are allowed"
        ),
    ),
    Check(
        "clocks_differ",
        "suspect",
        "the clocks of the GPUs differ: {}",
        surroundings.clocks_differ,
        (
            "suspect: while both train, the SM clock of a GPU is more than 5 % below another's "
            "(`validity.clock_spread_limit`; twice that at the power cap), or in one phase that "
            "far below its own highest without a reason. Finding: it differs by more than 1 % "
            "from the baseline's (`validity.clock_change_limit`)"
        ),
    ),
    Check(
        "noisy",
        "suspect",
        "the steps of this run vary a lot: the 95 % interval of their mean is {}",
        limits.noisy,
        (
            "the 95 % interval of images/s within the run is wider than ±5 % "
            "(`validity.noise_limit`)"
        ),
    ),
    Check(
        "cpu_bound",
        "suspect",
        "the GPU waits for the CPU to launch work: {}",
        limits.cpu_bound,
        "the GPU idles more than 10 % of a step (`validity.idle_limit`)",
    ),
    Check(
        "too_few_iterations",
        "suspect",
        "few steps were measured: {}",
        limits.too_few_iterations,
        "fewer steps were timed than asked",
    ),
    Check(
        "efficiency_above_one",
        "suspect",
        "the efficiency is too high to be true: {}",
        limits.efficiency_above_one,
        (
            "the efficiency is above 1 by more than 3 standard deviations of the ratio of both "
            "rates, at least 100.5 %; above 102 % where the scatter between runs is unknown"
        ),
    ),
    Check(
        "warmup_not_flat",
        "suspect",
        "steps still became faster when the warm-up ended",
        limits.warmup_not_flat,
        "steps still became faster when the warm-up ended",
    ),
    Check(
        "not_stationary",
        "suspect",
        "the step time changed during the measurement: {}",
        limits.not_stationary,
        (
            "the step time changed or drifted by more than 1 % (`validity.change_limit`; CPU "
            "workers 3 %) and by more than noise explains"
        ),
    ),
    Check(
        "pauses",
        "suspect",
        "some steps were much longer than the others: {}",
        limits.pauses,
        (
            "pauses inside steps took more than 0.25 % of the time (`validity.pause_limit`; CPU "
            "workers 0.75 %)"
        ),
    ),
    Check(
        "slow_rank",
        "suspect",
        "one rank is slower than the others: {}",
        limits.slow_rank,
        (
            "one rank's own step is more than 3 % longer than the median of the others' "
            "(`validity.slow_rank_limit`), and by more than twice its noise"
        ),
    ),
    Check(
        UNEXPLAINED,
        "suspect",
        "the step lies outside the interval of its forecast: {}",
        limits.unexplained,
        (
            "the step and its 95 % interval lie outside the interval that was forecast before the"
            " cell"
        ),
    ),
    Check(
        "input_bound",
        "finding",
        "the data loader limits the rate: {}",
        limits.input_bound,
        ("the data loader costs more than 2 % of a step, and the interval of this cost excludes 0"),
    ),
    Check(
        "reference_exceeded",
        "finding",
        "the exchange was faster than its reference: {} (the reference is simpler code and no limit)",
        limits.reference_exceeded,
        (
            "the exchange took less than 1 ÷ 1.05 of its reference: simpler code is not always "
            "faster"
        ),
    ),
)
# Codes that bring a sentence of their own: from nccl_settings, which compares requested NCCL
# settings with NCCL's log, from launch.profile.profiled_pass, and from analysis.verification.quick.
# {code: (verdict, meaning)}
OTHER_CODES = {
    "setting_ignored": (
        "invalid",
        "NCCL did not announce a setting that it announces when it takes it",
    ),
    "transport_unexpected": (
        "invalid or suspect",
        (
            "NCCL connected GPUs in a way that a setting rules out. Suspect: P2P over a longer "
            "path than a level other than NVL allows, or no P2P where the level allows it"
        ),
    ),
    "algorithm_unexpected": (
        "invalid",
        "NCCL chose an algorithm or protocol that a setting rules out",
    ),
    "channels_unexpected": (
        "invalid",
        "NCCL chose a number of channels that a setting rules out",
    ),
    "does_not_verify": (
        "invalid, in the report alone",
        "the record does not say what its raw samples say",
    ),
    "hosts_unexpected": (
        "suspect",
        "NCCL sees the ranks on another number of hosts than the cell has",
    ),
    "profiled": (
        "finding",
        "the cell has a trace, from a pass that supplied no rate",
    ),
    "setting_no_effect": (
        "finding",
        "a setting changed nothing that the log shows, against the same cell without it",
    ),
    "effect_not_checked": (
        "unchecked",
        "a variable of `nccl.other` was set, and no rule says what it should change",
    ),
}


def judge(record: Record, limits: ValidityLimits) -> Validity:
    """Run every check on one record.

    A cell that is not finished is invalid and has no numbers to judge.
    """
    numbers = {name: float(value) for name, value in vars(limits).items() if name != "strict"}
    if record.state != "finished":
        why = f"the cell is {record.state}"
        return Validity("invalid", {}, {check.code: why for check in CHECKS}, numbers)
    codes: dict[str, str] = {}
    skipped: dict[str, str] = {}
    without_object: dict[str, str] = {}
    verdict = "valid"
    for check in CHECKS:
        result = check.judge(record, limits)
        if result is None:
            continue
        if not result.applies:
            without_object[check.code] = result.detail
            continue
        if not result.checked:
            skipped[check.code] = result.detail
            continue
        codes[check.code] = check.sentence.format(result.detail)
        verdict = _worse(verdict, result.severity or check.severity)
    for finding in record.effective.get("findings", []):
        sentences = {"unchecked": skipped, "not applicable": without_object}.get(
            finding["severity"], codes
        )
        sentence = finding["sentence"]
        if finding["code"] in sentences:
            sentence = f"{sentences[finding['code']]}; {sentence}"
        sentences[finding["code"]] = sentence
        verdict = _worse(verdict, finding["severity"])
    return Validity(verdict, codes, skipped, numbers, without_object)


def _worse(verdict: str, severity: str) -> str:
    """Return the worse of both; findings and checks that could not run leave the verdict as it is."""
    if severity not in VERDICTS:
        return verdict
    return max(verdict, severity, key=VERDICTS.index)


def limits_of(record: Record) -> ValidityLimits:
    """Return the limits that a record was judged by; missing ones have their defaults."""
    limits: dict[str, Any] = {}
    for field in dataclasses.fields(ValidityLimits):
        if field.name in record.validity.limits:
            limits[field.name] = record.validity.limits[field.name]
    return ValidityLimits(**limits)


def judged(record: Record, limits: ValidityLimits) -> Record:
    """Return the record with its validity."""
    return dataclasses.replace(record, validity=judge(record, limits))
