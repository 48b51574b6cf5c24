"""`python -m launch sync STUDY_DIR` writes records to MLflow; `compare STUDY_DIR` says where MLflow
has them otherwise.

Exit status: 0 done, 1 it failed or differs, 2 the input is wrong, 130 Ctrl-C.
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.record.safe_text import one_line
from conf.schema import Tracking
from launch.tracking.store import TrackingUnavailable, WrongUri
from launch.tracking.sync import compare, sync


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return the exit status. A wrong option exits with 2 through
    argparse."""
    parser = argparse.ArgumentParser(
        prog="python -m launch", description="Work with the records of a study after a sweep."
    )
    study = argparse.ArgumentParser(add_help=False)
    study.add_argument("study_dir", type=Path, help="folder of the study: <output_dir>/<study>")
    study.add_argument(
        "--uri", help="MLflow tracking URI (default: sqlite:///<output_dir>/mlflow.db)"
    )
    study.add_argument("--experiment", help="MLflow experiment (default: ringside/<study>)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "sync",
        parents=[study],
        help="write those records of a study to MLflow that it does not have yet",
    )
    commands.add_parser(
        "compare",
        parents=[study],
        help="compare what MLflow has of a study with its records; one JSON object",
    )
    options = parser.parse_args(arguments)
    name = f"python -m launch {options.command}"
    tracking = Tracking(uri=options.uri, experiment=options.experiment)
    try:
        if options.command == "compare":
            comparison = compare(options.study_dir, tracking)
            print(json.dumps(comparison))
            return 0 if comparison["right"] else 1
        report = sync(options.study_dir, tracking)
    except (ValueError, WrongUri) as error:
        print(one_line(f"{name}: {error}"), file=sys.stderr)
        return 2
    except TrackingUnavailable as error:
        print(one_line(f"{name}: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; the same command continues from there", file=sys.stderr)
        return 130
    for sentence in report.unreadable:
        print(one_line(f"{name}: {sentence}"), file=sys.stderr)
    print(
        f"{report.projected} projected, {report.already} there already, {len(report.unreadable)} "
        "unreadable"
    )
    return 1 if report.unreadable else 0


if __name__ == "__main__":
    sys.exit(main())
