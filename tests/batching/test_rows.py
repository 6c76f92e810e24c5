"""Rows: draws, sorting, weighing, and dealing that leaves every bin as many items and about the same weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching.rows import WHOLE, deal_rows, fall, next_random, order_rising, random_below, shuffle, shuffle_two, weigh
from tests.batching.worlds import COSTS, KINDS, draw_lengths

MANY = settings.default.max_examples * 3
SEEDS = st.integers(0, 2**32)


def order(values: list[int] | np.ndarray) -> np.ndarray:
    n, found = len(values), np.empty(len(values), np.int64)
    order_rising(np.asarray(values, np.int64), n, found, np.empty(n + 1, np.int64), np.empty(n, np.int64))
    return found


def deal(weights: np.ndarray, num_bins: int, first_bin: int = 0, noise: int = 0) -> tuple[np.ndarray, int]:
    bins = np.full(len(weights), -1)
    return bins, int(deal_rows(weights, num_bins, first_bin, np.uint64(noise), bins))


def weights_of(seed: int, most: int = 400) -> np.ndarray:
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(rng, KINDS[seed % len(KINDS)], int(rng.integers(1, most)), int(rng.integers(1, 5000)))
    return np.sort(weigh(lengths.astype(np.int64), COSTS[seed % len(COSTS)]))[::-1].copy()


@settings(max_examples=MANY)
@given(st.lists(st.one_of(st.integers(0, 30), st.integers(0, 2**43 - 1)), min_size=1, max_size=200))
def test_rising_order_sorts(values: list[int]) -> None:
    found = order(values)
    assert sorted(found.tolist()) == list(range(len(values)))
    assert np.asarray(values)[found].tolist() == sorted(values)


@pytest.mark.parametrize("n", [1, 2, 16, 17, 64, 65, 66, 67, 1000, 70_000])
def test_rising_order_sorts_what_one_far_value_crowds(n: int) -> None:
    crowd = np.random.default_rng(n).integers(0, 1000, n)
    for far in (0, 2**42, 2**43 - 1):
        values = np.append(crowd, far)
        assert (values[order(values)] == np.sort(values)).all()
    same = np.full(n, 5)
    assert order(same).tolist() == list(range(n))


@settings(max_examples=MANY)
@given(st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**45)), max_size=200))
def test_falling_keeps_the_order_of_what_is_of_one_class(lengths: list[int]) -> None:
    sizes = np.array(lengths, np.int64)
    found = fall(sizes)
    # The class of a length: its exponent and the five bits after the first.
    exponent = np.frexp(sizes.astype(np.float64))[1]
    classes = np.where(sizes > 0, exponent * 32 + (np.ldexp(sizes.astype(np.float64), 6 - exponent)).astype(np.int64) % 32, 0)
    assert found.tolist() == np.argsort(-classes, kind="stable").tolist()
    fallen = sizes[found]
    assert (fallen[1:] <= np.minimum.accumulate(fallen)[:-1] * (1 + 1 / 32)).all()


@settings(max_examples=MANY)
@given(st.lists(st.integers(0, 2**40), max_size=50), st.sampled_from(COSTS))
def test_weights_are_shares_of_tokens_and_cost_in_equal_parts(lengths: list[int], cost: tuple[float, float, float]) -> None:
    sizes = np.array(lengths, np.float64)
    price = cost[0] * sizes + cost[1] * sizes**2 + cost[2]
    wanted = sum((WHOLE / 2 * part / part.sum() for part in (sizes, price) if part.sum() > 0), np.zeros(len(sizes)))
    weights = weigh(np.array(lengths, np.int64), cost)
    assert weights.dtype == np.int64
    assert np.allclose(weights, wanted, rtol=1e-9, atol=1)
    assert weights.sum() <= WHOLE
    assert (np.diff(weights[np.argsort(lengths)]) >= 0).all()


@settings(max_examples=MANY)
@given(SEEDS, st.integers(1, 70), st.integers(0, 100), st.booleans())
def test_bins_hold_equal_counts_and_weights_to_the_heaviest_item(seed: int, num_bins: int, first: int, noisy: bool) -> None:
    weights = weights_of(seed)
    bins, state = deal(weights, num_bins, first % num_bins, 2 * seed + 1 if noisy else 0)
    for start in range(0, len(weights), num_bins):
        row = bins[start : start + num_bins]
        assert len(set(row.tolist())) == len(row)
    counts, load = np.bincount(bins, minlength=num_bins), np.bincount(bins, weights, minlength=num_bins)
    assert counts.max() - counts.min() <= 1
    assert load.max() - load.min() <= weights[0]
    assert (state != 0) == noisy


def test_the_heaviest_of_a_row_goes_to_the_lightest_bin_and_first_bin_turns_equal_ones() -> None:
    weights = np.array([9, 5, 1, 4, 3, 2, 7])
    assert deal(weights, 3)[0].tolist() == [0, 1, 2, 2, 1, 0, 2]
    assert deal(weights, 3, 2)[0].tolist() == [2, 0, 1, 1, 0, 2, 1]
    assert deal(np.zeros(0, np.int64), 3)[0].tolist() == []


def test_noise_draws_who_meets_whom_and_comes_again() -> None:
    weights = np.sort(np.random.default_rng(0).integers(1, 1000, 200))[::-1].copy()
    drawn = [tuple(deal(weights, 20, 0, noise)[0].tolist()) for noise in (1, 3, 3)]
    assert drawn[0] != drawn[1] == drawn[2]
    meets = [{tuple(np.flatnonzero(np.array(one) == b)[:2]) for b in range(20)} for one in drawn[:2]]
    assert len(meets[0] & meets[1]) < 10


def test_draws_are_even_and_in_bounds() -> None:
    state, counts = np.uint64(7), np.zeros(10, np.int64)
    for _ in range(20_000):
        state = np.uint64(next_random(state))
        counts[random_below(state, 10)] += 1
    assert abs(counts - 2000).max() < 200
    top = np.uint64(2**64 - 1)
    assert [random_below(top, limit) for limit in (1, 2, 2**20, 2**32 - 1)] == [0, 1, 2**20 - 1, 2**32 - 2]
    assert random_below(np.uint64(1), 5) == 0


def test_a_shuffle_puts_each_anywhere_as_often() -> None:
    where, state = np.zeros((6, 6), np.int64), np.uint64(11)
    for _ in range(6000):
        values = np.arange(6)
        others = values * 3
        state = np.uint64(shuffle_two(values, others, state))
        where[values, np.arange(6)] += 1
        assert (others == values * 3).all()
    assert abs(where - 1000).max() < 150
    one, two, other = np.arange(50), np.arange(50), np.arange(50)
    assert shuffle(one, np.uint64(5)) == shuffle_two(two, other, np.uint64(5))
    assert one.tolist() == two.tolist() != list(range(50))
    assert sorted(one.tolist()) == list(range(50))
