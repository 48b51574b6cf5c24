"""Everything that a study says, in one call: what the report prints.

A share is a part of one (0.98), a rate is in images per second. What a study cannot say is absent,
with a sentence why. A finding names its cell by `gpus` and `key`; `label` is for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from analysis.findings.communication import Communication, communication, not_claimed
from analysis.findings.comparisons import (
    Comparison,
    SettingEffect,
    comparisons,
    drifts,
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
    drifts: Mapping[str, float] = field(default_factory=dict)  # {rate: its change, a share}
    wires: tuple[SubsetLinks, ...] = ()
    worth: tuple[LinkValue, ...] = ()
    communication: tuple[Communication, ...] = ()
    wire_lines: tuple[WireLine, ...] = ()
    # {what could not be said and why: the option that measures it, if there is one}
    unsaid: Mapping[str, str] = field(default_factory=dict)


def findings_of(study: Study) -> Findings:
    """Return everything that a study's records say."""
    falls, unexplained = waterfalls(study)
    scaling, compared = curves(study), comparisons(study)
    machines = machine_links(study)
    values, links = link_values(study, machines), subset_links(study, machines, scaling)
    exposed = communication(study)
    lines, no_line = wire_lines(study, exposed)
    unsaid = unexplained | not_claimed(exposed) | no_line
    for sentence in (_nothing(study), unused_on_cpu_workers(study)):
        unsaid[sentence] = ""
    if study.rated and all(runs.floor(runs.rate.metric) is None for runs in study.rated):
        ran_once = all(len(runs.records) == 1 for runs in study.rated)
        few = "every configuration ran once" if ran_once else "too few repeated runs"
        unsaid[f"Run-to-run variation: {few}"] = "repeats=5"
    if not values:
        classes: set[object] = set()
        for record in study.records:
            classes.update(record.environment.get("links", {}).values())
        if len(classes) > 1:
            why = "no configuration ran over different links"
            unsaid[f"Cost of slower links: {why}"] = "gpus=classes"
    unsaid.pop("", None)
    return Findings(
        scaling=scaling,
        waterfalls=falls,
        comparisons=compared,
        settings=setting_effects(study, compared),
        drifts=drifts(study),
        wires=links,
        worth=values,
        communication=exposed,
        wire_lines=lines,
        unsaid=unsaid,
    )


def _nothing(study: Study) -> str:
    if not study.records:
        return "Anything: there is no record"
    if not study.runs:
        count = len(study.records) + len(study.replaced)
        none = "its one run is not" if count == 1 else f"none of its {count} runs is"
        return f"Anything: {none} finished and valid"
    if not study.timed:
        missing = "Scaling" if study.rated else "Scaling and speed"
        return f"{missing}: no run measured images per second"
    return ""
