"""The compiled last touch on a dealt step: swaps between two ranks until tokens and cost are even."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled
from distrag.batching.rows import price

if TYPE_CHECKING:
    from distrag.batching.compiled import Floats, Ints

_PARTNERS = 16
"""Ranks that the fullest one tries to swap with before it is left as it is."""


@compiled
def polish(
    lengths: Ints,
    cost: tuple[float, float, float],
    num_ranks: int,
    max_tokens: int,
    max_samples: int,
    enough: float,
    pairs: int,
    ranks: Ints,
) -> None:
    """Swaps samples, or moves one, between the rank with the most cost or tokens and those with the least, in place, the best pair first.

    What lies above the mean falls each time, the worse of the two peaks never rises, and no rank that holds its caps leaves them.

    Args:
        lengths: int64 `[n]`, of a step.
        cost: `(a, b, c)`.
        num_ranks: ranks (`W`).
        max_tokens: most tokens of a rank.
        max_samples: most samples of a rank.
        enough: max / mean of cost and tokens at which to stop.
        pairs: pairs that may be looked at for each sample.
        ranks: int64 `[n]`, the rank of each sample.
    """
    n = len(lengths)
    share, load, tokens = _shares(lengths, cost, num_ranks, ranks)
    head, after = _chain(ranks, num_ranks)
    own, its = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    left, failed = pairs * n, 0
    while left > 0 and failed < min(_PARTNERS, num_ranks - 1):
        metric = 0 if load[0].max() >= load[1].max() else 1
        full = int(load[metric].argmax())
        if load[metric, full] <= enough:
            return
        other = _nth_smallest(load[metric], failed)
        many, few = _members(head[full], after, own), _members(head[other], after, its)
        left -= (many + 1) * (few + 1)
        room = (max(max_tokens - tokens[other], 0), max(max_tokens - tokens[full], 0), few < max_samples)
        i, j = _best_swap(lengths, share, own[:many], its[:few], load[:, full], load[:, other], load.max(), room)
        if i < 0:
            failed += 1
            continue
        failed = 0
        for sample, source, target in ((i, full, other), (j, other, full)):
            if sample >= 0:
                ranks[sample] = target
                tokens[source] -= lengths[sample]
                tokens[target] += lengths[sample]
                for m in range(2):
                    load[m, source] -= share[m, sample]
                    load[m, target] += share[m, sample]
        head[full] = head[other] = -1
        for at in range(many + few):
            sample = own[at] if at < many else its[at - many]
            after[sample] = head[ranks[sample]]
            head[ranks[sample]] = sample


@compiled
def _shares(lengths: Ints, cost: tuple[float, float, float], num_ranks: int, ranks: Ints) -> tuple[Floats, Floats, Ints]:
    """Returns the share of each sample in a mean rank's tokens and cost, `[2, n]`, the sums of ranks, `[2, W]`, and their tokens."""
    n = len(lengths)
    share, load, tokens = np.zeros((2, n), np.float64), np.zeros((2, num_ranks), np.float64), np.zeros(num_ranks, np.int64)
    for i in range(n):
        share[0, i] = float(lengths[i])
        share[1, i] = price(float(lengths[i]), cost)
        tokens[ranks[i]] += lengths[i]
    for m in range(2):
        mean = share[m].sum() / num_ranks
        if mean > 0.0:
            share[m] /= mean
        for i in range(n):
            load[m, ranks[i]] += share[m, i]
    return share, load, tokens


@compiled
def _chain(ranks: Ints, num_ranks: int) -> tuple[Ints, Ints]:
    """Returns the samples of each rank as a chain: its first, `[W]`, and the one after each, `[n]`; -1 ends it."""
    head, after = np.full(num_ranks, -1, np.int64), np.full(len(ranks), -1, np.int64)
    for i in range(len(ranks)):
        after[i] = head[ranks[i]]
        head[ranks[i]] = i
    return head, after


@compiled
def _members(first: int, after: Ints, out: Ints) -> int:
    """Writes the samples of a chain into `out`; returns how many they are."""
    count, at = 0, first
    while at >= 0:
        out[count] = at
        count += 1
        at = after[at]
    return count


@compiled
def _nth_smallest(values: Floats, nth: int) -> int:
    """Returns the position of the smallest value but `nth`."""
    seen = values.copy()
    at = int(seen.argmin())
    for _ in range(nth):
        seen[at] = np.inf
        at = int(seen.argmin())
    return at


@compiled
def _excess(share: float) -> float:
    """Returns how bad it is to have so much of the mean: what lies above counts, what lies below hardly does."""
    gap = share - 1.0
    return gap * gap if gap > 0.0 else 0.01 * gap * gap


@compiled
def _best_swap(
    lengths: Ints,
    share: Floats,
    own: Ints,
    its: Ints,
    full: Floats,
    other: Floats,
    most: float,
    room: tuple[int, int, bool],
) -> tuple[int, int]:
    """Returns the samples whose swap lowers the excess of both ranks the most and makes no worse peak; -1 for none, or for a move."""
    best, first, second = -1e-9, -1, -1
    before = _excess(full[0]) + _excess(full[1]) + _excess(other[0]) + _excess(other[1])
    for x in range(len(own)):
        i = own[x]
        for y in range(-1, len(its)):
            if y < 0 and not room[2]:
                continue
            j = its[y] if y >= 0 else -1
            more = lengths[i] - (lengths[j] if j >= 0 else 0)
            d = share[0, i] - (share[0, j] if j >= 0 else 0.0)
            e = share[1, i] - (share[1, j] if j >= 0 else 0.0)
            if max(max(other[0] + d, full[0] - d), max(other[1] + e, full[1] - e)) > most:
                continue
            change = _excess(full[0] - d) + _excess(other[0] + d) + _excess(full[1] - e) + _excess(other[1] + e) - before
            if change < best and more <= room[0] and -more <= room[1]:
                best, first, second = change, i, j
    return first, second
