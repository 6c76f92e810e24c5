"""Negatives are legal, uniform, and the same wherever they are drawn."""

from __future__ import annotations

import numpy as np
import pytest

from distrag.batching.negatives import position_negatives, shared_negatives


def draw(
    history: list[int], *, num_rows: int, n: int = 1, sample: int = 0, seed: int = 0, epoch: int = 0, met: int | None = None
) -> np.ndarray:
    """Draws for one row whose last event is the next item; `sample` is its number among equal rows."""
    items = np.array(history * (sample + 1), np.uint8)
    first = np.arange(sample + 1) * len(history)
    end = first + len(history) - 1
    out = np.full((len(history) - 1) * n, -1)
    position_negatives(items, first, end, end, first, np.array([sample]), n, num_rows, seed, epoch, out)
    return out.reshape(-1, n)


def test_only_the_item_never_met_is_drawn() -> None:
    assert (draw([1, 2, 3], num_rows=5, n=1000) == 4).all()
    assert (draw([2, 4, 0, 2, 3], num_rows=5, n=1000) == 1).all()


def test_a_user_who_met_everything_gets_uniform_draws_over_the_catalogue() -> None:
    got = draw([1, 2, 3, 4], num_rows=5, n=1000)
    assert set(got.ravel()) == {1, 2, 3, 4}


def test_a_catalogue_with_gaps_in_its_raw_ids_gives_only_rows_that_exist() -> None:
    raw = np.array([1, 7, 9])  # vocabulary: row i + 1 is raw id i
    assert set(raw[draw([1, 1], num_rows=4, n=1000).ravel() - 1]) == {7, 9}


def test_the_next_item_and_events_before_the_window_count_as_met() -> None:
    items = np.array([1, 2, 3, 4, 5], np.uint16)
    out = np.empty(1000, np.int64)
    position_negatives(items, np.array([3]), np.array([4]), np.array([4]), np.array([0]), np.array([0]), 1000, 8, 0, 0, out)
    assert set(out) == {6, 7}


def test_draws_are_uniform_over_the_free_rows() -> None:
    got = draw([3, 5, 5, 9, 1], num_rows=11, n=20_000).ravel()
    counts = np.bincount(got, minlength=11)
    free = [2, 4, 6, 7, 8, 10]
    assert counts[free].sum() == len(got)
    expected = len(got) / len(free)
    assert ((counts[free] - expected) ** 2 / expected).sum() < 20.5  # chi-square with 5 degrees of freedom, p = 0.001


def test_draws_depend_on_seed_epoch_sample_position_and_number_and_on_nothing_else() -> None:
    first = draw([1, 2, 3], num_rows=200, n=50)
    assert np.array_equal(first, draw([1, 2, 3], num_rows=200, n=50))
    assert np.array_equal(first[:, :10], draw([1, 2, 3], num_rows=200, n=10))
    assert not np.array_equal(first[0], first[1])
    for change in ({"seed": 1}, {"epoch": 1}, {"sample": 1}):
        assert (draw([1, 2, 3], num_rows=200, n=50, **change) != first).mean() > 0.9


def test_a_batch_draws_what_its_samples_draw_alone() -> None:
    items = np.arange(1, 21, dtype=np.uint8)
    first = np.array([0, 5, 12])
    end = np.array([4, 11, 19])
    arrays = (items, first, end, end, first)
    together = np.empty(int((end - first).sum()) * 3, np.int64)
    position_negatives(*arrays, np.array([2, 0, 1]), 3, 100, 7, 3, together)
    alone = []
    for sample in (2, 0, 1):
        out = np.empty(int(end[sample] - first[sample]) * 3, np.int64)
        position_negatives(*arrays, np.array([sample]), 3, 100, 7, 3, out)
        alone.append(out)
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"step": 1}])
def test_shared_draws_follow_the_step(change: dict[str, int]) -> None:
    def shared(seed: int = 0, epoch: int = 0, step: int = 0) -> np.ndarray:
        out = np.empty(5000, np.int64)
        shared_negatives(101, seed, epoch, step, out)
        return out

    first = shared()
    assert np.array_equal(first, shared())
    assert (shared(**change) != first).mean() > 0.9
    counts = np.bincount(first, minlength=101)
    assert counts[0] == 0
    assert ((counts[1:] - 50) ** 2 / 50).sum() < 149  # chi-square with 99 degrees of freedom, p = 0.001
