"""What is around the cells of an invocation with hosts: on each host what it says of itself, and what was otherwise then."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from analysis.findings.machines.hosts import SHARED, listed
from analysis.findings.provenance import INHERITED, LEFT_OUT
from benchmarks.host.environment import Variables, merged
from benchmarks.record import CellFolder, Record
from conf.cell import Cell
from launch.engines import slurm
from launch.machine import facts
from launch.machine.fleet import Fleet, Host
from launch.study.surroundings import Surroundings, differences_of, of_variables

HOSTS = "hosts"  # of the environment of a record: an entry for each of Cell.every_host
FABRIC = "fabric"  # what Slurm says of the switches between hosts


@dataclass(frozen=True)
class HostsAround(Surroundings):
    """The hosts of an invocation with nodes=, and their software and variables."""

    fleet: Fleet
    asked: Callable[[Cell, str, str], Variables]  # what a cell asks for on a host of this name; the last is its token

    def variables(self, cell: Cell, folder: CellFolder, token: str) -> dict[str, str]:
        """Return the environment of a cell's processes on its first host, as far as a record keeps it."""
        return self._variables(cell, self.fleet[cell.hosts[0]], token)

    def around(self, cell: Cell, variable: Mapping[str, str]) -> dict[str, Any]:
        """Return what a record says of its environment: that of the first host, and an entry for each of them."""
        entries = self._entries(cell)
        shown = {name: entries[0][name] for name in ("variables", INHERITED, LEFT_OUT)}
        uuids = [uuid for entry in entries for uuid in entry["planned_uuids"]]
        switches = {FABRIC: text} if (text := slurm.fabric(self.surrounding)) else {}
        return {**self.fleet[cell.hosts[0]].facts, **shown, **switches, "planned_uuids": uuids, HOSTS: entries}

    def differences(self, record: Record) -> list[str]:
        """Return what was otherwise on a host of a record, in words: 'host b: driver 550.1, now 560.2'."""
        known = {str(one.get("name")): one for one in listed(record.environment.get(HOSTS))}
        return [
            f"host {one['name']}: {difference}"
            for one in self._entries(record.cell)
            for difference in differences_of(_alone(record, known.get(one["name"], {})), _alone(record, one))
        ]

    def other_code(self, record: Record) -> bool:
        """Return whether a record was measured by another version of the code that measures."""
        return bool(record.environment.get("code") != facts.facts().get("code"))

    def _entries(self, cell: Cell) -> list[dict[str, Any]]:
        """Return what a record says of each host of a cell. Large facts that are those of the first are left out."""
        first, entries = self.fleet[cell.hosts[0]].facts, []
        for host in self.fleet.some(cell.every_host):
            own = {name: value for name, value in host.facts.items() if name not in SHARED or value != first.get(name)}
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
