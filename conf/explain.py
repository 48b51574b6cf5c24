"""Hydra's and OmegaConf's errors as one sentence that names the field, the value and what is accepted."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from conf.knobs import accepted, closest
from conf.schema import Config


def explain(error: HydraException | OmegaConfBaseException, arguments: Sequence[str]) -> str:
    """One line for an error of composition; `arguments` are the overrides as typed."""
    text = str(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return f"{group}={choice}: accepted are {', '.join(error.options)}{closest(choice, error.options)}"
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return _unknown(unknown[1], cause, arguments)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        typed = next((a for a in arguments if a.lstrip("+").startswith(f"{cause.full_key}=")), f"{cause.full_key}")
        kind = re.search(r"could not be converted to (\w+)", str(cause))
        wanted = _accepts(cause.full_key) or (f"a value of type {kind[1]}" if kind else "another type")
        return f"{typed}: accepted is {wanted}"
    if ambiguous := re.search(r"Ambiguous value for argument '(.*)'", text):
        return f"{ambiguous[1]}: several values are a sweep; add -m"
    if group := re.search(r"Could not find '([^']+)'|In '[^']*': (.*)", text):
        return next(part for part in group.groups() if part).split("\n")[0] + ": no such group or choice"
    return " ".join(line.strip() for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line)


def _unknown(key: str, cause: BaseException | None, arguments: Sequence[str]) -> str:
    """An override of a key that does not exist, with the keys that do exist beside it."""
    typed = next((argument for argument in arguments if argument.startswith(f"{key}=")), key)
    parent, _, name = key.rpartition(".")
    beside: list[str] = []
    node: Any = getattr(cause, "parent_node", None)
    if node is not None:
        beside = [str(child) for child in node if child not in ("accepts", "hydra")]
    elif kind := getattr(cause, "object_type", None):
        beside = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    where = f"options of {parent} are" if parent else "options are"
    return f"{typed}: unknown; {where} {', '.join(beside)}{closest(name, beside)}"


def _accepts(key: str) -> str:
    """What the schema says that a key accepts, or ''."""
    node: Any = Config
    metadata: Any = {}
    for part in key.split("."):
        field = next((f for f in dataclasses.fields(node) if f.name == part), None) if dataclasses.is_dataclass(node) else None
        if field is None:
            return ""
        node, metadata = field.type, field.metadata
    if not metadata:
        return ""
    return accepted(metadata["words"], metadata["least"], metadata["most"], metadata["auto"]) if any(
        metadata[key] for key in ("words", "auto")
    ) or metadata["least"] is not None else ""
