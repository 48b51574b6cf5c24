"""The options of a cell's strategy, and of its benchmark, that differ from the defaults of their YAML."""

import functools
import json
from typing import Any

from conf import groups
from conf.cell import Cell
from conf.options import Refused, canonical


def chosen_options(cell: Cell, group: str = "strategy") -> frozenset[tuple[str, str]]:
    """Return (option, value) for each option of the strategy (or benchmark) that has another value than its default.

    What `auto` means for this cell is its default too. Options of a strategy without a YAML here are all chosen.
    """
    return _chosen(group, json.dumps(getattr(cell, group), sort_keys=True), cell.device, cell.world_size)


@functools.lru_cache(maxsize=4096)
def _chosen(group: str, given: str, device: str, ranks: int) -> frozenset[tuple[str, str]]:
    options: dict[str, Any] = json.loads(given)
    name = options["name"]
    try:
        defaults = groups.choice(group, name).options
    except Refused:
        defaults = {}
    return frozenset(
        (option, canonical(value))
        for option, value in options.items()
        if option != "name"
        and not (option in defaults and value in (defaults[option], _meaning(group, options, option, device, ranks)))
    )


def _meaning(group: str, options: dict[str, Any], option: str, device: str, ranks: int) -> Any:
    """Return what an option means where it is not set, next to the others as they are."""
    default = groups.choice(group, options["name"]).options[option]
    if default != "auto":
        return default
    try:
        return groups.resolved(group, {**options, option: default}, device, ranks)[option]
    except (Refused, KeyError, TypeError):  # an older record may lack the options that decide
        return default
