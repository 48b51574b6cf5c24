"""Where a record was made: on which machine, with which software and variables. Records that differ
in it are not compared.

A name of PROVENANCE is '' where the record does not say. Every variable that the ranks inherited is
a further name; it is absent where it was not set.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.study.estimates import Member
from benchmarks.record import Record
from conf.cell import compress_hosts

SHARED = ("topology", "links")  # an entry of a host has them where they are not those of the first
UUID_LENGTH = len("GPU-") + 8
Facts = Mapping[str, Any]  # of a host


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(value: object) -> list[Mapping[str, Any]]:
    """Return the entries of a list as mappings; empty for anything else."""
    return [mapping(entry) for entry in value] if isinstance(value, list) else []


def facts_of_hosts(record: Record) -> dict[str, Facts]:
    """Return {host: its facts}, in rank order, then those that have servers only; of a cell without
    hosts {'': …}.

    What equal hosts share, and what the record says of no host, is that of its environment: the
    first host's.
    """
    environment, names = record.environment, record.cell.every_host
    if not names:
        return {"": environment}
    of_host = {str(entry.get("name")): entry for entry in environment.get("hosts", ())}
    own = {name: value for name, value in environment.items() if name != "hosts"}
    shared = {name: own[name] for name in SHARED if name in own}
    facts: dict[str, Facts] = {name: {**shared, **of_host.get(name, {})} for name in names}
    if names[0] not in of_host:
        facts[names[0]] = own
    return facts


@dataclass(frozen=True)
class HostInterface:
    """The network interface through which a host reaches the others; its name is empty where that
    is not known.
    """

    name: str = ""
    gbit_per_s: float | None = None  # as the driver has it


def interface_of(facts: Facts) -> HostInterface:
    """Return the interface that gloo and NCCL's sockets were given on a host, by its facts."""
    # gloo opens a connection for each entry of a list.
    name = str(facts.get("interface") or "").partition(",")[0]
    for interface in listed(facts.get("interfaces")):
        mbit = interface.get("mbit_per_s")
        if interface.get("name") == name and isinstance(mbit, int | float) and mbit > 0:
            return HostInterface(name, mbit / 1000)
    return HostInterface(name)


def gpus_of(facts: Facts) -> list[Mapping[str, Any]]:
    """Return what is known of each GPU of a host, by its facts."""
    return listed(mapping(facts.get("gpu")).get("gpus"))


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine, not only
    those of the subset.

    Of several hosts `2 hosts with 4 × NVIDIA H200 each`, `CPU workers on 2 hosts with …`.
    """
    facts = list(facts_of_hosts(record).values())
    gpus = [gpu_names(of_host) for of_host in facts]
    if record.cell.device == "cuda" and any(gpus):
        return _of_hosts([names or "no known GPU" for names in gpus], " each")
    cpus = [mapping(of_host.get("cpu")).get("model") or "an unknown CPU" for of_host in facts]
    return f"CPU workers on {_of_hosts(list(map(str, cpus)), '')}"


def _of_hosts(kinds: Sequence[str], each: str) -> str:
    """Return what hosts have: of one host that alone, of several `2 hosts with …`."""
    if len(kinds) == 1:
        return kinds[0]
    parts = []
    for kind, count in Counter(kinds).items():
        parts.append(f"{count} hosts with {kind}{each}" if count > 1 else f"1 host with {kind}")
    return " + ".join(parts)


def gpu_names(facts: Facts) -> str:
    """Return the GPUs of a host by its facts: `4 × NVIDIA H200`; empty without any."""
    kinds = Counter(str(gpu.get("name", "unknown GPU")) for gpu in gpus_of(facts))
    return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    words = hardware(record)
    if words.startswith("CPU workers"):
        return "GPUs"
    return words.replace("NVIDIA ", "").replace("GeForce ", "")


class Machines:
    """Tells machines apart and names them: one name for one host, as long as no GPU id stands for
    two GPUs or two models.

    Cells with hosts name these as others name GPUs: all hosts of such cells are one machine, `a+b`,
    as long as no GPU of a host stands for two. So a host alone may be the baseline of several.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        """Find the machines of these records; only these have a name."""
        machines: list[_Machine] = []
        self._of: dict[int, _Machine] = {}  # by id(): copies of one record may lie in two folders
        for record in records:
            host = str(record.environment.get("host", "unknown host"))
            gpus = _identities(record)
            fitting = [machine for machine in machines if machine.fits(record, host, gpus)]
            if not fitting:
                own_host = None if record.cell.hosts else host
                fitting = [_Machine(own_host, short_hardware(record))]
                machines.append(fitting[0])
            fitting[0].learn(record, gpus)
            self._of[id(record)] = fitting[0]
        _set_names(machines)

    def name(self, record: Record) -> str:
        """Return `vm`, or `4 × H200 on vm` where another machine has the same host name; `a+b`
        where cells have hosts.

        Where that has the same hardware too, the first GPU tells them apart: `4 × H200 on vm ·
        GPU-2f2c1b07`.
        """
        return self._of[id(record)].name

    def of_every_host(self, record: Record, value_of: Callable[[Facts], str]) -> str:
        """Return a value of a record's host by its facts; where cells have hosts, that of all hosts
        of its machine.

        A record on one of several hosts says nothing of the others: for them others of its sweep
        do, else of the sweep nearest to it. So a host alone and all hosts together say the same as
        long as nothing changed. Hosts that differ are named: `driver 550.1 (a), 560.2 (b)`.
        """
        facts = self._of[id(record)].facts_at(record)
        values = {host: value_of(of_host) for host, of_host in facts.items()}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return ", ".join(f"{values[host] or 'not known'} ({host})" for host in sorted(values))


@dataclass
class _Machine:
    """A machine while its records are collected; `host` is None where cells have hosts."""

    host: str | None
    hardware: str  # of its first record
    gpus: dict[tuple[str, Member], str] = field(default_factory=dict)  # _identities of all records
    # By host and sweep: when, and its facts.
    sweeps: dict[str, dict[str, tuple[float, Facts]]] = field(default_factory=dict)
    name: str = ""

    def fits(self, record: Record, host: str, gpus: Mapping[tuple[str, Member], str]) -> bool:
        """Return whether a record is of this machine."""
        if self.host != (None if record.cell.hosts else host):
            return False
        return all(self.gpus.get(gpu, uuid) == uuid for gpu, uuid in gpus.items())

    def learn(self, record: Record, gpus: Mapping[tuple[str, Member], str]) -> None:
        """Take what a record says of the machine."""
        self.gpus.update(gpus)
        if self.host is None:
            for host, facts in facts_of_hosts(record).items():
                sweeps = self.sweeps.setdefault(host, {})
                sweeps.setdefault(record.sweep_id, (record.started_at, facts))

    def facts_at(self, record: Record) -> dict[str, Facts]:
        """Return {host: its facts} at the time of a record."""
        facts, at = facts_of_hosts(record), record.started_at
        for host in self.sweeps.keys() - facts.keys():
            sweeps = self.sweeps[host]
            nearest = min(
                sweeps, key=lambda sweep: (sweep != record.sweep_id, abs(sweeps[sweep][0] - at))
            )
            facts[host] = sweeps[nearest][1]
        return facts

    @property
    def hosts(self) -> str:
        """The name of the host, or of all hosts."""
        return compress_hosts(sorted(self.sweeps)) if self.host is None else self.host


def _set_names(machines: Sequence[_Machine]) -> None:
    hosts = Counter(machine.hosts for machine in machines)
    kinds = Counter((machine.hosts, machine.hardware) for machine in machines)
    names: Counter[str] = Counter()
    for machine in machines:
        name = machine.hosts
        if hosts[machine.hosts] > 1:
            name = f"{machine.hardware} on {machine.hosts}"
        gpu = _first_gpu(machine.gpus)
        if kinds[machine.hosts, machine.hardware] > 1 and gpu:
            name += f" · {gpu}"
        names[name] += 1
        # By no fact that a record keeps.
        machine.name = name if names[name] == 1 else f"{name} ({names[name]})"


def first_gpu(record: Record) -> str:
    """Return the beginning of the UUID of the machine's first GPU, `GPU-2f2c1b07`; empty where it
    is not known.
    """
    return _first_gpu(_identities(record))


def _first_gpu(identities: Mapping[tuple[str, Member], str]) -> str:
    for (what, _), value in sorted(identities.items()):
        if what == "uuid":
            return value[:UUID_LENGTH]
    return ""


def _identities(record: Record) -> dict[tuple[str, Member], str]:
    """Return {("uuid", GPU): UUID, ("name", GPU): model} as far as a record knows them; ranks know
    their own GPU best.
    """
    identities: dict[tuple[str, Member], str] = {}
    for host, facts in facts_of_hosts(record).items():
        for gpu in gpus_of(facts):
            if "id" in gpu:
                member: Member = f"{host}:{gpu['id']}" if host else gpu["id"]
                for what in ("uuid", "name"):
                    if what in gpu:
                        identities[what, member] = str(gpu[what])
    members = record.cell.members
    planned = record.environment.get("planned_uuids") or ()
    for member, uuid in zip(members, planned, strict=False):
        identities["uuid", member] = str(uuid)
    for rank in record.ranks:
        at = rank.get("rank", -1)
        if "name" in rank and 0 <= at < len(members):
            identities["name", members[at]] = str(rank["name"])
    return identities


def gpu_models(record: Record) -> list[str]:
    """Return the models of a cell's GPUs, each once; empty where nothing says."""
    names = _identities(record)
    models = (names.get(("name", gpu)) for gpu in record.cell.members)
    return list(dict.fromkeys(model for model in models if model is not None))


# Set by Study.of where runs of one cell were connected in different ways.
CONNECTIONS = "connections"
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
# Likewise: names of variables that look like secrets, by their name or value. Their values are
# nowhere.
LEFT_OUT = "left_out"
# What Ringside sets by itself: nobody inherited it where it has this value; None: whatever the
# value.
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
# Recorded, and without any part in a measurement: labels of images and jobs, what is built, where
# files lie. The number of threads is compared by itself.
NO_EFFECT = frozenset((
    "SLURM_JOB_ID", "NCCL_VERSION", "TORCH_CUDA_ARCH_LIST", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_LOGS",
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH", "OMP_NUM_THREADS",
))  # fmt: skip
# Recorded, and what a host calls itself: a part of where a measurement was made, which its hosts
# tell.
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
# Variables that forbid NVLink multicast. Machines set them to stay safe, and every rank must have
# them.
SAFETY: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def provenance(record: Record, machines: Machines) -> dict[str, str]:
    """Return the machine, the software and the variables of a record: every name of PROVENANCE,
    then those of `inherited`.

    What a host calls itself is left out: cells on two hosts would be of two conditions.
    """
    environment, on_gpus = record.environment, record.cell.device == "cuda"
    versions = mapping(environment.get("versions"))
    values = {
        "machine": machines.name(record),
        "driver": machines.of_every_host(record, _driver) if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl") if on_gpus else None,
        "cuDNN": versions.get("cudnn") if on_gpus else None,
        "Python": ".".join(str(versions.get("python") or "").split(".")[:2]),
        "CPU": machines.of_every_host(record, _cpu),
        "threads": _threads(record),
        "Ringside": _measuring_code(record),
        CONNECTIONS: None,
    }
    origin = {name: "" if value is None else str(value) for name, value in values.items()}
    for name, value in inherited(record).items():
        if name not in OF_A_HOST:
            origin[name] = value
    return origin


def inherited(record: Record, unused: bool = False) -> dict[str, str]:
    """Return the variables that may change results and that came from around the launcher: {name:
    value}.

    `unused`: those of GPUs too where the cell ran on CPU workers.
    """
    inherited_names = record.environment.get(INHERITED)  # an earlier Ringside did not note it
    irrelevant = () if unused or record.cell.device == "cuda" else OF_GPUS
    values = {}
    for name, value in variables(record).items():
        is_inherited = inherited_names is None or name in inherited_names
        is_ours = SET_BY_RINGSIDE.get(name, "") in (None, value)
        if not is_inherited or is_ours or name in NO_EFFECT or name in record.cell.nccl:
            continue
        if not name.startswith(irrelevant):
            values[name] = value
    return values


def variables(record: Record) -> dict[str, str]:
    """Return the variables of the ranks that a record keeps."""
    kept = mapping(record.environment.get("variables"))
    return {str(name): str(value) for name, value in kept.items()}


def worded(value: str | None) -> str:
    """Return a value of a provenance for people; None where a variable was not set."""
    return "unset" if value is None else value or "not known"


def _driver(facts: Facts) -> str:
    driver = mapping(facts.get("gpu")).get("driver")
    return "" if driver is None else str(driver)


def _cpu(facts: Facts) -> str:
    cpu = mapping(facts.get("cpu"))
    parts = [str(cpu.get("model") or "")]
    if "cores" in cpu:
        parts.append(f"{cpu['cores']} cores")
    return ", ".join(part for part in parts if part)


def _threads(record: Record) -> str:
    counts = [rank["threads"] for rank in record.ranks if type(rank.get("threads")) is int]
    asked = mapping(record.environment.get("variables")).get("OMP_NUM_THREADS")
    if not counts or asked is None:
        return ""
    names = record.environment.get(INHERITED)
    cores = mapping(record.environment.get("cpu")).get("cores")
    if names is not None:
        ours = "OMP_NUM_THREADS" not in names
    elif record.cell.device == "cpu":
        ours = True
    else:  # an earlier Ringside did not note it; what it set itself on GPUs follows from the cores
        ours = type(cores) is int and asked == str(max(1, cores // (2 * len(counts))))
    return SHARE if ours and asked == str(counts[0]) else str(counts[0])


def _measuring_code(record: Record) -> str:
    """Return the hash of the code that measured; of records of before it was noted, the commit."""
    code = record.environment.get("code")
    if code:
        return f"code {code}"
    commit = mapping(record.environment.get("git")).get("commit")
    return f"commit {str(commit)[:12]}" if commit else ""


def connections(record: Record) -> str:
    """Return how NCCL connected the ranks, and the settings that it announced and nobody asked for.

    '' where its log is missing, or does not show the connections of several ranks.
    """
    effective = record.effective
    if record.cell.world_size > 1 and not effective.get("transport"):
        return ""
    nccl = mapping(effective.get("nccl"))
    channels = effective.get("channels", mapping(nccl.get("channels")).get("collective"))
    parts = [str(effective.get("transport") or "")]
    if channels is not None:
        parts.append(f"{channels} channels")
    for name, value in sorted(mapping(nccl.get("settings")).items()):
        if name not in record.cell.nccl:
            parts.append(f"{name}={value}")
    return ", ".join(part for part in parts if part)


def installation(record: Record, machine: str) -> str:
    """Describe the machine and the software of a record in one line; `machine` names all hosts
    where cells name hosts.
    """
    environment = record.environment
    if record.cell.hosts:  # a cell on one of them says nothing of the others
        parts = [f"hosts {machine}"]
    else:
        parts = [hardware(record), f"host {environment.get('host', 'unknown')}"]
    driver = mapping(environment.get("gpu")).get("driver")
    if driver:
        parts.append(f"driver {driver}")
    versions = mapping(environment.get("versions"))
    if "torch" in versions:
        parts.append(f"torch {versions['torch']}")
    return ", ".join(parts)
