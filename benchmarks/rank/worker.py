"""One process of a cell: `python -m benchmarks.rank.worker CELL_DIR NUMBERS`, or forked (benchmarks.rank.cell_process).

It reads `cell.json`, measures, and writes lines to `ranks/<rank>.jsonl`; the launching process makes the record from them.
Processes beyond the cell's ranks are the servers of its strategy.
"""

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rank import stacks as asked
from benchmarks.record import CellFolder, Kind, safe_files
from benchmarks.record.lines import now
from conf.process_env import CLOCK_BOUND, STARTER

if TYPE_CHECKING:
    import torch

    from benchmarks.rank.ranks import Reporter
    from conf.cell import Cell


# torch and what needs it are imported in `_measure`: what their import prints or raises belongs to the log of the rank.

# Our own deadlines end a hang; this one ends ranks whose launching process is gone.
TIMEOUT = datetime.timedelta(hours=2)
MOST_CHARACTERS = 2000  # of an error's message in a line; the log has it whole


def main(folder: Path, numbers: Sequence[int], started: str = "exec") -> int:
    """Measure the cell of a folder as one of the processes that this host has of it. Returns 0; an error ends the process.

    `numbers` are those of all of them; LOCAL_RANK says which is this one. `started` is how it began, for the record.
    """
    began = now()
    die_with_parent()
    for name in (
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # a forked rank has its agent's handlers
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    number = numbers[int(os.environ["LOCAL_RANK"])]
    cell_folder = CellFolder(folder)
    write_to(cell_folder.rank_log(number))
    asked.answer()
    reporter = None
    try:
        from benchmarks.rank.ranks import Reporter  # after the log is where errors go

        reporter = Reporter(cell_folder, number)
        _measure(cell_folder, number, {"started": started, "began": began}, reporter)
        reporter.line(Kind.DONE)
    except BaseException as error:
        try:
            traceback.print_exc()
            sys.stderr.flush()
            if reporter is not None:
                reporter.line(
                    Kind.ERROR, type=type(error).__name__, message=str(error)[:MOST_CHARACTERS]
                )
        finally:
            # Not the ordinary exit: the destructors of a broken process group can wait for ever, and for an exception that
            # leaves this function torch keeps a file in TMPDIR.
            os._exit(1)
    return 0


def write_to(log: Path) -> None:
    """Have what this process prints go to a log of its own. Raises OSError."""
    descriptor = safe_files.open_own(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _measure(folder: CellFolder, number: int, how: dict[str, object], reporter: "Reporter") -> None:
    """Find this process's device, then be a rank or a server of the cell. `how` it began goes into its first line."""
    import json

    import torch
    import torch.distributed as dist

    from conf.cell import Cell
    from conf.targets import locate
    from trainers.process import keep_freed_memory, stay_near

    anew = how["started"] == "exec"  # else the imports were there before the process was
    if anew:
        how |= {"imported": now()}
    cell = Cell.from_dict(json.loads(folder.cell.read_bytes()))
    place = _gpu_index(cell, number)
    device = (
        torch.device("cuda", place)
        if place is not None and cell.device == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        stay_near(device)
    else:
        keep_freed_memory()
    # A forked process has the threads of its agent, which began with other variables.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    here: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), **how}
    if cell.hosts:
        here |= {
            "node": cell.places[number].host,
            "clock_bound_ms": 1e3 * float(os.environ[CLOCK_BOUND]),
        }
    identity = _identity(device)
    reporter.line(Kind.START, rank=number, **here, **identity)
    if number < cell.world_size:
        if anew:
            reporter.phase("imports")
            locate(cell.target("benchmark"))
            reporter.phase("connect")
        _join(cell, number)
        _rank(cell, number, device, reporter, [here.get("node"), os.getpid(), identity.get("uuid")])
        if anew:
            dist.destroy_process_group()
        # Else the kernel ends this process at once, and its connections: two H200s take 0.4 s to end them one by one.
    else:
        from trainers.kvstore import server_process

        threads = cell.strategy.get("threads", 1)
        server_process.serve(
            number - cell.world_size, device, cell.device, threads, reporter.phase, reporter.beat
        )


def _gpu_index(cell: "Cell", number: int) -> int | None:
    """Return which of the GPUs that its host shows a process uses; None: it uses the host's memory."""
    place = cell.places[number]
    here = dict.fromkeys(
        one.gpu for one in cell.places if one.host == place.host and one.gpu is not None
    )
    return None if place.gpu is None else list(here).index(place.gpu)


def _join(cell: "Cell", rank: int) -> None:
    """Join the process group of the cell's ranks, without its servers, which are in the agent's count too.

    Without `device_id`: a second group with one, in the same process, trains 2.5 % slower on two H200s.
    """
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if cell.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, rank=rank, world_size=cell.world_size)


def _rank(
    cell: "Cell", rank: int, device: "torch.device", reporter: "Reporter", me: list[object]
) -> None:
    """Run the benchmark, and write the result as a line if this is rank 0.

    `me` is what this rank tells those of other hosts about itself.
    """
    import dataclasses

    from benchmarks.rank.ranks import Ranks
    from conf.targets import locate
    from trainers import collectives as told

    if (
        cell.hosts
    ):  # who met there is compared with the plan and with what each rank said to its own agent
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

    pass

    on_gpu = device.type == "cuda"
    facts: dict[str, object] = {
        "versions": versions(on_gpu), "device": str(device), "threads": torch.get_num_threads()
    }  # fmt: skip
    if on_gpu:
        from trainers.process import bus_id

        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {
            "uuid": f"GPU-{properties.uuid}",
            "bus_id": f"0000{bus_id(device)}",  # as NVML writes it
            "name": properties.name,
            "memory_bytes": properties.total_memory,
        }
    return facts


# What a process of a cell does so that it does not outlive the cell, and whether it may be forked. Linux.


PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 1.0  # between two looks for the launching process
CUDA_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h


def die_with_parent() -> None:
    """End this process when the process that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
        os.kill(
            os.getpid(), signal.SIGKILL
        )  # the parent ended before the kernel had the request above


def cuda_initialised() -> bool:
    """Return whether this process has initialised CUDA's driver. A process forked from it could not use CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != CUDA_NOT_INITIALISED


def die_with_launcher(launcher: int) -> None:
    """End this process when the launching process (its id; not the parent) is gone. A thread of its own watches."""

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# The versions of what a rank runs. Run as a module, it prints those of a process on GPUs as JSON, for the launcher to read.


def versions(on_gpus: bool) -> dict[str, str]:
    """Return {"torch": "2.11.0+cu130", …} of this process; CUDA, cuDNN and NCCL only where GPUs are used."""
    import torch

    # torchvision by its metadata: an import takes seconds, and not every model is from there.
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),
    }
    if on_gpus:
        found |= {
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(versions(on_gpus=True)))
    else:
        sys.exit(main(Path(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]))
