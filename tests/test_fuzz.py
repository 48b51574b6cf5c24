"""Damaged input ends no reader in a traceback, takes neither minutes nor the memory, and gives no other value (tests/fuzz.py)."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import fuzz_mutations
import pytest
from fuzz_case import GOOD, OUTCOMES, damaged
from fuzz_readers import BY_NAME, READERS, others

ROOT = Path(__file__).parent.parent


def fuzzed(tmp_path, *arguments, timeout):
    """Run the command in a process of its own: its limits are those of a process. Return its result by reader."""
    out = tmp_path / "fuzz.json"
    command = [sys.executable, "-m", "tests.fuzz", f"--out={out}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert out.exists(), done.stderr[-2000:]
    whole = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout
    assert whole["not_run"] == {}
    return whole["readers"]


def test_no_damage_breaks_a_reader(tmp_path):
    found = fuzzed(tmp_path, "--cases=12", "--workers=1", "--seed=1", timeout=200)
    assert found.keys() == BY_NAME.keys() and sum(own["cases"] for own in found.values()) >= 250
    for own in found.values():
        assert own["cases"] == sum(own[outcome] for outcome in GOOD)


@pytest.mark.campaign
@pytest.mark.timeout(0)
def test_no_damage_of_a_hundred_thousand_breaks_a_reader(tmp_path, request):
    seed = request.config.getoption("seed")
    found = fuzzed(
        tmp_path, "--cases=100000", f"--workers={os.cpu_count()}", f"--seed={seed}", timeout=None
    )
    assert all(
        own["cases"] == max(reader.least, 100_000 * reader.share)
        for reader, own in zip(READERS, found.values(), strict=True)
    )


def test_a_case_is_the_same_wherever_it_runs(tmp_path):
    for name in ("p2p-text", "nsys"):
        cases = [damaged(BY_NAME[name], 1, number, tmp_path) for number in (*range(12), *range(12))]
        assert cases[:12] == cases[12:]
        assert any(whole.data != part.data for whole, part, *_ in cases)


@pytest.mark.parametrize(
    "part, different",
    [
        ({"rows": [{"a": 1}, {"a": 3}]}, 0),
        ({"rows": [{"a": 1}, {"a": None}], "notes": ["cut"]}, 0),
        ({"rows": []}, 0),
        ({"rows": [{"a": 4}]}, 1),
        ({"rows": [{"a": 3}, {"a": 1}]}, 1),
        ({"rows": [], "mean": 1.5}, 1),
        ({"new": 1}, 1),
    ],
)
def test_less_is_no_other_value(part, different):
    whole = {"rows": [{"a": 1}, {"a": 2}, {"a": 3}], "mean": 2.0}
    assert len(list(others(part, whole))) == different


FAULTS = {
    "tracebacks": "raise KeyError('x')",
    "untyped": "raise Wrong('two lines')",
    "hangs": "while True: pass",
    "over_memory": "return [bytes(1 << 29) for _ in range(4)]",
    "other_values": "return {'a': len(seed.data)}",
}


@pytest.mark.parametrize("outcome", FAULTS)
def test_every_outcome_is_found(tmp_path, outcome):
    """A reader with this fault is told as such, case by case, and the same case can be repeated."""
    program = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import fuzz, fuzz_case, fuzz_mutations
from fuzz_calls import Wrong
from fuzz_readers import BY_NAME, Reader
from fuzz_seeds import Seed
def read(seed, folder, number):
    {FAULTS[outcome]}
fuzz_case.CASE_SECONDS = 0.2
BY_NAME["faulty"] = Reader("faulty", lambda: [Seed(b"a" * 100)], read, (fuzz_mutations.cut,), removing=(fuzz_mutations.cut,))
import json
print(json.dumps(fuzz.campaign([BY_NAME["faulty"]], 4, 1, 60, 1)["faulty"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    found = json.loads(done.stdout)
    assert found["cases"] == 4 and found[outcome] > 0, (found, done.stderr)
    assert not any(found[one] for one in OUTCOMES[2:] if one != outcome)
    assert found["failing"][0][1] == outcome


def test_mutations_change_what_they_say():
    source = random.Random(1)
    data = b'{"a": [1, 2, {"b": "x"}], "c": null}'
    for mutation in (*fuzz_mutations.ANY, *fuzz_mutations.JSON):
        assert any(mutation(source, data, [data]) != data for _ in range(20)), mutation.__name__
