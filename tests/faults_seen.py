"""What is looked at after a fault, and what a campaign of faults reports.

`examine` returns an outcome: a dict that says what was expected, what was seen, and what of it is
`wrong`, in words. Tests hand outcomes to the process that prints them by `record_outcomes`.
"""

import json
import re
import statistics
import time
from pathlib import Path

import psutil

from benchmarks.record import read_lines
from benchmarks.record.folder import DAMAGED, read_text, sha256

ORPHANS_S = 10.0  # after the launcher's end
# Signals after which a launcher ends nothing: its cell is closed by the next one.
ENDED_AT_ONCE = ("SIGKILL", "SIGINT twice")
# Goals: to notice a process that ended, and a hang beyond its deadline.
ENDED_S, BEYOND_DEADLINE_S = 5.0, 15.0
# Where processes of a sweep may listen: on their own host, and where hosts of in_namespaces.sh meet.
LISTENING = re.compile(r"127\.0\.0\.1|::1|::ffff:127\.0\.0\.1|10\.77\.0\.[12]")
CACHES = re.compile(r"torchinductor_")  # of torch, one for each user
KEPT = re.compile(r"\.lock$")  # of our hidden files; every other is the temporary of a write
# The log of a rank, which may hold one, is indented further.
TRACEBACK = re.compile(r"^.{0,3}Traceback \(most recent", re.M)
PROPERTY = "outcomes"
ANY = "any"


def outcome(kind, phase, target, wrong, **seen):
    """One line of a campaign: all fields, with those that a fault of the surroundings lacks."""
    unseen = dict.fromkeys(("cause", "rank", "expected_cause", "expected_rank"))
    unseen |= {"noticed_s": None, "goal_s": None, "samples_lost": 0, "orphans": 0}
    unseen |= {"left_files": [], "traceback": False, "sentence": "", "others_finished": not wrong}
    fault = {"kind": kind, "phase": phase, "target": target}
    return unseen | fault | seen | {"wrong": wrong, "right": not wrong}


def examine(fault, sweep, key=None, record=None, struck=None):
    """Return the outcome of a fault in a PlantedSweep that has ended.

    `key` is the fault's in `sweep.faults`; `record` is the hit attempt's, the cell's first if not
    given; `struck` is what the plant wrote if not given.
    """
    struck = struck or sweep.struck(key)
    if fault.phase != "compose":  # where no cell has begun
        record = record or next(iter(sweep.records(key)), None)
    failure = record.failure if record else None
    cause, rank = (failure.cause, failure.rank) if failure else (None, None)
    expected_cause = fault.cause
    if fault.may_finish and record is not None and record.state == "finished":
        expected_cause = None
    # Which rank of a dead wire waits first is chance; what finished has no rank at fault.
    expected_rank = rank if fault.rank == ANY else fault.rank
    expected_status = fault.status
    if expected_cause is None and fault.cause:
        expected_rank = None
        expected_status = fault.status if fault.target == "launcher" else 0
    noticed_s = None
    at_once = fault.target == "launcher" and fault.kind in ENDED_AT_ONCE
    if failure and struck and not at_once:
        noticed_s = round(record.ended_at - struck["time"], 2)
    seen = {
        "samples_lost": samples_lost(struck, record, sweep.study_dir) if struck else 0,
        "orphans": len(sweep.orphans()),
        "left_files": sweep.left_files(),
        "traceback": bool(TRACEBACK.search(sweep.printed)),
    }
    wrong = [f"{name}: {value}" for name, value in seen.items() if value]
    if not struck:
        wrong.append("it did not strike")
    has_hosts = "nodes=a+b" in sweep.overrides
    for address in struck.get("listening", ()) if struck else ():
        if not LISTENING.fullmatch(address) or (address.startswith("10.") and not has_hosts):
            wrong.append(f"a process listens at {address}")
    for name, value, right in (
        ("cause", cause, expected_cause),
        ("rank", rank, expected_rank),
        ("status", sweep.status, expected_status),
    ):
        if value != right:
            wrong.append(f"{name} {value}, not {right}")
    sentence = failure.message if failure else ""
    named = re.search(rf"\b(on|hosts?) {fault.host}\b", sentence)
    if fault.host and expected_cause and not named:
        wrong.append(f"host {fault.host} is not named: {sentence}")
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", sweep.printed):
        wrong.append("control characters were printed")
    others_finished = sweep.others_finished(key)
    # For a launcher that is known only after the next ones.
    if fault.target != "launcher" and not others_finished:
        wrong.append("another cell did not finish")
    goal_s = fault.deadline_s + BEYOND_DEADLINE_S if fault.deadline_s else ENDED_S
    seen |= {"cause": cause, "rank": rank, "noticed_s": noticed_s, "goal_s": goal_s}
    seen |= {"expected_cause": expected_cause, "expected_rank": expected_rank}
    seen |= {"sentence": sentence, "others_finished": others_finished}
    return outcome(fault.kind, fault.phase, fault.target, wrong, **seen)


def samples_lost(struck, record, study_dir):
    """Count the lines of the strike that are gone, or in a file that the record does not count."""
    if record is None:
        return sum(map(len, struck["lines"].values()))
    folder, lost = attempt_folder(record, study_dir), 0
    for name, before in struck["lines"].items():
        path = folder / name
        try:
            now = set(read_text(path).splitlines())
        except DAMAGED:
            now = set()
        if not name.startswith("profile/") and record.raw_sha256.get(name) != sha256(path):
            now = set()
        lost += len([line for line in before if line not in now])
    return lost


def attempt_folder(record, study_dir):
    """The folder of a record's attempt: the cell's, or one that was set aside in it."""
    for path in (study_dir / record.cell.folder).glob("**/attempt.json"):
        if record.record_id in path.read_text():
            return path.parent
    return study_dir / record.cell.folder


def temporaries(output_dir):
    """Hidden files and folders in an output folder that no write should leave."""
    hidden = [path for path in output_dir.rglob(".*") if not KEPT.search(path.name)]
    return [str(path.relative_to(output_dir)) for path in hidden]


def until(condition, seconds, process=None):
    """Poll until a condition holds and return what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s, or the launcher ended before")


def stepping(folder):
    """{rank: pid} of a cell whose two ranks step, else None."""
    pids = {}
    for rank in (0, 1):
        lines = list(read_lines(folder / "ranks" / f"{rank}.jsonl"))
        if not any(line["kind"] == "beat" for line in lines):
            return None
        pids[rank] = next(line["pid"] for line in lines if line["kind"] == "start")
    return pids


def server_of(folder):
    lines = read_lines(folder / "ranks" / "2.jsonl")
    return next(line["pid"] for line in lines if line["kind"] == "start")


def cell_folders(output_dir):
    """{bucket_cap_mb: folder} of the cells of all studies that have begun."""
    folders = {}
    for path in output_dir.glob("*/*/cell.json"):
        if (path.parent / "attempt.json").exists():
            cap = json.loads(path.read_text())["strategy"]["bucket_cap_mb"]
            folders[int(cap)] = path.parent
    return folders


def tokens(study):
    journal = read_lines(study / "journal.jsonl")
    return {line["token"] for line in journal if line["kind"] == "begin"}


def environment_of(pid):
    variables = {}
    for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = pair.partition(b"=")
        variables[name.decode()] = value.decode()
    return variables


def alive(*marks):
    """Processes that are no zombies and have one of these texts in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if any(mark.encode() in environ for mark in marks):
                    processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes


def ranks_alive(cell_tokens):
    """Processes that carry one of the tokens."""
    return alive(*(f"RINGSIDE_TOKEN={token}" for token in cell_tokens))


# --- the campaign ---


def record_outcomes(record_property, outcomes):
    """Hand outcomes to the process that prints and writes them; fail if one is not right."""
    record_property(PROPERTY, json.dumps(outcomes))
    wrong = []
    for one in outcomes:
        if one["wrong"]:
            what = f"{one['kind']} of the {one['target']} in {one['phase']}"
            wrong.append(f"{what}: {'; '.join(one['wrong'])}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(outcomes)} are not right", *wrong])


def reported(stats):
    """The outcomes that the tests of a session handed over, from pytest's reports."""
    seen, outcomes = set(), []
    for report in (*stats.get("passed", ()), *stats.get("failed", ())):
        for name, value in report.user_properties:
            if name == PROPERTY and value not in seen:
                seen.add(value)
                outcomes += json.loads(value)
    return outcomes


def summary(outcomes):
    right = {
        "right": [one["right"] for one in outcomes],
        "cause right": [one["cause"] == one["expected_cause"] for one in outcomes],
        "rank right": [one["rank"] == one["expected_rank"] for one in outcomes],
        "others finished": [one["others_finished"] for one in outcomes],
    }
    shares = [f"{name} {sum(of)} ({sum(of) / len(of):.0%})" for name, of in right.items()]
    left = [f"{name} {sum(one[name] for one in outcomes)}" for name in ("samples_lost", "orphans")]
    left.append(f"left files {sum(len(one['left_files']) for one in outcomes)}")
    left.append(f"tracebacks {sum(one['traceback'] for one in outcomes)}")
    lines = [f"campaign: {len(outcomes)} faults; {', '.join(shares)}", f"  {', '.join(left)}"]
    timed = [one for one in outcomes if one["noticed_s"] is not None]
    for name, hang in (("processes that ended", False), ("hangs", True)):
        some = [one for one in timed if (one["cause"] == "hang") == hang]
        if some:
            times = [one["noticed_s"] for one in some]
            late = [one for one in some if one["noticed_s"] > one["goal_s"]]
            middle = f"  {name} noticed after {statistics.median(times):.1f} s (median), "
            late_words = f"{len(late)} of {len(some)} later than their goal"
            lines.append(f"{middle}{max(times):.1f} s (worst); {late_words}")
    return "\n".join(lines)
