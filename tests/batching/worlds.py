"""Random worlds for the tests of the plan: lengths of many shapes, ranks, budgets, costs, seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from distrag.batching.plan import EpochPlan, plan_epoch

COSTS = [(1.0, 0.0, 0.0), (1.0, 0.01, 0.0), (0.0, 1.0, 3.0), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0)]
KINDS = ["uniform", "zipf", "lognormal", "zero", "all zero", "equal", "one giant", "two kinds"]


@dataclass(frozen=True)
class Plannable:
    """One world: what is planned and by which options."""

    lengths: np.ndarray
    budget: int
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, **changes: Any) -> EpochPlan:
        """Returns the plan under `max_tokens`, unless `changes` say otherwise."""
        return plan_epoch(**{"lengths": self.lengths, "max_tokens": self.budget, **self.options, **changes})

    def plan_global(self, **changes: Any) -> EpochPlan:
        """Returns the plan under `global_tokens`, without caps of a rank."""
        return self.plan(**{"max_tokens": None, "max_samples": None, "global_tokens": self.budget, **changes})


def draw_lengths(rng: np.random.Generator, kind: str, n: int, longest: int) -> np.ndarray:
    if kind == "zipf":
        return np.minimum(np.minimum(rng.zipf(1.2, n), 10**6) - 1, longest)
    if kind == "lognormal":
        return np.minimum(rng.lognormal(2, 1, n), longest).astype(np.int64)
    if kind == "equal":
        return np.full(n, longest)
    if kind == "all zero":
        return np.zeros(n, np.int64)
    if kind == "one giant":
        lengths = np.ones(n, np.int64)
        lengths[rng.integers(0, n, min(n, 1))] = max(longest, 1)
        return lengths
    lengths = rng.integers(0, longest + 1, n)
    if kind == "zero":
        return np.where(rng.random(n) < 0.8, 0, lengths)
    return np.where(rng.random(n) < 0.5, 1, longest) if kind == "two kinds" else lengths


@st.composite
def worlds(draw: st.DrawFn, most: int = 300) -> Plannable:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, longest = draw(st.integers(0, most)), draw(st.integers(0, 60))
    lengths = draw_lengths(rng, draw(st.sampled_from(KINDS)), n, longest)
    options = {
        "world_size": draw(st.integers(1, 9)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 5)),
        "shuffle": draw(st.booleans()),
        "cost": draw(st.sampled_from(COSTS)),
        "bucket_steps": draw(st.sampled_from([1, 1, 2, 5])),
        "max_samples": draw(st.one_of(st.none(), st.integers(1, 12))),
        # Small pools make many of them out of few samples.
        "pool_samples": draw(st.sampled_from([1 << 17, 8, 32])),
    }
    slack = draw(st.one_of(st.integers(0, 200), st.integers(500, 5000)))
    return Plannable(
        lengths.astype(draw(st.sampled_from([np.int64, np.int32, np.uint16]))), max(1, int(lengths.max(initial=0))) + slack, options
    )


def everything(plan: EpochPlan) -> list[int]:
    """Returns the samples of all ranks and steps, sorted."""
    dealt = [plan.samples(step, rank) for step in range(plan.first_step, plan.num_steps) for rank in range(plan.world_size)]
    return sorted(np.concatenate([*dealt, np.zeros(0, np.int64)]).tolist())


def steps_of(plan: EpochPlan) -> list[list[list[int]]]:
    """Returns the samples of each rank in each step."""
    return [[plan.samples(step, rank).tolist() for rank in range(plan.world_size)] for step in range(plan.first_step, plan.num_steps)]
