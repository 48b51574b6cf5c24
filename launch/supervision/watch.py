"""What is seen of the processes of a running cell: the lines that they append, and their stacks."""

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import msgspec

from analysis.text import join_words
from benchmarks.record import CellFolder, Kind, read_line
from conf.host import usable_cores
from launch.machine.facts import ROOT

# Where a rank stands: what it wrote to its log on request (benchmarks.rank.stacks).
MOST_BYTES = 1 << 18  # of a log that are read
MOST_LINES = 100_000  # of a file of source
MOST_CHARACTERS = 60  # of a line of source in a sentence
THREAD = re.compile(r"^(?:Thread|Current thread) 0x[0-9a-f]+.*\(most recent call first\):$")
COLLECTIVE = re.compile(r"^Collective (\w+) \(most recent call first\):$")
RECORDED = re.compile(r"^Recorded (\S+) (\d+) (\S+) ")
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
TORCH = re.compile(r"/(?:site|dist)-packages/torch/(.*)$")
STANDARD_LIBRARY = re.compile(r"^<frozen |/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
WAITING_CALL = re.compile(r"\.(?:wait|synchronize|item|cpu|tolist)\(")
SLEEP = re.compile(r"\b(?:u|nano)?sleep\(")
# Code of ours that ranks run.
OWN_FOLDERS = tuple(f"{ROOT / name}/" for name in ("benchmarks", "trainers", "conf"))
# Loops of ours that wait: file and function, and for what.
LOOPS = {
    ("trainers/kvstore/push_pull_worker.py", "_meet"): "waits for the workers and servers to begin",
    ("trainers/kvstore/push_pull_worker.py", "wait_for_replies"): "waits for the servers",
    ("trainers/kvstore/staging.py", "send_remote"): "waits for the servers",
    ("trainers/kvstore/remote.py", "__init__"): "waits for the servers to begin",
    ("trainers/kvstore/remote.py", "ask"): "waits for the servers",
    ("trainers/kvstore/server.py", "run"): "waits for gradients",
    ("trainers/kvstore/server_process.py", "_wait_until"): "waits for the workers to begin",
    ("benchmarks/rank/ranks.py", "on_rank_zero"): "waits for rank 0",
    ("benchmarks/timing/clock.py", "wait"): "waits for the other ranks",
    ("benchmarks/jacobi/halo.py", "receive"): "waits for its neighbours",
}
WORKING = ("trainers/kvstore/server.py", "serve")  # inside such a loop


class StackState(IntEnum):
    """How much a rank looks as if it waited for others, the least first."""

    ASLEEP = 0
    FOREIGN = 1  # in code that is neither torch's nor ours
    BUSY = 2  # in torch or in our code: working, or blocked because a GPU's queue is full
    WAITING = 3


@dataclass
class Location:
    """Where a rank stands."""

    state: StackState
    words: str  # 'waits in all_reduce', 'is in forward (my_model.py:12: `time.sleep(3)`)'
    # The names of the last collectives that it began, with their sizes, by group and number.
    collectives: dict[tuple[str, int], str] = field(default_factory=dict)


class Frame:
    """One frame of a stack: whose code it is, and where."""

    def __init__(self, file: str, line: int, function: str) -> None:
        self.file, self.line, self.function = file, line, function
        self.owner = "foreign"  # or torch, Ringside, Python
        self.path = file  # for torch and Ringside inside its package
        torch = TORCH.search(file)
        if torch:
            self.owner, self.path = "torch", torch[1]
        elif STANDARD_LIBRARY.search(file):
            self.owner = "Python"
        elif file.startswith(OWN_FOLDERS):
            self.owner, self.path = "Ringside", Path(file).relative_to(ROOT).as_posix()

    def source(self) -> str:
        """Return the line of source, '' where there is none to read."""
        path = Path(self.file)
        try:
            if not path.is_file():
                return ""
            with path.open(encoding="utf-8", errors="replace") as file:
                lines = islice(file, self.line - 1, min(self.line, MOST_LINES))
                return next(lines, "").strip()
        except (OSError, ValueError):  # the log names a file that cannot be one
            return ""


def log_bytes(log: Path) -> int:
    """Return the bytes of a log so far: what is asked for next comes behind them."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def locate(log: Path, start: int) -> Location | None:
    """Return where a process stood, by what it wrote after `start` bytes; None without a stack."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    stacks: list[list[Frame]] = []  # of the threads, the main one last; the newest call first
    unfinished = ""  # a collective
    frames: list[Frame] = []
    collectives = {}
    for line in text.splitlines():
        collective = COLLECTIVE.match(line)
        frame = FRAME.match(line)
        recorded = RECORDED.match(line)
        if THREAD.match(line):
            frames = []
            stacks.append(frames)
        elif collective:
            unfinished = collective[1]
            frames = []
        elif frame:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
        elif recorded:
            group, number, name = recorded.groups()
            collectives[group, int(number)] = name.replace(":", " of ")
    if not stacks or not stacks[-1]:
        return None
    location = _location(stacks[-1])
    for stack in stacks[:-1]:
        # On GPUs backward runs in threads of torch's own, while the main one waits for them. Those
        # of Python begin in threading.py.
        if stack and not stack[-1].function.startswith("_bootstrap"):
            helper = _location(stack)
            if helper.state < location.state:
                location = helper
    waits = location.state is StackState.WAITING
    if waits and not location.words.endswith(unfinished):
        location.words += f" (unfinished: {unfinished})"
    location.collectives = collectives
    return location


def _location(stack: Sequence[Frame]) -> Location:
    frames = [frame for frame in stack if frame.owner != "Python"] or list(stack)
    inside = list(takewhile(lambda frame: frame.owner in ("torch", "Ringside"), frames))
    wait = _wait(inside)
    if wait:
        return Location(StackState.WAITING, wait)
    top = frames[0]
    source = top.source()
    if SLEEP.search(source):
        state = StackState.ASLEEP
    elif inside or WAITING_CALL.search(source):
        state = StackState.BUSY
    else:
        state = StackState.FOREIGN
    where = f"{Path(top.file).name}:{top.line}"
    if source and top.owner != "torch":
        where += f": `{source[:MOST_CHARACTERS]}`"
    return Location(state, f"is in {top.function} ({where})")


def _wait(inside: Sequence[Frame]) -> str:
    """Return for what a thread waits, by its last calls of torch and ours; '' if it does not."""
    if not inside:
        return ""
    distributed = []
    for frame in inside:
        if frame.owner != "torch":
            break
        if frame.path.startswith("distributed/"):
            distributed.append(frame.function)
    if distributed:
        calls = [function for function in distributed if not function.endswith("wrapper")]
        return f"waits in {(calls or distributed)[-1]}"
    top = inside[0]
    if top.function == "_engine_run_backward":
        return "waits in backward"
    if top.owner == "torch":
        if top.path.startswith("cuda/") and top.function in ("synchronize", "wait", "query"):
            return "waits for its GPU"
        if top.path == "nn/parallel/distributed.py":
            return "waits in DDP"
    for frame in inside:
        if (frame.path, frame.function) == WORKING:
            return ""
        if (frame.path, frame.function) in LOOPS:
            return LOOPS[frame.path, frame.function]
    if top.owner == "Ringside" and WAITING_CALL.search(top.source()):
        return f"waits at {Path(top.file).name}:{top.line}"
    return ""


BEFORE_WARM_UP = ("", "connect", "build", "first step")  # phases of a rank


@dataclass
class Rank:
    """What is known of one process of a cell: a rank, or a server next to the ranks."""

    index: int  # among the processes of the cell: ranks, then servers
    name: str  # 'rank 3', 'server 0'
    phase: str = ""
    iterations: int = 0
    images_per_second: float = 0.0  # in the newest window of steps with exchange
    pid: int | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    last_seen: float = 0.0  # monotonic seconds
    host: str = ""  # where a cell has several
    # Of a hang, as it was noticed:
    state: str = "not started"  # of the process, in the kernel's words
    location: Location | None = None  # where it stands, if it said so


class Window(msgspec.Struct):
    """The steps of a line whose rate is shown."""

    ms: list[float]
    images: float = 0.0


def doubted_network(ranks: Sequence[Rank]) -> str:
    """Return the end of a sentence that names the hosts of ranks that all wait; '' for one host."""
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    if len(hosts) < 2:
        return ""
    return (
        f"; perhaps no data moves between hosts {join_words(hosts)}: check the network between them"
    )


class Watch:
    """Reads the lines that ranks and servers append, each file from where it was last read."""

    def __init__(
        self, folder: CellFolder, world_size: int, servers: int = 0, clock: Any = time
    ) -> None:
        """`clock` is the module `time`, but in tests."""
        self.ranks = [Rank(index, f"rank {index}") for index in range(world_size)]
        self.servers = [Rank(world_size + index, f"server {index}") for index in range(servers)]
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
                with self._folder.rank_lines(rank.index).open("rb") as file:
                    file.seek(self._read[rank.index])
                    whole, newline, _ = file.read().rpartition(b"\n")
            except FileNotFoundError:
                continue
            if not newline:
                continue
            has_news = True
            self._read[rank.index] += len(whole) + 1
            rank.last_seen = self._clock.monotonic()
            for text in whole.split(b"\n"):
                line = read_line(text)  # a full disk tears lines
                if line is not None:
                    self._take(rank, line)
        return has_news

    def count(self, rank: Rank) -> int:
        """Return the number of iterations that a rank has begun, also those since its last line."""
        try:
            return int(self._folder.rank_count(rank.index).read_bytes())
        except (OSError, ValueError):
            return rank.iterations

    def _take(self, rank: Rank, line: dict[str, Any]) -> None:
        if rank.pid is None and "pid" in line:
            for peer in self.everyone:  # those that reported earlier were waiting for this one
                peer.last_seen = self._clock.monotonic()
        rank.phase = line.get("phase", rank.phase)
        rank.iterations = line.get("iterations", rank.iterations)
        rank.pid = line.get("pid", rank.pid)
        if line.get("purpose") in ("warm-up", "timed"):
            with contextlib.suppress(ValueError, ZeroDivisionError):  # of a torn line
                window = msgspec.convert(line, Window)
                rank.images_per_second = 1e3 * window.images / sum(window.ms)
        if line["kind"] == Kind.DONE:
            rank.done, rank.phase = True, "exit"
        if line["kind"] == Kind.ERROR:
            rank.error = rank.error or line
