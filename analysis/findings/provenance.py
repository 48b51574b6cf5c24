"""Where a record was made: on which machine, with which software and variables. Records that differ in it are not compared.

A name of PROVENANCE is '' where the record does not say. Every variable that the ranks inherited is a further name; it is
absent where it was not set.
"""

from collections.abc import Mapping
from typing import Any

from analysis.findings.machines.hosts import hardware, mapping
from analysis.findings.machines.identity import Machines
from benchmarks.record import Record

CONNECTIONS = "connections"  # set by Study.of where runs of one cell were connected in different ways
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
    from_around = {name: value for name, value in inherited(record).items() if name not in OF_A_HOST}
    return {name: "" if value is None else str(value) for name, value in known.items()} | from_around


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


def installation(record: Record, machine: str) -> str:
    """Describe the machine and the software of a record in one line; `machine` names all hosts where cells name hosts."""
    versions = mapping(record.environment.get("versions"))
    parts = [hardware(record), f"host {record.environment.get('host', 'unknown')}"]
    parts = [f"hosts {machine}"] if record.cell.hosts else parts  # a cell on one of them says nothing of the others
    driver = mapping(record.environment.get("gpu")).get("driver")
    parts += [f"driver {driver}"] if driver else []
    parts += [f"torch {versions['torch']}"] if "torch" in versions else []
    return ", ".join(parts)
