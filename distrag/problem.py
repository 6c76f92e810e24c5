"""The one shape of an error that a user or a file can cause: five parts, always in the same order."""

from __future__ import annotations


def problem(what: str, *, got: object, wanted: object, where: object, todo: str) -> ValueError:
    """Returns a ValueError that says what is wrong, what was there, what belongs there, where, and what to do.

    Args:
        what: the fault in a few words, without a full stop.
        got: what was found.
        wanted: what would have been right.
        where: file, column, sample, config key, table: whatever lets the reader open it.
        todo: the next thing to do, as an instruction.
    """
    return ValueError(f"{what}\n  got:    {got}\n  wanted: {wanted}\n  where:  {where}\n  to do:  {todo}")
