"""`python -m analysis verify STUDY… [--pack] [--json]`: compare records with their raw samples."""

import argparse
import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from analysis.bundle import changed, opened, studies
from analysis.console import console, print_text
from analysis.input_files import UnreadableInput
from analysis.report.table import Column, Table
from analysis.text import count, single_line
from analysis.verification.verify_study import Verification, verify
from benchmarks.record import CellFolder, record_paths
from benchmarks.record.encoding import jsonable
from conf import groups

MOST_ROWS = 40
LONGEST = 40  # characters of a value
DIFFERENCES = (
    Column("record", "record", "record"),
    Column("file", "file", "file"),
    Column("field", "field", "field"),
    Column("recorded", "recorded", lambda row: single_line(row.recorded, LONGEST), "number"),
    Column("recomputed", "recomputed", lambda row: single_line(row.recomputed, LONGEST), "number"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("--config-dir", metavar="DIR", type=Path, help=groups.CONFIG_DIR)
    add("studies", metavar="STUDY", nargs="+", help="the folder of a study, or a bundle")
    pack = "if every number is right, also compress the raw samples (.gz)"
    add("--pack", action="store_true", help=pack)


def run(arguments: argparse.Namespace) -> int:
    """Print what differs; 1: a value does, or samples are missing. Raises UnreadableInput."""
    groups.add_config_dir([arguments.config_dir] if arguments.config_dir else [])
    results: dict[str, Verification] = {}
    for name in arguments.studies:
        with opened(Path(name)) as root:
            if root is None:
                results[name] = verify(Path(name))
                continue
            files, differences = changed(root)
            last: Verification | None = None  # of the study that the bundle is of
            for folder in studies(root):
                last = results[f"{name}/{folder.name}"] = verify(folder)
            if last is None:
                raise UnreadableInput(f"{name}: holds no record")
            last.files += files
            last.values += files
            last.differences += differences
    for study, result in results.items():
        if not result.records:
            wrong = "holds no record" if Path(study).exists() else "no such folder"
            raise UnreadableInput(
                f"{study}: {wrong}; expected the folder of a study (<output_dir>/<study>), or a "
                "bundle of it (.tar.gz)"
            )
    saved_bytes: dict[str, int] = {}
    for study, result in results.items():
        if arguments.pack and result.right:
            paths = record_paths(Path(study))
            saved_bytes[study] = sum(CellFolder(path.parent).pack() for path in paths)
    status = 0 if all(result.right for result in results.values()) else 1
    with contextlib.suppress(BrokenPipeError):  # head has read enough, and the status counts
        if arguments.json:
            _print_json(results, saved_bytes)
            return status
        for study, result in results.items():
            packed = ""
            if study in saved_bytes:
                packed = f"packed: {saved_bytes[study] / 1e3:,.0f} kB less"
            elif arguments.pack:
                packed = "nothing was packed, because the study is not right"
            _print(study if len(results) > 1 else "", result, packed)
    return status


def _print_json(results: Mapping[str, Verification], saved_bytes: Mapping[str, int]) -> None:
    contents = []
    for study, result in results.items():
        content: dict[str, Any] = {
            "study": study,
            "right": result.right,
            "records": result.records,
            "recomputed": result.recomputed,
            "values": result.values,
            "files": result.files,
            "differences": jsonable(list(map(dataclasses.asdict, result.differences))),
            "not_recomputed": list(map(dataclasses.asdict, result.omissions)),
            "not_compared": dict(result.not_compared),
            "limits": dict(result.limits),
        }
        if study in saved_bytes:
            content["bytes_saved"] = saved_bytes[study]
        contents.append(content)
    if len(contents) == 1:
        print(json.dumps(contents[0]))
    else:
        print(json.dumps({"studies": contents}))


def _print(study: str, result: Verification, packed: str) -> None:
    out = console()
    if result.differences:
        caption = f"{study} does not say what its samples say".strip()
        table = Table.of("", caption, DIFFERENCES, result.differences)
        out.print(table.to_rich(MOST_ROWS))
    if len(result.differences) > MOST_ROWS:
        out.print(f"… {len(result.differences) - MOST_ROWS} more (--json has all)")
    lines = []
    reasons: Counter[str] = Counter()
    damaged = 0
    for omission in result.omissions:
        if omission.wrong:
            damaged += 1
            lines.append(f"wrong: {omission.record}: {omission.reason}")
        else:
            reasons[omission.reason] += 1
    for reason, records in reasons.items():
        lines.append(f"not recomputed: {count(records, 'record')}: {reason}")
    for name, records in sorted(result.not_compared.items()):
        where = "a file that this needs is not in the folder"
        lines.append(f"not compared in {count(records, 'record')}: {name} ({where})")
    for limit, records in sorted(result.limits.items()):
        lines.append(f"judged by another limit in {count(records, 'record')}: {limit}")
    if packed:
        lines.append(packed)
    summary = (
        f"{result.recomputed} of {count(result.records, 'record')} recomputed from raw samples"
    )
    if reasons:
        summary += f", {reasons.total():,} could not be (see above)"
    checked = "compared" if result.recomputed else "checked by other means"
    summary += f"; {result.values} values {checked}, {len(result.differences)} differ"
    if study:
        summary = f"{study}: {summary}"
    if result.differences:
        summary += f", in {count(len({row.record for row in result.differences}), 'record')}"
    if damaged:
        summary += f"; {count(damaged, 'record')} damaged"
    for line in [*lines, summary]:
        print_text(escape(line))
