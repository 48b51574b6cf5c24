"""What the machine allows a worker with servers: its copies, its sums and the memory alone.

Every probe moves or sums as many bytes as one exchange, and waits for no flag of another worker.
"""

import functools
import threading
from collections.abc import Callable

import torch

from trainers.kvstore import server
from trainers.kvstore.push_pull_worker import Worker
from trainers.kvstore.remote import NO_SETTINGS, Demand
from trainers.process import on_threads
from trainers.reference_probes import NET_LINK, TIMES
from trainers.strategy import ReferenceProbe

# STREAM's add (McCalpin 1995): two float32 read and one written for each element.
ADD_BYTES = 12
CHECK_SECONDS = 0.5  # between two looks whether a connection has failed


def probes(worker: Worker) -> list[ReferenceProbe]:
    """Return the references of an exchange, then its stages."""
    references = []
    places = worker.config.places
    if places.several:
        run = functools.partial(send_remote, worker)
        references += [ReferenceProbe(NET_LINK, run, 1.0, way=time) for time in TIMES]
    out = functools.partial(copy_all, worker, back=False)
    if worker.config.server_gpu:
        if min(places.server_hosts) < len(places.ranks):  # some are beside workers
            references.append(ReferenceProbe("server_link", out, 1.0))
        return references
    if worker.on_gpu:
        back = functools.partial(copy_all, worker, out=False)
        references.append(host_link(worker))
        references.append(ReferenceProbe("device_to_host", out, 1.0, reference=False))
        references.append(ReferenceProbe("host_to_device", back, 1.0, reference=False))
    if summed_bytes(worker) and not places.several:  # the sums are on the servers' hosts
        memory = host_memory(worker)
        references.append(ReferenceProbe("host_memory", memory, 1.0))
        if worker.on_gpu:
            at_once = host_memory(worker, linked=True)
            references.append(ReferenceProbe("all_at_once", at_once, 1.0, reference=False))
    if not worker.config.servers:
        alone = functools.partial(sum_alone, worker)
        references.append(ReferenceProbe("sum", alone, 1.0, reference=False))
    return references


def host_link(worker: Worker) -> ReferenceProbe:
    """Return the reference of the link between GPU and host, both ways at once. GPUs only."""
    return ReferenceProbe("host_link", functools.partial(copy_all, worker), 1.0)


def send_remote(worker: Worker) -> None:
    """Send the buckets of servers on other hosts there as an exchange does; wait for them back."""
    if worker.config.server_gpu:
        current, sending = torch.cuda.current_stream(), worker.pushing.stream
        sending.wait_stream(current)
        for bucket, remote in sorted(worker.remote.items()):
            sent, reply = worker.sent[bucket], worker.means[bucket]
            received = remote.exchange_on_gpu(
                Demand.PROBE, bucket, sent, reply, NO_SETTINGS, sending
            )
            current.wait_stream(received)
        return
    back = threading.Semaphore(0)
    for bucket, remote in sorted(worker.remote.items()):
        sent, reply = worker.sent_on_host[bucket], worker.means_on_host[bucket]
        remote.push(Demand.PROBE, bucket, sent, reply, back.release)
    for _ in worker.remote:
        while not back.acquire(timeout=CHECK_SECONDS):
            worker.check_remote_servers()


def copy_all(worker: Worker, out: bool = True, back: bool = True) -> None:
    """Copy the bytes of an exchange in the largest possible copies: gradients out, means back."""
    current = torch.cuda.current_stream()
    streams = []
    if out:
        streams.append(worker.pushing.stream)
    if back:
        streams.append(worker.pulling.stream)
    for stream in streams:
        stream.wait_stream(current)
    if out and worker.config.server_gpu:
        for target, sent in zip(worker.push_to, worker.sent, strict=True):
            if target:
                worker.pushing.copy(target, sent.data_ptr(), sent.nbytes)
    elif out:
        worker.pushing.copy(worker.push_to[0], worker.staging.data_ptr(), len(worker.staging))
    if back:
        mean, size_bytes = worker.means[0], worker.layout.push_bytes
        worker.pulling.copy(mean.data_ptr(), worker.means_from[0], size_bytes)
    for stream in streams:
        current.wait_stream(stream)


def sum_alone(worker: Worker) -> None:
    """Compute this worker's share of the sums on whatever its regions hold."""
    regions = worker.shared.regions
    assert regions is not None
    space = torch.empty(max(bucket.elements for bucket in worker.layout.buckets))
    with on_threads(worker.threads):
        for bucket in worker.layout.of_server(worker.peers.rank):
            if not worker.config.replies_own_gradient:
                pushed = [buckets[bucket] for buckets in regions.pushed.values()]
                replies = [buckets[bucket] for buckets in regions.gradient_replies.values()]
                server.mean(pushed, replies, space)


def summed_bytes(worker: Worker) -> float:
    """Return the bytes that sums read and write in host memory, for each worker of an exchange."""
    config = worker.config
    if config.replies_own_gradient:
        return 0
    replies = config.reply_copies if config.synchronous else config.workers
    return worker.layout.push_bytes * (config.workers + replies) / config.workers


def host_memory(worker: Worker, linked: bool = False) -> Callable[[], None]:
    """Return what moves as many bytes of host memory as the sums of an exchange, of its own.

    `linked`: while the link between GPU and host copies both ways.
    """
    elements = int(summed_bytes(worker) // ADD_BYTES)
    first, second, total = (torch.ones(elements) for _ in range(3))

    def add() -> None:
        if linked:
            copy_all(worker)
        with on_threads(worker.threads):
            torch.add(first, second, out=total)

    return add
