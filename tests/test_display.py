"""What a person sees of a sweep: whole numbers at any width, causes, plain lines."""

import dataclasses
import io
import shutil
from pathlib import Path

import pytest
from build import changed_cell
from rich.console import Console

from analysis.report.cell_numbers import COLUMNS, first_number, margin
from analysis.report.numbers import THIN
from analysis.study.study import Study
from benchmarks.record import CellFolder, Failure, Validity, read_study
from launch.display import screen
from launch.display.closing_summary import doubts, exit_status, print_summary
from launch.display.columns import BAR, DISPENSABLE, verdict
from launch.display.screen import Screen, duration
from launch.plan.order import PlannedCell
from launch.study.study_folder import StudyFolder
from launch.supervision.watch import Watch

DATA = Path(__file__).parent / "data" / "h200_x4"


def records(study):
    """What 4 H200s gave."""
    measured, unreadable = read_study(DATA / study)
    assert measured and not unreadable
    return measured


def console(width=120, height=30, terminal=True):
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=terminal, color_system=None,
        highlight=False, soft_wrap=True, legacy_windows=False,
    )  # fmt: skip


def watch(phase, iterations, *lines):
    seen = Watch(CellFolder(Path("nowhere")), 2)
    for rank in seen.ranks:
        for line in ({"kind": "beat", "phase": phase, "iterations": iterations}, *lines):
            seen._take(rank, line)
    return seen


def drawn(screen):
    """The lines of the table as it stands now."""
    paper = console(screen.console.width, screen.console.height)
    paper.print(screen._draw(), soft_wrap=False)
    lines = [line.rstrip() for line in paper.file.getvalue().splitlines()]
    assert all(len(line) <= screen.console.width for line in lines), lines
    return lines


def open_screen(measured, width=120, height=30, terminal=True):
    cells = [PlannedCell(record.cell, record.drift) for record in measured]
    return Screen(cells, [], console(width, height, terminal))


def settled(measured, width, terminal=True):
    """A screen with all cells settled, and the lines of its last table."""
    screen = open_screen(measured, width, terminal=terminal)
    with screen:
        for number, record in enumerate(measured):
            screen.settle(number, record.state, record)
    return screen, drawn(screen)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time that stands still until it is moved."""
    now = [1000.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    return now


def test_a_wide_terminal_has_every_number():
    _, lines = settled(records("settings"), 120)
    assert lines[0].startswith("GPUs  P2P_LEVEL  ALGO  state ")
    assert lines[0].endswith("images/s        ±  per GPU  exchange ms  exchange GB/s  validity")
    assert " ".join(lines[1].split()) == "0,3 LOC – finished 9,125 one run 4,563 3.84 26.6 valid"
    line = "9,352  one run    4,676        0.453            226  valid: setting_no_effect"
    assert lines[4].endswith(line)
    assert lines[-1] == "8 of 8 runs in 0 s"


@pytest.mark.parametrize("study", ["settings", "scaling", "feet"])
@pytest.mark.parametrize("width", [60, 72, 80, 100, 120])
def test_gpus_state_rate_and_verdict_are_whole_at_every_width(study, width):
    screen, lines = settled(records(study), width)
    for record, line in zip(screen.records, lines[1:], strict=False):
        words = line.split()
        assert ",".join(map(str, record.cell.gpus)) in words and record.state in words
        if record.state == "finished":
            assert f"{record.metrics['throughput/images_per_second']:,.0f}" in words
            numbers, verdict_word, _ = line.partition(record.validity.verdict)
            assert verdict_word and "…" not in numbers.split(record.state)[1]


def test_efficiency_is_against_the_baseline_of_the_same_condition():
    _, lines = settled(records("scaling"), 120)
    shares = [line.split("%")[0].split()[-1] for line in lines if line.count("%") == 1]
    assert shares == ["99.5", "99.9", "97.6", "97.4", "99.5", "99.5"]
    assert not any("%" in line for line in lines[1:5])  # one GPU has no efficiency


def test_columns_that_are_the_same_for_all_are_printed_once_and_break_between_words():
    with open_screen(records("settings"), 60) as screen:
        assert "0 of 8 runs in 0 s, about " in drawn(screen)[-1]
    text = screen.console.file.getvalue()
    common = ("model resnet50  benchmark throughput", "batch 256", "precision bf16", "optimize eag")
    assert all(words in text for words in common)
    assert all(len(line) <= 60 for line in text.splitlines() if "resnet50" in line)


def test_a_verdict_is_cut_before_a_number_is():
    codes = ("setting_ignored", "transport_unexpected", "noisy", "throttled")
    invalid = Validity("invalid", dict.fromkeys(codes, "a sentence"))
    measured = [dataclasses.replace(record, validity=invalid) for record in records("settings")]
    lines = {width: settled(measured, width)[1][1] for width in (200, 80, 60)}
    assert lines[200].endswith("invalid: setting_ignored, transport_unexpected, noisy, throttled")
    assert lines[80].endswith("9,125  one run  invalid: setting_ignore…")
    assert "9,125  invalid" in lines[60] and lines[60].endswith("…")


def test_codes_of_cells_that_are_not_valid_are_explained_once():
    first, second, third = records("settings")[:3]
    skipped = dict.fromkeys(("throttled", "foreign_load"), "the GPUs were not sampled")
    against = {"profiled": "a trace was recorded", "noisy": "the interval is wide: ±9%"}
    worse = {"noisy": "the interval is wide: ±20%", "wrong_gpu": "another GPU"}
    validities = [
        Validity("suspect", against),
        Validity("invalid", worse),
        Validity("valid", {}, skipped, not_applicable={"wrong_gpu": "CPU workers have no GPU"}),
    ]
    pairs = zip((first, second, third), validities, strict=True)
    judged = [dataclasses.replace(record, validity=validity) for record, validity in pairs]
    judged.append(dataclasses.replace(third, state="failed", validity=validities[1]))
    named = "resnet50 · nccl_allreduce · gpus 0,3"
    assert doubts(judged) == [
        ("✗ 3 runs: 1 invalid, 1 suspect, 1 valid", "red"),
        (f"  invalid: {named}: wrong_gpu: another GPU", "red"),
        ("  noisy: the interval is wide: ±9% (and 1 more run)", "yellow"),
        ("  not checked: throttled and foreign_load (the GPUs were not sampled)", "dim"),
    ]
    assert [verdict(one) for one in judged[:3]] == [
        "suspect: profiled, noisy", "invalid: noisy, wrong_gpu", "valid, 2 checks not run",
    ]  # fmt: skip
    several = Validity("suspect", dict.fromkeys("abcde", "a reason"))
    (headline, *lines) = doubts([dataclasses.replace(first, validity=several)] * 3)
    assert headline == ("✗ NOT RELIABLE: all 3 runs suspect", "yellow")
    assert lines == [(f"  {code}: a reason (and 2 more runs)", "yellow") for code in "abcde"]
    assert doubts(records("settings"))[0] == ("✓ all 8 runs valid", "green")


def closing(measured, width=80, finding=()):
    """The lines that a sweep ends with."""
    paper = console(width)
    folder = StudyFolder(DATA.parent / "h200_x2", "strategies", only_read=True)
    print_summary(paper, folder, Study.of(measured), measured, 0, finding, ["report   index.html"])
    return [line.rstrip() for line in paper.file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_sweep_ends_with_a_line_for_each_configuration(width):
    """Medians of 3 runs each, the fastest first; `none` is no rival."""
    measured, _ = read_study(DATA.parent / "h200_x2" / "strategies")
    title, head, *lines = closing(measured, width)[1:]
    assert title == "resnet50 · 2 × H200 · GPUs 0,1 · 3 runs each"
    assert all(len(line) <= width for line in (head, *lines[:8]))
    assert ("exchange GB/s" in head) == (width >= 100) and "against fastest" in head
    rows = [line.split() for line in lines[:8]]
    assert [row[:2] for row in rows[:3]] == [
        ["none", "9,472"], ["kvstore_device", "9,364"], ["nccl_allreduce", "9,339"],
    ]  # fmt: skip
    assert "fastest" not in rows[0] and "fastest" in rows[1]
    assert "−0.28 %, tied" in lines[2] and "−9.8 %, slower" in lines[7]
    assert all(row[-1] == "✓" for row in rows)
    assert lines[8] == "✓ all 25 runs valid (with the drift run)"


def test_each_benchmark_of_a_sweep_has_a_table_of_its_own(tmp_path):
    shutil.unpack_archive(DATA.parent / "tuned_nccl.tar.xz", tmp_path)
    lines = closing(read_study(tmp_path / "tuned_nccl")[0], 80)
    heads = [index for index, line in enumerate(lines) if "H200 · GPUs 0,1" in line]
    assert [lines[index].split(" · ")[0] for index in heads] == ["collectives", "resnet50"]
    first, second = (lines[index + 1].split() for index in heads)
    assert "images/s" in second and "images/s" not in first and "result" in first
    assert "busbw 311 GB/s (310 to 312)" in lines[heads[0] + 2]


def test_the_fastest_of_those_with_repeats_is_not_called_the_fastest():
    measured, _ = read_study(DATA.parent / "h200_x2" / "strategies")
    once = [
        record
        for record in measured
        if record.cell.strategy["name"] != "kvstore_device" or not record.cell.repeat
    ]
    _, _, *lines = closing(once, 100)[1:]
    assert lines[1].startswith("kvstore_device") and "fastest" not in lines[1]
    assert lines[2].startswith("nccl_allreduce") and "fastest repeated" in lines[2]


def test_doubts_stand_beside_the_numbers_that_they_are_about_and_are_said_once():
    measured, _ = read_study(DATA.parent / "h200_x2" / "strategies")
    wrong = Validity("invalid", {"gradient_not_mean": "relative error 1"})
    for index, record in enumerate(measured):
        repeat, strategy = record.cell.repeat, record.cell.strategy["name"]
        if strategy == "cpu_staged" or (strategy == "none" and repeat == 2):
            noisy = {"noisy": f"step time varies: ±{repeat} %"}
            measured[index] = dataclasses.replace(record, validity=Validity("suspect", noisy))
        if strategy == "kvstore_device" and repeat == 1 and not record.drift:
            measured[index] = dataclasses.replace(record, validity=wrong)
            named = record.name
    said = ["Not reliable. Step time varies: ±2 %.", "The answer."]  # the number of repeat 2
    lines = closing(measured, 100, said)
    by_name = {line.split()[0]: line for line in lines if line}
    assert "~9,227" in by_name["cpu_staged"] and "suspect: noisy" in by_name["cpu_staged"]
    assert "9,472" in by_name["none"] and "1 of 3 suspect: noisy" in by_name["none"]
    assert "2 to 3 runs each" in lines[1]
    assert (
        "✗ NOT RELIABLE: 25 runs, the drift run among them: 1 invalid, 4 suspect, 20 valid" in lines
    )
    assert f"  invalid: {named}: gradient_not_mean: relative error 1" in lines
    assert "  noisy: step time varies: ±2 % (and 3 more runs)" in lines
    assert "The answer." in lines and not any("Not reliable" in line for line in lines)
    said = "none is invalid: relative error 1."
    assert said not in closing(measured, 100, [said]), "the reason stands above"
    assert said.replace("1.", "2.") in closing(measured, 100, [said.replace("1.", "2.")])


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (99.0, 101.0, "1.0 %"),
        (48.0, 210.0, "−52 to +110 %"),
        (1.0, 13793.0, "over 1,000 %"),
        (99.999, 100.001, "<0.01 %"),
        (None, None, "one run"),
    ],
)
def test_a_wide_interval_has_both_ends(low, high, text):
    values = {"throughput/images_per_second": 100.0}
    if low is not None:
        values |= {"throughput/ci_low": low, "throughput/ci_high": high}
    assert margin(values).replace(THIN, " ") == text


def test_a_command_is_copied_whole_and_runs_in_doubt_are_measured_again_first(monkeypatch):
    measured, _ = read_study(DATA.parent / "h200_x2" / "strategies")
    command = f"python launch.py -m {20 * 'gpus=all '}waterfall=true"
    finding = ["The answer.", f"To see what costs speed: {command}"]
    lines = closing(measured, 60, finding)
    assert lines[lines.index("To see what costs speed:") + 1] == f"  {command}"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("sys.argv", ["../its checkout/launch.py"])
        started = command.replace("launch.py", "'../its checkout/launch.py'")
        assert f"  {started}" in closing(measured, 60, finding)
    others, own = (
        "stop other programs",
        "remove the cause (python -m analysis explain replicas_differ",
    )
    for doubt, code, remedy, status in (
        ("suspect", "noisy", others, 0),
        ("invalid", "noisy", others, 1),
        ("invalid", "replicas_differ", own, 1),
    ):
        validity = Validity(doubt, {"foreign_cpu": "programs", code: "why"})
        doubted = [dataclasses.replace(record, validity=validity) for record in measured]
        lines = closing(doubted, 60, finding)
        assert "The answer." in lines and not any("waterfall" in line for line in lines)
        assert lines[-1].startswith(f"next     {remedy}") and "resume=false" in lines[-1]
        cell = dataclasses.replace(doubted[0].cell, declared={"strategy": {"sha256": "a"}})
        doubted[0] = dataclasses.replace(doubted[0], cell=cell)
        changed = "the same command measures changed code again"
        assert (changed in closing(doubted, 60, finding)[-1]) == (remedy == own)
        assert exit_status(doubted, False, False, 0, False) == status


def test_the_running_cell_has_its_rate_and_time_left_counts_down(clock):
    """The rate is that of the newest window that each rank reported."""
    measured = records("scaling")[:6]
    block = {"kind": "block", "purpose": "timed", "ms": [50.0, 60.0], "images": 512}
    with open_screen(measured, 80) as screen:
        for number, record in enumerate(measured[:4]):
            screen.settle(number, "finished", record)
        screen.progress(4, watch("timed", 73, block))
        lines = drawn(screen)
        assert next(line for line in lines if "▸ measuring" in line).startswith("0,1,2,3")
        assert next(line for line in lines if "waiting" in line).startswith("0,1 ")
        doing = "run 5: measuring, 73 steps, 9,309 images/s"
        assert lines[-2:] == ["4 of 6 runs in 0 s, about 45 s left", doing]
        for phase, word in (("check", "checking"), ("exposed", "measuring the exchange")):
            screen.progress(4, watch(phase, 1))
            assert drawn(screen)[-1] == f"run 5: {word}, 1 step"
        clock[0] += 10
        assert "6 runs in 10 s, about 35 s left" in drawn(screen)[-2]
        clock[0] += 100  # longer than the estimate: only what follows is left
        assert "about 25 s left" in drawn(screen)[-2]
    assert drawn(screen)[-1] == "4 of 6 runs in 1 min 50 s, 2 not started"


def test_a_failed_cell_names_its_cause():
    measured = records("settings")
    hang = Failure("hang", 1, "rank 1 gave no sign for 60 s, in phase 'timed'")
    stopped = Failure("interrupted", None, "stopped by the user")
    measured[0] = dataclasses.replace(measured[0], state="failed", failure=hang, metrics={})
    measured[1] = dataclasses.replace(measured[1], state="interrupted", failure=stopped, metrics={})
    _, lines = settled(measured, 80)
    assert lines[1].split()[-4:] == ["failed", "hang,", "rank", "1"]
    assert lines[2].split()[-1] == "interrupted"
    assert lines[-1] == "6 of 8 runs in 0 s, 1 failed, 1 interrupted"


def repeats(count):
    first = records("settings")[1]
    cells = [PlannedCell(changed_cell(first.cell, repeat=repeat)) for repeat in range(count)]
    return first, [*cells, PlannedCell(cells[0].cell, drift=True)]


def test_many_cells_scroll_while_running_and_all_that_ran_stay_at_the_end():
    first, cells = repeats(40)
    with Screen(cells, [], console(80, 24)) as screen:
        for number in range(25):
            screen.settle(number, "finished", first)
        screen.progress(25, watch("warm-up", 4))
        lines = drawn(screen)
        assert len(lines) <= 22 and any("▸ warming up" in line for line in lines)
        assert lines[-2].endswith("rows 18–34")
    lines = drawn(screen)
    assert sum("finished" in line and "9,360" in line for line in lines) == 25
    assert not any("waiting" in line for line in lines) and "16 not started" in lines[-1]


def test_what_tells_cells_apart_has_a_column():
    first, cells = repeats(2)
    with Screen(cells, [], console(80)) as screen:
        for number in range(3):
            screen.settle(number, "finished", first)
    lines = drawn(screen)
    start = lines[0].index("repeat")
    assert [line[start : start + 6].strip() for line in lines[1:4]] == ["0", "1", "drift"]
    assert "drift: the first run once more at the end, to show what changed" in lines
    strategies = [{**first.cell.strategy, "bucket_cap_mb": size} for size in (1, 25)]
    cells = [PlannedCell(changed_cell(first.cell, strategy=strategy)) for strategy in strategies]
    with Screen(cells, [], console(100)) as screen:
        lines = drawn(screen)
    assert "bucket_cap_mb" in lines[0] and [line.split()[1] for line in lines[1:3]] == ["1", "25"]


def test_another_benchmark_shows_its_first_number():
    first = records("settings")[1]
    cell = changed_cell(first.cell, benchmark={"name": "p2p"})
    record = dataclasses.replace(first, cell=cell, metrics={"p2p/write_gb_per_s": 377.25})
    next_run = {"p2p/write_gb_per_s_ci_low": 376.5, "p2p/write_gb_per_s_ci_high": 378.0}
    assert first_number(record, next_run) == "write 377 GB/s (376 to 378 for the next run)"
    assert first_number(record, {}) == "write 377 GB/s, one run"
    assert first_number(dataclasses.replace(record, metrics={}), {}) == ""
    _, lines = settled([record], 80)
    assert "images/s" not in lines[0] and "result" in lines[0]
    assert "write 377 GB/s, one run" in lines[1]


def test_plain_lines_where_there_is_no_terminal():
    oom = Failure("oom", 1, "rank [1] ran out of memory")
    failed = dataclasses.replace(records("settings")[0], state="failed", failure=oom, metrics={})
    measured = [records("scaling")[0], records("scaling")[5], failed]
    with open_screen(measured, 80, terminal=False) as screen:
        for number, record in enumerate(measured):
            screen.progress(number, watch("build", 0))
            screen.progress(number, watch("timed", 20))
            screen.settle(number, record.state, record)
    lines = screen.console.file.getvalue().splitlines()
    name = "resnet50 · nccl_allreduce · gpus"
    assert lines[1:] == [
        f"[1/3] {name} 0  started",
        f"[1/3] {name} 0  finished  4,691 images/s  one run  valid",
        f"[2/3] {name} 0,1  started",
        f"[2/3] {name} 0,1  finished  9,371 images/s  one run  4,686 images/s per GPU  "
        "99.9 % efficiency against GPU 0  0.454 ms exchange  225 GB/s exchange  "
        "P2P/CUMEM over NV18  valid",
        f"[3/3] {name} 0,3 · P2P_LEVEL=LOC  started",
        f"[3/3] {name} 0,3 · P2P_LEVEL=LOC  failed  oom, rank 1",
        "    oom: rank [1] ran out of memory",
        "2 of 3 runs in 0 s, 1 failed",
    ]


def test_a_dumb_terminal_gets_a_line_for_each_cell_while_it_runs(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    measured = records("scaling")[:2]
    with open_screen(measured, 60) as screen:
        screen.progress(0, watch("timed", 7))
        screen.settle(0, "finished", measured[0])
        text = screen.console.file.getvalue()
    assert "started" in text and "finished  4,691 images/s" in text and "\x1b" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_the_reference_is_explained_below_its_column(width):
    measured = records("strategies")
    sentence = "reference: the same bytes at the rate of one large transfer, without waiting"
    _, lines = settled(measured, width)
    assert ("of reference speed" in lines[0]) == (sentence in lines) == (width == 200)
    plain, _ = settled(measured, width, terminal=False)
    assert plain.console.file.getvalue().count(sentence) == 1


@pytest.mark.parametrize("width", [80, 180])
def test_cpu_workers_are_not_called_gpus(width):
    on_cpu = []
    for record in records("scaling"):
        cell = changed_cell(record.cell, device="cpu", nccl={})
        on_cpu.append(dataclasses.replace(record, cell=cell))
    screen, lines = settled(on_cpu, width)
    assert "  CPU workers  " in lines[0] and not any("GPU " in line for line in lines)
    assert ("per CPU worker" in lines[0]) == (width == 180)
    parts = [part for number in range(len(on_cpu)) for part in screen._line(number)]
    assert any("images/s per CPU worker" in part for part in parts)


def test_columns_that_can_be_left_out_are_columns_and_durations_read_well():
    assert {*DISPENSABLE} - {BAR} < {*COLUMNS}
    texts = ["0 s", "48 s", "6 min 05 s", "1 h 00 min", "1 h 15 min"]
    assert [duration(seconds) for seconds in (0.4, 48, 365, 3600, 4520)] == texts
