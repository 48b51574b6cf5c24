"""Ringside's command: `python launch.py [-m] [option=value …]`. Reads the request, composes it, hands it to `launch`."""

import os
import sys

from launch import beginning

if __name__ == "__main__":
    before = beginning.begin()

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from conf import groups, schema
from conf.command_line import config_dirs, hydras_options, in_each_choice, normalise, refuse_no_cell
from launch.compose import hydra_errors, sweeper
from launch.display.lasting_output import close_quietly
from launch.help import completion
from launch.help.inform import inform
from launch.machine.secrets import told
from launch.plan.small_form import small_form

objects = sweeper.Objects()
composed: list[tuple[schema.Config, list[str]]] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def collect(config: DictConfig) -> None:
    """Keep one combination of the sweep: Hydra calls this for each, and nothing runs before all are composed."""
    composed.append((objects.of(config), list(HydraConfig.get().overrides.task)))


def compose(arguments: list[str]) -> list[tuple[schema.Config, list[str]]]:
    """Return the configuration and the overrides of every combination that Hydra makes of the arguments."""
    composed.clear()
    sys.argv[1:] = in_each_choice(arguments)
    with hydras_options():
        collect()
    return list(composed)


def main() -> int:
    """Return the exit status: 0 done, 1 a cell failed, 2 wrong request, 3 others still measure, 130 interrupted or no time."""
    typed = sys.argv[1:]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not as Hydra's own print and exit 1
    arguments: list[str] = []
    try:
        schema.register()
        sweeper.register()
        completion.register()
        groups.search_also(config_dirs(typed))
        if inform(typed):
            return 0
        requests = compose(arguments := normalise(typed))
        if not requests:
            refuse_no_cell(typed)
            return 0
        if small := small_form(requests, typed, os.environ):
            requests = compose(arguments := normalise([*small, *typed]))
        from launch.sweep import run  # half a second that help and the TAB key need not wait for

        return run(requests, typed, beginning.BEGAN_S, small)
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        print(told(f"launch.py: {hydra_errors.explain(error, arguments)}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a help, such as head, has seen enough
        return 0
    except KeyboardInterrupt:  # while it plans; a sweep that has begun ends itself
        print("launch.py: interrupted, nothing was started", file=sys.stderr)
        return beginning.INTERRUPTED


if __name__ == "__main__":
    status = beginning.answered(main, before)
    close_quietly(interrupted=status == beginning.INTERRUPTED)
    sys.exit(status)
