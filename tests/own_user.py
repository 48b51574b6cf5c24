"""A user with a folder of his own from which he launches: for the tests of his own code."""

import json
import os
import subprocess
import sys
from pathlib import Path

from build import files_with_auto

from benchmarks.record import read_study

ROOT = Path(__file__).parent.parent
SHORT = (
    "device=cpu", "model=fmnist_cnn", "batch_size=4", "benchmark.max_seconds=0.2", "benchmark.min_iterations=3",
    "benchmark.exchange_iterations=3", "benchmark.limit_iterations=0", "benchmark.exposed_rounds=1",
    "benchmark.warmup_min_seconds=0",
)  # fmt: skip
QUIET = ("tracking=none", "report=false", "validity.foreign_cpu_limit=1")


def user(folder, python_path="src"):
    """The folder of a user; call it to launch from there. src/ is on PYTHONPATH, by a relative name."""

    def launch(*arguments):
        return subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), *arguments], cwd=folder, capture_output=True, text=True,
            timeout=240, check=False, env={**os.environ, "PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    launch.folder = folder
    return launch


def records_of(own, done):
    """(Record, its file's content) of each cell that ran, in the order of the cells' names."""
    records, unreadable = read_study(own.folder / "outputs" / "default")
    assert (done.returncode, unreadable) == (0, []), done.stdout + done.stderr
    assert files_with_auto(own.folder / "outputs") == []
    contents = [
        json.loads(path.read_text()) for path in own.folder.glob("outputs/default/*/record.json")
    ]
    by_id = {content["record_id"]: content for content in contents}
    return [
        (record, by_id[record.record_id])
        for record in sorted(records, key=lambda record: record.name)
    ]
