"""A store from elsewhere arrives whole, or only the rows that were asked for; what is wrong on the way is told and never trusted."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest

from distrag.data import stage as staging
from distrag.data.blocks import BLOCKS, Blocks, parse_blocks
from distrag.data.content import SAMPLES, column_bytes
from distrag.data.remote import Remote
from distrag.data.stage import read_staged
from distrag.data.store import Store, open_store
from distrag.data.write import write_store
from tests.data.rows import ROOT, at_once
from tests.data.staging import NUM_ROWS, build_store, cached, copy, room, same_rows, staged


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(tmp_path_factory.mktemp("elsewhere"))


def test_a_store_in_memory_a_zip_or_a_folder_opens_as_the_one_that_was_prepared(store: Store, tmp_path: Path) -> None:
    fsspec.filesystem("memory").put(str(store.path), "/bucket/store", recursive=True)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for path in filter(Path.is_file, store.path.rglob("*")):
            file.write(path, f"inside/{path.relative_to(store.path)}")
    urls = [
        "memory://bucket/store",
        f"zip://inside::file://{tmp_path}/a.zip",
        f"file://{store.path}",
        f"file://{store.path}/",
        str(store.path),
    ]
    for number, url in enumerate(urls):
        found = open_store(url, cache=tmp_path / str(number), verify=True)
        assert found.path.parent == tmp_path / str(number)
        assert found.content_hash == store.content_hash
        assert found.vocabulary("item id").equals(store.vocabulary("item id"))
        same_rows(found, store, 0, NUM_ROWS)


def test_what_is_there_is_not_fetched_again(store: Store, tmp_path: Path) -> None:
    source = copy(store, tmp_path)
    open_store(f"file://{source}", cache=tmp_path / "cache")
    (source / SAMPLES).unlink()
    again = open_store(f"file://{source}", cache=tmp_path / "cache", verify=True)
    same_rows(again, store, 0, NUM_ROWS)
    same_rows(open_store(again.path, verify=True), store, 0, NUM_ROWS)


def test_other_content_at_the_same_address_is_another_store(tmp_path: Path) -> None:
    for value in (1, 2):
        write_store(tmp_path / "store", history={"item": [value]}, offsets=[0, 1], tables={"item": 3})
        assert open_store(tmp_path / "store", cache=tmp_path / "cache").position("item").tolist() == [value]
        shutil.rmtree(tmp_path / "store")


def test_only_the_rows_that_are_asked_for_take_room(store: Store, tmp_path: Path) -> None:
    lengths = staged(store.path, tmp_path / "cache", [])
    np.testing.assert_array_equal(lengths.lengths, store.lengths)
    assert lengths.schema == store.schema
    some = staged(store.path, tmp_path / "cache", [(0, 300), (2500, 2900)])
    same_rows(some, store, 0, 300)
    same_rows(some, store, 2500, 2900)
    np.testing.assert_array_equal(some.offsets, store.offsets)
    assert some.schema.num_bytes == store.schema.num_bytes == (some.path / SAMPLES).stat().st_size
    assert room(some.path) < 0.8 * room(store.path)
    whole = staged(store.path, tmp_path / "cache")
    same_rows(whole, store, 0, NUM_ROWS)


@pytest.mark.parametrize("seed", range(10))
def test_any_spans_of_rows_arrive_whole(store: Store, tmp_path: Path, seed: int) -> None:
    cuts = np.sort(np.random.default_rng(seed).integers(0, NUM_ROWS + 1, 2 * (seed + 1)))
    spans = [(int(a), int(b)) for a, b in cuts.reshape(-1, 2)]
    found = staged(store.path, tmp_path / "cache", spans)
    for first, end in spans:
        same_rows(found, store, first, end)
    columns, marks = column_bytes(store.path / SAMPLES), read_staged(found.path)
    blocks = parse_blocks((store.path / BLOCKS).read_bytes(), [SAMPLES, "vocab/item%20id.arrow", "vocab/age.arrow"], "here")
    assert set(columns) == {"offsets", *store.columns}
    content, wanted = (found.path / SAMPLES).read_bytes(), (store.path / SAMPLES).read_bytes()
    for block in range(len(blocks)):
        name, start, end_ = blocks.place(block)
        if name == SAMPLES:
            assert content[start:end_] == (wanted[start:end_] if marks[block] else bytes(end_ - start))


def test_rows_that_are_not_held_are_refused(store: Store, tmp_path: Path) -> None:
    some = staged(store.path, tmp_path / "cache", [(10, 20), (30, 31)])
    some.check_held(np.array([10, 19, 30]))
    none = staged(store.path, tmp_path / "cache", [])
    for rows, where in (([9], some), ([20], some), ([10, 31], some), ([NUM_ROWS - 1], some), ([0], none)):
        with pytest.raises(ValueError, match=rf"(?s)not held here.*{rows[-1]}"):
            where.check_held(np.array(rows))
    none.check_held(np.zeros(0, np.int64))


def test_a_part_of_a_store_is_not_taken_for_the_whole(store: Store, tmp_path: Path) -> None:
    some = staged(store.path, tmp_path / "cache", [(0, 1)])
    with pytest.raises(ValueError, match=r"(?s)Only a part of this store was staged.*address"):
        open_store(some.path)


@pytest.mark.parametrize("name", [SAMPLES, "vocab/item%20id.arrow", BLOCKS])
def test_an_altered_file_is_refused_and_a_mended_one_taken(store: Store, tmp_path: Path, name: str) -> None:
    source = copy(store, tmp_path)
    whole = (source / name).read_bytes()
    (source / name).write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    with pytest.raises(ValueError, match=rf"(?s)not what was prepared.*got:.*sha256.*wanted: sha256.*{name}.*copy the whole store"):
        open_store(source, cache=tmp_path / "cache")
    (source / name).write_bytes(whole)
    same_rows(open_store(source, cache=tmp_path / "cache", verify=True), store, 0, NUM_ROWS)


def test_a_truncated_file_is_refused_with_both_sizes(store: Store, tmp_path: Path) -> None:
    source = copy(store, tmp_path)
    size = store.schema.num_bytes
    with (source / SAMPLES).open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(ValueError, match=rf"(?s)not of the size.*{size - 1} bytes.*{size} bytes.*{SAMPLES}"):
        open_store(source, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match=rf"(?s)not of the size.*{size - 1} bytes.*{size} bytes.*{SAMPLES}"):
        staged(source, tmp_path / "cache", [])


@pytest.mark.parametrize("name", [SAMPLES, BLOCKS, "schema.yaml", "vocab/item%20id.arrow"])
def test_a_missing_file_is_named(store: Store, tmp_path: Path, name: str) -> None:
    source = copy(store, tmp_path)
    (source / name).unlink()
    with pytest.raises(ValueError, match=rf"(?s)missing.*no such file.*wanted: {name}.*{source}/{name}"):
        open_store(f"file://{source}", cache=tmp_path / "cache")


def test_a_file_that_was_lost_or_cut_in_the_cache_is_fetched_again(store: Store, tmp_path: Path) -> None:
    for harm in (Path.unlink, lambda path: os.truncate(path, 1000)):
        for name in (SAMPLES, "vocab/item%20id.arrow", "staged", "schema.yaml", BLOCKS):
            found = open_store(store.path, cache=tmp_path / "cache")
            harm(found.path / name)
            same_rows(open_store(store.path, cache=tmp_path / "cache", verify=True), store, 0, NUM_ROWS)


class Unsteady(type(fsspec.filesystem("file"))):  # type: ignore[misc]
    """Files of this machine over a line that drops or cuts the first answer to every question."""

    protocol = "unsteady"
    asked: ClassVar[set[tuple[str, int]]] = set()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        content: bytes = super().cat_file(path, start=start, end=end, **more)
        if start is None or (path, start) in self.asked:
            return content
        self.asked.add((path, start))
        if len(self.asked) % 2:
            raise TimeoutError("the line is slow")
        return content[:-1]


class Broken(Unsteady):
    """The same over a line that is cut."""

    protocol = "broken"

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **more: Any) -> bytes:
        if start is None:
            return super().cat_file(path, **more)
        raise ConnectionResetError("the line was cut")


def test_what_fails_once_is_asked_for_once_more(store: Store, tmp_path: Path) -> None:
    fsspec.register_implementation("unsteady", Unsteady, clobber=True)
    same_rows(open_store(f"unsteady://{store.path}", cache=tmp_path / "cache", verify=True), store, 0, NUM_ROWS)
    fsspec.register_implementation("broken", Broken, clobber=True)
    with pytest.raises(ValueError, match=r"(?s)cannot be reached.*ConnectionResetError: the line was cut.*broken://"):
        open_store(f"broken://{store.path}", cache=tmp_path / "other")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/store", r"(?s)No store can be read from this address.*nosuch.*mend the address"),
        ("zip://store::file:///nowhere.zip", r"(?s)No store can be read from this address.*FileNotFoundError"),
        ("file:///nowhere/store", r"(?s)missing.*schema.yaml.*file:///nowhere/store/schema.yaml"),
    ],
)
def test_an_address_that_leads_nowhere_is_told(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, cache=tmp_path / "cache")


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed here")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)A package for this address is missing.*s3fs.*s3://bucket/store.*pip install"):
        open_store("s3://bucket/store", cache=tmp_path / "cache")


def test_a_store_without_block_sums_is_only_opened_in_place(store: Store, tmp_path: Path) -> None:
    source = copy(store, tmp_path)
    (source / "schema.yaml").write_text((source / "schema.yaml").read_text().replace(store.schema.blocks_hash, "''"))
    assert open_store(source, verify=True).num_samples == NUM_ROWS
    with pytest.raises(ValueError, match=r"(?s)no block sums.*distrag prepare"):
        open_store(source, cache=tmp_path / "cache")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("which", ["content_hash", "blocks_hash"])
def test_hashes_that_are_none_cannot_lead_out_of_the_cache(store: Store, tmp_path: Path, which: str, version: int) -> None:
    source = copy(store, tmp_path)
    text = (source / "schema.yaml").read_text().replace(getattr(store.schema, which), "../../outside")
    if version == 1:  # of a version whose schema is not sealed
        text = text.replace("format_version: 2", "format_version: 1").replace(f"data_hash: {store.schema.data_hash}\n", "")
    (source / "schema.yaml").write_text(text)
    with pytest.raises(ValueError, match="not as it was written" if (which, version) == ("content_hash", 2) else "no block sums"):
        open_store(source, cache=tmp_path / "a" / "cache")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": {"../samples.arrow": 5}},
        {"sizes": {SAMPLES: 1}},
        {"sizes": {SAMPLES: "x"}},
        {"sizes": []},
        {"sha256": []},
        {"sha256": 3},
        {"block_bytes": 0},
        {"block_bytes": None},
    ],
)
def test_block_sums_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    right = {"block_bytes": 4, "sizes": {SAMPLES: 9}, "sha256": ["a", "b", "c"]}
    assert len(parse_blocks(json.dumps(right).encode(), [SAMPLES], "here")) == 3
    with pytest.raises(ValueError, match="block sums of"):
        parse_blocks(json.dumps({**right, **change}).encode(), [SAMPLES], "here")
    for text in (b"", b"[]", b"{"):
        with pytest.raises(ValueError, match="block sums of"):
            parse_blocks(text, [SAMPLES], "here")


def test_blocks_are_numbered_through_all_files() -> None:
    blocks = Blocks(10, {"a": 25, "b": 10, "c": 1}, ["."] * 5)
    assert [blocks.place(n) for n in range(5)] == [("a", 0, 10), ("a", 10, 20), ("a", 20, 25), ("b", 0, 10), ("c", 0, 1)]
    assert blocks.span("a", 9, 11) == slice(0, 2)
    assert blocks.span("a", 10, 20) == slice(1, 2)
    assert blocks.span("a", 5, 5) == slice(0, 0)
    assert blocks.span("b") == slice(3, 4)
    assert blocks.span("c") == slice(4, 5)
    for some in ([0, 1, 2], [2], [1, 3, 4], [], [0, 1, 2, 3, 4]):
        ends = sum(end - start for _, start, end in map(blocks.place, some))
        assert blocks.num_bytes(np.array(some, np.int64)) == ends


def test_a_cache_without_room_is_refused_before_anything_is_fetched(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"(?s)no room.*GiB free.*wanted:.*GiB.*data.cache"):
        open_store(store.path, cache=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_told(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"(?s)cache cannot be written.*data.cache"):
        open_store(store.path, cache=tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ValueError, match=r"(?s)cache cannot be written.*got: +File too large"):
            open_store(store.path, cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


TWO = """
import sys
from distrag.data import stage
from distrag.data.store import open_store
stage._TURN_BYTES = 1 << 20
print("ready", flush=True)
sys.stdin.readline()
store = open_store(f"file://{sys.argv[1]}", cache=sys.argv[2], verify=True)
print(store.content_hash)
"""


def test_two_processes_that_stage_at_once_end_with_one_whole_store(store: Store, tmp_path: Path) -> None:
    assert at_once(TWO, store.path, tmp_path / "cache") == [store.content_hash] * 2
    same_rows(open_store(cached(tmp_path / "cache"), verify=True), store, 0, NUM_ROWS)


SLOW = """
import sys, time
import fsspec
from distrag.data import stage
from distrag.data.store import open_store

class Slow(type(fsspec.filesystem("file"))):
    protocol = "slow"
    def cat_file(self, path, start=None, end=None, **more):
        time.sleep(0.01 if start is not None else 0)
        return super().cat_file(path, start=start, end=end, **more)

fsspec.register_implementation("slow", Slow)
stage._TURN_BYTES = 2 << 20
print("ready", flush=True)
open_store(f"slow://{sys.argv[1]}", cache=sys.argv[2])
"""


def test_a_killed_stager_leaves_nothing_that_is_trusted_and_holds_up_nobody(store: Store, tmp_path: Path) -> None:
    kept = set()
    for delay in np.linspace(0, 0.12, 8):
        cache = tmp_path / f"{delay:.3f}"
        run = subprocess.Popen([sys.executable, "-c", SLOW, str(store.path), str(cache)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        time.sleep(delay)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        if cache.exists():
            kept.add(int(read_staged(cached(cache)).sum()))
        same_rows(open_store(f"file://{store.path}", cache=cache, verify=True), store, 0, NUM_ROWS)
    assert len(kept) > 1, "no run was cut between its first and its last block"


def test_staging_and_opening_leave_no_file_open(store: Store, tmp_path: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        staged(store.path, tmp_path / str(number % 2), [(number * 10, 500)])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_turn_is_short_enough_for_the_ranks_that_wait() -> None:
    assert staging._TURN_BYTES <= 64 << 20
    assert Remote("file:///a/").name("b") == "file:///a/b"
