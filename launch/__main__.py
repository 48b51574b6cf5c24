"""`python -m launch sync STUDY_DIR` writes records to MLflow.

Exit status: 0 done, 1 it failed, 2 the input is wrong, 130 Ctrl-C.
"""

import argparse
import signal
import sys
from pathlib import Path

from analysis.text import redact
from conf.schema import Tracking
from launch.tracking.store import TrackingUnavailable, WrongUri
from launch.tracking.tracker import sync

NAME = "python -m launch sync"


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit status. A wrong option exits with 2 through
    argparse."""
    parser = argparse.ArgumentParser(
        prog="python -m launch", description="Work with the records of a study after a sweep."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    text = "write those records of a study to MLflow that it does not have yet"
    add = commands.add_parser("sync", help=text, description=text).add_argument
    add("study_dir", type=Path, help="folder of the study: <output_dir>/<study>")
    add("--uri", help="MLflow tracking URI (default: sqlite:///<output_dir>/mlflow.db)")
    add("--experiment", help="MLflow experiment (default: ringside/<study>)")
    options = parser.parse_args(arguments)
    tracking = Tracking(uri=options.uri, experiment=options.experiment)
    try:
        report = sync(options.study_dir, tracking)
    except (ValueError, WrongUri) as error:
        print(redact(f"{NAME}: {error}"), file=sys.stderr)
        return 2
    except TrackingUnavailable as error:
        print(redact(f"{NAME}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; the same command continues from there", file=sys.stderr)
        return 130
    for sentence in report.unreadable:
        print(redact(f"{NAME}: {sentence}"), file=sys.stderr)
    print(
        f"{report.projected} projected, {report.already} there already, {len(report.unreadable)} "
        "unreadable"
    )
    return 1 if report.unreadable else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
