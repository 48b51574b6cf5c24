"""Errors of a request as one line that names the field, the value and what is accepted."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from conf import subsets
from conf.command_line import GROUPS
from conf.groups import RULES, WITH_RULES, choices, no_yaml
from conf.nccl import unknown_setting
from conf.options import Refused, accepted, closest, metadata_of
from conf.schema import Config

# What a field accepts by its type.
SETS = {"gpus": f"GPU ids; {subsets.GPU_FORMS}", "nodes": f"hosts; {subsets.NODE_FORMS}"}
KINDS: dict[Any, str] = {
    bool: "true or false",
    str: "a text",
    dict: "a mapping, {key: value}",
    list: "a list, [one,two]",
}


# Texts of Hydra 1.3 and OmegaConf 2.3 where their exceptions have no attribute for what they name.
UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(.*)'")
WRONG_VALUE = re.compile(r"Value '(.*?)' ")
NO_GROUP_CHOICE = "Config group override must be"
WRONG_FILE = re.compile(
    r"In '([^']*)': \w+ raised while composing config:\n(.*)\n\s*full_key: ?(\S*)"
)
NOT_A_KEY = re.compile(r"Key '[^']*' not in '\w+'")
NO_SUCH_FILE = re.compile(r"Could not find '([^']+)'|In '[^']*': (.*)")


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """Return the sentence for an error of a request; `arguments` are those of launch.py."""
    if isinstance(error, Refused):
        return str(error)
    for explanation in EXPLANATIONS:
        if sentence := explanation(error, arguments):
            return sentence
    return " ".join(str(error).split())


def _not_in_grammar(error: Exception, arguments: Sequence[str]) -> str | None:
    if not isinstance(error, OverrideParseException):
        return None
    key, _, values = error.override.partition("=")
    if "" in map(str.strip, values.split(",")) and "'" not in values and '"' not in values:
        return f"{error.override}: a value is missing beside a comma; write {key}=A,B"
    return f"{error.override}: not in Hydra's grammar; put a text with special characters in quotes, {key}=\"'…'\""


def _not_yaml(error: Exception, arguments: Sequence[str]) -> str | None:
    return no_yaml(error, "a file of --config-dir") if isinstance(error, YAMLError) else None


def _no_such_choice(error: Exception, arguments: Sequence[str]) -> str | None:
    if not (isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file):
        return None
    group, _, choice = error.missing_cfg_file.rpartition("/")
    return (
        f"{group}={choice}: accepted are {', '.join(error.options)}{closest(choice, error.options)}"
    )


def _unknown_key(error: Exception, arguments: Sequence[str]) -> str | None:
    unknown = UNKNOWN_KEY.search(str(error))
    return _unknown(unknown[1], _cause(error), arguments) if unknown else None


def _wrong_value(error: Exception, arguments: Sequence[str]) -> str | None:
    cause = _cause(error)
    if not isinstance(cause, OmegaConfBaseException) or not cause.full_key:
        return None
    key = cause.full_key
    if not isinstance(cause, MissingMandatoryValue):
        found = WRONG_VALUE.search(str(cause))
        return f"{_typed(key, arguments, found[1] if found else '')}: accepted is {_accepts(key) or 'another type'}"
    group = key.removesuffix(".name")
    values = (
        f"{group}={'|'.join(choices(group))}" if group in GROUPS else _accepts(key) or "a value"
    )
    return f"{_typed(key, arguments)}: has no value; accepted is {values}"


def _several_values(error: Exception, arguments: Sequence[str]) -> str | None:
    ambiguous = SEVERAL_VALUES.search(str(error))
    if not ambiguous:
        return None
    key = ambiguous[1].partition("=")[0]
    one = f"; one text with commas is {key}=\"'…'\"" if key.startswith("nccl.") else ""
    return f"{ambiguous[1]}: several values are a sweep; add -m{one}"


def _no_choice_of_group(error: Exception, arguments: Sequence[str]) -> str | None:
    if NO_GROUP_CHOICE not in str(error):
        return None
    for argument in arguments:
        group, _, choice = argument.lstrip("+").partition("=")
        if group in GROUPS and choice not in choices(group):
            return f"{argument}: accepted are {', '.join(choices(group))}"
    return None


def _wrong_file(error: Exception, arguments: Sequence[str]) -> str | None:
    composed = WRONG_FILE.search(str(error))
    return _in_file(*composed.groups()) if composed else None


def _no_such_file(error: Exception, arguments: Sequence[str]) -> str | None:
    missing = NO_SUCH_FILE.search(str(error))
    return (
        f"{(missing[1] or missing[2]).splitlines()[0]}: no such group or choice"
        if missing
        else None
    )


def _too_deep(error: Exception, arguments: Sequence[str]) -> str | None:
    deep = isinstance(error, RecursionError)
    return (
        "an argument has too many brackets inside each other; accepted is option=value"
        if deep
        else None
    )


# The first that applies gives the sentence.
EXPLANATIONS = (
    _too_deep,
    _not_yaml,
    _not_in_grammar,
    _no_such_choice,
    _unknown_key,
    _wrong_value,
    _several_values,
    _no_choice_of_group,
    _wrong_file,
    _no_such_file,
)


def _cause(error: Exception) -> BaseException | None:
    """Return OmegaConf's exception, which knows the key: the error itself, or what Hydra raised it from."""
    return error if isinstance(error, OmegaConfBaseException) else error.__cause__


def _typed(key: str, arguments: Sequence[str], value: str = "") -> str:
    """Return the argument that gave a key its value, or the key. Of several it is that with `value`, else the last."""
    typed = [one.lstrip("+") for one in arguments if one.lstrip("+~").partition("=")[0] == key]
    return next(
        (one for one in typed if one.partition("=")[2] == value), typed[-1] if typed else key
    )


def _in_file(name: str, said: str, key: str) -> str:
    """Return what is wrong in a YAML file that Hydra composes, with the key where OmegaConf knows it."""
    accepts = _accepts(key) if key else ""
    if NOT_A_KEY.fullmatch(said.strip()) and (known := _options_of(key.rpartition(".")[0])):
        return f"{key} in {name}.yaml: unknown; options here are {', '.join(known)}{closest(key.split('.')[-1], known)}"
    what = said.strip().rstrip(".") + (f"; accepted is {accepts}" if accepts else "")
    return f"{key + ' in ' if key else ''}{name}.yaml: {what}"


def _unknown(key: str, cause: BaseException | None, arguments: Sequence[str]) -> str:
    """Return the sentence for an override of a key that does not exist, with the keys that exist in its place."""
    typed = next((argument for argument in arguments if argument.lstrip("+~").startswith(key)), key)
    if key in GROUPS:  # one that has no default is appended
        choice = typed.partition("=")[2]
        return f"{typed}: accepted is +{key}={choice if choice in choices(key) else '|'.join(choices(key))}"
    full_key = getattr(cause, "full_key", None) or key
    parent, _, name = full_key.rpartition(".")
    if parent == "nccl":
        return unknown_setting(name, typed.partition("=")[2])
    known: list[str] = []
    node: Any = getattr(cause, "parent_node", None)
    if node is not None:
        known = [str(child) for child in node if child not in (*RULES, "hydra")]
        parent += f"={node['name']}" if parent in WITH_RULES else ""
    elif kind := getattr(cause, "object_type", None):
        known = (
            [field.name for field in dataclasses.fields(kind)]
            if dataclasses.is_dataclass(kind)
            else []
        )
    if not known:
        return f"{typed}: {parent} has no option {name}; a new one is added with +{full_key}=value"
    where = f"options of {parent} are" if parent else "options are"
    return f"{typed}: unknown; {where} {', '.join(known)}{closest(name, known)}"


def _options_of(key: str) -> list[str]:
    """Return the names of the options that the schema has at a key, in a group of options; none elsewhere."""
    node: Any = Config
    for part in filter(None, key.split(".")):
        fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
        node = next((field.type for field in fields if field.name == part), None)
    return (
        [field.name for field in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
    )


def _accepts(key: str) -> str:
    """Return what the schema says that a key accepts, or ''."""
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
    if key in SETS:
        return f"a list of {SETS[key]}"
    if dataclasses.is_dataclass(node):
        return f"a choice or options of it: {', '.join(field.name for field in dataclasses.fields(node))}"
    return accepted(metadata_of(field)) or KINDS.get(get_origin(node) or node, "")
