"""A network between hosts that was not measured, as the user describes it: `8x50GB/s,5us`."""

import re
from dataclasses import dataclass

FORM = "<NICs of a host>x<rate>GB/s,<latency>us, such as 8x50GB/s,5us (1 GB/s = 8 Gbit/s)"
_PATTERN = re.compile(r"(\d{1,3})x(\d+(?:\.\d+)?)GB/s,(\d+(?:\.\d+)?)us", re.IGNORECASE | re.ASCII)
_MOST_RATE, _MOST_LATENCY = 10_000.0, 100_000.0


@dataclass(frozen=True)
class HostNetwork:
    """The network of a forecast; nothing of it was measured."""

    nics: int  # of each host
    gb_per_s: float  # of each NIC, one way
    latency_us: float  # from one host to another

    @property
    def host_gb_per_s(self) -> float:
        """What a host sends with all its NICs."""
        return self.nics * self.gb_per_s


def read_network(text: str) -> HostNetwork:
    """Read the argument of --net. Raises ValueError."""
    found = _PATTERN.fullmatch(text.replace(" ", ""))
    if not found:
        raise ValueError(f"--net {text!r}: accepted is {FORM}")
    network = HostNetwork(int(found[1]), float(found[2]), float(found[3]))
    if not (
        network.nics and 0 < network.gb_per_s <= _MOST_RATE and network.latency_us <= _MOST_LATENCY
    ):
        raise ValueError(
            f"--net {text!r}: at least one NIC, above 0 and at most {_MOST_RATE:g} GB/s, at most 0.1 s"
        )
    return network
