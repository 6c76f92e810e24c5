"""A store opens zero-copy, gives back what was written, and is refused when it is not what was prepared."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from distrag.data.checks import check_values
from distrag.data.content import SAMPLES, arrow_schema, content_hash
from distrag.data.schema import save_schema
from distrag.data.store import Store, open_store
from distrag.data.write import write_store


def small(path: Path) -> Store:
    return write_store(
        path,
        history={"item_id": [1, 2, 3, 1, 2], "rating": [0.5, -0.5, 0.0, 1.0, 2.0], "time": [10, 20, 30, 5, 6]},
        offsets=[0, 3, 3, 5],
        context={"age": [1, 2, 1], "height": [0.1, 0.2, 0.3]},
        label=[0, 1, 1],
        weight=[1, 2, 3],
        key=[7, 8, 9],
        features={"time": {"kind": "time", "gap": "bucket"}},
    )


def rewrite(store: Store, change: Callable[[pa.RecordBatch], list[pa.Array]], schema: pa.Schema | None = None, batches: int = 1) -> None:
    file = store.path / SAMPLES
    with pa.ipc.open_file(pa.OSFile(str(file))) as reader:
        batch = reader.get_batch(0)
    arrays = change(batch)
    schema = schema or batch.schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for _ in range(batches):
            writer.write_batch(pa.record_batch(arrays, schema=schema))
    text = (store.path / "schema.yaml").read_text()
    (store.path / "schema.yaml").write_text(text.replace(f"num_bytes: {store.schema.num_bytes}", f"num_bytes: {file.stat().st_size}"))


def patch_offsets(store: Store, offsets: list[int]) -> None:
    # In the bytes: Arrow's writer would mend the offsets on the way to the file.
    file, right = store.path / SAMPLES, np.array([0, 3, 3, 5], np.int64).tobytes()
    raw = file.read_bytes()
    assert raw.count(right) == 1
    file.write_bytes(raw.replace(right, np.array(offsets, np.int64).tobytes()))


def test_what_was_written_comes_back_without_a_copy(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    assert store.offsets.tolist() == [0, 3, 3, 5]
    assert store.lengths.tolist() == [3, 0, 2]
    assert store.position("item_id").dtype == np.uint8
    assert store.position("rating").dtype == np.float32
    assert store.position("time").tolist() == [10, 20, 30, 5, 6]
    assert store.context("age").tolist() == [1, 2, 1]
    assert store.label is not None
    assert store.label.tolist() == [0, 1, 1]
    assert store.weight is not None
    assert store.weight.dtype == np.float32
    assert store.key is not None
    assert store.key.tolist() == [7, 8, 9]
    for values in (store.offsets, store.position("item_id"), store.position("time"), store.context("age"), store.label):
        assert not values.flags.owndata
        assert not values.flags.writeable
    assert store.schema.table("time:gap").num_rows == 65
    assert store.vocabulary("item_id").to_pylist() == [1, 2, 3]
    assert open_store(store.path, verify=True).content_hash == store.content_hash


def test_a_pickled_store_maps_the_file_again(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    raw = pickle.dumps(store)
    assert len(raw) < 500
    assert pickle.loads(raw).position("time").tolist() == store.position("time").tolist()


def test_the_hash_depends_on_content_and_not_on_the_place(tmp_path: Path) -> None:
    first, second = small(tmp_path / "a"), small(tmp_path / "b")
    assert first.content_hash == second.content_hash
    other = write_store(tmp_path / "c", history={"item_id": [1, 2, 3, 1, 3]}, offsets=[0, 3, 3, 5])
    same_values = write_store(tmp_path / "d", history={"item_id": [1, 2, 3, 1, 3]}, offsets=[0, 2, 3, 5])
    assert len({first.content_hash, other.content_hash, same_values.content_hash}) == 3


def test_an_absent_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No store here(.|\n)*distrag prepare"):
        open_store(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    file = store.path / SAMPLES
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match="truncated"):
        open_store(store.path)
    text = (store.path / "schema.yaml").read_text()
    (store.path / "schema.yaml").write_text(text.replace(f"num_bytes: {len(raw)}", f"num_bytes: {len(raw) // 2}"))
    with pytest.raises(ValueError, match="Not readable as Arrow"):
        open_store(store.path)


def test_a_missing_file_of_samples_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    (store.path / SAMPLES).unlink()
    with pytest.raises(ValueError, match="0 bytes"):
        open_store(store.path)


def test_swapped_columns_are_refused_naming_them(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    wanted = arrow_schema(store.schema)
    order = [0, 2, 1, 3, 4, 5]
    rewrite(store, lambda b: [b.column(i) for i in order], pa.schema([wanted.field(i) for i in order]))
    with pytest.raises(ValueError, match=r"Columns are not those of the schema(.|\n)*context:height \(float\) where context:age"):
        open_store(store.path)


def test_swapped_positions_of_one_type_are_found_by_verify(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", history={"a": [1, 2], "b": [2, 1]}, offsets=[0, 2])

    def swap(batch: pa.RecordBatch) -> list[pa.Array]:
        history = batch.column("history")
        kind = history.type.value_type
        parts = [history.values.field(1), history.values.field(0)]
        struct = pa.StructArray.from_arrays(parts, fields=[kind.field(0), kind.field(1)])
        return [pa.LargeListArray.from_arrays(history.offsets, struct, type=history.type)]

    rewrite(store, swap)
    assert open_store(store.path).position("a").tolist() == [2, 1]
    with pytest.raises(ValueError, match="content is not what was prepared"):
        open_store(store.path, verify=True)


@pytest.mark.parametrize(
    ("offsets", "told"), [([0, 4, 3, 5], "falling at row 1: 4 to 3"), ([0, 3, 3, 4], "from 0 to 4"), ([1, 3, 3, 5], "from 1 to 5")]
)
def test_offsets_that_lie_are_refused(tmp_path: Path, offsets: list[int], told: str) -> None:
    store = small(tmp_path / "s")
    patch_offsets(store, offsets)
    with pytest.raises(ValueError, match=rf"Offsets do not describe the positions(.|\n)*{told}"):
        open_store(store.path)


def test_offsets_past_the_end_are_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    patch_offsets(store, [0, 3, 3, 99])
    with pytest.raises(ValueError, match="wanted"):
        open_store(store.path)


def test_an_id_beyond_its_table_is_found_by_verify(tmp_path: Path) -> None:
    store = small(tmp_path / "s")

    def poison(batch: pa.RecordBatch) -> list[pa.Array]:
        history = batch.column("history")
        kind = history.type.value_type
        parts = [history.values.field(i) for i in range(3)]
        parts[0] = pa.array([1, 2, 3, 1, 200], pa.uint8())
        struct = pa.StructArray.from_arrays(parts, fields=[kind.field(i) for i in range(3)])
        return [pa.LargeListArray.from_arrays(history.offsets, struct, type=history.type), *batch.columns[1:]]

    rewrite(store, poison)
    with pytest.raises(ValueError, match=r"An id is outside its table(.|\n)*200(.|\n)*0 .. 3(.|\n)*'item_id', sample 2, position 1"):
        open_store(store.path, verify=True)


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    text = (store.path / "schema.yaml").read_text()
    (store.path / "schema.yaml").write_text(text.replace("format_version: 2", "format_version: 99"))
    with pytest.raises(ValueError, match=r"Another format version(.|\n)*99"):
        open_store(store.path)


@pytest.mark.parametrize("text", ["[1, 2]", "history: [", "format_version: 2\nhistry: []", "format_version: 2\nhistory: [{name: a}]"])
def test_a_schema_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    store = small(tmp_path / "s")
    (store.path / "schema.yaml").write_text(text)
    with pytest.raises(ValueError, match="to do:"):
        open_store(store.path)


def test_a_missing_vocabulary_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    (store.path / "vocab" / "item_id.arrow").unlink()
    with pytest.raises(ValueError, match="A vocabulary is missing"):
        open_store(store.path)


def test_two_record_batches_are_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    rewrite(store, lambda batch: batch.columns, batches=2)
    with pytest.raises(ValueError, match="Not one record batch"):
        open_store(store.path)


def test_an_unknown_feature_names_the_nearest(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    with pytest.raises(ValueError, match="did you mean 'item_id'"):
        store.position("itemid")
    with pytest.raises(ValueError, match="A table without vocabulary"):
        store.vocabulary("time:gap")


def test_a_store_is_never_written_over_another(tmp_path: Path) -> None:
    small(tmp_path / "s")
    before = open_store(tmp_path / "s").content_hash
    with pytest.raises(ValueError, match="The output folder is taken"):
        write_store(tmp_path / "s", history={"item_id": [1]}, offsets=[0, 1])
    assert open_store(tmp_path / "s").content_hash == before


def test_a_table_name_may_hold_any_character(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", history={"shop/item:é": [1, 2]}, offsets=[0, 2])
    assert open_store(store.path, verify=True).vocabulary("shop/item:é").to_pylist() == [1, 2]


def test_rows_without_any_position_are_a_store(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", history={"item_id": np.zeros(0, np.int64)}, offsets=[0, 0, 0])
    assert open_store(store.path, verify=True).lengths.tolist() == [0, 0]


def edit(store: Store, old: str, new: str) -> None:
    path = store.path / "schema.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("std: 1.0", "std: 2.0"),
        ("mean: 0.0", "mean: 0.5"),
        ("num_rows: 4", "num_rows: 5"),
        ("gap: bucket", "gap: log"),
        ("key: key", "key: user"),
        ("num_unknown: 0", "num_unknown: 1"),
        ("label: label", "label: null"),
        ("data_hash: ", "data_hash: 0"),
        ("content_hash: ", "content_hash: 0"),
        ("format_version: 2", "format_version: 1"),
    ],
)
def test_a_schema_that_was_changed_is_refused_at_every_opening(tmp_path: Path, old: str, new: str) -> None:
    store = small(tmp_path / "s")
    edit(store, old, new)
    with pytest.raises(ValueError, match=r"The schema is not as it was written(.|\n)*where: .*schema.yaml"):
        open_store(store.path)
    with pytest.raises(ValueError, match="The schema is not as it was written"):
        open_store(f"file://{store.path}", cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("num_rows: 4", "num_rows: four", "tables, num_rows"),
        ("num_rows: 4", "num_rows: true", "a whole number"),
        ("kind: number", "kind: word", "one of id, number, time"),
        ("mean: 0.0", "mean: []", "a number"),
        ("- name: item_id", "- name: [x]", "a text"),
        ("  dtype: uint8\n", "", "no dtype"),
        ("num_samples: 3", "num_samples: 3\nnum_samples: 4", "the key 'num_samples' twice"),
        ("history:\n", "history: 3\nmore:\n", "a list"),
    ],
)
def test_fields_of_a_schema_have_their_types(tmp_path: Path, old: str, new: str, told: str) -> None:
    store = small(tmp_path / "s")
    edit(store, old, new)
    with pytest.raises(ValueError, match="schema") as caught:
        open_store(store.path)
    assert told in str(caught.value)


def test_a_store_of_the_version_before_schemas_were_sealed_still_opens_and_verifies(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    old = replace(store.schema, format_version=1, data_hash="")
    vocabularies = {t.name: store.vocabulary(t.name) for t in store.schema.tables if t.kind == "vocabulary"}
    save_schema(replace(old, content_hash=content_hash(old, store.offsets, store.columns, vocabularies)), store.path / "schema.yaml")
    assert open_store(store.path, verify=True).num_samples == 3
    edit(store, "std: 1.0", "std: 2.0")
    assert open_store(store.path).num_samples == 3
    with pytest.raises(ValueError, match="The content is not what was prepared"):
        open_store(store.path, verify=True)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "..", ".", "a/b", "%2e%2e%2f", "CON", "a.b"])
def test_names_of_tables_never_lead_out_of_the_store(tmp_path: Path, name: str) -> None:
    (tmp_path / "inner").mkdir()
    store = write_store(tmp_path / "inner" / "s", history={name: [1, 2]}, offsets=[0, 2])
    assert open_store(store.path, verify=True).vocabulary(name).to_pylist() == [1, 2]
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert [file.rsplit("/", 1)[0] for file in files] == ["inner/s"] * 3 + ["inner/s/vocab"] or len(files) == 4
    assert all(file.startswith("inner/s/") for file in files)


@pytest.mark.parametrize("name", ["", " ", "a\0b", "a\nb", "y" * 300, "é" * 100, "item_id:next", "x:gap", "x:negative", "\ud800"])
def test_what_no_name_can_be_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="No name for a feature or a table"):
        write_store(tmp_path / "s", history={name: [1, 2]}, offsets=[0, 2])
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_of_another_make_is_refused(tmp_path: Path) -> None:
    store = small(tmp_path / "s")
    path = store.path / "vocab" / "item_id.arrow"
    for values, names, told in [
        ([pa.array([1.5, 2.5, 3.5])], ["value"], "double"),
        ([pa.array([1, None, 3])], ["value"], "null"),
        ([pa.array([1, 2, 3]), pa.array([1, 2, 3])], ["value", "more"], "more"),
        ([pa.array(["a", "b", "c"])], ["value"], "values of string"),
    ]:
        path.unlink()
        batch = pa.record_batch(values, names=names)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        with pytest.raises(ValueError, match="A vocabulary is missing or does not fit its table") as caught:
            open_store(store.path)
        assert told in str(caught.value)


def test_ranks_read_a_share_of_the_rows_each_and_together_all_of_them(tmp_path: Path) -> None:
    rows = 11
    store = write_store(tmp_path / "s", history={"a": np.ones(2 * rows), "b": np.ones(2 * rows, np.int64)}, offsets=np.arange(rows + 1) * 2)
    for bad in range(rows):
        columns = {name: values.copy() for name, values in store.columns.items()}
        columns["history:a"][2 * bad + 1] = np.nan
        found = []
        for part in range(3):
            try:
                check_values(replace(store, columns=columns), part, 3)
            except ValueError as error:
                found.append(str(error))
        assert len(found) == 1
        assert f"feature 'a', sample {bad}, position 1" in found[0]
    held = replace(store, columns=columns, held=np.array([[0, 4], [6, rows - 1]]))
    check_values(held)  # what is not held is not looked at


@pytest.mark.parametrize(
    ("label", "weight", "told"), [([0, np.nan], [1, 1], "label"), ([0, 1], [1, -1], "0 or more"), ([0, 1], [np.inf, 1], "weight")]
)
def test_labels_and_weights_that_cannot_be_used_are_named(tmp_path: Path, label: list[float], weight: list[float], told: str) -> None:
    store = write_store(tmp_path / "s", history={"a": [1, 2]}, offsets=[0, 1, 2], label=label, weight=weight)
    with pytest.raises(ValueError, match="A number cannot be used") as caught:
        check_values(store)
    assert told in str(caught.value)


def test_a_column_whose_name_is_no_text_is_refused_by_file(tmp_path: Path) -> None:
    write_store(tmp_path / "store", history={"item": np.arange(3)}, offsets=np.array([0, 1, 3]))
    path = tmp_path / "store" / "samples.arrow"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"item", b"it\xcem"))
    with pytest.raises(ValueError, match=r"(?s)samples.arrow"):
        open_store(tmp_path / "store")
