"""Refuse a YAML file that is too large, or whose rules have a wrong form, so that no later reader has to look."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from conf.cell import COMPARED
from conf.options import Refused
from conf.targets import DOTTED

RULES: dict[str, type] = {
    "_target_": str, "auto": dict, "accepts": dict, "unsaid": list, "conflicts": list, "shared_memory": bool, "trains": bool,
    "hosts": bool, "graph": bool, "code": dict, "compared": dict,
}  # fmt: skip
NUMBER = (int, float)
LIMITS: dict[str, type | tuple[type, ...]] = {
    "words": list, "least": NUMBER, "most": NUMBER, "whole": bool, "auto": bool, "text": bool, "refused": list, "gpu_only": list,
    "not_in_graph": list,
}  # fmt: skip
FIELDS_WITH_REFUSED = ("precision", "benchmark")  # of a cell; a strategy's `accepts` may name them
CODE = dict.fromkeys(("resolve", "refuse", "seconds", "derive", "section", "exchange"), str)
CASE: dict[str, type] = {"where": dict}

LARGEST_BYTES = 1 << 20
MOST_VALUES = 10_000  # with every alias written out, as OmegaConf has them; ours have some 50
MOST_BRACKETS = 1_000
DEEPEST = 50
PLAIN_TAGS = (
    None,
    "!",
    *(
        f"tag:yaml.org,2002:{kind}"
        for kind in ("str", "int", "float", "bool", "null", "seq", "map")
    ),
)


def refuse_too_large(path: Path) -> None:
    """Refuse a YAML file that would take minutes to read. One that is no YAML is left to whoever reads it.

    Raises:
        Refused: too many bytes, values or levels, a value that holds itself, or one that is not plain.
    """
    if not path.is_file():
        return
    if path.stat().st_size > LARGEST_BYTES:
        raise Refused(
            f"{path}: larger than {LARGEST_BYTES >> 20} MiB; accepted are the options of a study"
        )
    sizes: dict[str, int] = {}  # of each anchor
    inside: list[tuple[str | None, int]] = [
        (None, 0)
    ]  # of each value that is open: its anchor, and values so far
    data = path.read_bytes()
    # The time for brackets inside each other grows with their square.
    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise Refused(
            f"{path}: more than {MOST_BRACKETS} brackets; accepted are the options of a study"
        )
    try:
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag not in PLAIN_TAGS:  # a path of Python's, bytes: no record could hold it
                raise Refused(f"{path}: has the tag {tag}; accepted are plain values")
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, 1))
                if len(inside) > DEEPEST:
                    raise Refused(
                        f"{path}: deeper than {DEEPEST} levels; accepted are the options of a study"
                    )
                continue
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = inside.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor, size = (
                    None,
                    sizes.get(event.anchor, MOST_VALUES),
                )  # an open one holds itself
            elif isinstance(event, yaml.ScalarEvent):
                anchor, size = event.anchor, 1
            else:
                continue
            if anchor is not None:
                sizes[anchor] = size
            inside[-1] = (inside[-1][0], inside[-1][1] + size)
            if inside[-1][1] > MOST_VALUES:
                raise Refused(f"{path}: more than {MOST_VALUES} values; aliases count in full")
    except yaml.reader.ReaderError:  # whoever reads it would come to the wrong bytes last
        raise Refused(f"{path}: is no YAML (not a text in UTF-8)") from None
    except yaml.YAMLError:
        return
    except RecursionError:
        raise Refused(
            f"{path}: deeper than {DEEPEST} levels; accepted are the options of a study"
        ) from None


def no_yaml(error: yaml.YAMLError, otherwise: str) -> str:
    """Return the sentence about a file that is no YAML: the error names it and a line, else `otherwise` is its name."""
    mark = getattr(error, "problem_mark", None)
    where = otherwise if mark is None else f"{mark.name}, line {mark.line + 1}"
    return f"{where}: is no YAML ({getattr(error, 'problem', None) or type(error).__name__})"


def check_rules(path: Path, options: Mapping[Any, Any], rules: Mapping[str, Any]) -> None:
    """Check the form of every rule of a file.

    Raises:
        Refused: names the file, the rule and what is wrong with it.
    """
    for rule, value in rules.items():
        if not isinstance(value, RULES[rule]):
            raise Refused(f"{path}: {rule} is {value!r}; accepted is {_name(RULES[rule])}")
    for name in options:
        if not isinstance(name, str):
            raise Refused(
                f"{path}: {name!r} is no name of an option; one that YAML reads as something else stands in quotes"
            )
    if said := next(_faults(options, rules), ""):
        raise Refused(f"{path}: {said}")


def _faults(options: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the contents of rules, each in a few words."""
    for option, limits in rules.get("accepts", {}).items():
        if option not in options and option not in FIELDS_WITH_REFUSED:
            yield f"accepts.{option} names no option"
        yield from _entries(f"accepts.{option}", limits, LIMITS)
    for option in rules.get("unsaid", ()):
        if not isinstance(option, str) or option not in rules.get("auto", {}):
            yield f"unsaid names {option!r:.100}, of which auto does not say what it means"
    for number, conflict in enumerate(rules.get("conflicts", ())):
        yield from _named(f"conflicts.{number}", conflict, options)
    yield from _named("auto", rules.get("auto", {}), options)
    for option, rule in rules.get("auto", {}).items():
        yield from _meaning(f"auto.{option}", rule, options)
    yield from _entries("code", rules.get("code", {}), CODE)
    for what, dotted in rules.get("code", {}).items():
        if not DOTTED.fullmatch(str(dotted)):
            yield f"code.{what} is {dotted!r}; accepted is a name that Python can import"
    if "compared" in rules:
        yield from _entries("compared", rules["compared"], COMPARED)
        if lacks := [name for name in COMPARED if name not in rules["compared"]]:
            yield f"compared lacks {lacks[0]}"


def _meaning(where: str, rule: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the meaning of one `auto` (conf.groups.meaning)."""
    for case in rule if isinstance(rule, list) else ():
        if not isinstance(case, dict) or "value" not in case:
            yield f"{where} has a case {case!r}; accepted is {{value: …, where: {{option: value}}}}"
        else:
            yield from _entries(where, case, {**CASE, "value": object})
            yield from _named(f"{where}.where", case.get("where", {}), options)
    if isinstance(rule, dict) and "as" in rule and rule["as"] not in options:
        yield f"{where}.as names no option"


def _entries(where: str, value: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> Iterator[str]:
    """Yield which entries of a mapping are unknown or of another type."""
    if not isinstance(value, dict):
        yield f"{where} is {value!r}; accepted is a mapping of {', '.join(kinds)}"
        return
    for name, one in value.items():
        if name not in kinds:
            yield f"{where}.{name} is unknown; accepted are {', '.join(kinds)}"
        elif not isinstance(one, kinds[name]) or (kinds[name] == NUMBER and isinstance(one, bool)):
            yield f"{where}.{name} is {one!r}; accepted is {_name(kinds[name])}"
        elif isinstance(one, int) and abs(one) > sys.float_info.max:
            yield f"{where}.{name} has {one.bit_length()} bits; accepted is a number that a double holds"


def _named(where: str, value: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield which keys of a mapping are no options."""
    if not isinstance(value, dict):
        yield f"{where} is {value!r}; accepted is {{option: value}}"
        return
    yield from (f"{where}.{name} names no option" for name in value if name not in options)


def _name(kind: type | tuple[type, ...]) -> str:
    """Return what a type is called in YAML."""
    names = {str: "a text", dict: "a mapping", list: "a list", bool: "true or false"}
    return names.get(kind, "a number")  # type: ignore[arg-type]
