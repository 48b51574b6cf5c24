"""`profiler=auto` becomes nsys or torch, and nsys is looked for once for a whole sweep."""

import dataclasses
from collections.abc import Mapping, Sequence

from conf import groups
from conf.options import Refused
from conf.resolve import CheckedConfig
from launch.profile.nsys import Nsys, find


@dataclasses.dataclass(frozen=True)
class Profiler:
    """What was found of nsys: the program, or why a sweep that cannot do without it is refused."""

    nsys: Nsys | None = None
    missing: Refused | None = None


def with_profilers(
    configs: Sequence[CheckedConfig], surroundings: Mapping[str, str]
) -> tuple[list[CheckedConfig], Profiler]:
    """Return the configurations without `profiler=auto`, and the nsys that they use.

    `auto` means nsys where it is found and new enough, else torch, and torch with nodes=. A plan for another machine looks for
    no nsys here.

    Raises:
        Refused: two configurations name different programs.
    """
    configs = [
        _chosen(one, Profiler()) if one.nodes and one.profiler["name"] == "auto" else one
        for one in configs
    ]
    traced = [config for config in configs if _may_need_nsys(config)]
    if not traced:
        return [*configs], Profiler()
    paths = list(dict.fromkeys(config.profiler["nsys_path"] for config in traced))
    if len(paths) > 1:
        raise Refused(
            f"profiler.nsys_path={','.join(map(str, paths))}: a sweep has one; run one sweep for each"
        )
    profiler = _found(traced, paths[0], surroundings)
    return [
        _chosen(config, profiler) if config in traced else config for config in configs
    ], profiler


def _may_need_nsys(config: CheckedConfig) -> bool:
    trains = groups.choice("benchmark", config.benchmark["name"]).trains
    return trains and config.profiler["name"] in ("auto", "nsys")


def _found(
    traced: Sequence[CheckedConfig], path: str | None, surroundings: Mapping[str, str]
) -> Profiler:
    """Look for nsys. It is missing where one asks for nsys itself, or names the program, and this machine is to run it."""
    try:
        return Profiler(find(path, surroundings))
    except Refused as error:
        is_required = path is not None or any(
            config.profiler["name"] == "nsys" for config in traced
        )
        is_for_another_machine = traced[0].topology is not None and traced[0].dry_run
        return Profiler(missing=error if is_required and not is_for_another_machine else None)


def _chosen(config: CheckedConfig, profiler: Profiler) -> CheckedConfig:
    """Return a configuration whose profiler is nsys or torch."""
    name = "nsys" if config.profiler["name"] == "nsys" or profiler.nsys else "torch"
    return dataclasses.replace(config, profiler=config.profiler | {"name": name})
