"""A store on disk from flat columns, written with flat memory: the buffers are mapped files or arrays that exist already."""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distrag.data.blocks import write_blocks
from distrag.data.content import SAMPLES, arrow_schema, data_hash, vocabulary_name, vocabulary_path
from distrag.data.schema import GAP_ROWS, SCHEMA_FILE, Feature, Schema, Table, check_name, id_dtype, load_schema, save_schema, seal
from distrag.data.store import Store, open_store
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import ArrayLike, NDArray


def write_store(
    path: str | Path,
    *,
    history: Mapping[str, ArrayLike],
    offsets: ArrayLike,
    context: Mapping[str, ArrayLike] | None = None,
    label: ArrayLike | None = None,
    weight: ArrayLike | None = None,
    key: ArrayLike | None = None,
    features: Mapping[str, Mapping[str, Any]] | None = None,
    tables: Mapping[str, int] | None = None,
    vocabularies: Mapping[str, pa.Array] | None = None,
) -> Store:
    """Returns the store written from arrays in memory; values are stored as given, nothing is mapped or normalised.

    Integers are ids of a table of the same name, floats are numbers, unless `features` says otherwise.

    Args:
        path: new folder.
        history: flat per-position values `[num_positions]` by feature name.
        offsets: `[N+1]`, where each row starts.
        context: per-sample values `[N]` by feature name.
        label: `[N]`.
        weight: `[N]`.
        key: integers `[N]`.
        features: fields of `Feature` by feature name, such as `{"time": {"kind": "time", "gap": "bucket"}, "clicked": {"table": "item"}}`.
        tables: rows of a table by name, row 0 included; otherwise one more than the largest id.
        vocabularies: raw values by table, ascending; otherwise row numbers stand for themselves.
    """
    given = dict(features or {})
    arrays = {f"history:{n}": np.asarray(v) for n, v in history.items()} | {
        f"context:{n}": np.asarray(v) for n, v in (context or {}).items()
    }
    made = {column: _feature(column.split(":", 1)[1], values, given) for column, values in arrays.items()}
    rows = _rows(made, arrays, dict(tables or {}))
    per_sample = {"label": (label, "float32"), "weight": (weight, "float32"), "key": (key, "int64")}
    columns = {name: np.asarray(values, dtype) for name, (values, dtype) in per_sample.items() if values is not None}
    for column, f in made.items():
        made[column] = f if f.dtype else replace(f, dtype=id_dtype(rows[f.table or ""]))
        columns[column] = arrays[column].astype(made[column].dtype)
    unknown: dict[str, int] = {}
    for column, f in made.items():
        if f.kind == "id" and f.table is not None:
            unknown[f.table] = unknown.get(f.table, 0) + int((columns[column] == 0).sum())
    schema = Schema(
        history=tuple(made[f"history:{name}"] for name in history),
        context=tuple(made[f"context:{name}"] for name in context or {}),
        label="label" if label is not None else None,
        weight="weight" if weight is not None else None,
        key="key" if key is not None else None,
        tables=build_tables(list(made.values()), rows, dict.fromkeys(rows, "vocabulary"), unknown),
        provenance={"source": "arrays in memory"},
    )
    words = {t.name: _vocabulary(t, dict(vocabularies or {})) for t in schema.tables if t.kind == "vocabulary"}
    with new_folder(Path(path)) as folder:
        write_columns(folder, schema, np.asarray(offsets, np.int64), columns, words)
        if not publish(folder, Path(path), overwrite=False):
            todo = "give another folder, or remove this one"
            raise problem("The output folder is taken", got="something is there", wanted="a new folder", where=path, todo=todo)
    return open_store(path)


def build_tables(
    features: list[Feature], rows: Mapping[str, int], kinds: Mapping[str, Any], unknown: Mapping[str, int] | None = None
) -> tuple[Table, ...]:
    """Returns the tables behind `features`, in order of first use; a bucketed time brings its gap table."""
    users: dict[str, list[str]] = {}
    for f in features:
        if f.kind == "id" and f.table is not None:
            users.setdefault(f.table, []).append(f.name)
    made = [Table(name, rows[name], kinds[name], tuple(dict.fromkeys(keys)), (unknown or {}).get(name, 0)) for name, keys in users.items()]
    made += [Table(f"{f.name}:gap", GAP_ROWS, "bucket", (f"{f.name}:gap",)) for f in features if f.kind == "time" and f.gap == "bucket"]
    return tuple(made)


def write_columns(
    folder: Path, schema: Schema, offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, pa.Array]
) -> Schema:
    """Returns the completed schema of the store it writes into `folder`.

    Args:
        folder: existing folder.
        schema: features and tables; sizes and the hash are filled in here.
        offsets: int64 `[N+1]`.
        columns: `history:<name>`, `context:<name>`, `label`, `weight`, `key`; each of the dtype that the schema names.
        vocabularies: raw values by table.
    """
    for name in [f.name for f in schema.history + schema.context] + [table.name for table in schema.tables if table.kind != "bucket"]:
        check_name(name, folder)
    schema = replace(schema, num_samples=len(offsets) - 1, num_positions=int(offsets[-1]))
    batch = _record_batch(schema, offsets, columns)
    with pa.OSFile(str(folder / SAMPLES), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    (folder / "vocab").mkdir(exist_ok=True)
    for name, values in vocabularies.items():
        table = pa.record_batch([values], names=["value"])
        with pa.OSFile(str(vocabulary_path(folder, name)), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_batch(table)
    schema = replace(schema, num_bytes=(folder / SAMPLES).stat().st_size)
    schema = replace(schema, data_hash=data_hash(offsets, columns, vocabularies))
    schema = replace(schema, content_hash=seal(schema))
    schema = replace(schema, blocks_hash=write_blocks(folder, [SAMPLES, *map(vocabulary_name, vocabularies)]))
    save_schema(schema, folder / SCHEMA_FILE)
    return load_schema(folder / SCHEMA_FILE)


def _record_batch(schema: Schema, offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]]) -> pa.RecordBatch:
    types = arrow_schema(schema)
    struct = types.field("history").type.value_type
    children = [_wrap(columns[f"history:{f.name}"], struct.field(i).type) for i, f in enumerate(schema.history)]
    positions = pa.StructArray.from_arrays(children, fields=[struct.field(i) for i in range(struct.num_fields)])
    history = pa.LargeListArray.from_arrays(_wrap(offsets, pa.int64()), positions, type=types.field("history").type)
    flat = [_wrap(columns[name], types.field(name).type) for name in types.names[1:]]
    return pa.record_batch([history, *flat], schema=types)


def _wrap(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    assert pa.from_numpy_dtype(values.dtype) == kind, (values.dtype, kind)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a fresh folder beside `out` that no other process uses; what is left of it at the end is removed."""
    folder = out.parent / f".{out.name[:40]}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
    except OSError as error:  # of the source nothing is left to raise: its readers say what they cannot read
        got, todo = error.strerror or str(error), "free some room, or give another folder"
        raise problem("The store cannot be written", got=got, wanted="a writable folder", where=out, todo=todo) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, out: Path, *, overwrite: bool) -> bool:
    """Returns whether `folder` became `out` in one rename; False when another store stands there and may not be replaced."""
    while True:
        try:
            folder.rename(out)
        except OSError:
            if not os.path.lexists(out):
                raise
        else:
            return True
        if not overwrite:
            return False
        # A reader that has the old store mapped keeps it: the files live on until it lets go.
        old = folder.with_name(folder.name + ".old")
        try:
            out.rename(old)
        except FileNotFoundError:
            continue  # another process took the old one away first
        shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


def _feature(name: str, values: NDArray[Any], given: Mapping[str, Mapping[str, Any]]) -> Feature:
    fields = dict(given.get(name, {}))
    kind = fields.pop("kind", "number" if values.dtype.kind == "f" else "id")
    dtype = {"number": "float32", "time": "int64", "id": ""}[kind]
    table = fields.pop("table", name if kind == "id" else f"{name}:gap" if fields.get("gap") == "bucket" else None)
    return Feature(name=name, kind=kind, dtype=dtype, table=table, column=name, **fields)


def _rows(made: Mapping[str, Feature], arrays: Mapping[str, NDArray[Any]], tables: dict[str, int]) -> dict[str, int]:
    rows: dict[str, int] = {}
    for column, f in made.items():
        if f.kind == "id" and f.table is not None:
            values = arrays[column]
            largest = int(values.max()) if len(values) else 0
            if len(values) and int(values.min()) < 0:
                raise problem(
                    "A negative id", got=int(values.min()), wanted=">= 0", where=f"write_store, {f.name}", todo="map raw ids to rows first"
                )
            if f.table in tables and largest >= tables[f.table]:
                raise problem(
                    "An id is outside its table",
                    got=largest,
                    wanted=f"< {tables[f.table]}",
                    where=f"write_store, {f.name}",
                    todo="name more rows",
                )
            rows[f.table] = tables.get(f.table, max(rows.get(f.table, 1), largest + 1))
    return rows


def _vocabulary(table: Table, given: Mapping[str, pa.Array]) -> pa.Array:
    values = given.get(table.name)
    if values is None:
        return pa.array(np.arange(1, table.num_rows, dtype=np.int64))
    if len(values) != table.num_rows - 1:
        raise problem(
            "A vocabulary does not fit its table",
            got=len(values),
            wanted=table.num_rows - 1,
            where=f"write_store, {table.name}",
            todo="name tables",
        )
    return values.cast(pa.large_string()) if pa.types.is_string(values.type) else values
