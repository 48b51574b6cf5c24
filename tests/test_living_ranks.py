"""Ranks that live on after their cell: who goes on in them, who does not, and what a fault of one does to the next."""

import os
import signal
import uuid
from pathlib import Path

import pytest
from cells import make_cell
from faults_seen import until

from analysis.validity.effective import read_logs
from benchmarks.host import processes
from benchmarks.rank import nccl_log
from benchmarks.record import CellFolder, read_lines
from conf.schema import Engine
from launch.engines.engine import ALONE, Lives
from launch.engines.environment import environment
from launch.engines.local import LocalEngine
from launch.machine.devices import Machine
from launch.study.study import prepare
from launch.supervision import supervise

HERE = Machine("cpu", (), (0, 1), 2)
AROUND = dict(os.environ)
STAYS, GOES_ON = Lives(stays=True), Lives(goes_on=True, stays=True)


@pytest.fixture(scope="module")
def served():
    """An engine of this machine; its agent imports torch once for all tests."""
    local = LocalEngine(HERE, AROUND, "warm", 1.0)
    yield local
    local.close()


@pytest.fixture
def engine(served):
    """The engine, without processes of another test."""
    served.leave()
    return served


def run(engine, folder, lives, around=AROUND, stopping=lambda: False, **options):
    """Run a cell of one worker: (outcome, its folder, its token)."""
    cell, token = make_cell(**{"gpus": (0,), "max_seconds": 0.05} | options), uuid.uuid4().hex
    inside = prepare(CellFolder(folder), cell)
    variables = environment(cell, HERE, inside, token, around)
    outcome = supervise.run(cell, inside, variables, engine, Engine(), stopping, lambda watch: None, lives=lives)
    return outcome, inside, token


def lines(folder, kind, rank=0):
    return [line for line in read_lines(folder.rank_lines(rank)) if line["kind"] == kind]


def started(folder, rank=0):
    (line,) = lines(folder, "start", rank)
    return line


def test_a_cell_goes_on_in_the_ranks_of_the_one_before(engine, tmp_path):
    folders = []
    for place, options in enumerate([{}, {"batch_size": 4}, {"min_iterations": 5}]):
        outcome, folder, token = run(engine, tmp_path / str(place), GOES_ON, gpus=(0, 1), **options)
        assert (outcome.state, outcome.went_on, outcome.kept) == ("finished", place > 0, [])
        assert len(processes.of(token)) == 3  # two ranks and what watches them carry the token of the newest cell
        folders.append(folder)
    for rank in (0, 1):
        first, *others = (started(folder, rank) for folder in folders)
        assert [one["started"] for one in (first, *others)] == ["fork", "warm", "warm"]
        assert {one["pid"] for one in others} == {first["pid"]}
        assert [(one["pool"], one["place"]) for one in (first, *others)] == [(first["pool"], n) for n in range(3)]
    logs = [folder.rank_log(0).read_text() for folder in folders]
    assert not any("Traceback" in log for log in logs)
    engine.leave()
    until(lambda: not processes.of(token), 10)


def test_nothing_stays_unless_it_may(engine, tmp_path):
    outcome, folder, token = run(engine, tmp_path, ALONE)
    assert outcome.state == "finished" and "pool" not in started(folder) and not processes.of(token)


@pytest.mark.parametrize("differs", ["devices", "a variable", "nothing, but it may not"])
def test_a_cell_of_other_needs_gets_new_ranks(differs, engine, tmp_path):
    _, first, token = run(engine, tmp_path / "first", GOES_ON)
    around = {**AROUND, "GLOO_SOCKET_RETRY": "1"} if differs == "a variable" else AROUND
    options = {"gpus": (1,)} if differs == "devices" else {}
    lives = STAYS if differs.startswith("nothing") else GOES_ON
    outcome, second, _ = run(engine, tmp_path / "second", lives, around, **options)
    assert (outcome.state, outcome.went_on) == ("finished", False)
    assert started(second)["started"] == "fork" and started(second)["pid"] != started(first)["pid"]
    assert not processes.of(token), "the others had left before"


def test_a_rank_that_is_killed_between_two_cells_ends_its_pool_and_no_record(engine, tmp_path):
    _, first, _ = run(engine, tmp_path / "first", GOES_ON, gpus=(0, 1))
    os.kill(started(first)["pid"], signal.SIGKILL)
    until(lambda: processes.state(started(first, 1)["pid"]) == "gone", 10)
    assert not first.failures.exists(), "the cell before is finished"
    outcome, second, _ = run(engine, tmp_path / "second", GOES_ON, gpus=(0, 1))
    assert (outcome.state, outcome.went_on, started(second)["started"]) == ("finished", False, "fork")


def test_a_rank_that_dies_in_a_later_cell_is_named_there(engine, tmp_path):
    _, first, _ = run(engine, tmp_path / "first", GOES_ON, gpus=(0, 1))

    def kill(killed=[]):  # noqa: B006
        path = tmp_path / "second/ranks/1.jsonl"
        if not killed and path.exists() and any(line["kind"] == "phase" for line in read_lines(path)):
            killed.append(os.kill(started(first, 1)["pid"], signal.SIGKILL))
        return False

    outcome, second, token = run(engine, tmp_path / "second", GOES_ON, stopping=kill, min_seconds=20, gpus=(0, 1))
    assert (outcome.state, outcome.went_on) == ("failed", True)
    assert (outcome.failure.cause, outcome.failure.rank) == ("killed", 1)
    assert second.failures.exists() and not first.failures.exists()
    assert not processes.of(token)
    outcome, third, _ = run(engine, tmp_path / "third", GOES_ON)
    assert outcome.state == "finished" and started(third)["started"] == "fork"


def test_the_end_of_the_engine_ends_ranks_that_wait(tmp_path):
    local = LocalEngine(HERE, AROUND, "warm", 1.0)
    _, _, token = run(local, tmp_path, GOES_ON)
    assert processes.of(token)
    local.close()
    assert not processes.of(token)


def test_what_nccl_says_once_in_a_process_lies_beside_every_later_log(tmp_path, monkeypatch):
    first, later = (CellFolder(tmp_path / name) for name in ("first", "later"))
    said = f"vm:{os.getpid()}:7 [0] NCCL INFO "
    of_first = [
        "NCCL version 2.28.9+cuda13.0",
        "NCCL_P2P_LEVEL set by environment to LOC",
        "NCCL_ALGO set by environment to Tree",
    ]
    of_later = ["NCCL_ALGO set by environment to Ring", "Comm config Blocking set to 1"]
    for folder, lines in ((first, of_first), (later, of_later)):
        log = Path(folder.nccl_log_pattern.replace("%h", "vm").replace("%p", str(os.getpid())))
        log.parent.mkdir(parents=True)
        log.write_text("".join(f"{said}{line}\n" for line in lines))
    monkeypatch.setenv("NCCL_DEBUG_FILE", first.nccl_log_pattern)
    once = nccl_log.said_once()
    monkeypatch.setenv("NCCL_DEBUG_FILE", later.nccl_log_pattern)
    nccl_log.begin_again(once)
    found = read_logs(later)
    assert found.version == "2.28.9" and found.processes == 1
    assert found.settings == {"NCCL_P2P_LEVEL": "LOC", "NCCL_ALGO": "Ring"}, "the algorithm is this communicator's own"
    assert nccl_log.said_once() == "", "a log of a process that said it before has none of it"
