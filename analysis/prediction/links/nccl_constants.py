"""Latencies and efficiencies of NCCL's own cost model, by version, for what was not measured.

Source: `ncclTopoTuneModel` in src/graph/tuning.cc of NCCL 2.28.9 and 2.30.7, whose numbers are equal. They differ between minor
releases, so that they are kept by version. Times are µs.
"""

from dataclasses import dataclass

RING, TREE = "ring", "tree"
LL, LL128, SIMPLE = "LL", "LL128", "Simple"


@dataclass(frozen=True)
class Constants:
    """The constants of one version."""

    version: str
    base_us: dict[tuple[str, str], float]  # (algorithm, protocol)
    hop_us: dict[tuple[str, str, str], float]  # (wire, algorithm, protocol); wire: direct, host memory, network
    tree_share: float  # of a ring's bandwidth


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
    0.92,
)  # fmt: skip
BY_VERSION = {(2, 28): _OF_2_28, (2, 30): Constants("2.30", _OF_2_28.base_us, _OF_2_28.hop_us, _OF_2_28.tree_share)}


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
