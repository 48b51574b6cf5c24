"""Read where a rank stands, from what it wrote to its log on request (benchmarks.rank.stacks)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import islice, takewhile
from pathlib import Path

from launch.engines.environment import ROOT

MOST_BYTES = 1 << 18  # of a log that are read
MOST_LINES = 100_000  # of a file of source
MOST_CHARACTERS = 60  # of a line of source in a sentence
THREAD = re.compile(r"^(?:Thread|Current thread) 0x[0-9a-f]+.*\(most recent call first\):$")
COLLECTIVE = re.compile(r"^Collective (\w+) \(most recent call first\):$")
RECORDED = re.compile(r'^Recorded (\S+) (\d+) (\S+) "(.*)", line (\d+) in (.*)$')
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
TORCH = re.compile(r"/(?:site|dist)-packages/torch/(.*)$")
STANDARD_LIBRARY = re.compile(r"^<frozen |/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
WAITING_CALL = re.compile(r"\.(?:wait|synchronize|item|cpu|tolist)\(")
SLEEP = re.compile(r"\b(?:u|nano)?sleep\(")
OWN_PACKAGES = ("benchmarks", "trainers", "conf")  # that ranks run
# Loops of ours that wait: file and function, and for what.
LOOPS = {
    ("trainers/kvstore/worker.py", "_meet"): "waits for the workers and servers to begin",
    ("trainers/kvstore/worker.py", "wait_for_replies"): "waits for the servers",
    ("trainers/kvstore/references.py", "send_remote"): "waits for the servers",
    ("trainers/kvstore/remote.py", "__init__"): "waits for the servers to begin",
    ("trainers/kvstore/remote.py", "ask"): "waits for the servers",
    ("trainers/kvstore/server.py", "run"): "waits for gradients",
    ("trainers/kvstore/server_process.py", "_wait_for_workers"): "waits for the workers to begin",
    ("trainers/kvstore/server_process.py", "_on_gpu"): "waits for the workers to begin",
    (
        "trainers/kvstore/server_process.py",
        "_meet_remote_workers",
    ): "waits for the workers to begin",
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


@dataclass(frozen=True)
class PendingCollective:
    """A collective that a rank has begun."""

    name: str  # with its sizes, where every rank's are equal
    foreign: bool  # whether code that is neither torch's nor ours began it


@dataclass(frozen=True)
class Location:
    """Where a rank stands."""

    state: StackState
    words: str  # 'waits in all_reduce', 'is in forward (my_model.py:12: `time.sleep(3)`)'
    called_from_foreign: bool = False  # code that is neither torch's nor ours began the wait
    # By group and number in it.
    collectives: Mapping[tuple[str, int], PendingCollective] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def torch(self) -> str | None:
        """Return the path inside torch's package; None for other files."""
        match = TORCH.search(self.file)
        if match is None:
            return None
        return match[1]

    @property
    def own(self) -> str | None:
        """Return the path inside Ringside; None for other files."""
        path = Path(self.file)
        if not path.is_relative_to(ROOT):
            return None
        inside = path.relative_to(ROOT)
        if not inside.parts or inside.parts[0] not in OWN_PACKAGES:
            return None
        return inside.as_posix()

    @property
    def foreign(self) -> bool:
        """Whether a frame is neither torch's nor ours nor Python's own."""
        if self.torch or self.own or self.function == "<module>":
            return False
        return not STANDARD_LIBRARY.search(self.file)

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
    stacks, collective, collective_stack = _parse(text)
    if not stacks or not stacks[-1]:
        return None
    location = _location(stacks[-1])
    for frames in stacks[:-1]:
        # On GPUs backward runs in threads of torch's own, while the main one waits for them. Those
        # of Python begin in threading.py.
        if frames and not frames[-1].function.startswith("_bootstrap"):
            helper = _location(frames)
            if helper.state < location.state:
                location = helper
    if location.state is StackState.WAITING and collective:
        words = location.words
        if not words.endswith(collective):
            words = f"{words} (unfinished: {collective})"
        foreign = any(frame.foreign for frame in collective_stack)
        location = Location(location.state, words, location.called_from_foreign or foreign)
    return replace(location, collectives=_collectives(text))


def _collectives(text: str) -> dict[tuple[str, int], PendingCollective]:
    """Return the last collectives that a rank began."""
    collectives = {}
    for line in text.splitlines():
        match = RECORDED.match(line)
        if match:
            group, number, name, file, line_number, function = match.groups()
            foreign = bool(file) and Frame(file, int(line_number), function).foreign
            collectives[group, int(number)] = PendingCollective(name.replace(":", " of "), foreign)
    return collectives


def _parse(text: str) -> tuple[list[list[Frame]], str, list[Frame]]:
    """Return the stacks of all threads, the main one last, and an unfinished collective's.

    A stack has the newest call first.
    """
    threads: list[list[Frame]] = []
    collective = ""
    collective_stack: list[Frame] = []
    frames: list[Frame] = []
    for line in text.splitlines():
        head = COLLECTIVE.match(line)
        frame = FRAME.match(line)
        if THREAD.match(line):
            frames = []
            threads.append(frames)
        elif head:
            frames = []
            collective, collective_stack = head[1], frames
        elif frame:
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return threads, collective, collective_stack


def _location(stack: Sequence[Frame]) -> Location:
    """Return what one thread does."""
    frames = [frame for frame in stack if not STANDARD_LIBRARY.search(frame.file)] or list(stack)
    inside = list(takewhile(lambda frame: frame.torch or frame.own, frames))
    called_from_foreign = any(frame.foreign for frame in frames[len(inside) :])
    wait = _wait(inside)
    if wait:
        return Location(StackState.WAITING, wait, called_from_foreign)
    top = frames[0]
    source = top.source()
    if SLEEP.search(source):
        state = StackState.ASLEEP
    elif inside or WAITING_CALL.search(source):
        state = StackState.BUSY
    else:
        state = StackState.FOREIGN
    where = f"{Path(top.file).name}:{top.line}"
    if source and top.torch is None:
        where += f": `{source[:MOST_CHARACTERS]}`"
    return Location(state, f"is in {top.function} ({where})", called_from_foreign)


def _wait(inside: Sequence[Frame]) -> str | None:
    """Return for what a thread waits, by its last calls of torch and ours; None if it does not."""
    if not inside:
        return None
    top = inside[0]
    in_torch = top.torch or ""
    distributed = []
    for frame in takewhile(lambda frame: frame.torch, inside):
        if str(frame.torch).startswith("distributed/"):
            distributed.append(frame.function)
    if distributed:
        calls = [function for function in distributed if not function.endswith("wrapper")]
        return f"waits in {(calls or distributed)[-1]}"
    if top.function == "_engine_run_backward":
        return "waits in backward"
    if in_torch.startswith("cuda/") and top.function in ("synchronize", "wait", "query"):
        return "waits for its GPU"
    if in_torch == "nn/parallel/distributed.py":
        return "waits in DDP"
    for frame in inside:
        if (frame.own, frame.function) == WORKING:
            return None
        words = LOOPS.get((str(frame.own), frame.function))
        if words:
            return words
    if top.own and WAITING_CALL.search(top.source()):
        return f"waits at {Path(top.file).name}:{top.line}"
    return None
