"""A value as YAML has it becomes the value of a field, or is refused in words: the declared type decides, nothing is guessed."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_MANY = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}
_EXAMPLES = {int: "[5, 10]", float: "[0.9, 0.99]", str: "[item, price]"}


class WrongType(Exception):
    """A value that its field cannot have."""


def convert(value: Any, hint: Any) -> Any:
    """Returns `value` as the type `hint`.

    A whole number is a number; nothing else changes its kind: `true` is no number, and neither is a text of digits.

    Args:
        value: plain, as YAML gives it.
        hint: int, float, bool, str, Any, a Literal of texts, a list, a tuple or a mapping of these, or one of them or None.

    Raises:
        WrongType: it is of another kind.
    """
    options = _options(hint)
    if hint is Any or (value is None and type(None) in options):
        return value
    kinds = [option for option in options if option is not type(None)]
    kind = next((kind for kind in kinds if (get_origin(kind) in (list, tuple)) == isinstance(value, list | tuple)), kinds[0])
    origin = get_origin(kind)
    if origin in (list, tuple):
        return _many(value, kind, origin)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise WrongType
        of_key, of_value = get_args(kind)
        return {convert(key, of_key): convert(item, of_value) for key, item in value.items()}
    if origin is Literal:
        if value not in get_args(kind):
            raise WrongType
        return value
    return _one(value, kind)


def describe(hint: Any) -> str:
    """Returns a type in words, such as `a whole number or null`."""
    return " or ".join("null" if kind is type(None) else _describe(kind) for kind in _options(hint))


def holds_text(hint: Any) -> bool:
    """Returns whether a word of the command line is the value itself and no YAML."""
    return any(option is str or get_origin(option) is Literal for option in _options(hint))


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _one(value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise WrongType from None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise WrongType
    return value


def _many(value: Any, kind: Any, origin: type) -> Any:
    if not isinstance(value, list | tuple):
        raise WrongType
    of = get_args(kind)
    if origin is list or of[1:] == (...,):
        return origin(convert(item, of[0]) for item in value)
    if len(of) != len(value):
        raise WrongType
    return tuple(convert(item, its) for item, its in zip(value, of, strict=True))


def _describe(kind: Any) -> str:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, of))}"
    if origin is Mapping:
        return "a mapping"
    if origin is dict:
        return f"a mapping of {_MANY[of[0]]} to {_MANY[of[1]]}"
    if origin in (list, tuple):
        if origin is tuple and of[1:] != (...,):
            return f"a list of {len(of)} {_MANY[of[0]]}"
        return f"a list of {_MANY[of[0]]}, such as {_EXAMPLES[of[0]]}"
    return _WORDS[kind]
