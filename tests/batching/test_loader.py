"""Loaders give every planned step once, in order, whoever builds the batches."""

from __future__ import annotations

import os
import resource
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from distrag.batch import RaggedBatch
from distrag.batching.collate import Collate
from distrag.batching.loader import Histories, Loader, padding_share
from distrag.batching.sampler import TokenBudgetSampler
from distrag.data.config import DataConfig
from distrag.data.split import SplitConfig, View, build_views
from tests.batching.stores import lengths_store

LENGTHS = (2 + np.random.default_rng(1).integers(0, 20, 120)).tolist()


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Collate, View]:
    return build(tmp_path_factory.mktemp("loader"), LENGTHS)


def build(folder: Path, lengths: list[int], negatives: str = "per_position") -> tuple[Collate, View]:
    store = lengths_store(folder, lengths)
    view = build_views(store, SplitConfig(kind="row", valid_share=0, test_share=0), task="next_item", max_len=50)["train"]
    return Collate(store, DataConfig(), task="next_item", negatives=negatives, num_negatives=2), view


def same(one: RaggedBatch, other: RaggedBatch) -> bool:
    fields = ("offsets", "numbers", "context", "labels", "weights", "samples")
    return (
        all(torch.equal(getattr(one, name), getattr(other, name)) for name in fields)
        and torch.equal(one.ids.values(), other.ids.values())
        and torch.equal(one.ids.lengths(), other.ids.lengths())
        and one.ids.keys() == other.ids.keys()
        and (one.step, one.epoch, one.global_count, one.num_tokens_global)
        == (other.step, other.epoch, other.global_count, other.num_tokens_global)
    )


def sampler_of(view: View, collate: Collate, *, world_size: int = 2, rank: int = 0, max_tokens: int = 40) -> TokenBudgetSampler:
    counts = collate.counts(view)
    return TokenBudgetSampler(view, max_tokens=max_tokens, num_replicas=world_size, rank=rank, counts=counts, seed=2)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_all_ranks_together_see_every_sample_once_with_the_counts_of_the_step(parts: tuple[Collate, View], prefetch: int) -> None:
    collate, view = parts
    samplers = [sampler_of(view, collate, rank=rank) for rank in range(2)]
    ranks = [list(Loader(collate, view, sampler, prefetch=prefetch)) for sampler in samplers]
    assert [len(rank) for rank in ranks] == [samplers[0].plan.num_steps] * 2
    seen = [sample for rank in ranks for batch in rank for sample in batch.samples.tolist() if sample >= 0]
    assert sorted(seen) == list(range(len(view)))
    for step, batches in enumerate(zip(*ranks, strict=True)):
        assert [batch.step for batch in batches] == [step, step]
        assert {batch.global_count for batch in batches} == {float(sum(batch.num_tokens for batch in batches))}
        assert {batch.num_tokens_global for batch in batches} == {sum(batch.num_tokens for batch in batches)}
        for batch in batches:
            batch.check(collate.table_rows)


def test_a_rank_without_samples_gets_a_dummy_in_step(tmp_path: Path) -> None:
    collate, view = build(tmp_path, [3, 4])
    ranks = [list(Loader(collate, view, sampler_of(view, collate, world_size=4, rank=rank), prefetch=2)) for rank in range(4)]
    assert [len(rank) for rank in ranks] == [1] * 4
    assert sorted(batch.samples.tolist() for (batch,) in ranks) == [[-1], [-1], [0], [1]]


def test_the_thread_builds_what_is_built_without_it(parts: tuple[Collate, View]) -> None:
    collate, view = parts
    sampler = sampler_of(view, collate)
    pairs = zip(Loader(collate, view, sampler, prefetch=0), Loader(collate, view, sampler, prefetch=2), strict=True)
    assert all(same(one, other) for one, other in pairs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_plain_data_loader_gives_the_same_batches(parts: tuple[Collate, View], num_workers: int) -> None:
    collate, view = parts
    sampler = sampler_of(view, collate)
    sampler.set_epoch(3)
    plain = DataLoader(Histories(collate, view), batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=num_workers)
    assert len(plain) == len(sampler)
    assert all(same(one, other) for one, other in zip(plain, Loader(collate, view, sampler), strict=True))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores, on purpose
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_four_rows_come_once_each_over_all_ranks_and_workers(tmp_path: Path, num_workers: int, world_size: int) -> None:
    collate, view = build(tmp_path, [2, 3, 2, 3])
    seen: list[int] = []
    for rank in range(world_size):
        sampler = sampler_of(view, collate, world_size=world_size, rank=rank, max_tokens=3)
        plain = DataLoader(Histories(collate, view), batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=num_workers)
        seen += [sample for batch in plain for sample in batch.samples.tolist() if sample >= 0]
    assert sorted(seen) == [0, 1, 2, 3]


def test_draws_in_workers_differ_by_worker_rank_and_epoch_and_come_again_with_the_seed(tmp_path: Path) -> None:
    collate, view = build(tmp_path, [12] * 16)
    columns = collate.store.position("item_id")

    def draws() -> dict[tuple[int, int], list[tuple[int, ...]]]:
        streams = {}
        for rank in range(2):
            sampler = sampler_of(view, collate, rank=rank)
            plain = DataLoader(Histories(collate, view), batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=2)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                drawn = [batch.ids["item_id:negative"].values().tolist() for batch in plain]
                streams[rank, epoch] = [tuple(values) for values in drawn]
        return streams

    first = draws()
    batches = [values for stream in first.values() for values in stream]
    assert len(set(batches)) == len(batches) > 8  # consecutive batches come from different workers
    assert first == draws()
    assert len(columns) == 16 * 12


def test_two_thousand_batches_from_workers_keep_few_files_open(tmp_path: Path) -> None:
    collate, view = build(tmp_path, [3] * 2000, negatives="none")
    sampler = sampler_of(view, collate, world_size=1, max_tokens=2)
    plain = DataLoader(Histories(collate, view, training=False), batch_sampler=sampler, collate_fn=Histories.collate_fn, num_workers=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        kept, most = [], 0
        for batch in plain:
            kept.append(batch.samples)
            if len(kept) % 50 == 0:
                most = max(most, len(os.listdir("/proc/self/fd")))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(kept) == 2000
    assert most < 200


class Broken(Collate):
    """Fails in the third step, as a bad file would."""

    def __call__(self, *args: object, **settings: object) -> RaggedBatch:
        if settings["step"] == 2:
            raise OSError("disk went away")
        return super().__call__(*args, **settings)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_while_building_reaches_the_consumer_with_its_traceback(parts: tuple[Collate, View], prefetch: int) -> None:
    collate, view = parts
    broken = Broken(collate.store, DataConfig(), task="next_item")
    steps: list[int] = []
    with pytest.raises(OSError, match="disk went away") as caught:
        steps.extend(batch.step for batch in Loader(broken, view, sampler_of(view, collate), prefetch=prefetch))
    assert steps in ([0, 1], [])  # extend keeps nothing of a generator that raised
    assert "_build_host" in "".join(traceback.format_exception(caught.value))
    assert not prefetching()


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distrag-prefetch"]


def test_stopping_early_ends_the_thread(parts: tuple[Collate, View]) -> None:
    collate, view = parts
    loader = Loader(collate, view, sampler_of(view, collate), prefetch=2)
    batches: Iterator[RaggedBatch] = iter(loader)
    assert next(batches).step == 0
    assert prefetching()
    batches.close()
    assert not prefetching()
    for batch in loader:
        if batch.step == 1:
            break
    del batch
    assert [batch.step for batch in loader] == list(range(len(loader)))


def test_it_works_ahead_by_prefetch_batches_and_no_more(parts: tuple[Collate, View]) -> None:
    collate, view = parts
    built: list[int] = []

    class Counting(Collate):
        def __call__(self, *args: object, **settings: object) -> RaggedBatch:
            built.append(settings["step"])
            return super().__call__(*args, **settings)

    loader = Loader(Counting(collate.store, DataConfig(), task="next_item"), view, sampler_of(view, collate), prefetch=3)
    batches = iter(loader)
    next(batches)
    threading.Event().wait(0.2)
    assert built == [0, 1, 2, 3]
    batches.close()
    assert loader.wait_s > 0


def test_a_resumed_loader_gives_exactly_the_rest(parts: tuple[Collate, View]) -> None:
    collate, view = parts
    sampler = sampler_of(view, collate)
    whole = list(Loader(collate, view, sampler))
    sampler.load_state_dict(sampler.state_dict(5))
    assert all(same(one, other) for one, other in zip(whole[5:], Loader(collate, view, sampler), strict=True))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_next_epoch_may_be_set_while_this_one_is_read(parts: tuple[Collate, View], prefetch: int) -> None:
    collate, view = parts
    sampler = sampler_of(view, collate)
    wanted = list(Loader(collate, view, sampler))
    batches = iter(Loader(collate, view, sampler, prefetch=prefetch))
    got = [next(batches)]
    sampler.set_epoch(1)
    got += batches
    assert all(same(one, other) for one, other in zip(wanted, got, strict=True))


def test_padding_share_of_nothing_is_nothing() -> None:
    assert padding_share(np.zeros(0, np.int64)) == padding_share(np.zeros(3, np.int64)) == 0
    assert padding_share(np.array([1, 3])) == pytest.approx(1 / 3)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_arrive_whole_on_the_gpu(parts: tuple[Collate, View], prefetch: int) -> None:
    collate, view = parts
    sampler = sampler_of(view, collate)
    there = Loader(collate, view, sampler, device="cuda", prefetch=prefetch)
    for one, other in zip(there, Loader(collate, view, sampler), strict=True):
        assert one.samples.device.type == "cuda"
        assert same(one.to(torch.device("cpu")), other)
