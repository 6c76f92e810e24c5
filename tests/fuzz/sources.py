"""Bad and good sources for `prepare`, and the schemas and vocabularies that users write for them."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.case import Case, Ground, Room
from tests.fuzz.source_archive import draw_archive
from tests.fuzz.source_csv import draw_csv, whole_store
from tests.fuzz.source_parquet import draw_parquet
from tests.fuzz.values import Raw, each, emit_lines, odd, put

OPTIONS = each("name column kind table num_buckets transform gap unit surprise")
SECTIONS = each("history context label weight key tables source events surprise")
DEEPER = each("context.city tables.shop tables.shop.num_buckets tables.shop.vocabulary events.user events.header history.new")
WORDS = each("item_id shop price timestamp city label user_id nothing ../x a/b a:b id number time log bucket ms")
NAMES = [
    "../../x",
    "/abs",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "y" * 200,
    "y" * 400,
    "é" * 100,
    "history",
    "item_id:next",
    "item_id:gap",
    "%2e%2e%2f",
    "CON",
    "a\nb",
    " ",
]


def draw_source(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a source."""
    return r.choices([draw_csv, draw_parquet, draw_archive, _schema, _vocabulary], [7, 6, 5, 8, 2])[0](r, ground, room)


def _good_schema() -> dict[str, Any]:
    return {
        "history": {
            "item_id": {"kind": "id"},
            "shop": {"kind": "id", "table": "shop"},
            "price": {"kind": "number", "transform": "log"},
            "timestamp": {"kind": "time", "gap": "log"},
        },
        "context": {"city": {"kind": "id", "num_buckets": 10}, "age": "number"},
        "label": "label",
        "weight": "weight",
        "key": "user_id",
        "tables": {"shop": {"num_buckets": 50}},
    }


def _schema(r: random.Random, ground: Ground, room: Room) -> Case:
    """One value of a schema that is odd, or a name that is a path."""
    tree = _good_schema()
    feature = r.choice(sorted(tree["history"]))
    path = tuple(r.choice([*SECTIONS, *DEEPER, f"history.{feature}", *(f"history.{feature}.{option}" for option in OPTIONS)]).split("."))
    value: Any = odd(r)
    if r.random() < 0.35:
        word = r.choice(WORDS)
        value = r.choice([word, {"kind": r.choice(["id", "number", "time"])}, {"column": word}, [word], {"table": word}])
    if r.random() < 0.15:
        path, value = ("history", r.choice(NAMES)), {"kind": "id", "column": "item_id"}
    put(tree, path, value)
    source = ground.csv if path[0] == "events" else ground.parquet
    schema, out = room.given / "f.yaml", room.out / "store"
    schema.write_text(emit_lines(tree), encoding="utf-8", errors="surrogatepass")
    told = f"schema {'.'.join(path)[:30]}: {value if isinstance(value, Raw) else json.dumps(value)}"[:90]
    return Case("source", told, ["prepare", str(source), "--schema", str(schema), "--out", str(out)], right=whole_store(out))


def _vocabulary(r: random.Random, ground: Ground, room: Room) -> Case:
    """Files of a vocabulary that a schema names."""
    folder = room.given
    for name, content in {"empty": b"", "odd": b"\xff\xfe\x00", "words": b"film-1\nfilm-2\nfilm-2\n\n", "v.arrow": b"ARROW1\0\0"}.items():
        (folder / name).write_bytes(content)
    pq.write_table(pa.table({"a": [1.5, None], "b": [[1], [2]]}), folder / "v.parquet")
    os.mkfifo(folder / "pipe")
    files = "empty odd words v.arrow v.parquet v.parquet:a v.parquet:b v.parquet:c nowhere nowhere:a .. pipe /dev/zero /etc/passwd"
    name, table = r.choice(["", *files.split()]), r.choice(["item_id", "shop"])
    schema, out = folder / "f.yaml", room.out / "store"
    schema.write_text(f"history: {{item_id: id, shop: id}}\ntables: {{{table}: {{vocabulary: {json.dumps(name)}}}}}\n")
    words = ["prepare", str(ground.parquet), "--schema", str(schema), "--out", str(out)]
    return Case("source", f"vocabulary of {table}: {name}", words, right=whole_store(out))
