"""Compare what MLflow's store holds of a study with its records: `python -m launch compare`, and `analysis verify --mlflow`.

Nothing is written: a store that does not exist is not made.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.findings.communication.several_records import values_of
from analysis.findings.next_run.floors import OF_SEVERAL_RECORDS
from analysis.report.text import single_line
from benchmarks.record import Record, read_study
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.tracking.projection import project
from launch.tracking.run_tags import KIND, NOTE, PROJECTED, RECORD
from launch.tracking.store import WrongUri, silence_mlflow, sqlite_file, store_uri, tracking_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAGE = 1000  # runs of one answer
ABSENT = "absent"


@dataclass(frozen=True)
class StoreDifference:
    """One value of a run that the record has otherwise."""

    record: str  # the record's id
    field: str
    stored: Any
    recorded: Any


@dataclass
class StoreComparison:
    """What came of all runs of a study."""

    uri: str
    runs: int = 0
    values: int = 0
    missing: list[str] = field(default_factory=list)  # ids of records without a complete run
    unknown: list[str] = field(default_factory=list)  # ids that runs name and no record has
    differences: list[StoreDifference] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether the store says of every run what its record says."""
        return not self.differences and not self.unknown

    def as_json(self) -> dict[str, Any]:
        """Return it in plain JSON types."""
        return {**asdict(self), "right": self.right}

    def compare(self, record: str, name: str, stored: Any, recorded: Any) -> None:
        """Count a value, and note it if it differs."""
        self.values += 1
        if stored != recorded:
            self.differences.append(StoreDifference(record, name, stored, recorded))


def compare(study_dir: Path, tracking: Tracking) -> StoreComparison:
    """Compare every complete run of a study with its record: metrics, series, parameters, tags, name and status.

    Raises:
        ValueError: the folder holds no record, or there is no such store or experiment.
        TrackingUnavailable: the store cannot be read.
    """
    study_dir = study_dir.absolute()
    records = {record.record_id: record for record in read_study(study_dir)[0]}
    if not records:
        raise ValueError(f"{study_dir}: no folder of a study (it has no cell with a record.json)")
    uri = store_uri(tracking.uri, study_dir.parent)
    file, shown = sqlite_file(uri), without_credentials(uri)
    if file is not None and not file.exists():
        raise WrongUri(f"{shown}: there is no such store; give its URI, or write it by python -m launch sync")
    several = values_of(records.values())
    result = StoreComparison(shown)
    with tracking_errors(uri):
        silence_mlflow()
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
        name = single_line(tracking.experiment or f"ringside/{study_dir.name}", 500)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            raise WrongUri(f"{shown}: has no experiment {name}")
        found = dict(_complete_runs(client, experiment.experiment_id))
        for record_id, run in found.items():
            if (record := records.get(record_id)) is None:
                result.unknown.append(record_id)
                continue
            result.runs += 1
            _compare_run(record, several.get(record_id, {}), run, client, result)
    result.missing = [record_id for record_id in records if record_id not in found]
    return result


def _complete_runs(client: "MlflowClient", experiment: str) -> "Iterator[tuple[str, Run]]":
    """Yield (record id, run) of every complete child run, page by page."""
    token = None
    while True:
        page = client.search_runs([experiment], f"tags.`{KIND}` = 'cell'", 1, PAGE, ["attributes.start_time"], token)
        yield from ((run.data.tags.get(RECORD, ""), run) for run in page if PROJECTED in run.data.tags)
        token = page.token
        if not token:
            return


def _compare_run(
    record: Record, several: Mapping[str, float], run: "Run", client: "MlflowClient", result: StoreComparison
) -> None:
    """Compare one run. Values of several records are those of the study as it is now, as `python -m launch sync` writes them."""
    expected, own = project(record), record.record_id
    result.compare(own, "name", run.info.run_name, expected.name)
    result.compare(own, "status", run.info.status, expected.status)
    points: dict[str, dict[int, float]] = {}
    for name, value, _, step in expected.metrics:
        points.setdefault(name, {})[step] = value
    points |= {
        name: {0: float(several[name])} for name in OF_SEVERAL_RECORDS if math.isfinite(several.get(name, math.nan))
    }
    for name, values in points.items():
        stored = run.data.metrics.get(name, ABSENT)
        result.compare(own, f"metrics {name}", stored, values[max(values)])
        if len(values) > 1:
            history = {one.step: one.value for one in client.get_metric_history(run.info.run_id, name)}
            for step in sorted(values.keys() | history.keys()):
                result.compare(own, f"series {name} step {step}", history.get(step, ABSENT), values.get(step, ABSENT))
    for name in sorted(run.data.metrics.keys() - points.keys()):
        if not name.startswith("throughput/ci_"):  # of the next run: by the noise floor of every study at that time
            result.compare(own, f"metrics {name}", run.data.metrics[name], ABSENT)
    for name in sorted(expected.params.keys() | run.data.params.keys()):
        result.compare(own, f"params {name}", run.data.params.get(name, ABSENT), expected.params.get(name, ABSENT))
    for name, text in expected.tags.items():
        if name != NOTE:  # a user may write there
            result.compare(own, f"tags {name}", run.data.tags.get(name, ABSENT), text)
