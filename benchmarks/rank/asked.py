"""What a process of a cell writes to its log when it is asked where it stands (SIGUSR1), also while its main thread waits.

First the stacks of all threads, by faulthandler, whose handler is C. Then the collective that was begun first and is not
finished, from torch's flight recorder, which records anyway: on a GPU every rank waits for the same device call, and only the
recorder knows in which collective. A thread that sleeps until then answers: nothing happens inside a timed window.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")  # those of NCCL and of gloo; older torch has only the first


def answer() -> None:
    """Answer from now on. Called once, by the main thread, after the log is where errors go."""
    asked, tell = os.pipe()
    os.set_blocking(tell, False)
    # Python's own handler in C writes to the pipe at once; the one given here would run only when the main thread goes on.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(target=_answer, args=(asked,), name="asked", daemon=True).start()


def _answer(asked: int) -> None:
    while number := os.read(asked, 1):
        if number[0] == signal.SIGUSR1:
            with contextlib.suppress(Exception):  # whatever torch has instead of a recorder
                os.write(2, collective_as_stack(_recorded()).encode())


def _recorded() -> list[Mapping[str, Any]]:
    """Return the collectives that torch still knows, in the order in which they were begun."""
    torch_side = sys.modules["torch._C._distributed_c10d"]
    entries: list[Mapping[str, Any]] = []
    for name in RECORDERS:
        if dump := getattr(torch_side, name, None):
            entries += pickle.loads(dump(onlyActive=True))["entries"]  # what this process itself has just packed
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def collective_as_stack(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the first collective that is not finished as faulthandler would write its stack; '' if there is none."""
    for entry in entries:
        if not entry.get("retired") and entry.get("state") != "completed":
            name = entry["profiling_name"].rpartition(":")[2]
            frames = [
                f'  File "{one["filename"]}", line {one["line"]} in {one["name"]}' for one in entry.get("frames", ())
            ]
            return "\n".join([f"Collective {name} (most recent call first):", *frames, ""])
    return ""
