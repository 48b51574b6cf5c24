"""Make the command and the environment of a cell's processes."""

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agent.processes import Variables, merged
from benchmarks.record import CellFolder, safe_files
from benchmarks.record.lines import CLOCK_VARIABLE, beginning
from conf.cell import Cell
from conf.process_env import TOKEN
from launch.machine.devices import Machine
from launch.machine.facts import RECORDED, variables
from launch.machine.secrets import is_secret

ROOT = Path(__file__).parent.parent.parent
LOOPBACK = "lo"
# gloo connects every rank with every other, which takes minutes for many (pytorch/gloo#407). Beyond so many ranks it connects
# those that speak to each other, when they do.
MOST_IN_A_MESH = 64
# Variables of an outer torchrun or Slurm step, which our ranks would take for their own.
FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_COMM_ID",
    "TORCHELASTIC_*",
)
# What NCCL says once at start-up and when it connects; nothing that it says for every call.
NCCL_SUBSYSTEMS = "INIT,ENV,GRAPH"


# What ranks need of an environment that a profiler's report will hold; also everything that may change a result.
NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "XDG_CACHE_HOME",
          "CC", "CXX")  # fmt: skip
NEEDED_PREFIXES = (
    *RECORDED,
    "LC_",
    "CONDA_PREFIX",
    "CUDA_",
    "NVIDIA_",
    "PYTHON",
    "TRITON_",
    "UCX_",
    "FI_",
    "RINGSIDE_",
)


def scrubbed(variable: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with only what ranks need, without variables whose name or value looks like a secret."""
    return {
        name: value
        for name, value in variable.items()
        if (name in NEEDED or name.startswith(NEEDED_PREFIXES))
        and (name == TOKEN or not is_secret(name, value))
    }


def arguments(folder: CellFolder, cell: Cell, start: str) -> list[str]:
    """Return the command of the agent, which starts the ranks and the servers as `engine.start` says."""
    return [
        sys.executable,
        "-m",
        "benchmarks.rank.cell_process",
        str(folder.path),
        str(cell.world_size + cell.servers),
        start,
    ]


def of_every_cell(machine: Machine, surrounding: Mapping[str, str]) -> dict[str, str]:
    """Return what the environments of all cells have in common: that of the user without what ranks would misread, and ours."""
    return merged(Variables(_ours(machine), {}, FOREIGN), surrounding)


def _ours(machine: Machine) -> dict[str, str]:
    own = {
        CLOCK_VARIABLE: repr(beginning()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if machine.kind == "cpu":
        # The same in every cell, or a baseline would run on more cores.
        own |= {"OMP_NUM_THREADS": str(machine.threads), "CUDA_VISIBLE_DEVICES": ""}
    return own


def environment(
    cell: Cell, machine: Machine, folder: CellFolder, token: str, surrounding: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a cell's processes on this machine: that of the user, then what the cell asks for."""
    return merged(asked(cell, machine, folder, token), surrounding)


@dataclass(frozen=True)
class OnHost:
    """What else decides the environment of a cell's processes on one of its hosts."""

    name: str = ""  # as the cell has it; '' is this machine
    interface: str = LOOPBACK  # through which its processes meet those of other hosts
    typed: bool = False  # the user named the interface
    forbidden: Mapping[str, str] = field(
        default_factory=dict
    )  # variables by which some host forbids NVLink multicast


def asked(
    cell: Cell, machine: Machine, folder: CellFolder, token: str, where: OnHost | None = None
) -> Variables:
    """Return what a cell asks for in the environment of its processes on one machine, which has these devices.

    `folder` is where they write: on another host CellFolder(Path(CELL_FOLDER)), which its agent replaces. Variables that
    forbid NVLink multicast are inherited like any other; a host that forbids it forbids it for all.
    """
    where = where or OnHost()
    own = _ours(machine) | {TOKEN: token, "GLOO_SOCKET_IFNAME": where.interface, **where.forbidden}
    if cell.world_size > MOST_IN_A_MESH:
        own["TORCH_GLOO_LAZY_INIT"] = "1"
    if cell.device == "cpu":
        return Variables(own, {}, FOREIGN)
    uuids = {device.id: device.uuid for device in machine.devices}
    # Servers' GPUs last: a rank's index is its place in the subset.
    gpus = dict.fromkeys(
        one.gpu for one in cell.places if one.host == where.name and one.gpu is not None
    )
    own |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(uuids[gpu] for gpu in gpus),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": NCCL_SUBSYSTEMS,
        "NCCL_DEBUG_FILE": folder.nccl_log_pattern,
        # A study's own, empty file instead of the user's ~/.nccl.conf, whose settings nobody asked for here.
        "NCCL_CONF_FILE": str(folder.nccl_conf),
        # Its socket has a fixed port, which a second cell on the machine would want too.
        "NCCL_RAS_ENABLE": "0",
    }
    if cell.hosts and cell.server_gpus:
        # A kernel of NCCL's that waits for another host must hold back neither the streams that would share its queue nor the
        # loading of another kernel, which waits for those that run. Two H200s stood still otherwise.
        own |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
    # One machine: nothing listens to the network. NCCL takes a name after `=` as the whole name, not as its beginning.
    sockets = {
        "NCCL_SOCKET_IFNAME": where.interface
        if where.interface == LOOPBACK
        else f"={where.interface}"
    }
    own |= sockets if where.typed else {}
    defaults = {**sockets, "OMP_NUM_THREADS": str(max(1, machine.cores // (2 * len(cell.gpus))))}
    return Variables(own | cell.nccl, defaults, FOREIGN)


def inherited(of_ranks: Mapping[str, str], cell: Cell, surrounding: Mapping[str, str]) -> list[str]:
    """Return the names of recorded variables that the ranks of a cell have from around the launcher, as they were there."""
    return [
        name
        for name, value in variables(of_ranks).items()
        if surrounding.get(name) == value
        and name not in cell.nccl
        and (cell.device == "cuda" or name != "OMP_NUM_THREADS")
    ]


# The folder in which torch.compile keeps what it made, for all cells of all studies of an output folder.


NAME = ".compiled"  # no study has such a name
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# torch puts the path into commands for the C++ compiler, unquoted.
PLAIN = re.compile(r"[A-Za-z0-9_./+-]+")


def compile_caches_variables(
    cell: Cell, output_dir: Path, surrounding: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that name the folder; none where a cell is not compiled here or the user names a folder.

    None also where the folder cannot serve; torch then takes its own one in TMPDIR. The folder is made.
    """
    if not cell.compiled or cell.hosts or INDUCTOR in surrounding:
        return {}
    folder = output_dir / NAME
    if not _serves(folder):
        return {}
    # Without a folder of its own Triton would get one for each GPU from torch, with the same kernels.
    triton = {} if TRITON in surrounding else {TRITON: str(folder / "triton")}
    return {INDUCTOR: str(folder), **triton}


def _serves(folder: Path) -> bool:
    """Return whether code may be kept in a folder, which is made where it is missing: torch runs what it finds there.

    So it must be the user's own, and nobody else may write to it.
    """
    if not PLAIN.fullmatch(str(folder)):
        return False
    try:
        safe_files.make_folder(folder, mode=0o700)
        found, system = folder.stat(), os.statvfs(folder)
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return (
        found.st_uid == os.geteuid()
        and not found.st_mode & others
        and not system.f_flag & os.ST_NOEXEC
    )
