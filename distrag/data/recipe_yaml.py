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
from typing import TYPE_CHECKING, Any, get_type_hints

from distrag.data.plain_types import WrongType, convert, describe
from distrag.data.recipe import FeatureRecipe, TableRecipe
from distrag.data.text_file import parse_yaml, read_small
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_DOCS = "sections: source, events, history, context, label, weight, key, tables; see `distrag prepare --help`"
_SECTIONS: dict[str, Any] = {
    "source": str | list[str] | None,
    "events": Any,
    "history": Any,
    "context": Any,
    "label": str | None,
    "weight": str | None,
    "key": str | None,
    "tables": Any,
}
_EVENTS: dict[str, Any] = {"user": str | None, "item": str | None, "time": str | None, "header": list[str] | None}


def read_recipe(path: Path) -> dict[str, Any]:
    """Returns the sections of a schema YAML written by the user, checked for unknown keys; `source` and `vocabulary` relative to it.

    Raises:
        ValueError: it cannot be read, or holds an unknown key or a value of another type.
    """
    found = parse_yaml(read_small(path, what="The schema", todo=_DOCS), path, what="The schema", todo=_DOCS)
    raw = _typed(found, _SECTIONS, str(path))
    if "events" in raw:
        raw["events"] = {} if raw["events"] is None else _typed(raw["events"], _EVENTS, f"{path}, events")
    for name in ("history", "context"):
        if name in raw:
            raw[name] = _feature_recipes(raw[name], f"{path}, {name}")
    if "tables" in raw:
        given = {} if raw["tables"] is None else raw["tables"]
        made = {n: _from_mapping(TableRecipe, e, f"{path}, tables.{n}") for n, e in _mapping(given, f"{path}, tables").items()}
        raw["tables"] = {n: t if t.vocabulary is None else replace(t, vocabulary=str(path.parent / t.vocabulary)) for n, t in made.items()}
    return raw


def _feature_recipes(raw: Any, where: str) -> tuple[FeatureRecipe, ...]:
    if raw is None:
        raw = {}
    if isinstance(raw, list) and all(isinstance(name, str) for name in raw):
        twice = sorted({name for name in raw if raw.count(name) > 1})
        if twice:
            raise problem("A feature is named twice", got=twice, wanted="each once", where=where, todo="leave one of them out")
        raw = dict.fromkeys(raw)
    made = []
    for name, entry in _mapping(raw, where).items():
        entry = {"kind": entry} if isinstance(entry, str) else {} if entry is None else entry
        made.append(_from_mapping(FeatureRecipe, {**_mapping(entry, f"{where}.{name}"), "name": name}, f"{where}.{name}"))
    return tuple(made)


def _from_mapping(kind: type[Any], raw: Any, where: str) -> Any:
    hints = get_type_hints(kind)
    values = _typed(raw, {f.name: hints[f.name] for f in fields(kind)}, where)
    buckets = values.get("num_buckets")
    if buckets is not None and not 1 <= buckets <= _MOST_BUCKETS:
        todo = "give the number of rows"
        raise problem("Not a number of buckets", got=buckets, wanted=f"1 to {_MOST_BUCKETS:,}", where=f"{where}.num_buckets", todo=todo)
    return kind(**values)


_MOST_BUCKETS = 2**40


def _typed(raw: Any, hints: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a mapping whose keys are among `hints` and whose values are of these types."""
    made = _mapping(raw, where)
    _known(made, list(hints), where)
    for name, value in made.items():
        try:
            made[name] = convert(value, hints[name])
        except WrongType:
            wanted, got = describe(hints[name]), f"{value!r:.80}"
            raise problem("A value of another type", got=got, wanted=wanted, where=f"{where}.{name}", todo=f"mend it; {_DOCS}") from None
    return made


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise problem("Not a mapping", got="nothing" if raw is None else f"{raw!r:.80}", wanted="name: options", where=where, todo=_DOCS)
    return dict(raw)


def _known(raw: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name[:200], known, n=1)
            todo = f"did you mean {near[0]!r}?" if near else "take it out"
            raise problem("An unknown key", got=name, wanted=f"one of {list(known)}", where=where, todo=todo)
