"""The settings that a cell requested of NCCL, against what NCCL's log shows.

Pure: mappings and parsed logs in, results out. Codes: `setting_ignored`, `setting_no_effect`,
`transport_unexpected`, `algorithm_unexpected`, `channels_unexpected`, `effect_not_checked`. What a
log cannot show is `unchecked`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.nccl.announcements import VISIBLE, announcement, same_value
from analysis.nccl.log import AlgorithmChoice, NcclLog, version_numbers
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


@dataclass(frozen=True)
class SettingResult:
    """One statement about a cell: `severity` is invalid, suspect, finding or unchecked; `setting` its variable."""

    code: str
    sentence: str
    severity: str
    setting: str | None = None


@dataclass(frozen=True)
class Evidence:
    """One cell: its requested settings, its log, and its machine.

    - `requested`: `{"NCCL_P2P_LEVEL": "LOC"}`.
    - `link_classes`: `{"0-1": "NV18"}` by GPU id, `{"a:0-1": "NV18"}` where the cell has hosts.
    - `gpus`: the subset in rank order, used if the log has no NVML index.
    - `env_logged`: whether NCCL_DEBUG_SUBSYS had ENV; None: only if the log itself shows it.
    """

    requested: Mapping[str, str]
    log: NcclLog
    link_classes: Mapping[str, str] | None = None
    gpus: Sequence[int | str] | None = None
    env_logged: bool | None = None


_FEWEST_OF_MAXIMUM = (
    32  # NCCL's own upper limit of channels (64 in later releases): a larger minimum is capped
)
_WORDS = {"NCCL_ALGO": ALGORITHMS, "NCCL_PROTO": PROTOCOLS}
_CHANNEL_LIMITS = ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")


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
    results: list[SettingResult] = []
    if evidence is None:
        text = f"{name}={value} was not checked: there is no NCCL log"
        results.append(SettingResult("setting_ignored", text, "unchecked", name))
    else:
        ignored = announced(name, evidence)
        if ignored is not None:
            results.append(ignored)
        results += connections(name, evidence)
        if not in_table(name):
            results.append(_of_unknown_effect(name, value, evidence.log))
        if tuning is None:
            results += _algorithms(name, value, evidence.log)
        results += _channel_limit(name, value, evidence.log)
        is_ignored = ignored is not None and ignored.severity == "invalid"
        if same_cell_without is not None and name in VISIBLE and not is_ignored:
            effect = no_effect(name, value, evidence.log, same_cell_without)
            if effect is not None:
                results.append(effect)
    if tuning is not None:
        results += _algorithms(name, value, tuning)
    return results


def _of_unknown_effect(name: str, value: str, log: NcclLog) -> SettingResult:
    """Return that a variable of `nccl.other` has no rule here; NCCL's log shows at most that it was read."""
    text = f"{name}={value} was not checked: Ringside does not know what it should change"
    if name in log.settings:
        text += "; NCCL's log says that it was read"
    return SettingResult("effect_not_checked", text, "unchecked", name)


def _algorithms(name: str, value: str, log: NcclLog) -> Iterator[SettingResult]:
    """Find choices in TUNING lines that NCCL_ALGO or NCCL_PROTO rules out."""
    if name not in _WORDS:
        return
    what = f"{name}={value}"
    if not log.algorithms:
        text = f"{what} was not checked: NCCL's log has no TUNING line"
        yield SettingResult("algorithm_unexpected", text, "unchecked", name)
        return
    try:
        may = allowed(value, _WORDS[name])
    except ValueError as error:
        yield SettingResult(
            "algorithm_unexpected", f"{what} was not checked: {error}", "unchecked", name
        )
        return
    wrong = []
    for one in log.algorithms:
        word = one.algorithm if name == "NCCL_ALGO" else one.protocol
        choices = _choices_left(one, may, name)
        if choices is not None and word not in choices:
            wrong.append(f"{one.function or 'a collective'} of {one.size} bytes used {word}")
    if wrong:
        yield SettingResult(
            "algorithm_unexpected", f"{what}, but {list_some(wrong)}", "invalid", name
        )


def _choices_left(one: AlgorithmChoice, may: Mapping[str, set[str]], name: str) -> set[str] | None:
    """Return what a setting leaves to a collective; None where it says nothing about it."""
    if one.function is None:  # to 2.22: wrong only if no function may have it
        return set().union(*may.values())
    if one.function not in may:
        return None
    choices = may[one.function]
    if name == "NCCL_ALGO" and not choices & AVAILABLE[one.function]:
        return None  # the function has none of them: older releases take Ring
    return choices


def _channel_limit(name: str, value: str, log: NcclLog) -> Iterator[SettingResult]:
    """Check the number of collective channels against a limit."""
    if name not in _CHANNEL_LIMITS or not re.fullmatch(r"[0-9]{1,9}", value):
        return
    count, limit = log.channels.get("collective"), int(value)
    if count is None:
        text = f"{name}={limit} was not checked: NCCL's log has no number of channels"
        yield SettingResult("channels_unexpected", text, "unchecked", name)
    elif (count < min(limit, _FEWEST_OF_MAXIMUM)) if "_MIN_" in name else (0 < limit < count):
        yield SettingResult(
            "channels_unexpected",
            f"{name}={limit}, but NCCL used {count} channels",
            "invalid",
            name,
        )


# Whether NCCL announced a requested setting with its value: `setting_ignored`.

Answer = tuple[str, str]  # the end of the sentence, and the severity


def announced(name: str, evidence: Evidence) -> SettingResult | None:
    """Check one variable; None if NCCL announced it with this value."""
    value, log = evidence.requested[name], evidence.log
    when = announcement(name, value, version_numbers(log.version))
    # without a version NCCL_P2P_DISABLE=1 may be announced either way
    either = name == "NCCL_P2P_DISABLE" and value == "1" and log.version is None
    if (when == "level" or either) and log.settings.get("NCCL_P2P_LEVEL") == "LOC":
        return None
    if name in log.conflicts:
        values = ", ".join(log.conflicts[name])
        answer: Answer | None = (f"differs between ranks: NCCL says {values}", "invalid")
    elif name in log.settings:
        answer = _differing_value(name, value, log) or _missing_writers(name, when, log)
    elif when == "never":
        answer = _never_announced(name, value, log)
    else:
        answer = _cannot_show(when, evidence) or _not_announced(name, evidence)
    if answer is None:
        return None
    return SettingResult("setting_ignored", f"{name}={value} {answer[0]}", answer[1], name)


def _differing_value(name: str, value: str, log: NcclLog) -> Answer | None:
    used = log.settings[name]
    if same_value(name, value, used):
        return None
    return f"was not used: NCCL says {used}", "invalid"


def _missing_writers(name: str, when: str, log: NcclLog) -> Answer | None:
    """Count the processes that announced a variable, if all of them must."""
    writers = log.announced_by.get(name, 0)
    if when != "always" or not 0 < writers < log.processes:
        return None
    text = f"was used by {writers} of {log.processes} processes, by NCCL's log"
    if log.lost or log.truncated:
        return f"{text}; lines are missing in the log", "unchecked"
    return text, "suspect"


def _never_announced(name: str, value: str, log: NcclLog) -> Answer | None:
    if name != "NCCL_NET" or log.network is None:
        return "was not checked: NCCL's log never names it", "unchecked"
    # a plugin's name carries more than what was asked for (IB: IBext_v8)
    if value.lower() in log.network.lower():
        return None
    return f"was not used: NCCL uses network {log.network}", "invalid"


def _cannot_show(when: str, evidence: Evidence) -> Answer | None:
    """Say why this log may lack the announcement of a variable that NCCL took."""
    log = evidence.log
    env_logged = evidence.env_logged
    if env_logged is None:
        env_logged = log.env_logged
    why = ""
    if when == "used":
        why = "NCCL's log names it only where it is used, and does not"
    elif log.nranks == 1:
        why = "one rank has no connections"
    elif when == "env" and not env_logged:
        why = "NCCL's log was written without ENV in NCCL_DEBUG_SUBSYS"
    elif log.lost or not (log.transports or log.channels_from):
        why = "it may be in the missing lines of NCCL's log"
    if not why:
        return None
    return f"was not checked: {why}", "unchecked"


def _not_announced(name: str, evidence: Evidence) -> Answer:
    disabled = "1" in (
        evidence.requested.get("NCCL_P2P_DISABLE"),
        evidence.log.settings.get("NCCL_P2P_DISABLE"),
    )
    if name == "NCCL_P2P_LEVEL" and disabled:
        return "was ignored: NCCL_P2P_DISABLE=1 overrides it", "invalid"
    return "was ignored: the log has no 'set by environment' line for it", "invalid"


# Whether NCCL connected GPUs in a way that a setting rules out: `transport_unexpected`.

# The nearest NCCL level that includes a link class of nvidia-smi; NV# is NVL. NODE is one CPU, as
# NCCL's PHB.
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


# Whether a setting changed anything, against the log of the same cell without it:
# `setting_no_effect`.

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
    here, there = _choices_by_size(log), _choices_by_size(other)
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


def _choices_by_size(log: NcclLog) -> Choices:
    choices: Choices = defaultdict(set)
    for one in log.algorithms:
        choices[one.function, one.size].add((one.algorithm, one.protocol, one.channels))
    return choices
