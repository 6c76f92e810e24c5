"""One step dealt sample by sample: caps hold, nothing waits that has room, and cost is even."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching.deal import NO_CAP, deal_step, sort_falling
from tests.batching.worlds import COSTS, KINDS, draw_lengths

MANY = settings.default.max_examples * 3
SEEDS = st.integers(0, 2**32)


def deal(
    lengths: np.ndarray, world_size: int, cost: tuple[float, float, float], tokens: int = NO_CAP, samples: int = NO_CAP, first: int = 0
) -> tuple[np.ndarray, int]:
    """Returns the rank of each sample, and how many found none."""
    n, ranks = len(lengths), np.full(len(lengths), -2)
    scratch = [np.empty(size, dtype) for size, dtype in ((n, int), (n + world_size, int), (world_size, int), (world_size, float))]
    room, count = np.empty(world_size, np.int64), np.empty(world_size, np.int64)
    return ranks, deal_step(lengths, n, cost, tokens, samples, first, *scratch, room, count, ranks)


def lengths_of(seed: int, longest: int = 500) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return draw_lengths(rng, KINDS[seed % len(KINDS)], int(rng.integers(1, 120)), longest).astype(np.int64)


@settings(max_examples=MANY)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**62)), max_size=80))
def test_falling_order_sorts_and_keeps_the_order_of_equal_ones(lengths: list[int]) -> None:
    index = np.empty(len(lengths), np.int64)
    sort_falling(np.array(lengths, np.int64), len(lengths), index, np.empty(len(lengths), np.int64))
    assert index.tolist() == sorted(range(len(lengths)), key=lambda i: -lengths[i])


@settings(max_examples=MANY)
@given(SEEDS, st.integers(1, 20), st.sampled_from(COSTS), st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0]), st.integers(1, 12))
def test_caps_hold_and_what_finds_no_rank_has_room_on_none(
    seed: int, world_size: int, cost: tuple[float, float, float], slack: float, samples: int
) -> None:
    lengths = lengths_of(seed)
    tokens = max(1, int(slack * lengths.sum() / world_size))
    ranks, unplaced = deal(lengths, world_size, cost, tokens, samples, seed % world_size)
    assert unplaced == (ranks == -1).sum()
    placed = ranks >= 0
    room = tokens - np.bincount(ranks[placed], lengths[placed], world_size).astype(np.int64)
    count = samples - np.bincount(ranks[placed], minlength=world_size)
    assert room.min() >= 0
    assert count.min() >= 0
    for length in lengths[~placed]:
        assert not ((room >= length) & (count > 0)).any()


@settings(max_examples=MANY)
@given(SEEDS, st.integers(1, 20), st.sampled_from(COSTS))
def test_cost_is_even_to_the_dearest_and_what_costs_nothing_is_shared_out(
    seed: int, world_size: int, cost: tuple[float, float, float]
) -> None:
    lengths = lengths_of(seed)
    ranks, unplaced = deal(lengths, world_size, cost)
    assert unplaced == 0
    prices = cost[0] * lengths + cost[1] * lengths.astype(float) ** 2 + cost[2]
    load = np.bincount(ranks, prices, world_size)
    assert load.max() <= prices.sum() / world_size + prices.max() * (1 + 1e-9)
    if not prices.any():
        assert np.ptp(np.bincount(ranks, minlength=world_size)) <= 1


@pytest.mark.parametrize("first", range(3))
def test_the_first_rank_turns_the_order(first: int) -> None:
    ranks, _ = deal(np.array([9, 5, 1, 1]), 3, (1.0, 0.0, 0.0), first=first)
    assert ranks.tolist() == [first, (first + 1) % 3, (first + 2) % 3, (first + 2) % 3]
