"""Values that no key expects, as YAML writes them, and a writer of YAML that can hold them."""

from __future__ import annotations

import json
import math
import random
from typing import Any


def each(words: str) -> list[str]:
    """Returns the words of a text."""
    return words.split()


class Raw(str):
    """A piece of YAML that is written as it is."""


_PLAIN = each(
    "null ~ true off 'true' '' abc '0' '1e3' -1 0 1 3 -0.0 1.5 2.0 1e3 1e308 1e999 1e-320 .nan .inf -.inf nan inf 'nan' 0x1F 0o17 010 "
    "1_000 12:30:45 2020-01-01 2020-13-45 2001-12-14t21:59:43Z [] {} [1,2] [[1]] [null] [a,a] [x,1] << = *nowhere $HOME /etc/passwd "
    "../../../../etc/passwd /dev/null ${oc.env:HOME} !!binary !!null"
)
_QUOTED = each(r"""'\u202e' "\0" "\x1b[31mred" "\u00e9" "e\u0301" "\ud83d\ude00" "\ud800" "a\nb" "\t" """)
_SPACED = [
    "",
    "'  '",
    "{a: 1}",
    "{a: {b: 1}}",
    "{1: 2}",
    "{? [1] : 2}",
    "{null: 1}",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!float abc",
    "!!int x",
]
_SPACED += [
    "!!str 3",
    "!!timestamp 3",
    "!unknown 3",
    "!!binary aGVsbG8=",
    "!!python/object/apply:os.system [echo]",
    "!!python/name:os.system",
]
_SPACED += [
    "!!python/tuple [1, 2]",
    "!!python/object/new:object []",
    "&a [*a]",
    "&b {c: *b}",
    "{<<: {a: 1}}",
    "{<<: 3}",
    "{class_path: os.system}",
]
_SPACED += ["{class_path: distrag.config.RunConfig}", "'" + 5000 * "y" + "'"]
ODD_YAML = [*_PLAIN, *_QUOTED, *_SPACED, "9" * 400, "-" + "9" * 400, str(2**31), str(2**63), str(2**64)]
"""Every kind of value that YAML has, at its edges."""


def odd(r: random.Random) -> Raw:
    """Returns one of them."""
    return Raw(r.choice(ODD_YAML))


def emit(value: Any) -> str:
    """Returns a value as YAML, in the flow style."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{emit(key)}: {emit(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(emit, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


def emit_lines(tree: dict[str, Any]) -> str:
    """Returns a mapping as YAML with a line for each of its keys."""
    return "".join(f"{emit(key)}: {emit(value)}\n" for key, value in tree.items())


def leaves(tree: dict[str, Any], path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value that is no mapping."""
    found: list[tuple[Any, ...]] = []
    for key, value in tree.items():
        found += leaves(value, (*path, key)) if isinstance(value, dict) and value else [(*path, key)]
    return found


def put(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """Sets the value at a path; sections that are missing are made."""
    for key in path[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = value


def take(tree: Any, path: tuple[Any, ...]) -> Any:
    """Returns the value at a path, None where there is none."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def same_meaning(given: Any, kept: Any) -> bool:
    """Returns whether the run kept what was given: numbers as numbers, `true` as no number, texts letter by letter."""
    if isinstance(given, bool) or isinstance(kept, bool):
        return given is kept
    if isinstance(given, list | tuple) and isinstance(kept, list | tuple):
        return len(given) == len(kept) and all(map(same_meaning, given, kept))
    if isinstance(given, dict) and isinstance(kept, dict):
        return set(given) == set(kept) and all(same_meaning(value, kept[key]) for key, value in given.items())
    if isinstance(kept, int | float) and isinstance(given, str | int | float):
        try:
            return float(given) == float(kept)
        except ValueError:
            return False
    return type(given) is type(kept) and bool(given == kept)
