"""Start a script as a rank, follow what it does, and end it once enough of its steps are timed.

This process is the rank that the agent knows. The script is its child, with the environment of a
rank under torchrun; instruments.py writes the script's steps to the same raw lines.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from benchmarks.agent import processes
from benchmarks.rank.ranks import Reporter
from benchmarks.rank.worker import MOST_CHARACTERS, PR_SET_PDEATHSIG, gpu_index
from benchmarks.record import Kind, read_line
from benchmarks.record.folder import pack
from benchmarks.script import derive
from benchmarks.script.request import NONE, PYTHON_FILE, RANKS, TORCHRUN
from conf.cell import Cell
from conf.host import SHARED_GPUS, TOKEN
from conf.secrets import without_secrets

HOOKS = Path(__file__).parent / "hooks"
SETTINGS = "RINGSIDE_SCRIPT"
LOOK_SECONDS = 0.1  # between two looks at the script
IMPORT_SECONDS = 60.0  # without torch after so long, it is taken for a program without
GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL
NSYS_GRACE_SECONDS = 30.0  # else the last steps are lost
# What an agent's rank has in its environment: a launcher of the script's own makes its own.
OF_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
LAST_ERROR = re.compile(r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*): (.*)$")
LIBC = ctypes.CDLL(None)


class ScriptFailed(Exception):
    """The script ended, or did something, so that nothing can be measured."""

    def __init__(self, message: str, kind: str = "ScriptFailed") -> None:
        super().__init__(message)
        self.kind = kind  # the type of the exception that ended the script


def run(cell: Cell, number: int, reporter: Reporter, origin: dict[str, Any]) -> None:
    """Run a cell's script as one of its ranks. `origin` goes into the first line of the rank.

    An error ends this process, after a line that says why.
    """
    try:
        ScriptRank(cell, number, reporter, origin).run()
    except ScriptFailed as error:
        message = without_secrets(str(error)[:MOST_CHARACTERS])
        reporter.line(Kind.ERROR, type=error.kind, message=message)
        os._exit(1)
    if number == 0:
        reporter.line(Kind.RESULT)


class ScriptRank:
    """One rank of a script, as its parent sees it."""

    def __init__(self, cell: Cell, number: int, reporter: Reporter, origin: dict[str, Any]) -> None:
        self._cell, self._number, self._reporter, self._origin = cell, number, reporter, origin
        self._options = cell.benchmark
        self._rate = re.compile(self._options["rate"] or "(?!)")
        folder = reporter.folder
        self._lines = Tail(folder.rank_lines(number))
        self._log = Tail(folder.rank_log(number))
        # A launcher of the script's own is started by the first rank of a host.
        self._first: Tail | None = None
        self._is_elastic = self._options["launcher"] == TORCHRUN
        self._store: PrefixStore | None = None
        self._has_voted = False
        local = int(os.environ["LOCAL_RANK"])
        if self._is_elastic:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = PrefixStore("ringside", TCPStore(address, port, is_master=False))
        elif local:
            self._first = Tail(folder.rank_lines(number - local))
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: int | None = None  # process that answers SIGUSR1 with its stacks
        self._started_s = time.monotonic()
        self._has_begun = self._has_steps = False  # the first line is written; steps were seen
        # A pass after the timed one, in which some steps are traced and no rate is measured.
        self._traces = bool(self._options.get("traced"))
        self._has_traced = False
        self._phase = "profiled pass" if self._traces else "build"
        self._ms: list[float] = []
        self._has_enough_steps = False  # judged when steps come, not at each look
        self._printed_s: list[float] = []  # monotonic, of each rate
        self._last_error: tuple[str, str] | None = None

    def run(self) -> None:
        """Run the script until it ends, or until all ranks have enough of it."""
        self._pass_on_stack_requests()
        if self._first is None:
            self._start()
        status: int | None = None
        is_enough = False
        # All ranks that step, or the one that prints a rate.
        needed = {True: self._cell.world_size, False: 1}
        if self._traces:
            needed[False] = self._cell.world_size
        while status is None and not is_enough:
            status = self._wait()
            self._read_log()
            self._read_lines()
            if status is not None or time.monotonic() - self._started_s > IMPORT_SECONDS:
                self._begin({})
            is_enough = self._has_enough() and self._vote() >= needed[bool(self._ms)]
        self._vote()
        self._begin({})
        # After the last vote a script may fail because a peer of it was ended.
        if status is None:
            status = self._end()
        elif self._child is not None and not is_enough:
            self._refuse_early_end(status)
        self._reporter.line("ended", status=status, by_itself=not is_enough)

    def _start(self) -> None:
        command = shlex.split(self._options["run"])
        if command[0].endswith(PYTHON_FILE):
            command.insert(0, sys.executable)
        if self._options["launcher"] not in (TORCHRUN, NONE):
            ranks = os.environ["LOCAL_WORLD_SIZE"]
            launcher = self._options["launcher"].replace(RANKS, ranks)
            command = shlex.split(f"{launcher} {self._options['run']}")
        environment = dict(os.environ)
        if not self._is_elastic:
            for name in filter(OF_RANKS.fullmatch, os.environ):
                del environment[name]
        elif SHARED_GPUS in environment:  # scripts take LOCAL_RANK for the number of their GPU
            environment["LOCAL_RANK"] = str(gpu_index(self._cell, self._number))
        path = os.pathsep.join(filter(None, [str(HOOKS), environment.get("PYTHONPATH")]))
        lines = self._reporter.folder.rank_lines(self._number).with_name("{rank}.jsonl")
        settings: dict[str, Any] = {"lines": str(lines)}
        if self._traces:
            trace_file = str(self._trace_file()) if self._cell.profiler == "torch" else None
            settings["trace"] = {"path": trace_file, **self._cell.profiler_options}
        try:
            self._child = subprocess.Popen(
                command,
                cwd=self._options["folder"],
                env={**environment, "PYTHONPATH": path, SETTINGS: json.dumps(settings)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            )
        except OSError as error:
            raise ScriptFailed(f"{command[0]} cannot be started: {error.strerror}") from None

    def _trace_file(self) -> Path:
        return self._reporter.folder.path / f"rank{self._number}.json"

    def _pass_on_stack_requests(self) -> None:
        """Have the script, not this process, answer a request for stacks."""

        def ask(*_: Any) -> None:
            if self._answers is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._answers, signal.SIGUSR1)

        faulthandler.unregister(signal.SIGUSR1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR1, ask)

    def _wait(self) -> int | None:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.wait(LOOK_SECONDS)
            return None
        time.sleep(LOOK_SECONDS)
        assert self._first is not None
        for text in self._first.new_lines():
            line = read_line(text)
            if line is not None and line["kind"] in ("ended", Kind.ERROR):
                return int(line.get("status", 0))
        return None

    def _begin(self, versions: dict[str, str]) -> None:
        if not self._has_begun:
            self._has_begun = True
            facts = {"script": self._options["run"], "git": git_commit(self._options["folder"])}
            self._reporter.line(
                Kind.START, rank=self._number, **self._origin, versions=versions, **facts
            )
            self._reporter.phase(self._phase)

    def _read_log(self) -> None:
        for data in self._log.new_lines():
            text = data.decode(errors="replace")
            error = LAST_ERROR.match(text)
            if error:
                self._last_error = (error[1], error[2])
            for match in self._rate.finditer(text):
                try:
                    value, moment = float(match[1].replace(",", "")), time.monotonic()
                except ValueError:
                    raise ScriptFailed(
                        f"benchmark.rate: {match[1]!r:.50} is not a number"
                    ) from None
                self._begin({})
                self._printed_s.append(moment)
                self._reporter.line("printed", value=value, iterations=len(self._printed_s))
                if not self._has_steps:
                    lasted_s = moment - self._printed_s[0]
                    self._enter(lasted_s >= self._options["warmup_min_seconds"])

    def _read_lines(self) -> None:
        for text in self._lines.new_lines():
            line = read_line(text) or {"kind": ""}
            if line["kind"] == "attached":
                if line["stacks"] and self._answers is None:
                    self._answers = line["process"]
                self._begin(line["versions"])
            elif line["kind"] == "script_device":
                given = os.environ.get("CUDA_VISIBLE_DEVICES")
                if line["visible"] != given:
                    raise ScriptFailed(
                        f"the script sets CUDA_VISIBLE_DEVICES={line['visible']} itself; expected "
                        f"one that leaves it at {given!r}, which gpus= decides"
                    )
            elif line["kind"] == "steps":
                stated = self._options["samples"]
                counted = line["samples"][-1:]
                if stated and counted and counted[0] not in (0, stated):
                    raise ScriptFailed(
                        f"benchmark.samples={stated}: a step of rank {self._number} has "
                        f"{counted[0]} in its batches; expected {counted[0]} or auto"
                    )
                self._has_steps = True
                self._ms += line["ms"]
                self._has_enough_steps = derive.is_enough(self._ms, self._options)
                if not self._traces:
                    self._enter(derive.warm_up_end(self._ms, self._options)[1])
            elif line["kind"] == "traced":
                if self._cell.profiler == "torch":
                    pack(self._trace_file())
                self._has_traced = True

    def _enter(self, has_warmed_up: bool) -> None:
        """Begin the phase in which the script is now, unless it is in that or a later one."""
        phase = "timed" if has_warmed_up else "warm-up"
        if self._phase not in (phase, "timed"):
            self._phase = phase
            self._reporter.phase(phase)

    def _has_enough(self) -> bool:
        least_s = self._options["warmup_min_seconds"] + self._options["max_seconds"]
        has_printed = bool(self._printed_s) and time.monotonic() - self._printed_s[0] >= least_s
        if self._traces:
            if has_printed and not self._has_steps:
                raise ScriptFailed("no step of a torch optimizer was seen, so none can be traced")
            return self._has_traced
        if self._options["whole"]:
            return False
        if self._ms:
            return self._has_enough_steps
        return has_printed

    def _vote(self) -> int:
        """Say once to all ranks that this one has enough; return how many have."""
        if self._store is None:  # of a launcher of the script's own one rank decides
            return self._cell.world_size
        count: int = self._store.add("enough", int(not self._has_voted))
        self._has_voted = True
        return count

    def _end(self) -> int | None:
        if self._child is None:
            return None
        grace_s = GRACE_SECONDS
        if self._traces and self._cell.profiler == "nsys":
            grace_s = NSYS_GRACE_SECONDS
        for number, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._child.wait(seconds)
        return None

    def _refuse_early_end(self, status: int) -> None:
        """Refuse a script that failed, or ended before there was anything to measure."""
        if status < 0:
            name = processes.signal_name(status)
            raise ScriptFailed(f"the script was ended by {name}", name)
        if status:
            kind, message = self._last_error or ("ScriptFailed", f"exit status {status}")
            raise ScriptFailed(message, kind)
        for process in processes.of(os.environ[TOKEN]):
            with contextlib.suppress(psutil.Error):
                if process.ppid() == 1 and SETTINGS in process.environ():
                    raise ScriptFailed(
                        f"the script ended and left process {process.pid} behind; expected one "
                        "that stays until its work is done (no daemon)"
                    )
        if self._traces and not self._has_traced:
            options = self._cell.profiler_options
            raise ScriptFailed(
                f"the script ended before {options['warmup_steps']} steps and {options['steps']} "
                "traced ones; expected more steps, or fewer by profiler.steps"
            )
        rate, steps = self._options["rate"], len(self._ms)
        if self._printed_s or steps >= derive.FEWEST_STEPS:
            return
        if self._has_steps or not rate:
            raise ScriptFailed(
                f"the script ended after {steps} timed steps of a torch optimizer; expected at "
                f"least {derive.FEWEST_STEPS}, or benchmark.rate for a script without"
            )
        if self._number == 0:  # others need not print
            raise ScriptFailed(f"benchmark.rate={rate}: no line that the script printed has it")


class Tail:
    """A growing file, of which each line is read once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def new_lines(self) -> list[bytes]:
        """Return the lines that were finished since the last call; a progress bar's count too."""
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + self._file.read())
        return lines


def git_commit(folder: str) -> str:
    """Return the commit of the script's folder, with `-dirty` where files differ; else ''."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0)
        return done.stdout.strip()
    return ""
