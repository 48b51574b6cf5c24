"""One process of a cell: `python -m benchmarks.rank.worker CELL_DIR NUMBERS`, or forked (benchmarks.rank.agent).

It reads `cell.json`, measures, and writes lines to `ranks/<rank>.jsonl`; the launching process makes the record from them.
Processes beyond the cell's ranks are the servers of its strategy.
"""

import datetime
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rank import asked, lifetime
from benchmarks.record import CellFolder, Kind, own_files
from benchmarks.record.clock import now
from conf.variables import CLOCK_BOUND

# torch and what needs it are imported in `_measure`: what their import prints or raises belongs to the log of the rank.
if TYPE_CHECKING:
    import torch

    from benchmarks.rank.reporter import Reporter
    from conf.cell import Cell

# Our own deadlines end a hang; this one ends ranks whose launching process is gone.
TIMEOUT = datetime.timedelta(hours=2)
MOST_CHARACTERS = 2000  # of an error's message in a line; the log has it whole


def main(folder: Path, numbers: Sequence[int], started: str = "exec") -> int:
    """Measure the cell of a folder as one of the processes that this host has of it. Returns the exit status, 0 or 1.

    `numbers` are those of all of them; LOCAL_RANK says which is this one. `started` is how it began, for the record.
    """
    began = now()
    lifetime.die_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a forked rank has its agent's handlers
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = numbers[int(os.environ["LOCAL_RANK"])]
    cell_folder = CellFolder(folder)
    log = own_files.open_own(cell_folder.rank_log(rank))
    os.dup2(log, 1)
    os.dup2(log, 2)
    asked.answer()
    from benchmarks.rank.reporter import Reporter  # after the redirection

    reporter = None
    try:
        reporter = Reporter(cell_folder, rank)
        _measure(cell_folder, rank, {"started": started, "began": began}, reporter)
        reporter.line(Kind.DONE)
    except BaseException as error:
        try:
            traceback.print_exc()
            sys.stderr.flush()
            if reporter is not None:
                reporter.line(Kind.ERROR, type=type(error).__name__, message=str(error)[:MOST_CHARACTERS])
        finally:
            # Not the ordinary exit: the destructors of a broken process group can wait for ever, and for an exception that
            # leaves this function torch keeps a file in TMPDIR.
            os._exit(1)
    return 0


def _measure(folder: CellFolder, rank: int, how: dict[str, object], reporter: "Reporter") -> None:
    """Find this process's device, then be a rank or a server of the cell. `how` it began goes into its first line."""
    import json

    import torch

    from conf.cell import Cell
    from conf.targets import locate
    from trainers.devices import stay_near

    anew = how["started"] == "exec"  # else the imports were there before the process was
    how |= {"imported": now()} if anew else {}
    cell = Cell.from_dict(json.loads(folder.cell.read_text()))
    place = _gpu_index(cell, rank)
    device = torch.device("cuda", place) if place is not None and cell.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stay_near(device)
    # A forked process has the threads of its agent, which began with other variables.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    here: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), **how}
    if cell.hosts:
        here |= {"node": cell.places[rank].host, "clock_bound_ms": 1e3 * float(os.environ[CLOCK_BOUND])}
    identity = _identity(device)
    reporter.line(Kind.START, rank=rank, **here, **identity)
    if rank < cell.world_size:
        if anew:
            reporter.phase("imports")
            locate(cell.target("benchmark"))
            reporter.phase("connect")
        _rank(cell, rank, device, reporter, [here.get("node"), os.getpid(), identity.get("uuid")])
    else:
        from trainers.kvstore import server_process

        threads = cell.strategy.get("threads", 1)
        server_process.serve(rank - cell.world_size, device, cell.device, threads, reporter.phase, reporter.beat)


def _gpu_index(cell: "Cell", number: int) -> int | None:
    """Return which of the GPUs that its host shows a process uses; None: it uses the host's memory."""
    place = cell.places[number]
    here = dict.fromkeys(one.gpu for one in cell.places if one.host == place.host and one.gpu is not None)
    return None if place.gpu is None else list(here).index(place.gpu)


def _rank(cell: "Cell", rank: int, device: "torch.device", reporter: "Reporter", me: list[object]) -> None:
    """Join the process group, run the benchmark, and write the result as a line if this is rank 0.

    `me` is what this rank tells those of other hosts about itself.
    """
    import dataclasses

    import torch.distributed as dist

    from benchmarks.rank.group import Ranks
    from conf.targets import locate
    from trainers.peers import told

    backend = "cpu:gloo,cuda:nccl" if cell.device == "cuda" else "gloo"
    # Without the servers, which are in the agent's count too.
    dist.init_process_group(backend, timeout=TIMEOUT, rank=rank, world_size=cell.world_size)
    if cell.hosts:  # who met there is compared with the plan and with what each rank said to its own agent
        peers = told.by_all([rank, *me])
        if rank == 0:
            reporter.line(Kind.PEERS, rows=peers)
    run = locate(cell.target("benchmark"))
    result = run(cell, Ranks(rank, cell.world_size, device, len(cell.hosts) > 1), reporter)
    if rank == 0:
        reporter.line(Kind.RESULT, **dataclasses.asdict(result))
    dist.destroy_process_group()


def _identity(device: "torch.device") -> dict[str, object]:
    """Return which device this rank really has, and the versions of what it runs."""
    import torch

    from benchmarks.rank.versions import versions

    on_gpu = device.type == "cuda"
    facts: dict[str, object] = {
        "versions": versions(on_gpu), "device": str(device), "threads": torch.get_num_threads()
    }  # fmt: skip
    if on_gpu:
        from trainers.devices import bus_id

        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "uuid": f"GPU-{properties.uuid}",
            "bus_id": f"0000{bus_id(device)}",  # as NVML writes it
            "name": properties.name,
            "memory_bytes": properties.total_memory,
        }
    return facts


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]))
