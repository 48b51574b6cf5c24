"""How busy the cores are that a cell may use, and how much of it is the cell's own: what is left is the load of others."""

import os

import psutil


class CpuLoad:
    """Counts CPU seconds. The launching process, or a host's agent, and all that it started are own; the rest is others'.

    Interrupts are nobody's: those of the ranks' own messages are counted with others'. What a hypervisor took is others'.
    """

    def __init__(self, first: int | None = None) -> None:
        """`first` is the id of the process whose tree is own; None: of this one."""
        self._cores = sorted(os.sched_getaffinity(0))
        self._first = psutil.Process(first)

    def read(self) -> dict[str, float]:
        """Return seconds since some time: `busy_s` of all on these `cores`, `own_s` of our processes, ended ones too.

        Empty where the kernel does not say.
        """
        try:
            times = psutil.cpu_times(percpu=True)
            own = sum(map(_seconds, [self._first, *self._first.children(recursive=True)]))
        except (psutil.Error, OSError, RuntimeError):
            return {}
        mine = [times[core] for core in self._cores if core < len(times)]
        busy = sum(one.user + one.nice + one.system + getattr(one, "steal", 0.0) for one in mine)
        return {"cores": len(mine), "busy_s": round(busy, 2), "own_s": round(own, 2)}


def _seconds(process: psutil.Process) -> float:
    """Return what a process and those of its children that have ended used; 0 for one that is gone: its parent has it."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
