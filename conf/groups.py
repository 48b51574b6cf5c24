"""The YAML files of the groups: their choices, the options of each choice, and the rules of its
file.

A YAML of a strategy, a benchmark or a profiler has its options with their defaults, and these
rules:

    _target_       dotted name of the class or function that a rank calls (strategy, benchmark)
    auto           what the value `auto` of an option means; see `meaning`
    accepts        what an option accepts: `words`, or a number with `least`, `most`, `whole`,
                   `several` for a list of them; `text: true` for any text. `refused` are values of
                   `precision`, `benchmark` or `optimize` that do not go with it, `gpu_only` values
                   that need a GPU, `not_in_graph` values whose steps no CUDA graph can hold
    omit_if_default  options that a cell has only where they are not what `auto` means: cells of
                   before there were such options keep their keys
    conflicts      a list of {option: value, …} that exclude each other
    rehearse       the most of an option of a benchmark where it is rehearsed (rehearse=); a word
                   replaces its value
    shared_memory  true: a strategy that takes memory in /dev/shm
    some_models    true: a strategy that cannot train every model: its `refuse` is asked first
    trains         false: a benchmark that measures links, without a model and a strategy
    counts         samples: what a benchmark counts, where that is not an image
    hosts          false: a strategy or benchmark that works inside one host
    graph          true: a strategy whose step a CUDA graph can hold: it waits for nothing and needs
                   no thread of the host
    sends          bytes that each rank sends in one exchange, of a gradient of G bytes over n
                   ranks, m on each of h hosts: `once` G, `ring` 2(n−1)/n G, `two_rings`
                   2(m−1)/m G + 2(h−1)/h G/m, `once_and_ring` G + 2(h−1)/h G/m; or a list of cases
                   as for `auto`. Without it `bytes_miscounted` is unchecked and no forecast is made
    code           dotted names of functions that need no torch:
                   `resolve(options, device, ranks) -> options` for what `auto` cannot say;
                   `refuse(cell, room)`; `seconds(cell)`, a rule of thumb for how long it measures
                   once its ranks have started; `derive(lines_by_rank, cell)`
                   (benchmarks/derived.py); `section(study, findings)`, a Section of the report
                   (analysis/report/section.py)
    compared       how cells of a benchmark are compared; see conf.cell.Compared: `may_differ` are
                   options that leave the work as it is, `work` fields of the cell that change it

Rules stand in files only: typed on the command line they are refused. `--config-dir DIR` adds
DIR/strategy/NAME.yaml and DIR/benchmark/NAME.yaml to the choices.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from omegaconf import OmegaConf

from conf.cell import IMAGES, Cell, Compared
from conf.options import Refused, accepted, check, expected_name, unknown_option
from conf.targets import DOTTED, call_dotted, sha256_of_foreign_code, source_file

ROOT = Path(__file__).parent
CONFIG_DIR = "a folder with your own YAML, as for launch.py; the code that it names is run"
NOT_DECLARED = (
    "a record names it, and no YAML of this installation does (--config-dir DIR adds yours)"
)
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{,99}")
SERVER_NODES = "server_nodes"
WITH_TARGET = ("strategy", "benchmark")
WITH_RULES = (*WITH_TARGET, "profiler")
PASSES = 3  # forward, and backward, which takes twice as long
SENDS = ("once", "ring", "two_rings", "once_and_ring")
# Fields of a cell that a strategy's `accepts` may name.
FIELDS_WITH_REFUSED = ("precision", "benchmark", "optimize")
# What limits the time that a file of the user's own takes to read.
LARGEST_BYTES = 1 << 18
DEEPEST = 50
YAML_KINDS = ("str", "int", "float", "bool", "null", "seq", "map")
PLAIN_TAGS = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in YAML_KINDS))

# Folders that hold groups; of two files with the same name the first counts, as Hydra has it.
_folders = [ROOT]


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """What an option accepts."""

    words: list[Any] = []
    least: float | None = None
    most: float | None = None
    whole: bool = False
    several: bool = False
    auto: bool = False
    text: bool = False
    refused: list[Any] = []
    gpu_only: list[Any] = []
    not_in_graph: list[Any] = []


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """A value where other options have the values of `where`."""

    value: Any
    where: dict[str, Any] = {}


class Code(msgspec.Struct, forbid_unknown_fields=True):
    """Dotted names of functions that need no torch."""

    resolve: str = ""
    refuse: str = ""
    seconds: str = ""
    derive: str = ""
    section: str = ""


class Rules(msgspec.Struct, forbid_unknown_fields=True, rename={"target": "_target_"}):
    """The form of each rule of a file."""

    target: str = ""
    auto: dict[str, Any] = {}
    accepts: dict[str, Any] = {}  # Limits
    omit_if_default: list[str] = []
    conflicts: list[dict[str, Any]] = []
    rehearse: dict[str, Any] = {}
    shared_memory: bool = False
    some_models: bool = False
    trains: bool = True
    counts: str = IMAGES
    hosts: bool = True
    graph: bool = False
    sends: str | list[Case] = ""
    code: Code | None = None
    compared: Compared | None = None


RULES = {field.encode_name: field.type for field in msgspec.structs.fields(Rules)}


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

    def refused(self, name: str) -> Sequence[Any]:
        """Return the values of an option of other groups that a strategy does not work with."""
        refused: Sequence[Any] = self.accepts.get(name, {}).get("refused", ())
        return refused

    def why_no_graph(self, options: Mapping[str, Any]) -> str:
        """Return why no CUDA graph holds a step with these options of a strategy; else ''."""
        if not self.rules.get("graph", False):
            able = []
            for name in choices("strategy"):
                if choice("strategy", name).rules.get("graph", False):
                    able.append(name)
            needs = f"a CUDA graph cannot record the CPU's work in a step of strategy={self.name}"
            return f"{needs} (graphs work with {', '.join(able)})"
        for name, limits in self.accepts.items():
            if options.get(name) in limits.get("not_in_graph", ()):
                changing = f"strategy.{name}={options[name]}"
                return f"a CUDA graph repeats one step, and steps with {changing} are not all alike"
        return ""

    def declared(self) -> dict[str, Any]:
        """Return the rules that ranks and readers of the record need, and a hash of foreign code.

        They are target, derive, section and compared; `sha256` is that of the file with
        the target, where that is not Ringside's own.
        """
        target = self.rules["_target_"]
        declared: dict[str, Any] = {"target": target}
        for name in ("derive", "section"):
            if name in self.code:
                declared[name] = self.code[name]
        if "compared" in self.rules:
            declared["compared"] = self.rules["compared"]
        if self.is_ours:  # tests hold our own files to what they name
            return declared
        source_file(f"{self.path}: _target_", target)
        for name, dotted in self.code.items():
            source_file(f"{self.path}: code.{name}", dotted)
        if "sends" in self.rules:  # which readers of a record have
            declared["sends"] = self.rules["sends"]
        code_hash = sha256_of_foreign_code(f"{self.path}: _target_", target)
        if code_hash is not None:
            declared["sha256"] = code_hash
        return declared


def add_config_dir(folders: Iterable[Path]) -> None:
    """Make these the folders of `--config-dir`, whose choices are added to Ringside's own."""
    _folders[1:] = folders
    try:
        for folder in _folders[1:]:
            if not folder.is_dir():
                raise Refused(
                    f"--config-dir {folder}: not a folder; expected one with DIR/model/NAME.yaml, …"
                )
            for path in (*folder.glob("*.yaml"), *folder.glob("*/*.yaml")):
                if path.is_file():
                    _refuse_unplain(path)
    except OSError as error:
        raise Refused(
            f"--config-dir: {error.filename}: cannot be read ({error.strerror})"
        ) from None


def _refuse_unplain(path: Path) -> None:
    """Refuse a YAML file that is large or deep, or whose values are not all written out.

    One that is not YAML is left to whoever reads it.
    """
    if path.stat().st_size > LARGEST_BYTES:
        raise Refused(f"{path}: larger than {LARGEST_BYTES >> 10} KiB")
    too_deep = Refused(f"{path}: deeper than {DEEPEST} levels")
    depth = 0
    try:
        for event in yaml.parse(path.read_bytes(), Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if isinstance(event, yaml.AliasEvent) or tag not in PLAIN_TAGS:
                raise Refused(f"{path}: has {tag or 'an alias'}; expected values, written out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise too_deep
    except yaml.reader.ReaderError:  # whoever reads it would come to the wrong bytes last
        raise Refused(f"{path}: is not YAML (not a text in UTF-8)") from None
    except yaml.YAMLError:
        return
    except RecursionError:
        raise too_deep from None


def no_yaml(error: yaml.YAMLError, path: str) -> str:
    """Return the sentence about a file that is not YAML.

    `path` stands where the error names no file.
    """
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        path = f"{mark.name}, line {mark.line + 1}"
    return f"{path}: is not YAML ({getattr(error, 'problem', None) or type(error).__name__})"


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
    """Return one choice of a group."""
    path = _file(group, name)
    if path is None:
        names = choices(group)
        raise Refused(f"{group}.name={name}: {expected_name(str(name), names)}")
    return _read(group, name, path)


def declares(role: str, dotted: Any) -> bool:
    """Return whether a benchmark's YAML of this installation names this code for a role of Code."""
    for name in choices("benchmark"):
        # a broken file of the user's own declares nothing
        with contextlib.suppress(Refused, OSError):
            if choice("benchmark", name).code.get(role) == dotted:
                return True
    return False


def of_model(model: str, option: str) -> Any:
    """Return an option, `gpu.image_size`, of the YAML of a model; None without option or file."""
    path = _file("model", model)
    if path is None:
        return None
    return OmegaConf.select(_loaded(path), option)


def training_gigaflop(model: str, pixels: int) -> float | None:
    """Return the 10⁹ operations of training on one image; None: the model's YAML says none.

    Assumed: backward takes twice as many as forward, and both as many as there are pixels.
    """
    gigaflop, stated_pixels = of_model(model, "gigaflop"), of_model(model, "gpu.image_size")
    if not gigaflop or not stated_pixels:
        return None
    return float(PASSES * gigaflop * (pixels / stated_pixels) ** 2)


def _file(group: str, name: Any) -> Path | None:
    if isinstance(name, str) and FILE_NAME.fullmatch(name):
        for folder in _folders:
            path = folder / group / f"{name}.yaml"
            if path.exists():
                return path
    return None


@functools.cache
def _loaded(path: Path) -> Any:
    return OmegaConf.load(path)


@functools.cache
def _read(group: str, name: str, path: Path) -> GroupChoice:
    try:
        content = OmegaConf.to_container(_loaded(path))
    except yaml.YAMLError as error:
        raise Refused(no_yaml(error, str(path))) from None
    if not isinstance(content, dict) or "defaults" in content:
        raise Refused(f"{path}: expected options with their defaults, written out, and rules")
    rules = {}
    for rule in RULES:
        if rule in content:
            rules[rule] = content.pop(rule)
    for option in content:
        if not isinstance(option, str):
            raise Refused(
                f"{path}: {option!r} is not the name of an option; put a name that YAML reads as "
                "something else in quotes"
            )
    for fault in _faults(cast(dict[str, Any], content), rules):
        raise Refused(f"{path}: {fault}")
    if content.get("name") != name:
        raise Refused(
            f"{path}: name is {content.get('name')!r}; expected {name}, the name of the file"
        )
    if group in WITH_TARGET and "_target_" not in rules:
        raise Refused(
            f"{path}: has no _target_, the dotted name of the class or function that a rank calls"
        )
    return GroupChoice(group, name, path, cast(dict[str, Any], content), rules)


def _faults(options: Mapping[str, Any], rules: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the rules of a file, each in a few words."""
    for rule, value in rules.items():
        yield from _wrong_form(rule, value, RULES[rule])
    auto, accepts, code = rules.get("auto", {}), rules.get("accepts", {}), rules.get("code", {})
    named: list[tuple[str, Iterable[str]]] = [("auto", auto)]
    for option, limits in accepts.items():
        yield from _wrong_form(f"accepts.{option}", limits, Limits)
        if option not in FIELDS_WITH_REFUSED:
            named.append(("accepts", [option]))
    for option, rule in auto.items():
        if isinstance(rule, list):
            for case in rule:
                yield from _wrong_form(f"auto.{option}", case, Case)
                named.append((f"auto.{option}.where", case.get("where", {})))
        elif isinstance(rule, dict) and "as" in rule:
            named.append((f"auto.{option}.as", [rule["as"]]))
    for conflict in rules.get("conflicts", ()):
        named.append(("conflicts", conflict))
    sends = rules.get("sends", [])
    if isinstance(sends, str):
        sends = [{"value": sends}]
    for case in sends:
        named.append(("sends.where", case.get("where", {})))
        if case["value"] not in SENDS:
            yield f"sends has {case['value']!r:.100}; expected {', '.join(SENDS)}"
    for where, names in named:
        for name in names:
            if name not in options:
                yield f"{where} names {name!r:.100}, which is not an option"
    for option in rules.get("omit_if_default", ()):
        if option not in auto:
            yield f"omit_if_default names {option!r}, of which auto does not say what it means"
    for name, dotted in code.items():
        if not DOTTED.fullmatch(dotted):
            yield f"code.{name} is {dotted!r}; expected a name that Python can import"


def _wrong_form(where: str, value: Any, form: Any) -> Iterator[str]:
    try:
        msgspec.convert(value, form)
    except (msgspec.ValidationError, OverflowError) as error:
        yield f"{where} is {value!r:.80}: {error}"


def options(group: str, typed: Any) -> dict[str, Any]:
    """Return the options of a choice, checked against its YAML; `auto` stays as it is."""
    if not isinstance(typed, Mapping):
        raise Refused(f"{group}={typed}: expected {group}=NAME and {group}.OPTION=value")
    chosen = choice(group, typed.get("name"))
    checked = {}
    for name, value in typed.items():
        full, limits = f"{group}.{name}", chosen.accepts.get(name, {})
        if name in RULES:
            if value != chosen.rules.get(name):
                raise Refused(
                    f"{full}={value}: only the file {group}/{chosen.name}.yaml can set it; "
                    f"expected the whole file, {group}={chosen.name}, or a YAML of your own in "
                    "a folder that --config-dir names"
                )
            continue
        if name not in chosen.options:
            where = f"{group}={chosen.name}"
            cells = Cell.__dataclass_fields__
            raise Refused(unknown_option(where, str(name), value, [*chosen.options], cells))
        default = chosen.options[name]
        is_auto = name in chosen.rules.get("auto", {})
        limits = {"whole": isinstance(default, int), "auto": is_auto, **limits}
        if isinstance(default, bool) and not isinstance(value, bool):
            raise Refused(f"{full}={value}: expected true or false")
        if value is None and default is not None:
            form = accepted(limits) or f"a value like {default}"
            raise Refused(f"{full}=null: expected {form}")
        if limits.get("text") and not isinstance(value, str | None):
            raise Refused(f"{full}={value}: expected text, not a number or a list")
        check(full, value, limits)
        checked[name] = value
    for name, default in chosen.options.items():
        if name not in typed:
            raise Refused(f"{group}.{name}: has no value; for instance {default}")
    for conflict in chosen.rules.get("conflicts", ()):
        if _are_so(typed, conflict):
            first, *rest = (f"{group}.{name}={value}" for name, value in conflict.items())
            raise Refused(f"{first}: works only without {', '.join(rest)}; leave one out")
    for name, least in checked.items():
        largest = name.replace("min_", "max_", 1)
        bounds = (least, checked.get(largest))
        if all(isinstance(bound, int | float) for bound in bounds) and bounds[0] > bounds[1]:
            raise Refused(f"{group}.{name}={least}: expected at most {group}.{largest}={bounds[1]}")
    return checked


def _are_so(options: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(options.get(name) == value for name, value in values.items())


def resolved(group: str, typed: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return checked options with every `auto` replaced, for a cell of `ranks` ranks on cuda or
    cpu.

    SERVER_NODES is left out: a cell keeps its meaning as Cell.server_hosts, and only if it has
    hosts.
    """
    chosen = choice(group, typed["name"])
    values = dict(typed)
    values.pop(SERVER_NODES, None)
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
                f"{function}: returned {values!r:.100}; expected all options with their values"
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
    [{value: 25.0, where: {transport: gloo}}, {value: 4.0}]   the first whose options are so
    """
    if isinstance(rule, list):
        for case in rule:
            if _are_so(values, case.get("where", {})):
                rule = case["value"]
                break
        else:
            return "auto"
    if not isinstance(rule, dict):
        return rule
    return values[rule["as"]] if "as" in rule else rule.get(device, "auto")


def sends(cell: Cell) -> str:
    """Return which of SENDS the strategy of a cell declares; empty for none.

    A user's own has its rules in the cell; Ringside's own strategies have theirs in a file.
    """
    name = str(cell.strategy["name"])
    rule = cell.declared.get("strategy", {}).get("sends")
    path = ROOT / "strategy" / f"{name}.yaml"
    if FILE_NAME.fullmatch(name) and path.exists():
        rule = _read("strategy", name, path).rules.get("sends")
    if not isinstance(rule, list):
        return rule or ""
    for case in rule:
        if _are_so(cell.strategy, case.get("where", {})):
            return str(case["value"])
    return ""
