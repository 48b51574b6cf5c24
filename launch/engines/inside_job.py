"""Inside a job that has started this command on every node already (engine=env).

The process of node 0 plans and measures. Each other process becomes the agent of its node: it
connects to node 0, both prove that they know the job's word, and from then on its connection is the
agent's standard input and output. Nothing is unpickled, and no name from the network is a path.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from rich.console import Console

from benchmarks.record.safe_files import because
from benchmarks.record.safe_text import one_line
from conf.host import STARTER
from conf.options import Refused, expand_path
from conf.schema import Engine
from conf.subsets import is_name
from launch.engines import slurm
from launch.engines.agent_channel import AGENT
from launch.machine.facts import ROOT

NODES = "RINGSIDE_NODES"  # the names of the job's nodes, for the plan
JOB_TOKEN = "RINGSIDE_JOB_TOKEN"  # the variable with the secret of a job
PORTS = 16  # above MASTER_PORT, which is the store's: node 0 listens at the first free one
HANDSHAKE_S = 5.0
CONNECT_S = 3.0
RETRY_S = 0.5
MOST_BYTES = 512  # of a message before both are known to each other
MOST_PENDING = 64  # connections that have not said who they are
GREETING = "ringside"
OTHER_JOB = "it has another token, or is of another job"
BACKLOG = 128
# Both: the kernel sends no keep-alive while anything else is not acknowledged.
NOTICED_AFTER_S = 30
KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: NOTICED_AFTER_S // 2,
    socket.TCP_KEEPINTVL: NOTICED_AFTER_S // 6,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 1000 * NOTICED_AFTER_S,  # ms
}


class Platform(NamedTuple):
    """The variables by which a platform says which process this is. Empty: it has none."""

    name: str
    rank: str  # of the process, or of its node
    size: str
    local_rank: str = ""
    local_size: str = ""
    address: str = "MASTER_ADDR"  # of the first node
    port: str = "MASTER_PORT"
    job: str = ""  # differs from job to job


# The first whose rank and size are set counts: torchrun may run inside a task of any other.
PLATFORMS = (
    Platform("torchrun", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
             job="TORCHELASTIC_RUN_ID"),
    Platform("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", job="PMIX_NAMESPACE"),
    Platform("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", address="SKYPILOT_NODE_IPS",
             job="SKYPILOT_TASK_ID"),
    Platform("Kubeflow", "PET_NODE_RANK", "PET_NNODES", address="PET_MASTER_ADDR",
             port="PET_MASTER_PORT"),
    Platform("srun", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID",
             job=slurm.JOB),
    Platform("a Kubernetes Job", "JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    Platform("the environment", "NODE_RANK", "NNODES"),
    Platform("the environment", "RANK", "WORLD_SIZE"),
)  # fmt: skip
DEFAULT_PORT = 29400  # torchrun's


@dataclass(frozen=True)
class Place:
    """Which process of a job this is."""

    platform: Platform
    rank: int
    nodes: int
    local_rank: int
    per_node: int  # processes that the platform started on this node
    address: str  # of node 0
    port: int
    key: bytes  # of what all processes of the job know
    is_secret: bool

    @property
    def is_first(self) -> bool:
        """Whether this process plans and measures."""
        return self.rank == 0 and self.local_rank == 0


def place(environment: Mapping[str, str], engine: Engine) -> Place:
    """Return which process of its job this is.

    Raises Refused: no platform says it, or what it says is not whole.
    """
    for platform in PLATFORMS:
        if environment.get(platform.rank) and environment.get(platform.size):
            break
    else:
        raise Refused(
            "engine.name=env: no platform has started this process on every node; expected "
            "the variables of torchrun, mpirun, srun, Kubeflow or SkyPilot, or NODE_RANK, NNODES "
            "and MASTER_ADDR"
        )
    rank, size = _number(environment, platform.rank), _number(environment, platform.size)
    local_rank = _number(environment, platform.local_rank)
    per_node = max(1, _number(environment, platform.local_size))
    nodes = size
    if platform.name == "mpirun":  # it counts processes
        nodes = size // per_node
    address = (environment.get(platform.address) or environment.get("MASTER_ADDR", "")).split()
    if not address and platform.job == slurm.JOB:
        address = [*slurm.host_names(environment)]
    if not address:
        raise Refused(
            f"engine.name=env: {platform.name} does not say where node 0 is; set "
            f"{platform.address} to its address on every node"
        )
    port = _number(environment, platform.port) or DEFAULT_PORT
    word, is_secret = _word(environment, engine, platform)
    # Two jobs without a word of their own may share hosts, but not a port.
    key = hashlib.sha256(f"{word} {port} {nodes}".encode()).digest()
    return Place(platform, rank, nodes, local_rank, per_node, address[0], port, key, is_secret)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name) or "0"
    if not (text.isascii() and text.isdecimal()):
        raise Refused(f"engine.name=env: {name}={text!r:.60} is not a number")
    return int(text)


def _word(environment: Mapping[str, str], engine: Engine, platform: Platform) -> tuple[str, bool]:
    """Return what all processes of the job know, and whether nobody else does."""
    if engine.token_file is not None:
        path = expand_path("engine.token_file", engine.token_file)
        try:
            word = path.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise Refused(
                f"engine.token_file={engine.token_file}: cannot be read: {error}"
            ) from None
        return word, True
    if environment.get(JOB_TOKEN):
        return environment[JOB_TOKEN], True
    return environment.get(platform.job, ""), False


def proof(key: bytes, *words: object) -> str:
    """Return the HMAC-SHA256 of some words, in hexadecimal digits."""
    return hmac.new(key, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def _send(connection: socket.socket, **content: object) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _keep_open(connection: socket.socket) -> None:
    """Have reads wait without a limit, and the kernel notice a peer that is gone."""
    connection.settimeout(None)
    for option, value in KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the next message, read byte by byte: what follows it is the agent's.

    Raises OSError, ValueError.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        line += byte
        if not byte or len(line) > MOST_BYTES:
            raise ValueError("it sent no message of this protocol")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("it sent no message of this protocol")
    return message


def gather(
    place: Place, engine: Engine, console: Console
) -> tuple[list[str], dict[str, socket.socket]]:
    """Return the names of the job's nodes, and the connection of each but this one, once all came.

    Raises Refused: this node cannot listen, or not all nodes came in time.
    """
    if not place.is_secret:
        console.print(
            f"note: {JOB_TOKEN} is not set: whoever reaches {place.address} could join this job in "
            "place of a node",
            markup=False,
        )
    if place.per_node > 1:
        text = f"note: {place.per_node} processes a node were started; one of them is used"
        console.print(text, markup=False)
    admission = Admission(place, console)
    deadline = time.monotonic() + engine.start_timeout_s
    with _listen(place) as listener:
        listener.settimeout(RETRY_S)
        while len(admission.joined) < place.nodes - 1 and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                admission.begin(listener.accept()[0])
    nodes = admission.close()
    if len(nodes) < place.nodes - 1:
        for _, connection in nodes:
            connection.close()
        raise Refused(
            f"engine.name=env: {len(nodes) + 1} of {place.nodes} nodes came within "
            f"{engine.start_timeout_s:g} s (engine.start_timeout_s); expected this command on "
            "every node"
        )
    hosts = [socket.gethostname(), *(host for host, _ in nodes)]
    if len(set(hosts)) < len(hosts) or not all(map(is_name, hosts)):
        hosts = [f"node{index}" for index in range(place.nodes)]
    connections = [connection for _, connection in nodes]
    return hosts, dict(zip(hosts[1:], connections, strict=True))


class Admission:
    """Takes one agent from each other node; whoever does not know the job's word is refused."""

    def __init__(self, place: Place, console: Console) -> None:
        self._place, self._console = place, console
        self.joined: dict[int, tuple[str, socket.socket]] = {}  # by rank
        self._pending = threading.BoundedSemaphore(MOST_PENDING)
        self._lock = threading.Lock()
        self._refused: set[str] = set()  # addresses
        self._is_open = True

    def begin(self, connection: socket.socket) -> None:
        """Ask who it is, on a thread of its own; too many at once are turned away."""
        if self._pending.acquire(blocking=False):
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
        else:
            connection.close()

    def close(self) -> list[tuple[str, socket.socket]]:
        """Take no more. Return (host, connection) in the order of their ranks."""
        with self._lock:
            self._is_open = False
            return [node for _, node in sorted(self.joined.items())]

    def _admit(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + HANDSHAKE_S
        key = self._place.key
        try:
            ours = secrets.token_hex(16)
            _send(connection, greeting=GREETING, nonce=ours)
            message = _receive(connection, deadline)
            rank, host, theirs = message["rank"], message["host"], message["nonce"]
            expected = proof(key, "join", ours, theirs, rank, host)
            if not hmac.compare_digest(str(message["proof"]).encode(), expected.encode()):
                raise ValueError(OTHER_JOB)
            with self._lock:
                if not self._is_open or type(rank) is not int or rank in self.joined:
                    raise ValueError(f"rank {rank} is there already")
                _send(connection, proof=proof(key, "admit", theirs, ours))
                _keep_open(connection)
                self.joined[rank] = (str(host), connection)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            with contextlib.suppress(OSError), connection:
                peer = connection.getpeername()[0]
                with self._lock:
                    is_new = peer not in self._refused
                    self._refused.add(peer)
                if is_new:
                    text = f"note: a connection from {peer} was refused: {one_line(str(error))}"
                    self._console.print(text, markup=False)
                _send(connection, refused=str(error))
        finally:
            self._pending.release()


def _listen(place: Place) -> socket.socket:
    problem: OSError | None = None
    addresses = [place.address, socket.gethostname()]
    for address in addresses:
        try:
            family, _, _, _, (ip, *_) = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[
                0
            ]
        except OSError as error:
            problem = error
            continue
        if place.nodes > 1 and ip in ("127.0.0.1", "::1") and address != addresses[-1]:
            continue  # some platforms name node 0 so on node 0
        for port in range(place.port + 1, place.port + 1 + PORTS):
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((ip, port))
                listener.listen(BACKLOG)
            except OSError as error:
                problem = error
                listener.close()
                continue
            return listener
    raise Refused(
        f"engine.name=env: node 0 cannot listen at {place.address}, ports {place.port + 1} to "
        f"{place.port + PORTS}: {because(problem or OSError('no address'))}"
    )


def become_agent(place: Place, engine: Engine) -> NoReturn:
    """Find node 0, then be the agent of this node: never returns.

    Raises Refused: node 0 did not take this node in time.
    """
    deadline = time.monotonic() + engine.start_timeout_s
    reason = "nobody listens there"
    while time.monotonic() < deadline:
        for port in range(place.port + 1, place.port + 1 + PORTS):
            try:
                connection = socket.create_connection((place.address, port), CONNECT_S)
            except OSError as error:
                if not isinstance(error, ConnectionRefusedError):
                    reason = because(error)
                continue
            try:
                _join(connection, place)
            except (OSError, ValueError, LookupError) as error:
                reason = one_line(str(error))
                connection.close()
                continue
            _serve(connection)
        time.sleep(RETRY_S)
    raise Refused(
        f"engine.name=env: node {place.rank} was not taken by node 0 at {place.address}, ports "
        f"{place.port + 1} to {place.port + PORTS}, within {engine.start_timeout_s:g} s: {reason}"
    )


def _join(connection: socket.socket, place: Place) -> None:
    """Prove to node 0 who this is, and have it prove that it is node 0.

    Raises OSError, ValueError, LookupError: it is another program, or of another job.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = _receive(connection, deadline)
    if greeting.get("greeting") != GREETING:
        raise ValueError("another program listens there")
    ours, theirs, host = secrets.token_hex(16), greeting["nonce"], socket.gethostname()
    said = proof(place.key, "join", theirs, ours, place.rank, host)
    _send(connection, rank=place.rank, host=host, nonce=ours, proof=said)
    answer = _receive(connection, deadline)
    if "refused" in answer:
        raise ValueError(f"it refused this node: {answer['refused']}")
    if not hmac.compare_digest(str(answer["proof"]), proof(place.key, "admit", ours, theirs)):
        raise ValueError("what listens there is of another job")


def _serve(connection: socket.socket) -> NoReturn:
    _keep_open(connection)
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    os.chdir(ROOT)
    environment = os.environ | {STARTER: str(os.getppid())}
    os.execve(sys.executable, [sys.executable, *AGENT], environment)
