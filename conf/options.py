"""Declare an option as a dataclass field whose metadata says what it accepts, and refuse every
other value."""

import dataclasses
import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_LISTED = 14  # names; of more the nearest are shown
MOST_LISTED_WITHOUT_NEAR = 20
NO_NEAR_NAME = "python launch.py --help shows what there is"
SURELY_MEANT = 0.7  # of difflib's ratio
AS_TYPED = {"True": "true", "False": "false"}  # words of Python's as YAML has them


class Refused(ValueError):
    """A request that cannot be measured. The message names the field, the value and what is
    accepted."""


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
    """Declare a field that accepts `words`, numbers from `least` to `most`, or the word auto.

    `whole`: the number is whole, which the type of a field with `auto`, Any, cannot say.
    """
    metadata = {"help": help, "words": words, "least": least, "most": most}
    metadata |= {"auto": auto, "whole": whole}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def accepted(metadata: Mapping[str, Any]) -> str:
    """Return what an option accepts, for a sentence: 'auto or eager', 'an integer from 1 to 64'."""
    words = [AS_TYPED.get(str(word), str(word)) for word in metadata.get("words") or ()]
    if metadata.get("auto") and "auto" not in words:
        words.insert(0, "auto")
    bounds = []
    for side in ("least", "most"):
        bound = metadata.get(side)
        if bound is not None:
            bounds.append(f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}")
    if bounds:
        kind = "an integer" if metadata.get("whole") else "a number"
        if bounds == ["0", "1"] and metadata.get("whole"):
            words.append("0 or 1")
        elif len(bounds) == 2:
            words.append(f"{kind} from {bounds[0]} to {bounds[1]}")
        elif metadata.get("most") is None:
            words.append(f"{kind} of at least {bounds[0]}")
        else:
            words.append(f"{kind} of at most {bounds[0]}")
        if metadata.get("several"):
            words.append("a list of them")
    if words == ["auto"]:
        return ""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def check(name: str, value: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a value outside what its field's metadata accepts; None (untouched) passes."""
    words = metadata.get("words") or ()
    least, most = metadata.get("least"), metadata.get("most")
    if value is None or str(value) in words or (metadata.get("auto") and value == "auto"):
        return
    if least is None and most is None:
        if not words:
            return
        hint = ""
        for word in words:
            if str(word).lower() == str(value).lower():
                hint = f" (case matters: write {word})"
                break
        typed = AS_TYPED.get(str(value), value)
        raise Refused(f"{name}={typed}: expected {accepted(metadata)}{hint}")
    low, high = -math.inf, math.inf
    if least is not None:
        low = least
    if most is not None:
        high = most
    is_list = metadata.get("several") and isinstance(value, list) and value
    for number in value if is_list else [value]:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and not math.isfinite(number):
            raise Refused(f"{name}={value}: not finite; expected {accepted(metadata)}")
        if not is_number or not low <= number <= high or (metadata.get("whole") and number % 1):
            raise Refused(f"{name}={value}: expected {accepted(metadata)}")


def check_fields(prefix: str, config: Any) -> None:
    """Check every field of a dataclass instance, and of those inside it. Raises Refused."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_fields(f"{prefix}{field.name}.", value)
        elif isinstance(value, list) and not all(isinstance(member, str) for member in value):
            raise Refused(f"{prefix}{field.name}={to_text(value)}: expected a list, [one,two]")
        elif value is None and field.type is Any and field.metadata:
            raise Refused(f"{prefix}{field.name}=null: expected {accepted(metadata_of(field))}")
        else:
            check(f"{prefix}{field.name}", value, metadata_of(field))


def check_names(prefix: str, config: Any, outermost: Sequence[str] = ()) -> None:
    """Refuse attributes that are no fields of a dataclass instance: Hydra's `+name=value`.

    `outermost` are the fields of the instance that all others are inside.
    """
    names = [field.name for field in dataclasses.fields(config)]
    outermost = outermost or names
    for name, value in vars(config).items():
        if name not in names:
            while isinstance(value, dict) and len(value) == 1:
                [(below, value)] = value.items()
                name += f".{below}"
            raise Refused(unknown_option(prefix[:-1], name, value, names, outermost))
        if dataclasses.is_dataclass(value):
            check_names(f"{prefix}{name}.", value, outermost)


def metadata_of(field: "dataclasses.Field[Any]") -> Mapping[str, Any]:
    """Return a field's metadata, with `whole` where its type says so."""
    is_whole = field.metadata.get("whole") or field.type in (int, int | None)
    return {**field.metadata, "whole": is_whole}


def expand_path(name: str, typed: str) -> Path:
    """Return the absolute path that an option names, with the home folder for `~`."""
    try:
        return Path(typed).expanduser().absolute()
    except RuntimeError:  # no such user, or one without a name and HOME, as containers start them
        raise Refused(
            f"{name}={typed}: the home folder is not known; expected a path without ~"
        ) from None


def to_text(value: Any) -> str:
    """Return equal text for equal values, as YAML has them: true, null, 0.5."""
    if isinstance(value, str):
        return value
    if type(value) in (int, float):
        return repr(value)
    return json.dumps(value, sort_keys=True, default=str)


def unknown_option(
    where: str, name: str, value: Any, names: Sequence[str], outermost: Collection[str] = ()
) -> str:
    """Return the sentence for an option that a group of options (`where`) lacks.

    `outermost` are the options outside all groups.
    """
    prefix, group = "", "option"
    if where:
        prefix, group = f"{where.partition('=')[0]}.", f"option of {where}"
    near = nearest(name, names)
    expected = "it has no options" if [*names] == ["name"] else expected_name(name, names)
    if near in names:
        expected = f"did you mean {prefix}{near}={value}?"
    if where and name in outermost:
        expected = f"write {name}={value}"
    return f"{prefix}{name}={value}: unknown {group}; {expected}"


def expected_name(word: str, names: Sequence[str]) -> str:
    """Return what was expected for a name that is unknown: all names if few, else the nearest."""
    near = nearest(word, names)
    if len(names) > MOST_LISTED and (near or len(names) > MOST_LISTED_WITHOUT_NEAR):
        return suggestion(word, names)
    hint = f" (did you mean {near}?)" if {*near.split(" or ")} <= {*names} else ""
    return f"expected one of: {', '.join(names)}{hint}"


def nearest(word: str, names: Iterable[str], sure: float = SURELY_MEANT) -> str:
    """Return the names surely meant, else up to three near ones: 'gpus', 'a, b or c', ''."""
    near = difflib.get_close_matches(word, {*names}, n=3, cutoff=0.45)
    ratios = [difflib.SequenceMatcher(None, each, word).ratio() for each in near]
    if near and ratios[0] > sure:
        near = sorted(near[: ratios.count(ratios[0])])
    return " or ".join(filter(None, [", ".join(near[:-1]), *near[-1:]]))


def suggestion(word: str, names: Iterable[str], sure: float = SURELY_MEANT) -> str:
    """Return 'did you mean gpus?', of up to three near names, or where all names are shown."""
    near = nearest(word, names, sure)
    return f"did you mean {near}?" if near else NO_NEAR_NAME
