"""What a process of a cell writes to its log when the supervisor asks for its stacks (SIGUSR1).

faulthandler writes the stacks of all threads: its handler is C and runs while the main thread
waits inside a library. Then come the last collectives and the first unfinished one, from torch's
flight recorder, which records anyway: on a GPU every rank waits for the same device call, and only
the recorder knows in which collective. A sleeping thread reads it, so nothing happens inside a
timed window.
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
# Those of NCCL and of gloo; older torch has only the first.
RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")


def register() -> None:
    """Answer SIGUSR1 from now on. The main thread calls it once, after errors go to the log."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python's own handler in C writes to the pipe at once; the one given here would run only when
    # the main thread goes on.
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, chain=True)
    threading.Thread(target=_write_collectives, args=(reading,), name="stacks", daemon=True).start()


def _write_collectives(signals: int) -> None:
    while True:
        byte = os.read(signals, 1)
        if not byte:
            return
        if byte[0] == signal.SIGUSR1:
            with contextlib.suppress(Exception):  # whatever torch has instead of a recorder
                distributed = sys.modules["torch._C._distributed_c10d"]
                entries: list[Mapping[str, Any]] = []
                for name in RECORDERS:
                    dump = getattr(distributed, name, None)
                    if dump is not None:
                        entries += pickle.loads(dump())["entries"]  # of this process itself
                entries.sort(key=lambda entry: entry["time_created_ns"])
                text = last_collectives(entries) + collective_as_stack(entries)
                os.write(2, text.encode())


def collective_as_stack(entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the first unfinished collective in faulthandler's format; '' if there is none."""
    for entry in entries:
        if entry.get("retired") or entry.get("state") == "completed":
            continue
        name = entry["profiling_name"].rpartition(":")[2]
        lines = [f"Collective {name} (most recent call first):"]
        for frame in entry.get("frames", ()):
            lines.append(f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}')
        return "\n".join([*lines, ""])
    return ""


def last_collectives(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each of the last collectives: group, number, name with sizes, caller."""
    lines = []
    for entry in entries[-MOST_COLLECTIVES:]:
        if entry.get("is_p2p"):
            continue
        backend, _, name = entry["profiling_name"].rpartition(":")
        if name in WITH_SIZES:
            sizes = []
            for shape in entry["input_sizes"]:
                sizes += [str(size) for size in shape]
            if sizes:
                name = f"{name}:{'x'.join(sizes)}"
        caller: Mapping[str, Any] = {"filename": "", "line": 0, "name": ""}
        for frame in entry.get("frames", ()):
            if "/torch/" not in frame["filename"]:
                caller = frame
                break
        group = f"{backend}.{entry['process_group'][0]}"
        lines.append(
            f"Recorded {group} {entry['collective_seq_id']} {name} "
            f'"{caller["filename"]}", line {caller["line"]} in {caller["name"]}\n'
        )
    return "".join(lines)
