"""Whether NCCL connected GPUs in a way that a requested setting rules out: code `transport_unexpected`."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from analysis.nccl.log import NcclLog
from analysis.nccl.transports import NET, pair_class
from analysis.validity.evidence import Evidence, SettingResult, list_some
from conf.nccl import DISTANCES, level_word

# The nearest NCCL level that includes a link class of nvidia-smi; NV# is NVL. NODE is one CPU, as NCCL's PHB.
_NEEDED_LEVEL = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
# A value of a variable, and the transports that it rules out.
_RULED_OUT = {
    "NCCL_P2P_DISABLE": ("1", "P2P/"),
    "NCCL_SHM_DISABLE": ("1", "SHM/"),
    "NCCL_IB_DISABLE": ("1", "NET/IB"),
    "NCCL_CUMEM_ENABLE": ("0", "P2P/CUMEM"),
}
_DEVICES = {
    "NCCL_IB_HCA": "NET/IB",
    "NCCL_SOCKET_IFNAME": "NET/Socket",
}  # variables that name the devices of a network
_NEED_CONNECTIONS = ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def connections(name: str, evidence: Evidence) -> Iterator[SettingResult]:
    """Check the transports in the log against one variable."""
    value, log = evidence.requested[name], evidence.log
    if not log.transports:
        if name in _NEED_CONNECTIONS:
            text = f"{name}={value} was not checked: NCCL's log shows no connection"
            yield SettingResult("transport_unexpected", text, "unchecked", name)
    elif name == "NCCL_P2P_LEVEL":
        yield from _level(value, evidence)
    elif name == "NCCL_NVLS_ENABLE" and value == "0":
        chosen = sorted(
            {one.algorithm for one in log.algorithms if one.algorithm.startswith("NVLS")}
        )
        if chosen or log.channels.get("nvls"):
            yield _unexpected(
                evidence, name, f"NCCL used {' and '.join(chosen) or 'NVLS channels'}"
            )
    elif name == "NCCL_NET":
        networks = {
            word for words in log.transports.values() for word in words if word.startswith("NET/")
        }
        if others := sorted(
            word for word in networks if word.split("/")[1].lower() != value.lower()
        ):
            yield _unexpected(evidence, name, f"NCCL used {list_some(others)}")
    elif name == "NCCL_NET_GDR_LEVEL" and level_word(value) == "LOC":
        if used_directly := _used(log, "NET/", "GDRDMA"):
            yield _unexpected(evidence, name, f"NCCL used {used_directly}")
    elif name in _DEVICES:
        others = sorted(
            {nic for nics in log.nics.values() for nic in nics if not _is_among(nic, value)}
        )
        if others and _used(log, _DEVICES[name]):
            yield _unexpected(evidence, name, f"NCCL used {list_some(others)}")
    elif name in _RULED_OUT:
        wrong, kind = _RULED_OUT[name]
        used = _used(log, kind)
        if value == wrong and used:
            yield _unexpected(evidence, name, f"NCCL used {used}")


def _is_among(nic: str, value: str) -> bool:
    """Tell whether a network device is among those that a variable names: `mlx5`, `=mlx5_0:1,mlx5_1`, `^=eth0`.

    A name stands for all that begin with it; after `=` for itself; after `^` for all others.
    """
    excluded, exact = value.startswith("^"), "=" in value[:2]
    names = [one.partition(":")[0] for one in value.lstrip("^=").split(",")]
    named = (
        any(part == one if exact else part.startswith(one) for one in names)
        for part in nic.split("+")
    )
    return "/" in nic or all(one != excluded for one in named)  # a device without a name may be any


def _used(log: NcclLog, kind: str, having: str = "") -> str:
    """List the transports of a kind with their pairs of ranks; empty if there is none."""
    used: dict[str, list[str]] = defaultdict(list)
    for pair, words in log.transports.items():
        for word in words:
            used[word].append(pair)
    return ", ".join(
        f"{word} on {list_some(pairs)}"
        for word, pairs in used.items()
        if word.startswith(kind) and having in word
    )


def _unexpected(
    evidence: Evidence, name: str, what: str, severity: str = "invalid"
) -> SettingResult:
    return SettingResult(
        "transport_unexpected", f"{name}={evidence.requested[name]}, but {what}", severity, name
    )


@dataclass
class _Judged:
    """Connections by what the level says of them."""

    unknown: list[str] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)  # P2P over a distance above the level
    unused: list[str] = field(default_factory=list)  # P2P is allowed and another transport used


def _level(value: str, evidence: Evidence) -> Iterator[SettingResult]:
    """Check for P2P beyond the level, and for another transport than P2P within it."""
    level, name = level_word(value), "NCCL_P2P_LEVEL"
    if level == "LOC":
        if used := _used(evidence.log, "P2P/"):
            yield _unexpected(evidence, name, f"NCCL used {used}")
        return
    if level not in DISTANCES or evidence.requested.get("NCCL_P2P_DISABLE") == "1":
        return
    judged = _Judged()
    for pair, words in evidence.log.transports.items():
        link = pair_class(pair, evidence.log, evidence.link_classes, evidence.gpus)
        for word in words:
            if link == NET and not word.startswith("P2P/"):
                continue  # between hosts there is no peer access that a level could allow
            _judge_connection(word, pair, link, DISTANCES.index(level), judged)
    if judged.beyond:
        # between PCIe levels a virtual machine may show another class than NCCL found
        severity = "invalid" if level in ("NVL", "NVB") else "suspect"
        yield _unexpected(evidence, name, f"NCCL used {list_some(judged.beyond)}", severity)
    if judged.unused:
        yield _unexpected(
            evidence,
            name,
            f"NCCL did not use P2P where it may: {list_some(judged.unused)}",
            "suspect",
        )
    if judged.unknown:
        pairs = list_some(list(dict.fromkeys(judged.unknown)))
        text = f"the link class of {pairs} is not known, so the use of P2P was not checked"
        yield _unexpected(evidence, name, text, "unchecked")


def _judge_connection(word: str, pair: str, link: str | None, level: int, judged: _Judged) -> None:
    """Enter one connection; `level` is the place in `DISTANCES` of the requested level."""
    needed = _needed_level(link)
    if link is None or needed is None:
        judged.unknown.append(pair)
    elif word.startswith("P2P/indirect"):
        if level < DISTANCES.index("NVB"):
            judged.beyond.append(f"{word} on {pair}")
    elif word.startswith("P2P/"):
        if level < DISTANCES.index(needed):
            judged.beyond.append(f"{word} over {link} on {pair}")
    elif level >= DISTANCES.index(needed):
        judged.unused.append(f"{word} on {pair} ({link})")


def _needed_level(link: str | None) -> str | None:
    """Return the lowest level that allows P2P over a link class; None where the class is not known."""
    return "NVL" if link is not None and link.startswith("NV") else _NEEDED_LEVEL.get(link or "")
