"""How an advice is shown: the cells in order, what cannot be told apart, and the commands of cells worth measuring."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from analysis.commands.predicted.notes import print_notes
from analysis.console import console
from analysis.prediction.advice.advice import Advice, RankedCell
from analysis.prediction.advice.beliefs import WORTH
from analysis.prediction.advice.overrides import command
from analysis.prediction.forecast import FEWEST_HELD_OUT, LEVEL, NOT_SCORED, is_scored, too_few
from analysis.prediction.holdout import KnownScores
from analysis.prediction.strategies import exchange_of
from analysis.report.numbers import ABSENT, number
from analysis.study.names import of_unit
from analysis.study.study import Study
from analysis.text import count

_MOST = 10  # cells that are listed


def to_json(study: Study, advice: Advice, known: KnownScores) -> dict[str, Any]:
    """Return the advice of one model."""
    first = advice.first.option.question
    return {
        "model": str(first.workload), "machine": first.machine, "level": LEVEL, "held_out": len(known.of(first)),
        "cells": [_cell(one) for one in advice.ranked],
        "loss_images_per_second": advice.loss,
        "worth_measuring": [
            _cell(one.cell) | {
                "loss_images_per_second": one.loss, "command": command(study, one.cell.option, one.cell.runs)
            }
            for one in advice.next_cells
        ],
        "refused": [{**_asked(option), "why": why} for option, why in advice.refused],
    }  # fmt: skip


def _cell(one: RankedCell) -> dict[str, Any]:
    said = {"images_per_second": one.rate, "low": one.low, "high": one.high, "runs": one.runs}
    said |= {"high_is_bounded": one.bounded}
    chances = {"chance_to_be_fastest": one.fastest, "as_fast_as_the_first": one.as_fast}
    return {**_asked(one.option), **said, **chances}


def _asked(option: Any) -> dict[str, Any]:
    question = option.question
    return {
        "gpus": list(question.members), "strategy": question.strategy, "options": dict(question.options),
        "batch_size": question.batch_size, "nccl": dict(option.nccl), "links": option.links,
    }  # fmt: skip


def print_advice(study: Study, advice: Advice, known: KnownScores) -> None:
    """Print the table, what it says, the commands and the notes."""
    out = console()
    out.print(f"[bold]{escape(str(advice.first.option.question.workload))}[/bold]")
    out.print(_table(advice))
    for line in sentences(advice):
        out.print(line, soft_wrap=True)
    if advice.next_cells:
        out.print("Worth measuring first, the cell that narrows the choice most:")
        for one in advice.next_cells:
            out.print(
                f"  {escape(command(study, one.cell.option, one.cell.runs))}",
                soft_wrap=True,
                highlight=False,
            )
            out.print(
                f"    The choice then loses {number(one.loss, 'rate')} images/s on average.",
                soft_wrap=True,
            )
    for why, option in {why: option for option, why in reversed(advice.refused)}.items():
        out.print(f"Not ranked: {escape(why)}:", soft_wrap=True)
        out.print(f"  {escape(command(study, option, 0))}", soft_wrap=True, highlight=False)
    print_notes([*_machine_note(study, advice), *_notes(advice, known)])


def _table(advice: Advice) -> Table:
    table = Table(box=SIMPLE_HEAD)
    options = _told_apart(advice)
    for heading in ("", f"{advice.first.option.question.unit}s", "strategy", "batch", "NCCL"):
        table.add_column(heading)
    for heading in ("images/s", "90 % interval", "to the first", "chance to be fastest"):
        table.add_column(heading, justify="right")
    table.add_column("from")
    for place, one in enumerate(advice.ranked[:_MOST]):
        question = one.option.question
        shown = ", ".join(f"{name}={value}" for name, value in question.options if name in options)
        settings = ", ".join(
            f"{name.removeprefix('NCCL_')}={value}" for name, value in one.option.nccl
        )
        interval = (
            ABSENT
            if one.low is None
            else f"{number(one.low, 'rate')} to {number(one.high, 'rate')}"
        )
        table.add_row(
            str(place + 1), _gpus(one), escape(" ".join(filter(None, [question.strategy, shown]))),
            str(question.batch_size), escape(settings) or "default", number(one.rate, "rate"), interval,
            number(one.rate / advice.first.rate - 1, "change") + (" ~" if one.as_fast and place else ""),
            number(one.fastest, "share"), count(one.runs, "run") if one.runs else "forecast",
        )  # fmt: skip
    return table


def _gpus(one: RankedCell) -> str:
    question = one.option.question
    more = f" + {count(max(1, question.servers), 'server')}" if _has_own_gpu(one) else ""
    return ",".join(map(str, question.members)) + more


def _has_own_gpu(one: RankedCell) -> bool:
    question = one.option.question
    return exchange_of(question).gpu_servers and not question.shares_gpu


def _told_apart(advice: Advice) -> set[str]:
    """Return the options in which cells of one strategy differ."""
    values: dict[tuple[str, str], set[str]] = {}
    for one in advice.ranked:
        for name, value in one.option.question.options:
            values.setdefault((one.option.question.strategy, name), set()).add(value)
    return {name for (_, name), found in values.items() if len(found) > 1}


def sentences(advice: Advice) -> list[str]:
    """Return what the table says, in words."""
    first, alike = advice.first, [one for one in advice.ranked[1:] if one.as_fast]
    question, rest = first.option.question, len(advice.ranked) - _MOST
    lines = [f"… and {count(rest, 'more cell')} below (--json has all)"] if rest > 0 else []
    said = "measured" if first.runs else "forecast"
    on = f"{question.unit}{'s' if len(question.members) > 1 else ''} {_gpus(first)}"
    batch = (
        f" with batch {question.batch_size}"
        if len({one.option.question.batch_size for one in advice.ranked}) > 1
        else ""
    )
    lines.append(
        f"First is {question.strategy} on {on}{batch}: {number(first.rate, 'rate')} images/s, {said}."
    )
    if len(advice.ranked) == 1:
        return [*lines, "There is nothing else to choose from."]
    lines[-1] += f" The chance that nothing else is faster is {number(first.fastest, 'share')}."
    if alike:
        lines.append(
            f"{count(len(alike), 'cell')} cannot be told from it (~): each is as fast with a chance of 5 % or more."
        )
    else:
        lines.append("Every other cell is slower with a chance of more than 95 %.")
    share = advice.loss / first.rate
    lost = (
        f"{number(advice.loss, 'rate')} images/s on average ({number(share, 'share')})"
        if share > WORTH
        else "hardly anything"
    )
    lines.append(f"Against the fastest, to choose it now loses {lost}.")
    if not advice.next_cells:
        few = "No single cell would narrow the choice by a tenth." if share > WORTH else ""
        lines.append(few or "No further cell is worth measuring for this choice.")
    return lines


def _machine_note(study: Study, advice: Advice) -> list[str]:
    machines = {one.provenance.get("machine", "") for one in study.runs}
    machine = advice.first.option.question.machine
    said = f"the study has cells of {len(machines)} machines: this is for {machine}, where most of them ran"
    return [said] if len(machines) > 1 else []


def _notes(advice: Advice, known: KnownScores) -> Sequence[str]:
    notes = []
    shown = advice.ranked[:_MOST]
    if any(
        not exchange_of(one.option.question).waits and one.option.question.strategy != "none"
        for one in shown
    ):
        notes.append(
            "with an asynchronous strategy ranks do not wait for each other: it trains with older weights"
        )
    if any(_has_own_gpu(one) for one in shown):
        notes.append("a server has a GPU of its own beside those of the ranks")
    if any(one.bounded for one in shown):
        of_compute = f"that of the same {advice.first.option.question.unit}s without any exchange, as measured with its scatter"
        notes.append(f"no upper end is above {of_compute}, nor above twice the rate of its cell")
    said = [
        one.option.question for one in advice.ranked if not one.runs
    ]  # measured ones have the scatter of their runs
    least = min((len(known.of(one)) for one in said if is_scored(one)), default=FEWEST_HELD_OUT)
    if least < FEWEST_HELD_OUT:
        notes.append(too_few(least))
    if any(not is_scored(one) for one in said):
        notes.append(of_unit(NOT_SCORED, advice.first.option.question.unit))
    if any(not one.runs for one in shown):
        alike = f"{advice.first.option.question.unit}s that did not run alone with this model are alike to a forecast"
        notes.append(f"{alike}: one subset stands for all of them")
    return notes
