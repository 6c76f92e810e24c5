"""Bad and good sources for `prepare`: CSV, Parquet, archives, and the schema that a user writes."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from distrag.data.store import open_store
from tests.fuzz.case import Case, Ended, Ground, Right, Room
from tests.fuzz.values import Raw, emit_lines, odd, put


def draw_source(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a source."""
    return r.choices([_csv, _parquet, _archive, _recipe, _vocabulary], [6, 6, 5, 8, 2])[0](r, ground, room)


def _whole(out: Path, rows: int | None = None) -> Right:
    """Returns a check that what was written is a store of so many rows."""

    def look(_ended: Ended) -> str:
        store = open_store(out, verify=True)
        return f"{store.num_samples} rows, not {rows}" if rows is not None and rows != store.num_samples else ""

    return look


def _csv(r: random.Random, ground: Ground, room: Room) -> Case:
    text = ground.csv.read_text()
    lines = text.splitlines()
    head, body = lines[0], lines[1:]
    users = len({line.split(",")[0] for line in body})

    def table(rows: list[str], header: str = head) -> bytes:
        return ("\n".join([header, *rows]) + "\n").encode()

    def with_time(value: str) -> bytes:
        return table([*body[:20], f"u1,3,{value},1.0", *body[20:]])

    bad: dict[str, bytes] = {
        "empty": b"",
        "only a header": table([]),
        "no header": table(body[1:], body[0]),
        "blank lines": b"\n\n\n",
        "a line too short": table([*body, "u1,2"]),
        "a line too long": table([*body, "u1,2,3,4,5,6"]),
        "open quote": table([*body, 'u1,"2,3,4']),
        "latin-1": table(body) + b"\xe9,1,1600000000,1\n",
        "utf-16": text.encode("utf-16"),
        "random bytes": r.randbytes(3000),
        "nul": table([*body, "\0,\0,\0,\0"]),
        "doubled column": table(body, "user_id,item_id,item_id,price"),
        "no name for a column": table(body, "user_id,item_id,,price"),
        "no user column": table(body, "a,item_id,timestamp,price"),
        "no item column": table(body, "user_id,b,timestamp,price"),
        "user is empty": table([*body, ",3,1600000000,1.0"]),
        "time is a word": with_time("soon"),
        "time is huge": with_time("9" * 30),
        "time in milliseconds": table([",".join([*line.split(",")[:2], line.split(",")[2] + "000", line.split(",")[3]]) for line in body]),
        "items are fractions": table(
            [line.replace(line.split(",")[1], "1.5", 1) for line in body[:3]] + body, "user_id,item_id,timestamp,price"
        ),
        "a long line": table([*body, "u1," + "9" * 3_000_000 + ",1600000000,1.0"]),
        "a column named by a path": table(body, "user_id,item_id,timestamp,../../x"),
        "a column of a long name": table(body, "user_id,item_id,timestamp," + "y" * 400),
        "a column with nul": table(body, "user_id,item_id,timestamp,a\0b"),
        "carriage returns only": text.replace("\n", "\r").encode(),
        "folder": b"",
        "pipe": b"",
        "zeros": b"",
        "half a gzip": b"",
        "gzip of much": b"",
        "no gzip": b"",
    }
    good: dict[str, bytes] = {
        "windows lines": text.replace("\n", "\r\n").encode(),
        "byte order mark": b"\xef\xbb\xbf" + text.encode(),
        "semicolons": text.replace(",", ";").encode(),
        "tabs": text.replace(",", "\t").encode(),
        "quoted": text.replace("u1,", '"u1",').encode(),
        "negative times": with_time("-5"),
        "no time": with_time(""),
        "nan price": table([*body, "u1,2,1600000000,nan", "u1,2,1600000000,inf"]),
        "no last newline": text.rstrip("\n").encode(),
        "gzip": b"",
        "items are negative": table([*body, "u1,-7,1600000000,1.0"]),
        "unicode": table([*body, "ü,2,1600000000,1.0", "u\u0308,2,1600000000,1.0"]),
        "a long header": table([line + ",1" * 300 for line in body], head + "".join(f",c{i}" for i in range(300))),
    }
    told = r.choice([*bad, *good])
    path = room.given / ("x.csv.gz" if "gzip" in told else "x.csv")
    _write_csv(told, path, bad.get(told, good.get(told, b"")), text)
    out = room.out / "store"
    words = ["prepare", str(path), "--out", str(out)]
    if told in good:
        rows = users + {"unicode": 2}.get(told, 0)
        return Case("source", f"csv: {told}", words, "fine", right=_whole(out, None if told == "unicode" else rows))
    unsure = (
        "items are fractions",
        "a column named by a path",
        "blank lines",
        "a column with nul",
        "nul",
        "no name for a column",
        "carriage returns only",
        "a column of a long name",
    )
    return Case("source", f"csv: {told}", words, "any" if told in unsure else "refused", names=(path.name,), right=_whole(out))


def _write_csv(told: str, path: Path, content: bytes, text: str) -> None:
    if told == "folder":
        path.mkdir()
    elif told == "pipe":
        os.mkfifo(path)
    elif told == "zeros":
        path.symlink_to("/dev/zero")
    elif told == "half a gzip":
        path.write_bytes(gzip.compress(text.encode())[:-200])
    elif told == "gzip of much":
        path.write_bytes(gzip.compress(bytes(200 << 20), 1))
    elif told == "no gzip":
        path.write_bytes(text.encode())
    elif told == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(content)


def _parquet(r: random.Random, ground: Ground, room: Room) -> Case:
    table = pq.read_table(ground.parquet)
    size = table.num_rows
    kinds: dict[str, Any] = {
        "null type": pa.nulls(size),
        "list of null": pa.array([[]] * size, pa.list_(pa.null())),
        "list of lists": pa.array([[[1]]] * size),
        "struct": pa.array([{"a": 1}] * size),
        "map": pa.array([[("a", 1)]] * size, pa.map_(pa.string(), pa.int64())),
        "dictionary": pa.array(["a"] * size).dictionary_encode(),
        "binary": pa.array([b"\xff"] * size),
        "decimal": pa.array([None] * size, pa.decimal128(38, 10)),
        "bool": pa.array([True] * size),
        "date": pa.array([0] * size, pa.date32()),
        "timestamp": pa.array([0] * size, pa.timestamp("ns", "Europe/Paris")),
        "duration": pa.array([0] * size, pa.duration("s")),
        "half": pa.array([0] * size, pa.float16()) if False else pa.array([1.0] * size, pa.float32()),
        "huge integers": pa.array([2**63] * size, pa.uint64()),
        "lists of another length": pa.array([[1]] * size),
        "nulls in lists": pa.array([[None, 1]] * size),
        "null lists": pa.array([None] * size, pa.list_(pa.int64())),
        "text of surrogates": pa.array(["\u202e"] * size),
        "nan": pa.array([float("nan")] * size),
    }
    name = r.choice(
        [
            "extra",
            "item_id",
            "label",
            "weight",
            "timestamp",
            "user_id",
            "city",
            "age",
            "../x",
            "",
            "a\0b",
            "y" * 300,
            "history",
            "item_id:next",
            "é",
            "extra",
        ]
    )
    how = r.choice(["type", "type", "type", "type", "bytes", "doubled", "empty", "two files", "label"])
    path, out = room.given / "x.parquet", room.out / "store"
    words = ["prepare", str(path), "--out", str(out)]
    told, expect, source = how, "any", table
    if how == "type":
        kind = r.choice(sorted(kinds))
        told = f"{name[:20]!r} is {kind}"
        at = table.column_names.index(name) if name in table.column_names else None
        source = table.set_column(at, name, kinds[kind]) if at is not None else table.append_column(name, kinds[kind])
    elif how == "label":
        source = table.set_column(
            table.column_names.index("label"),
            "label",
            pa.array(r.choice([[float("nan")] * size, [None] * size, ["x"] * size, [2.0] * size])),
        )
    elif how == "doubled":
        source, expect = table.append_column("item_id", table.column("item_id")), "refused"
    elif how == "empty":
        source, expect = table.slice(0, 0), "refused"
    pq.write_table(source, path)
    if how == "bytes":
        raw = bytearray(path.read_bytes())
        cut = r.choice([0, 4, 8, len(raw) // 2, len(raw) - 1])
        change = r.choice(["cut", "flip", "random"])
        told = f"bytes: {change} at {cut}"
        expect = "refused" if change != "flip" else "any"
        if change == "cut":
            raw = raw[:cut]
        elif change == "random":
            raw = bytearray(b"PAR1" + r.randbytes(500) + b"PAR1")
        else:
            for _ in range(5):
                raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
        path.write_bytes(bytes(raw))
    elif how == "two files":
        other = r.choice(["type", "columns", "csv", "broken"])
        told = f"two files: {other}"
        second = room.given / ("y.csv" if other == "csv" else "y.parquet")
        if other == "csv":
            second.write_bytes(ground.csv.read_bytes())
        elif other == "broken":
            second.write_bytes(b"PAR1")
        elif other == "columns":
            pq.write_table(table.drop_columns(["item_id"]), second)
        else:
            pq.write_table(table.set_column(1, "item_id", pa.array([[1.5]] * size)), second)
        words[1:2] = [str(path), str(second)]
        expect = "refused"
        expect = "any" if other == "columns" else "refused"  # what only some files have is left out, and said so
        return Case("source", f"parquet: {told}", words, expect, names=("y.parquet", "y.csv", "item_id"))  # type: ignore[arg-type]
    return Case("source", f"parquet: {told}", words, expect, right=_whole(out))  # type: ignore[arg-type]


def _archive(r: random.Random, ground: Ground, room: Room) -> Case:
    """Archives for `ml-100k --path`: names that leave the folder, members that lie, bombs."""
    path, out = room.given / "x.zip", room.out / "store"
    kinds = [
        "no zip",
        "empty zip",
        "half",
        "other files",
        "path upwards",
        "absolute",
        "link",
        "encrypted",
        "wrong sum",
        "bomb",
        "folder of that name",
        "folder",
        "folder with pipe",
        "folder with folder",
    ]
    kinds += ["odd method", "missing", "pipe", "parquet by name", "parquet by bytes", "folder with link out", "lying size"]
    told = r.choice(kinds)
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        if told == "path upwards":
            archive.writestr("../../../../tmp/u.data", "1\t2\t3\t4\n")
            archive.writestr("../u.user", "x")
        elif told == "absolute":
            archive.writestr("/etc/u.data", "1\t2\t3\t4\n")
        elif told == "link":
            info = zipfile.ZipInfo("u.data")
            info.external_attr = 0o120777 << 16
            archive.writestr(info, "/etc/passwd")
        elif told == "bomb":
            archive.writestr("u.data", bytes(400 << 20))
        elif told == "folder of that name":
            archive.writestr("u.data/", "")
        elif told == "other files":
            archive.writestr("readme", "x")
        elif told != "empty zip":
            archive.writestr("u.data", "1\t2\t3\t4\n" * 50)
    raw = bytearray(memory.getvalue())
    if told == "half":
        raw = raw[: len(raw) // 2]
    elif told == "no zip":
        raw = bytearray(r.randbytes(300))
    elif told == "encrypted":
        for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            raw[raw.index(mark) + at] |= 1
    elif told == "wrong sum":
        raw[raw.index(b"PK\x03\x04") + 40] ^= 0xFF
    elif told == "odd method":
        for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
            raw[raw.index(mark) + at] = 99
    elif told == "lying size":
        at = raw.index(b"PK\x01\x02") + 24
        raw[at : at + 4] = (2**32 - 2).to_bytes(4, "little")
    if told.startswith("folder") and told != "folder of that name":
        path = room.given / "x"
        path.mkdir()
        if told == "folder with pipe":
            os.mkfifo(path / "u.data")
        elif told == "folder with folder":
            (path / "u.data").mkdir()
        elif told == "folder with link out":
            (path / "u.data").symlink_to("/etc/passwd")
    elif told == "pipe":
        os.mkfifo(path)
    elif told != "missing":
        path = room.given / ("x.parquet" if told == "parquet by name" else "x.zip")
        path.write_bytes(b"PAR1" + bytes(raw) if told == "parquet by bytes" else bytes(raw))
    return Case("source", f"archive: {told}", ["prepare", "ml-100k", "--path", str(path), "--out", str(out)], "refused", names=(path.name,))


def _recipe(r: random.Random, ground: Ground, room: Room) -> Case:
    """The schema that a user writes."""
    tree: dict[str, Any] = {
        "history": {
            "item_id": "id",
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
    feature = r.choice(["item_id", "shop", "price", "timestamp"])
    options = ["name", "column", "kind", "table", "num_buckets", "transform", "gap", "unit", "surprise"]
    paths = [
        ("history",),
        ("context",),
        ("label",),
        ("weight",),
        ("key",),
        ("tables",),
        ("source",),
        ("events",),
        ("surprise",),
        ("history", feature),
        ("context", "city"),
    ]
    paths += [
        ("tables", "shop"),
        ("tables", "shop", "num_buckets"),
        ("tables", "shop", "vocabulary"),
        ("events", "user"),
        ("events", "header"),
        ("history", "new"),
    ]
    path = r.choice([*paths, *(("history", feature, option) for option in options)])
    value: Any = odd(r)
    if r.random() < 0.35:
        names = [
            "item_id",
            "shop",
            "price",
            "timestamp",
            "city",
            "label",
            "user_id",
            "nothing",
            "../x",
            "a/b",
            "y" * 300,
            "",
            "a:b",
            "id",
            "number",
            "time",
            "log",
            "bucket",
            "ms",
        ]
        value = r.choice(
            [
                r.choice(names),
                {"kind": r.choice(["id", "number", "time"])},
                {"column": r.choice(names)},
                [r.choice(names)],
                {"table": r.choice(names)},
                r.choice(names),
            ]
        )
    if len(path) == 3 and path[0] == "history" and not isinstance(tree["history"][feature], dict):
        tree["history"][feature] = {"kind": "id"}
    put(tree, path, value)
    if r.random() < 0.1:
        new = r.choice(
            [
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
            ]
        )
        path = ("history", new)
        value = {"kind": "id", "column": "item_id"}
        put(tree, path, value)
    source = ground.csv if path[0] == "events" else ground.parquet
    schema, out = room.given / "f.yaml", room.out / "store"
    schema.write_text(emit_lines(tree), encoding="utf-8", errors="surrogatepass")
    told = f"schema {'.'.join(map(str, path))[:30]}: {value if isinstance(value, Raw) else json.dumps(value)}"[:90]
    words = ["prepare", str(source), "--schema", str(schema), "--out", str(out)]
    return Case("source", told, words, right=_whole(out))


def _vocabulary(r: random.Random, ground: Ground, room: Room) -> Case:
    """Vocabulary files that a schema names."""
    folder = room.given
    (folder / "empty").write_text("")
    (folder / "odd").write_bytes(b"\xff\xfe\x00")
    (folder / "words").write_text("film-1\nfilm-2\nfilm-2\n\n")
    (folder / "v.arrow").write_bytes(b"ARROW1\0\0")
    pq.write_table(pa.table({"a": [1.5, None], "b": [[1], [2]]}), folder / "v.parquet")
    os.mkfifo(folder / "pipe")
    name = r.choice(
        [
            "empty",
            "odd",
            "words",
            "v.arrow",
            "v.parquet:a",
            "v.parquet:b",
            "v.parquet:c",
            "v.parquet",
            "nowhere",
            "nowhere:a",
            "..",
            "",
            "pipe",
            "/dev/zero",
            "/etc/passwd",
        ]
    )
    table = r.choice(["item_id", "shop"])
    schema, out = folder / "f.yaml", room.out / "store"
    schema.write_text(f"history: {{item_id: id, shop: id}}\ntables: {{{table}: {{vocabulary: {json.dumps(name)}}}}}\n")
    return Case(
        "source",
        f"vocabulary {table}: {name}",
        ["prepare", str(ground.parquet), "--schema", str(schema), "--out", str(out)],
        right=_whole(out),
    )
