"""Popularity through the evaluator equals the golden numbers to the last digit, at every world size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from distrag.data.store import Store
from distrag.data.write import write_store
from distrag.evaluate import HeldOut, evaluate_popularity
from distrag.evaluate.popularity import rank_by_score
from distrag.world import World, start_world
from tests.ranks import run_ranks

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
BLOCKS = {"all": "popularity_over_all_interactions", "train": "popularity_over_sequence[:-2]"}
FILES = ("amazon-beauty-s3", "amazon-sports-s3", "lastfm-s3", "ml-1m", "amazon-beauty-bert4rec", "ml-100k")


def _store(folder: Path, file: Path) -> Store:
    lists = pq.read_table(file, columns=["item_id"])["item_id"].combine_chunks()
    vocabulary, rows = np.unique(lists.values.to_numpy(), return_inverse=True)
    tables = {"item_id": len(vocabulary) + 1}
    return write_store(folder / "store", history={"item_id": rows + 1}, offsets=lists.offsets.to_numpy(), tables=tables)


def _both(store: Store) -> dict[str, dict[str, int | float]]:
    world = start_world("cpu") if torch.distributed.is_initialized() else ALONE
    return {kind: evaluate_popularity(store, world, kind) for kind in ("all", "train")}


def _golden(folder: Path, name: str) -> dict[str, dict[str, int | float]]:
    golden = json.loads((folder / "golden_popularity.json").read_text())
    return {kind: golden[block][name] for kind, block in BLOCKS.items()}


def _assert_golden(got: dict[str, dict[str, int | float]], wanted: dict[str, dict[str, int | float]]) -> None:
    assert {kind: {key: round(got[kind][key], 6) for key in keys} for kind, keys in wanted.items()} == wanted


@pytest.mark.parametrize("name", FILES)
def test_popularity_equals_the_golden_numbers_alone(shared_data: Path, tmp_path: Path, name: str) -> None:
    _assert_golden(_both(_store(tmp_path, shared_data / f"{name}.parquet")), _golden(shared_data, name))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["lastfm-s3", "ml-100k", "amazon-beauty-s3"])
def test_popularity_equals_the_golden_numbers_on_several_ranks(shared_data: Path, tmp_path: Path, name: str, world_size: int) -> None:
    store = _store(tmp_path, shared_data / f"{name}.parquet")
    alone = _both(store)
    _assert_golden(alone, _golden(shared_data, name))
    for got in run_ranks(_both, world_size, store):
        assert got == alone  # every metric, to the last bit


def test_train_popularity_leaves_out_the_two_held_out_events_of_each_user(tmp_path: Path) -> None:
    # Item 3 leads over all events (5 times, item 1 3 times), item 1 over train events (3 times, item 3 twice).
    rows = [[1, 2, 3], [1, 3, 4], [1, 4, 3], [3, 3]]
    offsets = np.cumsum([0, *map(len, rows)])
    store = write_store(tmp_path / "store", history={"item": np.concatenate(rows)}, offsets=offsets)
    over_all, train = _both(store).values()
    assert over_all["users"] == train["users"] == 3
    # Order over all: 3, 1, 4, 2; over train: 1, 3, 2, 4. Targets 3, 4, 3, of users that have seen (1, 2), (1, 3), (1, 4).
    assert over_all["mrr@5"] == 1.0
    assert train["mrr@5"] == pytest.approx((1 + 1 / 2 + 1) / 3)


def test_a_store_without_positions_or_long_enough_rows_counts_no_users(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", history={"item": np.array([1, 2])}, offsets=np.array([0, 0, 2]))
    assert _both(store)["train"]["users"] == 0


def test_counts_beyond_float32_still_rank_exactly() -> None:
    one = np.zeros(1, np.int64)
    held_out = HeldOut(np.array([1]), np.zeros(0, np.int64), one, one)
    assert rank_by_score(ALONE, np.array([0, 2**24, 2**24 + 1]), held_out, (1, 2))["mrr@2"] == 0.5


def test_an_unknown_kind_or_a_missing_feature_is_named(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", history={"item": np.array([1, 2])}, offsets=np.array([0, 2]))
    with pytest.raises(ValueError, match="all or train"):
        evaluate_popularity(store, ALONE, "some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="No such id feature"):
        evaluate_popularity(store, ALONE, target="category")
