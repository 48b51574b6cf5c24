"""The paths of a cell's folder. No other module names a file of it.

cell.json       what is asked of the ranks
attempt.json    who measures it, when, in which environment
record.json     the record of the newest attempt
ranks/N.jsonl   every sample of rank N; ranks/N.count is its number of iterations
logs/           what the agent and each rank printed
nccl/           NCCL's logs, and the empty nccl.conf that replaces the user's
gpus.jsonl      clocks, power and load of the GPUs; gpus-1.jsonl those of the second host of a cell, and so on
cpu.jsonl       load of the CPU, the cell's own and all; cpu-1.jsonl likewise
topology.txt    the machine's topology
failures.json   exit status and time of the ranks that ended first, not as they should
output.txt      what the benchmark prints
tuning/         the same for an untimed pass in which NCCL names its choices
profile/        the same for an untimed pass under a profiler
attempt-1/      an earlier attempt, whole

Raw files may be packed (`ranks/0.jsonl.gz`): they are named here by their plain paths, and read by raw_files.py.
"""

import fnmatch
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import own_files
from benchmarks.record.raw_files import PACKED, found, pack, sha256, stored


class LostSamples(NamedTuple):
    """Whether a file of samples of the GPUs, or of the CPU's load, is missing."""

    gpus: bool
    cpu: bool


@dataclass(frozen=True)
class CellFolder:
    """The folder of a cell, of one of its earlier attempts, or of an untimed pass inside it."""

    path: Path

    @property
    def cell(self) -> Path:
        """Return the path of what is asked."""
        return self.path / "cell.json"

    @property
    def attempt(self) -> Path:
        """Return the path of the facts of the attempt; it exists as soon as an attempt was begun."""
        return self.path / "attempt.json"

    @property
    def record(self) -> Path:
        """Return the path of the record; it exists once the attempt is closed."""
        return self.path / "record.json"

    @property
    def failures(self) -> Path:
        """Return the path of how and when the ranks ended that failed first: {rank: {status, time}}."""
        return self.path / "failures.json"

    @property
    def output(self) -> Path:
        """Return the path of what the benchmark prints."""
        return self.path / "output.txt"

    @property
    def topology(self) -> Path:
        """Return the path of the machine's topology."""
        return self.path / "topology.txt"

    @property
    def gpu_samples(self) -> Path:
        """Return the path of the samples of the GPUs, of several hosts those of the first."""
        return self.gpu_samples_of(0)

    @property
    def cpu_samples(self) -> Path:
        """Return the path of the samples of the CPU's load, of several hosts those of the first."""
        return self.cpu_samples_of(0)

    def gpu_samples_of(self, host: int) -> Path:
        """Return the path of the samples of the GPUs of a host; hosts are numbered as Cell.every_host has them."""
        return self.path / (f"gpus-{host}.jsonl" if host else "gpus.jsonl")

    def cpu_samples_of(self, host: int) -> Path:
        """Return the path of the samples of the CPU's load on a host."""
        return self.path / (f"cpu-{host}.jsonl" if host else "cpu.jsonl")

    def sampled_hosts(self) -> range:
        """Return the numbers of the hosts that may have samples, up to the highest that has some; 0 for one machine."""
        names = (path.name for pattern in OF_HOSTS for path in found(self.path, pattern))
        numbers = [int(number[1]) for name in names if (number := OF_HOST.fullmatch(name))]
        return range(max(numbers, default=0) + 1)

    def lost_samples(self, recorded: Iterable[str]) -> "LostSamples":
        """Return whether samples of one machine, or of a host whose file was recorded, are missing here."""
        of_hosts = [name for name in recorded if OF_HOST.fullmatch(name)]

        def lost(kind: str) -> bool:
            names = [f"{kind}.jsonl", *(name for name in of_hosts if name.startswith(kind))]
            return any(stored(self.path / name) is None for name in names)

        return LostSamples(lost("gpus"), lost("cpu"))

    def rank_lines(self, rank: int) -> Path:
        """Return the path of the lines of a rank; servers have the numbers behind the ranks."""
        return self.path / "ranks" / f"{rank}.jsonl"

    def all_rank_lines(self) -> list[Path]:
        """Return the paths of the lines of every rank that wrote some, by name."""
        return found(self.path, "ranks/*.jsonl")

    def rank_files_exist(self) -> bool:
        """Return whether the ranks left anything: a look at one folder, and none at its files."""
        return (self.path / "ranks").is_dir()

    def rank_count(self, rank: int) -> Path:
        """Return the path of a rank's number of iterations, which is always up to date."""
        return self.rank_lines(rank).with_suffix(".count")

    def rank_log(self, rank: int) -> Path:
        """Return the path of what a rank printed."""
        return self.path / "logs" / f"rank{rank}.log"

    @property
    def agent_log(self) -> Path:
        """Return the path of what the agent printed."""
        return self.path / "logs" / "agent.log"

    @property
    def nccl_log_pattern(self) -> str:
        """Return NCCL_DEBUG_FILE: NCCL puts the host's name and the process id into it."""
        return str(self.path / "nccl" / "%h.%p.log")

    def nccl_logs(self) -> list[Path]:
        """Return the paths of NCCL's logs, one for each process that used NCCL.

        Older ranks, which measured several cells, have one more, PID + ONCE: what NCCL had said there of the whole process.
        """
        return found(self.path, "nccl/*.log")

    @property
    def nccl_conf(self) -> Path:
        """Return the path of an empty file that stands in for the user's ~/.nccl.conf."""
        return self.path / "nccl" / "nccl.conf"

    @property
    def lock(self) -> Path:
        """Return the path of the file whose lock says who measures the cell."""
        return self.path / ".lock"

    @property
    def tuning(self) -> "CellFolder":
        """Return the folder of the untimed pass in which NCCL names its choices."""
        return CellFolder(self.path / "tuning")

    @property
    def profile(self) -> "CellFolder":
        """Return the folder of the untimed pass under a profiler."""
        return CellFolder(self.path / "profile")

    @property
    def profile_in_vain(self) -> "CellFolder":
        """Return the folder of a first profiled pass that brought no trace."""
        return CellFolder(self.path / "profile-capture-range")

    @property
    def timeline(self) -> Path:
        """Return the path of the drawing of one step, in the folder of a profiled pass."""
        return self.path / "timeline.svg"

    def raw_files(self) -> list[Path]:
        """Return the paths of what the record's values are derived from."""
        return [path for pattern in RAW for path in found(self.path, pattern)]

    def raw_sha256(self) -> dict[str, str]:
        """Return the SHA-256 of every raw file, by its path in this folder."""
        return {path.relative_to(self.path).as_posix(): sha256(path) for path in self.raw_files()}

    def pack(self) -> int:
        """Pack every file of samples. Return how many bytes that saved. Raises OSError; what could not be packed stays plain."""
        return sum(pack(path) for pattern in SAMPLES for path in found(self.path, pattern))

    def published(self) -> list[Path]:
        """Return the plain paths of what others need to check the record and to make the report again; links are left out.

        What ranks printed (logs) is not among them: a user's code may print anything.
        """
        paths = {path for pattern in (*RAW, *PUBLISHED) for path in found(self.path, pattern)}
        real = self.path.resolve()
        places = {
            path: place for path in paths if (place := stored(path)) is not None and place.is_file()
        }
        return sorted(
            path
            for path, place in places.items()
            if place.resolve() == real / place.relative_to(self.path)
        )

    def artifacts(self) -> list[Path]:
        """Return the regular files of this folder that go with its record; links are not followed."""
        files = {path for pattern in ARTIFACTS for path in self.path.glob(pattern)}
        real = self.path.resolve()
        return sorted(
            path
            for path in files
            if path.is_file() and path.resolve() == real / path.relative_to(self.path)
        )

    def make(self) -> "CellFolder":
        """Make the folders that ranks write to, and the empty nccl.conf. Returns this folder. Raises OSError."""
        own_files.make_folder(self.path)
        for part in ("ranks", "logs", "nccl"):
            (
                self.path / part
            ).mkdir()  # new: nothing of an earlier attempt is in it, and it is no link
        own_files.write_whole(self.nccl_conf, b"")
        return self

    def earlier_attempts(self) -> Iterator["CellFolder"]:
        """Yield the folders of earlier attempts."""
        for path in sorted(self.path.glob("attempt-*/")):
            yield CellFolder(path)

    def set_aside(self) -> None:
        """Move what an earlier attempt left into a folder of its own: nothing measured is lost.

        Raises:
            NotOurs: a part of it is a link.
            OSError: it cannot be moved.
        """
        aside = self.path / ASIDE
        there = sorted(self.path.iterdir()) if self.path.is_dir() else []
        left = [
            path for path in there if any(fnmatch.fnmatchcase(path.name, part) for part in PARTS)
        ]
        if not left and not os.path.lexists(aside):
            return
        for path in left:
            if path.is_symlink():
                raise own_files.NotOurs(path, "is a link")
        own_files.make_folder(aside)
        for path in left:
            path.rename(aside / path.name)
        numbered = (self.path / f"attempt-{number}" for number in itertools.count(1))
        aside.rename(next(path for path in numbered if not os.path.lexists(path)))


# Of every host of a cell.
ONCE = ".once.log"  # after the number of a process: what NCCL says once in it
OF_HOSTS = ("gpus.jsonl", "gpus-[0-9]*.jsonl", "cpu.jsonl", "cpu-[0-9]*.jsonl")
OF_HOST = re.compile(r"(?:gpus|cpu)-([1-9][0-9]{0,3})\.jsonl")
# What an attempt leaves in the folder.
PARTS = (
    "cell.json",
    "attempt.json",
    "failures.json",
    "topology.txt",
    *OF_HOSTS,
    *(f"{pattern}{PACKED}" for pattern in OF_HOSTS),
    "output.txt",
    "ranks",
    "logs",
    "nccl",
    "tuning",
    "profile",
    "profile-capture-range",
    "record.json",
)
# What the values of a record are derived from, by plain paths. Traces come from the profilers packed already.
SAMPLES = ("ranks/*.jsonl", *OF_HOSTS, "nccl/*.log", "tuning/nccl/*.log")
RAW = ("cell.json", "attempt.json", *SAMPLES, "profile/trace.sqlite", "profile/rank*.json")
# What the report and `verify` read besides.
PUBLISHED = ("record.json", "failures.json", "topology.txt", "profile/timeline.svg")
# What goes with the record of an attempt to where others read it.
ARTIFACTS = (
    "record.json",
    "failures.json",
    "topology.txt",
    "*.log",
    "logs/**/*",
    "ranks/*.jsonl",
    "nccl/*.log",
    *OF_HOSTS,
    # Never the report of nsys itself: it holds the environment of what it traced.
    "profile/trace.sqlite.gz",
    "profile/rank*.json.gz",
    "profile/timeline.svg",
    *(f"{pattern}{PACKED}" for pattern in SAMPLES),
)
# Where they are gathered before the folder gets its number: a launcher may die between two moves.
ASIDE = ".aside"


# MLflow's folder in an output_dir, beside the studies. It holds a copy of every record.
COPIES = "mlartifacts"


def record_paths(study: Path) -> list[Path]:
    """Return the paths of every record of a study, earlier attempts too; in an output_dir those of all its studies."""
    return sorted(
        path
        for path in study.glob("*/**/record.json")
        if COPIES not in path.relative_to(study).parts
    )
