"""What the machine allows a worker with servers: its copies alone, its sums alone, and the host's memory alone.

Every probe moves or sums as many bytes as one exchange, and waits for no flag of another worker.
"""

import threading

import torch

from trainers import reference_probes as net_probe
from trainers.kvstore import server as cpu_sums
from trainers.kvstore.remote import NO_SETTINGS, Demand
from trainers.kvstore.worker import Worker
from trainers.process import on_threads
from trainers.reference_probes import TIMES
from trainers.strategy import ReferenceProbe

# STREAM's add (McCalpin 1995): two float32 read and one written for each element.
ADD_BYTES = 12
CHECK_SECONDS = 0.5  # between two looks whether a connection has failed


def probes(worker: Worker) -> list[ReferenceProbe]:
    """Return the references of an exchange: host link and host memory, or the link of the servers' GPUs; then its stages."""
    found = []
    places = worker.config.places
    if places:
        found = [
            ReferenceProbe(net_probe.NAME, lambda: send_far(worker), 1.0, way=time)
            for time in TIMES
        ]
    if worker.config.server_gpu:
        if not places or any(
            host < len(places.ranks) for host in places.server_hosts
        ):  # some are beside workers
            found.append(ReferenceProbe("server_link", lambda: copy_all(worker, back=False), 1.0))
        return found
    if worker.on_gpu:
        found += [
            host_link(worker),
            ReferenceProbe(
                "device_to_host", lambda: copy_all(worker, back=False), 1.0, reference=False
            ),
            ReferenceProbe(
                "host_to_device", lambda: copy_all(worker, out=False), 1.0, reference=False
            ),
        ]
    if summed_bytes(worker) and not places:  # the sums are on the servers' hosts
        found.append(ReferenceProbe("host_memory", HostMemory(worker, linked=False), 1.0))
        if worker.on_gpu:
            found.append(
                ReferenceProbe("all_at_once", HostMemory(worker, linked=True), 1.0, reference=False)
            )
    if not worker.config.servers:
        found.append(ReferenceProbe("sum", lambda: sum_alone(worker), 1.0, reference=False))
    return found


def host_link(worker: Worker) -> ReferenceProbe:
    """Return the reference of the link between GPU and host, both ways at once. GPUs only."""
    return ReferenceProbe("host_link", lambda: copy_all(worker), 1.0)


def send_far(worker: Worker) -> None:
    """Send the buckets of servers on other hosts there, over the connections of the exchange, and wait until all are back."""
    if worker.elsewhere.on_gpus:
        current = torch.cuda.current_stream()
        worker.pushing.stream.wait_stream(current)
        for bucket, on_gpu in sorted(worker.elsewhere.on_gpus.items()):
            sent, reply = worker.sent[bucket], worker.means[bucket]
            current.wait_stream(
                on_gpu.exchange(
                    Demand.PROBE, bucket, sent, reply, NO_SETTINGS, worker.pushing.stream
                )
            )
        return
    back = threading.Semaphore(0)
    for bucket, server in sorted(worker.elsewhere.by_bucket.items()):
        server.push(
            Demand.PROBE,
            bucket,
            worker.sent_on_host[bucket],
            worker.means_on_host[bucket],
            back.release,
        )
    for _ in worker.elsewhere.by_bucket:
        while not back.acquire(timeout=CHECK_SECONDS):
            worker.elsewhere.check()


def copy_all(worker: Worker, out: bool = True, back: bool = True) -> None:
    """Copy the bytes of an exchange in the largest possible copies: gradients out, means back, or both at once. GPUs only."""
    current = torch.cuda.current_stream()
    streams = [
        copies.stream
        for copies, wanted in ((worker.pushing, out), (worker.pulling, back))
        if wanted
    ]
    for stream in streams:
        stream.wait_stream(current)
    if out and worker.config.server_gpu:
        for target, sent in zip(worker.push_to, worker.sent, strict=True):
            if target:
                worker.pushing.copy(target, sent.data_ptr(), sent.nbytes)
    elif out:
        worker.pushing.copy(worker.push_to[0], worker.staging.data_ptr(), len(worker.staging))
    if back:
        worker.pulling.copy(
            worker.means[0].data_ptr(), worker.means_from[0], worker.layout.push_bytes
        )
    for stream in streams:
        current.wait_stream(stream)


def sum_alone(worker: Worker) -> None:
    """Compute this worker's share of the sums on whatever its regions hold."""
    regions = worker.shared.regions
    assert regions is not None
    space = torch.empty(max(bucket.elements for bucket in worker.layout.buckets))
    with on_threads(worker.threads):
        for number in worker.own_buckets():
            if not worker.config.replies_own_gradient:
                pushed = [of_worker[number] for of_worker in regions.pushed.values()]
                cpu_sums.mean(
                    pushed, [copy[number] for copy in regions.gradient_replies.values()], space
                )


def summed_bytes(worker: Worker) -> float:
    """Return the bytes that the sums of one exchange read and write in host memory, for each worker."""
    config = worker.config
    if config.replies_own_gradient:
        return 0
    replies = config.reply_copies if config.synchronous else config.workers
    return worker.layout.push_bytes * (config.workers + replies) / config.workers


class HostMemory:
    """Reads and writes as many bytes of host memory as the sums of an exchange, in memory of its own.

    `linked`: while the link between GPU and host copies both ways.
    """

    def __init__(self, worker: Worker, linked: bool) -> None:
        self._worker, self._linked = worker, linked
        elements = int(summed_bytes(worker) // ADD_BYTES)
        self._one, self._other, self._sum = (torch.ones(elements) for _ in range(3))

    def __call__(self) -> None:
        """Move the bytes of one exchange."""
        if self._linked:
            copy_all(self._worker)
        with on_threads(self._worker.threads):
            torch.add(self._one, self._other, out=self._sum)
