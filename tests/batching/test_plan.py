"""The planned epoch keeps its promises over many worlds, and on the small cases that broke others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching import layout
from distrag.batching.plan import plan_epoch
from tests.batching.worlds import Plannable, draw_lengths, everything, steps_of, worlds

MANY = settings.default.max_examples * 20  # 2,000, or fewer in a profile that has few


@pytest.fixture(autouse=True, scope="module")
def _few_blocks() -> object:
    """Blocks of several samples from a few hundred samples on, as with millions."""
    old, layout.MAX_BLOCKS = layout.MAX_BLOCKS, 150
    yield
    layout.MAX_BLOCKS = old


@settings(max_examples=MANY, deadline=None)
@given(worlds())
def test_every_sample_once_under_both_caps_in_steps_that_all_ranks_have(world: Plannable) -> None:
    plan, lengths, W = world.plan(), world.lengths, world.options["world_size"]
    assert everything(plan) == list(range(len(lengths)))
    total = 0
    for step in range(plan.num_steps):
        parts = [plan.samples(step, rank) for rank in range(W)]
        assert sorted(np.concatenate(parts)) == sorted(plan.step_samples(step))
        assert len(plan.step_samples(step)) > 0
        assert all(part.dtype == np.int64 for part in parts)
        tokens = [int(lengths[part].sum()) for part in parts]
        assert max(tokens) <= world.budget
        assert max(len(part) for part in parts) <= (world.options["max_samples"] or world.budget)
        assert tokens == plan.rank_tokens(step).tolist()
        assert plan.step_tokens(step) == sum(tokens)
        total += sum(tokens)
    assert total == plan.num_tokens
    assert world.plan().num_steps == plan.num_steps


@settings(max_examples=MANY // 5, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_any_step_comes_alike_however_it_is_reached(world: Plannable, order: int) -> None:
    plan = world.plan()
    walked = steps_of(plan)
    again = world.plan(lengths=world.lengths.astype(np.int64))
    assert again.fingerprint == plan.fingerprint
    for step in np.random.default_rng(order).permutation(plan.num_steps)[:10]:
        assert [again.samples(int(step), rank).tolist() for rank in range(plan.world_size)] == walked[step]


@settings(max_examples=MANY // 5, deadline=None)
@given(worlds())
def test_global_steps_do_not_depend_on_the_world_size_or_the_cost(world: Plannable) -> None:
    lengths, budget = world.lengths, world.budget
    one, many = world.plan_global(world_size=1, cost=(1.0, 0.0, 0.0)), world.plan_global()
    assert everything(many) == list(range(len(lengths)))
    assert one.num_steps == many.num_steps
    values = np.random.default_rng(0).random(len(lengths))
    for step in range(one.num_steps):
        assert np.array_equal(one.step_samples(step), many.step_samples(step))
        assert one.step_sum(step, values) == many.step_sum(step, values)
        assert many.step_tokens(step) <= budget
        assert 0 < len(many.step_samples(step)) <= budget


@settings(max_examples=MANY // 10, deadline=None)
@given(worlds())
def test_cost_is_balanced_to_the_dearest_sample_where_no_cap_binds(world: Plannable) -> None:
    plan = world.plan_global(global_tokens=2 * world.budget)
    a, b, c = plan.cost
    for step in range(plan.num_steps):
        costs = plan.rank_costs(step)
        sizes = world.lengths[plan.step_samples(step)].astype(np.float64)
        dearest = (a * sizes + b * sizes**2 + c).max()
        # Evened out in tokens as well, cost may come to lie as far from its mean as one sample of either is.
        longest = sizes.max() / max(sizes.sum() / plan.world_size, 1e-9)
        assert costs.max() <= costs.mean() + max(dearest, longest * costs.mean()) + 1e-6
        assert plan.imbalance(step) == pytest.approx(costs.max() / costs.mean() if costs.mean() > 0 else 1.0)


@settings(max_examples=MANY // 10, deadline=None)
@given(worlds(), st.integers(1, 40), st.integers(1, 9))
def test_the_rest_of_an_epoch_holds_exactly_what_its_steps_have_left(world: Plannable, done: int, other: int) -> None:
    plan = world.plan()
    done = min(done, plan.num_steps)
    used = [sample for step in range(done) for sample in plan.step_samples(step).tolist()]
    left = np.setdiff1d(np.arange(len(world.lengths)), used)
    rest = world.plan(world_size=other, samples=left, first_step=done)
    assert (rest.first_step, rest.num_samples, rest.fingerprint) == (done, len(left), plan.fingerprint)
    assert everything(rest) == left.tolist()
    assert all(rest.rank_tokens(step).max() <= world.budget for step in range(done, rest.num_steps))


@settings(max_examples=MANY // 20, deadline=None)
@given(worlds(most=200), st.integers(1, 30))
def test_more_steps_than_needed_can_be_asked_for(world: Plannable, more: int) -> None:
    fewest = world.plan().num_steps
    if fewest + more <= len(world.lengths):
        plan = world.plan(num_steps=fewest + more)
        assert plan.num_steps >= fewest + more
        assert everything(plan) == list(range(len(world.lengths)))


@settings(max_examples=MANY // 20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(20, 400), st.sampled_from([1 << 17, 2000]))
def test_steps_have_about_equal_tokens_and_cost_the_last_one_too(seed: int, world_size: int, num_per_rank: int, pool: int) -> None:
    lengths = np.random.default_rng(seed).integers(0, 30, 10 * world_size * num_per_rank)
    plan = plan_epoch(
        lengths, world_size=world_size, max_tokens=15 * num_per_rank, seed=seed, cost=(1.0, 0.05, 0.0), pool_samples=pool * world_size
    )
    tokens = np.array([plan.step_tokens(step) for step in range(plan.num_steps)])
    costs = np.array([plan.rank_costs(step).sum() for step in range(plan.num_steps)])
    assert tokens.min() >= 0.97 * tokens.mean()
    assert costs.max() <= 1.05 * costs.mean()
    assert plan.num_steps <= -(-int(lengths.sum()) // (world_size * 15 * num_per_rank)) * 1.04 + 1


@pytest.mark.parametrize("kind", ["zipf", "lognormal", "uniform"])
@pytest.mark.parametrize(("world_size", "per_rank"), [(2, 32), (8, 32), (8, 256), (64, 32)])
def test_ranks_are_balanced_to_a_fraction_of_a_percent_in_cost_and_tokens(kind: str, world_size: int, per_rank: int) -> None:
    lengths = 1 + draw_lengths(np.random.default_rng(3), kind, world_size * per_rank * 40, 200)
    plan = plan_epoch(
        lengths, world_size=world_size, max_tokens=int(1.02 * per_rank * lengths.mean()), cost=(1.0, 1 / 1536, 0.0), pool_samples=1 << 14
    )
    numbers = plan.summary()
    assert numbers["imbalance_mean"] <= (1.002 if per_rank == 256 else 1.01)
    assert numbers["token_imbalance_mean"] <= (1.002 if per_rank == 256 else 1.01)
    assert numbers["rank_tokens_max"] <= int(1.02 * per_rank * lengths.mean())


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


@pytest.mark.parametrize("budget", [{"max_tokens": 9}, {"global_tokens": 9}, {"max_tokens": 9, "global_tokens": 20}])
def test_a_sample_may_have_the_whole_budget_and_not_one_token_more(budget: dict[str, int]) -> None:
    assert everything(plan_epoch([1, 9, 0], world_size=2, **budget)) == [0, 1, 2]
    with pytest.raises(ValueError, match="sample 1 has length 10"):
        plan_epoch([1, 10, 0], world_size=2, **budget)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "No token budget"),
        ({"max_tokens": None, "global_tokens": 0}, "global_tokens"),
        ({"max_samples": 0}, "max_samples"),
        ({"bucket_steps": 0}, "bucket_steps"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 65_537}, "world_size"),
        ({"num_steps": 0}, "num_steps"),
        ({"pool_samples": 0}, "pool_samples"),
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


@settings(max_examples=MANY // 20, deadline=None)
@given(worlds(), st.integers(1, 40))
def test_what_a_rank_can_hold_refuses_global_steps_and_never_changes_them(world: Plannable, max_samples: int) -> None:
    free = world.plan_global()
    try:
        capped = world.plan_global(max_samples=max_samples, max_tokens=world.budget)
    except ValueError as error:
        assert "does not fit its ranks" in str(error)  # noqa: PT017
        return
    assert capped.num_steps == free.num_steps
    for step in range(free.num_steps):
        assert np.array_equal(free.step_samples(step), capped.step_samples(step))
        assert capped.rank_samples(step).max() <= max_samples


def test_lengths_above_half_the_cap_are_planned_as_quickly_as_others() -> None:
    lengths = np.random.default_rng(0).integers(60, 201, 100_000)
    plan = plan_epoch(lengths, world_size=8, max_tokens=200)
    assert plan.num_steps >= (lengths > 100).sum() / 8
    assert everything(plan) == list(range(100_000))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sorted_file_makes_pools_of_a_bounded_number_of_samples(shuffle: bool) -> None:
    lengths = np.sort(draw_lengths(np.random.default_rng(0), "zipf", 40_000, 500))
    plan = plan_epoch(lengths, world_size=2, max_tokens=4000, shuffle=shuffle, pool_samples=2000)
    sizes = [len(plan._layout.take(lengths, pool)[0]) for pool in range(plan._layout.num_pools)]
    assert sum(sizes) == 40_000
    assert len(sizes) > 8
    assert max(sizes) <= 3 * 2000


def test_no_samples_give_no_steps() -> None:
    for budget in ({"max_tokens": 5}, {"global_tokens": 5}):
        plan = plan_epoch([], world_size=3, **budget)
        assert plan.num_steps == 0
        assert plan.summary()["num_steps"] == 0
        assert plan.imbalances().shape == (0,)


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
    assert padding(8) < 0.17


def test_another_epoch_has_other_pools_steps_and_dealing() -> None:
    lengths = draw_lengths(np.random.default_rng(5), "lognormal", 4000, 300)
    plans = [plan_epoch(lengths, world_size=2, max_tokens=900, epoch=epoch, pool_samples=500) for epoch in range(2)]
    pairs = []
    for plan in plans:
        met = {tuple(pair) for step in range(plan.num_steps) for pair in itertools.pairwise(sorted(plan.step_samples(step).tolist()))}
        pairs.append(met)
    assert len(pairs[0] & pairs[1]) < 0.1 * len(pairs[0])
    longest = int(lengths.argmax())
    for name in ("step", "rank"):
        seen = set()
        for epoch in range(12):
            plan = plan_epoch(lengths, world_size=2, max_tokens=900, epoch=epoch, pool_samples=500)
            step = next(step for step in range(plan.num_steps) if longest in plan.step_samples(step))
            seen.add(step if name == "step" else int(longest in plan.samples(step, 1)))
        assert len(seen) >= (6 if name == "step" else 2)


@pytest.mark.parametrize("num_long", [1, 8])
def test_a_long_sample_among_equal_ones_comes_in_any_step_and_on_any_rank(num_long: int) -> None:
    lengths = np.array([30] * num_long + [1] * 240)
    steps, ranks = set(), set()
    for epoch in range(60):
        plan = plan_epoch(lengths, world_size=2, global_tokens=int(lengths.sum()) // 8 + 30, epoch=epoch, seed=4, num_steps=8)
        step = next(step for step in range(plan.num_steps) if 0 in plan.step_samples(step))
        steps.add(step)
        ranks.add(int(0 in plan.samples(step, 1)))
    assert steps == set(range(8))
    assert ranks == {0, 1}


@pytest.mark.parametrize("pool_samples", [1 << 17, 40])
def test_without_a_shuffle_every_seed_and_epoch_has_the_same_plan(pool_samples: int) -> None:
    lengths = np.random.default_rng(2).integers(0, 40, 300)
    options = {"world_size": 2, "max_tokens": 200, "shuffle": False, "pool_samples": pool_samples}
    plans = [plan_epoch(lengths, seed=seed, epoch=epoch, **options) for seed, epoch in ((0, 0), (0, 1), (7, 0))]
    assert steps_of(plans[0]) == steps_of(plans[1]) == steps_of(plans[2])


def test_each_sample_is_as_likely_in_any_step() -> None:
    lengths = draw_lengths(np.random.default_rng(6), "lognormal", 300, 100)
    where = np.zeros((300, 10), np.int64)
    num_epochs = 400
    for epoch in range(num_epochs):
        plan = plan_epoch(lengths, world_size=2, max_tokens=int(lengths.sum() / 18), seed=1, epoch=epoch)
        for step in range(plan.num_steps):
            where[plan.step_samples(step), min(step * 10 // plan.num_steps, 9)] += 1
    expected = where.sum(0) / 300
    # Chi-squared of each sample over tenths of the epoch: 9 degrees of freedom, mean 9.
    chi = ((where - expected) ** 2 / expected).sum(1)
    assert 7.5 < chi.mean() < 10.5
    assert chi.max() < 45
