"""Make the command and the environment of a cell's processes."""

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agent.processes import Variables
from benchmarks.record import CellFolder, safe_files
from benchmarks.record.lines import CLOCK_VARIABLE, beginning
from conf.cell import CONNECTIONS, MOST_CONNECTIONS, Cell
from conf.host import SHARED_GPUS, TOKEN
from conf.secrets import is_secret
from launch.machine.devices import Machine
from launch.machine.facts import RECORDED, recorded_variables

LOOPBACK = "lo"
# gloo connects every rank with every other, which takes minutes for many (pytorch/gloo#407). Beyond
# so many ranks it connects those that speak to each other, when they do.
MOST_IN_A_MESH = 64
# Variables of an outer torchrun or Slurm step, which our ranks would take for their own.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
           "MASTER_PORT", "NCCL_COMM_ID", "TORCHELASTIC_*")  # fmt: skip
# What NCCL says once at start-up and when it connects; nothing that it says for every call.
NCCL_SUBSYSTEMS = "INIT,ENV,GRAPH"
# What ranks need of an environment that a profiler's report will hold; also everything that may
# change a result.
NEEDED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
          "VIRTUAL_ENV", "XDG_CACHE_HOME",
          "CC", "CXX")  # fmt: skip
NEEDED_PREFIXES = (*RECORDED, "LC_", "CONDA_PREFIX", "CUDA_", "NVIDIA_", "PYTHON", "TRITON_",
                   "UCX_", "FI_", "RINGSIDE_")  # fmt: skip
# The folder in which torch.compile keeps what it made, for all cells of all studies of an output
# folder.
COMPILED = ".compiled"  # no study has such a name
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# torch puts the path into commands for the C++ compiler, unquoted.
PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")


def scrubbed(variables: Mapping[str, str], for_script: bool = False) -> dict[str, str]:
    """Return an environment with only what ranks need, without variables that look like secrets.

    A script may need any variable.
    """
    kept = {}
    for name, value in variables.items():
        needed = for_script or name in NEEDED or name.startswith(NEEDED_PREFIXES)
        if needed and (name == TOKEN or not is_secret(name, value)):
            kept[name] = value
    return kept


def cell_process_command(folder: CellFolder, cell: Cell, start: str) -> list[str]:
    """Return the command of the process that starts the ranks and the servers."""
    processes = str(cell.world_size + cell.servers)
    module = "benchmarks.rank.cell_process"
    return [sys.executable, "-m", module, str(folder.path), processes, start]


def common_variables(machine: Machine) -> dict[str, str]:
    """Return what every cell on a machine has in its environment."""
    variables = {
        CLOCK_VARIABLE: repr(beginning()),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if machine.kind == "cpu":
        # The same in every cell, or a baseline would run on more cores.
        variables["OMP_NUM_THREADS"] = str(machine.threads)
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return variables


@dataclass(frozen=True)
class HostEnvironment:
    """What else decides the environment of a cell's processes on one of its hosts."""

    name: str = ""  # as the cell has it; '' is this machine
    interface: str = LOOPBACK  # through which its processes meet those of other hosts
    typed: bool = False  # the user named the interface
    # Variables by which some host forbids NVLink multicast.
    forbidden: Mapping[str, str] = field(default_factory=dict)


def cell_variables(
    cell: Cell,
    machine: Machine,
    folder: CellFolder,
    token: str,
    host: HostEnvironment | None = None,
) -> Variables:
    """Return what a cell asks for in the environment of its processes on one machine.

    `folder` is where they write: on another host CellFolder(Path(CELL_FOLDER)), which its agent
    replaces. Variables that forbid NVLink multicast are inherited like any other; a host that
    forbids it forbids it for all.
    """
    host = host or HostEnvironment()
    variables = common_variables(machine)
    variables |= {TOKEN: token, "GLOO_SOCKET_IFNAME": host.interface, **host.forbidden}
    if cell.world_size > MOST_IN_A_MESH:
        variables["TORCH_GLOO_LAZY_INIT"] = "1"
    if cell.device == "cpu":
        return Variables(variables, {}, FOREIGN)
    uuids = {device.id: device.uuid for device in machine.devices}
    visible = []
    for process in cell.places:  # servers' GPUs last: a rank's index is its place in the subset
        if process.host == host.name and process.gpu is not None:
            visible.append(uuids[process.gpu])
    variables |= {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(visible)),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": NCCL_SUBSYSTEMS,
        "NCCL_DEBUG_FILE": folder.nccl_log_pattern,
        # A study's own, empty file instead of the user's ~/.nccl.conf.
        "NCCL_CONF_FILE": str(folder.nccl_conf),
        # Its socket has a fixed port, which a second cell on the machine would want too.
        "NCCL_RAS_ENABLE": "0",
    }
    if machine.shares_gpus:
        variables |= {SHARED_GPUS: str(machine.present), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if cell.hosts and cell.server_gpus:
        # A kernel of NCCL's that waits for another host must hold back neither the streams that
        # would share its queue nor the loading of another kernel, which waits for those that run.
        # Two H200s stood still otherwise.
        variables[CONNECTIONS.upper()] = str(MOST_CONNECTIONS)
        variables["CUDA_MODULE_LOADING"] = "EAGER"
    interface = host.interface
    if interface != LOOPBACK:  # on one machine nothing listens to the network
        # NCCL takes a name after `=` as the whole name, not as its beginning.
        interface = f"={interface}"
    if host.typed:
        variables["NCCL_SOCKET_IFNAME"] = interface
    defaults = {
        "NCCL_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(max(1, machine.cores // (2 * len(cell.gpus)))),
    }
    if machine.shares_gpus and len(cell.gpus) >= 8 * machine.present:
        defaults["NCCL_MAX_CTAS"] = "4"  # more blocks of eight ranks do not fit an H200
    return Variables(variables | cell.variables, defaults, FOREIGN)


def inherited_names(
    of_ranks: Mapping[str, str], cell: Cell, surrounding: Mapping[str, str]
) -> list[str]:
    """Return the names of recorded variables that ranks have as they were around the launcher."""
    names = []
    for name, value in recorded_variables(of_ranks).items():
        if cell.device == "cpu" and name == "OMP_NUM_THREADS":
            continue
        if surrounding.get(name) == value and name not in cell.variables:
            names.append(name)
    return names


def compile_cache_variables(
    cell: Cell, output_dir: Path, surrounding: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that name the compiler's cache; none where the user names one.

    The folder is made. It must be the user's own, and nobody else may write to it: torch runs what
    it finds there. Where it cannot serve, torch takes its own.
    """
    folder = output_dir / COMPILED
    path_is_plain = PLAIN_PATH.fullmatch(str(folder))
    if not cell.compiled or cell.hosts or INDUCTOR in surrounding or not path_is_plain:
        return {}
    try:
        safe_files.make_folder(folder, mode=0o700)
        status = folder.stat()
        no_programs = os.statvfs(folder).f_flag & os.ST_NOEXEC
    except OSError:
        return {}
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if no_programs or others_write or status.st_uid != os.geteuid():
        return {}
    variables = {INDUCTOR: str(folder)}
    if TRITON not in surrounding:
        # Else Triton would get a folder for each GPU from torch, with the same kernels.
        variables[TRITON] = str(folder / "triton")
    return variables
