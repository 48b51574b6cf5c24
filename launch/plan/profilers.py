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

    `auto` means nsys where it is found and new enough, else torch, and torch with nodes=. A plan
    for another machine looks for no nsys here.

    Raises:
        Refused: two configurations name different programs.
    """
    traced = []
    for config in configs:
        trains = groups.choice("benchmark", config.benchmark["name"]).trains
        name = config.profiler["name"]
        if trains and (name == "nsys" or (name == "auto" and not config.nodes)):
            traced.append(config)
    profiler = Profiler()
    if traced:
        paths = list(dict.fromkeys(config.profiler["nsys_path"] for config in traced))
        if len(paths) > 1:
            raise Refused(
                f"profiler.nsys_path={','.join(map(str, paths))}: a sweep has one; run one sweep "
                "for each"
            )
        profiler = _find_nsys(traced, paths[0], surroundings)
    chosen = []
    for config in configs:
        if config in traced or (config.nodes and config.profiler["name"] == "auto"):
            is_nsys = config.profiler["name"] == "nsys" or (profiler.nsys and not config.nodes)
            name = "nsys" if is_nsys else "torch"
            config = dataclasses.replace(config, profiler=config.profiler | {"name": name})
        chosen.append(config)
    return chosen, profiler


def _find_nsys(
    traced: Sequence[CheckedConfig], path: str | None, surroundings: Mapping[str, str]
) -> Profiler:
    """Look for nsys. It is missing where a request names it, and this machine is to run it."""
    try:
        return Profiler(find(path, surroundings))
    except Refused as error:
        is_named = path is not None or any(config.profiler["name"] == "nsys" for config in traced)
        is_for_another_machine = traced[0].topology is not None and traced[0].dry_run
        return Profiler(missing=error if is_named and not is_for_another_machine else None)
