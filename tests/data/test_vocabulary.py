"""Raw ids become rows: row 0 is unknown, order is the order of the raw values, and a hash is the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrag.data.prepare import prepare
from distrag.data.store import open_store
from distrag.data.vocabulary import NULL, TableBuilder, hash_text, read_values

_HASH = """
import pyarrow as pa
from distrag.data.vocabulary import TableBuilder
table = TableBuilder("t", text=True, num_buckets=1000)
print(table.codes(pa.array(["item_\\u00e9", "item_e\\u0301"]), "here").tolist())
"""


def test_text_hashes_to_one_bucket_in_every_process_and_in_both_unicode_forms() -> None:
    root = Path(__file__).resolve().parents[2]
    wanted = [hash_text("item_\u00e9", 1000)] * 2
    for seed in (None, "0", "1"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | ({"PYTHONHASHSEED": seed} if seed else {})
        done = subprocess.run([sys.executable, "-c", _HASH], cwd=root, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(wanted)


def test_the_hash_never_changes() -> None:
    assert [hash_text(text, 1000) for text in ("", "7", "item_\u00e9")] == [757, 256, 967]


def test_hashed_integers_are_hashed_as_their_digits_and_bad_ones_are_row_0() -> None:
    table = TableBuilder("t", text=False, num_buckets=10)
    codes = table.codes(pa.array([7, None, -3]), "here")
    assert table.finish() is None
    assert table.rows(codes).tolist() == [hash_text("7", 10), 0, 0]
    assert table.num_rows == 11


@given(st.lists(st.none() | st.integers(-3, 30) | st.integers(2**26 - 2, 2**63 - 1), max_size=30))
def test_integers_get_rows_in_ascending_order(values: list[int | None]) -> None:
    table = TableBuilder("t", text=False)
    codes = table.codes(pa.array(values, pa.int64()), "here")
    words = table.finish()
    known = sorted({v for v in values if v is not None and v >= 0})
    assert words is not None
    assert words.to_pylist() == known
    assert table.num_rows == len(known) + 1
    assert table.rows(codes).tolist() == [known.index(v) + 1 if v is not None and v >= 0 else 0 for v in values]


@given(st.lists(st.lists(st.none() | st.text(max_size=3), max_size=8), max_size=5))
def test_texts_get_rows_in_the_order_of_their_bytes(batches: list[list[str | None]]) -> None:
    import unicodedata

    table = TableBuilder("t", text=True)
    codes = [table.codes(pa.array(batch, pa.string()), "here") for batch in batches]
    words = table.finish()
    plain = [[None if v is None else unicodedata.normalize("NFC", v) for v in batch] for batch in batches]
    known = sorted({v for batch in plain for v in batch if v is not None}, key=str.encode)
    assert words is not None
    assert words.to_pylist() == known
    for batch, found in zip(plain, codes, strict=True):
        assert table.rows(found).tolist() == [0 if v is None else known.index(v) + 1 for v in batch]


def test_integers_and_text_that_share_a_table_meet_as_text(tmp_path: Path) -> None:
    source = pa.table({"item_id": [[1, 2, -1]], "name": [["2", "x", "1"]]})
    (tmp_path / "s.yaml").write_text("history: {item_id: {kind: id, table: t}, name: {kind: id, table: t}}")
    prepare(source, tmp_path / "out", schema=tmp_path / "s.yaml")
    store = open_store(tmp_path / "out", verify=True)
    assert store.vocabulary("t").to_pylist() == ["1", "2", "x"]
    assert store.position("item_id").tolist() == [1, 2, 0]
    assert store.position("name").tolist() == [2, 3, 1]
    assert store.schema.table("t").features == ("item_id", "name")


@pytest.mark.parametrize("form", ["parquet", "text", "arrow", "named column"])
def test_a_given_vocabulary_fixes_the_rows_and_other_ids_are_unknown(tmp_path: Path, form: str) -> None:
    prepare(pa.table({"item_id": [[3, 1, 2]]}), tmp_path / "first")
    file = {"parquet": "v.parquet", "text": "v.txt", "arrow": "first/vocab/item_id.arrow", "named column": "v.parquet:id"}[form]
    pq.write_table(pa.table({"id": [3, 2, 1], "more": [0, 0, 0]}), tmp_path / "v.parquet")
    (tmp_path / "v.txt").write_text("1\n2\n3\n")
    (tmp_path / "s.yaml").write_text(f"tables: {{item_id: {{vocabulary: '{file}'}}}}")
    schema = prepare(pa.table({"item_id": [[3, 9, None, 1]]}), tmp_path / "out", schema=tmp_path / "s.yaml")
    assert open_store(tmp_path / "out", verify=True).position("item_id").tolist() == [3, 0, 0, 1]
    assert (schema.history[0].num_unknown, schema.history[0].num_null) == (1, 1)
    assert schema.table("item_id").num_unknown == 2
    assert schema.table("item_id").num_rows == 4


def test_a_vocabulary_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="A vocabulary cannot be read"):
        read_values(str(tmp_path / "no.parquet"))
    pq.write_table(pa.table({"id": [1]}), tmp_path / "v.parquet")
    with pytest.raises(ValueError, match="No such column in a vocabulary"):
        read_values(f"{tmp_path / 'v.parquet'}:item")


def test_a_fixed_text_vocabulary_never_grows() -> None:
    table = TableBuilder("t", text=True, vocabulary=pa.array(["b", "a", None]))
    codes = table.codes(pa.array(["a", "c", None, "b"]), "here")
    words = table.finish()
    assert words is not None
    assert words.to_pylist() == ["a", "b"]
    assert table.rows(codes).tolist() == [1, 0, 0, 2]
    assert codes[2] == NULL
    assert table.rows(np.array([], np.int64)).tolist() == []
