"""Swaps only ever even out: no cap is left, the worse of the two peaks never rises, every sample keeps one rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching.polish import polish
from tests.batching.worlds import COSTS, KINDS, draw_lengths


def peaks(lengths: np.ndarray, cost: tuple[float, float, float], num_ranks: int, ranks: np.ndarray) -> list[float]:
    """Returns max / mean of tokens and of cost."""
    prices = cost[0] * lengths + cost[1] * lengths.astype(float) ** 2 + cost[2]
    return [
        float(np.bincount(ranks, values, num_ranks).max() / max(values.mean() * len(ranks) / num_ranks, 1e-9))
        for values in (lengths, prices)
    ]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(2, 7), st.integers(1, 80), st.sampled_from(COSTS))
def test_the_worse_peak_never_rises_and_caps_are_kept(
    seed: int, kind: str, num_ranks: int, n: int, cost: tuple[float, float, float]
) -> None:
    rng = np.random.default_rng(seed)
    lengths, ranks = draw_lengths(rng, kind, n, 60).astype(np.int64), rng.integers(0, num_ranks, n)
    before, old = peaks(lengths, cost, num_ranks, ranks), ranks.copy()
    max_tokens, max_samples = int(np.bincount(old, lengths, num_ranks).max()), int(np.bincount(old, minlength=num_ranks).max())
    polish(lengths, cost, num_ranks, max_tokens, max_samples, 1.0, 64, ranks)
    after = peaks(lengths, cost, num_ranks, ranks)
    assert ranks.min() >= 0
    assert ranks.max() < num_ranks
    assert max(after) <= max(before) * (1 + 1e-9) + 1e-9
    assert np.bincount(ranks, lengths, num_ranks).max() <= max_tokens
    assert np.bincount(ranks, minlength=num_ranks).max() <= max_samples


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_deal_that_is_far_off_comes_out_even(num_ranks: int) -> None:
    rng = np.random.default_rng(1)
    lengths = 1 + draw_lengths(rng, "lognormal", 64 * num_ranks, 200).astype(np.int64)
    ranks, cost = np.sort(rng.integers(0, num_ranks, len(lengths))), (1.0, 0.01, 0.0)
    polish(lengths, cost, num_ranks, 10**9, 10**9, 1.001, 100_000, ranks)
    assert max(peaks(lengths, cost, num_ranks, ranks)) <= 1.04  # from 1.16 on 2 ranks, 1.41 on 8


def test_pairs_bound_the_work() -> None:
    lengths, ranks = np.arange(1, 101), np.zeros(100, np.int64)
    polish(lengths, (1.0, 0.0, 0.0), 2, 10**9, 10**9, 1.0, 0, ranks)
    assert ranks.max() == 0
