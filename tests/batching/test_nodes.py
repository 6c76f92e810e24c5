"""Nodes share the rows evenly, and their ranks take every sample once, of their own node only, in equally many steps."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from distrag.batching.collate import Collate
from distrag.batching.loader import Histories
from distrag.batching.nodes import FEW_ROWS, NodeSampler, Shares, assign_rows, count_nodes, plan_nodes
from distrag.batching.sampler import TokenBudgetSampler
from distrag.data.config import DataConfig
from distrag.data.split import SplitConfig, build_views
from distrag.data.store import open_folder
from distrag.world import World, start_world
from tests.batching.stores import lengths_store
from tests.batching.worlds import Plannable, everything, steps_of, worlds
from tests.ranks import run_ranks


def nodes_of(lengths: np.ndarray) -> Callable[[int], np.ndarray]:
    return lambda num_nodes: assign_rows(lengths, num_nodes).nodes_of(np.arange(len(lengths)))


def check_shares(shares: Shares, num_rows: int) -> None:
    """Every row belongs to one node, whichever way one asks."""
    assert shares.bounds[0] == 0
    assert shares.bounds[-1] == num_rows
    node_of = np.full(num_rows, -1)
    for node in range(shares.num_nodes):
        spans = shares.spans(node)
        assert (spans[:, 0] < spans[:, 1]).all()
        assert (spans[1:, 0] > spans[:-1, 1]).all()
        for first, end in spans:
            assert (node_of[first:end] == -1).all()
            node_of[first:end] = node
    assert node_of.tolist() == shares.nodes_of(np.arange(num_rows)).tolist()


@settings(max_examples=300)
@given(world=worlds(most=4000), num_nodes=st.integers(1, 9), times=st.sampled_from([1, 1, 7]))
def test_every_row_belongs_to_one_node(world: Plannable, num_nodes: int, times: int) -> None:
    world = replace(world, lengths=np.repeat(world.lengths, times))
    shares = assign_rows(world.lengths, num_nodes)
    check_shares(shares, len(world.lengths))
    again = assign_rows(world.lengths.tolist(), num_nodes)
    assert shares.owners.tolist() == again.owners.tolist()


def _drawn(kind: str, size: int) -> np.ndarray:
    random = np.random.default_rng(size)
    if kind == "lognormal":
        return np.minimum(random.lognormal(5.5, 1.2, size), 4096).astype(np.int64)
    if kind == "short":
        return np.minimum(random.lognormal(3.4, 1.0, size), 200).astype(np.int64)
    return 2 * np.minimum(random.zipf(1.2, size), 4095).astype(np.int64)


@pytest.mark.parametrize("kind", ["lognormal", "short", "zipf"])
@pytest.mark.parametrize("order", ["mixed", "rising", "falling", "two halves"])
@pytest.mark.parametrize(("size", "num_nodes"), [(1000, 2), (1000, 4), (10_000, 2), (10_000, 8), (100_000, 16), (300_000, 32)])
def test_shares_are_even_in_tokens_and_squares_in_any_order(kind: str, order: str, size: int, num_nodes: int) -> None:
    lengths = _drawn(kind, size)
    if order == "two halves":
        lengths[size // 2 :] = 3
    elif order != "mixed":
        lengths = np.sort(lengths)[:: 1 if order == "rising" else -1]
    node_of = assign_rows(lengths, num_nodes).nodes_of(np.arange(size))
    for power, most in ((1, 1.006), (2, 1.01 if order == "mixed" else 1.025)):
        load = np.bincount(node_of, lengths.astype(float) ** power, minlength=num_nodes)
        assert load.max() <= most * load.mean(), f"L^{power}"


def test_a_share_of_many_rows_is_a_few_long_spans() -> None:
    lengths = _drawn("short", 100_000)
    shares = assign_rows(lengths, 4)
    assert all(len(shares.spans(node)) <= 32 for node in range(4))
    assert max(len(assign_rows(lengths[:FEW_ROWS], 2).spans(node)) for node in range(2)) > 100


def test_odd_stores_are_shared_too() -> None:
    for lengths in ([], [5], [0, 0, 0], [0] * 9000, [1] * 9000, [10**6] + [1] * 9000, [0] * 5000 + [7] * 5000):
        for num_nodes in (1, 2, 5):
            shares = assign_rows(np.array(lengths, np.int64), num_nodes)
            check_shares(shares, len(lengths))
    spread = np.bincount(assign_rows(np.zeros(9000, np.int64), 2).nodes_of(np.arange(9000)))
    assert spread.max() <= 1.01 * spread.mean(), "rows without tokens"


@settings(max_examples=400)
@given(world=worlds(), num_nodes=st.integers(1, 5), local_size=st.integers(1, 3))
def test_every_sample_comes_once_on_its_own_node_in_equally_many_steps(world: Plannable, num_nodes: int, local_size: int) -> None:
    node_of = nodes_of(world.lengths)(num_nodes)
    options = {**world.options, "world_size": num_nodes * local_size}
    plan = plan_nodes(world.lengths, node_of, num_nodes, max_tokens=world.budget, **options)
    assert everything(plan) == list(range(len(world.lengths)))
    assert plan.num_samples == len(world.lengths)
    assert plan.num_tokens == world.lengths.sum()
    for step in range(plan.num_steps):
        ranks = [plan.samples(step, rank) for rank in range(plan.world_size)]
        for rank, samples in enumerate(ranks):
            assert (node_of[samples] == rank // local_size).all()
        assert plan.rank_samples(step).tolist() == [len(samples) for samples in ranks]
        assert plan.rank_tokens(step).tolist() == [int(world.lengths[samples].sum()) for samples in ranks]
        assert plan.rank_tokens(step).max() <= world.budget
        assert plan.rank_samples(step).max() <= (options["max_samples"] or world.budget)
        assert sorted(plan.step_samples(step).tolist()) == sorted(np.concatenate(ranks).tolist())
        assert plan.step_sum(step, world.lengths) == plan.step_tokens(step)
    assert plan.summary()["num_steps"] == plan.num_steps
    for wrong in (-1, plan.num_steps):
        with pytest.raises(IndexError):
            plan.step_samples(wrong)
    with pytest.raises(IndexError):
        plan.samples(0, plan.world_size)


@pytest.mark.parametrize(("num_nodes", "local_size"), [(2, 4), (4, 2), (8, 1), (4, 8)])
@pytest.mark.parametrize("kind", ["lognormal", "short"])
def test_steps_of_nodes_are_balanced_to_one_percent(kind: str, num_nodes: int, local_size: int) -> None:
    lengths = _drawn(kind, 60_000)
    budget = 8192 if kind == "short" else 65_536
    plan = plan_nodes(
        lengths, nodes_of(lengths)(num_nodes), num_nodes, world_size=num_nodes * local_size, max_tokens=budget, cost=(768, 2, 0)
    )
    numbers = plan.summary()
    assert numbers["imbalance_p99"] <= 1.01
    assert numbers["token_imbalance_p99"] <= 1.01
    alone = plan_nodes(lengths, np.zeros(60_000, np.int64), 1, world_size=num_nodes * local_size, max_tokens=budget, cost=(768, 2, 0))
    assert plan.num_steps <= 1.02 * alone.num_steps + 1
    assert plan.fingerprint == alone.fingerprint


def test_a_node_without_samples_takes_part_in_every_step() -> None:
    lengths = np.array([3, 3, 3])
    plan = plan_nodes(lengths, np.zeros(3, np.int64), 2, world_size=4, max_tokens=3)
    assert plan.num_steps == 2
    assert [plan.samples(step, rank).tolist() for step in range(2) for rank in (2, 3)] == [[]] * 4
    assert plan_nodes(np.zeros(0, np.int64), np.zeros(0, np.int64), 2, world_size=2, max_tokens=3).num_steps == 0


def test_a_global_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)every number of nodes.*global_tokens 9.*max_tokens"):
        plan_nodes(np.ones(4, np.int64), np.zeros(4, np.int64), 1, world_size=2, global_tokens=9)


LENGTHS = np.random.default_rng(0).integers(0, 30, 400)


def samplers(num_nodes: int, world_size: int, **options: Any) -> list[NodeSampler]:
    common = {"max_tokens": 60, "nodes_of": nodes_of(LENGTHS), "num_nodes": num_nodes, "num_replicas": world_size, "seed": 3, **options}
    return [NodeSampler(LENGTHS, rank=rank, **common) for rank in range(world_size)]


def test_without_nodes_it_is_the_plain_sampler() -> None:
    plain = TokenBudgetSampler(LENGTHS, max_tokens=60, num_replicas=4, rank=1, seed=3)
    assert list(samplers(0, 4)[1]) == list(plain)


def test_epochs_differ_and_come_again_with_the_seed() -> None:
    def epochs() -> list[list[list[list[int]]]]:
        ranks = samplers(2, 4)
        out = []
        for epoch in range(3):
            for sampler in ranks:
                sampler.set_epoch(epoch)
            out.append([list(sampler) for sampler in ranks])
        return out

    first = epochs()
    assert first == epochs()
    assert first[0] != first[1] != first[2]
    for ranks in first:
        assert sorted(sample for rank in ranks for step in rank for sample in step) == list(range(400))
        assert len({len(rank) for rank in ranks}) == 1


def test_the_same_nodes_go_on_bit_for_bit() -> None:
    whole = steps_of(samplers(2, 4)[0].plan)
    state = json.loads(json.dumps(samplers(2, 4)[0].state_dict(3)))
    for rank, sampler in enumerate(samplers(2, 4)):
        sampler.load_state_dict(state)
        assert [list(step) for step in sampler] == [step[rank] for step in whole[3:]]


@pytest.mark.parametrize("shapes", [[(2, 4), (1, 4)], [(2, 4), (2, 2)], [(2, 4), (4, 4)], [(2, 4), (0, 4)], [(0, 3), (3, 3), (1, 2)]])
def test_other_nodes_take_exactly_what_is_left_and_the_next_epoch_is_whole(shapes: list[tuple[int, int]]) -> None:
    state, used, done = None, [], 0
    for num_nodes, world_size in shapes:
        ranks = samplers(num_nodes, world_size)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        plan = ranks[0].plan
        if (num_nodes, world_size) != shapes[-1]:
            used += [plan.step_samples(step) for step in range(done, done + 2)]
            done += 2
            state = json.loads(json.dumps(ranks[0].state_dict(done)))
    rest = [sample for sampler in ranks for step in sampler for sample in step]
    assert ranks[0].start == done
    assert sorted([*np.concatenate(used).tolist(), *rest]) == list(range(400))
    for sampler in ranks:
        sampler.set_epoch(1)
    assert sorted(sample for sampler in ranks for step in sampler for sample in step) == list(range(400))


def _world(rank: int, size: int, local_rank: int, local_size: int) -> World:
    return World(rank, size, local_rank, local_size, torch.device("cpu"))


def test_nodes_are_counted_and_refused_where_they_are_not_alike() -> None:
    assert count_nodes(_world(0, 1, 0, 1)) == 1

    def count(local: list[tuple[int, int]]) -> int | str:
        world = start_world("cpu")
        local_rank, local_size = local[world.rank]
        try:
            return count_nodes(replace(world, local_rank=local_rank, local_size=local_size))
        except ValueError as error:
            return str(error)

    assert run_ranks(count, 4, [(0, 2), (1, 2), (0, 2), (1, 2)]) == [2] * 4
    for local in ([(0, 3), (1, 3), (2, 3), (0, 1)], [(0, 2), (0, 2), (1, 2), (1, 2)]):
        told = run_ranks(count, 4, local)
        assert all("Nodes are not alike" in text and "batching.locality" in text for text in told)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores, on purpose
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_four_rows_come_once_each_over_all_nodes_and_workers(tmp_path: Path, num_workers: int, num_nodes: int) -> None:
    store = lengths_store(tmp_path, [2, 3, 2, 3])
    seen: list[int] = []
    for node in range(num_nodes):
        shares = assign_rows(store.lengths, num_nodes)
        own = open_folder(store.path, shares.spans(node))
        view = build_views(own, SplitConfig(kind="row", valid_share=0, test_share=0), task="next_item", max_len=50)["train"]
        options = {"nodes_of": nodes_of(store.lengths), "num_nodes": num_nodes, "num_replicas": num_nodes, "rank": node}
        histories = Histories(Collate(own, DataConfig(), task="next_item"), view)
        sampler = NodeSampler(view, max_tokens=3, **options)
        plain = DataLoader(histories, batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=num_workers)
        seen += [sample for batch in plain for sample in batch.samples.tolist() if sample >= 0]
    assert sorted(seen) == [0, 1, 2, 3]


def test_a_rank_that_is_given_another_nodes_rows_stops(tmp_path: Path) -> None:
    store = lengths_store(tmp_path, [2, 3, 2, 3])
    own = open_folder(store.path, assign_rows(store.lengths, 2).spans(0))
    view = build_views(own, SplitConfig(kind="row", valid_share=0, test_share=0), task="next_item", max_len=50)["train"]
    with pytest.raises(ValueError, match="A row that is not held here"):
        Collate(own, DataConfig(), task="next_item")(view, np.arange(4))


def test_two_thousand_batches_of_a_node_keep_few_files_open(tmp_path: Path) -> None:
    store = lengths_store(tmp_path, [3] * 4000)
    shares = assign_rows(store.lengths, 2)
    own = open_folder(store.path, shares.spans(1))
    view = build_views(own, SplitConfig(kind="row", valid_share=0, test_share=0), task="next_item", max_len=50)["train"]
    sampler = NodeSampler(view, max_tokens=2, nodes_of=nodes_of(store.lengths), num_nodes=2, num_replicas=2, rank=1)
    histories = Histories(Collate(own, DataConfig(), task="next_item"), view, training=False)
    plain = DataLoader(histories, batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        kept, most = [], 0
        for batch in plain:
            kept.append(batch.samples)
            most = max(most, len(os.listdir("/proc/self/fd"))) if len(kept) % 50 == 0 else most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 2000
    assert most < 200
