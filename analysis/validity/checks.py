"""Whether a record's numbers can be believed: each check is a code, a sentence, and a judgement of facts in the record.

`invalid` numbers never enter a baseline or a plot unmarked; `suspect` ones are shown as such; a check that could not run is
`unchecked` with the reason, never passed.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.record import Record, Validity
from conf.schema import Validity as Limits


@dataclass(frozen=True)
class Found:
    """A check's answer where it is not 'fine': `detail` goes into the sentence."""

    detail: str
    checked: bool = True


@dataclass(frozen=True)
class Check:
    """One way in which a number can be wrong."""

    code: str
    severity: str  # invalid, suspect or finding (numbers stay valid)
    sentence: str  # with {} for the detail
    judge: Callable[[Record, Limits], Found | None]


def unchecked(why: str) -> Found:
    """The check could not run."""
    return Found(why, checked=False)


def _missing_rank(record: Record, _: Limits) -> Found | None:
    expected = set(range(len(record.cell["gpus"])))
    missing = expected - {rank["rank"] for rank in record.ranks if rank.get("done")}
    return Found(", ".join(map(str, sorted(missing)))) if missing else None


def _wrong_gpu(record: Record, _: Limits) -> Found | None:
    planned = record.environment.get("planned_uuids")
    if not planned:
        return unchecked("CPU workers have no identity")
    reported = {rank["rank"]: rank.get("uuid", "unknown") for rank in record.ranks}
    wrong = [
        f"rank {number} has {reported[number]}, asked was {uuid}"
        for number, uuid in enumerate(planned)
        if number in reported and reported[number] != uuid
    ]
    return Found("; ".join(wrong)) if wrong else None


def _replicas_differ(record: Record, _: Limits) -> Found | None:
    if "replicas_equal" not in record.checks:
        return unchecked(_why_not_compared(record))
    return None if record.checks["replicas_equal"] else Found("")


def _gradient_not_mean(record: Record, _: Limits) -> Found | None:
    facts = record.checks
    if "gradient_error" not in facts:
        return unchecked(_why_not_compared(record))
    error, spread, tolerance = (float(facts[f"gradient_{name}"]) for name in ("error", "spread", "tolerance"))
    if not error <= tolerance:  # also NaN
        return Found(f"relative error {error:.2g}, tolerated {tolerance:.2g}")
    if not spread > 2 * max(error, tolerance):
        return unchecked("the gradients of the ranks are too alike to tell a mean from a local one")
    return None


def _why_not_compared(record: Record) -> str:
    if len(record.cell["gpus"]) == 1:
        return "one rank has nothing to agree with"
    if record.cell["benchmark"].get("name") == "exchange" or record.cell["model"].get("name") == "none":
        return "this benchmark trains nothing"
    return f"strategy {record.cell['strategy']['name']} does not keep replicas equal, or compresses with loss"


def _exchange_wrong(record: Record, _: Limits) -> Found | None:
    error, tolerance = (record.checks.get(f"exchange_{name}") for name in ("error", "tolerance"))
    if error is None or tolerance is None:
        alone = record.cell["benchmark"].get("name") == "exchange"
        return unchecked("it compresses with loss" if alone else "this benchmark exchanges no known gradients")
    return None if error <= tolerance else Found(f"relative error {error:.2g}, tolerated {tolerance:.2g}")  # also NaN


def _copy_wrong(record: Record, _: Limits) -> Found | None:
    if not record.checks.get("copies_compared"):
        return unchecked("no copy was compared") if record.cell["benchmark"].get("name") == "p2p" else None
    wrong = record.checks["copies_wrong"]
    if not wrong:
        return None
    first = [f"{elements} elements of {name}" for name, elements in list(wrong.items())[:3]]
    return Found(", ".join([*first, "…"] if len(wrong) > 3 else first))


def _entry_not_positive(record: Record, _: Limits) -> Found | None:
    matrices = record.tables.get("p2p", {}).get("matrices")
    if not matrices:
        return unchecked("no matrix was measured") if record.cell["benchmark"].get("name") == "p2p" else None
    bad = [
        name for name, rows in matrices.items() if not all(0 < float(value) < math.inf for row in rows for value in row)
    ]
    return Found(", ".join(bad)) if bad else None


def _wrong_elements(record: Record, _: Limits) -> Found | None:
    if record.cell["benchmark"].get("name") == "collectives" and "wrong_elements" not in record.checks:
        return unchecked("verify=false")
    count, sizes = record.checks.get("wrong_elements"), record.checks.get("wrong_bytes", [])
    return Found(f"{count}, in messages of {', '.join(map(str, sizes[:5]))} bytes") if count else None


def _solution_differs(record: Record, _: Limits) -> Found | None:
    difference, tolerance = (record.checks.get(f"solution_{name}") for name in ("difference", "tolerance"))
    if difference is None or difference <= tolerance:
        return None
    return Found(f"by up to {difference:.2g}, tolerated {tolerance:.2g}")  # also NaN


def _loss_not_finite(record: Record, _: Limits) -> Found | None:
    losses = record.checks.get("losses")
    if not losses:
        return unchecked("no loss was reported")
    bad = [str(rank) for rank, loss in enumerate(losses) if not math.isfinite(float(loss))]
    return Found(", ".join(bad)) if bad else None


def _clocks_disagree(record: Record, limits: Limits) -> Found | None:
    value = record.checks.get("clock_disagreement")
    if value is None:
        return unchecked("no window was timed")
    return Found(f"{float(value):.1%}, tolerated {limits.clock_limit:.1%}") if not value <= limits.clock_limit else None


def _noisy(record: Record, limits: Limits) -> Found | None:
    value = record.checks.get("half_width")
    if value is None or not math.isfinite(float(value)):
        return unchecked("too few iterations for an interval")
    return Found(f"±{float(value):.1%}, tolerated ±{limits.noise_limit:.1%}") if value > limits.noise_limit else None


def _cpu_bound(record: Record, limits: Limits) -> Found | None:
    share = record.metrics.get("gpu/idle_share")
    if share is None:
        return unchecked("no GPU, or a step whose launches could not be held back")
    return Found(f"{share:.0%} of a step, tolerated {limits.idle_limit:.0%}") if share > limits.idle_limit else None


def _foreign_load(record: Record, limits: Limits) -> Found | None:
    samples = record.checks.get("gpu_samples")
    if samples is None:
        return unchecked("the GPUs were not sampled")
    if samples["foreign_pids"]:
        return Found(f"processes {', '.join(map(str, samples['foreign_pids'][:5]))}")
    memory, busy = samples["before_memory_bytes"], samples["before_busy_percent"]
    if memory is None and busy is None and not samples.get("processes_known", True):
        return unchecked("the driver does not tell who uses the GPUs")
    if memory is not None and memory > limits.foreign_memory_gib * 2**30:
        return Found(f"{memory / 2**30:.1f} GiB were in use before the ranks started")
    if busy is not None and busy > limits.foreign_busy_percent:
        return Found(f"{busy} % busy before the ranks started")
    return None


def _throttled(record: Record, _: Limits) -> Found | None:
    samples = record.checks.get("gpu_samples")
    if samples is None or not samples["samples"]:
        return unchecked("the GPUs were not sampled in the timed window")
    if not samples["reasons_known"]:
        return unchecked("the driver does not tell why clocks are lowered")
    return Found(", ".join(samples["throttle_reasons"])) if samples["throttle_reasons"] else None


def _too_few(record: Record, _: Limits) -> Found | None:
    done, wanted = record.checks.get("iterations"), record.cell["benchmark"].get("min_iterations")
    if done is None or wanted is None:
        return unchecked("this benchmark counts no iterations")
    return Found(f"{done}, asked were at least {wanted}") if done < wanted else None


def _miscounted(record: Record, _: Limits) -> Found | None:
    counted, steps = (record.metrics.get(name) for name in ("throughput/images", "step/iterations"))
    if counted is None or steps is None:
        return unchecked("this benchmark counts no images")
    expected = steps * record.cell["batch_size"] * len(record.cell["gpus"])
    return Found(f"{counted:.0f} counted, {expected:.0f} asked for") if counted != expected else None


def _above_one(record: Record, _: Limits) -> Found | None:
    share = record.metrics.get("scaling/efficiency")
    if len(record.cell["gpus"]) == 1:
        return None  # a baseline is not compared with itself
    if share is None:
        return unchecked("no one-GPU baseline to compare with")
    rate, low = (record.metrics.get(f"throughput/{name}") for name in ("images_per_second", "ci_low"))
    least = share * low / rate if rate and low else share  # the noise of the cell itself is no verdict on its baseline
    return Found(f"{share:.1%}") if least > MOST_EFFICIENCY else None


def _limit_exceeded(record: Record, _: Limits) -> Found | None:
    share = record.metrics.get("comm/ideal_ratio")
    return Found(f"{record.checks.get('limit')}, {share:.0%}") if share is not None and share > MOST_OF_LIMIT else None


def _warmup(record: Record, _: Limits) -> Found | None:
    if "warmup_flat" not in record.checks:
        return unchecked("no warm-up was measured")
    return None if record.checks["warmup_flat"] else Found("")


# Above this a baseline was slower than it should be: cherry-picked, disturbed, or of another kind.
MOST_EFFICIENCY = 1.02
MOST_OF_LIMIT = 1.05  # an exchange may find in a cache what the probe of its limit does not

CHECKS = (
    Check("missing_rank", "invalid", "rank {} left no complete samples", _missing_rank),
    Check("wrong_gpu", "invalid", "ranks ran on other GPUs than asked: {}", _wrong_gpu),
    Check("replicas_differ", "invalid", "the weights of the ranks differ after synchronous steps", _replicas_differ),
    Check(
        "gradient_not_mean",
        "invalid",
        "the exchanged gradient is not the mean of the local ones: {}",
        _gradient_not_mean,
    ),
    Check(
        "exchange_wrong", "invalid", "the exchange of known gradients does not return their mean: {}", _exchange_wrong
    ),
    Check("copy_wrong", "invalid", "copies between members did not bring what was sent: {}", _copy_wrong),
    Check("entry_not_positive", "invalid", "entries are no positive numbers in the matrices {}", _entry_not_positive),
    Check("wrong_elements", "invalid", "elements of a collective's result are wrong: {}", _wrong_elements),
    Check("solution_differs", "invalid", "the solution differs from that of one GPU: {}", _solution_differs),
    Check("loss_not_finite", "invalid", "the loss is not finite on rank {}", _loss_not_finite),
    Check("clocks_disagree", "invalid", "device and host clock differ over a window: {}", _clocks_disagree),
    Check(
        "images_miscounted", "invalid", "ranks consumed other numbers of images than their steps hold: {}", _miscounted
    ),
    Check("foreign_load", "invalid", "something else used these GPUs: {}", _foreign_load),
    Check("throttled", "invalid", "a GPU lowered its clocks for heat or power in the timed window: {}", _throttled),
    Check("noisy", "suspect", "the 95 % interval of images/sec is wide: {}", _noisy),
    Check("cpu_bound", "suspect", "the GPU waits for the CPU to launch work: {}", _cpu_bound),
    Check("too_few_iterations", "suspect", "few iterations were measured: {}", _too_few),
    Check("efficiency_above_one", "suspect", "scaling efficiency is above what a fair baseline allows: {}", _above_one),
    Check("warmup_not_flat", "suspect", "the step time was still falling when the warm-up ran out of time", _warmup),
    Check(
        "limit_exceeded",
        "finding",
        "the exchange was faster than its limit, which was measured too low: {}",
        _limit_exceeded,
    ),
)
# Codes of findings, which bring their sentence: of analysis.validity.settings, which compares what was asked of NCCL with its
# log, and of launch.profile.profiled_pass.
SETTINGS = {
    "setting_ignored": "NCCL did not take a setting that was asked for",
    "transport_unexpected": "NCCL connected GPUs in a way that a setting rules out",
    "algorithm_unexpected": "NCCL chose an algorithm or protocol that a setting rules out",
    "channels_unexpected": "NCCL used more or fewer channels than asked",
    "profiled": "a trace was recorded in a pass of its own, which supplied no rate (a finding: numbers stay valid)",
    "setting_no_effect": "a setting changed nothing that NCCL's log shows (a finding: numbers stay valid)",
}
CODES: Mapping[str, str] = {check.code: check.sentence for check in CHECKS} | SETTINGS


def judge(record: Record, limits: Limits) -> Validity:
    """Every check on one record. An unfinished cell has no numbers to judge."""
    if record.state != "finished":
        return Validity("invalid", {}, {check.code: f"the cell is {record.state}" for check in CHECKS})
    codes: dict[str, str] = {}
    skipped: dict[str, str] = {}
    verdict = "valid"
    for check in CHECKS:
        found = check.judge(record, limits)
        if found is None:
            continue
        if not found.checked:
            skipped[check.code] = found.detail
            continue
        codes[check.code] = check.sentence.format(found.detail)
        verdict = _worse(verdict, check.severity)
    for finding in record.effective.get("findings", []):
        said = skipped if finding["severity"] == "unchecked" else codes
        known = said.get(finding["code"])
        said[finding["code"]] = f"{known}; {finding['sentence']}" if known else finding["sentence"]
        verdict = _worse(verdict, finding["severity"])
    return Validity(verdict, codes, skipped)


def _worse(verdict: str, severity: str) -> str:
    """The verdict with one more code; findings and checks that could not run leave it as it is."""
    return (
        max(verdict, severity, key=("valid", "suspect", "invalid").index)
        if severity in ("suspect", "invalid")
        else verdict
    )


def judged(record: Record, limits: Limits) -> Record:
    """The record with its validity."""
    return dataclasses.replace(record, validity=judge(record, limits))
