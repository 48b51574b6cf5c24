"""A server in a process of its own: it waits for the workers' config, maps memory and serves."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainers.kvstore.remote import remote_workers
from trainers.kvstore.server import (
    PAUSE_SECONDS,
    Arithmetic,
    CpuArithmetic,
    GpuArithmetic,
    Server,
    thread_count,
)
from trainers.kvstore.shared_memory import (
    MAPPED,
    READY,
    KvstoreConfig,
    Regions,
    SharedMapping,
    path_on,
)
from trainers.kvstore.wires import rendezvous_store
from trainers.memory import GpuMemory, exported, imported, page_lock

KEY = "config"
START_PAUSE_SECONDS = 0.02  # between two looks while the cell starts


def announce(path: Path, config: KvstoreConfig) -> None:
    """Give the servers the config and the path of the shared memory."""
    rendezvous_store().set(KEY, msgspec.json.encode((str(path), config)).decode())


def dismiss() -> None:
    """Let the servers end without work."""
    rendezvous_store().set(KEY, "null")


def serve(
    number: int,
    device: torch.device,
    worker_device: str,
    threads: int | str,
    phase: Callable[[str], None],
    beat: Callable[[int], None],
) -> None:
    """Be server `number` of a cell until its workers, on GPUs or CPUs ('cuda', 'cpu'), are done.

    Calls `beat` often, with the number of pushes served since the last call.
    """
    phase("waiting for workers")
    announced = _wait_for_workers(beat)
    if announced is None:  # no work
        return
    path, config = announced
    layout, places = config.layout(), config.places
    host = places.server_hosts[number]
    with_workers = host < len(places.ranks)  # whose memory this is
    own_path = path_on(Path(path), config, host) if with_workers else None
    shared = SharedMapping(own_path, config, layout, host=host)
    control = shared.control
    row = config.workers + number  # behind those of the workers
    arithmetic: Arithmetic
    if config.server_gpu:
        arithmetic = _on_gpu(number, host, device, shared, beat)
    else:
        torch.set_num_threads(thread_count(threads, config.servers_together))
        arithmetic = CpuArithmetic(shared, shared.regions, number)
        control.attached[row] = MAPPED
    if config.remote_workers(host):
        arithmetic.remote = _meet_remote_workers(number, shared, arithmetic.regions, beat)
    control.attached[row] = READY
    phase("serving")

    def stopped() -> bool:
        for worker in arithmetic.remote.values():
            worker.check()
        if with_workers and not control.stop[0]:
            return False
        return all(worker.stopped for worker in arithmetic.remote.values())

    Server(arithmetic, number).run(stopped, beat, PAUSE_SECONDS[worker_device])


def _wait_for_workers(beat: Callable[[int], None]) -> tuple[str, KvstoreConfig] | None:
    store = rendezvous_store()
    _wait_until(lambda: bool(store.check([KEY])), beat)
    return msgspec.json.decode(store.get(KEY), type=tuple[str, KvstoreConfig] | None)


def _wait_until(reached: Callable[[], bool], beat: Callable[[int], None]) -> None:
    # Where a rank waits is told by this function's name (launch/supervision/watch.LOOPS).
    while not reached():
        beat(0)
        time.sleep(START_PAUSE_SECONDS)


def _meet_remote_workers(
    number: int, shared: SharedMapping, regions: Regions, beat: Callable[[int], None]
) -> Mapping[int, Any]:
    """Return the workers on other hosts, met in a thread while this one gives signs of life.

    They are of the class that the server's arithmetic takes.
    """
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(remote_workers, rendezvous_store(), number, shared, regions)
        _wait_until(met.done, beat)
    return met.result()


def _on_gpu(
    number: int, host: int, device: torch.device, shared: SharedMapping, beat: Callable[[int], None]
) -> GpuArithmetic:
    """Export this server's GPU memory, and open that of this host's workers for replies."""
    config, control = shared.config, shared.control
    remote = config.remote_workers(host)
    workers = [worker for worker in range(config.workers) if worker not in remote]
    torch.zeros(1, device=device)  # makes the context that CUDA's own calls use
    page_lock(shared.address, len(shared.bytes))
    memory = GpuMemory(Regions.size(config, shared.layout), device)
    row = config.workers + number
    control.handles[row] = list(exported(memory))
    control.attached[row] = MAPPED
    _wait_until(lambda: bool((control.attached[workers] >= MAPPED).all()), beat)
    replies = {}
    for worker in workers:
        replies[worker] = imported(control.handles[worker].tobytes())
    regions = Regions(memory.bytes, config, shared.layout)
    return GpuArithmetic(shared, regions, number, replies)
