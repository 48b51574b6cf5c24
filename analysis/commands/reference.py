"""`python -m analysis reference [--check]`: write benchmarks/REFERENCE.md of metrics and checks."""

import argparse
from pathlib import Path

from analysis.validity.checks import CHECKS, OTHER_CODES
from benchmarks.record.metrics import METRICS
from benchmarks.record.safe_files import write_whole

FILE = Path(__file__).parents[2] / "benchmarks" / "REFERENCE.md"
ORDER = ("invalid", "suspect", "finding", "unchecked")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--check", action="store_true", help="only say whether the file is current")


def run(arguments: argparse.Namespace) -> int:
    """Write the file, or compare it. Return 1 where `--check` finds another text."""
    text = reference()
    if not arguments.check:
        print(write_whole(FILE, text.encode()))
        return 0
    if FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{FILE} is not current; `python -m analysis reference` writes it")
    return 1


def reference() -> str:
    """Return benchmarks/REFERENCE.md."""
    lines = [
        "# Reference",
        "",
        "Written by `python -m analysis reference`; METHOD.md says how the numbers are measured.",
        "",
        "## Metrics",
        "",
        "A value in % is stored as a share of 1. `{one|all}` is one of these words, `<way>` any.",
        "",
        "| metric | unit | title |",
        "|---|---|---|",
    ]
    for metric in METRICS.values():
        name = metric.name.replace("|", "\\|")
        lines.append(f"| `{name}` | {metric.unit} | {metric.title} |")
    lines += ["", "## Validity codes", "", "| code | verdict | meaning |", "|---|---|---|"]
    codes = dict(OTHER_CODES)
    for check in CHECKS:
        codes[check.code] = (check.severity, check.meaning)
    for verdict in ORDER:
        for code, (severity, meaning) in codes.items():
            if severity.startswith(verdict):
                lines.append(f"| `{code}` | {severity} | {meaning} |")
    return "\n".join(lines) + "\n"
