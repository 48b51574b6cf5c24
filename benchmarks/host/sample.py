"""Sample a host around a cell in a process of its own, which the host's agent starts and ends.

    python -m benchmarks.host.sample FOLDER TOKEN [UUID …]

It says `ready` after the first sample, before which no rank may start, and leaves at the end of its standard input.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.host.gpu_samples import Sampler
from benchmarks.host.scratch import remove_left
from benchmarks.host.waiting import ready
from benchmarks.record import CellFolder

ROOT = Path(__file__).parent.parent.parent
READY_SECONDS = 15.0  # until the first sample: GPUs may take some to settle
END_SECONDS = 8.0  # for the last one
POLL_SECONDS = 1.0
END = b"end"  # said by an agent that lives
GONE_SECONDS = 2.0  # for an agent that was killed to be gone: its lock may be free after its end of our input is closed


class SamplingProcess:
    """Samples this host in another process. Without samples a cell is measured all the same."""

    def __init__(self, folder: CellFolder, token: str, uuids: Sequence[str], environment: Mapping[str, str]) -> None:
        """`token` marks the processes of the cell; CPU workers have no `uuids`; `environment` has the sweep's clock."""
        self._command = [sys.executable, "-m", "benchmarks.host.sample", str(folder.path), token, *uuids]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, meanwhile: Callable[[], None]) -> None:
        """Start it, and wait for the first sample. What the calling process has started is the cell's own.

        `meanwhile` is called now and then: GPUs may take seconds to settle, and a silent agent is lost.
        """
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            assert self._process.stdout is not None
            until = time.monotonic() + READY_SECONDS
            while not ready([self._process.stdout], POLL_SECONDS) and time.monotonic() < until:
                meanwhile()

    def let_go(self) -> None:
        """Close its pipes in a fork of the calling process: while a fork holds them, the end of that process is not seen."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                pipe.close()  # type: ignore[union-attr]

    def end(self) -> None:
        """Have it take the last sample and leave."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(END)
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._process = None


def main(folder: str, token: str, *uuids: str) -> int:
    """Sample until the input ends or the process that started this one is gone. Returns the exit status."""
    agent, ended = os.getppid(), False
    try:
        with Sampler(CellFolder(Path(folder)), uuids, token, agent):
            print("ready", flush=True)
            while not ended and os.getppid() == agent:
                ended = bool(ready([sys.stdin], POLL_SECONDS))
    except OSError:
        return 1  # the disk is full, or the folder is gone: the checks say that there are no samples
    finally:
        if os.getppid() != agent or (ended and not os.read(0, len(END))):
            _when_gone(agent)
    return 0


def _when_gone(agent: int) -> None:
    """Remove what an agent left that was killed, once it is gone."""
    until = time.monotonic() + GONE_SECONDS
    while os.getppid() == agent and time.monotonic() < until:
        time.sleep(0.01)
    remove_left()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
