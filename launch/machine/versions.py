"""What `python launch.py --version` prints: Ringside and what it runs on. Without torch, whose import takes seconds."""

import importlib.metadata
import platform
import re
from pathlib import Path

from benchmarks.record import SCHEMA_VERSION
from launch.machine.facts import facts

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
