"""A CSV of events becomes one row a user, in order of time, equal times in the order of the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from distrag.data.prepare import prepare
from distrag.data.store import open_store
from tests.data.rows import prepared, raw_items


def test_events_are_grouped_by_user_and_stably_sorted_by_time(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id,timestamp,price\n7,30,5,1.5\n3,10,9,2\n7,20,5,\n3,11,1,4\n7,10,4,3\n")
    store = prepared(tmp_path / "e.csv", tmp_path / "out")
    assert store.key is not None
    assert store.key.tolist() == [3, 7]
    assert raw_items(store) == [[11, 10], [10, 30, 20]]
    assert store.position("timestamp").tolist() == [1, 9, 4, 5, 5]
    assert store.schema.feature("price").kind == "number"
    assert store.schema.feature("price").num_null == 1


def test_columns_are_named_by_options_or_by_the_schema(tmp_path: Path) -> None:
    (tmp_path / "e.tsv").write_text("who\twhat\twhen\nb\tx\t2\na\ty\t1\nb\tz\t1\n")
    store = prepared(tmp_path / "e.tsv", tmp_path / "out", user="who", item="what", time="when")
    assert raw_items(store, "what") == [["y"], ["z", "x"]]
    assert store.schema.key == "who"
    (tmp_path / "s.yaml").write_text("source: e.tsv\nevents: {user: who, item: what, time: when}")
    assert prepared(tmp_path / "s.yaml", tmp_path / "again").content_hash == store.content_hash


def test_a_file_without_header_takes_its_names(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("1,5,10\n2,6,10\n1,4,9\n")
    store = prepared(tmp_path / "e.csv", tmp_path / "out", header=["user_id", "item_id", "time"])
    assert raw_items(store) == [[4, 5], [6]]
    with pytest.raises(ValueError, match=r"No user column(.|\n)*columns \['1', '5', '10'\](.|\n)*--user COLUMN"):
        prepare(tmp_path / "e.csv", tmp_path / "other")


def test_files_are_joined_in_order_and_differing_types_become_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user_id,item_id\n1,007\n2,5\n")
    with gzip.open(tmp_path / "b.csv.gz", "wt") as file:
        file.write("user_id,item_id\n1,x\n")
    store = prepared(tmp_path, tmp_path / "out")
    assert raw_items(store) == [["007", "x"], ["5"]]
    assert store.key is not None
    assert store.key.tolist() == [1, 2]


def test_text_users_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id\nb,1\na,2\né,3\nb,4\n")
    assert raw_items(prepared(tmp_path / "e.csv", tmp_path / "out")) == [[2], [1, 4], [3]]


def test_recbole_files_are_read_without_their_types(tmp_path: Path) -> None:
    (tmp_path / "e.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n1\t5\t3\t10\n1\t6\t4\t9\n")
    store = prepared(tmp_path / "e.inter", tmp_path / "out")
    assert [(f.name, f.kind) for f in store.schema.history] == [("item_id", "id"), ("rating", "number"), ("timestamp", "time")]
    assert raw_items(store) == [[6, 5]]


def test_one_value_a_user_becomes_context_and_label(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id,city,bought\n1,5,x,1\n2,6,y,0\n1,7,x,1\n")
    (tmp_path / "s.yaml").write_text("history: [item_id]\ncontext: [city]\nlabel: bought")
    store = prepared(tmp_path / "e.csv", tmp_path / "out", schema=tmp_path / "s.yaml")
    assert store.context("city").tolist() == [1, 2]
    assert store.label is not None
    assert store.label.tolist() == [1, 0]
    (tmp_path / "e.csv").write_text("user_id,item_id,city,bought\n1,5,x,1\n1,7,z,1\n")
    with pytest.raises(ValueError, match=r"varies within a user(.|\n)*'x' and 'z' for user 1"):
        prepare(tmp_path / "e.csv", tmp_path / "other", schema=tmp_path / "s.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("user_id,price\n1,2\n", "No item column"),
        ("user_id,item_id\n1,2\n,3\n", r"An event without user(.|\n)*event 1"),
        ("user_id,item_id\n1,2\n1,2,3\n", "Not readable as CSV"),
        ("", "Not readable as CSV|No user column"),
        ("user_id,item_id\n", "No rows in the source|Not readable|No per-position"),
    ],
)
def test_events_that_cannot_be_used_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "e.csv").write_text(text)
    with pytest.raises(ValueError, match=told):
        prepare(tmp_path / "e.csv", tmp_path / "out")


def test_null_items_are_the_unknown_row(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id\n1,\n1,5\n")
    store = prepared(tmp_path / "e.csv", tmp_path / "out")
    assert store.position("item_id").tolist() == [0, 1]
    assert store.schema.history[0].num_null == 1


@pytest.mark.parametrize("times", [["1700000000.9", "1700000000.1", "1700000000.5"], [f"2024-01-01T00:00:00.{f}00Z" for f in (9, 1, 5)]])
def test_events_within_one_second_keep_the_order_of_their_fractions(tmp_path: Path, times: list[str]) -> None:
    lines = "".join(f"1,{item},{time}\n" for item, time in zip((10, 11, 12), times, strict=True))
    (tmp_path / "events.csv").write_text("uid,sku,ts\n" + lines)
    prepare(tmp_path / "events.csv", tmp_path / "store", user="uid", item="sku", time="ts")
    store = open_store(tmp_path / "store")
    raw = store.vocabulary("sku").to_pylist()
    assert [raw[row - 1] for row in store.position("sku")] == [11, 12, 10]
    assert len(set(store.position("ts").tolist())) == 1


def test_a_number_with_a_zero_in_front_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id,price,day\n001,7,0.5,01/02/2003\n1,007,1.5,01/02/2003\n1,7,05,\n")
    store = prepared(tmp_path / "e.csv", tmp_path / "out")
    assert raw_items(store) == [["7"], ["007", "7"]]
    assert store.num_samples == 2
    (tmp_path / "f.csv").write_text("user_id,item_id,day\n3,7,01/02/2003\n1,10,0.5\n")
    store = prepared(tmp_path / "f.csv", tmp_path / "other")  # no zero in front of a whole number: numbers as ever
    assert raw_items(store) == [[10], [7]]
    assert store.key is not None
    assert store.key.tolist() == [1, 3]


def test_items_are_ids_whatever_their_numbers_look_like(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id\n1,5.0\n1,7\n")
    assert raw_items(prepared(tmp_path / "e.csv", tmp_path / "out")) == [[5, 7]]
    (tmp_path / "e.csv").write_text("user_id,item_id\n1,5.5\n1,7\n")
    with pytest.raises(ValueError, match=r"Not whole numbers(.|\n)*e.csv(.|\n)*'item_id'"):
        prepare(tmp_path / "e.csv", tmp_path / "other")


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (["1600000000000"], "got:    1600000000000(.|\n)*unit: ms"),
        (["1600000000000000"], "unit: us"),
        (["1600000000000000000"], "unit: ns"),
        (["5", "1600000000000.5"], "unit: ms"),
        (["-1600000000000"], "unit: ms"),
        (["9" * 30], "no time in its unit"),
        (["1600000000", "soon", "1600000001"], r"A time that is none(.|\n)*'soon'(.|\n)*line 3, column 'timestamp', event 1"),
        (["2024-01-31 12:00:00", "2024-01-31", "yesterday"], r"'yesterday'(.|\n)*line 4"),
    ],
)
def test_times_that_are_none_are_refused_with_what_to_do(tmp_path: Path, times: list[str], told: str) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id,timestamp\n" + "".join(f"1,{i},{time}\n" for i, time in enumerate(times)))
    with pytest.raises(ValueError, match=told):
        prepare(tmp_path / "e.csv", tmp_path / "out")


def test_milliseconds_are_taken_when_the_schema_says_so(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("user_id,item_id,timestamp\n1,5,1600000000000\n1,6,1500000000999\n")
    (tmp_path / "s.yaml").write_text("history: {item_id: id, timestamp: {kind: time, unit: ms}}")
    store = prepared(tmp_path / "e.csv", tmp_path / "out", schema=tmp_path / "s.yaml")
    assert store.position("timestamp").tolist() == [1_500_000_000, 1_600_000_000]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"user_id,item_id,item_id\n1,2,3\n", "Two columns of one name(.|\n)*line 1"),
        (b"user_id,item_id:a,item_id:b\n1,2,3\n", "Two columns of one name"),
        (b"user_id,item_id\n\xe9,2\n1,3\n", "Not readable as CSV(.|\n)*no UTF-8(.|\n)*column 'user_id'"),
        (b"user_id,item_id,a\0b\n1,2,3\n", "No name for a feature"),
        (b"user_id,item_id,\n1,2,3\n", "No name for a feature"),
        (b"user_id,item_id,item_id:gap\n1,2,3\n", "Two columns of one name"),
    ],
)
def test_columns_that_cannot_be_told_apart_or_named_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "e.csv").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        prepare(tmp_path / "e.csv", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.csv"]
