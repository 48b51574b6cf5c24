"""What was measured of the links themselves: the section that joins the benchmarks' tables, and the first screen's sentences.

Tables come from records, which anybody may have edited: what is not as a benchmark writes it is left out.
"""

from collections.abc import Callable, Iterator, Sequence

from analysis.findings.model import Findings
from analysis.findings.study import Study, named
from analysis.report.measured_values import Group, median_and_range
from analysis.report.names import run_name, unit_of
from analysis.report.numbers import count
from analysis.report.section import Section
from analysis.report.sections.collectives import busbw_figure, collectives_sentences, collectives_table
from analysis.report.sections.exchange import exchange_sentences
from analysis.report.sections.host_link import host_sentences, host_table
from analysis.report.sections.jacobi import jacobi_sentences, jacobi_table
from analysis.report.sections.p2p import contention_table, p2p_sentences
from analysis.report.tables import plain

SENTENCES = 3
UNITS = {"_gb_per_s": " GB/s", "_us": " µs", "seconds": " s"}  # by the end of a metric's name
TOLD: dict[str, Callable[[Sequence[Group], str], Iterator[str]]] = {
    "exchange": exchange_sentences, "p2p": p2p_sentences,
    "collectives": collectives_sentences, "jacobi": jacobi_sentences, "host_link": host_sentences,
}  # fmt: skip


def measured(study: Study, found: Findings) -> Section:
    """Nothing where a study trains only."""
    tables = tuple(
        table
        for table in (host_table(study), collectives_table(study), contention_table(study), jacobi_table(study))
        if table.rows
    )
    return Section("measured", "Links measured alone", (), tuple(busbw_figure(study)), tables)


def sentences(study: Study) -> list[str]:
    """Every strategy of the exchange alone, then each other benchmark in the order in which they ran.

    For a study in which no usable cell counts images.
    """
    said: list[str] = []
    benchmarks = dict.fromkeys(named(record, "benchmark") for record in study.usable)
    for benchmark in sorted(benchmarks, key=lambda name: name != "exchange"):
        groups = [group for group in study.groups if named(group[0], "benchmark") == benchmark]
        most = max(len(group[0].cell.gpus) for group in groups)
        largest = [group for group in groups if len(group[0].cell.gpus) == most]
        on = f"{most} {unit_of(study)}" if most > 1 else f"one {unit_of(study).removesuffix('s')}"
        said += TOLD.get(benchmark, _first_number)(largest, on)
    return said[:SENTENCES] or [nothing(study)]


def _first_number(groups: Sequence[Group], on: str) -> Iterator[str]:
    """Of a benchmark that is not ours."""
    group = groups[0]
    name = named(group[0], "benchmark")
    first = next((metric for metric in group[0].metrics if metric.startswith(f"{name}/")), None)
    if first is None:
        return
    label = first.removeprefix(f"{name}/")
    end = next((end for end in UNITS if label.endswith(end)), "")
    kind = "share" if label.endswith(("share", "efficiency")) else "number"
    words = label.removesuffix(end).replace("_", " ").strip() or "time"
    yield f"{plain(run_name(group[0]))}: {words} {median_and_range(group, first, kind)}{UNITS.get(end, '')}."


def nothing(study: Study) -> str:
    """That no cell gave a number for the first screen."""
    if study.usable:
        cells = count(len(study.usable), "usable cell")
        if len(study.usable) == 1:
            return "The one usable cell of this study measured neither images per second nor a link."
        return f"None of the {cells} of this study measured images per second or a link."
    if len(study.records) == 1:
        return "The one cell of this study gave no number that may be used."
    return f"None of the {count(len(study.records), 'cell')} of this study gave a number that may be used."
