"""`python -m analysis report STUDY_DIR [-o DIR] [--bundle] [--json]`: the report of a study, or a bundle to give away."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich.markup import escape

from analysis.bundle.archive import bundle
from analysis.bundle.stage import WrongStudy
from analysis.console import console
from analysis.report.build import examine, write
from benchmarks.record.raw_files import sha256
from benchmarks.record.visible import one_line


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("study", metavar="STUDY_DIR", type=Path, help="the folder of a study: <output_dir>/<study>")
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, help="where to write; default: STUDY_DIR/report")
    text = (
        "write one archive instead, with records, raw samples and report, that others can check (STUDY_DIR.bundle.zip)"
    )
    parser.add_argument("--bundle", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its three sentences. Raises OSError for a folder that cannot be read or written."""
    if arguments.bundle:
        return _bundle(arguments)
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


def _bundle(arguments: argparse.Namespace) -> int:
    """Write the bundle and print where it is and its hash. Return 1 where the study does not verify. Raises OSError."""
    try:
        place = bundle(arguments.study, arguments.output)
    except WrongStudy as error:
        print(one_line(f"python -m analysis report: {error}"), file=sys.stderr)
        return 1
    digest, size = sha256(place), place.stat().st_size
    if arguments.json:
        print(json.dumps({"bundle": str(place), "bytes": size, "sha256": digest}))
        return 0
    out = console()
    out.print(f"bundle: {escape(str(place))} ({size / 1e6:,.1f} MB)", soft_wrap=True)
    out.print(f"SHA-256: {digest} (publish it with the paper: it shows that the bundle is this one)", soft_wrap=True)
    out.print(f"anyone can check it: python -m analysis verify {escape(place.name)}", soft_wrap=True)
    return 0
