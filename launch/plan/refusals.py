"""What is refused before any process starts.

REQUEST_REFUSALS are rules about one request, a row each. SWEEP_REFUSALS are checks of all cells of
a sweep on the machine that will measure them. The first that applies is the sentence that the user
sees.
"""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from analysis.study import noise_floor as floor_file
from benchmarks.agent.processes import with_absolute_path
from benchmarks.request import Room, refuse, refuse_too_little_shared
from conf import groups, nccl
from conf.cell import Cell
from conf.groups import SERVER_NODES
from conf.host import free_memory, free_shared_memory
from conf.options import Refused, expand_path, to_text
from conf.schema import Config, Engine, Request
from conf.secrets import is_secret, without_secrets
from launch.engines.agent_channel import HOST
from launch.machine.devices import Machine, torch_version
from launch.machine.facts import ROOT
from launch.machine.fleet import Fleet, Host
from launch.plan.order import unique_cells
from launch.plan.own_code import refuse_wrong_code
from launch.study.study_folder import study_folder
from launch.tracking.store import (
    ARTIFACTS,
    DEFAULT_STORE,
    WrongUri,
    not_a_store,
    sqlite_file,
    store_uri,
)

REMOTE = ("ssh", "slurm", "command", "env")
REMOTE_ENGINES = "engine=ssh, engine=slurm, engine=command or engine=env"
INTERFACE = re.compile(r"[A-Za-z0-9_.:-]{1,15}", re.ASCII)  # Linux has at most 15 bytes
# The engines that read an option; every engine reads the others.
OF_SLURM = (
    "submit",
    "time_minutes",
    "partition",
    "account",
    "job_nodes",
    "gpus_per_node",
    "sbatch",
)
READ_BY = {
    "prefix": ("command",),
    "ssh_config": ("ssh",),
    **dict.fromkeys(OF_SLURM, ("slurm",)),
    "token_file": ("env",),
    **dict.fromkeys(("container", "container_mounts"), ("slurm",)),
    **dict.fromkeys(("interface", "trusted_network"), REMOTE),
    **dict.fromkeys(("python", "folder"), REMOTE[:-1]),
}
# Options that all cells of a sweep share.
SHARED = (
    *("study", "output_dir", "tracking", "engine", "hosts", "validity", "device", "repeats"),
    *("noise_pairs", "resume", "wait", "dry_run", "topology", "tuning_pass", "sample_gpus"),
    *("predict", "report", "ask", "margin", "budget", "efficiency", "rate", "rehearse"),
)
# Options of which a record keeps nothing but the command line, without secrets.
NOT_RECORDED = ("output_dir", "topology", "hosts", "engine")
OURS = (DEFAULT_STORE, ARTIFACTS, floor_file.FILE)  # in output_dir, beside the studies
# Launchers of ranks, which would start the whole study once a rank: the variables with which
# process this is and with how many there are, and what to write instead.
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCHERS = {
    # A batch script has no step, and one task of a step may launch.
    "srun": {
        "rank": "SLURM_PROCID",
        "size": "SLURM_STEP_NUM_TASKS",
        "instead": "without srun, or with srun --ntasks=1",
    },
    "mpirun": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "instead": "without mpirun",
    },
    "mpiexec": {"rank": "PMI_RANK", "size": "PMI_SIZE", "instead": "without mpiexec"},
}
BEFORE_LISTS = ("2.8.", "2.9.", "2.10.", "2.11.", "2.12.")  # of torch, whose DDP takes one size
# Gradients of the largest torchvision model (vit_h_14, 632 million parameters), rounded up. Where
# this is free for every rank, torch need not compute the exact size, which takes seconds.
PLENTY_BYTES = 3_000_000_000


class Refusal(NamedTuple):
    """A rule about one request, which is refused with `field=value: sentence`."""

    field: str
    applies: Callable[[Config], object]
    sentence: str


def _is_whole_path(path: str | None) -> bool:
    return path is None or (path.isprintable() and path.startswith("/"))


REQUEST_REFUSALS = (
    Refusal(
        "nodes",
        lambda config: config.nodes and config.engine.name not in REMOTE,
        f"needs an engine for several hosts: {REMOTE_ENGINES}",
    ),
    Refusal(
        "engine",
        lambda config: not config.nodes and config.engine.name in REMOTE,
        "needs the hosts to run on: nodes=a,b by name, or nodes=2 for the first two of hosts=FILE",
    ),
    Refusal(
        "hosts",
        lambda config: config.hosts is not None and not config.nodes,
        f"needs nodes=N (how many of these hosts to use), and {REMOTE_ENGINES}",
    ),
    Refusal(
        "hosts",
        lambda config: config.hosts is not None and config.engine.name in ("slurm", "env"),
        "works only with engine=ssh or engine=command; leave it out: a job knows its hosts",
    ),
    Refusal(
        "strategy.bucket_cap_mb",
        lambda config: (
            isinstance(config.strategy.get("bucket_cap_mb"), list)
            and torch_version().startswith(BEFORE_LISTS)
        ),
        "sizes of several buckets need torch 2.13 or newer; expected a number",
    ),
    Refusal(
        "strategy.server_nodes",
        lambda config: config.strategy.get(SERVER_NODES, "auto") != "auto" and not config.nodes,
        "needs nodes=, which says where the ranks are",
    ),
    Refusal(
        "benchmark.launcher",
        lambda config: (
            config.benchmark["name"] == "script"
            and config.profiler["name"] != "none"
            and config.benchmark["launcher"] != "torchrun"
        ),
        "a script that starts its own ranks is not traced; expected torchrun, or profiler=none",
    ),
    Refusal(
        "profiler",
        lambda config: config.nodes and config.profiler["name"] == "nsys",
        "works on this machine only, without nodes=; profiler=torch traces ranks on every host",
    ),
    Refusal(
        "engine.prefix",
        lambda config: config.engine.name == "command" and not config.engine.prefix,
        f"engine=command needs the command that reaches a host, such as engine.prefix=[ssh,{HOST}]",
    ),
    Refusal(
        "engine.prefix",
        lambda config: config.engine.prefix and HOST not in " ".join(config.engine.prefix),
        f"must contain {HOST}, which becomes the name of the host",
    ),
    Refusal(
        "engine.interface",
        lambda config: (
            config.engine.interface is not None and not INTERFACE.fullmatch(config.engine.interface)
        ),
        "expected the name of one network interface, at most 15 letters, digits, '.', '_', ':' "
        "and '-'",
    ),
    Refusal(
        "engine.container_mounts",
        lambda config: config.engine.container_mounts and config.engine.container is None,
        "needs engine.container=, the image that they are mounted in",
    ),
    Refusal(
        "engine.ssh_config",
        lambda config: (
            config.engine.ssh_config is not None
            and not expand_path("engine.ssh_config", config.engine.ssh_config).is_file()
        ),
        "is not a file; expected a configuration file of ssh on this machine",
    ),
    Refusal(
        "engine.python",
        lambda config: not _is_whole_path(config.engine.python),
        "expected an absolute path on the hosts, which begins with /",
    ),
    Refusal(
        "engine.folder",
        lambda config: not _is_whole_path(config.engine.folder),
        "expected an absolute path on the hosts, which begins with /",
    ),
    Refusal(
        "study",
        lambda config: config.study in OURS,
        f"expected another name; output_dir keeps {', '.join(OURS)} beside the studies",
    ),
)


def refuse_nested(environment: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that one program started. Raises Refused.

    Launchers that people start one by one may share a study.
    """
    program, instead = "", "without torchrun"
    names: tuple[str, ...] = TORCHRUN
    if environment.keys() >= set(TORCHRUN):
        program = "torchrun"
    for launcher, row in LAUNCHERS.items():
        counts = {}
        for field in ("rank", "size"):
            text = environment.get(row[field], "")
            if not text.isascii() or not text.isdigit():
                text = "0"
            counts[field] = int(text)
        if not program and (counts["rank"] > 0 or counts["size"] > 1):
            program, instead = launcher, row["instead"]
            names = (row["rank"], row["size"])
    if program:
        values = [f"{name}={environment[name]}" for name in names if name in environment]
        raise Refused(
            f"{', '.join(values)}: launch.py was started by {program}, and starts the processes on "
            f"the GPUs itself; write python launch.py gpus=… {instead}, or "
            "engine=env nodes=all, which measures on the nodes of this job"
        )


def refuse_secrets(config: Config) -> None:
    """Refuse an option that looks like a secret: records, the report and MLflow would keep it."""
    options = dataclasses.asdict(config)
    options["tracking"].pop("uri")
    for name in NOT_RECORDED:
        options.pop(name)
    for option, value in _texts("", options):
        if is_secret(option, value) or without_secrets(option) != option:
            raise Refused(
                f"{option}: the option's name or a part of its value looks like a secret, and "
                "every record would keep it; pass secrets to the ranks in environment variables"
            )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _texts(f"{name}.{key}".strip("."), member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _texts(name, member)
    elif value is not None:
        yield name, str(value)


def refuse_requests(configs: Sequence[Config]) -> None:
    """Refuse requests whose options do not fit each other. Raises Refused."""
    engine, defaults = configs[0].engine, Engine()  # a sweep has one engine
    value: Any
    for name, engines in READ_BY.items():
        value = getattr(engine, name)
        if value != getattr(defaults, name) and engine.name not in engines:
            typed = to_text(value)
            if isinstance(value, list):
                typed = f"[{','.join(value)}]"
            names = " or engine=".join(engines)
            raise Refused(f"engine.{name}={typed}: works only with engine={names}")
    for config in configs:
        refuse_secrets(config)
        for rule in REQUEST_REFUSALS:
            if not rule.applies(config):
                continue
            path = rule.field
            if path in ("engine", "profiler"):
                path += ".name"
            value = config
            for name in path.split("."):
                if isinstance(value, Mapping):
                    value = value[name]
                else:
                    value = getattr(value, name)
            if rule.field == "nodes":
                value = ",".join(value)
            elif isinstance(value, list):
                value = f"[{','.join(map(str, value))}]"
            elif rule.field.startswith("engine."):
                value = repr(value)
            raise Refused(f"{rule.field}={value}: {rule.sentence}")
    for word in engine.prefix:
        if not word or not word.isprintable():
            raise Refused(
                f"engine.prefix=[{','.join(engine.prefix)}]: {word!r} is empty or not printable; "
                "expected words"
            )


def refuse_several_values(requests: Sequence[Request]) -> None:
    """Refuse a sweep over an option that all its cells share. Raises Refused."""
    typed: dict[str, dict[str, None]] = defaultdict(dict)  # the values of each option
    for request in requests:
        for text in request.overrides:
            option, _, value = text.partition("=")
            typed[option][value] = None
    for name in SHARED:
        key, values = _differing(name, [getattr(request.config, name) for request in requests])
        if not key:
            continue
        # tracking=mlflow,none differs in tracking.enabled, and +experiment=a,b in study
        for option, shared in ((key, key), (name, name), ("+experiment", key)):
            if len(typed[option]) > 1:
                raise Refused(_one_for_all(option, [*typed[option]], shared))
        raise Refused(_one_for_all(key, [*dict.fromkeys(map(str, values))], key))


def _one_for_all(typed: str, values: Sequence[str], shared: str) -> str:
    several = f"{typed}={','.join(values)}"
    if typed == "+experiment":
        return f"{several}: a command runs one named study; run {len(values)} commands"
    return f"{several}: {shared} takes one value; run one sweep for each"


def _differing(key: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """Return the first option in which values differ, also inside a group, with its values."""
    if list(values) == [values[0]] * len(values):
        return "", ()
    if dataclasses.is_dataclass(values[0]):
        for field in dataclasses.fields(values[0]):
            parts = [getattr(value, field.name) for value in values]
            inside = _differing(f"{key}.{field.name}", parts)
            if inside[0]:
                return inside
    return key, values


def refuse_one_host_only(config: Config, sets: Sequence[Sequence[str]]) -> None:
    """Refuse sets of several hosts for a strategy or benchmark whose YAML says `hosts: false`.
    Raises Refused."""
    if max(map(len, sets)) == 1:
        return
    chosen = [groups.choice("benchmark", config.benchmark["name"])]
    if chosen[0].trains:
        chosen.append(groups.choice("strategy", config.strategy["name"]))
    for choice in chosen:
        if not choice.several_hosts:
            raise Refused(
                f"{choice.group}={choice.name}: works on one host only; write one name "
                "in nodes=, or nodes=each for one host after the other"
            )


def refuse_outputs(config: Config) -> None:
    """Refuse an output_dir or a store whose place something else has. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    for path in (study.parent, study):
        reason = ""
        try:
            if path.exists() and not path.is_dir():
                reason = "is not a folder"
        except OSError as error:  # of somebody else's, or a name that is too long
            reason = f"cannot be looked at: {error.strerror}"
        if reason:
            raise Refused(f"output_dir={config.output_dir}: cannot be written ({path} {reason})")
    if not config.tracking.enabled:
        return
    _refuse_link(config, study.parent / ARTIFACTS)
    store: Path | None = study.parent / DEFAULT_STORE
    if config.tracking.uri is not None:  # else without SQLAlchemy, which takes a while to import
        try:
            store = sqlite_file(store_uri(config.tracking.uri, study.parent))
        except WrongUri as error:
            raise Refused(str(error)) from None
    reason = ""
    if store is not None:
        reason = not_a_store(store)
    if reason:
        raise Refused(f"tracking.uri={store}: {reason}; expected a new file or a store of MLflow's")


def refuse_links(config: Config, cells: Iterable[Cell]) -> None:
    """Refuse a study or a cell whose folder is a link: its files would be written and tidied
    elsewhere. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    _refuse_link(config, study)
    for cell in cells:
        _refuse_link(config, study / cell.folder)


def _refuse_link(config: Config, path: Path) -> None:
    if path.is_symlink():
        raise Refused(
            f"output_dir={config.output_dir}: {path} is a link; expected folders (output_dir "
            "may be a link)"
        )


@dataclass(frozen=True)
class ExpandedSweep:
    """A sweep whose requests were checked and expanded."""

    cells: list[Cell]
    machine: Machine  # the first host's, or this one
    fleet: Fleet | None  # the hosts, where they were asked what they have
    surroundings: Mapping[str, str]
    nsys_missing: Refused | None  # why a trace by nsys cannot be made, where one is asked for
    is_for_another_machine: bool  # planned from a topology file, with dry_run=true


def multicast(sweep: ExpandedSweep) -> None:
    """Refuse NVLink multicast that the surrounding environment forbids."""
    for cell in sweep.cells:
        nccl.refuse_multicast(cell.nccl, sweep.surroundings)
        if sweep.fleet is not None:
            sweep.fleet.refuse_multicast(cell.nccl)


def missing_library(sweep: ExpandedSweep) -> None:
    """Refuse a model whose library is not installed."""
    for library in dict.fromkeys(cell.model.library for cell in sweep.cells):
        if library not in ("ringside", "python") and importlib.util.find_spec(library) is None:
            raise Refused(f"model.library={library}: not installed: pip install -e '.[{library}]'")


def own_code(sweep: ExpandedSweep) -> None:
    """Refuse a model, loader, strategy or benchmark of the user's own that cannot be called."""
    refuse_wrong_code(sweep.cells)


def missing_compiler(sweep: ExpandedSweep) -> None:
    """Refuse compiled cells on CPU workers of this machine without the C++ compiler that torch
    would call.

    On GPUs Triton calls a C compiler, but not for what an earlier run has left on the disk: a rank
    says whether it is missed.
    """
    variables = sweep.surroundings
    compiler = variables.get("CXX", "g++")
    path = shutil.which((compiler.split() or [""])[0], path=variables.get("PATH"))
    if path or variables.get("TORCH_INDUCTOR_INSTALL_GXX") or sweep.is_for_another_machine:
        return
    for cell in sweep.cells:
        if cell.compiled and cell.device == "cpu" and not cell.hosts:
            raise Refused(
                f"optimize={cell.optimize}: needs a C++ compiler on CPU workers, and "
                f"{compiler or 'CXX='} is not found; possible here: eager, or a compiler that "
                "the variable CXX names (apt install g++)"
            )


def missing_profiler(sweep: ExpandedSweep) -> None:
    """Refuse a trace by nsys where nsys is not found, or too old."""
    if sweep.nsys_missing:
        raise sweep.nsys_missing


def benchmark_request(sweep: ExpandedSweep) -> None:
    """Refuse what a benchmark cannot measure: buffers that do not fit the memory, options that
    exclude each other."""
    here = Room(sweep.machine.memory_bytes, free_memory(), free_shared_memory())
    unseen = Room(sweep.machine.memory_bytes)  # taken to have such GPUs
    for cell in sweep.cells:
        room = here
        if sweep.fleet and cell.hosts:
            room = room_on(sweep.fleet.some(cell.hosts))
        elif cell.hosts or sweep.is_for_another_machine:
            room = unseen
        refuse(cell, room)


def room_on(hosts: Iterable[Host]) -> Room:
    """Return how much memory a cell on some hosts finds: the least of each kind that is known."""
    rooms = []
    for host in hosts:
        rooms.append((host.machine.memory_bytes, host.free_memory_bytes, host.shared_memory_bytes))
    least = []
    for sizes in zip(*rooms, strict=True):
        least.append(min([size for size in sizes if size is not None], default=None))
    return Room(*least)


def shared_memory(sweep: ExpandedSweep) -> None:
    """Refuse a strategy that needs more of /dev/shm than is free, or cannot train its model."""
    cells = unique_cells(sweep.cells)
    if not sweep.is_for_another_machine:
        refuse_too_little([cell for cell in cells if not cell.hosts])
    for host in sweep.fleet or ():  # one with servers alone shares memory with nobody
        there = [cell for cell in cells if host.name in cell.hosts]
        refuse_too_little(there, host.shared_memory_bytes, f"host {host.name}: ")


def refuse_too_little(
    cells: Sequence[Cell], free_bytes: int | None = None, where: str = ""
) -> None:
    """Refuse cells that need more shared memory than is free, here or on a host that `where`
    names, or whose strategy cannot train their model."""
    free = free_bytes
    if free is None:
        free = free_shared_memory()
    doubtful = []
    for cell in cells:
        plenty = free >= PLENTY_BYTES * (2 * len(cell.gpus) + 2)
        rules = groups.choice("strategy", cell.strategy["name"]).rules
        if rules.get("some_models") or (rules.get("shared_memory") and not plenty):
            doubtful.append(cell)
    if not doubtful:
        return
    answer = subprocess.run(
        [sys.executable, "-m", "trainers.needed_memory"],
        cwd=ROOT,
        env=with_absolute_path(os.environ),
        input=json.dumps([cell.to_dict() for cell in doubtful]),
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        return  # a model that cannot be built says why when its cell runs
    for cell, (needed, refusal) in zip(doubtful, json.loads(answer.stdout), strict=True):
        if refusal:
            raise Refused(refusal)
        who = f"{where}strategy={cell.strategy['name']}: {cell.name}"
        refuse_too_little_shared(needed, free, who, "a strategy with less")


SWEEP_REFUSALS: tuple[Callable[[ExpandedSweep], None], ...] = (
    multicast,
    missing_library,
    own_code,
    missing_compiler,
    missing_profiler,
    benchmark_request,
    shared_memory,  # last: it may have to ask torch, in a process of its own
)
