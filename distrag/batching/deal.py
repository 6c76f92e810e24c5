"""The compiled half of the plan that deals: one global step's samples to the ranks, so that cost is balanced and the caps hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled
from distrag.batching.rows import price

if TYPE_CHECKING:
    from distrag.batching.compiled import Floats, Ints

NO_CAP = int(np.iinfo(np.int64).max)


@compiled
def sort_falling(lengths: Ints, n: int, index: Ints, spare: Ints) -> None:
    """Leaves in `index[:n]` the positions of `lengths[:n]` from the longest to the shortest, equal ones in their order.

    A byte-wise radix sort: lengths are small, so one or two passes do, several times quicker than a comparing sort. The few samples
    of a small step are inserted one by one.
    """
    if n <= 24:
        for i in range(n):
            at = i
            while at > 0 and lengths[index[at - 1]] < lengths[i]:
                index[at] = index[at - 1]
                at -= 1
            index[at] = i
        return
    longest = 0
    for i in range(n):
        index[i] = i
        longest = max(longest, lengths[i])
    counts = np.empty(257, np.int64)
    shift = 0
    while shift < 64 and longest >> shift:
        counts[:] = 0
        for i in range(n):
            counts[256 - ((lengths[i] >> shift) & 255)] += 1
        for digit in range(256):
            counts[digit + 1] += counts[digit]
        for i in range(n):
            bucket = 255 - ((lengths[index[i]] >> shift) & 255)
            spare[counts[bucket]] = index[i]
            counts[bucket] += 1
        index[:n] = spare[:n]
        shift += 8


@compiled
def _sink(heap: Ints, size: int, load: Floats, at: int) -> None:
    rank = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and load[heap[child + 1]] < load[heap[child]]:
            child += 1
        if load[heap[child]] >= load[rank]:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = rank


@compiled
def _push(heap: Ints, size: int, load: Floats, rank: int) -> int:
    at = size
    while at > 0 and load[rank] < load[heap[(at - 1) // 2]]:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = rank
    return size + 1


@compiled
def _order_by_samples(heap: Ints, size: int, load: Floats, count: Ints, max_samples: int) -> None:
    """Makes the samples that each rank of the heap has so far its load; `count` is what it may still take."""
    for at in range(size):
        load[heap[at]] = max_samples - count[heap[at]]
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, load, at)


@compiled
def deal_step(
    lengths: Ints,
    n: int,
    cost: tuple[float, float, float],
    max_tokens: int,
    max_samples: int,
    first_rank: int,
    index: Ints,
    spare: Ints,
    heap: Ints,
    load: Floats,
    room: Ints,
    count: Ints,
    ranks: Ints,
) -> int:
    """Writes the rank of each of a step's samples into `ranks[:n]`, -1 where none had room; returns how many that were.

    Dearest first, each goes to the least loaded rank with room (LPT); what costs nothing to the one with fewest samples. `first_rank` turns
    the order of equal ranks.
    """
    world_size = len(heap)
    sort_falling(lengths, n, index, spare)
    shortest = lengths[index[n - 1]]
    for r in range(world_size):
        heap[r] = (first_rank + r) % world_size
        load[r], room[r], count[r] = 0.0, max_tokens, max_samples
    size, unplaced, blocked, free = world_size, 0, NO_CAP, False
    for i in range(n):
        length = lengths[index[i]]
        paid = price(float(length), cost)
        if paid == 0.0 and not free:
            free = True
            _order_by_samples(heap, size, load, count, max_samples)
        stashed = 0  # ranks without room for this one wait for a shorter one
        if length < blocked:
            while size > 0 and room[heap[0]] < length:
                rank = heap[0]
                size -= 1
                heap[0] = heap[size]
                _sink(heap, size, load, 0)
                spare[stashed] = rank
                stashed += 1
        if length >= blocked or size == 0:
            blocked = min(blocked, length)
            ranks[index[i]] = -1
            unplaced += 1
        else:
            rank = heap[0]
            ranks[index[i]] = rank
            room[rank] -= length
            count[rank] -= 1
            load[rank] += 1.0 if free else paid
            if count[rank] == 0 or room[rank] < shortest:
                size -= 1
                heap[0] = heap[size]
            if size > 0:
                _sink(heap, size, load, 0)
        for s in range(stashed):
            size = _push(heap, size, load, spare[s])
    return unplaced
