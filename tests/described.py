"""Descriptions of hosts for tests: what `python -m launch.machine.facts` printed on one, with fields altered."""

import copy
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from launch.machine.facts import RECORDED
from launch.machine.fleet import Fleet, Host

ROOT = Path(__file__).parent.parent
GPUS = [
    {
        "id": number,
        "uuid": f"GPU-{number}",
        "bus_id": f"0000:0{number}:00.0",
        "name": "NVIDIA H200",
        "memory_bytes": 1 << 37,
    }
    for number in range(2)
]
WITH_GPUS = {
    "machine": {"kind": "cuda", "devices": GPUS, "all_gpus": [0, 1], "cores": 8, "why": ""},
    "facts.gpu": {"driver": "580.65.06", "gpus": [{**one, "max_sm_mhz": 1980} for one in GPUS]},
}


@functools.cache
def printed():
    """What the command prints on this host, as text, whatever of what a record keeps is set around pytest."""
    around = {name: value for name, value in os.environ.items() if not name.startswith(RECORDED)}
    command = [sys.executable, "-m", "launch.machine.facts", "cpu"]
    return subprocess.run(
        command, cwd=ROOT, env=around, capture_output=True, check=True, timeout=60
    ).stdout


def described(**changes):
    """The description of this host with some fields replaced: `facts__cpu` or "facts.cpu" is a field of a field."""
    plain = copy.deepcopy(json.loads(printed()))
    for path, value in changes.items():
        *inside, last = path.replace("__", ".").split(".")
        functools.reduce(lambda part, name: part[name], inside, plain)[last] = copy.deepcopy(value)
    return plain


def host(name, **changes):
    """A host that describes itself so."""
    return Host.described(name, described(**changes))


def interface(name, *addresses, mbit_per_s=1000, loopback=False, inner=False):
    """An interface as a description has it."""
    return {
        "name": name,
        "addresses": list(addresses),
        "mbit_per_s": mbit_per_s,
        "loopback": loopback,
        "inner": inner,
    }


def fleet(**changes_of):
    """A fleet of the hosts of these names, each with its changes."""
    return Fleet(tuple(host(name, **changes) for name, changes in changes_of.items()))
