"""Pools of an epoch: what is promised before they are planned holds when they are walked, in small worlds and at the size of real ones."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.batching import layout
from distrag.batching.deal import NO_CAP
from distrag.batching.layout import Layout, _is_proven, _Need, build_layout
from distrag.batching.plan import EpochPlan, plan_epoch
from distrag.batching.pool import Rules, plan_pool
from tests.batching.worlds import COSTS, KINDS, draw_lengths

MANY = settings.default.max_examples * 6
SEEDS = st.integers(0, 2**32)


def check(plan: EpochPlan, lengths: np.ndarray, rank_tokens: int = NO_CAP, rank_samples: int = NO_CAP, step_tokens: int = NO_CAP) -> None:
    """Walks the plan: every sample once, under every cap."""
    seen = np.zeros(len(lengths), np.int64)
    for step in range(plan.first_step, plan.num_steps):
        samples = plan.step_samples(step)
        assert len(samples) > 0
        np.add.at(seen, samples, 1)
        assert plan.rank_tokens(step).max() <= rank_tokens
        assert plan.rank_samples(step).max() <= rank_samples
        assert plan.step_tokens(step) == int(lengths[samples].astype(np.int64).sum()) <= step_tokens
    assert (seen == 1).all()


def tight_world(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Any]]:
    """Returns lengths and options of many small pools under caps that are met to the brim, or nearly."""
    n, longest = int(rng.integers(50, 1500)), int(rng.choice([3, 30, 200, 5000, 10**5]))
    lengths = draw_lengths(rng, str(rng.choice(KINDS)), n, longest).astype(rng.choice([np.int32, np.int64]))
    W, per_rank = int(rng.choice([1, 2, 3, 8, 16])), int(rng.choice([2, 4, 8, 16, 32]))
    most, mean = max(1, int(lengths.max())), max(float(lengths.mean()), 0.01)
    cap = int(max(most, per_rank * mean * rng.choice([1, 1.02, 1.3]))) + int(rng.choice([0, 1, most, 2 * most + 1]))
    samples = int(max(1, rng.choice([per_rank, cap / mean, 0.9 * cap / mean, 1, 3])))
    caps = {"max_tokens": cap, "max_samples": samples} if rng.random() < 0.5 else {"max_tokens": cap}
    if rng.random() < 0.5:
        caps = {"global_tokens": cap * W}
        if rng.random() < 0.5:
            caps |= {"max_tokens": cap + most, "max_samples": cap}
    options = {"cost": COSTS[rng.integers(len(COSTS))], "bucket_steps": int(rng.choice([1, 1, 2, 5])), "shuffle": bool(rng.random() < 0.9)}
    sizes = {"world_size": W, "seed": int(rng.integers(100)), "pool_samples": int(rng.choice([8, 32, 128, 512]))}
    return lengths, {**caps, **options, **sizes}


@settings(max_examples=MANY)
@given(SEEDS, st.sampled_from([20, 150, 1 << 19]))
def test_pools_that_are_promised_fit_when_they_are_walked(seed: int, blocks: int) -> None:
    lengths, options = tight_world(np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "MAX_BLOCKS", blocks)
        if {"global_tokens", "max_tokens"} <= set(options):
            # Here a step that was formed without regard to ranks may not fit them, which is told at once.
            with suppress(ValueError):
                check(plan_epoch(lengths, **options), lengths, options["max_tokens"], options["max_samples"], options["global_tokens"])
            return
        plan = plan_epoch(lengths, **options)
        step_tokens = options.get("global_tokens", NO_CAP)
        own = options.get("max_tokens", NO_CAP)
        check(plan, lengths, own, options.get("max_samples", own), step_tokens)


def one_pool(num_samples: int, num_steps: int) -> Layout:
    """Returns a layout of one pool that makes so many steps."""
    order, states = np.arange(num_samples, dtype=np.uint32), np.ones(1, np.uint64)
    return Layout(0, 0, 1, order, np.array([0, num_samples]), np.array([0, num_steps]), states)


@settings(max_examples=MANY * 2)
@given(SEEDS, st.booleans(), st.sampled_from([None, -1, 0, 1]))
def test_a_pool_fits_under_the_least_cap_that_the_bound_promises(seed: int, whole: bool, more: int | None) -> None:
    rng = np.random.default_rng(seed)
    lengths = draw_lengths(rng, KINDS[seed % len(KINDS)], int(rng.integers(5, 1200)), int(rng.choice([3, 200, 10**5, 2**33]))).astype(
        np.int64
    )
    lengths += int(rng.choice([0, 0, 1, 96]))
    n, most, W = len(lengths), max(1, int(lengths.max())), int(rng.choice([1, 2, 3, 8]))
    bins = 1 if whole else W
    steps = int(rng.integers(1, max(2, n // bins // int(rng.choice([1, 4, 16, 64])))))
    bucket, cost = int(rng.choice([1, 1, 3])), COSTS[rng.integers(len(COSTS))]
    rows = math.ceil(math.ceil(n / bins) / steps)

    def need(cap: int) -> _Need:
        samples = max(cap if more is None else rows + more, 1)
        if whole:
            return _Need(Rules(W, bucket, True, cap, samples, cap // W + most, -(-samples // W), cost), most, 0)
        return _Need(Rules(W, bucket, False, NO_CAP, NO_CAP, cap, samples, cost), most, 0)

    pool = one_pool(n, steps)
    low, high = most, int(lengths.sum()) // (steps * bins) + 2 * most + 2
    if n < steps * bins or not _is_proven(lengths, pool, need(high)):
        return
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_proven(lengths, pool, need(middle)) else (middle + 1, high)
    for state in (0, seed + 1):
        assert plan_pool(lengths, need(high).rules, steps, np.uint64(state), True)[3] == -1


def test_nothing_is_promised_where_a_cap_of_samples_sends_short_ones_to_full_ranks() -> None:
    # Alone, 110 tokens would do: longest first leaves 100 and 10 short ones on two ranks. But 100 samples a rank are 2,000 in all.
    lengths = np.array([100] * 2 + [1] * 1998)
    for samples, fits in ((110, True), (100, False)):
        rules = Rules(1, 1, False, NO_CAP, NO_CAP, 110, samples, (1.0, 0.0, 0.0))
        assert (plan_pool(lengths, rules, 20, np.uint64(0), True)[3] == -1) == fits
        assert _is_proven(lengths, one_pool(2000, 20), _Need(rules, 100, 0)) == fits


def test_bounds_prove_most_pools_of_real_shapes_and_plan_none_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Counter()

    def counting(*args: Any) -> Any:
        planned["pools"] += 1
        return plan_pool(*args)

    monkeypatch.setattr(layout, "plan_pool", counting)
    budgets = [{"max_tokens": 8192}, {"global_tokens": 65_536}, {"global_tokens": 65_536, "max_tokens": 10_000}]
    for kind in ("zipf", "lognormal", "uniform"):
        lengths = draw_lengths(np.random.default_rng(1), kind, 50_000, 400)
        for budget in [*budgets, {"max_tokens": 10**6, "max_samples": 32}]:
            assert plan_epoch(lengths, world_size=8, pool_samples=4096, **budget)._layout.num_pools > 1
    assert planned["pools"] == 0
    # 20 of these fill a rank and one more never fits: no bound on the fullest tells that.
    plan_epoch(np.full(50_000, 400), world_size=8, pool_samples=4096, max_tokens=8192)
    assert planned["pools"] > 1


def test_pools_follow_one_another_and_are_about_as_large_as_asked() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 60, 20_000)
    for blocks in (1 << 19, 700):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layout, "MAX_BLOCKS", blocks)
            rules = Rules(4, 1, False, NO_CAP, NO_CAP, 500, 500, (1.0, 0.0, 0.0))
            pools = build_layout(lengths, rules, 0, 0, shuffle=True, num_steps=0, pool_samples=1000)
        assert 15 <= pools.num_pools <= 20
        places = [pools.find(step) for step in range(pools.num_steps)]
        assert places == [(pool, at) for pool in range(pools.num_pools) for at in range(pools.steps_of(pool))]
        taken = [pools.take(lengths, pool) for pool in range(pools.num_pools)]
        assert sorted(np.concatenate([samples for samples, _, _ in taken]).tolist()) == list(range(20_000))
        for samples, sizes, state in taken:
            assert sizes.tolist() == lengths[samples].tolist()
            assert 800 <= len(samples) <= 1500
            assert state != 0
            assert not (np.diff(samples) == 1).mean() > 0.05, "neighbours stay together"
        assert (pools.num_tokens, pools.lengths_hash) == (lengths.sum(), layout.hash_lengths(lengths))


def test_pools_share_out_tokens_by_steps_the_last_one_too() -> None:
    lengths = draw_lengths(np.random.default_rng(3), "lognormal", 40_000, 300)
    for budget, seed in ((1000, 0), (1500, 1), (2000, 2)):
        plan = plan_epoch(lengths, world_size=4, max_tokens=budget, seed=seed, pool_samples=3000)
        tokens = np.array([plan.step_tokens(step) for step in range(plan.num_steps)])
        assert tokens.min() >= 0.97 * tokens.mean()
        assert tokens.max() <= 1.03 * tokens.mean()


def test_without_a_shuffle_every_seed_and_epoch_has_the_same_plan() -> None:
    lengths = np.random.default_rng(4).integers(0, 50, 5000)
    plans = [
        plan_epoch(lengths, world_size=2, max_tokens=900, shuffle=False, seed=s, epoch=e, pool_samples=500) for s, e in ((0, 0), (3, 4))
    ]
    for step in range(plans[0].num_steps):
        assert np.array_equal(plans[0].step_samples(step), plans[1].step_samples(step))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_three_hundred_thousand_samples_are_several_pools(dtype: type) -> None:
    lengths = draw_lengths(np.random.default_rng(5), "lognormal", 300_000, 2000).astype(dtype)
    plan = plan_epoch(lengths, world_size=8, max_tokens=int(256 * lengths.mean()), cost=(1.0, 0.001, 0.0))
    assert plan._layout.num_pools > 1
    check(plan, lengths, int(256 * lengths.mean()), int(256 * lengths.mean()))
    again = plan_epoch(lengths.astype(np.int64), world_size=8, max_tokens=int(256 * lengths.mean()), cost=(1.0, 0.001, 0.0))
    assert again.fingerprint == plan.fingerprint
    for step in (plan.num_steps - 1, 0, plan.num_steps // 2, plan.num_steps // 2 - 1):
        assert np.array_equal(again.step_samples(step), plan.step_samples(step))
        assert np.array_equal(again.step_ranks(step), plan.step_ranks(step))
    numbers = plan.summary(max_steps=40)
    assert numbers["imbalance_mean"] < 1.005
    assert numbers["token_imbalance_mean"] < 1.005


@pytest.mark.parametrize("pool_samples", [1 << 17, 64])
@pytest.mark.parametrize(("dtype", "longest"), [(np.int32, 2**31 - 1), (np.int64, 2**31 - 1), (np.int64, 2**33), (np.int64, 100_000)])
def test_lengths_above_65535_and_near_the_end_of_their_type(dtype: type, longest: int, pool_samples: int) -> None:
    rng = np.random.default_rng(6)
    lengths = np.where(rng.random(1000) < 0.3, rng.integers(longest - 30_000, longest + 1, 1000), rng.integers(0, 70_000, 1000)).astype(
        dtype
    )
    total = int(lengths.astype(object).sum())
    for budget in ({"max_tokens": longest}, {"max_tokens": 3 * longest}, {"global_tokens": 4 * longest}):
        plan = plan_epoch(lengths, world_size=3, pool_samples=pool_samples, **budget)
        assert plan.num_tokens == total
        check(plan, lengths, budget.get("max_tokens", NO_CAP), NO_CAP, budget.get("global_tokens", NO_CAP))
        assert plan.num_steps <= total / (4 * longest if "global_tokens" in budget else 3 * budget["max_tokens"]) * 1.4 + 3
