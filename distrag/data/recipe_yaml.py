"""The schema a user writes: a YAML of sections, each of which replaces what would be inferred.

source: clicks/*.parquet          # a path or a list, relative to this file; then SOURCE is this file
events: {user: who, item: what}   # columns of a CSV of events; header: [names] where a file has no header line
history:                          # per position, in this order; a list of names, or name: kind, or name: {options}
  item_id: {kind: id, table: item}
  url: {kind: id, num_buckets: 100000}
  price: {kind: number, transform: log, column: price_eur}
  seen_at: {kind: time, gap: bucket, unit: ms}
context: {last_item: {kind: id, table: item}, age: number}
label: bought
weight: null
key: user_id
tables: {item: {vocabulary: items.parquet:item_id}}
"""

from __future__ import annotations

import difflib
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from distrag.data.flatten import Unit
from distrag.data.recipe import FeatureRecipe, TableRecipe
from distrag.data.schema import Gap, Kind, Transform
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Mapping

_DOCS = "sections: source, events, history, context, label, weight, key, tables; see `distrag prepare --help`"


def read_recipe(path: Path) -> dict[str, Any]:
    """Returns the sections of a schema YAML written by the user, checked for unknown keys; `source` and `vocabulary` relative to it."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise problem(
            "The schema cannot be read", got=str(error).replace("\n", " "), wanted="a YAML file", where=path, todo=_DOCS
        ) from error
    if not isinstance(raw, dict):
        raise problem("Not a schema", got=type(raw).__name__, wanted="a mapping", where=path, todo=_DOCS)
    sections = ("source", "events", "history", "context", "label", "weight", "key", "tables")
    _known(raw, sections, str(path))
    if "events" in raw:
        _known(_mapping(raw["events"], f"{path}, events"), ("user", "item", "time", "header"), f"{path}, events")
    for name in ("history", "context"):
        if name in raw:
            raw[name] = _feature_recipes(raw[name], f"{path}, {name}")
    if "tables" in raw:
        raw["tables"] = {
            n: _from_mapping(TableRecipe, e, f"{path}, tables.{n}") for n, e in _mapping(raw["tables"], f"{path}, tables").items()
        }
        for name, table in raw["tables"].items():
            if table.vocabulary is not None:
                raw["tables"][name] = replace(table, vocabulary=str(path.parent / table.vocabulary))
    return raw


def _feature_recipes(raw: Any, where: str) -> tuple[FeatureRecipe, ...]:
    if isinstance(raw, list):
        raw = {str(name): None for name in raw}
    made = []
    for name, entry in _mapping(raw, where).items():
        entry = {"kind": entry} if isinstance(entry, str) else {} if entry is None else entry
        made.append(_from_mapping(FeatureRecipe, {**_mapping(entry, f"{where}.{name}"), "name": name}, f"{where}.{name}"))
    return tuple(made)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": (None, *get_args(Kind)),
    "transform": get_args(Transform),
    "gap": get_args(Gap),
    "unit": get_args(Unit),
}


def _from_mapping(kind: type[Any], raw: Any, where: str) -> Any:
    _known(_mapping(raw, where), [f.name for f in fields(kind)], where)
    for name, choices in _CHOICES.items():
        if name in raw and raw[name] not in choices:
            raise problem(
                "Not one of the choices",
                got=raw[name],
                wanted=f"one of {list(choices)}",
                where=f"{where}.{name}",
                todo="choose one of them",
            )
    buckets = raw.get("num_buckets")
    if buckets is not None and (not isinstance(buckets, int) or buckets < 1):
        raise problem(
            "Not a number of buckets",
            got=buckets,
            wanted="an integer from 1 on",
            where=f"{where}.num_buckets",
            todo="give the number of rows",
        )
    return kind(**raw)


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise problem("Not a mapping", got=raw, wanted="name: options", where=where, todo=_DOCS)
    return {str(name): value for name, value in raw.items()}


def _known(raw: Mapping[str, Any], known: tuple[str, ...] | list[str], where: str) -> None:
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            todo = f"did you mean {near[0]!r}?" if near else "take it out"
            raise problem("An unknown key", got=name, wanted=f"one of {list(known)}", where=where, todo=todo)
