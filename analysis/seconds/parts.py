"""Where the wall time of one cell went: parts in their order, which add up to it. METHOD.md, "What a cell costs".

Every part is cut out by lines that rank 0 and the sampler wrote while the cell ran. So `python -m analysis verify` makes them
again, and a cell of an earlier Ringside has them as far as its lines tell.
"""

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.derived import Line, of_kind
from benchmarks.record import CellFolder, Kind, read_lines

# Parts that are no phases of a rank.
SETTLE = "settle"  # until the GPUs were idle and the first sample of them was taken
SPAWN = "spawn"  # until the process of rank 0 had begun
START = "start"  # until the first line of rank 0, where older lines do not tell more
IMPORTS = "imports"
CONTEXT = "context"  # until rank 0 had its GPU
CONNECT = "connect"  # until the ranks had met
EXIT = "exit"  # from the result until the launcher had seen the end


def parts(
    lines: Sequence[Line], settled_at: float | None, started_at: float, ended_at: float
) -> dict[str, float]:
    """Return {part: seconds} of a cell from the lines of its rank 0. They add up to `ended_at` − `started_at`.

    Times are seconds since 1970; at `settled_at` the GPUs had been sampled for the first time.
    """
    found: dict[str, float] = {}
    moment, name = started_at, START
    for until, following in (*_begun(lines, settled_at, started_at), (ended_at, "")):
        until = min(max(until, moment), ended_at)
        if until > moment:
            found[name] = found.get(name, 0.0) + until - moment
        moment, name = until, following
    return found


def tells(lines: Sequence[Line]) -> bool:
    """Tell whether rank 0 wrote what every part is cut out by; an earlier Ringside did not."""
    return any("began" in line for line in of_kind(lines, Kind.START))


def settled(folder: CellFolder) -> float | None:
    """Return when the GPUs of a cell had been sampled for the first time, in seconds since 1970; None without samples."""
    return next(
        (line["time"] for line in read_lines(folder.gpu_samples) if line["kind"] == Kind.BEFORE),
        None,
    )


def _begun(
    lines: Sequence[Line], settled_at: float | None, started_at: float
) -> Iterator[tuple[float, str]]:
    """Yield when each part begins, and its name."""
    if (start := next(iter(of_kind(lines, Kind.START)), None)) is None:
        return
    began = start.get("began")
    first = START if began is None else SPAWN
    if settled_at is not None and settled_at <= (start["time"] if began is None else began):
        yield started_at, SETTLE
        yield settled_at, first
    else:
        yield started_at, first
    if began is not None:
        yield from _of_process(start)
    yield start["time"], CONNECT
    yield from _phases(lines)


def _of_process(start: Line) -> Iterator[tuple[float, str]]:
    """Yield the parts between the begin of rank 0's process and its first line."""
    on_gpu = str(start.get("device", "")).startswith("cuda")
    if "imported" in start:
        yield start["began"], IMPORTS
    if on_gpu:
        yield start.get("imported", start["began"]), CONTEXT


def _phases(lines: Iterable[Line]) -> Iterator[tuple[float, str]]:
    """Yield the phases of rank 0, and what follows the last."""
    for line in lines:
        if line["kind"] == Kind.PHASE and "phase" in line:
            yield line["time"], str(line["phase"])
        elif line["kind"] in (Kind.RESULT, Kind.ERROR):
            yield line["time"], EXIT
