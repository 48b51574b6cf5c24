"""Compose the requests of a command line with Hydra's compose API.

Hydra merges all YAML files for each composition, which takes 0.1 s. So each combination of group
choices (`model=`, `strategy=`) is composed once, and the values of its jobs are set in it, those
that all jobs share too.
"""

import copy
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from conf import schema
from conf.cell import CONNECTIONS
from conf.command_line import GROUPS, CommandLine, normalise
from conf.groups import ROOT, choices
from conf.options import Refused, to_text
from conf.schema import Config, Request
from launch.machine.devices import look

MOST_JOBS = 20_000
# Options of `on_cpu` that the full form has too: what they replace needs GPUs.
NEED_GPUS = ("optimize", CONNECTIONS)


class ConfigDir(SearchPathPlugin):
    """Has Hydra look for YAML files in the folder of --config-dir too."""

    folders: ClassVar[list[Path]] = []

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder: of two files with the same name Ringside's own counts."""
        for folder in self.folders:
            search_path.append("command-line", f"file://{folder}")


Plugins.instance().register(ConfigDir)


def requests_of(
    line: CommandLine, surroundings: Mapping[str, str]
) -> tuple[list[Request], list[str]]:
    """Return the requests of a command line in the order of its jobs, and the options of its CPU
    preset.

    Raises:
        HydraException, OmegaConfBaseException: options that do not compose.
        Refused: too many jobs, a sweep without a list of values, or `device=cuda` without a GPU.
    """
    with _hydra(line.config_dir):
        texts = normalise(line.overrides)
        overrides = parsed(texts)
        shared, config = shared_config(overrides)
        preset = cpu_preset(config, line.overrides, surroundings)
        if preset:
            texts = normalise([*preset, *line.overrides])
            overrides = parsed(texts)
            shared, config = shared_config(overrides)
        if line.multirun or shared.is_sweep:
            return sweep(overrides, shared), preset
        if any(override.is_sweep_override() for override in overrides):
            Base(texts)  # Hydra refuses an option with several values without -m
        return [Request(config, texts)], preset


def composed_yaml(line: CommandLine) -> str:
    """Return the composed configuration of a command line as YAML."""
    with _hydra(line.config_dir):
        return OmegaConf.to_yaml(Base(normalise(line.overrides)).composed)


def _hydra(config_dir: Path | None) -> initialize_config_dir:
    schema.register()
    ConfigDir.folders = [config_dir] if config_dir else []
    return initialize_config_dir(str(ROOT), version_base="1.3")


def cpu_preset(
    config: Config, overrides: Sequence[str], surroundings: Mapping[str, str]
) -> list[str]:
    """Return the options of `on_cpu` of a named study on a machine without GPUs; none elsewhere,
    and none with nodes=.

    With `full=true` only what needs GPUs is replaced. An option that was typed, or whose group was
    chosen, stays as typed.

    Raises Refused: `device=cuda`, and this machine has no usable GPU.
    """
    is_for_another_machine = bool(config.nodes) or (config.topology is not None and config.dry_run)
    if not config.on_cpu or is_for_another_machine:
        return []
    if look(config.device, surroundings).kind != "cpu":
        return []
    typed = [text.lstrip("+~").partition("=")[0] for text in overrides]
    preset = []
    for name, value in config.on_cpu.items():
        is_typed = any(name == key or name.startswith(f"{key}.") for key in typed)
        if not is_typed and (not config.full or name in NEED_GPUS):
            preset.append(f"{name}={to_text(value)}")
    return preset


def cpu_preset_note(preset: Sequence[str], study: str) -> str:
    """Return the sentence that says what a study is on CPU workers, and how to have it in full."""
    if all(text.partition("=")[0] in NEED_GPUS for text in preset):
        return (
            f"study '{study}' has {' '.join(preset)} on CPU workers: what it has instead needs GPUs"
        )
    return (
        f"study '{study}' runs a reduced version on CPU workers ({' '.join(preset)}); full=true "
        "runs the complete one"
    )


class Base:
    """One composition of Hydra's, in which values can be set."""

    def __init__(self, overrides: Sequence[str]) -> None:
        """Compose the YAML files. Raises HydraException and OmegaConfBaseException."""
        self.overrides = list(overrides)
        try:
            self.composed = compose("config", self.overrides, return_hydra_config=True)
            self.is_sweep = self.composed.hydra.mode == RunMode.MULTIRUN
            self.sweep_params = dict(self.composed.hydra.sweeper.params or {})
        except OSError as error:
            if error.errno is None:  # Hydra's own, for a choice that is not there
                raise
            raise Refused(f"{error.filename}: cannot be read ({error.strerror})") from None
        except (AttributeError, LookupError) as error:  # of what a user's file does to Hydra's part
            raise Refused(
                f"a YAML of --config-dir cannot be composed (Hydra: {error}); look at its first "
                "line, # @package, and at hydra:"
            ) from None
        for group, chosen in self.composed.hydra.runtime.choices.items():
            known = choices(group)
            if known and isinstance(chosen, str) and chosen not in known:  # a path, NAME.yaml
                raise Refused(f"{group}={chosen}: expected one of: {', '.join(known)}")
        with open_dict(self.composed):
            del self.composed["hydra"]
        self.config: Config = OmegaConf.to_object(self.composed)  # type: ignore[assignment]
        plain = OmegaConf.to_container(self.composed, resolve=False)
        self._has_references = "${" in str(plain)  # to values that may be set later
        self._parts: dict[tuple[str, ...], Any] = {}

    def with_values(self, overrides: Sequence[Override]) -> Config | None:
        """Return the configuration with other values; None where Hydra has to compose it anew."""
        if self._has_references:
            return None
        by_part: dict[str, list[Override]] = defaultdict(list)
        for override in overrides:
            by_part[override.key_or_group.partition(".")[0]].append(override)
        config = copy.copy(self.config)
        try:
            for name, values in by_part.items():
                key = tuple(str(override.input_line) for override in values)
                if key not in self._parts:
                    self._parts[key] = self._part(name, values)
                setattr(config, name, self._parts[key])
        except (OmegaConfBaseException, ValueError):
            return None
        return config

    def _part(self, name: str, overrides: Sequence[Override]) -> Any:
        """Return a part of the configuration with other values. Raises for wrong ones, groups."""
        before = copy.deepcopy(self.composed[name])
        try:
            for override in overrides:
                key = override.key_or_group
                if isinstance(OmegaConf.select(self.composed, key), DictConfig):
                    raise ValueError(f"{key}: is a group of options")
                OmegaConf.update(self.composed, key, override.value())
            part = self.composed[name]
            return OmegaConf.to_object(part) if OmegaConf.is_config(part) else part
        finally:
            OmegaConf.update(self.composed, name, before, merge=False)


def shared_config(overrides: Sequence[Override]) -> tuple[Base, Config]:
    """Return the composition of what all jobs have in common, and the configuration with the values
    that they share.

    Of a swept group it has the default choice. Raises as `Base`.
    """
    swept = [override.key_or_group for override in overrides if override.is_sweep_override()]
    shared = []
    composed = []
    values = []
    for override in overrides:
        key = override.key_or_group
        if key in swept or key.partition(".")[0] in swept:
            continue
        shared.append(str(override.input_line))
        if _is_value(override, overrides):
            values.append(override)
        else:
            composed.append(shared[-1])
    base = Base(composed)
    return base, base.with_values(values) or Base(shared).config


def sweep(typed: Sequence[Override], shared: Base) -> list[Request]:
    """Return the requests of all jobs, in the order of Hydra's own sweeper. Raises as
    `requests_of`."""
    params = [f"{name}={value}" for name, value in shared.sweep_params.items()]
    named = {override.get_key_element(): override for override in (*parsed(params), *typed)}
    overrides = list(named.values())  # of an option that is named twice the last one counts
    texts_of: dict[str, list[str]] = {}
    values: dict[str, Override] = {}  # those that are set in a composition, by text
    jobs: float = 1
    for override in overrides:
        jobs *= _count(override)
        if not jobs <= MOST_JOBS:  # also where a number is NaN
            raise Refused(
                f"{override.input_line}: a sweep of more than {MOST_JOBS:,} runs; expected fewer"
            )
    for override in overrides:
        key = override.get_key_element()
        texts_of[key] = [str(override.input_line)]
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise Refused(
                    f"{override.input_line}: a sweep takes lists, choice(), range() and glob()"
                )
            texts_of[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        if _is_value(override, overrides):
            values |= zip(texts_of[key], parsed(texts_of[key]), strict=True)
    bases = {tuple(shared.overrides): shared}
    requests = []
    for job in itertools.product(*texts_of.values()):
        composed: tuple[str, ...] = ()
        chosen = []
        for text in job:
            if text in values:
                chosen.append(values[text])
            else:
                composed += (text,)
        if composed not in bases:
            bases[composed] = Base(composed)
        config = bases[composed].with_values(chosen)
        if config is None:
            config = Base(job).config
        requests.append(Request(config, list(job)))
    return requests


def _count(override: Override) -> float:
    """Return how many values an override has, before they are listed; too many for a step of 0."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    if not isinstance(value, RangeSweep):
        return 1
    step, span = value.step or 0, (value.stop or 0) - (value.start or 0)
    return max(1, span // step) if step else MOST_JOBS + 1


def _is_value(override: Override, overrides: Sequence[Override]) -> bool:
    """Return whether an override sets an option that no other touches, and no group."""
    key = override.key_or_group
    if key in GROUPS or override.get_key_element() != key:
        return False
    for second in overrides:
        if second is override or second.key_or_group in GROUPS:
            continue
        touched = f"{second.key_or_group}."
        if touched.startswith(f"{key}.") or f"{key}.".startswith(touched):
            return False
    return True


def parsed(texts: Sequence[str]) -> list[Override]:
    """Return options as Hydra parses them. Raises HydraException."""
    loader = GlobalHydra.instance().config_loader()
    return OverridesParser.create(config_loader=loader).parse_overrides(list(texts))
