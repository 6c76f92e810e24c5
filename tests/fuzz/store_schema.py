"""`schema.yaml` and the vocabularies of a store with other content than was prepared."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pyarrow as pa
import yaml

from distrag.data.schema import Schema, load_schema, parse_schema
from tests.fuzz.store_columns import Done
from tests.fuzz.values import ODD_YAML, each

WORDS = each("id number time uint8 float32 int64 none log standard bucket hashed vocabulary item_id 1 0.0 ../../etc/passwd")


def change_field(r: random.Random, store: Path) -> Done:
    """Changes one field in the text: what the columns mean must be what was prepared."""
    path = store / "schema.yaml"
    before, lines = load_schema(path), path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("provenance:"))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    i = r.choice([i for i, line in enumerate(lines) if re.match(r"^ *-? *\w+: \S", line) and not start <= i < end])
    key, value = re.match(r"^( *-? *\w+): (.*)$", lines[i]).groups()  # type: ignore[union-attr]
    how = r.choice(["odd", "odd", "another number", "gone", "doubled", "another word"])
    if how == "gone":
        del lines[i]
    elif how == "doubled":
        lines.insert(i + 1, key.replace("- ", "  ") + ": " + value)
    else:
        more = f"{float(value) + 1}" if re.fullmatch(r"-?\d+\.[\de+-]+", value) else f"{int(value) + 1}" if value.isdigit() else "x" + value
        lines[i] = f"{key}: {r.choice({'odd': ODD_YAML, 'another number': [more], 'another word': WORDS}[how])}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    told = f"schema.yaml: {key.strip(' -')} {how}: {lines[min(i, len(lines) - 1)].strip()[:60]}"
    if key == "blocks_hash":
        return told, "any", "blocks_hash"  # only of use to a copy from elsewhere
    return told, "fine" if _is_still(before, path) else "refused", "schema.yaml" if key != "num_bytes" else ""


def _is_still(before: Schema, path: Path) -> bool:
    """Returns whether a schema says the same as before: a field that was left out may have had its default."""
    try:
        return load_schema(path) == before
    except ValueError:
        return False


def lie(r: random.Random, store: Path) -> Done:
    """Changes one field and the hash with it, as no accident does: a writer that is wrong. Nothing may crash of it, or lead elsewhere."""
    path = store / "schema.yaml"
    raw = yaml.safe_load(path.read_text())
    group = r.choice(["history", "context", "tables"])
    entry = r.choice(raw[group])
    key = r.choice(sorted(entry))
    entry[key] = r.choice([*WORDS, 0, 1, 10**9, -1, 0.0, None, [], ["item_id"], "", "a\0b", "y" * 300, "../../../x", entry[key]])
    if r.random() < 0.2:
        raw[r.choice(["num_samples", "num_positions"])] = r.choice([0, -1, 10**12])
    raw["content_hash"] = ""
    try:
        parse_schema(yaml.safe_dump(raw, sort_keys=False).encode(), "here")
    except ValueError as error:
        found = re.search(r"one with hash (\w+)", str(error))
        raw["content_hash"] = found.group(1) if found else ""
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return f"schema.yaml lies of {group}: {key} is {str(entry[key])[:30]!r}", "any", "lies"


def change_text(r: random.Random, store: Path) -> Done:
    """Writes a schema that is none."""
    path = store / "schema.yaml"
    text = path.read_text()
    kinds = {
        "bytes": r.randbytes(300),
        "nothing": b"",
        "a list": b"[1, 2]\n",
        "a mapping of nothing": b"{}\n",
        "deep": b"a: " + b"[" * 20_000 + b"]" * 20_000 + b"\n",
        "object": text.encode() + b"more: !!python/object/apply:os.system [echo]\n",
        "itself": text.encode() + b"more: &p {a: *p}\n",
        "unknown": text.encode() + b"surprise: 1\n",
        "another version": text.replace("format_version: ", "format_version: 9").encode(),
        "a former version": text.replace(f"format_version: {2}", "format_version: 1").encode(),
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


def change_vocabulary(r: random.Random, store: Path) -> Done:
    """Writes a vocabulary anew."""
    path = store / "vocab" / f"{r.choice(['item_id', 'shop', 'city'])}.arrow"
    with pa.ipc.open_file(pa.OSFile(str(path))) as reader:
        values = reader.get_batch(0).column(0)
    plain, text = values.to_pylist(), pa.types.is_large_string(values.type)
    seen = {  # what every opening sees
        "shorter": values.slice(1),
        "longer": pa.concat_arrays([values, values.slice(0, 1)]),
        "numbers": pa.array([1.5] * len(values)),
        "lists": pa.array([[1]] * len(values)),
        "nulls": pa.array([None, *plain[1:]], values.type),
        "short text": pa.array([str(v) for v in plain], pa.string()),
        **dict.fromkeys(("two columns", "two batches", "no batch", "no column"), values),
    }
    unseen = {
        "one value": pa.array([*plain[:-1], "zzz" if text else 10**9], values.type),
        "another order": pa.array(plain[::-1], values.type),
    }
    how = r.choice([*seen, *unseen])
    columns = {"two columns": [values, values], "no column": []}.get(how, [{**seen, **unseen}[how]])
    batch = pa.record_batch(columns, names=["value", "more"][: len(columns)])
    path.unlink()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        for _ in range({"two batches": 2, "no batch": 0}.get(how, 1)):
            writer.write_batch(batch)
    return f"{path.name}: {how}", "refused" if how in seen else "any", path.name if how in seen else ""
