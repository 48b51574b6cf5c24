"""Everything that a study says, in one call: what the report prints."""

from analysis.findings.communication import communication, not_claimed
from analysis.findings.comparisons import (
    comparisons,
    noises,
    setting_effects,
    unused_on_cpu_workers,
)
from analysis.findings.links.machine_links import machine_links, measured_beside
from analysis.findings.links.subset_links import link_values, subset_links
from analysis.findings.links.wire_lines import wire_lines
from analysis.findings.scaling import curves
from analysis.findings.waterfall import waterfalls
from analysis.study.estimates import Findings
from analysis.study.study import Study


def findings_of(study: Study) -> Findings:
    """Return everything that a study's records say.

    What they cannot say is absent, with a sentence in `unsaid` or `scaling.refusals`.
    """
    explained, unexplained = waterfalls(study)
    scaling, neighbours = curves(study), measured_beside(study)
    machines = machine_links(study, neighbours)
    noise, values = noises(study), link_values(study, machines)
    compared = comparisons(study)
    links = subset_links(study, machines, scaling)
    exposed = communication(study)
    lines, no_line = wire_lines(study, machines, scaling, exposed, neighbours)
    unsaid = [*unexplained, *not_claimed(exposed), _nothing(study), unused_on_cpu_workers(study)]
    if study.rated and all(each.floor is None for each in noise):
        some = "too few cells" if any(each.pairs for each in noise) else "no cell"
        unsaid.append(f"how far runs differ: {some} ran twice (repeats=5 does that)")
    if not values and any(each.link_class for each in links):
        unsaid.append("what a link is worth: no two equal cells ran over different links")
    return Findings(
        scaling=scaling,
        waterfalls=explained,
        comparisons=compared,
        settings=setting_effects(study, compared),
        noises=noise,
        wires=links,
        worth=values,
        communication=exposed,
        wire_lines=lines,
        no_wire_line=no_line,
        links_from=tuple(sorted({record.study for record in neighbours})),
        excluded=tuple((record.name, why) for record, why in study.left_out),
        unsaid=tuple(sentence for sentence in unsaid if sentence),
    )


def _nothing(study: Study) -> str:
    if not study.records:
        return "anything: it has no record"
    if not study.runs:
        count = len(study.records) + len(study.replaced)
        none = "its one record is not" if count == 1 else f"none of its {count} records is"
        return f"anything: {none} finished and valid"
    if not study.timed:
        missing = "how it scales" if study.rated else "how it scales, and what is faster"
        return f"{missing}: no cell measured images per second"
    return ""
