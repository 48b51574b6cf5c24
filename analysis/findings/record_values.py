"""The values of a record that need other records too, as the terminal, MLflow and report show them.

The launching process imports this module, so it needs neither numpy nor scipy.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from analysis.findings.baselines import (
    AT_EQUAL_CLOCKS,
    BASELINES,
    EFFICIENCY,
    HOST_BASELINES,
    NODE_EFFICIENCY,
    Baselines,
)
from analysis.findings.communication import EXPOSED, HIDDEN, Exposures, disagreement
from analysis.study.conditions import IMAGES_PER_SECOND
from analysis.study.intervals import names_of
from analysis.study.noise_floor import COST, OF_SEVERAL_RECORDS, Scatters
from analysis.study.study import Study
from benchmarks.record import Record, metrics

COST_ALONE = "cost_alone"  # among a record's checks: ids of one-GPU records behind its exposed part


class SeveralRecords:
    """Computes the values of one record from a study."""

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Find the one-GPU cells of the study; `judged` as Exposures has it."""
        self._study = study
        self._baselines = Baselines(study, judged=judged)
        self._exposures = Exposures(study, self._baselines, judged=judged)

    def values(self, record: Record) -> dict[str, float]:
        """Return {metric: value} of OF_SEVERAL_RECORDS; what is not known is absent."""
        share, exposure = self._baselines.efficiency(record), self._exposures.of(record)
        values: dict[str, float | None] = {
            EFFICIENCY: share,
            AT_EQUAL_CLOCKS: self._baselines.at_equal_clocks(record, share),
            NODE_EFFICIENCY: self._baselines.node_efficiency(record),
        }
        if exposure is not None:
            values |= {EXPOSED: exposure.exposed_ms, HIDDEN: exposure.hidden_share}
        present = {}
        for name, value in values.items():
            if value is not None:
                present[name] = value
        return present | disagreement({**record.metrics, **present})

    def shown(self, record: Record) -> dict[str, float]:
        """Return the same with the intervals of the next run, of the numbers that say most."""
        runs, values = self._study.single(record), self.values(record)
        if not record.usable:
            return values
        names = [IMAGES_PER_SECOND, runs.rate.metric, COST]
        for name in record.metrics:
            entry = metrics.known(name)
            if entry is None or entry.first:
                names.append(name)
        for name in dict.fromkeys(names):
            estimate, floor = runs.next_run(name), runs.floor(name)
            if estimate is None or floor is None or estimate.low is None or estimate.high is None:
                continue
            low, high, runs_of_floor = names_of(name)
            values |= {low: estimate.low, high: estimate.high}
            if not floor.lenders:  # a lent one rests on no run of an equal cell
                values[runs_of_floor] = float(floor.runs)
        return values

    def facts(self, record: Record) -> dict[str, object]:
        """Return what the values rest on, as a record's checks have it: ids of records."""
        facts: dict[str, object] = {}
        efficiencies = self._baselines.efficiency(record), self._baselines.node_efficiency(record)
        if efficiencies != (None, None):
            facts |= self._baselines.facts(record)
        exposure = self._exposures.of(record)
        if exposure is not None and exposure.exposed_ms is not None:
            facts[COST_ALONE] = sorted(exposure.record_ids)
        return facts


def values_of(
    records: Iterable[Record], scatters: Scatters | None = None
) -> dict[str, dict[str, float]]:
    """Return {record_id: `shown`} for the records of a study; `scatters` as Study.of has it."""
    study = Study.of(records, scatters=scatters)
    several, values = SeveralRecords(study), {}
    for record in (*study.records, *study.replaced):
        shown = several.shown(record)
        if shown:
            values[record.record_id] = shown
    return values


def rests_on(record: Record) -> set[str]:
    """Return the ids of the other records that a record's values rest on."""
    ids = set(record.checks.get(COST_ALONE, ()))
    for name in (BASELINES, HOST_BASELINES):
        for of_member in record.checks.get(name, {}).values():
            ids.update(of_member)
    return ids


def again(record: Record, neighbours: Iterable[Record]) -> dict[str, float]:
    """Return the values that the records which a record names give it, whatever the noise was."""
    own = {name: value for name, value in record.metrics.items() if name not in OF_SEVERAL_RECORDS}
    bare = dataclasses.replace(record, metrics=own)
    return SeveralRecords(Study.of([*neighbours, bare]), judged=False).values(bare)


def with_values(record: Record, earlier: Sequence[Record]) -> Record:
    """Return the record with the values that the records known by now give it, and their ids."""
    several = SeveralRecords(Study.of([*earlier, record]))
    return dataclasses.replace(
        record,
        metrics=record.metrics | several.values(record),
        checks=record.checks | several.facts(record),
    )
