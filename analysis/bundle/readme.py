"""What a bundle says of itself: README.md, the commands, the versions."""

import contextlib
import importlib.metadata
import platform
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

from analysis.report.page import Report
from analysis.report.table import TEXT_LENGTH
from analysis.study.study import Study
from analysis.text import markdown, single_line
from analysis.verification.verify import Verification
from benchmarks.record.safe_text import visible

CLONE = Path(__file__).parent.parent.parent
DRAWN_BY = (
    "numpy",
    "scipy",
    "matplotlib",
    "jinja2",
)  # another version of these may draw or round otherwise


def readme(report: Report, study: str, checked: Verification, beside: bool) -> str:
    """Return README.md. `study` is the name of its folder; `beside`: records or a noise floor of other studies are there."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("analysis.bundle", ""), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True,
        autoescape=False,
    )  # fmt: skip
    environment.filters["markdown"] = lambda text: markdown(text, TEXT_LENGTH)
    name = single_line(study).replace("`", "'")
    return environment.get_template("README.md.j2").render(
        report=report,
        study=name,
        folder=f"BUNDLE/{shlex.quote(name)}",
        checked=checked,
        beside=beside,
        made=made_by(),
    )


def commands(study: Study) -> str:
    """Return the command of each sweep of a study as it was typed, one a line."""
    sweeps = {record.sweep_id: tuple(record.overrides) for record in study.records}
    lines = [
        visible(shlex.join(["python", "launch.py", *typed]), kept="")
        for typed in dict.fromkeys(sweeps.values())
    ]
    return "\n".join(["# What was typed in Ringside's clone.", *lines, ""])


def versions(report: Report) -> str:
    """Return the report's table of the machine and the software as CSV, with what made the report."""
    table = next(table for table in report.tables if table.name == "environment")
    made = {f"Ringside {name}": text for name, text in made_by().items()}
    made |= {name: importlib.metadata.version(name) for name in DRAWN_BY}
    made["python"] = platform.python_version()
    rows = (*table.rows, *(("report", name, text) for name, text in made.items()))
    return replace(table, rows=rows).to_csv()


def made_by() -> dict[str, str]:
    """Return {"version": …, "commit": …} of this program, as far as it is known."""
    found = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["version"] = importlib.metadata.version("ringside")
    if commit := _git("rev-parse", "HEAD"):
        found["commit"] = commit + " with changes" * bool(_git("status", "--porcelain", "-uno"))
    return found


def _git(*arguments: str) -> str:
    """Return what git says of this clone; empty without git or a clone. It writes nothing into the clone."""
    command = ["git", "--no-optional-locks", "-C", str(CLONE), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (subprocess.SubprocessError, OSError):
        return ""
