"""All that a study says, in one call: what the report prints."""

from collections.abc import Sequence

from analysis.findings.comparisons import compared, noises
from analysis.findings.link_value import lost, machines, wired
from analysis.findings.model import Findings
from analysis.findings.runs import gather
from analysis.findings.scaling import curves
from analysis.findings.waterfall import explained
from analysis.topology.model import Topology
from benchmarks.record import Record


def study_findings(records: Sequence[Record], topology: Topology | None = None) -> Findings:
    """Everything that a study's records tell. What they cannot tell is absent, with a sentence in `unsaid` or `refusals`.

    Args:
        records: of one study, in any order; unusable ones and earlier attempts too.
        topology: of the machine; None: the link classes that the records name.
    """
    study = gather(records)
    waterfalls, unexplained = explained(study)
    scaling, known = curves(study), machines(study, topology)
    comparisons, noise, worth = compared(study), noises(study), lost(study, known)
    unsaid = [*unexplained]
    if not records:
        unsaid.append("nothing: the study has no record")
    elif not study.runs:
        unsaid.append(f"nothing but why: none of {len(records)} records is valid and finished")
    elif not study.timed:
        nothing = "no scaling" if study.rated else "no scaling and no comparison"
        unsaid.append(f"{nothing}: no cell counts images per second")
    if study.rated and all(one.floor is None for one in noise):
        unsaid.append("no noise floor and no significance: no cell was run twice (repeats=5 does)")
    beside = wired(study, known, scaling)
    if not worth and any(wire.link_class for wire in beside):
        unsaid.append("what a link is worth: no two subsets of equal size and settings have different link classes")
    return Findings(
        scaling=scaling,
        waterfalls=waterfalls,
        comparisons=comparisons,
        noises=noise,
        wires=beside,
        worth=worth,
        excluded=tuple((record.name, why) for record, why in study.excluded),
        unsaid=tuple(unsaid),
    )
