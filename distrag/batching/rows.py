"""Deals a falling list to bins row by row, so that every bin holds as many items and about the same weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled
from distrag.batching.survey import NUM_CLASSES, class_of_bits

if TYPE_CHECKING:
    from distrag.batching.compiled import Ints

WHOLE = 1 << 42
"""What the weights of all items together come to, so that a weight and an index of 20 bits fit one int64."""

_INDEX = (1 << 20) - 1


@compiled
def next_random(state: np.uint64) -> np.uint64:
    """Returns the state after `state`, which is the random number too (xorshift64; never 0)."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@compiled
def random_below(state: np.uint64, limit: int) -> int:
    """Returns a number in `[0, limit)` out of a random state; `limit` below 2^32."""
    return int(((state >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32))


@compiled
def shuffle(values: Ints, state: np.uint64) -> np.uint64:
    """Shuffles in place (Fisher-Yates); returns the next state."""
    for i in range(len(values) - 1, 0, -1):
        state = next_random(state)
        j = random_below(state, i + 1)
        values[i], values[j] = values[j], values[i]
    return state


@compiled
def shuffle_two(values: Ints, others: Ints, state: np.uint64) -> np.uint64:
    """Shuffles two arrays alike, in place; returns the next state."""
    for i in range(len(values) - 1, 0, -1):
        state = next_random(state)
        j = random_below(state, i + 1)
        values[i], values[j] = values[j], values[i]
        others[i], others[j] = others[j], others[i]
    return state


@compiled
def price(length: float, cost: tuple[float, float, float]) -> float:
    """Returns `a*L + b*L^2 + c`."""
    return cost[0] * length + cost[1] * length * length + cost[2]


@compiled
def weigh(lengths: Ints, cost: tuple[float, float, float]) -> Ints:
    """Returns what each sample weighs, int64 `[n]`: its share of the tokens and of the cost in equal parts, `WHOLE` in all.

    One number for both keeps both even: rows of like lengths differ in neither.
    """
    n = len(lengths)
    tokens, prices = 0.0, 0.0
    for i in range(n):
        tokens += float(lengths[i])
        prices += price(float(lengths[i]), cost)
    by_token = WHOLE / 2 / tokens if tokens > 0.0 else 0.0
    by_price = WHOLE / 2 / prices if prices > 0.0 else 0.0
    weights = np.empty(n, np.int64)
    for i in range(n):
        length = float(lengths[i])
        weights[i] = np.int64(by_token * length + by_price * price(length, cost))
    return weights


@compiled
def fall(lengths: Ints) -> Ints:
    """Returns the positions from long to short, int64 `[n]`; lengths within a thirty-second of each other stay in the order they came in.

    One counting pass over the exponent and the upper five bits of each length. What is alike stays shuffled: samples of one length class
    meet others in every epoch.
    """
    n = len(lengths)
    bits = lengths.astype(np.float64).view(np.int64)
    counts = np.zeros(NUM_CLASSES, np.int64)
    for i in range(n):
        counts[NUM_CLASSES - 1 - class_of_bits(bits[i])] += 1
    total = 0
    for c in range(NUM_CLASSES):
        total, counts[c] = total + counts[c], total
    index = np.empty(n, np.int64)
    for i in range(n):
        c = NUM_CLASSES - 1 - class_of_bits(bits[i])
        index[counts[c]] = i
        counts[c] += 1
    return index


@compiled
def order_rising(values: Ints, n: int, order: Ints, counts: Ints, spare: Ints) -> None:
    """Writes into `order[:n]` the positions of `values[:n]` from small to large.

    Values go into `n` equal intervals first and are then inserted one by one, which takes a few steps each; where one far value has sent
    all others into one interval they are sorted by comparison.

    Args:
        values: int64 `[n]`, below 2^43.
        n: how many.
        order: int64 `[n]`, receives the positions.
        counts: int64 `[n + 1]`, scratch.
        spare: int64 `[n]`, scratch.
    """
    low, high = values[0], values[0]
    for i in range(1, n):
        low, high = min(low, values[i]), max(high, values[i])
    if n <= 16 or high == low:
        for i in range(n):
            order[i] = i
    else:
        scale = (n - 1) / float(high - low)
        counts[: n + 1] = 0
        for i in range(n):
            spare[i] = np.int64((values[i] - low) * scale)
            counts[spare[i] + 1] += 1
        crowded = 0
        for c in range(1, n + 1):
            crowded = max(crowded, counts[c])
            counts[c] += counts[c - 1]
        if crowded > 64:
            for i in range(n):
                spare[i] = values[i] << 20 | i
            spare[:n].sort()
            for i in range(n):
                order[i] = spare[i] & _INDEX
            return
        for i in range(n):
            order[counts[spare[i]]] = i
            counts[spare[i]] += 1
    for i in range(1, n):
        at, position = i, order[i]
        value = values[position]
        while at > 0 and values[order[at - 1]] > value:
            order[at] = order[at - 1]
            at -= 1
        order[at] = position


@compiled
def deal_rows(weights: Ints, num_bins: int, first_bin: int, noise: np.uint64, bins: Ints) -> np.uint64:
    """Writes the bin of each item into `bins`: row after row of `num_bins` items, the heaviest of a row to the lightest bin.

    Args:
        weights: int64 `[n]`, about falling, at most `WHOLE` together.
        num_bins: bins, at most 2^20.
        first_bin: the bin that comes first among equals.
        noise: 0, or the state of a generator: then the bins are ordered by their load up to what the row after can even out, so that who
            meets whom is drawn and the balance stays.
        bins: int64 `[n]`, receives the bin of each.

    Returns:
        The next state of the generator.
    """
    n = len(weights)
    size = max(num_bins, 1)
    load, seen, items, order = np.zeros(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    counts, spare = np.empty(size + 1, np.int64), np.empty(size, np.int64)
    for start in range(0, n, num_bins):
        m = min(num_bins, n - start)
        order_rising(weights[start : start + m], m, items, counts, spare)
        after = start + num_bins
        spread = max(0, weights[after] - weights[min(after + num_bins, n) - 1]) if noise and after + num_bins <= n else 0
        for j in range(num_bins):
            b = j + first_bin
            seen[j] = load[b if b < num_bins else b - num_bins]
            if spread > 0:
                noise = next_random(noise)
                seen[j] += np.int64(float(spread) * (float(noise >> np.uint64(40)) / 16777216.0))
        order_rising(seen, num_bins, order, counts, spare)
        for j in range(m):
            b = order[j] + first_bin
            b = b if b < num_bins else b - num_bins
            item = start + items[m - 1 - j]
            bins[item] = b
            load[b] += weights[item]
    return noise
