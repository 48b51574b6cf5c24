"""The settings that a cell requested of NCCL, against what NCCL's log shows.

Codes: `setting_ignored`, `setting_no_effect`, `transport_unexpected`, `algorithm_unexpected`,
`channels_unexpected`, `effect_not_checked`. What a log cannot show is `unchecked`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.nccl.announcements import VISIBLE, announcement, same_value
from analysis.nccl.log import NcclLog, version_numbers
from analysis.nccl.transports import NET, pair_class
from analysis.validity.check import list_some
from conf.nccl import (
    ALGORITHMS,
    AVAILABLE,
    DISTANCES,
    PROTOCOLS,
    allowed,
    in_table,
    legacy_number,
    level_word,
)

FEWEST_OF_MAXIMUM = 32  # NCCL's own upper limit of channels, or less: a larger minimum is capped
WORDS = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}
CHANNEL_LIMITS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
# The nearest NCCL level that includes a link class of nvidia-smi; NV# is NVL. NODE is one CPU, as
# NCCL's PHB.
NEEDED_LEVEL = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
# A value of a variable, and the transports that it rules out.
RULED_OUT = {
    "NCCL_P2P_DISABLE": ("1", "P2P/"),
    "NCCL_SHM_DISABLE": ("1", "SHM/"),
    "NCCL_IB_DISABLE": ("1", "NET/IB"),
    "NCCL_CUMEM_ENABLE": ("0", "P2P/CUMEM"),
}
# Variables that name the devices of a network.
DEVICES = {"NCCL_IB_HCA": "NET/IB", "NCCL_SOCKET_IFNAME": "NET/Socket"}
DISABLE = "NCCL_P2P_DISABLE"
NEED_CONNECTIONS = ("NCCL_P2P_LEVEL", DISABLE, "NCCL_SHM_DISABLE")

Answer = tuple[str, str]  # the end of a sentence, and the severity
Choices = dict[tuple[str | None, int], set[tuple[str, str, int | None]]]  # by function and bytes


@dataclass(frozen=True)
class SettingResult:
    """One statement about a cell and a variable of NCCL."""

    code: str
    sentence: str
    severity: str  # invalid, suspect, finding, unchecked
    setting: str | None = None


@dataclass(frozen=True)
class Evidence:
    """One cell: its requested settings, its log, and its machine."""

    requested: Mapping[str, str]  # {"NCCL_P2P_LEVEL": "LOC"}
    log: NcclLog
    # {"0-1": "NV18"} by GPU id, {"a:0-1": "NV18"} where the cell has hosts
    link_classes: Mapping[str, str] | None = None
    gpus: Sequence[int | str] | None = None  # in rank order, used if the log has no NVML index


def check_setting(
    name: str,
    value: str,
    evidence: Evidence | None,
    same_cell_without: NcclLog | None,
    tuning: NcclLog | None = None,
) -> list[SettingResult]:
    """Check one setting of a cell; `evidence` is None without a log.

    `same_cell_without` is the log of the same cell without this setting; `tuning` the log of a pass
    that names every choice of NCCL, which then decides about algorithms.
    """
    what = f"{name}={value}"
    results: list[SettingResult] = []
    if evidence is None:
        text = f"{what} was not checked: there is no NCCL log"
        results.append(SettingResult("setting_ignored", text, "unchecked", name))
    else:
        log = evidence.log
        ignored = _announced(name, value, evidence)
        if ignored is not None:
            end, severity = ignored
            results.append(SettingResult("setting_ignored", f"{what} {end}", severity, name))
        for text, severity in _connections(name, value, evidence):
            results.append(SettingResult("transport_unexpected", what + text, severity, name))
        if not in_table(name):
            text = f"{what} was not checked: Ringside does not know what it should change"
            if name in log.settings:
                text += "; NCCL's log says that it was read"
            results.append(SettingResult("effect_not_checked", text, "unchecked", name))
        if tuning is None:
            results += _algorithms(name, value, log)
        results += _channel_limit(name, value, log)
        is_ignored = ignored is not None and ignored[1] == "invalid"
        if same_cell_without is not None and name in VISIBLE and not is_ignored:
            effect = _no_effect(name, value, log, same_cell_without)
            if effect is not None:
                end, severity = effect
                results.append(SettingResult("setting_no_effect", what + end, severity, name))
    if tuning is not None:
        results += _algorithms(name, value, tuning)
    return results


# Whether NCCL announced a requested setting with its value.


def _announced(name: str, value: str, evidence: Evidence) -> Answer | None:
    log = evidence.log
    when = announcement(name, value, version_numbers(log.version))
    # without a version NCCL_P2P_DISABLE=1 may be announced either way
    either = name == DISABLE and value == "1" and log.version is None
    if (when == "level" or either) and log.settings.get("NCCL_P2P_LEVEL") == "LOC":
        return None
    if name in log.conflicts:
        return f"differs between ranks: NCCL says {', '.join(log.conflicts[name])}", "invalid"
    if name in log.settings:
        if not same_value(name, value, log.settings[name]):
            return f"was not used: NCCL says {log.settings[name]}", "invalid"
        writers = log.announced_by.get(name, 0)
        if when != "always" or not 0 < writers < log.processes:
            return None
        text = f"was used by {writers} of {log.processes} processes, by NCCL's log"
        if log.lost or log.truncated:
            return f"{text}; lines are missing in the log", "unchecked"
        return text, "suspect"
    if when == "never":
        if name != "NCCL_NET" or log.network is None:
            return "was not checked: NCCL's log never names it", "unchecked"
        # a plugin's name carries more than what was asked for (IB: IBext_v8)
        if value.lower() in log.network.lower():
            return None
        return f"was not used: NCCL uses network {log.network}", "invalid"
    # why the log may lack the announcement of a variable that NCCL took
    why = ""
    if when == "used":
        why = "NCCL's log names it only where it is used, and does not"
    elif log.nranks == 1:
        why = "one rank has no connections"
    elif log.lost or not (log.transports or log.channels_from):
        why = "it may be in the missing lines of NCCL's log"
    if why:
        return f"was not checked: {why}", "unchecked"
    disabled = (evidence.requested.get(DISABLE), log.settings.get(DISABLE))
    if name == "NCCL_P2P_LEVEL" and "1" in disabled:
        return "was ignored: NCCL_P2P_DISABLE=1 overrides it", "invalid"
    return "was ignored: the log has no 'set by environment' line for it", "invalid"


# Whether NCCL chose an algorithm, a protocol or a number of channels that a setting rules out.


def _algorithms(name: str, value: str, log: NcclLog) -> Iterator[SettingResult]:
    if name not in WORDS:
        return
    code, what = "algorithm_unexpected", f"{name}={value}"
    if not log.algorithms:
        text = f"{what} was not checked: NCCL's log has no TUNING line"
        yield SettingResult(code, text, "unchecked", name)
        return
    try:
        may = allowed(value, WORDS[name])
    except ValueError as error:
        yield SettingResult(code, f"{what} was not checked: {error}", "unchecked", name)
        return
    wrong = []
    for choice in log.algorithms:
        word = choice.protocol
        if name == "NCCL_ALGO":
            word = choice.algorithm
        left: set[str] = set().union(*may.values())
        if choice.function is not None:  # to 2.22: wrong only if no function may have it
            left = may.get(choice.function, {word})
            if name == "NCCL_ALGO" and not left & AVAILABLE.get(choice.function, left):
                continue  # the function has none of them: older releases take Ring
        if word not in left:
            wrong.append(f"{choice.function or 'a collective'} of {choice.size} bytes used {word}")
    if wrong:
        yield SettingResult(code, f"{what}, but {list_some(wrong)}", "invalid", name)


def _channel_limit(name: str, value: str, log: NcclLog) -> Iterator[SettingResult]:
    if name not in CHANNEL_LIMITS or not re.fullmatch(r"[0-9]{1,9}", value):
        return
    code, count, limit = "channels_unexpected", log.channels.get("collective"), int(value)
    if count is None:
        text = f"{name}={limit} was not checked: NCCL's log has no number of channels"
        yield SettingResult(code, text, "unchecked", name)
        return
    is_wrong = 0 < limit < count
    if "_MIN_" in name:
        is_wrong = count < min(limit, FEWEST_OF_MAXIMUM)
    if is_wrong:
        text = f"{name}={limit}, but NCCL used {count} channels"
        yield SettingResult(code, text, "invalid", name)


# Whether NCCL connected GPUs in a way that a setting rules out.


def _connections(name: str, value: str, evidence: Evidence) -> Iterator[Answer]:
    log = evidence.log
    if not log.transports:
        if name in NEED_CONNECTIONS:
            yield " was not checked: NCCL's log shows no connection", "unchecked"
        return
    if name == "NCCL_P2P_LEVEL":
        yield from _level(level_word(value), evidence)
        return
    used = ""
    if name == "NCCL_NVLS_ENABLE" and value == "0":
        chosen = set()
        for choice in log.algorithms:
            if choice.algorithm.startswith("NVLS"):
                chosen.add(choice.algorithm)
        used = " and ".join(sorted(chosen))
        if not used and log.channels.get("nvls"):
            used = "NVLS channels"
    elif name == "NCCL_NET":
        wrong = []
        for word in sorted(set().union(*log.transports.values())):
            if word.startswith("NET/") and word.split("/")[1].lower() != value.lower():
                wrong.append(word)
        used = list_some(wrong)
    elif name == "NCCL_NET_GDR_LEVEL" and level_word(value) == "LOC":
        used = _used(log, "NET/", "GDRDMA")
    elif name in DEVICES and _used(log, DEVICES[name]):
        nics: set[str] = set().union(*log.nics.values())
        used = list_some(sorted(nic for nic in nics if not _is_among(nic, value)))
    elif name in RULED_OUT and value == RULED_OUT[name][0]:
        used = _used(log, RULED_OUT[name][1])
    if used:
        yield f", but NCCL used {used}", "invalid"


def _is_among(nic: str, value: str) -> bool:
    """Tell whether a network device is among those of `mlx5`, `=mlx5_0:1,mlx5_1` or `^=eth0`.

    A name stands for all that begin with it; after `=` for itself; after `^` for all others.
    """
    if "/" in nic:
        return True  # a device without a name may be any
    excluded, exact = value.startswith("^"), "=" in value[:2]
    names = [name.partition(":")[0] for name in value.lstrip("^=").split(",")]
    for part in nic.split("+"):
        is_named = part in names or (not exact and part.startswith(tuple(names)))
        if is_named == excluded:
            return False
    return True


def _used(log: NcclLog, kind: str, having: str = "") -> str:
    """List the transports of a kind with their pairs of ranks; empty if there is none."""
    used: dict[str, list[str]] = defaultdict(list)
    for pair, words in log.transports.items():
        for word in words:
            if word.startswith(kind) and having in word:
                used[word].append(pair)
    return ", ".join(f"{word} on {list_some(pairs)}" for word, pairs in used.items())


def _level(level: str, evidence: Evidence) -> Iterator[Answer]:
    """Check for P2P beyond the level, and for another transport than P2P within it."""
    if level == "LOC":
        used = _used(evidence.log, "P2P/")
        if used:
            yield f", but NCCL used {used}", "invalid"
        return
    if level not in DISTANCES or evidence.requested.get(DISABLE) == "1":
        return
    asked_level = DISTANCES.index(level)
    unknown: dict[str, None] = {}
    beyond, unused = [], []
    for pair, words in evidence.log.transports.items():
        link = pair_class(pair, evidence.log, evidence.link_classes, evidence.gpus)
        needed = NEEDED_LEVEL.get(link or "")
        if link is not None and link.startswith("NV"):
            needed = "NVL"
        for word in words:
            if link == NET and not word.startswith("P2P/"):
                continue  # between hosts there is no peer access that a level could allow
            if needed is None:
                unknown[pair] = None
            elif word.startswith("P2P/indirect"):
                if asked_level < DISTANCES.index("NVB"):
                    beyond.append(f"{word} on {pair}")
            elif word.startswith("P2P/"):
                if asked_level < DISTANCES.index(needed):
                    beyond.append(f"{word} over {link} on {pair}")
            elif asked_level >= DISTANCES.index(needed):
                unused.append(f"{word} on {pair} ({link})")
    if beyond:
        # between PCIe levels a virtual machine may show another class than NCCL found
        severity = "invalid" if level in ("NVL", "NVB") else "suspect"
        yield f", but NCCL used {list_some(beyond)}", severity
    if unused:
        yield f", but NCCL did not use P2P where it may: {list_some(unused)}", "suspect"
    if unknown:
        pairs = list_some(list(unknown))
        text = f", but the link class of {pairs} is not known, so the use of P2P was not checked"
        yield text, "unchecked"


# Whether a setting changed anything, against the log of the same cell without it.


def _no_effect(name: str, value: str, log: NcclLog, without: NcclLog) -> Answer | None:
    """Compare transports, channels and algorithms; None if one of them differs."""
    unknown = " has an unknown effect: "
    if name in without.settings and same_value(name, value, without.settings[name]):
        return f"{unknown}the cell without it has the same setting in its NCCL log", "unchecked"
    if not (log.transports and without.transports):
        return f"{unknown}one of the two NCCL logs shows no connection", "unchecked"
    if log.transports != without.transports:
        return None
    has_channels = False
    for kind, count in log.channels.items():
        if count is not None and without.channels.get(kind) is not None:
            has_channels = True
            if count != without.channels[kind]:
                return None
    here, there = _choices_by_size(log), _choices_by_size(without)
    common = here.keys() & there.keys()
    for key in common:
        if here[key] != there[key]:
            return None
    if name in WORDS and not common:
        return f"{unknown}the two NCCL logs have no message size in common", "unchecked"
    transports = " + ".join(sorted(set().union(*log.transports.values())))
    same = [transports]
    if has_channels and log.channels["collective"] is not None:
        same.append(f"{log.channels['collective']} channels")
    if common:
        same.append("the same algorithms")
    text = f" changed nothing: NCCL used the same transports as without it ({', '.join(same)})"
    word = level_word(value)
    is_level = name == "NCCL_P2P_LEVEL" and word in DISTANCES and transports.startswith("P2P/")
    if is_level and DISTANCES.index(word) >= DISTANCES.index("PIX"):
        legacy = legacy_number(word)
        level = f"level {word}"
        if legacy is not None:
            level = f"level {legacy} ({word})"
        text += f"; {level} is the longest way that P2P may take, so it does not force PCIe"
    return text, "finding"


def _choices_by_size(log: NcclLog) -> Choices:
    choices: Choices = defaultdict(set)
    for choice in log.algorithms:
        key = choice.function, choice.size
        choices[key].add((choice.algorithm, choice.protocol, choice.channels))
    return choices
