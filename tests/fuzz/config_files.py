"""Files that are no config, and good ones in an odd form."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.source_csv import make_special

FINE: dict[str, Callable[[str], str]] = {
    "byte order mark": lambda good: "\ufeff" + good,
    "windows lines": lambda good: good.replace("\n", "\r\n"),
    "comments": lambda good: "# é\n" + good + "# end",
    "an anchor": lambda good: good.replace('"dim": 8', '"dim": &d 8') + "batching.bucket_steps: *d\n",
    "a document mark": lambda good: "---\n" + good,
}


def _deep(begin: str, end: str, depth: int) -> str:
    return begin * depth + "1" + end * depth


def _laughs(width: int, depth: int) -> str:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * width)}]" for i in range(1, depth)]
    return "\n".join(lines) + "\n"


BAD: dict[str, Callable[[str], str]] = {
    "empty": lambda _: "",
    "only a comment": lambda _: "# nothing\n",
    "null": lambda _: "null\n",
    "two documents": lambda good: good + "---\n" + good,
    "tabs": lambda good: good + "optim:\n\tlr: 1\n",
    "not closed": lambda good: good + "optim: {lr: 1\n",
    "deep list": lambda good: good + f"optim: {_deep('[', ']', 20_000)}\n",
    "deep map": lambda good: good + f"optim: {_deep('{a: ', '}', 5_000)}\n",
    "a little deep": lambda good: good + f"optim: {_deep('{a: ', '}', 40)}\n",
    "deep and open": lambda _: "[" * 50_000,
    "many aliases": lambda good: good + _laughs(10, 9),
    "many aliases in a value": lambda _: _laughs(10, 9).replace("a8:", "train: {eval_ks:").rstrip() + "}\n",
    "a chain of aliases": lambda _: "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000)),
    "alias to itself": lambda _: "optim: &o {lr: *o}\n",
    "list of itself": lambda _: "train: {eval_ks: &k [1, *k]}\n",
    "object": lambda good: good + "debug: !!python/object/apply:os.system ['touch owned']\n",
    "long line": lambda good: good + "optim: {lr: " + "1" * 2_000_000 + "}\n",
    "many keys": lambda good: good + "".join(f"k{i}: {i}\n" for i in range(30_000)),
    "a scalar": lambda _: "abc\n",
    "a number": lambda _: "3\n",
    "control characters": lambda good: good + "optim: {lr: 1}\x07\n",
    "nul": lambda good: good + "\0",
}
RAW: dict[str, Callable[[bytes], bytes]] = {
    "latin-1": lambda good: good + b"# \xe9\n",
    "utf-16": lambda good: good.decode().encode("utf-16"),
    "random bytes": lambda good: random.Random(good).randbytes(500),
    "gzip": lambda good: b"\x1f\x8b" + good,
    "half of a character": lambda good: good + "# é".encode()[:-1],
}
SPECIAL = ("folder", "pipe", "link to itself", "device", "dangling link", "missing")
NAMES = {"long name": "y" * 300, "nul in name": "c.yaml\0"}


def write_file(r: random.Random, good: str, path: Path) -> tuple[str, Path, bool]:
    """Returns what was written, where, and whether it is a good config.

    Args:
        r: draws.
        good: text of a good config.
        path: where to write.
    """
    told = r.choice([*FINE, *BAD, *RAW, *SPECIAL, *NAMES, "empty name"])
    if told in FINE or told in BAD:
        path.write_text({**FINE, **BAD}[told](good), newline="")
    elif told in RAW:
        path.write_bytes(RAW[told](good.encode()))
    elif told in NAMES:
        path = path.with_name(NAMES[told])
    elif told == "empty name":
        path = Path("")
    elif told != "missing":
        make_special(path, told)
    return told, path, told in FINE
