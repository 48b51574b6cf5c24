"""Questions of sweeps (ask=): refusals, the answer from journal and records, and one real sweep."""

import dataclasses
import json
import shutil

import pytest
from build import ROOT, make_cell, run_of

from analysis.findings.examine import findings_of
from analysis.report.build import report_of
from analysis.report.sections.question_section import question
from analysis.study.asked import (
    MOST_RUNS,
    Asked,
    answer,
    is_answered,
    percent,
    questions_of,
    replay,
)
from analysis.study.noise_floor import Scatter
from analysis.study.race import OPEN
from analysis.study.study import open_study
from benchmarks.record import Failure, Validity, read_study
from conf.question import DIFFERS, FASTEST, GAINS, SCALES, Question

REFUSED = [
    (["ask=quickest"], "ask=quickest: expected fastest, differs, scales or gains"),
    (["ask=fastest"], "ask=fastest: there is one candidate, resnet50 · nccl_allreduce · gpus 0,1"),
    (["margin=0%"], "margin=0%: expected a share above 0% and below 100%, as in 1%"),
    (["margin=much"], "margin=much: expected a share above 0% and below 100%"),
    (["budget=soon"], "budget=soon: expected a time, as in 90s, 10min or 1h"),
    (["budget=1s"], "budget=1s: expected "),
    (["noise_pairs=2"], "noise_pairs=2: a question chooses what runs again"),
    (["gpus=0,0+1"], "candidates run on 1 to 2 GPUs or workers; expected rate=per_gpu or"),
    (["ask=scales", "gpus=scale"], "candidates differ in more than their number of GPUs"),
    (["waterfall=true"], "ask=fastest waterfall=true: control runs are not candidates"),
]
TWO = ["-m", "device=cpu", "gpus=0+1", "strategy=nccl_allreduce,cpu_staged", "ask=fastest"]


@pytest.mark.parametrize(("typed", "sentence"), REFUSED)
def test_what_cannot_be_answered_is_refused(launch, typed, sentence):
    names = {text.partition("=")[0] for text in typed}
    asked = TWO
    if typed == ["ask=fastest"]:
        asked = ["-m", "device=cpu", "gpus=0+1"]
    elif typed == ["ask=quickest"]:
        asked = [text for text in TWO if "ask" not in text]
    kept = [text for text in asked if text.partition("=")[0] not in names]
    code, out, err = launch(*kept, *typed, "dry_run=true")
    assert (code, out) == (2, "") and sentence in err, err


def test_what_exchanges_nothing_is_no_candidate_beside_strategies(launch):
    typed = [*TWO[:-2], f"{TWO[-2]},none", TWO[-1], "dry_run=true"]
    code, out, _ = launch(*typed)
    assert (
        code == 0
        and "ask=fastest: measures each of 2 candidates once" in out
        and "strategy=none is left out" in out
    )


def test_repeats_beside_a_question_are_said_to_be_unused(launch):
    code, out, _ = launch(*TWO, "repeats=3", "dry_run=true")
    assert code == 0 and "repeats=3 is not used: ask=fastest repeats each candidate" in " ".join(
        out.split()
    )


def candidates(*names):
    cells = []
    for name in names:
        cells.append(dataclasses.replace(make_cell(), strategy={"name": name}))
    return cells


def asked_of(kind, cells, margin=0.01):
    earlier = {}
    asked = Asked.of(Question(kind, margin), "2" * 32, cells, earlier)
    return dataclasses.replace(asked, earlier=(Scatter(6, 5, 5 * 0.001**2),) * len(cells))


RATES = {
    "nccl_allreduce": [1000.0, 1001.0, 999.5],
    "none": [1003.0, 1002.0, 1003.5],
    "cpu_staged": [700.0, 701.0],
}


def records_of(cells, first=0):
    made = []
    for cell in cells:
        for repeat, rate in enumerate(RATES[cell.strategy["name"]]):
            made.append(run_of(cell, repeat, rate))
    return made[first:]


def test_the_answer_names_the_fastest_what_ties_and_what_is_slower():
    cells = candidates(*RATES)
    done = replay(asked_of(FASTEST, cells), records_of(cells))
    lines = answer(asked_of(FASTEST, cells), done)
    assert is_answered(done)
    assert lines[:2] == [
        "Fastest: none, tied with nccl_allreduce (−0.46 % to +0.063 %). No other is more than 1 % faster than it.",
        "Slower: cpu_staged by 30 %.",
    ]
    assert lines[-1].startswith("5 runs in ") and lines[-1].endswith(
        "Stopping early gives a wrong answer in at most 5 % of cases."
    )


def test_every_candidate_stands_against_the_first():
    cells = candidates(*RATES)
    asked = asked_of(DIFFERS, cells)
    lines = answer(asked, replay(asked, records_of(cells)))
    assert lines[0].startswith("none is as fast as nccl_allreduce within 1 % (")
    assert lines[1].startswith("cpu_staged is slower than nccl_allreduce: its rate is 30 % lower (")


def test_the_largest_number_above_the_limit_is_named():
    cells = [make_cell(gpus) for gpus in ((0,), (0, 1), (0, 1, 2, 3))]
    rates = {1: [1000.0, 1001.0], 2: [1950.0, 1951.0], 4: [3300.0, 3302.0]}
    records = []
    for cell in cells:
        for repeat, rate in enumerate(rates[cell.world_size]):
            records.append(run_of(cell, repeat, rate))
    asked = asked_of(SCALES, cells)
    done = replay(asked, records)
    lines = answer(asked, done)
    assert is_answered(done)
    assert lines[0] == "The efficiency stays above 90 % up to 2 CPU workers (97.5 %)."
    assert lines[1].startswith("With 4 it is 82.5 % (")


def test_a_share_too_small_to_show_has_no_minus():
    assert percent(-4e-6, signed=True) == percent(4e-6, signed=True) == "+0 %"


def test_it_goes_on_where_the_records_end_and_says_what_is_open():
    cells = candidates(*RATES)
    asked, every = asked_of(FASTEST, cells), records_of(cells)
    assert replay(asked, []).pending == (0, 1, 2) and not is_answered(replay(asked, []))
    first = [record for record in every if record.cell.repeat == 0]
    done = replay(asked, first)
    assert set(done.pending) == {0, 1} and not is_answered(done)
    assert answer(asked, done)[0].startswith("Undecided: none leads; ")
    assert "would take about" not in answer(asked, replay(asked, []))[-1]


def test_a_search_whose_leader_has_no_new_run_yet_forecasts_nothing():
    """As after Ctrl-C in the first run of the confirmation."""
    cells = candidates("nccl_allreduce", "none")
    asked = dataclasses.replace(asked_of(GAINS, cells), earlier=(Scatter(),) * 2)
    records = []
    for cell, rates in zip(cells, ([1000.0, 1010.0], [1004.0, 1012.0]), strict=True):
        records += [run_of(cell, repeat, rate) for repeat, rate in enumerate(rates)]
    state = replay(asked, records)
    assert state.pending == (0, 1, 1, 0) and state.last.standings[0].state == OPEN
    lines = answer(asked, state)
    assert lines[0] == "Undecided: none leads the search." and lines[-1].endswith(" s.")


def test_no_more_runs_are_forecast_than_a_candidate_may_have():
    cells = candidates("nccl_allreduce", "none")
    asked = dataclasses.replace(asked_of(FASTEST, cells), earlier=(Scatter(),) * 2)
    for runs, sentence in (
        (4, "the answer would take about 22 more, 23 minutes."),
        (MOST_RUNS - 2, f"{MOST_RUNS} runs of each would not answer it."),
    ):
        records = []
        for cell, faster in zip(cells, (0, 4), strict=True):
            for repeat in range(runs):
                noise = 12 * (-1) ** (repeat // 2)
                records.append(run_of(cell, repeat, 1000.0 + faster + noise))
        assert answer(asked, replay(asked, records))[-1].endswith(sentence)


def test_failures_and_doubts_are_named():
    cells = candidates(*RATES)
    asked, every = asked_of(FASTEST, cells), records_of(cells)
    failed = [run_of(cells[1], 0, 1.0, state="failed", failure=Failure("oom", 0, "", ""))]
    suspect = [run_of(cells[0], 0, 999.0, validity=Validity("suspect", {"noisy": "wide"}, {}))]
    rest = [each for each in every if each.cell.strategy["name"] != "none"][1:]
    lines = answer(asked, replay(asked, failed + suspect + rest))
    assert lines[0] == "Fastest: nccl_allreduce."
    assert "Without a result: none (oom)." in lines
    assert lines[1] == "Checks cast doubt on runs of nccl_allreduce (noisy)."
    assert answer(asked, replay(asked, suspect))[0] == "Not known: every run is suspect (noisy)."


def test_eight_strategies_of_two_gpus_are_ranked_by_half_of_their_runs():
    records, _ = read_study(ROOT / "tests" / "data" / "h200_x2" / "strategies")
    cells = {}
    for record in records:
        cell = dataclasses.replace(record.cell, repeat=0)
        cells.setdefault(cell.key, cell)
    asked = Asked.of(Question(FASTEST, 0.01), "2" * 32, [*cells.values()], {})
    done = replay(asked, records)
    assert (len(records), sum(map(len, done.records))) == (25, 13) and is_answered(done)
    assert answer(asked, done)[0] == "Fastest: none."


def test_a_fuller_comparison_by_another_sweep_is_the_answer(tmp_path):
    """Five runs of each were measured in one more sweep, where the question stopped at 13."""
    folder = shutil.copytree(ROOT / "tests" / "data" / "h200_x2" / "strategies", tmp_path / "s")
    records, _ = read_study(folder)
    cells = {}
    for record in records:
        cell = dataclasses.replace(record.cell, repeat=0)
        cells.setdefault(cell.key, cell)
    own = {record.sweep_id for record in records}
    for sweep_ids, headlines in (({"2" * 32}, False), (own, True)):
        lines = []
        for sweep_id in sweep_ids:
            asked = Asked.of(Question(FASTEST, 0.01), sweep_id, [*cells.values()], {})
            line = {"kind": "question", "time": 1.0, **dataclasses.asdict(asked)}
            lines.append(json.dumps(line) + "\n")
        (folder / "journal.jsonl").write_text("".join(lines))
        study = open_study(folder)
        findings = findings_of(study)
        assert (question(study, findings) is not None) == headlines
        assert report_of(study, findings).finding[0].startswith("Fastest: none.") == headlines


def test_a_question_is_read_from_the_journal_and_a_damaged_one_asks_nothing(tmp_path):
    asked = asked_of(FASTEST, candidates(*RATES))
    lines = [{"kind": "question", "time": 1.0, **dataclasses.asdict(asked)}]
    for damage in ({"question": {"kind": "why"}}, {"sizes": "x"}, {"earlier": [{}]}, {"keys": 3}):
        lines.append(lines[0] | {"sweep_id": str(damage)} | damage)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "journal.jsonl").write_text(text)
    assert questions_of(tmp_path) == {asked.sweep_id: asked}
    older = {name: value for name, value in lines[0].items() if name != "settings"}
    (tmp_path / "journal.jsonl").write_text(json.dumps(older) + "\n")
    assert questions_of(tmp_path) == {asked.sweep_id: dataclasses.replace(asked, settings=())}
