"""How values become JSON and come back: a number that JSON has no word for is written as text."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

# A record with a bad number must stay readable.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Ours have fewer than ten levels. What walks through a value calls itself for each level, and
# Python allows 1,000 calls.
DEEPEST = 60


def encoded(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return one JSON object and a newline.

    Bytes that are no UTF-8 (in a variable, in a path) come back as they were.
    """
    text = json.dumps(jsonable(content), indent=indent, ensure_ascii=False, allow_nan=False)
    # A lone surrogate becomes \\udcXX, which is how JSON writes it.
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def jsonable(value: Any) -> Any:
    """Return the value with keys as text, tuples as lists, not finite numbers as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def restored(value: Any, levels: int = DEEPEST) -> Any:
    """Return the inverse of `jsonable` for numbers. Raises ValueError beyond so many levels."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict | list) and not levels:
        raise ValueError(f"deeper than {DEEPEST} levels")
    if isinstance(value, dict):
        return {key: restored(item, levels - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item, levels - 1) for item in value]
    return value


def finite(value: object) -> float | None:
    """Return a number that a JSON value is; None for anything else, or no finite double."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def decoded(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError: no JSON, or too deep."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"deeper than {DEEPEST} levels") from None
    refuse_deep(value)
    return value


def refuse_deep(value: Any) -> None:
    """Refuse a JSON value of more than DEEPEST levels. Raises ValueError."""
    level = [[value]]
    for _ in range(DEEPEST + 2):
        inner: list[Any] = []
        for container in level:
            items = container
            if isinstance(container, dict):
                items = container.values()
            inner += [item for item in items if type(item) in (dict, list)]
        level = inner
    if level:
        raise ValueError(f"deeper than {DEEPEST} levels")
