"""The sampler means what a DistributedSampler means, and keeps the plan's promises over ranks and epochs."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


def build(world_size: int = 2, rank: int = 0, **options: Any) -> TokenBudgetSampler:
    budget = {} if "global_tokens" in options else {"max_tokens": 60}
    return TokenBudgetSampler(LENGTHS, num_replicas=world_size, rank=rank, **{**budget, **options})


def resumed(state: dict[str, Any], **options: Any) -> TokenBudgetSampler:
    sampler = build(**options)
    sampler.load_state_dict(json.loads(json.dumps(state)))  # as a checkpoint keeps it
    return sampler


def test_a_resumed_epoch_yields_exactly_the_rest_and_after_its_end_the_next() -> None:
    whole = build(rank=1, seed=9)
    whole.set_epoch(4)
    steps = list(whole)
    again = resumed(whole.state_dict(7), rank=1)
    assert list(again) == steps[7:]
    assert len(again) == len(steps) - 7
    third = resumed(again.state_dict(11), rank=1)
    assert list(third) == steps[11:]
    again.set_epoch(5)
    assert len(list(again)) == len(again) == again.plan.num_steps
    after = resumed(whole.state_dict(len(steps)), rank=1)
    assert (after.epoch, after.start) == (5, 0)
    assert list(after) == list(again)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_epoch_after_one_that_other_ranks_began_is_whole(shuffle: bool) -> None:
    for done in (3, 14):
        again = resumed(build(shuffle=shuffle).state_dict(done), world_size=1, shuffle=shuffle)
        again.set_epoch(1)
        assert sorted(flat([list(again)])) == list(range(200))
        assert again.plan.first_step == 0


def test_the_seed_of_the_state_counts() -> None:
    whole = build(seed=9)
    assert list(resumed(whole.state_dict(3), seed=4)) == list(whole)[3:]


def test_what_was_read_ahead_does_not_count_as_used() -> None:
    whole = build()
    steps, reader = list(whole), iter(build())
    read = [next(reader) for _ in range(12)]
    again = resumed(whole.state_dict(10))  # 10 were trained, 2 wait in the loader
    assert read == steps[:12]
    assert list(again) == steps[10:]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(40, 200), st.integers(0, 8)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 99),
)
def test_each_sample_once_an_epoch_however_often_ranks_and_budget_change(
    parts: list[tuple[int, int, int]], by_globe: bool, seed: int
) -> None:
    name = "global_tokens" if by_globe else "max_tokens"
    state, trained, epoch, done = None, {0: [], 1: []}, 0, 0
    for world_size, budget, num_steps in [*parts, (3, 75, 10**6)]:
        options = {"world_size": world_size, name: budget, "seed": seed, "content_hash": "abc"}
        samplers = [build(rank=rank, **options) if state is None else resumed(state, rank=rank, **options) for rank in range(world_size)]
        epoch, done = samplers[0].epoch, samplers[0].start
        if epoch > 1:
            break
        ranks = [list(sampler)[:num_steps] for sampler in samplers]
        assert len({len(rank) for rank in ranks}) == 1
        assert all(step.step == done + i for rank in ranks for i, step in enumerate(rank))
        trained[epoch] += flat(ranks)
        state = samplers[0].state_dict(done + len(ranks[0]))
        assert len(json.dumps(state)) < 2000
    if epoch == 0:
        assert resumed(state, **options).epoch == 1
    for of_epoch in range(epoch):
        assert sorted(trained[of_epoch]) == list(range(200))
    if done == 0 and epoch == 1:
        assert sorted(trained[0]) == list(range(200))


def test_a_global_budget_is_resumed_step_by_step_on_any_ranks() -> None:
    one = build(1, global_tokens=90)
    steps = [sorted(step) for step in one]
    ranks = [list(resumed(one.state_dict(5), world_size=3, rank=rank, global_tokens=90, cost=(1.0, 0.5, 0.0))) for rank in range(3)]
    assert [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)] == steps[5:]


def test_other_data_is_refused_naming_both_hashes() -> None:
    state = build(content_hash="aaaa").state_dict(3)
    with pytest.raises(ValueError, match=r"(?s)aaaa.*bbbb.*where: +resume"):
        resumed(state, content_hash="bbbb")
    other = TokenBudgetSampler(LENGTHS[::-1], max_tokens=60, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match=state["fingerprint"]):
        other.load_state_dict(state)


class Drawn:
    """Lengths that change with the epoch, as a truncation that is drawn anew."""

    def __init__(self) -> None:
        self.lengths = LENGTHS

    def at_epoch(self, epoch: int) -> np.ndarray:
        return np.minimum(LENGTHS, 10 + epoch)


def test_lengths_of_an_epoch_are_asked_for_and_resumed() -> None:
    sampler = TokenBudgetSampler(Drawn(), max_tokens=60, num_replicas=1, rank=0, counts=lambda lengths: lengths * 2)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        steps = list(sampler)
        assert sum(step.num_tokens_global for step in steps) == np.minimum(LENGTHS, 10 + epoch).sum()
        assert all(step.global_count == 2 * step.num_tokens_global for step in steps)
    again = TokenBudgetSampler(Drawn(), max_tokens=60, num_replicas=1, rank=0)
    again.load_state_dict(sampler.state_dict(2))
    assert list(again) == steps[2:]


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
