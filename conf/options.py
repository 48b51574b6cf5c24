"""One way to declare a option and one way to refuse its value: a dataclass field with what it accepts in its metadata."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class Refused(ValueError):
    """A request that cannot be measured as it stands. The message names the field, the value and what is accepted."""


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
    """Declare a field: `words` are its accepted values, `least` and `most` bound a number, `auto` allows the word auto.

    `whole` is for a number that is declared Any because of `auto`; a field declared int is whole by its type.
    """
    metadata = {"help": help, "words": words, "least": least, "most": most, "auto": auto, "whole": whole}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def accepted(metadata: Mapping[str, Any]) -> str:
    """What a option accepts, as the end of a sentence: 'auto, eager or compile', 'a whole number of at least 1'; or ''."""
    words, least, most, auto, whole = (metadata.get(key) for key in ("words", "least", "most", "auto", "whole"))
    if words:
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else str(words[0])
    if least is None and most is None and not auto:
        return ""
    bounds = [f"at least {_plain(least)}"] if least is not None else []
    bounds += [f"at most {_plain(most)}"] if most is not None else []
    kind = "a whole number" if whole else "a number"
    return ("auto or " if auto else "") + kind + (" of " + " and ".join(bounds) if bounds else "")


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a value outside what its field's metadata accepts; None (not asked) passes.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    words, least, most, auto, whole = (metadata.get(key) for key in ("words", "least", "most", "auto", "whole"))
    if value is None or (auto and value == "auto"):
        return
    if words:
        if str(value) not in words:
            close = next((word for word in words if word.lower() == str(value).lower()), None)
            hint = f" (case matters: write {close})" if close else ""
            raise Refused(f"{name}={value}: accepted are {accepted(metadata)}{hint}")
    elif least is not None or most is not None or auto:
        fits = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (least is None or value >= least)  # NaN fails both
            and (most is None or value <= most)
            and not (whole and value != int(value))
        )
        if not fits:
            raise Refused(f"{name}={value}: accepted is {accepted(metadata)}")


def check_fields(prefix: str, config: Any) -> None:
    """Check every declared field of a dataclass instance, nested dataclasses too. Raises Refused."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(f"{prefix}{field.name}.", value)
        elif value is None and field.type is Any and field.metadata:
            raise Refused(f"{prefix}{field.name}=null: accepted is {accepted(described(field))}")
        else:
            check(f"{prefix}{field.name}", value, described(field))


def check_names(prefix: str, config: Any) -> None:
    """Refuse what a dataclass instance has beyond its fields, nested ones too: Hydra's `+name=value` adds it."""
    names = [field.name for field in dataclasses.fields(config)]
    for name, value in vars(config).items():
        if name not in names:
            where = f"options of {prefix[:-1]}" if prefix else "options"
            raise Refused(f"{prefix}{name}={value}: unknown; {where} are {', '.join(names)}{closest(name, names)}")
        if dataclasses.is_dataclass(value):
            check_names(f"{prefix}{name}.", value)


def described(field: "dataclasses.Field[Any]") -> Mapping[str, Any]:
    """A field's metadata, with `whole` where its type says so."""
    return {**field.metadata, "whole": field.metadata.get("whole") or field.type in (int, int | None)}


def closest(word: str, candidates: Iterable[str]) -> str:
    """' (did you mean X?)' for a near miss, else nothing."""
    near = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
