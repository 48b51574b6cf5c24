"""All-reduce in two levels: a reduce-scatter inside each host, an all-reduce of each share over its rail, an all-gather inside.

A rail joins the ranks with one place on all hosts, so that each byte of a share crosses between hosts once for every host and
not for every rank (Goyal et al. 2017, arXiv:1706.02677, section 4; torch's FSDP calls it hybrid sharding).
"""

import torch
import torch.distributed as dist

from trainers import collectives as one_bucket
from trainers import reference_probes as net_probe
from trainers import reference_probes as ring_probe
from trainers.collectives import HostGroups
from trainers.kvstore import bucketed as sharding
from trainers.kvstore.bucketed import Bucketed, arrays_of
from trainers.kvstore.buckets import BucketLayout
from trainers.strategy import BucketExchange, ReferenceProbe


class Hierarchical(Bucketed):
    """The mean gradient, bucket by bucket while backward runs; every rank updates its own weights.

    Buckets are reduced in place. All-gathers wait until every bucket is reduced inside the host: they have one communicator
    with the reduce-scatters, and an early one would hold back the buckets behind it until its share has crossed.
    """

    own_work_alone = True  # one rank alone fills and empties buckets, and sends nothing

    def __init__(self, bucket_cap_mb: float, comm_hook: str) -> None:
        super().__init__(bucket_cap_mb, comm_hook, only_gradients=True)
        self._groups: HostGroups | None = None

    def set_up(self, order: list[int]) -> None:
        """Make the groups and the flat buckets. Collective."""
        self._groups = groups = HostGroups(self.hosts)
        device = self.parameters[0].device
        self.layout = BucketLayout.of(
            arrays_of(self.parameters, self.comm_hook), order, self.cap_bytes
        )
        self.flat_sent = sharding.padded(
            self.layout, groups.here, in_weight_dtype=False, device=device
        )
        self.flat_means = self.flat_sent
        self._shares = sharding.shares(self.flat_sent, groups.place, groups.here)
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._inside: dict[int, dist.Work | None] = {}  # buckets that are not on their rail yet
        self._crossing: list[dist.Work] = []

    def start_bucket(self, bucket: int) -> None:
        """Begin to reduce a bucket inside the host, and on its rail those before it that are ready."""
        self._inside[bucket] = self._reduce_inside(bucket)
        self._cross(wait=self._stream is not None)  # there a stream waits, and not the host

    def _reduce_inside(self, bucket: int) -> dist.Work | None:
        assert self._groups is not None
        flat, group = self.flat_sent[bucket], self._groups.inside
        if self._groups.here == 1:
            return None
        if flat.is_cuda:
            return dist.reduce_scatter_tensor(
                self._shares[bucket], flat, dist.ReduceOp.AVG, group, async_op=True
            )
        # gloo's own reduce-scatter is an all-reduce of a copy, and does not tell when it has ended.
        return dist.all_reduce(flat, group=group, async_op=True)

    def _cross(self, wait: bool) -> None:
        """Begin to reduce shares on their rail, in order, as far as the buckets are reduced inside the host; or all of them."""
        assert self._groups is not None
        if self._stream is not None:
            self._stream.wait_stream(
                torch.cuda.current_stream()
            )  # for a rank that is alone on its host
        with torch.cuda.stream(self._stream):
            for bucket, work in list(self._inside.items()):
                if work is not None:
                    if not wait and not work.is_completed():
                        return
                    work.wait()
                del self._inside[bucket]
                if self._groups.rail is not None:
                    share = self._shares[bucket]
                    begun = dist.all_reduce(
                        share,
                        sharding.mean_operation(share),
                        group=self._groups.rail,
                        async_op=True,
                    )
                    assert begun is not None
                    self._crossing.append(begun)

    def finish_buckets(self) -> None:
        """Wait for the shares, and bring them to all ranks of the host."""
        assert self._groups is not None
        self._cross(wait=True)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        crossing, self._crossing = iter(self._crossing), []
        gathering = []
        for flat, share in zip(self.flat_sent, self._shares, strict=True):
            if self._groups.rail is not None:
                next(crossing).wait()
            if not share.is_cuda:
                share.div_(dist.get_world_size())  # gloo has no mean
            if self._groups.here > 1:
                gathering.append(
                    dist.all_gather_into_tensor(
                        flat, share, group=self._groups.inside, async_op=True
                    )
                )
        for work in gathering:
            assert work is not None
            work.wait()

    def apply_weights(self) -> None:
        """Do nothing: the means are in `.grad`."""

    def bytes_moved(self, gradient_bytes: float, world_size: int) -> float:
        """Return 2(m−1)/m of the bytes inside a host of m ranks, and 2(h−1)/h of a share's bytes between h hosts."""
        sent, here = self.sent_bytes(gradient_bytes), len(self.hosts.ranks[0])
        return sharding.ring_bytes(sent, here) + sharding.ring_bytes(
            sent / here, len(self.hosts.ranks)
        )

    def probes(self) -> list[ReferenceProbe]:
        """Return the references: the links between neighbours of a host, and the wire between hosts."""
        groups, device = self._groups, self.parameters[0].device
        assert groups is not None
        sent = sum(flat.nbytes for flat in self.flat_sent)
        inside = ring_probe.probes(device, sharding.ring_bytes(sent, groups.here), groups.inside)
        between = sharding.ring_bytes(sent, groups.hosts)
        return [*inside, *net_probe.net_probe_probes(self.hosts, device, between, groups.rail)]

    def bucket_exchange(self, size_bytes: int, dtype: str) -> BucketExchange:
        """Return the three steps of one bucket."""
        groups, device = self._groups, self.parameters[0].device
        assert groups is not None
        return one_bucket.in_two_levels(
            size_bytes, dtype, device, groups.inside, groups.rail, groups.place, groups.here
        )

    def close(self) -> None:
        """Take the groups apart."""
        if self._groups is not None:
            self._groups.close()
