"""Checksums of tensors: what they find, and that they depend on the bits and their order alone."""

import pytest
import torch

from benchmarks.training import correctness

DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool"]
LONG = 2 * correctness.PIECE + 3  # words: three pieces


def split_mix(number):
    """The multiplier of a place in Python's own integers, as the source has it; signed."""
    most = (1 << 64) - 1
    mixed = number * 0x9E3779B97F4A7C15 & most
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & most
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & most
    mixed = (mixed ^ mixed >> 31) | 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def test_the_checksum_is_the_sum_that_it_claims_to_be():
    words = torch.tensor([3, -5, 2**31 - 1, -(2**31)], dtype=torch.int32)
    products = [word * split_mix(place) for place, word in enumerate(words.tolist(), 1)]
    wanted = (sum(products) % (1 << 64)).to_bytes(8, "big")
    assert correctness.checksums([words]) == [correctness._digest([wanted])]
    assert correctness.checksums([words]) != correctness.checksums([words.roll(1)])


@pytest.mark.parametrize("name", DTYPES)
def test_equal_tensors_have_equal_checksums_and_one_wrong_element_another(name):
    values = (torch.randn(7, 11) if "float" in name else torch.randint(2, (7, 11))).to(
        getattr(torch, name)
    )
    other = values.clone()
    assert correctness.checksum([values]) == correctness.checksum([other])
    other[3, 4] = 0 if other[3, 4] else 1
    assert correctness.checksum([values]) != correctness.checksum([other])


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize("place", [0, correctness.PIECE - 1, correctness.PIECE, LONG - 1])
def test_every_bit_of_every_place_counts(place, bit):
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(1))
    before = correctness.checksum([values])
    mask = 1 << bit if bit < 31 else -(1 << 31)
    values.view(torch.int32)[place] ^= torch.tensor(mask, dtype=torch.int32)
    assert correctness.checksum([values]) != before


def test_faults_of_several_elements_do_not_cancel_each_other():
    """Swapped elements and pieces, two signs, a pattern whose second difference is 0."""
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(2))
    first, second = slice(correctness.PIECE), slice(correctness.PIECE, 2 * correctness.PIECE)
    swapped, pieces, signs, bent = (values.clone() for _ in range(4))
    swapped[[5, 6]] = values[[6, 5]]
    pieces[first], pieces[second] = values[second], values[first]
    signs[[10, 20]] *= -1
    bent.view(torch.int32)[30:33] += torch.tensor([1, -2, 1], dtype=torch.int32)
    assert len({correctness.checksum([x]) for x in (values, swapped, pieces, signs, bent)}) == 5


def test_the_order_of_tensors_counts_and_their_layout_does_not():
    images = torch.randn(2, 3, 4, 5)
    last = images.to(memory_format=torch.channels_last)
    assert correctness.checksums([images, images[0]]) == correctness.checksums([last, last[0]])
    assert correctness.checksum([images, last[0]]) != correctness.checksum([last[0], images])
    assert correctness.checksums([]) == [] and correctness.checksum([]) == correctness.checksum([])
    assert len(set(correctness.checksums([torch.zeros(0), torch.ones(2)]))) == 2


class Replicas:
    """Two ranks of which the other has these weights; and a training with this rank's."""

    def __init__(self, own, other):
        self.parameters, self._other = [own], correctness.checksums([other])[0]
        self.world_size = 2

    def gather(self, values):
        return [list(values), list(self._other)]


@pytest.mark.parametrize("wrong", [None, float("nan"), 1e-6])
def test_one_wrong_element_of_one_replica_is_found(wrong):
    own = torch.randn(300, 5, generator=torch.Generator().manual_seed(3))
    other = own.clone()
    if wrong is not None:
        other[299, 4] += wrong
    ranks = Replicas(own, other)
    assert correctness.replicas_equal(ranks, ranks) is (wrong is None)
