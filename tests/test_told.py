"""Ranks exchange JSON in tensors, bounded and checked: nothing that a peer sends is unpickled."""

import ast
import json

import pytest
import torch
from build import ROOT

from trainers import collectives, memory

MODULES = [
    path
    for package in ("conf", "trainers", "benchmarks", "launch", "analysis")
    for path in (ROOT / package).rglob("*.py")
]
# Calls that unpickle what another process sent, by the last part of their names.
OBJECT_COLLECTIVES = {
    f"{name}_object{end}"
    for name in ("broadcast", "all_gather", "gather", "scatter", "send", "recv")
    for end in ("", "_list")
}
UNPICKLING = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNPICKLING |= {"multiprocessing"}
OWN_PICKLE = {
    "benchmarks/rank/stacks.py": "what this process itself has just packed",
    "benchmarks/script/exchanges.py": "torch's flight recorder of this process",
}


def test_nothing_unpickles_what_peers_send():
    """By every name and attribute that a file uses, and by the packages that it imports."""
    unpickling = set()
    for path in MODULES:
        names, packages = set(), set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
            elif isinstance(node, ast.ImportFrom):
                names |= {alias.name for alias in node.names}
                packages.add((node.module or "").split(".")[0])
            elif isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
        assert not names & OBJECT_COLLECTIVES, path
        if packages & UNPICKLING:
            unpickling.add(str(path.relative_to(ROOT)))
    assert unpickling == set(OWN_PICKLE)


def test_ranks_tell_each_other_texts_lists_and_tables(forked):
    for rank, found in enumerate(forked("told")):
        assert found["first"] == ["0", [0, 1.5], {"from": 0, "bytes": "00ff"}]
        assert found["all"] == [["x", "xx", "xxx"], [{"from": other} for other in range(3)]]
        assert found["of_two"] == ("1" if rank else "0"), "a group has its own first rank"


@pytest.mark.parametrize(
    "sent, sentence",
    [
        (b"", "tells 0 bytes; expected 1 to "),
        (b"x" * 5000, "tells 5000 bytes; expected 1 to 4096"),
        (b"\x80\x04K\x01.", "tells 5 bytes that are no JSON"),
        (b"[" * 4000, "tells 4000 bytes that are no JSON"),
        (b"17", "tells a int; expected a str"),
        (json.dumps(["/dev/shm/x"]).encode(), "tells a list; expected a str"),
    ],
)
def test_what_a_peer_may_not_say_is_refused(alone, monkeypatch, sent, sentence):
    monkeypatch.setattr(collectives, "MOST_BYTES", 4096)
    monkeypatch.setattr(
        collectives, "_packed", lambda value: torch.tensor(list(sent), dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match=f"^the first rank {sentence}"):
        collectives.broadcast_json("a text")
    with pytest.raises(ValueError, match=f"^rank 0 {sentence}"):
        collectives.all_gather_json("a text")


@pytest.mark.parametrize(
    "name", ["../etc/passwd", "ringside--0123", "other", "ringside-1-0123456789abcdef", "\0"]
)
def test_shared_memory_of_another_name_is_not_opened(name, monkeypatch):
    monkeypatch.setenv("RINGSIDE_TOKEN", "a0b1")
    own = memory.new_path()
    assert memory.named(own.name) == own
    with pytest.raises(ValueError, match="no name of shared memory of this cell"):
        memory.named(name)
