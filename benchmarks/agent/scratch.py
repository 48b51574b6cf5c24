"""The folder to which ranks write on another host than the launcher's, and what is new in it.

The launcher appends what it is sent to the cell's folder, so hosts need no shared file system.
"""

import base64
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.agent.protocol import CHUNK_BYTES, MOST_BYTES
from benchmarks.record import CellFolder, safe_files
from benchmarks.record.encoding import decoded, encoded

PREFIX = "ringside-"
# What ranks, their agent and the sampler write; a launcher takes nothing else. The number is that
# of the rank.
HANDED_ON = re.compile(
    r"(?:ranks/|logs/rank|rank)(\d{1,6})\.(?:jsonl|count|log|json\.gz)|logs/agent\.log|"
    r"nccl/(?!\.)[A-Za-z0-9_.-]{1,200}|(?:gpus|cpu)\.jsonl|output\.txt"
)
MOST_FILES = 2000  # of a cell on one host
# Held by the agent while it lives: a folder without its agent is removed by the next one.
LOCK = ".agent"
MOST_WHOLE = MOST_BYTES // 2  # of a file in one message, as base64
# Files that are written again instead of growing.
REPLACED = (".count", "output.txt")
FULL_BYTES = 64 << 10  # less is no room on a disk: a rank's line may be larger


class Scratch:
    """The folder of one cell on this host."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder, self._lock = folder, lock
        # How ranks ended: in memory that the cell's process shares, as the disk may be full.
        self._ends = os.memfd_create("rank-ends")
        self._sent: dict[str, int] = {}  # bytes of each file
        # Inode and time of change of each file that is replaced.
        self._seen: dict[str, tuple[int, int]] = {}

    @staticmethod
    def make(token: str, files: Mapping[str, str]) -> "Scratch":
        """Make the folder with the files that ranks read, by their names in it. Raises OSError."""
        # With the process id, as hosts may share a folder.
        folder = Path(tempfile.gettempdir()).resolve() / f"{PREFIX}{token}-{os.getpid()}"
        folder.mkdir(mode=0o700)  # new: nobody else's
        try:
            scratch = Scratch(folder, safe_files.open_own(folder / LOCK))
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            fcntl.flock(scratch._lock, fcntl.LOCK_EX)
            CellFolder(folder).make()
            for name, text in files.items():
                safe_files.write_whole(folder / name, text.encode())
        except OSError:
            scratch.remove()
            raise
        for name in scratch._names():  # the launcher has these
            scratch._sent[name] = (folder / name).stat().st_size
        return scratch

    def changed_files(self) -> Iterator[dict[str, Any]]:
        """Yield what is new since the last call: {"name", "at", "data"} with bytes as base64.

        "at" is null for a whole file.
        """
        for name in self._names():
            with contextlib.suppress(FileNotFoundError):
                if not name.endswith(REPLACED):
                    yield from self._grown(name)
                    continue
                with safe_files.open_to_read(self.folder / name) as file:
                    status = os.fstat(file.fileno())
                    state = status.st_ino, status.st_mtime_ns
                    if self._seen.get(name) != state:
                        data = base64.b64encode(file.read(MOST_WHOLE)).decode()
                        yield {"name": name, "at": None, "data": data}
                        self._seen[name] = state

    def keep_ends(self, ends: Mapping[str, Any]) -> None:
        """Keep how ranks ended, by number, for `kept_ends` in the process that forked this one."""
        os.write(self._ends, encoded(ends))

    def kept_ends(self) -> dict[str, dict[str, Any]]:
        """Return what `keep_ends` was given; empty if it was not called."""
        ends: dict[str, dict[str, Any]] = decoded(os.pread(self._ends, MOST_BYTES, 0) or b"{}")
        return ends

    def remove(self) -> None:
        """Remove the folder."""
        os.close(self._ends)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _names(self) -> list[str]:
        names = []
        for path in self.folder.rglob("*"):
            if path.name.startswith(".") or path.is_symlink() or not path.is_file():
                continue
            name = path.relative_to(self.folder).as_posix()
            if HANDED_ON.fullmatch(name):
                names.append(name)
        return sorted(names)

    def _grown(self, name: str) -> Iterator[dict[str, Any]]:
        sent = self._sent.get(name, 0)
        with safe_files.open_to_read(self.folder / name) as file:
            file.seek(sent)
            while True:
                data = file.read(CHUNK_BYTES)
                if not data:
                    return
                yield {"name": name, "at": sent, "data": base64.b64encode(data).decode()}
                sent += len(data)
                self._sent[name] = sent


def is_full(folder: Path) -> bool:
    """Return whether there is no room left; False where it cannot be told."""
    try:
        system = os.statvfs(folder)
    except OSError:
        return False
    return system.f_bavail * system.f_frsize < FULL_BYTES


def remove_left() -> None:
    """Remove the folders of agents that ended without removing them (SIGKILL)."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if safe_files.take_lock(descriptor):
                    shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
