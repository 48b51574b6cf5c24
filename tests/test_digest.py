"""Checksums of tensors: what they find, and that they depend on nothing but the bits and their order."""

import pytest
import torch

from benchmarks.training import correctness

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
LONG = 2 * correctness.PIECE + 3  # words: three pieces


def split_mix(number):
    """The multiplier of a place in Python's own integers, as the source has it; as a signed number."""
    most = (1 << 64) - 1
    mixed = number * 0x9E3779B97F4A7C15 & most
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & most
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & most
    mixed = (mixed ^ mixed >> 31) | 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def test_the_checksum_is_the_sum_that_it_claims_to_be():
    words = torch.tensor([3, -5, 2**31 - 1, -(2**31)], dtype=torch.int32)
    wanted = sum(word * split_mix(place + 1) for place, word in enumerate(words.tolist())) % (
        1 << 64
    )
    assert correctness.checksums([words]) == [correctness._digest([wanted.to_bytes(8, "big")])]
    assert correctness.checksums([words]) != correctness.checksums([words.roll(1)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_tensors_have_equal_checksums_and_one_wrong_element_another(dtype):
    values = (
        torch.randn(7, 11).to(dtype)
        if dtype.is_floating_point
        else torch.randint(2, (7, 11)).to(dtype)
    )
    other = values.clone()
    assert correctness.checksum([values]) == correctness.checksum([other])
    other[3, 4] = 0 if other[3, 4] else 1
    assert correctness.checksum([values]) != correctness.checksum([other])


def one_bit(values, place, bit):
    values.view(torch.int32)[place] ^= torch.tensor(
        1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32
    )


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize("place", [0, correctness.PIECE - 1, correctness.PIECE, LONG - 1])
def test_every_bit_of_every_place_counts(place, bit):
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(1))
    before = correctness.checksum([values])
    one_bit(values, place, bit)
    assert correctness.checksum([values]) != before


def test_faults_of_several_elements_do_not_cancel_each_other():
    """Elements that change places, pieces that do, signs of two elements, a pattern whose second difference is 0."""
    values = torch.randn(LONG, generator=torch.Generator().manual_seed(2))
    swapped, pieces, signs, bent = (values.clone() for _ in range(4))
    swapped[[5, 6]] = values[[6, 5]]
    pieces[: correctness.PIECE], pieces[correctness.PIECE : -3] = (
        values[correctness.PIECE : -3],
        values[: correctness.PIECE],
    )
    signs[[10, 20]] *= -1
    bent.view(torch.int32)[30:33] += torch.tensor([1, -2, 1], dtype=torch.int32)
    found = {correctness.checksum([one]) for one in (values, swapped, pieces, signs, bent)}
    assert len(found) == 5


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
        self.parameters, self._other = [own], correctness.checksum([other])

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
