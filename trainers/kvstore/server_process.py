"""A server in a process of its own: it waits for the workers' terms, maps their memory and serves until they are done."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainers.kvstore import cpu_sums
from trainers.kvstore.server import PAUSE_SECONDS as PAUSES
from trainers.kvstore.server import Arithmetic, OnCpu, OnGpu, Server
from trainers.kvstore.shared_regions import KvstoreConfig, Regions, Shared

KEY = "terms"
PAUSE_SECONDS = 0.02


def _store() -> PrefixStore:
    """The store that the cell's processes met at (torchrun's variables)."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("ringside/kvstore", TCPStore(address, port, is_master=False))


def announce(path: Path, terms: KvstoreConfig) -> None:
    """Tell the servers where to find the workers."""
    _store().set(KEY, json.dumps({"path": str(path), "terms": terms.to_dict()}))


def dismiss() -> None:
    """Tell the servers that there will be no work."""
    _store().set(KEY, json.dumps(None))


def serve(
    number: int,
    device: torch.device,
    worker_device: str,
    threads: int | str,
    phase: Callable[[str], None],
    beat: Callable[[int], None],
) -> None:
    """Be server `number` of a cell until its workers, on GPUs or CPUs ('cuda', 'cpu'), are done.

    `beat` is called often, with the pushes served since.
    """
    phase("waiting for workers")
    store = _store()
    while not store.check([KEY]):
        beat(0)
        time.sleep(PAUSE_SECONDS)
    told = json.loads(store.get(KEY))
    if told is None:
        return
    terms = KvstoreConfig.from_dict(told["terms"])
    layout = terms.layout()
    shared = Shared(Path(told["path"]), terms, layout)
    control = shared.control
    mine = [place for place, bucket in enumerate(layout.buckets) if bucket.server == number]
    place = terms.workers + number
    arithmetic: Arithmetic
    if terms.server_gpu:
        from trainers.kvstore import cuda_copies

        torch.zeros(1, device=device)  # makes the context that CUDA's own calls use
        cuda_copies.page_lock(shared.address, len(shared.bytes))
        exported = cuda_copies.Exported(Regions.size(terms, layout), device)
        control.handles[place] = list(exported.handle())
        control.attached[place] = 1
        while (control.attached[: terms.workers] < 1).any():
            beat(0)
            time.sleep(PAUSE_SECONDS)
        inboxes = [cuda_copies.imported(control.handles[worker].tobytes()) for worker in range(terms.workers)]
        arithmetic = OnGpu(terms, shared, Regions(exported.tensor, terms, layout), inboxes, mine)
    else:
        torch.set_num_threads(cpu_sums.thread_count(threads, terms.servers))
        arithmetic = OnCpu(terms, shared, mine)
        control.attached[place] = 1
    control.attached[place] = 2
    phase("serving")
    Server(terms, control, number, mine, arithmetic).run(lambda: bool(control.stop[0]), beat, PAUSES[worker_device])
