"""The values of a record that need other records too: one place gives them to the record, the terminal, MLflow and the report.

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
from analysis.study.intervals import names_of
from analysis.study.noise_floor import OF_SEVERAL_RECORDS, Scatters
from analysis.study.rates import IMAGES_PER_SECOND
from analysis.study.study import Study
from benchmarks.record import Record, metrics

COST_ALONE = "cost_alone"  # among a record's checks: ids of the one-GPU records that its exposed communication rests on


class SeveralRecords:
    """Computes the values of one record from a study."""

    def __init__(self, study: Study, *, judged: bool = True) -> None:
        """Find the one-GPU cells of the study; `judged` as Exposures has it."""
        self._study, self.baselines = study, Baselines(study, judged=judged)
        self.exposures = Exposures(study, self.baselines, judged=judged)

    def values(self, record: Record) -> dict[str, float]:
        """Return {metric: value} of OF_SEVERAL_RECORDS; what is not known is absent."""
        share, found = self.baselines.efficiency(record), self.exposures.of(record)
        equal = self.baselines.at_equal_clocks(record, share)
        values: dict[str, float | None] = {EFFICIENCY: share, AT_EQUAL_CLOCKS: equal}
        values[NODE_EFFICIENCY] = self.baselines.node_efficiency(record)
        if found is not None:
            values |= {EXPOSED: found.exposed_ms, HIDDEN: found.hidden_share}
        known = {name: value for name, value in values.items() if value is not None}
        return known | disagreement({**record.metrics, **known})

    def shown(self, record: Record) -> dict[str, float]:
        """Return the same with the intervals of the next run, by `names_of`, of the numbers that say most of the cell."""
        runs, found = self._study.single(record), self.values(record)
        others = (
            name for name in record.metrics if (entry := metrics.known(name)) is None or entry.first
        )
        for name in (
            dict.fromkeys([IMAGES_PER_SECOND, runs.rate.metric, *others]) if record.usable else ()
        ):
            shown, floor = runs.next_run(name), runs.floor(name)
            if (
                shown is not None
                and shown.low is not None
                and shown.high is not None
                and floor is not None
            ):
                found |= zip(
                    names_of(name), (shown.low, shown.high, float(floor.runs)), strict=True
                )
        return found

    def facts(self, record: Record) -> dict[str, object]:
        """Return what the values rest on, as a record's checks have it: the ids of other records."""
        facts: dict[str, object] = {}
        if (
            self.baselines.efficiency(record) is not None
            or self.baselines.node_efficiency(record) is not None
        ):
            facts |= self.baselines.facts(record)
        found = self.exposures.of(record)
        if found is not None and found.exposed_ms is not None:
            facts[COST_ALONE] = sorted(found.record_ids)
        return facts


def values_of(
    records: Iterable[Record], others: Scatters | None = None
) -> dict[str, dict[str, float]]:
    """Return {record_id: {metric: value}} of `shown` for the records of a study; `others` is as Study.of has it."""
    study = Study.of(records, others=others)
    several = SeveralRecords(study)
    found = {
        record.record_id: several.shown(record) for record in (*study.records, *study.replaced)
    }
    return {record_id: values for record_id, values in found.items() if values}


def rests_on(record: Record) -> set[str]:
    """Return the ids of the other records that a record's values rest on."""
    baselines = [
        *record.checks.get(BASELINES, {}).values(),
        *record.checks.get(HOST_BASELINES, {}).values(),
    ]
    return {one for ids in baselines for one in ids} | set(record.checks.get(COST_ALONE, ()))


def again(record: Record, others: Iterable[Record]) -> dict[str, float]:
    """Return the values that the records which a record names give it, whatever the noise of its study was."""
    own = {name: value for name, value in record.metrics.items() if name not in OF_SEVERAL_RECORDS}
    bare = dataclasses.replace(record, metrics=own)
    return SeveralRecords(Study.of([*others, bare]), judged=False).values(bare)


def with_values(record: Record, known: Sequence[Record]) -> Record:
    """Return the record with the values that the records known by now give it, and the ids of those.

    A baseline that comes later changes what the terminal, MLflow and the report show. The record stays as it is.
    """
    several = SeveralRecords(Study.of([*known, record]))
    values, facts = several.values(record), several.facts(record)
    return dataclasses.replace(
        record, metrics=record.metrics | values, checks=record.checks | facts
    )
