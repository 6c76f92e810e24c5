"""Compiled gathers: windows of stored columns into flat arrays, one call a column, no Python object a sample.

All take the sample numbers of a batch and write into arrays the caller made. Gathers of ids return the largest value met, read as unsigned,
so that one comparison by the caller finds ids above the table and negative ones alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from distrag.batching.compiled import compiled

if TYPE_CHECKING:
    from distrag.batching.compiled import Column, Floats, Ints


@compiled
def measure(begin: Ints, end: Ints, samples: Ints, slope: Ints, fixed: Ints, offsets: Ints, starts: Ints, lengths: Ints) -> int:
    """Writes where each history starts, in the store and in the batch, and the lengths of every key; returns the positions (`sum_L`).

    Args:
        begin: View.begin, int64 `[n]`.
        end: View.end, int64 `[n]`.
        samples: sample numbers, int64 `[B]`.
        slope: ids of each key for one history position, int64 `[K]`.
        fixed: ids of each key for one sample, int64 `[K]`.
        offsets: int64 `[B+1]`, receives the offsets of the histories.
        starts: int64 `[B]`, receives the index of the first event of each in the store.
        lengths: int64 `[K, B]`, receives `slope * L + fixed`.
    """
    total = 0
    for b in range(len(samples)):
        sample = samples[b]
        starts[b] = begin[sample]
        length = end[sample] - begin[sample]
        offsets[b] = total
        total += length
        for k in range(len(slope)):
            lengths[k, b] = slope[k] * length + fixed[k]
    offsets[len(samples)] = total
    return total


@compiled
def take_ids(column: Column, starts: Ints, offsets: Ints, out: Ints) -> np.uint64:
    """Writes the ids of each history one after the other, int64 `[sum_L]`; returns the largest as unsigned."""
    largest = np.uint64(0)
    # Windows lie anywhere in the file: a first look at each lets the processor wait for all of that memory at once.
    for b in range(len(starts)):
        if offsets[b + 1] > offsets[b]:
            largest = max(largest, np.uint64(column[starts[b]]))
    for b in range(len(starts)):
        start, at = starts[b], offsets[b]
        # Two plain loops over a row that is in the cache: both run on vectors, one loop for both does not.
        for i in range(offsets[b + 1] - at):
            out[at + i] = column[start + i]
        for i in range(offsets[b + 1] - at):
            largest = max(largest, np.uint64(column[start + i]))
    return largest


@compiled
def take_next(column: Column, following: Ints, samples: Ints, out: Ints) -> np.uint64:
    """Writes the id of the event after each history, int64 `[B]`, row 0 where there is none; returns the largest as unsigned."""
    largest = np.uint64(0)
    for b in range(len(samples)):
        at = following[samples[b]]
        value = np.int64(column[at]) if at >= 0 else np.int64(0)
        out[b] = value
        largest = max(largest, np.uint64(value))
    return largest


@compiled
def take_rows(column: Column, rows: Ints, samples: Ints, out: Column) -> np.uint64:
    """Writes one value of each sample, `[B]`; returns the largest as unsigned, which means something for ids only."""
    largest = np.uint64(0)
    for b in range(len(samples)):
        value = column[rows[samples[b]]]
        out[b] = value
        largest = max(largest, np.uint64(np.int64(value)))
    return largest


@compiled
def take_numbers(column: Column, starts: Ints, offsets: Ints, out: Floats, feature: int) -> None:
    """Writes a number of each position into column `feature` of float32 `[sum_L, F]`."""
    for b in range(len(starts)):
        start, at = starts[b], offsets[b]
        for i in range(offsets[b + 1] - at):
            out[at + i, feature] = column[start + i]


@compiled
def take_log_gaps(times: Column, starts: Ints, offsets: Ints, out: Floats, feature: int) -> None:
    """Writes log1p of the seconds since the event before into column `feature` of float32 `[sum_L, F]`; 0 for the first of a history.

    The difference is taken in int64: float32 seconds since 1970 are 64 s apart.
    """
    for b in range(len(starts)):
        start, at = starts[b], offsets[b]
        for i in range(offsets[b + 1] - at):
            gap = times[start + i] - times[start + i - 1] if i > 0 else 0
            out[at + i, feature] = np.log1p(np.float64(max(gap, 0)))


@compiled
def take_gap_buckets(times: Column, starts: Ints, offsets: Ints, out: Ints) -> np.uint64:
    """Writes 1 + the significant bits (at most 63) of the seconds since the event before, int64 `[sum_L]`; returns the largest."""
    largest = np.uint64(0)
    for b in range(len(starts)):
        start, at = starts[b], offsets[b]
        for i in range(offsets[b + 1] - at):
            gap = times[start + i] - times[start + i - 1] if i > 0 else 0
            bits = 0
            while gap > 0:
                bits += 1
                gap >>= 1
            out[at + i] = bits + 1
            largest = max(largest, np.uint64(bits + 1))
    return largest


@compiled
def all_known(column: Column) -> bool:
    """Returns whether no value of the column is row 0; reads it once, at the speed of memory."""
    size = len(column)
    for start in range(0, size, 4096):
        zeros = 0
        for at in range(start, min(start + 4096, size)):
            zeros += column[at] == 0
        if zeros:
            return False
    return True


@compiled
def count_known(column: Column, begin: Ints, end: Ints, following: Ints, out: Floats) -> None:
    """Writes how many known ids each history has to predict, float64 `[n]`: its events but the first, and the one that follows."""
    for sample in range(len(begin)):
        known = 0
        for at in range(begin[sample] + 1, end[sample]):
            known += column[at] != 0
        if following[sample] >= 0 and end[sample] > begin[sample]:
            known += column[following[sample]] != 0
        out[sample] = known
