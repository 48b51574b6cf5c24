"""Everything that a study says, in one call: what the report prints.

A share is a part of one (0.98), a rate is in images per second. What a study cannot say is absent,
with a sentence why. A finding names its cell by `gpus` and `key`; `label` is for people.
"""

from dataclasses import dataclass, field

from analysis.findings.communication import Communication, communication, not_claimed
from analysis.findings.comparisons import (
    Comparison,
    Noise,
    NoisyRun,
    SettingEffect,
    comparisons,
    noises,
    noisy_runs,
    setting_effects,
    unused_on_cpu_workers,
)
from analysis.findings.links import LinkValue, SubsetLinks, link_values, machine_links, subset_links
from analysis.findings.scaling import Scaling, curves
from analysis.findings.waterfall import Waterfall, waterfalls
from analysis.findings.wire_lines import WireLine, wire_lines
from analysis.study.study import Study


@dataclass(frozen=True)
class Findings:
    """Everything that a study says; `unsaid` and `scaling.refusals` say why a part is empty."""

    scaling: Scaling = field(default_factory=Scaling)
    waterfalls: tuple[Waterfall, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    settings: tuple[SettingEffect, ...] = ()  # of NCCL
    noises: tuple[Noise, ...] = ()  # of each rate and group of cells
    noisy: tuple[NoisyRun, ...] = ()
    wires: tuple[SubsetLinks, ...] = ()
    worth: tuple[LinkValue, ...] = ()
    communication: tuple[Communication, ...] = ()
    wire_lines: tuple[WireLine, ...] = ()
    no_wire_line: str = ""  # where there is none: what is missing and how to plan it
    excluded: tuple[tuple[str, str], ...] = ()  # name of a record, why it takes no part
    unsaid: tuple[str, ...] = ()  # sentences on what could not be said and why


def findings_of(study: Study) -> Findings:
    """Return everything that a study's records say.

    What they cannot say is absent, with a sentence in `unsaid` or `scaling.refusals`.
    """
    falls, unexplained = waterfalls(study)
    scaling, noise, compared = curves(study), noises(study), comparisons(study)
    machines = machine_links(study)
    values, links = link_values(study, machines), subset_links(study, machines, scaling)
    exposed = communication(study)
    lines, no_line = wire_lines(study, exposed)
    unsaid = [*unexplained, *not_claimed(exposed), _nothing(study), unused_on_cpu_workers(study)]
    floors = {of_group.floor for of_group in noise}
    if study.rated and not floors - {None}:
        ran_twice = any(len(runs.records) > 1 for runs in study.rated)
        cells = "too few cells" if ran_twice else "no cell"
        unsaid.append(f"how far runs differ: {cells} ran twice (repeats=5 does that)")
    if not values and any(subset.link_class for subset in links):
        unsaid.append("what a link is worth: no two equal cells ran over different links")
    excluded = []
    for record, why in study.left_out:
        excluded.append((record.name, why))
    return Findings(
        scaling=scaling,
        waterfalls=falls,
        comparisons=compared,
        settings=setting_effects(study, compared),
        noises=noise,
        noisy=noisy_runs(study),
        wires=links,
        worth=values,
        communication=exposed,
        wire_lines=lines,
        no_wire_line=no_line,
        excluded=tuple(excluded),
        unsaid=tuple(filter(None, unsaid)),
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
