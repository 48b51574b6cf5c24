"""Every option of a request: its key, what it means, what it accepts, its default. Read from the schema and the groups' files."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_origin

from omegaconf import MISSING, OmegaConf

from conf import gpus, groups, nodes
from conf.options import AS_TYPED, accepted, described
from conf.schema import Config
from launch.compose.hydra_errors import KINDS

# A comment behind an option of a YAML file.
_COMMENT = re.compile(r"^(\w+):[^#\n]*\s#\s+(.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Option:
    """One option as a person types it."""

    key: str  # nccl.p2p_level
    meaning: str
    accepts: str  # as the end of a sentence
    default: str
    values: tuple[str, ...] = ()  # the words that it accepts


def options(chosen: Mapping[str, str]) -> Iterator[Option]:
    """Yield every option; `chosen` names the choice of a group where it is not the default. Raises Refused: no such choice."""
    yield from _of(Config, "", {**default_choices(), **chosen})


def options_of(group: str, name: str) -> Iterator[Option]:
    """Yield the options in the YAML file of a choice, with its comments. Raises Refused: there is no such choice."""
    choice = groups.choice(group, name)
    comments = dict(_COMMENT.findall(choice.path.read_text(encoding="utf-8")))
    for option, default in choice.options.items():
        if option != "name":
            limits = choice.limits(option)
            yield _option(
                f"{group}.{option}", comments.get(option, ""), limits, default, type(default)
            )


@functools.cache
def default_choices() -> dict[str, str]:
    """Return the choice of each group in a request that names none, from conf/config.yaml."""
    listed = cast(
        dict[str, Any], OmegaConf.to_container(OmegaConf.load(groups.ROOT / "config.yaml"))
    )["defaults"]
    return {
        group: name for entry in listed if isinstance(entry, dict) for group, name in entry.items()
    }


def about_choice(group: str, name: str) -> str:
    """Return what the first comment in the file of a choice says; empty where it has none."""
    said: list[str] = []
    for line in groups.files(group)[name].read_text(encoding="utf-8").splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#  "):  # the end, or an indented command
            break
        said.append(line.removeprefix("# ").strip())
    return " ".join(said)


def _of(kind: Any, prefix: str, chosen: Mapping[str, str]) -> Iterator[Option]:
    """Yield the options of a dataclass and of those inside it; where a group has files with rules, those of the file."""
    for field in dataclasses.fields(kind):
        key = f"{prefix}{field.name}"
        if key in groups.WITH_RULES:
            yield from options_of(key, chosen[key])
        elif dataclasses.is_dataclass(field.type):
            yield from _of(field.type, f"{key}.", chosen)
        elif (
            field.name != "name" or prefix.rstrip(".") not in default_choices()
        ):  # else `group=NAME` gives it
            yield _of_field(key, field)


def _of_field(key: str, field: "dataclasses.Field[Any]") -> Option:
    limits = described(field)
    meaning = limits.get("help", "")
    if key == "gpus":
        return Option(
            key,
            meaning,
            "one subset, gpus=0,3; several, gpus=0+1,0+3; or a word",
            "all",
            tuple(gpus.WORDS),
        )
    if key == "nodes":
        forms = "one set of hosts, nodes=a,b; several, nodes=a+b,a+c; a number; or a word"
        return Option(key, meaning, forms, "this machine", tuple(nodes.WORDS))
    default = None if field.default is dataclasses.MISSING else field.default
    return _option(key, meaning, limits, default, get_origin(field.type) or field.type)


def _option(key: str, meaning: str, limits: Mapping[str, Any], default: Any, kind: Any) -> Option:
    """Return an option from the metadata that conf.options.check reads, its default and its type."""
    words = [str(word) for word in limits.get("words") or ()]
    words = [AS_TYPED.get(word, word) for word in words]
    if limits.get("auto"):
        words = list(dict.fromkeys(["auto", *words]))
    if kind is bool:
        words = ["true", "false"]
    said = accepted({**limits, "words": words}) or KINDS.get(kind, "")
    if (limits.get("least"), limits.get("most")) == (0, 1) and limits.get(
        "whole"
    ):  # a switch of NCCL's
        said, words = "0 or 1", ["0", "1"]
    return Option(key, meaning, said, _typed(default), tuple(words))


def _typed(default: Any) -> str:
    """Return a default as it is typed."""
    if default == MISSING:
        return ""
    return (
        str(default).lower()
        if isinstance(default, bool)
        else "null"
        if default is None
        else str(default)
    )
