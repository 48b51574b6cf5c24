"""The clock of supervision. Tests have one that they turn themselves."""

from typing import Protocol


class Clock(Protocol):
    """What supervision uses of the module `time`, which is the clock outside tests."""

    def time(self) -> float:
        """Return seconds since 1970."""

    def monotonic(self) -> float:
        """Return seconds that no change of the clock moves."""

    def sleep(self, seconds: float, /) -> None:
        """Let time pass."""
