"""The exchange of gradients without training (benchmark=exchange): sentences. Its table is that of the strategies."""

from collections.abc import Iterator, Sequence

from analysis.report.measured_values import Group
from analysis.report.microbenchmarks import NAMED, largest_cells, links_alone
from analysis.report.numbers import number
from analysis.report.section import Section
from analysis.study.estimates import Findings
from analysis.study.names import short_names, spoken
from analysis.study.study import Study, middle, named
from analysis.text import join_words, single_line


def section(study: Study, findings: Findings) -> Section:
    """Return the time of each strategy's exchange."""
    return links_alone(54, _sentences(*largest_cells(study, "exchange")))


def _sentences(groups: Sequence[Group], devices: str) -> Iterator[str]:
    """Yield a sentence for each model: its strategies, the fastest first."""
    timed = [
        (ms, group) for group in groups if (ms := middle(group, "comm/exchange_ms")) is not None
    ]
    for model in sorted({named(group[0], "model") for _, group in timed}):
        cells = sorted(
            (pair for pair in timed if named(pair[1][0], "model") == model),
            key=lambda pair: pair[0],
        )
        names = short_names(group[0].name for _, group in cells)
        parts = []
        for ms, group in cells:
            name = names[group[0].name] if len(cells) > 1 else named(group[0], "strategy")
            name = single_line(spoken(name), 80)
            parts.append((name, f"{number(ms)} ms"))
        (name, time), *others = parts
        if others:
            time = f"took {time}; {join_words([' '.join(part) for part in others], NAMED)}"
        yield f"The exchange of {single_line(model, 80)} on {devices}: {name} {time}."
