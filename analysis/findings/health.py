"""Which devices are slower than the others of their study, by more than runs differ, and why.

A device alone is compared with the median of the others alone, a pair with the other pairs. The
scatter is that of equal runs within the group, whatever the checks say of them. All tests of a
group are one family (Bonferroni).
"""

import math
import statistics
from collections.abc import Collection, Sequence

from analysis.findings.links import transport_of
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.intervals import LEVEL, quantile
from analysis.study.names import gpu_ids, gpu_list, unit
from analysis.study.noise_floor import CLOCK, is_suspect, pooled_scatter
from analysis.study.provenance import CONNECTIONS
from analysis.study.runs import Runs, RunsByMember
from analysis.study.study import Study
from analysis.text import count

SLOWER_CLOCK = 0.99  # of the others' clock, below which a clock is named


def health(study: Study, limit: float) -> tuple[list[str], str, bool]:
    """Return a sentence for each device that is slower than the others by more than `limit`, a
    share, and by more than equal runs differ, the slowest first; what was compared; and whether
    anything could be. Where all runs are suspect and none is slower, the only sentence says that
    nothing was judged.
    """
    compared_with = RunsByMember(
        study.timed,
        lambda runs: (study.condition(runs, (CONNECTIONS,)), len(runs.cell.hosts), len(runs.gpus)),
        lambda runs: runs.gpus,
    )
    losses: dict[Runs, float] = {}  # of devices that are slow, as a share
    others_of: dict[Runs, list[Runs]] = {}
    compared: list[str] = []
    is_judged = False
    for members in compared_with.groups.values():
        listed = [*members.values()]
        result = "no other to compare with"
        scatter = pooled_scatter((runs.records for runs in listed), IMAGES_PER_SECOND)
        if len(listed) > 1 and not scatter.freedom:
            result = "not judged: each ran once, and repeats=2 is needed"
        elif len(listed) > 1:
            # The difference of two medians scatters at most as single runs do, from two runs on.
            half = quantile(scatter.freedom, 1 - (1 - LEVEL) / len(listed)) * scatter.deviation
            smallest = max(limit, -math.expm1(-half))
            result = f"a loss of {100 * smallest:.2g} % or more counts"
            if smallest > limit:
                result = f"only a loss of {100 * smallest:.2g} % or more could be seen: runs vary"
            is_judged = True
            for runs in listed:
                others = [other for other in listed if other is not runs]
                usual = statistics.median(other.median_log_rate for other in others)
                loss = -math.expm1(runs.median_log_rate - usual)
                if loss > smallest:
                    losses[runs], others_of[runs] = loss, others
        what = f"{count(len(listed), 'subset')} of {len(listed[0].gpus)}"
        if len(listed[0].gpus) == 1:
            what = f"{count(len(listed), unit(listed[0].cell.device))} alone"
        compared.append(f"{what} ({result})")
    slow = []
    for runs in sorted(losses, key=losses.__getitem__, reverse=True):
        below = f"{100 * losses[runs]:.1f} % below the median of the others"
        fault = _fault(runs, others_of[runs], losses)
        slow.append(f"SLOW: {gpu_list(runs.gpus)}, {below}: {fault}.")
    if not slow and is_judged and all(map(is_suspect, study.usable)):
        slow.append("NOT JUDGED: every run is suspect, so no device can be called healthy.")
    verdict = "No slow device" if is_judged else "Not judged"
    return slow, f"{'Compared' if slow else verdict}: {', '.join(compared)}.", is_judged


def _fault(runs: Runs, others: Sequence[Runs], slow: Collection[Runs]) -> str:
    reasons = []
    for device in slow:
        if set(device.gpus) < set(runs.gpus):
            reasons.append(f"{gpu_ids(device.gpus)} is slow alone")
    codes: dict[str, str] = {}
    for record in runs.records:
        codes |= record.validity.against
    mhz, usual_mhz, usual_transports = runs.median(CLOCK), [], []
    for other in others:
        usual_mhz += other.values(CLOCK)
        usual_transports.append(str(transport_of(other)))
        for record in other.records:
            for code in record.validity.against:
                codes.pop(code, None)
    reasons += codes.values()
    if mhz and usual_mhz and mhz < SLOWER_CLOCK * statistics.median(usual_mhz):
        reasons.append(f"its clock is {mhz:,.0f} MHz, usual {statistics.median(usual_mhz):,.0f}")
    transport = str(transport_of(runs))
    if transport not in usual_transports:
        reasons.append(f"NCCL used {transport}, usual {usual_transports[0]}")
    elif len(runs.gpus) > 1 and not reasons:
        reasons.append("each is as fast as the others alone, so look at the link between them")
    return "; ".join(reasons) or "no check says why"
