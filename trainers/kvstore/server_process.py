"""A server in a process of its own: it waits for the workers' config, maps their memory and serves until they are done."""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainers.kvstore import server
from trainers.kvstore import server as cpu_sums
from trainers.kvstore.remote import Answering, rendezvous_store, workers_elsewhere
from trainers.kvstore.server import Arithmetic, CpuArithmetic, GpuArithmetic, Server
from trainers.kvstore.shared_memory import KvstoreConfig, Regions, SharedMapping, path_on

Met = TypeVar("Met")
KEY = "config"
PAUSE_SECONDS = 0.02  # between two looks while the cell starts


def announce(path: Path, config: KvstoreConfig) -> None:
    """Give the servers the config and the path of the shared memory."""
    rendezvous_store().set(KEY, json.dumps({"path": str(path), "config": config.to_dict()}))


def dismiss() -> None:
    """Let the servers end without work."""
    rendezvous_store().set(KEY, json.dumps(None))


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
    if announced is None:
        return
    path, config = announced
    layout = config.layout()
    host = config.places.server_hosts[number] if config.places else 0
    together = not config.places or host < len(
        config.places.ranks
    )  # with workers, whose memory this is
    shared = SharedMapping(
        path_on(path, config, host) if together else None, config, layout, host=host
    )
    own_buckets = [place for place, bucket in enumerate(layout.buckets) if bucket.server == number]
    row = config.workers + number  # in the control block, behind those of the workers
    arithmetic: Arithmetic
    elsewhere: Mapping[int, Any] = {}
    if config.server_gpu:
        here = [worker for worker in range(config.workers) if worker not in config.elsewhere(host)]
        arithmetic = on_gpu = _on_gpu(row, here, device, config, shared, own_buckets, beat)
        if config.elsewhere(host):
            from trainers.kvstore.remote import gpu_workers_elsewhere

            met = (rendezvous_store(), number, shared, on_gpu.regions, own_buckets, device)
            on_gpu.elsewhere = elsewhere = _while_beating(lambda: gpu_workers_elsewhere(*met), beat)
    else:
        torch.set_num_threads(cpu_sums.thread_count(threads, config.servers_together))
        arithmetic = CpuArithmetic(config, shared, own_buckets)
        shared.control.attached[row] = 1
        if config.elsewhere(host):
            elsewhere = _while_beating(
                lambda: workers_elsewhere(rendezvous_store(), number, shared, own_buckets), beat
            )
            arithmetic = Answering(arithmetic, elsewhere)
    shared.control.attached[row] = 2
    phase("serving")

    def stopped() -> bool:
        for worker in elsewhere.values():
            worker.check()
        return (not together or bool(shared.control.stop[0])) and all(
            one.stopped for one in elsewhere.values()
        )

    Server(config, shared.control, number, own_buckets, arithmetic).run(
        stopped, beat, server.PAUSE_SECONDS[worker_device]
    )


def _while_beating(meet: Callable[[], Met], beat: Callable[[int], None]) -> Met:
    """Return what `meet` returns, which may wait for others without a sign of life."""
    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(meet)
        while not met.done():
            beat(0)
            time.sleep(PAUSE_SECONDS)
    return met.result()


def _wait_for_workers(beat: Callable[[int], None]) -> tuple[Path, KvstoreConfig] | None:
    """Return what the workers announce; None where they have no work."""
    meeting = rendezvous_store()
    while not meeting.check([KEY]):
        beat(0)
        time.sleep(PAUSE_SECONDS)
    announced = json.loads(meeting.get(KEY))
    return announced and (Path(announced["path"]), KvstoreConfig.from_dict(announced["config"]))


def _on_gpu(
    row: int,
    here: list[int],
    device: torch.device,
    config: KvstoreConfig,
    shared: SharedMapping,
    own_buckets: list[int],
    beat: Callable[[int], None],
) -> GpuArithmetic:
    """Export this server's GPU memory, and open that of the workers on this host, `here`, for replies."""
    from trainers.kvstore import cuda_copies

    torch.zeros(1, device=device)  # makes the context that CUDA's own calls use
    cuda_copies.page_lock(shared.address, len(shared.bytes))
    exported = cuda_copies.Exported(Regions.size(config, shared.layout), device)
    control = shared.control
    control.handles[row] = list(exported.handle())
    control.attached[row] = 1
    while (control.attached[here] < 1).any():
        beat(0)
        time.sleep(PAUSE_SECONDS)
    replies = {worker: cuda_copies.imported(control.handles[worker].tobytes()) for worker in here}
    return GpuArithmetic(
        config, shared, Regions(exported.bytes, config, shared.layout), replies, own_buckets
    )
