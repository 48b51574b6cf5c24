"""What one rank tells the launching process: where it is, that it lives, and every sample, as lines of its own file."""

import time
from pathlib import Path
from typing import Any

from benchmarks.clock import Block
from benchmarks.record import Lines

# Seconds between signs of life: far below any deadline, far above the cost of a line.
BEAT_SECONDS = 1.0


class Reporter:
    """Appends to `<cell>/ranks/<rank>.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
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

    def beat(self) -> None:
        """One more iteration was enqueued. Called inside timed windows: writes at most once a second, without fsync."""
        self._iterations += 1
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_SECONDS
            self._lines.write("beat", time.time(), phase=self._phase, iterations=self._iterations)

    def block(self, purpose: str, block: Block, images: int) -> None:
        """The samples of a window; `images` counts those of its counted iterations."""
        self.line(
            "block",
            purpose=purpose,
            ms=block.ms,
            lead_in_ms=block.lead_in_ms,
            launch_ms=block.launch_ms,
            device_ms=block.device_ms,
            host_ms=block.host_ms,
            images=images,
        )
