"""What cells cost: parts that add up, windows that count, and what is not known is absent."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.commands import seconds as command
from analysis.console import SafeConsole
from analysis.cost import (
    CellCost,
    from_record,
    has_every_part,
    measuring_seconds,
    merge_key_order,
    parts,
)
from analysis.report.sections.running import together
from benchmarks.record import read_study

DATA = Path(__file__).parent / "data"
TWO_HOSTS = DATA / "h200_net" / "waterfall"


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


REST = {"connect": 0.5, "build": 1.5, "first step": 1.0, "timed": 3.0, "exit": 1.0}
STARTS = {
    "forked": ({"started": "fork", "began": 13.0}, 12.0, {"settle": 2.0, "spawn": 1.0, "context": 1.0}),
    "anew": (
        {"started": "exec", "began": 11.0, "imported": 13.5}, None, {"spawn": 1.0, "imports": 2.5, "context": 0.5},
    ),
    "sampled while they start": ({"started": "fork", "began": 11.0}, 12.0, {"spawn": 1.0, "context": 3.0}),
    "of an earlier Ringside": ({"started": "fork"}, 12.0, {"settle": 2.0, "start": 2.0}),
}  # fmt: skip


@pytest.mark.parametrize(("start", "settled_at", "expected"), STARTS.values(), ids=STARTS)
def test_parts_add_up_to_the_wall_time_however_ranks_start(start, settled_at, expected):
    found = parts(rank_zero(**start), settled_at, 10.0, 21.0)
    assert found == expected | REST
    assert list(found) == [*expected, *REST]  # both phases of one name together
    assert sum(found.values()) == 11.0
    assert has_every_part(rank_zero(**start)) == ("began" in start)


def test_on_cpu_workers_there_is_no_context():
    lines = [
        line("start", 14.0, device="cpu", started="fork", began=13.0),
        line("phase", 15.0, phase="build"),
    ]
    assert parts(lines, None, 10.0, 16.0) == {"spawn": 4.0, "connect": 1.0, "build": 1.0}


FORKED = rank_zero(started="fork", began=13.0)
FAILED = [
    ([], {"start": 11.0}),
    (FORKED[:4], {"spawn": 3.0, "context": 1.0, "connect": 0.5, "build": 0.5, "first step": 1.0, "timed": 5.0}),
    ([*FORKED[:2], line("error", 14.75)],
     {"spawn": 3.0, "context": 1.0, "connect": 0.5, "build": 0.25, "exit": 6.25}),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), FAILED)
def test_a_cell_that_failed_has_the_parts_that_it_came_to(lines, expected):
    assert parts(lines, None, 10.0, 21.0) == expected


def test_times_that_lie_outside_the_cell_take_nothing_from_it():
    found = parts(rank_zero(started="fork", began=9.0), 9.5, 13.0, 17.0)
    assert found == {"context": 1.0, "connect": 0.5, "build": 0.5, "first step": 1.0, "timed": 1.0}


def block(time, ms, purpose="timed"):
    return line("block", time, purpose=purpose, host_ms=ms)


def test_windows_count_once_on_whatever_rank_and_not_before_measuring_begins():
    begin = [block(1, 900, "first"), block(2, 500, "warm-up")]
    first = [*begin, block(4, 1000), block(6, 500, "with exchange")]
    other = [*begin, block(4.25, 1000), block(7, 250, "add host")]
    assert measuring_seconds({0: first, 1: other}) == pytest.approx(1.25 + 0.5 + 0.25)
    others = [line("held", 8, ms=[100, 150]), line("solves", 10, seconds=[0.5, 0.25])]
    assert measuring_seconds({0: others}) == pytest.approx(0.25 + 0.75)
    exchanges = [{"ms": [10, 20], "bytes": 8}, {"ms": [70], "bytes": 64}]
    calibration = [
        line("timeline", 2, update_ms=[50, 60], ready_ms=[[1, 2], [3, 4]]),
        line("bucket_exchange", 4, rows=exchanges),
    ]
    assert measuring_seconds({0: calibration}) == pytest.approx(0.11 + 0.1)
    assert measuring_seconds({0: first[:2]}) is None


def test_windows_whose_length_no_line_tells_are_not_known():
    old, new = line("window", 4, us=12.5), line("window", 4, us=12.5, window_ms=250)
    assert measuring_seconds({0: [new, block(6, 500)]}) == pytest.approx(0.75)
    assert measuring_seconds({0: [old, block(6, 500)]}) is None
    values = (None, "5", [5], -5, float("nan"), float("inf"), 10**400, True)
    strange = [block(4, value) for value in values]
    strange += [line("held", 5, ms="x"), line("solves", 6, seconds=[1e308] * 9)]
    assert measuring_seconds({0: strange}) is None


def costs(capsys, study):
    """What `python -m analysis seconds STUDY --json` prints of its cells."""
    assert main(["seconds", str(study), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["cells"]


def test_a_recorded_study_is_cut_as_far_as_its_lines_go(capsys):
    """Worked out by hand from the lines of the cell of two H200s as two hosts."""
    cells = costs(capsys, TWO_HOSTS)
    cell = cells[-1]
    assert cell["cell"] == "resnet50 · hierarchical · a+b · 2 × gpus 0"
    by_hand = {
        "settle": 0.21, "start": 0.81, "connect": 0.03, "build": 0.17, "first step": 3.36, "warm-up": 2.60, "check": 0.61,
        "timed": 4.10, "compare": 0.14, "held": 0.33, "exchange": 1.36, "references": 1.92, "exposed": 4.34, "exit": 0.44,
    }  # fmt: skip
    assert cell["parts"] == pytest.approx(by_hand, abs=0.006)
    assert list(cell["parts"]) == list(by_hand)
    # Two timed windows, the exchange, two references, eight windows of A B B A, and three held steps.
    in_windows = (2044.9 + 2043.2) + 1258.5 + (1066.2 + 662.2) + (4 * 543.5 + 4 * 490.1) + 181.5
    assert cell["measuring_seconds"] == pytest.approx(in_windows / 1e3, abs=0.01)
    assert cell["overhead_ratio"] == pytest.approx(20.413 / 11.391, abs=0.01)
    for cell in cells:
        assert sum(cell["parts"].values()) == pytest.approx(cell["seconds"], abs=0.001)
    records, _ = read_study(TWO_HOSTS)
    assert [from_record(record) for record in records] == [None] * 9, "their records state nothing"


def test_a_study_without_raw_lines_has_its_seconds_alone(capsys):
    for cell in costs(capsys, DATA / "h200_x4" / "strategies"):
        assert cell["seconds"] > 10
        assert {"parts", "measuring_seconds", "overhead_ratio"}.isdisjoint(cell)
    assert main(["seconds", str(DATA / "h200_x4" / "strategies")]) == 0
    assert "34.19" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(width, capsys, monkeypatch):
    monkeypatch.setattr(command, "console", lambda: SafeConsole(width=width))
    assert main(["seconds", str(TWO_HOSTS)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    numbers = re.findall(r"(?<![\d.])\d+\.\d\d(?![\d.])", out)
    assert {"18.07", "22.20", "12.85", "1.73"} <= set(numbers)


@pytest.mark.parametrize(
    ("study", "said"),
    [
        (DATA / "nowhere", "no such folder"),
        (DATA / "topo_h200_x4.txt", "is no folder"),
        (DATA / "screens", "holds no record"),
        (DATA / "h200_net", "holds 3 studies (allreduce, servers and waterfall); accepted is one"),
    ],
)
def test_what_is_no_study_is_one_line_and_status_2(study, said, capsys):
    assert main(["seconds", str(study)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"python -m analysis seconds: {study}: ") and said in err


def test_damaged_tables_and_lines_cost_only_what_they_hold(tmp_path, capsys):
    study = shutil.copytree(TWO_HOSTS, tmp_path / "study")
    first, second = sorted(path for path in study.iterdir() if path.is_dir())[:2]
    (second / "ranks" / "0.jsonl.gz").write_bytes(b"\x1f\x8bno gzip")
    content = json.loads((first / "record.json").read_text())
    for rows in ([{"part": "spawn", "seconds": 1.0}], [{"part": "spawn"}], 5):
        content["tables"]["seconds"] = {"rows": rows}
        (first / "record.json").write_text(json.dumps(content))
        with_parts = {cell["record_id"]: "parts" in cell for cell in costs(capsys, study)}
        if rows == [{"part": "spawn", "seconds": 1.0}]:
            assert list(with_parts.values()).count(False) == 1
            assert with_parts[content["record_id"]], "by its lines"
        else:
            assert content["record_id"] not in with_parts, "a damaged record is none"


def test_what_stands_together_in_the_report_adds_up_too():
    lines = rank_zero(started="exec", began=11.0, imported=13.5)
    cost = CellCost(11.0, parts(lines, None, 10.0, 21.0), 2.5)
    assert together(cost) == {
        "start": 6.0, "first step": 1.0, "measured": 2.5, "checks and gaps": 0.5, "end": 1.0,
    }  # fmt: skip
    unknown = CellCost(11.0, cost.parts, None)
    assert together(unknown)["checks and gaps"] == 3.0 and unknown.ratio is None
    assert unknown.metrics == {"cell/seconds": 11.0}
    set_back = CellCost(-2.0, {}, 1.0)  # its clock was
    assert set_back.metrics == {"cell/measuring_seconds": 1.0}


def test_names_come_in_the_order_of_every_row():
    longest = ("spawn", "imports", "build", "timed", "exit")
    rows = [("spawn", "build", "exit"), longest, ("settle", "spawn")]
    order = merge_key_order([dict.fromkeys(row, 1.0) for row in rows])
    assert order == ["settle", "spawn", "imports", "build", "timed", "exit"]
    for row in rows:
        assert all(order.index(a) < order.index(b) for a, b in itertools.pairwise(row))
