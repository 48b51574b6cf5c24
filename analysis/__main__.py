"""Read a file of another tool or a study's records, and print a table (--json: a JSON object).

A command is a module with `configure(parser)` and `run(arguments) -> int`. Exit status: 0 done, 1
something ran and failed (`verify`: a value differs, `compare`: a regression), 2 wrong input or
wrong request (one line on stderr), 130 Ctrl-C.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from analysis.input_files import gc_paused, said
from analysis.text import redact
from benchmarks.record.safe_text import close_quietly

INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C
# {module of analysis.commands with configure() and run(): {command: one line of help}}
COMMANDS: dict[str, dict[str, str]] = {
    "machine": {
        "topology": "show the link classes between GPUs and NICs; --svg draws the machine",
        "subsets": "group the GPU subsets by their wiring",
        "place": "say which GPUs to take, and in which ring order",
    },
    "native": {
        "nccl-log": "say what NCCL did: transports, channels, settings, choices, warnings",
        "trace": "say where communication time goes, in a trace of nsys or torch.profiler",
        "nccl-tests": "read output of nccl-tests 2.0 to 2.19; flag inconsistent tables",
        "p2p": "show matrices of p2pBandwidthLatencyTest",
    },
    "report": {
        "report": "write the report of a study, or of several, with figures and tables; "
        "--bundle: an archive that others can check",
        "seconds": "say where the time of each cell went, and that of the sweep around them",
    },
    "verify": {"verify": "derive every record again from the raw lines of its ranks, and compare"},
    "predict_cells": {
        "predict": "say what cells should give before they run; --holdout: how good such forecasts "
        "were",
    },
    "advise_cells": {
        "advise": "say which GPUs, strategy and NCCL settings to take by forecast",
    },
    "compare_studies": {"compare": "say how two studies differ"},
    "definitions": {
        "explain": "say what a metric, code, column or word means, and what to do",
        "reference": "write all of these as Markdown",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Raises nothing for wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    with_json = argparse.ArgumentParser(add_help=False)
    with_json.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        for module, texts in COMMANDS.items():
            for name, text in texts.items():
                parents = [] if module == "definitions" else [with_json]
                sub = commands.add_parser(name, help=text, description=text, parents=parents)
                # Import only the command asked for: numpy and matplotlib take a second.
                if arguments[:1] == [name]:
                    command = importlib.import_module(f"analysis.commands.{module}")
                    command.configure(sub)
        parsed = parser.parse_args(arguments)
        with gc_paused():  # thousands of records
            return int(command.run(parsed))
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        return 0
    except (ValueError, OSError) as error:
        print(
            redact(f"python -m analysis {arguments[0]}: {said(error)}"),
            file=sys.stderr,
        )
        return 2
    except MemoryError:
        print(f"python -m analysis {arguments[0]}: there is too little memory", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"python -m analysis {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = main()
    close_quietly(interrupted=status == INTERRUPTED)
    sys.exit(status)
