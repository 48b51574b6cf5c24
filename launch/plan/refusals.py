"""What is refused before any process starts: one line of a list is one way to be refused."""

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from analysis.study import noise_floor as floor_file
from benchmarks.agent.processes import with_absolute_path
from benchmarks.record.safe_text import one_line
from benchmarks.request import Room, refuse, refuse_too_little_shared
from conf import groups, nccl
from conf.cell import Cell
from conf.groups import choice
from conf.host_limits import free_memory, free_shared_memory
from conf.options import Refused, expand_path, to_text
from conf.schema import Config, Engine
from launch.engines.environment import ROOT
from launch.machine.devices import Machine
from launch.machine.fleet import Fleet, Host
from launch.machine.secrets import secret_value
from launch.plan.order import once_each
from launch.plan.own_code import refuse_wrong_code
from launch.plan.profilers import Profiler
from launch.study.study import study_folder
from launch.tracking.store import (
    ARTIFACTS,
    DEFAULT_STORE,
    WrongUri,
    not_a_store,
    sqlite_file,
    store_uri,
)

THREADS, MOST_THREADS = "OMP_NUM_THREADS", 4096
LONGEST = 40  # characters of a wrong value


@dataclasses.dataclass(frozen=True)
class ExpandedSweep:
    """A sweep whose requests were checked and expanded."""

    cells: list[Cell]
    machine: Machine  # the first host's, or this one
    fleet: Fleet | None  # the hosts, where they were asked what they have
    surroundings: Mapping[str, str]
    profiler: Profiler
    is_for_another_machine: bool  # planned from a topology file, with dry_run=true


def multicast(sweep: ExpandedSweep) -> None:
    """Refuse NVLink multicast that the surrounding environment forbids."""
    for cell in sweep.cells:
        nccl.refuse_multicast(cell.nccl, sweep.surroundings)
        if sweep.fleet is not None:
            sweep.fleet.refuse_multicast(cell.nccl)


def secrets(sweep: ExpandedSweep) -> None:
    """Refuse an option whose value looks like a secret: records, the report and MLflow would keep it."""
    for cell in sweep.cells:
        for option, value in _texts("", cell.to_dict()):
            if secret_value(value):
                raise Refused(
                    f"{option}: its value looks like a secret, and every record keeps it; accepted is another value "
                    "(hand a secret to the ranks in an environment variable)"
                )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every text inside a value."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(f"{name}.{key}".strip("."), one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(name, one)


def missing_library(sweep: ExpandedSweep) -> None:
    """Refuse a model whose library is not installed."""
    for library in dict.fromkeys(cell.model.library for cell in sweep.cells):
        if library not in ("ringside", "python") and importlib.util.find_spec(library) is None:
            raise Refused(
                f"model.library={library}: not installed; accepted here after `pip install '.[{library}]'`"
            )


def own_code(sweep: ExpandedSweep) -> None:
    """Refuse a model, loader or strategy of the user's own that cannot be called, or lacks a method."""
    refuse_wrong_code(sweep.cells)


def missing_compiler(sweep: ExpandedSweep) -> None:
    """Refuse compiled cells on CPU workers of this machine without the C++ compiler that torch would call.

    On GPUs Triton calls a C compiler, but not for what an earlier run has left on the disk: a rank says whether it is missed.
    """
    here = sweep.surroundings
    asked = here.get("CXX", "g++")
    found = shutil.which(next(iter(asked.split()), ""), path=here.get("PATH"))
    if found or here.get("TORCH_INDUCTOR_INSTALL_GXX") or sweep.is_for_another_machine:
        return
    for cell in sweep.cells:
        if cell.compiled and cell.device == "cpu" and not cell.hosts:
            raise Refused(
                f"optimize={cell.optimize}: needs a C++ compiler on CPU workers, and {asked or 'CXX='} is not found; accepted "
                "here is eager, or a compiler that the variable CXX names (apt install g++)"
            )


def missing_profiler(sweep: ExpandedSweep) -> None:
    """Refuse a trace by nsys where nsys is not found, or too old."""
    if sweep.profiler.missing:
        raise sweep.profiler.missing


def benchmark_request(sweep: ExpandedSweep) -> None:
    """Refuse what a benchmark cannot measure: buffers that do not fit the memory, options that exclude each other."""
    here = Room(sweep.machine.memory_bytes, free_memory(), free_shared_memory())
    unseen = Room(sweep.machine.memory_bytes)  # taken to have such GPUs
    for cell in sweep.cells:
        if sweep.fleet and cell.hosts:
            refuse(cell, room_on(sweep.fleet.some(cell.hosts)))
        else:
            refuse(cell, unseen if cell.hosts or sweep.is_for_another_machine else here)


def room_on(hosts: Iterable[Host]) -> Room:
    """Return how much memory a cell on some hosts finds."""
    memory = [
        (host.machine.memory_bytes, host.free_memory_bytes, host.shared_memory_bytes)
        for host in hosts
    ]
    return Room(
        *(
            min((one for one in of if one is not None), default=None)
            for of in zip(*memory, strict=True)
        )
    )


def threads(sweep: ExpandedSweep) -> None:
    """Refuse a number of threads around ranks on GPUs that they cannot take: it would end each of them."""
    for cell in sweep.cells:
        around = {"": sweep.surroundings}
        if cell.hosts:
            around = (
                {f"host {one.name}: ": one.variables for one in sweep.fleet.some(cell.every_host)}
                if sweep.fleet
                else {}
            )
        for where, variables in around.items():
            said = variables.get(THREADS, "")
            if (
                cell.device == "cuda"
                and said
                and not sweep.is_for_another_machine
                and not _is_threads(said)
            ):
                raise Refused(
                    f"{where}{THREADS}={one_line(said, LONGEST)} in the environment: accepted is a whole number from 1 to "
                    f"{MOST_THREADS}, or none: ranks then share the cores"
                )


def _is_threads(said: str) -> bool:
    """Return whether OpenMP and torch take it: a number, or one for each level of nested parallel regions."""
    first = said.partition(",")[0].strip()
    return (
        bool(re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", said, re.ASCII))
        and 1 <= int(first[:9]) <= MOST_THREADS
    )


def peer_access(sweep: ExpandedSweep) -> None:
    """Refuse a cell that requires peer access between GPUs that have none."""
    for cell in sweep.cells:
        if not cell.hosts:  # of another host this machine's driver knows nothing
            refuse_without_peers(cell, sweep.machine)


def shared_memory(sweep: ExpandedSweep) -> None:
    """Refuse a strategy that needs more of /dev/shm than is free."""
    if not sweep.is_for_another_machine:
        refuse_too_little([cell for cell in once_each(sweep.cells) if not cell.hosts])
    for host in sweep.fleet or ():  # one with servers alone shares memory with nobody
        there = [cell for cell in once_each(sweep.cells) if host.name in cell.hosts]
        refuse_too_little(there, host.shared_memory_bytes, f"host {host.name}: ")


# In this order: the first that holds is the sentence that the user sees.
REFUSALS: tuple[Callable[[ExpandedSweep], None], ...] = (
    multicast,
    secrets,
    missing_library,
    own_code,
    missing_compiler,
    missing_profiler,
    benchmark_request,
    threads,
    peer_access,
    shared_memory,  # last: it may have to ask torch, in a process of its own
)


def refuse_expanded(sweep: ExpandedSweep) -> None:
    """Refuse a sweep that cannot run on this machine. Raises Refused."""
    for check in REFUSALS:
        check(sweep)


SHARED = (
    "study",
    "output_dir",
    "tracking",
    "engine",
    "hosts",
    "validity",
    "device",
    "repeats",
    "noise_pairs",
    "resume",
    "wait",
    "dry_run",
    "topology",
    "tuning_pass",
    "sample_gpus",
    "predict",
    "report",
)


def refuse_several_values(configs: Sequence[Config], overrides: Sequence[Sequence[str]]) -> None:
    """Refuse a sweep over an option that all its cells share; `overrides` are those of each cell. Raises Refused."""
    for name in SHARED:
        differing = _differing(name, [getattr(config, name) for config in configs])
        if differing:
            key, values = differing
            pairs = [text.partition("=") for texts in overrides for text in texts]
            # tracking=mlflow,none differs in tracking.enabled, and +experiment=a,b in study
            for option, one in ((key, key), (name, name), ("+experiment", key)):
                typed = dict.fromkeys(value for left, _, value in pairs if left == option)
                if len(typed) > 1:
                    raise Refused(
                        f"{option}={','.join(typed)}: a sweep has one {one}; run one sweep for each"
                    )
            shown = dict.fromkeys(map(str, values))
            raise Refused(f"{key}={','.join(shown)}: a sweep has one {key}; run one sweep for each")


def _differing(key: str, values: Sequence[Any]) -> tuple[str, Sequence[Any]] | None:
    """Return the first option in which values differ, with its values: of a group of options the one inside it."""
    if all(value == values[0] for value in values):
        return None
    if not dataclasses.is_dataclass(values[0]):
        return key, values
    inside = (
        _differing(f"{key}.{field.name}", [getattr(value, field.name) for value in values])
        for field in dataclasses.fields(values[0])
    )
    return next(filter(None, inside), None)


REMOTE = ("ssh", "slurm", "command")
# The engines that read an option; every engine reads the others.
READ_BY = {
    "prefix": ("command",),
    "ssh_config": ("ssh",),
    **dict.fromkeys(
        ("submit", "time_minutes", "partition", "account", "job_nodes", "gpus_per_node", "sbatch"),
        ("slurm",),
    ),
    "interface": REMOTE,
    "trusted_network": REMOTE,
    "python": REMOTE,
    "folder": REMOTE,
}
INTERFACE = re.compile(r"[A-Za-z0-9_.:-]{1,15}", re.ASCII)  # Linux has at most 15 bytes
HOST = "{host}"


def refuse_engines(configs: Sequence[Config]) -> None:
    """Refuse a sweep whose hosts and engine do not fit each other. Raises Refused."""
    for config in configs:
        _refuse_one_without_the_other(config)
    if said := next(_wrong_options(configs[0].engine), None):  # a sweep has one engine
        raise Refused(said)


def _refuse_one_without_the_other(config: Config) -> None:
    typed, engine = ",".join(config.nodes), config.engine.name
    if config.nodes and engine not in REMOTE:
        raise Refused(
            f"nodes={typed}: accepted together with an engine that starts agents there, {_engines()}"
        )
    if engine in REMOTE and not config.nodes:
        raise Refused(
            f"engine={engine}: accepted together with nodes=, which says on which hosts; nodes=1 is one host, nodes=a,b are two"
        )
    if config.hosts is not None and not config.nodes:
        raise Refused(
            f"hosts={config.hosts}: accepted together with nodes=, which says how many of them, and {_engines()}"
        )
    if config.hosts is not None and engine == "slurm":
        raise Refused(
            f"hosts={config.hosts}: accepted with engine=ssh and engine=command; the hosts of Slurm are its allocation"
        )
    servers = (
        config.strategy.get("server_nodes", "auto") if isinstance(config.strategy, dict) else "auto"
    )
    if servers != "auto" and not config.nodes:
        raise Refused(
            f"strategy.server_nodes={servers}: accepted together with nodes=, which says where the ranks are"
        )
    profiler = config.profiler["name"] if isinstance(config.profiler, dict) else ""
    if config.nodes and profiler == "nsys":
        raise Refused(
            "profiler=nsys: accepted on this machine only, without nodes=; profiler=torch traces ranks on every host"
        )


def _engines() -> str:
    return ", ".join(f"engine={one}" for one in REMOTE[:-1]) + f" or engine={REMOTE[-1]}"


def _wrong_options(engine: Engine) -> Iterator[str]:
    """Yield what is wrong with the options of an engine, a sentence each."""
    defaults = Engine()
    for name, engines in READ_BY.items():
        value = getattr(engine, name)
        if value != getattr(defaults, name) and engine.name not in engines:
            typed = _as_list(value) if isinstance(value, list) else to_text(value)
            yield f"engine.{name}={typed}: accepted with {' or '.join(f'engine={one}' for one in engines)}"
    if engine.name == "command" and not engine.prefix:
        yield (
            "engine.prefix=[]: accepted with engine=command are the words that run a command on a host, such as "
            f"engine.prefix=[ip,netns,exec,{HOST}]"
        )
    if engine.prefix and not any(HOST in word for word in engine.prefix):
        yield f"engine.prefix={_as_list(engine.prefix)}: has no {HOST}, where the name of the host goes; accepted is one with it"
    for word in engine.prefix:
        if not word or not word.isprintable():
            yield f"engine.prefix={_as_list(engine.prefix)}: {word!r} is no word; accepted are printable words"
    if engine.interface is not None and not INTERFACE.fullmatch(engine.interface):
        yield (
            f"engine.interface={engine.interface!r}: accepted is the name of one network interface, at most 15 letters, digits, "
            "'.', '_', ':' and '-'"
        )
    if (
        engine.ssh_config is not None
        and not expand_path("engine.ssh_config", engine.ssh_config).is_file()
    ):
        yield f"engine.ssh_config={engine.ssh_config!r}: is no file; accepted is one of this machine, as ssh -F has it"
    for name in ("python", "folder"):
        value = getattr(engine, name)
        if value is not None and not (value.isprintable() and value.startswith("/")):
            yield f"engine.{name}={value!r}: accepted is a whole path there, which begins with /"


def _as_list(words: Sequence[str]) -> str:
    return "[" + ",".join(words) + "]"


def refuse_one_host_only(config: Config, sets: Sequence[Sequence[str]]) -> None:
    """Refuse sets of several hosts for a strategy or benchmark whose YAML says `hosts: false`. Raises Refused."""
    trains = groups.choice("benchmark", config.benchmark["name"]).trains
    for group in ("benchmark", "strategy") if trains else ("benchmark",):
        name = str(getattr(config, group)["name"])
        if max(map(len, sets)) > 1 and not groups.choice(group, name).several_hosts:
            raise Refused(
                f"{group}={name}: works inside one host; accepted are one host a cell, nodes=each, and other choices"
            )


# What Ringside itself keeps in output_dir, beside the studies.
OURS = (DEFAULT_STORE, ARTIFACTS, floor_file.FILE)


def refuse_outputs(config: Config) -> None:
    """Refuse a study, an output_dir or a store whose place something else has. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    if config.study in OURS:
        raise Refused(
            f"study={config.study}: accepted is another name; output_dir keeps {', '.join(OURS)} beside the studies"
        )
    for path in (study.parent, study):
        try:
            reason = "is no folder" if path.exists() and not path.is_dir() else ""
        except OSError as error:  # of somebody else's, or a name that is too long
            reason = f"cannot be looked at: {error.strerror}"
        if reason:
            raise Refused(f"output_dir={config.output_dir}: cannot be written ({path} {reason})")
    if not config.tracking.enabled:
        return
    if (artifacts := study.parent / ARTIFACTS).is_symlink():
        raise _link(config, artifacts)
    file = _store_file(config.tracking.uri, study.parent)
    if file is not None and (reason := not_a_store(file)):
        raise Refused(
            f"tracking.uri={file}: {reason}; accepted is a new file or a store of MLflow's"
        )


def _store_file(uri: str | None, output_dir: Path) -> Path | None:
    """Return the file of the SQLite store; None for another store. Raises Refused for a URI that no store can have."""
    if uri is None:
        return output_dir / DEFAULT_STORE  # without SQLAlchemy, which takes a while to import
    try:
        return sqlite_file(store_uri(uri, output_dir))
    except WrongUri as error:
        raise Refused(str(error)) from None


def refuse_links(config: Config, cells: Iterable[Cell]) -> None:
    """Refuse a study or a cell whose folder is a link: its files would be written and tidied elsewhere. Raises Refused."""
    study = study_folder(config.output_dir, config.study)
    for folder in (study, *(study / cell.folder for cell in cells)):
        if folder.is_symlink():
            raise _link(config, folder)


def _link(config: Config, path: Path) -> Refused:
    return Refused(
        f"output_dir={config.output_dir}: {path} is a link; accepted are folders (output_dir may be a link)"
    )


READ, WRITE = 0, 1  # NVML_P2P_CAPS_INDEX_…: nvidia-ml-py has a tuple where the first should be


def refuse_without_peers(cell: Cell, machine: Machine) -> None:
    """Refuse a cell that requires peer access (`benchmark.p2p=required`) where the driver says that a pair has none.

    A pair of which the driver says nothing passes: the cell asks CUDA again before it measures.

    Raises:
        Refused: names the pairs.
    """
    if machine.kind != "cuda" or cell.benchmark.get("p2p") != "required":
        return
    uuids = {device.id: device.uuid for device in machine.devices if device.uuid}
    without = [
        f"{a}-{b}"
        for a, b in combinations(sorted(cell.gpus), 2)
        if a in uuids and b in uuids and _has_no_peer_access(uuids[a], uuids[b])
    ]
    if without:
        raise Refused(
            f"benchmark.p2p=required: the driver gives GPUs {', '.join(without)} no peer access; accepted there are both, "
            "enabled and disabled"
        )


def _has_no_peer_access(a: str, b: str) -> bool:
    """Return whether the driver says that one of two GPUs may not read or write the other's memory."""
    import pynvml

    try:
        first, second = (pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in (a, b))
        answers = [
            pynvml.nvmlDeviceGetP2PStatus(one, other, what)
            for one, other in ((first, second), (second, first))
            for what in (READ, WRITE)
        ]
    except pynvml.NVMLError:
        return False
    return any(answer != pynvml.NVML_P2P_STATUS_OK for answer in answers)


# Gradients of the largest torchvision model (vit_h_14, 632 million parameters), rounded up. Where this is free for every
# rank, torch need not compute the exact size, which takes seconds.
PLENTY_BYTES = 3_000_000_000


def refuse_too_little(
    cells: Sequence[Cell], free_bytes: int | None = None, where: str = ""
) -> None:
    """Refuse cells that need more shared memory than is free now, here or on a host that `where` names.

    Raises:
        Refused: says how much is needed and where.
    """
    sharing = [
        cell
        for cell in cells
        if choice("strategy", cell.strategy["name"]).rules.get("shared_memory")
    ]
    if not sharing:
        return
    free = free_shared_memory() if free_bytes is None else free_bytes
    doubtful = [cell for cell in sharing if free < PLENTY_BYTES * (2 * len(cell.gpus) + 2)]
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
    for cell, needed in zip(doubtful, json.loads(answer.stdout), strict=True):
        who = f"{where}strategy={cell.strategy['name']}: {cell.name}"
        refuse_too_little_shared(needed, free, who, "a strategy with less")
