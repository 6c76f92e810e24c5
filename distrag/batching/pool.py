"""The compiled plan of one pool: its samples to global steps and ranks, even in tokens and cost, under the caps.

Everything here is a pure function of arrays and numbers. The quick way deals rows: the pool falls by length, every `W` neighbours become a
unit that gives each rank one sample, and units are dealt to the steps; so all ranks of a step see about the same lengths. Where a cap is
too tight for that, samples are packed longest first, and ranks of like cost share a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from distrag.batching.compiled import compiled
from distrag.batching.deal import deal_step, sort_falling
from distrag.batching.polish import polish
from distrag.batching.rows import deal_rows, fall, next_random, price, shuffle, weigh

if TYPE_CHECKING:
    from distrag.batching.compiled import Floats, Ints

ROWS = 24
"""Units that a step holds at least: with fewer its tokens would not come out even."""

FINE, GOOD, SMALL = 1.0015, 1.005, 1 << 16
"""Imbalance of cost and tokens above which samples of a step are swapped, in pools up to `SMALL` samples and in larger ones, whose rows
come out better and whose planning takes longer; above `GOOD` a step is also dealt one by one, and the better stays."""


class Rules(NamedTuple):
    """What a pool is planned by.

    Attributes:
        world_size: ranks (`W`).
        bucket_steps: steps that share one list sorted by length.
        whole_steps: whether steps are formed before ranks are thought of, so that no world size changes them.
        step_tokens: most tokens of a step.
        step_samples: most samples of a step.
        rank_tokens: most tokens of a rank in a step.
        rank_samples: most samples of a rank in a step.
        cost: `(a, b, c)`.
    """

    world_size: int
    bucket_steps: int
    whole_steps: bool
    step_tokens: int
    step_samples: int
    rank_tokens: int
    rank_samples: int
    cost: tuple[float, float, float]


@compiled
def plan_pool(lengths: Ints, rules: Rules, num_steps: int, state: np.uint64, may_pack: bool) -> tuple[Ints, Ints, Ints, int]:
    """Plans one pool in `num_steps` steps.

    Args:
        lengths: int64 `[n]`, shuffled.
        rules: caps and cost.
        num_steps: steps to make (`S`).
        state: of the generator; 0 draws nothing.
        may_pack: whether samples may be packed where rows do not fit; that ignores `bucket_steps`.

    Returns:
        `index` int64 `[n]`, positions in the order of their steps; `ranks` int32 `[n]`, the rank of each of these; `bounds` int64 `[S+1]`;
        and -1, or -2 where so few (or more than n) steps do not fit, or the whole step whose ranks do not.
    """
    n = len(lengths)
    index, ranks, bounds = np.empty(n, np.int64), np.empty(n, np.int32), np.zeros(num_steps + 1, np.int64)
    if num_steps > n:
        return index, ranks, bounds, -2
    weights, turn = weigh(lengths, rules.cost), np.arange(num_steps)
    if state:
        state = shuffle(turn, next_random(state))
    if _collect(_steps_by_rows(lengths, rules, num_steps, state), turn, index, bounds):
        if not rules.whole_steps:
            if _deal_ranks(lengths, weights, rules, index, bounds, ranks) < 0:
                return index, ranks, bounds, -1
        elif _steps_fit(lengths, rules, index, bounds):
            return index, ranks, bounds, _deal_ranks(lengths, weights, rules, index, bounds, ranks)
    if not may_pack:
        return index, ranks, bounds, -2
    if not rules.whole_steps:
        bins = _pack(lengths, num_steps * rules.world_size, rules.rank_tokens, rules.rank_samples)
        if not _group(lengths, bins, rules, turn, index, ranks, bounds):
            return index, ranks, bounds, -2
        _polish_all(lengths, rules, index, bounds, ranks)
        return index, ranks, bounds, -1
    steps = _pack(lengths, num_steps, rules.step_tokens, rules.step_samples)
    if steps.min() < 0 or not _collect(_falling_by(lengths, steps), turn, index, bounds):
        return index, ranks, bounds, -2
    return index, ranks, bounds, _deal_ranks(lengths, weights, rules, index, bounds, ranks)


@compiled
def _steps_by_rows(lengths: Ints, rules: Rules, num_steps: int, state: np.uint64) -> tuple[Ints, Ints]:
    """Returns the positions from long to short, and the step of each.

    What is dealt are units: `W` neighbours, one for each rank, or a power of two where steps may not know of `W`, which most numbers of
    ranks divide. Steps are evened out in tokens, which the caps count; rows keep their cost about even too.
    """
    unit = rules.world_size
    if rules.whole_steps:
        unit = 1
        while 2 * unit * ROWS * num_steps <= len(lengths):
            unit *= 2
    falling = fall(lengths)
    tokens = _add_up(lengths, falling, unit)
    of_unit = np.empty(len(tokens), np.int64)
    groups = (num_steps + rules.bucket_steps - 1) // rules.bucket_steps
    deal_rows(weigh(tokens, (0.0, 0.0, 0.0)), groups, 0, state, of_unit)
    if rules.bucket_steps > 1:
        _cut(tokens, groups, num_steps, of_unit)
    steps = np.empty(len(lengths), np.int64)
    for u in range(len(of_unit)):
        steps[u * unit : (u + 1) * unit] = of_unit[u]
    return falling, steps


@compiled
def _add_up(values: Ints, order: Ints, unit: int) -> Ints:
    """Returns the sum of every `unit` values in that order."""
    sums = np.zeros((len(order) + unit - 1) // unit, np.int64)
    for u in range(len(sums)):
        for i in range(u * unit, min((u + 1) * unit, len(order))):
            sums[u] += values[order[i]]
    return sums


@compiled
def _cut(tokens: Ints, groups: int, num_steps: int, steps: Ints) -> None:
    """Turns the group of each unit, in place, into its step: each group, long to short, is cut into parts of about equal tokens."""
    whole, left = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for i in range(len(steps)):
        whole[steps[i]] += tokens[i]
        left[steps[i]] += 1
    total = left.copy()
    seen, part = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    for i in range(len(steps)):
        g = steps[i]
        first, size = num_steps * g // groups, num_steps * (g + 1) // groups - num_steps * g // groups
        # A unit belongs where its middle lies. Parts follow one another, and each of the parts to come keeps a unit.
        middle = (2 * seen[g] + tokens[i]) * size
        wanted = middle // (2 * whole[g]) if whole[g] > 0 else (total[g] - left[g]) * size // total[g]
        wanted = max(min(wanted, part[g] + 1, size - 1), size - left[g], 0)
        part[g] = wanted if left[g] < total[g] else 0
        seen[g] += tokens[i]
        left[g] -= 1
        steps[i] = first + part[g]


@compiled
def _collect(dealt: tuple[Ints, Ints], turn: Ints, index: Ints, bounds: Ints) -> bool:
    """Brings the samples of each step together, long to short; returns false where a step has none."""
    falling, steps = dealt
    bounds[:] = 0
    for i in range(len(steps)):
        bounds[turn[steps[i]] + 1] += 1
    if bounds[1:].min() == 0:
        return False
    for s in range(len(turn)):
        bounds[s + 1] += bounds[s]
    at = bounds[:-1].copy()
    for i in range(len(steps)):
        s = turn[steps[i]]
        index[at[s]] = falling[i]
        at[s] += 1
    return True


@compiled
def _steps_fit(lengths: Ints, rules: Rules, index: Ints, bounds: Ints) -> bool:
    """Returns whether every step holds its caps."""
    for s in range(len(bounds) - 1):
        tokens = 0
        for i in range(bounds[s], bounds[s + 1]):
            tokens += lengths[index[i]]
        if tokens > rules.step_tokens or bounds[s + 1] - bounds[s] > rules.step_samples:
            return False
    return True


@compiled
def _deal_ranks(lengths: Ints, weights: Ints, rules: Rules, index: Ints, bounds: Ints, ranks: Ints) -> int:
    """Deals each step to the ranks; returns -1, or the first step that does not fit."""
    W = rules.world_size
    fine, pairs = (FINE, 512) if len(lengths) <= SMALL else (GOOD, 64)
    load, tokens, samples = np.empty(W, np.float64), np.empty(W, np.int64), np.empty(W, np.int64)
    for s in range(len(bounds) - 1):
        own, dealt = index[bounds[s] : bounds[s + 1]], np.zeros(bounds[s + 1] - bounds[s], np.int64)
        if W > 1:
            deal_rows(weights[own], W, s % W, np.uint64(0), dealt)
        fits, worst = _weigh_ranks(lengths, rules, own, dealt, load, tokens, samples)
        if W > 1 and worst > fine:
            polish(lengths[own], rules.cost, W, rules.rank_tokens, rules.rank_samples, FINE, pairs, dealt)
            fits, worst = _weigh_ranks(lengths, rules, own, dealt, load, tokens, samples)
        if W > 1 and not (fits and worst <= GOOD):
            other = np.empty(len(own), np.int64)
            if _deal_singly(lengths[own], rules.cost, W, rules.rank_tokens, rules.rank_samples, s % W, other) == 0:
                polish(lengths[own], rules.cost, W, rules.rank_tokens, rules.rank_samples, FINE, pairs, other)
                _, better = _weigh_ranks(lengths, rules, own, other, load, tokens, samples)
                if not fits or better < worst:
                    fits, dealt = True, other
        if not fits:
            return s
        for i in range(len(own)):
            ranks[bounds[s] + i] = dealt[i]
    return -1


@compiled
def _polish_all(lengths: Ints, rules: Rules, index: Ints, bounds: Ints, ranks: Ints) -> None:
    """Evens out the ranks of every step with what room the caps leave."""
    pairs = 512 if len(lengths) <= SMALL else 64
    for s in range(len(bounds) - 1):
        own, dealt = index[bounds[s] : bounds[s + 1]], ranks[bounds[s] : bounds[s + 1]].astype(np.int64)
        polish(lengths[own], rules.cost, rules.world_size, rules.rank_tokens, rules.rank_samples, FINE, pairs, dealt)
        for i in range(len(own)):
            ranks[bounds[s] + i] = dealt[i]


@compiled
def _weigh_ranks(lengths: Ints, rules: Rules, own: Ints, dealt: Ints, load: Floats, tokens: Ints, samples: Ints) -> tuple[bool, float]:
    """Returns whether both caps of a rank hold, and the worse imbalance of cost and tokens; the last three, `[W]`, get each rank's."""
    load[:] = 0.0
    tokens[:] = 0
    samples[:] = 0
    for i in range(len(own)):
        length = lengths[own[i]]
        load[dealt[i]] += price(float(length), rules.cost)
        tokens[dealt[i]] += length
        samples[dealt[i]] += 1
    cost = load.sum()
    worst = load.max() * len(load) / cost if cost > 0.0 else 1.0
    if tokens.sum() > 0:
        worst = max(worst, tokens.max() * len(load) / float(tokens.sum()))
    return tokens.max() <= rules.rank_tokens and samples.max() <= rules.rank_samples, worst


@compiled
def _deal_singly(
    lengths: Ints, cost: tuple[float, float, float], num_bins: int, max_tokens: int, max_samples: int, first: int, bins: Ints
) -> int:
    n = len(lengths)
    index, spare, heap = np.empty(n, np.int64), np.empty(n + num_bins, np.int64), np.empty(num_bins, np.int64)
    load, room, count = np.empty(num_bins, np.float64), np.empty(num_bins, np.int64), np.empty(num_bins, np.int64)
    return deal_step(lengths, n, cost, max_tokens, max_samples, first, index, spare, heap, load, room, count, bins)


@compiled
def _pack(lengths: Ints, num_bins: int, max_tokens: int, max_samples: int) -> Ints:
    """Returns the bin of each sample, longest first to the bin with the fewest tokens; -1 where none has room."""
    bins = np.empty(len(lengths), np.int64)
    _deal_singly(lengths, (1.0, 0.0, 0.0), num_bins, max_tokens, max_samples, 0, bins)
    return bins


@compiled
def _falling_by(lengths: Ints, bins: Ints) -> tuple[Ints, Ints]:
    """Returns the positions from long to short and the bin of each."""
    n = len(lengths)
    falling = np.empty(n, np.int64)
    sort_falling(lengths, n, falling, np.empty(n, np.int64))
    return falling, bins[falling]


@compiled
def _group(lengths: Ints, bins: Ints, rules: Rules, turn: Ints, index: Ints, ranks: Ints, bounds: Ints) -> bool:
    """Makes a step of the bins of like cost; returns false where a sample has no bin or a step would have none."""
    W, num_steps = rules.world_size, len(turn)
    if bins.min() < 0:
        return False
    num_bins = W * num_steps
    load, filled = np.zeros(num_bins, np.float64), np.zeros(num_bins, np.int64)
    for i in range(len(bins)):
        load[bins[i]] += price(float(lengths[i]), rules.cost)
        filled[bins[i]] = 1
    used = np.flatnonzero(filled)
    dear = used[np.argsort(-load[used])]
    step_of, rank_of = np.zeros(num_bins, np.int64), np.zeros(num_bins, np.int64)
    for s in range(num_steps):
        first, last = len(dear) * s // num_steps, len(dear) * (s + 1) // num_steps
        for at in range(first, last):
            step_of[dear[at]], rank_of[dear[at]] = s, (at - first + s) % W
    falling, steps = _falling_by(lengths, bins)
    for i in range(len(steps)):
        steps[i] = step_of[steps[i]]
    if not _collect((falling, steps), turn, index, bounds):
        return False
    for i in range(len(index)):
        ranks[i] = rank_of[bins[index[i]]]
    return True
