"""An output that measuring outlives: a closed pipe, a full disk or a lost terminal ends the printing and nothing else."""

import io
from typing import TextIO

from benchmarks.record.visible import close_quietly as close_quietly
from benchmarks.record.visible import forgive


class LastingOutput(io.TextIOBase):
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
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Hand over what was written, or drop it."""
        self._try("flush")

    def _try(self, method: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except (OSError, ValueError):  # ValueError: the stream was closed
            self._stream = None
