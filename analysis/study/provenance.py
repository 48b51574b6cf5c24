"""Where a record was made: on which machine, with which software and variables. Records that differ in it are not compared.

A name of PROVENANCE is '' where the record does not say. Every variable that the ranks inherited is a further name; it is
absent where it was not set.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.study.estimates import Member
from benchmarks.record import Record
from conf.cell import compress_hosts

# The hosts of a record, and their hardware. A cell without hosts has one, this machine, whose name is empty.


SHARED = ("topology", "links")  # an entry of a host has them where they are not those of the first


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: a record's environment and tables may hold anything."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Mapping[str, Any]]:
    """Return the mappings of a list; empty for anything else."""
    return [mapping(one) for one in value] if isinstance(value, list) else []


def facts_of_hosts(record: Record) -> dict[str, Mapping[str, Any]]:
    """Return {host: its facts}, in rank order, then those that have servers only; of a cell without hosts {'': …}.

    What equal hosts share, and what the record says of no host, is that of its environment: the first host's.
    """
    environment, names = record.environment, record.cell.every_host
    if not names:
        return {"": environment}
    told = {str(one.get("name")): one for one in listed(environment.get("hosts"))}
    own = {name: value for name, value in environment.items() if name != "hosts"}
    shared = {name: own[name] for name in SHARED if name in own}
    return {
        name: {**shared, **told.get(name, {} if place else own)} for place, name in enumerate(names)
    }


@dataclass(frozen=True)
class HostInterface:
    """The network interface through which a host reaches the others; its name is empty where that is not known."""

    name: str = ""
    gbit_per_s: float | None = None  # as the driver has it


def interface_of(facts: Mapping[str, Any]) -> HostInterface:
    """Return the interface that gloo and NCCL's sockets were given on a host, by its facts."""
    name = str(facts.get("interface") or "").partition(",")[
        0
    ]  # gloo opens a connection for each entry of a list
    known = next((one for one in listed(facts.get("interfaces")) if one.get("name") == name), {})
    mbit = known.get("mbit_per_s")
    return HostInterface(name, mbit / 1000 if isinstance(mbit, int | float) and mbit > 0 else None)


def gpus_of(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what is known of each GPU of a host, by its facts."""
    return listed(mapping(facts.get("gpu")).get("gpus"))


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine, not only those of the subset.

    Of several hosts `2 hosts with 4 × NVIDIA H200 each`, `CPU workers on 2 hosts with …`.
    """
    facts = list(facts_of_hosts(record).values())
    if record.cell.device == "cuda":
        named = [gpu_names(one) for one in facts]
        if any(named):
            return _each([one or "no known GPU" for one in named], " each")
    return f"CPU workers on {_each([str(mapping(one.get('cpu')).get('model') or 'an unknown CPU') for one in facts])}"


def _each(kinds: Sequence[str], every: str = "") -> str:
    """Return what hosts have: of one host that alone, of several `2 hosts with …`."""
    if len(kinds) == 1:
        return kinds[0]
    parts = [
        f"{count} hosts with {kind}{every}" if count > 1 else f"1 host with {kind}"
        for kind, count in Counter(kinds).items()
    ]
    return " + ".join(parts)


def gpu_names(facts: Mapping[str, Any]) -> str:
    """Return the GPUs of a host by its facts: `4 × NVIDIA H200`; empty without any."""
    kinds = Counter(str(gpu.get("name", "unknown GPU")) for gpu in gpus_of(facts))
    return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    found = hardware(record)
    return (
        "GPUs"
        if found.startswith("CPU workers")
        else found.replace("NVIDIA ", "").replace("GeForce ", "")
    )


# Tells machines apart by their hosts and GPUs, and names them.


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
            host = (
                None if record.cell.hosts else str(record.environment.get("host", "unknown host"))
            )
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
        values = {
            host: of_host(facts) for host, facts in self._of[id(record)].facts_at(record).items()
        }
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return ", ".join(
            f"{value or 'not known'} ({host})" for host, value in sorted(values.items())
        )


@dataclass
class _Machine:
    """A machine while its records are collected; `host` is None where cells have hosts."""

    host: str | None
    hardware: str  # of its first record
    gpus: dict[tuple[str, Member], str] = field(
        default_factory=dict
    )  # what _identities returns, of all records
    # By host and sweep: when, and its facts.
    told: dict[str, dict[str, tuple[float, Mapping[str, Any]]]] = field(default_factory=dict)
    name: str = ""

    def fits(self, host: str | None, gpus: Mapping[tuple[str, Member], str]) -> bool:
        """Tell whether a record is of this machine."""
        return self.host == host and all(
            self.gpus.get(gpu, uuid) == uuid for gpu, uuid in gpus.items()
        )

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
            nearest = min(
                sweeps, key=lambda sweep: (sweep != record.sweep_id, abs(sweeps[sweep][0] - at))
            )
            own[host] = sweeps[nearest][1]
        return own

    @property
    def place(self) -> str:
        """Return the name of the host, or of all hosts."""
        return compress_hosts(sorted(self.told)) if self.host is None else self.host


def _names(known: Sequence[_Machine]) -> list[str]:
    """Return a name for each machine."""
    hosts = Counter(one.place for one in known)
    kinds = Counter((one.place, one.hardware) for one in known)
    found: list[str] = []
    for one in known:
        name = one.place if hosts[one.place] == 1 else f"{one.hardware} on {one.place}"
        name += (
            f" · {_first_gpu(one.gpus)}"
            if kinds[one.place, one.hardware] > 1 and _first_gpu(one.gpus)
            else ""
        )
        again = found.count(name)  # by no fact that a record keeps
        found.append(f"{name} ({again + 1})" if again else name)
    return found


def first_gpu(record: Record) -> str:
    """Return the beginning of the UUID of the machine's first GPU, `GPU-2f2c1b07`; empty where it is not known."""
    return _first_gpu(_identities(record))


def _first_gpu(identities: Mapping[tuple[str, Member], str]) -> str:
    return next(
        (uuid[:UUID_LENGTH] for (what, _), uuid in sorted(identities.items()) if what == "uuid"), ""
    )


def _identities(record: Record) -> dict[tuple[str, Member], str]:
    """Return {("uuid", GPU): UUID, ("name", GPU): model} as far as a record knows them; ranks know their own GPU best."""
    found: dict[tuple[str, Member], str] = {}
    for host, facts in facts_of_hosts(record).items():
        for known in gpus_of(facts):
            if type(gpu := known.get("id")) is int:
                member: Member = f"{host}:{gpu}" if host else gpu
                found |= {
                    (what, member): str(known[what]) for what in ("uuid", "name") if what in known
                }
    planned, members = record.environment.get("planned_uuids"), record.cell.members
    for member, uuid in zip(members, planned if isinstance(planned, list) else (), strict=False):
        found["uuid", member] = str(uuid)
    for rank in record.ranks:
        number = rank.get("rank")
        if "name" in rank and type(number) is int and 0 <= number < len(members):
            found["name", members[number]] = str(rank["name"])
    return found


def identity_gpu_names(record: Record) -> list[str]:
    """Return the models of a cell's GPUs, each once; empty where nothing says."""
    known = _identities(record)
    return list(
        dict.fromkeys(known["name", gpu] for gpu in record.cell.members if ("name", gpu) in known)
    )


CONNECTIONS = (
    "connections"  # set by Study.of where runs of one cell were connected in different ways
)
STUDY = "study"  # of records of several studies that are read as one
PROVENANCE = (
    "machine",
    "driver",
    "torch",
    "CUDA",
    "NCCL",
    "cuDNN",
    "Python",
    "CPU",
    "threads",
    "Ringside",
    CONNECTIONS,
)
SHARE = "a share of the cores"  # the threads of a rank, as Ringside sets them
INHERITED = "inherited"  # among the facts of the environment: names of variables that came from around the launcher
# Likewise: names of variables that look like secrets, by their name or value. Their values are nowhere.
LEFT_OUT = "left_out"
# What Ringside sets by itself: nobody inherited it where it has this value; None: whatever the value.
SET_BY_RINGSIDE: Mapping[str, str | None] = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "CUDA_VISIBLE_DEVICES": None,
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_CONF_FILE": None,
    "NCCL_DEBUG": None,
    "NCCL_DEBUG_FILE": None,
    "NCCL_DEBUG_SUBSYS": None,
    "NCCL_RAS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": None,
}
# Recorded, and without any part in a measurement: labels of images and jobs, what is built, where files lie. The number of
# threads is compared by itself.
NO_EFFECT = frozenset((
    "SLURM_JOB_ID", "NCCL_VERSION", "TORCH_CUDA_ARCH_LIST", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "OMP_NUM_THREADS",
))  # fmt: skip
# Recorded, and what a host calls itself: a part of where a measurement was made, which its hosts tell.
OF_A_HOST = ("NCCL_HOSTID",)
OF_GPUS = (
    "NCCL_",
    "NVSHMEM_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NVIDIA_",
    "PYTORCH_CUDA_",
)  # without effect on CPU workers
# Variables that forbid NVLink multicast. Machines set them to stay safe, and every rank must have them.
SAFETY: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def provenance(record: Record, machines: Machines) -> dict[str, str]:
    """Return the machine, the software and the variables of a record: every name of PROVENANCE, then those of `inherited`.

    What a host calls itself is left out: cells on two hosts would be of two conditions.
    """
    environment = record.environment
    versions, on_gpus = mapping(environment.get("versions")), record.cell.device == "cuda"
    known = {
        "machine": machines.name(record),
        "driver": machines.said(record, _driver) if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl") if on_gpus else None,
        "cuDNN": versions.get("cudnn") if on_gpus else None,
        "Python": ".".join(str(versions.get("python") or "").split(".")[:2]),
        "CPU": machines.said(record, _cpu),
        "threads": _threads(record),
        "Ringside": _measuring_code(record),
        CONNECTIONS: None,
    }
    from_around = {
        name: value for name, value in inherited(record).items() if name not in OF_A_HOST
    }
    return {
        name: "" if value is None else str(value) for name, value in known.items()
    } | from_around


def inherited(record: Record, unused: bool = False) -> dict[str, str]:
    """Return the variables that may change results and that came from around the launcher: {name: value}.

    `unused`: those of GPUs too where the cell ran on CPU workers.
    """
    names, asked = record.environment.get(INHERITED), record.cell.nccl
    told = names if isinstance(names, list) else None  # an earlier Ringside did not note it
    without_effect = () if unused or record.cell.device == "cuda" else OF_GPUS
    return {
        name: str(value)
        for name, value in mapping(record.environment.get("variables")).items()
        if (told is None or name in told)
        and name not in NO_EFFECT
        and SET_BY_RINGSIDE.get(name, "") not in (None, value)
        and name not in asked
        and not name.startswith(without_effect)
    }


def variables(record: Record) -> dict[str, str]:
    """Return the variables of the ranks that a record keeps."""
    return {
        str(name): str(value)
        for name, value in mapping(record.environment.get("variables")).items()
    }


def worded(value: str | None) -> str:
    """Return a value of a provenance for people; None where a variable was not set."""
    return "unset" if value is None else value or "not known"


def _driver(facts: Mapping[str, Any]) -> str:
    driver = mapping(facts.get("gpu")).get("driver")
    return "" if driver is None else str(driver)


def _cpu(facts: Mapping[str, Any]) -> str:
    cpu = mapping(facts.get("cpu"))
    cores = f"{cpu['cores']} cores" if "cores" in cpu else ""
    return ", ".join(part for part in (str(cpu.get("model") or ""), cores) if part)


def _threads(record: Record) -> str:
    """Return how many threads a rank has for its operators; SHARE where nothing but Ringside set that number."""
    counts = [one["threads"] for one in record.ranks if type(one.get("threads")) is int]
    asked = mapping(record.environment.get("variables")).get("OMP_NUM_THREADS")
    if not counts or asked is None:
        return ""
    names, cores = (
        record.environment.get(INHERITED),
        mapping(record.environment.get("cpu")).get("cores"),
    )
    if isinstance(names, list):
        ours = "OMP_NUM_THREADS" not in names
    else:  # an earlier Ringside did not note it; what it set itself on GPUs follows from the cores
        of_rank = max(1, cores // (2 * len(counts))) if type(cores) is int else None
        ours = record.cell.device == "cpu" or asked == str(of_rank)
    return SHARE if ours and asked == str(counts[0]) else str(counts[0])


def _measuring_code(record: Record) -> str:
    """Return the hash of the code that measured; of records of before it was noted, the commit."""
    code, commit = (
        record.environment.get("code"),
        mapping(record.environment.get("git")).get("commit"),
    )
    return f"code {code}" if code else f"commit {str(commit)[:12]}" if commit else ""


def connections(record: Record) -> str:
    """Return how NCCL connected the ranks, and the settings that it announced and nobody asked for.

    '' where its log is missing, or does not show the connections of several ranks.
    """
    effective = record.effective
    if record.cell.world_size > 1 and not effective.get("transport"):
        return ""
    nccl = mapping(effective.get("nccl"))
    channels = effective.get("channels", mapping(nccl.get("channels")).get("collective"))
    settings = {
        name: value
        for name, value in mapping(nccl.get("settings")).items()
        if name not in record.cell.nccl
    }
    parts = [
        str(effective.get("transport") or ""),
        "" if channels is None else f"{channels} channels",
    ]
    parts += [f"{name}={value}" for name, value in sorted(settings.items())]
    return ", ".join(part for part in parts if part)


def installation(record: Record, machine: str) -> str:
    """Describe the machine and the software of a record in one line; `machine` names all hosts where cells name hosts."""
    versions = mapping(record.environment.get("versions"))
    parts = [hardware(record), f"host {record.environment.get('host', 'unknown')}"]
    parts = (
        [f"hosts {machine}"] if record.cell.hosts else parts
    )  # a cell on one of them says nothing of the others
    driver = mapping(record.environment.get("gpu")).get("driver")
    parts += [f"driver {driver}"] if driver else []
    parts += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(parts)
