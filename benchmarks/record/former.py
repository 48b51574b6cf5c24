"""What records of an older schema name or compute otherwise. They are read with today's names; no other place knows the old ones.

Schema 4 (within_run, strategy/cost_ms): until 3 the ends of intervals were metrics (`…_ci_low`, `…_ci_high`), and what A B B A
measures was called `comm/exposed_ms`, although it holds what the strategy costs on one GPU too. A reference was called a limit,
although an exchange can be faster. A check that had nothing to look at was `unchecked` like one that could not run.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

LAST_OLD_NAMES = 3  # the last schema with these names
# Fields that not every record of these schemas has.
LATER_FIELDS = ("within_run", "tables", "raw_sha256", "limits", "not_applicable", "labels", "server_gpus", "profiler_options",
                "declared")  # fmt: skip
LATER_TABLES = (
    "within_run",
    "tables",
    "predicted",
)  # without one a record of any schema has an empty one
RENAMED = {"comm/exposed_ms": "strategy/cost_ms"}
# Made of the renamed metric as if it were exposed communication alone: they mean nothing.
DROPPED = ("comm/overlap_fraction", "trace/exposed_disagreement_ms")
_LIMIT, _REFERENCE = "limit", "reference"  # in names of metrics, checks and lines
# Strategies that move nothing on one GPU. Records of schema 4 say it themselves (checks.own_work_alone).
OWN_WORK_ALONE = ("nccl_allreduce",)
_CODES = {"limit_exceeded": "reference_exceeded"}
_RATE = "throughput/images_per_second"
_ENDS = {"ci_low": "low", "ci_high": "high"}
# Words of a reason why a check of these schemas had nothing to look at; checks that GPUs or training steps alone have.
_NOT_APPLICABLE = (
    "one rank", "trains nothing", "loses precision", "compresses with loss", "exchanges no known gradients",
    "no one-GPU baseline", "no GPU UUID", "not applicable",
)  # fmt: skip
_OF_GPUS = ("foreign_load", "throttled", "cpu_bound")
_OF_STEPS = ("noisy", "cpu_bound", "loss_not_finite", "images_miscounted", "too_few_iterations", "warmup_not_flat",
             "clocks_disagree")  # fmt: skip
# Values that lines of this schema or an older one give otherwise now: {schema: {how the value begins: what changed}}; * stands
# for anything.
COMPUTED_OTHERWISE: Mapping[int, Mapping[str, str]] = {
    3: {
        "within_run ": "intervals within a run were computed otherwise until schema 3",
        "checks half_width": "intervals within a run were computed otherwise until schema 3",
        "checks warmup_flat": "until schema 3 a warm-up ended when its last quarter was within 2 % of the one before",
        "checks stationarity": "schema 3 has no facts of drift",
        "checks pauses": "schema 3 has no facts of pauses",
        "checks unaccounted_share": "schema 3 does not say whether samples fill their windows",
        "checks slowest_rank": "schema 3 does not say what a step costs each rank alone",
        "tables host_link.*.slowest_ms.": "intervals within a run were computed otherwise until schema 3",
        "tables ranks/own_ms": "schema 3 does not say what a step costs each rank alone",
    },
    4: {"tables residuals.": "until schema 4 the scatter of steps is in the samples alone"},
}

# The same of ranks that measured several cells, one after the other: they named their pool, and gave back what a cell had used.
OF_SHARED_RANKS = ("checks given_back", "tables seconds")


def translated(
    metrics: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return metrics of a record of schema 1 to 3 as (metrics, within_run) of today."""
    now: dict[str, float] = {}
    within_run: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if (end := _end_of(name)) is not None:
            of, end_name = end
            within_run.setdefault(_todays(of), {})[end_name] = value
        elif name not in DROPPED:
            now[_todays(name)] = value
    return now, within_run


def _todays(name: str) -> str:
    """Return what a metric is called today."""
    if name.startswith(f"{_LIMIT}/"):
        return name.replace(_LIMIT, _REFERENCE, 1)
    return RENAMED.get(name, name)


def is_reference(probe: Mapping[str, Any]) -> bool:
    """Tell whether the probe that a line names is a reference of the exchange, and not one stage of it."""
    return bool(probe[_REFERENCE] if _REFERENCE in probe else probe[_LIMIT])


def _end_of(name: str) -> tuple[str, str] | None:
    """Return (metric, `low` or `high`) where a name is that of an end of the metric's interval."""
    for ending, end in _ENDS.items():
        if name == f"throughput/{ending}":
            return _RATE, end
        if name.endswith(f"_{ending}"):
            return name.removesuffix(f"_{ending}"), end
    return None


def split(validity: Mapping[str, Any], cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validity of a record of schema 1 to 3 with the checks that do not apply to its cell apart from the others."""
    unchecked = dict(validity["unchecked"]) if "unchecked" in validity else {}
    apart = {code: why for code, why in unchecked.items() if _does_not_apply(code, why, cell)}
    left = {code: why for code, why in unchecked.items() if code not in apart}
    codes = {_CODES.get(code, code): said for code, said in validity.get("codes", {}).items()}
    return {
        **validity,
        "codes": codes,
        "unchecked": left,
        "not_applicable": {**validity.get("not_applicable", {}), **apart},
    }


def _does_not_apply(code: str, why: str, cell: Mapping[str, Any]) -> bool:
    on_gpu, trains = cell["device"] == "cuda", cell["benchmark"]["name"] == "throughput"
    of_gpus, of_steps = code in _OF_GPUS and not on_gpu, code in _OF_STEPS and not trains
    return of_gpus or of_steps or any(words in why for words in _NOT_APPLICABLE)


def renewed(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a `record.json` with today's names. Its `schema_version` stays and says how it was measured."""
    if content["schema_version"] > LAST_OLD_NAMES:
        return content
    metrics, within_run = translated(content["metrics"])
    validity = (
        split(content["validity"], content["cell"])
        if content["state"] == "finished"
        else content["validity"]
    )
    checks = dict(content["checks"])
    if _LIMIT in checks:
        checks[_REFERENCE] = checks.pop(_LIMIT)
    return content | {
        "metrics": metrics,
        "checks": checks,
        "within_run": {**within_run, **content.get("within_run", {})},
        "validity": validity,
    }


def computed_otherwise(
    schema: int, value: str, ranks: Iterable[Mapping[str, Any]] = ()
) -> str | None:
    """Return what changed since a record in how a value (`metrics step/ms_median`) is computed; None: nothing.

    `schema` is that of the record, and `ranks` are what its ranks said of themselves.
    """
    if value.startswith(OF_SHARED_RANKS) and any("pool" in rank for rank in ranks):
        return "ranks that measured several cells had parts of their own in what a cell costs"
    for until, changes in COMPUTED_OTHERWISE.items():
        for beginning, said in changes.items():
            if schema <= until and fnmatch.fnmatchcase(value, f"{beginning}*"):
                return said
    return None
