"""Hydra made cheap: jobs that differ in values alone share one composition, none is made to learn the mode, none writes.

Hydra's own sweeper composes each job twice from all YAML files: 0.3 to 0.5 s of CPU a job. Here Hydra composes each combination
of group choices (`model=`, `strategy=`) once, and sets the values of each job in a copy; where no group is swept, that is what it
composed to find its sweeper. Before that, and before a single run, Hydra composes everything once more for `hydra.mode` alone.
Only a study or files of the user's own can set it. Hydra's own sweep and run make folders and files, which would need a scratch
folder that has room.
"""

import contextlib
import copy
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from hydra._internal import hydra as hydras_own
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from conf.groups import ROOT
from conf.options import Refused
from launch.compose import remembered

HYDRAS_OWN_MODE = hydras_own.Hydra.get_mode
MAY_SET_MODE = re.compile(r"[+~]*(experiment|hydra)\b")
MOST_JOBS = 20_000
TOLD_EVERY = 100  # jobs; a sweep of fewer is composed before anyone looks


def sweep(sweeper: BasicSweeper, arguments: list[str]) -> None:
    """Compose the jobs of a sweep in Hydra's order and call the task with each, in place of Hydra's own method.

    Raises:
        HydraException: options that do not compose.
        Refused: more jobs than anyone waits for.
    """
    assert sweeper.hydra_context is not None and sweeper.config is not None
    loader: Any = sweeper.hydra_context.config_loader
    launcher: Any = sweeper.launcher
    parse = OverridesParser.create(config_loader=loader).parse_overrides
    asked = parse([*sweeper._parse_config(), *arguments])
    _refuse_too_many(asked)
    (jobs,) = sweeper.split_arguments(asked, None)
    overrides = {text: parse([text])[0] for text in dict.fromkeys(itertools.chain(*jobs))}
    of_all = (
        _Base(sweeper.config)
        if not sweeper._parse_config() and _differ_in_values(asked, loader)
        else None
    )
    bases: dict[tuple[str, ...], _Base] = {}
    for number, job in enumerate(jobs):
        every = [overrides[text] for text in job]
        if of_all:  # Hydra has applied all but the swept ones
            base, values = (
                of_all,
                [own for own, one in zip(every, asked, strict=True) if one.is_sweep_override()],
            )
        else:
            choices = tuple(text for text in job if _is_composed(overrides[text], loader))
            if choices not in bases:
                bases[choices] = _Base(loader.load_sweep_config(sweeper.config, list(choices)))
            base, values = bases[choices], [one for one in every if one.input_line not in choices]
        with base.of_job(every, values) as config:
            launcher.task_function(config)
        _tell(number + 1, len(jobs))


def _differ_in_values(asked: Sequence[Override], loader: ConfigLoaderImpl) -> bool:
    """Tell whether jobs differ in values alone, and in none inside or around which another argument sets something.

    Of an option that is named twice jobs have the last value only.
    """
    if len({one.get_key_element() for one in asked}) < len(asked):
        return False
    swept = [one for one in asked if one.is_sweep_override()]
    keys = [f"{one.key_or_group}." for one in swept]
    others = [f"{one.key_or_group}." for one in asked if not one.is_sweep_override()]
    apart = not any(
        key.startswith(other) or other.startswith(key) for key in keys for other in others
    )
    return apart and not any(_is_composed(one, loader) for one in swept)


def _refuse_too_many(overrides: Sequence[Override]) -> None:
    """Refuse a sweep of more than MOST_JOBS jobs before they are written out. Raises Refused."""
    jobs: float = 1
    for override in overrides:
        value = override.value()
        if isinstance(value, ChoiceSweep):
            jobs *= len(value.list)
        elif isinstance(value, RangeSweep):
            step, span = value.step or 0, (value.stop or 0) - (value.start or 0)
            jobs *= max(1, span // step) if step else MOST_JOBS + 1
        if not jobs <= MOST_JOBS:  # also of a number that is none
            raise Refused(
                f"{override.input_line}: a sweep of more than {MOST_JOBS:,} cells; accepted are fewer"
            )


def run_one(task_function: TaskFunction, config: DictConfig, **_: Any) -> JobReturn:
    """Call the task of a run without -m, in place of Hydra's own run_job, and return that it is done."""
    task_function(_Base(config).config)
    return JobReturn(status=JobStatus.COMPLETED)


def mode(hydra: hydras_own.Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return `hydra.mode` as the files and the overrides set it, in place of Hydra's own method; None leaves it to `-m`."""
    search_path = hydra.config_loader.get_search_path().get_path()
    files = {
        one.path.removeprefix("file://")
        for one in search_path
        if one.provider not in ("hydra", "schema")
    }
    if any(map(MAY_SET_MODE.match, overrides)) or files != {str(ROOT)} or config_name != "config":
        return HYDRAS_OWN_MODE(hydra, config_name, overrides)
    return None


class _Base:
    """One combination of group choices, composed by Hydra."""

    def __init__(self, config: DictConfig) -> None:
        """Keep the configuration as Hydra hands it to a task: without its own part."""
        self._hydra = config
        HydraConfig.instance().set_config(config)
        with read_write(config), open_dict(config):
            del config["hydra"]
        self.config = config

    @contextlib.contextmanager
    def of_job(
        self, overrides: Sequence[Override], values: Sequence[Override]
    ) -> Iterator[DictConfig]:
        """Yield the configuration with the values of one job, and make all its overrides known to HydraConfig.

        Only the parts that the values change are copied: a copy of all of them takes most of the time of a job.
        """
        parts: dict[str, Any] = vars(self.config)["_content"]
        before = dict(parts)
        for name in {one.key_or_group.partition(".")[0] for one in values} & parts.keys():
            parts[name] = copy.deepcopy(parts[name])
        try:
            ConfigLoaderImpl._apply_overrides_to_config([*values], self.config)
            known: Any = HydraConfig.instance().cfg
            with read_write(known.hydra):
                known.hydra.overrides.task = [
                    one.input_line for one in overrides if not one.is_hydra_override()
                ]
            yield self.config
        finally:
            parts.clear()
            parts.update(before)


class Objects:
    """Configurations as objects of their classes. Parts that jobs have in common are made once."""

    def __init__(self) -> None:
        self._made: dict[
            str, tuple[Any, Any]
        ] = {}  # by name, a part of a configuration and its object

    def of(self, config: DictConfig) -> Any:
        """Return what OmegaConf.to_object gives. Raises what it raises."""
        names = [str(name) for name in config]
        if any(
            OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name)
            for name in names
        ):
            return OmegaConf.to_object(config)
        values = {name: self._of_part(name, config[name]) for name in names}
        kind: Any = OmegaConf.get_type(config)
        fields = {field.name for field in dataclasses.fields(kind)}
        made = kind(**{name: value for name, value in values.items() if name in fields})
        for name in values.keys() - fields:
            setattr(made, name, values[name])
        return made

    def _of_part(self, name: str, node: Any) -> Any:
        if not OmegaConf.is_config(node):
            return node
        known, made = self._made.get(name, (None, None))
        if known is not node:
            made = OmegaConf.to_object(node)
            self._made[name] = node, made
        return copy.deepcopy(made)


def _is_composed(override: Override, loader: ConfigLoaderImpl) -> bool:
    """Tell whether an override takes part in the composition: it chooses from a group, or is Hydra's own."""
    key = override.key_or_group
    return (
        override.package is not None
        or override.is_hydra_override()
        or loader.repository.group_exists(key)
    )


def _tell(done: int, jobs: int) -> None:
    """Show on a terminal how far a long sweep is composed."""
    if jobs >= 2 * TOLD_EVERY and sys.stderr.isatty() and (done % TOLD_EVERY == 0 or done == jobs):
        print(
            f"\rplanning: {done} of {jobs}",
            end="\r\x1b[K" if done == jobs else "",
            file=sys.stderr,
            flush=True,
        )


def register() -> None:
    """Give Hydra these `mode`, `sweep` and `run_one`, and what it has read and composed.

    A class of ours would have to live in a package `hydra_plugins`.
    """
    remembered.register()
    hydras_own.Hydra.get_mode = mode  # type: ignore[method-assign, assignment]
    # Hydra loads its plugins again: a class imported before is another one.
    names = Plugins.instance().class_name_to_class
    names[f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"].sweep = sweep  # type: ignore[attr-defined]
    hydras_own.run_job = run_one  # type: ignore[assignment, attr-defined]
