"""Check that the fields of a dataclass hold what its annotations say, so that no later reader has to."""

import dataclasses
import functools
import sys
import types
import typing
from typing import Any

_hints: Any = functools.cache(typing.get_type_hints)  # a study may have thousands of records


def check_types(instance: Any, prefix: str = "") -> None:
    """Check every field of a dataclass instance, nested ones too.

    Raises:
        TypeError: names the first field that holds something else, and its value.
    """
    for name, hint in _hints(type(instance)).items():
        value = getattr(instance, name)
        if dataclasses.is_dataclass(value):
            check_types(value, f"{prefix}{name}.")
        if not fits(value, hint):
            raise TypeError(f"{prefix}{name}={value!r:.100}")


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is what an annotation allows. A number that is declared float fits a double."""
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin is not None:
        return _fits_generic(value, origin, typing.get_args(hint))
    if hint is float:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, float) or (whole and abs(value) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _fits_generic(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, one) for one in inner)
    if origin is dict:
        return isinstance(value, dict) and (inner[1] is Any or all(fits(item, inner[1]) for item in value.values()))
    return isinstance(value, origin) and (inner[0] is Any or all(fits(item, inner[0]) for item in value))
