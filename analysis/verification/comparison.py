"""Compare two forms of the same nested values, leaf by leaf."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "absent"
# Numbers that differ by less are equal: another Python, numpy or scipy rounds otherwise in the last digits.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Difference:
    """One thing that is recorded otherwise than its source gives it."""

    record: str  # the folder of the attempt, within the study
    file: str  # record.json, a raw file, or the run in MLflow's store
    field: str  # metrics step/ms_median; tables p2p.matrices.…; SHA-256
    recorded: Any  # ABSENT where it is not there
    recomputed: Any


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number, word and empty container of nested JSON, with the path to it."""
    inside = f"{key}." if key else ""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{inside}{name}")
    elif isinstance(value, list | tuple) and value:
        yield f"{inside}length", len(value)
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{inside}{number}")
    elif key or not isinstance(
        value, Mapping | list | tuple
    ):  # an empty part of a record has no value
        yield key, _empty(value)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal as JSON has them; NaN equals NaN."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if (isinstance(one, float) and isinstance(other, int | float)) or (
        isinstance(other, float) and isinstance(one, int)
    ):
        try:
            return (
                one == other
                or (math.isnan(one) and math.isnan(other))
                or math.isclose(one, other, rel_tol=TOLERANCE)
            )
        except OverflowError:  # a whole number beyond every double
            return False
    return bool(one == other)


def same_sentence(one: Any, other: Any) -> bool:
    """Tell whether two sentences hold the same numbers: the words of a later version may be others."""
    return isinstance(one, str) and isinstance(other, str) and _numbers(one) == _numbers(other)


def _numbers(sentence: str) -> list[str]:
    return sorted(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", sentence))


def _empty(value: Any) -> Any:
    """Return an empty list for every empty container: JSON has no tuple, and a part without entries may be either."""
    return [] if isinstance(value, list | tuple | Mapping) else value
