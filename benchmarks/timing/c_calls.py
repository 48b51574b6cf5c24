"""Calls of C functions, one after the other, in a loop of C: from Python each would take longer than NCCL needs to enqueue it.

The loop is compiled when it is first needed. Where that fails, for want of a compiler, Python makes the calls; `made_by` tells
which.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Arguments are integers and addresses, each in a register or a slot of its own: in the calling conventions of Linux on x86-64
# and Arm, arguments that a function does not take do no harm.
ARGUMENTS = 8
SOURCE = """
struct call { int (*function)(long, long, long, long, long, long, long, long); long given[8]; };

/* Until one returns other than 0; returns how many returned 0. */
long make(const struct call *calls, long count, int *status)
{
    for (long n = 0; n < count; n++) {
        const long *a = calls[n].given;
        if ((*status = calls[n].function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7])))
            return n;
    }
    return count;
}
"""
COMPILE_SECONDS = 60


@dataclass(frozen=True)
class CCall:
    """One call of a function that returns 0, or what is wrong."""

    name: str
    function: int  # its address
    arguments: tuple[int, ...]  # at most eight


class InOrder:
    """Calls that are made one after the other when this is called."""

    def __init__(self, calls: Sequence[CCall], words: Callable[[int], str]) -> None:
        """`words` says what a function meant that returned other than 0."""
        self.calls, self._words = tuple(calls), words
        self._status = ctypes.c_int(0)
        loop = compiled_loop()
        made = [_Call(one.function, (ctypes.c_long * ARGUMENTS)(*one.arguments)) for one in calls]
        if loop is not None:
            self._make = functools.partial(loop, (_Call * len(made))(*made), len(made), ctypes.byref(self._status))
        else:
            self._make = functools.partial(
                self._from_python, [(_FUNCTION(one.function), tuple(one.given)) for one in made]
            )

    def __call__(self) -> None:
        """Make them. Raises RuntimeError at the first that fails; the others are not made."""
        done = self._make()
        if done < len(self.calls):
            raise RuntimeError(f"{self.calls[done].name}: {self._words(self._status.value)}")

    def _from_python(self, calls: list[tuple[Any, tuple[int, ...]]]) -> int:
        for number, (function, arguments) in enumerate(calls):
            if status := function(*arguments):
                self._status.value = status
                return number
        return len(calls)


def address(library: Any, name: str) -> int:
    """Of a function of a library that ctypes has."""
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found


def made_by() -> str:
    """C, or Python where the loop cannot be compiled."""
    return "C" if compiled_loop() is not None else "Python"


@functools.cache
def compiled_loop() -> Any:
    """`make` of the source above; None where it cannot be compiled."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "enqueue.c", Path(folder) / "enqueue.so"
        source.write_text(SOURCE)
        command = [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            make = ctypes.CDLL(str(library)).make
        except (OSError, subprocess.SubprocessError):
            return None
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p), ctypes.c_long
    return make


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * ARGUMENTS)


class _Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("given", ctypes.c_long * ARGUMENTS))
