"""What tells why a second process group with a device_id makes steps slower: `python .ci/gpu/second_group.py FILE OPTION...`.

Two ranks (RANKS) train in turns, each turn with a process group and a model of its own; TURNS names them:
  device_id    the group is made with a device_id: NCCL connects at once
  plain        as Ringside makes it: NCCL connects in the first exchange
  early        as plain, but one exchange before the model is built: is it that NCCL connects before the memory is taken?
  after_work   with a device_id, after steps without a group: is it that nothing ran on the GPU before?
  side_stream  with a device_id, all work on a stream of its own: is it the default stream?
At several moments of a turn the device is held while small kernels are enqueued, so that the host has no part in their time. The
moment after which each takes longer is that of the cause. `device=cpu` tries it with gloo.
"""

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from composed import cell_of

from conf.cell import Cell
from tests.step_times import timed_ms
from trainers.step import Training

RANKS = int(os.environ.get("RANKS", "2"))
USUAL = "device_id,device_id,plain"
EMPTY = 400  # kernels in a row: fewer than the launch queue holds
HOLD_CYCLES = 16_000_000  # about 8 ms, in which they are enqueued
STEPS = {"cuda": (8, 20), "cpu": (1, 3)}  # before those that are timed, and these
TIMEOUT = datetime.timedelta(seconds=100)


def gap_us(device: torch.device, stream: torch.cuda.Stream | None = None) -> float | None:
    """Return the µs from one small kernel to the next on a stream, the median of five rows; None on a CPU."""
    if device.type != "cuda":
        return None
    found = []
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        one = torch.zeros(1, device=device)
        for _ in range(5):
            torch.cuda.synchronize(device)
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HOLD_CYCLES)
            first.record()
            for _ in range(EMPTY):
                one.add_(1)
            last.record()
            torch.cuda.synchronize(device)
            found.append(first.elapsed_time(last) * 1e3 / EMPTY)
    return median(found)


def seen(device: torch.device) -> dict[str, Any]:
    """Return what this process and its GPU have at one moment."""
    tasks = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    facts: dict[str, Any] = {"threads": sorted(tasks)}
    if device.type == "cuda":
        import pynvml

        pynvml.nvmlInit()
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "used_mb": (total - free) // 1_000_000,
            "reserved_mb": torch.cuda.memory_reserved(device) // 1_000_000,
        }
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        # More than one on a GPU: two contexts share it by time slices.
        facts["processes"] = [len(pynvml.nvmlDeviceGetComputeRunningProcesses(one)) for one in handles]
        facts["sm_mhz"] = [pynvml.nvmlDeviceGetClockInfo(one, pynvml.NVML_CLOCK_SM) for one in handles]
    return facts


def join(cell: Cell, rank: int, device: torch.device, store: dist.Store, with_id: bool) -> None:
    """Make the process group of a turn."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if with_id and device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, timeout=TIMEOUT, rank=rank, world_size=cell.world_size, **bound)


def steps_ms(training: Training) -> list[float]:
    """Return the ms of steps."""
    warm_up, timed = STEPS[training.device.type]
    for _ in range(warm_up):
        training.step()
    found: list[float] = timed_ms(training, timed)
    return found


def turn(name: str, overrides: list[str], rank: int, device: torch.device, store: dist.Store) -> dict[str, Any]:
    """Train once; return the step and what was seen on the way."""
    cell = cell_of(overrides, tuple(range(RANKS)), device.type)
    found: dict[str, Any] = {"turn": name, "gap_us": {"begin": gap_us(device)}}
    if name == "after_work":
        alone = Training(cell_of([*overrides, "strategy=none"], (rank,), device.type), device, rank)
        steps_ms(alone)
        alone.close()
        del alone
    with in_stream(name, device):
        join(cell, rank, device, store, with_id=name in ("device_id", "after_work", "side_stream"))
        found["gap_us"]["group"] = gap_us(device)
        if name == "early":
            dist.all_reduce(torch.ones(1, device=device))
            found["gap_us"]["exchange"] = gap_us(device)
        training = Training(cell, device, rank)
        found["gap_us"]["model"] = gap_us(device)
        found["step_ms"] = median(steps_ms(training))
        found["gap_us"]["steps"] = gap_us(device)
        if device.type == "cuda":
            found["gap_us"]["other stream"] = gap_us(device, torch.cuda.Stream(device))
        with training.without_exchange():
            found["alone_ms"] = median(steps_ms(training))
        found["seen"] = seen(device)
        training.close()
    del training
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.destroy_process_group()
    found["gap_us"]["end"] = gap_us(device)
    return found


@contextlib.contextmanager
def in_stream(name: str, device: torch.device) -> Iterator[None]:
    """Work on another stream than the default one, where the turn says so."""
    if name == "side_stream" and device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    else:
        yield


def rank_of(rank: int, kind: str, overrides: list[str], folder: str, turns: list[str]) -> None:
    """Take all turns as one rank; write what was found after each, so that one that hangs costs nothing else."""
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", RANKS)
    found = []
    for number, name in enumerate(turns):
        found.append(turn(name, overrides, rank, device, dist.PrefixStore(str(number), store)))
        Path(f"{folder}/{rank}.json").write_text(json.dumps(found))


def main(file: Path, overrides: list[str]) -> None:
    """Take the turns on two ranks and print them, of the slower rank; write everything to FILE."""
    import tempfile

    kind = "cpu" if "device=cpu" in overrides else "cuda"
    turns = os.environ.get("TURNS", USUAL).split(",")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of a machine need not lead to an address
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(rank_of, (kind, overrides, folder, turns), nprocs=RANKS)
        finally:
            paths = sorted(Path(folder).glob("?.json"))
            of_ranks = [json.loads(path.read_text()) for path in paths]
            file.write_text(
                json.dumps({"torch": torch.__version__, "options": overrides, "ranks": of_ranks}, indent=1) + "\n"
            )
    for rows in zip(*of_ranks, strict=False):
        slower = max(rows, key=lambda one: one["step_ms"])
        gaps = ", ".join(f"{moment} {us:.2f}" for moment, us in slower["gap_us"].items() if us is not None)
        facts = {key: value for key, value in slower["seen"].items() if key != "threads"}
        print(
            f"{slower['turn']:12} step {slower['step_ms']:.2f} ms, alone {slower['alone_ms']:.2f} ms; gap µs: {gaps or '-'}"
        )
        print(f"{'':12} {len(slower['seen']['threads'])} threads {facts}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
