"""Checksums of tensors, made on their device: equal tensors have equal ones, and only the checksums travel.

That of a piece of a tensor is Σ word · multiplier modulo 2⁶⁴, over the bits of its elements as words of at most 32 bits.
Multipliers are odd, different for every place, and the same on every device. One wrong word of a piece is always found, because
an odd number has an inverse. Several wrong words cancel each other with a chance of 2⁻³² at most, as if multipliers were drawn:
the differences are below 2³², so without the power of two that all share, at least 33 bits are left and one difference is odd.
Words that change places count as two wrong words. Who knows the multipliers can make tensors with equal checksums; faults do not.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# The integer whose bits are those of an element, by the element's bytes; a longer element is several words.
WORDS = {1: torch.int8, 2: torch.int16}
PIECE = 1 << 18  # words at most: a checksum takes a few MB of the device, however large the tensors are
# SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): shifts, and signed factors.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


def of_each(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return 8 bytes for each tensor of one device, which depend on the bits and the order of its elements."""
    if not tensors:
        return []
    multipliers = _multipliers(min(PIECE, max(tensor.nbytes for tensor in tensors)), tensors[0].device)
    found = [
        [(piece.to(torch.int64) * multipliers[: len(piece)]).sum() for piece in _words(tensor).split(PIECE)]
        for tensor in tensors
    ]
    sums = iter(torch.stack([one for pieces in found for one in pieces]).tolist())  # waits for the device once
    return [_hashed(next(sums).to_bytes(8, "big", signed=True) for _ in pieces) for pieces in found]


def of_all(tensors: Sequence[Tensor]) -> bytes:
    """Return 8 bytes for all tensors together, which depend on their order too."""
    return _hashed(of_each(tensors))


def _hashed(parts: Iterable[bytes]) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.digest()[:8]


def _words(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as words (words,), in the order of its indices, whatever its layout."""
    flat = tensor.detach().flatten().contiguous()
    return flat.view(WORDS.get(flat.element_size(), torch.int32))


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Return the multipliers, (count,) int64: products that are too large lose their upper bits, on every device alike."""
    mixed = torch.arange(1, count + 1, device=device) * GOLDEN
    for shift, factor in MIX:
        mixed = (mixed ^ (mixed >> shift & (1 << (64 - shift)) - 1)) * factor  # a shift brings in the sign: cut it off
    return mixed | 1
