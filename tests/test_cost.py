"""What cells cost: parts that add up, windows that count, and what is not known is absent."""

import json
import re
import shutil

import pytest
from build import DATA

from analysis.__main__ import main
from analysis.commands import seconds as command
from analysis.console import SafeConsole
from analysis.cost import CellCost, measuring_seconds, parts
from analysis.report.sections.conditions_section import together

MEASURED = DATA / "h200_x1" / "fastest_long"


def line(kind, time, **content):
    return {"kind": kind, "time": time, **content}


def rank_zero(**start):
    """The lines of a rank 0 that reports at 14 and has its result at 20; its cell began at 10 and ended at 21."""
    phases = [("build", 14.5), ("first step", 15.0), ("timed", 16.0), ("build", 19.0)]
    return [
        line("start", 14.0, device="cuda:0", **start),
        *(line("phase", time, phase=name) for name, time in phases),
        line("result", 20.0),
        line("done", 20.5),
    ]


FORKED = {"started": "fork", "began": 13.0}
REST = {"connect": 0.5, "build": 1.5, "first step": 1.0, "timed": 3.0, "exit": 1.0}
PARTS = {  # (lines of rank 0, first sample of the GPUs, begin and end of the cell, seconds)
    "forked": (
        rank_zero(**FORKED), 12.0, (10.0, 21.0), {"settle": 2.0, "spawn": 1.0, "context": 1.0, **REST},
    ),
    "anew": (
        rank_zero(started="exec", began=11.0, imported=13.5), None, (10.0, 21.0),
        {"spawn": 1.0, "imports": 2.5, "context": 0.5, **REST},
    ),
    "sampled while they start": (
        rank_zero(started="fork", began=11.0), 12.0, (10.0, 21.0), {"spawn": 1.0, "context": 3.0, **REST},
    ),
    "on CPU workers there is no context": (
        [line("start", 14.0, device="cpu", **FORKED), line("phase", 15.0, phase="build")], None,
        (10.0, 16.0), {"spawn": 4.0, "connect": 1.0, "build": 1.0},
    ),
    "failed in a phase": (
        rank_zero(**FORKED)[:4], None, (10.0, 21.0),
        {"spawn": 3.0, "context": 1.0, "connect": 0.5, "build": 0.5, "first step": 1.0, "timed": 5.0},
    ),
    "failed with an error": (
        [*rank_zero(**FORKED)[:2], line("error", 14.75)], None, (10.0, 21.0),
        {"spawn": 3.0, "context": 1.0, "connect": 0.5, "build": 0.25, "exit": 6.25},
    ),
    "times outside the cell take nothing from it": (
        rank_zero(started="fork", began=9.0), 9.5, (13.0, 17.0),
        {"context": 1.0, "connect": 0.5, "build": 0.5, "first step": 1.0, "timed": 1.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "settled_at", "span", "expected"), PARTS.values(), ids=PARTS)
def test_parts_add_up_to_the_wall_time_however_ranks_start_and_end(
    lines, settled_at, span, expected
):
    seconds = parts(lines, settled_at, *span)
    assert seconds == expected
    assert list(seconds) == list(expected), "both phases of one name together"
    assert sum(seconds.values()) == span[1] - span[0]


def block(time, ms, purpose="timed"):
    return line("block", time, purpose=purpose, host_ms=ms)


BEGIN = [block(1, 900, "first"), block(2, 500, "warm-up")]
ONE_RANK = [*BEGIN, block(4, 1000), block(6, 500, "with exchange")]
OLD, NEW = line("window", 4, us=12.5), line("window", 4, us=12.5, window_ms=250)
WINDOWS = {
    "once on whatever rank": (
        {0: ONE_RANK, 1: [*BEGIN, block(4.25, 1000), block(7, 250, "add host")]}, 1.25 + 0.5 + 0.25,
    ),
    "sums of samples": (
        {0: [line("held", 8, ms=[100, 150]), line("solves", 10, seconds=[0.5, 0.25]),
             line("bare", 12, window_ms=125)]}, 0.25 + 0.75 + 0.125,
    ),
    "calibration": (
        {0: [line("timeline", 2, update_ms=[50, 60], ready_ms=[[1, 2], [3, 4]]),
             line("bucket_exchange", 4, rows=[{"ms": [10, 20], "bytes": 8}, {"ms": [70]}])]}, 0.11 + 0.1,
    ),
    "not before measuring begins": ({0: BEGIN}, None),
    "a window with its length": ({0: [NEW, block(6, 500)]}, 0.75),
    "a window without its length": ({0: [OLD, block(6, 500)]}, None),
    "what is no length": (
        {0: [block(4, value) for value in (None, "5", [5], -5, float("nan"), float("inf"), 10**400, True)]
            + [line("held", 5, ms="x"), line("solves", 6, seconds=[1e308] * 9)]}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), WINDOWS.values(), ids=WINDOWS)
def test_windows_count(lines, expected):
    assert measuring_seconds(lines) == (expected and pytest.approx(expected))


def test_what_stands_together_in_the_report_adds_up_too():
    lines = rank_zero(started="exec", began=11.0, imported=13.5)
    cost = CellCost(11.0, parts(lines, None, 10.0, 21.0), 2.5)
    assert together(cost) == {
        "start": 6.0, "first_step": 1.0, "measured": 2.5, "checks_and_gaps": 0.5, "end": 1.0,
    }  # fmt: skip
    unknown = CellCost(11.0, cost.parts, None)
    assert together(unknown)["checks_and_gaps"] == 3.0 and unknown.ratio is None
    assert unknown.metrics == {"cell/seconds": 11.0}
    set_back = CellCost(-2.0, {}, 1.0)  # its clock was
    assert set_back.metrics == {"cell/measuring_seconds": 1.0}


def costs(capsys, study):
    """What `python -m analysis seconds STUDY --json` prints of its cells."""
    assert main(["seconds", str(study), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["cells"]


def test_a_study_has_the_parts_that_its_records_state(capsys):
    for cell in costs(capsys, MEASURED):
        assert sum(cell["parts"].values()) == pytest.approx(cell["seconds"], abs=0.001)
        ratio = cell["seconds"] / cell["measuring_seconds"]
        assert cell["overhead_ratio"] == pytest.approx(ratio)
    for cell in costs(capsys, DATA / "h200_x4" / "strategies"):
        assert cell["seconds"] > 10
        assert {"parts", "measuring_seconds", "overhead_ratio"}.isdisjoint(cell)


@pytest.mark.parametrize("width", [80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(width, capsys, monkeypatch):
    monkeypatch.setattr(command, "console", lambda: SafeConsole(width=width))
    assert main(["seconds", str(MEASURED)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    numbers = set(re.findall(r"(?<![\d.])\d+\.\d\d(?![\d.])", out))
    for cell in costs(capsys, MEASURED):
        assert {f"{cell['seconds']:.2f}", f"{cell['overhead_ratio']:.2f}"} <= numbers


@pytest.mark.parametrize("rows", [[{"part": "spawn", "seconds": 1.0}], [{"part": "spawn"}], 5])
def test_a_damaged_table_costs_only_what_it_holds(rows, tmp_path, capsys):
    study = shutil.copytree(MEASURED, tmp_path / "study")
    first = min(study.glob("*/record.json"))
    content = json.loads(first.read_text())
    content["tables"]["seconds"] = {"rows": rows}
    first.write_text(json.dumps(content))
    others = []
    for cell in costs(capsys, study):
        if cell["record_id"] == content["record_id"]:
            assert "parts" not in cell, "they do not add up"
        else:
            others.append("parts" in cell)
    assert all(others)
