"""A ring as NCCL models it: its steps, what each rank sends, and how much longer it takes on more ranks.

    modelled = min over protocols of base + steps · hop + bytes · factor ÷ bandwidth

NCCL computes so which protocol it takes (`ncclTopoTuneModel`). Two rings whose ranks have equal shares (bytes ÷ ranks) begin and
end alike, so their difference is that of the model: what a measured ring took beyond it, a local copy of a share among it, stays.
"""

from dataclasses import dataclass

from analysis.prediction.links.nccl_constants import LL, LL128, RING, SIMPLE, Constants
from benchmarks.collectives.busbw import COLLECTIVES

TOGETHER = " + "  # between the collectives of one exchange
_RINGS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class NvLinks:
    """What joins two GPUs of one machine, alike for every two, as NCCL counts it."""

    gb_per_s: float  # of all links of a GPU, one way
    most_ll_gb_per_s: float  # of protocol LL, on one host


def factor(kind: str, ranks: int) -> float:
    """Return busbw ÷ algbw, as nccl-tests has it; of `reduce_scatter + all_gather` that of both together."""
    return sum(COLLECTIVES[one].factor(ranks) for one in kind.split(TOGETHER))


def steps(kind: str, ranks: int) -> int:
    """Return the steps of a ring."""
    return sum(max(1, COLLECTIVES[one].trips) for one in kind.split(TOGETHER)) * (ranks - 1)


def is_ring(kind: str) -> bool:
    """Tell whether every part of a collective runs as a ring in which each rank has a share."""
    return all(one in _RINGS for one in kind.split(TOGETHER))


def modelled_us(
    kind: str, size_bytes: float, ranks: int, links: NvLinks, known: Constants
) -> float:
    """Return the time of a ring on one host by NCCL's model, in µs, with the protocol that is fastest by it."""
    full = links.gb_per_s
    rates = {
        LL: min(full / 2, links.most_ll_gb_per_s),
        LL128: full * known.ll128_share,
        SIMPLE: full,
    }
    hops, sent = steps(kind, ranks), size_bytes * factor(kind, ranks)
    return min(
        known.base_us[RING, protocol]
        + hops * known.hop_us["direct", RING, protocol]
        + sent / rate / 1e3
        for protocol, rate in rates.items()
    )
