"""Compare what MLflow's store holds of a study with its records: `python -m launch compare`, and `analysis verify --mlflow`.

Nothing is written: a store that does not exist is not made.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.findings.record_values import values_of
from analysis.study.noise_floor import OF_SEVERAL_RECORDS
from analysis.text import single_line
from benchmarks.record import read_study
from conf.schema import Tracking
from launch.machine.secrets import without_credentials
from launch.tracking import siblings
from launch.tracking.experiment import ACTIVE_ONLY, found_runs
from launch.tracking.projection import Projection, project
from launch.tracking.run_tags import COMPLETE, KIND, NOTE, PROJECTED, RECORD
from launch.tracking.store import WrongUri, silence_mlflow, sqlite_file, store_uri, tracking_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

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
        raise WrongUri(
            f"{shown}: there is no such store; give its URI, or write it by python -m launch sync"
        )
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
        runs = found_runs(
            client, [experiment.experiment_id], f"tags.`{KIND}` = 'cell'", ACTIVE_ONLY
        )
        found = {
            run.data.tags.get(RECORD, ""): run
            for run in runs
            if run.data.tags.get(PROJECTED) == COMPLETE
        }
        sound = siblings.sound(records.values())
        names, left_alone = siblings.names(sound), siblings.left_alone(sound)
        for record_id, run in found.items():
            if record_id not in records:
                result.unknown.append(record_id)
                continue
            result.runs += 1
            expected = project(records[record_id])
            if run.info.run_name != expected.name:  # the whole name, until a sweep ends
                expected = replace(expected, name=names[record_id])
            added = {
                name: text
                for name, text in left_alone[record_id].items()
                if name in run.data.params
            }
            expected = replace(expected, params=expected.params | added)
            _compare_run(record_id, expected, several.get(record_id, {}), run, client, result)
    result.missing = [record_id for record_id in records if record_id not in found]
    return result


def _compare_run(
    own: str,
    expected: Projection,
    several: Mapping[str, float],
    run: "Run",
    client: "MlflowClient",
    result: StoreComparison,
) -> None:
    """Compare one run. Values of several records are those of the study as it is now, as `python -m launch sync` writes them."""
    result.compare(own, "name", run.info.run_name, expected.name)
    result.compare(own, "status", run.info.status, expected.status)
    points: dict[str, dict[int, float]] = {}
    for name, value, _, step in expected.metrics:
        points.setdefault(name, {})[step] = value
    points |= {
        name: {0: float(several[name])}
        for name in OF_SEVERAL_RECORDS
        if math.isfinite(several.get(name, math.nan))
    }
    for name, values in points.items():
        stored = run.data.metrics.get(name, ABSENT)
        result.compare(own, f"metrics {name}", stored, values[max(values)])
        if len(values) > 1:
            history = {
                one.step: one.value for one in client.get_metric_history(run.info.run_id, name)
            }
            for step in sorted(values.keys() | history.keys()):
                result.compare(
                    own,
                    f"series {name} step {step}",
                    history.get(step, ABSENT),
                    values.get(step, ABSENT),
                )
    for name in sorted(run.data.metrics.keys() - points.keys()):
        # Of the next run: by the noise floor of every study at that time. Of the system: no record has its samples.
        if not name.startswith(("throughput/ci_", "system/")):
            result.compare(own, f"metrics {name}", run.data.metrics[name], ABSENT)
    for name in sorted(expected.params.keys() | run.data.params.keys()):
        if name == "repeat" and not run.data.params.get(name, "0").isdigit():
            continue  # of a drift or second run by an earlier version: MLflow changes no parameter
        result.compare(
            own,
            f"params {name}",
            run.data.params.get(name, ABSENT),
            expected.params.get(name, ABSENT),
        )
    for name, text in expected.tags.items():
        if name != NOTE:  # a user may write there
            result.compare(own, f"tags {name}", run.data.tags.get(name, ABSENT), text)
