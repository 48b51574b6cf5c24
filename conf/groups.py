"""The YAML files of the groups: their choices, the options of each choice, and the rules of its
file.

A YAML of a strategy, a benchmark or a profiler has its options with their defaults, and these
rules:

    _target_       dotted name of the class or function that a rank calls (strategies and benchmarks)
    auto           what the value `auto` of an option means; see `meaning`
    accepts        what an option accepts: `words`, or a number with `least`, `most`, `whole`;
                   `text: true` for any text. `refused` are values of `precision` or `benchmark` that
                   do not go with it, `gpu_only` values that need a GPU, `not_in_graph` values whose
                   steps no CUDA graph can hold
    omit_if_default  options that a cell has only where they are not what `auto` means: cells of
                   before there were such options keep their keys
    conflicts      a list of {option: value, …} that exclude each other
    shared_memory  true: a strategy that takes memory in /dev/shm
    trains         false: a benchmark that measures links, without a model and a strategy
    hosts          false: a strategy or benchmark that works inside one host
    graph          true: a strategy whose step a CUDA graph can hold: it waits for nothing and needs
                   no thread of the host
    sends          bytes that each rank sends in one exchange, of a gradient of G bytes over n ranks, m
                   on each of h hosts: `once` G, `ring` 2(n−1)/n G, `two_rings` 2(m−1)/m G + 2(h−1)/h G/m,
                   `once_and_ring` G + 2(h−1)/h G/m; or a list of cases as for `auto`. Without it
                   `bytes_miscounted` is unchecked and no forecast is made
    code           dotted names of functions that need no torch:
                   `resolve(options, device, ranks) -> options` for what `auto` cannot say;
                   `refuse(cell, room)`; `seconds(cell)`, a rule of thumb for how long it measures once
                   its ranks have started; `derive(lines_by_rank, cell)` (benchmarks/derived.py);
                   `section(study, findings)`, a Section of the report (analysis/report/section.py)
    compared       how cells of a benchmark are compared: `metric`, `less_is_better`, `rate` (its name
                   for people), `may_differ` (options that leave the work as it is), `work` (fields of
                   the cell that change it)

Rules stand in files only: typed on the command line they are refused. `--config-dir DIR` adds
DIR/strategy/NAME.yaml and DIR/benchmark/NAME.yaml to the choices.
"""

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from conf.cell import COMPARED
from conf.options import Refused, accepted, check, closest
from conf.targets import DOTTED, call_dotted, sha256_of_foreign_code, source_file

ROOT = Path(__file__).parent
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{,99}")
SERVER_NODES = "server_nodes"
WITH_TARGET = ("strategy", "benchmark")
WITH_RULES = (*WITH_TARGET, "profiler")

# The type of each rule, and of the entries of those that are mappings.
RULES: dict[str, type | tuple[type, ...]] = {
    "_target_": str,
    "auto": dict,
    "accepts": dict,
    "omit_if_default": list,
    "conflicts": list,
    "shared_memory": bool,
    "trains": bool,
    "hosts": bool,
    "graph": bool,
    "sends": (str, list),
    "code": dict,
    "compared": dict,
}
Kinds = Mapping[str, type | tuple[type, ...]]
NUMBER = (int, float)
LIMITS: Kinds = {
    "words": list,
    "least": NUMBER,
    "most": NUMBER,
    "whole": bool,
    "auto": bool,
    "text": bool,
    "refused": list,
    "gpu_only": list,
    "not_in_graph": list,
}
CODE = dict.fromkeys(("resolve", "refuse", "seconds", "derive", "section"), str)
CASE: Kinds = {"where": dict, "value": object}
SENDS = ("once", "ring", "two_rings", "once_and_ring")
FIELDS_WITH_REFUSED = ("precision", "benchmark")  # of a cell; a strategy's `accepts` may name them
YAML_NAMES: dict[type, str] = {
    str: "a text",
    dict: "a mapping",
    list: "a list",
    bool: "true or false",
}

LARGEST_BYTES = 1 << 20
MOST_VALUES = 10_000  # with every alias written out, as OmegaConf has them; ours have some 50
MOST_BRACKETS = 1_000
DEEPEST = 50
YAML_KINDS = ("str", "int", "float", "bool", "null", "seq", "map")
PLAIN_TAGS = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in YAML_KINDS))

# Folders that hold groups; of two files with the same name the first counts, as Hydra has it.
_folders = [ROOT]


@dataclass(frozen=True)
class GroupChoice:
    """One YAML file of a group."""

    group: str
    name: str
    path: Path
    options: dict[str, Any]  # with their defaults
    rules: dict[str, Any]  # those of RULES that the file has

    @property
    def accepts(self) -> dict[str, dict[str, Any]]:
        """What each option accepts."""
        return cast(dict[str, dict[str, Any]], self.rules.get("accepts", {}))

    @property
    def code(self) -> dict[str, str]:
        """Dotted names of the functions that need no torch, by what they do."""
        return cast(dict[str, str], self.rules.get("code", {}))

    @property
    def is_ours(self) -> bool:
        """Whether it is a file of Ringside."""
        return self.path.parents[1] == ROOT

    @property
    def trains(self) -> bool:
        """Whether a benchmark has a model and a strategy."""
        return bool(self.rules.get("trains", True))

    @property
    def several_hosts(self) -> bool:
        """Whether it works over several hosts."""
        return bool(self.rules.get("hosts", True))

    def why_no_graph(self, options: Mapping[str, Any]) -> str:
        """Return why no CUDA graph can hold a step of a strategy with these options; empty: one
        can."""
        if not self.rules.get("graph", False):
            able = []
            for name in choices("strategy"):
                if choice("strategy", name).rules.get("graph", False):
                    able.append(name)
            return f"strategy={self.name} needs the host in each step (not so {', '.join(able)})"
        for name, limits in self.accepts.items():
            if options.get(name) in limits.get("not_in_graph", ()):
                return f"strategy.{name}={options[name]} makes steps that differ"
        return ""

    def declared(self) -> dict[str, Any]:
        """Return the rules that ranks and readers of the record need, and a hash of foreign code.

        They are target, derive, section and compared; `sha256` is that of the file with
        the target, where that is not Ringside's own.

        Raises:
            Refused: the target cannot be found.
        """
        target = self.rules["_target_"]
        if not self.is_ours:  # tests hold our own files to what they name
            source_file(f"{self.path}: _target_", target)
            for name, dotted in self.code.items():
                source_file(f"{self.path}: code.{name}", dotted)
        rules: dict[str, Any] = {"target": target}
        for name in ("derive", "section"):
            if name in self.code:
                rules[name] = self.code[name]
        if "compared" in self.rules:
            rules["compared"] = self.rules["compared"]
        if "sends" in self.rules and not self.is_ours:  # which readers of a record have
            rules["sends"] = self.rules["sends"]
        code_hash = sha256_of_foreign_code(f"{self.path}: _target_", target)
        if code_hash is not None:
            rules["sha256"] = code_hash
        return rules


def add_config_dir(folders: Iterable[Path]) -> None:
    """Make these the folders of `--config-dir`, whose choices are added to Ringside's own.

    Raises:
        Refused: a file is too large to be read.
    """
    _folders[1:] = folders
    try:
        for folder in _folders[1:]:
            for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
                refuse_too_large(path)
    except OSError as error:
        raise Refused(
            f"--config-dir: {error.filename}: cannot be read ({error.strerror})"
        ) from None


def files(group: str) -> dict[str, Path]:
    """Return the YAML files of a group by their names, sorted."""
    paths = {}
    for folder in reversed(_folders):
        for path in (folder / group).glob("*.yaml"):
            paths[path.stem] = path
    return dict(sorted(paths.items()))


def choices(group: str) -> list[str]:
    """Return the names of a group's YAML files, sorted."""
    return list(files(group))


def choice(group: str, name: Any) -> GroupChoice:
    """Return one choice of a group.

    Raises:
        Refused: there is no such file, or it is none that can be used.
    """
    path = _file(group, name)
    if path is None:
        names = choices(group)
        raise Refused(
            f"{group}.name={name}: accepted are {', '.join(names)}{closest(str(name), names)}"
        )
    return _read(group, name, path)


def of_model(model: str, option: str) -> Any:
    """Return an option, `gpu.image_size`, of the YAML of a model; None without the option or the
    file."""
    path = _file("model", model)
    return _selected(path, option) if path else None


def _file(group: str, name: Any) -> Path | None:
    if isinstance(name, str) and FILE_NAME.fullmatch(name):
        for folder in _folders:
            path = folder / group / f"{name}.yaml"
            if path.exists():
                return path
    return None


@functools.cache
def _selected(path: Path, option: str) -> Any:
    return OmegaConf.select(OmegaConf.load(path), option)


@functools.cache
def _read(group: str, name: str, path: Path) -> GroupChoice:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise Refused(no_yaml(error, str(path))) from None
    if not isinstance(content, dict) or "defaults" in content:
        raise Refused(f"{path}: accepted are options with their defaults, written out, and rules")
    rules = {rule: content.pop(rule) for rule in RULES if rule in content}
    check_rules(path, content, rules)
    if content.get("name") != name:
        raise Refused(
            f"{path}: name is {content.get('name')!r}; accepted is {name}, the name of the file"
        )
    if group in WITH_TARGET and "_target_" not in rules:
        raise Refused(
            f"{path}: has no _target_, the dotted name of the class or function that a rank calls"
        )
    return GroupChoice(group, name, path, cast(dict[str, Any], content), rules)


def options(group: str, typed: Any) -> dict[str, Any]:
    """Return the options of a choice, checked against its YAML; `auto` stays as it is.

    Raises:
        Refused: an unknown option, another type than the YAML's default has, a value outside
            `accepts`, or a rule.
    """
    if not isinstance(typed, Mapping):
        raise Refused(f"{group}={typed}: accepted is {group}=NAME and {group}.OPTION=value")
    chosen = choice(group, typed.get("name"))
    for name, value in typed.items():
        if name not in RULES:
            _check_option(chosen, name, value)
        elif value != chosen.rules.get(name):
            raise Refused(
                f"{group}.{name}={value}: stands in the file {group}/{chosen.name}.yaml only; "
                f"accepted is the whole file, {group}={chosen.name}, or a YAML of your own in a "
                "folder that --config-dir names"
            )
    for name, default in chosen.options.items():
        if name not in typed:
            raise Refused(f"{group}.{name}: has no value; accepted is for instance {default}")
    for conflict in chosen.rules.get("conflicts", ()):
        if all(typed[name] == value for name, value in conflict.items()):
            first, *rest = (f"{group}.{name}={value}" for name, value in conflict.items())
            raise Refused(f"{first}: accepted without {', '.join(rest)}")
    return {name: value for name, value in typed.items() if name not in RULES}


def _check_option(chosen: GroupChoice, name: str, value: Any) -> None:
    full = f"{chosen.group}.{name}"
    if name not in chosen.options:
        names = ", ".join(chosen.options)
        near = closest(str(name), chosen.options)
        raise Refused(f"{full}={value}: {chosen.name} has the options {names}{near}")
    default = chosen.options[name]
    limits = {
        "whole": isinstance(default, int),
        "auto": name in chosen.rules.get("auto", {}),
        **chosen.accepts.get(name, {}),
    }
    if isinstance(default, bool) and not isinstance(value, bool):
        raise Refused(f"{full}={value}: accepted are true and false")
    if value is None and default is not None:
        raise Refused(f"{full}=null: accepted is {accepted(limits) or f'a value like {default}'}")
    if limits.get("text") and not isinstance(value, str | None):
        raise Refused(f"{full}={value}: accepted is a text")
    check(full, value, limits)


def resolved(group: str, typed: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return checked options with every `auto` replaced, for a cell of `ranks` ranks on cuda or
    cpu.

    SERVER_NODES is left out: a cell keeps its meaning as Cell.server_hosts, and only if it has
    hosts.

    Raises:
        Refused: the options do not fit each other, or an `auto` has no meaning.
    """
    chosen = choice(group, typed["name"])
    values = {name: value for name, value in typed.items() if name != SERVER_NODES}
    names = values.keys()
    auto = chosen.rules.get("auto", {})
    for name, rule in auto.items():
        if values.get(name) == "auto":
            values[name] = meaning(rule, values, device)
    if "resolve" in chosen.code:
        function = chosen.code["resolve"]
        values = call_dotted(function, dict(values), device, ranks)
        if not isinstance(values, dict) or not values.keys() >= names:
            raise Refused(
                f"{function}: returned {values!r:.100}; accepted are all options with their values"
            )
    for name, value in values.items():
        if value == "auto":
            raise Refused(
                f"{group}.{name}=auto: {chosen.path} does not say what it means on {device}"
            )
    kept = dict(values)
    for name in chosen.rules.get("omit_if_default", ()):
        if name in values and values[name] == meaning(auto[name], values, device):
            del kept[name]
    return kept


def meaning(rule: Any, values: Mapping[str, Any], device: str) -> Any:
    """Return what `auto` means by the rule of one option. A rule has one of these forms:

    4.0                      this value
    {cuda: 50, cpu: 10}      by the kind of device
    {as: nx}                 the value of another option, which stands before it in the file's rules
    [{value: 25.0, where: {transport: gloo}}, {value: 4.0}]   the first whose options have these values
    """
    if isinstance(rule, list):
        for case in rule:
            where = case.get("where", {})
            if all(values[name] == value for name, value in where.items()):
                rule = case["value"]
                break
        else:
            return "auto"
    if not isinstance(rule, dict):
        return rule
    return values[rule["as"]] if "as" in rule else rule.get(device, "auto")


def sends(name: str, options: Mapping[str, Any], declared: Mapping[str, Any]) -> str:
    """Return which of SENDS a strategy with these options declares; empty for none.

    `declared` are the rules that its cell has; Ringside's own strategies have theirs in a file.
    """
    rule = declared.get("sends")
    path = ROOT / "strategy" / f"{name}.yaml"
    if FILE_NAME.fullmatch(name) and path.exists():
        rule = _read("strategy", name, path).rules.get("sends")
    if not isinstance(rule, list):
        return rule or ""
    for case in rule:
        where = case.get("where", {})
        if all(options.get(option) == value for option, value in where.items()):
            return str(case["value"])
    return ""


def refuse_too_large(path: Path) -> None:
    """Refuse a YAML file that would take minutes to read. One that is no YAML is left to whoever
    reads it.

    Raises:
        Refused: too many bytes, values or levels, a value that holds itself, or one that is not
            plain.
    """
    if not path.is_file():
        return
    fits = "accepted are the options of a study"
    if path.stat().st_size > LARGEST_BYTES:
        raise Refused(f"{path}: larger than {LARGEST_BYTES >> 20} MiB; {fits}")
    data = path.read_bytes()
    # The time for brackets inside each other grows with their square.
    if data.count(b"[") + data.count(b"{") > MOST_BRACKETS:
        raise Refused(f"{path}: more than {MOST_BRACKETS} brackets; {fits}")
    too_deep = Refused(f"{path}: deeper than {DEEPEST} levels; {fits}")
    anchor_sizes: dict[str, int] = {}
    # Of each value that is open: its anchor, and its values so far.
    inside: list[tuple[str | None, int]] = [(None, 0)]
    try:
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag not in PLAIN_TAGS:  # a path of Python's, bytes: no record could hold it
                raise Refused(f"{path}: has the tag {tag}; accepted are plain values")
            if isinstance(event, yaml.CollectionStartEvent):
                inside.append((event.anchor, 1))
                if len(inside) > DEEPEST:
                    raise too_deep
                continue
            anchor, size = getattr(event, "anchor", None), 1
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = inside.pop()
            elif isinstance(event, yaml.AliasEvent):
                # One that is still open holds itself.
                anchor, size = None, anchor_sizes.get(event.anchor, MOST_VALUES)
            elif not isinstance(event, yaml.ScalarEvent):
                continue
            if anchor is not None:
                anchor_sizes[anchor] = size
            inside[-1] = (inside[-1][0], inside[-1][1] + size)
            if inside[-1][1] > MOST_VALUES:
                raise Refused(f"{path}: more than {MOST_VALUES} values; aliases count in full")
    except yaml.reader.ReaderError:  # whoever reads it would come to the wrong bytes last
        raise Refused(f"{path}: is no YAML (not a text in UTF-8)") from None
    except yaml.YAMLError:
        return
    except RecursionError:
        raise too_deep from None


def no_yaml(error: yaml.YAMLError, path: str) -> str:
    """Return the sentence about a file that is no YAML; `path` stands where the error names no
    file."""
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        path = f"{mark.name}, line {mark.line + 1}"
    return f"{path}: is no YAML ({getattr(error, 'problem', None) or type(error).__name__})"


def check_rules(path: Path, options: Mapping[Any, Any], rules: Mapping[str, Any]) -> None:
    """Check the form of every rule of a file.

    Raises:
        Refused: names the file, the rule and what is wrong with it.
    """
    for rule, value in rules.items():
        if not isinstance(value, RULES[rule]):
            raise Refused(f"{path}: {rule} is {value!r}; accepted is {_yaml_name(RULES[rule])}")
    for name in options:
        if not isinstance(name, str):
            raise Refused(
                f"{path}: {name!r} is no name of an option; one that YAML reads as something else "
                "stands in quotes"
            )
    for fault in _rule_faults(options, rules):
        raise Refused(f"{path}: {fault}")


def _rule_faults(options: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the contents of rules, each in a few words."""
    auto = rules.get("auto", {})
    for option, limits in rules.get("accepts", {}).items():
        if option not in options and option not in FIELDS_WITH_REFUSED:
            yield f"accepts.{option} names no option"
        yield from _wrong_entries(f"accepts.{option}", limits, LIMITS)
    for option in rules.get("omit_if_default", ()):
        if not isinstance(option, str) or option not in auto:
            yield f"omit_if_default names {option!r:.100}, of which auto does not say what it means"
    for index, conflict in enumerate(rules.get("conflicts", ())):
        yield from _unknown_options(f"conflicts.{index}", conflict, options)
    yield from _unknown_options("auto", auto, options)
    for option, rule in auto.items():
        yield from _wrong_meaning(f"auto.{option}", rule, options)
    cases = rules.get("sends", [])
    if isinstance(cases, str):
        cases = [{"value": cases}]
    yield from _wrong_meaning("sends", cases, options)
    for case in cases:
        if isinstance(case, dict) and case.get("value") not in SENDS:
            yield f"sends has {case.get('value')!r:.100}; accepted are {', '.join(SENDS)}"
    yield from _wrong_entries("code", rules.get("code", {}), CODE)
    for name, dotted in rules.get("code", {}).items():
        if not DOTTED.fullmatch(str(dotted)):
            yield f"code.{name} is {dotted!r}; accepted is a name that Python can import"
    if "compared" in rules:
        yield from _wrong_entries("compared", rules["compared"], COMPARED)
        for name in COMPARED:
            if name not in rules["compared"]:
                yield f"compared lacks {name}"


def _wrong_meaning(where: str, rule: Any, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the meaning of one `auto` (see `meaning`), or with cases like it."""
    for case in rule if isinstance(rule, list) else ():
        if not isinstance(case, dict) or "value" not in case:
            form = "{value: …, where: {option: value}}"
            yield f"{where} has a case {case!r}; accepted is {form}"
            continue
        yield from _wrong_entries(where, case, CASE)
        yield from _unknown_options(f"{where}.where", case.get("where", {}), options)
    if isinstance(rule, dict) and "as" in rule and rule["as"] not in options:
        yield f"{where}.as names no option"


def _wrong_entries(where: str, value: Any, kinds: Kinds) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is {value!r}; accepted is a mapping of {', '.join(kinds)}"
        return
    for name, entry in value.items():
        kind = kinds.get(name)
        if kind is None:
            yield f"{where}.{name} is unknown; accepted are {', '.join(kinds)}"
        elif not isinstance(entry, kind) or (kind == NUMBER and isinstance(entry, bool)):
            yield f"{where}.{name} is {entry!r}; accepted is {_yaml_name(kind)}"
        elif isinstance(entry, int) and abs(entry) > sys.float_info.max:
            bits = entry.bit_length()
            yield f"{where}.{name} has {bits} bits; accepted is a number that a double holds"


def _unknown_options(where: str, value: Any, options: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is {value!r}; accepted is {{option: value}}"
        return
    for name in value:
        if name not in options:
            yield f"{where}.{name} names no option"


def _yaml_name(kind: type | tuple[type, ...]) -> str:
    return "a number" if isinstance(kind, tuple) else YAML_NAMES[kind]
