"""engine=env: a job that starts the same command on every node."""

import json
import random
import socket
import subprocess
import sys
import threading

import pytest
from build import ROOT
from conftest import IN_NAMESPACES

from analysis.console import SafeConsole
from benchmarks.record import read_study
from conf.options import Refused
from conf.schema import Engine
from launch.engines import inside_job
from launch.engines.inside_job import JOB_TOKEN, gather, place

SOON = Engine(name="env", start_timeout_s=200.0)
SLURM = {"SLURM_JOB_ID": "71", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "4"}
AT = {"MASTER_ADDR": "10.0.0.5"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "16", "OMPI_COMM_WORLD_SIZE": "24", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}  # fmt: skip
TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6",
}  # fmt: skip
KUBEFLOW = {"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "trainer-node-0-0.trainer"}


@pytest.mark.parametrize(
    ("around", "platform", "rank", "nodes", "local_rank", "address", "port"),
    [
        (TORCHRUN | AT, "torchrun", 1, 2, 1, "10.0.0.5", 29500),
        (TORCHRUN | KUBEFLOW | AT, "torchrun", 1, 2, 1, "10.0.0.5", 29500),
        (MPI | AT, "mpirun", 16, 3, 0, "10.0.0.5", 29400),
        (SKYPILOT, "SkyPilot", 0, 2, 0, "10.0.0.5", 29400),
        (
            KUBEFLOW | {"PET_MASTER_PORT": "29401"},
            *("Kubeflow", 1, 2, 0, "trainer-node-0-0.trainer", 29401),
        ),
        (SLURM | AT | {"SLURM_LOCALID": "3"}, "srun", 1, 4, 3, "10.0.0.5", 29400),
        ({"RANK": "1", "WORLD_SIZE": "2", **AT}, "the environment", 1, 2, 0, "10.0.0.5", 29400),
        ({"NODE_RANK": "0", "NNODES": "1", **AT}, "the environment", 0, 1, 0, "10.0.0.5", 29400),
    ],
)
def test_a_platform_says_which_process_this_is(
    around, platform, rank, nodes, local_rank, address, port
):
    found = place(around, Engine(name="env"))
    assert (found.platform.name, found.rank, found.nodes) == (platform, rank, nodes)
    assert (found.local_rank, found.address, found.port) == (local_rank, address, port)
    assert found.is_secret is False
    assert place(around | {JOB_TOKEN: "word"}, Engine(name="env")).is_secret


@pytest.mark.parametrize(
    ("around", "options", "part"),
    [
        ({}, {}, "no platform has started this process"),
        ({"NODE_RANK": "0", "NNODES": "2"}, {}, "does not say where node 0 is"),
        ({"NODE_RANK": "one", "NNODES": "2", **AT}, {}, "NODE_RANK='one' is not a number"),
        (
            {"NODE_RANK": "0", "NNODES": "2", **AT},
            {"token_file": "/nowhere/token"},
            "engine.token_file=/nowhere/token: cannot be read",
        ),
    ],
)
def test_a_job_that_is_not_whole_is_refused(around, options, part):
    with pytest.raises(Refused, match=part):
        place(around, Engine(name="env", **options))


def node(rank, word="word"):
    around = {
        "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": socket.gethostname(),
        "MASTER_PORT": "30977", "LOCAL_WORLD_SIZE": "8", JOB_TOKEN: word,
    }  # fmt: skip
    return place(around, SOON)


class Joining:
    """Node 0 that waits for two others, on a thread; and what it printed."""

    def __enter__(self):
        self.said, self.answer = [], None
        console = SafeConsole(self, width=200)
        self._thread = threading.Thread(target=self._gather, args=(console,))
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._thread.join()

    def write(self, text):
        self.said.append(text)

    def flush(self):
        pass

    def _gather(self, console):
        try:
            self.answer = gather(node(0), SOON, console)
        except Refused as error:
            self.answer = str(error)


def connect():
    for port in range(30978, 30978 + inside_job.PORTS):
        for _ in range(20):
            try:
                return socket.create_connection((socket.gethostname(), port), 5.0)
            except ConnectionRefusedError:
                threading.Event().wait(0.05)
    raise AssertionError("node 0 does not listen")


def test_node_0_takes_each_other_node_once_and_then_listens_no_more():
    with Joining() as joining:
        connections = [connect() for _ in range(3)]
        for connection, rank in zip(connections[:2], (1, 2), strict=True):
            inside_job._join(connection, node(rank))
        with pytest.raises((ValueError, OSError)):  # rank 2 once more, or too late
            inside_job._join(connections[2], node(2))
    assert "8 processes a node were started; one of them is used" in "".join(joining.said)
    names, joined = joining.answer
    assert names == ["node0", "node1", "node2"], "one machine has one name"
    assert list(joined) == ["node1", "node2"]
    joined["node1"].sendall(b"run\n")
    assert connections[0].recv(4) == b"run\n"
    with pytest.raises(OSError):
        socket.create_connection((socket.gethostname(), 30978), 1.0)
    for connection in (*connections, *joined.values()):
        connection.close()


@pytest.mark.parametrize(
    ("changed", "meaningless"), [(20, 60), pytest.param(950, 10_000, marks=pytest.mark.campaign)]
)
def test_what_does_not_know_the_word_is_refused_told_once_and_harms_no_job(changed, meaningless):
    draw = random.Random(40)
    frames = [*hostile_frames()]
    for frame in draw.choices(frames, k=changed):
        at = draw.randrange(len(frame))
        frames.append(frame[:at] + draw.randbytes(1) + frame[at + 1 :])
    frames += [draw.randbytes(draw.randrange(1, 600)) for _ in range(meaningless)]
    with Joining() as joining:
        for _ in range(2):
            with connect() as connection, pytest.raises(ValueError, match="another token"):
                inside_job._join(connection, node(1, "another word"))
        for frame in frames:
            with connect() as connection:
                connection.sendall(frame)
        connections = [connect(), connect()]
        for connection, rank in zip(connections, (1, 2), strict=True):
            inside_job._join(connection, node(rank))
    said = "".join(joining.said)
    assert said.count("was refused") == 1 and "another token" in said, said
    for connection in (*connections, *joining.answer[1].values()):
        connection.close()


def hostile_frames():
    """Messages that are nearly right, and those of other protocols."""
    proofs = ("", "0" * 64, None, 7, [], {"a": "b"}, "é", True)
    for proof in proofs:
        for rank in (1, -1, "1", None, [1], 10**40):
            message = {"rank": rank, "host": "b", "nonce": "0" * 32, "proof": proof}
            yield json.dumps(message).encode() + b"\n"
    yield from (
        b"\n", b"{}\n", b"[]\n", b"null\n", b"[" * 500, b"GET / HTTP/1.1\r\n\r\n",
        b'{"rank": NaN}\n', b'{"say": "ready"}\n', b"\0" * 600, b'{"refused": "no"}\n',
    )  # fmt: skip


def test_a_node_does_not_serve_what_is_not_node_0():
    with socket.create_server((socket.gethostname(), 0)) as server:
        for greeting in (b'{"greeting": "ringside", "nonce": "00"}\n', b"SSH-2.0-OpenSSH\r\n", b""):
            with socket.create_connection(server.getsockname()) as connection:
                impostor, _ = server.accept()
                with impostor:
                    impostor.sendall(greeting + b'{"proof": "00"}\n')
                    with pytest.raises((ValueError, LookupError)):
                        inside_job._join(connection, node(1))


TRAINING = (
    "device=cpu", "gpus=0", "model=fmnist_cnn", "batch_size=4", "tracking=none", "report=false",
    "noise_pairs=0", "benchmark.max_seconds=0.3", "benchmark.min_iterations=3",
    "benchmark.exchange_iterations=3", "benchmark.limit_iterations=0",
    "benchmark.exposed_rounds=0", "benchmark.warmup_min_seconds=0",
)  # fmt: skip


def run_job(folder, platform, fault, *options):
    """Return ({host: what became of its command}, records, processes left, hosts that listened)."""
    launch = (sys.executable, "launch.py", "-m", "engine=env", *TRAINING, f"output_dir={folder}")
    words = [
        *(IN_NAMESPACES, "-n", "2", "1gbit", "--", sys.executable, "tests/on_hosts.py", folder),
        *("--", sys.executable, "tests/job_on_hosts.py", platform, fault, "--", *launch, *options),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    nodes = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            nodes[told["host"]] = told
    records, unreadable = read_study(folder / "default")
    if fault == "two_jobs":
        records += read_study(folder.with_name(f"{folder.name}_2") / "default")[0]
    assert unreadable == []
    left = json.loads((folder / "left.json").read_text())
    return nodes, records, left


@pytest.mark.needs("namespaces")
def test_torchrun_on_two_nodes_measures_one_study(tmp_path):
    strategies = "strategy=nccl_allreduce,kvstore_dist_sync,hierarchical"
    nodes, records, left = run_job(tmp_path, "torchrun", "none", "nodes=2", strategies)
    assert [nodes[host]["status"] for host in "ab"] == [0, 0], nodes
    assert {record.state for record in records} == {"finished"} and len(records) == 3
    assert {record.cell.hosts for record in records} == {("node0", "node1")}
    assert left == []


CAUSES = {
    "other_killed": ("failed", "node_lost"),
    "cut": ("failed", "node_lost"),
    "half_open": ("failed", "node_lost"),
    "preempted": ("interrupted", "interrupted"),
}
HARMLESS = ("cut_for_a_moment", "late", "port_taken", "two_jobs")
REFUSED = {"absent": "1 of 2 nodes came within 20 s", "other_token": "it has another token"}


@pytest.mark.campaign
@pytest.mark.needs("namespaces")
@pytest.mark.parametrize("turn", range(20))
@pytest.mark.parametrize("fault", ["first_killed", *CAUSES, *HARMLESS, *REFUSED])
def test_faults_inside_a_job(fault, turn, tmp_path):
    options = ["nodes=2"]
    if fault in REFUSED:
        options.append("engine.start_timeout_s=20")
    nodes, records, left = run_job(tmp_path, "plain", fault, *options)
    assert left == [], nodes
    states = [record.state for record in records]
    if fault in HARMLESS:
        assert states == ["finished"] * (2 if fault == "two_jobs" else 1), nodes
        assert {node["status"] for node in nodes.values()} == {0}, nodes
        return
    assert nodes["a"]["status"] != 0
    if fault in CAUSES:
        assert [(one.state, one.failure.cause) for one in records] == [CAUSES[fault]], nodes
    else:
        assert records == []  # of a launcher that was killed, the next command closes what it left
    if fault in REFUSED:
        assert REFUSED[fault] in nodes["a"]["printed"], nodes
    if fault in ("first_killed", "preempted"):
        _, records, left = run_job(tmp_path, "plain", "none", "nodes=2")
        assert left == [] and "finished" in [record.state for record in records], records
