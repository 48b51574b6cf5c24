"""Requested against effective: what a cell asked of NCCL, and what NCCL's log shows that it did.

Pure: mappings and a parsed log in, findings out. Codes: `setting_ignored`, `setting_no_effect`,
`transport_unexpected`, `algorithm_unexpected`, `channels_unexpected`. What a log cannot show is `unchecked`.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.nccl.announcements import VISIBLE, announcement, same_value
from analysis.nccl.model import NcclLog, version_numbers
from analysis.nccl.transports import pair_class
from conf.nccl_vocabulary import ALGORITHMS, AVAILABLE, DISTANCES, PROTOCOLS, allowed, legacy_number, level_word

# The nearest NCCL level that includes a link class of nvidia-smi; NV# is NVL. NODE is one CPU, as NCCL's PHB.
_NEEDED_LEVEL = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "PHB", "SYS": "SYS"}
_FEWEST_OF_MAXIMUM = 32  # NCCL's own upper limit of channels (64 in later releases): a larger minimum is capped


@dataclass(frozen=True)
class SettingResult:
    """One statement about a cell: `severity` is invalid, suspect, finding or unchecked; `setting` its variable."""

    code: str
    sentence: str
    severity: str
    setting: str | None = None


def check_settings(
    asked: Mapping[str, str],
    log: NcclLog | None,
    same_cell_without: NcclLog | None,
    link_classes: Mapping[str, str] | None,
    *,
    gpus: Sequence[int] | None = None,
    env_logged: bool | None = None,
) -> list[SettingResult]:
    """Compare what was asked (`{"NCCL_P2P_LEVEL": "LOC"}`) with the cell's log; nothing to say is an empty list.

    `same_cell_without`: the log of the same cell without these settings; `link_classes`: `{"0-1": "NV18"}` by GPU id;
    `gpus`: the subset in rank order, where the log has no NVML index; `env_logged`: whether NCCL_DEBUG_SUBSYS had ENV
    (None: only where the log itself shows it). Raises nothing.
    """
    if log is None:
        return [
            SettingResult("setting_ignored", f"{name}={value} not checked: there is no NCCL log", "unchecked", name)
            for name, value in asked.items()
        ]
    findings: list[SettingResult] = []
    ignored = set()
    for name, value in asked.items():
        finding = _announced(name, value, asked, log, env_logged)
        if finding is not None:
            findings.append(finding)
            if finding.severity == "invalid":
                ignored.add(name)
    findings += _transports(asked, log, link_classes, gpus)
    findings += _algorithms(asked, log)
    findings += _channels(asked, log)
    if same_cell_without is not None:
        for name, value in asked.items():
            if name in VISIBLE and name not in ignored:
                finding = _no_effect(name, value, log, same_cell_without)
                if finding is not None:
                    findings.append(finding)
    return findings


def _announced(name: str, value: str, asked: Mapping[str, str], log: NcclLog, env: bool | None) -> SettingResult | None:
    """Whether NCCL announced the variable with this value; None when it did."""

    def finding(sentence: str, severity: str) -> SettingResult:
        return SettingResult("setting_ignored", f"{name}={value} {sentence}", severity, name)

    when = announcement(name, value, version_numbers(log.version))
    # without a version NCCL_P2P_DISABLE=1 may be announced either way
    either = name == "NCCL_P2P_DISABLE" and value == "1" and log.version is None
    if (when == "level" or either) and log.settings.get("NCCL_P2P_LEVEL") == "LOC":
        return None
    if name in log.conflicts:
        said = ", ".join(log.conflicts[name])
        return finding(f"is not what every rank has: the ranks announce {said}", "invalid")
    if name in log.settings:
        announced = log.settings[name]
        if not same_value(name, value, announced):
            return finding(f"was not what NCCL took: it announces {announced}", "invalid")
        writers = log.announced_by.get(name, 0)
        if when == "always" and 0 < writers < log.processes:
            severity, why = ("unchecked", ", and the log has gaps") if (log.lost or log.truncated) else ("suspect", "")
            return finding(f"is announced by {writers} of {log.processes} processes{why}", severity)
        return None
    if when == "never":
        if name == "NCCL_NET" and log.network is not None:
            # a plugin's name carries more than what was asked for (IB: IBext_v8)
            if value.lower() in log.network.lower():
                return None
            return finding(f"was not taken: NCCL uses network {log.network}", "invalid")
        return finding("not checked: NCCL never announces it", "unchecked")
    if when == "used":
        return finding("not checked: NCCL announces it only where it uses it, and this log does not", "unchecked")
    if log.nranks == 1:
        return finding("not checked: one rank has no connections", "unchecked")
    if when == "env" and not (log.env_logged if env is None else env):
        return finding("not checked: the log does not show that NCCL_DEBUG_SUBSYS had ENV", "unchecked")
    if log.lost or not (log.transports or log.channels_from):
        return finding("not checked: its announcement may be among the lines that the log lacks", "unchecked")
    if name == "NCCL_P2P_LEVEL" and "1" in (asked.get("NCCL_P2P_DISABLE"), log.settings.get("NCCL_P2P_DISABLE")):
        return finding("was ignored: NCCL_P2P_DISABLE=1 goes before it", "invalid")
    return finding("was ignored: the log has no 'set by environment' line for it", "invalid")


def _transports(
    asked: Mapping[str, str], log: NcclLog, link_classes: Mapping[str, str] | None, gpus: Sequence[int] | None
) -> Iterator[SettingResult]:
    """Transports that a setting rules out."""
    used: dict[str, list[str]] = defaultdict(list)
    for pair, words in log.transports.items():
        for word in words:
            used[word].append(pair)
    by_kind = {
        kind: [f"{word} on {_some(pairs)}" for word, pairs in used.items() if word.startswith(kind)]
        for kind in ("P2P/", "SHM/", "NET/IB", "P2P/CUMEM")
    }
    level = level_word(asked.get("NCCL_P2P_LEVEL", ""))
    if not log.transports:
        for name in ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            if name in asked:
                text = f"{name}={asked[name]}: its transport not checked, the log has no connection"
                yield SettingResult("transport_unexpected", text, "unchecked", name)
        return
    for name, value, kind in (
        ("NCCL_P2P_DISABLE", "1", "P2P/"),
        ("NCCL_SHM_DISABLE", "1", "SHM/"),
        ("NCCL_IB_DISABLE", "1", "NET/IB"),
        ("NCCL_CUMEM_ENABLE", "0", "P2P/CUMEM"),
    ):
        if asked.get(name) == value and by_kind[kind]:
            yield _transport(asked, name, f"the log has {', '.join(by_kind[kind])}")
    if level == "LOC" and by_kind["P2P/"]:
        yield _transport(asked, "NCCL_P2P_LEVEL", f"the log has {', '.join(by_kind['P2P/'])}")
    elif level in DISTANCES and level != "LOC" and asked.get("NCCL_P2P_DISABLE") != "1":
        yield from _level(asked, log, link_classes, gpus)
    if asked.get("NCCL_NVLS_ENABLE") == "0":
        chosen = sorted({one.algorithm for one in log.algorithms if one.algorithm.startswith("NVLS")})
        if chosen or log.channels.get("nvls"):
            yield _transport(asked, "NCCL_NVLS_ENABLE", f"the log has {' and '.join(chosen) or 'NVLS channels'}")


def _transport(asked: Mapping[str, str], name: str, what: str, severity: str = "invalid") -> SettingResult:
    return SettingResult("transport_unexpected", f"{name}={asked[name]}, but {what}", severity, name)


def _level(
    asked: Mapping[str, str],
    log: NcclLog,
    link_classes: Mapping[str, str] | None,
    gpus: Sequence[int] | None,
) -> Iterator[SettingResult]:
    """P2P beyond the level asked for, and within it another transport than P2P."""
    unknown, beyond, unused = [], [], []
    level = level_word(asked["NCCL_P2P_LEVEL"])
    for pair, words in log.transports.items():
        link = pair_class(pair, log, link_classes, gpus)
        needed = "NVL" if link is not None and link.startswith("NV") else _NEEDED_LEVEL.get(link or "")
        for word in words:
            if link is None or needed is None:
                unknown.append(pair)
            elif word.startswith("P2P/indirect"):
                if DISTANCES.index(level) < DISTANCES.index("NVB"):
                    beyond.append(f"{word} on {pair}")
            elif word.startswith("P2P/") and DISTANCES.index(level) < DISTANCES.index(needed):
                beyond.append(f"{word} over {link} on {pair}")
            elif not word.startswith("P2P/") and DISTANCES.index(level) >= DISTANCES.index(needed):
                unused.append(f"{word} on {pair} ({link})")
    if beyond:
        # between PCIe levels a virtual machine may show another class than NCCL found
        severity = "invalid" if level in ("NVL", "NVB") else "suspect"
        yield _transport(asked, "NCCL_P2P_LEVEL", f"the log has {_some(beyond)}", severity)
    if unused:
        yield _transport(asked, "NCCL_P2P_LEVEL", f"P2P is allowed and not used: {_some(unused)}", "suspect")
    if unknown:
        text = (
            f"the link class of {_some(list(dict.fromkeys(unknown)))} is not known: whether P2P was right not checked"
        )
        yield _transport(asked, "NCCL_P2P_LEVEL", text, "unchecked")


def _algorithms(asked: Mapping[str, str], log: NcclLog) -> Iterator[SettingResult]:
    """TUNING lines with a choice that NCCL_ALGO or NCCL_PROTO rules out."""
    for name, names in (("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS)):
        if name not in asked:
            continue
        what = f"{name}={asked[name]}"
        if not log.algorithms:
            text = f"{what}: the choice not checked, the log has no TUNING line"
            yield SettingResult("algorithm_unexpected", text, "unchecked", name)
            continue
        try:
            may = allowed(asked[name], names)
        except ValueError as error:
            yield SettingResult("algorithm_unexpected", f"{what} not checked: {error}", "unchecked", name)
            continue
        wrong = []
        for one in log.algorithms:
            word = one.algorithm if name == "NCCL_ALGO" else one.protocol
            if one.function is None:  # to 2.22: wrong only when no function may have it
                choices = set().union(*may.values())
            elif one.function not in may:
                continue
            else:
                choices = may[one.function]
                if name == "NCCL_ALGO" and not choices & AVAILABLE[one.function]:
                    continue  # the function has none of them: older releases take Ring
            if word not in choices:
                wrong.append(f"{one.function or 'a collective'} of {one.size} bytes takes {word}")
        if wrong:
            yield SettingResult("algorithm_unexpected", f"{what}, but {_some(wrong)}", "invalid", name)


def _channels(asked: Mapping[str, str], log: NcclLog) -> Iterator[SettingResult]:
    """A collective channel count outside what was asked for."""
    count = log.channels.get("collective")
    for name in ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"):
        if name not in asked or not re.fullmatch(r"[0-9]{1,9}", asked[name]):
            continue
        limit = int(asked[name])
        if count is None:
            text = f"{name}={limit} not checked: the log has no channel count"
            yield SettingResult("channels_unexpected", text, "unchecked", name)
        elif (count < min(limit, _FEWEST_OF_MAXIMUM)) if "_MIN_" in name else (0 < limit < count):
            yield SettingResult(
                "channels_unexpected", f"{name}={limit}, but the log has {count} channels", "invalid", name
            )


def _no_effect(name: str, value: str, log: NcclLog, other: NcclLog) -> SettingResult | None:
    """Transports, channels and algorithms equal those of the same cell without the setting."""

    def finding(sentence: str, severity: str) -> SettingResult:
        return SettingResult("setting_no_effect", sentence, severity, name)

    if name in other.settings and same_value(name, value, other.settings[name]):
        return finding(f"{name}={value}: effect not checked, the other log has the same setting", "unchecked")
    if not (log.transports and other.transports):
        return finding(f"{name}={value}: effect not checked, a log has no connections", "unchecked")
    channels = [
        (count, other.channels.get(kind))
        for kind, count in log.channels.items()
        if count is not None and other.channels.get(kind) is not None
    ]
    mine, theirs = _choices(log), _choices(other)
    both = mine.keys() & theirs.keys()
    if log.transports != other.transports or any(one != two for one, two in channels):
        return None
    if any(mine[key] != theirs[key] for key in both):
        return None
    if name in ("NCCL_ALGO", "NCCL_PROTO") and not both:
        return finding(
            f"{name}={value}: effect not checked, no TUNING line for a size that both logs have", "unchecked"
        )
    same = [" + ".join(sorted({word for words in log.transports.values() for word in words}))]
    if channels and log.channels["collective"] is not None:
        same.append(f"{log.channels['collective']} channels")
    if both:
        same.append("the same algorithms")
    said = f"same transports as without it ({', '.join(same)})"
    word = level_word(value)
    if name == "NCCL_P2P_LEVEL" and word in DISTANCES and DISTANCES.index(word) >= DISTANCES.index("PIX"):
        number = legacy_number(word)
        level = f"level {number} ({word})" if number is not None else f"level {word}"
        if same[0].startswith("P2P/"):
            text = f"{name}={value}: {level} did not force PCIe: {said}; the level is a maximum distance"
            return finding(text, "finding")
        return finding(f"{name}={value}: {level} changed nothing: {said}", "finding")
    return finding(f"{name}={value} changed nothing: {said}", "finding")


def _choices(log: NcclLog) -> dict[tuple[str | None, int], set[tuple[str, str, int | None]]]:
    choices: dict[tuple[str | None, int], set[tuple[str, str, int | None]]] = defaultdict(set)
    for one in log.algorithms:
        choices[one.function, one.size].add((one.algorithm, one.protocol, one.channels))
    return choices


def _some(items: Sequence[str], most: int = 4) -> str:
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
