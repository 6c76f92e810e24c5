"""The named sources: ml-100k is the known data set wherever it comes from, synthetic data can be learnt and repeated."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from distrag.data.prepare import prepare
from distrag.data.sources import MovieLensConfig, SyntheticConfig, fetch_wheel
from distrag.data.split import SplitConfig, build_views
from distrag.data.store import Store, open_store
from tests.data.rows import at_once

_FETCH = """
import sys
from pathlib import Path
from distrag.data.sources import fetch_wheel
print("ready", flush=True)
sys.stdin.readline()
print(fetch_wheel(Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_wheel(tmp_path_factory.mktemp("cache"))
    except ValueError as error:
        pytest.skip(f"needs a network or a pip mirror to download the wheel: {error}")


def leave_one_out(store: Store) -> tuple[list[list[int]], list[int], list[int]]:
    view = build_views(store, SplitConfig(), task="next_item", max_len=10_000)["test"]
    words = np.concatenate([[-1], store.vocabulary("item_id").to_numpy()])
    items = words[store.position("item_id")]
    windows = zip(view.begin, view.end, strict=True)
    return [items[a:b].tolist() for a, b in windows], items[view.next].tolist(), store.position("timestamp")[view.next].tolist()


def test_ml_100k_of_the_wheel_is_the_published_leave_one_out_data(wheel: Path, shared_data: Path, tmp_path: Path) -> None:
    schema = prepare("ml-100k", tmp_path / "a", ml_100k=MovieLensConfig(path=str(wheel)))
    prepare(shared_data / "ml-100k.parquet", tmp_path / "b")
    ours, theirs = open_store(tmp_path / "a", verify=True), open_store(tmp_path / "b")
    assert leave_one_out(ours) == leave_one_out(theirs)
    assert ours.position("rating").tolist() == theirs.position("rating").tolist()
    assert ours.key is not None
    assert theirs.key is not None
    assert ours.key.tolist() == theirs.key.tolist()
    assert [f.name for f in schema.history] == ["item_id", "rating", "timestamp"]
    assert [f.name for f in schema.context] == ["age", "gender", "occupation"]
    table = pq.read_table(shared_data / "ml-100k.parquet", columns=["age"])
    age = schema.feature("age")
    assert (ours.context("age") * age.std + age.mean).round().tolist() == table["age"].to_pylist()


def test_ml_100k_comes_from_an_unpacked_folder_in_either_format(wheel: Path, tmp_path: Path) -> None:
    known = prepare("ml-100k", tmp_path / "a", ml_100k=MovieLensConfig(path=str(wheel)))
    with zipfile.ZipFile(wheel) as archive:
        events = archive.read("recbole/dataset_example/ml-100k/ml-100k.inter")
        users = archive.read("recbole/dataset_example/ml-100k/ml-100k.user")
    folder = tmp_path / "ml-100k"
    folder.mkdir()
    (folder / "u.data").write_bytes(events.split(b"\n", 1)[1])
    (folder / "u.user").write_bytes(users.split(b"\n", 1)[1].replace(b"\t", b"|"))
    assert prepare("ml-100k", tmp_path / "b", ml_100k=MovieLensConfig(path=str(folder))).content_hash == known.content_hash
    (folder / "u.data").write_bytes(events.split(b"\n", 1)[1].replace(b"196\t242\t3", b"196\t242\t4"))
    with pytest.raises(ValueError, match=r"Not the known file(.|\n)*u.data"):
        prepare("ml-100k", tmp_path / "c", ml_100k=MovieLensConfig(path=str(folder)))


def test_ml_100k_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No ml-100k here(.|\n)*u.data"):
        prepare("ml-100k", tmp_path / "out", ml_100k=MovieLensConfig(path=str(tmp_path)))


def archive_of(folder: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return folder / "a.zip"


def spoilt(path: Path, mark: bytes, offset: int, value: bytes) -> None:
    raw = bytearray(path.read_bytes())
    at = raw.index(mark) + offset
    raw[at : at + len(value)] = value
    path.write_bytes(raw)


def test_archives_that_lie_are_refused_by_name_and_write_nothing(tmp_path: Path) -> None:
    def refused(place: Path, told: str) -> None:
        with pytest.raises(ValueError, match=told) as caught:
            prepare("ml-100k", tmp_path / "out", ml_100k=MovieLensConfig(path=str(place)))
        assert str(place) in str(caught.value)

    refused(archive_of(tmp_path, {"../../u.data": b"x", "/etc/u.user": b"x"}), "Not the known file")
    refused(archive_of(tmp_path, {"u.data": bytes(40 << 20)}), "Not the known file")  # read up to a limit, however much it says to be
    for mark, offset, value in (
        (b"PK\x01\x02", 8, b"\x01"),
        (b"PK\x03\x04", 36, b"\xff" * 4),
        (b"PK\x01\x02", 10, b"\x63"),
        (b"PK\x05\x06", 0, b"x"),
    ):
        path = archive_of(tmp_path, {"u.data": b"1\t2\t3\t4\n" * 50})
        spoilt(path, mark, offset, value)
        refused(path, "The archive cannot be read|Not the known file")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


@pytest.mark.parametrize("what", ["pipe", "zeros", "folder", "gone"])
def test_what_is_no_file_in_the_folder_of_ml_100k_is_passed_over(tmp_path: Path, what: str) -> None:
    place = tmp_path / "x"
    place.mkdir()
    if what == "pipe":
        os.mkfifo(place / "u.data")
    elif what == "folder":
        (place / "u.data").mkdir()
    else:
        (place / "u.data").symlink_to("/dev/zero" if what == "zeros" else "nowhere")
    for path in (place, place / "u.data"):
        with pytest.raises(ValueError, match="No ml-100k here"):
            prepare("ml-100k", tmp_path / "out", ml_100k=MovieLensConfig(path=str(path)))


def test_ml_100k_as_parquet_has_the_same_features(shared_data: Path, tmp_path: Path) -> None:
    schema = prepare("ml-100k", tmp_path / "out", ml_100k=MovieLensConfig(path=str(shared_data / "ml-100k.parquet")))
    assert [f.name for f in schema.history] == ["item_id", "rating", "timestamp"]
    assert schema.feature("age").kind == "number"


def test_two_processes_may_fetch_at_once_and_a_damaged_file_is_fetched_again(wheel: Path, tmp_path: Path) -> None:
    assert wheel.is_file()
    (tmp_path / wheel.name).write_bytes(b"half a download")
    assert at_once(_FETCH, tmp_path) == [str(tmp_path / wheel.name)] * 2
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == [wheel.name]


def synthetic(path: Path, **options: Any) -> Store:
    prepare("synthetic", path, synthetic=SyntheticConfig(**options))
    return open_store(path, verify=True)


def test_synthetic_data_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    one, two = (synthetic(tmp_path / name, num_samples=500, seed=3) for name in ("a", "b"))
    other = synthetic(tmp_path / "c", num_samples=500, seed=4)
    assert one.content_hash == two.content_hash != other.content_hash


def test_synthetic_lengths_have_a_long_tail_and_zeros(tmp_path: Path) -> None:
    store = synthetic(tmp_path / "s", num_samples=20_000, mean_len=20, sigma=1.0, share_empty=0.05, max_len=300)
    assert store.lengths.min() == 0
    assert np.mean(store.lengths == 0) == pytest.approx(0.05, abs=0.01)
    assert store.lengths[store.lengths > 0].mean() == pytest.approx(20, rel=0.05)
    assert np.percentile(store.lengths, 99) > 4 * np.median(store.lengths)
    assert store.lengths.max() <= 300


def test_synthetic_items_follow_a_pattern_that_can_be_learnt(tmp_path: Path) -> None:
    store = synthetic(tmp_path / "s", num_samples=5_000, num_items=200, num_clusters=20, share_jumps=0.2)
    raw = np.concatenate([[-1], store.vocabulary("item_id").to_numpy()])[store.position("item_id")]
    group, same_row = raw % 20, np.ones(len(raw) - 1, bool)
    same_row[store.offsets[1:-1][(store.offsets[1:-1] > 0) & (store.offsets[1:-1] < len(raw))] - 1] = False
    follows = (group[1:] == (group[:-1] + 1) % 20)[same_row]
    assert follows.mean() == pytest.approx(0.8 + 0.2 / 20, abs=0.02)
    assert raw.max() < 200
    popular = np.bincount(raw, minlength=200)
    assert popular[:20].sum() > 2 * popular[180:].sum()


def test_synthetic_labels_depend_on_history_and_context(tmp_path: Path) -> None:
    store = synthetic(tmp_path / "s", num_samples=20_000, num_clusters=4, num_items=100, share_jumps=0.5)
    raw = np.concatenate([[-1], store.vocabulary("item_id").to_numpy()])[store.position("item_id")]
    liked = np.concatenate([[0], np.cumsum(raw % 4 < 2)])
    share = np.diff(liked[store.offsets]) / np.maximum(store.lengths, 1)
    assert store.label is not None
    assert store.label[share > 0.7].mean() - store.label[share < 0.3].mean() > 0.4
    segment = store.context("segment")
    assert store.label[segment == 4].mean() - store.label[segment == 1].mean() > 0.2
    for split in (SplitConfig(kind="row"), SplitConfig(kind="time")):
        views = build_views(store, split, task="conversion", max_len=50)
        assert len(views["test"]) == pytest.approx(2_000, rel=0.15)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": -1},
        {"num_items": 2**40},
        {"num_samples": 0},
        {"num_items": 3},
        {"share_empty": 2},
        {"mean_len": 0},
        {"sigma": -1},
        {"max_len": 0},
    ],
)
def test_synthetic_data_of_no_shape_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"where:  synthetic.{next(iter(wrong))}"):
        synthetic(tmp_path / "s", **wrong)


def test_only_empty_histories_are_a_store(tmp_path: Path) -> None:
    store = synthetic(tmp_path / "s", num_samples=10, share_empty=1)
    assert store.num_positions == 0
    assert store.schema.table("item_id").num_rows == 1
