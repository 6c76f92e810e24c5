"""A source becomes a store: Parquet, CSV events, a named source or a table in memory, streamed once and written in one rename."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distrag.data.collect import Ids, Numbers, Spool, Times, per_sample, time_order
from distrag.data.events import event_rows
from distrag.data.files import Batch, Rows, find_files, hash_file, hash_table, is_parquet, parquet_rows, table_rows
from distrag.data.flatten import decode, flatten, integers, texts
from distrag.data.recipe import FeatureRecipe, Recipe, build_recipe, read_recipe
from distrag.data.schema import FORMAT_VERSION, SCHEMA_FILE, Feature, Schema, load_schema
from distrag.data.sources import MovieLensConfig, named_rows
from distrag.data.store import open_store
from distrag.data.synthetic import SyntheticConfig
from distrag.data.vocabulary import TableBuilder, hash_text, read_values
from distrag.data.write import build_tables, new_folder, publish, write_columns
from distrag.problem import problem

Source: TypeAlias = str | Path | Sequence[str | Path] | pa.Table
"""A path, a glob, a schema YAML with `source:`, `ml-100k`, `synthetic`, a list of paths, or a table in memory."""

_STRANGE_ROWS = 8


def prepare(
    source: Source,
    out: str | Path,
    *,
    schema: str | Path | None = None,
    overwrite: bool = False,
    on_unknown: Literal["count", "error"] = "count",
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    header: list[str] | None = None,
    ml_100k: MovieLensConfig | None = None,
    synthetic: SyntheticConfig | None = None,
    read_rows: int = 1 << 14,
) -> Schema:
    """Returns the schema of the store written to `out`; an equal store that is already there is kept and its schema returned.

    Args:
        source: a Parquet or CSV file, a folder, a glob, a list of these, a schema YAML that has `source:`, `ml-100k` or `synthetic`.
        out: folder of the store.
        schema: YAML that names features; what it does not say is inferred from types and names.
        overwrite: replace what stands at `out`.
        on_unknown: `count` sends null, negative and unlisted ids to row 0 and counts them, `error` refuses the first one.
        user: column of the user in a CSV of events.
        item: column of the item in a CSV of events.
        time: column of the time in a CSV of events.
        header: names of the columns of a CSV that has no header line.
        ml_100k: where the named source ml-100k comes from.
        synthetic: size and shape of the named source synthetic.
        read_rows: rows of a batch while reading; bounds the memory.

    Raises:
        ValueError: in five parts, when the source, the schema or a value in them cannot be used, or another store stands at `out`.
    """
    out = Path(out)
    if schema is None and isinstance(source, (str, Path)) and str(source).endswith((".yaml", ".yml")):
        schema = source
    asked = read_recipe(Path(schema)) if schema is not None else {}
    if schema is not None and source == schema:
        source = _source_of(asked, Path(schema))
    where = str(schema) if schema is not None else "columns of the source"
    roles = {role: name for role, name in (("user", user), ("item", item), ("time", time)) if name is not None}
    rows, defaults = _open_rows(source, asked, roles, header, ml_100k or MovieLensConfig(), synthetic or SyntheticConfig(), read_rows)
    recipe = build_recipe(rows.types, {**defaults, **asked}, where, rows.roles)
    provenance = {**rows.provenance, "recipe": _recipe_facts(recipe)}
    fingerprint = hashlib.blake2b(json.dumps([FORMAT_VERSION, provenance], sort_keys=True).encode(), digest_size=16).hexdigest()
    if out.exists() and not overwrite:
        return _kept(out, fingerprint)
    recipe = _leave_out_strangers(recipe, rows, inferred="history" not in {**defaults, **asked})
    for column, why in recipe.left_out.items():
        _say(f"left out column {column!r}: {why}")
    provenance |= {"fingerprint": fingerprint, "source": _source_name(source), "left_out": dict(recipe.left_out)}
    with new_folder(out) as folder:
        with Spool(folder / "spool") as spool:
            building = _Building(recipe, rows, spool)
            building.read()
            made = building.write(folder, provenance, on_unknown)
        if not publish(folder, out, overwrite=overwrite):
            return _kept(out, fingerprint)
    return made


@dataclass
class _Building:
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
        if not self.num_samples:
            todo = "give a source with at least one row"
            raise problem("No rows in the source", got="0 rows", wanted="at least 1", where=self.rows.provenance, todo=todo)

    def _read_history(self, file: str, first: int, batch: Batch) -> None:
        flat = {column: flatten(batch[column]) for column in dict.fromkeys(f.column for f in self.recipe.history)}
        lengths, _, nulls = next(iter(flat.values()))
        _check_lengths({column: part[0] for column, part in flat.items()}, file, first)
        times = {
            f.name: c.read(flat[f.column][1], lengths, f"{file}, column {f.column!r}") for f, c in self.history if isinstance(c, Times)
        }
        order = time_order(next(iter(times.values())), lengths) if times else None
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
            self.spool.append("key", _keys(decode(batch[self.recipe.key]), f"{file}, column {self.recipe.key!r}"))

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


def _open_rows(
    source: Source,
    asked: Mapping[str, Any],
    roles: Mapping[str, str],
    header: list[str] | None,
    ml_100k: MovieLensConfig,
    synthetic: SyntheticConfig,
    read_rows: int,
) -> tuple[Rows, dict[str, Any]]:
    if isinstance(source, pa.Table):
        return table_rows(source, read_rows, {"table": hash_table(source)}), {}
    named = named_rows(str(source), ml_100k, synthetic, read_rows) if isinstance(source, (str, Path)) else None
    if named is not None:
        return named
    files = find_files(source)
    parquet = [is_parquet(f) for f in files]
    if any(parquet) != all(parquet):
        other = files[parquet.index(not parquet[0])]
        raise problem(
            "Files of two kinds",
            got=f"{files[0].name} and {other.name}",
            wanted="Parquet only, or CSV only",
            where=source,
            todo="prepare them apart",
        )
    if all(parquet):
        return parquet_rows(files, read_rows), {}
    events = dict(asked.get("events") or {})
    per_user = [f.column or f.name for f in asked.get("context", ())] + [asked[n] for n in ("label", "weight") if asked.get(n)]
    return event_rows(files, {**events, **roles}, per_user, read_rows, header or events.get("header")), {}


def _source_of(asked: Mapping[str, Any], schema: Path) -> Source:
    found = asked.get("source")
    if not found:
        raise problem(
            "A schema without source",
            got="no `source:`",
            wanted="a path, or a list of paths",
            where=schema,
            todo="add it, or give SOURCE and --schema",
        )
    paths = found if isinstance(found, list) else [found]
    return [schema.parent / str(path) for path in paths]


def _source_name(source: Source) -> Any:
    if isinstance(source, pa.Table):
        return "table in memory"
    return str(source) if isinstance(source, (str, Path)) else [str(part) for part in source]


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(json.dumps(asdict(replace(recipe, left_out={}))))
    for table in facts["tables"].values():
        if table["vocabulary"] is not None:
            path = Path(table["vocabulary"])
            table["vocabulary"] = [path.name, hash_file(path) if path.is_file() else hash_file(path.with_name(path.name.rsplit(":", 1)[0]))]
    return facts


def _kept(out: Path, fingerprint: str) -> Schema:
    there = load_schema(out / SCHEMA_FILE).provenance.get("fingerprint") if (out / SCHEMA_FILE).is_file() else None
    if there != fingerprint:
        got = "a store of another source, or of other options" if there else "something that is no prepared store"
        raise problem(
            "The output folder is taken",
            got=got,
            wanted="a new folder",
            where=out,
            todo="give another --out, or replace it with --overwrite",
        )
    return open_store(out).schema


def _leave_out_strangers(recipe: Recipe, rows: Rows, *, inferred: bool) -> Recipe:
    # A list of another length in most rows (a fixed set of negatives, say) is no history; in a few rows it is a fault and refused later.
    if not inferred:
        return recipe
    batch = next((b for _, _, b in rows.batches(recipe.columns) if len(b[recipe.history[0].column])), None)
    if batch is None or len(batch[recipe.history[0].column]) < _STRANGE_ROWS:
        return recipe
    wanted = flatten(batch[recipe.history[0].column])[0]
    strange = {f.name for f in recipe.history if np.mean(flatten(batch[f.column])[0] != wanted) > 0.5}
    why = f"its lists are not as long as those of {recipe.history[0].name}"
    left_out = {**recipe.left_out, **dict.fromkeys(sorted(strange), why)}
    return replace(recipe, history=tuple(f for f in recipe.history if f.name not in strange), left_out=left_out)


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


def _keys(values: pa.Array, where: str) -> NDArray[np.int64]:
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type) or pa.types.is_null(values.type):
        whole, null = integers(values, where)
        return np.where(null, -1, whole)
    encoded = texts(values).dictionary_encode()
    codes = [hash_text(word, (1 << 63) - 1) for word in encoded.dictionary.to_pylist()]
    index: NDArray[np.int64] = encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
    found: NDArray[np.int64] = np.array([*codes, -1], np.int64)[index]
    return found


def _say(text: str) -> None:
    print(f"distrag prepare: {text}", file=sys.stderr)
