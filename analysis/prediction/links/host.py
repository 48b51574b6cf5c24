"""Copies between GPUs and host memory, and with the links between GPUs all that the exchange of a strategy may rest on."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from analysis.prediction.links.model import DIRECT, HOST_MEMORY, MEASURED, SCALED, KnownLinks

HOST_SCATTER = 0.10  # of host memory, from one number of GPUs to another


@dataclass(frozen=True)
class HostLink:
    """Copies between host memory and all GPUs at once, both ways: {GPUs: GB/s in sum}."""

    sums_gb_per_s: Mapping[int, float] = field(default_factory=dict)

    def at(self, gpus: int) -> tuple[float, str] | None:
        """Return the sum for a number of GPUs at once, and where it comes from; None where nothing was measured.

        Between 1 and k GPUs the share that each loses to every other is fitted: sum(n) = n · sum(1) ÷ (1 + s · (n − 1)).
        """
        known = self.sums_gb_per_s
        if gpus in known:
            return known[gpus], MEASURED
        if not known:
            return None
        most = max(known)
        one = known.get(1, known[min(known)] / min(known))
        shared = max(0.0, (most * one / known[most] - 1) / (most - 1)) if most > 1 else 0.0
        return gpus * one / (1 + shared * (gpus - 1)), SCALED


@dataclass(frozen=True)
class Known:
    """What the exchange of a strategy may rest on."""

    links: KnownLinks
    host: HostLink = field(default_factory=HostLink)

    def by_structure(self) -> "Known":
        """Return the same with units for copies that were not measured: only ratios of its times mean something.

        Host memory is then taken as shared by all GPUs.
        """
        copies = {transport: 1.0 for transport in (DIRECT, HOST_MEMORY)} | {
            **self.links.copies_gb_per_s
        }
        host = self.host if self.host.sums_gb_per_s else HostLink({1: 1.0, 2: 1.0})
        return Known(replace(self.links, copies_gb_per_s=copies), host)
