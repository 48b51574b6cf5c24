"""`python -m analysis compare A B [--limit 2%]`: how the same cells of two studies differ.

Its first word is PASS, FAIL or INCONCLUSIVE. Exit status: 0 no regression, 1 a regression, 2 wrong
input, 3 inconclusive (with --limit: a slowdown that large could not have been seen everywhere).
Without --limit an inconclusive comparison is 0, with --strict 3.
"""

import argparse
import contextlib
import itertools
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.markup import escape

from analysis.console import console, print_text
from analysis.findings.baselines import EFFICIENCY
from analysis.findings.between_studies import (
    FAIL,
    INCONCLUSIVE,
    MOST_REPEATS,
    PASS,
    SEVERAL,
    STUDIES,
    CellDifference,
    Differences,
    differences,
    why_apart,
)
from analysis.findings.communication import EXCHANGE
from analysis.report.numbers import central, estimate, number
from analysis.report.section import words_of
from analysis.report.sections.studies_section import differences_table, facts_table, plain_number
from analysis.report.sections.studies_section import unit_of as unit_of_metric
from analysis.report.table import Column, Table
from analysis.study.draws import scaled
from analysis.study.measured_numbers import FASTER, SLOWER, UNKNOWN
from analysis.study.names import BETWEEN, of_unit, short_names, unit_of
from analysis.study.study_inputs import CODE, StudyInput, StudyPath, differing, open_inputs
from analysis.text import count, first_lines, join_words, markdown, single_line
from analysis.validity.checks import LOADED
from analysis.verification.verify_study import QuickCheck
from benchmarks.record.metrics import entry_of

MOST_ROWS = 20
LIMIT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)")
WORDS = {FAIL: "slower", INCONCLUSIVE: "inconclusive", PASS: "passed"}  # the worst first
STATUS = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}
MARKS = {PASS: "✓", FAIL: "✗", INCONCLUSIVE: "○"}
EMOJI = str.maketrans({"✓": "✅", "✗": "❌", "○": "⚠️"})
STYLES = {"✓": "", "✗": "bold red", "○": "bold yellow"}  # of rows
WIDE, NARROW = 100, 80  # columns of a terminal with room for DISPENSABLE, for what detects says
DISPENSABLE = ("runs", "verdict")
Sides = Sequence[Sequence[StudyInput]]  # the studies of A, and those of B
NOT_IN_TURN = (
    "A and B were measured at different times: a drift of heat, clocks or other jobs looks like a "
    "difference."
)
ONCE_MORE = (
    "To cancel such a drift, measure {study} again: {study}'s command on {study}'s code, with "
    "repeats={repeats}."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    for name in ("a", "b"):
        folder = "the folder of a study; LABEL=FOLDER gives it a name"
        add(name, metavar=name.upper(), help=folder)
    limit = (
        "ignore slowdowns below this share, such as 2%% (default: report every significant one). "
        "Exit status: 0 pass, 1 regression, 2 usage error, 3 inconclusive: the runs could not have "
        "shown a slowdown of this size"
    )
    add("--limit", metavar="SHARE", help=limit)
    add("--strict", action="store_true", help="exit status 3 if inconclusive, without --limit too")
    add("--github", action="store_true", help="print Markdown for a job summary or a comment")
    add("--junit", metavar="FILE", type=Path, help="write the outcomes as JUnit XML too")


def run(arguments: argparse.Namespace) -> int:
    """Print how two studies differ and return the exit status. Raises OSError, ValueError."""
    match = LIMIT.fullmatch((arguments.limit or "0").strip())
    limit = -1.0
    if match:
        limit = float(match[1]) / (100 if match[2] else 1)
    if not 0 <= limit < 1:
        raise ValueError(
            f"--limit {arguments.limit}: expected a percentage below 100% or a fraction below 1, "
            "such as 2% or 0.02"
        )
    inputs = [StudyPath.of(text) for text in (arguments.a, arguments.b)]
    for study in inputs:
        if study.folder.is_file():
            raise ValueError(f"{study.folder}: is a file; expected the folders of two studies")
    sides = open_inputs(inputs, QuickCheck().marked)
    result = differences(*sides)
    if not result.cells:
        raise ValueError(_nothing_common(arguments, sides, result))
    outcome = result.outcome(limit)
    with contextlib.suppress(BrokenPipeError):  # head has read enough, and the status counts
        if arguments.json:
            print(json.dumps(_as_json(sides, result, limit)))
        else:
            _print(sides, result, limit, arguments.github)
    if arguments.junit:
        _write_junit(arguments.junit, result, limit)
    if outcome == INCONCLUSIVE and not limit and not arguments.strict:
        return 0
    return STATUS[outcome]


def _nothing_common(arguments: argparse.Namespace, sides: Sides, result: Differences) -> str:
    line = f"{arguments.a} and {arguments.b} have no usable configuration in common: "
    for name, why in {**result.only_first, **result.only_second}.items():
        if why:
            return f"{line}of {name} one study has no usable run ({why}); measure it again"
    studies = shlex.join([arguments.a, arguments.b])
    return (
        f"{line}{why_apart(*sides)}; to see both side by side: python -m analysis report {studies}"
    )


def _apart(sides: Sides, result: Differences) -> dict[str, list[str]]:
    apart, _ = differing([*sides[0], *sides[1]])
    for name, (first, second) in result.facts.items():
        apart[name] = [first] * len(sides[0]) + [second] * len(sides[1])
    return apart


def _as_json(sides: Sides, result: Differences, limit: float) -> dict[str, Any]:
    """Return everything in plain JSON types: shares of one, the second minus the first."""
    inputs = []
    for side in sides:
        facts = []
        for study in side:
            folder = str(study.folder)
            facts.append({"name": study.name, "study": study.study.name, "folder": folder})
        inputs.append(facts)
    _, shared = differing([*sides[0], *sides[1]])
    apart = _apart(sides, result)
    cells, regressions = [], 0
    verdicts: Counter[str] = Counter()
    for cell in result.cells:
        cells.append(_cell_json(cell, limit))
        regressions += cell.is_regression(limit)
        verdicts[cell.verdict] += 1
    return {
        "a": inputs[0],
        "b": inputs[1],
        "differs": apart,
        "shared": shared,
        "in_turn": result.in_turn,
        "limit": limit,
        "outcome": result.outcome(limit),
        "regressions": regressions,
        "verdicts": dict(verdicts),
        "cells": cells,
        "only_a": _alone(result.only_first),
        "only_b": _alone(result.only_second),
    }


def _cell_json(cell: CellDifference, limit: float) -> dict[str, Any]:
    numbers = []
    for side in (cell.first, cell.second):
        values = {}
        for name, measured in side.items():
            values[name] = {"value": float(measured.plain), "runs": measured.runs}
        numbers.append(values)
    steps = {}
    for name, step in cell.steps.items():
        unit = unit_of_metric(name)
        if step.logarithm:
            unit = "share of a"
        steps[name] = asdict(step.estimate()) | {"unit": unit}
    return {
        "cell": cell.name,
        "gpus": list(cell.gpus),
        "metric": cell.metric,
        "change": asdict(cell.change) if cell.change is not None else None,
        "verdict": cell.verdict,
        "smallest": cell.smallest,
        "regression": cell.is_regression(limit),
        "outcome": cell.outcome(limit),
        "repeats_needed": cell.repeats_for(limit),
        "why": cell.why,
        "doubts": cell.doubts(),
        "a": numbers[0],
        "b": numbers[1],
        "differences": steps,
    }


def _print(sides: Sides, result: Differences, limit: float, in_markdown: bool) -> None:
    out, outcome = console(), result.outcome(limit)
    mark = MARKS[outcome]
    headline, *parts = _parts(sides, result, limit, WIDE if in_markdown else out.width)
    if in_markdown:
        blocks = [f"### {mark} {outcome} {markdown(headline, 600)}"]
        for part in parts:
            if isinstance(part, Table):
                blocks.append(part.to_markdown(MOST_ROWS))
            else:
                blocks.append(markdown(part, 600))
        print("\n\n".join(blocks).translate(EMOJI))
        return
    style = STYLES[mark] or "bold green"
    print_text(f"[{style}]{outcome}[/] {escape(str(headline))}")
    for part in parts:
        if not isinstance(part, Table):
            print_text(escape(part))
            continue
        table = part.to_rich(MOST_ROWS)
        for values, row in zip(part.rows, table.rows, strict=False):
            row.style = STYLES.get(str(values[0]), "")
        for column in table.columns:
            column.no_wrap = column.justify == "right"
        out.print(table)


def _parts(sides: Sides, result: Differences, limit: float, width: int) -> list[str | Table]:
    def rank(cell: CellDifference) -> tuple[float, float]:
        change = cell.change.value if cell.change is not None else 0.0
        return [*WORDS].index(cell.outcome(limit)), change

    cells = sorted(result.cells, key=rank)
    names = short_names(cell.name for cell in cells)
    parts: list[str | Table] = [_headline(sides, cells, limit, result.outcome(limit))]
    outcomes = Counter(cell.outcome(limit) for cell in cells)
    numbers = [f"{outcomes[outcome]:,} {WORDS[outcome]}" for outcome in WORDS if outcomes[outcome]]
    if len(cells) > 1:
        parts.append(f"{count(len(cells), 'common configuration')}: {', '.join(numbers)}.")
    words = words_of(sides[0][-1].study)
    reasons: dict[str, list[str]] = {}
    for cell in cells[1:]:  # the headline has that of the first
        if cell.outcome(limit) == INCONCLUSIVE:
            name = words(_on_gpus(names[cell.name]))
            reasons.setdefault(_reason(cell, limit), []).append(name)
    lines = [f"Inconclusive, {why}: {join_words(of_one, 3)}." for why, of_one in reasons.items()]
    parts += [*first_lines(lines, 3), *_environment(sides, result)]
    shown = [cell for cell in cells if cell.outcome(limit) != PASS or cell.verdict == FASTER]
    shown = shown or cells  # those without a difference only if all are
    parts += [_table(shown, limit, width).translated(words), *_beside(shown)]
    hidden = len(cells) - min(MOST_ROWS, len(shown))
    if hidden:
        parts.append(f"Not shown: {count(hidden, 'configuration')} (--json has all).")
    parts += first_lines([f"{cell.name}: {cell.doubts()}." for cell in cells if cell.doubts()], 3)
    for letter, alone in (("A", result.only_first), ("B", result.only_second)):
        if alone:
            parts.append(f"Only in {letter}: {join_words(_alone(alone), 3)}.")
    if not result.in_turn:
        parts.append(NOT_IN_TURN)
        study, repeats = result.again
        if study:
            parts.append(ONCE_MORE.format(study=study, repeats=repeats))
    return parts


def _environment(sides: Sides, result: Differences) -> Iterator[str | Table]:
    letters = []
    for letter, side in zip("AB", sides, strict=True):
        for study in side:
            letters.append(letter)
            number_of = count(len(study.study.runs), "configuration")
            yield f"{letter}: {study.name}  ({study.folder}, {number_of})"
    rest = _apart(sides, result)
    changed = [name for name in rest if name.startswith(CODE)]
    for name in changed:
        del rest[name]
        yield f"{name} changed"
    if rest:
        yield facts_table(rest, letters)
    elif not changed and not any(SEVERAL in cell.why for cell in result.cells):
        yield "Environment and code: identical."


def _table(cells: Sequence[CellDifference], limit: float, width: int) -> Table:
    table = differences_table(cells, "cells", "B against A", STUDIES)
    columns = [Column("outcome", "")]
    hidden = DISPENSABLE if width >= NARROW else (*DISPENSABLE, "smallest")
    for column in table.columns:
        if width < WIDE:
            heading = column.heading.replace(" ", "\n", 1)
            column = replace(column, heading=heading, shown=column.key not in hidden)
        columns.append(column)
    rows = []
    for cell, row in zip(cells, table.rows, strict=True):
        rows.append((MARKS[cell.outcome(limit)], *row))
    return replace(table, columns=tuple(columns), rows=tuple(rows))


def _beside(cells: Sequence[CellDifference]) -> list[str]:
    lines = []
    for cell in cells:
        parts = []
        for metric in (EFFICIENCY, EXCHANGE):
            if metric in cell.steps and metric != cell.metric and cell.verdict in (SLOWER, FASTER):
                numbers = [plain_number(metric, side[metric]) for side in (cell.first, cell.second)]
                unit = entry_of(metric).unit.strip("%")
                parts.append(f"{entry_of(metric).title}: {' → '.join(numbers)} {unit}".strip())
        if parts:
            lines.append(f"{cell.name}: {'; '.join(parts)}.")
    return first_lines(lines, 3)


def _headline(sides: Sides, cells: Sequence[CellDifference], limit: float, outcome: str) -> str:
    """Return what follows the outcome: the first cell, which is the worst, or what was passed."""
    worst, size = cells[0], f"{100 * limit:g} %"
    if outcome == PASS:
        slowdown = f"slowdown of {size}" if limit else "significant slowdown"
        judged = [cell for cell in cells if cell.smallest is not None]
        details = []
        sizes = sorted(cell.smallest or 0.0 for cell in judged if cell.verdict != FASTER)
        if sizes:
            ends = dict.fromkeys((number(sizes[0], "share"), number(sizes[-1], "share")))
            details.append(f"these runs detect {' to '.join(ends)} or more")
        if len(sizes) < len(judged):
            details.append(f"{len(judged) - len(sizes)} faster")
        return f"no {slowdown} in {count(len(judged), 'configuration')} ({'; '.join(details)})"
    if worst.outcome(limit) == PASS:
        return "not every configuration is usable in both studies"
    name = _on_gpus(short_names(cell.name for cell in cells)[worst.name])
    line = of_unit(name, unit_of(sides[0][-1].study))
    if outcome == INCONCLUSIVE and worst.all_suspect and worst.verdict in (SLOWER, FASTER):
        assert worst.change is not None
        change = scaled(worst.change, math.copysign(1, worst.change.value))
        line += f" is {estimate(change, 'share')} {worst.verdict} on B, but {_reason(worst, limit)}"
    elif outcome == INCONCLUSIVE:
        line += f": {_reason(worst, limit)}"
    else:
        line += f": {central(worst.change, 'change')}"
    if limit:
        line += f" (limit {size})"
    return single_line(line, 600)


def _on_gpus(name: str) -> str:
    return name.replace(f"{BETWEEN}gpus ", " on GPUs ").replace("gpus ", "GPUs ")


def _reason(cell: CellDifference, limit: float) -> str:
    words = f"these runs detect {number(cell.smallest, 'share')} or more"
    if cell.verdict == UNKNOWN:
        return cell.why
    if cell.all_suspect:
        return _suspect(cell)
    repeats = cell.repeats_for(limit)
    if limit and repeats:
        words += f"; about {repeats} runs on each side would detect {100 * limit:g} %"
    elif limit and cell.smallest is not None:
        words += f"; more than {MOST_REPEATS} runs would be needed: stop other programs"
    return words


def _suspect(cell: CellDifference) -> str:
    against = [cell.against[study] for study in cell.all_suspect]
    codes = dict.fromkeys(itertools.chain(*against))
    studies = "both" if len(cell.all_suspect) > 1 else cell.all_suspect[0]
    remedy = f"remove the cause and measure {studies} again with resume=false"
    if LOADED & codes.keys():
        remedy = f"measure {studies} again on an idle machine with resume=false"
    where = " and ".join(cell.all_suspect)
    return f"every run that is compared is suspect in {where} ({', '.join(codes)}): {remedy}"


def _alone(names: Mapping[str, str]) -> list[str]:
    words = []
    for name, why in names.items():
        words.append(f"{name} (the other study's is not usable: {why})" if why else name)
    return words


def _write_junit(path: Path, result: Differences, limit: float) -> None:
    outcomes = [cell.outcome(limit) for cell in result.cells]
    suite = ElementTree.Element("testsuite", name="compare", tests=str(len(outcomes)))
    suite.set("failures", str(outcomes.count(FAIL)))
    suite.set("errors", str(outcomes.count(INCONCLUSIVE)))
    for cell, outcome in zip(result.cells, outcomes, strict=True):
        case = ElementTree.SubElement(suite, "testcase", name=single_line(cell.name))
        if outcome == FAIL:
            ElementTree.SubElement(case, "failure", message=estimate(cell.change, "change"))
        elif outcome == INCONCLUSIVE:
            ElementTree.SubElement(case, "error", message=single_line(_reason(cell, limit)))
    ElementTree.ElementTree(suite).write(path, "utf-8", xml_declaration=True)
