"""Who is slow, by the lines of a script's ranks: made ones, two trained ranks, and `observe`."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.findings.slow_rank import GPU, LINK, diagnosis
from benchmarks.record import CellFolder, read_lines
from benchmarks.script.derive import collectives_of_a_step
from conf.schema import Tracking
from launch.__main__ import main
from launch.observe import TIMING, _variables
from launch.tracking.tracker import Tracker

TESTS = Path(__file__).parent
BEFORE, AFTER = "10.0.0.1:5001", "10.0.0.2:5002"
# Moments of a step with two buckets, and the ms that a rank runs before each.
STEP = {
    "optimizer_end": 0, "loader": 1, "loader_end": 2, "forward": 1, "forward:1": 0, "forward:0": 5,
    "backward": 5, "ready:0": 10, "ready:1": 10, "backward_end": 1, "optimizer": 1,
    "optimizer_end ": 2,
}  # fmt: skip
# What the planted rank has more: {moment: (ran, waited for a core, slept) ms before it}.
FAULTS = {
    "loader": {"loader_end": (0, 0, 9)},
    "compute": {"ready:1": (9, 0, 0)},
    "sleep": {"forward": (0, 0, 9)},
    "clock": {name: (ms * 0.4, 0, 0) for name, ms in STEP.items() if name != "backward_end"},
    "foreign load": {"backward": (0, 7, 0), "ready:0": (0, 7, 0)},
}


def lines_of(more=(), rank=0, ranks=2, steps=40, seed=0, shift_s=0, wait_ms=3):
    """The lines of ranks that train alike, of which one has more."""
    draw = random.Random(seed)
    lines = {number: [] for number in range(ranks)}
    for step in range(steps):
        for number in lines:
            moments, at_ms, waited_ms, ran_ms = [], 0.0, 0.0, 0.0
            for name, usual_ms in STEP.items():
                extra = more[name] if number == rank and name in more else (0, 0, 0)
                ran = usual_ms * draw.uniform(0.9, 1.1) + extra[0]
                slept = extra[2] + (wait_ms if name == "backward_end" else 0)
                at_ms += ran + extra[1] + slept
                ran_ms, waited_ms = ran_ms + ran, waited_ms + extra[1]
                if step % 4 == 0 or not name.startswith("forward:"):
                    moments.append([name.strip(), at_ms, waited_ms, ran_ms])
            collectives = [["all_reduce", "0", 3 * step, 4, None, 0.5]]
            collectives.append(["all_reduce", "0", 3 * step + 1, 4000, None, at_ms - 10])
            line = {"kind": "moments", "time": 100 + step + shift_s * number, "step": step}
            line |= {"moments": moments, "collectives": collectives}
            lines[number].append(line)
    for number in lines:
        lines[number].append({"kind": "steps", "time": 0, "samples": [8] * steps})
    lines[0].append({"kind": "layers", "time": 0, "buckets": [["head"], ["stem", "body"]]})
    return lines


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("rank, ranks", [(0, 2), (1, 2), (2, 4)])
def test_rank_part_and_kind_of_a_delay_are_named(kind, rank, ranks):
    seen = diagnosis(lines_of(FAULTS[kind], rank, ranks))
    [delay] = seen.delays
    assert (delay.rank, delay.kind) == (rank, kind)
    assert delay.bucket == (1 if kind == "compute" else None)
    assert delay.ms == pytest.approx(14 if kind in ("foreign load", "clock") else 9, abs=1.5)
    loss = seen.samples_per_s * delay.ms / (seen.step_ms - delay.ms)
    assert delay.samples_per_s == pytest.approx(loss)


def test_a_layer_is_found_in_the_forward_too():
    [delay] = diagnosis(lines_of({"forward:0": (9, 0, 0)})).delays
    assert (delay.kind, delay.part, delay.bucket) == ("compute", "forward", 1)


def test_clean_runs_name_nobody_and_say_what_would_have_been_named():
    for seed in range(10):
        seen = diagnosis(lines_of(ranks=2 + seed % 3, seed=seed))
        assert seen.delays == () and not seen.unjudged
        assert seen.least_ms["compute"] == pytest.approx(0.05 * seen.step_ms, rel=0.5)
    small = {"ready:1": (seen.least_ms["compute"] * 0.5, 0, 0)}
    assert diagnosis(lines_of(small)).delays == ()


def test_clocks_of_hosts_may_differ():
    shifted = diagnosis(lines_of(FAULTS["compute"], shift_s=3))
    assert shifted == diagnosis(lines_of(FAULTS["compute"]))


def test_what_a_rank_sleeps_in_a_collective_is_no_delay_of_its_own():
    assert diagnosis(lines_of({"loader": (0, 0, 9)})).delays == ()


def test_a_rank_that_waits_for_its_core_because_it_runs_longer_computes():
    lines = lines_of({"ready:1": (9, 27, 0)}, 1)
    for line in [*lines[0], *lines[1]]:
        for moment in line.get("moments", ()):  # all wait 3 ms for each that they run
            moment[1] += 3 * moment[3]
            moment[2] += 3 * moment[3]
    [delay] = diagnosis(lines).delays
    assert (delay.rank, delay.kind, delay.bucket) == (1, "compute", 1)


def test_a_link_on_which_all_ranks_wait_is_named_with_both_ends():
    lines = lines_of(wait_ms=60)
    for rank, (here, there) in enumerate(((BEFORE, AFTER), (AFTER, BEFORE))):
        row = [here, there, 12_000_000, 1_000_000 * (2 - rank)]
        lines[rank].append({"kind": "connections", "time": 0, "connections": [row]})
    [delay] = diagnosis(lines).delays
    assert (delay.kind, delay.rank, delay.peer) == (LINK, 0, 1)
    assert delay.part == f"{BEFORE} to {AFTER}, 6 MB/s"
    # Ranks of one host send as much in two thirds of the time: they wait for something else.
    own = [AFTER, AFTER.replace("5002", "5003"), 12_000_000, 1_300_000]
    lines[1].append({"kind": "connections", "time": 0, "connections": [own]})
    assert diagnosis(lines).delays == ()
    own[3] = 400_000
    assert len(diagnosis(lines).delays) == 1
    lines = lines_of(wait_ms=60)
    assert diagnosis(lines).delays == (), "no connection between hosts: it is not said"


# Two H200s train tests/data/own_code/src/resnet50.py; rank 1 multiplies matrices beside its steps.
@pytest.mark.parametrize(
    ("name", "late"), [("clean", []), ("p2p_level_LOC", []), ("slow_rank_1", [(1, GPU, 0)])]
)
def test_on_gpus_the_rank_that_comes_last_to_collectives_is_named(name, late):
    folder = TESTS / "data" / "observed_h200_x2" / name
    lines = {rank: [*read_lines(folder / f"{rank}.jsonl")] for rank in (0, 1)}
    seen = diagnosis(lines)
    assert [(delay.rank, delay.kind, delay.bucket) for delay in seen.delays] == late
    assert seen.least_ms[GPU] < 0.021 * seen.step_ms and not seen.unjudged
    if late:
        assert seen.delays[0].ms == pytest.approx(2.8, abs=0.1)
    for rank in lines:
        for line in lines[rank]:
            line["uuid"] = "GPU-1"
    assert diagnosis(lines).unjudged == "ranks share a GPU"


def on_gpus(ranks, ms_of, steps=200):
    """The lines of ranks on GPUs; `ms_of(step, number, rank)` is how long a collective takes there."""
    lines, draw = lines_of(ranks=ranks, steps=steps), random.Random(1)
    for rank in lines:
        lines[rank].append({"kind": "script_device", "time": 0, "uuid": f"GPU-{rank}"})
        for line in lines[rank][:steps]:
            for number, collective in enumerate(line["collectives"]):
                collective[4] = ms_of(line["step"], number, rank) + draw.uniform(0, 0.3)
    return lines


def test_of_four_gpus_the_late_one_is_named_and_the_others_are_not():
    lines = on_gpus(4, lambda step, number, rank: 14 if number and rank != 2 else 5)
    [delay] = diagnosis(lines).delays
    assert (delay.rank, delay.part, delay.bucket) == (2, "all_reduce", 1)
    assert delay.ms == pytest.approx(9, abs=0.3)
    for rank in lines:  # one more, as of a loss, before those of the two buckets
        for line in lines[rank][:200]:
            line["collectives"].insert(0, ["all_reduce", "0", 3 * line["step"] - 1, 4, 0.1, 0.1])
    assert [each.bucket for each in diagnosis(lines).delays] == [None]


@pytest.mark.parametrize("ranks", [2, 4])
def test_gpus_that_are_late_in_turn_by_their_data_are_not_named(ranks):
    draw = random.Random(2)
    lateness_ms = [[draw.gauss(0, 5) for _ in range(ranks)] for _ in range(200)]

    def waits_for_the_last(step, number, rank):
        return 0 if number else max(lateness_ms[step]) - lateness_ms[step][rank]

    seen = diagnosis(on_gpus(ranks, waits_for_the_last))
    assert seen.delays == () and not seen.unjudged


def test_gpus_are_not_judged_by_collectives_of_several_groups_or_without_times():
    """In a mesh of two by two, who waits for a late rank in its row is late in its column."""
    lines = on_gpus(4, lambda step, number, rank: 9 * (rank != 0))
    for line in itertools.chain(*lines.values()):
        for collective, group in zip(line.get("collectives", ()), "12", strict=False):
            collective[1] = group
    assert "of one group" in diagnosis(lines).unjudged
    for line in itertools.chain(*lines.values()):
        for collective in line.get("collectives", ()):
            collective[1], collective[4] = "0", None
    assert diagnosis(lines).unjudged.endswith("there are 0 steps of 4 ranks")


@pytest.mark.parametrize("change", ["one rank", "few steps", "no collectives", "no buckets"])
def test_what_cannot_be_judged_is_said(change):
    lines = lines_of(steps=10 if change == "few steps" else 40)
    if change == "one rank":
        del lines[1]
    for line in lines[0]:
        if change == "no collectives":
            line["collectives"] = None
        if change == "no buckets" and "moments" in line:
            line["moments"] = [row for row in line["moments"] if not row[0].startswith("ready")]
    seen = diagnosis(lines)
    assert seen.unjudged and seen.delays == ()
    assert seen.samples_per_s > 0
    assert diagnosis({0: [], 1: []}).unjudged == "no step of all ranks was seen"


def test_collectives_are_counted_and_timed_by_the_rank_that_begins_last():
    lines = lines_of(steps=7)
    for rank, step in itertools.product(lines, range(7)):
        for collective in lines[rank][step]["collectives"]:
            collective[4] = 2.0 + rank
    small, large = collectives_of_a_step(lines)
    assert (small["bytes"], large["bytes"], large["calls"], large["ms"]) == (4, 4000, 1, 2)
    assert large["busbw_gb_per_s"] == pytest.approx(4000 / 2e-3 / 1e9)  # 2 (n - 1) / n is 1
    untimed = collectives_of_a_step(lines_of(steps=7))[1]
    assert untimed["ms"] is None and untimed["busbw_gb_per_s"] is None


def test_a_slow_layer_of_two_trained_ranks_is_named(tmp_path):
    program = [sys.executable, TESTS / "planted_slowness.py", tmp_path, "1", "1", "0", "layer"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    options = {"env": environment, "timeout": 200, "check": True}
    done = subprocess.run(program, capture_output=True, text=True, **options)
    line = json.loads(done.stdout)
    assert line["outcome"]["rank"] and line["outcome"]["kind"] and line["outcome"]["bucket"]


SCRIPT = """import json, os, sys
path = json.loads(os.environ["RINGSIDE_SCRIPT"])["lines"]
for rank, lines in json.load(open(sys.argv[1])).items():
    with open(path.format(rank=rank), "w") as file:
        file.writelines(json.dumps(line) + "\\n" for line in lines)
sys.exit(int(sys.argv[2]))
"""


# What a rank saw of fast paths in one update.
PATHS = {"passes": 1, "elements": 8, "weights": "contiguous", "prefetches": 0, "captured": 0,
         "fused": True, "fused_updates": 0, "workers": 1, "working": "1 of 1"}  # fmt: skip


def observed(tmp_path, capsys, lines, status=0):
    """What `observe` prints of a script that writes these lines."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "lines.json")]
    output = ["--output-dir", str(tmp_path / "outputs")]
    output += ["--uri", f"sqlite:///{tmp_path}/runs.db"]
    assert main(["observe", *output, "--", *command, str(status)]) == bool(status)
    return capsys.readouterr().out


def test_observe_says_who_is_slow_and_writes_a_page(tmp_path, capsys):
    text = observed(tmp_path, capsys, lines_of(FAULTS["compute"], 1), status=3)
    assert "samples/s on 2 ranks" in text
    assert "Rank 1 is slow" in text and "bucket 1 (layers stem and body); it computes" in text
    assert "No efficiency is claimed" in text and "benchmark=script" in text
    [folder] = (tmp_path / "outputs" / "observed").iterdir()
    content = json.loads((folder / "observed.json").read_text())
    assert content["status"] == 3 and content["delays"][0]["rank"] == 1
    assert "Rank 1 is slow" in (folder / "report" / "index.html").read_text()
    assert (folder / "cpu.jsonl").exists()
    tracker = Tracker(Tracking(uri=f"sqlite:///{tmp_path}/runs.db"), tmp_path, "observed")
    [run] = tracker._client.search_runs([tracker._experiment])
    assert (run.info.status, run.data.metrics["observed/step_ms"]) == ("FAILED", content["step_ms"])
    lines = lines_of()
    for rank in lines:
        lines[rank].append({"kind": "paths", "time": 0, **PATHS})
    text = " ".join(observed(tmp_path, capsys, lines).split())
    assert "No slow rank was seen in 32 steps. A rank that loses, in every step," in text
    assert "fused optimizer was asked for (fused=True), and did not engage: rank 0: fused" in text
    assert "Asked for, and seen to engage: loader workers." in text
    page = max((tmp_path / "outputs" / "observed").glob("*/report/index.html")).read_text()
    assert "what proves it" in page and "1 of 1 workers are active" in page


def test_observe_says_which_gpu_is_late_and_what_would_have_been_named(tmp_path, capsys):
    late = on_gpus(2, lambda step, number, rank: 14 if number and rank != 1 else 5)
    text = " ".join(observed(tmp_path, capsys, late).split())
    where = "in the all_reduce of bucket 1 (layers stem and body)"
    assert f"step for it, mostly {where}; its GPU" in text
    assert "its GPU reaches that collective last. The job loses up to" in text
    clean = on_gpus(2, lambda step, number, rank: 5)
    text = " ".join(observed(tmp_path, capsys, clean).split())
    missed = "A rank for which the others wait 0.8 ms in every step would"
    assert f"was seen in 192 steps. {missed}" in text


def test_observe_has_collectives_timed_but_where_the_user_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv(TIMING, raising=False)
    assert _variables(CellFolder(tmp_path), "0")[TIMING] == "1"
    monkeypatch.setenv(TIMING, "0")
    assert TIMING not in _variables(CellFolder(tmp_path), "0")


def test_observe_refuses_what_is_no_program(capsys):
    assert main(["observe"]) == 2
    assert "COMMAND is missing; expected it behind --, as in python -m" in capsys.readouterr().err
    assert main(["observe", "--", "no-such-program"]) == 2
    assert "expected a program" in capsys.readouterr().err
