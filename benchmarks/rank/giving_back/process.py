"""What a process has beside torch that one cell could leave to the next: read, and set back where it can be. Linux."""

import contextlib
import gc
import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers import prctl

# Variables that torch and what belongs to it set in os.environ by themselves, each where it is first used.
SET_BY_TORCH = (
    "CUDA_MODULE_LOADING", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_", "TORCH_", "KINETO_", "KMP_", "CUBLAS_",
    "TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT",
)  # fmt: skip
# Threads that torch and NVIDIA's libraries start once in a process and keep, by the names that they give them.
KEPT_THREADS = ("pt_autograd", "pt_tcpstore", "pt_inter", "cuda", "NCCL RAS")
COMPILER = "torch._inductor"  # starts threads that wait for the processes in which it compiles
PACKAGES = ("site-packages", "dist-packages")
STANDARD_LIBRARY = Path(os.__file__).parent
# Python's threads that a library starts once and keeps: tqdm's, by which torch.compile shows its progress where tqdm is there.
LIBRARY_THREADS = ("tqdm_monitor",)
HANDLED = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True)
class ProcessState:
    """What code can change in its process."""

    environment: dict[str, str]
    affinity: frozenset[int]
    nice: int
    handlers: dict[int, Any]
    umask: int
    folder: str
    gc: tuple[bool, tuple[int, ...]]
    frozen: int  # objects that garbage collection never looks at
    search_path: tuple[str, ...]
    finders: tuple[Any, ...]
    switch_interval: float
    # What torch and imports change, too: it is set back, and no sign of anything.
    hooks: tuple[Any, ...]
    warnings: tuple[Any, ...]
    timer_slack_ns: int

    @staticmethod
    def now() -> "ProcessState":
        """Return that of this process."""
        return ProcessState(
            environment=dict(os.environ),
            affinity=frozenset(os.sched_getaffinity(0)),
            nice=os.nice(0),
            handlers={number: signal.getsignal(number) for number in HANDLED},
            umask=_umask(),
            folder=_folder(),
            gc=(gc.isenabled(), gc.get_threshold()),
            frozen=gc.get_freeze_count(),
            search_path=tuple(path for path in sys.path if not _is_in_package(path)),
            finders=tuple(one for one in (*sys.meta_path, *sys.path_hooks) if not _is_installed(one)),
            switch_interval=sys.getswitchinterval(),
            hooks=(sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
            warnings=tuple(warnings.filters),
            timer_slack_ns=prctl.timer_slack_ns(),
        )

    def changed(self, now: "ProcessState") -> list[str]:
        """Return what differs in a later state and only code of others changes, in words for people."""
        named = {
            "affinity": "the cores that it may use", "nice": "its priority", "umask": "the umask", "folder": "the folder",
            "gc": "garbage collection", "search_path": "sys.path", "finders": "sys.meta_path or sys.path_hooks",
            "switch_interval": "the switch interval",
        }  # fmt: skip
        found = [words for name, words in named.items() if getattr(self, name) != getattr(now, name)]
        found += ["what garbage collection looks at (gc.freeze)"] if now.frozen > self.frozen else []
        found += [f"the environment variable {name}" for name in _variables(self.environment, now.environment)]
        return found + [
            f"the handler of {getattr(number, 'name', f'signal {number}')}"  # one of real time is a bare number
            for number, handler in now.handlers.items()
            if handler != self.handlers[number] and not (callable(handler) and _is_installed(handler))
        ]

    def set_back(self, now: "ProcessState") -> list[str]:
        """Make this process, whose state is `now`, as it was. Returns what could not be set back."""
        failed: list[str] = []
        for name in now.environment.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in self.environment.items() if os.environ.get(name) != value})
        ways: dict[str, Callable[[], object]] = {
            "affinity": self._set_affinity,
            "nice": lambda: os.nice(self.nice - now.nice),
            "umask": lambda: os.umask(self.umask),
            "folder": lambda: os.chdir(self.folder),
            "search_path": self._set_search_path,
            "switch_interval": lambda: sys.setswitchinterval(self.switch_interval),
            "gc": self._set_gc,
            "warnings": self._set_warnings,
            "hooks": self._set_hooks,
            "timer_slack_ns": lambda: prctl.sleep_within(self.timer_slack_ns),
        }
        for name, way in ways.items():
            if getattr(self, name) != getattr(now, name):
                try:
                    way()
                except OSError:
                    failed.append(name)
        if now.frozen > self.frozen:
            gc.unfreeze()  # all of it: what was frozen before cannot be told from the rest
        for number, handler in self.handlers.items():
            if now.handlers[number] != handler and handler is not None:  # None: not one of Python's
                signal.signal(number, handler)
        return failed

    def _set_affinity(self) -> None:
        for task in Path("/proc/self/task").iterdir():  # threads that a cell started have its cores
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), self.affinity)

    def _set_search_path(self) -> None:
        sys.path[:] = [*self.search_path, *filter(_is_in_package, sys.path)]

    def _set_gc(self) -> None:
        (gc.enable if self.gc[0] else gc.disable)()
        gc.set_threshold(*self.gc[1])

    def _set_warnings(self) -> None:
        filters: Any = warnings.filters  # a list, which the C code of warnings reads
        filters[:] = self.warnings

    def _set_hooks(self) -> None:
        sys.excepthook, sys.unraisablehook, threading.excepthook = self.hooks[:3]
        sys.settrace(self.hooks[3])
        sys.setprofile(self.hooks[4])


def _variables(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return [name for name in names if not name.startswith(SET_BY_TORCH)]


def _is_in_package(path: str) -> bool:
    """Return whether a folder is inside a package that is installed, which added it for itself as setuptools does."""
    return any(parent.name in PACKAGES for parent in Path(path).parents)


def _is_installed(thing: Any) -> bool:
    """Return whether a function, a class or an instance of one is Python's own or an installed package's."""
    file = getattr(sys.modules.get(getattr(thing, "__module__", "")), "__file__", None)
    return file is None or _is_in_package(file) or Path(file).is_relative_to(STANDARD_LIBRARY)


def _umask() -> int:
    found = os.umask(0o077)
    os.umask(found)
    return found


def _folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return "/"


def threads() -> Counter[str]:
    """Return how many threads of each name the kernel knows of this process, without those that libraries start once."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found[(task / "comm").read_text(encoding="utf-8", errors="replace").strip()] += 1
    return Counter({name: count for name, count in found.items() if not name.startswith(KEPT_THREADS)})


def python_threads() -> dict[int, str]:
    """Return the names of Python's own threads, by the kernel's ids, without those that torch's compiler starts."""
    compiling = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    pools = [compiling.pool()] if compiling is not None and compiling.pool.cache_info().currsize else []
    kept = {thread for pool in pools for thread in pool._threads}
    return {
        thread.native_id or 0: thread.name
        for thread in threading.enumerate()
        if thread not in kept
        and thread.name not in LIBRARY_THREADS
        and not str(getattr(getattr(thread, "_target", None), "__module__", "")).startswith(COMPILER)
    }


def open_files(except_below: Path | None = None) -> dict[int, str]:
    """Return what each open descriptor is: a path, or a kind of the kernel's ('socket', 'pipe', 'anon_inode:[eventpoll]').

    Left out are files below a folder, which the cell is still writing, and NCCL's log, which NCCL closes when it opens the next.
    """
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = link.readlink()
        except OSError:  # that of the listing itself
            continue
        ours = except_below is not None and path.is_relative_to(except_below)
        if not ours and not (path.suffix == ".log" and path.parent.name == "nccl"):
            found[int(link.name)] = re.sub(r":\[[0-9]+]$", "", str(path))  # the number of a socket or pipe
    return found


def shared_files(folder: Path, prefix: str) -> list[str]:
    """Return the names of the files in a folder that begin with the prefix of this cell's files."""
    return sorted(path.name for path in folder.glob(f"{prefix}*"))


def resident_bytes() -> int:
    """Return the memory that this process occupies."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
