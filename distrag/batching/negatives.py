"""Uniform negatives, exact and without rejection, from counters instead of a generator's state.

A draw is a hash of what it is for (seed, epoch, sample, position, number), so it is the same whichever rank or worker makes it, in
whichever batch, and nothing has to be saved to repeat it.
Source of the hash: the finaliser of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled

if TYPE_CHECKING:
    from distrag.batching.compiled import Column, Ints

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_PER_SAMPLE, _SHARED = 1, 2


@compiled
def _mixed(z: np.uint64) -> np.uint64:
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


@compiled
def _chained(key: np.uint64, number: int) -> np.uint64:
    return _mixed(key + _GOLDEN * (np.uint64(number) + np.uint64(1)))


@compiled
def _below(z: np.uint64, n: int) -> np.int64:
    # Multiply-shift instead of a remainder: exact to 2^-32 for tables below 2^32 rows, and without a division.
    return np.int64(((z >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32))


@compiled
def shared_negatives(num_rows: int, seed: int, epoch: int, step: int, out: Ints) -> None:
    """Fills `out` with rows `1 .. num_rows-1`, uniform; the same for all ranks of a step."""
    key = _chained(_chained(_chained(_chained(np.uint64(_SHARED), seed), epoch), step), 0)
    for j in range(len(out)):
        out[j] = 1 + _below(_chained(key, j), num_rows - 1)


@compiled
def _sort(values: Ints, n: int, spare: Ints) -> None:
    # Few values are inserted, more go through a radix sort: five times quicker here than numba's own sort.
    if n <= 24:
        for i in range(1, n):
            value, at = values[i], i
            while at > 0 and values[at - 1] > value:
                values[at] = values[at - 1]
                at -= 1
            values[at] = value
        return
    largest = values[:n].max()
    counts = np.empty(257, np.int64)
    shift = 0
    while shift < 64 and largest >> shift:
        counts[:] = 0
        for i in range(n):
            counts[((values[i] >> shift) & 255) + 1] += 1
        for digit in range(256):
            counts[digit + 1] += counts[digit]
        for i in range(n):
            bucket = (values[i] >> shift) & 255
            spare[counts[bucket]] = values[i]
            counts[bucket] += 1
        values[:n] = spare[:n]
        shift += 8


@compiled
def _free_below(items: Column, first: int, stop: int, below: Ints, spare: Ints) -> int:
    """Writes, for each distinct item of `[first, stop)` in ascending order, how many rows below it are free; returns how many items."""
    n, kept, previous = 0, 0, 0
    for at in range(first, stop):
        if items[at] != 0:
            below[n] = items[at]
            n += 1
    _sort(below, n, spare)
    for i in range(n):
        row = below[i]
        if row != previous:
            below[kept] = row - 1 - kept
            kept += 1
            previous = row
    return kept


@compiled
def _note_starts(below: Ints, met: int, free: int, near: Ints) -> None:
    """Writes where the search for a draw starts, by the six upper bits of the draw, int64 `[64]`; bisection would guess every branch."""
    low = 0
    for bits in range(64):
        while low < met and below[low] < (bits * free) >> 6:
            low += 1
        near[bits] = low


@compiled
def position_negatives(
    items: Column,
    begin: Ints,
    end: Ints,
    following: Ints,
    first: Ints,
    samples: Ints,
    num_negatives: int,
    num_rows: int,
    seed: int,
    epoch: int,
    out: Ints,
) -> None:
    """Fills `out` with `num_negatives` rows for each history position, uniform over the rows `1 .. num_rows-1` that the user never met.

    Met are all items of the sample's row up to the event after its history. The free rows are numbered through and one is drawn, so
    nothing is ever rejected. A user who met the whole catalogue gets uniform draws over all of it.

    Args:
        items: stored rows of the target, `[num_positions]`.
        begin: View.begin, int64 `[n]`.
        end: View.end, int64 `[n]`.
        following: View.next, int64 `[n]`.
        first: View.first, int64 `[n]`.
        samples: sample numbers of the batch, int64 `[B]`.
        num_negatives: draws a position (`N`).
        num_rows: rows of the item table, the unknown row 0 included (`V`).
        seed: seed of the run.
        epoch: number of the epoch.
        out: int64 `[sum_L * N]`, receives the rows.
    """
    base = _chained(_chained(np.uint64(_PER_SAMPLE), seed), epoch)
    below, spare, near = np.empty(256, np.int64), np.empty(256, np.int64), np.empty(64, np.int64)
    at = 0
    for b in range(len(samples)):
        sample = samples[b]
        if end[sample] == begin[sample]:
            continue
        stop = max(end[sample], following[sample] + 1)
        if stop - first[sample] > len(below):
            below, spare = np.empty(2 * (stop - first[sample]), np.int64), np.empty(2 * (stop - first[sample]), np.int64)
        met = _free_below(items, first[sample], stop, below, spare)
        free = num_rows - 1 - met
        if free <= 0:
            met, free = 0, num_rows - 1
        _note_starts(below, met, free, near)
        of_sample = _chained(base, sample)
        for position in range(end[sample] - begin[sample]):
            key = _chained(of_sample, position)
            for j in range(num_negatives):
                z = _chained(key, j)
                u, low = _below(z, free), near[z >> np.uint64(58)]
                while low < met and below[low] <= u:
                    low += 1
                out[at] = u + 1 + low
                at += 1
