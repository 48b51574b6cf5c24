"""Real sweeps with faults: the diagonal of the campaign's table, a kind in a phase each. The whole table: test_campaign.py.

Ranks are real (gloo, two workers); faults_planted.py strikes inside them.
"""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from faults import NO_MULTICAST, TRAINING, Fault, PlantedSweep
from faults_seen import (
    attempt_folder,
    cell_folders,
    environment_of,
    examine,
    ranks_alive,
    server_of,
    stepping,
    until,
)

from benchmarks import record as records
from benchmarks.record import read_lines
from benchmarks.record.safe_text import visible

SILENCE_S = 12.0  # a busy machine may stop a process for seconds
EXCHANGE = ["benchmark=exchange", "benchmark.iterations=10", "benchmark.limit_iterations=0"]
WITH_SERVER = ["strategy=kvstore_dist_sync", "strategy.servers=1"]
COMMON = ["gpus=0+1", "report=false", "noise_pairs=0", f"engine.silence_timeout_s={SILENCE_S}"]

# By the bucket_cap_mb of their cells. The second sweep has a parameter server beside its ranks.
HEALTHY, LOOKED_AT = 17, 11
TRAINED = {
    12: Fault("sleep", "timed", "rank", "hang", 1, deadline_s=SILENCE_S, process=1),
    14: Fault("control characters", "warm-up", "rank", "exception", 1, process=1),
    16: Fault("exit 0", "first step", "rank", "exception", 1, process=1, after=0),
}
SERVED = {
    LOOKED_AT: Fault("gate", "exchange", "rank", "killed", 1, process=1),
    18: Fault("SIGKILL", "exchange", "server", "killed", 2, process=2),
    13: Fault("SIGKILL", "exchange", "agent", "killed", None),
    15: Fault("SIGSEGV", "build", "rank", "killed", 0),
}
# What a rank does at the gate: it starts a process in a session of its own, and then dies or waits.
SLEEPER = """
import os, pathlib, signal, subprocess
sleeper = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(__file__).with_name("sleeping").write_text(str(sleeper.pid))
pathlib.Path(__file__).with_name("sleeping").rename(pathlib.Path(__file__).with_name("sleeper"))
"""
DIES, WAITS = SLEEPER + "os.kill(os.getpid(), signal.SIGKILL)", SLEEPER + "sleeper.wait()"


@pytest.fixture(scope="module")
def decoys(tmp_path_factory):
    """Processes that look like ours and are not: they must outlive everything here."""
    program = [sys.executable, "-c", "import time; time.sleep(900)", "-m", "benchmarks.rank.worker"]
    bare = {name: value for name, value in os.environ.items() if name != "RINGSIDE_TOKEN"}
    running = [
        subprocess.Popen([*program, str(tmp_path_factory.mktemp("decoy"))], env=environment)
        for environment in (bare, {**bare, "RINGSIDE_TOKEN": "f" * 32})
    ]
    yield running
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory, decoys):
    """(What came of each fault, its record), by key; the sweeps, which run at once; what was seen while they ran."""
    folder = tmp_path_factory.mktemp("faults")
    trained = PlantedSweep(folder / "trained", TRAINED, *COMMON, *TRAINING, healthy=[HEALTHY])
    served = PlantedSweep(folder / "served", SERVED, *COMMON, *EXCHANGE, *WITH_SERVER)
    with trained, served:
        running = [sweep.start() for sweep in (trained, served)]
        until((served.plant / "arrived").exists, 100, running[1])
        seen = looked_at(served)
        (served.plant / "do").write_text(DIES)
        (served.plant / "go").touch()
        for sweep, process in zip((trained, served), running, strict=True):
            sweep.wait(process, 150)
    # The rank that was looked at struck itself when it was told to.
    went = served.struck(LOOKED_AT) | {"time": (served.plant / "go").stat().st_mtime}
    outcomes = {}
    for sweep in (trained, served):
        for key, fault in sweep.faults.items():
            outcome = examine(fault, sweep, key, struck=went if key == LOOKED_AT else None)
            outcomes[key] = outcome, sweep.records(key)[0]
    return outcomes, trained, served, seen


def looked_at(sweep):
    """What the processes of a running cell have: their variables, and where they listen."""
    folder = cell_folders(sweep.output_dir)[LOOKED_AT]
    ours = ranks_alive({json.loads((folder / "attempt.json").read_text())["record_id"]})
    ranks = stepping(folder)
    listening = set()
    for process in [*ours, psutil.Process(sweep.processes[0].pid)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                listening.add(connection.laddr.ip)
    variables = [environment_of(pid) for pid in (*ranks.values(), server_of(folder))]
    return {"variables": variables, "listening": listening}


@pytest.mark.parametrize("key", [*TRAINED, *SERVED])
def test_the_cause_and_the_rank_are_named_and_nothing_is_lost_or_left(sweeps, key):
    outcome, record = sweeps[0][key]
    assert outcome["right"], outcome
    late_s = 15 if outcome["cause"] == "hang" else 0  # others not by their silence
    assert outcome["noticed_s"] < SILENCE_S + late_s
    assert (record.state, record.validity.verdict) == ("failed", "invalid")
    (said,) = (sweep.printed for sweep in sweeps[1:3] if key in sweep.faults)
    assert visible(record.failure.message) in said


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (LOOKED_AT, "rank 1 was ended by SIGKILL"),
        (12, "in phase 'timed'"),
        (13, "the agent ended by SIGKILL"),
        (14, "rank 1 raised RuntimeError in phase 'warm-up': planted"),
        (15, "rank 0 was ended by SIGSEGV in phase 'build'"),
        (16, "with status 0 in phase 'first step'"),
        (18, "server 0 was ended by SIGKILL in phase 'serving'"),
    ],
)
def test_what_happened_is_one_sentence(sweeps, key, words):
    assert words in sweeps[0][key][1].failure.message


def test_the_cell_without_a_fault_finishes(sweeps):
    (record,) = sweeps[1].records(HEALTHY)
    assert record.state == "finished" and "throughput/images_per_second" in record.metrics


@pytest.mark.parametrize(
    ("key", "words"), [(14, "planted"), (15, "string_at"), (12, "most recent call first")]
)
def test_the_end_of_the_log_is_told(sweeps, key, words):
    assert words in sweeps[0][key][1].failure.log_tail


def test_the_ranks_of_a_hang_write_where_they_stand(sweeps):
    folder = attempt_folder(sweeps[0][12][1], sweeps[1].study_dir)
    logs = [(folder / "logs" / f"rank{number}.log").read_text() for number in (0, 1)]
    for log in logs:
        assert "most recent call first" in log and "benchmarks/rank/worker.py" in log


def test_what_a_rank_raises_gives_no_command_to_the_terminal(sweeps):
    said = sweeps[1].printed
    assert r"\x1b]0;title" in said and r"\x00" in said
    assert visible(said) == said


def test_the_record_of_a_failed_cell_names_its_server(sweeps):
    assert [server["rank"] for server in sweeps[0][18][1].environment["servers"]] == [2]


def test_no_process_of_ours_is_left_and_no_other_is_harmed(sweeps, decoys):
    sleeper = int((sweeps[2].plant / "sleeper").read_text())
    if psutil.pid_exists(sleeper):
        assert psutil.Process(sleeper).status() == psutil.STATUS_ZOMBIE
    assert [decoy.poll() for decoy in decoys] == [None, None]


def test_variables_that_forbid_multicast_reach_ranks_and_servers(sweeps):
    assert len(sweeps[3]["variables"]) == 3
    for environment in sweeps[3]["variables"]:
        assert {name: environment.get(name) for name in NO_MULTICAST} == NO_MULTICAST
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_nothing_listens_beyond_this_machine(sweeps):
    assert sweeps[3]["listening"], "the store of the ranks listens somewhere"
    assert sweeps[3]["listening"] <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_killed_launcher_an_interrupted_one_and_one_that_goes_on(tmp_path, decoys):
    waits = {25: Fault("gate", "exchange", "rank", process=1)}
    options = ["report=false", "noise_pairs=0", *EXCHANGE]
    with PlantedSweep(tmp_path, waits, *options) as sweep:
        (sweep.plant / "do").write_text(WAITS)
        (sweep.plant / "go").touch()

        def in_two_rank_cell(launcher):
            until((sweep.plant / "sleeper").exists, 60, launcher)
            (sweep.plant / "sleeper").unlink()
            sweep.replant(waits)  # for the next launcher
            (attempt,) = sweep.study_dir.glob("*-gpus0-1-*/attempt.json")
            return attempt.parent, json.loads(attempt.read_text())["record_id"]

        # SIGKILL in the second cell, while two other launchers find that cell held: one leaves, one waits.
        launcher = sweep.start("gpus=0+1,0")
        folder, first_token = in_two_rank_cell(launcher)
        (finished_path,) = sweep.study_dir.glob("*-gpus0-????*/record.json")
        finished = records.read(finished_path)
        assert finished.state == "finished"
        waiting, other = sweep.start("gpus=0+1,0"), sweep.start("gpus=0+1", "wait=false")
        assert other.wait(timeout=30) == 3
        assert "measured elsewhere" in sweep.printed and "exit status 3" in sweep.printed
        until(lambda: f": process {launcher.pid} on " in sweep.everything_printed, 30, waiting)
        alive = {process.pid for process in ranks_alive({first_token})}
        assert set(until(lambda: stepping(folder), 5).values()) <= alive
        launcher.kill()
        launcher.wait()
        # A grandchild of its own session has nobody who would end it before the next launcher looks.
        until(lambda: all("sleep" in process.name() for process in ranks_alive({first_token})), 10)

        # The one that waits closes what was left, measures it anew, and is interrupted there.
        until(lambda: (folder / "attempt-1" / "record.json").exists(), 60, waiting)
        left = records.read(folder / "attempt-1" / "record.json")
        assert (left.state, left.failure.cause) == ("interrupted", "interrupted")
        assert left.record_id == first_token and left.validity.verdict == "invalid"
        assert next(read_lines(folder / "attempt-1" / "ranks" / "0.jsonl"))["kind"] == "start"
        assert ranks_alive({first_token}) == []
        _, second_token = in_two_rank_cell(waiting)
        assert second_token != first_token
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=15) == 130
        assert sweep.orphans() == []
        assert "an earlier launcher died while it ran" in sweep.everything_printed
        stopped = records.read(folder / "record.json")
        assert (stopped.state, stopped.failure.cause) == ("interrupted", "interrupted")
        assert any(line["kind"] == "beat" for line in read_lines(folder / "ranks" / "0.jsonl"))

        # The third goes on from there.
        sweep.replant({})
        assert sweep.run("gpus=0+1,0", timeout_s=90) == 0, sweep.printed
        assert records.read(finished_path) == finished, "a finished cell was measured again"
        states = [record.state for record in sweep.records()]
        assert states == ["finished", "interrupted", "interrupted", "finished"]
        assert [record.cell.world_size for record in sweep.records()] == [1, 2, 2, 2]
        assert sweep.orphans() == [] and sweep.left_files() == []
    assert [decoy.poll() for decoy in decoys] == [None, None]
