"""Sweeps of the campaign: many faulty cells in one, launchers that are signalled or killed, launchers that share a study."""

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import faults_table
from faults import TRAINING, PlantedSweep, cap_of
from faults_seen import ENDED_AT_ONCE, ORPHANS_S, TRACEBACK, examine, outcome
from faults_table import LOST_AFTER_S, SILENCE_S, START_S, TABLES_OF_HOSTS, key_of

from benchmarks.record import read_lines, read_study
from launch.study.study_folder import StudyFolder
from launch.tracking.tracker import sync

# Tiny windows in which every phase comes.
SHORT = [
    *TRAINING[:5], "benchmark.exchange_iterations=4", "benchmark.limit_iterations=4",
    "benchmark.exposed_rounds=1", "noise_pairs=0", f"engine.silence_timeout_s={SILENCE_S}",
    f"engine.start_timeout_s={START_S}",
]  # fmt: skip
QUIET = ["report=false"]
TWO_RANKS = "gpus=0+1"
WITH_SERVER = ["strategy=kvstore_dist_sync", "strategy.servers=1"]
WITH_PASS = ["profiler=torch", "profiler.steps=2", "profiler.warmup_steps=2"]
BRIEF = [
    *SHORT, "benchmark.exchange_iterations=0", "benchmark.exposed_rounds=0",
    "tracking.enabled=true", "gpus=0",
]  # fmt: skip
TWO_HOSTS = [
    "gpus=0", "nodes=a+b", "engine=command", f"engine.lost_after_s={LOST_AFTER_S}",
]  # fmt: skip
IN_NAMESPACES = "engine.prefix=[ip,netns,exec,{host}]"
# What a fault of a host did to its wire and to its disk.
MENDED = """
ip -n b link set eth0 up
tc -n b qdisc change dev eth0 root tbf rate 1gbit burst 256kb latency 50ms
rm -f {}/tmp-b/torchinductor_ballast
"""
FIRST_CAP = 11
HEALTHY = (1001, 1002)  # caps of cells without a fault
CELLS = 6  # of a study whose launchers are killed
# Cells that a launcher may measure before it is killed, drawn from: so that kills come in every part of a life.
REACHED = (0, 1.5, 1.5)
READING = threading.Lock()  # MLflow's client has state of the whole process


def sweep_of(folder, faults, *overrides):
    """Return the outcomes of faults that one sweep has, each in a cell of its own, with a healthy cell at either end."""
    keyed = {FIRST_CAP + number: fault for number, fault in enumerate(faults)}
    if not any(option.startswith("gpus=") for option in overrides):
        overrides = (TWO_RANKS, *overrides)
    with PlantedSweep(folder, keyed, *SHORT, *QUIET, *overrides, healthy=HEALTHY) as sweep:
        sweep.run(timeout_s=90 * len(faults) + 300)
        return verified(sweep, [examine(fault, sweep, cap) for cap, fault in keyed.items()])


def verified(sweep, outcomes):
    """Return the outcomes, with what verify says of the study that they left in each."""
    wrong = sweep.contradicted()
    for one in outcomes:
        one["wrong"] += wrong
        one["right"] = not one["wrong"]
    return outcomes


def on_two_hosts(folder, faults):
    """Return the outcomes of faults of hosts, inside in_namespaces.sh: each has a launcher of its own.

    The same command must then measure the cell without the fault.
    """
    outcomes = []
    for number, fault in enumerate(faults):
        own = folder / str(number)
        with PlantedSweep(own, {FIRST_CAP: fault}, *SHORT, *QUIET, *TWO_HOSTS) as sweep:
            own_disks = f"engine.prefix=[env,TMPDIR={own}/tmp-{{host}},ip,netns,exec,{{host}}]"
            for host in "ab":
                (own / f"tmp-{host}").mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "none", own / "tmp-b"])
            sweep.run(own_disks, timeout_s=240)
            sweep.orphans()
            deadline = time.monotonic() + ORPHANS_S
            # What a killed agent left is removed by who sampled there.
            while fault.kind != "host SIGKILL" and time.monotonic() < deadline:
                if not list(own.glob("tmp-*/ringside-*")):
                    break
                time.sleep(0.1)
            if fault.target == "launcher":
                StudyFolder(str(sweep.output_dir), sweep.study_dir.name).recover()
            seen = examine(fault, sweep, FIRST_CAP)
            if fault.kind == "host SIGKILL":  # nobody was left there; the next agent removes it
                seen["wrong"] = [one for one in seen["wrong"] if "TMPDIR/ringside-" not in one]
            subprocess.run(["bash", "-c", MENDED.format(own)], check=True)
            sweep.replant({})
            status = sweep.run(own_disks, timeout_s=240)
            states = [record.state for record in sweep.records()]
            if status or states.count("finished") != 1:
                seen["wrong"].append(f"again: status {status}, {states}")
            left = sweep.all_left()
            if left or sweep.orphans():
                seen["wrong"].append(f"in the end: {left}, {sweep.orphans()}")
            outcomes += verified(sweep, [seen])
            print(fault.kind, fault.phase, *seen["wrong"], flush=True)
            subprocess.run(["umount", own / "tmp-b"])
    return outcomes


def launchers_of(folder, faults, template):
    """Return the outcomes of signals to launchers: each starts where the one before was stopped, the last measures the rest.

    `template` is an initialised store. A signal that lets the cell finish has a cell of its own.
    """
    caps, outcomes = [], []
    for number, fault in enumerate(faults):
        caps.append(FIRST_CAP if fault.cause else FIRST_CAP + 1 + number)
    with PlantedSweep(folder, {}, *SHORT, TWO_RANKS, healthy=HEALTHY[:1]) as sweep:
        (sweep.output_dir / "mlflow.db").write_bytes(template.read_bytes())
        for fault, cap in zip(faults, caps, strict=True):
            key = key_of(fault, cap)
            sweep.replant({key: fault})
            sweep.run(*of_phase(fault), caps=[cap, HEALTHY[0]], timeout_s=180)
            sweep.orphans()  # before anything ends them
            if fault.kind in ENDED_AT_ONCE:  # as the next launcher does
                StudyFolder(str(sweep.output_dir), sweep.study_dir.name).recover()
            newest = next(reversed(sweep.records(cap)), None)
            outcomes.append(examine(fault, sweep, key, record=newest))
        sweep.replant({})
        # A cell whose profiled pass was interrupted is measured anew, with its trace.
        passes = {cap for fault, cap in zip(faults, caps, strict=True) if fault.phase == "profile"}
        rest = {*caps, HEALTHY[0]} - passes
        statuses = [sweep.run(caps=sorted(rest), timeout_s=60 * len(faults))]
        if passes:
            passed = [*sorted(passes), HEALTHY[0]]
            statuses.append(sweep.run(*WITH_PASS, caps=passed, timeout_s=60 * len(faults)))
        records = sweep.records()
    finished = [record.cell_key for record in records if record.state == "finished"]
    again = {record.cell_key for record in records if record.cell.profiler != "none"}
    twice = [key for key in set(finished) - again if finished.count(key) > 1]
    done = not any(statuses) and not twice and {one.cell_key for one in records} == set(finished)
    for one in outcomes:
        one["others_finished"] = done
        if not done:
            one["wrong"].append(f"the last launchers ended with {statuses}; twice: {twice}")
    return verified(sweep, outcomes)


def of_phase(fault):
    """Overrides that make the phase of a fault come."""
    if fault.phase == "profile":
        return [*WITH_PASS, "report=false"]
    if fault.phase in ("projection", "report"):
        return ["tracking.enabled=true"]
    return ["report=false"]


@contextlib.contextmanager
def brief_sweep(folder, cells, template):
    """A sweep of so many cells, into a copy of a store."""
    caps = [FIRST_CAP + number for number in range(cells)]
    with PlantedSweep(folder, {}, *BRIEF, healthy=caps) as sweep:
        (sweep.output_dir / "mlflow.db").write_bytes(template.read_bytes())
        yield sweep


def killed(folder, draw, template, kills):
    """Return the outcomes of launchers killed at times that `draw` (random.Random) takes from their whole life."""
    with brief_sweep(folder / "undisturbed", 2, template) as sweep:
        lives = []
        for _ in range(2):  # one measures two cells, the other finds everything done
            begun = time.monotonic()
            assert sweep.run(timeout_s=300) == 0, sweep.printed
            lives.append(time.monotonic() - begun)
    overhead_s, cell_s = lives[1], max(0.5, (lives[0] - lives[1]) / 2)
    outcomes, number = [], 0
    while len(outcomes) < kills:
        number += 1
        with brief_sweep(folder / str(number), CELLS, template) as sweep:
            hits = []
            while True:
                done = {one.cell_key for one in sweep.records() if one.state == "finished"}
                launcher = sweep.start()
                cells = min(CELLS - len(done), draw.choice(REACHED))
                if len(outcomes) + len(hits) == kills:
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(timeout=draw.uniform(0, overhead_s + cells * cell_s))
                launcher.send_signal(signal.SIGKILL)
                if launcher.wait() != -signal.SIGKILL:
                    break
                hits.append((phase_of_kill(sweep), len(sweep.orphans())))
            status = sweep.wait(launcher, timeout_s=300)
            wrong = [] if status == 0 else [f"the last launcher ended with {status}"]
            wrong += measured_once(sweep, CELLS) + in_the_store(sweep.study_dir)
            for phase, orphans in hits[:-1]:
                outcomes.append(of_launchers("random SIGKILL", phase, sweep, [], orphans))
            phase, orphans = hits[-1] if hits else ("undisturbed", 0)
            left = sweep.all_left()
            outcomes.append(of_launchers("random SIGKILL", phase, sweep, wrong, orphans, left))
    return outcomes


def phase_of_kill(sweep):
    """Return what a launcher was at when it was killed."""
    pid = sweep.processes[-1].pid
    journal = [*read_lines(sweep.study_dir / "journal.jsonl")]
    if not any(line["process"]["pid"] == pid for line in journal):
        return "compose"
    states = {line["token"]: line for line in journal if line["kind"] in ("begin", "end")}
    for line in states.values():
        if line["kind"] == "begin" and line["process"]["pid"] == pid:
            written = [*read_lines(sweep.study_dir / line["cell"] / "ranks" / "0.jsonl")]
            phases = [line["phase"] for line in written if "phase" in line]
            return phases[-1] if phases else "spawn"
    return "between cells"


def many(folder, draw, template, studies, launchers, cells):
    """Return the outcome of launchers that start at about the same time, beside a program that burns a core.

    There are `launchers` of them on each of `studies` studies of one store, each asked for the same `cells` cells.
    """
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    with brief_sweep(folder, cells, template) as sweep:
        try:
            names = [f"study{number}" for number in range(studies)]
            running = []
            for name in names * launchers:
                running.append(sweep.start(f"study={name}"))
                time.sleep(draw.uniform(0, 1))
            statuses = [sweep.wait(process, timeout_s=400) for process in running]
        finally:
            burner.kill()
            burner.wait()
        wrong = [f"exit statuses {statuses}"] if any(statuses) else []
        for line in sweep.everything_printed.splitlines():
            if "incomplete" in line or "without MLflow" in line:
                wrong.append(line)
        for name in names:
            sweep.study_dir = sweep.output_dir / name
            wrong += measured_once(sweep, cells) + in_the_store(sweep.study_dir, synced=False)
        kind = f"{studies} launchers on one store"
        if studies == 1:
            kind = f"{launchers} launchers on one study"
        return of_launchers(kind, "all", sweep, wrong, len(sweep.orphans()), sweep.all_left())


# --- what must hold afterwards ---


def measured_once(sweep, cells):
    """Sentences about cells that were not measured exactly once, and attempts that nobody closed."""
    records, unreadable = read_study(sweep.study_dir)
    finished = sorted(cap_of(record) for record in records if record.state == "finished")
    wrong = [str(error) for error in unreadable]
    if finished != [FIRST_CAP + number for number in range(cells)]:
        wrong.append(f"finished were the cells {finished}")
    tokens = {"begin": set(), "end": set()}
    for line in read_lines(sweep.study_dir / "journal.jsonl"):
        if line["kind"] in tokens:
            tokens[line["kind"]].add(line["token"])
    begun = tokens["begin"]
    if begun != tokens["end"] or not {record.record_id for record in records} <= begun:
        counts = f"{len(begun)} attempts began, {len(tokens['end'])} ended"
        wrong.append(f"{counts}, {len(records)} have a record")
    return wrong


def in_the_store(study_dir, synced=True):
    """Sentences about what MLflow lacks, and about a `sync` that should change nothing."""
    database = study_dir.parent / "mlflow.db"
    with READING:
        if synced:
            sync(study_dir)
        before = content(database)
        again = sync(study_dir)
        after = content(database)
    if again.projected or after != before:
        return [f"a second sync wrote {again.projected} records, or changed rows"]
    return []


def content(database):
    """Every row of every table of a store."""
    with contextlib.closing(sqlite3.connect(database)) as store:
        names = store.execute("select name from sqlite_master where type='table'").fetchall()
        return {
            name: sorted(map(repr, store.execute(f'select * from "{name}"'))) for (name,) in names
        }


def of_launchers(kind, phase, sweep, wrong, orphans, left_files=()):
    """The outcome of launchers, whose cells all finish."""
    traceback = bool(TRACEBACK.search(sweep.everything_printed))
    wrong = list(wrong)
    if traceback:
        wrong.append("a traceback")
    if orphans:
        wrong.append(f"{orphans} processes were left")
    if left_files:
        wrong.append(f"left: {', '.join(sorted(left_files))}")
    seen = {"orphans": orphans, "left_files": sorted(left_files), "traceback": traceback}
    return outcome(kind, phase, "launcher", wrong, **seen)


def main(folder, seed, number):
    """Break sweeps on the hosts a and b; FOLDER/outcomes.json has what came of each fault."""
    folder = Path(folder)
    faults = faults_table.drawn(TABLES_OF_HOSTS, int(seed), int(number))
    outcomes = sweep_of(folder / "ranks", faults["ranks"], *TWO_HOSTS, IN_NAMESPACES)
    outcomes += on_two_hosts(folder / "hosts", faults["hosts"])
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
