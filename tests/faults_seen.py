"""What is looked at after a fault: the record, the lines, what is left, what was said. `examine` makes an Outcome of it."""

import dataclasses
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.record import read_lines
from benchmarks.record.folder import DAMAGED, read_text, sha256

ORPHANS_S = 10.0  # after the launcher's end
ENDED_S, BEYOND_DEADLINE_S = (
    5.0,
    15.0,
)  # goals: to notice an ended process, and a hang beyond its deadline
CACHES = re.compile(r"torchinductor_")  # of torch, one for each user
# Hidden files of ours that stay; every other is the temporary of a write.
KEPT = re.compile(r"\.lock$")
TRACEBACK = re.compile(
    r"^.{0,3}Traceback \(most recent", re.M
)  # the log of a rank, which may hold one, is indented further


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    kind: str
    phase: str
    target: str
    expected_cause: str | None  # None: the cell finishes
    cause: str | None
    expected_rank: int | None
    rank: int | None
    noticed_s: (
        float | None
    )  # from the strike to the end of the cell; None where the cell does not end by it
    goal_s: float | None
    others_finished: bool
    samples_lost: int  # lines
    orphans: int
    left_files: list[str]
    expected_status: int
    status: int
    sentence: str
    traceback: bool
    control_characters: bool  # of a rank, in what the launcher printed
    wrong: list[str]  # in words; empty if all is right

    @property
    def right(self):
        return not self.wrong

    def as_json(self):
        return {**dataclasses.asdict(self), "right": self.right}


def examine(fault, sweep, key=None, record=None, struck=None):
    """Return the Outcome of a fault in a PlantedSweep that has ended.

    `key` is the fault's in `sweep.faults`; `record` is the hit attempt's, the cell's first if not given; `struck` is
    `{"time": seconds since 1970, "lines": {path in the cell's folder: [line, …]}}`, what the plant wrote if not given.
    """
    struck, orphans = struck or sweep.struck(key), sweep.orphans()
    if fault.phase != "compose":  # where no cell has begun
        record = record or next(iter(sweep.records(key)), None)
    failure = record.failure if record else None
    # A launcher that was killed ends nothing: its cell is closed by the next one.
    timed = failure and struck and (fault.kind, fault.target) != ("SIGKILL", "launcher")
    seen = {
        "cause": failure.cause if failure else None,
        "rank": failure.rank if failure else None,
        "noticed_s": round(record.ended_at - struck["time"], 2) if timed else None,
        "goal_s": fault.deadline_s + BEYOND_DEADLINE_S if fault.deadline_s else ENDED_S,
        "others_finished": sweep.others_finished(key),
        "samples_lost": samples_lost(struck, record, sweep.study_dir)
        if struck and struck["lines"]
        else 0,
        "orphans": len(orphans),
        "left_files": sweep.left_files(),
        "status": sweep.status,
        "sentence": failure.message if failure else "",
        "traceback": bool(TRACEBACK.search(sweep.said)),
        "control_characters": bool(re.search(r"[\x00-\x08\x0b-\x1f\x7f]", sweep.said)),
    }
    if fault.may_finish and record is not None and record.state == "finished":
        fault = dataclasses.replace(fault, cause=None)
    expected = {
        "expected_cause": fault.cause,
        "expected_rank": fault.rank,
        "expected_status": fault.status,
    }
    wrong = [] if struck else ["it did not strike"]
    for name, right in (("cause", fault.cause), ("rank", fault.rank), ("status", fault.status)):
        wrong += [f"{name} {seen[name]}, not {right}"] if seen[name] != right else []
    wrong += [
        f"{name}: {seen[name]}"
        for name in ("samples_lost", "orphans", "left_files", "traceback")
        if seen[name]
    ]
    wrong += ["control characters were printed"] if seen["control_characters"] else []
    if (
        fault.target != "launcher" and not seen["others_finished"]
    ):  # that of a launcher is known after the next ones
        wrong.append("another cell did not finish")
    return Outcome(fault.kind, fault.phase, fault.target, **expected, **seen, wrong=wrong)


def samples_lost(struck, record, study_dir):
    """How many lines that were there at the strike are gone, or are in a file that the record does not count."""
    if record is None:
        return sum(map(len, struck["lines"].values()))
    folder, lost = attempt_folder(record, study_dir), 0
    for name, before in struck["lines"].items():
        try:
            now = set(read_text(folder / name).splitlines())
        except DAMAGED:
            now = set()
        counted = name.startswith("profile/") or record.raw_sha256.get(name) == sha256(
            folder / name
        )
        lost += sum(1 for line in before if line not in now or not counted)
    return lost


def attempt_folder(record, study_dir):
    """The folder of a record's attempt: the cell's, or one that was set aside in it."""
    for path in (study_dir / record.cell.folder).glob("**/attempt.json"):
        if record.record_id in path.read_text():
            return path.parent
    return study_dir / record.cell.folder


def temporaries(output_dir):
    """Hidden files and folders in an output folder that no write should leave."""
    return [
        str(path.relative_to(output_dir))
        for path in output_dir.rglob(".*")
        if not KEPT.search(path.name)
    ]


def until(condition, seconds, process=None):
    """Poll until a condition holds and return what it returned."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        if process is not None and process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s, or the launcher ended before")


def stepping(folder):
    """{rank: pid} of a cell whose two ranks step, else None."""
    pids = {}
    for number in (0, 1):
        lines = list(read_lines(folder / "ranks" / f"{number}.jsonl"))
        if not any(line["kind"] == "beat" for line in lines):
            return None
        pids[number] = next(line["pid"] for line in lines if line["kind"] == "start")
    return pids


def server_of(folder):
    """The process of a cell's first server."""
    return next(
        line["pid"] for line in read_lines(folder / "ranks" / "2.jsonl") if line["kind"] == "start"
    )


def cell_folders(output_dir):
    """{bucket_cap_mb: folder} of the cells of all studies that have begun."""
    found = {}
    for path in output_dir.glob("*/*/cell.json"):
        if (path.parent / "attempt.json").exists():
            found[int(json.loads(path.read_text())["strategy"]["bucket_cap_mb"])] = path.parent
    return found


def tokens(study):
    return {
        line["token"] for line in read_lines(study / "journal.jsonl") if line["kind"] == "begin"
    }


def alive(tokens):
    """Processes that carry one of the tokens."""
    marks = {f"RINGSIDE_TOKEN={token}".encode() for token in tokens}
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
                if marks & set(environ.split(b"\0")):
                    found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def environment_of(pid):
    pairs = (
        pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    )
    return {name.decode(): value.decode() for name, _, value in pairs if name}
