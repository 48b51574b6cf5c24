"""The campaign of slow ranks: planted faults of six kinds, and clean runs that name nobody.

    pytest -m campaign --seed N --faults 200 tests/test_slow_rank_campaign.py

It takes 30 minutes on two idle cores and prints its figures. Where others use the cores as well, a
CPU hog slows all ranks alike: there it is not a fault of one rank.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Shares of the faults of which something is right at least, and of clean runs with a name at most.
LEAST = {"rank": 0.95, "bucket": 0.8, "kind": 0.8}
MOST_FALSE_NAMES = 0.01


@pytest.mark.campaign
@pytest.mark.needs("root", "namespaces")
@pytest.mark.timeout(7200)
def test_planted_faults_are_named_and_clean_runs_name_nobody(tmp_path, request):
    faults = request.config.getoption("--faults") or 200
    seed = request.config.getoption("--seed")
    command = [sys.executable, TESTS / "planted_slowness.py", tmp_path]
    command += [str(number) for number in (seed, faults, faults // 2)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    outcomes = defaultdict(list)
    for text in done.stdout.splitlines():
        line = json.loads(text)
        for name, value in line["outcome"].items():
            outcomes[name].append(value)
            outcomes[f"{line['plan']['kind']}: {name}"].append(value)
    for name, values in sorted(outcomes.items()):
        print(f"{name}: {sum(values)} of {len(values)}")
    for name, share in LEAST.items():
        assert sum(outcomes[name]) >= share * len(outcomes[name]), name
    assert sum(outcomes["false_name"]) <= MOST_FALSE_NAMES * len(outcomes["false_name"])
