"""A store: one memory-mapped Arrow file of ragged columns, opened without a copy.

`samples.arrow` holds one record batch. Its first column, `history`, is a large list of structs: int64 offsets over the rows, and one flat
array a per-position feature. Per-sample columns follow: `context:<name>`, then `label`, `weight` and `key` where the source has them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from distrag.data.checks import AGAIN, check_columns, check_offsets, check_size, check_vocabulary
from distrag.data.checks import verify as verify_content
from distrag.data.content import SAMPLES, read_vocabulary
from distrag.data.remote import is_url
from distrag.data.schema import SCHEMA_FILE, Schema, load_schema, named
from distrag.data.stage import DEFAULT_CACHE, Stage, read_staged
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Store:
    """Columns of one data set; every array is a view of the mapped file.

    Attributes:
        path: folder of the store.
        schema: what the columns mean.
        offsets: int64 `[N+1]`, where each row starts in the per-position arrays.
        held: int64 `[K, 2]`, ascending spans of the rows whose values may be read; None holds all. Of the other rows only the lengths are
            known: they keep their numbers and their places in the columns, but what stands there is nothing.
    """

    path: Path
    schema: Schema
    offsets: NDArray[np.int64]
    columns: Mapping[str, NDArray[Any]] = field(repr=False)
    held: NDArray[np.int64] | None = None

    @property
    def num_samples(self) -> int:
        """Rows (`N`)."""
        return self.schema.num_samples

    def __len__(self) -> int:
        """Rows (`N`), as a data set for a sampler."""
        return self.num_samples

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

    def check_held(self, rows: NDArray[np.int64]) -> None:
        """Refuses rows whose values are not here, which would read as zeros.

        Raises:
            ValueError: naming the first of them.
        """
        if self.held is None:
            return
        at = np.searchsorted(self.held[:, 0], rows, side="right") - 1
        absent = np.flatnonzero((at < 0) | (rows >= np.append(self.held[:, 1], 0)[at]))
        if len(absent):
            todo = "plan with the shares that the store was opened for (distrag.batching.nodes), or open all of it"
            wanted = f"rows of {len(self.held)} spans"
            raise problem("A row that is not held here", got=int(rows[absent[0]]), wanted=wanted, where=self.path, todo=todo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the path alone, so that a worker process maps the file itself."""
        return open_folder, (self.path, self.held)


_VOCABULARY = "read Schema.tables first, or prepare the feature with a vocabulary instead of num_buckets"


def open_store(path: str | Path, *, verify: bool = False, cache: str | Path | None = None) -> Store:
    """Returns the store at `path`, mapped and not copied; one that lies elsewhere is staged in the cache first.

    Args:
        path: folder written by `distrag prepare`, or the address of one: `s3://bucket/store`, `https://...`, whatever fsspec reads.
        verify: also read every byte: ids inside their tables, numbers finite, content hash as recorded.
        cache: folder for what is staged; otherwise `data/cache` for an address, and no copy of a folder.

    Raises:
        ValueError: when there is no store, it was written by another format version, the file is truncated or altered, its columns
            are not those of the schema, its offsets do not describe its positions, or it cannot be staged.
    """
    if not is_url(path) and cache is None:
        return open_folder(path, verify=verify)
    stage = Stage(path, cache or DEFAULT_CACHE)
    for _ in stage.fetch():
        pass
    return open_folder(stage.folder, verify=verify)


def open_folder(path: str | Path, held: NDArray[np.int64] | None = None, *, verify: bool = False) -> Store:
    """Returns the store in a folder of this machine.

    Args:
        path: the folder.
        held: int64 `[K, 2]`, spans of rows that may be read, as in `Store`; the others need not have been staged.
        verify: as for `open_store`.

    Raises:
        ValueError: as `open_store` does.
    """
    path = Path(path)
    if not os.path.isfile(path / SCHEMA_FILE):
        todo = "give the folder that `distrag prepare ... --out` wrote"
        raise problem("No store here", got="no schema.yaml", wanted=f"a folder with {SCHEMA_FILE} and {SAMPLES}", where=path, todo=todo)
    schema = load_schema(path / SCHEMA_FILE)
    check_size(path, schema)
    if held is None and not read_staged(path).all():
        todo = "open it by the address that it was staged from, which fetches the rest"
        raise problem("Only a part of this store was staged", got="holes", wanted="all blocks", where=path, todo=todo)
    batch = _read_batch(path / SAMPLES)
    check_columns(path, batch, schema)
    store = Store(path, schema, *_arrays(batch, schema), held)
    check_offsets(store)
    for table in schema.tables:
        if table.kind == "vocabulary":
            check_vocabulary(path, table.name, table.num_rows - 1)
    if verify:
        verify_content(store)
    return store


def _read_batch(file: Path) -> pa.RecordBatch:
    try:
        with pa.ipc.open_file(pa.memory_map(str(file))) as reader:
            count = reader.num_record_batches
            batch = reader.get_batch(0) if count == 1 else None
            if batch is not None:
                batch.validate()
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise problem("Not readable as Arrow", got=str(error).split("\n")[0], wanted="an Arrow IPC file", where=file, todo=AGAIN) from error
    if batch is None:
        raise problem("Not one record batch", got=f"{count} record batches", wanted=1, where=file, todo=AGAIN)
    return batch


def _arrays(batch: pa.RecordBatch, schema: Schema) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    history = batch.column("history")
    columns = {f"history:{f.name}": history.values.field(i).to_numpy(zero_copy_only=True) for i, f in enumerate(schema.history)}
    for name in batch.schema.names[1:]:
        columns[name] = batch.column(name).to_numpy(zero_copy_only=True)
    return history.offsets.to_numpy(zero_copy_only=True), columns
