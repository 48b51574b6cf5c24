"""What a process of a cell writes to its log when it is asked where it stands (SIGUSR1), also while its main thread waits.

First the stacks of all threads, by faulthandler, whose handler is C. Then the last collectives and the first that is not
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_COLLECTIVES = 300
WITH_SIZES = ("all_reduce", "broadcast", "reduce")  # every rank gives them tensors of one size
RECORDERS = (
    "_dump_nccl_trace",
    "_dump_fr_trace",
)  # those of NCCL and of gloo; older torch has only the first


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
                recorded = _recorded()
                os.write(2, (last_collectives(recorded) + collective_as_stack(recorded)).encode())


def _recorded() -> list[Mapping[str, Any]]:
    """Return the collectives that torch still knows, in the order in which they were begun."""
    torch_side = sys.modules["torch._C._distributed_c10d"]
    entries: list[Mapping[str, Any]] = []
    for name in RECORDERS:
        if dump := getattr(torch_side, name, None):
            entries += pickle.loads(dump())["entries"]  # what this process itself has just packed
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def collective_as_stack(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the first collective that is not finished as faulthandler would write its stack; '' if there is none."""
    for entry in entries:
        if not entry.get("retired") and entry.get("state") != "completed":
            name = entry["profiling_name"].rpartition(":")[2]
            frames = [
                f'  File "{one["filename"]}", line {one["line"]} in {one["name"]}'
                for one in entry.get("frames", ())
            ]
            return "\n".join([f"Collective {name} (most recent call first):", *frames, ""])
    return ""


def last_collectives(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each of the last collectives: its group, its number there, its name with sizes, and who began it."""
    lines = []
    for entry in entries[-MOST_COLLECTIVES:]:
        if entry.get("is_p2p"):
            continue
        backend, _, name = entry["profiling_name"].rpartition(":")
        sizes = (
            "x".join(str(size) for one in entry["input_sizes"] for size in one)
            if name in WITH_SIZES
            else ""
        )
        callers = (one for one in entry.get("frames", ()) if "/torch/" not in one["filename"])
        caller = next(callers, {"filename": "", "line": 0, "name": ""})
        numbered = f"{backend}.{entry['process_group'][0]} {entry['collective_seq_id']} {name}{sizes and ':'}{sizes}"
        lines.append(
            f'Recorded {numbered} "{caller["filename"]}", line {caller["line"]} in {caller["name"]}\n'
        )
    return "".join(lines)
