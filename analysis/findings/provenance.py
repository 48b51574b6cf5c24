"""Where a record was made: on which machine, with which software and variables. Records that differ in it are not compared.

A name of PROVENANCE is '' where the record does not say. Every variable that the ranks inherited is a further name; it is
absent where it was not set.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.record import Record

CONNECTIONS = "connections"  # set by Study.of where runs of one cell were connected in different ways
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
OF_GPUS = (
    "NCCL_",
    "NVSHMEM_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NVIDIA_",
    "PYTORCH_CUDA_",
)  # without effect on CPU workers
UUID_LENGTH = len("GPU-") + 8
# Variables that forbid NVLink multicast. Machines set them to stay safe, and every rank must have them.
SAFETY: Mapping[str, str] = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


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


def provenance(record: Record, machines: Machines) -> dict[str, str]:
    """Return the machine, the software and the variables of a record: every name of PROVENANCE, then those of `inherited`."""
    environment = record.environment
    versions, driver = mapping(environment.get("versions")), mapping(environment.get("gpu")).get("driver")
    on_gpus = record.cell.device == "cuda"
    known = {
        "machine": machines.name(record),
        "driver": driver if on_gpus else None,
        "torch": versions.get("torch"),
        "CUDA": versions.get("cuda"),
        "NCCL": versions.get("nccl") if on_gpus else None,
        "cuDNN": versions.get("cudnn") if on_gpus else None,
        "Python": ".".join(str(versions.get("python") or "").split(".")[:2]),
        "CPU": _cpu(record),
        "threads": _threads(record),
        "Ringside": _measuring_code(record),
        CONNECTIONS: None,
    }
    return {name: "" if value is None else str(value) for name, value in known.items()} | inherited(record)


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
    return {str(name): str(value) for name, value in mapping(record.environment.get("variables")).items()}


def worded(value: str | None) -> str:
    """Return a value of a provenance for people; None where a variable was not set."""
    return "unset" if value is None else value or "not known"


def _cpu(record: Record) -> str:
    cpu = mapping(record.environment.get("cpu"))
    cores = f"{cpu['cores']} cores" if "cores" in cpu else ""
    return ", ".join(part for part in (str(cpu.get("model") or ""), cores) if part)


def _threads(record: Record) -> str:
    """Return how many threads a rank has for its operators; SHARE where nothing but Ringside set that number."""
    counts = [one["threads"] for one in record.ranks if type(one.get("threads")) is int]
    asked = mapping(record.environment.get("variables")).get("OMP_NUM_THREADS")
    if not counts or asked is None:
        return ""
    names, cores = record.environment.get(INHERITED), mapping(record.environment.get("cpu")).get("cores")
    if isinstance(names, list):
        ours = "OMP_NUM_THREADS" not in names
    else:  # an earlier Ringside did not note it; what it set itself on GPUs follows from the cores
        of_rank = max(1, cores // (2 * len(counts))) if type(cores) is int else None
        ours = record.cell.device == "cpu" or asked == str(of_rank)
    return SHARE if ours and asked == str(counts[0]) else str(counts[0])


def _measuring_code(record: Record) -> str:
    """Return the hash of the code that measured; of records of before it was noted, the commit."""
    code, commit = record.environment.get("code"), mapping(record.environment.get("git")).get("commit")
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
    settings = {name: value for name, value in mapping(nccl.get("settings")).items() if name not in record.cell.nccl}
    parts = [str(effective.get("transport") or ""), "" if channels is None else f"{channels} channels"]
    parts += [f"{name}={value}" for name, value in sorted(settings.items())]
    return ", ".join(part for part in parts if part)


def mapping(value: object) -> Mapping[str, Any]:
    """Return a value if it is a mapping, else an empty one: a record's environment and tables may hold anything."""
    return value if isinstance(value, Mapping) else {}


def hardware(record: Record) -> str:
    """Return `4 × NVIDIA H200`, or the CPU that workers ran on: all GPUs of the machine, not only those of the subset."""
    gpus = mapping(record.environment.get("gpu")).get("gpus")
    if record.cell.device == "cuda" and isinstance(gpus, list) and gpus:
        kinds = Counter(str(mapping(gpu).get("name", "unknown GPU")) for gpu in gpus)
        return " + ".join(f"{count} × {name}" for name, count in sorted(kinds.items()))
    cpu = mapping(record.environment.get("cpu"))
    return f"CPU workers on {cpu.get('model') or 'an unknown CPU'}"


def short_hardware(record: Record) -> str:
    """Return `4 × H200`, or `CPU workers`, for names."""
    if record.cell.device != "cuda":
        return "CPU workers"
    found = hardware(record)
    return "GPUs" if found.startswith("CPU workers") else found.replace("NVIDIA ", "").replace("GeForce ", "")


def installation(record: Record) -> str:
    """Describe the machine and the software of a record in one line."""
    versions = mapping(record.environment.get("versions"))
    parts = [hardware(record), f"host {record.environment.get('host', 'unknown')}"]
    driver = mapping(record.environment.get("gpu")).get("driver")
    parts += [f"driver {driver}"] if driver else []
    parts += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(parts)
