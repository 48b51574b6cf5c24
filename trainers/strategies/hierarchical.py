"""All-reduce in two levels: reduce-scatter inside each host, all-reduce of shares, all-gather.

A rail joins the ranks with one place on all hosts, so that each byte of a share crosses between
hosts once for every host and not for every rank (Goyal et al. 2017, arXiv:1706.02677, section 4;
torch's FSDP calls it hybrid sharding).
"""

import torch
import torch.distributed as dist

from trainers import collectives, reference_probes
from trainers.collectives import HostGroups
from trainers.kvstore import bucketed
from trainers.kvstore.bucketed import Bucketed, ring_bytes
from trainers.strategy import BucketExchange, ReferenceProbe


class Hierarchical(Bucketed):
    """The mean gradient, bucket by bucket while backward runs; every rank updates its own weights.

    Buckets are reduced in place. All-gathers wait until every bucket is reduced inside the host:
    they have one communicator with the reduce-scatters, and an early one would hold back the
    buckets behind it until its share has crossed.
    """

    own_work_alone = True  # one rank alone fills and empties buckets, and sends nothing

    def __init__(self, bucket_cap_mb: float, comm_hook: str) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients=True)
        self._groups: HostGroups | None = None

    def set_up(self, order: list[int]) -> None:
        """Make the groups and the flat buckets. Collective."""
        self._groups = groups = HostGroups(self.hosts)
        self.make_flats(order, groups.here, weights=False)
        self._shares = bucketed.shares(self.flat_sent, groups.place, groups.here)
        self._stream = torch.cuda.Stream() if self.parameters[0].is_cuda else None
        self._inside: dict[int, dist.Work | None] = {}  # buckets that are not on their rail yet
        self._crossing: list[dist.Work | None] = []

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce a bucket inside the host, and on its rail those before it."""
        assert self._groups is not None
        flat, group, work = self.flat_sent[bucket], self._groups.inside, None
        if self._groups.here > 1 and flat.is_cuda:
            share, operation = self._shares[bucket], dist.ReduceOp.AVG
            work = dist.reduce_scatter_tensor(share, flat, operation, group, async_op=True)
        elif self._groups.here > 1:
            # gloo's own reduce-scatter is an all-reduce of a copy, and does not tell its end.
            work = dist.all_reduce(flat, group=group, async_op=True)
        self._inside[bucket] = work
        self._cross(wait=self._stream is not None)  # there a stream waits, and not the host

    def _cross(self, wait: bool) -> None:
        """Begin to reduce shares on their rail, in order: those that are reduced inside, or all."""
        assert self._groups is not None
        if self._stream is not None:  # for a rank that is alone on its host
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for bucket, work in list(self._inside.items()):
                if work is not None:
                    if not wait and not work.is_completed():
                        return
                    work.wait()
                del self._inside[bucket]
                if self._groups.rail is not None:
                    share, rail = self._shares[bucket], self._groups.rail
                    operation = collectives.mean_operation(share)
                    self._crossing.append(dist.all_reduce(share, operation, rail, async_op=True))

    def finish_buckets(self) -> None:
        """Wait for the shares, and bring them to all ranks of the host."""
        groups = self._groups
        assert groups is not None
        self._cross(wait=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        crossing, self._crossing = iter(self._crossing), []
        gathering = []
        for flat, share in zip(self.flat_sent, self._shares, strict=True):
            if groups.rail is not None:
                collectives.wait(next(crossing))
            if not share.is_cuda:
                share.div_(dist.get_world_size())  # gloo has no mean
            if groups.here > 1:
                inside = groups.inside
                gathering.append(dist.all_gather_into_tensor(flat, share, inside, async_op=True))
        for work in gathering:
            collectives.wait(work)

    def apply_weights(self) -> None:
        """Do nothing: the means are in `.grad`."""

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return what goes inside a host, and a share's bytes between hosts."""
        return bucketed.two_level_bytes(self.sent_bytes(gradient_bytes), self.hosts)

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between neighbours of a host, and between hosts."""
        groups, device = self._groups, self.parameters[0].device
        assert groups is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        inside = reference_probes.ring(device, ring_bytes(sent, groups.here), groups.inside)
        host_bytes = ring_bytes(sent, groups.hosts)
        return inside + reference_probes.between_hosts(self.hosts, device, host_bytes, groups.rail)

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return the three steps of one bucket."""
        groups = self._groups
        assert groups is not None
        here, inside, rail = groups.here, groups.inside, groups.rail
        flat = collectives.filled(size_bytes, dtype, self.parameters[0].device, here)
        share = flat.chunk(here)[groups.place]
        operations = []
        if here > 1:
            # As above: gloo's own reduce-scatter is an all-reduce of a copy.
            operations.append("reduce_scatter" if flat.is_cuda else "all_reduce")
        if rail is not None:
            operations.append("all_reduce")
        if here > 1:
            operations.append("all_gather")

        def run() -> None:
            operation = collectives.mean_operation(flat)
            if here > 1 and flat.is_cuda:
                work = dist.reduce_scatter_tensor(share, flat, operation, inside, async_op=True)
                collectives.wait(work)
            elif here > 1:
                collectives.wait(dist.all_reduce(flat, group=inside, async_op=True))
            if rail is not None:
                collectives.wait(dist.all_reduce(share, operation, rail, async_op=True))
            if here > 1:
                collectives.wait(dist.all_gather_into_tensor(flat, share, inside, async_op=True))

        return BucketExchange(" + ".join(operations), run)

    def close(self) -> None:
        """Take the groups apart."""
        if self._groups is not None:
            self._groups.close()
