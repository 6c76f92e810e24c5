"""What to make of the columns of a source: as the user asks, and inferred from types and names where he says nothing."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distrag.data.flatten import ColumnType, Unit
from distrag.data.schema import Gap, Kind, Transform, check_name
from distrag.problem import problem

if TYPE_CHECKING:
    from collections.abc import Mapping

USERS = re.compile(r"(user|customer|member|visitor)(_?(id|idx|index))?|uid|.*_(user|customer)_?id", re.IGNORECASE)
ITEMS = (
    "item_id",
    "item",
    "itemid",
    "item_idx",
    "iid",
    "movie_id",
    "movieid",
    "product_id",
    "article_id",
    "asin",
    "parent_asin",
    "sku",
    "track_id",
)
TIMES = ("timestamp", "timestamps", "time", "times", "ts", "unix_time", "unix_timestamp", "event_time", "datetime", "date")


@dataclass(frozen=True)
class FeatureRecipe:
    """How one column becomes a feature.

    Attributes:
        column: column of the source; otherwise the one named like the feature.
        kind: `id`, `number` or `time`; otherwise inferred from the type.
        table: table of an id; otherwise one named like the feature.
        num_buckets: hash ids into this many rows instead of building a vocabulary.
        transform: of a number; otherwise `standard`.
        gap: of a time.
        unit: of a time that is a plain number.
    """

    name: str = ""
    column: str = ""
    kind: Kind | None = None
    table: str | None = None
    num_buckets: int | None = None
    transform: Transform = "standard"
    gap: Gap = "none"
    unit: Unit = "s"


@dataclass(frozen=True)
class TableRecipe:
    """How the rows of one table are found.

    Attributes:
        num_buckets: hash into this many rows.
        vocabulary: file whose values are the vocabulary, as `FILE` or `FILE:COLUMN`; other values are unknown.
    """

    num_buckets: int | None = None
    vocabulary: str | None = None


@dataclass(frozen=True)
class Recipe:
    """What to make of all columns.

    Attributes:
        history: per-position features, in order.
        context: per-sample features, in order.
        label: column, or None.
        weight: column, or None.
        key: column, or None.
        tables: by name; a table not named here has a vocabulary of its own values.
        left_out: columns that no feature can hold, with the reason; only an inferred recipe has any.
    """

    history: tuple[FeatureRecipe, ...] = ()
    context: tuple[FeatureRecipe, ...] = ()
    label: str | None = None
    weight: str | None = None
    key: str | None = None
    tables: Mapping[str, TableRecipe] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """Columns of the source that are read."""
        extra = [c for c in (self.label, self.weight, self.key) if c is not None]
        return list(dict.fromkeys([f.column for f in self.history + self.context] + extra))


def build_recipe(types: Mapping[str, ColumnType], asked: Mapping[str, Any], where: str, roles: Mapping[str, str] | None = None) -> Recipe:
    """Returns the recipe for columns of these types; sections that `asked` holds are taken from it, the others inferred.

    Raises:
        ValueError: when a section names a column that is not there or that no feature can hold, or options contradict each other.
    """
    guess = infer_recipe(types, roles or {})
    chosen: dict[str, Any] = {}
    for name in ("label", "weight", "key"):
        chosen[name] = asked[name] if name in asked else getattr(guess, name)
        if chosen[name] is not None:
            _find(types, chosen[name], "scalar", f"{where}, {name}")
    for name, shape in (("history", "list"), ("context", "scalar")):
        if name in asked:
            chosen[name] = tuple(_complete(f, types, shape, f"{where}, {name}.{f.name}") for f in asked[name])
        else:
            chosen[name] = tuple(f for f in getattr(guess, name) if f.column not in (chosen["label"], chosen["weight"], chosen["key"]))
    names = [f.name for f in (*chosen["history"], *chosen["context"])]
    twice = sorted({name for name in names if names.count(name) > 1})
    for f in (*chosen["history"], *chosen["context"]):
        check_name(f.name, f"{where}, {f.name!r}")
        check_name(f.table or f.name, f"{where}, table of {f.name!r}")
    if twice:
        raise problem("Two features of one name", got=twice, wanted="each name once", where=where, todo="rename one with `column:`")
    recipe = Recipe(**chosen, tables=_tables(chosen, asked.get("tables", {}), where), left_out={} if "history" in asked else guess.left_out)
    if not recipe.history:
        todo = "give list columns, or a CSV of (user, item, time); left out: " + (
            ", ".join(f"{n} ({w})" for n, w in recipe.left_out.items()) or "none"
        )
        raise problem("No per-position feature", got=f"columns {list(types)}", wanted="at least one list column", where=where, todo=todo)
    return recipe


def infer_recipe(types: Mapping[str, ColumnType], roles: Mapping[str, str]) -> Recipe:
    """Returns what roles, names and types suggest; columns that no feature can hold are in `left_out`."""
    history: list[FeatureRecipe] = []
    context: list[FeatureRecipe] = []
    left_out: dict[str, str] = {}
    users = [n for n, t in types.items() if t.shape == "scalar" and USERS.fullmatch(n) and t.element in ("int", "text")]
    key = roles.get("user") or min(users, key=lambda n: (len(n), n), default=None)
    for name, kind in types.items():
        if name in (*users, key) or (name in ("label", "weight") and kind.shape == "scalar"):
            if name in users and name != key:
                left_out[name] = f"names the user, as {key} does"
        elif kind.element in ("other", "null") or kind.shape == "null":
            left_out[name] = "holds nothing but nulls" if kind.element == "null" else f"{kind.arrow} is no list or value of numbers or text"
        else:
            its_role: dict[str | None, Kind] = {roles.get("time"): "time", roles.get("item"): "id"}
            found = FeatureRecipe(name, name, its_role.get(name) or infer_kind(name, kind))
            (history if kind.shape == "list" else context).append(found)
    if not history:  # histories that are empty in every row: a store of empty ones, as it is when the type says of what
        empty = [name for name, kind in types.items() if kind.shape == "list" and kind.element == "null"]
        history = [FeatureRecipe(name, name, "time" if name.lower() in TIMES else "id") for name in empty]
        left_out = {name: why for name, why in left_out.items() if name not in empty}
    items = [roles["item"]] if "item" in roles else ["item_id", "item"]
    history.sort(key=lambda f: not (f.kind == "id" and f.name in items))
    present = {n: n if types.get(n) is not None and types[n].shape == "scalar" else None for n in ("label", "weight")}
    return Recipe(tuple(history), tuple(context), present["label"], present["weight"], key, {}, left_out)


def infer_kind(name: str, kind: ColumnType) -> Kind:
    """Returns what a column of this type and name most likely is."""
    if kind.element == "time" or (name.lower() in TIMES and kind.element in ("int", "float")):
        return "time"
    return "number" if kind.element == "float" else "id"


def _complete(asked: FeatureRecipe, types: Mapping[str, ColumnType], shape: str, where: str) -> FeatureRecipe:
    column = asked.column or asked.name
    found = _find(types, column, shape, where)
    kind = asked.kind or infer_kind(column, found)
    holds = {"id": ("int", "text", "float", "null"), "number": ("int", "float", "null"), "time": ("int", "float", "time", "null")}[kind]
    if found.element not in holds:
        raise problem(
            "A column cannot be this feature",
            got=f"{column}: {found.arrow}",
            wanted=f"{kind}: {' or '.join(holds)}",
            where=where,
            todo=_KIND,
        )
    return replace(asked, column=column, kind=kind)


_KIND = "change `kind` or `column` of the feature, or leave it out of the schema"


def _find(types: Mapping[str, ColumnType], column: str, shape: str, where: str) -> ColumnType:
    if column not in types:
        near = difflib.get_close_matches(column, list(types), n=1)
        todo = f"did you mean {near[0]!r}?" if near else "name a column of the source with `column:`"
        raise problem("No such column in the source", got=column, wanted=f"one of {list(types)}", where=where, todo=todo)
    found = types[column]
    if found.shape not in (shape, "null") or found.element == "other":
        wanted = "a list of numbers or text a row" if shape == "list" else "one number or text a row"
        raise problem("A column of the wrong shape", got=f"{column}: {found.arrow}", wanted=wanted, where=where, todo=_KIND)
    return found


def _tables(chosen: Mapping[str, Any], asked: Mapping[str, TableRecipe], where: str) -> dict[str, TableRecipe]:
    tables = dict(asked)
    used = set()
    for f in (*chosen["history"], *chosen["context"]):
        name = f.table or f.name
        used.add(name)
        if f.kind == "id" and f.num_buckets is not None:
            before = tables.get(name, TableRecipe(f.num_buckets))
            if before != TableRecipe(f.num_buckets):
                got = f"{before} and num_buckets {f.num_buckets}"
                raise problem(
                    "A table is described twice",
                    got=got,
                    wanted="one description",
                    where=f"{where}, {f.name}",
                    todo="describe it under tables only",
                )
            tables[name] = before
    for name, table in tables.items():
        if name not in used:
            raise problem(
                "A table that no feature uses", got=name, wanted=f"one of {sorted(used)}", where=f"{where}, tables", todo="mend its name"
            )
        if (table.num_buckets is not None and table.vocabulary is not None) or (table.num_buckets is not None and table.num_buckets < 1):
            wanted = "num_buckets of at least 1, or a vocabulary, not both"
            raise problem("A table cannot be built", got=table, wanted=wanted, where=f"{where}, tables.{name}", todo="mend it")
    return tables
