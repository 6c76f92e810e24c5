"""Small files that people and programs write: YAML and JSON as plain values, whatever stands in the file and whatever the file is."""

from __future__ import annotations

import json
import os
import re
import select
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from distrag.problem import problem

if TYPE_CHECKING:
    from pathlib import Path

MOST_BYTES = 64 << 20
_MOST_DEPTH = 64
_MOST_VALUES = 2_000_000
_PIPE_S = 10
_FLOAT = "tag:yaml.org,2002:float"
_INT = "tag:yaml.org,2002:int"
_DROPPED = (_FLOAT, _INT, "tag:yaml.org,2002:timestamp")
_TAGS = (None, "!", "tag:yaml.org,2002:str")
_FLOATS = re.compile(
    r"[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)
_INTS = re.compile(r"[-+]?(?:0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)$")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with `1e-3` as a number, and neither dates nor 010 for 8 nor 1:30 for 90."""


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `_Loader`, or another reader of YAML, would take for something else."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in its if tag not in _DROPPED] for first, its in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(_FLOAT, _FLOATS, list("-+0123456789."))
    _kind.add_implicit_resolver(_INT, _INTS, list("-+0123456789"))


def dump_yaml(value: Any) -> str:
    """Returns plain values as YAML that `parse_yaml` reads back the same, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def read_small(path: str | Path, *, what: str, todo: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a file, or of a pipe that someone has written to; waits for nobody.

    Args:
        path: the file.
        what: what it is, such as `The config file`.
        todo: for the error.
        most_bytes: what is longer is no such file.

    Raises:
        ValueError: it is missing, a folder or a device, cannot be read, or is far larger than such a file is.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            content = _drain(descriptor, most_bytes)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: no file has a name with NUL, and what `_drain` says
        got = error.strerror if isinstance(error, OSError) else error
        raise problem(f"{what} cannot be read", got=got, wanted="a readable file", where=path, todo=todo) from None
    return content


def _drain(descriptor: int, most_bytes: int) -> bytes:
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise ValueError("a folder" if stat.S_ISDIR(mode) else "a device or a socket")
    parts, size = [], 0
    while True:
        try:
            part = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            if not select.select([descriptor], [], [], _PIPE_S)[0]:
                raise ValueError(f"a pipe into which nothing was written for {_PIPE_S} s") from None
            continue
        if not part:
            break
        parts.append(part)
        size += len(part)
        if size > most_bytes:
            raise ValueError(f"more than {most_bytes >> 20} MiB")
    if not size and stat.S_ISFIFO(mode):
        raise ValueError("a pipe that nobody writes to, or that was read before")
    return b"".join(parts)


def parse_yaml(text: bytes | str, where: object, *, what: str, todo: str) -> Any:
    """Returns what a YAML text says, as None, bool, int, float, str, list and dict; None for an empty one.

    Args:
        text: UTF-8.
        where: for the error.
        what: what it is, such as `The config file`.
        todo: for the error.

    Raises:
        ValueError: it is no YAML, or holds objects, a key twice in one mapping, itself, or more than anybody writes.
    """
    try:
        _check_events(text := text.decode("utf-8-sig") if isinstance(text, bytes) else text)
        found = yaml.load(text, Loader=_Loader)
        _check_plain(found)
    except Exception as error:  # constructors of PyYAML raise of every kind for tags that do not fit
        got = " ".join(str(error).split())
        raise problem(f"{what} cannot be read", got=got, wanted="YAML of plain values", where=where, todo=todo) from None
    return found


def parse_json(text: bytes, where: object, *, what: str, todo: str) -> Any:
    """Returns what a JSON text says.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise problem(f"{what} cannot be read", got=error, wanted="JSON", where=where, todo=todo) from None


@dataclass
class _Open:
    """A list or mapping that has begun and not ended.

    Attributes:
        anchor: its name, None for most.
        is_map: whether it is a mapping.
        size: values in it so far, those behind aliases counted as often as they are named.
        depth: of the deepest of them.
        keys: of a mapping.
        at_key: whether the next value of a mapping is a key.
    """

    anchor: str | None
    is_map: bool
    size: int = 1
    depth: int = 0
    keys: set[str] = field(default_factory=set)
    at_key: bool = True


def _check_events(text: str) -> None:
    """Refuses what is deep, endless, or says one thing twice, from the events of the parser, which does not call itself.

    Raises:
        ValueError: naming the line.
    """
    stack: list[_Open] = [_Open(None, False)]
    anchors: dict[str, tuple[int, int] | None] = {}
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        tag = getattr(event, "tag", None)
        if tag not in _TAGS:
            raise ValueError(f"line {line}: the tag {tag}")
        if isinstance(event, yaml.CollectionStartEvent):
            if stack[-1].is_map and stack[-1].at_key:
                raise ValueError(f"line {line}: a key that is no text")
            if len(stack) > _MOST_DEPTH:
                raise ValueError(f"line {line}: more than {_MOST_DEPTH} levels")
            stack.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            anchors |= {event.anchor: None} if event.anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > 400 and event.value.strip("+-").isdigit():
                raise ValueError(f"line {line}: a number of {len(event.value):,} digits")
            _add(stack, 1, 0, line, event.value)
            anchors |= {event.anchor: (1, 0)} if event.anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise ValueError(f"line {line}: *{event.anchor} names nothing")
            known = anchors[event.anchor]
            if known is None:
                raise ValueError(f"line {line}: {event.anchor} holds itself")
            _add(stack, *known, line, None)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = stack.pop()
            anchors |= {done.anchor: (done.size, done.depth)} if done.anchor else {}
            _add(stack, done.size, done.depth, line, None)


def _add(stack: list[_Open], size: int, depth: int, line: int, text: str | None) -> None:
    here = stack[-1]
    here.size, here.depth = here.size + size, max(here.depth, depth + 1)
    if here.size > _MOST_VALUES or len(stack) + here.depth > _MOST_DEPTH + 1:
        what = f"more than {_MOST_VALUES:,} values" if here.size > _MOST_VALUES else f"more than {_MOST_DEPTH} levels"
        raise ValueError(f"line {line}: {what}")
    if here.is_map and here.at_key and text is not None:
        if text in here.keys:
            raise ValueError(f"line {line}: the key {text!r} twice")
        here.keys.add(text)
    here.at_key = not here.at_key


def _check_plain(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"the key {key!r}, which is no text; write it in quotes")
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"a value of the kind {type(value).__name__}")
