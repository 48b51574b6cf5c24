"""What a check of NCCL settings starts from (`Evidence`), and what it says (`SettingResult`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.nccl.log import NcclLog

MOST_NAMED = 4  # things that a sentence names


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


def list_some(items: Sequence[str]) -> str:
    """Join the first items with commas; count the rest."""
    rest = len(items) - MOST_NAMED
    return ", ".join(items[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
