"""A user with a folder of his own from which he launches: for the tests of his own code."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

from build import ROOT, files_with_auto

from benchmarks.record import read_study
from launch.plan import own_code

SHORT = (
    "device=cpu", "model=fmnist_cnn", "batch_size=4", "benchmark.max_seconds=0.2",
    "benchmark.min_iterations=3", "benchmark.exchange_iterations=3", "benchmark.limit_iterations=0",
    "benchmark.exposed_rounds=1", "benchmark.warmup_min_seconds=0", "benchmark.warmup_max_seconds=2",
)  # fmt: skip
QUIET = ("tracking=none", "report=false", "validity.foreign_cpu_limit=1")


def user(folder, python_path="src"):
    """The folder of a user; call it to launch from there. Python finds src/, by a relative name."""

    def launch(*arguments):
        around = {**os.environ, "PYTHONPATH": python_path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(ROOT / "launch.py"), *arguments]
        options = {"cwd": folder, "env": around, "text": True, "timeout": 240}
        return subprocess.run(command, capture_output=True, **options)

    launch.folder = folder
    return launch


def import_own_code_here(monkeypatch):
    """Have this process import code of the user's own, not a child, which would import torch."""

    def run(command, **_):
        reasons = (own_code.refusal(own_code.Call(*call)) for call in json.loads(command[-1]))
        return SimpleNamespace(returncode=0, stdout=next(filter(None, reasons), ""), stderr="")

    monkeypatch.setattr(own_code, "subprocess", SimpleNamespace(run=run))


def records_of(own, done):
    """(Record, its file's content) of each cell that ran, in the order of the cells' names."""
    records, unreadable = read_study(own.folder / "outputs" / "default")
    assert (done.returncode, unreadable) == (0, []), done.stdout + done.stderr
    assert files_with_auto(own.folder / "outputs") == []
    by_id = {}
    for path in own.folder.glob("outputs/default/*/record.json"):
        content = json.loads(path.read_text())
        by_id[content["record_id"]] = content
    records.sort(key=lambda record: record.name)
    return [(record, by_id[record.record_id]) for record in records]
