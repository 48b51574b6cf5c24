"""`python -m analysis report STUDY…`: the report of studies, or a bundle of one."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from rich.markup import escape

from analysis.bundle import WrongStudy, bundle
from analysis.console import console, print_text
from analysis.report.build import default_folder, examine, examine_several
from analysis.report.figure import ON_PAGE, WIDTHS_IN
from analysis.report.report_files import write
from analysis.study.study_inputs import StudyPath, studies_in
from analysis.text import single_line, split_command
from benchmarks.record.folder import sha256
from benchmarks.record.safe_text import one_line
from conf import groups


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    studies = (
        "the folder of a study: <output_dir>/<study>; several, or an output_dir, are shown side "
        "by side. LABEL=FOLDER gives one a name"
    )
    add("--config-dir", metavar="DIR", type=Path, help=groups.CONFIG_DIR)
    add("studies", metavar="STUDY", nargs="+", help=studies)
    output = "folder to write to; default: STUDY/report; of several: report-NAMES-HASH beside them"
    add("-o", "--output", metavar="DIR", type=Path, help=output)
    archive = (
        "write one archive instead, with records, raw samples and report, that others can check "
        "(STUDY.bundle.zip)"
    )
    add("--bundle", action="store_true", help=archive)
    width = (
        "of figures: page (4.6 in), or a paper's one column (single, 3.3 in) or two (double, 7 in)"
    )
    add("--width", choices=WIDTHS_IN, default=ON_PAGE, help=width)


def run(arguments: argparse.Namespace) -> int:
    """Write the report and print its first sentences. Raises OSError, ValueError: not the folder of
    a study.
    """
    groups.add_config_dir([arguments.config_dir] if arguments.config_dir else [])
    if arguments.bundle:
        return _bundle(arguments)
    paths = [StudyPath.of(text) for text in arguments.studies]
    inside = _studies(paths[0].folder)
    if len(paths) > 1 or len(inside) > 1:
        content, findings = examine_several(paths, arguments.width)
        folder = default_folder(paths)
    else:
        (study,) = inside
        content, findings = examine(study, arguments.width)
        if paths[0].label:
            content = dataclasses.replace(content, study=single_line(paths[0].label))
        folder = study / "report"
    if arguments.output:  # it may be a link; in a study nothing of ours is one
        folder = arguments.output.resolve()
    index = write(content, folder)
    if arguments.json:
        summary = {
            "report": str(index),
            "study": content.study,
            "limits": content.limits,
            "finding": content.finding,
            "unsaid": content.unsaid,
        }
        print(json.dumps(summary | {"findings": dataclasses.asdict(findings)}))
        return 0
    out = console()
    for sentence in filter(None, (*content.finding, content.limits)):
        words, command = split_command(sentence)
        print_text(escape(words))
        if command:
            out.print(f"  {command}", soft_wrap=True, markup=False)
    out.print(f"report: {escape(str(index))}", soft_wrap=True)
    return 0


def _bundle(arguments: argparse.Namespace) -> int:
    if arguments.width != ON_PAGE:
        raise ValueError(
            "--width and --bundle exclude each other: who opens a bundle makes the figures of a "
            "width from its records"
        )
    several = []
    for text in arguments.studies:
        several += _studies(StudyPath.of(text).folder)
    if len(several) > 1:
        raise ValueError(f"--bundle takes one study, not {len(several)}: run it once for each")
    try:
        archive = bundle(several[0], arguments.output)
    except WrongStudy as error:
        print(one_line(f"python -m analysis report: {error}"), file=sys.stderr)
        return 1
    digest, size = sha256(archive), archive.stat().st_size
    if arguments.json:
        print(json.dumps({"bundle": str(archive), "bytes": size, "sha256": digest}))
        return 0
    out = console()
    large = f"{size / 1e3:,.0f} kB"
    if size >= 1e6:
        large = f"{size / 1e6:,.1f} MB"
    out.print(f"bundle: {escape(str(archive))} ({large})", soft_wrap=True)
    out.print(
        f"SHA-256: {digest} (publish it with the paper: it shows that the bundle is this one)",
        soft_wrap=True,
    )
    out.print(
        f"anyone can check it: python -m analysis verify {escape(archive.name)}", soft_wrap=True
    )
    return 0


def _studies(folder: Path) -> list[Path]:
    """Return the studies in a folder; itself where it holds no record, which its report says."""
    try:
        return studies_in(folder)
    except ValueError:
        return [folder]
