"""The file of lines that a rank writes for the launching process: its phase, signs of life, and every sample."""

import os
import time
from typing import Any

from benchmarks.rank.result import Block
from benchmarks.record import CellFolder, Kind, Lines, own_files
from benchmarks.record.clock import now

# Seconds between signs of life: far below any deadline, far above the cost of a line.
BEAT_SECONDS = 1.0
COUNT_FORMAT = b"%20d"  # of one width, so that a write replaces the number before


class Reporter:
    """Appends to `<cell>/ranks/<rank>.jsonl`."""

    def __init__(self, folder: CellFolder, rank: int) -> None:
        """Open the lines of a rank, in the folder of its cell or of an untimed pass. Raises OSError."""
        self._lines = Lines(folder.rank_lines(rank))
        self.folder = folder
        # Beats are too far apart to show which of several stopped ranks is behind; this file always holds the count.
        self._count = own_files.open_own(folder.rank_count(rank), append=False)
        os.pwrite(self._count, COUNT_FORMAT % 0, 0)
        self._phase = "start"
        self._iterations = 0
        self._next_beat = 0.0

    def line(self, kind: str, **content: Any) -> None:
        """Write one line. It is on disk when this returns."""
        self._lines.write(kind, now(), **content)
        self._lines.sync()

    def phase(self, name: str) -> None:
        """Begin a phase. The terminal shows its name, and so does the message of a hang."""
        self._phase = name
        self.line(Kind.PHASE, phase=name)

    def beat(self, iterations: int = 1) -> None:
        """Count iterations that were enqueued. Called inside timed windows: at most one line a second, without fsync."""
        self._iterations += iterations
        if iterations:
            os.pwrite(self._count, COUNT_FORMAT % self._iterations, 0)
        moment = time.monotonic()
        if moment >= self._next_beat:
            self._next_beat = moment + BEAT_SECONDS
            self._lines.write(Kind.BEAT, now(), phase=self._phase, iterations=self._iterations)

    def output(self, text: str) -> None:
        """Write what the benchmark prints. The launching process shows it when the cell has ended. One rank calls it."""
        own_files.write_whole(self.folder.output, f"{text}\n".encode())

    def block(self, purpose: str, block: Block, images: int, **facts: Any) -> None:
        """Write the samples of a window, and `facts` of what was timed; `images` (or samples) are those of its counted steps."""
        self.line(
            Kind.BLOCK,
            purpose=purpose,
            ms=block.ms,
            lead_in_ms=block.lead_in_ms,
            launch_ms=block.launch_ms,
            device_ms=block.device_ms,
            host_ms=block.host_ms,
            images=images,
            **facts,
        )
