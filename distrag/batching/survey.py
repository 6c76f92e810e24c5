"""One look at all lengths: what the plan of an epoch must know before its first pool, and bounds that let it make the others later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled

if TYPE_CHECKING:
    from distrag.batching.compiled import Ints

NUM_CLASSES = 2049
"""Length classes: 0, 1, and then 32 to each doubling, so that two lengths of one class differ by less than a thirty-second."""


@compiled
def class_of_bits(bits: int) -> int:
    """Returns the class of a length, given as the bits of its float64: exponent and upper five bits of the mantissa, 1 for length 1."""
    return max(0, (bits >> 47) - 32735)


@compiled
def look(lengths: Ints, block: int, sums: Ints) -> tuple[int, int, int, int]:
    """Returns the total, the shortest, the longest and a hash of all lengths, and writes the tokens of each block of samples.

    Args:
        lengths: integers `[N]`, N at least 1.
        block: samples in a block.
        sums: int64 `[ceil(N / block)]`, receives the tokens of each block.
    """
    n = len(lengths)
    total, shortest, longest, mixed = np.int64(0), np.int64(lengths[0]), np.int64(lengths[0]), np.uint64(0)
    for b in range(len(sums)):
        tokens = np.int64(0)
        for i in range(b * block, min((b + 1) * block, n)):
            length = np.int64(lengths[i])
            tokens += length
            shortest = min(shortest, length)
            longest = max(longest, length)
            # Not linear in the lengths, or a token that moves from one sample to another could cancel out.
            bits = np.uint64(length) + np.uint64(i) * np.uint64(0x9E3779B97F4A7C15)
            bits = (bits ^ bits >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
            mixed += bits ^ bits >> np.uint64(29)
        sums[b] = tokens
        total += tokens
    return int(total), int(shortest), int(longest), int(mixed >> np.uint64(1))


@compiled
def add_up(sums: Ints, order: Ints) -> Ints:
    """Returns the running total of `sums` in an order, int64."""
    total, filled = np.int64(0), np.empty(len(order), np.int64)
    for i in range(len(order)):
        total += sums[order[i]]
        filled[i] = total
    return filled


@compiled
def gather_pool(lengths: Ints, order: Ints, first: int, last: int, block: int, samples: Ints, sizes: Ints) -> int:
    """Writes the sample numbers and lengths of the blocks `order[first:last]`; returns how many samples they hold."""
    n, taken = len(lengths), 0
    for at in range(first, last):
        start = int(order[at]) * block
        for i in range(start, min(start + block, n)):
            samples[taken] = i
            sizes[taken] = lengths[i]
            taken += 1
    return taken


@compiled
def class_table(longest: int) -> tuple[Ints, Ints]:
    """Returns the class of each length up to 65,535 or `longest`, uint16, and the longest length of each class there is, int64."""
    one = np.empty(1, np.float64)
    bits = one.view(np.int64)
    one[0] = longest
    table, top = np.empty(min(longest, 65_535) + 1, np.uint16), np.zeros(class_of_bits(bits[0]) + 1, np.int64)
    for length in range(len(table)):
        one[0] = length
        table[length] = class_of_bits(bits[0])
    for c in range(1, len(top)):
        bits[0] = (c + 32736) << 47
        top[c] = longest if one[0] > longest else np.int64(np.ceil(one[0])) - 1
    return table, top


@compiled
def tokens_by_class(lengths: Ints, order: Ints, bounds: Ints, block: int, table: Ints, tokens: Ints, samples: Ints) -> None:
    """Counts the tokens of each pool by length class, and its samples, in one pass over the lengths as they lie in memory.

    Args:
        lengths: integers `[N]`.
        order: blocks in the order of the pools.
        bounds: int64 `[P+1]`, where each pool starts in that order.
        block: samples in a block.
        table: from `class_table`.
        tokens: int64 `[P, classes]`, receives the tokens.
        samples: int64 `[P]`, receives the samples.
    """
    n, one = len(lengths), np.empty(1, np.float64)
    bits, pool_of = one.view(np.int64), np.empty(len(order), np.uint32)
    for p in range(len(bounds) - 1):
        for at in range(bounds[p], bounds[p + 1]):
            pool_of[order[at]] = p
    tokens[:] = 0
    samples[:] = 0
    for b in range(len(pool_of)):
        own, stop = tokens[pool_of[b]], min((b + 1) * block, n)
        samples[pool_of[b]] += stop - b * block
        for i in range(b * block, stop):
            length = np.int64(lengths[i])
            if length < len(table):
                own[table[length]] += length
            else:
                one[0] = length
                own[class_of_bits(bits[0])] += length


@compiled
def fullest_bin(tokens: Ints, top: Ints, num_bins: int) -> int:
    """Returns a bound on the tokens of any bin when samples go, longest first, to the bin with the fewest tokens.

    A sample goes where there is at most the mean of what came before it; so no bin ever holds more than that mean and the sample.
    """
    before, bound = 0, 0
    for c in range(len(tokens) - 1, -1, -1):
        if tokens[c]:
            before += tokens[c]
            bound = max(bound, before // num_bins + top[c])
    return bound
