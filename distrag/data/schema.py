"""What a store holds: features, tables, counts and provenance, kept beside the columns as `schema.yaml`."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_type_hints
from urllib.parse import quote

import numpy as np

from distrag.data.plain_types import WrongType, convert, describe
from distrag.data.text_file import dump_yaml, parse_yaml, read_small
from distrag.problem import problem

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA_FILE = "schema.yaml"
FORMAT_VERSION = 2
"""Raised whenever a reader of an older store would misread a newer one."""
UNSEALED = 1
"""The version whose content hash can only be checked by reading every byte; such stores are still opened."""

GAP_ROWS = 65
"""Rows of a gap table: row 0 is unused, rows 1..64 hold gaps of 0..63 significant bits."""

Kind = Literal["id", "number", "time"]
Transform = Literal["standard", "log", "none"]
Gap = Literal["none", "log", "bucket"]
TableKind = Literal["vocabulary", "hashed", "bucket"]


@dataclass(frozen=True)
class Feature:
    """One column of a store, per position or per sample.

    Attributes:
        name: what the feature is called everywhere after `prepare`.
        kind: `id` is a row number of `table`, `number` a normalised float32, `time` int64 seconds.
        dtype: NumPy name of the stored type; ids use the narrowest unsigned type that holds their table.
        table: embedding table of an id, or of the gap buckets of a time; None otherwise.
        transform: how a number was normalised. `standard` is `(x - mean) / std`; `log` first takes `sign(x) * log1p(|x|)`.
        mean: mean that was subtracted, over the positions that held a finite value.
        std: population standard deviation that was divided by; 1 where the values do not vary.
        gap: how the model sees a time: not at all, as `log1p` of the gap to the event before, or as a bucket of it.
        num_unknown: values that became row 0 because they are negative or out of vocabulary.
        num_null: values that were null (numbers: or NaN, or infinite, or beyond float32).
        column: column of the source it came from.
    """

    name: str
    kind: Kind
    dtype: str
    table: str | None = None
    transform: Transform = "none"
    mean: float = 0.0
    std: float = 1.0
    gap: Gap = "none"
    num_unknown: int = 0
    num_null: int = 0
    column: str = ""


@dataclass(frozen=True)
class Table:
    """One embedding table and the keys that are looked up in it.

    Attributes:
        name: name of the table.
        num_rows: rows, the unknown row 0 included.
        kind: `vocabulary` (row i is value i-1 of `vocab/<name>.arrow`), `hashed`, or `bucket` (gaps of a time feature).
        features: keys that share the table: feature names, or `<name>:gap`.
        num_unknown: stored values of these features that are row 0, whatever the reason.
    """

    name: str
    num_rows: int
    kind: TableKind = "vocabulary"
    features: tuple[str, ...] = ()
    num_unknown: int = 0


@dataclass(frozen=True)
class Schema:
    """Everything a reader must know of a store besides the columns themselves.

    Attributes:
        history: per-position features; the first id feature is the default target.
        context: per-sample features.
        label: source column of the labels, or None.
        weight: source column of the sample weights, or None.
        key: source column that names whose row it is (the user), or None.
        tables: embedding tables.
        num_samples: rows (`N`).
        num_positions: positions over all rows.
        provenance: where it came from: source files with hashes, options, counts, versions.
        content_hash: blake2b of `data_hash` and of the fields that give the data meaning; every reading of a schema compares it, so that
            none of them can be changed unseen. It is what a run remembers of its store.
        format_version: layout of the store.
        num_bytes: size of `samples.arrow`; a truncated copy is found by it.
        blocks_hash: sha256 of `blocks.json`, by which a copy from elsewhere is checked; empty in stores that were prepared without it.
        data_hash: blake2b of columns and vocabularies; empty in stores of format version 1, where `content_hash` is of these directly.
    """

    history: tuple[Feature, ...]
    context: tuple[Feature, ...] = ()
    label: str | None = None
    weight: str | None = None
    key: str | None = None
    tables: tuple[Table, ...] = ()
    num_samples: int = 0
    num_positions: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    content_hash: str = ""
    format_version: int = FORMAT_VERSION
    num_bytes: int = 0
    blocks_hash: str = ""
    data_hash: str = ""

    def feature(self, name: str) -> Feature:
        """Returns the feature called `name`, per position or per sample.

        Raises:
            ValueError: when there is none, naming the nearest.
        """
        return named(name, self.history + self.context, "feature")

    def table(self, name: str) -> Table:
        """Returns the table called `name`.

        Raises:
            ValueError: when there is none, naming the nearest.
        """
        return named(name, self.tables, "table")


Named = TypeVar("Named", Feature, Table)


def named(name: str, things: tuple[Named, ...], what: str) -> Named:
    """Returns the one of `things` called `name`, or raises a five-part error that names the nearest."""
    for thing in things:
        if thing.name == name:
            return thing
    names = [thing.name for thing in things]
    near = difflib.get_close_matches(name, names, n=1)
    todo = f"did you mean {near[0]!r}?" if near else "use one of the names above, or prepare the store again with a schema that has it"
    raise problem(f"No such {what} in the store", got=name, wanted=f"one of {names}", where="schema.yaml", todo=todo)


def id_dtype(num_rows: int) -> str:
    """Returns the NumPy name of the narrowest type that holds row numbers of a table with `num_rows` rows."""
    for dtype in ("uint8", "uint16", "uint32"):
        if num_rows - 1 <= np.iinfo(dtype).max:
            return dtype
    return "int64"


def meaning(schema: Schema) -> dict[str, Any]:
    """Returns the part of a schema that belongs to the content hash: no provenance, no sizes of files."""
    skip = ("provenance", "content_hash", "num_bytes", "blocks_hash", "data_hash")
    return {name: value for name, value in asdict(schema).items() if name not in skip}


def seal(schema: Schema) -> str:
    """Returns the hash of `data_hash` and the meaning of the data, which a schema carries as its `content_hash`."""
    exact = tuple(tuple(replace(f, mean=float(f.mean), std=float(f.std)) for f in group) for group in (schema.history, schema.context))
    text = json.dumps([schema.data_hash, meaning(replace(schema, history=exact[0], context=exact[1]))], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


RESERVED = (":next", ":negative", ":gap")
"""Ends of the keys that batches add to the names of features."""


def check_name(name: str, where: object) -> None:
    """Refuses what cannot be the name of a feature or a table: of a file, a key of a batch, a line of YAML.

    Raises:
        ValueError: it is empty, too long, not printable, or ends as the keys do that batches add.
    """
    file = f"{quote(name, safe='', errors='replace')}.arrow"
    if not name.strip() or not name.isprintable() or len(file) > 255 or name.endswith(RESERVED):
        wanted = f"printable characters, at most 255 bytes in the quoting of addresses, no end in {', '.join(RESERVED)}"
        todo = "rename the column, or give the feature another name with `column:` in the schema"
        raise problem("No name for a feature or a table", got=repr(name), wanted=wanted, where=where, todo=todo)


def save_schema(schema: Schema, path: Path) -> None:
    """Writes `schema` as YAML, most telling fields first; what stood there is replaced, a link too."""
    told = "# Written by `distrag prepare`; a store is refused when this was changed or samples.arrow disagrees.\n"
    part = path.with_name(f"{path.name}.part")
    part.write_text(told + dump_yaml(_plain(asdict(schema))), encoding="utf-8")
    part.replace(path)


def load_schema(path: Path) -> Schema:
    """Returns the schema written at `path`.

    Raises:
        ValueError: as `parse_schema` does, or it cannot be read.
    """
    return parse_schema(read_small(path, what=_WHAT, todo=_AGAIN), str(path))


def parse_schema(text: bytes, where: str) -> Schema:
    """Returns the schema that `save_schema` wrote as `text`.

    Raises:
        ValueError: when it is no YAML mapping, was written by another format version, has unknown, missing or wrong fields, or is not as it
            was written.
    """
    raw = parse_yaml(text, where, what=_WHAT, todo=_AGAIN)
    if not isinstance(raw, dict):
        raise problem("Not a schema", got=f"{raw!r:.80}", wanted="a mapping", where=where, todo=_AGAIN)
    version = raw.get("format_version")
    if version not in (FORMAT_VERSION, UNSEALED):
        raise problem("Another format version", got=version, wanted=FORMAT_VERSION, where=where, todo=_AGAIN)
    for name, kind in (("history", Feature), ("context", Feature), ("tables", Table)):
        entries = [] if raw.get(name) is None else raw[name]
        if not isinstance(entries, list):
            raise problem("A field of the schema is wrong", got=f"{entries!r:.80}", wanted="a list", where=f"{where}, {name}", todo=_AGAIN)
        raw[name] = tuple(_from_mapping(kind, entry, f"{where}, {name}") for entry in entries)
    schema: Schema = _from_mapping(Schema, raw, where)
    if (schema.content_hash != seal(schema)) if version != UNSEALED else schema.data_hash:
        wanted = f"the schema that belongs to content_hash {schema.content_hash or 'of the store'}"
        raise problem("The schema is not as it was written", got=f"one with hash {seal(schema)}", wanted=wanted, where=where, todo=_AGAIN)
    return schema


_WHAT = "The schema of the store"
_AGAIN = "put the file back as it was, or run `distrag prepare` again with --overwrite"


def _from_mapping(kind: type[Any], raw: Any, where: str) -> Any:
    known = {f.name for f in fields(kind)}
    if not isinstance(raw, dict) or not set(raw) <= known:
        got = sorted(set(raw) - known) if isinstance(raw, dict) else f"{raw!r:.80}"
        raise problem("Unknown fields in a schema", got=got, wanted=f"some of {sorted(known)}", where=where, todo=_AGAIN)
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name not in raw]
    if missing:
        raise problem("A field of the schema is missing", got=f"no {', '.join(missing)}", wanted="every field", where=where, todo=_AGAIN)
    hints, values = get_type_hints(kind), dict(raw)
    for name in raw:
        if kind is Schema and name in ("history", "context", "tables"):
            continue
        try:
            values[name] = convert(raw[name], hints[name])
        except WrongType:
            wanted = describe(hints[name])
            raise problem(
                "A field of the schema is wrong", got=f"{raw[name]!r:.80}", wanted=wanted, where=f"{where}, {name}", todo=_AGAIN
            ) from None
    return kind(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value.item() if isinstance(value, np.generic) else value
