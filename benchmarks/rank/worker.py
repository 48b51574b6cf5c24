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

from benchmarks.rank import asked, lifetime, nccl_log
from benchmarks.rank.staying import Staying, write_to
from benchmarks.record import CellFolder, Kind
from benchmarks.record.clock import now
from conf.variables import CLOCK_BOUND

# torch and what needs it are imported in `_measure`: what their import prints or raises belongs to the log of the rank.
if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from benchmarks.rank.giving_back import Baseline, KeptGraphs, Left
    from benchmarks.rank.reporter import Reporter
    from conf.cell import Cell

# Our own deadlines end a hang; this one ends ranks whose launching process is gone.
TIMEOUT = datetime.timedelta(hours=2)
GIVING_BACK = datetime.timedelta(seconds=60)  # for the slowest rank to give back
MOST_CHARACTERS = 2000  # of an error's message in a line; the log has it whole


def main(folder: Path, numbers: Sequence[int], started: str = "exec", staying: Staying | None = None) -> int:
    """Measure the cell of a folder as one of the processes that this host has of it. Returns the exit status, 0 or 1.

    `numbers` are those of all of them; LOCAL_RANK says which is this one. `started` is how it began, for the record.
    `staying` has it measure further cells, until it is told to leave.
    """
    began = now()
    lifetime.die_with_parent()
    for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # a forked rank has its agent's handlers
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    number = numbers[int(os.environ["LOCAL_RANK"])]
    cell_folder = CellFolder(folder)
    write_to(cell_folder.rank_log(number))
    asked.answer()
    process = Process(number, started, staying)
    once = ""  # what NCCL has said of this process
    while True:
        kept = process.measure(cell_folder, began)
        following = staying.next(number, kept) if staying else None
        if following is None:
            return 0
        began = now()
        cell_folder = CellFolder(Path(following.folder))
        once = once or nccl_log.said_once()
        following.enter(cell_folder.rank_log(number))
        nccl_log.begin_again(once)


class Process:
    """A process of a cell, or of several cells one after the other."""

    def __init__(self, number: int, started: str, staying: Staying | None) -> None:
        self._number, self._started, self._staying = number, started, staying
        self._place = 0  # of the cell among those that this process measures
        self._store: Store | None = None  # of the agent, where this process may measure several cells
        self._cell: Cell | None = None
        self._device: torch.device | None = None
        self._baseline: Baseline | None = None  # what this process was before its first cell
        self._first_idle: Left | None = None  # what it held after its first cell
        self._graphs: KeptGraphs | None = None  # what torch.compile made here

    def measure(self, folder: CellFolder, began: float) -> list[str]:
        """Measure the cell of a folder, with which it `began` at that time. An error ends the process.

        Returns what is left of the cell in this process, as ends of sentences.
        """
        reporter = None
        try:
            from benchmarks.rank.reporter import Reporter  # after the log is where errors go

            reporter = Reporter(folder, self._number)
            self._measure(folder, {"started": self._started, "began": began}, reporter)
            kept = self._give_back(folder, reporter)
            reporter.line(Kind.DONE)
            reporter.close()
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
        self._started, self._place = "warm", self._place + 1
        return kept

    def _measure(self, folder: CellFolder, how: dict[str, object], reporter: "Reporter") -> None:
        """Find this process's device, then be a rank or a server of the cell. `how` it began goes into its first line."""
        import json

        import torch
        import torch.distributed as dist

        from benchmarks.rank.giving_back import Baseline, KeptGraphs
        from conf.cell import Cell
        from conf.targets import locate
        from trainers.devices import keep_freed_memory, stay_near

        anew = self._started == "exec"  # else the imports were there before the process was
        how |= {"imported": now()} if anew else {}
        number = self._number
        cell = Cell.from_dict(json.loads(folder.cell.read_bytes()))
        place = _gpu_index(cell, number)
        device = torch.device("cuda", place) if place is not None and cell.device == "cuda" else torch.device("cpu")
        self._cell, self._device = cell, device
        if device.type == "cuda":
            torch.cuda.set_device(device)
            stay_near(device)
        else:
            keep_freed_memory()
        # A forked process has the threads of its agent, which began with other variables.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
        if self._staying:
            self._baseline = self._baseline.with_environment() if self._baseline else Baseline.now(device, folder.path)
        self._graphs = self._graphs or KeptGraphs()
        self._graphs.begin(cell)
        here: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), **how}
        if self._staying:
            here |= {"pool": self._staying.pool, "place": self._place}
        if cell.hosts:
            here |= {"node": cell.places[number].host, "clock_bound_ms": 1e3 * float(os.environ[CLOCK_BOUND])}
        identity = _identity(device)
        reporter.line(Kind.START, rank=number, **here, **identity)
        if number < cell.world_size:
            if anew:
                reporter.phase("imports")
                locate(cell.target("benchmark"))
                reporter.phase("connect")
            _join(cell, number, self._meeting())
            _rank(cell, number, device, reporter, [here.get("node"), os.getpid(), identity.get("uuid")])
            if self._staying or anew:
                dist.destroy_process_group()
            # Else the kernel ends this process at once, and its connections: two H200s take 0.4 s to end them one by one.
        else:
            from trainers.kvstore import server_process

            threads = cell.strategy.get("threads", 1)
            server_process.serve(number - cell.world_size, device, cell.device, threads, reporter.phase, reporter.beat)

    def _give_back(self, folder: CellFolder, reporter: "Reporter") -> list[str]:
        """Give back what the cell used, where the process may measure another one. Returns what it could not."""
        if not self._staying or not self._baseline or not self._cell or not self._device:
            return []
        from benchmarks.rank.giving_back import give_back, left

        reporter.phase("give back")
        changed = give_back(
            self._baseline, self._device, self._cell, keep_compiled=self._graphs is not None and self._graphs.any
        )
        self._await_others(self._cell.world_size)
        found = left(self._baseline, self._device, self._first_idle, changed, folder.path)
        self._first_idle = self._first_idle or found
        reporter.line(Kind.GIVEN_BACK, **found.line())
        unable = self._device.type == "cuda" and not nccl_log.can_begin_again()
        kept = [*found.kept, *(["cannot begin NCCL's log again"] if unable else [])]
        return [f"rank {self._number} {one}" for one in kept]

    def _await_others(self, ranks: int) -> None:
        """Wait until every rank has ended its communicator: what NCCL maps of another GPU stays taken there until then."""
        if self._store is None or self._number >= ranks:
            return
        here = f"given back {self._place}"
        if self._store.add(here, 1) == ranks:
            self._store.set(f"{here} by all", "")
        self._store.wait([f"{here} by all"], GIVING_BACK)

    def _meeting(self) -> "Store | None":
        """Return where the ranks of a cell meet; None: torch finds it. Keys of a cell before must mean nothing there."""
        if not self._staying:
            return None
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        if self._store is None:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = TCPStore(address, port, is_master=False, timeout=TIMEOUT)
        return PrefixStore(f"cell {self._place}", self._store)


def _gpu_index(cell: "Cell", number: int) -> int | None:
    """Return which of the GPUs that its host shows a process uses; None: it uses the host's memory."""
    place = cell.places[number]
    here = dict.fromkeys(one.gpu for one in cell.places if one.host == place.host and one.gpu is not None)
    return None if place.gpu is None else list(here).index(place.gpu)


def _join(cell: "Cell", rank: int, meeting: "Store | None") -> None:
    """Join the process group of the cell's ranks, without its servers, which are in the agent's count too.

    Without `device_id`: a second group with one, in the same process, trains 2.5 % slower on two H200s.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if cell.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=meeting, timeout=TIMEOUT, rank=rank, world_size=cell.world_size)


def _rank(cell: "Cell", rank: int, device: "torch.device", reporter: "Reporter", me: list[object]) -> None:
    """Run the benchmark, and write the result as a line if this is rank 0.

    `me` is what this rank tells those of other hosts about itself.
    """
    import dataclasses

    from benchmarks.rank.group import Ranks
    from conf.targets import locate
    from trainers.peers import told

    if cell.hosts:  # who met there is compared with the plan and with what each rank said to its own agent
        peers = told.by_all([rank, *me])
        if rank == 0:
            reporter.line(Kind.PEERS, rows=peers)
    run = locate(cell.target("benchmark"))
    result = run(cell, Ranks(rank, cell.world_size, device, len(cell.hosts) > 1), reporter)
    if rank == 0:
        reporter.line(Kind.RESULT, **dataclasses.asdict(result))


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
