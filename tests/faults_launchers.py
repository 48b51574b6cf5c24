"""Launchers that are killed at any moment of their life, and launchers that share a study or a store."""

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time

from faults import PlantedSweep, cap_of
from faults_seen import TRACEBACK, Outcome
from faults_sweeps import SHORT

from benchmarks.record import read_lines, read_study
from conf.schema import Tracking
from launch.tracking.sync import compare, sync

BRIEF = [
    *SHORT,
    "benchmark.exchange_iterations=0",
    "benchmark.exposed_rounds=0",
    "tracking.enabled=true",
]
CELLS = 6  # of a study whose launchers are killed
BURNER = "while True: pass"
# Cells that a launcher may measure before it is killed, drawn from: a study is then good for many kills, of every part of a life.
REACHED = (0, 1.5, 1.5)
READING = threading.Lock()  # MLflow's client has state of the whole process


class Killed:
    """Studies of CELLS cells whose launchers are killed at times that are drawn over their whole life."""

    def __init__(self, folder, draw, template):
        """`draw` is a random.Random, `template` an initialised store."""
        self.folder, self.draw, self.template = folder, draw, template
        self.overhead_s, self.cell_s = (
            4.0,
            4.0,
        )  # of a launcher without cells, and of a cell; measured below

    def run(self, kills):
        """Kill launchers until so many were hit. Return an Outcome for each."""
        self._measure()
        outcomes, number = [], 0
        while len(outcomes) < kills:
            number += 1
            outcomes += self._study(self.folder / str(number), kills - len(outcomes))
        return outcomes

    def _measure(self):
        """Find out how long launchers live: one that measures, and one that finds everything done."""
        with self._sweep(self.folder / "undisturbed", range(2)) as sweep:
            lives = []
            for _ in range(2):
                begun = time.monotonic()
                assert sweep.run(timeout_s=300) == 0, sweep.said
                lives.append(time.monotonic() - begun)
        self.overhead_s, self.cell_s = lives[1], max(0.5, (lives[0] - lives[1]) / 2)

    @contextlib.contextmanager
    def _sweep(self, folder, cells):
        caps = [11 + number for number in cells]
        with PlantedSweep(folder, {}, *BRIEF, "gpus=0", healthy=caps) as sweep:
            (sweep.output_dir / "mlflow.db").write_bytes(self.template.read_bytes())
            yield sweep

    def _study(self, folder, most):
        """Kill launchers of one study until it is measured to its end; at most `most` of them."""
        with self._sweep(folder, range(CELLS)) as sweep:
            hits = []
            while True:
                left = CELLS - len(
                    {one.cell_key for one in sweep.records() if one.state == "finished"}
                )
                launcher = sweep.start()
                life_s = self.overhead_s + min(left, self.draw.choice(REACHED)) * self.cell_s
                if len(hits) < most and self._kill(launcher, life_s):
                    hits.append((where(sweep), len(sweep.orphans())))
                    continue
                status = sweep.wait(launcher, timeout_s=300)
                break
            wrong = [] if status == 0 else [f"the last launcher ended with {status}"]
            wrong += measured_once(sweep, CELLS) + in_the_store(sweep.study_dir) + left_by(sweep)
            kills = [
                outcome("random SIGKILL", phase, sweep, [], orphans) for phase, orphans in hits[:-1]
            ]
            last = hits[-1] if hits else ("undisturbed", 0)
            return [
                *kills,
                outcome("random SIGKILL", last[0], sweep, wrong, last[1], sweep.all_left()),
            ]

    def _kill(self, launcher, life_s):
        """Kill a launcher at a time that is drawn over its life; return whether it was still there."""
        try:
            launcher.wait(timeout=self.draw.uniform(0, life_s))
        except subprocess.TimeoutExpired:
            launcher.send_signal(signal.SIGKILL)
        return launcher.wait() == -signal.SIGKILL


def where(sweep):
    """Return what a launcher was at when it was killed."""
    journal = list(read_lines(sweep.study_dir / "journal.jsonl"))
    if not any(line["process"]["pid"] == sweep.processes[-1].pid for line in journal):
        return "compose"
    states = {line["token"]: line for line in journal if line["kind"] in ("begin", "end")}
    for line in states.values():
        if line["kind"] == "begin" and line["process"]["pid"] == sweep.processes[-1].pid:
            written = read_lines(sweep.study_dir / line["cell"] / "ranks" / "0.jsonl")
            return next(
                (line["phase"] for line in reversed(list(written)) if "phase" in line), "spawn"
            )
    return "between cells"


def many(folder, draw, template, studies, launchers, cells):
    """Return the Outcome of launchers that start at about the same time, beside a CPU burner.

    There are `launchers` of them on each of `studies` studies of one store, each asked for the same `cells` cells.
    """
    caps = [11 + number for number in range(cells)]
    sweep = PlantedSweep(folder, {}, *BRIEF, "gpus=0", healthy=caps)
    with sweep, subprocess.Popen([sys.executable, "-c", BURNER]) as burner:
        try:
            (sweep.output_dir / "mlflow.db").write_bytes(template.read_bytes())
            names = [f"study{number}" for number in range(studies)]
            running = []
            for name in names * launchers:
                running.append(sweep.start(f"study={name}"))
                time.sleep(draw.uniform(0, 1))
            statuses = [sweep.wait(process, timeout_s=400) for process in running]
        finally:
            burner.kill()
        wrong = [] if not any(statuses) else [f"exit statuses {statuses}"]
        wrong += [
            line
            for line in sweep.everything_said.splitlines()
            if "incomplete" in line or "without MLflow" in line
        ]
        for name in names:
            sweep.study_dir = sweep.output_dir / name
            wrong += measured_once(sweep, cells) + in_the_store(sweep.study_dir, synced=False)
        wrong += left_by(sweep)
        kind = (
            f"{launchers} launchers on one study"
            if studies == 1
            else f"{studies} launchers on one store"
        )
        return outcome(kind, "all", sweep, wrong, len(sweep.orphans()), sweep.all_left())


# --- what must hold afterwards -------------------------------------------------------------------------------------


def measured_once(sweep, cells):
    """Sentences about cells that were not measured exactly once, and attempts that nobody closed."""
    records, unreadable = read_study(sweep.study_dir)
    finished = [cap_of(one) for one in records if one.state == "finished"]
    wrong = [str(error) for error in unreadable]
    if sorted(finished) != [11 + number for number in range(cells)]:
        wrong.append(f"finished were the cells {sorted(finished)}")
    journal = list(read_lines(sweep.study_dir / "journal.jsonl"))
    begun, ended = (
        {line["token"] for line in journal if line["kind"] == kind} for kind in ("begin", "end")
    )
    if begun != ended or not {one.record_id for one in records} <= begun:
        wrong.append(
            f"{len(begun)} attempts began, {len(ended)} ended, {len(records)} have a record"
        )
    return wrong


def in_the_store(study_dir, synced=True):
    """Sentences about what MLflow has otherwise than the records, after a `sync` if asked for, and about a second `sync`."""
    with READING:
        if synced:
            sync(study_dir)
        held, before = compare(study_dir, Tracking()), content(study_dir.parent / "mlflow.db")
        again = sync(study_dir)
        wrong = [f"MLflow lacks the records {held.missing}"] if held.missing else []
        wrong += [f"MLflow has {held.differences} {held.unknown}"] if not held.right else []
        wrong += [f"a second sync wrote {again.projected} records"] if again.projected else []
        changed = [
            name
            for name, rows in content(study_dir.parent / "mlflow.db").items()
            if rows != before.get(name)
        ]
        return wrong + ([f"a second sync changed {changed}"] if changed else [])


def content(database):
    """Every row of every table of a store."""
    with contextlib.closing(sqlite3.connect(database)) as store:
        names = [
            name for (name,) in store.execute("select name from sqlite_master where type='table'")
        ]
        return {name: sorted(map(repr, store.execute(f'select * from "{name}"'))) for name in names}


def left_by(sweep):
    """Sentences about processes and files that are left."""
    left = [f"left: {', '.join(sorted(sweep.all_left()))}"] if sweep.all_left() else []
    return left + ([f"processes {sweep.orphans()}"] if sweep.orphans() else [])


def outcome(kind, phase, sweep, wrong, orphans, left_files=()):
    """An Outcome of launchers, whose cells all finish."""
    traceback = bool(TRACEBACK.search(sweep.everything_said))
    wrong = [
        *wrong,
        *(["a traceback"] if traceback else []),
        *(["processes were left"] if orphans else []),
    ]
    return Outcome(
        kind, phase, "launcher", expected_cause=None, cause=None, expected_rank=None, rank=None, noticed_s=None, goal_s=None,
        others_finished=not wrong, samples_lost=0, orphans=orphans, left_files=list(left_files), expected_status=0,
        status=sweep.status, sentence="", traceback=traceback, control_characters=False, wrong=wrong,
    )  # fmt: skip
