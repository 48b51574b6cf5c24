"""The servers on other hosts, which a worker meets in the cell's store."""

from typing import TYPE_CHECKING

from trainers.kvstore import server_process
from trainers.kvstore.buckets import BucketLayout
from trainers.kvstore.remote.messages import WORKER, Demand, Wire
from trainers.kvstore.remote.servers import ServerElsewhere
from trainers.kvstore.shared_regions import KvstoreConfig

if TYPE_CHECKING:  # needs NCCL
    from trainers.kvstore.remote.gpus import GpuServerElsewhere


class ServersElsewhere:
    """All servers on other hosts; none where all are on one.

    `by_bucket` has the server of each bucket that goes there, `on_gpus` those that are on GPUs.
    """

    def __init__(self, worker: int, config: KvstoreConfig, layout: BucketLayout) -> None:
        """Meet them in the cell's store."""
        hosts = enumerate(config.places.server_hosts if config.places else ())
        far = [server for server, host in hosts if worker in config.elsewhere(host)]
        store = server_process.store() if far else None
        self._servers: list[ServerElsewhere] = []
        self.on_gpus: dict[int, GpuServerElsewhere] = {}
        for server in far:
            assert store is not None
            buckets = [number for number, bucket in enumerate(layout.buckets) if bucket.server == server]
            wire = Wire(store, worker, server, WORKER, len(layout.buckets))
            if config.server_gpu:
                from trainers.kvstore.remote import gpus

                on_gpu = gpus.GpuServerElsewhere(wire, buckets, gpus.GpuWire(store, worker, server, WORKER))
                self._servers.append(on_gpu)
                self.on_gpus |= dict.fromkeys(buckets, on_gpu)
            else:
                self._servers.append(ServerElsewhere(wire, buckets))
        self.by_bucket = {bucket: server for server in self._servers for bucket in server.buckets}

    def counts(self) -> list[list[float]]:
        """Return the updates of each server, and the sum and maximum of their staleness."""
        return [server.ask(Demand.COUNT) for server in self._servers]

    def check(self) -> None:
        """Raises RuntimeError: a connection has failed."""
        for server in self._servers:
            server.check()

    def close(self) -> None:
        """Part from all."""
        for server in self._servers:
            server.close()
