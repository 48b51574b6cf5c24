"""The engine of several hosts, with agents that only say what they are."""

import json
import sys

import pytest
from build import described, make_cell
from faults_seen import until

from conf.options import Refused
from conf.schema import Engine
from launch.engines import hosts
from launch.engines.hosts import HostsEngine

CELL = make_cell((0,), hosts=("b",))
AGENT = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
def say(**what): print(json.dumps(what), flush=True)
say(say="ready", pid=1, torch="2")
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "look":
        say(say="looked", said=(folder / "said.json").read_text())
    elif asked["do"] == "time":
        say(say="time", sent=asked["sent"], monotonic=time.monotonic())
    elif (folder / "dies").exists():
        sys.exit("the power is gone")
"""


def test_a_host_whose_agent_dies_is_lost_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "BEAT_S", 0.01)
    (tmp_path / "said.json").write_text(json.dumps(described()))
    (tmp_path / "agent.py").write_text(AGENT)
    prefix = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path), "{host}"]
    engine = HostsEngine(Engine(name="command", prefix=prefix), {})
    engine.open_on(["b"], "cpu")
    assert engine.lost(CELL) is None
    (tmp_path / "dies").touch()
    until(lambda: engine.lost(CELL), 10)
    why = "host b is lost: its agent is gone, it ended with status 1: the power is gone"
    assert engine.lost(CELL) == why
    engine.close()


NEEDED = r"name the folder of Ringside on that host \(engine\.folder=\) and a Python with"
WITHOUT = [
    ("exit 127", rf"status 127\. What to do: {NEEDED}"),
    ("echo Permission denied >&2; exit 255", "status 255: Permission denied$"),
]


@pytest.mark.parametrize(("command", "why"), WITHOUT)
def test_a_host_without_an_agent_is_refused_with_what_it_needs(command, why):
    engine = HostsEngine(Engine(name="command", prefix=["sh", "-c", command, "{host}"]), {})
    with pytest.raises(Refused, match=rf"^nodes=b: no agent runs there: it ended with {why}"):
        engine.open_on(["b"], "cpu")
