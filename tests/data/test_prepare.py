"""Parquet becomes a store: whatever the types, chunks, nulls and number of files, the same rows come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrag.data.prepare import prepare
from tests.data.rows import prepared, raw_items, written


def test_item_0_is_an_item_and_not_the_unknown_row(tmp_path: Path) -> None:
    store = prepared(pa.table({"item_id": [[0], [], [0, 1], [2]]}), tmp_path / "out")
    assert store.vocabulary("item_id").to_pylist() == [0, 1, 2]
    assert store.position("item_id").tolist() == [1, 1, 2, 3]
    assert store.lengths.tolist() == [1, 0, 2, 1]
    assert store.schema.table("item_id").num_rows == 4


def test_negative_ids_are_unknown_like_ids_that_are_too_large(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("1\n2\n3\n")
    (tmp_path / "s.yaml").write_text("tables: {item_id: {vocabulary: v.txt}}")
    source = pa.table({"item_id": [[1], [3, -1, -2], [9]]})
    store = prepared(source, tmp_path / "out", schema=tmp_path / "s.yaml")
    assert store.position("item_id").tolist() == [1, 3, 0, 0, 0]
    assert store.schema.history[0].num_unknown == 3
    with pytest.raises(ValueError, match=r"Unknown ids(.|\n)*\[-1, -2\](.|\n)*'item_id', sample 1, positions 1, 2 (.|\n)*row 1"):
        prepare(source, tmp_path / "strict", schema=tmp_path / "s.yaml", on_unknown="error")
    assert not (tmp_path / "strict").exists()


def test_unknown_ids_are_refused_naming_the_file_and_its_row(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", {"item_id": [[1], [2]]})
    written(tmp_path / "b.parquet", {"item_id": [[3], [4, None]]})
    with pytest.raises(ValueError, match=r"\['null'\](.|\n)*sample 3, positions 1 \(.*b.parquet, row 1\)"):
        prepare(tmp_path, tmp_path / "out", on_unknown="error")


def test_an_unknown_context_id_is_refused_naming_the_sample(tmp_path: Path) -> None:
    source = pa.table({"item_id": [[1], [2]], "city": [5, -1]})
    with pytest.raises(ValueError, match=r"feature 'city', sample 1 "):
        prepare(source, tmp_path / "out", on_unknown="error")


def test_null_lists_are_empty_and_nulls_in_numbers_lie_at_the_mean(tmp_path: Path) -> None:
    source = pa.table({"item_id": [None, [1, 2, 3, 4], []], "price": [None, [1.0, None, 3.0, float("nan")], []]})
    store = prepared(source, tmp_path / "out")
    assert store.lengths.tolist() == [0, 4, 0]
    assert store.position("price").tolist() == [-1.0, 0.0, 1.0, 0.0]
    made = store.schema.feature("price")
    assert (made.mean, made.std, made.num_null) == (2.0, 1.0, 2)
    assert store.schema.provenance["num_null_histories"] == 1


def test_numbers_are_normalised_as_the_schema_says(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "history: {a: {kind: number, transform: none}, b: {kind: number, transform: log, column: a}, c: {kind: number, column: a}}"
    )
    values = [1.0, None, -7.0, 100.0]
    store = prepared(pa.table({"a": [values]}), tmp_path / "out", schema=tmp_path / "s.yaml")
    known = np.array([1.0, -7.0, 100.0])
    assert store.position("a").tolist() == pytest.approx([1, known.mean(), -7, 100])
    logs = np.sign(known) * np.log1p(np.abs(known))
    assert store.position("b")[[0, 2, 3]].tolist() == pytest.approx(((logs - logs.mean()) / logs.std()).tolist(), abs=1e-6)
    assert store.position("c")[[0, 2, 3]].tolist() == pytest.approx(((known - known.mean()) / known.std()).tolist(), abs=1e-6)
    assert store.position("b")[1] == store.position("c")[1] == 0


def test_a_number_that_never_varies_is_zero_and_not_infinite(tmp_path: Path) -> None:
    store = prepared(pa.table({"a": [[0.1] * 7, [0.1] * 3]}), tmp_path / "out")
    assert store.schema.history[0].std == 1.0
    assert np.abs(store.position("a")).max() < 1e-6


def test_large_and_tiny_batches_give_one_mean(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source = pa.table({"a": [(1e6 + rng.normal(size=5)).tolist() for _ in range(40)]})
    one, many = (prepared(source, tmp_path / str(n), read_rows=n).schema.history[0] for n in (1, 1000))
    assert one.mean == pytest.approx(many.mean, rel=1e-12)
    assert one.std == pytest.approx(many.std, rel=1e-9)


@pytest.mark.parametrize("read_rows", [1, 2, 1000])
def test_a_file_of_many_row_groups_and_chunks_streams_to_the_same_rows(tmp_path: Path, read_rows: int) -> None:
    rows = [["b", "a"], [], ["é", "a", None], None, ["c"], ["a"], ["d", "d"]]
    chunks = pa.chunked_array([pa.array(rows[:2]), pa.array(rows[2:3]), pa.array(rows[3:])])
    written(tmp_path / "a.parquet", {"item_id": chunks}, row_group_size=2)
    store = prepared(tmp_path / "a.parquet", tmp_path / "out", read_rows=read_rows)
    assert raw_items(store) == [row or [] for row in rows]
    whole = prepared(pa.table({"item_id": chunks}), tmp_path / "whole")
    assert whole.content_hash == store.content_hash


def test_a_slice_of_a_table_gives_only_its_own_rows(tmp_path: Path) -> None:
    table = pa.table({"item_id": [[1], [2, 3], [4, 5, 6]], "user_id": [7, 8, 9]})
    store = prepared(pa.concat_tables([table, table.slice(1)]).slice(1), tmp_path / "out")
    assert raw_items(store) == [[2, 3], [4, 5, 6], [2, 3], [4, 5, 6]]
    assert store.key is not None
    assert store.key.tolist() == [8, 9, 8, 9]


def test_integer_types_and_empty_files_are_joined_over_files(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", {"item_id": pa.array([[1]], pa.list_(pa.int32()))})
    written(tmp_path / "b.parquet", {"item_id": pa.array([[2**40]], pa.list_(pa.int64()))})
    written(tmp_path / "c.parquet", {"item_id": pa.array([[], []], pa.list_(pa.null()))})
    for name, source in (("folder", tmp_path), ("glob", str(tmp_path / "*.parquet")), ("list", [tmp_path / f"{n}.parquet" for n in "abc"])):
        store = prepared(source, tmp_path / name)
        assert raw_items(store) == [[1], [2**40], [], []]
    backwards = prepared([tmp_path / "c.parquet", tmp_path / "b.parquet", tmp_path / "a.parquet"], tmp_path / "backwards")
    assert raw_items(backwards) == [[], [], [2**40], [1]]


def test_types_that_do_not_fit_are_refused_naming_file_and_column(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", {"item_id": [[1]]})
    written(tmp_path / "b.parquet", {"item_id": [["x"]]})
    with pytest.raises(
        ValueError, match=r"Types of a column differ(.|\n)*a.parquet, list<element: string> in (.|\n)*b.parquet, column 'item_id'"
    ):
        prepare(tmp_path, tmp_path / "out")


def test_a_column_missing_in_one_file_is_left_out_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "a.parquet", {"item_id": [[1]], "price": [[0.5]]})
    written(tmp_path / "b.parquet", {"item_id": [[2]]})
    store = prepared(tmp_path, tmp_path / "out")
    assert [f.name for f in store.schema.history] == ["item_id"]
    assert "'price'" in capsys.readouterr().err
    (tmp_path / "s.yaml").write_text("history: [item_id, price]")
    with pytest.raises(ValueError, match=r"price: missing in b.parquet"):
        prepare(tmp_path, tmp_path / "other", schema=tmp_path / "s.yaml")


def test_nested_lists_are_left_out_with_a_warning_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = pa.table({"item_id": [[1, 2]], "genres": [[[1], [2, 3]]], "info": [{"a": 1}]})
    store = prepared(source, tmp_path / "out")
    assert [f.name for f in store.schema.history] == ["item_id"]
    told = capsys.readouterr().err
    assert "'genres'" in told
    assert "'info'" in told
    (tmp_path / "s.yaml").write_text("history: [item_id, genres]")
    with pytest.raises(ValueError, match=r"A column of the wrong shape(.|\n)*genres: list<"):
        prepare(source, tmp_path / "other", schema=tmp_path / "s.yaml")


def test_lists_of_one_row_that_differ_in_length_are_refused_naming_the_row(tmp_path: Path) -> None:
    written(tmp_path / "a.parquet", {"item_id": [[1, 2], [3]], "time": [[1, 2], [3, 4]]}, row_group_size=1)
    with pytest.raises(ValueError, match=r"differ in length(.|\n)*1 and 2 positions(.|\n)*a.parquet, row 1, columns 'item_id' and 'time'"):
        prepare(tmp_path / "a.parquet", tmp_path / "out", read_rows=1)


def test_a_list_that_is_no_history_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[i, i + 1] for i in range(20)]
    store = prepared(pa.table({"item_id": rows, "negatives": [[7] * 99] * 20}), tmp_path / "out")
    assert [f.name for f in store.schema.history] == ["item_id"]
    assert "'negatives'" in capsys.readouterr().err


def test_names_and_types_suggest_the_features(tmp_path: Path) -> None:
    source = pa.table(
        {
            "price": [[1.0]],
            "timestamp": [[5]],
            "item_id": [[3]],
            "shop": [["a"]],
            "user_id": [9],
            "age": [30],
            "height": [1.8],
            "city": ["x"],
            "is_sso_user": [True],
            "asked_at": pa.array([5], pa.timestamp("s")),
            "label": [True],
            "weight": [2],
        }
    )
    store = prepared(source, tmp_path / "out")
    schema = store.schema
    assert [(f.name, f.kind) for f in schema.history] == [("item_id", "id"), ("price", "number"), ("timestamp", "time"), ("shop", "id")]
    assert [(f.name, f.kind) for f in schema.context] == [
        ("age", "id"),
        ("height", "number"),
        ("city", "id"),
        ("is_sso_user", "id"),
        ("asked_at", "time"),
    ]
    assert (schema.label, schema.weight, schema.key) == ("label", "weight", "user_id")
    assert store.label is not None
    assert store.label.tolist() == [1.0]
    assert store.weight is not None
    assert store.weight.tolist() == [2.0]
    assert store.key is not None
    assert store.key.tolist() == [9]


def test_a_schema_names_renames_shares_and_hashes(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        """
history:
  item: {column: iid, kind: id, table: item}
  seen_at: {column: t, kind: time, unit: ms, gap: bucket}
  url: {kind: id, num_buckets: 7}
context:
  last: {column: last_iid, kind: id, table: item}
label: bought
weight: null
key: who
"""
    )
    source = pa.table(
        {
            "iid": [[5, 6], [7]],
            "t": [[2000, 1500], [3000]],
            "url": [["a", "b"], ["a"]],
            "last_iid": [6, 8],
            "bought": [0, 1],
            "who": ["x", "y"],
            "weight": [1, 1],
        }
    )
    store = prepared(source, tmp_path / "out", schema=tmp_path / "s.yaml")
    assert raw_items(store, "item") == [[6, 5], [7]]
    assert store.position("seen_at").tolist() == [1, 2, 3]
    assert store.context("last").tolist() == [2, 4]
    assert store.schema.table("item").features == ("item", "last")
    assert store.schema.table("url").kind == "hashed"
    assert store.schema.table("url").num_rows == 8
    assert store.schema.table("seen_at:gap").num_rows == 65
    assert store.position("url")[1] == store.position("url")[2] != 0
    assert store.weight is None
    assert store.key is not None
    assert len(set(store.key.tolist())) == 2


def test_a_schema_with_a_source_stands_for_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    written(tmp_path / "files" / "a.parquet", {"iid": [[1, 2]]})
    (tmp_path / "s.yaml").write_text("source: files/*.parquet\nhistory: {item_id: {column: iid}}")
    assert raw_items(prepared(tmp_path / "s.yaml", tmp_path / "out")) == [[1, 2]]


BAD_SCHEMAS = {
    "history: {item_id: {kind: id}}\nhistory: [city]": "the key 'history' twice",
    "history: {item_id: {table: {a: 1}}}": r"A value of another type(.|\n)*a text or null(.|\n)*history.item_id.table",
    "history: [item_id, item_id]": "A feature is named twice",
    "history: {item_id: {kind: id, num_buckets: true}}": "a whole number or null",
    "history: {item_id: {kind: id, num_buckets: 10000000000000}}": "Not a number of buckets",
    "history: {'item_id:gap': {kind: id, column: item_id}}": "No name for a feature or a table",
    "history: {item_id: {kind: id, table: '%s'}}" % (300 * "y"): "No name for a feature or a table",
    "label: [null]": "A value of another type",
    "key: {a: 1}": "A value of another type",
    "events: {header: item_id}": "a list of texts",
    "tables: {item_id: {vocabulary: nowhere}}": r"A vocabulary cannot be read(.|\n)*no such file",
    "tables: {item_id: {vocabulary: /dev/zero}}": "A vocabulary cannot be read",
    "tables: {item_id: {vocabulary: ''}}": r"A vocabulary cannot be read(.|\n)*a folder",
    "source: !!timestamp 3": "the tag",
    "1: 2": "which is no text",
    "histori: []": "did you mean 'history'",
    "history: {item_id: {kin: id}}": "did you mean 'kind'",
    "history: {item_id: {kind: word}}": "A value of another type(.|\n)*number",
    "history: [item]": "did you mean 'item_id'",
    "history: [city]": "A column of the wrong shape",
    "history: {item_id: number, city: {column: city}}": "A column of the wrong shape",
    "context: [item_id]": "A column of the wrong shape",
    "context: {city: number}": "A column cannot be this feature",
    "history: [item_id]\ncontext: {item_id: {column: city}}": "Two features of one name",
    "label: bought": "No such column",
    "events: {usr: who}": "did you mean 'user'",
    "tables: {itm: {num_buckets: 5}}": "A table that no feature uses",
    "tables: {item_id: {num_buckets: 5, vocabulary: v.txt}}": "A table cannot be built",
    "history: {item_id: {kind: id, num_buckets: 0}}": "Not a number of buckets",
    "history: {item_id: {kind: id, num_buckets: 5}}\ntables: {item_id: {num_buckets: 6}}": "A table is described twice",
    "history: 3": "Not a mapping",
    "[]": "Not a mapping",
    "history: [": "cannot be read",
    "history: {}": "No per-position feature",
}


@pytest.mark.parametrize("text", BAD_SCHEMAS)
def test_a_schema_that_asks_for_what_is_not_there_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=BAD_SCHEMAS[text]) as caught:
        prepare(pa.table({"item_id": [[1]], "city": ["x"]}), tmp_path / "out", schema=tmp_path / "s.yaml")
    assert [line.split(":")[0].strip() for line in str(caught.value).split("\n")[1:]] == ["got", "wanted", "where", "to do"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"item_id": [[1], [2]], "label": [1.0, None]}, "Not a label(.|\n)*row 1"),
        ({"item_id": [[1], [2]], "label": [1.0, float("nan")]}, "Not a label(.|\n)*row 1"),
        ({"item_id": [[1], [2]], "weight": [1.0, -1.0]}, "Not a weight(.|\n)*-1.0"),
        ({"item_id": [[2**63]]}, "Not whole numbers of 64 bits(.|\n)*column 'item_id'"),
        ({"item_id": pa.array([], pa.list_(pa.int64()))}, "No rows in the source"),
        ({"age": [1]}, "No per-position feature"),
    ],
)
def test_values_that_cannot_be_guessed_are_refused(tmp_path: Path, columns: dict[str, Any], told: str) -> None:
    table = pa.table({n: pa.array(c, pa.list_(pa.uint64())) if c == [[2**63]] else c for n, c in columns.items()})
    with pytest.raises(ValueError, match=told):
        prepare(table, tmp_path / "out")


def test_files_that_are_no_parquet_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"Not readable as Parquet(.|\n)*a.parquet"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(ValueError, match="No file found"):
        prepare(tmp_path / "nothing-*.parquet", tmp_path / "out")
    (tmp_path / "b.csv").write_text("user_id,item_id\n1,2\n")
    with pytest.raises(ValueError, match="Files of two kinds"):
        prepare([tmp_path / "a.parquet", tmp_path / "b.csv"], tmp_path / "out")


EVENTS = st.tuples(st.none() | st.integers(-2, 300), st.none() | st.floats(-1e6, 1e6, width=32), st.integers(0, 3))


@settings(max_examples=40)
@given(st.lists(st.none() | st.lists(EVENTS, max_size=6), min_size=1, max_size=8), st.integers(1, 4))
def test_parquet_to_store_to_arrays_gives_the_rows_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], read_rows: int) -> None:
    folder = tmp_path_factory.mktemp("trip")
    columns = {name: [None if r is None else [e[i] for e in r] for r in rows] for i, name in enumerate(("item_id", "price", "time"))}
    kinds = (pa.int64(), pa.float32(), pa.int64())
    arrays = {n: pa.array(c, pa.large_list(k)) for (n, c), k in zip(columns.items(), kinds, strict=True)}
    (folder / "s.yaml").write_text("history: {item_id: id, price: {kind: number, transform: none}, time: time}")
    file = written(folder / "a.parquet", arrays, row_group_size=2)
    store = prepared(file, folder / "out", schema=folder / "s.yaml", read_rows=read_rows)
    wanted = [sorted(row or [], key=lambda e: e[2]) for row in rows]
    assert store.lengths.tolist() == [len(row) for row in wanted]
    assert raw_items(store) == [[e[0] if e[0] is not None and e[0] >= 0 else None for e in row] for row in wanted]
    known = [e[1] for row in wanted for e in row if e[1] is not None]
    mean = np.float32(np.mean(known)) if known else np.float32(0)
    prices = [mean if e[1] is None else e[1] for row in wanted for e in row]
    assert store.position("price").tolist() == pytest.approx(prices, rel=1e-5, abs=1e-5)
    assert store.position("time").tolist() == [e[2] for row in wanted for e in row]
