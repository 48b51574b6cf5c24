"""The YAML files of the groups: which choices there are, the options of each, and the rules that its file states beside them."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from conf.options import Refused, accepted, check, closest

ROOT = Path(__file__).parent
# What the YAML of a strategy, benchmark or profiler says beside its options.
RULES = ("accepts", "conflicts", "shared_memory", "trains")


def _choice(group: str, name: Any) -> None:
    """Refuse a `group.name` that has no YAML in its group."""
    choices = sorted(path.stem for path in (ROOT / group).glob("*.yaml"))
    if name not in choices:
        raise Refused(f"{group}.name={name}: accepted are {', '.join(choices)}{closest(str(name), choices)}")


@functools.cache
def _written(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options with their defaults, RULES that are there) of a strategy's, benchmark's or profiler's YAML."""
    declared = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(ROOT / group / f"{name}.yaml")))
    return declared, {rule: declared.pop(rule) for rule in RULES if rule in declared}


def declared(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """(options with their defaults, what each accepts, values that exclude each other)."""
    declared, rules = _written(group, name)
    return declared, rules.get("accepts", {}), rules.get("conflicts", [])


def takes_shared_memory(strategy: str) -> bool:
    """Whether a strategy's YAML says that it takes memory in /dev/shm."""
    return bool(_written("strategy", strategy)[1].get("shared_memory", False))


def trains(benchmark: str) -> bool:
    """Whether a benchmark has a model and a strategy; its YAML says `trains: false` where it measures links alone."""
    return bool(_written("benchmark", benchmark)[1].get("trains", True))


def options(group: str, given: Any) -> dict[str, Any]:
    """The options of a strategy, benchmark or profiler, held to the types and the `accepts` of its own YAML.

    Raises:
        Refused: an unknown option, another type than the YAML's default has, or a value outside `accepts`.
    """
    if not isinstance(given, Mapping):
        raise Refused(f"{group}={given}: accepted is {group}=NAME and {group}.OPTION=value")
    name = given.get("name")
    _choice(group, name)
    defaults, accepts, conflicts = declared(group, str(name))
    for option, value in given.items():
        if option in RULES:
            continue
        full = f"{group}.{option}"
        if option not in defaults:
            raise Refused(f"{full}={value}: {name} has the options {', '.join(defaults)}{closest(option, defaults)}")
        default, limits = defaults[option], accepts.get(option, {})
        limits = {"whole": isinstance(default, int), **limits}
        if isinstance(default, bool) and not isinstance(value, bool):
            raise Refused(f"{full}={value}: accepted are true and false")
        if value is None and default is not None:
            raise Refused(f"{full}=null: accepted is {accepted(limits) or f'a value like {default}'}")
        if limits.get("text") and not isinstance(value, str | None):
            raise Refused(f"{full}={value}: accepted is a text")
        check(full, value, limits)
    if missing := [option for option in defaults if option not in given]:
        raise Refused(f"{group}.{missing[0]}: has no value; accepted is for instance {defaults[missing[0]]}")
    for conflict in conflicts:
        if all(given[option] == value for option, value in conflict.items()):
            first, *others = (f"{group}.{option}={value}" for option, value in conflict.items())
            raise Refused(f"{first}: accepted without {', '.join(others)}")
    return {option: value for option, value in given.items() if option not in RULES}
