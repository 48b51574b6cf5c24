"""Ringside's command: `python launch.py [-m] [option=value …]` reads a request and runs it."""

import gc
import os
import signal
import sys
import time

# Before all that takes time is imported: a sweep's seconds count from here.
BEGAN_S = time.monotonic()
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C

if __name__ == "__main__":
    # Else it would walk through all that is imported and planned again and again
    # (launch.study.background).
    gc.disable()
    # Ctrl-C ends the process without a traceback; a job in the background goes on ignoring it.
    sigint_handler = signal.getsignal(signal.SIGINT)
    if sigint_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

try:
    import hydra
except ModuleNotFoundError:
    message = (
        "launch.py: this Python has no Hydra; activate the environment of README's first command"
    )
    print(message, file=sys.stderr)
    sys.exit(2)
import yaml
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from conf import command_line, groups, schema
from conf.options import Refused
from launch import compose, help, hydra_errors


def main() -> int:
    """Return the exit status: 0 done, 1 a cell failed, 2 wrong request, 3 others still measure or
    the answer is open, 130 interrupted or no time."""
    typed = command_line.with_first_study(sys.argv[1:])
    try:
        line = command_line.read(typed)
        groups.add_config_dir([line.config_dir] if line.config_dir else [])
        if line.completion:
            schema.register()
            hydra.main(version_base="1.3", config_path=str(groups.ROOT), config_name="config")(
                print
            )()
            return 0
        if line.help or line.version:
            help.answer(line)
            return 0
        if line.config:
            print(compose.composed_yaml(line))
            return 0
        requests, preset = compose.requests_of(line, os.environ)
        if not requests:
            raise Refused(f"{' '.join(typed)}: no run: a list or a glob() in it is empty")
        from launch.sweep import run  # half a second that help need not wait for

        return run(requests, typed, BEGAN_S, preset)
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        print(f"launch.py: {hydra_errors.explain(error, typed)}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a help, such as head, has seen enough
        return 0
    except KeyboardInterrupt:  # while it plans; a sweep that has begun ends itself
        print("launch.py: interrupted, nothing was started", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGINT, sigint_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    help.end_process(main())
