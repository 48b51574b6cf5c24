"""The options of which a sweep has one value for all its cells."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from conf.options import Refused
from conf.schema import Config

SHARED = (
    "study",
    "output_dir",
    "tracking",
    "engine",
    "hosts",
    "validity",
    "device",
    "repeats",
    "noise_pairs",
    "resume",
    "wait",
    "dry_run",
    "topology",
    "tuning_pass",
    "sample_gpus",
    "predict",
    "report",
)


def refuse_several_values(configs: Sequence[Config], overrides: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep over an option that all its cells share; `overrides` are those of each cell. Raises Refused."""
    for name in SHARED:
        differing = _differing(name, [getattr(config, name) for config in configs])
        if differing:
            key, values = differing
            pairs = [text.partition("=") for texts in overrides for text in texts]
            # tracking=mlflow,none differs in tracking.enabled, and +experiment=a,b in study
            for option, one in ((key, key), (name, name), ("+experiment", key)):
                typed = dict.fromkeys(value for left, _, value in pairs if left == option)
                if len(typed) > 1:
                    raise Refused(
                        f"{option}={','.join(typed)}: a sweep has one {one}; run one sweep for each"
                    )
            shown = dict.fromkeys(map(str, values))
            raise Refused(f"{key}={','.join(shown)}: a sweep has one {key}; run one sweep for each")


def _differing(key: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]] | None:
    """Return the first option in which values differ, with its values: of a group of options the one inside it."""
    if all(value == values[0] for value in values):
        return None
    if not dataclasses.is_dataclass(values[0]):
        return key, values
    inside = (
        _differing(f"{key}.{field.name}", [getattr(value, field.name) for value in values])
        for field in dataclasses.fields(values[0])
    )
    return next(filter(None, inside), None)
