"""A host that was lost and answers again: the engine of several hosts, with agents that only say what they are."""

import dataclasses
import json
import sys

import pytest
from build import described, make_cell
from faults_seen import until

from conf.options import Refused
from conf.schema import Engine
from launch.engines import hosts
from launch.engines.hosts import HostsEngine

CELL = dataclasses.replace(make_cell((0,)), hosts=("b",))
AGENT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
if sys.argv[-1] == "benchmarks.agent.scratch":
    sys.exit((folder / "cleaned").touch())
if (folder / "down").exists():
    sys.exit("no route to host")
def say(**what): print(json.dumps(what), flush=True)
say(say="ready", pid=1, torch="2")
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "look":
        say(say="looked", said=(folder / "said.json").read_text())
    elif asked["do"] == "time":
        say(say="time", sent=asked["sent"], monotonic=time.monotonic())
    elif (folder / "is_killed").exists():
        os.kill(os.getpid(), 9)
    elif (folder / "dies").exists():
        sys.exit("the power is gone")
"""


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """An engine whose only host, b, has just been lost, and what this host says of itself."""
    monkeypatch.setattr(hosts, "LONGEST_SILENCE_S", 0.0)
    monkeypatch.setattr(hosts, "BEAT_S", 0.01)
    said = described()
    (tmp_path / "said.json").write_text(json.dumps(said))
    (tmp_path / "agent.py").write_text(AGENT)
    prefix = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path), "{host}"]
    engine = HostsEngine(Engine(name="command", prefix=prefix), {})
    engine.open_on(["b"], "cpu")
    assert engine.lost(CELL) is None
    (tmp_path / "dies").touch()
    until(lambda: engine.lost(CELL), 10)
    assert (
        engine.lost(CELL)
        == "host b is lost: its agent is gone, it ended with status 1: the power is gone"
    )
    (tmp_path / "dies").unlink()
    yield engine, said
    engine.close()


def test_a_host_that_answers_as_before_is_lost_no_more(lost, tmp_path):
    engine, said = lost
    (tmp_path / "said.json").write_text(
        json.dumps({**said, "boot_id": "another", "shared_memory_bytes": 7})
    )
    engine.seek([CELL], lambda: False)
    assert engine.lost(CELL) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"kernel": "7.1", "versions": {}},
            "; it answers again, but is not what it was (versions, kernel)",
        ),
        (
            {"form": 0},
            "; tried again: host b: what it says of itself is no description by this Ringside ",
        ),
        (None, "; tried again: it ended with status 1: no route to host"),
    ],
)
def test_a_host_that_does_not_stays_lost_and_says_why(lost, tmp_path, change, why):
    engine, said = lost
    if change is None:
        (tmp_path / "down").touch()
    else:
        (tmp_path / "said.json").write_text(json.dumps(said | change))
    engine.seek([CELL], lambda: False)
    assert engine.lost(CELL).startswith(
        "host b is lost: its agent is gone, "
    ) and why in engine.lost(CELL)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            "exit 127",
            r"status 127; accepted are hosts with Ringside \(engine\.folder=\) and a Python that has what it needs",
        ),
        ("echo Permission denied >&2; exit 255", "status 255: Permission denied$"),
    ],
)
def test_a_host_without_an_agent_is_refused_with_what_it_needs(command, why):
    engine = HostsEngine(Engine(name="command", prefix=["sh", "-c", command, "{host}"]), {})
    with pytest.raises(Refused, match=rf"^nodes=b: no agent serves there: it ended with {why}"):
        engine.open_on(["b"], "cpu")


def test_a_sweep_that_stops_tries_no_host(lost):
    engine, _ = lost
    engine.seek([CELL], lambda: True)
    assert engine.lost(CELL).endswith("the power is gone")


@pytest.mark.parametrize("how", ["dies", "is_killed"])
def test_what_a_killed_agent_left_is_removed_by_another_program(lost, tmp_path, how):
    engine, _ = lost
    engine.seek([CELL], lambda: False)
    (tmp_path / how).touch()
    until(lambda: engine.lost(CELL), 10)
    engine.close()
    assert (tmp_path / "cleaned").exists() == (how == "is_killed")
