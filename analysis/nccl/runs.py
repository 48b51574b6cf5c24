"""Tell runs from ranks where texts hold several runs: processes of other runs use the same GPUs."""

from dataclasses import dataclass, field

from analysis.nccl.communicators import Group, sort_by_communicator
from analysis.nccl.events import Event, LogProcess, Membership, Setting

Gpu = tuple[str | None, str | int | None]  # host, and bus id or NVML index


@dataclass
class LogRun:
    """Processes that may have run side by side."""

    processes: set[LogProcess] = field(default_factory=set)
    gpus: set[Gpu] = field(default_factory=set)
    most_ranks: int = 0


def runs_of(events: list[Event]) -> list[LogRun]:
    """Return the runs of a log, in their order; communicators without a process or a GPU in common are of one run."""
    memberships: list[Event] = [event for event in events if isinstance(event, Membership)]
    runs: list[LogRun] = []
    for processes, gpus, ranks in _jobs(sort_by_communicator(memberships, None).groups):
        if not runs or gpus & runs[-1].gpus:
            runs.append(LogRun())
        runs[-1].processes |= processes
        runs[-1].gpus |= gpus
        runs[-1].most_ranks = max(runs[-1].most_ranks, ranks)
    return runs


def of_one_run(events: list[Event], notes: list[str]) -> tuple[list[Event], set[LogProcess]]:
    """Return the events of the run with the most ranks, the first of several, and the processes of the others.

    A note says how many runs there are, and what others announced. Events of processes without a communicator stay.
    """
    runs = runs_of(events)
    if len(runs) < 2:
        return events, set()
    shown = max(runs, key=lambda run: run.most_ranks)
    others = {process for run in runs if run is not shown for process in run.processes}
    said = [f"run {number} {_announced(events, run)}" for number, run in enumerate(runs, 1)]
    notes.append(
        f"{len(runs)} runs, one after the other on the same GPUs: run {runs.index(shown) + 1} is shown. Announced: "
        + "; ".join(said)
    )
    return [event for event in events if event.process not in others], others


def _announced(events: list[Event], run: LogRun) -> str:
    """Return the settings that a run announced, in words."""
    of_run = (
        event for event in events if isinstance(event, Setting) and event.process in run.processes
    )
    return " ".join(sorted({f"{event.name}={event.value}" for event in of_run})) or "nothing"


def _jobs(groups: list[Group]) -> list[tuple[set[LogProcess], set[Gpu], int]]:
    """Return (processes, GPUs, most ranks) of the communicators that share processes, in their order."""
    jobs: list[tuple[set[LogProcess], set[Gpu], int]] = []
    for group in groups:
        processes = {process for process in group.members if process.host}
        gpus: set[Gpu] = {
            (device.host, device.bus_id or device.nvml)
            for device in group.devices.values()
            if device.bus_id is not None or device.nvml is not None
        }
        ranks = group.nranks or 0
        for job in [job for job in jobs if job[0] & processes]:
            jobs.remove(job)
            processes, gpus, ranks = processes | job[0], gpus | job[1], max(ranks, job[2])
        jobs.append((processes, gpus, ranks))
    return jobs
