"""Which parts of which arrays travel together: buckets, each of one dtype and for one server. Arithmetic without torch.

Placement on servers is MXNet's (ps-lite through src/kvstore/kvstore_dist.h, EncodeDefaultKey): an array of at least
`bigarray_bound` elements is split evenly over all servers, a smaller one goes whole to server (key × 9973) mod servers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Every bucket starts at a multiple of this many bytes: no two share a cache line, and GPUs copy aligned memory faster.
ALIGNMENT = 256
HASH_PRIME = 9973  # of EncodeDefaultKey


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of a flattened array."""

    array: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Parts that travel together. Offsets are in bytes from the start of a region that holds every bucket."""

    server: int
    parts: tuple[Part, ...]
    elements: int
    push_offset: int  # of gradients, in the dtype that travels
    pull_offset: int  # of weights or mean gradients


ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Array:
    """One parameter: its elements, and the names of the dtypes of the weight and of the gradient as it travels."""

    elements: int
    weight_dtype: str
    wire_dtype: str


# (number of the array among all keys, its elements) -> (server, start, stop) of its parts
Placement = Callable[[int, int], list[tuple[int, int, int]]]


def whole(key: int, elements: int) -> list[tuple[int, int, int]]:
    """Leave an array whole; buckets are dealt to servers later."""
    return [(0, 0, elements)]


def mxnet(servers: int, bigarray_bound: int) -> Placement:
    """Return MXNet's placement."""

    def place(key: int, elements: int) -> list[tuple[int, int, int]]:
        if servers == 1 or elements < bigarray_bound:
            return [((key * HASH_PRIME) % servers, 0, elements)]
        edges = [
            math.floor(elements / servers * number + 0.5) for number in range(servers + 1)
        ]  # C rounds halves up
        return [(server, edges[server], edges[server + 1]) for server in range(servers)]

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
        """Fill buckets with the arrays of `order` (numbers of arrays). Each has one dtype and one server, full at `cap_bytes`.

        A larger array is cut into equal parts of at most `cap_bytes`. A cap of 0 cuts nothing and gives every part a bucket of
        its own. `dealt` > 0 deals the buckets to that many servers, each to the least loaded. An array that is not in `order`
        has no gradient and is in no bucket.
        """
        groups: list[tuple[int, list[Part]]] = []
        current: dict[tuple[int, str], tuple[list[Part], int]] = {}
        for number in order:
            array = arrays[number]
            for server, start, stop in _cut(
                place(number, array.elements), cap_bytes / ITEM_BYTES[array.weight_dtype]
            ):
                key = (server, array.weight_dtype)
                parts, size = current.get(key, ([], 0))
                if not parts:
                    groups.append((server, parts))
                parts.append(Part(number, start, stop))
                size += (stop - start) * ITEM_BYTES[array.weight_dtype]
                if size >= cap_bytes:
                    current.pop(key, None)
                else:
                    current[key] = (parts, size)
        buckets, push, pull = [], 0, 0
        loads = [0] * dealt
        for server, parts in groups:
            elements = sum(part.stop - part.start for part in parts)
            array = arrays[parts[0].array]
            on_wire, of_weight = ITEM_BYTES[array.wire_dtype], ITEM_BYTES[array.weight_dtype]
            if dealt:
                server = loads.index(min(loads))
                loads[server] += elements * on_wire
            buckets.append(Bucket(server, tuple(parts), elements, push, pull))
            push += aligned(elements * on_wire)
            pull += aligned(elements * max(on_wire, of_weight))
        return BucketLayout(tuple(buckets), tuple(arrays), push, pull)

    def buckets_of(self) -> dict[int, list[int]]:
        """Return the numbers of each array's buckets."""
        found: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for part in bucket.parts:
                found.setdefault(part.array, []).append(number)
        return found


def _cut(parts: list[tuple[int, int, int]], most: float) -> list[tuple[int, int, int]]:
    """Cut parts (server, start, stop) into parts of at most `most` elements; 0: leave them as they are."""
    found = []
    for server, start, stop in parts:
        count = max(1, min(stop - start, math.ceil((stop - start) / most))) if most else 1
        edges = [start + (stop - start) * number // count for number in range(count + 1)]
        found += [(server, first, last) for first, last in itertools.pairwise(edges)]
    return found


def aligned(size_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
