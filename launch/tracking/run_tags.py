"""The tags of runs in MLflow: what a run projects, whether it is complete, and which process writes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.findings.baselines import EFFICIENCY
from analysis.study.estimates import Efficiency
from launch.study.identity import ProcessIdentity

if TYPE_CHECKING:
    from mlflow.entities import Run, RunTag

PROJECTED, KIND = "ringside.projected", "ringside.kind"
COMPLETE = "2"  # the value of PROJECTED; a run that an earlier version wrote ("true") lacks tags that this one writes
RECORD, SWEEP = "ringside.record_id", "ringside.sweep_id"
NOTE, TABLED = (
    "mlflow.note.content",
    "ringside.records",
)  # a sweep's table, and the number of its own records in it

EFFICIENCY_OF = "efficiency.of"  # the GPUs that the efficiency is against: GPU 0, or every GPU


@dataclass(frozen=True)
class Written:
    """What the store has of a sweep."""

    status: str  # MLflow's word
    planned: int | None  # cells
    records: (
        int | None
    )  # that its table counts; None while it has no table, or one of an earlier version
    at_work: bool  # another process that may live is writing it


def written(run: "Run") -> Written:
    """Return what the parent run of a sweep says."""
    counts = [run.data.tags.get(name, "") for name in ("ringside.cells", TABLED)]
    planned, records = (int(count) if count.isdigit() else None for count in counts)
    process = process_of(run)
    at_work = (
        run.info.status == "RUNNING"
        and process not in (None, ProcessIdentity.own())
        and not process.gone
    )
    return Written(run.info.status, planned, records if is_complete(run) else None, at_work)


def is_complete(run: "Run") -> bool:
    """Tell whether nothing is to be added to a run: it was written to the end, or a user deleted it."""
    return run.data.tags.get(PROJECTED) == COMPLETE or run.info.lifecycle_stage == "deleted"


def has(run: "Run", name: str, value: float) -> bool:
    """Tell whether a run has a value of a metric; of an efficiency, also against the same GPUs."""
    same = (
        run.data.tags.get(EFFICIENCY_OF) == value.members if isinstance(value, Efficiency) else True
    )
    return same and run.data.metrics.get(name) == value


def of_values(values: Mapping[str, float]) -> dict[str, str]:
    """Return the tags that belong to values of metrics: the GPUs that an efficiency is against."""
    share = values.get(EFFICIENCY)
    return {EFFICIENCY_OF: share.members} if isinstance(share, Efficiency) else {}


def process_tags(process: ProcessIdentity) -> dict[str, str]:
    """Return the tags that name the process that writes a run."""
    return {
        "ringside.host": process.host,
        "ringside.pid": str(process.pid),
        "ringside.pid_started": repr(process.started),
        "ringside.boot_id": process.boot_id,
    }


def process_of(run: "Run") -> ProcessIdentity | None:
    """Return the process that wrote a run; None where its tags do not say."""
    host, pid, started, boot_id = (
        run.data.tags.get(f"ringside.{name}") for name in ("host", "pid", "pid_started", "boot_id")
    )
    try:
        return ProcessIdentity(str(host), int(pid or ""), float(started or ""), boot_id or "")
    except ValueError:
        return None


def entities(tags: Mapping[str, str]) -> "list[RunTag]":
    """Return tags as MLflow takes them in a batch."""
    from mlflow.entities import RunTag

    return [RunTag(name, value) for name, value in tags.items()]
