"""Windows of histories: where they lie, what follows them, and that a drawn epoch is the same for everyone who asks."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.config import read_config
from distrag.data.config import DataConfig
from distrag.data.split import SplitConfig, Task, View, build_views
from distrag.data.store import Store
from distrag.data.windows import DRAWN, POLICIES, Truncate, cut
from distrag.data.write import write_store
from tests.ranks import run_ranks

SPLITS: list[tuple[Task, SplitConfig]] = [
    ("next_item", SplitConfig()),
    ("next_item", SplitConfig(kind="row", valid_share=0.3, test_share=0.3)),
    ("next_item", SplitConfig(kind="time", time_valid=6, time_test=9)),
    ("conversion", SplitConfig(kind="row", valid_share=0.3, test_share=0.3)),
    ("conversion", SplitConfig(kind="time", column="asked_at", time_valid=6, time_test=9)),
]


def store_of(path: Path, lengths: list[int]) -> Store:
    """Histories whose events are numbered through; the k-th event of each is at second k, and row i asks at second i mod 12."""
    total, n = sum(lengths), len(lengths)
    return write_store(
        path,
        history={"item_id": np.arange(total), "time": np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)])},
        offsets=np.cumsum([0, *lengths]),
        tables={"item_id": total + 1},
        context={"asked_at": np.arange(n) % 12},
        features={"time": {"kind": "time"}, "asked_at": {"kind": "time"}},
        label=np.zeros(n),
    )


def whole_histories(lengths: np.ndarray, *, next_item: bool = True) -> View:
    """Samples of rows that hold one event more than their history, as a train view before it is cut."""
    starts = np.concatenate([[0], np.cumsum(lengths + next_item)[:-1]]).astype(np.int64)
    end = starts + lengths
    following = np.where(lengths > 0, end, -1) if next_item else np.full(len(lengths), -1)
    return View(np.arange(len(lengths)), starts, end, following, starts, 0)


def arrays(view: View) -> list[list[int]]:
    return [getattr(view, name).tolist() for name in ("rows", "begin", "end", "next", "first")]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every length from 0 to 14 in every part."""
    return store_of(tmp_path_factory.mktemp("windows") / "s", [i * 7 % 15 for i in range(300)])


@pytest.mark.parametrize("truncate", POLICIES)
@pytest.mark.parametrize(("task", "split"), SPLITS, ids=lambda value: value if isinstance(value, str) else value.kind)
@settings(max_examples=25)
@given(max_len=st.integers(1, 15), share=st.floats(0.6, 1), seed=st.integers(0, 2**31), epoch=st.integers(0, 50), fold=st.booleans())
def test_windows_lie_inside_their_part_and_are_followed_by_what_is_predicted(
    mixed: Store, task: Task, split: SplitConfig, truncate: Truncate, max_len: int, share: float, seed: int, epoch: int, fold: bool
) -> None:
    common: dict[str, Any] = {"task": task, "fold_valid": fold}
    whole = build_views(mixed, split, max_len=1000, **common)
    share = share if max_len > 1 else 1.0
    views = build_views(mixed, split, max_len=max_len, truncate=truncate, mean_cost_share=share, seed=seed, **common)
    newest = build_views(mixed, split, max_len=max_len, **common)
    for part, full in whole.items():
        view = views[part].at_epoch(epoch)
        assert view.rows.tolist() == full.rows.tolist()
        assert view.first.tolist() == full.first.tolist()
        assert (view.first <= view.begin).all()
        assert (view.begin <= view.end).all()
        assert (view.end <= full.end).all()
        assert (view.lengths <= np.minimum(full.lengths, max_len)).all()
        assert (view.lengths >= np.minimum(full.lengths, 1)).all()
        assert view.num_cut == full.lengths.sum() - view.lengths.sum()
        if truncate != "stochastic" or part != "train":
            assert view.lengths.tolist() == np.minimum(full.lengths, max_len).tolist()
        if truncate == "oldest":
            assert view.begin.tolist() == full.first.tolist()
        elif truncate != "random_window" or part != "train":
            assert view.end.tolist() == full.end.tolist()
        if part != "train":
            assert view.next.tolist() == full.next.tolist()
            assert task == "conversion" or view.seen_end.tolist() == full.next.tolist()
            assert truncate == "oldest" or arrays(view) == arrays(newest[part])
    train, full = views["train"].at_epoch(epoch), whole["train"]
    assert ((train.next >= 0) == (full.next >= 0)).all()
    has = train.next >= 0
    assert (train.next[has] == train.end[has]).all()
    assert (train.next[has] <= full.next[has]).all()
    shown = {at for a, b in zip(train.begin, train.end, strict=True) for at in range(a, b)} | set(train.next[has].tolist())
    held = views["test"].next.tolist() + ([] if fold else views["valid"].next.tolist())
    assert not shown & set(held)


def test_the_oldest_events_are_followed_by_the_next_one_and_valid_keeps_what_it_holds_out(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [8])
    views = build_views(store, SplitConfig(), task="next_item", max_len=3, truncate="oldest")
    assert [arrays(views[part])[1:4] for part in ("train", "valid", "test")] == [[[0], [3], [3]], [[0], [3], [6]], [[0], [3], [7]]]
    assert [views[part].num_cut for part in ("train", "valid", "test")] == [2, 3, 4]
    assert views["valid"].seen_end.tolist() == [6]
    whole_row = build_views(store, SplitConfig(kind="row", valid_share=0, test_share=0), task="conversion", max_len=3, truncate="oldest")
    assert arrays(whole_row["train"])[1:4] == [[0], [3], [-1]]


@pytest.mark.parametrize("truncate", DRAWN)
def test_epochs_differ_and_come_again_with_their_seed(truncate: Truncate) -> None:
    whole = whole_histories(np.full(200, 50))
    view = cut(whole, truncate, 20, seed=3, tau=5.0, follows=True)
    first = arrays(view)
    epochs = [arrays(view.at_epoch(epoch)) for epoch in range(4)]
    assert epochs[0] == first
    assert len({str(epoch) for epoch in epochs}) == 4
    again = cut(whole, truncate, 20, seed=3, tau=5.0, follows=True)
    assert [arrays(again.at_epoch(epoch)) for epoch in (3, 1, 2)] == [epochs[3], epochs[1], epochs[2]]
    assert arrays(again.at_epoch(3).at_epoch(1)) == epochs[1]
    assert arrays(again.at_epoch(3).at_epoch(0)) == first
    assert arrays(cut(whole, truncate, 20, seed=4, tau=5.0, follows=True)) != first
    assert arrays(view) == first, "a view never changes"


@pytest.mark.parametrize("truncate", DRAWN)
def test_an_epoch_is_drawn_once_and_does_not_travel_to_workers(truncate: Truncate) -> None:
    view = cut(whole_histories(np.full(1000, 50)), truncate, 20, seed=3, tau=5.0, follows=True)
    size = len(pickle.dumps(view))
    drawn = view.at_epoch(2)
    assert view.at_epoch(2) is drawn
    assert drawn.at_epoch(2) is drawn
    assert len(pickle.dumps(view)) == size
    sent: View = pickle.loads(pickle.dumps(view))
    assert arrays(sent.at_epoch(2)) == arrays(drawn)


def test_windows_that_never_change_are_the_same_view_in_every_epoch() -> None:
    long, short = whole_histories(np.full(5, 50)), whole_histories(np.array([0, 1, 3, 20]))
    for view in (cut(long, "newest", 20), cut(long, "oldest", 20), cut(short, "random_window", 20), cut(long, "stochastic", 20, tau=20.0)):
        assert view.at_epoch(7) is view
    plain = View(*(np.zeros(1, np.int64),) * 5, 0)
    assert plain.at_epoch(7) is plain


@pytest.mark.parametrize("truncate", DRAWN)
def test_what_a_row_draws_does_not_depend_on_the_rows_beside_it(truncate: Truncate) -> None:
    whole = whole_histories(np.arange(300) % 70)
    some = np.arange(0, 300, 7)
    fewer = View(whole.rows[some], whole.begin[some], whole.end[some], whole.next[some], whole.first[some], 0)
    together = cut(whole, truncate, 20, seed=1, tau=5.0, follows=True).at_epoch(3)
    alone = cut(fewer, truncate, 20, seed=1, tau=5.0, follows=True).at_epoch(3)
    assert alone.begin.tolist() == together.begin[some].tolist()
    assert alone.next.tolist() == together.next[some].tolist()


def test_windows_start_everywhere_alike() -> None:
    whole = whole_histories(np.full(60_000, 14))
    view = cut(whole, "random_window", 10, seed=8, follows=True)
    for epoch in (0, 1):
        starts = np.bincount(view.at_epoch(epoch).begin - view.first)
        assert len(starts) == 5
        assert ((starts - 12_000) ** 2 / 12_000).sum() < 25  # chi-square of 4 degrees of freedom: p of 5e-5
    few = cut(whole_histories(np.full(3, 14)), "random_window", 10, seed=8)
    assert {int((few.at_epoch(epoch).begin - few.first)[0]) for epoch in range(60)} == {0, 1, 2, 3, 4}


def digests(view: View) -> list[str]:
    drawn = [view.at_epoch(epoch) for epoch in (0, 1, 5)]
    return [hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in (v.begin, v.end, v.next))).hexdigest() for v in drawn]


def drawn_on_a_rank(path: str, truncate: Truncate) -> list[str]:
    from distrag.data.store import open_store

    views = build_views(open_store(path), SplitConfig(), task="next_item", max_len=20, truncate=truncate, mean_cost_share=0.6, seed=11)
    return digests(views["train"])


@pytest.mark.parametrize("truncate", DRAWN)
def test_all_ranks_of_any_number_of_them_draw_the_same(tmp_path: Path, truncate: Truncate) -> None:
    path = str(store_of(tmp_path / "s", [3 * i % 71 for i in range(400)]).path)
    alone = drawn_on_a_rank(path, truncate)
    assert len(set(alone)) == 3
    assert run_ranks(drawn_on_a_rank, 2, path, truncate) == [alone] * 2
    assert run_ranks(drawn_on_a_rank, 3, path, truncate) == [alone] * 3


def test_a_refit_on_valid_too_trains_by_the_law_that_valid_has_chosen(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [3 * i % 71 for i in range(400)])
    split = SplitConfig(kind="row", valid_share=0.5, test_share=0.1)
    first, again = (
        build_views(store, split, task="next_item", max_len=30, truncate="stochastic", fold_valid=fold)["train"] for fold in (False, True)
    )
    assert len(again) > len(first)
    assert again.law == first.law
    where = np.searchsorted(again.rows, first.rows)
    assert again.at_epoch(4).begin[where].tolist() == first.at_epoch(4).begin.tolist()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"max_len": 0}, "at least 1"),
        ({"truncate": "latest"}, "newest, oldest, random_window, stochastic"),
        ({"mean_cost_share": 0.0}, "above 0, at most 1"),
        ({"mean_cost_share": 1.01}, "above 0, at most 1"),
        ({"mean_cost_share": float("nan")}, "above 0, at most 1"),
        ({"truncate": "stochastic", "mean_cost_share": 0.01}, "at least 0.0492, which leaves one event of each history"),
    ],
)
def test_cuts_that_cannot_be_made_are_refused_in_five_parts(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    store = store_of(tmp_path / "s", [0, 2, 33, 35])  # train histories of 0, 1, 30 and 32 events, cut to 30
    arguments: dict[str, Any] = {"max_len": 30, **keys}
    with pytest.raises(ValueError, match=rf"(?s)got: .*wanted: {told}\n.*where: +data\..*to do: "):
        build_views(store, SplitConfig(), task="next_item", **arguments)


def test_the_share_that_a_refusal_names_can_be_reached(tmp_path: Path) -> None:
    store = store_of(tmp_path / "s", [3, 20, 30])
    told = ""
    try:
        build_views(store, SplitConfig(), task="next_item", max_len=50, truncate="stochastic", mean_cost_share=0.01)
    except ValueError as error:
        told = str(error).split("--data.mean_cost_share to ")[1].split(" ")[0]
    views = build_views(store, SplitConfig(), task="next_item", max_len=50, truncate="stochastic", mean_cost_share=float(told))
    assert views["train"].lengths.min() == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--data.truncate=latest"],
        ["--data.truncate=null"],
        ["--data.mean_cost_share=0"],
        ["--data.mean_cost_share=1.5"],
        ["--data.mean_cost_share=nan"],
        ["--data.mean_cost_share=half"],
    ],
)
def test_a_config_refuses_what_is_no_cut(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"(?s)got: .*wanted: .*where: .*to do: "):
        read_config(words)
    assert read_config([]).data == DataConfig()
    assert read_config(["--data.truncate=stochastic", "--data.mean_cost_share=1"]).data.truncate == "stochastic"
