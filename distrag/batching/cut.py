"""The compiled half of the plan: cuts an order of samples into global steps and deals each step to the ranks.

Everything here is a pure function of arrays and integers. `take_step` and `deal_step` handle one step each and keep no state besides their
arguments, so that a walk that makes steps on demand can be put over them as well as `walk`, which makes the whole epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled

if TYPE_CHECKING:
    from distrag.batching.compiled import Floats, Ints

LOOK_AHEAD = 32
"""Samples one step may pass over because they do not fit what is left of it; they come first in the next step."""

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
def sort_pools(order: Ints, lengths: Ints, pool_tokens: int, pool_samples: int) -> None:
    """Sorts consecutive pools of the order by length, in place, falling and rising in turn so that neighbours meet at like lengths."""
    n = len(order)
    start, rising = 0, False
    while start < n:
        end, tokens = start, 0
        while end < n and tokens < pool_tokens and end - start < pool_samples:
            tokens += lengths[order[end]]
            end += 1
        pool = order[start:end].copy()
        index = np.empty(end - start, np.int64)
        sort_falling(lengths[pool], end - start, index, np.empty(end - start, np.int64))
        for i in range(end - start):
            order[end - 1 - i if rising else start + i] = pool[index[i]]
        start, rising = end, not rising


@compiled
def take_step(
    order: Ints,
    cursor: int,
    lengths: Ints,
    carried: Ints,
    num_carried: int,
    target: int,
    quota: int,
    limit: int,
    shortest: int,
    out: Ints,
) -> tuple[int, int, int, int]:
    """Takes the samples of one step into `out`: carried ones first, then the order's next; returns taken, cursor, carried, tokens.

    A sample that does not fit what is left of `target` is passed over, at most `LOOK_AHEAD` of them, and stays in `carried`. The first
    sample with tokens always fits. The step ends at `limit` samples, or when `target` is full and at least `quota` samples are in.
    """
    taken, tokens, kept, read = 0, 0, 0, 0
    n = len(order)
    while taken < limit and kept < LOOK_AHEAD and (read < num_carried or cursor < n):
        if taken >= quota and tokens + shortest > target:
            break
        if read < num_carried:
            sample = carried[read]
            read += 1
        else:
            sample = order[cursor]
            cursor += 1
        length = lengths[sample]
        if tokens == 0 or length == 0 or tokens + length <= target:
            out[taken] = sample
            taken += 1
            tokens += length
        else:
            carried[kept] = sample
            kept += 1
    while read < num_carried:
        carried[kept] = carried[read]
        kept += 1
        read += 1
    return taken, cursor, kept, tokens


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

    From the dearest sample to the cheapest, each goes to the least loaded rank that has room for it (LPT). Samples that cost nothing go
    to the rank with the fewest samples. `first_rank` turns the order of equal ranks, so that no rank gets the longest of every step.
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
        price = cost[0] * length + cost[1] * length * length + cost[2]
        if price == 0.0 and not free:
            free = True
            for at in range(size):
                load[heap[at]] = max_samples - count[heap[at]]
            for at in range(size // 2 - 1, -1, -1):
                _sink(heap, size, load, at)
        stashed = 0
        if length < blocked:
            # Ranks without room for this one wait behind the end of the heap for a shorter one.
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
            load[rank] += 1.0 if free else price
            if count[rank] == 0 or room[rank] < shortest:
                size -= 1
                heap[0] = heap[size]
            if size > 0:
                _sink(heap, size, load, 0)
        for s in range(stashed):
            size = _push(heap, size, load, spare[s])
    return unplaced


@compiled
def _grown(array: Ints, size: int, used: int) -> Ints:
    if len(array) >= size:
        return array
    larger = np.empty(max(size, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


@compiled
def walk(
    order: Ints,
    lengths: Ints,
    cost: tuple[float, float, float],
    world_size: int,
    budget: int,
    limit: int,
    max_tokens: int,
    max_samples: int,
    may_carry: bool,
    num_steps: int,
) -> tuple[Ints, Ints, Ints, int]:
    """Cuts and deals a whole epoch in about `num_steps` steps of equal tokens.

    Returns:
        `samples` int64 `[N]`, the samples in the order of their steps; `ranks` int32 `[N]`, the rank of each; `bounds` int64 `[S+1]`, where
        each step starts in them; and -1, or the first step in which a sample found no rank with room although it may not be carried on.
    """
    n = len(order)
    samples, ranks, bounds = np.empty(n, np.int64), np.empty(n, np.int32), np.empty(num_steps + 2, np.int64)
    carried, sizes = np.empty(256, np.int64), np.empty(1024, np.int64)
    index, spare, dealt = np.empty(1024, np.int64), np.empty(1024 + world_size, np.int64), np.empty(1024, np.int64)
    heap, room, count = np.empty(world_size, np.int64), np.empty(world_size, np.int64), np.empty(world_size, np.int64)
    load = np.empty(world_size, np.float64)
    alone = world_size == 1 and budget <= max_tokens and limit <= max_samples
    tokens_left, shortest = 0, NO_CAP
    for i in range(n):
        tokens_left += lengths[i]
        shortest = min(shortest, lengths[i])
    done, cursor, num_carried, step, steps_left = 0, 0, 0, 0, num_steps
    bounds[0] = 0
    while done < n:
        left = n - done
        steps_left = max(steps_left, 1, (tokens_left + budget - 1) // budget, (left + limit - 1) // limit)
        target = (tokens_left + steps_left - 1) // steps_left
        quota = left - (steps_left - 1) * limit
        if tokens_left == 0:
            quota = (left + steps_left - 1) // steps_left
        carried = _grown(carried, num_carried + LOOK_AHEAD, num_carried)
        taken, cursor, num_carried, tokens = take_step(
            order, cursor, lengths, carried, num_carried, target, max(quota, 1), limit, shortest, samples[done:]
        )
        index, dealt, sizes = _grown(index, taken, 0), _grown(dealt, taken, 0), _grown(sizes, taken, 0)
        spare = _grown(spare, taken + world_size, 0)
        for i in range(taken):
            sizes[i] = lengths[samples[done + i]]
        unplaced = 0
        if alone:
            dealt[:taken] = 0
        else:
            unplaced = deal_step(
                sizes, taken, cost, max_tokens, max_samples, step % world_size, index, spare, heap, load, room, count, dealt
            )
        if unplaced and not may_carry:
            return samples, ranks, bounds, step
        carried = _grown(carried, num_carried + unplaced, num_carried)
        placed = done
        for i in range(taken):
            sample = samples[done + i]
            if dealt[i] < 0:
                carried[num_carried] = sample
                num_carried += 1
                tokens -= sizes[i]
            else:
                samples[placed], ranks[placed] = sample, dealt[i]
                placed += 1
        done = placed
        tokens_left -= tokens
        step += 1
        steps_left -= 1
        bounds = _grown(bounds, step + 1, step)
        bounds[step] = done
    return samples, ranks, bounds[: step + 1].copy(), -1


@compiled
def step_imbalances(samples: Ints, ranks: Ints, bounds: Ints, lengths: Ints, cost: tuple[float, float, float], world_size: int) -> Floats:
    """Returns max / mean over ranks of the cost of each step, float64 `[S]`; 1 where nothing costs anything."""
    result = np.ones(len(bounds) - 1, np.float64)
    load = np.empty(world_size, np.float64)
    for step in range(len(bounds) - 1):
        load[:] = 0.0
        for i in range(bounds[step], bounds[step + 1]):
            length = lengths[samples[i]]
            load[ranks[i]] += cost[0] * length + cost[1] * length * length + cost[2]
        mean = load.sum() / world_size
        if mean > 0.0:
            result[step] = load.max() / mean
    return result
