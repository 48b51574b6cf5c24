"""Tells machines apart by their hosts and GPUs, and names them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from analysis.findings.machines.hosts import mapping, short_hardware
from benchmarks.record import Record

UUID_LENGTH = len("GPU-") + 8


class Machines:
    """Tells machines apart and names them: one name for one host, as long as no GPU id stands for two GPUs or two models."""

    def __init__(self, records: Iterable[Record]) -> None:
        """Find the machines of these records; only these have a name."""
        known: list[tuple[str, dict[tuple[str, int], str], str]] = []  # host, what _identities returns, hardware
        places: dict[int, int] = {}  # by id(): copies of one record may lie in two folders
        for record in records:
            host, gpus = str(record.environment.get("host", "unknown host")), _identities(record)
            fits = (
                place
                for place, (of_host, of_gpus, _) in enumerate(known)
                if of_host == host and all(of_gpus.get(gpu, uuid) == uuid for gpu, uuid in gpus.items())
            )
            place = next(fits, len(known))
            if place == len(known):
                known.append((host, {}, short_hardware(record)))
            known[place][1].update(gpus)
            places[id(record)] = place
        names = _names(known)
        self._names = {key: names[place] for key, place in places.items()}

    def name(self, record: Record) -> str:
        """Return `vm`, or `4 × H200 on vm` where another machine has the same host name.

        Where that has the same hardware too, the first GPU tells them apart: `4 × H200 on vm · GPU-2f2c1b07`.
        """
        return self._names[id(record)]


def _names(known: Sequence[tuple[str, Mapping[tuple[str, int], str], str]]) -> list[str]:
    """Return a name for each machine, given by its host, what _identities returns, and its hardware."""
    hosts = Counter(host for host, _, _ in known)
    kinds = Counter((host, hardware) for host, _, hardware in known)
    found: list[str] = []
    for host, gpus, hardware in known:
        name = host if hosts[host] == 1 else f"{hardware} on {host}"
        name += f" · {_first_gpu(gpus)}" if kinds[host, hardware] > 1 and _first_gpu(gpus) else ""
        again = found.count(name)  # by no fact that a record keeps
        found.append(f"{name} ({again + 1})" if again else name)
    return found


def first_gpu(record: Record) -> str:
    """Return the beginning of the UUID of the machine's first GPU, `GPU-2f2c1b07`; empty where it is not known."""
    return _first_gpu(_identities(record))


def _first_gpu(identities: Mapping[tuple[str, int], str]) -> str:
    return next((uuid[:UUID_LENGTH] for (what, _), uuid in sorted(identities.items()) if what == "uuid"), "")


def _identities(record: Record) -> dict[tuple[str, int], str]:
    """Return {("uuid", GPU): UUID, ("name", GPU): model} as far as a record knows them; ranks know their own GPU best."""
    found: dict[tuple[str, int], str] = {}
    listed = mapping(record.environment.get("gpu")).get("gpus")
    for one in listed if isinstance(listed, list) else ():
        known = mapping(one)
        if type(gpu := known.get("id")) is int:
            found |= {(what, gpu): str(known[what]) for what in ("uuid", "name") if what in known}
    planned, gpus = record.environment.get("planned_uuids"), record.cell.gpus
    for gpu, uuid in zip(gpus, planned if isinstance(planned, list) else (), strict=False):
        found["uuid", gpu] = str(uuid)
    for rank in record.ranks:
        number = rank.get("rank")
        if "name" in rank and type(number) is int and 0 <= number < len(gpus):
            found["name", gpus[number]] = str(rank["name"])
    return found


def gpu_names(record: Record) -> list[str]:
    """Return the models of a cell's GPUs, each once; empty where nothing says."""
    known = _identities(record)
    return list(dict.fromkeys(known["name", gpu] for gpu in record.cell.gpus if ("name", gpu) in known))
