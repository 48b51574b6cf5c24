"""Read a study's records or a file of another tool, and print a table (or --json).

A command is a module with `configure(parser)` and `run(arguments) -> int`; both have its name, as
`parser.get_default("command")` and `arguments.command`. Exit status: 0 done, 1 something ran and
failed (`verify`: a value differs, `compare`: a regression), 2 wrong input or wrong request (one
line on stderr), 3 inconclusive (`compare`), 130 Ctrl-C.
"""

import argparse
import gc
import importlib
import itertools
import signal
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from analysis.input_files import said
from analysis.text import redact
from benchmarks.record.safe_text import INTERRUPTED, end_process
from conf.options import nearest

PROGRAM = "python -m analysis"


class Parser(argparse.ArgumentParser):
    """Add the example of a command to what argparse says of its arguments."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, after the usage and one sentence."""
        super().error(f"{message}; an example: {self.prog} {self.get_default('example')}")


class Entry(NamedTuple):
    """A command, and the module of analysis.commands with its configure() and run()."""

    name: str
    module: str
    summary: str
    example: str


# {what a group of commands reads: its commands}
COMMANDS = {
    "Studies": (
        Entry("report", "report", "write the report; several studies are shown side by side",
                "outputs/default"),
        Entry("compare", "compare_studies", "compare two studies; --limit makes it a gate for CI",
                "outputs/before outputs/after --limit 2%"),
        Entry("predict", "predict_cells", "forecast configurations that were not run",
                "outputs/default --gpus 16 --per-node 8"),
        Entry("advise", "advise_cells", "recommend GPUs, strategy and NCCL settings",
                "outputs/default --gpus 0+1,0+3"),
        Entry("verify", "verify", "compute every number again from its raw samples",
                "outputs/default"),
        Entry("seconds", "seconds", "break down the wall time of each run and of the sweep",
                "outputs/default"),
    ),
    "Machines, and files of other tools": (
        Entry("topology", "machine", "show the links between GPUs and NICs",
                "topo.txt --svg topo.svg"),
        Entry("subsets", "machine", "group GPU subsets by their wiring", "topo.txt --size 2"),
        Entry("place", "machine", "recommend GPUs and their ring order",
                "--gpus 4 --topology topo.txt"),
        Entry("nccl-log", "native", "show transports, channels, settings and warnings",
                "nccl.log"),
        Entry("nccl-tests", "native", "read nccl-tests tables; flag tables that are inconsistent",
                "all_reduce.txt"),
        Entry("p2p", "native", "read matrices of p2pBandwidthLatencyTest", "p2p.txt"),
        Entry("trace", "native", "break down communication in a trace of nsys or torch.profiler",
                "trace.sqlite"),
    ),
    "Words": (
        Entry("explain", "definitions", "explain a metric, validity code, column or word",
                "scaling/efficiency"),
        Entry("reference", "definitions", "write all of these as Markdown", "reference.md"),
    ),
}  # fmt: skip


def _listed() -> str:
    lines = []
    for title, commands in COMMANDS.items():
        lines.append(f"\n{title}")
        for command in commands:
            lines.append(f"  {command.name:<11} {command.summary}")
            lines.append(f"  {'':<11} {PROGRAM} {command.name} {command.example}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Raises nothing for wrong input."""
    arguments = sys.argv[1:] if argv is None else argv
    commands = {command.name: command for command in itertools.chain(*COMMANDS.values())}
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] COMMAND ...",
        description=f"{__doc__.splitlines()[0]}\n{_listed()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND")
    name = parser.parse_args(arguments[:1]).command
    if name not in commands:
        near = nearest(name, commands)
        meant = f"did you mean {near}?" if near else f"expected one of: {', '.join(commands)}"
        parser.error(f"{name}: unknown command; {meant}")
    command = commands[name]
    parser = Parser(prog=f"{PROGRAM} {command.name}", description=command.summary)
    parser.set_defaults(command=command.name, example=command.example)
    if command.module != "definitions":
        parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        # Import only the command asked for: numpy and matplotlib take a second.
        module = importlib.import_module(f"analysis.commands.{command.module}")
        module.configure(parser)
        return int(module.run(parser.parse_args(arguments[1:])))
    except BrokenPipeError:  # the reader of the output, such as head, has seen enough
        return 0
    except (ValueError, OSError) as error:
        print(redact(f"{parser.prog}: {said(error)}"), file=sys.stderr)
        return 2
    except MemoryError:
        print(f"{parser.prog}: there is too little memory", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        stopped = "stopped; no record was changed, and the same command begins again"
        print(f"{parser.prog}: {stopped}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    gc.disable()  # it would walk again and again through thousands of records
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_process(main())
