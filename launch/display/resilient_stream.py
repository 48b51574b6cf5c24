"""An output that measuring outlives: a closed pipe or a lost terminal ends printing only."""

import io
from typing import TextIO

from benchmarks.record.safe_text import close_quietly as close_quietly
from benchmarks.record.safe_text import forgive


class ResilientStream(io.TextIOBase):
    """Writes to a stream until that fails once; what is written later is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        """`stream` is None where the process was started without one."""
        forgive(stream)
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the stream. Raises OSError where there is none."""
        if self._stream is None:
            raise OSError("the output is gone")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            if self._stream is not None:
                self._stream.write(text)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._stream = None
        return len(text)

    def flush(self) -> None:
        """Hand over what was written, or drop it."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError):
            self._stream = None
