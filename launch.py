"""Ringside's command: `python launch.py [-m] [option=value …]`. Reads the request, composes it, hands it to `launch`."""

import os
import signal
import sys
from typing import cast

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import groups, schema, sweeper
from conf.command_line import config_dirs, hydras_options, normalise, refuse_no_cell
from conf.hydra_errors import explain
from launch.display.lasting_output import close_quietly
from launch.help import completion
from launch.help.inform import inform
from launch.machine.secrets import told

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C

composed: list[tuple[DictConfig, list[str]]] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def collect(config: DictConfig) -> None:
    """Keep one combination of the sweep: Hydra calls this for each, and nothing runs before all are composed."""
    composed.append((config, list(HydraConfig.get().overrides.task)))


def main() -> int:
    """Return the exit status.

    0 done, 1 a cell failed, 2 the request is wrong (one line on stderr), 3 other launchers are measuring cells of it
    (wait=false), 130 interrupted.
    """
    typed = sys.argv[1:]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not as Hydra's own print and exit 1
    schema.register()
    sweeper.register()
    completion.register()
    arguments: list[str] = []
    try:
        groups.search_also(config_dirs(typed))
        if inform(typed):
            return 0
        arguments = normalise(typed)
        sys.argv[1:] = arguments
        with hydras_options():
            collect()
        if not composed:
            refuse_no_cell(typed)
            return 0
        from launch.sweep import run  # half a second that help and the TAB key need not wait for

        return run([(cast(schema.Config, OmegaConf.to_object(one)), overrides) for one, overrides in composed], typed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OverflowError) as error:
        sentence = explain(error, arguments)
    except RecursionError:
        sentence = "an argument has too many brackets inside each other; accepted is option=value"
    except KeyboardInterrupt:  # while it plans; a sweep that has begun ends itself
        print("launch.py: interrupted, nothing was started", file=sys.stderr)
        return INTERRUPTED
    print(told(f"launch.py: {sentence}"), file=sys.stderr)
    return 2


if __name__ == "__main__":
    status = main()
    if status == INTERRUPTED:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a second one, while Python ends, must not change the exit status
    close_quietly()
    sys.exit(status)
