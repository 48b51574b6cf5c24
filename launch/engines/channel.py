"""The agent of a host as the launching process has it: a command whose standard input and output this process holds."""

import os
import queue
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.host import processes
from benchmarks.host.messages import Do, Inbox, Say
from benchmarks.record.encoding import encoded
from launch.engines.environment import ROOT

LONGEST_BUSY_S = 300.0
LEAVE_SECONDS = 5.0  # for an agent to leave after the end of its input
SAID_BYTES = 4096  # of the end of what the command printed


class AgentGone(OSError):
    """The agent of a host, or the command that started it, is gone or says nothing that it should say."""


class Channel:
    """Starts the agent of a host and speaks to it. A thread takes what it says.

    A message that belongs to a cell goes to the function that `listen` named; others wait for `answer`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the command. Raises OSError."""
        self._printed = os.memfd_create("ringside-agent")  # no file that anybody would have to remove
        weakref.finalize(self, os.close, self._printed)  # why the agent is gone may be asked for after `close`
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._printed,
            bufsize=0, start_new_session=True,
        )  # fmt: skip
        self.heard = time.monotonic()  # when it last said something, or until when it said that it is busy
        self._take: Callable[[Say, dict[str, Any]], None] = lambda say, message: None
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.wrong = ""  # why what it said is no message of an agent
        self._sending = threading.Lock()
        threading.Thread(target=self._read, name="agent", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the id of the command's process."""
        return self._process.pid

    def listen(self, take: Callable[[Say, dict[str, Any]], None]) -> None:
        """Have `take` called for each message that belongs to a cell, on the thread that reads."""
        self._take = take

    def ended(self) -> int | None:
        """Return the exit status of the command; None while it runs."""
        return self._process.poll()

    def send(self, what: Do, **content: Any) -> None:
        """Ask the agent something. Raises AgentGone."""
        try:
            data = memoryview(encoded({"do": what.value, **content}))
            with self._sending:
                assert self._process.stdin is not None
                while data:
                    data = data[self._process.stdin.write(data) or 0 :]
        except (OSError, ValueError) as error:
            raise AgentGone(self.why_gone()) from error

    def answer(self, expected: Say, seconds: float) -> dict[str, Any]:
        """Return the next answer of a kind that belongs to no cell. Raises AgentGone: it does not come in so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                message = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AgentGone(f"it gave no answer for {seconds:g} s") from None
            if message is None:
                self._answers.put(None)
                raise AgentGone(self.why_gone())
            if message["say"] == expected.value:
                return message

    def close(self) -> None:
        """End the agent: it ends every process of its own. By force after LEAVE_SECONDS."""
        if self._process.stdin:
            with self._sending:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def why_gone(self) -> str:
        """Return why nothing comes any more, as a sentence without its subject: 'it ended with status 255: …'."""
        if self.wrong:
            return self.wrong
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        size = os.fstat(self._printed).st_size
        said = os.pread(self._printed, SAID_BYTES, max(0, size - SAID_BYTES)).decode(errors="replace").strip()
        how = f"it was ended by {processes.signal_name(status)}" if status < 0 else f"it ended with status {status}"
        lines = said.splitlines()
        why = [line for line in lines if "error: " in line] or lines[-1:]  # srun says what it does about it after that
        return f"{how}: {why[0]}" if why else how

    def _read(self) -> None:
        assert self._process.stdout is not None
        inbox = Inbox(self._process.stdout.fileno())
        try:
            while (messages := inbox.receive()) is not None:
                self.heard = time.monotonic()
                for message in messages:
                    say = Say(message["say"])
                    if "cell" in message:
                        self._take(say, message)
                    elif say == Say.BUSY:
                        self.heard += min(float(message["for_s"]), LONGEST_BUSY_S)
                    elif say != Say.BEAT:
                        self._answers.put(message)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.wrong = f"what it said is no message of an agent ({str(error)[:100]})"
        self._answers.put(None)
