"""The facts of machine and software that a record keeps: host, CPU, GPUs, links, packages, commit, variables. Without torch."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from analysis.errors import UnreadableInput
from analysis.topology.readers import read_topology
from benchmarks.agent.network import interfaces
from benchmarks.record import SCHEMA_VERSION
from benchmarks.record.encoding import encoded
from benchmarks.record.safe_text import one_line
from conf import nccl
from conf.host_limits import free_memory, free_shared_memory, usable_cores
from conf.options import Refused
from launch.machine.devices import look, nvml_text, too_small, torch_version
from launch.machine.secrets import configuration_without_secrets, is_secret, names_of_secrets

# Environment variables that can change a result. Nothing else of the environment is kept: it holds secrets.
RECORDED = ("NCCL_", "CUDA_VISIBLE", "CUDA_DEVICE_", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_", "CUDA_SCALE_", "CUDA_MPS_",
            "CUDA_AUTO_BOOST", "CUDA_FORCE_", "CUDA_DISABLE_", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS_", "DNNL_", "ONEDNN_",
            "ATEN_CPU_", "MALLOC_", "LD_PRELOAD", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "GLOO_", "SHARP_",
            "NVSHMEM_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "SLURM_JOB_ID")  # fmt: skip
# The code that ranks run, and that computes numbers from what they wrote.
MEASURING = ("benchmarks", "trainers")
ROOT = Path(__file__).parent.parent.parent
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    """Return the facts of machine and software; a part that cannot be read is absent."""
    memory = psutil.virtual_memory().total
    known: dict[str, Any] = {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": usable_cores(),
            "logical": os.cpu_count(),
            "memory_bytes": memory,
        },
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None,
        "packages": {
            name: _version(name)
            for name in ("torch", "torchvision", "timm", "hydra-core", "mlflow-skinny", "numpy")
        },
        "git": _git(),
        "code": measuring_code(),
        "nccl_conf": configuration_without_secrets(_read("/etc/nccl.conf") or ""),
    }
    known["gpu"] = _gpu_facts()
    known["topology"] = _output(["nvidia-smi", "topo", "-m"])
    known["links"] = _links() if known["gpu"] else None
    return {name: value for name, value in known.items() if value not in (None, {}, "")}


def nccl_configuration(surrounding: Mapping[str, str]) -> list[str]:
    """Return the texts of NCCL's configuration files here, the user's first, as NCCL reads them (initEnvFunc, param.cc)."""
    user = surrounding.get("NCCL_CONF_FILE") or _users_own()
    return [text for path in (user, "/etc/nccl.conf") if (text := _read(path)) is not None]


def _users_own() -> str:
    """Return the path of ~/.nccl.conf. NCCL takes the home that the system knows of the user, whatever HOME says."""
    try:
        return f"{pwd.getpwuid(os.getuid()).pw_dir}/.nccl.conf"
    except KeyError:  # it knows no such user: NCCL reads none
        return ""


def _links() -> dict[str, str] | None:
    """Return {"0-1": "NV18"} for every pair of GPUs of this machine, as the driver has it."""
    try:
        links: dict[str, str] = read_topology(None).to_json()["links"]
    except UnreadableInput:
        return None
    return links


def boot_id() -> str:
    """Return what the kernel of this machine calls its own start, the same in all its containers; empty where it does not say."""
    return (_read(str(BOOT_ID)) or "").strip()


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a record keeps; none whose name or value looks like a secret."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(RECORDED) and not is_secret(name, value)
    }


def left_out(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that a record would keep and does not, because they look like secrets."""
    return names_of_secrets(environment, RECORDED)


def measuring_code() -> str:
    """Return a hash of the code that measures: 12 hexadecimal digits, equal for equal files whatever the commit."""
    found = hashlib.sha256()
    for path in sorted(path for part in MEASURING for path in (ROOT / part).rglob("*.py")):
        found.update(
            f"{path.relative_to(ROOT).as_posix()}\0{path.stat().st_size}\0".encode()
            + path.read_bytes()
        )
    return found.hexdigest()[:12]


def _gpu_facts() -> dict[str, Any]:
    """Return driver and GPUs; what the driver does not say is absent."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}

    def answer(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            value = question(*arguments)
        except pynvml.NVMLError:
            return None
        return nvml_text(value) if isinstance(value, bytes) else value

    gpus = []
    for number in range(answer(pynvml.nvmlDeviceGetCount) or 0):
        handle = answer(pynvml.nvmlDeviceGetHandleByIndex, number)
        if handle is None:
            continue
        memory, pci = (
            answer(pynvml.nvmlDeviceGetMemoryInfo, handle),
            answer(pynvml.nvmlDeviceGetPciInfo, handle),
        )
        answers = {
            "uuid": answer(pynvml.nvmlDeviceGetUUID, handle),
            "name": answer(pynvml.nvmlDeviceGetName, handle),
            "bus_id": nvml_text(pci.busId).lower() if pci else None,
            "memory_bytes": int(memory.total) if memory else None,
            "max_sm_mhz": answer(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "max_memory_mhz": answer(
                pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM
            ),
            "nvlinks": _nvlinks(pynvml, handle),
        }
        gpus.append(
            {"id": number, **{name: value for name, value in answers.items() if value is not None}}
        )
    return {"driver": answer(pynvml.nvmlSystemGetDriverVersion), "gpus": gpus}


def _nvlinks(pynvml: Any, handle: Any) -> int:
    """Return the number of active NVLinks of a GPU; 0 if it has none."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError:
            break
    return active


def _cpu_model() -> str:
    text = _read("/proc/cpuinfo") or ""
    return next(
        (
            line.split(":", 1)[1].strip()
            for line in text.splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )


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
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=20, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout


# Describe the host that this runs on, as one JSON object that the launcher of a sweep reads (launch.machine.fleet).


FORM = 1  # of the description: an agent of another Ringside is told by it
INFINIBAND = Path("/sys/class/infiniband")


def description(device: str, surrounding: Mapping[str, str]) -> dict[str, Any]:
    """Return what a launcher must know of this host, as plain JSON types; {"refused": …} where `device=` cannot be had here."""
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
        "variables": variables(surrounding),
        "left_out": left_out(surrounding),
        "versions": {name: value for name, value in versions.items() if value},
        "kernel": platform.release(),
        "boot_id": boot_id(),
        "interfaces": [one.to_dict() for one in interfaces()],
        "infiniband": infiniband(),
        "free_memory_bytes": free_memory(),
        "shared_memory_bytes": free_shared_memory(),
        "too_small": too_small(),
    }


def infiniband(folder: Path = INFINIBAND) -> list[dict[str, str]]:
    """Return {"device", "port", "rate", "state"} of every InfiniBand port of this host, as the kernel has it."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        texts = {name: _text(port / name) for name in ("rate", "state")}
        found.append({"device": port.parent.parent.name, "port": port.name, **texts})
    return found


def _text(path: Path) -> str:
    try:
        return one_line(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    """Print the description. Returns the exit status."""
    if len(arguments) != 1 or arguments[0] not in ("auto", "cpu", "cuda"):
        print("usage: python -m launch.machine.facts auto|cpu|cuda", file=sys.stderr)
        return 2
    sys.stdout.buffer.write(encoded(description(arguments[0], os.environ)))
    return 0


# What `python launch.py --version` prints: Ringside and what it runs on. Without torch, whose import takes seconds.


PYPROJECT = Path(__file__).parent.parent.parent / "pyproject.toml"
# The package that brings NCCL, by the version of CUDA that torch was built for; the newest first.
NCCL_PACKAGES = ("nvidia-nccl-cu14", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
ABSENT = "not found"


def version_lines() -> list[str]:
    """Return one line for each: Ringside, its commit, the schema of its records, Python, torch, NCCL, the driver."""
    known = facts()
    git = known.get("git", {})
    commit = git.get("commit", ABSENT) + (" with changes" if git.get("modified") else "")
    return [
        f"Ringside       {_ringside()}",
        f"commit         {commit}",
        f"record schema  {SCHEMA_VERSION}",
        f"Python         {platform.python_version()}",
        f"torch          {_installed('torch') or ABSENT}",
        f"NCCL           {nccl_version() or ABSENT}",
        f"NVIDIA driver  {known.get('gpu', {}).get('driver') or ABSENT}",
    ]


def nccl_version() -> str | None:
    """Return the version of the package that brings NCCL; None without one."""
    return next((found for name in NCCL_PACKAGES if (found := _installed(name))), None)


def _ringside() -> str:
    """Return the version of this source tree; of an installation without one, that of the package."""
    if PYPROJECT.exists():
        found = re.search(r'^version = "(.+)"', PYPROJECT.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return _installed("ringside") or ABSENT


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
