"""Stores that are not what was prepared, and the commands that open them."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from distrag.data.content import SAMPLES
from distrag.data.schema import Schema, load_schema
from tests.fuzz.case import Case, Expect, Ground, Room
from tests.fuzz.ground import good_config
from tests.fuzz.values import ODD_YAML, emit_lines

Change = Callable[[random.Random, Path], tuple[str, Expect, str]]
"""Changes a copy of the store; returns what was done, what an open has to say of it, and which file the message has to name."""


def draw_store(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a store."""
    store = room.given / "store"
    shutil.copytree(ground.store, store)
    change = r.choices(
        [_files, _bytes, _columns, _offsets, _values, _schema, _schema_text, _vocabulary, _harmless], [5, 4, 4, 3, 5, 7, 3, 3, 2]
    )[0]
    told, expect, name = change(r, store)
    words = _command(r, store, ground, room, staged=expect == "refused" and r.random() < 0.2)
    if expect == "any":  # in range: only the hash can tell
        then = ["stats", str(store), "--verify"] if "blocks_hash" not in told and "one byte more" not in told else []
        return Case("store", told, words, then=then)
    return Case("store", told, words, expect, names=(name,) if name else ())


def _command(r: random.Random, store: Path, ground: Ground, room: Room, *, staged: bool) -> list[str]:
    run = room.out / "run"
    config = room.given / "c.yaml"
    tree = good_config(store, run, task=r.choice(["next_item", "conversion"]))
    if staged:
        tree["data"] |= {"path": f"file://{store}", "cache": str(room.out / "cache")}
    config.write_text(emit_lines(tree))
    words = [["train", "--config", str(config)], ["plan", str(config), "--planner-seconds=0"]]
    if not staged:
        words += [["stats", str(store)], ["stats", str(store), "--verify"], ["evaluate", "--popularity", "train", "--data", str(store)]]
        words += [["evaluate", str(ground.run), "--data", str(store)], ["train", "--config", str(config)]]
    return r.choice(words)


def _files(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    name = r.choice([SAMPLES, SAMPLES, "schema.yaml", "vocab/item_id.arrow", "vocab/shop.arrow", "vocab"])
    path, how = (
        store / name,
        r.choice(
            [
                "missing",
                "empty",
                "half",
                "one byte less",
                "one byte more",
                "folder",
                "dangling link",
                "link to itself",
                "pipe",
                "zeros",
                "device",
            ]
        ),
    )
    content = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how in ("empty", "half", "one byte less", "one byte more"):
        if name == "vocab":
            path.write_bytes(b"")
        path.write_bytes(
            {"empty": b"", "half": content[: len(content) // 2], "one byte less": content[:-1], "one byte more": content + b"\0"}[how]
        )
    elif how == "folder":
        path.mkdir()
    elif how == "dangling link":
        path.symlink_to("nowhere")
    elif how == "link to itself":
        path.symlink_to(path)
    elif how == "pipe":
        os.mkfifo(path)
    elif how in ("zeros", "device"):
        path.symlink_to("/dev/zero" if how == "zeros" else "/dev/null")
    named = {"schema.yaml": "schema.yaml", "vocab": "vocab"}.get(name, Path(name).name)
    if how == "one byte more":
        return f"{name}: {how}", "any", ""  # what is staged is as it was prepared
    if name == "schema.yaml" and how in ("one byte less", "one byte more"):
        return f"{name}: {how}", ("fine" if how == "one byte less" else "refused"), ""
    return f"{name}: {how}", "refused", named if how != "missing" else ""


def _bytes(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    """One byte that flips, anywhere in the samples: what it hits decides what tells of it."""
    path = store / SAMPLES
    raw = bytearray(path.read_bytes())
    before = _content(path)
    at = r.randrange(len(raw)) if r.random() < 0.5 else r.choice([*range(0, 400), *range(len(raw) - 1500, len(raw))])
    raw[at] ^= 1 << r.randrange(8)
    path.write_bytes(bytes(raw))
    after = _content(path)
    if after is None:
        return f"byte {at} of {len(raw)} flips: unreadable", "refused", SAMPLES
    if after == before:
        return f"byte {at} flips between columns", "fine", ""
    return f"byte {at} flips inside a column", "any", ""


def _content(path: Path) -> list[bytes] | None:
    try:
        with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
            batch = reader.get_batch(0)
        batch.validate(full=True)
        history = batch.column("history")
        parts = [history.offsets, *(history.values.field(i) for i in range(history.type.value_type.num_fields)), *batch.columns[1:]]
        return [str(batch.schema).encode(), *(part.to_numpy(zero_copy_only=False).tobytes() for part in parts)]
    except (pa.ArrowException, OSError, KeyError, ValueError, AttributeError, IndexError):
        return None


def _rewrite(store: Path, batches: list[pa.RecordBatch], *, stream: bool = False) -> None:
    path = store / SAMPLES
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, new(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    text = (store / "schema.yaml").read_text()
    (store / "schema.yaml").write_text(re.sub(r"(?m)^num_bytes: \d+", f"num_bytes: {path.stat().st_size}", text))


def _read(store: Path) -> pa.RecordBatch:
    with pa.ipc.open_file(pa.OSFile(str(store / SAMPLES))) as reader:
        return reader.get_batch(0)


def _columns(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    batch = _read(store)
    how = r.choice(
        [
            "order",
            "name",
            "dropped",
            "more",
            "type",
            "nulls",
            "two batches",
            "no batch",
            "stream",
            "history is no list",
            "positions in another order",
            "rows",
        ]
    )
    names, columns = list(batch.schema.names), list(batch.columns)
    fields = list(batch.schema)
    if how == "order":
        i, j = r.sample(range(len(names)), 2)
        columns[i], columns[j], fields[i], fields[j] = columns[j], columns[i], fields[j], fields[i]
    elif how == "name":
        i = r.randrange(len(names))
        fields[i] = fields[i].with_name(r.choice(["x", "", "../x", names[i].upper()]))
    elif how == "dropped":
        i = r.randrange(len(names))
        del columns[i], fields[i]
    elif how == "more":
        columns.append(columns[-1])
        fields.append(fields[-1].with_name(r.choice(["more", fields[-1].name])))
    elif how == "type":
        i = r.randrange(1, len(names))
        kind = r.choice([pa.int8(), pa.float64(), pa.string(), pa.int32(), pa.uint64(), pa.date32()])
        columns[i] = (
            pa.array([None if kind in (pa.date32(),) else 1] * batch.num_rows, kind)
            if kind != pa.string()
            else pa.array(["a"] * batch.num_rows)
        )
        fields[i] = pa.field(fields[i].name, kind)
    elif how == "nulls":
        i = r.randrange(1, len(names))
        columns[i] = pa.array([None, *columns[i].to_pylist()[1:]], fields[i].type)
        fields[i] = fields[i].with_nullable(True)
    elif how == "history is no list":
        columns[0] = pa.array(range(batch.num_rows))
        fields[0] = pa.field("history", pa.int64(), nullable=False)
    elif how == "positions in another order":
        history = columns[0]
        kind = history.type.value_type
        order = list(range(kind.num_fields))[::-1]
        struct = pa.StructArray.from_arrays([history.values.field(i) for i in order], fields=[kind.field(i) for i in order])
        fields[0] = pa.field("history", pa.large_list(pa.field("item", struct.type, nullable=False)), nullable=False)
        columns[0] = pa.LargeListArray.from_arrays(history.offsets, struct, type=fields[0].type)
    elif how == "rows":
        columns = [column.slice(0, batch.num_rows - 1) for column in columns]
    made = pa.record_batch(columns, schema=pa.schema(fields))
    batches = [made] * (2 if how == "two batches" else 1)
    if how == "no batch":
        with pa.OSFile(str(store / SAMPLES), "wb") as sink, pa.ipc.new_file(sink, made.schema):
            pass
        text = (store / "schema.yaml").read_text()
        (store / "schema.yaml").write_text(re.sub(r"(?m)^num_bytes: \d+", f"num_bytes: {(store / SAMPLES).stat().st_size}", text))
    else:
        _rewrite(store, batches, stream=how == "stream")
    return f"columns: {how}", "refused", SAMPLES


def _offsets(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    path = store / SAMPLES
    offsets = _read(store).column("history").offsets.to_numpy().copy()
    raw, right = path.read_bytes(), offsets.tobytes()
    assert raw.count(right) == 1
    i = r.randrange(1, len(offsets) - 1)
    how = r.choice(["falls", "negative", "beyond", "first", "last", "huge"])
    value = {
        "falls": int(offsets[i - 1]) - 1,
        "negative": -5,
        "beyond": int(offsets[-1]) + 7,
        "first": 1,
        "last": int(offsets[-1]) - 1,
        "huge": 2**62,
    }[how]
    at = {"first": 0, "last": len(offsets) - 1}.get(how, i)
    if how == "falls" and value < 0:
        value = int(offsets[-1]) + 1
    offsets[at] = value
    path.write_bytes(raw.replace(right, offsets.tobytes()))
    return f"offset {at}: {how}", "refused", SAMPLES


def _patch(store: Path, name: str, change: Callable[[np.ndarray[Any, Any]], None]) -> None:
    """Changes values of a column where they stand in the file."""
    path, batch = store / SAMPLES, _read(store)
    history = batch.column("history")
    kind = history.type.value_type
    arrays = {kind.field(i).name: history.values.field(i) for i in range(kind.num_fields)} | dict(
        zip(batch.schema.names[1:], batch.columns[1:], strict=True)
    )
    values = arrays[name].to_numpy().copy()
    raw, right = path.read_bytes(), values.tobytes()
    assert raw.count(right) >= 1, name
    change(values)
    at = raw.index(right)
    path.write_bytes(raw[:at] + values.tobytes() + raw[at + len(right) :])


def _values(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    """Values that changed where they stand: only a hash of every byte can tell, and nothing may crash of them until then."""
    ids, floats = ["item_id", "shop", "context:city"], ["price", "context:age", "label", "weight"]
    name = r.choice([*ids, *floats, "timestamp", "key"])
    at = r.random()

    def change(values: np.ndarray[Any, Any]) -> None:
        i = int(at * len(values))
        kind = values.dtype
        if kind.kind == "u":
            values[i] = r.choice([0, np.iinfo(kind).max, np.iinfo(kind).max // 2, (int(values[i]) + 1) % 8])
            if r.random() < 0.2:
                values[:] = np.iinfo(kind).max
        elif kind.kind == "f":
            values[i] = r.choice([np.nan, np.inf, -1.0, 1e38, 7.0])
            if r.random() < 0.2:
                values[:] = r.choice([np.nan, -1.0, 0.0])
        else:
            values[i] = r.choice([-(2**63), 2**63 - 1, -1, 5])
        values[(i + 1) % len(values)] += 1  # so that something did change

    _patch(store, name, change)
    return f"values of {name}", "any", ""


def _schema(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    """One field of schema.yaml, in the text: what the columns mean must be what was prepared."""
    path = store / "schema.yaml"
    lines = path.read_text().splitlines()
    body = [i for i, line in enumerate(lines) if re.match(r"^ *-? *\w+: \S", line)]
    start = next(i for i, line in enumerate(lines) if line.startswith("provenance:"))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    i = r.choice([i for i in body if not start <= i < end])
    key, value = re.match(r"^( *-? *\w+): (.*)$", lines[i]).groups()  # type: ignore[union-attr]
    how = r.choice(["odd", "odd", "number", "gone", "doubled", "other"])
    if how == "gone":
        del lines[i]
    elif how == "doubled":
        lines.insert(i + 1, key.replace("- ", "  ") + ": " + value)
    else:
        numeric = re.fullmatch(r"-?[\d.e+-]+", value)
        new = (
            r.choice(ODD_YAML)
            if how == "odd"
            else str(float(value) + 1 if numeric and "." in value else int(value) + 1 if numeric else "x" + value)
        )
        if how == "other":
            new = r.choice(
                [
                    "id",
                    "number",
                    "time",
                    "uint8",
                    "float32",
                    "int64",
                    "none",
                    "log",
                    "standard",
                    "bucket",
                    "hashed",
                    "vocabulary",
                    "item_id",
                    "1",
                    "0.0",
                ]
            )
        lines[i] = f"{key}: {new}"
    before = load_schema(path)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    told = f"schema.yaml: {key.strip(' -')} {how}: {lines[min(i, len(lines) - 1)].strip()[:60]}"
    if "blocks_hash" in key and how in ("number", "other", "gone"):
        return told, "any", ""  # of use to a copy from elsewhere only
    return (
        told,
        "fine" if _is_still(before, path) else "refused",
        "schema.yaml" if "num_bytes" not in key and "blocks_hash" not in key else "",
    )


def _is_still(before: Schema, path: Path) -> bool:
    """Returns whether a schema says the same as before: a field that was left out may have had its default."""
    try:
        return load_schema(path) == before
    except ValueError:
        return False


def _schema_text(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    path = store / "schema.yaml"
    text = path.read_text()
    kinds = {
        "bytes": r.randbytes(300),
        "nothing": b"",
        "a list": b"[1, 2]\n",
        "a mapping of nothing": b"{}\n",
        "deep": b"a: " + b"[" * 20_000 + b"]" * 20_000 + b"\n",
        "object": text.encode() + b"more: !!python/object/apply:os.system [echo]\n",
        "itself": text.encode() + b"provenance: &p {a: *p}\n",
        "unknown": text.encode() + b"surprise: 1\n",
        "old version": text.replace("format_version: ", "format_version: 9").encode(),
        "utf-16": text.encode("utf-16"),
        "cut in the middle": text.encode()[: len(text) // 2],
        "cut at the end": "\n".join(text.splitlines()[:-3]).encode() + b"\n",
        "laughs": b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 10)) for i in range(1, 9)),
        "two documents": text.encode() + b"---\n" + text.encode(),
        "keys that are no text": text.encode() + b"1: 2\n",
        "null": b"null\n",
    }
    how = r.choice(sorted(kinds))
    path.write_bytes(kinds[how])
    return f"schema.yaml: {how}", "refused", "schema.yaml"


def _vocabulary(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    name = r.choice(["item_id", "shop", "city"])
    path = store / "vocab" / f"{name}.arrow"
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        values = reader.get_batch(0).column(0)
    how = r.choice(
        ["shorter", "longer", "type", "nulls", "value", "order", "two columns", "two batches", "no batch", "no column", "text of numbers"]
    )
    made, expect = values, "refused"
    text = pa.types.is_large_string(values.type)
    if how == "shorter":
        made = values.slice(1)
    elif how == "longer":
        made = pa.concat_arrays([values, values.slice(0, 1)])
    elif how == "type":
        made = pa.array([1.5] * len(values)) if r.random() < 0.5 else pa.array([[1]] * len(values))
    elif how == "text of numbers":
        made = pa.array([str(v) for v in values.to_pylist()], pa.string())
        expect = "refused" if not text else "any"
    elif how == "nulls":
        made = pa.array([None, *values.to_pylist()[1:]], values.type)
        expect = "any"
    elif how == "value":
        made = pa.array([*values.to_pylist()[:-1], "zzz" if text else 10**9], values.type)
        expect = "any"
    elif how == "order":
        made = pa.array(values.to_pylist()[::-1], values.type)
        expect = "any"
    columns = {"two columns": [made, made], "no column": []}.get(how, [made])
    batch = pa.record_batch(columns, names=["value", "more"][: len(columns)])
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for _ in range({"two batches": 2, "no batch": 0}.get(how, 1)):
            writer.write_batch(batch)
    return f"vocabulary {name}: {how}", expect, path.name if expect == "refused" else ""  # type: ignore[return-value]


def _harmless(r: random.Random, store: Path) -> tuple[str, Expect, str]:
    how = r.choice(["more files", "no block sums", "bad block sums", "read only", "linked", "comment"])
    if how == "more files":
        (store / "notes.txt").write_text("x")
        (store / "vocab" / "../more.arrow").write_bytes(b"x")
        (store / ".hidden").mkdir()
    elif how == "no block sums":
        (store / "blocks.json").unlink()
    elif how == "bad block sums":
        (store / "blocks.json").write_text(json.dumps({"block_bytes": 0}))
    elif how == "read only":
        for path in store.rglob("*"):
            path.chmod(0o444 if path.is_file() else 0o555)
    elif how == "linked":
        (store / SAMPLES).rename(store.parent / "elsewhere")
        (store / SAMPLES).symlink_to(store.parent / "elsewhere")
    else:
        with (store / "schema.yaml").open("a") as file:
            file.write("# a comment\n")
    return f"harmless: {how}", "fine", ""
