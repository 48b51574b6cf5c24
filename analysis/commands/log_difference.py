"""Find what two NCCL logs of the same cell show otherwise, and which of their settings explains it. Neither log comes first."""

from collections.abc import Iterator

from analysis.nccl.announcements import VISIBLE, same_value
from analysis.nccl.model import NcclLog
from analysis.nccl.transports import describe_transport
from analysis.validity.effect import no_effect
from analysis.validity.evidence import SettingResult


def log_differences(log: NcclLog, other: NcclLog) -> list[SettingResult]:
    """Return a finding on each setting that only one of the logs has, or has with another value, and on what none explains."""
    if None not in (log.nranks, other.nranks) and log.nranks != other.nranks:
        text = f"the logs are of {log.nranks} and of {other.nranks} ranks: what they show is not compared"
        return [SettingResult("not_comparable", text, "unchecked", "")]
    findings, explain = [], []
    for name, value, is_of_second in _changed(log, other):
        here, there = (other, log) if is_of_second else (log, other)
        said = f"{name}={value}" + (" of the second log" if is_of_second else "")
        nothing = no_effect(name, value, here, there) if name in VISIBLE else None
        if nothing is not None:
            findings.append(nothing)
        elif name in VISIBLE:
            explain.append((name, said))
    together = (
        ""
        if len(explain) == 1
        else f"; which of these {len(explain)} settings did it, the logs cannot tell"
    )
    for name, said in explain:
        findings.append(
            SettingResult(
                "setting_effective", f"{said} changed what the log shows{together}", "finding", name
            )
        )
    if not explain and (unlike := _unlike(log, other)):
        text = f"{unlike}, and no setting that the logs announce explains it"
        findings.append(SettingResult("difference_unexplained", text, "finding", ""))
    return findings


def _changed(log: NcclLog, other: NcclLog) -> Iterator[tuple[str, str, bool]]:
    """Yield (setting, value, whether only the second log has it) for each that the logs do not share."""
    for name, value in log.settings.items():
        if name not in other.settings or not same_value(name, value, other.settings[name]):
            yield name, value, False
    for name, value in other.settings.items():
        if name not in log.settings:
            yield name, value, True


def _unlike(log: NcclLog, other: NcclLog) -> str:
    """Return how connections or channels differ, in words; '' where they do not, or a log does not show them."""
    if log.transports and other.transports and log.transports != other.transports:
        ways = [describe_transport(one, None) for one in (log, other)]
        return (
            f"transports differ ({ways[0]} and {ways[1]})"
            if ways[0] != ways[1]
            else "transports differ by pair"
        )
    kinds = [
        f"{kind}: {count} and {other.channels[kind]}"
        for kind, count in log.channels.items()
        if None not in (count, other.channels.get(kind)) and count != other.channels[kind]
    ]
    return f"channels differ ({', '.join(kinds)})" if kinds else ""
