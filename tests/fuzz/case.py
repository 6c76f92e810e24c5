"""What a case of bad input is: a command line, what it may end in, and what its message has to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Expect = Literal["refused", "fine", "any"]


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: exit code; negative for a signal, None for one that was killed because it did not end.
        out: what it printed.
        err: what it printed as errors.
        seconds: wall time.
        wrote: paths outside its own folder that it opened to write, made, moved or removed.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    wrote: tuple[str, ...] = ()


Right = Callable[[Ended], str]
"""What is wrong with a result that ended in exit code 0; an empty text when nothing is."""


@dataclass(frozen=True)
class Case:
    """One command line on bad, or on good, input.

    Attributes:
        kind: group of the case, for the counts: `config`, `store`, `source`, `run` or `words`.
        told: what was done to the input, in words.
        words: the command line after `distrag`.
        expect: `refused` must end in a message, `fine` in exit code 0; `any` in one of them, and `right` says when 0 is wrong.
        names: the message has to hold one of these; empty where any five parts do.
        right: looks at a result.
        then: a second command that must refuse where the first one did not, such as `stats --verify`.
    """

    kind: str
    told: str
    words: list[str]
    expect: Expect = "any"
    names: tuple[str, ...] = ()
    right: Right | None = None
    then: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Room:
    """Where a case lives: `given` is read, `out` may be written, `here` is the folder it is called from and stays as it is."""

    given: Path
    out: Path
    here: Path

    @classmethod
    def make(cls, folder: Path) -> Room:
        """Returns an empty room in `folder`."""
        made = cls(folder / "given", folder / "out", folder / "here")
        for path in (made.given, made.out, made.here):
            path.mkdir(parents=True)
        return made


@dataclass(frozen=True)
class Ground:
    """Good input that cases are made from; nobody writes here.

    Attributes:
        store: a store with every kind of feature.
        run: a finished run on it.
        parquet: the histories it was prepared from.
        csv: a table of events.
        parts: other good things by name.
    """

    store: Path
    run: Path
    parquet: Path
    csv: Path
