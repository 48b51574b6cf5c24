"""What records of an older schema name or compute otherwise. They are read with today's names; no other place knows the old ones.

Schema 4 (within_run, strategy/cost_ms): until 3 the ends of intervals were metrics (`…_ci_low`, `…_ci_high`), and what A B B A
measures was called `comm/exposed_ms`, although it holds what the strategy costs on one GPU too.
"""

from collections.abc import Mapping
from typing import Any

LAST_OLD_NAMES = 3  # the last schema with these names
RENAMED = {"comm/exposed_ms": "strategy/cost_ms"}
# Made of the renamed metric as if it were exposed communication alone: they mean nothing.
DROPPED = ("comm/overlap_fraction", "trace/exposed_disagreement_ms")
_RATE = "throughput/images_per_second"
_ENDS = {"ci_low": "low", "ci_high": "high"}
# Values that lines of this schema or an older one give otherwise now: {schema: {how the value begins: what changed}}.
COMPUTED_OTHERWISE: Mapping[int, Mapping[str, str]] = {
    3: {"within_run ": "intervals within a run were computed otherwise until schema 3"}
}


def translated(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return metrics of a record of schema 1 to 3 as (metrics, within_run) of today."""
    now: dict[str, float] = {}
    within_run: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if (end := _end_of(name)) is not None:
            of, end_name = end
            within_run.setdefault(RENAMED.get(of, of), {})[end_name] = value
        elif name not in DROPPED:
            now[RENAMED.get(name, name)] = value
    return now, within_run


def _end_of(name: str) -> tuple[str, str] | None:
    """Return (metric, `low` or `high`) where a name is that of an end of the metric's interval."""
    for ending, end in _ENDS.items():
        if name == f"throughput/{ending}":
            return _RATE, end
        if name.endswith(f"_{ending}"):
            return name.removesuffix(f"_{ending}"), end
    return None


def renewed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `record.json` with today's names. Its `schema_version` stays and says how it was measured."""
    if content["schema_version"] > LAST_OLD_NAMES:
        return content
    metrics, within_run = translated(content["metrics"])
    return content | {"metrics": metrics, "within_run": {**within_run, **content.get("within_run", {})}}


def computed_otherwise(schema: int, value: str) -> str | None:
    """Return what changed since a record's schema in how a value (`metrics step/ms_median`) is computed; None: nothing."""
    for until, changes in COMPUTED_OTHERWISE.items():
        for beginning, said in changes.items():
            if schema <= until and value.startswith(beginning):
                return said
    return None
