"""One way to declare a knob and one way to refuse its value: a dataclass field with what it accepts in its metadata."""

import dataclasses
from collections.abc import Iterable
from typing import Any


class Refused(ValueError):
    """A request that cannot be measured as it stands. The message names the field, the value and what is accepted."""


def knob(
    default: Any,
    help: str,
    *,
    words: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    auto: bool = False,
) -> Any:
    """Declare a field: `words` are its accepted values, `least` and `most` bound a number, `auto` allows the word auto."""
    metadata = {"help": help, "words": words, "least": least, "most": most, "auto": auto}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def accepted(words: tuple[str, ...], least: float | None, most: float | None, auto: bool = False) -> str:
    """What a knob accepts, as the end of a sentence: 'auto, eager or compile', 'a number of at least 1'."""
    if words:
        return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
    bounds = [f"at least {least:g}"] if least is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    return ("auto or " if auto else "") + "a number" + (" of " + " and ".join(bounds) if bounds else "")


def check(name: str, value: Any, metadata: Any) -> None:
    """Refuse a value outside what its field's metadata accepts; None (not asked) passes.

    Raises:
        Refused: names the field, the value and what is accepted.
    """
    words, least, most, auto = (metadata.get(key) for key in ("words", "least", "most", "auto"))
    if value is None or (auto and value == "auto"):
        return
    if words:
        if str(value) not in words:
            close = next((word for word in words if word.lower() == str(value).lower()), None)
            hint = f" (case matters: write {close})" if close else ""
            raise Refused(f"{name}={value}: accepted are {accepted(words, None, None)}{hint}")
    elif least is not None or most is not None or auto:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refused(f"{name}={value}: accepted is {accepted((), least, most, auto)}")
        if not ((least is None or value >= least) and (most is None or value <= most)):  # also refuses NaN
            raise Refused(f"{name}={value}: accepted is {accepted((), least, most, auto)}")


def check_fields(prefix: str, config: Any) -> None:
    """Check every declared field of a dataclass instance, nested dataclasses too. Raises Refused."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(f"{prefix}{field.name}.", value)
        else:
            check(f"{prefix}{field.name}", value, field.metadata)


def closest(word: str, candidates: Iterable[str]) -> str:
    """' (did you mean X?)' for a near miss, else nothing."""
    import difflib

    near = difflib.get_close_matches(word, list(candidates), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
