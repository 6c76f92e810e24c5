"""Random numbers that are a hash of what they are for: each can be computed alone, on any rank, and nothing is saved to repeat it.

Source of the hash: the finalisers of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) and
MurmurHash3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MURMUR = ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53))


def uniform(numbers: NDArray[Any], seed: int) -> NDArray[np.float64]:
    """Returns one number in `[0, 1)`, a multiple of 2^-53, for each of `numbers` (integers from 0 on); float64 of their shape.

    The first stay what they are when more numbers follow.
    """
    z = numbers.astype(np.uint64)
    z += np.uint64((1 + seed * _GOLDEN) % (1 << 64))
    for shift, factor in (*_SPLITMIX, (31, 1), *_MURMUR):
        z ^= z >> np.uint64(shift)
        if factor != 1:
            z *= np.uint64(factor)
    z >>= np.uint64(11)
    return z.astype(np.float64) * 2.0**-53


def stream(*numbers: int) -> int:
    """Returns a seed for `uniform` that belongs to these numbers, in this order, such as what is drawn, the run's seed and the epoch."""
    key = 0
    for number in numbers:
        key = (key + (number + 1) * _GOLDEN) % (1 << 64)
        for shift, factor in _SPLITMIX:
            key = (key ^ (key >> shift)) * factor % (1 << 64)
        key ^= key >> 31
    return key
