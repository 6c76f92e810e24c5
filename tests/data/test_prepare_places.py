"""Where `prepare` writes: what is kept, replaced and refused there, and names that cannot be files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distrag.data.prepare import prepare
from distrag.data.schema import save_schema
from distrag.data.store import open_store
from tests.data.rows import at_once, prepared, raw_items, written


def test_an_equal_store_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "a.parquet", {"item_id": [[1]]})
    prepare(file, tmp_path / "out")
    before = (tmp_path / "out" / "samples.arrow").stat().st_ino
    prepare(file, tmp_path / "out")
    assert (tmp_path / "out" / "samples.arrow").stat().st_ino == before
    written(file, {"item_id": [[2]]})
    with pytest.raises(ValueError, match=r"taken(.|\n)*--overwrite"):
        prepare(file, tmp_path / "out")
    kept = open_store(tmp_path / "out")
    assert raw_items(prepared(file, tmp_path / "out", overwrite=True)) == [[2]]
    assert kept.position("item_id").tolist() == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "out"]


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="no prepared store"):
            prepare(pa.table({"item_id": [[1]]}), tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_an_empty_folder_may_be_there_already(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert raw_items(prepared(pa.table({"item_id": [[1]]}), tmp_path / "out")) == [[1]]


def test_a_broken_store_of_the_same_source_is_told_and_can_be_replaced(tmp_path: Path) -> None:
    source = pa.table({"item_id": [[1]]})
    prepare(source, tmp_path / "out")
    (tmp_path / "out" / "samples.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match=r"truncated(.|\n)*--overwrite"):
        prepare(source, tmp_path / "out")
    assert raw_items(prepared(source, tmp_path / "out", overwrite=True)) == [[1]]


def test_a_row_of_nobody_is_no_other_row_of_nobody(tmp_path: Path) -> None:
    for name, keys in (("a", [7, None, -1, None, 7]), ("b", ["x", None, "y", None, "x"])):
        store = prepared(pa.table({"item_id": [[1]] * 5, "user_id": keys}), tmp_path / name, read_rows=2)
        assert store.key is not None
        first, second, third, fourth, fifth = store.key.tolist()
        assert first == fifth
        assert len({first, second, third, fourth}) == 4


def test_histories_that_are_empty_in_every_row_are_a_store_whatever_their_type(tmp_path: Path) -> None:
    for name, kind in (("a", pa.int64()), ("b", pa.null())):
        store = prepared(pa.table({"item_id": pa.array([[], []], pa.list_(kind)), "city": [1, 2]}), tmp_path / name)
        assert store.lengths.tolist() == [0, 0]
        assert [(f.name, f.kind) for f in store.schema.history] == [("item_id", "id")]
    store = prepared(pa.table({"item_id": [[1], [2]], "tags": pa.array([[], []], pa.list_(pa.null()))}), tmp_path / "c")
    assert [f.name for f in store.schema.history] == ["item_id"]


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", "a/b"])
def test_columns_named_like_paths_stay_inside_the_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "inner").mkdir()
    file = written(tmp_path / "a.parquet", {"item_id": [[1], [2, 3]], name: [["p"], ["q", "r"]]})
    store = prepared(file, tmp_path / "inner" / "out")
    assert store.vocabulary(name).to_pylist() == ["p", "q", "r"]
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file() and path != file} == {"out", "vocab"}


@pytest.mark.parametrize("name", ["", " ", "a\0b", "y" * 300, "é" * 100, "item_id:next"])
def test_columns_of_no_possible_name_are_refused_or_renamed(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "a.parquet", {"item_id": [[1], [2, 3]], name: [["p"], ["q", "r"]]})
    with pytest.raises(ValueError, match=r"No name for a feature or a table(.|\n)*a.parquet"):
        prepare(file, tmp_path / "out")
    (tmp_path / "s.yaml").write_text(f"history: {{item_id: id, fine: {{column: {json.dumps(name)}}}}}")
    if name.strip():
        assert raw_items(prepared(file, tmp_path / "out", schema=tmp_path / "s.yaml"), "fine") == [["p"], ["q", "r"]]


def test_a_file_with_a_column_twice_is_refused_by_name(tmp_path: Path) -> None:
    table = pa.table({"item_id": [[1]]})
    pq.write_table(table.append_column("item_id", table.column(0)), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"Two columns of one name(.|\n)*item_id(.|\n)*a.parquet"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")


@pytest.mark.parametrize("out", ["", " ", "a\0", "y" * 300, "\udcff", "file/x"])
def test_an_output_folder_that_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"A path that cannot be used|The store cannot be written|The output folder is taken"):
        prepare(pa.table({"item_id": [[1]]}), f"{tmp_path}/{out}" if out.strip() else out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_links_lead_back_into_is_walked_once(tmp_path: Path) -> None:
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "more" / "back").symlink_to(tmp_path / "data")
    written(tmp_path / "data" / "a.parquet", {"item_id": [[1]]})
    written(tmp_path / "data" / "more" / "b.parquet", {"item_id": [[2]]})
    assert raw_items(prepared(tmp_path / "data", tmp_path / "out")) == [[1], [2]]


def test_a_store_of_the_version_before_is_kept_when_it_is_of_the_same_source(tmp_path: Path) -> None:
    file = written(tmp_path / "a.parquet", {"item_id": [[1]]})
    made = prepare(file, tmp_path / "out")
    facts = {key: value for key, value in made.provenance.items() if key not in ("fingerprint", "source", "left_out", "num_null_histories")}
    former = hashlib.blake2b(json.dumps([1, facts], sort_keys=True).encode(), digest_size=16).hexdigest()
    old = replace(made, format_version=1, data_hash="", provenance={**made.provenance, "fingerprint": former})
    save_schema(old, tmp_path / "out" / "schema.yaml")
    assert prepare(file, tmp_path / "out").format_version == 1
    with pytest.raises(ValueError, match="The output folder is taken"):
        prepare(written(file, {"item_id": [[2]]}), tmp_path / "out")


_PREPARE = """
import sys
from distrag.data.prepare import prepare
print("ready", flush=True)
sys.stdin.readline()
print(prepare(sys.argv[1], sys.argv[2], overwrite=sys.argv[3] == "True").content_hash)
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_processes_may_prepare_one_folder_at_once(tmp_path: Path, overwrite: bool) -> None:
    file = written(tmp_path / "a.parquet", {"item_id": [[i, i + 1] for i in range(5000)]})
    hashes = at_once(_PREPARE, file, tmp_path / "out", overwrite)
    assert set(hashes) == {open_store(tmp_path / "out", verify=True).content_hash}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.parquet", "out"]
