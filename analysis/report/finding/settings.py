"""What each NCCL setting changed, in a sentence: against the same cell with the setting untouched."""

import math
from collections.abc import Sequence

from analysis.findings.comparisons import PREFIX
from analysis.report.finding.main_point import MainPoint
from analysis.report.numbers import estimate, number
from analysis.study.draws import scaled
from analysis.study.estimates import Findings, Key, SettingEffect
from analysis.text import count, join_words, single_line

NAMED = 2  # settings that have a sentence of their own
LISTED = 4  # settings that are named together
ALIKE = 0.05  # an exchange that takes longer or shorter by less than this share takes as long


def told_settings(findings: Findings, main: MainPoint | None) -> list[str]:
    """Return sentences on the settings of the main point's GPUs: first on those that changed something, then on the others."""
    effects = _of_main(findings.settings, main)
    changing = [
        one
        for one in effects
        if one.compared.verdict in ("faster", "slower") or one.other_transport
    ]
    changing.sort(key=lambda one: -abs(one.compared.difference.value))
    rest = [one for one in effects if one not in changing]
    said = [_changed(one) for one in changing[:NAMED]]
    if left := changing[NAMED:]:
        said[-1] = said[-1].removesuffix(".") + f"; {_names(left)} changed something too."
    return said + ([_unchanged(rest)] if rest else [])


def _of_main(effects: Sequence[SettingEffect], main: MainPoint | None) -> list[SettingEffect]:
    """Return the effects on the subset of the main point, against its own cell with every setting untouched."""
    if not effects:
        return []
    most = max(len(one.compared.gpus) for one in effects)
    gpus = (
        main[1].gpus
        if main
        else next(one.compared.gpus for one in effects if len(one.compared.gpus) == most)
    )
    here = [one for one in effects if one.compared.gpus == gpus]
    asked = (
        _without_settings(main[1].key) if main else _without_settings(here[0].compared.first_key)
    )
    plain = [one for one in here if _without_settings(one.compared.first_key) == asked]
    fewest = min((_settings(one.compared.first_key) for one in plain), default=0)
    return [one for one in plain if _settings(one.compared.first_key) == fewest]


def _without_settings(key: Key) -> dict[str, str]:
    return {
        name: value
        for name, value in key.items()
        if not name.startswith(PREFIX) and name != "connections"
    }


def _settings(key: Key) -> int:
    return sum(name.startswith(PREFIX) for name in key)


def _changed(one: SettingEffect) -> str:
    """`LOC is 2.2 % slower than untouched: NCCL used SHM instead of P2P/CUMEM, and an exchange took 7.9 times as long.`"""
    compared, value = one.compared, one.compared.difference.value
    word = "slower" if value < 0 else "faster"
    name = single_line(one.setting, 60)
    if not compared.verdict:
        said = f"{name} was {number(abs(value), 'share')} {word} than untouched in single runs"
    elif compared.verdict == "no difference seen":
        said = f"{name} shows no difference in {compared.rate} to untouched"
    else:
        size = estimate(scaled(compared.difference, math.copysign(1, value)), "share")
        said = f"{name} is {size} {word} than untouched"
    return f"{said}: {_how(one)}." if _how(one) else f"{said}."


def _how(one: SettingEffect) -> str:
    """Return which transport NCCL used, and how long an exchange took; empty where neither is known."""
    without, with_it = (single_line(transport, 40) for transport in one.transports)
    parts = []
    if without and with_it:
        parts.append(
            f"NCCL used {with_it} instead of {without}"
            if one.other_transport
            else f"NCCL used {without} as before"
        )
    if one.exchange_ratio is not None:
        parts.append(f"an exchange took {_times(one.exchange_ratio, one.exchange_ratio)}")
    return ", and ".join(parts)


def _unchanged(rest: Sequence[SettingEffect]) -> str:
    """`P2P_LEVEL=PIX shows no difference to untouched: the same transport, and an exchange took 0.99 to 1.01 times as long.`"""
    one = len(rest) == 1
    if all(each.compared.verdict for each in rest):
        said = f"{_names(rest)} {'shows' if one else 'show'} no difference to untouched"
    else:
        most = number(max(abs(each.compared.difference.value) for each in rest), "share")
        said = f"{_names(rest)} {'differs' if one else 'differ'} from untouched by {most}"
        said += " in single runs" if one else " at most in single runs"
    parts = ["NCCL used the same transport"] if all(all(each.transports) for each in rest) else []
    ratios = sorted(each.exchange_ratio for each in rest if each.exchange_ratio is not None)
    if ratios:
        parts.append(f"an exchange took {_times(ratios[0], ratios[-1])}")
    return f"{said}: {', and '.join(parts)}." if parts else f"{said}."


def _times(least: float, most: float) -> str:
    """Return `as long` or `4.68 to 7.87 times as long`."""
    if max(abs(least - 1), abs(most - 1)) < ALIKE:
        return "as long"
    return f"{' to '.join(dict.fromkeys((number(least), number(most))))} times as long"


def _names(effects: Sequence[SettingEffect]) -> str:
    if len(effects) > LISTED:
        return count(len(effects), "other setting")
    return join_words([single_line(one.setting, 60) for one in effects])
