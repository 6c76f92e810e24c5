"""Rows become columns: one pass over the source into flat files, then vocabularies, then the finished store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from distrag.data.collect import Ids, Numbers, Spool, Times, per_sample
from distrag.data.files import Batch, Rows
from distrag.data.flatten import decode, flatten, integers, texts
from distrag.data.recipe import FeatureRecipe, Recipe
from distrag.data.schema import Feature, Schema
from distrag.data.vocabulary import TableBuilder, hash_text, read_values
from distrag.data.write import build_tables, write_columns
from distrag.problem import problem


@dataclass
class Building:
    """One store on its way from rows to columns."""

    recipe: Recipe
    rows: Rows
    spool: Spool
    files: list[tuple[int, str, int]] = field(default_factory=list)
    num_samples: int = 0
    num_positions: int = 0
    null_histories: int = 0

    def __post_init__(self) -> None:
        self.tables = _table_builders(self.recipe, self.rows)
        self.history = [(f, self._collector(f, "history")) for f in self.recipe.history]
        self.context = [(f, self._collector(f, "context")) for f in self.recipe.context]
        self.spool.append("offsets", np.zeros(1, np.int64))

    def _collector(self, f: FeatureRecipe, place: str) -> Ids | Numbers | Times:
        column = f"{place}:{f.name}"
        if f.kind == "id":
            return Ids(f, column, self.tables[f.table or f.name])
        return Times(f, column) if f.kind == "time" else Numbers(f, column)

    def read(self) -> None:
        """Streams the source once."""
        for file, first, batch in self.rows.batches(self.recipe.columns):
            self.files.append((self.num_samples, file, first))
            self._read_history(file, first, batch)
            self._read_context(file, first, batch)

    def _read_history(self, file: str, first: int, batch: Batch) -> None:
        flat = {column: flatten(batch[column]) for column in dict.fromkeys(f.column for f in self.recipe.history)}
        lengths, _, nulls = next(iter(flat.values()))
        _check_lengths({column: part[0] for column, part in flat.items()}, file, first)
        times = {
            f.name: c.read(flat[f.column][1], lengths, f"{file}, column {f.column!r}") for f, c in self.history if isinstance(c, Times)
        }
        clock = next(((f, c) for f, c in self.history if isinstance(c, Times)), None)
        order = clock[1].order(flat[clock[0].column][1], lengths, file) if clock else None
        for f, collector in self.history:
            if isinstance(collector, Times):
                collector.add(self.spool, times[f.name], order)
            else:
                collector.add(self.spool, flat[f.column][1], order, f"{file}, column {f.column!r}")
        self.spool.append("offsets", self.num_positions + np.cumsum(lengths))
        self.num_samples += len(lengths)
        self.num_positions += int(lengths.sum())
        self.null_histories += nulls

    def _read_context(self, file: str, first: int, batch: Batch) -> None:
        for f, collector in self.context:
            values, where = decode(batch[f.column]), f"{file}, column {f.column!r}"
            if isinstance(collector, Times):
                collector.add(self.spool, collector.read(values, np.ones(len(values), np.int64), where), None)
            else:
                collector.add(self.spool, values, None, where)
        for name in ("label", "weight"):
            column = getattr(self.recipe, name)
            if column is not None:
                self.spool.append(name, per_sample(decode(batch[column]), name, f"{file}, column {column!r}", first))
        if self.recipe.key is not None:
            where = f"{file}, column {self.recipe.key!r}"
            self.spool.append("key", _keys(decode(batch[self.recipe.key]), self.num_samples - len(batch[self.recipe.key]), where))

    def write(self, folder: Path, provenance: Mapping[str, Any], on_unknown: str) -> Schema:
        """Returns the schema of the store it writes into `folder`."""
        words = {name: table.finish() for name, table in self.tables.items()}
        if on_unknown == "error":
            self._refuse_unknown()
        history = [self._finish(c) for _, c in self.history]
        context = [self._finish(c) for _, c in self.context]
        unknown: dict[str, int] = {}
        for made in history + context:
            if made.kind == "id" and made.table is not None:
                unknown[made.table] = unknown.get(made.table, 0) + made.num_null + made.num_unknown
        kinds = {name: "hashed" if table.num_buckets is not None else "vocabulary" for name, table in self.tables.items()}
        tables = build_tables(history + context, {n: t.num_rows for n, t in self.tables.items()}, kinds, unknown)
        facts = {**provenance, "num_null_histories": self.null_histories}
        schema = Schema(tuple(history), tuple(context), self.recipe.label, self.recipe.weight, self.recipe.key, tables, provenance=facts)
        names = [f"history:{f.name}" for f in history] + [f"context:{f.name}" for f in context]
        names += [n for n in ("label", "weight", "key") if getattr(schema, n) is not None]
        columns = {name: self.spool.read(name) for name in names}
        return write_columns(folder, schema, self.spool.read("offsets"), columns, {n: w for n, w in words.items() if w is not None})

    def _finish(self, collector: Ids | Numbers | Times) -> Feature:
        return collector.finish() if isinstance(collector, Times) else collector.finish(self.spool)

    def _refuse_unknown(self) -> None:
        offsets = self.spool.read("offsets")
        for place, collectors in (("history", self.history), ("context", self.context)):
            for f, collector in collectors:
                found = collector.unknown(self.spool) if isinstance(collector, Ids) else None
                if found is None:
                    continue
                index, bad, raw = found
                sample = int(np.searchsorted(offsets, index, side="right")) - 1 if place == "history" else index
                inside = bad[bad < offsets[sample + 1]][:10] - offsets[sample] if place == "history" else np.zeros(0, np.int64)
                at = f", positions {', '.join(map(str, inside))}" if place == "history" else ""
                start, file, first = self.files[int(np.searchsorted([s for s, _, _ in self.files], sample, side="right")) - 1]
                where = f"feature {f.name!r}, sample {sample}{at} ({file}, row {first + sample - start})"
                todo = "mend the ids, extend the vocabulary, or prepare with on_unknown: count"
                wanted = f"ids of table {f.table or f.name!r}"
                raise problem("Unknown ids", got=raw[: max(1, len(inside))], wanted=wanted, where=where, todo=todo)


def _table_builders(recipe: Recipe, rows: Rows) -> dict[str, TableBuilder]:
    made: dict[str, TableBuilder] = {}
    ids = [f for f in recipe.history + recipe.context if f.kind == "id"]
    for name in dict.fromkeys(f.table or f.name for f in ids):
        asked = recipe.tables.get(name)
        values = read_values(asked.vocabulary) if asked is not None and asked.vocabulary is not None else None
        is_text = any(rows.types[f.column].element == "text" for f in ids if (f.table or f.name) == name)
        is_text = is_text or (values is not None and not pa.types.is_integer(values.type))
        made[name] = TableBuilder(name, text=is_text, num_buckets=asked.num_buckets if asked is not None else None, vocabulary=values)
    return made


def _check_lengths(lengths: Mapping[str, NDArray[np.int64]], file: str, first: int) -> None:
    (name, wanted), *others = lengths.items()
    for other, got in others:
        bad = np.flatnonzero(got != wanted)
        if len(bad):
            row = int(bad[0])
            where = f"{file}, row {first + row}, columns {name!r} and {other!r}"
            todo = "mend the row, or leave the column out with a schema that names the history features"
            found = f"{wanted[row]} and {got[row]} positions"
            raise problem("Lists of one row differ in length", got=found, wanted="one length a row", where=where, todo=todo)


def _keys(values: pa.Array, first: int, where: str) -> NDArray[np.int64]:
    """Returns a number for whose row it is; a row of nobody gets one that no other row has, from the smallest integer on.

    Args:
        values: the raw keys.
        first: number of the first row.
        where: for the error.
    """
    nobody = np.iinfo(np.int64).min + first + np.arange(len(values))
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_null(values.type):
        whole, null = integers(values, where)
        return np.where(null, nobody, whole)
    encoded = texts(values).dictionary_encode()
    codes = np.array([*(hash_text(word, (1 << 63) - 1) for word in encoded.dictionary.to_pylist()), 0], np.int64)
    null = pc.is_null(encoded.indices).to_numpy(zero_copy_only=False)
    index: NDArray[np.int64] = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
    return np.where(null, nobody, codes[index])
