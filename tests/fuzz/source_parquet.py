"""Parquet files of columns that no feature can hold, of damaged bytes, and of files that do not fit each other."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.case import Case, Expect, Ground, Room
from tests.fuzz.source_csv import whole_store

COLUMNS: dict[str, Callable[[int], Any]] = {
    "nulls": lambda n: pa.nulls(n),
    "lists of null": lambda n: pa.array([[]] * n, pa.list_(pa.null())),
    "lists of lists": lambda n: pa.array([[[1]]] * n),
    "structs": lambda n: pa.array([{"a": 1}] * n),
    "maps": lambda n: pa.array([[("a", 1)]] * n, pa.map_(pa.string(), pa.int64())),
    "a dictionary": lambda n: pa.array(["a"] * n).dictionary_encode(),
    "bytes": lambda n: pa.array([b"\xff"] * n),
    "decimals": lambda n: pa.array([None] * n, pa.decimal128(38, 10)),
    "booleans": lambda n: pa.array([True] * n),
    "dates": lambda n: pa.array([0] * n, pa.date32()),
    "timestamps": lambda n: pa.array([0] * n, pa.timestamp("ns", "Europe/Paris")),
    "durations": lambda n: pa.array([0] * n, pa.duration("s")),
    "huge integers": lambda n: pa.array([2**63] * n, pa.uint64()),
    "lists of another length": lambda n: pa.array([[1]] * n),
    "nulls in lists": lambda n: pa.array([[None, 1]] * n),
    "null lists": lambda n: pa.array([None] * n, pa.list_(pa.int64())),
    "odd text": lambda n: pa.array(["\u202e"] * n),
    "long text": lambda n: pa.array(["y" * 100_000] + ["a"] * (n - 1)),
    "nan": lambda n: pa.array([float("nan")] * n),
    "infinity": lambda n: pa.array([float("inf")] * n),
    "words": lambda n: pa.array(["x"] * n),
    "fives": lambda n: pa.array([5] * n),
}
NAMES = [
    "extra",
    "item_id",
    "label",
    "weight",
    "timestamp",
    "user_id",
    "city",
    "age",
    "../x",
    "/etc/x",
    "",
    "a\0b",
    "y" * 300,
    "history",
    "item_id:next",
    "é",
]


def draw_parquet(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of Parquet files."""
    return r.choices([_column, _bytes, _rows, _two_files], [6, 3, 1, 2])[0](r, ground, room)


def _case(told: str, room: Room, expect: Expect, *more: Path, names: tuple[str, ...] = ()) -> Case:
    out = room.out / "store"
    words = ["prepare", str(room.given / "x.parquet"), *map(str, more), "--out", str(out)]
    return Case("source", f"parquet: {told}", words, expect, names, right=whole_store(out))


def _column(r: random.Random, ground: Ground, room: Room) -> Case:
    table, name, kind = pq.read_table(ground.parquet), r.choice(NAMES), r.choice(sorted(COLUMNS))
    made = COLUMNS[kind](table.num_rows)
    at = table.column_names.index(name) if name in table.column_names else None
    pq.write_table(table.append_column(name, made) if at is None else table.set_column(at, name, made), room.given / "x.parquet")
    return _case(f"{name[:20]!r} holds {kind}", room, "any")


def _bytes(r: random.Random, ground: Ground, room: Room) -> Case:
    raw = bytearray(ground.parquet.read_bytes())
    at, change = r.choice([0, 4, 8, len(raw) // 2, len(raw) - 1]), r.choice(["cut", "flip", "random"])
    if change == "cut":
        raw = raw[:at]
    elif change == "random":
        raw = bytearray(b"PAR1" + r.randbytes(500) + b"PAR1")
    else:
        for _ in range(5):
            raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
    (room.given / "x.parquet").write_bytes(bytes(raw))
    return _case(f"bytes: {change} at {at}", room, "any" if change == "flip" else "refused", names=("x.parquet",))


def _rows(r: random.Random, ground: Ground, room: Room) -> Case:
    table, how = pq.read_table(ground.parquet), r.choice(["none", "one", "doubled column"])
    made = table.append_column("item_id", table.column("item_id")) if how == "doubled column" else table.slice(0, int(how == "one"))
    pq.write_table(made, room.given / "x.parquet")
    return _case(f"rows: {how}", room, "any" if how == "one" else "refused", names=("x.parquet",))


def _two_files(r: random.Random, ground: Ground, room: Room) -> Case:
    table, other = pq.read_table(ground.parquet), r.choice(["type", "columns", "csv", "broken"])
    second = room.given / ("y.csv" if other == "csv" else "y.parquet")
    pq.write_table(table, room.given / "x.parquet")
    if other == "csv":
        second.write_bytes(ground.csv.read_bytes())
    elif other == "broken":
        second.write_bytes(b"PAR1")
    elif other == "columns":
        pq.write_table(table.drop_columns(["item_id"]), second)
    else:
        pq.write_table(table.set_column(1, "item_id", pa.array([[1.5]] * table.num_rows)), second)
    # What only some files have is left out, and said so.
    return _case(f"two files: {other}", room, "any" if other == "columns" else "refused", second, names=("y.parquet", "y.csv", "item_id"))
