"""Where a record was made: on which machine, with which software and variables.

PROVENANCE declares every fact by which records are told apart; those that differ in one are not
compared. A fact is '' where the record does not say. Every variable that the ranks inherited is a
further name; it is absent where it was not set.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.record import Record
from conf.cell import Member, compress_hosts

SHARED = ("topology", "links")  # an entry of a host has them where they are not those of the first
UUID_LENGTH = len("GPU-") + 8
Facts = Mapping[str, Any]  # of a host

CONNECTIONS = "connections"  # set by Study.of where runs of one cell were connected differently
STUDY = "study"  # of records of several studies that are read as one
SHARE = "a share of the cores"  # the threads of a rank, as Ringside sets them
# Facts of the environment: names of variables that came from around the launcher, and of those that
# look like secrets, whose values are nowhere.
INHERITED, LEFT_OUT = "inherited", "left_out"
# What Ringside sets by itself: nobody inherited it where it has this value; None: whatever it is.
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
NO_EFFECT = frozenset(
    (
        "NCCL_VERSION",
        "OMP_NUM_THREADS",
        "PYTORCH_KERNEL_CACHE_PATH",
        "SLURM_JOB_ID",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_CUDA_ARCH_LIST",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
        "TORCH_LOGS",
        "TRITON_CACHE_DIR",
    )
)
# What a host calls itself: with it, cells on two hosts would be of two conditions.
OF_A_HOST = ("NCCL_HOSTID",)
# Variables without effect on CPU workers begin so.
OF_GPUS = ("NCCL_", "NVSHMEM_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "PYTORCH_CUDA_")
# Variables that forbid NVLink multicast. Machines set them to stay safe, and every rank must have
# them.
SAFETY: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def facts_of_hosts(record: Record) -> dict[str, Facts]:
    """Return {host: its facts}, in rank order, then those that have servers only; else {'': facts}.

    What equal hosts share, and what the record says of no host, is that of its environment: the
    first host's.
    """
    environment, names = record.environment, record.cell.every_host
    if not names:
        return {"": environment}
    of_host = {str(entry.get("name")): entry for entry in environment.get("hosts", ())}
    own = dict(environment)
    own.pop("hosts", None)
    facts: dict[str, Facts] = {}
    for name in names:
        of_this: dict[str, Any] = {}
        for fact in SHARED:
            if fact in own:
                of_this[fact] = own[fact]
        facts[name] = of_this | of_host.get(name, {})
    if names[0] not in of_host:
        facts[names[0]] = own
    return facts


def interface_of(facts: Facts) -> tuple[str, float | None]:
    """Return the interface that gloo and NCCL's sockets were given on a host, '' where it is not
    known, and its Gbit/s as the driver has it.
    """
    # gloo opens a connection for each entry of a list.
    name = (facts.get("interface") or "").partition(",")[0]
    return name, interface_rates(facts).get(name)


def interface_rates(facts: Facts) -> dict[str, float]:
    """Return {interface of a host: its Gbit/s}, as far as drivers say it."""
    rates = {}
    for interface in facts.get("interfaces", ()):
        mbit = interface.get("mbit_per_s") or 0
        if mbit > 0:
            rates[str(interface.get("name"))] = mbit / 1000
    return rates


def gpus_of(facts: Facts) -> list[Mapping[str, Any]]:
    """Return what is known of each GPU of a host."""
    gpus: list[Mapping[str, Any]] = facts.get("gpu", {}).get("gpus", [])
    return gpus


def gpu_names(facts: Facts) -> str:
    """Return the GPUs of a host: `4 × NVIDIA H200`; empty without any."""
    kinds = Counter(str(gpu.get("name", "unknown GPU")) for gpu in gpus_of(facts))
    parts = [f"{count} × {name}" for name, count in sorted(kinds.items())]
    return " + ".join(parts)


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine.

    Of several hosts `2 hosts with 4 × NVIDIA H200 each`, `CPU workers on 2 hosts with …`.
    """
    facts = list(facts_of_hosts(record).values())
    kinds = [gpu_names(of_host) for of_host in facts]
    prefix, each = "", " each"
    if record.cell.device != "cuda" or not any(kinds):
        kinds = [of_host.get("cpu", {}).get("model") or "an unknown CPU" for of_host in facts]
        prefix, each = "CPU workers on ", ""
    if len(kinds) == 1:
        return f"{prefix}{kinds[0]}"
    parts = []
    for kind, count in Counter(kinds).items():
        kind = kind or "no known GPU"
        if count > 1:
            parts.append(f"{count} hosts with {kind}{each}")
        else:
            parts.append(f"1 host with {kind}")
    return prefix + " + ".join(parts)


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    words = hardware(record)
    if words.startswith("CPU workers"):
        return "GPUs"
    return words.replace("NVIDIA ", "").replace("GeForce ", "")


def installation(record: Record, machine: str) -> str:
    """Describe the machine and the software of a record in one line.

    `machine` names all hosts where cells name hosts: a cell on one of them says nothing of the
    others.
    """
    environment = record.environment
    parts = [hardware(record), f"host {environment.get('host', 'unknown')}"]
    if record.cell.hosts:
        parts = [f"hosts {machine}"]
    driver = environment.get("gpu", {}).get("driver")
    if driver:
        parts.append(f"driver {driver}")
    if "torch" in environment.get("versions", {}):
        parts.append(f"torch {environment['versions']['torch']}")
    return ", ".join(parts)


class Machines:
    """Tells machines apart and names them: one name for one host, as long as no GPU id stands for
    two GPUs or two models.

    Cells with hosts name these as others name GPUs: all hosts of such cells are one machine, `a+b`,
    as long as no GPU of a host stands for two. So a host alone may be the baseline of several.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        machines: list[_Machine] = []
        self._of: dict[int, _Machine] = {}  # by id(): copies of one record may lie in two folders
        for record in records:
            host = record.environment.get("host", "unknown host")
            if record.cell.hosts:
                host = None
            gpus = identities_of(record)
            for machine in machines:
                # no GPU that both know is another one
                if machine.host == host and machine.gpus | gpus == gpus | machine.gpus:
                    break
            else:
                machine = _Machine(host, short_hardware(record))
                machines.append(machine)
            machine.gpus.update(gpus)
            if host is None:
                for name, facts in facts_of_hosts(record).items():
                    of_host = machine.sweeps[name]
                    of_host.setdefault(record.sweep_id, (record.started_at, facts))
            self._of[id(record)] = machine
        kinds: Counter[tuple[str, str]] = Counter()
        hosts: Counter[str] = Counter()
        for machine in machines:
            machine.name = compress_hosts(sorted(machine.sweeps))
            if machine.host is not None:
                machine.name = machine.host
            hosts[machine.name] += 1
            kinds[machine.name, machine.hardware] += 1
        names: Counter[str] = Counter()
        for machine in machines:
            host = machine.name
            if hosts[host] > 1:
                each = " each" if len(machine.sweeps) > 1 else ""
                machine.name = f"{machine.hardware}{each} on {host}"
            gpu = first_gpu(machine.gpus)
            if kinds[host, machine.hardware] > 1 and gpu:
                machine.name += f" · {gpu}"
            names[machine.name] += 1
            if names[machine.name] > 1:  # no fact that a record keeps tells them apart
                machine.name += f" ({names[machine.name]})"

    def name(self, record: Record) -> str:
        """Return `vm`, or `4 × H200 on vm` where another machine has the same host name.

        `a+b` where cells have hosts. Where another has the same hardware too, the first GPU tells
        them apart: `4 × H200 on vm · GPU-2f2c1b07`.
        """
        return self._of[id(record)].name

    def of_every_host(self, record: Record, value_of: Callable[[Facts], str]) -> str:
        """Return a value of a record's host by its facts; where cells have hosts, that of all hosts
        of its machine.

        A record on one of several hosts says nothing of the others: for them others of its sweep
        do, else of the sweep nearest to it. So a host alone and all hosts together say the same as
        long as nothing changed. Hosts that differ are named: `driver 550.1 (a), 560.2 (b)`.
        """
        facts, all_sweeps = facts_of_hosts(record), self._of[id(record)].sweeps

        def distance(sweep: str) -> tuple[bool, float]:
            return sweep != record.sweep_id, abs(sweeps[sweep][0] - record.started_at)

        for host in all_sweeps.keys() - facts.keys():
            sweeps = all_sweeps[host]
            facts[host] = sweeps[min(sweeps, key=distance)][1]
        values = {host: value_of(of_host) for host, of_host in facts.items()}
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        parts = [f"{value or 'not known'} ({host})" for host, value in sorted(values.items())]
        return ", ".join(parts)


@dataclass
class _Machine:
    """A machine while its records are collected; `host` is None where cells have hosts."""

    host: str | None
    hardware: str  # of its first record
    # identities_of of all records, and {host: {sweep: when, and its facts}}.
    gpus: dict[tuple[str, Member], str] = field(default_factory=dict)
    sweeps: dict[str, dict[str, tuple[float, Facts]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    name: str = ""


def first_gpu(identities: Mapping[tuple[str, Member], str]) -> str:
    """Return the beginning of the UUID of a machine's first GPU, `GPU-2f2c1b07`, if known."""
    for (what, _), value in sorted(identities.items()):
        if what == "uuid":
            return value[:UUID_LENGTH]
    return ""


def identities_of(record: Record) -> dict[tuple[str, Member], str]:
    """Return {("uuid", GPU): UUID, ("name", GPU): model} as far as a record knows them; ranks know
    their own GPU best.
    """
    identities: dict[tuple[str, Member], str] = {}
    for host, facts in facts_of_hosts(record).items():
        for gpu in gpus_of(facts):
            if "id" not in gpu:
                continue
            member: Member = gpu["id"]
            if host:
                member = f"{host}:{member}"
            for what in ("uuid", "name"):
                if what in gpu:
                    identities[what, member] = str(gpu[what])
    members = record.cell.members
    planned = record.environment.get("planned_uuids") or ()
    for member, uuid in zip(members, planned, strict=False):
        identities["uuid", member] = str(uuid)
    for rank in record.ranks:
        if "name" in rank and rank["rank"] < len(members):
            identities["name", members[rank["rank"]]] = str(rank["name"])
    return identities


def gpu_models(record: Record) -> list[str]:
    """Return the models of a cell's GPUs, each once; empty where nothing says."""
    names = identities_of(record)
    models = [names.get(("name", gpu)) for gpu in record.cell.members]
    return [model for model in dict.fromkeys(models) if model is not None]


def _cpu(facts: Facts) -> str:
    cpu = facts.get("cpu", {})
    parts = [cpu.get("model")]
    if "cores" in cpu:
        parts.append(f"{cpu['cores']} cores")
    return ", ".join(filter(None, parts))


def _threads(record: Record) -> str:
    counts = [rank["threads"] for rank in record.ranks if "threads" in rank]
    threads = record.environment.get("variables", {}).get("OMP_NUM_THREADS")
    if not counts or threads is None:
        return ""
    names = record.environment.get(INHERITED)
    cores = record.environment.get("cpu", {}).get("cores")
    if names is not None:
        is_ours = "OMP_NUM_THREADS" not in names
    else:  # an earlier Ringside did not note it; what it set itself on GPUs follows from the cores
        is_ours = record.cell.device == "cpu"
        is_ours = is_ours or bool(cores and threads == str(max(1, cores // (2 * len(counts)))))
    if is_ours and threads == str(counts[0]):
        return SHARE
    return str(counts[0])


def _measuring_code(record: Record) -> str:
    """Return the hash of the code that measured; of records of before it was noted, the commit."""
    code = record.environment.get("code")
    if code:
        return f"code {code}"
    commit = record.environment.get("git", {}).get("commit")
    if not commit:
        return ""
    return f"commit {commit[:12]}"


class Fact(NamedTuple):
    """One fact of a record's provenance: a version, or what a function reads."""

    version: str = ""  # its name among the versions of the environment
    parts: int | None = None  # how many parts of the version count; None: all
    of_record: Callable[[Record], str] | None = None
    of_host: Callable[[Facts], str] | None = None  # of every host of the machine
    of_gpus: bool = False  # it says nothing of CPU workers
    # Whether a record must have it as it is here to answer what is asked again. The machine is
    # worded apart, threads follow from the cores, and users decide on other measuring code.
    must_match: bool = True


PROVENANCE: Mapping[str, Fact] = {
    "machine": Fact(must_match=False),  # Machines.name
    "driver": Fact(of_host=lambda facts: facts.get("gpu", {}).get("driver") or "", of_gpus=True),
    "torch": Fact("torch"),
    "CUDA": Fact("cuda", of_gpus=True),
    "NCCL": Fact("nccl", of_gpus=True),
    "cuDNN": Fact("cudnn", of_gpus=True),
    "Python": Fact("python", parts=2),
    "CPU": Fact(of_host=_cpu),
    "threads": Fact(of_record=_threads, must_match=False),
    "Ringside": Fact(of_record=_measuring_code, must_match=False),
    CONNECTIONS: Fact(must_match=False),  # Study.of
}


def provenance(record: Record, machines: Machines) -> dict[str, str]:
    """Return every fact of PROVENANCE, then the variables of `inherited` but those of a host."""
    origin = dict.fromkeys(PROVENANCE, "")
    versions = record.environment.get("versions", {})
    for name, fact in PROVENANCE.items():
        if fact.of_gpus and record.cell.device != "cuda":
            continue
        if fact.version:
            version = versions.get(fact.version) or ""
            origin[name] = ".".join(version.split(".")[: fact.parts])
        elif fact.of_record is not None:
            origin[name] = fact.of_record(record)
        elif fact.of_host is not None:
            origin[name] = machines.of_every_host(record, fact.of_host)
    origin["machine"] = machines.name(record)
    origin |= inherited(record)
    for name in OF_A_HOST:
        origin.pop(name, None)
    return origin


def inherited(record: Record, unused: bool = False) -> dict[str, str]:
    """Return the variables that may change results and that came from around the launcher.

    `unused`: those of GPUs too where the cell ran on CPU workers.
    """
    inherited_names = record.environment.get(INHERITED)  # an earlier Ringside did not note it
    irrelevant: tuple[str, ...] = ()
    if record.cell.device != "cuda" and not unused:
        irrelevant = OF_GPUS
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
    kept: dict[str, str] = record.environment.get("variables", {})
    return kept


def worded(value: str | None) -> str:
    """Return a value of a provenance for people; None where a variable was not set."""
    if value is None:
        return "unset"
    return value or "not known"


def connections(record: Record) -> str:
    """Return how NCCL connected the ranks, and the settings that it announced and nobody asked for.

    '' where its log is missing, or does not show the connections of several ranks.
    """
    transport, nccl = record.effective.get("transport"), record.effective.get("nccl", {})
    if record.cell.world_size > 1 and not transport:
        return ""
    parts = [transport or ""]
    channels = record.effective.get("channels", nccl.get("channels", {}).get("collective"))
    if channels is not None:
        parts.append(f"{channels} channels")
    for name, value in sorted(nccl.get("settings", {}).items()):
        if name not in record.cell.nccl:
            parts.append(f"{name}={value}")
    return ", ".join(filter(None, parts))
