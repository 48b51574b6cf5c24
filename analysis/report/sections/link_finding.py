"""The first screen of a study of links: what each benchmark found on most devices, in three sentences at most.

Medians of the runs of equal cells; what stands in brackets behind one are the lowest and the highest run. Records come from
files that anybody may have edited: what is not there is left out.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from analysis.findings.model import Estimate
from analysis.findings.study import Study, mapping, middle, named, run_name, short_names
from analysis.report.numbers import count, estimate, listed, number
from analysis.report.sections.microbenchmarks import PATTERNS
from analysis.report.sections.scaling import unit_of
from analysis.report.tables import plain
from benchmarks.record import Record

Group = tuple[Record, ...]  # runs of equal cells
SENTENCES = 3
NAMED = 4  # cells of one sentence
UNITS = {"_gb_per_s": " GB/s", "_us": " µs", "seconds": " s"}  # by the end of a metric's name


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


def _value(group: Group, metric: str, kind: str = "number") -> str:
    """`377 (375 to 378)`; empty where no run has it."""
    values = [value for record in group if (value := record.metrics.get(metric)) is not None and math.isfinite(value)]
    if not values:
        return ""
    spread = (min(values), max(values)) if len(values) > 1 else (None, None)
    return estimate(Estimate(middle(group, metric) or 0.0, *spread), kind)


def _copies(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=p2p: with peer access and without, then what copies at the same time take from each other."""
    group = groups[0]
    words = mapping(mapping(group[0].tables.get("p2p")).get("words"))
    parts = []
    for state in ("enabled", "disabled"):
        rates = {
            "one way": _value(group, f"p2p/unidirectional_{state}_gb_per_s"),
            "both ways": _value(group, f"p2p/bidirectional_{state}_gb_per_s"),
        }
        told = [f"{rate} GB/s {way}" for way, rate in rates.items() if rate]
        small = _value(group, f"p2p/latency_gpu_{state}_us") or _value(group, f"p2p/latency_cpu_{state}_us")
        if told:
            told += [f"{small} µs for a small one"] if small else []
            parts.append(f"{plain(str(words.get(state, f'P2P {state}')), 80)} {', '.join(told)}")
    if parts:
        yield f"Copies between {on}, the median of pairs: {'; '.join(parts)}."
    kept = [
        f"{what} {total} GB/s in all, of which the worst-off keeps {share} of its rate alone"
        for pattern, what in PATTERNS.items()
        if (total := _value(group, f"p2p/{pattern}_gb_per_s"))
        and (share := _value(group, f"p2p/{pattern}_share", "share"))
    ]
    if kept:
        yield f"Copies at the same time: {'; '.join(kept)}."


def _collectives(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=collectives: the bandwidth of the largest message, the highest first, and the time of the smallest."""
    metric, rows = "collectives/busbw_gb_per_s", []
    for group in groups:
        busbw, small = _value(group, metric), _value(group, "collectives/latency_us")
        if busbw:
            also = f" and {small} µs for the smallest" if small else ""
            rows.append((-(middle(group, metric) or 0.0), group, f"{busbw} GB/s{also}"))
    kinds = {str(group[0].cell.benchmark.get("collective", "")) for group in groups}
    (kind,) = kinds if len(kinds) == 1 else ("",)
    what = f"{plain(kind, 80)} " if kind else ""
    yield from _ordered(f"Busbw of the largest {what}message on {on}", rows)


def _halos(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=jacobi: the fastest exchange first; on one device how near the stencil is to a copy."""
    metric, rows = "jacobi/seconds", []
    for group in groups:
        speedup, efficiency = _value(group, "jacobi/speedup"), _value(group, "jacobi/efficiency", "share")
        copy = _value(group, "jacobi/copy_share", "share")
        also = f", {speedup} times as fast as one, efficiency {efficiency}" if speedup and efficiency else ""
        also = also or (f", the stencil at {copy} of a copy's rate" if copy else "")
        if seconds := _value(group, metric):
            rows.append((middle(group, metric) or 0.0, group, f"{seconds} s{also}"))
    yield from _ordered(f"Jacobi on {on}", rows)


def _ordered(what: str, rows: Sequence[tuple[float, Group, str]]) -> Iterator[str]:
    """`what: A; then B and C` of (what they are ordered by, cells, what was found), each with what tells it from the others."""
    if not rows:
        return
    names = short_names(dict.fromkeys(group[0].name for _, group, _ in rows))
    first, *others = (
        said if len(rows) == 1 else f"{_own(names[group[0].name], group[0])} {said}"
        for _, group, said in sorted(rows, key=lambda row: row[0])
    )  # fmt: skip
    yield f"{what}: {first}" + (f"; then {listed(others, NAMED)}." if others else ".")


def _own(name: str, record: Record) -> str:
    """What tells a cell from the others; nothing does where it has the defaults."""
    return plain("as it is" if name == record.name else name, 80)


def _host(groups: Sequence[Group], on: str) -> Iterator[str]:
    """benchmark=host_link: one device at a time, then all at once."""
    parts = []
    for prefix, words in (("one", "one at a time"), ("all", "all at once")):
        told = [
            f"{rate} {what}"
            for name, what in (("to_device", "to it"), ("to_host", "from it"), ("both", "each way at once"))
            if (rate := _value(groups[0], f"host_link/{prefix}_{name}_gb_per_s"))
        ]
        parts += [f"{words} {', '.join(told)}"] if told else []
    if parts:
        yield f"GB/s between the host and {on}: {'; '.join(parts)}."


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
    yield f"{plain(run_name(group[0]))}: {words} {_value(group, first, kind)}{UNITS.get(end, '')}."


def _exchanges(groups: Sequence[Group], on: str) -> Iterator[str]:
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


TOLD: dict[str, Callable[[Sequence[Group], str], Iterator[str]]] = {
    "exchange": _exchanges, "p2p": _copies, "collectives": _collectives, "jacobi": _halos, "host_link": _host,
}  # fmt: skip


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
