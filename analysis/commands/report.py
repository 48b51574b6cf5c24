"""`python -m analysis report STUDY_DIR [-o DIR] [--json]`: the report of a study, as a page, Markdown, tables and figures."""

import argparse
import dataclasses
import json
from pathlib import Path

from rich.markup import escape

from analysis.console import console
from analysis.report.build import examine, write


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("study", metavar="STUDY_DIR", type=Path, help="the folder of a study: <output_dir>/<study>")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="where to write; default: STUDY_DIR/report")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its three sentences. Raises OSError for a folder that cannot be read or written."""
    told, found = examine(arguments.study)
    # What the user names may be a link; in a study nothing of ours is one.
    index = write(told, arguments.output.resolve() if arguments.output else arguments.study / "report")
    if arguments.json:
        said = {"report": str(index), "study": told.study, "finding": told.finding, "unsaid": told.unsaid}
        print(json.dumps(said | {"findings": dataclasses.asdict(found)}))
        return 0
    out = console()
    for sentence in told.finding:
        out.print(escape(sentence), soft_wrap=True)
    out.print(f"report: {escape(str(index))}", soft_wrap=True)
    return 0
