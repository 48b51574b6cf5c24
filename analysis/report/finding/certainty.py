"""How sure the answer is: what the next run would give, and which checks cast doubt on it."""

from analysis.report.numbers import interval
from analysis.study.estimates import Findings, Point
from analysis.study.names import things_of
from analysis.study.study import Study
from analysis.text import single_line

REASON_LENGTH = 60  # characters of a reason; a longer one is told by its code
REASONS = 3


def certainty(study: Study, findings: Findings, point: Point) -> str:
    """Return the intervals of the next run, or why they are not known."""
    if rate := interval(point.rate, "rate"):
        share = interval(point.efficiency, "share").replace("\N{NO-BREAK SPACE}%", "")
        also = f", an efficiency of {share} %" if share else ""
        return f"The next run would give {rate} {things_of(study)}/s{also} (95 % interval)."
    if all(len(runs.records) == 1 for runs in study.timed):
        verdict = ", so no difference between cells has a verdict" if findings.comparisons else ""
        return f"Every cell ran only once{verdict}."
    return "Too few runs of equal cells are known to say what the next run would give."


def doubt(study: Study, point: Point) -> str:
    """Return why checks cast doubt on the records of the point; empty where none does."""
    if not point.suspect:
        return ""
    codes: dict[str, str] = {}
    for one in study.records_of(point):
        if one.validity.verdict == "suspect":
            codes |= one.validity.against
    reasons = [single_line(_reason(code, said)) for code, said in codes.items()]
    return f"Checks cast doubt on this: {'; '.join(reasons[:REASONS])}{_more(reasons)}."


def _reason(code: str, said: str) -> str:
    """Return the first clause of what a check found, which says it without numbers; its code where that is long."""
    clause, colon, _ = said.partition(":")
    return clause if colon and len(clause) <= REASON_LENGTH else code


def _more(reasons: list[str]) -> str:
    left = len(reasons) - REASONS
    return f"; and {left} more" if left > 0 else "" if reasons else "no reason was recorded"
