"""engine=slurm: what is asked of Slurm, how agents start, and all of it on a real Slurm."""

import contextlib
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from build import ROOT

from benchmarks.record import read_lines, read_study
from conf.options import Refused
from conf.schema import Config, Engine
from launch.engines import slurm
from launch.engines.agent_channel import agent_command
from launch.engines.slurm import job_parameters
from launch.plan import estimate
from launch.plan.estimate import does_not_fit

ALLOCATION = {slurm.JOB: "12", slurm.NODES: "n[1-2],m7", slurm.CORES: "72(x2),36"}
SHORT = (
    "gpus=0", "device=cpu", "model=fmnist_cnn", "benchmark.max_seconds=0.3", "tracking=none",
    "benchmark.min_iterations=3", "benchmark.exchange_iterations=3", "benchmark.limit_iterations=0",
    "benchmark.exposed_rounds=1", "benchmark.warmup_min_seconds=0", "report=false", "noise_pairs=0",
)  # fmt: skip


# --- without Slurm: scontrol is a script that answers as 22.05 does ------------------------------


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """scontrol(shell script): put it on PATH, in front; return the surroundings that have it."""

    def put(script):
        program = tmp_path / "bin" / "scontrol"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        slurm._names.cache_clear()
        return {**os.environ, **ALLOCATION}

    return put


def test_hosts_and_cores_are_those_of_the_allocation(scontrol):
    around = scontrol('[ "$*" = "show hostnames n[1-2],m7" ] && printf "n1\\nn2\\nm7\\n"')
    assert slurm.host_names(around) == ("n1", "n2", "m7")
    assert [slurm.cores(host, around) for host in ("n1", "n2", "m7", "other")] == [72, 72, 36, None]
    assert slurm.cores("n1", {**around, slurm.CORES: ""}) is None


def test_a_slurm_that_does_not_answer_is_one_sentence(scontrol, monkeypatch):
    monkeypatch.setattr(slurm, "ANSWER_S", 0.3)
    hosts = "engine=slurm: the hosts of SLURM_JOB_NODELIST=n[1-2],m7 are not known"
    for script, said in (
        ("echo 'scontrol: error: Invalid' >&2; exit 1", "scontrol: scontrol: error: Invalid"),
        ("exit 3", "scontrol: exit status 3"),
        ("sleep 9", "scontrol did not answer in 0 s"),
    ):
        with pytest.raises(Refused) as refused:
            slurm.host_names(scontrol(script))
        assert str(refused.value) == f"{hosts}: {said}"


def test_outside_an_allocation_the_way_in_is_named():
    said = r"not inside a Slurm job .* inside salloc or sbatch, or add engine.submit=true"
    with pytest.raises(Refused, match=said):
        slurm.host_names({})
    assert slurm.time_left_s({}) is None


def test_the_time_left_is_asked_of_slurm_and_else_read_from_the_environment(scontrol):
    around = scontrol("echo JobId=12 JobState=RUNNING EndTime=$(($(date +%s) + 100)) Deadline=N/A")
    assert 95 < slurm.time_left_s(around) <= 100
    around = {**scontrol("exit 1"), slurm.END: str(int(time.time()) + 50)}
    assert 45 < slurm.time_left_s(around) <= 50
    assert slurm.time_left_s(scontrol("echo JobId=12 EndTime=Unknown")) is None


def test_a_cell_that_does_not_fit_says_why(monkeypatch):
    def estimates(cells, known):
        return [SimpleNamespace(seconds=cells[0].name)]

    monkeypatch.setattr(estimate, "estimates", estimates)
    monkeypatch.setattr(slurm, "time_left_s", lambda around: 100.0 if around else None)
    cells = [SimpleNamespace(name=seconds) for seconds in (39, 41, 42, 40)]
    why = [does_not_fit(cell, [], Engine(name="slurm"), ALLOCATION) for cell in cells]
    assert [bool(sentence) for sentence in why] == [False, True, True, False]
    assert "takes about 41 s, the job has 1 min 40 s left" in why[1]
    assert not any(does_not_fit(cell, [], Engine(name="ssh"), ALLOCATION) for cell in cells)


AGENT = ["-m", "benchmarks.rank.host_agent"]


def test_an_agent_starts_by_srun_in_a_step_of_its_own(scontrol):
    around = scontrol('printf "n1\\nn2\\nm7\\n"')
    engine = Engine(name="slurm", python="/opt/py thon", folder="/opt/ring side")
    found = agent_command(engine, "m7", around)
    assert found[0] == "srun" and "--unbuffered" not in found
    options = {"--overlap", "--nodes=1", "--ntasks=1", "--nodelist=m7", "--cpus-per-task=36"}
    assert options < {*found}
    assert found[-4:] == ["--chdir=/opt/ring side", "/opt/py thon", *AGENT]


def test_the_words_of_any_engine_keep_arguments_apart():
    prefix = ["kubectl", "exec", "-i", "pod-{host}", "--"]
    found = agent_command(Engine(name="command", prefix=prefix), "a; rm", {})
    assert found[:5] == ["kubectl", "exec", "-i", "pod-a; rm", "--"]
    assert found[5:] == ["env", f"--chdir={ROOT}", sys.executable, *AGENT]
    found = agent_command(Engine(name="ssh", folder="/o'ne", python="/p y"), "a", {})
    words = """cd '/o'"'"'ne' && exec '/p y' -m benchmarks.rank.host_agent"""
    assert found[-3:] == ["--", "a", words] and "-F" not in found
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes"} < set(found)
    found = agent_command(Engine(name="ssh", ssh_config="mine"), "a", {})
    # ssh starts in another folder.
    assert found[found.index("-F") + 1] == str(Path("mine").absolute())


def of(nodes, **engine):
    """Configurations as job_parameters reads them: one for each list of nodes."""
    known = Engine(name="slurm", submit=True, **engine)
    return [type("Asked", (Config,), {})(engine=known, nodes=list(one), study="s") for one in nodes]


def test_a_job_has_as_many_hosts_as_its_cells_need():
    options = {"time_minutes": 90, "partition": "gpu", "gpus_per_node": 8}
    asked = job_parameters(of([["1"], ["2"]], **options, sbatch={"qos": "high"}))
    assert asked == {
        "job_name": "ringside-s", "nodes": 2, "time": 90, "partition": "gpu", "gpus_per_node": 8,
        "exclusive": True, "use_srun": False, "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True, "signal": "B:TERM@60", "qos": "high"},
    }  # fmt: skip
    asked = job_parameters(of([["a"], ["a", "b"], ["c", "b"]]))
    assert (asked["nodes"], asked["nodelist"]) == (3, "a,b,c")
    assert job_parameters(of([["scale"]], job_nodes=4))["nodes"] == 4
    with pytest.raises(Refused, match=r"nodes=pairs: .* add engine.job_nodes=N"):
        job_parameters(of([["pairs"]]))


def test_a_job_can_be_planned_before_its_hosts_are_known(launch):
    asked = ("-m", "engine=slurm", "engine.submit=true", "nodes=1,2", *SHORT, "dry_run=true")
    status, said, _ = launch(*asked)
    assert status == 0 and "host1+host2" in said and "nothing was started" in said
    status, _, said = launch("engine=slurm", "nodes=pairs", *SHORT, "dry_run=true")
    assert status == 2 and "add engine.job_nodes=N" in said


# --- with Slurm ----------------------------------------------------------------------------------


class Cluster:
    """The Slurm that .ci/slurm started, and a folder in which launch.py is called."""

    def __init__(self, folder):
        self.folder, self.mark = folder, f"ringside-test-{folder.name}"
        configuration = f"{os.environ['RINGSIDE_TEST_SLURM']}/slurm.conf"
        self.around = {**os.environ, "SLURM_CONF": configuration, "MARK": self.mark}

    def slurm(self, *words):
        done = subprocess.run(
            words, cwd=self.folder, env=self.around, capture_output=True, text=True, timeout=200
        )
        return done.returncode, done.stdout + done.stderr

    def submit(self, *options):
        """Submit a sweep; return its job and what launch.py printed."""
        words = [sys.executable, ROOT / "launch.py", "-m", "engine=slurm", "engine.submit=true"]
        given = {option.partition("=")[0] for option in options}
        usual = [option for option in SHORT if option.partition("=")[0] not in given]
        status, printed = self.slurm(*words, *usual, *options)
        assert status in (0, 2)
        return printed.split()[1], printed

    def log(self, job):
        logs = (self.folder / "outputs" / ".slurm").glob(f"{job}*_log.out")
        return "".join(path.read_text() for path in logs)

    def wait(self, job, until, seconds=150):
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, self.log(job)
            time.sleep(0.2)

    def end_of(self, job):
        """Wait for the end of a job; return its exit status."""
        self.wait(job, lambda: job not in self._jobs())
        fields = self.slurm("scontrol", "--oneliner", "show", "job", job)[1]
        return int(re.search(r"ExitCode=(\d+):", fields)[1])

    def records(self):
        found, unreadable = read_study(self.folder / "outputs" / "default")
        assert unreadable == []
        return found

    def left(self):
        """Jobs, and processes that are not gone some seconds after them."""
        deadline = time.monotonic() + 15
        while (found := self._jobs() + self._processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _jobs(self):
        return self.slurm("squeue", "--noheader", "--format=%i")[1].split()

    def _processes(self):
        """Processes of launchers and agents: all have the mark in their environment."""
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get("MARK") == self.mark:
                    found.append(" ".join(one.cmdline()))
        return found


@pytest.fixture
def cluster(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    for job in cluster._jobs():
        cluster.slurm("scancel", job)


def finished(record):
    return record.state == "finished"


@pytest.mark.needs("slurm")
def test_a_sweep_inside_an_allocation_runs_on_its_hosts(cluster):
    words = [sys.executable, ROOT / "launch.py", "-m", "engine=slurm", "nodes=1,2", *SHORT]
    command = f"exec {shlex.join(map(str, words))}"
    job = ("sbatch", "--wait", "--nodes=2", "--exclusive", "--output=log", f"--wrap={command}")
    status, said = cluster.slurm(*job)
    assert status == 0, said + (cluster.folder / "log").read_text()
    records = sorted(cluster.records(), key=lambda record: len(record.cell.hosts))
    assert [record.cell.hosts for record in records] == [("n1",), ("n1", "n2")]
    assert all(map(finished, records)) and cluster.left() == []


@pytest.mark.needs("slurm", "submitit")
def test_a_requeued_job_goes_on_and_measures_nothing_twice(cluster):
    job, printed = cluster.submit("nodes=1", "batch_size=4,8,16", "engine.time_minutes=5")
    assert printed.startswith(f"job {job} is submitted; its log is ")
    cluster.wait(job, lambda: "[2/3]" in cluster.log(job))
    assert cluster.slurm("scontrol", "requeue", job)[0] == 0

    def started_again():
        # A requeued job waits two minutes, and an update has no effect while the first run ends.
        cluster.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
        return "[3/3]" in cluster.log(job)

    cluster.wait(job, started_again)
    assert cluster.end_of(job) == 0, cluster.log(job)
    lines = list(read_lines(cluster.folder / "outputs" / "default" / "journal.jsonl"))
    begun = [line["cell"] for line in lines if line["kind"] == "begin"]
    assert [begun.count(cell) for cell in dict.fromkeys(begun)] == [1, 2, 1], cluster.log(job)
    records = cluster.records()
    sizes = sorted(record.cell.batch_size for record in records if finished(record))
    assert sizes == [4, 8, 16] and not any(record.state == "failed" for record in records)
    assert "Traceback" not in cluster.log(job) and cluster.left() == []


@pytest.mark.needs("slurm", "submitit")
def test_a_cancelled_job_closes_its_cell_and_leaves_nothing(cluster):
    job, _ = cluster.submit("nodes=2", "benchmark.max_seconds=60")
    cluster.wait(job, lambda: "[1/1]" in cluster.log(job) and "started" in cluster.log(job))
    time.sleep(5)
    cluster.slurm("scancel", "--batch", "--signal=TERM", job)
    assert cluster.end_of(job) == 130, cluster.log(job)
    assert [record.state for record in cluster.records()] == ["interrupted"], cluster.log(job)
    assert cluster.left() == []


@pytest.mark.needs("slurm", "submitit")
def test_no_cell_is_started_that_does_not_fit_into_the_job(cluster):
    job, _ = cluster.submit("nodes=1", "engine.time_minutes=2", "benchmark.max_seconds=100")
    assert cluster.end_of(job) == 130
    said = "is not started, nor any other run that does not fit: it takes about"
    assert said in cluster.log(job) and cluster.records() == []


@pytest.mark.needs("slurm", "submitit")
def test_what_slurm_does_not_accept_is_one_sentence(cluster):
    _, printed = cluster.submit("nodes=1", "engine.partition=nowhere")
    assert printed.startswith("launch.py: engine.submit=true: Slurm did not take the job: ")
    assert printed.count("\n") == 1 and "partition" in printed
