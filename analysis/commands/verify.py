"""`python -m analysis verify STUDY… [--pack] [--mlflow [URI]] [--json]`: check every number against raw samples, and MLflow's."""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from analysis.bundle import changed, opened, studies
from analysis.console import console
from analysis.errors import UnreadableInput
from analysis.verification.verify import Difference, Verification, verify
from benchmarks.record import CellFolder, record_paths

_SHOWN = 40


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "studies", metavar="STUDY", nargs="+", help="the folder of a study, or a bundle"
    )
    parser.add_argument(
        "--pack",
        action="store_true",
        help="then pack the raw samples of a study that is right (.gz)",
    )
    parser.add_argument(
        "--mlflow",
        metavar="URI",
        nargs="?",
        const="",
        help="compare MLflow's runs too (default: OUTPUT_DIR/mlflow.db)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print what differs. Return 0: nothing does; 1: a value differs, or samples are missing or damaged.

    Raises:
        UnreadableInput: a folder holds no record, or there is no such store.
    """
    results: dict[str, Verification] = {}
    for name in arguments.studies:
        results |= _checked(name)
    for study, result in results.items():
        if not result.records:
            wrong = "holds no record" if Path(study).exists() else "no such folder"
            raise UnreadableInput(
                f"{study}: {wrong}; accepted is the folder of a study (<output_dir>/<study>), or a bundle"
            )
    for study, result in results.items():
        if arguments.mlflow is not None:
            _compare_store(study, arguments.mlflow, result)
    saved = {
        study: _pack(Path(study))
        for study, result in results.items()
        if arguments.pack and result.right
    }
    if arguments.json:
        several = [_as_json(study, result, saved.get(study)) for study, result in results.items()]
        print(json.dumps(several[0] if len(several) == 1 else {"studies": several}))
    else:
        for study, result in results.items():
            _print(study if len(results) > 1 else "", result, saved.get(study), arguments.pack)
    return 0 if all(result.right for result in results.values()) else 1


def _checked(name: str) -> dict[str, Verification]:
    """Return what came of a study; of a bundle what came of each study in it, and of the bundle's own list of hashes.

    Raises:
        UnreadableInput: a damaged archive, or one that is no bundle.
    """
    with opened(Path(name)) as root:
        if root is None:
            return {name: verify(Path(name))}
        files, differences = changed(root)
        results = {f"{name}/{study.name}": verify(study) for study in studies(root)}
        if not results:
            raise UnreadableInput(f"{name}: holds no record")
        *_, own = results.values()  # of the study that the bundle is of
        own.files, own.values = own.files + files, own.values + files
        own.differences += differences
        return results


def _compare_store(study: str, uri: str, result: Verification) -> None:
    """Add what MLflow's store has otherwise. Raises UnreadableInput where it cannot be compared.

    Only `launch` knows how a record becomes a run, and it may not be imported here: it is asked as a process of its own.
    """
    command = [sys.executable, "-m", "launch", "compare", study, *([f"--uri={uri}"] if uri else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["no answer"]
        raise UnreadableInput(lines[-1].removeprefix("python -m launch compare: ")) from None
    result.values += told["values"]
    result.differences += [
        Difference(one["record"], "MLflow", one["field"], one["stored"], one["recorded"])
        for one in told["differences"]
    ]
    result.differences += [
        Difference(one, "MLflow", "run", "there", "no record") for one in told["unknown"]
    ]
    if told["missing"]:
        result.not_compared[
            "MLflow has no run of the record (python -m launch sync writes it)"
        ] += len(told["missing"])


def _pack(study: Path) -> int:
    """Pack the raw samples of every record; return how many bytes that saved. Raises OSError."""
    return sum(CellFolder(path.parent).pack() for path in record_paths(study))


def _as_json(study: str, result: Verification, saved: int | None) -> dict[str, Any]:
    """Return the result in plain JSON types."""
    told = {
        "study": study,
        "right": result.right,
        "records": result.records,
        "recomputed": result.recomputed,
        "values": result.values,
        "files": result.files,
        "differences": [_plain(dataclasses.asdict(one)) for one in result.differences],
        "not_recomputed": [dataclasses.asdict(one) for one in result.omissions],
        "not_compared": dict(result.not_compared),
    }
    return told if saved is None else told | {"bytes_saved": saved}


def _plain(difference: Mapping[str, Any]) -> dict[str, Any]:
    """Return a difference whose numbers JSON has: NaN and infinities become text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in difference.items()
    }


def _print(study: str, result: Verification, saved: int | None, pack: bool) -> None:
    """Print the table of differences, what could not be checked, and the count."""
    out = console()
    if result.differences:
        table = Table(
            title=f"{escape(study)} does not say what its samples say".strip(), title_justify="left"
        )
        for name in ("record", "file", "field", "recorded", "recomputed"):
            table.add_column(
                name, justify="right" if name in ("recorded", "recomputed") else "left"
            )
        for one in result.differences[:_SHOWN]:
            table.add_row(
                *map(escape, (one.record, one.file, one.field)),
                _text(one.recorded),
                _text(one.recomputed),
            )
        out.print(table)
        if len(result.differences) > _SHOWN:
            out.print(f"… {len(result.differences) - _SHOWN} more (--json has all)")
    lines = [f"wrong: {one.record}: {one.reason}" for one in result.omissions if one.wrong]
    for reason, cells in Counter(one.reason for one in result.omissions if not one.wrong).items():
        lines.append(f"cannot be checked: {_records(cells)}: {reason}")
    for name, cells in sorted(result.not_compared.items()):
        why = "" if name.startswith("MLflow") else " (a file that this needs is not in the folder)"
        lines.append(f"not compared in {_records(cells)}: {name}{why}")
    if pack:
        told = (
            "nothing was packed, because the study is not right"
            if saved is None
            else f"packed: {saved / 1e3:,.0f} kB less"
        )
        lines.append(told)
    lines.append(f"{f'{study}: ' if study else ''}{_summary(result)}")
    for line in lines:
        out.print(escape(line), soft_wrap=True)


def _summary(result: Verification) -> str:
    """Return the last line: what was checked, what differs, and what nobody can check."""
    several = len({one.record for one in result.differences})
    said = f"{result.recomputed} of {_records(result.records)} recomputed, {result.values} values compared: "
    said += (
        f"{len(result.differences)} differ, in {_records(several)}"
        if result.differences
        else "0 differ"
    )
    wrong = sum(one.wrong for one in result.omissions)
    left = len(result.omissions) - wrong
    said += f"; {_records(wrong)} damaged" if wrong else ""
    return said + (f"; {_records(left)} cannot be checked" if left else "")


def _records(number: int) -> str:
    return f"{number} record{'' if number == 1 else 's'}"


def _text(value: Any) -> str:
    """Return a value with every digit that it has, in one short line."""
    text = repr(value) if isinstance(value, float) else str(value)
    return escape(text if len(text) <= 40 else f"{text[:39]}…")
