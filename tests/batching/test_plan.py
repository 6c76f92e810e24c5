"""The planned epoch keeps its promises over many worlds, and on the small cases that broke others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching.plan import EpochPlan, plan_epoch

COSTS = [(1.0, 0.0, 0.0), (1.0, 0.01, 0.0), (0.0, 1.0, 3.0), (0.0, 0.0, 1.0)]


def everything(plan: EpochPlan) -> list[int]:
    dealt = [plan.samples(step, rank) for step in range(plan.num_steps) for rank in range(plan.world_size)]
    return sorted(np.concatenate([*dealt, np.zeros(0, np.int64)]).tolist())


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, object]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, longest = draw(st.integers(0, 300)), draw(st.integers(0, 60))
    kind = draw(st.sampled_from(["uniform", "zipf", "zero", "equal", "one giant"]))
    lengths = rng.integers(0, longest + 1, n)
    if kind == "zipf":
        lengths = np.minimum(np.minimum(rng.zipf(1.2, n), 10**6) - 1, longest)
    elif kind == "zero":
        lengths = np.where(rng.random(n) < 0.8, 0, lengths)
    elif kind == "equal":
        lengths = np.full(n, longest)
    elif kind == "one giant" and n:
        lengths = np.ones(n, np.int64)
        lengths[rng.integers(n)] = max(longest, 1)
    return {
        "lengths": lengths.astype(draw(st.sampled_from([np.int64, np.int32, np.uint16]))),
        "world_size": draw(st.integers(1, 9)),
        "budget": max(1, int(lengths.max(initial=0))) + draw(st.integers(0, 200)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 5)),
        "shuffle": draw(st.booleans()),
        "cost": draw(st.sampled_from(COSTS)),
        "bucket_steps": draw(st.sampled_from([1, 1, 2, 5])),
    }


@settings(max_examples=300, deadline=None)
@given(worlds(), st.one_of(st.none(), st.integers(1, 12)))
def test_every_sample_once_under_both_caps_in_equal_steps(world: dict[str, object], max_samples: int | None) -> None:
    lengths, budget, W = world.pop("lengths"), world.pop("budget"), world["world_size"]
    plan = plan_epoch(lengths, max_tokens=budget, max_samples=max_samples, **world)
    assert everything(plan) == list(range(len(lengths)))
    total = 0
    for step in range(plan.num_steps):
        parts = [plan.samples(step, rank) for rank in range(W)]
        assert sorted(np.concatenate(parts)) == sorted(plan.step_samples(step))
        assert len(plan.step_samples(step)) > 0
        assert all(part.dtype == np.int64 for part in parts)
        tokens = [int(lengths[part].sum()) for part in parts]
        assert max(tokens) <= budget
        assert max(len(part) for part in parts) <= (max_samples or budget)
        assert [plan.tokens(step, rank) for rank in range(W)] == tokens == plan.rank_tokens(step).tolist()
        assert plan.step_tokens(step) == sum(tokens)
        assert plan.imbalance(step) == pytest.approx(plan.imbalances()[step])
        total += sum(tokens)
    assert total == plan.num_tokens == plan.summary()["num_tokens"]
    again = plan_epoch(lengths, max_tokens=budget, max_samples=max_samples, **world)
    assert all(np.array_equal(plan.samples(s, r), again.samples(s, r)) for s in range(plan.num_steps) for r in range(W))


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_global_steps_do_not_depend_on_the_world_size(world: dict[str, object]) -> None:
    lengths, budget, W = world.pop("lengths"), world.pop("budget"), world.pop("world_size")
    one = plan_epoch(lengths, world_size=1, global_tokens=budget, **world)
    many = plan_epoch(lengths, world_size=W, global_tokens=budget, **world)
    assert everything(many) == list(range(len(lengths)))
    assert one.num_steps == many.num_steps
    values = np.random.default_rng(0).random(len(lengths))
    assert one.step_sums(values).tobytes() == many.step_sums(values).tobytes()
    for step in range(one.num_steps):
        assert np.array_equal(one.step_samples(step), many.step_samples(step))
        assert many.step_tokens(step) <= budget
        assert len(many.step_samples(step)) <= budget


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_cost_is_balanced_to_the_dearest_sample_where_no_cap_binds(world: dict[str, object]) -> None:
    lengths, budget, W = world.pop("lengths"), world.pop("budget"), world["world_size"]
    plan = plan_epoch(lengths, global_tokens=2 * budget, **world)
    a, b, c = plan.cost
    for step in range(plan.num_steps):
        costs = plan.rank_costs(step)
        sizes = lengths[plan.step_samples(step)].astype(np.float64)
        dearest = (a * sizes + b * sizes**2 + c).max()
        assert costs.max() <= costs.mean() + (1 - 1 / W) * dearest + 1e-6


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(20, 400))
def test_steps_have_about_equal_tokens_the_last_one_too(seed: int, world_size: int, num_per_rank: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 30, 10 * world_size * num_per_rank)
    plan = plan_epoch(lengths, world_size=world_size, max_tokens=15 * num_per_rank, seed=seed)
    tokens = plan.step_sums(lengths)
    assert tokens.min() >= 0.9 * tokens.mean()
    assert plan.num_steps <= -(-int(lengths.sum()) // (world_size * 15 * num_per_rank)) + 1


def test_rare_batch_counts_are_the_same_on_both_ranks_in_every_order() -> None:
    sizes = [9, 9, 9, 1, 1, 1]
    for order in itertools.permutations(range(6)):
        plan = plan_epoch([sizes[i] for i in order], world_size=2, max_tokens=9, shuffle=False)
        assert plan.num_steps == 2
        assert everything(plan) == list(range(6))
    for seed in range(50):
        assert plan_epoch(sizes, world_size=2, max_tokens=9, seed=seed).num_steps == 2


@pytest.mark.parametrize("lengths", [[50, 3, 3, 2, 2], [3, 3, 50, 2, 2], [3, 3, 2, 2, 50]])
@pytest.mark.parametrize("budget", [{"max_tokens": 10}, {"global_tokens": 10}, {"max_tokens": 1}, {"max_tokens": 60, "global_tokens": 10}])
def test_a_sample_above_the_budget_is_named_with_its_length(lengths: list[int], budget: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"sample {lengths.index(50)} has length 50"):
        plan_epoch(lengths, world_size=2, **budget)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "No token budget"),
        ({"max_tokens": None, "global_tokens": 0}, "global_tokens"),
        ({"max_samples": 0}, "max_samples"),
        ({"bucket_steps": 0}, "bucket_steps"),
        ({"world_size": 0}, "world_size"),
        ({"cost": (1.0, -1.0, 0.0)}, "cost is negative"),
        ({"lengths": [3, -1]}, "sample 1"),
        ({"lengths": [[3], [1]]}, "no list"),
    ],
)
def test_senseless_budgets_and_lengths_are_refused(change: dict[str, object], says: str) -> None:
    arguments = {"lengths": [3, 1], "world_size": 2, "max_tokens": 10, **change}
    with pytest.raises(ValueError, match=says) as caught:
        plan_epoch(arguments.pop("lengths"), **arguments)
    assert all(part in str(caught.value) for part in ("got:", "wanted:", "where:", "to do:"))


def test_a_global_step_that_no_rank_can_hold_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match="step 0"):
        plan_epoch([5, 5, 5], world_size=2, global_tokens=15, max_tokens=5)
    assert plan_epoch([5, 5, 5], world_size=3, global_tokens=15, max_tokens=5).num_steps == 1


def test_no_samples_give_no_steps() -> None:
    for budget in ({"max_tokens": 5}, {"global_tokens": 5}):
        plan = plan_epoch([], world_size=3, **budget)
        assert plan.num_steps == 0
        assert plan.summary()["num_steps"] == 0
        assert plan.step_sums([]).shape == (0,)


def test_fewer_samples_than_ranks_leave_ranks_for_dummies() -> None:
    plan = plan_epoch([3, 4], world_size=4, max_tokens=10)
    assert plan.num_steps == 1
    assert sorted(len(plan.samples(0, rank)) for rank in range(4)) == [0, 0, 1, 1]
    assert plan.summary()["num_dummies"] == 2
    with pytest.raises(IndexError, match="rank 4"):
        plan.samples(0, 4)
    with pytest.raises(IndexError, match="step 1"):
        plan.samples(1, 0)


def test_the_one_long_sample_is_seen_in_every_epoch() -> None:
    for epoch, bucket_steps in itertools.product(range(10), (1, 3)):
        plan = plan_epoch([1] * 8 + [100], world_size=2, max_tokens=100, max_samples=4, epoch=epoch, bucket_steps=bucket_steps)
        assert everything(plan) == list(range(9))


def test_empty_histories_do_not_pile_up() -> None:
    plan = plan_epoch(np.zeros(1000, np.int64), world_size=4, max_tokens=8)
    assert max(plan.rank_samples(step).max() for step in range(plan.num_steps)) <= 8
    mixed = plan_epoch([40, 30, 20, 10] + [0] * 40, world_size=4, max_tokens=40)
    assert mixed.num_steps == 1
    assert mixed.rank_samples(0).tolist() == [11] * 4


@pytest.mark.parametrize("bucket_steps", [1, 4])
def test_another_epoch_or_seed_has_another_order(bucket_steps: int) -> None:
    lengths = np.arange(200) % 17
    first = [
        plan_epoch(lengths, world_size=2, max_tokens=40, bucket_steps=bucket_steps, seed=s, epoch=e) for s, e in [(0, 0), (0, 1), (1, 0)]
    ]
    orders = {tuple(plan.step_samples(0).tolist()) for plan in first}
    assert len(orders) == 3


def test_buckets_put_like_lengths_into_one_step() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 4000)

    def padding(bucket_steps: int) -> float:
        plan = plan_epoch(lengths, world_size=1, max_tokens=1000, bucket_steps=bucket_steps)
        steps = [lengths[plan.step_samples(step)] for step in range(plan.num_steps)]
        return 1 - lengths.sum() / sum(len(step) * step.max() for step in steps)

    assert padding(1) > 0.4
    assert padding(8) < 0.15


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_attention_cost_is_within_half_a_percent_at_many_samples_a_rank(world_size: int) -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(2.7, 1.26, 150 * world_size * 12), 200).astype(np.int64)
    plan = plan_epoch(lengths, world_size=world_size, max_tokens=4096, cost=(1.0, 1 / 512, 0.0))
    assert plan.imbalances().mean() < 1.005
