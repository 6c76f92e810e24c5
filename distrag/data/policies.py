"""What each way to cut histories keeps of a store, and what the kept events cost, before anything is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from distrag.data.stochastic import Cost, expected_cost, least_share, solve_tau
from distrag.data.windows import DRAWN, POLICIES, Truncate

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEAN_COST_SHARE = 0.5
_LINEAR: Cost = (1.0, 0.0, 0.0)
_QUADRATIC: Cost = (0.0, 1.0, 0.0)


@dataclass(frozen=True)
class PolicyCut:
    """What a `data.truncate` keeps of whole rows; for `stochastic` as expected over the epochs.

    Attributes:
        truncate: the policy.
        cost: which part of the cost `stochastic` halves: `L` (pooling, GRU) or `L^2` (attention over long histories); others have none.
        tau: its longest history that is never cut; None for the others.
        num_kept: positions kept.
        num_cut: positions left out.
        share_cut: of all positions.
        linear_share: mean L of a history over that of `newest`: the a*L part of the cost.
        quadratic_share: mean L^2 over that of `newest`: the b*L^2 part.
        draws: whether every epoch cuts anew; valid and test then show the newest events.
    """

    truncate: Truncate
    cost: str | None
    tau: float | None
    num_kept: float
    num_cut: float
    share_cut: float
    linear_share: float
    quadratic_share: float
    draws: bool


def policy_cuts(lengths: NDArray[np.int64], max_len: int) -> tuple[PolicyCut, ...]:
    """Returns what each policy keeps at `max_len`; `stochastic` twice, once for each part of the cost.

    Its mean cost is half of that of `newest`, or the lowest that can be reached where that is more.

    Args:
        lengths: int64 `[N]`, of whole rows.
        max_len: longest history.
    """
    counts = np.bincount(np.minimum(lengths, max_len), minlength=max_len + 1)
    total = int(lengths.sum())
    fixed = [_policy_cut(policy, counts, total, None, math.inf) for policy in POLICIES if policy != "stochastic"]
    drawn = []
    for name, cost in (("L", _LINEAR), ("L^2", _QUADRATIC)):
        tau = solve_tau(counts, cost, max(MEAN_COST_SHARE, least_share(counts, cost)))
        drawn.append(_policy_cut("stochastic", counts, total, name, tau))
    return (*fixed, *drawn)


def _policy_cut(truncate: Truncate, counts: NDArray[np.int64], total: int, cost: str | None, tau: float) -> PolicyCut:
    shares = []
    for part in (_LINEAR, _QUADRATIC):
        whole = expected_cost(counts, part, math.inf)
        shares.append(expected_cost(counts, part, tau) / whole if whole else 1.0)
    kept = expected_cost(counts, _LINEAR, tau)
    found = tau if math.isfinite(tau) else None
    return PolicyCut(truncate, cost, found, kept, total - kept, (total - kept) / max(total, 1), shares[0], shares[1], truncate in DRAWN)
