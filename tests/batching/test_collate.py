"""Batches hold what the store holds, under the keys and in the order that was asked for."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from distrag.batching.collate import Collate, view_counts
from distrag.data.config import DataConfig
from distrag.data.split import SplitConfig, View, build_views
from distrag.data.store import Store
from tests.batching.stores import small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("batching"))


def whole_rows(store: Store, *, max_len: int = 200) -> View:
    """All events but the last as history, the last as next."""
    begin, end = store.offsets[:-1], np.maximum(store.offsets[1:] - 1, store.offsets[:-1])
    following = np.where(store.lengths > 0, end, -1)
    return View(np.arange(len(end)), np.maximum(begin, end - max_len), end, following, begin.copy(), 0)


def values(batch: object, key: str) -> list[list[int]]:
    jagged = batch.ids[key]
    return [part.tolist() for part in torch.split(jagged.values(), jagged.lengths().tolist())]


def test_a_batch_holds_the_windows_of_its_samples(store: Store) -> None:
    collate = Collate(store, DataConfig(), task="next_item", negatives="none")
    batch = collate(whole_rows(store), np.array([3, 1, 0]), step=4, epoch=2, global_count=7.5, num_tokens_global=99)
    batch.check(collate.table_rows)
    assert collate.keys == ("item_id", "shop", "item_id:next", "time:gap", "city")
    assert values(batch, "item_id") == [[300, 0, 1], [], [1, 2, 3, 4, 5]]
    assert values(batch, "shop") == [[0, 0, 1], [], [1, 2, 0, 1, 2]]
    assert values(batch, "item_id:next") == [[2], [0], [6]]
    assert values(batch, "city") == [[4], [2], [1]]
    assert batch.offsets.tolist() == [0, 3, 3, 8]
    assert batch.samples.tolist() == [3, 1, 0]
    assert batch.labels.tolist() == [0, 0, 1]
    assert batch.weights.tolist() == [1, 2, 1]
    assert batch.context.flatten().tolist() == [2.5, -0.5, 0.5]
    assert np.allclose(batch.numbers[:, 0], [0.9, 1.0, 1.1, 0.0, 0.1, 0.2, 0.3, 0.4])
    assert (batch.step, batch.epoch, batch.global_count, batch.num_tokens_global) == (4, 2, 7.5, 99)
    assert {t.dtype for t in (batch.ids.values(), batch.ids.lengths(), batch.offsets, batch.samples)} == {torch.int64}
    assert {t.dtype for t in (batch.numbers, batch.context, batch.labels, batch.weights)} == {torch.float32}


def test_gaps_are_taken_in_whole_seconds_inside_the_window(store: Store) -> None:
    collate = Collate(store, DataConfig(history=["item_id", "time", "seen"]), task="next_item")
    batch = collate(whole_rows(store), np.array([0]))
    assert torch.allclose(batch.numbers[:, 0], torch.log1p(torch.tensor([0.0, 1.0, 64.0, 0.0, 0.0])))
    assert values(batch, "time:gap") == [[1, 2, 8, 1, 1]]  # 1 + significant bits of 0, 1, 64, 0 and of a step back
    newest = collate(whole_rows(store, max_len=3), np.array([0]))
    assert values(newest, "time:gap") == [[1, 1, 1]]
    assert values(newest, "item_id") == [[3, 4, 5]]


def test_ids_are_the_same_whatever_the_batch_around_them(store: Store) -> None:
    collate = Collate(store, DataConfig(), task="next_item", negatives="per_position", num_negatives=3, seed=5)
    view = whole_rows(store)
    together = collate(view, np.array([2, 0, 3, 1]), epoch=1)
    for key in collate.keys:
        alone = [values(collate(view, np.array([sample]), epoch=1), key)[0] for sample in (2, 0, 3, 1)]
        assert values(together, key) == alone


def test_negatives_are_never_what_the_user_met(store: Store) -> None:
    collate = Collate(store, DataConfig(), task="next_item", negatives="per_position", num_negatives=500)
    batch = collate(whole_rows(store), np.array([0, 1, 2]))
    batch.check(collate.table_rows)
    drawn = values(batch, "item_id:negative")
    assert [len(part) for part in drawn] == [5 * 500, 0, 2 * 500]
    assert not set(drawn[0]) & {0, 1, 2, 3, 4, 5, 6}
    assert not set(drawn[2]) & {0, 2, 4, 6}
    assert batch.ids.keys() == collate(whole_rows(store), np.array([0]), training=False).ids.keys()
    assert values(collate(whole_rows(store), np.array([0]), training=False), "item_id:negative") == [[]]


def test_shared_negatives_lie_on_the_first_sample_and_are_equal_on_all_ranks(store: Store) -> None:
    collate = Collate(store, DataConfig(), task="next_item", negatives="shared", num_negatives=7)
    view = whole_rows(store)
    ranks = [collate(view, np.array(samples, np.int64), step=3, epoch=1) for samples in ([0, 1], [2], [])]
    drawn = [values(batch, "item_id:negative") for batch in ranks]
    assert [[len(part) for part in one] for one in drawn] == [[7, 0], [7], [7]]
    assert drawn[0][0] == drawn[1][0] == drawn[2][0]
    assert values(collate(view, np.array([0]), step=4, epoch=1), "item_id:negative")[0] != drawn[0][0]


@pytest.mark.parametrize("negatives", ["none", "per_position", "shared"])
def test_a_rank_without_samples_gets_one_dummy_that_weighs_nothing(store: Store, negatives: str) -> None:
    collate = Collate(store, DataConfig(), task="next_item", negatives=negatives, num_negatives=4)
    batch = collate(whole_rows(store), np.zeros(0, np.int64), global_count=3.0)
    batch.check(collate.table_rows)
    assert batch.samples.tolist() == [-1]
    assert batch.weights.tolist() == [0]
    assert batch.offsets.tolist() == [0, 0]
    assert batch.numbers.shape == (0, 2)
    assert batch.context.shape == (1, 1)
    assert values(batch, "item_id:next") == values(batch, "city") == [[0]]
    assert values(batch, "item_id") == values(batch, "time:gap") == [[]]
    assert tuple(batch.ids.keys()) == collate.keys
    assert batch.global_count == 3.0


def test_keys_come_in_the_order_asked_for(store: Store) -> None:
    order = ["city", "item_id:next", "item_id:negative", "shop", "time:gap", "item_id"]
    view, samples = whole_rows(store), np.array([0, 2])
    settings = {"task": "next_item", "negatives": "per_position", "num_negatives": 2}
    asked, plain = Collate(store, DataConfig(), key_order=order, **settings), Collate(store, DataConfig(), **settings)
    first, second = asked(view, samples), plain(view, samples)
    first.check(asked.table_rows)
    assert list(first.ids.keys()) == order
    assert all(values(first, key) == values(second, key) for key in order)
    with pytest.raises(ValueError, match="other keys"):
        Collate(store, DataConfig(), key_order=order[:-1], **settings)


def test_conversion_has_no_target_and_counts_weights(store: Store) -> None:
    view = build_views(store, SplitConfig(kind="row", valid_share=0, test_share=0), task="conversion", max_len=4)["train"]
    collate = Collate(store, DataConfig(), task="conversion")
    batch = collate(view, np.array([0, 3]))
    batch.check(collate.table_rows)
    assert collate.keys == ("item_id", "shop", "time:gap", "city")
    assert values(batch, "item_id") == [[3, 4, 5, 6], [300, 0, 1, 2]]
    assert batch.labels.tolist() == [1, 0]
    assert collate.counts(view).tolist() == [1, 2, 0.5, 1]


def test_unknown_items_are_no_targets(store: Store) -> None:
    view = whole_rows(store)
    assert view_counts(view, store, task="next_item", target="item_id").tolist() == [5, 0, 2 * 0.5, 2]
    unweighted = replace(store, columns={k: v for k, v in store.columns.items() if k != "weight"})
    assert view_counts(view, unweighted, task="next_item", target="item_id").tolist() == [5, 0, 2, 2]
    assert view_counts(view, unweighted, task="next_item", target="item_id").dtype == np.float64
    uncounted = replace(unweighted, schema=replace(store.schema, tables=tuple(replace(t, num_unknown=0) for t in store.schema.tables)))
    assert view_counts(view, uncounted, task="next_item", target="item_id").tolist() == [5, 0, 2, 2]
    columns = {name: np.maximum(column, 1) if name == "history:item_id" else column for name, column in uncounted.columns.items()}
    known = replace(uncounted, columns=columns)
    without_last = replace(view, next=np.full(4, -1))
    assert view_counts(view, known, task="next_item", target="item_id").tolist() == [5, 0, 2, 3]
    assert view_counts(without_last, known, task="next_item", target="item_id").tolist() == [4, 0, 1, 2]
    assert view_counts(without_last, unweighted, task="next_item", target="item_id").tolist() == [4, 0, 1, 1]


@pytest.mark.parametrize("bad", [400, 2**33, -1, -2])
def test_an_id_outside_its_table_is_named_with_sample_and_position(store: Store, bad: int) -> None:
    columns = dict(store.columns)
    columns["history:item_id"] = columns["history:item_id"].astype(np.int64)
    columns["history:item_id"][[10, 11]] = bad
    collate = Collate(replace(store, columns=columns), DataConfig(), task="next_item")
    with pytest.raises(ValueError, match="Ids outside") as caught:
        collate(whole_rows(store), np.array([0, 2, 3]))
    for part in (f"[{bad}, {bad}]", "'item_id'", "sample 3", "positions [1, 2]", "0 .. 399"):
        assert part in str(caught.value)


def test_senseless_features_are_refused_by_name(store: Store) -> None:
    with pytest.raises(ValueError, match="itm"):
        Collate(store, DataConfig(history=["itm"]), task="next_item")
    with pytest.raises(ValueError, match="price"):
        Collate(store, DataConfig(target="price"), task="next_item")


def test_a_pickled_collate_maps_the_store_itself(store: Store, tmp_path: Path) -> None:
    plain = small_store(tmp_path)
    plain = replace(plain, schema=copy.copy(plain.schema))
    collate = Collate(plain, DataConfig(), task="next_item", negatives="per_position", num_negatives=2, seed=3)
    sent = pickle.dumps(collate)
    assert len(sent) < 2000
    view = whole_rows(plain)
    one, other = collate(view, np.array([0, 2])), pickle.loads(sent)(view, np.array([0, 2]))
    assert all(values(one, key) == values(other, key) for key in collate.keys)
