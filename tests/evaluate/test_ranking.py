"""Ranks equal a full sort of the catalogue, wherever the rows lie and whoever holds the queries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from distrag.data.split import View
from distrag.evaluate import HeldOut, RankingEvaluator, Tile, build_catalogue, rank_targets, ranking_metrics
from distrag.evaluate.catalogue import Shard
from distrag.evaluate.scoring import NAN, NO_TARGET, SEEN, UNKNOWN
from distrag.world import World, start_world
from tests.evaluate.reference import Case, build_case, slow_ranks
from tests.ranks import run_ranks

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
SMALL = Tile(queries=16, rows=32)


def _layouts(table: torch.Tensor, rank: int, size: int) -> dict[str, list[Shard]]:
    """This rank's shards under every sharding; from two ranks on, one rank holds no rows, and one no columns."""
    num_rows, dim = table.shape
    cuts = [0, *sorted([num_rows // 3] * (size > 1) + [num_rows // 3] * (size > 2) + [num_rows - 2] * (size > 3)), num_rows]
    columns = [0, 3, *[dim] * size] if size > 1 else [0, dim]
    a, b, c, d = cuts[rank], cuts[rank + 1], columns[rank], columns[rank + 1]
    whole = (0, 0, table)
    return {
        "row_wise": [(a, 0, table[a:b])],
        "two_blocks": [(a, 0, table[a : (a + b) // 2]), ((a + b) // 2, 0, table[(a + b) // 2 : b])],
        "table_wise": [whole] if rank == size - 1 else [],
        "replicated": [whole],
        "column_wise": [(0, c, table[:, c:d])],
        "grid": [(0, c, table[:50, c:d]), (50, c, table[50:, c:d])],
    }


def _shares(num_samples: int, size: int) -> list[np.ndarray]:
    """Uneven shares of shuffled samples; the last of three and more ranks has none."""
    order = np.random.default_rng(size).permutation(num_samples)
    return np.split(order, sorted([num_samples // 4] * (size > 1) + [num_samples] * (size > 2) + [num_samples // 4 + 5] * (size > 3)))


def _rank(world: World, case: Case, shards: list[Shard], **options: int) -> tuple[np.ndarray, dict[str, int | float]]:
    catalogue = build_catalogue(world, shards, *case.table.shape, chunk_rows=40)
    evaluator = RankingEvaluator(world, catalogue, case.held_out, tile=SMALL, **options)
    shares = _shares(len(case.queries), world.size)
    for step in range(3):
        samples = [np.array_split(share, 3)[step] for share in shares]
        evaluator.add(case.queries[samples[world.rank]], samples)
    metrics = evaluator.result()
    return evaluator.ranks, metrics


def _rank_all_layouts(case: Case) -> dict[str, tuple[np.ndarray, dict[str, int | float]]]:
    world = start_world("cpu")
    return {name: _rank(world, case, shards, flush_at=20) for name, shards in _layouts(case.table, world.rank, world.size).items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_equal_a_full_sort_whatever_the_sharding(world_size: int) -> None:
    case = build_case(seed=1)
    wanted = slow_ranks(case)
    alone = _rank(ALONE, case, [(0, 0, case.table)])[1]
    assert {UNKNOWN, SEEN, NAN, NO_TARGET} <= set(wanted.tolist())
    for of_rank in run_ranks(_rank_all_layouts, world_size, case):
        for name, (ranks, metrics) in of_rank.items():
            assert ranks.tolist() == wanted.tolist(), name
            assert metrics == alone, name  # to the last bit


@pytest.mark.parametrize("seed", range(20))
def test_ranks_equal_a_full_sort_for_any_size_and_tile(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = build_case(seed, int(rng.integers(3, 200)), int(rng.integers(1, 20)), int(rng.integers(1, 90)))
    catalogue = build_catalogue(ALONE, [(0, 0, case.table)], *case.table.shape)
    seen, offsets = case.held_out.take_seen(np.arange(len(case.queries)))
    tile = Tile(int(rng.integers(1, 70)), int(rng.integers(1, 90)))
    ranks = rank_targets(ALONE, catalogue, case.queries, [len(case.queries)], case.held_out.targets, seen, offsets, tile=tile)
    assert ranks.tolist() == slow_ranks(case).tolist()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_each_read_only_their_own_samples_give_the_same(world_size: int) -> None:
    case = build_case(seed=1)
    shares, whole = _shares(len(case.queries), world_size), case.held_out

    def rank() -> tuple[np.ndarray, dict[str, int | float]]:
        world = start_world("cpu")
        own = shares[world.rank]
        targets, items = np.full_like(whole.targets, -99), np.full_like(whole.items, 7)  # of others only nonsense is here
        targets[own] = whole.targets[own]
        for first, end in zip(whole.first[own], whole.end[own], strict=True):
            items[first:end] = whole.items[first:end]
        apart = dataclasses.replace(whole, targets=targets, items=items, apart=True)
        return _rank(world, dataclasses.replace(case, held_out=apart), [(0, 0, case.table)], flush_at=20)

    wanted = _rank(ALONE, case, [(0, 0, case.table)])
    for ranks, metrics in run_ranks(rank, world_size):
        assert ranks.tolist() == wanted[0].tolist()
        assert metrics == wanted[1]


def _float_case() -> Case:
    """64-wide float vectors of which many rows are copies, spread over the catalogue."""
    rng = np.random.default_rng(7)
    table = rng.normal(size=(12, 64)).astype(np.float32)[rng.integers(0, 12, 3001)]
    targets, nothing = rng.integers(1, 3001, 200), np.zeros(200, np.int64)
    queries = torch.from_numpy(rng.normal(size=(200, 64)).astype(np.float32))
    return Case(torch.from_numpy(table), queries, HeldOut(targets, np.zeros(0, np.int32), nothing, nothing))


def test_copies_of_a_row_tie_exactly_also_between_shards_and_go_by_item_number() -> None:
    case = _float_case()
    wanted = slow_ranks(case).tolist()

    def rank() -> list[list[int]]:
        world = start_world("cpu")
        layouts = _layouts(case.table, world.rank, world.size)
        return [_rank(world, case, layouts[name])[0].tolist() for name in ("row_wise", "column_wise", "replicated")]

    for size in (1, 3):
        assert all(ranks == wanted for of_rank in run_ranks(rank, size) for ranks in of_rank)


def test_all_scores_equal_ranks_by_item_number_and_skips_the_unknown_row() -> None:
    held_out = HeldOut(np.array([1, 3, 5]), np.array([2, 2, 0]), np.array([0, 0, 0]), np.array([0, 3, 3]))
    case = Case(torch.ones(6, 1), torch.ones(3, 1), held_out)
    assert _rank(ALONE, case, [(0, 0, case.table)])[0].tolist() == [1, 2, 4]


def test_a_nan_score_is_never_a_hit_and_is_counted() -> None:
    table = torch.tensor([[0.0], [torch.nan], [3.0], [2.0]])
    nothing = np.zeros(3, np.int64)
    case = Case(table, torch.tensor([[1.0], [torch.nan], [1.0]]), HeldOut(np.array([1, 2, 3]), np.zeros(0, np.int64), nothing, nothing))
    ranks, metrics = _rank(ALONE, case, [(0, 0, table)])
    assert ranks.tolist() == [NAN, NAN, 2]
    assert (metrics["users"], metrics["num_nan"], metrics["num_nonfinite_items"]) == (3, 2, 1)
    assert metrics["hr@5"] == 1 / 3


def test_a_target_that_was_seen_or_is_unknown_is_a_miss_and_one_that_is_absent_no_user() -> None:
    first = np.zeros(4, np.int64)
    held_out = HeldOut(np.array([1, 2, 0, -1]), np.array([2]), first, first + 1)
    case = Case(torch.tensor([[9.0], [1.0], [2.0]]), torch.ones(4, 1), held_out)
    ranks, metrics = _rank(ALONE, case, [(0, 0, case.table)])
    assert ranks.tolist() == [1, SEEN, UNKNOWN, NO_TARGET]
    assert (metrics["users"], metrics["num_seen_targets"], metrics["num_unknown"], metrics["hr@5"]) == (3, 1, 1, 1 / 3)


def test_two_samples_on_four_ranks_count_two() -> None:
    case = build_case(3, num_samples=2)

    def rank() -> int | float:
        world = start_world("cpu")
        evaluator = RankingEvaluator(world, build_catalogue(world, [(0, 0, case.table)], *case.table.shape), case.held_out)
        shares = [np.arange(2)[r : r + 1] for r in range(world.size)]
        evaluator.add(case.queries[shares[world.rank]], shares)
        return evaluator.result()["users"]

    assert run_ranks(rank, 4) == [2] * 4


def test_no_samples_at_all_give_zeros_and_not_nan() -> None:
    case = build_case(0, num_samples=0)
    metrics = _rank(ALONE, case, [(0, 0, case.table)])[1]
    assert (metrics["users"], metrics["ndcg@10"]) == (0, 0.0)


def test_metrics_of_known_ranks() -> None:
    metrics = ranking_metrics(np.array([1, 3, 11, SEEN, NO_TARGET]), (3, 10))
    assert metrics["users"] == 4
    assert (metrics["hr@3"], metrics["ndcg@3"], metrics["mrr@3"]) == (0.5, (1 + 0.5) / 4, (1 + 1 / 3) / 4)
    assert metrics["hr@10"] == 0.5


def test_seen_items_are_the_whole_row_and_not_the_truncated_history() -> None:
    one = np.array([0])
    view = View(rows=one, begin=np.array([3]), end=np.array([4]), next=np.array([4]), first=one, num_cut=3)
    held_out = HeldOut.of(view, np.array([4, 3, 2, 1, 5], np.uint8))
    assert held_out.targets.tolist() == [5]
    assert held_out.take_seen(one)[0].tolist() == [4, 3, 2, 1]
    oldest = View(rows=one, begin=one, end=np.array([2]), next=np.array([4]), first=one, num_cut=2)
    assert HeldOut.of(oldest, held_out.items).take_seen(one)[0].tolist() == [4, 3, 2, 1], "what lies between the window and the target too"


def test_rows_are_scored_where_they_lie_and_no_rank_holds_the_table() -> None:
    table = build_case(0, num_rows=100).table

    def rows() -> dict[str, tuple[int, bool]]:
        world = start_world("cpu")
        out = {}
        for name, shards in _layouts(table, world.rank, world.size).items():
            blocks = build_catalogue(world, shards, *table.shape).blocks
            inside = all(block.untyped_storage().data_ptr() == table.untyped_storage().data_ptr() for _, block in blocks)
            out[name] = (sum(len(block) for _, block in blocks), inside)
        return out

    first, second = run_ranks(rows, 2)
    in_place = {"row_wise": (33, True), "two_blocks": (33, True), "table_wise": (0, True), "replicated": (50, True)}
    assert first == in_place | {"column_wise": (50, False), "grid": (50, False)}
    assert second["row_wise"] == (67, True)


def test_shards_that_do_not_cover_the_table_once_are_refused_on_every_rank() -> None:
    table = torch.ones(10, 4)

    def refusals() -> list[str]:
        world = start_world("cpu")
        gap = [(0, 0, table[:4]), (5, 0, table[5:])]
        overlap = [(0, 0, table[:6]), (5, 0, table[5:])]
        columns = [(0, 0, table[:, :2]), (0, 2, table[:, 2:3])]
        texts = []
        for parts in (gap, overlap, columns):
            with pytest.raises(ValueError, match="do not cover the item table exactly once") as error:
                build_catalogue(world, [parts[world.rank]], 10, 4)
            texts.append(str(error.value))
        return texts

    first, second = run_ranks(refusals, 2)
    assert first == second


def test_half_tables_and_training_precision_do_not_round_the_scores() -> None:
    case = _float_case()
    half = case.table.bfloat16()
    case.table = half.float()
    with torch.autocast("cpu", torch.bfloat16):
        ranks = _rank(ALONE, case, [(0, 0, half)])[0]
    assert ranks.tolist() == slow_ranks(case).tolist()


@pytest.mark.gpu
def test_ranks_equal_a_full_sort_on_cuda() -> None:
    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    for tile in (SMALL, Tile.of(world.device)):
        for case in (build_case(1), _float_case()):
            catalogue = build_catalogue(world, [(0, 0, case.table.cuda())], *case.table.shape)
            evaluator = RankingEvaluator(world, catalogue, case.held_out, tile=tile)
            evaluator.add(case.queries.cuda(), [np.arange(len(case.queries))])
            evaluator.result()
            assert evaluator.ranks.tolist() == slow_ranks(case).tolist()


def test_float_scores_give_the_same_ranks_at_every_world_size() -> None:
    case = _float_case()
    case.table = torch.randn(3001, 64, generator=torch.Generator().manual_seed(1))

    def rank() -> list[int]:
        world = start_world("cpu")
        return _rank(world, case, _layouts(case.table, world.rank, world.size)["row_wise"])[0].tolist()

    results = [ranks for size in (1, 2, 4) for ranks in run_ranks(rank, size)]
    assert all(ranks == results[0] for ranks in results)
