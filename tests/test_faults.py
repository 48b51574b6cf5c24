"""Faults in real sweeps: ranks, agents and launchers that die, stop, raise or run out of memory, and what is left of them.

Ranks are real (gloo, two workers). `PLANT` is put on the ranks' PYTHONPATH: it makes a rank misbehave at a step of its own.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cells import make_cell
from faults import NO_MULTICAST, PLANT, start
from faults_seen import alive, cell_folders, environment_of, server_of, stepping, tokens, until

from benchmarks import record as records
from benchmarks.record import CellFolder, Lines, read_lines
from benchmarks.record.visible import visible
from launch.engines import processes
from launch.study.assemble import assemble
from launch.study.study import StudyFolder
from trainers.kvstore.buckets import Array
from trainers.kvstore.shared_regions import KvstoreConfig, SharedMapping
from trainers.shared_memory import new_path

ROOT = Path(__file__).parent.parent
SILENCE_S = 12.0  # a busy machine may stop a process for seconds
# What a launcher knows of an attempt before it starts.
DETAILS = {"study": "s", "sweep_id": "c" * 32, "overrides": [], "drift": False, "environment": {}}
TRAINING = [
    "benchmark.max_seconds=0.1",
    "benchmark.min_iterations=3",
    "benchmark.max_iterations=10",
    "benchmark.warmup_min_seconds=0",
    "benchmark.warmup_max_seconds=0.1",
    "benchmark.exchange_iterations=2",
    "benchmark.limit_iterations=0",
    "benchmark.exposed_rounds=0",
]
EXCHANGE = ["benchmark=exchange", "benchmark.iterations=40", "benchmark.limit_iterations=0"]

# Fault of a cell in the sweeps of faults, by its bucket_cap_mb: (fault, rank that has it).
FAULTS = {
    11: ("slow", 1),  # the test kills rank 1
    12: ("slow", 1),  # the test stops rank 1
    13: ("slow", 1),  # the test kills the agent
    14: ("exception", 1),
    15: ("segmentation", 0),
    16: ("leave", 1),
    17: ("none", 0),
    18: ("slow", 1),  # the test kills the server
}
# The sweeps, which run at once: a study each. Those of `served` have a parameter server beside their ranks.
STUDIES = {"trained": (12, 14, 17, 16), "served": (11, 18, 13, 15)}
OPTIONS = {"trained": TRAINING, "served": [*EXCHANGE, "strategy=kvstore_dist_sync", "strategy.servers=1"]}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The folder that plants faults."""
    folder = tmp_path_factory.mktemp("plant")
    (folder / "sitecustomize.py").write_text(PLANT)
    return folder


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
def sweep(tmp_path_factory, planted, decoys):
    """The sweeps of faults: their records by bucket_cap_mb and what was seen while they ran."""
    output_dir = tmp_path_factory.mktemp("faults") / "out"
    launchers = {
        name: start(
            output_dir,
            planted,
            FAULTS,
            f"study={name}",
            "gpus=0+1",
            f"strategy.bucket_cap_mb={','.join(map(str, caps))}",
            f"engine.silence_timeout_s={SILENCE_S}",
            *OPTIONS[name],
        )
        for name, caps in STUDIES.items()
    }
    seen = {}
    until(lambda: _meddle(output_dir, launchers, seen), 150)
    seen["exits"] = [process.returncode for process, _ in launchers.values()]
    seen["said"] = "".join(said.read_text() for _, said in launchers.values())
    ours = set().union(*(tokens(output_dir / name) for name in STUDIES))
    seen["left"] = alive(ours)
    seen["memory"] = [path.name for token in ours for path in Path("/dev/shm").glob(f"*{token[:16]}*")]
    seen["folders"] = cell_folders(output_dir)
    measured = [records.read_study(output_dir / name) for name in STUDIES]
    assert not any(unreadable for _, unreadable in measured)
    by_cap = {int(one.cell.strategy["bucket_cap_mb"]): one for known, _ in measured for one in known}
    return by_cap, seen


def _meddle(output_dir, launchers, seen):
    """Act on the cells that step, once each; whether all launchers have ended."""
    for cap, folder in cell_folders(output_dir).items():
        if FAULTS[cap][0] != "slow" or cap in seen or not (pids := stepping(folder)):
            continue
        agent = psutil.Process(pids[1]).ppid()
        if cap == 11:
            ours = alive({json.loads((folder / "attempt.json").read_text())["record_id"]})
            seen["variables"] = [environment_of(pid) for pid in (*pids.values(), server_of(folder))]
            seen["listening"] = {
                connection.laddr.ip
                for process in [*ours, *(psutil.Process(process.pid) for process, _ in launchers.values())]
                for connection in process.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            }
            seen["grandchildren"] = [
                process.pid for process in ours if process.name() == "sleep" and os.getsid(process.pid) == process.pid
            ]
        if cap == 12:
            os.kill(pids[1], signal.SIGSTOP)
        else:
            os.kill({11: pids[1], 13: agent, 18: server_of(folder)}[cap], signal.SIGKILL)
        seen[cap] = time.time()
    return all(process.poll() is not None for process, _ in launchers.values())


def test_every_other_cell_finishes_and_the_exit_status_says_that_some_failed(sweep):
    by_cap, seen = sweep
    failing = set(FAULTS) - {17}
    assert seen["exits"] == [1, 1], seen["said"]
    assert {cap: record.state for cap, record in by_cap.items()} == {**dict.fromkeys(failing, "failed"), 17: "finished"}
    assert all(by_cap[cap].validity.verdict == "invalid" for cap in failing)
    assert "throughput/images_per_second" in by_cap[17].metrics
    assert all(by_cap[cap].failure.message.partition("\x1b")[0] in seen["said"] for cap in failing)


@pytest.mark.parametrize(("cap", "number", "name"), [(11, 1, "rank 1"), (18, 2, "server 0")])
def test_a_killed_worker_or_server_ends_the_cell_in_seconds_and_is_named(sweep, cap, number, name):
    by_cap, seen = sweep
    failure = by_cap[cap].failure
    assert (failure.cause, failure.rank) == ("killed", number)
    assert failure.message.startswith(f"{name} was ended by SIGKILL")
    assert by_cap[cap].ended_at - seen[cap] < SILENCE_S  # it was not told by its silence


def test_a_server_was_killed_while_it_served(sweep):
    assert "in phase 'serving'" in sweep[0][18].failure.message
    assert [server["rank"] for server in sweep[0][18].environment["servers"]] == [2]


def test_a_stopped_rank_is_a_hang_and_is_named_in_time(sweep):
    by_cap, seen = sweep
    failure = by_cap[12].failure
    assert (failure.cause, failure.rank) == ("hang", 1)
    assert "stopped" in failure.message
    assert by_cap[12].ended_at - seen[12] < SILENCE_S + 15


def test_the_waiting_rank_of_a_hang_writes_where_it_stands(sweep):
    log = (sweep[1]["folders"][12] / "logs" / "rank0.log").read_text()
    assert "most recent call first" in log and "benchmarks/rank/worker.py" in log


def test_a_killed_agent_takes_its_ranks_along(sweep):
    failure = sweep[0][13].failure
    assert (failure.cause, failure.rank) == ("killed", None)
    assert "agent" in failure.message and "SIGKILL" in failure.message


def test_a_rank_that_raises_is_named_with_its_log(sweep):
    failure = sweep[0][14].failure
    assert (failure.cause, failure.rank) == ("exception", 1)
    assert "RuntimeError" in failure.message and "planted in step 3" in failure.message
    assert "Traceback" in failure.log_tail or "planted in step 3" in failure.log_tail


def test_what_a_rank_raises_gives_no_command_to_the_terminal(sweep):
    said = sweep[1]["said"]
    assert r"planted in step 3\x1b]0;owned" in said and r"\x00" in said
    assert visible(said) == said


def test_a_segmentation_fault_is_named_with_its_log(sweep):
    failure = sweep[0][15].failure
    assert (failure.cause, failure.rank) == ("killed", 0)
    assert "SIGSEGV" in failure.message
    assert "string_at" in failure.log_tail


def test_a_rank_that_leaves_early_with_status_0_is_named(sweep):
    failure = sweep[0][16].failure
    assert (failure.cause, failure.rank) == ("exception", 1)
    assert "status 0" in failure.message


def test_no_process_of_ours_is_left_and_no_other_is_harmed(sweep, decoys):
    _, seen = sweep
    assert seen["grandchildren"], "the planted grandchild was not running"
    assert seen["left"] == [] and seen["memory"] == []
    assert [decoy.poll() for decoy in decoys] == [None, None]


def test_variables_that_forbid_multicast_reach_ranks_and_servers(sweep):
    assert len(sweep[1]["variables"]) == 3
    for environment in sweep[1]["variables"]:
        assert {name: environment.get(name) for name in NO_MULTICAST} == NO_MULTICAST
        assert environment["CUDA_VISIBLE_DEVICES"] == ""


def test_nothing_listens_beyond_this_machine(sweep):
    assert sweep[1]["listening"], "the store of the ranks listens somewhere"
    assert sweep[1]["listening"] <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_a_killed_launcher_an_interrupted_one_and_one_that_goes_on(tmp_path, planted, decoys):
    output_dir = tmp_path / "out"
    study = output_dir / "default"
    slow = {25: ("slow", 1)}
    long = [*EXCHANGE, "benchmark.iterations=300"]  # a slow one takes a minute

    def in_two_rank_cell(launcher):
        def found():
            for path in study.glob("*-gpus0-1-*/attempt.json"):
                if pids := stepping(path.parent):
                    return path.parent, json.loads(path.read_text())["record_id"], pids
            return None

        return until(found, 60, launcher)

    # SIGKILL in the second cell, while two other launchers find that cell held: one leaves, one waits.
    launcher, _ = start(output_dir, planted, slow, "gpus=0+1,0", *long)
    folder, first_token, pids = in_two_rank_cell(launcher)
    (finished_path,) = study.glob("*-gpus0-????*/record.json")
    finished = records.read(finished_path)
    assert finished.state == "finished"
    waiting, said = start(output_dir, planted, slow, "gpus=0+1,0", *long)
    other, told = start(output_dir, planted, slow, "gpus=0+1", "wait=false", *long)
    assert other.wait(timeout=30) == 3
    assert "measured elsewhere" in told.read_text() and "exit status 3" in told.read_text()
    until(lambda: f": process {launcher.pid} on " in said.read_text(), 30, waiting)
    assert set(pids.values()) <= {process.pid for process in alive({first_token})}
    launcher.kill()
    launcher.wait()
    # A grandchild of its own session has nobody who would end it before the next launcher looks.
    until(lambda: all("sleep" in process.name() for process in alive(tokens(study))), 10)

    # The one that waits closes what was left, measures it anew, and is interrupted there.
    launcher = waiting
    until(lambda: (folder / "attempt-1" / "record.json").exists(), 60, launcher)
    left = records.read(folder / "attempt-1" / "record.json")
    assert (left.state, left.failure.cause, left.record_id) == ("interrupted", "interrupted", first_token)
    assert left.validity.verdict == "invalid"
    assert next(read_lines(folder / "attempt-1" / "ranks" / "0.jsonl"))["kind"] == "start"
    assert alive({first_token}) == []
    _, second_token, _ = in_two_rank_cell(launcher)
    assert second_token != first_token
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(timeout=15) == 130
    assert alive(tokens(study)) == []
    assert "an earlier launcher died while it ran" in said.read_text()
    stopped = records.read(folder / "record.json")
    assert (stopped.state, stopped.failure.cause) == ("interrupted", "interrupted")
    assert any(line["kind"] == "beat" for line in read_lines(folder / "ranks" / "0.jsonl"))

    # The third goes on from there.
    launcher, said = start(output_dir, planted, {}, "gpus=0+1,0", *long)
    assert launcher.wait(timeout=90) == 0, said.read_text()
    assert records.read(finished_path) == finished, "a finished cell was measured again"
    assert [(record.cell.gpus, record.state) for record in records.read_study(study)[0]] == [
        ((0,), "finished"),
        ((0, 1), "interrupted"),
        ((0, 1), "interrupted"),
        ((0, 1), "finished"),
    ]
    assert alive(tokens(study)) == []
    assert [decoy.poll() for decoy in decoys] == [None, None]


# What a launcher finds that others left, without ranks.


def begun(tmp_path, gone=True):
    """(study, cell, attempt) of an attempt that another process began; `gone`: that process has ended."""
    study, cell = StudyFolder(str(tmp_path), "s"), make_cell()
    with study.lock(cell):
        attempt = study.begin(cell, "a" * 32, DETAILS)
    Lines(attempt.folder.rank_lines(0)).write("start", time.time() + 5, rank=0, pid=1, versions={})
    if gone:
        text = (study.folder / "journal.jsonl").read_text()
        (study.folder / "journal.jsonl").write_text(text.replace(f'"pid": {os.getpid()},', '"pid": 4194304,'))
    return StudyFolder(str(tmp_path), "s"), cell, attempt


def test_what_a_dead_launcher_left_is_closed_once(tmp_path):
    study, cell, attempt = begun(tmp_path)
    (closed,) = study.recover()
    assert (closed.state, closed.record_id) == ("interrupted", attempt.token)
    assert closed.ended_at > time.time(), "the last sign of a rank"
    assert records.read(attempt.folder.record) == closed
    assert study.recover() == []
    assert study.finished(cell) is None


DAMAGE = {
    "journal.jsonl": ['{"kind":"begin","time":1.0,"cell":"x","token":"t"}\n', '{"kind":"end","time":1.0}\n',
                      '{"kind":"begin","time":1.0,"cell":"../x","token":[],"process":7}\n'],
    "cell.json": ['{"labels":[{}]}', "[]", ""],
    "attempt.json": ['{"record_id":7,"environment":[]}', "null", '{"started_at":"x"'],
    "failures.json": ["[[["], "gpus.jsonl": ['{"kind":"sample","time":1,"gpus":7}\n'],
    "ranks/0.jsonl": ['{"kind":"start","time":1}\n', '{"kind":"result","time":1,"metrics":7}\n'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, several in DAMAGE.items() for one in several])
def test_a_damaged_file_of_a_study_costs_nothing_else(tmp_path, name, content):
    study, cell, attempt = begun(tmp_path)
    file = (study.folder if name == "journal.jsonl" else attempt.folder.path) / name
    file.write_text((content + file.read_text()) if name == "journal.jsonl" else content)
    study.recover()
    assert study.recover() == []
    with study.lock(cell):
        again = study.begin(cell, "b" * 32, DETAILS)
    kept = study.folder if name == "journal.jsonl" else again.folder.path / "attempt-1"
    assert content in (kept / name).read_text(), "set aside, not lost"


def test_what_a_living_launcher_measures_is_left_alone(tmp_path):
    study, _, attempt = begun(tmp_path, gone=False)
    assert study.recover() == []
    assert not attempt.folder.record.exists()


def test_a_cell_that_another_launcher_holds_is_not_closed(tmp_path):
    study, cell, attempt = begun(tmp_path)
    with study.lock(cell) as ours:
        assert ours
        assert study.recover() == []
    assert not attempt.folder.record.exists()
    assert len(study.recover()) == 1


HOLDER = """
import sys, time
from pathlib import Path
from benchmarks.record import CellFolder
from launch.study import study
with study._lock(CellFolder(Path(sys.argv[1]))) as ours:
    print(ours, flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_launcher_that_is_killed_is_free(tmp_path):
    study, cell = StudyFolder(str(tmp_path), "s"), make_cell()
    folder = study.folder / cell.folder
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "True\n"
        with study.lock(cell) as ours:
            assert not ours
        holder.kill()
    with study.lock(cell) as ours:
        assert ours


def test_a_lock_neither_follows_a_link_nor_empties_a_file(tmp_path):
    study, cell = StudyFolder(str(tmp_path), "s"), make_cell()
    folder = CellFolder(study.folder / cell.folder).make()
    precious = tmp_path / "precious"
    precious.write_text("text")
    folder.lock.symlink_to(precious)
    with pytest.raises(OSError, match="is a link"), study.lock(cell):
        pass
    folder.lock.unlink()
    folder.lock.write_text("text")
    with pytest.raises(OSError, match="holds something"), study.lock(cell):
        pass
    assert precious.read_text() == folder.lock.read_text() == "text"


def test_a_launcher_that_died_between_record_and_journal_loses_nothing(tmp_path):
    study, cell, attempt = begun(tmp_path)
    finished = assemble(attempt.folder, "finished", None, time.time())
    records.write(attempt.folder, finished)
    assert study.recover() == []
    assert study.finished(cell) == finished
    said = (study.folder / "journal.jsonl").read_text()
    assert study.recover() == [] and (study.folder / "journal.jsonl").read_text() == said


def test_a_cell_is_not_done_before_its_profiled_pass_has_said_something(tmp_path):
    study, cell = StudyFolder(str(tmp_path), "s"), dataclasses.replace(make_cell(), profiler="torch")
    with study.lock(cell):
        attempt = study.begin(cell, "a" * 32, DETAILS)
    measured = assemble(attempt.folder, "finished", None, time.time())
    records.write(attempt.folder, measured)  # before the pass: it is safe whatever happens there
    assert study.recover() == [] and study.finished(cell) is None
    said = dataclasses.replace(measured, validity=records.Validity(unchecked={"profiled": "gave no trace"}))
    study.end(attempt, said)
    assert study.finished(cell) == said


def test_an_attempt_is_set_aside_whole_even_by_two_launchers(tmp_path):
    study, cell, attempt = begun(tmp_path)
    study.recover()
    aside = attempt.folder.path / ".aside"  # the first launcher died here
    aside.mkdir()
    attempt.folder.cell.rename(aside / "cell.json")
    study.begin(cell, "b" * 32, DETAILS)
    names = {path.name for path in (attempt.folder.path / "attempt-1").iterdir()}
    assert names >= {"cell.json", "attempt.json", "ranks", "logs", "record.json"}
    assert not aside.exists() and attempt.folder.cell.exists()


def test_an_open_attempt_without_its_journal_is_closed_before_the_next(tmp_path):
    study, cell, attempt = begun(tmp_path)
    study.begin(cell, "b" * 32, DETAILS)
    left = records.read(attempt.folder.path / "attempt-1" / "record.json")
    assert (left.state, left.record_id) == ("interrupted", attempt.token)


def test_a_process_whose_starter_has_ended_does_not_go_on():
    program = "from benchmarks.rank.lifetime import die_with_parent; die_with_parent(); print('on')"
    for starter, code in ((str(os.getpid()), 0), ("4194304", -signal.SIGKILL)):
        environment = {**os.environ, "RINGSIDE_STARTER": starter}
        run = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, check=False
        )
        assert run.returncode == code


def test_shared_memory_that_a_cell_left_is_removed_and_no_other(tmp_path, monkeypatch):
    config = KvstoreConfig((Array(10, "float32", "float32"),), (0,), 0, 1, 0)
    paths = []
    for token in ("a" * 32, "b" * 32):
        monkeypatch.setenv("RINGSIDE_TOKEN", token)
        paths.append(SharedMapping(new_path(), config, config.layout(), create=True).path)
    try:
        processes.remove_shared_memory("a" * 32)
        assert [path.exists() for path in paths] == [False, True]
    finally:
        processes.remove_shared_memory("b" * 32)
    assert not paths[1].exists()
