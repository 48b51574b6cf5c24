"""The settings that a cell requested of NCCL, against what NCCL's log shows.

Pure: mappings and parsed logs in, results out. Codes: `setting_ignored`, `setting_no_effect`, `transport_unexpected`,
`algorithm_unexpected`, `channels_unexpected`, `effect_not_checked`. What a log cannot show is `unchecked`.
"""

import re
from collections.abc import Iterator, Mapping

from analysis.nccl.announcements import VISIBLE
from analysis.nccl.log import AlgorithmChoice, NcclLog
from analysis.validity.announced import announced
from analysis.validity.connections import connections
from analysis.validity.effect import no_effect
from analysis.validity.evidence import Evidence, SettingResult, list_some
from conf.nccl import ALGORITHMS, AVAILABLE, PROTOCOLS, allowed, in_table

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

    `same_cell_without` is the log of the same cell without this setting; `tuning` the log of a pass that names every
    choice of NCCL, which then decides about algorithms.
    """
    results: list[SettingResult] = []
    if evidence is None:
        text = f"{name}={value} was not checked: there is no NCCL log"
        results.append(SettingResult("setting_ignored", text, "unchecked", name))
    else:
        ignored = announced(name, evidence)
        results += [ignored] if ignored is not None else []
        results += connections(name, evidence)
        results += [] if in_table(name) else [_of_unknown_effect(name, value, evidence.log)]
        results += _algorithms(name, value, evidence.log) if tuning is None else []
        results += _channels(name, value, evidence.log)
        is_invalid = ignored is not None and ignored.severity == "invalid"
        if same_cell_without is not None and name in VISIBLE and not is_invalid:
            effect = no_effect(name, value, evidence.log, same_cell_without)
            results += [effect] if effect is not None else []
    return results if tuning is None else [*results, *_algorithms(name, value, tuning)]


def _of_unknown_effect(name: str, value: str, log: NcclLog) -> SettingResult:
    """Return that a variable of `nccl.other` has no rule here; NCCL's log shows at most that it was read."""
    read = "; NCCL's log says that it was read" if name in log.settings else ""
    text = f"{name}={value} was not checked: Ringside does not know what it should change{read}"
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
        choices = _choices_of(one, may, name)
        if choices is not None and word not in choices:
            wrong.append(f"{one.function or 'a collective'} of {one.size} bytes used {word}")
    if wrong:
        yield SettingResult(
            "algorithm_unexpected", f"{what}, but {list_some(wrong)}", "invalid", name
        )


def _choices_of(one: AlgorithmChoice, may: Mapping[str, set[str]], name: str) -> set[str] | None:
    """Return what a setting leaves to a collective; None where it says nothing about it."""
    if one.function is None:  # to 2.22: wrong only if no function may have it
        return set().union(*may.values())
    if one.function not in may:
        return None
    choices = may[one.function]
    if name == "NCCL_ALGO" and not choices & AVAILABLE[one.function]:
        return None  # the function has none of them: older releases take Ring
    return choices


def _channels(name: str, value: str, log: NcclLog) -> Iterator[SettingResult]:
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
