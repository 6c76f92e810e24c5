"""From command-line words, a YAML file or a mapping to a checked config; an unknown key is answered with the nearest known one."""

from __future__ import annotations

import dataclasses
import difflib
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from distrag.config.inexact import refuse_inexact
from distrag.config.limits import check_config
from distrag.config.sections import RunConfig
from distrag.problem import problem

_SEE_HELP = "`distrag train --help` lists every key with its type"
_FREE = ("tables.per_table",)  # its keys are names of tables


def build_parser(prog: str = "distrag train") -> ArgumentParser:
    """Returns the parser whose `--help` is made from the docstrings of the sections."""
    parser = ArgumentParser(prog=prog, description="Trains, evaluates and writes a run directory.", exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of these keys")
    parser.add_class_arguments(RunConfig)
    return parser


@cache
def _parser() -> ArgumentParser:
    return build_parser()  # reads every docstring, which takes longer than all the rest


@cache
def known_keys() -> tuple[str, ...]:
    """Returns every dotted key of the config."""
    return tuple(key for key, _ in _dotted(dataclasses.asdict(RunConfig())))


def read_config(args: Sequence[str] | Mapping[str, Any] | RunConfig) -> RunConfig:
    """Returns the config out of command-line words, or of a nested mapping.

    Args:
        args: words such as `["--config", "c.yaml", "--optim.lr=0.01"]`, or a mapping as YAML would give it.

    Raises:
        ValueError: an unknown key (the nearest known one is named), a value of the wrong type, or one out of range.
    """
    if isinstance(args, RunConfig):
        return check_config(args)
    parser = _parser()
    if isinstance(args, Mapping):
        _check_tree(args, "the config mapping")
        parsed = _parse(lambda: parser.parse_object(dict(args)))
    else:
        words = [str(word) for word in args]
        _check_words(words)
        parsed = _parse(lambda: parser.parse_args(words))
    made = parser.instantiate(parsed)
    return check_config(RunConfig(**{f.name: made[f.name] for f in dataclasses.fields(RunConfig)}))


def _parse(parse: Callable[[], Namespace]) -> Namespace:
    try:
        return parse()
    except ArgumentError as error:
        got = " ".join(str(error).split())
        raise problem(
            "The config cannot be read",
            got=got,
            wanted="values of the documented types",
            where="config",
            todo=f"mend the value; {_SEE_HELP}",
        ) from None


def _check_words(words: Sequence[str]) -> None:
    expects_value = False
    for i, word in enumerate(words):
        if not word.startswith("--"):
            if not expects_value and word != "-h":
                todo = f"write --config {word}" if Path(word).suffix in (".yaml", ".yml") else "give values as --key=value"
                raise problem("A word that belongs to no key", got=word, wanted="--config FILE or --key=value", where=_LINE, todo=todo)
            expects_value = False
            continue
        key, equals, value = word[2:].partition("=")
        expects_value = not equals
        if key == "config":
            path = value if equals else words[i + 1] if i + 1 < len(words) else ""
            _check_tree(read_yaml(path), path)
        elif key not in ("help", "print_config"):
            check_keys([key], _LINE)


_LINE = "the command line"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Returns the mapping in a YAML file.

    Raises:
        ValueError: no such file, or not a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date that is none
        raise problem(
            "The config file cannot be read", got=error, wanted="a YAML file", where=path, todo="mend the path or the file"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise problem(
            "The config file is no mapping", got=type(content).__name__, wanted="section: {key: value}", where=path, todo="see configs/"
        )
    return content


def _check_tree(tree: Mapping[str, Any], where: str) -> None:
    """Refuses unknown keys, and a section that is given as one value."""
    leaves = _dotted(tree)
    check_keys([key for key, _ in leaves], where)
    sections = _sections()
    for key, value in leaves:
        if key in sections and value != {}:
            raise problem("A section is no mapping", got=value, wanted="key: value", where=f"{key} in {where}", todo=_SEE_HELP)


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


@cache
def _sections() -> frozenset[str]:
    return frozenset(key.rsplit(".", 1)[0] for key in known_keys() if "." in key)


def _nearest(key: str, names: Sequence[str]) -> str:
    """Returns the name most like `key`, as a whole or in its last word; '' when none is."""

    def likeness(name: str) -> float:
        ends = (key.rsplit(".", 1)[-1], name.rsplit(".", 1)[-1])
        return max(difflib.SequenceMatcher(None, key, name).ratio(), 0.99 * difflib.SequenceMatcher(None, *ends).ratio())

    best = max(names, key=likeness)
    return best if likeness(best) >= 0.5 else ""


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns dotted key and value of every leaf; an empty mapping is one."""
    out: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out += _dotted(value, f"{prefix}{key}.")
        else:
            out.append((f"{prefix}{key}", value))
    return out
