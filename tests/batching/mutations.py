"""What a mutation is: the material of `python -m tests.batching.mutate`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One way to break a promise.

    Attributes:
        promise: what no longer holds.
        what: how it is broken.
        file: the file of `distrag/batching` that is edited.
        edits: text that has to stand there exactly once, and what takes its place.
    """

    promise: str
    what: str
    file: str
    edits: tuple[tuple[str, str], ...]


def broken(promise: str, what: str, file: str, old: str, new: str, *more: tuple[str, str]) -> Mutation:
    """Returns a mutation of one edit or more."""
    return Mutation(promise, what, file, ((old, new), *more))
