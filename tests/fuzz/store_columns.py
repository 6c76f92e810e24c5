"""`samples.arrow` with other columns, offsets or values than were prepared."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distrag.data.content import SAMPLES
from tests.fuzz.case import Expect

Done = tuple[str, Expect, str]
"""What was done, what opening the store has to say of it, and which file the message has to name."""
Columns = tuple[list[Any], list[pa.Field]]


def read_batch(store: Path) -> pa.RecordBatch:
    """Returns the one record batch of a store."""
    with pa.ipc.open_file(pa.OSFile(str(store / SAMPLES))) as reader:
        return reader.get_batch(0)


def content_of(path: Path) -> list[bytes] | None:
    """Returns types and values that a reader sees; None where it cannot."""
    try:
        with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
            batch = reader.get_batch(0)
        batch.validate(full=True)
        history = batch.column("history")
        parts = [history.offsets, *(history.values.field(i) for i in range(history.type.value_type.num_fields)), *batch.columns[1:]]
        return [str(batch.schema).encode(), *(part.to_numpy(zero_copy_only=False).tobytes() for part in parts)]
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError, IndexError):
        return None


def _order(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    i, j = r.sample(range(len(fields)), 2)
    columns[i], columns[j], fields[i], fields[j] = columns[j], columns[i], fields[j], fields[i]


def _name(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    i = r.randrange(len(fields))
    fields[i] = fields[i].with_name(r.choice(["x", "", "../x", "../../etc/passwd", fields[i].name.upper()]))


def _drop(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    i = r.randrange(len(fields))
    del columns[i], fields[i]


def _more(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    columns.append(columns[-1])
    fields.append(fields[-1].with_name(r.choice(["more", fields[-1].name])))


def _type(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    i, size = r.randrange(1, len(fields)), len(columns[0])
    made = r.choice(
        [pa.array([1] * size, kind) for kind in (pa.int8(), pa.float64(), pa.int32(), pa.uint64())]
        + [pa.array(["a"] * size), pa.nulls(size)]
    )
    columns[i], fields[i] = made, pa.field(fields[i].name, made.type)


def _nulls(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    i = r.randrange(1, len(fields))
    columns[i], fields[i] = pa.array([None, *columns[i].to_pylist()[1:]], fields[i].type), fields[i].with_nullable(True)


def _no_list(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    columns[0], fields[0] = pa.array(range(len(columns[0]))), pa.field("history", pa.int64(), nullable=False)


def _positions(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    kind, history = columns[0].type.value_type, columns[0]
    order = list(range(kind.num_fields))[::-1]
    struct = pa.StructArray.from_arrays([history.values.field(i) for i in order], fields=[kind.field(i) for i in order])
    fields[0] = pa.field("history", pa.large_list(pa.field("item", struct.type, nullable=False)), nullable=False)
    columns[0] = pa.LargeListArray.from_arrays(history.offsets, struct, type=fields[0].type)


def _fewer(r: random.Random, columns: list[Any], fields: list[pa.Field]) -> None:
    columns[:] = [column.slice(0, len(column) - 1) for column in columns]


CHANGES: dict[str, Callable[[random.Random, list[Any], list[pa.Field]], None]] = {
    "another order": _order,
    "another name": _name,
    "one dropped": _drop,
    "one more": _more,
    "another type": _type,
    "nulls": _nulls,
    "no list": _no_list,
    "positions in another order": _positions,
    "one row less": _fewer,
}
WRITTEN = {"two batches": 2, "no batch": 0, "as a stream": 1}


def change_columns(r: random.Random, store: Path) -> Done:
    """Writes the samples anew, otherwise than the schema says, with their size right."""
    how, batch, path = r.choice([*CHANGES, *WRITTEN]), read_batch(store), store / SAMPLES
    columns, fields = list(batch.columns), list(batch.schema)
    if how in CHANGES:
        CHANGES[how](r, columns, fields)
    made = pa.record_batch(columns, schema=pa.schema(fields))
    path.unlink()  # what has it mapped keeps it
    new = pa.ipc.new_stream if how == "as a stream" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, made.schema) as writer:
        for _ in range(WRITTEN.get(how, 1)):
            writer.write_batch(made)
    schema = store / "schema.yaml"
    schema.write_text(re.sub(r"(?m)^num_bytes: \d+", f"num_bytes: {path.stat().st_size}", schema.read_text()))
    return f"columns: {how}", "refused", SAMPLES


def change_offsets(r: random.Random, store: Path) -> Done:
    """Changes an offset where it stands in the file."""
    path, offsets = store / SAMPLES, read_batch(store).column("history").offsets.to_numpy().copy()
    raw, right, last = path.read_bytes(), offsets.tobytes(), int(offsets[-1])
    assert raw.count(right) == 1
    how, at = r.choice(["falls", "negative", "beyond", "first", "last", "huge"]), r.randrange(1, len(offsets) - 1)
    at = {"first": 0, "last": len(offsets) - 1}.get(how, at)
    falls = int(offsets[at - 1]) - 1 if int(offsets[at - 1]) else last + 1
    offsets[at] = {"falls": falls, "negative": -5, "beyond": last + 7, "first": 1, "last": last - 1, "huge": 2**62}[how]
    path.write_bytes(raw.replace(right, offsets.tobytes()))
    return f"offset {at}: {how}", "refused", SAMPLES


def change_values(r: random.Random, store: Path) -> Done:
    """Changes values where they stand: nothing may crash of them, and what lies inside its range only the hash can tell."""
    name = r.choice(["item_id", "shop", "context:city", "price", "context:age", "label", "weight", "timestamp", "key"])
    path, batch = store / SAMPLES, read_batch(store)
    history = batch.column("history")
    kind = history.type.value_type
    arrays = {kind.field(i).name: history.values.field(i) for i in range(kind.num_fields)} | dict(
        zip(batch.schema.names[1:], batch.columns[1:], strict=True)
    )
    values = arrays[name].to_numpy().copy()
    raw, right = path.read_bytes(), values.tobytes()
    i, top = r.randrange(len(values)), np.iinfo(values.dtype).max if values.dtype.kind in "ui" else 0
    odd: dict[str, list[Any]] = {
        "u": [0, top, top // 2, (int(values[i]) + 1) % 8],
        "f": [np.nan, np.inf, -1.0, 1e38, 7.0],
        "i": [-(2**63), 2**63 - 1, -1, 5],
    }
    values[slice(None) if r.random() < 0.2 else i] = r.choice(odd[values.dtype.kind])
    values[(i + 1) % len(values)] += 1  # so that something did change
    at = raw.index(right)
    path.write_bytes(raw[:at] + values.tobytes() + raw[at + len(right) :])
    return f"values of {name}", "any", ""


def flip_bit(r: random.Random, store: Path) -> Done:
    """Flips one bit anywhere in the samples: what it hits decides what tells of it."""
    path = store / SAMPLES
    raw, before = bytearray(path.read_bytes()), content_of(path)
    at = r.randrange(len(raw)) if r.random() < 0.5 else r.choice([*range(400), *range(len(raw) - 1500, len(raw))])
    raw[at] ^= 1 << r.randrange(8)
    path.write_bytes(bytes(raw))
    after = content_of(path)
    if after is None:
        return f"byte {at} of {len(raw)} flips: unreadable", "refused", SAMPLES
    return (f"byte {at} flips between columns", "fine", "") if after == before else (f"byte {at} flips inside a column", "any", "")
