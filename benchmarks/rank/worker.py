"""One rank or server of a cell: `python -m benchmarks.rank.worker FOLDER NUMBERS`, or forked.

It reads `cell.json`, measures, and writes lines to `ranks/<rank>.jsonl`; the launcher makes the
record from them. Processes beyond the cell's ranks are the servers of its strategy. Without
arguments it prints the versions of what a rank on GPUs runs, as JSON.
"""

import ctypes
import dataclasses
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

from benchmarks.rank import stacks
from benchmarks.record import CellFolder, Kind, safe_files
from benchmarks.record.lines import now
from conf.host import CLOCK_BOUND, SHARED_GPUS, STARTER

if TYPE_CHECKING:
    import torch

    from benchmarks.rank.ranks import Reporter
    from conf.cell import Cell

# torch and what needs it are imported inside functions: what their import prints or raises belongs
# to the log of the rank.

# Our own deadlines end a hang; this one ends ranks whose launcher is gone.
TIMEOUT = datetime.timedelta(hours=2)
MOST_CHARACTERS = 2000  # of an error's message in a line; the log has it whole
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CUDA_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED, cuda.h
POLL_SECONDS = 1.0  # between two looks for the launcher


def main(folder: Path, numbers: Sequence[int], started: str = "exec") -> int:
    """Measure a cell as one of its processes on this host. Returns 0; an error ends the process.

    `numbers` are those of all its processes here; LOCAL_RANK says which is this one. `started` is
    how it began, for the record.
    """
    began = now()
    die_with_parent()
    for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signal_number, signal.SIG_DFL)  # a forked rank has its agent's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = numbers[int(os.environ["LOCAL_RANK"])]
    cell_folder = CellFolder(folder)
    redirect_output(cell_folder.rank_log(rank))
    stacks.register()
    reporter = None
    try:
        from benchmarks.rank.ranks import Reporter

        reporter = Reporter(cell_folder, rank)
        _measure(cell_folder, rank, {"started": started, "began": began}, reporter)
        reporter.line(Kind.DONE)
    except BaseException as error:
        try:
            traceback.print_exc()
            sys.stderr.flush()
            if reporter is not None:
                from conf.secrets import without_secrets

                message = without_secrets(str(error)[:MOST_CHARACTERS])
                reporter.line(Kind.ERROR, type=type(error).__name__, message=message)
        finally:
            # Not the ordinary exit: the destructors of a broken process group can wait for ever,
            # and for an exception that leaves this function torch keeps a file in TMPDIR.
            os._exit(1)
    return 0


def redirect_output(log: Path) -> None:
    """Have what this process prints go to a log of its own. Raises OSError."""
    descriptor = safe_files.open_own(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _measure(
    folder: CellFolder, number: int, start: dict[str, object], reporter: "Reporter"
) -> None:
    """Find this process's device, then be a rank or a server of the cell.

    `start` is how it began; it goes into its first line.
    """
    import torch
    import torch.distributed as dist

    from conf.cell import Cell
    from conf.targets import locate
    from trainers.process import keep_freed_memory, stay_near

    is_new_process = start["started"] == "exec"  # else the imports were there before the process
    if is_new_process:
        start |= {"imported": now()}
    cell = Cell.from_dict(json.loads(folder.cell.read_bytes()))
    origin: dict[str, object] = {"host": socket.gethostname(), "pid": os.getpid(), **start}
    if cell.hosts:
        origin["node"] = cell.places[number].host
        origin["clock_bound_ms"] = 1e3 * float(os.environ[CLOCK_BOUND])
    if cell.runs_script:
        locate(cell.target("benchmark"))(cell, number, reporter, origin)
        return
    gpu = gpu_index(cell, number)
    if gpu is not None and cell.device == "cuda":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        stay_near(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
    # A forked process has the threads of its agent, which began with other variables.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    identity = _identity(device)
    reporter.line(Kind.START, rank=number, **origin, **identity)
    if number < cell.world_size:
        if is_new_process:
            reporter.phase("imports")
            locate(cell.target("benchmark"))
            reporter.phase("connect")
        # Servers, which the agent counts too, are not in the group. Without `device_id`: a second
        # group with one, in the same process, trains 2.5 % slower on two H200s.
        backend = "cpu:gloo,cuda:nccl" if cell.device == "cuda" else "gloo"
        ranks = cell.world_size
        dist.init_process_group(backend, timeout=TIMEOUT, rank=number, world_size=ranks)
        peer = [origin.get("node"), os.getpid(), identity.get("uuid")]
        _run(cell, number, device, reporter, peer)
        # A forked process is ended by the kernel at once, and with it its connections: two H200s
        # take 0.4 s to end them one by one.
        if is_new_process:
            dist.destroy_process_group()
    else:
        from trainers.kvstore import server_process

        server, threads = number - cell.world_size, cell.strategy.get("threads", 1)
        server_process.serve(server, device, cell.device, threads, reporter.phase, reporter.beat)


def gpu_index(cell: "Cell", number: int) -> int | None:
    """Return which of the visible GPUs of its host a process uses; None: the host's memory."""
    own = cell.places[number]
    if own.gpu is None:
        return None
    gpus = [each.gpu for each in cell.places if each.host == own.host and each.gpu is not None]
    present = int(os.environ.get(SHARED_GPUS, 1 + max(gpus)))  # fewer where ranks share them
    visible = dict.fromkeys(gpu % present for gpu in gpus)
    return [*visible].index(own.gpu % present)


def _run(
    cell: "Cell", rank: int, device: "torch.device", reporter: "Reporter", peer: list[object]
) -> None:
    """Run the benchmark; rank 0 writes the result. `peer` is what other hosts hear of this rank."""
    from benchmarks.rank.ranks import Ranks
    from conf.targets import locate
    from trainers import collectives

    if cell.hosts:
        # It is compared with the plan and with what each rank wrote to its own agent.
        peers = collectives.all_gather_json([rank, *peer])
        if rank == 0:
            reporter.line(Kind.PEERS, rows=peers)
    run = locate(cell.target("benchmark"))
    result = run(cell, Ranks(rank, cell.world_size, device, len(cell.hosts) > 1), reporter)
    if rank == 0:
        reporter.line(Kind.RESULT, **dataclasses.asdict(result))


def _identity(device: "torch.device") -> dict[str, object]:
    import torch

    on_gpu = device.type == "cuda"
    facts: dict[str, object] = {
        "versions": versions(on_gpu),
        "device": str(device),
        "threads": torch.get_num_threads(),
    }
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


def versions(on_gpus: bool) -> dict[str, str]:
    """Return {"torch": "2.11.0+cu130", …} of this process; CUDA, cuDNN and NCCL only on GPUs."""
    import torch

    version_of = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        # By its metadata: an import takes seconds, and not every model is from there.
        "torchvision": importlib.metadata.version("torchvision"),
    }
    if on_gpus:
        version_of["cuda"] = str(torch.version.cuda)
        version_of["cudnn"] = str(torch.backends.cudnn.version())
        version_of["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return version_of


def die_with_parent() -> None:
    """End this process when the process that started it ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(STARTER, str(os.getppid())) != str(os.getppid()):
        os.kill(os.getpid(), signal.SIGKILL)  # it ended before the kernel had the request above


def die_with_launcher(launcher: int) -> None:
    """End this process when the launcher, by its id and not the parent, is gone."""

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def cuda_initialised() -> bool:
    """Return whether this process has initialised CUDA's driver: forks could not use CUDA."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))) != CUDA_NOT_INITIALISED


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(json.dumps(versions(on_gpus=True)))
        sys.exit(0)
    sys.exit(main(Path(sys.argv[1]), list(map(int, sys.argv[2].split(",")))))
