"""Buckets and servers: MXNet's placement of arrays, and that every element travels once, in a place of its own."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from trainers.kvstore.buckets import (
    ALIGNMENT,
    ITEM_BYTES,
    Array,
    BucketLayout,
    aligned,
    mxnet,
    whole,
)

SENT = {
    "float32": ("float32", "float16", "bfloat16"),
    "bfloat16": ("bfloat16",),
    "float64": ("float64", "float16"),
}


@some.composite
def arrays(draw):
    """Arrays of several dtypes, and the order in which those with a gradient are exchanged."""
    kinds = [(kept, sent) for kept, all_sent in SENT.items() for sent in all_sent]
    hook = draw(some.sampled_from(kinds[:3]))  # one hook for all, as a strategy has
    found = []
    for elements in draw(some.lists(some.integers(1, 5000), min_size=1, max_size=12)):
        kept = draw(some.sampled_from([hook[0], *SENT]))
        found.append(Array(elements, kept, hook[1] if kept == hook[0] else kept))
    order = draw(some.permutations(range(len(found))))
    return found, order[: draw(some.integers(0, len(found)))]


def elements_of(layout):
    """Every (array, element) of the buckets, in their order."""
    inside = []
    for bucket in layout.buckets:
        for part in bucket.parts:
            inside += [(part.array, place) for place in range(part.start, part.stop)]
    return inside


def bytes_of(part, array):
    return (part.stop - part.start) * ITEM_BYTES[array.weight_dtype]


@given(some.integers(0, 300), some.integers(1, 64), some.integers(1, 1000))
def test_a_small_array_goes_whole_to_one_server(key, servers, bound):
    for elements in {1, bound - 1} & set(range(1, bound)):
        assert mxnet(servers, bound)(key, elements) == [((key * 9973) % servers, 0, elements)]


@given(some.integers(0, 300), some.integers(2, 64), some.integers(64, 10**13))
def test_a_big_array_is_split_evenly_over_all_servers(key, servers, elements):
    parts = mxnet(servers, elements)(key, elements)
    assert [server for server, _, _ in parts] == list(range(servers))
    assert parts[0][1] == 0 and parts[-1][2] == elements
    assert all(before[2] == after[1] for before, after in itertools.pairwise(parts))
    sizes = [stop - start for _, start, stop in parts]
    assert max(sizes) - min(sizes) <= 1


# MXNet's own: size_t part = round(double(size) / servers * (i + 1)) - round(double(size) / servers * i), where C rounds a
# half away from zero (src/kvstore/kvstore_dist.h, EncodeDefaultKey).
@pytest.mark.parametrize("servers", [2, 3, 4, 7, 8])
@pytest.mark.parametrize(
    "elements", [1_000_000, 2_359_296, 102_760_448, pytest.param(1_002_001, id="odd")]
)
def test_the_parts_are_mxnets(servers, elements):
    edges = [math.floor(elements / servers * number + 0.5) for number in range(servers + 1)]
    parts = mxnet(servers, 1_000_000)(5, elements)
    assert [(start, stop) for _, start, stop in parts] == list(itertools.pairwise(edges))


def test_one_server_gets_everything_whole():
    assert mxnet(1, 10)(3, 1_000_000) == [(0, 0, 1_000_000)]


@given(
    arrays(), some.sampled_from([0, 1, 300, 4096, 1e9]), some.integers(1, 5), some.integers(1, 6000)
)
def test_every_element_is_in_one_bucket_once(given_arrays, cap_bytes, servers, bound):
    found, order = given_arrays
    layout = BucketLayout.of(found, order, cap_bytes, mxnet(servers, bound))
    every = [(number, place) for number in order for place in range(found[number].elements)]
    assert sorted(elements_of(layout)) == sorted(every)
    for bucket in layout.buckets:
        assert bucket.elements == sum(part.stop - part.start for part in bucket.parts)
        kinds = {
            (found[one.array].weight_dtype, found[one.array].wire_dtype) for one in bucket.parts
        }
        assert len(kinds) == 1
        for part in bucket.parts:  # where the placement has it, cut if longer than a bucket
            array, is_placed = found[part.array], False
            for server, start, stop in mxnet(servers, bound)(part.array, array.elements):
                if server == bucket.server and start <= part.start <= part.stop <= stop:
                    is_placed = True
            assert is_placed
            least_over = cap_bytes + ITEM_BYTES[array.weight_dtype]
            assert not cap_bytes or bytes_of(part, array) < least_over


@given(arrays(), some.sampled_from([0, 300, 4096, 1e9]), some.integers(0, 5))
def test_buckets_lie_apart_and_aligned(given_arrays, cap_bytes, dealt):
    found, order = given_arrays
    layout = BucketLayout.of(found, order, cap_bytes, whole, dealt)
    push = pull = 0
    loads = [0] * dealt
    for bucket in layout.buckets:
        kind = found[bucket.parts[0].array]
        assert bucket.push_offset % ALIGNMENT == bucket.pull_offset % ALIGNMENT == 0
        assert bucket.push_offset >= push and bucket.pull_offset >= pull
        push = bucket.push_offset + bucket.elements * ITEM_BYTES[kind.wire_dtype]
        widest = max(ITEM_BYTES[kind.wire_dtype], ITEM_BYTES[kind.weight_dtype])
        pull = bucket.pull_offset + bucket.elements * widest
        assert bucket.server == (loads.index(min(loads)) if dealt else 0)  # the least loaded
        if dealt:
            loads[bucket.server] += bucket.elements * ITEM_BYTES[kind.wire_dtype]
    assert (layout.push_bytes, layout.pull_bytes) == (aligned(push), aligned(pull))


@given(arrays(), some.sampled_from([1, 300, 4096]))
def test_a_bucket_is_closed_once_it_is_full(given_arrays, cap_bytes):
    found, order = given_arrays
    for bucket in BucketLayout.of(found, order, cap_bytes).buckets:
        sizes = [bytes_of(part, found[part.array]) for part in bucket.parts]
        assert sum(sizes[:-1]) < cap_bytes, "the last part was put into a full bucket"
    open_buckets = {}
    for bucket in BucketLayout.of(found, order, cap_bytes).buckets:
        kind = found[bucket.parts[0].array].weight_dtype
        assert open_buckets.get(kind, cap_bytes) >= cap_bytes, "a second bucket while one had room"
        open_buckets[kind] = bucket.elements * ITEM_BYTES[kind]


@given(arrays(), some.integers(1, 5), some.integers(1, 6000))
def test_a_cap_of_0_gives_every_part_its_bucket(given_arrays, servers, bound):
    found, order = given_arrays
    layout = BucketLayout.of(found, order, 0, mxnet(servers, bound))
    assert all(len(bucket.parts) == 1 for bucket in layout.buckets)
    parts = [(b.server, b.parts[0].array, b.parts[0].start) for b in layout.buckets]
    asked = [(n, mxnet(servers, bound)(n, found[n].elements)) for n in order]
    assert parts == [
        (server, number, start) for number, placed in asked for server, start, _ in placed
    ]
