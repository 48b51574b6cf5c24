"""Errors of a request as one line that names the field, the value and what is accepted."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from analysis.text import redact
from conf import subsets
from conf.command_line import GROUPS, others_word
from conf.groups import RULES, WITH_RULES, choice, choices, no_yaml
from conf.nccl import setting_of_variable, unknown_setting
from conf.options import Refused, accepted, expected_name, metadata_of, unknown_option
from conf.schema import Config

# What a field accepts by its type.
SETS = {"gpus": f"GPU ids; {subsets.GPU_FORMS}", "nodes": f"hosts; {subsets.NODE_FORMS}"}
KINDS: dict[Any, str] = {
    bool: "true or false",
    str: "text",
    dict: "a mapping, {key: value}",
    list: "a list, [one,two]",
}
LONGEST_SHOWN = 80  # characters of an argument
LONG_WORD = re.compile(rf"(\S{{{LONGEST_SHOWN}}})\S{{{LONGEST_SHOWN},}}")
# Texts of Hydra 1.3 and OmegaConf 2.3 where their exceptions have no attribute for what they name.
UNKNOWN_KEY = re.compile(r"Could not override '([^']+)'")
SEVERAL_VALUES = re.compile(r"Ambiguous value for argument '(.*)'")
WRONG_VALUE = re.compile(r"Value '(.*?)' ")
THERE_ALREADY = re.compile(r"Either remove \+ prefix: '(.*)'")
NO_GROUP_CHOICE = "Config group override must be"
WRONG_FILE = re.compile(
    r"In '([^']*)': \w+ raised while composing config:\n(.*)\n\s*full_key: ?(\S*)"
)
NOT_A_KEY = re.compile(r"Key '[^']*' not in '\w+'")
SPECIAL = re.compile(r"[^\w\s/.+%@?:*|,\[\]{}()$\"'~-]", re.ASCII)  # what Hydra has in quotes only
NOT_CLOSED = "has a quote or bracket that is not closed"
NO_SUCH_FILE = re.compile(r"Could not find '([^']+)'|In '[^']*': (.*)")


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """Return the sentence for an error of a request; `arguments` are those of launch.py.

    It is one line without secrets. What was typed is not repeated at length, or what is expected
    would drown.
    """
    sentence = _sentence(error, arguments)
    for argument in arguments:
        for text in (argument, argument.partition("=")[2]):
            if len(text) > LONGEST_SHOWN:
                sentence = sentence.replace(text, f"{text[:LONGEST_SHOWN]}…")
    return redact(LONG_WORD.sub(r"\1…", sentence))


def _sentence(error: Exception, arguments: Sequence[str]) -> str:
    text = str(error)
    # OmegaConf's exception knows the key: the error itself, or what Hydra raised it from.
    cause = error.__cause__
    if isinstance(error, OmegaConfBaseException):
        cause = error
    unknown = UNKNOWN_KEY.search(text)
    ambiguous = SEVERAL_VALUES.search(text)
    file = WRONG_FILE.search(text)
    missing = NO_SUCH_FILE.search(text)
    there = THERE_ALREADY.search(text)
    if isinstance(error, Refused):
        return text
    if isinstance(error, RecursionError):
        return "an argument has too many brackets inside each other; expected option=value"
    if isinstance(error, YAMLError):
        return no_yaml(error, "a file of --config-dir")
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        if "" in [part.strip() for part in value.split(",")] and not {"'", '"'} & set(value):
            return f"{error.override}: a value is missing next to a comma; write -m {key}=A,B"
        special = SPECIAL.search(value)
        what = f"{special[0]} is a special character" if special else NOT_CLOSED
        return f"{error.override}: {what}; put such a text in quotes: {key}=\"'…'\""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        meant = others_word(f"{group}={name}")
        for other in GROUPS:
            if name in choices(other):
                meant = meant or f"write {other}={name}"
        if name.lower() in choices(group):
            meant = f"write {group}={name.lower()}"
        if "*" in name:
            meant = f"write -m '{group}=glob({name.removeprefix('glob:')})'"
        own = ""
        if group in ("model", "data"):
            own = "; trainers/OWN.md says how to use your own"
        return f"{group}={name}: {meant or expected_name(name, error.options) + own}"
    if unknown:
        return _unknown_key(unknown[1], cause, arguments)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _wrong_value(cause, arguments)
    if ambiguous:
        key = ambiguous[1].lstrip("+").partition("=")[0]
        if key.partition(".")[0] not in GROUPS and _field_at(key) is None:
            return _unknown_key(key, None, arguments)
        hint = f"; one text with commas is {key}=\"'…'\"" if key.startswith("nccl.") else ""
        typed = [each for each in arguments if each.startswith(f"{key}=")]
        return f"{[*typed, ambiguous[1]][0]}: several values are a sweep; add -m{hint}"
    if there:
        return f"+{there[1]}: leave out the +; write {there[1]}"
    for argument in arguments if NO_GROUP_CHOICE in text else ():
        group, _, choice = argument.lstrip("+").partition("=")
        if group in GROUPS and choice not in choices(group):
            return f"{argument}: expected {', '.join(choices(group))}"
    if file:
        return _wrong_file(*file.groups())
    if missing:
        return f"{(missing[1] or missing[2]).splitlines()[0]}: no such group or choice"
    return " ".join(text.split())


def _wrong_value(cause: OmegaConfBaseException, arguments: Sequence[str]) -> str:
    key = str(cause.full_key)
    typed = [text for text in arguments if text.lstrip("+~").partition("=")[0] == key]
    argument = typed[-1] if typed else key
    accepts = _accepts(key)
    if isinstance(cause, MissingMandatoryValue):
        group = key.removesuffix(".name")
        if group in GROUPS:
            accepts = f"{group}=NAME, one of: {', '.join(choices(group))}"
        return f"{argument}: has no value; expected {accepts or 'a value'}"
    value = WRONG_VALUE.search(str(cause))
    for text in typed:  # of several arguments the one with this value
        if value and text.partition("=")[2] == value[1]:
            argument = text
            break
    return f"{argument}: expected {accepts or 'another type'}"


def _wrong_file(name: str, problem: str, key: str) -> str:
    problem = problem.strip()
    names = _names_at(key.rpartition(".")[0])
    if NOT_A_KEY.fullmatch(problem) and names:
        near = expected_name(key.split(".")[-1], names)
        return f"{key} in {name}.yaml: unknown option; {near}"
    sentence = f"{name}.yaml: {problem.rstrip('.')}"
    if not key:
        return sentence
    accepts = _accepts(key)
    return f"{key} in {sentence}; expected {accepts}" if accepts else f"{key} in {sentence}"


def _unknown_key(key: str, cause: BaseException | None, arguments: Sequence[str]) -> str:
    argument = key
    for text in reversed(arguments):  # the first that has the key, or one below it
        if f"{text.lstrip('+~').partition('=')[0]}.".startswith(f"{key}."):
            argument = text
    typed, _, value = argument.lstrip("+~").partition("=")
    if key in GROUPS:  # one that has no default is appended
        known = ", ".join(choices(key))
        name = value if value in choices(key) else f"NAME, one of: {known}"
        return f"{argument}: write +{key}={name}"
    full_key = getattr(cause, "full_key", None) or key
    parent, _, name = full_key.rpartition(".")
    if parent == "nccl":
        return unknown_setting(name, value)
    if name.upper().startswith("NCCL_"):
        return f"{argument}: {setting_of_variable(name.upper(), value)}"
    names = []
    node: Any = getattr(cause, "parent_node", None)
    if node is not None:
        names = [str(child) for child in node if child not in (*RULES, "hydra")]
        if parent in WITH_RULES and "name" in names:
            parent += f"={node['name']}"
    else:
        names = _names_at(parent)
    if not names:
        return (
            f"{argument}: {parent} has no option {name}; a new one is added with +{full_key}=value"
        )
    meant = others_word(typed.rpartition(".")[2], value)
    if not parent:
        group = _group_with(name)
        if group and not meant:
            meant = f"write {group}.{argument}"
        name = typed
    if meant:
        return f"{argument}: unknown option; {meant}"
    return unknown_option(parent, name, value, names, _names_at(""))


def _group_with(option: str) -> str:
    for group in WITH_RULES:
        for name in choices(group):
            with contextlib.suppress(Refused, YAMLError):  # a broken file of the user's own
                if option in choice(group, name).options:
                    return group
    return ""


def _field_at(key: str) -> "dataclasses.Field[Any] | None":
    """Return the field that the schema has at a key; None for the schema itself, or without one."""
    node: Any = Config
    field = None
    for part in filter(None, key.split(".")):
        if not dataclasses.is_dataclass(node):
            return None
        field = {option.name: option for option in dataclasses.fields(node)}.get(part)
        node = field.type if field else None
    return field


def _names_at(key: str) -> list[str]:
    """Return the names of the options that the schema has in a group of options; none elsewhere."""
    field = _field_at(key)
    kind: Any = field.type if field else Config
    if (key and field is None) or not dataclasses.is_dataclass(kind):
        return []
    return [option.name for option in dataclasses.fields(kind)]


def _accepts(key: str) -> str:
    parent, field = _field_at(key.rpartition(".")[0]), _field_at(key)
    if parent is not None and get_origin(parent.type) is dict:
        return KINDS.get(get_args(parent.type)[1], "")
    if field is None:
        return ""
    if key in SETS:
        return f"a list of {SETS[key]}"
    if dataclasses.is_dataclass(field.type):
        if key in GROUPS:
            return f"a choice or options of it: {', '.join(_names_at(key))}"
        names = [f"{key}.{name}" for name in _names_at(key)]
        return f"one of its options: {', '.join(names)}"
    kind: Any = get_origin(field.type) or field.type
    return accepted(metadata_of(field)) or KINDS.get(kind, "")
