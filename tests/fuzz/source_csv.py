"""Tables of events that are not what they seem, or are and look odd."""

from __future__ import annotations

import gzip
import os
import random
from collections.abc import Callable
from pathlib import Path

from distrag.data.store import open_store
from tests.fuzz.case import Case, Ended, Ground, Right, Room


class Table:
    """The lines of a good CSV, to be spoilt."""

    def __init__(self, text: str) -> None:
        self.text, lines = text, text.splitlines()
        self.head, self.body = lines[0], lines[1:]

    def plus(self, *rows: str) -> bytes:
        """Returns the table with more lines."""
        return self.under(self.head, *rows)

    def under(self, head: str, *rows: str) -> bytes:
        """Returns the table under another first line."""
        return ("\n".join([head, *self.body, *rows]) + "\n").encode()

    def with_time(self, value: str) -> bytes:
        """Returns the table with one event at another time."""
        return self.plus(f"u1,3,{value},1.0")

    def times_by(self, factor: int) -> bytes:
        """Returns the table in another unit of time."""
        rows = [line.split(",") for line in self.body]
        return "\n".join([self.head, *(",".join([u, i, str(int(t) * factor), p]) for u, i, t, p in rows)]).encode()


BAD: dict[str, Callable[[Table], bytes]] = {
    "empty": lambda _: b"",
    "only a header": lambda t: t.head.encode(),
    "no header": lambda t: "\n".join(t.body).encode(),
    "a line too short": lambda t: t.plus("u1,2"),
    "a line too long": lambda t: t.plus("u1,2,3,4,5,6"),
    "open quote": lambda t: t.plus('u1,"2,3,4'),
    "latin-1": lambda t: t.plus() + b"\xe9,1,1600000000,1\n",
    "utf-16": lambda t: t.text.encode("utf-16"),
    "doubled column": lambda t: t.under("user_id,item_id,item_id,price"),
    "no user column": lambda t: t.under("a,item_id,timestamp,price"),
    "no item column": lambda t: t.under("user_id,b,timestamp,price"),
    "user is empty": lambda t: t.plus(",3,1600000000,1.0"),
    "time is a word": lambda t: t.with_time("soon"),
    "time is huge": lambda t: t.with_time("9" * 30),
    "time in milliseconds": lambda t: t.times_by(1000),
    "time in microseconds": lambda t: t.times_by(10**6),
    "items are fractions": lambda t: t.plus("u1,1.5,1600000000,1.0"),
    "an item of many digits": lambda t: t.plus("u1," + "9" * 3_000_000 + ",1600000000,1.0"),
    "a column named by a path": lambda t: t.under("user_id,item_id,timestamp,item_id:next/../../x\x07"),
    "a column of a long name": lambda t: t.under("user_id,item_id,timestamp," + "y" * 400),
    "a column with nul": lambda t: t.under("user_id,item_id,timestamp,a\0b"),
    "no name for a column": lambda t: t.under("user_id,item_id,,price"),
    "half a gzip": lambda t: gzip.compress(t.text.encode())[:-200],
    "gzip of much": lambda _: gzip.compress(bytes(200 << 20), 1),
    "no gzip": lambda t: t.text.encode(),
}
GOOD: dict[str, Callable[[Table], bytes]] = {
    "windows lines": lambda t: t.text.replace("\n", "\r\n").encode(),
    "byte order mark": lambda t: b"\xef\xbb\xbf" + t.text.encode(),
    "semicolons": lambda t: t.text.replace(",", ";").encode(),
    "tabs": lambda t: t.text.replace(",", "\t").encode(),
    "quoted": lambda t: t.text.replace("u1,", '"u1",').encode(),
    "negative times": lambda t: t.with_time("-5"),
    "no time": lambda t: t.with_time(""),
    "nan price": lambda t: t.plus("u1,2,1600000000,nan", "u1,2,1600000000,inf"),
    "no last newline": lambda t: t.text.rstrip("\n").encode(),
    "gzip": lambda t: gzip.compress(t.text.encode()),
    "items are negative": lambda t: t.plus("u1,-7,1600000000,1.0"),
    "many columns": lambda t: "\n".join(
        line + "".join(f",{'c' if n == 0 else ''}{i}" for i in range(300)) for n, line in enumerate([t.head, *t.body])
    ).encode(),
    "a name of dots and slashes": lambda t: t.under("user_id,item_id,timestamp,../../x"),
}
UNSURE: dict[str, Callable[[Table], bytes]] = {
    "blank lines": lambda _: b"\n\n\n",
    "random bytes": lambda t: random.Random(t.text).randbytes(3000),
    "nul": lambda t: t.plus("\0,\0,\0,\0"),
    "carriage returns only": lambda t: t.text.replace("\n", "\r").encode(),
    "unicode": lambda t: t.plus("ü,2,1600000000,1.0", "u\u0308,2,1600000000,1.0"),
    "zeros in front": lambda t: t.plus("u1,007,1600000000,1.0"),
}
SPECIAL = ("folder", "pipe", "device", "dangling link")


def whole_store(out: Path, rows: int | None = None) -> Right:
    """Returns a check that what was written is a store of so many rows."""

    def look(_ended: Ended) -> str:
        store = open_store(out, verify=True)
        return f"{store.num_samples} rows, not {rows}" if rows is not None and rows != store.num_samples else ""

    return look


def draw_csv(r: random.Random, ground: Ground, room: Room) -> Case:
    """Returns a case of a CSV."""
    table, told = Table(ground.csv.read_text()), r.choice([*BAD, *GOOD, *UNSURE, *SPECIAL])
    path = room.given / ("x.csv.gz" if "gzip" in told else "x.csv")
    if told in SPECIAL:
        make_special(path, told)
    else:
        path.write_bytes({**BAD, **GOOD, **UNSURE}[told](table))
    out = room.out / "store"
    words, users = ["prepare", str(path), "--out", str(out)], len({line.split(",")[0] for line in table.body})
    if told in GOOD:
        return Case("source", f"csv: {told}", words, "fine", right=whole_store(out, users))
    return Case("source", f"csv: {told}", words, "any" if told in UNSURE else "refused", names=(path.name,), right=whole_store(out))


def make_special(path: Path, told: str) -> None:
    """Puts something that is no file where one is looked for."""
    if told == "folder":
        path.mkdir()
    elif told == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to({"device": "/dev/zero", "dangling link": "nowhere", "link to itself": path.name}[told])
