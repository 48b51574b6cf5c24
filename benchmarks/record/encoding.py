"""How values become JSON and come back: a number that JSON has no word for is written as text."""

import json
import math
from collections.abc import Mapping
from typing import Any

# A record with a bad number must stay readable.
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encoded(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return one JSON object and a newline. Bytes that are no UTF-8 (in a variable, in a path) come back as they were."""
    text = json.dumps(jsonable(content), indent=indent, ensure_ascii=False, allow_nan=False)
    # A lone surrogate becomes \\udcXX, which is how JSON writes it.
    return (text + "\n").encode("utf-8", errors="backslashreplace")


def jsonable(value: Any) -> Any:
    """Return the value with keys as text, tuples as lists, and numbers that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def restored(value: Any) -> Any:
    """Return the inverse of `jsonable` for values that hold numbers."""
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: restored(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restored(item) for item in value]
    return value
