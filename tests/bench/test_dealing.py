"""What the plan is measured against is as good as it is known to be: DistributedSampler's own batches, and even counts by differencing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from distrag.bench.dealing import deal_equal_counts, random_batches
from distrag.bench.lengths import DRAWN, draw_lengths
from distrag.bench.plain import PlainSampler


def loads(costs: np.ndarray, ranks: np.ndarray, world_size: int) -> np.ndarray:
    assert np.bincount(ranks, minlength=world_size).tolist() == [len(costs) // world_size] * world_size
    return np.bincount(ranks, weights=costs, minlength=world_size)


@pytest.mark.parametrize(
    ("costs", "world_size", "largest"),
    [
        ([8, 7, 6, 5, 4, 3, 2, 1], 2, 18),
        ([8, 7, 6, 5, 4, 3, 2, 1], 4, 9),
        ([5, 5, 5, 5], 2, 10),
        ([9, 1, 1, 1], 2, 10),
        ([0, 0, 0], 3, 0),
        ([3, 1, 2], 1, 6),
        ([7, 4], 2, 7),
        ([10, 9, 1, 2, 5, 6], 3, 11),
    ],
)
def test_equal_counts_by_differencing_on_cases_done_by_hand(costs: list[int], world_size: int, largest: int) -> None:
    values = np.array(costs, np.float64)
    assert loads(values, deal_equal_counts(values, world_size), world_size).max() == largest


@pytest.mark.parametrize("seed", range(20))
def test_differencing_is_within_a_third_of_the_best_of_all_equal_deals(seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(1, 1, 10)
    best = min(max(costs[list(half)].sum(), costs.sum() - costs[list(half)].sum()) for half in itertools.combinations(range(10), 5))
    assert best - 1e-9 <= loads(costs, deal_equal_counts(costs, 2), 2).max() <= 4 / 3 * best


@pytest.mark.parametrize(("world_size", "per_rank"), [(2, 64), (16, 64), (64, 32)])
def test_differencing_beats_the_random_deal_by_far(world_size: int, per_rank: int) -> None:
    lengths = draw_lengths("zipf", 3 * world_size * per_rank)
    batches = list(random_batches(len(lengths), world_size, per_rank))
    assert [len(batch) for batch in batches] == [world_size * per_rank] * 3
    for batch in batches:
        costs = lengths[batch].astype(np.float64)
        dealt = loads(costs, deal_equal_counts(costs, world_size), world_size)
        random = loads(costs, np.arange(len(batch)) % world_size, world_size)
        assert dealt.max() / dealt.mean() - 1 < 0.2 * (random.max() / random.mean() - 1)


def test_random_batches_are_those_of_distributed_sampler() -> None:
    parts = [list(DistributedSampler(range(50), 4, rank, seed=7)) for rank in range(4)]
    for step, batch in enumerate(random_batches(50, 4, 3, seed=7)):
        for rank in range(4):
            assert batch[rank::4].tolist() == parts[rank][3 * step : 3 * step + 3]
    assert step == 3  # 48 of 50: whole batches only


def test_the_plain_sampler_reads_as_torchs_does() -> None:
    lengths = np.arange(1, 12)
    sampler = PlainSampler(lengths, world_size=2, rank=1, batch_size=4)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        theirs = DistributedSampler(range(11), 2, 1)
        theirs.set_epoch(epoch)
        plan = sampler.plan
        assert len(sampler) == plan.num_steps == 2
        own = np.concatenate([plan.samples(step, 1) for step in range(2)])
        assert own.tolist() == list(theirs)
        everyone = [[plan.samples(step, rank) for rank in range(2)] for step in range(2)]
        for step in range(2):
            tokens = [lengths[samples].sum() for samples in everyone[step]]
            assert plan.step_tokens(step) == plan.step_sum(step, lengths) == sum(tokens)
            assert plan.rank_costs(step, (1.0, 0.0, 0.0)).tolist() == tokens
    assert plan.rank_costs(0, (0.0, 2.0, 3.0))[0] == 2 * (lengths[everyone[0][0]] ** 2).sum() + 12


@pytest.mark.parametrize(("name", "mean", "longest"), [("zipf", 1733, 8190), ("lognormal", 478, 4096), ("short", 29, 200)])
def test_drawn_lengths_are_what_they_are_called(name: str, mean: float, longest: int) -> None:
    lengths = draw_lengths(name, 200_000)
    assert lengths.dtype == np.int32
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert lengths.max() == longest
    assert lengths.min() >= 1
    assert str(longest) in DRAWN[name][0].replace(",", "")
