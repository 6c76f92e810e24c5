"""What the plan is measured against: random batches of equal counts, dealt as they come or by Karmarkar and Karp's differencing."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distrag.batching.compiled import Floats, Ints


def random_batches(num_samples: int, world_size: int, samples_a_rank: int, seed: int = 0) -> Iterator[Ints]:
    """Yields the global batches of `DistributedSampler(seed=seed)`, whole ones only, int64 `[W * samples_a_rank]`.

    Sample i of a batch is dealt to rank `i % W`, so that all ranks have equal counts.
    """
    generator = torch.Generator()
    generator.manual_seed(seed)
    order = torch.randperm(num_samples, generator=generator).numpy()
    size = world_size * samples_a_rank
    for start in range(0, num_samples - size + 1, size):
        yield order[start : start + size]


def deal_equal_counts(costs: Floats, world_size: int) -> Ints:
    """Returns the rank of each sample, int64 `[n]`: equal counts, costs evened out by largest differencing of W-tuples.

    The sorted samples are cut into tuples of `W` neighbours, one a rank. Then the two tuples of the largest spread become one, the dear end
    of each on the cheap end of the other, until one is left. This is the balanced Karmarkar-Karp heuristic that open trainers run after
    loading a batch.

    Args:
        costs: of each sample, `[n]`; n is a multiple of `world_size`.
        world_size: ranks (`W`).

    Source: Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced number
    partitioning problem", STACS 2003.
    """
    rising = np.argsort(costs, kind="stable").reshape(-1, world_size)
    tuples = list(np.asarray(costs, np.float64)[rising])
    heap = [(row[0] - row[-1], t) for t, row in enumerate(tuples)]
    heapq.heapify(heap)
    merged: list[tuple[int, int, Ints]] = []
    while len(heap) > 1:
        (_, a), (_, b) = heapq.heappop(heap), heapq.heappop(heap)
        total = tuples[a] + tuples[b][::-1]
        order = np.argsort(total, kind="stable")
        merged.append((a, b, order))
        tuples.append(total[order])
        heapq.heappush(heap, (tuples[-1][0] - tuples[-1][-1], len(tuples) - 1))
    rank_of = np.empty((len(tuples), world_size), np.int64)
    rank_of[-1] = np.arange(world_size)
    for t in range(len(merged) - 1, -1, -1):  # the places in the last tuple are ranks; each merge tells those of its two
        a, b, order = merged[t]
        rank_of[a][order] = rank_of[len(rising) + t]
        rank_of[b] = rank_of[a][::-1]
    ranks = np.empty(len(costs), np.int64)
    ranks[rising] = rank_of[: len(rising)]
    return ranks
