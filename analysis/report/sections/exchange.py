"""benchmark=exchange, the exchange of gradients alone: its sentence."""

from collections.abc import Iterator, Sequence

from analysis.findings.study import middle, named
from analysis.report.measured_values import NAMED, Group
from analysis.report.names import short_names
from analysis.report.numbers import listed, number
from analysis.report.tables import plain


def exchange_sentences(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=exchange: a sentence for each model, its strategies from the fastest on."""
    timed = [(ms, group) for group in groups if (ms := middle(group, "comm/exchange_ms")) is not None]
    for model in sorted({named(group[0], "model") for _, group in timed}):
        parts = []
        its = sorted((pair for pair in timed if named(pair[1][0], "model") == model), key=lambda pair: pair[0])
        names = short_names(group[0].name for _, group in its)
        for ms, group in its:
            name = plain(names[group[0].name] if len(its) > 1 else named(group[0], "strategy"), 80)
            busbw = middle(group, "comm/busbw_gb_per_s")
            parts.append((name, f"{number(ms)} ms" + (f" ({number(busbw)} GB/s busbw)" if busbw else "")))
        (name, time), *others = parts
        if others:
            time = f"is the fastest with {time}; then {listed([' '.join(part) for part in others], NAMED)}"
        yield f"The exchange of {plain(model, 80)} on {on}: {name} {time}."
