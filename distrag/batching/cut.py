"""The compiled half of the plan that cuts: an order of samples into global steps of about equal tokens.

Everything here is a pure function of arrays and integers. `take_step` and `deal.deal_step` handle one step each and keep no state besides
their arguments, so that a walk that makes steps on demand can be put over them as well as `walk`, which makes the whole epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled
from distrag.batching.deal import NO_CAP, deal_step, sort_falling

if TYPE_CHECKING:
    from distrag.batching.compiled import Ints

LOOK_AHEAD = 32
"""Samples one step may pass over because they do not fit what is left of it; they come first in the next step."""


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
) -> tuple[int, int, int]:
    """Takes the samples of one step into `out`: carried ones first, then the order's next; returns taken, cursor, carried.

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
    return taken, cursor, kept


@compiled
def _grown(array: Ints, size: int, used: int) -> Ints:
    if len(array) >= size:
        return array
    larger = np.empty(max(size, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


@compiled
def _aim(left: int, tokens_left: int, steps_left: int, budget: int, limit: int) -> tuple[int, int, int]:
    """Returns the steps still to come, and the tokens and the least samples of the next one, for what is left of the epoch."""
    steps = max(steps_left, 1, (tokens_left + budget - 1) // budget, (left + limit - 1) // limit)
    quota = left - (steps - 1) * limit if tokens_left > 0 else (left + steps - 1) // steps
    return steps, (tokens_left + steps - 1) // steps, max(quota, 1)


@compiled
def _settle(samples: Ints, ranks: Ints, done: int, taken: int, dealt: Ints, carried: Ints, num_carried: int) -> tuple[int, int]:
    """Closes the gaps that samples without a rank leave in a step and carries those on; returns the step's end and the carried."""
    placed = done
    for i in range(taken):
        sample = samples[done + i]
        if dealt[i] < 0:
            carried[num_carried] = sample
            num_carried += 1
        else:
            samples[placed], ranks[placed] = sample, dealt[i]
            placed += 1
    return placed, num_carried


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
        steps_left, target, quota = _aim(n - done, tokens_left, steps_left, budget, limit)
        carried = _grown(carried, num_carried + LOOK_AHEAD, num_carried)
        taken, cursor, num_carried = take_step(order, cursor, lengths, carried, num_carried, target, quota, limit, shortest, samples[done:])
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
        before = done
        done, num_carried = _settle(samples, ranks, done, taken, dealt, carried, num_carried)
        for i in range(before, done):
            tokens_left -= lengths[samples[i]]
        step += 1
        steps_left -= 1
        bounds = _grown(bounds, step + 1, step)
        bounds[step] = done
    return samples, ranks, bounds[: step + 1].copy(), -1
