"""Sweeps on several hosts, each a network namespace behind a wire of 1 Gbit/s, without root."""

import json
import os
import re
import shutil
import subprocess
import sys

import faults_table
import pytest
from build import ROOT
from conftest import IN_NAMESPACES, lacking
from faults_seen import record_outcomes

from benchmarks.record import read_study

ON_HOSTS = ROOT / "tests" / "on_hosts.py"
FAULTS = ROOT / "tests" / "faults_launchers.py"
FAULTS_HOSTS = ROOT / "tests" / "faults_hosts.py"
NOBODY = ()
if os.geteuid() == 0:
    NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
WIRE_GB_PER_S = 0.125
OWN = {"a": "10.77.0.1", "b": "10.77.0.2"}
COMMON = (
    "device=cpu", "model=fmnist_cnn", "batch_size=4", "tracking=none", "report=false",
    "noise_pairs=0",
)  # fmt: skip
BY_COMMAND = ("engine=command", "engine.prefix=[ip,netns,exec,{host}]")
BY_SSH = ("engine=ssh", "engine.ssh_config=ssh_config")
STRATEGIES = (
    "nccl_allreduce", "hierarchical", "cpu_staged", "kvstore_local", "kvstore_dist_sync",
    "kvstore_dist_async",
)  # fmt: skip
EXCHANGE = ("benchmark=exchange", "benchmark.iterations=8")
TRAINING = (
    "benchmark.max_seconds=0.3", "benchmark.min_iterations=3", "benchmark.exchange_iterations=3",
    "benchmark.limit_iterations=3", "benchmark.exposed_rounds=1", "benchmark.warmup_min_seconds=0",
)  # fmt: skip


def in_namespaces(
    *command, folder, hosts=2, rate="1gbit", delay="0ms", script=IN_NAMESPACES, user=(), around=None
):
    """Run a command among hosts: (exit status, what it said)."""
    words = [*user, script, "-n", str(hosts), "-d", delay, rate, "--", *command]
    own = {"CUDA_VISIBLE_DEVICES": "", "RINGSIDE_PYTHON": sys.executable}
    around = {**os.environ, **own, **(around or {})}
    done = subprocess.run(
        words, cwd=folder, timeout=7200, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=around,
    )  # fmt: skip
    return done.returncode, done.stdout


class Measured:
    """What a sweep on hosts wrote, who listened meanwhile, and which processes it left."""

    def __init__(self, folder, *options, hosts=2, ssh=()):
        launch = (sys.executable, str(ROOT / "launch.py"), "-m", *COMMON, *options)
        watched = (sys.executable, str(ON_HOSTS), str(folder), *ssh, "--", *launch)
        self.status, self.said = in_namespaces(*watched, folder=folder, hosts=hosts)
        assert self.status == 0, self.said
        self.records, unreadable = read_study(folder / "outputs" / "default")
        assert unreadable == [] and {one.state for one in self.records} == {"finished"}, self.said
        lines = (folder / "listeners.jsonl").read_text().splitlines()
        self.listeners = [json.loads(line) for line in lines]
        self.addresses = {(one["host"], one["address"]) for one in self.listeners}
        assert json.loads((folder / "left.json").read_text()) == [], "processes on a host"


ECHO = """
import socket, sys, time
address = ("10.77.0.2", 5000)
if sys.argv[1] == "b":
    connection, _ = socket.create_server(address).accept()
    connection.sendall(connection.recv(1))
    sys.exit()
while True:
    try:
        connection = socket.create_connection(address)
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
began = time.perf_counter()
connection.sendall(b"x")
connection.recv(1)
print("took_ms", 1e3 * (time.perf_counter() - began))
"""


@pytest.mark.needs("delays")
def test_a_wire_takes_its_delay_there_and_back(tmp_path):
    (tmp_path / "echo.py").write_text(ECHO)
    both = " & ".join(f"ip netns exec {host} {sys.executable} echo.py {host}" for host in "ba")
    status, text = in_namespaces("sh", "-c", f"{both}; wait", folder=tmp_path, delay="20ms")
    assert status == 0 and 40 <= float(text.split()[-1]) < 400, text
    assert in_namespaces("true", folder=tmp_path, delay="soon")[0] == 125


@pytest.mark.needs("namespaces")
def test_the_hosts_of_a_command_end_with_it(tmp_path):
    script = shutil.copy(IN_NAMESPACES, tmp_path / "script.sh")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    said = "ip netns list | wc -l; ip netns exec c ip -brief address show eth0; "
    said += "tc qdisc show dev port-c; sleep 4711 & exit 7"
    status, text = in_namespaces(
        "sh", "-c", said, folder="/", hosts=3, rate="20mbit", script=script, user=NOBODY
    )
    assert (status, text.split()[0]) == (7, "3"), text
    assert "10.77.0.3/24" in text and "tbf" in text and "rate 20Mbit" in text
    assert subprocess.run(["pgrep", "-f", "sleep 4711"], check=False).returncode == 1
    assert in_namespaces("true", folder="/", rate="fast", script=script, user=NOBODY)[0] == 125


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    folder, every = tmp_path_factory.mktemp("exchanged"), ",".join(STRATEGIES)
    return Measured(folder, *EXCHANGE, *BY_COMMAND, "gpus=0", "nodes=a+b", f"strategy={every}")


@pytest.mark.needs("namespaces")
def test_every_strategy_exchanges_between_two_hosts(exchanged):
    found = {record.cell.strategy["name"]: record for record in exchanged.records}
    assert set(found) == set(STRATEGIES)
    rates = {name: one.metrics["comm/algbw_gb_per_s"] for name, one in found.items()}
    for name, record in found.items():
        assert record.cell.hosts == ("a", "b")
        assert record.validity.verdict != "invalid", record.validity
        # A gradient crosses each wire at least once.
        assert 0 < rates[name] < 1.05 * WIRE_GB_PER_S, (name, record.metrics)
    assert rates["nccl_allreduce"] > 0.5 * WIRE_GB_PER_S


@pytest.mark.needs("namespaces")
def test_hosts_listen_only_where_the_others_meet_them(exchanged):
    assert exchanged.addresses <= {*OWN.items(), *dict.fromkeys(OWN, "127.0.0.1").items()}
    first = min(record.started_at for record in exchanged.records)
    # Before the first cell, hosts look for an address at which they meet.
    times = [(one["time"], one["host"]) for one in exchanged.listeners if one["time"] > first]
    during = 0
    for record in exchanged.records:
        hosts = [host for at, host in times if record.started_at <= at <= record.ended_at]
        assert {*hosts} == {*OWN}, record.name
        during += len(hosts)
    assert during == len(times), "between cells nobody listens"


@pytest.mark.needs("namespaces")
def test_a_host_alone_is_the_baseline_of_two(tmp_path):
    """Over ssh, where there is an sshd."""
    asked = (*TRAINING, "gpus=0", "nodes=a,b,a+b")
    if lacking("sshd"):
        trained = Measured(tmp_path, *asked, *BY_COMMAND)
    else:
        trained = Measured(tmp_path, *asked, *BY_SSH, ssh=("--ssh",))
        assert "sshd" in {one["program"] for one in trained.listeners}
        assert {address for _, address in trained.addresses} <= {*OWN.values(), "127.0.0.1"}
    cells = {record.cell.hosts: record for record in trained.records}
    assert list(cells)[-1] == ("a", "b") and len(cells) == 3
    two = cells["a", "b"]
    assert [(place.host, place.gpu) for place in two.cell.places] == [("a", 0), ("b", 0)]
    assert two.metrics["scaling/efficiency"] > 0 and {*two.checks["baselines"]} == {"a:0", "b:0"}
    assert "a+b" in trained.said


@pytest.mark.campaign
@pytest.mark.needs("namespaces")
def test_64_ranks_on_8_hosts_exchange(tmp_path):
    asked = (*EXCHANGE, *BY_COMMAND, "gpus=0,1,2,3,4,5,6,7", "nodes=a+b+c+d+e+f+g+h")
    together = Measured(tmp_path, *asked, hosts=8)
    assert [record.cell.world_size for record in together.records] == [64]


PHASES = ("spawn", "build", "warm-up", "timed", "exposed")


def look_at_faults(fault, folder, status, text):
    """Look at what faults_hosts saw of a fault in each phase."""
    assert status == 0, text
    for phase, seen in json.loads((folder / "seen.json").read_text()).items():
        assert (seen["left"], seen["lost_lines"]) == ([], 0), (phase, seen)
        assert seen["scratch"] == [], (phase, seen)
        assert (seen["again"], seen["kept"]) == (0, True), (phase, seen)
        assert seen["states"] == ["finished"] * 2, (phase, seen)
        if fault in ("agent", "host"):
            assert re.search(r"host \w+ is lost", seen["failure"]["message"]), (phase, seen)
            assert seen["other_cell"] == ["finished"], (phase, seen)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.needs("namespaces")
def test_faults_on_two_hosts(tmp_path, request, record_property):
    seed, number = (request.config.getoption(name) for name in ("seed", "host_faults"))
    number = number or sum(len(table(seed)) for table in faults_table.TABLES_OF_HOSTS.values())
    command = (sys.executable, str(FAULTS), str(tmp_path), str(seed), str(number))
    status, said = in_namespaces(*command, folder=ROOT, around={"PYTHONPATH": str(ROOT)})
    assert status == 0, said
    record_outcomes(record_property, json.loads((tmp_path / "outcomes.json").read_text()))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.needs("slurm")
@pytest.mark.parametrize("fault", ["slurmd", "slurmd-stop", "step", "agent", "scancel", "launcher"])
def test_a_node_that_dies_in_any_phase_costs_its_cell_alone(fault, tmp_path):
    command = [sys.executable, FAULTS_HOSTS, tmp_path, fault, *PHASES]
    around = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=around, capture_output=True, text=True)
    look_at_faults(fault, tmp_path, done.returncode, done.stderr)
