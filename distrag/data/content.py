"""What the bytes of a store are: its files, their Arrow types, and the hash over all of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distrag.data.schema import UNSEALED, Schema, meaning, seal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

SAMPLES = "samples.arrow"
CHUNK = 1 << 22


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the Arrow types that `samples.arrow` has for `schema`."""
    struct = pa.struct([pa.field(f.name, _arrow_type(f.dtype), nullable=False) for f in schema.history])
    entries = [pa.field("history", pa.large_list(pa.field("item", struct, nullable=False)), nullable=False)]
    entries += [pa.field(f"context:{f.name}", _arrow_type(f.dtype), nullable=False) for f in schema.context]
    for name, present, dtype in (("label", schema.label, "float32"), ("weight", schema.weight, "float32"), ("key", schema.key, "int64")):
        if present is not None:
            entries.append(pa.field(name, _arrow_type(dtype), nullable=False))
    return pa.schema(entries)


def vocabulary_name(table: str) -> str:
    """Returns the file of the raw values of `table` inside a store."""
    return f"vocab/{quote(table, safe='')}.arrow"


def vocabulary_path(path: Path, table: str) -> Path:
    """Returns where the raw values of `table` are kept."""
    return path / vocabulary_name(table)


def read_vocabulary(path: Path, table: str) -> pa.Array:
    """Returns the raw values of `table`, memory-mapped, ascending."""
    with pa.ipc.open_file(pa.memory_map(str(vocabulary_path(path, table)))) as reader:
        return reader.get_batch(0).column(0)


def column_bytes(file: Path) -> dict[str, tuple[int, int, int]]:
    """Returns first byte in the file, bytes of a value, and values of `offsets` and of each column of `samples.arrow`; reads no column."""
    whole = pa.memory_map(str(file)).read_buffer()
    with pa.ipc.open_file(pa.BufferReader(whole)) as reader:
        batch = reader.get_batch(0)
    history = batch.column("history")
    struct = history.type.value_type
    arrays = {f"history:{struct.field(i).name}": history.values.field(i) for i in range(struct.num_fields)}
    arrays |= dict(zip(batch.schema.names[1:], batch.columns[1:], strict=True))
    found = {name: (array.buffers()[1].address - whole.address, array.type.bit_width // 8, len(array)) for name, array in arrays.items()}
    return {"offsets": (history.buffers()[1].address - whole.address, 8, len(history) + 1), **found}


def data_hash(
    offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, pa.Array], start: bytes = b""
) -> str:
    """Returns the blake2b hash of every value a reader sees; independent of Arrow's layout, paths and dates.

    Args:
        offsets: int64 `[N+1]`.
        columns: by name.
        vocabularies: raw values by table.
        start: bytes that are hashed first.
    """
    digest = hashlib.blake2b(start, digest_size=16)
    for name, values in [("offsets", offsets), *sorted(columns.items())]:
        digest.update(f"{name}|{values.dtype.name}|{len(values)}|".encode())
        for chunk in chunks(values):
            digest.update(chunk.tobytes())
    for name, array in sorted(vocabularies.items()):
        digest.update(f"{name}|{array.type}|{len(array)}|".encode())
        for part in _vocabulary_bytes(array):
            digest.update(part)
    return digest.hexdigest()


def content_hash(
    schema: Schema, offsets: NDArray[np.int64], columns: Mapping[str, NDArray[Any]], vocabularies: Mapping[str, pa.Array]
) -> str:
    """Returns the `content_hash` that a schema with this data has, by the rule of its format version."""
    if schema.format_version == UNSEALED:
        return data_hash(offsets, columns, vocabularies, json.dumps(meaning(schema), sort_keys=True).encode())
    return seal(replace(schema, data_hash=data_hash(offsets, columns, vocabularies)))


def chunks(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yields slices of `values` that are small enough to work on beside a mapped file."""
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]


def _arrow_type(dtype: str) -> pa.DataType:
    return pa.from_numpy_dtype(np.dtype(dtype))


def _vocabulary_bytes(array: pa.Array) -> Iterator[bytes]:
    for start in range(0, len(array), CHUNK):
        part = array.slice(start, CHUNK)
        if pa.types.is_large_string(array.type):
            yield pc.binary_length(part).to_numpy().tobytes()
            yield "".join(part.to_pylist()).encode()
        else:
            yield part.to_numpy().tobytes()
