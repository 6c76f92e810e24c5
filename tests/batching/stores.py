"""Small stores that the tests of this room share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from distrag.data.write import write_store

if TYPE_CHECKING:
    from pathlib import Path

    from distrag.data.store import Store


def small_store(folder: Path) -> Store:
    """Four rows of lengths 6, 0, 3, 4 with every kind of feature; one unknown item in row 3."""
    offsets = [0, 6, 6, 9, 13]
    item = [1, 2, 3, 4, 5, 6, 2, 4, 6, 300, 0, 1, 2]
    start = 1_700_000_000
    time = [start, start + 1, start + 65, start + 65, start + 64, start + 10_000, start, start + 3, start + 3, 0, 1, 2, 2**40]
    store = write_store(
        folder / "store",
        history={
            "item_id": np.array(item),
            "shop": np.array(item) % 3,
            "price": np.arange(13, dtype=np.float32) / 10,
            "time": np.array(time),
            "seen": np.array(time),
        },
        offsets=offsets,
        context={"city": np.array([1, 2, 3, 4]), "age": np.array([0.5, -0.5, 1.5, 2.5], np.float32)},
        label=[1, 0, 1, 0],
        weight=[1.0, 2.0, 0.5, 1.0],
        features={"time": {"kind": "time", "gap": "bucket"}, "seen": {"kind": "time", "gap": "log"}},
        tables={"item_id": 400},
    )
    tables = tuple(replace(table, num_unknown=1) if table.name == "item_id" else table for table in store.schema.tables)
    return replace(store, schema=replace(store.schema, tables=tables))


def lengths_store(folder: Path, lengths: list[int], num_items: int = 50) -> Store:
    """One id feature, rows of these lengths, no unknown item."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = 1 + np.random.default_rng(0).integers(0, num_items, offsets[-1])
    return write_store(folder / "store", history={"item_id": items}, offsets=offsets, tables={"item_id": num_items + 1})
