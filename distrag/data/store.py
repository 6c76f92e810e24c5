"""A store: one memory-mapped Arrow file of ragged columns, opened without a copy.

`samples.arrow` holds one record batch. Its first column, `history`, is a large list of structs: int64 offsets over the rows, and one flat
array a per-position feature. Per-sample columns follow: `context:<name>`, then `label`, `weight` and `key` where the source has them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distrag.data.schema import SCHEMA_FILE, Schema, load_schema, meaning, named
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

SAMPLES = "samples.arrow"
_AGAIN = "copy the store again, or run `distrag prepare` with --overwrite"
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Store:
    """Columns of one data set; every array is a view of the mapped file.

    Attributes:
        path: folder of the store.
        schema: what the columns mean.
        offsets: int64 `[N+1]`, where each row starts in the per-position arrays.
    """

    path: Path
    schema: Schema
    offsets: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]] = field(repr=False)

    @property
    def num_samples(self) -> int:
        """Rows (`N`)."""
        return self.schema.num_samples

    @property
    def num_positions(self) -> int:
        """Positions over all rows."""
        return self.schema.num_positions

    @property
    def content_hash(self) -> str:
        """Hash of columns, vocabularies and their meaning, as written by `prepare`."""
        return self.schema.content_hash

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each row, int64 `[N]`."""
        return np.diff(self.offsets)

    def position(self, name: str) -> NDArray[Any]:
        """Returns the flat values of a per-position feature, `[num_positions]`: ids narrow, numbers float32, times int64 seconds."""
        return self.columns[f"history:{named(name, self.schema.history, 'per-position feature').name}"]

    def context(self, name: str) -> NDArray[Any]:
        """Returns the values of a per-sample feature, `[N]`."""
        return self.columns[f"context:{named(name, self.schema.context, 'per-sample feature').name}"]

    @property
    def label(self) -> NDArray[np.float32] | None:
        """Labels, float32 `[N]`, or None."""
        return self.columns.get("label")

    @property
    def weight(self) -> NDArray[np.float32] | None:
        """Sample weights, float32 `[N]`, or None."""
        return self.columns.get("weight")

    @property
    def key(self) -> NDArray[np.int64] | None:
        """Whose row it is, int64 `[N]`, or None: integer keys as they are, text keys as a 63-bit hash."""
        return self.columns.get("key")

    def vocabulary(self, table: str) -> pa.Array:
        """Returns the raw values of a vocabulary table in ascending order; entry i belongs to row i+1.

        Raises:
            ValueError: when the table is hashed or of gap buckets and so has no values.
        """
        found = self.schema.table(table)
        if found.kind != "vocabulary":
            raise problem(
                "A table without vocabulary",
                got=f"{table!r} is {found.kind}",
                wanted="a vocabulary table",
                where=self.path,
                todo=_VOCABULARY,
            )
        return read_vocabulary(self.path, table)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the path alone, so that a worker process maps the file itself."""
        return open_store, (self.path,)


_VOCABULARY = "read Schema.tables first, or prepare the feature with a vocabulary instead of num_buckets"


def open_store(path: str | Path, *, verify: bool = False) -> Store:
    """Returns the store in the folder `path`, mapped and not copied.

    Args:
        path: folder written by `distrag prepare`.
        verify: also read every byte: ids inside their tables, numbers finite, content hash as recorded.

    Raises:
        ValueError: when there is no store, it was written by another format version, the file is truncated or altered, its columns
            are not those of the schema, or its offsets do not describe its positions.
    """
    path = Path(path)
    if not (path / SCHEMA_FILE).is_file():
        todo = "give the folder that `distrag prepare ... --out` wrote"
        raise problem("No store here", got="no schema.yaml", wanted=f"a folder with {SCHEMA_FILE} and {SAMPLES}", where=path, todo=todo)
    schema = load_schema(path / SCHEMA_FILE)
    _check_size(path, schema)
    batch = _read_batch(path / SAMPLES)
    _check_columns(path, batch, schema)
    store = Store(path, schema, *_arrays(batch, schema))
    _check_offsets(store)
    for table in schema.tables:
        if table.kind == "vocabulary":
            _check_vocabulary(path, table.name, table.num_rows - 1)
    if verify:
        _verify(store)
    return store


def vocabulary_path(path: Path, table: str) -> Path:
    """Returns where the raw values of `table` are kept."""
    return path / "vocab" / f"{quote(table, safe='')}.arrow"


def read_vocabulary(path: Path, table: str) -> pa.Array:
    """Returns the raw values of `table`, memory-mapped, ascending."""
    with pa.ipc.open_file(pa.memory_map(str(vocabulary_path(path, table)))) as reader:
        return reader.get_batch(0).column(0)


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the Arrow types that `samples.arrow` has for `schema`."""
    struct = pa.struct([pa.field(f.name, _arrow_type(f.dtype), nullable=False) for f in schema.history])
    entries = [pa.field("history", pa.large_list(pa.field("item", struct, nullable=False)), nullable=False)]
    entries += [pa.field(f"context:{f.name}", _arrow_type(f.dtype), nullable=False) for f in schema.context]
    for name, present, dtype in (("label", schema.label, "float32"), ("weight", schema.weight, "float32"), ("key", schema.key, "int64")):
        if present is not None:
            entries.append(pa.field(name, _arrow_type(dtype), nullable=False))
    return pa.schema(entries)


def content_hash(
    schema: Schema, offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, pa.Array]
) -> str:
    """Returns the blake2b hash of everything a reader sees; independent of Arrow's layout, paths and dates."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(meaning(schema), sort_keys=True).encode())
    for name, values in [("offsets", offsets), *sorted(columns.items())]:
        digest.update(f"{name}|{values.dtype.name}|{len(values)}|".encode())
        for chunk in _chunks(values):
            digest.update(chunk.tobytes())
    for name, array in sorted(vocabularies.items()):
        digest.update(f"{name}|{array.type}|{len(array)}|".encode())
        for part in _vocabulary_bytes(array):
            digest.update(part)
    return digest.hexdigest()


def _arrow_type(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


def _chunks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]


def _vocabulary_bytes(array: pa.Array) -> Iterator[bytes]:
    for start in range(0, len(array), _CHUNK):
        part = array.slice(start, _CHUNK)
        if pa.types.is_large_string(array.type):
            yield pc.binary_length(part).to_numpy().tobytes()
            yield "".join(part.to_pylist()).encode()
        else:
            yield part.to_numpy().tobytes()


def _check_size(path: Path, schema: Schema) -> None:
    file = path / SAMPLES
    size = file.stat().st_size if file.is_file() else 0
    if size != schema.num_bytes:
        raise problem(
            "The file of samples is truncated or not the one of this schema",
            got=f"{size} bytes",
            wanted=f"{schema.num_bytes} bytes",
            where=file,
            todo=_AGAIN,
        )


def _read_batch(file: Path) -> pa.RecordBatch:
    try:
        with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
            count = reader.num_record_batches
            batch = reader.get_batch(0) if count == 1 else None
            if batch is not None:
                batch.validate()
    except (pa.ArrowInvalid, OSError) as error:
        raise problem(
            "Not readable as Arrow", got=str(error).split("\n")[0], wanted="an Arrow IPC file", where=file, todo=_AGAIN
        ) from error
    if batch is None:
        raise problem("Not one record batch", got=f"{count} record batches", wanted=1, where=file, todo=_AGAIN)
    return batch


def _check_columns(path: Path, batch: pa.RecordBatch, schema: Schema) -> None:
    wanted = arrow_schema(schema)
    if not batch.schema.equals(wanted, check_metadata=False):
        got, want = _flat_names(batch.schema), _flat_names(wanted)
        differ = [f"{a} where {b} belongs" for a, b in zip(got, want, strict=False) if a != b] or [f"{len(got)} columns"]
        raise problem(
            "Columns are not those of the schema", got="; ".join(differ), wanted=", ".join(want), where=path / SAMPLES, todo=_AGAIN
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
            todo=_AGAIN,
        )


def _flat_names(schema: pa.Schema) -> list[str]:
    names: list[str] = []
    for entry in schema:
        value = entry.type.value_type if pa.types.is_large_list(entry.type) else None
        if value is not None and pa.types.is_struct(value):
            names.extend(f"{entry.name}:{value.field(i).name} ({value.field(i).type})" for i in range(value.num_fields))
        else:
            names.append(f"{entry.name} ({entry.type})")
    return names


def _arrays(batch: pa.RecordBatch, schema: Schema) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    history = batch.column("history")
    columns = {f"history:{f.name}": history.values.field(i).to_numpy(zero_copy_only=True) for i, f in enumerate(schema.history)}
    for name in batch.schema.names[1:]:
        columns[name] = batch.column(name).to_numpy(zero_copy_only=True)
    return history.offsets.to_numpy(zero_copy_only=True), columns


def _check_offsets(store: Store) -> None:
    offsets, size = store.offsets, store.num_positions
    lens = {len(store.position(f.name)) for f in store.schema.history}
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(offsets) == store.num_samples + 1 and lens == {size} and offsets[0] == 0 and offsets[-1] == size and not len(falls):
        return
    got = f"{len(offsets)} offsets from {offsets[0]} to {offsets[-1]} over {sorted(lens)} positions"
    got += f", falling at row {falls[0]}: {offsets[falls[0]]} to {offsets[falls[0] + 1]}" if len(falls) else ""
    wanted = f"{store.num_samples + 1} offsets from 0 to {size}, never falling"
    raise problem("Offsets do not describe the positions", got=got, wanted=wanted, where=store.path / SAMPLES, todo=_AGAIN)


def _check_vocabulary(path: Path, table: str, size: int) -> None:
    file = vocabulary_path(path, table)
    try:
        got: object = len(read_vocabulary(path, table))
    except (pa.ArrowInvalid, OSError) as error:
        got = str(error).split("\n")[0]
    if got != size:
        raise problem("A vocabulary is missing or does not fit its table", got=got, wanted=f"{size} values", where=file, todo=_AGAIN)


def _verify(store: Store) -> None:
    schema = store.schema
    for place, features in (("history", schema.history), ("context", schema.context)):
        for f in features:
            values = store.columns[f"{place}:{f.name}"]
            if f.kind == "id" and f.table is not None:
                _verify_ids(store, f.name, values, schema.table(f.table).num_rows, per_position=place == "history")
            bad = next((i * _CHUNK for i, c in enumerate(_chunks(values)) if f.kind == "number" and not np.isfinite(c).all()), None)
            if bad is not None:
                raise problem(
                    "A number is not finite",
                    got="NaN or infinity",
                    wanted="finite",
                    where=f"{store.path}, {f.name}, after {bad}",
                    todo=_AGAIN,
                )
    vocabularies = {t.name: store.vocabulary(t.name) for t in schema.tables if t.kind == "vocabulary"}
    found = content_hash(schema, store.offsets, store.columns, vocabularies)
    if found != schema.content_hash:
        raise problem("The content is not what was prepared", got=found, wanted=schema.content_hash, where=store.path, todo=_AGAIN)


def _verify_ids(store: Store, name: str, values: NDArray[Any], num_rows: int, *, per_position: bool) -> None:
    for i, chunk in enumerate(_chunks(values)):
        bad = np.flatnonzero((chunk >= num_rows) | (chunk < 0))
        if len(bad):
            at = i * _CHUNK + int(bad[0])
            row = int(np.searchsorted(store.offsets, at, side="right")) - 1 if per_position else at
            where = f"{store.path}, feature {name!r}, sample {row}" + (f", position {at - store.offsets[row]}" if per_position else "")
            raise problem("An id is outside its table", got=int(values[at]), wanted=f"0 .. {num_rows - 1}", where=where, todo=_AGAIN)
