"""False alarms: fifty clean cells on idle cores. Minutes, and nothing else may run beside it:
`pytest -m campaign -n 0 tests/test_idle_cells.py`.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.record import read_study

ROOT = Path(__file__).parents[1]
ASKED = (
    *(
        "device=cpu",
        "gpus=0,0+1",
        "model=fmnist_cnn",
        "batch_size=16",
        "repeats=5",
        "noise_pairs=0",
    ),
    "strategy=nccl_allreduce,kvstore_device,none,cpu_staged,kvstore_dist_sync",
    *("benchmark.max_seconds=1", "benchmark.exposed_rounds=1", "benchmark.warmup_min_seconds=1"),
    *("tracking=none", "report=false", "study=idle"),
)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_clean_cells_on_idle_cores_have_no_code_but_noisy(tmp_path):
    command = [sys.executable, "launch.py", "-m", *ASKED, f"output_dir={tmp_path}"]
    subprocess.run(command, cwd=ROOT, check=True)
    records, errors = read_study(tmp_path / "idle")
    codes = Counter(code for record in records for code in record.validity.against)
    print(f"{len(records)} cells: {dict(codes)}")
    assert not errors and len(records) >= 50 and codes.keys() <= {"noisy"}, codes
