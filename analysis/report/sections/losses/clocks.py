"""What the clocks take: the rate at equal clocks, and the clock of each GPU alone and together."""

from collections.abc import Iterator

from analysis.findings.waterfall import NOT_TOLD, ClockPart
from analysis.report.numbers import KINDS, NumberFormat, estimate, number
from analysis.report.section import Section
from analysis.report.tables import Column, Table
from analysis.study.estimates import Findings, Waterfall
from analysis.study.names import gpu_ids, gpu_list, short_names, spoken, things_of, unit_of
from analysis.study.study import Study, middle
from analysis.text import first_lines, single_line

CAPPED = "gpu/power_capped_share"
MEASURED, BOUND = "samples beside steps", "not measured: the most it can be"


def clocks(study: Study, findings: Findings) -> Section | None:
    """Return the clocks of each waterfall in which they differ; None where there is none."""
    found = [(one, part) for one in findings.waterfalls for part in _parts(one)]
    if not found:
        return None
    names = short_names(dict.fromkeys(one.label for one in findings.waterfalls))
    capped = {
        (runs.gpus, tuple(sorted(runs.key.items()))): middle(runs.records, CAPPED)
        for runs in study.timed
    }
    rows = []
    for one, part in found:
        share = capped.get((one.gpus, tuple(sorted(one.key.items()))))
        for at, member in enumerate(part.members or [None]):
            mhz = (
                (member.gpu, member.alone_mhz, member.together_mhz)
                if member
                else (None, None, None)
            )
            of_cell = (
                (
                    share,
                    part.exponent,
                    MEASURED if part.samples else BOUND,
                    part.samples or None,
                    part.at_equal_clocks,
                )
                if not at
                else (None,) * 5
            )
            rows.append((names[one.label], gpu_ids(one.gpus), *mhz, *of_cell))
    things = things_of(study)
    table = Table(
        "clocks",
        "SM clock of each member that ran alone, in the timed windows. " * any(part.members for _, part in found)
        + "A step takes as long as clock to the power of −e: e is 0 for a step that waits for memory, 1 for one that computes. "
        "At equal clocks: the rate if each member had the clock that it has alone.",
        (
            Column("cell", "cell"), Column("gpus", unit_of(study)), Column("gpu", "GPU", "count"),
            Column("alone_mhz", "MHz alone", "count"), Column("together_mhz", "together", "count"),
            Column("power_capped_share", "at the power cap", "share"),
            Column("exponent", "e", NumberFormat(decimals=2), True), Column("exponent_from", "e from"),
            Column("samples", "samples", "count"),
            Column("images_per_second_at_equal_clocks", f"{things}/s at equal clocks", KINDS["rate"], True),
        ),
        tuple(rows),
    )  # fmt: skip
    lines = first_lines(_sentence(one, part, names[one.label], things) for one, part in found)
    return Section("waterfall", "Where the rate goes", tuple(lines), (), (table,), place=21)


def _parts(one: Waterfall) -> Iterator[ClockPart]:
    """Yield the part of the clocks where they differ."""
    for part in one.parts:
        if isinstance(part, ClockPart) and part.lost is not None and part.lost.value:
            yield part


def _sentence(one: Waterfall, part: ClockPart, name: str, things: str) -> str:
    """Return the rate at equal clocks, and what the clocks take, in a sentence."""
    assert part.lost is not None
    where = f"{spoken(single_line(name))} on {gpu_list(one.gpus)}"
    share = number(one.measured.value / one.ideal.value, "share")
    told = NOT_TOLD not in part.why
    if not part.samples:
        return (
            f"{where}: clocks are lower than alone. If steps followed them, which nothing measured here, that would take "
            f"{estimate(part.lost, 'rate')} {things}/s; steps that wait for memory follow them less. It is {NOT_TOLD}."
        )
    rate, equal = part.at_equal_clocks, ""
    if rate is not None:
        equal = (
            f": at the clocks that its members have alone it would train {estimate(rate, 'rate')} {things}/s, "
            f"{number(rate.value / one.ideal.value, 'share')} of the ideal instead of {share}"
        )
    takes = f"other clocks take {estimate(part.lost, 'rate')} {things}/s"
    return f"{where}{equal}. So {takes}{'' if told else f', {NOT_TOLD}'}."


SECTIONS = (clocks,)
