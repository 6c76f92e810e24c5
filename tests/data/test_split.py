"""Windows of a row: what is history, what is predicted, and to which part a row belongs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrag.data.counter import stream, uniform
from distrag.data.split import SplitConfig, View, build_views, row_parts
from distrag.data.store import Store
from distrag.data.write import write_store


def windows(view: View, values: np.ndarray) -> list[tuple[int, list[int], int | None]]:
    rows = zip(view.rows, view.begin, view.end, view.next, strict=True)
    return [(int(r), values[b:e].tolist(), int(values[n]) if n >= 0 else None) for r, b, e, n in rows]


def events(path: Path, rows: list[list[int]], times: list[list[int]] | None = None, **more: object) -> Store:
    history: dict[str, object] = {"item_id": np.array([x for row in rows for x in row], np.int64)}
    if times is not None:
        history["time"] = np.array([x for row in times for x in row], np.int64)
    offsets = np.cumsum([0, *map(len, rows)])
    features = {"time": {"kind": "time"}, "asked_at": {"kind": "time"}}
    return write_store(path, history=history, offsets=offsets, features=features, **more)  # type: ignore[arg-type]


def test_leave_one_out_keeps_the_last_for_test_and_the_one_before_for_valid(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [[1, 2, 3, 4, 5], [], [6], [7, 8], [9, 10, 11]])
    views = build_views(store, SplitConfig(), task="next_item", max_len=10)
    items = store.position("item_id")
    assert windows(views["train"], items) == [(0, [1, 2], 3), (1, [], None), (2, [], None), (3, [7], 8), (4, [], None)]
    assert windows(views["valid"], items) == [(0, [1, 2, 3], 4), (4, [9], 10)]
    assert windows(views["test"], items) == [(0, [1, 2, 3, 4], 5), (4, [9, 10], 11)]
    assert views["test"].first.tolist() == [0, 8]


def test_cutting_keeps_the_newest_events_of_every_feature(tmp_path: Path) -> None:
    store = write_store(
        tmp_path / "s",
        history={"item_id": [1, 2, 3, 4, 5, 6], "time": [10, 20, 30, 40, 50, 60], "weight": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]},
        offsets=[0, 6],
        features={"time": {"kind": "time"}},
        label=[1],
    )
    view = build_views(store, SplitConfig(kind="row", valid_share=0, test_share=0), task="conversion", max_len=3)["train"]
    window = slice(int(view.begin[0]), int(view.end[0]))
    assert store.position("item_id")[window].tolist() == [4, 5, 6]
    assert store.position("time")[window].tolist() == [40, 50, 60]
    assert store.position("weight")[window].tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert view.lengths.tolist() == [3]
    assert view.num_cut == 3


def test_what_is_cut_is_counted_for_each_part(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [[1, 2, 3, 4, 5, 6], [1, 2]])
    views = build_views(store, SplitConfig(), task="next_item", max_len=2)
    assert windows(views["train"], store.position("item_id"))[0] == (0, [2, 3], 4)
    assert {part: view.num_cut for part, view in views.items()} == {"train": 1, "valid": 2, "test": 3}
    assert views["test"].first.tolist() == [0]


def test_by_time_nothing_after_a_cut_is_in_the_history_before_it(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [[1, 2, 3, 4], [5, 6], [7]], [[1, 5, 10, 20], [10, 30], [25]])
    views = build_views(store, SplitConfig(kind="time", time_valid=10, time_test=20), task="next_item", max_len=10)
    items = store.position("item_id")
    assert windows(views["train"], items) == [(0, [1], 2), (1, [], None), (2, [], None)]
    assert windows(views["valid"], items) == [(0, [1, 2], 3), (1, [], 5)]
    assert windows(views["test"], items) == [(0, [1, 2, 3], 4), (1, [5], 6), (2, [], 7)]


def test_cuts_in_time_are_found_from_the_shares(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [list(range(1, 101))], [list(range(100))])
    views = build_views(store, SplitConfig(kind="time"), task="next_item", max_len=1000)
    assert views["valid"].next.tolist() == [80]
    assert views["test"].next.tolist() == [90]


def test_by_time_refuses_rows_out_of_order(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [[1, 2], [3, 4, 5]], [[1, 2], [5, 4, 9]])
    with pytest.raises(ValueError, match=r"not in order of time(.|\n)*row 1, position 1"):
        build_views(store, SplitConfig(kind="time"), task="next_item", max_len=10)


def test_by_row_predicts_the_last_event_of_rows_kept_apart(tmp_path: Path) -> None:
    rows = [[i, i + 1, i + 2] for i in range(1, 2001)] + [[1], []]
    store = events(tmp_path / "s", rows)
    views = build_views(store, SplitConfig(kind="row", valid_share=0.1, test_share=0.2), task="next_item", max_len=10)
    together = np.concatenate([view.rows for view in views.values()])
    assert sorted(together.tolist()) == list(range(2002))
    assert {2000, 2001} <= set(views["train"].rows.tolist())
    assert 150 < len(views["valid"]) < 250
    assert 330 < len(views["test"]) < 470
    assert (views["test"].next == store.offsets[views["test"].rows + 1] - 1).all()


def test_conversion_by_row_and_by_time_divide_the_samples(tmp_path: Path) -> None:
    store = events(tmp_path / "s", [[1, 2], [], [3], [4, 5, 6]], context={"asked_at": [10, 20, 30, 40]}, label=[0, 1, 0, 1])
    views = build_views(store, SplitConfig(kind="time", time_valid=20, time_test=40), task="conversion", max_len=2)
    assert [view.rows.tolist() for view in views.values()] == [[0], [1, 2], [3]]
    assert views["test"].lengths.tolist() == [2]
    assert views["valid"].lengths.tolist() == [0, 1]
    assert all((view.next == -1).all() for view in views.values())
    by_row = build_views(store, SplitConfig(kind="row", valid_share=0.5, test_share=0.5), task="conversion", max_len=2)
    assert len(by_row["train"]) == 0
    assert sum(map(len, by_row.values())) == 4


def test_the_part_of_a_row_depends_on_its_number_and_the_seed_alone() -> None:
    split = SplitConfig(kind="row", valid_share=0.3, test_share=0.2, seed=5)
    assert row_parts(100, split).tolist() == row_parts(1000, split)[:100].tolist()
    assert row_parts(100, split).tolist() != row_parts(100, SplitConfig(kind="row", valid_share=0.3, test_share=0.2, seed=6)).tolist()
    assert np.bincount(row_parts(100_000, split)) / 100_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_what_a_seed_gives_stays_the_same_from_version_to_version() -> None:
    parts = row_parts(40, SplitConfig(kind="row", valid_share=0.3, test_share=0.2, seed=5))
    assert "".join(map(str, parts.tolist())) == "2200121200001010012000002220020010101020"
    assert uniform(np.arange(3), 5).tolist() == [0.13463346197202453, 0.023352515697154352, 0.9427605406010304]
    assert stream(1, 7, 2) == 17296313757956345592


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 6))
def test_every_train_event_is_predicted_or_first_and_none_is_in_two_parts(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], max_len: int
) -> None:
    total = sum(lengths)
    path = tmp_path_factory.mktemp("split") / "s"
    store = write_store(path, history={"item_id": np.arange(total)}, offsets=np.cumsum([0, *lengths]), tables={"item_id": total + 1})
    views = build_views(store, SplitConfig(), task="next_item", max_len=max_len)
    train, n = views["train"], np.array(lengths)
    assert len(train) == len(lengths)
    assert (train.lengths <= max_len).all()
    assert (train.lengths == np.minimum(np.maximum(np.where(n >= 3, n - 2, n) - 1, 0), max_len)).all()
    for view in views.values():
        has = view.next >= 0
        assert (view.next[has] == view.end[has]).all()
        assert (view.begin >= view.first).all()
    used = [set(views[part].next.tolist()) - {-1} for part in ("train", "valid", "test")]
    assert sum(map(len, used)) == len(set.union(*used))


@pytest.mark.parametrize(
    ("split", "task", "max_len", "told"),
    [
        (SplitConfig(), "conversion", 5, "does not fit the task"),
        (SplitConfig(kind="row"), "conversion", 0, "data.max_len"),
        (SplitConfig(kind="row", valid_share=0.6, test_share=0.6), "conversion", 5, "Shares out of range"),
        (SplitConfig(kind="time"), "next_item", 5, "No such per-position time feature"),
        (SplitConfig(kind="time", column="asked_at"), "conversion", 5, "No such per-sample time feature"),
        (SplitConfig(kind="half"), "next_item", 5, "Unknown split"),  # type: ignore[arg-type]
        (SplitConfig(kind="row"), "guess", 5, "Unknown task"),
    ],
)
def test_a_split_that_cannot_be_made_is_refused(tmp_path: Path, split: SplitConfig, task: str, max_len: int, told: str) -> None:
    store = events(tmp_path / "s", [[1, 2, 3]])
    with pytest.raises(ValueError, match=told):
        build_views(store, split, task=task, max_len=max_len)  # type: ignore[arg-type]
