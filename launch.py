"""Ringside's command: `python launch.py [-m] [option=value …]`. Reads the request, composes it, hands it to `launch`."""

import os
import sys
import tempfile

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import schema
from conf.explain import explain
from conf.overrides import normalise
from launch.plan import Request
from launch.sweep import run

requests: list[Request] = []


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def collect(composed: DictConfig) -> None:
    """Called by Hydra once for each combination of the sweep; nothing runs before all are composed."""
    requests.append(Request(OmegaConf.to_object(composed), list(HydraConfig.get().overrides.task)))


def main() -> int:
    """Exit status: 0 done, 1 a cell failed, 2 the request is wrong (one line on stderr), 130 interrupted."""
    typed = sys.argv[1:]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, not as Hydra's own print and exit 1
    schema.register()
    try:
        with tempfile.TemporaryDirectory() as scratch:  # Hydra's own folder; a study's folder is made by `launch`
            sys.argv[1:] = [*normalise(typed), f"hydra.run.dir={scratch}", f"hydra.sweep.dir={scratch}"]
            collect()
        return run(requests, typed) if requests else 0  # none after --help or --cfg
    except (HydraException, OmegaConfBaseException) as error:
        print(f"launch.py: {explain(error, typed)}", file=sys.stderr)
    except ValueError as error:
        print(f"launch.py: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
