"""A store of a dozen blocks, and short ways to stage it, for the tests of staging."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from distrag.data.stage import Stage
from distrag.data.store import Store, open_folder
from distrag.data.write import write_store

NUM_ROWS = 4000


def build_store(folder: Path) -> Store:
    """About 11 MB with every kind of column: a dozen blocks."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 400, NUM_ROWS)
    size = int(lengths.sum())
    return write_store(
        folder / "store",
        history={
            "item id": random.integers(1, 60_000, size),
            "price": random.random(size).astype(np.float32),
            "time": random.integers(0, 9, size),
        },
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        context={"age": random.integers(1, 5, NUM_ROWS), "height": random.random(NUM_ROWS).astype(np.float32)},
        label=random.integers(0, 2, NUM_ROWS),
        weight=random.random(NUM_ROWS),
        key=np.arange(NUM_ROWS),
        features={"time": {"kind": "time"}},
    )


def copy(store: Store, tmp_path: Path) -> Path:
    shutil.copytree(store.path, tmp_path / "copy")
    return tmp_path / "copy"


def cached(cache: Path) -> Path:
    [folder] = cache.iterdir()
    return folder


def staged(url: str | Path, cache: Path, rows: list[tuple[int, int]] | None = None) -> Store:
    stage, spans = Stage(url, cache), None if rows is None else np.array(rows, np.int64).reshape(-1, 2)
    for _ in stage.fetch(spans):
        pass
    return open_folder(stage.folder, spans)


def same_rows(found: Store, wanted: Store, first: int, end: int) -> None:
    a, b = wanted.offsets[[first, end]]
    for name, values in wanted.columns.items():
        span = slice(a, b) if name.startswith("history:") else slice(first, end)
        np.testing.assert_array_equal(found.columns[name][span], values[span], name)


def room(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
