"""Follow what the ranks of a running cell have done, from the lines that they append."""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.record import CellFolder, Kind, read_line
from conf.host_limits import usable_cores
from launch.supervision.stack_reader import Location

BEFORE_WARM_UP = ("", "connect", "build", "first step")  # phases of a rank


@dataclass
class Rank:
    """What is known of one process of a cell: a rank, or a server next to the ranks."""

    number: int
    name: str  # 'rank 3', 'server 0'
    phase: str = ""
    iterations: int = 0
    pid: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    last_seen: float = 0.0  # monotonic seconds
    # Of a hang, as it was noticed:
    state: str = "not started"  # of the process, in the kernel's words
    location: Location | None = None  # where it stands, if it said so


class Watch:
    """Reads the lines that ranks and servers append, each file from where it was last read."""

    def __init__(
        self, folder: CellFolder, world_size: int, servers: int = 0, clock: Any = time
    ) -> None:
        """`clock` is the module `time`, but in tests."""
        self.ranks = [Rank(number, f"rank {number}") for number in range(world_size)]
        self.servers = [Rank(world_size + number, f"server {number}") for number in range(servers)]
        self.everyone = [*self.ranks, *self.servers]  # by number
        self._folder, self._clock = folder, clock
        self._few_cores = 2 * len(self.everyone) > usable_cores()
        for rank in self.everyone:
            rank.last_seen = clock.monotonic()
        self._read = [0] * len(self.everyone)

    @property
    def needs_quiet(self) -> bool:
        """Whether processes measure soon, or leave no core idle: each has two busy threads."""
        for rank in self.everyone:
            if rank.pid and (self._few_cores or rank.phase not in BEFORE_WARM_UP):
                return True
        return False

    def update(self) -> bool:
        """Read the new lines; return whether there were any."""
        has_news = False
        for rank in self.everyone:
            try:
                with self._folder.rank_lines(rank.number).open("rb") as file:
                    file.seek(self._read[rank.number])
                    whole, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            if not newline:
                continue
            has_news = True
            self._read[rank.number] += len(whole) + 1
            rank.last_seen = self._clock.monotonic()
            for text in whole.split(b"\n"):
                line = read_line(text)  # a full disk tears lines
                if line is not None:
                    self._take(rank, line)
        return has_news

    def count(self, rank: Rank) -> int:
        """Return the number of iterations that a rank has begun, also those since its last line."""
        try:
            return int(self._folder.rank_count(rank.number).read_bytes())
        except (OSError, ValueError):
            return rank.iterations

    def _take(self, rank: Rank, line: dict[str, Any]) -> None:
        if rank.pid is None and "pid" in line:
            for peer in self.everyone:  # those that reported earlier were waiting for this one
                peer.last_seen = self._clock.monotonic()
        rank.phase = line.get("phase", rank.phase)
        rank.iterations = line.get("iterations", rank.iterations)
        rank.pid = line.get("pid", rank.pid)
        if line["kind"] == Kind.DONE:
            rank.done, rank.phase = True, "exit"
        if line["kind"] == Kind.ERROR:
            rank.error = rank.error or line
