"""The slow, plain way: one user at a time, every item sorted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from distrag.evaluate import HeldOut
from distrag.evaluate.scoring import NAN, NO_TARGET, SEEN, UNKNOWN


@dataclass
class Case:
    """A catalogue `[V, D]`, queries `[N, D]`, and what was held out."""

    table: torch.Tensor
    queries: torch.Tensor
    held_out: HeldOut


def build_case(seed: int, num_rows: int = 137, dim: int = 8, num_samples: int = 61) -> Case:
    """Whole-numbered vectors, so that many scores tie and all are exact; some rows alike, some NaN, every kind of target."""
    rng = np.random.default_rng(seed)
    table = rng.integers(-2, 3, (num_rows, dim)).astype(np.float32)
    table[rng.integers(1, num_rows, num_rows // 4)] = table[rng.integers(1, num_rows)]
    table[rng.integers(1, num_rows, 2)] = np.nan
    queries = rng.integers(-2, 3, (num_samples, dim)).astype(np.float32)
    targets = rng.integers(1, num_rows, num_samples)
    lengths = rng.integers(0, 12, num_samples)
    ends = np.cumsum(lengths)
    items = rng.integers(0, num_rows, lengths.sum()).astype(np.uint16)
    if num_samples > 8:
        queries[5], targets[6], targets[7] = np.nan, 0, -1
    return Case(torch.from_numpy(table), torch.from_numpy(queries), HeldOut(targets, items, ends - lengths, ends))


def slow_ranks(case: Case) -> NDArray[np.int64]:
    """Returns what `rank_targets` must return for all samples of the case."""
    held, table = case.held_out, case.table.double().numpy()
    seen = [set(held.items[a:b].tolist()) for a, b in zip(held.first, held.end, strict=True)]
    # No matmul: at its edges BLAS adds in another order, and copies of a row would not tie.
    scores = [(table * query).sum(1) for query in case.queries.double().numpy()]
    return np.array([_slow_rank(*one) for one in zip(scores, held.targets.tolist(), seen, strict=True)], np.int64)


def _slow_rank(scores: NDArray[np.float64], target: int, seen: set[int]) -> int:
    if target <= 0:
        return UNKNOWN if target == 0 else NO_TARGET
    if target in seen:
        return SEEN
    if np.isnan(scores[target]):
        return NAN
    candidates = np.array([i for i in range(1, len(scores)) if i not in seen and not np.isnan(scores[i])])
    order = candidates[np.lexsort((candidates, -scores[candidates]))]
    return int(np.flatnonzero(order == target)[0]) + 1
