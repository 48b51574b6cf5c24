"""Latencies and efficiencies of NCCL's own cost model, by version, for what was not measured.

Source: `ncclTopoTuneModel` in src/graph/tuning.cc of NCCL 2.28.9 and 2.30.7, whose numbers are equal. They differ between minor
releases, so that they are kept by version. Times are µs.
"""

import re
from dataclasses import dataclass, replace

RING, TREE = "ring", "tree"
LL, LL128, SIMPLE = "LL", "LL128", "Simple"


@dataclass(frozen=True)
class Constants:
    """The constants of one version."""

    version: str
    base_us: dict[tuple[str, str], float]  # (algorithm, protocol)
    hop_us: dict[
        tuple[str, str, str], float
    ]  # (wire, algorithm, protocol); wire: direct, host memory, network
    tree_share: float  # of a ring's bandwidth
    ll128_share: float  # of a wire's bandwidth: what is left beside the flags of protocol LL128


_OF_2_28 = Constants(
    "2.28",
    {
        (RING, LL): 6.6, (RING, LL128): 14.0, (RING, SIMPLE): 8.4,
        (TREE, LL): 6.8, (TREE, LL128): 14.0, (TREE, SIMPLE): 8.4,
    },
    {
        ("direct", RING, LL): 0.6, ("direct", RING, LL128): 1.9, ("direct", RING, SIMPLE): 3.4,
        ("direct", TREE, LL): 0.6, ("direct", TREE, LL128): 1.25, ("direct", TREE, SIMPLE): 4.0,
        ("host memory", RING, LL): 1.0, ("host memory", RING, LL128): 2.5, ("host memory", RING, SIMPLE): 5.7,
        ("network", RING, LL): 2.7, ("network", RING, LL128): 4.0, ("network", RING, SIMPLE): 14.0,
        ("network", TREE, LL): 5.0, ("network", TREE, LL128): 8.5, ("network", TREE, SIMPLE): 14.0,
    },
    0.92, 0.92,
)  # fmt: skip
BY_VERSION = {(2, 28): _OF_2_28, (2, 30): replace(_OF_2_28, version="2.30")}
# (GPU name, GB/s of one NVLink one way, most GB/s of protocol LL on one host): src/graph/topo.h and tuning.cc.
_NVLINKS = (
    (r"\b(?:H100|H200|H800|H20|GH200)\b", 20.6, 141.0),
    (r"\b(?:A100|A800|A30)\b", 20.0, 87.7),
    (r"\bV100\b", 20.0, 39.0),
    (r"\b(?:B100|B200|GB200|B300|GB300)\b", 40.1, 282.0),
)


def nvlink(gpu: str) -> tuple[float, float] | None:
    """Return what NCCL takes for one NVLink of a GPU one way, and the most for protocol LL, in GB/s; None if not known."""
    return next(((one, most) for pattern, one, most in _NVLINKS if re.search(pattern, gpu)), None)


def constants(version: str | None) -> tuple[Constants, str]:
    """Return the constants for a version of NCCL, and a sentence where they are those of another one, else ''."""
    wanted = tuple(int(part) for part in (version or "").split(".")[:2] if part.isdigit())
    if wanted in BY_VERSION:
        return BY_VERSION[wanted], ""
    older = [one for one in BY_VERSION if one <= wanted]
    taken = BY_VERSION[max(older) if older else min(BY_VERSION)]
    return (
        taken,
        f"NCCL {version or 'of unknown version'}: its constants are not known, those of {taken.version} are used",
    )
