"""The facts of machine and software that a record keeps. Without torch."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import pwd
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from analysis.input_files import UnreadableInput
from analysis.topology.readers import read_topology
from benchmarks.agent.network import interfaces
from benchmarks.record import SCHEMA_VERSION
from benchmarks.record.encoding import encoded
from benchmarks.record.safe_text import one_line
from conf import nccl
from conf.host import free_memory, free_shared_memory, usable_cores
from conf.options import Refused
from conf.secrets import configuration_without_secrets, is_secret
from launch.machine.devices import look, read_gpu, too_small, torch_version

# Variables that can change a result. Nothing else of the environment is kept.
RECORDED = ("NCCL_", "CUDA_VISIBLE", "CUDA_DEVICE_", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_",
            "CUDA_SCALE_", "CUDA_MPS_", "CUDA_AUTO_BOOST", "CUDA_FORCE_", "CUDA_DISABLE_", "OMP_",
            "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "ATEN_CPU_", "MALLOC_",
            "LD_PRELOAD", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "GLOO_", "SHARP_",
            "NVSHMEM_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "SLURM_JOB_ID")  # fmt: skip
# The code that ranks run, and that computes numbers from what they wrote.
MEASURING = ("benchmarks", "trainers")
ROOT = Path(__file__).parent.parent.parent
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
INFINIBAND = Path("/sys/class/infiniband")
FORM = 1  # of a host's description: an agent of another Ringside is recognised by it
PACKAGES = ("torch", "torchvision", "timm", "hydra-core", "mlflow-skinny", "numpy")
# The package that brings NCCL, by the version of CUDA that torch was built for; the newest first.
NCCL_PACKAGES = ("nvidia-nccl-cu14", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
ABSENT = "not found"


@functools.lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """Return the facts of machine and software; a part that cannot be read is absent."""
    memory = psutil.virtual_memory().total
    model = re.search(r"^model name\s*: *(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    all_facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": {
            "model": model[1].strip() if model else platform.machine(),
            "cores": usable_cores(),
            "logical": os.cpu_count(),
            "memory_bytes": memory,
        },
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "packages": {name: _version(name) for name in PACKAGES},
        "git": _git(),
        "code": measuring_code(),
        "nccl_conf": configuration_without_secrets(_read("/etc/nccl.conf") or ""),
        "gpu": _gpu_facts(),
        "topology": _output(["nvidia-smi", "topo", "-m"]),
    }
    if all_facts["gpu"]:
        with contextlib.suppress(UnreadableInput):  # {"0-1": "NV18"} for every pair of GPUs
            all_facts["links"] = read_topology(None).to_json()["links"]
    return _known_values(all_facts)


def _known_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {}, "")}


def nccl_configuration(surrounding: Mapping[str, str]) -> list[str]:
    """Return the texts of NCCL's configuration files, the user's first (initEnvFunc, param.cc)."""
    path = surrounding.get("NCCL_CONF_FILE", "")
    if not path:
        # NCCL takes the home that the system knows of the user, whatever HOME says.
        with contextlib.suppress(KeyError):  # of no such user NCCL reads none
            path = f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf"
    texts = [_read(path), _read("/etc/nccl.conf")]
    return [text for text in texts if text is not None]


def boot_id() -> str:
    """Return what the kernel calls its own start, the same in all containers; '' if unknown."""
    return (_read(str(BOOT_ID)) or "").strip()


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a record keeps, without secrets."""
    recorded = {}
    for name, value in sorted(environment.items()):
        if name.startswith(RECORDED) and not is_secret(name, value):
            recorded[name] = value
    return recorded


def left_out(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that a record leaves out, because they look like secrets."""
    names = []
    for name, value in sorted(environment.items()):
        if name.startswith(RECORDED) and is_secret(name, value):
            names.append(name)
    return names


def measuring_code() -> str:
    """Return a hash of the code that measures: 12 hexadecimal digits."""
    paths: list[Path] = []
    for package in MEASURING:
        paths += (ROOT / package).rglob("*.py")
    digest = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(ROOT).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu_facts() -> dict[str, Any]:
    """Return driver and GPUs; what the driver does not say is absent."""
    import pynvml

    def answer(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    gpus = []
    for index in range(answer("nvmlDeviceGetCount") or 0):
        try:
            device = read_gpu(index)
        except pynvml.NVMLError:
            continue
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        nvlinks = 0  # that are active
        for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
            nvlinks += int(answer("nvmlDeviceGetNvLinkState", handle, link) or 0)
        gpu = {
            "id": index,
            "uuid": device.uuid,
            "name": device.name,
            "bus_id": device.bus_id,
            "memory_bytes": device.memory_bytes,
            "max_sm_mhz": answer("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_SM),
            "max_memory_mhz": answer("nvmlDeviceGetMaxClockInfo", handle, pynvml.NVML_CLOCK_MEM),
            "nvlinks": nvlinks,
        }
        gpus.append(_known_values(gpu))
    return {"driver": answer("nvmlSystemGetDriverVersion"), "gpus": gpus}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _git() -> dict[str, Any] | None:
    root = str(ROOT)
    commit = _output(["git", "-C", root, "rev-parse", "HEAD"])
    if not commit:
        return None
    # Without locks: a look at the checkout writes nothing into it.
    status = _output(["git", "--no-optional-locks", "-C", root, "status", "--porcelain", "-uno"])
    return {"commit": commit.strip(), "modified": bool(status)}


def _output(command: list[str]) -> str | None:
    """Return what a command prints; None if it is missing, fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout


def description(device: str, surrounding: Mapping[str, str]) -> dict[str, Any]:
    """Return what a launcher must know of this host, as JSON types (launch.machine.fleet.Host).

    It is {"refused": …} where `device=` cannot be had here.
    """
    surrounding = nccl.with_configuration_files(surrounding, nccl_configuration(surrounding))
    try:
        machine = look(device, surrounding)
    except Refused as error:
        return {"form": FORM, "refused": str(error)}
    versions = {
        "python": platform.python_version(),
        "torch": torch_version(),
        "nccl": nccl_version() or "",
    }
    return {
        "form": FORM,
        "machine": dataclasses.asdict(machine),
        "facts": facts(),
        "variables": recorded_variables(surrounding),
        "left_out": left_out(surrounding),
        "versions": _known_values(versions),
        "kernel": platform.release(),
        "boot_id": boot_id(),
        "interfaces": [interface.to_dict() for interface in interfaces()],
        "infiniband": infiniband(),
        "free_memory_bytes": free_memory(),
        "shared_memory_bytes": free_shared_memory(),
        "too_small": too_small(),
    }


def infiniband(folder: Path = INFINIBAND) -> list[dict[str, str]]:
    """Return {"device", "port", "rate", "state"} of every InfiniBand port of this host."""
    ports = []
    for port in sorted(folder.glob("*/ports/*")):
        texts = {"device": port.parent.parent.name, "port": port.name}
        for name in ("rate", "state"):
            texts[name] = one_line((_read(str(port / name)) or "").strip())
        ports.append(texts)
    return ports


def version_lines() -> list[str]:
    """Return a line each for Ringside, its commit, the schema, Python, torch, NCCL, the driver."""
    git = facts().get("git", {})
    commit = git.get("commit", ABSENT)
    if git.get("modified"):
        commit += " with changes"
    project = _read(str(ROOT / "pyproject.toml")) or ""
    version = re.search(r'^version = "(.+)"', project, re.MULTILINE)
    ringside = version[1] if version else _version("ringside")
    return [
        f"Ringside       {ringside or ABSENT}",
        f"commit         {commit}",
        f"record schema  {SCHEMA_VERSION}",
        f"Python         {platform.python_version()}",
        f"torch          {_version('torch') or ABSENT}",
        f"NCCL           {nccl_version() or ABSENT}",
        f"NVIDIA driver  {facts().get('gpu', {}).get('driver') or ABSENT}",
    ]


def nccl_version() -> str | None:
    """Return the version of the package that brings NCCL; None without one."""
    for name in NCCL_PACKAGES:
        version = _version(name)
        if version:
            return version
    return None


if __name__ == "__main__":
    sys.stdout.buffer.write(encoded(description(sys.argv[1], os.environ)))
