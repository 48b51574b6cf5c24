"""Read where a rank stands, from what it wrote to its log when the supervisor asked (benchmarks.rank.asked).

The stacks are written also while the interpreter's lock is held. They have Python's frames only, so what a frame calls is read
from its line of source.
"""

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
OWN = ("benchmarks", "trainers", "conf")  # packages that ranks run
# Loops of ours that wait: file and function, and for what.
LOOPS = {
    ("trainers/kvstore/worker.py", "_meet"): "waits for the workers and servers to begin",
    ("trainers/kvstore/worker.py", "wait_for_replies"): "waits for the servers",
    ("trainers/kvstore/references.py", "send_far"): "waits for the servers",
    ("trainers/kvstore/remote/meeting.py", "__init__"): "waits for the servers to begin",
    ("trainers/kvstore/remote/servers.py", "ask"): "waits for the servers",
    ("trainers/kvstore/server.py", "run"): "waits for gradients",
    ("trainers/kvstore/server_process.py", "_wait_for_workers"): "waits for the workers to begin",
    ("trainers/kvstore/server_process.py", "_on_gpu"): "waits for the workers to begin",
    ("trainers/kvstore/server_process.py", "_while_beating"): "waits for the workers to begin",
    ("benchmarks/rank/group.py", "on_rank_zero"): "waits for rank 0",
    ("benchmarks/timing/spin_barrier.py", "wait"): "waits for the other ranks",
    ("benchmarks/jacobi/halo.py", "receive"): "waits for its neighbours",
}
WORKING = ("trainers/kvstore/server.py", "serve")  # inside such a loop


class Standing(IntEnum):
    """How much a rank looks as if it waited for others, the least first."""

    ASLEEP = 0
    FOREIGN = 1  # in code that is neither torch's nor ours
    BUSY = 2  # in torch or in our code: working, or blocked because a GPU's queue is full
    WAITING = 3


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    standing: Standing
    words: str  # 'waits in all_reduce', 'is in forward (my_model.py:12: `time.sleep(3)`)'
    called_from_foreign: bool = False  # code that is neither torch's nor ours began the wait
    collectives: Mapping[tuple[str, int], "Begun"] = field(default_factory=dict)  # by group and number in it


@dataclass(frozen=True)
class Begun:
    """A collective that a rank has begun."""

    name: str  # with its sizes, where every rank's are equal
    foreign: bool  # whether code that is neither torch's nor ours began it


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def torch(self) -> str | None:
        """Return the path inside torch's package; None for other files."""
        found = TORCH.search(self.file)
        return found[1] if found else None

    @property
    def own(self) -> str | None:
        """Return the path inside Ringside; None for other files."""
        path = Path(self.file)
        inside = path.relative_to(ROOT) if path.is_relative_to(ROOT) else None
        return inside.as_posix() if inside and inside.parts[0] in OWN else None

    def source(self) -> str:
        """Return the line of source, '' where there is none to read."""
        path = Path(self.file)
        try:
            if not path.is_file():
                return ""
            with path.open(encoding="utf-8", errors="replace") as file:
                return next(islice(file, self.line - 1, min(self.line, MOST_LINES)), "").strip()
        except (OSError, ValueError):  # the log names a file that cannot be one: the sentence is told without its line
            return ""


def size(log: Path) -> int:
    """Return the bytes of a log so far: what is asked for next comes behind them."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def place(log: Path, start: int) -> Place | None:
    """Return where the process of a log stood, from what it wrote after the first `start` bytes; None if that is no stack."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    stacks, collective, begun_by = _read(text)
    if not stacks or not stacks[-1]:
        return None
    main = _standing(stacks[-1])
    # On GPUs backward runs in threads of torch's own, while the main one waits for them.
    helpers = [_standing(frames) for frames in stacks[:-1] if frames and _begun_by_torch(frames)]
    found = min([main, *helpers], key=lambda one: one.standing)
    if found.standing is Standing.WAITING and collective:
        words = found.words if found.words.endswith(collective) else f"{found.words} (unfinished: {collective})"
        foreign = found.called_from_foreign or any(_is_foreign(frame) for frame in begun_by)
        found = Place(found.standing, words, foreign)
    return replace(found, collectives=_recorded(text))


def _recorded(text: str) -> dict[tuple[str, int], Begun]:
    """Return the last collectives that a rank began."""
    found = {}
    for line in text.splitlines():
        if match := RECORDED.match(line):
            group, number, name, file, at, function = match.groups()
            found[group, int(number)] = Begun(
                name.replace(":", " of "), bool(file) and _is_foreign(Frame(file, int(at), function))
            )
    return found


def _read(text: str) -> tuple[list[list[Frame]], str, list[Frame]]:
    """Return the stacks of all threads, the main one last, and the name and stack of the first unfinished collective.

    A stack has the newest call first.
    """
    threads: list[list[Frame]] = []
    collective = ""
    begun_by: list[Frame] = []
    current: list[Frame] = []
    for line in text.splitlines():
        if THREAD.match(line):
            threads.append(current := [])
        elif found := COLLECTIVE.match(line):
            collective, begun_by = found[1], (current := [])
        elif found := FRAME.match(line):
            current.append(Frame(found[1], int(found[2]), found[3]))
    return threads, collective, begun_by


def _begun_by_torch(frames: Sequence[Frame]) -> bool:
    """Return whether C++ began a thread: those of Python begin in threading.py."""
    return not frames[-1].function.startswith("_bootstrap")


def _standing(frames: Sequence[Frame]) -> Place:
    """Return what one thread does."""
    known = [frame for frame in frames if not STANDARD_LIBRARY.search(frame.file)] or list(frames)
    inside = list(takewhile(lambda frame: frame.torch or frame.own, known))  # what torch and we called last
    called_from_foreign = any(_is_foreign(frame) for frame in known[len(inside) :])
    if words := _wait(inside):
        return Place(Standing.WAITING, words, called_from_foreign)
    top = known[0]
    source = top.source()
    standing = Standing.FOREIGN if not inside else Standing.BUSY
    if SLEEP.search(source):
        standing = Standing.ASLEEP
    elif not inside and WAITING_CALL.search(source):
        standing = Standing.BUSY
    shown = f": `{source[:MOST_CHARACTERS]}`" if source and top.torch is None else ""
    return Place(standing, f"is in {top.function} ({Path(top.file).name}:{top.line}{shown})", called_from_foreign)


def _is_foreign(frame: Frame) -> bool:
    """Return whether a frame is neither torch's nor ours nor Python's own."""
    ours = frame.torch or frame.own or STANDARD_LIBRARY.search(frame.file) or frame.function == "<module>"
    return not ours


def _wait(inside: Sequence[Frame]) -> str | None:
    """Return for what a thread waits, from the frames of torch and of ours that it called last; None if it does not."""
    if not inside:
        return None
    top = inside[0]
    of_torch = takewhile(lambda frame: frame.torch, inside)  # what was called last
    distributed = [frame.function for frame in of_torch if str(frame.torch).startswith("distributed/")]
    if distributed:
        named = [function for function in distributed if not function.endswith("wrapper")]
        return f"waits in {(named or distributed)[-1]}"
    if top.function == "_engine_run_backward":
        return "waits in backward"
    if top.torch and top.torch.startswith("cuda/") and top.function in ("synchronize", "wait", "query"):
        return "waits for its GPU"
    if top.torch == "nn/parallel/distributed.py":
        return "waits in DDP"
    for frame in inside:
        if (frame.own, frame.function) == WORKING:
            return None
        if words := LOOPS.get((str(frame.own), frame.function)):
            return words
    if top.own and WAITING_CALL.search(top.source()):
        return f"waits at {Path(top.file).name}:{top.line}"
    return None
