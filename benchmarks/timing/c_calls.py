"""Make a prepared list of C calls from a compiled loop.

One call from Python takes longer than NCCL needs to enqueue an operation. The loop is compiled when
it is first needed. If there is no compiler, Python makes the calls; `made_by` says which.
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

# Every call passes eight integers or addresses. In the calling conventions of Linux on x86-64 and
# Arm each has a register or a stack slot of its own, so that arguments which a function does not
# take do no harm.
ARGUMENTS = 8
SOURCE = """
struct call { int (*function)(long, long, long, long, long, long, long, long); long given[8]; };

/* Make calls until one does not return 0. Returns how many returned 0. */
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
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_long] * ARGUMENTS)


class _Call(ctypes.Structure):
    _fields_ = (("function", ctypes.c_void_p), ("given", ctypes.c_long * ARGUMENTS))


@dataclass(frozen=True)
class CCall:
    """One call of a function that returns 0 or an error code."""

    name: str
    function: int  # its address
    arguments: tuple[int, ...]  # at most ARGUMENTS


class InOrder:
    """A list of calls. Calling this makes them one after the other."""

    def __init__(self, calls: Sequence[CCall], message_of: Callable[[int], str]) -> None:
        """`message_of` turns an error code into a message."""
        self.calls, self._message_of = tuple(calls), message_of
        self._status = ctypes.c_int(0)
        prepared = (_Call * len(calls))()
        for slot, call in zip(prepared, calls, strict=True):
            slot.function = call.function
            slot.given = (ctypes.c_long * ARGUMENTS)(*call.arguments)
        loop = compiled_loop()
        if loop is not None:
            status = ctypes.byref(self._status)
            self._make = functools.partial(loop, prepared, len(prepared), status)
        else:
            functions = [(_FUNCTION(slot.function), tuple(slot.given)) for slot in prepared]
            self._make = functools.partial(self._from_python, functions)

    def __call__(self) -> None:
        """Make the calls. Raises RuntimeError: a call failed; those after it are not made."""
        done = self._make()
        if done < len(self.calls):
            message = self._message_of(self._status.value)
            raise RuntimeError(f"{self.calls[done].name}: {message}")

    def _from_python(self, functions: list[tuple[Any, tuple[int, ...]]]) -> int:
        for index, (function, arguments) in enumerate(functions):
            status = function(*arguments)
            if status:
                self._status.value = status
                return index
        return len(functions)


def address(library: Any, name: str) -> int:
    """Return the address of a function in a library that ctypes has loaded."""
    pointer = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert pointer is not None
    return pointer


def made_by() -> str:
    """Return who makes the calls: 'C', or 'Python' if the loop cannot be compiled."""
    return "C" if compiled_loop() is not None else "Python"


@functools.cache
def compiled_loop() -> Any:
    """Return `make` of SOURCE; None if it cannot be compiled."""
    compiler = os.environ.get("CC")
    for name in ("cc", "gcc", "clang"):
        compiler = compiler or shutil.which(name)
    if not compiler:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "c_calls.c", Path(folder) / "c_calls.so"
        source.write_text(SOURCE, encoding="ascii")
        command = [*compiler.split(), "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)
            make = ctypes.CDLL(str(library)).make
        except (OSError, subprocess.SubprocessError):
            return None
    make.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p)
    make.restype = ctypes.c_long
    return make
