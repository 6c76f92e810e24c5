"""`distrag doctor`."""

from __future__ import annotations


def run_doctor(words: list[str]) -> None:
    """Runs `distrag doctor`."""
    raise NotImplementedError
