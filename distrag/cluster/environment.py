"""Environment variables of a job, whatever characters their values have.

TorchX hands them to Slurm as one list with commas between, splits its own `--env` at every '=' and ',', and replaces `$name` in values.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from distrag.problem import problem

_PLAIN = re.compile(r"[^,\n\r\"'\\]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Returns the variables of words such as `NAME=value`; everything behind the first '=' is the value.

    Raises:
        ValueError: a word without '=', or whose name no shell knows; a value that no environment can hold.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        todo = "write NAME=value; in a list quote a value that has commas: A=1,B='x,y'"
        if not equals or not _NAME.fullmatch(name):
            wanted = "NAME=value, the name of letters, digits and _"
            raise problem("Not an environment variable", got=pair, wanted=wanted, where="--env", todo=todo)
        if "\0" in value:
            raise problem("Not a value of the environment", got=repr(pair), wanted="no zero byte", where="--env", todo=todo)
        found[name] = value
    return found


def split_list(text: str) -> list[str]:
    """Returns the words of a list with commas between; quotes keep commas and spaces, as in a shell: `A=1,B='x,y=z'`.

    Raises:
        ValueError: a quote that does not end.
    """
    words = shlex.shlex(text, posix=True)
    words.whitespace, words.whitespace_split, words.commenters = ",", True, ""
    try:
        return [word.strip() if "=" not in word else word.lstrip() for word in words if word.strip()]
    except ValueError as error:
        todo = "end the quote, or put \\ before a quote that is meant"
        raise problem("A list cannot be read", got=text, wanted="quotes in pairs", where="--env", todo=todo) from error


def split_plain(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the variables that every scheduler hands on unharmed, and those that the job's own command has to set.

    Args:
        variables: by name.
    """
    plain = {name: value for name, value in variables.items() if _PLAIN.fullmatch(value) and value == value.strip()}
    return plain, {name: value for name, value in variables.items() if name not in plain}


def keep_dollars(text: str) -> str:
    """Returns the text as TorchX is to be given it: it makes one `$` of two, and replaces `${app_id}` and the like."""
    return text.replace("$", "$$")
