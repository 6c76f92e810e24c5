"""What a cache holds beside its blocks, and what lies elsewhere in place of files, leads nowhere else and is never waited for."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from distrag.data.content import SAMPLES
from distrag.data.store import Store, open_folder, open_store
from distrag.data.write import write_store
from tests.data.staging import NUM_ROWS, build_store, cached, copy, same_rows, staged


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(tmp_path_factory.mktemp("elsewhere"))


def test_a_schema_of_the_same_size_is_put_right_in_the_cache(store: Store, tmp_path: Path) -> None:
    staged(store.path, tmp_path / "cache")
    path = cached(tmp_path / "cache") / "schema.yaml"
    right = path.read_text()
    path.write_text(right.replace("mean: 0.0", "mean: 9.0", 1))
    assert path.stat().st_size == len(right.encode())
    with pytest.raises(ValueError, match="not as it was written"):
        open_folder(path.parent)
    staged(store.path, tmp_path / "cache")
    assert path.read_text() == right


def test_a_link_in_the_cache_is_replaced_and_not_followed(store: Store, tmp_path: Path) -> None:
    staged(store.path, tmp_path / "cache")
    for name in (SAMPLES, "schema.yaml", "blocks.json"):
        path = cached(tmp_path / "cache") / name
        outside = tmp_path / f"outside-{name}"
        outside.write_bytes(bytes(path.stat().st_size))
        path.unlink()
        path.symlink_to(outside)
        same_rows(staged(store.path, tmp_path / "cache"), store, 0, NUM_ROWS)
        assert not path.is_symlink()
        assert outside.read_bytes() == bytes(outside.stat().st_size)


@pytest.mark.parametrize("name", [SAMPLES, "schema.yaml", "blocks.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(store: Store, tmp_path: Path, name: str) -> None:
    source = copy(store, tmp_path)
    (source / name).unlink()
    os.mkfifo(source / name)
    with pytest.raises(ValueError, match="A file of the store is missing"):
        staged(f"file://{source}", tmp_path / "cache")


def test_block_sums_that_name_files_elsewhere_write_nothing_there(store: Store, tmp_path: Path) -> None:
    source = copy(store, tmp_path)
    raw = json.loads((source / "blocks.json").read_text())
    raw["sizes"] = {"../../../owned": raw["sizes"].pop(SAMPLES), **raw["sizes"]}
    text = json.dumps(raw)
    (source / "blocks.json").write_text(text)
    schema = (source / "schema.yaml").read_text()
    new = hashlib.sha256(text.encode()).hexdigest()
    (source / "schema.yaml").write_text(schema.replace(store.schema.blocks_hash, new))
    with pytest.raises(ValueError, match=r"Not the block sums of this store(.|\n)*owned"):
        staged(source, tmp_path / "a" / "b" / "cache")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]


def test_a_table_named_by_a_path_is_staged_inside_the_cache(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", history={"../../../etc/x": [1, 2]}, offsets=[0, 2])
    found = staged(f"file://{store.path}", tmp_path / "cache")
    assert found.vocabulary("../../../etc/x").to_pylist() == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "store"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/s?a=b", "http://127.0.0.1:9/s#a", "simplecache::http://127.0.0.1:9/s?a=b"])
def test_an_address_whose_files_cannot_be_named_is_refused(url: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed here")
    with pytest.raises(ValueError, match="An address with a query"):
        open_store(url, cache=tmp_path / "cache")
