"""What one rank tells the launching process: where it is, that it lives, and every sample, as lines of its own file."""

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.record import OUTPUT_NAME, Lines
from benchmarks.timing.clock import Block

# Seconds between signs of life: far below any deadline, far above the cost of a line.
BEAT_SECONDS = 1.0


class Reporter:
    """Appends to `<cell>/ranks/<rank>.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self.folder = path.parent.parent  # of the cell, or of a pass beside its timed one
        # Beats are too far apart to tell which rank of several that stopped was behind; this always holds the count.
        self._count = os.open(path.with_suffix(".count"), os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(self._count, b"%20d" % 0, 0)
        self._phase = "start"
        self._iterations = 0
        self._next_beat = 0.0

    def line(self, kind: str, **content: Any) -> None:
        """One line, on disk when this returns."""
        self._lines.write(kind, time.time(), **content)
        self._lines.sync()

    def phase(self, name: str) -> None:
        """A new phase begins; the terminal shows it, and a hang is told by it."""
        self._phase = name
        self.line("phase", phase=name)

    def beat(self, iterations: int = 1) -> None:
        """So many more iterations were enqueued. Called inside timed windows: a line at most once a second, no fsync."""
        self._iterations += iterations
        if iterations:
            os.pwrite(self._count, b"%20d" % self._iterations, 0)
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._lines.write("beat", time.time(), phase=self._phase, iterations=self._iterations)

    def output(self, text: str) -> None:
        """What the benchmark prints: the launching process shows it when the cell has ended. One rank calls it."""
        (self.folder / OUTPUT_NAME).write_text(text + "\n")

    def block(self, purpose: str, block: Block, images: int, **facts: Any) -> None:
        """Write the samples of a window, with `facts` that tell what was timed; `images` are those of its counted iterations."""
        self.line(
            "block",
            purpose=purpose,
            ms=block.ms,
            lead_in_ms=block.lead_in_ms,
            launch_ms=block.launch_ms,
            device_ms=block.device_ms,
            host_ms=block.host_ms,
            images=images,
            **facts,
        )
