"""The experiment of one study in MLflow's store: found or made, and its runs by their tags."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from launch.tracking import run_tags
from launch.tracking.run_tags import KIND

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

PAGE = 1000  # runs of one answer
ACTIVE_ONLY, ALL = 1, 3  # mlflow.entities.ViewType
# MLflow's word for experiments that are no GenAI application. Its pages of 3.17 choose by the address and by what the browser
# remembers, not by this tag; other versions, and the list of experiments, read it.
KIND_OF_EXPERIMENT = {"mlflow.experimentKind": "custom_model_development"}


class Experiment:
    """One experiment. What the store raises passes through."""

    def __init__(self, client: "MlflowClient", name: str, location: str | None) -> None:
        """Find the experiment, or make it with its artifacts at `location` (None: a server keeps them)."""
        self._client = client
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                found = client.get_experiment(
                    client.create_experiment(name, artifact_location=location)
                )
            except Exception:  # another machine may have made it since
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage != "active":
            raise ValueError(
                f"experiment {name!r} is deleted there: restore it or choose another tracking.experiment"
            )
        self.id = str(found.experiment_id)
        self.set_tags(
            {key: word for key, word in KIND_OF_EXPERIMENT.items() if key not in found.tags}
        )

    def tags(self) -> dict[str, str]:
        """Return the experiment's tags."""
        return dict(self._client.get_experiment(self.id).tags)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Give the experiment tags; those that it has with the same value are left alone."""
        known = self.tags() if tags else {}
        for name, value in tags.items():
            if known.get(name) != value:
                self._client.set_experiment_tag(self.id, name, value)

    def runs(self, filter_string: str, view: int = ACTIVE_ONLY) -> "Iterator[Run]":
        """Yield the runs that a filter finds."""
        return found_runs(self._client, [self.id], filter_string, view)

    def find(self, tag: str, value: str, kind: str, view: int) -> "Run | None":
        """Return the run with this tag; of two that two machines made at once, the complete one."""
        found = self.runs(f"tags.`{tag}` = '{value}' AND tags.`{KIND}` = '{kind}'", view)
        return max(found, key=run_tags.is_complete, default=None)

    def close_stale(self) -> None:
        """Set runs to KILLED that dead launchers of this host left RUNNING, in every study of the store."""
        ours = self._client.search_experiments(
            filter_string="name LIKE 'ringside/%'", max_results=PAGE
        )
        every = list({self.id, *(one.experiment_id for one in ours)})
        now = round(time.time() * 1000)
        for run in list(
            found_runs(self._client, every, "attributes.status = 'RUNNING'", ACTIVE_ONLY)
        ):
            process = run_tags.process_of(run)
            if process is not None and process.gone:
                self._client.set_terminated(run.info.run_id, "KILLED", now)


def found_runs(
    client: "MlflowClient", experiments: Sequence[str], filter_string: str, view: int
) -> "Iterator[Run]":
    """Yield the runs of experiments that a filter finds, oldest first, page by page."""
    token = None
    while True:
        page = client.search_runs(
            list(experiments), filter_string, view, PAGE, ["attributes.start_time"], token
        )
        yield from page
        token = page.token
        if not token:
            return
