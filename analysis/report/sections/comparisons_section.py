"""Configurations against each other: settings of NCCL, and which differences are significant."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from analysis.findings.comparisons import Comparison, SettingEffect
from analysis.findings.examine import Findings
from analysis.report.main_point import DEFAULTS
from analysis.report.numbers import estimate, number
from analysis.report.section import Section
from analysis.report.table import Column, Table, Value
from analysis.study.conditions import is_of_training
from analysis.study.draws import scaled
from analysis.study.measured_numbers import FASTER, NO_DIFFERENCE, SLOWER
from analysis.study.names import BETWEEN, UNTOUCHED, gpu_ids, short_names
from analysis.study.study import Study
from analysis.text import count, join_words, single_line

VERDICT_WORDS = {NO_DIFFERENCE: "not significant", "": "not tested"}
MOST_MATRICES = 2


def settings(study: Study, findings: Findings) -> Section | None:
    """Return the transport, the exchange and the rate with each setting and without; else None."""
    if not findings.settings:
        return None

    def default(effect: SettingEffect) -> str:
        parts = effect.compared.first.split(BETWEEN)[1:]  # without its GPUs, which have a column
        kept = [part for part in parts if not part.endswith(f" {UNTOUCHED}")]
        return single_line(BETWEEN.join(kept))

    columns = (
        Column("setting", "setting", "setting"),
        Column("difference", "rate changes by", "compared.difference", "change", True),
        Column("verdict", "verdict", lambda row: verdict_word(row.compared.verdict)),
        Column("cell", "against", default),
        Column("gpus", "GPUs", lambda row: gpu_ids(row.compared.gpus)),
        Column("transport_untouched", "transport by default", lambda row: row.transports[0]),
        Column("transport", "transport with it", lambda row: row.transports[1]),
        Column("exchange_ms_untouched", "exchange ms", lambda row: row.exchange_ms[0], "number"),
        Column("exchange_ms", "with it", lambda row: row.exchange_ms[1], "number"),
        Column("exchange_ratio", "times as long", "exchange_ratio", "ratio"),
        Column("rate", "rate", "compared.rate"),
    )
    caption = (
        "Each NCCL setting against NCCL's default; the change of the rate with its 95 % interval."
    )
    table = Table.of("settings", caption, columns, findings.settings)
    lines: tuple[str, ...] = ()
    if not all(effect.compared.verdict for effect in findings.settings):
        lines = ("Not tested: single runs do not show the run-to-run variation.",)
    return Section("settings", "NCCL settings", lines, tables=(table,))


def comparisons(study: Study, findings: Findings) -> Section | None:
    """Return the verdicts, and how far the machine drifted; None without either."""
    pairs = findings.comparisons
    lines = []
    if pairs:
        lines.append(differences(findings))
    rates = {pair.rate for pair in pairs}
    if not all(map(is_of_training, rates)):
        metrics = []
        for rate in study.rates:
            metric = f"1 ÷ {rate.metric}" if rate.is_time else rate.metric
            if rate.name in rates:
                metrics.append(f"{rate.name} ({metric})")
        lines.append(f"Compared: {join_words(metrics)}; more is faster.")
    for name, drift in findings.drifts.items():
        in_rate = f" in {name}" if len(study.rates) > 1 else ""
        lines.append(
            "The first configuration ran once more at the end: its rate changed by "
            f"{number(drift, 'change')}{in_rate}."
        )
    if not lines:
        return None
    lines = list(map(single_line, lines))
    tables = _comparison_tables(study, findings)
    return Section("comparisons", "Which differences are significant", tuple(lines), tables=tables)


class ComparisonRow(NamedTuple):
    """A comparison, and whether people see it in the table; CSV and JSON have every one."""

    pair: Comparison
    is_listed: bool


def _comparison_tables(study: Study, findings: Findings) -> tuple[Table, ...]:
    names = _short_names(findings.comparisons)
    columns = (
        Column("first", "baseline", lambda row: names[row.pair.first]),
        Column("second", "configuration", lambda row: names[row.pair.second]),
        Column("asked", "differ in", "pair.asked"),
        Column("rate", "rate", "pair.rate", shown=len(study.rates) > 1),
        Column(
            "first_runs", "runs of baseline", lambda row: row.pair.runs[0], "count", shown=False
        ),
        Column("second_runs", "runs", lambda row: row.pair.runs[1], "count", shown=False),
        Column("difference", "difference", "pair.difference", "change", True),
        Column("smallest", "detectable", "pair.smallest", "share"),
        Column("verdict", "verdict", lambda row: verdict_word(row.pair.verdict)),
        Column("why", "note", "pair.why"),
    )
    matrices: list[Table] = []
    rows: list[ComparisonRow] = []
    for group in _groups(findings):
        is_judged = any(pair.verdict for pair in group)
        has_matrix = is_judged and len(group) > 2 and len(matrices) < MOST_MATRICES
        if has_matrix:
            matrices.append(_matrix(group, f"matrix-{len(matrices) + 1}"))
        for pair in group:
            is_listed = is_judged and not has_matrix and pair.first_key == group[0].first_key
            rows.append(ComparisonRow(pair, is_listed))
    caption = (
        "Each configuration against its baseline, with the 95 % interval of the difference. "
        "Detectable: the smallest increase that these runs can show (80 % power)."
    )
    table = Table.of("comparisons", caption, columns, rows, shown=lambda row: row.is_listed)
    return (*matrices, table)


def verdict_word(verdict: str) -> str:
    """Return a verdict in the words of the page."""
    return VERDICT_WORDS.get(verdict, verdict)


def _groups(findings: Findings) -> list[list[Comparison]]:
    """Return the pairs that differ in the same thing on the same GPUs, each second against one that
    came before it; the first of the first pair is the baseline.
    """
    groups: dict[Any, list[Comparison]] = defaultdict(list)
    for pair in findings.comparisons:
        same = {name: value for name, value in pair.first_key.items() if name not in pair.differing}
        groups[pair.asked, pair.rate, pair.gpus, frozenset(same.items())].append(pair)
    ordered = []
    for group in groups.values():
        keys = []
        for pair in group:
            keys += [pair.first_key, pair.second_key]
        baseline = next((key for key in keys if DEFAULTS.items() <= key.items()), keys[0])
        against = [pair.swapped() if pair.second_key == baseline else pair for pair in group]
        ordered.append(sorted(against, key=lambda pair: pair.first_key != baseline))
    return ordered


def _matrix(group: Sequence[Comparison], name: str) -> Table:
    ranks: dict[str, float] = defaultdict(float)
    pair_of = {}
    for pair in group:
        ranks[pair.first] -= math.log1p(pair.difference.value)
        ranks[pair.second] += math.log1p(pair.difference.value)
        pair_of[pair.first, pair.second] = pair
        pair_of[pair.second, pair.first] = pair.swapped()
    order = sorted(ranks, key=lambda label: -ranks[label])
    names = _short_names(group)

    columns = [Column("cell", "")]
    for position in range(1, len(order)):
        columns.append(Column(f"against_{position}", f"against {position}", kind="change"))
    rows = []
    for index, second in enumerate(order):
        row: dict[str, Value] = dict.fromkeys((column.key for column in columns), "")
        row["cell"] = f"{index + 1}  {names[second]}"
        for position, first in enumerate(order[:index], 1):
            compared = pair_of.get((first, second))
            if compared is not None and compared.verdict == NO_DIFFERENCE:
                change = number(compared.difference.value, "change")
                row[f"against_{position}"] = f"{change} (n. s.)"
            elif compared is not None:
                row[f"against_{position}"] = compared.difference
        rows.append(row)
    caption = (
        "Each configuration against the faster ones (columns: their numbers), with 95 % "
        "intervals. n. s.: not significant."
    )
    return Table.of(name, caption, columns, rows)


def _short_names(pairs: Sequence[Comparison]) -> dict[str, str]:
    names = []
    for pair in pairs:
        names += [pair.first, pair.second]
    return short_names(names)


def differences(findings: Findings) -> str:
    """Return the largest difference that is significant, and of how many; or that none is."""
    judged, real, least = [], [], []
    for pair in findings.comparisons:
        if pair.verdict:
            judged.append(pair)
            if pair.smallest is not None:
                least.append(pair.smallest)
        if pair.verdict in (FASTER, SLOWER):
            real.append(pair)
    if not findings.comparisons:
        return "No two configurations of this study differ in one option only."
    if not judged:
        pairs = count(len(findings.comparisons), "pair differs", "pairs differ")
        return f"{pairs} in one option only; too few repeats to test the differences."
    if not real:
        line = f"No difference is significant in {count(len(judged), 'comparison')}"
        if least:
            line += f"; each detects an increase of {number(max(least), 'share')} or more"
        return f"{line}."
    largest = max(real, key=lambda pair: abs(pair.difference.value))
    names = _short_names(findings.comparisons)
    first, second = (single_line(names[name], 120) for name in (largest.first, largest.second))
    value = largest.difference.value
    size = estimate(scaled(largest.difference, math.copysign(1, value)), "share")
    line = f"{second} is {size} {largest.verdict} than {first}"
    if len(judged) == 1:
        return f"{line}."
    share = f"{len(real):,} of {len(judged):,} comparisons are significant"
    return f"Largest difference: {line}; {share}."
