"""Wait for descriptors. select.select cannot take those from 1,024 on, which a process with many files open has."""

import selectors
from collections.abc import Iterable
from typing import Any


def ready(reading: Iterable[Any], timeout_s: float | None, writing: Iterable[Any] = ()) -> list[Any]:
    """Return which of `reading` can be read once one of all can be used; none after so many seconds.

    A pipe whose other end is closed can be read: that is how its end is seen.

    Raises:
        ValueError: one of them is closed.
    """
    with selectors.PollSelector() as waiting:
        for one in reading:
            waiting.register(one, selectors.EVENT_READ)
        for one in writing:
            waiting.register(one, selectors.EVENT_WRITE)
        return [key.fileobj for key, _ in waiting.select(timeout_s) if key.events & selectors.EVENT_READ]
