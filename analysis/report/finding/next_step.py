"""What to do next: the options that would tell what a study leaves open."""

from analysis.report.finding.loss import explained
from analysis.report.finding.main_point import MainPoint
from analysis.study.estimates import Findings
from analysis.study.provenance import gpus_of
from analysis.study.study import Study

OFFERED = 2  # of one sentence
COMPARE = "To compare it with another machine, version or date, run python -m analysis compare THIS_STUDY OTHER_STUDY."
# What another run would remove, by the codes of suspect cells.
REMEDIES = {
    ("foreign_cpu", "foreign_load"): ("remove the doubt", "nothing else on the machine"),
    ("too_few_iterations",): ("measure longer", "benchmark.max_seconds=60"),
}


def next_step(study: Study, findings: Findings, main: MainPoint | None) -> str:
    """Return what to run to learn more: `To see where the loss comes from, run with waterfall=true.`"""
    offers = _offers(study, findings, main)[:OFFERED]
    if not offers:
        return COMPARE
    (aim, option), *more = offers
    return (
        f"To {aim}, run with {option}"
        + "".join(f"; to {aim}, with {option}" for aim, option in more)
        + "."
    )


def _has_more(study: Study, main: MainPoint) -> bool:
    """Tell whether the machine of a point may have another GPU: its driver names no single one."""
    return any(len(gpus_of(one.environment)) != 1 for one in study.records_of(main[1]))


def _offers(study: Study, findings: Findings, main: MainPoint | None) -> list[tuple[str, str]]:
    """Return (aim, option) of what is open, the most important first."""
    offers = []
    if main is not None:
        point = main[1]
        codes = (
            {code for one in study.records_of(point) for code in one.validity.codes}
            if point.suspect
            else set()
        )
        offers += [offer for names, offer in REMEDIES.items() if codes & {*names}][:1]
        if point.world_size == 1:
            offers += [("see how it scales", "gpus=scale")] * _has_more(study, main)
        elif not explained(findings, main):
            unknown = "see the efficiency and where the loss comes from"
            offers.append(
                (
                    unknown if point.efficiency is None else "see where the loss comes from",
                    "waterfall=true",
                )
            )
    if findings.comparisons and not any(one.verdict for one in findings.comparisons):
        offers.append(("learn which differences are real", "repeats=5"))
    elif study.timed and all(one.floor is None for one in findings.noises):
        offers.append(("learn how far runs differ", "repeats=5"))
    return offers
