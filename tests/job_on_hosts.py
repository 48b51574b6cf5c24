"""Start one command on every host of in_namespaces.sh, as a platform does, and perhaps disturb it.

    tests/in_namespaces.sh 1gbit -- python tests/job_on_hosts.py PLATFORM FAULT -- COMMAND…

Prints a JSON line for each host: {"host", "status", "printed", "seconds"}; status null: it was left
running and killed at the end. PLATFORM is a row of BY_HAND, torchrun, folded or mpirun; FAULT is
none or a row of FAULTS.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from on_hosts import address, hosts, output

PORT = "29500"
LONGEST_S = 150.0
# What a platform sets on a node, by its documents; {rank}, {size} and {first} are filled in.
BY_HAND = {
    "skypilot": {
        "SKYPILOT_NODE_RANK": "{rank}", "SKYPILOT_NUM_NODES": "{size}",
        "SKYPILOT_NODE_IPS": "{all}", "SKYPILOT_TASK_ID": "sky-2026-11-28_t-1",
    },
    "trainjob": {
        "PET_NODE_RANK": "{rank}", "PET_NNODES": "{size}", "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "{first}", "PET_MASTER_PORT": PORT, "JOB_COMPLETION_INDEX": "{rank}",
    },
    "pytorchjob": {
        "RANK": "{rank}", "WORLD_SIZE": "{size}", "MASTER_ADDR": "{first}", "MASTER_PORT": PORT,
        "PYTHONUNBUFFERED": "1",
    },
    "indexed_job": {
        "JOB_COMPLETION_INDEX": "{rank}", "WORLD_SIZE": "{size}", "MASTER_ADDR": "{first}",
    },
    "plain": {"NODE_RANK": "{rank}", "NNODES": "{size}", "MASTER_ADDR": "{first}"},
}  # fmt: skip
TORCHRUN = {"torchrun": "1", "folded": "2"}  # processes a node


def command_of(platform, host, command, folder, port=PORT):
    """The words that start the command on a host, and its environment."""
    names = hosts()
    rank = names.index(host)
    inside = ["ip", "netns", "exec", host]
    around = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if platform in TORCHRUN:
        words = [
            *("-m", "torch.distributed.run", f"--nnodes={len(names)}", f"--node-rank={rank}"),
            *(f"--nproc-per-node={TORCHRUN[platform]}", f"--master-addr={address(names[0])}"),
            *(f"--master-port={PORT}", "--no-python"),
        ]
        return [*inside, sys.executable, *words, *command], around
    if platform == "mpirun":
        agent = folder / "rsh"
        agent.write_text(f"#!{sys.executable}\n{RSH}")
        agent.chmod(0o755)
        words = ["mpirun", "--allow-run-as-root", "--host", ",".join(map(address, names))]
        words += ["--mca", "plm_rsh_agent", str(agent), "--mca", "oob_tcp_if_include", "eth0"]
        return [*inside, *words, "-x", f"MASTER_ADDR={address(names[0])}", *command], around
    texts = {
        "rank": rank, "size": len(names), "first": address(names[0]),
        "all": "\n".join(map(address, names)),
    }  # fmt: skip
    own = {name: text.format(**texts) for name, text in BY_HAND[platform].items()}
    if rank:  # or its agent would end processes of node 0, as on no two machines
        inside += ["unshare", "--pid", "--fork", "--mount-proc"]
    return [*inside, *command], around | own | {"MASTER_PORT": port}


RSH = """import os, sys
from on_hosts import address, hosts
host = next(name for name in hosts() if address(name) == sys.argv[1])
os.execvp("ip", ["ip", "netns", "exec", host, "sh", "-c", " ".join(sys.argv[2:])])
"""


def of_node(process):
    """The processes below one, itself first: the command is behind torchrun."""
    pids = [process.pid]
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return pids


def kill_node(process):
    for pid in of_node(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wire(host, state):
    output("ip", "link", "set", f"port-{host}", state)


def cut_wire(nodes):
    wire("b", "down")


def cut_wire_for_a_moment(nodes):
    wire("b", "down")
    time.sleep(3.0)
    wire("b", "up")


def half_open(nodes):
    """Node b dies unseen: no packet of its end leaves it."""
    wire("b", "down")
    kill_node(nodes["b"])
    wire("b", "up")


def preempt(nodes):
    for process in nodes.values():
        pids = of_node(process)
        name = Path(f"/proc/{pids[0]}/comm").read_text().strip()
        os.kill(pids[name == "unshare"], signal.SIGTERM)  # unshare itself takes no SIGTERM


# What happens once the first cell has started on node 0.
FAULTS = {
    "none": lambda nodes: None, "first_killed": lambda nodes: kill_node(nodes["a"]),
    "other_killed": lambda nodes: kill_node(nodes["b"]), "cut": cut_wire,
    "cut_for_a_moment": cut_wire_for_a_moment, "half_open": half_open, "preempted": preempt,
}  # fmt: skip
# What is different from the beginning.
LATE, ABSENT, STRANGER, TAKEN, TWO = "late", "absent", "other_token", "port_taken", "two_jobs"
LATE_S = 60.0
SECOND_PORT = str(int(PORT) + 1)  # the second job's store; node 0 of the first listens there


def start(platform, fault, command, folder, job="", port=PORT):
    """Return the process of each host, by its name and the job's."""
    nodes = {}
    for host in hosts():
        words, around = command_of(platform, host, command, folder, port)
        if fault == LATE and host == "b":
            time.sleep(LATE_S)
        if (fault == ABSENT and host == "b") or (platform == "mpirun" and nodes):
            continue
        if fault == STRANGER:
            around["RINGSIDE_JOB_TOKEN"] = f"token-{host}"
        around["PYTHONPATH"] = str(Path(__file__).parent)
        with (folder / f"{host}{job}").open("w") as printed:
            nodes[f"{host}{job}"] = subprocess.Popen(
                words, env=around, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
                start_new_session=True,
            )  # fmt: skip
    return nodes


def main():
    platform, fault = sys.argv[1:3]
    folder = Path(tempfile.mkdtemp())
    began = time.monotonic()
    if fault == TAKEN:
        server = (
            "import socket, time\ns = socket.create_server(('10.77.0.1', 29501))\ntime.sleep(600)"
        )
        taker = subprocess.Popen(["ip", "netns", "exec", "a", sys.executable, "-c", server])
        time.sleep(1.0)
    nodes = start(platform, fault, sys.argv[4:], folder)
    if fault == TWO:
        second = [f"{word}_2" if word.startswith("output_dir=") else word for word in sys.argv[4:]]
        nodes |= start(platform, fault, second, folder, "2", SECOND_PORT)
    if fault in FAULTS:
        while "started" not in (folder / "a").read_text() and nodes["a"].poll() is None:
            time.sleep(0.1)
        time.sleep(2.0)
        FAULTS[fault](nodes)
    ended = {}
    while len(ended) < len(nodes) and time.monotonic() < began + LONGEST_S:
        for host, process in nodes.items():
            if process.poll() is not None and host not in ended:
                ended[host] = round(time.monotonic() - began, 1)
        time.sleep(0.1)
    if fault == TAKEN:
        taker.kill()
    for host, process in nodes.items():
        status = process.poll()
        if status is None:
            kill_node(process)
        printed = (folder / host).read_text()
        line = {"host": host, "status": status, "seconds": ended.get(host), "printed": printed}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
