"""The law of stochastic length: what is drawn follows it, and costs on average what was asked for."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrag.data.stochastic import Cost, expected_cost, least_share, solve_tau
from distrag.data.windows import View, count_lengths, cut, find_tau

COSTS: list[Cost] = [(1, 0, 0), (0, 1, 0), (1536, 2, 0), (3.0e6, 1024.0, 5.0e6)]


def whole(lengths: np.ndarray) -> View:
    end = np.cumsum(lengths).astype(np.int64)
    return View(np.arange(len(lengths)), end - lengths, end, np.full(len(lengths), -1), end - lengths, 0)


def lengths_of(name: str, size: int, seed: int = 0) -> tuple[np.ndarray, int]:
    random = np.random.default_rng(seed)
    if name == "zipf":
        return np.minimum(2 * random.zipf(1.2, size).astype(np.float64), 8190).astype(np.int64), 8190
    return np.clip(random.lognormal(5.5, 1.2, size), 0, 20_000).astype(np.int64), 4096


def costs(view: View, cost: Cost) -> np.ndarray:
    length = view.lengths.astype(np.float64)
    found: np.ndarray = cost[0] * length + cost[1] * length**2 + cost[2]
    return found


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("name", ["lognormal", "zipf"])
def test_the_mean_cost_is_the_share_that_was_asked_for(name: str, cost: Cost, share: float) -> None:
    lengths, max_len = lengths_of(name, 40_000)
    view = whole(lengths)
    counts = count_lengths(view, max_len)
    tau = find_tau(view, max_len, cost, share)
    full = costs(cut(view, "newest", max_len), cost)
    assert expected_cost(counts, cost, math.inf) == pytest.approx(full.sum(), rel=1e-12)
    assert expected_cost(counts, cost, tau) / full.sum() == pytest.approx(share, rel=1e-9)
    drawn = np.stack([costs(cut(view, "stochastic", max_len, seed=2, tau=tau).at_epoch(epoch), cost) for epoch in range(5)])
    error = math.sqrt(drawn.var(axis=0, ddof=1).sum()) / math.sqrt(5)  # of the epochs' mean sum, from how each history varies
    assert abs(drawn.sum(axis=1).mean() - share * full.sum()) < 4 * error
    assert drawn.mean() / full.mean() == pytest.approx(share, rel=0.03)


def test_a_history_keeps_k_events_with_the_probability_of_the_law() -> None:
    n, tau = 200_000, 7.3
    view = cut(whole(np.full(n, 60)), "stochastic", 40, seed=5, tau=tau)
    for epoch in (0, 9):
        drawn = view.at_epoch(epoch).lengths
        assert drawn.min() == 7
        for k in (8, 10, 20, 39, 40):
            p = (tau / k) ** 2
            assert abs((drawn >= k).mean() - p) < 4.5 * math.sqrt(p * (1 - p) / n)
    assert (view.lengths == 40).mean() == pytest.approx((tau / 40) ** 2, rel=0.05)


def test_draws_of_two_epochs_and_of_neighbours_are_independent() -> None:
    view = cut(whole(np.full(100_000, 50)), "stochastic", 40, seed=5, tau=5.0)
    whole_in = [(view.at_epoch(epoch).lengths > 8).astype(float) for epoch in (0, 1)]
    for a, b in ((whole_in[0], whole_in[1]), (whole_in[0][1:], whole_in[0][:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / math.sqrt(len(a))


def enumerated(counts: np.ndarray, cost: Cost, tau: float) -> float:
    """The expected cost from the probability of each length, summed as it is written down."""
    total = 0.0
    for length, count in enumerate(counts.tolist()):
        at_least = [1.0 if k <= 1 else min(1.0, (tau / k) ** 2) for k in range(length + 1)] + [0.0]
        for k in range(min(length, 1), length + 1):
            total += count * (at_least[k] - at_least[k + 1]) * (cost[0] * k + cost[1] * k * k + cost[2])
    return total


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=12),
    st.sampled_from([*COSTS, (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)]),
    st.floats(0, 15),
    st.floats(0.001, 1),
)
def test_the_expected_cost_is_that_of_the_discrete_law_and_tau_inverts_it(some: list[int], cost: Cost, tau: float, share: float) -> None:
    counts = np.array(some)
    assert expected_cost(counts, cost, tau) == pytest.approx(enumerated(counts, cost, tau), rel=1e-9, abs=1e-9)
    full, least = expected_cost(counts, cost, math.inf), least_share(counts, cost)
    if full and share < least * (1 - 1e-9):
        with pytest.raises(ValueError, match=r"so low a mean cost|No history can be cut"):
            solve_tau(counts, cost, share)
    else:
        share = max(share, least)
        found = solve_tau(counts, cost, share)
        assert expected_cost(counts, cost, found) == pytest.approx(share * full, rel=1e-9)


def test_more_may_be_cut_for_less_cost() -> None:
    lengths, max_len = lengths_of("lognormal", 5000)
    counts = count_lengths(whole(lengths), max_len)
    taus = [solve_tau(counts, (1, 0.01, 0), share) for share in (0.01, 0.1, 0.5, 0.9, 0.999)]
    assert all(a < b for a, b in itertools.pairwise(taus))
    assert solve_tau(counts, (1, 0.01, 0), 1.0) == math.inf


def test_histories_of_no_and_of_one_event_are_left_alone() -> None:
    view = cut(whole(np.array([0, 1, 0, 1, 40])), "stochastic", 30, seed=1, tau=0.0)
    for epoch in range(5):
        assert view.at_epoch(epoch).lengths.tolist() == [0, 1, 0, 1, 1]
    for lengths in ([1, 1, 0], [1]):
        with pytest.raises(ValueError, match=r"No history can be cut(.|\n)*truncate=newest"):
            find_tau(whole(np.array(lengths)), 30, (1, 1, 0), 0.5)
    for lengths in ([0, 0], []):
        nothing = whole(np.array(lengths, np.int64))
        assert find_tau(nothing, 30, (1, 1, 0), 0.5) == math.inf, "there is nothing to save"
        assert cut(nothing, "stochastic", 30, tau=3.0).at_epoch(2).lengths.tolist() == lengths
