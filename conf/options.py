"""Declare an option as a dataclass field whose metadata says what it accepts, and refuse every other value."""

import dataclasses
import difflib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

AS_TYPED = {"True": "true", "False": "false"}  # words of Python's as YAML has them


class Refused(ValueError):
    """A request that cannot be measured. The message names the field, the value and what is accepted."""


def option(
    default: Any,
    help: str,
    *,
    words: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    auto: bool = False,
    whole: bool = False,
) -> Any:
    """Declare a field. `words` are accepted values; `least` and `most` bound a number; `auto` accepts the word auto.

    `whole` says that a number is whole where the type cannot say it: a field with `auto` is declared Any.
    """
    metadata = {
        "help": help,
        "words": words,
        "least": least,
        "most": most,
        "auto": auto,
        "whole": whole,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def accepted(metadata: Mapping[str, Any]) -> str:
    """Return what an option accepts, as the end of a sentence: 'auto or eager', 'a whole number of at least 1'; or ''."""
    least, most = metadata.get("least"), metadata.get("most")
    words = [AS_TYPED.get(str(word), str(word)) for word in metadata.get("words") or ()]
    if metadata.get("auto") and "auto" not in words:
        words.insert(0, "auto")
    if least is not None or most is not None:
        bounds = [f"at least {_short(least)}"] if least is not None else []
        bounds += [f"at most {_short(most)}"] if most is not None else []
        kind = "a whole number" if metadata.get("whole") else "a number"
        words.append(kind + (" of " + " and ".join(bounds) if bounds else ""))
    if words == ["auto"]:
        return ""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _short(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a value outside what its field's metadata accepts; None (untouched) passes.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    words, least, most, auto = (metadata.get(key) for key in ("words", "least", "most", "auto"))
    if value is None or (auto and value == "auto") or (words and str(value) in words):
        return
    has_bounds = least is not None or most is not None
    if words and not has_bounds:
        close = next((word for word in words if str(word).lower() == str(value).lower()), None)
        hint = f" (case matters: write {close})" if close else ""
        raise Refused(
            f"{name}={AS_TYPED.get(str(value), value)}: accepted are {accepted(metadata)}{hint}"
        )
    if has_bounds and not _fits(value, metadata):
        raise Refused(f"{name}={value}: accepted is {accepted(metadata)}")


def _fits(value: Any, metadata: Mapping[str, Any]) -> bool:
    """Return whether a value is a number inside the bounds, and whole where it must be."""
    least, most = metadata.get("least"), metadata.get("most")
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value)
        <= sys.float_info.max  # neither NaN nor infinite, nor a whole number that no double holds
        and (least is None or value >= least)
        and (most is None or value <= most)
        and not (metadata.get("whole") and value != int(value))
    )


def expand_path(name: str, typed: str) -> Path:
    """Return the absolute path that an option names, with the home folder for `~`. Raises Refused: nobody knows that home."""
    try:
        return Path(typed).expanduser().absolute()
    except (
        RuntimeError
    ):  # no such user; or a user without a name, as containers start them, and without HOME
        raise Refused(
            f"{name}={typed}: the home folder is not known; accepted is a path without ~"
        ) from None


def to_text(value: Any) -> str:
    """Return equal text for equal values, as YAML has them: true, null, 0.5."""
    if type(value) in (int, float):
        return repr(value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def check_fields(prefix: str, config: Any) -> None:
    """Check every field of a dataclass instance, and of those inside it. Raises Refused."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(f"{prefix}{field.name}.", value)
        elif value is None and field.type is Any and field.metadata:
            raise Refused(f"{prefix}{field.name}=null: accepted is {accepted(metadata_of(field))}")
        else:
            check(f"{prefix}{field.name}", value, metadata_of(field))


def check_names(prefix: str, config: Any) -> None:
    """Refuse attributes that are no fields of a dataclass instance, or of those inside it: Hydra's `+name=value` adds them."""
    names = [field.name for field in dataclasses.fields(config)]
    for name, value in vars(config).items():
        if name not in names:
            where = f"options of {prefix[:-1]}" if prefix else "options"
            raise Refused(
                f"{prefix}{name}={value}: unknown; {where} are {', '.join(names)}{closest(name, names)}"
            )
        if dataclasses.is_dataclass(value):
            check_names(f"{prefix}{name}.", value)


def metadata_of(field: "dataclasses.Field[Any]") -> Mapping[str, Any]:
    """Return a field's metadata, with `whole` where its type says so."""
    return {
        **field.metadata,
        "whole": field.metadata.get("whole") or field.type in (int, int | None),
    }


def closest(word: str, candidates: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for a near miss, else ''."""
    near = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
