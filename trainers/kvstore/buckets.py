"""Which parts of which arrays travel together: buckets, each of one dtype and for one server.

Placement on servers is MXNet's (ps-lite through src/kvstore/kvstore_dist.h, EncodeDefaultKey): an
array of at least `bigarray_bound` elements is split evenly over all servers, a smaller one goes
whole to server (key × 9973) mod servers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Every bucket starts at a multiple of this many bytes: no two share a cache line, and GPUs copy
# aligned memory faster.
ALIGNMENT = 256
HASH_PRIME = 9973  # of EncodeDefaultKey
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
# (number of the array among all keys, its elements) -> (server, start, stop) of its parts
Placement = Callable[[int, int], list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a flattened array."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parts that travel together. Offsets are in bytes from the start of a region."""

    server: int
    parts: tuple[Part, ...]
    elements: int
    push_offset: int  # of gradients, in the dtype that travels
    pull_offset: int  # of weights or mean gradients


@dataclass(frozen=True)
class Array:
    """One parameter: its elements, and the dtypes of the weight and of the sent gradient."""

    elements: int
    weight_dtype: str
    wire_dtype: str


def whole(key: int, elements: int) -> list[tuple[int, int, int]]:
    """Leave an array whole; buckets are dealt to servers later."""
    return [(0, 0, elements)]


def mxnet(servers: int, bigarray_bound: int) -> Placement:
    """Return MXNet's placement."""

    def place(key: int, elements: int) -> list[tuple[int, int, int]]:
        if servers == 1 or elements < bigarray_bound:
            return [((key * HASH_PRIME) % servers, 0, elements)]
        parts, start = [], 0
        for server in range(servers):
            stop = math.floor(elements / servers * (server + 1) + 0.5)  # C rounds halves up
            parts.append((server, start, stop))
            start = stop
        return parts

    return place


@dataclass(frozen=True)
class BucketLayout:
    """All buckets, in the order in which they are exchanged."""

    buckets: tuple[Bucket, ...]
    arrays: tuple[Array, ...]
    push_bytes: int  # of a region for gradients
    pull_bytes: int  # of a region for weights

    @staticmethod
    def of(
        arrays: Sequence[Array],
        order: Sequence[int],
        cap_bytes: float,
        place: Placement = whole,
        dealt: int = 0,
    ) -> "BucketLayout":
        """Fill buckets with the arrays of `order`, each with one dtype and one server.

        A bucket is full at `cap_bytes`. A larger array is cut into equal parts of at most that; a
        cap of 0 cuts nothing and gives every part a bucket of its own. `dealt` > 0 deals the
        buckets to that many servers, each to the least loaded. An array that is not in `order` has
        no gradient and is in no bucket.
        """
        groups: list[tuple[int, list[Part]]] = []
        current: dict[tuple[int, str], tuple[list[Part], int]] = {}
        for key in order:
            array = arrays[key]
            item_bytes = ITEM_BYTES[array.weight_dtype]
            placed = place(key, array.elements)
            for server, start, stop in _cut(placed, cap_bytes / item_bytes):
                group = (server, array.weight_dtype)
                parts, size = current.get(group, ([], 0))
                if not parts:
                    groups.append((server, parts))
                parts.append(Part(key, start, stop))
                size += (stop - start) * item_bytes
                if size >= cap_bytes:
                    current.pop(group, None)
                else:
                    current[group] = (parts, size)
        buckets, push, pull = [], 0, 0
        loads = [0] * dealt
        for server, parts in groups:
            elements = sum(part.stop - part.start for part in parts)
            array = arrays[parts[0].array]
            sent_bytes = elements * ITEM_BYTES[array.wire_dtype]
            if dealt:
                server = loads.index(min(loads))
                loads[server] += sent_bytes
            buckets.append(Bucket(server, tuple(parts), elements, push, pull))
            push += aligned(sent_bytes)
            pull += aligned(max(sent_bytes, elements * ITEM_BYTES[array.weight_dtype]))
        return BucketLayout(tuple(buckets), tuple(arrays), push, pull)

    def of_server(self, server: int) -> list[int]:
        """Return the numbers of a server's buckets."""
        return [index for index, bucket in enumerate(self.buckets) if bucket.server == server]


def _cut(parts: list[tuple[int, int, int]], most: float) -> list[tuple[int, int, int]]:
    """Cut parts (server, start, stop) to at most `most` elements; 0: leave them as they are."""
    pieces = []
    for server, start, stop in parts:
        elements = stop - start
        count = max(1, min(elements, math.ceil(elements / most))) if most else 1
        edges = [start + elements * piece // count for piece in range(count + 1)]
        for first, last in itertools.pairwise(edges):
            pieces.append((server, first, last))
    return pieces


def aligned(size_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
