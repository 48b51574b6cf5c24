"""The files of a cell's folder: their names, raw files read plain or packed, and their SHA-256.

No other module names a file of a cell. A raw file `ranks/0.jsonl` may lie there as
`ranks/0.jsonl.gz`: every reader names it by its plain path. Its hash is that of the plain content,
so that packing changes no record.
"""

import contextlib
import fnmatch
import gzip
import hashlib
import itertools
import os
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from benchmarks.record import safe_files

PACKED = ".gz"
# What a file that is damaged raises when it is unpacked.
DAMAGED = (OSError, EOFError, zlib.error)
ABSENT, UNREADABLE = "absent", "unreadable"
CHUNK_BYTES = 1 << 20
# What the packed raw files of a cell may hold together: a small file may unpack to all memory.
# Values are counted by the commas, brackets and line ends. Plain files are read at any size.
MOST_UNPACKED_BYTES = 64 << 20
MOST_UNPACKED_VALUES = 4_000_000
MOST_TRACE_BYTES = 1 << 30
VALUE_MARKS = (b",", b"[", b"{", b"\n")

# Files with a fixed name, which are attributes of CellFolder.
FILES = {
    "cell": "cell.json",  # what is asked of the ranks
    "attempt": "attempt.json",  # who measures it, when, where; exists from the beginning on
    "record": "record.json",  # of the newest attempt, once it is closed
    "failures": "failures.json",  # {rank: {status, time}} of those that failed first
    "output": "output.txt",  # what the benchmark prints
    "topology": "topology.txt",  # of the machine
    "gpu_samples": "gpus.jsonl",  # clocks, power and load of the GPUs, of the first host
    "cpu_samples": "cpu.jsonl",  # load of the CPU, the cell's own and all
    "agent_log": "logs/agent.log",  # what the agent printed
    "nccl_conf": "nccl/nccl.conf",  # empty, stands in for the user's ~/.nccl.conf
    "lock": ".lock",  # its lock says who measures the cell
    "timeline": "timeline.svg",  # one step, in the folder of a profiled pass
}
# Folders of untimed passes with the same files: NCCL names its choices, a profiler.
TUNING, PROFILE = "tuning", "profile"

# Samples of every host of a cell; the first has no number.
OF_HOSTS = ("gpus.jsonl", "gpus-[0-9]*.jsonl", "cpu.jsonl", "cpu-[0-9]*.jsonl")
OF_HOST = re.compile(r"(?:gpus|cpu)-([1-9][0-9]{0,3})\.jsonl")
ONCE = ".once.log"  # after the number of a process: what NCCL says once in it
# What the values of a record are derived from, by plain paths. Traces come packed already.
SAMPLES = ("ranks/*.jsonl", *OF_HOSTS, "nccl/*.log", "tuning/nccl/*.log")
RAW_SINCE_7 = ("topology.txt", "ranks/*.count")  # records of an older schema have no hash of them
RAW = (
    *("cell.json", "attempt.json", *SAMPLES),
    *("profile/trace.sqlite", "profile/rank*.json", *RAW_SINCE_7),
)
# What the report and `verify` read besides.
PUBLISHED = ("record.json", "failures.json", "profile/timeline.svg")
# What goes with the record of an attempt to where it is read. Never the report of nsys itself: it
# holds the environment of what it traced.
ARTIFACTS = (
    *PUBLISHED,
    "topology.txt",
    *("*.log", "logs/**/*", "ranks/*.jsonl", "nccl/*.log", *OF_HOSTS),
    *("profile/trace.sqlite.gz", "profile/rank*.json.gz"),
    *(f"{pattern}{PACKED}" for pattern in SAMPLES),
)
# What an attempt leaves in the folder.
PARTS = (
    *("cell.json", "attempt.json", "record.json", "failures.json", "topology.txt", "output.txt"),
    *("ranks", "logs", "nccl", TUNING, PROFILE),
    *OF_HOSTS,
    *(f"{pattern}{PACKED}" for pattern in OF_HOSTS),
)
PART = re.compile("|".join(map(fnmatch.translate, PARTS)))
# Where they are gathered before the folder gets its number: a launcher may die between two moves.
ASIDE = ".aside"
# MLflow's folder in an output_dir, beside the studies. It holds a copy of every record.
COPIES = "mlartifacts"


class TooLarge(ValueError):
    """Packed files hold more than is unpacked; the message names the file and the limit."""


class CellFolder:
    """The folder of a cell, of one of its earlier attempts, or of an untimed pass inside it."""

    cell: Path
    attempt: Path
    record: Path
    failures: Path
    output: Path
    topology: Path
    gpu_samples: Path
    cpu_samples: Path
    agent_log: Path
    nccl_conf: Path
    lock: Path
    timeline: Path

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getattr__(self, attribute: str) -> Path:
        """Return the path of one of FILES."""
        if attribute not in FILES:
            raise AttributeError(attribute)
        return self.path / FILES[attribute]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CellFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def tuning(self) -> "CellFolder":
        """The pass in which NCCL names its choices."""
        return CellFolder(self.path / TUNING)

    @property
    def profile(self) -> "CellFolder":
        """The pass under a profiler."""
        return CellFolder(self.path / PROFILE)

    def samples_of(self, what: str, host: int) -> Path:
        """Return the path of the samples of `gpus` or `cpu` on a host of Cell.every_host."""
        if host:
            return self.path / f"{what}-{host}.jsonl"
        return self.path / f"{what}.jsonl"

    def rank_lines(self, rank: int) -> Path:
        """Return the path of the lines of a rank; servers have the numbers behind the ranks."""
        return self.path / "ranks" / f"{rank}.jsonl"

    def rank_count(self, rank: int) -> Path:
        """Return the path of a rank's number of iterations, which is always up to date."""
        return self.path / "ranks" / f"{rank}.count"

    def rank_log(self, rank: int) -> Path:
        """Return the path of what a rank printed."""
        return self.path / "logs" / f"rank{rank}.log"

    @property
    def nccl_log_pattern(self) -> str:
        """NCCL_DEBUG_FILE: NCCL puts the host's name and the process id into it."""
        return str(self.path / "nccl" / "%h.%p.log")

    def nccl_logs(self) -> list[Path]:
        """Return the paths of NCCL's logs, one for each process that used NCCL.

        Older ranks, which measured several cells, have one more, PID + ONCE: what NCCL had said
        there of the whole process.
        """
        return find_raw(self.path, "nccl/*.log")

    def all_rank_lines(self) -> list[Path]:
        """Return the paths of the lines of every rank that wrote some, by name."""
        return find_raw(self.path, "ranks/*.jsonl")

    def sampled_hosts(self) -> range:
        """Return the numbers of the hosts that may have samples; 0 for one machine."""
        last = 0
        for path in find_raw(self.path, *OF_HOSTS):
            match = OF_HOST.fullmatch(path.name)
            if match:
                last = max(last, int(match[1]))
        return range(1 + last)

    def lost_samples(self, recorded: Iterable[str]) -> tuple[bool, bool]:
        """Return whether samples of GPUs, and of CPUs, of a recorded host are missing here."""
        gpus, cpus = False, False
        for name in ("gpus.jsonl", "cpu.jsonl", *filter(OF_HOST.fullmatch, recorded)):
            if stored(self.path / name) is None:
                gpus |= name.startswith("gpus")
                cpus |= name.startswith("cpu")
        return gpus, cpus

    def raw_files(self) -> list[Path]:
        """Return the paths of what the record's values are derived from."""
        return find_raw(self.path, *RAW)

    def raw_sha256(self) -> dict[str, str]:
        """Return the SHA-256 of every raw file, by its path in this folder."""
        hashes = {}
        for path in self.raw_files():
            hashes[path.relative_to(self.path).as_posix()] = sha256(path)
        return hashes

    def refuse_too_large(self) -> None:
        """Refuse packed raw files that hold more than a cell's may. Raises TooLarge."""
        unpacked_bytes, values = 0, 0
        for path in self.raw_files():
            if path.exists():
                continue
            is_trace = path.parent.name == PROFILE
            trace_bytes = 0
            with contextlib.suppress(*DAMAGED), open_raw(path) as file:
                while chunk := file.read(CHUNK_BYTES):
                    if is_trace:
                        trace_bytes += len(chunk)
                    else:
                        unpacked_bytes += len(chunk)
                        values += sum(map(chunk.count, VALUE_MARKS))
                    limit = ""
                    if unpacked_bytes > MOST_UNPACKED_BYTES:
                        limit = f"{MOST_UNPACKED_BYTES >> 20} MiB"
                    elif trace_bytes > MOST_TRACE_BYTES:
                        limit = f"{MOST_TRACE_BYTES >> 20} MiB"
                    elif values > MOST_UNPACKED_VALUES:
                        limit = f"{MOST_UNPACKED_VALUES:,} values and lines"
                    if limit:
                        raise TooLarge(
                            f"{path.name}{PACKED}: with it the packed files of the cell hold more "
                            f"than {limit}; whoever trusts them unpacks them (gunzip)"
                        )

    def pack(self) -> int:
        """Pack every file of samples. Return how many bytes that saved.

        Raises OSError; what could not be packed stays plain.
        """
        return sum(pack(path) for path in find_raw(self.path, *SAMPLES))

    def published(self) -> list[Path]:
        """Return the plain paths of what checks the record and makes the report again; no links.

        What ranks printed (logs) is not among them: a user's code may print anything.
        """
        published = []
        for path in sorted(set(find_raw(self.path, *RAW, *PUBLISHED))):
            if self._is_own_file(stored(path) or path):
                published.append(path)
        return published

    def artifacts(self) -> list[Path]:
        """Return the regular files of this folder that go with its record; no links."""
        paths: set[Path] = set()
        for pattern in ARTIFACTS:
            paths |= set(self.path.glob(pattern))
        return sorted(filter(self._is_own_file, paths))

    def _is_own_file(self, path: Path) -> bool:
        """Tell whether a path of this folder is a regular file that no link leads to."""
        inside = self.path.resolve() / path.relative_to(self.path)
        return path.is_file() and path.resolve() == inside

    def make(self) -> "CellFolder":
        """Make the folders that ranks write to, and the empty nccl.conf. Raises OSError."""
        safe_files.make_folder(self.path)
        for part in ("ranks", "logs", "nccl"):
            # new: nothing of an earlier attempt is in it, and it is not a link
            (self.path / part).mkdir()
        safe_files.write_whole(self.nccl_conf, b"")
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
        left: list[Path] = []
        if self.path.is_dir():
            left = [path for path in sorted(self.path.iterdir()) if PART.fullmatch(path.name)]
        for path in left:
            if path.is_symlink():
                raise safe_files.NotOurs(path, "is a link")
        if not left and not os.path.lexists(aside):
            return
        safe_files.make_folder(aside)
        for path in left:
            path.rename(aside / path.name)
        for attempt_number in itertools.count(1):
            attempt = self.path / f"attempt-{attempt_number}"
            if not os.path.lexists(attempt):
                aside.rename(attempt)
                return


def record_paths(study: Path) -> list[Path]:
    """Return the paths of every record below a study or an output_dir, earlier attempts too.

    Of a file that links give several paths the one without a link counts.
    """
    root = Path(os.path.realpath(study))
    by_file: dict[str, Path] = {}
    for path in sorted(study.glob("*/**/record.json")):
        inside = path.relative_to(study)
        if COPIES in inside.parts:
            continue
        file = os.path.realpath(path)
        if file not in by_file or file == str(root / inside):
            by_file[file] = path
    return sorted(by_file.values())


def stored(path: Path) -> Path | None:
    """Return where a raw file lies: at its path or packed beside it; None where it is not there."""
    for candidate in (path, _packed(path)):
        if candidate.exists():
            return candidate
    return None


def _packed(path: Path) -> Path:
    return path.with_name(path.name + PACKED)


def find_raw(folder: Path, *patterns: str) -> list[Path]:
    """Return the plain paths of the raw files that patterns name, packed ones too, by name."""
    raw: list[Path] = []
    files: dict[str, set[str]] = {}  # each folder is listed once, for all patterns
    for pattern in patterns:
        parent, name = posixpath.split(pattern)
        if parent not in files:
            files[parent] = set()
            with contextlib.suppress(OSError):
                for path in (folder / parent).iterdir():
                    files[parent].add(path.name.removesuffix(PACKED))
        raw += [folder / parent / file for file in sorted(fnmatch.filter(files[parent], name))]
    return raw


def open_raw(path: Path) -> IO[bytes]:
    """Open a raw file by its plain path.

    Raises OSError; reading a damaged packed one raises one of DAMAGED.
    """
    try:
        return safe_files.open_to_read(path)
    except FileNotFoundError:
        packed = _packed(path)
        safe_files.open_to_read(packed).close()  # to wait for a pipe would be for ever
        return gzip.open(packed, "rb")  # type: ignore[return-value]


def read_text(path: Path) -> str:
    """Return a raw file's text; bytes that are no UTF-8 are replaced. Raises one of DAMAGED."""
    with open_raw(path) as file:
        return file.read().decode("utf-8", errors="replace")


def sha256(path: Path) -> str:
    """Return the SHA-256 of what a raw file holds, unpacked; ABSENT or UNREADABLE without one."""
    digest = hashlib.sha256()
    try:
        with open_raw(path) as file:
            for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
                digest.update(chunk)
    except FileNotFoundError:
        return ABSENT
    except DAMAGED:
        return UNREADABLE
    return digest.hexdigest()


def changed(folder: Path, recorded: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each raw file that does not hold what it held, and its hash now."""
    for name, before in recorded.items():
        now = sha256(folder / name)
        if now != before:
            yield name, now


def packed_bytes(path: Path) -> bytes:
    """Return the packed form of a raw file, equal for equal content. Raises OSError."""
    if not path.exists():
        with safe_files.open_to_read(_packed(path)) as file:
            return file.read()
    with safe_files.open_to_read(path) as file:
        return gzip.compress(file.read(), mtime=0)


def pack(path: Path) -> int:
    """Replace a raw file by a packed one that was read again; return how many bytes it saved.

    Raises OSError: it cannot be read or written, or did not come back as it was. The plain file is
    then still there.
    """
    if not path.exists():
        return 0
    safe_files.refuse_other(path)
    data, packed = path.read_bytes(), _packed(path)
    safe_files.write_whole(packed, packed_bytes(path))
    if gzip.decompress(packed.read_bytes()) != data:
        packed.unlink()
        raise OSError(f"{packed}: does not hold what {path.name} holds; the plain file was kept")
    path.unlink()
    return len(data) - packed.stat().st_size
