"""`python -m launch sync STUDY_DIR` writes records to MLflow, `ui` shows them in the browser,
`observe -- COMMAND` watches a running job without a study.

Exit status: 0 done, 1 it failed, 2 the input is wrong, 130 Ctrl-C.
"""

import argparse
import signal
import sys
from pathlib import Path

from analysis.text import count, redact
from benchmarks.record.safe_text import INTERRUPTED, end_process
from conf.schema import Tracking
from launch.tracking.store import TrackingUnavailable, WrongUri
from launch.tracking.tracker import sync
from launch.tracking.ui import show

COMMANDS = {
    "sync": "write those records of a study to MLflow that it does not have yet",
    "observe": "run any training command, and say which rank is slow, where and why",
    "ui": "show the runs of a study in the browser, until Ctrl-C",
}
STOPPED = {
    "sync": "stopped; what was written stays, and the same command writes the rest",
    "observe": "stopped",
    "ui": "stopped before MLflow's server answered; no process is left",
}
STUDY = "folder of the study: <output_dir>/<study>"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit status. A wrong option exits with 2 through
    argparse."""
    parser = argparse.ArgumentParser(
        prog="python -m launch", description="Work with the records of a study after a sweep."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in COMMANDS.items():
        add = commands.add_parser(name, help=text, description=text).add_argument
        if name == "observe":
            add("run", metavar="COMMAND", nargs="*", help="after `--`")
            add("--output-dir", type=Path, default="outputs", help="(default: outputs)")
            add("--uri", help="also write a run to MLflow, at this tracking URI")
            continue
        if name == "sync":
            add("folder", metavar="STUDY", type=Path, help=STUDY)
        else:
            several = f"{STUDY}, or an output_dir: the study measured last (default: outputs)"
            add("folder", metavar="STUDY", type=Path, nargs="?", default="outputs", help=several)
        add("--uri", help="MLflow tracking URI (default: sqlite:///<output_dir>/mlflow.db)")
        add("--experiment", help="MLflow experiment (default: ringside/<study>)")
    options = parser.parse_args(arguments)

    def complain(sentence: object) -> None:
        print(redact(f"python -m launch {options.command}: {sentence}"), file=sys.stderr)

    try:
        if options.command == "observe":
            from launch.observe import observe

            return observe(options.run, options.output_dir, options.uri)
        tracking = Tracking(uri=options.uri, experiment=options.experiment)
        if options.command == "ui":
            return show(options.folder, tracking)
        report = sync(options.folder, tracking)
    except (ValueError, WrongUri) as error:
        complain(error)
        return 2
    except TrackingUnavailable as error:
        complain(error)
        return 1
    except KeyboardInterrupt:
        complain(STOPPED[options.command])
        return INTERRUPTED
    for sentence in report.unreadable:
        complain(sentence)
    print(
        f"{count(report.projected, 'run')} written to MLflow, {report.already} there before, "
        f"{len(report.unreadable)} not written"
    )
    return 1 if report.unreadable else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end_process(main())
