"""What an NCCL log says about one run: `NcclLog` and its parts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from analysis.nccl.communicators import RankGpu


@dataclass(frozen=True)
class Communicator:
    """One communicator: `name` is its commId if NCCL printed one, `devices` the known GPUs by rank."""

    name: str | None
    nranks: int | None
    devices: Mapping[int, RankGpu]


@dataclass(frozen=True)
class AlgorithmChoice:
    """NCCL's choice for a collective of one size, from its TUNING lines; `calls` counts equal lines.

    `size` is in bytes. `channels` is None to 2.23, which print a predicted time instead. `function` is None to 2.22.
    """

    function: str | None
    size: int
    algorithm: str
    protocol: str
    channels: int | None
    calls: int


@dataclass(frozen=True)
class NcclLog:
    """The facts of one run's log. Ranks are those of the largest communicator; `a->b` joins two of them.

    - `transports`: every transport of a connection, sorted; `direct shared memory` reads `SHM/direct`, NET has those
      of both ends.
    - `channels`: a number or None per kind, from the summary line, or, if `channels_from` is "rings", the collective
      count of `Channel 00/04`.
    - `trees`: {channel: {rank: parent, -1 at the root}}.
    - `nics`: the network devices that each rank's connections use.
    - `nodes`: the hosts that NCCL sees.
    - `settings`: announced values; a setting on which ranks differ is in `conflicts` instead.
    - `announced_by`: processes that announced each setting, of `processes` that wrote lines with a prefix.
    - `env_logged`: a line shows that the ENV subsystem was logged.
    - `lost`: how many lines of NCCL could not be used.
    """

    version: str | None
    cuda: str | None
    nranks: int | None
    communicators: tuple[Communicator, ...]
    transports: Mapping[str, tuple[str, ...]]
    collnet: Mapping[int, tuple[str, ...]]
    channels: Mapping[str, int | None]
    channels_from: str | None
    rings: Mapping[int, tuple[int, ...]]
    trees: Mapping[int, Mapping[int, int]]
    settings: Mapping[str, str]
    conflicts: Mapping[str, tuple[str, ...]]
    announced_by: Mapping[str, int]
    processes: int
    env_logged: bool
    algorithms: tuple[AlgorithmChoice, ...]
    multicast: bool | None
    network: str | None
    nics: Mapping[int, tuple[str, ...]]
    nodes: int | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    truncated: bool
    lost: int
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the object of `python -m analysis nccl-log --json`, the contract's keys first; keys of maps are strings."""
        everything: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        for choice in everything["algorithms"]:
            choice["bytes"] = choice.pop("size")
        first = ("version", "nranks", "transports", "channels", "settings", "warnings")
        return {
            key: everything[key]
            for key in (*first, *(key for key in everything if key not in first))
        }


def version_numbers(version: str | None) -> tuple[int, ...] | None:
    """Split a version into numbers: `2.28.9` is (2, 28, 9); None stays None."""
    return tuple(int(part) for part in version.split(".")) if version else None
