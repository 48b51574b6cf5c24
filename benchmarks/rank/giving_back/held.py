"""What a rank still holds after a cell, and what of it goes beyond the limits, in words for people."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.rank.giving_back import memory, process
from conf.variables import SHARED_MEMORY_FOLDER, TOKEN, shared_memory_prefix

MOST_BYTES = 64 << 20  # of memory for tensors beyond the pool's first idle moment
WORKSPACE_BYTES = 65 << 20  # that libraries take in torch's memory of a GPU and may keep: 65 MB on an H200
# A GPU and the host load the code of libraries as it is first used, for another model or for the first compiled one: these
# find a communicator that is not given back, or memory of a C library that grows from cell to cell.
MOST_BYTES_OF_OTHERS = 256 << 20
MOST_RESIDENT_BYTES = 1 << 30
# What libraries start when they first need it, in whichever cell: torch's profiler a thread; on GPUs NCCL's RAS listens and
# connects to its neighbours (two listeners, a pipe and a few connections), torch's compiler talks to processes that compile.
SPARE_THREADS = 2
SPARE_DESCRIPTORS = 12
NAMED = 3  # things that a sentence names at most


@dataclass(frozen=True)
class Held:
    """What a process holds at one moment. None: it cannot be known here."""

    allocated_bytes: int  # of tensors
    reserved_bytes: int | None  # of the GPU, by torch's allocator
    used_bytes: int | None  # of the GPU, by anything, other processes too
    pinned_bytes: int | None
    rss_bytes: int
    threads: dict[str, int]  # by name
    python_threads: dict[int, str]  # names by the kernel's ids
    files: dict[int, str]  # what each open descriptor is
    shared_files: list[str]  # of this cell's token

    @staticmethod
    def now(device: torch.device, folder: Path | None = None) -> "Held":
        """Return what this process holds; files below `folder`, which the cell still writes, do not count."""
        return Held(
            memory.allocated_bytes(device),
            memory.reserved_bytes(device),
            memory.used_bytes(device),
            memory.pinned_bytes(device),
            process.resident_bytes(),
            dict(process.threads()),
            process.python_threads(),
            process.open_files(folder),
            process.shared_files(SHARED_MEMORY_FOLDER, shared_memory_prefix(os.environ.get(TOKEN, ""))),
        )

    def beyond(self, fresh: "Held", first_idle: "Held | None") -> list[str]:
        """Return what this rank kept, each as the end of a sentence ('kept 70 MB of GPU memory'); empty: it may measure on.

        `fresh` is what it held before its first cell, `first_idle` after it: what libraries set up once is in it. None: now.
        """
        idle = first_idle or self
        found = self._memory(fresh, idle)
        new_threads = [name for number, name in self.python_threads.items() if number not in fresh.python_threads]
        found += [f"left {_counted(new_threads, 'thread')} running"] if new_threads else []
        on_gpu = self.reserved_bytes is not None
        native = Counter(self.threads) - Counter(idle.threads)
        if native.total() > SPARE_THREADS and not new_threads:
            found.append(f"has {_counted(list(native.elements()), 'thread')} more than after its first cell")
        new = [what for number, what in self.files.items() if fresh.files.get(number) != what]
        paths = [what for what in new if what.startswith("/") and not _is_device(what)]
        found += [f"left {_counted(paths, 'file')} open"] if paths else []
        others = Counter(self._no_files()) - Counter(idle._no_files())
        if others.total() > (SPARE_DESCRIPTORS if on_gpu else 0):
            found.append(f"has {_counted(list(others.elements()), 'descriptor')} more than after its first cell")
        if self.shared_files:
            found.append(f"left {_counted(self.shared_files, 'file')} in {SHARED_MEMORY_FOLDER}")
        return found

    def _no_files(self) -> list[str]:
        """Return what descriptors are that are no files: sockets, pipes. CUDA opens devices and events as it needs them."""
        own = ("/dev/nvidia", "anon_inode") if self.reserved_bytes is not None else ()
        all_of_them = [what for what in self.files.values() if not what.startswith("/") or _is_device(what)]
        return [what for what in all_of_them if not what.startswith(own)]

    def _memory(self, fresh: "Held", idle: "Held") -> list[str]:
        on_gpu = self.reserved_bytes is not None
        reserved = (self.reserved_bytes or 0) - (idle.reserved_bytes or 0)
        # Against the fresh rank, so that a leak of the first cell is seen.
        tensors = self.allocated_bytes - fresh.allocated_bytes - (WORKSPACE_BYTES if on_gpu else 0)
        more = {
            "GPU memory" if on_gpu else "memory in tensors": max(tensors, reserved),
            "page-locked memory": (self.pinned_bytes or 0) - (idle.pinned_bytes or 0),
        }
        found = [f"kept {size / 1e6:.0f} MB of {kind}" for kind, size in more.items() if size > MOST_BYTES]
        others = (self.used_bytes or 0) - (idle.used_bytes or 0) - reserved
        if others > MOST_BYTES_OF_OTHERS:
            found.append(f"finds {others / 1e6:.0f} MB more of its GPU taken than after its first cell, not by torch")
        resident = self.rss_bytes - idle.rss_bytes
        if resident > MOST_RESIDENT_BYTES:
            found.append(f"occupies {resident / 1e6:.0f} MB more of the host's memory than after its first cell")
        return found


@dataclass(frozen=True)
class Left:
    """What a rank gave back and what it kept, as the line `given_back` says it."""

    held: Held
    changed: list[str]  # what the cell had changed that Ringside does not; it was set back
    kept: list[str]  # why this process may not measure on, each the end of a sentence

    def line(self) -> dict[str, Any]:
        """Return the fields of a line of Kind.GIVEN_BACK."""
        held = self.held
        return {
            "allocated_bytes": held.allocated_bytes,
            "reserved_bytes": held.reserved_bytes,
            "used_bytes": held.used_bytes,
            "pinned_bytes": held.pinned_bytes,
            "rss_bytes": held.rss_bytes,
            "threads": sum(held.threads.values()),
            "files": len(held.files),
            "changed": self.changed,
            "kept": self.kept,
        }


def _is_device(path: str) -> bool:
    return path.startswith("/dev/") and not path.startswith(f"{SHARED_MEMORY_FOLDER}/")


def _counted(names: list[str], what: str) -> str:
    """Return a number of things and the names of the first of them: '2 threads (a, b)'."""
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:NAMED]) + (", …" if len(distinct) > NAMED else "")
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"
