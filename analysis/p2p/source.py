"""Read p2p matrices from the output of p2pBandwidthLatencyTest or from a `record.json` of `benchmark=p2p`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from analysis.errors import UnreadableInput
from analysis.foreign import damage_told, refuse_too_many, table_of
from analysis.p2p.matrices import Matrices, parse_p2p

_ACCEPTED = "accepted is a record.json of benchmark=p2p"


@dataclass(frozen=True, slots=True)
class P2p:
    """The matrices of one file."""

    shown: list[Matrices]  # the runs of the tool, or the medians of a record
    samples: list[Matrices]  # the same runs, or every repeat of a record
    topology: str | None = None  # the text in the record
    title: str | None = None  # what a record measured
    words: Mapping[str, str] | None = None  # what enabled and disabled mean in a record


def read_p2p(text: str) -> P2p:
    """Read either form; the first character tells them apart. Raises UnreadableInput, which says what is accepted."""
    if not text.lstrip().startswith("{"):
        runs = parse_p2p(text)
        return P2p(runs, runs)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{_ACCEPTED}; the JSON is broken ({error})") from None
    table = table_of(content, "p2p")
    with damage_told("p2p"):
        medians = matrices_of(table, table["matrices"])
        repeats = max((len(squares) for squares in table["samples"].values()), default=0)
        samples = [
            matrices_of(
                table, {name: squares[number] for name, squares in table["samples"].items()}
            )
            for number in range(repeats)
        ]
        words = {str(state): str(word) for state, word in table["words"].items()}
        environment = content.get("environment") or {}
        topology, title = environment.get("topology"), content.get("name")
        if not all(isinstance(value, str | None) for value in (topology, title)):
            raise UnreadableInput("environment.topology and name must be text")
    return P2p([medians], samples or [medians], topology, title, words)


def medians_of(tables: Mapping[str, Any]) -> Matrices | None:
    """Return the medians among a record's tables; None where it has none, or they are damaged."""
    try:
        return matrices_of(tables["p2p"], tables["p2p"]["matrices"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError):
        return None


def matrices_of(table: Mapping[str, Any], squares: Mapping[str, Any]) -> Matrices:
    """Return a record's matrices in the form that the tool's reader gives. Numbers that are not finite are absent."""
    found = Matrices(0)
    refuse_too_many(len(table["devices"]))
    ids = tuple(int(device["id"]) for device in table["devices"])
    for device in table["devices"]:
        if device["name"]:
            found.devices[int(device["id"])] = {
                "name": str(device["name"]),
                "bus_id": str(device["bus_id"]),
            }
    for pair, can in table["access"].items():
        a, b = map(int, pair.split("-"))
        found.access[a, b] = found.access[b, a] = bool(can)
    for name, rows in squares.items():
        found.ids[name] = ids
        found.entries[name] = {
            (a, b): float(value)
            for a, row in zip(ids, rows, strict=True)
            for b, value in zip(ids, row, strict=True)
            if value is not None and math.isfinite(float(value))
        }
    return found
