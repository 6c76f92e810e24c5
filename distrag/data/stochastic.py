"""The law of stochastic length: how far the tail of long histories must thin out for a given mean cost.

A history of length L is cut to `min(L, max(1, floor(tau / sqrt(u))))` with u uniform in (0, 1], so at least k events stay with probability
`(tau / k)^2` and all of them with `(tau / L)^2`; up to tau nothing is cut.

Source: Zhai et al., Actions Speak Louder than Words (ICML 2024), stochastic length. There a history keeps all of its events with that
probability and tau of them otherwise; here the lengths between are met too, and tau is found from the cost instead of being set.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from distrag.problem import problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

Cost: TypeAlias = tuple[float, float, float]
"""`(a, b, c)`: a history of length L costs `a*L + b*L^2 + c`."""


def expected_cost(counts: NDArray[np.int64], cost: Cost, tau: float) -> float:
    """Returns the expected cost of all histories together, the law being discrete and the sum exact.

    Args:
        counts: histories of each length, int64 `[max_len+1]`.
        cost: `(a, b, c)`.
        tau: longest length that is never cut; infinity cuts nothing.
    """
    k = np.arange(1, len(counts))
    kept = np.minimum(1.0, tau / k) ** 2
    kept[:1] = 1.0  # one event always stays
    return _fixed(counts, cost) + float((_marginal(counts, cost) * kept).sum())


def least_share(counts: NDArray[np.int64], cost: Cost) -> float:
    """Returns the lowest mean cost that cutting can reach, one event of each history, as a share of the cost without; 1 where all is 0."""
    whole = expected_cost(counts, cost, math.inf)
    return expected_cost(counts, cost, 0.0) / whole if whole else 1.0


def solve_tau(counts: NDArray[np.int64], cost: Cost, share: float) -> float:
    """Returns the tau at which histories cost `share` of what they cost whole, on average.

    For tau between m and m + 1 the expected cost is that of the first m events of each history, whole, and `tau^2` times the sum over
    k > m of what the k-th events cost over `k^2`: m is looked up and tau follows, without a search. Sums run from one end to the other,
    so that all machines agree in every bit.

    Args:
        counts: histories of each length, int64 `[max_len+1]`.
        cost: `(a, b, c)`, none negative.
        share: wanted mean cost over the mean cost without this cut, in (0, 1].

    Raises:
        ValueError: one event of each history costs more than that.
    """
    assert min(cost) >= 0, "a cost never falls with the length"
    adds, k = _marginal(counts, cost), np.arange(1.0, len(counts))
    below = _fixed(counts, cost) + np.cumsum(adds)
    above = np.append(np.cumsum((adds / k**2)[::-1])[::-1], 0.0)  # above[m]: over the lengths from m + 1 on
    target = share * below[-1]
    if share >= 1 or below[-1] == 0:
        return math.inf
    if target < below[0] * (1 - 1e-12):  # the lowest share itself is reachable, however it was rounded
        raise _unreachable(share, float(below[0] / below[-1]))
    m = int(np.searchsorted(below + k**2 * above[1:], target, side="right"))
    left, thinned = target - below[max(m, 1) - 1], above[max(m, 1)]  # the first event of a history is never thinned
    return math.sqrt(max(0.0, float(left / thinned))) if thinned > 0 else float(m)


def _marginal(counts: NDArray[np.int64], cost: Cost) -> NDArray[np.float64]:
    """Returns what the k-th event of all histories that have one adds to the cost, float64 `[max_len]`, k from 1 on."""
    a, b, _ = cost
    longer = np.cumsum(counts[::-1])[::-1][1:]  # histories of at least k events
    added: NDArray[np.float64] = longer * (a + b * (2.0 * np.arange(1, len(counts)) - 1.0))
    return added


def _fixed(counts: NDArray[np.int64], cost: Cost) -> float:
    return cost[2] * int(counts.sum())


def _unreachable(share: float, least: float) -> ValueError:
    if least >= 1:
        todo = "set --data.truncate=newest, or --data.mean_cost_share=1"
        return problem(
            "No history can be cut", got=share, wanted="histories of more than one event", where="data.mean_cost_share", todo=todo
        )
    reachable = math.ceil(least * 1e4) / 1e4
    return problem(
        "Histories cannot be cut to so low a mean cost",
        got=share,
        wanted=f"at least {reachable:g}, which leaves one event of each history",
        where="data.mean_cost_share",
        todo=f"set --data.mean_cost_share to {reachable:g} or more, or --data.truncate=newest",
    )
