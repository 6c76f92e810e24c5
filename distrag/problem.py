"""The one shape of an error that a user or a file can cause: five parts, always in the same order."""

from __future__ import annotations

_MOST = 2000


def problem(what: str, *, got: object, wanted: object, where: object, todo: str) -> ValueError:
    """Returns a ValueError that says what is wrong, what was there, what belongs there, where, and what to do.

    Args:
        what: the fault in a few words, without a full stop.
        got: what was found.
        wanted: what would have been right.
        where: file, column, sample, config key, table: whatever lets the reader open it.
        todo: the next thing to do, as an instruction.
    """
    told = {"got": got, "wanted": wanted, "where": where, "to do": todo}
    lines = [f"  {part + ':':7} {_readable(text)}" for part, text in told.items()]
    return ValueError("\n".join([what, *lines]))


def _readable(part: object) -> str:
    """Returns a part as one can read it: blank text in quotes, control characters as escapes, the middle of long text left out."""
    text = str(part)
    if not text.strip():
        return repr(text)
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return text if len(text) <= _MOST else f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
