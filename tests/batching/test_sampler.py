"""The sampler means what a DistributedSampler means, and keeps the plan's promises over ranks and epochs."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from distrag.batching.plan import plan_epoch
from distrag.batching.sampler import StepSamples, TokenBudgetSampler
from tests.batching.stores import lengths_store
from tests.ranks import run_ranks

LENGTHS = np.random.default_rng(0).integers(0, 30, 200)


def epoch_of(samplers: list[TokenBudgetSampler]) -> list[list[list[int]]]:
    return [list(sampler) for sampler in samplers]


def flat(ranks: list[list[list[int]]]) -> list[int]:
    return [sample for rank in ranks for step in rank for sample in step]


def test_it_is_a_distributed_sampler_over_an_array_or_anything_with_lengths(tmp_path: Path) -> None:
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=2, rank=1, seed=3)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.num_replicas, sampler.rank, sampler.seed, sampler.shuffle, sampler.epoch) == (2, 1, 3, True, 0)
    assert sampler.num_samples == len(flat([list(sampler)]))
    store = lengths_store(tmp_path, LENGTHS.tolist())
    assert list(TokenBudgetSampler(store, max_tokens=60, num_replicas=2, rank=1, seed=3)) == list(sampler)


def test_alone_it_is_the_only_rank() -> None:
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert sorted(flat([list(sampler)])) == list(range(200))
    with pytest.raises(ValueError, match="rank"):
        TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=2, rank=2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_yield_equally_many_lists_and_every_sample_once(world_size: int) -> None:
    samplers = [TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=world_size, rank=rank) for rank in range(world_size)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        ranks = epoch_of(samplers)
        assert sorted(flat(ranks)) == list(range(200))
        assert {len(rank) for rank in ranks} == {len(sampler) for sampler in samplers}


def test_epochs_differ_and_come_again_with_the_seed() -> None:
    def run() -> list[list[list[list[int]]]]:
        samplers = [TokenBudgetSampler([1] * 6, max_tokens=1, num_replicas=2, rank=rank, seed=5) for rank in range(2)]
        epochs = []
        for epoch in range(2):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            epochs.append(epoch_of(samplers))
        return epochs

    first, second = run()
    assert first != second
    assert run() == [first, second]


def test_a_rank_that_was_off_by_an_epoch_agrees_again_once_the_trainer_sets_it() -> None:
    samplers = [TokenBudgetSampler([1] * 6, max_tokens=1, num_replicas=2, rank=rank) for rank in range(2)]
    samplers[1].set_epoch(1)
    for sampler in samplers:
        sampler.set_epoch(0)
    assert sorted(flat(epoch_of(samplers))) == list(range(6))


def test_iterating_twice_without_set_epoch_is_the_same_epoch() -> None:
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60)
    assert list(sampler) == list(sampler)


def test_the_plan_of_an_epoch_is_made_once() -> None:
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60)
    first = sampler.plan
    assert sampler.plan is first
    sampler.set_epoch(1)
    assert sampler.plan is not first
    assert sampler.plan is sampler.plan
    fixed = TokenBudgetSampler(LENGTHS, max_tokens=60, shuffle=False)
    plan = fixed.plan
    fixed.set_epoch(1)
    assert fixed.plan is plan


def test_a_resumed_epoch_yields_exactly_the_rest() -> None:
    whole = TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=2, rank=1, seed=9)
    whole.set_epoch(4)
    steps = list(whole)
    resumed = TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=2, rank=1)
    resumed.load_state_dict(whole.state_dict(7))
    assert list(resumed) == steps[7:]
    assert len(resumed) == len(steps) - 7
    resumed.set_epoch(4)
    assert list(resumed) == steps[7:]
    resumed.set_epoch(5)
    assert len(list(resumed)) == len(resumed) == resumed.plan.num_steps
    resumed.load_state_dict(whole.state_dict(len(steps)))
    assert list(resumed) == []


def test_global_budget_gives_the_same_steps_at_every_world_size() -> None:
    def steps(world_size: int) -> list[list[int]]:
        ranks = [list(TokenBudgetSampler(LENGTHS, global_tokens=90, num_replicas=world_size, rank=r)) for r in range(world_size)]
        return [sorted(sample for rank in ranks for sample in rank[step]) for step in range(len(ranks[0]))]

    assert steps(1) == steps(2) == steps(4)


def test_lists_carry_their_step_to_a_worker() -> None:
    counts = np.arange(200.0)
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=2, rank=0, counts=counts)
    sampler.set_epoch(2)
    plan = plan_epoch(LENGTHS, world_size=2, max_tokens=60, epoch=2)
    for step, samples in enumerate(sampler):
        assert isinstance(samples, StepSamples)
        got = pickle.loads(pickle.dumps(samples))
        assert got == samples == plan.samples(step, 0).tolist()
        assert (got.step, got.epoch, got.num_tokens_global) == (step, 2, plan.step_tokens(step))
        assert got.global_count == counts[plan.step_samples(step)].sum()
    assert all(np.isnan(samples.global_count) for samples in TokenBudgetSampler(LENGTHS, max_tokens=60))


def _as_rank() -> tuple[int, int, list[int]]:
    sampler = TokenBudgetSampler(LENGTHS, max_tokens=60)
    return sampler.num_replicas, sampler.rank, flat([list(sampler)])


def test_in_a_process_group_it_takes_its_ranks() -> None:
    results = run_ranks(_as_rank, 2)
    assert [result[:2] for result in results] == [(2, 0), (2, 1)]
    assert sorted(results[0][2] + results[1][2]) == list(range(200))
