"""A source becomes a store: Parquet, CSV events, a named source or a table in memory, streamed once and written in one rename."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from distrag.data.building import Building
from distrag.data.collect import Spool
from distrag.data.events import event_rows
from distrag.data.files import Rows, check_path, find_files, hash_file, hash_table, is_parquet, parquet_rows, table_rows
from distrag.data.flatten import flatten
from distrag.data.recipe import Recipe, build_recipe
from distrag.data.recipe_yaml import read_recipe
from distrag.data.schema import FORMAT_VERSION, SCHEMA_FILE, Schema, load_schema
from distrag.data.sources import MovieLensConfig, named_rows
from distrag.data.store import open_store
from distrag.data.synthetic import SyntheticConfig
from distrag.data.vocabulary import vocabulary_file
from distrag.data.write import new_folder, publish
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
    check_path(out)
    out = Path(out)
    if schema is None and isinstance(source, (str, Path)) and str(source).endswith((".yaml", ".yml")):
        schema = source
    asked = read_recipe(Path(schema)) if schema is not None else {}
    if schema is not None and source == schema:
        source = _source_of(asked, Path(schema))
    where = str(schema) if schema is not None else f"columns of {_place_of(source)}"
    roles = {role: name for role, name in (("user", user), ("item", item), ("time", time)) if name is not None}
    rows, defaults = _open_rows(source, asked, roles, header, ml_100k or MovieLensConfig(), synthetic or SyntheticConfig(), read_rows)
    recipe = build_recipe(rows.types, {**defaults, **asked}, where, rows.roles)
    provenance = {**rows.provenance, "recipe": _recipe_facts(recipe)}
    facts = dict(provenance)
    taken = _taken(out)
    if taken and not overwrite:
        return _kept(out, facts)
    recipe = _leave_out_strangers(recipe, rows, inferred="history" not in {**defaults, **asked})
    for column, why in recipe.left_out.items():
        _say(f"left out column {column!r}: {why}")
    provenance |= {"fingerprint": _fingerprint(facts, FORMAT_VERSION), "source": _source_name(source), "left_out": dict(recipe.left_out)}
    made = _write(out, recipe, rows, provenance, on_unknown, overwrite)
    return _kept(out, facts) if made is None else made


def _write(out: Path, recipe: Recipe, rows: Rows, provenance: Mapping[str, Any], on_unknown: str, overwrite: bool) -> Schema | None:
    with new_folder(out) as folder:
        with Spool(folder / "spool") as spool:
            building = Building(recipe, rows, spool)
            building.read()
            if not building.num_samples:
                where = provenance["source"]
                raise problem("No rows in the source", got="0 rows", wanted="at least 1", where=where, todo="give another source")
            made = building.write(folder, provenance, on_unknown)
        return made if publish(folder, out, overwrite=overwrite) else None


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


def _place_of(source: Source) -> str:
    if isinstance(source, pa.Table):
        return "the table in memory"
    return str(source) if isinstance(source, (str, Path)) else ", ".join(map(str, source[:3])) + (", ..." if len(source) > 3 else "")


def _source_name(source: Source) -> Any:
    if isinstance(source, pa.Table):
        return "table in memory"
    return str(source) if isinstance(source, (str, Path)) else [str(part) for part in source]


def _recipe_facts(recipe: Recipe) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(json.dumps(asdict(replace(recipe, left_out={}))))
    for table in facts["tables"].values():
        if table["vocabulary"] is not None:
            name = Path(table["vocabulary"]).name
            table["vocabulary"] = [name, hash_file(vocabulary_file(table["vocabulary"])[0])]
    return facts


def _taken(out: Path) -> bool:
    if not os.path.lexists(out) or (os.path.isdir(out) and not os.listdir(out)):
        return False
    if not os.path.isfile(out / SCHEMA_FILE):
        todo = "give another --out; --overwrite replaces a store and nothing else"
        raise problem("The output folder is taken", got="something that is no prepared store", wanted="a new folder", where=out, todo=todo)
    return True


def _fingerprint(facts: Mapping[str, Any], version: int) -> str:
    return hashlib.blake2b(json.dumps([version, facts], sort_keys=True).encode(), digest_size=16).hexdigest()


def _kept(out: Path, facts: Mapping[str, Any]) -> Schema:
    there = load_schema(out / SCHEMA_FILE)
    if there.provenance.get("fingerprint") != _fingerprint(facts, there.format_version):
        got = "a store of another source, or of other options"
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


def _say(text: str) -> None:
    print(f"distrag prepare: {text}", file=sys.stderr)
