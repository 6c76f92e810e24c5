"""The look at all lengths: totals, hash, pools, length classes, and a bound that really bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching.deal import NO_CAP
from distrag.batching.pool import _pack
from distrag.batching.survey import add_up, class_of_bits, class_table, fullest_bin, gather_pool, look, tokens_by_class
from tests.batching.worlds import KINDS, draw_lengths

MANY = settings.default.max_examples * 3
LENGTHS = st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2**31 - 1)), min_size=1, max_size=60)


def class_of(length: int) -> int:
    return int(class_of_bits(np.array([length], np.float64).view(np.int64)[0]))


def look_at(lengths: np.ndarray, block: int) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    sums = np.empty(-(-len(lengths) // block), np.int64)
    return sums, look(lengths, block, sums)


@settings(max_examples=MANY)
@given(LENGTHS, st.integers(1, 9), st.sampled_from([np.int32, np.int64]))
def test_a_look_tells_total_shortest_longest_and_the_tokens_of_blocks(lengths: list[int], block: int, dtype: type) -> None:
    sums, (total, shortest, longest, mixed) = look_at(np.array(lengths, dtype), block)
    assert (total, shortest, longest) == (sum(lengths), min(lengths), max(lengths))
    assert sums.tolist() == [sum(lengths[i : i + block]) for i in range(0, len(lengths), block)]
    assert mixed == look_at(np.array(lengths, np.int64), 1)[1][3]


@settings(max_examples=MANY)
@given(LENGTHS, st.integers(0, 10**6))
def test_another_length_or_order_has_another_hash(lengths: list[int], at: int) -> None:
    lengths = [1, *lengths]
    hashes, i = [], 1 + at % (len(lengths) - 1)
    for changed in (lengths, [*lengths[:i], lengths[i] + 1, *lengths[i + 1 :]], [*lengths, 0]):
        hashes.append(look_at(np.array(changed, np.int64), 4)[1][3])
    assert len(set(hashes)) == 3
    if lengths[::-1] != lengths:
        assert look_at(np.array(lengths[::-1], np.int64), 4)[1][3] != hashes[0]


@pytest.mark.parametrize(
    ("lengths", "others"),
    [
        ([1], [2]),
        ([1, 5, 5], [2, 5, 5]),
        ([5] * 5, [6, 5, 3, 5, 6]),
        ([9] * 8, [10, 9, 8, 9, 8, 9, 10, 9]),
    ],
)
def test_changes_that_cancel_in_a_sum_have_another_hash(lengths: list[int], others: list[int]) -> None:
    assert look_at(np.array(lengths), 4)[1][3] != look_at(np.array(others), 4)[1][3]


def test_an_epoch_may_have_more_tokens_than_32_bits_count() -> None:
    sums, (total, _, longest, _) = look_at(np.full(5, 2**31 - 1, np.int32), 2)
    assert (total, longest) == (5 * (2**31 - 1), 2**31 - 1)
    assert sums.tolist() == [2 * (2**31 - 1), 2 * (2**31 - 1), 2**31 - 1]
    assert look_at(np.full(3, 2**45), 3)[1][0] == 3 * 2**45


@pytest.mark.parametrize("longest", [0, 1, 2, 31, 32, 33, 63, 64, 65, 1000, 5000])
def test_the_classes_of_all_lengths_and_the_longest_of_each(longest: int) -> None:
    table, top = class_table(longest)
    assert table.tolist() == [class_of(length) for length in range(longest + 1)]
    assert len(top) == table[longest] + 1
    for c in set(table.tolist()):
        assert top[c] == np.flatnonzero(table == c).max()


@settings(max_examples=MANY)
@given(st.integers(1, 2**47), st.integers(0, 2**47))
def test_a_class_is_narrower_than_a_thirty_second(longest: int, length: int) -> None:
    length = min(length, longest)
    table, top = class_table(longest)
    own = class_of(length)
    assert len(table) == min(longest, 65_535) + 1
    assert length <= top[own] <= max(length * (1 + 1 / 32), length)
    assert class_of(int(top[own])) == own
    assert class_of(length + 1) - own in (0, 1) or length < 32
    assert (class_of(0), class_of(1)) == (0, 1)


@settings(max_examples=MANY)
@given(LENGTHS, st.integers(1, 9), st.lists(st.integers(0, 60), max_size=3), st.integers(0, 99))
def test_pools_are_gathered_and_counted_by_class(lengths: list[int], block: int, cuts: list[int], seed: int) -> None:
    sizes = np.array(lengths, np.int32)
    order = np.random.default_rng(seed).permutation(-(-len(sizes) // block)).astype(np.uint32)
    bounds = np.array([0, *sorted(min(cut, len(order)) for cut in cuts), len(order)])
    table, top = class_table(max(lengths))
    tokens, counts = np.empty((len(bounds) - 1, len(top)), np.int64), np.empty(len(bounds) - 1, np.int64)
    tokens_by_class(sizes, order, bounds, block, table, tokens, counts)
    assert add_up(np.bincount(np.arange(len(sizes)) // block, sizes).astype(np.int64), order)[-1] == tokens.sum() == sum(lengths)
    seen = []
    for pool, (first, last) in enumerate(itertools.pairwise(bounds)):
        samples, own = np.empty((last - first) * block, np.int64), np.empty((last - first) * block, np.int64)
        taken = gather_pool(sizes, order, first, last, block, samples, own)
        wanted = [i for b in order[first:last].tolist() for i in range(b * block, min(b * block + block, len(sizes)))]
        assert samples[:taken].tolist() == wanted
        assert own[:taken].tolist() == sizes[wanted].tolist()
        assert counts[pool] == taken
        assert tokens[pool].tolist() == np.bincount([class_of(lengths[i]) for i in wanted], sizes[wanted], len(top)).tolist()
        seen += wanted
    assert sorted(seen) == list(range(len(sizes)))


@settings(max_examples=MANY)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([3, 60, 2000, 10**5, 2**40]))
def test_no_packed_bin_holds_more_than_the_bound(seed: int, num_bins: int, longest: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(rng, KINDS[seed % len(KINDS)], int(rng.integers(1, 300)), longest).astype(np.int64)
    table, top = class_table(int(lengths.max()))
    tokens, counts = np.empty((1, len(top)), np.int64), np.empty(1, np.int64)
    tokens_by_class(lengths, np.arange(len(lengths), dtype=np.uint32), np.array([0, len(lengths)]), 1, table, tokens, counts)
    bound = fullest_bin(tokens[0], top, num_bins)
    fullest = np.bincount(_pack(lengths, num_bins, NO_CAP, NO_CAP), lengths).max()
    assert fullest <= bound
    assert bound <= lengths.sum() / num_bins + lengths.max()
