"""What a run must find again in a store that it is evaluated on: features, their normalisation, and the meaning of every table row.

Which events of a history are shown is in the run's `config.yaml`: `data.max_len` and `data.truncate`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distrag.checkpoint import write_whole
from distrag.config import RunConfig
from distrag.data.schema import Feature, Schema, load_schema, save_schema
from distrag.data.store import Store
from distrag.data.text_file import dump_yaml, parse_yaml, read_small
from distrag.data.windows import DRAWN
from distrag.problem import problem
from distrag.training.inputs import is_read

SCHEMA = "schema.yaml"
VOCABULARIES = "vocabularies.yaml"
_REMEDY = "evaluate on the run's own store, or on one prepared with the same vocabularies and normalisation"
_MEANING = ("kind", "table", "transform", "mean", "std", "gap")
"""Fields of a feature that change what the model is given; counts and dtypes do not."""


def write_contract(store: Store, run_dir: Path) -> None:
    """Writes the store's schema and the hash of each vocabulary into the run directory."""
    save_schema(store.schema, run_dir / SCHEMA)
    write_whole(run_dir / VOCABULARIES, dump_yaml(hash_vocabularies(store)))


def hash_vocabularies(store: Store) -> dict[str, str]:
    """Returns a hash of the raw values, in the order of their rows, for each vocabulary table."""
    return {table.name: _hash(store.vocabulary(table.name)) for table in store.schema.tables if table.kind == "vocabulary"}


def _hash(values: pa.Array) -> str:
    digest = hashlib.blake2b(f"{values.type}|{len(values)}|".encode(), digest_size=16)
    if pa.types.is_large_string(values.type):
        _, offsets, text = values.buffers()
        ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1] if offsets else np.zeros(1, np.int64)
        digest.update(np.diff(ends).tobytes())
        digest.update(memoryview(text)[int(ends[0]) : int(ends[-1])] if text else b"")
    else:
        digest.update(values.to_numpy().tobytes())
    return digest.hexdigest()


def read_schema(run_dir: Path) -> Schema:
    """Returns the schema of the store that the run was trained on.

    Raises:
        ValueError: it is missing or cannot be read.
    """
    path = run_dir / SCHEMA
    if not os.path.isfile(path):
        wanted = "a folder that `distrag train` wrote"
        raise problem("Not a whole run", got=f"no {SCHEMA}", wanted=wanted, where=run_dir, todo="train again")
    return load_schema(path)


def pin_features(config: RunConfig, schema: Schema) -> RunConfig:
    """Returns the config with the features named that the model reads of this schema, so that another store's further ones stay out."""
    data, named = config.data, {"history": schema.history, "context": schema.context}
    names: dict[str, Any] = {
        where: [f.name for f in features if is_read(f, where)] for where, features in named.items() if getattr(data, where) is None
    }
    return dataclasses.replace(config, data=dataclasses.replace(data, **names))


def pin_windows(config: RunConfig) -> RunConfig:
    """Returns the config with the cut that valid and test have for every part.

    Windows that are drawn belong to training alone, and their law may not exist on a store of short histories.
    """
    if config.data.truncate not in DRAWN:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, truncate="newest"))


def check_contract(config: RunConfig, store: Store, run_dir: Path, todo: str = _REMEDY) -> None:
    """Refuses a store in which a feature or a table row would mean something else than in the store of the run.

    Args:
        config: of the run, its features pinned.
        store: what the run is to be evaluated on.
        run_dir: folder with what `write_contract` wrote, or a checkpoint with a copy of it.
        todo: what to do where they differ.

    Raises:
        ValueError: naming the first feature or table that differs, with both sides.
    """
    schema = read_schema(run_dir)
    if store.content_hash == schema.content_hash:
        return
    names = (config.data.history or [], config.data.context or [])
    for group, ours, theirs in zip(names, (schema.history, schema.context), (store.schema.history, store.schema.context), strict=True):
        for name in group:
            _check_feature(name, ours, theirs, store.path, todo)
    read = {feature for group in names for name in group for feature in (name, f"{name}:gap")}
    _check_tables(schema, store, {table.name for table in schema.tables if read & set(table.features)}, run_dir, todo)


def _check_feature(name: str, ours: tuple[Feature, ...], theirs: tuple[Feature, ...], path: Path, todo: str) -> None:
    wanted = next((f for f in ours if f.name == name), None)
    got = next((f for f in theirs if f.name == name), None)
    differ = [field for field in _MEANING if getattr(wanted, field, None) != getattr(got, field, None)]
    if got is None or differ:
        told = [", ".join(f"{field} {getattr(f, field)}" for field in differ) if f else "no such feature" for f in (got, wanted)]
        raise problem(
            "The store's features are not those of the run", got=told[0], wanted=told[1] or name, where=f"{path}, {name!r}", todo=todo
        )


def _check_tables(schema: Schema, store: Store, read: set[str], run_dir: Path, todo: str) -> None:
    there = {table.name: table for table in store.schema.tables}
    for table in schema.tables:
        if table.name not in read:
            continue
        other = there.get(table.name)
        if other is None or (other.num_rows, other.kind) != (table.num_rows, table.kind):
            got = f"{other.num_rows} rows, {other.kind}" if other else f"tables {sorted(there)}"
            _refuse(table.name, got, f"{table.num_rows} rows, {table.kind}", store.path, todo)
    path = run_dir / VOCABULARIES
    wanted = _read_hashes(path) if os.path.lexists(path) else {}
    found = hash_vocabularies(store)
    for name in sorted(read & {table.name for table in schema.tables if table.kind == "vocabulary"}):
        if found[name] != wanted.get(name):
            _refuse(name, f"a vocabulary with hash {found[name]}", f"hash {wanted.get(name, 'unknown')}", store.path, todo)


def _read_hashes(path: Path) -> dict[str, Any]:
    what, todo = "The hashes of the run's vocabularies", "put the file back as it was, or evaluate on the run's own store"
    found = parse_yaml(read_small(path, what=what, todo=todo), path, what=what, todo=todo)
    if not isinstance(found, dict):
        raise problem(f"{what} cannot be read", got=f"{found!r:.80}", wanted="table: hash", where=path, todo=todo)
    return found


def _refuse(table: str, got: str, wanted: str, path: Path, todo: str) -> None:
    raise problem("The store's tables are not those of the run", got=got, wanted=wanted, where=f"{path}, table {table!r}", todo=todo)
