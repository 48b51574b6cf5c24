"""Tells machines apart by their hosts and GPUs, and names them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.findings.machines.hosts import facts_of_hosts, gpus_of, short_hardware
from analysis.findings.model import Member
from benchmarks.record import Record
from conf.cell import folded

UUID_LENGTH = len("GPU-") + 8


class Machines:
    """Tells machines apart and names them: one name for one host, as long as no GPU id stands for two GPUs or two models.

    Cells with hosts name these as others name GPUs: all hosts of such cells are one machine, `a+b`, as long as no GPU of a
    host stands for two. So a host alone may be the baseline of several.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        """Find the machines of these records; only these have a name."""
        known: list[_Machine] = []
        self._of: dict[int, _Machine] = {}  # by id(): copies of one record may lie in two folders
        for record in records:
            host = None if record.cell.hosts else str(record.environment.get("host", "unknown host"))
            gpus = _identities(record)
            machine = next((one for one in known if one.fits(host, gpus)), None)
            if machine is None:
                machine = _Machine(host, short_hardware(record))
                known.append(machine)
            machine.learn(record, gpus)
            self._of[id(record)] = machine
        for machine, name in zip(known, _names(known), strict=True):
            machine.name = name

    def name(self, record: Record) -> str:
        """Return `vm`, or `4 × H200 on vm` where another machine has the same host name; `a+b` where cells have hosts.

        Where that has the same hardware too, the first GPU tells them apart: `4 × H200 on vm · GPU-2f2c1b07`.
        """
        return self._of[id(record)].name

    def said(self, record: Record, of_host: Callable[[Mapping[str, Any]], str]) -> str:
        """Return what the facts of a record's host say; where cells have hosts, what those of all hosts of its machine say.

        A record on one of several hosts says nothing of the others: for them others of its sweep do, else of the sweep nearest
        to it. So a host alone and all hosts together say the same as long as nothing changed. Hosts that differ are named:
        `driver 550.1 (a), 560.2 (b)`.
        """
        values = {host: of_host(facts) for host, facts in self._of[id(record)].facts_at(record).items()}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return ", ".join(f"{value or 'not known'} ({host})" for host, value in sorted(values.items()))


@dataclass
class _Machine:
    """A machine while its records are collected; `host` is None where cells have hosts."""

    host: str | None
    hardware: str  # of its first record
    gpus: dict[tuple[str, Member], str] = field(default_factory=dict)  # what _identities returns, of all records
    # By host and sweep: when, and its facts.
    told: dict[str, dict[str, tuple[float, Mapping[str, Any]]]] = field(default_factory=dict)
    name: str = ""

    def fits(self, host: str | None, gpus: Mapping[tuple[str, Member], str]) -> bool:
        """Tell whether a record is of this machine."""
        return self.host == host and all(self.gpus.get(gpu, uuid) == uuid for gpu, uuid in gpus.items())

    def learn(self, record: Record, gpus: Mapping[tuple[str, Member], str]) -> None:
        """Take what a record says of the machine."""
        self.gpus.update(gpus)
        for host, facts in facts_of_hosts(record).items() if self.host is None else ():
            self.told.setdefault(host, {}).setdefault(record.sweep_id, (record.started_at, facts))

    def facts_at(self, record: Record) -> dict[str, Mapping[str, Any]]:
        """Return {host: its facts} at the time of a record."""
        own, at = facts_of_hosts(record), record.started_at
        for host in self.told.keys() - own.keys():
            sweeps = self.told[host]
            nearest = min(sweeps, key=lambda sweep: (sweep != record.sweep_id, abs(sweeps[sweep][0] - at)))
            own[host] = sweeps[nearest][1]
        return own

    @property
    def place(self) -> str:
        """Return the name of the host, or of all hosts."""
        return folded(sorted(self.told)) if self.host is None else self.host


def _names(known: Sequence[_Machine]) -> list[str]:
    """Return a name for each machine."""
    hosts = Counter(one.place for one in known)
    kinds = Counter((one.place, one.hardware) for one in known)
    found: list[str] = []
    for one in known:
        name = one.place if hosts[one.place] == 1 else f"{one.hardware} on {one.place}"
        name += f" · {_first_gpu(one.gpus)}" if kinds[one.place, one.hardware] > 1 and _first_gpu(one.gpus) else ""
        again = found.count(name)  # by no fact that a record keeps
        found.append(f"{name} ({again + 1})" if again else name)
    return found


def first_gpu(record: Record) -> str:
    """Return the beginning of the UUID of the machine's first GPU, `GPU-2f2c1b07`; empty where it is not known."""
    return _first_gpu(_identities(record))


def _first_gpu(identities: Mapping[tuple[str, Member], str]) -> str:
    return next((uuid[:UUID_LENGTH] for (what, _), uuid in sorted(identities.items()) if what == "uuid"), "")


def _identities(record: Record) -> dict[tuple[str, Member], str]:
    """Return {("uuid", GPU): UUID, ("name", GPU): model} as far as a record knows them; ranks know their own GPU best."""
    found: dict[tuple[str, Member], str] = {}
    for host, facts in facts_of_hosts(record).items():
        for known in gpus_of(facts):
            if type(gpu := known.get("id")) is int:
                member: Member = f"{host}:{gpu}" if host else gpu
                found |= {(what, member): str(known[what]) for what in ("uuid", "name") if what in known}
    planned, members = record.environment.get("planned_uuids"), record.cell.members
    for member, uuid in zip(members, planned if isinstance(planned, list) else (), strict=False):
        found["uuid", member] = str(uuid)
    for rank in record.ranks:
        number = rank.get("rank")
        if "name" in rank and type(number) is int and 0 <= number < len(members):
            found["name", members[number]] = str(rank["name"])
    return found


def gpu_names(record: Record) -> list[str]:
    """Return the models of a cell's GPUs, each once; empty where nothing says."""
    known = _identities(record)
    return list(dict.fromkeys(known["name", gpu] for gpu in record.cell.members if ("name", gpu) in known))
