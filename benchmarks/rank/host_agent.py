"""The agent of a host: serves a launcher over its standard input and output, cell after cell.

It imports torch once. For each cell it forks a process that runs torch's elastic agent, which
forks the ranks (benchmarks.rank.cell_process). benchmarks.agent.protocol has the messages.
"""

import contextlib
import functools
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.agent import processes
from benchmarks.agent.network import ProbeListeners, try_connect
from benchmarks.agent.processes import with_absolute_path
from benchmarks.agent.protocol import (
    LONGEST_SILENCE_S,
    MOST_BYTES,
    MOST_WAITING_BYTES,
    Command,
    Event,
    Reader,
    Writer,
    wait_readable,
)
from benchmarks.agent.sampler import SamplingProcess
from benchmarks.agent.scratch import Scratch, is_full, remove_left
from benchmarks.rank.worker import die_with_parent
from benchmarks.record import CellFolder, read_lines, write_json
from benchmarks.record.encoding import decoded
from benchmarks.record.lines import CLOCK_VARIABLE, now
from benchmarks.record.safe_files import because
from conf.cell import Cell
from conf.host import NO_TOKEN, STARTER, TOKEN
from conf.targets import locate

if TYPE_CHECKING:
    from benchmarks.rank.cell_process import RendezvousAddress

# torch, and cell_process with it, is imported by `serve`: `main` may start this program anew.

PAUSE_SECONDS = 0.1  # between two looks at the files and the ends of processes, while a cell runs
BEAT_SECONDS = 1.0  # between two heartbeats
DESCRIBE_SECONDS = 120.0  # for the host to be described
IMPORT_SECONDS = 120.0  # for what a cell needs to be imported, perhaps over a network
END_SECONDS = 15.0  # beyond its grace, for a cell to be ended
LAST_SECONDS = 5.0  # for the process of a cell, after every process of it was ended
OURS = ("benchmarks.", "trainers.")
LIBRARIES = ("torchvision", "timm")
COMPILER = (
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.distributed",
    "torch._inductor.compile_fx",
    "torch._inductor.async_compile",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.runtime.triton_compat",
    "torch.utils.cpp_extension",
)
ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
# What an agent's environment needs from its beginning: the text that a token takes the place of,
# and what Python reads.
FROM_THE_BEGINNING = {TOKEN: NO_TOKEN, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


Handler = Callable[[Mapping[str, Any]], None]


class HostAgent:
    """Serves one launcher. Single-threaded, because forking a threaded process is unsafe."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        """Read commands from `reader` and write events to `writer`."""
        self._reader, self._writer = reader, writer
        self._cell: RunningCell | None = None
        self._modules = 0
        self._next_beat = 0.0
        self._heard, self._launcher_beats = time.monotonic(), False
        self._probe: ProbeListeners | None = None

    def serve(self) -> int:
        """Serve until the input ends or the launcher is silent. Returns the exit status."""
        gc.disable()  # until all is imported: it would walk through it again and again
        remove_left()
        import torch

        self._send(Event.READY, pid=os.getpid(), torch=torch.__version__)
        try:
            while True:
                if self._reader.descriptor in self._wait():
                    lines = self._reader.receive()
                    if lines is None:
                        return 0
                    for line in lines:
                        message = decoded(line)
                        command = Command(message["do"])
                        handle: Handler = getattr(self, f"_{command.value}")
                        handle(message)
                        # Heartbeats wait unread while a command takes long.
                        self._heard = time.monotonic()
                if self._launcher_beats and time.monotonic() - self._heard > LONGEST_SILENCE_S:
                    return 1
                self._report()
        except TimeoutError:  # the wire to the launcher is cut
            return 1
        finally:
            if self._cell:
                self._cell.end(0.0)
            self._remove_cell()

    def _wait(self) -> list[Any]:
        """Wait until there is something to do. Returns the descriptors that can be read."""
        reading: list[Any] = [self._reader.descriptor]
        timeout_s = BEAT_SECONDS if self._launcher_beats else None
        if self._cell:
            if self._cell.descriptor is not None:
                reading.append(self._cell.descriptor)
            if self._cell.sends_files or self._cell.descriptor is None:
                timeout_s = PAUSE_SECONDS
        if self._probe:
            reading += self._probe.sockets
        writing = []
        if self._writer.waiting_bytes:
            writing.append(self._writer.descriptor)
        readable = wait_readable(reading, timeout_s, writing)
        if self._probe:
            self._probe.answer()
        return readable

    def _send(self, event: Event, **content: Any) -> None:
        self._writer.send({"say": event.value, **content})

    def _report(self) -> None:
        cell = self._cell
        if cell:
            # Before the files are read: what has ended has written all.
            status, states = cell.status(), cell.changed_states()
            if self._writer.waiting_bytes < MOST_WAITING_BYTES or status is not None:
                for chunk in cell.changed_files():
                    self._send(Event.FILE, cell=cell.token, **chunk)
            if states:
                self._send(Event.STATES, cell=cell.token, states=states)
            if status is not None:
                self._send(Event.ENDED, cell=cell.token, status=status, ranks=cell.rank_ends())
                self._remove_cell()
        self._send_beat()

    def _send_beat(self) -> None:
        if self._launcher_beats and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            self._send(Event.BEAT)
        self._writer.flush()

    def _remove_cell(self) -> None:
        if self._cell:
            self._cell.remove()
            self._cell = None

    # Each command of the launcher.

    def _run(self, message: Mapping[str, Any]) -> None:
        try:
            self._send(Event.BUSY, for_s=IMPORT_SECONDS)
            self._import_for(Cell.from_dict(message["asked"]))
            from benchmarks.rank.cell_process import RendezvousAddress, listen

            meeting = RendezvousAddress(**message["meeting"])
            listener = listen(meeting.address) if meeting.host == 0 else None
            own = self._reader.descriptor, self._writer.descriptor
            self._cell = cell = RunningCell(message, own, meeting, listener, self._send_beat)
            self._send(Event.STARTED, cell=cell.token, pid=cell.pid)
            if listener and meeting.hosts > 1:
                # Where they meet, before the other hosts are asked to run.
                port = listener.getsockname()[1]
                self._send(Event.MEETING, cell=cell.token, port=port)
            if listener:
                listener.close()
        except OSError as error:
            if self._cell:
                self._cell.end(0.0)
            self._remove_cell()
            self._send(Event.FAILED, cell=message["cell"], why=because(error))

    def _stacks(self, message: Mapping[str, Any]) -> None:
        if self._cell and self._cell.token == message["cell"]:
            processes.ask_for_stacks(self._cell.token, self._cell.pids(message["numbers"]))

    def _stop(self, message: Mapping[str, Any]) -> None:
        survivors = []
        if self._cell and self._cell.token == message["cell"]:
            self._send(Event.BUSY, for_s=float(message["grace_s"]) + END_SECONDS)
            survivors = self._cell.end(float(message["grace_s"]))
            self._report()
        self._send(Event.STOPPED, cell=message["cell"], survivors=survivors)

    def _beat(self, message: Mapping[str, Any]) -> None:
        """Take a heartbeat of the launcher: `serve` notes when."""

    def _look(self, message: Mapping[str, Any]) -> None:
        """Send the description of this host.

        A subprocess collects it, so that ranks do not inherit its imports.
        """
        command = [sys.executable, "-m", "launch.machine.facts", str(message["device"])]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DESCRIBE_SECONDS)
            output = done.stdout if done.returncode == 0 else done.stderr
        except (OSError, subprocess.SubprocessError) as error:
            output = str(error).encode()
        self._send(Event.LOOKED, said=output.decode(errors="replace"))

    def _listen(self, message: Mapping[str, Any]) -> None:
        """Listen at addresses of this host, for others to try them; without any, no longer."""
        if self._probe:
            self._probe.close()
        listeners = ProbeListeners(message["addresses"], str(message["word"]))
        self._probe = listeners if message["addresses"] else None
        self._send(Event.LISTENING, ports=listeners.ports, refused=listeners.refused)

    def _reach(self, message: Mapping[str, Any]) -> None:
        answers = try_connect(message["ports"], str(message["word"]))
        self._send(Event.REACHED, found=answers)

    def _time(self, message: Mapping[str, Any]) -> None:
        """Answer with this host's clock at once: the launcher sets the ranks' by it (RFC 5905)."""
        self._launcher_beats = True
        self._send(Event.TIME, sent=message["sent"], monotonic=time.monotonic())

    def _prepare(self, message: Mapping[str, Any]) -> None:
        self._import_for(Cell.from_dict(message["asked"]))

    def _import_for(self, cell: Cell) -> None:
        """Import what a cell needs of ours and of known libraries, but no user's own code.

        An import that fails here fails in a rank too, and the rank reports it.
        """
        gc.disable()
        with contextlib.suppress(Exception):
            for group in ("benchmark", "strategy"):
                if group in cell.declared and cell.target(group).startswith(OURS):
                    locate(cell.target(group))
            if cell.trains:
                import torch

                # The imports of the first optimizer take a second.
                torch.optim.SGD([torch.zeros(1, requires_grad=True)])
            if cell.model.library in LIBRARIES:
                __import__(cell.model.library)
            if cell.compiled:
                _import_compiler()
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            gc.freeze()  # a collection in a rank would copy every page of what is imported
        gc.enable()


def _import_compiler() -> None:
    """Import what torch.compile needs, and hash the files of torch and Triton for its caches.

    Each rank would need seconds for it. Some versions of torch ask here whether there is a GPU:
    they are told to ask NVML, for CUDA does not survive a fork (torch.cuda.is_available).
    """
    before = os.environ.get(ASK_NVML)
    os.environ[ASK_NVML] = "1"
    try:
        for name in COMPILER:
            importlib.import_module(name)
        sys.modules["torch._inductor.codecache"].torch_key()
        triton = sys.modules["torch._inductor.runtime.triton_compat"]
        if triton.HAS_TRITON:
            triton.triton_key()
    finally:
        if before is None:
            del os.environ[ASK_NVML]
        else:
            os.environ[ASK_NVML] = before


class RunningCell:
    """The forked process of a cell, and on another host than the launcher's its scratch folder."""

    def __init__(
        self,
        message: Mapping[str, Any],
        of_agent: Iterable[int],
        meeting: "RendezvousAddress",
        listener: socket.socket | None,
        beat: Callable[[], None],
    ) -> None:
        """Fork it. `of_agent` are the agent's descriptors; `beat` is called now and then.

        Raises OSError: there is no room for its files, or for a process.
        """
        self.token = str(message["cell"])
        self._scratch: Scratch | None = None
        if message["folder"]:
            self._folder = CellFolder(Path(message["folder"]))
        else:
            self._scratch = Scratch.make(self.token, message["files"])
            self._folder = CellFolder(self._scratch.folder)
        self._numbers = list(message["numbers"])
        self._states: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._status: int | None = None
        self._is_asked_to_end = False
        self._sampling: SamplingProcess | None = None
        if message.get("sampled") is not None:
            beginning = str(message["environment"]["set"][CLOCK_VARIABLE])
            environment = os.environ | {CLOCK_VARIABLE: beginning}
            uuids = message["sampled"]
            self._sampling = SamplingProcess(self._folder, self.token, uuids, environment)
            self._sampling.start(beat)
        try:
            self.pid = os.fork()
        except OSError:
            if self._sampling:
                self._sampling.end()
            self.remove()
            raise
        if self.pid == 0:
            if self._sampling:
                self._sampling.let_go()
            from benchmarks.rank.cell_process import be_cell_process

            keep: Any = functools.partial(write_json, self._folder.failures)
            if self._scratch:
                keep = self._scratch.keep_ends
            be_cell_process(message, self._folder, of_agent, meeting, listener, keep)
        try:
            self.descriptor: int | None = os.pidfd_open(self.pid)  # readable when the process ends
        except OSError:  # the kernel or a container has no such call
            self.descriptor = None

    @property
    def sends_files(self) -> bool:
        """Whether the launcher is sent the files of this cell."""
        return self._scratch is not None

    def status(self) -> int | None:
        """Return the exit status as subprocess has it; None while the process runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
                if self.descriptor is not None:
                    os.close(self.descriptor)
                    self.descriptor = None
                if self._sampling:
                    self._sampling.end()  # before the last files are read
        return self._status

    def rank_ends(self) -> dict[str, Any]:
        """Return how ranks ended that should not have; nothing where the launcher reads."""
        if not self._scratch or not self._status:
            return {}
        why = ""
        if is_full(self._scratch.folder):
            why = f"there is no space left in {self._scratch.folder.parent}"
        elif self._status < 0 and not self._is_asked_to_end:
            why = f"what starts the ranks was ended by {processes.signal_name(self._status)}"
        ends = self._scratch.kept_ends()
        if why and not ends:  # the first rank here stands for all
            ends = {str(self._numbers[0]): {"status": None, "time": now()}}
        for end in ends.values():
            end["why"] = why
        return ends

    def changed_files(self) -> Iterator[dict[str, Any]]:
        """Yield what is new in the files since the last call; nothing where the launcher reads."""
        if self._scratch:
            yield from self._scratch.changed_files()

    def pids(self, numbers: Iterable[int]) -> list[int]:
        """Return the ids of processes of the cell, as far as they have reported."""
        reported = self._reported()
        return [reported[rank] for rank in numbers if rank in reported]

    def changed_states(self) -> dict[str, str]:
        """Return the processes' states that changed; nothing where the launcher looks itself."""
        if not self._scratch:
            return {}
        states = {str(rank): processes.state(pid) for rank, pid in self._reported().items()}
        states["agent"] = processes.state(self.pid)
        changed = dict(states.items() - self._states.items())
        self._states |= changed
        return changed

    def end(self, grace_s: float) -> list[int]:
        """End every process of the cell. Return the ids of those that survive SIGKILL."""
        self._is_asked_to_end = self.status() is None
        survivors = processes.end(self.token, grace_s)
        processes.remove_shared_memory(self.token)
        deadline = time.monotonic() + LAST_SECONDS
        while self.status() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return survivors

    def remove(self) -> None:
        """Remove the scratch folder."""
        if self._scratch:
            self._scratch.remove()

    def _reported(self) -> dict[int, int]:
        """Return the ids of the processes by number, from the first line that each wrote."""
        for rank in self._numbers:
            if rank not in self._pids:
                first = next(iter(read_lines(self._folder.rank_lines(rank))), {})
                if isinstance(first.get("pid"), int):
                    self._pids[rank] = first["pid"]
        return self._pids


def main() -> int:
    """Serve until the input ends. Returns the exit status."""
    environment = with_absolute_path(os.environ) | FROM_THE_BEGINNING
    if environment != dict(os.environ):  # started by ssh, srun or another command
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.rank.host_agent"], environment)
    if STARTER in os.environ:
        die_with_parent()
    events = os.dup(1)
    reader = Reader(os.dup(0), MOST_BYTES)
    os.dup2(2, 1)  # what a library prints is not a message
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # So that the cell is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone
        return HostAgent(reader, Writer(events)).serve()
    return 1


if __name__ == "__main__":
    os._exit(main())  # Python's own end takes torch apart, for which the launcher would wait
