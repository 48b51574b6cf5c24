"""Errors of a request as one line that names the field, the value and what is accepted."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.command_line import GROUPS, ROOT
from conf.gpus import FORMS
from conf.groups import RULES
from conf.options import Refused, accepted, closest, described
from conf.schema import Config

KINDS: dict[Any, str] = {bool: "true or false", str: "a text", dict: "a mapping, {key: value}"}


def one_line(text: str) -> str:
    """Text for a terminal: control characters as escapes, and the middle of an endless value left out."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if len(shown) <= 4000 else f"{shown[:1000]} … {shown[-2000:]}"


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """The sentence for an error of a request; `arguments` are the overrides as Hydra read them."""
    if isinstance(error, Refused):
        return str(error)
    text = str(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, OverrideParseException):
        key = error.override.partition("=")[0]
        return f"{error.override}: not in Hydra's grammar; put a text with special characters in quotes, {key}=\"'…'\""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: accepted are {', '.join(error.options)}{closest(choice, error.options)}"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return _unknown(unknown[1], cause, arguments)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        if isinstance(cause, MissingMandatoryValue):
            group = cause.full_key.removesuffix(".name")
            choices = (
                f"{group}={'|'.join(_choices(group))}" if group in GROUPS else _accepts(cause.full_key) or "a value"
            )
            return f"{_typed(cause.full_key, arguments)}: has no value; accepted is {choices}"
        return f"{_typed(cause.full_key, arguments)}: accepted is {_accepts(cause.full_key) or 'another type'}"
    if ambiguous := re.search(r"Ambiguous value for argument '(.*)'", text):
        key = ambiguous[1].partition("=")[0]
        one = f"; one text with commas is {key}=\"'…'\"" if key.startswith("nccl.") else ""
        return f"{ambiguous[1]}: several values are a sweep; add -m{one}"
    if "Config group override must be" in text:
        for argument in arguments:
            group, _, choice = argument.lstrip("+").partition("=")
            if group in GROUPS and choice not in _choices(group):
                return f"{argument}: accepted are {', '.join(_choices(group))}"
    if composed := re.search(r"In '([^']*)': \w+ raised while composing config:\n(.*)\n\s*full_key: ?(\S*)", text):
        return _in_file(*composed.groups())
    if group_missing := re.search(r"Could not find '([^']+)'|In '[^']*': (.*)", text):
        return next(part for part in group_missing.groups() if part).split("\n")[0] + ": no such group or choice"
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line)


def _typed(key: str, arguments: Sequence[str]) -> str:
    """The argument that gave a key its value, or the key."""
    found = next((a for a in reversed(arguments) if a.lstrip("+~").partition("=")[0] == key), key)
    return found.lstrip("+")


def _in_file(name: str, said: str, key: str) -> str:
    """What is wrong in a YAML file that Hydra composes, and with which key, where OmegaConf knows one."""
    accepts = _accepts(key) if key else ""
    what = said.strip().rstrip(".") + (f"; accepted is {accepts}" if accepts else "")
    return f"{key + ' in ' if key else ''}{name}.yaml: {what}"


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / group).glob("*.yaml"))


def _unknown(key: str, cause: BaseException | None, arguments: Sequence[str]) -> str:
    """An override of a key that does not exist, with the keys that do exist beside it."""
    typed = next((argument for argument in arguments if argument.lstrip("+~").startswith(key)), key)
    if key in GROUPS:  # one that has no default is appended
        choices, name = _choices(key), typed.partition("=")[2]
        return f"{typed}: accepted is +{key}={name if name in choices else '|'.join(choices)}"
    full_key = getattr(cause, "full_key", None) or key
    parent, _, name = full_key.rpartition(".")
    beside: list[str] = []
    node: Any = getattr(cause, "parent_node", None)
    if node is not None:
        beside = [str(child) for child in node if child not in (*RULES, "hydra")]
    elif kind := getattr(cause, "object_type", None):
        beside = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    if not beside:
        return f"{typed}: {parent} has no option {name}; a new one is added with +{full_key}=value"
    where = f"options of {parent} are" if parent else "options are"
    return f"{typed}: unknown; {where} {', '.join(beside)}{closest(name, beside)}"


def _accepts(key: str) -> str:
    """What the schema says that a key accepts, or ''."""
    node: Any = Config
    field = None
    for part in key.split("."):
        if get_origin(node) is dict:
            return KINDS.get(get_args(node)[1], "")
        fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
        field = next((field for field in fields if field.name == part), None)
        if field is None:
            return ""
        node = field.type
    assert field is not None
    if key == "gpus":
        return f"a list of GPU ids; {FORMS}"
    if dataclasses.is_dataclass(node):
        return f"a choice or options of it: {', '.join(field.name for field in dataclasses.fields(node))}"
    return accepted(described(field)) or KINDS.get(get_origin(node) or node, "")
