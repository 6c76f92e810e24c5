"""From command-line words, a YAML file or a mapping to a checked config; an unknown key is answered with the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser

from distrag.config.inexact import refuse_inexact
from distrag.config.limits import check_config
from distrag.config.sections import RunConfig
from distrag.data.plain_types import WrongType, convert, describe, holds_text
from distrag.data.text_file import parse_yaml, read_small
from distrag.problem import problem

_SEE_HELP = "`distrag train --help` lists every key with its type"
_FREE = ("tables.per_table",)  # its keys are names of tables
_LINE = "the command line"

Given = dict[str, tuple[Any, str]]
"""Dotted key -> the value given for it and where it was given; a later one replaces an earlier one."""


def build_parser(prog: str = "distrag train") -> ArgumentParser:
    """Returns the parser whose `--help` is made from the docstrings of the sections."""
    about = "Trains, evaluates and writes a run directory."
    parser = ArgumentParser(prog=prog, description=about, exit_on_error=False, print_config=None)
    parser.add_argument("--config", action="config", help="YAML file with any of these keys")
    parser.add_class_arguments(RunConfig)
    return parser


@cache
def known_keys() -> tuple[str, ...]:
    """Returns every dotted key of the config."""
    return tuple(_hints())


def read_config(args: Sequence[str] | Mapping[str, Any] | RunConfig, *, writes: bool = True) -> RunConfig:
    """Returns the config out of command-line words, or of a nested mapping.

    Args:
        args: words such as `["--config", "c.yaml", "--optim.lr=0.01"]`, or a mapping as YAML would give it.
        writes: whether the folders of the run will be written to; one that is only read may lie anywhere.

    Raises:
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type, or one out of range.
    """
    if isinstance(args, RunConfig):
        return check_config(args, writes=writes)
    given: Given = {}
    if isinstance(args, Mapping):
        _take_tree(given, args, "the config mapping")
    else:
        _take_words(given, [str(word) for word in args])
    return check_config(_filled(RunConfig(), given), writes=writes)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        ValueError: no such file, no YAML, or not a mapping.
    """
    what, todo = "The config file", "mend the path or the file; see configs/"
    if not str(path):
        raise problem(f"{what} cannot be read", got="no name", wanted="a YAML file", where=f"--config on {_LINE}", todo=todo)
    content = parse_yaml(read_small(path, what=what, todo=todo), path, what=what, todo=todo)
    if content is None:
        return {}
    if not isinstance(content, dict):
        got = {"list": "a list", "str": "a text"}.get(type(content).__name__, "a number")
        raise problem("The config file is no mapping", got=got, wanted="section: {key: value}", where=path, todo="see configs/")
    return content


def check_keys(keys: Sequence[str], where: str) -> None:
    """Refuses a key that does not exist, naming the nearest one that does, or why there is none.

    Raises:
        ValueError: for the first unknown key.
    """
    known, sections = known_keys(), _sections()
    for key in keys:
        if key in known or key in sections or any(key.startswith(f"{free}.") for free in _FREE):
            continue
        refuse_inexact(key, where)
        near = _nearest(key, [*known, *sections])
        wanted = f"did you mean {near!r}?" if near else f"a key of {sorted(sections)}"
        raise problem("An unknown config key", got=key, wanted=wanted, where=where, todo=f"correct the key; {_SEE_HELP}")


def _take_words(given: Given, words: Sequence[str]) -> None:
    """Adds what the words say, files of `--config` included, in their order."""
    rest = iter(enumerate(words))
    for i, word in rest:
        if not word.startswith("--"):
            todo = f"write --config {word}" if Path(word).suffix in (".yaml", ".yml") else "give values as --key=value"
            raise problem("A word that belongs to no key", got=word, wanted="--config FILE or --key=value", where=_LINE, todo=todo)
        key, equals, value = word[2:].partition("=")
        if key != "config":
            check_keys([key], _LINE)
        if not equals:
            if i + 1 == len(words) or words[i + 1].startswith("--"):
                todo = f"give the value as --{key}=VALUE"
                raise problem("A key without a value", got=" ".join(words[i : i + 2]), wanted=f"--{key}=VALUE", where=_LINE, todo=todo)
            value = next(rest)[1]
        if key == "config":
            _take_tree(given, read_yaml(value), value)
        else:
            _take_word(given, key, value)


def _take_word(given: Given, key: str, value: str) -> None:
    where, hint = f"--{key} on {_LINE}", _hints().get(key)
    if hint is not None and holds_text(hint):
        given[key] = (None if value == "null" and describe(hint).endswith("or null") else value, where)
        return
    if any(key.startswith(f"{free}.") for free in _FREE):
        _take_tree(given, {key: value}, where)
        return
    found = parse_yaml(value, where, what="A value", todo=f"mend the value; {_SEE_HELP}")
    if hint is not None:
        given[key] = (found, where)
    else:
        _take_tree(given, {key: found}, where)


def _take_tree(given: Given, tree: Mapping[str, Any], where: str) -> None:
    """Adds the leaves of a nested mapping; refuses unknown keys, keys given twice, and a section that is given as one value."""
    leaves, sections = list(_leaves(tree)), _sections()
    check_keys([key for key, _ in leaves], where)
    seen: set[str] = set()
    for key, value in leaves:
        place = where if where.startswith("--") else f"{key} in {where}"
        if key in sections and value != {}:
            raise problem("A section is no mapping", got=_shown(value), wanted="key: value", where=place, todo=_SEE_HELP)
        if key in seen:
            raise problem("A key is given twice", got=key, wanted="each once", where=where, todo="leave one of them out")
        seen.add(key)
        free = next((free for free in _FREE if key.startswith(f"{free}.")), "")
        if free:
            before = given.get(free, ({}, ""))[0]
            given[free] = ({**(before if isinstance(before, dict) else {}), key.removeprefix(f"{free}."): value}, place)
        elif key not in sections:
            given[key] = (value, place)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields dotted key and value down to the keys that there are; an empty mapping is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in _hints():
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _filled(section: Any, given: Given, prefix: str = "") -> Any:
    """Returns a section of the config with what was given for its keys, each of its type."""
    hints, changes = get_type_hints(type(section)), {}
    for entry in dataclasses.fields(section):
        key, now = f"{prefix}{entry.name}", getattr(section, entry.name)
        if dataclasses.is_dataclass(now):
            changes[entry.name] = _filled(now, given, f"{key}.")
        elif key in given:
            value, where = given[key]
            try:
                changes[entry.name] = convert(value, hints[entry.name])
            except WrongType:
                todo = f"mend the value; {_SEE_HELP}"
                wanted = describe(hints[entry.name])
                raise problem("A value of another type", got=_shown(value), wanted=wanted, where=where, todo=todo) from None
    return dataclasses.replace(section, **changes)


def _shown(value: Any) -> str:
    """Returns a value as a message shows it: texts in quotes, so that '3' is no 3."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**40:
        return "a number of many digits"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."


@cache
def _hints() -> dict[str, Any]:
    """Returns the declared type of every dotted key."""

    def walk(section: Any, prefix: str) -> dict[str, Any]:
        hints: dict[str, Any] = get_type_hints(type(section))
        found: dict[str, Any] = {}
        for entry in dataclasses.fields(section):
            now = getattr(section, entry.name)
            its = walk(now, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(now) else {f"{prefix}{entry.name}": hints[entry.name]}
            found |= its
        return found

    return walk(RunConfig(), "")


@cache
def _sections() -> frozenset[str]:
    names = {key.rpartition(".")[0] for key in known_keys() if "." in key}
    return frozenset(names | {name.rpartition(".")[0] for name in names if "." in name})


def _nearest(key: str, names: Sequence[str]) -> str:
    """Returns the name most like `key`, as a whole or in its last word; '' when none is."""
    key = key[-200:]  # what likeness takes grows with the square

    def likeness(name: str) -> float:
        ends = (key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1])
        return max(difflib.SequenceMatcher(None, key, name).ratio(), 0.99 * difflib.SequenceMatcher(None, *ends).ratio())

    best = max(names, key=likeness)
    return best if likeness(best) >= 0.5 else ""
