"""Stores from what a test writes down, rows back from a store, and two processes at one moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distrag.data.prepare import prepare
from distrag.data.store import Store, open_store

ROOT = Path(__file__).resolve().parents[2]


def prepared(source: Any, out: Path, **options: Any) -> Store:
    prepare(source, out, **options)
    return open_store(out, verify=True)


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def raw_items(store: Store, name: str = "item_id") -> list[list[Any]]:
    words = [None, *store.vocabulary(store.schema.feature(name).table or "").to_pylist()]
    rows = zip(store.offsets[:-1], store.offsets[1:], strict=True)
    return [[words[i] for i in store.position(name)[a:b]] for a, b in rows]


def at_once(code: str, *args: object) -> list[str]:
    """Returns what two processes print that run the same code at the same moment."""
    words = [sys.executable, "-c", code, *map(str, args)]
    runs = [subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for run in runs:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
    told = []
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    for run in runs:
        told.append(run.communicate(timeout=120)[0].strip())
        assert run.returncode == 0
    return told
