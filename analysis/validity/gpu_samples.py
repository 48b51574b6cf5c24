"""What the samples of the GPUs (`gpus.jsonl`) say of a cell: clocks, power, throttling, other processes.

The launching process puts it into the record, and `python -m analysis verify` computes it again.
"""

import math
from typing import Any

from benchmarks.record import CellFolder, Kind, read_lines

# nvml.h, nvmlClocksEventReason*: hardware slowdown, software thermal, hardware thermal, hardware power brake.
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
POWER_CAPPED = 0x04  # the software power cap: normal on large GPUs, recorded
# Phases that form the timed window. A benchmark with none of them: all phases except PREPARING_PHASES.
TIMED_PHASES = ("timed", "concurrent")
PREPARING_PHASES = ("build", "connect", "first step", "warm-up", "check", "verify")


def summary(folder: CellFolder) -> tuple[dict[str, float], dict[str, Any]]:
    """Return (metrics of the timed window, facts for the validity checks) from the samples of a cell; empty without samples."""
    lines = list(read_lines(folder.gpu_samples))
    if not lines:
        return {}, {}
    opened, closed = _timed_window(folder)
    inside = [gpu for line in lines if opened <= line["time"] <= closed for gpu in line["gpus"]]
    before = [gpu for line in lines if line["kind"] == Kind.BEFORE for gpu in line["gpus"]]
    facts: dict[str, Any] = {
        "before_memory_bytes": max((gpu["memory_bytes"] for gpu in before if "memory_bytes" in gpu), default=None),
        "before_busy_percent": max((gpu["busy_percent"] for gpu in before if "busy_percent" in gpu), default=None),
        "processes_known": any("foreign_pids" in gpu for line in lines for gpu in line["gpus"]),
        "foreign_pids": sorted({pid for line in lines for gpu in line["gpus"] for pid in gpu.get("foreign_pids", [])}),
        "samples": len(inside),
    }
    if not inside:
        return {}, {"gpu_samples": facts}
    reasons = [gpu["reasons"] for gpu in inside if "reasons" in gpu]
    facts["throttle_reasons"] = sorted({hex(reason & THROTTLED) for reason in reasons if reason & THROTTLED})
    facts["reasons_known"] = bool(reasons)
    metrics = {
        "gpu/sm_mhz": _mean(inside, "sm_mhz"),
        "gpu/power_w": _mean(inside, "power_w"),
        "gpu/temperature_c": _mean(inside, "temperature_c"),
        "gpu/power_capped_share": sum(bool(r & POWER_CAPPED) for r in reasons) / len(reasons) if reasons else None,
    }
    return {name: value for name, value in metrics.items() if value is not None}, {"gpu_samples": facts}


def _mean(samples: list[dict[str, Any]], name: str) -> float | None:
    values = [sample[name] for sample in samples if name in sample]
    return math.fsum(values) / len(values) if values else None


def _timed_window(folder: CellFolder) -> tuple[float, float]:
    """Return when rank 0 entered its first timed phase and left its last, in seconds since 1970; an empty window if it had none.

    The last phase ends when the rank has its result.
    """
    lines = [line for line in read_lines(folder.rank_lines(0)) if line["kind"] in (Kind.PHASE, Kind.RESULT)]
    phases = [line for line in lines if line["kind"] == Kind.PHASE]
    named = [phase for phase in phases if phase["phase"] in TIMED_PHASES]
    timed = named or [phase for phase in phases if phase["phase"] not in PREPARING_PHASES]
    if not timed:
        return float("inf"), float("-inf")
    following = lines[lines.index(timed[-1]) + 1 :]
    return timed[0]["time"], following[0]["time"] if following else float("inf")
