"""The agent of another host: what it is, what time it is there, and what it says of a running cell."""

import base64
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.host.messages import Do, Say
from benchmarks.host.scratch import HANDED_ON
from benchmarks.record import CellFolder, clock, own_files, write_json
from benchmarks.record.encoding import decoded
from conf.variables import CLOCK_BOUND
from launch.engines.channel import Channel
from launch.engines.engine import Lost
from launch.machine.fleet import Host

CLOCK_QUESTIONS = 8  # the answer that came fastest tells the time
ANSWER_S = 60.0  # for an answer that takes no work
DESCRIBED_S = 180.0
ADDING = threading.Lock()  # how ranks of several hosts ended
# Files that every host has, and where those of the second host and the later ones go.
OF_EACH_HOST = {"logs/agent.log": "logs/agent-{}.log", "gpus.jsonl": "gpus-{}.jsonl", "cpu.jsonl": "cpu-{}.jsonl"}


class RemoteHost:
    """A host that an agent serves."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name, self.channel = name, channel
        self.lost: Lost | None = None
        self.clock: dict[str, str] = {}  # variables by which its ranks have the launcher's clock

    def describe(self, device: str, ready_s: float) -> Host:
        """Wait until the agent is ready, and return what the host says of itself. `device` is that of the sweep.

        Raises:
            AgentGone: it does not answer.
            Refused: it cannot do what is asked.
        """
        self.channel.answer(Say.READY, ready_s)
        self.channel.send(Do.LOOK, device=device)
        return Host.described(self.name, self.channel.answer(Say.LOOKED, DESCRIBED_S)["said"])

    def answers(self, lost_after_s: float) -> bool:
        """Return whether the agent lives, and spoke within so many seconds. The host is lost otherwise."""
        silent_s = time.monotonic() - self.channel.heard
        why = ""
        if self.channel.wrong:
            why = self.channel.wrong
        elif self.channel.ended() is not None:
            why = f"its agent is gone, {self.channel.why_gone()}"
        elif silent_s > lost_after_s:
            why = f"its agent gave no sign of life for {silent_s:.0f} s"
        if why:
            self.is_lost(why, silent_s)
        return not why

    def is_lost(self, why: str, silent_s: float) -> None:
        """Take the host as lost, unheard for so many seconds. The first reason stays."""
        self.lost = self.lost or Lost(f"host {self.name} is lost: {why}", clock.now() - silent_s)

    def is_still_lost(self, why: str) -> None:
        """Add to why the host is lost, which it is."""
        if self.lost:
            self.lost = Lost(f"{self.lost.said}; {why}", self.lost.heard)

    def set_clock(self, answer_s: float = ANSWER_S) -> None:
        """Find the host's clock by four time stamps, of which the agent's two are one (NTP, RFC 5905, section 8).

        Raises:
            AgentGone: it does not answer.
        """
        answers = []
        for _ in range(CLOCK_QUESTIONS):
            sent = time.monotonic()
            self.channel.send(Do.TIME, sent=sent)
            answer = self.channel.answer(Say.TIME, answer_s)
            answers.append((time.monotonic() - sent, sent, float(answer["monotonic"])))
        took_s, sent, there = min(answers)
        beginning = clock.BEGINNING + sent + took_s / 2 - there  # when its monotonic clock was 0
        self.clock = {clock.VARIABLE: repr(beginning), CLOCK_BOUND: repr(took_s / 2)}


def first_lost(hosts: Iterable[RemoteHost], lost_after_s: float) -> Lost | None:
    """Return the first host that is lost; None if none is."""
    return next((host.lost for host in hosts if not host.answers(lost_after_s) or host.lost), None)


def end_agents(hosts: Iterable[RemoteHost]) -> None:
    """End the agents of some hosts, at the same time."""
    ending = [threading.Thread(target=host.channel.close) for host in hosts]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


@dataclass
class CellOnHost:
    """What the agent of one host has said of a running cell. The thread that reads takes it; the others look."""

    host: RemoteHost
    number: int  # of the host in the cell
    token: str  # of the cell
    folder: CellFolder
    ports: tuple[int, int] | None = None  # where the ranks of all hosts meet, and their agents; the first host
    silent_s: dict[int, float] = field(default_factory=dict)  # hosts that the first one does not hear any more
    status: int | None = None
    survivors: list[int] | None = None  # once it was stopped
    states: dict[str, str] = field(default_factory=dict)
    why: str = ""  # why the ranks could not be started
    error: OSError | None = None  # of this machine: the disk is full
    news: threading.Event = field(default_factory=threading.Event)

    def take(self, say: Say, message: Mapping[str, Any]) -> None:
        """Take what the agent says of this cell; what it still said of the one before is dropped."""
        if message["cell"] != self.token:
            return
        if say == Say.FILE:
            try:
                self._write(str(message["name"]), message["at"], base64.b64decode(message["data"]))
            except OSError as error:
                self.error = self.error or error
        elif say == Say.MEETING:
            self.ports = int(message["port"]), int(message["watched"])
        elif say == Say.SILENT:
            self.silent_s = {int(number): float(seconds) for number, seconds in message["hosts"].items()}
        elif say == Say.STATES:
            self.states |= message["states"]
        elif say == Say.ENDED:
            self.status = int(message["status"])
        elif say == Say.STOPPED:
            self.survivors = [int(pid) for pid in message["survivors"]]
        elif say == Say.FAILED:
            self.why = str(message["why"])
        self.news.set()

    def _write(self, name: str, at: int | None, data: bytes) -> None:
        """Write new bytes of a file. Raises ValueError: the agent may not write that, or something is missing before it."""
        if not HANDED_ON.fullmatch(name):
            raise ValueError(f"file {name!r:.100}")
        path = self.folder.path / self._place(name)
        if path == self.folder.failures:
            self._add_failures(data)
        elif at is None:
            own_files.write_whole(path, data)
        else:
            descriptor = own_files.open_own(path)
            with open(descriptor, "ab", buffering=0) as file:  # noqa: PTH123
                if file.seek(0, 2) != at:
                    raise ValueError(f"file {name}: {file.tell()} bytes are here, the next are from {at}")
                while data:
                    data = data[file.write(data) :]

    def _place(self, name: str) -> str:
        if self.number == 0:
            return name
        if name.startswith("nccl/"):  # the names of two hosts may be equal
            return f"nccl/{self.number}-{name.removeprefix('nccl/')}"
        return OF_EACH_HOST.get(name, name).format(self.number)

    def _add_failures(self, data: bytes) -> None:
        """Add the ranks of this host that ended to those of the others."""
        with ADDING:  # two hosts often fail together
            before = decoded(self.folder.failures.read_bytes()) if self.folder.failures.exists() else {}
            write_json(self.folder.failures, {**before, **json.loads(data)})
