"""Which differences are real: the sentence of the finding and the section."""

from collections.abc import Sequence

from analysis.findings.model import Comparison, Estimate, Findings, Noise
from analysis.findings.rates import HEADLINES, IMAGES
from analysis.findings.study import BETWEEN, Study, short_names
from analysis.report.figures import comparison_figure
from analysis.report.numbers import count, estimate, listed, number
from analysis.report.section import Section
from analysis.report.tables import Column, Table, plain


def differences(found: Findings) -> str:
    """How many of the comparisons show a difference, the largest of them, and the noise."""
    judged = [one for one in found.comparisons if one.verdict]
    real = [one for one in judged if one.verdict in ("faster", "slower")]
    floor = _floor(found.noises)
    if not judged and found.comparisons:
        pairs = count(len(found.comparisons), "pair of cells differs", "pairs of cells differ")
        return f"{pairs} in one thing alone, but without repeats none has a verdict (repeats=5 gives them one)."
    if not judged:
        return f"No two sets of runs of this study can be compared; {floor}."
    if not real:
        least = [one.smallest for one in judged if one.smallest is not None]
        could = f", and the best of them could have seen {number(min(least), 'share')}" if least else ""
        seen = count(len(judged), "comparison of runs shows", "comparisons of runs show")
        return f"{seen} no difference{could}; {floor}."
    one = max(real, key=lambda item: (abs(item.difference.value), item.first, item.second))
    pair = short_names(dict.fromkeys((one.first, one.second)))
    first, second = (plain(pair[name], 80) for name in (one.first, one.second))
    every = short_names(dict.fromkeys(name for each in found.comparisons for name in (each.first, each.second)))
    shared = [part for part in every[one.second].split(BETWEEN) if part in every[one.first].split(BETWEEN)]
    where = plain(f" ({', '.join(shared)})", 120) if shared else ""
    return (
        f"{len(real):,} of {count(len(judged), 'comparison')} {'shows' if len(real) == 1 else 'show'} a difference, the "
        f"largest: {second} is {_than(one)} {first}{where}; {floor}."
    )


def _than(one: Comparison) -> str:
    """`13.0 % (11.2 to 14.8) slower than`; `2.51 (2.47 to 2.55) times as fast as` from twice as fast on."""
    value = one.difference.value
    ends = [end for end in (one.difference.low, one.difference.high) if end is not None]
    if value >= 1:
        return f"{estimate(Estimate(1 + value, *(1 + end for end in ends)))} times as fast as"
    size = Estimate(abs(value), *(ends if value >= 0 else [-end for end in reversed(ends)]))
    return f"{estimate(size, 'share')} {one.verdict} than"


def _floor(noises: Sequence[Noise]) -> str:
    known = [one for one in noises if one.floor is not None]
    if not known:
        return "no cell was run twice, so the noise floor of this machine is not known (repeats=5 tells it)"
    each = [f"{number(one.floor, 'share')}{_in(one.rate, noises)} ({count(one.pairs, 'pair')})" for one in known]
    return f"single runs of equal cells differ here by up to {listed(each)}"


def _in(rate: str, noises: Sequence[Noise]) -> str:
    """` in exchanges/s`, where a study has several rates."""
    return f" in {rate}" if len(noises) > 1 else ""


def _compared(found: Findings) -> str:
    """What is compared and which metric tells it; empty for images per second alone."""
    rates = {one.rate for one in found.comparisons}
    known = [one for one in HEADLINES.values() if one.rate in rates]
    if rates <= {IMAGES.rate}:
        return ""
    told = [f"{one.rate} ({'1 ÷ ' if one.is_time else ''}{one.metric})" for one in known]
    return f"Compared: {listed(told)}; more is faster."


def comparisons(study: Study, found: Findings) -> Section:
    """Verdicts, and the noise that they stand on."""
    names = short_names(dict.fromkeys(name for one in found.comparisons for name in (one.first, one.second)))
    rows = tuple(
        (
            names[one.first], names[one.second], one.asked, one.rate, *one.runs, one.difference, one.smallest,
            one.verdict or "none", one.why,
        )
        for one in found.comparisons
    )  # fmt: skip
    table = Table(
        "comparisons",
        "The second against the first, 95 % intervals; the smallest difference is what these runs could have shown.",
        (
            Column("first", "first"), Column("second", "second"), Column("asked", "differ in"),
            Column("rate", "rate", shown=len(found.noises) > 1),
            Column("first_runs", "runs", "count"), Column("second_runs", "runs", "count"),
            Column("difference", "difference", "change", True), Column("smallest", "smallest", "share"),
            Column("verdict", "verdict"), Column("why", "note"),
        ),
        rows,
    )  # fmt: skip
    lines = []
    if compared := _compared(found):
        lines.append(compared)
    for noise in found.noises:
        rate = _in(noise.rate, found.noises)
        if noise.floor is not None:
            floor, pairs = number(noise.floor, "share"), count(noise.pairs, "pair")
            lines.append(
                f"Noise floor (A/A): 19 of 20 single runs of equal cells differ by less than {floor}{rate} ({pairs} of runs)."
            )
        if noise.drift is not None:
            drift = number(noise.drift, "change")
            lines.append(f"The first cell, run once more at the end, changed by {drift}{rate}.")
    if not rows and study.trains:
        lines.append("Nothing is compared: it takes two sets of usable runs that differ in one thing.")
    pictures = tuple(comparison_figure(found.comparisons, found.noises, names))
    return Section(
        "comparisons", "Which differences are real", tuple(plain(line) for line in lines), pictures, (table,)
    )
