"""The command of `benchmark=script`, and the requests that cannot be measured. No torch."""

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.request import Room
from conf.cell import Cell
from conf.options import Refused, expand_path, to_text
from conf.secrets import argument_without_secrets

TORCHRUN, NONE = "torchrun", "none"
RANKS = "{ranks}"  # in a launcher's words: the number of ranks
PYTHON_FILE = ".py"
EXPECTED = "expected a script with its arguments, benchmark.run='train.py --batch-size 256'"


def seconds(cell: Cell) -> float:
    """Return how long the script is measured, without its own start."""
    return float(cell.benchmark["warmup_min_seconds"]) + float(cell.benchmark["max_seconds"])


def resolve(options: Mapping[str, Any], device: str, ranks: int) -> dict[str, Any]:
    """Return the options with texts for lists, the absolute folder, and the script's SHA-256; as
    `script` its name for people.

    Raises Refused: the script cannot be started, or an argument looks like a secret.
    """
    folder = Path.cwd()
    if options["folder"] != "auto":
        folder = expand_path("benchmark.folder", options["folder"])
    words = _words("benchmark.run", options["run"])
    script = script_file(words, folder)
    launcher = options["launcher"]
    if launcher not in (TORCHRUN, NONE):
        launcher = _words("benchmark.launcher", launcher)
        if shutil.which(launcher[0]) is None:
            raise Refused(f"benchmark.launcher={launcher[0]}: no such program")
        launcher = shlex.join(launcher)
    resolved = {**options, "run": shlex.join(words), "launcher": launcher, "folder": str(folder)}
    # The first word that is neither Python nor an option: train.py, or the module after -m.
    own = [word for word in words if not re.match(r"-|(\S*/)?python[\d.]*$", word)]
    resolved["script"] = Path(own[0] if own else words[0]).name
    if script is not None:
        resolved["sha256"] = hashlib.sha256(script.read_bytes()).hexdigest()
    return resolved


def _words(field: str, typed: Any) -> list[str]:
    try:
        if isinstance(typed, str):
            words = shlex.split(typed)
        else:
            words = [str(word) for word in typed or ()]
    except (TypeError, ValueError) as error:
        raise Refused(f"{field}={typed}: is not a command ({error}); {EXPECTED}") from None
    if not words or not words[0]:
        raise Refused(f"{field}={to_text(typed)}: {EXPECTED}")
    for word in words:
        hidden = argument_without_secrets(word)
        if hidden != word:
            raise Refused(
                f"{field}: {hidden} looks like a secret, and arguments are recorded; pass it in an "
                "environment variable"
            )
    return words


def script_file(words: Sequence[str], folder: Path) -> Path | None:
    """Return the file that a command runs; None for a module (python -m). Raises Refused."""
    program = words[0]
    if program.endswith(PYTHON_FILE):
        return _readable_file(program, folder)
    found = shutil.which(program)
    if "/" in program:
        found = shutil.which(str(folder / program))
    if found is None:
        path = folder / program
        reason = f"neither a file in {folder} nor a program"
        if path.is_file():
            reason = "is neither a Python script nor an executable"
        raise Refused(f"benchmark.run={program}: {reason}; {EXPECTED}")
    if not Path(program).name.startswith("python"):
        return Path(found)
    for word in words[1:]:
        if word == "-m":
            return None
        if word.endswith(PYTHON_FILE):
            return _readable_file(word, folder)
    return None


def _readable_file(script: str, folder: Path) -> Path:
    path = folder / script
    if not path.is_file() or not os.access(path, os.R_OK):
        reason = "cannot be read" if path.is_file() else "no such file"
        raise Refused(f"benchmark.run={script}: {reason} in {folder}; {EXPECTED}")
    return path


def refuse(cell: Cell, room: Room) -> None:
    """Refuse a cell that cannot be measured. Raises Refused."""
    options = cell.benchmark
    if options["launcher"] != TORCHRUN and len(cell.hosts) > 1:
        raise Refused(
            f"benchmark.launcher={to_text(options['launcher'])}: starts ranks on one host; "
            f"expected {TORCHRUN} for several"
        )
    if options["rate"] is None:
        return
    try:
        groups = re.compile(options["rate"]).groups
    except re.error as error:
        raise Refused(
            f"benchmark.rate={options['rate']}: is not a regular expression ({error})"
        ) from None
    if groups != 1:
        raise Refused(
            f"benchmark.rate={options['rate']}: has {groups} groups in parentheses; expected one, "
            "around the number, such as 'images/sec: ([0-9.]+)'"
        )
