"""The hosts of a sweep, as each of them describes itself (launch.machine.describe)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.host.interfaces import Interface
from benchmarks.record.encoding import decoded
from benchmarks.record.field_types import check_types
from benchmarks.record.visible import one_line
from conf.nccl import forbidding_multicast, refuse_multicast
from conf.options import Refused
from launch.machine.describe import FORM
from launch.machine.devices import Device, Machine
from launch.machine.facts import facts

# Of a host: other containers come and go, and where it can be reached is tried anew.
OF_THE_MOMENT = ("boot_id", "interfaces", "free_memory_bytes", "shared_memory_bytes")
LONGEST = 200  # characters of what a host says wrongly


@dataclass(frozen=True)
class Host:
    """One host: its devices, its software, and how it can be reached."""

    name: str  # as the user typed it, or Slurm has it
    machine: Machine
    facts: dict[str, Any]  # launch.machine.facts, for records
    variables: dict[str, str]  # those around its agent that a record keeps
    left_out: list[str]  # names of those that look like secrets
    versions: dict[str, str]  # python, torch, nccl, as far as they are known
    kernel: str
    boot_id: str  # of its kernel; hosts with the same one are one machine; empty where it has none
    interfaces: tuple[Interface, ...]
    infiniband: list[dict[str, str]]
    free_memory_bytes: int | None  # None: not known
    shared_memory_bytes: int  # that are free
    too_small: list[str]  # limits of its processes, a sentence each

    @staticmethod
    def described(name: str, said: object) -> "Host":
        """Return the host of a description: its JSON text, or the object.

        Raises:
            Refused: the host cannot do what is asked, or says something else than a description of this Ringside.
        """
        try:
            plain: Any = None
            plain = decoded(said) if isinstance(said, str | bytes) else said
            if not isinstance(plain, Mapping) or plain.get("form") != FORM:
                raise TypeError(f"{said!r:.100}")
            if "refused" in plain:
                raise Refused(f"host {name}: {one_line(str(plain['refused']))}")
            return _host(name, {key: value for key, value in plain.items() if key != "form"})
        except Refused:
            raise
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(
                f"host {name}: what it says of itself is no description by this Ringside "
                f"({_other_commit(plain) or one_line(str(error), LONGEST)}); accepted is the same Ringside on every host "
                "(engine.folder=, engine.python=)"
            ) from None

    def changed(self, before: "Host") -> str:
        """Return what an earlier description of the host says otherwise, `kernel, versions`; empty for nothing of weight."""
        names = [one.name for one in fields(self) if one.name not in OF_THE_MOMENT]
        return ", ".join(name for name in names if getattr(self, name) != getattr(before, name))

    @property
    def hostname(self) -> str:
        """Return what the host calls itself."""
        return str(self.facts.get("host", self.name))


def _other_commit(plain: Any) -> str:
    """Return which commit of Ringside wrote a description and which one reads it; empty where they are equal or not known."""
    try:
        there, here = (one_line(str(one["git"]["commit"]))[:12] for one in (plain["facts"], facts()))
    except (TypeError, LookupError):
        return ""
    return f"it is of commit {there}, and this is {here}" if there != here else ""


def _host(name: str, plain: Mapping[str, Any]) -> Host:
    """Return a host. Raises TypeError, ValueError, LookupError or AttributeError for what `describe` does not write so."""
    machine = dict(plain["machine"])
    machine["devices"] = tuple(Device(**one) for one in machine["devices"])
    machine["everyone"] = tuple(machine["everyone"])
    interfaces = tuple(Interface.from_dict(one) for one in plain["interfaces"])
    made = Host(name, **{**plain, "machine": Machine(**machine), "interfaces": interfaces})
    for part in (made, *made.machine.devices, *made.interfaces):
        check_types(part)
    if made.machine.kind not in ("cuda", "cpu") or not {*made.machine.everyone} <= {
        one.id for one in made.machine.devices
    }:
        raise ValueError(f"machine={plain['machine']!r:.100}")
    for one in made.interfaces:
        one.refuse_wrong_addresses()
    return made


@dataclass(frozen=True)
class Fleet:
    """The hosts of a sweep, in the order in which the user named them."""

    hosts: tuple[Host, ...]

    def __iter__(self) -> Iterator[Host]:
        """Iterate over the hosts."""
        return iter(self.hosts)

    def __getitem__(self, name: str) -> Host:
        """Return the host of a name. Raises KeyError."""
        return {host.name: host for host in self.hosts}[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the hosts."""
        return tuple(host.name for host in self.hosts)

    def some(self, names: Sequence[str]) -> "Fleet":
        """Return the hosts of these names, in their order. Raises KeyError."""
        return Fleet(tuple(self[name] for name in names))

    def forbidding_multicast(self, surrounding: Mapping[str, str]) -> dict[str, str]:
        """Return the variables by which some host, or the launcher's own surroundings, forbids NVLink multicast.

        Ranks of all hosts get them: what one host must not do, others could make it do.
        """
        found: dict[str, str] = {}
        for variables in (surrounding, *(host.variables for host in self.hosts)):
            found = forbidding_multicast(variables) | found
        return found

    def refuse_multicast(self, asked: Mapping[str, str]) -> None:
        """Refuse settings with NVLink multicast where a host forbids it. Raises Refused."""
        for host in self.hosts:
            refuse_multicast(asked, host.variables, f"environment of host {host.name}")
