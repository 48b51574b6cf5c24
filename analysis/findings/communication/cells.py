"""Exposed communication of every set of equal cells of a study, and a sentence on those of which it is not claimed."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from analysis.findings import labels
from analysis.findings.communication.exposed import COST, Exposure, Exposures
from analysis.findings.labels import gpu_list, several
from analysis.findings.model import Communication
from analysis.findings.runs import Runs
from analysis.findings.study import Study


def communication(study: Study) -> tuple[Communication, ...]:
    """Return what is exposed of the communication of every set of equal cells on several GPUs that has an A B B A."""
    exposures = Exposures(study)
    found = []
    for runs in study.timed:
        known = [one for record in runs.records if (one := exposures.of(record)) is not None]
        if known:
            found.append(_of(study, runs, known))
    return tuple(found)


def _of(study: Study, runs: Runs, known: Sequence[Exposure]) -> Communication:
    return Communication(
        label=labels.label(study, runs),
        gpus=runs.gpus,
        key=runs.key,
        record_ids=tuple(record.record_id for record in runs.records),
        cost_ms=statistics.median(runs.values(COST)),
        cost_alone_ms=known[0].alone_ms,
        alone_from=known[0].source,
        exposed_ms=_median(one.exposed_ms for one in known),
        hidden_share=_median(one.hidden_share for one in known),
        hidden_half=_median(one.half_share for one in known),
        why=next((one.why for one in known if one.why), ""),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def not_claimed(found: Iterable[Communication]) -> tuple[str, ...]:
    """Return a sentence for each reason why exposed communication or the hidden share is not claimed."""
    cells: dict[tuple[str, str], list[str]] = defaultdict(list)
    for one in found:
        if one.hidden_share is None:
            what = "the exposed communication" if one.exposed_ms is None else "the hidden share of the exchange"
            cells[what, one.why].append(f"{one.label} on {gpu_list(one.gpus)}")
    return tuple(f"{what} of {several(named)}: {why}" for (what, why), named in cells.items())
