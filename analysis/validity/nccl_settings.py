"""The settings that a cell requested of NCCL, against what NCCL's log shows.

Codes: `setting_ignored`, `setting_no_effect`, `transport_unexpected`, `algorithm_unexpected`,
`channels_unexpected`, `effect_not_checked`. What a log cannot show is `unchecked`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from analysis.nccl.log import NET, NcclLog, pair_class, version_numbers
from analysis.text import join_words
from analysis.validity.check import MOST_NAMED
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

# At every start of a communicator of two ranks or more, to the ENV subsystem, from this release on.
_ANNOUNCED_SINCE = {
    "NCCL_ALGO": (2, 5),
    "NCCL_PROTO": (2, 5),
    "NCCL_MIN_NCHANNELS": (2, 5),
    "NCCL_MAX_NCHANNELS": (2, 5),
    "NCCL_NTHREADS": (2, 5),
    "NCCL_BUFFSIZE": (2, 5),
    "NCCL_SOCKET_IFNAME": (2, 5),
    "NCCL_COLLNET_ENABLE": (2, 12),
    "NCCL_IGNORE_CPU_AFFINITY": (2, 5),
    "NCCL_MIN_CTAS": (2, 17),
    "NCCL_MAX_CTAS": (2, 17),
    "NCCL_CGA_CLUSTER_SIZE": (2, 17),
    "NCCL_NVLS_ENABLE": (2, 18),
    "NCCL_LAUNCH_MODE": (2, 18),
    "NCCL_PAT_ENABLE": (2, 23),
}
# Integers were announced to every subsystem before this release, to ENV alone from it on.
_ENV_ONLY_INTEGERS = (2, 15)
_TEXT_SETTINGS = {"NCCL_ALGO", "NCCL_PROTO", "NCCL_SOCKET_IFNAME", "NCCL_LAUNCH_MODE"}

# Variables whose effect shows in transports, channels or algorithms: only for these an equal log
# means "no effect".
VISIBLE = {
    *("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_P2P_DIRECT_DISABLE", "NCCL_SHM_DISABLE"),
    *("NCCL_NVB_DISABLE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"),
    *("NCCL_PXN_DISABLE", "NCCL_CROSS_NIC", "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_COLLNET_ENABLE", "NCCL_MNNVL_ENABLE", "NCCL_PAT_ENABLE"),
}


def same_value(name: str, requested: str, announced: str) -> bool:
    """Tell whether NCCL announced the requested value.

    NCCL reads integers as C does and prints decimals.
    """
    if name in ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"):
        return level_word(requested) == level_word(announced)
    if name == "NCCL_LAUNCH_MODE":
        mode = "GROUP" if requested.upper() == "GROUP" else "PARALLEL"
        return announced == mode
    if requested == announced:
        return True
    text = requested.strip()
    octal = re.fullmatch(r"([+-]?)0([0-7]+)", text)
    try:
        if octal:
            value = int(octal[1] + octal[2], 8)
        else:
            value = int(text, 0)
        # before 2.12 negative numbers were printed as unsigned ones
        return value % 2**64 == int(announced) % 2**64
    except ValueError:
        return False


def announcement(name: str, value: str, version: tuple[int, ...] | None) -> str:
    """Return when a variable is announced.

    "always"; "env": at start, when the ENV subsystem is logged; "used": only where its code is
    reached; "level": not itself, `NCCL_P2P_LEVEL … LOC` instead (NCCL_P2P_DISABLE=1 to 2.22);
    "never".
    """
    if name == "NCCL_P2P_DISABLE":
        if value != "1":
            return "never"  # only a 1 is announced
        return "level" if version is not None and version < (2, 23) else "always"
    if name == "NCCL_P2P_LEVEL":
        return "always"  # while the topology is searched, whatever NCCL_DEBUG_SUBSYS selects
    if name == "NCCL_NET":
        return "never"  # the line `Using network` says it instead
    since = _ANNOUNCED_SINCE.get(name)
    if since is None or (version is not None and version < since):
        return "used"
    if name not in _TEXT_SETTINGS and version is not None and version < _ENV_ONLY_INTEGERS:
        return "always"
    return "env"


MOST_CHANNELS = 32  # of NCCL, in some releases more: a larger minimum is capped
WORDS_OF = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}
CHANNEL_LIMITS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
# The nearest NCCL level that includes a link class of nvidia-smi; NV# is NVL. NODE is one CPU, as
# NCCL's PHB.
NEEDED_LEVEL = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
# Variables and values, and how the names of the transports begin that these rule out.
RULED_OUT = {
    "NCCL_P2P_DISABLE=1": "P2P/",
    "NCCL_SHM_DISABLE=1": "SHM/",
    "NCCL_IB_DISABLE=1": "NET/IB",
    "NCCL_CUMEM_ENABLE=0": "P2P/CUMEM",
}
# Variables that name the devices of a network.
NETWORK_OF_DEVICES = {"NCCL_IB_HCA": "NET/IB", "NCCL_SOCKET_IFNAME": "NET/Socket"}
P2P_DISABLE = "NCCL_P2P_DISABLE"
NEED_CONNECTIONS = ("NCCL_P2P_LEVEL", P2P_DISABLE, "NCCL_SHM_DISABLE")

Choices = dict[tuple[str | None, int], set[tuple[str, str, int | None]]]  # by function and bytes


IGNORED, NO_EFFECT = "setting_ignored", "setting_no_effect"
TRANSPORT, ALGORITHM = "transport_unexpected", "algorithm_unexpected"


class SettingOutcome(NamedTuple):
    """What a rule found: a code of checks.OTHER_CODES, and the sentence that follows NAME=VALUE."""

    code: str
    severity: str  # invalid, suspect, finding, unchecked
    sentence: str


def skipped(code: str, why: str) -> SettingOutcome:
    """Return the outcome of a rule that had nothing to look at."""
    return SettingOutcome(code, "unchecked", f" was not checked: {why}")


def ignored(sentence: str, severity: str = "invalid") -> SettingOutcome:
    """Return the outcome of a setting that NCCL did not take."""
    return SettingOutcome(IGNORED, severity, sentence)


def used(ways: str, severity: str = "invalid") -> SettingOutcome:
    """Return the outcome of a setting that rules out how NCCL connected GPUs."""
    return SettingOutcome(TRANSPORT, severity, f", but NCCL used {ways}")


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
    outcomes: list[SettingOutcome] = []
    if evidence is None:
        outcomes.append(skipped(IGNORED, "there is no NCCL log"))
    else:
        log = evidence.log
        announced = _announced(name, value, evidence)
        if announced is not None:
            outcomes.append(announced)
        outcomes += _connections(name, value, evidence)
        if not in_table(name):
            why = "Ringside does not know what it should change"
            if name in log.settings:
                why += "; NCCL's log says that it was read"
            outcomes.append(skipped("effect_not_checked", why))
        if tuning is None:
            outcomes += _algorithms(name, value, log)
        outcomes += _channel_limit(name, value, log)
        is_ignored = announced is not None and announced.severity == "invalid"
        if same_cell_without is not None and name in VISIBLE and not is_ignored:
            outcomes += _no_effect(name, value, log, same_cell_without)
    if tuning is not None:
        outcomes += _algorithms(name, value, tuning)
    results = []
    for code, severity, sentence in outcomes:
        results.append(SettingResult(code, f"{name}={value}{sentence}", severity, name))
    return results


def _announced(name: str, value: str, evidence: Evidence) -> SettingOutcome | None:
    """Tell how NCCL's log contradicts, or fails to show, that NCCL took a setting."""
    log = evidence.log
    when = announcement(name, value, version_numbers(log.version))
    # without a version NCCL_P2P_DISABLE=1 may be announced either way
    may_be_level = name == P2P_DISABLE and value == "1" and log.version is None
    is_level = when == "level" or may_be_level
    if is_level and log.settings.get("NCCL_P2P_LEVEL") == "LOC":
        return None
    if name in log.conflicts:
        return ignored(f" differs between ranks: NCCL says {', '.join(log.conflicts[name])}")
    if name in log.settings:
        if not same_value(name, value, log.settings[name]):
            return ignored(f" was not used: NCCL says {log.settings[name]}")
        writers = log.announced_by.get(name, 0)
        if when != "always" or not 0 < writers < log.processes:
            return None
        sentence = f" was used by {writers} of {log.processes} processes, by NCCL's log"
        if log.lost or log.truncated:
            return ignored(f"{sentence}; lines are missing in the log", "unchecked")
        return ignored(sentence, "suspect")
    if when == "never":
        if name != "NCCL_NET" or log.network is None:
            return skipped(IGNORED, "NCCL's log never names it")
        # a plugin's name carries more than what was asked for (IB: IBext_v8)
        if value.lower() in log.network.lower():
            return None
        return ignored(f" was not used: NCCL uses network {log.network}")
    # the log may lack the announcement of a variable that NCCL took
    if when == "used":
        return skipped(IGNORED, "NCCL's log names it only where it is used, and does not")
    if log.nranks == 1:
        return skipped(IGNORED, "one rank has no connections")
    if log.lost or not (log.transports or log.channels_from):
        return skipped(IGNORED, "it may be in the missing lines of NCCL's log")
    p2p_disable = (evidence.requested.get(P2P_DISABLE), log.settings.get(P2P_DISABLE))
    if name == "NCCL_P2P_LEVEL" and "1" in p2p_disable:
        return ignored(" was ignored: NCCL_P2P_DISABLE=1 overrides it")
    return ignored(" was ignored: the log has no 'set by environment' line for it")


# Whether NCCL chose an algorithm, a protocol or a number of channels that a setting rules out.
def _algorithms(name: str, value: str, log: NcclLog) -> Iterator[SettingOutcome]:
    if name not in WORDS_OF:
        return
    if not log.algorithms:
        yield skipped(ALGORITHM, "NCCL's log has no TUNING line")
        return
    try:
        allowed_words = allowed(value, WORDS_OF[name])
    except ValueError as error:
        yield skipped(ALGORITHM, str(error))
        return
    wrong = []
    for choice in log.algorithms:
        word = choice.protocol
        if name == "NCCL_ALGO":
            word = choice.algorithm
        # logs to 2.22 name no function: wrong is what no function may have
        allowed_here: set[str] = set().union(*allowed_words.values())
        if choice.function is not None:
            allowed_here = allowed_words.get(choice.function, {word})
            available = AVAILABLE.get(choice.function, allowed_here)
            if name == "NCCL_ALGO" and not allowed_here & available:
                continue  # the function has none of them: older releases take Ring
        if word not in allowed_here:
            wrong.append(f"{choice.function or 'a collective'} of {choice.size} bytes used {word}")
    if wrong:
        yield SettingOutcome(ALGORITHM, "invalid", f", but {join_words(wrong, MOST_NAMED)}")


def _channel_limit(name: str, value: str, log: NcclLog) -> Iterator[SettingOutcome]:
    if name not in CHANNEL_LIMITS or not re.fullmatch(r"[0-9]{1,9}", value):
        return
    count, limit = log.channels.get("collective"), int(value)
    if count is None:
        yield skipped("channels_unexpected", "NCCL's log has no number of channels")
        return
    is_minimum = "_MIN_" in name
    is_below = is_minimum and count < min(limit, MOST_CHANNELS)
    is_above = not is_minimum and 0 < limit < count
    if is_below or is_above:
        yield SettingOutcome("channels_unexpected", "invalid", f", but NCCL used {count} channels")


# Whether NCCL connected GPUs in a way that a setting rules out.
def _connections(name: str, value: str, evidence: Evidence) -> Iterator[SettingOutcome]:
    log = evidence.log
    if not log.transports:
        if name in NEED_CONNECTIONS:
            yield skipped(TRANSPORT, "NCCL's log shows no connection")
        return
    if name == "NCCL_P2P_LEVEL":
        yield from _p2p_level(level_word(value), evidence)
        return
    ruled_out = ""
    if name == "NCCL_NVLS_ENABLE" and value == "0":
        algorithms = {choice.algorithm for choice in log.algorithms}
        ruled_out = " and ".join(sorted(word for word in algorithms if word.startswith("NVLS")))
        if not ruled_out and log.channels.get("nvls"):
            ruled_out = "NVLS channels"
    elif name == "NCCL_NET":
        other_networks = []
        for word in sorted(set().union(*log.transports.values())):
            if word.startswith("NET/") and word.split("/")[1].lower() != value.lower():
                other_networks.append(word)
        ruled_out = join_words(other_networks, MOST_NAMED)
    elif name == "NCCL_NET_GDR_LEVEL" and level_word(value) == "LOC":
        ruled_out = _used(log, "NET/", "GDRDMA")
    elif name in NETWORK_OF_DEVICES and _used(log, NETWORK_OF_DEVICES[name]):
        nics: set[str] = set().union(*log.nics.values())
        ruled_out = join_words(sorted(nic for nic in nics if not _is_among(nic, value)), MOST_NAMED)
    elif f"{name}={value}" in RULED_OUT:
        ruled_out = _used(log, RULED_OUT[f"{name}={value}"])
    if ruled_out:
        yield used(ruled_out)


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
    used: dict[str, list[str]] = defaultdict(list)
    for pair, words in log.transports.items():
        for word in words:
            if word.startswith(kind) and having in word:
                used[word].append(pair)
    return ", ".join(f"{word} on {join_words(pairs, MOST_NAMED)}" for word, pairs in used.items())


def _p2p_level(level: str, evidence: Evidence) -> Iterator[SettingOutcome]:
    """Check for P2P beyond the level, and for another transport than P2P within it."""
    if level == "LOC":
        peer_transports = _used(evidence.log, "P2P/")
        if peer_transports:
            yield used(peer_transports)
        return
    if level not in DISTANCES or evidence.requested.get(P2P_DISABLE) == "1":
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
            is_p2p = word.startswith("P2P/")
            if link == NET and not is_p2p:
                continue  # between hosts there is no peer access that a level could allow
            if needed is None:
                unknown[pair] = None
                continue
            is_indirect = word.startswith("P2P/indirect")
            allows_p2p = asked_level >= DISTANCES.index("NVB" if is_indirect else needed)
            if is_p2p and not allows_p2p:
                path = "" if is_indirect else f" over {link}"
                beyond.append(f"{word}{path} on {pair}")
            elif allows_p2p and not is_p2p:
                unused.append(f"{word} on {pair} ({link})")
    if beyond:
        # between PCIe levels a virtual machine may show another class than NCCL found
        severity = "invalid" if level in ("NVL", "NVB") else "suspect"
        yield used(join_words(beyond, MOST_NAMED), severity)
    if unused:
        sentence = f", but NCCL did not use P2P where it may: {join_words(unused, MOST_NAMED)}"
        yield SettingOutcome(TRANSPORT, "suspect", sentence)
    if unknown:
        pairs = join_words(list(unknown), MOST_NAMED)
        sentence = (
            f", but the link class of {pairs} is not known, so the use of P2P was not checked"
        )
        yield SettingOutcome(TRANSPORT, "unchecked", sentence)


# Whether a setting changed anything, against the log of the same cell without it.
def _no_effect(name: str, value: str, log: NcclLog, without: NcclLog) -> Iterator[SettingOutcome]:
    """Compare transports, channels and algorithms; yield nothing where one of them differs."""
    unknown = " has an unknown effect: "
    if name in without.settings and same_value(name, value, without.settings[name]):
        why = "the run without it has the same setting in its NCCL log"
        yield SettingOutcome(NO_EFFECT, "unchecked", unknown + why)
        return
    if not (log.transports and without.transports):
        why = "one of the two NCCL logs shows no connection"
        yield SettingOutcome(NO_EFFECT, "unchecked", unknown + why)
        return
    if log.transports != without.transports:
        return
    has_channels = False
    for kind, count in log.channels.items():
        if count is not None and without.channels.get(kind) is not None:
            has_channels = True
            if count != without.channels[kind]:
                return
    choices, choices_without = _choices_by_size(log), _choices_by_size(without)
    common = choices.keys() & choices_without.keys()
    if any(choices[key] != choices_without[key] for key in common):
        return
    if name in WORDS_OF and not common:
        why = "the two NCCL logs have no message size in common"
        yield SettingOutcome(NO_EFFECT, "unchecked", unknown + why)
        return
    transports = " + ".join(sorted(set().union(*log.transports.values())))
    same = [transports]
    if has_channels and log.channels["collective"] is not None:
        same.append(f"{log.channels['collective']} channels")
    if common:
        same.append("the same algorithms")
    sentence = f" changed nothing: NCCL used the same transports as without it ({', '.join(same)})"
    word = level_word(value)
    is_level = name == "NCCL_P2P_LEVEL" and word in DISTANCES and transports.startswith("P2P/")
    if is_level and DISTANCES.index(word) >= DISTANCES.index("PIX"):
        legacy = legacy_number(word)
        level = word if legacy is None else f"{legacy} ({word})"
        sentence += (
            f"; level {level} is the longest way that P2P may take, so it does not force PCIe"
        )
    yield SettingOutcome(NO_EFFECT, "finding", sentence)


def _choices_by_size(log: NcclLog) -> Choices:
    choices: Choices = defaultdict(set)
    for choice in log.algorithms:
        key = choice.function, choice.size
        choices[key].add((choice.algorithm, choice.protocol, choice.channels))
    return choices
