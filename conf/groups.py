"""The YAML files of the groups: their choices, the options of each choice, and the rules of its file.

A YAML of a strategy, a benchmark or a profiler has its options with their defaults, and these rules:

    _target_       dotted name of the class or function that a rank calls (strategies and benchmarks)
    auto           what the value `auto` of an option means; see `meaning`
    accepts        what an option accepts: `words`, or a number with `least`, `most`, `whole`; `text: true` for any text.
                   `refused` are values of `precision` or `benchmark` that do not go with it, `gpu_only` values that need a GPU,
                   `not_in_graph` values whose steps no CUDA graph can hold
    omit_if_default  options that a cell has only where they are not what `auto` means: cells of before there were such options
                   keep their keys
    conflicts      a list of {option: value, …} that exclude each other
    shared_memory  true: a strategy that takes memory in /dev/shm
    trains         false: a benchmark that measures links, without a model and a strategy
    hosts          false: a strategy or benchmark that works inside one host
    graph          true: a strategy whose step a CUDA graph can hold: it waits for nothing and needs no thread of the host
    sends          bytes that each rank sends in one exchange, of a gradient of G bytes over n ranks, m on each of h hosts:
                   `once` G, `ring` 2(n−1)/n G, `two_rings` 2(m−1)/m G + 2(h−1)/h G/m, `once_and_ring` G + 2(h−1)/h G/m; or a
                   list of cases as for `auto`. Without it `bytes_miscounted` is unchecked
    code           dotted names of functions that need no torch: `resolve(options, device, ranks) -> options` for what `auto`
                   cannot say, `refuse(cell, room)`, `seconds(cell)`, a rule of thumb for how long it measures once its
                   ranks have started, `derive(lines_by_rank, cell)` (benchmarks/derived.py), and `section(study, findings)`,
                   which returns a Section of the report (analysis/report/section.py); of a strategy `exchange`: how its gradients
                   travel, an Exchange (analysis/prediction/strategies.py). Without it no forecast is made
    compared       how cells of a benchmark are compared: `metric`, `less_is_better`, `rate` (its name for people), `may_differ`
                   (options that leave the work as it is), `work` (fields of the cell that change it)

Rules stand in files only: typed on the command line they are refused. `--config-dir DIR` adds DIR/strategy/NAME.yaml and
DIR/benchmark/NAME.yaml to the choices.
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
        """Return why no CUDA graph can hold a step of a strategy with these options, for people; empty: one can."""
        if not self.rules.get("graph", False):
            able = [
                name
                for name in choices("strategy")
                if choice("strategy", name).rules.get("graph", False)
            ]
            return f"strategy={self.name} needs the host in each step (not so {', '.join(able)})"
        for name, limits in self.accepts.items():
            if options.get(name) in limits.get("not_in_graph", ()):
                return f"strategy.{name}={options[name]} makes steps that differ"
        return ""

    def limits(self, option: str) -> dict[str, Any]:
        """Return what an option accepts, in the form that conf.options.check reads."""
        may_be_auto = option in self.rules.get("auto", {})
        whole = isinstance(self.options.get(option), int)
        return {"whole": whole, "auto": may_be_auto} | self.accepts.get(option, {})

    def declared(self) -> dict[str, Any]:
        """Return the rules that ranks and readers of the record need: target, derive, section, exchange, compared, and a hash.

        `sha256` is that of the file with the target, where that is not Ringside's own.

        Raises:
            Refused: the target cannot be found.
        """
        target = self.rules["_target_"]
        if not self.is_ours:  # tests hold our own files to what they name
            for rule, dotted in (
                ("_target_", target),
                *((f"code.{name}", one) for name, one in self.code.items()),
            ):
                source_file(f"{self.path}: {rule}", dotted)
        known: dict[str, Any] = {"target": target}
        known |= {
            name: self.code[name] for name in ("derive", "section", "exchange") if name in self.code
        }
        if "compared" in self.rules:
            known["compared"] = self.rules["compared"]
        if "sends" in self.rules and not self.is_ours:  # which readers of a record have
            known["sends"] = self.rules["sends"]
        code_hash = sha256_of_foreign_code(f"{self.path}: _target_", target)
        return known if code_hash is None else {**known, "sha256": code_hash}


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
    found = {
        path.stem: path for folder in reversed(_folders) for path in (folder / group).glob("*.yaml")
    }
    return dict(sorted(found.items()))


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
        known = choices(group)
        raise Refused(
            f"{group}.name={name}: accepted are {', '.join(known)}{closest(str(name), known)}"
        )
    return _read(group, name, path)


def of_model(model: str, option: str) -> Any:
    """Return what the YAML of a model says of an option, `gpu.image_size`; None without the option or the file."""
    path = _file("model", model)
    return _selected(path, option) if path else None


def _file(group: str, name: Any) -> Path | None:
    """Return the YAML file of a choice; None where no folder has it."""
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        return None
    return next(
        (path for folder in _folders if (path := folder / group / f"{name}.yaml").exists()), None
    )


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


def options(group: str, given: Any) -> dict[str, Any]:
    """Return the options of a strategy, benchmark or profiler, checked against its YAML; `auto` stays as it is.

    Raises:
        Refused: an unknown option, another type than the YAML's default has, a value outside `accepts`, or a rule.
    """
    if not isinstance(given, Mapping):
        raise Refused(f"{group}={given}: accepted is {group}=NAME and {group}.OPTION=value")
    one = choice(group, given.get("name"))
    for name, value in given.items():
        if name in RULES:
            _check_rule(one, name, value)
        else:
            _check_option(one, name, value)
    if missing := [name for name in one.options if name not in given]:
        raise Refused(
            f"{group}.{missing[0]}: has no value; accepted is for instance {one.options[missing[0]]}"
        )
    for conflict in one.rules.get("conflicts", ()):
        if all(given[name] == value for name, value in conflict.items()):
            first, *others = (f"{group}.{name}={value}" for name, value in conflict.items())
            raise Refused(f"{first}: accepted without {', '.join(others)}")
    return {name: value for name, value in given.items() if name not in RULES}


def _check_rule(one: GroupChoice, name: str, value: Any) -> None:
    """Refuse a rule that is not as the file has it."""
    if value != one.rules.get(name):
        raise Refused(
            f"{one.group}.{name}={value}: stands in the file {one.group}/{one.name}.yaml only; accepted is the whole file, "
            f"{one.group}={one.name}, or a YAML of your own in a folder that --config-dir names"
        )


def _check_option(one: GroupChoice, name: str, value: Any) -> None:
    """Refuse an option that the file does not have, or a value that it does not accept."""
    full = f"{one.group}.{name}"
    if name not in one.options:
        known = ", ".join(one.options)
        raise Refused(
            f"{full}={value}: {one.name} has the options {known}{closest(str(name), one.options)}"
        )
    default, limits = one.options[name], one.limits(name)
    if isinstance(default, bool) and not isinstance(value, bool):
        raise Refused(f"{full}={value}: accepted are true and false")
    if value is None and default is not None:
        raise Refused(f"{full}=null: accepted is {accepted(limits) or f'a value like {default}'}")
    if limits.get("text") and not isinstance(value, str | None):
        raise Refused(f"{full}={value}: accepted is a text")
    check(full, value, limits)


def resolved(group: str, given: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return checked options with every `auto` replaced, for a cell of `ranks` ranks on a kind of device (cuda or cpu).

    SERVER_NODES is left out: a cell keeps its meaning as Cell.server_hosts, and only if it has hosts.

    Raises:
        Refused: the options do not fit each other, or an `auto` has no meaning.
    """
    one = choice(group, given["name"])
    given = {name: value for name, value in given.items() if name != SERVER_NODES}
    values = dict(given)
    for name, rule in one.rules.get("auto", {}).items():
        if values.get(name) == "auto":
            values[name] = meaning(rule, values, device)
    if "resolve" in one.code:
        values = call_dotted(one.code["resolve"], values, device, ranks)
        if not isinstance(values, dict) or not values.keys() >= given.keys():
            raise Refused(
                f"{one.code['resolve']}: returned {values!r:.100}; accepted are all options with their values"
            )
    if left := [name for name, value in values.items() if value == "auto"]:
        raise Refused(f"{group}.{left[0]}=auto: {one.path} does not say what it means on {device}")
    usual = {
        name: meaning(one.rules["auto"][name], values, device)
        for name in one.rules.get("omit_if_default", ())
    }
    return {
        name: value for name, value in values.items() if name not in usual or value != usual[name]
    }


def meaning(rule: Any, values: Mapping[str, Any], device: str) -> Any:
    """Return what `auto` means by the rule of one option. A rule has one of these forms:

    4.0                                            this value
    {cuda: 50, cpu: 10}                            by the kind of device
    {as: nx}                                       the value of another option, which stands before it in the file's rules
    [{value: 25.0, where: {transport: gloo}}, {value: 4.0}]   the first whose options have these values
    """
    if isinstance(rule, list):
        rule = next(
            (
                case["value"]
                for case in rule
                if all(values[name] == one for name, one in case.get("where", {}).items())
            ),
            "auto",
        )
    if isinstance(rule, dict):
        return values[rule["as"]] if "as" in rule else rule.get(device, "auto")
    return rule


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
NUMBER = (int, float)
LIMITS: dict[str, type | tuple[type, ...]] = {
    "words": list, "least": NUMBER, "most": NUMBER, "whole": bool, "auto": bool, "text": bool, "refused": list, "gpu_only": list,
    "not_in_graph": list,
}  # fmt: skip
FIELDS_WITH_REFUSED = ("precision", "benchmark")  # of a cell; a strategy's `accepts` may name them
CODE = dict.fromkeys(("resolve", "refuse", "seconds", "derive", "section", "exchange"), str)
CASE: dict[str, type] = {"where": dict}
SENDS = ("once", "ring", "two_rings", "once_and_ring")

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
    for option in rules.get("omit_if_default", ()):
        if not isinstance(option, str) or option not in rules.get("auto", {}):
            yield f"omit_if_default names {option!r:.100}, of which auto does not say what it means"
    for number, conflict in enumerate(rules.get("conflicts", ())):
        yield from _named(f"conflicts.{number}", conflict, options)
    yield from _named("auto", rules.get("auto", {}), options)
    for option, rule in rules.get("auto", {}).items():
        yield from _meaning(f"auto.{option}", rule, options)
    yield from _meaning("sends", rules.get("sends"), options)
    cases = rules.get("sends", [])
    for case in cases if isinstance(cases, list) else [{"value": cases}]:
        if isinstance(case, dict) and case.get("value") not in SENDS:
            yield f"sends has {case.get('value')!r:.100}; accepted are {', '.join(SENDS)}"
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
