"""What is refused once the cells are known, before any process starts: one line is one way to be refused."""

import dataclasses
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping

from benchmarks.record.visible import one_line
from benchmarks.request import Room, refuse
from conf import nccl
from conf.cell import Cell
from conf.host_limits import free_memory, free_shared_memory
from conf.options import Refused
from launch.machine.devices import Machine
from launch.machine.fleet import Fleet, Host
from launch.machine.secrets import secret_value
from launch.plan.order import once_each
from launch.plan.own_code import refuse_wrong_code
from launch.plan.profilers import Profiler
from launch.refuse.peer_access import refuse_without_peers
from launch.refuse.shared_memory import refuse_too_little

THREADS, MOST_THREADS = "OMP_NUM_THREADS", 4096
LONGEST = 40  # characters of a wrong value


@dataclasses.dataclass(frozen=True)
class Draft:
    """A sweep whose requests were checked and expanded."""

    cells: list[Cell]
    machine: Machine  # the first host's, or this one
    fleet: Fleet | None  # the hosts, where they were asked what they have
    surroundings: Mapping[str, str]
    profiler: Profiler
    is_for_another_machine: bool  # planned from a topology file, with dry_run=true


def multicast(draft: Draft) -> None:
    """Refuse NVLink multicast that the surrounding environment forbids."""
    for cell in draft.cells:
        nccl.refuse_multicast(cell.nccl, draft.surroundings)
        if draft.fleet is not None:
            draft.fleet.refuse_multicast(cell.nccl)


def secrets(draft: Draft) -> None:
    """Refuse an option whose value looks like a secret: records, the report and MLflow would keep it."""
    for cell in draft.cells:
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


def missing_library(draft: Draft) -> None:
    """Refuse a model whose library is not installed."""
    for library in dict.fromkeys(cell.model.library for cell in draft.cells):
        if library not in ("ringside", "python") and importlib.util.find_spec(library) is None:
            raise Refused(
                f"model.library={library}: not installed; accepted here after `pip install '.[{library}]'`"
            )


def own_code(draft: Draft) -> None:
    """Refuse a model, loader or strategy of the user's own that cannot be called, or lacks a method."""
    refuse_wrong_code(draft.cells)


def missing_compiler(draft: Draft) -> None:
    """Refuse compiled cells on CPU workers of this machine without the C++ compiler that torch would call.

    On GPUs Triton calls a C compiler, but not for what an earlier run has left on the disk: a rank says whether it is missed.
    """
    here = draft.surroundings
    asked = here.get("CXX", "g++")
    found = shutil.which(next(iter(asked.split()), ""), path=here.get("PATH"))
    if found or here.get("TORCH_INDUCTOR_INSTALL_GXX") or draft.is_for_another_machine:
        return
    for cell in draft.cells:
        if cell.compiled and cell.device == "cpu" and not cell.hosts:
            raise Refused(
                f"optimize={cell.optimize}: needs a C++ compiler on CPU workers, and {asked or 'CXX='} is not found; accepted "
                "here is eager, or a compiler that the variable CXX names (apt install g++)"
            )


def missing_profiler(draft: Draft) -> None:
    """Refuse a trace by nsys where nsys is not found, or too old."""
    if draft.profiler.missing:
        raise draft.profiler.missing


def benchmark_request(draft: Draft) -> None:
    """Refuse what a benchmark cannot measure: buffers that do not fit the memory, options that exclude each other."""
    here = Room(draft.machine.memory_bytes, free_memory(), free_shared_memory())
    unseen = Room(draft.machine.memory_bytes)  # taken to have such GPUs
    for cell in draft.cells:
        if draft.fleet and cell.hosts:
            refuse(cell, room_on(draft.fleet.some(cell.hosts)))
        else:
            refuse(cell, unseen if cell.hosts or draft.is_for_another_machine else here)


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


def threads(draft: Draft) -> None:
    """Refuse a number of threads around ranks on GPUs that they cannot take: it would end each of them."""
    for cell in draft.cells:
        around = {"": draft.surroundings}
        if cell.hosts:
            around = (
                {f"host {one.name}: ": one.variables for one in draft.fleet.some(cell.every_host)}
                if draft.fleet
                else {}
            )
        for where, variables in around.items():
            said = variables.get(THREADS, "")
            if (
                cell.device == "cuda"
                and said
                and not draft.is_for_another_machine
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


def peer_access(draft: Draft) -> None:
    """Refuse a cell that requires peer access between GPUs that have none."""
    for cell in draft.cells:
        if not cell.hosts:  # of another host this machine's driver knows nothing
            refuse_without_peers(cell, draft.machine)


def shared_memory(draft: Draft) -> None:
    """Refuse a strategy that needs more of /dev/shm than is free."""
    if not draft.is_for_another_machine:
        refuse_too_little([cell for cell in once_each(draft.cells) if not cell.hosts])
    for host in draft.fleet or ():  # one with servers alone shares memory with nobody
        there = [cell for cell in once_each(draft.cells) if host.name in cell.hosts]
        refuse_too_little(there, host.shared_memory_bytes, f"host {host.name}: ")


# In this order: the first that holds is the sentence that the user sees.
REFUSALS: tuple[Callable[[Draft], None], ...] = (
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


def refuse_draft(draft: Draft) -> None:
    """Refuse a sweep that cannot run on this machine. Raises Refused."""
    for check in REFUSALS:
        check(draft)
