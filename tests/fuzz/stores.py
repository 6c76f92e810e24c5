"""Stores that are not what was prepared, and the commands that open them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

from distrag.data.content import SAMPLES
from tests.fuzz.case import Case, Ground, Room
from tests.fuzz.ground import good_config
from tests.fuzz.source_csv import make_special
from tests.fuzz.store_columns import Done, change_columns, change_offsets, change_values, flip_bit
from tests.fuzz.store_schema import change_field, change_text, change_vocabulary, lie
from tests.fuzz.values import emit_lines

SPECIAL = ("folder", "pipe", "device", "dangling link", "link to itself")


def draw_store(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a store."""
    store = room.given / "store"
    shutil.copytree(ground.store, store)
    if r.random() < 0.06:
        return _staged_sums(r, store, room)
    changes = [
        _files,
        flip_bit,
        change_columns,
        change_offsets,
        change_values,
        change_field,
        lie,
        change_text,
        change_vocabulary,
        _harmless,
    ]
    told, expect, name = r.choices(changes, [5, 4, 4, 3, 5, 6, 3, 3, 3, 2])[0](r, store)
    words = _command(r, store, ground, room, staged=expect == "refused" and r.random() < 0.2)
    if expect == "any":  # inside their ranges: only the hash can tell, unless what is wrong is of no use here, or the hash is wrong as well
        return Case("store", told, words, then=["stats", str(store), "--verify"] if not name else [])
    return Case("store", told, words, expect, names=(name,) if name else ())


def _command(r: random.Random, store: Path, ground: Ground, room: Room, *, staged: bool) -> list[str]:
    config, tree = room.given / "c.yaml", good_config(store, room.out / "run", task=r.choice(["next_item", "conversion"]))
    if staged:
        tree["data"] |= {"path": f"file://{store}", "cache": str(room.out / "cache")}
    config.write_text(emit_lines(tree))
    words = [["train", "--config", str(config)], ["plan", str(config), "--planner-seconds=0"]]
    if not staged:
        words += [["stats", str(store)], ["stats", str(store), "--verify"], ["evaluate", "--popularity", "train", "--data", str(store)]]
        words += [["evaluate", str(ground.run), "--data", str(store)], ["train", "--config", str(config)]]
    return r.choice(words)


def _files(r: random.Random, store: Path) -> Done:
    """Files that are gone, cut, or something else."""
    name = r.choice([SAMPLES, SAMPLES, "schema.yaml", "vocab/item_id.arrow", "vocab/shop.arrow", "vocab"])
    path, how = store / name, r.choice(["missing", "empty", "half", "one byte less", "one byte more", "unreadable", *SPECIAL])
    content = path.read_bytes() if path.is_file() else b""
    told = f"{name}: {how}"
    if how == "unreadable":
        path.chmod(0)
        return told, "fine" if os.geteuid() == 0 else "refused", ""  # who is root reads what nobody may
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how in SPECIAL:
        make_special(path, how)
        if name == "vocab" and how == "folder":
            return told, "refused", "vocab"
    elif how != "missing":
        path.write_bytes(
            {"empty": b"", "half": content[: len(content) // 2], "one byte less": content[:-1], "one byte more": content + b"\0"}[how]
        )
    if name == "schema.yaml" and how == "one byte less":
        return told, "fine", ""  # the end of its last line
    if how == "one byte more" and name not in ("vocab", "schema.yaml"):
        return told, "any", "what is staged is as it was prepared"
    return told, "refused", Path(name).name if how != "missing" else ""


def _harmless(r: random.Random, store: Path) -> Done:
    how = r.choice(["more files", "no block sums", "bad block sums", "read only", "linked", "comment"])
    if how == "more files":
        (store / "notes.txt").write_text("x")
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


def _staged_sums(r: random.Random, store: Path, room: Room) -> Case:
    """Block sums of a store elsewhere that lie, with their hash right: files outside the cache, sizes and counts that are none."""
    raw: dict[str, Any] = json.loads((store / "blocks.json").read_text())
    sizes = raw["sizes"]
    lies: dict[str, Any] = {
        "sizes": [
            {},
            [],
            None,
            {**sizes, "../../../out/owned": 5},
            {**sizes, SAMPLES: -1},
            {**sizes, SAMPLES: 10**15},
            {"../samples.arrow": 5},
            {SAMPLES: "x"},
        ],
        "sha256": [[], None, raw["sha256"][:-1], [0] * len(raw["sha256"]), ["0" * 64] * len(raw["sha256"]), "x"],
        "block_bytes": [0, -1, 1, "x", None, 10**30],
    }
    key = r.choice(sorted(lies))
    raw[key] = r.choice(lies[key])
    text = json.dumps(raw).encode()
    (store / "blocks.json").write_bytes(text)
    schema = store / "schema.yaml"
    schema.write_text(re.sub(r"(?m)^blocks_hash: \w+", f"blocks_hash: '{hashlib.sha256(text).hexdigest()}'", schema.read_text()))
    tree = good_config(store, room.out / "run")
    tree["data"] |= {"path": f"file://{store}", "cache": str(room.out / "cache")}
    (room.given / "c.yaml").write_text(emit_lines(tree))
    return Case(
        "store",
        f"block sums: {key} {str(raw[key])[:40]}",
        ["train", "--config", str(room.given / "c.yaml")],
        "refused",
        names=("blocks.json", SAMPLES, "cache"),
    )
