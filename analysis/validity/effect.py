"""Whether a setting changed anything, against the log of the same cell without it: code `setting_no_effect`."""

from collections import defaultdict

from analysis.nccl.announcements import same_value
from analysis.nccl.log import NcclLog
from analysis.validity.evidence import SettingResult
from conf.nccl import DISTANCES, legacy_number, level_word

Choices = dict[
    tuple[str | None, int], set[tuple[str, str, int | None]]
]  # (function, bytes): what NCCL chose


def no_effect(name: str, value: str, log: NcclLog, other: NcclLog) -> SettingResult | None:
    """Compare transports, channels and algorithms; None if one of them differs."""

    def result(sentence: str, severity: str) -> SettingResult:
        return SettingResult("setting_no_effect", f"{name}={value}{sentence}", severity, name)

    if name in other.settings and same_value(name, value, other.settings[name]):
        return result(
            " has an unknown effect: the cell without it has the same setting in its NCCL log",
            "unchecked",
        )
    if not (log.transports and other.transports):
        return result(
            " has an unknown effect: one of the two NCCL logs shows no connection", "unchecked"
        )
    channels = _common_channels(log, other)
    here, there = _choices(log), _choices(other)
    common = here.keys() & there.keys()
    if log.transports != other.transports or any(one != two for one, two in channels):
        return None
    if any(here[key] != there[key] for key in common):
        return None
    if name in ("NCCL_ALGO", "NCCL_PROTO") and not common:
        return result(
            " has an unknown effect: the two NCCL logs have no message size in common", "unchecked"
        )
    return result(_what_stayed(name, value, log, bool(channels), bool(common)), "finding")


def _what_stayed(name: str, value: str, log: NcclLog, channels: bool, algorithms: bool) -> str:
    """Say what is the same; add what NCCL_P2P_LEVEL means where its value looks like a demand for PCIe."""
    transports = " + ".join(sorted({word for words in log.transports.values() for word in words}))
    same = [transports]
    if channels and log.channels["collective"] is not None:
        same.append(f"{log.channels['collective']} channels")
    if algorithms:
        same.append("the same algorithms")
    said = f"NCCL used the same transports as without it ({', '.join(same)})"
    word = level_word(value)
    if (
        name != "NCCL_P2P_LEVEL"
        or word not in DISTANCES
        or DISTANCES.index(word) < DISTANCES.index("PIX")
    ):
        return f" changed nothing: {said}"
    if not transports.startswith("P2P/"):
        return f" changed nothing: {said}"
    number = legacy_number(word)
    level = f"level {number} ({word})" if number is not None else f"level {word}"
    return f" changed nothing: {said}; {level} is the longest way that P2P may take, so it does not force PCIe"


def _common_channels(log: NcclLog, other: NcclLog) -> list[tuple[int, int | None]]:
    """Return the counts of each kind of channel that both logs have."""
    return [
        (count, other.channels.get(kind))
        for kind, count in log.channels.items()
        if count is not None and other.channels.get(kind) is not None
    ]


def _choices(log: NcclLog) -> Choices:
    choices: Choices = defaultdict(set)
    for one in log.algorithms:
        choices[one.function, one.size].add((one.algorithm, one.protocol, one.channels))
    return choices
