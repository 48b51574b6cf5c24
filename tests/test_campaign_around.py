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
from campaign import record_outcomes
from faults import ROOT
from faults_around import CASES, server_gone
from faults_seen import TRACEBACK, Outcome, until
from place import LONGEST_S, Place

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


@pytest.mark.timeout(3 * LONGEST_S)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_of_the_surroundings_costs_nothing_measured(
    case, tmp_path, request, record_property
):
    options = [*case.options] if "report=true" in case.options else [*case.options, "report=false"]
    place = Place(tmp_path / re.sub(r"\W+", "-", case.name), case.phase, *options, rank=case.rank)
    if case.plant is server_gone:
        place.port = request.getfixturevalue("mlflow_server")
    try:
        outcome = run(case, place)
    finally:
        place.end()
    record_outcomes(record_property, [outcome])


def run(case, place):
    """Run a case to its end, and the same command again without the fault. Returns its Outcome."""
    began = time.monotonic()
    planted = case.plant(place, case.value)
    next(planted)
    if case.phase == "start":
        next(planted)
    launcher = place.start()
    if case.phase != "start":
        place.at_gate()
    acknowledged = place.lines()
    if case.phase != "start":
        next(planted)
    place.go()
    status = place.wait(launcher, LONGEST_S)
    orphans = place.orphans()
    next(planted, None)
    said, records, left = place.said, place.records(), place.left_files()
    finished = [one for one in records if one.state == "finished"]
    failures = [one.failure for one in records if one.failure]
    causes = [one.cause for one in failures]
    acknowledged |= place.lines()
    took = time.monotonic() - began

    place.begins_again()
    again = place.wait(place.start(), LONGEST_S)
    left += [f"{path} in the end" for path in place.left_files()]
    lost = acknowledged - place.lines()
    # A cell whose pass under a profiler was cut short is measured again, with its pass; the first record stays.
    every = Counter(one.cell_key for one in place.records() if one.state == "finished")
    kept = {one.record_id for one in records} <= {one.record_id for one in place.records()}
    says = next(
        (line for line in said.splitlines() if case.says and re.search(case.says, line, re.I)), ""
    )
    traceback = bool(TRACEBACK.search(said + place.said))
    checks = {
        f"status {status}": status in case.status,
        f"{case.says!r} was not said": says or not case.says,
        "a traceback was printed": not traceback,
        f"only {len(finished)} cells finished": len(finished) >= case.finished,
        f"the causes are {causes}": not case.cause or causes == [case.cause],
        f"processes were left: {orphans}": not orphans,
        f"files were left: {left}": not left,
        f"{len(lost)} lines were lost": not lost,
        "a record was lost": kept,
        f"again: status {again}: {place.said}": again == 0,
        f"cells were finished {[*every.values()]} times": sorted(every.values())
        in ([1, 1], [1, 1 + (case.phase == "profile")]),
        "a cell ended before it began": all(
            one.ended_at >= one.started_at for one in place.records()
        ),
    }
    wrong = [what for what, right in checks.items() if not right]
    wrong += different(place) if "tracking=mlflow" in case.options else []
    print(
        f"{case.name}: status {status} after {took:.0f} s: {says}",
        *wrong,
        said if wrong else "",
        sep="\n",
    )
    value = "" if case.value is None else f" {case.value}"
    return Outcome(
        kind=case.plant.__name__.replace("_", " ") + value, phase=case.phase, target="surroundings",
        expected_cause=case.cause, cause=failures[0].cause if failures and case.cause else None,
        expected_rank=case.failed_rank, rank=failures[0].rank if failures and case.cause else None,
        noticed_s=None, goal_s=None, others_finished=len(finished) >= case.finished, samples_lost=len(lost),
        orphans=len(orphans), left_files=left, expected_status=status if status in case.status else case.status[0],
        status=status, sentence=says, traceback=traceback, control_characters=False, wrong=wrong,
    )  # fmt: skip


def different(place):
    """What differs between MLflow and the records after `sync`."""
    uri = ["--uri", place.uri] if place.uri else []
    study = str(place.out / place.study_dir.name)
    for command in ("sync", "compare"):
        done = subprocess.run(
            [*place.inside(), sys.executable, "-m", "launch", command, study, *uri],
            env={**os.environ, "PYTHONPATH": str(ROOT)},  # nsenter leaves the working folder
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return [f"{command}: {done.stdout[-1000:]} {done.stderr[-1000:]}"]
    return []
