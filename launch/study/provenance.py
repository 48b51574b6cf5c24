"""What is around the cells of this invocation, and what was otherwise around a record: a cell is done only where nothing was.

The report compares no records of different surroundings (analysis.study.provenance), so one that was measured elsewhere does
not answer what is asked here: another host or GPU, driver, torch, NCCL, or another variable that the ranks inherit.
"""

import dataclasses
import functools
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.study.provenance import (
    CONNECTIONS,
    INHERITED,
    LEFT_OUT,
    PROVENANCE,
    SHARED,
    Machines,
    inherited,
    listed,
    mapping,
    provenance,
    short_hardware,
)
from benchmarks.agent.processes import Variables, merged, with_absolute_path
from benchmarks.record import CellFolder, Record
from conf.cell import Cell
from launch.engines.environment import ROOT, environment
from launch.engines.environment import inherited as names_inherited
from launch.machine import facts
from launch.machine.devices import Machine, torch_version
from launch.machine.fleet import Fleet, Host

CODE = "Ringside"  # the code that measures: its users are told, and decide
# Of PROVENANCE, what does not decide here. Threads follow from the cores and from OMP_NUM_THREADS, which decide.
NOT_HERE = ("machine", "threads", CONNECTIONS, CODE)
THREADS = "OMP_NUM_THREADS"
NCCL_FILE = "/etc/nccl.conf"
VERSIONS_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Surroundings:
    """The machine, the software and the variables of this invocation."""

    machine: Machine
    surrounding: Mapping[str, str]  # the variables around the launcher

    def variables(self, cell: Cell, folder: CellFolder, token: str) -> dict[str, str]:
        """Return the environment of a cell's processes."""
        return environment(cell, self.machine, folder, token, self.surrounding)

    def around(self, cell: Cell, variable: Mapping[str, str]) -> dict[str, Any]:
        """Return what a record says of its environment before any rank has started, with these variables."""
        planned = self.machine.uuids(cell.gpus)
        return {
            **facts.facts(),
            **of_variables(variable, cell, self.surrounding),
            "planned_uuids": planned,
            LEFT_OUT: facts.left_out(variable),
        }

    def differences(self, record: Record) -> list[str]:
        """Return what was otherwise around a record, in words: 'driver 550.1, now 560.2'.

        What one of the two does not know counts as equal.
        """
        found = differences_of(record, self._measured_here(record, {}))
        if found or record.cell.device != "cuda":
            return found
        return differences_of(record, self._measured_here(record, self._versions_on_gpus))

    def other_code(self, record: Record) -> bool:
        """Return whether a record was measured by another version of the code that measures."""
        both = record, self._measured_here(record, {})
        then, now = (provenance(one, Machines(both))[CODE] for one in both)
        return then != now

    def _measured_here(self, record: Record, versions: Mapping[str, str]) -> Record:
        """Return a record with what is around its cell now, instead of what was."""
        around = self.around(record.cell, self.variables(record.cell, CellFolder(Path()), ""))
        told = {"python": platform.python_version(), "torch": torch_version(), **versions}
        uuids = {device.id: device.uuid for device in self.machine.devices if device.uuid}
        planned = (
            [uuids[gpu] for gpu in record.cell.gpus] if uuids.keys() >= {*record.cell.gpus} else []
        )
        return dataclasses.replace(
            record, environment={**around, "versions": told, "planned_uuids": planned}, ranks=[]
        )

    @functools.cached_property
    def _versions_on_gpus(self) -> dict[str, str]:
        """What a rank would report of its software; empty where that fails. It takes seconds: torch is imported elsewhere.

        Only a process with the variables of the ranks knows which NCCL is loaded.
        """
        command = [sys.executable, "-m", "benchmarks.rank.worker"]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=with_absolute_path(self.surrounding),
                capture_output=True,
                timeout=VERSIONS_TIMEOUT_S,
                check=True,
            )
            return {str(name): str(value) for name, value in json.loads(done.stdout).items()}
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
            return {}


def of_variables(
    variable: Mapping[str, str], cell: Cell, surrounding: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a record says of the variables of ranks, around which these were set."""
    return {
        "variables": facts.variables(variable),
        INHERITED: names_inherited(variable, cell, surrounding),
    }


def differences_of(before: Record, now: Record) -> list[str]:
    """Return what is otherwise around the second of two records of one cell."""
    before = dataclasses.replace(before, ranks=[])  # what ranks say of their GPUs is not known yet
    machines = Machines((before, now))
    then, today = provenance(before, machines), provenance(now, machines)
    found = [] if then["machine"] == today["machine"] else [_other_machine(before, now)]
    found += [
        f"{name} {then[name]}, now {today[name]}"
        for name in PROVENANCE
        if name not in NOT_HERE and then[name] and today[name] and then[name] != today[name]
    ]
    variables, variables_now = _variables(before), _variables(now)
    found += [
        f"{name} {variables.get(name, 'unset')}, now {variables_now.get(name, 'unset')}"
        for name in sorted(variables.keys() | variables_now.keys())
        if variables.get(name) != variables_now.get(name)
    ]
    if before.cell.device == "cuda" and before.environment.get("nccl_conf") != now.environment.get(
        "nccl_conf"
    ):
        found.append(f"{NCCL_FILE} has changed")
    return found


def _variables(record: Record) -> dict[str, str]:
    """Return what the ranks inherited, those of NCCL on CPU workers too: who changes them expects another measurement."""
    names, known = record.environment.get(INHERITED), mapping(record.environment.get("variables"))
    threads = (
        {THREADS: str(known[THREADS])}
        if isinstance(names, list) and THREADS in names and THREADS in known
        else {}
    )
    return inherited(record, unused=True) | threads


def _other_machine(before: Record, now: Record) -> str:
    """Return how the machine differs, in words."""
    hosts = [str(one.environment.get("host", "unknown")) for one in (before, now)]
    if hosts[0] != hosts[1]:
        return f"host {hosts[0]}, now {hosts[1]}"
    kinds = [short_hardware(one) for one in (before, now)]
    return (
        f"{kinds[0]}, now {kinds[1]}"
        if kinds[0] != kinds[1]
        else f"other GPUs of this host, also {kinds[0]}"
    )


# What is around the cells of an invocation with hosts: on each host what it says of itself, and what was otherwise then.


HOSTS = "hosts"  # of the environment of a record: an entry for each of Cell.every_host


@dataclass(frozen=True)
class HostsAround(Surroundings):
    """The hosts of an invocation with nodes=, and their software and variables."""

    fleet: Fleet
    asked: Callable[
        [Cell, str, str], Variables
    ]  # what a cell asks for on a host of this name; the last is its token

    def variables(self, cell: Cell, folder: CellFolder, token: str) -> dict[str, str]:
        """Return the environment of a cell's processes on its first host, as far as a record keeps it."""
        return self._variables(cell, self.fleet[cell.hosts[0]], token)

    def around(self, cell: Cell, variable: Mapping[str, str]) -> dict[str, Any]:
        """Return what a record says of its environment: that of the first host, and an entry for each of them."""
        entries = self._entries(cell)
        shown = {name: entries[0][name] for name in ("variables", INHERITED, LEFT_OUT)}
        uuids = [uuid for entry in entries for uuid in entry["planned_uuids"]]
        return {
            **self.fleet[cell.hosts[0]].facts,
            **shown,
            "planned_uuids": uuids,
            HOSTS: entries,
        }

    def differences(self, record: Record) -> list[str]:
        """Return what was otherwise on a host of a record, in words: 'host b: driver 550.1, now 560.2'."""
        known = {str(one.get("name")): one for one in listed(record.environment.get(HOSTS))}
        return [
            f"host {one['name']}: {difference}"
            for one in self._entries(record.cell)
            for difference in differences_of(
                _alone(record, known.get(one["name"], {})), _alone(record, one)
            )
        ]

    def other_code(self, record: Record) -> bool:
        """Return whether a record was measured by another version of the code that measures."""
        return bool(record.environment.get("code") != facts.facts().get("code"))

    def _entries(self, cell: Cell) -> list[dict[str, Any]]:
        """Return what a record says of each host of a cell. Large facts that are those of the first are left out."""
        first, entries = self.fleet[cell.hosts[0]].facts, []
        for host in self.fleet.some(cell.every_host):
            own = {
                name: value
                for name, value in host.facts.items()
                if name not in SHARED or value != first.get(name)
            }
            entries.append({"name": host.name, **own, **self._of_host(cell, host)})
        return entries

    def _variables(self, cell: Cell, host: Host, token: str) -> dict[str, str]:
        return merged(self.asked(cell, host.name, token), host.variables)

    def _of_host(self, cell: Cell, host: Host) -> dict[str, Any]:
        """Return what an entry says beside the facts of the host."""
        variable = self._variables(cell, host, "")
        return {
            **of_variables(variable, cell, host.variables),
            LEFT_OUT: host.left_out,
            "planned_uuids": host.machine.uuids(cell.gpus) if host.name in cell.hosts else [],
            "versions": host.versions,
            "interface": variable["GLOO_SOCKET_IFNAME"],
            "interfaces": [one.to_dict() for one in host.interfaces],
            "infiniband": host.infiniband,
        }


def _alone(record: Record, entry: Mapping[str, Any]) -> Record:
    """Return the record as if one of its hosts had been its only machine."""
    return dataclasses.replace(
        record,
        cell=dataclasses.replace(record.cell, hosts=(), server_hosts=()),
        environment={name: value for name, value in entry.items() if name != "name"},
        ranks=[],
    )
