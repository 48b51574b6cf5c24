"""Whether NCCL announced a requested setting with its value: code `setting_ignored`."""

from analysis.nccl.announcements import announcement, same_value
from analysis.nccl.log import NcclLog, version_numbers
from analysis.validity.evidence import Evidence, SettingResult

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
        answer = _other_value(name, value, log) or _missing_writers(name, when, log)
    elif when == "never":
        answer = _never_announced(name, value, log)
    else:
        answer = _cannot_show(when, evidence) or _not_announced(name, evidence)
    return (
        None
        if answer is None
        else SettingResult("setting_ignored", f"{name}={value} {answer[0]}", answer[1], name)
    )


def _other_value(name: str, value: str, log: NcclLog) -> Answer | None:
    found = log.settings[name]
    return (
        None if same_value(name, value, found) else (f"was not used: NCCL says {found}", "invalid")
    )


def _missing_writers(name: str, when: str, log: NcclLog) -> Answer | None:
    """Count the processes that announced a variable, if all of them must."""
    writers = log.announced_by.get(name, 0)
    if when != "always" or not 0 < writers < log.processes:
        return None
    severity, why = (
        ("unchecked", "; lines are missing in the log")
        if (log.lost or log.truncated)
        else ("suspect", "")
    )
    return f"was used by {writers} of {log.processes} processes, by NCCL's log{why}", severity


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
    env_logged = log.env_logged if evidence.env_logged is None else evidence.env_logged
    for applies, why in (
        (when == "used", "NCCL's log names it only where it is used, and does not"),
        (log.nranks == 1, "one rank has no connections"),
        (
            when == "env" and not env_logged,
            "NCCL's log was written without ENV in NCCL_DEBUG_SUBSYS",
        ),
        (
            bool(log.lost) or not (log.transports or log.channels_from),
            "it may be in the missing lines of NCCL's log",
        ),
    ):
        if applies:
            return f"was not checked: {why}", "unchecked"
    return None


def _not_announced(name: str, evidence: Evidence) -> Answer:
    disabled = "1" in (
        evidence.requested.get("NCCL_P2P_DISABLE"),
        evidence.log.settings.get("NCCL_P2P_DISABLE"),
    )
    if name == "NCCL_P2P_LEVEL" and disabled:
        return "was ignored: NCCL_P2P_DISABLE=1 overrides it", "invalid"
    return "was ignored: the log has no 'set by environment' line for it", "invalid"
