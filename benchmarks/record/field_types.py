"""Check that the fields of a dataclass hold what its annotations say, so that no later reader has to."""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

Check = Callable[[Any], bool]


def check_types(instance: Any, prefix: str = "") -> None:
    """Check every field of a dataclass instance, nested ones too.

    Raises:
        TypeError: names the first field that holds something else, and its value.
    """
    cls: Any = type(instance)
    for name, fits in _checks(cls):
        value = getattr(instance, name)
        if not fits(value):
            raise TypeError(f"{prefix}{name}={value!r:.100}")
        if dataclasses.is_dataclass(value):
            check_types(value, f"{prefix}{name}.")


@functools.cache
def _checks(cls: type) -> list[tuple[str, Check]]:
    """Return each field's name and check; made once, since a study may have thousands of records."""
    return [
        (name, _check(hint)) for name, hint in typing.get_type_hints(cls).items() if hint is not Any
    ]


def _check(hint: Any) -> Check:
    """Return a function that tells whether a value is what an annotation allows."""
    if hint is float:
        return _is_double
    if hint is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is None:
        return lambda value: isinstance(value, hint)
    if origin in (types.UnionType, typing.Union):
        choices = [_check(one) for one in inner]
        return lambda value: any(fits(value) for fits in choices)
    item = inner[1] if origin is dict else inner[0]
    if item is Any:
        return lambda value: isinstance(value, origin)
    fits = _check(item)
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(map(fits, value.values()))
    return lambda value: isinstance(value, origin) and all(map(fits, value))


def _is_double(value: Any) -> bool:
    """Return whether a value is a number that fits a double. JSON has 1 for 1.0."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (whole and abs(value) <= sys.float_info.max)
