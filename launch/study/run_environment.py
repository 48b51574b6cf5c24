"""The environment of this invocation's cells, and how it differs from a record's.

The report compares no records of different provenance (analysis.study.provenance), so one that was
measured elsewhere does not answer what is asked here: another host or GPU, driver, torch, NCCL, or
another variable that the ranks inherit.
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
from types import MappingProxyType
from typing import Any

from analysis.study.provenance import (
    INHERITED,
    LEFT_OUT,
    PROVENANCE,
    SHARED,
    Machines,
    inherited,
    provenance,
    short_hardware,
)
from benchmarks.agent.processes import Variables, merged, with_absolute_path
from benchmarks.record import CellFolder, Record
from conf.cell import Cell
from launch.engines.environment import cell_variables, inherited_names
from launch.machine import facts
from launch.machine.devices import Machine, torch_version
from launch.machine.fleet import Fleet

THREADS = "OMP_NUM_THREADS"
NCCL_FILE = "/etc/nccl.conf"
VERSIONS_TIMEOUT_S = 120.0
HOSTS = "hosts"  # of the environment of a record: an entry for each of Cell.every_host


@dataclass(frozen=True)
class RunEnvironment:
    """The machine, the software and the variables of this invocation."""

    machine: Machine
    surrounding: Mapping[str, str]  # the variables around the launcher

    def facts(
        self, cell: Cell, folder: CellFolder, added: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return what a record says of its environment before any rank has started.

        `added` are variables beside those that the cell asks for.
        """
        cell_asks = cell_variables(cell, self.machine, folder, "").with_set(added)
        variables = merged(cell_asks, self.surrounding)
        return {
            **facts.facts(),
            "variables": facts.recorded_variables(variables),
            INHERITED: inherited_names(variables, cell, self.surrounding),
            "planned_uuids": self.machine.uuids(cell.gpus),
            LEFT_OUT: facts.left_out(variables),
        }

    def differences(self, record: Record) -> list[str]:
        """Return what was otherwise around a record, in words: 'driver 550.1, now 560.2'.

        What one of the two does not know counts as equal.
        """
        cell = record.cell
        around = self.facts(cell, CellFolder(Path()))
        if len(around["planned_uuids"]) < len(cell.gpus):
            around["planned_uuids"] = []
        around["versions"] = {"python": platform.python_version(), "torch": torch_version()}
        sentences = _differences(record, dataclasses.replace(record, environment=around))
        if not sentences and cell.device == "cuda":
            around["versions"] |= self._versions_on_gpus
            sentences = _differences(record, dataclasses.replace(record, environment=around))
        return sentences

    @functools.cached_property
    def _versions_on_gpus(self) -> dict[str, str]:
        """What a process like the ranks says, as which NCCL is loaded. It takes seconds."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.rank.worker"],
                cwd=facts.ROOT,
                env=with_absolute_path(self.surrounding),
                capture_output=True,
                timeout=VERSIONS_TIMEOUT_S,
                check=True,
            )
            return {str(name): str(value) for name, value in json.loads(done.stdout).items()}
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError):
            return {}


def _differences(before: Record, now: Record) -> list[str]:
    # What ranks say of their GPUs is not known yet.
    before, now = dataclasses.replace(before, ranks=[]), dataclasses.replace(now, ranks=[])
    machines = Machines((before, now))
    then, today = provenance(before, machines), provenance(now, machines)
    sentences = []
    if then["machine"] != today["machine"]:
        host = before.environment.get("host", "unknown")
        host_now = now.environment.get("host", "unknown")
        hardware, hardware_now = short_hardware(before), short_hardware(now)
        if host != host_now:
            sentences.append(f"host {host}, now {host_now}")
        elif hardware != hardware_now:
            sentences.append(f"{hardware}, now {hardware_now}")
        else:
            sentences.append(f"other GPUs of this host, also {hardware}")
    for name, fact in PROVENANCE.items():
        differs = then[name] != today[name] and then[name] and today[name]
        if differs and fact.must_match:
            sentences.append(f"{name} {then[name]}, now {today[name]}")
    variables, variables_now = _inherited(before), _inherited(now)
    for name in sorted(variables.keys() | variables_now.keys()):
        value, value_now = variables.get(name, "unset"), variables_now.get(name, "unset")
        if value != value_now:
            sentences.append(f"{name} {value}, now {value_now}")
    files = before.environment.get("nccl_conf"), now.environment.get("nccl_conf")
    if before.cell.device == "cuda" and files[0] != files[1]:
        sentences.append(f"{NCCL_FILE} has changed")
    return sentences


def _inherited(record: Record) -> dict[str, str]:
    """Return what the ranks inherited, those of NCCL on CPU workers too."""
    variables = inherited(record, unused=True)
    names = record.environment.get(INHERITED, ())
    values = record.environment.get("variables", {})
    if THREADS in names and THREADS in values:
        variables[THREADS] = str(values[THREADS])
    return variables


@dataclass(frozen=True)
class HostsEnvironment(RunEnvironment):
    """The hosts of an invocation with nodes=, and their software and variables."""

    fleet: Fleet
    # What a cell asks for on a host of this name; the last is its token.
    cell_variables: Callable[[Cell, str, str], Variables]

    def facts(
        self, cell: Cell, folder: CellFolder, added: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return what a record says of its environment: that of each host."""
        entries = self._entries(cell)
        uuids: list[str] = []
        for entry in entries:
            uuids += entry["planned_uuids"]
        return {
            **self.fleet[cell.hosts[0]].facts,
            "variables": entries[0]["variables"],
            INHERITED: entries[0][INHERITED],
            LEFT_OUT: entries[0][LEFT_OUT],
            "planned_uuids": uuids,
            HOSTS: entries,
        }

    def _entries(self, cell: Cell) -> list[dict[str, Any]]:
        """Return what a record says of each host. Large facts of the first are said once."""
        first = self.fleet[cell.hosts[0]].facts
        entries = []
        for host in self.fleet.some(cell.every_host):
            entry: dict[str, Any] = {"name": host.name, **host.facts}
            for name in SHARED:
                if name in entry and entry[name] == first.get(name):
                    del entry[name]
            variables = merged(self.cell_variables(cell, host.name, ""), host.variables)
            uuids: list[str] = []
            if host.name in cell.hosts:
                uuids = host.machine.uuids(cell.gpus)
            entry |= {
                "variables": facts.recorded_variables(variables),
                INHERITED: inherited_names(variables, cell, host.variables),
                LEFT_OUT: host.left_out,
                "planned_uuids": uuids,
                "versions": host.versions,
                "interface": variables["GLOO_SOCKET_IFNAME"],
                "interfaces": [interface.to_dict() for interface in host.interfaces],
                "infiniband": host.infiniband,
            }
            entries.append(entry)
        return entries

    def differences(self, record: Record) -> list[str]:
        """Return what was otherwise on a host, in words: 'host b: driver 550.1, now 560.2'."""
        entries = {str(entry.get("name")): entry for entry in record.environment.get(HOSTS, ())}
        cell = dataclasses.replace(record.cell, hosts=(), server_hosts=())  # of one host alone
        sentences = []
        for entry in self._entries(record.cell):
            name = entry.pop("name")
            entry_before = {**entries.get(name, {})}
            entry_before.pop("name", None)
            before = dataclasses.replace(record, cell=cell, environment=entry_before)
            now = dataclasses.replace(record, cell=cell, environment=entry)
            for sentence in _differences(before, now):
                sentences.append(f"host {name}: {sentence}")
        return sentences
