"""The grammar of one table of nccl-tests 2.0 to 2.19: its header and its rows.

A row counts only if it has as many numbers as the header names, its size fits its count, and its algbw is size ÷ time
within rounding. A cut or torn row is None, never half read.
"""

import math
import re
from dataclasses import dataclass, replace

from analysis.nccl_tests.run import Measured, Row
from benchmarks.collectives.busbw import NCCL_TESTS_ELEMENT_BYTES

ROW_START = re.compile(r"\s*(\d{1,19})\s+(\d{1,19})\s+([a-z]\w*)(\s.*)", re.ASCII)
_NUMBER = re.compile(r"\d{1,19}(?:\.\d{1,6})?(?:e[+-]\d{2,3})?", re.ASCII)
_WORD = re.compile(r"[a-z]\w*", re.ASCII)
_ROOT = re.compile(r"-?\d{1,7}", re.ASCII)
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)
_ITERATION = {"i_min": "min_us", "i_max": "max_us", "i_p99": "p99_us", "i_cv%": "cv_pct"}
_MEASURED = {"time", "cputime", "algbw", "busbw", "error", "#wrong", *_ITERATION}


@dataclass(frozen=True, slots=True)
class TableHeader:
    """The columns of a header: those left of the numbers, then the names of one or two groups of numbers."""

    redop: bool
    root: bool
    groups: tuple[tuple[str, ...], ...]
    timestamp: bool


def read_header(text: str) -> TableHeader | None:
    """Return the columns that a header names; None for any other line."""
    words = text.split()
    if words[:4] != ["#", "size", "count", "type"]:
        return None
    words = words[4:]
    left = [word for word in words[:2] if word in ("redop", "root")]
    figures = words[len(left) :]
    stamp = figures[-1:] == ["timestamp"]
    groups: list[list[str]] = []
    for word in figures[: len(figures) - stamp]:
        if word in ("time", "cputime"):
            groups.append([])
        if not groups or word not in _MEASURED or word in groups[-1]:
            return None
        groups[-1].append(word)
    complete = all(
        {"algbw", "busbw"} < set(group) and {"error", "#wrong"} & set(group) for group in groups
    )
    if len(groups) != 2 or not complete or groups[0] != groups[1]:
        return None
    return TableHeader("redop" in left, "root" in left, tuple(map(tuple, groups)), stamp)


def read_row(text: str, table: TableHeader, number: int, program: str | None) -> Row | None:
    """Read one row; None if it does not match its table or contradicts itself."""
    found = ROW_START.fullmatch(text)
    if found is None:
        return None
    size, count, dtype, words = int(found[1]), int(found[2]), found[3], found[4].split()
    stamp = None
    if table.timestamp:
        stamp = " ".join(words[-2:])
        words = words[:-2]
        if not _STAMP.fullmatch(stamp):
            return None
    redop = words.pop(0) if table.redop and words and _WORD.fullmatch(words[0]) else None
    root = None
    if table.root:
        if not words or not _ROOT.fullmatch(words[0]):
            return None
        root = int(words.pop(0))
    if len(words) != sum(map(len, table.groups)):
        return None
    element = NCCL_TESTS_ELEMENT_BYTES.get(dtype)
    share = count * (element or 0)
    if element and program != "alltoallv" and (size % share if share else size):
        return None
    measured = []
    for names in table.groups:
        figures = dict(zip(names, words, strict=False))
        words = words[len(names) :]
        one = _figures(figures)
        if one is None or not _plausible(figures, size, size // share if share else 1):
            return None
        measured.append(one)
    named = None if redop == "none" else redop
    return Row(
        size,
        count,
        dtype,
        named,
        None if root == -1 else root,
        measured[0],
        measured[1],
        stamp,
        number,
    )


def _figures(words: dict[str, str]) -> Measured | None:
    """Read the numbers of one placement; None if one is not a number."""
    values: dict[str, float | None] = {}
    for name, word in words.items():
        unknown = word in ("nan", "-nan", "inf") or (word == "N/A" and name in ("error", "#wrong"))
        if not unknown and not _NUMBER.fullmatch(word):
            return None
        values[name] = None if unknown else float(word)
        if values[name] == math.inf:
            return None
    wrong = values.get("#wrong")
    if wrong is not None and not wrong.is_integer():
        return None
    one = Measured(
        values.get("time"), values["algbw"], values["busbw"], None if wrong is None else int(wrong)
    )
    iterations = {key: values[name] for name, key in _ITERATION.items() if name in values}
    return replace(
        one,
        error=values.get("error"),
        cputime_us=values.get("cputime"),
        per_iteration=iterations or None,
    )


def _half(word: str) -> float:
    """Return half a unit in the last place of a printed number."""
    mantissa, _, exponent = word.partition("e")
    return float(f"0.5e{int(exponent or 0) - len(mantissa.partition('.')[2])}")


def _plausible(words: dict[str, str], size: int, shares: int) -> bool:
    """Tell whether algbw is size ÷ time within rounding; `shares` is the size ÷ one rank's part.

    hypercube counts one part less.
    """
    time, algbw = words.get("time", "nan"), words["algbw"]
    if not (_NUMBER.fullmatch(time) and _NUMBER.fullmatch(algbw)):
        return True
    low, high = float(time) - _half(time), float(time) + _half(time)
    slack = _half(algbw) * 1.001
    for part in (1.0, (shares - 1) / shares if shares else 1.0):
        below = size * part / high / 1e3 - slack if high > 0 else float("inf")
        above = size * part / low / 1e3 + slack if low > 0 else float("inf")
        if below <= float(algbw) <= above:
            return True
    return False
