"""What `open_store` looks at before it hands out a store, and what it looks at more closely when asked to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distrag.data.content import CHUNK, SAMPLES, arrow_schema, chunks, content_hash, vocabulary_path
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from distrag.data.schema import Feature, Schema
    from distrag.data.store import Store

AGAIN = "copy the store again, or run `distrag prepare` with --overwrite"


def check_size(path: Path, schema: Schema) -> None:
    """Refuses a file of samples that is truncated or belongs to another schema."""
    file = path / SAMPLES
    size = file.stat().st_size if os.path.isfile(file) else 0
    if size != schema.num_bytes:
        raise problem(
            "The file of samples is truncated or not the one of this schema",
            got=f"{size} bytes",
            wanted=f"{schema.num_bytes} bytes",
            where=file,
            todo=AGAIN,
        )


def check_columns(path: Path, batch: pa.RecordBatch, schema: Schema) -> None:
    """Refuses columns of other names, types, order, rows, or with nulls, and a kind that its type cannot be."""
    kinds = {"id": ("uint8", "uint16", "uint32", "int64"), "number": ("float32",), "time": ("int64",)}
    for feature in (*schema.history, *schema.context):
        if feature.dtype not in kinds[feature.kind] or (feature.kind == "id") != (feature.table is not None and feature.gap != "bucket"):
            is_now = f"{feature.kind} of {feature.dtype} with table {feature.table}"
            raise problem(
                "A feature cannot be of its kind",
                got=is_now,
                wanted=f"{feature.kind} of {kinds[feature.kind]}",
                where=f"{path}, feature {feature.name!r}",
                todo=AGAIN,
            )
    wanted = arrow_schema(schema)
    if not batch.schema.equals(wanted, check_metadata=False):
        want = _flat_names(wanted)
        try:
            got = _flat_names(batch.schema)
        except UnicodeDecodeError:  # a byte of the file has changed
            got = ["a name that is no UTF-8"]
        differ = [f"{a} where {b} belongs" for a, b in zip(got, want, strict=False) if a != b] or [f"{len(got)} columns"]
        raise problem(
            "Columns are not those of the schema", got="; ".join(differ), wanted=", ".join(want), where=path / SAMPLES, todo=AGAIN
        )
    history = batch.column("history")
    nulls = [name for name, column in zip(batch.schema.names, batch.columns, strict=True) if column.null_count]
    nulls += [f.name for i, f in enumerate(schema.history) if history.values.field(i).null_count]
    if nulls or batch.num_rows != schema.num_samples:
        found = f"{batch.num_rows} rows, nulls in {nulls}"
        raise problem(
            "Rows are not those of the schema",
            got=found,
            wanted=f"{schema.num_samples} rows without nulls",
            where=path / SAMPLES,
            todo=AGAIN,
        )


def check_offsets(store: Store) -> None:
    """Refuses offsets that do not lead through all positions in steps that never fall."""
    offsets, size = store.offsets, store.num_positions
    lens = {len(store.position(f.name)) for f in store.schema.history}
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(offsets) == store.num_samples + 1 and lens == {size} and offsets[0] == 0 and offsets[-1] == size and not len(falls):
        return
    got = f"{len(offsets)} offsets from {offsets[0]} to {offsets[-1]} over {sorted(lens)} positions"
    got += f", falling at row {falls[0]}: {offsets[falls[0]]} to {offsets[falls[0] + 1]}" if len(falls) else ""
    wanted = f"{store.num_samples + 1} offsets from 0 to {size}, never falling"
    raise problem("Offsets do not describe the positions", got=got, wanted=wanted, where=store.path / SAMPLES, todo=AGAIN)


def check_vocabulary(path: Path, table: str, size: int) -> None:
    """Refuses a vocabulary that is missing, or is not `size` whole numbers or texts, one column of one batch, without nulls."""
    file = vocabulary_path(path, table)
    try:
        got = _describe_values(file)
    except (pa.ArrowException, OSError) as error:
        got = str(error).split("\n")[0]
    if got not in (f"{size} values of int64", f"{size} values of large_string"):
        wanted = f"{size} values of int64 or large_string"
        raise problem("A vocabulary is missing or does not fit its table", got=got, wanted=wanted, where=file, todo=AGAIN)


def _describe_values(file: Path) -> str:
    if not os.path.isfile(file):  # a pipe would be waited for
        return "no such file"
    with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
        if reader.num_record_batches != 1 or reader.schema.names != ["value"]:
            return f"{reader.num_record_batches} batches of columns {reader.schema.names}"
        values = reader.get_batch(0).column(0)
    values.validate()
    return f"{len(values)} values of {values.type}" + (f", {values.null_count} of them null" if values.null_count else "")


def check_values(store: Store, part: int = 0, parts: int = 1) -> None:
    """Refuses ids outside their tables, numbers, labels and weights that are not finite, and weights below 0, among the rows held here.

    Args:
        store: opened store.
        part: which share of the rows, so that ranks can read a share each.
        parts: how many shares there are.

    Raises:
        ValueError: naming the first feature and sample.
    """
    held = np.array([[0, store.num_samples]]) if store.held is None else store.held
    for first, end in held.tolist():
        rows = slice(first + (end - first) * part // parts, first + (end - first) * (part + 1) // parts)
        positions = slice(int(store.offsets[rows.start]), int(store.offsets[rows.stop]))
        for f in store.schema.history:
            _check_feature(store, f, positions, per_position=True)
        for f in store.schema.context:
            _check_feature(store, f, rows, per_position=False)
        for name, values in (("label", store.label), ("weight", store.weight)):
            if values is not None:
                _refuse(store, name, values, rows, "finite", lambda chunk: ~np.isfinite(chunk), per_position=False)
        if store.weight is not None:
            _refuse(store, "weight", store.weight, rows, "0 or more", lambda chunk: chunk < 0, per_position=False)


def verify(store: Store) -> None:
    """Reads every byte and refuses what `check_values` does, and another content hash."""
    check_values(store)
    schema = store.schema
    vocabularies = {t.name: store.vocabulary(t.name) for t in schema.tables if t.kind == "vocabulary"}
    found = content_hash(schema, store.offsets, store.columns, vocabularies)
    if found != schema.content_hash:
        raise problem("The content is not what was prepared", got=found, wanted=schema.content_hash, where=store.path, todo=AGAIN)


def _check_feature(store: Store, f: Feature, span: slice, *, per_position: bool) -> None:
    values = store.columns[f"{'history' if per_position else 'context'}:{f.name}"]
    if f.kind == "number":
        _refuse(store, f.name, values, span, "finite", lambda chunk: ~np.isfinite(chunk), per_position=per_position)
    elif f.kind == "id" and f.table is not None:
        rows = store.schema.table(f.table).num_rows
        _refuse(store, f.name, values, span, f"0 .. {rows - 1}", lambda chunk: (chunk >= rows) | (chunk < 0), per_position=per_position)


def _refuse(
    store: Store,
    name: str,
    values: NDArray[Any],
    span: slice,
    wanted: str,
    is_bad: Callable[[NDArray[Any]], NDArray[np.bool_]],
    *,
    per_position: bool,
) -> None:
    for i, chunk in enumerate(chunks(values[span])):
        bad = np.flatnonzero(is_bad(chunk))
        if len(bad):
            at = span.start + i * CHUNK + int(bad[0])
            row = int(np.searchsorted(store.offsets, at, side="right")) - 1 if per_position else at
            where = f"{store.path}, feature {name!r}, sample {row}" + (f", position {at - store.offsets[row]}" if per_position else "")
            what = "A number cannot be used" if values.dtype.kind == "f" else "An id is outside its table"
            raise problem(what, got=values[at].item(), wanted=wanted, where=where, todo=AGAIN)


def _flat_names(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for entry in schema:
        value = entry.type.value_type if pa.types.is_large_list(entry.type) else None
        if value is not None and pa.types.is_struct(value):
            names.extend(f"{entry.name}:{value.field(i).name} ({value.field(i).type})" for i in range(value.num_fields))
        else:
            names.append(f"{entry.name} ({entry.type})")
    return names
