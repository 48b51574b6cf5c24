"""Which wire NCCL will take, said before the cell runs: from what is asked of NCCL and the link class between the GPUs."""

from collections.abc import Mapping

from analysis.prediction.links.model import DIRECT, HOST_MEMORY, NETWORK, ExchangeWire

# Distance by NCCL's levels; a link class of nvidia-smi is one of them, NV# is NVL and NODE lies between PHB and SYS.
LEVELS = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "NODE": 5, "SYS": 6}
_BY_DEFAULT = "PXB"  # up to which GPUs copy to each other (src/graph/paths.cc)
# Settings that choose the transport, and those that change no time: they are no part of what runs over a wire.
_OF_TRANSPORT = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
_WITHOUT_EFFECT = (
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_FILE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_RAS_ENABLE",
)


def asked_wire(nccl: Mapping[str, str], link_class: str | None, hosts: int = 1) -> ExchangeWire:
    """Return the wire that a cell should get. `link_class` is the farthest between its GPUs, such as NV18."""
    settings = tuple(sorted((name, str(value)) for name, value in nccl.items() if _counts(name)))
    if hosts > 1:
        return ExchangeWire(NETWORK, settings)
    word = "NVL" if (link_class or "NV").startswith("NV") else str(link_class)
    level = str(nccl.get("NCCL_P2P_LEVEL") or _BY_DEFAULT)
    allowed = LEVELS.get(level, LEVELS[_BY_DEFAULT]) >= LEVELS.get(word, LEVELS["SYS"])
    if allowed and str(nccl.get("NCCL_P2P_DISABLE", "0")) != "1":
        return ExchangeWire(DIRECT, settings)
    return ExchangeWire(
        NETWORK if str(nccl.get("NCCL_SHM_DISABLE", "0")) == "1" else HOST_MEMORY, settings
    )


def used_wire(transport: object, asked: ExchangeWire) -> ExchangeWire:
    """Return the wire that a cell had by NCCL's log, such as `P2P/CUMEM over NV18`; as asked where it does not say."""
    text = transport if isinstance(transport, str) else ""
    for start, found in (("P2P", DIRECT), ("SHM", HOST_MEMORY), ("NET", NETWORK)):
        if text.startswith(start):
            return ExchangeWire(found, asked.settings)
    return asked


def _counts(name: str) -> bool:
    return name not in _OF_TRANSPORT and name not in _WITHOUT_EFFECT
