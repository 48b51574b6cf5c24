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
        self._used: dict[
            psutil.Process, tuple[float, float]
        ] = {}  # by each process, and by its children that were waited for
        self._own_s = 0.0

    def read(self) -> dict[str, float]:
        """Return seconds since some time: `busy_s` of all on these `cores`, `own_s` of our processes, ended ones too.

        Empty where the kernel does not say.
        """
        try:
            times = psutil.cpu_times(percpu=True)
            self._own_s += self._since_the_last_time()
        except (psutil.Error, OSError, RuntimeError):
            return {}
        mine = [times[core] for core in self._cores if core < len(times)]
        busy = sum(one.user + one.nice + one.system + getattr(one, "steal", 0.0) for one in mine)
        return {"cores": len(mine), "busy_s": round(busy, 2), "own_s": round(self._own_s, 2)}

    def _since_the_last_time(self) -> float:
        """Return the seconds that our processes used since then.

        What one used that has ended is told a second time where its parent waited for it, and nowhere else where nobody did, as
        of torch's processes that compile: it was counted while they lived.
        """
        now = {one: used for one in [self._first, *self._first.children(recursive=True)] if (used := _seconds(one))}
        before, self._used = self._used, now
        old = {one: before.get(one, (0.0, 0.0)) for one in now}
        more = sum(sum(used) - sum(old[one]) for one, used in now.items())
        waited_for = sum(used[1] - old[one][1] for one, used in now.items())
        told_before = sum(sum(used) for one, used in before.items() if one not in now)
        return max(0.0, more - min(told_before, waited_for))


def _seconds(process: psutil.Process) -> tuple[float, float] | None:
    """Return what a process used, and those of its children that it waited for; None for one that is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system), float(times.children_user + times.children_system)
