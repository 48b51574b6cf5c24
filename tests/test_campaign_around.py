"""The campaign's faults of the surroundings, each in a launcher of its own.

    python -m pytest -m campaign --dist load tests/test_campaign_around.py

After each fault the same command is run again without it, and must end the study.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter

import pytest
from faults import ROOT, SurroundingsSweep
from faults_around import CASES, server_gone
from faults_seen import TRACEBACK, outcome, record_outcomes, until

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory):
    """The port of a real server."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--host",
         "127.0.0.1", "--port", str(port), "--workers", "1"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip

    def healthy():
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
        except OSError:
            return None

    until(healthy, 120, server)
    yield port
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


@pytest.mark.timeout(3 * SurroundingsSweep.LONGEST_S)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_of_the_surroundings_costs_nothing_measured(
    case, tmp_path, request, record_property
):
    options = [*case.options] if "report=true" in case.options else [*case.options, "report=false"]
    folder = tmp_path / re.sub(r"\W+", "-", case.name)
    sweep = SurroundingsSweep(folder, case.phase, *options, rank=case.rank)
    if case.plant is server_gone:
        sweep.port = request.getfixturevalue("mlflow_server")
    with sweep:
        record_outcomes(record_property, [run(case, sweep)])


def run(case, sweep):
    """Run a case to its end, and the same command again without the fault. Return its outcome."""
    began = time.monotonic()
    planted = case.plant(sweep, case.value)
    next(planted)
    if case.phase == "start":
        next(planted)
    launcher = sweep.start()
    if case.phase != "start":
        sweep.at_gate()
    acknowledged = sweep.lines()
    if case.phase != "start":
        next(planted)
    sweep.go()
    status = sweep.wait(launcher, sweep.LONGEST_S)
    orphans = sweep.orphans()
    next(planted, None)
    printed, records, left = sweep.printed, sweep.records(), sweep.left_files()
    finished = [record for record in records if record.state == "finished"]
    failures = [record.failure for record in records if record.failure]
    causes = [failure.cause for failure in failures]
    acknowledged |= sweep.lines()
    took = time.monotonic() - began

    again = sweep.wait(sweep.start(), sweep.LONGEST_S)
    left += [f"{path} in the end" for path in sweep.left_files()]
    lost = acknowledged - sweep.lines()
    every = sweep.records()
    # A cell whose pass under a profiler was cut short is measured again; the first record stays.
    times = sorted(Counter(one.cell_key for one in every if one.state == "finished").values())
    kept = {record.record_id for record in records} <= {record.record_id for record in every}
    said = ""
    if case.says:
        lines = printed.splitlines()
        said = next((line for line in lines if re.search(case.says, line, re.I)), "")
    traceback = bool(TRACEBACK.search(printed + sweep.printed))
    checks = {
        f"status {status}": status in case.status,
        f"{case.says!r} was not said": said or not case.says,
        "a traceback was printed": not traceback,
        f"only {len(finished)} cells finished": len(finished) >= case.finished,
        f"the causes are {causes}": not case.cause or causes == [case.cause],
        f"processes were left: {orphans}": not orphans,
        f"files were left: {left}": not left,
        f"{len(lost)} lines were lost": not lost,
        "a record was lost": kept,
        f"again: status {again}: {sweep.printed}": again == 0,
        f"cells were finished {times} times": times in ([1, 1], [1, 1 + (case.phase == "profile")]),
        "a cell ended before it began": all(one.ended_at >= one.started_at for one in every),
    }
    wrong = [what for what, right in checks.items() if not right]
    if "tracking=mlflow" in case.options:
        wrong += refused_sync(sweep)
    print(f"{case.name}: status {status} after {took:.0f} s: {said}", *wrong, sep="\n")
    if wrong:
        print(printed)
    seen = {"samples_lost": len(lost), "orphans": len(orphans), "left_files": left}
    seen |= {"sentence": said, "traceback": traceback, "expected_cause": case.cause}
    if case.cause:
        rank = failures[0].rank if failures else None
        seen |= {"cause": case.cause, "rank": rank, "expected_rank": case.rank}
    value = "" if case.value is None else f" {case.value}"
    kind = case.plant.__name__.replace("_", " ") + value
    return outcome(kind, case.phase, "surroundings", wrong, **seen)


def refused_sync(sweep):
    """Sentences about a `sync` that fails."""
    uri = ["--uri", sweep.uri] if sweep.uri else []
    study = str(sweep.out / sweep.study_dir.name)
    command = [*sweep.inside(), sys.executable, "-m", "launch", "sync", study, *uri]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}  # nsenter leaves the working folder
    done = subprocess.run(command, env=around, capture_output=True, text=True)
    if done.returncode:
        return [f"sync: {done.stdout[-1000:]} {done.stderr[-1000:]}"]
    return []
